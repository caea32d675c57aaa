//! The state of one parameter, and its step.

use super::adafactor::{self, Squares};
use super::blocks::{BLOCK, Blocks};
use super::rounding::{round, words};
use super::settings::Optim;
use crate::model::{Param, TrainedTensor, uses_kernels};
use rlhf_base::rng::{Purpose, Stream};
use tch::{Device, Kind, Tensor};

/// Ends of the names of both moments in a saved state.
pub(super) const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];
/// Ends of the names of moments in 8 bits: bitsandbytes' names.
const BLOCKS: [&str; 4] = ["state1", "state2", "absmax1", "absmax2"];
/// Ends of the names of Adafactor's moments: transformers' names.
const FACTORED: [&str; 2] = ["exp_avg_sq_row", "exp_avg_sq_col"];
const WHOLE: [&str; 1] = ["exp_avg_sq"];

/// Parameters with fewer elements have moments in f32 even if those of others are in 8 bits, as in bitsandbytes.
const SMALL: i64 = 4096;

/// Number of elements of a parameter whose moments are unpacked to f32 at once: whole blocks. On a CPU they stay in its cache. On a GPU a
/// kernel over so few would take longer to launch than to run; the temporary tensors of 2^23 elements take about a quarter of a GiB.
const AT_ONCE: i64 = 256 * BLOCK;
const AT_ONCE_ON_GPU: i64 = AT_ONCE << 7;

/// The form of a parameter's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Moments,
    Blocks,
    Rounded,
    Squares,
}

impl Form {
    fn of(optim: Optim, tensor: &TrainedTensor) -> Self {
        let is_small = tensor.shape.iter().product::<i64>() < SMALL;
        match optim {
            // Embeddings in f32, as in transformers' Trainer: the rows of rare tokens have few steps.
            Optim::Adamw8bit if !is_small && !tensor.is_embedding => Self::Blocks,
            Optim::AdamwBf16 if tensor.kind == Kind::BFloat16 => Self::Rounded,
            Optim::Adafactor => Self::Squares,
            Optim::AdamwTorch | Optim::Adamw8bit | Optim::AdamwBf16 => Self::Moments,
        }
    }
}

/// Bytes of the state of a parameter.
pub fn state_bytes(optim: Optim, tensor: &TrainedTensor) -> usize {
    let numel = tensor.shape.iter().product::<i64>() as usize;
    match Form::of(optim, tensor) {
        Form::Moments => 8 * numel,
        Form::Blocks => 2 * (numel + 4 * numel.div_ceil(BLOCK as usize)),
        Form::Rounded => 4 * numel,
        Form::Squares => 4 * adafactor::num_moments(&tensor.shape),
    }
}

/// Sizes in bytes whose sum is at least that of the tensors of a parameter's state.
pub(super) fn sizes(optim: Optim, param: &Param) -> impl Iterator<Item = usize> + use<> {
    // Each of up to four tensors begins at a round address.
    const ROUNDING: [usize; 4] = [1; 4];
    std::iter::once(state_bytes(optim, &described(param))).chain(ROUNDING)
}

fn described(param: &Param) -> TrainedTensor {
    TrainedTensor { shape: param.tensor.size(), kind: param.tensor.kind(), is_embedding: param.embedding }
}

/// An optimizer step of one parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// Number of the step, from 1.
    pub(super) number: i64,
    /// Learning rate, betas, epsilon and weight decay.
    pub(super) settings: tch_ext::AdamW,
    /// Seed of the run, and the parameter's index in the optimizer: with the step's number they are the key of random numbers.
    pub(super) seed: u64,
    pub(super) index: usize,
}

/// The optimizer state of one parameter.
#[derive(Debug)]
pub(super) enum State {
    /// Both moments of AdamW, f32, in the parameter's shape.
    Moments([Tensor; 2]),
    /// The same in 8 bits.
    Blocks([Blocks; 2]),
    /// Both moments of AdamW in bf16, in the shape of a parameter in bf16.
    Rounded([Tensor; 2]),
    /// Adafactor's second moments.
    Squares(Squares),
}

impl State {
    /// Fresh state of a parameter.
    pub(super) fn new(param: &Param, optim: Optim) -> Self {
        let tensor = &param.tensor;
        let zeros = |kind| Tensor::zeros(tensor.size(), (kind, tensor.device()));
        match Form::of(optim, &described(param)) {
            Form::Moments => Self::Moments([zeros(Kind::Float), zeros(Kind::Float)]),
            Form::Rounded => Self::Rounded([zeros(Kind::BFloat16), zeros(Kind::BFloat16)]),
            Form::Blocks => Self::Blocks([true, false].map(|signed| Blocks::zeros_like(tensor, signed))),
            Form::Squares => Self::Squares(Squares::new(tensor)),
        }
    }

    /// The tensors of the state, with the ends of their names in a saved state.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let tensors: Vec<(&'static str, &Tensor)> = match self {
            Self::Moments(moments) | Self::Rounded(moments) => MOMENTS.into_iter().zip(moments).collect(),
            Self::Blocks([first, second]) => {
                BLOCKS.into_iter().zip([&first.codes, &second.codes, &first.absmax, &second.absmax]).collect()
            }
            Self::Squares(Squares::Factored(moments)) => FACTORED.into_iter().zip(moments).collect(),
            Self::Squares(Squares::Whole(moments)) => WHOLE.into_iter().zip(moments).collect(),
        };
        tensors.into_iter()
    }

    /// Changes the parameter and the state by the gradient, which is undefined afterwards. AdamW with moments in f32 is left to
    /// `together`.
    ///
    /// # Errors
    /// If libtorch refuses the step.
    pub(super) fn step(
        &mut self,
        param: &Tensor,
        grad: Tensor,
        step: Step,
        together: &mut Together,
    ) -> Result<(), String> {
        match self {
            Self::Moments(moments) => {
                together.add(param, grad, moments.each_ref());
                Ok(())
            }
            Self::Blocks(moments) => {
                let (mut param, grad) = (param.detach().view([-1]), grad.reshape([-1]));
                if !steps_by_kernels(Kind::Float, param.device()) {
                    return adamw_blocked(&param, &grad, moments, step);
                }
                let moments = moments.each_mut().map(Blocks::as_moment);
                tch_ext::adamw_blocked(&mut param, &grad, moments, step.number, step.settings)
            }
            Self::Rounded(moments) => {
                let (mut param, grad) = (param.detach().view([-1]), grad.reshape([-1]));
                let mut stream = Stream::new(step.seed, Purpose::Rounding, step.number as u64, step.index as u64);
                let keys = [(); 3].map(|()| stream.bits());
                if !steps_by_kernels(Kind::BFloat16, param.device()) {
                    return adamw_rounded(&param, &grad, moments, keys, step);
                }
                tch_ext::adamw_rounded(&mut param, &grad, moments.each_mut(), keys, step.number, step.settings)
            }
            Self::Squares(squares) => {
                squares.step(param, &grad, step.number, step.settings);
                Ok(())
            }
        }
    }
}

/// Whether kernels take the steps of parameters in this dtype on this device.
fn steps_by_kernels(kind: Kind, device: Device) -> bool {
    uses_kernels(kind, device) || tch_ext::has_gpu_kernels(kind, device)
}

/// Parameters that take PyTorch's step of AdamW in one call: on a GPU, in one kernel for all of them.
#[derive(Debug, Default)]
pub(super) struct Together {
    params: Vec<Tensor>,
    grads: Vec<Tensor>,
    moments: [Vec<Tensor>; 2],
}

impl Together {
    fn add(&mut self, param: &Tensor, grad: Tensor, moments: [&Tensor; 2]) {
        self.params.push(param.shallow_clone());
        self.grads.push(grad);
        for (all, moment) in self.moments.iter_mut().zip(moments) {
            all.push(moment.shallow_clone());
        }
    }

    /// Takes step number `number`, from 1, in place.
    ///
    /// # Errors
    /// If libtorch refuses the step.
    pub(super) fn step(mut self, number: i64, settings: tch_ext::AdamW) -> Result<(), String> {
        let [first, second] = &mut self.moments;
        tch_ext::fused_adamw(&mut self.params, &self.grads, first, second, number, settings)
    }
}

/// PyTorch's step of AdamW of one tensor, in place.
fn adamw(param: &Tensor, grad: Tensor, moments: [&Tensor; 2], step: Step) -> Result<(), String> {
    let mut alone = Together::default();
    alone.add(param, grad, moments);
    alone.step(step.number, step.settings)
}

/// [`tch_ext::adamw_blocked`] by libtorch's operations.
fn adamw_blocked(param: &Tensor, grad: &Tensor, moments: &[Blocks; 2], step: Step) -> Result<(), String> {
    for (from, len) in chunks(param) {
        let part = |x: &Tensor| x.narrow(0, from, len);
        let [first, second] = moments.each_ref().map(|moments| moments.read(from, len));
        adamw(&part(param), part(grad), [&first, &second], step)?;
        moments.iter().zip([first, second]).for_each(|(moments, new)| moments.write(from, &new));
    }
    Ok(())
}

/// [`tch_ext::adamw_rounded`] by libtorch's operations.
fn adamw_rounded(
    param: &Tensor,
    grad: &Tensor,
    moments: &[Tensor; 2],
    keys: [u64; 3],
    step: Step,
) -> Result<(), String> {
    for (from, len) in chunks(param) {
        let part = |x: &Tensor| x.view([-1]).narrow(0, from, len);
        let wide = |x: &Tensor| part(x).to_kind(Kind::Float);
        let [first, second] = moments.each_ref().map(wide);
        let new = wide(param);
        adamw(&new, wide(grad), [&first, &second], step)?;
        let old = [param, &moments[0], &moments[1]];
        for (key, (old, new)) in keys.into_iter().zip(old.into_iter().zip([new, first, second])) {
            part(old).copy_(&round(&new, &words(key, from, len, param.device())));
        }
    }
    Ok(())
}

/// Start and length of each part of `flat` that is computed at once.
fn chunks(flat: &Tensor) -> impl Iterator<Item = (i64, i64)> + use<> {
    let len = flat.numel() as i64;
    let at_once = if flat.device() == Device::Cpu { AT_ONCE } else { AT_ONCE_ON_GPU };
    (0..len).step_by(at_once as usize).map(move |from| (from, at_once.min(len - from)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: tch_ext::AdamW = tch_ext::AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-8 };

    /// More than a part of a CPU, and no multiple of a block.
    const LEN: i64 = AT_ONCE + 1001;

    fn waves(frequency: f64) -> Tensor {
        (Tensor::arange(LEN, (Kind::Float, Device::Cpu)) * frequency).sin()
    }

    /// Share of the elements that are the same.
    fn same(a: &Tensor, b: &Tensor) -> f64 {
        a.eq_tensor(b).to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
    }

    #[test]
    fn steps_by_kernels_and_by_libtorchs_operations_are_the_same_up_to_rounding() {
        // libtorch fuses products and sums, so a number close to a border may fall on its other side.
        const MOST: f64 = 0.9999;
        let mut params = [waves(0.37), waves(0.37)];
        let mut blocks = [(); 2].map(|()| [true, false].map(|signed| Blocks::zeros_like(&params[0], signed)));
        let mut bf16 = [(); 2].map(|()| [waves(0.2), waves(0.0), waves(0.0)].map(|x| x.to_kind(Kind::BFloat16)));
        for number in 1..4 {
            let step = Step { number, settings: SETTINGS, seed: 0, index: 0 };
            let grad = waves(0.11 * number as f64);
            adamw_blocked(&params[0], &grad, &blocks[0], step).unwrap();
            let moments = blocks[1].each_mut().map(Blocks::as_moment);
            tch_ext::adamw_blocked(&mut params[1], &grad, moments, number, SETTINGS).unwrap();
            assert!(params[0].allclose(&params[1], 1e-4, 1e-5, false), "step {number}");
            let [plain, fused] = &blocks;
            for (plain, fused) in plain.iter().zip(fused) {
                assert!(same(&plain.codes, &fused.codes) > MOST, "step {number}");
                assert!(plain.absmax.allclose(&fused.absmax, 1e-5, 0.0, false), "step {number}");
            }

            let (grad, keys) = (grad.to_kind(Kind::BFloat16), [1, 2, 3]);
            let [[plain, plain_first, plain_second], [fused, first, second]] = &mut bf16;
            let moments = [plain_first.shallow_clone(), plain_second.shallow_clone()];
            adamw_rounded(plain, &grad, &moments, keys, step).unwrap();
            tch_ext::adamw_rounded(fused, &grad, [first, second], keys, number, SETTINGS).unwrap();
            assert!(bf16[0].iter().zip(&bf16[1]).all(|(a, b)| same(a, b) > 0.999), "step {number}");
        }
    }
}
