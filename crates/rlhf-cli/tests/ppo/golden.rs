//! The PPO step against TRL 1.11's own run (`tests/golden/trl_new`): its responses are injected, everything else is ours.

use crate::support::{
    Tensors, assert_close, chosen_golden, golden, join_ranks, model_options, near, on_host, read_json, run_as_ranks,
    say,
};
use rlhf::dist::{World, ZeroStage};
use rlhf::generate::{FinishReason, Response};
use rlhf::metrics::Metrics;
use rlhf::model::{CausalLm, Param, SequenceClassifier};
use rlhf::rl::learner::Learner;
use rlhf::rl::math::KlEstimator;
use rlhf::rl::rollout::{RolloutSettings, experience, score};
use rlhf::rl::scores::penalize_missing_stop;
use rlhf::rl::shaping::targets;
use rlhf::settings::{LrSchedulerType, PpoConfig, StopToken};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};

const EOS: i64 = 0;
const PAD: i64 = 1;

/// One run of TRL's trainer.
struct Variant {
    dir: PathBuf,
    info: Value,
    data: Tensors,
    config: PpoConfig,
}

impl Variant {
    fn read(dir: &Path) -> Self {
        let info = read_json(&dir.join("info.json"));
        let config = config(&info["args"]);
        Self { dir: dir.to_path_buf(), data: Tensors::read(&dir.join("data.safetensors")), info, config }
    }

    fn name(&self) -> &str {
        self.info["variant"].as_str().unwrap()
    }

    fn iterations(&self) -> usize {
        self.info["iterations"].as_u64().unwrap() as usize
    }

    fn init(&self, model: &str) -> PathBuf {
        let family = self.info["family"].as_str().unwrap();
        self.dir.parent().unwrap().join(format!("init/{family}_{model}"))
    }

    fn tensor(&self, iteration: usize, name: &str) -> &Tensor {
        self.data.get(&format!("it{iteration}.{name}"))
    }

    fn numbers(&self, iteration: usize, name: &str) -> Vec<i64> {
        Vec::<i64>::try_from(self.tensor(iteration, name).to_kind(Kind::Int64).view([-1])).unwrap()
    }

    /// What float32 alone may change: five times the gap between TRL's own float32 and float64 runs.
    fn tolerance(&self, name: &str) -> f64 {
        let noise = &self.info["noise_floor_f32_vs_f64"];
        let found = noise.get(name).or_else(|| noise["tensors"].get(name)).and_then(Value::as_f64).unwrap_or(0.0);
        (5.0 * found).max(2e-5)
    }

    fn check(&self, iteration: usize, name: &str, found: &Tensor, mask: &Tensor) {
        let full = format!("it{iteration}.{name}");
        let expected = self.tensor(iteration, name).masked_fill(&on_host(mask).logical_not(), 0.0);
        assert_close(&format!("{}: {full}", self.name()), found, &expected, self.tolerance(&full));
    }

    /// Whether one of our optimizer steps is one of TRL's: a single micro-batch each, and no step that TRL loses or adds.
    ///
    /// With several micro-batches TRL averages their means, and steps every `gradient_accumulation_steps` of them for any
    /// `num_mini_batches`; we divide by the mini-batch's token count and step once per mini-batch.
    fn steps_agree(&self) -> bool {
        let args = &self.info["args"];
        let number = |name: &str| args[name].as_u64().unwrap();
        let ours = self.iterations() as u64 * number("num_ppo_epochs") * number("num_mini_batches");
        number("gradient_accumulation_steps") == 1
            && self.info["optimizer_steps"].as_array().unwrap().len() as u64 == ours
    }
}

fn config(args: &Value) -> PpoConfig {
    let number = |name: &str| args[name].as_f64().unwrap_or_else(|| panic!("no argument `{name}`"));
    let size = |name: &str| number(name) as usize;
    let mut config = PpoConfig::new("policy", "reward", "prompts.jsonl", "out");
    config.per_device_train_batch_size = Some(size("per_device_train_batch_size"));
    config.gradient_accumulation_steps = size("gradient_accumulation_steps");
    config.num_mini_batches = size("num_mini_batches");
    config.num_ppo_epochs = size("num_ppo_epochs");
    config.total_episodes = Some(size("total_episodes"));
    config.local_rollout_forward_batch_size = size("local_rollout_forward_batch_size");
    config.response_length = size("response_length");
    config.stop_token = args["stop_token"].as_str().map(|_| StopToken::Eos);
    config.stop_token_id = args["stop_token_id"].as_i64();
    config.temperature = number("temperature");
    config.missing_eos_penalty = args["missing_eos_penalty"].as_f64();
    config.kl.kl_coef = number("kl_coef");
    config.kl.kl_estimator = if args["kl_estimator"] == "k3" { KlEstimator::K3 } else { KlEstimator::K1 };
    config.whiten_rewards = args["whiten_rewards"].as_bool().unwrap();
    config.gamma = number("gamma");
    config.lam = number("lam");
    config.cliprange = number("cliprange");
    config.cliprange_value = number("cliprange_value");
    config.vf_coef = number("vf_coef");
    config.learning_rate = number("learning_rate");
    config.optimizer.weight_decay = number("weight_decay");
    config.optimizer.warmup_steps = size("warmup_steps");
    config.optimizer.lr_scheduler_type = match args["lr_scheduler_type"].as_str().unwrap() {
        "linear" => LrSchedulerType::Linear,
        "cosine" => LrSchedulerType::Cosine,
        other => panic!("unknown schedule {other}"),
    };
    // `max_grad_norm` is not carried over: TRL's PPO ignores it, ours would clip.
    config
}

/// TRL's responses of one iteration: its own cut, as explicit lengths.
fn responses(variant: &Variant, iteration: usize) -> Vec<Response> {
    let rows = variant.data.rows(&format!("it{iteration}.postprocessed_responses"));
    let last = variant.numbers(iteration, "sequence_lengths");
    let has_eos = variant.numbers(iteration, "contain_eos_token");
    rows.iter()
        .zip(last)
        .zip(has_eos)
        .map(|((row, last), has_eos)| Response {
            tokens: row[..(last + 1) as usize].to_vec(),
            logprobs: vec![0.0; (last + 1) as usize],
            finish: if has_eos == 1 { FinishReason::Stop } else { FinishReason::Length },
            sets: None,
            inserted: Vec::new(),
        })
        .collect()
}

fn compare(variant: &Variant) {
    let options = model_options();
    let load = |model: &str| CausalLm::from_pretrained(&variant.init(model), options).unwrap();
    let load_cls = |model: &str| SequenceClassifier::from_pretrained(&variant.init(model), None, options).unwrap();
    let (reference, reward) = (load("ref"), load_cls("reward"));
    let config = &variant.config;
    reference.shard(&World::of_process(), config.policy_stage());
    let plan = config.plan(variant.info["dataset_rows"].as_u64().unwrap() as usize).unwrap();
    assert_eq!(plan.num_total_batches, variant.iterations());
    let mut learner = Learner::new(load("policy"), load_cls("value"), config.learner());
    let steps_agree = variant.steps_agree();
    let iterations = if steps_agree { variant.iterations() } else { 1 };

    for it in 0..iterations {
        let prompts: Vec<Vec<i64>> = variant
            .data
            .rows(&format!("it{it}.queries"))
            .iter()
            .map(|row| row.iter().copied().skip_while(|&id| id == PAD).collect())
            .collect();
        let responses = responses(variant, it);
        let sequences: Vec<Vec<i64>> =
            prompts.iter().zip(&responses).map(|(p, r)| [p.as_slice(), &r.tokens].concat()).collect();

        let raw = score(&reward, &sequences, config.local_rollout_forward_batch_size).unwrap();
        let all = raw.ones_like().to_kind(Kind::Bool);
        variant.check(it, "score_raw", &raw, &all);
        let scores = if config.missing_eos_penalty.is_some() && config.stop_token_id.is_some_and(|id| id != EOS) {
            // TRL looks for eos, also where another token stops a response; we look for what stops it. Its scores
            // continue from here.
            say(&format!("{}: scores after the penalty are TRL's, which tests another token", variant.name()));
            variant.tensor(it, "scores").shallow_clone()
        } else {
            let stopped: Vec<bool> = responses.iter().map(|r| r.finish == FinishReason::Stop).collect();
            let scores = penalize_missing_stop(&raw, &stopped, config.missing_eos_penalty.unwrap_or(0.0));
            variant.check(it, "scores", &scores, &all);
            scores
        };

        let judges = learner.rollout_models(&reference);
        let e = experience(
            judges,
            &prompts,
            &responses,
            scores,
            &RolloutSettings { recompute_logprobs: true, ..config.rollout(judges.policy) },
        )
        .unwrap();
        let t = targets(&e, config.kl.kl_coef, &config.shaping());
        variant.check(it, "logprobs", &e.logprobs, &e.masks.response);
        variant.check(it, "ref_logprobs", e.ref_logprobs.as_ref().unwrap(), &e.masks.response);
        variant.check(it, "values", &e.values, &e.masks.value);
        variant.check(it, "kl", &t.kl, &e.masks.response);
        variant.check(it, "rewards", &t.rewards, &e.masks.value);
        variant.check(it, "advantages", &t.advantages, &e.masks.response);
        variant.check(it, "returns", &t.returns, &e.masks.value);
        if !steps_agree {
            say(&format!("{}: compared up to the first optimizer step, which TRL takes elsewhere", variant.name()));
            return;
        }

        let orders: Vec<Vec<usize>> = variant
            .data
            .rows(&format!("it{it}.b_inds"))
            .iter()
            .map(|row| row.iter().map(|&i| i as usize).collect())
            .collect();
        let rates = config.learning_rates(it, plan.num_total_batches);
        let steps = learner.optimize(&e, &t, &orders, rates, &plan.epoch).unwrap();
        compare_steps(variant, it, &steps);
        let mut found = Metrics::default();
        learner.metrics(&mut found, &e, &t, &steps, &plan.epoch);
        compare_metrics(variant, it, &found, rates.value);
    }
    // The ranks' parts of the weights are put together.
    let (_policy, _value) = (learner.policy.gathered().unwrap(), learner.value.model().map(|model| model.gathered()));
    compare_weights(variant, "policy", learner.policy.params());
    compare_weights(variant, "value_model", learner.value.params());
    say(&format!("{}: compared whole, {iterations} iterations", variant.name()));
}

fn compare_steps(variant: &Variant, it: usize, steps: &[rlhf::rl::stats::StepStats]) {
    let iteration_values = |list: &str| -> Vec<Value> {
        let all = variant.info[list].as_array().unwrap();
        all.iter().filter(|entry| entry["iteration"] == it).cloned().collect()
    };
    let (losses, norms) = (iteration_values("micro_batches"), iteration_values("optimizer_steps"));
    assert_eq!((steps.len(), steps.len()), (losses.len(), norms.len()));
    for (i, ((step, loss), norm)) in steps.iter().zip(&losses).zip(&norms).enumerate() {
        let what = format!("{}: it{it} step {i}", variant.name());
        let number = |entry: &Value, name: &str| entry[name].as_f64().unwrap();
        near(&format!("{what}: pg_loss"), step.policy_loss / step.tokens, number(loss, "pg_loss"), 1e-4);
        near(&format!("{what}: vf_loss"), step.value_loss / step.value_slots, number(loss, "vf_loss"), 1e-4);
        near(&format!("{what}: vf_clipfrac"), step.value_clipped / step.value_slots, number(loss, "vf_clipfrac"), 1e-6);
        let found = step.policy_grad_norm.hypot(step.value_grad_norm);
        let expected = number(norm, "global_grad_norm");
        near(&format!("{what}: gradient norm"), found, expected, 2e-3 * expected.max(0.1));
    }
}

fn compare_metrics(variant: &Variant, it: usize, found: &Metrics, lr: f64) {
    let expected = &variant.info["metrics"][it];
    // Not here: what TRL averages over pads (approxkl, entropy, ratio), and the variance it takes of averages.
    let objectives = ["kl", "entropy", "non_score_reward", "rlhf_reward", "scores"].map(|n| format!("objective/{n}"));
    let averages = ["policy/clipfrac_avg", "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg"].map(String::from);
    // With several mini-batches TRL averages their means, we count tokens; the steps were compared one by one already.
    let averages = averages.into_iter().filter(|_| variant.config.num_mini_batches == 1);
    for name in objectives.into_iter().chain(averages) {
        // Sums over up to ten tokens of numbers of order ten.
        let tolerance = if name.starts_with("objective") { 5e-4 } else { 1e-4 };
        let expected = expected[&name].as_f64().unwrap();
        near(&format!("{}: it{it} {name}", variant.name()), found.get(&name).unwrap(), expected, tolerance);
    }
    near("lr", lr, expected["lr"].as_f64().unwrap(), 1e-12);
}

fn compare_weights(variant: &Variant, model: &str, params: &[Param]) {
    let golden = Tensors::read(&variant.dir.join("final.safetensors"));
    for param in params {
        // transformers holds in memory as `lm_head` what GPT-NeoX checkpoints call `embed_out`.
        let name = format!("{model}.{}", param.name.replace("embed_out", "lm_head"));
        let part = golden.part(&name);
        let tolerance = variant.info["noise_floor_f32_vs_f64"]["final"][&name].as_f64().unwrap_or(0.0);
        let found = on_host(&part.select(&param.tensor.detach())).copy();
        if name.ends_with("query_key_value.bias") {
            // The gradient of a key's bias is 0 where it is not rotated, and Adam turns its round-off into whole steps.
            let (heads, head_dim, rotated) = (2, 16, 4);
            let view = |t: &Tensor| t.view([heads, 3, head_dim]).select(1, 1).narrow(1, rotated, head_dim - rotated);
            view(&found).copy_(&view(part.tensor));
        }
        let what = format!("{}: {name}", variant.name());
        assert_close(&what, &found, part.tensor, (5.0 * tolerance).max(2e-5));
    }
    let compared = params.len();
    let expected = golden.names().filter(|name| name.starts_with(&format!("{model}."))).count();
    assert_eq!(compared, expected, "{}: weights of {model}", variant.name());
}

#[test]
fn every_golden_run_of_trls_trainer_is_reproduced_to_the_weights() {
    for dir in golden_runs() {
        compare(&Variant::read(&dir));
    }
}

#[test]
fn golden_runs_are_reproduced_by_2_and_4_ranks_at_every_stage() {
    for (world, stage) in [(2, 0), (4, 0), (2, 1), (2, 2), (4, 3)] {
        run_as_ranks("ppo::golden::golden_runs_on_one_of_several_ranks", world, &[(STAGE, stage.to_string())]);
    }
}

/// Number of the ZeRO stage in the ranks' environment.
const STAGE: &str = "RLHF_TEST_ZERO_STAGE";

#[test]
#[ignore = "one rank of the test above, which starts it"]
fn golden_runs_on_one_of_several_ranks() {
    join_ranks();
    let stage = match std::env::var(STAGE).unwrap().as_str() {
        "0" => ZeroStage::Stage0,
        "1" => ZeroStage::Stage1,
        "2" => ZeroStage::Stage2,
        _ => ZeroStage::Stage3,
    };
    for dir in golden_runs() {
        let mut variant = Variant::read(&dir);
        let config = &mut variant.config;
        let rows = config.per_device_train_batch_size.take().unwrap() * config.gradient_accumulation_steps;
        (config.train_batch_size, config.gradient_accumulation_steps) = (Some(rows), 1);
        config.run.dist.zero_stage = stage;
        compare(&variant);
    }
}

fn golden_runs() -> Vec<PathBuf> {
    let dir = chosen_golden().join("trl_new");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("data.safetensors").is_file())
        .collect();
    dirs.sort();
    assert!(!dirs.is_empty(), "{}: no golden run", dir.display());
    assert_eq!((EOS, PAD), (0, 1), "the golden runs' special tokens");
    dirs
}

#[test]
fn the_golden_runs_hold_what_their_names_promise() {
    let read = |name: &str| Variant::read(&golden().join("trl_new").join(name));
    let iterations = |variant: &Variant, tensor: &str| -> Vec<Vec<i64>> {
        (0..variant.iterations()).flat_map(|it| variant.data.rows(&format!("it{it}.{tensor}"))).collect()
    };
    let holds_before = |row: &[i64], first: i64, then: fn(i64) -> bool| {
        row.iter().position(|&id| id == first).is_some_and(|at| row[at + 1..].iter().any(|&id| then(id)))
    };

    let stop_id = read("llama_stop_id_2it");
    assert_eq!(stop_id.config.stop_token_id, Some(7));
    let rows = iterations(&stop_id, "postprocessed_responses");
    let stopped = rows.iter().filter(|row| row.contains(&7)).count();
    let eos_inside = rows.iter().filter(|row| holds_before(row, EOS, |id| id == 7)).count();
    assert!(stopped < rows.len() && eos_inside > 3, "{stopped} stop, {eos_inside} with eos before");

    let rows = iterations(&read("llama_pad_inside_2it"), "responses");
    let pad_inside = rows.iter().filter(|row| holds_before(row, PAD, |id| id != PAD)).count();
    assert!(pad_inside > 3, "{pad_inside} rows with a pad before other tokens");

    let ragged = read("neox_ragged_queries_2it");
    for it in 0..ragged.iterations() {
        let rows = ragged.data.rows(&format!("it{it}.queries"));
        let lengths: BTreeSet<usize> = rows.iter().map(|row| row.iter().skip_while(|&&id| id == PAD).count()).collect();
        let (shortest, longest) = (lengths.first().unwrap(), lengths.last().unwrap());
        assert!(lengths.len() >= 5 && longest - shortest >= 12, "query lengths {lengths:?}");
    }

    for (name, clip) in [
        ("llama_gae_clip_3it", "policy/clipfrac_avg"),
        ("llama_gae_clip_3it", "val/clipfrac_avg"),
        ("llama_pad_inside_2it", "policy/clipfrac_avg"),
        ("neox_ragged_queries_2it", "val/clipfrac_avg"),
    ] {
        let share = read(name).info["metrics"][0][clip].as_f64().unwrap();
        assert!(share > 0.05, "{name}: {clip} is {share}: the clip range does not bite");
    }
}
