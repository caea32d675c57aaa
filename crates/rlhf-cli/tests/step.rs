//! The trainer with `step()`: its settings, its pieces, what it writes; and `rlhf ppo --preset trl-legacy`.

mod golden;

use crate::cli::{Scratch, json_lines};
use crate::support::{Child, assert_close, golden};
use rlhf::compat::step::{Generate, LengthSampler, LossInputs, Stat, StepConfig, StepTrainer, Texts};
use rlhf::data::Dataset;
use rlhf::generate::Sampling;
use rlhf::metrics::Metrics;
use rlhf::model::{CausalLm, CausalLmWithValueHead, LoraConfig, ModelOptions, ValueHeadInit};
use rlhf::optim::LearningRates;
use rlhf::rl::learner::EpochPlan;
use rlhf::rl::math::KlEstimator;
use rlhf::rl::shaping::Targets;
use rlhf::rng::{Purpose, Stream};
use rlhf::run::ReportTo;
use rlhf::settings::{AdvantageEstimator, DecayType, LossType, LrSchedulerType, PpoConfig, Preset};
use rlhf::tokenizer::Tokenizer;
use std::path::PathBuf;
use tch::{Kind, Tensor};

fn init(name: &str) -> PathBuf {
    golden().join("trl_legacy/init").join(name)
}

fn model() -> CausalLmWithValueHead {
    let dir = init("policy_vhead");
    CausalLmWithValueHead::from_pretrained(&dir, ValueHeadInit::Checkpoint, ModelOptions::default()).unwrap()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_pretrained(&init("ref")).unwrap()
}

fn small(change: impl FnOnce(&mut StepConfig)) -> StepTrainer {
    let mut config = StepConfig { learning_rate: 1e-3, batch_size: 4, mini_batch_size: 2, ..StepConfig::default() };
    change(&mut config);
    StepTrainer::new(config, model(), None, tokenizer()).unwrap()
}

fn rows() -> (Vec<Vec<i64>>, Vec<Vec<i64>>, Vec<f64>) {
    let queries = vec![vec![5, 6, 7], vec![8], vec![9, 10], vec![11, 12, 13, 14]];
    let responses = vec![vec![20, 21, 0], vec![22, 23, 24, 25], vec![26], vec![27, 28]];
    (queries, responses, vec![1.0, -1.0, 0.5, 2.0])
}

fn weights(model: &CausalLm) -> Vec<Tensor> {
    model.params().iter().map(|param| param.tensor.detach().copy()).collect()
}

fn moved(before: &[Tensor], model: &CausalLm) -> Vec<String> {
    let pairs = before.iter().zip(model.params());
    pairs.filter(|(old, param)| !old.equal(&param.tensor)).map(|(_, param)| param.name.clone()).collect()
}

#[test]
fn defaults_are_those_of_trl_0_11() {
    let found = StepConfig::default();
    assert_eq!((found.batch_size, found.mini_batch_size, found.gradient_accumulation_steps), (128, 128, 1));
    assert_eq!((found.init_kl_coef, found.target, found.horizon, found.adap_kl_ctrl), (0.2, 6.0, 10000.0, true));
    assert_eq!(
        (found.gamma, found.lam, found.cliprange, found.cliprange_value, found.vf_coef),
        (1.0, 0.95, 0.2, 0.2, 0.1)
    );
    assert_eq!((found.learning_rate, found.ppo_epochs, found.steps, found.seed), (1.41e-5, 4, 20000, 0));
    assert_eq!((found.ratio_threshold, found.target_kl, found.early_stopping), (10.0, 1.0, false));
    assert_eq!((found.kl_penalty, found.max_grad_norm, found.score_clip), (KlEstimator::K1, None, None));
    assert_eq!(
        (found.optimizer.weight_decay, found.optimizer.adam_beta2, found.optimizer.adam_epsilon),
        (0.0, 0.999, 1e-8)
    );
    // The command line's preset gives the same.
    let preset = PpoConfig::with_preset(Preset::TrlLegacy, "gpt2", "", "stanfordnlp/imdb", "");
    let mut ours = found.ppo();
    (ours.legacy.batch_size, ours.legacy.mini_batch_size) = (None, None);
    (ours.reward_model_path, ours.local_rollout_forward_batch_size) = (preset.reward_model_path.clone(), 64);
    assert_eq!(ours, preset);
}

#[test]
fn a_yaml_file_has_trls_names_and_what_has_no_place_here_is_refused_with_the_reason() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("step.yaml");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        StepConfig::read(&path).map_err(|e| e.to_string())
    };
    let found =
        read("batch_size: 16\nmini_batch_size: 4\nkl_penalty: full\ninit_kl_coef: 0.1\nscore_clip: 2\n").unwrap();
    assert_eq!((found.batch_size, found.kl_penalty, found.score_clip), (16, KlEstimator::Full, Some(2.0)));
    for (text, words) in [
        ("push_to_hub_if_best_kwargs: {repo_id: me/x}\n", "expected an output_dir"),
        ("push_to_hub_if_best_kwargs: {token: hf_x}\n", "`token`: set HF_TOKEN"),
        ("push_to_hub_if_best_kwargs: {private: true}\n", "expected a repo_id"),
        ("push_to_hub_if_best_kwargs: {create_pr: true}\n", "`create_pr`: expected repo_id"),
        ("batch_size: 4\nproject_kwargs: {}\n", "`project_kwargs` is a setting of another system"),
        ("kl_penalty: full\nkl_penality: abs\n", "kl_penality"),
        ("kl_penalty: k9\n", "expected one of"),
        (
            "batch_size: 10\nmini_batch_size: 4\n",
            "batch_size = 10 is not a multiple of mini_batch_size * gradient_accumulation_steps = 4 * 1",
        ),
        ("use_score_norm: true\n", "use_score_norm = true has no effect"),
        ("keep_best: true\n", "keep_best = true: expected an output_dir"),
        ("early_stopping: true\nppo_epochs: 1\n", "num_ppo_epochs = 1"),
        ("init_kl_coef: -1\n", "kl_coef = -1"),
    ] {
        let error = read(text).unwrap_err();
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn a_step_takes_any_number_of_rows_and_a_single_one_too() {
    let (queries, responses, scores) = rows();
    let mut trainer = small(|c| c.gradient_accumulation_steps = 2);
    for rows in [1, 3, 4] {
        let before = weights(&trainer.learner.policy);
        let stats = trainer.step(&queries[..rows], &responses[..rows], &scores[..rows], None).unwrap();
        assert!(
            stats.numbers().iter().all(|(name, number)| number.is_finite() || name == "ppo/val/var_explained"),
            "{stats:?}"
        );
        assert!(moved(&before, &trainer.learner.policy).len() > 20, "{rows} rows");
    }
}

#[test]
fn rows_that_do_not_go_together_are_refused_before_anything_moves() {
    let (queries, responses, scores) = rows();
    let mut trainer = small(|c| c.use_score_scaling = true);
    let before = (weights(&trainer.learner.policy), trainer.score_moments());
    let empty = vec![vec![20], vec![], vec![21], vec![22]];
    let short: Vec<Vec<bool>> = responses.iter().map(|row| vec![true; row.len() - 1]).collect();
    let none: Vec<Vec<bool>> = responses.iter().map(|row| vec![false; row.len()]).collect();
    for (result, words) in [
        (trainer.step(&queries, &responses, &scores[..3], None), "4 responses and scores of shape [3]"),
        (trainer.step(&queries, &empty, &scores, None), "row 1: expected a response of at least one token"),
        (trainer.step(&queries, &responses, &[1.0, f64::NAN, 0.0, 0.0], None), "row 1: expected a finite score"),
        (
            trainer.step(&queries, &responses, &[1.0, 1e300, 0.0, 0.0], None),
            "row 1: expected a finite score that fits in f32, found 1e300",
        ),
        (trainer.step(&queries, &responses, &scores, Some(&short)), "an entry for each token"),
        (trainer.step(&queries, &responses, &scores, Some(&none)), "row 0: expected at least one token that counts"),
        (trainer.step(&[], &[], &[], None), "at least one row"),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(moved(&before.0, &trainer.learner.policy).is_empty());
    assert_eq!(trainer.score_moments(), before.1, "refused scores count");

    let e = trainer.batched_forward_pass(&queries, &responses, &scores, None).unwrap();
    let (kl, rewards) = trainer.compute_rewards(&e);
    let (advantages, returns) = trainer.compute_advantages(&e, &rewards);
    let targets = Targets { kl, kl_coef: 0.2, rewards, advantages, returns };
    for rows in [&[][..], &[1, 4]] {
        let error = trainer.train_minibatch(&e, &targets, rows).unwrap_err().to_string();
        assert!(error.contains("expected rows of an experience of 4"), "{error}");
    }
}

#[test]
fn a_rate_of_the_schedule_that_is_negative_or_not_finite_is_refused_before_anything_moves() {
    let (queries, responses, scores) = rows();
    for rate in [f64::NAN, f64::INFINITY, -1e-3] {
        let mut trainer = small(|c| c.use_score_scaling = true).with_schedule(move |_| rate);
        let before = (weights(&trainer.learner.policy), trainer.score_moments());
        let e = trainer.batched_forward_pass(&queries, &responses, &scores, None).unwrap();
        let (kl, rewards) = trainer.compute_rewards(&e);
        let (advantages, returns) = trainer.compute_advantages(&e, &rewards);
        let targets = Targets { kl, kl_coef: 0.2, rewards, advantages, returns };
        let expected = format!("schedule: step 0: expected learning rates from 0, found {rate}");
        let step = trainer.step(&queries, &responses, &scores, None).map(drop);
        for result in [step, trainer.train_minibatch(&e, &targets, &[0, 1]).map(drop)] {
            assert_eq!(result.unwrap_err().to_string(), expected);
        }
        assert!(moved(&before.0, &trainer.learner.policy).is_empty());
        assert_eq!(trainer.score_moments(), before.1, "scores of a refused step count");
    }
}

#[test]
fn a_learner_refuses_rows_sizes_shapes_and_rates_before_anything_moves() {
    let (queries, responses, scores) = rows();
    let mut trainer = small(|_| {});
    let before = weights(&trainer.learner.policy);
    let e = trainer.batched_forward_pass(&queries, &responses, &scores, None).unwrap();
    let new_targets = || {
        let (kl, rewards) = trainer.compute_rewards(&e);
        let (advantages, returns) = trainer.compute_advantages(&e, &rewards);
        Targets { kl, kl_coef: 0.2, rewards, advantages, returns }
    };
    let (targets, narrow, few) = (new_targets(), new_targets(), new_targets());
    let narrow = Targets { advantages: narrow.advantages.narrow(1, 0, 3), ..narrow };
    let few = Targets { returns: few.returns.narrow(0, 0, 3), ..few };
    let plan = EpochPlan { mini_batch_size: 2, part_size: 1, micro_batch_size: 1 };
    let rate = |rate: f64| LearningRates { policy: Some(rate), value: 1e-3 };
    let (learner, orders) = (&mut trainer.learner, [vec![0, 1, 2, 3]]);
    let mut stats = learner.gradients(&e, &targets, &[0], 1, true).unwrap();
    for (result, words) in [
        (
            learner.optimize(&e, &targets, &[vec![0, 4]], rate(1e-3), &plan).map(drop),
            "expected rows of an experience of 4, found row 4",
        ),
        (
            learner.optimize(&e, &targets, &orders, rate(1e-3), &EpochPlan { mini_batch_size: 0, ..plan }).map(drop),
            "mini_batch_size = 0: expected at least 1",
        ),
        (
            learner.optimize(&e, &targets, &orders, rate(1e-3), &EpochPlan { part_size: 0, ..plan }).map(drop),
            "part_size = 0: expected at least 1",
        ),
        (
            learner.optimize(&e, &targets, &orders, rate(1e-3), &EpochPlan { micro_batch_size: 0, ..plan }).map(drop),
            "micro_batch_size = 0: expected at least 1",
        ),
        (
            learner.optimize(&e, &narrow, &orders, rate(1e-3), &plan).map(drop),
            "targets: advantages: expected shape [4, 4], found [4, 3]",
        ),
        (
            learner.optimize(&e, &few, &orders, rate(1e-3), &plan).map(drop),
            "targets: returns: expected shape [4, 4], found [3, 4]",
        ),
        (
            learner.optimize(&e, &targets, &orders, rate(f64::NAN), &plan).map(drop),
            "rates: expected learning rates from 0, found NaN",
        ),
        (learner.step(rate(-1.0), &mut stats), "rates: expected learning rates from 0, found -1"),
        (learner.gradients(&e, &targets, &[4], 1, true).map(drop), "expected rows of an experience of 4, found row 4"),
        (learner.gradients(&e, &targets, &[0], 0, true).map(drop), "micro_batch_size = 0: expected at least 1"),
        (learner.gradients(&e, &few, &[0], 1, true).map(drop), "targets: returns: expected shape [4, 4], found [3, 4]"),
    ] {
        assert_eq!(result.unwrap_err().to_string(), words);
    }
    assert!(moved(&before, &trainer.learner.policy).is_empty());
}

#[test]
fn settings_of_the_optimizer_that_others_are_in_the_place_of_are_refused() {
    type Change = fn(&mut StepConfig);
    let reason = "StepTrainer::with_schedule sets the learning rate of each step";
    let changes: [(Change, &str, &str); 7] = [
        (|c| c.optimizer.lr_scheduler_type = LrSchedulerType::Cosine, "lr_scheduler_type = cosine", reason),
        (|c| c.optimizer.warmup_steps = 7, "warmup_steps = 7", reason),
        (|c| c.optimizer.lr_end = Some(1e-6), "lr_end = 0.000001", reason),
        (|c| c.optimizer.num_cycles = Some(2.0), "num_cycles = 2", reason),
        (|c| c.optimizer.num_decay_steps = Some(5), "num_decay_steps = 5", reason),
        (|c| c.optimizer.decay_type = DecayType::Linear, "decay_type = linear", reason),
        (|c| c.optimizer.max_grad_norm = Some(0.5), "max_grad_norm = 0.5", "max_grad_norm of StepConfig is the limit"),
    ];
    for (change, found, instead) in changes {
        let mut config = StepConfig::default();
        change(&mut config);
        let error = config.check().unwrap_err().to_string();
        assert_eq!(error, format!("optimizer: {found} has no effect: {instead}"));
    }
}

#[test]
fn a_call_whose_later_steps_are_not_finite_counts_with_those_that_were_taken() {
    let (queries, responses, scores) = rows();
    let mut trainer = small(|c| (c.ppo_epochs, c.ratio_threshold) = (1, 1e30)).with_schedule(|_| 1e30);
    let before = trainer.kl_coef();
    let error = trainer.step(&queries, &responses, &scores, None).unwrap_err().to_string();
    assert!(error.starts_with("step 1: 1 of 2 optimizer steps not taken: the policy's loss is "), "{error}");
    assert_ne!(trainer.kl_coef(), before, "the weight of the KL is adapted");
}

#[test]
fn a_model_that_is_not_found_is_the_same_error_as_elsewhere() {
    let config = StepConfig { model_name: "no/such/model".into(), ..StepConfig::default() };
    let error = StepTrainer::from_pretrained(config, ModelOptions::default()).unwrap_err().to_string();
    let expected = rlhf::hub::model_dir("no/such/model".as_ref(), None).unwrap_err().to_string();
    assert_eq!(error, expected);
}

#[test]
fn a_kl_far_below_0_is_warned_of() {
    let (queries, responses, scores) = rows();
    let stats = small(|_| {}).step(&queries, &responses, &scores, None).unwrap();
    assert_eq!(stats.warning(), None);
    // A reference that likes the responses better than the policy does.
    let mut trainer = small(|c| (c.kl_penalty, c.ppo_epochs) = (KlEstimator::K1, 8)).with_schedule(|_| 1e-2);
    let bad = vec![-5.0; 4];
    for _ in 0..6 {
        let stats = trainer.step(&queries, &responses, &bad, None).unwrap();
        if stats.get("objective/kl").unwrap() < -1.0 {
            assert!(stats.warning().unwrap().contains("expected a number above -1"), "{stats:?}");
            return;
        }
        assert_eq!(stats.warning(), None);
    }
    panic!("the policy never came to like them less");
}

#[test]
fn queries_of_any_length_give_what_they_give_alone() {
    // Left padding would move GPT-2's positions; here nothing is padded.
    let (queries, responses, scores) = rows();
    let trainer = small(|_| {});
    let all = trainer.batched_forward_pass(&queries, &responses, &scores, None).unwrap();
    for row in 0..4 {
        let one = |x: &[Vec<i64>]| vec![x[row].clone()];
        let alone = trainer.batched_forward_pass(&one(&queries), &one(&responses), &scores[row..=row], None).unwrap();
        let length = responses[row].len() as i64;
        for (all, alone) in [
            (&all.logprobs, &alone.logprobs),
            (&all.values, &alone.values),
            (all.ref_logprobs.as_ref().unwrap(), alone.ref_logprobs.as_ref().unwrap()),
        ] {
            assert_close("alone", &all.get(row as i64).narrow(0, 0, length), &alone.get(0), 1e-5);
        }
    }
}

#[test]
fn tokens_that_are_masked_change_no_loss_and_the_score_lands_on_the_last_that_counts() {
    let (queries, responses, scores) = rows();
    let trainer = small(|c| c.init_kl_coef = 0.0);
    let kept = vec![vec![true, true, false], vec![false, true, true, true], vec![true], vec![true, false]];
    let e = trainer.batched_forward_pass(&queries, &responses, &scores, Some(&kept)).unwrap();
    let (_, rewards) = trainer.compute_rewards(&e);
    let expected = Tensor::from_slice2(&[
        [0.0f32, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, -1.0],
        [0.5, 0.0, 0.0, 0.0],
        [2.0, 0.0, 0.0, 0.0],
    ]);
    assert_close("rewards", &rewards, &expected, 0.0);
    let stats = small(|_| {}).step(&queries, &responses, &scores, Some(&kept)).unwrap();
    let Some(Stat::List(ratios)) = stats.stat("ppo/policy/ratio") else { panic!("no ratios") };
    assert_eq!(ratios.len(), 4 * 7, "four epochs of seven tokens");
}

#[test]
fn a_step_compares_the_responses_to_each_query_and_leaves_the_value_head_as_it_is() {
    let mut trainer = small(|c| {
        (c.advantage_estimator, c.num_generations) = (AdvantageEstimator::Grpo, 2);
        (c.init_kl_coef, c.adap_kl_ctrl) = (0.0, false);
    });
    let queries = [vec![5, 6, 7], vec![5, 6, 7], vec![9, 10], vec![9, 10]];
    let (_, responses, _) = rows();
    let scores = [1.0, 3.0, 2.0, 2.0];
    let e = trainer.batched_forward_pass(&queries, &responses, &scores, None).unwrap();
    let (_, rewards) = trainer.compute_rewards(&e);
    let (advantages, _) = trainer.compute_advantages(&e, &rewards);
    // (1 - 2) / (sqrt(2) + 1e-4), at each token of the first response; the second group has equal scores.
    let expected = [-0.707057f32, 0.707057, 0.0, 0.0];
    for (row, expected) in expected.into_iter().enumerate() {
        let expected = Tensor::from(expected) * e.masks.loss.get(row as i64).to_kind(Kind::Float);
        assert_close("advantages", &advantages.get(row as i64), &expected, 1e-5);
    }
    let before = weights(&trainer.learner.policy);
    trainer.step(&queries, &responses, &scores, None).unwrap();
    let moved = moved(&before, &trainer.learner.policy);
    assert!(moved.len() > 5 && !moved.iter().any(|name| name.starts_with("v_head")), "{moved:?}");
    let refused = |queries: &[Vec<i64>], rows: usize| {
        let e = trainer.batched_forward_pass(queries, &responses[..rows], &scores[..rows], None);
        e.unwrap_err().to_string()
    };
    assert!(refused(&queries[..3], 3).starts_with("rows = 3 is not a multiple of num_generations = 2"));
    let mixed = [queries[0].clone(), queries[1].clone(), queries[2].clone(), vec![1]];
    assert_eq!(
        refused(&mixed, 4),
        "rows 2 to 3: expected 2 responses to the same query, num_generations of them, found others"
    );
    let remax = StepConfig { advantage_estimator: AdvantageEstimator::Remax, ..StepConfig::default() };
    assert!(
        remax.check().unwrap_err().to_string().starts_with("advantage_estimator = remax: expected another estimator")
    );
    let dr_grpo = StepConfig { loss_type: LossType::DrGrpo, ..StepConfig::default() };
    assert!(dr_grpo.check().unwrap_err().to_string().starts_with("loss_type = dr_grpo: expected another loss"));
}

#[test]
fn lower_layers_that_are_shared_never_move_and_are_held_once() {
    let (queries, responses, scores) = rows();
    let mut trainer = small(|c| c.num_shared_layers = Some(1));
    let before = weights(&trainer.learner.policy);
    let reference = weights(&trainer.reference);
    trainer.step(&queries, &responses, &scores, None).unwrap();
    let moved = moved(&before, &trainer.learner.policy);
    assert!(
        moved.iter().all(|name| !name.contains("wte") && !name.contains("wpe") && !name.contains(".h.0.")),
        "{moved:?}"
    );
    assert!(
        moved.iter().any(|name| name.contains(".h.1.")) && moved.iter().any(|name| name == "v_head.summary.weight"),
        "{moved:?}"
    );
    for (param, old) in trainer.reference.params().iter().zip(&reference) {
        assert!(param.tensor.equal(old), "the reference moved: {}", param.name);
        let policy_param =
            trainer.learner.policy.params().iter().find(|policy_param| policy_param.name == param.name).unwrap();
        let shared = policy_param.tensor.data_ptr() == param.tensor.data_ptr();
        assert_eq!(
            shared,
            !(param.name.contains(".h.1.") || param.name.contains("ln_f") || param.name.contains("v_head")),
            "{}",
            param.name
        );
    }
    let error = StepTrainer::new(
        StepConfig { num_shared_layers: Some(2), ..StepConfig::default() },
        model(),
        None,
        tokenizer(),
    );
    assert!(error.unwrap_err().to_string().contains("num_shared_layers = 2: expected at most 1"));
}

#[test]
fn an_encoder_decoder_samples_and_learns_and_its_responses_have_no_start_token() {
    let options = ModelOptions::default();
    let load = || CausalLmWithValueHead::from_pretrained(&init("t5_vhead"), ValueHeadInit::Checkpoint, options);
    let tokenizer = || Tokenizer::from_pretrained(&init("t5_ref")).unwrap();
    let config = StepConfig { learning_rate: 1e-3, batch_size: 4, mini_batch_size: 2, ..StepConfig::default() };
    let mut trainer = StepTrainer::new(config.clone(), load().unwrap(), None, tokenizer()).unwrap();
    assert!(trainer.tokenizer.is_of_encoder_decoder());
    let queries = [vec![5, 6, 7, 1], vec![8, 1], vec![9, 10, 1], vec![11, 12, 13, 14, 1]];
    let how = Generate { generate_ref_response: true, sampling: Sampling::Greedy, ..Generate::new(6) };
    let found = trainer.generate(&queries, &how).unwrap();
    assert_eq!(found.ref_responses.as_ref(), Some(&found.responses));
    // As in trl 0.11.4, `return_prompt` adds no prompt to what a decoder of its own wrote.
    let with_prompt = trainer.generate(&queries, &Generate { return_prompt: true, ..how.clone() }).unwrap();
    assert_eq!(with_prompt.responses, found.responses);
    let before = weights(&trainer.learner.policy);
    let scores = [1.0, -1.0, 0.5, 2.0];
    let stats = trainer.step(&queries, &found.responses, &scores, None).unwrap();
    assert!(stats.get("objective/kl").unwrap().abs() < 1e-5, "{stats:?}");
    let moved = moved(&before, &trainer.learner.policy);
    for part in ["encoder.block.0", "EncDecAttention", "shared", "v_head.summary.weight"] {
        assert!(moved.iter().any(|name| name.contains(part)), "{part}: {moved:?}");
    }
    let started: Vec<Vec<i64>> = found.responses.iter().map(|response| [&[0], &response[..]].concat()).collect();
    let error = trainer.step(&queries, &started, &scores, None).unwrap_err().to_string();
    assert_eq!(
        error,
        "responses: expected them without the decoder's start token, which the model adds, found 0 first in each"
    );
    let decoder = CausalLm::from_pretrained(&init("ref"), options).unwrap();
    let mixed = StepTrainer::new(config.clone(), load().unwrap(), Some(decoder), tokenizer());
    let error = mixed.unwrap_err().to_string();
    assert_eq!(error, "reference: expected an encoder-decoder, as the policy is, found a single stack of layers");
    let shared = StepConfig { num_shared_layers: Some(1), ..config };
    let error = StepTrainer::new(shared, load().unwrap(), None, tokenizer()).unwrap_err().to_string();
    assert!(error.starts_with("num_shared_layers = 1: expected a model of one stack"), "{error}");
}

#[test]
fn of_a_model_with_an_adapter_the_base_is_the_reference_and_adapter_and_head_are_what_learns() {
    let (queries, responses, scores) = rows();
    let mut lm = CausalLm::from_pretrained(&init("policy_vhead"), ModelOptions::default()).unwrap();
    lm.add_adapter(&LoraConfig { r: 4, alpha: 8.0, dropout: 0.0, ..LoraConfig::default() }, 1).unwrap();
    let model = CausalLmWithValueHead::from_lm(lm, ValueHeadInit::Fresh(2)).unwrap();
    let config = StepConfig { learning_rate: 1e-2, batch_size: 4, mini_batch_size: 2, ..StepConfig::default() };
    let mut trainer = StepTrainer::new(config, model, None, tokenizer()).unwrap();
    let how = Generate { sampling: Sampling::Greedy, generate_ref_response: true, ..Generate::new(6) };
    let first = trainer.generate(&queries, &how).unwrap();
    assert_eq!(first.ref_responses.as_ref(), Some(&first.responses), "an adapter begins as nothing");

    let before = weights(&trainer.learner.policy);
    let stats = trainer.step(&queries, &responses, &scores, None).unwrap();
    assert!(stats.get("objective/kl").unwrap().abs() < 1e-5, "{stats:?}");
    let moved = moved(&before, &trainer.learner.policy);
    assert!(moved.iter().all(|name| name.contains("lora_") || name.starts_with("v_head.")), "{moved:?}");
    for part in ["lora_B", "v_head.summary.weight"] {
        assert!(moved.iter().any(|name| name.contains(part)), "{part}: {moved:?}");
    }
    let kl = trainer.step(&queries, &responses, &scores, None).unwrap().get("objective/kl").unwrap();
    assert!(kl.abs() > 1e-3, "the policy left its base: {kl}");
    let later = trainer.generate(&queries, &how).unwrap();
    assert_eq!(later.ref_responses, first.ref_responses, "the reference responds with the adapter off");
    assert_ne!(later.responses, first.responses);

    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("model");
    trainer.save_pretrained(&dir).unwrap();
    assert!(dir.join("adapter_config.json").is_file());
    let config = StepConfig { model_name: dir, ..trainer.config().clone() };
    let mut read = StepTrainer::from_pretrained(config, ModelOptions::default()).unwrap();
    assert_eq!(read.generate(&queries, &how).unwrap().responses, later.responses);
    let weights = [&trainer, &read].map(|trainer| weights(&trainer.learner.policy));
    assert!(weights[0] == weights[1], "the adapter's folder has the value head too");
    assert!(!read.learner.value.has_new_head());
}

#[test]
fn a_batch_is_what_the_callers_collator_makes_of_it() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("queries.jsonl");
    std::fs::write(&path, "{\"query\": \"abc\", \"label\": 3}\n{\"query\": \"abd\", \"label\": 4}\n").unwrap();
    let mut loader = small(|_| {}).prepare_dataloader(&Dataset::read(&path, "train").unwrap()).unwrap();
    let labels = |batch: Vec<rlhf::data::Prompt>| batch.iter().map(|p| p.row["label"].as_i64().unwrap()).sum::<i64>();
    assert_eq!(loader.epoch().unwrap().map(labels).collect::<Vec<_>>(), [7]);
}

#[test]
fn the_best_model_is_looked_for_every_so_many_steps() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().to_path_buf().join("out");
    let (queries, responses, _) = rows();
    let mut trainer = small(|c| {
        (c.output_dir, c.keep_best, c.compare_steps) = (Some(out.clone()), true, 2);
    });
    let mut third = Vec::new();
    for (i, score) in [1.0, 9.0, 2.0, 8.0].into_iter().enumerate() {
        if i == 2 {
            third = weights(&trainer.learner.policy);
        }
        trainer.step(&queries, &responses, &[score; 4], None).unwrap();
    }
    let kept = CausalLm::from_pretrained(&out.join("best"), ModelOptions::default()).unwrap();
    let policy = trainer.learner.policy.params();
    for (param, (policy_param, third)) in kept.params().iter().zip(policy.iter().zip(&third)) {
        assert_eq!(param.name, policy_param.name);
        assert!(param.tensor.equal(third), "{}: the first and the third call are looked at", param.name);
    }
}

#[test]
#[ignore = "started by push::a_step_pushes_each_new_best_model"]
fn child_pushes_its_best_models() {
    let (queries, responses, _) = rows();
    let mut trainer = small(|c| {
        (c.output_dir, c.compare_steps) = (Some(Child::var("RLHF_TEST_OUT").into()), 1);
        c.push_to_hub_if_best_kwargs.insert("repo_id".into(), "me/tiny".into());
        c.push_to_hub_if_best_kwargs.insert("private".into(), true.into());
    });
    for score in [1.0, 9.0, 2.0] {
        trainer.step(&queries, &responses, &[score; 4], None).unwrap();
    }
    Child::reports(&true.into());
}

#[test]
fn a_loop_continues_from_its_saved_state_with_the_bits_of_one_that_was_not_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let (queries, responses, scores) = rows();
    for with_adapter in [false, true] {
        let state = dir.path().join(format!("state-{with_adapter}"));
        let make = || {
            let config = StepConfig {
                learning_rate: 1e-3,
                batch_size: 4,
                mini_batch_size: 2,
                use_score_scaling: true,
                ..StepConfig::default()
            };
            let mut lm = CausalLm::from_pretrained(&init("ref"), ModelOptions::default()).unwrap();
            if with_adapter {
                lm.add_adapter(&LoraConfig { r: 2, ..LoraConfig::default() }, 0).unwrap();
            }
            let model = CausalLmWithValueHead::from_lm(lm, ValueHeadInit::Fresh(3)).unwrap();
            StepTrainer::new(config, model, None, tokenizer()).unwrap()
        };
        let step = |trainer: &mut StepTrainer| {
            let drawn = trainer.generate(&queries, &Generate::new(4)).unwrap().responses;
            trainer.step(&queries, &responses, &scores, None).unwrap();
            drawn
        };
        let mut whole = make();
        step(&mut whole);
        let drawn = step(&mut whole);
        let mut first = make();
        step(&mut first);
        first.save_state(&state).unwrap();
        // An earlier state is replaced.
        first.save_state(&state).unwrap();
        let mut second = make();
        second.load_state(&state).unwrap();
        assert_eq!((second.steps_done(), second.kl_coef()), (1, first.kl_coef()));
        assert_eq!(step(&mut second), drawn);
        assert_eq!(moved(&weights(&whole.learner.policy), &second.learner.policy), Vec::<String>::new());
        assert_eq!(second.score_moments(), whole.score_moments());
    }
    let mut trainer = small(|_| {});
    let refused = |error: rlhf::Error, expected: &str| assert!(error.to_string().contains(expected), "{error}");
    refused(trainer.load_state(dir.path()).unwrap_err(), "found no trainer_state.json");
    refused(trainer.save_state(dir.path()).unwrap_err(), "found other files");
    std::fs::write(dir.path().join("trainer_state.json"), r#"{"update": 3}"#).unwrap();
    refused(trainer.save_state(dir.path()).unwrap_err(), "found other files");
    refused(trainer.load_state(dir.path()).unwrap_err(), "`kind`: expected the state of a loop of kind `step`");
}

#[test]
fn a_step_on_tensors_of_the_callers_own_is_that_of_step() {
    let (queries, responses, scores) = rows();
    let mut whole = small(|config| (config.ppo_epochs, config.mini_batch_size) = (1, 4));
    whole.step(&queries, &responses, &scores, None).unwrap();
    let mut parts = small(|config| (config.ppo_epochs, config.mini_batch_size) = (1, 4));
    let e = parts.batched_forward_pass(&queries, &responses, &scores, None).unwrap();
    let mask = &e.masks.response;
    let found = parts.rewards_of(&e.scores, &e.logprobs, e.ref_logprobs.as_ref().unwrap(), mask).unwrap();
    let (kl, rewards) = parts.compute_rewards(&e);
    assert_close("rewards", &found.rewards, &rewards, 1e-6);
    assert_close("kl", &found.kl, &kl, 1e-6);
    let (_, advantages, returns) = parts.advantages_of(&e.values, &found.rewards, mask).unwrap();
    let experience = parts.experience_of((&queries, &responses), &e.logprobs, &e.values, None).unwrap();
    let stats = parts.train_on(&experience, &advantages, &returns).unwrap();
    assert!(
        stats.get("loss/policy").is_some()
            && stats.stat("policy/ratio").is_some()
            && stats.get("ppo/mean_scores").is_none()
    );
    for (found, expected) in parts.learner.policy.params().iter().zip(whole.learner.policy.params()) {
        if !found.name.ends_with("c_attn.bias") {
            assert_close(&found.name, &found.tensor.detach(), &expected.tensor.detach(), 1e-5);
        }
    }
    let before = weights(&parts.learner.policy);
    assert!(parts.train_on_texts(&[vec![5, 6, 7]], 1.0).unwrap() > 0.0);
    assert!(!moved(&before, &parts.learner.policy).is_empty());
    let wide = Tensor::zeros([4, 9], (Kind::Float, tch::Device::Cpu));
    let refused = |error: rlhf::Error, expected: &str| assert!(error.to_string().contains(expected), "{error}");
    refused(parts.rewards_of(&e.scores, &wide, &e.logprobs, mask).unwrap_err(), "ref_logprobs: expected shape [4, 9]");
    refused(
        parts.rewards_of(&e.scores, &e.logprobs, &e.logprobs, &mask.zeros_like()).unwrap_err(),
        "row 0: expected a token",
    );
    refused(
        parts.experience_of((&queries, &responses), &wide, &e.values, None).unwrap_err(),
        "old_logprobs: expected shape [4, 4]",
    );
    refused(parts.train_on(&experience, &wide, &returns).unwrap_err(), "advantages: expected shape [4, 4]");
}

#[test]
fn an_optimizer_step_of_several_averages_is_skipped_and_counted_as_one() {
    let (queries, responses, scores) = rows();
    let mut trainer = small(|c| {
        (c.mini_batch_size, c.gradient_accumulation_steps, c.ppo_epochs) = (1, 2, 1);
        c.ratio_threshold = 1.5;
    })
    .with_order(|_, _| vec![0, 1, 2, 3]);
    let mut e = trainer.batched_forward_pass(&queries, &responses, &scores, None).unwrap();
    let (kl, rewards) = trainer.compute_rewards(&e);
    let (advantages, returns) = trainer.compute_advantages(&e, &rewards);
    let targets = Targets { kl, kl_coef: 0.2, rewards, advantages, returns };
    // The second row's tokens were far less likely.
    let logprobs = e.logprobs.copy();
    let _ = logprobs.get(1).g_sub_scalar_(2.0);
    e.logprobs = logprobs;
    let plan = EpochPlan { mini_batch_size: 2, part_size: 1, micro_batch_size: 1 };
    let rates = LearningRates { policy: Some(1e-3), value: 1e-3 };
    let orders = [vec![0, 1, 2, 3]];
    let parts = trainer.learner.optimize(&e, &targets, &orders, rates, &plan).unwrap();
    assert_eq!(parts.iter().map(|part| part.skipped).collect::<Vec<_>>(), [true, true, false, false]);
    let stats = trainer.record_step_stats(&e, &targets, &orders, &parts, &plan);
    assert_eq!(stats.get("ppo/skipped_steps"), Some(1.0));
    let mut found = Metrics::default();
    trainer.learner.metrics(&mut found, &e, &targets, &parts, &plan);
    assert_eq!((found.get("policy/skipped_steps"), found.get("val/skipped_steps")), (Some(1.0), Some(0.0)));
    assert_eq!(found.get("policy/grad_norm"), Some(parts[3].policy_grad_norm));
    // Of what is skipped the losses are 0.
    let value: f64 = parts[2..].iter().map(|part| part.value_loss / part.value_slots).sum();
    assert!((stats.get("ppo/loss/value").unwrap() - value / 4.0).abs() < 1e-9);
}

#[test]
fn gradient_checkpointing_changes_no_weight() {
    let (queries, responses, scores) = rows();
    let mut all = Vec::new();
    for gradient_checkpointing in [false, true] {
        let mut trainer = small(|c| c.gradient_checkpointing = gradient_checkpointing);
        trainer.step(&queries, &responses, &scores, None).unwrap();
        all.push(weights(&trainer.learner.policy));
    }
    let names: Vec<String> = model().lm().params().iter().map(|param| param.name.clone()).collect();
    for ((plain, checkpointed), name) in all[0].iter().zip(&all[1]).zip(names) {
        // Adam makes whole steps of a key bias's round-off.
        if !name.ends_with("c_attn.bias") {
            assert_close(&name, checkpointed, plain, 1e-6);
        }
    }
}

#[test]
fn a_schedule_and_the_optimizers_settings_are_the_callers() {
    let (queries, responses, scores) = rows();
    let mut still = small(|_| {}).with_schedule(|step| if step == 0 { 0.0 } else { 1e-3 });
    let before = weights(&still.learner.policy);
    let stats = still.step(&queries, &responses, &scores, None).unwrap();
    assert_eq!(stats.get("ppo/learning_rate"), Some(0.0));
    assert!(moved(&before, &still.learner.policy).is_empty());
    still.step(&queries, &responses, &scores, None).unwrap();
    assert!(!moved(&before, &still.learner.policy).is_empty());

    let mut clipped = small(|c| {
        c.max_grad_norm = Some(1e-12);
        c.optimizer.adam_epsilon = 1.0;
    });
    clipped.step(&queries, &responses, &scores, None).unwrap();
    // With this epsilon a step is about the learning rate times the gradient, which is clipped at every one of the steps.
    for (old, param) in before.iter().zip(clipped.learner.policy.params()) {
        assert!((old - &param.tensor).abs().max().double_value(&[]) < 1e-9, "{}", param.name);
    }
}

#[test]
fn lengths_are_drawn_from_the_range_and_responses_end_at_eos() {
    let sampler = LengthSampler::new(2, 5).unwrap();
    let mut stream = Stream::new(1, Purpose::Lengths, 0, 0);
    let drawn: Vec<usize> = (0..200).map(|_| sampler.sample(&mut stream)).collect();
    for length in 2..5 {
        assert!(drawn.iter().filter(|&&found| found == length).count() > 40, "{length}: {drawn:?}");
    }
    assert!(drawn.iter().all(|length| (2..5).contains(length)));
    assert!(LengthSampler::new(3, 3).is_err() && LengthSampler::new(0, 3).is_err());

    let (queries, ..) = rows();
    let mut trainer = small(|_| {});
    let how = Generate { length_sampler: Some(sampler), batch_size: 1, ..Generate::new(1) };
    let found = trainer.generate(&queries, &how).unwrap();
    assert!(found.ref_responses.is_none() && found.responses.iter().all(|row| (1..5).contains(&row.len())));
    assert_ne!(trainer.generate(&queries, &how).unwrap(), found, "another call draws others");
    let none = Generate { batch_size: 0, ..how.clone() };
    assert_eq!(small(|_| {}).generate(&queries, &none).unwrap(), found, "a batch of at least one query");
    let how =
        Generate { sampling: Sampling::Greedy, return_prompt: true, generate_ref_response: true, ..Generate::new(6) };
    let found = trainer.generate(&queries, &how).unwrap();
    assert_eq!(found.ref_responses.as_ref(), Some(&found.responses), "the reference is still a copy");
    for (query, response) in queries.iter().zip(&found.responses) {
        assert!(response.starts_with(query));
        let tokens = &response[query.len()..];
        assert_eq!(tokens.iter().position(|&id| id == 0).map_or(6, |at| at + 1), tokens.len());
    }
}

#[test]
fn a_data_loader_gives_every_query_once_in_each_pass_the_last_batch_smaller() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("queries.jsonl");
    let lines: Vec<String> = (0..10).map(|i| format!("{{\"query\": \"abc{i}\"}}")).collect();
    std::fs::write(&path, lines.join("\n")).unwrap();
    let dataset = Dataset::read(&path, "train").unwrap();
    let mut loader = small(|_| {}).prepare_dataloader(&dataset).unwrap();
    let passes: Vec<Vec<String>> = (0..2)
        .map(|_| {
            let batches: Vec<Vec<_>> = loader.epoch().unwrap().collect();
            assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 2]);
            batches.concat().into_iter().map(|prompt| prompt.text).collect()
        })
        .collect();
    assert_ne!(passes[0], passes[1]);
    for mut pass in passes {
        pass.sort();
        assert_eq!(pass, (0..10).map(|i| format!("abc{i}")).collect::<Vec<_>>());
    }
    let mut loader = loader.with_order(|_, rows| (0..rows).rev().collect());
    assert_eq!(loader.epoch().unwrap().next().unwrap()[0].text, "abc9");
    let error = loader.with_order(|_, rows| vec![0, rows]).epoch().err().unwrap().to_string();
    assert_eq!(error, "order: pass 3: expected rows below 10, found row 10");
}

#[test]
fn logged_metrics_and_the_best_model_are_in_the_folder_and_saved_models_read_back() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let (queries, responses, _) = rows();
    let events = scratch.path().join("events");
    let mut trainer = small(|c| {
        (c.output_dir, c.keep_best) = (Some(out.clone()), true);
        c.log_with = ReportTo::Command(format!("cat > '{}'", events.display()));
    });
    let texts: Vec<String> = (0..4).map(|i| format!("text {i}")).collect();
    let texts = Texts { query: &texts, response: &texts };
    let mut best = Vec::new();
    for (i, scores) in [[1.0; 4], [3.0, 3.0, 1.0, 1.0], [0.0; 4]].into_iter().enumerate() {
        if i == 1 {
            best = weights(&trainer.learner.policy);
        }
        let stats = trainer.step(&queries, &responses, &scores, None).unwrap();
        trainer.log_stats(&stats, texts, &scores).unwrap();
    }
    let lines = json_lines(&std::fs::read_to_string(out.join("trl/metrics.jsonl")).unwrap());
    assert_eq!(lines.len(), 3);
    assert_eq!((&lines[1]["step"], &lines[1]["env/reward_mean"]), (&2.into(), &2.0.into()));
    assert!((lines[1]["env/reward_std"].as_f64().unwrap() - (4.0f64 / 3.0).sqrt()).abs() < 1e-6);
    assert!(lines[2]["objective/kl"].is_number() && lines[2]["time/ppo/total"].is_number());
    assert!(trainer.log_stats(&rlhf::compat::step::Stats::default(), texts, &[1.0]).is_err());
    let logged = small(|_| {}).log_stats(&rlhf::compat::step::Stats::default(), texts, &[1.0, 2.0, 3.0, 4.0]).unwrap();
    assert_eq!(logged.stat("env/reward_dist"), Some(&Stat::List(vec![1.0, 2.0, 3.0, 4.0])));
    assert_eq!(logged.get("env/reward_mean"), Some(2.5));

    let options = ModelOptions::default();
    let kept = CausalLmWithValueHead::from_pretrained(&out.join("best"), ValueHeadInit::Checkpoint, options).unwrap();
    for (param, best) in kept.lm().params().iter().zip(&best) {
        assert!(param.tensor.equal(best), "{} is not that of the model that answered best", param.name);
    }
    let dir = out.join("model");
    trainer.save_pretrained(&dir).unwrap();
    let saved = CausalLmWithValueHead::from_pretrained(&dir, ValueHeadInit::Checkpoint, options).unwrap();
    for (param, policy_param) in saved.lm().params().iter().zip(trainer.learner.policy.params()) {
        assert!(param.tensor.equal(&policy_param.tensor), "{}", param.name);
    }
    assert!(std::fs::read_to_string(dir.join("README.md")).unwrap().contains("| steps | 3 |"));
    let again = StepConfig { output_dir: Some(out), ..trainer.config().clone() };
    let error = StepTrainer::new(again, model(), None, tokenizer()).unwrap_err().to_string();
    assert!(error.contains("output_dir"), "{error}");

    // The tracker's run ends with the trainer.
    drop(trainer);
    let events = json_lines(&std::fs::read_to_string(events).unwrap());
    assert_eq!((&events[0]["project"], &events[0]["name"]), (&"trl".into(), &"out".into()));
    let logged: Vec<_> =
        events.iter().filter(|event| event["type"] == "metrics").map(|event| &event["metrics"]).collect();
    assert_eq!(logged.len(), 3);
    assert_eq!(logged[1].as_object(), Some(&lines[1]));
    assert_eq!(events.last().unwrap()["status"], "finished");
}

#[test]
fn the_pieces_by_hand_are_what_step_does() {
    let (queries, responses, scores) = rows();
    let order: Vec<usize> = vec![2, 0, 3, 1];
    let given_order = order.clone();
    let mut whole = small(|c| c.ppo_epochs = 1).with_order(move |_, _| given_order.clone());
    let stats = whole.step(&queries, &responses, &scores, None).unwrap();

    let mut pieces = small(|c| c.ppo_epochs = 1);
    let e = pieces.batched_forward_pass(&queries, &responses, &scores, None).unwrap();
    let (kl, rewards) = pieces.compute_rewards(&e);
    let (advantages, returns) = pieces.compute_advantages(&e, &rewards);
    let targets = Targets { kl, kl_coef: pieces.kl_coef(), rewards, advantages, returns };
    let mut ratios = Vec::new();
    for rows in order.chunks(2) {
        for part in pieces.train_minibatch(&e, &targets, rows).unwrap() {
            ratios.extend(part.ratios);
        }
    }
    assert_eq!(stats.stat("ppo/policy/ratio"), Some(&Stat::List(ratios)));
    for (one, other) in weights(&pieces.learner.policy).iter().zip(weights(&whole.learner.policy)) {
        assert!(one.equal(&other));
    }
    // The losses of numbers that did not move: ratios are 1, so the policy's is minus the mean advantage.
    let mask = &e.masks.response;
    let (policy, value, loss_stats) = pieces.loss(&LossInputs {
        old_logprobs: &e.logprobs,
        values: &e.values,
        entropy: &e.logprobs.zeros_like(),
        vpreds: &e.values,
        logprobs: &e.logprobs,
        mask,
        advantages: &targets.advantages,
        returns: &targets.returns,
    });
    assert!(policy.double_value(&[]).abs() < 1e-6, "whitened advantages have the mean 0");
    let errors = (&e.values - &targets.returns).square().masked_select(mask).mean(Kind::Float).double_value(&[]);
    assert!((value.double_value(&[]) - 0.1 * errors / 2.0).abs() < 1e-5);
    assert!((loss_stats.get("val/error").unwrap() - errors).abs() < 1e-5);
    assert_eq!(loss_stats.get("policy/clipfrac"), Some(0.0));
}

const LEGACY: &str =
    "ppo --preset trl-legacy --model_name policy --query_dataset prompts.jsonl --reward length:target=3";

#[test]
fn the_preset_trains_one_model_with_a_value_head_from_the_command_line() {
    let scratch = Scratch::with_policy("gpt2");
    let flags = "--batch_size 4 --mini_batch_size 2 --ppo_epochs 2 --steps 8 --init_kl_coef 0.3 --kl_penalty abs \
                 --response_length 4 --temperature 0.9 --learning_rate 1e-3 --save_steps 1 --use_score_scaling";
    scratch.succeeds(&format!("{LEGACY} {flags} --output_dir out"));
    let lines = scratch.metrics("out");
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0]["objective/kl_coef"], 0.3);
    assert_ne!(lines[1]["objective/kl_coef"], 0.3, "the weight is adapted");
    assert!(lines[0].get("val/grad_norm").is_none() && !scratch.path("out/value_model").exists());
    let read = |name: &str, init| {
        CausalLmWithValueHead::from_pretrained(&scratch.path(name), init, ModelOptions::default()).unwrap()
    };
    let (before, after) = (read("policy", ValueHeadInit::Fresh(0)), read("out", ValueHeadInit::Checkpoint));
    let moved = moved(&weights(before.lm()), after.lm());
    assert!(moved.iter().any(|name| name == "v_head.summary.bias") && moved.len() > 20, "{moved:?}");

    // It resumes from a checkpoint to the same bits.
    scratch.succeeds(&format!("{LEGACY} {flags} --output_dir again --resume_from_checkpoint out/checkpoint-1"));
    let bytes = |run: &str| std::fs::read(scratch.path(run).join("model.safetensors")).unwrap();
    assert!(bytes("again") == bytes("out"), "the resumed run ends elsewhere");

    // And the settings it leaves repeat it.
    let yaml = scratch.read("out/config.yaml");
    for line in ["preset: trl-legacy", "value_head: true", "kl_coef: 0.3", "mini_batch_size: 2", "num_ppo_epochs: 2"] {
        assert!(yaml.lines().any(|found| found == line), "{line}: {yaml}");
    }
    scratch.succeeds("ppo --config out/config.yaml --output_dir repeated");
    assert!(bytes("repeated") == bytes("out"), "the repeated run ends elsewhere");
}

#[test]
fn a_file_may_name_the_preset_and_use_trls_names_and_a_flag_wins_over_both() {
    let scratch = Scratch::with_policy("gpt2");
    scratch.write(
        "legacy.yaml",
        "preset: trl-legacy\nmodel_name: policy\nquery_dataset: prompts.jsonl\nreward: length:target=3\nbatch_size: 4\n\
         ppo_epochs: 2\nsteps: 4\ninit_kl_coef: 0.3\nresponse_length: 4\noutput_dir: out\n",
    );
    scratch.succeeds("ppo --config legacy.yaml --value_head false --kl_coef 0.5");
    assert_eq!(scratch.metrics("out")[0]["objective/kl_coef"], 0.5);
    assert!(scratch.path("out/value_model").exists(), "a value model of its own, as the flag says");
    let yaml = scratch.read("out/config.yaml");
    assert!(yaml.contains("score_position: last_token") && yaml.contains("adap_kl_ctrl: true"), "{yaml}");
    scratch.write("twice.yaml", "kl_coef: 0.1\ninit_kl_coef: 0.2\n");
    scratch.refuses(&format!("{LEGACY} --output_dir other --config twice.yaml"), 2, &["init_kl_coef", "is set twice"]);
    scratch.write("refused.yaml", "preset: trl-legacy\nworld_size: 2\n");
    let refused = ["refused.yaml:2: world_size = 2: the number of ranks is the launcher's; expected none or 1"];
    scratch.refuses(&format!("{LEGACY} --output_dir other --config refused.yaml"), 2, &refused);
}

#[test]
fn settings_that_have_no_place_are_refused_by_the_command_with_the_reason() {
    let scratch = Scratch::with_policy("gpt2");
    for (flags, words) in [
        ("--world_size 8", "world_size = 8: the number of ranks is the launcher's; expected none or 1"),
        ("--forward_batch_size 4", "forward_batch_size = 4: it is mini_batch_size under its older name"),
        ("--num_mini_batches 2 --batch_size 4", "num_mini_batches = 2 has no effect with preset = trl-legacy"),
        (
            "--batch_size 6 --mini_batch_size 4",
            "not a multiple of mini_batch_size * gradient_accumulation_steps = 4 * 1 = 4",
        ),
        ("--value_learning_rate 1e-3", "there is no value model"),
        ("--target_kl 0.1", "target_kl = 0.1 has no effect with preset = trl-legacy and without early_stopping = true"),
    ] {
        scratch.refuses(&format!("{LEGACY} --output_dir out {flags}"), 2, &[words]);
    }
}
