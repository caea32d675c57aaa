//! Settings of rewards: where scores come from, and how they are scaled.

use serde::Serialize;

use super::address::without_query;
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    MOST_REQUESTS, MOST_ROWS, REWARDS, Settings, above_zero, all, at_least_one, expect, no_effect,
};

/// Maximum time to wait for a reward, in seconds.
pub(crate) const LONGEST_TIMEOUT: f64 = 7.0 * 24.0 * 3600.0;

/// Rewards beside, or in place of, the reward model; the score is their weighted sum.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct RewardSourcesConfig {
    /// Rewards, each as KIND:ARGUMENT or NAME=KIND:ARGUMENT. Kinds: length:target=40, regex:EXPRESSION,
    /// words:FILE, json, exact:COLUMN, numeric:COLUMN, bleu:COLUMN, rouge_l:COLUMN, repetition:n=3, model:FOLDER, command:LINE,
    /// url:ADDRESS, python:MODULE.FUNCTION; and TRL's accuracy_reward, reasoning_accuracy_reward, think_format_reward, get_soft_overlong_punishment,
    /// get_repetition_penalty_reward, get_cosine_scaled_reward, with their arguments as KEY=VALUE. Those that read a
    /// column take optional=true: rows without it get no score.
    #[setting(alias = "reward_funcs", heading = REWARDS, several, replay = Scores, short = "rule, program or service: see --help")]
    #[serde(serialize_with = "rewards_without_queries")]
    pub reward: Vec<String>,
    /// Command line of a program that scores responses: JSON lines in, JSON lines out.
    #[setting(heading = REWARDS, replay = Scores)]
    pub reward_command: Option<String>,
    /// Address of an HTTP service that scores responses; its token is the environment variable RLHF_REWARD_TOKEN.
    #[setting(heading = REWARDS, replay = Scores)]
    #[serde(serialize_with = "address_without_query")]
    pub reward_url: Option<String>,
    /// Weights of the rewards in their sum: NAME=X, separated by commas; X for all; or one X for each reward, in the order model,
    /// command, url, `reward` [default: 1].
    #[setting(heading = REWARDS, delimiter = ',', several, replay = Scores)]
    pub reward_weights: Vec<String>,
    /// Normalize a reward's scores: NAME=std divides by their running standard deviation, NAME=mean_std subtracts their running
    /// mean first.
    #[setting(heading = REWARDS, delimiter = ',', replay = Scores)]
    pub reward_normalize: Vec<String>,
    /// Factor of a reward's scores, as NAME=X; applied after `reward_normalize`.
    #[setting(heading = REWARDS, delimiter = ',', replay = Scores)]
    pub reward_scale: Vec<String>,
    /// Clip a reward's scores to [-X, X], as NAME=X; applied after `reward_scale` and before `reward_weights`.
    #[setting(heading = REWARDS, delimiter = ',', replay = Scores)]
    pub reward_clip: Vec<String>,
    /// Give prompt and response to reward models that are encoders as two segments, `[CLS] prompt [SEP] response [SEP]`, as OpenAssistant's
    /// DeBERTa reads them; without it as one text.
    #[setting(heading = REWARDS, replay = Scores)]
    pub reward_pair: bool,
    /// Column of the dataset to send to a reward service as `labels`.
    #[setting(heading = REWARDS, default = "label", replay = Scores)]
    pub reward_label_column: String,
    /// Responses per request to a reward service.
    #[setting(heading = REWARDS, default = 32, resume = Free, most = MOST_ROWS, replay = Scores)]
    pub reward_batch_size: usize,
    /// Concurrent requests to a reward service.
    #[setting(heading = REWARDS, default = 4, resume = Free, replay = Scores, most = MOST_REQUESTS)]
    pub reward_concurrency: usize,
    /// Timeout in seconds for the next score of a reward program, or for a request to a service.
    #[setting(heading = REWARDS, default = 120.0, resume = Free, replay = Scores)]
    pub reward_timeout: f64,
    /// Retries after a reward program or service fails, before the run ends with an error.
    #[setting(heading = REWARDS, default = 3, resume = Free, replay = Scores)]
    pub reward_retries: usize,
}

impl RewardSourcesConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let seconds = self.reward_timeout;
        let expected = "a number of seconds above 0, at most a week";
        all([
            at_least_one(name_of!(self.reward_batch_size), self.reward_batch_size),
            at_least_one(name_of!(self.reward_concurrency), self.reward_concurrency),
            expect(seconds > 0.0 && seconds <= LONGEST_TIMEOUT, name_of!(self.reward_timeout), seconds, expected),
        ])
    }
}

/// Scaling of the whole scores that are trained on, whatever rewards they are the sum of; TRL's trainer with `step()` has it.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ScoreScalingConfig {
    /// Divide scores by the running standard deviation of all scores of the run.
    #[setting(heading = REWARDS, replay = Changes)]
    pub use_score_scaling: bool,
    /// With `use_score_scaling`, subtract the running mean of all scores of the run first.
    #[setting(heading = REWARDS, replay = Changes)]
    pub use_score_norm: bool,
    /// Clip scores to plus or minus this value, after `use_score_scaling`.
    #[setting(heading = REWARDS, replay = Changes)]
    pub score_clip: Option<f64>,
}

impl ScoreScalingConfig {
    pub(crate) fn check(&self) -> Result<()> {
        all([
            if self.use_score_norm && !self.use_score_scaling {
                no_effect(name_of!(self.use_score_norm), true, "without use_score_scaling = true")
            } else {
                Ok(())
            },
            self.score_clip.map_or(Ok(()), |clip| above_zero(name_of!(self.score_clip), clip)),
        ])
    }
}

fn address_without_query<S: serde::Serializer>(url: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    url.as_deref().map(without_query).serialize(serializer)
}

fn rewards_without_queries<S: serde::Serializer>(rewards: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rewards.iter().map(|written| match written.split_once(':') {
        Some((head, url)) if head == "url" || head.ends_with("=url") => format!("{head}:{}", without_query(url)),
        _ => written.clone(),
    }))
}
