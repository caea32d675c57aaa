//! Rows that `generate`, `logprobs` and `score` read and write, a part at a time: files, pipes and the terminal.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rlhf::data::{Dataset, RowReader};
use rlhf::dist::World;
use rlhf::files::create_numbered;
use rlhf::run::announce;
use rlhf::safe_text::{lines, one_line};
use rlhf::settings::RowsConfig;
use rlhf::terminal::{Colour, Stream};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use serde_json::{Map, Value};
use tch::Tensor;

/// Number of batches that are read at once and sorted by length; with a batch size of 1 there is nothing to sort.
const BATCHES_AT_ONCE: usize = 8;

/// Opens the rows of the dataset, or else of standard input: JSON objects or, with `json: false`, prompts, a line each. All ranks get
/// the same rows; rank 0 reads standard input.
///
/// # Errors
/// If there is no such dataset, or the output file may not be written: found before any work is done.
pub(crate) fn open_rows(config: &RowsConfig, json: bool, world: &World) -> Result<RowReader> {
    world.on_main(|| check_output_file(config))?;
    let rows = match &config.dataset_name {
        Some(name) => world.agree(config.split.find(name).and_then(|files| RowReader::of_files(&files)))?,
        None => {
            let input: Box<dyn Read> = if world.is_main() && is_terminal(config) {
                Box::new(Typed::new(io::stdin(), io::stderr()))
            } else {
                Box::new(io::stdin())
            };
            RowReader::lines("standard input", BufReader::new(MainInput { input, world: world.clone() }), json)
        }
    };
    Ok(rows.with_columns(config.split.columns()?))
}

/// Returns whether rows are typed at rank 0's terminal, so that each is processed at once.
///
/// # Errors
/// If a rank has ended.
pub(crate) fn is_typed(config: &RowsConfig, world: &World) -> Result<bool> {
    world.any(world.is_main() && is_terminal(config))
}

fn is_terminal(config: &RowsConfig) -> bool {
    config.dataset_name.is_none() && io::stdin().is_terminal() && Stream::Err.width().is_some()
}

/// The input of rank 0, which all ranks read together.
struct MainInput<R> {
    input: R,
    world: World,
}

impl<R: Read> Read for MainInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.world.size() == 1 {
            return self.input.read(buffer);
        }
        // All ranks read with buffers of one size, so that they make the same number of reads.
        let read = || self.input.read(buffer).map_err(Error::io("read", "standard input"));
        let read = self.world.on_main(read).map_err(io::Error::other)?;
        let bytes = self.world.broadcast_bytes(read.map(|count| buffer[..count].to_vec())).map_err(io::Error::other)?;
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }
}

/// Lines typed at a terminal, with a prompt sign before each. Its first end of input is final.
struct Typed<R, W> {
    reader: R,
    /// Output for the prompt sign.
    to: W,
    /// Whether the next byte starts a line.
    line_start: bool,
    ended: bool,
}

impl<R: Read, W: Write> Typed<R, W> {
    fn new(reader: R, to: W) -> Self {
        Self { reader, to, line_start: true, ended: false }
    }
}

impl<R: Read, W: Write> Read for Typed<R, W> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.ended {
            // Another read would wait for the terminal again.
            return Ok(0);
        }
        if self.line_start {
            let _ = write!(self.to, "{} ", Stream::Err.paint(Colour::Bold, ">")).and_then(|()| self.to.flush());
        }
        let read = self.reader.read(buffer)?;
        self.ended = read == 0;
        if self.ended {
            let _ = writeln!(self.to);
        }
        self.line_start = buffer[..read].last() == Some(&b'\n');
        Ok(read)
    }
}

fn check_output_file(config: &RowsConfig) -> Result<()> {
    let Some(path) = config.output_file.as_deref() else { return Ok(()) };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(Error::invalid(path, format!("expected a name in a folder, found none at {}", folder.display())));
    }
    if !path.exists() {
        return Ok(());
    }
    if !path.is_file() || path.is_symlink() {
        return Err(Error::invalid(
            path,
            "expected a new name or a regular file; standard output needs no --output_file",
        ));
    }
    if !config.overwrite_output_file {
        return Err(Error::invalid(path, "the file exists; choose another, or set --overwrite_output_file"));
    }
    let source = config.dataset_name.as_deref().and_then(|source| source.canonicalize().ok());
    if source.is_some_and(|source| path.canonicalize().is_ok_and(|path| path.starts_with(source))) {
        return Err(Error::refused(
            "output_file",
            format!(" = {} is also the dataset, or a file of it", path.display()),
        ));
    }
    Ok(())
}

/// The temporary file of this process, while there is one: a signal leaves it behind.
static PART: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Returns a note on the rows that are in the temporary file; removes an empty one. Also for a process that ends without running
/// destructors.
pub(crate) fn leave_part() -> Option<String> {
    let part = PART.lock().unwrap_or_else(PoisonError::into_inner).take()?;
    if fs::metadata(&part).is_ok_and(|file| file.len() > 0) {
        return Some(format!("note: the rows written so far are in {}", one_line(&part.display().to_string())));
    }
    let _ = fs::remove_file(part);
    None
}

/// Standard output, or a file that gets its name when it is complete.
pub(crate) struct Output {
    writer: Box<dyn Write>,
    name: PathBuf,
    /// The temporary file that is written, until it gets its name.
    part: Option<PathBuf>,
    /// Whether it may replace another file.
    overwrites: bool,
    /// Whether rows are printed on a terminal.
    terminal: bool,
    bar: indicatif::ProgressBar,
}

impl Output {
    pub(crate) fn open(config: &RowsConfig) -> Result<Self> {
        let hidden = indicatif::ProgressBar::hidden();
        let overwrites = config.overwrite_output_file;
        let Some(path) = &config.output_file else {
            let writer = Box::new(BufWriter::new(io::stdout().lock()));
            let terminal = io::stdout().is_terminal();
            return Ok(Self { writer, name: "standard output".into(), part: None, overwrites, terminal, bar: hidden });
        };
        let process = std::process::id();
        // A restarted container has the same process id: then a file with its name may be left there.
        let (file, part) = create_numbered(|number| {
            let mut part = path.as_os_str().to_os_string();
            part.push(if number == 0 { format!(".{process}.part") } else { format!(".{process}.{number}.part") });
            part.into()
        })?;
        *PART.lock().unwrap_or_else(PoisonError::into_inner) = Some(part.clone());
        // Rows go to a file: show their number on standard error.
        let bar = if io::stderr().is_terminal() { indicatif::ProgressBar::no_length() } else { hidden };
        let writer = Box::new(BufWriter::new(file));
        Ok(Self { writer, name: path.clone(), part: Some(part), overwrites, terminal: false, bar })
    }

    /// Writes one row, and an end of line.
    pub(crate) fn write(&mut self, row: impl std::fmt::Display) -> Result<()> {
        self.bar.inc(1);
        let written = if self.terminal {
            writeln!(self.writer, "{}", lines(&row.to_string()))
        } else {
            writeln!(self.writer, "{row}")
        };
        written.map_err(Error::io("write to", &self.name))
    }

    /// Flushes the rows written so far, so that a reader sees them.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.writer.flush().map_err(Error::io("write to", &self.name))
    }

    /// Flushes the output, and gives a file its name.
    ///
    /// # Errors
    /// If the file cannot be written, or has appeared meanwhile and may not be replaced.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.bar.finish_and_clear();
        if let Some(part) = &self.part {
            if self.overwrites {
                fs::rename(part, &self.name).map_err(Error::io("write", &self.name))?;
            } else {
                rename_to_new(part, &self.name)?;
            }
            self.part = None;
            *PART.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        Ok(())
    }
}

/// Renames a file to a name that does not exist.
///
/// # Errors
/// If the name exists by now; both files are then unchanged.
fn rename_to_new(from: &Path, to: &Path) -> Result<()> {
    let taken = |error: io::Error| match error.kind() {
        ErrorKind::AlreadyExists => {
            let message = "the file has appeared meanwhile; choose another, or set --overwrite_output_file";
            Error::invalid(to, message)
        }
        _ => Error::io("write", to)(error),
    };
    match fs::hard_link(from, to) {
        Ok(()) => fs::remove_file(from).map_err(Error::io("remove", from)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(taken(error)),
        // Some file systems have no hard links: there a new, empty file reserves the name.
        Err(_) => {
            File::create_new(to).map_err(taken)?;
            fs::rename(from, to).map_err(Error::io("write", to))
        }
    }
}

impl Drop for Output {
    /// Keeps the rows of a file that was not finished, and prints its path; removes an empty one.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        if self.part.is_none() {
            return;
        }
        let _ = self.writer.flush();
        if let Some(note) = leave_part() {
            let _ = writeln!(io::stderr(), "{note}");
        }
    }
}

/// Fields to add to a row.
pub(super) type Fields = Vec<(&'static str, Value)>;

/// Reads the rows in parts and writes each row, in order, with the fields that `measure` returns for it. On every rank `measure` returns
/// the fields of all rows of the part; rank 0 writes. After the last part `measure` is called without one. A note is printed if
/// `tokenizer` decodes the token ids of the first row to another text than the row has.
pub(super) fn annotate(
    config: &RowsConfig,
    mut rows: RowReader,
    tokenizer: &Tokenizer,
    world: &World,
    mut measure: impl FnMut(Option<&Dataset>) -> Result<Vec<Fields>>,
) -> Result<()> {
    let typed = config.batch_size == 1 || is_typed(config, world)?;
    let at_once = if typed { 1 } else { config.batch_size.saturating_mul(BATCHES_AT_ONCE) };
    let mut out = Rows::new(config, world);
    while let Some(part) = rows.next(at_once)? {
        if out.is_empty
            && out.world.is_main()
            && let Some(note) = part.note_on_ids(tokenizer)
        {
            announce(&format!("note: {}", one_line(&note)));
        }
        let measured = measure(Some(&part))?;
        let annotated = part.rows().zip(measured).map(|(row, fields)| {
            let mut row: Map<String, Value> = row.as_object().cloned().unwrap_or_default();
            row.extend(fields.into_iter().map(|(name, value)| (name.to_string(), value)));
            Value::Object(row)
        });
        out.write(annotated)?;
    }
    measure(None)?;
    if out.finish()? { Ok(()) } else { Err(Error::invalid(rows.path(), "expected at least one row, found none")) }
}

/// The rows that a command writes: rank 0 writes them, to an output that is opened for the first of them.
pub(super) struct Rows<'c> {
    config: &'c RowsConfig,
    world: World,
    out: Option<Output>,
    is_empty: bool,
}

impl<'c> Rows<'c> {
    pub(super) fn new(config: &'c RowsConfig, world: &World) -> Self {
        Self { config, world: world.clone(), out: None, is_empty: true }
    }

    /// Writes rows, which are the same on all ranks, so that a reader sees them at once.
    ///
    /// # Errors
    /// If rank 0 cannot write them.
    pub(super) fn write(&mut self, rows: impl Iterator<Item = impl std::fmt::Display>) -> Result<()> {
        self.is_empty = false;
        let written = if self.world.is_main() { self.write_here(rows) } else { Ok(()) };
        self.world.agree(written)
    }

    fn write_here(&mut self, mut rows: impl Iterator<Item = impl std::fmt::Display>) -> Result<()> {
        let out = match &mut self.out {
            Some(out) => out,
            none => none.insert(Output::open(self.config)?),
        };
        rows.try_for_each(|row| out.write(row))?;
        out.flush()
    }

    /// Gives a file its name. Returns whether any rows were written.
    ///
    /// # Errors
    /// As [`Output::finish`], on all ranks.
    pub(super) fn finish(self) -> Result<bool> {
        let finished = self.out.map_or(Ok(()), Output::finish);
        self.world.agree(finished).map(|()| !self.is_empty)
    }
}

/// Measures the rows `0..count` of a part in `batches`, which are divided over the ranks of `world`. Returns the numbers of each row,
/// `len(row)` of them, on all ranks; `measure` returns the numbers of a batch, one row after another.
///
/// The batches do not depend on the ranks, so that each number is the same with any number of ranks.
///
/// # Errors
/// The error of `measure`, on all ranks.
pub(super) fn numbers_of_rows(
    count: usize,
    batches: &[Vec<usize>],
    len: impl Fn(usize) -> usize,
    world: &World,
    mut measure: impl FnMut(&[usize]) -> Result<Vec<f32>>,
) -> Result<Vec<Vec<f32>>> {
    let rank_batches = batches.iter().skip(world.rank()).step_by(world.size());
    let measured: Result<Vec<Vec<f32>>> = rank_batches.map(|batch| measure(batch)).collect();
    let rank_numbers: Vec<f64> = world.agree(measured)?.into_iter().flatten().map(f64::from).collect();
    let mut numbers_by_rank: Vec<_> = world.gather_numbers(&rank_numbers)?.into_iter().map(Vec::into_iter).collect();
    let mut numbers = vec![Vec::new(); count];
    for (place, batch) in batches.iter().enumerate() {
        for &row in batch {
            let row_numbers = numbers_by_rank[place % world.size()].by_ref().take(len(row));
            numbers[row] = row_numbers.map(|number| number as f32).collect();
        }
    }
    Ok(numbers)
}

/// Returns the rows `indices` in batches of similar length.
pub(super) fn batches(mut indices: Vec<usize>, batch_size: usize, len: impl Fn(usize) -> usize) -> Vec<Vec<usize>> {
    indices.sort_by_key(|&i| len(i));
    indices.chunks(batch_size).map(<[usize]>::to_vec).collect()
}

/// Copies a tensor to memory as float32.
pub(super) fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(Vec::try_from(tensor)?)
}

/// Checks that the results for the row `row` of `part` are finite.
///
/// # Errors
/// [`Error::Invalid`] with the row's place.
pub(super) fn check_finite(part: &Dataset, row: usize, numbers: &[f32]) -> Result<()> {
    if numbers.iter().all(|number| number.is_finite()) {
        return Ok(());
    }
    Err(part.error(row, "the model's numbers are not finite: its weights are damaged, or training diverged"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf::settings::GenerateConfig;
    use std::io::BufRead;

    #[test]
    fn a_file_that_appears_meanwhile_is_replaced_only_where_that_is_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        let mut config = GenerateConfig::new("policy").rows;
        config.output_file = Some(path.clone());
        let write = |config: &RowsConfig, meanwhile: Option<&str>| {
            let mut output = Output::open(config).unwrap();
            output.write("ours").unwrap();
            meanwhile.into_iter().for_each(|text| fs::write(&path, text).unwrap());
            output.finish()
        };
        let error = write(&config, Some("theirs")).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl: the file has appeared meanwhile"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "theirs");
        let kept: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let part = kept.iter().find(|kept| **kept != path).expect("the rows are kept beside it");
        assert_eq!(fs::read_to_string(part).unwrap(), "ours\n");
        fs::remove_file(part).unwrap();
        config.overwrite_output_file = true;
        write(&config, Some("theirs")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours\n");
        fs::remove_file(&path).unwrap();
        config.overwrite_output_file = false;
        write(&config, None).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "ours\n");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn each_typed_line_has_a_sign_before_it_and_the_first_end_of_input_is_final() {
        /// A terminal: one line per read, and more after an end of input.
        struct Terminal(Vec<&'static str>);
        impl Read for Terminal {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let line = self.0.remove(0);
                buffer[..line.len()].copy_from_slice(line.as_bytes());
                Ok(line.len())
            }
        }
        let mut shown = Vec::new();
        let mut lines =
            BufReader::new(Typed::new(Terminal(vec!["one\n", "tw", "o\n", "", "never read\n"]), &mut shown));
        let mut next = || {
            let mut line = String::new();
            lines.read_line(&mut line).map(|_| line).unwrap()
        };
        assert_eq!([next(), next(), next(), next()], ["one\n", "two\n", "", ""]);
        assert_eq!(String::from_utf8(shown).unwrap(), "> > > \n");
    }
}
