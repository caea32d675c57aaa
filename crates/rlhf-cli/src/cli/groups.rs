//! `rlhf grpo` and `rlhf rloo`: the flags of `rlhf ppo` with the defaults of a preset, and the names of TRL's `trl grpo` and `trl rloo`.
//!
//! `model_name_or_path` is the model to train there, as in TRL. A resolved configuration has `sft_model_path` too; then
//! `model_name_or_path` is the model of the tokenizer, as for `rlhf ppo`.

use std::ffi::OsString;
use std::path::Path;

use clap::builder::{OsStr, PossibleValuesParser, Resettable, Str, TypedValueParser as _};
use clap::{Arg, ArgMatches, Command};
use rlhf::Error;
use rlhf::reward::is_function_path;
use rlhf::rl::advantage::AdvantageEstimator;
use rlhf::run::group_names::{GROUP_NAMES, MODEL, NOT_OF_GROUPS, POLICY};
use rlhf::schema::renamed;
use rlhf::settings::{PpoConfig, Preset};

use super::flags;
use super::foreign::{of_file, of_line};
use super::launch::{COMMANDS, LAUNCH};
use super::names::{NAMES, has};
use super::plan::PLAN;
use super::setting::Setting;

/// Help of the settings that these commands describe in other words than `rlhf ppo`.
const HELP: [(&str, &str); 9] = [
    (
        MODEL,
        "Causal language model to train, the policy: a folder or a hub name. A frozen copy of it is the reference model, if beta is \
         not 0",
    ),
    ("model_revision", "Branch, tag or commit of `model_name_or_path` on the hub"),
    ("new_reward_head", "Add a randomly initialized score head to a reward model that has none"),
    (
        "advantage_estimator",
        "How the responses of a group are compared: `grpo` with their mean, `rloo` each with the others. `rlhf ppo` explains the other \
         estimators, which need no group",
    ),
    ("num_ppo_epochs", "Passes over the responses of an update"),
    (
        "total_episodes",
        "Number of responses to train on, rounded up to whole updates, in place of `max_steps` [default: `num_train_epochs` times the \
         prompts and their responses]",
    ),
    (
        "unsupervised_dataset_name",
        "Dataset of texts for a language-modelling loss beside the policy's own: a file, a folder or a hub name",
    ),
    (
        "print_answers",
        "Print and save some of the responses that the run trains on; TRL's log_completions does so every logging_steps updates",
    ),
    ("kl_in_loss", "Add the KL penalty to the policy's loss, as TRL's GRPOTrainer does, instead of the rewards"),
];

/// Returns the command of `preset`: the flags of `rlhf ppo` with the preset's defaults and TRL's names, without those that have no effect.
pub(super) fn command(preset: Preset) -> Command {
    let name = preset.command();
    let preset_settings = preset.settings();
    let only =
        move |text: &str| if text == name { Ok(flags::Word(text.into())) } else { Err(format!("expected {name}")) };
    flags::command::<PpoConfig>(name).mut_args(|arg| {
        let id = arg.get_id().as_str().to_string();
        let preset_default = preset_settings.iter().find(|(key, _)| *key == id);
        let arg = if let Some((_, value)) = preset_default { arg.default_value(value) } else { arg };
        let help = renamed(&arg.get_help().map_or(String::new(), ToString::to_string), &NAMES);
        let help = help.replace(", with the presets `grpo` and `rloo`", "");
        let help = HELP.iter().find(|(named, _)| *named == id).map_or(help, |(_, help)| (*help).to_string());
        let arg = arg.help(help);
        match (id.as_str(), GROUP_NAMES.iter().find(|(ppo_name, _)| *ppo_name == id)) {
            ("advantage_estimator", _) => without_gae(arg),
            ("preset", _) => arg.hide(true).default_value(name).value_parser(only),
            (POLICY, _) => arg.required(false).hide(true).default_value("."),
            (MODEL, _) => arg.required(true).default_value(Resettable::<OsStr>::Reset),
            ("reward", Some((_, trl_name))) => with_trl_name(arg, trl_name).value_parser(reward),
            (_, Some((_, trl_name))) => with_trl_name(arg, trl_name),
            (id, None) if NOT_OF_GROUPS.iter().any(|(name, _)| *name == id) => arg.hide(true),
            _ => arg,
        }
    })
}

/// Returns the flag of the estimators. The help does not list `gae`, which needs a value model; it is still accepted.
fn without_gae(arg: Arg) -> Arg {
    let gae = AdvantageEstimator::Gae.name();
    let listed = arg
        .get_possible_values()
        .into_iter()
        .map(|value| if value.get_name() == gae { value.hide(true) } else { value });
    let parser = PossibleValuesParser::new(listed).map(flags::Word);
    arg.value_parser(parser)
}

/// Returns the flag `arg` with TRL's name as its long name; the other names become aliases.
fn with_trl_name(arg: Arg, trl_name: &'static str) -> Arg {
    let id = arg.get_id().as_str().to_string();
    let others: Vec<String> = arg.get_all_aliases().unwrap_or_default().into_iter().map(String::from).collect();
    let others = others.into_iter().filter(|other| other != trl_name).chain([id]);
    others.fold(arg.alias(Resettable::<Str>::Reset), Arg::alias).long(trl_name)
}

/// Reads a reward: a path with dots is a function of Python, as in TRL.
#[expect(clippy::unnecessary_wraps, reason = "the form of a parser of clap")]
fn reward(text: &str) -> Result<flags::Word, String> {
    let is_function = is_function_path(text) && !Path::new(text).exists();
    Ok(flags::Word(if is_function { format!("python:{text}") } else { text.into() }))
}

/// Returns the error of a run of the command line `words`, with settings called by the names of the command's flags.
pub(crate) fn with_command_names(words: impl IntoIterator<Item = OsString>, error: Error) -> Error {
    let mut words = words.into_iter().skip(1).filter_map(|word| word.into_string().ok()).peekable();
    // These have the command that they start or plan after their own flags.
    let is_outer = words.next_if(|word| [LAUNCH, PLAN].contains(&word.as_str())).is_some();
    let command = if is_outer { words.find(|word| COMMANDS.contains(&word.as_str())) } else { words.next() };
    if !command.is_some_and(|name| has(&name)) {
        return error;
    }
    let renamed = |text: String| renamed(&text, &NAMES);
    match error {
        error if error.is_usage() => error.map_usage(renamed).unwrap_or_else(|other| other),
        Error::Run(message) => Error::Run(renamed(message)),
        Error::Reward { name, source } => {
            Error::Reward { name, source: Box::new(Error::Run(renamed(source.to_string()))) }
        }
        Error::Invalid { path, message } => Error::Invalid { path, message: renamed(message) },
        error => error,
    }
}

/// Returns the defaults of `rlhf ppo` for the settings of `preset`, which the preset replaces.
pub(super) fn without_preset(rlhf: &Command, preset: Preset) -> Vec<Setting> {
    let ppo = rlhf.find_subcommand("ppo").expect("it is a command");
    let default_setting = |key: &str| {
        let arg = ppo.get_arguments().find(|arg| arg.get_id() == key).expect("it is a flag");
        let values = arg.get_default_values().iter().filter_map(|value| value.to_str());
        Setting::new(key, values.map(String::from).collect())
    };
    preset.settings().into_iter().map(|(key, _)| default_setting(key)).collect()
}

/// Sets the model to train where one of its two names is set.
pub(super) fn translate(flags: &ArgMatches, settings: &mut Vec<Setting>) {
    let without_none =
        |word: Option<String>| word.filter(|word| !["none", "null"].contains(&&*word.to_ascii_lowercase()));
    let [model, policy] =
        [MODEL, POLICY].map(|key| (without_none(of_line(flags, key)), without_none(of_file(settings, key))));
    match (model, policy) {
        // The flag is the model to train, whatever the file has.
        ((Some(model), _), (None, _)) | ((None, Some(model)), (None, None)) => {
            settings.push(Setting::new(POLICY, vec![model]));
        }
        ((None, None), (policy, file_policy)) => {
            settings.extend(policy.or(file_policy).map(|policy| Setting::new(MODEL, vec![policy])));
        }
        _ => {}
    }
}

/// Makes the tokenizer the policy's, unless `model_name_or_path` is another model.
pub(super) fn use_policy_tokenizer(config: &mut PpoConfig) {
    config.model_name_or_path = config.model_name_or_path.take().filter(|model| *model != config.sft_model_path);
}

#[cfg(test)]
mod tests {
    use rlhf::settings::{self, LossType};

    use super::*;
    use crate::cli::Task;
    use crate::cli::names::PRESETS;
    use crate::cli::testing::{least, parse_words, parsed, with_file};

    #[track_caller]
    fn read(command: &str, words: &[&str]) -> PpoConfig {
        match parse_words(&[&least(command)[..], words].concat()).unwrap() {
            Task::Ppo(config) => config,
            task => panic!("not ppo: {task:?}"),
        }
    }

    #[test]
    fn the_commands_are_ppo_with_their_presets() {
        for preset in PRESETS {
            let expected = PpoConfig { reward_model_path: None, ..PpoConfig::with_preset(preset, "m", "", "d", "o") };
            assert_eq!(read(preset.command(), &[]), expected);
            let words = ["ppo", "--preset", preset.command(), "--sft_model_path", "m", "--dataset_name", "d"];
            let Task::Ppo(same) = parse_words(&[&words[..], &["--output_dir", "o"]].concat()).unwrap() else {
                panic!()
            };
            assert_eq!(same, expected);
            let error = parse_words(&[&least(preset.command())[..], &["--preset", "trl"]].concat()).unwrap_err();
            assert!(error.contains(&format!("expected {}", preset.command())), "{error}");
            let error = parse_words(&[preset.command(), "--output_dir", "o"]).unwrap_err();
            assert_eq!(
                error,
                "the following required arguments were not provided: --model_name_or_path <PATH>, --dataset_name <PATH>..."
            );
        }
    }

    #[test]
    fn errors_call_the_model_by_the_flag_of_the_command() {
        let told =
            |line: &str, error: Error| with_command_names(line.split(' ').map(OsString::from), error).to_string();
        let error = || Error::Usage("sft_model_path = m: the reward model is this same folder".into());
        for line in ["rlhf grpo", "rlhf launch --nproc_per_node 2 grpo", "rlhf plan --memory 1GB rloo --lr 1"] {
            assert_eq!(told(line, error()), "model_name_or_path = m: the reward model is this same folder", "{line}");
        }
        for line in ["rlhf ppo", "rlhf launch ppo --preset grpo", "rlhf plan"] {
            assert_eq!(told(line, error()), error().to_string(), "{line}");
        }
        let changed = Error::invalid("out/checkpoint-1", "inputs have changed since: sft_model_path = m: x");
        assert_eq!(
            told("rlhf rloo", changed),
            "out/checkpoint-1: inputs have changed since: model_name_or_path = m: x"
        );
        let help = parse_words(&["grpo", "--help"]).unwrap_err();
        assert!(!help.contains(POLICY) && help.contains("commit of `model_name_or_path`"), "{help}");
    }

    #[test]
    fn names_of_trl_are_names_of_the_same_settings() {
        let config = read(
            "grpo",
            &[
                "--max_completion_length",
                "7",
                "--beta",
                "0.1",
                "--epsilon",
                "0.3",
                "--epsilon_high",
                "0.4",
                "--delta",
                "2",
            ],
        );
        assert_eq!((config.response_length, config.kl.kl_coef, config.cliprange), (7, 0.1, 0.3));
        assert_eq!((config.loss.cliprange_high, config.loss.dual_clip), (Some(0.4), Some(2.0)));
        let config = read("rloo", &["--num_iterations", "2", "--reward_model_name_or_path", "judge", "--beta", "0"]);
        assert_eq!(
            (config.num_ppo_epochs, config.reward_model_path, config.kl.kl_coef),
            (2, Some("judge".into()), 0.0)
        );
        for preset in PRESETS {
            let command = command(preset);
            for (ppo_name, trl_name) in GROUP_NAMES {
                let arg = command.get_arguments().find(|arg| arg.get_id() == ppo_name).unwrap();
                assert_eq!(arg.get_long(), Some(trl_name));
                assert!(arg.get_all_aliases().unwrap().contains(&ppo_name), "{ppo_name}");
            }
        }
    }

    #[test]
    fn the_model_is_that_of_model_name_or_path_unless_the_file_is_of_a_run() {
        let others = ["grpo", "--dataset_name", "d", "--output_dir", "o"];
        let models = |text: &str, words: &[&str]| {
            let Task::Ppo(config) = with_file(text, &[&others[..], words].concat()).unwrap() else { panic!() };
            (config.sft_model_path.display().to_string(), config.model_name_or_path)
        };
        assert_eq!(models("model_name_or_path: m\n", &[]), ("m".into(), None));
        assert_eq!(models("model_name_or_path: null\nsft_model_path: m\n", &[]), ("m".into(), None));
        assert_eq!(models("model_name_or_path: t\nsft_model_path: m\n", &[]), ("m".into(), Some("t".into())));
        let words = ["--model_name_or_path", "n"];
        assert_eq!(models("model_name_or_path: null\nsft_model_path: m\n", &words), ("n".into(), None));
        assert_eq!(models("model_name_or_path: m\n", &words), ("n".into(), None));
        assert_eq!(models("seed: 1\n", &["--sft_model_path", "m"]), ("m".into(), None));
        assert_eq!(models("seed: 1\n", &["--sft_model_path", "m", "--model_name_or_path", "t"]).1, Some("t".into()));
    }

    #[test]
    fn a_resolved_configuration_is_read_back_by_its_command_and_by_ppo() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        for (preset, tokenizer) in [(Preset::Grpo, None), (Preset::Rloo, Some("t".into()))] {
            let config =
                PpoConfig { model_name_or_path: tokenizer, ..PpoConfig::with_preset(preset, "m", "r", "d", "o") };
            settings::write_resolved(&config, &path).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains("\nmax_completion_length: 512\n") && !text.contains("vf_coef"), "{text}");
            assert_eq!(text.contains("\nmodel_name_or_path: m\n"), !text.contains(POLICY), "{text}");
            for command in [preset.command(), "ppo"] {
                let task = parse_words(&[command, "--config", path.to_str().unwrap()]).unwrap();
                assert_eq!(task, Task::Ppo(config.clone()));
            }
        }
    }

    #[test]
    fn what_has_no_effect_is_not_shown_and_refused_by_the_names_of_the_command() {
        let usual = PpoConfig::with_preset(Preset::Grpo, "m", "r", "d", "o");
        let usual = serde_json::to_value(usual).unwrap();
        for preset in PRESETS {
            let long = parse_words(&[preset.command(), "--help"]).unwrap_err();
            let command = command(preset);
            for (name, only) in NOT_OF_GROUPS {
                assert!(!long.contains(&format!("--{name}")), "{name}");
                assert!(command.get_arguments().any(|arg| arg.get_id() == name), "{name}");
                assert_eq!(usual[name], serde_json::from_str::<serde_json::Value>(only).unwrap(), "{name}");
            }
            for (ppo_name, trl_name) in GROUP_NAMES {
                assert!(
                    long.contains(&format!("--{trl_name} ")) && !long.contains(&format!("--{ppo_name} ")),
                    "{ppo_name}"
                );
            }
            assert!(
                !["kl_coef`", "response_length", "cliprange", "ppo_epochs"].iter().any(|name| long.contains(name)),
                "{long}"
            );
        }
        let error = |words: &[&str]| parse_words(&[&least("grpo")[..], words].concat()).unwrap_err();
        for (words, message) in [
            (
                &["--vf_coef", "1"][..],
                "vf_coef = 1 has no effect with advantage_estimator = grpo: there is no value model",
            ),
            (&["--min_new_tokens", "600"], "min_new_tokens = 600: expected at most max_completion_length = 512"),
            (&["--kl_estimator", "abs"], "kl_estimator = abs has no effect with beta = 0: there is no reference model"),
            (
                &["--num_generation", "4"],
                "unexpected argument '--num_generation' found; tip: a similar argument exists: '--num_generations'",
            ),
            (
                &["--max_completion_lenght", "4"],
                "unexpected argument '--max_completion_lenght' found; tip: a similar argument exists: '--max_completion_length'",
            ),
        ] {
            assert_eq!(error(words), message);
        }
        assert!(parse_words(&[&least("rloo")[..], &["--vf_coef", "0.1", "--lam", "0.95"]].concat()).is_ok());
        let result = parsed(
            &[&least("grpo")[..], &["--reward_funcs", "a", "b", "c", "--reward_weights", "1", "2", "3"]].concat(),
        );
        let error = result.unwrap_err();
        assert_eq!(error.lines().filter(|line| line.starts_with("reward_funcs = ")).count(), 3, "{error}");
        assert_eq!(error.lines().count(), 3, "{error}");
    }

    #[test]
    fn settings_of_open_r1_name_the_column_of_the_prompts() {
        let text = "system_prompt: Think.\ndataset_prompt_column: problem\n";
        let Task::Ppo(config) = with_file(text, &least("grpo")).unwrap() else { panic!() };
        assert_eq!(
            (&config.data.dataset_columns[..], config.apply_chat_template),
            (&["prompt=problem".to_string()][..], true)
        );
        assert_eq!(config.system_prompt.as_deref(), Some("Think."));
        let Task::Ppo(config) = with_file("dataset_prompt_column: prompt\n", &least("grpo")).unwrap() else { panic!() };
        assert!(config.data.dataset_columns.is_empty() && config.apply_chat_template);
    }

    #[test]
    fn a_default_of_the_preset_that_a_flag_makes_meaningless_is_left_out() {
        let result = parsed(&[&least("grpo")[..], &["--stop_token_id", "3"]].concat()).unwrap();
        let Task::Ppo(config) = result.task else { panic!() };
        assert_eq!((config.stop_token, config.stop_token_id), (None, Some(3)));
        assert!(result.notes[0].starts_with("`stop_token` of the preset is left out: "), "{:?}", result.notes);
        // A null of the file is the default of the command.
        let Task::Ppo(config) = with_file("loss_type: null\n", &least("grpo")).unwrap() else { panic!() };
        assert_eq!(config.loss.loss_type, LossType::Dapo);
    }
}
