//! Settings of `rlhf chat`.

use std::path::PathBuf;

use serde::Serialize;

use super::check::check_sizes;
use super::compute::ComputeConfig;
use super::generate::GenerateConfig;
use super::responses::SamplerConfig;
use crate::data::ChatTemplateConfig;
use crate::environment::EnvironmentConfig;
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    ANY, DATA, ENVIRONMENTS, Field, JsonObject, MODELS, MOST_TOKENS, SAMPLING, Settings, Values, all, defaults, refuse,
};

/// Settings of `rlhf chat`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ChatConfig {
    /// Causal language model: a folder or a hub name.
    #[setting(positional, value_name = "MODEL")]
    pub model: PathBuf,
    /// Branch, tag or commit of `model` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Second model, which responds to the same messages after the first: a folder or a hub name.
    #[setting(heading = MODELS, short = "second model: folder or hub name")]
    pub compare: Option<PathBuf>,
    /// System message of the conversation.
    #[setting(heading = DATA, short = "system message")]
    pub system: Option<String>,
    /// Variables of the chat template.
    #[setting(flatten)]
    #[serde(flatten)]
    pub chat_template: ChatTemplateConfig,
    /// Tools and environments.
    #[setting(flatten)]
    #[serde(flatten)]
    pub environment: ChatEnvironmentConfig,
    /// Columns of the row that the environment begins with, as JSON such as {"target": 5}.
    #[setting(heading = ENVIRONMENTS)]
    pub environment_row: Option<JsonObject>,
    /// Maximum tokens of a response; with tools, of each of its turns.
    #[setting(heading = SAMPLING, default = 512, most = MOST_TOKENS, short = "maximum tokens of a response")]
    pub max_new_tokens: usize,
    /// Sampling of each token.
    #[setting(flatten)]
    #[serde(flatten)]
    pub sampler: SamplerConfig,
    /// Seed of the sampling.
    #[setting(heading = SAMPLING, default = 42, most = ANY, short = "random seed")]
    pub seed: u64,
    /// Computation.
    #[setting(flatten)]
    #[serde(flatten)]
    pub compute: ComputeConfig,
}

impl ChatConfig {
    /// Creates a configuration with every default, for this model.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model = model.into();
        config
    }

    /// Returns the settings of a response as those of `rlhf generate`.
    pub fn generate(&self) -> GenerateConfig {
        let mut config = GenerateConfig::new(&self.model);
        config.responses.max_new_tokens = Some(self.max_new_tokens);
        // A temperature that is set is used, even if the model's file sets greedy decoding.
        config.responses.do_sample = self.sampler.temperature.map(|temperature| temperature != 0.0);
        config.responses.sampler = self.sampler.clone();
        config.seed = self.seed;
        config
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([
            self.generate().check(),
            self.compute.check(),
            self.chat_template.check(),
            self.environment.0.check(),
            self.check_row(),
        ])
    }

    fn check_row(&self) -> Result<()> {
        let Some(row) = &self.environment_row else { return Ok(()) };
        if self.environment.0.environment_factory.is_empty() {
            return refuse(name_of!(self.environment_row), " has no effect without `environment_factory`");
        }
        match row.entries() {
            Ok(_) => Ok(()),
            Err(found) => refuse(
                name_of!(self.environment_row),
                format!(": expected JSON of the form {{\"target\": 5}}, found {found}"),
            ),
        }
    }
}

/// Settings of a run that mean its many rows, and nothing to one conversation.
const ROW_SETTINGS: [&str; 2] = ["environment_failure_reward", "max_environments"];

/// Tools and environments of a conversation: the settings of a run, without those of its rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct ChatEnvironmentConfig(pub EnvironmentConfig);

impl Settings for ChatEnvironmentConfig {
    fn describe(fields: &mut Vec<Field>) {
        fields.extend(EnvironmentConfig::fields().into_iter().filter(|field| !ROW_SETTINGS.contains(&field.name)));
    }

    fn read(values: &Values<'_>) -> Result<Self> {
        EnvironmentConfig::read(&|name| if ROW_SETTINGS.contains(&name) { None } else { values(name) }).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_has_the_settings_of_tools_but_those_of_many_rows() {
        let names = |fields: Vec<Field>| fields.into_iter().map(|field| field.name).collect::<Vec<_>>();
        let (chat_names, all) = (names(ChatConfig::fields()), names(EnvironmentConfig::fields()));
        let missing: Vec<&str> = all.into_iter().filter(|name| !chat_names.contains(name)).collect();
        assert_eq!(missing, ROW_SETTINGS);
        let config = ChatConfig::new("m");
        config.check().unwrap();
        assert!(!config.environment.0.is_used() && config.environment_row.is_none());
        let word = |word: &str| Some(vec![word.to_string()]);
        let read = ChatConfig::read(&|name| match name {
            "model" | "tools" => word("a.b"),
            // It is no setting, so that its value would not be read.
            "max_environments" => panic!("{name}"),
            "tool_timeout" => word("5"),
            _ => None,
        });
        let environment = read.unwrap().environment.0;
        assert_eq!(
            (environment.tools, environment.tool_timeout, environment.max_environments),
            (vec!["a.b".into()], 5.0, 64)
        );
    }
}
