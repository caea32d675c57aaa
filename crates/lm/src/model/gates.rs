//! Gates: an activation of one tensor, times another.

use super::shape::Activation;
use super::uses_kernels;
use tch::Tensor;
use tch_ext::GatedActivation;

/// The activation of `gate`, times `up`.
pub(super) fn gated(activation: Activation, gate: &Tensor, up: &Tensor) -> Tensor {
    if !have_kernel(gate, up) {
        return activation.apply(gate) * up;
    }
    tch_ext::gated(gate, Some(up), kernel_activation(activation))
}

/// Whether a kernel computes a gate times `up`: of the processor, or of a GPU.
fn have_kernel(gate: &Tensor, up: &Tensor) -> bool {
    let (kind, device) = (gate.kind(), gate.device());
    kind == up.kind() && (uses_kernels(kind, device) || tch_ext::has_gpu_kernels(kind, device))
}

/// [`gated`] of the halves of each row of `both` `[N, 2 * width]`: the gate, then up.
pub(super) fn gated_halves(activation: Activation, both: &Tensor) -> Tensor {
    if tch_ext::has_gpu_kernels(both.kind(), both.device()) {
        return tch_ext::gated_halves(both, kernel_activation(activation));
    }
    let parts = both.chunk(2, -1);
    gated(activation, &parts[0], &parts[1])
}

/// The kernels' name of an activation.
fn kernel_activation(activation: Activation) -> GatedActivation {
    match activation {
        Activation::Gelu => GatedActivation::Gelu,
        Activation::GeluTanh => GatedActivation::GeluTanh,
        Activation::Silu => GatedActivation::Silu,
        Activation::Relu => GatedActivation::Relu,
    }
}

/// The heads' outputs `x` times the sigmoid of their gates.
pub(super) fn opened(x: &Tensor, gate: &Tensor) -> Tensor {
    if !have_kernel(gate, x) {
        return x * gate.sigmoid();
    }
    tch_ext::gated(gate, Some(x), GatedActivation::Sigmoid)
}
