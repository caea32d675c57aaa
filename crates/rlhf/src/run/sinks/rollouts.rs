//! The sink of `rollouts/`: all responses of an update as a Parquet file.

use crate::run::event::{Event, Rollout, RolloutTurns};
use crate::run::output_dir::{ROLLOUTS, remove_files, rollout_update};
use crate::run::rollout_file::{RECORD, digest_entry, file_name};
use parquet::basic::{Compression, LogicalType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, FloatType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::Type;
use rlhf_base::weights::write_bytes;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::FinishReason;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Writes the responses of updates to files in `rollouts/`, one file per update.
pub(crate) struct RolloutFiles {
    dir: PathBuf,
}

impl RolloutFiles {
    /// Opens the folder `rollouts` in `dir`, and removes the files of later updates than `updates`.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub(crate) fn open(dir: &Path, updates: usize) -> Result<Self> {
        let dir = dir.join(ROLLOUTS);
        if dir.is_dir() {
            remove_files(&dir, |name| rollout_update(name).is_some_and(|update| update > updates))?;
        }
        Ok(Self { dir })
    }

    /// Writes the rollout of an update, and then removes those of old updates beyond its limit.
    ///
    /// # Errors
    /// If the file cannot be written, or an old one not be removed.
    pub(crate) fn receive(&mut self, event: &Event<'_>) -> Result<()> {
        let Event::Rollout { step, limit, rollout } = event else { return Ok(()) };
        std::fs::create_dir_all(&self.dir).map_err(Error::io("create the folder", &self.dir))?;
        let path = self.dir.join(file_name(*step));
        let bytes = parquet_file(&columns(*step, rollout), &rollout.record);
        let bytes = bytes.map_err(|e| Error::invalid(&path, format!("cannot be written as Parquet: {e}")))?;
        write_bytes(&path, &bytes)?;
        let Some(limit) = limit else { return Ok(()) };
        remove_files(&self.dir, |name| rollout_update(name).is_some_and(|update| update + limit <= *step))
    }
}

/// A column with its name.
type Column<'a> = (&'a str, Values<'a>);

/// Values of a column, one per row.
enum Values<'a> {
    Numbers(Vec<i64>),
    Texts(Vec<&'a str>),
    /// Texts that were made for the file.
    MadeTexts(Vec<String>),
    /// Null where there is none.
    Scores(Vec<Option<f64>>),
    /// Named scores in one struct.
    Struct(Vec<(&'a str, Vec<Option<f64>>)>),
    Ids(Vec<&'a [i64]>),
    /// Lists of numbers that were made for the file.
    Made(Vec<Vec<i64>>),
    Floats(Vec<&'a [f32]>),
    Doubles(Vec<&'a [f64]>),
}

/// Returns the columns of the rollout of update `step`.
fn columns(step: usize, rollout: &Rollout) -> Vec<Column<'_>> {
    let rows = &rollout.rows;
    let numbers =
        |value: &dyn Fn(usize) -> usize| Values::Numbers((0..rows.len()).map(|row| value(row) as i64).collect());
    let finish = |finish| match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    };
    let names = rows.first().into_iter().flat_map(|row| row.components.iter().map(|(name, _)| name.as_str()));
    let components = names.enumerate().map(|(at, name)| {
        (name, rows.iter().map(|row| row.components.get(at).and_then(|(_, score)| *score)).collect())
    });
    let components: Vec<(&str, Vec<Option<f64>>)> = components.collect();
    let mut columns = vec![
        ("step", numbers(&|_| step)),
        ("row", numbers(&|row| row)),
        ("group", numbers(&|row| rows[row].group)),
        ("prompt_row", numbers(&|row| rows[row].prompt_row)),
        ("prompt", Values::Texts(rows.iter().map(|row| row.prompt.as_str()).collect())),
        ("response", Values::Texts(rows.iter().map(|row| row.response.as_str()).collect())),
        ("finish_reason", Values::Texts(rows.iter().map(|row| finish(row.finish_reason)).collect())),
        ("score", Values::Scores(rows.iter().map(|row| row.score).collect())),
    ];
    // A struct has at least one field.
    columns.extend((!components.is_empty()).then_some(("components", Values::Struct(components))));
    columns.push(("token_ids", Values::Ids(rows.iter().map(|row| row.token_ids.as_slice()).collect())));
    columns.push(("logprobs", Values::Floats(rows.iter().map(|row| row.logprobs.as_slice()).collect())));
    let reference: Option<Vec<&[f32]>> = rows.iter().map(|row| row.ref_logprobs.as_deref()).collect();
    let values: Option<Vec<&[f32]>> = rows.iter().map(|row| row.values.as_deref()).collect();
    columns.extend(reference.map(|reference| ("ref_logprobs", Values::Floats(reference))));
    columns.extend(values.map(|values| ("values", Values::Floats(values))));
    columns.push(("advantages", Values::Floats(rows.iter().map(|row| row.advantages.as_slice()).collect())));
    columns.push(("reward", Values::Scores(rows.iter().map(|row| Some(row.reward)).collect())));
    columns.push(("raw_score", Values::Scores(rows.iter().map(|row| Some(row.raw_score)).collect())));
    let token_scores: Option<Vec<&[f64]>> = rows.iter().map(|row| row.token_scores.as_deref()).collect();
    columns.extend(token_scores.map(|scores| ("token_scores", Values::Doubles(scores))));
    if rows.iter().any(|row| row.baseline.is_some()) {
        columns.push(("baseline", Values::Scores(rows.iter().map(|row| row.baseline).collect())));
    }
    let kept: Option<Vec<&Vec<Vec<i64>>>> = rows.iter().map(|row| row.kept_ids.as_ref()).collect();
    if let Some(kept) = kept {
        let counts = kept.iter().map(|row| row.iter().map(|ids| ids.len() as i64).collect()).collect();
        columns.push(("kept_counts", Values::Made(counts)));
        columns.push(("kept_ids", Values::Made(kept.iter().map(|row| row.concat()).collect())));
    }
    let turns: Option<Vec<&RolloutTurns>> = rows.iter().map(|row| row.turns.as_ref()).collect();
    columns.extend(turns.into_iter().flat_map(|turns| turn_columns(&turns)));
    columns
}

/// Returns the columns of a rollout with an environment.
fn turn_columns<'a>(turns: &[&'a RolloutTurns]) -> [Column<'a>; 6] {
    let count =
        |value: fn(&RolloutTurns) -> usize| Values::Numbers(turns.iter().map(|turns| value(turns) as i64).collect());
    let spans =
        |turns: &&RolloutTurns| turns.inserted.iter().flat_map(|span| [span.start as i64, span.end as i64]).collect();
    let messages = turns.iter().map(|turns| Value::from(turns.messages.as_slice()).to_string());
    [
        ("prompt_ids", Values::Ids(turns.iter().map(|turns| turns.prompt_ids.as_slice()).collect())),
        ("inserted", Values::Made(turns.iter().map(spans).collect())),
        ("messages", Values::MadeTexts(messages.collect())),
        ("tool_calls", count(|turns| turns.calls)),
        ("tool_failures", count(|turns| turns.failures)),
        ("env_reward", Values::Scores(turns.iter().map(|turns| turns.reward).collect())),
    ]
}

/// Returns the bytes of a Parquet file with these columns, in one row group, with the `record` and a digest of both in its metadata.
fn parquet_file(columns: &[Column<'_>], record: &Value) -> Result<Vec<u8>, ParquetError> {
    let fields = columns.iter().map(|(name, values)| values.schema(name).map(Arc::new)).collect::<Result<_, _>>()?;
    let schema = Type::group_type_builder("rollout").with_fields(fields).build()?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_created_by(format!("rlhf version {}", env!("CARGO_PKG_VERSION")))
        .build();
    let mut file = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties))?;
    let mut group = file.next_row_group()?;
    columns.iter().try_for_each(|(_, values)| values.write(&mut group))?;
    group.close()?;
    if !record.is_null() {
        file.flush()?;
        let record = record.to_string();
        let (key, digest) = digest_entry(file.inner(), &record);
        file.append_key_value_metadata(KeyValue::new(RECORD.into(), record));
        file.append_key_value_metadata(KeyValue::new(key, digest));
    }
    file.into_inner()
}

type Group<'a> = SerializedRowGroupWriter<'a, Vec<u8>>;

impl Values<'_> {
    /// Returns the type of the column `name`.
    fn schema(&self, name: &str) -> Result<Type, ParquetError> {
        let leaf = |name: &str, physical, repetition| {
            Type::primitive_type_builder(name, physical).with_repetition(repetition).build()
        };
        let list = |physical| {
            let element = Arc::new(leaf("element", physical, Repetition::REQUIRED)?);
            let list =
                Type::group_type_builder("list").with_repetition(Repetition::REPEATED).with_fields(vec![element]);
            Type::group_type_builder(name)
                .with_repetition(Repetition::REQUIRED)
                .with_logical_type(Some(LogicalType::List))
                .with_fields(vec![Arc::new(list.build()?)])
                .build()
        };
        match self {
            Self::Numbers(_) => leaf(name, Physical::INT64, Repetition::REQUIRED),
            Self::Texts(_) | Self::MadeTexts(_) => Type::primitive_type_builder(name, Physical::BYTE_ARRAY)
                .with_repetition(Repetition::REQUIRED)
                .with_logical_type(Some(LogicalType::String))
                .build(),
            Self::Scores(_) => leaf(name, Physical::DOUBLE, Repetition::OPTIONAL),
            Self::Struct(fields) => {
                let field = |(name, _): &(&str, _)| leaf(name, Physical::DOUBLE, Repetition::OPTIONAL).map(Arc::new);
                let fields = fields.iter().map(field).collect::<Result<_, _>>()?;
                Type::group_type_builder(name).with_repetition(Repetition::REQUIRED).with_fields(fields).build()
            }
            Self::Ids(_) | Self::Made(_) => list(Physical::INT64),
            Self::Floats(_) => list(Physical::FLOAT),
            Self::Doubles(_) => list(Physical::DOUBLE),
        }
    }

    /// Writes the values as the next columns of the row group.
    fn write(&self, group: &mut Group<'_>) -> Result<(), ParquetError> {
        match self {
            Self::Numbers(numbers) => write_leaf::<Int64Type>(group, numbers, None, None),
            Self::Texts(texts) => {
                let texts: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(*text)).collect();
                write_leaf::<ByteArrayType>(group, &texts, None, None)
            }
            Self::MadeTexts(texts) => Values::Texts(texts.iter().map(String::as_str).collect()).write(group),
            Self::Scores(scores) => write_scores(group, scores),
            Self::Struct(fields) => fields.iter().try_for_each(|(_, scores)| write_scores(group, scores)),
            Self::Ids(lists) => write_lists::<Int64Type>(group, lists),
            Self::Made(lists) => write_lists::<Int64Type>(group, &lists.iter().map(Vec::as_slice).collect::<Vec<_>>()),
            Self::Floats(lists) => write_lists::<FloatType>(group, lists),
            Self::Doubles(lists) => write_lists::<DoubleType>(group, lists),
        }
    }
}

fn write_scores(group: &mut Group<'_>, scores: &[Option<f64>]) -> Result<(), ParquetError> {
    let present: Vec<f64> = scores.iter().copied().flatten().collect();
    let definitions: Vec<i16> = scores.iter().map(|score| i16::from(score.is_some())).collect();
    write_leaf::<DoubleType>(group, &present, Some(&definitions), None)
}

/// Writes lists without nulls: the repetition level is 0 at the start of a list, and the definition level is 0 for an empty one.
fn write_lists<T: DataType>(group: &mut Group<'_>, lists: &[&[T::T]]) -> Result<(), ParquetError> {
    let (mut definitions, mut repetitions) = (Vec::new(), Vec::new());
    for list in lists {
        definitions.extend(std::iter::repeat_n(i16::from(!list.is_empty()), list.len().max(1)));
        repetitions.push(0);
        repetitions.extend(std::iter::repeat_n(1, list.len().saturating_sub(1)));
    }
    write_leaf::<T>(group, &lists.concat(), Some(&definitions), Some(&repetitions))
}

/// Writes the next column of primitive values.
fn write_leaf<T: DataType>(
    group: &mut Group<'_>,
    values: &[T::T],
    definitions: Option<&[i16]>,
    repetitions: Option<&[i16]>,
) -> Result<(), ParquetError> {
    let missing = || ParquetError::General("the schema has too few columns".into());
    let mut column = group.next_column()?.ok_or_else(missing)?;
    column.typed::<T>().write_batch(values, definitions, repetitions)?;
    column.close()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::event::RolloutRow;
    use parquet::file::reader::{FileReader, SerializedFileReader};

    fn rows(path: &Path) -> Vec<String> {
        let reader = SerializedFileReader::new(std::fs::File::open(path).unwrap()).unwrap();
        reader.get_row_iter(None).unwrap().map(|row| row.unwrap().to_string()).collect()
    }

    fn row(response: &str, len: usize, score: Option<f64>) -> RolloutRow {
        RolloutRow {
            group: 0,
            prompt_row: 7,
            prompt: "a \"prompt\"".into(),
            response: response.into(),
            token_ids: (0..len as i64).collect(),
            finish_reason: if len > 1 { FinishReason::Length } else { FinishReason::Stop },
            score,
            components: vec![("length".into(), Some(0.5)), ("model:a b.c".into(), score)],
            logprobs: vec![-0.5; len],
            ref_logprobs: None,
            values: Some(vec![0.25; len + 1]),
            advantages: vec![1.5; len],
            reward: 0.75,
            raw_score: 0.25,
            token_scores: None,
            baseline: None,
            kept_ids: None,
            turns: None,
        }
    }

    #[test]
    fn a_file_holds_every_row_with_lists_of_any_length_and_missing_scores() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = RolloutFiles::open(dir.path(), 0).unwrap();
        let rollout = Rollout {
            rows: vec![row("two", 2, Some(1.0)), row("", 0, None), row("é", 1, Some(-2.0))],
            ..Rollout::default()
        };
        files.receive(&Event::Rollout { step: 3, limit: None, rollout: &rollout }).unwrap();
        let found = rows(&dir.path().join("rollouts/update-000003.parquet"));
        assert_eq!(
            found,
            [
                "{step: 3, row: 0, group: 0, prompt_row: 7, prompt: \"a \"prompt\"\", response: \"two\", finish_reason: \"length\", \
                 score: 1.0, components: {length: 0.5, model:a b.c: 1.0}, token_ids: [0, 1], logprobs: [-5E-1, -5E-1], \
                 values: [0.25, 0.25, 0.25], advantages: [1.5, 1.5], reward: 0.75, raw_score: 0.25}",
                "{step: 3, row: 1, group: 0, prompt_row: 7, prompt: \"a \"prompt\"\", response: \"\", finish_reason: \"stop\", \
                 score: null, components: {length: 0.5, model:a b.c: null}, token_ids: [], logprobs: [], values: [0.25], \
                 advantages: [], reward: 0.75, raw_score: 0.25}",
                "{step: 3, row: 2, group: 0, prompt_row: 7, prompt: \"a \"prompt\"\", response: \"é\", finish_reason: \"stop\", \
                 score: -2E0, components: {length: 0.5, model:a b.c: -2E0}, token_ids: [0], logprobs: [-5E-1], \
                 values: [0.25, 0.25], advantages: [1.5], reward: 0.75, raw_score: 0.25}",
            ]
        );
    }

    #[test]
    fn the_newest_files_are_kept_and_those_after_a_checkpoint_are_removed_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let names = || {
            let mut names: Vec<String> = std::fs::read_dir(dir.path().join(ROLLOUTS))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort_unstable();
            names
        };
        let rollout = Rollout { rows: vec![row("two", 2, None)], ..Rollout::default() };
        let mut files = RolloutFiles::open(dir.path(), 0).unwrap();
        assert!(!dir.path().join(ROLLOUTS).exists());
        for step in 1..=4 {
            files.receive(&Event::Rollout { step, limit: Some(3), rollout: &rollout }).unwrap();
        }
        std::fs::write(dir.path().join("rollouts/mine.parquet"), "").unwrap();
        let file_names = |steps: std::ops::RangeInclusive<usize>| -> Vec<String> {
            let files = steps.map(|step| format!("update-{step:06}.parquet"));
            std::iter::once("mine.parquet".into()).chain(files).collect()
        };
        assert_eq!(names(), file_names(2..=4));
        RolloutFiles::open(dir.path(), 3).unwrap();
        assert_eq!(names(), file_names(2..=3));
    }
}
