//! `rlhf doctor` as a user runs it: its facts against the system's, and the environments that it is for.

use crate::cli::{Ran, Scratch};
use crate::support::{PROGRAM, output};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;

/// The findings of `rlhf doctor --json` by their names, and its exit code.
struct Report {
    code: i32,
    checks: HashMap<String, Map<String, Value>>,
    status: String,
}

impl Report {
    #[track_caller]
    fn of(command: &mut Command) -> Self {
        let ran = Ran::from(output(command));
        let whole: Value =
            serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}{}", ran.stdout, ran.stderr));
        let checks = whole["checks"].as_array().unwrap().iter().map(|check| {
            let check = check.as_object().unwrap().clone();
            (check["name"].as_str().unwrap().to_string(), check)
        });
        Self { code: ran.code, checks: checks.collect(), status: whole["status"].as_str().unwrap().into() }
    }

    #[track_caller]
    fn fact(&self, check: &str, name: &str) -> &Value {
        &self.checks[check]["facts"][name]
    }

    /// The check has this status, and these words in its text and hint.
    #[track_caller]
    fn finds(&self, check: &str, status: &str, words: &[&str]) {
        let found = &self.checks[check];
        assert_eq!(found["status"], status, "{found:?}");
        let whole = format!("{} {}", found["text"], found.get("hint").unwrap_or(&Value::Null));
        for word in words {
            assert!(whole.contains(word), "{check}: no `{word}` in {whole}");
        }
        assert_eq!(found.contains_key("hint"), status != "ok", "{found:?}");
    }
}

fn doctor(line: &str) -> (Scratch, Command) {
    let scratch = Scratch::with_policy("gpt_neox");
    let mut command = scratch.command(&format!("doctor --json {line}"));
    command.env_remove("OMP_NUM_THREADS").env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN");
    (scratch, command)
}

#[test]
fn its_facts_are_those_of_the_system() {
    let (scratch, mut command) = doctor("--offline --no_self_test");
    let found = Report::of(&mut command);
    assert_eq!(found.code, 0);
    assert!(!found.checks.contains_key("update"));
    assert_eq!(found.fact("rlhf", "version"), env!("CARGO_PKG_VERSION"));

    let folder = tch_ext_folder();
    assert_eq!(found.fact("libtorch", "folder"), &folder);
    assert_eq!(found.fact("libtorch", "version").as_str().unwrap().split('+').next(), Some("2.11.0"));
    assert_eq!(found.fact("libtorch", "mkl"), tch::utils::has_mkl());
    assert_eq!(found.fact("libtorch", "openmp").as_array().unwrap().len(), 1);

    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    let usable = std::thread::available_parallelism().unwrap().get();
    assert_eq!(found.fact("threads", "usable_processors"), usable);
    let online = read("/proc/cpuinfo").lines().filter(|line| line.starts_with("processor")).count();
    assert_eq!(found.fact("threads", "processors"), online);
    assert!(found.fact("threads", "threads").as_u64().unwrap() as usize <= usable);
    let meminfo = read("/proc/meminfo");
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")).unwrap();
    assert_eq!(found.fact("memory", "total").as_u64().unwrap(), total.parse::<u64>().unwrap() << 10);
    if read("/proc/cpuinfo").contains(" avx512bw ") {
        assert_eq!(found.fact("cpu", "kernels"), "AVX-512");
    }

    let here = scratch.path("").canonicalize().unwrap();
    assert_eq!(found.fact("working folder", "path"), here.to_str().unwrap());
    assert_eq!(found.fact("working folder", "writable"), true);
    let df = Command::new("df").args(["-Pk", here.to_str().unwrap()]).output().unwrap();
    let df = String::from_utf8(df.stdout).unwrap();
    let free = df.lines().nth(1).unwrap().split_whitespace().nth(3).unwrap().parse::<f64>().unwrap() * 1024.0;
    let gap = found.fact("working folder", "free").as_f64().unwrap() - free;
    assert!(gap.abs() < 2e9, "{gap}");
    assert_eq!(found.fact("hub cache", "path"), scratch.path("hf/hub").to_str().unwrap());
    assert!(!scratch.path("hf").exists(), "the doctor changes nothing");
    let driver = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"].iter().any(|path| std::path::Path::new(path).exists());
    assert_eq!(found.fact("gpu", "driver"), driver);
    found.finds("hub", "ok", &["https://huggingface.co", "no token"]);
}

/// The folder of libtorch in this process, from the list of its mapped files.
fn tch_ext_folder() -> String {
    tch::set_num_threads(1);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().find_map(|line| line[line.find('/')?..].strip_suffix("/libtorch_cpu.so")).unwrap();
    path.to_string()
}

#[test]
fn the_self_test_passes_and_leaves_no_file() {
    let (scratch, mut command) = doctor("--offline");
    std::fs::create_dir(scratch.path("tmp")).unwrap();
    let found = Report::of(command.env("TMPDIR", scratch.path("tmp")));
    found.finds("first pass", "ok", &["first ratio 1 within", "KL to the reference 0 within"]);
    found.finds("update", "ok", &["policy loss"]);
    found.finds("save and load", "ok", &["equal bit for bit"]);
    found.finds("speed", "ok", &["GFLOP/s"]);
    assert!(found.fact("first pass", "ratio").as_f64().unwrap() < 1e-4);
    assert!((found.code, found.status == "failure") == (0, false), "{:?}", found.checks);
    assert_eq!(std::fs::read_dir(scratch.path("tmp")).unwrap().count(), 0);
}

#[test]
fn the_lines_are_one_for_each_check_and_the_exit_code_is_that_of_the_worst() {
    let scratch = Scratch::with_policy("gpt_neox");
    let ran = scratch.run("doctor --offline --no_self_test");
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(lines.len(), 13, "{}", ran.stdout);
    for line in &lines[..12] {
        assert!(["ok       ", "warning  "].iter().any(|start| line.starts_with(start)), "{line}");
    }
    // A temporary folder that does not exist.
    let ran = Ran::from(output(scratch.command("doctor --offline").env("TMPDIR", "/nowhere/else")));
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    let failed = ran.stdout.lines().find(|line| line.starts_with("failure")).unwrap();
    assert!(
        failed.contains("first pass") && failed.contains("/nowhere/else") && failed.contains("set TMPDIR"),
        "{failed}"
    );
    assert!(ran.stdout.lines().last().unwrap().starts_with("1 failure"), "{}", ran.stdout);
}

#[test]
fn each_fault_of_the_environment_has_its_line() {
    let (scratch, mut command) = doctor("--no_self_test");
    // No port is listened on there.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    command.env("HF_ENDPOINT", format!("http://{free}")).env("OMP_NUM_THREADS", "64").env("PATH", "/nowhere");
    command
        .env("HF_HOME", scratch.path("prompts.jsonl"))
        .env("ATEN_CPU_CAPABILITY", "default")
        .env("OMP_WAIT_POLICY", "passive");
    let found = Report::of(&mut command);
    found.finds("threads", "warning", &["OMP_NUM_THREADS", "unset OMP_NUM_THREADS"]);
    found.finds("python", "warning", &["no python3", "install Python 3"]);
    found.finds("hub", "warning", &["cannot be reached", "check the network", "HF_HUB_OFFLINE=1"]);
    found.finds("hub cache", "warning", &["prompts.jsonl/hub cannot be written, nor created in", "set HF_HOME"]);
    if cfg!(target_arch = "x86_64") {
        found.finds("cpu", "warning", &["unset ATEN_CPU_CAPABILITY"]);
    }
    assert_eq!((found.code, found.status.as_str()), (0, "warning"));
}

#[test]
fn a_limit_on_addresses_is_named() {
    let scratch = Scratch::with_policy("gpt_neox");
    let script = "ulimit -v 16000000 && exec \"$0\" doctor --json --offline --no_self_test";
    let mut command = Command::new("sh");
    command.args(["-c", script, PROGRAM]).current_dir(scratch.path("")).env("OMP_NUM_THREADS", "1");
    let found = Report::of(&mut command);
    found.finds("memory", "warning", &["ulimit -v is 15 GiB", "ulimit -v unlimited"]);
    assert_eq!(found.fact("memory", "address_space_limit"), 16_000_000_u64 << 10);
}

#[test]
fn the_token_is_verified_and_never_printed() {
    const TOKEN: &str = "hf_verysecret";
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    // A hub that knows one token.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let read = stream.read(&mut request).unwrap_or(0);
            let request = String::from_utf8_lossy(&request[..read]).to_ascii_lowercase();
            let known = request.contains(&format!("authorization: bearer {TOKEN}\r\n"));
            assert!(request.starts_with("get /api/whoami-v2 "), "{request}");
            let body = if known { r#"{"name": "someone"}"# } else { r#"{"error": "Invalid"}"# };
            let status = if known { "200 OK" } else { "401 Unauthorized" };
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
        }
    });
    for (token, code, status, words) in [
        (Some(TOKEN), 0, "ok", &["is that of someone"][..]),
        // A line break at its end is the shell's.
        (Some("hf_verysecret\n"), 0, "ok", &["is that of someone"]),
        (Some("hf_verysecret2"), 1, "failure", &["refuses the token of HF_TOKEN", "put a valid token"]),
        (Some("hf_verysecret\nhf_more"), 1, "failure", &["a line break", "copy the token again"]),
        (None, 0, "ok", &["public models only"]),
    ] {
        let (_scratch, mut command) = doctor("--no_self_test");
        command.env("HF_ENDPOINT", &endpoint);
        if let Some(token) = token {
            command.env("HF_TOKEN", token);
        }
        let output = output(&mut command);
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(!text.contains("verysecret") && !text.contains("hf_more"), "{text}");
        let found = Report::of(&mut command);
        found.finds("hub", status, words);
        assert_eq!(found.code, code, "{token:?}");
    }
}
