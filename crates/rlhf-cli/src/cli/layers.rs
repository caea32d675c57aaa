//! Precedence of settings: flags, then the configuration file, then the preset, then the defaults.

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use rlhf::schema::{Choices as _, NONE, Refusals};
use rlhf::settings::{PpoConfig, Preset, RewardConfig, SftConfig};
use rlhf::{Error, Refusal, Result};

use super::errors::{Messages, Stop};
use super::fields::optional_with_default;
use super::setting::Setting;
use super::{flags, foreign, groups, names};

/// Settings translated from another system, in addition to those of the file.
pub(super) struct Translated {
    /// The defaults of the preset.
    pub(super) preset: Vec<Setting>,
    /// A setting that wins over the command line.
    pub(super) forced: Option<Setting>,
}

/// Replaces flags of other systems among `settings`, and those on the command line, by our settings.
pub(super) fn translated(
    command: &Command,
    flags: &ArgMatches,
    settings: &mut Vec<Setting>,
    messages: &mut Messages,
) -> Translated {
    let name = command.get_name();
    let has_preset = command.get_arguments().any(|arg| arg.get_id() == "preset");
    let preset = if has_preset { selected_preset(flags, settings) } else { None };
    if names::has(name) {
        groups::translate(flags, settings);
    }
    let forced = foreign::translate(command, preset, flags, settings, messages);
    Translated { preset: preset_settings(name, preset, settings), forced }
}

/// Replaces null in a file by `none` for settings of which `none` is a value, also in a section. Any other null stands for the default.
pub(super) fn name_nulls(rlhf: &Command, settings: &mut [Setting]) {
    let nulls: Vec<&mut Setting> = settings.iter_mut().filter(|setting| setting.values.is_empty()).collect();
    if nulls.is_empty() {
        return;
    }
    let optional = optional_with_default(rlhf);
    for Setting { key, values, .. } in nulls {
        if key.rsplit('.').next().is_some_and(|name| optional.contains(&name)) {
            values.push(NONE.into());
        }
    }
}

/// Builds and checks the configuration of `preset` and `settings`; the settings win.
///
/// A value of the preset that is refused because of what the user has set has no effect in this run: it is left out, with a note.
/// Everything else that `check` refuses is added to the refusals.
pub(super) fn resolve<C>(
    mut preset: Vec<Setting>,
    settings: &[Setting],
    on_line: impl Fn(&str) -> bool,
    build: impl Fn(&[&[Setting]], &mut Refusals) -> Result<C, Stop>,
    check: impl Fn(&C) -> Result<()>,
    messages: &mut Messages,
) -> Result<C, Stop> {
    let is_user_set = |key: &str| on_line(key) || settings.iter().any(|setting| setting.key == key);
    let mut config = build(&[&preset, settings], &mut messages.refusals)?;
    loop {
        let checked = check(&config);
        let preset_place = |refusal: &Refusal| {
            let mut keys = refusal.settings().filter(|key| !is_user_set(key));
            keys.find_map(|key| preset.iter().position(|setting| setting.key == key))
        };
        let refused = checked.as_ref().err().map_or_else(Vec::new, Error::refusals);
        let Some((refusal, place)) = refused.iter().find_map(|refusal| Some((refusal, preset_place(refusal)?))) else {
            messages.refusals.add(checked)?;
            return Ok(config);
        };
        let setting = preset.remove(place);
        let note = format!("`{}` of the preset is left out: {refusal}", setting.key);
        messages.notes.push(messages.refusals.renamed(&note));
        config = build(&[&preset, settings], &mut Refusals::default())?;
    }
}

/// Returns the preset that the flags name, or else the file's `settings`.
pub(super) fn selected_preset(flags: &ArgMatches, settings: &[Setting]) -> Option<Preset> {
    let flag_preset = || flags::text(flags, "preset").and_then(Preset::named);
    let file_value = || settings.iter().rev().find(|setting| setting.key == "preset")?.values.first();
    match flags.value_source("preset") {
        Some(ValueSource::CommandLine) => flag_preset(),
        _ => file_value().and_then(|name| Preset::named(name)).or_else(flag_preset),
    }
}

/// Returns the preset's settings for `command`, except those that `settings` set to null and for which `none` is a value. Any other
/// null stands for the default, which is the preset's.
pub(super) fn preset_settings(command: &str, preset: Option<Preset>, settings: &[Setting]) -> Vec<Setting> {
    let Some(preset) = preset else { return Vec::new() };
    type Plain = fn() -> Command;
    let (values, plain): (_, Plain) = match command {
        "sft" => (preset.sft_settings(), || flags::command::<SftConfig>("sft")),
        "reward" => (preset.reward_settings(), || flags::command::<RewardConfig>("reward")),
        _ => (preset.settings(), || flags::command::<PpoConfig>("ppo")),
    };
    let is_null = |key: &str| settings.iter().any(|setting| setting.key == key && setting.values.is_empty());
    // The flags, hundreds of them, are built only if there is a null.
    let is_optional = |key: &str| {
        let plain = plain();
        let arg = plain.get_arguments().find(|arg| arg.get_id() == key);
        arg.is_some_and(|arg| arg.get_default_values().iter().any(|value| value == NONE))
    };
    let values = values.into_iter().filter(|(key, _)| !(is_null(key) && is_optional(key)));
    values.map(|(key, value)| Setting { key: key.into(), line: 0, values: vec![value.into()] }).collect()
}

#[cfg(test)]
mod tests {
    use rlhf::rl::math::{KlEstimator, ScorePosition};
    use rlhf::settings::{
        self, EosInLoss, EvaluateConfig, Format, GenerateConfig, LongPrompts, LrSchedulerType, ReportTo, StopToken,
        WhitenAdvantages,
    };

    use super::*;
    use crate::cli::Task;
    use crate::cli::testing::{PPO, parse_words, parsed, ppo, ppo_error, with_file};

    #[test]
    fn none_and_null_unset_what_an_earlier_flag_or_the_file_set() {
        let words = ["--total_episodes", "8", "--total_episodes", "None", "--stop_token", "eos", "--stop_token=null"];
        let config = ppo(&words);
        assert_eq!((config.total_episodes, config.stop_token), (None, None));
        let words = [&PPO[..], &["--stop_token_id", "none"]].concat();
        let Task::Ppo(config) = with_file("stop_token_id: 3\n", &words).unwrap() else { panic!() };
        assert_eq!(config.stop_token_id, None);
    }

    #[test]
    fn a_preset_wins_over_the_defaults_and_the_file_and_flags_win_over_it() {
        let config = ppo(&["--preset", "deepspeed-chat"]);
        assert_eq!(config, PpoConfig::with_preset(Preset::DeepspeedChat, "policy", "judge", "prompts.jsonl", "out"));
        let words = [&PPO[..], &["--temperature", "0.7"]].concat();
        let Task::Ppo(config) = with_file("preset: deepspeed-chat\nkl_coef: 0.05\n", &words).unwrap() else { panic!() };
        assert_eq!((config.kl.kl_coef, config.temperature, config.vf_coef), (0.05, 0.7, 1.0));
        let words = [&PPO[..], &["--preset=trl"]].concat();
        let Task::Ppo(config) = with_file("preset: deepspeed-chat\nvf_coef: 0.5\n", &words).unwrap() else { panic!() };
        assert_eq!((config.preset, config.kl.kl_coef, config.vf_coef), (Preset::Trl, 0.05, 0.5));
    }

    #[test]
    fn null_is_the_default_of_the_preset_unless_it_is_a_value() {
        let words = [
            "grpo",
            "--model_name_or_path",
            "m",
            "--dataset_name",
            "d",
            "--reward",
            "length:target=4",
            "--output_dir",
            "o",
        ];
        let text =
            "max_completion_length: null\nnum_generations: null\nloss_type: ~\nlearning_rate:\nstop_token: null\n";
        let Task::Ppo(config) = with_file(text, &words).unwrap() else { panic!() };
        let plain = PpoConfig::with_preset(Preset::Grpo, "m", "", "d", "o");
        assert_eq!((config.response_length, config.learning_rate), (plain.response_length, plain.learning_rate));
        assert_eq!((config.advantage.num_generations, config.loss.loss_type), (8, plain.loss.loss_type));
        assert_eq!((config.stop_token, plain.stop_token), (None, Some(StopToken::Eos)));
        // As in TRL, no limit but the model's.
        let words = ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"];
        let Task::Sft(config) = with_file("max_length: null\n", &words).unwrap() else { panic!() };
        assert_eq!(config.max_length, None);
        let Task::Sft(config) = parse_words(&[&words[..], &["--max_length", "none"]].concat()).unwrap() else {
            panic!()
        };
        assert_eq!(config.max_length, None);
        let Task::Sft(config) = parse_words(&words).unwrap() else { panic!() };
        assert_eq!(config.max_length, Some(1024));
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_the_defaults() {
        let text = "# a run\nsft_model_path: from-file\nlearning-rate: 1e-5\nseed: 7\nbf16: yes\nkl_estimator: k3\n\
                    total_episodes: null\ngamma:\nlam: ~\n";
        let words = ["ppo", "--seed", "8", "--reward_model_path", "r", "--dataset_name", "d", "--output_dir", "o"];
        let Task::Ppo(config) = with_file(text, &words).unwrap() else { panic!() };
        let mut expected = PpoConfig::new("from-file", "r", "d", "o");
        expected.learning_rate = 1e-5;
        expected.run.seed = 8;
        expected.run.bf16 = true;
        expected.kl.kl_estimator = KlEstimator::K3;
        assert_eq!(config, expected);
        let words = [&words[..], &["--bf16=false"]].concat();
        let Task::Ppo(config) = with_file(text, &words).unwrap() else { panic!() };
        assert!(!config.run.bf16);
    }

    #[test]
    fn prompts_given_as_words_replace_those_of_the_file() {
        let text = "model_name_or_path: m\nprompts: [from file, 007]\n";
        let Task::Generate(config) = with_file(text, &["generate"]).unwrap() else { panic!() };
        assert_eq!(config.prompts, ["from file", "007"]);
        let Task::Generate(config) = with_file(text, &["generate", "my own"]).unwrap() else { panic!() };
        assert_eq!(config.prompts, ["my own"]);
    }

    #[test]
    fn a_value_of_a_preset_that_a_flag_makes_meaningless_is_left_out() {
        type Look = fn(&PpoConfig) -> bool;
        let cases: [(&str, &str, Look, &str); 12] = [
            ("deepspeed-chat", "--lr_scheduler_type constant", |c| c.optimizer.warmup_steps == 0, "`warmup_steps`"),
            ("deepspeed-chat", "--vf_coef 0", |c| c.value.value_learning_rate.is_none(), "`value_learning_rate`"),
            ("deepspeed-chat", "--stop_token_id 3", |c| c.stop_token.is_none(), "`stop_token`"),
            ("deepspeed-chat", "--warmup_ratio 0.1", |c| c.optimizer.warmup_steps == 0, "`warmup_steps`"),
            ("deepspeed-chat", "--response_length 1", |c| c.mask.min_response_length == 0, "`min_response_length`"),
            (
                "deepspeed-chat",
                "--score_position last_token",
                |c| c.mask.last_value_in_loss && c.mask.eos_in_loss == EosInLoss::Always,
                "`last_value_in_loss`",
            ),
            (
                "deepspeed-chat",
                "--value_head",
                |c| c.legacy.value_head && c.value.value_learning_rate.is_none(),
                "`value_learning_rate`",
            ),
            ("trl-legacy", "--init_kl_coef 0", |c| !c.kl.adap_kl_ctrl && c.kl.kl_coef == 0.0, "`adap_kl_ctrl`"),
            ("trl-legacy", "--kl_coef_end 0.1", |c| !c.kl.adap_kl_ctrl, "`adap_kl_ctrl`"),
            ("trl-legacy", "--stop_token_id 3", |c| c.stop_token.is_none(), "`stop_token`"),
            ("trl-legacy", "--eos_in_loss never", |c| c.score_position == ScorePosition::AfterStop, "`score_position`"),
            ("trl-legacy", "--lr_scheduler_type linear", |c| c.optimizer.warmup_steps == 0, ""),
        ];
        for (preset, words, holds, noted) in cases {
            let words: Vec<&str> = words.split_whitespace().collect();
            let result = parsed(&[&PPO[..], &["--preset", preset], &words].concat())
                .unwrap_or_else(|e| panic!("{words:?}: {e}"));
            let Task::Ppo(config) = result.task else { panic!() };
            assert!(holds(&config), "{words:?}: {config:?}");
            let noted = if noted.is_empty() { String::new() } else { format!("{noted} of the preset is left out: ") };
            assert!(
                result.notes.first().map_or("", String::as_str).starts_with(&noted),
                "{words:?}: {:?}",
                result.notes
            );
            // The configuration that the run writes is the same run.
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("run.yaml");
            settings::write_resolved(&config, &path).unwrap();
            assert_eq!(parse_words(&["ppo", "--config", path.to_str().unwrap()]).unwrap(), Task::Ppo(config));
        }
        // The user's own settings are refused, on the command line and in a file.
        let words = ["--preset", "deepspeed-chat", "--lr_scheduler_type", "constant", "--warmup_steps", "3"];
        assert!(ppo_error(&words).starts_with("warmup_steps = 3 has no effect with lr_scheduler_type = constant"));
        let error = with_file("preset: trl-legacy\nadap_kl_ctrl: true\nkl_coef: 0\n", &PPO).unwrap_err();
        assert!(error.starts_with("run.yaml:2: adap_kl_ctrl = true has no effect with kl_coef = 0"), "{error}");
        assert!(
            ppo_error(&["--preset", "trl-legacy", "--warmup_steps", "3"]).starts_with("warmup_steps = 3 has no effect")
        );
        assert!(ppo_error(&["--preset", "trl-legacy", "--fp16"]).starts_with("fp16 = true with value_head = true"));
        // A section of a pipeline is a file too.
        let text = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nppo: {preset: deepspeed-chat, vf_coef: 0}\n";
        let Task::Pipeline(config) = with_file(text, &["pipeline"]).unwrap() else { panic!() };
        assert_eq!(config.ppo.unwrap().value.value_learning_rate, None);
    }

    /// Returns a configuration with unusual values of every kind.
    fn unusual_ppo() -> PpoConfig {
        let mut ppo = PpoConfig::new("a: b # c", "007", "yes", "~x");
        ppo.value_model_path = Some("1.0".into());
        ppo.rewards.reward = ["tags=regex:^<a>, \"b\": 'c' #", "length:40"].map(String::from).into();
        ppo.rewards.reward_command = Some("python3 reward.py --x 'a b'".into());
        ppo.rewards.reward_weights = ["model=0.5", "tags=-1"].map(String::from).into();
        ppo.new_reward_head = true;
        ppo.data.dataset_test_split = "- 'quoted' \"twice\"".into();
        ppo.data.dataset_name.push("007".into());
        ppo.data.dataset_weights = vec![0.7, 1.0 / 3.0];
        ppo.data.eval_split_size = Some(0.05);
        ppo.prompt_length.max_prompt_length = Some(512);
        ppo.prompt_length.long_prompts = LongPrompts::TruncateLeft;
        ppo.total_episodes = Some(1000);
        ppo.num_train_epochs = 1.0 / 3.0;
        ppo.stop_token = Some(StopToken::Eos);
        ppo.missing_eos_penalty = Some(1.0);
        ppo.score_position = ScorePosition::LastToken;
        ppo.kl.kl_estimator = KlEstimator::Mse;
        ppo.preset = Preset::TrlPpov2;
        ppo.num_mini_batches = 2;
        ppo.whiten_advantages = WhitenAdvantages::MiniBatch;
        ppo.kl.kl_in_loss = true;
        ppo.kl.adap_kl_ctrl = true;
        ppo.kl.horizon = 1e5;
        ppo.loss.cliprange_high = Some(0.28);
        ppo.loss.dual_clip = Some(3.0);
        ppo.loss.target_kl = Some(0.1);
        ppo.value.value_learning_rate = Some(1e-5);
        ppo.value.value_lr_scheduler_type = Some(LrSchedulerType::ConstantWithWarmup);
        ppo.value.value_max_grad_norm = Some(0.0);
        ppo.generation.per_device_generation_batch_size = None;
        ppo.unsupervised.unsupervised_dataset_name = Some("texts".into());
        ppo.ema.enable_ema = true;
        ppo.value_peft.value_use_peft = Some(false);
        ppo.peft.use_peft = true;
        ppo.peft.lora_target_modules = vec!["q_proj".into(), "v_proj".into()];
        ppo.learning_rate = 1.41e-5;
        ppo.optimizer.lr_scheduler_type = LrSchedulerType::ConstantWithWarmup;
        ppo.optimizer.max_grad_norm = Some(0.1 + 0.2);
        ppo.optimizer.warmup_ratio = 0.1;
        ppo.run.seed = u64::MAX;
        ppo.run.tracking.report_to = vec![ReportTo::Tensorboard, ReportTo::Command("cat > x".into())];
        let kwargs = serde_json::json!({"wandb": {"tags": ["a", "b"], "x": {"y": 1.5}}});
        ppo.run.tracking.tracker_kwargs = kwargs.as_object().cloned().map(Into::into);
        ppo.run.num_threads = Some(1);
        ppo
    }

    /// Checks that the configuration of the task, written and read back, is the same.
    #[track_caller]
    fn is_read_back<C: serde::Serialize>(command: &str, config: C, task: fn(C) -> Task) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        settings::write_resolved(&config, &path).unwrap();
        assert_eq!(parse_words(&[command, "--config", path.to_str().unwrap()]).unwrap(), task(config));
    }

    #[test]
    fn a_resolved_configuration_read_back_is_the_same_run() {
        is_read_back("ppo", PpoConfig::new("a", "b", "c", "d"), Task::Ppo);
        is_read_back("ppo", unusual_ppo(), Task::Ppo);

        // With the preset's defaults, and with some of them changed back.
        let mut chat = PpoConfig::with_preset(Preset::DeepspeedChat, "a", "b", "c", "d");
        is_read_back("ppo", chat.clone(), Task::Ppo);
        (chat.kl.kl_coef, chat.stop_token, chat.prompt_length.max_prompt_length) = (0.05, None, None);
        chat.mask.eos_in_loss = EosInLoss::Never;
        chat.value.value_learning_rate = None;
        is_read_back("ppo", chat, Task::Ppo);

        let mut sft = SftConfig::from_scratch("c.json", "t", "d", "o");
        sft.completion_only_loss = false;
        sft.max_steps = Some(5);
        is_read_back("sft", sft, Task::Sft);

        let mut reward = RewardConfig::new("m", "d", "o");
        reward.center_rewards_coefficient = Some(0.01);
        is_read_back("reward", reward, Task::Reward);

        let mut generate = GenerateConfig::new("m");
        generate.prompts =
            ["two\nlines", "- x", "--do_sample", "none", "", " 007 ", "\u{1F3AC} é\t\"'"].map(String::from).into();
        generate.responses.stop_token_ids = vec![0, 50256];
        generate.responses.stop_strings = ["\n\n", "Human:", "7"].map(String::from).into();
        generate.responses.do_sample = Some(false);
        generate.responses.sampler.min_p = Some(0.05);
        generate.output_format = Some(Format::Jsonl);
        is_read_back("generate", generate, Task::Generate);

        let mut eval = EvaluateConfig::new("m", "d", "o");
        (eval.compare, eval.judge.judge_model) = (Some("n".into()), Some("j".into()));
        (eval.judge.judge_url, eval.judge.judge_temperature) = (Some("http://h/v1".into()), None);
        is_read_back("eval", eval, Task::Eval);
    }

    #[test]
    fn a_resolved_configuration_never_allows_overwriting() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        let mut config = PpoConfig::new("a", "b", "c", "d");
        config.run.overwrite_output_dir = true;
        settings::write_resolved(&config, &path).unwrap();
        let task = parse_words(&["ppo", "--config", path.to_str().unwrap()]).unwrap();
        assert_eq!(task, Task::Ppo(PpoConfig::new("a", "b", "c", "d")));
    }
}
