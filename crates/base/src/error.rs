//! The error type. Each message names the thing, the place, what was expected and what was found.

use crate::refusal::Refusal;
use crate::safe_text::one_line;
use std::fmt;
use std::path::{Path, PathBuf};

/// Errors, by cause.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The command line or the configuration file is contradictory or requests something that does not exist.
    Usage(String),
    /// Settings are refused: one line for each.
    Refused(Vec<Refusal>),
    /// A file or folder could not be read or written.
    Io {
        /// The attempted action, as a verb phrase: "read", "create the folder".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The content of a file or folder is invalid.
    Invalid {
        /// The file or folder.
        path: PathBuf,
        /// Expected and found content.
        message: String,
    },
    /// A row of a data file is invalid.
    Row {
        /// The data file.
        path: PathBuf,
        /// Place in the file: "line 7", or "row 7" of a JSON array; counted from 1.
        place: String,
        /// Expected and found content.
        message: String,
    },
    /// A run cannot continue: a number is not finite, rows do not match.
    Run(String),
    /// A reward failed, or returned scores that are not valid.
    Reward {
        /// Name of the reward.
        name: String,
        /// The error of the reward.
        source: Box<Error>,
    },
    /// A run has ended and its model is saved, but it could not be pushed to the hub: the reason, and the command that pushes it.
    NotPushed(String),
    /// A run was stopped by a signal, or by an alarm.
    Stopped {
        /// The progress of the run, and what it saved.
        message: String,
        /// The exit code of the program: 128 plus the number of the signal, or 3 for an alarm.
        code: u8,
    },
    /// libtorch failed in an operation.
    Torch(#[from] tch::TchError),
}

/// Prints the message, so that a program whose `main` returns an [`Error`] ends with one readable line.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// One line, or one for each invalid setting, for any text of files, programs and services in it; see
/// [`crate::safe_text::one_line`].
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Error::Refused(refusals) => {
                let lines: Vec<_> =
                    refusals.iter().map(|refusal| one_line(&refusal.to_string()).into_owned()).collect();
                return f.write_str(&lines.join("\n"));
            }
            Error::Usage(message)
            | Error::Run(message)
            | Error::NotPushed(message)
            | Error::Stopped { message, .. } => message.clone(),
            Error::Reward { name, source } => format!("reward `{name}`: {source}"),
            Error::Io { action, path, source } => format!("{}: cannot {action}: {source}", path.display()),
            Error::Invalid { path, message } => format!("{}: {message}", path.display()),
            Error::Row { path, place, message } => format!("{}: {place}: {message}", path.display()),
            // The lines after the message are a C++ backtrace.
            Error::Torch(error) => {
                let message = error.to_string();
                let first = || format!("libtorch: {}", message.lines().next().unwrap_or_default());
                Error::out_of_memory(&message).map_or_else(first, |error| error.to_string())
            }
        };
        f.write_str(&one_line(&text))
    }
}

/// The exit code of wrong settings.
const USAGE: u8 = 2;

/// The exit code of a run that an alarm stopped.
pub const STOPPED_BY_ALARM: u8 = 3;

/// The exit code of a run whose model could not be pushed to the hub.
const NOT_PUSHED: u8 = 4;

/// The result of fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns a function that makes an [`Error::Io`] for `path`, for use in `map_err`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { action, path, source }
    }

    /// Creates an [`Error::Invalid`] for `path`.
    pub fn invalid(path: impl AsRef<Path>, message: impl Into<String>) -> Error {
        Error::Invalid { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// The error of a failed allocation, if `message` is libtorch's message of one.
    pub fn out_of_memory(message: &str) -> Option<Error> {
        // Messages of the allocators of CPU and GPU, and of kernels.
        let words = ["can't allocate memory", "not enough memory", "CUDA out of memory", "std::bad_alloc"];
        if !words.iter().any(|words| message.contains(words)) {
            return None;
        }
        let size = message.split_once("ried to allocate ").and_then(|(_, size)| {
            let mut words = size.split_whitespace().map(|word| word.trim_end_matches(['.', ',']));
            let (number, unit) = (words.next()?, words.next()?);
            match number.parse::<f64>() {
                Ok(bytes) if unit == "bytes" => Some(format!("{:.1} GB more", bytes / 1e9)),
                _ => Some(format!("{number} {unit} more")),
            }
        });
        Some(Error::Run(format!(
            "out of memory: cannot allocate {}; shorter rows (max_length, max_prompt_length) or fewer of them at a time (the batch sizes) take \
             less",
            size.as_deref().unwrap_or("more")
        )))
    }

    /// Refuses the setting `name`; `rest` follows the name in the message, as in [`Refusal::new`].
    pub fn refused(name: impl Into<String>, rest: impl fmt::Display) -> Error {
        Error::Refused(vec![Refusal::new(name, rest)])
    }

    /// The errors in the settings; empty for other kinds of error.
    pub fn refusals(&self) -> Vec<Refusal> {
        match self {
            Error::Usage(message) => vec![Refusal::general(message)],
            Error::Refused(refusals) => refusals.clone(),
            _ => Vec::new(),
        }
    }

    /// The message without the file or folder at its start.
    pub fn without_path(&self) -> String {
        match self {
            Error::Io { action, source, .. } => format!("cannot {action}: {source}"),
            Error::Invalid { message, .. } => message.clone(),
            Error::Row { place, message, .. } => format!("{place}: {message}"),
            other => other.to_string(),
        }
    }

    /// Whether the command line or the settings are wrong.
    pub fn is_usage(&self) -> bool {
        matches!(self, Error::Usage(_) | Error::Refused(_))
    }

    /// Returns errors in the settings with other words.
    ///
    /// # Errors
    /// The same error, if it is of another kind.
    pub fn map_usage(self, words: impl Fn(String) -> String) -> Result<Error> {
        match self {
            Error::Usage(message) => Ok(Error::Usage(words(message))),
            Error::Refused(refusals) => {
                Ok(Error::Refused(refusals.into_iter().map(|refusal| refusal.map_message(&words)).collect()))
            }
            other => Err(other),
        }
    }

    /// Returns whether a program that ended with this exit code must not be started again: its settings are wrong, an alarm stopped its
    /// run, or its run is finished and could not be pushed.
    pub fn is_final(exit_code: u8) -> bool {
        [USAGE, STOPPED_BY_ALARM, NOT_PUSHED].contains(&exit_code)
    }

    /// The exit code of the program: 2 for usage, 128 plus the signal's number for a run stopped by a signal, 3 for one stopped by an
    /// alarm, 4 for one whose model could not be pushed to the hub, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            error if error.is_usage() => USAGE,
            Error::Stopped { code, .. } => *code,
            Error::NotPushed(_) => NOT_PUSHED,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_that_fails_is_an_error_with_its_size_and_the_settings_that_take_less() {
        let text = |message: &str| Error::out_of_memory(message).map(|error| error.to_string()).unwrap_or_default();
        let cpu = "called `Result::unwrap()` on an `Err` value: Torch(\"[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: \
                   can't allocate memory: you tried to allocate 3200000000 bytes. Error code 12 (Cannot allocate memory)";
        let hint =
            "shorter rows (max_length, max_prompt_length) or fewer of them at a time (the batch sizes) take less";
        assert_eq!(text(cpu), format!("out of memory: cannot allocate 3.2 GB more; {hint}"));
        let gpu = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB";
        assert_eq!(text(gpu), format!("out of memory: cannot allocate 2.00 GiB more; {hint}"));
        assert_eq!(text("std::bad_alloc"), format!("out of memory: cannot allocate more; {hint}"));
        assert_eq!(Error::Torch(tch::TchError::Torch(gpu.into())).to_string(), text(gpu));
        assert_eq!(text("size mismatch, tried to allocate 3 bytes"), "");
    }

    #[test]
    fn an_error_is_one_safe_line_for_any_text_in_it() {
        let hostile = format!("\u{1b}[2J\nerror: no\u{9b}1m{}", "x".repeat(100_000));
        let place = "line 1".to_string();
        for error in [
            Error::Usage(hostile.clone()),
            Error::Run(hostile.clone()),
            Error::Reward { name: hostile.clone(), source: Box::new(Error::Run(hostile.clone())) },
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
        let two = vec![Refusal::new("a", " = 1\nb"), Refusal::general("c")];
        assert_eq!(Error::Refused(two).to_string(), "a = 1\\nb\nc");
    }
}
