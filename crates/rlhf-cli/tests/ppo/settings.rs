//! What each setting of a PPO step does, and what it leaves alone; and TRL's command lines.

use crate::cli::{Scratch, json_lines};
use crate::support::{assert_close, golden, init};
use rlhf::generate::{GenerationConfig, Sampling, generate};
use rlhf::metrics::Metrics;
use rlhf::model::{Batch, CausalLm, LogprobOptions, ModelOptions, Param, SequenceClassifier};
use rlhf::rl::experience::Experience;
use rlhf::rl::learner::Learner;
use rlhf::rl::math::{KlEstimator, gae, keep};
use rlhf::rl::rollout::{RolloutSettings, experience, score};
use rlhf::rl::shaping::{Targets, targets};
use rlhf::rl::stats::StepStats;
use rlhf::run::Console;
use rlhf::settings::{PpoConfig, PpoPlan, Preset, WhitenAdvantages};
use rlhf::train::ppo::{PpoTrainer, ppo};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::Path;
use tch::{Kind, Tensor};

fn policy(name: &str) -> CausalLm {
    CausalLm::from_pretrained(&init(name), ModelOptions::default()).unwrap()
}

fn classifier(name: &str) -> SequenceClassifier {
    SequenceClassifier::from_pretrained(&init(name), None, ModelOptions::default()).unwrap()
}

/// One update of eight responses, up to the point where it learns; the reference is another model than the policy.
struct Update {
    learner: Learner,
    reference: CausalLm,
    experience: Experience,
    plan: PpoPlan,
    config: PpoConfig,
}

fn update(change: impl FnOnce(&mut PpoConfig)) -> Update {
    let mut config = PpoConfig::new("policy", "reward", "prompts.jsonl", "out");
    config.response_length = 10;
    config.total_episodes = Some(32);
    config.learning_rate = 1e-3;
    change(&mut config);
    let plan = config.plan(8).unwrap();
    let (learner, reference) =
        (Learner::new(policy("llama_policy"), classifier("llama_value"), config.learner()), policy("llama_ref"));
    let prompts: Vec<Vec<i64>> = (0..8).map(|row| (5..6 + row).collect()).collect();
    let generation = GenerationConfig {
        stop_token_ids: vec![192],
        seed: 1,
        ..GenerationConfig::new(Sampling::at_temperature(config.temperature), config.response_length)
    };
    let responses = generate(&learner.policy, &prompts, &generation).unwrap();
    let sequences: Vec<Vec<i64>> = prompts.iter().zip(&responses).map(|(p, r)| [&p[..], &r.tokens].concat()).collect();
    let scores = score(&classifier("llama_reward"), &sequences, 8).unwrap();
    let judges = learner.rollout_models(&reference);
    let experience = experience(
        judges,
        &prompts,
        &responses,
        scores,
        &RolloutSettings { recompute_logprobs: false, ..config.rollout(judges.policy) },
    )
    .unwrap();
    Update { learner, reference, experience, plan, config }
}

impl Update {
    fn targets(&self) -> Targets {
        targets(&self.experience, self.config.kl.kl_coef, &self.config.shaping())
    }

    /// Learns from rows in these orders, at the rates of the run's first update.
    fn learn_orders(&mut self, targets: &Targets, orders: &[Vec<usize>]) -> Vec<StepStats> {
        let rates = self.config.learning_rates(0, self.plan.num_total_batches);
        self.learner.optimize(&self.experience, targets, orders, rates, &self.plan.epoch).unwrap()
    }

    fn learn(&mut self, epochs: usize) -> Vec<StepStats> {
        let targets = self.targets();
        self.learn_orders(&targets, &vec![(0..8).collect(); epochs])
    }

    /// As [`Update::learn`], with no advantages: only other terms of the loss move the policy.
    fn learn_without_advantages(&mut self, epochs: usize) -> Vec<StepStats> {
        let mut targets = self.targets();
        targets.advantages = targets.advantages.zeros_like();
        self.learn_orders(&targets, &vec![(0..8).collect(); epochs])
    }

    /// As if the policy that sampled had found these rows' tokens a hundred times less likely: ratios of about 148.
    fn surprise(&mut self, rows: Range<i64>) {
        self.surprise_by(rows, 5.0);
    }

    /// The same with ratios of about the exponential of `nats`.
    fn surprise_by(&mut self, rows: Range<i64>, nats: f64) {
        let logprobs = self.experience.logprobs.copy();
        let _ = logprobs.narrow(0, rows.start, rows.end - rows.start).g_sub_scalar_(nats);
        self.experience.logprobs = logprobs;
    }

    fn metrics(&self, steps: &[StepStats]) -> Metrics {
        let mut found = Metrics::default();
        self.learner.metrics(&mut found, &self.experience, &self.targets(), steps, &self.plan.epoch);
        found
    }

    fn policy_weights(&self) -> Vec<Tensor> {
        weights(self.learner.policy.params())
    }

    fn value_weights(&self) -> Vec<Tensor> {
        weights(self.learner.value.params())
    }
}

fn weights(params: &[Param]) -> Vec<Tensor> {
    params.iter().map(|param| param.tensor.detach().copy()).collect()
}

// The steps.

#[test]
fn a_loss_scale_is_taken_back_to_the_bit_before_a_step() {
    let learnt = |power: Option<usize>| {
        let mut update = update(|c| {
            c.optimizer.max_grad_norm = Some(0.5);
            c.loss.entropy_coef = 0.01;
            c.run.fp16 = power.is_some();
            c.run.loss_scale.initial_scale_power = power.unwrap_or(16);
        });
        let steps = update.learn(2);
        (steps, update.policy_weights(), update.value_weights())
    };
    let expected = learnt(None);
    for power in [0, 16, 24] {
        assert_eq!(learnt(Some(power)), expected, "a scale of 2^{power}");
    }
}

#[test]
fn a_model_whose_gradient_overflows_skips_its_step_alone_or_with_the_other_under_align_overflow() {
    for align in [false, true] {
        let mut update = update(|c| {
            c.run.fp16 = true;
            c.run.loss_scale.initial_scale_power = 100;
            c.run.loss_scale.hysteresis = 1;
            c.half.align_overflow = align;
            c.vf_coef = 1e-14;
            c.optimizer.adam_epsilon = 1e-30;
        });
        // So large a scale of so large a loss is beyond f32 too; the value model's is small enough.
        let mut targets = update.targets();
        targets.advantages = &targets.advantages * 1e15;
        let orders = [(0..8).collect::<Vec<usize>>()];
        let before = (update.policy_weights(), update.value_weights());
        let first = update.learn_orders(&targets, &orders);
        assert_eq!((first[0].policy_overflowed, first[0].value_overflowed), (true, false));
        assert_eq!((first[0].policy_grad_norm, first[0].not_finite()), (0.0, None));
        assert!(first[0].value_grad_norm > 0.0 && first[0].value_grad_norm < 1e-9);
        assert_eq!(update.policy_weights(), before.0);
        assert_eq!(update.value_weights() == before.1, align, "align_overflow = {align}");
        let told = update.metrics(&first);
        assert_eq!((told.get("policy/overflows"), told.get("val/overflows")), (Some(1.0), Some(0.0)));
        assert_eq!(told.get("policy/grad_norm"), Some(0.0));
        // Halved at each overflow, the policy's scale comes down to where it learns.
        let mut overflows = 1;
        while update.learn_orders(&targets, &orders)[0].policy_overflowed {
            overflows += 1;
            assert!(overflows < 100, "the scale does not come down");
        }
        assert!(overflows > 10, "{overflows}");
        assert!(update.policy_weights() != before.0 && update.value_weights() != before.1);
    }
}

#[test]
fn epochs_end_after_the_first_that_is_one_and_a_half_times_target_kl_away() {
    let free = update(|c| c.num_mini_batches = 2).learn(4);
    // Of each epoch's last mini-batch.
    let moved: Vec<f64> = free.iter().skip(1).step_by(2).map(|step| step.policy_kl / step.tokens).collect();
    let reached = moved[..3].iter().copied().fold(0.0, f64::max);
    assert!(reached > 0.0, "the policy does not move away: {moved:?}");
    for (target, epochs) in [
        (reached / 1.5 * 0.999, 1 + moved.iter().position(|&kl| kl >= reached).unwrap()),
        (moved.iter().copied().fold(0.0, f64::max) / 1.5 * 1.001, 4),
    ] {
        let mut stopped = update(|c| {
            c.num_mini_batches = 2;
            c.loss.target_kl = Some(target);
        });
        let steps = stopped.learn(4);
        assert_eq!(steps, free[..2 * epochs], "target {target}, moved {moved:?}");
        assert_eq!(stopped.metrics(&steps).get("policy/epochs"), Some(epochs as f64));
    }
}

#[test]
fn a_mini_batch_above_the_ratio_threshold_takes_no_step_and_leaves_nothing_behind() {
    let surprised = |threshold| {
        let mut update = update(|c| {
            c.num_mini_batches = 4;
            c.loss.ratio_threshold = threshold;
        });
        update.surprise(0..2);
        update
    };
    let all: Vec<usize> = (0..8).collect();
    let mut skipping = surprised(Some(10.0));
    let targets = skipping.targets();
    let steps = skipping.learn_orders(&targets, std::slice::from_ref(&all));
    assert_eq!(steps.iter().map(|step| step.skipped).collect::<Vec<_>>(), [true, false, false, false]);
    assert!(steps[0].ratio / steps[0].tokens > 10.0 && steps[0].policy_grad_norm == 0.0);
    assert_eq!(skipping.metrics(&steps).get("policy/skipped_steps"), Some(1.0));
    // As if the first two rows had not been there.
    let mut without = surprised(Some(10.0));
    let mut found = without.learn_orders(&targets, &[all[2..].to_vec()]);
    // Only the first step of an update compares its log-probabilities with those of sampling.
    assert!(found[0].sampling.take().is_some() && steps[1].sampling.is_none());
    assert_eq!(found, steps[1..]);
    assert_eq!(skipping.policy_weights(), without.policy_weights());
    assert_eq!(skipping.value_weights(), without.value_weights());
    let mut patient = surprised(Some(1000.0));
    assert!(patient.learn_orders(&targets, &[all]).iter().all(|step| !step.skipped));
    assert_ne!(patient.policy_weights(), skipping.policy_weights());
}

#[test]
fn an_infinite_ratio_is_above_the_threshold_and_leaves_nothing_behind_with_any_loss() {
    for advantage in [-1.0, 0.0, 1.0] {
        let mut update = update(|c| {
            c.num_mini_batches = 4;
            c.loss.ratio_threshold = Some(10.0);
        });
        update.surprise_by(0..2, 100.0);
        let mut targets = update.targets();
        targets.advantages = targets.advantages.full_like(advantage);
        let before = (update.policy_weights(), update.value_weights());
        let steps = update.learn_orders(&targets, &[vec![0, 1]]);
        assert_eq!((steps[0].skipped, steps[0].ratio, steps[0].not_finite()), (true, f64::INFINITY, None));
        assert!((update.policy_weights(), update.value_weights()) == before, "advantages of {advantage}");
        let metrics = update.metrics(&steps);
        assert_eq!(metrics.get("policy/skipped_steps"), Some(1.0));
        assert!(metrics.get("loss/policy_avg").unwrap().is_finite());
        // Nothing of it is in the next step.
        update.learn_orders(&targets, &[vec![2, 3, 4, 5]]);
        assert!(update.policy_weights().iter().all(|weight| weight.isfinite().all().int64_value(&[]) == 1));
    }
}

#[test]
fn a_run_of_nothing_but_skipped_steps_changes_no_weight() {
    let mut update = update(|c| c.loss.ratio_threshold = Some(10.0));
    update.surprise(0..8);
    let before = (update.policy_weights(), update.value_weights());
    let steps = update.learn(4);
    assert!(steps.len() == 4 && steps.iter().all(|step| step.skipped));
    assert_eq!((update.policy_weights(), update.value_weights()), before);
}

#[test]
fn an_entropy_bonus_alone_raises_the_entropy_and_none_moves_nothing() {
    let entropies = |steps: &[StepStats]| steps.iter().map(|step| step.entropy / step.tokens).collect::<Vec<_>>();
    let rising = entropies(&update(|c| c.loss.entropy_coef = 0.5).learn_without_advantages(4));
    assert!(rising.windows(2).all(|pair| pair[1] > pair[0] + 1e-4), "{rising:?}");
    let still = entropies(&update(|_| ()).learn_without_advantages(4));
    assert!(still.windows(2).all(|pair| pair[1] == pair[0]), "{still:?}");
}

#[test]
fn the_kl_in_the_loss_draws_the_policy_to_the_reference_and_leaves_the_rewards_to_the_scores() {
    for estimator in [KlEstimator::Mse, KlEstimator::K3, KlEstimator::Abs, KlEstimator::Full] {
        let mut update = update(|c| {
            c.kl.kl_coef = 0.5;
            c.kl.kl_estimator = estimator;
            c.kl.kl_in_loss = true;
        });
        let targets = update.targets();
        let sum = |x: &Tensor| x.sum(Kind::Double).double_value(&[]);
        assert!((sum(&targets.rewards) - sum(&update.experience.scores)).abs() < 1e-4);
        let steps = update.learn_without_advantages(4);
        let kl: Vec<f64> = steps.iter().map(|step| step.ref_kl / step.tokens).collect();
        assert!(kl[0] > 0.0 && kl[3] < kl[0], "{estimator:?}: {kl:?}");
        // At the first step the policy is the one that sampled, so its KL is that of the rollout.
        let rollout = sum(&targets.kl) / steps[0].tokens;
        assert!((kl[0] - rollout).abs() < 1e-4 * rollout, "{estimator:?}: {} is not {rollout}", kl[0]);
        let metrics = update.metrics(&steps);
        assert_eq!(metrics.get("objective/non_score_reward"), Some(0.0));
        assert!(metrics.get("objective/kl").unwrap() > 0.0 && metrics.get("loss/kl_avg").unwrap() > 0.0);
    }
}

#[test]
fn advantages_are_whitened_over_the_update_over_each_mini_batch_or_not() {
    let first_loss = |whiten| {
        let mut update = update(|c| {
            c.whiten_advantages = whiten;
            c.num_mini_batches = 2;
            c.learning_rate = 0.0;
        });
        // With every ratio 1 a mini-batch's loss is the mean of its advantages, negated.
        let steps = update.learn(1);
        (update, steps[0].policy_loss / steps[0].tokens)
    };
    assert!(first_loss(WhitenAdvantages::MiniBatch).1.abs() < 1e-5);
    assert!(first_loss(WhitenAdvantages::Batch).1.abs() > 1e-3);
    let (update, loss) = first_loss(WhitenAdvantages::None);
    let (e, targets) = (&update.experience, update.targets());
    let (raw, _) = gae(&targets.rewards, &e.values, &e.masks.value, update.config.gamma, update.config.lam);
    let raw = keep(&raw, &e.masks.response);
    assert_close("advantages", &targets.advantages, &raw, 0.0);
    let tokens: i64 = e.lengths()[..4].iter().sum();
    let expected = -raw.narrow(0, 0, 4).sum(Kind::Double).double_value(&[]) / tokens as f64;
    assert!((loss - expected).abs() < 1e-5, "{loss} is not {expected}");
}

// The two models' optimizers.

#[test]
fn each_setting_of_the_value_model_moves_the_value_model_alone() {
    let learnt = |change: fn(&mut PpoConfig)| {
        let mut update = update(change);
        update.learn(2);
        (update.policy_weights(), update.value_weights())
    };
    let start = update(|_| ());
    let start = (start.policy_weights(), start.value_weights());
    let usual = learnt(|_| ());
    assert!(usual.0 != start.0 && usual.1 != start.1);
    let changes: [fn(&mut PpoConfig); 4] = [
        |c| c.value.value_learning_rate = Some(5e-3),
        |c| c.value.value_weight_decay = Some(0.5),
        |c| c.value.value_max_grad_norm = Some(1e-9),
        |c| c.value.value_lr_warmup_steps = Some(2),
    ];
    for change in changes {
        let found = learnt(change);
        assert_eq!(found.0, usual.0);
        assert_ne!(found.1, usual.1);
    }
    let still = learnt(|c| c.value.value_learning_rate = Some(0.0));
    assert_eq!(still, (usual.0, start.1));
    let still = learnt(|c| (c.learning_rate, c.value.value_learning_rate) = (0.0, Some(1e-3)));
    assert_eq!(still, (start.0, usual.1));
    // A clip for the policy alone.
    let clipped = learnt(|c| (c.optimizer.max_grad_norm, c.value.value_max_grad_norm) = (Some(1e-9), Some(0.0)));
    assert_ne!(clipped.0, learnt(|_| ()).0);
    assert_eq!(clipped.1, learnt(|_| ()).1);
}

/// Three updates of 8 responses.
fn run_config(dir: &Path) -> PpoConfig {
    let prompts = dir.join("prompts.jsonl");
    let rows = ["The movie", "A film", "do", "human", "a sing", "2024", "is it", "one"];
    std::fs::write(&prompts, rows.map(|prompt| format!("{}\n", serde_json::json!({"prompt": prompt}))).concat())
        .unwrap();
    let mut config = PpoConfig::new(init("llama_policy"), init("llama_reward"), prompts, dir.join("out"));
    config.model_name_or_path = Some(golden().join("models/gpt_neox"));
    config.response_length = 8;
    config.total_episodes = Some(24);
    config.num_sample_generations = 0;
    config.learning_rate = 1e-3;
    config
}

/// The lines of metrics of such a run.
fn run(change: impl FnOnce(&mut PpoConfig)) -> Vec<Map<String, Value>> {
    let dir = tempfile::tempdir().unwrap();
    let mut config = run_config(dir.path());
    change(&mut config);
    ppo(&config, Console::Silent).unwrap();
    json_lines(&std::fs::read_to_string(config.run.output_dir.join("metrics.jsonl")).unwrap())
}

fn column(lines: &[Map<String, Value>], name: &str) -> Vec<f64> {
    lines.iter().map(|line| line[name].as_f64().unwrap_or_else(|| panic!("no {name}"))).collect()
}

#[test]
fn while_the_value_model_warms_up_the_policy_stays_bit_for_bit_and_then_learns() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = run_config(dir.path());
    config.value.value_warmup_updates = 2;
    let mut trainer = PpoTrainer::from_config(&config).unwrap();
    let start = weights(trainer.learner.policy.params());
    for update in 0..3 {
        let value = weights(trainer.learner.value.params());
        let line = trainer.update().unwrap();
        assert_ne!(weights(trainer.learner.value.params()), value, "update {update}");
        let frozen = update < 2;
        assert_eq!(weights(trainer.learner.policy.params()) == start, frozen, "update {update}");
        // The policy's schedule starts with its first update: of one update, at its peak.
        assert_eq!(line.get("lr"), Some(if frozen { 0.0 } else { 1e-3 }));
        assert!((line.get("val/lr").unwrap() - 1e-3 * f64::from(3 - update) / 3.0).abs() < 1e-15);
        for name in ["policy/approxkl_avg", "policy/grad_norm", "loss/policy_avg", "val/ratio"] {
            assert_eq!(line.get(name).is_none(), frozen, "update {update}: {name}");
        }
        assert!(line.get("val/grad_norm").unwrap() > 0.0);
    }
}

#[test]
fn the_weight_of_the_kl_follows_its_target_or_its_schedule() {
    let lines = run(|c| {
        c.kl.adap_kl_ctrl = true;
        c.kl.target = 0.01;
        c.kl.horizon = 40.0;
    });
    let (kl, coef) = (column(&lines, "objective/kl"), column(&lines, "objective/kl_coef"));
    assert_eq!(coef[0], 0.05);
    for i in 0..2 {
        // 8 responses of a horizon of 40.
        let expected = coef[i] * (1.0 + (kl[i] / 0.01 - 1.0).clamp(-0.2, 0.2) * 8.0 / 40.0);
        assert!((coef[i + 1] - expected).abs() < 1e-12, "{coef:?} by {kl:?}");
    }
    assert_ne!(coef[1], coef[0]);
    let lines = run(|c| c.kl.kl_coef_end = Some(0.25));
    for (found, expected) in column(&lines, "objective/kl_coef").into_iter().zip([0.05, 0.15, 0.25]) {
        assert!((found - expected).abs() < 1e-15, "{found} is not {expected}");
    }
    let penalty = column(&lines, "objective/non_score_reward");
    for (i, (penalty, kl)) in penalty.iter().zip(column(&lines, "objective/kl")).enumerate() {
        assert!((penalty + [0.05, 0.15, 0.25][i] * kl).abs() < 1e-9);
    }
}

// The KL over the vocabulary, and the gradient of the entropy.

#[test]
fn the_kl_over_the_vocabulary_is_that_of_the_softmaxes_in_f64() {
    for family in ["llama", "neox"] {
        let (policy, reference) = (policy(&format!("{family}_policy")), policy(&format!("{family}_ref")));
        let sequences = [vec![5i64, 9, 2, 7, 1, 3], vec![4, 4, 8], vec![6, 11]];
        let spans = [2..6, 1..3, 1..1];
        for temperature in [0.7, 1.0] {
            let found = policy.kl_to(&reference, Batch::new(&sequences, &spans), temperature).unwrap();
            let logprobs = |model: &CausalLm| {
                let logits = tch::no_grad(|| model.logits(&sequences)).unwrap();
                // Each token is predicted at the position before it.
                let rows = logits.iter().zip(&spans).map(|(x, s)| x.narrow(0, s.start as i64 - 1, s.len() as i64));
                let logits = Tensor::cat(&rows.collect::<Vec<_>>(), 0).to_kind(Kind::Double);
                (logits / temperature).log_softmax(-1, Kind::Double)
            };
            let (p, q) = (logprobs(&policy), logprobs(&reference));
            let expected = (p.exp() * (&p - q)).sum_dim_intlist([-1i64].as_slice(), false, Kind::Double);
            assert_eq!(found.size(), [6]);
            assert!(expected.min().double_value(&[]) > 1e-5, "the two models differ");
            assert_close(family, &found.to_kind(Kind::Double), &expected, 1e-5);
            let itself = policy.kl_to(&policy, Batch::new(&sequences, &spans), temperature).unwrap();
            assert_eq!(itself.abs().max().double_value(&[]), 0.0);
        }
    }
    let larger = CausalLm::from_pretrained(&golden().join("models/gpt_neox"), ModelOptions::default()).unwrap();
    let error = policy("llama_policy").kl_to(&larger, Batch::new(&[[1i64, 2]], std::slice::from_ref(&(1..2))), 1.0);
    let message = "KL over the vocabulary: vocabulary sizes differ: 320 and 352";
    assert_eq!(error.unwrap_err().to_string(), message);
}

#[test]
fn learning_from_the_kl_over_the_vocabulary_adds_the_gradients_of_the_softmaxes_and_of_differences() {
    let ids = [vec![5i64, 9, 2, 7, 1, 3], vec![4, 4, 8], vec![6, 11]];
    let spans = [2..6, 1..3, 1..1];
    let slopes = Tensor::from_slice(&[0.5f32, -1.0, 2.0, 0.25, 1.0, 1.5]);
    for name in ["gpt2", "llama_tied", "gemma2"] {
        let load = || {
            let dir = golden().join("models").join(name);
            let mut model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
            model.set_trainable(true);
            model
        };
        let shape = load().config().clone();
        let reference = CausalLm::from_config(shape, 5, ModelOptions::default()).unwrap();
        let (found, expected) = (load(), load());
        // The rows in another order than they are learnt in, and one more.
        let [a, b, c] = [0, 1, 2].map(|row: usize| (vec![ids[row].clone()], vec![spans[row].clone()]));
        let mut states = reference.distributions(Batch::new(&b.0, &b.1)).unwrap();
        for (ids, spans) in [&b, &c, &a] {
            states.extend(reference.distributions(Batch::new(ids, spans)).unwrap());
        }
        let options = LogprobOptions { kl_to: Some((&states, &[3, 0, 2])), ..0.7.into() };
        let learnt = found
            .logprobs_backward(Batch::new(&ids, &spans), options, |tokens, now| {
                let here = slopes.narrow(0, tokens.start, tokens.end - tokens.start);
                (now.kl.as_ref().unwrap() * here).sum(Kind::Float)
            })
            .unwrap();
        let kl = found.kl_to(&reference, Batch::new(&ids, &spans), 0.7).unwrap();
        assert_close(name, &learnt.kl.unwrap(), &kl, 1e-5);

        let logprobs = |model: &CausalLm| {
            let logits = model.logits(&ids).unwrap();
            let rows = logits.iter().zip(&spans).map(|(x, s)| x.narrow(0, s.start as i64 - 1, s.len() as i64));
            (Tensor::cat(&rows.collect::<Vec<_>>(), 0) / 0.7).log_softmax(-1, Kind::Float)
        };
        let (p, q) = (logprobs(&expected), tch::no_grad(|| logprobs(&reference)));
        let kl = (p.exp() * (&p - q)).sum_dim_intlist([-1i64].as_slice(), false, Kind::Float);
        (kl * &slopes).sum(Kind::Float).backward();
        let mut square = 0.0;
        for (found, expected) in found.params().iter().zip(expected.params()) {
            let gradient = expected.tensor.grad();
            square += gradient.square().sum(Kind::Double).double_value(&[]);
            let tolerance = 2e-5 * gradient.abs().max().double_value(&[]).max(1.0);
            assert_close(&format!("{name}: {}", found.name), &found.tensor.grad(), &gradient, tolerance);
        }

        // A step along the gradient changes the sum by the gradient's square.
        let moved = |step: f64| {
            let move_by = |step: f64| {
                tch::no_grad(|| {
                    for param in found.params() {
                        let _ = param.tensor.shallow_clone().g_add_(&(param.tensor.grad() * step));
                    }
                });
            };
            move_by(step);
            let kl = found.kl_to(&reference, Batch::new(&ids, &spans), 0.7).unwrap().to_kind(Kind::Double);
            move_by(-step);
            (kl * slopes.to_kind(Kind::Double)).sum(Kind::Double).double_value(&[])
        };
        let step = 1e-3 / square.sqrt();
        let slope = (moved(step) - moved(-step)) / (2.0 * step);
        assert!((slope / square - 1.0).abs() < 2e-2, "{name}: {slope} is not {square}");
    }
    let reference = policy("llama_ref");
    let states = reference.distributions(Batch::new(&ids[..1], &spans[..1])).unwrap();
    let mut learner = policy("llama_policy");
    learner.set_trainable(true);
    for rows in [&[][..], &[1], &[0, 0]] {
        let options = LogprobOptions { kl_to: Some((&states, rows)), ..1.0.into() };
        let error =
            learner.logprobs_backward(Batch::new(&ids[..1], &spans[..1]), options, |_, _| panic!("nothing is learnt"));
        assert!(error.unwrap_err().to_string().contains("one reference distribution per token"), "{rows:?}");
    }
}

#[test]
fn as_an_estimator_the_kl_over_the_vocabulary_makes_the_rewards() {
    let update = update(|c| {
        c.kl.kl_estimator = KlEstimator::Full;
        c.kl.kl_coef = 0.3;
    });
    let (e, targets) = (&update.experience, update.targets());
    let sequences: Vec<_> = (0..e.rows()).map(|row| e.sequence(row)).collect();
    let spans: Vec<_> = (0..e.rows()).map(|row| e.token_span(row)).collect();
    let kl = update
        .learner
        .policy
        .kl_to(&update.reference, Batch::new(&sequences, &spans), update.config.temperature)
        .unwrap();
    assert_close("KL", &targets.kl.masked_select(&e.masks.response), &kl, 1e-6);
    let outside = targets.kl.masked_fill(&e.masks.response, 0.0);
    assert_eq!(outside.abs().max().double_value(&[]), 0.0);
    let sum = |x: &Tensor| x.sum(Kind::Double).double_value(&[]);
    assert!((sum(&targets.rewards) - sum(&e.scores) + 0.3 * sum(&kl)).abs() < 1e-4);
    // Every estimator is one of the same number.
    let k3 = rlhf::rl::math::kl(&e.logprobs, e.ref_logprobs.as_ref().unwrap(), &e.masks.response, KlEstimator::K3);
    assert!((sum(&k3) / sum(&kl)).ln().abs() < 1.0, "{} and {}", sum(&k3), sum(&kl));
}

#[test]
fn learning_from_log_probabilities_and_entropies_adds_the_gradients_of_autograd() {
    let ids = [vec![5i64, 9, 2, 7, 1, 3], vec![4, 4, 8], vec![6, 11]];
    let spans = [2..6, 1..3, 1..1];
    let weights = |seed: f64| Tensor::from_slice(&[0.5f32, -1.0, 2.0, 0.25, -0.75, 1.5]) * seed;
    let (logprob_weights, entropy_weights) = (weights(1.0), weights(-0.7));
    for name in ["gpt2", "gpt_neox", "llama_tied", "gemma2"] {
        let load = || {
            let dir = golden().join("models").join(name);
            let mut model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
            model.set_trainable(true);
            model
        };
        let (found, expected) = (load(), load());
        let options = LogprobOptions { entropy: true, ..0.7.into() };
        let learnt = found
            .logprobs_backward(Batch::new(&ids, &spans), options, |tokens, now| {
                let here = |x: &Tensor| x.narrow(0, tokens.start, tokens.end - tokens.start);
                let entropy = now.entropy.as_ref().unwrap();
                (&now.logprobs * here(&logprob_weights) + entropy * here(&entropy_weights)).sum(Kind::Float)
            })
            .unwrap();
        assert!(!learnt.logprobs.requires_grad() && !learnt.entropy.unwrap().requires_grad());
        let now = expected.token_logprobs(&ids, &spans, 0.7, true).unwrap();
        (now.logprobs * &logprob_weights + now.entropy.unwrap() * &entropy_weights).sum(Kind::Float).backward();
        for (found, expected) in found.params().iter().zip(expected.params()) {
            let gradient = expected.tensor.grad();
            let tolerance = 2e-5 * gradient.abs().max().double_value(&[]).max(1.0);
            assert_close(&format!("{name}: {}", found.name), &found.tensor.grad(), &gradient, tolerance);
        }
    }
}

// Command lines.

/// The command lines that TRL's documentation gave for its PPO scripts (0.9's PPOv2 and 1.x), from the script's name on.
const TRLS_COMMAND_LINES: [&str; 4] = [
    "--learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 --output_dir models/minimal/ppo \
     --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 10000 \
     --model_name_or_path EleutherAI/pythia-1b-deduped --non_eos_penalty",
    "--output_dir models/minimal/ppo_tldr --learning_rate 3e-6 --per_device_train_batch_size 16 \
     --gradient_accumulation_steps 4 --total_episodes 1000000 --model_name_or_path EleutherAI/pythia-1b-deduped \
     --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
     --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr --local_rollout_forward_batch_size 16 \
     --non_eos_penalty --stop_token eos",
    "--output_dir models/minimal/ppo_tldr_6.9b --learning_rate 3e-6 --per_device_train_batch_size 1 \
     --gradient_accumulation_steps 64 --total_episodes 100000 --model_name_or_path EleutherAI/pythia-6.9b-deduped \
     --sft_model_path cleanrl/EleutherAI_pythia-6.9b-deduped__sft__tldr \
     --reward_model_path cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr --local_rollout_forward_batch_size 2 \
     --non_eos_penalty --stop_token eos",
    "--num_ppo_epochs 1 --num_mini_batches 1 --per_device_train_batch_size 1 --gradient_accumulation_steps 16 \
     --total_episodes 10000 --local_rollout_forward_batch_size 1",
];

#[test]
fn the_command_lines_of_trls_documentation_run_on_stand_ins_of_their_models() {
    let scratch = Scratch::new();
    for folder in ["EleutherAI", "cleanrl", "models"] {
        std::fs::create_dir(scratch.path(folder)).unwrap();
    }
    for size in ["1b", "6.9b"] {
        scratch.copy(&format!("EleutherAI/pythia-{size}-deduped"), "gpt_neox");
        scratch.copy(&format!("cleanrl/EleutherAI_pythia-{size}-deduped__sft__tldr"), "gpt_neox");
        scratch.copy(&format!("cleanrl/EleutherAI_pythia-{size}-deduped__reward__tldr"), "gpt_neox_cls");
    }
    for line in TRLS_COMMAND_LINES {
        // What the line leaves to the script: the models, the dataset, a folder. And the size of the run.
        let mut flags = "--dataset_name prompts.jsonl --total_episodes 64 --response_length 8".to_string();
        if !line.contains("--sft_model_path") {
            flags += " --sft_model_path policy --reward_model_path reward";
        }
        let out = match line.split_whitespace().skip_while(|word| *word != "--output_dir").nth(1) {
            Some(out) => out,
            None => {
                flags += " --output_dir out";
                "out"
            }
        };
        let ran = scratch.run(&format!("ppo {line} {flags}"));
        assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
        assert_eq!(scratch.metrics(out).len(), if line.contains("_steps 16 ") { 4 } else { 1 }, "{line}");
        assert!(scratch.path(out).join("value_model/model.safetensors").is_file(), "{line}");
    }
}

#[test]
fn a_penalty_for_no_eos_replaces_scores_by_the_given_value() {
    let scratch = Scratch::new();
    // No response of one token is truncated, so none stops but by chance.
    let line = "ppo --sft_model_path policy --reward_model_path reward --dataset_name prompts.jsonl \
                --response_length 1 --per_device_train_batch_size 4 --total_episodes 4 --stop_token_id 351";
    let scores = |words: &str, out: &str| {
        scratch.succeeds(&format!("{line} {words} --output_dir {out}"));
        let line = &scratch.metrics(out)[0];
        assert_eq!(line["val/num_eos_tokens"], 0, "of four tokens none is the last of the vocabulary");
        (line["objective/scores"].as_f64().unwrap(), line["objective/scores_std"].as_f64().unwrap())
    };
    let usual = scores("", "usual");
    assert!(usual.1 > 0.0);
    assert_eq!(scores("--non_eos_penalty", "replaced"), (-1.0, 0.0));
    assert_eq!(scores("--non_eos_penalty --penalty_reward_value -2.5", "lower"), (-2.5, 0.0));
    let subtracted = scores("--missing_eos_penalty 1.5", "subtracted");
    assert!((subtracted.0 - usual.0 + 1.5).abs() < 1e-5 && (subtracted.1 - usual.1).abs() < 1e-5);
}

// Scores as they are shown, and warnings.

#[test]
fn running_moments_and_their_clip_move_no_score_that_nothing_learns_from() {
    let scratch = Scratch::new();
    let line = "ppo --sft_model_path policy --reward_model_path reward --dataset_name prompts.jsonl --response_length 4 \
                --per_device_train_batch_size 3 --total_episodes 12 --learning_rate 0 --eval_split_size 2 --eval_steps 1 \
                --num_sample_generations 4 --print_answers --stop_token_id 351 --missing_eos_penalty 1.5";
    scratch.succeeds(&format!("{line} --output_dir plain"));
    scratch.succeeds(&format!("{line} --output_dir scaled --use_score_scaling --use_score_norm --score_clip 0.5"));
    let (plain, scaled) = (scratch.metrics("plain"), scratch.metrics("scaled"));
    // The first line is that of the evaluation before the first update.
    assert_eq!((plain.len(), scaled.len(), &scaled[0]["eval/score"]), (5, 5, &plain[0]["eval/score"]));
    for (plain, scaled) in plain.iter().zip(&scaled).skip(1) {
        assert_eq!(scaled["eval/score"], plain["eval/score"]);
        assert_eq!(scaled["objective/raw_scores"], plain["objective/scores"]);
        assert_ne!(scaled["objective/scores"], plain["objective/scores"]);
        assert!(plain.get("objective/raw_scores").is_none());
    }
    assert_eq!(plain[0]["eval/score"], plain[4]["eval/score"], "the policy stays");
    for file in ["update-000000", "update-000004", "eval-000002", "answers-000001", "answers-000003"] {
        let [plain, scaled] = ["plain", "scaled"].map(|out| scratch.read(&format!("{out}/samples/{file}.jsonl")));
        assert_eq!(scaled, plain, "{file}");
        // Each table has the same score: the reward's, less the penalty, as no response stops.
        for row in json_lines(&plain) {
            let said = row["components"].as_object().unwrap().values().next().unwrap().as_f64().unwrap();
            let score = row["score"].as_f64().unwrap();
            assert!((score - said + 1.5).abs() < 1e-5, "{file}: {score} is not {said} - 1.5");
        }
    }
}

#[test]
fn a_clip_of_the_whole_score_counts_what_tokens_are_scored() {
    let mut update = update(|c| c.clip_reward_value = Some(5.0));
    update.config.kl.kl_coef = 0.0;
    // 0.5, 1.5 or -2 for each token: wholes on both sides of the bounds and within them.
    let row_scores = Tensor::from_slice(&[0.5f32, 1.5, -2.0, 0.5, 1.5, -2.0, 0.5, 1.5]).unsqueeze(1);
    let e = &mut update.experience;
    e.token_scores = Some(keep(&(e.masks.response.to_kind(Kind::Float) * row_scores), &e.masks.response));
    let whole = e.total_scores();
    assert!(whole.abs().max().double_value(&[]) > 5.0 && whole.abs().min().double_value(&[]) < 5.0, "{whole}");
    let targets = targets(&update.experience, 0.0, &update.config.shaping());
    let rewards = targets.rewards.sum_dim_intlist(1i64, false, Kind::Float);
    assert_close("wholes", &rewards, &whole.clamp(-5.0, 5.0), 1e-5);
    // Scores of tokens stay at their tokens: only where the whole score lands is there anything else.
    let moved = (&targets.rewards - update.experience.token_scores.as_ref().unwrap()).abs().gt(1e-6);
    assert!(moved.sum_dim_intlist(1i64, false, Kind::Int64).max().int64_value(&[]) <= 1);
}

#[test]
fn policy_epochs_count_whole_epochs_where_responses_were_dropped() {
    let mut update = update(|c| {
        (c.preset, c.num_mini_batches) = (Preset::TrlLegacy, 1);
        c.per_device_train_batch_size = Some(8);
        (c.legacy.batch_size, c.legacy.mini_batch_size, c.gradient_accumulation_steps) = (Some(16), Some(2), 4);
        (c.legacy.early_stopping, c.loss.target_kl) = (true, Some(100.0));
    });
    update.plan.epoch.part_size = 2;
    // Eight of sixteen are left: one step of four parts an epoch, where sixteen would make eight.
    let targets = update.targets();
    let steps = update.learn_orders(&targets, &vec![(0..8).collect(); 3]);
    assert_eq!(steps.len(), 12);
    assert_eq!(update.metrics(&steps).get("policy/epochs"), Some(3.0));
    // Two more make half a step, of one part.
    let steps = update.learn_orders(&targets, &vec![vec![0, 1]; 3]);
    let mut few = rlhf::metrics::Metrics::default();
    update.experience.responses.truncate(2);
    update.learner.metrics(&mut few, &update.experience, &targets, &steps, &update.plan.epoch);
    assert_eq!((steps.len(), few.get("policy/epochs")), (3, Some(3.0)));
}

#[test]
fn a_run_that_collapses_warns_once_for_each_sign_on_standard_error() {
    let scratch = Scratch::new();
    let line = "ppo --sft_model_path policy --dataset_name prompts.jsonl --output_dir out --reward length:target=10 \
                --response_length 16 --stop_token eos --per_device_train_batch_size 16 --num_sample_generations 0 \
                --kl_coef 0 --num_ppo_epochs 8";
    let ran = scratch.run(&format!("{line} --learning_rate 0.1 --total_episodes 320"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let signs = [
        ("the KL to the reference is ", " nats per token, 0.00 in the first update"),
        ("none of the last 1", " responses ended by a stop token or string: all were cut at response_length"),
        ("the policy's entropy is 0.0", " nats per token"),
    ];
    for (begins, holds) in signs {
        let found: Vec<&str> = ran.stderr.lines().filter(|line| line.contains(begins)).collect();
        assert!(found.len() == 1 && found[0].contains(holds), "{begins}: {}", ran.stderr);
        assert!(found[0].starts_with("warning: update "), "{}", found[0]);
    }
    // A run at a usual rate has no such word; its responses are too few for that of stopping.
    let ran = scratch.run(&format!("{line} --learning_rate 1e-4 --total_episodes 80 --overwrite_output_dir"));
    assert_eq!((ran.code, ran.stderr.matches("warning: update").count()), (0, 0), "{}", ran.stderr);
}
