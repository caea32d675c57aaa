//! The hub, its token and its variables; Python for rewards.

use super::finding::{Finding, variable};
use rlhf::hub::{Access, Hub};
use rlhf::process::{Ended, output};
use std::process::Command;
use std::time::Duration;

/// Time limit of the request to the hub, and of starting Python.
const LIMIT: Duration = Duration::from_secs(3);

/// Variables of other libraries that do not turn off rlhf's requests.
const OTHER_OFFLINE: [&str; 2] = ["TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"];

/// Checks that the hub can be reached, and accepts the token.
pub(super) fn hub(offline: bool) -> Finding {
    let hub = Hub::from_env();
    let source = if variable("HF_TOKEN").is_some() { "HF_TOKEN" } else { "the token file in HF_HOME" };
    let proxy =
        ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"].into_iter().find(|name| variable(name).is_some());
    let ignored = OTHER_OFFLINE.into_iter().find(|name| variable(name).is_some());
    let seen = Seen { source, proxy, ignored };
    let finding = if offline { skipped(&hub, &seen) } else { asked(&hub, &seen) };
    finding
        .with("endpoint", hub.endpoint.as_str())
        .with("offline", hub.offline)
        .with("requested", !offline && !hub.offline)
        .with("token", hub.token.is_some())
}

/// Variables of the environment.
struct Seen {
    /// Origin of the token, if there is one.
    source: &'static str,
    /// Variable that names a proxy.
    proxy: Option<&'static str>,
    /// Variable of another library that has no effect here.
    ignored: Option<&'static str>,
}

/// Returns the failure of a token that cannot be sent in a header.
fn malformed(hub: &Hub, seen: &Seen) -> Option<Finding> {
    let token = hub.token.as_ref()?;
    if token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return None;
    }
    let text = format!("{}: the token has a blank, a line break or another character that no token has", seen.source);
    let hint = format!("copy the token again, as one word (hf_...), into {}", seen.source);
    Some(Finding::failure("hub", text, hint))
}

fn skipped(hub: &Hub, seen: &Seen) -> Finding {
    let token = if hub.token.is_some() { "token present" } else { "no token" };
    malformed(hub, seen).unwrap_or_else(|| Finding::ok("hub", format!("{}: not requested; {token}", hub.endpoint)))
}

fn asked(hub: &Hub, seen: &Seen) -> Finding {
    if let Some(failure) = malformed(hub, seen) {
        return failure;
    }
    if hub.offline {
        return Finding::ok("hub", "HF_HUB_OFFLINE is set: models come from folders and the cache only");
    }
    let endpoint = &hub.endpoint;
    let source = seen.source;
    let access = match hub.access(LIMIT) {
        Ok(access) => access,
        Err(error) => return Finding::failure("hub", error.to_string(), "correct the variable, or unset it"),
    };
    match access {
        Access::Failed(reason) => {
            let hint = match seen.proxy {
                Some(proxy) => format!("check the network, and the proxy in {proxy}"),
                None => "check the network, HF_ENDPOINT, and whether a proxy is needed (HTTPS_PROXY)".into(),
            };
            let text = format!("{endpoint} cannot be reached: {reason}");
            let hint = format!("{hint}; folders and cached models work, without a request with HF_HUB_OFFLINE=1");
            Finding::warning("hub", text, hint)
        }
        Access::Refused => {
            let text = format!("{endpoint} refuses the token of {source}: downloads fail, also of public models");
            Finding::failure("hub", text, format!("put a valid token into {source}, or remove it"))
        }
        Access::NoHub(status) => {
            let text = format!("{endpoint} does not respond as the hub does (HTTP status {status})");
            Finding::warning("hub", text, "check HF_ENDPOINT; a network with a log-in page needs a log-in first")
        }
        reached => {
            let text = match reached {
                Access::Account(name) => format!("{endpoint} reached; the token of {source} is that of {name}"),
                Access::Unknown(_) => format!("{endpoint} reached; it does not verify the token of {source}"),
                _ => format!("{endpoint} reached; no token: public models only"),
            };
            match seen.ignored {
                Some(name) => {
                    let text = format!("{text}; {name} has no effect on rlhf");
                    Finding::warning("hub", text, "set HF_HUB_OFFLINE=1 to send no requests")
                }
                None => Finding::ok("hub", text),
            }
        }
    }
}

/// Python, which only rewards and trackers written in it need.
pub(super) fn python() -> Finding {
    let hint = "install Python 3, for rewards and trackers written in Python; rlhf itself does not need it";
    let script = "import sys; print('%d.%d.%d' % sys.version_info[:3], sys.executable)";
    match output(Command::new("python3").args(["-c", script]), LIMIT) {
        Ok(Ended { success: true, stdout, .. }) => {
            let line = stdout.trim();
            let (version, path) = line.split_once(' ').unwrap_or((line, "python3"));
            Finding::ok("python", format!("python3 {version} at {path}")).with("version", version).with("path", path)
        }
        Ok(Ended { stderr, .. }) => {
            let reason = stderr.trim().lines().last().unwrap_or("it failed without a message").to_string();
            Finding::warning("python", format!("python3 does not run: {reason}"), hint)
        }
        Err(reason) if reason.contains("No such file") => Finding::warning("python", "no python3 on PATH", hint),
        Err(reason) => Finding::warning("python", format!("python3 does not run: {reason}"), hint),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Status;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    const SEEN: Seen = Seen { source: "HF_TOKEN", proxy: None, ignored: None };

    fn hub_at(endpoint: String, token: Option<&str>) -> Hub {
        Hub { endpoint, token: token.map(String::from), offline: false, ..Hub::from_env() }
    }

    /// Starts a server that gives one response.
    fn server(response: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(response.as_bytes());
        });
        endpoint
    }

    #[test]
    fn each_response_of_the_hub_has_its_finding() {
        let refused = "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n";
        let account = "HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{\"name\": \"someone hf_secret1\"}";
        let page = "HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n<html>log in</";
        let broken = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n";
        let mirror = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
        for (response, token, status, words) in [
            (refused, None, Status::Ok, "public models only"),
            (refused, Some("hf_secret1"), Status::Failure, "refuses the token of HF_TOKEN"),
            (account, Some("hf_secret1"), Status::Ok, "is that of someone ..."),
            (page, None, Status::Warning, "does not respond as the hub does"),
            (broken, None, Status::Warning, "HTTP status 503"),
            (mirror, Some("hf_secret1"), Status::Ok, "does not verify the token"),
            ("", None, Status::Warning, "cannot be reached"),
        ] {
            let finding = asked(&hub_at(server(response), token), &SEEN);
            assert_eq!(finding.status, status, "{}", finding.text);
            assert!(finding.text.contains(words), "{}", finding.text);
            assert!(!format!("{finding:?}").contains("hf_secret1"));
        }
    }

    #[test]
    fn a_hub_that_is_silent_or_absent_takes_three_seconds_at_most() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let start = std::time::Instant::now();
        let finding = asked(&hub_at(format!("http://{}", silent.local_addr().unwrap()), None), &SEEN);
        assert!(start.elapsed() < LIMIT * 2, "{:?}", start.elapsed());
        assert_eq!(finding.status, Status::Warning);
        let port = silent.local_addr().unwrap().port();
        drop(silent);
        let finding = asked(&hub_at(format!("http://127.0.0.1:{port}"), None), &SEEN);
        assert!(finding.text.contains("cannot be reached") && finding.hint.unwrap().contains("HF_HUB_OFFLINE=1"));
        let finding = asked(&hub_at("huggingface.co".into(), None), &SEEN);
        assert_eq!(finding.status, Status::Failure);
    }

    #[test]
    fn a_token_with_a_line_break_is_never_sent_nor_shown() {
        for token in ["hf_a\nhf_b", "hf a", "hf_\u{e9}"] {
            let hub = hub_at("http://127.0.0.1:9".into(), Some(token));
            for finding in [asked(&hub, &SEEN), skipped(&hub, &SEEN)] {
                assert_eq!(finding.status, Status::Failure);
                assert!(!format!("{finding:?}").contains("hf_a"), "{finding:?}");
            }
        }
    }
}
