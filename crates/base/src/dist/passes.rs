//! Passes of sharded models: forward and backward passes that contain collectives, of which ranks run different numbers.
//!
//! A rank announces each such pass. A rank that calls another collective, or announces another pass, first takes part in the
//! announced ones: it gathers parameters and reduces gradients of zero, in the same order. So a loop over this rank's rows needs
//! no care for how many rows the other ranks have.

use super::{World, ZeroStage, lock};
use crate::Result;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Weak};
use tch::Tensor;

/// A model whose passes contain collectives.
pub trait Sharded: Debug + Send + Sync {
    /// Takes part in the pass that another rank has announced as `code`; `None` if it is a pass of another model.
    fn take_part(&self, code: u64) -> Option<Result<()>>;
}

/// The sharded models of a world.
#[derive(Debug, Default)]
pub(super) struct Models {
    /// The next number of [`World::next_id`].
    next_id: AtomicU64,
    /// Whether there has been one, or will be. It stays true when all are gone, as ranks drop models at different times.
    any: AtomicBool,
    models: Mutex<Vec<Weak<dyn Sharded>>>,
}

impl World {
    /// A number for a model that all ranks shard at the same point: the same on every rank, and used once.
    pub fn next_id(&self) -> u64 {
        self.ranks.as_ref().map_or(0, |ranks| ranks.models.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Declares that the run has sharded models if it has one of this stage, on all ranks before one of them loads a model: ranks of which
    /// one cannot load its model then call the same collectives.
    pub fn expect_sharded(&self, stage: ZeroStage) {
        if let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.size > 1 && stage.shards_gradients()) {
            ranks.models.any.store(true, Ordering::SeqCst);
        }
    }

    /// Adds a model whose passes contain collectives; all ranks add it at the same point.
    pub fn add_sharded(&self, model: Weak<dyn Sharded>) {
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.size > 1) else { return };
        let mut models = lock(&ranks.models.models);
        models.retain(|model| model.strong_count() > 0);
        models.push(model);
        ranks.models.any.store(true, Ordering::SeqCst);
    }

    /// The same ranks, for the collectives of a pass that is announced.
    pub fn inside_pass(&self) -> Self {
        Self { inside_pass: true, ..self.clone() }
    }

    /// Announces a pass by its number, above 0, and takes part in passes of other ranks until all run this one.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn announce_pass(&self, code: u64) -> Result<()> {
        let Some(ranks) = self.ranks.as_ref().filter(|ranks| ranks.models.any.load(Ordering::SeqCst)) else {
            return Ok(());
        };
        let world = self.inside_pass();
        loop {
            let mut largest = Tensor::from_slice(&[code as i64]);
            world.max(&mut largest)?;
            let announced = largest.int64_value(&[0]) as u64;
            if announced == code {
                return Ok(());
            }
            // Not locked while it takes part.
            let models: Vec<_> = lock(&ranks.models.models).iter().filter_map(Weak::upgrade).collect();
            let done = models.iter().find_map(|model| model.take_part(announced));
            done.unwrap_or_else(|| {
                let message =
                    format!("a pass of a sharded model that this rank does not have (number {announced}): a bug");
                Err(crate::Error::Run(message))
            })?;
        }
    }

    /// Takes part in the passes of sharded models that other ranks still run. Every collective outside a pass begins with this.
    ///
    /// # Errors
    /// As [`World::sum`].
    pub fn finish_passes(&self) -> Result<()> {
        if self.inside_pass { Ok(()) } else { self.announce_pass(0) }
    }
}
