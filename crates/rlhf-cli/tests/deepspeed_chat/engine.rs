//! DeepSpeed-Chat's engine: its functions and steps against its own numbers, and what the engine and the trainer share.

use crate::cli::{Scratch, json_lines, timeless};
use crate::support::{Tensors, assert_close, chosen_golden, golden, init, read_json, required_golden, say};
use rlhf::compat::engine::{
    Batch, MiniDataset, RlhfEngine, RlhfExperience, actor_loss_fn, compute_rewards, critic_loss_fn, ends,
    get_advantages_and_returns,
};
use rlhf::generate::{FinishReason, GenerationConfig, Response, Sampling, generate};
use rlhf::model::{CausalLm, ModelOptions, Param, SequenceClassifier};
use rlhf::optim::LearningRates;
use rlhf::reward::{FnReward, RewardModel, Rewards};
use rlhf::rl::experience::Experience;
use rlhf::rl::learner::Learner;
use rlhf::rl::rollout::{RolloutSettings, experience};
use rlhf::rl::shaping::targets;
use rlhf::run::{Console, WarningKind};
use rlhf::settings::{EosInLoss, LrSchedulerType, OffloadPart, PpoConfig, Preset};
use rlhf::tokenizer::Tokenizer;
use rlhf::train::ppo::{PpoTrainer, ppo};
use rlhf::weights::save;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

fn chat() -> PpoConfig {
    PpoConfig::with_preset(Preset::DeepspeedChat, "actor", "critic", "prompts", "out")
}

fn number(x: &Tensor) -> f64 {
    x.double_value(&[])
}

// The functions.

/// The settings of DeepSpeed-Chat's trainer, and those that a case has in their place.
fn hyper(usual: &Value, overrides: &Value) -> PpoConfig {
    let mut config = chat();
    for (name, value) in usual.as_object().unwrap().iter().chain(overrides.as_object().into_iter().flatten()) {
        let value = value.as_f64().unwrap();
        match name.as_str() {
            "kl_ctl" => config.kl.kl_coef = value,
            "clip_reward_value" => config.clip_reward_value = Some(value),
            "cliprange" => config.cliprange = value,
            "cliprange_value" => config.cliprange_value = value,
            "gamma" => config.gamma = value,
            "lam" => config.lam = value,
            other => panic!("unknown setting {other}"),
        }
    }
    config
}

fn compare_functions(dir: &Path) -> usize {
    let (golden, info) = (Tensors::read(&dir.join("functions.safetensors")), read_json(&dir.join("info.json")));
    // Cases of reward models have other tensors; their test reads them.
    let is_of_functions = |case: &str| golden.names().any(|name| name == format!("{case}.action_mask"));
    let cases: Vec<_> = info["cases"].as_object().unwrap().iter().filter(|(case, _)| is_of_functions(case)).collect();
    for (case, described) in &cases {
        let config = hyper(&info["hyper"], &described["overrides"]);
        let get = |name: &str| golden.get(&format!("{case}.{name}"));
        let check = |name: &str, found: &Tensor| {
            let (found, expected) = (found.to_kind(Kind::Float), get(name).to_kind(Kind::Float));
            assert_close(&format!("{case}.{name}"), &found, &expected, 2e-5);
        };
        let (prompts, mask) = (get("prompts"), get("action_mask"));
        let (old, reference) = (get("log_probs"), get("ref_log_probs"));
        let start = prompts.size()[1] - 1;
        let rewards = compute_rewards(prompts, old, reference, get("reward_score"), mask, &config);
        check("rewards", &rewards);
        let ends = ends(prompts, mask);
        check("ends", &ends);
        let columns = Tensor::arange(old.size()[1], (Kind::Int64, Device::Cpu)).unsqueeze(0);
        let behind = columns.ge_tensor(&ends.unsqueeze(1));
        let (rewards, values) = (rewards.masked_fill(&behind, 0.0), get("values").masked_fill(&behind, 0.0));
        check("rewards_zeroed", &rewards);
        check("values_zeroed", &values);
        let (advantages, returns) = get_advantages_and_returns(&values, &rewards, start, &config);
        check("advantages", &advantages);
        check("returns", &returns);
        let response = |x: &Tensor| x.narrow(1, start, x.size()[1] - start);
        let leaf = |name: &str| get(name).copy().set_requires_grad(true);
        let (new, new_values) = (leaf("new_log_probs"), leaf("new_values"));
        let actor = actor_loss_fn(&response(&new), &response(old), &advantages, &response(mask), &config);
        let critic = critic_loss_fn(&response(&new_values), &response(&values), &returns, &response(mask), &config);
        check("actor_loss", &actor);
        check("critic_loss", &critic);
        (actor + critic).backward();
        check("grad_new_log_probs", &new.grad());
        check("grad_new_values", &new_values.grad());
    }
    cases.len()
}

#[test]
fn the_functions_give_deepspeed_chats_numbers_and_gradients() {
    let dir = chosen_golden().join("dschat");
    let cases = compare_functions(&dir);
    let more =
        if dir.join("steps/functions.safetensors").is_file() { compare_functions(&dir.join("steps")) } else { 0 };
    say(&format!("{}: {cases} and {more} cases", dir.display()));
    assert!(cases > 0);
}

#[test]
fn an_eos_that_is_padding_gets_the_score_and_no_loss() {
    // Prompts of 2 tokens; the first row's response is 5 and 6 and ends (9 pads), the second fills its width.
    let rows = |rows: &[&[f32]]| Tensor::from_slice(&rows.concat()).view([rows.len() as i64, -1]);
    let prompts = Tensor::from_slice(&[1i64, 1, 1, 1]).view([2, 2]);
    let mask = rows(&[&[1., 1., 1., 0., 0.], &[1., 1., 1., 1., 1.]]).to_kind(Kind::Int64);
    let old = rows(&[&[-0.3, -1.0, -2.0, -0.5, -4.0], &[-0.1, -1.0, -1.0, -1.0, -1.0]]);
    let reference = rows(&[&[-0.3, -1.2, -1.5, -0.6, -4.5], &[-0.1, -1.5, -0.5, -1.0, -2.0]]);
    let values = rows(&[&[0.9, 0.1, 0.2, 0.3, 0.0], &[0.9, 0.5, 0.4, 0.3, 0.2]]);
    let rewards = compute_rewards(&prompts, &old, &reference, &Tensor::from_slice(&[7.0f32, -0.5]), &mask, &chat());
    assert_eq!(Vec::<i64>::try_from(ends(&prompts, &mask)).unwrap(), [4, 6]);
    let rewards = rewards.masked_fill(&rows(&[&[0., 0., 0., 0., 1.], &[0.; 5]]).to_kind(Kind::Bool), 0.0);
    let response = |x: &Tensor| x.narrow(1, 1, 4);
    assert_close("rewards", &response(&rewards), &rows(&[&[-0.02, 0.05, 4.99, 0.0], &[-0.05, 0.05, 0.0, -0.6]]), 1e-6);
    let (advantages, returns) = get_advantages_and_returns(&values, &rewards, 1, &chat());
    let expected = rows(&[&[4.455_225, 4.6055, 4.69, 0.0], &[-0.97365, -0.867, -0.86, -0.8]]);
    assert_close("advantages", &advantages, &expected, 2e-6);
    let expected = rows(&[&[4.555_224, 4.8055, 4.99, 0.0], &[-0.47365, -0.467, -0.56, -0.6]]);
    assert_close("returns", &returns, &expected, 2e-6);
}

// The steps.

/// A folder of one of the models: the tensors of `init.safetensors` whose names begin with `prefix`. Where it has none, the
/// reference model is `models/opt` and the reward model `value_heads/opt_dschat`.
fn folder(dir: &Path, init: &Tensors, config: &Path, prefix: &str) -> PathBuf {
    let out = dir.join(prefix);
    std::fs::create_dir(&out).unwrap();
    std::fs::copy(config, out.join("config.json")).unwrap();
    let begin = format!("{prefix}.");
    let mut tensors: Vec<(&str, &Tensor)> =
        init.names().filter_map(|name| Some((name.strip_prefix(&begin)?, init.get(name)))).collect();
    let shared = if prefix == "ref" { "models/opt" } else { "value_heads/opt_dschat" };
    let shared = Tensors::read(&golden().join(shared).join("model.safetensors"));
    if tensors.is_empty() {
        assert!(["ref", "reward"].contains(&prefix), "init.safetensors: no {prefix}");
        tensors = shared.names().map(|name| (name, shared.get(name))).collect();
    }
    let critic = tensors.iter().any(|(name, _)| name.contains("v_head"));
    let tensors: Vec<(String, Tensor)> =
        tensors.iter().filter_map(|(name, tensor)| Some((stored(name, critic)?, tensor.shallow_clone()))).collect();
    save(&out, &tensors, usize::MAX).unwrap();
    out
}

/// The name in a checkpoint: of a critic DeepSpeed-Chat's, else transformers'; none for a head that is the embedding again.
fn stored(name: &str, critic: bool) -> Option<String> {
    match name.find("decoder.") {
        Some(at) if critic => Some(format!("rwtransformer.{}", &name[at..])),
        Some(at) => Some(format!("model.{}", &name[at..])),
        None if name.contains("v_head") => Some("v_head.weight".into()),
        None => None,
    }
}

fn compare_steps(dir: &Path, config_file: &Path) {
    let read = |name: &str| Tensors::read(&dir.join(name));
    let (init, data, last) = (read("init.safetensors"), read("data.safetensors"), read("final.safetensors"));
    let info = dir.join("info.json");
    let info = if info.is_file() { read_json(&info) } else { Value::Null };
    let noise = &info["noise_floor_f32_vs_f64"];
    let tolerance = |kind: &str, name: &str| {
        let found = noise[kind][name].as_f64().or(noise[name].as_f64()).unwrap_or(1e-5);
        (5.0 * found).max(2e-5)
    };
    let scratch = tempfile::tempdir().unwrap();
    let model = |prefix: &str| folder(scratch.path(), &init, config_file, prefix);
    let (actor, reference, critic, reward) = (model("actor"), model("ref"), model("critic"), model("reward"));
    let tokenizer = Tokenizer::of_text_or_ids(&actor).unwrap();

    let mut config = chat();
    (config.learning_rate, config.value.value_learning_rate) = (1e-3, Some(1e-3));
    (config.optimizer.lr_scheduler_type, config.optimizer.warmup_steps) = (LrSchedulerType::Constant, 0);
    config.optimizer.max_grad_norm = None;
    let options = ModelOptions::default();
    let lm = |dir: &Path| CausalLm::from_pretrained(dir, options).unwrap();
    let critic = SequenceClassifier::from_pretrained(&critic, None, options).unwrap();
    let reward = RewardModel::from_pretrained(&reward, None, None, &tokenizer, 8, options).unwrap();
    let reward = Rewards::new().with("model", reward);
    // Whether eos pads, the sequences tell.
    let eos = tokenizer.eos().unwrap();
    let (ids, mask) = (data.rows("step0.exp.input_ids"), data.rows("step0.exp.attention_mask"));
    let pads = ids.iter().flatten().zip(mask.iter().flatten()).any(|(&id, &mask)| id == eos && mask == 0);
    config.mask.eos_in_loss = if pads { EosInLoss::Never } else { EosInLoss::Always };
    let mut engine = RlhfEngine::new(lm(&actor), lm(&reference), critic, reward, tokenizer, &config).unwrap();

    let steps = (0..).take_while(|step| data.names().any(|name| name.starts_with(&format!("step{step}.")))).count();
    assert!(steps > 0, "{}: no steps", dir.display());
    for step in 0..steps {
        let full = |name: &str| format!("step{step}.{name}");
        let get = |name: &str| data.get(&full(&format!("exp.{name}")));
        let exp = RlhfExperience {
            prompts: get("prompts").to_kind(Kind::Int64),
            logprobs: get("logprobs").shallow_clone(),
            ref_logprobs: get("ref_logprobs").shallow_clone(),
            value: get("value").shallow_clone(),
            rewards: get("rewards").shallow_clone(),
            input_ids: get("input_ids").to_kind(Kind::Int64),
            attention_mask: get("attention_mask").to_kind(Kind::Int64),
        };
        let width = exp.prompts.size()[1];
        let prompt_mask = exp.attention_mask.narrow(1, 0, width);
        let found = engine.experience_of(&exp.prompts, &prompt_mask, responses(&exp, eos)).unwrap();
        let counts = exp.attention_mask.narrow(1, 1, exp.attention_mask.size()[1] - 1);
        let columns = exp.attention_mask.size()[1] - width;
        // Ours are as wide as the longest response.
        let wide = |x: &Tensor| x.constant_pad_nd([0, counts.size()[1] - x.size()[1]]);
        let response = |x: &Tensor| (wide(x) * &counts).narrow(1, width - 1, columns);
        for (name, found, expected) in [
            ("logprobs", &found.logprobs, &exp.logprobs),
            ("ref_logprobs", &found.ref_logprobs, &exp.ref_logprobs),
            ("value", &found.value, &exp.value),
        ] {
            let full = full(&format!("exp.{name}"));
            assert_close(&full, &response(found), &response(expected), tolerance("tensors", &full));
        }
        assert_close("scores", &found.rewards, &exp.rewards, tolerance("tensors", &full("exp.rewards")));
        let behind = exp.attention_mask.size()[1] - found.attention_mask.size()[1];
        assert_eq!(found.attention_mask.constant_pad_nd([0, behind]), exp.attention_mask);
        let mut losses = Vec::new();
        for _ in 0..info["epochs"].as_u64().unwrap_or(2) {
            losses.push(engine.train_rlhf(&exp).unwrap());
        }
        for (name, found) in [
            ("actor_loss", losses.iter().map(|loss| loss.0).collect::<Vec<_>>()),
            ("critic_loss", losses.iter().map(|loss| loss.1).collect()),
        ] {
            let name = full(name);
            if data.names().any(|known| known == name) && data.get(&name).numel() == found.len() {
                let expected = Vec::<f64>::try_from(data.get(&name).to_kind(Kind::Double).view([-1])).unwrap();
                let gap = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(gap < 1e-4, "{name}: {found:?} is not {expected:?}");
            }
        }
    }
    let compare = |prefix: &str, params: &[Param], critic: bool| {
        for param in params {
            let whole = last.names().filter_map(|name| name.split('[').next());
            let name = { whole }.find(|name| {
                let inner = name.strip_prefix(prefix).and_then(|name| name.strip_prefix('.'));
                inner.and_then(|inner| stored(inner, critic)).is_some_and(|inner| same_tensor(&inner, &param.name))
            });
            let name = name.unwrap_or_else(|| panic!("no {prefix}.{}", param.name));
            // Softmax makes the gradient of a key's bias 0, and Adam steps of what rounding leaves.
            if !name.ends_with("k_proj.bias") {
                let part = last.part(name);
                assert_close(name, &part.select(&param.tensor.detach()), part.tensor, tolerance("final", name));
            }
        }
    };
    compare("actor", engine.actor().params(), false);
    compare("critic", engine.learner.value.params(), true);
    say(&format!("{}: {steps} steps compared to the weights", dir.display()));
}

/// Whether a name of a checkpoint and one of ours are of the same tensor, for any prefix.
fn same_tensor(stored: &str, ours: &str) -> bool {
    let end = |name: &str| name.find("decoder.").map_or(name.to_string(), |at| name[at..].to_string());
    end(stored) == end(ours)
}

/// The responses that a batch holds: what its mask counts, and an `eos` that is padding behind that.
fn responses(exp: &RlhfExperience, eos: i64) -> Vec<Response> {
    let width = exp.prompts.size()[1] as usize;
    let rows = Vec::<Vec<i64>>::try_from(&exp.input_ids).unwrap();
    let masks = Vec::<Vec<i64>>::try_from(&exp.attention_mask).unwrap();
    let one = |(ids, mask): (&Vec<i64>, &Vec<i64>)| {
        let counted = mask[width..].iter().sum::<i64>() as usize;
        let ended = ids.get(width + counted) == Some(&eos);
        let tokens = ids[width..width + counted + usize::from(ended)].to_vec();
        // Their log-probabilities are computed anew.
        Response {
            tokens,
            logprobs: Vec::new(),
            finish: if ended { FinishReason::Stop } else { FinishReason::Length },
            sets: None,
            inserted: Vec::new(),
        }
    };
    rows.iter().zip(&masks).map(one).collect()
}

#[test]
fn the_engines_steps_lead_to_the_weights_of_a_plain_torch_loop() {
    let committed = golden().join("dschat/steps/e2e");
    compare_steps(&committed, &committed.join("config.json"));
}

#[test]
#[ignore = "compares dschat/e2e, DeepSpeed-Chat's own run, of another folder of reference values; set RLHF_GOLDEN=FOLDER"]
fn the_engines_steps_lead_to_the_weights_of_deepspeed_chats_own_run() {
    let dir = required_golden().join("dschat");
    let run = dir.join("e2e");
    let committed = golden().join("dschat/steps/e2e");
    let places = [run.join("config.json"), dir.join("rm_opt/config.json"), committed.join("config.json")];
    compare_steps(&run, places.iter().find(|path| path.is_file()).unwrap());
}

// What the engine and the trainer share.

/// Twelve prompts, responses of at most 6 tokens of a policy that stops at token 192 about as often as not.
fn config(dir: &Path) -> PpoConfig {
    let prompts = dir.join("prompts.jsonl");
    let rows = ["The movie", "A film", "do", "human", "a sing", "2024", "is it", "one", "two", "so", "and", "the"];
    std::fs::write(&prompts, rows.map(|prompt| format!("{}\n", json!({"prompt": prompt}))).concat()).unwrap();
    let (policy, reward) = (init("llama_policy"), init("llama_reward"));
    let mut config = PpoConfig::with_preset(Preset::DeepspeedChat, policy, reward, prompts, dir.join("out"));
    config.model_name_or_path = Some(golden().join("models/gpt_neox"));
    config.prompt_length.max_prompt_length = Some(10);
    config.response_length = 6;
    config.generation.per_device_generation_batch_size = Some(4);
    config.per_device_train_batch_size = Some(4);
    config.num_sample_generations = 0;
    config.optimizer.warmup_steps = 0;
    (config.learning_rate, config.value.value_learning_rate) = (1e-3, Some(1e-3));
    config
}

fn in_scratch<T>(change: impl FnOnce(&mut PpoConfig, &Path), f: impl FnOnce(&PpoConfig) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    change(&mut config, dir.path());
    f(&config)
}

fn write_texts(config: &mut PpoConfig, dir: &Path) {
    let texts = dir.join("texts.jsonl");
    std::fs::write(&texts, format!("{}\n", json!({"text": "the movie was one of two, and so is it. ".repeat(8)})))
        .unwrap();
    config.unsupervised.unsupervised_dataset_name = Some(texts);
}

fn weights(params: &[Param]) -> Vec<Tensor> {
    params.iter().map(|param| param.tensor.detach().copy()).collect()
}

fn gradients(model: &CausalLm) -> Vec<Tensor> {
    model.trainable_params().map(|param| param.tensor.grad().copy()).collect()
}

fn train_metrics(config: &PpoConfig) -> Vec<serde_json::Map<String, Value>> {
    json_lines(&std::fs::read_to_string(config.run.output_dir.join("metrics.jsonl")).unwrap())
}

/// A batch of eight responses, some of which end with 192, and the models' evaluation of it with that token counted or not.
fn judged(left_out: &[i64]) -> (Learner, Experience, PpoConfig) {
    let mut config = chat();
    (config.response_length, config.optimizer.warmup_steps) = (6, 0);
    let lm = |name: &str| CausalLm::from_pretrained(&init(name), ModelOptions::default()).unwrap();
    let value = SequenceClassifier::from_pretrained(&init("llama_value"), None, ModelOptions::default()).unwrap();
    let (learner, reference) = (Learner::new(lm("llama_policy"), value, config.learner()), lm("llama_ref"));
    let prompts: Vec<Vec<i64>> = (0..8).map(|row| (5..6 + row).collect()).collect();
    let generation =
        GenerationConfig { seed: 1, ..GenerationConfig::new(Sampling::at_temperature(1.0), config.response_length) };
    let mut responses = generate(&learner.policy, &prompts, &generation).unwrap();
    for (row, response) in responses.iter_mut().enumerate() {
        response.tokens.truncate(row % 6 + 1);
        *response.tokens.last_mut().unwrap() = if row % 2 == 0 { 192 } else { 17 };
    }
    let judges = learner.rollout_models(&reference);
    let scores = Tensor::from_slice(&[9.0f32, -9.0, 1.0, 2.0, 0.5, -0.5, 0.0, 1.0]);
    let e = experience(
        judges,
        &prompts,
        &responses,
        scores,
        &RolloutSettings { left_out: left_out.to_vec(), recompute_logprobs: true, ..config.rollout(judges.policy) },
    )
    .unwrap();
    (learner, e, config)
}

#[test]
fn an_eos_that_is_left_out_moves_neither_model_and_brings_the_score_to_the_tokens_before() {
    let (learner, e, config) = judged(&[192]);
    let shaped = targets(&e, config.kl.kl_coef, &config.shaping());
    let rows: Vec<usize> = (0..8).collect();
    let learnt = |targets: &rlhf::rl::shaping::Targets| {
        let stats = learner.gradients(&e, targets, &rows, 8, true).unwrap();
        let value: Vec<Tensor> = learner.value.params().iter().map(|param| param.tensor.grad().copy()).collect();
        let found = (gradients(&learner.policy), value);
        for param in learner.policy.params().iter().chain(learner.value.params()) {
            param.tensor.shallow_clone().zero_grad();
        }
        (stats, found)
    };
    let (stats, usual) = learnt(&shaped);
    let ended = e.responses.iter().filter(|tokens| tokens.last() == Some(&192)).count() as i64;
    let tokens: i64 = e.lengths().iter().sum();
    assert_eq!((stats.tokens, stats.value_slots), ((tokens - ended) as f64, (tokens - ended) as f64));
    // No value in the slot of the eos, or in the one after the end, has an effect.
    let mut other = targets(&e, config.kl.kl_coef, &config.shaping());
    let out = e.masks.loss.logical_not();
    (other.advantages, other.returns) =
        (other.advantages.masked_fill(&out, 1e3), other.returns.masked_fill(&out, -1e3));
    assert_eq!(learnt(&other).1, usual);
    // But the score, clipped to 5, is there, with the KL of the eos.
    for (row, &counted) in e.counted.iter().enumerate().filter(|&(row, _)| row % 2 == 0) {
        let at = |x: &Tensor| x.double_value(&[row as i64, counted]);
        let score = e.scores.double_value(&[row as i64]).clamp(-5.0, 5.0);
        assert!((at(&shaped.rewards) - score + 0.1 * at(&shaped.kl)).abs() < 1e-5, "row {row}");
        assert!(at(&shaped.kl) != 0.0);
    }
    // Where it counts, both learn from it.
    let (all, e, config) = judged(&[]);
    let stats = all.gradients(&e, &targets(&e, 0.1, &config.shaping()), &rows, 8, true).unwrap();
    assert_eq!((stats.tokens, stats.value_slots), (tokens as f64, tokens as f64));
}

#[test]
fn eos_is_left_out_where_deepspeed_chat_pads_with_it_or_always() {
    let left_out = |family: &str, pad: Option<&str>, when| {
        in_scratch(
            |config, dir| {
                let family_model = |part: &str| init(&format!("{family}_{part}"));
                (config.sft_model_path, config.reward_model_path) =
                    (family_model("policy"), Some(family_model("reward")));
                let tokenizer = dir.join("tokenizer");
                std::fs::create_dir(&tokenizer).unwrap();
                for file in ["config.json", "tokenizer.json"] {
                    std::fs::copy(golden().join("models/gpt_neox").join(file), tokenizer.join(file)).unwrap();
                }
                let tokenizer_config = read_json(&golden().join("models/gpt_neox/tokenizer_config.json"));
                let mut described = json!({"eos_token": tokenizer_config["eos_token"]});
                described["pad_token"] = pad.map_or(Value::Null, |pad| {
                    if pad == "eos" { tokenizer_config["eos_token"].clone() } else { pad.into() }
                });
                std::fs::write(tokenizer.join("tokenizer_config.json"), described.to_string()).unwrap();
                let mut shape = read_json(&tokenizer.join("config.json"));
                shape.as_object_mut().unwrap().remove("pad_token_id");
                std::fs::write(tokenizer.join("config.json"), shape.to_string()).unwrap();
                config.model_name_or_path = Some(tokenizer);
                config.mask.eos_in_loss = when;
            },
            |config| {
                let mut engine = RlhfEngine::from_config(config).unwrap();
                let eos = engine.tokenizer.eos().unwrap();
                let response = Response {
                    tokens: vec![5, 6, 7, eos],
                    logprobs: Vec::new(),
                    finish: FinishReason::Stop,
                    sets: None,
                    inserted: Vec::new(),
                };
                let prompt = Tensor::from_slice(&[3i64, 4]).view([1, 2]);
                let found = engine.experience_of(&prompt, &prompt.ones_like(), vec![response]).unwrap();
                number(&found.attention_mask.sum(Kind::Int64)) == 5.0
            },
        )
    };
    let other = "A"; // some other token
    // A Llama tokenizer keeps its pad, or gets one that no text has; all others pad with eos, also where they name
    // another pad.
    for (family, pad, unless_pad) in [
        ("llama", Some("eos"), true),
        ("llama", Some(other), false),
        ("llama", None, false),
        ("neox", Some("eos"), true),
        ("neox", Some(other), true),
        ("neox", None, true),
    ] {
        assert_eq!(left_out(family, pad, EosInLoss::UnlessPad), unless_pad, "{family}, pad {pad:?}");
    }
    assert!(!left_out("neox", Some("eos"), EosInLoss::Always) && left_out("llama", Some(other), EosInLoss::Never));
}

#[test]
fn a_moving_average_in_f32_follows_steps_that_are_tiny() {
    let (learner, e, mut config) = judged(&[192]);
    config.ema.enable_ema = true;
    let Learner { policy, value, .. } = learner;
    let mut learner = Learner::new(policy, value, config.learner());
    let shaped = targets(&e, config.kl.kl_coef, &config.shaping());
    let start = weights(learner.policy.params());
    let rates = LearningRates { policy: Some(1e-6), value: 1e-6 };
    let rows: Vec<usize> = (0..8).collect();
    let mut expected = start.iter().map(|x| x.to_kind(Kind::Double)).collect::<Vec<_>>();
    for _ in 0..20 {
        let mut stats = learner.gradients(&e, &shaped, &rows, 8, true).unwrap();
        learner.step(rates, &mut stats).unwrap();
        for (average, param) in expected.iter_mut().zip(learner.policy.params()) {
            *average = &*average * 0.992 + param.tensor.detach().to_kind(Kind::Double) * 0.008;
        }
    }
    let average = learner.ema.as_ref().unwrap().weights();
    let gone = |to: &[Tensor]| -> f64 {
        let gap = |(a, b): (&Tensor, &Tensor)| number(&(a.to_kind(Kind::Double) - b).square().sum(Kind::Double));
        start.iter().zip(to).map(gap).sum::<f64>().sqrt()
    };
    // Each step moves the average by less than a hundredth of the last bit that bfloat16 has at these weights.
    assert!(gone(&expected) > 0.0 && (gone(average) / gone(&expected) - 1.0).abs() < 0.25);
    // Lent to the policy and given back, both are what they were.
    let now = weights(learner.policy.params());
    let lent = learner.ema.as_ref().unwrap().with(&learner.policy, |policy| Ok(weights(policy.params()))).unwrap();
    assert_eq!((lent.as_slice(), weights(learner.policy.params())), (average, now));
}

#[test]
fn texts_in_the_mix_add_their_weighted_gradient_and_no_more() {
    let (learner, e, config) = judged(&[192]);
    let shaped = targets(&e, config.kl.kl_coef, &config.shaping());
    let rows: Vec<usize> = (0..8).collect();
    let clear = || learner.policy.params().iter().for_each(|param| param.tensor.shallow_clone().zero_grad());
    learner.gradients(&e, &shaped, &rows, 8, true).unwrap();
    let ppo_gradients = gradients(&learner.policy);
    clear();
    let texts = [vec![5i64, 9, 2, 7], vec![4, 4, 8, 1, 6, 3]];
    // The mean over tokens, by autograd.
    let logits = learner.policy.logits(&texts).unwrap();
    let mut logprobs = Vec::new();
    for (logits, text) in logits.iter().zip(&texts) {
        let next = Tensor::from_slice(&text[1..]).unsqueeze(1);
        logprobs.push(logits.narrow(0, 0, text.len() as i64 - 1).log_softmax(-1, Kind::Float).gather(1, &next, false));
    }
    let loss = -Tensor::cat(&logprobs, 0).mean(Kind::Float);
    loss.backward();
    let text_gradients = gradients(&learner.policy);
    clear();
    learner.gradients(&e, &shaped, &rows, 8, true).unwrap();
    let found = learner.learn_texts(&texts, 27.8).unwrap();
    assert!((found - number(&loss)).abs() < 1e-5);
    for ((found, ppo), text) in gradients(&learner.policy).iter().zip(&ppo_gradients).zip(&text_gradients) {
        let expected = ppo + text * 27.8;
        assert_close("gradient", found, &expected, 2e-5 * expected.abs().max().double_value(&[]).max(1.0));
    }
    assert!(learner.learn_texts(&[vec![5i64]], 1.0).unwrap_err().to_string().contains("at least two tokens"));
}

/// A batch of responses by the engine, one token each but for those that `long` marks.
fn short_responses(engine: &mut RlhfEngine, long: &[bool]) -> Result<RlhfExperience, String> {
    let rows = long.len() as i64;
    let prompts = Tensor::from_slice(&[3i64, 4]).view([1, 2]).repeat([rows, 1]);
    let responses = long.iter().zip(10..).map(|(&long, id)| {
        let tokens = if long { vec![id, 5, 6] } else { vec![id] };
        Response { tokens, logprobs: Vec::new(), finish: FinishReason::Length, sets: None, inserted: Vec::new() }
    });
    engine.experience_of(&prompts, &prompts.ones_like(), responses.collect()).map_err(|e| e.to_string())
}

#[test]
fn short_responses_are_dropped_and_where_all_are_the_last_good_ones_are_reused() {
    in_scratch(
        |config, _| config.optimizer.lr_scheduler_type = LrSchedulerType::Constant,
        |config| {
            let mut engine = RlhfEngine::from_config(config).unwrap();
            let error = short_responses(&mut engine, &[false, false]).unwrap_err();
            let message = "each of the first 2 responses has fewer than min_response_length = 2 tokens before its end";
            assert!(error.starts_with(message), "{error}");
            let good = short_responses(&mut engine, &[false, true, true]).unwrap();
            // Every entry lost the same row.
            assert_eq!((good.rows(), good.prompts.size(), good.rewards.size()), (2, vec![2, 2], vec![2]));
            engine.train_rlhf(&good).unwrap();
            let again = short_responses(&mut engine, &[false, false, false]).unwrap();
            assert_eq!((&again.input_ids, &again.prompts), (&good.input_ids, &good.prompts));
            assert_ne!(again.logprobs, good.logprobs, "the policy as it is now judges them");
        },
    );
}

#[test]
fn reused_and_dropped_responses_are_counted_and_reported() {
    in_scratch(
        |config, dir| {
            // One response per update, of which those that stop are too short; 60 of 320 tokens stop.
            let tokenizer = dir.join("tokenizer");
            std::fs::create_dir(&tokenizer).unwrap();
            for file in ["tokenizer.json", "tokenizer_config.json"] {
                std::fs::copy(golden().join("models/gpt_neox").join(file), tokenizer.join(file)).unwrap();
            }
            let stop = json!({"eos_token_id": (100..160).collect::<Vec<i64>>()});
            std::fs::write(tokenizer.join("generation_config.json"), stop.to_string()).unwrap();
            config.model_name_or_path = Some(tokenizer);
            config.generation.per_device_generation_batch_size = Some(1);
            config.per_device_train_batch_size = Some(1);
            (config.mask.min_response_length, config.response_length) = (4, 4);
            config.mask.eos_in_loss = EosInLoss::Always;
        },
        |config| {
            // The first response of a run may not be short: some seed has a long one.
            let begun = (0..32).find_map(|seed| {
                let mut config = config.clone();
                config.run.seed = seed;
                let mut trainer = PpoTrainer::from_config(&config).unwrap();
                trainer.update().ok().map(|metrics| (trainer, metrics))
            });
            let (mut trainer, first) = begun.unwrap();
            assert_eq!(first.get("val/reused_responses"), Some(0.0));
            let mut reused = Vec::new();
            for update in 2..=12 {
                let metrics = trainer.update().unwrap();
                let again = metrics.get("val/reused_responses");
                assert_eq!(metrics.get("val/dropped_responses"), again, "update {update}");
                let words = format!(
                    "update {update}: each of 1 responses has fewer than min_response_length = 4 tokens before its end: 1 \
                     responses of an earlier update are trained on again"
                );
                // Other alarms are of single responses.
                let reuse_warnings =
                    trainer.warnings().iter().filter(|warning| warning.kind == WarningKind::ReusedResponses);
                let told: Vec<&String> = reuse_warnings.map(|warning| &warning.message).collect();
                let expected = [&words];
                assert_eq!(told, &expected[..usize::from(again == Some(1.0))], "update {update}");
                reused.push(again.unwrap());
            }
            let again = reused.iter().filter(|again| **again == 1.0).count();
            assert!(again > 0 && again < 11, "{reused:?}");
        },
    );
}

#[test]
fn batches_are_collected_and_cut_in_their_order() {
    let mut set = MiniDataset::new(2, 2);
    let batch = |from: i64| (from..from + 3).map(|id| vec![id]).collect::<Vec<Vec<i64>>>();
    assert!(set.add(batch(0)).is_none());
    let cut = set.add(batch(3)).unwrap();
    assert_eq!(cut, [vec![vec![0], vec![1]], vec![vec![2]], vec![vec![3], vec![4]], vec![vec![5]]]);
    assert!(set.add(batch(6)).is_none(), "empty again");
    set.free();
    assert!(set.add(batch(9)).is_none());
}

#[test]
fn generation_batches_and_epochs_make_so_many_steps() {
    in_scratch(
        |config, dir| {
            config.generation.generation_batches = 3;
            (config.per_device_train_batch_size, config.num_ppo_epochs) = (Some(2), 2);
            config.mask.min_response_length = 0;
            write_texts(config, dir);
            config.ema.enable_ema = true;
        },
        |config| {
            // By the trainer: one update of 12 responses, two epochs of 6 steps.
            ppo(config, Console::Silent).unwrap();
            let lines = train_metrics(config);
            assert_eq!((lines.len(), lines[0]["episode"].as_u64()), (1, Some(12)));
            assert!(lines[0]["loss/unsup_avg"].as_f64().unwrap() > 1.0);
            let steps = |file: &str| {
                let bytes = std::fs::read(config.run.output_dir.join(file)).unwrap();
                let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
                f64::from_le_bytes(file.tensor("step").unwrap().data().try_into().unwrap())
            };
            let mut again = config.clone();
            again.run.output_dir = config.run.output_dir.with_file_name("again");
            again.run.checkpoints.save_steps = Some(1.into());
            ppo(&again, Console::Silent).unwrap();
            assert_eq!(steps("../again/checkpoint-1/optimizer.safetensors"), 12.0);
            assert_eq!(steps("../again/checkpoint-1/value_model/optimizer.safetensors"), 12.0);
            for folder in ["out/ema", "again/ema", "again/checkpoint-1/ema"] {
                let dir = config.run.output_dir.with_file_name(folder);
                CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
                assert!(dir.join("tokenizer.json").is_file());
            }
            // By the engine, as many.
            let mut engine = RlhfEngine::from_config(config).unwrap();
            let (mut experience, mut texts) = (MiniDataset::new(3, 2), MiniDataset::new(3, 2));
            let mut steps = 0;
            for _ in 0..3 {
                let (prompts, mask) = engine.next_prompts().unwrap();
                let exp = engine.generate_experience(&prompts, &mask).unwrap();
                let text = texts.add(engine.next_texts(exp.rows()).unwrap());
                let Some(batches) = experience.add(exp) else { continue };
                let text = text.unwrap();
                for _ in 0..config.num_ppo_epochs {
                    for (batch, text) in batches.iter().zip(&text) {
                        if steps == 0 {
                            // A text that fails leaves no gradient, of either.
                            engine.train_rlhf(batch).unwrap();
                            let wrong = engine.train_unsupervised(&[vec![1i64, 1 << 40]], 1.0).unwrap_err().to_string();
                            assert!(!wrong.contains("none waits"), "{wrong}");
                            let gradients = engine.actor().params().iter().map(|param| param.tensor.grad());
                            assert!(
                                gradients
                                    .into_iter()
                                    .all(|grad| !grad.defined() || grad.abs().max().double_value(&[]) == 0.0)
                            );
                        }
                        let (actor, critic) = engine.train_rlhf(batch).unwrap();
                        assert!(actor.is_finite() && critic.is_finite());
                        let before = weights(engine.actor().params());
                        let twice = engine.train_rlhf(batch).unwrap_err().to_string();
                        assert!(twice.starts_with("train_rlhf: with mixes_texts the last one waits"), "{twice}");
                        assert!(engine.train_unsupervised(text, 27.8).unwrap() > 1.0);
                        assert_ne!(weights(engine.actor().params()), before, "the step is taken for both");
                        steps += 1;
                    }
                }
            }
            assert_eq!(steps, 12);
            assert!(engine.train_unsupervised(&[vec![1i64, 2]], 1.0).unwrap_err().to_string().contains("none waits"));
            engine.save_model(&config.run.output_dir.with_file_name("engine")).unwrap();
            for folder in ["engine", "engine/ema"] {
                let dir = config.run.output_dir.with_file_name(folder);
                CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
            }
        },
    );
}

#[test]
fn an_engine_of_loaded_models_offloads_what_the_settings_say() {
    in_scratch(
        |config, _| config.run.offload.offload = vec![OffloadPart::All],
        |config| {
            let engine = |config: &PpoConfig| {
                let lm = |name: &str| CausalLm::from_pretrained(&init(name), ModelOptions::default()).unwrap();
                let score_model = |name: &str| {
                    SequenceClassifier::from_pretrained(&init(name), None, ModelOptions::default()).unwrap()
                };
                let rewards = Rewards::new().with("short", FnReward::new(|batch| Ok(vec![0.0; batch.len()])));
                let tokenizer = Tokenizer::from_pretrained(&golden().join("models/gpt_neox")).unwrap();
                RlhfEngine::new(
                    lm("llama_policy"),
                    lm("llama_ref"),
                    score_model("llama_value"),
                    rewards,
                    tokenizer,
                    config,
                )
            };
            let out = engine(config).unwrap();
            let mut whole = config.clone();
            whole.run.offload.offload = Vec::new();
            let whole = engine(&whole).unwrap();
            let rows = [vec![5i64, 6, 7]];
            let logits = |engine: &RlhfEngine| engine.reference.logits(&rows).unwrap();
            assert_eq!(logits(&out), logits(&whole));
            let mut nowhere = config.clone();
            nowhere.run.offload.offload_dir = Some("/proc/rlhf".into());
            let error = engine(&nowhere).unwrap_err().to_string();
            assert!(
                error.starts_with("offload_dir = /proc/rlhf: cannot make a file of 1 MiB for the optimizer state"),
                "{error}"
            );
        },
    );
}

#[test]
fn an_engine_generates_responses_in_deepspeed_chats_shapes() {
    in_scratch(
        |_, _| (),
        |config| {
            let mut engine = RlhfEngine::from_config(config).unwrap();
            assert_eq!(engine.num_total_iters, Some(3));
            let (prompts, mask) = engine.next_prompts().unwrap();
            let width = prompts.size()[1];
            assert_eq!((prompts.size(), mask.size()), (vec![4, width], vec![4, width]));
            assert_eq!(number(&mask.select(1, width - 1).sum(Kind::Int64)), 4.0, "padded on the left");
            let exp = engine.generate_experience(&prompts, &mask).unwrap();
            let (rows, len) = exp.input_ids.size2().unwrap();
            for (name, x) in [("logprobs", &exp.logprobs), ("ref_logprobs", &exp.ref_logprobs), ("value", &exp.value)] {
                assert_eq!(x.size(), [rows, len - 1], "{name}");
            }
            assert_eq!((exp.attention_mask.size(), exp.rewards.size()), (vec![rows, len], vec![rows]));
            // The reference is a copy: no KL yet, and a first ratio of 1 makes the loss the mean advantage, negated.
            let gap = (&exp.logprobs - &exp.ref_logprobs).abs().max();
            assert!(number(&gap) < 1e-4, "{gap}");
            assert_eq!(engine.responses(&exp).unwrap().len(), rows as usize);
            // One response too few or too many is neither dropped nor made up, nor is a mask.
            let response = || Response {
                tokens: vec![5, 6, 7],
                logprobs: Vec::new(),
                finish: FinishReason::Length,
                sets: None,
                inserted: Vec::new(),
            };
            for count in [3, 5] {
                let found = engine.experience_of(&prompts, &mask, (0..count).map(|_| response()).collect());
                let expected =
                    format!("experience: expected a response for each of 4 prompts, found {count} responses");
                assert_eq!(found.unwrap_err().to_string(), expected);
            }
            let found = engine.experience_of(&prompts, &mask.narrow(0, 0, 2), (0..4).map(|_| response()).collect());
            assert!(found.unwrap_err().to_string().starts_with("experience: mask: expected shape [4,"));
            let wrong = RlhfExperience { value: exp.value.narrow(1, 0, 2), ..exp };
            let error = engine.train_rlhf(&wrong).unwrap_err().to_string();
            assert!(error.starts_with("experience: value: expected shape"), "{error}");
        },
    );
}

#[test]
fn an_engine_that_loads_its_models_takes_further_rewards_and_needs_no_other() {
    in_scratch(
        |config, _| config.reward_model_path = None,
        |config| {
            let error = RlhfEngine::from_config(config).unwrap_err().to_string();
            assert!(error.starts_with("no reward: "), "{error}");
            let one = FnReward::new(|batch| Ok(vec![1.0; batch.len()]));
            let mut engine = RlhfEngine::from_config_with(config, Rewards::new().with("one", one)).unwrap();
            let (prompts, mask) = engine.next_prompts().unwrap();
            let exp = engine.generate_experience(&prompts, &mask).unwrap();
            assert!(exp.rewards.equal(&exp.rewards.ones_like()), "{}", exp.rewards);
        },
    );
}

#[test]
fn an_engine_starts_at_a_ratio_of_1_at_any_temperature_of_its_log_probs() {
    for (temperature, raw_logprobs) in [(0.6, true), (0.6, false), (1.0, false)] {
        in_scratch(
            |config, _| (config.temperature, config.legacy.raw_logprobs) = (temperature, raw_logprobs),
            |config| {
                let mut engine = RlhfEngine::from_config(config).unwrap();
                let (prompts, mask) = engine.next_prompts().unwrap();
                let exp = engine.generate_experience(&prompts, &mask).unwrap();
                let counts = exp.attention_mask.narrow(1, 1, exp.logprobs.size()[1]);
                let ratio = (&exp.logprobs - &exp.ref_logprobs).exp() - 1.0;
                let gap = (ratio * counts).abs().max();
                assert!(number(&gap) < 1e-4, "temperature {temperature}, raw {raw_logprobs}: {gap}");
            },
        );
    }
}

#[test]
fn an_engine_refuses_a_falling_rate_of_no_end_and_goes_no_further_than_it() {
    in_scratch(
        |_, _| (),
        |config| {
            let mut engine = RlhfEngine::from_config(config).unwrap();
            let (prompts, mask) = engine.next_prompts().unwrap();
            let responses = |id| Response {
                tokens: vec![id, 6, 7],
                logprobs: Vec::new(),
                finish: FinishReason::Length,
                sets: None,
                inserted: Vec::new(),
            };
            let exp = engine.experience_of(&prompts, &mask, (5..9).map(responses).collect()).unwrap();
            let before = weights(engine.actor().params());
            engine.num_total_iters = None;
            let error = engine.train_rlhf(&exp).unwrap_err().to_string();
            let expected = "lr_scheduler_type = cosine: expected the steps of the run in num_total_iters, found none";
            assert!(error.starts_with(expected), "{error}");
            assert_eq!(weights(engine.actor().params()), before);
            engine.num_total_iters = Some(2);
            for _ in 0..2 {
                engine.train_rlhf(&exp).unwrap();
            }
            let error = engine.train_rlhf(&exp).unwrap_err().to_string();
            assert!(error.starts_with("num_total_iters = 2 steps are taken"), "{error}");
            for schedule in
                [LrSchedulerType::Constant, LrSchedulerType::ConstantWithWarmup, LrSchedulerType::InverseSqrt]
            {
                let mut config = engine.config().clone();
                config.optimizer.lr_scheduler_type = schedule;
                engine.set_config(&config).unwrap();
                engine.num_total_iters = None;
                engine.train_rlhf(&exp).unwrap();
            }
        },
    );
}

#[test]
fn an_engine_refuses_what_its_calls_do_not_do() {
    type Change = fn(&mut PpoConfig);
    let changes: [(&str, Change); 9] = [
        ("mask_truncated_completions has no meaning in RlhfEngine", |c| c.mask.mask_truncated_completions = true),
        ("sync_ref_model has no meaning in RlhfEngine", |c| c.sync.sync_ref_model = true),
        ("overlong_buffer_len has no meaning in RlhfEngine", |c| c.groups.overlong_buffer_len = Some(1)),
        ("missing_eos_penalty has no meaning in RlhfEngine", |c| c.missing_eos_penalty = Some(1.0)),
        ("non_eos_penalty has no meaning in RlhfEngine", |c| c.non_eos_penalty = true),
        ("use_score_scaling has no meaning in RlhfEngine", |c| {
            (c.score_scaling.use_score_scaling, c.score_scaling.use_score_norm) = (true, true);
        }),
        ("score_clip has no meaning in RlhfEngine", |c| c.score_scaling.score_clip = Some(0.5)),
        ("early_stopping has no meaning in RlhfEngine", |c| (c.legacy.early_stopping, c.num_ppo_epochs) = (true, 2)),
        ("gradient_accumulation_steps = 2: RlhfEngine takes a step at each train_rlhf", |c| {
            (c.gradient_accumulation_steps, c.per_device_train_batch_size) = (2, Some(2));
        }),
    ];
    for (expected, change) in changes {
        in_scratch(
            |config, _| change(config),
            |config| {
                let error = RlhfEngine::from_config(config).unwrap_err().to_string();
                assert!(error.starts_with(expected), "{error}");
            },
        );
    }
}

#[test]
fn a_test_stops_where_it_should_and_responses_are_shown_on_the_way() {
    in_scratch(
        |config, _| {
            (config.test_mode.enable_test_mode, config.test_mode.test_stop_step) = (true, 1);
            (config.rollout_log.print_answers, config.rollout_log.print_answers_interval) = (true, 2);
        },
        |config| {
            ppo(config, Console::Silent).unwrap();
            let (lines, out) = (train_metrics(config), &config.run.output_dir);
            // Of three; the rates are the whole run's.
            assert_eq!(lines.len(), 2);
            assert!((lines[1]["lr"].as_f64().unwrap() - 0.75e-3).abs() < 1e-9, "{}", lines[1]["lr"]);
            assert!(out.join("model.safetensors").is_file());
            let responses = json_lines(&std::fs::read_to_string(out.join("samples/answers-000001.jsonl")).unwrap());
            assert!(!responses.is_empty() && responses[0]["score"].is_number());
            assert!(!out.join("samples/answers-000002.jsonl").exists());
        },
    );
}

#[test]
fn actor_and_critic_have_adapters_of_their_own_or_none() {
    for (actor, critic) in [(true, Some(false)), (false, Some(true)), (true, None)] {
        in_scratch(
            |config, _| {
                (config.peft.use_peft, config.value_peft.value_use_peft) = (actor, critic);
                if critic != Some(false) {
                    config.value_peft.value_lora_r = Some(2);
                }
            },
            |config| {
                let trainer = PpoTrainer::from_config(config).unwrap();
                let adapters = |params: &[Param]| {
                    let lora_a = params.iter().find(|param| param.name.ends_with("lora_A.weight"));
                    lora_a.map(|param| param.tensor.size()[0])
                };
                let expected = |on: bool, rank| on.then_some(rank);
                assert_eq!(adapters(trainer.learner.policy.params()), expected(actor, 16));
                assert_eq!(adapters(trainer.learner.value.params()), expected(critic != Some(false), 2));
            },
        );
    }
}

#[test]
fn a_command_line_of_deepspeed_chat_trains_and_the_settings_that_it_leaves_repeat_the_run() {
    let scratch = Scratch::new();
    scratch.succeeds(
        "ppo --preset deepspeed-chat --deepspeed --actor_model_name_or_path policy --critic_model_name_or_path reward \
         --data_path prompts.jsonl --output_dir out --max_answer_seq_len 8 --max_prompt_seq_len 20 --ppo_epochs 2 \
         --per_device_generation_batch_size 4 --per_device_training_batch_size 2 --num_warmup_steps 0 --enable_ema \
         --actor_lora_dim 2 --actor_lora_module_name layers. --only_optimize_lora --offload false --inference_tp_size 1",
    );
    let metrics = timeless(scratch.metrics("out"));
    assert_eq!((metrics.len(), metrics[1]["episode"].as_u64()), (2, Some(8)));
    assert!(metrics[0]["val/dropped_responses"].is_number() && metrics[0]["lr"].as_f64() == Some(5e-4));
    let adapter = read_json(&scratch.path("out/adapter_config.json"));
    assert_eq!((&adapter["r"], &adapter["lora_alpha"]), (&json!(2), &json!(1)));
    let targets = adapter["target_modules"].as_array().unwrap();
    // Every linear layer of both blocks, by its whole name: PEFT knows no parts of names.
    assert_eq!(targets.len(), 8, "{targets:?}");
    assert!(targets.iter().all(|name| name.as_str().unwrap().starts_with("gpt_neox.layers.")), "{targets:?}");
    assert!(scratch.path("out/value_model/model.safetensors").is_file(), "the critic is trained whole");
    for folder in ["out", "out/ema"] {
        CausalLm::from_pretrained(&scratch.path(folder), ModelOptions::default()).unwrap();
    }
    scratch.succeeds("ppo --config out/config.yaml --output_dir again");
    assert_eq!(timeless(scratch.metrics("again")), metrics);
}
