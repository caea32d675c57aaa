//! Settings of the parts that are offloaded between the phases that use them.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

use super::Offload;
use crate::Result;
use crate::schema::{Choice, NONE, SPEED, Setting, Settings, all, no_effect, refuse};

/// Parts of a run that are offloaded between the phases that use them.
#[derive(Debug, Clone, PartialEq, Eq, Settings)]
pub struct OffloadConfig {
    /// Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and reward models; all, both.
    /// On the CPU they are in a file of `offload_dir`, with the same results; from a GPU they go to the memory of the host. Less memory,
    /// more time. Without a value: optimizer [default: none].
    #[setting(heading = SPEED, several, alone = "optimizer", resume = Free)]
    pub offload: Vec<OffloadPart>,
    /// Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default: `output_dir`].
    #[setting(heading = SPEED, resume = Free)]
    pub offload_dir: Option<PathBuf>,
    /// `offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the next two.
    #[setting(hide, heading = SPEED)]
    pub offload_optimizer: bool,
    /// `offload = models` by DeepSpeed-Chat's name.
    #[setting(hide, heading = SPEED)]
    pub offload_reference_model: bool,
    /// `offload = models` by DeepSpeed-Chat's name.
    #[setting(hide, heading = SPEED)]
    pub offload_reward_model: bool,
}

impl Serialize for OffloadConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Written<'c> {
            offload: Vec<OffloadPart>,
            offload_dir: &'c Option<PathBuf>,
        }
        Written { offload: self.parts(), offload_dir: &self.offload_dir }.serialize(serializer)
    }
}

/// A part of a run that can be offloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffloadPart {
    /// Nothing.
    None,
    /// The state of optimizers.
    Optimizer,
    /// Models that are not trained: reference and reward models.
    Models,
    /// Both.
    All,
}

impl Display for OffloadPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => NONE,
            Self::Optimizer => "optimizer",
            Self::Models => "models",
            Self::All => "all",
        })
    }
}

impl Serialize for OffloadPart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Setting for OffloadPart {
    const NAME: &'static str = "PART";
    const EXPECTED: &'static str = "optimizer, models, all or none; several are separated by spaces";

    fn read(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            // DeepSpeed-Chat's flag of this name is true or false.
            "none" | "null" | "false" => Some(Self::None),
            "optimizer" | "true" => Some(Self::Optimizer),
            "models" => Some(Self::Models),
            "all" => Some(Self::All),
            _ => None,
        }
    }

    fn choices() -> Vec<Choice> {
        [NONE, "optimizer", "models", "all"].map(Choice::new).into()
    }
}

impl OffloadConfig {
    /// The parts, from the settings of all names.
    fn parts(&self) -> Vec<OffloadPart> {
        let models = self.offload_reference_model || self.offload_reward_model;
        let others = [(self.offload_optimizer, OffloadPart::Optimizer), (models, OffloadPart::Models)];
        let mut parts = self.offload.clone();
        for (_, part) in others.into_iter().filter(|(on, part)| *on && !self.offload.contains(part)) {
            parts.push(part);
        }
        parts
    }

    fn has(&self, part: OffloadPart) -> bool {
        self.parts().iter().any(|setting| [part, OffloadPart::All].contains(setting))
    }

    /// Returns whether the state of optimizers is offloaded.
    pub fn offloads_optimizer(&self) -> bool {
        self.has(OffloadPart::Optimizer)
    }

    /// Returns whether frozen models are offloaded.
    pub fn offloads_models(&self) -> bool {
        self.has(OffloadPart::Models)
    }

    /// Returns the place to which optimizer state is offloaded; `None` if it is not.
    pub fn optimizer_place(&self, output_dir: &Path) -> Option<Offload> {
        self.offloads_optimizer().then(|| self.place(output_dir))
    }

    /// Returns the place to which frozen models are offloaded; `None` if they are not.
    pub fn models_place(&self, output_dir: &Path) -> Option<Offload> {
        self.offloads_models().then(|| self.place(output_dir))
    }

    fn place(&self, output_dir: &Path) -> Offload {
        Offload::to(self.offload_dir.as_deref().unwrap_or(output_dir))
    }

    /// The value as it is written.
    fn shown(&self) -> String {
        self.parts().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    }

    /// Checks the settings.
    pub fn check(&self) -> Result<()> {
        let some = self.offloads_optimizer() || self.offloads_models();
        all([
            if some && self.offload.contains(&OffloadPart::None) {
                refuse("offload", format!(" = {}: expected none alone, or parts without it", self.shown()))
            } else {
                Ok(())
            },
            match &self.offload_dir {
                Some(dir) if !some => no_effect("offload_dir", dir.display(), "without offload"),
                _ => Ok(()),
            },
        ])
    }

    /// Refuses to offload frozen models alone in a run that has none, for the reason `why`.
    pub fn check_models(&self, why: &str) -> Result<()> {
        if self.parts().contains(&OffloadPart::Models) { no_effect("offload", self.shown(), why) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::defaults;

    #[test]
    fn parts_are_named_alone_or_together_and_none_is_alone() {
        let config = |parts: &[&str]| OffloadConfig {
            offload: parts.iter().map(|part| OffloadPart::read(part).unwrap()).collect(),
            ..defaults()
        };
        for (parts, expected) in [
            (&[][..], [false, false]),
            (&["false"], [false, false]),
            (&["true"], [true, false]),
            (&["models"], [false, true]),
            (&["optimizer", "models"], [true, true]),
            (&["all"], [true, true]),
        ] {
            let config = config(parts);
            config.check().unwrap();
            assert_eq!([config.offloads_optimizer(), config.offloads_models()], expected, "{parts:?}");
        }
        // DeepSpeed's names for the parts add to them.
        let both = OffloadConfig { offload_reference_model: true, ..config(&["true"]) };
        assert_eq!(
            serde_json::to_value(&both).unwrap(),
            serde_json::json!({"offload": ["optimizer", "models"], "offload_dir": null})
        );
        let error = |config: OffloadConfig| config.check().unwrap_err().to_string();
        assert_eq!(
            error(config(&["none", "models"])),
            "offload = none models: expected none alone, or parts without it"
        );
        let alone = OffloadConfig { offload_dir: Some("x".into()), ..config(&[]) };
        assert_eq!(error(alone), "offload_dir = x has no effect without offload");
    }
}
