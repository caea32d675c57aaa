//! Settings of a run's pushes to the hub.

use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::schema::{Choice, HUB, Setting, Settings, all, expect, refuse};
use rlhf_hub::push::{Destination, Repository};
use rlhf_hub::{Hub, is_branch, is_hub_name};
use serde::Serialize;
use std::fmt;

/// Uploads to the Hugging Face hub.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct HubConfig {
    /// Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
    #[setting(heading = HUB, resume = Free)]
    pub push_to_hub: bool,
    /// Repository to push to, such as me/my-model; created if it does not exist.
    #[setting(alias = "push_to_hub_model_id", heading = HUB, resume = Free)]
    pub hub_model_id: Option<String>,
    /// Branch to push to, created if it does not exist [default: main].
    #[setting(heading = HUB, resume = Free)]
    pub hub_revision: Option<String>,
    /// Whether a new repository is private [default: as its owner has set, usually public].
    #[setting(heading = HUB, alone = "true", resume = Free)]
    pub hub_private_repo: Option<bool>,
    /// When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best model.
    #[setting(heading = HUB, default = "every_save", resume = Free)]
    pub hub_strategy: HubStrategy,
    /// Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
    #[setting(heading = HUB, resume = Free)]
    pub hub_always_push: bool,
    /// Access token with write access [default: HF_TOKEN, which no list of processes shows].
    #[setting(alias = "push_to_hub_token", heading = HUB)]
    #[serde(skip)] // A secret is not written to config.yaml.
    pub hub_token: Option<HubToken>,
}

/// When a run pushes its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HubStrategy {
    /// At the end.
    End,
    /// After each checkpoint, and at the end.
    EverySave,
    /// Each new best model by `metric_for_best_model`; at the end its card too.
    Best,
}

impl Setting for HubStrategy {
    const NAME: &'static str = "NAME";
    const EXPECTED: &'static str = "end, every_save or best; checkpoints are not pushed with their optimizer states";

    fn read(text: &str) -> Option<Self> {
        match text {
            "end" => Some(Self::End),
            "every_save" => Some(Self::EverySave),
            "best" => Some(Self::Best),
            _ => None,
        }
    }

    fn choices() -> Vec<Choice> {
        ["end", "every_save", "best"].map(Choice::new).into()
    }
}

/// An access token of the hub. It is not printed.
#[derive(Clone, PartialEq, Eq)]
pub struct HubToken(pub String);

/// Omits the token.
impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("...")
    }
}

impl Setting for HubToken {
    const NAME: &'static str = "TOKEN";
    const EXPECTED: &'static str = "an access token of the hub";

    fn read(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.into()))
    }
}

impl HubConfig {
    /// Checks every setting of a run whose best model is chosen by this metric.
    pub(crate) fn check(&self, metric_for_best_model: Option<&String>) -> Result<()> {
        let name = |name: &String| {
            expect(is_hub_name(name), name_of!(self.hub_model_id), name, "a name on the hub, such as me/my-model")
        };
        all([
            self.hub_model_id.as_ref().map_or(Ok(()), name),
            check_branch(name_of!(self.hub_revision), self.hub_revision.as_ref()),
            if self.push_to_hub && self.hub_model_id.is_none() {
                refuse(
                    name_of!(self.push_to_hub),
                    " = true needs hub_model_id: the name of a repository, such as me/my-model",
                )
            } else {
                Ok(())
            },
            if self.push_to_hub && self.hub_strategy == HubStrategy::Best && metric_for_best_model.is_none() {
                refuse(
                    name_of!(self.hub_strategy),
                    " = best needs metric_for_best_model: without one there is no best model",
                )
            } else {
                Ok(())
            },
        ])
    }

    /// Returns the place on the hub, if the run pushes.
    pub(crate) fn destination(&self) -> Option<Destination> {
        let name = self.hub_model_id.clone()?;
        let revision = self.hub_revision.clone();
        self.push_to_hub.then_some(Destination { name, revision, private: self.hub_private_repo })
    }

    /// Checks with the hub that the run may push, and creates the repository, if the run pushes.
    ///
    /// # Errors
    /// As [`Hub::repository`].
    pub(crate) fn repository(&self) -> Result<Option<Repository>> {
        let hub = hub_with(self.hub_token.as_ref());
        self.destination().map(|to| hub.repository(&to)).transpose()
    }
}

/// Checks the name of a branch.
pub(crate) fn check_branch(name: &str, branch: Option<&String>) -> Result<()> {
    branch.map_or(Ok(()), |branch| expect(is_branch(branch), name, branch, "a branch of the hub, such as main"))
}

/// Returns the hub of the environment, with this token if there is one.
pub(crate) fn hub_with(token: Option<&HubToken>) -> Hub {
    let hub = Hub::from_env();
    let token = token.map(|token| token.0.clone()).or(hub.token.clone());
    Hub { token, ..hub }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::schema::defaults;

    #[test]
    fn a_push_needs_a_name_and_the_best_model_a_metric() {
        let config = |change: fn(&mut HubConfig)| {
            let mut config = HubConfig { push_to_hub: true, hub_model_id: Some("me/x".into()), ..defaults() };
            change(&mut config);
            config.check(None).map_err(|error| error.to_string())
        };
        assert_eq!(config(|_| ()), Ok(()));
        type Change = fn(&mut HubConfig);
        let cases: [(Change, &str); 5] = [
            (|c| c.hub_model_id = None, "needs hub_model_id"),
            (|c| c.hub_model_id = Some("a/b/c".into()), "hub_model_id = a/b/c: expected a name on the hub"),
            (|c| c.hub_revision = Some("../x".into()), "hub_revision = ../x: expected a branch"),
            (|c| c.hub_revision = Some("0".repeat(40)), "expected a branch"),
            (|c| c.hub_strategy = HubStrategy::Best, "hub_strategy = best needs metric_for_best_model"),
        ];
        for (change, words) in cases {
            let error = config(change).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let unused = HubConfig { hub_strategy: HubStrategy::Best, ..defaults() };
        assert_eq!((unused.check(None).is_ok(), unused.destination()), (true, None), "as in transformers");
    }

    #[test]
    fn a_token_is_neither_shown_nor_written() {
        let config = HubConfig { hub_token: HubToken::read(" hf_secret\n"), ..defaults() };
        assert_eq!(config.hub_token, Some(HubToken("hf_secret".into())));
        let shown = format!("{config:?} {}", serde_json::to_string(&config).unwrap());
        assert!(!shown.contains("hf_secret"), "{shown}");
    }
}
