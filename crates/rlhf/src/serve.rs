//! `rlhf serve`: a model behind OpenAI's HTTP interface.
//!
//! The HTTP thread parses requests and puts them into a queue with a bound; the calling thread owns the model and responds to them,
//! one after another. The same prompt, settings and seed give the tokens of `rlhf generate`.

mod api;
mod choice;
mod engine;
mod format;
mod routes;

use crate::http_server::Listener;
use crate::settings::ServeConfig;
use crate::signals::stop_requested;
use crate::{Error, Result};
use api::Served;
use engine::{Engine, Job};
use routes::Service;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Number of requests that wait for the model; further ones are refused.
const QUEUE: usize = 64;

/// Polling interval of requests to stop while no request waits.
const POLL: Duration = Duration::from_millis(50);

/// Loads the model and serves it until [`request_stop`](crate::signals::request_stop) is called. `ready` receives the model's name and
/// the server's address, `http://127.0.0.1:8000`, once requests are answered.
///
/// # Errors
/// If a setting is invalid, the port is taken or the model cannot be loaded.
pub fn serve(config: &ServeConfig, ready: impl FnOnce(&str, &str) -> Result<()>) -> Result<()> {
    config.check()?;
    // First, as loading takes time.
    let listener = Listener::bind(&config.host, config.port())?;
    let engine = Engine::load(config)?;
    let (queue, jobs) = sync_channel::<Job>(QUEUE);
    let served = Served::new(&config.model);
    let (name, url) = (served.name.clone(), listener.url());
    let server = listener.serve(routes::router(Arc::new(Service { served, queue })))?;
    ready(&name, &url)?;
    while !stop_requested() {
        match jobs.recv_timeout(POLL) {
            Ok(job) => engine.respond(&name, job),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Run("the HTTP server has ended".into())),
        }
    }
    // Requests that wait are refused before their connections end.
    drop(jobs);
    drop(server);
    Ok(())
}
