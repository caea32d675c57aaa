//! The hub's storage of large files: the batch interface of git's LFS extension with its transfers `basic`, one request a file,
//! and `multipart`, one request a part, as `huggingface_hub` uses it without Xet.

use super::Failure;
use super::download::Bar;
use super::local::LocalFile;
use super::requests::{Client, Content, Reply, Request, SLOW};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Files in one request for instructions, at most; the limit of the hub.
const BATCH: usize = 256;
/// Attempts per file, each with new instructions of the hub: the addresses to upload to expire.
const ATTEMPTS_PER_FILE: u32 = 4;
/// Statuses of a storage service for an address that has expired.
const EXPIRED: &[u16] = &[401, 403, 404, 410];

/// The hub's instructions for one file.
struct Action {
    /// Address of the whole file, or of the completion of its parts.
    url: String,
    /// Bytes and addresses of the parts, in their order; none for one request.
    parts: Option<(u64, Vec<String>)>,
    /// Address that checks the upload.
    verify: Option<String>,
}

/// Uploads the `files` that the hub does not have, and returns their bytes. `shows` a progress bar for each.
pub(super) fn upload(client: &Client, revision: &str, files: &[&LocalFile], shows: bool) -> Result<u64, Failure> {
    let mut sent = 0;
    let mut seen = BTreeSet::new();
    let mut distinct = Vec::new();
    for file in files {
        if seen.insert(file.sha256()?) {
            distinct.push(*file);
        }
    }
    for files in distinct.chunks(BATCH) {
        let mut actions = client.repeat(|| instructions(client, revision, files))?;
        for file in files {
            // Without an action the hub has the file.
            if let Some(action) = actions.remove(file.sha256()?) {
                upload_file(client, revision, file, (action, shows))?;
                sent += file.size();
            }
        }
    }
    Ok(sent)
}

/// Uploads one file; requests new instructions after a failure.
fn upload_file(
    client: &Client,
    revision: &str,
    file: &LocalFile,
    (action, shows): (Action, bool),
) -> Result<(), Failure> {
    let (mut action, mut failed) = (action, 0);
    loop {
        let bar = shows.then(|| Bar::new(file.name(), file.size()));
        let failure = match transfer(client, file, &action, bar.as_ref()) {
            Ok(()) => return Ok(()),
            Err(failure) => failure,
        };
        drop(bar);
        failed += 1;
        if failed == ATTEMPTS_PER_FILE {
            return Err(failure);
        }
        client.wait(failed, failure)?;
        match client.repeat(|| instructions(client, revision, &[file]))?.remove(file.sha256()?) {
            Some(next) => action = next,
            // The response to the last request was lost, and not the request.
            None => return Ok(()),
        }
    }
}

/// Requests the instructions for the files that the hub does not have, by SHA-256.
fn instructions(client: &Client, revision: &str, files: &[&LocalFile]) -> Result<BTreeMap<String, Action>, Failure> {
    let objects: Result<Vec<Value>, Failure> =
        files.iter().map(|file| Ok(json!({"oid": file.sha256()?, "size": file.size()}))).collect();
    let body = json!({
        "operation": "upload",
        "transfers": ["basic", "multipart"],
        "objects": objects?,
        "hash_algo": "sha256",
        "ref": {"name": revision},
    });
    let reply = client.send(&Request {
        what: "upload large files".into(),
        url: format!("{}/{}.git/info/lfs/objects/batch", client.hub.endpoint, client.name),
        content: Content::Lfs(&body),
        accepts: &[],
        with_token: true,
        patience: SLOW,
    })?;
    let expected = || client.error("expected instructions to upload large files from the hub, found another response");
    let objects = reply.json["objects"].as_array().ok_or_else(expected)?;
    let mut actions = BTreeMap::new();
    for file in files {
        let oid = file.sha256()?;
        let object = objects.iter().find(|object| object["oid"] == oid).ok_or_else(expected)?;
        if let Some(error) = object.get("error").filter(|error| !error.is_null()) {
            return Err(refused(client, file, error));
        }
        let present = object.get("actions").filter(|actions| !actions.is_null());
        if let Some(upload) = present.map(|actions| &actions["upload"]).filter(|upload| !upload.is_null()) {
            let verify = present.map(|actions| &actions["verify"]).filter(|verify| !verify.is_null());
            let action = Action {
                url: client.address(&upload["href"])?,
                parts: parts(client, file, &upload["header"])?,
                verify: verify.map(|verify| client.address(&verify["href"])).transpose()?,
            };
            actions.insert(oid.to_string(), action);
        }
    }
    Ok(actions)
}

/// The failure for a file that the storage refuses.
fn refused(client: &Client, file: &LocalFile, error: &Value) -> Failure {
    let (code, words) = (error["code"].as_u64().unwrap_or(0), error["message"].as_str().unwrap_or("no reason given"));
    let words: String = words.chars().take(300).collect();
    let message = format!("cannot upload {}: {words} (code {code})", file.name());
    match code {
        408 | 429 | 500..=506 => Failure::Transient(message, None),
        402 | 413 | 507 => client.error(&format!("{message}: it exceeds the storage limits of the hub")).into(),
        _ => client.error(&message).into(),
    }
}

/// The parts that the instructions divide a file into: `chunk_size`, and addresses under numbers from 1.
fn parts(client: &Client, file: &LocalFile, header: &Value) -> Result<Option<(u64, Vec<String>)>, Failure> {
    let Some(size) = header.get("chunk_size").filter(|size| !size.is_null()) else { return Ok(None) };
    let size = size.as_u64().or_else(|| size.as_str()?.parse().ok()).filter(|&size| size > 0);
    let numbered = header.as_object().into_iter().flatten();
    let numbered = numbered.filter_map(|(name, url)| Some((name.parse::<u64>().ok()?, url)));
    let urls: BTreeMap<u64, &Value> = numbered.collect();
    match size {
        Some(size) if urls.len() as u64 == file.size().div_ceil(size) => {
            let urls: Result<Vec<String>, Failure> = urls.values().map(|url| client.address(url)).collect();
            Ok(Some((size, urls?)))
        }
        _ => {
            let message =
                format!("expected an address for each part of {} from the hub, found {}", file.name(), urls.len());
            Err(client.error(&message).into())
        }
    }
}

/// Uploads a file by its instructions, and has the hub check it. A failure that may pass needs new instructions; all other requests
/// were repeated here.
fn transfer(client: &Client, file: &LocalFile, action: &Action, bar: Option<&Bar>) -> Result<(), Failure> {
    let what = format!("upload {}", file.name());
    let put = |url: &str, from: u64, len: u64| {
        let content = Content::File { file, from, len, bar };
        let (what, url) = (what.clone(), url.into());
        client.send(&Request { what, url, content, accepts: EXPIRED, with_token: false, patience: SLOW })
    };
    let in_time = |url: &str, reply: Reply| {
        if reply.status.is_success() { Ok(reply) } else { Err(client.transient(&what, url, &reply)) }
    };
    let repeated = |request: &Request<'_>| {
        client.repeat(|| client.send(request)).map(drop).map_err(|failure| client.give_up(failure))
    };
    match &action.parts {
        None => drop(in_time(&action.url, put(&action.url, 0, file.size())?)?),
        Some((size, urls)) => {
            let mut sent = Vec::with_capacity(urls.len());
            for (number, url) in (1u64..).zip(urls) {
                let from = (number - 1) * size;
                // A part that was cut off is sent again; earlier parts are not.
                let reply = client.repeat(|| put(url, from, (*size).min(file.size() - from)));
                let reply = in_time(url, reply.map_err(|failure| client.give_up(failure))?)?;
                let etag =
                    reply.headers.get("etag").and_then(|etag| etag.to_str().ok()).filter(|etag| !etag.is_empty());
                let Some(etag) = etag else {
                    return Err(Failure::Transient(format!("cannot {what}: part {number} has no ETag"), None));
                };
                sent.push(json!({"partNumber": number, "etag": etag}));
            }
            let body = json!({"oid": file.sha256()?, "parts": sent});
            // This address is signed and needs no token.
            let (url, content) = (action.url.clone(), Content::Lfs(&body));
            let what = what.clone();
            repeated(&Request { what, url, content, accepts: &[], with_token: false, patience: SLOW })?;
        }
    }
    if let Some(url) = &action.verify {
        let body = json!({"oid": file.sha256()?, "size": file.size()});
        let (url, content) = (url.clone(), Content::Json(&body));
        let what = format!("verify {}", file.name());
        repeated(&Request { what, url, content, accepts: &[], with_token: true, patience: SLOW })?;
    }
    Ok(())
}
