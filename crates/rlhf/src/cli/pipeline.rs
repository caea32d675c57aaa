//! The file of `rlhf pipeline`: settings of all steps above, a section for each below, and what links the steps.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Command, FromArgMatches};
use rlhf::Error;
use rlhf::flag::Refusals;
use rlhf::settings::{PipelineFlags, PpoConfig, Resume, RewardConfig, RunConfig, SftConfig, Step};
use rlhf::train::pipeline::{DEFAULT_SPLIT, PipelineConfig};

use super::{
    Keys, NOT_SETTINGS, PIPELINE, Setting, Stop, matches_of, not_required, read_config, resolve, set_default,
    translated, with_defaults,
};
use crate::cli::trl::{self, Said};

/// Settings of the whole, which no section has.
const OF_THE_WHOLE: [&str; 4] =
    ["output_dir", "overwrite_output_dir", "resume_from_checkpoint", "resume_with_changed_inputs"];

/// Settings that, above all steps, are for the first: the others begin with what it leaves.
const OF_THE_FIRST: [&str; 2] = ["model_name_or_path", "model_revision"];

/// Settings of a dataset, which are not those of another that a section names.
const OF_A_DATASET: [&str; 8] = [
    "dataset_name",
    "dataset_weights",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "eval_dataset_name",
    "data_split",
    "data_split_seed",
];

/// What the file `path` and the command line `args` of `rlhf pipeline` say; what is wrong with it is put with the refusals of
/// `said`.
pub(super) fn parse(path: &Path, args: &[OsString], rlhf: &Command, said: &mut Said) -> Result<PipelineConfig, Stop> {
    let command = |name: &str| rlhf.find_subcommand(name).expect("it is a command");
    let steps = Step::ALL.map(|step| command(step.name()));
    let top = [command(PIPELINE)].into_iter().chain(steps).collect();
    let keys = Keys { top, sections: steps.to_vec() };
    let (settings, nulls): (Vec<Setting>, _) = read_config(path, &keys, &mut said.refusals)?
        .into_iter()
        .partition(|setting| !setting.values.is_empty() || Step::ALL.iter().any(|step| step.name() == setting.key));
    let file = File { path, steps, settings: &settings, nulls: &nulls };
    for step in Step::ALL {
        if let Some(key) = OF_THE_WHOLE.iter().find(|key| file.own(step, key).is_some()) {
            let line = file.own(step, key).map_or(1, |setting| setting.line);
            let message = format!("`{step}.{key}`: expected it above the sections: it is the pipeline's");
            said.refusals.refuse(file.placed(line, &message), [*key]);
        }
    }
    let whole = |command: &Command| {
        let of_it = |setting: &&Setting| command.get_arguments().any(|arg| arg.get_id() == setting.key.as_str());
        settings.iter().filter(of_it).cloned().collect::<Vec<_>>()
    };
    let strict = whole(command(PIPELINE));
    let strict = rlhf.clone().mut_subcommand(PIPELINE, |command| strict.into_iter().fold(command, set_default));
    let mut matches = matches_of(&strict, args, &mut said.refusals, |rlhf| {
        rlhf.mut_subcommand(PIPELINE, |command| command.mut_args(not_required))
    })?;
    let flags = PipelineFlags::from_arg_matches(&matches.remove_subcommand().expect("it is a command").1)?;
    if let Some(Resume::From(dir)) = &flags.resume_from_checkpoint {
        let line = format!(
            "resume_from_checkpoint = {}: expected true: each step goes on from its own newest checkpoint",
            dir.display()
        );
        said.refusals.refuse(line, ["resume_from_checkpoint"]);
    }
    let runs = |step: Step| !flags.skip.contains(&step);
    let config = PipelineConfig {
        sft: runs(Step::Sft).then(|| file.sft(&flags, steps[0], said)).transpose()?.flatten(),
        reward: runs(Step::Reward).then(|| file.reward(&flags, steps[1], said)).transpose()?.flatten(),
        ppo: runs(Step::Ppo).then(|| file.ppo(&flags, steps[2], said)).transpose()?.flatten(),
        output_dir: flags.output_dir.clone(),
    };
    if !Step::ALL.into_iter().any(runs) {
        said.refusals.refuse("skip = sft,reward,ppo leaves nothing to do", ["skip"]);
    }
    Ok(config)
}

struct File<'a> {
    path: &'a Path,
    /// The commands of all steps.
    steps: [&'a Command; 3],
    settings: &'a [Setting],
    /// Keys that are set to null: as if they were not there, but for what a preset says.
    nulls: &'a [Setting],
}

/// The parts of a step's configuration that all steps have.
struct Parts<C> {
    run: fn(&mut C) -> &mut RunConfig,
    check: fn(&C) -> rlhf::Result<()>,
}

impl File<'_> {
    fn placed(&self, line: u64, message: &str) -> String {
        format!("{}:{line}: {message}", self.path.display())
    }

    fn find(&self, key: &str) -> Option<&Setting> {
        self.settings.iter().find(|setting| setting.key == key)
    }

    /// What the section of `step` says of `key`.
    fn own(&self, step: Step, key: &str) -> Option<&Setting> {
        self.find(&format!("{step}.{key}"))
    }

    /// What holds for `step`: what its preset says; and the settings of all, then its own, then the `links` that neither sets, each
    /// by its flag's name.
    fn settings_of(
        &self,
        step: Step,
        command: &Command,
        links: Vec<(&str, String)>,
        said: &mut Said,
    ) -> Result<(Vec<Setting>, Vec<Setting>), Stop> {
        let flag = |command: &Command, name: &str| {
            let arg = command.get_arguments().find(|arg| arg.get_id().as_str() == name);
            arg.filter(|_| !NOT_SETTINGS.contains(&name)).map(trl::is_added)
        };
        // What is one step's own is not for another to which it is another system's.
        let is_owned = |name: &str| self.steps.iter().any(|step| flag(step, name) == Some(false));
        let is_flag = |name: &str| flag(command, name).is_some_and(|added| !added || !is_owned(name));
        let own_data = ["dataset_name", "data_path"].iter().any(|key| self.own(step, key).is_some());
        let shared = |setting: &&Setting| {
            let key = setting.key.as_str();
            let of_others = OF_THE_WHOLE.contains(&key)
                || (step != Step::Sft && OF_THE_FIRST.contains(&key))
                || (own_data && OF_A_DATASET.contains(&key));
            is_flag(key) && !of_others
        };
        let own = |setting: &Setting| {
            let name = setting.key.strip_prefix(step.name())?.strip_prefix('.')?;
            Some(Setting { key: name.into(), ..setting.clone() })
        };
        let mut found: Vec<Setting> = self.settings.iter().filter(shared).cloned().collect();
        found.extend(self.settings.iter().filter_map(own));
        let is_set = |null: &Setting| found.iter().any(|setting| setting.key == null.key);
        let nulls: Vec<Setting> = self.nulls.iter().filter_map(own).filter(|null| !is_set(null)).collect();
        found.extend(nulls);
        let flags = command.clone().mut_args(|arg| arg.required(false)).try_get_matches_from([step.name()])?;
        let preset = translated(command, &flags, None, &mut found, said);
        found.retain(|setting| !setting.values.is_empty());
        for (key, value) in links {
            if !found.iter().any(|setting| setting.key == key) {
                found.push(Setting { key: key.into(), line: 0, values: vec![value] });
            }
        }
        // One dataset for all is split among them.
        let split = ["data_split", "dataset_name"].map(|key| found.iter().any(|setting| setting.key == key));
        if split == [false, true] && !own_data {
            found.push(Setting { key: "data_split".into(), line: 0, values: vec![DEFAULT_SPLIT.into()] });
        }
        found.push(Setting { key: "output_dir".into(), line: 0, values: vec![".".into()] });
        Ok((preset, found))
    }

    /// The checked configuration of `step`; what is refused names the place in the file that it is about.
    fn config<C: FromArgMatches>(
        &self,
        flags: &PipelineFlags,
        step: Step,
        command: &Command,
        links: Vec<(&str, String)>,
        Parts { run, check }: Parts<C>,
        said: &mut Said,
    ) -> Result<Option<C>, Stop> {
        // What is refused in the file by now has its place there.
        let mut own = Said { refusals: said.refusals.about(), notes: Vec::new() };
        let (preset, settings) = self.settings_of(step, command, links, &mut own)?;
        let build = |layers: &[&[Setting]], refusals: &mut Refusals| {
            let command = with_defaults(command.clone(), layers);
            let relaxed = |command: Command| command.mut_args(not_required);
            let matches = matches_of(&command, &[step.name().into()], refusals, relaxed)?;
            let mut config = C::from_arg_matches(&matches)?;
            let own = run(&mut config);
            own.output_dir = PipelineConfig::dir(&flags.output_dir, step);
            own.overwrite_output_dir = flags.overwrite_output_dir;
            own.checkpoints.resume_from_checkpoint.clone_from(&flags.resume_from_checkpoint);
            own.checkpoints.resume_with_changed_inputs = flags.resume_with_changed_inputs;
            Ok(config)
        };
        let resolved = resolve(preset, &settings, |_| false, build, check, &mut own);
        said.notes.extend(own.notes.into_iter().map(|note| format!("{step}: {note}")));
        let error = match (own.refusals.end(), resolved) {
            (Ok(()), Ok(config)) => return Ok(Some(config)),
            (Err(error), _) | (_, Err(Stop::Error(error))) => error,
            (_, Err(other)) => return Err(other),
        };
        if error.refusals().is_empty() {
            return Err(error.into());
        }
        for line in error.refusals() {
            said.refusals.refuse(self.place(step, line), [""; 0]);
        }
        Ok(None)
    }

    /// An error of `step`, with the line of the setting that its message begins with, or else that of the section.
    fn place(&self, step: Step, message: &str) -> String {
        let key = message.split([' ', ':']).next().unwrap_or_default();
        let setting = self.own(step, key).or_else(|| self.find(key)).or_else(|| self.find(step.name()));
        self.placed(setting.map_or(1, |setting| setting.line), &format!("{step}: {message}"))
    }

    fn sft(&self, flags: &PipelineFlags, command: &Command, said: &mut Said) -> Result<Option<SftConfig>, Stop> {
        self.config(
            flags,
            Step::Sft,
            command,
            Vec::new(),
            Parts { run: |config: &mut SftConfig| &mut config.run, check: SftConfig::check },
            said,
        )
    }

    fn reward(&self, flags: &PipelineFlags, command: &Command, said: &mut Said) -> Result<Option<RewardConfig>, Stop> {
        let mut links = Vec::new();
        if self.own(Step::Reward, "model_name_or_path").is_none() {
            let Some(model) = self.sft_model(flags, Step::Reward, "model_name_or_path", said)? else { return Ok(None) };
            links = model;
            links.push(("new_reward_head", "true".into()));
        }
        self.config(
            flags,
            Step::Reward,
            command,
            links,
            Parts { run: |config: &mut RewardConfig| &mut config.run, check: RewardConfig::check },
            said,
        )
    }

    fn ppo(&self, flags: &PipelineFlags, command: &Command, said: &mut Said) -> Result<Option<PpoConfig>, Stop> {
        let mut links = Vec::new();
        if ["sft_model_path", "actor_model_name_or_path"].iter().all(|key| self.own(Step::Ppo, key).is_none()) {
            let Some(model) = self.sft_model(flags, Step::Ppo, "sft_model_path", said)? else { return Ok(None) };
            links = model;
        }
        if let Some(dir) = left_by(flags, Step::Reward) {
            links.push(("reward_model_path", text(&dir)?));
        }
        let parts = Parts { run: |config: &mut PpoConfig| &mut config.run, check: PpoConfig::check };
        self.config(flags, Step::Ppo, command, links, parts, said)
    }

    /// The language model that `step` begins with, as the setting `key`: SFT's, or where that is left out and was never
    /// made, the one that it would have begun with. `None` where there is neither, which is refused.
    fn sft_model(
        &self,
        flags: &PipelineFlags,
        step: Step,
        key: &'static str,
        said: &mut Said,
    ) -> Result<Option<Vec<(&'static str, String)>>, Stop> {
        if let Some(dir) = left_by(flags, Step::Sft) {
            return Ok(Some(vec![(key, text(&dir)?)]));
        }
        let base =
            |key: &str| self.own(Step::Sft, key).or_else(|| self.find(key)).and_then(|s| s.values.first().cloned());
        let Some(model) = base("model_name_or_path") else {
            let dir = PipelineConfig::dir(&flags.output_dir, Step::Sft);
            let message = format!(
                "sft is left out, and {} holds no model: expected `{step}.{key}` or `model_name_or_path`",
                dir.display()
            );
            said.refusals.refuse(self.place(step, &message), [key]);
            return Ok(None);
        };
        let revision = base("model_revision").map(|revision| ("model_revision", revision));
        Ok(Some(std::iter::once((key, model)).chain(revision).collect()))
    }
}

/// The folder of the model that `step` leaves, unless it is left out and there is none.
fn left_by(flags: &PipelineFlags, step: Step) -> Option<PathBuf> {
    let dir = PipelineConfig::dir(&flags.output_dir, step);
    (!flags.skip.contains(&step) || dir.join("config.json").is_file() || dir.join("adapter_config.json").is_file())
        .then_some(dir)
}

fn text(path: &Path) -> Result<String, Stop> {
    let text = path.to_str().map(String::from);
    text.ok_or_else(|| Error::Usage(format!("output_dir = {}: expected UTF-8", path.display())).into())
}
