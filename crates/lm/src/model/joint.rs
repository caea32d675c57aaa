//! Layers that read the same input as one product: queries, keys and values; a gate and what it is multiplied by.
//!
//! Their weights in the dtype of products lie one after another in memory, so that they are one matrix. Copies in a narrower dtype than the
//! stored weights are made so at their first joint use. Weights that are stored in the dtype of products are moved by [`lay_out`], when the model
//! is built and where its dtypes change. Nothing records this: each product compares the addresses. Weights that have other memory since
//! then, because they are divided over ranks or exchanged, have a product each, unless they lie one after another there too.

use super::linear::{Linear, Weight};
use super::lora::Dropout;
use super::{plain, uses_kernels};
use std::collections::HashSet;
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};
use tch_ext::Joined;

#[cfg(test)]
thread_local! {
    /// Whether the CPU has joint products too.
    static ON_CPU: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    /// Number of joint products so far.
    static JOINED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Whether layers of this dtype on `device` have joint products: with the kernels of a GPU. A CPU keeps a product each: it gains nothing by
/// fewer starts, and would copy the columns for its attention.
fn joins(kind: Kind, device: Device) -> bool {
    #[cfg(test)]
    if ON_CPU.get() {
        return !plain();
    }
    !plain() && tch_ext::has_gpu_kernels(kind, device)
}

/// The results of `linears` for the input `x` `[N, in]`, in the dtype of products: by one product where there can be one. They may be
/// columns of one memory.
pub(super) fn results(linears: &[Linear], x: &Tensor, dropout: Option<&Dropout>) -> Vec<Tensor> {
    match multiplied(linears, x, true) {
        // The attention of these kernels takes no columns.
        Some(parts) if uses_kernels(parts[0].kind(), x.device()) => parts.iter().map(Tensor::contiguous).collect(),
        Some(mut parts) => {
            // Attention stores the values as they are for its backward pass: as columns they would keep queries and keys too.
            if let Some(values) = parts.get_mut(2).filter(|values| values.requires_grad()) {
                *values = values.contiguous();
            }
            parts
        }
        None => linears.iter().map(|linear| linear.forward_dropping(x, dropout)).collect(),
    }
}

/// The results of `linears` for the input `x` side by side, `[N, sum of out]`, if one product computes them.
pub(super) fn product(linears: &[Linear], x: &Tensor) -> Option<Tensor> {
    multiplied(linears, x, false)?.pop()
}

fn multiplied(linears: &[Linear], x: &Tensor, splits: bool) -> Option<Vec<Tensor>> {
    let kind = linears.first()?.compute();
    if !joins(kind, x.device()) {
        return None;
    }
    let (weights, biases) = weights_and_biases(linears)?;
    let used = joined(&weights, kind)?;
    let used_biases = if biases.is_empty() { None } else { Some(joined(&biases, kind)?) };
    let (leaves, bias_leaves) = (tensors(&weights), tensors(&biases));
    let biases = used_biases.as_ref().map(|used| Joined { leaves: &bias_leaves, used });
    #[cfg(test)]
    JOINED.set(JOINED.get() + 1);
    Some(tch_ext::joint_linear(x, Joined { leaves: &leaves, used: &used }, biases, splits))
}

/// The weights of at least two layers and their biases, of which there are none if no layer has one, if one product can compute the layers.
fn weights_and_biases(linears: &[Linear]) -> Option<(Vec<&Weight>, Vec<&Weight>)> {
    let kind = linears.first()?.compute();
    if linears.len() < 2 {
        return None;
    }
    let parts = linears.iter().map(|linear| linear.plain_product().filter(|_| linear.compute() == kind));
    let parts: Vec<(&Weight, Option<&Weight>)> = parts.collect::<Option<_>>()?;
    let (weights, biases): (Vec<&Weight>, Vec<Option<&Weight>>) = parts.into_iter().unzip();
    let biases: Vec<&Weight> = biases.into_iter().flatten().collect();
    (biases.is_empty() || biases.len() == weights.len()).then_some((weights, biases))
}

fn tensors<'a>(weights: &[&'a Weight]) -> Vec<&'a Tensor> {
    weights.iter().map(|weight| &weight.tensor).collect()
}

/// The weights in `kind`, the dtype of products, as one tensor; `None` if they are stored in it and do not lie one after another, or are
/// converted each time.
fn joined(weights: &[&Weight], kind: Kind) -> Option<Tensor> {
    let are_copied = weights.iter().all(|weight| weight.is_copied(kind));
    if !are_copied && weights.iter().any(|weight| weight.tensor.kind() != kind) {
        return None;
    }
    let find = || {
        let used: Vec<Tensor> = weights.iter().map(|weight| weight.used(kind)).collect();
        tch_ext::adjacent(&used)
    };
    // Copies that are there may have been made one by one.
    let found = if are_copied && !weights.iter().all(|weight| weight.has_copy()) { None } else { find() };
    if found.is_some() || !are_copied {
        return found;
    }
    for (weight, part) in weights.iter().zip(room_for(&tensors(weights), kind)?) {
        weight.copy_to(part);
    }
    find()
}

/// Parts of new memory in `kind` for `tensors`, one after another; `None` if they differ in more than their first dimension.
fn room_for(tensors: &[&Tensor], kind: Kind) -> Option<Vec<Tensor>> {
    let first = tensors.first()?;
    let sizes: Vec<Vec<i64>> = tensors.iter().map(|tensor| tensor.size()).collect();
    let rest = sizes[0].get(1..)?;
    if sizes.iter().any(|size| size.get(1..) != Some(rest)) {
        return None;
    }
    let mut whole = sizes[0].clone();
    whole[0] = sizes.iter().map(|size| size[0]).sum();
    let memory = Tensor::empty(&whole, (kind, first.device()));
    let mut from = 0;
    let parts = sizes.iter().map(|size| {
        from += size[0];
        memory.narrow(0, from - size[0], size[0])
    });
    Some(parts.collect())
}

/// Lays the weights of `linears` out one after another, and their biases, in all handles of these tensors: if they are stored in the dtype
/// of products, if they could have a joint product, and if none is at an address of `kept`.
pub(super) fn lay_out(linears: &[Linear], kept: &HashSet<*mut c_void>) {
    let Some((weights, biases)) = weights_and_biases(linears) else { return };
    let kind = linears[0].compute();
    for group in [tensors(&weights), tensors(&biases)] {
        let is_free = |tensor: &&Tensor| tensor.kind() == kind && !kept.contains(&tensor.data_ptr());
        let is_there = group.first().is_some_and(|first| joins(kind, first.device()));
        if !is_there || !group.iter().all(is_free) || tch_ext::adjacent(&group).is_some() {
            continue;
        }
        let Some(parts) = room_for(&group, kind) else { continue };
        for (tensor, mut part) in group.into_iter().zip(parts) {
            tch::no_grad(|| part.copy_(tensor));
            tensor.shallow_clone().set_data(&part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{GenerationConfig, Sampling, generate};
    use crate::model::lora::{Adapter, LayerSize};
    use crate::model::{Batch, CausalLm, ModelOptions, Precision, TokenLogprobs};
    use rlhf_base::offload::Offload;
    use std::path::Path;

    const ROWS: [&[i64]; 2] = [&[7, 12, 9, 30], &[5, 6, 41]];

    /// Runs `f` with joint products on the CPU.
    fn jointly<T>(f: impl FnOnce() -> T) -> T {
        ON_CPU.set(true);
        let result = f();
        ON_CPU.set(false);
        result
    }

    /// The result of `f` and the number of its joint products.
    fn counted<T>(f: impl FnOnce() -> T) -> (T, usize) {
        let before = JOINED.get();
        let result = f();
        (result, JOINED.get() - before)
    }

    fn waves(size: &[i64], frequency: f64) -> Tensor {
        let count: i64 = size.iter().product();
        (Tensor::arange(count, (Kind::Float, Device::Cpu)) * frequency).sin().view(size)
    }

    /// Layers of 6 inputs and of 8, 4 and 4 results.
    fn layers(stored: Kind, compute: Kind, has_bias: bool) -> Vec<Linear> {
        let leaf = |size: &[i64], frequency: f64| waves(size, frequency).to_kind(stored).copy().set_requires_grad(true);
        let layer = |(width, frequency): (i64, f64)| {
            let bias = has_bias.then(|| leaf(&[width], frequency + 0.1));
            Linear::new(leaf(&[width, 6], frequency), bias, compute)
        };
        [(8, 0.7), (4, 0.9), (4, 1.1)].map(layer).into()
    }

    /// Weights, then biases.
    fn leaves(layers: &[Linear]) -> Vec<&Tensor> {
        let (weights, biases) = weights_and_biases(layers).unwrap();
        tensors(&weights).into_iter().chain(tensors(&biases)).collect()
    }

    /// Results for one input; after a backward pass the gradients of the input and of the leaves.
    fn learnt(layers: &[Linear]) -> Vec<Tensor> {
        let x = waves(&[5, 6], 0.37).set_requires_grad(true);
        let found = results(layers, &x, None);
        let slopes = |result: &Tensor| waves(&result.size(), 0.53).to_kind(result.kind());
        let losses: Vec<Tensor> = found.iter().map(|result| (result * slopes(result)).sum(Kind::Float)).collect();
        Tensor::stack(&losses, 0).sum(Kind::Float).backward();
        let gradients = leaves(layers).into_iter().map(Tensor::grad);
        found.iter().map(Tensor::detach).chain([x.grad()]).chain(gradients).collect()
    }

    fn expect_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
        assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()), "{what}");
        let [found, expected] = [found, expected].map(|x| x.to_kind(Kind::Double));
        let scale = expected.abs().max().double_value(&[]).max(1.0);
        let gap = (found - expected).abs().max().double_value(&[]);
        assert!(gap <= tolerance * scale, "{what}: {gap}, largest {scale}");
    }

    #[test]
    fn one_product_has_the_results_and_gradients_of_several_before_and_after_a_step() {
        if plain() {
            return;
        }
        let bf16 = Kind::BFloat16;
        for (stored, compute, tolerance) in
            [(Kind::Float, Kind::Float, 1e-5), (Kind::Float, bf16, 0.02), (bf16, bf16, 0.02)]
        {
            for has_bias in [false, true] {
                let what = format!("{stored:?} computed in {compute:?}, biases {has_bias}");
                let [separate, joint] = [(); 2].map(|()| layers(stored, compute, has_bias));
                jointly(|| lay_out(&joint, &HashSet::new()));
                for pass in 0..4 {
                    let expected = learnt(&separate);
                    let (found, whole) = jointly(|| (learnt(&joint), product(&joint, &waves(&[5, 6], 0.37))));
                    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        expect_close(&format!("{what}, pass {pass}, tensor {at}"), found, expected, tolerance);
                    }
                    let whole = whole.unwrap_or_else(|| panic!("{what}, pass {pass}: no joint product"));
                    assert_eq!(whole, Tensor::cat(&found[..3], 1), "{what}");
                    // The second pass adds to the gradients of the first; the third has other weights, the fourth no copies.
                    match pass {
                        1 => {
                            for leaf in leaves(&separate).into_iter().chain(leaves(&joint)) {
                                let step = leaf.grad() * -0.1;
                                let _ = tch::no_grad(|| leaf.shallow_clone().g_add_(&step));
                            }
                        }
                        2 => joint.iter().for_each(Linear::drop_copies),
                        _ => {}
                    }
                }
                let gradients: Vec<Tensor> = joint.iter().map(|layer| layer.stored_weight().grad()).collect();
                assert!(tch_ext::adjacent(&gradients).is_some(), "{what}");
            }
        }
    }

    #[test]
    fn layers_that_no_product_can_join_have_one_each() {
        if plain() {
            return;
        }
        let (x, none) = (waves(&[5, 6], 0.37), HashSet::new());
        let is_joint = |layers: &[Linear]| jointly(|| product(layers, &x)).is_some();
        let in_place = || {
            let layers = layers(Kind::Float, Kind::Float, true);
            jointly(|| lay_out(&layers, &none));
            layers
        };
        assert!(is_joint(&in_place()));
        assert!(product(&in_place(), &x).is_none(), "the CPU has them in tests only");
        assert!(!is_joint(&in_place()[..1]));
        // Memory of their own, that of another model, other memory since then.
        assert!(!is_joint(&layers(Kind::Float, Kind::Float, false)));
        let shared = layers(Kind::Float, Kind::Float, false);
        let kept = HashSet::from([shared[1].stored_weight().data_ptr()]);
        jointly(|| lay_out(&shared, &kept));
        assert!(!is_joint(&shared) && kept.contains(&shared[1].stored_weight().data_ptr()));
        let moved = in_place();
        let weight = moved[2].stored_weight();
        weight.shallow_clone().set_data(&(weight.detach() * 2.0));
        assert!(!is_joint(&moved));
        let expected: Vec<Tensor> = moved.iter().map(|layer| layer.forward(&x)).collect();
        assert_eq!(jointly(|| results(&moved, &x, None)), expected);
        // A copy that is made each time; a bias of some; another dtype of products; an adapter.
        assert!(!is_joint(&layers(Kind::BFloat16, Kind::Float, false)));
        let copied = || layers(Kind::Float, Kind::BFloat16, true);
        let with_last = |bias: Option<Tensor>, compute| {
            let mut all = copied();
            all[2] = Linear::new(waves(&[4, 6], 0.2), bias, compute);
            all
        };
        let bias = || Some(waves(&[4], 0.3));
        assert!(is_joint(&copied()) && is_joint(&with_last(bias(), Kind::BFloat16)));
        assert!(!is_joint(&with_last(None, Kind::BFloat16)) && !is_joint(&with_last(bias(), Kind::Float)));
        let mut adapted = copied();
        adapted[1].set_adapter(Adapter::fresh(LayerSize { r: 2, scale: 1.5 }, [6, 4], Device::Cpu, 1, 0).unwrap());
        assert!(!is_joint(&adapted));
    }

    #[test]
    fn weights_are_laid_out_in_all_their_handles_and_copies_also_where_each_was_made_alone() {
        if plain() {
            return;
        }
        let all = layers(Kind::Float, Kind::Float, false);
        let handles: Vec<Tensor> = leaves(&all).into_iter().map(Tensor::shallow_clone).collect();
        let before: Vec<Tensor> = handles.iter().map(|handle| handle.detach().copy()).collect();
        jointly(|| lay_out(&all, &HashSet::new()));
        assert!(tch_ext::adjacent(&handles).is_some());
        assert!(handles.iter().zip(&before).all(|(handle, before)| handle == before && handle.requires_grad()));
        let copied = layers(Kind::Float, Kind::BFloat16, false);
        copied.iter().for_each(|layer| drop(layer.weight()));
        let x = waves(&[5, 6], 0.37);
        let found = jointly(|| product(&copied, &x)).unwrap();
        let expected: Vec<Tensor> = copied.iter().map(|layer| layer.forward(&x)).collect();
        expect_close("copies", &found, &Tensor::cat(&expected, 1), 0.02);
    }

    fn load(name: &str, precision: Precision) -> CausalLm {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
        CausalLm::from_pretrained(&dir, ModelOptions { precision, ..ModelOptions::default() }).unwrap()
    }

    fn logits(model: &CausalLm) -> Tensor {
        tch::no_grad(|| Tensor::cat(&model.logits(&ROWS).unwrap(), 0))
    }

    /// Logits, gradients and, after a step, logits of a model by name; greedy responses before the step.
    fn learnt_by_model(name: &str, precision: Precision) -> (Vec<(String, Tensor)>, Vec<Vec<i64>>) {
        let mut model = load(name, precision);
        let config = GenerationConfig::new(Sampling::Greedy, 4);
        let rows = ROWS.map(<[i64]>::to_vec);
        let responses = generate(&model, &rows, &config).unwrap().into_iter().map(|response| response.tokens).collect();
        model.set_trainable(true);
        let mut numbers = vec![("logits".to_string(), logits(&model))];
        let loss = |_, now: &TokenLogprobs| now.logprobs.sum(Kind::Float);
        model.logprobs_backward(Batch::new(&rows, &[1..4, 1..3]), 0.7, loss).unwrap();
        for param in model.trainable_params() {
            let gradient = param.tensor.grad();
            if gradient.defined() {
                numbers.push((param.name.clone(), gradient.copy()));
                let _ = tch::no_grad(|| param.tensor.shallow_clone().g_add_(&(&gradient * -0.01)));
            }
        }
        numbers.push(("logits after a step".into(), logits(&model)));
        (numbers, responses)
    }

    #[test]
    fn models_with_joint_products_have_the_numbers_gradients_and_responses_of_those_without() {
        // Biases, norms of queries and keys, gates of queries, experts, fewer than three projections, states in the place of attention.
        let families = [
            "llama_tied",
            "qwen2",
            "gemma2",
            "qwen3",
            "olmo2",
            "opt",
            "gpt_neox",
            "qwen3_moe",
            "qwen3_5",
            "gemma4",
            "gemma4_full",
            "lfm2",
        ];
        let in_bf16 = ["llama_tied", "qwen2", "gemma2"].map(|name| (name, Precision::Bf16, 0.05));
        for (name, precision, tolerance) in families.map(|name| (name, Precision::F32, 2e-5)).into_iter().chain(in_bf16)
        {
            let (expected, none) = counted(|| learnt_by_model(name, precision));
            let (found, count) = counted(|| jointly(|| learnt_by_model(name, precision)));
            // GPT-NeoX has fused projections and no gate.
            assert_eq!((none, count > 0), (0, name != "gpt_neox" && !plain()), "{name}: {count} joint products");
            assert_eq!(found.0.len(), expected.0.len(), "{name}");
            for ((what, found), (_, expected)) in found.0.iter().zip(&expected.0) {
                expect_close(&format!("{name}, {precision:?}: {what}"), found, expected, tolerance);
            }
            if precision == Precision::F32 {
                assert_eq!(found.1, expected.1, "{name}: responses");
            }
        }
    }

    #[test]
    fn weights_that_are_offloaded_or_exchanged_keep_their_numbers() {
        let (dir, separate) = (tempfile::tempdir().unwrap(), logits(&load("llama_tied", Precision::F32)));
        jointly(|| {
            let mut model = load("llama_tied", Precision::F32);
            let (before, count) = counted(|| logits(&model));
            assert!(count > 0 || plain());
            expect_close("joint", &before, &separate, 1e-5);
            model.set_trainable(true);
            let halves: Vec<Tensor> = model.trainable_params().map(|param| param.tensor.detach() * 0.5).collect();
            model.swap_trained(&halves);
            let (exchanged, count) = counted(|| logits(&model));
            assert_eq!(count, 0, "exchanged weights have memory of their own");
            ON_CPU.set(false);
            let expected = logits(&model);
            ON_CPU.set(true);
            expect_close("exchanged", &exchanged, &expected, 1e-5);
            assert_ne!(exchanged, separate);
            model.swap_trained(&halves);
            let (again, count) = counted(|| logits(&model));
            assert!(count > 0 || plain());
            expect_close("exchanged again", &again, &separate, 1e-5);
            model.set_trainable(false);
            model.offload(&Offload::to(dir.path()), "model").unwrap();
            let (offloaded, count) = counted(|| logits(&model));
            assert!(count > 0 || plain());
            expect_close("offloaded", &offloaded, &separate, 1e-5);
        });
    }
}
