//! Models and datasets by their name on the hub, against a server on this machine that responds as the hub does.

use crate::attack::folders::{Dice, mutate, mutate_text};
use crate::support::{PROGRAM, golden, output};
use ring::digest;
use rlhf::hub::{Hub, Part};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const NEXT: &str = "89abcdef0123456789abcdef0123456789abcdef";
const NAME: &str = "someone/tiny-model";
const DIR: &str = "models--someone--tiny-model";

type Files = BTreeMap<String, Vec<u8>>;

/// A request to the server.
#[derive(Debug, Clone)]
struct Request {
    /// "HEAD config.json": the method, or CDN for the other host, and the end of the path.
    what: String,
    authorization: Option<String>,
    range: Option<String>,
}

/// What goes wrong with one request.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// A status, and the hub's word for it.
    Status(u16, &'static str),
    /// The connection ends after so many bytes of the body.
    Cut(usize),
    /// The response is the whole file, for any requested range.
    NoRange,
    /// One byte is another.
    Flip,
    /// The body comes a byte at a time, twenty a second.
    Drip,
}

#[derive(Default)]
struct State {
    /// Commits by revision, and files by commit.
    revisions: BTreeMap<String, String>,
    commits: BTreeMap<String, Files>,
    /// Whether what has the name is a dataset; else it is a model.
    dataset: bool,
    token: Option<String>,
    /// In the place of the description, where there is one.
    description: Option<Vec<u8>>,
    /// By request; the first that fits is taken, once.
    faults: Vec<(&'static str, Fault)>,
    log: Vec<Request>,
}

/// A hub with one model, and the other host that it redirects to for large files.
struct Server {
    state: Arc<Mutex<State>>,
    endpoint: String,
    cache: tempfile::TempDir,
}

impl Server {
    fn with(files: Files) -> Self {
        let state = State {
            revisions: [("main".to_string(), COMMIT.to_string())].into(),
            commits: [(COMMIT.to_string(), files)].into(),
            ..State::default()
        };
        let state = Arc::new(Mutex::new(state));
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (hub, cdn) = (listen(), listen());
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let (endpoint, cdn_address) = (address(&hub), address(&cdn));
        for (listener, to_cdn) in [(hub, false), (cdn, true)] {
            let (state, cdn) = (state.clone(), cdn_address.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let (state, cdn) = (state.clone(), cdn.clone());
                    // A client that goes away early is its own business.
                    std::thread::spawn(move || answer(stream?, &state, to_cdn, &cdn));
                }
            });
        }
        Self { state, endpoint, cache: tempfile::tempdir().unwrap() }
    }

    /// The golden model of this name, and beside it what must not be fetched.
    fn of(model: &str) -> Self {
        let mut files = model_files(model);
        for extra in ["README.md", "pytorch_model.bin", "onnx/model.onnx", "model.fp16.safetensors", ".gitattributes"] {
            files.insert(extra.into(), extra.into());
        }
        Self::with(files)
    }

    fn hub(&self) -> Hub {
        Hub {
            endpoint: self.endpoint.clone(),
            cache: self.cache.path().join("hub"),
            token: None,
            certificates: None,
            offline: false,
            pause: Duration::from_millis(1),
            timeout: Duration::from_secs(30),
        }
    }

    fn offline(&self) -> Hub {
        Hub { offline: true, ..self.hub() }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    fn fault(&self, what: &'static str, fault: Fault) {
        self.change(|state| state.faults.push((what, fault)));
    }

    /// Requests since the last call.
    fn asked(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }

    /// The same, in words.
    fn asked_for(&self) -> Vec<String> {
        self.asked().into_iter().map(|request| request.what).collect()
    }

    /// Offsets at which the downloads of the weights started.
    fn ranges(&self) -> Vec<usize> {
        let start = |range: Option<String>| range.map_or(0, |r| r[6..r.len() - 1].parse().unwrap());
        let is_weights = |request: &Request| request.what == "CDN model.safetensors";
        self.asked().into_iter().filter(is_weights).map(|request| start(request.range)).collect()
    }

    fn cached(&self, path: &str) -> PathBuf {
        self.cache.path().join("hub").join(DIR).join(path)
    }
}

fn answer(stream: TcpStream, state: &Mutex<State>, to_cdn: bool, cdn: &str) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_string());
    }
    let mut words = first.split(' ').map(str::to_string);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let asked = if to_cdn { "CDN" } else { method.as_str() };
    let what = format!("{asked} {}", path.rsplit('/').next().unwrap_or_default());
    let (authorization, range) = (headers.remove("authorization"), headers.remove("range"));
    let mut state = state.lock().unwrap();
    state.log.push(Request { what: what.clone(), authorization: authorization.clone(), range: range.clone() });
    let fault = state.faults.iter().position(|(name, _)| *name == what).map(|at| state.faults.remove(at).1);
    let (status, head, body) = match fault {
        Some(Fault::Status(status, code)) => (status, format!("X-Error-Code: {code}\r\n"), b"{}".to_vec()),
        _ if state.token.is_some() && !to_cdn && authorization != state.token => (401, String::new(), Vec::new()),
        fault => file_or_listing(&state, &path, to_cdn, cdn, range.filter(|_| !matches!(fault, Some(Fault::NoRange)))),
    };
    drop(state);
    let mut sent = if method == "HEAD" { Vec::new() } else { body.clone() };
    match fault {
        Some(Fault::Cut(len)) => sent.truncate(len),
        Some(Fault::Flip) => sent[100] ^= 1,
        _ => {}
    }
    let mut stream = stream;
    // A redirect does not contain the length of its target.
    write!(stream, "HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: {}\r\n{head}\r\n", body.len())?;
    match fault {
        Some(Fault::Drip) => sent.chunks(1).try_for_each(|byte| {
            std::thread::sleep(Duration::from_millis(50));
            stream.write_all(byte)
        }),
        _ => stream.write_all(&sent),
    }
}

/// Status, headers and body, as the hub's routes and its files' host give them.
fn file_or_listing(
    state: &State,
    path: &str,
    to_cdn: bool,
    cdn: &str,
    range: Option<String>,
) -> (u16, String, Vec<u8>) {
    let not_found = |code: &str| (404, format!("X-Error-Code: {code}\r\n"), Vec::new());
    let (api, page) = if state.dataset { ("datasets", "/datasets/") } else { ("models", "/") };
    if let Some(revision) = path.strip_prefix(&format!("/api/{api}/{NAME}/revision/")) {
        let revision = revision.replace("%2F", "/");
        let commit = state.revisions.get(&revision).or(state.commits.contains_key(&revision).then_some(&revision));
        let Some(commit) = commit else { return not_found("RevisionNotFound") };
        if let Some(bytes) = &state.description {
            return (200, String::new(), bytes.clone());
        }
        let files: Vec<_> = state.commits[commit].keys().map(|name| json!({"rfilename": name})).collect();
        return (200, String::new(), json!({"id": NAME, "sha": commit, "siblings": files}).to_string().into_bytes());
    }
    let prefix = if to_cdn { "/".into() } else { format!("{page}{NAME}/resolve/") };
    let prefix = if path.starts_with("/moved/") { "/moved/" } else { &prefix };
    let Some((commit, name)) = path.strip_prefix(prefix).and_then(|rest| rest.split_once('/')) else {
        return not_found("RepoNotFound");
    };
    let Some(bytes) = state.commits.get(commit).and_then(|files| files.get(name)) else {
        return not_found("EntryNotFound");
    };
    let mut head = format!("X-Repo-Commit: {commit}\r\n");
    if is_large(name) && !to_cdn {
        let _ = write!(head, "X-Linked-Etag: \"{}\"\r\nX-Linked-Size: {}\r\n", etag(name, bytes), bytes.len());
        let _ = write!(head, "Location: {cdn}/{commit}/{name}\r\n");
        return (302, head, b"Found".to_vec());
    }
    if prefix != "/moved/" && !to_cdn && name == "tokenizer.json" {
        return (307, format!("{head}Location: /moved/{commit}/{name}\r\n"), Vec::new());
    }
    // The files' host has a tag of its own.
    let tag = if to_cdn { "\"of-another-kind\"".into() } else { format!("W/\"{}\"", etag(name, bytes)) };
    let _ = write!(head, "ETag: {tag}\r\n");
    match range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok()) {
        Some(from) => {
            let _ = write!(head, "Content-Range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len());
            (206, head, bytes[from..].to_vec())
        }
        None => (200, head, bytes.clone()),
    }
}

fn is_large(name: &str) -> bool {
    [".safetensors", ".parquet"].iter().any(|end| name.ends_with(end))
}

/// The name of a file's bytes: SHA-256 for large files, git's for others (here of the bytes alone).
fn etag(name: &str, bytes: &[u8]) -> String {
    let kind = if is_large(name) { &digest::SHA256 } else { &digest::SHA1_FOR_LEGACY_USE_ONLY };
    digest::digest(kind, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn model_files(model: &str) -> Files {
    let dir = golden().join("models").join(model);
    let names = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| !["golden.safetensors", "grads.safetensors", "config_v4.json"].contains(&name.as_str()))
        .map(|name| (name.clone(), fs::read(dir.join(name)).unwrap()))
        .collect()
}

fn read_folder(dir: &Path) -> Files {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.map(|name| (name.clone(), fs::read(dir.join(name)).unwrap())).collect()
}

fn find(hub: &Hub) -> PathBuf {
    hub.find(Path::new(NAME), None, Part::Model).unwrap_or_else(|e| panic!("{e}"))
}

#[track_caller]
fn refuses(hub: &Hub, revision: Option<&str>, words: &[&str]) {
    let error = hub.find(Path::new(NAME), revision, Part::Model).expect_err("an error").to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(!error.contains("secret") && !error.contains("hf_hidden"), "{error}");
    for word in words {
        assert!(error.contains(word), "no `{word}` in {error}");
    }
}

#[test]
fn a_model_comes_with_what_it_needs_and_nothing_else() {
    for model in ["gpt2", "gpt_neox_sharded"] {
        let server = Server::of(model);
        assert!(read_folder(&find(&server.hub())) == model_files(model), "{model}");
    }
}

#[test]
fn an_adapter_comes_without_a_base() {
    let names = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"];
    let files: Files = names.map(|name| (name.to_string(), name.as_bytes().to_vec())).into();
    let server = Server::with(files.clone());
    let dir = find(&server.hub());
    assert_eq!(read_folder(&dir), files);
    assert_eq!(find(&server.offline()), dir);
}

#[test]
fn the_cache_has_the_standard_layout() {
    let server = Server::of("gpt2");
    let dir = find(&server.hub());
    assert_eq!(dir, server.cached("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(server.cached("refs/main")).unwrap(), COMMIT);
    let files = model_files("gpt2");
    for (name, bytes) in &files {
        let link = fs::read_link(dir.join(name)).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(etag(name, bytes)), "{name}");
    }
    // Nothing is left over.
    assert_eq!(fs::read_dir(server.cached("blobs")).unwrap().count(), files.len());
    assert_eq!(fs::read_dir(server.cached("refs")).unwrap().count(), 1);
}

#[test]
fn a_file_in_the_cache_is_not_fetched_again() {
    let server = Server::of("gpt2");
    let dir = find(&server.hub());
    server.asked();
    assert_eq!(find(&server.hub()), dir);
    assert_eq!(server.asked_for(), ["GET main"]);

    // A link to bytes that are gone is mended.
    let config = dir.join("config.json");
    fs::remove_file(config.canonicalize().unwrap()).unwrap();
    find(&server.hub());
    assert!(read_folder(&dir) == model_files("gpt2"));
    server.asked();

    // A commit that changes one file: the others' bytes are there.
    let mut files = model_files("gpt2");
    files.insert("config.json".into(), b"{}".to_vec());
    server.change(|state| {
        state.commits.insert(NEXT.into(), files.clone());
        state.revisions.insert("main".into(), NEXT.into());
    });
    assert!(read_folder(&find(&server.hub())) == files);
    let fetched: Vec<_> = server.asked_for().into_iter().filter(|what| what.starts_with("GET")).collect();
    assert_eq!(fetched, ["GET main", "GET config.json"]);
    assert_eq!(fs::read_to_string(server.cached("refs/main")).unwrap(), NEXT);
    assert!(read_folder(&dir) == model_files("gpt2"));
}

#[test]
fn offline_the_cache_is_enough_and_no_request_is_sent() {
    let server = Server::of("gpt_neox_sharded");
    let dir = find(&server.hub());
    server.asked();
    assert_eq!(find(&server.offline()), dir);
    let by_commit = server.offline().find(Path::new(NAME), Some(COMMIT), Part::Model).unwrap();
    assert_eq!(by_commit, dir);
    refuses(&server.offline(), Some("v2"), &["revision v2", "HF_HUB_OFFLINE"]);
    fs::remove_file(dir.join("model-00003-of-00004.safetensors")).unwrap();
    refuses(&server.offline(), None, &[NAME, "no such folder", "no whole copy", "revision main", "HF_HUB_OFFLINE"]);
    assert!(server.asked().is_empty());
}

#[test]
fn a_revision_is_a_branch_a_tag_or_a_commit() {
    let server = Server::of("gpt2");
    let tuned = Files::from([("model.safetensors".into(), vec![1; 200]), ("config.json".into(), b"{}".to_vec())]);
    server.change(|state| {
        state.commits.insert(NEXT.into(), tuned.clone());
        state.revisions.insert("refs/pr/1".into(), NEXT.into());
    });
    for revision in ["refs/pr/1", NEXT] {
        let dir = server.hub().find(Path::new(NAME), Some(revision), Part::Model).unwrap();
        assert!(read_folder(&dir) == tuned, "{revision}");
        assert_eq!(server.offline().find(Path::new(NAME), Some(revision), Part::Model).unwrap(), dir);
    }
    assert_eq!(fs::read_to_string(server.cached("refs/refs/pr/1")).unwrap(), NEXT);
    assert!(!server.cached("refs").join(NEXT).exists(), "a commit stands for itself");
    refuses(&server.hub(), Some("v2"), &["no revision v2", &server.endpoint]);
    for escape in ["../main", "/main", ""] {
        refuses(&server.hub(), Some(escape), &["model_revision", "branch"]);
    }
}

#[test]
fn the_token_goes_to_the_hub_and_to_no_other_host() {
    let server = Server::of("gpt2");
    server.change(|state| state.token = Some("Bearer hf_secret".into()));
    find(&Hub { token: Some("hf_secret".into()), ..server.hub() });
    let (cdn, hub): (Vec<_>, Vec<_>) = server.asked().into_iter().partition(|request| request.what.starts_with("CDN"));
    assert_eq!(cdn.iter().map(|request| request.what.as_str()).collect::<Vec<_>>(), ["CDN model.safetensors"]);
    assert!(cdn.iter().all(|request| request.authorization.is_none()), "{cdn:?}");
    assert!(hub.iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_secret")), "{hub:?}");
}

#[test]
fn a_request_that_failed_for_a_passing_reason_is_tried_again() {
    let server = Server::of("gpt2");
    server.fault("GET main", Fault::Status(429, ""));
    server.fault("GET main", Fault::Status(503, ""));
    server.fault("HEAD config.json", Fault::Status(500, ""));
    server.fault("GET model.safetensors", Fault::Status(502, ""));
    server.fault("CDN model.safetensors", Fault::Status(403, "")); // an expired address
    assert!(read_folder(&find(&server.hub())) == model_files("gpt2"));
    assert_eq!(server.asked_for()[..3], ["GET main"; 3]);
}

#[test]
fn a_description_that_comes_too_slowly_is_a_failure_that_may_pass() {
    let server = Server::of("gpt_neox");
    let hub = Hub { timeout: Duration::from_millis(200), ..server.hub() };
    server.fault("GET main", Fault::Drip);
    assert!(find(&hub).join("model.safetensors").is_file(), "the second answer comes in time");
    let server = Server::of("gpt_neox");
    (0..4).for_each(|_| server.fault("GET main", Fault::Drip));
    let hub = Hub { timeout: Duration::from_millis(200), ..server.hub() };
    refuses(&hub, None, &["cannot be reached", "timeout", "tried 4 times"]);
}

#[test]
fn a_password_in_the_address_of_the_hub_is_printed_nowhere() {
    let server = Server::of("gpt_neox");
    let with_password = |endpoint: &str| Hub {
        endpoint: endpoint.replace("://", "://me:secret@"),
        token: Some("hf_hidden".into()),
        ..server.hub()
    };
    // It is not there, it refuses, its response differs; then a copy is taken from the cache.
    let absent = with_password("http://127.0.0.1:1");
    refuses(&absent, None, &["http://127.0.0.1:1 cannot be reached"]);
    let hub = with_password(&server.endpoint);
    for status in [401, 403, 404, 410, 500] {
        (0..4).for_each(|_| server.fault("GET main", Fault::Status(status, "x")));
        refuses(&hub, None, &[]);
        server.change(|state| state.faults.clear());
    }
    server.fault("GET main", Fault::Cut(10));
    let odd = Hub { endpoint: "me:secret@mirror".into(), ..hub.clone() };
    refuses(&odd, None, &["HF_ENDPOINT: expected an address that starts with http"]);
    assert!(!format!("{hub:?}").contains("secret"));
}

#[test]
fn permanent_failures_are_reported_at_once() {
    let token = Hub { token: Some("hf_secret".into()), ..Server::of("gpt2").hub() };
    let cases = [
        (401, "", None, &["no such folder", "HF_TOKEN", "private"][..]),
        (401, "", token.token.clone(), &["no such folder", "token of HF_TOKEN"]),
        (401, "GatedRepo", None, &["gated", "ask for access", "HF_TOKEN"]),
        (403, "GatedRepo", token.token, &["gated", "ask for access", "HF_TOKEN"]),
        (404, "RepoNotFound", None, &["no such folder", "no such model"]),
        (404, "RevisionNotFound", None, &["no revision main"]),
        (418, "", None, &["418"]),
    ];
    for (status, code, token, words) in cases {
        let server = Server::of("gpt2");
        server.fault("GET main", Fault::Status(status, code));
        let hub = Hub { token, ..server.hub() };
        refuses(&hub, None, &[words, &[NAME]].concat());
        let error = hub.find(Path::new("no-such-name"), None, Part::Model).unwrap_err().to_string();
        assert!(!error.contains("hf_secret"), "{error}");
        assert_eq!(server.asked_for(), ["GET main"; 2], "{status} {code}: a single request for each");
        assert!(!server.cache.path().join("hub").exists(), "{status} {code}");
    }
}

#[test]
fn a_broken_download_resumes_where_it_ended() {
    let server = Server::of("gpt2");
    for len in [50_000, 60_000, 0, 1] {
        server.fault("CDN model.safetensors", Fault::Cut(len));
    }
    assert!(read_folder(&find(&server.hub())) == model_files("gpt2"));
    assert_eq!(server.ranges(), [0, 50_000, 110_000, 110_000, 110_001]);
}

#[test]
fn a_download_that_fails_for_good_leaves_nothing_that_looks_whole_and_the_next_resumes() {
    let server = Server::of("gpt_neox_sharded");
    let shard = "CDN model-00002-of-00004.safetensors";
    server.fault(shard, Fault::Cut(10_000));
    for _ in 1..4 {
        server.fault(shard, Fault::Cut(0));
    }
    let place = "model-00002-of-00004.safetensors";
    refuses(&server.hub(), None, &[NAME, "cannot download", place, "tried 4 times", "resumes the download"]);
    let files = model_files("gpt_neox_sharded");
    let snapshot = server.cached("snapshots").join(COMMIT);
    assert!(read_folder(&snapshot).iter().all(|(name, bytes)| files[name] == *bytes));
    assert!(!server.cached("blobs").join(etag(place, &files[place])).exists());
    refuses(&server.offline(), None, &["no whole copy"]);

    server.asked();
    assert!(read_folder(&find(&server.hub())) == files);
    let ranges: Vec<_> = server.asked().into_iter().filter(|r| r.what == shard).map(|r| r.range).collect();
    assert_eq!(ranges, [Some("bytes=10000-".to_string())]);
}

#[test]
fn a_server_that_does_not_know_ranges_gives_the_same_bytes() {
    let server = Server::of("gpt2");
    server.fault("CDN model.safetensors", Fault::Cut(50_000));
    server.fault("CDN model.safetensors", Fault::NoRange);
    assert!(read_folder(&find(&server.hub())) == model_files("gpt2"));
    assert_eq!(server.ranges(), [0, 50_000]);
}

#[test]
fn bytes_with_another_hash_are_thrown_away() {
    let server = Server::of("gpt2");
    server.fault("CDN model.safetensors", Fault::Flip);
    assert!(read_folder(&find(&server.hub())) == model_files("gpt2"));
    assert_eq!(server.ranges(), [0, 0]);

    let server = Server::of("gpt2");
    for _ in 0..4 {
        server.fault("CDN model.safetensors", Fault::Flip);
    }
    refuses(&server.hub(), None, &["model.safetensors", "SHA-256"]);
    assert!(!server.cached("snapshots").join(COMMIT).join("model.safetensors").exists());
}

#[test]
fn two_that_fetch_at_once_get_one_whole_model() {
    let server = Server::of("gpt_neox_sharded");
    std::thread::scope(|scope| {
        let found: Vec<_> = (0..4).map(|_| scope.spawn(|| find(&server.hub()))).collect();
        for dir in found {
            assert!(read_folder(&dir.join().unwrap()) == model_files("gpt_neox_sharded"));
        }
    });
    let weights = server.asked_for().into_iter().filter(|what| what.starts_with("CDN")).count();
    assert_eq!(weights, 4, "each shard once");
}

#[test]
fn without_the_hub_the_cache_is_enough() {
    let server = Server::of("gpt2");
    let dir = find(&server.hub());
    let down = Hub { endpoint: "http://127.0.0.1:1".into(), ..server.hub() };
    assert_eq!(find(&down), dir);
    refuses(&down, Some("v2"), &["no such folder", "revision v2", "http://127.0.0.1:1", "refused", "tried 4 times"]);
    let wrong = Hub { endpoint: "no address".into(), ..server.hub() };
    refuses(&wrong, None, &["HF_ENDPOINT"]);
}

#[test]
fn weights_are_safetensors() {
    for (extra, words) in
        [("pytorch_model.bin", ["found only pytorch_model.bin", "convert"]), ("x", ["neither", "index"])]
    {
        let files: Files = ["config.json", extra].map(|name| (name.to_string(), b"{}".to_vec())).into();
        let server = Server::with(files);
        refuses(&server.hub(), None, &[&words[..], &[NAME]].concat());
        assert_eq!(server.asked_for(), ["GET main"]);
    }
    let index = br#"{"weight_map": {"a": "../../elsewhere.safetensors"}}"#.to_vec();
    let server = Server::with([("model.safetensors.index.json".to_string(), index)].into());
    refuses(&server.hub(), None, &["elsewhere.safetensors", "expected the name of a safetensors file"]);
}

#[test]
fn a_tokenizer_or_a_configuration_comes_without_the_weights() {
    let server = Server::of("gpt2");
    let names = |part| {
        let dir = server.hub().find(Path::new(NAME), None, part).unwrap();
        read_folder(&dir).into_keys().collect::<Vec<_>>()
    };
    assert_eq!(names(Part::Config), ["config.json"]);
    assert_eq!(
        names(Part::Tokenizer),
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    );
    refuses(&server.offline(), None, &["no whole copy"]);
    assert!(names(Part::Model).contains(&"model.safetensors".to_string()));
}

#[test]
fn a_folder_is_itself_and_invalid_names_are_not_requested() {
    let server = Server::of("gpt2");
    let folder = server.cache.path();
    assert_eq!(server.hub().find(folder, Some("main"), Part::Model).unwrap(), folder);
    let error = server.hub().find(folder, Some("v2"), Part::Model).unwrap_err().to_string();
    assert!(error.contains("model_revision = v2") && error.contains("no revisions"), "{error}");
    let error = server.hub().find(&folder.join("typo"), None, Part::Model).unwrap_err().to_string();
    assert!(error.contains("no such folder"), "{error}");
    assert!(server.asked().is_empty());
}

/// The program, with the variables of a user whose cache and token are below the server's folder.
fn program(server: &Server, line: &str) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(line.split_whitespace()).current_dir(server.cache.path()).env("OMP_NUM_THREADS", "1");
    for name in [
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "SSL_CERT_FILE",
        "http_proxy",
        "HTTP_PROXY",
        "ALL_PROXY",
        "all_proxy",
    ] {
        command.env_remove(name);
    }
    command.env("HF_HOME", server.cache.path()).env("HF_ENDPOINT", &server.endpoint);
    command
}

/// Standard output of a run that succeeds, and its standard error.
#[track_caller]
fn runs(command: &mut Command) -> (String, String) {
    let output = output(command);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{stderr}");
    (stdout, stderr)
}

#[test]
fn a_command_takes_a_name_of_the_hub_as_it_takes_a_folder() {
    let server = Server::of("gpt2");
    server.change(|state| {
        let files = state.commits[COMMIT].clone();
        state.commits.insert(NEXT.into(), files);
        state.revisions.insert("v2".into(), NEXT.into());
        state.token = Some("Bearer hf_saved".into());
    });
    fs::write(server.cache.path().join("token"), "hf_saved\n").unwrap();
    let line = |model: &str| format!("generate --do_sample false --max_new_tokens 4 --model_name_or_path {model} The");
    let folder = golden().join("models/gpt2").canonicalize().unwrap();
    let expected = runs(&mut program(&server, &line(folder.to_str().unwrap()))).0;
    assert_eq!(runs(&mut program(&server, &line(NAME))), (expected.clone(), String::new()));
    runs(&mut program(&server, &format!("{} --model_revision v2", line(NAME))));
    assert!(server.cached("snapshots").join(NEXT).join("model.safetensors").exists());

    server.asked();
    let offline = runs(program(&server, &line(NAME)).env("HF_HUB_OFFLINE", "1"));
    assert_eq!((offline, server.asked().len()), ((expected.clone(), String::new()), 0));
    let (stdout, stderr) = runs(program(&server, &line(NAME)).env("HF_ENDPOINT", "http://127.0.0.1:1"));
    assert_eq!(stdout, expected);
    assert!(stderr.starts_with("warning: http://127.0.0.1:1") && stderr.lines().count() == 1, "{stderr}");

    let refused = output(program(&server, &line("someone/other")).env("HF_TOKEN", "hf_other"));
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!((refused.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains("HF_TOKEN") && !error.contains("hf_other"), "{error}");
}

#[test]
fn every_command_that_measures_takes_a_name_of_the_hub() {
    for (model, command) in [("gpt2", "logprobs"), ("gpt2_cls", "score")] {
        let server = Server::of(model);
        let row = json!({"prompt": "The", "completion": " end"}).to_string();
        fs::write(server.cache.path().join("rows.jsonl"), row).unwrap();
        let line = |model: &str| format!("{command} --dataset_name rows.jsonl --model_name_or_path {model}");
        let folder = golden().join("models").join(model).canonicalize().unwrap();
        let (expected, _) = runs(&mut program(&server, &line(folder.to_str().unwrap())));
        assert_eq!(runs(&mut program(&server, &line(NAME))), (expected, String::new()));
        let refused = output(&mut program(&server, &format!("{} --model_revision v9", line(NAME))));
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(error.contains("no revision v9"), "{error}");
    }
}

#[test]
fn a_missing_dataset_is_reported_before_anything_is_fetched() {
    let server = Server::of("gpt2");
    for models in [
        "sft --model_name_or_path NAME --dataset_name nowhere.jsonl",
        "sft --model_name_or_path NAME --dataset_name rows.jsonl --eval_dataset_name nowhere.jsonl",
        "reward --model_name_or_path NAME --dataset_name nowhere.jsonl",
        "ppo --sft_model_path NAME --reward_model_path NAME --dataset_name nowhere.jsonl",
        "logprobs --model_name_or_path NAME --dataset_name nowhere.jsonl",
    ] {
        fs::write(server.cache.path().join("rows.jsonl"), "{}").unwrap();
        let out = if models.starts_with("logprobs") { "" } else { " --output_dir out" };
        let refused = output(&mut program(&server, &(models.replace("NAME", NAME) + out)));
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(error.contains("nowhere.jsonl: expected"), "{models}: {error}");
        assert!(server.asked().is_empty(), "{models}");
    }
}

/// A dataset of two shards in a folder, and files beside them.
fn dataset_files() -> Files {
    let row = |prompt: &str| format!("{}\n", json!({"prompt": prompt}));
    [
        ("data/train-00000-of-00002.jsonl", [row("The"), row("A film")].concat()),
        ("data/train-00001-of-00002.jsonl", row("is it")),
        ("data/test-00000-of-00001.parquet", "of another split".into()),
        ("README.md", "of nobody".into()),
    ]
    .map(|(name, text)| (name.to_string(), text.into_bytes()))
    .into()
}

fn dataset_server() -> Server {
    let server = Server::with(dataset_files());
    server.change(|state| state.dataset = true);
    server
}

#[test]
fn of_a_dataset_the_wanted_files_come_and_no_others() {
    let server = dataset_server();
    server.change(|state| state.token = Some("Bearer hf_secret".into()));
    let with_token = |hub| Hub { token: Some("hf_secret".into()), ..hub };
    for split in ["train", "test"] {
        let choose = |files: &BTreeSet<String>| {
            Ok(files.iter().filter(|name| name.contains(&format!("/{split}-"))).cloned().collect())
        };
        let found = with_token(server.hub()).dataset(NAME, "main", &choose).unwrap();
        let snapshot = server.cache.path().join("hub/datasets--someone--tiny-model/snapshots").join(COMMIT);
        let expected: Files = dataset_files().into_iter().filter(|(name, _)| name.contains(split)).collect();
        assert_eq!(found, expected.keys().map(|name| snapshot.join(name)).collect::<Vec<_>>());
        for (file, bytes) in found.iter().zip(expected.values()) {
            assert!(fs::read_link(file).unwrap().starts_with("../../../blobs"));
            assert_eq!(&fs::read(file).unwrap(), bytes);
        }
        let asked = server.asked();
        assert!(asked.iter().any(|request| request.what.contains(split)));
        assert!(asked.iter().all(|request| !request.what.contains("README")), "{asked:?}");
        let cdn_request = asked.iter().find(|request| request.what.starts_with("CDN"));
        assert!(cdn_request.is_none_or(|request| request.authorization.is_none()));
        assert_eq!(server.offline().dataset(NAME, "main", &choose).unwrap(), found);
        assert!(server.asked().is_empty());
    }
    let none = |_: &BTreeSet<String>| Ok(Vec::new());
    assert!(with_token(server.hub()).dataset(NAME, "main", &none).unwrap().is_empty());
    let error = server.hub().dataset(NAME, "main", &none).unwrap_err().to_string();
    assert!(error.contains("no such file or folder, and no such public dataset"), "{error}");
    let error = server.hub().dataset(NAME, "../x", &none).unwrap_err().to_string();
    assert!(error.contains("behind the @") && error.contains("../x"), "{error}");
}

#[test]
fn offline_a_dataset_whose_download_was_interrupted_is_not_read_as_whole() {
    let server = dataset_server();
    let choose = |files: &BTreeSet<String>| Ok(files.iter().filter(|name| name.contains("train")).cloned().collect());
    let whole = server.hub().dataset(NAME, "main", &choose).unwrap();
    // The second file never came.
    fs::remove_file(&whole[1]).unwrap();
    let error = server.offline().dataset(NAME, "main", &choose).unwrap_err().to_string();
    assert!(error.contains("no whole copy of its revision main"), "{error}");
    assert!(error.contains("(data/train-00001-of-00002.jsonl is missing)"), "{error}");
    assert_eq!(server.hub().dataset(NAME, "main", &choose).unwrap(), whole);
    assert_eq!(server.offline().dataset(NAME, "main", &choose).unwrap(), whole);
    // A cache that another program has filled has no list of the files.
    let repository = server.cache.path().join("hub/datasets--someone--tiny-model");
    let listing = repository.join(".rlhf").join(COMMIT).with_extension("json");
    for text in [Some("[\"data/train-00"), None] {
        match text {
            Some(part) => fs::write(&listing, part).unwrap(),
            None => fs::remove_file(&listing).unwrap(),
        }
        assert_eq!(server.offline().dataset(NAME, "main", &choose).unwrap(), whole);
    }
    // A place that the list cannot be written to: a read-only cache.
    fs::remove_dir(listing.parent().unwrap()).unwrap();
    fs::write(listing.parent().unwrap(), "").unwrap();
    assert_eq!(server.hub().dataset(NAME, "main", &choose).unwrap(), whole);
}

#[test]
fn names_that_lead_out_of_the_cache_are_not_followed() {
    let server = dataset_server();
    let bad: Files =
        [("../../../evil.jsonl".to_string(), b"{}".to_vec()), ("/evil.jsonl".to_string(), b"{}".to_vec())].into();
    server.change(|state| {
        state.commits.insert(COMMIT.into(), bad);
    });
    let all = |files: &BTreeSet<String>| Ok(files.iter().cloned().collect());
    assert!(server.hub().dataset(NAME, "main", &all).unwrap().is_empty());
}

#[test]
fn a_command_takes_a_dataset_of_the_hub_as_it_takes_a_folder() {
    let server = dataset_server();
    server.change(|state| {
        let fewer = dataset_files().into_iter().filter(|(name, _)| !name.contains("test")).collect();
        state.commits.insert(NEXT.into(), fewer);
        state.revisions.insert("v2".into(), NEXT.into());
    });
    let policy = golden().join("models/gpt2").canonicalize().unwrap();
    let here = server.cache.path().join("here");
    for (name, bytes) in dataset_files().iter().filter(|(name, _)| name.contains("train")) {
        fs::create_dir_all(here.join(name).parent().unwrap()).unwrap();
        fs::write(here.join(name), bytes).unwrap();
    }
    let line = |data: &str| {
        let policy = policy.display();
        format!(
            "generate --do_sample false --max_new_tokens 4 --model {policy} --dataset_split train --dataset_name {data}"
        )
    };
    let expected = runs(&mut program(&server, &line("here"))).0;
    assert_eq!(expected.lines().count(), 3);
    assert_eq!(runs(&mut program(&server, &line(NAME))), (expected.clone(), String::new()));
    assert_eq!(runs(&mut program(&server, &line(&format!("{NAME}@v2")))), (expected.clone(), String::new()));
    server.asked();
    let offline = runs(program(&server, &line(NAME)).env("HF_HUB_OFFLINE", "1"));
    assert_eq!((offline, server.asked().len()), ((expected, String::new()), 0));

    let sft = format!("sft --model_name_or_path {} --max_steps 1 --output_dir out --report_to none", policy.display());
    for (data, words) in [
        (format!("{NAME} --dataset_train_split dev"), &["expected a split `dev`", "found `test`, `train`"][..]),
        (format!("{NAME}@v2 --dataset_test_split dev"), &["expected a split `dev`", "found `train`"]),
        (format!("{NAME}@v3"), &["no revision v3"]),
        ("someone/other".into(), &["someone/other: no such file or folder", "no such dataset"]),
    ] {
        let refused = output(&mut program(&server, &format!("{sft} --dataset_name {data}")));
        let error = String::from_utf8(refused.stderr).unwrap();
        assert_eq!((refused.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        for word in words {
            assert!(error.contains(word), "no `{word}` in {error}");
        }
    }
    fs::write(here.join("pairs.jsonl"), "{\"prompt\": \"The\", \"completion\": \" end\"}\n").unwrap();
    server.change(|state| {
        let rows = [("train.csv".to_string(), b"prompt,completion\nThe,\" end, so\"\n".to_vec())].into();
        state.commits.insert(COMMIT.into(), rows);
    });
    let data = format!("{NAME} here/pairs.jsonl --dataset_weights 1 3");
    runs(&mut program(&server, &format!("{sft} --per_device_train_batch_size 2 --dataset_name {data}")));
    let written = fs::read_to_string(server.cache.path().join("out/config.yaml")).unwrap();
    assert!(written.contains(NAME) && written.contains("here/pairs.jsonl"), "names stay as they were typed: {written}");
}

#[test]
fn certificates_that_cannot_be_used_are_named_and_offline_not_needed() {
    let server = Server::of("gpt2");
    find(&server.hub());
    let file = server.cache.path().join("roots.pem");
    let damaged = "-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----\n";
    for (text, word) in [(None, "cannot read"), (Some("roots"), "found none"), (Some(damaged), "PEM")] {
        if let Some(text) = text {
            fs::write(&file, text).unwrap();
        }
        let hub = Hub { certificates: Some(file.clone()), ..server.hub() };
        refuses(&hub, None, &["SSL_CERT_FILE", "roots.pem", word]);
        find(&Hub { offline: true, ..hub });
    }
}

#[test]
fn a_run_file_keeps_the_name_as_it_was_typed() {
    let server = Server::of("gpt2");
    let row = json!({"prompt": "The", "completion": " end"}).to_string();
    fs::write(server.cache.path().join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    let line = "sft --dataset_name rows.jsonl --max_steps 1 --per_device_train_batch_size 4 --report_to none";
    runs(&mut program(
        &server,
        &format!("{line} --model_name_or_path {NAME} --model_revision main --output_dir tuned"),
    ));
    let written = fs::read_to_string(server.cache.path().join("tuned/config.yaml")).unwrap();
    assert!(written.contains(&format!("model_name_or_path: {NAME}")), "{written}");

    // From random weights: no weights are fetched.
    let server = Server::of("gpt2");
    fs::write(server.cache.path().join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    runs(&mut program(&server, &format!("{line} --config_name {NAME} --tokenizer_name {NAME} --output_dir fresh")));
    assert!(server.asked_for().iter().all(|what| !what.contains("safetensors")));

    let server = Server::of("gpt2_cls");
    fs::write(server.cache.path().join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    let policy = golden().join("models/gpt2").canonicalize().unwrap();
    let line = "ppo --dataset_name rows.jsonl --total_episodes 4 --per_device_train_batch_size 4 --response_length 4";
    let models = format!("--sft_model_path {} --reward_model_path {NAME} --output_dir ppo", policy.display());
    runs(&mut program(&server, &format!("{line} {models} --gradient_accumulation_steps 1 --report_to none")));
}

#[test]
fn a_resumed_run_reads_its_first_commits_despite_later_pushes() {
    let server = Server::of("gpt2_cls");
    fs::write(server.cache.path().join("rows.jsonl"), "{\"prompt\": \"The\"}\n").unwrap();
    let policy = golden().join("models/gpt2").canonicalize().unwrap();
    let line = format!(
        "ppo --dataset_name rows.jsonl --total_episodes 8 --per_device_train_batch_size 4 --response_length 4 --report_to none \
         --sft_model_path {} --reward_model_path {NAME} --save_steps 1",
        policy.display()
    );
    let run = |flags: &str| runs(&mut program(&server, &format!("{line} {flags}")));
    run("--output_dir out");
    let model = || fs::read(server.cache.path().join("out/model.safetensors")).unwrap();
    let expected = model();
    let mut files = model_files("gpt2_cls");
    files.insert("config.json".into(), b"{}".to_vec());
    server.change(|state| {
        state.commits.insert(NEXT.into(), files);
        state.revisions.insert("main".into(), NEXT.into());
    });
    fs::remove_dir_all(server.cache.path().join("out/checkpoint-2")).unwrap();
    run("--output_dir out --resume_from_checkpoint true");
    assert!(model() == expected);
    let fresh = output(&mut program(&server, &format!("{line} --output_dir fresh")));
    assert!(!fresh.status.success(), "a new run reads what is there now");
    // And what is gone is not replaced by something else.
    fs::remove_dir_all(server.cache.path().join("out/checkpoint-2")).unwrap();
    fs::remove_dir_all(server.cached("snapshots").join(COMMIT)).unwrap();
    server.change(|state| drop(state.commits.remove(COMMIT)));
    let gone = output(&mut program(&server, &format!("{line} --output_dir out --resume_from_checkpoint true")));
    let error = String::from_utf8(gone.stderr).unwrap();
    assert!(error.contains(&format!("no revision {COMMIT}")), "{error}");
}

#[test]
fn hostile_descriptions_of_a_model_are_errors_and_nothing_is_written_outside_the_cache() {
    let server = Server::of("gpt_neox");
    let names = model_files("gpt_neox").into_keys().chain(
        ["../../escape", "/tmp/escape", "a/../../escape", ".", "", "\u{1b}[2J", "model.safetensors/x", "a//b"]
            .map(String::from),
    );
    let siblings: Vec<_> = names.map(|name| json!({"rfilename": name})).collect();
    let whole = json!({"id": NAME, "sha": COMMIT, "siblings": siblings});
    let (mut found, mut refused) = (0, 0);
    for case in 0..crate::attack::cases(200) {
        let mut dice = Dice(case);
        let mut bytes = whole.to_string().into_bytes();
        if dice.roll(2) == 0 {
            let mut value = whole.clone();
            (0..=dice.roll(3)).for_each(|_| mutate(&mut value, &mut dice));
            bytes = value.to_string().into_bytes();
        } else {
            mutate_text(&mut bytes, &mut dice);
        }
        server.change(|state| state.description = Some(bytes));
        let hub = Hub { cache: server.cache.path().join(format!("hubs/{case}/hub")), ..server.hub() };
        match hub.find(Path::new(NAME), None, Part::Model) {
            Ok(dir) => {
                assert!(dir.starts_with(&hub.cache), "{}", dir.display());
                found += 1;
            }
            Err(error) => {
                crate::attack::check_error(&format!("case {case}"), &error.to_string());
                refused += 1;
            }
        }
        let parent = hub.cache.parent().unwrap();
        if parent.exists() {
            assert_eq!(fs::read_dir(parent).unwrap().count(), 1, "case {case} wrote outside the cache");
            fs::remove_dir_all(parent).unwrap();
        }
    }
    assert!(found > 10 && refused > 10, "{found} found, {refused} refused");
    let all: Vec<_> = fs::read_dir(server.cache.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(all, ["hubs"], "written outside the cache");
}
