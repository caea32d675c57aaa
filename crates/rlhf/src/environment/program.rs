//! Environments that are programs: they serve many sessions over JSON lines, as docs/guides/environments.md describes. Python functions and
//! classes run in such a program.

use super::process::{Code, Process, Unanswered};
use super::{Called, Environment, Finished, Limits, Log, Opened, Session, ToolCall, ToolResult};
use rlhf_base::safe_text::{beginning, one_line};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of characters of a wrong reply that a message shows.
const SHOWN: usize = 80;
/// Maximum number of characters of the name of a metric.
const LONGEST_LOG: usize = 80;
/// Maximum number of metrics of a session.
const MOST_LOGS: usize = 100;

/// A program that serves sessions. It is started with the first session, and again if it has ended.
pub struct ProgramEnvironment {
    code: Code,
    /// The name of the program in messages.
    label: String,
    limits: Limits,
    log: Log,
    in_lockstep: bool,
    opened: AtomicU64,
    running: Mutex<Option<Running>>,
}

/// Reward name of a program. Python classes name their own rewards.
const REWARD: &str = "environment";

/// A started program.
#[derive(Clone)]
struct Running {
    process: Arc<Process>,
    /// Number of open sessions.
    open: Arc<AtomicUsize>,
    /// Number of requests without a reply in time; the program may still be working on them.
    hanging: Arc<AtomicUsize>,
    /// The contents of the worker's first reply: the tools, the reward names and the module files.
    known: Arc<Known>,
}

#[derive(Default)]
struct Known {
    tools: Vec<Value>,
    rewards: Vec<String>,
    files: Vec<String>,
}

impl ProgramEnvironment {
    /// Creates the environment of a program without starting it. `line` is a command line for `sh -c`.
    pub fn command(line: impl Into<String>, limits: Limits, log: Log) -> Self {
        // The label does not show the command line, which may contain a key.
        Self::of(Code::Shell(line.into()), "the program".into(), limits, log, false)
    }

    /// Creates the environment of Python tools, `module.function`, and classes, `module.Class`, without importing them. The column
    /// `environment` of a row chooses a class by its name; a class without a name is for all rows. The interpreter is `RLHF_PYTHON`, or
    /// `python3`; the working directory is on its path.
    ///
    /// Tools and classes are called as TRL's `GRPOTrainer` does: `reset(**row)`, public methods as tools, `get_reward()`.
    pub fn python(tools: &[String], classes: &[(Option<String>, String)], limits: Limits, log: Log) -> Self {
        let paths = tools.iter().chain(classes.iter().map(|(_, path)| path));
        let label = paths.map(|path| format!("`{path}`")).collect::<Vec<_>>().join(", ");
        let request = json!({"tools": tools, "environments": classes, "limit": limits.output});
        Self::of(Code::Python(request), label, limits, log, !tools.is_empty())
    }

    /// Creates the environment of tools and classes that are objects of the process that drives the run. The Python package starts runs in
    /// this way.
    pub(super) fn driver(in_lockstep: bool, limits: Limits, log: Log) -> Self {
        let request = json!({"driver": true, "limit": limits.output});
        Self::of(Code::Python(request), "of the trainer".into(), limits, log, in_lockstep)
    }

    fn of(code: Code, label: String, limits: Limits, log: Log, in_lockstep: bool) -> Self {
        Self { code, label, limits, log, in_lockstep, opened: AtomicU64::new(0), running: Mutex::new(None) }
    }

    /// Returns the files of the Python tools' and classes' modules that are in the working directory; empty before the start.
    pub fn files(&self) -> Vec<String> {
        self.lock().as_ref().map_or_else(Vec::new, |running| running.known.files.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, message: &str) -> Error {
        Error::Run(format!("environment {}: {message}", self.label))
    }

    /// Returns the running program. Starts it if it is not running, and restarts it if it has ended, or if it hangs and no session is open.
    fn running(&self) -> Result<Running> {
        let mut running = self.lock();
        if let Some(current) = &*running {
            let hangs = current.hanging.load(Ordering::SeqCst) > 0 && current.open.load(Ordering::SeqCst) == 0;
            if !current.process.has_ended() && !hangs {
                return Ok(current.clone());
            }
            current.process.kill();
        }
        let process = Process::start(&self.code, &self.limits, &self.log).map_err(|e| self.error(&e.to_string()))?;
        let mut known = Known::default();
        if matches!(self.code, Code::Python(_)) {
            let reply = process.first(self.limits.reset).map_err(|e| self.error(&e.message))?;
            if let Some(message) = failure(&reply) {
                return Err(self.error(&message));
            }
            known = Known::read(&reply);
        }
        let started = Running {
            process: Arc::new(process),
            open: Arc::default(),
            hanging: Arc::default(),
            known: Arc::new(known),
        };
        Ok(running.insert(started).clone())
    }
}

impl Environment for ProgramEnvironment {
    fn open(&self, row: &Map<String, Value>, seed: u64) -> Result<Option<Box<dyn Session>>> {
        let running = self.running()?;
        let name = format!("s{}", self.opened.fetch_add(1, Ordering::SeqCst) + 1);
        running.open.fetch_add(1, Ordering::SeqCst);
        let mut session = ProgramSession {
            running,
            name: name.clone(),
            label: self.label.clone(),
            limits: self.limits.clone(),
            opened: Opened::default(),
            reward: None,
            is_over: false,
            has_ended: false,
        };
        let request = json!({"open": name, "row": row, "seed": seed});
        let reply = session.ask(request, 1, "open the session")?;
        session.opened = opened(&reply).map_err(|message| self.error(&message))?;
        if matches!(self.code, Code::Shell(_)) {
            session.opened.reward_name = Some(REWARD.into());
        }
        Ok(Some(Box::new(session)))
    }

    fn start(&self) -> Result<()> {
        self.running().map(|_| ())
    }

    fn tools(&self) -> Vec<Value> {
        self.lock().as_ref().map_or_else(Vec::new, |running| running.known.tools.clone())
    }

    fn reward_names(&self) -> Vec<String> {
        match self.code {
            Code::Shell(_) => vec![REWARD.into()],
            Code::Python(_) => self.lock().as_ref().map_or_else(Vec::new, |running| running.known.rewards.clone()),
        }
    }

    fn in_lockstep(&self) -> bool {
        self.in_lockstep
    }
}

impl Drop for ProgramEnvironment {
    /// Kills the program if sessions are still open, so that none waits for it any longer.
    fn drop(&mut self) {
        if let Some(running) = self.lock().take()
            && running.open.load(Ordering::SeqCst) > 0
        {
            running.process.kill();
        }
    }
}

impl Known {
    fn read(reply: &Map<String, Value>) -> Self {
        let list = |value: &Value, name: &str| value.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
        let reply = Value::Object(reply.clone());
        let mut tools = list(&reply, "tools");
        let mut rewards = Vec::new();
        for environment in list(&reply, "environments") {
            for tool in list(&environment, "tools") {
                if !tools.contains(&tool) {
                    tools.push(tool);
                }
            }
            // A class that is listed under two names has one reward.
            if let Some(name) =
                environment["reward_name"].as_str().filter(|name| !rewards.iter().any(|known| known == name))
            {
                rewards.push(name.to_string());
            }
        }
        let files = list(&reply, "files").iter().filter_map(|file| file.as_str().map(String::from)).collect();
        Self { tools, rewards, files }
    }
}

struct ProgramSession {
    running: Running,
    name: String,
    label: String,
    limits: Limits,
    opened: Opened,
    /// Sum of the rewards of the turns; `None` if there was none.
    reward: Option<f64>,
    is_over: bool,
    /// Whether it was closed.
    has_ended: bool,
}

impl ProgramSession {
    /// Sends a request, and returns its reply. `calls` is the number of tool calls in it, or 1 for opening and closing.
    fn ask(&mut self, request: Value, calls: usize, what: &str) -> Result<Map<String, Value>> {
        let limit = if request.get("calls").is_some() { self.limits.call } else { self.limits.reset };
        let Value::Object(request) = request else { return Err(self.error("a request is an object")) };
        let limit = limit.saturating_mul(u32::try_from(calls.max(1)).unwrap_or(u32::MAX));
        match self.running.process.ask(request, limit) {
            Ok(reply) => match failure(&reply) {
                Some(message) => Err(self.error(&format!("cannot {what}: {message}"))),
                None => Ok(reply),
            },
            Err(Unanswered { message, hangs }) => {
                self.running.hanging.fetch_add(usize::from(hangs), Ordering::SeqCst);
                Err(self.error(&format!("cannot {what}: {message}")))
            }
        }
    }

    fn error(&self, message: &str) -> Error {
        Error::Run(format!("environment {}: {message}", self.label))
    }
}

impl Session for ProgramSession {
    fn opened(&self) -> &Opened {
        &self.opened
    }

    fn call(&mut self, calls: &[ToolCall]) -> Result<Called> {
        let names = calls.iter().map(|call| format!("`{}`", beginning(&call.name, 40))).collect::<Vec<_>>().join(", ");
        if self.is_over {
            return Err(self.error(&format!("cannot call {names}: it has said that the episode is over")));
        }
        let listed: Vec<Value> =
            calls.iter().map(|call| json!({"name": call.name, "arguments": call.arguments})).collect();
        let request = json!({"session": self.name, "calls": listed});
        let reply = self.ask(request, calls.len(), &format!("call {names}"))?;
        let called = called(&reply, calls, &self.limits).map_err(|message| self.error(&message))?;
        self.is_over = called.done;
        if let Some(reward) = called.reward {
            self.reward = Some(self.reward.unwrap_or(0.0) + reward);
        }
        Ok(called)
    }

    fn finish(mut self: Box<Self>) -> Result<Finished> {
        let name = self.name.clone();
        let reply = self.ask(json!({"close": name}), 1, "end the session")?;
        self.has_ended = true;
        let reward = number(&reply, "reward").map_err(|message| self.error(&message))?.or(self.reward);
        let mut logs = Vec::new();
        if let Some(value) = reply.get("extra_logs").filter(|value| !value.is_null()) {
            let Some(numbers) = value.as_object().filter(|numbers| numbers.len() <= MOST_LOGS) else {
                let wanted = format!("an object of at most {MOST_LOGS} numbers in \"extra_logs\"");
                return Err(self.error(&expected(&wanted, value)));
            };
            for name in numbers.keys() {
                if name.is_empty() || name.chars().count() > LONGEST_LOG || name.chars().any(char::is_control) {
                    let wanted = format!("names of 1 to {LONGEST_LOG} characters in \"extra_logs\"");
                    return Err(self.error(&expected(&wanted, &name.as_str().into())));
                }
                logs.extend(number(numbers, name).map_err(|message| self.error(&message))?.map(|x| (name.clone(), x)));
            }
        }
        Ok(Finished { reward, logs })
    }
}

impl Drop for ProgramSession {
    fn drop(&mut self) {
        if !self.has_ended {
            let request = json!({"close": self.name, "abandoned": true});
            self.running.process.tell(request.as_object().cloned().unwrap_or_default());
        }
        self.running.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns the error message of a reply; `None` if the reply reports no error.
fn failure(reply: &Map<String, Value>) -> Option<String> {
    let error = reply.get("error").filter(|error| !error.is_null())?;
    let text = error.as_str().map_or_else(|| error.to_string(), String::from);
    Some(beginning(&one_line(&text), 600).into_owned())
}

fn expected(what: &str, found: &Value) -> String {
    format!("expected {what}, found {}", beginning(&one_line(&found.to_string()), SHOWN))
}

fn number(reply: &Map<String, Value>, name: &str) -> Result<Option<f64>, String> {
    match reply.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64().filter(|x| x.is_finite()) {
            Some(x) => Ok(Some(x)),
            None => Err(expected(&format!("a finite number or null in \"{name}\""), value)),
        },
    }
}

fn opened(reply: &Map<String, Value>) -> Result<Opened, String> {
    let text = |name: &str| match reply.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(expected(&format!("a text or null in \"{name}\""), other)),
    };
    let tools = match reply.get("tools") {
        Some(Value::Array(tools)) => tools.clone(),
        found => return Err(expected("a list of schemas in \"tools\" after open", found.unwrap_or(&Value::Null))),
    };
    for tool in &tools {
        if !tool["function"]["name"].is_string() {
            let what = "the schema of each tool as {\"type\": \"function\", \"function\": {\"name\": ...}}";
            return Err(expected(what, tool));
        }
    }
    Ok(Opened { prompt: text("prompt")?, tools, reward_name: text("reward_name")? })
}

fn called(reply: &Map<String, Value>, calls: &[ToolCall], limits: &Limits) -> Result<Called, String> {
    if reply.contains_key("tools") {
        return Err(
            "expected the tools of a session to stay those of its beginning, found \"tools\" in a later reply".into()
        );
    }
    let done = match reply.get("done") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(done)) => *done,
        Some(other) => return Err(expected("true or false in \"done\"", other)),
    };
    let Some(listed) = reply.get("results").and_then(Value::as_array) else {
        return Err(expected("a list in \"results\"", reply.get("results").unwrap_or(&Value::Null)));
    };
    if listed.len() > calls.len() || (listed.len() < calls.len() && !done) {
        return Err(format!("expected {} results, one per call, found {}", calls.len(), listed.len()));
    }
    let results =
        listed.iter().zip(calls).map(|(value, call)| result(value, call, limits)).collect::<Result<_, _>>()?;
    Ok(Called { results, reward: number(reply, "reward")?, done })
}

fn result(value: &Value, call: &ToolCall, limits: &Limits) -> Result<ToolResult, String> {
    let name = value.get("name").and_then(Value::as_str).unwrap_or(&call.name).to_string();
    if let Some(error) = value.get("error").filter(|error| !error.is_null()) {
        let content = json!({"error": error}).to_string();
        let bytes = content.len();
        return Ok(ToolResult::failed(name, limits.cut(content, bytes)));
    }
    let Some(content) = value.get("content").and_then(Value::as_str) else {
        return Err(expected("a text in \"content\" of each result, or one in \"error\"", value));
    };
    let bytes = value.get("bytes").and_then(Value::as_u64).map_or(0, |bytes| usize::try_from(bytes).unwrap_or(0));
    let content = limits.cut(content.to_string(), bytes.max(content.len()));
    let failed = value.get("failed").and_then(Value::as_bool).unwrap_or(false);
    Ok(ToolResult { name, content, failed })
}
