//! Settings of datasets: files, columns, splits, shares of the stages, lengths of prompts.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value};

use super::{Columns, Files};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    ANY, Choices, DATA, JsonObject, MOST_TOKENS, Setting, Settings, above_zero, all, at_least_one, exclude, expect,
    no_effect, refuse,
};

/// Default seed of the shares of a dataset. It is not the run's seed, so that the shares of the stages have no row in common, whatever
/// the seeds of the stages are.
const SPLIT_SEED: u64 = 42;

/// Default split to evaluate on.
pub(crate) const TEST: &str = "test";

/// Variables of chat templates.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ChatTemplateConfig {
    /// Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows have
    /// `chat_template_kwargs`, these take precedence by name.
    #[setting(heading = DATA)]
    pub chat_template_kwargs: Option<JsonObject>,
}

impl ChatTemplateConfig {
    /// Checks that the variables are a JSON object, and that it has no variable that each rendering sets.
    pub(crate) fn check(&self) -> Result<()> {
        let Some(variables) = &self.chat_template_kwargs else { return Ok(()) };
        let form = r#": expected JSON of the form {"enable_thinking": false}"#;
        let refused = |found: String| refuse(name_of!(self.chat_template_kwargs), format!("{form}, found {found}"));
        let variables = match variables.entries() {
            Ok(variables) => variables,
            Err(value) => return refused(value.to_string()),
        };
        match ["messages", "add_generation_prompt"].into_iter().find(|name| variables.contains_key(*name)) {
            Some(name) => refused(format!("`{name}`, which is set for each conversation")),
            None => Ok(()),
        }
    }

    /// Returns the variables.
    pub fn variables(&self) -> Map<String, Value> {
        JsonObject::to_map(self.chat_template_kwargs.as_ref())
    }
}

/// The part of a dataset that a command without training reads.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct SplitConfig {
    /// Configuration (folder) of the dataset to use, if several have the split.
    #[setting(heading = DATA)]
    pub dataset_config: Option<String>,
    /// Split of a dataset that is a folder or on the hub.
    #[setting(heading = DATA, default = TEST)]
    pub dataset_split: String,
    /// Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none ignores a field.
    #[setting(heading = DATA, delimiter = ',')]
    pub dataset_columns: Vec<String>,
    /// Variables of chat templates.
    #[setting(flatten)]
    #[serde(flatten)]
    pub chat_template: ChatTemplateConfig,
}

impl SplitConfig {
    /// Checks every setting.
    pub(crate) fn check(&self) -> Result<()> {
        all([self.columns().map(drop), self.chat_template.check()])
    }

    /// Finds the files of the dataset `name`, a path or a name on the hub.
    ///
    /// # Errors
    /// The errors of [`Files::find`].
    pub fn find(&self, name: &Path) -> Result<Files> {
        Files::find_by_flag(name, self.dataset_config.as_deref(), &self.dataset_split, name_of!(self.dataset_split))
    }

    /// Parses the columns.
    ///
    /// # Errors
    /// The errors of [`Columns::parse`].
    pub fn columns(&self) -> Result<Columns> {
        Columns::parse(&self.dataset_columns)
    }
}

/// A training run's datasets, and the rows held out for evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct DataConfig {
    /// Dataset: a JSONL, JSON, CSV or Parquet file, a folder with files per split, or a hub name; or several of them.
    #[setting(alias = "query_dataset", heading = DATA, required, several, short = "dataset: file, folder or hub name")]
    #[serde(serialize_with = "one_or_list")]
    pub dataset_name: Vec<PathBuf>,
    /// Sampling weights of several datasets, a number for each [default: every row is equally likely].
    #[setting(heading = DATA, several, delimiter = ',')]
    pub dataset_weights: Vec<f64>,
    /// Configuration (folder) of the dataset to use, if several have the split; of the evaluation dataset too, if it has it.
    #[setting(heading = DATA)]
    pub dataset_config: Option<String>,
    /// Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none ignores a field.
    #[setting(heading = DATA, delimiter = ',')]
    pub dataset_columns: Vec<String>,
    /// Split of the dataset to train on.
    #[setting(heading = DATA, default = "train")]
    pub dataset_train_split: String,
    /// Split of the dataset to evaluate on; in PPO the sample tables show responses to its prompts.
    #[setting(heading = DATA, default = TEST)]
    pub dataset_test_split: String,
    /// Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to evaluate on.
    #[setting(heading = DATA)]
    pub eval_split_size: Option<f64>,
    /// Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares are disjoint.
    #[setting(heading = DATA)]
    pub data_split: Option<DataSplit>,
    /// Seed of `data_split`; must be the same for sft, reward and ppo.
    #[setting(heading = DATA, default = SPLIT_SEED, most = ANY)]
    pub data_split_seed: u64,
    /// Variables of chat templates.
    #[setting(flatten)]
    #[serde(flatten)]
    pub chat_template: ChatTemplateConfig,
}

impl DataConfig {
    /// Returns all names, for messages.
    pub fn describe(&self) -> String {
        let names: Vec<String> = self.dataset_name.iter().map(|name| name.display().to_string()).collect();
        names.join(", ")
    }

    /// Checks every setting; `eval_dataset` is a separate dataset for evaluation.
    pub(crate) fn check(&self, eval_dataset: Option<&Path>) -> Result<()> {
        let names = self.dataset_name.len();
        let weights = self.dataset_weights.len();
        let expected = format!("one for each of the datasets, which are {names}");
        let size = self.eval_split_size;
        let sound = |size: f64| size > 0.0 && size.is_finite() && (size < 1.0 || size.fract() == 0.0);
        all([
            expect(names > 0, "datasets", names, "at least 1"),
            expect(weights == 0 || weights == names, "numbers in dataset_weights", weights, &expected),
            self.dataset_weights.iter().try_for_each(|&weight| above_zero(name_of!(self.dataset_weights), weight)),
            Columns::parse(&self.dataset_columns).map(drop),
            self.chat_template.check(),
            if self.data_split.is_none() && self.data_split_seed != SPLIT_SEED {
                no_effect(name_of!(self.data_split_seed), self.data_split_seed, "without data_split")
            } else {
                Ok(())
            },
            size.map_or(Ok(()), |size| {
                expect(sound(size), name_of!(self.eval_split_size), size, "a share below 1, or a whole number of rows")
            }),
            match (size, eval_dataset.map(Path::display)) {
                (Some(size), Some(eval_name)) => exclude(
                    name_of!(self.eval_split_size),
                    "eval_dataset_name",
                    format!(" = {size} and eval_dataset_name = {eval_name} exclude each other: set one of them"),
                ),
                _ => Ok(()),
            },
        ])
    }
}

/// The parts of a dataset that SFT, the reward model and PPO train on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DataSplit {
    parts: [f64; 3],
}

impl DataSplit {
    /// Returns the range of `stage`'s share among `rows` shuffled rows: the shares are consecutive and cover all rows.
    pub fn share(&self, stage: Stage, rows: usize) -> std::ops::Range<usize> {
        let all: f64 = self.parts.iter().sum();
        let end = |parts: &[f64]| (rows as f64 * (parts.iter().sum::<f64>() / all)).round() as usize;
        let stage = match stage {
            // DPO trains on the pairs that a reward model would, and distillation on the prompts of PPO.
            Stage::Dpo => Stage::Reward,
            Stage::Distill => Stage::Ppo,
            other => other,
        };
        let at = stage as usize;
        end(&self.parts[..at])..end(&self.parts[..=at])
    }
}

impl std::str::FromStr for DataSplit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Option<Vec<f64>> = text.split(',').map(|part| part.trim().parse().ok()).collect();
        let parts: Option<[f64; 3]> = parts.and_then(|parts| parts.try_into().ok());
        let sound = |parts: &[f64; 3]| {
            let all: f64 = parts.iter().sum();
            parts.iter().all(|&part| part >= 0.0) && all > 0.0 && all.is_finite()
        };
        parts.filter(sound).map(|parts| Self { parts }).ok_or_else(|| format!("expected {}", Self::EXPECTED))
    }
}

impl Display for DataSplit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [sft, reward, ppo] = self.parts;
        write!(f, "{sft},{reward},{ppo}")
    }
}

impl Serialize for DataSplit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Setting for DataSplit {
    const NAME: &'static str = "PARTS";
    const EXPECTED: &'static str = "three numbers of 0 or more for sft, reward and ppo, such as 2,4,4";

    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

/// A stage of RLHF, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Supervised fine-tuning.
    Sft,
    /// The reward model.
    Reward,
    /// PPO.
    Ppo,
    /// DPO, instead of the reward model and PPO or in addition to them.
    Dpo,
    /// Distillation from a teacher.
    Distill,
}

impl Stage {
    /// The three stages of RLHF with a reward model.
    pub const ALL: [Self; 3] = [Self::Sft, Self::Reward, Self::Ppo];
    /// All stages that a pipeline may have; a stage after the first three is part of it if the pipeline's file has a section for it.
    pub const EVERY: [Self; 5] = [Self::Sft, Self::Reward, Self::Ppo, Self::Dpo, Self::Distill];

    /// Returns the name of the stage's command.
    pub fn name(self) -> &'static str {
        Choices::name(self)
    }
}

impl Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Maximum length of a prompt, and the treatment of longer ones.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct PromptLengthConfig {
    /// Maximum tokens of a prompt [default: the models' context minus `response_length`].
    #[setting(heading = DATA, most = MOST_TOKENS)]
    pub max_prompt_length: Option<usize>,
    /// Handling of prompts longer than `max_prompt_length`: an error, or drop the prompt, or truncate it on one side.
    #[setting(heading = DATA, default = "error")]
    pub long_prompts: LongPrompts,
}

impl PromptLengthConfig {
    pub(crate) fn check(&self) -> Result<()> {
        self.max_prompt_length.map_or(Ok(()), |most| at_least_one(name_of!(self.max_prompt_length), most))
    }
}

/// Treatment of prompts that are too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum LongPrompts {
    /// An error before training starts.
    Error,
    /// They are dropped.
    Drop,
    /// Their first tokens are removed, except those that the tokenizer puts in front of every text.
    TruncateLeft,
    /// Their last tokens are removed.
    TruncateRight,
}

/// Writes one dataset as its name, several as a list.
fn one_or_list<S: serde::Serializer>(names: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    match names {
        [one] => one.serialize(serializer),
        several => several.serialize(serializer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::schema::defaults;

    #[test]
    fn the_shares_of_a_split_are_consecutive_and_cover_every_row() {
        for text in ["2,4,4", "1,0,0", " 0, 1, 2.5", "0.2,0.4,0.4"] {
            let split = DataSplit::read(text).unwrap();
            assert_eq!(DataSplit::read(&split.to_string()), Some(split));
            for rows in [0, 1, 2, 3, 9, 10, 1001] {
                let [sft, reward, ppo] = Stage::ALL.map(|stage| split.share(stage, rows));
                assert_eq!((sft.start, sft.end, reward.end, ppo.end), (0, reward.start, ppo.start, rows), "{text}");
            }
        }
        let lens = Stage::ALL.map(|stage| DataSplit::read("2,4,4").unwrap().share(stage, 1000).len());
        assert_eq!(lens, [200, 400, 400]);
        for wrong in ["", "2,4", "2,4,4,1", "2,-4,4", "0,0,0", "a,b,c", "1,inf,1", "1,nan,1"] {
            assert_eq!(DataSplit::read(wrong), None, "{wrong}");
        }
        let config = DataConfig { data_split_seed: 1, ..defaults() };
        let error = config.check(None).unwrap_err().to_string();
        assert_eq!(error, "data_split_seed = 1 has no effect without data_split");
    }
}
