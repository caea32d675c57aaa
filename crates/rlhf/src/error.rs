//! The one error type: each message names the thing, the place, what was expected and what was found.

use std::path::{Path, PathBuf};

/// What can go wrong, by who can mend it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The command line or the configuration file contradicts itself or asks for what is not there.
    #[error("{0}")]
    Usage(String),
    /// A file or folder could not be read or written.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// What was tried, as a verb phrase: "read", "create the folder".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A file or folder is there, and what it holds is not what it should be.
    #[error("{path}: {message}", path = path.display())]
    Invalid {
        /// The file or folder.
        path: PathBuf,
        /// What was expected and what was found.
        message: String,
    },
    /// One row of a data file is not what it should be.
    #[error("{path}: {place}: {message}", path = path.display())]
    Row {
        /// The data file.
        path: PathBuf,
        /// Where in the file: "line 7", or "row 7" of a JSON array; counted from 1.
        place: String,
        /// What was expected and what was found.
        message: String,
    },
    /// A run cannot go on: a number is not finite, a reward is missing.
    #[error("{0}")]
    Run(String),
    /// A run ended before its end because it was asked to.
    #[error("{message}")]
    Stopped {
        /// How far it came, and what it left.
        message: String,
        /// The exit code of the program: 128 and the number of the signal that asked.
        code: u8,
    },
    /// libtorch refused an operation.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// The message, so that a program whose `main` returns an [`Error`] ends with one line for people.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
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

    /// The exit code of the program: 2 for usage, 128 and a signal's number for a run that it ended, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Stopped { code, .. } => *code,
            _ => 1,
        }
    }
}
