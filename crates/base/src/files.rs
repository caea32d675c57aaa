//! Opens untrusted files: regular files only, and texts and tables of bounded size.

mod parquet;

pub use parquet::parquet_rows;

use crate::{Error, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{self, File, FileType, OpenOptions};
use std::io::{BufRead, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum size of a text of a model or a run that is read at once (configurations, tokenizers, indices), in bytes.
const LARGEST: u64 = 1 << 30;

/// Maximum size of a file of settings, in bytes.
const LARGEST_SETTINGS: u64 = 16 << 20;

/// Returns `path` with the folder that `home` returns in place of a leading `~`, as in a shell and in Python's `expanduser`. Another user's
/// folder, `~name`, is left as it is.
pub fn with_home(path: PathBuf, home: impl FnOnce() -> Option<PathBuf>) -> PathBuf {
    let Ok(rest) = path.strip_prefix("~") else { return path };
    match home() {
        Some(home) if rest.as_os_str().is_empty() => home,
        Some(home) => home.join(rest),
        None => path,
    }
}

/// Creates the first of the files `path(0)`, `path(1)`, ... that does not exist. Returns it, open for writing, with its path.
///
/// # Errors
/// If it cannot be created.
pub fn create_numbered(path: impl Fn(usize) -> PathBuf) -> Result<(File, PathBuf)> {
    for number in 0.. {
        let path = path(number);
        match File::create_new(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::io("create", path)(error)),
        }
    }
    unreachable!("the numbers have no end")
}

/// Opens a regular file for reading. Opening or reading a named pipe or a device might never end.
///
/// # Errors
/// If it does not exist, cannot be opened, or is not a regular file or a link to one.
pub fn open(path: &Path) -> Result<File> {
    let kind = fs::metadata(path).map_err(Error::io("read", path))?.file_type();
    if !kind.is_file() {
        return Err(Error::invalid(path, format!("expected a regular file, found {}", kind_name(kind))));
    }
    File::open(path).map_err(Error::io("read", path))
}

/// Opens a regular file that a run wrote to its folder. A link could name any file of the machine, whose content would be shown.
///
/// # Errors
/// As [`open`]; if it is a link.
pub fn open_own(path: &Path) -> Result<File> {
    // `NONBLOCK`: opening a named pipe does not wait for its other end.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            return Err(Error::invalid(path, "expected a regular file, found a link"));
        }
        // The error for a socket.
        Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {
            return Err(Error::invalid(path, "expected a regular file, found a socket"));
        }
        file => file.map_err(Error::io("read", path))?,
    };
    let kind = file.metadata().map_err(Error::io("read", path))?.file_type();
    if !kind.is_file() {
        return Err(Error::invalid(path, format!("expected a regular file, found {}", kind_name(kind))));
    }
    Ok(file)
}

/// Reads a text of at most 16 MiB that a run wrote to its folder.
///
/// # Errors
/// As [`open_own`]; if it is too large, or not UTF-8.
pub fn read_own_text(path: &Path) -> Result<String> {
    utf8(path, read_at_most(path, open_own(path)?, LARGEST_SETTINGS)?)
}

/// Reads the next line of at most `most` bytes into `line`, with its line end. Returns `None` at the end of the input, and false for a
/// longer line: `line` then has its beginning, and the rest is skipped.
///
/// # Errors
/// If it cannot be read.
pub fn read_line(from: &mut impl BufRead, line: &mut Vec<u8>, most: u64) -> std::io::Result<Option<bool>> {
    line.clear();
    if from.by_ref().take(most).read_until(b'\n', line)? == 0 {
        return Ok(None);
    }
    if line.ends_with(b"\n") || (line.len() as u64) < most {
        return Ok(Some(true));
    }
    from.skip_until(b'\n')?;
    Ok(Some(false))
}

/// Reads the bytes of a regular file.
///
/// # Errors
/// As [`open`]; if it is too large.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    read_at_most(path, open(path)?, LARGEST)
}

/// Reads the text of a regular file.
///
/// # Errors
/// As [`read`]; if it is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    utf8(path, read(path)?)
}

/// Reads a file of settings, which may also be a pipe: a shell's `<(...)`.
///
/// # Errors
/// If it cannot be read, is too large, or is not UTF-8.
pub fn read_settings(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    utf8(path, read_at_most(path, file, LARGEST_SETTINGS)?)
}

fn read_at_most(path: &Path, file: File, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if bytes.len() as u64 > most {
        return Err(Error::invalid(path, format!("expected at most {most} bytes, found more")));
    }
    Ok(bytes)
}

fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|_| Error::invalid(path, "expected UTF-8, found bytes of another encoding"))
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "something else",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_first_tilde_is_the_home_folder() {
        let path = |text: &str| with_home(text.into(), || Some("/home/me".into()));
        for (text, expected) in [
            ("~", "/home/me"),
            ("~/", "/home/me"),
            ("~/a/b", "/home/me/a/b"),
            ("~you/a", "~you/a"),
            ("a/~", "a/~"),
            ("./~", "./~"),
            ("", ""),
        ] {
            assert_eq!(path(text).as_os_str(), expected, "{text}");
        }
        assert_eq!(with_home("~/a".into(), || None), Path::new("~/a"));
    }

    #[test]
    fn a_file_of_a_run_is_no_link_and_no_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
        let _listener = UnixListener::bind(path("socket")).unwrap();
        fs::write(path("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        fs::create_dir(path("folder")).unwrap();
        assert_eq!(read_own_text(&path("file")).unwrap(), "text");
        for (name, found) in [("pipe", "named pipe"), ("socket", "socket"), ("link", "link"), ("folder", "folder")] {
            let error = read_own_text(&path(name)).unwrap_err().to_string();
            assert!(error.ends_with(&format!("{name}: expected a regular file, found a {found}")), "{error}");
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over() {
        let text = format!("ab\n{}\ncdef\nend", "x".repeat(100));
        let mut from = std::io::BufReader::with_capacity(3, text.as_bytes());
        let mut line = Vec::new();
        let mut lines = Vec::new();
        while let Some(is_whole) = read_line(&mut from, &mut line, 5).unwrap() {
            lines.push((is_whole, String::from_utf8(line.clone()).unwrap()));
        }
        let expected = [(true, "ab\n"), (false, "xxxxx"), (true, "cdef\n"), (true, "end")];
        assert_eq!(lines, expected.map(|(is_whole, line)| (is_whole, line.to_string())));
    }

    #[test]
    fn a_path_that_is_no_regular_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
        let _listener = UnixListener::bind(path("socket")).unwrap();
        fs::create_dir(path("folder")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("device")).unwrap();
        for (name, found) in [("pipe", "named pipe"), ("socket", "socket"), ("folder", "folder"), ("device", "device")]
        {
            let error = read_text(&path(name)).unwrap_err().to_string();
            assert!(error.ends_with(&format!("{name}: expected a regular file, found a {found}")), "{error}");
        }
        let error = read_settings(&path("device")).unwrap_err().to_string();
        assert!(error.ends_with("device: expected at most 16777216 bytes, found more"), "{error}");
        fs::write(path("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        assert_eq!(read_text(&path("link")).unwrap(), "text");
    }
}
