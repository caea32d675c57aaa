//! Download of a model's or a dataset's files: the requests, the cache and the progress bar.

use super::{
    ATTEMPTS, CONFIG, DOWNLOADED, Failure, Hub, INDEX, Part, SINGLE, Wanted, escaped, files_of_snapshot, is_commit,
    is_inside, listing_path, origin,
};
use hf_hub::CacheRepo;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ring::digest;
use rlhf_base::safe_text::one_line;
use rlhf_base::signals::{stop_requested, stopped};
use rlhf_base::weights::{no_safetensors, read_json};
use rlhf_base::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Agent, Body};

const ADAPTER: &str = "adapter_model.safetensors";
/// Files of a tokenizer; the configuration determines which of them a model has.
const TOKENIZER: [&str; 6] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// The folder of further chat templates, in addition to `chat_template.jinja`.
const TEMPLATES: &str = "additional_chat_templates/";

/// One model or dataset at one revision.
pub(super) struct Fetch<'a> {
    pub(super) hub: &'a Hub,
    pub(super) name: &'a str,
    pub(super) revision: &'a str,
    pub(super) wanted: Wanted<'a>,
    /// `models--owner--name` in the cache.
    pub(super) dir: PathBuf,
    pub(super) cached: CacheRepo,
    pub(super) agent: Agent,
}

/// The hub's description of a file.
struct Remote {
    /// The name of its content in the cache.
    etag: String,
    size: u64,
    /// Whether the etag is the SHA-256 of the bytes.
    hashed: bool,
}

/// Kind of request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ask {
    /// The description of a file.
    Head,
    /// A model's or a dataset's description, which has a timeout.
    Description,
    /// The bytes of a file, or the rest of them.
    Bytes,
}

impl Fetch<'_> {
    pub(super) fn folder(&self) -> Result<PathBuf> {
        let cached = self.cached_folder();
        if let Some(dir) = cached.as_ref().filter(|_| DOWNLOADED.get() && is_commit(self.revision)) {
            return Ok(dir.clone());
        }
        if self.hub.offline {
            return cached
                .ok_or_else(|| self.error(&format!("{}; HF_HUB_OFFLINE forbids downloading it", self.absent())));
        }
        // With a cached copy, no retries: the user should not wait for a missing network.
        let attempts = if cached.is_some() { 1 } else { ATTEMPTS };
        match self.hub.repeat(attempts, || self.listing()) {
            Ok((commit, files)) => self.fetch(&commit, &files),
            Err(Failure::Permanent(error)) => Err(error),
            Err(Failure::Transient(what, _)) => match cached {
                Some(dir) => {
                    let (endpoint, name) = (&self.hub.endpoint, self.name);
                    let warning =
                        format!("{endpoint} cannot be reached for {name} ({what}): using the copy in the cache");
                    let _ = writeln!(io::stderr(), "warning: {}", one_line(&warning));
                    Ok(dir)
                }
                None => Err(self.error(&format!(
                    "{}, and {} cannot be reached: {what} (tried {attempts} times)",
                    self.absent(),
                    self.hub.endpoint
                ))),
            },
        }
    }

    /// An error without the token, in case the server repeated it.
    fn error(&self, message: &str) -> Error {
        Error::invalid(self.name, self.clean(message))
    }

    fn clean(&self, text: &str) -> String {
        self.hub.token.as_ref().map_or(text.to_string(), |token| text.replace(token.as_str(), "..."))
    }

    /// The words for what is missing here and for what is requested from the hub.
    fn nouns(&self) -> (&'static str, &'static str) {
        match self.wanted {
            Wanted::Model(_) => ("folder", "model"),
            Wanted::Dataset(_) => ("file or folder", "dataset"),
        }
    }

    /// The message for a name that is neither a local path nor in the cache.
    fn absent(&self) -> String {
        let (revision, cache) = (self.revision, self.hub.cache.display());
        let missing = self.missing_file().map_or_else(String::new, |file| format!(" ({file} is missing)"));
        format!("no such {}, and no whole copy of its revision {revision} in {cache}{missing}", self.nouns().0)
    }

    /// The first requested file of a dataset that its snapshot in the cache does not have, where that is known, for messages.
    fn missing_file(&self) -> Option<String> {
        let Wanted::Dataset(choose) = self.wanted else { return None };
        let dir = self.snapshot().filter(|dir| dir.is_dir())?;
        let chosen = choose(&files_of_snapshot(&dir).ok()?).ok()?;
        chosen.into_iter().find(|file| !dir.join(file).is_file())
    }

    /// The address of its page on the hub.
    fn page(&self) -> String {
        let kind = if let Wanted::Dataset(_) = self.wanted { "datasets/" } else { "" };
        format!("{}/{kind}{}", self.hub.endpoint, self.name)
    }

    fn ref_path(&self) -> PathBuf {
        self.dir.join("refs").join(self.revision)
    }

    /// The place of the snapshot in the cache, if the commit is known.
    fn snapshot(&self) -> Option<PathBuf> {
        let commit = match fs::read_to_string(self.ref_path()) {
            Ok(commit) => commit.trim().to_string(),
            Err(_) => self.revision.to_string(),
        };
        Some(self.cached.pointer_path(is_commit(&commit).then_some(commit.as_str())?))
    }

    /// The snapshot in the cache, if it has the requested part.
    fn cached_folder(&self) -> Option<PathBuf> {
        let dir = self.snapshot()?;
        let has = |name: &str| dir.join(name).is_file();
        let whole = match self.wanted {
            Wanted::Model(Part::Config) => has(CONFIG),
            Wanted::Model(Part::Tokenizer) => has("tokenizer.json"),
            // Weights are downloaded last.
            Wanted::Model(Part::Model) if has(SINGLE) => true,
            Wanted::Model(Part::Model) if has(INDEX) => shards(&dir.join(INDEX)).ok()?.iter().all(|shard| has(shard)),
            Wanted::Model(Part::Model) => has(ADAPTER),
            Wanted::Dataset(choose) => {
                dir.is_dir() && choose(&files_of_snapshot(&dir).ok()?).ok()?.iter().all(|file| has(file))
            }
        };
        whole.then_some(dir)
    }

    /// The commit of the revision, and the names of its files.
    fn listing(&self) -> Result<(String, BTreeSet<String>), Failure> {
        let (endpoint, kind, revision) = (&self.hub.endpoint, self.nouns().1, escaped(self.revision));
        let url = format!("{endpoint}/api/{kind}s/{}/revision/{revision}", self.name);
        let mut response = self.send(Ask::Description, &url, 0)?;
        let text = response.body_mut().with_config().limit(100 << 20).read_to_string()?;
        let description = serde_json::from_str(&text).unwrap_or(Value::Null);
        let commit = description["sha"].as_str().filter(|commit| is_commit(commit));
        let (Some(commit), Some(files)) = (commit, description["siblings"].as_array()) else {
            let message =
                format!("{url}: expected the hub's description of a {kind}, found {}", excerpt(&self.clean(&text)));
            return Err(self.error(&message).into());
        };
        let names = files.iter().filter_map(|file| file["rfilename"].as_str()).filter(|name| is_inside(name));
        Ok((commit.to_string(), names.map(str::to_string).collect()))
    }

    /// Downloads the requested part of the commit into the cache.
    fn fetch(&self, commit: &str, files: &BTreeSet<String>) -> Result<PathBuf> {
        let dir = self.cached.pointer_path(commit);
        match self.wanted {
            Wanted::Model(part) => self.fetch_model(commit, files, part)?,
            Wanted::Dataset(choose) => {
                let (chosen, listing, names) = (choose(files)?, listing_path(&dir), json!(files).to_string());
                if fs::read_to_string(&listing).ok().as_ref() != Some(&names) {
                    // A cache that cannot be written to may still be whole. A reader that sees only a part of the list ignores it.
                    let _ = create_parent(&listing).map(|()| fs::write(&listing, names));
                }
                chosen.iter().try_for_each(|name| self.file(commit, name))?;
            }
        }
        let path = self.ref_path();
        if self.revision != commit && fs::read_to_string(&path).ok().as_deref() != Some(commit) {
            create_parent(&path)?;
            // Not renamed into place: a reader that sees only a part of the 40 digits ignores it and asks the hub.
            fs::write(&path, commit).map_err(Error::io("write", &path))?;
        }
        Ok(dir)
    }

    fn fetch_model(&self, commit: &str, files: &BTreeSet<String>, part: Part) -> Result<()> {
        let small: Vec<&str> = match part {
            Part::Config => vec![CONFIG],
            Part::Tokenizer => TOKENIZER.to_vec(),
            Part::Model => [&TOKENIZER[..], &["adapter_config.json"]].concat(),
        };
        let has = |name: &str| files.contains(name);
        let single = has(SINGLE);
        if part == Part::Model && !single && !has(INDEX) && !has(ADAPTER) {
            return Err(no_safetensors(Path::new(self.name), files.iter().map(String::as_str)));
        }
        for name in small.into_iter().filter(|name| has(name)) {
            self.file(commit, name)?;
        }
        let is_template = |name: &&String| name.starts_with(TEMPLATES) && name.ends_with(".jinja");
        for name in files.iter().filter(|name| part != Part::Config && is_template(name)) {
            self.file(commit, name)?;
        }
        if part == Part::Model {
            if !single && has(INDEX) {
                self.file(commit, INDEX)?;
                for shard in shards(&self.cached.pointer_path(commit).join(INDEX))? {
                    self.file(commit, &shard)?;
                }
            }
            for name in [SINGLE, ADAPTER].into_iter().filter(|name| has(name)) {
                self.file(commit, name)?;
            }
        }
        Ok(())
    }

    /// Downloads one file into the snapshot, unless it exists.
    fn file(&self, commit: &str, name: &str) -> Result<()> {
        let place = self.cached.pointer_path(commit).join(name);
        if place.is_file() {
            return Ok(());
        }
        let path: Vec<String> = name.split('/').map(escaped).collect();
        let url = format!("{}/resolve/{commit}/{}", self.page(), path.join("/"));
        let remote = self.hub.repeat(ATTEMPTS, || self.describe(&url));
        let remote = remote.map_err(|failure| self.give_up(name, failure))?;
        let blob = self.dir.join("blobs").join(&remote.etag);
        if !blob.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == remote.size) {
            self.blob(name, &url, &remote, &blob)?;
        }
        create_parent(&place)?;
        let up = "../".repeat(2 + name.matches('/').count());
        let target = Path::new(&up).join("blobs").join(&remote.etag);
        let link = || std::os::unix::fs::symlink(&target, &place);
        let linked = match link() {
            // Another process created it first, or it is a link to deleted content.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && place.is_file() => Ok(()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => fs::remove_file(&place).and_then(|()| link()),
            linked => linked,
        };
        linked.map_err(Error::io("write", &place))
    }

    fn describe(&self, url: &str) -> Result<Remote, Failure> {
        let response = self.send(Ask::Head, url, 0)?;
        let text = |name: &str| response.headers().get(name)?.to_str().ok();
        let linked = text("x-linked-etag");
        let etag = linked.or(text("etag")).map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
        let size = text("x-linked-size").or(text("content-length")).and_then(|size| size.parse().ok());
        // The etag becomes the name of a file.
        let sound = |etag: &&str| !etag.is_empty() && etag.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        match (etag.filter(sound), size) {
            (Some(etag), Some(size)) => {
                let hashed = linked.is_some() && etag.len() == 64 && etag.bytes().all(|b| b.is_ascii_hexdigit());
                Ok(Remote { etag: etag.to_string(), size, hashed })
            }
            _ => Err(self.error(&format!("{url}: expected the ETag and the length of a file, found none")).into()),
        }
    }

    /// Downloads the content of a file to `blob`, resuming an earlier download.
    fn blob(&self, name: &str, url: &str, remote: &Remote, blob: &Path) -> Result<()> {
        // Lock and name of the incomplete file are the same as in transformers: a second process waits, or resumes.
        let folder = self.dir.file_name().unwrap_or_default();
        let lock = self.hub.cache.join(".locks").join(folder).join(format!("{}.lock", remote.etag));
        create_parent(&lock)?;
        let lock = File::create(&lock).and_then(|file| file.lock().map(|()| file)).map_err(Error::io("lock", &lock))?;
        if blob.metadata().is_ok_and(|metadata| metadata.len() == remote.size) {
            return Ok(());
        }
        create_parent(blob)?;
        let partial = blob.with_file_name(format!("{}.incomplete", remote.etag));
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&partial)
            .map_err(Error::io("write", &partial))?;
        let bar = Bar::new(name, remote.size);
        let (mut failed, mut furthest) = (0, 0);
        while let Err(failure) = self.append(url, remote, &mut file, &partial, &bar) {
            // An attempt that made progress does not count, so that a download ends however often the connection breaks.
            let len = file.metadata().map_or(0, |metadata| metadata.len());
            failed = if len > furthest { 1 } else { failed + 1 };
            furthest = furthest.max(len);
            let waited = self.hub.wait((failed, ATTEMPTS), failure);
            waited.map_err(|failure| self.give_up(name, failure))?;
        }
        file.sync_all().and_then(|()| fs::rename(&partial, blob)).map_err(Error::io("write", blob))?;
        drop(lock);
        Ok(())
    }

    /// Requests the rest of a file; succeeds if the file is then complete.
    fn append(&self, url: &str, remote: &Remote, file: &mut File, path: &Path, bar: &Bar) -> Result<(), Failure> {
        let restart = |file: &File| file.set_len(0).map_err(Error::io("write", path));
        let mut have = file.metadata().map_err(Error::io("read", path))?.len();
        if have > remote.size {
            restart(file)?;
            have = 0;
        }
        if have < remote.size {
            let response = self.send(Ask::Bytes, url, have)?;
            let range = format!("bytes {have}-");
            let goes_on = response.status() == StatusCode::PARTIAL_CONTENT
                && response
                    .headers()
                    .get(header::CONTENT_RANGE)
                    .is_some_and(|r| r.as_bytes().starts_with(range.as_bytes()));
            // Some servers ignore a range: bytes from the start must not be appended.
            if !goes_on {
                restart(file)?;
                have = 0;
                if response.status() != StatusCode::OK {
                    return Err(Failure::Transient(format!("{url}: not the requested bytes"), None));
                }
            }
            let mut body = response.into_body().into_reader().take(remote.size - have);
            let mut buffer = vec![0; 1 << 16];
            loop {
                bar.at(have);
                if stop_requested() {
                    let message = format!("interrupted while downloading {url}; the same command resumes the download");
                    return Err(stopped(message.clone()).unwrap_or(Error::Run(message)).into());
                }
                match body.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => {
                        file.write_all(&buffer[..n]).map_err(Error::io("write", path))?;
                        have += n as u64;
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => {
                        return Err(Failure::Transient(
                            format!("{error}, after {have} of {} bytes", remote.size),
                            None,
                        ));
                    }
                }
            }
        }
        if have < remote.size {
            return Err(Failure::Transient(format!("the response ended after {have} of {} bytes", remote.size), None));
        }
        if remote.hashed && sha256(file).map_err(Error::io("read", path))? != remote.etag.to_ascii_lowercase() {
            restart(file)?;
            return Err(Failure::Transient(
                "the downloaded bytes do not have the SHA-256 that the hub reports".into(),
                None,
            ));
        }
        Ok(())
    }

    /// Sends one request and follows its redirects. Returns the final response, or the hub's description of a file where it
    /// redirects to its content.
    ///
    /// Redirects are followed here, not by the agent, for two reasons: the token must not be sent to other hosts than the
    /// hub, and only the redirecting response has a file's etag and size.
    fn send(&self, ask: Ask, url: &str, from: u64) -> Result<Response<Body>, Failure> {
        let (home, head) = (origin(&self.hub.endpoint), ask == Ask::Head);
        let body_timeout = (ask == Ask::Description).then_some(self.hub.timeout);
        let mut at = url.to_string();
        for _ in 0..10 {
            let mut request = if head { self.agent.head(&at) } else { self.agent.get(&at) };
            if let Some(token) = self.hub.token.as_ref().filter(|_| origin(&at) == home) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let response = request.config().timeout_recv_body(body_timeout).build().call()?;
            let status = response.status();
            if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
                return Ok(response);
            }
            if !status.is_redirection() {
                return Err(self.refusal(&at, status, response.headers()));
            }
            if head && response.headers().contains_key("x-linked-etag") {
                return Ok(response);
            }
            let to = response.headers().get(header::LOCATION).and_then(|to| to.to_str().ok()).unwrap_or_default();
            at = match to {
                to if to.starts_with("https://") || to.starts_with("http://") => to.to_string(),
                to if to.starts_with('/') && !to.starts_with("//") => format!("{}{to}", origin(&at)),
                to => {
                    // The query may contain credentials.
                    let found = excerpt(to.split('?').next().unwrap_or_default());
                    return Err(self.error(&format!("{at}: expected a redirect to an address, found {found}")).into());
                }
            };
        }
        Err(self.error(&format!("{url}: redirected more than 10 times")).into())
    }

    /// The failure for a status other than success and redirect.
    fn refusal(&self, url: &str, status: StatusCode, headers: &HeaderMap) -> Failure {
        let (page, endpoint) = (self.page(), &self.hub.endpoint);
        let (place, kind) = self.nouns();
        if origin(url) != origin(endpoint) {
            // An address that the hub signed for this download: it may have expired, and it is secret.
            return Failure::Transient(format!("HTTP status {status} from {}", origin(url)), None);
        }
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let code = text("x-error-code").unwrap_or_default();
        let message = match status.as_u16() {
            408 | 429 | 500.. => {
                let wait = text("retry-after").and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
                return Failure::Transient(format!("{url}: HTTP status {status}"), wait);
            }
            401 | 403 if code == "GatedRepo" || status == StatusCode::FORBIDDEN => format!(
                "gated or private (HTTP status {status}): ask for access at {page}, and set HF_TOKEN to a token of an \
                 account that has it"
            ),
            // The hub responds so for missing repositories too.
            401 if self.hub.token.is_none() => format!(
                "no such {place}, and no such public {kind} at {endpoint} (HTTP status {status}): check the name, or set \
                 HF_TOKEN if the {kind} is private or gated"
            ),
            401 => format!(
                "no such {place}, and {endpoint} does not show such a {kind} to the token of HF_TOKEN (HTTP status {status})"
            ),
            404 if code == "RevisionNotFound" => format!("no revision {} at {endpoint}", self.revision),
            404 if code == "EntryNotFound" => format!("{url}: no such file (HTTP status {status})"),
            404 => {
                format!("no such {place}, and no such {kind}, or no revision {} of it, at {endpoint}", self.revision)
            }
            _ => format!("{url}: HTTP status {status}"),
        };
        self.error(&message).into()
    }

    fn give_up(&self, file: &str, failure: Failure) -> Error {
        match failure {
            Failure::Permanent(error) => error,
            Failure::Transient(what, _) => self.error(&format!(
                "cannot download {file}: {what} (tried {ATTEMPTS} times); the same command resumes the download"
            )),
        }
    }
}

/// The progress bar of one file; drawn after a second, and on a terminal only.
pub(super) struct Bar {
    bar: ProgressBar,
    since: Instant,
}

impl Bar {
    pub(super) fn new(name: &str, size: u64) -> Self {
        let style = ProgressStyle::with_template("{msg} {bytes}/{total_bytes} {wide_bar} {bytes_per_sec} {eta}");
        let bar = ProgressBar::with_draw_target(Some(size), ProgressDrawTarget::hidden())
            .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
            .with_message(one_line(name).into_owned());
        Self { bar, since: Instant::now() }
    }

    pub(super) fn at(&self, position: u64) {
        if self.bar.is_hidden() && self.since.elapsed() > Duration::from_secs(1) {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_position(position);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The start of an unexpected response, on one line.
fn excerpt(text: &str) -> String {
    format!("{:?}", text.chars().take(60).collect::<String>())
}

/// The files named by an index.
fn shards(index: &Path) -> Result<BTreeSet<String>> {
    let json = read_json(index)?;
    let map = json["weight_map"].as_object();
    let map = map.ok_or_else(|| Error::invalid(index, "expected an object `weight_map`, found none"))?;
    let name = |value: &Value| {
        let name = value.as_str().filter(|name| name.ends_with(".safetensors") && !name.contains(['/', '\\']));
        let wrong = || Error::invalid(index, format!("expected the name of a safetensors file, found {value}"));
        name.map(str::to_string).ok_or_else(wrong)
    };
    map.values().map(name).collect()
}

fn sha256(file: &mut File) -> io::Result<String> {
    file.rewind()?;
    let mut context = digest::Context::new(&digest::SHA256);
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => context.update(&buffer[..n]),
        }
    }
    Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn create_parent(path: &Path) -> Result<()> {
    let dir = path.parent().unwrap_or(path);
    fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))
}
