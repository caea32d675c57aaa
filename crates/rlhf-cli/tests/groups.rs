//! Runs without a critic: groups of responses to one prompt, their estimators, and what such a run may not depend on.

use crate::support::{assert_close, golden, init};
use rlhf::data::Dataset;
use rlhf::generate::{FinishReason, Response};
use rlhf::model::{Batch, CausalLm, ModelOptions, Param, SequenceClassifier, ValueModel};
use rlhf::reward::{FnReward, Normalize, RewardInput, Rewards, ScoreTransform};
use rlhf::rl::advantage::{Advantage, AdvantageEstimator, Aggregation, Baseline, ScaleRewards, ScoreBaseline};
use rlhf::rl::experience::Experience;
use rlhf::rl::learner::Learner;
use rlhf::rl::math::{ImportanceLevel, KlEstimator};
use rlhf::rl::rollout::experience;
use rlhf::rl::shaping::targets;
use rlhf::run::Console;
use rlhf::settings::{LossType, PpoConfig, Preset, WhitenAdvantages};
use rlhf::tokenizer::Tokenizer;
use rlhf::train::ppo::{PpoParts, PpoTrainer, ppo};
use rlhf::weights::Checkpoint;
use serde_json::json;
use std::path::Path;
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 512;

const PROMPTS: [&str; 6] = ["The movie", "A film", "the capital of France", "do", "human", "a sing"];

/// Two updates of four groups of four responses, in two optimizer steps each.
fn config(dir: &Path) -> PpoConfig {
    let prompts = dir.join("prompts.jsonl");
    std::fs::write(&prompts, PROMPTS.map(|prompt| format!("{}\n", json!({"prompt": prompt}))).concat()).unwrap();
    let mut config = PpoConfig::with_preset(Preset::Grpo, init("llama_policy"), "", prompts, dir.join("out"));
    config.reward_model_path = None;
    config.rewards.reward = vec!["length:target=5".into()];
    config.model_name_or_path = Some(golden().join("models/gpt_neox"));
    (config.stop_token, config.stop_token_id) = (None, Some(192));
    (config.response_length, config.advantage.num_generations) = (8, 4);
    (config.per_device_train_batch_size, config.generation.steps_per_generation) = (Some(8), Some(2));
    config.generation.max_steps = Some(4);
    (config.num_ppo_epochs, config.num_sample_generations) = (1, 0);
    // Large steps, and an epsilon that leaves round-off as small as it is.
    (config.learning_rate, config.optimizer.adam_epsilon) = (1e-3, 1e-5);
    config
}

/// Each reward is compared by itself.
fn one_by_one(config: &mut PpoConfig) {
    config.advantage.multi_objective_aggregation = Aggregation::NormalizeThenSum;
}

fn weights(dir: &Path) -> Vec<(String, Tensor)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let read = |name: &str| (name.to_string(), checkpoint.read(name, Device::Cpu, Kind::Float).unwrap());
    checkpoint.names().map(read).collect()
}

/// The policy that a run leaves.
fn trained(change: impl FnOnce(&mut PpoConfig)) -> Vec<(String, Tensor)> {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    change(&mut config);
    ppo(&config, Console::Silent).unwrap();
    weights(&config.run.output_dir)
}

#[track_caller]
fn assert_weights(found: &[(String, Tensor)], expected: &[(String, Tensor)], case: &str) {
    for ((name, found), (_, expected)) in found.iter().zip(expected) {
        let gap = (found - expected).abs().max().double_value(&[]);
        // A tenth of an optimizer step: sums over whole responses have the largest gradients, and AdamW turns their rounding into steps.
        assert!(gap <= 1e-4, "{case}: {name} differs by {gap:e}");
    }
}

#[test]
fn the_size_of_a_micro_batch_changes_no_weight_with_any_loss() {
    use ImportanceLevel::{Sequence, SequenceProduct, Token};
    let losses = [
        (LossType::Bnpo, Token),
        (LossType::Grpo, Sequence),
        (LossType::DrGrpo, Token),
        (LossType::Dapo, Token),
        (LossType::Cispo, Token),
        (LossType::Sapo, Token),
        (LossType::Luspo, Sequence),
        (LossType::Vespo, Token),
        (LossType::Grpo, SequenceProduct),
    ];
    for (loss_type, level) in losses {
        let run = |rows, accumulated| {
            trained(|c| {
                (c.loss.loss_type, c.loss.importance_sampling_level) = (loss_type, level);
                (c.kl.kl_coef, c.num_ppo_epochs) = (0.1, 2);
                c.loss.entropy_coef = 0.01;
                (c.per_device_train_batch_size, c.gradient_accumulation_steps) = (Some(rows), accumulated);
                c.generation.steps_per_generation = Some(16 / rows);
                c.generation.max_steps = Some(8);
                // Where all ratios are clipped, gradients are so small that their rounding would be steps.
                c.optimizer.adam_epsilon = 1e-3;
            })
        };
        assert_weights(&run(2, 4), &run(8, 1), &format!("{loss_type:?}, {level:?}"));
    }
}

/// An experience of three groups of two responses, whose scores are 1 to 6.
fn grouped_experience(learner: &Learner, config: &PpoConfig, order: &[usize]) -> Experience {
    let prompts = [vec![5, 6, 7], vec![5, 6, 7], vec![9], vec![9], vec![30, 31], vec![30, 31]];
    let response = |row: &usize| Response {
        tokens: (0..2 + row % 4).map(|at| 40 + (7 * row + at) as i64).collect(),
        logprobs: vec![],
        finish: FinishReason::Length,
        sets: None,
        inserted: Vec::new(),
    };
    let responses: Vec<Response> = order.iter().map(response).collect();
    let scores: Vec<f32> = order.iter().map(|&row| [1.0, 4.0, 2.0, 2.5, 6.0, -3.0][row]).collect();
    let prompts: Vec<Vec<i64>> = order.iter().map(|&row| prompts[row].clone()).collect();
    let mut settings = config.rollout(&learner.policy);
    settings.recompute_logprobs = true;
    let models = learner.rollout_models(None);
    let mut e = experience(models, &prompts, &responses, Tensor::from_slice(&scores), &settings).unwrap();
    e.groups = order.iter().map(|row| row / 2).collect();
    e.baselines = Some(Tensor::from_slice(&scores) - 1.0);
    e
}

fn learner(config: &PpoConfig) -> Learner {
    let policy = CausalLm::from_pretrained(&init("llama_policy"), ModelOptions::default()).unwrap();
    Learner::new(policy, ValueModel::None, config.learner())
}

#[test]
fn the_order_of_groups_and_the_rows_of_other_prompts_change_no_advantage() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let learner = learner(&config);
    let group = |baseline, scale| Advantage::Group { baseline, scale, normalize: false, each_reward: false };
    let returns = |baseline| Advantage::Returns { gamma: 0.9, baseline };
    let estimators = [
        group(Baseline::Mean, ScaleRewards::Group),
        group(Baseline::Mean, ScaleRewards::None),
        group(Baseline::LeaveOneOut, ScaleRewards::None),
        returns(ScoreBaseline::Zero),
        returns(ScoreBaseline::GroupMean),
        returns(ScoreBaseline::Greedy),
    ];
    for estimator in estimators {
        let advantages = |order: &[usize]| {
            let e = grouped_experience(&learner, &config, order);
            let mut shaping = config.shaping();
            shaping.advantage = estimator;
            targets(&e, 0.0, &shaping).advantages
        };
        let all = advantages(&[0, 1, 2, 3, 4, 5]);
        let mixed = [5, 2, 1, 0, 3, 4];
        let index: Vec<i64> = mixed.iter().map(|&row| row as i64).collect();
        assert_close("mixed", &advantages(&mixed), &all.index_select(0, &Tensor::from_slice(&index)), 1e-6);
        // Without the second group.
        let others = all.index_select(0, &Tensor::from_slice(&[0i64, 1, 4, 5]));
        assert_close("alone", &advantages(&[0, 1, 4, 5]), &others, 1e-6);
        assert!(all.abs().max().double_value(&[]) > 0.5, "{estimator:?}");
    }
}

#[test]
fn a_run_without_a_critic_loads_trains_and_saves_none_and_without_a_kl_no_reference() {
    let dir = tempfile::tempdir().unwrap();
    for estimator in [
        AdvantageEstimator::Rloo,
        AdvantageEstimator::Grpo,
        AdvantageEstimator::DrGrpo,
        AdvantageEstimator::Reinforce,
        AdvantageEstimator::ReinforceBaseline,
        AdvantageEstimator::Remax,
    ] {
        let mut config = config(dir.path());
        config.advantage.advantage_estimator = estimator;
        config.run.output_dir = dir.path().join(estimator.name());
        config.run.checkpoints.save_steps = Some(1.into());
        let mut trainer = PpoTrainer::from_config(&config).unwrap();
        assert!(trainer.reference.is_none() && matches!(trainer.learner.value, ValueModel::None), "{estimator:?}");
        trainer.train().unwrap();
        let out = &config.run.output_dir;
        for folder in [out.clone(), out.join("checkpoint-1")] {
            assert!(!folder.join("value_model").exists(), "{estimator:?}");
        }
        let line = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let first: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
        for name in
            ["reward", "reward_std", "frac_reward_zero_std", "rewards/length/mean", "loss", "grad_norm", "entropy"]
        {
            assert!(first[name].is_number(), "{estimator:?}: {name}");
        }
        for name in ["kl", "objective/kl", "loss/value_avg", "val/explained_variance", "val/grad_norm"] {
            assert!(first[name].is_null(), "{estimator:?}: {name}");
        }
        config.kl.kl_coef = 0.1;
        assert!(PpoTrainer::from_config(&config).unwrap().reference.is_some());
    }
}

/// The parts of [`config`] with `rewards`.
fn parts(config: &PpoConfig, rewards: Rewards) -> PpoParts {
    let tokenizer = Tokenizer::from_pretrained(&golden().join("models/gpt_neox")).unwrap();
    let prompts =
        Dataset::read(&config.data.dataset_name[0], "train").unwrap().prompts(&tokenizer, VOCAB, 100).unwrap();
    PpoParts { learner: learner(config), reference: None, rewards, tokenizer, prompts, eval_prompts: Vec::new() }
}

#[test]
fn a_reward_that_is_constant_is_reported_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.advantage.num_generations = 2;
    config.per_device_train_batch_size = Some(32);
    config.generation.steps_per_generation = Some(2);
    config.generation.max_steps = Some(12);
    config.rewards = PpoConfig::without_reward("", "", "").rewards;
    let constant =
        Rewards::new().with("constant", FnReward::new(|batch: &[RewardInput<'_>]| Ok(vec![0.5; batch.len()])));
    let mut trainer = PpoTrainer::new(&config, parts(&config, constant)).unwrap();
    let mut warnings = Vec::new();
    for _ in 0..3 {
        let metrics = trainer.update().unwrap();
        assert_eq!((metrics.get("frac_reward_zero_std"), metrics.get("reward_std")), (Some(1.0), Some(0.0)));
        warnings
            .extend(trainer.warnings().iter().filter(|w| w.message.contains("same score")).map(|w| w.message.clone()));
    }
    // 32 groups in each update, and a warning after 64.
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].starts_with("update 2: all responses of each of the last 64 prompts have the same score, 0.5"));
}

#[test]
fn groups_of_equal_scores_are_replaced_up_to_a_bound() {
    let dir = tempfile::tempdir().unwrap();
    let run = |most, reward: fn(&RewardInput<'_>) -> f64| {
        let mut config = config(dir.path());
        config.groups.dynamic_sampling = true;
        config.groups.max_num_gen_batches = most;
        config.rewards = PpoConfig::without_reward("", "", "").rewards;
        let reward = move |batch: &[RewardInput<'_>]| Ok(batch.iter().map(reward).collect());
        let mut trainer =
            PpoTrainer::new(&config, parts(&config, Rewards::new().with("r", FnReward::new::<f64>(reward)))).unwrap();
        let m = trainer.update().unwrap();
        ["sampling/groups", "sampling/replaced_groups", "frac_reward_zero_std", "reward_std"]
            .map(|name| m.get(name).unwrap())
    };
    // Prompts of one word teach nothing; the others always do.
    let [groups, replaced, equal, _] =
        run(10, |input| if input.prompt.contains(' ') { input.response_ids.iter().sum::<i64>() as f64 } else { 1.0 });
    assert!(groups > 4.0 && replaced > 0.0 && equal == 0.0, "{groups} {replaced} {equal}");
    // Nothing teaches: three batches of four groups, and the last ones are trained on.
    assert_eq!(run(3, |_| 1.0), [12.0, 12.0, 1.0, 0.0]);
}

#[test]
fn the_greedy_baseline_of_remax_has_the_scale_of_the_scores() {
    let dir = tempfile::tempdir().unwrap();
    let score = |input: &RewardInput<'_>| 50.0 + if input.response_ids.len() > 8 { 1.0 } else { 0.0 };
    type Change = fn(&mut PpoConfig);
    let cases: [(&str, Normalize, Change); 6] = [
        ("as they are", Normalize::None, |_| ()),
        ("normalized", Normalize::MeanStd, |_| ()),
        ("scaled", Normalize::None, |c| {
            (c.score_scaling.use_score_scaling, c.score_scaling.use_score_norm) = (true, true);
        }),
        ("clipped as scores", Normalize::None, |c| c.score_scaling.score_clip = Some(3.0)),
        ("clipped as rewards", Normalize::None, |c| c.reward_clip_range = vec![-1.0, 2.0]),
        ("penalized", Normalize::None, |c| c.groups.overlong_buffer_len = Some(4)),
    ];
    for (name, normalize, change) in cases {
        let mut config = config(dir.path());
        config.advantage.advantage_estimator = AdvantageEstimator::Remax;
        // All responses have the same length, and so the same score as the greedy one.
        (config.stop_token_id, config.rewards) = (None, PpoConfig::without_reward("", "", "").rewards);
        change(&mut config);
        let reward = FnReward::new(move |batch: &[RewardInput<'_>]| Ok(batch.iter().map(score).collect()));
        let rewards =
            Rewards::new().with_transform("r", reward, ScoreTransform { normalize, ..ScoreTransform::default() });
        let mut trainer = PpoTrainer::new(&config, parts(&config, rewards)).unwrap();
        for _ in 0..2 {
            let m = trainer.update().unwrap();
            assert_eq!((m.get("loss"), m.get("grad_norm")), (Some(0.0), Some(0.0)), "{name}");
        }
    }
}

#[test]
fn a_response_that_no_reward_scored_changes_no_weight_with_returns() {
    let dir = tempfile::tempdir().unwrap();
    for estimator in [AdvantageEstimator::Reinforce, AdvantageEstimator::ReinforceBaseline, AdvantageEstimator::Remax] {
        let mut config = config(dir.path());
        config.advantage.advantage_estimator = estimator;
        config.rewards = PpoConfig::without_reward("", "", "").rewards;
        let none = FnReward::new(|batch: &[RewardInput<'_>]| Ok(vec![None::<f64>; batch.len()]));
        let mut trainer = PpoTrainer::new(&config, parts(&config, Rewards::new().with("none", none))).unwrap();
        let m = trainer.update().unwrap();
        assert_eq!((m.get("loss"), m.get("grad_norm")), (Some(0.0), Some(0.0)), "{estimator:?}");
    }
}

#[test]
fn long_responses_are_penalized_and_groups_outside_the_range_of_scores_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let run = |change: fn(&mut PpoConfig)| {
        let mut config = config(dir.path());
        (config.stop_token_id, config.rewards) = (None, PpoConfig::without_reward("", "", "").rewards);
        change(&mut config);
        let constant = FnReward::new(|batch: &[RewardInput<'_>]| Ok(vec![0.75; batch.len()]));
        let mut trainer = PpoTrainer::new(&config, parts(&config, Rewards::new().with("r", constant))).unwrap();
        let m = trainer.update().unwrap();
        ["reward", "rewards/r/mean", "sampling/groups", "sampling/replaced_groups"].map(|name| m.get(name))
    };
    // Each response has all 8 tokens.
    let penalized = run(|c| (c.groups.overlong_buffer_len, c.groups.overlong_penalty_factor) = (Some(4), 0.5));
    assert_eq!(penalized, [Some(0.25), Some(0.75), None, None]);
    let replaced = run(|c| {
        (c.groups.dynamic_filtering_reward_range, c.groups.max_num_gen_batches) = (vec![0.0, 0.75], 2);
    });
    assert_eq!(replaced, [Some(0.75), Some(0.75), Some(8.0), Some(8.0)]);
    let kept = run(|c| c.groups.dynamic_filtering_reward_range = vec![0.5, 1.0]);
    assert_eq!(kept, [Some(0.75), Some(0.75), Some(4.0), Some(0.0)]);
}

#[test]
fn an_order_of_ones_own_and_groups_that_are_sampled_anew_exclude_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.groups.dynamic_sampling = true;
    config.rewards = PpoConfig::without_reward("", "", "").rewards;
    let constant = FnReward::new(|batch: &[RewardInput<'_>]| Ok(vec![1.0; batch.len()]));
    let trainer = PpoTrainer::new(&config, parts(&config, Rewards::new().with("r", constant))).unwrap();
    let error = trainer.with_order(|_| vec![0, 1, 2, 3]).update().unwrap_err().to_string();
    assert!(
        error.starts_with("order: expected neither dynamic_sampling nor dynamic_filtering_reward_range"),
        "{error}"
    );
}

#[test]
fn an_update_of_truncated_responses_has_no_metric_that_is_not_a_number() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.mask.mask_truncated_completions = true;
    (config.kl.kl_coef, config.response_length, config.stop_token_id) = (0.1, 1, Some(7));
    config.rewards = PpoConfig::without_reward("", "", "").rewards;
    let reward = FnReward::new(|batch: &[RewardInput<'_>]| {
        Ok(batch.iter().map(|input| input.response_ids[0] as f64).collect::<Vec<_>>())
    });
    let mut parts = parts(&config, Rewards::new().with("r", reward));
    parts.reference = Some(CausalLm::from_pretrained(&init("llama_policy"), ModelOptions::default()).unwrap());
    let mut trainer = PpoTrainer::new(&config, parts).unwrap();
    let m = trainer.update().unwrap();
    assert_eq!(m.get("completions/clipped_ratio"), Some(1.0), "none of 16 first tokens is the stop token");
    assert!(m.iter().all(|(_, value)| !value.is_nan()), "{:?}", m.iter().collect::<Vec<_>>());
    // No response counts: there is no KL and no entropy of one, and no warning about them.
    assert_eq!((m.get("objective/kl"), m.get("objective/entropy"), m.get("entropy")), (None, None, Some(0.0)));
    let low = |w: &&rlhf::metrics::Warning| w.message.contains("entropy");
    assert_eq!(trainer.warnings().iter().filter(low).count(), 0);
}

#[test]
fn settings_without_an_effect_for_an_estimator_and_sizes_that_cut_groups_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    type Change = fn(&mut PpoConfig);
    let changes: [(Change, &str); 34] = [
        (
            |c| {
                c.advantage.advantage_estimator = AdvantageEstimator::Remax;
                c.whiten_advantages = WhitenAdvantages::MiniBatch;
            },
            "whiten_advantages = mini_batch has no effect with advantage_estimator = remax, whose advantages are not whitened",
        ),
        (
            |c| {
                one_by_one(c);
                c.groups.overlong_buffer_len = Some(2);
            },
            "overlong_buffer_len = 2 has no effect with multi_objective_aggregation = normalize_then_sum",
        ),
        (
            |c| {
                one_by_one(c);
                c.missing_eos_penalty = Some(2.0);
            },
            "missing_eos_penalty = 2 has no effect with multi_objective_aggregation",
        ),
        (
            |c| {
                one_by_one(c);
                c.non_eos_penalty = true;
            },
            "non_eos_penalty = true has no effect with multi_objective_aggregation",
        ),
        (
            |c| {
                one_by_one(c);
                c.clip_reward_value = Some(2.0);
            },
            "clip_reward_value = 2 has no effect with multi_objective_aggregation",
        ),
        (
            |c| {
                one_by_one(c);
                c.reward_clip_range = vec![0.0, 2.0];
            },
            "reward_clip_range = 0,2 has no effect with multi_objective_aggregation",
        ),
        (
            |c| {
                one_by_one(c);
                c.score_scaling.use_score_scaling = true;
            },
            "use_score_scaling = true has no effect with multi_objective_aggregation",
        ),
        (
            |c| {
                one_by_one(c);
                c.rewards.reward_normalize = vec!["length=std".into()];
            },
            "reward_normalize = length=std has no effect with multi_objective_aggregation",
        ),
        (
            |c| {
                one_by_one(c);
                (c.kl.kl_in_loss, c.kl.use_bias_correction_kl, c.kl.kl_coef) = (false, false, 0.1);
            },
            "kl_coef = 0.1 has no effect with multi_objective_aggregation",
        ),
        (
            |c| (c.loss.loss_type, c.cliprange) = (LossType::Sapo, 0.3),
            "cliprange = 0.3 has no effect with loss_type = sapo or vespo",
        ),
        (
            |c| (c.loss.loss_type, c.loss.cliprange_high) = (LossType::Vespo, Some(0.3)),
            "cliprange_high = 0.3 has no effect with loss_type = sapo or vespo",
        ),
        (
            |c| (c.loss.loss_type, c.cliprange, c.loss.cliprange_high) = (LossType::Cispo, 0.3, Some(5.0)),
            "cliprange = 0.3 has no effect with loss_type = cispo and cliprange_high = 5",
        ),
        (|c| c.loss.dual_clip = Some(1.1), "dual_clip = 1.1: expected a number above 1 + cliprange = 1.2"),
        (
            |c| (c.loss.dual_clip, c.loss.cliprange_high) = (Some(1.28), Some(0.28)),
            "dual_clip = 1.28: expected a number above 1 + cliprange_high = 1.28",
        ),
        (
            |c| (c.preset, c.loss.dual_clip) = (Preset::Trl, Some(1.1)),
            "dual_clip = 1.1: expected a number above 1 + cliprange = 1.2",
        ),
        (
            |c| {
                (c.kl.kl_coef, c.kl.kl_estimator) = (0.04, KlEstimator::Full);
                c.loss.importance_sampling_level = ImportanceLevel::Sequence;
            },
            "use_bias_correction_kl = true with kl_estimator = full",
        ),
        (|c| c.kl.kl_estimator = KlEstimator::Mse, "kl_estimator = mse has no effect with kl_coef = 0"),
        (
            |c| {
                (c.kl.kl_coef_end, c.kl.kl_estimator) = (Some(0.1), KlEstimator::K1);
                c.kl.use_bias_correction_kl = false;
            },
            "kl_in_loss = true with kl_estimator = k1: the gradient of k1 is 0 on average",
        ),
        (
            |c| {
                c.eval.metric_for_best_model = Some("eval/kl".into());
                c.eval.eval_steps = Some(1.into());
            },
            "metric_for_best_model = eval/kl: expected one of eval/score, eval/response_length",
        ),
        (|c| c.advantage.num_generations = 1, "num_generations = 1: expected at least 2: grpo compares the responses"),
        (|c| c.advantage.num_generations = 3, "responses per update = 16 is not a multiple of num_generations = 3"),
        (
            |c| (c.generation.generation_batch_size, c.generation.steps_per_generation) = (Some(12), None),
            "generation_batch_size = 12 responses are not a multiple of the 8 responses of an optimizer step; the nearest multiples: 8 \
             and 16",
        ),
        (
            |c| c.generation.generation_batch_size = Some(16),
            "generation_batch_size = 16 and steps_per_generation = 2 exclude",
        ),
        (|c| c.vf_coef = 0.5, "vf_coef = 0.5 has no effect with advantage_estimator = grpo: there is no value model"),
        (
            |c| c.value.value_learning_rate = Some(1e-3),
            "value_learning_rate = 0.001 has no effect with advantage_estimator",
        ),
        (
            |c| c.value_model_path = Some("m".into()),
            "value_model_path = m has no effect with advantage_estimator = grpo",
        ),
        (|c| c.lam = 0.9, "lam = 0.9 has no effect with advantage_estimator = grpo"),
        (|c| c.whiten_rewards = true, "whiten_rewards = true has no effect with advantage_estimator = grpo"),
        (|c| c.advantage.lam_policy = Some(0.9), "lam_policy = 0.9 has no effect with advantage_estimator = grpo"),
        (
            |c| c.advantage.normalize_advantages = true,
            "normalize_advantages = true has no effect with advantage_estimator = grpo",
        ),
        (
            |c| {
                c.advantage.advantage_estimator = AdvantageEstimator::Rloo;
                c.advantage.scale_rewards = ScaleRewards::Batch;
            },
            "scale_rewards = batch has no effect with advantage_estimator = rloo",
        ),
        (
            |c| c.mask.min_response_length = 2,
            "min_response_length = 2 with num_generations = 4: responses that are left out",
        ),
        (|c| c.sync.sync_ref_model = true, "sync_ref_model = true has no effect with kl_coef = 0"),
        (|c| c.groups.max_num_gen_batches = 3, "max_num_gen_batches = 3 has no effect without dynamic_sampling"),
    ];
    for (change, expected) in changes {
        let mut config = config(dir.path());
        change(&mut config);
        let message = config.check().unwrap_err().to_string();
        assert!(message.contains(expected), "expected {expected}\nfound {message}");
    }
}

#[test]
fn responses_that_do_not_stop_are_masked_and_their_scores_still_count_in_their_groups() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let learner = learner(&config);
    let order = [0, 1, 2, 3, 4, 5];
    let whole = grouped_experience(&learner, &config, &order);
    let mut masked = grouped_experience(&learner, &config, &order);
    masked.mask_rows(&[1, 4]);
    let advantages = |e: &Experience| targets(e, 0.0, &config.shaping()).advantages;
    let (all, found) = (advantages(&whole), advantages(&masked));
    for row in 0..6 {
        let (all, found) = (all.get(row), found.get(row));
        let expected = if [1, 4].contains(&row) { found.zeros_like() } else { all };
        assert_close("row", &found, &expected, 0.0);
    }
}

#[test]
fn a_prompt_that_is_computed_once_for_its_group_gives_the_numbers_and_gradients_of_each_sequence_by_itself() {
    // Fused and separate projections, learned positions, windows, soft caps, norms of queries, angles that depend on the length, states.
    for family in [
        "llama_untied",
        "llama_dynamic",
        "gpt_neox",
        "gpt2",
        "gemma2",
        "mistral",
        "qwen3",
        "phi3",
        "opt",
        "lfm2",
        "qwen3_5",
        "qwen3_next",
        "lfm2_moe",
        "gpt_oss",
        "gemma4",
        "gemma4_moe",
        "ministral3",
    ] {
        let dir = golden().join("models").join(family);
        let mut model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
        model.set_trainable(true);
        let prompt = |from: i64, len: i64| (from..from + len).collect::<Vec<_>>();
        let rows = [
            [prompt(5, 9), vec![40, 41, 42]].concat(),
            [prompt(5, 9), vec![50]].concat(),
            [prompt(5, 9), vec![40, 61, 62, 63, 64]].concat(),
            [prompt(30, 2), vec![70, 71]].concat(),
            [prompt(30, 2), vec![80, 81, 82]].concat(),
        ];
        let spans = [9..12, 9..10, 9..14, 2..4, 2..5];
        let shared = [0, 9, 9, 0, 2];
        for checkpointing in [false, true] {
            model.set_gradient_checkpointing(checkpointing);
            let run = |shared| {
                model.params().iter().for_each(|param| param.tensor.shallow_clone().zero_grad());
                let weights = Tensor::arange(14, (Kind::Float, Device::Cpu)) - 5.0;
                let loss = |slice: std::ops::Range<i64>, now: &rlhf::model::TokenLogprobs| {
                    (&now.logprobs * weights.narrow(0, slice.start, slice.end - slice.start)).sum(Kind::Float)
                };
                let batch = Batch::new(&rows, &spans).sharing(shared);
                let now = model.logprobs_backward(batch, 0.7, loss).unwrap();
                // The optimizer takes a gradient that is not there as zeros: experts may have no token, or padding alone.
                let grad = |param: &Param| {
                    let grad = param.tensor.grad();
                    if grad.defined() { grad.copy() } else { param.tensor.detach().zeros_like() }
                };
                let grads = model.params().iter().map(grad).collect::<Vec<_>>();
                (now.logprobs, model.logprobs_of(batch, 0.7, false).unwrap().logprobs.detach(), grads)
            };
            let (alone, together) = (run(None), run(Some(&shared[..])));
            let case = format!("{family}, gradient checkpointing {checkpointing}");
            assert_close(&case, &together.0, &alone.0, 1e-5);
            assert_close(&case, &together.1, &alone.1, 1e-5);
            for ((found, expected), param) in together.2.iter().zip(&alone.2).zip(model.params()) {
                let scale = expected.abs().max().double_value(&[]).max(1.0);
                assert_close(&format!("{case}: {}", param.name), found, expected, 2e-5 * scale);
            }
        }
    }
}

#[test]
fn a_critic_and_a_reward_model_compute_first_tokens_that_sequences_have_in_common_once_and_with_the_same_numbers() {
    for family in ["llama_untied_cls", "gpt_neox_cls", "gpt2_cls", "gemma2_cls", "qwen3_cls", "opt_cls", "qwen3_5_cls"]
    {
        let dir = golden().join("models").join(family);
        let mut model = SequenceClassifier::from_pretrained(&dir, None, ModelOptions::default()).unwrap();
        model.set_trainable(true);
        // A message of 9 tokens before every prompt; the first two rows have the same prompt, and the last is nothing else.
        let begun = |end: &[i64]| [&(5..14).collect::<Vec<i64>>(), end].concat();
        let rows = [begun(&[30, 31, 40, 41]), begun(&[30, 31, 50]), begun(&[32, 60, 61]), begun(&[])];
        let (spans, shared) = ([10..13, 10..12, 9..12, 8..9], [0, 11, 9, 9]);
        let learn = |shared| {
            model.params().iter().for_each(|param| param.tensor.shallow_clone().zero_grad());
            let batch = Batch::new(&rows, &spans).sharing(shared);
            model.values_backward(batch, |values| values.square().sum(Kind::Float)).unwrap();
            let grads: Vec<Tensor> = model.params().iter().map(|param| param.tensor.grad().copy()).collect();
            grads
        };
        let (alone, together) = (learn(None), learn(Some(&shared[..])));
        for ((found, expected), param) in together.iter().zip(&alone).zip(model.params()) {
            let scale = expected.abs().max().double_value(&[]).max(1.0);
            assert_close(&format!("{family}: {}", param.name), found, expected, 2e-5 * scale);
        }
        let scores = model.scores(&rows).unwrap();
        let each: Vec<Tensor> = (0..4).map(|row| model.scores(&rows[row..=row]).unwrap()).collect();
        assert_close(&format!("{family}: scores"), &scores, &Tensor::cat(&each, 0), 1e-5);
        let values = model.values_at(&rows, &spans).unwrap();
        let policy = CausalLm::from_pretrained(&golden().join("models/gpt2"), ModelOptions::default()).unwrap();
        let critic = ValueModel::Model(Box::new(model));
        let found = critic.values_of(&policy, Batch::new(&rows, &spans).sharing(Some(&shared))).unwrap();
        assert_close(&format!("{family}: values"), &found, &values, 1e-5);
    }
}
