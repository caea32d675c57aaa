//! From the name of a dataset to its files: a file, a folder with files per split, a name on the hub.

use crate::hub::{Hub, files_below, is_hub_name};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What a file of rows may be, the first choice first where a split is there in several.
const FORMATS: [&str; 7] = ["jsonl", "json", "csv", "parquet", "jsonl.gz", "json.gz", "csv.gz"];

/// Words that name splits: a file with one of them in its name is not the whole of a dataset.
const SPLITS: [&str; 8] = ["train", "test", "validation", "valid", "val", "dev", "eval", "unsupervised"];

/// The files of one split of a dataset, in the order of their rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The dataset, as it was named.
    pub name: PathBuf,
    /// Its files.
    pub paths: Vec<PathBuf>,
}

impl Files {
    /// The files of `split` in the dataset `name`, and in its folder `config` where several hold that split.
    ///
    /// `name` is a file, which is all of it and has no splits; a folder; or `owner/name` on the hub, with `@revision` behind it if
    /// it is not the main branch. A split is `split.jsonl`, or `split-00000-of-00002.parquet` and the rest of them, or the
    /// files in a folder `split`; all that in the folder itself, in `data`, or in the only folder that has it. A file that is
    /// alone and named after no split is the split `train`.
    ///
    /// # Errors
    /// If there is no such file or folder, no such split in it, a shard is missing, several folders hold the split; and those
    /// of the hub.
    pub fn find(name: &Path, config: Option<&str>, split: &str) -> Result<Self> {
        let found = Self::look_for(name, config, split, true)?;
        Ok(found.expect("what is required and not there is an error"))
    }

    /// As [`Files::find`]; `None` for a file, and where the dataset has no such split.
    ///
    /// # Errors
    /// As [`Files::find`], but for a missing split.
    pub fn find_if_there(name: &Path, config: Option<&str>, split: &str) -> Result<Option<Self>> {
        if name.is_file() { Ok(None) } else { Self::look_for(name, config, split, false) }
    }

    fn look_for(name: &Path, config: Option<&str>, split: &str, required: bool) -> Result<Option<Self>> {
        let choose = |files: &BTreeSet<String>| match of_split(files, config, split) {
            Ok(chosen) if chosen.is_empty() && required => {
                Err(Error::invalid(name, format!("expected a split `{split}`, {}", splits_there(files, config))))
            }
            Ok(chosen) => Ok(chosen),
            Err(message) => Err(Error::invalid(name, message)),
        };
        let paths = if name.is_file() {
            vec![name.to_path_buf()]
        } else if name.is_dir() {
            choose(&files_below(name)?)?.into_iter().map(|file| name.join(file)).collect()
        } else {
            let (id, revision) = hub_name(name).ok_or_else(|| {
                let message = "expected a JSONL, JSON, CSV or Parquet file, a folder of them, or a dataset's name on the \
                               hub, found no such path";
                Error::invalid(name, message)
            })?;
            Hub::from_env().dataset(id, revision, &choose)?
        };
        Ok((!paths.is_empty()).then(|| Self { name: name.to_path_buf(), paths }))
    }

    /// What stands for the files in messages: the file, or the dataset if it has several.
    pub fn describe(&self) -> &Path {
        if let [only] = self.paths.as_slice() { only } else { &self.name }
    }
}

/// Name and revision on the hub, if `name` has that form and not that of a file.
fn hub_name(name: &Path) -> Option<(&str, &str)> {
    let text = name.to_str()?;
    let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
    let extension = Path::new(id).extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let is_file = FORMATS.contains(&extension) || ["gz", "txt", "yaml"].contains(&extension);
    (is_hub_name(id) && !is_file).then_some((id, revision))
}

/// The files of a split among all files of a dataset, none if it is not there.
fn of_split(files: &BTreeSet<String>, config: Option<&str>, split: &str) -> Result<Vec<String>, String> {
    if let Some(config) = config {
        return in_folder(files, &format!("{config}/"), split);
    }
    for folder in ["", "data/"] {
        let found = in_folder(files, folder, split)?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let folders: BTreeSet<&str> = files.iter().filter_map(|file| Some(&file[..=file.rfind('/')?])).collect();
    // A folder named after the split is not where it lies, but what it is.
    let parents = folders.iter().filter_map(|folder| folder.strip_suffix(&format!("{split}/")));
    let candidates: BTreeSet<&str> = folders.iter().copied().chain(parents).filter(|f| !f.is_empty()).collect();
    let mut found = BTreeMap::new();
    for folder in candidates {
        let chosen = in_folder(files, folder, split)?;
        if !chosen.is_empty() {
            found.insert(folder.trim_end_matches('/'), chosen);
        }
    }
    if found.len() > 1 {
        let names: Vec<&str> = found.into_keys().collect();
        return Err(format!(
            "expected one folder with a split `{split}`, found {}: choose by --dataset_config",
            listed(&names)
        ));
    }
    if let Some((_, chosen)) = found.pop_first() {
        return Ok(chosen);
    }
    // Whoever saved one file named it as they liked.
    let mut data = files.iter().filter(|file| format_of(file).is_some());
    Ok(match (data.next(), data.next()) {
        (Some(only), None) if split == "train" && !is_of_a_split(only) => vec![only.clone()],
        _ => Vec::new(),
    })
}

/// The files of a split in one folder, whose path is empty or ends with a slash.
fn in_folder(files: &BTreeSet<String>, folder: &str, split: &str) -> Result<Vec<String>, String> {
    for format in FORMATS {
        let whole = format!("{folder}{split}.{format}");
        if files.contains(&whole) {
            return Ok(vec![whole]);
        }
        let shards: Vec<(usize, usize, &String)> =
            files.iter().filter_map(|file| shard_of(file, folder, split, format).map(|(i, n)| (i, n, file))).collect();
        if let Some(&(_, count, _)) = shards.first() {
            let numbers: Vec<usize> = shards.iter().map(|&(number, ..)| number).collect();
            if shards.iter().any(|&(_, n, _)| n != count) || numbers != Vec::from_iter(0..count) {
                return Err(format!(
                    "expected the {count} shards {folder}{split}-*-of-{count:05}*.{format}, each once, found those of \
                     the numbers {numbers:?}"
                ));
            }
            return Ok(shards.into_iter().map(|(.., file)| file.clone()).collect());
        }
        let inside = format!("{folder}{split}/");
        let is_in = |file: &&String| {
            file.strip_prefix(&inside).is_some_and(|rest| !rest.contains('/') && format_of(rest) == Some(format))
        };
        let found: Vec<String> = files.iter().filter(is_in).cloned().collect();
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Ok(Vec::new())
}

/// Number and count of `split-00000-of-00002.parquet`, behind which the hub may have put a hash.
fn shard_of(file: &str, folder: &str, split: &str, format: &str) -> Option<(usize, usize)> {
    let stem = file.strip_prefix(folder)?.strip_suffix(format)?.strip_suffix('.')?;
    let (number, rest) = stem.strip_prefix(split)?.strip_prefix('-')?.split_once("-of-")?;
    let count = rest.split_once('-').map_or(rest, |(count, _)| count);
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(number) && digits(count)).then(|| Some((number.parse().ok()?, count.parse().ok()?)))?
}

fn format_of(file: &str) -> Option<&'static str> {
    FORMATS.into_iter().find(|format| file.strip_suffix(format).is_some_and(|stem| stem.ends_with('.')))
}

fn is_of_a_split(file: &str) -> bool {
    let words = |c: char| !c.is_ascii_alphanumeric();
    file.split(words).any(|word| SPLITS.contains(&word.to_ascii_lowercase().as_str()))
}

/// The splits that files are named after, in words.
fn splits_there(files: &BTreeSet<String>, config: Option<&str>) -> String {
    let folder = config.map(|config| format!("{config}/")).unwrap_or_default();
    let name = |file: &String| -> Option<String> {
        let file = file.strip_prefix(&folder)?;
        let stem = file.strip_suffix(format_of(file)?)?.strip_suffix('.')?;
        let (parent, stem) = stem.rsplit_once('/').unwrap_or(("", stem));
        let sharded = stem.find("-of-").and_then(|of| stem[..of].rsplit_once('-'));
        let in_folder = SPLITS.iter().find(|split| parent.rsplit('/').next() == Some(**split));
        Some(in_folder.map_or(sharded.map_or(stem, |(split, _)| split), |split| split).to_string())
    };
    let found: BTreeSet<String> = files.iter().filter_map(name).collect();
    if found.is_empty() {
        return match config {
            Some(config) => format!("found no file of rows in its folder {config}"),
            None => format!("found no file of rows ({})", FORMATS.join(", ")),
        };
    }
    let names: Vec<&str> = found.iter().map(String::as_str).collect();
    format!("found {}", listed(&names))
}

/// A few names, and whether there are more.
fn listed(names: &[&str]) -> String {
    let shown = names.iter().take(8).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if names.len() > 8 { format!("{shown} and {} more", names.len() - 8) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(files: &[&str], config: Option<&str>, split: &str) -> Result<Vec<String>, String> {
        of_split(&files.iter().map(ToString::to_string).collect(), config, split)
    }

    #[test]
    fn a_split_is_found_in_the_layouts_that_datasets_have() {
        for (files, expected) in [
            (&["train.jsonl", "test.jsonl", "README.md"][..], &["train.jsonl"][..]),
            (&["train.csv", "train.parquet"], &["train.csv"]),
            (
                &["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
                &["data/train-00000-of-00001.parquet"],
            ),
            (
                &[
                    "data/train-00001-of-00002-5cafb7e13ecb1a4f.parquet",
                    "data/train-00000-of-00002-0123456789abcdef.parquet",
                ],
                &[
                    "data/train-00000-of-00002-0123456789abcdef.parquet",
                    "data/train-00001-of-00002-5cafb7e13ecb1a4f.parquet",
                ],
            ),
            (
                &["plain_text/train-00000-of-00001.parquet", "plain_text/unsupervised-00000-of-00001.parquet"],
                &["plain_text/train-00000-of-00001.parquet"],
            ),
            (
                &["default/train/0001.parquet", "default/train/0000.parquet", "default/test/0000.parquet"],
                &["default/train/0000.parquet", "default/train/0001.parquet"],
            ),
            (&["train/b.csv", "train/a.csv", "train/notes.md"], &["train/a.csv", "train/b.csv"]),
            (&["cherry_picked_prompts.jsonl", "README.md"], &["cherry_picked_prompts.jsonl"]),
            (&["train.json.gz", "test.json.gz"], &["train.json.gz"]),
            (
                &["data/train-00000-of-00002.jsonl.gz", "data/train-00001-of-00002.jsonl.gz"],
                &["data/train-00000-of-00002.jsonl.gz", "data/train-00001-of-00002.jsonl.gz"],
            ),
            (&["train/a.csv.gz", "train/b.tar.gz"], &["train/a.csv.gz"]),
            (&["my_test.jsonl"], &[]),
            (&["a.jsonl", "b.jsonl"], &[]),
            (&["training.jsonl", "train-notes.jsonl"], &[]),
        ] {
            assert_eq!(chosen(files, None, "train").unwrap(), expected, "{files:?}");
        }
        assert_eq!(chosen(&["prompts.jsonl"], None, "test").unwrap(), [""; 0]);
    }

    #[test]
    fn one_of_several_folders_is_chosen_by_name_and_never_by_chance() {
        let files = ["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"];
        let error = chosen(&files, None, "train").unwrap_err();
        assert!(error.contains("`main`, `socratic`") && error.contains("--dataset_config"), "{error}");
        assert_eq!(chosen(&files, Some("socratic"), "train").unwrap(), [files[1]]);
        assert_eq!(chosen(&files, Some("none"), "train").unwrap(), [""; 0]);
    }

    #[test]
    fn a_missing_shard_is_an_error() {
        for files in [
            &["train-00000-of-00002.csv"][..],
            &["train-00000-of-00002.csv", "train-00000-of-00002-abc.csv"],
            &["train-00000-of-00002.csv", "train-00001-of-00003.csv"],
        ] {
            let error = chosen(files, None, "train").unwrap_err();
            assert!(error.contains("2 shards train-*-of-00002*.csv"), "{error}");
        }
    }

    #[test]
    fn names_of_files_are_not_looked_for_on_the_hub() {
        for name in ["a.jsonl", "org/a.parquet", "./a", "a/b/c", "a.csv@v1", "rows.txt"] {
            assert_eq!(hub_name(Path::new(name)), None, "{name}");
        }
        assert_eq!(hub_name(Path::new("org/name-1.5")), Some(("org/name-1.5", "main")));
        assert_eq!(hub_name(Path::new("imdb@refs/pr/1")), Some(("imdb", "refs/pr/1")));
    }

    #[test]
    fn a_missing_split_is_told_with_those_that_are_there() {
        let there = |files: &[&str]| splits_there(&files.iter().map(ToString::to_string).collect(), None);
        assert_eq!(there(&["data/dev-00000-of-00001.parquet", "test.csv.gz", "x.py"]), "found `dev`, `test`");
        assert_eq!(there(&["default/train/0000.parquet"]), "found `train`");
        assert_eq!(
            there(&["README.md"]),
            "found no file of rows (jsonl, json, csv, parquet, jsonl.gz, json.gz, csv.gz)"
        );
    }
}
