//! Compares values and gradients of every kernel with a composition of libtorch operations in f64.
//!
//! A bf16 kernel is compared with f64 on the same rounded inputs. The last test runs the others on smaller instruction sets.

use tch::{Device, IndexOp, Kind, Tensor, no_grad};
use tch_ext::{AdamW, Attention, BlockedMoment, Cache, GatedActivation, LowRank, NestedScales, Norm, Quantized};

const KINDS: [(Kind, f64); 2] = [(Kind::Float, 1e-5), (Kind::BFloat16, 1e-2)];

/// Lengths around the size of a block of queries and of a vector.
const LENS: [i64; 6] = [1, 47, 48, 49, 97, 130];

fn starts(lens: &[i64]) -> Vec<i64> {
    let sums = lens.iter().scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

/// Normally distributed numbers that do not depend on other tests.
fn randn(size: &[i64], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let numbers: Vec<f64> = (0..size.iter().product())
        .map(|_| (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos())
        .collect();
    Tensor::from_slice(&numbers).reshape(size)
}

fn leaf(x: &Tensor, kind: Kind) -> Tensor {
    x.detach().to_kind(kind).copy().set_requires_grad(true)
}

/// Copies `leaves` to f64 leaves.
fn doubles(leaves: &[Tensor]) -> Vec<Tensor> {
    leaves.iter().map(|x| leaf(x, Kind::Double)).collect()
}

/// Compares the maximum difference, relative to the maximum expected magnitude or to 1: gradients that cancel have the round-off
/// of their terms.
fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size(), "{what}");
    if found.numel() == 0 {
        return;
    }
    let (found, expected) = (found.detach().to_kind(Kind::Double), expected.detach().to_kind(Kind::Double));
    let scale = expected.abs().max().double_value(&[]).max(1.0);
    let difference = (found - expected).abs().max().double_value(&[]) / scale;
    assert!(difference <= tolerance, "{what}: relative difference {difference:e}, expected at most {tolerance:e}");
}

fn assert_grads_close(what: &str, found: &[Tensor], expected: &[Tensor], tolerance: f64) {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_close(&format!("{what}, gradient {i}"), &found.grad(), &expected.grad(), tolerance);
    }
}

/// Returns the bytes, so that NaN equals itself and -0 differs from 0.
fn bits(x: &Tensor) -> Vec<u8> {
    let x = x.detach().contiguous();
    let mut bytes = vec![0; x.numel() * x.kind().elt_size_in_bytes()];
    x.copy_data_u8(&mut bytes, x.numel());
    bytes
}

// --- Attention ------------------------------------------------------------------------------------------------------

#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    ByHead,
    Fused,
    Three,
}

fn attention_of(heads: i64, kv_heads: i64, head_dim: i64) -> Attention {
    let scale = (head_dim as f64).powf(-0.5);
    Attention { heads, kv_heads, head_dim, scale, softcap: None, window: None, causal: true, by_head: false }
}

fn masks(attention: Attention) -> [Attention; 6] {
    [
        attention,
        Attention { window: Some(1), ..attention },
        Attention { window: Some(5), softcap: Some(1.5), ..attention },
        Attention { window: Some(200), ..attention },
        Attention { softcap: Some(0.7), ..attention },
        Attention { causal: false, ..attention },
    ]
}

fn angles(tokens: i64, half: i64) -> Option<(Tensor, Tensor)> {
    let angles = randn(&[tokens, half], 5).to_kind(Kind::Float) * 3.0;
    (half > 0).then(|| (angles.cos(), angles.sin()))
}

/// Returns random leaves for `tokens` tokens in a layout.
fn projections(attention: &Attention, layout: Layout, tokens: i64, kind: Kind) -> Vec<Tensor> {
    let Attention { heads, kv_heads, head_dim, .. } = *attention;
    let widths = match layout {
        Layout::Three => vec![heads, kv_heads, kv_heads],
        _ => vec![heads + 2 * kv_heads],
    };
    (0u64..).zip(widths).map(|(i, width)| leaf(&randn(&[tokens, width * head_dim], i + 1), kind)).collect()
}

/// Reference implementation of attention.
fn plain_attention(
    attention: &Attention,
    projections: &[Tensor],
    rotation: Option<&(Tensor, Tensor)>,
    starts: &[i64],
) -> Tensor {
    let Attention { heads, kv_heads, head_dim, .. } = *attention;
    let split = |x: &Tensor, heads| x.view([-1, heads, head_dim]);
    let [q, k, v] = match projections {
        [q, k, v] => [split(q, heads), split(k, kv_heads), split(v, kv_heads)],
        [all] if attention.by_head => [0, 1, 2].map(|i| all.view([-1, heads, 3, head_dim]).select(2, i)),
        [all] => {
            let all = split(all, heads + 2 * kv_heads);
            [all.narrow(1, 0, heads), all.narrow(1, heads, kv_heads), all.narrow(1, heads + kv_heads, kv_heads)]
        }
        _ => panic!("one projection or three"),
    };
    let rotated = |x: Tensor| match rotation {
        None => x,
        Some((cos, sin)) => {
            let (half, cos, sin) = (cos.size()[1], cos.unsqueeze(1), sin.unsqueeze(1));
            let (a, b) = (x.narrow(2, 0, half), x.narrow(2, half, half));
            let rest = x.narrow(2, 2 * half, head_dim - 2 * half);
            Tensor::cat(&[&a * &cos - &b * &sin, &b * &cos + &a * &sin, rest], 2)
        }
    };
    let (q, k) = (rotated(q), rotated(k));
    let rows = starts.windows(2).map(|pair| {
        let row =
            |x: &Tensor| x.i(pair[0]..pair[1]).transpose(0, 1).repeat_interleave_self_int(heads / x.size()[1], 0, None);
        let (q, k, v) = (row(&q), row(&k), row(&v));
        let mut scores = q.matmul(&k.transpose(1, 2)) * attention.scale;
        if let Some(cap) = attention.softcap {
            scores = (scores / cap).tanh() * cap;
        }
        let places = Tensor::arange(pair[1] - pair[0], (Kind::Int64, Device::Cpu));
        let distance = places.unsqueeze(1) - places.unsqueeze(0);
        let mut hidden = distance.ge(attention.window.unwrap_or(i64::MAX));
        if attention.causal {
            hidden = hidden.logical_or(&distance.lt(0));
        }
        let weights = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Double);
        weights.matmul(&v).transpose(0, 1).reshape([-1, heads * head_dim])
    });
    Tensor::cat(&rows.collect::<Vec<_>>(), 0)
}

#[test]
fn packed_attention_and_its_gradients_match_attention_of_each_sequence() {
    let starts = starts(&LENS);
    let tokens = starts[LENS.len()];
    let grad = randn(&[tokens, 4 * 80], 9);
    for (i, head_dim) in [4, 8, 20, 64, 80].into_iter().enumerate() {
        for (j, mask) in masks(attention_of(4, 4, head_dim)).into_iter().enumerate() {
            for (kind, tolerance) in KINDS {
                let kv_heads = [4, 2, 1][(i + j) % 3];
                let layout = match (kv_heads, j / 3) {
                    (4, 0) => Layout::ByHead,
                    (2, _) => Layout::Three,
                    _ => Layout::Fused,
                };
                let attention = Attention { kv_heads, by_head: layout == Layout::ByHead, ..mask };
                let rotation = angles(tokens, [0, head_dim / 4, head_dim / 2][(i + j / 2) % 3]);
                let what = format!("{attention:?}, {layout:?}, {kind:?}");
                let inputs = projections(&attention, layout, tokens, kind);
                let expected_inputs = doubles(&inputs);
                let rotation64 =
                    rotation.as_ref().map(|(cos, sin)| (cos.to_kind(Kind::Double), sin.to_kind(Kind::Double)));

                let out = tch_ext::attention(&attention, &inputs, rotation.as_ref(), &starts, None);
                let expected = plain_attention(&attention, &expected_inputs, rotation64.as_ref(), &starts);
                assert_eq!(out.kind(), kind, "{what}");
                assert_close(&what, &out, &expected, tolerance);

                let grad = grad.narrow(1, 0, 4 * head_dim).to_kind(kind);
                tch_ext::backward(&out, &grad);
                tch_ext::backward(&expected, &grad.to_kind(Kind::Double));
                assert_grads_close(&what, &inputs, &expected_inputs, tolerance);
            }
        }
    }
}

#[test]
fn steps_with_a_cache_match_attention_over_the_longer_sequences() {
    const STEPS: i64 = 3;
    let (ends, capacity) = (starts(&LENS.map(|len| len + STEPS)), 134);
    let tokens = ends[LENS.len()];
    let rows = |places: &mut dyn Iterator<Item = i64>| Tensor::from_slice(&places.collect::<Vec<_>>());
    let prompt = rows(&mut LENS.iter().zip(&ends).flat_map(|(len, start)| *start..start + len));
    for (i, head_dim) in [4, 20, 64].into_iter().enumerate() {
        for mask in masks(attention_of(4, [4, 2, 1][i], head_dim)).into_iter().filter(|mask| mask.causal) {
            for (kind, tolerance) in KINDS {
                let attention = Attention { by_head: i == 0, ..mask };
                let layout = [Layout::ByHead, Layout::Three, Layout::Fused][i];
                let inputs: Vec<_> = projections(&attention, layout, tokens, kind).iter().map(Tensor::detach).collect();
                let rotation = angles(tokens, head_dim / 4);
                let expected = tch_ext::attention(&attention, &inputs, rotation.as_ref(), &ends, None);
                let select = |at: &Tensor| {
                    let inputs: Vec<_> = inputs.iter().map(|x| x.index_select(0, at)).collect();
                    (inputs, rotation.as_ref().map(|(cos, sin)| (cos.index_select(0, at), sin.index_select(0, at))))
                };

                // NaN: slots without a token must never be read.
                let empty = Tensor::full(
                    [LENS.len() as i64 * capacity, attention.kv_heads * head_dim],
                    f64::NAN,
                    (kind, Device::Cpu),
                );
                let (mut keys, mut values) = (empty.copy(), empty);
                let (prompts, turns) = select(&prompt);
                let cache = Cache { keys: &mut keys, values: &mut values, capacity };
                let out = tch_ext::attention(&attention, &prompts, turns.as_ref(), &starts(&LENS), Some(cache));
                assert_close(
                    &format!("{attention:?}, {kind:?}, prompt"),
                    &out,
                    &expected.index_select(0, &prompt),
                    tolerance,
                );
                for step in 0..STEPS {
                    let at = rows(&mut LENS.iter().zip(&ends).map(|(len, start)| start + len + step));
                    let (inputs, turns) = select(&at);
                    let cache = Cache { keys: &mut keys, values: &mut values, capacity };
                    let lens = LENS.map(|len| len + step);
                    let out = tch_ext::attention_step(&attention, &inputs, turns.as_ref(), &lens, cache);
                    let what = format!("{attention:?}, {kind:?}, step {step}");
                    assert_close(&what, &out, &expected.index_select(0, &at), tolerance);
                }
                let stored = LENS.iter().map(|len| (len + STEPS) * attention.kv_heads * head_dim).sum::<i64>();
                for cache in [keys, values] {
                    assert_eq!(cache.isfinite().sum(Kind::Int64).int64_value(&[]), stored, "{attention:?}");
                }
            }
        }
    }
}

// --- Weights --------------------------------------------------------------------------------------------------------

#[test]
fn a_norm_matches_the_formula_and_its_gradients_accumulate() {
    for width in [1, 7, 16, 100, 512] {
        for rows in [1, 3, 100] {
            for (norm, with_bias) in [
                (Norm { eps: 1e-5, center: true, offset: 0.0 }, true),
                (Norm { eps: 1e-5, center: true, offset: 0.0 }, false),
                (Norm { eps: 1e-6, center: false, offset: 0.0 }, false),
                (Norm { eps: 1e-6, center: false, offset: 1.0 }, false),
            ] {
                for (kind, tolerance) in KINDS {
                    let what = format!("{norm:?}, [{rows}, {width}], {kind:?}");
                    let mut leaves = vec![randn(&[rows, width], 1) + 0.5, randn(&[width], 2)];
                    leaves.extend(with_bias.then(|| randn(&[width], 3)));
                    let leaves: Vec<_> = leaves.iter().map(|x| leaf(x, Kind::Float)).collect();
                    let expected_leaves = doubles(&leaves);
                    for call in 0..2 {
                        let out = tch_ext::norm(norm, &leaves[0], &leaves[1], leaves.get(2), kind);
                        let x = &expected_leaves[0];
                        let x = if norm.center {
                            x - x.mean_dim([-1].as_slice(), true, Kind::Double)
                        } else {
                            x.shallow_clone()
                        };
                        let square = (&x * &x).mean_dim([-1].as_slice(), true, Kind::Double);
                        let mut expected = x / (square + norm.eps).sqrt() * (&expected_leaves[1] + norm.offset);
                        if let Some(bias) = expected_leaves.get(2) {
                            expected += bias;
                        }
                        assert_eq!(out.kind(), kind);
                        assert_close(&what, &out, &expected, tolerance);
                        let grad = randn(&[rows, width], 4 + call).to_kind(kind);
                        tch_ext::backward(&out, &grad);
                        tch_ext::backward(&expected, &grad.to_kind(Kind::Double));
                    }
                    assert_grads_close(&what, &leaves, &expected_leaves, 1e-5_f64.max(tolerance / 10.0));
                }
            }
        }
    }
}

#[test]
fn a_linear_layer_adds_its_gradients_to_the_master_weights() {
    // The larger product is one of many rows, and for the other of libtorch's two libraries, where that is the faster.
    let cases = [(false, true), (true, true), (false, false)];
    let sizes = [[13, 24, 10], [67, 200, 170]];
    for ((transposed, with_bias), [rows, wide, out_width]) in
        cases.into_iter().flat_map(|case| sizes.map(|size| (case, size)))
    {
        for (kind, tolerance) in KINDS {
            let what = format!("transposed {transposed}, {kind:?}, {rows} rows of {wide} to {out_width}");
            let weight = if transposed { [wide, out_width] } else { [out_width, wide] };
            let sizes: [&[i64]; 3] = [&[rows, wide], &weight, &[out_width]];
            let leaves: Vec<_> = (0u64..).zip(sizes).map(|(i, size)| leaf(&randn(size, i + 1), Kind::Float)).collect();
            let used: Vec<_> = leaves.iter().map(|x| x.detach().to_kind(kind)).collect();
            let expected_leaves: Vec<_> = used.iter().map(|x| leaf(x, Kind::Double)).collect();
            for call in 0..2 {
                let bias = with_bias.then_some((&leaves[2], &used[2]));
                let out = tch_ext::linear(&leaves[0], &leaves[1], &used[1], bias, transposed);
                let [x, weight, bias] = expected_leaves.as_slice() else { unreachable!() };
                let weight = if transposed { weight.shallow_clone() } else { weight.tr() };
                let expected = x.matmul(&weight) + if with_bias { bias.shallow_clone() } else { bias.zeros_like() };
                assert_close(&what, &out, &expected, tolerance);
                let grad = randn(&[rows, out_width], 4 + call).to_kind(kind);
                tch_ext::backward(&out, &grad);
                tch_ext::backward(&expected, &grad.to_kind(Kind::Double));
            }
            let leaves = if with_bias { &leaves[..] } else { &leaves[..2] };
            assert!(leaves.iter().all(|x| x.grad().kind() == Kind::Float));
            assert_grads_close(&what, leaves, &expected_leaves, tolerance);
        }
    }
}

#[test]
fn a_row_of_a_linear_layer_is_bit_identical_for_any_other_rows_and_number_of_threads() {
    // There is no such kernel without vector instructions.
    let same_bits = std::env::var("ATEN_CPU_CAPABILITY").as_deref() != Ok("default");
    // Depths with and without remaining lanes, and all heights of a tile.
    for [depth, width] in [[20, 31], [64, 48], [500, 1300]] {
        for ((kind, tolerance), most) in KINDS.into_iter().zip([64, 15]) {
            let of = |size: &[i64], seed| randn(size, seed).to_kind(kind);
            let (x, weight, bias) = (of(&[most, depth], 1), of(&[width, depth], 2), of(&[width], 3));
            let linear = |x: &Tensor| tch_ext::linear(x, &weight, &weight, Some((&bias, &bias)), false);
            let all = linear(&x);
            let doubles = [&x, &weight, &bias].map(|x| x.to_kind(Kind::Double));
            let expected = doubles[0].linear(&doubles[1], Some(&doubles[2]));
            assert_close(&format!("{depth} to {width}, {kind:?}"), &all, &expected, tolerance);
            for (threads, (first, rows)) in (1..).zip([(most - 1, 1), (3, 2), (7, 3), (1, 4), (5, 7), (1, most - 1)]) {
                tch::set_num_threads(threads);
                let equal = bits(&linear(&x.narrow(0, first, rows))) == bits(&all.narrow(0, first, rows));
                assert!(equal || !same_bits, "{depth} to {width}, {kind:?}, {rows} rows");
            }
        }
    }
}

#[test]
fn frozen_weights_get_no_gradient() {
    let x = leaf(&randn(&[5, 8], 1), Kind::Float);
    let frozen = randn(&[8, 8], 2).to_kind(Kind::Float);
    let norm = Norm { eps: 1e-5, center: true, offset: 0.0 };
    let y = tch_ext::norm(norm, &x, &frozen.get(0), Some(&frozen.get(1)), Kind::Float);
    let y = tch_ext::linear(&y, &frozen, &frozen, None, false);
    tch_ext::backward(&y, &y.ones_like());
    assert!(x.grad().defined() && !frozen.grad().defined());
    assert!(!tch_ext::embedding(&frozen, &Tensor::from_slice(&[1i64])).requires_grad());
}

#[test]
fn an_embedding_accumulates_the_gradients_of_a_repeated_token() {
    let table = leaf(&randn(&[7, 5], 1), Kind::Float);
    let ids = Tensor::from_slice(&[3i64, 0, 3, 6, 3]);
    let grad = randn(&[5, 5], 2).to_kind(Kind::Float);
    let mut expected = table.zeros_like();
    for _ in 0..2 {
        let out = tch_ext::embedding(&table, &ids);
        assert_close("rows", &out, &table.index_select(0, &ids), 0.0);
        tch_ext::backward(&out, &grad);
        let _ = no_grad(|| expected.index_add_(0, &ids, &grad));
    }
    assert_close("gradient", &table.grad(), &expected, 1e-6);
}

#[test]
fn a_product_is_added_to_a_gradient_in_place() {
    let weight = leaf(&randn(&[4, 6], 1), Kind::Float);
    let (a, b) = (randn(&[4, 9], 2), randn(&[9, 6], 3));
    tch_ext::add_product_to_grad(&weight, &a.to_kind(Kind::Float), &b.to_kind(Kind::Float));
    let place = weight.grad().data_ptr();
    tch_ext::add_product_to_grad(&weight, &a.to_kind(Kind::BFloat16), &b.to_kind(Kind::BFloat16));
    assert_eq!(weight.grad().data_ptr(), place);
    assert_close("gradient", &weight.grad(), &(a.matmul(&b) * 2.0), 1e-2);
}

#[test]
fn a_bf16_product_larger_than_a_piece_is_added_completely() {
    let weight = leaf(&Tensor::zeros([1100, 2000], (Kind::Float, Device::Cpu)), Kind::Float);
    let (a, b) = (randn(&[1100, 3], 2).to_kind(Kind::BFloat16), randn(&[3, 2000], 3).to_kind(Kind::BFloat16));
    tch_ext::add_product_to_grad(&weight, &a, &b);
    assert_close("gradient", &weight.grad(), &a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double)), 1e-2);
}

/// The sizes need more than one tile of rows and of columns where operands are converted to f32.
#[test]
fn products_in_low_precision_are_summed_in_f32_and_rounded_once() {
    let [rows, depth, width] = [710, 3000, 400];
    for (kind, unit) in [(Kind::BFloat16, 2f64.powi(-8)), (Kind::Half, 2f64.powi(-11))] {
        let of = |size: &[i64], seed| randn(size, seed).to_kind(kind);
        let (x, stored, bias, grad) =
            (of(&[rows, depth], 1), of(&[width, depth], 2), of(&[width], 3), of(&[rows, width], 4));
        for transposed in [false, true] {
            let input = leaf(&x, kind);
            let used = if transposed { stored.tr().contiguous() } else { stored.copy() };
            let weight = leaf(&used, Kind::Float);
            let out = tch_ext::linear(&input, &weight, &used, Some((&bias, &bias)), transposed);
            tch_ext::backward(&out, &grad);
            let [x, stored, bias, grad] = [&x, &stored, &bias, &grad].map(|x| x.to_kind(Kind::Double));
            let of_weight = grad.tr().matmul(&x);
            for (what, found, expected) in [
                ("output", out, x.linear(&stored, Some(&bias))),
                ("gradient of the input", input.grad(), grad.matmul(&stored)),
                ("gradient of the weight", weight.grad(), if transposed { of_weight.tr() } else { of_weight }),
            ] {
                let excess = (found.detach().to_kind(Kind::Double) - &expected).abs() - expected.abs() * unit;
                let excess = excess.max().double_value(&[]);
                assert!(excess < 1e-3, "{what}, {kind:?}, transposed {transposed}: {excess:e} more than a rounding");
            }
        }
    }
}

/// The sizes need several pieces of the input and of the gradient, of unequal numbers of rows.
#[test]
fn an_adapter_of_many_rows_is_converted_by_pieces_and_its_gradients_are_whole() {
    let [rows, depth, width, r] = [700, 3000, 1000, 4];
    for (kind, tolerance) in KINDS {
        let x = leaf(&randn(&[rows, depth], 1), kind);
        let used = (randn(&[width, depth], 2) * 0.02).to_kind(kind);
        let low = [leaf(&(randn(&[r, depth], 3) * 0.02), Kind::Float), leaf(&randn(&[width, r], 4), Kind::Float)];
        let exact = doubles(&[x.copy(), low[0].copy(), low[1].copy()]);
        let out = tch_ext::adapted_linear(&x, &used, None, false, LowRank { a: &low[0], b: &low[1], scale: 0.5 });
        let plain = exact[0].matmul(&used.to_kind(Kind::Double).tr());
        let expected = plain + exact[0].matmul(&exact[1].tr()).matmul(&exact[2].tr()) * 0.5;
        assert_close(&format!("{kind:?}"), &out, &expected, tolerance);
        let gradient = randn(&[rows, width], 5).to_kind(kind);
        tch_ext::backward(&out, &gradient);
        (expected * gradient.to_kind(Kind::Double)).sum(Kind::Double).backward();
        let [a, b] = low;
        assert_grads_close(&format!("{kind:?}"), &[x, a, b], &exact, tolerance);
    }
}

#[test]
fn branches_are_added_to_the_residual_stream_and_receive_its_gradient() {
    for (kind, tolerance) in KINDS {
        for two in [false, true] {
            let x = leaf(&randn(&[3, 700], 1), Kind::Float);
            let (a, b) = (leaf(&randn(&[3, 700], 2), kind), leaf(&randn(&[3, 700], 3), kind));
            let out = tch_ext::residual(&x, &a, two.then_some(&b));
            let expected = x.to_kind(Kind::Double) + a.to_kind(Kind::Double);
            let expected = if two { expected + b.to_kind(Kind::Double) } else { expected };
            assert_eq!(out.kind(), Kind::Float);
            assert_close("sum", &out, &expected, 1e-6);
            let grad = randn(&[3, 700], 4).to_kind(Kind::Float);
            tch_ext::backward(&out, &grad);
            assert_close("stream", &x.grad(), &grad, 0.0);
            assert_close("branch", &a.grad(), &grad, tolerance);
            assert_eq!(b.grad().defined(), two);
        }
    }
}

#[test]
fn heads_are_rotated_in_part_and_their_gradient_back() {
    for (kind, tolerance) in KINDS {
        // The first entries of each head, whole or in part; the others are copied.
        for (entries, parts, head_dim, dim) in [(3, 2, 16, 8), (3, 2, 8, 8), (1, 1, 16, 4), (1, 1, 8, 8)] {
            let x = leaf(&randn(&[5, 2, entries, head_dim], 1), kind);
            let angles = randn(&[5, dim / 2], 2).to_kind(Kind::Float);
            let (cos, sin) = (angles.cos(), angles.sin());
            let wide = leaf(&x, Kind::Double);
            let [c, s] = [&cos, &sin].map(|x| x.to_kind(Kind::Double).view([5, 1, 1, dim / 2]));
            let turned = wide.narrow(2, 0, parts).narrow(3, 0, dim);
            let (a, b) = (turned.narrow(3, 0, dim / 2), turned.narrow(3, dim / 2, dim / 2));
            let turned = Tensor::cat(&[&a * &c - &b * &s, &b * &c + &a * &s], 3);
            let turned = Tensor::cat(&[turned, wide.narrow(2, 0, parts).narrow(3, dim, head_dim - dim)], 3);
            let expected = Tensor::cat(&[turned, wide.narrow(2, parts, entries - parts)], 2);
            let found = tch_ext::rotate(&x, (&cos, &sin), parts, kind);
            let what = format!("{kind:?}, {parts} of {entries}, {dim} of {head_dim}");
            assert_eq!(found.kind(), kind);
            assert_close(&what, &found, &expected, tolerance);
            let grad = randn(&[5, 2, entries, head_dim], 3).to_kind(kind);
            tch_ext::backward(&found, &grad);
            tch_ext::backward(&expected, &grad.to_kind(Kind::Double));
            assert_close(&format!("{what}: gradient"), &x.grad(), &wide.grad(), tolerance);
        }
    }
}

#[test]
fn padding_after_the_last_sequence_has_zero_output_and_gradient() {
    let attention = attention_of(4, 4, 8);
    let starts = [0, 5, 12];
    let inputs = projections(&attention, Layout::Three, 20, Kind::Float);
    let short: Vec<_> = inputs.iter().map(|x| leaf(&x.narrow(0, 0, 12), Kind::Float)).collect();
    let (padded, alone) = (
        tch_ext::attention(&attention, &inputs, None, &starts, None),
        tch_ext::attention(&attention, &short, None, &starts, None),
    );
    assert_close("output", &padded.narrow(0, 0, 12), &alone, 0.0);
    assert_eq!(padded.narrow(0, 12, 8).abs().max().double_value(&[]), 0.0);
    let grad = randn(&[20, 32], 9).to_kind(Kind::Float);
    tch_ext::backward(&padded, &grad);
    tch_ext::backward(&alone, &grad.narrow(0, 0, 12).contiguous());
    for (padded, alone) in inputs.iter().zip(&short) {
        assert_close("gradient", &padded.grad().narrow(0, 0, 12), &alone.grad(), 0.0);
        assert_eq!(padded.grad().narrow(0, 12, 8).abs().max().double_value(&[]), 0.0);
    }
}

// --- Logits ---------------------------------------------------------------------------------------------------------

const TEMPERATURE: f64 = 0.7;

/// Returns logits, a third of them -inf, and targets with finite logits, the first and the last token among them.
fn logits_and_targets(rows: i64, vocab: i64, kind: Kind) -> (Tensor, Tensor) {
    let logits = randn(&[rows, vocab], vocab as u64) * 3.0;
    let places = Tensor::arange(vocab, (Kind::Int64, Device::Cpu));
    let hidden = places.remainder(3).eq(1).logical_and(&places.ne(vocab - 1));
    let targets: Vec<i64> = (0..rows).map(|row| [0, vocab - 1, vocab / 2 / 3 * 3][row as usize % 3]).collect();
    (logits.masked_fill(&hidden, f64::NEG_INFINITY).to_kind(kind), Tensor::from_slice(&targets))
}

#[test]
fn statistics_of_logits_and_their_gradient_match_autograd() {
    let rows = 5;
    for vocab in [1, 5, 1000, 1024, 1025, 5000] {
        for (kind, tolerance) in KINDS {
            let what = format!("vocabulary {vocab}, {kind:?}");
            let (mut logits, targets) = logits_and_targets(rows, vocab, kind);
            let expected = leaf(&logits, Kind::Double);
            let log_softmax = (&expected / TEMPERATURE).log_softmax(-1, Kind::Double);
            let logprobs = log_softmax.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
            let lse = (&expected / TEMPERATURE).logsumexp([-1].as_slice(), false);
            let weighted = (log_softmax.exp() * &log_softmax).nan_to_num(0.0, None, None);
            let entropy = -weighted.sum_dim_intlist([-1].as_slice(), false, Kind::Double);

            let stats = tch_ext::logits_stats(&logits, TEMPERATURE, &targets, true);
            // The kernel's sums are f32 for every dtype of the logits.
            assert_close(&what, &stats.logprobs, &logprobs, 1e-5);
            assert_close(&what, &stats.lse, &lse, 1e-5);
            assert_close(&what, &stats.entropy.expect("entropy"), &entropy, 1e-5);
            let without = tch_ext::logits_stats(&logits, TEMPERATURE, &targets, false);
            assert!(without.entropy.is_none());
            assert_eq!(bits(&without.logprobs), bits(&stats.logprobs), "{what}");

            let coefficients = randn(&[rows], 3).to_kind(Kind::Float);
            tch_ext::backward(&logprobs, &coefficients.to_kind(Kind::Double));
            tch_ext::logits_gradient(&mut logits, TEMPERATURE, &targets, &stats.lse, &coefficients, None);
            assert_close(&what, &logits, &expected.grad(), tolerance);
        }
    }
}

#[test]
fn the_gradient_of_log_probabilities_and_entropies_matches_autograd() {
    let rows = 5;
    for vocab in [1, 5, 1000, 1024, 1025, 5000] {
        for (kind, tolerance) in KINDS {
            let what = format!("vocabulary {vocab}, {kind:?}");
            let (mut logits, targets) = logits_and_targets(rows, vocab, kind);
            // Autograd needs finite logits for probabilities of 0: 0 * -inf is NaN.
            let expected = leaf(&logits.clamp_min(-1e4), Kind::Double);
            let log_softmax = (&expected / TEMPERATURE).log_softmax(-1, Kind::Double);
            let logprobs = log_softmax.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
            let entropy = -(log_softmax.exp() * &log_softmax).sum_dim_intlist([-1].as_slice(), false, Kind::Double);
            let (of_logprobs, of_entropy) = (randn(&[rows], 3), randn(&[rows], 4));
            (logprobs * &of_logprobs + entropy * &of_entropy).sum(Kind::Double).backward();

            let stats = tch_ext::logits_stats(&logits, TEMPERATURE, &targets, true);
            let of_logprobs = of_logprobs.to_kind(Kind::Float);
            let of_entropy = of_entropy.to_kind(Kind::Float);
            let entropy = Some((stats.entropy.as_ref().expect("entropy"), &of_entropy));
            tch_ext::logits_gradient(&mut logits, TEMPERATURE, &targets, &stats.lse, &of_logprobs, entropy);
            assert_close(&what, &logits, &expected.grad(), tolerance);
        }
    }
}

#[test]
fn an_entropy_coefficient_of_0_leaves_the_gradient_bit_identical() {
    for (kind, _) in KINDS {
        let (logits, targets) = logits_and_targets(4, 1025, kind);
        let stats = tch_ext::logits_stats(&logits, TEMPERATURE, &targets, true);
        let zeros = stats.lse.zeros_like();
        let entropies = Some((stats.entropy.as_ref().expect("entropy"), &zeros));
        let [with, without] = [entropies, None].map(|entropy| {
            let mut logits = logits.copy();
            tch_ext::logits_gradient(&mut logits, TEMPERATURE, &targets, &stats.lse, &stats.logprobs, entropy);
            bits(&logits)
        });
        assert!(with == without, "{kind:?}");
    }
}

#[test]
fn draws_on_a_grid_sample_every_token_in_proportion_to_its_probability() {
    const DRAWS: i64 = 4000;
    let draws: Vec<f64> = (0..DRAWS).map(|i| (i as f64 + 0.5) / DRAWS as f64).collect();
    for vocab in [1, 5, 1000, 1024, 1025, 5000] {
        for (kind, _) in KINDS {
            let what = format!("vocabulary {vocab}, {kind:?}");
            let (logits, _) = logits_and_targets(1, vocab, kind);
            let log_softmax = (logits.to_kind(Kind::Double) / TEMPERATURE).log_softmax(-1, Kind::Double).squeeze_dim(0);
            let rows = logits.expand([DRAWS, vocab], false).contiguous();
            let (tokens, logprobs) = tch_ext::logits_sample(&rows, TEMPERATURE, Some(&draws));
            let tokens = Tensor::from_slice(&tokens);
            assert_close(&what, &Tensor::from_slice(&logprobs), &log_softmax.index_select(0, &tokens), 1e-5);
            let counts = tokens.bincount::<Tensor>(None, vocab).to_kind(Kind::Double);
            let excess = (counts - log_softmax.exp() * DRAWS as f64).abs().max().double_value(&[]);
            assert!(excess < 1.1, "{what}: {excess} draws too many or too few");
            // The cumulative distribution is inverted: larger draws return later tokens.
            assert!(bool::try_from((tokens.i(1..) - tokens.i(..DRAWS - 1)).ge(0).all()).unwrap(), "{what}");
        }
    }
}

/// Cases are logits, draw, token. Log-probabilities match the softmax, and are not finite if a logit is not.
#[test]
fn sampling_is_correct_at_the_edges() {
    const NEVER: f32 = f32::NEG_INFINITY;
    let below_one = 1.0 - f64::EPSILON / 2.0;
    let far = |x: f32| [vec![NEVER; 2000], vec![0.0, x], vec![NEVER; 2000]].concat();
    let cases = [
        (vec![NEVER, 1.0, 1.0, NEVER], Some(0.0), 1),
        (vec![NEVER, 1.0, 1.0, NEVER], Some(below_one), 2),
        (vec![NEVER, 1.0, 1.0, NEVER], Some(1.0), 2),
        (vec![1.0, 2.0, 2.0, 2.0], None, 1),
        (far(0.0), Some(0.0), 2000),
        (far(0.0), Some(0.25), 2000),
        (far(0.0), Some(0.5), 2001),
        (far(0.0), Some(below_one), 2001),
        (far(0.0), None, 2000),
        (far(-200.0), Some(below_one), 2000),
        (far(5.0), None, 2001),
    ];
    for (logits, draw, token) in cases {
        for (kind, _) in KINDS {
            let row = Tensor::from_slice(&logits).to_kind(kind).unsqueeze(0);
            let (tokens, logprobs) = tch_ext::logits_sample(&row, 1.0, draw.as_ref().map(std::slice::from_ref));
            assert_eq!(tokens, [token], "{} logits, {kind:?}, {draw:?}", logits.len());
            let expected = row.to_kind(Kind::Double).log_softmax(-1, Kind::Double).double_value(&[0, token]);
            assert!((f64::from(logprobs[0]) - expected).abs() < 1e-6, "{} is not {expected}", logprobs[0]);
        }
    }
    for bad in [f32::NAN, f32::INFINITY, NEVER] {
        for place in [0, 1023, 1024, 2499] {
            let mut logits = vec![if bad == NEVER { bad } else { 0.5 }; 2500];
            logits[place] = bad;
            let row = Tensor::from_slice(&logits).unsqueeze(0);
            for draw in [None, Some(0.0), Some(0.5), Some(below_one)] {
                let (tokens, logprobs) = tch_ext::logits_sample(&row, 1.0, draw.as_ref().map(std::slice::from_ref));
                assert!((0..2500).contains(&tokens[0]), "{bad} at {place}, {draw:?}: token {}", tokens[0]);
                assert!(!logprobs[0].is_finite(), "{bad} at {place}, {draw:?}: log-probability {}", logprobs[0]);
            }
            let stats = tch_ext::logits_stats(&row, 1.0, &Tensor::from_slice(&[7i64]), true);
            assert!(!stats.logprobs.double_value(&[0]).is_finite(), "{bad} at {place}");
        }
    }
}

// --- Threads and instruction sets -----------------------------------------------------------------------------------

/// Bytes of what all kernels give; those of the gradients of norms' weights last.
fn everything(kind: Kind) -> Vec<Vec<u8>> {
    let starts = starts(&LENS);
    let tokens = starts[LENS.len()];
    let attention = Attention { kv_heads: 2, ..attention_of(4, 4, 20) };
    let inputs = projections(&attention, Layout::Three, tokens, kind);
    let out = tch_ext::attention(&attention, &inputs, angles(tokens, 5).as_ref(), &starts, None);
    tch_ext::backward(&out, &randn(&[tokens, 80], 9).to_kind(kind));

    let mut cached: Vec<_> =
        inputs[1..].iter().map(|_| randn(&[LENS.len() as i64 * 140, 40], 4).to_kind(kind)).collect();
    let [keys, values] = cached.as_mut_slice() else { unreachable!() };
    let one_each: Vec<_> = inputs.iter().map(|x| x.detach().narrow(0, 0, LENS.len() as i64)).collect();
    let step = tch_ext::attention_step(&attention, &one_each, None, &LENS, Cache { keys, values, capacity: 140 });

    let (mut logits, targets) = logits_and_targets(7, 5000, kind);
    let draws = [0.1, 0.9, 0.3, 0.4, 0.0, 0.6, 0.7];
    let (sampled, logprobs) = tch_ext::logits_sample(&logits, TEMPERATURE, Some(&draws));
    let stats = tch_ext::logits_stats(&logits, TEMPERATURE, &targets, true);
    let entropy = stats.entropy.as_ref().map(|entropy| (entropy, &stats.lse));
    tch_ext::logits_gradient(&mut logits, TEMPERATURE, &targets, &stats.lse, &stats.logprobs, entropy);

    let norm_leaves: Vec<_> =
        [[100, 48].as_slice(), &[48], &[48]].map(|size| leaf(&randn(size, 6), Kind::Float)).into();
    let norm = Norm { eps: 1e-5, center: true, offset: 0.0 };
    let normal = tch_ext::norm(norm, &norm_leaves[0], &norm_leaves[1], Some(&norm_leaves[2]), kind);
    tch_ext::backward(&normal, &randn(&[100, 48], 7).to_kind(kind));

    let mut all = vec![out, step, logits, stats.logprobs, stats.lse, normal];
    all.extend([Tensor::from_slice(&sampled), Tensor::from_slice(&logprobs)]);
    all.extend(stats.entropy);
    all.extend(inputs.iter().chain(&norm_leaves).map(Tensor::grad));
    all.iter().map(bits).collect()
}

/// The tensors of a quantized weight: codes, and with four bits a map, codes of scales, and the map and scales of these.
struct Weight {
    widths: [i64; 2],
    block: i64,
    codes: Tensor,
    scales: Tensor,
    four: Option<[Tensor; 3]>,
}

impl Weight {
    fn new(widths: [i64; 2], block: Option<i64>, seed: u64) -> Self {
        let numel = widths[0] * widths[1];
        let bytes = |n: i64, seed| (randn(&[n], seed) * 1000.0).remainder(256.0).to_kind(Kind::Uint8);
        let Some(block) = block else {
            let codes = (bytes(numel, seed).to_kind(Kind::Float) - 128.0).to_kind(Kind::Int8).view(widths);
            let scales = (randn(&[widths[0]], seed + 1).abs() / 100.0).to_kind(Kind::Float);
            return Self { widths, block: 0, codes, scales, four: None };
        };
        let blocks = (numel + block - 1) / block;
        let floats = |n, seed| randn(&[n], seed).to_kind(Kind::Float);
        let four = [floats(16, seed + 2), floats(256, seed + 3) * 0.1, floats((blocks + 255) / 256, seed + 4)];
        Self { widths, block, codes: bytes((numel + 1) / 2, seed), scales: bytes(blocks, seed + 1), four: Some(four) }
    }

    fn view(&self) -> Quantized<'_> {
        let nested = self.four.as_ref().map(|[_, map, scales]| NestedScales { map, scales, block: 256, offset: 0.7 });
        let map = self.four.as_ref().map(|[map, ..]| map);
        Quantized { widths: self.widths, codes: &self.codes, map, scales: &self.scales, block: self.block, nested }
    }
}

/// Widths whose rows are whole blocks, are not, and end in the middle of a byte.
const WIDTHS: [[i64; 2]; 5] = [[70, 128], [33, 48], [5, 13], [1, 1], [300, 2048]];

#[test]
fn values_of_quantized_weights_are_the_same_bits_as_by_libtorchs_operations() {
    for widths in WIDTHS {
        for block in [Some(32), Some(64), Some(4096), None] {
            let weight = Weight::new(widths, block, 91);
            for (kind, _) in KINDS {
                let [found, plain] = [false, true].map(|plain| tch_ext::dequantize(&weight.view(), kind, plain));
                assert_eq!((found.kind(), found.size()), (kind, widths.to_vec()));
                assert!(found.equal(&plain), "{widths:?}, blocks of {block:?}, {kind:?}");
            }
        }
    }
}

#[test]
fn a_quantized_layer_is_the_layer_of_its_values_for_few_rows_and_many() {
    for widths in WIDTHS {
        for block in [Some(64), None] {
            let weight = Weight::new(widths, block, 17);
            let [width_out, width_in] = widths;
            for (kind, tolerance) in KINDS {
                let values = tch_ext::dequantize(&weight.view(), kind, true);
                let bias = randn(&[width_out], 5).to_kind(kind);
                for rows in [1, 2, 3, 4, 7, 8, 9, 40] {
                    let what = format!("{widths:?}, blocks of {block:?}, {kind:?}, {rows} rows");
                    let x = leaf(&randn(&[rows, width_in], 3), kind);
                    let low =
                        [leaf(&randn(&[2, width_in], 7), Kind::Float), leaf(&randn(&[width_out, 2], 8), Kind::Float)];
                    let exact = doubles(&[x.copy(), low[0].copy(), low[1].copy()]);
                    let adapter = Some(LowRank { a: &low[0], b: &low[1], scale: 0.5 });
                    let out = tch_ext::quantized_linear(&x, &weight.view(), Some(&bias), adapter, kind);
                    let plain = exact[0].linear(&values.to_kind(Kind::Double), Some(&bias.to_kind(Kind::Double)));
                    let expected = plain + exact[0].matmul(&exact[1].tr()).matmul(&exact[2].tr()) * 0.5;
                    assert_close(&what, &out, &expected, tolerance);
                    let gradient = randn(&[rows, width_out], 4).to_kind(kind);
                    tch_ext::backward(&out, &gradient);
                    (expected * gradient.to_kind(Kind::Double)).sum(Kind::Double).backward();
                    assert_grads_close(
                        &what,
                        &[x.shallow_clone(), low[0].shallow_clone(), low[1].shallow_clone()],
                        &exact,
                        3.0 * tolerance,
                    );
                    let alone = no_grad(|| tch_ext::quantized_linear(&x, &weight.view(), None, None, kind));
                    let of_values = no_grad(|| tch_ext::linear(&x, &values, &values, None, false));
                    assert_close(&what, &alone, &of_values, if kind == Kind::Float { 1e-6 } else { tolerance });
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "quantized weight [4, 32]: codes")]
fn tensors_of_a_quantized_weight_that_do_not_fit_are_an_error_and_not_a_crash() {
    let mut weight = Weight::new([4, 32], Some(64), 1);
    weight.codes = weight.codes.narrow(0, 0, 63);
    drop(tch_ext::dequantize(&weight.view(), Kind::Float, false));
}

#[test]
fn a_quantized_weight_of_no_columns_gives_its_bias() {
    let bias = randn(&[4], 1).to_kind(Kind::Float);
    for bits in [Some(64), None] {
        let weight = Weight::new([4, 0], bits, 1);
        let x = Tensor::zeros([2, 0], (Kind::Float, Device::Cpu));
        let out = no_grad(|| tch_ext::quantized_linear(&x, &weight.view(), Some(&bias), None, Kind::Float));
        assert_eq!(out, bias.expand([2, 4], false));
    }
}

// --- Optimizer steps ------------------------------------------------------------------------------------------------

const STEP: i64 = 3;
const ADAMW: AdamW = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-8 };

/// Parameter and moments after a step of AdamW of one number, in the arithmetic of the kernels.
fn adamw([p, g, m, v]: [f32; 4]) -> [f32; 3] {
    let AdamW { lr, beta1, beta2, weight_decay, eps } = ADAMW;
    let correction = |beta: f64| 1.0 - beta.powf(STEP as f64);
    let m = m * beta1 as f32 + (1.0 - beta1) as f32 * g;
    let v = v * beta2 as f32 + (1.0 - beta2) as f32 * g * g;
    let denominator = v.sqrt() / correction(beta2).sqrt() as f32 + eps as f32;
    let p = p * (1.0 - lr * weight_decay) as f32 - (lr / correction(beta1)) as f32 * m / denominator;
    [p, m, v]
}

fn numbers_of(x: &Tensor) -> Vec<f32> {
    Vec::try_from(x.to_kind(Kind::Float)).unwrap()
}

/// A moment in 8 bits whose codes are those of a ramp, with tables of a map from -1, or 0, to 1.
struct Blocked {
    codes: Tensor,
    absmax: Tensor,
    map: Tensor,
    middles: Tensor,
    least_codes: Tensor,
}

impl Blocked {
    fn new(len: i64, signed: bool, absmax: f64) -> Self {
        // Values are close to each other around 0, as in bitsandbytes' maps.
        let map: Vec<f32> = (0..256)
            .map(|code| if signed { (code as f32 - 127.0) / 128.0 } else { code as f32 / 255.0 })
            .map(|x| x * x * x)
            .collect();
        let middles: Vec<f32> = map.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).chain([f32::INFINITY]).collect();
        let least = |bits: u32| f32::from_bits(if bits >= 1 << 15 { bits << 16 | 0xffff } else { bits << 16 });
        let code = |bits: u32| middles.partition_point(|&middle| middle < least(bits)) as u8;
        Self {
            codes: (Tensor::arange(len, (Kind::Int64, Device::Cpu)) * 37).remainder(256).to_kind(Kind::Uint8),
            absmax: Tensor::full([(len + 255) / 256], absmax, (Kind::Float, Device::Cpu)),
            least_codes: Tensor::from_slice(&(0..1 << 16).map(code).collect::<Vec<_>>()),
            map: Tensor::from_slice(&map),
            middles: Tensor::from_slice(&middles),
        }
    }

    fn view(&mut self) -> BlockedMoment<'_> {
        let Self { codes, absmax, map, middles, least_codes } = self;
        BlockedMoment { codes, absmax, map, middles, least_codes }
    }

    fn values(&self) -> Tensor {
        let of_blocks = self.absmax.repeat_interleave_self_int(256, 0, None).narrow(0, 0, self.codes.numel() as i64);
        self.map.index_select(0, &self.codes.to_kind(Kind::Int)) * of_blocks
    }
}

#[test]
fn an_adamw_step_with_moments_in_8_bits_stores_the_nearest_values_of_each_block() {
    for len in [1, 7, 255, 256, 257, 5000] {
        let mut param = randn(&[len], 1).to_kind(Kind::Float);
        let grad = randn(&[len], 2).to_kind(Kind::Float);
        let mut moments = [Blocked::new(len, true, 1.5), Blocked::new(len, false, 0.2)];
        let [first, second] = moments.each_ref().map(Blocked::values);
        let before = [&param, &grad, &first, &second].map(numbers_of);
        let expected: Vec<_> = (0..len as usize).map(|i| adamw(before.each_ref().map(|x| x[i]))).collect();
        let version = param.internal_version();
        let views = moments.each_mut().map(Blocked::view);
        tch_ext::adamw_blocked(&mut param, &grad, views, STEP, ADAMW).unwrap();
        assert!(param.internal_version() > version, "cached copies have to be found stale");
        assert_eq!(numbers_of(&param), expected.iter().map(|new| new[0]).collect::<Vec<_>>(), "{len} numbers");
        for (which, moment) in moments.iter().enumerate() {
            let (map, middles) = (numbers_of(&moment.map), numbers_of(&moment.middles));
            let codes = Vec::<u8>::try_from(&moment.codes).unwrap();
            let tops = numbers_of(&moment.absmax);
            for (block, new) in expected.chunks(256).enumerate() {
                let top = new.iter().fold(0.0f32, |top, new| top.max(new[1 + which].abs()));
                assert_eq!(tops[block], top, "{len} numbers, block {block}");
                for (i, new) in new.iter().enumerate() {
                    let (number, code) = (new[1 + which] / top, codes[block * 256 + i]);
                    let nearest = middles.partition_point(|&middle| middle < number);
                    assert_eq!(usize::from(code), nearest, "{number} of {len} numbers is {}", map[usize::from(code)]);
                }
            }
        }
    }
}

#[test]
fn a_block_of_zeros_stays_one() {
    let mut param = Tensor::ones([300], (Kind::Float, Device::Cpu));
    let mut moments = [Blocked::new(300, true, 0.0), Blocked::new(300, false, 0.0)];
    let views = moments.each_mut().map(Blocked::view);
    let (grad, settings) = (param.zeros_like(), AdamW { weight_decay: 0.0, ..ADAMW });
    tch_ext::adamw_blocked(&mut param, &grad, views, STEP, settings).unwrap();
    assert_eq!(param, param.ones_like());
    assert!(moments.iter().all(|moment| moment.values().abs().max().double_value(&[]) == 0.0));
}

/// Words of 16 bits of SplitMix64 with this key, each of whose numbers is four.
fn random_words(key: u64) -> impl Iterator<Item = u32> {
    (1u64..).flat_map(move |i| {
        let x = key.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let x = x ^ (x >> 31);
        [0, 16, 32, 48].map(|shift| (x >> shift) as u32 & 0xffff)
    })
}

#[test]
fn an_adamw_step_in_bf16_rounds_each_number_by_the_word_of_its_place() {
    let keys = [7, 1 << 40, u64::MAX - 5];
    for len in [1, 5, 1023, 1024, 1026, 9001] {
        let bf16 = |seed| randn(&[len], seed).to_kind(Kind::BFloat16);
        let (mut param, grad, mut first, mut second) = (bf16(1), bf16(2), bf16(3), bf16(4).abs());
        let before = [&param, &grad, &first, &second].map(numbers_of);
        tch_ext::adamw_rounded(&mut param, &grad, [&mut first, &mut second], keys, STEP, ADAMW).unwrap();
        let found = [&param, &first, &second].map(numbers_of);
        let mut words = keys.map(random_words);
        for i in 0..len as usize {
            let new = adamw(before.each_ref().map(|x| x[i]));
            for (which, new) in new.into_iter().enumerate() {
                let word = words[which].next().unwrap();
                let rounded = f32::from_bits((new.to_bits() + word) & !0xffff);
                assert_eq!(found[which][i], rounded, "number {i} of {len} of tensor {which}: {new} and {word}");
            }
        }
    }
}

#[test]
fn tensors_of_an_optimizer_step_that_do_not_fit_are_an_error_and_not_a_crash() {
    let zeros = |len, kind| Tensor::zeros([len], (kind, Device::Cpu));
    let mut param = zeros(600, Kind::Float);
    let mut step = |grad: i64, codes: i64, kind| {
        let mut moments = [Blocked::new(codes, true, 1.0), Blocked::new(600, false, 1.0)];
        let views = moments.each_mut().map(Blocked::view);
        tch_ext::adamw_blocked(&mut param, &zeros(grad, kind), views, STEP, ADAMW).unwrap_err()
    };
    assert!(step(599, 600, Kind::Float).contains("gradient: expected 600"));
    assert!(step(600, 599, Kind::Float).contains("codes of a moment: expected 600"));
    assert!(step(600, 600, Kind::BFloat16).contains("gradient: expected 600"));
    let mut bf16 = [(); 3].map(|()| zeros(8, Kind::BFloat16));
    let [param, first, second] = &mut bf16;
    let error = tch_ext::adamw_rounded(param, &zeros(8, Kind::Float), [first, second], [0; 3], STEP, ADAMW);
    assert!(error.unwrap_err().contains("gradient: expected 8 contiguous elements of BFloat16"));
}

#[test]
fn products_and_windows_of_other_shapes_are_errors_and_not_crashes() {
    let zeros = |shape: [i64; 2], kind| Tensor::zeros(shape, (kind, Device::Cpu));
    let message_of = |f: &dyn Fn()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_err();
        panic.downcast_ref::<String>().unwrap().clone()
    };
    for (kind, grad, product) in
        [(Kind::Float, [4, 4], [8, 8]), (Kind::BFloat16, [4, 4], [8, 8]), (Kind::BFloat16, [8, 8], [4, 4])]
    {
        let leaf = zeros(grad, Kind::Float).set_requires_grad(true);
        let (a, b) = (zeros([product[0], 3], kind), zeros([3, product[1]], kind));
        let message = message_of(&|| tch_ext::add_product_to_grad(&leaf, &a, &b));
        assert!(message.contains(&format!("gradient {grad:?} on cpu: a product of [{}, 3]", product[0])), "{message}");
    }
    let x = zeros([3, 12], Kind::Float);
    for (window, causal) in [(-1000, true), (2, false)] {
        let attention = Attention { window: Some(window), causal, ..attention_of(1, 1, 4) };
        let message = message_of(&|| drop(tch_ext::attention(&attention, &[x.shallow_clone()], None, &[0, 3], None)));
        assert!(message.contains(&format!("a window of {window}")), "{message}");
    }
}

#[test]
fn gates_give_the_values_and_gradients_of_libtorchs_activations() {
    let apply = |activation: GatedActivation, x: &Tensor| match activation {
        GatedActivation::Gelu => x.gelu("none"),
        GatedActivation::GeluTanh => x.gelu("tanh"),
        GatedActivation::Silu => x.silu(),
        GatedActivation::Relu => x.relu(),
        GatedActivation::Sigmoid => x.sigmoid(),
    };
    let activations = [
        GatedActivation::Gelu,
        GatedActivation::GeluTanh,
        GatedActivation::Silu,
        GatedActivation::Relu,
        GatedActivation::Sigmoid,
    ];
    for (kind, tolerance) in KINDS {
        // Half of the columns of one matrix, as a joint projection has them; and rows that are no whole vectors, or several pieces.
        for width in [1, 15, 16, 70, 1030] {
            let joint = leaf(&(randn(&[7, 2 * width], 5) * 3.0), kind);
            let exact = doubles(std::slice::from_ref(&joint)).remove(0);
            let upstream = randn(&[7, width], 6).to_kind(kind);
            for activation in activations {
                let name = format!("{activation:?}, {kind:?}, {width}");
                let (parts, of_exact) = (joint.chunk(2, 1), exact.chunk(2, 1));
                let found = tch_ext::gated(&parts[0], Some(&parts[1]), activation);
                let expected = apply(activation, &of_exact[0]) * &of_exact[1];
                assert_close(&name, &found, &expected, tolerance);
                (found * &upstream).sum(Kind::Float).backward();
                (expected * upstream.to_kind(Kind::Double)).sum(Kind::Double).backward();
            }
            // The sum over the activations, as gradients are added.
            assert_grads_close(&format!("{kind:?}, {width}"), &[joint], &[exact], 2.0 * tolerance);
        }
    }
    let heads = leaf(&randn(&[3, 2, 5], 7), Kind::Float);
    let found = tch_ext::gated(&heads, Some(&heads), GatedActivation::Silu);
    assert_close("three dimensions", &found, &(heads.silu() * &heads), 1e-6);
    found.sum(Kind::Float).backward();
    assert_eq!(heads.grad().size(), [3, 2, 5]);
    let edges = Tensor::from_slice(&[f32::NAN, f32::INFINITY, -100.0, 100.0]).reshape([1, 4]);
    let found = tch_ext::gated(&edges, Some(&edges.ones_like()), GatedActivation::Silu);
    let found = Vec::<f32>::try_from(found.reshape([-1])).unwrap();
    assert!(found[0].is_nan() && found[1] == f32::INFINITY && found[2].abs() < 1e-30 && found[3] == 100.0, "{found:?}");
}

#[test]
fn the_same_bits_come_out_again_and_with_any_number_of_threads() {
    for (kind, _) in KINDS {
        let of_threads = [1, 2, 3].map(|threads| {
            tch::set_num_threads(threads);
            let first = everything(kind);
            assert!(first == everything(kind), "{kind:?}: not the same again with {threads} threads");
            first
        });
        // The gradients of a norm's weights are sums over the rows, cut by threads.
        let free = of_threads[0].len() - 2;
        for more in &of_threads[1..] {
            let differing: Vec<_> = (0..free).filter(|&i| more[i] != of_threads[0][i]).collect();
            assert!(differing.is_empty(), "{kind:?}: results {differing:?} differ with the number of threads");
        }
    }
}

#[test]
fn lesser_instruction_sets_pass_the_same_tests() {
    let program = std::env::current_exe().unwrap();
    for capability in ["avx2", "default"] {
        let mut run = std::process::Command::new(&program);
        run.args(["--skip", "lesser_instruction_sets"]).env("ATEN_CPU_CAPABILITY", capability);
        let output = run.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "with {capability}: {}\n{text}", output.status);
    }
}
