//! Settings of rewards: where scores come from, and how they are scaled.

use std::fmt::Display;

use clap::Args;
use serde::Serialize;

use super::http::{LEFT_OUT, address};
use super::spec::Spec;
use crate::Result;
use crate::flag::{NONE, REWARDS, above_zero, all, at_least_one, defaults, expect, no_effect, optional};

/// Maximum number of concurrent requests to a reward service; each has a thread.
const MOST_REQUESTS: usize = 1024;

/// Maximum time to wait for a reward, in seconds.
const LONGEST_TIMEOUT: f64 = 7.0 * 24.0 * 3600.0;

/// Rewards beside, or in place of, the reward model; the score is their weighted sum.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct RewardSourcesConfig {
    /// A reward, as KIND:ARGUMENT or NAME=KIND:ARGUMENT; the flag several times for several. Kinds: length:target=40,
    /// regex:EXPRESSION, words:FILE, json, exact:COLUMN, numeric:COLUMN, bleu:COLUMN, rouge_l:COLUMN, repetition:n=3,
    /// model:FOLDER, command:LINE, url:ADDRESS.
    #[arg(long, help_heading = REWARDS)]
    #[serde(serialize_with = "rewards_without_queries")]
    pub reward: Vec<String>,
    /// Command line of a program that scores answers: JSON lines in, JSON lines out.
    #[arg(long, help_heading = REWARDS, default_value = NONE, hide_default_value = true, value_parser = optional::<String>)]
    pub reward_command: std::option::Option<String>,
    /// Address of a service that scores answers; RLHF_REWARD_TOKEN in the environment is its token.
    #[arg(long, help_heading = REWARDS, default_value = NONE, hide_default_value = true, value_parser = optional::<String>)]
    #[serde(serialize_with = "address_without_query")]
    pub reward_url: std::option::Option<String>,
    /// Weights in the sum, as NAME=X with commas between them, or X for all [default: 1].
    #[arg(long, help_heading = REWARDS, value_delimiter = ',')]
    pub reward_weights: Vec<String>,
    /// Divide a reward's scores by their running standard deviation, NAME=std, less their running mean before that,
    /// NAME=mean_std.
    #[arg(long, help_heading = REWARDS, value_delimiter = ',')]
    pub reward_normalize: Vec<String>,
    /// Multiply a reward's scores, after that, as NAME=X.
    #[arg(long, help_heading = REWARDS, value_delimiter = ',')]
    pub reward_scale: Vec<String>,
    /// Clip a reward's scores to plus or minus this, after that and before they are weighted, as NAME=X.
    #[arg(long, help_heading = REWARDS, value_delimiter = ',')]
    pub reward_clip: Vec<String>,
    /// Column of the dataset that a service gets as `labels`.
    #[arg(long, help_heading = REWARDS, default_value = "label")]
    pub reward_label_column: String,
    /// Answers in one request to a service.
    #[arg(long, help_heading = REWARDS, default_value_t = 32)]
    pub reward_batch_size: usize,
    /// Requests to a service at a time.
    #[arg(long, help_heading = REWARDS, default_value_t = 4)]
    pub reward_concurrency: usize,
    /// Seconds to wait for the next score of a program, or for a service.
    #[arg(long, help_heading = REWARDS, default_value_t = 120.0)]
    pub reward_timeout: f64,
    /// How often a program that fails is started again, and a service asked again, before the run ends.
    #[arg(long, help_heading = REWARDS, default_value_t = 3)]
    pub reward_retries: usize,
}

impl RewardSourcesConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let most = format!("at most {MOST_REQUESTS}");
        let seconds = self.reward_timeout;
        let expected = "a number of seconds above 0, at most a week";
        all([
            at_least_one("reward_batch_size", self.reward_batch_size),
            at_least_one("reward_concurrency", self.reward_concurrency),
            expect(self.reward_concurrency <= MOST_REQUESTS, "reward_concurrency", self.reward_concurrency, &most),
            expect(seconds > 0.0 && seconds <= LONGEST_TIMEOUT, "reward_timeout", seconds, expected),
        ])
    }

    /// Refuses settings of programs and services where none of `rewards` is one.
    pub(crate) fn check_outside(&self, rewards: &[Spec]) -> Result<()> {
        let usual: Self = defaults();
        let (service, outside) = (rewards.iter().any(Spec::is_service), rewards.iter().any(Spec::is_outside));
        let why = "without a reward that is a service";
        let unused = |name, found: &dyn Display, differs: bool| {
            if differs && !service { no_effect(name, found, why) } else { Ok(()) }
        };
        let own = "without a reward that is a program or a service";
        let unwaited = |name, found: &dyn Display, differs: bool| {
            if differs && !outside { no_effect(name, found, own) } else { Ok(()) }
        };
        let (label, rows, requests) = (&self.reward_label_column, self.reward_batch_size, self.reward_concurrency);
        all([
            unused("reward_label_column", label, *label != usual.reward_label_column),
            unused("reward_batch_size", &rows, rows != usual.reward_batch_size),
            unused("reward_concurrency", &requests, requests != usual.reward_concurrency),
            unwaited("reward_timeout", &self.reward_timeout, self.reward_timeout != usual.reward_timeout),
            unwaited("reward_retries", &self.reward_retries, self.reward_retries != usual.reward_retries),
        ])
    }
}

/// Scaling of the whole scores that are trained on, whatever rewards they are the sum of; TRL's trainer with `step()` has it.
#[derive(Debug, Clone, PartialEq, Serialize, Args)]
#[command(rename_all = "snake_case")]
pub struct ScoreScalingConfig {
    /// Divide the scores that are trained on by the standard deviation of all that the run has seen.
    #[arg(long, help_heading = REWARDS)]
    pub use_score_scaling: bool,
    /// Subtract the mean of all that the run has seen before that.
    #[arg(long, help_heading = REWARDS)]
    pub use_score_norm: bool,
    /// Clip scores to plus or minus this, after that.
    #[arg(long, help_heading = REWARDS, default_value = NONE, value_parser = optional::<f64>)]
    pub score_clip: std::option::Option<f64>,
}

impl ScoreScalingConfig {
    pub(crate) fn check(&self) -> Result<()> {
        all([
            if self.use_score_norm && !self.use_score_scaling {
                no_effect("use_score_norm", true, "without use_score_scaling = true")
            } else {
                Ok(())
            },
            self.score_clip.map_or(Ok(()), |clip| above_zero("score_clip", clip)),
        ])
    }
}

/// Returns the address of a service as it is written to files, without the query, which may be secret.
fn without_query(url: &str) -> String {
    match address(url) {
        shown if shown == url => url.to_string(),
        shown => format!("{shown}{LEFT_OUT}"),
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
