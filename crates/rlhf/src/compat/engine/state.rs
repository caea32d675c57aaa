//! The state from which an interrupted loop continues.

use super::{RlhfEngine, VALUE_MODEL};
use crate::compat::state::{load, save};
use crate::data::{Cursor, CursorState};
use crate::reward::Moments;
use crate::rl::ema::EMA;
use crate::rl::entropy::EntropyState;
use crate::rl::kept::KeptState;
use crate::rl::learner::ScalingState;
use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use tch::Tensor;

/// The kind of loop that [`RlhfEngine::save_state`] writes.
const KIND: &str = "engine";

/// The state of a loop, without weights and optimizers.
#[derive(Debug, Serialize, Deserialize)]
struct EngineState {
    /// Optimizer steps.
    steps: usize,
    /// Batches that were generated.
    generated: usize,
    num_total_iters: Option<usize>,
    /// The last responses that were long enough to train on.
    kept: Option<KeptState>,
    /// The prompts of these responses, and their mask.
    last: Option<[Vec<Vec<i64>>; 2]>,
    /// The place in the prompts, where the engine reads them.
    cursor: Option<CursorState>,
    /// The place in the texts that are mixed in.
    texts: Option<CursorState>,
    /// Running moments by reward.
    rewards: BTreeMap<String, Moments>,
    entropy_controller: Option<EntropyState>,
    loss_scale: Option<ScalingState>,
}

impl RlhfEngine {
    /// Writes the state from which the loop continues to the folder `dir`, by one rename: actor, critic and moving average, their
    /// optimizers, and the counts that learning rates and random draws depend on. Reference and reward models are not in it.
    ///
    /// # Errors
    /// If a `train_rlhf` waits for its `train_unsupervised`; if a file cannot be written, or `dir` holds other files.
    pub fn save_state(&self, dir: &Path) -> Result<()> {
        if self.steps.waiting.is_some() {
            return Err(Error::Usage(
                "save_state: a train_rlhf waits for its train_unsupervised: call that first".into(),
            ));
        }
        let last =
            self.responses.last.as_ref().map(|(prompts, mask)| Ok::<_, Error>([to_rows(prompts)?, to_rows(mask)?]));
        let state = EngineState {
            steps: self.steps.iterations,
            generated: self.responses.generated,
            num_total_iters: self.num_total_iters,
            kept: self.responses.kept.state(),
            last: last.transpose()?,
            cursor: self.data.cursor.as_ref().map(Cursor::state),
            texts: self.learner.unsupervised.as_ref().map(|texts| texts.state()),
            rewards: self.reward.state(),
            entropy_controller: self.learner.entropy_controller.as_ref().map(|controller| controller.state()),
            loss_scale: self.learner.optimizers.scaling.as_ref().map(|scaling| scaling.state()),
        };
        save(&self.learner, dir, (KIND, &state), |dir| self.write_exact(dir))
    }

    /// Continues from the state that [`RlhfEngine::save_state`] wrote to `dir`. The engine must have the settings and the models that the
    /// interrupted engine began with.
    ///
    /// # Errors
    /// If `dir` has no such state, or the state of other models.
    pub fn load_state(&mut self, dir: &Path) -> Result<()> {
        let EngineState {
            steps,
            generated,
            num_total_iters,
            kept,
            last,
            cursor,
            texts,
            rewards,
            entropy_controller,
            loss_scale,
        } = load(&mut self.learner, dir, KIND)?;
        if let Some(ema) = &mut self.learner.ema {
            ema.load(&mut self.learner.policy, |policy| policy.load_trained(&dir.join(EMA)))?;
        }
        if let (Some(position), Some(cursor)) = (&mut self.data.cursor, &cursor) {
            position.load_state(cursor, false)?;
        }
        if let (Some(position), Some(texts)) = (&mut self.learner.unsupervised, &texts) {
            position.load_state(texts, false)?;
        }
        self.reward.load_state(&rewards)?;
        if let (Some(controller), Some(state)) = (&mut self.learner.entropy_controller, entropy_controller) {
            controller.load_state(state)?;
        }
        if let (Some(scaling), Some(state)) = (&mut self.learner.optimizers.scaling, &loss_scale) {
            scaling.load_state(state)?;
        }
        self.responses.kept.load_state(kept, usize::MAX)?;
        self.responses.last = last.map(|[prompts, mask]| (to_tensor(&prompts), to_tensor(&mask)));
        (self.steps.waiting, self.steps.overflow) = (None, (false, false));
        (self.steps.iterations, self.responses.generated) = (steps, generated);
        // The number that this engine was opened with counts: a longer run may need its learning rates.
        self.num_total_iters = self.num_total_iters.or(num_total_iters);
        self.learner.optimizers.is_half_loaded = false;
        Ok(())
    }

    /// Returns true if a [`RlhfEngine::load_state`] has failed after it had begun to change the models.
    pub fn is_half_loaded(&self) -> bool {
        self.learner.optimizers.is_half_loaded
    }

    /// Writes the trained models to the folder of a state, with every bit of them.
    fn write_exact(&self, dir: &Path) -> Result<()> {
        let eos = self.tokenizer.eos_ids();
        let pad = self.tokenizer.pad();
        let write = |dir: &Path| {
            self.learner.policy.save_pretrained(dir, eos, pad, usize::MAX)?;
            self.tokenizer.save_pretrained(dir)
        };
        write(dir)?;
        if let Some(ema) = &self.learner.ema {
            ema.with_exact(&self.learner.policy, |_| write(&dir.join(EMA)))?;
        }
        let Some(critic) = self.learner.value.model() else { return Ok(()) };
        critic.save_pretrained(&dir.join(VALUE_MODEL), eos, pad, usize::MAX)
    }
}

fn to_rows(x: &Tensor) -> Result<Vec<Vec<i64>>> {
    Ok(Vec::try_from(x.to_kind(tch::Kind::Int64))?)
}

fn to_tensor(rows: &[Vec<i64>]) -> Tensor {
    Tensor::from_slice(&rows.concat()).view([rows.len() as i64, -1])
}
