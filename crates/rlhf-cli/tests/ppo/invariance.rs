//! What a PPO run may not depend on: how its rows are cut into passes. And what its sizes and its precision do change.

use crate::support::{assert_close, golden, init};
use rlhf::generate::{GenerationConfig, Sampling, generate};
use rlhf::model::{CausalLm, ModelOptions, SequenceClassifier};
use rlhf::optim::LearningRates;
use rlhf::rl::learner::Learner;
use rlhf::rl::rollout::{RolloutSettings, experience, score};
use rlhf::rl::shaping::targets;
use rlhf::run::{Console, MicroBatchLimit};
use rlhf::settings::{ByteSize, PpoConfig};
use rlhf::train::ppo::ppo;
use rlhf::weights::Checkpoint;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use tch::{Device, Kind, Tensor};

const PROMPTS: [&str; 8] = ["The movie", "A film", "the capital of France", "do", "human", "a sing", "2024", "is it"];

/// Three updates of 8 responses; at this temperature some rows of every batch stop early and others do not stop at all.
fn config(dir: &Path) -> PpoConfig {
    let prompts = dir.join("prompts.jsonl");
    let rows = PROMPTS.map(|prompt| format!("{}\n", serde_json::json!({"prompt": prompt})));
    std::fs::write(&prompts, rows.concat()).unwrap();
    let mut config = PpoConfig::new(init("llama_policy"), init("llama_reward"), prompts, dir.join("out"));
    config.model_name_or_path = Some(golden().join("models/gpt_neox"));
    config.response_length = 12;
    config.temperature = 0.4;
    config.stop_token_id = Some(192);
    config.total_episodes = Some(24);
    config.num_sample_generations = 0;
    // Steps a hundred times the tolerance of the weights, and an epsilon that leaves round-off as small as it is:
    // without it Adam turns a gradient of 1e-9, which is noise, into a whole step.
    config.learning_rate = 1e-3;
    config.optimizer.adam_epsilon = 1e-5;
    config
}

/// What a run left: a line of metrics per update, and the weights of both models.
struct Outcome {
    metrics: Vec<Map<String, Value>>,
    weights: BTreeMap<String, Tensor>,
}

fn weights(dir: &Path, prefix: &str) -> BTreeMap<String, Tensor> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let read = |name: &str| (format!("{prefix}.{name}"), checkpoint.read(name, Device::Cpu, tch::Kind::Float).unwrap());
    checkpoint.names().map(read).collect()
}

fn train(change: impl FnOnce(&mut PpoConfig)) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    change(&mut config);
    ppo(&config, Console::Silent).unwrap();
    let out = &config.run.output_dir;
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let metrics = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut found = weights(out, "policy");
    found.append(&mut weights(&out.join("value_model"), "value"));
    Outcome { metrics, weights: found }
}

impl Outcome {
    fn metric(&self, name: &str) -> Vec<f64> {
        self.metrics.iter().map(|line| line[name].as_f64().unwrap()).collect()
    }

    /// Panics unless the metrics agree within 1e-4 and the weights within 2e-5, a fiftieth of a step.
    fn is(&self, what: &str, expected: &Outcome) {
        let clock = |name: &str| {
            ["eps", "step_time"].contains(&name) || name.starts_with("time/") || name.starts_with("tokens_per_second/")
        };
        for name in expected.metrics[0].keys().filter(|name| !clock(name)) {
            for (found, expected) in self.metric(name).iter().zip(expected.metric(name)) {
                assert!((found - expected).abs() <= 1e-4, "{what}: {name} is {found}, not {expected}");
            }
        }
        for (name, expected) in &expected.weights {
            assert_close(&format!("{what}: {name}"), &self.weights[name], expected, 2e-5);
        }
    }
}

fn passes(config: &mut PpoConfig, per_device_train_batch_size: usize, gradient_accumulation_steps: usize) {
    config.per_device_train_batch_size = Some(per_device_train_batch_size);
    config.gradient_accumulation_steps = gradient_accumulation_steps;
}

#[test]
fn the_runs_below_have_rows_of_different_lengths_and_move_the_weights() {
    let run = train(|_| ());
    assert!(run.metric("val/response_length").iter().all(|&mean| mean > 4.0 && mean < 12.0), "some rows stop early");
    assert!(run.metric("val/num_eos_tokens").iter().all(|&stopped| stopped > 0.0 && stopped < 8.0), "some never");
    let start = weights(&init("llama_policy"), "policy");
    let moved = start.iter().map(|(name, from)| (&run.weights[name] - from).abs().max().double_value(&[]));
    assert!(moved.fold(0.0, f64::max) > 1e-3);
}

#[test]
fn a_batch_cut_into_passes_of_any_size_trains_alike() {
    let whole = train(|config| passes(config, 8, 1));
    for (rows, times) in [(4, 2), (2, 4), (1, 8)] {
        train(|config| passes(config, rows, times)).is(&format!("{rows} x {times}"), &whole);
    }
    let halves = train(|config| config.num_mini_batches = 2);
    let quarters = train(|config| {
        config.num_mini_batches = 2;
        passes(config, 2, 4);
    });
    quarters.is("2 x 4, two mini-batches", &halves);
}

#[test]
fn a_budget_of_tokens_and_checkpoints_of_the_layers_change_no_result() {
    let whole = train(|config| passes(config, 8, 1));
    for most in [1, 30, 1000] {
        let cut = train(|config| {
            passes(config, 8, 1);
            config.run.max_tokens_per_micro_batch = Some(MicroBatchLimit::Tokens(most));
        });
        cut.is(&format!("{most} tokens"), &whole);
    }
    let by_memory = train(|config| {
        passes(config, 8, 1);
        config.run.max_tokens_per_micro_batch = Some(MicroBatchLimit::Memory(ByteSize(1 << 20)));
    });
    by_memory.is("1 MiB", &whole);
    let checkpoints = train(|config| {
        passes(config, 8, 1);
        config.run.gradient_checkpointing = true;
    });
    for (name, expected) in &whole.weights {
        assert_eq!(&checkpoints.weights[name], expected, "{name}: computed again, it is the same bit for bit");
    }
}

#[test]
fn rollouts_in_batches_of_any_size_train_alike() {
    let whole = train(|config| config.local_rollout_forward_batch_size = 64);
    for size in [1, 3] {
        train(|config| config.local_rollout_forward_batch_size = size).is(&format!("by {size}"), &whole);
    }
}

#[test]
fn every_mini_batch_of_every_epoch_is_one_optimizer_step_over_its_own_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let options = ModelOptions::default();
    let policy = || CausalLm::from_pretrained(&init("llama_policy"), options).unwrap();
    let classifier = |name| SequenceClassifier::from_pretrained(&init(name), None, options).unwrap();
    for num_mini_batches in [1, 2, 4] {
        let mut config = config(dir.path());
        config.num_mini_batches = num_mini_batches;
        let mut learner = Learner::new(policy(), classifier("llama_value"), config.learner());
        let prompts: Vec<Vec<i64>> = (0..8).map(|row| (5..6 + row).collect()).collect();
        let generation = GenerationConfig {
            stop_token_ids: config.stop_token_id.into_iter().collect(),
            seed: 1,
            ..GenerationConfig::new(Sampling::at_temperature(config.temperature), config.response_length)
        };
        let responses = generate(&learner.policy, &prompts, &generation).unwrap();
        let sequences: Vec<Vec<i64>> =
            prompts.iter().zip(&responses).map(|(p, r)| [&p[..], &r.tokens].concat()).collect();
        let scores = score(&classifier("llama_reward"), &sequences, 8).unwrap();
        let reference = policy();
        let judges = learner.rollout_models(&reference);
        let experience = experience(
            judges,
            &prompts,
            &responses,
            scores,
            &RolloutSettings { recompute_logprobs: false, ..config.rollout(judges.policy) },
        )
        .unwrap();
        let targets = targets(&experience, config.kl.kl_coef, &config.shaping());

        let plan = config.plan(prompts.len()).unwrap();
        let orders = vec![vec![0, 1, 2, 3, 4, 5, 6, 7], vec![7, 6, 5, 4, 3, 2, 1, 0]];
        let rates = LearningRates { policy: Some(1e-6), value: 1e-6 };
        let steps = learner.optimize(&experience, &targets, &orders, rates, &plan.epoch).unwrap();
        let rows: Vec<f64> = orders.concat().iter().map(|&row| experience.lengths()[row] as f64).collect();
        let tokens: Vec<f64> = rows.chunks(8 / num_mini_batches).map(|rows| rows.iter().sum()).collect();
        assert_eq!(steps.iter().map(|step| step.tokens).collect::<Vec<_>>(), tokens);
        assert_eq!(steps.len(), 2 * num_mini_batches);
    }
}

/// The weights of policy and critic after an update with these responses, the first half of which has `result` after it.
fn weights_after(dir: &Path, result: &[i64]) -> Vec<(String, Tensor)> {
    let options = ModelOptions::default();
    let policy = || CausalLm::from_pretrained(&init("llama_policy"), options).unwrap();
    let critic = SequenceClassifier::from_pretrained(&init("llama_value"), None, options).unwrap();
    let config = config(dir);
    let (mut learner, reference) = (Learner::new(policy(), critic, config.learner()), policy());
    let prompts: Vec<Vec<i64>> = (0..8).map(|row| (5..6 + row).collect()).collect();
    let generation = GenerationConfig { seed: 1, ..GenerationConfig::new(Sampling::at_temperature(1.0), 8) };
    let mut responses = generate(&learner.policy, &prompts, &generation).unwrap();
    for response in &mut responses[..4] {
        // A result in the middle of each response, which is the same in all runs, and one at its end.
        response.inserted = vec![2..4, 8..8 + result.len()];
        response.inserted.retain(|span| !span.is_empty());
        response.tokens.extend(result);
        response.logprobs[2..4].fill(0.0);
        response.logprobs.resize(response.tokens.len(), 0.0);
    }
    let judges = learner.rollout_models(&reference);
    let settings = RolloutSettings { recompute_logprobs: true, response_length: 12, ..config.rollout(judges.policy) };
    let scores = Tensor::from_slice(&[1.0, -0.5, 0.3, 2.0, 0.1, -1.0, 0.7, 0.0]).to_kind(Kind::Float);
    let experience = experience(judges, &prompts, &responses, scores, &settings).unwrap();
    let targets = targets(&experience, config.kl.kl_coef, &config.shaping());
    let plan = config.plan(prompts.len()).unwrap();
    let rates = LearningRates { policy: Some(1e-3), value: 1e-3 };
    let orders = vec![(0..8).collect::<Vec<usize>>(); 2];
    learner.optimize(&experience, &targets, &orders, rates, &plan.epoch).unwrap();
    let params = learner.policy.params().iter().chain(learner.value.params());
    params.map(|param| (param.name.clone(), param.tensor.detach().copy())).collect()
}

#[test]
fn a_result_that_no_sampled_token_follows_changes_no_gradient() {
    let dir = tempfile::tempdir().unwrap();
    let one = weights_after(dir.path(), &[31, 32, 33, 34]);
    for ((name, found), (_, expected)) in weights_after(dir.path(), &[90, 41, 17, 200]).iter().zip(&one) {
        assert_eq!(found, expected, "{name}: with another text it is the same bit for bit");
    }
    for ((name, found), (_, expected)) in weights_after(dir.path(), &[]).iter().zip(&one) {
        // Rounding: 2.5e-5 on a Xeon.
        assert_close(&format!("{name} without a result"), found, expected, 5e-5);
    }
    let start = weights(&init("llama_policy"), "policy");
    let moved = one.iter().filter_map(|(name, tensor)| {
        Some((tensor - start.get(&format!("policy.{name}"))?).abs().max().double_value(&[]))
    });
    assert!(moved.fold(0.0, f64::max) > 1e-3);
}

#[test]
fn in_bf16_the_first_step_starts_at_a_ratio_of_1_and_weights_stay_f32() {
    let exact = train(|config| config.num_ppo_epochs = 1);
    let run = train(|config| {
        config.run.bf16 = true;
        config.num_ppo_epochs = 1;
    });
    for (ratio, variance) in run.metric("val/ratio").into_iter().zip(run.metric("val/ratio_var")) {
        assert!((ratio - 1.0).abs() <= 1e-3 && variance <= 1e-3, "{ratio}, variance {variance}");
    }
    assert_ne!(run.metric("policy/entropy_avg"), exact.metric("policy/entropy_avg"), "computed in f32");
    // bf16 would round a step of 1e-3 away from most weights.
    let start = weights(&init("llama_policy"), "policy");
    let kept = run.weights.iter().filter(|(name, _)| start.contains_key(*name));
    let rounded = kept.filter(|(_, tensor)| **tensor == tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float)).count();
    assert_eq!(rounded, 0);
}
