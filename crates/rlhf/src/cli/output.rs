//! Where `generate`, `logprobs` and `score` take rows from and write them to: files and pipes, one part after another.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use rlhf::data::{Columns, RowReader};
use rlhf::model::ModelOptions;
use rlhf::safe_text::{lines, one_line};
use rlhf::settings::RowsConfig;
use rlhf::terminal::{Colour, Stream};
use rlhf::{Error, Result};

/// The rows of the dataset, else of standard input: JSON objects or, with `json: false`, prompts, a line each.
///
/// Refuses an output file that may not be written, before any work is done.
pub(crate) fn open_rows(config: &RowsConfig, json: bool) -> Result<RowReader> {
    check_output_file(config)?;
    let rows = match &config.dataset_name {
        Some(name) => RowReader::open(name, &config.dataset_split)?,
        None if is_typed(config) => {
            RowReader::lines("standard input", BufReader::new(Typed::new(io::stdin(), io::stderr())), json)
        }
        None => RowReader::lines("standard input", BufReader::new(io::stdin()), json),
    };
    Ok(rows.with_columns(Columns::parse(&config.dataset_columns)?))
}

/// Whether rows come from a person at a terminal, who waits for the answer to each.
pub(crate) fn is_typed(config: &RowsConfig) -> bool {
    config.dataset_name.is_none() && io::stdin().is_terminal() && Stream::Err.width().is_some()
}

/// Lines that a person types, each after a sign that it is waited for; the end, once said, is the end.
struct Typed<R, W> {
    reader: R,
    /// Where the sign appears.
    to: W,
    /// Whether a line begins.
    begins: bool,
    ended: bool,
}

impl<R: Read, W: Write> Typed<R, W> {
    fn new(reader: R, to: W) -> Self {
        Self { reader, to, begins: true, ended: false }
    }
}

impl<R: Read, W: Write> Read for Typed<R, W> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.ended {
            // A terminal would ask once more.
            return Ok(0);
        }
        if self.begins {
            let _ = write!(self.to, "{} ", Stream::Err.paint(Colour::Bold, ">")).and_then(|()| self.to.flush());
        }
        let read = self.reader.read(buffer)?;
        self.ended = read == 0;
        if self.ended {
            let _ = writeln!(self.to);
        }
        self.begins = buffer[..read].last() == Some(&b'\n');
        Ok(read)
    }
}

fn check_output_file(config: &RowsConfig) -> Result<()> {
    let Some(path) = config.output_file.as_deref().filter(|path| path.exists()) else { return Ok(()) };
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
    if source.is_some_and(|source| path.canonicalize().is_ok_and(|path| path == source)) {
        return Err(Error::Usage(format!("output_file = {} is also the dataset", path.display())));
    }
    Ok(())
}

/// How the model is put into memory; also sets libtorch's number of threads, where one is asked for.
pub(crate) fn model_options(config: &RowsConfig) -> Result<ModelOptions> {
    rlhf::device::use_threads(config.num_threads);
    Ok(ModelOptions { device: config.device.resolve()?, dtype: config.dtype, ..ModelOptions::default() })
}

/// Standard output, or a file, which appears whole when everything is in it.
pub(crate) struct Output {
    writer: Box<dyn Write>,
    name: PathBuf,
    /// The file that is written, until it gets its name.
    beside: Option<PathBuf>,
    /// Whether it may take the place of another file.
    overwrites: bool,
    /// Whether a terminal shows the rows.
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
            return Ok(Self {
                writer,
                name: "standard output".into(),
                beside: None,
                overwrites,
                terminal,
                bar: hidden,
            });
        };
        let mut beside = path.clone().into_os_string();
        // With the process's number: two that write the same file do not write into each other's.
        beside.push(format!(".{}.part", std::process::id()));
        let beside = PathBuf::from(beside);
        let file = File::create_new(&beside).map_err(Error::io("create", &beside))?;
        // Where rows go to a file and a person waits, a count of them on standard error.
        let bar = if io::stderr().is_terminal() { indicatif::ProgressBar::no_length() } else { hidden };
        let writer = Box::new(BufWriter::new(file));
        Ok(Self { writer, name: path.clone(), beside: Some(beside), overwrites, terminal: false, bar })
    }

    /// Writes one row, and an end of line.
    pub(crate) fn write(&mut self, row: impl std::fmt::Display) -> Result<()> {
        self.bar.inc(1);
        let written = match self.terminal {
            // What a model answers may hold escape sequences.
            true => writeln!(self.writer, "{}", lines(&row.to_string())),
            false => writeln!(self.writer, "{row}"),
        };
        written.map_err(Error::io("write to", &self.name))
    }

    /// Hands on what was written, so that a reader sees it.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.writer.flush().map_err(Error::io("write to", &self.name))
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.bar.finish_and_clear();
        if let Some(beside) = &self.beside {
            match self.overwrites {
                true => fs::rename(beside, &self.name).map_err(Error::io("write", &self.name))?,
                false => rename_to_new(beside, &self.name)?,
            }
            self.beside = None;
        }
        Ok(())
    }
}

/// Gives a file a name that no other has.
///
/// # Errors
/// If one has it by now; then both stay as they are.
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
        // Some file systems have no such links: there a new and empty file holds the name.
        Err(_) => {
            File::create_new(to).map_err(taken)?;
            fs::rename(from, to).map_err(Error::io("write", to))
        }
    }
}

impl Drop for Output {
    /// Of a file that was not finished keeps what is in it, and tells where; an empty one goes.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        let Some(beside) = &self.beside else { return };
        let _ = self.writer.flush();
        if fs::metadata(beside).is_ok_and(|file| file.len() > 0) {
            let name = beside.display().to_string();
            let _ = writeln!(io::stderr(), "note: the rows until then are in {}", one_line(&name));
        } else {
            let _ = fs::remove_file(beside);
        }
    }
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
    fn each_typed_line_has_a_sign_before_it_and_one_end_of_input_is_the_end() {
        /// A terminal: a line at a time, and after each end of input more.
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
            BufReader::new(Typed::new(Terminal(vec!["one\n", "tw", "o\n", "", "never asked for\n"]), &mut shown));
        let mut next = || {
            let mut line = String::new();
            lines.read_line(&mut line).map(|_| line).unwrap()
        };
        assert_eq!([next(), next(), next(), next()], ["one\n", "two\n", "", ""]);
        assert_eq!(String::from_utf8(shown).unwrap(), "> > > \n");
    }
}
