//! The state from which an interrupted loop continues.

use super::{RlhfEngine, VALUE_MODEL};
use crate::compat::state::{count, load, save};
use crate::rl::ema::EMA;
use rlhf_base::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;
use tch::Tensor;

/// The kind of loop that [`RlhfEngine::save_state`] writes.
const KIND: &str = "engine";

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
            self.responses.last.as_ref().map(|(prompts, mask)| Ok::<_, Error>((rows_of(prompts)?, rows_of(mask)?)));
        let last = last.transpose()?;
        let state = json!({
            "kind": KIND,
            "version": env!("CARGO_PKG_VERSION"),
            "steps": self.steps.iterations,
            "generated": self.responses.generated,
            "num_total_iters": self.num_total_iters,
            "kept": self.responses.kept.state(),
            "last": last,
            "cursor": self.data.cursor.as_ref().map(|cursor| cursor.state()),
            "texts": self.learner.unsupervised.as_ref().map(|texts| texts.state()),
            "rewards": self.reward.state(),
            "entropy_controller": self.learner.entropy_controller.as_ref().map(|controller| controller.state()),
            "loss_scale": self.learner.optimizers.scaling.as_ref().map(|scaling| scaling.state()),
            "micro_batch_tokens": self.learner.micro_batch_tokens,
        });
        save(&self.learner, dir, &state, |dir| self.write_exact(dir))
    }

    /// Continues from the state that [`RlhfEngine::save_state`] wrote to `dir`. The engine has the settings and the models that the
    /// interrupted one began with.
    ///
    /// # Errors
    /// If `dir` has no such state, or the state of other models.
    pub fn load_state(&mut self, dir: &Path) -> Result<()> {
        let state = load(&mut self.learner, dir, KIND)?;
        if let Some(ema) = &mut self.learner.ema {
            ema.load(&mut self.learner.policy, |policy| policy.load_trained(&dir.join(EMA)))?;
        }
        if let Some(cursor) = self.data.cursor.as_mut().filter(|_| !state["cursor"].is_null()) {
            cursor.load_state(&state["cursor"])?;
        }
        if let Some(texts) = self.learner.unsupervised.as_mut().filter(|_| !state["texts"].is_null()) {
            texts.load_state(&state["texts"], false)?;
        }
        if !state["rewards"].is_null() {
            self.reward.load_state(&state["rewards"])?;
        }
        let controller = self.learner.entropy_controller.as_mut();
        if let Some(controller) = controller.filter(|_| !state["entropy_controller"].is_null()) {
            controller.load_state(&state["entropy_controller"])?;
        }
        if let Some(scaling) = self.learner.optimizers.scaling.as_mut().filter(|_| !state["loss_scale"].is_null()) {
            scaling.load_state(&state["loss_scale"])?;
        }
        self.responses.kept.load_state(Some(&state["kept"]).filter(|kept| !kept.is_null()), usize::MAX)?;
        self.responses.last = last_of(&state["last"]).map_err(|e| Error::invalid(dir, format!("`last`: {e}")))?;
        (self.steps.waiting, self.steps.overflow) = (None, (false, false));
        let number = |name| count(&state, name).map(|number| number as usize);
        (self.steps.iterations, self.responses.generated) =
            (number("steps").unwrap_or(0), number("generated").unwrap_or(0));
        // The one that the engine was opened with counts: the learning rates of a longer run may be wanted.
        self.num_total_iters = self.num_total_iters.or(number("num_total_iters"));
        self.learner.optimizers.is_half_loaded = false;
        Ok(())
    }

    /// Returns true if a [`RlhfEngine::load_state`] has failed after it had begun to change the models.
    pub fn is_half_loaded(&self) -> bool {
        self.learner.optimizers.is_half_loaded
    }

    /// Writes the trained models to the folder of a state, with every bit of them.
    fn write_exact(&self, dir: &Path) -> Result<()> {
        let (eos, pad) = (self.tokenizer.eos_ids(), self.tokenizer.pad());
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

fn rows_of(x: &Tensor) -> Result<Vec<Vec<i64>>> {
    Ok(Vec::try_from(x.to_kind(tch::Kind::Int64))?)
}

/// The last prompts that were long enough, with their mask, as a state has them.
fn last_of(state: &Value) -> serde_json::Result<Option<(Tensor, Tensor)>> {
    let last: Option<[Vec<Vec<i64>>; 2]> = serde_json::from_value(state.clone())?;
    Ok(last.map(|[prompts, mask]| (tensor_of(&prompts), tensor_of(&mask))))
}

fn tensor_of(rows: &[Vec<i64>]) -> Tensor {
    Tensor::from_slice(&rows.concat()).view([rows.len() as i64, -1])
}
