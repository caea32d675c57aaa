//! Runs of TRL 1.11's GRPOTrainer and RLOOTrainer (`tests/golden/trl_grpo`): its responses, rewards and order of rows are injected,
//! everything else is computed here. [`super::tools_golden`] compares runs with tools in the same way.

use crate::support::{
    Tensors, chosen_golden, join_ranks, model_options, note_difference, on_host, read_json, run_as_ranks, say,
};
use rlhf::dist::{World, ZeroStage};
use rlhf::generate::{FinishReason, Response};
use rlhf::metrics::Metrics;
use rlhf::model::{CausalLm, Param, ValueModel};
use rlhf::optim::LearningRates;
use rlhf::reward::{FnReward, RewardInput, Rewards, ScoreTransform, ScoreUse, Scored};
use rlhf::rl::advantage::{Aggregation, ScaleRewards};
use rlhf::rl::experience::Experience;
use rlhf::rl::groups::{push_completion_metrics, truncated};
use rlhf::rl::learner::{EpochPlan, Learner};
use rlhf::rl::math::{self, ImportanceLevel};
use rlhf::rl::rollout::{RolloutSettings, experience};
use rlhf::rl::shaping::{Targets, targets};
use rlhf::rl::stats::StepStats;
use rlhf::schema::Choices as _;
use rlhf::settings::{LossType, LrSchedulerType, PpoConfig, Preset};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};
use tch_ext::to_host;

const EOS: i64 = 0;

/// Tolerance, where six times the distance of TRL's run from the same run in float64 is not more.
const TOLERANCE: f64 = 2e-5;

/// One run of a trainer of TRL.
pub(super) struct Run {
    dir: PathBuf,
    info: Value,
    data: Tensors,
    config: PpoConfig,
    /// Largest difference of each kind of number.
    worst: RefCell<BTreeMap<String, f64>>,
    /// Differences above their tolerances.
    wrong: RefCell<Vec<String>>,
}

/// A micro-batch of TRL's: a slice of the rows of one generation.
struct Micro {
    generation: usize,
    rows: Vec<usize>,
    /// As TRL passes it to the backward pass, times the number of micro-batches of the optimizer step.
    loss: f64,
}

/// The optimizer steps on the responses of the same generations.
struct Update {
    generations: Vec<usize>,
    /// Number of the first of `steps`.
    first: usize,
    steps: Vec<Vec<Micro>>,
}

/// The data of an update.
struct Rollout {
    responses: Vec<Response>,
    scored: Scored,
    e: Experience,
    targets: Targets,
}

impl Run {
    pub(super) fn read(dir: &Path) -> Self {
        let info = read_json(&dir.join("info.json"));
        let data = Tensors::read(&dir.join("data.safetensors"));
        let config = config(&info);
        Self { dir: dir.to_path_buf(), data, info, config, worst: RefCell::default(), wrong: RefCell::default() }
    }

    fn name(&self) -> &str {
        self.info["run"].as_str().unwrap()
    }

    fn is_rloo(&self) -> bool {
        self.config.preset == Preset::Rloo
    }

    fn init(&self, model: &str) -> PathBuf {
        let folder = match self.info["init"].as_str() {
            Some(folder) => folder.to_string(),
            None => format!("trl_new/init/{}_", self.info["family"].as_str().unwrap()),
        };
        chosen_golden().join(format!("{folder}{model}"))
    }

    fn load(&self, model: &str) -> CausalLm {
        CausalLm::from_pretrained(&self.init(model), model_options()).unwrap()
    }

    fn updates(&self) -> Vec<Update> {
        let micro = &self.info["micro_batches"];
        let numbers = |list: &Value| -> Vec<usize> {
            list.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect()
        };
        let (generations, steps) = (numbers(&micro["generation"]), numbers(&micro["optimizer_step"]));
        let mut all: Vec<Vec<Micro>> = Vec::new();
        for (at, (&generation, &step)) in generations.iter().zip(&steps).enumerate() {
            all.resize_with(step + 1, Vec::new);
            let accumulated = steps.iter().filter(|&&other| other == step).count() as f64;
            let loss = micro["loss"][at].as_f64().unwrap() * accumulated;
            all[step].push(Micro { generation, rows: numbers(&micro["rows"][at]), loss });
        }
        let mut updates: Vec<Update> = Vec::new();
        for (step, micro_batches) in all.into_iter().enumerate() {
            let generations: BTreeSet<usize> = micro_batches.iter().map(|micro| micro.generation).collect();
            let generations: Vec<usize> = generations.into_iter().collect();
            match updates.last_mut().filter(|update| update.generations == generations) {
                Some(update) => update.steps.push(micro_batches),
                None => updates.push(Update { generations, first: step, steps: vec![micro_batches] }),
            }
        }
        updates
    }

    /// Number of responses of a generation.
    fn generation_size(&self) -> usize {
        self.info["generation_batch_size"].as_u64().unwrap() as usize
    }

    /// The tensor `name` of each generation of an update, one below the other; the slots of a row are padded to the response length.
    fn tensor(&self, update: &Update, name: &str) -> Tensor {
        let one = |generation: &usize| {
            let x = self.data.get(&format!("it{generation}.{name}"));
            let whole = x.dim() == 2 && x.size()[1] <= self.config.response_length as i64 && name != "rewards";
            let missing = if whole { self.config.response_length as i64 - x.size()[1] } else { 0 };
            x.constant_pad_nd([0, missing])
        };
        Tensor::cat(&update.generations.iter().map(one).collect::<Vec<_>>(), 0)
    }

    fn has(&self, name: &str) -> bool {
        self.data.names().any(|other| other == format!("it0.{name}"))
    }

    fn prompts(&self, update: &Update) -> Vec<Vec<i64>> {
        let pad = self.info["pad"].as_i64().unwrap();
        let rows =
            update.generations.iter().flat_map(|generation| self.data.rows(&format!("it{generation}.prompt_ids")));
        rows.map(|row| row.into_iter().skip_while(|&id| id == pad).collect()).collect()
    }

    fn responses(&self, update: &Update) -> Vec<Response> {
        let rows = Vec::<Vec<i64>>::try_from(self.tensor(update, "completion_ids").to_kind(Kind::Int64)).unwrap();
        let lengths = to_host(&self.tensor(update, "lengths"));
        let inserted = self.inserted(update, &lengths);
        let response = |((mut tokens, length), inserted): ((Vec<i64>, f64), Vec<Range<usize>>)| {
            tokens.truncate(length as usize);
            let finish = if tokens.last() == Some(&EOS) { FinishReason::Stop } else { FinishReason::Length };
            Response { logprobs: vec![0.0; tokens.len()], tokens, finish, sets: None, inserted }
        };
        rows.into_iter().zip(lengths).zip(inserted).map(response).collect()
    }

    /// The tokens of each row that the policy did not sample, by the zeros of TRL's mask of tools; none in a run without tools.
    fn inserted(&self, update: &Update, lengths: &[f64]) -> Vec<Vec<Range<usize>>> {
        if !self.has("tool_mask") {
            return vec![Vec::new(); lengths.len()];
        }
        let masks = Vec::<Vec<i64>>::try_from(self.tensor(update, "tool_mask").to_kind(Kind::Int64)).unwrap();
        let ranges = |(mask, length): (&Vec<i64>, &f64)| {
            let mut found: Vec<Range<usize>> = Vec::new();
            for slot in (0..*length as usize).filter(|&slot| mask[slot] == 0) {
                match found.last_mut().filter(|range| range.end == slot) {
                    Some(range) => range.end += 1,
                    None => found.push(slot..slot + 1),
                }
            }
            found
        };
        masks.iter().zip(lengths).map(ranges).collect()
    }

    /// The recorded rewards, through [`Rewards`].
    fn scored(&self, update: &Update, rewards: &Tensor, responses: &[Response]) -> Scored {
        let names = self.info["rewards"].as_array().unwrap();
        let mut all = Rewards::new();
        for (at, name) in names.iter().enumerate() {
            let weight = self.info["args"]["reward_weights"][at].as_f64().unwrap_or(1.0);
            let found = to_host(&rewards.select(1, at as i64));
            let scores = move |_: &[RewardInput<'_>]| {
                Ok(found.iter().map(|x| Some(*x).filter(|x| !x.is_nan())).collect::<Vec<_>>())
            };
            all = all.with_transform(
                name.as_str().unwrap(),
                FnReward::new(scores),
                ScoreTransform { weight, ..ScoreTransform::default() },
            );
        }
        let (prompts, row) = (self.prompts(update), Value::Null);
        let input = |(prompt, response): (&'_ Vec<i64>, &'_ Response)| (prompt.clone(), response.clone());
        let pairs: Vec<_> = prompts.iter().zip(responses).map(input).collect();
        let batch: Vec<RewardInput<'_>> = pairs
            .iter()
            .map(|(prompt, response)| RewardInput {
                prompt: "",
                response: "",
                prompt_ids: prompt,
                response_ids: &response.tokens,
                finish: response.finish,
                row: &row,
                episode: None,
            })
            .collect();
        all.score(&batch, ScoreUse::Training).unwrap()
    }

    fn rollout(&self, update: &Update, learner: &Learner, reference: Option<&CausalLm>) -> Rollout {
        let responses = self.responses(update);
        let rewards = self.tensor(update, "rewards");
        let scored = self.scored(update, &rewards, &responses);
        let models = learner.rollout_models(reference);
        let settings = RolloutSettings { recompute_logprobs: true, ..self.config.rollout(models.policy) };
        let scores = scored.to_scores(models.policy.device());
        let mut e = experience(models, &self.prompts(update), &responses, scores, &settings).unwrap();
        let size = self.config.advantage.num_generations;
        e.groups = (0..e.rows()).map(|row| row / size).collect();
        e.unscored = (0..e.rows()).filter(|&row| scored.unscored()[row]).collect();
        if self.config.advantage.multi_objective_aggregation == Aggregation::NormalizeThenSum {
            let weights = self.info["args"]["reward_weights"].as_array().unwrap();
            let weights = weights.iter().map(|weight| weight.as_f64().unwrap());
            e.rewards = Some(weights.zip(scored.components.iter().map(|c| c.scores.clone())).collect());
        }
        if self.config.mask.mask_truncated_completions {
            e.mask_rows(&truncated(&responses));
        }
        let targets = targets(&e, self.config.kl.kl_coef, &self.config.shaping());
        Rollout { responses, scored, e, targets }
    }

    fn noise(&self, kind: &str, name: &str) -> f64 {
        let noise = &self.info["noise_floor_f32_vs_f64"][kind][name];
        (6.0 * noise.as_f64().unwrap_or(0.0)).max(TOLERANCE)
    }

    /// Compares two numbers, and records their difference under `kind`.
    fn near(&self, kind: &str, what: &str, found: f64, expected: f64, tolerance: f64) {
        let gap = (found - expected).abs();
        note_difference(gap, tolerance);
        let mut worst = self.worst.borrow_mut();
        let entry = worst.entry(kind.to_string()).or_insert(0.0);
        *entry = entry.max(gap);
        if gap.is_nan() || gap > tolerance {
            let message = format!("{}: {what}: {found} is not {expected} within {tolerance:e}", self.name());
            self.wrong.borrow_mut().push(message);
        }
    }

    /// Compares two tensors by their largest difference.
    fn close(&self, kind: &str, what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
        assert_eq!(found.size(), expected.size(), "{}: {what}: shapes", self.name());
        let gap =
            if found.numel() == 0 { 0.0 } else { (on_host(found) - on_host(expected)).abs().max().double_value(&[]) };
        self.near(kind, &format!("{what}: largest difference"), gap, 0.0, tolerance);
    }

    /// Compares what is computed before training: log-probabilities, advantages, counts.
    fn compare_rollout(&self, update: &Update, rollout: &Rollout) {
        let (e, what) = (&rollout.e, |name: &str| format!("generations {:?}: {name}", update.generations));
        // TRL's tensors are in the host's memory, and so are what is made of them and of ours.
        let mask = &on_host(&e.masks.loss);
        let found = mask.to_kind(Kind::Float);
        let mut expected = self.tensor(update, "completion_mask").to_kind(Kind::Float);
        if self.has("tool_mask") {
            expected *= self.tensor(update, "tool_mask").to_kind(Kind::Float);
        }
        self.close("masks", &what("completion_mask"), &found, &expected, 0.0);
        let generation = format!("it{}", update.generations[0]);
        for (name, found) in [
            ("old_per_token_logps", Some(&e.logprobs)),
            // Those of each turn after its context: results of tools have moved nothing.
            ("sampling_logps", Some(&e.logprobs)),
            ("ref_per_token_logps", e.ref_logprobs.as_ref()),
        ] {
            if self.has(name) {
                let expected = math::keep(&self.tensor(update, name), mask);
                let tolerance = self.noise("tensors", &format!("{generation}.{name}"));
                let found = math::keep(&on_host(found.unwrap()), mask);
                self.close("log-probabilities", &what(name), &found, &expected, tolerance);
            } else if name.starts_with("ref") {
                assert!(found.is_none(), "{}: a reference model that TRL has not", self.name());
            }
        }
        let expected = self.tensor(update, "advantages").unsqueeze(1);
        let expected = math::keep(&expected.expand(mask.size(), false), mask);
        self.close("advantages", &what("advantages"), &rollout.targets.advantages, &expected, TOLERANCE);
    }

    /// The learning rates of the optimizer steps of an update.
    fn rates(&self, update: &Update) -> Vec<LearningRates> {
        let total = self.info["optimizer_steps"]["learning_rate"].as_array().unwrap().len();
        (update.first..update.first + update.steps.len()).map(|step| self.config.learning_rates(step, total)).collect()
    }

    fn metric(&self, name: &str, step: usize) -> Option<f64> {
        self.info["metrics"][name][step].as_f64()
    }

    fn compare_step(&self, step: usize, found: &[StepStats], micro_batches: &[Micro], rollout: &Rollout) {
        let mean = |numbers: Vec<f64>| numbers.iter().sum::<f64>() / numbers.len() as f64;
        // The terms of these losses are advantages times log-probabilities of about 6 nats, whose sum nearly cancels.
        let term = if matches!(self.config.loss.loss_type, LossType::Cispo | LossType::Vespo) { 6.0 } else { 1.0 };
        for (at, (found, micro)) in found.iter().zip(micro_batches).enumerate() {
            let loss = found.loss - self.loss_of_masked_rows(micro, rollout);
            let tolerance = TOLERANCE * micro.loss.abs().max(term);
            self.near("losses", &format!("step {step}: loss of micro-batch {at}"), loss, micro.loss, tolerance);
        }
        self.compare_norm(step, found.last().unwrap().policy_grad_norm);
        let found = mean(micro_batches.iter().map(|micro| micro.loss).collect());
        self.near("recorded losses", "the logged loss", found, self.metric("loss", step).unwrap(), 1e-5);
    }

    /// Compares the norm of a gradient before clipping, relative to TRL's.
    fn compare_norm(&self, step: usize, found: f64) {
        let expected = self.metric("grad_norm", step).unwrap();
        let scale = expected.max(0.1);
        let tolerance = self.noise("metrics", "grad_norm").max(1e-4);
        let what = format!("step {step}: grad_norm");
        self.near("gradient norms (relative)", &what, found / scale, expected / scale, tolerance);
    }

    /// The loss of masked rows in RLOOTrainer: minus the advantage at a ratio of 1 without a gradient. Here a response without a token
    /// has no loss.
    fn loss_of_masked_rows(&self, micro: &Micro, rollout: &Rollout) -> f64 {
        if !self.is_rloo() || !self.config.mask.mask_truncated_completions {
            return 0.0;
        }
        let advantages = to_host(self.data.get(&format!("it{}.advantages", micro.generation)));
        let masked = truncated(&rollout.responses);
        let sum: f64 = micro.rows.iter().filter(|row| masked.contains(row)).map(|&row| advantages[row]).sum();
        sum / micro.rows.len() as f64
    }

    /// Compares the metrics of an optimizer step by their names: TRL averages those of its micro-batches.
    fn compare_metrics(&self, update: &Update, at: usize, learner: &Learner, found: &[StepStats], rollout: &Rollout) {
        let step = update.first + at;
        let metrics: Vec<Metrics> = found
            .iter()
            .map(|part| {
                let mut m = Metrics::default();
                learner.group_metrics(&mut m, &rollout.e, &rollout.targets, std::slice::from_ref(part));
                m
            })
            .collect();
        let mut rollout_metrics = Metrics::default();
        rollout.scored.push_trl_metrics(&mut rollout_metrics);
        push_completion_metrics(&mut rollout_metrics, &rollout.responses);
        let names = self.info["metrics"].as_object().unwrap().keys();
        for name in names.filter(|name| !self.is_left_out(name)) {
            let Some(expected) = self.metric(name, step) else { continue };
            let step_mean = || {
                // A micro-batch whose rows are all masked has no extremes.
                let is_extreme = ["clip_ratio/low_min", "clip_ratio/high_max"].contains(&name.as_str());
                let parts = metrics.iter().zip(found).filter(|(_, s)| !is_extreme || s.low_clipped_min.is_finite());
                let value = |m: &Metrics| m.get(name).unwrap_or_else(|| panic!("{}: no metric {name}", self.name()));
                let values: Vec<f64> = parts.map(|(m, _)| value(m)).collect();
                values.iter().sum::<f64>() / values.len().max(1) as f64
            };
            let found = rollout_metrics.get(name).unwrap_or_else(step_mean);
            self.near(
                &format!("metrics: {name}"),
                &format!("step {step}: {name}"),
                found,
                expected,
                self.noise("metrics", name),
            );
        }
    }

    /// Metrics that are compared elsewhere, that are not logged here, or that are defined otherwise.
    fn is_left_out(&self, name: &str) -> bool {
        let several = self.name() == "grpo_several_generations_per_step";
        match name {
            // Compared with the steps; counted by the trainer.
            "loss" | "grad_norm" | "learning_rate" | "num_tokens" | "epoch"
            // Counted where the calls are.
            | "tools/call_frequency" | "tools/failure_frequency"
            // Not logged: the mean weight of VESPO, and the loss without the entropy bonus.
            | "vespo/phi_seq_mean" | "policy_loss" => true,
            // Not logged where it is constant.
            "entropy_coef" => !self.config.loss.use_adaptive_entropy,
            // Of the scores here; of the rewards with the KL in RLOOTrainer, and of the whole batch where that is the scale.
            "frac_reward_zero_std" => {
                (self.is_rloo() && (self.config.kl.kl_coef > 0.0 || !self.config.reward_clip_range.is_empty()))
                    || self.config.advantage.scale_rewards == ScaleRewards::Batch
                    || self.config.advantage.multi_objective_aggregation == Aggregation::NormalizeThenSum
            }
            // TRL averages the deviations and extremes of each generation; here they are those of the update.
            _ => several && (name.ends_with("std") || name.contains("_length") || name.ends_with("mean")),
        }
    }

    fn compare_weights(&self, model: &str, params: &[Param]) {
        let golden = Tensors::read(&self.dir.join("final.safetensors"));
        let mut compared = 0;
        for param in params {
            let name = format!("{model}.{}", param.name.replace("embed_out", "lm_head"));
            if !golden.names().any(|stored| stored == name || stored == format!("{name}[::7]")) {
                continue;
            }
            compared += 1;
            let part = golden.part(&name);
            let found = part.select(&param.tensor.detach()).copy();
            if name.ends_with("query_key_value.bias") {
                // The gradient of a key's bias is 0 where it is not rotated, and Adam turns its round-off into whole steps.
                let (heads, head_dim, rotated) = (2, 16, 4);
                let view =
                    |t: &Tensor| t.view([heads, 3, head_dim]).select(1, 1).narrow(1, rotated, head_dim - rotated);
                view(&found).copy_(&view(part.tensor));
            }
            self.close("weights", &name, &found, part.tensor, self.noise("final", &name));
        }
        let expected = golden.names().filter(|name| name.starts_with(&format!("{model}."))).count();
        assert_eq!(compared, expected, "{}: weights of {model}", self.name());
    }
}

/// TRL's settings by their names. An argument that is not listed is a mistake of this function.
fn config(info: &Value) -> PpoConfig {
    let rloo = info["trainer"] == "rloo";
    let preset = if rloo { Preset::Rloo } else { Preset::Grpo };
    let mut config = PpoConfig::with_preset(preset, "policy", "reward", "prompts.jsonl", "out");
    for (name, found) in info["args"].as_object().unwrap() {
        let number = || found.as_f64().unwrap_or_else(|| panic!("{name} = {found}"));
        let (size, flag) = (|| number() as usize, || found.as_bool().unwrap());
        let text = || found.as_str().unwrap();
        match name.as_str() {
            "learning_rate" => config.learning_rate = number(),
            "max_completion_length" => config.response_length = size(),
            "num_generations" => config.advantage.num_generations = size(),
            "per_device_train_batch_size" => config.per_device_train_batch_size = Some(size()),
            "gradient_accumulation_steps" => config.gradient_accumulation_steps = size(),
            "steps_per_generation" => config.generation.steps_per_generation = Some(size()),
            "num_iterations" => config.num_ppo_epochs = size(),
            "max_steps" => config.generation.max_steps = Some(size()).filter(|_| number() > 0.0),
            "num_train_epochs" => config.num_train_epochs = number(),
            "temperature" => config.temperature = number(),
            "beta" => config.kl.kl_coef = number(),
            "use_bias_correction_kl" => config.kl.use_bias_correction_kl = flag(),
            "epsilon" => config.cliprange = number(),
            "epsilon_high" => config.loss.cliprange_high = Some(number()),
            "delta" => config.loss.dual_clip = Some(number()),
            "loss_type" => config.loss.loss_type = LossType::named(text()).unwrap(),
            "importance_sampling_level" => {
                config.loss.importance_sampling_level = ImportanceLevel::named(text()).unwrap();
            }
            "scale_rewards" => config.advantage.scale_rewards = ScaleRewards::named(text()).unwrap(),
            "multi_objective_aggregation" => {
                config.advantage.multi_objective_aggregation = Aggregation::named(text()).unwrap();
            }
            "normalize_advantages" => config.advantage.normalize_advantages = flag(),
            "reward_clip_range" => {
                config.reward_clip_range = found.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
            }
            "mask_truncated_completions" => config.mask.mask_truncated_completions = flag(),
            "top_entropy_quantile" => config.loss.top_entropy_quantile = number(),
            "off_policy_mask_threshold" => config.loss.off_policy_mask_threshold = Some(number()),
            "entropy_coef" => config.loss.entropy_coef = number(),
            "sync_ref_model" => config.sync.sync_ref_model = flag(),
            "ref_model_mixup_alpha" => config.sync.ref_model_mixup_alpha = number(),
            "ref_model_sync_steps" => config.sync.ref_model_sync_steps = size(),
            "weight_decay" => config.optimizer.weight_decay = number(),
            "max_grad_norm" => config.optimizer.max_grad_norm = Some(number()),
            "warmup_steps" => config.optimizer.warmup_steps = size(),
            "lr_scheduler_type" => {
                config.optimizer.lr_scheduler_type = LrSchedulerType::named(text()).unwrap();
            }
            "use_adaptive_entropy" => config.loss.use_adaptive_entropy = flag(),
            "entropy_target" => config.loss.entropy_target = number(),
            // Read where the rewards are; there is no dropout here; the calls are over.
            "reward_weights" | "disable_dropout" | "max_tool_calling_iterations" => {}
            other => panic!("no setting for TRL's {other}"),
        }
    }
    config
}

/// Runs and compares one run whose optimizer steps go by the mean of the losses of TRL's micro-batches.
pub(super) fn compare(run: &Run) {
    let config = &run.config;
    let several = run.name() == "grpo_several_generations_per_step";
    let reference = config.has_reference().then(|| run.load("ref"));
    let mut settings = config.learner();
    if several {
        // TRL divides the losses of each generation by its own tokens, here by those of the update: a difference by design.
        settings.update.loss.aggregation = rlhf::rl::math::LossAggregation::Tokens;
    } else {
        config.check().unwrap();
    }
    let mut learner = Learner::new(run.load("policy"), ValueModel::None, settings);
    learner.collect_clips = true;
    for update in run.updates() {
        let rollout = run.rollout(&update, &learner, reference.as_ref());
        run.compare_rollout(&update, &rollout);
        for (at, (micro_batches, rates)) in update.steps.iter().zip(run.rates(&update)).enumerate() {
            let step = update.first + at;
            run.near("lr", "learning_rate", rates.policy.unwrap(), run.metric("learning_rate", step).unwrap(), 1e-12);
            let first = |micro: &Micro| (micro.generation - update.generations[0]) * run.generation_size();
            let rows: Vec<usize> =
                micro_batches.iter().flat_map(|micro| micro.rows.iter().map(|row| first(micro) + row)).collect();
            let part_size = micro_batches[0].rows.len();
            let plan = EpochPlan { mini_batch_size: rows.len(), part_size, micro_batch_size: part_size };
            let found = learner.optimize(&rollout.e, &rollout.targets, &[rows], rates, &plan).unwrap();
            run.compare_step(step, &found, micro_batches, &rollout);
            run.compare_metrics(&update, at, &learner, &found, &rollout);
            if let Some(reference) = reference.as_ref().filter(|_| config.sync.is_due(step + 1)) {
                config.sync.mix(&learner.policy, reference).unwrap();
            }
        }
    }
    run.compare_weights("policy", learner.policy.params());
    if config.sync.sync_ref_model {
        run.compare_weights("ref", reference.unwrap().params());
    }
}

/// Runs one run as `rlhf ppo` does: whole updates, whose losses are sums over mini-batches. Compares the loss and the gradient of each
/// optimizer step, and the weights.
pub(super) fn compare_updates(run: &Run) {
    let config = &run.config;
    let plan = config.plan(run.info["prompts"].as_u64().unwrap() as usize).unwrap();
    let updates = run.updates();
    assert_eq!(plan.num_total_batches, updates.len(), "{}", run.name());
    let reference = config.has_reference().then(|| run.load("ref"));
    if let Some(reference) = &reference {
        reference.shard(&World::of_process(), config.policy_stage());
    }
    let mut learner = Learner::new(run.load("policy"), ValueModel::None, config.learner());
    for (number, update) in updates.iter().enumerate() {
        let rollout = run.rollout(update, &learner, reference.as_ref());
        run.compare_rollout(update, &rollout);
        let rows: Vec<usize> = update.steps.iter().flatten().flat_map(|micro| micro.rows.iter().copied()).collect();
        let orders: Vec<Vec<usize>> = rows.chunks(plan.batch_size).map(<[usize]>::to_vec).collect();
        let after_step =
            |policy: &CausalLm, steps: usize| match reference.as_ref().filter(|_| config.sync.is_due(steps)) {
                Some(reference) => config.sync.mix(policy, reference),
                None => Ok(()),
            };
        let rates = config.step_rates(number, &plan);
        let found =
            learner.optimize_with(&rollout.e, &rollout.targets, &orders, rates, &plan.epoch, after_step).unwrap();
        assert_eq!(found.len(), update.steps.len(), "{}", run.name());
        for (at, (found, micro_batches)) in found.iter().zip(&update.steps).enumerate() {
            let step = update.first + at;
            let parts = micro_batches.len() as f64;
            let masked: f64 = micro_batches.iter().map(|micro| run.loss_of_masked_rows(micro, &rollout)).sum();
            let expected = micro_batches.iter().map(|micro| micro.loss).sum::<f64>() / parts;
            let tolerance = TOLERANCE * expected.abs().max(1.0);
            run.near(
                "losses of mini-batches",
                &format!("step {step}: loss"),
                found.loss - masked / parts,
                expected,
                tolerance,
            );
            run.compare_norm(step, found.policy_grad_norm);
        }
    }
    // The ranks' parts of the weights are put together.
    let _gathered = (learner.policy.gathered().unwrap(), reference.as_ref().map(CausalLm::gathered));
    run.compare_weights("policy", learner.policy.params());
    if let Some(reference) = reference.as_ref().filter(|_| config.sync.sync_ref_model) {
        run.compare_weights("ref", reference.params());
    }
}

/// Returns true if TRL's loss of an optimizer step is that of its rows together, however they are divided into micro-batches.
pub(super) fn sums_over_micro_batches(run: &Run) -> bool {
    let (config, args) = (&run.config, &run.info["args"]);
    // TRL averages the means over the tokens of micro-batches.
    let mean = config.loss.loss_type == LossType::Bnpo || config.loss.entropy_coef > 0.0;
    // TRL takes the quantile of each micro-batch.
    let quantile = config.loss.top_entropy_quantile < 1.0;
    // TRL divides each generation by its own tokens, and takes a shorter step at the end of an epoch.
    let several = args["steps_per_generation"].as_u64() < args["gradient_accumulation_steps"].as_u64();
    !(mean || quantile || several)
}

/// Runs `compare` of each run; all differences are reported together.
pub(super) fn compare_all(compare: fn(&Run), runs: impl Iterator<Item = Run>) {
    let mut worst: BTreeMap<String, (f64, String)> = BTreeMap::new();
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for run in runs {
        compare(&run);
        for (kind, gap) in run.worst.take() {
            let entry = worst.entry(kind).or_default();
            if gap >= entry.0 {
                *entry = (gap, run.name().to_string());
            }
        }
        wrong.extend(run.wrong.take());
        compared += 1;
    }
    say(&format!("{compared} runs"));
    for (kind, (gap, run)) in worst.iter().filter(|(_, (gap, _))| *gap > 0.0) {
        say(&format!("{kind}: at most {gap:.1e}, in {run}"));
    }
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_golden_run_of_trls_trainers_without_a_critic_is_reproduced_to_the_weights() {
    compare_all(compare, golden_runs("trl_grpo").iter().map(|dir| Run::read(dir)));
}

#[test]
fn updates_without_a_critic_are_those_of_trl_where_its_losses_do_not_depend_on_micro_batches() {
    compare_all(
        compare_updates,
        golden_runs("trl_grpo").iter().map(|dir| Run::read(dir)).filter(sums_over_micro_batches),
    );
}

#[test]
fn golden_runs_without_a_critic_are_reproduced_by_2_ranks() {
    for stage in ["0", "3"] {
        let test = "ppo::groups_golden::golden_runs_without_a_critic_on_one_of_several_ranks";
        run_as_ranks(test, 2, &[(STAGE, stage.to_string())]);
    }
}

/// Number of the ZeRO stage in the ranks' environment.
const STAGE: &str = "RLHF_TEST_ZERO_STAGE";

#[test]
#[ignore = "one rank of the test above, which starts it"]
fn golden_runs_without_a_critic_on_one_of_several_ranks() {
    join_ranks();
    let stage = if std::env::var(STAGE).unwrap() == "0" { ZeroStage::Stage0 } else { ZeroStage::Stage3 };
    let with_ranks = |dir: &PathBuf| {
        let mut run = Run::read(dir);
        let size = run.generation_size();
        let config = &mut run.config;
        let rows = config.per_device_train_batch_size.take().unwrap() * config.gradient_accumulation_steps;
        (config.train_batch_size, config.gradient_accumulation_steps) = (Some(rows), 1);
        config.generation.steps_per_generation = None;
        config.generation.generation_batch_size = Some(size);
        config.run.dist.zero_stage = stage;
        run
    };
    compare_all(compare_updates, golden_runs("trl_grpo").iter().map(with_ranks).filter(sums_over_micro_batches));
}

/// The folders of the runs in `tests/golden/{folder}`.
pub(super) fn golden_runs(folder: &str) -> Vec<PathBuf> {
    let dir = chosen_golden().join(folder);
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("data.safetensors").is_file())
        .collect();
    dirs.sort();
    assert!(!dirs.is_empty(), "{}: no golden run", dir.display());
    dirs
}
