//! Scalars, texts and hyperparameters as TensorBoard event files.
//!
//! An event file is a TFRecord file whose records are `tensorflow.Event` protocol buffers. The few fields that these need are written
//! by hand: the alternatives are a protobuf code generator, or crates without a release since 2022. Sources:
//! `tensorflow/core/lib/io/record_writer.h` (framing), `tensorflow/core/lib/hash/crc32c.h` (mask),
//! `tensorflow/core/util/event.proto` and `tensorflow/core/framework/summary.proto` (field numbers); for texts and
//! hyperparameters `torch/utils/tensorboard/summary.py` and `tensorboard/plugins/hparams/{plugin_data,api}.proto`.

use crc::{CRC_32_ISCSI, Crc, Table};
use rlhf_base::{Error, Result, files};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Prefix of the names of event files.
pub(crate) const PREFIX: &str = "events.out.tfevents.";

/// The file that a truncated event file is written to before it is renamed.
pub(crate) const TEMPORARY: &str = ".events.tmp";

/// One event file, which TensorBoard can follow while it grows.
#[derive(Debug)]
pub struct TensorBoard {
    file: File,
    path: PathBuf,
}

impl TensorBoard {
    /// Creates a new event file in `dir`, and `dir` if it does not exist; files of earlier runs stay as they are.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder or the file cannot be created or written.
    pub fn create(dir: &Path) -> Result<TensorBoard> {
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        let now = wall_time();
        // TensorBoard takes any file with `tfevents` in its name and reads those of one folder in the order of the
        // seconds; the rest of the name distinguishes writers of one second.
        let stem = format!("{PREFIX}{:010}.{}.{}", now as u64, host_name(), std::process::id());
        let (file, path) = files::create_numbered(|number| dir.join(format!("{stem}.{number}")))?;
        let mut writer = TensorBoard { file, path };
        writer.append(&version_event(now))?;
        Ok(writer)
    }

    /// Appends one event with the scalars of `step`; a reader sees it when this returns.
    ///
    /// TensorBoard keeps scalars as f32, so each value is rounded to the nearest f32.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn scalars<'a>(&mut self, step: i64, values: impl IntoIterator<Item = (&'a str, f64)>) -> Result<()> {
        self.append(&scalars_event(wall_time(), step, values))
    }

    /// Appends one event with a text of `step`, in Markdown, for the tab of texts.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn text(&mut self, step: i64, tag: &str, markdown: &str) -> Result<()> {
        self.append(&text_event(wall_time(), step, tag, markdown))
    }

    /// Appends the settings of the run, for the tab of hyperparameters: strings, numbers and booleans as such, lists as JSON;
    /// nulls and maps are left out.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn hyperparameters(&mut self, settings: &Map<String, Value>) -> Result<()> {
        self.append(&hyperparameters_event(wall_time(), settings))
    }

    /// The event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the events after `step`, and incomplete records of a killed writer, from the event files in `dir`; each by a
    /// rename.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read or written.
    pub(crate) fn cut(dir: &Path, step: i64) -> Result<()> {
        for entry in std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
            let path = entry.map_err(Error::io("read the folder", dir))?.path();
            if !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX)) {
                continue;
            }
            let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
            let mut kept = 0;
            while let Some(event) = event_at(&bytes, kept).filter(|event| step_of(event) <= step) {
                kept += event.len() + FRAME;
            }
            if kept < bytes.len() {
                // TensorBoard reads every file with `tfevents` in its name.
                let temporary = dir.join(TEMPORARY);
                std::fs::write(&temporary, &bytes[..kept]).map_err(Error::io("write", &temporary))?;
                std::fs::rename(&temporary, &path).map_err(Error::io("write", &path))?;
            }
        }
        Ok(())
    }

    /// Appends one record in one write, so that a reader never sees an incomplete one.
    fn append(&mut self, event: &[u8]) -> Result<()> {
        self.file.write_all(&record(event)).map_err(Error::io("write", &self.path))
    }
}

/// Returns the first event of every file.
fn version_event(wall_time: f64) -> Vec<u8> {
    let mut event = Vec::new();
    put_f64(&mut event, EVENT_WALL_TIME, wall_time);
    put_bytes(&mut event, EVENT_FILE_VERSION, b"brain.Event:2");
    event
}

fn scalars_event<'a>(wall_time: f64, step: i64, values: impl IntoIterator<Item = (&'a str, f64)>) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, value) in values {
        let mut entry = Vec::new();
        put_bytes(&mut entry, VALUE_TAG, tag.as_bytes());
        put_f32(&mut entry, VALUE_SIMPLE_VALUE, value as f32);
        put_bytes(&mut summary, SUMMARY_VALUE, &entry);
    }
    summary_event(wall_time, step, &summary)
}

fn summary_event(wall_time: f64, step: i64, summary: &[u8]) -> Vec<u8> {
    let mut event = Vec::new();
    put_f64(&mut event, EVENT_WALL_TIME, wall_time);
    put_varint(&mut event, (EVENT_STEP << 3) | VARINT);
    put_varint(&mut event, step as u64); // int64: a negative one is its two's complement
    put_bytes(&mut event, EVENT_SUMMARY, summary);
    event
}

/// Returns a text as torch's `SummaryWriter.add_text` writes it: a vector of one string, for the plugin `text`.
fn text_event(wall_time: f64, step: i64, tag: &str, text: &str) -> Vec<u8> {
    let (mut dim, mut shape, mut tensor, mut entry, mut summary) =
        <(Vec<u8>, Vec<u8>, Vec<u8>, Vec<u8>, Vec<u8>)>::default();
    put_number(&mut dim, DIM_SIZE, 1);
    put_bytes(&mut shape, SHAPE_DIM, &dim);
    put_number(&mut tensor, TENSOR_DTYPE, DT_STRING);
    put_bytes(&mut tensor, TENSOR_SHAPE, &shape);
    put_bytes(&mut tensor, TENSOR_STRING_VAL, text.as_bytes());
    put_bytes(&mut entry, VALUE_TAG, tag.as_bytes());
    put_bytes(&mut entry, VALUE_TENSOR, &tensor);
    put_bytes(&mut entry, VALUE_METADATA, &plugin_metadata("text", &[]));
    put_bytes(&mut summary, SUMMARY_VALUE, &entry);
    summary_event(wall_time, step, &summary)
}

/// Returns the session of the plugin `hparams`; TensorBoard finds the columns from the sessions of all runs.
fn hyperparameters_event(wall_time: f64, settings: &Map<String, Value>) -> Vec<u8> {
    let mut session = Vec::new();
    for (name, setting) in settings {
        let mut value = Vec::new();
        match setting {
            Value::Null | Value::Object(_) => continue,
            Value::Bool(truth) => put_number(&mut value, PROTO_BOOL, u64::from(*truth)),
            Value::Number(number) => put_f64(&mut value, PROTO_NUMBER, number.as_f64().unwrap_or(f64::NAN)),
            Value::String(text) => put_bytes(&mut value, PROTO_STRING, text.as_bytes()),
            Value::Array(_) => put_bytes(&mut value, PROTO_STRING, setting.to_string().as_bytes()),
        }
        let mut entry = Vec::new();
        put_bytes(&mut entry, MAP_KEY, name.as_bytes());
        put_bytes(&mut entry, MAP_VALUE, &value);
        put_bytes(&mut session, SESSION_HPARAMS, &entry);
    }
    put_f64(&mut session, SESSION_START_TIME, wall_time);
    let (mut content, mut entry, mut summary) = <(Vec<u8>, Vec<u8>, Vec<u8>)>::default();
    put_bytes(&mut content, HPARAMS_SESSION_START, &session);
    put_bytes(&mut entry, VALUE_TAG, b"_hparams_/session_start_info");
    put_bytes(&mut entry, VALUE_METADATA, &plugin_metadata("hparams", &content));
    put_bytes(&mut summary, SUMMARY_VALUE, &entry);
    summary_event(wall_time, 0, &summary)
}

fn plugin_metadata(plugin: &str, content: &[u8]) -> Vec<u8> {
    let (mut data, mut metadata) = (Vec::new(), Vec::new());
    put_bytes(&mut data, PLUGIN_NAME, plugin.as_bytes());
    if !content.is_empty() {
        put_bytes(&mut data, PLUGIN_CONTENT, content);
    }
    put_bytes(&mut metadata, METADATA_PLUGIN_DATA, &data);
    metadata
}

// Field numbers of `tensorflow.Event`, `tensorflow.Summary` and `tensorflow.Summary.Value`.
const EVENT_WALL_TIME: u64 = 1;
const EVENT_STEP: u64 = 2;
const EVENT_FILE_VERSION: u64 = 3;
const EVENT_SUMMARY: u64 = 5;
const SUMMARY_VALUE: u64 = 1;
const VALUE_TAG: u64 = 1;
const VALUE_SIMPLE_VALUE: u64 = 2;
const VALUE_TENSOR: u64 = 8;
const VALUE_METADATA: u64 = 9;

// Field numbers of `tensorflow.SummaryMetadata` and its `PluginData`.
const METADATA_PLUGIN_DATA: u64 = 1;
const PLUGIN_NAME: u64 = 1;
const PLUGIN_CONTENT: u64 = 2;

// Field numbers of `tensorflow.TensorProto`, `TensorShapeProto` and its `Dim`, and a data type.
const TENSOR_DTYPE: u64 = 1;
const TENSOR_SHAPE: u64 = 2;
const TENSOR_STRING_VAL: u64 = 8;
const SHAPE_DIM: u64 = 2;
const DIM_SIZE: u64 = 1;
const DT_STRING: u64 = 7;

// Field numbers of `tensorboard.hparams.HParamsPluginData` and `SessionStartInfo`, of the entries of a map, and of `google.protobuf.Value`.
const HPARAMS_SESSION_START: u64 = 3;
const SESSION_HPARAMS: u64 = 1;
const SESSION_START_TIME: u64 = 5;
const MAP_KEY: u64 = 1;
const MAP_VALUE: u64 = 2;
const PROTO_NUMBER: u64 = 2;
const PROTO_STRING: u64 = 3;
const PROTO_BOOL: u64 = 4;

// Wire types: the low three bits of a protobuf key.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH_DELIMITED: u64 = 2;
const FIXED32: u64 = 5;

fn put_varint(buffer: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        buffer.push(value as u8 | 0x80);
        value >>= 7;
    }
    buffer.push(value as u8);
}

fn put_number(buffer: &mut Vec<u8>, field: u64, value: u64) {
    put_varint(buffer, (field << 3) | VARINT);
    put_varint(buffer, value);
}

fn put_f64(buffer: &mut Vec<u8>, field: u64, value: f64) {
    put_varint(buffer, (field << 3) | FIXED64);
    buffer.extend(value.to_le_bytes());
}

fn put_f32(buffer: &mut Vec<u8>, field: u64, value: f32) {
    put_varint(buffer, (field << 3) | FIXED32);
    buffer.extend(value.to_le_bytes());
}

fn put_bytes(buffer: &mut Vec<u8>, field: u64, value: &[u8]) {
    put_varint(buffer, (field << 3) | LENGTH_DELIMITED);
    put_varint(buffer, value.len() as u64);
    buffer.extend(value);
}

/// Returns a TFRecord: length as u64, its checksum, the data, their checksum; all little-endian.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(masked_crc32c(&length).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc32c(data).to_le_bytes());
    record
}

/// Bytes of a TFRecord besides its data: length and two checksums.
const FRAME: usize = 16;

/// Returns the data of the TFRecord at the offset `at`, if it is complete.
fn event_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let record = bytes.get(at..)?;
    let length = u64::from_le_bytes(record.get(..8)?.try_into().ok()?);
    let length = usize::try_from(length).ok()?;
    (record.len() >= length.checked_add(FRAME)?).then(|| &record[12..12 + length])
}

/// Returns the step of an event that this module wrote; 0 if it has none.
fn step_of(event: &[u8]) -> i64 {
    // The step comes after the wall time, which has a key of one byte and eight bytes.
    let Some((&key, rest)) = event.get(9..).and_then(<[u8]>::split_first) else { return 0 };
    if u64::from(key) != (EVENT_STEP << 3) | VARINT {
        return 0;
    }
    let mut step = 0;
    for (place, byte) in rest.iter().take(10).enumerate() {
        step |= u64::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            break;
        }
    }
    step as i64
}

/// Returns the CRC-32C, rotated and shifted by a constant, so that it also works for data with checksums in them.
fn masked_crc32c(data: &[u8]) -> u32 {
    const CRC32C: Crc<u32, Table<1>> = Crc::<u32, Table<1>>::new(&CRC_32_ISCSI);
    CRC32C.checksum(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns seconds since 1970.
fn wall_time() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Returns the machine's name, which a file's name contains.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String = name.trim().chars().filter(|c| c.is_ascii_alphanumeric() || "-.".contains(*c)).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the data of each TFRecord in `bytes`, and checks both of its checksums.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(bytes[8..12], masked_crc32c(&bytes[..8]).to_le_bytes());
            let data = &bytes[12..12 + length];
            assert_eq!(bytes[12 + length..16 + length], masked_crc32c(data).to_le_bytes());
            records.push(data.to_vec());
            bytes = &bytes[16 + length..];
        }
        records
    }

    #[test]
    fn checksums_are_those_of_the_published_vectors() {
        // RFC 3720, B.4, has CRC-32C of 32 zero bytes and of 32 times ff; e3069283 is the check value of CRC-32/ISCSI.
        let unmasked = |data: &[u8]| masked_crc32c(data).wrapping_sub(0xa282_ead8).rotate_left(15);
        assert_eq!(unmasked(&[0; 32]), 0x8a91_36aa);
        assert_eq!(unmasked(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(unmasked(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn records_are_byte_for_byte_those_of_tensorboards_own_writer() {
        // tensorboard 2.21: RecordWriter(file).write(Event(wall_time=1.5, ...).SerializeToString())
        let version = b"\x18\0\0\0\0\0\0\0\xa3\x7fK\"\t\0\0\0\0\0\0\xf8?\x1a\rbrain.Event:2*(dl";
        assert_eq!(record(&version_event(1.5)), version);

        let scalars =
            b".\0\0\0\0\0\0\0\xc5\xcbW\xfa\t\0\0\0\0\0\0\xf8?\x10\xac\x02* \n\x13\n\x0cobjective/kl\x15\xcd\xcc\xcc=\
            \n\t\n\x02lr\x15\x9cSI6\xae?\xe3v";
        assert_eq!(record(&scalars_event(1.5, 300, [("objective/kl", 0.1), ("lr", 3e-6)])), scalars);

        let negative = b" \0\0\0\0\0\0\0)\xed\xa9P\t\0\0\0\0\0\0\xf8?\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\
            *\n\n\x08\n\x01x\x15\0\0\0\0\x01\x9b\x10&";
        assert_eq!(record(&scalars_event(1.5, -1, [("x", 0.0)])), negative);
    }

    #[test]
    fn texts_and_hyperparameters_are_byte_for_byte_those_of_tensorboards_own_messages() {
        // tensorboard 2.21: Event(...).SerializeToString() of what `SummaryWriter.add_text` of torch makes, without its suffix
        // of the tag.
        let text = b"\t\0\0\0\0\0\0\xf8?\x10\xac\x02*&\n$\n\x07samplesB\x0f\x08\x07\x12\x04\x12\x02\x08\x01B\x05| a |J\x08\n\x06\n\x04text";
        assert_eq!(text_event(1.5, 300, "samples", "| a |"), text);
        // Of an HParamsPluginData with a session_start_info of {"bf16": true}; a step of 0 is written here (10 00).
        let session =
            b"\t\0\0\0\0\0\0\xf8?\x10\0*F\nD\n\x1c_hparams_/session_start_infoJ$\n\"\n\x07hparams\x12\x17\x1a\x15\
            \n\n\n\x04bf16\x12\x02 \x01)\0\0\0\0\0\0\xf8?";
        let settings = serde_json::json!({"bf16": true, "max_steps": null, "inner": {}});
        assert_eq!(hyperparameters_event(1.5, settings.as_object().unwrap()), session);
    }

    #[test]
    fn each_call_leaves_one_whole_record_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = TensorBoard::create(&dir.path().join("new/logs")).unwrap();
        for step in 1..=2 {
            writer.scalars(step, [("loss", step as f64)]).unwrap();
            let records = records(&std::fs::read(writer.path()).unwrap()); // the writer is open: nothing may be buffered
            let without_time = |event: Vec<u8>| event[9..].to_vec();
            assert_eq!(records.len() as i64, 1 + step);
            assert_eq!(without_time(records[0].clone()), without_time(version_event(0.0)));
            let last = scalars_event(0.0, step, [("loss", step as f64)]);
            assert_eq!(without_time(records[step as usize].clone()), without_time(last));
        }
    }

    #[test]
    fn cutting_keeps_the_whole_events_up_to_a_step_in_every_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut paths = Vec::new();
        for steps in [&[1, 2, 300, 301][..], &[301, 302]] {
            let mut writer = TensorBoard::create(dir.path()).unwrap();
            steps.iter().for_each(|&step| writer.scalars(step, [("loss", 0.5)]).unwrap());
            paths.push(writer.path().to_path_buf());
        }
        let torn = [&std::fs::read(&paths[0]).unwrap()[..], &[7; 30]].concat();
        std::fs::write(&paths[0], torn).unwrap();
        let steps = |path: &Path| -> Vec<i64> {
            records(&std::fs::read(path).unwrap()).iter().map(|event| step_of(event)).collect()
        };
        for (step, first, second) in [(301, &[0, 1, 2, 300, 301][..], &[0, 301][..]), (299, &[0, 1, 2], &[0])] {
            TensorBoard::cut(dir.path(), step).unwrap();
            assert_eq!((steps(&paths[0]), steps(&paths[1])), (first.to_vec(), second.to_vec()));
        }
    }

    #[test]
    fn a_second_writer_of_the_same_second_gets_its_own_file() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (TensorBoard::create(dir.path()).unwrap(), TensorBoard::create(dir.path()).unwrap());
        assert_ne!(first.path(), second.path());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_one_error_with_its_path() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = TensorBoard::create(file.path()).unwrap_err().to_string();
        let expected = format!("{}: cannot create the folder: ", file.path().display());
        assert!(error.starts_with(&expected), "{error}");
    }
}
