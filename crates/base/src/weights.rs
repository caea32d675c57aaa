//! Reads and writes safetensors: one tensor in memory at a time, every size checked before it is used.

use crate::files;
use crate::safe_text::beginning;
use crate::{Error, Result};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tch::{Device, Kind, Tensor};

const SINGLE: &str = "model.safetensors";
/// The file that names the files of sharded weights.
pub const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// The format's maximum size of a header, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// Buffer size for reading a tensor, in bytes: the memory that loading takes in addition to the model. Buffers of several MiB would
/// be no faster, and the allocator would keep some of them.
const READ_AT_ONCE: usize = 1 << 19;
/// The same for a tensor on a GPU, for each of [`READERS`].
const READ_AT_ONCE_TO_GPU: usize = 1 << 22;
/// Number of threads that read a tensor onto a GPU: a processor's core copies files and pinned memory more slowly than a GPU takes them.
const READERS: usize = 4;
/// Buffer size for writing a tensor, in bytes.
const WRITE_AT_ONCE: usize = 1 << 23;
/// Subfolder for a folder's new files until all of them are complete.
pub const STAGING: &str = ".saving";

/// The tensors of a model folder, in one safetensors file or several; only the headers are in memory.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<TensorFile>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    file: File,
    /// Offset of the tensors' bytes in the file.
    data_start: u64,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    info: TensorInfo,
}

impl Checkpoint {
    /// Opens `dir/model.safetensors`, or the shards that `dir/model.safetensors.index.json` names.
    ///
    /// # Errors
    /// If neither exists, a file is truncated or its header is invalid, or the index and the shards disagree.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut checkpoint = Self { dir: dir.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new() };
        if dir.join(SINGLE).is_file() {
            checkpoint.add_file(dir.join(SINGLE))?;
        } else if dir.join(INDEX).is_file() {
            checkpoint.add_shards(&dir.join(INDEX))?;
        } else {
            let names = file_names(dir)?;
            return Err(no_safetensors(dir, names.iter().map(String::as_str)));
        }
        Ok(checkpoint)
    }

    /// Opens one safetensors file.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_file(path: &Path) -> Result<Self> {
        let dir = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let mut checkpoint = Self { dir, files: Vec::new(), tensors: BTreeMap::new() };
        checkpoint.add_file(path.to_path_buf())?;
        Ok(checkpoint)
    }

    /// Whether `dir` contains a model's weights.
    pub fn is_in(dir: &Path) -> bool {
        [SINGLE, INDEX].iter().any(|name| dir.join(name).is_file())
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of the tensor `name`, if there is one.
    pub fn shape(&self, name: &str) -> Option<Vec<i64>> {
        self.tensors.get(name).map(|entry| entry.info.shape.iter().map(|&n| n as i64).collect())
    }

    /// The dtype of the stored tensor `name`, if it exists and is f32, f16, bf16 or f64.
    pub fn kind_of(&self, name: &str) -> Option<Kind> {
        match self.tensors.get(name)?.info.dtype {
            Dtype::F32 => Some(Kind::Float),
            Dtype::F16 => Some(Kind::Half),
            Dtype::BF16 => Some(Kind::BFloat16),
            Dtype::F64 => Some(Kind::Double),
            _ => None,
        }
    }

    /// Whether the tensor `name` has the codes of a quantized weight, which are bytes.
    pub fn holds_codes(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|entry| matches!(entry.info.dtype, Dtype::U8 | Dtype::I8))
    }

    /// The layers whose weights are codes.
    pub fn coded_layers(&self) -> Vec<String> {
        let coded = self.names().filter(|name| self.holds_codes(name));
        coded.filter_map(|name| name.strip_suffix(".weight")).map(String::from).collect()
    }

    /// The file of the tensor `name`; the folder if there is no such tensor.
    pub fn path_of(&self, name: &str) -> &Path {
        self.tensors.get(name).map_or(&self.dir, |entry| &self.files[entry.file].path)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The dtype of most of the checkpoint's bytes: f32, bf16 or f16.
    pub fn kind(&self) -> Kind {
        let weight_bytes = |dtype: Dtype| -> usize {
            let is_weight = |name: &str| !is_beside_codes(name);
            let tensors = self.tensors.iter().filter(|(name, entry)| entry.info.dtype == dtype && is_weight(name));
            tensors.map(|(_, entry)| entry.info.data_offsets.1 - entry.info.data_offsets.0).sum()
        };
        let kinds = [(Dtype::F32, Kind::Float), (Dtype::BF16, Kind::BFloat16), (Dtype::F16, Kind::Half)];
        // With equal sizes the first, most precise kind is taken, so that no precision is lost.
        kinds.into_iter().rev().max_by_key(|&(dtype, _)| weight_bytes(dtype)).expect("there are three").1
    }

    /// Reads the tensor `name`, of floats, as `kind` onto `device`.
    ///
    /// # Errors
    /// If there is no such tensor, its dtype is not a float, or its bytes cannot be read.
    pub fn read(&self, name: &str, device: Device, kind: Kind) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let stored = self.kind_of(name).ok_or_else(|| {
            let found = entry.info.dtype;
            let message = format!("tensor `{name}`: expected dtype F32, F16, BF16 or F64, found {found:?}");
            Error::invalid(&self.files[entry.file].path, message)
        })?;
        self.read_as(entry, stored, device, kind)
    }

    /// Reads the tensor `name`, of floats or of bytes, in its own dtype.
    ///
    /// # Errors
    /// If there is no such tensor, its dtype is another, or its bytes cannot be read.
    pub fn read_stored(&self, name: &str, device: Device) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let stored = match entry.info.dtype {
            Dtype::U8 => Some(Kind::Uint8),
            Dtype::I8 => Some(Kind::Int8),
            _ => self.kind_of(name),
        };
        let stored = stored.ok_or_else(|| {
            let message = format!("tensor `{name}`: expected floats or bytes, found {:?}", entry.info.dtype);
            Error::invalid(&self.files[entry.file].path, message)
        })?;
        self.read_as(entry, stored, device, stored)
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        let entry = self.tensors.get(name);
        entry.ok_or_else(|| Error::invalid(&self.dir, format!("expected the tensor `{name}`, found none")))
    }

    /// Reads a tensor that is `stored` in this dtype.
    fn read_as(&self, entry: &Entry, stored: Kind, device: Device, kind: Kind) -> Result<Tensor> {
        let source = &self.files[entry.file];
        let shape: Vec<i64> = entry.info.shape.iter().map(|&n| n as i64).collect();
        let tensor = Tensor::f_empty(&shape, (kind, device))?;
        // A separate view, which is dropped at the end: it would keep this memory alive when the tensor's data is replaced by another
        // dtype.
        let flat = tensor.f_view([-1])?;
        let width = stored.elt_size_in_bytes();
        let (start, end) = entry.info.data_offsets;
        let (at_once, readers) = if device == Device::Cpu { (READ_AT_ONCE, 1) } else { (READ_AT_ONCE_TO_GPU, READERS) };
        let parts = (start..end).step_by(at_once).map(|at| at..end.min(at + at_once));
        // The numbers go through small buffers into the tensor's memory, and the device converts them, so that no second copy exists.
        let read = |flat: &Tensor, bytes: &mut Vec<u8>, part: Range<usize>| -> Result<()> {
            bytes.resize(part.len(), 0);
            let place = source.data_start + part.start as u64;
            source.file.read_exact_at(bytes, place).map_err(Error::io("read", &source.path))?;
            let (first, len) = (((part.start - start) / width) as i64, (part.len() / width) as i64);
            let numbers = tch_ext::moved(Tensor::f_from_data_size(bytes, &[len], stored)?, device)?;
            flat.f_narrow(0, first, len)?.f_copy_(&numbers)?;
            Ok(())
        };
        in_turns(parts, readers, &flat, read)?;
        Ok(tensor)
    }

    fn add_file(&mut self, path: PathBuf) -> Result<Vec<String>> {
        let file = files::open(&path)?;
        let (metadata, data_start) = read_header(&file, &path)?;
        let index = self.files.len();
        let mut names = Vec::new();
        for (name, info) in metadata.tensors() {
            names.push(name.clone());
            if let Some(other) = self.tensors.insert(name.clone(), Entry { file: index, info: info.clone() }) {
                let other = self.files[other.file].path.display();
                return Err(Error::invalid(path, format!("the tensor `{}` is also in {other}", brief(&name))));
            }
        }
        self.files.push(TensorFile { path, file, data_start });
        Ok(names)
    }

    fn add_shards(&mut self, index_path: &Path) -> Result<()> {
        let index = read_json(index_path)?;
        let weight_map = index["weight_map"]
            .as_object()
            .ok_or_else(|| Error::invalid(index_path, "expected an object `weight_map`, found none"))?;
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, shard) in weight_map {
            let shard = shard.as_str().filter(|s| !s.contains(['/', '\\'])).ok_or_else(|| {
                Error::invalid(
                    index_path,
                    format!(
                        "tensor `{}`: expected the name of a file, found {}",
                        brief(name),
                        brief(&shard.to_string())
                    ),
                )
            })?;
            shards.entry(shard).or_default().push(name);
        }
        for (shard, expected) in shards {
            let path = self.dir.join(shard);
            let found = self.add_file(path.clone())?;
            if let Some(name) = expected.iter().find(|name| !found.iter().any(|f| f == *name)) {
                return Err(Error::invalid(
                    path,
                    format!("expected the tensor `{name}` that {INDEX} names, found none"),
                ));
            }
        }
        Ok(())
    }
}

/// Whether a tensor's name is that of a companion of a quantized weight's codes: scales, maps, the description.
pub fn is_beside_codes(name: &str) -> bool {
    name.contains(".weight.") || name.ends_with(".SCB") || name.ends_with(".weight_format")
}

/// The error for a folder or a model on the hub without supported weights: names the weights that it has, and how to convert
/// them.
pub fn no_safetensors<'a>(place: &Path, files: impl Iterator<Item = &'a str>) -> Error {
    let mut names: Vec<&str> = files.collect();
    names.sort_unstable();
    let ends_with = |ends: &[&str]| names.iter().find(|name| ends.iter().any(|end| name.ends_with(end)));
    let pickle = names.iter().find(|name| name.starts_with("pytorch_model") && name.contains(".bin"));
    let found_only = |name: &str, what: &str| format!("expected {SINGLE}, found only {name}, {what}");
    let convert = "convert it with transformers: `AutoModel...from_pretrained(dir";
    let message = if let Some(name) = pickle.or(ends_with(&[".pt", ".pth", ".ckpt"])) {
        let what = "a pickle, which can run code and is never opened; ";
        found_only(name, what) + convert + ").save_pretrained(new_dir)`"
    } else if let Some(name) = ends_with(&[".gguf"]) {
        let what =
            "llama.cpp's format; make a model folder of it: `rlhf convert FILE new_dir`, or for other quantizations ";
        found_only(name, what) + convert + &format!(", gguf_file={name:?}).save_pretrained(new_dir)`")
    } else if let Some(name) = ends_with(&[".h5", ".msgpack"]) {
        found_only(name, "weights of TensorFlow or Flax; fetch the model's safetensors")
    } else if let Some(name) = names.iter().find(|name| name.starts_with("adapter_model.")) {
        found_only(name, "an adapter without its base model")
    } else if let Some(name) = ends_with(&["/adapter_model.safetensors"]) {
        found_only(name, "an adapter in a subfolder; download that folder and give its path")
    } else {
        format!("expected {SINGLE} or {INDEX}, found neither")
    };
    Error::invalid(place, message)
}

/// Calls `read` for each of `parts` with `flat` and a buffer, in up to `threads` threads, which take the parts in order.
///
/// # Errors
/// The first error of a thread; the others then end after their part.
fn in_turns(
    parts: impl ExactSizeIterator<Item = Range<usize>> + Send,
    threads: usize,
    flat: &Tensor,
    read: impl Fn(&Tensor, &mut Vec<u8>, Range<usize>) -> Result<()> + Sync,
) -> Result<()> {
    let threads = threads.min(parts.len());
    let parts = Mutex::new((parts, true));
    let next = || {
        let (parts, goes_on) = &mut *parts.lock().unwrap_or_else(PoisonError::into_inner);
        if *goes_on { parts.next() } else { None }
    };
    let take_parts = |flat: &Tensor| -> Result<()> {
        let mut bytes = Vec::new();
        while let Some(part) = next() {
            read(flat, &mut bytes, part)
                .inspect_err(|_| parts.lock().unwrap_or_else(PoisonError::into_inner).1 = false)?;
        }
        Ok(())
    };
    if threads <= 1 {
        return take_parts(flat);
    }
    std::thread::scope(|scope| {
        let start = |_| {
            let (flat, take_parts) = (flat.shallow_clone(), &take_parts);
            scope.spawn(move || take_parts(&flat))
        };
        let started: Vec<_> = (0..threads).map(start).collect();
        let ended =
            started.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}

/// Reads a safetensors header; returns it with the position of the first tensor byte.
pub fn read_header(file: &File, path: &Path) -> Result<(Metadata, u64)> {
    let file_len = file.metadata().map_err(Error::io("read", path))?.len();
    let truncated = |needed: u64| {
        Error::invalid(path, format!("truncated or not a safetensors file: expected {needed} bytes, found {file_len}"))
    };
    if file_len < 8 {
        return Err(truncated(8));
    }
    let mut size = [0; 8];
    file.read_exact_at(&mut size, 0).map_err(Error::io("read", path))?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER {
        let message = format!("not a safetensors file: its header would have {size} bytes, the most is {MAX_HEADER}");
        return Err(Error::invalid(path, message));
    }
    if 8 + size > file_len {
        return Err(truncated(8 + size));
    }
    let mut header = vec![0; size as usize];
    file.read_exact_at(&mut header, 8).map_err(Error::io("read", path))?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|e| Error::invalid(path, format!("not a valid safetensors header: {}", brief(&e.to_string()))))?;
    let expected = 8 + size + metadata.data_len() as u64;
    if expected < file_len {
        let message = format!("damaged: its header speaks of {expected} bytes, found {file_len}");
        return Err(Error::invalid(path, message));
    }
    if expected > file_len {
        return Err(truncated(expected));
    }
    Ok((metadata, 8 + size))
}

/// Writes `tensors` in their own dtypes as safetensors to `dir`, in shards of at most `max_shard_bytes` each.
///
/// Each file is written under a temporary name and renamed; old shards of another checkpoint are removed last.
///
/// # Errors
/// If a file cannot be written.
pub fn save(dir: &Path, tensors: &[(String, Tensor)], max_shard_bytes: usize) -> Result<()> {
    save_of(dir, &TensorSpec::all_of(tensors), max_shard_bytes, &mut |i| Ok(tensors[i].1.shallow_clone()))
}

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// Name.
    pub name: String,
    /// Dtype.
    pub kind: Kind,
    /// Shape.
    pub shape: Vec<i64>,
}

impl TensorSpec {
    fn all_of(tensors: &[(String, Tensor)]) -> Vec<Self> {
        let spec = |(name, t): &(String, Tensor)| Self { name: name.clone(), kind: t.kind(), shape: t.size() };
        tensors.iter().map(spec).collect()
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<i64>() as usize * self.kind.elt_size_in_bytes()
    }

    fn dtype(&self) -> Dtype {
        match self.kind {
            Kind::Float => Dtype::F32,
            Kind::Half => Dtype::F16,
            Kind::BFloat16 => Dtype::BF16,
            Kind::Double => Dtype::F64,
            Kind::Int64 => Dtype::I64,
            Kind::Bool => Dtype::BOOL,
            Kind::Uint8 => Dtype::U8,
            Kind::Int8 => Dtype::I8,
            other => unreachable!("no file holds {other:?} tensors"),
        }
    }
}

/// [`save`] of tensors that exist one at a time: `tensor` returns the tensor of a spec when it is written.
pub fn save_of(
    dir: &Path,
    specs: &[TensorSpec],
    max_shard_bytes: usize,
    tensor: &mut dyn FnMut(usize) -> Result<Tensor>,
) -> Result<()> {
    // Each tensor is copied while it is written, so the memory that the allocator keeps from training is freed first.
    tch_ext::release_memory();
    let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
    let mut filled = 0;
    for (i, spec) in specs.iter().enumerate() {
        let bytes = spec.bytes();
        if filled + bytes > max_shard_bytes && filled > 0 {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        shards.last_mut().expect("there is always one shard").push(i);
    }
    replace_files(dir, |dir| {
        if let [only] = shards.as_slice() {
            return write_file(&dir.join(SINGLE), specs, only, tensor);
        }
        let mut weight_map = serde_json::Map::new();
        for (i, shard) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
            write_file(&dir.join(&name), specs, shard, tensor)?;
            weight_map.extend(shard.iter().map(|&i| (specs[i].name.clone(), Value::String(name.clone()))));
        }
        weight_map.sort_keys();
        let total: usize = specs.iter().map(TensorSpec::bytes).sum();
        let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_text(&dir.join(INDEX), &pretty(&index))
    })
}

/// Checks that every number of a tensor is finite before it is saved.
///
/// # Errors
/// If a number is infinite or NaN; the error names the tensor.
pub fn check_finite(name: &str, tensor: &Tensor) -> Result<()> {
    not_finite(tensor).map_or(Ok(()), |found| {
        Err(Error::Run(format!(
            "tensor `{name}`: expected finite numbers, found {found}: the weights are damaged, or training diverged"
        )))
    })
}

/// A number of `tensor` that is infinite or NaN, if there is one.
pub fn not_finite(tensor: &Tensor) -> Option<f64> {
    if tensor.numel() == 0 {
        return None;
    }
    // Both are NaN if any number is, and no second tensor of this size is allocated.
    let (least, most) = tensor.aminmax(None, false);
    [least, most].map(|x| x.double_value(&[])).into_iter().find(|x| !x.is_finite())
}

/// Writes `tensors` as one safetensors file, under a temporary name that is then renamed.
pub fn save_file(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    save_file_of(path, &TensorSpec::all_of(tensors), &mut |i| Ok(tensors[i].1.shallow_clone()))
}

/// [`save_file`] of tensors that exist one at a time: `tensor` returns the tensor of a spec when it is written.
pub fn save_file_of(path: &Path, specs: &[TensorSpec], tensor: &mut dyn FnMut(usize) -> Result<Tensor>) -> Result<()> {
    write_file(path, specs, &(0..specs.len()).collect::<Vec<_>>(), tensor)
}

/// Replaces files of a model folder by those that `write` writes to the folder it receives: all of them, or none.
///
/// They are written to `dir/.saving` and moved when all are complete. A folder is a model by its `config.json`: if that is among
/// them, the old one is removed first and the new one is moved last, so that a save that is killed while it moves files
/// leaves a folder that nothing opens, never a mixture of two models. Old weights that are not replaced are removed. The
/// files are synced to disk before `config.json` is moved, and `config.json` before this returns.
///
/// # Errors
/// Errors of `write`, which leave the folder as it was; if a file cannot be moved or removed.
pub fn replace_files(dir: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
    let staging = dir.join(STAGING);
    // An earlier save that was killed may have left the folder.
    let clear = || match std::fs::remove_dir_all(&staging) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", &staging)(e)),
        _ => Ok(()),
    };
    clear()?;
    std::fs::create_dir(&staging).map_err(Error::io("create the folder", &staging))?;
    if let Err(error) = write(&staging).and_then(|()| sync(&staging)) {
        let _ = clear();
        return Err(error);
    }
    let mut new = file_names(&staging)?;
    new.sort_by_key(|name| name == CONFIG);
    let mut old = Vec::from_iter(new.last().filter(|name| *name == CONFIG).cloned());
    if new.iter().any(|name| is_weights(name)) {
        old.extend(file_names(dir)?.into_iter().filter(|name| is_weights(name) && !new.contains(name)));
    }
    for path in old.iter().map(|name| dir.join(name)).filter(|path| path.exists()) {
        std::fs::remove_file(&path).map_err(Error::io("remove the old", &path))?;
    }
    // A folder cannot be renamed onto another, so the old one is removed first.
    for name in new.iter().filter(|name| staging.join(name).is_dir() && dir.join(name).is_dir()) {
        let old = staging.join(format!("{name}.old"));
        std::fs::rename(dir.join(name), &old).map_err(Error::io("remove the old", dir.join(name)))?;
    }
    for name in &new {
        if name == CONFIG {
            sync_folder(dir)?;
        }
        std::fs::rename(staging.join(name), dir.join(name)).map_err(Error::io("write", dir.join(name)))?;
    }
    sync_folder(dir)?;
    clear()
}

/// Syncs every file below `dir`, and the folders themselves, to disk.
///
/// # Errors
/// If the system cannot.
pub fn sync(dir: &Path) -> Result<()> {
    for name in file_names(dir)? {
        let path = dir.join(name);
        if path.is_dir() {
            sync(&path)?;
        } else {
            File::open(&path).and_then(|file| file.sync_all()).map_err(Error::io("write to the disk", &path))?;
        }
    }
    sync_folder(dir)
}

/// Syncs the entries of the folder `dir` to disk.
fn sync_folder(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io("write to the disk", dir))
}

fn file_names(dir: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))?;
    entries
        .map(|entry| Ok(entry.map_err(Error::io("read the folder", dir))?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Whether `name` is a file name of a checkpoint's weights.
pub fn is_weights(name: &str) -> bool {
    [SINGLE, INDEX, "adapter_model.safetensors"].contains(&name)
        || (name.starts_with("model-") && name.ends_with(".safetensors"))
}

/// The final folder of files written to `dir`, after [`replace_files`] has moved them.
pub fn destination(mut dir: &Path) -> &Path {
    while dir.ends_with(STAGING) {
        dir = dir.parent().unwrap_or(dir);
    }
    dir
}

/// Writes the tensors `chosen` of `specs` to one file, under a temporary name that is then renamed. Their order is that of the safetensors
/// crate: the largest dtypes first, then by name.
fn write_file(
    path: &Path,
    specs: &[TensorSpec],
    chosen: &[usize],
    tensor: &mut dyn FnMut(usize) -> Result<Tensor>,
) -> Result<()> {
    let mut chosen = chosen.to_vec();
    chosen.sort_by_key(|&i| (std::cmp::Reverse(specs[i].dtype()), &specs[i].name));
    let mut name = path.file_name().expect("a file to write has a name").to_os_string();
    name.push(".tmp");
    let staging = path.with_file_name(name);
    let mut file = File::create(&staging).map_err(Error::io("write", path))?;
    let written = write_tensors(&mut file, path, specs, &chosen, tensor);
    if written.is_err() {
        // Frees the space on a full disk.
        let _ = std::fs::remove_file(&staging);
    }
    written?;
    std::fs::rename(&staging, path).map_err(Error::io("write", path))
}

fn write_tensors(
    file: &mut File,
    path: &Path,
    specs: &[TensorSpec],
    chosen: &[usize],
    tensor: &mut dyn FnMut(usize) -> Result<Tensor>,
) -> Result<()> {
    let mut end = 0;
    let infos = chosen.iter().map(|&i| {
        let spec = &specs[i];
        let start = end;
        end += spec.bytes();
        let shape = spec.shape.iter().map(|&n| n as usize).collect();
        (spec.name.clone(), TensorInfo { dtype: spec.dtype(), shape, data_offsets: (start, end) })
    });
    // transformers rejects a file that does not state its framework.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let invalid = |e: String| Error::invalid(path, e);
    let header = Metadata::new(Some(format), infos.collect()).map_err(|e| invalid(e.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|e| invalid(e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io("write", path));
    write(&(header.len() as u64).to_le_bytes())?;
    write(&header)?;
    for &i in chosen {
        let spec = &specs[i];
        let tensor = tensor(i)?;
        if (tensor.kind(), tensor.size().as_slice()) != (spec.kind, spec.shape.as_slice()) {
            return Err(invalid(format!("tensor `{}`: expected {spec:?}, found {tensor:?}", spec.name)));
        }
        let flat = tensor.detach().contiguous().view([-1]);
        let width = spec.kind.elt_size_in_bytes();
        let len = flat.size()[0];
        let most = (WRITE_AT_ONCE / width) as i64;
        for from in (0..len).step_by(most as usize) {
            let count = most.min(len - from);
            let part = flat.narrow(0, from, count).to_device(Device::Cpu);
            let mut bytes = vec![0; count as usize * width];
            part.copy_data_u8(&mut bytes, count as usize);
            write(&bytes)?;
        }
    }
    Ok(())
}

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value> {
    let text = files::read_text(path)?;
    serde_json::from_str(&text).map_err(|e| Error::invalid(path, format!("not valid JSON: {e}")))
}

/// Shortens a text from a file for an error message.
pub fn brief(text: &str) -> Cow<'_, str> {
    beginning(text, 120)
}

/// Formats JSON as Hugging Face's files are: two spaces, a newline at the end.
pub fn pretty(value: &Value) -> String {
    let mut text = serde_json::to_string_pretty(value).expect("a JSON value always has a text");
    text.push('\n');
    text
}

/// Writes a text file as [`write_bytes`] does.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    write_bytes(path, text.as_bytes())
}

/// Writes a file under a temporary name and renames it to `path`, so that a reader sees the old content or the new, never a part.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.file_name().expect("a file to write has a name").to_os_string();
    name.push(".tmp");
    let staging = path.with_file_name(name);
    if let Err(error) = std::fs::write(&staging, bytes) {
        // Frees the space on a full disk.
        let _ = std::fs::remove_file(&staging);
        return Err(Error::io("write", &staging)(error));
    }
    std::fs::rename(&staging, path).map_err(Error::io("write", path))
}

/// The error for a model folder without one of its files; includes a hint if the path looks like a name on the hub.
pub fn no_such_file(dir: &Path, name: &str) -> Error {
    if let Some(adapters) = adapters_below(dir) {
        return Error::invalid(dir, format!("expected a model folder with a {name}, found {adapters}"));
    }
    let found = match dir {
        dir if dir.is_dir() => "none in this folder",
        dir if dir.is_file() && dir.extension().is_some_and(|end| end == "gguf") => {
            "a GGUF file, of which `rlhf convert FILE new_dir` makes such a folder"
        }
        dir if dir.exists() => "a file in place of the folder",
        _ => "no such folder (nor is it the name of a model on the hub, as in `EleutherAI/pythia-160m`)",
    };
    // In TRL's scripts, `task:model` names a pipeline of transformers.
    let tasks = ["sentiment-analysis:", "text-classification:"];
    let alone = dir.to_str().and_then(|name| tasks.iter().find_map(|task| name.strip_prefix(task)));
    let hint = alone.map_or(String::new(), |model| format!("; give the model alone: --reward_model_path {model}"));
    Error::invalid(dir, format!("expected a model folder with a {name}, found {found}{hint}"))
}

/// A hint with the names of the adapters in subfolders of `dir`, where PEFT saves several adapters of one model; `None` if there
/// are none.
pub fn adapters_below(dir: &Path) -> Option<String> {
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let adapters = entries.filter(|entry| entry.path().join("adapter_config.json").is_file());
    let mut names: Vec<String> = adapters.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    let first = dir.join(names.first()?);
    let listed: Vec<String> = names.iter().take(8).map(|name| brief(name).into_owned()).collect();
    let more = if names.len() > 8 { format!(" and {} more", names.len() - 8) } else { String::new() };
    Some(format!(
        "adapters in its subfolders: {}{more}; give the path of one of them, as {}",
        listed.join(", "),
        first.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_tensors() -> Vec<(String, Tensor)> {
        vec![
            ("a.weight".into(), Tensor::from_slice(&[1.5f32, -2.0, 3.0, 4.0]).view([2, 2])),
            ("b.bias".into(), Tensor::from_slice(&[0.25f32, 7.0]).to_kind(Kind::BFloat16)),
        ]
    }

    #[test]
    fn saved_tensors_read_back_equal_single_and_sharded() {
        for (max_shard_bytes, files) in [(1 << 30, 1), (8, 2)] {
            let dir = tempfile::tempdir().unwrap();
            save(dir.path(), &two_tensors(), max_shard_bytes).unwrap();
            let read = Checkpoint::open(dir.path()).unwrap();
            assert_eq!(read.files.len(), files);
            for (name, tensor) in two_tensors() {
                assert_eq!(read.read(&name, Device::Cpu, Kind::Float).unwrap(), tensor.to_kind(Kind::Float), "{name}");
            }
        }
    }

    #[test]
    fn saving_over_a_sharded_checkpoint_leaves_only_the_new_files() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &two_tensors(), 8).unwrap();
        save(dir.path(), &two_tensors(), 1 << 30).unwrap();
        assert_eq!(file_names(dir.path()).unwrap(), [SINGLE]);
    }

    #[test]
    fn a_shard_that_is_a_named_pipe_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &two_tensors(), 8).unwrap();
        let shard = dir.path().join("model-00002-of-00002.safetensors");
        std::fs::remove_file(&shard).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&shard).status().unwrap().success());
        let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with("00002-of-00002.safetensors: expected a regular file, found a named pipe"), "{error}");
    }

    #[test]
    fn every_truncation_of_a_file_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &two_tensors(), 1 << 30).unwrap();
        let path = dir.path().join(SINGLE);
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
            assert!(error.contains(SINGLE) && error.contains("expected"), "{len} bytes: {error}");
        }
    }

    #[test]
    fn a_header_that_claims_too_much_is_refused_before_memory_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(SINGLE), u64::MAX.to_le_bytes()).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("the most is 100000000"), "{error}");
    }

    #[test]
    fn weights_in_another_format_are_refused_with_the_way_out() {
        for (name, words) in [
            ("pytorch_model.bin", ["pickle", "save_pretrained(new_dir)"]),
            ("pytorch_model.bin.index.json", ["pickle", "save_pretrained(new_dir)"]),
            ("consolidated.00.pth", ["pickle", "save_pretrained(new_dir)"]),
            ("model.pt", ["pickle", "save_pretrained(new_dir)"]),
            ("model-Q4_K_M.gguf", ["`rlhf convert FILE new_dir`", "gguf_file=\"model-Q4_K_M.gguf\""]),
            ("tf_model.h5", ["TensorFlow", "fetch the model's safetensors"]),
            ("adapter_model.safetensors", ["adapter", "without its base model"]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(name), b"x").unwrap();
            let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
            assert!([name, words[0], words[1]].iter().all(|word| error.contains(word)), "{name}: {error}");
        }
    }

    #[test]
    fn a_tensor_of_several_reads_is_whole_in_every_dtype() {
        let dir = tempfile::tempdir().unwrap();
        let rows = READ_AT_ONCE as i64 / 4 + 7; // not a multiple of what is read at once, in any of the dtypes
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double] {
            let tensor =
                Tensor::arange(rows * 2, (Kind::Float, Device::Cpu)).remainder(251.0).to_kind(kind).view([rows, 2]);
            save(dir.path(), &[("w".into(), tensor.shallow_clone())], usize::MAX).unwrap();
            let read = Checkpoint::open(dir.path()).unwrap();
            for as_kind in [Kind::Float, Kind::BFloat16] {
                assert_eq!(read.read("w", Device::Cpu, as_kind).unwrap(), tensor.to_kind(as_kind), "{kind:?}");
            }
        }
    }

    #[test]
    fn parts_are_read_once_by_any_number_of_threads_and_the_first_error_ends_them() {
        let parts = || (3..1000).step_by(7).map(|at| at..1000.min(at + 7));
        for threads in [1, 2, 4, 500] {
            let flat = Tensor::zeros([1000], (Kind::Int64, Device::Cpu));
            let count = |flat: &Tensor, _: &mut Vec<u8>, part: Range<usize>| {
                let _ = flat.narrow(0, part.start as i64, part.len() as i64).g_add_scalar_(1);
                Ok(())
            };
            in_turns(parts(), threads, &flat, count).unwrap();
            assert_eq!((flat.sum(Kind::Int64).int64_value(&[]), flat.max().int64_value(&[])), (997, 1), "{threads}");
            let calls = Mutex::new(0);
            let fail = |_: &Tensor, _: &mut Vec<u8>, part: Range<usize>| {
                *calls.lock().unwrap() += 1;
                if part.start > 9 { Err(Error::Run(format!("part {}", part.start))) } else { Ok(()) }
            };
            let error = in_turns(parts(), threads, &flat, fail).unwrap_err().to_string();
            assert!(error.starts_with("part "), "{error}");
            // One part is read, and each thread ends at its first error.
            assert!(*calls.lock().unwrap() <= threads + 1, "{threads} threads read on after an error");
        }
        in_turns((0..0).map(|at| at..at), 4, &Tensor::zeros([0], (Kind::Float, Device::Cpu)), |_, _, _| Ok(()))
            .unwrap();
    }

    #[test]
    fn a_save_that_fails_changes_nothing_and_one_that_was_killed_leaves_no_model() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let write = |dir: &Path, text: &str| {
            write_text(&dir.join(CONFIG), text).and_then(|()| write_text(&dir.join("a"), text))
        };
        replace_files(dir.path(), |staging| write(staging, "old")).unwrap();
        let failed = replace_files(dir.path(), |staging| write(staging, "new").and(Err(Error::Run("full".into()))));
        assert!(failed.is_err() && !path(STAGING).exists());
        assert_eq!([CONFIG, "a"].map(|name| std::fs::read_to_string(path(name)).unwrap()), ["old", "old"]);
        // `a` is a folder now, so a move fails: this stands for a kill in the middle.
        std::fs::remove_file(path("a")).unwrap();
        std::fs::create_dir(path("a")).unwrap();
        assert!(replace_files(dir.path(), |staging| write(staging, "new")).is_err());
        assert!(!path(CONFIG).exists() && path(STAGING).join(CONFIG).exists());
        // The next save removes it.
        std::fs::remove_dir(path("a")).unwrap();
        replace_files(dir.path(), |staging| write(staging, "new")).unwrap();
        assert_eq!([CONFIG, "a"].map(|name| std::fs::read_to_string(path(name)).unwrap()), ["new", "new"]);
    }
}
