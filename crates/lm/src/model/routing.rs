//! Tokens to their experts, and the results of these back.

use tch::{Kind, Tensor};

/// The experts of each token.
pub(super) struct Routes {
    /// Weights of the chosen experts, `[N, chosen]` f32.
    pub(super) weights: Tensor,
    /// Their numbers, `[N, chosen]` i64.
    pub(super) experts: Tensor,
    /// Number of experts.
    pub(super) count: usize,
}

/// The sum of the results of each token's experts by their weights, `[N, hidden size]` f32: `run` returns the results of an expert, by its
/// number, for its tokens of `x` `[N, hidden size]`.
pub(super) fn mixed(x: &Tensor, routes: Routes, run: &dyn Fn(usize, &Tensor) -> Tensor) -> Tensor {
    let Routes { weights, experts, count } = routes;
    let (tokens, hidden, chosen) = (x.size()[0], x.size()[1], weights.size()[1]);
    if tokens == 0 {
        return x.to_kind(Kind::Float);
    }
    // Each token once for each of its experts, those of an expert next to each other. Permutations and sums over a dimension of
    // their own have the same gradient on every run.
    let (_, order) = experts.view([-1]).sort_stable(true, 0, false);
    let back = order.argsort(0, false);
    let counts = experts.view([-1]).bincount::<Tensor>(None, count as i64);
    let counts = Vec::<i64>::try_from(counts).expect("counts are i64");
    let copies = x.unsqueeze(1).expand([tokens, chosen, hidden], false).reshape([-1, hidden]).index_select(0, &order);
    let grouped = copies.split_with_sizes(counts.as_slice(), 0);
    let used = grouped.iter().enumerate().filter(|(_, tokens)| tokens.size()[0] > 0);
    let results: Vec<Tensor> = used.map(|(expert, tokens)| run(expert, tokens)).collect();
    let results = Tensor::cat(&results, 0).to_kind(Kind::Float).index_select(0, &back);
    let weighted = results.view([tokens, chosen, hidden]) * weights.unsqueeze(-1);
    weighted.sum_dim_intlist([1i64].as_slice(), false, Kind::Float)
}
