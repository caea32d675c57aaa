//! `rlhf serve`: a model behind OpenAI's HTTP interface.
//!
//! The HTTP thread parses requests and puts them into a queue with a bound; the calling thread owns the model and responds to them,
//! one after another. The same prompt, settings and seed give the tokens of `rlhf generate`.

mod api;
mod choice;
mod engine;
mod error;
mod format;
mod room;
mod routes;
mod tools;

use crate::http_server::Listener;
use api::Served;
use engine::{Engine, Job};
use rlhf::settings::ServeConfig;
use rlhf::signals::stop_requested;
use rlhf::{Error, Result};
use routes::Service;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Number of requests that wait for the model; further ones are refused.
const QUEUE: usize = 64;

/// Polling interval of requests to stop while no request waits.
const POLL: Duration = Duration::from_millis(50);

/// A server that answers requests.
#[derive(Debug)]
pub struct Ready {
    /// Name of the model in requests.
    pub name: String,
    /// Address of the server: `http://127.0.0.1:8000`.
    pub url: String,
    /// Fields of the model's `generation_config.json` by which transformers would change responses, and which have no effect here, if there
    /// are any.
    pub note: Option<String>,
}

/// Loads the model and serves it until [`request_stop`](rlhf::signals::request_stop) is called. `ready` is called once requests are
/// answered.
///
/// # Errors
/// If a setting is invalid, the port is taken or the model cannot be loaded.
pub fn serve(config: &ServeConfig, ready: impl FnOnce(&Ready) -> Result<()>) -> Result<()> {
    config.check()?;
    // First, as loading takes time.
    let listener = Listener::bind(&config.host, config.port())?;
    let engine = Engine::load(config)?;
    let (queue, jobs) = sync_channel::<Job>(QUEUE);
    let served = Served::new(&config.model);
    let about = Ready { name: served.name.clone(), url: listener.url(), note: engine.note() };
    let server = listener.serve(routes::router(Arc::new(Service { served, queue, room: room::body_room() })))?;
    ready(&about)?;
    while !stop_requested() {
        match jobs.recv_timeout(POLL) {
            Ok(job) => engine.respond(&about.name, job),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Run("the HTTP server has ended".into())),
        }
    }
    // Requests that wait are refused before their connections end.
    drop(jobs);
    drop(server);
    Ok(())
}
