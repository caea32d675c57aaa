//! Other systems' words for a run with several ranks: transformers' `fsdp` and `deepspeed`, and a configuration of accelerate.
//!
//! Their settings are a layer below the flags and the configuration file. As in transformers, a file that contradicts a flag is an
//! error, and so is one that contradicts the configuration file.

use std::path::{Path, PathBuf};

use clap::{ArgMatches, Command};
use rlhf::dist::num_ranks;
use rlhf::{Error, Result};

use super::super::errors::{Messages, refusal};
use super::super::setting::Setting;
use super::files::{self, Content, Found};
use super::line;
use super::table::DEEPSPEED_FILE;

/// The settings of a command, so far.
pub(super) struct Layers<'a> {
    pub(super) command: &'a Command,
    pub(super) flags: &'a ArgMatches,
    pub(super) settings: &'a mut Vec<Setting>,
    pub(super) messages: &'a mut Messages,
}

/// One of these flags, with its value as it is set.
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
                    let line = format!(
                        "fsdp = {}: expected full_shard, shard_grad_op or no_shard, with auto_wrap or offload",
                        word.value
                    );
                    return self.messages.refusals.say(word.flag, line);
                }
            };
            let found = Found { key: format!("fsdp = {name}"), setting, value: value.into(), of_fp16: false };
            self.set(&Place::Flag(word.flag), &found);
        }
    }

    /// Reads the files that `deepspeed`, `deepspeed_config` and `accelerate_config` name.
    pub(super) fn translate_files(&mut self, words: &[Word<'_>]) {
        let mut deepspeed: Option<PathBuf> = None;
        for word in words {
            // DeepSpeed's scripts have `--deepspeed` as a switch.
            if ["none", "", "true", "false", "{}"].contains(&word.value.to_ascii_lowercase().as_str()) {
                continue;
            }
            let path = Path::new(word.value);
            if word.flag == "accelerate_config" {
                let of_trl = files::of_trl(word.value).filter(|_| !path.exists());
                match of_trl.map_or_else(|| files::accelerate(path), Ok) {
                    Ok(content) => {
                        self.note_ranks(word, content.ranks);
                        let (files, found) =
                            content.found.into_iter().partition(|found| found.setting == DEEPSPEED_FILE);
                        let files: Vec<Found> = files;
                        deepspeed = deepspeed.or(files.first().map(|found| PathBuf::from(&found.value)));
                        self.apply(path, Content { found, ..content });
                    }
                    Err(error) => self.refuse_file(word, &error, "the path of a configuration of accelerate"),
                }
                continue;
            }
            match &deepspeed {
                Some(other) if other != path => {
                    let line = format!(
                        "{} = {} and deepspeed = {} exclude each other: give one of them",
                        word.flag,
                        word.value,
                        other.display()
                    );
                    self.messages.refusals.say(word.flag, line);
                }
                _ => deepspeed = Some(path.to_path_buf()),
            }
        }
        if let Some(path) = deepspeed {
            match files::deepspeed(&path) {
                Ok(content) => self.apply(&path, content),
                Err(error) => {
                    let value = path.display().to_string();
                    let word = Word { flag: DEEPSPEED_FILE, value: &value };
                    self.refuse_file(&word, &error, "the path of a DeepSpeed configuration");
                }
            }
        }
    }

    /// Notes that a command starts no ranks, where the file asks for more than there are.
    fn note_ranks(&mut self, word: &Word<'_>, ranks: Option<usize>) {
        if let Some(ranks) = ranks.filter(|&ranks| ranks > num_ranks()) {
            let line = format!(
                "accelerate_config = {}: it asks for {ranks} processes, and there are {}: rlhf launch --nproc_per_node {ranks} {} ... \
                 starts them",
                word.value,
                num_ranks(),
                self.command.get_name()
            );
            self.messages.notes.push(line);
        }
    }

    fn refuse_file(&mut self, word: &Word<'_>, error: &Error, expected: &str) {
        let error = error.without_path();
        let line = format!("{} = {}: {error}; expected none or {expected}", word.flag, word.value);
        self.messages.refusals.say(word.flag, line);
    }

    /// Applies the content of the file `path`.
    fn apply(&mut self, path: &Path, mut content: Content) {
        let place = format!("{}: ", path.display());
        for line in &content.refused {
            self.messages.refusals.refuse(format!("{place}{line}"), [""; 0]);
        }
        if let Err(line) = self.reconcile_sizes(&mut content.found) {
            self.messages.refusals.refuse(format!("{place}{line}"), ["train_batch_size"]);
        }
        // The fields of the loss scale come after `fp16` in the table's order, not in the file's.
        let (of_fp16, others): (Vec<Found>, Vec<Found>) = content.found.into_iter().partition(|found| found.of_fp16);
        others.iter().for_each(|found| self.set(&Place::File(path), found));
        if self.value("fp16").is_some_and(|value| is_same(&value, "true")) {
            of_fp16.iter().for_each(|found| self.set(&Place::File(path), found));
        }
        if !content.unknown.is_empty() {
            let names: Vec<String> = content.unknown.iter().map(|name| format!("`{name}`")).collect();
            self.messages.notes.push(format!("{place}no counterpart for {}", names.join(", ")));
        }
    }

    /// Makes batch sizes as DeepSpeed has them ours. There the size of all ranks, the size of a micro-batch and the number of
    /// micro-batches may all be set, and must agree; here the size of all ranks replaces the number of micro-batches.
    fn reconcile_sizes(&self, found: &mut Vec<Found>) -> Result<(), String> {
        let in_file = |name: &str| found.iter().find(|found| found.setting == name).map(|found| found.value.clone());
        let (all, micro) = (in_file("train_batch_size"), "per_device_train_batch_size");
        let of_all = |name: &str| in_file(name).or_else(|| self.value(name));
        let number = |value: Option<String>| value.and_then(|value| value.parse::<usize>().ok());
        let (rows, accumulated) = (number(of_all(micro)), number(of_all("gradient_accumulation_steps")));
        let (Some(all), Some(accumulated)) = (number(all), accumulated) else { return Ok(()) };
        let per_step = accumulated.saturating_mul(num_ranks());
        let product = rows.unwrap_or(all.checked_div(per_step).unwrap_or(0));
        if product.saturating_mul(per_step) != all {
            return Err(format!(
                "`train_batch_size`: expected {micro} * gradient_accumulation_steps * ranks = {product} * {accumulated} * {} = {}, \
                 found {all}",
                num_ranks(),
                product.saturating_mul(per_step)
            ));
        }
        let replaced = if accumulated == 1 { "gradient_accumulation_steps" } else { "train_batch_size" };
        found.retain(|found| found.setting != replaced);
        if accumulated != 1 && rows.is_none() {
            let key = "train_batch_size".into();
            found.push(Found { key, setting: micro, value: product.to_string(), of_fp16: false });
        }
        Ok(())
    }

    /// Returns the value of a setting on the command line, or in the configuration file.
    fn value(&self, setting: &str) -> Option<String> {
        line::value(self.flags, self.settings, setting)
    }

    /// Adds a setting, or refuses it: a value that its flag does not accept, or another one than is set.
    fn set(&mut self, place: &Place<'_>, found: &Found) {
        let Found { key, setting, value, .. } = found;
        let Some(arg) = self.command.get_arguments().find(|arg| arg.get_id() == setting) else { return };
        let message = match (refusal(arg, value), self.value(setting)) {
            (Some(expected), _) => format!("`{key}`: {expected}, found `{value}`"),
            (None, Some(other)) if is_same(&other, value) => return,
            (None, Some(other)) => {
                format!("`{key}`: {setting} = {value} there contradicts {setting} = {other}: set one of them")
            }
            (None, None) => {
                if let Place::Flag(flag) = place {
                    self.messages.refusals.call_as(setting, flag, true);
                }
                return self.settings.push(Setting::new(setting, vec![value.clone()]));
            }
        };
        match place {
            Place::Flag(flag) => {
                self.messages.refusals.say(flag, message);
                self.messages.refusals.about_too(setting);
            }
            Place::File(path) => {
                self.messages.refusals.refuse(format!("{}: {message}", path.display()), [*setting]);
            }
        }
    }
}

/// Returns whether two values of a flag are the same: numbers and truth values in any notation.
fn is_same(one: &str, other: &str) -> bool {
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
        let found = parsed(&[&PPO[..], &words].concat()).map_err(|error| error.replace(path, "ds.json"))?;
        let Task::Ppo(config) = found.task else { panic!() };
        Ok((config, found.notes.iter().map(|note| note.replace(path, "ds.json")).collect()))
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
            "ds.json: `zero_optimization.stage`: zero_stage = 2 there contradicts zero_stage = 3: set one of them"
        );
        assert_eq!(
            refused(r#"{"zero_optimization": {"stage": 5}}"#, "--deepspeed FILE"),
            "ds.json: `zero_optimization.stage`: expected 0, 1, 2 or 3, found `5`"
        );
        let error = refused("{", "--deepspeed FILE");
        assert!(error.starts_with("deepspeed = ds.json: expected a DeepSpeed configuration in JSON: EOF"), "{error}");
        let error = ppo_error(&["--deepspeed", "no/such.json"]);
        assert!(error.starts_with("deepspeed = no/such.json: cannot read: "), "{error}");
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
            "ds.json: `train_batch_size`: expected per_device_train_batch_size * gradient_accumulation_steps * ranks = 4 * 2 * 1 = \
             8, found 64"
        );
    }
}
