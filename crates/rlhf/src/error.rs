//! The one error type: each message names the thing, the place, what was expected and what was found.

use crate::safe_text::one_line;
use std::fmt;
use std::path::{Path, PathBuf};

/// What can go wrong, by who can mend it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The command line or the configuration file contradicts itself or asks for what is not there.
    Usage(String),
    /// Several settings are wrong: a line for each.
    Refused(Vec<String>),
    /// A file or folder could not be read or written.
    Io {
        /// What was tried, as a verb phrase: "read", "create the folder".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A file or folder is there, and what it holds is not what it should be.
    Invalid {
        /// The file or folder.
        path: PathBuf,
        /// What was expected and what was found.
        message: String,
    },
    /// One row of a data file is not what it should be.
    Row {
        /// The data file.
        path: PathBuf,
        /// Where in the file: "line 7", or "row 7" of a JSON array; counted from 1.
        place: String,
        /// What was expected and what was found.
        message: String,
    },
    /// A run cannot go on: a number is not finite, a reward is missing.
    Run(String),
    /// A run ended before its end because it was asked to.
    Stopped {
        /// How far it came, and what it left.
        message: String,
        /// The exit code of the program: 128 and the number of the signal that asked.
        code: u8,
    },
    /// libtorch refused an operation.
    Torch(#[from] tch::TchError),
}

/// The message, so that a program whose `main` returns an [`Error`] ends with one line for people.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// One line, or one for each setting that is refused, whatever is in it of files, programs and services; see
/// [`crate::safe_text::one_line`].
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Error::Refused(lines) => {
                let lines: Vec<_> = lines.iter().map(|line| one_line(line)).collect();
                return f.write_str(&lines.join("\n"));
            }
            Error::Usage(message) | Error::Run(message) | Error::Stopped { message, .. } => message.clone(),
            Error::Io { action, path, source } => format!("{}: cannot {action}: {source}", path.display()),
            Error::Invalid { path, message } => format!("{}: {message}", path.display()),
            Error::Row { path, place, message } => format!("{}: {place}: {message}", path.display()),
            // Below its message libtorch has a C++ backtrace.
            Error::Torch(error) => format!("libtorch: {}", error.to_string().lines().next().unwrap_or_default()),
        };
        f.write_str(&one_line(&text))
    }
}

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An [`Error::Io`] for `path`, for use in `map_err`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { action, path, source }
    }

    /// An [`Error::Invalid`] for `path`.
    pub fn invalid(path: impl AsRef<Path>, message: impl Into<String>) -> Error {
        Error::Invalid { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// What is wrong with the settings, each as a line of its own; empty for an error of another kind.
    pub fn refusals(&self) -> &[String] {
        match self {
            Error::Usage(line) => std::slice::from_ref(line),
            Error::Refused(lines) => lines,
            _ => &[],
        }
    }

    /// The exit code of the program: 2 for usage, 128 and a signal's number for a run that it ended, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) | Error::Refused(_) => 2,
            Error::Stopped { code, .. } => *code,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_safe_line_whatever_is_in_it() {
        let hostile = format!("\u{1b}[2J\nerror: no\u{9b}1m{}", "x".repeat(100_000));
        let place = "line 1".to_string();
        for error in [
            Error::Usage(hostile.clone()),
            Error::Run(hostile.clone()),
            Error::invalid(&hostile[..20], hostile.clone()),
            Error::Row { path: hostile[..20].into(), place, message: hostile.clone() },
            Error::io("read", &hostile[..20])(std::io::Error::other(hostile.clone())),
            Error::Stopped { message: hostile.clone(), code: 130 },
            Error::Torch(tch::TchError::Torch(hostile)),
        ] {
            let text = error.to_string();
            assert!(!text.contains(char::is_control) && text.len() < 4000, "{text}");
            assert!(text.contains("\\u{1b}[2J"), "{text}");
        }
        assert_eq!(Error::Refused(vec!["a = 1\nb".into(), "c".into()]).to_string(), "a = 1\\nb\nc");
    }
}
