//! Kernels against libtorch's operations, by numbers: before they are used on a GPU, and in tests.

use super::{CachedRows, GatedActivation, attention_of_step, emulate_gpu_kernels, gated, logits_sample_on_device};
use crate::{
    AdamW, BlockedMoment, Norm, adamw_blocked, adamw_rounded, logits_gradient, logits_stats, norm, residual, rotate,
};
use tch::{Device, Kind, Tensor};

/// Largest difference of results in f32 from those in f64.
const CLOSE: f64 = 3e-5;

/// Largest relative difference that rounding to bf16 makes.
const ROUNDING: f64 = 1.0 / 256.0;

type Checked = Result<(), String>;

/// Compares every kernel with libtorch's operations on small tensors of `device`; on the processor the kernels are emulated meanwhile.
///
/// # Errors
/// The first kernel whose numbers differ by more than rounding.
///
/// # Panics
/// If a kernel cannot be started.
pub fn check_gpu_kernels(device: Device) -> Result<(), String> {
    let check = Check { device };
    for kind in [Kind::Float, Kind::BFloat16] {
        // With packs of numbers, and one by one.
        for vocab in [1000, 1003] {
            check.logits(kind, vocab)?;
        }
        for (head_dim, half, parts) in [(64, 32, 1), (16, 4, 2), (20, 3, 1)] {
            check.rotary(kind, [head_dim, half, parts])?;
        }
        for width in [96, 301] {
            check.residual(kind, width)?;
            check.gated(kind, width)?;
        }
        check.norms(kind, 301)?;
        check.sampling(kind)?;
        check.attention(kind, [4, 2, 16], None)?;
        check.attention(kind, [7, 1, 64], Some(100))?;
    }
    check.rounded_steps()?;
    check.blocked_steps()
}

#[derive(Clone, Copy)]
struct Check {
    device: Device,
}

/// Ends the emulation, also if a kernel panics.
struct Emulation(bool);

impl Drop for Emulation {
    fn drop(&mut self) {
        if self.0 {
            emulate_gpu_kernels(false);
        }
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

    /// The result of `work`, computed by the kernels.
    fn kernels<T>(self, work: impl FnOnce() -> T) -> T {
        let _emulation = Emulation(self.device == Device::Cpu);
        if self.device == Device::Cpu {
            emulate_gpu_kernels(true);
        }
        work()
    }

    fn logits(self, kind: Kind, vocab: i64) -> Checked {
        let what = |name: &str| format!("{name} of logits in {kind:?}, vocabulary of {vocab}");
        let (rows, temperature) = (3, 0.7);
        let given = waves(&[rows, vocab], 0.73) * 9.0;
        // An excluded token.
        let _ = given.get(1).narrow(0, 5, 2).fill_(f64::NEG_INFINITY);
        let given = given.to_kind(kind);
        let ids = Tensor::from_slice(&[0i64, vocab - 1, 17]);
        let [slopes, turns] = [0.31, 0.17].map(|frequency| waves(&[rows], frequency));
        let all = (given.to_kind(Kind::Double) / temperature).set_requires_grad(true);
        let logprobs = all.log_softmax(-1, Kind::Double);
        let probs = logprobs.exp();
        let entropy = -(&probs * logprobs.clamp_min(-1e4)).sum_dim_intlist(1i64, false, Kind::Double);
        let of_ids = logprobs.gather(1, &ids.unsqueeze(1), false).squeeze_dim(1);
        let loss = (&of_ids * &slopes + &entropy * &turns).sum(Kind::Double);
        loss.backward();
        let expected = all.grad() / temperature;

        let (ids, [slopes, turns]) = (ids.to_device(self.device), [slopes, turns].map(|x| x.to_device(self.device)));
        let mut logits = given.to_device(self.device).copy();
        let stats = self.kernels(|| logits_stats(&logits, temperature, &ids, true));
        let numbers = [CLOSE, CLOSE];
        expect_close(&what("log-probabilities"), &stats.logprobs, &of_ids, numbers)?;
        let stats_entropy = stats.entropy.as_ref().ok_or("no entropies")?;
        expect_close(&what("entropies"), stats_entropy, &entropy, numbers)?;
        let entropy = Some((stats_entropy, &turns));
        self.kernels(|| logits_gradient(&mut logits, temperature, &ids, &stats.lse, &slopes, entropy));
        expect_close(&what("gradient"), &logits, &expected, tolerance(kind))
    }

    fn sampling(self, kind: Kind) -> Checked {
        let (rows, vocab, temperature) = (4, 2000, 0.9);
        let given = (waves(&[rows, vocab], 1.37) * 6.0).to_kind(kind);
        let draws = Tensor::from_slice(&[0.0f64, 0.3, 0.77, 0.999_999_9]);
        let logprobs = (given.to_kind(Kind::Double) / temperature).log_softmax(-1, Kind::Double);
        let cumulative = logprobs.exp().cumsum(-1, Kind::Double);
        let logits = given.to_device(self.device);
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
        let of_row = |(row, &len): (usize, &i64)| {
            let from = window.map_or(0, |window| (len - window).max(0));
            let part = |x: &Tensor| {
                let all = x.narrow(0, row as i64 * capacity + from, len - from).view([-1, kv_heads, head_dim]);
                all.to_kind(Kind::Double).transpose(0, 1).repeat_interleave_self_int(heads / kv_heads, 0, None::<i64>)
            };
            let scores = q.get(row as i64).to_kind(Kind::Double).unsqueeze(1).matmul(&part(&keys).transpose(1, 2));
            (scores * scale).softmax(-1, Kind::Double).matmul(&part(&values)).squeeze_dim(1)
        };
        let expected = Tensor::stack(&lens.iter().enumerate().map(of_row).collect::<Vec<_>>(), 0);
        let [q, keys, values] = [&q, &keys, &values].map(|x| x.to_device(self.device));
        let lengths = Tensor::from_slice(&lens).to_device(self.device);
        let cached = CachedRows { keys: &keys, values: &values, lengths: &lengths, capacity, longest: 310 };
        let found = self.kernels(|| attention_of_step(&q, cached, window, scale));
        let what = format!("attention of a step in {kind:?}, {heads} heads of {head_dim}, window {window:?}");
        expect_close(&what, &found, &expected, tolerance(kind))
    }

    fn rotary(self, kind: Kind, [head_dim, half, parts]: [i64; 3]) -> Checked {
        let (tokens, heads, entries) = (5, 3, 2);
        let given = waves(&[tokens, heads, entries, head_dim], 0.61).to_kind(kind);
        let angles = waves(&[tokens, half], 0.9) * 3.0;
        let (cos, sin) = (angles.cos(), angles.sin());
        let wide = given.to_kind(Kind::Double).set_requires_grad(true);
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
            let x = given.to_device(self.device).copy().set_requires_grad(true);
            let (cos, sin) = (cos.to_device(self.device), sin.to_device(self.device));
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
        Ok(())
    }

    fn norms(self, kind: Kind, width: i64) -> Checked {
        // Of two parts in the sums over rows.
        let (rows, eps) = (34, 1e-5);
        let given = waves(&[rows, width], 0.77) * 2.0 + 0.3;
        let (weight, bias) = (waves(&[width], 0.21) + 1.0, waves(&[width], 0.33));
        let slopes = waves(&[rows, width], 0.39).to_kind(kind);
        for (center, offset, has_bias) in [(false, 1.0, false), (true, 0.0, true)] {
            let what = |name: &str| format!("{name} of a norm to {kind:?}, width {width}, centred {center}");
            let leaf = |x: &Tensor, kind| x.to_kind(kind).copy().set_requires_grad(true);
            let [x, w, b] = [&given, &weight, &bias].map(|x| leaf(x, Kind::Double));
            let factors = &w + offset;
            let expected = if center {
                x.layer_norm([width], Some(&factors), Some(&b), eps, false)
            } else {
                x.rms_norm([width], Some(&factors), eps)
            };
            (&expected * slopes.to_kind(Kind::Double)).sum(Kind::Double).backward();
            let on = |x: &Tensor| self.on(x, Kind::Float).copy().set_requires_grad(true);
            let [found_x, found_w, found_b] = [&given, &weight, &bias].map(on);
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
            let on_device = second.map(|b| b.to_device(self.device));
            let (x, a) = (x.to_device(self.device), a.to_device(self.device));
            let found = self.kernels(|| residual(&x, &a, on_device.as_ref()));
            expect_close(&format!("residual sum with {kind:?}"), &found, &expected, [CLOSE, 0.0])?;
        }
        Ok(())
    }

    fn gated(self, kind: Kind, width: i64) -> Checked {
        use GatedActivation::{Gelu, GeluTanh, Relu, Sigmoid, Silu};
        let shape = [3, width];
        let [gate, up, slopes] = [0.4, 0.5, 0.6].map(|frequency| (waves(&shape, frequency) * 3.0).to_kind(kind));
        for activation in [Gelu, GeluTanh, Silu, Relu] {
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
                let on = |x: &Tensor| x.to_device(self.device).copy().set_requires_grad(true);
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

    /// Steps in bf16 are those of the processor's kernel, but for rare numbers that a fused multiply-add rounds otherwise.
    fn rounded_steps(self) -> Checked {
        let (count, keys) = (2051, [5u64, 1 << 63, 77]);
        let tensors = [0.2, 0.3, 0.4, 0.5].map(|frequency| waves(&[count], frequency));
        let [param, grad, first, second] = tensors;
        let all = [param, first, second.abs()].map(|x| x.to_kind(Kind::BFloat16));
        let grad = grad.to_kind(Kind::BFloat16);
        let step = |[param, first, second]: &mut [Tensor; 3], grad: &Tensor| {
            adamw_rounded(param, grad, [first, second], keys, 3, settings())
        };
        let mut expected = all.each_ref().map(Tensor::copy);
        step(&mut expected, &grad)?;
        let mut found = all.each_ref().map(|x| x.to_device(self.device).copy());
        self.kernels(|| step(&mut found, &grad.to_device(self.device)))?;
        for ((name, found), expected) in
            ["parameter", "first moment", "second moment"].iter().zip(&found).zip(&expected)
        {
            expect_close(&format!("{name} of a step in bf16"), found, expected, [1e-6, 2.0 * ROUNDING])?;
            expect_same(&format!("{name} of a step in bf16"), found, expected)?;
        }
        Ok(())
    }

    /// Steps with moments in 8 bits are those of the processor's kernel, but for rare numbers at the border of two codes.
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

/// Number of middles below the least f32 with the same upper 16 bits, by those bits.
fn least_codes(middles: &Tensor) -> Tensor {
    let middles = Vec::<f32>::try_from(middles).expect("a vector of f32");
    let code = |bits: u32| {
        // The least of negative numbers is the one with the largest magnitude.
        let least = f32::from_bits(if bits >> 15 == 1 { bits << 16 | 0xffff } else { bits << 16 });
        middles.iter().filter(|&&middle| middle < least).count() as u8
    };
    Tensor::from_slice(&(0..1 << 16).map(code).collect::<Vec<u8>>())
}
