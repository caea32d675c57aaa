//! Files to upload. A run's files are opened once, so that the upload stays the same even if the run replaces or removes them.

use ring::digest;
use rlhf_base::{Error, Result};
use std::cell::OnceCell;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of a file that the hub looks at to tell text from binary data.
const SAMPLE: u64 = 512;
/// Maximum depth of folders.
const DEEPEST: usize = 16;

/// A file to upload.
#[derive(Debug)]
pub struct LocalFile {
    /// Path in the repository, with slashes.
    name: String,
    /// Path on this machine.
    path: PathBuf,
    content: Content,
    size: u64,
    sha256: OnceCell<String>,
}

/// Where the bytes of a file are.
#[derive(Debug)]
enum Content {
    /// In a file that stays open.
    Open(File),
    /// In a file that is opened to be read.
    Closed,
    /// In memory.
    Bytes(Vec<u8>),
}

impl LocalFile {
    /// Opens the file `path`, to upload it as `name`. It stays open, and as it is now.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(name: impl Into<String>, path: impl Into<PathBuf>) -> Result<Self> {
        let (name, path) = (name.into(), path.into());
        let file = File::open(&path).map_err(Error::io("read", &path))?;
        let size = file.metadata().map_err(Error::io("read", &path))?.len();
        Ok(Self { name, path, content: Content::Open(file), size, sha256: OnceCell::new() })
    }

    /// Returns the file `path`, to upload as `name`. It is open only while it is read, and must stay as it is until then.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn find(name: impl Into<String>, path: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self { content: Content::Closed, ..Self::open(name, path)? })
    }

    /// Returns a file with this content, to upload as `name`.
    pub fn of(name: impl Into<String>, content: impl Into<Vec<u8>>) -> Self {
        let (name, content) = (name.into(), content.into());
        let (path, size) = (PathBuf::from(&name), content.len() as u64);
        Self { name, path, content: Content::Bytes(content), size, sha256: OnceCell::new() }
    }

    /// Path in the repository, with slashes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The first bytes, 512 at most.
    pub(super) fn sample(&self) -> Result<Vec<u8>> {
        self.bytes_in(0, self.size.min(SAMPLE))
    }

    /// The whole content.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        self.bytes_in(0, self.size)
    }

    fn bytes_in(&self, from: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.reader(from, len).read_to_end(&mut bytes).map_err(Error::io("read", &self.path))?;
        Ok(bytes)
    }

    /// Reads `len` bytes after the first `from` ones.
    pub(super) fn reader(&self, from: u64, len: u64) -> Slice<'_> {
        Slice { file: self, opened: None, at: from, end: from + len }
    }

    /// Opens the file again, which must have its size.
    fn reopened(&self) -> io::Result<File> {
        let file = File::open(&self.path)?;
        if file.metadata()?.len() == self.size {
            Ok(file)
        } else {
            Err(io::Error::other("the file has changed since the upload started"))
        }
    }

    /// SHA-256 in hexadecimal digits: the file's name in the hub's storage of large files.
    pub(super) fn sha256(&self) -> Result<&str> {
        if let Some(known) = self.sha256.get() {
            return Ok(known);
        }
        let context = digest::Context::new(&digest::SHA256);
        let hash = self.hash(context)?;
        Ok(self.sha256.get_or_init(|| hash))
    }

    /// The file's name in git: SHA-1 of a header and the content.
    pub(super) fn git_hash(&self) -> Result<String> {
        let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
        context.update(format!("blob {}\0", self.size).as_bytes());
        self.hash(context)
    }

    fn hash(&self, mut context: digest::Context) -> Result<String> {
        let mut reader = self.reader(0, self.size);
        let mut buffer = vec![0; 1 << 18];
        loop {
            match reader.read(&mut buffer).map_err(Error::io("read", &self.path))? {
                0 => break,
                n => context.update(&buffer[..n]),
            }
        }
        Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// A range of a file.
pub(super) struct Slice<'a> {
    file: &'a LocalFile,
    /// The file, if it was opened for this range.
    opened: Option<File>,
    at: u64,
    end: u64,
}

impl Read for Slice<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = (self.end - self.at).min(buffer.len() as u64) as usize;
        if left == 0 {
            return Ok(0);
        }
        let file = match &self.file.content {
            Content::Open(file) => file,
            Content::Bytes(bytes) => {
                let at = self.at as usize;
                buffer[..left].copy_from_slice(&bytes[at..at + left]);
                self.at += left as u64;
                return Ok(left);
            }
            Content::Closed if self.opened.is_none() => self.opened.insert(self.file.reopened()?),
            Content::Closed => self.opened.as_ref().ok_or(ErrorKind::NotFound)?,
        };
        let read = file.read_at(&mut buffer[..left], self.at)?;
        if read == 0 {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the file is shorter than it was"));
        }
        self.at += read as u64;
        Ok(read)
    }
}

/// Opens the files of the folder `dir` whose relative paths are `wanted`, in the order of their names. The path of a folder ends with a
/// slash; folders that are not `wanted` are not read.
///
/// # Errors
/// If a file or folder cannot be read, or its name is not UTF-8; if a link leads to a folder, or to a file outside of `dir`.
pub fn open_folder(dir: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<Vec<LocalFile>> {
    collect(dir, wanted, LocalFile::open)
}

/// Finds the files of a folder as [`open_folder`] does; each is open only while it is read.
///
/// # Errors
/// As [`open_folder`].
pub fn find_folder(dir: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<Vec<LocalFile>> {
    collect(dir, wanted, LocalFile::find)
}

fn collect(
    dir: &Path,
    wanted: &dyn Fn(&str) -> bool,
    take: impl Fn(String, PathBuf) -> Result<LocalFile>,
) -> Result<Vec<LocalFile>> {
    let root = dir.canonicalize().map_err(Error::io("read the folder", dir))?;
    let mut files = Vec::new();
    let mut open = vec![(dir.to_path_buf(), String::new())];
    while let Some((folder, prefix)) = open.pop() {
        for entry in fs::read_dir(&folder).map_err(Error::io("read the folder", &folder))? {
            let path = entry.map_err(Error::io("read the folder", &folder))?.path();
            let kind = path.symlink_metadata().map_err(Error::io("read", &path))?.file_type();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let name = format!("{prefix}{name}");
            if !wanted(&if kind.is_dir() { format!("{name}/") } else { name.clone() }) {
                continue;
            }
            if path.file_name().is_some_and(|name| name.to_str().is_none()) {
                return Err(Error::invalid(&path, "expected a name in UTF-8, which the hub needs"));
            }
            if kind.is_symlink() {
                check_link(&path, &root)?;
            }
            if kind.is_dir() {
                if prefix.matches('/').count() >= DEEPEST {
                    return Err(Error::invalid(&path, format!("expected folders at most {DEEPEST} deep")));
                }
                open.push((path, format!("{name}/")));
            } else if path.is_file() {
                files.push(take(name, path)?);
            }
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Checks that a link leads to a file in the folder `root`.
fn check_link(path: &Path, root: &Path) -> Result<()> {
    let target = path.canonicalize().map_err(Error::io("read", path))?;
    if target.starts_with(root) && target.is_file() {
        return Ok(());
    }
    let message = format!(
        "expected a file, found a link to {}: only files of the folder itself are uploaded; put a copy in place of the link",
        target.display()
    );
    Err(Error::invalid(path, message))
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Base64 of RFC 4648, with padding.
pub(super) fn base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = [chunk[0], *chunk.get(1).unwrap_or(&0), *chunk.get(2).unwrap_or(&0)];
        let bits = u32::from_be_bytes([0, group[0], group[1], group[2]]);
        for place in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        // RFC 4648, section 10.
        let cases =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")];
        for (bytes, text) in cases {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }

    #[test]
    fn hashes_are_those_of_git_and_of_its_large_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "what is up, doc?").unwrap();
        let file = LocalFile::open("a", &path).unwrap();
        // `git hash-object`, from the book Pro Git; `sha256sum`.
        assert_eq!(file.git_hash().unwrap(), "bd9dbf5aae1a3862dd1526723246b20206e5fc37");
        assert_eq!(file.sha256().unwrap(), "af4e812d13b4eae6da91024f15f7679dae49d40aee3fb4c7216b56d04193f46c");
    }

    #[test]
    fn a_file_stays_as_it_was_when_it_is_replaced_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "before").unwrap();
        let file = LocalFile::open("a", &path).unwrap();
        std::fs::write(dir.path().join("b"), "after").unwrap();
        std::fs::rename(dir.path().join("b"), &path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(file.bytes().unwrap(), b"before");
    }

    #[test]
    fn a_file_is_open_only_while_it_is_read_and_must_not_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "before").unwrap();
        let files = find_folder(dir.path(), &|_| true).unwrap();
        let opened = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        assert!(opened.filter_map(|link| std::fs::read_link(link.path()).ok()).all(|open| open != path));
        assert_eq!(files[0].bytes().unwrap(), b"before");
        let (same, bytes) = (LocalFile::of("a", "before"), |file: &LocalFile| file.bytes_in(2, 3).unwrap());
        assert_eq!((bytes(&same), same.sha256().unwrap()), (bytes(&files[0]), files[0].sha256().unwrap()));
        std::fs::write(&path, "another").unwrap();
        let error = files[0].bytes().unwrap_err().to_string();
        assert!(error.contains("the file has changed since the upload started"), "{error}");
    }

    #[test]
    fn only_wanted_files_of_the_folder_itself_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("model");
        for name in ["b", "a", "sub/c", ".git/config", "old/d"] {
            std::fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            std::fs::write(root.join(name), name).unwrap();
        }
        std::os::unix::fs::symlink("a", root.join("link")).unwrap();
        let wanted = |name: &str| name != ".git/" && name != "old/";
        let names = |files: Vec<LocalFile>| files.into_iter().map(|file| file.name).collect::<Vec<_>>();
        assert_eq!(names(open_folder(&root, &wanted).unwrap()), ["a", "b", "link", "sub/c"]);
        std::fs::write(dir.path().join("secret"), "s").unwrap();
        for target in ["../secret", "/etc", "sub"] {
            let link = root.join("leak");
            std::os::unix::fs::symlink(target, &link).unwrap();
            let error = open_folder(&root, &wanted).unwrap_err().to_string();
            assert!(error.contains("leak") && error.contains("found a link to"), "{error}");
            std::fs::remove_file(link).unwrap();
        }
    }
}
