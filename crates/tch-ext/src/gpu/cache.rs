//! Binaries of kernels in a folder, by source, architecture, compiler and its options.
//!
//! A GPU runs what is in the binaries with the rights of the program: the folder and its files must be the user's own, and no one else may
//! write to them.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The beginning of an entry.
const MAGIC: &[u8] = b"rlhf kernels 1\n";

/// Largest entry that is read.
const MOST_BYTES: u64 = 64 << 20;

/// Source and compiler of a binary.
#[derive(Debug)]
pub(super) struct Key {
    name: String,
    hash: u128,
}

impl Key {
    /// The key of the source `name` with this text, compiled by `compiler`: the compiler's version and its options.
    pub(super) fn new(name: &str, source: &str, compiler: &str) -> Self {
        let hash = hash(&[compiler.as_bytes(), &[0], source.as_bytes()]);
        Self { name: name.into(), hash }
    }

    fn file(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}-{:032x}.cubin", self.name, self.hash))
    }
}

/// FNV-1a of the parts, one after another: it finds changes and damage, and is no protection from an attacker, who could as well replace the
/// program.
fn hash(parts: &[&[u8]]) -> u128 {
    let bytes = parts.iter().copied().flatten();
    bytes.fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, &byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
    })
}

/// Hands the binary of `key` to `load`: that in `folder`, or a new one by `compile`, which is then stored there. A stored one that is damaged
/// or that `load` refuses is replaced. A folder that cannot be read or written, or that others may write to, is as none.
///
/// # Errors
/// The errors of `compile`, and those of `load` for a binary that was just compiled.
pub(super) fn cached(
    folder: Option<&Path>,
    key: &Key,
    compile: impl FnOnce() -> Result<Vec<u8>, String>,
    load: impl Fn(&[u8]) -> Result<(), String>,
) -> Result<(), String> {
    if let Some(binary) =
        folder.filter(|folder| is_private_folder(folder)).and_then(|folder| read(&key.file(folder), key))
        && load(&binary).is_ok()
    {
        return Ok(());
    }
    let binary = compile()?;
    load(&binary)?;
    if let Some(folder) = folder {
        let _ = write(folder, key, &binary);
    }
    Ok(())
}

/// Whether only this user may write to a file or folder.
fn is_private(metadata: &Metadata) -> bool {
    let process = std::fs::metadata("/proc/self");
    process.is_ok_and(|process| process.uid() == metadata.uid()) && metadata.mode() & 0o022 == 0
}

/// Whether `folder` is there, and no link, and only this user may write to it.
fn is_private_folder(folder: &Path) -> bool {
    std::fs::symlink_metadata(folder).is_ok_and(|metadata| metadata.is_dir() && is_private(&metadata))
}

/// The binary in `file`, if it is whole, belongs to `key`, and only this user may write to it.
fn read(file: &Path, key: &Key) -> Option<Vec<u8>> {
    let file = File::open(file).ok()?;
    // Metadata of the open file: another file may get the name meanwhile.
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || !is_private(&metadata) || metadata.len() > MOST_BYTES {
        return None;
    }
    let mut entry = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut entry).ok()?;
    let (head, binary) = entry.strip_prefix(MAGIC)?.split_at_checked(32)?;
    let is_whole = head == [key.hash.to_le_bytes(), hash(&[binary]).to_le_bytes()].concat();
    (is_whole && !binary.is_empty()).then(|| binary.to_vec())
}

/// Stores a binary, whole or not at all: another process may write the same entry, or read it. Refuses a folder that others may write to.
fn write(folder: &Path, key: &Key, binary: &[u8]) -> std::io::Result<()> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if !is_private_folder(folder) {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let partial = folder.join(format!(".{}-{}-{number}", key.name, std::process::id()));
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial);
    let written = created.and_then(|mut file| {
        file.write_all(MAGIC)?;
        file.write_all(&key.hash.to_le_bytes())?;
        file.write_all(&hash(&[binary]).to_le_bytes())?;
        file.write_all(binary)?;
        std::fs::rename(&partial, key.file(folder))
    });
    written.inspect_err(|_| {
        let _ = std::fs::remove_file(&partial);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    /// A folder that is removed in the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("tch-ext-kernels-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&folder);
            Self(folder)
        }

        fn files(&self) -> Vec<PathBuf> {
            std::fs::read_dir(&self.0)
                .map_or_else(|_| Vec::new(), |all| all.flatten().map(|entry| entry.path()).collect())
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// The binary that is loaded, and whether it was compiled.
    fn used(folder: Option<&Path>, key: &Key, refuses: &[u8]) -> (Vec<u8>, bool) {
        let (compiled, loaded) = (RefCell::new(false), RefCell::new(Vec::new()));
        let compile = || {
            *compiled.borrow_mut() = true;
            Ok(b"a new binary".to_vec())
        };
        let load = |binary: &[u8]| {
            *loaded.borrow_mut() = binary.to_vec();
            if binary == refuses { Err("refused".into()) } else { Ok(()) }
        };
        cached(folder, key, compile, load).unwrap();
        (loaded.into_inner(), compiled.into_inner())
    }

    #[test]
    fn a_binary_is_compiled_once_for_each_source_and_compiler() {
        let folder = Folder::new("once");
        let place = Some(folder.0.as_path());
        let key = Key::new("logits", "source", "sm_90, NVRTC 13000");
        assert!(used(place, &key, b"").1);
        assert_eq!(used(place, &key, b""), (b"a new binary".to_vec(), false));
        for other in [
            Key::new("logits", "source ", "sm_90, NVRTC 13000"),
            Key::new("logits", "source", "sm_80, NVRTC 13000"),
            Key::new("logits", "source", "sm_90, NVRTC 13001"),
            Key::new("logits", "source", "sm_90, NVRTC 13000 --use_fast_math"),
        ] {
            assert!(used(place, &other, b"").1);
        }
        assert_eq!(folder.files().len(), 5);
        let error = cached(None, &key, || Err("no compiler".into()), |_| Ok(()));
        assert_eq!(error, Err("no compiler".into()));
    }

    #[test]
    fn a_damaged_entry_and_one_that_cannot_be_loaded_are_replaced() {
        let folder = Folder::new("damaged");
        let place = Some(folder.0.as_path());
        let key = Key::new("norm", "source", "sm_90");
        used(place, &key, b"");
        let file = folder.files().remove(0);
        let whole = std::fs::read(&file).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        let mut other_key = whole.clone();
        other_key[MAGIC.len()] ^= 1;
        for damaged in [&whole[..whole.len() - 3], &whole[..20], b"", &flipped, &other_key] {
            std::fs::write(&file, damaged).unwrap();
            assert_eq!(used(place, &key, b""), (b"a new binary".to_vec(), true));
            assert_eq!(std::fs::read(&file).unwrap(), whole);
        }
        // A binary that the driver no longer takes.
        write(&folder.0, &key, b"an old binary").unwrap();
        assert_eq!(used(place, &key, b"an old binary"), (b"a new binary".to_vec(), true));
        assert!(!used(place, &key, b"").1);
    }

    #[test]
    fn a_folder_that_cannot_be_written_or_is_a_file_is_as_none() {
        let folder = Folder::new("unwritable");
        let key = Key::new("adam", "source", "sm_90");
        assert!(used(None, &key, b"").1);
        std::fs::write(&folder.0, "").unwrap();
        assert!(used(Some(&folder.0), &key, b"").1);
        assert!(used(Some(Path::new("/proc/none/of/these")), &key, b"").1);
        std::fs::remove_file(&folder.0).unwrap();
    }

    #[test]
    fn a_folder_or_a_file_that_others_may_write_to_or_own_is_neither_read_nor_written() {
        let folder = Folder::new("shared");
        let place = Some(folder.0.as_path());
        let key = Key::new("rotary", "source", "sm_90");
        let allow = |path: &Path, mode: u32| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        used(place, &key, b"");
        let file = folder.files().remove(0);
        assert_eq!([&folder.0, &file].map(|path| std::fs::metadata(path).unwrap().mode() & 0o777), [0o700, 0o600]);
        assert!(!used(place, &key, b"").1);
        // A file that others may write to is replaced by one of the user's own.
        allow(&file, 0o666);
        assert!(used(place, &key, b"").1 && !used(place, &key, b"").1);
        for mode in [0o770, 0o707] {
            allow(&folder.0, mode);
            assert!(used(place, &key, b"").1, "{mode:o}");
            let other = Key::new("rotary", "another source", "sm_90");
            assert!(used(place, &other, b"").1 && used(place, &other, b"").1, "{mode:o}");
        }
        assert_eq!(folder.files().len(), 1);
        // Nor through a link to a folder, whoever made it.
        allow(&folder.0, 0o700);
        let link = Folder::new("link");
        std::os::unix::fs::symlink(&folder.0, &link.0).unwrap();
        assert!(used(Some(&link.0), &key, b"").1);
        std::fs::remove_file(&link.0).unwrap();
        // A folder of another user; only root can make one.
        if std::os::unix::fs::chown(&folder.0, Some(12345), None).is_ok() {
            assert!(used(place, &key, b"").1);
        }
    }

    #[test]
    fn several_at_once_leave_one_whole_entry() {
        let folder = Folder::new("several");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let key = Key::new("gated", "source", "sm_90");
                    (0..20).for_each(|_| assert_eq!(used(Some(&folder.0), &key, b"").0, b"a new binary"));
                });
            }
        });
        assert_eq!(folder.files().len(), 1);
        assert!(!used(Some(&folder.0), &Key::new("gated", "source", "sm_90"), b"").1);
    }

    #[test]
    fn the_hash_is_that_of_fnv() {
        // As published with the algorithm.
        assert_eq!(hash(&[b"a"]), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(hash(&[b"foo", b"bar"]), hash(&[b"foobar"]));
    }
}
