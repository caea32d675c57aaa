//! Optimizers with small states against bitsandbytes, transformers and PyTorch, step by step.

use crate::cli::{PPO, SFT, Scratch};
use crate::support::{Tensors, assert_close, golden};
use rlhf::model::Param;
use rlhf::optim::{Optim, Optimizer, OptimizerConfig};
use rlhf::settings::SftConfig;
use rlhf::weights::Checkpoint;
use tch::{Device, Kind, Tensor};

const NAMES: [&str; 4] = ["matrix", "expert", "small", "vector"];
/// Steps of the reference values.
const STEPS: i32 = 6;
const LR: f64 = 0.02;

fn config(optim: Optim) -> OptimizerConfig {
    let usual = SftConfig::new("m", "d", "o").optimizer;
    OptimizerConfig { optim, weight_decay: 0.1, ..usual }
}

/// The parameters that the reference values start from; the vector alone does not decay.
fn params(reference: &Tensors) -> Vec<Param> {
    let param = |name: &str| Param {
        name: name.into(),
        tensor: reference.get(&format!("start.{name}")).copy().set_requires_grad(true),
        decay: name != "vector",
        embedding: false,
        fixed: false,
    };
    NAMES.iter().map(|name| param(name)).collect()
}

/// The same with the two largest in bf16.
fn in_bf16(params: Vec<Param>) -> Vec<Param> {
    let stored_kind = |param: &Param| if param.tensor.numel() < 4096 { Kind::Float } else { Kind::BFloat16 };
    let narrow = |param: &Param| param.tensor.detach().to_kind(stored_kind(param)).set_requires_grad(true);
    params.into_iter().map(|param| Param { tensor: narrow(&param), ..param }).collect()
}

/// Gives each parameter the gradient of step `step`: `gradient` of make_optimizers.py.
fn backward(params: &[Param], step: i32) {
    for Param { tensor, .. } in params {
        let values = tensor.detach().to_kind(Kind::Double);
        let count = Tensor::arange(values.numel() as i64, (Kind::Double, values.device())).view_as(&values);
        let scale = ((&count * 0.37).sin() * 3.0 - 3.0) * std::f64::consts::LN_10;
        let gradient = scale.exp() * (count * 0.11 + f64::from(step) * 1.7).sin() + values * 0.01;
        (tensor * gradient.to_kind(tensor.kind())).sum(Kind::Float).backward();
    }
}

fn steps(params: &[Param], optimizer: &mut Optimizer, steps: std::ops::RangeInclusive<i32>) {
    for step in steps {
        backward(params, step);
        optimizer.step(LR).unwrap();
    }
}

/// The reference values, and the parameters and the state after all their steps with `optim`.
fn after_all_steps(optim: Optim) -> (Tensors, Vec<Param>, Tensors) {
    let reference = Tensors::read(&golden().join("optimizers.safetensors"));
    let params = params(&reference);
    let mut optimizer = Optimizer::new(&params, &config(optim));
    steps(&params, &mut optimizer, 1..=STEPS);
    let found = state(&optimizer);
    (reference, params, found)
}

/// The tensors that the optimizer saves.
fn state(optimizer: &Optimizer) -> Tensors {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("optimizer.safetensors");
    optimizer.save(&path).unwrap();
    Tensors::read(&path)
}

#[test]
fn steps_with_states_in_8_bits_are_those_of_bitsandbytes() {
    let (reference, params, found) = after_all_steps(Optim::Adamw8bit);
    for (name, Param { tensor, .. }) in NAMES.iter().zip(&params) {
        let expected = |part: &str| reference.get(&format!("adamw_8bit.{name}{part}"));
        // A number in the middle between two codes may have got either in an earlier step.
        let off = (tensor - expected("")).abs();
        let (most, far) = (off.max().double_value(&[]), off.gt(1e-6).sum(Kind::Int64).int64_value(&[]));
        assert!(most < LR * 0.005 && far <= 20, "{name}: {far} numbers are off, by at most {most}");
        if tensor.numel() < 4096 {
            for part in [".exp_avg", ".exp_avg_sq"] {
                assert_close(part, found.get(&format!("{name}{part}")), expected(part), 1e-6);
            }
            continue;
        }
        for part in [".absmax1", ".absmax2"] {
            assert_close(part, found.get(&format!("{name}{part}")), expected(part), 1e-6);
        }
        for part in [".state1", ".state2"] {
            let codes = found.get(&format!("{name}{part}"));
            assert_eq!(codes.size(), tensor.size());
            let differ = (codes.to_kind(Kind::Int) - expected(part).to_kind(Kind::Int)).abs();
            let (most, count) = (differ.max().int64_value(&[]), differ.sum(Kind::Int64).int64_value(&[]));
            assert!(most <= 1 && count <= 3, "{name}{part}: {count} codes differ, by at most {most}");
        }
    }
}

#[test]
fn steps_of_adafactor_are_those_of_transformers() {
    let (reference, params, found) = after_all_steps(Optim::Adafactor);
    for (name, Param { tensor, .. }) in NAMES.iter().zip(&params) {
        assert_close(name, tensor, reference.get(&format!("adafactor.{name}")), 2e-6);
    }
    let moments =
        reference.names().filter_map(|name| name.strip_prefix("adafactor.")).filter(|name| name.contains('.'));
    let moments: Vec<&str> = moments.collect();
    assert_eq!(moments.len(), 3 * 2 + 1);
    for name in moments {
        assert_close(name, found.get(name), reference.get(&format!("adafactor.{name}")), 1e-6);
    }
}

#[test]
fn embeddings_and_small_tensors_keep_moments_in_f32_beside_others_in_8_bits() {
    let reference = Tensors::read(&golden().join("optimizers.safetensors"));
    let mut params = params(&reference);
    params[0].embedding = true;
    let found = state(&Optimizer::new(&params, &config(Optim::Adamw8bit)));
    let mut names: Vec<&str> = found.names().collect();
    names.sort_unstable();
    let expected = [
        "expert.absmax1",
        "expert.absmax2",
        "expert.state1",
        "expert.state2",
        "matrix.exp_avg",
        "matrix.exp_avg_sq",
        "small.exp_avg",
        "small.exp_avg_sq",
        "step",
        "vector.exp_avg",
        "vector.exp_avg_sq",
    ];
    assert_eq!(names, expected);
}

#[test]
fn every_optimizer_resumes_from_its_saved_state_to_the_bit_and_refuses_that_of_another() {
    let reference = Tensors::read(&golden().join("optimizers.safetensors"));
    let dir = tempfile::tempdir().unwrap();
    let all = [Optim::AdamwTorch, Optim::Adamw8bit, Optim::Adafactor, Optim::AdamwBf16];
    let params = |optim| if optim == Optim::AdamwBf16 { in_bf16(params(&reference)) } else { params(&reference) };
    let path = |optim: Optim| dir.path().join(format!("{optim:?}.safetensors"));
    for optim in all {
        let whole = params(optim);
        let mut optimizer = Optimizer::new(&whole, &config(optim)).with_seed(7);
        steps(&whole, &mut optimizer, 1..=3);
        optimizer.save(&path(optim)).unwrap();
        let half = params(optim);
        for (to, from) in half.iter().zip(&whole) {
            tch::no_grad(|| to.tensor.shallow_clone().copy_(&from.tensor));
        }
        let mut resumed = Optimizer::new(&half, &config(optim)).with_seed(7);
        resumed.load(&path(optim)).unwrap();
        assert_eq!(resumed.steps(), 3);
        steps(&whole, &mut optimizer, 4..=STEPS);
        steps(&half, &mut resumed, 4..=STEPS);
        for (found, expected) in half.iter().zip(&whole) {
            assert_eq!(found.tensor, expected.tensor, "{optim:?}: {}", found.name);
        }
    }
    for (optim, other) in all.iter().flat_map(|optim| all.map(|other| (*optim, other))).filter(|(a, b)| a != b) {
        let mut optimizer = Optimizer::new(&params(optim), &config(optim));
        let error = optimizer.load(&path(other)).unwrap_err().to_string();
        assert!(error.contains("expected"), "{optim:?} of {other:?}: {error}");
    }
}

#[test]
fn a_step_in_bf16_is_that_of_the_paper_rounded_to_one_of_two_neighbours() {
    let reference = Tensors::read(&golden().join("optimizers.safetensors"));
    let params = &in_bf16(params(&reference))[..1];
    let mut optimizer = Optimizer::new(params, &config(Optim::AdamwBf16)).with_seed(7);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("optimizer.safetensors");
    let numbers = |optimizer: &Optimizer| {
        optimizer.save(&path).unwrap();
        let file = Checkpoint::open_file(&path).unwrap();
        assert_eq!(file.kind_of("matrix.exp_avg_sq"), Some(Kind::BFloat16));
        let read = |name| file.read(name, Device::Cpu, Kind::Float).unwrap().to_kind(Kind::Double);
        [params[0].tensor.detach().to_kind(Kind::Double), read("matrix.exp_avg"), read("matrix.exp_avg_sq")]
    };
    for step in 1..=STEPS {
        let [w, m, v] = numbers(&optimizer);
        backward(params, step);
        let g = params[0].tensor.grad().to_kind(Kind::Double);
        optimizer.step(LR).unwrap();
        let [m, v] = [m * 0.9 + &g * 0.1, v * 0.999 + &g * &g * 0.001];
        let [first, second] = [0.9f64, 0.999].map(|beta| 1.0 - beta.powi(step));
        let w = w * (1.0 - LR * 0.1) - LR * (&m / first) / ((&v / second).sqrt() + 1e-8);
        // Terms that cancel out leave the rounding of f32.
        let expected = [("w", w, g.ones_like() * LR * 1e-6), ("m", m, g.abs() * 1e-6), ("v", v, g.zeros_like())];
        for ((name, expected, slack), found) in expected.into_iter().zip(&numbers(&optimizer)) {
            // Neighbours x 2^e are 2^(e - 7) apart, for x from 1 to 2.
            let unit = (expected.abs() + 1e-300).log2().floor().exp2() / 128.0 + slack;
            let off = (found - &expected) / unit;
            let (most, mean) = (off.abs().max().double_value(&[]), off.mean(Kind::Double).double_value(&[]));
            assert!(most < 1.001, "{name}, step {step}: off by {most} units");
            // Of 4355 numbers whose standard deviation is half a unit at most.
            assert!(mean.abs() < 0.03, "{name}, step {step}: off by {mean} units on average");
        }
    }
}

#[test]
fn steps_that_are_smaller_than_the_units_of_bf16_add_up_on_average() {
    // Units of 2^-8 below 1, and steps of 1e-4: rounding to the nearest would lose each of them.
    let tensor = Tensor::ones([64, 100], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
    let params = [Param { name: "w".into(), tensor, decay: false, embedding: false, fixed: false }];
    let mut optimizer = Optimizer::new(&params, &config(Optim::AdamwBf16));
    for _ in 0..50 {
        params[0].tensor.sum(Kind::Float).backward();
        optimizer.step(1e-4).unwrap();
    }
    // Fifty draws with a chance of 1/39 of a unit each: a standard deviation of 0.0044 of one number, 5.5e-5 of the mean of 6400.
    let mean = params[0].tensor.detach().to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    assert!((mean - (1.0 - 0.005)).abs() < 3e-4, "{mean}");
}

#[test]
fn weights_that_are_rounded_to_bf16_are_a_warning_and_the_reference_model_is_rounded_alike() {
    let scratch = Scratch::new();
    let rounds = "policy: optim = adamw_bf16 rounds weights that the files hold in another dtype to bfloat16: ";
    for flags in ["", "--sync_ref_model", "--num_shared_layers 1", "--offload models"] {
        let line = format!("{PPO} --bf16 --optim adamw_bf16 --overwrite_output_dir --total_episodes 4 {flags}");
        let ran = scratch.run(&line);
        assert!(ran.code == 0 && ran.stderr.contains(rounds), "{flags}: {}", ran.stderr);
        assert_eq!(scratch.metrics("out")[0]["objective/kl"], 0.0, "{flags}");
    }
    // Saved in bf16, it is the same when it is read.
    let line = format!("{SFT} --bf16 --optim adamw_bf16 --output_dir sft");
    assert!(scratch.run(&line).stderr.contains(rounds));
    scratch.succeeds(
        &line
            .replace("--model_name_or_path policy --", "--model_name_or_path sft --")
            .replace("--output_dir sft", "--output_dir again"),
    );
}
