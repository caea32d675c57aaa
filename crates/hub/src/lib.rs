//! Downloads models and datasets from the Hugging Face hub into the cache that transformers uses too.
//!
//! Files are stored by the commit of the revision, so files of two commits are never mixed. Each
//! is written under another name, checked and renamed: a file with its final name is complete. Layout and names of the
//! cache are those of the `hf-hub` crate. Its transfer is not used: version 0.5 sends the token to the host that a file is
//! redirected to, appends any response of the server to a partial file, checks neither length nor hash, and does not
//! retry after a status that allows it; version 1.0 checks no hash and starts again after a cut (docs/internals/decisions.md).
//!
//! [`push`] uploads a folder.
//!
//! ```no_run
//! // The folder of the cache, after a download if the model is not there. A name that is a folder is returned as it is.
//! let folder = rlhf_hub::model_dir("HuggingFaceTB/SmolLM2-135M".as_ref(), Some("main"))?;
//! println!("{}", folder.join("config.json").display());
//! # Ok::<(), rlhf_base::Error>(())
//! ```

mod access;
mod download;
mod lfs;
mod local;
pub mod push;
mod requests;

pub use access::Access;

use download::Fetch;
use hf_hub::{Cache, Repo, RepoType};
use rlhf_base::dist::World;
use rlhf_base::files;
use rlhf_base::safe_text::one_line;
use rlhf_base::signals::pause;
use rlhf_base::weights::no_such_file;
use rlhf_base::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// Number of attempts per request.
const ATTEMPTS: u32 = 4;
/// Most wait before the next attempt: the hub's limits on requests are per five minutes.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// The hub and its local cache.
#[derive(Clone)]
pub struct Hub {
    /// The address of the hub, without a slash at its end.
    pub endpoint: String,
    /// The folder of the cache.
    pub cache: PathBuf,
    /// Access token for gated and private models; it is sent to `endpoint` only and never printed.
    pub token: Option<String>,
    /// A PEM file of trusted certificate authorities, instead of the default ones.
    pub certificates: Option<PathBuf>,
    /// Whether only the cache is used, without a single request.
    pub offline: bool,
    /// Wait before the first retry of a failed request; doubles with each retry.
    pub pause: Duration,
    /// Timeout of the hub's description of a model or a dataset. Downloads have no such timeout: they continue as long
    /// as bytes arrive.
    pub timeout: Duration,
}

/// The part of a model to download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Configuration, tokenizer and weights, or an adapter's.
    Model,
    /// The tokenizer.
    Tokenizer,
    /// The configuration.
    Config,
}

/// Selects files among all files of a dataset, whose paths have slashes.
pub type Choose<'a> = dyn Fn(&BTreeSet<String>) -> Result<Vec<String>> + 'a;

/// The kind of repository and the part of it to download.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    Model(Part),
    Dataset(&'a Choose<'a>),
}

/// Returns the folder of the model `name_or_path`: the path itself if it exists, else the model of this name on the hub,
/// from the cache or downloaded into it. `revision` is a branch, a tag or a commit of the hub (None: `main`).
///
/// # Errors
/// If it is neither a folder nor a name on the hub, the hub does not know it or cannot be reached, it has no
/// weights in safetensors, or a revision other than `main` is given for a folder.
pub fn model_dir(name_or_path: &Path, revision: Option<&str>) -> Result<PathBuf> {
    Hub::from_env().find(name_or_path, revision, Part::Model)
}

/// Returns a folder with the tokenizer of the model `name_or_path`, without downloading its weights.
///
/// # Errors
/// As [`model_dir`].
pub fn tokenizer_dir(name_or_path: &Path, revision: Option<&str>) -> Result<PathBuf> {
    Hub::from_env().find(name_or_path, revision, Part::Tokenizer)
}

/// Returns the configuration file `name_or_path`: the path itself, or the `config.json` of the model of this name on the
/// hub.
///
/// # Errors
/// As [`model_dir`].
pub fn config_file(name_or_path: &Path, revision: Option<&str>) -> Result<PathBuf> {
    if name_or_path.is_dir() {
        return Ok(Hub::from_env().find(name_or_path, revision, Part::Config)?.join(CONFIG));
    }
    if name_or_path.exists() || !name_or_path.to_str().is_some_and(is_hub_name) {
        return Ok(name_or_path.to_path_buf());
    }
    Ok(Hub::from_env().find(name_or_path, revision, Part::Config)?.join(CONFIG))
}

/// Whether `name` has the form of a name on the hub: `name` or `owner/name`.
pub fn is_hub_name(name: &str) -> bool {
    let sound = |part: &str| {
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
        edge(part.chars().next())
            && edge(part.chars().next_back())
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    name.len() <= 96
        && name.split('/').count() <= 2
        && name.split('/').all(sound)
        && !name.contains("--")
        && !name.contains("..")
        // The hub forbids `.git`; a name that ends with `.json` would be a mistyped file.
        && ![".git", ".json"].iter().any(|end| name.ends_with(end))
}

/// Commits by name and revision, `owner/name@main`; a dataset's name has `datasets/` before it.
pub type Commits = BTreeMap<String, String>;

thread_local! {
    /// The commits of the current [`AskedHub`], if there is one.
    static COMMITS: RefCell<Option<Commits>> = const { RefCell::new(None) };
    /// Whether a copy in the cache of a recorded commit is used without a request: another rank has downloaded it.
    static DOWNLOADED: Cell<bool> = const { Cell::new(false) };
}

/// Records the commits that this thread requests from the hub, and requests known names by their recorded commit: a
/// resumed run reads the same files as before, regardless of later pushes.
#[derive(Debug)]
pub struct AskedHub(Option<Commits>);

impl AskedHub {
    /// Starts recording with these `known` commits.
    pub fn with(known: Commits) -> Self {
        Self(COMMITS.replace(Some(known)))
    }

    /// The commits recorded so far.
    pub fn commits(&self) -> Commits {
        COMMITS.with_borrow(|commits| commits.clone().unwrap_or_default())
    }

    /// Downloads what a run reads once per machine: the first rank of each machine calls `find`, which requests it; the others, and
    /// later requests of all, use its files. All ranks read the commits that rank 0 found. Without effect if all of `names` are
    /// local paths.
    ///
    /// # Errors
    /// Those of `find`, on all ranks; if a rank has ended or does not respond.
    pub fn download(&self, world: &World, names: &[&Path], find: impl Fn() -> Result<()>) -> Result<()> {
        if world.size() == 1 || !world.any(!names.iter().all(|name| name.exists()))? {
            return Ok(());
        }
        let first = world.local_rank() == 0;
        world.agree(if first { find() } else { Ok(()) })?;
        let local = self.commits();
        let commits = world.broadcast(local.clone())?;
        let differs = first && local != commits;
        COMMITS.set(Some(commits));
        world.agree(if differs { find() } else { Ok(()) })?;
        DOWNLOADED.set(true);
        Ok(())
    }
}

impl Drop for AskedHub {
    fn drop(&mut self) {
        COMMITS.set(self.0.take());
        DOWNLOADED.set(false);
    }
}

/// Returns the name on the hub and the commit of a model's folder in the cache.
pub fn name_of(dir: &Path) -> Option<(String, String)> {
    let (commit, snapshots) = (dir.file_name()?.to_str()?, dir.parent()?);
    let folder = snapshots.parent()?.file_name()?.to_str()?;
    let name = folder.strip_prefix("models--")?.replace("--", "/");
    (snapshots.ends_with("snapshots") && is_commit(commit)).then(|| (name, commit.to_string()))
}

/// Omits the token.
impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "...");
        let Self { endpoint, cache, offline, .. } = self;
        let endpoint = one_line(endpoint);
        write!(f, "Hub {{ endpoint: {endpoint:?}, cache: {cache:?}, token: {token:?}, offline: {offline} }}")
    }
}

impl Hub {
    /// Reads the variables `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) and
    /// `SSL_CERT_FILE`, with their usual defaults.
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var_os(name))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Self {
        let var = |name: &str| var(name).filter(|value| !value.is_empty());
        let text = |name: &str| Some(var(name)?.to_string_lossy().trim().to_string()).filter(|text| !text.is_empty());
        let user_home = || var("HOME").map(PathBuf::from).or_else(std::env::home_dir);
        let folder = |name: &str| Some(files::with_home(var(name)?.into(), user_home));
        let home = folder("HF_HOME").unwrap_or_else(|| {
            let caches = folder("XDG_CACHE_HOME").or_else(|| Some(user_home()?.join(".cache")));
            caches.unwrap_or_else(|| ".cache".into()).join("huggingface")
        });
        let saved_token = || files::read_text(&home.join("token")).ok().map(|text| text.trim().to_string());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let yes = |text: String| ["1", "true", "yes", "on"].contains(&text.to_ascii_lowercase().as_str());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_string(),
            cache: folder("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")),
            token: text("HF_TOKEN")
                .or_else(|| text("HUGGING_FACE_HUB_TOKEN"))
                .or_else(saved_token)
                .filter(|token| !token.is_empty()),
            certificates: var("SSL_CERT_FILE").map(PathBuf::from),
            offline: text("HF_HUB_OFFLINE").or_else(|| text("TRANSFORMERS_OFFLINE")).is_some_and(yes),
            pause: Duration::from_millis(500),
            timeout: Duration::from_secs(60),
        }
    }

    /// Returns the folder with this part of the model `name_or_path`, as [`model_dir`].
    ///
    /// # Errors
    /// As [`model_dir`].
    pub fn find(&self, name_or_path: &Path, revision: Option<&str>, part: Part) -> Result<PathBuf> {
        if name_or_path.exists() {
            return match revision {
                // Ignoring the revision would load the wrong weights.
                Some(revision) if revision != "main" => Err(Error::refused(
                    "model_revision",
                    format!(
                        " = {revision}: {} is a folder here, and a folder has no revisions",
                        name_or_path.display()
                    ),
                )),
                _ => Ok(name_or_path.to_path_buf()),
            };
        }
        let Some(name) = name_or_path.to_str().filter(|name| is_hub_name(name)) else {
            let file = if part == Part::Tokenizer { "tokenizer.json" } else { CONFIG };
            return Err(no_such_file(name_or_path, file));
        };
        let revision = revision.unwrap_or("main");
        if !is_inside(revision) {
            let rest = format!(" = {revision:?}: expected a branch, a tag or a commit of the hub");
            return Err(Error::refused("model_revision", rest));
        }
        self.folder(name, revision, Wanted::Model(part))
    }

    /// Returns the files of the dataset `name` at `revision` that `choose` selects among all of them, from the cache or
    /// downloaded into it. None if it selects none.
    ///
    /// # Errors
    /// If the hub does not know the dataset or cannot be reached; errors of `choose`.
    pub fn dataset(&self, name: &str, revision: &str, choose: &Choose<'_>) -> Result<Vec<PathBuf>> {
        if !is_inside(revision) {
            let message = format!("expected a branch, a tag or a commit of the hub behind the @, found {revision:?}");
            return Err(Error::invalid(name, message));
        }
        let dir = self.folder(name, revision, Wanted::Dataset(choose))?;
        if !dir.is_dir() {
            return Ok(Vec::new());
        }
        Ok(choose(&files_of_snapshot(&dir)?)?.into_iter().map(|file| dir.join(file)).collect())
    }

    fn folder(&self, name: &str, revision: &str, wanted: Wanted<'_>) -> Result<PathBuf> {
        let kind = if let Wanted::Model(_) = wanted { RepoType::Model } else { RepoType::Dataset };
        let prefix = if let RepoType::Dataset = kind { "datasets/" } else { "" };
        let asked = format!("{prefix}{name}@{revision}");
        let known = COMMITS.with_borrow(|commits| commits.as_ref()?.get(&asked).cloned());
        let revision = known.as_deref().unwrap_or(revision);
        let repo = Repo::with_revision(name.to_string(), kind, revision.to_string());
        let dir = self.cache.join(repo.folder_name());
        let cached = Cache::new(self.cache.clone()).repo(repo);
        let folder = Fetch { hub: self, name, revision, wanted, dir, cached, agent: self.agent()? }.folder()?;
        let commit = folder.file_name().map(|commit| commit.to_string_lossy().into_owned());
        COMMITS.with_borrow_mut(|commits| {
            commits.as_mut().map(|commits| commits.insert(asked, commit.unwrap_or_default()))
        });
        Ok(folder)
    }

    fn agent(&self) -> Result<Agent> {
        if !self.offline && !["http://", "https://"].iter().any(|scheme| self.endpoint.starts_with(scheme)) {
            // The address may contain a password, so it is not printed.
            let message = "HF_ENDPOINT: expected an address that starts with http:// or https://, found another text";
            return Err(Error::Usage(message.into()));
        }
        let roots = match &self.certificates {
            Some(file) if !self.offline => certificates(file)?,
            _ => RootCerts::WebPki,
        };
        let config = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // A compressed body has neither the length nor the ranges of the file.
            .accept_encoding("identity")
            .user_agent(concat!("rlhf/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .build();
        Ok(config.into())
    }

    /// Sends a request up to `attempts` times, with waits between them.
    fn repeat<T>(&self, attempts: u32, request: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
        repeat(request, |failed, failure| self.wait((failed, attempts), failure))
    }

    /// Waits before the next attempt; returns the failure if there is none left.
    fn wait(&self, (failed, attempts): (u32, u32), failure: Failure) -> Result<(), Failure> {
        match failure {
            Failure::Transient(_, asked) if failed < attempts => {
                if pause(self.delay(failed, asked)) {
                    Err(failure)
                } else {
                    Ok(())
                }
            }
            failure => Err(failure),
        }
    }

    /// Returns the wait after `failed` attempts, at least the `asked` one of the server and [`LONGEST_WAIT`] at most.
    fn delay(&self, failed: u32, asked: Option<Duration>) -> Duration {
        let wait = self.pause * 2u32.pow(failed - 1);
        wait.max(asked.unwrap_or_default()).min(LONGEST_WAIT)
    }
}

/// The file with the names of all files of a dataset's snapshot: of some formats, the names of the files that are in the cache do
/// not tell whether others are missing. Other programs ignore it.
fn listing_path(snapshot: &Path) -> PathBuf {
    let repository = snapshot.parent().and_then(Path::parent).unwrap_or(snapshot);
    repository.join(".rlhf").join(snapshot.file_name().unwrap_or_default()).with_extension("json")
}

/// Lists all files of a dataset's snapshot; if another program downloaded it, only the files in the cache.
fn files_of_snapshot(dir: &Path) -> Result<BTreeSet<String>> {
    let listed =
        fs::read(listing_path(dir)).ok().and_then(|bytes| serde_json::from_slice::<BTreeSet<String>>(&bytes).ok());
    match listed {
        Some(mut files) => {
            files.retain(|name| is_inside(name));
            Ok(files)
        }
        None => files_below(dir),
    }
}

/// Lists the files in a folder and its subfolders, as relative paths with slashes.
///
/// # Errors
/// If a folder cannot be read.
pub fn files_below(dir: &Path) -> Result<BTreeSet<String>> {
    fn collect(dir: &Path, prefix: &str, files: &mut BTreeSet<String>) -> Result<()> {
        for entry in fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
            let entry = entry.map_err(Error::io("read the folder", dir))?;
            let (path, name) = (entry.path(), entry.file_name());
            // Names that are not UTF-8 are never selected; hidden folders contain internal files of tools.
            let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else { continue };
            if path.is_file() {
                files.insert(format!("{prefix}{name}"));
            } else if path.is_dir() && prefix.split('/').count() < DEEPEST {
                collect(&path, &format!("{prefix}{name}/"), files)?;
            }
        }
        Ok(())
    }
    let mut files = BTreeSet::new();
    collect(dir, "", &mut files)?;
    Ok(files)
}

/// Maximum depth of a dataset's folders; also ends cycles of links.
const DEEPEST: usize = 4;

/// Whether a relative path stays within its folder.
fn is_inside(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Sends a request until it succeeds, or until `wait` returns an error: it is called with the number of failed attempts and the last
/// failure, and waits before the next attempt.
fn repeat<T>(
    request: impl Fn() -> Result<T, Failure>,
    wait: impl Fn(u32, Failure) -> Result<(), Failure>,
) -> Result<T, Failure> {
    let mut failed = 0;
    loop {
        match request() {
            Ok(value) => return Ok(value),
            Err(failure) => {
                failed += 1;
                wait(failed, failure)?;
            }
        }
    }
}

/// Failure of a request.
enum Failure {
    /// A retry would fail again.
    Permanent(Error),
    /// A retry may succeed: the reason, and the wait that the server requests.
    Transient(String, Option<Duration>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Permanent(error)
    }
}

impl From<ureq::Error> for Failure {
    fn from(error: ureq::Error) -> Self {
        match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
                Self::Permanent(Error::Usage(format!("a request to the hub (HF_ENDPOINT, HF_TOKEN): {error}")))
            }
            error => {
                let mut what = error.to_string();
                if what.contains("UnknownIssuer") {
                    what += "; if a proxy signs with certificates of its own, set SSL_CERT_FILE to them";
                }
                Self::Transient(what, None)
            }
        }
    }
}

/// Reads the certificates in a file.
pub fn certificates(path: &Path) -> Result<RootCerts> {
    let text = files::read(path)
        .map_err(|error| Error::Usage(format!("SSL_CERT_FILE: the certificates cannot be read: {error}")))?;
    let certificates: std::result::Result<Vec<_>, _> = parse_pem(&text).collect();
    let certificates =
        certificates.map_err(|error| Error::invalid(path, format!("SSL_CERT_FILE: not valid PEM: {error}")))?;
    let certificates: Vec<_> = certificates
        .into_iter()
        .filter_map(|item| if let PemItem::Certificate(certificate) = item { Some(certificate) } else { None })
        .collect();
    if certificates.is_empty() {
        return Err(Error::invalid(path, "SSL_CERT_FILE: expected certificates in PEM, found none"));
    }
    Ok(RootCerts::new_with_certs(&certificates))
}

/// Scheme and authority of an address.
pub fn origin(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    &url[..end]
}

fn escaped(revision: &str) -> String {
    let keep = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
    revision.bytes().map(|b| if keep(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// Returns whether `name` is a valid name of a branch by git's rules; the name of a commit is not.
pub fn is_branch(name: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.ends_with(".lock");
    let is_refused = |c: char| c.is_ascii_control() || " ~^:?*[\\".contains(c);
    name.split('/').all(is_part)
        && !name.contains(is_refused)
        && !["..", "@{"].iter().any(|text| name.contains(text))
        && !name.ends_with('.')
        && !name.starts_with('-')
        && name != "@"
        && !is_commit(name)
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(vars: &[(&str, &str)]) -> Hub {
        Hub::from_vars(|name| vars.iter().find(|(var, _)| *var == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn names_of_the_hub_are_distinguished_from_paths() {
        for name in ["gpt2", "EleutherAI/pythia-160m", "Qwen/Qwen2.5-0.5B", "a_b/c.d", "Meta-Llama-3.1-8B"] {
            assert!(is_hub_name(name), "{name}");
        }
        let long = "x".repeat(97);
        let paths = [
            "",
            ".",
            "..",
            "./gpt2",
            "../gpt2",
            "~/gpt2",
            "/gpt2",
            "gpt2/",
            "a/b/c",
            "a//b",
            "a--b",
            "a b",
            "a/-b",
            "a/b.",
            "config.json",
            "a/b.git",
            "models/ä",
            "x=y",
            &long,
        ];
        for path in paths {
            assert!(!is_hub_name(path), "{path}");
        }
    }

    #[test]
    fn variables_have_the_meanings_and_defaults_that_they_have_elsewhere() {
        let plain = hub(&[("HOME", "/h"), ("HF_TOKEN", ""), ("HF_HUB_OFFLINE", "0")]);
        assert_eq!((plain.endpoint.as_str(), plain.token.as_deref()), ("https://huggingface.co", None));
        assert_eq!((plain.cache.to_str(), plain.offline), (Some("/h/.cache/huggingface/hub"), false));
        let cache = |vars: &[(&str, &str)]| hub(vars).cache.to_str().unwrap().to_string();
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("XDG_CACHE_HOME", "/x")]), "/hf/hub");
        assert_eq!(cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]), "/c");
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/hf")]), "/h/hf/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HUB_CACHE", "~")]), "/h");
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HUB_CACHE", "~me/c")]), "~me/c");
        let home = std::env::home_dir().unwrap();
        assert_eq!(hub(&[]).cache, home.join(".cache/huggingface/hub"));
        assert_eq!(hub(&[("HF_ENDPOINT", "http://mirror:8080/")]).endpoint, "http://mirror:8080");
        for (value, offline) in [("1", true), ("true", true), ("YES", true), ("On", true), ("no", false), ("2", false)]
        {
            assert_eq!(hub(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
            assert_eq!(hub(&[("TRANSFORMERS_OFFLINE", value)]).offline, offline, "{value}");
        }
    }

    #[test]
    fn the_token_comes_from_its_variable_else_from_the_saved_file_and_is_not_shown() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("token"), "hf_saved\n").unwrap();
        let home = ("HF_HOME", home.path().to_str().unwrap());
        assert_eq!(hub(&[home]).token.as_deref(), Some("hf_saved"));
        let hub = hub(&[home, ("HF_TOKEN", "hf_given ")]);
        assert_eq!(hub.token.as_deref(), Some("hf_given"));
        assert!(!format!("{hub:?}").contains("hf_given"));
    }

    #[test]
    fn an_origin_ends_where_the_path_starts() {
        assert_eq!(origin("https://huggingface.co/a/b"), "https://huggingface.co");
        assert_eq!(origin("http://127.0.0.1:80?x=http://y/"), "http://127.0.0.1:80");
        assert_ne!(origin("https://huggingface.co@elsewhere/a"), "https://huggingface.co");
    }
}
