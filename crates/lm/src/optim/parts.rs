//! AdamW over this rank's parts of a model that is divided over ranks (ZeRO stages 1 to 3).

use super::state::MOMENTS;
use super::{Optim, OptimizerConfig, STATE, STEPS, norm};
use crate::model::{Shards, TrainedPart};
use rlhf_base::offload::{Offload, Offloaded};
use rlhf_base::weights::{self, Checkpoint, TensorSpec};
use rlhf_base::{Error, Result};
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// The parts with their optimizer state.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) shards: Shards,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    trained: TrainedPart,
    /// Both moments, on the host if they are offloaded.
    moments: [Tensor; 2],
}

impl Parts {
    /// Fresh state for the trained parts of a model. With a place to offload to, the state is offloaded between its uses; the state of a model
    /// on a GPU stays in host memory, where the step is then computed.
    pub(super) fn new(shards: &Shards, offload: Option<&Offload>) -> Result<(Self, Option<Offloaded>)> {
        let trained = shards.trained_parts();
        let on_cpu = trained.iter().all(|part| part.params.device() == Device::Cpu);
        let room = |place: &Offload| {
            let sizes = trained.iter().flat_map(|part| [4 * part.params.numel(); 2]);
            place.room(STATE, Device::Cpu, sizes)
        };
        let offloaded = offload.filter(|_| on_cpu).map(room).transpose()?;
        let part = |trained: TrainedPart| {
            let device = if offload.is_some() { Device::Cpu } else { trained.params.device() };
            let zeros = || Tensor::zeros(trained.params.size(), (Kind::Float, device));
            let moments = [zeros(), zeros()];
            offloaded.as_ref().map_or(Ok(()), |offloaded| offloaded.put(&moments))?;
            Ok(Part { trained, moments })
        };
        let parts: Vec<Part> = trained.into_iter().map(part).collect::<Result<_>>()?;
        offloaded.as_ref().map_or(Ok(()), Offloaded::leave)?;
        shards.set_moments(parts.iter().map(|part| part.moments.each_ref().map(Tensor::shallow_clone)));
        Ok((Self { shards: shards.clone(), parts }, offloaded))
    }

    /// Whether the state is on the host while the parameters are not.
    pub(super) fn is_on_host(&self) -> bool {
        self.parts.iter().any(|part| part.moments[0].device() != part.trained.params.device())
    }

    /// The norm of the gradients of all ranks' parts together.
    pub(super) fn grad_norm(&self) -> Result<f64> {
        let mut sum = [norm(&self.shards.grad_parts()?).powi(2)];
        self.shards.world().sum_numbers(&mut sum)?;
        Ok(sum[0].sqrt())
    }

    /// Takes step number `step` with the summed gradients; then gathers the parameters if ranks hold them whole.
    pub(super) fn step(&mut self, lr: f64, config: &OptimizerConfig, step: i64) -> Result<()> {
        if config.optim != Optim::AdamwTorch {
            let name = config.optim.name();
            return Err(Error::refused(
                "optim",
                format!(" = {name}: expected adamw_torch for a state that is sharded"),
            ));
        }
        let grads = self.shards.grad_parts()?;
        for (part, grad) in self.parts.iter_mut().zip(&grads) {
            part.step(lr, config, step, grad).map_err(|e| Error::Run(format!("optimizer step {step}: {e}")))?;
        }
        self.shards.gather_stepped()
    }

    /// Writes the state as [`super::Optimizer::save`] does, one unit at a time; the other ranks send their parts.
    pub(super) fn save(&self, path: &Path, steps: i64) -> Result<()> {
        let spec = |name: String, kind, shape: Vec<i64>| TensorSpec { name, kind, shape };
        let mut specs = vec![spec(STEPS.to_string(), Kind::Double, vec![1])];
        let mut places = vec![None];
        for (index, part) in self.parts.iter().enumerate() {
            for (at, slot) in part.trained.slots.iter().enumerate() {
                for (which, moment) in MOMENTS.iter().enumerate() {
                    specs.push(spec(format!("{}.{moment}", slot.name), Kind::Float, slot.shape.clone()));
                    places.push(Some((index, at, which)));
                }
            }
        }
        let mut whole: Option<(usize, [Tensor; 2])> = None;
        weights::save_file_of(path, &specs, &mut |i| {
            let Some((index, at, which)) = places[i] else { return Ok(Tensor::from_slice(&[steps as f64])) };
            if whole.as_ref().is_none_or(|(gathered, _)| *gathered != index) {
                whole = None;
                whole = Some((index, self.shards.whole_moments(index)?));
            }
            let moments = &whole.as_ref().expect("it was just gathered").1;
            Ok(self.parts[index].trained.slots[at].of(&moments[which]))
        })
    }

    /// Number of tensors of a saved state.
    pub(super) fn num_saved(&self) -> usize {
        1 + 2 * self.parts.iter().map(|part| part.trained.slots.len()).sum::<usize>()
    }

    /// Reads this rank's part of the state in `file`, which is at `path`, a tensor at a time.
    pub(super) fn load(&mut self, file: &Checkpoint, path: &Path) -> Result<()> {
        for part in &mut self.parts {
            let Part { trained, moments, .. } = part;
            let count = trained.params.numel() as i64;
            for (moment, values) in MOMENTS.iter().zip(moments) {
                for slot in &trained.slots {
                    let name = format!("{}.{moment}", slot.name);
                    super::check_shape(file, path, &name, &slot.shape)?;
                    let (from, to) =
                        (slot.start.max(trained.start), (slot.start + slot.len()).min(trained.start + count));
                    if from < to {
                        let tensor = file.read(&name, values.device(), Kind::Float)?.view([-1]);
                        let source = tensor.narrow(0, from - slot.start, to - from);
                        values.narrow(0, from - trained.start, to - from).copy_(&source);
                    }
                }
            }
        }
        Ok(())
    }
}

impl Part {
    fn step(&mut self, lr: f64, config: &OptimizerConfig, step: i64, grad: &Tensor) -> Result<(), String> {
        let Self { trained, moments: [first, second] } = self;
        // Copies only where the optimizer is offloaded from a GPU.
        let params = trained.params.to_device(first.device());
        let grad = grad.to_device(first.device());
        let len = params.numel() as i64;
        let decaying = trained.decaying;
        for (start, len, decay) in [(0, decaying, config.weight_decay), (decaying, len - decaying, 0.0)] {
            if len == 0 {
                continue;
            }
            let slice = |x: &Tensor| [x.narrow(0, start, len)];
            let settings = config.step(lr, decay);
            tch_ext::fused_adamw(
                &mut slice(&params),
                &slice(&grad),
                &mut slice(first),
                &mut slice(second),
                step,
                settings,
            )?;
        }
        if params.device() != trained.params.device() {
            tch::no_grad(|| trained.params.copy_(&params));
        }
        Ok(())
    }
}
