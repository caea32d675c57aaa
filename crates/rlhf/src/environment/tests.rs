//! Tests of environments of every kind, and of what breaks them.

use super::*;
use rlhf_base::Error;
use serde_json::json;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tungstenite::Message;

/// A program whose sessions behave as the column `mode` of their row says.
const PROGRAM: &str = r#"
import json, os, sys, time

def out(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()

tools = [{"type": "function", "function": {"name": "go", "description": "Goes.", "parameters": {"type": "object", "properties": {}}}}]
modes, held = {}, []
for line in sys.stdin:
    asked = json.loads(line)
    id = asked["id"]
    if "open" in asked:
        mode = modes[asked["open"]] = asked["row"]["mode"]
        if mode == "refuse":
            out({"id": id, "error": "no such\n task"})
        else:
            out({"id": id, "prompt": f"seed {asked['seed']}", "tools": tools if mode != "toolless" else None})
    elif "close" in asked:
        out({"id": id, "reward": 2 if modes[asked["close"]] == "ok" else None, "extra_logs": {"steps": 1}})
    else:
        mode, results = modes[asked["session"]], [{"name": call["name"], "content": "went"} for call in asked["calls"]]
        reply = {"id": id, "results": results, "reward": 0.5, "done": mode == "over"}
        if mode == "hang":
            continue
        if mode == "exit":
            print("the reason", file=sys.stderr, flush=True)
            os._exit(3)
        if mode == "held":
            # The replies come in reverse order, after the second request.
            held.append(reply)
            while len(held) == 2:
                out(held.pop())
                out(held.pop())
            continue
        if mode == "endless":
            while True:
                sys.stdout.write("x" * 100000)
        if mode == "silent":
            os.close(1)
            time.sleep(30)
        reply.update({
            "wrong": {"id": 999}, "twice": {}, "large": {"results": [{"content": "é" * 5000000}]}, "tools": {"tools": tools},
            "lie": {"done": "yes"}, "many": {"results": results * 2}, "nan": {"reward": "high"}, "error": {"results": [{"error": "no"}]},
            "number": {"results": [{"content": 7}]},
        }.get(mode, {}))
        out(reply if mode != "text" else "hello")
        if mode == "twice":
            out(reply)
"#;

/// Classes and functions of Python.
const MODULE: &str = r#"
import asyncio, os, sys, threading, time

calls = []

def note(text: str) -> str:
    """Notes a text.

    Args:
        text: The text.
    """
    print("noted", text)
    calls.append(text)
    return calls

async def later(text: str) -> str:
    """Notes a text later.

    Args:
        text: The text.
    """
    calls.append(f"later {text}")
    return len(calls)

def leave() -> None:
    """Exits."""
    sys.exit(4)

class Base:
    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: The number that is added.
        """
        self.count += step
        return self.count

class Counter(Base):
    made = 0

    def __init__(self):
        Counter.made += 1
        self.number, self.resets = Counter.made, 0

    def reset(self, target, **row):
        self.count, self.target, self.resets = 0, target, self.resets + 1
        return f"To {target}, {row['prompt']}, {self.number}/{self.resets}."

    def environment(self, name: str) -> str:
        """Reads a variable.

        Args:
            name: Its name.
        """
        return os.environ.get(name)

    def fail(self) -> None:
        """Fails."""
        raise KeyError("gone")

    async def wait(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: The time.
        """
        await asyncio.sleep(seconds)
        return threading.current_thread() is not threading.main_thread()

    def hang(self) -> None:
        """Hangs."""
        time.sleep(60)

    def _private(self):
        pass

    def get_reward(self):
        return self.count == self.target

class Other(Base):
    def reset(self, seed, **row):
        self.count = seed
        assert "environment" not in row

class Strict:
    def reset(self):
        pass
"#;

fn limits(folder: &Path) -> Limits {
    // Starting Python beside other tests has taken a second.
    Limits { call: Duration::from_secs(3), folder: Some(folder.into()), ..Limits::default() }
}

fn folder(file: &str, text: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(file), text).unwrap();
    folder
}

fn row(value: Value) -> Map<String, Value> {
    serde_json::from_value(value).unwrap()
}

fn call(name: &str, arguments: Value) -> ToolCall {
    ToolCall { name: name.into(), arguments: row(arguments) }
}

fn open(environment: &dyn Environment, columns: Value) -> Box<dyn Session> {
    environment.open(&row(columns), 7).unwrap().expect("a free session")
}

fn contents(called: &Called) -> Vec<&str> {
    called.results.iter().map(|result| result.content.as_str()).collect()
}

/// Returns the error of a call of a session of [`PROGRAM`] in this mode, and of its beginning.
fn session_error(environment: &ProgramEnvironment, mode: &str) -> String {
    let opened = environment.open(&row(json!({"mode": mode})), 7);
    let called = opened.and_then(|session| session.unwrap().call(&[call("go", json!({}))]));
    called.expect_err(mode).to_string()
}

#[test]
fn a_program_serves_sessions_whose_replies_come_in_any_order() {
    let folder = folder("program.py", PROGRAM);
    let environment = ProgramEnvironment::command("python3 program.py", limits(folder.path()), Log::default());
    let mut session = open(&environment, json!({"mode": "ok"}));
    assert_eq!((session.opened().prompt.as_deref(), session.opened().tools.len()), (Some("seed 7"), 1));
    let called = session.call(&[call("go", json!({})), call("go", json!({}))]).unwrap();
    assert_eq!((contents(&called), called.reward, called.done), (vec!["went", "went"], Some(0.5), false));
    assert_eq!(session.finish().unwrap(), Finished { reward: Some(2.0), logs: vec![("steps".into(), 1.0)] });
    let [mut first, mut second] = ["held"; 2].map(|mode| open(&environment, json!({"mode": mode})));
    let other = thread::spawn(move || second.call(&[call("go", json!({})), call("stop", json!({}))]).unwrap());
    assert_eq!(first.call(&[call("go", json!({}))]).unwrap().results.len(), 1);
    assert_eq!(other.join().unwrap().results[1].name, "stop");
    // The sum of its turns, as its end has none.
    assert_eq!(first.finish().unwrap().reward, Some(0.5));
    let mut over = open(&environment, json!({"mode": "over"}));
    assert!(over.call(&[call("go", json!({}))]).unwrap().done);
    let again = over.call(&[call("go", json!({}))]).unwrap_err().to_string();
    assert!(again.contains("cannot call `go`: it has said that the episode is over"), "{again}");
    let mut failing = open(&environment, json!({"mode": "error"}));
    let called = failing.call(&[call("go", json!({}))]).unwrap();
    assert_eq!(called.results, [ToolResult::failed("go", r#"{"error":"no"}"#)]);
}

#[test]
fn a_program_that_breaks_the_protocol_is_one_line_and_is_started_again() {
    let folder = folder("program.py", PROGRAM);
    // Without `exec` the shell keeps the output open.
    let environment = ProgramEnvironment::command("exec python3 program.py", limits(folder.path()), Log::default());
    for (mode, expected) in [
        ("refuse", "cannot open the session: no such\\n task"),
        ("toolless", "expected a list of schemas in \"tools\" after open, found null"),
        ("hang", "cannot call `go`: no reply within 3 s"),
        ("exit", "the process exited (exit status: 3); its standard error ends with: the reason"),
        ("silent", "the process closed its standard output"),
        ("wrong", "expected the \"id\" of a request without a reply, found \"{\\\"id\\\": 999"),
        ("text", "expected a JSON object per line on its standard output, found \"\\\"hello\\\"\""),
        ("endless", "expected a line of at most 33554432 bytes on its standard output, found a longer one"),
        ("tools", "expected the tools of a session to stay those of its beginning"),
        ("lie", "expected true or false in \"done\", found \"yes\""),
        ("many", "expected 1 results, one per call, found 2"),
        ("nan", "expected a finite number or null in \"reward\", found \"high\""),
        ("number", "expected a text in \"content\" of each result"),
    ] {
        let error = session_error(&environment, mode);
        assert!(error.starts_with("environment the program: ") && error.contains(expected), "{mode}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let mut large = open(&environment, json!({"mode": "large"}));
    let called = large.call(&[call("go", json!({}))]).unwrap();
    let content = &called.results[0].content;
    assert!(content.ends_with("é\n[... 9936000 more bytes were cut]") && content.len() < 64_100, "{}", content.len());
    // The second reply fails the process, and the next session has a new one.
    let mut twice = open(&environment, json!({"mode": "twice"}));
    assert!(twice.call(&[call("go", json!({}))]).is_ok());
    let until = Instant::now() + Duration::from_secs(5);
    let next =
        || environment.open(&row(json!({"mode": "ok"})), 7).and_then(|session| session.expect("a free one").finish());
    while next().is_err() && Instant::now() < until {}
    assert_eq!(open(&environment, json!({"mode": "ok"})).finish().unwrap().reward, Some(2.0));
    let missing = ProgramEnvironment::command("./nowhere", limits(folder.path()), Log::default());
    let error = missing.open(&row(json!({})), 0).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("the process exited (exit status: 127)") && error.contains("nowhere"), "{error}");
}

#[test]
fn python_classes_are_reset_called_and_scored_as_in_trl() {
    let folder = folder("games.py", MODULE);
    let log = folder.path().join("log");
    let classes = [(None, "games.Counter".to_string())];
    let environment = ProgramEnvironment::python(&[], &classes, limits(folder.path()), Log::at(&log));
    environment.start().unwrap();
    assert_eq!((environment.reward_names(), environment.files()), (vec!["Counter".into()], vec!["games.py".into()]));
    assert!(!environment.in_lockstep());
    let mut session = open(&environment, json!({"target": 5, "prompt": "p"}));
    let mut other = open(&environment, json!({"target": 6, "prompt": "q"}));
    assert_eq!(session.opened().prompt.as_deref(), Some("To 5, p, 1/1."));
    assert_eq!(other.opened().prompt.as_deref(), Some("To 6, q, 2/1."));
    let names: Vec<_> = session.opened().tools.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["environment", "fail", "hang", "increment", "wait"]);
    let calls = [
        call("wait", json!({"seconds": 0.01})),
        call("increment", json!({"step": 5})),
        call("fail", json!({})),
        call("get_reward", json!({})),
        call("increment", json!({"by": 1})),
    ];
    let called = session.call(&calls).unwrap();
    let expected = [
        "5",
        "{'error': \"'gone'\"}",
        "{'error': 'Tool get_reward not found.'}",
        "{'error': \"Base.increment() got an unexpected keyword argument 'by'\"}",
        "True",
    ];
    assert_eq!(contents(&called), expected);
    assert_eq!(called.results.iter().map(|result| result.failed).collect::<Vec<_>>(), [false, true, true, true, false]);
    let hidden = other.call(&[call("environment", json!({"name": "CARGO_REGISTRY_TOKEN"}))]).unwrap();
    assert_eq!(contents(&hidden), ["None"]);
    assert_eq!((session.finish().unwrap().reward, other.finish().unwrap().reward), (Some(1.0), Some(0.0)));
    // The instance of the first row is reused for the first row.
    let mut hanging = open(&environment, json!({"target": 1, "prompt": "r"}));
    assert_eq!(hanging.opened().prompt.as_deref(), Some("To 1, r, 1/2."));
    let error = hanging.call(&[call("hang", json!({}))]).unwrap_err().to_string();
    assert!(error.contains("environment `games.Counter`: cannot call `hang`: no reply within 3 s"), "{error}");
    // One that hangs does not hold the others, and its instance is replaced.
    let mut next = open(&environment, json!({"target": 1, "prompt": "s"}));
    assert_eq!(contents(&next.call(&[call("increment", json!({"step": 1}))]).unwrap()), ["1"]);
    drop(hanging);
    assert_eq!(
        open(&environment, json!({"target": 1, "prompt": "t"})).opened().prompt.as_deref(),
        Some("To 1, t, 3/1.")
    );
    let strict =
        ProgramEnvironment::python(&[], &[(None, "games.Strict".into())], limits(folder.path()), Log::default());
    let error = strict.open(&row(json!({"prompt": "p"})), 0).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("`games.Strict.reset` raised TypeError") && error.contains("add **kwargs"), "{error}");
    assert!(std::fs::read_to_string(log).unwrap().contains("KeyError: 'gone'"));
}

#[test]
fn tools_of_python_share_a_process_and_are_called_in_order() {
    let folder = folder("games.py", MODULE);
    let log = folder.path().join("log");
    let tools = ["games.note", "games.later", "games.leave"].map(String::from);
    let classes =
        [(Some("a".to_string()), "games.Counter".to_string()), (Some("b".to_string()), "games.Other".to_string())];
    let environment = ProgramEnvironment::python(&tools, &classes, limits(folder.path()), Log::at(&log));
    environment.start().unwrap();
    assert!(environment.in_lockstep() && environment.tools().len() == 8);
    let mut first = open(&environment, json!({"environment": "b", "prompt": "p"}));
    assert_eq!((&first.opened().prompt, &first.opened().reward_name), (&None, &None));
    let mut second = open(&environment, json!({"environment": "a", "target": 0, "prompt": "p"}));
    assert_eq!(second.opened().reward_name.as_deref(), Some("Counter"));
    let calls = [
        call("later", json!({"text": "x"})),
        call("note", json!({"text": "y"})),
        call("increment", json!({"step": 1})),
    ];
    assert_eq!(contents(&first.call(&calls).unwrap()), ["['y']", "8", "2"]);
    assert_eq!(contents(&second.call(&calls[1..2]).unwrap()), ["['y', 'later x', 'y']"]);
    let error = second.call(&[call("leave", json!({}))]).unwrap_err().to_string();
    assert!(error.contains("SystemExit: 4 (games.py:") && error.contains("in leave)"), "{error}");
    let error = environment.open(&row(json!({"environment": "c"})), 0).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("expected one of the environments `a`, `b` in the column `environment`, found 'c'"),
        "{error}"
    );
    assert!(std::fs::read_to_string(log).unwrap().contains("noted y"));
    for (path, expected) in [
        ("games.nothing", "the module `games` (games.py) has no function `nothing`"),
        ("nowhere.f", "no module `nowhere` in"),
        ("games.Base", "expected a function, found type"),
        ("os.getcwd", "has no type hint"),
    ] {
        let environment = ProgramEnvironment::python(&[path.into()], &[], limits(folder.path()), Log::default());
        let error = environment.start().map_or_else(|e| e.to_string(), |()| "`getcwd` has no type hint".into());
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_limit_of_memory_reaches_the_program() {
    let folder = folder("games.py", MODULE);
    let mut limits = limits(folder.path());
    limits.memory = Some(1 << 30);
    let environment = ProgramEnvironment::command("ulimit -v >&2; exit 1", limits, Log::default());
    let error = environment.open(&row(json!({})), 0).map(|_| ()).unwrap_err().to_string();
    assert!(error.ends_with("its standard error ends with: 1048576"), "{error}");
}

/// An environment that sleeps, fails or panics as its row says, and has a number of free sessions.
struct Sleeper {
    free: usize,
    open: Arc<AtomicUsize>,
    most: AtomicUsize,
}

struct Sleeping {
    opened: Opened,
    open: Arc<AtomicUsize>,
}

impl Sleeper {
    fn new(free: usize) -> Arc<Self> {
        Arc::new(Self { free, open: Arc::default(), most: AtomicUsize::new(0) })
    }
}

impl Environment for Sleeper {
    fn open(&self, row: &Map<String, Value>, _seed: u64) -> Result<Option<Box<dyn Session>>> {
        if row.contains_key("fail") {
            return Err(Error::Run("it is dead".into()));
        }
        let open = self.open.fetch_add(1, Ordering::SeqCst) + 1;
        if open > self.free {
            self.open.fetch_sub(1, Ordering::SeqCst);
            return Ok(None);
        }
        self.most.fetch_max(open, Ordering::SeqCst);
        Ok(Some(Box::new(Sleeping { opened: Opened::default(), open: self.open.clone() })))
    }
}

impl Session for Sleeping {
    fn opened(&self) -> &Opened {
        &self.opened
    }

    fn call(&mut self, calls: &[ToolCall]) -> Result<Called> {
        assert!(calls[0].name != "panic", "an environment may panic");
        thread::sleep(Duration::from_millis(100));
        Ok(Called { results: vec![ToolResult::new(&calls[0].name, "slept")], ..Called::default() })
    }
}

impl Drop for Sleeping {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Opens, calls and finishes `rows` sessions; returns the order in which they finish.
fn run_all(sessions: &mut Sessions, rows: usize) -> Vec<usize> {
    let mut finished = Vec::new();
    for index in 0..rows {
        sessions.open(index, &format!("row {index}"), Map::new(), 0).unwrap();
    }
    while !sessions.is_empty() {
        for Event { row, outcome } in sessions.poll(Duration::from_secs(5)).unwrap() {
            match outcome {
                Outcome::Opened(_) => sessions.call(row, vec![call("sleep", json!({}))]).unwrap(),
                Outcome::Called(_) => sessions.finish(row).unwrap(),
                Outcome::Finished(_) => finished.push(row),
                Outcome::Failed { message, .. } => panic!("{message}"),
            }
        }
    }
    finished
}

#[test]
fn sessions_of_a_batch_are_called_at_the_same_time_within_their_number() {
    let environment = Sleeper::new(usize::MAX);
    let mut sessions = Sessions::new(environment.clone(), 4, None).unwrap();
    let start = Instant::now();
    assert_eq!(run_all(&mut sessions, 12).len(), 12);
    // Three rounds of 100 ms, not twelve.
    assert!(start.elapsed() < Duration::from_millis(1000), "{:?}", start.elapsed());
    assert_eq!((environment.most.load(Ordering::SeqCst), sessions.unfinished()), (4, 0));
    assert_eq!(sessions.poll(Duration::from_secs(60)).unwrap(), []);
    // Fewer are free than may be open: the others are asked for again.
    let few = Sleeper::new(2);
    assert_eq!(run_all(&mut Sessions::new(few.clone(), 4, None).unwrap(), 6).len(), 6);
    assert_eq!((few.most.load(Ordering::SeqCst), few.open.load(Ordering::SeqCst)), (2, 0));
}

#[test]
fn a_dead_environment_is_an_error_with_its_row_or_a_reward() {
    let step = |sessions: &mut Sessions| sessions.poll(Duration::from_secs(5));
    let mut sessions = Sessions::new(Sleeper::new(9), 2, None).unwrap();
    sessions.open(3, "data.jsonl: line 4", row(json!({"fail": true})), 0).unwrap();
    assert_eq!(step(&mut sessions).unwrap_err().to_string(), "data.jsonl: line 4: it is dead");
    assert!(sessions.is_empty());
    let mut sessions = Sessions::new(Sleeper::new(9), 2, Some(-1.0)).unwrap();
    sessions.open(3, "line 4", Map::new(), 0).unwrap();
    let early = sessions.call(3, Vec::new()).unwrap_err().to_string();
    assert!(early.contains("has not ended its last step"), "{early}");
    assert!(matches!(step(&mut sessions).unwrap()[..], [Event { row: 3, outcome: Outcome::Opened(_) }]));
    sessions.call(3, vec![call("panic", json!({}))]).unwrap();
    let failed = Outcome::Failed { message: "line 4: the environment panicked".into(), reward: -1.0 };
    assert_eq!(step(&mut sessions).unwrap(), [Event { row: 3, outcome: failed }]);
    let gone = sessions.finish(3).unwrap_err().to_string();
    assert_eq!(gone, "row 3: it has no session");
}

#[test]
fn dropped_sessions_are_abandoned() {
    let environment = Sleeper::new(9);
    let mut sessions = Sessions::new(environment.clone(), 9, None).unwrap();
    for index in 0..3 {
        sessions.open(index, "row", Map::new(), 0).unwrap();
    }
    let mut opened = 0;
    while opened < 3 {
        opened += sessions.poll(Duration::from_secs(5)).unwrap().len();
    }
    sessions.abandon(0).unwrap();
    sessions.call(1, vec![call("sleep", json!({}))]).unwrap();
    drop(sessions);
    let until = Instant::now() + Duration::from_secs(5);
    while environment.open.load(Ordering::SeqCst) > 0 && Instant::now() < until {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(environment.open.load(Ordering::SeqCst), 0);
}

#[test]
fn combined_environments_are_chosen_by_the_column_and_have_the_tools() {
    let folder = folder("games.py", MODULE);
    std::fs::write(folder.path().join("program.py"), PROGRAM).unwrap();
    let python = |tools: &[String], classes: &[(Option<String>, String)]| -> Arc<dyn Environment> {
        Arc::new(ProgramEnvironment::python(tools, classes, limits(folder.path()), Log::default()))
    };
    let program = ProgramEnvironment::command("python3 program.py", limits(folder.path()), Log::default());
    let environment = Combined {
        tools: Some(python(&["games.note".into()], &[])),
        environments: vec![
            (Some("count".into()), python(&[], &[(None, "games.Counter".into())])),
            (Some("go".into()), Arc::new(program)),
        ],
    };
    environment.start().unwrap();
    assert_eq!(
        (environment.reward_names(), environment.in_lockstep()),
        (vec!["Counter".to_string(), "environment".to_string()], true)
    );
    let mut session = open(&environment, json!({"environment": "go", "mode": "ok"}));
    let names: Vec<_> = session.opened().tools.iter().map(|tool| tool["function"]["name"].as_str().unwrap()).collect();
    assert_eq!((names, session.opened().prompt.as_deref()), (vec!["note", "go"], Some("seed 7")));
    let calls = [call("note", json!({"text": "a"})), call("go", json!({})), call("lost", json!({}))];
    let called = session.call(&calls).unwrap();
    assert_eq!(contents(&called), ["['a']", "went", "{'error': 'Tool lost not found.'}"]);
    assert_eq!((called.reward, session.finish().unwrap().reward), (Some(0.5), Some(2.0)));
    let error = environment.open(&row(json!({"mode": "ok"})), 0).map(|_| ()).unwrap_err().to_string();
    assert_eq!(error, "expected one of the environments `count`, `go` in the column `environment`, found null");
}

/// The reply to a message of OpenEnv; none closes the connection.
type Replies = fn(&Value) -> Option<Value>;

/// Serves OpenEnv's messages on loopback to a number of connections; `replies` has the reply to each message but the listing of tools.
fn serve(connections: usize, replies: Replies) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("ws://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().take(connections).flatten() {
            thread::spawn(move || {
                let mut socket = tungstenite::accept(stream).unwrap();
                let _ = socket.send(Message::Ping(b"alive".as_slice().into()));
                while let Ok(message) = socket.read() {
                    let Ok(text) = message.to_text() else { continue };
                    let Ok(asked) = serde_json::from_str::<Value>(text) else { continue };
                    let tools = json!([{"name": "echo", "description": "Echoes.", "inputSchema": {"type": "object"}}]);
                    let reply = match asked["type"].as_str() {
                        Some("mcp") => Some(
                            json!({"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": tools}}}),
                        ),
                        _ => replies(&asked),
                    };
                    match reply {
                        Some(reply) => socket.send(Message::text(reply.to_string())).unwrap(),
                        None => return,
                    }
                }
            });
        }
    });
    address
}

fn observed(observation: &Value, reward: &Value, done: &Value) -> Value {
    json!({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})
}

fn openenv(address: &str) -> OpenEnv {
    OpenEnv::new(address, Limits { call: Duration::from_secs(1), ..Limits::default() }).unwrap()
}

#[test]
fn an_openenv_server_is_reset_stepped_and_scored() {
    let address = serve(1, |asked| match asked["type"].as_str() {
        Some("reset") => {
            let text = format!("Seed {}, target {}.", asked["data"]["seed"], asked["data"]["target"]);
            Some(observed(&json!({"text": text, "metadata": {}}), &Value::Null, &json!(false)))
        }
        Some("step") if asked["data"]["arguments"]["message"] == "fail" => {
            Some(json!({"type": "error", "data": {"message": "not so", "code": "EXECUTION_ERROR"}}))
        }
        Some("step") => {
            let message = &asked["data"]["arguments"]["message"];
            let result = json!({"content": [{"type": "text", "text": message}], "is_error": false});
            Some(observed(&json!({"tool_name": "echo", "result": result}), &json!(0.25), &json!(message == "end")))
        }
        _ => None,
    });
    let environment = openenv(&address);
    let mut session = open(&environment, json!({"target": 5}));
    assert_eq!(session.opened().prompt.as_deref(), Some("Seed 7, target 5."));
    assert_eq!(session.opened().tools[0]["function"]["parameters"], json!({"type": "object"}));
    let called = session.call(&["hi", "fail"].map(|text| call("echo", json!({"message": text})))).unwrap();
    assert_eq!((contents(&called), called.reward), (vec!["hi", r#"{"error":"not so"}"#], Some(0.25)));
    assert!(called.results[1].failed && !called.done);
    // The second call comes after the end.
    let called = session.call(&["end", "hi"].map(|text| call("echo", json!({"message": text})))).unwrap();
    assert_eq!((contents(&called), called.done), (vec!["end"], true));
    let after = session.call(&[call("echo", json!({}))]).unwrap();
    assert!(after.results.is_empty() && after.done);
    assert_eq!(session.finish().unwrap().reward, Some(0.5));
}

#[test]
fn an_openenv_server_that_fails_is_one_line() {
    let modes: [(Replies, &str); 5] = [
        (|_| None, "the server closed the connection"),
        (
            |_| Some(json!({"type": "error", "data": {"message": "no\nway", "code": "FACTORY_ERROR"}})),
            "cannot reset: FACTORY_ERROR: no\\nway",
        ),
        (|_| Some(json!({"type": "state", "data": {}})), "expected a message of the type \"observation\", found"),
        (
            |_| Some(observed(&json!({}), &json!(null), &json!("yes"))),
            "expected true or false in \"done\", found \"yes\"",
        ),
        (
            |_| Some(observed(&json!({}), &json!("high"), &json!(false))),
            "expected a number or null in \"reward\", found \"high\"",
        ),
    ];
    for (replies, expected) in modes {
        let address = serve(1, replies);
        let error = openenv(&address).open(&Map::new(), 0).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(&address) && error.contains(expected), "{error}");
    }
    let full = serve(1, |_| Some(json!({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})));
    assert!(openenv(&full).open(&Map::new(), 0).unwrap().is_none());
    let hangs = serve(1, |asked| match asked["type"].as_str() {
        Some("step") => {
            thread::sleep(Duration::from_secs(3));
            None
        }
        _ => Some(observed(&json!({}), &Value::Null, &json!(false))),
    });
    let environment = openenv(&hangs);
    let error = open(&environment, json!({})).call(&[call("echo", json!({}))]).unwrap_err().to_string();
    assert!(error.contains("cannot call `echo`: no reply within 1 s"), "{error}");
    let nobody = openenv("ws://127.0.0.1:9").open(&Map::new(), 0).map(|_| ()).unwrap_err().to_string();
    assert!(nobody.contains("ws://127.0.0.1:9/ws: cannot connect: "), "{nobody}");
    for (address, expected) in [("ws://", "expected an address"), ("ws://me:secret@host", "without a password")] {
        let error = OpenEnv::new(address, Limits::default()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Compares with the package `openenv`: `OPENENV_PYTHON=PYTHON cargo test -p rlhf --lib -- --ignored openenv_package`.
#[test]
#[ignore = "needs a Python with the package openenv, in OPENENV_PYTHON"]
fn environments_of_the_openenv_package_are_played() {
    let python = std::env::var("OPENENV_PYTHON").expect("OPENENV_PYTHON");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/interop/openenv_server.py");
    let mut command = std::process::Command::new(python);
    let mut server = Server(command.arg(script).stdout(std::process::Stdio::piped()).spawn().unwrap());
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(server.0.stdout.take().unwrap()));
    let mut address = || {
        let address = lines.next().unwrap().unwrap();
        // It is printed before the server listens.
        let place = address.trim_start_matches("ws://").split('/').next().unwrap().to_string();
        let until = Instant::now() + Duration::from_secs(30);
        while std::net::TcpStream::connect(&place).is_err() && Instant::now() < until {
            thread::sleep(Duration::from_millis(50));
        }
        address
    };
    let (tools, typed) = (openenv(&address()), openenv(&address()));
    let mut session = open(&tools, json!({"target": 3}));
    assert_eq!(session.opened().prompt.as_deref(), Some("Count to 3 from seed 7."));
    let function = &session.opened().tools[0]["function"];
    assert_eq!((function["name"].as_str(), &function["parameters"]["required"]), (Some("add"), &json!(["step"])));
    let called =
        session.call(&[call("add", json!({"step": 1})), call("add", json!({"step": "x"})), call("gone", json!({}))]);
    let called = called.unwrap();
    assert_eq!((called.results[0].content.as_str(), called.done, called.reward), ("1", false, Some(0.25)));
    assert!(called.results[1].failed && called.results[2].failed, "{called:?}");
    // The server pings each half second, and closes what does not reply within another.
    thread::sleep(Duration::from_secs(3));
    // It serves two sessions, of which this is the second.
    let second = open(&tools, json!({"target": 3}));
    assert!(tools.open(&row(json!({"target": 3})), 0).unwrap().is_none());
    drop(second);
    let called = session.call(&[call("add", json!({"step": 2}))]).unwrap();
    assert_eq!((contents(&called), called.done), (vec!["3"], true));
    assert_eq!(session.finish().unwrap().reward, Some(1.25));
    let mut session = open(&typed, json!({}));
    let function = &session.opened().tools[0]["function"];
    assert_eq!((function["name"].as_str(), &function["description"]), (Some("step"), &json!("Guesses a word.")));
    assert_eq!(function["parameters"]["properties"].as_object().unwrap().keys().collect::<Vec<_>>(), ["word"]);
    let called = session.call(&[call("step", json!({"word": "no"})), call("step", json!({"letter": "x"}))]).unwrap();
    assert_eq!((contents(&called)[0], called.results[1].failed), ("wrong", true));
    let called = session.call(&[call("step", json!({"word": "crane"}))]).unwrap();
    assert_eq!((contents(&called), called.done, called.reward), (vec!["right"], true, Some(1.0)));
}

/// A server that ends with its test, also where that fails.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
