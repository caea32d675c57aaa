//! The live page over HTTP.
//!
//! `/` is the page, and `/parts?since=REVISION` has the parts of it that changed after a revision, as JSON. Nothing else is answered: a
//! request cannot name a file, and nothing is written.

use super::live::LiveRun;
use crate::http_server::Listener;
use axum::Router;
use axum::extract::State;
use axum::http::{Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use rlhf::Result;
use rlhf::report::html::Html;
use rlhf::report::page::{Part, live_page, parts, progress_line, title_of};
use rlhf::report::progress::Progress;
use rlhf::settings::WatchConfig;
use rlhf::signals::pause;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Serves the page of a run until [`request_stop`](rlhf::signals::request_stop) is called. Calls `announce` with its address once it can
/// be opened.
///
/// # Errors
/// If there is no run in the folder, or `metrics.jsonl` cannot be read; if the port is taken, or `host` is no address of this machine; the
/// error of `announce`.
pub fn watch(config: &WatchConfig, announce: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    config.check()?;
    let page = LivePage::open(&config.run)?;
    let listener = Listener::bind(&config.host, config.port())?;
    let url = listener.url();
    let _server = listener.serve(router(page))?;
    announce(&url)?;
    while !pause(Duration::from_secs(60)) {}
    Ok(())
}

/// The page of a run in all its states.
struct LivePage {
    live: LiveRun,
    /// Prefix of the revisions of this process: a page that another one served gets all parts.
    process: String,
    revision: u64,
    parts: Vec<LivePart>,
}

/// A part of the page.
struct LivePart {
    id: &'static str,
    html: Html,
    /// Revision at which it changed last.
    changed: u64,
}

impl LivePage {
    fn open(dir: &Path) -> Result<Self> {
        let live = LiveRun::open(dir)?;
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut page = Self { live, process: format!("{:x}", started.as_nanos()), revision: 0, parts: Vec::new() };
        page.render();
        Ok(page)
    }

    /// Renders the run again if it has changed.
    fn refresh(&mut self) {
        match self.live.refresh() {
            Ok(false) => {}
            Ok(true) => self.render(),
            Err(error) => self.replace([progress_line(&Err(error))]),
        }
    }

    fn render(&mut self) {
        let run = &self.live.run;
        let rendered: Vec<Part> =
            std::iter::once(progress_line(&Ok(Progress::of(run)))).chain(parts(slice::from_ref(run))).collect();
        self.replace(rendered);
    }

    /// Replaces the parts that have changed.
    fn replace(&mut self, rendered: impl IntoIterator<Item = Part>) {
        let next = self.revision + 1;
        for (id, html) in rendered {
            let part = LivePart { id, html, changed: next };
            match self.parts.iter().position(|part| part.id == id) {
                None => self.parts.push(part),
                Some(at) if self.parts[at].html == part.html => continue,
                Some(at) => self.parts[at] = part,
            }
            self.revision = next;
        }
    }

    fn revision(&self) -> String {
        format!("{}-{}", self.process, self.revision)
    }

    fn whole(&self) -> String {
        live_page(
            &title_of(slice::from_ref(&self.live.run)),
            &self.revision(),
            self.parts.iter().map(|part| &part.html),
        )
    }

    /// Returns the parts that changed after the revision `since`; all parts, if `since` is not a revision of this process.
    fn changes(&self, since: &str) -> Value {
        let known: Option<u64> =
            since.strip_prefix(&self.process).and_then(|rest| rest.strip_prefix('-')?.parse().ok());
        let changed = self.parts.iter().filter(|part| part.changed > known.unwrap_or(0));
        let parts: Map<String, Value> = changed.map(|part| (part.id.to_string(), part.html.as_str().into())).collect();
        json!({"revision": self.revision(), "parts": parts})
    }
}

type Shared = Arc<Mutex<LivePage>>;

fn router(page: LivePage) -> Router {
    Router::new().route("/", get(whole)).route("/parts", get(changes)).with_state(Arc::new(Mutex::new(page)))
}

/// Returns the page with the newest state of the run. Reading it blocks the only thread of the server: other requests would wait for the
/// same state.
fn refreshed(page: &Shared) -> MutexGuard<'_, LivePage> {
    let mut page = page.lock().unwrap_or_else(PoisonError::into_inner);
    page.refresh();
    page
}

async fn whole(State(page): State<Shared>) -> Response {
    answer("text/html; charset=utf-8", refreshed(&page).whole())
}

async fn changes(State(page): State<Shared>, uri: Uri) -> Response {
    let since = uri.query().and_then(|query| query.split('&').find_map(|pair| pair.strip_prefix("since=")));
    answer("application/json", refreshed(&page).changes(since.unwrap_or_default()).to_string())
}

fn answer(content_type: &'static str, text: String) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_has_the_parts_that_changed_after_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":2}\n").unwrap();
        let mut page = LivePage::open(dir.path()).unwrap();
        let ids = |page: &LivePage, since: &str| -> Vec<String> {
            page.changes(since)["parts"].as_object().unwrap().keys().cloned().collect()
        };
        let first = page.revision();
        let all = ["progress", "verdict", "curves", "samples", "configuration", "checks"];
        assert_eq!(
            (ids(&page, ""), ids(&page, "0-1"), ids(&page, &first)),
            (all.map(String::from).into(), all.map(String::from).into(), vec![])
        );
        page.render();
        assert_eq!(page.revision(), first, "nothing has changed");
        let part = |text: &str| {
            let mut html = Html::default();
            html.text(text);
            html
        };
        page.replace([("verdict", part("<new>")), ("progress", part("line"))]);
        let second = page.revision();
        assert_eq!((ids(&page, &first), ids(&page, &second)), (vec!["progress".into(), "verdict".into()], vec![]));
        assert_eq!(page.changes(&first)["parts"]["verdict"], "&lt;new&gt;");
        assert!(page.whole().contains(&format!("data-revision=\"{second}\"")));
    }
}
