//! Rollouts: every response of every update, with the numbers that it is trained on.

use crate::checkpoint::ppo_config;
use crate::cli::json_lines;
use crate::support::{golden, init, near};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use rlhf::run::{Console, Resume};
use rlhf::settings::{PpoConfig, Preset, WhitenAdvantages};
use rlhf::train::ppo::ppo;
use serde_json::{Map, Value};
use std::fs::File;
use std::path::Path;

fn json(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Long(n) => (*n).into(),
        Field::Float(x) => f64::from(*x).into(),
        Field::Double(x) => (*x).into(),
        Field::Str(text) => text.as_str().into(),
        Field::ListInternal(list) => list.elements().iter().map(json).collect(),
        Field::Group(row) => row.get_column_iter().map(|(name, field)| (name.clone(), json(field))).collect(),
        other => panic!("{other}"),
    }
}

/// The rows of the rollout of an update.
fn rows(dir: &Path, step: usize) -> Vec<Map<String, Value>> {
    let file = File::open(dir.join(format!("rollouts/update-{step:06}.parquet"))).unwrap();
    let reader = SerializedFileReader::new(file).unwrap();
    let row =
        |row: parquet::record::Row| row.get_column_iter().map(|(name, field)| (name.clone(), json(field))).collect();
    reader.get_row_iter(None).unwrap().map(|found| row(found.unwrap())).collect()
}

fn numbers(row: &Map<String, Value>, name: &str) -> Vec<f64> {
    row[name].as_array().unwrap_or_else(|| panic!("{name} in {row:?}")).iter().map(|x| x.as_f64().unwrap()).collect()
}

fn metrics(dir: &Path) -> Vec<Map<String, Value>> {
    json_lines(&std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap())
}

fn logging(dir: &Path) -> PpoConfig {
    let mut config = ppo_config(dir);
    config.rollout_log.log_rollouts = true;
    config
}

#[test]
fn the_columns_are_what_an_update_trains_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = logging(dir.path());
    // So that an advantage is the score less the value.
    (config.gamma, config.lam, config.kl.kl_coef) = (1.0, 1.0, 0.0);
    config.whiten_advantages = WhitenAdvantages::None;
    config.rewards.reward_normalize = Vec::new();
    config.missing_eos_penalty = Some(0.25);
    ppo(&config, Console::Silent).unwrap();
    let out = &config.run.output_dir;
    for (step, line) in (1..).zip(metrics(out).iter().filter(|line| line["step"] != 0)) {
        let rows = rows(out, step);
        assert_eq!(rows.len(), 4);
        let mean = |value: &dyn Fn(&Map<String, Value>) -> f64| rows.iter().map(value).sum::<f64>() / 4.0;
        let number = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line:?}"));
        for (place, row) in rows.iter().enumerate() {
            assert_eq!((&row["step"], &row["row"], &row["group"]), (&step.into(), &place.into(), &place.into()));
            let (tokens, values) = (row["token_ids"].as_array().unwrap().len(), numbers(row, "values"));
            let stopped = row["token_ids"].as_array().unwrap().last().unwrap() == 192;
            assert_eq!(row["finish_reason"], if stopped { "stop" } else { "length" });
            assert!(values.len() == tokens || values.len() == tokens + 1);
            let (score, advantages) = (row["score"].as_f64().unwrap(), numbers(row, "advantages"));
            let parts = &row["components"];
            let sum = parts["model"].as_f64().unwrap() + parts["short"].as_f64().unwrap();
            near("score", score, sum - if stopped { 0.0 } else { 0.25 }, 1e-5);
            assert_eq!(advantages.len(), tokens);
            for (advantage, value) in advantages.iter().zip(&values) {
                near("advantage", *advantage, score - value, 1e-5);
            }
        }
        near("scores", mean(&|row| row["score"].as_f64().unwrap()), number("objective/scores"), 1e-5);
        for name in ["model", "short"] {
            let mean_reward = mean(&|row| row["components"][name].as_f64().unwrap());
            near(name, mean_reward, number(&format!("objective/scores/{name}")), 1e-6);
        }
        let sum = |row: &Map<String, Value>, name: &str| numbers(row, name).iter().sum::<f64>();
        near("entropy", mean(&|row| -sum(row, "logprobs")), number("objective/entropy"), 1e-4);
        near("kl", mean(&|row| sum(row, "logprobs") - sum(row, "ref_logprobs")), number("objective/kl"), 1e-4);
        near("length", mean(&|row| numbers(row, "token_ids").len() as f64), number("val/response_length"), 1e-9);
    }
}

/// GRPO on groups of two responses, with the folder and the data of `base`.
pub(crate) fn with_groups(base: PpoConfig) -> PpoConfig {
    let (run, data, rollout_log) = (base.run, base.data, base.rollout_log);
    let mut config =
        PpoConfig { run, data, rollout_log, ..PpoConfig::with_preset(Preset::Grpo, init("llama_policy"), "", "", "") };
    config.reward_model_path = None;
    config.model_name_or_path = Some(golden().join("models/gpt_neox"));
    (config.response_length, config.stop_token, config.stop_token_id) = (6, None, Some(192));
    config.rewards.reward = vec!["short=length:target=3".into()];
    config.advantage.num_generations = 2;
    config
}

#[test]
fn groups_without_a_critic_or_a_reference_have_no_columns_of_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = with_groups(logging(dir.path()));
    (config.per_device_train_batch_size, config.generation.max_steps) = (Some(4), Some(2));
    ppo(&config, Console::Silent).unwrap();
    for step in 1..=2 {
        let rows = rows(&config.run.output_dir, step);
        let groups: Vec<&Value> = rows.iter().map(|row| &row["group"]).collect();
        assert_eq!(groups, [0, 0, 1, 1]);
        for group in rows.chunks(2) {
            assert_eq!((&group[0]["prompt"], &group[0]["prompt_row"]), (&group[1]["prompt"], &group[1]["prompt_row"]));
            let advantages: Vec<f64> = group.iter().map(|row| numbers(row, "advantages")[0]).collect();
            near("their sum", advantages[0] + advantages[1], 0.0, 1e-5);
        }
        assert!(
            rows.iter().all(|row| !row.contains_key("values") && !row.contains_key("ref_logprobs")),
            "{:?}",
            rows[0]
        );
    }
}

#[test]
fn a_resumed_run_leaves_the_rollouts_of_an_uninterrupted_one_up_to_its_limit() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = logging(dir.path());
    config.run.checkpoints.save_steps = Some(2.into());
    ppo(&config, Console::Silent).unwrap();
    let whole = config.run.output_dir.clone();
    let names = |dir: &Path| {
        let mut names: Vec<String> = std::fs::read_dir(dir.join("rollouts"))
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let file_names = |steps: std::ops::RangeInclusive<usize>| {
        steps.map(|step| format!("update-{step:06}.parquet")).collect::<Vec<_>>()
    };
    assert_eq!(names(&whole), file_names(1..=5));
    // A branch of the run, from its second update on, with the newest two files.
    config.run.output_dir = dir.path().join("branch");
    config.run.checkpoints.resume_from_checkpoint = Some(Resume::From(whole.join("checkpoint-2")));
    config.rollout_log.rollouts_limit = Some(2);
    ppo(&config, Console::Silent).unwrap();
    assert_eq!(names(&config.run.output_dir), file_names(4..=5));
    for step in 4..=5 {
        assert_eq!(rows(&config.run.output_dir, step), rows(&whole, step));
    }
    // In place: the files of updates 3 to 5 are written anew.
    for later in [4, 5] {
        std::fs::remove_dir_all(whole.join(format!("checkpoint-{later}"))).unwrap();
    }
    let expected: Vec<_> = (1..=5).map(|step| rows(&whole, step)).collect();
    std::fs::write(whole.join("rollouts/update-000004.parquet"), "damaged").unwrap();
    config.run.output_dir.clone_from(&whole);
    config.run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
    config.rollout_log.rollouts_limit = None;
    ppo(&config, Console::Silent).unwrap();
    assert_eq!((1..=5).map(|step| rows(&whole, step)).collect::<Vec<_>>(), expected);
}
