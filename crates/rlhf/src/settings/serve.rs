//! Settings of `rlhf serve`.

use std::path::PathBuf;

use serde::Serialize;

use super::check::check_sizes;
use super::compute::ComputeConfig;
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{
    MODELS, MOST_PORT, MOST_ROWS, MOST_TOKENS, RUN, SAMPLING, SPEED, Settings, all, at_least_one, defaults, expect,
};

/// Settings of `rlhf serve`.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct ServeConfig {
    /// Causal language model: a folder or a hub name.
    #[setting(positional, value_name = "MODEL")]
    pub model: PathBuf,
    /// Branch, tag or commit of `model` on the hub.
    #[setting(heading = MODELS, default = "main")]
    pub model_revision: String,
    /// Address to listen on. Only programs on this machine reach 127.0.0.1; any other address lets others use the model, without a
    /// password.
    #[setting(heading = RUN, default = "127.0.0.1", value_name = "HOST", short = "address to listen on")]
    pub host: String,
    /// TCP port to listen on; 0 is any free one.
    #[setting(heading = RUN, default = 8000, most = MOST_PORT, short = "TCP port; 0 for a free one")]
    pub port: usize,
    /// Maximum tokens of a chat response whose request does not set it.
    #[setting(heading = SAMPLING, default = 1024, most = MOST_TOKENS, short = "maximum tokens of a response")]
    pub max_new_tokens: usize,
    /// Responses decoded together; affects memory and speed only.
    #[setting(heading = SPEED, default = 32, most = MOST_ROWS, short = "sequences per forward pass")]
    pub batch_size: usize,
    /// Computation.
    #[setting(flatten)]
    #[serde(flatten)]
    pub compute: ComputeConfig,
}

impl ServeConfig {
    /// Creates a configuration with every default, for this model.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        let mut config: Self = defaults();
        config.model = model.into();
        config
    }

    /// The port. [`ServeConfig::check`] accepts no number that is not a port.
    pub fn port(&self) -> u16 {
        u16::try_from(self.port).unwrap_or_default()
    }

    /// Checks every setting.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the setting, its value and what was expected.
    pub fn check(&self) -> Result<()> {
        check_sizes(self)?;
        all([
            expect(!self.host.is_empty(), name_of!(self.host), "\"\"", "an address of this machine"),
            at_least_one(name_of!(self.max_new_tokens), self.max_new_tokens),
            at_least_one(name_of!(self.batch_size), self.batch_size),
            self.compute.check(),
        ])
    }
}
