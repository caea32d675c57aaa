//! Compares values and gradients of the kernels of short convolutions and of the gated delta rule with one token after another in f64.
//!
//! The last test runs the others on smaller instruction sets.

use tch::{Device, Kind, Tensor, no_grad};
use tch_ext::{DeltaSizes, PackedRows, delta_rule, delta_rule_from, delta_step, gated_convolution, silu_convolution};

/// Lengths around the sizes of a chunk and of a block of its substitution.
const LENS: [i64; 7] = [1, 3, 16, 17, 63, 65, 130];

/// Sizes with several value heads for a key head, and with widths that are no multiple of a vector.
const SIZES: [DeltaSizes; 3] = [
    DeltaSizes { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 12 },
    DeltaSizes { key_heads: 1, value_heads: 1, key_dim: 16, value_dim: 16 },
    DeltaSizes { key_heads: 2, value_heads: 2, key_dim: 37, value_dim: 70 },
];

fn starts(lens: &[i64]) -> Vec<i64> {
    let sums = lens.iter().scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

fn numbers(size: &[i64], seed: f64) -> Tensor {
    let count: i64 = size.iter().product();
    let places = Tensor::arange(count, (Kind::Double, Device::Cpu));
    ((&places * 12.9898 + seed).sin() * 43758.5453).frac().reshape(size) * 2.0
        - (places * 0.7 + seed).cos().reshape(size) * 0.5
}

fn leaf(x: &Tensor, kind: Kind) -> Tensor {
    x.detach().to_kind(kind).copy().set_requires_grad(true)
}

/// Compares the maximum difference, relative to the maximum expected magnitude or to 1.
fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let (found, expected) = (found.detach().to_kind(Kind::Double), expected.detach().to_kind(Kind::Double));
    let scale = expected.abs().max().double_value(&[]).max(1.0);
    let difference = (found - expected).abs().max().double_value(&[]) / scale;
    assert!(difference <= tolerance, "{what}: relative difference {difference:e}, expected at most {tolerance:e}");
}

/// The convolution of each sequence, one tap after another.
fn convolved(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, lens: &[i64]) -> Tensor {
    let (width, kernel) = (weight.size()[0], weight.size()[2]);
    let rows = x.narrow(0, 0, lens.iter().sum()).split_with_sizes(lens, 0).into_iter().map(|row| {
        let tokens = row.size()[0];
        let padded = row.tr().unsqueeze(0).constant_pad_nd([kernel - 1, 0]);
        let out = padded.conv1d(weight, bias, 1, 0, 1, width);
        out.squeeze_dim(0).tr().narrow(0, 0, tokens)
    });
    let out = Tensor::cat(&rows.collect::<Vec<_>>(), 0);
    out.constant_pad_nd([0, 0, 0, x.size()[0] - out.size()[0]])
}

#[test]
fn convolutions_give_the_values_and_gradients_of_libtorchs() {
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 2e-2)] {
        for (width, kernel) in [(5, 3), (64, 4), (70, 1), (130, 3)] {
            let (starts, tokens) = (starts(&LENS), LENS.iter().sum::<i64>() + 3);
            let x = numbers(&[tokens, 3 * width], 1.0).to_kind(kind);
            let (weight, bias) = (numbers(&[width, 1, kernel], 2.0), numbers(&[width], 3.0));
            let upstream = numbers(&[tokens, width], 4.0).to_kind(kind);
            let used: i64 = LENS.iter().sum();
            let mask = Tensor::arange(tokens, (Kind::Int64, Device::Cpu)).lt(used).to_kind(Kind::Double).unsqueeze(1);
            let run = |gated: bool, kind_of: Kind| {
                let own = if gated { x.shallow_clone() } else { x.narrow(1, 0, width) };
                let leaves = [
                    leaf(&own, if kind_of == Kind::Double { Kind::Double } else { kind }),
                    leaf(&weight, kind_of),
                    leaf(&bias, kind_of),
                ];
                let [x, weight, bias] = &leaves;
                let out = match (gated, kind_of) {
                    (true, Kind::Double) => {
                        let parts = x.chunk(3, 1);
                        let sum = convolved(&(&parts[0] * &parts[2]), weight, Some(bias), &LENS);
                        sum * &parts[1] * &mask
                    }
                    (false, Kind::Double) => convolved(x, weight, None, &LENS).silu() * &mask,
                    (true, _) => gated_convolution(x, weight, Some(bias), PackedRows::new(&starts)),
                    (false, _) => silu_convolution(x, weight, PackedRows::new(&starts)),
                };
                (&out * upstream.to_kind(out.kind())).sum(out.kind()).backward();
                let count = if gated { 3 } else { 2 };
                std::iter::once(out.detach()).chain(leaves[..count].iter().map(Tensor::grad)).collect::<Vec<_>>()
            };
            for gated in [true, false] {
                let (found, expected) = (run(gated, Kind::Float), run(gated, Kind::Double));
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert_close(
                        &format!("{kind:?}, {width} x {kernel}, gated {gated}, {i}"),
                        found,
                        expected,
                        tolerance,
                    );
                }
            }
        }
    }
}

/// The delta rule, one token after another: outputs `[N, value heads * value width]` and states.
fn one_by_one(sizes: DeltaSizes, [x, g, beta]: [&Tensor; 3], lens: &[i64], from: Option<&Tensor>) -> (Tensor, Tensor) {
    let DeltaSizes { key_heads, value_heads, key_dim, value_dim } = sizes;
    let keys = key_heads * key_dim;
    let unit = |x: &Tensor| x / ((x * x).sum_dim_intlist([-1i64].as_slice(), true, x.kind()) + 1e-6).sqrt();
    let heads = |x: &Tensor| {
        unit(&x.view([-1, key_heads, key_dim])).repeat_interleave_self_int(value_heads / key_heads, 1, None)
    };
    let q = heads(&x.narrow(1, 0, keys)) * (key_dim as f64).powf(-0.5);
    let k = heads(&x.narrow(1, keys, keys));
    let v = x.narrow(1, 2 * keys, value_heads * value_dim).view([-1, value_heads, value_dim]);
    let (mut outputs, mut states, mut token) = (Vec::new(), Vec::new(), 0);
    for (row, &len) in lens.iter().enumerate() {
        let mut state = match from {
            Some(from) => from.get(row as i64).to_kind(x.kind()),
            None => Tensor::zeros([value_heads, key_dim, value_dim], (x.kind(), Device::Cpu)),
        };
        for _ in 0..len {
            let column = |x: &Tensor| x.get(token).view([value_heads, 1, 1]);
            let decayed = &state * column(&g.exp());
            let known = k.get(token).unsqueeze(1).matmul(&decayed);
            let correction = (v.get(token).unsqueeze(1) - known) * column(beta);
            state = decayed + k.get(token).unsqueeze(2).matmul(&correction);
            outputs.push(q.get(token).unsqueeze(1).matmul(&state).view([-1]));
            token += 1;
        }
        states.push(state);
    }
    (Tensor::stack(&outputs, 0), Tensor::stack(&states, 0))
}

fn inputs(sizes: DeltaSizes, tokens: i64) -> [Tensor; 3] {
    let width = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim;
    let rates = |seed: f64| numbers(&[tokens, sizes.value_heads], seed);
    [numbers(&[tokens, width], 5.0), -rates(6.0).square() * 0.5, rates(7.0).sigmoid()].map(|x| x.to_kind(Kind::Float))
}

#[test]
fn the_delta_rule_gives_the_values_and_gradients_of_one_token_after_another() {
    for sizes in SIZES {
        let (starts, tokens) = (starts(&LENS), LENS.iter().sum());
        let upstream = numbers(&[tokens, sizes.value_heads * sizes.value_dim], 8.0);
        let inputs = inputs(sizes, tokens);
        let found = inputs.each_ref().map(|x| leaf(x, Kind::Float));
        let out = delta_rule(sizes, &found[0], &found[1], &found[2], PackedRows::new(&starts));
        (&out * upstream.to_kind(Kind::Float)).sum(Kind::Float).backward();
        let exact = inputs.each_ref().map(|x| leaf(x, Kind::Double));
        let (expected, states) = one_by_one(sizes, exact.each_ref(), &LENS, None);
        (&expected * &upstream).sum(Kind::Double).backward();
        assert_close(&format!("{sizes:?}"), &out, &expected, 1e-5);
        for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
            assert_close(&format!("{sizes:?}, gradient {i}"), &found.grad(), &exact.grad(), 2e-5);
        }
        let (again, end) = no_grad(|| delta_rule_from(sizes, &found[0], [&found[1], &found[2]], &starts, None));
        assert_eq!(again, out, "{sizes:?}");
        assert_close(&format!("{sizes:?}, states"), &end, &states, 1e-5);
    }
}

/// Lengths of parts, and the part that each continues.
const PARTS: [(i64, i64); 8] = [(70, -1), (5, 0), (2, 1), (130, 0), (1, 3), (3, -1), (1, 5), (64, 5)];

/// Parts that continue others, as whole sequences.
struct Whole {
    starts: Vec<i64>,
    parents: Vec<i64>,
    /// Lengths of the sequences that end with each part.
    lens: Vec<i64>,
    /// The token of the parts of each token of these sequences, and of each token of the parts one of these sequences.
    expand: Tensor,
    collapse: Tensor,
}

impl Whole {
    fn new() -> Self {
        let starts = starts(&PARTS.map(|(len, _)| len));
        let (mut lens, mut expand, mut collapse) = (Vec::new(), Vec::new(), Vec::new());
        for (row, (len, _)) in PARTS.iter().enumerate() {
            let (mut tokens, mut part) = (Vec::new(), row as i64);
            while part >= 0 {
                let at = part as usize;
                tokens.splice(0..0, starts[at]..starts[at + 1]);
                part = PARTS[at].1;
            }
            let end = (expand.len() + tokens.len()) as i64;
            collapse.extend(end - len..end);
            lens.push(tokens.len() as i64);
            expand.extend(tokens);
        }
        let parents = PARTS.map(|(_, parent)| parent).to_vec();
        Self { starts, parents, lens, expand: Tensor::from_slice(&expand), collapse: Tensor::from_slice(&collapse) }
    }

    fn packed(&self) -> PackedRows<'_> {
        PackedRows { starts: &self.starts, parents: Some(&self.parents) }
    }

    fn tokens(&self) -> i64 {
        self.starts[PARTS.len()]
    }
}

#[test]
fn parts_that_continue_others_have_the_values_and_gradients_of_whole_sequences() {
    let whole = Whole::new();
    let tokens = whole.tokens();
    let expanded = |x: &Tensor| x.index_select(0, &whole.expand);
    for sizes in SIZES {
        let upstream = numbers(&[tokens, sizes.value_heads * sizes.value_dim], 8.0);
        let inputs = inputs(sizes, tokens);
        let found = inputs.each_ref().map(|x| leaf(x, Kind::Float));
        let out = delta_rule(sizes, &found[0], &found[1], &found[2], whole.packed());
        (&out * upstream.to_kind(Kind::Float)).sum(Kind::Float).backward();
        let exact = inputs.each_ref().map(|x| leaf(x, Kind::Double));
        let all = exact.each_ref().map(expanded);
        let expected = one_by_one(sizes, all.each_ref(), &whole.lens, None).0.index_select(0, &whole.collapse);
        (&expected * &upstream).sum(Kind::Double).backward();
        assert_close(&format!("{sizes:?}"), &out, &expected, 1e-5);
        for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
            assert_close(&format!("{sizes:?}, gradient {i}"), &found.grad(), &exact.grad(), 2e-5);
        }
    }
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 2e-2)] {
        for (width, kernel) in [(5, 3), (70, 4), (64, 1)] {
            let (weight, bias) = (numbers(&[width, 1, kernel], 2.0), numbers(&[width], 3.0));
            let upstream = numbers(&[tokens, width], 4.0).to_kind(kind);
            for gated in [true, false] {
                let x = numbers(&[tokens, if gated { 3 * width } else { width }], 1.0).to_kind(kind);
                let found = [leaf(&x, kind), leaf(&weight, Kind::Float), leaf(&bias, Kind::Float)];
                let exact = [leaf(&x, Kind::Double), leaf(&weight, Kind::Double), leaf(&bias, Kind::Double)];
                let all = expanded(&exact[0]);
                let (out, expected) = if gated {
                    let parts = all.chunk(3, 1);
                    let sum = convolved(&(&parts[0] * &parts[2]), &exact[1], Some(&exact[2]), &whole.lens);
                    (gated_convolution(&found[0], &found[1], Some(&found[2]), whole.packed()), sum * &parts[1])
                } else {
                    let sum = convolved(&all, &exact[1], None, &whole.lens);
                    (silu_convolution(&found[0], &found[1], whole.packed()), sum.silu())
                };
                let expected = expected.index_select(0, &whole.collapse);
                let name = format!("{kind:?}, {width} x {kernel}, gated {gated}");
                assert_close(&name, &out, &expected, tolerance);
                (&out * upstream.to_kind(out.kind())).sum(out.kind()).backward();
                (expected * upstream.to_kind(Kind::Double)).sum(Kind::Double).backward();
                for i in 0..if gated { 3 } else { 2 } {
                    assert_close(&format!("{name}, gradient {i}"), &found[i].grad(), &exact[i].grad(), tolerance);
                }
            }
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_any_company() {
    for sizes in SIZES {
        let tokens = LENS.iter().sum();
        let [x, g, beta] = inputs(sizes, tokens);
        let run = |first: i64, lens: &[i64]| {
            let count: i64 = lens.iter().sum();
            let leaves = [&x, &g, &beta].map(|x| leaf(&x.narrow(0, first, count), Kind::Float));
            let out = delta_rule(sizes, &leaves[0], &leaves[1], &leaves[2], PackedRows::new(&starts(lens)));
            out.square().sum(Kind::Float).backward();
            [out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()]
        };
        let together = run(0, &LENS);
        for (row, first) in starts(&LENS)[..LENS.len()].iter().enumerate() {
            let alone = run(*first, &LENS[row..=row]);
            for (alone, together) in alone.iter().zip(&together) {
                assert_eq!(*alone, together.narrow(0, *first, LENS[row]), "{sizes:?}, row {row}");
            }
        }
    }
}

#[test]
fn steps_and_parts_continue_a_state_and_rows_that_are_held_keep_theirs() {
    for sizes in SIZES {
        let (rows, len) = (3i64, 40i64);
        let [x, g, beta] = inputs(sizes, rows * len);
        let of = |x: &Tensor, from: i64, count: i64| {
            let parts = x.view([rows, len, -1]).narrow(1, from, count);
            parts.reshape([rows * count, -1])
        };
        let places = |count: i64| starts(&[count; 3]);
        no_grad(|| {
            let (whole, end) = delta_rule_from(sizes, &x, [&g, &beta], &places(len), None);
            let (_, start) =
                delta_rule_from(sizes, &of(&x, 0, 21), [&of(&g, 0, 21), &of(&beta, 0, 21)], &places(21), None);
            let (rest, continued) = delta_rule_from(
                sizes,
                &of(&x, 21, 19),
                [&of(&g, 21, 19), &of(&beta, 21, 19)],
                &places(19),
                Some(&start),
            );
            assert_close("continued", &rest, &of(&whole, 21, 19), 1e-5);
            assert_close("continued state", &continued, &end, 1e-5);
            let mut state = start.copy();
            for token in 21..len {
                let at = |x: &Tensor| of(x, token, 1);
                let out = delta_step(sizes, &at(&x), [&at(&g), &at(&beta)], None, &mut state);
                assert_close(&format!("{sizes:?}, token {token}"), &out, &at(&whole), 1e-5);
                // Again, without a change of the second row's state.
                let (before, held) = (state.copy(), Tensor::from_slice(&[0f32, 0.0, 0.0]).view([3, 1]));
                let again = delta_step(sizes, &at(&x), [&at(&g), &at(&beta)], Some(&held), &mut state);
                assert_eq!(state, before);
                assert_close("held", &again, &out, 1e-6);
            }
            assert_close("state of steps", &state, &end, 1e-5);
        });
    }
}

#[test]
fn mistakes_are_one_line_with_the_shapes() {
    let message_of = |f: &dyn Fn()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_err();
        let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        text.lines().next().unwrap_or_default().to_string()
    };
    let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let weight = zeros(&[4, 1, 3]);
    let message = message_of(&|| drop(gated_convolution(&zeros(&[5, 8]), &weight, None, PackedRows::new(&[0, 5]))));
    assert!(message.contains("convolution: x [5, 8], expected rows of 12 for 5 tokens"), "{message}");
    let message = message_of(&|| drop(silu_convolution(&zeros(&[5, 4]), &weight, PackedRows::new(&[0, 5, 5]))));
    assert!(message.contains("expected sequences of at least one token"), "{message}");
    let rates = zeros(&[5, 3]);
    let message =
        message_of(&|| drop(delta_rule(SIZES[1], &zeros(&[5, 48]), &rates, &rates, PackedRows::new(&[0, 5]))));
    assert!(message.contains("delta rule: decays or strengths [5, 3]"), "{message}");
    for (parents, row) in [([-1i64, 1], 1), ([0, -1], 0)] {
        let packed = PackedRows { starts: &[0, 2, 5], parents: Some(&parents) };
        let message = message_of(&|| drop(silu_convolution(&zeros(&[5, 4]), &weight, packed)));
        assert!(message.contains(&format!("packed rows: row {row} continues row {}", parents[row])), "{message}");
    }
    let states = zeros(&[5, 1, 16, 8]);
    let one = zeros(&[5, 1]);
    let message = message_of(&|| {
        let mut states = states.shallow_clone();
        drop(delta_step(SIZES[1], &zeros(&[5, 48]), [&one, &one], None, &mut states));
    });
    assert!(message.contains("delta rule: states [5, 1, 16, 8]"), "{message}");
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
