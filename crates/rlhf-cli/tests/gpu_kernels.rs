//! Models with the kernels for GPUs, whose sources run on the processor.

use crate::support::{assert_close, golden, run_as_ranks};
use rlhf::generate::{GenerationConfig, Sampling, generate};
use rlhf::model::{Batch, CausalLm, LogprobOptions, ModelOptions, Precision};
use std::path::Path;
use tch::{Kind, Tensor};

#[test]
fn models_with_the_kernels_of_a_gpu_have_the_numbers_gradients_and_responses_of_those_without() {
    // In a process of its own: others must not compute by them meanwhile.
    run_as_ranks("gpu_kernels::models_with_emulated_kernels", 1, &[]);
}

#[test]
#[ignore = "a process of its own, started by models_with_the_kernels_of_a_gpu_have_the_numbers_gradients_and_responses_of_those_without"]
fn models_with_emulated_kernels() {
    // RMS norms and gated MLPs; fused projections, of which a quarter of the dimensions is rotated, and layer norms.
    for (name, precision, tolerance) in [
        ("llama_tied", Precision::F32, 2e-5),
        ("gpt_neox", Precision::F32, 2e-5),
        ("llama_tied", Precision::Bf16, 0.05),
    ] {
        let dir = golden().join("models").join(name);
        let expected = learnt(&dir, precision);
        tch_ext::emulate_gpu_kernels(true);
        let found = learnt(&dir, precision);
        tch_ext::emulate_gpu_kernels(false);
        for ((what, found), (_, expected)) in found.0.iter().zip(&expected.0) {
            let scale = expected.abs().max().double_value(&[]).max(1.0);
            assert_close(&format!("{name}: {what}"), found, expected, tolerance * scale);
        }
        if precision == Precision::F32 {
            assert_eq!(found.1, expected.1, "{name}: responses");
        }
    }
    let started = tch_ext::gpu_kernels().into_iter().filter(|kernel| kernel.starts > 0).map(|kernel| kernel.source);
    let mut sources: Vec<String> = started.collect();
    sources.dedup();
    assert_eq!(sources, ["logits", "sample", "rotary", "norm", "gated", "attend"]);
}

/// Numbers and gradients of a model by name, and responses.
fn learnt(dir: &Path, precision: Precision) -> (Vec<(String, Tensor)>, Vec<Vec<i64>>) {
    let mut model = CausalLm::from_pretrained(dir, ModelOptions { precision, ..ModelOptions::default() }).unwrap();
    model.set_trainable(true);
    let rows = [vec![7i64, 12, 9, 30], vec![5, 6, 41]];
    let spans = [1..4, 2..3];
    let options = LogprobOptions { entropy: true, ..0.7.into() };
    let loss = |_, now: &rlhf::model::TokenLogprobs| {
        now.logprobs.sum(Kind::Float) + now.entropy.as_ref().unwrap().sum(Kind::Float) * 0.1
    };
    let now = model.logprobs_backward(Batch::new(&rows, &spans), options, loss).unwrap();
    let asked = model.token_logprobs(&rows, &spans, 0.7, true).unwrap();
    assert_close("with and without gradients", &asked.logprobs.detach(), &now.logprobs, 1e-5);
    let gradients = model.params().iter().map(|param| (param.name.clone(), param.tensor.grad().copy()));
    let numbers = [("log-probabilities".to_string(), now.logprobs), ("entropies".to_string(), now.entropy.unwrap())];
    let numbers = numbers.into_iter().chain(gradients).collect();
    let sample = |sampling| {
        let config = GenerationConfig { seed: 3, ..GenerationConfig::new(sampling, 2) };
        generate(&model, &rows, &config).unwrap().into_iter().map(|response| response.tokens)
    };
    let responses = sample(Sampling::Greedy).chain(sample(Sampling::at_temperature(0.7))).collect();
    (numbers, responses)
}
