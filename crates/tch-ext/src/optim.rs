//! Optimizer steps in one pass over memory.

use crate::into_result;
use std::ffi::c_char;
use tch::Tensor;
use torch_sys::C_tensor;

#[repr(C)]
struct RawAdamW {
    step: i64,
    lr: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
    eps: f64,
}

#[repr(C)]
struct RawBlockedMoment {
    codes: *const C_tensor,
    absmax: *const C_tensor,
    map: *const C_tensor,
    middles: *const C_tensor,
    least_codes: *const C_tensor,
}

unsafe extern "C" {
    fn tch_ext_fused_adamw(
        params: *const *mut C_tensor,
        grads: *const *mut C_tensor,
        exp_avgs: *const *mut C_tensor,
        exp_avg_sqs: *const *mut C_tensor,
        count: usize,
        settings: *const RawAdamW,
    ) -> *mut c_char;
    fn tch_ext_adamw_blocked(
        param: *const C_tensor,
        grad: *const C_tensor,
        first: *const RawBlockedMoment,
        second: *const RawBlockedMoment,
        settings: *const RawAdamW,
    ) -> *mut c_char;
    fn tch_ext_adamw_rounded(
        param: *const C_tensor,
        grad: *const C_tensor,
        first: *const C_tensor,
        second: *const C_tensor,
        keys: *const u64,
        settings: *const RawAdamW,
    ) -> *mut c_char;
}

/// Settings of one AdamW step, with PyTorch's names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Decoupled weight decay, relative to `lr`.
    pub weight_decay: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
}

impl AdamW {
    fn raw(self, step: i64) -> RawAdamW {
        let Self { lr, beta1, beta2, weight_decay, eps } = self;
        RawAdamW { step, lr, beta1, beta2, weight_decay, eps }
    }
}

/// Updates `params` in place by one AdamW step. `step` counts from 1 and determines the bias correction.
///
/// The four lists have one tensor per parameter, of its shape; all are f32 and on one device. Calls PyTorch's
/// `_fused_adamw_`, which makes one pass over memory. Source: Loshchilov & Hutter 2019, algorithm 2.
///
/// # Errors
/// If the lists differ in length, or a parameter and its gradient or moments in shape, dtype, device or contiguity.
pub fn fused_adamw(
    params: &mut [Tensor],
    grads: &[Tensor],
    exp_avgs: &mut [Tensor],
    exp_avg_sqs: &mut [Tensor],
    step: i64,
    settings: AdamW,
) -> Result<(), String> {
    let count = params.len();
    // libtorch's CPU kernel does not check its arguments: it would read past the end of a short list or a small tensor.
    for (name, companions) in [("grads", grads), ("exp_avgs", &*exp_avgs), ("exp_avg_sqs", &*exp_avg_sqs)] {
        if companions.len() != count {
            return Err(format!("fused_adamw: {count} params, {} {name}", companions.len()));
        }
        for (i, (param, companion)) in params.iter().zip(companions).enumerate() {
            let same = param.size() == companion.size()
                && (param.kind(), param.device()) == (companion.kind(), companion.device())
                && param.is_contiguous()
                && companion.is_contiguous();
            if !same {
                return Err(format!("fused_adamw: params[{i}] is {param:?}, {name}[{i}] is {companion:?}"));
            }
        }
    }
    let pointers = |tensors: &[Tensor]| tensors.iter().map(|t| t.as_ptr().cast_mut()).collect::<Vec<_>>();
    let (p, g, m, v) = (pointers(params), pointers(grads), pointers(exp_avgs), pointers(exp_avg_sqs));
    // SAFETY: each vector holds `count` pointers to live tensors that this call borrows. The shim copies the handles,
    // keeps none after it returns, and writes only to `p`, `m` and `v`, which are borrowed mutably.
    into_result(unsafe {
        tch_ext_fused_adamw(p.as_ptr(), g.as_ptr(), m.as_ptr(), v.as_ptr(), count, &settings.raw(step))
    })
}

/// A moment in 8 bits: the value of a code is its entry in a map times the greatest magnitude of its block of 256 values.
///
/// All tensors are contiguous and on the CPU.
#[derive(Debug)]
pub struct BlockedMoment<'a> {
    /// u8, one for each value.
    pub codes: &'a mut Tensor,
    /// f32, one for each block; the last block may be shorter.
    pub absmax: &'a mut Tensor,
    /// The values of all codes, f32 `[256]`, ascending.
    pub map: &'a Tensor,
    /// The middles between neighbours of the map, then infinity, f32 `[256]`.
    pub middles: &'a Tensor,
    /// Number of middles below the least f32 with the same upper 16 bits, by those bits, u8 `[65536]`. The code of a number is this or the
    /// next.
    pub least_codes: &'a Tensor,
}

impl BlockedMoment<'_> {
    fn raw(&self) -> RawBlockedMoment {
        RawBlockedMoment {
            codes: self.codes.as_ptr(),
            absmax: self.absmax.as_ptr(),
            map: self.map.as_ptr(),
            middles: self.middles.as_ptr(),
            least_codes: self.least_codes.as_ptr(),
        }
    }
}

/// [`fused_adamw`] of one parameter whose moments are in 8 bits; `param` and `grad` are f32, on the CPU. The results have the same bits on
/// every processor.
///
/// # Errors
/// If the tensors do not fit together.
pub fn adamw_blocked(
    param: &mut Tensor,
    grad: &Tensor,
    [first, second]: [BlockedMoment<'_>; 2],
    step: i64,
    settings: AdamW,
) -> Result<(), String> {
    // SAFETY: pointers to borrowed tensors, of which those that are written to are borrowed mutably; the shim checks dtypes, devices and
    // numbers of elements, and all 256 values of a code are in the map.
    into_result(unsafe {
        tch_ext_adamw_blocked(param.as_mut_ptr(), grad.as_ptr(), &first.raw(), &second.raw(), &settings.raw(step))
    })
}

/// [`fused_adamw`] of one parameter in bf16 with moments in bf16, on the CPU: computed in f32, then parameter, first and second moment are
/// each rounded to one of the neighbours in bf16 of each number, at random.
///
/// The carry into the upper 16 bits of number `i` comes from adding to the lower ones word `i` of the generator SplitMix64 that begins with
/// the tensor's key, of whose numbers each is four words, the low bits first.
///
/// # Errors
/// If the tensors do not fit together.
pub fn adamw_rounded(
    param: &mut Tensor,
    grad: &Tensor,
    [first, second]: [&mut Tensor; 2],
    keys: [u64; 3],
    step: i64,
    settings: AdamW,
) -> Result<(), String> {
    // SAFETY: as in `adamw_blocked`; there are three keys.
    into_result(unsafe {
        tch_ext_adamw_rounded(
            param.as_mut_ptr(),
            grad.as_ptr(),
            first.as_mut_ptr(),
            second.as_mut_ptr(),
            keys.as_ptr(),
            &settings.raw(step),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    /// Compares with algorithm 2 of the paper, computed in f64.
    #[test]
    fn two_steps_of_adamw_follow_the_paper() {
        let settings = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, weight_decay: 0.1, eps: 1e-8 };
        let mut params = vec![Tensor::from_slice(&[1.0f32, -2.0, 0.5])];
        let zeros = || vec![Tensor::zeros([3], (Kind::Float, Device::Cpu))];
        let (mut m, mut v) = (zeros(), zeros());
        let gradients = [[0.3f64, -1.0, 2.0], [-0.2, 0.4, 2.0]];
        let (mut p64, mut m64, mut v64) = ([1.0f64, -2.0, 0.5], [0.0f64; 3], [0.0f64; 3]);
        for (i, gradient) in gradients.iter().enumerate() {
            let step = i as i32 + 1;
            for k in 0..3 {
                let g = gradient[k];
                m64[k] = 0.9 * m64[k] + 0.1 * g;
                v64[k] = 0.999 * v64[k] + 0.001 * g * g;
                let (m_hat, v_hat) = (m64[k] / (1.0 - 0.9f64.powi(step)), v64[k] / (1.0 - 0.999f64.powi(step)));
                p64[k] -= 1e-2 * 0.1 * p64[k];
                p64[k] -= 1e-2 * m_hat / (v_hat.sqrt() + 1e-8);
            }
            let grads = vec![Tensor::from_slice(gradient).to_kind(Kind::Float)];
            let version = params[0].internal_version();
            fused_adamw(&mut params, &grads, &mut m, &mut v, i64::from(step), settings).unwrap();
            assert!(
                params[0].internal_version() > version,
                "the version counter must change, so that cached copies are detected as stale"
            );
        }
        let found = Vec::<f64>::try_from(params[0].to_kind(Kind::Double)).unwrap();
        for (found, expected) in found.iter().zip(p64) {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn a_shape_mismatch_is_an_error_and_not_a_crash() {
        let f = |n| vec![Tensor::zeros([n], (Kind::Float, Device::Cpu))];
        let settings = AdamW { lr: 1.0, beta1: 0.9, beta2: 0.999, weight_decay: 0.0, eps: 1e-8 };
        assert!(fused_adamw(&mut f(3), &f(2), &mut f(3), &mut f(3), 1, settings).is_err());
    }
}
