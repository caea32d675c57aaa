//! Environments of OpenEnv 0.10 through its WebSocket. Each connection is a session.
//!
//! The messages follow `openenv/core/env_server/types.py`, `mcp_types.py` and `http_server.py` of the package `openenv`.

use super::socket::Socket;
use super::{Called, Environment, Finished, Limits, Opened, Session, ToolCall, ToolResult};
use crate::reward::without_query;
use rlhf_base::safe_text::{beginning, one_line};
use rlhf_base::{Error, Result};
use rlhf_hub::certificates;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;
use ureq::tls::{RootCerts, TlsConfig};

/// Environment variable of the bearer token.
const TOKEN: &str = "RLHF_OPENENV_TOKEN";
/// Path of the WebSocket.
const WEBSOCKET: &str = "/ws";
/// Interval at which idle connections reply to pings. Servers wait 20 s for a reply; servers in some tests wait half a second.
const KEEP: Duration = Duration::from_millis(250);
/// Maximum size of the schema of an environment in bytes.
const MAX_SCHEMA: u64 = 1 << 20;
/// Name of the tool of an environment whose actions are not tool calls.
const STEP: &str = "step";
/// Seeds are below this number: NumPy takes 32 bits.
const SEEDS: u64 = 1 << 31;

/// The connections of open sessions, which reply to pings while they are idle.
type OpenSockets = Mutex<Vec<Weak<Mutex<Socket>>>>;

/// An OpenEnv server.
///
/// The observation of `reset` joins the prompt: its only text, or all of it as JSON. MCP tools are called by `step`, with reward and
/// `done`. An environment without MCP tools has one tool, `step`, whose arguments are the fields of its action. The reward of a session is
/// the sum of the rewards of its steps. The token of `RLHF_OPENENV_TOKEN` is sent to the address, if the variable is set.
pub struct OpenEnv {
    server: Arc<Server>,
    /// The schema of the tool [`STEP`], once it has been read.
    step: Mutex<Option<Value>>,
    sockets: Mutex<Option<Arc<OpenSockets>>>,
}

struct Server {
    /// Address of the WebSocket.
    url: String,
    token: Option<String>,
    limits: Limits,
}

impl OpenEnv {
    /// Creates the environment of the server at an address `ws://HOST:PORT` or `wss://HOST`, without connecting.
    ///
    /// # Errors
    /// If it is not such an address, or has a password.
    pub fn new(url: &str, limits: Limits) -> Result<Self> {
        let wrong = |what: &str| {
            Err(Error::refused("environment_factory", format!(" = openenv:{}: {what}", without_query(url))))
        };
        let (address, query) = url.split_once('?').map_or((url, None), |(address, query)| (address, Some(query)));
        let host = address.split_once("://").map_or("", |(_, host)| host);
        if host.is_empty() || !(address.starts_with("ws://") || address.starts_with("wss://")) {
            return wrong("expected an address that starts with ws:// or wss://");
        }
        if host.split('/').next().is_some_and(|host| host.contains('@')) {
            return wrong(&format!("expected an address without a password; a token goes to the variable {TOKEN}"));
        }
        let address = address.trim_end_matches('/');
        let path = if address.ends_with(WEBSOCKET) { "" } else { WEBSOCKET };
        let query = query.map_or(String::new(), |query| format!("?{query}"));
        let token = std::env::var(TOKEN).ok().filter(|token| !token.is_empty());
        let server = Server { url: format!("{address}{path}{query}"), token, limits };
        Ok(Self { server: Arc::new(server), step: Mutex::default(), sockets: Mutex::default() })
    }

    /// Returns the tool of an environment whose actions are not tool calls, from the schema of its action.
    fn step_tool(&self) -> Result<Value> {
        let mut known = lock(&self.step);
        if let Some(tool) = &*known {
            return Ok(tool.clone());
        }
        let schema = self.server.schema().map_err(|message| self.server.error(&message))?;
        let action = &schema["action"];
        let mut parameters = action.as_object().cloned().unwrap_or_default();
        if parameters.get("properties").and_then(Value::as_object).is_none_or(Map::is_empty) {
            return Err(self.server.error("expected the fields of an action in \"action\" of /schema, found none"));
        }
        let title = parameters.shift_remove("title");
        let text =
            parameters.shift_remove("description").or(title).unwrap_or_else(|| "Acts in the environment.".into());
        // Every action has these fields; the program sets them, not the policy.
        for field in ["additionalProperties", "$schema"] {
            parameters.shift_remove(field);
        }
        if let Some(Value::Object(fields)) = parameters.get_mut("properties") {
            fields.shift_remove("metadata");
        }
        let function = json!({"name": STEP, "description": text, "parameters": parameters});
        Ok(known.insert(json!({"type": "function", "function": function})).clone())
    }

    /// Makes the connection reply to pings while it is idle.
    fn keep(&self, socket: &Arc<Mutex<Socket>>) -> Result<()> {
        let mut open_sockets = lock(&self.sockets);
        let sockets = match &*open_sockets {
            Some(sockets) => sockets.clone(),
            None => {
                let sockets = Arc::new(OpenSockets::default());
                let weak = Arc::downgrade(&sockets);
                let started = thread::Builder::new().name("openenv".into()).spawn(move || keep_all(&weak));
                started.map_err(Error::io("start", "a thread for connections"))?;
                open_sockets.insert(sockets).clone()
            }
        };
        lock(&sockets).push(Arc::downgrade(socket));
        Ok(())
    }
}

/// Replies to pings until the environment is dropped.
fn keep_all(open_sockets: &Weak<OpenSockets>) {
    while let Some(sockets) = open_sockets.upgrade() {
        lock(&sockets).retain(|socket| socket.strong_count() > 0);
        let all: Vec<_> = lock(&sockets).iter().filter_map(Weak::upgrade).collect();
        for socket in all {
            if let Ok(mut socket) = socket.try_lock() {
                // If the connection is closed, the next request of the session reports it.
                let _ = socket.keep();
            }
        }
        drop(sockets);
        thread::sleep(KEEP);
    }
}

impl Environment for OpenEnv {
    fn open(&self, row: &Map<String, Value>, seed: u64) -> Result<Option<Box<dyn Session>>> {
        let server = &self.server;
        let reset = server.limits.reset;
        let mut socket = Socket::connect(&server.url, server.token.as_deref(), reset).map_err(|e| server.error(&e))?;
        let mut data = row.clone();
        data.entry("seed").or_insert_with(|| (seed % SEEDS).into());
        let reply = socket.ask(&json!({"type": "reset", "data": data}), reset).map_err(|e| server.error(&e))?;
        if reply["data"]["code"] == "CAPACITY_REACHED" {
            return Ok(None);
        }
        if let Some((code, message)) = failure(&reply) {
            return Err(server.error(&format!("cannot reset: {code}: {message}")));
        }
        let observation = observation(&reply).map_err(|e| server.error(&e))?;
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}});
        let listed = socket.ask(&json!({"type": "mcp", "data": request}), reset).map_err(|e| server.error(&e))?;
        let listed_tools = listed["data"]["result"]["tools"].as_array().filter(|tools| !tools.is_empty());
        let (tools, is_mcp) = match listed_tools {
            Some(tools) => (tools.iter().map(tool).collect::<Result<_, _>>().map_err(|e| server.error(&e))?, true),
            None => (vec![self.step_tool()?], false),
        };
        let prompt = Some(observation_text(&observation["observation"])).filter(|text| !text.is_empty());
        let opened = Opened { prompt, tools, reward_name: Some("openenv".into()) };
        let socket = Arc::new(Mutex::new(socket));
        self.keep(&socket)?;
        let is_over = observation["done"] == true;
        let reward = step_reward(observation);
        Ok(Some(Box::new(OpenEnvSession { server: server.clone(), socket, opened, is_mcp, is_over, reward })))
    }

    fn reward_names(&self) -> Vec<String> {
        vec!["openenv".into()]
    }
}

impl Server {
    fn error(&self, message: &str) -> Error {
        let message = match &self.token {
            Some(token) => message.replace(token, "..."),
            None => message.to_string(),
        };
        Error::Run(format!("environment {}: {message}", without_query(&self.url)))
    }

    /// Asks for the schemas of the environment.
    fn schema(&self) -> Result<Value, String> {
        let address = self.url.split('?').next().unwrap_or_default();
        let base = address.strip_suffix(WEBSOCKET).unwrap_or(address).replacen("ws", "http", 1);
        let url = format!("{base}/schema");
        let roots = match std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty()) {
            Some(file) if url.starts_with("https://") => certificates(Path::new(&file)).map_err(|e| e.to_string())?,
            _ => RootCerts::WebPki,
        };
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            // The token must not be sent to another address.
            .max_redirects(0)
            .timeout_global(Some(self.limits.reset))
            .build()
            .into();
        let mut request = agent.get(&url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let mut response = request.call().map_err(|e| format!("{url}: {e}"))?;
        let text = response.body_mut().with_config().limit(MAX_SCHEMA).read_to_string();
        let text = text.map_err(|e| format!("{url}: {e}"))?;
        serde_json::from_str(&text)
            .map_err(|_| format!("{url}: expected JSON, found {}", beginning(&one_line(&text), 80)))
    }
}

struct OpenEnvSession {
    server: Arc<Server>,
    socket: Arc<Mutex<Socket>>,
    opened: Opened,
    /// Whether its tools are MCP tools.
    is_mcp: bool,
    is_over: bool,
    /// Sum of the rewards so far; `None` if there was none.
    reward: Option<f64>,
}

impl OpenEnvSession {
    /// Makes a call. Returns its result, and the observation with reward and `done`, or null if the call failed before the step was made.
    fn step(&self, call: &ToolCall) -> Result<(ToolResult, Value), String> {
        let limits = &self.server.limits;
        let result = |content: String, failed| {
            let bytes = content.len();
            ToolResult { name: call.name.clone(), content: limits.cut(content, bytes), failed }
        };
        let failed = |message: &str| (result(json!({"error": message}).to_string(), true), Value::Null);
        let action = if self.is_mcp {
            json!({"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})
        } else if call.name == STEP {
            Value::Object(call.arguments.clone())
        } else {
            return Ok(failed(&format!("Tool {} not found.", call.name)));
        };
        let reply = lock(&self.socket).ask(&json!({"type": "step", "data": action}), limits.call)?;
        match failure(&reply) {
            // The action is wrong, which does not end the session.
            Some((code, message)) if code == "EXECUTION_ERROR" || code == "VALIDATION_ERROR" => Ok(failed(&message)),
            Some((code, message)) => Err(format!("{code}: {message}")),
            None => {
                let step = observation(&reply)?;
                let seen = &step["observation"];
                let (content, is_failed) =
                    if self.is_mcp { call_result(seen) } else { (observation_text(seen), false) };
                Ok((result(content, is_failed), step.clone()))
            }
        }
    }
}

impl Session for OpenEnvSession {
    fn opened(&self) -> &Opened {
        &self.opened
    }

    fn call(&mut self, calls: &[ToolCall]) -> Result<Called> {
        let mut called = Called::default();
        for call in calls {
            let what = format!("cannot call `{}`", beginning(&call.name, 40));
            if self.is_over {
                break;
            }
            let (result, observation) = self.step(call).map_err(|e| self.server.error(&format!("{what}: {e}")))?;
            called.results.push(result);
            if let Some(reward) = step_reward(&observation) {
                called.reward = Some(called.reward.unwrap_or(0.0) + reward);
            }
            self.is_over = observation["done"] == true;
            if self.is_over {
                break;
            }
        }
        called.done = self.is_over;
        if let Some(reward) = called.reward {
            self.reward = Some(self.reward.unwrap_or(0.0) + reward);
        }
        Ok(called)
    }

    fn finish(self: Box<Self>) -> Result<Finished> {
        Ok(Finished { reward: self.reward, logs: Vec::new() })
    }
}

impl Drop for OpenEnvSession {
    fn drop(&mut self) {
        lock(&self.socket).close(&json!({"type": "close"}));
    }
}

/// Returns the code and the message of an error reply; `None` for other replies.
fn failure(reply: &Value) -> Option<(String, String)> {
    let data = (reply["type"] == "error").then(|| &reply["data"])?;
    let text = |name: &str| data[name].as_str().map(|text| beginning(&one_line(text), 400).into_owned());
    Some((text("code").unwrap_or_else(|| "error".into()), text("message").unwrap_or_else(|| data.to_string())))
}

/// Checks an observation reply, and returns its data: the observation, the reward and `done`.
fn observation(reply: &Value) -> Result<&Value, String> {
    let data = &reply["data"];
    let shown = || beginning(&one_line(&reply.to_string()), 80).into_owned();
    if reply["type"] != "observation" || !data["observation"].is_object() {
        return Err(format!("expected a message of the type \"observation\", found {}", shown()));
    }
    if !(data["done"].is_boolean() || data["done"].is_null()) {
        return Err(format!("expected true or false in \"done\", found {}", data["done"]));
    }
    match &data["reward"] {
        Value::Null | Value::Bool(_) => Ok(data),
        Value::Number(number) if number.as_f64().is_some_and(f64::is_finite) => Ok(data),
        other => Err(format!("expected a number or null in \"reward\", found {}", beginning(&other.to_string(), 80))),
    }
}

/// Returns the reward of a step; a boolean counts as 0 or 1.
fn step_reward(data: &Value) -> Option<f64> {
    let reward = &data["reward"];
    reward.as_f64().or(reward.as_bool().map(|won| f64::from(u8::from(won))))
}

/// Returns the function schema of an MCP tool.
fn tool(listed: &Value) -> Result<Value, String> {
    let Some(name) = listed["name"].as_str() else {
        return Err(format!(
            "expected the \"name\" of each tool, found {}",
            beginning(&one_line(&listed.to_string()), 80)
        ));
    };
    let parameters =
        ["inputSchema", "input_schema"].iter().find_map(|key| listed.get(*key).filter(|schema| schema.is_object()));
    let parameters = parameters.cloned().unwrap_or_else(|| json!({"type": "object", "properties": {}}));
    let text = listed["description"].as_str().unwrap_or_default();
    Ok(json!({"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}))
}

/// Returns an observation as the policy sees it: its only text, or all of it as JSON; empty if it has no fields.
fn observation_text(observation: &Value) -> String {
    let Some(fields) = observation.as_object() else { return observation.to_string() };
    let is_general = |name: &str| matches!(name, "metadata" | "reward" | "done");
    let fields: Map<String, Value> = fields
        .iter()
        .filter(|(name, value)| !is_general(name) && !value.is_null())
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    let mut values = fields.values();
    match (values.next(), values.next()) {
        (None, _) => String::new(),
        (Some(Value::String(text)), None) => text.clone(),
        _ => Value::Object(fields).to_string(),
    }
}

/// Returns the text of an MCP call's observation, and whether the call failed.
fn call_result(observation: &Value) -> (String, bool) {
    if let Some(message) = observation["error"]["message"].as_str() {
        return (json!({"error": message}).to_string(), true);
    }
    let result = &observation["result"];
    let is_error = ["is_error", "isError"].iter().any(|key| result[*key] == true);
    let Some(blocks) = result["content"].as_array() else {
        return (result.as_str().map_or_else(|| result.to_string(), String::from), is_error);
    };
    let texts = blocks.iter().map(|block| block["text"].as_str().map_or_else(|| block.to_string(), String::from));
    (texts.collect::<Vec<_>>().join("\n"), is_error)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
