//! Settings of `rlhf score`.

use std::path::PathBuf;

use serde::Serialize;

use super::check::check_sizes;
use super::rows::RowsConfig;
use crate::reward::{RewardSources, RewardSourcesConfig, Rewards, Spec, resolve, specs_or_error};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{MODELS, Settings, all, defaults, refuse, usage};
use rlhf_lm::model::ModelOptions;
use rlhf_lm::tokenizer::Tokenizer;

/// Settings of `rlhf score`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ScoreConfig {
    /// Reward model, a sequence classifier: a folder or a hub name.
    #[setting(alias = "model", heading = MODELS, short = "model: folder or hub name")]
    pub model_name_or_path: Option<PathBuf>,
    /// Branch, tag or commit of `model_name_or_path` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Label of the reward model to use as the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
    #[setting(heading = MODELS)]
    pub reward_label: Option<String>,
    /// Tokenizer of the policy, for the prompts and responses that rewards get: a folder or a hub name [default: the reward
    /// model's].
    #[setting(heading = MODELS, short = "the policy's tokenizer")]
    pub tokenizer_name: Option<PathBuf>,
    /// Rewards besides, or instead of, the reward model.
    #[setting(flatten)]
    #[serde(flatten)]
    pub rewards: RewardSourcesConfig,
    /// Input and output of rows, and computation.
    #[setting(flatten)]
    #[serde(flatten)]
    pub rows: RowsConfig,
}

impl ScoreConfig {
    /// Creates a configuration with every default, for this model; set `rows.dataset_name` next.
    pub fn new(model_name_or_path: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model_name_or_path = Some(model_name_or_path.into());
        config
    }

    /// Returns whether responses are scored as in a training run. Otherwise a model scores whole texts.
    pub fn scores_responses(&self) -> bool {
        self.tokenizer_name.is_some() || self.rewards != defaults()
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        self.checked().map(drop)
    }

    /// Checks every setting as [`ScoreConfig::check`] does, and returns the rewards, whose texts are parsed here and nowhere else.
    fn checked(&self) -> Result<Vec<Spec>> {
        check_sizes(self)?;
        let (rewards, rewards_check) = specs_or_error(self);
        let enough = rewards_check.and_then(|()| match rewards[..] {
            [] => usage("no reward: set at least one of model_name_or_path, reward, reward_command and reward_url"),
            _ if self.model_name_or_path.is_none() && self.tokenizer_name.is_none() => refuse(
                name_of!(self.tokenizer_name),
                ": expected the policy's folder, as rewards read the text of its tokens, found none",
            ),
            _ => Ok(()),
        });
        all([self.rewards.check(), enough, self.rows.check()])?;
        Ok(rewards)
    }

    /// Checks every setting, and loads the rewards, for responses of `tokenizer`.
    ///
    /// # Errors
    /// If a setting is invalid, or a reward cannot be loaded.
    pub fn load_rewards(&self, tokenizer: &Tokenizer, options: ModelOptions) -> Result<Rewards> {
        let specs = resolve(&self.checked()?)?;
        Rewards::load(specs, &self.rewards, None, tokenizer, self.rows.batch_size, options)
    }
}

impl<'a> From<&'a ScoreConfig> for RewardSources<'a> {
    fn from(config: &'a ScoreConfig) -> Self {
        Self {
            model: config.model_name_or_path.as_deref(),
            revision: Some(&config.model_revision),
            label: config.reward_label.as_deref(),
            settings: &config.rewards,
        }
    }
}
