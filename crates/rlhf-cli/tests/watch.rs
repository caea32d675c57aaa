//! `rlhf watch`: the live page of a run over HTTP, and what is refused.

use crate::cli::{Scratch, snapshot};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The program serving the page of a run; killed when it is dropped.
struct Watch {
    child: Child,
    /// Address and port.
    address: String,
}

/// An answer of the server.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Watch {
    fn start(scratch: &Scratch, line: &str) -> Self {
        let mut child = scratch.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut url).unwrap();
        let address = url.trim_end().strip_prefix("http://").unwrap_or_else(|| panic!("no address: {url}")).to_string();
        Self { child, address }
    }

    fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: {}\r\n", self.address))
    }

    /// Sends the lines of a request.
    fn send(&self, head: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        write!(stream, "{head}Connection: close\r\n\r\n").unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{head}: {text}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_ascii_lowercase(), body: body.into() }
    }

    fn parts(&self, since: &str) -> Value {
        let answer = self.get(&format!("/parts?since={since}"));
        assert_eq!(answer.status, 200, "{}", answer.body);
        serde_json::from_str(&answer.body).unwrap()
    }

    /// Returns the first parts after `since` that are not empty.
    fn next_parts(&self, since: &str) -> Value {
        let began = Instant::now();
        loop {
            let parts = self.parts(since);
            if !parts["parts"].as_object().unwrap().is_empty() {
                return parts;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "nothing new");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The revision that a page names.
fn page_revision(page: &str) -> &str {
    let (_, rest) = page.split_once("data-revision=\"").unwrap();
    rest.split('"').next().unwrap()
}

/// A line of metrics of PPO.
fn line(step: u32) -> String {
    let score = f64::from(step) / 8.0;
    format!(
        "{}\n",
        json!({"step": step, "episode": 8 * step, "objective/scores": score, "objective/kl": score * score})
    )
}

/// A folder with a run of two updates, in progress.
fn run_in(scratch: &Scratch) {
    std::fs::create_dir_all(scratch.path("out/samples")).unwrap();
    scratch.write("out/metrics.jsonl", &[line(1), line(2)].concat());
    scratch.write("out/config.yaml", "total_episodes: 80\nnote: \"<script>alert(1)</script>\"\n");
    scratch.write("secret.txt", "4711");
}

#[test]
fn new_lines_samples_and_alarms_are_in_the_next_parts_and_all_text_is_escaped() {
    let scratch = Scratch::new();
    run_in(&scratch);
    let watch = Watch::start(&scratch, "watch out");
    assert!(watch.address.starts_with("127.0.0.1:"), "{}", watch.address);
    let page = watch.get("/");
    assert!(page.status == 200 && page.head.contains("content-type: text/html; charset=utf-8"), "{}", page.head);
    for part in [
        "update 2 of 10, interrupted, or at work on another machine",
        "id=\"progress\" data-short=\"\"",
        "connect-src 'self'",
        "<noscript>",
        "data-metric=\"objective/scores\" value=\"0.25\"",
        "&lt;script&gt;alert(1)",
    ] {
        assert!(page.body.contains(part), "no {part} in {}", page.body);
    }
    assert_eq!(page.body.matches("<script").count(), 1);
    let revision = page_revision(&page.body);
    assert_eq!(watch.parts(revision), json!({"revision": revision, "parts": {}}));
    assert_eq!(watch.parts("")["parts"].as_object().unwrap().len(), 6, "all parts");

    let append = |name: &str, text: &str| {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(scratch.path(name)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    };
    append("out/metrics.jsonl", &(line(3) + "{\"step\":4,\"obj"));
    let next = watch.next_parts(revision);
    let parts = next["parts"].as_object().unwrap();
    assert!(parts["curves"].as_str().unwrap().contains("data-metric=\"objective/scores\" value=\"0.375\""));
    assert!(parts["progress"].as_str().unwrap().contains("update 3 of 10") && !parts.contains_key("configuration"));

    let row = json!({"step": 3, "prompt": "<img src=x onerror=alert(2)>", "response": "\"'&", "score": 1});
    scratch.write("out/samples/update-000003.jsonl", &format!("{row}\n"));
    let next = watch.next_parts(next["revision"].as_str().unwrap());
    let samples = next["parts"]["samples"].as_str().unwrap();
    assert!(
        samples.contains("&lt;img src=x") && !samples.contains("<img") && next["parts"].get("curves").is_none(),
        "{samples}"
    );

    let alarm = json!({"step": 3, "alarm": "runaway_kl", "message": "update 3: far; lower learning_rate"});
    append("out/alarms.jsonl", &format!("{alarm}\n"));
    let next = watch.next_parts(next["revision"].as_str().unwrap());
    assert!(next["parts"]["verdict"].as_str().unwrap().contains("1 alarm: runaway_kl at update 3."), "{next}");
    assert!(next["parts"]["curves"].as_str().unwrap().contains("class=\"mark"), "{next}");
}

#[test]
fn a_signal_ends_it_without_a_word() {
    let scratch = Scratch::new();
    run_in(&scratch);
    let mut watch = Watch::start(&scratch, "watch out");
    assert!(Command::new("kill").args(["-INT", &watch.child.id().to_string()]).status().unwrap().success());
    let mut errors = String::new();
    watch.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(errors, "");
}

#[test]
fn nothing_but_the_page_and_its_parts_is_answered_and_nothing_is_written() {
    let scratch = Scratch::new();
    run_in(&scratch);
    let before = snapshot(&scratch.path(""));
    let watch = Watch::start(&scratch, "watch out");
    for path in [
        "/metrics.jsonl",
        "/out",
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "//etc/passwd",
        "/parts/../../secret.txt",
        "/?file=../secret.txt",
        "/parts?since=../../secret.txt",
    ] {
        let answer = watch.get(path);
        assert_eq!(answer.status, if path.contains('?') { 200 } else { 404 }, "{path}");
        assert!(!answer.body.contains("4711") && !answer.body.contains("root:"), "{path}: {}", answer.body);
    }
    let host = format!("Host: {}\r\n", watch.address);
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        for path in ["/", "/parts"] {
            let answer = watch.send(&format!("{method} {path} HTTP/1.1\r\n{host}Content-Length: 0\r\n"));
            assert_eq!(answer.status, 405, "{method} {path}");
        }
    }
    let head = watch.send(&format!("HEAD / HTTP/1.1\r\n{host}"));
    assert!(head.status == 200 && head.body.is_empty(), "{}", head.head);
    // A page of another site whose name leads here, and one that asks for another origin's data.
    assert_eq!(watch.send("GET / HTTP/1.1\r\nHost: evil.example\r\n").status, 403);
    assert_eq!(watch.send(&format!("GET /parts HTTP/1.1\r\n{host}Origin: http://evil.example\r\n")).status, 403);
    assert!(snapshot(&scratch.path("")) == before, "files have changed");
}

#[test]
fn a_run_can_be_watched_before_its_first_update_and_while_its_folder_is_gone() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("out")).unwrap();
    scratch.write("out/config.yaml", "# Every setting of this run, as resolved by rlhf 0.1.0.\nseed: 1\n");
    let watch = Watch::start(&scratch, "watch out");
    let page = watch.get("/").body;
    assert!(page.contains("update 0") && page.contains("0 updates so far"), "{page}");
    std::fs::rename(scratch.path("out"), scratch.path("elsewhere")).unwrap();
    let gone = watch.next_parts(page_revision(&page));
    let progress = gone["parts"]["progress"].as_str().unwrap();
    assert!(
        progress.contains("last state that could be read: ") && progress.contains("found no such folder"),
        "{progress}"
    );
    std::fs::rename(scratch.path("elsewhere"), scratch.path("out")).unwrap();
    scratch.write("out/metrics.jsonl", &line(1));
    let back = watch.next_parts(gone["revision"].as_str().unwrap());
    assert!(back["parts"]["progress"].as_str().unwrap().contains("update 1"), "{back}");
}

#[test]
fn a_signal_ends_it_and_bad_arguments_are_one_error() {
    let scratch = Scratch::new();
    run_in(&scratch);
    let mut watch = Watch::start(&scratch, "watch out");
    let pid = watch.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(watch.child.wait().unwrap().code(), Some(0));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    scratch.refuses(&format!("watch out --port {port}"), 1, &[&port.to_string(), "is taken", "--port"]);
    scratch.refuses("watch out --host 192.0.2.1", 2, &["192.0.2.1", "expected an address of this machine"]);
    scratch.refuses("watch out --port 65536", 2, &["port = 65536: expected at most 65535"]);
    scratch.refuses("watch out --terminal", 2, &["terminal: expected a terminal as standard input and output"]);
    scratch.refuses("watch out --terminal --port 80", 2, &["port = 80 has no effect with terminal"]);
    scratch.refuses("watch nowhere", 1, &["nowhere", "expected the folder of a run", "found no such folder"]);
    scratch.refuses("watch policy", 1, &["policy", "found no metrics.jsonl in it"]);
    scratch.refuses("watch", 2, &["RUN"]);
    scratch.refuses("launch --nproc_per_node 2 watch out", 2, &["watch is done by one process"]);
}
