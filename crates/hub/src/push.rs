//! Uploads a folder to a model repository of the hub, in one commit.
//!
//! 1. [`Hub::repository`] checks before anything is trained that the token may write to the name, and creates the repository.
//! 2. [`Repository::push`] sends the hub the names and sizes of the files. It responds which are large, which it ignores by
//!    `.gitignore`, and the hashes of those that it has: ignored and unchanged files are left out.
//! 3. Large files go to the hub's storage, by the batch interface of git's LFS extension. A file that the storage has by its
//!    hash is not sent: a push that was cut continues where it ended.
//! 4. One commit adds all files; small ones are in it.
//! 5. The hashes in the commit are compared with the hashes of the files.
//!
//! The hub's newer storage, Xet, is not used: its client is a library of its own with an asynchronous runtime. The hub takes files
//! by LFS for repositories of both kinds, and stores them in the repository's own way.

pub use super::local::{LocalFile, find_folder, open_folder};

use super::local::base64;
use super::requests::{Client, Content, Request, SLOW};
use super::{CONFIG, Failure, Hub, INDEX, SINGLE, escaped, is_branch, is_commit, is_hub_name, lfs};
use rlhf_base::{Error, Result};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The branch that a repository has from its start.
const MAIN: &str = "main";
/// Files in one request about files; the limit of the hub is 256 for one kind of request and 1000 for the other.
const BATCH: usize = 256;
/// The configuration of an adapter.
const ADAPTER_CONFIG: &str = "adapter_config.json";
/// File with patterns of names that are not uploaded.
const GITIGNORE: &str = ".gitignore";

/// A place on the hub to push to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Destination {
    /// Name of the repository, `owner/name`; `name` alone is the token's user's.
    pub name: String,
    /// Branch, created from `main` if there is none of this name (none: `main`).
    pub revision: Option<String>,
    /// Whether a new repository is private (none: the default of its owner, usually public). An existing one stays as it is; a public
    /// one is an error where a private one is wanted.
    pub private: Option<bool>,
}

/// A model repository on the hub, to which the token may write.
pub struct Repository {
    client: Client,
    revision: String,
}

/// Outcome of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The commit: the new one, or the last one if no file has changed.
    pub commit: String,
    /// Files that the commit added or changed.
    pub files: usize,
    /// Bytes of large files that were uploaded.
    pub uploaded: u64,
    /// Files that were left out by a `.gitignore` of the folder or of the repository.
    pub ignored: Vec<String>,
    /// File of weights that the commit removed, as readers would prefer it to the new ones.
    pub removed: Option<String>,
}

/// The hub's view of a file.
struct Mode {
    is_large: bool,
    is_ignored: bool,
    /// Hash of the file on the hub: SHA-256 of a large one, git's of a small one.
    oid: Option<String>,
}

/// Omits the token.
impl fmt::Debug for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Repository {{ name: {:?}, revision: {:?} }}", self.client.name, self.revision)
    }
}

impl Hub {
    /// Returns the model repository `to`. Creates it and its branch, unless they exist.
    ///
    /// # Errors
    /// If there is no token, or it may not write to the repository; if the repository is public and `to` wants a private one; if the
    /// hub cannot be reached.
    pub fn repository(&self, to: &Destination) -> Result<Repository> {
        let name = &to.name;
        if !is_hub_name(name) {
            let message = format!("{name:?}: expected a name on the hub, such as me/my-model");
            return Err(Error::Usage(message));
        }
        let revision = to.revision.clone().unwrap_or_else(|| MAIN.into());
        if !is_branch(&revision) {
            let message = format!("{name}: revision {revision:?}: expected a branch of the hub");
            return Err(Error::Usage(message));
        }
        if self.offline {
            return Err(Error::invalid(name, "cannot push: HF_HUB_OFFLINE forbids requests to the hub"));
        }
        let Some(token) = &self.token else {
            let message = format!(
                "{name}: expected an access token with write access in HF_TOKEN, found none; {}/settings/tokens makes one",
                self.endpoint
            );
            return Err(Error::Usage(message));
        };
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let message = format!(
                "{name}: HF_TOKEN: expected an access token of ASCII letters and digits, found another character"
            );
            return Err(Error::Usage(message));
        }
        let mut client = Client::new(self.clone(), name.clone())?;
        let reply = client.repeat(|| client.get("find the user of the access token", "whoami-v2", &[]));
        let user = reply.map_err(|failure| client.give_up(failure))?.json;
        (client.name, client.owners) = owned_name(&client, &user)?;
        let repository = Repository { client, revision };
        let prepared = repository.client.repeat(|| repository.prepare(to));
        prepared.map_err(|failure| repository.client.give_up(failure))?;
        Ok(repository)
    }
}

/// Returns the name with its owner, and the owners that the token may write to, if the owner is not known to be one of them: the hub
/// decides, as members of an organization may write to some of its repositories.
///
/// # Errors
/// If the token can only read, or the name has no owner and the token no `user`.
fn owned_name(client: &Client, user: &Value) -> Result<(String, Option<String>)> {
    let name = client.name.as_str();
    if user["auth"]["accessToken"]["role"] == "read" {
        let message = format!(
            "{name}: expected an access token with write access in HF_TOKEN, found one that can only read; \
             {}/settings/tokens makes one",
            client.hub.endpoint
        );
        return Err(Error::Usage(message));
    }
    let user_name = user["name"].as_str();
    let Some((owner, _)) = name.split_once('/') else {
        return match user_name {
            Some(user_name) => Ok((format!("{user_name}/{name}"), None)),
            None => {
                Err(client.error("expected a name with its owner, such as me/my-model: the access token has no user"))
            }
        };
    };
    let may_write = |org: &&Value| !["read", "no_access"].iter().any(|role| org["roleInOrg"] == *role);
    let orgs = user["orgs"].as_array().into_iter().flatten();
    let writable = orgs.filter(may_write).filter_map(|org| org["name"].as_str());
    let owners: Vec<&str> = user_name.into_iter().chain(writable).collect();
    let is_known = owners.iter().any(|known| known.eq_ignore_ascii_case(owner));
    Ok((name.to_string(), (!is_known && !owners.is_empty()).then(|| owners.join(", "))))
}

impl Repository {
    /// The name, with its owner.
    pub fn name(&self) -> &str {
        &self.client.name
    }

    /// The address of its page.
    pub fn url(&self) -> String {
        let branch = if self.revision == MAIN { String::new() } else { format!("/tree/{}", self.revision) };
        format!("{}/{}{branch}", self.client.hub.endpoint, self.client.name)
    }

    /// The address of the page of a commit.
    pub fn commit_url(&self, commit: &str) -> String {
        format!("{}/{}/commit/{commit}", self.client.hub.endpoint, self.client.name)
    }

    /// Creates the repository and the branch, and checks that the token may write.
    fn prepare(&self, to: &Destination) -> Result<(), Failure> {
        let client = &self.client;
        let (owner, name) = client.name.split_once('/').unwrap_or_default();
        let mut body = json!({"name": name, "organization": owner, "type": "model"});
        if let Some(private) = to.private {
            body["visibility"] = if private { "private" } else { "public" }.into();
        }
        let what = "create the repository";
        let created = client.post(what, "repos/create", &body, &[401, 402, 403, 409])?;
        match created.status.as_u16() {
            409 if created.words.contains("in progress") => {
                return Err(Failure::Transient(format!("cannot {what}: {}", created.words), None));
            }
            status @ 400.. => {
                let existing = client.get(what, &format!("models/{}", client.name), &[401, 403, 404])?;
                // An account that may not create repositories may write to one that is there. Otherwise the refusal of the first
                // request is the reason.
                if status != 409 && existing.status != 200 {
                    client.post(what, "repos/create", &body, &[])?;
                }
                if to.private == Some(true) && existing.json["private"] == false {
                    let message = format!(
                        "expected a private repository or a new one, found one that is public: {}/{}/settings makes it private",
                        client.hub.endpoint, client.name
                    );
                    return Err(client.error(&message).into());
                }
            }
            _ => {}
        }
        if self.revision != MAIN && !self.revision.starts_with("refs/") {
            let path = format!("models/{}/branch/{}", client.name, escaped(&self.revision));
            client.post(&format!("create the branch {}", self.revision), &path, &json!({}), &[409])?;
        }
        let probe = json!({"files": [{"path": "README.md", "sample": base64(b"#"), "size": 1}]});
        client.post("write to the repository", &self.path("preupload"), &probe, &[]).map(drop)
    }

    /// The path of an action on the branch.
    fn path(&self, action: &str) -> String {
        format!("models/{}/{action}/{}", self.client.name, escaped(&self.revision))
    }

    /// Pushes the `files` in one commit with the title `message`. Other files of the repository stay, but for weights that would
    /// be read in place of the new ones. `shows` long waits on standard error, and on a terminal a progress bar for each large file.
    ///
    /// # Errors
    /// If there is no file; if a file cannot be read, the hub refuses one, or cannot be reached; if a `.gitignore` excludes a part of
    /// the model; if the commit has other bytes.
    pub fn push(&self, files: &[LocalFile], message: &str, shows: bool) -> Result<Pushed> {
        self.client.speaks.set(shows);
        if files.is_empty() {
            return Err(self.client.error("expected files to push, found none"));
        }
        let mut failed = 0;
        let mut uploaded = 0;
        loop {
            // The next attempt starts from the first request: the commit may exist although its response was lost.
            let failure = match self.attempt(files, message, (shows, &mut uploaded)) {
                Ok(pushed) => return Ok(pushed),
                Err(failure) => failure,
            };
            failed += 1;
            self.client.wait(failed, failure).map_err(|failure| self.client.give_up(failure))?;
        }
    }

    fn attempt(
        &self,
        files: &[LocalFile],
        message: &str,
        (shows, uploaded): (bool, &mut u64),
    ) -> Result<Pushed, Failure> {
        let modes = self.modes(files)?;
        let ignored = files.iter().zip(&modes).filter(|(_, mode)| mode.is_ignored);
        let ignored: Vec<String> = ignored.map(|(file, _)| file.name().to_string()).collect();
        let is_needed =
            |name: &&String| [CONFIG, ADAPTER_CONFIG].contains(&name.as_str()) || name.ends_with(".safetensors");
        if let Some(name) = ignored.iter().find(is_needed) {
            let message =
                format!("{name} is a part of the model, but .gitignore of the folder or of the repository excludes it");
            return Err(self.client.error(&message).into());
        }
        let mut changed = Vec::new();
        for (file, mode) in files.iter().zip(&modes).filter(|(_, mode)| !mode.is_ignored) {
            let hash = if mode.is_large { file.sha256()?.to_string() } else { file.git_hash()? };
            if mode.oid.as_ref() != Some(&hash) {
                changed.push((file, mode.is_large, hash));
            }
        }
        let large: Vec<&LocalFile> = changed.iter().filter(|(_, large, _)| *large).map(|(file, ..)| *file).collect();
        // An upload that fails was tried often enough.
        let sent = lfs::upload(&self.client, &self.revision, &large, shows);
        *uploaded += sent.map_err(|failure| self.client.give_up(failure))?;
        let removed = self.stale_weights(files)?;
        if changed.is_empty() && removed.is_none() {
            let reply = self.client.get("find the last commit", &self.path("revision"), &[])?;
            let commit = self.parse_commit(&reply.json["sha"])?;
            return Ok(Pushed { commit, files: 0, uploaded: *uploaded, ignored, removed: None });
        }
        let lines = commit_lines(&changed, removed, message)?;
        let reply = self.client.send(&Request {
            what: "commit the files".into(),
            url: self.client.api(&self.path("commit")),
            content: Content::Lines(lines.as_bytes()),
            accepts: &[],
            with_token: true,
            patience: SLOW,
        })?;
        let commit = self.parse_commit(&reply.json["commitOid"])?;
        self.verify(&commit, &changed)?;
        Ok(Pushed { commit, files: changed.len(), uploaded: *uploaded, ignored, removed: removed.map(String::from) })
    }

    fn parse_commit(&self, value: &Value) -> Result<String, Failure> {
        match value.as_str().filter(|commit| is_commit(commit)) {
            Some(commit) => Ok(commit.to_string()),
            None => Err(self.client.error("expected the name of a commit from the hub, found none").into()),
        }
    }

    /// Returns the hub's view of each file: whether it is large, ignored, and there already.
    fn modes(&self, files: &[LocalFile]) -> Result<Vec<Mode>, Failure> {
        let ignore = files.iter().find(|file| file.name() == GITIGNORE).map(LocalFile::bytes).transpose()?;
        let mut modes = Vec::with_capacity(files.len());
        for files in files.chunks(BATCH) {
            let described: Result<Vec<Value>> = files
                .iter()
                .map(|file| Ok(json!({"path": file.name(), "sample": base64(&file.sample()?), "size": file.size()})))
                .collect();
            let mut body = json!({"files": described?});
            if let Some(patterns) = &ignore {
                body["gitIgnore"] = String::from_utf8_lossy(patterns).into();
            }
            let reply = self.client.post("prepare the files", &self.path("preupload"), &body, &[])?;
            let described = reply.json["files"].as_array().into_iter().flatten();
            let described: BTreeMap<&str, &Value> =
                described.filter_map(|mode| Some((mode["path"].as_str()?, mode))).collect();
            for file in files {
                let mode = described.get(file.name()).and_then(|mode| parse_mode(mode, file.size()));
                let expected = || format!("expected from the hub how to upload {}, found nothing", file.name());
                modes.push(mode.ok_or_else(|| self.client.error(&expected()))?);
            }
        }
        Ok(modes)
    }

    /// Returns the file of weights on the hub that readers would prefer to those of `files`: one file and the index of several
    /// must not be there together.
    fn stale_weights(&self, files: &[LocalFile]) -> Result<Option<&'static str>, Failure> {
        let has = |name: &str| files.iter().any(|file| file.name() == name);
        let stale = match (has(SINGLE), has(INDEX)) {
            (true, false) => INDEX,
            (false, true) => SINGLE,
            _ => return Ok(None),
        };
        let hashes = self.hashes(&self.revision, &[stale])?;
        Ok(hashes.contains_key(stale).then_some(stale))
    }

    /// Returns the hashes of the files among `names` that the hub has at a revision.
    fn hashes(&self, revision: &str, names: &[&str]) -> Result<BTreeMap<String, String>, Failure> {
        let mut hashes = BTreeMap::new();
        let path = format!("models/{}/paths-info/{}", self.client.name, escaped(revision));
        for names in names.chunks(BATCH) {
            let body = json!({"paths": names, "expand": false});
            let reply = self.client.repeat(|| self.client.post("read the hashes of the files", &path, &body, &[]))?;
            for file in reply.json.as_array().into_iter().flatten() {
                // The plain `oid` of a large file is the hash of a text that points to it.
                let hash = file["lfs"]["oid"].as_str().or(file["oid"].as_str());
                if let (Some(name), Some(hash)) = (file["path"].as_str(), hash) {
                    hashes.insert(name.to_string(), hash.to_string());
                }
            }
        }
        Ok(hashes)
    }

    /// Checks that the commit has the files that were pushed.
    fn verify(&self, commit: &str, pushed: &[(&LocalFile, bool, String)]) -> Result<(), Failure> {
        let names: Vec<&str> = pushed.iter().map(|(file, ..)| file.name()).collect();
        let hashes = self.hashes(commit, &names)?;
        match pushed.iter().find(|(file, _, hash)| hashes.get(file.name()) != Some(hash)) {
            None => Ok(()),
            Some((file, _, hash)) => {
                let found = hashes.get(file.name()).map_or("no such file", String::as_str);
                let message = format!("commit {commit}: {}: expected the hash {hash}, found {found}", file.name());
                Err(self.client.error(&message).into())
            }
        }
    }
}

/// Reads the hub's view of a file of `size` bytes.
fn parse_mode(mode: &Value, size: u64) -> Option<Mode> {
    let is_large = match mode["uploadMode"].as_str()? {
        // The storage of large files takes no empty ones.
        "lfs" => size > 0,
        "regular" => false,
        _ => return None,
    };
    let is_ignored = mode["shouldIgnore"].as_bool().unwrap_or(false);
    Some(Mode { is_large, is_ignored, oid: mode["oid"].as_str().map(String::from) })
}

/// The commit as JSON lines: a header, then a line per file, small ones with their content; and a file to remove.
fn commit_lines(files: &[(&LocalFile, bool, String)], removed: Option<&str>, message: &str) -> Result<String> {
    let mut lines = json!({"key": "header", "value": {"summary": message, "description": ""}}).to_string() + "\n";
    let mut names = BTreeSet::new();
    for (file, is_large, hash) in files.iter().filter(|(file, ..)| names.insert(file.name())) {
        let line = if *is_large {
            let value = json!({"path": file.name(), "algo": "sha256", "oid": hash, "size": file.size()});
            json!({"key": "lfsFile", "value": value})
        } else {
            let value = json!({"content": base64(&file.bytes()?), "path": file.name(), "encoding": "base64"});
            json!({"key": "file", "value": value})
        };
        lines += &(line.to_string() + "\n");
    }
    if let Some(name) = removed {
        lines += &(json!({"key": "deletedFile", "value": {"path": name}}).to_string() + "\n");
    }
    Ok(lines)
}
