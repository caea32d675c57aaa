//! The user's files that a reward program consists of, as far as its command line and its imports name them.
//!
//! A resumed run compares their contents. They are found without running anything: the scripts that a command line or another script
//! names, and the Python modules next to them that their `import` statements name, also within functions. Installed packages are not part
//! of a program.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Returns the files of a program that `sh -c` runs, as far as its command line and its scripts name them, with their contents.
pub(crate) fn program_files(line: &str) -> Vec<(String, Vec<u8>)> {
    Sources::for_command(line, &std::env::current_dir().unwrap_or_default())
}

/// Returns the files of a Python function or class, `module.name`, and the files next to them that they import, with their contents.
pub(crate) fn function_files(path: &str) -> Vec<(String, Vec<u8>)> {
    let module = path.rsplit_once('.').map_or("", |(module, _)| module).replace('.', "/");
    source_files(&[format!("{module}.py"), format!("{module}/__init__.py")])
}

/// Returns the files of Python modules, and the files next to them that they import, with their contents.
pub(super) fn source_files(files: &[String]) -> Vec<(String, Vec<u8>)> {
    Sources::for_modules(files, &std::env::current_dir().unwrap_or_default())
}

/// Extensions of scripts.
const SCRIPTS: [&str; 8] = ["py", "sh", "bash", "pl", "rb", "js", "lua", "jl"];
/// Maximum size in bytes of a file whose content is compared.
const MAX_SOURCE: u64 = 4 << 20;
/// Number of characters of a shell script that are searched for other scripts.
const MAX_SHELL: usize = 64 << 10;
/// Maximum number of files.
const MAX_FILES: usize = 200;

/// The files of a program: names that do not depend on where the program is, with the contents.
#[derive(Debug, Default)]
struct Sources {
    files: BTreeMap<String, Vec<u8>>,
    /// The real paths of these files, without links.
    seen: Vec<PathBuf>,
}

impl Sources {
    /// Returns the files of a command line for `sh -c`, in the folder `here`.
    fn for_command(line: &str, here: &Path) -> Vec<(String, Vec<u8>)> {
        let mut sources = Self::default();
        sources.add_words(line, &[here]);
        sources.files.into_iter().collect()
    }

    /// Returns the files of a Python function whose imported modules are in `files`, in the folder `here`.
    fn for_modules(files: &[String], here: &Path) -> Vec<(String, Vec<u8>)> {
        let mut sources = Self::default();
        for file in files {
            let path = here.join(file);
            sources.add(&path, here, here);
        }
        sources.files.into_iter().collect()
    }

    /// Adds the scripts that are words of `text`, relative to one of the `folders`, and the modules after `-m`.
    fn add_words(&mut self, text: &str, folders: &[&Path]) {
        let words: Vec<&str> =
            text.split_whitespace().map(|word| word.trim_matches(['"', '\'', ';', '(', ')'])).collect();
        for (at, word) in words.iter().enumerate() {
            for folder in folders {
                if at > 0 && words[at - 1] == "-m" && word.chars().all(|c| c.is_alphanumeric() || "_.".contains(c)) {
                    let module = folder.join(word.replace('.', "/"));
                    for path in [module.with_extension("py"), module.join("__main__.py")] {
                        self.add(&path, folder, folder);
                    }
                }
                let path = folder.join(word);
                if is_script(&path) && !is_installed(&path) {
                    self.add(&path, path.parent().unwrap_or(folder), folder);
                }
            }
        }
    }

    /// Adds a file, and the files that it names. Its name is its path below `root`, or else below the folder of its outermost package;
    /// `here` is the working directory.
    fn add(&mut self, path: &Path, root: &Path, here: &Path) {
        let Ok(real) = path.canonicalize() else { return };
        let is_small = std::fs::metadata(&real).is_ok_and(|data| data.is_file() && data.len() <= MAX_SOURCE);
        if !is_small || self.seen.contains(&real) || self.seen.len() >= MAX_FILES {
            return;
        }
        let Ok(bytes) = std::fs::read(&real) else { return };
        self.seen.push(real);
        let root = if path.starts_with(root) { root.to_path_buf() } else { package_root(path) };
        let mut name = path.strip_prefix(&root).unwrap_or(path).to_string_lossy().into_owned();
        while self.files.contains_key(&name) {
            name.push('\'');
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        self.files.insert(name, bytes);
        let folder = path.parent().unwrap_or(here);
        if path.extension().is_some_and(|end| end == "py") {
            let package = package_root(path);
            for module in imported(&text) {
                for path in module_files(&module, folder, &[package.as_path(), here]) {
                    self.add(&path, &root, here);
                }
            }
        } else if is_shell_script(path, &text) {
            let begin: String = text.chars().take(MAX_SHELL).collect();
            self.add_words(&begin, &[here, folder]);
        }
    }
}

/// Returns the files of a module that a file in `folder` imports, from one of the `roots` or, with dots before its name, from the packages
/// around the file: the file of the module, and the files of the packages that it is in.
fn module_files(module: &str, folder: &Path, roots: &[&Path]) -> Vec<PathBuf> {
    let name = module.trim_start_matches('.');
    let searched: Vec<&Path> = match module.len() - name.len() {
        0 => roots.iter().copied().filter(|root| !is_installed(root)).collect(),
        dots => folder.ancestors().nth(dots - 1).into_iter().collect(),
    };
    let mut files = Vec::new();
    for root in searched {
        let mut at = root.to_path_buf();
        for part in name.split('.').filter(|part| !part.is_empty()) {
            at.push(part);
            files.extend([at.with_extension("py"), at.join("__init__.py")].into_iter().filter(|path| path.is_file()));
        }
    }
    files
}

/// Returns whether a file is a script: by its name, or by its first line.
fn is_script(path: &Path) -> bool {
    let extension = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
    if !path.is_file() {
        return false;
    }
    let begins = || {
        let mut begin = [0; 2];
        File::open(path).is_ok_and(|mut file| file.read_exact(&mut begin).is_ok() && begin == *b"#!")
    };
    SCRIPTS.contains(&extension) || begins()
}

/// Returns whether a script is a shell script.
fn is_shell_script(path: &Path, text: &str) -> bool {
    let begin = text.lines().next().unwrap_or_default();
    path.extension().is_some_and(|end| end == "sh" || end == "bash")
        || (begin.starts_with("#!") && begin.trim_end().ends_with("sh"))
}

/// Returns whether a path belongs to an installed package or to Python itself.
fn is_installed(path: &Path) -> bool {
    let is_python_folder = |name: &str| {
        ["site-packages", "dist-packages"].contains(&name)
            || name.strip_prefix("python3").is_some_and(|rest| rest.starts_with('.'))
    };
    let is_program = path.parent().is_some_and(|folder| ["/bin", "/usr/bin"].map(Path::new).contains(&folder));
    is_program
        || path.components().any(|part| match part {
            Component::Normal(name) => name.to_str().is_some_and(is_python_folder),
            _ => false,
        })
}

/// Returns the folder that contains the outermost package of a Python file.
fn package_root(path: &Path) -> PathBuf {
    let mut folder = path.parent().unwrap_or(path);
    while folder.join("__init__.py").is_file()
        && let Some(parent) = folder.parent()
    {
        folder = parent;
    }
    folder.to_path_buf()
}

/// Returns the modules that a Python text imports; a name that is imported from a module may be a module too, and is included.
fn imported(text: &str) -> Vec<String> {
    let mut modules = Vec::new();
    // A statement continues on the next line inside parentheses and after a backslash.
    let whole = text.replace("\\\n", " ");
    let mut lines = whole.lines();
    while let Some(line) = lines.next() {
        let statement = line.trim();
        if let Some(list) = statement.strip_prefix("import ") {
            modules.extend(names(list));
        } else if let Some((module, list)) =
            statement.strip_prefix("from ").and_then(|rest| rest.split_once(" import "))
        {
            let mut list = list.to_string();
            while list.contains('(')
                && !list.contains(')')
                && let Some(more) = lines.next()
            {
                list = format!("{}{}", uncommented(&list), more);
            }
            let module = module.trim();
            modules.push(module.to_string());
            let dot = if module.ends_with('.') { "" } else { "." };
            modules.extend(names(&list.replace(['(', ')'], " ")).map(|name| format!("{module}{dot}{name}")));
        }
    }
    modules
}

/// Returns the names in a list of imports, without the names that they are renamed to.
fn names(list: &str) -> impl Iterator<Item = String> {
    let list = uncommented(list);
    let list = list.split(';').next().unwrap_or_default().to_string();
    let names: Vec<String> = list
        .split(',')
        .filter_map(|name| name.split_whitespace().next())
        .filter(|name| name.chars().all(|c| c.is_alphanumeric() || "_.".contains(c)))
        .map(String::from)
        .collect();
    names.into_iter()
}

fn uncommented(line: &str) -> String {
    line.split('#').next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn file_names(files: &[(String, Vec<u8>)]) -> Vec<&str> {
        files.iter().map(|(name, _)| name.as_str()).collect()
    }

    const PROGRAM: [(&str, &str); 10] = [
        (
            "judge.py",
            "import json, helper as h\nfrom kit import (deep,  # mine\n    other)\ndef f():\n    import late\n",
        ),
        ("helper.py", "from judge import f\n"),
        ("late.py", "import gone\n"),
        ("kit/__init__.py", ""),
        ("kit/deep.py", "from . import near\nfrom ..kit.far import x\n"),
        ("kit/near.py", ""),
        ("kit/far.py", ""),
        ("unused.py", ""),
        ("run.sh", "exec python3 judge.py --words words.txt\n"),
        ("words.txt", "good\n"),
    ];

    #[test]
    fn a_command_line_has_its_scripts_and_the_modules_beside_them_that_they_import() {
        let dir = folder(&PROGRAM);
        let expected =
            ["helper.py", "judge.py", "kit/__init__.py", "kit/deep.py", "kit/far.py", "kit/near.py", "late.py"];
        let files = |line: &str| Sources::for_command(line, dir.path());
        assert_eq!(file_names(&files("python3 judge.py --log words.txt")), expected);
        // Under the same names from elsewhere.
        let whole = format!("python3 '{}'", dir.path().join("judge.py").display());
        assert_eq!(file_names(&Sources::for_command(&whole, Path::new("/"))), expected);
        assert_eq!(file_names(&files("python3 -m judge")), expected);
        assert_eq!(file_names(&files("sh run.sh")), [&expected[..], &["run.sh"]].concat());
        assert_eq!(file_names(&files("python3 words.txt /bin/sh")), [""; 0]);
    }

    #[test]
    fn a_function_has_the_modules_that_it_imports_later_too_and_no_installed_ones() {
        let dir = folder(&PROGRAM);
        let found = Sources::for_modules(&["helper.py".into()], dir.path());
        assert!(file_names(&found).contains(&"late.py") && !file_names(&found).contains(&"unused.py"), "{found:?}");
        // A package elsewhere is named by itself; of an installed module only the package counts.
        let other = folder(&[
            ("lib/mine/__init__.py", ""),
            ("lib/mine/score.py", "import mine.words, top\n"),
            ("lib/mine/words.py", ""),
            ("lib/top.py", ""),
            ("site-packages/given/__init__.py", ""),
            ("site-packages/given/score.py", "import torch\nfrom .words import x\n"),
            ("site-packages/given/words.py", ""),
            ("site-packages/torch/__init__.py", ""),
        ]);
        let files = |file: &str| Sources::for_modules(&[other.path().join(file).to_string_lossy().into()], dir.path());
        assert_eq!(
            file_names(&files("lib/mine/score.py")),
            ["mine/__init__.py", "mine/score.py", "mine/words.py", "top.py"]
        );
        assert_eq!(file_names(&files("site-packages/given/score.py")), ["given/score.py", "given/words.py"]);
    }

    #[test]
    fn changed_contents_are_others_and_links_in_a_circle_end() {
        let dir = folder(&PROGRAM);
        let files = || Sources::for_command("python3 judge.py", dir.path());
        let before = files();
        fs::write(dir.path().join("kit/near.py"), "changed").unwrap();
        let after = files();
        assert_eq!(file_names(&before), file_names(&after));
        assert_ne!(before, after);
        std::os::unix::fs::symlink(dir.path(), dir.path().join("kit/again")).unwrap();
        assert_eq!(files().len(), before.len());
    }
}
