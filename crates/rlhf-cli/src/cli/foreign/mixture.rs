//! Mixtures of datasets, as TRL's and open-r1's configurations write them.

use serde_json::{Map, Value};

use super::super::setting::Setting;
use super::table::{DATASET_MIXTURE, DATASETS};

/// The form of a mixture.
const EXPECTED: &str = "expected none or a list of datasets such as [{path: DATASET, split: train}]";

/// Returns a mixture in JSON as our settings. What has no effect here is appended to `notes`.
///
/// # Errors
/// If it is no mixture, or its datasets differ in what is one setting here.
pub(super) fn settings(text: &str, notes: &mut Vec<String>) -> Result<Vec<Setting>, String> {
    let parsed: Value = serde_json::from_str(text).map_err(|_| EXPECTED.to_string())?;
    let (list, whole) = match parsed {
        Value::Array(list) => (list, Map::new()),
        Value::Object(mut whole) => match whole.remove(DATASETS) {
            Some(Value::Array(list)) => (list, whole),
            _ => return Err(EXPECTED.into()),
        },
        _ => return Err(EXPECTED.into()),
    };
    let (mut names, mut weights) = (Vec::new(), Vec::new());
    let (mut configs, mut splits) = (Vec::new(), Vec::new());
    for dataset in &list {
        let dataset = dataset.as_object().ok_or(EXPECTED)?;
        let paths = paths(dataset)?;
        let weight = dataset.get("weight").filter(|weight| !weight.is_null());
        if let (Some(weight), true) = (weight, paths.len() > 1) {
            return Err(format!(
                "`weight` = {weight} of several `data_files`: write dataset_name and dataset_weights, one for each"
            ));
        }
        weights.extend(paths.iter().map(|_| weight.map(word)));
        names.extend(paths);
        configs.push(text_field(dataset, &["name", "config"])?.unwrap_or_default());
        splits.push(text_field(dataset, &["split"])?.unwrap_or_else(|| "train".into()));
        // Columns are read where they are needed.
        let known = ["path", "id", "name", "config", "split", "data_files", "data_dir", "columns", "weight"];
        if let Some(other) = dataset.keys().find(|name| !known.contains(&name.as_str())) {
            return Err(format!("`{other}`: expected {}", known.join(", ")));
        }
    }
    let mut settings = vec![Setting::new("dataset_name", names)];
    if weights.iter().any(Option::is_some) {
        let weights = weights.into_iter().map(|weight| weight.unwrap_or_else(|| "1".into())).collect();
        settings.push(Setting::new("dataset_weights", weights));
    }
    for (kind, ours, values) in [("configs", "dataset_config", configs), ("splits", "dataset_train_split", splits)] {
        match &values[..] {
            [first, rest @ ..] if rest.iter().all(|other| other == first) => {
                if !first.is_empty() {
                    settings.push(Setting::new(ours, vec![first.clone()]));
                }
            }
            [] => {}
            several => {
                return Err(format!(
                    "expected one of the {kind} for all datasets, {ours}; found {}",
                    several.join(", ")
                ));
            }
        }
    }
    for (name, value) in whole.iter().filter(|(_, value)| !value.is_null()) {
        match name.as_str() {
            "test_split_size" => settings.push(Setting::new("eval_split_size", vec![word(value)])),
            "seed" => {
                notes.push(format!(
                    "{DATASET_MIXTURE}: seed = {value} has no effect: rows are drawn by `seed` of the run"
                ));
            }
            other => return Err(format!("`{other}`: expected datasets, test_split_size or seed")),
        }
    }
    Ok(settings)
}

/// Returns the files of a dataset, or its name.
fn paths(dataset: &Map<String, Value>) -> Result<Vec<String>, String> {
    let files = match dataset.get("data_files") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(file)) => vec![file.clone()],
        Some(Value::Array(files)) if files.iter().all(Value::is_string) => files.iter().map(word).collect(),
        Some(other) => return Err(format!("`data_files`: expected a path or a list of paths, found {other}")),
    };
    let path = text_field(dataset, &["path", "id"])?.ok_or("expected the `path` of each dataset")?;
    // These name the reader of the files.
    if ["json", "csv", "parquet"].contains(&path.as_str()) {
        return if files.is_empty() {
            Err(format!("`path` = {path}: expected `data_files` with it"))
        } else {
            Ok(files)
        };
    }
    let dir = text_field(dataset, &["data_dir"])?.map_or(path.clone(), |dir| format!("{path}/{dir}"));
    Ok(if files.is_empty() { vec![dir] } else { files.iter().map(|file| format!("{dir}/{file}")).collect() })
}

/// Returns the text under the first of these names that the dataset has.
fn text_field(dataset: &Map<String, Value>, names: &[&str]) -> Result<Option<String>, String> {
    match names.iter().find_map(|name| Some((name, dataset.get(*name)?))) {
        None | Some((_, Value::Null)) => Ok(None),
        Some((_, Value::String(text))) => Ok(Some(text.clone())),
        Some((name, other)) => Err(format!("`{name}`: expected a text, found {other}")),
    }
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), String::from)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use crate::cli::Task;
    use crate::cli::testing::{parse_words, with_file};

    #[test]
    fn a_mixture_of_datasets_becomes_names_weights_and_a_split() {
        let words = ["sft", "--model_name_or_path", "m", "--output_dir", "o"];
        let read = |text: &str| match with_file(text, &words).unwrap_or_else(|error| panic!("{text}: {error}")) {
            Task::Sft(config) => config.data,
            task => panic!("{task:?}"),
        };
        let data = read(
            "datasets:\n  - path: a\n    split: train_sft\n    columns: [prompt]\n  - path: b\n    split: train_sft\n",
        );
        assert_eq!(
            (data.dataset_name, data.dataset_train_split),
            (["a", "b"].map(PathBuf::from).into(), "train_sft".into())
        );
        let data =
            read("datasets:\n- {path: json, data_files: [x.jsonl, y.jsonl]}\n- {path: c, data_dir: d, weight: 0.5}\n");
        assert_eq!(data.dataset_name, ["x.jsonl", "y.jsonl", "c/d"].map(PathBuf::from));
        assert_eq!(data.dataset_weights, [1.0, 1.0, 0.5]);
        let text =
            "dataset_mixture:\n  datasets:\n    - {id: a, config: c, weight: 1.0}\n  seed: 0\n  test_split_size: 0.1\n";
        let data = read(text);
        assert_eq!((data.dataset_config.as_deref(), data.eval_split_size), (Some("c"), Some(0.1)));
        let mut notes = Vec::new();
        let mixture = r#"{"datasets": [{"id": "a"}], "seed": 7, "test_split_size": null}"#;
        super::settings(mixture, &mut notes).unwrap();
        assert_eq!(notes, ["dataset_mixture: seed = 7 has no effect: rows are drawn by `seed` of the run"]);
        for (text, message) in [
            (
                "datasets: [{path: a, split: x}, {path: b}]\n",
                "expected one of the splits for all datasets, dataset_train_split; found x, train",
            ),
            ("datasets: [{name: a}]\n", "expected the `path` of each dataset"),
            ("datasets: [{path: a, revision: b}]\n", "`revision`: expected path, id,"),
            ("datasets: [{path: a}]\ndataset_name: b\n", "datasets and dataset_name both set it: give one of them"),
        ] {
            let error = with_file(text, &words).unwrap_err();
            assert!(
                error.starts_with("run.yaml:1: datasets ") && error.contains(message) && error.lines().count() == 1,
                "{error}"
            );
        }
        let error = with_file("seed: 1\ndatasets: [{path: a, weight: heavy}]\n", &words).unwrap_err();
        assert_eq!(error, "run.yaml:2: datasets: dataset_weights = heavy: expected a number");
        let line = ["--datasets", "[{\"path\": \"a\"}]"];
        assert!(parse_words(&[&words[..], &line].concat()).is_ok());
    }
}
