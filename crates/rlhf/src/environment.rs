//! Tools that a policy calls, and environments that it acts in: written in Rust, programs in any language, Python functions and classes,
//! and OpenEnv servers.
//!
//! An [`Environment`] opens a [`Session`] per rollout. [`Sessions`] opens and calls the sessions of a batch on a bounded number of threads,
//! while other rows generate. This module knows nothing about tokens, or about rewards from other sources.
//!
//! ```
//! use rlhf::environment::{Called, Environment, Finished, Opened, Session, ToolCall, ToolResult};
//! use serde_json::{Map, Value, json};
//!
//! /// A counter that is to reach the `target` of its row.
//! struct Counter;
//!
//! struct Counting {
//!     opened: Opened,
//!     target: i64,
//!     count: i64,
//! }
//!
//! impl Environment for Counter {
//!     fn open(&self, row: &Map<String, Value>, _seed: u64) -> rlhf::Result<Option<Box<dyn Session>>> {
//!         let target = row["target"].as_i64().unwrap_or(0);
//!         let parameters = json!({"type": "object", "properties": {"step": {"type": "integer", "description": "Added number."}}});
//!         let function = json!({"name": "increment", "description": "Adds to the counter.", "parameters": parameters});
//!         let opened = Opened {
//!             prompt: Some(format!("Increment the counter to {target}.")),
//!             tools: vec![json!({"type": "function", "function": function})],
//!             reward_name: Some("counter".into()),
//!         };
//!         Ok(Some(Box::new(Counting { opened, target, count: 0 })))
//!     }
//!
//!     fn reward_names(&self) -> Vec<String> {
//!         vec!["counter".into()]
//!     }
//! }
//!
//! impl Session for Counting {
//!     fn opened(&self) -> &Opened {
//!         &self.opened
//!     }
//!
//!     fn call(&mut self, calls: &[ToolCall]) -> rlhf::Result<Called> {
//!         let mut called = Called::default();
//!         for call in calls {
//!             self.count += call.arguments.get("step").and_then(Value::as_i64).unwrap_or(1);
//!             called.results.push(ToolResult::new(&call.name, self.count.to_string()));
//!         }
//!         called.done = self.count == self.target;
//!         Ok(called)
//!     }
//!
//!     fn finish(self: Box<Self>) -> rlhf::Result<Finished> {
//!         Ok(Finished { reward: Some(f64::from(u8::from(self.count == self.target))), ..Finished::default() })
//!     }
//! }
//!
//! let row = json!({"target": 3}).as_object().unwrap().clone();
//! let mut session = Counter.open(&row, 0)?.expect("it is never full");
//! let calls = [ToolCall { name: "increment".into(), arguments: json!({"step": 3}).as_object().unwrap().clone() }];
//! assert!(session.call(&calls)?.done);
//! assert_eq!(session.finish()?.reward, Some(1.0));
//! # Ok::<(), rlhf::Error>(())
//! ```

mod combined;
mod limits;
mod log;
mod openenv;
mod pool;
mod process;
mod program;
mod reward;
mod settings;
mod socket;
mod turn;

pub use combined::Combined;
pub use limits::Limits;
pub use log::Log;
pub use openenv::OpenEnv;
pub use pool::{Event, Outcome, Sessions};
pub use program::ProgramEnvironment;
pub(crate) use reward::{environment_rewards, failure_reward_name};
pub use settings::{EnvironmentConfig, MalformedCalls};
pub use turn::{Results, session_seed};

use rlhf_base::Result;
use serde_json::{Map, Value};

/// A call that a policy has written.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Arguments by name.
    pub arguments: Map<String, Value>,
}

/// The result of a call.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolResult {
    /// Name of the tool.
    pub name: String,
    /// Text that the policy sees.
    pub content: String,
    /// Whether the call failed: there is no such tool, its arguments are wrong, it raised an exception. `content` has the error.
    pub failed: bool,
}

impl ToolResult {
    /// Returns the result of a call that succeeded.
    pub fn new(name: impl Into<String>, content: impl Into<String>) -> Self {
        Self { name: name.into(), content: content.into(), failed: false }
    }

    /// Returns the result of a call that failed.
    pub fn failed(name: impl Into<String>, content: impl Into<String>) -> Self {
        Self { failed: true, ..Self::new(name, content) }
    }
}

/// The beginning of a session.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Opened {
    /// Text that is appended unchanged to the last message of the prompt; `None` leaves the prompt as it is.
    pub prompt: Option<String>,
    /// JSON schemas of the tools, in the order in which the policy sees them: `{"type": "function", "function": {...}}`.
    pub tools: Vec<Value>,
    /// Name of the reward that the session gives at the end; `None` if it gives none.
    pub reward_name: Option<String>,
}

/// The results of the calls of a turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Called {
    /// Results, in the order in which the policy sees them: a result per call, except that `done` may leave out the last ones.
    pub results: Vec<ToolResult>,
    /// Reward of the turn, if the environment gives one. [`Finished::reward`] includes it.
    pub reward: Option<f64>,
    /// Whether the episode is over: the policy writes no further turn.
    pub done: bool,
}

/// The end of a session.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Finished {
    /// Reward of the whole episode; `None` if the environment gives none.
    pub reward: Option<f64>,
    /// Numbers by name. Their means over the responses of an update are metrics of the run.
    pub logs: Vec<(String, f64)>,
}

/// Opens sessions, one for each rollout.
pub trait Environment: Send + Sync {
    /// Opens a session for a row, given as its columns by name. Rows of a group get the same `seed`. Returns `None` if the environment has
    /// no free session now; the caller then tries again.
    ///
    /// # Errors
    /// If the environment is dead, or cannot begin with this row.
    fn open(&self, row: &Map<String, Value>, seed: u64) -> Result<Option<Box<dyn Session>>>;

    /// Starts what the sessions need, such as a process, so that wrong settings fail before the run begins.
    ///
    /// # Errors
    /// If it cannot be started.
    fn start(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the schemas of the tools that are known before a session is opened. The tools of a session are in [`Opened::tools`].
    fn tools(&self) -> Vec<Value> {
        Vec::new()
    }

    /// Returns the names of the rewards that sessions may give, as far as they are known before a session is opened.
    fn reward_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns whether the rows of a batch must be called turn by turn, in the order of the batch. Plain functions need this, since their
    /// sessions share state.
    fn in_lockstep(&self) -> bool {
        false
    }
}

/// One episode. A session that is dropped before [`Session::finish`] is abandoned.
pub trait Session: Send {
    /// Returns the beginning of the session.
    fn opened(&self) -> &Opened;

    /// Makes the calls of a turn. A call that fails is a result, not an error.
    ///
    /// # Errors
    /// If the environment is dead, or breaks its protocol.
    fn call(&mut self, calls: &[ToolCall]) -> Result<Called>;

    /// Ends the session.
    ///
    /// # Errors
    /// The errors of [`Session::call`].
    fn finish(self: Box<Self>) -> Result<Finished> {
        Ok(Finished::default())
    }
}

#[cfg(test)]
mod tests;
