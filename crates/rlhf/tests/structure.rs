//! The layout of the sources: which module imports which, how long functions are, how comments begin.

mod source;

use source::{Code, CodePath, Function, comments};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// Code lines in the body of a function, at most.
const MAX_LINES: usize = 80;
/// Parameters besides `self`, at most.
const MAX_PARAMS: usize = 6;
/// First words that no comment may have. A comment starts with what the thing is or does.
const RIDDLES: [&str; 8] = ["What ", "Who ", "Whom ", "Whose ", "Those ", "That of ", "How ", "Whatever "];

/// One source file, as the module it is.
struct Module {
    /// Path below `src/`.
    file: String,
    /// Declared in the tree of `main.rs`, the program, and not in that of `lib.rs`.
    program: bool,
    code: Code,
}

/// The modules of `src/` by name (`main`, `lib`, `model`, `model::decoder`), without test code.
struct Program {
    modules: BTreeMap<String, Module>,
}

/// An import between two modules: where the first of its kind stands, as `file:line: path`.
type Arrows = BTreeMap<(String, String), String>;

impl Program {
    /// Follows the `mod` declarations from `lib.rs` and `main.rs`; `read` returns a file below `src/`, if it exists.
    fn load(read: impl Fn(&str) -> Option<String>) -> Self {
        let mut modules = BTreeMap::new();
        let mut open: Vec<(String, Vec<String>, bool)> =
            vec![("lib".into(), vec!["lib.rs".into()], false), ("main".into(), vec!["main.rs".into()], true)];
        while let Some((name, candidates, program)) = open.pop() {
            let Some((file, text)) = candidates.iter().find_map(|file| Some((file.clone(), read(file)?))) else {
                panic!("module {name}: expected one of the files {candidates:?}");
            };
            let code = Code::read(&text);
            for child in &code.modules {
                let child = join(&name, child);
                let path = child.replace("::", "/");
                open.push((child, vec![format!("{path}.rs"), format!("{path}/mod.rs")], program));
            }
            modules.insert(name, Module { file, program, code });
        }
        Self { modules }
    }

    fn of_this_crate() -> Self {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        Self::load(|file| std::fs::read_to_string(src.join(file)).ok())
    }

    /// The module that `path`, written in the module `from`, leads to; `None` for other crates, types and variables.
    fn target(&self, from: &str, path: &[String]) -> Option<String> {
        self.follow(from, path, 0)
    }

    fn follow(&self, from: &str, path: &[String], depth: usize) -> Option<String> {
        let root = if self.modules[from].program { "main" } else { "lib" };
        let (mut at, mut rest) = match path[0].as_str() {
            "crate" => (root.to_string(), &path[1..]),
            "rlhf" if root == "main" => ("lib".to_string(), &path[1..]),
            "self" | "super" => (from.to_string(), path),
            child if self.modules.contains_key(&join(from, child)) => (from.to_string(), path),
            _ => return None,
        };
        while let Some((name, after)) = rest.split_first() {
            match name.as_str() {
                "self" => {}
                "super" => at = at.rsplit_once("::").map_or(root.to_string(), |(parent, _)| parent.to_string()),
                name if self.modules.contains_key(&join(&at, name)) => at = join(&at, name),
                // A name that the module imports itself leads to where it is defined.
                name => match self.binding(&at, name) {
                    Some(path) if depth < 8 => return self.follow(&at, &[&path[..], after].concat(), depth + 1),
                    _ => break,
                },
            }
            rest = after;
        }
        Some(at)
    }

    /// The path that a `use` declaration of `module` binds `name` to.
    fn binding(&self, module: &str, name: &str) -> Option<Vec<String>> {
        let mut paths = self.modules[module].code.paths().into_iter();
        paths.find(|path| path.binds.as_deref() == Some(name)).map(|path| path.segments)
    }

    /// Imports between files. A parent that only re-exports an item of its child does not depend on the child.
    fn arrows(&self) -> Arrows {
        let mut arrows = Arrows::new();
        for (name, module) in &self.modules {
            let used = module.code.names_in_use();
            let facade =
                |path: &CodePath| path.reexport && path.binds.as_deref().is_some_and(|name| !used.contains(name));
            for path in module.code.paths().into_iter().filter(|path| !facade(path)) {
                let Some(target) = self.target(name, &path.segments).filter(|target| target != name) else { continue };
                let place = format!("{}:{}: {}", module.file, path.line, path.segments.join("::"));
                arrows.entry((name.clone(), target)).or_insert(place);
            }
        }
        arrows
    }

    /// Imports between the modules at the top; the root of the library only declares and re-exports.
    fn top_arrows(&self) -> Arrows {
        let mut top = Arrows::new();
        for ((from, to), place) in self.arrows() {
            let (from, to) = (first(&from), first(&to));
            if from != to && from != "lib" && to != "lib" {
                top.entry((from.to_string(), to.to_string())).or_insert(place);
            }
        }
        top
    }

    fn top_modules(&self) -> BTreeSet<&str> {
        self.modules.keys().map(|name| first(name)).filter(|name| *name != "lib").collect()
    }
}

fn join(parent: &str, child: &str) -> String {
    if parent == "lib" || parent == "main" { child.to_string() } else { format!("{parent}::{child}") }
}

fn first(module: &str) -> &str {
    module.split("::").next().unwrap()
}

/// The rows of the table between `<!-- arrows -->` and `<!-- /arrows -->`: each module with what it may import.
fn documented_arrows(page: &str) -> BTreeMap<String, BTreeSet<String>> {
    let (_, table) = page.split_once("<!-- arrows -->").expect("docs/internals/design.md: expected `<!-- arrows -->`");
    let (table, _) =
        table.split_once("<!-- /arrows -->").expect("docs/internals/design.md: expected `<!-- /arrows -->`");
    let names = |cell: &str| -> BTreeSet<String> {
        let names = cell.split(',').map(|name| name.trim().trim_matches('`').to_string());
        names.filter(|name| !["", "-", "nothing"].contains(&name.as_str())).collect()
    };
    let rows = table.lines().filter_map(|line| line.trim().strip_prefix('|')?.strip_suffix('|')?.split_once('|'));
    let rows = rows.filter(|(module, _)| module.contains('`'));
    rows.flat_map(|(modules, imports)| {
        names(modules).into_iter().map(|module| (module, names(imports))).collect::<Vec<_>>()
    })
    .collect()
}

/// Differences between the imports of the code and those of the page.
fn differences(program: &Program, page: &str) -> Vec<String> {
    let (found, documented) = (program.top_arrows(), documented_arrows(page));
    let modules = program.top_modules();
    let mut problems = Vec::new();
    for module in modules.iter().filter(|module| !documented.contains_key(**module)) {
        problems.push(format!("`{module}` has no row in the table"));
    }
    for (module, imports) in &documented {
        for name in std::iter::once(module).chain(imports).filter(|name| !modules.contains(name.as_str())) {
            problems.push(format!("the row of `{module}` names `{name}`, which is not a module at the top of src/"));
        }
        for to in imports.iter().filter(|to| !found.contains_key(&(module.clone(), (*to).clone()))) {
            problems.push(format!("the row of `{module}` has `{to}`, which nothing in `{module}` imports"));
        }
    }
    for ((from, to), place) in &found {
        if documented.get(from).is_some_and(|imports| !imports.contains(to)) {
            problems.push(format!("`{from}` must not import `{to}`: {place}"));
        }
    }
    problems
}

/// The table of the page as the code has it, modules above those that they import.
fn table(program: &Program) -> String {
    let found = program.top_arrows();
    let imports = |module: &str| -> Vec<&str> {
        found.keys().filter(|(from, _)| from == module).map(|(_, to)| to.as_str()).collect()
    };
    let (mut rows, mut left) = (Vec::new(), program.top_modules());
    while !left.is_empty() {
        let imported: BTreeSet<&str> = left.iter().flat_map(|module| imports(module)).collect();
        // In a cycle, every module is imported: all that is left is one layer.
        let top: Vec<&str> = left.iter().copied().filter(|module| !imported.contains(module)).collect();
        let layer = if top.is_empty() { left.iter().copied().collect() } else { top };
        for module in layer {
            left.remove(module);
            let names: Vec<String> = imports(module).into_iter().map(|name| format!("`{name}`")).collect();
            rows.push(format!("| `{module}` | {} |", names.join(", ")));
        }
    }
    format!("| module | may import |\n|---|---|\n{}\n", rows.join("\n"))
}

/// Groups of modules each of which reaches the others, with the imports inside the group.
fn cycles(arrows: &Arrows) -> Vec<String> {
    let mut reach: HashMap<&str, BTreeSet<&str>> = HashMap::new();
    for start in arrows.keys().map(|(from, _)| from.as_str()) {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(at) = open.pop() {
            let next = arrows.keys().filter(|(from, _)| from == at).map(|(_, to)| to.as_str());
            open.extend(next.filter(|to| seen.insert(*to)).collect::<Vec<_>>());
        }
        reach.insert(start, seen);
    }
    let mutual = |a: &str, b: &str| reach[a].contains(b) && reach.get(b).is_some_and(|seen| seen.contains(a));
    let inside: Vec<_> = arrows.iter().filter(|((from, to), _)| mutual(from, to)).collect();
    let groups: BTreeSet<Vec<&str>> = inside
        .iter()
        .map(|((from, _), _)| reach[from.as_str()].iter().copied().filter(|to| mutual(from, to)).collect())
        .collect();
    let describe = |group: Vec<&str>| {
        let own = inside.iter().filter(|((from, _), _)| group.contains(&from.as_str()));
        let lines: Vec<String> = own.map(|((from, to), place)| format!("    {from} -> {to}    {place}")).collect();
        format!("cycle of {}: {}\n{}", group.len(), group.join(", "), lines.join("\n"))
    };
    groups.into_iter().map(describe).collect()
}

/// Comments that begin with one of `RIDDLES`, as `line: beginning`.
fn riddles(text: &str) -> Vec<String> {
    let riddle = |text: &str| RIDDLES.iter().any(|start| text.starts_with(start));
    let found = comments(text).into_iter().filter(|(_, text)| riddle(text));
    found.map(|(line, text)| format!("{line}: {}", text.chars().take(80).collect::<String>())).collect()
}

/// Source files of both crates, by their path in the repository.
fn sources() -> Vec<(String, String)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
    let mut files = Vec::new();
    let mut open = vec![crates.join("rlhf/src"), crates.join("tch-ext/src")];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                open.push(entry);
            } else if entry.extension().is_some_and(|extension| extension == "rs") {
                let name = entry.strip_prefix(&crates).unwrap().display().to_string();
                files.push((name, std::fs::read_to_string(&entry).unwrap()));
            }
        }
    }
    files.sort();
    files
}

/// Prints the `rows` with the largest numbers, for `--nocapture`.
#[expect(clippy::print_stdout, reason = "the tables are the output of this test")]
fn print_longest(title: &str, mut rows: Vec<(usize, String)>) {
    rows.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    println!("\n{title}");
    rows.iter().take(20).for_each(|(number, name)| println!("{number:>6}  {name}"));
}

fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "{} found:\n{}", problems.len(), problems.join("\n"));
}

#[test]
#[expect(clippy::print_stdout, reason = "the table that the code has, for `--nocapture`")]
fn imports_point_down_as_on_the_design_page() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/internals/design.md");
    let program = Program::of_this_crate();
    println!("{}", table(&program));
    assert_none(&differences(&program, &std::fs::read_to_string(page).unwrap()));
}

#[test]
fn no_import_cycle_is_left() {
    let program = Program::of_this_crate();
    let mut problems = cycles(&program.top_arrows());
    // A file may use the items of the module that it is a part of.
    let is_part = |from: &str, to: &str| from.starts_with(&format!("{to}::"));
    let within = program.arrows().into_iter().filter(|((from, to), _)| first(from) == first(to) && !is_part(from, to));
    problems.extend(cycles(&within.collect()));
    assert_none(&problems);
}

#[test]
fn the_equations_import_nothing_of_this_crate() {
    let program = Program::of_this_crate();
    let arrows = program.arrows().into_iter().filter(|((from, _), _)| from == "rl::math");
    assert!(program.modules.contains_key("rl::math"));
    assert_none(
        &arrows.map(|((from, to), place)| format!("`{from}` must not import `{to}`: {place}")).collect::<Vec<_>>(),
    );
}

#[test]
fn functions_fit_on_a_screen_and_take_few_parameters() {
    let sources = sources();
    let functions: Vec<(&str, Function)> = sources
        .iter()
        .flat_map(|(file, text)| {
            Code::read(text).functions().into_iter().map(move |function| (file.as_str(), function))
        })
        .collect();
    let named = |file: &str, f: &Function| format!("{file}:{}: {}", f.line, f.name);
    print_longest("lines of files", sources.iter().map(|(file, text)| (text.lines().count(), file.clone())).collect());
    print_longest(
        "code lines of functions",
        functions.iter().map(|(file, f)| (f.code_lines, named(file, f))).collect(),
    );
    print_longest("parameters besides self", functions.iter().map(|(file, f)| (f.params, named(file, f))).collect());
    let too_large = functions.iter().filter(|(_, f)| f.code_lines > MAX_LINES || f.params > MAX_PARAMS);
    let problems: Vec<String> = too_large
        .map(|(file, f)| format!("{}: {} lines, {} parameters", named(file, f), f.code_lines, f.params))
        .collect();
    assert_none(&problems);
}

#[test]
fn comments_begin_with_what_the_thing_is() {
    let found =
        |(file, text): (String, String)| riddles(&text).into_iter().map(move |riddle| format!("{file}:{riddle}"));
    assert_none(&sources().into_iter().flat_map(found).collect::<Vec<_>>());
}

// The reader itself, on small sources. -------------------------------------------------------------------------------

/// A program of these files.
fn program(files: &[(&str, &str)]) -> Program {
    Program::load(|file| files.iter().find(|(name, _)| *name == file).map(|(_, text)| text.to_string()))
}

fn pairs(arrows: &Arrows) -> Vec<String> {
    arrows.keys().map(|(from, to)| format!("{from} > {to}")).collect()
}

/// Three modules, one with two children: `train > data`, `train > model`, and the program above them.
const FILES: [(&str, &str); 7] = [
    ("lib.rs", "pub mod data;\npub mod model;\npub mod train;\nmod error;\npub use error::Error;"),
    ("main.rs", "mod cli;\nfn main() { cli::run(); }"),
    ("cli.rs", "use rlhf::train::{self, ppo as run_ppo};\nuse rlhf::Error;"),
    ("data.rs", "/// See [`crate::train`].\npub struct Rows; // crate::train\nconst A: &str = \"crate::train\";"),
    ("error.rs", "pub enum Error {}"),
    ("model.rs", "mod decoder;\npub use decoder::Decoder;\npub(crate) const WIDTH: usize = 1;"),
    ("model/decoder.rs", "use super::WIDTH;\npub struct Decoder;"),
];

#[test]
fn arrows_are_read_from_use_trees_and_from_paths_in_code() {
    let train = ("train.rs", "use crate::{data::Rows, model::Decoder};\nfn f() -> crate::Error { loop {} }");
    let program = program(&[&FILES[..], &[train]].concat());
    let expected = ["cli > error", "cli > train", "main > cli", "train > data", "train > error", "train > model"];
    assert_eq!(pairs(&program.top_arrows()), expected);
    // `Decoder` leads to where it is defined; model.rs only re-exports it.
    let all = pairs(&program.arrows());
    assert!(
        all.contains(&"train > model::decoder".into()) && all.contains(&"model::decoder > model".into()),
        "{all:?}"
    );
    assert!(!all.contains(&"model > model::decoder".into()), "{all:?}");
    assert!(program.arrows()[&("train".into(), "data".into())].starts_with("train.rs:1: crate::data::Rows"));
}

#[test]
fn tests_have_no_arrows() {
    let source = "#[cfg(test)]\nuse crate::data::{Rows};\n#[cfg(test)]\nmod tests {\n use crate::model::Decoder;\n}\n\
                  #[test]\nfn t() { crate::data::f(); }\n#[cfg(not(test))]\nuse crate::Error;";
    let program = program(&[&FILES[..], &[("train.rs", source)]].concat());
    let from_train: Vec<String> = pairs(&program.arrows()).into_iter().filter(|a| a.starts_with("train")).collect();
    assert_eq!(from_train, ["train > error"]);
}

#[test]
fn an_arrow_that_the_page_lacks_and_one_that_nothing_uses_are_found() {
    let train = ("train.rs", "use crate::data::Rows;\nfn f() { crate::model::g() }");
    let program = program(&[&FILES[..], &[train]].concat());
    let page = |rows: &str| {
        format!("text\n<!-- arrows -->\n| module | may import |\n|---|---|\n{rows}<!-- /arrows -->\n| `x` | `y` |")
    };
    let whole = "| `main` | `cli` |\n| `cli` | `train`, `error` |\n| `data`, `error`, `model` | |\n";
    assert_eq!(differences(&program, &page(&format!("{whole}| `train` | `data`, `model` |\n"))), [""; 0]);
    assert_eq!(
        differences(&program, &page(&format!("{whole}| `train` | `data`, `error`, `optim` |\n"))),
        [
            "the row of `train` names `optim`, which is not a module at the top of src/",
            "the row of `train` has `error`, which nothing in `train` imports",
            "the row of `train` has `optim`, which nothing in `train` imports",
            "`train` must not import `model`: train.rs:2: crate::model::g",
        ]
    );
    assert_eq!(differences(&program, &page(whole)), ["`train` has no row in the table"]);
    let (written, rows) =
        (table(&program), "| `main` | `cli` |\n| `cli` | `error`, `train` |\n| `error` |  |\n| `train` |");
    assert!(written.contains(rows), "{written}");
    assert_eq!(differences(&program, &format!("<!-- arrows -->\n{written}<!-- /arrows -->")), [""; 0]);
}

#[test]
fn cycles_are_found_between_modules_and_between_files_of_one() {
    let (data, train) = (("data.rs", "use crate::train::f;"), ("train.rs", "use crate::data::Rows;"));
    let model = ("model.rs", "mod decoder;\nuse decoder::Decoder;\npub(crate) const WIDTH: usize = 1;");
    let rest: Vec<_> = FILES.into_iter().filter(|(name, _)| !["data.rs", "model.rs"].contains(name)).collect();
    let program = program(&[&rest[..], &[data, train, model]].concat());
    let found = cycles(&program.arrows());
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].starts_with("cycle of 2: data, train\n    data -> train    data.rs:1: crate::train::f\n"),
        "{found:?}"
    );
    assert!(found[1].starts_with("cycle of 2: model, model::decoder\n"), "{found:?}");
    assert_eq!(cycles(&program.top_arrows()).len(), 1);
}

#[test]
fn functions_are_measured_without_comments_blank_lines_and_self() {
    let source = r##"
impl A {
    pub fn short<F: Fn(A, B) -> C>(&mut self, map: HashMap<A, B>, f: F,) -> fn(A, B) -> C {
        let (a, b) = ('}', "{ // \" }");

        // A comment.
        let c = r#"
            fn not_this() {"#;
        fn inner<'a>(x: &'a str) {}
    }
}
extern "C" {
    fn declared(a: A, b: B, c: C);
}
trait T { fn none(); }
"##;
    let measured: Vec<_> =
        Code::read(source).functions().into_iter().map(|f| (f.name, f.line, f.code_lines, f.params)).collect();
    assert_eq!(measured, [("short".into(), 3, 4, 2), ("inner".into(), 9, 0, 1), ("none".into(), 15, 0, 0)]);
}

#[test]
fn a_comment_with_a_forbidden_first_word_is_found() {
    let source = "/// What it does.\nfn a() {}\n/// Shows\n/// What it is.\nfn b() {}\n//! How many.\n// Those of x\nlet x = 1; // What\n// Whether\n";
    assert_eq!(riddles(source), ["1: What it does.", "6: How many.", "7: Those of x"]);
}
