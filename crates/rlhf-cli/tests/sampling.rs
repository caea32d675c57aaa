//! The sampling of PPO's responses: filters, minimum lengths, stop strings; the log-probabilities that follow from them,
//! and what
//! the saved policy says of them.

use crate::cli::{PPO, Scratch, json_lines};
use crate::support::{assert_close, golden, note_difference};
use rlhf::generate::{FinishReason, GenerationConfig, Response, generate};
use rlhf::model::{CausalLm, ModelOptions, SequenceClassifier};
use rlhf::optim::LearningRates;
use rlhf::reward::{FnReward, Rewards};
use rlhf::rl::experience::Experience;
use rlhf::rl::learner::Learner;
use rlhf::rl::rollout::{RolloutSettings, experience};
use rlhf::rl::shaping::targets;
use rlhf::settings::{LogprobsOf, PpoConfig};
use rlhf::train::ppo::PpoTrainer;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tch::{Kind, Tensor};

fn model(name: &str) -> CausalLm {
    CausalLm::from_pretrained(&golden().join("trl_new/init").join(name), ModelOptions::default()).unwrap()
}

fn config() -> PpoConfig {
    let mut config = PpoConfig::new("policy", "reward", "prompts.jsonl", "out");
    config.response_length = 10;
    config.total_episodes = Some(32);
    (config.sampling.top_k, config.sampling.top_p, config.sampling.min_p) = (9, 0.9, 0.01);
    (config.sampling.min_new_tokens, config.stop_token_id) = (3, Some(192));
    config.sampling.logprobs_of = LogprobsOf::Filtered;
    config
}

fn prompts() -> Vec<Vec<i64>> {
    (0..8).map(|row| (5..6 + row).collect()).collect()
}

fn responses(policy: &CausalLm, config: &PpoConfig) -> Vec<Response> {
    let generation = GenerationConfig {
        stop_token_ids: vec![192],
        seed: 1,
        min_new_tokens: config.sampling.min_new_tokens,
        keep_sets: true,
        ..GenerationConfig::new(config.sampling(), config.response_length)
    };
    generate(policy, &prompts(), &generation).unwrap()
}

/// The models' evaluation of the responses, whose scores are 0.
fn judged(learner: &Learner, reference: &CausalLm, responses: &[Response], config: &PpoConfig) -> Experience {
    let judges = learner.rollout_models(reference);
    let scores = Tensor::zeros([8], (Kind::Float, tch::Device::Cpu));
    experience(
        judges,
        &prompts(),
        responses,
        scores,
        &RolloutSettings { recompute_logprobs: true, ..config.rollout(judges.policy) },
    )
    .unwrap()
}

fn learner(config: &PpoConfig) -> Learner {
    let value = golden().join("trl_new/init/llama_value");
    let value = SequenceClassifier::from_pretrained(&value, None, ModelOptions::default()).unwrap();
    Learner::new(model("llama_policy"), value, config.learner())
}

/// Log-probabilities of the response tokens among the tokens that each was sampled from, by the definition.
fn among_sets(model: &CausalLm, responses: &[Response], temperature: f64) -> Vec<f64> {
    let mut found = Vec::new();
    for (prompt, response) in prompts().iter().zip(responses) {
        let whole = [prompt.as_slice(), &response.tokens].concat();
        let logits = tch::no_grad(|| model.logits(&[&whole]).unwrap().remove(0)).to_kind(Kind::Double) / temperature;
        let rows = Vec::<Vec<f64>>::try_from(logits.exp()).unwrap();
        let sets = response.sets.as_ref().unwrap();
        for (t, (&token, set)) in response.tokens.iter().zip(sets).enumerate() {
            let weights = &rows[prompt.len() - 1 + t];
            let among: f64 = set.ids().iter().map(|&id| weights[id as usize]).sum();
            found.push((weights[token as usize] / among).ln());
        }
    }
    found
}

fn counted(x: &Tensor, e: &Experience) -> Vec<f64> {
    Vec::<f64>::try_from(x.masked_select(&e.masks.response).to_kind(Kind::Double)).unwrap()
}

#[test]
fn filtered_logprobs_are_those_among_what_each_token_was_sampled_from_for_policy_and_reference() {
    let config = config();
    let (learner, reference) = (learner(&config), model("llama_ref"));
    let responses = responses(&learner.policy, &config);
    for response in &responses {
        for (t, (token, set)) in response.tokens.iter().zip(response.sets.as_ref().unwrap()).enumerate() {
            let ids = set.ids();
            assert!(ids.contains(token) && (1..=9).contains(&ids.len()), "{ids:?}");
            assert!(t >= 3 || !ids.contains(&192), "before the minimum length a stop token cannot be drawn");
        }
    }
    let e = judged(&learner, &reference, &responses, &config);
    let close = |found: Vec<f64>, expected: &[f64]| {
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-5), "{found:?}\n{expected:?}");
    };
    close(counted(&e.logprobs, &e), &among_sets(&learner.policy, &responses, 0.7));
    close(counted(e.ref_logprobs.as_ref().unwrap(), &e), &among_sets(&reference, &responses, 0.7));
    // By default they are of the whole vocabulary, though the sampling was filtered: lower, as no token is left out.
    let mut plain = config;
    plain.sampling.logprobs_of = LogprobsOf::Policy;
    let whole = judged(&learner, &reference, &responses, &plain);
    let sampled: Vec<f64> = responses.iter().flat_map(|r| r.logprobs.iter().map(|&x| f64::from(x))).collect();
    close(counted(&whole.logprobs, &whole), &sampled);
    assert!(counted(&(&e.logprobs - &whole.logprobs), &e).iter().all(|&more| more > 0.0));
}

#[test]
fn the_sets_stay_while_the_policy_learns_so_that_the_first_ratio_is_1_and_later_ones_are_of_the_same_tokens() {
    let mut config = config();
    config.learning_rate = 1e-3;
    let (mut learner, reference) = (learner(&config), model("llama_ref"));
    learner.collect_ratios = true;
    let responses = responses(&learner.policy, &config);
    let e = judged(&learner, &reference, &responses, &config);
    let old = among_sets(&learner.policy, &responses, 0.7);
    let (targets, plan) = (targets(&e, 0.05, &config.shaping()), config.plan(8).unwrap());
    let rates = LearningRates { policy: Some(1e-3), value: 1e-3 };
    let orders: Vec<Vec<usize>> = vec![(0..8).collect(); 2];
    let steps = learner.optimize(&e, &targets, &orders, rates, &plan.epoch).unwrap();
    assert!(steps[0].ratios.iter().all(|ratio| (ratio - 1.0).abs() < 1e-5), "{:?}", steps[0].ratios);
    // The second step's are those of the policy after the first, over the sets that the first one sampled from.
    let mut once = self::learner(&config);
    once.optimize(&e, &targets, &orders[..1], rates, &plan.epoch).unwrap();
    let now = among_sets(&once.policy, &responses, 0.7);
    let expected: Vec<f32> = now.iter().zip(&old).map(|(now, old)| (now - old).exp() as f32).collect();
    assert!(expected.iter().any(|ratio| (ratio - 1.0).abs() > 1e-3), "the step moved the policy");
    assert_close("ratios", &Tensor::from_slice(&steps[1].ratios), &Tensor::from_slice(&expected), 1e-4);
}

#[test]
fn the_first_step_measures_how_far_training_is_from_the_logprobs_that_sampling_recorded() {
    let mut config = config();
    config.sampling.logprobs_of = LogprobsOf::Policy;
    let rates = LearningRates { policy: Some(1e-3), value: 1e-3 };
    let orders: Vec<Vec<usize>> = vec![(0..8).collect(); 2];
    let steps = |responses: &[Response], config: &PpoConfig| {
        let (mut learner, reference) = (learner(config), model("llama_ref"));
        let e = judged(&learner, &reference, responses, config);
        let (targets, plan) = (targets(&e, 0.05, &config.shaping()), config.plan(8).unwrap());
        learner.optimize(&e, &targets, &orders, rates, &plan.epoch).unwrap()
    };
    let mut responses = responses(&learner(&config).policy, &config);
    let rounding = steps(&responses, &config);
    let first = rounding[0].sampling.unwrap();
    assert_eq!(first.tokens, responses.iter().map(|r| r.tokens.len() as f64).sum::<f64>());
    note_difference(first.most, 1e-5);
    assert!(first.most < 1e-5 && (first.ratio / first.tokens - 1.0).abs() < 1e-5, "{first:?}");
    assert!(rounding[1..].iter().all(|step| step.sampling.is_none()), "the policy has moved");
    // Two tokens of the record are off.
    responses[2].logprobs[1] -= 0.5;
    responses[5].logprobs[0] += 0.25;
    let found = steps(&responses, &config)[0].sampling.unwrap();
    assert!((found.most - 0.5).abs() < 1e-5 && (found.difference - 0.75).abs() < 1e-3, "{found:?}");
    assert!((found.ratios[0].ln() + 0.25).abs() < 1e-5 && (found.ratios[1].ln() - 0.5).abs() < 1e-5, "{found:?}");
    // Over the filtered vocabulary they are of other distributions.
    config.sampling.logprobs_of = LogprobsOf::Filtered;
    assert!(steps(&responses, &config)[0].sampling.is_none());
}

#[test]
fn a_run_with_filters_starts_at_ratio_1_and_kl_0_with_every_value_model_and_kl_estimator() {
    let scratch = Scratch::new();
    let filters = "--top_k 6 --top_p 0.9 --min_p 0.001 --num_ppo_epochs 1 --overwrite_output_dir";
    for flags in [
        "",
        "--logprobs_of filtered",
        "--logprobs_of filtered --kl_estimator full",
        "--logprobs_of filtered --kl_estimator full --kl_in_loss",
        "--logprobs_of filtered --value_head",
        "--logprobs_of filtered --gradient_checkpointing --use_peft",
    ] {
        scratch.succeeds(&format!("{PPO} {filters} {flags}"));
        let first = &scratch.metrics("out")[0];
        let number = |name: &str| first[name].as_f64().unwrap();
        assert!((number("val/ratio") - 1.0).abs() < 1e-5, "{flags}: {first:?}");
        assert!(number("objective/kl").abs() < 1e-4, "{flags}: {first:?}");
    }
    // Of one token alone there is no choice: its probability among itself is 1, and there is no entropy.
    let ran = scratch.run(&format!("{PPO} --top_k 1 --logprobs_of filtered --overwrite_output_dir"));
    assert!(ran.code == 0 && ran.stderr.contains("the policy's entropy is 0.000 nats per token"), "{}", ran.stderr);
    for line in scratch.metrics("out") {
        let zero = |name: &str| assert!(line[name].as_f64().unwrap().abs() < 1e-6, "{name}: {line:?}");
        ["objective/entropy", "policy/entropy_avg", "objective/kl", "policy/approxkl_avg"].into_iter().for_each(zero);
    }
    scratch.succeeds(&format!("{PPO} --top_k 1 --overwrite_output_dir"));
    assert!(
        scratch.metrics("out")[0]["objective/entropy"].as_f64().unwrap() > 1.0,
        "by default it is the policy's own"
    );
}

#[test]
fn a_response_ends_behind_a_stop_string_and_counts_as_stopped() {
    let scratch = Scratch::new();
    let mut config =
        PpoConfig::without_reward(scratch.path("policy"), scratch.path("prompts.jsonl"), scratch.path("out"));
    (config.response_length, config.total_episodes, config.per_device_train_batch_size) = (12, Some(32), Some(16));
    config.sampling.stop_strings = vec!["e".into(), "an".into()];
    (config.missing_eos_penalty, config.kl.kl_coef) = (Some(2.0), 0.0);
    let seen: Arc<Mutex<Vec<(String, FinishReason, usize)>>> = Arc::default();
    let noted = seen.clone();
    let reward = FnReward::new(move |batch| {
        let rows = batch.iter().map(|row| (row.response.to_string(), row.finish, row.response_ids.len()));
        noted.lock().unwrap().extend(rows);
        Ok(vec![0.0; batch.len()])
    });
    let mut trainer = PpoTrainer::from_config_with(&config, Rewards::new().with("none", reward)).unwrap();
    let metrics = trainer.update().unwrap();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(seen.len(), 16);
    let stopped = seen.iter().filter(|(_, finish, _)| *finish == FinishReason::Stop).count();
    assert!((1..16).contains(&stopped), "{seen:?}");
    for (text, finish, length) in &seen {
        let holds = text.contains('e') || text.contains("an");
        assert_eq!(holds, *finish == FinishReason::Stop, "{text:?}");
        assert!(*finish == FinishReason::Stop || *length == 12, "{text:?}");
    }
    // The rewards are 0, so that the score is the penalty of those that did not stop; some may hold an eos by chance.
    let score = metrics.get("objective/scores").unwrap();
    let missing = (-score / 2.0 * 16.0).round() as usize;
    let by_eos = metrics.get("val/num_eos_tokens").unwrap() as usize;
    assert!((16 - stopped - by_eos.min(16 - stopped)..=16 - stopped).contains(&missing), "{score} {stopped} {by_eos}");
    // Evaluations and tables end there too.
    scratch.succeeds(&format!("{PPO} --stop_strings e --eval_split_size 3 --eval_steps 1 --num_sample_generations 1"));
    let samples = json_lines(&scratch.read("out/samples/update-000002.jsonl"));
    let evaluated = std::fs::read_dir(scratch.path("out/samples")).unwrap().count();
    assert!(evaluated >= 2 && !samples.is_empty());
    for file in std::fs::read_dir(scratch.path("out/samples")).unwrap() {
        for row in json_lines(&std::fs::read_to_string(file.unwrap().path()).unwrap()) {
            let response = row["response"].as_str().unwrap();
            assert!(response.find('e').is_none_or(|at| at + 8 > response.len()), "{response:?}");
        }
    }
}

#[test]
fn the_saved_policy_records_its_sampling_and_generate_takes_it_where_nothing_else_is_said() {
    let scratch = Scratch::new();
    // What the model came with holds no longer, but for its tokens.
    scratch.write(
        "policy/generation_config.json",
        "{\"bos_token_id\": 3, \"top_k\": 50, \"typical_p\": 0.5, \"repetition_penalty\": 1.3, \"max_new_tokens\": 3}",
    );
    let sampling = "--temperature 0.9 --top_k 4 --top_p 0.8 --min_p 0.01";
    scratch.succeeds(&format!("{PPO} {sampling} --stop_token_id 7 --num_sample_generations 0"));
    let config: Value = serde_json::from_str(&scratch.read("out/generation_config.json")).unwrap();
    for (name, expected) in [
        ("do_sample", json!(true)),
        ("temperature", json!(0.9)),
        ("top_k", json!(4)),
        ("top_p", json!(0.8)),
        ("min_p", json!(0.01)),
        ("max_new_tokens", json!(8)),
        ("bos_token_id", json!(3)),
        ("repetition_penalty", Value::Null),
        ("typical_p", Value::Null),
    ] {
        assert_eq!(config[name], expected, "{name}: {config}");
    }
    let ends = config["eos_token_id"].as_array().unwrap();
    assert!(ends.len() == 2 && ends[1] == 7, "the tokenizer's eos, and what ended the responses: {config}");
    let generate =
        |flags: &str| scratch.succeeds(&format!("generate --model out --dataset_name prompts.jsonl {flags}"));
    let usual = generate("");
    assert_eq!(usual, generate(&format!("{sampling} --max_new_tokens 8 --do_sample true")));
    let lengths: Vec<u64> = json_lines(&usual).iter().map(|row| row["num_tokens"].as_u64().unwrap()).collect();
    assert!(lengths.iter().all(|length| (1..=8).contains(length)) && lengths.contains(&8), "{lengths:?}");
    assert_ne!(usual, generate("--top_k 0 --top_p 1 --min_p 0"));
    assert_eq!(generate("--do_sample false"), generate("--temperature 0"));
    // Of an adapter it is that of its own folder.
    scratch.succeeds(&format!("{PPO} {sampling} --use_peft --num_sample_generations 0 --overwrite_output_dir"));
    assert_eq!(generate(""), generate(&format!("{sampling} --max_new_tokens 8")));
    // What is no such setting is refused by its place.
    scratch.write("out/generation_config.json", "{\"top_p\": \"much\"}");
    let words = ["generation_config.json: `top_p`: expected a number, found \"much\""];
    scratch.refuses("generate --model out --dataset_name prompts.jsonl", 1, &words);
    // One that fills the context leaves no room for a prompt, and is passed over.
    scratch
        .write("out/generation_config.json", "{\"max_new_tokens\": 64, \"do_sample\": false, \"eos_token_id\": null}");
    let rows = json_lines(&generate(""));
    assert!(rows.iter().all(|row| row["num_tokens"].as_u64().unwrap() <= 53));
    scratch.refuses("generate --model out --num_return_sequences 2 x", 2, &["would give equal responses"]);
}

#[test]
fn settings_of_sampling_that_mean_nothing_or_contradict_each_other_are_refused() {
    type Change = fn(&mut PpoConfig);
    let filtered: Change = |c| {
        c.sampling.logprobs_of = LogprobsOf::Filtered;
        c.sampling.top_k = 5;
    };
    let changes: [(Change, &str); 10] = [
        (|c| c.sampling.top_p = 0.0, "top_p = 0: expected a number above 0"),
        (|c| c.sampling.top_p = 1.5, "top_p = 1.5: expected a number from 0 to 1"),
        (|c| c.sampling.min_p = -0.1, "min_p = -0.1: expected a number from 0 to 1"),
        (|c| c.sampling.repetition_penalty = 0.0, "repetition_penalty = 0: expected a number above 0"),
        (|c| c.sampling.min_new_tokens = 60, "min_new_tokens = 60: expected at most response_length = 53"),
        (|c| c.sampling.min_new_tokens = 6, "min_new_tokens = 6 has no effect without stop_token"),
        (|c| c.sampling.stop_strings = vec![String::new()], "stop_strings = \"\": expected some text"),
        (
            |c| c.sampling.top_k = 0,
            "logprobs_of = filtered has no effect without top_k, top_p, min_p or min_new_tokens",
        ),
        (|c| c.sampling.repetition_penalty = 1.2, "logprobs_of = filtered with repetition_penalty = 1.2: a penalty"),
        (|c| c.mask.min_response_length = 2, "logprobs_of = filtered with min_response_length = 2: "),
    ];
    for (at, (change, message)) in changes.iter().enumerate() {
        let mut config = PpoConfig::new("policy", "reward", "prompts.jsonl", "out");
        if at >= 7 {
            filtered(&mut config);
            config.check().unwrap();
        }
        change(&mut config);
        let error = config.check().unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}
