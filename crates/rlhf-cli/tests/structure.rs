//! The layout of the sources, where the compiler does not keep it: imports in circles, what the crates depend on, how long functions are,
//! how comments begin.

mod source;

use source::{Code, CodePath, Function, comments};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Code lines in the body of a function, at most.
const MAX_LINES: usize = 80;
/// Parameters besides `self`, at most.
const MAX_PARAMS: usize = 6;
/// First words that no comment may have. A comment starts with what the thing is or does.
const RIDDLES: [&str; 8] = ["What ", "Who ", "Whom ", "Whose ", "Those ", "That of ", "How ", "Whatever "];

/// The crates whose modules are read, by their folders.
const CRATES: [&str; 6] = ["math-verify", "base", "hub", "lm", "rlhf", "rlhf-cli"];
/// Crates of the workspace that a crate may depend on: those below it.
const BELOW: [(&str, &[&str]); 8] = [
    ("math-verify", &[]),
    ("rlhf-derive", &[]),
    ("tch-ext", &[]),
    ("rlhf-base", &["rlhf-derive", "tch-ext"]),
    ("rlhf-hub", &["rlhf-base"]),
    ("rlhf-lm", &["rlhf-base", "rlhf-hub", "tch-ext"]),
    ("rlhf", &["math-verify", "rlhf-base", "rlhf-hub", "rlhf-lm", "tch-ext"]),
    ("rlhf-cli", &["rlhf", "tch-ext"]),
];
/// Packages of the program that no library needs: its command line, servers and views.
const OF_THE_PROGRAM: [&str; 7] = ["clap", "clap_builder", "axum", "hyper-util", "ratatui", "rustyline", "tokio"];

/// Most fields of a struct of the trainers.
const MOST_FIELDS: usize = 12;

/// Files whose business the names of settings are: their defaults by preset, and the tables of other systems' names.
const TABLES: [&str; 8] = [
    "rlhf/src/run/group_names.rs",
    "rlhf/src/settings/presets.rs",
    "rlhf-cli/src/cli/foreign/chat.rs",
    "rlhf-cli/src/cli/foreign/files.rs",
    "rlhf-cli/src/cli/foreign/table.rs",
    "rlhf-cli/src/cli/foreign/trl.rs",
    "rlhf-cli/src/cli/help.rs",
    "rlhf-cli/src/cli/implied.rs",
];

/// Most literals outside of them that are the name of a setting. Many are something else of the same name: a key of a model's file, a
/// column, a parameter of a request. The number may only fall.
const MOST_NAMES: usize = 700;

/// Places that look into a text that is called as an error is, by file. Most are the words of other programs: of libtorch, clap, serde and
/// the operating system; or a line of chat, or of a file. Those of `dist/failure.rs` and `train/pipeline.rs` are ours, and are to go.
const READ_ERRORS: [(&str, usize); 12] = [
    ("base/src/device.rs", 1),
    ("base/src/dist/failure.rs", 3),
    ("base/src/error.rs", 2),
    ("base/src/refusal.rs", 1),
    ("rlhf-cli/src/cli/chat.rs", 1),
    ("rlhf-cli/src/cli/yaml.rs", 1),
    ("rlhf-cli/src/doctor/network.rs", 1),
    ("rlhf-cli/src/lib.rs", 1),
    ("rlhf-cli/src/session/step/open.rs", 1),
    ("rlhf/src/compat/step/settings.rs", 1),
    ("rlhf/src/report/read.rs", 2),
    ("rlhf/src/train/pipeline.rs", 1),
];

/// One source file, as the module it is.
struct Module {
    /// Path below `src/`.
    file: String,
    code: Code,
}

/// The modules of a crate's `src/` by name (`lib`, `model`, `model::decoder`), without test code.
struct Program {
    modules: BTreeMap<String, Module>,
}

/// An import between two modules: where the first of its kind stands, as `file:line: path`.
type Arrows = BTreeMap<(String, String), String>;

impl Program {
    /// Follows the `mod` declarations from `lib.rs`; `read` returns a file below `src/`, if it exists.
    fn load(read: impl Fn(&str) -> Option<String>) -> Self {
        let mut modules = BTreeMap::new();
        let mut open: Vec<(String, Vec<String>)> = vec![("lib".into(), vec!["lib.rs".into()])];
        while let Some((name, candidates)) = open.pop() {
            let Some((file, text)) = candidates.iter().find_map(|file| Some((file.clone(), read(file)?))) else {
                panic!("module {name}: expected one of the files {candidates:?}");
            };
            let code = Code::read(&text);
            for child in &code.modules {
                let child = join(&name, child);
                let path = child.replace("::", "/");
                open.push((child, vec![format!("{path}.rs"), format!("{path}/mod.rs")]));
            }
            modules.insert(name, Module { file, code });
        }
        Self { modules }
    }

    /// The crate in the folder `name`.
    fn of(name: &str) -> Self {
        let src = crates().join(name).join("src");
        Self::load(|file| std::fs::read_to_string(src.join(file)).ok())
    }

    /// The module that `path`, written in the module `from`, leads to; `None` for other crates, types and variables.
    fn target(&self, from: &str, path: &[String]) -> Option<String> {
        self.follow(from, path, 0)
    }

    fn follow(&self, from: &str, path: &[String], depth: usize) -> Option<String> {
        let (mut at, mut rest) = match path[0].as_str() {
            "crate" => ("lib".to_string(), &path[1..]),
            "self" | "super" => (from.to_string(), path),
            child if self.modules.contains_key(&join(from, child)) => (from.to_string(), path),
            _ => return None,
        };
        while let Some((name, after)) = rest.split_first() {
            match name.as_str() {
                "self" => {}
                "super" => at = at.rsplit_once("::").map_or("lib".to_string(), |(parent, _)| parent.to_string()),
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
}

fn join(parent: &str, child: &str) -> String {
    if parent == "lib" { child.to_string() } else { format!("{parent}::{child}") }
}

fn first(module: &str) -> &str {
    module.split("::").next().unwrap()
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
        let group_arrows = inside.iter().filter(|((from, _), _)| group.contains(&from.as_str()));
        let lines: Vec<String> =
            group_arrows.map(|((from, to), place)| format!("    {from} -> {to}    {place}")).collect();
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

/// The folder of the crates.
fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// Source files of all crates, by their path below the folder of the crates.
fn sources() -> Vec<(String, String)> {
    let crates = crates();
    let mut files = Vec::new();
    let mut open: Vec<PathBuf> =
        CRATES.iter().chain(&["derive", "tch-ext"]).map(|name| crates.join(name).join("src")).collect();
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

/// The packages that `name` is compiled with, itself among them: `cargo tree`.
fn tree(name: &str, depth: &str) -> Vec<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "tree",
        "--offline",
        "--locked",
        "--edges",
        "normal",
        "--prefix",
        "none",
        "--depth",
        depth,
        "-p",
        name,
    ]);
    let output = cargo.current_dir(crates()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split(' ').next()).map(String::from).collect()
}

/// Names of all settings.
fn settings() -> BTreeSet<&'static str> {
    use rlhf::schema::Settings as _;
    use rlhf::settings as s;
    let fields = [
        s::SftConfig::fields(),
        s::RewardConfig::fields(),
        s::DpoConfig::fields(),
        s::DistillConfig::fields(),
        s::PpoConfig::fields(),
        s::GenerateConfig::fields(),
        s::EvaluateConfig::fields(),
        s::ScoreConfig::fields(),
        s::ServeConfig::fields(),
    ];
    fields.into_iter().flatten().map(|field| field.name).collect()
}

#[test]
fn a_crate_depends_on_those_below_it_alone() {
    let ours: Vec<&str> = BELOW.iter().map(|(name, _)| *name).collect();
    for (name, below) in BELOW {
        let direct: BTreeSet<String> =
            tree(name, "1").into_iter().skip(1).filter(|found| ours.contains(&found.as_str())).collect();
        let problems: Vec<String> = direct
            .into_iter()
            .filter(|found| !below.contains(&found.as_str()))
            .map(|found| format!("`{name}` must not depend on `{found}`"))
            .collect();
        assert_none(&problems);
    }
}

#[test]
fn the_library_brings_no_command_line_server_or_view() {
    for name in ["rlhf", "rlhf-lm"] {
        let found = tree(name, "99");
        assert!(found.iter().any(|package| package == "tokenizers"), "{found:?}");
        let foreign: Vec<&String> = found.iter().filter(|package| OF_THE_PROGRAM.contains(&package.as_str())).collect();
        assert!(foreign.is_empty(), "{name} depends on {foreign:?}");
    }
    assert!(OF_THE_PROGRAM.iter().all(|package| tree("rlhf-cli", "99").iter().any(|found| found == package)));
    assert!(!tree("math-verify", "99").iter().any(|package| package == "tch"));
}

#[test]
fn no_import_cycle_is_left() {
    // A file may use the items of the module that it is a part of.
    let is_part = |from: &str, to: &str| from.starts_with(&format!("{to}::"));
    for name in CRATES {
        let program = Program::of(name);
        let mut problems = cycles(&program.top_arrows());
        let within =
            program.arrows().into_iter().filter(|((from, to), _)| first(from) == first(to) && !is_part(from, to));
        problems.extend(cycles(&within.collect()));
        assert_none(&problems);
    }
}

#[test]
fn the_equations_import_nothing_of_our_crates() {
    let equations = &Program::of("rlhf").modules["rl::math"];
    let ours = |path: &CodePath| path.segments[0] == "crate" || path.segments[0].starts_with("rlhf");
    let found = equations.code.paths().into_iter().filter(ours);
    assert_none(&found.map(|path| format!("{}: {}", path.line, path.segments.join("::"))).collect::<Vec<_>>());
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

#[test]
fn names_of_settings_are_in_the_schema_and_in_the_tables_of_other_systems() {
    let settings = settings();
    let is_name = |literal: &str| settings.contains(literal.trim_matches('"')) && literal.starts_with('"');
    let mut found = Vec::new();
    for (file, text) in sources().into_iter().filter(|(file, _)| !TABLES.contains(&file.as_str())) {
        let code = Code::read(&text);
        let names = code.tokens.iter().filter(|token| is_name(&token.literal));
        found.extend(names.map(|token| format!("{file}:{}: {}", token.line, token.literal)));
    }
    assert!(
        found.len() <= MOST_NAMES,
        "{} literals, expected at most {MOST_NAMES}:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn no_code_reads_the_text_of_an_error() {
    let values = ["e", "err", "error", "failure", "message", "reason", "refusal"];
    let methods = ["contains", "ends_with", "find", "split_once", "starts_with", "strip_prefix"];
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, text) in sources() {
        let tokens = Code::read(&text).tokens;
        let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
        for at in (0..tokens.len()).filter(|at| values.contains(&text(*at))) {
            let is_printed = [".", "to_string", "(", ")"].iter().zip(at + 1..).all(|(part, at)| text(at) == *part);
            let at_method = if is_printed { at + 5 } else { at + 1 };
            if text(at_method) == "." && methods.contains(&text(at_method + 1)) && text(at_method + 2) == "(" {
                found.entry(file.clone()).or_default().push(format!("{file}:{}: {}", tokens[at].line, text(at)));
            }
        }
    }
    let known = |file: &str| READ_ERRORS.iter().find(|(name, _)| *name == file).map_or(0, |(_, places)| *places);
    let more: Vec<String> = found
        .iter()
        .filter(|(file, places)| places.len() > known(file))
        .flat_map(|(_, places)| places.clone())
        .collect();
    assert_none(&more);
    let fewer = READ_ERRORS.iter().filter(|(file, places)| found.get(*file).map_or(0, Vec::len) < *places);
    assert_none(
        &fewer
            .map(|(file, _)| format!("{file}: fewer places than its number in READ_ERRORS: lower it"))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn structs_of_the_trainers_have_few_fields() {
    let is_of_trainers = |file: &str| {
        (file.starts_with("rlhf/src/train") || file.starts_with("rlhf/src/compat") || file == "rlhf/src/rl/learner.rs")
            && !file.ends_with("settings.rs")
    };
    let mut problems = Vec::new();
    for (file, text) in sources().into_iter().filter(|(file, _)| is_of_trainers(file)) {
        let structs = Code::read(&text).structs();
        let large = structs.into_iter().filter(|(_, fields)| *fields > MOST_FIELDS);
        problems.extend(large.map(|(name, fields)| format!("{file}: {name}: {fields} fields")));
    }
    assert_none(&problems);
}

// The reader itself, on small sources. -------------------------------------------------------------------------------

/// A program of these files.
fn program(files: &[(&str, &str)]) -> Program {
    Program::load(|file| files.iter().find(|(name, _)| *name == file).map(|(_, text)| text.to_string()))
}

fn pairs(arrows: &Arrows) -> Vec<String> {
    arrows.keys().map(|(from, to)| format!("{from} > {to}")).collect()
}

/// Four modules, one with a child: `cli > train`, and `train` imports what a test gives it.
const FILES: [(&str, &str); 6] = [
    ("lib.rs", "pub mod cli;\npub mod data;\npub mod model;\npub mod train;\nmod error;\npub use error::Error;"),
    ("cli.rs", "use crate::train::{self, ppo as run_ppo};\nuse crate::Error;"),
    ("data.rs", "/// See [`crate::train`].\npub struct Rows; // crate::train\nconst A: &str = \"crate::train\";"),
    ("error.rs", "pub enum Error {}"),
    ("model.rs", "mod decoder;\npub use decoder::Decoder;\npub(crate) const WIDTH: usize = 1;"),
    ("model/decoder.rs", "use super::WIDTH;\npub struct Decoder;"),
];

#[test]
fn arrows_are_read_from_use_trees_and_from_paths_in_code() {
    let train = ("train.rs", "use crate::{data::Rows, model::Decoder};\nfn f() -> crate::Error { loop {} }");
    let program = program(&[&FILES[..], &[train]].concat());
    let expected = ["cli > error", "cli > train", "train > data", "train > error", "train > model"];
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
fn fields_of_structs_are_counted_without_the_colons_of_their_types() {
    let source =
        "struct A<T: B> {\n #[x(a: b)]\n pub c: Map<K, fn(x: u8) -> V>,\n d: [E; 2],\n}\nstruct F(u8);\nstruct G;";
    assert_eq!(Code::read(source).structs(), [("A".to_string(), 2)]);
}

#[test]
fn a_comment_with_a_forbidden_first_word_is_found() {
    let source = "/// What it does.\nfn a() {}\n/// Shows\n/// What it is.\nfn b() {}\n//! How many.\n// Those of x\nlet x = 1; // What\n// Whether\n";
    assert_eq!(riddles(source), ["1: What it does.", "6: How many.", "7: Those of x"]);
}
