//! Settings that TRL takes from others where they are not set.

use std::path::Path;

use clap::ArgMatches;
use rlhf::run::group_names::{MODEL, POLICY};
use rlhf::schema::Setting as _;

use super::args::on_line;
use super::errors::Messages;
use super::flags;
use super::names;
use super::setting::Setting;

/// The commands that train.
pub(super) const TRAIN: [&str; 7] = ["sft", "reward", "dpo", "distill", "ppo", "grpo", "rloo"];

/// The folder of a run without `output_dir`, as TRL calls it.
pub(super) const OUTPUT_DIR: &str = "trainer_output";

/// Adds the settings that follow from others to `settings`, with a note for each. Returns whether `model_name_or_path` is the model to
/// train; otherwise it is the model of the tokenizer.
pub(super) fn add(command: &str, flags: &ArgMatches, settings: &mut Vec<Setting>, messages: &mut Messages) -> bool {
    if !TRAIN.contains(&command) {
        return false;
    }
    let policy = value(MODEL, flags, settings).filter(|_| command == "ppo" && value(POLICY, flags, settings).is_none());
    let trains_named_model = policy.is_some();
    settings.extend(policy.map(|model| Setting::new(POLICY, vec![model])));
    // A folder may be called `none`.
    let out = written("output_dir", flags, settings).unwrap_or_else(|| {
        messages.notes.push(format!("output_dir is not set: the run is in {OUTPUT_DIR}"));
        OUTPUT_DIR.into()
    });
    let pushes = value("push_to_hub", flags, settings).and_then(|yes| bool::read(&yes.to_lowercase()));
    if pushes == Some(true) && value("hub_model_id", flags, settings).is_none() {
        let name = Path::new(&out).file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        messages
            .notes
            .push(format!("hub_model_id is not set: the model is pushed to {name}, by the name of output_dir"));
        settings.push(Setting::new("hub_model_id", vec![name]));
    }
    trains_named_model || names::has(command)
}

/// Returns the value of the setting `key` on the command line or in the file; none for null.
fn value(key: &str, flags: &ArgMatches, settings: &[Setting]) -> Option<String> {
    written(key, flags, settings).filter(|value| !["none", "null"].contains(&&*value.to_ascii_lowercase()))
}

/// As [`value`], but also returns the words `none` and `null`.
fn written(key: &str, flags: &ArgMatches, settings: &[Setting]) -> Option<String> {
    let flag_value = on_line(flags, key).then(|| flags::text(flags, key).map(String::from));
    let file_value = || settings.iter().rev().find(|setting| setting.key == key)?.values.first().cloned();
    flag_value.unwrap_or_else(file_value)
}

#[cfg(test)]
mod tests {
    use crate::cli::Task;
    use crate::cli::testing::{least, parsed, with_file};

    #[test]
    fn the_first_example_of_trls_ppo_script_names_the_policy_by_model_name_or_path() {
        let words = ["ppo", "--dataset_name", "d", "--model_name_or_path", "m", "--reward_model_path", "r"];
        let Task::Ppo(config) = parsed(&[&words[..], &["--output_dir", "o"]].concat()).unwrap().task else { panic!() };
        assert_eq!((config.sft_model_path.to_str(), config.model_name_or_path), (Some("m"), None));
        let Task::Ppo(config) = with_file("sft_model_path: p\n", &words).unwrap() else { panic!() };
        assert_eq!((config.sft_model_path.to_str(), config.model_name_or_path), (Some("p"), Some("m".into())));
    }

    #[test]
    fn a_run_without_an_output_dir_is_in_the_folder_of_trl() {
        for command in super::TRAIN {
            let words = least(command);
            let at = words.iter().position(|word| *word == "--output_dir").unwrap();
            let result = parsed(&[&words[..at], &words[at + 2..]].concat()).unwrap();
            let run = match &result.task {
                Task::Sft(config) => &config.run,
                Task::Reward(config) => &config.run,
                Task::Dpo(config) => &config.run,
                Task::Distill(config) => &config.run,
                Task::Ppo(config) => &config.run,
                task => panic!("{task:?}"),
            };
            assert_eq!(run.output_dir.to_str(), Some("trainer_output"));
            assert_eq!(result.notes, ["output_dir is not set: the run is in trainer_output"], "{command}");
        }
    }

    #[test]
    fn a_model_is_pushed_by_the_name_of_its_folder() {
        let words = ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "runs/my-sft"];
        let result = parsed(&[&words[..], &["--push_to_hub"]].concat()).unwrap();
        let Task::Sft(config) = result.task else { panic!() };
        assert_eq!(config.run.hub.hub_model_id.as_deref(), Some("my-sft"));
        assert!(result.notes[0].starts_with("hub_model_id is not set: the model is pushed to my-sft"));
        let Task::Sft(config) = with_file("push_to_hub: true\nhub_model_id: me/x\n", &words).unwrap() else { panic!() };
        assert_eq!(config.run.hub.hub_model_id.as_deref(), Some("me/x"));
    }
}
