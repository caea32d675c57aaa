//! Settings of `rlhf eval`.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::check::check_sizes;
use super::compute::ComputeConfig;
use super::generate::GenerateConfig;
use super::responses::ResponsesConfig;
use crate::data::SplitConfig;
use crate::environment::EnvironmentConfig;
use crate::reward::{LONGEST_TIMEOUT, RewardSources, RewardSourcesConfig, Spec, specs_or_error, without_query};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    ANY, DATA, EVALUATION, MODELS, MOST_REQUESTS, MOST_ROWS, NONE, REWARDS, RUN, SAMPLING, SPEED, Settings, all,
    at_least_one, defaults, exclude, expect, no_effect, refuse, usage,
};

/// Settings of `rlhf eval`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct EvaluateConfig {
    /// Language model to evaluate: a folder or a hub name.
    #[setting(alias = "model", heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: PathBuf,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Language model to compare it with: a folder or a hub name.
    #[setting(heading = MODELS, short = "second model: folder or hub name")]
    pub compare: Option<PathBuf>,
    /// Branch, tag or commit of `compare` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub compare_revision: String,
    /// Column of the dataset with responses to compare with, in place of a second model.
    #[setting(heading = DATA, short = "column with responses to compare")]
    pub compare_column: Option<String>,

    /// Dataset with the prompts: a file, a folder or a hub name.
    #[setting(heading = DATA, short = "dataset: file, folder or hub name")]
    pub dataset_name: PathBuf,
    /// Its split and its columns.
    #[setting(flatten)]
    #[serde(flatten)]
    pub split: SplitConfig,
    /// Number of prompts, from the start of the dataset [default: all].
    #[setting(heading = DATA, resume = Free, short = "prompts from the start of the dataset")]
    pub num_prompts: Option<usize>,
    /// Put a prompt that is a string into the chat template, as a user message.
    #[setting(heading = DATA, short = "put text prompts into the chat template")]
    pub apply_chat_template: bool,

    /// Reward model that scores the responses, a sequence classifier: a folder or a hub name.
    #[setting(heading = REWARDS, short = "reward model, a sequence classifier")]
    pub reward_model_path: Option<PathBuf>,
    /// Label of the reward model to use as the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
    #[setting(heading = REWARDS)]
    pub reward_label: Option<String>,
    /// Rewards besides, or instead of, the reward model.
    #[setting(flatten)]
    #[serde(flatten)]
    pub rewards: RewardSourcesConfig,
    /// Tools and environments, with which a response has several turns; their reward is one of the scores.
    #[setting(flatten)]
    #[serde(flatten)]
    pub environment: EnvironmentConfig,
    /// Judges that compare two responses.
    #[setting(flatten)]
    #[serde(flatten)]
    pub judge: JudgeConfig,
    /// A response is right if its score is at least this; gives the share of right responses and pass@k [default: 1, if all scores
    /// are 0 or 1].
    #[setting(heading = EVALUATION, resume = Free)]
    pub pass_score: Option<f64>,
    /// Maximum calls of the judge, retries aside: one for each score, or two for each pair. Fewer prompts are evaluated if it does
    /// not suffice.
    #[setting(heading = EVALUATION, resume = Free, short = "maximum calls of the judge")]
    pub max_judgements: Option<usize>,

    /// Sampling of the responses.
    #[setting(flatten)]
    #[serde(flatten)]
    pub sampling: ResponsesConfig,
    /// Seed of the sampling and of the intervals.
    #[setting(heading = SAMPLING, default = 42, most = ANY, short = "random seed")]
    pub seed: u64,

    /// Folder for the responses, the results and their summary. An evaluation that was cut continues there.
    #[setting(heading = RUN, resume = Free, short = "folder to write to")]
    pub output_dir: PathBuf,
    /// Replace the evaluation in `output_dir`.
    #[setting(heading = RUN, short = "replace an existing output folder")]
    #[serde(skip)] // Consent to lose results is given for one evaluation.
    pub overwrite_output_dir: bool,
    /// Sequences per forward pass; affects memory and speed only.
    #[setting(heading = SPEED, default = 32, most = MOST_ROWS, resume = Free, short = "sequences per forward pass")]
    pub batch_size: usize,
    /// Computation.
    #[setting(flatten)]
    #[serde(flatten)]
    pub compute: ComputeConfig,
}

/// Judges that compare two responses: a program, or a model behind an HTTP endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct JudgeConfig {
    /// Command line of a program that compares two responses: a JSON line in, a JSON line out.
    #[setting(heading = EVALUATION, short = "program that compares two responses")]
    pub judge_command: Option<String>,
    /// Address of an OpenAI-compatible API whose model compares two responses, such as `https://api.openai.com/v1`; its key is the
    /// environment variable RLHF_JUDGE_API_KEY, or OPENAI_API_KEY for api.openai.com.
    #[setting(heading = EVALUATION, short = "OpenAI-compatible API of a judge")]
    #[serde(serialize_with = "address")]
    pub judge_url: Option<String>,
    /// Name of the model at `judge_url`.
    #[setting(heading = EVALUATION, short = "name of the model at judge_url")]
    pub judge_model: Option<String>,
    /// File with the message to the model at `judge_url`, in which {prompt}, {response_a} and {response_b} are replaced [default: a
    /// template that asks for A, B or tie].
    #[setting(heading = EVALUATION)]
    pub judge_template: Option<PathBuf>,
    /// Sampling temperature of the model at `judge_url`; `none` sends none.
    #[setting(heading = EVALUATION, default = "0")]
    pub judge_temperature: Option<f64>,
    /// Maximum tokens of a verdict of the model at `judge_url`; `none` sends none.
    #[setting(heading = EVALUATION, default = "16")]
    pub judge_max_tokens: Option<usize>,
    /// Concurrent requests to `judge_url`.
    #[setting(heading = EVALUATION, default = 4, resume = Free, most = MOST_REQUESTS)]
    pub judge_concurrency: usize,
    /// Timeout in seconds for a verdict.
    #[setting(heading = EVALUATION, default = 120.0, resume = Free)]
    pub judge_timeout: f64,
    /// Retries after a judge fails, before the pair has no verdict.
    #[setting(heading = EVALUATION, default = 3, resume = Free)]
    pub judge_retries: usize,
}

impl EvaluateConfig {
    /// Creates a configuration with every default, for this model, these prompts and this folder; set `compare` or
    /// `compare_column`, and a judge, next.
    pub fn new(
        model_name_or_path: impl Into<PathBuf>,
        dataset_name: impl Into<PathBuf>,
        output_dir: impl Into<PathBuf>,
    ) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = model_name_or_path.into();
        config.dataset_name = dataset_name.into();
        config.output_dir = output_dir.into();
        config
    }

    /// Returns whether two responses to each prompt are compared.
    pub fn compares(&self) -> bool {
        self.compare.is_some() || self.compare_column.is_some()
    }

    /// Returns whether a judge compares pairs, in place of scores of single responses.
    pub fn judges_pairs(&self) -> bool {
        self.judge.judge_command.is_some() || self.judge.judge_url.is_some()
    }

    /// Returns the number of calls of the judge for one prompt.
    pub fn judgements_per_prompt(&self) -> usize {
        let samples = self.sampling.num_return_sequences;
        match (self.judges_pairs(), self.compare.is_some(), self.compare_column.is_some()) {
            (true, ..) | (_, true, _) => 2 * samples,
            (_, _, true) => samples + 1,
            _ => samples,
        }
    }

    /// Returns the settings of the generation by one of the models.
    pub fn generate(&self, model_name_or_path: &Path, revision: &str) -> GenerateConfig {
        let mut config = GenerateConfig::new(model_name_or_path);
        config.model_revision = revision.to_string();
        config.apply_chat_template = self.apply_chat_template;
        config.responses = self.sampling.clone();
        config.seed = self.seed;
        config.rows.batch_size = self.batch_size;
        config.rows.split.chat_template = self.split.chat_template.clone();
        config.environment = self.environment.clone();
        config
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        self.checked().map(drop)
    }

    /// Checks every setting as [`EvaluateConfig::check`] does, and returns the rewards, whose texts are parsed here and nowhere else.
    pub(crate) fn checked(&self) -> Result<Vec<Spec>> {
        check_sizes(self)?;
        let (rewards, rewards_check) = specs_or_error(self);
        let sides = match (&self.compare, &self.compare_column) {
            (Some(model), Some(column)) => exclude(
                name_of!(self.compare),
                name_of!(self.compare_column),
                format!(" = {} and compare_column = {column} exclude each other: set one of them", model.display()),
            ),
            _ => Ok(()),
        };
        let revision = match &self.compare {
            None if self.compare_revision != "main" => {
                no_effect(name_of!(self.compare_revision), &self.compare_revision, "without compare")
            }
            _ => Ok(()),
        };
        let needed = self.judgements_per_prompt();
        let enough = self.max_judgements.map_or(Ok(()), |most| {
            expect(
                most >= needed,
                name_of!(self.max_judgements),
                most,
                &format!("at least {needed}, the calls for one prompt"),
            )
        });
        let normalize = match self.rewards.reward_normalize.join(",") {
            none if none.is_empty() => Ok(()),
            set => no_effect(
                name_of!(self.rewards.reward_normalize),
                set,
                "in an evaluation: its scores do not depend on those of other responses",
            ),
        };
        all([
            sides,
            revision,
            normalize,
            rewards_check.and_then(|()| self.check_judge(&rewards)),
            self.judge.check(),
            self.rewards.check(),
            enough,
            self.num_prompts.map_or(Ok(()), |count| at_least_one(name_of!(self.num_prompts), count)),
            expect(!self.output_dir.as_os_str().is_empty(), name_of!(self.output_dir), "\"\"", "a folder"),
            at_least_one(name_of!(self.batch_size), self.batch_size),
            self.split.check(),
            self.compute.check(),
            self.generate(&self.model_name_or_path, &self.model_revision).check(),
        ])?;
        Ok(rewards)
    }

    /// Checks that there is one judge, and that it fits what is evaluated.
    fn check_judge(&self, rewards: &[Spec]) -> Result<()> {
        self.rewards.check_outside(rewards)?;
        let judge = &self.judge;
        let pairwise = match (&judge.judge_command, &judge.judge_url) {
            (Some(_), Some(_)) => {
                return exclude(
                    "judge_command",
                    "judge_url",
                    ": a program and judge_url exclude each other: set one of them",
                );
            }
            (Some(_), None) => Some("judge_command"),
            (None, Some(_)) => Some("judge_url"),
            (None, None) => None,
        };
        match (pairwise, rewards.is_empty()) {
            (Some(name), false) => refuse(
                name,
                ": a judge of pairs and rewards, which score single responses, exclude each other: set one of them",
            ),
            (Some(name), true) if !self.compares() => {
                refuse(name, ": expected compare or compare_column, as it judges pairs of responses, found neither")
            }
            (Some(_), true) if self.pass_score.is_some() => no_effect(
                name_of!(self.pass_score),
                self.pass_score.unwrap_or_default(),
                "with a judge of pairs, which gives no scores",
            ),
            (None, true) if self.environment.environment_factory.is_empty() => usage(
                "no judge: set reward_model_path, reward, reward_command or reward_url to compare scores, or judge_command or \
                 judge_url to compare pairs of responses",
            ),
            (None, true) if self.compare_column.is_some() => refuse(
                name_of!(self.compare_column),
                ": an environment scores no column: set reward_model_path, reward, reward_command or reward_url to compare \
                 scores, or judge_command or judge_url to compare pairs of responses",
            ),
            _ => Ok(()),
        }
    }
}

impl JudgeConfig {
    fn check(&self) -> Result<()> {
        let usual: Self = defaults();
        let needs_url = |name: &str, value: Option<String>| match (value, &self.judge_url) {
            (Some(value), None) => no_effect(name, value, "without judge_url"),
            _ => Ok(()),
        };
        let differs = |differs: bool, value: String| differs.then_some(value);
        let pairs = self.judge_url.is_some() || self.judge_command.is_some();
        let needs_pairs = |name: &str, differs: bool, value: String| {
            if differs && !pairs { no_effect(name, value, "without judge_command or judge_url") } else { Ok(()) }
        };
        let shown = |value: Option<String>| value.unwrap_or_else(|| NONE.into());
        let temperature = self.judge_temperature;
        let tokens = self.judge_max_tokens;
        let seconds = self.judge_timeout;
        all([
            match (&self.judge_url, &self.judge_model) {
                (Some(_), None) => {
                    refuse(name_of!(self.judge_model), ": expected the name of the model at judge_url, found none")
                }
                _ => Ok(()),
            },
            needs_url(name_of!(self.judge_model), self.judge_model.clone()),
            needs_url(
                name_of!(self.judge_template),
                self.judge_template.as_ref().map(|path| path.display().to_string()),
            ),
            needs_url(
                name_of!(self.judge_temperature),
                differs(temperature != usual.judge_temperature, shown(temperature.map(|x| x.to_string()))),
            ),
            needs_url(
                name_of!(self.judge_max_tokens),
                differs(tokens != usual.judge_max_tokens, shown(tokens.map(|x| x.to_string()))),
            ),
            needs_url(
                name_of!(self.judge_concurrency),
                differs(self.judge_concurrency != usual.judge_concurrency, self.judge_concurrency.to_string()),
            ),
            needs_pairs(name_of!(self.judge_timeout), seconds != usual.judge_timeout, seconds.to_string()),
            needs_pairs(
                name_of!(self.judge_retries),
                self.judge_retries != usual.judge_retries,
                self.judge_retries.to_string(),
            ),
            temperature.map_or(Ok(()), |value| {
                expect(
                    value >= 0.0 && value.is_finite(),
                    name_of!(self.judge_temperature),
                    value,
                    "a number of 0 or more",
                )
            }),
            tokens.map_or(Ok(()), |value| at_least_one(name_of!(self.judge_max_tokens), value)),
            at_least_one(name_of!(self.judge_concurrency), self.judge_concurrency),
            expect(
                seconds > 0.0 && seconds <= LONGEST_TIMEOUT,
                name_of!(self.judge_timeout),
                seconds,
                "a number of seconds above 0, at most a week",
            ),
        ])
    }
}

impl<'a> From<&'a EvaluateConfig> for RewardSources<'a> {
    fn from(config: &'a EvaluateConfig) -> Self {
        Self {
            model: config.reward_model_path.as_deref(),
            revision: None,
            label: config.reward_label.as_deref(),
            settings: &config.rewards,
        }
    }
}

/// Writes an address without its query, which may be secret.
fn address<S: serde::Serializer>(url: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    url.as_deref().map(without_query).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::usage_of;

    fn config(change: impl FnOnce(&mut EvaluateConfig)) -> EvaluateConfig {
        let mut config = EvaluateConfig::new("policy", "prompts.jsonl", "out");
        change(&mut config);
        config
    }

    #[test]
    fn an_evaluation_has_one_judge_that_fits_it() {
        config(|c| c.reward_model_path = Some("reward".into())).check().unwrap();
        config(|c| (c.compare, c.judge.judge_command) = (Some("sft".into()), Some("judge".into()))).check().unwrap();
        type Change = fn(&mut EvaluateConfig);
        let cases: [(Change, &str); 10] = [
            (|_| (), "no judge: set reward_model_path, reward, reward_command"),
            (|c| c.judge.judge_command = Some("j".into()), "judge_command: expected compare or compare_column"),
            (
                |c| (c.compare, c.compare_column) = (Some("a".into()), Some("b".into())),
                "compare = a and compare_column = b exclude each other",
            ),
            (
                |c| {
                    c.compare = Some("a".into());
                    c.judge.judge_url = Some("http://h/v1".into());
                    c.rewards.reward = vec!["json".into()];
                },
                "judge_url: a judge of pairs and rewards",
            ),
            (
                |c| (c.compare, c.judge.judge_url) = (Some("a".into()), Some("http://h/v1".into())),
                "judge_model: expected the name of the model at judge_url",
            ),
            (
                |c| (c.rewards.reward, c.judge.judge_model) = (vec!["json".into()], Some("m".into())),
                "judge_model = m has no effect without judge_url",
            ),
            (
                |c| (c.rewards.reward, c.judge.judge_retries) = (vec!["json".into()], 9),
                "judge_retries = 9 has no effect without judge_command or judge_url",
            ),
            (
                |c| {
                    (c.compare, c.judge.judge_command) = (Some("a".into()), Some("j".into()));
                    (c.sampling.num_return_sequences, c.max_judgements) = (4, Some(7));
                },
                "max_judgements = 7: expected at least 8, the calls for one prompt",
            ),
            (
                |c| (c.rewards.reward, c.compare_revision) = (vec!["json".into()], "v1".into()),
                "compare_revision = v1 has no effect without compare",
            ),
            (
                |c| {
                    c.rewards.reward = vec!["json".into()];
                    c.rewards.reward_normalize = vec!["json=std".into()];
                },
                "reward_normalize = json=std has no effect in an evaluation",
            ),
        ];
        for (change, words) in cases {
            let mut config = config(change);
            if words.starts_with("compare = a") {
                config.rewards.reward = vec!["json".into()];
            }
            let error = usage_of(config.check());
            assert!(error.starts_with(words), "{error}");
        }
    }

    #[test]
    fn the_calls_of_one_prompt_are_those_of_its_judge() {
        let calls = |change: fn(&mut EvaluateConfig)| {
            let mut config = config(change);
            config.sampling.num_return_sequences = 3;
            config.judgements_per_prompt()
        };
        assert_eq!(calls(|_| ()), 3);
        assert_eq!(calls(|c| c.compare = Some("a".into())), 6);
        assert_eq!(calls(|c| c.compare_column = Some("a".into())), 4);
        assert_eq!(calls(|c| (c.compare_column, c.judge.judge_command) = (Some("a".into()), Some("j".into()))), 6);
    }

    #[test]
    fn the_query_of_a_judges_address_is_not_written() {
        let config = config(|c| c.judge.judge_url = Some("http://h/v1?key=secret".into()));
        assert_eq!(serde_json::to_value(&config).unwrap()["judge_url"], "http://h/v1?...");
    }
}
