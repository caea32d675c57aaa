//! The datasets of a run: training rows, evaluation rows, and each stage's share of them.

use super::columns::Columns;
use super::dataset::Dataset;
use super::files::Files;
use super::row::Row;
use super::settings::{DataConfig, DataSplit, Stage, TEST};
use rlhf_base::rng::{Purpose, Stream};
use rlhf_base::{Error, Result};
use std::path::{Path, PathBuf};

/// The files of a training run's datasets, located before anything slow starts.
#[derive(Debug)]
pub struct Sources<'c> {
    config: &'c DataConfig,
    train: Vec<Files>,
    eval: Vec<Files>,
}

impl<'c> Sources<'c> {
    /// Finds the files for training and evaluation. Evaluation uses `eval_dataset` if given (its folder `dataset_config`, if that has the
    /// test split), else the test split of every dataset that has one, unless that is the split to train on.
    ///
    /// # Errors
    /// The errors of [`Files::find`]; if no dataset has the test split that is set, or `eval_split_size` is set and there is a test split.
    pub fn find(config: &'c DataConfig, eval_dataset: Option<&Path>) -> Result<Self> {
        let folder = config.dataset_config.as_deref();
        let train_split = &config.dataset_train_split;
        let test_split = &config.dataset_test_split;
        let names = &config.dataset_name;
        let train_flag = "dataset_train_split";
        let test_flag = "dataset_test_split";
        let train = |name: &PathBuf| Files::find_by_flag(name, folder, train_split, train_flag);
        let train = names.iter().map(train).collect::<Result<_>>()?;
        if let Some(name) = eval_dataset {
            let in_folder = folder.map(|_| Files::find_optional(name, folder, test_split)).transpose()?.flatten();
            let eval = in_folder.map_or_else(|| Files::find_by_flag(name, None, test_split, test_flag), Ok)?;
            return Ok(Self { config, train, eval: vec![eval] });
        }
        let mut eval = Vec::new();
        // An evaluation on training rows would be meaningless, so the training split is not used for it.
        let splits_differ = train_split != test_split;
        for name in names.iter().filter(|_| splits_differ) {
            eval.extend(Files::find_optional(name, folder, test_split)?);
        }
        match (config.eval_split_size, names.iter().find(|name| !name.is_file())) {
            (Some(size), _) if !eval.is_empty() => {
                return Err(Error::refused(
                    "eval_split_size",
                    format!(
                        " = {size} takes rows to evaluate on from the training rows, and {} has a split \
                     `{test_split}` for that: leave eval_split_size out",
                        eval[0].name.display()
                    ),
                ));
            }
            // A split that was set must exist. A file has no splits, and `test` is only the default.
            (None, Some(name)) if eval.is_empty() && splits_differ && test_split != TEST => {
                Files::find_by_flag(name, folder, test_split, test_flag)?;
            }
            _ => {}
        }
        Ok(Self { config, train, eval })
    }

    /// Returns true if there are rows to evaluate on.
    pub fn has_eval(&self) -> bool {
        !self.eval.is_empty() || self.config.eval_split_size.is_some()
    }

    /// Returns the split of the datasets that is most likely one to evaluate on, for messages.
    pub(crate) fn likely_eval_split(&self) -> Option<String> {
        let folder = self.config.dataset_config.as_deref();
        let train_split = &self.config.dataset_train_split;
        self.config.dataset_name.iter().find_map(|name| Files::likely_eval_split(name, folder, train_split))
    }

    /// Reads the training rows, one dataset per source, and the evaluation rows. With `eval_split_size`, `seed` selects the
    /// training rows that are held out for evaluation. With `data_split`, only the share of `stage` is read.
    ///
    /// # Errors
    /// If a file is malformed, or no training rows would be left.
    pub fn read(&self, seed: u64, stage: Stage) -> Result<(Vec<Dataset>, Option<Dataset>)> {
        let columns = Columns::parse(&self.config.dataset_columns)?;
        let read = |files: &Vec<Files>| -> Result<Vec<_>> {
            files.iter().map(|files| Dataset::from_files(files)?.with_columns(&columns)).collect()
        };
        let mut train = read(&self.train)?;
        let eval = read(&self.eval)?;
        if let Some(split) = self.config.data_split {
            train.iter_mut().try_for_each(|dataset| keep_share(dataset, split, self.config.data_split_seed, stage))?;
        }
        let eval = match self.config.eval_split_size {
            Some(size) if eval.is_empty() => Some(hold_out(&mut train, size, seed)?),
            _ => eval.into_iter().reduce(Dataset::and),
        };
        Ok((train, eval))
    }
}

/// Keeps the rows of the share of `stage`, in order. The shares depend on the seed and the number of rows only, not on the
/// other datasets of the run.
fn keep_share(dataset: &mut Dataset, split: DataSplit, seed: u64, stage: Stage) -> Result<()> {
    let all = dataset.rows.len();
    let mut kept = vec![false; all];
    let order = Stream::new(seed, Purpose::DataSplit, 0, 0).permutation(all);
    order[split.share(stage, all)].iter().for_each(|&row| kept[row] = true);
    let mut kept = kept.into_iter();
    dataset.rows.retain(|_| kept.next() == Some(true));
    if dataset.rows.is_empty() {
        let name = dataset.name.display();
        return Err(Error::refused(
            "data_split",
            format!(" = {split} leaves none of {all} rows of {name} for {stage}"),
        ));
    }
    Ok(())
}

/// Moves rows from `train` to an evaluation set: `size` rows, or this fraction of all rows if it is below 1. The seed selects
/// the rows.
fn hold_out(train: &mut [Dataset], size: f64, seed: u64) -> Result<Dataset> {
    let all: usize = train.iter().map(|dataset| dataset.rows.len()).sum();
    let count = if size < 1.0 { (size * all as f64).ceil() as usize } else { size as usize };
    let mut is_held_out = vec![false; all];
    Stream::new(seed, Purpose::HeldOut, 0, 0)
        .permutation(all)
        .into_iter()
        .take(count)
        .for_each(|row| is_held_out[row] = true);
    let mut is_held_out = is_held_out.into_iter();
    let mut taken: Vec<Row> = Vec::new();
    for dataset in &mut *train {
        let rows = std::mem::take(&mut dataset.rows);
        let (out, left): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|_| is_held_out.next() == Some(true));
        dataset.rows = left;
        taken.extend(out);
        if dataset.rows.is_empty() {
            let name = dataset.name.display();
            return Err(Error::refused("eval_split_size", format!(" = {size} leaves no row of {name} to train on")));
        }
    }
    let names = train.iter().map(|dataset| dataset.name.display().to_string()).collect::<Vec<_>>().join(", ");
    Ok(Dataset { name: format!("rows held out from {names}").into(), rows: taken })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data settings for these files.
    fn config(names: &[&Path]) -> DataConfig {
        let mut data: DataConfig = rlhf_base::schema::defaults();
        data.dataset_name = names.iter().map(|name| name.to_path_buf()).collect();
        data
    }

    /// Writes a file with one row per number of `range`.
    fn numbered(dir: &Path, name: &str, range: std::ops::Range<i64>) -> PathBuf {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, range.map(|n| format!("{{\"n\": {n}}}\n")).collect::<String>()).unwrap();
        path
    }

    fn numbers(datasets: &[Dataset]) -> Vec<i64> {
        datasets.iter().flat_map(Dataset::rows).map(|row| row["n"].as_i64().unwrap()).collect()
    }

    #[test]
    fn held_out_rows_are_not_trained_on_and_depend_on_the_seed() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (numbered(dir.path(), "a.jsonl", 0..70), numbered(dir.path(), "b.jsonl", 70..100));
        let mut data = config(&[&a, &b]);
        let eval_numbers = |data: &DataConfig, seed| {
            let (train, eval) = Sources::find(data, None).unwrap().read(seed, Stage::Sft).unwrap();
            let (train, eval) = (numbers(&train), numbers(&[eval.unwrap()]));
            let mut all = [&train[..], &eval[..]].concat();
            all.sort_unstable();
            assert_eq!(all, Vec::from_iter(0..100), "every row once, on one side");
            assert!(train.is_sorted(), "training rows stay in order");
            eval
        };
        for (size, count) in [(0.1, 10), (0.001, 1), (1.0, 1), (25.0, 25)] {
            data.eval_split_size = Some(size);
            let eval = eval_numbers(&data, 1);
            assert_eq!(eval.len(), count, "{size}");
            assert_eq!(eval, eval_numbers(&data, 1));
        }
        assert_ne!(eval_numbers(&data, 1), eval_numbers(&data, 2));
        data.eval_split_size = Some(100.0);
        let error = Sources::find(&data, None).unwrap().read(1, Stage::Sft).unwrap_err().to_string();
        assert!(error.contains("eval_split_size = 100 leaves no row of") && error.contains("a.jsonl"), "{error}");
        data.eval_split_size = None;
        assert!(Sources::find(&data, None).unwrap().read(1, Stage::Sft).unwrap().1.is_none());
    }

    #[test]
    fn a_dataset_for_evaluation_is_read_in_the_configured_folder_if_it_has_that() {
        let dir = tempfile::tempdir().unwrap();
        numbered(dir.path(), "both/main/train.jsonl", 0..1);
        numbered(dir.path(), "both/main/test.jsonl", 1..2);
        numbered(dir.path(), "both/other/test.jsonl", 2..3);
        numbered(dir.path(), "plain/test.jsonl", 3..4);
        let (both, plain) = (dir.path().join("both"), dir.path().join("plain"));
        let mut data = config(&[&both]);
        data.dataset_config = Some("main".into());
        let numbers_in = |eval: &Path| {
            let (train, eval) = Sources::find(&data, Some(eval)).unwrap().read(1, Stage::Sft).unwrap();
            (numbers(&train), numbers(&[eval.unwrap()]))
        };
        assert_eq!(numbers_in(&both), (vec![0], vec![1]));
        assert_eq!(numbers_in(&plain), (vec![0], vec![3]));
        assert_eq!(numbers_in(&plain.join("test.jsonl")), (vec![0], vec![3]));
    }

    #[test]
    fn the_shares_of_the_three_stages_are_disjoint_and_independent_of_the_other_datasets() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (numbered(dir.path(), "a.jsonl", 0..50), numbered(dir.path(), "b.jsonl", 50..60));
        let shares = |names: &[&Path], seed: u64, split_seed: u64| {
            let mut data = config(names);
            data.data_split = Some("2,4,4".parse().unwrap());
            data.data_split_seed = split_seed;
            Stage::ALL.map(|stage| numbers(&Sources::find(&data, None).unwrap().read(seed, stage).unwrap().0))
        };
        let both = shares(&[&a, &b], 1, 42);
        assert_eq!(both.each_ref().map(Vec::len), [10 + 2, 20 + 4, 20 + 4]);
        assert!(both.iter().all(|share| share.is_sorted()), "rows stay in order");
        let mut all = both.concat();
        all.sort_unstable();
        assert_eq!(all, Vec::from_iter(0..60), "every row in one share");
        // Neither the run's seed nor the other datasets change the shares; data_split_seed does.
        assert_eq!(both, shares(&[&a, &b], 2, 42));
        let alone = shares(&[&a], 1, 42).map(|share| share.into_iter().collect::<std::collections::BTreeSet<_>>());
        for (alone, both) in alone.iter().zip(&both) {
            assert!(both.iter().filter(|&&n| n < 50).eq(alone), "{alone:?} {both:?}");
        }
        assert_ne!(both, shares(&[&a, &b], 1, 43));
        // Held-out rows come from the share.
        let mut data = config(&[&a]);
        (data.data_split, data.eval_split_size) = (Some("2,4,4".parse().unwrap()), Some(3.0));
        let (train, eval) = Sources::find(&data, None).unwrap().read(1, Stage::Sft).unwrap();
        let mut found = [numbers(&train), numbers(&[eval.unwrap()])].concat();
        found.sort_unstable();
        assert_eq!((numbers(&train).len(), found), (7, Vec::from_iter(alone[0].clone())));
        data.data_split = Some("0,1,1".parse().unwrap());
        let error = Sources::find(&data, None).unwrap().read(1, Stage::Sft).unwrap_err().to_string();
        assert!(
            error.starts_with("data_split = 0,1,1 leaves none of 50 rows of ") && error.ends_with("for sft"),
            "{error}"
        );
    }

    #[test]
    fn the_test_split_is_used_for_evaluation_if_there_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("folder");
        numbered(&folder, "train-00001-of-00002.jsonl", 3..5);
        numbered(&folder, "train-00000-of-00002.jsonl", 0..3);
        numbered(&folder, "test.jsonl", 5..7);
        let file = numbered(dir.path(), "file.jsonl", 10..12);
        let mut data = config(&[&folder, &file]);
        let (train, eval) = Sources::find(&data, None).unwrap().read(1, Stage::Sft).unwrap();
        assert_eq!(train.iter().map(|d| d.rows.len()).collect::<Vec<_>>(), [5, 2]);
        assert_eq!((numbers(&train), numbers(&[eval.unwrap()])), (vec![0, 1, 2, 3, 4, 10, 11], vec![5, 6]));
        let (_, eval) = Sources::find(&data, Some(&file)).unwrap().read(1, Stage::Sft).unwrap();
        assert_eq!(numbers(&[eval.unwrap()]), [10, 11]);
        data.eval_split_size = Some(0.5);
        let error = Sources::find(&data, None).unwrap_err().to_string();
        assert!(error.contains("eval_split_size = 0.5") && error.contains("has a split `test`"), "{error}");
        data.eval_split_size = None;
        // The training split is not evaluated on.
        data.dataset_name.truncate(1);
        data.dataset_train_split = "test".into();
        let sources = Sources::find(&data, None).unwrap();
        assert!(!sources.has_eval() && sources.read(1, Stage::Sft).unwrap().1.is_none());
        data = config(&[&folder, &file]);
        data.dataset_test_split = "validation".into();
        let error = Sources::find(&data, None).unwrap_err().to_string();
        let wanted = "folder: expected a split `validation`, found `test`, `train`; choose by --dataset_test_split";
        assert!(error.ends_with(wanted), "{error}");
        data = config(&[&folder]);
        data.dataset_train_split = "train_sft".into();
        let error = Sources::find(&data, None).unwrap_err().to_string();
        assert!(error.ends_with("found `test`, `train`; choose by --dataset_train_split"), "{error}");
    }

    #[test]
    fn columns_are_renamed_in_training_and_evaluation_rows() {
        let dir = tempfile::tempdir().unwrap();
        let file = numbered(dir.path(), "file.jsonl", 0..4);
        let mut data = config(&[&file]);
        data.dataset_columns = vec!["prompt=n".into()];
        data.eval_split_size = Some(1.0);
        let prompts = |dataset: &Dataset| dataset.rows().all(|row| row["prompt"] == row["n"]);
        for eval_file in [None, Some(file.as_path())] {
            data.eval_split_size = eval_file.is_none().then_some(1.0);
            let (train, eval) = Sources::find(&data, eval_file).unwrap().read(1, Stage::Ppo).unwrap();
            assert!(train.iter().chain(&eval).all(prompts));
            assert_eq!(eval.map(|eval| eval.rows.len()), Some(if eval_file.is_none() { 1 } else { 4 }));
        }
        data.dataset_columns = vec!["prompt=question".into()];
        let error = Sources::find(&data, None).unwrap().read(1, Stage::Ppo).unwrap_err().to_string();
        assert!(error.contains("file.jsonl: line 1: expected a field `question` with what dataset_columns"), "{error}");
    }
}
