//! Other systems' words for a run with several ranks: transformers' `fsdp` and `deepspeed`, and a configuration of accelerate.
//!
//! Their settings are a layer below the flags and the configuration file. As in transformers, a file that contradicts a flag is an
//! error, and so is one that contradicts the configuration file.

use std::path::{Path, PathBuf};

use clap::{ArgMatches, Command};
use rlhf::dist::num_ranks;
use rlhf::{Error, Origin, Result};

use super::super::errors::{Messages, refusal};
use super::super::setting::Setting;
use super::files::{self, Content, ForeignSetting};
use super::line;
use super::table::DEEPSPEED_FILE;

/// The settings of a command, so far.
pub(super) struct Layers<'a> {
    pub(super) command: &'a Command,
    pub(super) flags: &'a ArgMatches,
    pub(super) settings: &'a mut Vec<Setting>,
    pub(super) messages: &'a mut Messages,
}

/// A flag that names a file or a kind of sharding, with its value.
pub(super) struct Word<'a> {
    pub(super) flag: &'a str,
    pub(super) value: &'a str,
}

/// The place of a setting of another system.
enum Place<'a> {
    /// A word of this flag.
    Flag(&'a str),
    /// A key of this file.
    File(&'a Path),
}

/// Returns the place of a line of a file of another system.
fn origin(path: &Path, line: u64) -> Origin {
    Origin::Line { path: path.into(), line }
}

impl Layers<'_> {
    /// Replaces transformers' `fsdp` by `zero_stage` and `offload_optimizer`, a name of `offload = optimizer`.
    pub(super) fn translate_fsdp(&mut self, word: &Word<'_>) {
        let value = word.value.to_ascii_lowercase();
        let words = value.split([' ', ',', '[', ']', '"', '\'']).filter(|word| !word.is_empty());
        for name in words {
            let (setting, value) = match name {
                "none" | "false" | "auto_wrap" => continue,
                "full_shard" | "true" => ("zero_stage", "3"),
                "shard_grad_op" => ("zero_stage", "2"),
                "no_shard" => ("zero_stage", "0"),
                "offload" => {
                    self.messages
                        .notes
                        .push("fsdp = offload: the optimizer state goes to the host, nothing else".into());
                    ("offload_optimizer", "true")
                }
                _ => {
                    let message = format!(
                        "fsdp = {}: expected full_shard, shard_grad_op or no_shard, with auto_wrap or offload",
                        word.value
                    );
                    return self.messages.refusals.say(word.flag, message);
                }
            };
            self.set(&Place::Flag(word.flag), &ForeignSetting::new(format!("fsdp = {name}"), 1, setting, value));
        }
    }

    /// Reads the files that `deepspeed`, `deepspeed_config` and `accelerate_config` name.
    pub(super) fn translate_files(&mut self, words: &[Word<'_>]) {
        // The flag, and the file that it names.
        let mut deepspeed: Option<(&str, PathBuf)> = None;
        for word in words {
            // DeepSpeed's scripts have `--deepspeed` as a switch.
            if ["none", "", "true", "false", "{}"].contains(&word.value.to_ascii_lowercase().as_str()) {
                continue;
            }
            let path = Path::new(word.value);
            if word.flag == "accelerate_config" {
                let file = self.translate_accelerate(word, path);
                if let Some(file) = file.filter(|_| deepspeed.is_none()) {
                    self.messages.refusals.call(DEEPSPEED_FILE, &file.key, origin(path, file.line));
                    deepspeed = Some((DEEPSPEED_FILE, PathBuf::from(file.value)));
                }
                continue;
            }
            match &deepspeed {
                Some((flag, other)) if other != path => {
                    let message = format!(
                        "{} = {} and {flag} = {} exclude each other: give one of them",
                        word.flag,
                        word.value,
                        other.display()
                    );
                    self.messages.refusals.say(word.flag, message);
                }
                _ => deepspeed = Some((word.flag, path.to_path_buf())),
            }
        }
        if let Some((flag, path)) = deepspeed {
            match files::deepspeed(&path) {
                Ok(content) => self.apply(&Place::File(&path), content),
                Err(error) => {
                    let value = path.display().to_string();
                    self.refuse_file(&Word { flag, value: &value }, &error, "the path of a DeepSpeed configuration");
                }
            }
        }
    }

    /// Applies the configuration of accelerate in the file `path`, or the one that TRL brings under that name. Returns the key with the
    /// path of a DeepSpeed configuration.
    fn translate_accelerate(&mut self, word: &Word<'_>, path: &Path) -> Option<ForeignSetting> {
        let known = files::trl_configuration(word.value).filter(|_| !path.exists());
        let place = if known.is_some() { Place::Flag(word.flag) } else { Place::File(path) };
        let content = match known.map_or_else(|| files::accelerate(path), Ok) {
            Ok(content) => content,
            Err(error) => {
                self.refuse_file(word, &error, "the path of a configuration of accelerate");
                return None;
            }
        };
        self.note_ranks(word, content.ranks);
        let (files, settings): (Vec<ForeignSetting>, Vec<ForeignSetting>) =
            content.settings.into_iter().partition(|setting| setting.setting == DEEPSPEED_FILE);
        self.apply(&place, Content { settings, ..content });
        files.into_iter().next()
    }

    /// Notes that a command starts no ranks, where the file asks for more than there are.
    fn note_ranks(&mut self, word: &Word<'_>, ranks: Option<usize>) {
        if let Some(ranks) = ranks.filter(|&ranks| ranks > num_ranks()) {
            let message = format!(
                "accelerate_config = {}: it asks for {ranks} processes, and there are {}: rlhf launch --nproc_per_node {ranks} {} ... \
                 starts them",
                word.value,
                num_ranks(),
                self.command.get_name()
            );
            self.messages.notes.push(message);
        }
    }

    fn refuse_file(&mut self, word: &Word<'_>, error: &Error, expected: &str) {
        let error = error.without_path();
        let message = format!("{} = {}: {error}; expected none or {expected}", word.flag, word.value);
        self.messages.refusals.say(word.flag, message);
    }

    /// Applies the content of a file.
    fn apply(&mut self, place: &Place<'_>, mut content: Content) {
        for (line, message) in std::mem::take(&mut content.refused) {
            self.refuse(place, line, message, None);
        }
        if let Err((line, message)) = self.reconcile_sizes(&mut content.settings) {
            self.refuse(place, line, message, Some("train_batch_size"));
        }
        // The fields of the loss scale count only with `fp16`, which may come after them in the file.
        let (loss_scale, others): (Vec<ForeignSetting>, Vec<ForeignSetting>) =
            content.settings.into_iter().partition(|setting| setting.needs_fp16);
        others.iter().for_each(|setting| self.set(place, setting));
        if self.value("fp16").is_some_and(|value| is_equal(&value, "true")) {
            loss_scale.iter().for_each(|setting| self.set(place, setting));
        }
        if let (Place::File(path), false) = (place, content.unknown.is_empty()) {
            let names: Vec<String> = content.unknown.iter().map(|name| format!("`{name}`")).collect();
            self.messages.notes.push(format!("{}: no counterpart for {}", path.display(), names.join(", ")));
        }
    }

    /// Makes batch sizes as DeepSpeed has them ours. There the size of all ranks, the size of a micro-batch and the number of
    /// micro-batches may all be set, and must agree; here the size of all ranks replaces the number of micro-batches.
    ///
    /// # Errors
    /// The line of `train_batch_size` and the message, if the sizes do not agree.
    fn reconcile_sizes(&self, settings: &mut Vec<ForeignSetting>) -> Result<(), (u64, String)> {
        let in_file = |name: &str| settings.iter().find(|setting| setting.setting == name);
        let Some(batch) = in_file("train_batch_size") else { return Ok(()) };
        let line = batch.line;
        let micro = "per_device_train_batch_size";
        let number = |value: &str| value.parse::<usize>().ok();
        let size = |name: &str| match in_file(name) {
            Some(setting) => number(&setting.value),
            None => self.value(name).and_then(|value| number(&value)),
        };
        let rows = size(micro);
        let (Some(all), Some(accumulated)) = (number(&batch.value), size("gradient_accumulation_steps")) else {
            return Ok(());
        };
        let per_step = accumulated.saturating_mul(num_ranks());
        let product = rows.unwrap_or(all.checked_div(per_step).unwrap_or(0));
        if product.saturating_mul(per_step) != all {
            let message = format!(
                "`train_batch_size`: expected {micro} * gradient_accumulation_steps * ranks = {product} * {accumulated} * {} = {}, \
                 found {all}",
                num_ranks(),
                product.saturating_mul(per_step)
            );
            return Err((line, message));
        }
        let replaced = if accumulated == 1 { "gradient_accumulation_steps" } else { "train_batch_size" };
        settings.retain(|setting| setting.setting != replaced);
        if accumulated != 1 && rows.is_none() {
            settings.push(ForeignSetting::new("train_batch_size", line, micro, product.to_string()));
        }
        Ok(())
    }

    /// Returns the value of a setting on the command line, or in the configuration file.
    fn value(&self, setting: &str) -> Option<String> {
        line::value(self.flags, self.settings, setting)
    }

    /// Adds a setting, or refuses it: a value that its flag does not accept, or another one than is set. Later refusals of the setting
    /// have its place.
    fn set(&mut self, place: &Place<'_>, foreign: &ForeignSetting) {
        let ForeignSetting { key, line, setting, value, is_same, .. } = foreign;
        let Some(arg) = self.command.get_arguments().find(|arg| arg.get_id() == setting) else { return };
        let message = match (refusal(arg, value), self.value(setting)) {
            (Some(expected), _) => format!("`{key}`: {expected}, found `{value}`"),
            (None, Some(other)) if is_equal(&other, value) => return,
            (None, Some(other)) => {
                format!("`{key}`: {setting} = {value} there contradicts {setting} = {other}: set one of them")
            }
            (None, None) => {
                let refusals = &mut self.messages.refusals;
                match place {
                    Place::Flag(flag) => refusals.call_as(setting, flag, true),
                    Place::File(path) if *is_same => refusals.call(setting, key, origin(path, *line)),
                    Place::File(path) => refusals.call(setting, setting, origin(path, *line)),
                }
                return self.settings.push(Setting::new(setting, vec![value.clone()]));
            }
        };
        self.refuse(place, *line, message, Some(setting));
    }

    /// Refuses what is written at a place of another system: `setting`, if it is one of ours.
    fn refuse(&mut self, place: &Place<'_>, line: u64, message: String, setting: Option<&str>) {
        let refusals = &mut self.messages.refusals;
        match place {
            Place::Flag(flag) => {
                refusals.say(flag, message);
                setting.into_iter().for_each(|setting| refusals.about_too(setting));
            }
            Place::File(path) => refusals.refuse_at(origin(path, line), message, setting),
        }
    }
}

/// Returns whether two values of a flag are equal: numbers and truth values in any notation.
fn is_equal(one: &str, other: &str) -> bool {
    let normal = |text: &str| {
        let text = text.to_ascii_lowercase();
        match text.as_str() {
            "true" | "yes" => "1".into(),
            "false" | "no" => "0".into(),
            _ => text.parse::<f64>().map_or(text, |number| number.to_string()),
        }
    };
    normal(one) == normal(other)
}

#[cfg(test)]
mod tests {
    use rlhf::settings::{PpoConfig, ZeroStage};

    use super::*;
    use crate::cli::Task;
    use crate::cli::testing::{PPO, parsed, ppo, ppo_error, with_file};

    /// Parses a line of PPO with the file `text` as `ds.json`, which replaces `FILE` in `words`.
    fn with_deepspeed(text: &str, words: &str) -> Result<(PpoConfig, Vec<String>), String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ds.json");
        std::fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap();
        let words: Vec<&str> = words.split_whitespace().map(|word| if word == "FILE" { path } else { word }).collect();
        let parsed = parsed(&[&PPO[..], &words].concat()).map_err(|error| error.replace(path, "ds.json"))?;
        let Task::Ppo(config) = parsed.task else { panic!() };
        Ok((config, parsed.notes.iter().map(|note| note.replace(path, "ds.json")).collect()))
    }

    #[test]
    fn fsdp_is_another_name_of_a_stage() {
        let stage = |words: &[&str]| ppo(words).run.dist.zero_stage;
        for (value, expected) in [
            ("full_shard", ZeroStage::Stage3),
            ("full_shard auto_wrap", ZeroStage::Stage3),
            ("shard_grad_op", ZeroStage::Stage2),
            ("no_shard", ZeroStage::Stage0),
            ("", ZeroStage::Stage0),
            ("none", ZeroStage::Stage0),
        ] {
            assert_eq!(stage(&["--fsdp", value]), expected, "{value}");
        }
        assert_eq!(stage(&["--fsdp", "full_shard", "auto_wrap", "--zero_stage", "3"]), ZeroStage::Stage3);
        assert!(ppo(&["--fsdp", "full_shard offload"]).run.offload.offloads_optimizer());
        let error = ppo_error(&["--fsdp", "full_shard", "--zero_stage", "1"]);
        assert_eq!(error, "`fsdp = full_shard`: zero_stage = 3 there contradicts zero_stage = 1: set one of them");
        let error = with_file("fsdp: hybrid_shard\n", &PPO).unwrap_err();
        assert_eq!(
            error,
            "run.yaml:1: fsdp = hybrid_shard: expected full_shard, shard_grad_op or no_shard, with auto_wrap or offload"
        );
        let Task::Ppo(config) = with_file("fsdp: shard_grad_op\n", &PPO).unwrap() else { panic!() };
        assert_eq!(config.run.dist.zero_stage, ZeroStage::Stage2);
    }

    #[test]
    fn a_deepspeed_file_is_a_layer_below_the_flags_and_may_not_contradict_them() {
        let text = r#"{"zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": true},
                      "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": "auto"}"#;
        let (config, notes) = with_deepspeed(text, "--deepspeed FILE --bf16 --max_grad_norm 5e-1").unwrap();
        assert_eq!((config.run.dist.zero_stage, config.run.bf16), (ZeroStage::Stage2, true));
        assert_eq!((config.optimizer.max_grad_norm, config.per_device_train_batch_size), (Some(0.5), None));
        assert_eq!(notes, ["ds.json: no counterpart for `zero_optimization.overlap_comm`"]);
        // DeepSpeed's scripts have a switch and the file.
        for words in ["--deepspeed --deepspeed_config FILE", "--deepspeed_config FILE --deepspeed"] {
            assert_eq!(with_deepspeed(text, words).unwrap().0.run.dist.zero_stage, ZeroStage::Stage2, "{words}");
        }
        let refused = |text: &str, words: &str| with_deepspeed(text, words).unwrap_err();
        assert_eq!(
            refused(text, "--deepspeed FILE --zero_stage 3"),
            "ds.json:1: `zero_optimization.stage`: zero_stage = 2 there contradicts zero_stage = 3: set one of them"
        );
        assert_eq!(
            refused(r#"{"zero_optimization": {"stage": 5}}"#, "--deepspeed FILE"),
            "ds.json:1: `zero_optimization.stage`: expected 0, 1, 2 or 3, found `5`"
        );
        let error = refused("{", "--deepspeed FILE");
        assert!(error.starts_with("deepspeed = ds.json: expected a DeepSpeed configuration in JSON: EOF"), "{error}");
        let error = ppo_error(&["--deepspeed", "no/such.json"]);
        assert!(error.starts_with("deepspeed = no/such.json: cannot read: "), "{error}");
        let error = with_file("seed: 1\ndeepspeed_config: no/such.json\n", &PPO).unwrap_err();
        assert!(error.starts_with("run.yaml:2: deepspeed_config = no/such.json: cannot read: "), "{error}");
    }

    #[test]
    fn a_value_of_another_systems_file_that_a_later_check_refuses_has_its_line() {
        let refused = |text: &str, words: &str| with_deepspeed(text, &format!("--deepspeed FILE {words}")).unwrap_err();
        assert_eq!(
            refused("{\n  \"gradient_clipping\": -1\n}", ""),
            "ds.json:2: gradient_clipping = -1: expected a number above 0"
        );
        // A value that stands for another one keeps the name of our setting.
        let betas = "{\n  \"optimizer\": {\n    \"params\": {\"lr\": -1,\n      \"betas\": [0.9, 2]}}}";
        let error = refused(betas, "");
        for start in [
            "ds.json:3: optimizer.params.lr = -1: expected a number",
            "ds.json:4: adam_beta2 = 2: expected a number from 0 to below 1",
        ] {
            assert!(error.lines().any(|line| line.starts_with(start)), "{error}");
        }
        // Of two settings that exclude each other, the one of the file has the place.
        let stage = "{\n  \"zero_optimization\": {\n    \"stage\": 2}}";
        let error = refused(stage, "--optim adafactor");
        let expected = "ds.json:3: optim = adafactor and zero_optimization.stage = 2 exclude each other";
        assert!(error.lines().any(|line| line.starts_with(expected)), "{error}");
    }

    #[test]
    fn a_value_of_an_accelerate_file_that_a_later_check_refuses_has_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("acc.yaml");
        let refused = |text: &str, words: &[&str]| {
            std::fs::write(&path, text).unwrap();
            let path = path.to_str().unwrap();
            let error = parsed(&[&PPO[..], &["--accelerate_config", path], words].concat()).unwrap_err();
            error.replace(path, "acc.yaml")
        };
        assert_eq!(
            refused("deepspeed_config:\n  # gradient_clipping: 1\n  gradient_clipping: -1\n", &[]),
            "acc.yaml:3: deepspeed_config.gradient_clipping = -1: expected a number above 0"
        );
        assert_eq!(
            refused("debug: false\ndistributed_type: TPU\n", &[]),
            "acc.yaml:2: `distributed_type`: expected no or multi_cpu or multi_gpu or deepspeed or fsdp, found `TPU`"
        );
        let error = refused("deepspeed_config:\n  deepspeed_config_file: no/such.json\n", &[]);
        let expected = "acc.yaml:2: deepspeed_config.deepspeed_config_file = no/such.json: cannot read: ";
        assert!(error.starts_with(expected), "{error}");
        // A name of TRL is no file: its place is the flag.
        let error = with_file("seed: 1\naccelerate_config: zero3\n", &[&PPO[..], &["--zero_stage", "1"]].concat());
        assert_eq!(
            error.unwrap_err(),
            "run.yaml:2: `accelerate_config = zero3`: zero_stage = 3 there contradicts zero_stage = 1: set one of them"
        );
    }

    #[test]
    fn the_loss_scale_of_a_deepspeed_file_counts_with_fp16_only() {
        let text = r#"{"fp16": {"initial_scale_power": 8, "enabled": "auto"}}"#;
        let power = |words: &str| with_deepspeed(text, words).unwrap().0.run.loss_scale.initial_scale_power;
        assert_eq!((power("--deepspeed FILE --fp16"), power("--deepspeed FILE")), (8, 16));
        let on = r#"{"fp16": {"initial_scale_power": 8, "enabled": true}}"#;
        let (config, _) = with_deepspeed(on, "--deepspeed FILE").unwrap();
        assert_eq!((config.run.fp16, config.run.loss_scale.initial_scale_power), (true, 8));
    }

    #[test]
    fn batch_sizes_of_a_deepspeed_file_agree_with_each_other() {
        let sizes = |text: &str, words: &str| {
            let (config, _) = with_deepspeed(text, &format!("--deepspeed FILE {words}"))?;
            let plan = config.plan(100).unwrap();
            Ok::<_, String>((plan.batch_size, plan.epoch.micro_batch_size, config.train_batch_size))
        };
        assert_eq!(sizes(r#"{"train_batch_size": 64}"#, ""), Ok((64, 64, Some(64))));
        let both = r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}"#;
        assert_eq!(sizes(both, ""), Ok((64, 4, Some(64))));
        assert_eq!(sizes(both, "--gradient_accumulation_steps 16"), Ok((64, 4, None)));
        let three = r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}"#;
        assert_eq!(sizes(three, ""), Ok((8, 4, None)));
        assert_eq!(sizes(r#"{"train_batch_size": 8, "gradient_accumulation_steps": 2}"#, ""), Ok((8, 4, None)));
        assert_eq!(sizes(r#"{"train_batch_size": 8, "gradient_accumulation_steps": 1}"#, ""), Ok((8, 8, Some(8))));
        assert_eq!(
            sizes(both, "--gradient_accumulation_steps 2").unwrap_err(),
            "ds.json:1: `train_batch_size`: expected per_device_train_batch_size * gradient_accumulation_steps * ranks = 4 * 2 * 1 = \
             8, found 64"
        );
    }
}
