//! Where `generate`, `logprobs` and `score` take rows from and write them to: files and pipes, one part after another.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use rlhf::config::RowsConfig;
use rlhf::data::RowReader;
use rlhf::model::ModelOptions;
use rlhf::{Error, Result};

/// The rows of the dataset, else of standard input: JSON objects or, with `json: false`, prompts, a line each.
///
/// Refuses an output file that may not be written, before any work is done.
pub(crate) fn open_rows(config: &RowsConfig, json: bool) -> Result<RowReader> {
    check_output_file(config)?;
    match &config.dataset_name {
        Some(name) => RowReader::open(name, &config.dataset_split),
        None => Ok(RowReader::lines("standard input", BufReader::new(io::stdin()), json)),
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
    bar: indicatif::ProgressBar,
}

impl Output {
    pub(crate) fn open(path: Option<&Path>) -> Result<Self> {
        let hidden = indicatif::ProgressBar::hidden();
        let Some(path) = path else {
            let writer = Box::new(BufWriter::new(io::stdout().lock()));
            return Ok(Self { writer, name: "standard output".into(), beside: None, bar: hidden });
        };
        let mut beside = path.to_path_buf().into_os_string();
        // With the process's number: two that write the same file do not write into each other's.
        beside.push(format!(".{}.part", std::process::id()));
        let beside = PathBuf::from(beside);
        let file = File::create_new(&beside).map_err(Error::io("create", &beside))?;
        // Where rows go to a file and a person waits, a count of them on standard error.
        let bar = if io::stderr().is_terminal() { indicatif::ProgressBar::no_length() } else { hidden };
        Ok(Self { writer: Box::new(BufWriter::new(file)), name: path.to_path_buf(), beside: Some(beside), bar })
    }

    /// Writes one row, and an end of line.
    pub(crate) fn write(&mut self, row: impl std::fmt::Display) -> Result<()> {
        self.bar.inc(1);
        writeln!(self.writer, "{row}").map_err(Error::io("write to", &self.name))
    }

    /// Hands on what was written, so that a reader sees it.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.writer.flush().map_err(Error::io("write to", &self.name))
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.bar.finish_and_clear();
        match self.beside.take() {
            Some(beside) => std::fs::rename(beside, &self.name).map_err(Error::io("write", &self.name)),
            None => Ok(()),
        }
    }
}

impl Drop for Output {
    /// Of a file that was not finished keeps what is in it, and tells where; an empty one goes.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        let Some(beside) = &self.beside else { return };
        let _ = self.writer.flush();
        if std::fs::metadata(beside).is_ok_and(|file| file.len() > 0) {
            let _ = writeln!(io::stderr(), "note: the rows until then are in {}", beside.display());
        } else {
            let _ = std::fs::remove_file(beside);
        }
    }
}
