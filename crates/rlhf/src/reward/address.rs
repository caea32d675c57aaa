//! Addresses of reward services for messages and files: without the parts that may be secret.

use rlhf_hub::origin;

/// Written to files instead of the query of a service's URL, which may contain secrets.
pub(super) const LEFT_OUT: &str = "?...";

/// Returns a URL without user, password and query, for messages and files.
pub(super) fn address(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url.find(['?', '#']).unwrap_or(url.len());
    let host = origin(url).rfind('@').map_or(start, |at| at + 1);
    if host > start { &url[host..end] } else { &url[..end] }
}

/// Returns the address of a service as it is written to files, without the query, which may be secret.
pub(crate) fn without_query(url: &str) -> String {
    match address(url) {
        shown if shown == url => url.to_string(),
        shown => format!("{shown}{LEFT_OUT}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_password_and_query() {
        for (url, shown) in [
            ("http://localhost:5000/score", "http://localhost:5000/score"),
            ("https://user:secret@host/score?key=secret#x", "host/score"),
            ("http://host/score?key=secret", "http://host/score"),
        ] {
            assert_eq!(address(url), shown);
        }
    }
}
