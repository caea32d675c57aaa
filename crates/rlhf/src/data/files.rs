//! Finds the files of a dataset: a file, a folder with files per split, or a name on the hub.

use rlhf_base::{Error, Result};
use rlhf_hub::{Hub, files_below, is_hub_name};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// File formats, in order of preference for a split that exists in several.
const FORMATS: [&str; 7] = ["jsonl", "json", "csv", "parquet", "jsonl.gz", "json.gz", "csv.gz"];

/// Names of splits. A file with one of them in its name is not a whole dataset.
const SPLITS: [&str; 8] = ["train", "test", "validation", "valid", "val", "dev", "eval", "unsupervised"];

/// Words in the names of splits to evaluate on, such as `test_sft`, the likeliest first.
const EVAL_SPLITS: [&str; 6] = ["validation", "valid", "val", "dev", "eval", "test"];

/// The files of one split of a dataset, in the order of their rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The name of the dataset, as it was passed.
    pub name: PathBuf,
    /// Paths of the files.
    pub paths: Vec<PathBuf>,
}

impl Files {
    /// Finds the files of `split` in the dataset `name`, in the folder `config` if several folders have that split.
    ///
    /// `name` is a file, which has no splits and is used as a whole; a folder; or `owner/name` on the hub, with `@revision`
    /// appended for another branch than main. A split is `split.jsonl`, the shards `split-00000-of-00002.parquet` and so on, or
    /// the files in a folder `split`. It is looked up in the folder itself, in `data`, and then in the only folder that has it.
    /// A single file whose name contains no split is the split `train`.
    ///
    /// # Errors
    /// If there is no such file or folder, it has no such split, a shard is missing, or several folders have the split; errors
    /// of the hub.
    pub fn find(name: &Path, config: Option<&str>, split: &str) -> Result<Self> {
        Self::find_by_flag(name, config, split, "")
    }

    /// [`Files::find`]; the error about a missing split names the `flag` that sets it.
    pub(super) fn find_by_flag(name: &Path, config: Option<&str>, split: &str, flag: &str) -> Result<Self> {
        let files = Self::look_for(name, config, split, Some(flag))?;
        Ok(files.expect("a missing split is an error"))
    }

    /// [`Files::find`] that returns `None` for a file, and if the dataset has no such split.
    ///
    /// # Errors
    /// The errors of [`Files::find`], except for a missing split.
    pub fn find_optional(name: &Path, config: Option<&str>, split: &str) -> Result<Option<Self>> {
        if name.is_file() { Ok(None) } else { Self::look_for(name, config, split, None) }
    }

    /// Returns the split of a dataset that is most likely one to evaluate on, for messages; `None` also if its files cannot be listed.
    pub(super) fn likely_eval_split(name: &Path, config: Option<&str>, train_split: &str) -> Option<String> {
        let splits = RefCell::new(BTreeSet::new());
        let record = |files: &BTreeSet<String>| {
            splits.borrow_mut().extend(split_names(files, config));
            Ok(Vec::new())
        };
        if name.is_dir() {
            record(&files_below(name).ok()?).ok()?;
        } else {
            let (id, revision) = hub_name(name).filter(|_| !name.exists())?;
            Hub::from_env().dataset(id, revision, &record).ok()?;
        }
        let splits = splits.into_inner();
        let is_named = |split: &String, word: &str| split.split(['_', '-', '.']).any(|part| part == word);
        EVAL_SPLITS
            .iter()
            .find_map(|word| splits.iter().find(|split| *split != train_split && is_named(split, word)))
            .cloned()
    }

    /// Finds the files of `split`; `None` if there are none. With `flag`, the flag that sets the split or an empty text, a missing split
    /// is an error that names it.
    fn look_for(name: &Path, config: Option<&str>, split: &str, flag: Option<&str>) -> Result<Option<Self>> {
        let choose = |files: &BTreeSet<String>| {
            let config = config.filter(|config| !is_unnamed(config, files));
            match (split_files(files, config, split), flag) {
                (Ok(chosen), Some(flag)) if chosen.is_empty() => {
                    let message = match files.iter().find(|file| is_arrow(file)) {
                        Some(file) => not_arrow(file),
                        None => format!("expected a split `{split}`, {}", splits_there(files, config, flag)),
                    };
                    Err(Error::invalid(name, message))
                }
                (Ok(chosen), _) => Ok(chosen),
                (Err(message), _) => Err(Error::invalid(name, message)),
            }
        };
        let paths = if name.is_file() {
            if let Some(file) = name.file_name().and_then(|file| file.to_str()).filter(|file| is_arrow(file)) {
                return Err(Error::invalid(name, not_arrow(file)));
            }
            vec![name.to_path_buf()]
        } else if name.is_dir() {
            choose(&files_below(name)?)?.into_iter().map(|file| name.join(file)).collect()
        } else {
            if name.exists() {
                let message = "expected a file or a folder, found a pipe or a device: commands that read rows take them on \
                               standard input, without dataset_name";
                return Err(Error::invalid(name, message));
            }
            let (id, revision) = hub_name(name).ok_or_else(|| {
                let message = "expected a JSONL, JSON, CSV or Parquet file, a folder of them, or a dataset's name on the \
                               hub, found no such path";
                Error::invalid(name, message)
            })?;
            Hub::from_env().dataset(id, revision, &choose)?
        };
        Ok((!paths.is_empty()).then(|| Self { name: name.to_path_buf(), paths }))
    }

    /// Returns the name for messages: the file, or the dataset if it has several files.
    pub fn describe(&self) -> &Path {
        if let [only] = self.paths.as_slice() { only } else { &self.name }
    }
}

/// Whether `config` is the name that the library `datasets` gives the only configuration of a dataset, which then has no folder.
fn is_unnamed(config: &str, files: &BTreeSet<String>) -> bool {
    config == "default" && !files.iter().any(|file| file.starts_with("default/"))
}

/// Returns the name and the revision on the hub, if `name` has that form and is not a file name.
fn hub_name(name: &Path) -> Option<(&str, &str)> {
    let text = name.to_str()?;
    let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
    let extension = Path::new(id).extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let others = ["gz", "txt", "tsv", "yaml", "arrow"];
    let is_file = FORMATS.iter().chain(&others).any(|known| extension.eq_ignore_ascii_case(known));
    (is_hub_name(id) && !is_file).then_some((id, revision))
}

/// Returns the files of a split among all files of a dataset; empty if there is no such split.
fn split_files(files: &BTreeSet<String>, config: Option<&str>, split: &str) -> Result<Vec<String>, String> {
    if let Some(config) = config {
        let folder = format!("{config}/");
        let chosen = in_folder(files, &folder, split)?;
        return if chosen.is_empty() {
            check_shard_numbers(files, &folder, split).map(|()| chosen)
        } else {
            Ok(chosen)
        };
    }
    for folder in ["", "data/"] {
        let chosen = in_folder(files, folder, split)?;
        if !chosen.is_empty() {
            return Ok(chosen);
        }
    }
    let folders: BTreeSet<&str> = files.iter().filter_map(|file| Some(&file[..=file.rfind('/')?])).collect();
    // A folder named after the split contains the split's files; its parent is the folder to search.
    let parents = folders.iter().filter_map(|folder| folder.strip_suffix(&format!("{split}/")));
    let candidates: BTreeSet<&str> = folders.iter().copied().chain(parents).filter(|f| !f.is_empty()).collect();
    let mut chosen_by_folder = BTreeMap::new();
    for folder in candidates {
        let chosen = in_folder(files, folder, split)?;
        if !chosen.is_empty() {
            chosen_by_folder.insert(folder.trim_end_matches('/'), chosen);
        }
    }
    if chosen_by_folder.len() > 1 {
        let names: Vec<&str> = chosen_by_folder.into_keys().collect();
        return Err(format!(
            "expected one folder with a split `{split}`, found {}: choose by --dataset_config",
            list(&names)
        ));
    }
    if let Some((_, chosen)) = chosen_by_folder.pop_first() {
        return Ok(chosen);
    }
    check_shard_numbers(files, "", split)?;
    // The only file of a dataset may have any name.
    let mut data = files.iter().filter(|file| find_format(file).is_some());
    Ok(match (data.next(), data.next()) {
        (Some(only), None) if split == "train" && !names_a_split(only) => vec![only.clone()],
        _ => Vec::new(),
    })
}

/// Returns the files of a split in one folder, whose path is empty or ends with a slash.
fn in_folder(files: &BTreeSet<String>, folder: &str, split: &str) -> Result<Vec<String>, String> {
    let inside = format!("{folder}{split}/");
    for format in FORMATS {
        let is_whole = |file: &&String| stem(file, format).and_then(|name| name.strip_prefix(folder)) == Some(split);
        if let Some(whole) = files.iter().find(is_whole) {
            return Ok(vec![whole.clone()]);
        }
        let shards: Vec<(usize, usize, &String)> = files
            .iter()
            .filter_map(|file| parse_shard(file, folder, split, format).map(|(i, n)| (i, n, file)))
            .collect();
        if let Some(&(_, count, _)) = shards.first() {
            let numbers: Vec<usize> = shards.iter().map(|&(number, ..)| number).collect();
            if shards.iter().any(|&(_, n, _)| n != count) || numbers != Vec::from_iter(0..count) {
                return Err(format!(
                    "expected the {count} shards {folder}{split}-*-of-{count:05}*.{format}, each once, found the \
                     numbers {numbers:?}"
                ));
            }
            return Ok(shards.into_iter().map(|(.., file)| file.clone()).collect());
        }
        let chosen = format_files(files, &inside, format)?;
        if !chosen.is_empty() {
            return Ok(chosen);
        }
    }
    match files.iter().find(|file| file.starts_with(&inside) && is_arrow(file)) {
        Some(file) => Err(not_arrow(file)),
        None => Ok(Vec::new()),
    }
}

/// Returns the files of one format in the folder of a split, whose path ends with a slash.
///
/// # Errors
/// If there are such files together with others that would not be read with them.
fn format_files(files: &BTreeSet<String>, folder: &str, format: &str) -> Result<Vec<String>, String> {
    let below = || files.iter().filter(|file| file.starts_with(folder) && !is_metadata(file));
    let (chosen, others): (Vec<&String>, Vec<&String>) = below()
        .filter(|file| find_format(file).is_some())
        .partition(|file| !file[folder.len()..].contains('/') && find_format(file) == Some(format));
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    if let Some(file) = below().find(|file| is_arrow(file)) {
        return Err(not_arrow(file));
    }
    if !others.is_empty() {
        let others: Vec<&str> = others.into_iter().map(String::as_str).collect();
        return Err(format!(
            "expected the rows of {folder} in files of one format and not in subfolders, found `{}` and also {}: name one file as the \
             dataset, of one on the hub when it is downloaded, or keep one format there",
            chosen[0],
            list(&others)
        ));
    }
    Ok(chosen.into_iter().cloned().collect())
}

/// Whether a file, by its name, describes a dataset and has none of its rows.
fn is_metadata(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    let stem = name.split('.').next().unwrap_or(name);
    ["metadata", "dataset_info", "dataset_infos", "state", "stats", "info"].contains(&stem)
}

/// Returns an error if the name of a file below `folder` is that of a shard of the split except for the digits of its numbers.
fn check_shard_numbers(files: &BTreeSet<String>, folder: &str, split: &str) -> Result<(), String> {
    let is_shard = |file: &&String| {
        let name = file.rsplit('/').next().unwrap_or(file);
        let numbers = || shard_numbers(name, "", split, find_format(name)?);
        file.starts_with(folder) && numbers().is_some_and(|(number, count)| number.len() != 5 || count.len() != 5)
    };
    match files.iter().find(is_shard) {
        Some(file) => Err(format!(
            "expected numbers of five digits in the names of shards, from 0 on, as in {split}-00000-of-00002.jsonl, found {file}"
        )),
        None => Ok(()),
    }
}

/// Returns the number and the count of a shard such as `split-00000-of-00002.parquet`; the hub may have appended a hash.
fn parse_shard(file: &str, folder: &str, split: &str, format: &str) -> Option<(usize, usize)> {
    let (number, count) = shard_numbers(file, folder, split, format)?;
    (number.len() == 5 && count.len() == 5).then(|| Some((number.parse().ok()?, count.parse().ok()?)))?
}

/// Returns the number and the count of a shard, each of any number of digits.
fn shard_numbers<'f>(file: &'f str, folder: &str, split: &str, format: &str) -> Option<(&'f str, &'f str)> {
    let stem = stem(file, format)?.strip_prefix(folder)?;
    let (number, rest) = stem.strip_prefix(split)?.strip_prefix('-')?.split_once("-of-")?;
    let count = rest.split_once('-').map_or(rest, |(count, _)| count);
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(number) && digits(count)).then_some((number, count))
}

/// Whether `path` is a file with the name of a file of rows.
pub fn is_data_file(path: &Path) -> bool {
    path.is_file() && path.to_str().and_then(find_format).is_some()
}

fn find_format(file: &str) -> Option<&'static str> {
    FORMATS.into_iter().find(|format| stem(file, format).is_some())
}

/// Returns the name of a file without the extension `format`, in either case of letters; `None` if it has another extension.
fn stem<'f>(file: &'f str, format: &str) -> Option<&'f str> {
    let at = file.len().checked_sub(format.len())?;
    let (stem, extension) = file.split_at_checked(at)?;
    stem.strip_suffix('.').filter(|_| extension.eq_ignore_ascii_case(format))
}

/// Whether a file is an Arrow file, as `save_to_disk` of datasets writes.
fn is_arrow(file: &str) -> bool {
    stem(file, "arrow").is_some()
}

fn not_arrow(file: &str) -> String {
    format!(
        "expected files of JSONL, JSON, CSV or Parquet, found Arrow ({file}): save the dataset with `to_parquet` or `to_json` instead \
         of `save_to_disk`"
    )
}

fn names_a_split(file: &str) -> bool {
    let words = |c: char| !c.is_ascii_alphanumeric();
    file.split(words).any(|word| SPLITS.contains(&word.to_ascii_lowercase().as_str()))
}

/// Returns the splits that the names of the files contain, in the folder `config` if one is given.
fn split_names(files: &BTreeSet<String>, config: Option<&str>) -> BTreeSet<String> {
    let folder = config.map(|config| format!("{config}/")).unwrap_or_default();
    let name = |file: &String| -> Option<String> {
        let file = file.strip_prefix(&folder)?;
        let stem = stem(file, find_format(file)?)?;
        let (parent, stem) = stem.rsplit_once('/').unwrap_or(("", stem));
        let sharded = stem.find("-of-").and_then(|end| stem[..end].rsplit_once('-'));
        let in_folder = SPLITS.iter().find(|split| parent.rsplit('/').next() == Some(**split));
        Some(in_folder.map_or(sharded.map_or(stem, |(split, _)| split), |split| split).to_string())
    };
    files.iter().filter_map(name).collect()
}

/// Lists the splits that the names of the files contain, for messages, and the `flag` that chooses another, if there is one.
fn splits_there(files: &BTreeSet<String>, config: Option<&str>, flag: &str) -> String {
    let splits = split_names(files, config);
    if splits.is_empty() {
        return match config {
            Some(config) => format!("found no file of rows in its folder {config}"),
            None => format!("found no file of rows ({})", FORMATS.join(", ")),
        };
    }
    let names: Vec<&str> = splits.iter().map(String::as_str).collect();
    let choose = if flag.is_empty() { String::new() } else { format!("; choose by --{flag}") };
    format!("found {}{choose}", list(&names))
}

/// Lists the first 8 names and the number of the others.
fn list(names: &[&str]) -> String {
    let shown = names.iter().take(8).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if names.len() > 8 { format!("{shown} and {} more", names.len() - 8) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(files: &[&str], config: Option<&str>, split: &str) -> Result<Vec<String>, String> {
        split_files(&files.iter().map(ToString::to_string).collect(), config, split)
    }

    #[test]
    fn a_split_is_found_in_all_layouts_of_datasets() {
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
            (&["train.CSV", "test.csv"], &["train.CSV"]),
            (&["train/A.Parquet", "train/b.parquet"], &["train/A.Parquet", "train/b.parquet"]),
            (&["train-00000-of-00001.JSONL.GZ"], &["train-00000-of-00001.JSONL.GZ"]),
            (&["my_test.jsonl"], &[]),
            (&["a.jsonl", "b.jsonl"], &[]),
            (&["training.jsonl", "train-notes.jsonl"], &[]),
        ] {
            assert_eq!(chosen(files, None, "train").unwrap(), expected, "{files:?}");
        }
        assert_eq!(chosen(&["prompts.jsonl"], None, "test").unwrap(), [""; 0]);
    }

    #[test]
    fn several_folders_with_the_split_are_an_error_unless_one_is_named() {
        let files = ["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"];
        let error = chosen(&files, None, "train").unwrap_err();
        assert!(error.contains("`main`, `socratic`") && error.contains("--dataset_config"), "{error}");
        assert_eq!(chosen(&files, Some("socratic"), "train").unwrap(), [files[1]]);
        assert_eq!(chosen(&files, Some("none"), "train").unwrap(), [""; 0]);
    }

    #[test]
    fn the_configuration_default_is_a_folder_of_that_name_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let find = |config| Files::find(dir.path(), Some(config), "train").map(|files| files.paths);
        std::fs::write(dir.path().join("train.csv"), "prompt\nx\n").unwrap();
        assert_eq!(find("default").unwrap(), [dir.path().join("train.csv")]);
        assert!(find("main").unwrap_err().to_string().contains("found no file of rows in its folder main"));
        std::fs::create_dir(dir.path().join("default")).unwrap();
        std::fs::write(dir.path().join("default/train.csv"), "prompt\ny\n").unwrap();
        assert_eq!(find("default").unwrap(), [dir.path().join("default/train.csv")]);
        std::fs::remove_file(dir.path().join("train.csv")).unwrap();
        std::fs::rename(dir.path().join("default"), dir.path().join("main")).unwrap();
        assert_eq!(find("default").unwrap(), [dir.path().join("main/train.csv")]);
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
    fn files_of_a_folder_that_would_be_left_out_are_an_error_that_names_them() {
        for described in ["train/metadata.jsonl", "train/dataset_info.json", "train/extra/info.json"] {
            assert_eq!(chosen(&["train/0.parquet", described], None, "train").unwrap(), ["train/0.parquet"]);
        }
        for (files, left_out) in [
            (
                &["train/a.jsonl", "train/b.parquet", "train/notes.md"][..],
                "found `train/a.jsonl` and also `train/b.parquet`:",
            ),
            (&["data/train/a.csv", "data/train/en/b.csv"], "found `data/train/a.csv` and also `data/train/en/b.csv`:"),
            (&["train/a.csv", "train/b.csv.gz"], "found `train/a.csv` and also `train/b.csv.gz`:"),
        ] {
            let error = chosen(files, None, "train").unwrap_err();
            assert!(error.contains(left_out) && error.contains("name one file"), "{files:?}: {error}");
        }
    }

    #[test]
    fn the_folder_that_save_to_disk_writes_is_refused_with_what_to_do() {
        let folder =
            ["dataset_dict.json", "train/data-00000-of-00001.arrow", "train/dataset_info.json", "train/state.json"];
        let wanted = "expected files of JSONL, JSON, CSV or Parquet, found Arrow (train/data-00000-of-00001.arrow): save the dataset \
                      with `to_parquet` or `to_json` instead of `save_to_disk`";
        assert_eq!(chosen(&folder, None, "train").unwrap_err(), wanted);
        assert_eq!(chosen(&folder[1..2], None, "train").unwrap_err(), wanted);
        let dir = tempfile::tempdir().unwrap();
        for file in ["data-00000-of-00001.arrow", "dataset_info.json", "state.json"] {
            std::fs::write(dir.path().join(file), "{}").unwrap();
        }
        for name in [dir.path().to_path_buf(), dir.path().join("data-00000-of-00001.arrow")] {
            let error = Files::find(&name, None, "train").unwrap_err().to_string();
            assert!(error.contains("found Arrow (data-00000-of-00001.arrow)"), "{error}");
        }
    }

    #[test]
    fn shards_with_numbers_of_other_than_five_digits_are_an_error_that_says_so() {
        for files in
            [&["train-1-of-2.jsonl", "train-2-of-2.jsonl"][..], &["train-1-of-1.jsonl"], &["en/train-1-of-2.csv"]]
        {
            let error = chosen(files, None, "train").unwrap_err();
            assert!(error.starts_with("expected numbers of five digits") && error.ends_with(files[0]), "{error}");
            assert_eq!(chosen(files, None, "test").unwrap(), [""; 0]);
        }
        let error = chosen(&["en/train-1-of-2.csv"], Some("en"), "train").unwrap_err();
        assert!(error.starts_with("expected numbers of five digits"), "{error}");
    }

    #[test]
    fn file_names_are_not_looked_up_on_the_hub() {
        for name in ["a.jsonl", "org/a.parquet", "./a", "a/b/c", "a.csv@v1", "rows.txt", "org/A.CSV", "rows.tsv"] {
            assert_eq!(hub_name(Path::new(name)), None, "{name}");
        }
        assert_eq!(hub_name(Path::new("org/name-1.5")), Some(("org/name-1.5", "main")));
        assert_eq!(hub_name(Path::new("imdb@refs/pr/1")), Some(("imdb", "refs/pr/1")));
    }

    #[test]
    fn the_error_for_a_missing_split_lists_the_splits_found() {
        let named = |files: &[&str]| files.iter().map(ToString::to_string).collect();
        let there = |files: &[&str]| splits_there(&named(files), None, "");
        assert_eq!(there(&["data/dev-00000-of-00001.parquet", "test.csv.gz", "x.py"]), "found `dev`, `test`");
        assert_eq!(there(&["default/train/0000.parquet"]), "found `train`");
        let sft = named(&["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"]);
        let wanted = "found `test_sft`, `train_sft`; choose by --dataset_train_split";
        assert_eq!(splits_there(&sft, None, "dataset_train_split"), wanted);
        assert_eq!(
            there(&["README.md"]),
            "found no file of rows (jsonl, json, csv, parquet, jsonl.gz, json.gz, csv.gz)"
        );
    }

    #[test]
    fn the_likeliest_split_to_evaluate_on_is_found_by_its_name() {
        for (files, expected) in [
            (&["train.jsonl", "validation.jsonl", "test_sft.jsonl"][..], Some("validation")),
            (&["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"], Some("test_sft")),
            (&["train.jsonl", "dev/0.jsonl"], Some("dev")),
            (&["train.jsonl", "latest.jsonl"], None),
            (&["test.jsonl"], Some("test")),
        ] {
            let dir = tempfile::tempdir().unwrap();
            for file in files {
                std::fs::create_dir_all(dir.path().join(file).parent().unwrap()).unwrap();
                std::fs::write(dir.path().join(file), "{}").unwrap();
            }
            assert_eq!(Files::likely_eval_split(dir.path(), None, "train").as_deref(), expected, "{files:?}");
        }
        assert_eq!(Files::likely_eval_split(Path::new("none.jsonl"), None, "train"), None);
    }
}
