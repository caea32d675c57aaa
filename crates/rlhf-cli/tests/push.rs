//! Uploads to the hub, against `tests/hub/server.py`, which is as strict as the hub; `make test-part PART=clients` uploads to it with
//! `huggingface_hub` and compares.

use crate::cli::{PPO, Ran, SFT, Scratch};
use crate::support::{Child, output};
use rlhf::hub::push::{Destination, LocalFile, Pushed, Repository, open_folder};
use rlhf::hub::{Hub, Part};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::time::{Duration, Instant};

const TOKEN: &str = "hf_of_me";
const TO: &str = "me/tiny";

/// The server, which ends with this value.
struct Server {
    child: process::Child,
    url: String,
    home: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Files of more than 3000 bytes are uploaded in parts of 1000.
    fn start() -> Self {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/hub/server.py");
        let mut command = Command::new("python3");
        let mut child = command.arg(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line}")).to_string();
        let server = Self { child, url, home: tempfile::tempdir().unwrap() };
        let orgs = json!([{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}]);
        let users = json!({
            TOKEN: {"name": "me", "orgs": orgs},
            "hf_reads": {"name": "me", "orgs": [], "role": "read"},
            "hf_of_club": {"name": "club", "orgs": []},
            "hf_of_app": {"repos": ["lab/app"], "name": null},
        });
        server.set(&json!({"users": users, "multipart_over": 3000, "chunk_size": 1000}));
        server
    }

    fn set(&self, changes: &Value) {
        ureq::post(format!("{}/_set", self.url)).send(changes.to_string()).unwrap();
    }

    fn fault(&self, fault: &Value) {
        self.set(&json!({"faults": [fault]}));
    }

    fn text(&self, path: &str) -> String {
        ureq::get(format!("{}{path}", self.url)).call().unwrap().body_mut().read_to_string().unwrap()
    }

    fn get(&self, path: &str) -> Value {
        serde_json::from_str(&self.text(path)).unwrap()
    }

    /// Requests since the last call.
    fn asked(&self) -> Vec<Value> {
        self.get("/_log").as_array().unwrap().clone()
    }

    /// Their routes.
    fn routes(&self) -> Vec<String> {
        self.asked().iter().map(|entry| entry["route"].as_str().unwrap().to_string()).collect()
    }

    /// SHA-256 of each file of a branch, without `.gitattributes`.
    fn files(&self, branch: &str) -> BTreeMap<String, String> {
        let tree = self.get(&format!("/_tree/{TO}/{branch}"));
        let files = tree["files"].as_object().unwrap().iter();
        let files = files.map(|(name, hash)| (name.clone(), hash.as_str().unwrap().to_string()));
        files.filter(|(name, _)| name != ".gitattributes").collect()
    }

    fn titles(&self) -> Vec<String> {
        let tree = self.get(&format!("/_tree/{TO}/main"));
        serde_json::from_value(tree["titles"].clone()).unwrap()
    }

    fn hub(&self) -> Hub {
        Hub {
            endpoint: self.url.clone(),
            cache: self.home.path().join("hub"),
            token: Some(TOKEN.into()),
            certificates: None,
            offline: false,
            pause: Duration::from_millis(1),
            timeout: Duration::from_secs(30),
        }
    }

    fn repository(&self) -> Repository {
        self.hub().repository(&to(TO)).unwrap()
    }

    /// The program in the folder of `scratch`, with this hub and its token.
    fn command(&self, scratch: &Scratch, line: &str) -> Command {
        let mut command = scratch.command(line);
        command.env("HF_ENDPOINT", &self.url).env("HF_TOKEN", TOKEN).env("HF_HUB_OFFLINE", "0");
        for name in ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"] {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, scratch: &Scratch, line: &str) -> Ran {
        Ran::from(output(&mut self.command(scratch, line)))
    }
}

fn to(name: &str) -> Destination {
    Destination { name: name.into(), ..Destination::default() }
}

fn all(_: &str) -> bool {
    true
}

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(7) ^ seed).collect()
}

/// A folder with files of each kind: empty, small, large in one piece, and in four.
fn folder(server: &Server) -> PathBuf {
    let dir = server.home.path().join("model");
    fs::create_dir_all(dir.join("onnx")).unwrap();
    for (name, content) in [
        ("config.json", b"{\"model_type\": \"gpt2\"}".to_vec()),
        ("empty.txt", Vec::new()),
        ("README.md", b"---\ntags: [x]\n---\n".to_vec()),
        ("onnx/model.onnx", bytes(1, 2000)),
        ("model.safetensors", bytes(2, 3456)),
    ] {
        fs::write(dir.join(name), content).unwrap();
    }
    dir
}

fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn hashes(files: &[LocalFile], dir: &Path) -> BTreeMap<String, String> {
    let hash = |file: &LocalFile| sha256(&fs::read(dir.join(file.name())).unwrap());
    files.iter().map(|file| (file.name().to_string(), hash(file))).collect()
}

fn push(server: &Server, dir: &Path) -> Result<Pushed, String> {
    let files = open_folder(dir, &all).unwrap();
    server.repository().push(&files, "A title", false).map_err(|error| error.to_string())
}

#[test]
fn a_folder_is_pushed_once_and_comes_back_with_the_same_bytes() {
    let server = Server::start();
    let dir = folder(&server);
    let pushed = push(&server, &dir).unwrap();
    assert_eq!((pushed.files, pushed.uploaded), (5, 5456));
    let files = open_folder(&dir, &all).unwrap();
    assert_eq!(server.files("main"), hashes(&files, &dir));
    assert_eq!(server.titles(), ["initial commit", "A title"]);
    let log = server.asked();
    for entry in &log {
        let expected = if entry["host"] == "storage" || entry["route"] == "complete" {
            Value::Null
        } else {
            json!(format!("Bearer {TOKEN}"))
        };
        assert_eq!(entry["authorization"], expected, "{entry}");
    }
    let count = |route: &str| log.iter().filter(|entry| entry["route"] == route).count();
    assert_eq!([count("batch"), count("put"), count("complete"), count("verify"), count("commit")], [1, 5, 1, 2, 1]);

    // Nothing has changed: no commit.
    assert!(pushed.ignored.is_empty() && pushed.removed.is_none());
    let again = push(&server, &dir).unwrap();
    assert_eq!((again.files, again.uploaded, again.commit == pushed.commit), (0, 0, true));
    let routes = server.routes();
    assert!(!routes.contains(&"commit".to_string()) && !routes.contains(&"put".to_string()), "{routes:?}");

    // Only what has changed is committed; a large file whose bytes the hub has under another name is not sent.
    fs::write(dir.join("config.json"), "{}").unwrap();
    fs::copy(dir.join("onnx/model.onnx"), dir.join("copy.onnx")).unwrap();
    let changed = push(&server, &dir).unwrap();
    assert_eq!((changed.files, changed.uploaded), (2, 0));
    assert_eq!(server.files("main").len(), 6);

    // Through the download of this crate.
    let found = server.hub().find(Path::new(TO), None, Part::Model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        assert!(fs::read(found.join(name)).unwrap() == fs::read(dir.join(name)).unwrap(), "{name}");
    }
}

#[test]
fn weights_in_another_number_of_files_replace_those_that_were_there() {
    let server = Server::start();
    let dir = folder(&server);
    push(&server, &dir).unwrap();
    fs::rename(dir.join("model.safetensors"), dir.join("model-00001-of-00001.safetensors")).unwrap();
    fs::write(dir.join("model.safetensors.index.json"), "{}").unwrap();
    assert_eq!(push(&server, &dir).unwrap().removed.as_deref(), Some("model.safetensors"));
    let files = server.files("main");
    assert!(!files.contains_key("model.safetensors") && files.contains_key("model-00001-of-00001.safetensors"));
}

#[test]
fn an_upload_that_is_cut_continues_and_a_lost_response_makes_no_second_commit() {
    for (fault, puts) in [
        (json!({"route": "put", "cut": 100}), 6),
        (json!({"route": "put", "status": 503}), 6),
        (json!({"route": "put", "lose": true}), 6),
        (json!({"route": "complete", "status": 500}), 5),
        (json!({"route": "batch", "cut": 10}), 5),
        (json!({"route": "preupload", "status": 429, "headers": {"Retry-After": "0"}}), 5),
        (json!({"route": "verify", "lose": true}), 5),
        (json!({"route": "commit", "lose": true}), 5),
        (
            json!({"route": "commit", "status": 412, "body": "{\"error\": \"A commit has happened since. Please refresh\"}"}),
            5,
        ),
        (json!({"route": "commit", "status": 504}), 5),
        (json!({"route": "paths-info", "lose": true}), 5),
    ] {
        let server = Server::start();
        let dir = folder(&server);
        let repository = server.repository();
        server.asked();
        server.fault(&fault);
        let files = open_folder(&dir, &all).unwrap();
        repository.push(&files, "A title", false).unwrap_or_else(|error| panic!("{fault}: {error}"));
        assert_eq!(server.files("main"), hashes(&files, &dir), "{fault}");
        assert_eq!(server.titles().len(), 2, "{fault}");
        assert_eq!(server.routes().iter().filter(|route| *route == "put").count(), puts, "{fault}");
    }
}

#[test]
fn files_that_were_uploaded_before_a_failure_are_not_sent_again() {
    let server = Server::start();
    let dir = folder(&server);
    let refusal = json!({"route": "commit", "status": 400, "body": "{\"error\": \"invalid metadata\"}"});
    let repository = server.repository();
    server.fault(&refusal);
    let files = open_folder(&dir, &all).unwrap();
    let error = repository.push(&files, "A title", false).unwrap_err().to_string();
    assert!(error.contains("cannot commit the files: HTTP status 400 Bad Request: invalid metadata"), "{error}");
    server.asked();
    assert_eq!(push(&server, &dir).unwrap().uploaded, 0);
    assert!(!server.routes().contains(&"put".to_string()));
}

#[test]
fn a_file_that_the_storage_refuses_is_not_sent_more_often_than_can_help() {
    for (fault, puts, words) in [
        (json!({"route": "put", "status": 400}), 1, "HTTP status 400"),
        (json!({"route": "put", "status": 403}), 4, "(tried 4 times)"),
        (json!({"route": "put", "status": 503}), 4, "(tried 4 times)"),
        (json!({"route": "put", "cut": 10}), 4, "(tried 4 times)"),
    ] {
        for len in [100, 3456] {
            let server = Server::start();
            let repository = server.repository();
            server.set(&json!({"faults": vec![fault.clone(); 40]}));
            let files = [LocalFile::of("model.safetensors", bytes(1, len))];
            let error = repository.push(&files, "A title", false).unwrap_err().to_string();
            assert!(error.contains("cannot upload model.safetensors: ") && error.contains(words), "{error}");
            assert_eq!(server.routes().iter().filter(|route| *route == "put").count(), puts, "{fault}, {len} bytes");
        }
    }
}

#[test]
fn files_that_gitignore_excludes_are_reported_and_never_a_part_of_the_model() {
    let server = Server::start();
    let dir = folder(&server);
    fs::write(dir.join(".gitignore"), "*.txt\n").unwrap();
    assert_eq!(push(&server, &dir).unwrap().ignored, ["empty.txt"]);
    // The `.gitignore` of the repository counts too.
    fs::remove_file(dir.join(".gitignore")).unwrap();
    assert_eq!(push(&server, &dir).unwrap().ignored, ["empty.txt"]);
    for pattern in ["*.safetensors", "config.json", "*"] {
        fs::write(dir.join(".gitignore"), pattern).unwrap();
        let error = push(&server, &dir).unwrap_err();
        assert!(error.contains("is a part of the model, but .gitignore of the folder"), "{pattern}: {error}");
    }
    assert_eq!(server.titles().len(), 2);
}

#[test]
fn a_hub_that_refuses_is_one_line_without_secrets() {
    let full = json!({"code": 507, "message": "Storage quota exceeded"});
    let often = |fault: &Value| json!({"faults": vec![fault.clone(); 40]});
    for (change, words) in [
        (often(&json!({"route": "preupload", "status": 401})), &["does not accept the access token", "HF_TOKEN"][..]),
        (
            often(&json!({"route": "commit", "status": 403, "body": "{\"error\": \"Forbidden\"}"})),
            &["does not allow it", "Forbidden", "write access to me/tiny"],
        ),
        (
            often(&json!({"route": "commit", "status": 409, "body": "{\"error\": \"Conflict\"}"})),
            &["HTTP status 409", "Conflict", "(tried 4 times)"],
        ),
        (often(&json!({"route": "commit", "status": 412})), &["HTTP status 412", "(tried 4 times)"]),
        (
            often(&json!({"route": "batch", "status": 429, "headers": {"Retry-After": "0"}})),
            &["HTTP status 429", "(tried 4 times)"],
        ),
        (often(&json!({"route": "batch", "status": 500})), &["cannot upload large files: HTTP status 500"]),
        (often(&json!({"route": "put", "status": 403})), &["cannot upload model.safetensors: HTTP status 403"]),
        (often(&json!({"route": "put", "status": 507})), &["exceeds the storage limits of the hub (HTTP status 507"]),
        (
            often(&json!({"route": "commit", "status": 413})),
            &["exceeds the storage limits of the hub (HTTP status 413"],
        ),
        (often(&json!({"route": "put", "cut": 10})), &["cannot upload model.safetensors"]),
        (
            often(&json!({"route": "preupload", "status": 200, "body": "<html>"})),
            &["expected from the hub how to upload README.md"],
        ),
        (
            often(&json!({"route": "batch", "status": 200, "body": "[]"})),
            &["expected instructions to upload large files"],
        ),
        (often(&json!({"route": "commit", "status": 200, "body": "{}"})), &["expected the name of a commit"]),
        (
            often(&json!({"route": "paths-info", "status": 200, "body": "[]"})),
            &["expected the hash", "found no such file"],
        ),
        (often(&json!({"route": "verify", "status": 404})), &["cannot verify"]),
        (json!({"object_error": full}), &["Storage quota exceeded (code 507)", "exceeds the storage limits"]),
    ] {
        let server = Server::start();
        let dir = folder(&server);
        let repository = server.repository();
        server.set(&change);
        let files = open_folder(&dir, &all).unwrap();
        let error = repository.push(&files, "A title", false).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.starts_with("me/tiny: "), "{error}");
        assert!(!error.contains(TOKEN) && !error.contains("signature"), "{error}");
        for word in words {
            assert!(error.contains(word), "{change}: no `{word}` in {error}");
        }
        server.set(&json!({"faults": [], "object_error": null}));
        push(&server, &dir).unwrap();
        assert_eq!(server.files("main"), hashes(&files, &dir), "nothing is lost");
    }
}

#[test]
fn only_names_that_the_token_may_write_to_are_pushed_to() {
    let server = Server::start();
    let refused = |hub: Hub, name: &str| hub.repository(&to(name)).unwrap_err();
    let other =
        ["HTTP status 403", "rights to write to the namespace other", "it may write to repositories of me, lab"];
    for (hub, name, code, words) in [
        (server.hub(), "other/tiny", 1, &other[..]),
        (server.hub(), "club/tiny", 1, &["HTTP status 403", "needs write access to club/tiny"]),
        (Hub { token: Some("hf_of\tme".into()), ..server.hub() }, TO, 2, &["HF_TOKEN", "found another character"]),
        (Hub { token: Some("hf_of_app".into()), ..server.hub() }, "tiny", 1, &["expected a name with its owner"]),
        (server.hub(), "a/b/c", 2, &["expected a name on the hub"]),
        (Hub { token: None, ..server.hub() }, TO, 2, &["in HF_TOKEN, found none", "/settings/tokens"]),
        (Hub { token: Some("hf_reads".into()), ..server.hub() }, TO, 2, &["found one that can only read"]),
        (
            Hub { token: Some("hf_wrong".into()), ..server.hub() },
            TO,
            1,
            &["does not accept the access token (HTTP status 401"],
        ),
        (Hub { offline: true, ..server.hub() }, TO, 1, &["HF_HUB_OFFLINE"]),
        (
            Hub { endpoint: "http://127.0.0.1:1".into(), ..server.hub() },
            TO,
            1,
            &["http://127.0.0.1:1", "(tried 4 times)"],
        ),
    ] {
        let error = refused(hub, name);
        assert_eq!((error.exit_code(), error.to_string().lines().count()), (code, 1), "{error}");
        for word in words {
            assert!(error.to_string().contains(word), "no `{word}` in {error}");
        }
    }
    // Without an owner it is the user's; an organization's name is as good.
    assert_eq!(server.hub().repository(&to("tiny")).unwrap().name(), TO);
    assert_eq!(server.hub().repository(&to("lab/tiny")).unwrap().name(), "lab/tiny");
    let branch = Destination { revision: Some("v2".into()), private: Some(true), ..to("me/other") };
    let (first, second) = (server.hub().repository(&branch).unwrap(), server.hub().repository(&branch).unwrap());
    assert_eq!((first.url(), second.url()), (format!("{0}/me/other/tree/v2", server.url), first.url()));
    assert_eq!(server.get("/_tree/me/other/v2")["private"], true);
    // A repository of a group, to whose owner the token may not write; a token without a user.
    for (owner, name) in [("hf_of_club", "club/group"), (TOKEN, "lab/app")] {
        Hub { token: Some(owner.into()), ..server.hub() }.repository(&to(name)).unwrap();
    }
    let orgs = json!([{"name": "club", "roleInOrg": "read"}]);
    let group = json!({"name": "me", "orgs": orgs, "repos": ["club/group"]});
    server.set(&json!({"users": {"hf_of_group": group, "hf_of_app": {"repos": ["lab/app"], "name": null}}}));
    for (token, name) in [("hf_of_group", "club/group"), ("hf_of_app", "lab/app")] {
        let hub = Hub { token: Some(token.into()), ..server.hub() };
        assert_eq!(hub.repository(&to(name)).unwrap().name(), name);
    }
}

#[test]
fn a_model_that_shall_be_private_is_not_pushed_to_a_public_repository() {
    let server = Server::start();
    server.repository();
    let private = |private| Destination { private: Some(private), ..to(TO) };
    let error = server.hub().repository(&private(true)).unwrap_err().to_string();
    let expected = "me/tiny: expected a private repository or a new one, found one that is public: ";
    assert!(error.starts_with(expected) && error.ends_with("/me/tiny/settings makes it private"), "{error}");
    server.hub().repository(&private(false)).unwrap();
    let mine = Destination { private: Some(true), ..to("me/mine") };
    server.hub().repository(&mine).unwrap();
    server.hub().repository(&mine).unwrap();
}

#[test]
fn the_command_pushes_a_model_and_nothing_else() {
    let server = Server::start();
    let scratch = Scratch::new();
    for name in ["checkpoint-2", "samples", ".git", "onnx"] {
        fs::create_dir(scratch.path("policy").join(name)).unwrap();
        scratch.write(&format!("policy/{name}/secret"), "s");
    }
    for name in ["optimizer.safetensors", "credentials.json", "train.log", ".env"] {
        scratch.write(&format!("policy/{name}"), "mine");
    }
    scratch.write("policy/.gitignore", "*.log\n");
    let ran = server.run(&scratch, "push policy me/tiny --private --commit_message Best");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stdout.starts_with(&format!("{}/me/tiny/commit/", server.url)), "{}", ran.stdout);
    let left_out =
        "note: left out: checkpoint-2, credentials.json, onnx, optimizer.safetensors, samples, train.log (--include";
    assert!(ran.stderr.contains(left_out) && ran.stderr.contains("note: 5 files committed, with "), "{}", ran.stderr);
    let names = || server.files("main").into_keys().collect::<Vec<String>>();
    let model = [".gitignore", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names(), model);
    assert_eq!(server.titles(), ["initial commit", "Best"]);
    assert_eq!(server.get("/_tree/me/tiny/main")["private"], true);
    let again = server.run(&scratch, "push policy tiny --revision v2");
    assert!(again.code == 0 && again.stderr.contains("no file has changed"), "{}", again.stderr);
    let more = server.run(&scratch, "push policy tiny --include onnx/ *.log --exclude README.md");
    assert!(
        more.stderr.contains("left out by .gitignore of the folder or of the repository: train.log"),
        "{}",
        more.stderr
    );
    assert!(more.stderr.contains("note: 1 file committed; no large file"), "{}", more.stderr);
    let mut expected = model.to_vec();
    expected.insert(3, "onnx/secret");
    assert_eq!(names(), expected);

    // The same model by its name.
    let generate = |model: &str| {
        let line = format!("generate --do_sample false --max_new_tokens 4 --model_name_or_path {model} The");
        let ran = server.run(&scratch, &line);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran.stdout
    };
    assert_eq!(generate(TO), generate("policy"));

    server.asked();
    let link = scratch.path("policy").join("README.md");
    std::os::unix::fs::symlink("/etc/hostname", &link).unwrap();
    fs::create_dir(scratch.path("bare")).unwrap();
    scratch.write("bare/config.json", "{}");
    for (line, code, words) in [
        ("push policy me/tiny", 1, "found a link to"),
        ("push bare me/tiny", 1, "expected the weights of a model (model.safetensors or"),
        ("push policy me/tiny --revision a..b", 2, "revision = a..b: expected a branch"),
        ("push nowhere me/tiny", 1, "found no such folder"),
        ("push . me/tiny", 1, "expected the folder of a model"),
        ("push policy a/b/c", 2, "name = a/b/c: expected a name on the hub"),
        ("push policy me/tiny --revision ../x", 2, "revision = ../x: expected a branch"),
    ] {
        server.run(&scratch, line).is_one_error(line, code, &[words]);
    }
    assert!(server.asked().is_empty());
    fs::remove_file(link).unwrap();
    let mut without = server.command(&scratch, "push policy me/tiny");
    Ran::from(output(without.env_remove("HF_TOKEN"))).is_one_error("no token", 2, &["HF_TOKEN", "found none"]);
    assert!(server.asked().is_empty(), "nothing is requested without a token");
}

#[test]
fn a_run_pushes_its_checkpoints_and_its_model() {
    let server = Server::start();
    let scratch = Scratch::new();
    let sft = SFT.replace("_path policy", "_path ./policy");
    let line = format!("{sft} --push_to_hub --hub_model_id me/tiny --save_steps 1 --hub_always_push");
    let ran = server.run(&scratch, &format!("{line} --report_to tensorboard"));
    // A log has the place of the model too.
    let expected = format!("the model is at {}/me/tiny, commit ", server.url);
    assert!(ran.code == 0 && ran.stderr.starts_with(&expected) && ran.stderr.lines().count() == 1, "{}", ran.stderr);
    assert_eq!(server.titles(), ["initial commit", "Checkpoint, after update 1", "End of training"]);
    let files = server.files("main");
    for name in ["config.yaml", "metrics.jsonl", "README.md", "tokenizer.json", "config.json", "model.safetensors"] {
        assert_eq!(files[name], sha256(&fs::read(scratch.path("out").join(name)).unwrap()), "{name}");
    }
    let known = [
        "README.md",
        "config.json",
        "config.yaml",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(files.keys().collect::<Vec<_>>(), known);
    let config = scratch.read("out/config.yaml");
    assert!(
        !config.contains("hub_token") && !config.contains(TOKEN) && config.contains("hub_model_id: me/tiny"),
        "{config}"
    );

    // A finished run that is resumed has the same model: no file of it is sent again.
    server.asked();
    let ran = server.run(&scratch, &format!("{line} --resume_from_checkpoint true"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(!server.routes().iter().any(|route| route == "put"));
    assert_eq!(server.files("main")["model.safetensors"], files["model.safetensors"]);
}

#[test]
fn an_adapter_whose_base_is_a_folder_of_this_machine_is_pushed_with_a_warning() {
    let server = Server::start();
    let scratch = Scratch::new();
    let warning = format!("names its base by a folder of this machine, {}", scratch.path("policy").display());
    for line in [format!("{SFT} --use_peft --push_to_hub --hub_model_id me/tiny"), "push out me/tiny".into()] {
        let ran = server.run(&scratch, &line);
        assert!(ran.code == 0 && ran.stderr.contains(&warning), "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains("rlhf merge"), "{}", ran.stderr);
    }
    // Not if the base is pushed with it.
    fs::create_dir_all(scratch.path("out/base_model")).unwrap();
    fs::copy(scratch.path("policy/config.json"), scratch.path("out/base_model/config.json")).unwrap();
    let ran = server.run(&scratch, "push out me/tiny --include base_model/");
    assert!(ran.code == 0 && !ran.stderr.contains("warning"), "{}", ran.stderr);
    // Nor with a base on the hub, though there be a folder of its name.
    fs::create_dir_all(scratch.path("me/base")).unwrap();
    let path = scratch.path("out/adapter_config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config["base_model_name_or_path"] = json!("me/base");
    fs::write(&path, config.to_string()).unwrap();
    let ran = server.run(&scratch, "push out me/tiny");
    assert!(ran.code == 0 && !ran.stderr.contains("warning"), "{}", ran.stderr);
}

#[test]
fn a_run_pushes_its_best_model_as_the_old_trl_did() {
    let server = Server::start();
    let scratch = Scratch::new();
    let best = json!({"repo_id": "me/tiny", "commit_message": "best", "token": TOKEN}).to_string();
    let mut command = server.command(&scratch, &format!("{PPO} --compare_steps 1 --no_checks"));
    command.args(["--push_to_hub_if_best_kwargs", &best, "--report_to", "command:env KEY=pw123 cat > events"]);
    let ran = Ran::from(output(&mut command));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let titles = server.titles();
    assert!(titles.iter().any(|title| title.starts_with("Best model, after update ")), "{titles:?}");
    let files = server.files("main");
    let weights = fs::read(scratch.path("out/best/model.safetensors")).unwrap();
    assert!(files["model.safetensors"] == sha256(&weights) && files.contains_key("README.md"), "{files:?}");
    for name in ["README.md", "report.html", "config.yaml", "metrics.jsonl"] {
        assert!(!scratch.read(&format!("out/{name}")).contains(TOKEN), "{name} has the token");
    }
    // The arguments of a program stay on this machine.
    assert!(scratch.read("out/config.yaml").contains("pw123") && !scratch.read("events").contains("pw123"));
    assert!(!scratch.read("out/README.md").contains("pw123"));
    let found = server.text("/me/tiny/resolve/main/config.yaml");
    assert!(found.contains("command:env ...") && found.contains("seed: 42") && !found.contains("pw123"), "{found}");
}

#[test]
fn a_step_pushes_each_new_best_model() {
    let server = Server::start();
    let home = server.home.path();
    let vars = [
        ("HF_ENDPOINT", server.url.clone()),
        ("HF_TOKEN", TOKEN.to_string()),
        ("HF_HOME", home.display().to_string()),
        ("RLHF_TEST_OUT", home.join("out").display().to_string()),
    ];
    Child { test: "step::child_pushes_its_best_models", address_space_gib: 16, vars: &vars }.run();
    assert_eq!(server.titles(), ["initial commit", "Best model, at step 1", "Best model, at step 2"]);
    assert_eq!(server.get("/_tree/me/tiny/main")["private"], true);
    let best = fs::read(home.join("out/best/model.safetensors")).unwrap();
    assert_eq!(server.files("main")["model.safetensors"], sha256(&best));
}

#[test]
fn of_several_ranks_one_pushes_and_all_end_alike() {
    let server = Server::start();
    let scratch = Scratch::new();
    let line = format!("launch --nproc_per_node 2 {SFT} --push_to_hub --hub_model_id me/tiny");
    let ran = server.run(&scratch, &line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(server.titles(), ["initial commit", "End of training"]);
    // The first request about files is the check before the run.
    server.fault(&json!({"route": "preupload", "status": 403}));
    let ran = server.run(&scratch, &line.replace("--output_dir out", "--output_dir again"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("does not allow it") && !scratch.path("again").exists(), "{}", ran.stderr);
    server.fault(&json!({"route": "commit", "status": 403}));
    let ran = server.run(&scratch, &line.replace("--output_dir out", "--output_dir again"));
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("the model in again is not on the hub"), "{}", ran.stderr);
}

#[test]
fn a_run_that_may_not_push_does_not_start_and_one_that_cannot_push_loses_nothing() {
    let server = Server::start();
    let scratch = Scratch::new();
    let line = format!("{SFT} --push_to_hub --hub_model_id");
    for (name, code, words) in [
        ("other/tiny", 1, &["needs write access to other/tiny"][..]),
        ("a/b/c", 2, &["hub_model_id = a/b/c"]),
        ("me/tiny --hub_token hf_wrong", 1, &["does not accept the access token"]),
        ("me/tiny --hub_strategy best", 2, &["hub_strategy = best needs metric_for_best_model"]),
    ] {
        let ran = server.run(&scratch, &format!("{line} {name}"));
        ran.is_one_error(name, code, words);
        assert!(!ran.stderr.contains("hf_wrong") && !scratch.path("out").exists(), "{}", ran.stderr);
    }

    let failing = json!({"route": "commit", "status": 403, "body": "{\"error\": \"Forbidden\"}"});
    server.set(&json!({"faults": vec![failing; 5]}));
    let ran = server.run(&scratch, &format!("{line} me/tiny"));
    assert_eq!((ran.code, ran.stderr.lines().count()), (4, 1), "{}", ran.stderr);
    for words in ["error: the model in out is not on the hub", "Forbidden", " push out me/tiny"] {
        assert!(ran.stderr.contains(words), "{}", ran.stderr);
    }
    assert!(scratch.path("out/model.safetensors").exists() && scratch.path("out/report.html").exists());
    server.set(&json!({"faults": []}));
    let ran = server.run(&scratch, "push out me/tiny");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(server.files("main").contains_key("model.safetensors"));
}

#[test]
fn ctrl_c_during_the_last_push_ends_it_and_reports_that_the_run_is_saved() {
    let server = Server::start();
    let scratch = Scratch::new();
    let mut command = server.command(&scratch, &format!("{SFT} --push_to_hub --hub_model_id me/tiny"));
    server.fault(&json!({"route": "commit", "status": 503, "headers": {"Retry-After": "200"}}));
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !server.routes().contains(&"commit".to_string()) {
        assert!(Instant::now() < until, "no commit");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_millis(200));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{stderr}");
    for words in [
        "note: me/tiny: cannot commit the files: HTTP status 503 Service Unavailable; next attempt in 200 s\n",
        "the run is complete and saved; its last uploads are stopped",
        "error: the model in out is not on the hub: ",
        "interrupted",
    ] {
        assert!(stderr.contains(words), "no `{words}` in {stderr}");
    }
    assert!(!stderr.contains("tried 4 times") && scratch.path("out/model.safetensors").exists(), "{stderr}");
}

#[test]
fn stages_of_a_pipeline_push_to_repositories_of_their_own() {
    let server = Server::start();
    let scratch = Scratch::new();
    let file = |sft: &str, reward: &str| {
        format!(
            "model_name_or_path: policy\ndataset_name: pairs.jsonl\noutput_dir: all\nper_device_train_batch_size: 4\n\
             sft: {{max_steps: 1, push_to_hub: true, hub_model_id: {sft}}}\n\
             reward: {{max_steps: 1, push_to_hub: true, hub_model_id: {reward}}}\nskip: [ppo]\n"
        )
    };
    scratch.write("pipeline.yaml", &file(TO, TO));
    let line = "pipeline --config pipeline.yaml";
    server.run(&scratch, line).is_one_error(line, 2, &["hub_model_id = me/tiny for sft and reward"]);
    scratch.write("pipeline.yaml", &file(TO, "other/reward"));
    server.run(&scratch, line).is_one_error(line, 1, &["reward: other/reward: cannot create"]);
    assert!(!scratch.path("all/1-sft").exists(), "no stage has started");
    // A push that fails keeps no later stage from running.
    scratch.write("pipeline.yaml", &file(TO, "me/reward"));
    let failing = json!({"route": "commit", "status": 403});
    server.set(&json!({"faults": [failing]}));
    let ran = server.run(&scratch, line);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("sft: the model in all/1-sft is not on the hub"), "{}", ran.stderr);
    assert_eq!(server.get("/_tree/me/reward/main")["titles"][1], "End of training");
}
