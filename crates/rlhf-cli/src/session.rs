//! `rlhf session`: training loops that the caller owns, in any language. The client sends requests, and the program has the models.
//!
//! A thread reads requests; the calling thread answers them one after another. `docs/internals/session.md` has the protocol.

mod arrays;
mod engine;
mod failure;
mod params;
mod peer;
mod step;
mod texts;
mod wire;

use arrays::Dtype;
use engine::{EngineLoop, ReadSettings};
use failure::Failure;
use params::Params;
use peer::Peer;
use rlhf::dist::World;
use rlhf::settings::SessionConfig;
use rlhf::{Error, Result};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use step::StepLoop;
use wire::{Incoming, MOST_BYTES, MOST_FRAMES, MOST_LINE, Reply, Request};

/// The version of the protocol. It changes when a client that knows an older version would be wrong.
const PROTOCOL: u64 = 1;

/// The parts of the program that a session is given.
pub(crate) struct Host<'a> {
    /// The ranks that compute together.
    pub(crate) world: &'a World,
    /// Reads the settings of an engine.
    pub(crate) read_settings: &'a ReadSettings,
    /// The message of the last panic.
    pub(crate) take_panic: fn() -> String,
    /// Called when a client can connect to the socket.
    pub(crate) listening: &'a dyn Fn(&Path) -> Result<()>,
}

/// Answers the requests of one client, until it asks to stop or sends nothing more.
///
/// # Errors
/// If there is no connection, or requests cannot be told apart any more.
pub(crate) fn session(config: &SessionConfig, host: &Host<'_>) -> Result<()> {
    let Peer { mut input, mut output, course } = match &config.socket {
        Some(path) => Peer::at(path, || (host.listening)(path))?,
        None => Peer::standard()?,
    };
    // At most three requests take memory: one is computed, one waits, and one is read.
    let (sender, requests) = sync_channel(1);
    let read = move || wire::read(&mut input, |incoming| sender.send(incoming).is_ok());
    let thread = std::thread::Builder::new().name("requests".into()).spawn(read);
    thread.map_err(Error::io("start a thread for", "requests"))?;
    let mut session = Session { host, inline: false, greeted: false, open_loop: None, broken_by: None };
    let write = |id: &Value, reply, output: &mut dyn std::io::Write| {
        wire::write(&mut &mut *output, id, reply).map_err(Error::io("write to", "the client"))
    };
    for incoming in requests {
        match incoming {
            Incoming::Request(request) => {
                let is_last = request.method == "stop";
                course.is_busy.store(true, Ordering::Release);
                let reply = session.reply(&request);
                let is_last = is_last && reply.is_ok();
                // From its last reply on, the client may leave.
                course.is_over.store(is_last, Ordering::Release);
                // Set before the reply is written: a client that has read it may leave at once; if it has left before, the write fails.
                course.is_busy.store(false, Ordering::Release);
                write(&request.id, reply, &mut output)?;
                if is_last {
                    break;
                }
            }
            Incoming::Refused(id, failure) => write(&id, Err(failure), &mut output)?,
            Incoming::Lost(id, failure) => {
                let message = failure.message().to_string();
                write(&id, Err(failure), &mut output)?;
                return Err(Error::Run(format!("session: {message}")));
            }
            Incoming::End => break,
        }
    }
    course.is_over.store(true, Ordering::Release);
    Ok(())
}

/// The state of a session.
struct Session<'a> {
    host: &'a Host<'a>,
    /// Arrays of replies are lists in their lines.
    inline: bool,
    greeted: bool,
    /// The loop with its models, once it is open.
    open_loop: Option<OpenLoop>,
    /// The request that failed in its middle; since then the state of the models is unknown.
    broken_by: Option<String>,
}

/// Requests that change the models or their optimizers, and may be interrupted on the way.
const CHANGING: [&str; 6] =
    ["step", "train_minibatch", "train_texts", "train_rlhf", "train_unsupervised", "load_state"];

/// A loop that the client drives.
enum OpenLoop {
    Step(Box<StepLoop>),
    Engine(Box<EngineLoop>),
}

impl Session<'_> {
    /// Returns the reply to a request. A panic is an error reply, and the session continues; if the models may be half changed, only
    /// `load_state` and `stop` are accepted after it.
    fn reply(&mut self, request: &Request) -> Result<Reply, Failure> {
        let take_panic = self.host.take_panic;
        if let Some(broken_by) = self.broken_by.as_ref().filter(|_| !["load_state", "stop"].contains(&&*request.method))
        {
            return Err(Failure::order(format!(
                "{}: {broken_by} failed on the way and left the models half changed: load_state first, or start another session",
                request.method
            )));
        }
        let answered = catch_unwind(AssertUnwindSafe(|| self.answer(request)));
        let panicked = answered.is_err();
        let reply = answered.unwrap_or_else(|_| Err(Failure::internal(&take_panic())));
        let is_load = request.method == "load_state";
        if reply.is_ok() && is_load {
            self.broken_by = None;
        } else if reply.is_err() && CHANGING.contains(&&*request.method) && (panicked || self.is_half_loaded()) {
            self.broken_by = Some(request.method.clone());
        }
        reply
    }

    /// Returns true if loading a state failed after the models had begun to change.
    fn is_half_loaded(&self) -> bool {
        match &self.open_loop {
            Some(OpenLoop::Step(open_loop)) => open_loop.is_half_loaded(),
            Some(OpenLoop::Engine(open_loop)) => open_loop.is_half_loaded(),
            None => false,
        }
    }

    fn answer(&mut self, request: &Request) -> Result<Reply, Failure> {
        let Request { method, params, frames, .. } = request;
        let params = Params::new(params, frames);
        let mut reply = Reply::new(self.inline);
        match (method.as_str(), self.greeted, &mut self.open_loop) {
            ("hello", ..) => self.greet(&params, &mut reply)?,
            (_, false, _) => {
                let message = format!("{method}: expected `hello` with the version of the protocol first");
                return Err(Failure::order(message));
            }
            ("stop", ..) => params.finish(method)?,
            ("open", _, None) => self.open_loop = Some(self.open(&params, &mut reply)?),
            ("open", ..) => {
                return Err(Failure::order("open: a session has one loop, and it is open: start another session"));
            }
            (_, _, Some(OpenLoop::Step(open_loop))) => open_loop.answer(method, &params, &mut reply)?,
            (_, _, Some(OpenLoop::Engine(open_loop))) => open_loop.answer(method, &params, &mut reply)?,
            (method, _, None) if StepLoop::METHODS.contains(&method) || EngineLoop::METHODS.contains(&method) => {
                return Err(Failure::order(format!("{method}: expected `open` first")));
            }
            (method, _, None) => return Err(Failure::unknown(method, &[])),
        }
        Ok(reply)
    }

    /// The handshake.
    fn greet(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let protocol = params.needed("protocol", Params::count)? as u64;
        let arrays = params.text("arrays")?.unwrap_or("frames");
        params.finish("hello")?;
        if protocol != PROTOCOL {
            let message = format!(
                "protocol: expected {PROTOCOL}, found {protocol}: client and program are of different versions"
            );
            return Err(Failure::usage("protocol", message));
        }
        if !["frames", "lists"].contains(&arrays) {
            return Err(Failure::usage("arrays", format!("arrays: expected frames or lists, found {arrays}")));
        }
        self.inline = arrays == "lists";
        self.greeted = true;
        let world = self.host.world;
        reply.set("protocol", PROTOCOL);
        reply.set("version", env!("CARGO_PKG_VERSION"));
        reply.set("loops", json!({"step": StepLoop::METHODS, "engine": EngineLoop::METHODS}));
        reply.set("dtypes", json!(Dtype::names()));
        reply.set("limits", json!({"line": MOST_LINE, "frames": MOST_FRAMES, "bytes": MOST_BYTES}));
        reply.set("rank", world.rank());
        reply.set("ranks", world.size());
        Ok(())
    }

    /// Loads the models of a loop.
    fn open(&self, params: &Params<'_>, reply: &mut Reply) -> Result<OpenLoop, Failure> {
        match params.needed("loop", Params::text)? {
            "step" => Ok(OpenLoop::Step(Box::new(StepLoop::open(params, reply)?))),
            "engine" => Ok(OpenLoop::Engine(Box::new(EngineLoop::open(params, self.host.read_settings, reply)?))),
            other => Err(Failure::usage("loop", format!("loop: expected step or engine, found {other}"))),
        }
    }
}
