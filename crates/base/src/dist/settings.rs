//! Settings of runs with several ranks: sharding, and the time limit of collectives.

use serde::{Serialize, Serializer};

use crate::Result;
use crate::schema::{Choice, DIST, Setting, Settings, expect};

/// A stage of ZeRO: the parts of training that are sharded over the ranks, each stage with those of the one before
/// (Rajbhandari et al. 2020).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Nothing: every rank holds everything.
    #[default]
    Stage0,
    /// The optimizer's state and its float32 weights.
    Stage1,
    /// Gradients too.
    Stage2,
    /// Parameters too.
    Stage3,
}

impl ZeroStage {
    /// All stages, by number.
    const ALL: [Self; 4] = [Self::Stage0, Self::Stage1, Self::Stage2, Self::Stage3];

    /// Returns the number of the stage.
    pub fn number(self) -> usize {
        self as usize
    }

    /// Returns whether each rank holds only its share of the optimizer's state.
    pub fn shards_optimizer(self) -> bool {
        self >= Self::Stage1
    }

    /// Returns whether each rank holds only its share of the gradients.
    pub fn shards_gradients(self) -> bool {
        self >= Self::Stage2
    }

    /// Returns whether each rank holds only its share of the parameters.
    pub fn shards_parameters(self) -> bool {
        self >= Self::Stage3
    }
}

impl std::fmt::Display for ZeroStage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.number())
    }
}

impl Serialize for ZeroStage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.number() as u64)
    }
}

impl Setting for ZeroStage {
    const NAME: &'static str = "STAGE";
    const EXPECTED: &'static str = "0, 1, 2 or 3";

    fn read(text: &str) -> Option<Self> {
        let number = usize::read(text)?;
        Self::ALL.get(number).copied()
    }

    fn choices() -> Vec<Choice> {
        ["0", "1", "2", "3"].map(Choice::new).into()
    }
}

/// Settings of a training run with several ranks. They change memory and speed only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Settings)]
pub struct DistConfig {
    /// Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0 nothing.
    #[setting(heading = DIST, default = ZeroStage::Stage0, resume = Free)]
    pub zero_stage: ZeroStage,
    /// Maximum seconds that a rank waits for the others.
    #[setting(alias = "ddp_timeout", heading = DIST, default = 1800, resume = Free)]
    pub dist_timeout: u64,
}

impl DistConfig {
    /// Checks the settings.
    pub fn check(&self) -> Result<()> {
        expect(self.dist_timeout >= 1, "dist_timeout", self.dist_timeout, "at least 1")
    }
}

/// Settings of a PPO run with several ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Settings)]
pub struct PpoDistConfig {
    /// `zero_stage` of the policy and of the reference model [default: `zero_stage`].
    #[setting(heading = DIST, resume = Free)]
    pub actor_zero_stage: Option<ZeroStage>,
    /// `zero_stage` of the value model [default: `zero_stage`].
    #[setting(heading = DIST, resume = Free)]
    pub critic_zero_stage: Option<ZeroStage>,
    /// Gather the policy's whole parameters once for the generation of an update where they are sharded; `false` gathers them
    /// layer by layer for each token, with less memory and more time.
    #[setting(heading = DIST, default = true, resume = Free)]
    pub ds3_gather_for_generation: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::defaults;

    #[test]
    fn each_stage_shards_what_the_one_before_shards_and_one_thing_more() {
        let shards =
            ZeroStage::ALL.map(|stage| [stage.shards_optimizer(), stage.shards_gradients(), stage.shards_parameters()]);
        let expected = [[false; 3], [true, false, false], [true, true, false], [true; 3]];
        assert_eq!(shards, expected);
        for (number, stage) in ZeroStage::ALL.into_iter().enumerate() {
            assert_eq!(ZeroStage::read(&stage.to_string()), Some(stage));
            assert_eq!(serde_json::to_value(stage).unwrap(), number);
        }
        for text in ["4", "-1", "full_shard", ""] {
            assert_eq!(ZeroStage::read(text), None, "{text}");
        }
    }

    #[test]
    fn ranks_wait_for_a_time() {
        let mut config: DistConfig = defaults();
        config.check().unwrap();
        config.dist_timeout = 0;
        assert_eq!(config.check().unwrap_err().to_string(), "dist_timeout = 0: expected at least 1");
    }
}
