//! The file of `rlhf pipeline`: settings of all stages at the top, a section for each stage, and the models that link the stages.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Command;
use rlhf::schema::{Choices as _, Refusals, Settings};
use rlhf::settings::{
    DistillConfig, DpoConfig, PipelineFlags, PpoConfig, Preset, Resume, RewardConfig, RunConfig, SftConfig, Stage,
};
use rlhf::train::pipeline::{DEFAULT_SPLIT, PipelineConfig};
use rlhf::{Error, Origin};

use super::args::{not_required, parse_matches};
use super::commands::PIPELINE;
use super::config_file::{origin, read_config};
use super::errors::{Messages, Stop};
use super::flags::NOT_SETTINGS;
use super::keys::Keys;
use super::layers::{Translated, name_nulls, resolve, translated};
use super::setting::{Setting, set_default, with_defaults};
use super::{flags, foreign};

/// Settings of the whole pipeline, which a section must not have.
const PIPELINE_SETTINGS: [&str; 4] =
    ["output_dir", "overwrite_output_dir", "resume_from_checkpoint", "resume_with_changed_inputs"];

/// Settings at the top level that only the first stage gets: the others start from its model.
const FIRST_STAGE_SETTINGS: [&str; 2] = ["model_name_or_path", "model_revision"];

/// Settings of the dataset at the top level, which do not apply to a dataset that a section names.
const DATASET_SETTINGS: [&str; 8] = [
    "dataset_name",
    "dataset_weights",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "eval_dataset_name",
    "data_split",
    "data_split_seed",
];

/// Returns the configurations of the stages in the file `path`, with the flags of the command line `args`. Settings that are refused
/// go to `messages`.
pub(super) fn parse(
    path: &Path,
    args: &[OsString],
    rlhf: &Command,
    messages: &mut Messages,
) -> Result<PipelineConfig, Stop> {
    let command = |name: &str| rlhf.find_subcommand(name).expect("it is a command");
    let all = stages_in(path);
    let stages: Vec<&Command> = all.iter().map(|stage| command(stage.name())).collect();
    let top = [command(PIPELINE)].into_iter().chain(stages.iter().copied()).collect();
    let keys = Keys { top, sections: stages.clone() };
    let mut read = read_config(path, &keys, &mut messages.refusals)?;
    name_nulls(rlhf, &mut read);
    let (settings, nulls): (Vec<Setting>, _) = read
        .into_iter()
        .partition(|setting| !setting.values.is_empty() || all.iter().any(|stage| stage.name() == setting.key));
    let file = File { path, stages: &stages, settings: &settings, nulls: &nulls };
    for &stage in &all {
        if let Some(key) = PIPELINE_SETTINGS.iter().find(|key| file.in_section(stage, key).is_some()) {
            let line = file.in_section(stage, key).map_or(1, |setting| setting.line);
            let message =
                format!("`{stage}.{key}`: expected it above the sections: it is a setting of the whole pipeline");
            messages.refusals.refuse_at(origin(path, line), message, [*key]);
        }
    }
    let command_settings = |command: &Command| {
        let has_flag = |setting: &&Setting| command.get_arguments().any(|arg| arg.get_id() == setting.key.as_str());
        settings.iter().filter(has_flag).cloned().collect::<Vec<_>>()
    };
    let pipeline_settings = command_settings(command(PIPELINE));
    let strict =
        rlhf.clone().mut_subcommand(PIPELINE, |command| pipeline_settings.into_iter().fold(command, set_default));
    let mut matches = parse_matches(&strict, args, &mut messages.refusals, |rlhf| {
        rlhf.mut_subcommand(PIPELINE, |command| command.mut_args(not_required))
    })?;
    let flags = flags::read::<PipelineFlags>(&matches.remove_subcommand().expect("it is a command").1)?;
    if let Some(Resume::From(dir)) = &flags.resume_from_checkpoint {
        let line = format!(
            "resume_from_checkpoint = {}: expected true: each stage resumes from its own newest checkpoint",
            dir.display()
        );
        messages.refusals.say("resume_from_checkpoint", line);
    }
    let runs = |stage: Stage| !flags.skip.contains(&stage);
    let config = PipelineConfig {
        sft: runs(Stage::Sft).then(|| file.sft(&flags, stages[0], messages)).transpose()?.flatten(),
        reward: runs(Stage::Reward).then(|| file.reward(&flags, stages[1], messages)).transpose()?.flatten(),
        ppo: runs(Stage::Ppo).then(|| file.ppo(&flags, stages[2], messages)).transpose()?.flatten(),
        dpo: if all.contains(&Stage::Dpo) && runs(Stage::Dpo) {
            file.dpo(&flags, command(Stage::Dpo.name()), messages)?
        } else {
            None
        },
        distill: if all.contains(&Stage::Distill) && runs(Stage::Distill) {
            file.distill(&flags, command(Stage::Distill.name()), messages)?
        } else {
            None
        },
        output_dir: flags.output_dir.clone(),
    };
    if !all.iter().any(|&stage| runs(stage)) {
        messages.refusals.say("skip", "skip = sft,reward,ppo leaves nothing to do");
    }
    Ok(config)
}

/// Returns the stages of the file: the first three, and every other stage that has a section.
fn stages_in(path: &Path) -> Vec<Stage> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let is_section = |line: &str, stage: &Stage| {
        line.strip_prefix(stage.name()).is_some_and(|rest| rest.trim_start().starts_with(':'))
    };
    let is_there = |stage: &Stage| Stage::ALL.contains(stage) || text.lines().any(|line| is_section(line, stage));
    Stage::EVERY.into_iter().filter(is_there).collect()
}

struct File<'a> {
    path: &'a Path,
    /// The commands of all stages.
    stages: &'a [&'a Command],
    settings: &'a [Setting],
    /// Keys that are set to null: they only unset values of a preset.
    nulls: &'a [Setting],
}

/// The parts that the configurations of all stages have.
struct Parts<C> {
    run: fn(&mut C) -> &mut RunConfig,
    check: fn(&C) -> rlhf::Result<()>,
}

/// Returns the preset that the setting `preset` names.
fn named_preset(preset: &Setting) -> Option<Preset> {
    preset.values.first().and_then(|name| Preset::named(name))
}

/// Returns whether the setting `preset` names a preset that SFT and reward training have too.
fn is_for_all_stages(preset: &Setting) -> bool {
    named_preset(preset).is_some_and(|preset| Preset::OF_ALL_STEPS.contains(&preset))
}

impl File<'_> {
    fn find(&self, key: &str) -> Option<&Setting> {
        self.settings.iter().find(|setting| setting.key == key)
    }

    /// Returns the setting `key` of the section of `stage`.
    fn in_section(&self, stage: Stage, key: &str) -> Option<&Setting> {
        self.find(&format!("{stage}.{key}"))
    }

    /// Returns the preset of `stage`: its section's, or the one above the sections.
    fn preset(&self, stage: Stage) -> Option<Preset> {
        let shared = || self.find("preset").filter(|preset| stage == Stage::Ppo || is_for_all_stages(preset));
        named_preset(self.in_section(stage, "preset").or_else(shared)?)
    }

    /// Returns the settings of the stage's preset; and the settings of all stages, then those of the stage's section, then the `links`
    /// that neither of them sets. Each setting has the name of its flag.
    fn stage_settings(
        &self,
        stage: Stage,
        command: &Command,
        links: Vec<(&str, String)>,
        messages: &mut Messages,
    ) -> Result<(Vec<Setting>, Vec<Setting>), Stop> {
        let flag = |command: &Command, name: &str| {
            let arg = command.get_arguments().find(|arg| arg.get_id().as_str() == name);
            arg.filter(|_| !NOT_SETTINGS.contains(&name)).map(foreign::is_added)
        };
        // A flag of one stage does not go to a stage that knows it only as another system's flag.
        let is_stage_flag = |name: &str| self.stages.iter().any(|stage| flag(stage, name) == Some(false));
        let is_flag = |name: &str| flag(command, name).is_some_and(|added| !added || !is_stage_flag(name));
        // DeepSpeed-Chat's flags above the sections go to the stages with its preset, if any stage has it.
        let has_chat_preset = |stage: &Stage| self.preset(*stage) == Some(Preset::DeepspeedChat);
        let skips_chat_flags = !has_chat_preset(&stage) && Stage::ALL.iter().any(has_chat_preset);
        let names_dataset = ["dataset_name", "data_path"].iter().any(|key| self.in_section(stage, key).is_some());
        let shared = |setting: &&Setting| {
            let key = setting.key.as_str();
            let is_for_others = PIPELINE_SETTINGS.contains(&key)
                || (stage != Stage::Sft && FIRST_STAGE_SETTINGS.contains(&key))
                // Other settings set the length of PPO, except with the presets `grpo` and `rloo`.
                || (stage == Stage::Ppo && key == "max_steps")
                // Most presets are for PPO alone.
                || (stage != Stage::Ppo && key == "preset" && !is_for_all_stages(setting))
                || (skips_chat_flags && foreign::is_of_chat(stage.name(), key))
                || (names_dataset && DATASET_SETTINGS.contains(&key));
            is_flag(key) && !is_for_others
        };
        let section_setting = |setting: &Setting| {
            let name = setting.key.strip_prefix(stage.name())?.strip_prefix('.')?;
            Some(Setting { key: name.into(), ..setting.clone() })
        };
        let mut merged: Vec<Setting> = self.settings.iter().filter(shared).cloned().collect();
        merged.extend(self.settings.iter().filter_map(section_setting));
        let is_set = |null: &Setting| merged.iter().any(|setting| setting.key == null.key);
        let nulls: Vec<Setting> = self.nulls.iter().filter_map(section_setting).filter(|null| !is_set(null)).collect();
        merged.extend(nulls);
        let flags = command.clone().mut_args(|arg| arg.required(false)).try_get_matches_from([stage.name()])?;
        let Translated { preset, .. } = translated(command, &flags, &mut merged, messages);
        merged.retain(|setting| !setting.values.is_empty());
        for (key, value) in links {
            if !merged.iter().any(|setting| setting.key == key) {
                merged.push(Setting { key: key.into(), line: 0, values: vec![value] });
            }
        }
        // One dataset for all stages is split among them.
        let split = ["data_split", "dataset_name"].map(|key| merged.iter().any(|setting| setting.key == key));
        if split == [false, true] && !names_dataset {
            merged.push(Setting { key: "data_split".into(), line: 0, values: vec![DEFAULT_SPLIT.into()] });
        }
        merged.push(Setting { key: "output_dir".into(), line: 0, values: vec![".".into()] });
        Ok((preset, merged))
    }

    /// Returns the checked configuration of `stage`. Refusals name their place in the file; then there is no configuration.
    fn config<C: Settings>(
        &self,
        flags: &PipelineFlags,
        stage: Stage,
        command: &Command,
        links: Vec<(&str, String)>,
        Parts { run, check }: Parts<C>,
        messages: &mut Messages,
    ) -> Result<Option<C>, Stop> {
        let mut stage_messages = Messages { refusals: messages.refusals.of_section(stage.name()), notes: Vec::new() };
        let (preset, settings) = self.stage_settings(stage, command, links, &mut stage_messages)?;
        let build = |layers: &[&[Setting]], refusals: &mut Refusals| {
            let command = with_defaults(command.clone(), layers);
            let relaxed = |command: Command| command.mut_args(not_required);
            let matches = parse_matches(&command, &[stage.name().into()], refusals, relaxed)?;
            let mut config = flags::read::<C>(&matches)?;
            let run_config = run(&mut config);
            run_config.output_dir = PipelineConfig::dir(&flags.output_dir, stage);
            if run_config.tracking.has_programs() && run_config.tracking.run_name.is_none() {
                let dir = flags.output_dir.file_name().unwrap_or(flags.output_dir.as_os_str());
                run_config.tracking.run_name = Some(format!("{}-{stage}", dir.to_string_lossy()));
            }
            run_config.overwrite_output_dir = flags.overwrite_output_dir;
            run_config.checkpoints.resume_from_checkpoint.clone_from(&flags.resume_from_checkpoint);
            run_config.checkpoints.resume_with_changed_inputs = flags.resume_with_changed_inputs;
            Ok(config)
        };
        let resolved = resolve(preset, &settings, |_| false, build, check, &mut stage_messages);
        messages.notes.extend(stage_messages.notes.into_iter().map(|note| format!("{stage}: {note}")));
        let error = match (stage_messages.refusals.checked(), resolved) {
            (Ok(_), Ok(config)) => return Ok(Some(config)),
            (Ok(written), Err(Stop::Error(error))) => written.told(error),
            (Err(error), Ok(_) | Err(Stop::Error(_))) => error,
            (_, Err(other)) => return Err(other),
        };
        if error.refusals().is_empty() {
            return Err(error.into());
        }
        for refusal in error.refusals() {
            let message = format!("{stage}: {}", refusal.message());
            let origin = Some(refusal.origin().clone()).filter(|origin| *origin != Origin::Unset);
            messages.refusals.refuse_at(origin.unwrap_or_else(|| self.section(stage)), message, [""; 0]);
        }
        Ok(None)
    }

    /// Returns the place of the section of `stage`.
    fn section(&self, stage: Stage) -> Origin {
        origin(self.path, self.find(stage.name()).map_or(1, |section| section.line))
    }

    fn sft(
        &self,
        flags: &PipelineFlags,
        command: &Command,
        messages: &mut Messages,
    ) -> Result<Option<SftConfig>, Stop> {
        self.config(
            flags,
            Stage::Sft,
            command,
            Vec::new(),
            Parts { run: |config: &mut SftConfig| &mut config.run, check: SftConfig::check },
            messages,
        )
    }

    fn reward(
        &self,
        flags: &PipelineFlags,
        command: &Command,
        messages: &mut Messages,
    ) -> Result<Option<RewardConfig>, Stop> {
        let mut links = Vec::new();
        if self.in_section(Stage::Reward, "model_name_or_path").is_none() {
            let Some(model) = self.sft_model(flags, Stage::Reward, "model_name_or_path", messages)? else {
                return Ok(None);
            };
            links = model;
            links.push(("new_reward_head", "true".into()));
        }
        self.config(
            flags,
            Stage::Reward,
            command,
            links,
            Parts { run: |config: &mut RewardConfig| &mut config.run, check: RewardConfig::check },
            messages,
        )
    }

    fn ppo(
        &self,
        flags: &PipelineFlags,
        command: &Command,
        messages: &mut Messages,
    ) -> Result<Option<PpoConfig>, Stop> {
        let mut links = Vec::new();
        if ["sft_model_path", "actor_model_name_or_path"].iter().all(|key| self.in_section(Stage::Ppo, key).is_none()) {
            let Some(model) = self.sft_model(flags, Stage::Ppo, "sft_model_path", messages)? else { return Ok(None) };
            links = model;
        }
        if let Some(dir) = model_dir(flags, Stage::Reward) {
            links.push(("reward_model_path", text(&dir)?));
        }
        let parts = Parts { run: |config: &mut PpoConfig| &mut config.run, check: PpoConfig::check };
        self.config(flags, Stage::Ppo, command, links, parts, messages)
    }

    fn dpo(
        &self,
        flags: &PipelineFlags,
        command: &Command,
        messages: &mut Messages,
    ) -> Result<Option<DpoConfig>, Stop> {
        let mut links = Vec::new();
        if self.in_section(Stage::Dpo, "model_name_or_path").is_none() {
            let Some(model) = self.sft_model(flags, Stage::Dpo, "model_name_or_path", messages)? else {
                return Ok(None);
            };
            links = model;
        }
        let parts = Parts { run: |config: &mut DpoConfig| &mut config.run, check: DpoConfig::check };
        self.config(flags, Stage::Dpo, command, links, parts, messages)
    }

    fn distill(
        &self,
        flags: &PipelineFlags,
        command: &Command,
        messages: &mut Messages,
    ) -> Result<Option<DistillConfig>, Stop> {
        let mut links = Vec::new();
        if self.in_section(Stage::Distill, "model_name_or_path").is_none() {
            let Some(model) = self.sft_model(flags, Stage::Distill, "model_name_or_path", messages)? else {
                return Ok(None);
            };
            links = model;
        }
        let parts = Parts { run: |config: &mut DistillConfig| &mut config.run, check: DistillConfig::check };
        self.config(flags, Stage::Distill, command, links, parts, messages)
    }

    /// Returns the language model that `stage` starts from, as the setting `key`: SFT's, or if SFT is skipped and has left none, the
    /// model that SFT would start from. `None` if there is neither, which is refused.
    fn sft_model(
        &self,
        flags: &PipelineFlags,
        stage: Stage,
        key: &'static str,
        messages: &mut Messages,
    ) -> Result<Option<Vec<(&'static str, String)>>, Stop> {
        if let Some(dir) = model_dir(flags, Stage::Sft) {
            return Ok(Some(vec![(key, text(&dir)?)]));
        }
        let base = |key: &str| {
            self.in_section(Stage::Sft, key).or_else(|| self.find(key)).and_then(|s| s.values.first().cloned())
        };
        let Some(model) = base("model_name_or_path") else {
            let dir = PipelineConfig::dir(&flags.output_dir, Stage::Sft);
            let message = format!(
                "sft is skipped, and {} holds no model: expected `{stage}.{key}` or `model_name_or_path`",
                dir.display()
            );
            messages.refusals.refuse_at(self.section(stage), format!("{stage}: {message}"), [key]);
            return Ok(None);
        };
        let revision = base("model_revision").map(|revision| ("model_revision", revision));
        Ok(Some(std::iter::once((key, model)).chain(revision).collect()))
    }
}

/// Returns the folder of the stage's model, unless the stage is skipped and there is none.
fn model_dir(flags: &PipelineFlags, stage: Stage) -> Option<PathBuf> {
    let dir = PipelineConfig::dir(&flags.output_dir, stage);
    (!flags.skip.contains(&stage) || dir.join("config.json").is_file() || dir.join("adapter_config.json").is_file())
        .then_some(dir)
}

fn text(path: &Path) -> Result<String, Stop> {
    let text = path.to_str().map(String::from);
    text.ok_or_else(|| Error::refused("output_dir", format!(" = {}: expected UTF-8", path.display())).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Task;
    use crate::cli::testing::{parse_words, with_file};

    #[test]
    fn a_preset_of_all_stages_gives_way_to_that_of_a_section_and_its_flags_go_to_the_stages_that_have_it() {
        let pipeline = |text: &str| {
            let least = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\n";
            match with_file(&format!("{least}{text}"), &["pipeline"]).unwrap() {
                Task::Pipeline(config) => (config.sft.unwrap(), config.reward.unwrap(), config.ppo.unwrap()),
                task => panic!("{task:?}"),
            }
        };
        let (sft, reward, ppo) = pipeline("preset: deepspeed-chat\nmax_seq_len: 64\nsft: {preset: trl}\n");
        assert_eq!((sft.preset, sft.learning_rate, sft.max_length), (Preset::Trl, 2e-5, Some(1024)));
        assert_eq!((reward.learning_rate, reward.max_length, ppo.kl.kl_coef), (5e-5, Some(64), 0.1));
        let text = "num_warmup_steps: 10\nenable_tensorboard: true\nppo: {preset: deepspeed-chat}\n";
        let (sft, reward, ppo) = pipeline(text);
        let warmup = [&sft.optimizer, &reward.optimizer, &ppo.optimizer].map(|optimizer| optimizer.warmup_steps);
        assert_eq!((warmup, ppo.run.tracking.report_to.len(), sft.learning_rate), ([0, 0, 10], 1, 2e-5));
        // A preset for PPO alone does not apply to the other stages.
        let (sft, _, ppo) = pipeline("preset: trl-legacy\n");
        assert_eq!((sft.preset, ppo.preset), (Preset::Trl, Preset::TrlLegacy));
        let (sft, reward, _) = pipeline("max_length: null\nreward: {max_length: 7}\n");
        assert_eq!((sft.max_length, reward.max_length), (None, Some(7)));
        let (sft, reward, _) = pipeline("max_length: 7\nreward: {max_length: null}\n");
        assert_eq!((sft.max_length, reward.max_length), (Some(7), None));
    }

    #[test]
    fn a_pipeline_has_the_settings_of_all_stages_then_each_stages_own_then_links() {
        let pipeline = |text: &str, words: &[&str]| match with_file(text, &[&["pipeline"], words].concat()) {
            Ok(Task::Pipeline(config)) => Ok(config),
            Ok(task) => panic!("{task:?}"),
            Err(error) => Err(error),
        };
        let least = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\n";
        assert_eq!(pipeline(least, &[]).unwrap(), PipelineConfig::new("m", "d", "o"));
        let text = "model-revision: v1\nseed: 7\nnum_train_epochs: 2\nsft:\n  seed: 8\nreward:\n  model_name_or_path: base\n  \
                    dataset_name: pairs\nppo: {reward_model_path: none, reward: [json, 'length:target=3']}\n";
        let config = pipeline(&format!("{least}data_split: 1,1,1\n{text}"), &["--output_dir", "p"]).unwrap();
        let (sft, reward, ppo) = (config.sft.unwrap(), config.reward.unwrap(), config.ppo.unwrap());
        assert_eq!((sft.run.seed, reward.run.seed, ppo.run.seed), (8, 7, 7));
        assert_eq!([sft.num_train_epochs, reward.num_train_epochs, ppo.num_train_epochs], [2.0; 3]);
        assert_eq!((sft.model_revision.as_str(), reward.model_revision.as_str()), ("v1", "main"));
        assert_eq!((reward.model_name_or_path, reward.new_reward_head), ("base".into(), false));
        let split = "1,1,1".parse().ok();
        assert_eq!((sft.data.data_split, reward.data.data_split, ppo.data.data_split), (split, None, split));
        assert_eq!(reward.run.output_dir, PathBuf::from("p/2-reward"));
        let config = pipeline(&format!("{least}report_to: [wandb]\nppo: {{run_name: mine}}\n"), &[]).unwrap();
        let name = |run: &RunConfig| run.tracking.run_name.clone();
        assert_eq!(name(&config.sft.unwrap().run).as_deref(), Some("o-sft"));
        assert_eq!(name(&config.ppo.unwrap().run).as_deref(), Some("mine"));
        assert_eq!((ppo.sft_model_path, ppo.reward_model_path), ("p/1-sft".into(), None));
        assert_eq!(ppo.rewards.reward.len(), 2);
        // `max_steps` goes to the stages that have it; PPO, whose length other settings set, does not refuse it.
        let config = pipeline(&format!("{least}max_steps: 3\nlogging_steps: 1\n"), &[]).unwrap();
        assert_eq!((config.sft.unwrap().max_steps, config.reward.unwrap().max_steps), (Some(3), Some(3)));
        let refused = pipeline(&format!("{least}ppo: {{max_steps: 3}}\n"), &[]).unwrap_err();
        assert!(
            refused.starts_with(
                "run.yaml:4: ppo: max_steps = 3 has no effect without preset = grpo or rloo: total_episodes"
            ),
            "{refused}"
        );
        // Skipped stages have left no model to start from.
        let config = pipeline(&format!("{least}{text}"), &["--skip", "sft,reward"]).unwrap();
        assert_eq!((config.sft, config.reward), (None, None));
        let ppo = config.ppo.unwrap();
        assert_eq!((ppo.sft_model_path, ppo.model_revision.as_str()), ("m".into(), "v1"));
        let error = |text: &str| pipeline(text, &[]).unwrap_err();
        for (text, expected) in [
            ("ppo:\n  kl_coeff: 1\n", "run.yaml:5: unknown key `ppo.kl_coeff`; did you mean `kl_coef`?"),
            ("ppos:\n  kl_coef: 1\n", "run.yaml:4: unknown key `ppos`; did you mean `ppo`?"),
            ("kl_coeff: 1\n", "run.yaml:4: unknown key `kl_coeff`; did you mean `kl_coef`?"),
            ("sft:\n  kl_coef: 1\n", "run.yaml:5: unknown key `sft.kl_coef`; `rlhf sft --help` lists the flags"),
            (
                "preset: x\n",
                "run.yaml:4: `preset`: expected one of trl, trl-ppov2, trl-legacy, deepspeed-chat, grpo, rloo",
            ),
            ("ppo:\n  kl_coef: x\n", "run.yaml:5: `ppo.kl_coef`: expected a number, found `x`"),
            ("ppo:\n  kl_coef: [1]\n", "run.yaml:5: `ppo.kl_coef`: expected one value, found a list or a map"),
            ("ppo:\n  kl_coef: 1\n\n  kl_coef: 2\n", "run.yaml:7: `kl_coef` is set twice"),
            ("ppo: 3\n", "run.yaml:4: `ppo`: expected settings of the form `key: value` below it"),
            ("ppo: [kl_coef]\n", "run.yaml:4: `ppo`: expected settings of the form `key: value` below it"),
            ("ppo:\n  kl_coef: -1\n", "run.yaml:5: ppo: kl_coef = -1: expected a number of 0 or more"),
            ("kl_coef: -1\nppo:\n", "run.yaml:4: ppo: kl_coef = -1: expected a number of 0 or more"),
            (
                "seed: 1\nppo:\n  adap_kl_ctrl: true\n  kl_coef: 0\n",
                "run.yaml:6: ppo: adap_kl_ctrl = true has no effect with kl_coef = 0",
            ),
            ("sft: {output_dir: x}\n", "run.yaml:4: `sft.output_dir`: expected it above the sections"),
            ("resume_from_checkpoint: x\n", "run.yaml:4: resume_from_checkpoint = x: expected true"),
            ("skip: [sft, reward, ppo]\n", "run.yaml:4: skip = sft,reward,ppo leaves nothing to do"),
            ("skip: 7\n", "run.yaml:4: `skip`: expected one of sft, reward, ppo, dpo, distill, found `7`"),
        ] {
            let message = error(&format!("{least}{text}"));
            assert!(message.starts_with(expected), "{message}\nis not {expected}");
        }
        let message = error("output_dir: o\nsft: {model_name_or_path: m, dataset_name: d}\n\nreward:\n");
        assert!(message.starts_with("run.yaml:4: reward: ") && message.contains("--dataset_name"), "{message}");
        let message = pipeline("output_dir: o\ndataset_name: d\nskip: sft\n", &[]).unwrap_err();
        assert!(message.contains("reward: sft is skipped, and o/1-sft holds no model"), "{message}");
    }

    #[test]
    fn a_section_dpo_is_a_stage_after_sft_and_its_settings_may_be_above_the_sections() {
        let least = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\n";
        let read =
            |text: &str, words: &[&str]| match with_file(&format!("{least}{text}"), &[&["pipeline"], words].concat()) {
                Ok(Task::Pipeline(config)) => Ok(config),
                Ok(task) => panic!("{task:?}"),
                Err(error) => Err(error),
            };
        let text = "truncation_mode: keep_end\nsft: {seed: 3}\ndpo: {beta: 0.2}\n";
        let config = read(text, &["--skip", "reward,ppo"]).unwrap();
        assert_eq!((config.stages().len(), &config.reward, &config.ppo), (4, &None, &None));
        let dpo = config.dpo.unwrap();
        let mut expected = DpoConfig::new("o/1-sft", "d", "o/4-dpo");
        (expected.loss.beta, expected.truncation_mode) = (0.2, rlhf::settings::TruncationMode::KeepEnd);
        expected.data.data_split = Some(DEFAULT_SPLIT.parse().unwrap());
        assert_eq!(dpo, expected);
        assert_eq!(read(text, &["--skip", "dpo"]).unwrap().dpo, None);
        // Without the section there is neither the stage nor a setting of its own.
        let error = read("truncation_mode: keep_end\n", &[]).unwrap_err();
        assert!(error.contains("truncation_mode"), "{error}");
        let error = read("dpo: {beta: -1}\n", &[]).unwrap_err();
        assert!(error.starts_with("run.yaml:4: dpo: beta = -1: expected a number above 0"), "{error}");
    }

    #[test]
    fn a_section_of_a_pipeline_takes_the_names_of_other_systems() {
        let least = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\n";
        let pipeline = |ppo: &str| match with_file(&format!("{least}ppo:\n  preset: trl-legacy\n{ppo}"), &["pipeline"])
        {
            Ok(Task::Pipeline(config)) => Ok(config.ppo.unwrap()),
            Ok(task) => panic!("{task:?}"),
            Err(error) => Err(error),
        };
        let ppo = pipeline("  init_kl_coef: 0.3\n  steps: 8\n  batch_size: 4\n").unwrap();
        assert_eq!((ppo.kl.kl_coef, ppo.total_episodes, ppo.legacy.batch_size), (0.3, Some(8), Some(4)));
        assert!(ppo.legacy.value_head && ppo.kl.adap_kl_ctrl);
        assert_eq!((ppo.sft_model_path, ppo.reward_model_path), ("o/1-sft".into(), Some("o/2-reward".into())));
        // A model that a section names, by any alias, is not linked.
        let ppo = pipeline("  model_name: x\n  reward_model: y\n  query_dataset: z\n").unwrap();
        assert_eq!((ppo.sft_model_path, ppo.reward_model_path), ("x".into(), Some("y".into())));
        assert_eq!((ppo.data.dataset_name, ppo.data.data_split), (vec!["z".into()], None));
        let twice = pipeline("  kl_coef: 0.1\n  init_kl_coef: 0.2\n").unwrap_err();
        assert!(twice.starts_with("run.yaml:7: `ppo.init_kl_coef` is set twice"), "{twice}");
        let refused = pipeline("  world_size: 2\n").unwrap_err();
        assert!(
            refused.starts_with("run.yaml:6: ppo: world_size = 2: the number of ranks is the launcher's"),
            "{refused}"
        );
    }

    #[test]
    fn the_example_of_a_pipeline_equals_the_three_files_of_the_demo() {
        let file = |name: &str| format!("{}/../../examples/sentiment/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
        let single = |name: &str| parse_words(&[name, "--config", &file(name)]).unwrap();
        let Task::Pipeline(found) = parse_words(&["pipeline", "--config", &file("pipeline")]).unwrap() else {
            panic!()
        };
        let (Task::Sft(mut sft), Task::Reward(mut reward), Task::Ppo(mut ppo)) =
            (single("sft"), single("reward"), single("ppo"))
        else {
            panic!()
        };
        let dir = |name: &str| PathBuf::from("runs/sentiment-pipeline").join(name);
        for (run, name) in [(&mut sft.run, "1-sft"), (&mut reward.run, "2-reward"), (&mut ppo.run, "3-ppo")] {
            run.output_dir = dir(name);
        }
        reward.model_name_or_path = dir("1-sft");
        (ppo.sft_model_path, ppo.reward_model_path) = (dir("1-sft"), Some(dir("2-reward")));
        let expected = PipelineConfig {
            output_dir: dir("").parent().unwrap().join("sentiment-pipeline"),
            sft: Some(sft),
            reward: Some(reward),
            ppo: Some(ppo),
            dpo: None,
            distill: None,
        };
        assert_eq!(found, expected);
    }
}
