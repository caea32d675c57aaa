//! Compares the results of kernels with those of libtorch's operations: before the kernels are used on a GPU, and in tests.

use super::{
    CachePlaces, CachedRows, GatedActivation, ThreadOrder, attention_of_step, emulate, gated, gated_halves,
    limit_blocks, logits_sample_on_device, rotate_cached, sum_norm,
};
use crate::shared::attention_along_paths;
use crate::{
    AdamW, BlockedMoment, NestedScales, Norm, PackedRows, PrefixTree, Quantized, adamw_blocked, adamw_rounded,
    dequantize, has_flash_attention, logits_gradient, logits_stats, multiplies_quantized, norm, quantized_linear,
    residual, rotate, shared_attention,
};
use tch::{Device, Kind, Tensor};

/// Largest difference of results in f32 from those in f64.
const CLOSE: f64 = 3e-5;

/// Largest relative difference that rounding to bf16 makes.
const ROUNDING: f64 = 1.0 / 256.0;

type Checked = Result<(), String>;

/// Compares every kernel with libtorch's operations on tensors of `device`: first small ones, whose sizes and addresses are or are not multiples
/// of a pack, then ones large enough that every loop of a kernel has a second round. On the processor the kernels are emulated.
///
/// # Errors
/// The first kernel whose numbers differ by more than rounding.
///
/// # Panics
/// If a kernel cannot be started.
pub fn check_gpu_kernels(device: Device) -> Result<(), String> {
    let check = Check { device, order: ThreadOrder::UpAndDown, is_apart: false, most_blocks: 0 };
    check.small(&[Kind::Float, Kind::BFloat16])?;
    Check { is_apart: true, most_blocks: 2, ..check }.small(&[Kind::BFloat16])?;
    check.prefixes([4, 2, 64])?;
    check.prefixes([2, 2, 16])?;
    check.large()
}

/// As [`check_gpu_kernels`] for small tensors only, by emulated kernels whose threads run in this order: a missing barrier shows in some order.
///
/// # Errors
/// As [`check_gpu_kernels`].
///
/// # Panics
/// As [`check_gpu_kernels`].
pub fn check_gpu_kernels_in(order: ThreadOrder) -> Result<(), String> {
    Check { device: Device::Cpu, order, is_apart: true, most_blocks: 2 }.small(&[Kind::BFloat16])
}

#[derive(Clone, Copy)]
struct Check {
    device: Device,
    order: ThreadOrder,
    /// Whether tensors begin between multiples of 16 bytes.
    is_apart: bool,
    /// The most blocks that divided work is spread over; 0: as many as suit the work.
    most_blocks: i64,
}

/// Ends the emulation and the limit of blocks, also if a kernel panics.
struct Started {
    is_emulated: bool,
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.is_emulated {
            emulate(None);
        }
        limit_blocks(0);
    }
}

/// Numbers from -1 to 1 in this shape, in f32 on the processor.
fn waves(shape: &[i64], frequency: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, (Kind::Float, Device::Cpu)) * frequency + frequency).sin().view(shape)
}

fn expect_close(what: &str, found: &Tensor, expected: &Tensor, [absolute, relative]: [f64; 2]) -> Checked {
    let found = found.to_device(Device::Cpu).to_kind(Kind::Double);
    let expected = expected.to_device(Device::Cpu).to_kind(Kind::Double);
    if found.size() != expected.size() {
        return Err(format!("{what}: expected {:?}, found {:?}", expected.size(), found.size()));
    }
    let excess = (&found - &expected).abs() - expected.abs() * relative;
    let gap = if excess.numel() == 0 { 0.0 } else { excess.max().double_value(&[]) };
    if gap <= absolute { Ok(()) } else { Err(format!("{what}: numbers differ by {gap:.2e}, allowed {absolute:.0e}")) }
}

/// The tolerance of numbers of this dtype.
fn tolerance(kind: Kind) -> [f64; 2] {
    [CLOSE, if kind == Kind::BFloat16 { ROUNDING } else { CLOSE }]
}

impl Check {
    /// `x` on the device in `kind`.
    fn on(self, x: &Tensor, kind: Kind) -> Tensor {
        x.to_kind(kind).to_device(self.device)
    }

    /// The tolerance between kernels that compute the same numbers in the same way: none on the processor; a GPU's compiler may fuse different
    /// multiply-adds.
    fn same(self, kind: Kind) -> [f64; 2] {
        if self.device == Device::Cpu { [0.0, 0.0] } else { tolerance(kind) }
    }

    /// A copy of `x` on the device.
    fn placed(self, x: &Tensor) -> Tensor {
        let x = x.to_device(self.device);
        if !self.is_apart {
            return x.copy();
        }
        let count = x.numel() as i64;
        let mut apart =
            Tensor::zeros([count + 1], (x.kind(), self.device)).narrow(0, 1, count).view(x.size().as_slice());
        apart.copy_(&x);
        apart
    }

    /// The result of `work`, computed by the kernels.
    fn kernels<T>(self, work: impl FnOnce() -> T) -> T {
        let _started = Started { is_emulated: self.device == Device::Cpu };
        limit_blocks(self.most_blocks);
        if self.device == Device::Cpu {
            emulate(Some(self.order));
        }
        work()
    }

    fn small(self, kinds: &[Kind]) -> Checked {
        for &kind in kinds {
            // With packs of numbers, and one by one.
            for vocab in [1000, 1003] {
                self.logits(kind, vocab)?;
            }
            for (head_dim, half, parts) in [(64, 32, 1), (16, 4, 2), (20, 3, 1)] {
                self.rotary(kind, [head_dim, half, parts])?;
                self.cached(kind, [head_dim, half])?;
            }
            self.cached(kind, [16, 0])?;
            for width in [96, 301] {
                self.residual(kind, width)?;
                self.gated(kind, [3, width])?;
                self.halves(kind, [3, width])?;
            }
            self.norms(kind, 301)?;
            self.sums([kind; 2], 301)?;
            self.sums([kind, Kind::Float], 301)?;
            self.quantized(kind, [37, 96], 1)?;
            self.quantized(kind, [5, 128], 3)?;
            self.sampling(kind, 2000)?;
            self.attention(kind, [4, 2, 16], None)?;
            self.attention(kind, [7, 1, 64], Some(100))?;
        }
        self.rounded_steps(2051)?;
        self.blocked_steps()
    }

    fn large(self) -> Checked {
        // A vocabulary that packs divide, and one that they do not.
        for (kind, other, vocab) in [(Kind::BFloat16, Kind::Float, 151_936), (Kind::Float, Kind::BFloat16, 50_257)] {
            self.logits(kind, vocab)?;
            self.logits(other, vocab)?;
            self.sampling(kind, vocab)?;
        }
        // The most heads of a group and dimensions of a head, and a window over several parts.
        self.attention(Kind::BFloat16, [16, 1, 256], None)?;
        self.attention(Kind::Float, [8, 2, 128], Some(200))?;
        self.sums([Kind::BFloat16; 2], 2048)?;
        let few = Self { most_blocks: 2, ..self };
        for kind in [Kind::Float, Kind::BFloat16] {
            // More numbers than two blocks have threads, in packs too.
            few.residual(kind, 4096)?;
            few.gated(kind, [3, 4096])?;
            few.halves(kind, [5, 6144])?;
            few.rotary(kind, [256, 128, 1])?;
            few.cached(kind, [256, 128])?;
            // More packs of inputs than a warp has lanes, rows of two blocks, and a last pack of outputs that is not whole.
            self.quantized(kind, [66, 1056], 8)?;
            self.quantized(kind, [66, 1056], 1)?;
        }
        few.rounded_steps(20_003)
    }

    fn logits(self, kind: Kind, vocab: i64) -> Checked {
        let what = |name: &str| format!("{name} of logits in {kind:?}, vocabulary of {vocab}");
        let (rows, temperature) = (3, 0.7);
        let input = waves(&[rows, vocab], 0.73) * 9.0;
        // An excluded token.
        let _ = input.get(1).narrow(0, 5, 2).fill_(f64::NEG_INFINITY);
        let input = input.to_kind(kind);
        let ids = Tensor::from_slice(&[0i64, vocab - 1, 17]);
        let [slopes, turns] = [0.31, 0.17].map(|frequency| waves(&[rows], frequency));
        let all = (input.to_kind(Kind::Double) / temperature).set_requires_grad(true);
        let logprobs = all.log_softmax(-1, Kind::Double);
        let probs = logprobs.exp();
        let entropy = -(&probs * logprobs.clamp_min(-1e4)).sum_dim_intlist(1i64, false, Kind::Double);
        let chosen = logprobs.gather(1, &ids.unsqueeze(1), false).squeeze_dim(1);
        let loss = (&chosen * &slopes + &entropy * &turns).sum(Kind::Double);
        loss.backward();
        let expected = all.grad() / temperature;

        let (ids, [slopes, turns]) = (ids.to_device(self.device), [slopes, turns].map(|x| x.to_device(self.device)));
        let mut logits = self.placed(&input);
        let stats = self.kernels(|| logits_stats(&logits, temperature, &ids, true));
        let numbers = [CLOSE, CLOSE];
        expect_close(&what("log-probabilities"), &stats.logprobs, &chosen, numbers)?;
        let stats_entropy = stats.entropy.as_ref().ok_or("no entropies")?;
        expect_close(&what("entropies"), stats_entropy, &entropy, numbers)?;
        let entropy = Some((stats_entropy, &turns));
        self.kernels(|| logits_gradient(&mut logits, temperature, &ids, &stats.lse, &slopes, entropy));
        expect_close(&what("gradient"), &logits, &expected, tolerance(kind))
    }

    fn sampling(self, kind: Kind, vocab: i64) -> Checked {
        let temperature = 0.9;
        // Fewer draws from a large vocabulary: the emulation takes long.
        let draws = if vocab > 10_000 { vec![0.3f64] } else { vec![0.0, 0.3, 0.77, 0.999_999_9] };
        let rows = draws.len() as i64;
        let input = (waves(&[rows, vocab], 1.37) * 6.0).to_kind(kind);
        let draws = Tensor::from_slice(&draws);
        let logprobs = (input.to_kind(Kind::Double) / temperature).log_softmax(-1, Kind::Double);
        let cumulative = logprobs.exp().cumsum(-1, Kind::Double);
        let logits = self.placed(&input);
        for draws in [Some(&draws), None] {
            let on_device = draws.map(|draws| draws.to_device(self.device));
            let (tokens, found) = self.kernels(|| logits_sample_on_device(&logits, temperature, on_device.as_ref()));
            let tokens = tokens.to_device(Device::Cpu).unsqueeze(1);
            let what = format!("sampling from logits in {kind:?}");
            expect_close(&what, &found.unsqueeze(1), &logprobs.gather(1, &tokens, false), [CLOSE, CLOSE])?;
            let Some(draws) = draws else {
                let most = logprobs.amax([1i64].as_slice(), true);
                expect_close(&what, &found.unsqueeze(1), &most, [CLOSE, CLOSE])?;
                continue;
            };
            // The draw lies between the sums before and after the token, up to their rounding.
            let after = cumulative.gather(1, &tokens, false).squeeze_dim(1);
            let before = &after - logprobs.gather(1, &tokens, false).squeeze_dim(1).exp();
            let outside = (draws - after).maximum(&(before - draws)).max().double_value(&[]);
            if outside > 1e-6 {
                return Err(format!("{what}: a draw is {outside:.1e} outside of its token's part"));
            }
        }
        Ok(())
    }

    fn attention(self, kind: Kind, [heads, kv_heads, head_dim]: [i64; 3], window: Option<i64>) -> Checked {
        // In one chunk, at the border of two, and in three.
        let (lens, capacity, scale) = ([1i64, 128, 300], 320, 0.3);
        let rows = lens.len() as i64;
        let q = (waves(&[rows, heads, head_dim], 0.7) * 2.0).to_kind(kind);
        let [keys, values] = [0.37, 0.53]
            .map(|frequency| (waves(&[rows * capacity, kv_heads * head_dim], frequency) * 2.0).to_kind(kind));
        let row_attention = |(row, &len): (usize, &i64)| {
            let from = window.map_or(0, |window| (len - window).max(0));
            let part = |x: &Tensor| {
                let all = x.narrow(0, row as i64 * capacity + from, len - from).view([-1, kv_heads, head_dim]);
                all.to_kind(Kind::Double).transpose(0, 1).repeat_interleave_self_int(heads / kv_heads, 0, None::<i64>)
            };
            let scores = q.get(row as i64).to_kind(Kind::Double).unsqueeze(1).matmul(&part(&keys).transpose(1, 2));
            (scores * scale).softmax(-1, Kind::Double).matmul(&part(&values)).squeeze_dim(1)
        };
        let expected = Tensor::stack(&lens.iter().enumerate().map(row_attention).collect::<Vec<_>>(), 0);
        // Keys are always read in packs, since a cache begins where libtorch allocates it: their address is not shifted.
        let (q, values, keys) = (self.placed(&q), self.placed(&values), keys.to_device(self.device));
        let lengths = Tensor::from_slice(&lens).to_device(self.device);
        let cached = CachedRows { keys: &keys, values: &values, lengths: &lengths, capacity, longest: 310 };
        let found = self.kernels(|| attention_of_step(&q, cached, window, scale));
        let what = format!("attention of a step in {kind:?}, {heads} heads of {head_dim}, window {window:?}");
        expect_close(&what, &found, &expected, tolerance(kind))
    }

    /// Attention of beginnings that sequences share, which is libtorch's flash attention on a GPU that has it, with sequences without
    /// keys and without queries.
    fn prefixes(self, [heads, kv_heads, head_dim]: [i64; 3]) -> Checked {
        let (kind, scale) = (Kind::BFloat16, 0.1);
        // 130 tokens that 7, then 1, and 162 continue, and 10 that 20 and 1 continue; two tokens of padding.
        let (starts, parents) = ([0i64, 130, 137, 138, 300, 310, 330, 331, 333], [-1i64, 0, 1, 0, -1, 4, 4, -1]);
        let packed = PackedRows { starts: &starts, parents: Some(&parents) };
        let numbers = |heads: i64, frequency: f64| (waves(&[333, heads, head_dim], frequency) * 2.0).to_kind(kind);
        let (inputs, slopes) =
            ([numbers(heads, 0.7), numbers(kv_heads, 0.37), numbers(kv_heads, 0.53)], numbers(heads, 0.29));
        let leaves = inputs.each_ref().map(|x| x.to_device(self.device).copy().set_requires_grad(true));
        if self.device.is_cuda() && !has_flash_attention(&leaves[0].detach(), scale) {
            return Ok(());
        }
        let tree = PackedRows { starts: &starts[..8], parents: Some(&parents[..7]) };
        let found = shared_attention(leaves.each_ref(), scale, &PrefixTree::new(tree, 333, self.device));
        crate::backward(&found, &slopes.to_device(self.device));
        let wide = inputs.each_ref().map(|x| x.to_kind(Kind::Double).set_requires_grad(true));
        let expected = attention_along_paths(wide.each_ref(), scale, packed);
        crate::backward(&expected, &slopes.to_kind(Kind::Double));
        let what = |name: &str| format!("{name} of attention of shared beginnings, {heads} heads of {head_dim}");
        expect_close(&what("output"), &found.detach(), &expected.detach(), [2e-2, ROUNDING])?;
        for (name, (found, expected)) in ["queries", "keys", "values"].iter().zip(leaves.iter().zip(&wide)) {
            let most = expected.grad().abs().max().double_value(&[]);
            expect_close(
                &what(&format!("gradient by {name}")),
                &found.grad(),
                &expected.grad(),
                [most * 2e-2, ROUNDING],
            )?;
        }
        Ok(())
    }

    fn rotary(self, kind: Kind, [head_dim, half, parts]: [i64; 3]) -> Checked {
        let (tokens, heads, entries) = (5, 3, 2);
        let input = waves(&[tokens, heads, entries, head_dim], 0.61).to_kind(kind);
        let angles = waves(&[tokens, half], 0.9) * 3.0;
        let (cos, sin) = (angles.cos(), angles.sin());
        let wide = input.to_kind(Kind::Double).set_requires_grad(true);
        let [a, b] = [0, half].map(|start| wide.narrow(2, 0, parts).narrow(3, start, half));
        let view = |x: &Tensor| x.to_kind(Kind::Double).view([tokens, 1, 1, half]);
        let rest = wide.narrow(2, 0, parts).narrow(3, 2 * half, head_dim - 2 * half);
        let turned = [&a * view(&cos) - &b * view(&sin), &b * view(&cos) + &a * view(&sin), rest];
        let turned = Tensor::cat(&turned, 3);
        let expected = Tensor::cat(&[turned, wide.narrow(2, parts, entries - parts)], 2);
        let slopes = waves(&expected.size(), 0.43);
        (&expected * slopes.to_kind(Kind::Double)).sum(Kind::Double).backward();
        for out in [Kind::Float, Kind::BFloat16] {
            let what = format!("rotary positions of {head_dim} dimensions, {kind:?} to {out:?}");
            let x = self.placed(&input).set_requires_grad(true);
            let (cos, sin) = (self.placed(&cos), self.placed(&sin));
            self.kernels(|| {
                let found = rotate(&x, (&cos, &sin), parts, out);
                expect_close(&what, &found.detach(), &expected.detach(), tolerance(out))?;
                (found * self.on(&slopes, out)).sum(Kind::Float).backward();
                let rounded = if out == Kind::BFloat16 || kind == out { out } else { kind };
                // The slopes were rounded to the dtype of the output.
                let relative = tolerance(rounded)[1].max(tolerance(kind)[1]);
                expect_close(&format!("{what}: gradient"), &x.grad(), &wide.grad(), [4.0 * relative, relative])
            })?;
        }
        // Of heads that are columns of a wider product.
        let (flat, cos, sin) = (input.view([tokens, -1]), self.placed(&cos), self.placed(&sin));
        for gap in [3, 4] {
            let product = self.placed(&Tensor::cat(&[&flat, &flat.narrow(1, 0, gap)], 1));
            let columns = product.narrow(1, 0, flat.size()[1]).view([tokens, heads, entries, head_dim]);
            let (found, expected) = self.kernels(|| {
                let turned = |x: &Tensor| rotate(x, (&cos, &sin), parts, kind);
                (turned(&columns), turned(&columns.contiguous()))
            });
            let what = format!("rotary positions of {head_dim} dimensions in {kind:?}, columns {gap} apart");
            expect_close(&what, &found, &expected, self.same(kind))?;
        }
        Ok(())
    }

    fn norms(self, kind: Kind, width: i64) -> Checked {
        // Of two parts in the sums over rows.
        let (rows, eps) = (34, 1e-5);
        let input = waves(&[rows, width], 0.77) * 2.0 + 0.3;
        let (weight, bias) = (waves(&[width], 0.21) + 1.0, waves(&[width], 0.33));
        let slopes = waves(&[rows, width], 0.39).to_kind(kind);
        for (center, offset, has_bias) in [(false, 1.0, false), (true, 0.0, true)] {
            let what = |name: &str| format!("{name} of a norm to {kind:?}, width {width}, centred {center}");
            let leaf = |x: &Tensor, kind| x.to_kind(kind).copy().set_requires_grad(true);
            let [x, w, b] = [&input, &weight, &bias].map(|x| leaf(x, Kind::Double));
            let factors = &w + offset;
            let expected = if center {
                x.layer_norm([width], Some(&factors), Some(&b), eps, false)
            } else {
                x.rms_norm([width], Some(&factors), eps)
            };
            (&expected * slopes.to_kind(Kind::Double)).sum(Kind::Double).backward();
            let on = |x: &Tensor| self.placed(x).set_requires_grad(true);
            let [found_x, found_w, found_b] = [&input, &weight, &bias].map(on);
            self.kernels(|| {
                let bias = has_bias.then_some(&found_b);
                let found = norm(Norm { eps, center, offset }, &found_x, &found_w, bias, kind);
                expect_close(&what("output"), &found.detach(), &expected.detach(), tolerance(kind))?;
                crate::backward(&found, &slopes.to_device(self.device));
                let sums = [CLOSE * rows as f64, CLOSE];
                expect_close(&what("gradient"), &found_x.grad(), &x.grad(), [CLOSE, CLOSE])?;
                expect_close(&what("gradient of the weight"), &found_w.grad(), &w.grad(), sums)?;
                if has_bias {
                    expect_close(&what("gradient of the bias"), &found_b.grad(), &b.grad(), sums)?;
                }
                Ok::<(), String>(())
            })?;
        }
        Ok(())
    }

    fn residual(self, kind: Kind, width: i64) -> Checked {
        let shape = [3, width];
        let [x, a, b] = [0.4, 0.5, 0.6].map(|frequency| waves(&shape, frequency));
        let [a, b] = [a, b].map(|x| x.to_kind(kind));
        for second in [None, Some(&b)] {
            let sum = x.to_kind(Kind::Double) + &a;
            let expected = second.map_or_else(|| sum.shallow_clone(), |b| &sum + b);
            let on_device = second.map(|b| self.placed(b));
            let (x, a) = (self.placed(&x), self.placed(&a));
            let found = self.kernels(|| residual(&x, &a, on_device.as_ref()));
            expect_close(&format!("residual sum with {kind:?}"), &found, &expected, [CLOSE, 0.0])?;
        }
        Ok(())
    }

    fn gated(self, kind: Kind, shape: [i64; 2]) -> Checked {
        use GatedActivation::{Gelu, GeluTanh, Relu, Sigmoid, Silu};
        let width = shape[1];
        let [gate, up, slopes] = [0.4, 0.5, 0.6].map(|frequency| (waves(&shape, frequency) * 3.0).to_kind(kind));
        for activation in [Gelu, GeluTanh, Silu, Relu, Sigmoid] {
            for with_up in [true, false] {
                let what = format!("{activation:?} in {kind:?}, up {with_up}, width {width}");
                let [g, u] = [&gate, &up].map(|x| x.to_kind(Kind::Double).copy().set_requires_grad(true));
                let active = match activation {
                    Gelu => g.gelu("none"),
                    GeluTanh => g.gelu("tanh"),
                    Silu => g.silu(),
                    Relu => g.relu(),
                    Sigmoid => g.sigmoid(),
                };
                let expected = if with_up { active * &u } else { active };
                (&expected * slopes.to_kind(Kind::Double)).sum(Kind::Double).backward();
                let on = |x: &Tensor| self.placed(x).set_requires_grad(true);
                let [found_g, found_u] = [&gate, &up].map(on);
                self.kernels(|| {
                    let found = gated(&found_g, with_up.then_some(&found_u), activation);
                    expect_close(&what, &found.detach(), &expected.detach(), tolerance(kind))?;
                    crate::backward(&found, &slopes.to_device(self.device));
                    expect_close(&format!("{what}: gradient"), &found_g.grad(), &g.grad(), tolerance(kind))?;
                    if with_up {
                        expect_close(&format!("{what}: up's gradient"), &found_u.grad(), &u.grad(), tolerance(kind))?;
                    }
                    Ok::<(), String>(())
                })?;
            }
        }
        Ok(())
    }

    /// The halves of a row as gate and up give the same numbers as two tensors.
    fn halves(self, kind: Kind, shape: [i64; 2]) -> Checked {
        let [rows, width] = shape;
        let both = (waves(&[rows, 2 * width], 0.45) * 3.0).to_kind(kind);
        let slopes = self.placed(&waves(&shape, 0.6).to_kind(kind));
        let what = format!("gated halves in {kind:?}, {rows} rows of {width}");
        let leaf = |x: &Tensor| self.placed(x).set_requires_grad(true);
        let (found_both, gate, up) = (
            leaf(&both),
            leaf(&both.narrow(1, 0, width).contiguous()),
            leaf(&both.narrow(1, width, width).contiguous()),
        );
        self.kernels(|| {
            let found = gated_halves(&found_both, GatedActivation::Silu);
            let expected = gated(&gate, Some(&up), GatedActivation::Silu);
            expect_close(&what, &found.detach(), &expected.detach(), self.same(kind))?;
            crate::backward(&found, &slopes);
            crate::backward(&expected, &slopes);
            let expected = Tensor::cat(&[gate.grad(), up.grad()], 1);
            expect_close(&format!("{what}: gradient"), &found_both.grad(), &expected, self.same(kind))
        })
    }

    /// A residual sum of branches in `kind` with its norm in `normed_kind` gives the same numbers and gradients as the two operations one after
    /// the other. Where the dtypes differ, the sum itself is not used, as after the last norm of a model.
    fn sums(self, [kind, normed_kind]: [Kind; 2], width: i64) -> Checked {
        let (shape, eps) = ([5, width], 1e-5);
        let x = waves(&shape, 0.77) * 2.0 + 0.3;
        let [first, second] = [0.5, 0.6].map(|frequency| waves(&shape, frequency).to_kind(kind));
        let (weight, bias) = (waves(&[width], 0.21) + 1.0, waves(&[width], 0.33));
        let slopes = self.placed(&waves(&shape, 0.39).to_kind(normed_kind));
        let sum_slopes = self.placed(&waves(&shape, 0.29));
        for (center, offset, is_whole) in [(false, 1.0, false), (true, 0.0, true)] {
            let kinds = format!("{kind:?} and its norm in {normed_kind:?}");
            let what = |name: &str| format!("{name} of a sum in {kinds}, width {width}, centred {center}");
            let options = Norm { eps, center, offset };
            let leaves = || [&x, &first, &second, &weight, &bias].map(|x| self.placed(x).set_requires_grad(true));
            let (found, expected) = (leaves(), leaves());
            let learn = |sum: &Tensor, normed: &Tensor| {
                let of_normed = (normed * &slopes).sum(Kind::Float);
                let uses_sum = kind == normed_kind;
                (if uses_sum { of_normed + (sum * &sum_slopes).sum(Kind::Float) } else { of_normed }).backward();
            };
            self.kernels(|| {
                let [x, a, b, w, c] = &found;
                let branches = (a, is_whole.then_some(b));
                let (sum, normed) = sum_norm(options, x, branches, w, is_whole.then_some(c), normed_kind);
                let [x, a, b, w, c] = &expected;
                let sum_alone = residual(x, a, is_whole.then_some(b));
                let alone = norm(options, &sum_alone, w, is_whole.then_some(c), normed_kind);
                expect_close(&what("residual stream"), &sum.detach(), &sum_alone.detach(), self.same(kind))?;
                expect_close(&what("output"), &normed.detach(), &alone.detach(), self.same(normed_kind))?;
                learn(&sum, &normed);
                learn(&sum_alone, &alone);
                Ok::<(), String>(())
            })?;
            let names = ["x", "a branch", "the other branch", "the weight", "the bias"];
            for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
                if expected.grad().defined() {
                    let close = [CLOSE, if expected.kind() == Kind::BFloat16 { ROUNDING } else { CLOSE }];
                    expect_close(&what(&format!("gradient of {name}")), &found.grad(), &expected.grad(), close)?;
                }
            }
        }
        Ok(())
    }

    /// Keys and values of a step are in the cache as a rotation and copies would put them there; the rest of the cache stays.
    fn cached(self, kind: Kind, [head_dim, half]: [i64; 2]) -> Checked {
        let (rows, heads, kv_heads, capacity) = (3, 4, 2, 5);
        let what = |name: &str| format!("{name} of a step in {kind:?}, {half} angles of {head_dim} dimensions");
        let width = (heads + 2 * kv_heads) * head_dim;
        // Queries, keys and values are parts of one product, or, in the second case, lie side by side for each head.
        let all = self.placed(&(waves(&[rows, width], 0.61) * 2.0).to_kind(kind));
        let part =
            |from: i64, count: i64| all.narrow(1, from * head_dim, count * head_dim).view([rows, count, head_dim]);
        let separate = [part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)];
        let side_by_side = self.placed(&waves(&[rows, kv_heads, 3, head_dim], 0.47).to_kind(kind)).unbind(2);
        let angles = waves(&[rows, half], 0.9) * 3.0;
        let turns = (self.placed(&angles.cos()), self.placed(&angles.sin()));
        let places = Tensor::from_slice(&[3i64, 5, 14]).to_device(self.device);
        for qkv in [separate.each_ref(), [&side_by_side[0], &side_by_side[1], &side_by_side[2]]] {
            let mut caches = [0.11, 0.13]
                .map(|frequency| self.placed(&waves(&[rows * capacity, kv_heads * head_dim], frequency).to_kind(kind)));
            let [q, k, v] = qkv;
            let expected_caches = caches.each_ref().map(Tensor::copy);
            let (found, queries) = self.kernels(|| {
                let turned = |x: &Tensor| match half {
                    0 => x.shallow_clone(),
                    _ => rotate(&x.unsqueeze(2), (&turns.0, &turns.1), 1, kind).squeeze_dim(2),
                };
                for (cache, new) in expected_caches.iter().zip([turned(k), v.shallow_clone()]) {
                    let _ = cache.shallow_clone().index_copy_(0, &places, &new.flatten(1, -1));
                }
                let [keys, values] = &mut caches;
                let angles = (half > 0).then_some(&turns);
                (rotate_cached(qkv, angles, CachePlaces { keys, values, places: &places }), turned(q))
            });
            expect_close(&what("queries"), &found, &queries, self.same(kind))?;
            for (name, (found, expected)) in ["keys", "values"].into_iter().zip(caches.iter().zip(&expected_caches)) {
                expect_close(&what(name), found, expected, self.same(kind))?;
            }
        }
        Ok(())
    }

    /// Products of few rows with a weight in four bits, with scales and with scales that are quantized too.
    fn quantized(self, kind: Kind, [width_out, width_in]: [i64; 2], rows: i64) -> Checked {
        let (count, block, nested_block) = (width_out * width_in, 32, 16);
        let blocks = count / block;
        let number = |len: i64, factor: i64, modulus: i64| {
            (Tensor::arange(len, (Kind::Int64, Device::Cpu)) * factor).remainder(modulus).to_kind(Kind::Uint8)
        };
        let codes = number(count / 2, 97, 256).to_device(self.device);
        let map = Tensor::linspace(-1.0, 1.0, 16, (Kind::Float, Device::Cpu)).to_device(self.device);
        let nested_map = Tensor::linspace(-1.0, 1.0, 256, (Kind::Float, Device::Cpu)).to_device(self.device);
        let scales = self.placed(&(waves(&[blocks], 0.7) * 0.02 + 0.05));
        let codes_of_scales = number(blocks, 61, 256).to_device(self.device);
        let nested_scales = self.placed(&(waves(&[(blocks + nested_block - 1) / nested_block], 0.9).abs() * 0.02));
        let x = self.placed(&waves(&[rows, width_in], 0.37).to_kind(kind));
        let bias = self.placed(&waves(&[width_out], 0.83).to_kind(kind));
        let nested = NestedScales { map: &nested_map, scales: &nested_scales, block: nested_block, offset: 0.03 };
        for (scales, nested) in [(&scales, None), (&codes_of_scales, Some(nested))] {
            let weight =
                Quantized { widths: [width_out, width_in], codes: &codes, map: Some(&map), scales, block, nested };
            let values = dequantize(&weight, Kind::Float, true).to_kind(Kind::Double);
            let what = format!("{rows} rows of {width_in} by a weight in four bits, {kind:?}, {width_out} outputs");
            if self.kernels(|| [rows, 9].map(|rows| multiplies_quantized(&weight, rows, kind))) != [true, false] {
                return Err(format!("{what}: expected a kernel for these rows, and none for 9"));
            }
            for bias in [None, Some(&bias)] {
                let expected = x.to_kind(Kind::Double).matmul(&values.tr());
                let expected = bias.map_or_else(|| expected.shallow_clone(), |bias| &expected + bias);
                let found = self.kernels(|| quantized_linear(&x, &weight, bias, None, kind));
                expect_close(&what, &found, &expected, tolerance(kind))?;
            }
        }
        Ok(())
    }

    /// Steps in bf16 equal those of the processor's kernel, except for rare numbers that a fused multiply-add rounds otherwise.
    fn rounded_steps(self, count: i64) -> Checked {
        let keys = [5u64, 1 << 63, 77];
        let tensors = [0.2, 0.3, 0.4, 0.5].map(|frequency| waves(&[count], frequency));
        let [param, grad, first, second] = tensors;
        let all = [param, first, second.abs()].map(|x| x.to_kind(Kind::BFloat16));
        let grad = grad.to_kind(Kind::BFloat16);
        let step = |[param, first, second]: &mut [Tensor; 3], grad: &Tensor| {
            adamw_rounded(param, grad, [first, second], keys, 3, settings())
        };
        let mut expected = all.each_ref().map(Tensor::copy);
        step(&mut expected, &grad)?;
        let mut found = all.each_ref().map(|x| self.placed(x));
        self.kernels(|| step(&mut found, &grad.to_device(self.device)))?;
        for ((name, found), expected) in
            ["parameter", "first moment", "second moment"].iter().zip(&found).zip(&expected)
        {
            expect_close(&format!("{name} of a step in bf16"), found, expected, [1e-6, 2.0 * ROUNDING])?;
            expect_same(&format!("{name} of a step in bf16"), found, expected)?;
        }
        Ok(())
    }

    /// Steps with moments in 8 bits equal those of the processor's kernel, except for rare numbers at the border of two codes.
    fn blocked_steps(self) -> Checked {
        let count = 3 * 256 + 100;
        let [param, grad] = [0.2, 0.3].map(|frequency| waves(&[count], frequency));
        let table = Tensor::linspace(-1.0, 1.0, 256, (Kind::Float, Device::Cpu));
        let middles = (table.narrow(0, 0, 255) + table.narrow(0, 1, 255)) / 2.0;
        let middles = Tensor::cat(&[middles, Tensor::full([1], f64::INFINITY, (Kind::Float, Device::Cpu))], 0);
        let least = least_codes(&middles);
        // Of positive values only, as a second moment is.
        let codes = Tensor::arange(count, (Kind::Int64, Device::Cpu)).fmod(100.0) + 140;
        let moments = || (codes.to_kind(Kind::Uint8), waves(&[4], 0.7).abs() + 0.5);
        let run = |check: Option<Self>| {
            let device = check.map_or(Device::Cpu, |check| check.device);
            let [mut param, grad, map, middles, least] =
                [&param, &grad, &table, &middles, &least].map(|x| x.to_device(device).copy());
            let mut states =
                [moments(), moments()].map(|(codes, tops)| [codes.to_device(device), tops.to_device(device)]);
            let mut step = || {
                let moments = states.each_mut().map(|[codes, absmax]| BlockedMoment {
                    codes,
                    absmax,
                    map: &map,
                    middles: &middles,
                    least_codes: &least,
                });
                adamw_blocked(&mut param, &grad, moments, 3, settings())
            };
            match check {
                Some(check) => check.kernels(step),
                None => step(),
            }?;
            Ok::<_, String>((param, states))
        };
        let ((expected, expected_states), (found, found_states)) = (run(None)?, run(Some(self))?);
        expect_close("parameter of a step with moments in 8 bits", &found, &expected, [CLOSE, CLOSE])?;
        for ([codes, tops], [expected_codes, expected_tops]) in found_states.iter().zip(&expected_states) {
            expect_close("magnitudes of a moment in 8 bits", tops, expected_tops, [CLOSE, CLOSE])?;
            expect_close("codes of a moment in 8 bits", codes, expected_codes, [1.0, 0.0])?;
            expect_same("codes of a moment in 8 bits", codes, expected_codes)?;
        }
        Ok(())
    }
}

fn settings() -> AdamW {
    AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-8 }
}

/// Fails unless 99 % of the elements are the same.
fn expect_same(what: &str, found: &Tensor, expected: &Tensor) -> Checked {
    let same = found.to_device(Device::Cpu).eq_tensor(expected).to_kind(Kind::Double).mean(Kind::Double);
    let share = same.double_value(&[]);
    if share >= 0.99 { Ok(()) } else { Err(format!("{what}: {share:.3} of the numbers are the same, expected 0.99")) }
}

/// For each value of the upper 16 bits of an f32: the number of middles below the least f32 with these bits.
fn least_codes(middles: &Tensor) -> Tensor {
    let middles = Vec::<f32>::try_from(middles).expect("a vector of f32");
    let code = |bits: u32| {
        // The least of negative numbers is the one with the largest magnitude.
        let least = f32::from_bits(if bits >> 15 == 1 { bits << 16 | 0xffff } else { bits << 16 });
        middles.iter().filter(|&&middle| middle < least).count() as u8
    };
    Tensor::from_slice(&(0..1 << 16).map(code).collect::<Vec<u8>>())
}
