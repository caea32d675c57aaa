//! Rows as a stream.

use super::columns::Columns;
use super::dataset::Dataset;
use super::files::Files;
use super::formats::{format, next_line, open_text};
use super::row::{Place, Row};
use rlhf_base::Result;
use serde_json::json;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Reads rows in batches from a file or a pipe; only the current batch is in memory.
pub struct RowReader {
    name: PathBuf,
    source: RowSource,
    columns: Columns,
}

enum RowSource {
    /// One JSON object or prompt per line, and the number of lines read.
    Lines { file: Arc<Path>, reader: Box<dyn BufRead>, json: bool, read: usize },
    /// Rows that were loaded as a whole.
    Rows(std::vec::IntoIter<Row>),
}

impl RowReader {
    /// Opens the files that [`Dataset::read`] reads. A single JSONL file is streamed; anything else is loaded as a whole.
    ///
    /// # Errors
    /// If there is no such file, or a file that cannot be streamed is malformed.
    pub fn open(name: &Path, split: &str) -> Result<Self> {
        Self::of_files(&Files::find(name, None, split)?)
    }

    /// Reads the rows of these files.
    ///
    /// # Errors
    /// The errors of [`RowReader::open`].
    pub fn of_files(files: &Files) -> Result<Self> {
        let columns = Columns::default();
        let whole = |path: &Path| matches!(format(path), Some("json" | "csv" | "parquet"));
        match files.paths.as_slice() {
            [path] if !whole(path) => Ok(Self::lines(path, open_text(path)?, true)),
            _ => {
                let Dataset { name, rows } = Dataset::from_files(files)?;
                Ok(Self { name, source: RowSource::Rows(rows.into_iter()), columns })
            }
        }
    }

    /// Reads one JSON object per line, or one prompt per line with `json: false`. Errors use `name` for the source.
    pub fn lines(name: impl Into<PathBuf>, reader: impl BufRead + 'static, json: bool) -> Self {
        let name = name.into();
        let file = name.as_path().into();
        let source = RowSource::Lines { file, reader: Box::new(reader), json, read: 0 };
        Self { name, source, columns: Columns::default() }
    }

    /// Reads prompts given as arguments of the command line.
    pub fn arguments(prompts: &[String]) -> Self {
        let file: Arc<Path> = Path::new("prompt").into();
        let row =
            |(at, prompt)| Row { file: file.clone(), place: Place::Argument(at), value: json!({"prompt": prompt}) };
        let rows: Vec<Row> = (1..).zip(prompts).map(row).collect();
        Self { name: "prompt".into(), source: RowSource::Rows(rows.into_iter()), columns: Columns::default() }
    }

    /// Reads the fields of all rows from other columns.
    #[must_use]
    pub fn with_columns(mut self, columns: Columns) -> Self {
        self.columns = columns;
        self
    }

    /// Returns the next rows, at most `count` of them, or `None` at the end. Blank lines are skipped.
    ///
    /// # Errors
    /// If the source cannot be read, a line is malformed, or a row lacks one of the columns.
    pub fn next(&mut self, count: usize) -> Result<Option<Dataset>> {
        let mut rows = Vec::new();
        while rows.len() < count {
            let row = match &mut self.source {
                RowSource::Rows(rows) => rows.next(),
                RowSource::Lines { file, reader, json, read } => next_line(file, reader, *json, read)?,
            };
            let Some(mut row) = row else { break };
            self.columns.apply(&mut row)?;
            rows.push(row);
        }
        Ok((!rows.is_empty()).then(|| Dataset { name: self.name.clone(), rows }))
    }

    /// The file, or the name of the source in errors.
    pub fn path(&self) -> &Path {
        &self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All rows of a reader, read `count` at a time.
    fn drain(mut reader: RowReader, count: usize) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        while let Some(part) = reader.next(count)? {
            assert!(part.rows.len() <= count);
            rows.extend(part.rows);
        }
        Ok(rows)
    }

    #[test]
    fn rows_are_the_same_for_every_batch_size_and_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        std::fs::write(&path, "\u{feff}{\"a\": 1}\r\n\n  \n{\"a\": 2}\n{\"a\": 3}").unwrap();
        let array = dir.path().join("a.json");
        std::fs::write(&array, "[{\"a\": 1}, {\"a\": 2}]").unwrap();
        for count in 1..5 {
            let rows = drain(RowReader::open(&path, "test").unwrap(), count).unwrap();
            assert_eq!(rows, Dataset::read(&path, "test").unwrap().rows);
            let rows = drain(RowReader::open(&array, "test").unwrap(), count).unwrap();
            assert_eq!(rows, Dataset::read(&array, "test").unwrap().rows);
        }
    }

    #[test]
    fn lines_of_text_are_prompts_without_their_line_ending() {
        let rows = drain(RowReader::lines("pipe", &b" {\"x\"  \r\n\n\ty"[..], false), 2).unwrap();
        let prompt =
            |line, text: &str| Row::new(&Path::new("pipe").into(), Place::Line(line), json!({"prompt": text})).unwrap();
        assert_eq!(rows, [prompt(1, " {\"x\"  "), prompt(3, "\ty")]);
        let error = drain(RowReader::lines("pipe", &b"x\n\xff\n"[..], false), 9).unwrap_err().to_string();
        assert_eq!(error, "pipe: line 2: expected UTF-8, found bytes of another encoding");
    }

    #[test]
    fn columns_are_renamed_in_streamed_rows() {
        let source = &b"{\"n\": 0}\n{\"n\": 1}\n{\"n\": 2}\n{\"n\": 3}\n"[..];
        let columns = Columns::parse(&["prompt=n".into()]).unwrap();
        let rows = drain(RowReader::lines("pipe", source, true).with_columns(columns), 3).unwrap();
        assert_eq!(rows[3].value, json!({"n": 3, "prompt": 3}));
    }
}
