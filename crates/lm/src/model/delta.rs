//! The gated delta rule (Yang et al. 2025, "Gated Delta Networks") by libtorch's own operations: the kernel's reference, and the way where there
//! is none.
//!
//! The state S of a head is a matrix. A token with query q, key k, value v, decay g and strength b makes it S' = exp(g) S + k (b (v - exp(g) S^T
//! k))^T and has the output S'^T q.

use tch::{Kind, Tensor};

/// Number of tokens whose corrections are computed together.
const CHUNK: i64 = 64;

/// The inputs of the rule, f32.
#[derive(Debug)]
pub(super) struct DeltaInputs {
    /// Queries, scaled, `[rows, tokens, heads, key width]`.
    pub queries: Tensor,
    /// Keys of length 1, `[rows, tokens, heads, key width]`.
    pub keys: Tensor,
    /// Values, `[rows, tokens, heads, value width]`.
    pub values: Tensor,
    /// Logarithms of the decays, at most 0, `[rows, tokens, heads]`.
    pub decays: Tensor,
    /// Strengths of the corrections, `[rows, tokens, heads]`.
    pub strengths: Tensor,
}

/// Repeats each of the heads of `x` `[..., heads, width]` for the `times` value heads that it serves.
pub(super) fn repeat_heads(x: &Tensor, times: i64) -> Tensor {
    if times == 1 { x.shallow_clone() } else { x.repeat_interleave_self_int(times, -2, None) }
}

/// Divides each vector of the last dimension by its length.
pub(super) fn unit(x: &Tensor) -> Tensor {
    let squares = (x * x).sum_dim_intlist([-1i64].as_slice(), true, Kind::Float);
    x * (squares + 1e-6).rsqrt()
}

/// The outputs `[rows, tokens, heads, value width]` and the states after the last token, `[rows, heads, key width, value width]`. A token whose key,
/// strength and decay are 0 changes nothing. `start` has the states before the first token; `None`: zeros.
pub(super) fn delta_rule(inputs: &DeltaInputs, start: Option<&Tensor>) -> (Tensor, Tensor) {
    let (rows, tokens, heads, key_dim) = inputs.keys.size4().expect("[rows, tokens, heads, key width]");
    let value_dim = inputs.values.size()[3];
    let chunks = (tokens + CHUNK - 1) / CHUNK;
    let fill = chunks * CHUNK - tokens;
    // [rows, heads, chunks, CHUNK, width], and without the width.
    let wide = |x: &Tensor| {
        let padded = x.transpose(1, 2).constant_pad_nd([0, 0, 0, fill]);
        padded.reshape([rows, heads, chunks, CHUNK, -1])
    };
    let narrow = |x: &Tensor| x.transpose(1, 2).constant_pad_nd([0, fill]).reshape([rows, heads, chunks, CHUNK]);
    let (queries, keys, values) = (wide(&inputs.queries), wide(&inputs.keys), wide(&inputs.values));
    let (decays, strengths) = (narrow(&inputs.decays), narrow(&inputs.strengths).unsqueeze(-1));

    // Decay from the start of a chunk to each of its tokens, and between two of them.
    let sums = decays.cumsum(-1, Kind::Float);
    let later = Tensor::ones([CHUNK, CHUNK], (Kind::Bool, keys.device())).triu(1);
    let between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(&later, f64::NEG_INFINITY).exp();
    let since_start = sums.exp().unsqueeze(-1);
    let to_end = (sums.narrow(-1, CHUNK - 1, 1) - &sums).exp().unsqueeze(-1);

    // Each correction in a chunk depends on the ones before it: a triangular system.
    let strong_keys = &keys * &strengths;
    let transposed = keys.transpose(-1, -2);
    let system = strong_keys.matmul(&transposed) * &between;
    let solve = |x: &Tensor| Tensor::linalg_solve_triangular(&system, x, false, true, true);
    let corrections = solve(&(&values * &strengths));
    let state_corrections = solve(&(&strong_keys * &since_start));
    let within = queries.matmul(&transposed) * &between;
    let (queries, keys) = (&queries * &since_start, (&keys * to_end).transpose(-1, -2));
    let decay = sums.select(-1, CHUNK - 1).exp();

    let mut state = match start {
        Some(start) => start.shallow_clone(),
        None => Tensor::zeros([rows, heads, key_dim, value_dim], (Kind::Float, keys.device())),
    };
    let mut outputs = Vec::with_capacity(chunks as usize);
    for chunk in 0..chunks {
        let at = |x: &Tensor| x.select(2, chunk);
        let new = at(&corrections) - at(&state_corrections).matmul(&state);
        outputs.push(at(&queries).matmul(&state) + at(&within).matmul(&new));
        state = state * at(&decay).unsqueeze(-1).unsqueeze(-1) + at(&keys).matmul(&new);
    }
    let outputs = Tensor::stack(&outputs, 2).reshape([rows, heads, chunks * CHUNK, value_dim]);
    (outputs.narrow(2, 0, tokens).transpose(1, 2), state)
}

/// The output `[rows, heads, value width]` of one more token in each row, whose states `[rows, heads, key width, value width]` are changed in
/// place; the inputs have no dimension of tokens.
pub(super) fn delta_step(inputs: &DeltaInputs, state: &mut Tensor) -> Tensor {
    let decay = inputs.decays.exp().unsqueeze(-1).unsqueeze(-1);
    *state *= decay;
    let known = inputs.keys.unsqueeze(-2).matmul(state).squeeze_dim(-2);
    let correction = (&inputs.values - known) * inputs.strengths.unsqueeze(-1);
    *state += inputs.keys.unsqueeze(-1) * correction.unsqueeze(-2);
    inputs.queries.unsqueeze(-2).matmul(state).squeeze_dim(-2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn inputs(rows: i64, tokens: i64, [heads, key_dim, value_dim]: [i64; 3]) -> DeltaInputs {
        let numbers = |shape: &[i64], start: f64| {
            let count: i64 = shape.iter().product();
            (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.73 + start).sin().view(shape)
        };
        let keys = unit(&numbers(&[rows, tokens, heads, key_dim], 1.0));
        DeltaInputs {
            queries: unit(&numbers(&[rows, tokens, heads, key_dim], 2.0)) * (key_dim as f64).powf(-0.5),
            keys,
            values: numbers(&[rows, tokens, heads, value_dim], 3.0),
            decays: -numbers(&[rows, tokens, heads], 4.0).square(),
            strengths: numbers(&[rows, tokens, heads], 5.0).sigmoid(),
        }
    }

    #[test]
    fn chunks_give_the_numbers_of_one_token_after_another() {
        for tokens in [1, 5, 63, 64, 65, 150] {
            let whole = inputs(2, tokens, [3, 8, 6]);
            let start = Tensor::ones([2, 3, 8, 6], (Kind::Float, Device::Cpu)) * 0.3;
            let (outputs, end) = delta_rule(&whole, Some(&start));
            let mut state = start.copy();
            for token in 0..tokens {
                let at = |x: &Tensor| x.select(1, token);
                let one = DeltaInputs {
                    queries: at(&whole.queries),
                    keys: at(&whole.keys),
                    values: at(&whole.values),
                    decays: at(&whole.decays),
                    strengths: at(&whole.strengths),
                };
                let gap = (delta_step(&one, &mut state) - outputs.select(1, token)).abs().max().double_value(&[]);
                assert!(gap < 2e-6, "token {token} of {tokens}: {gap}");
            }
            assert!((state - end).abs().max().double_value(&[]) < 2e-6, "{tokens} tokens");
        }
    }

    /// [`delta_rule`] token by token, differentiable.
    fn one_by_one(inputs: &DeltaInputs, start: &Tensor) -> Tensor {
        let mut state = start.shallow_clone();
        let tokens = (0..inputs.keys.size()[1]).map(|token| {
            let at = |x: &Tensor| x.select(1, token);
            let (key, decay) = (at(&inputs.keys), at(&inputs.decays).exp().unsqueeze(-1).unsqueeze(-1));
            state = &state * decay;
            let known = key.unsqueeze(-2).matmul(&state).squeeze_dim(-2);
            let correction = (at(&inputs.values) - known) * at(&inputs.strengths).unsqueeze(-1);
            state = &state + key.unsqueeze(-1) * correction.unsqueeze(-2);
            at(&inputs.queries).unsqueeze(-2).matmul(&state).squeeze_dim(-2)
        });
        Tensor::stack(&tokens.collect::<Vec<_>>(), 1)
    }

    #[test]
    fn gradients_through_the_borders_of_chunks_are_those_of_one_token_after_another() {
        for tokens in [64, 65, 130] {
            let gradients = |chunks: bool| {
                let inputs = inputs(2, tokens, [2, 8, 6]);
                let leaf = |x: Tensor| x.detach().set_requires_grad(true);
                let inputs = DeltaInputs {
                    queries: leaf(inputs.queries),
                    keys: leaf(inputs.keys),
                    values: leaf(inputs.values),
                    decays: leaf(inputs.decays),
                    strengths: leaf(inputs.strengths),
                };
                let start = leaf(Tensor::ones([2, 2, 8, 6], (Kind::Float, Device::Cpu)) * 0.3);
                let outputs = if chunks { delta_rule(&inputs, Some(&start)).0 } else { one_by_one(&inputs, &start) };
                let weights = (Tensor::arange(outputs.numel() as i64, (Kind::Float, Device::Cpu)) * 0.37).sin();
                let loss = (outputs * weights.view([2, tokens, 2, 6])).sum(Kind::Float);
                tch_ext::backward(&loss, &loss.ones_like());
                [inputs.queries, inputs.keys, inputs.values, inputs.decays, inputs.strengths, start].map(|x| x.grad())
            };
            for (name, (found, expected)) in ["queries", "keys", "values", "decays", "strengths", "start"]
                .iter()
                .zip(gradients(true).iter().zip(&gradients(false)))
            {
                let gap = (found - expected).abs().max().double_value(&[]);
                let size = expected.abs().max().double_value(&[]).max(1.0);
                assert!(gap < 1e-5 * size, "{tokens} tokens, {name}: {gap} of {size}");
            }
        }
    }
}
