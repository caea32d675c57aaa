//! Whether the numbers of a run can be trusted: it checks itself, steps over what is not finite, and means what it
//! documents.

use crate::cli::{PPO, REWARD, SFT, Scratch, timeless};
use crate::support::golden;
use rlhf::generate::{GenerationConfig, Response, Sampling, generate};
use rlhf::model::{CausalLm, ModelOptions, Param, Precision, SequenceClassifier};
use rlhf::optim::LearningRates;
use rlhf::rl::checks::{Checks, ReferenceKl};
use rlhf::rl::experience::Experience;
use rlhf::rl::learner::{EpochPlan, Learner};
use rlhf::rl::rollout::{RolloutSettings, experience};
use rlhf::rl::shaping::{Targets, targets};
use rlhf::rl::stats::StepStats;
use rlhf::settings::PpoConfig;
use std::collections::BTreeSet;
use std::path::Path;
use tch::{Kind, Tensor};

/// The learning rates of a step.
const RATES: LearningRates = LearningRates { policy: Some(1e-3), value: 1e-3 };

/// What lies outside the masks in [`poisoned`].
const GARBAGE: [f64; 3] = [f64::NAN, f64::INFINITY, -1e30];

/// A learner in the middle of an update of 8 responses, some of which stop early.
struct Update {
    config: PpoConfig,
    learner: Learner,
    reference: CausalLm,
    prompts: Vec<Vec<i64>>,
    responses: Vec<Response>,
}

impl Update {
    fn new(family: &str, precision: Precision) -> Self {
        let options = ModelOptions { precision, ..ModelOptions::default() };
        let dir = |model: &str| golden().join(format!("trl_new/init/{family}_{model}"));
        let policy = || CausalLm::from_pretrained(&dir("policy"), options).unwrap();
        let value = SequenceClassifier::from_pretrained(&dir("value"), None, options).unwrap();
        let mut config = PpoConfig::new("policy", "reward", "prompts.jsonl", "out");
        config.response_length = 12;
        config.run.bf16 = precision == Precision::Bf16;
        config.learning_rate = 1e-3;
        let learner = Learner::new(policy(), value, config.learner());
        let prompts: Vec<Vec<i64>> = (0..8).map(|row| (5..6 + row).collect()).collect();
        let generation = GenerationConfig {
            seed: 1,
            ..GenerationConfig::new(Sampling::at_temperature(config.temperature), config.response_length)
        };
        let mut responses = generate(&learner.policy, &prompts, &generation).unwrap();
        for (response, length) in responses.iter_mut().zip([3, 12, 1, 7, 12, 10, 5, 11]) {
            response.tokens.truncate(length);
            response.logprobs.truncate(length);
        }
        Self { config, learner, reference: policy(), prompts, responses }
    }

    fn experience(&self) -> Experience {
        let judges = self.learner.rollout_models(&self.reference);
        let scores = Tensor::arange(8, (Kind::Float, tch::Device::Cpu)) / 4.0 - 1.0;
        experience(
            judges,
            &self.prompts,
            &self.responses,
            scores,
            &RolloutSettings { recompute_logprobs: false, ..self.config.rollout(judges.policy) },
        )
        .unwrap()
    }

    fn checks(&mut self) -> Checks {
        let settings = self.config.checks(&self.learner.policy);
        Checks::of(&mut self.learner, Some(&self.reference), &self.prompts, &self.responses, &settings).unwrap()
    }

    fn params(&self) -> impl Iterator<Item = &Param> {
        self.learner.policy.params().iter().chain(self.learner.value.params())
    }

    fn weights(&self) -> Vec<Tensor> {
        self.params().map(|param| param.tensor.detach().copy()).collect()
    }

    /// The gradients of the losses over all rows, `rows` at a time; none are left.
    fn gradients(&mut self, experience: &Experience, targets: &Targets, rows: usize) -> Vec<Tensor> {
        let all: Vec<usize> = (0..8).collect();
        let stats = self.learner.gradients(experience, targets, &all, rows, true).unwrap();
        assert_eq!(stats.tokens, experience.lengths().iter().sum::<i64>() as f64);
        let found = self.params().map(|param| param.tensor.grad().copy()).collect();
        self.learner.zero_grad();
        found
    }
}

/// Everything in `experience` that a mask covers, with garbage outside of it.
fn poisoned(experience: &mut Experience, garbage: f64) {
    let Experience { masks, logprobs, ref_logprobs, values, .. } = experience;
    for (tensor, mask) in
        [(logprobs, &masks.response), (ref_logprobs.as_mut().unwrap(), &masks.response), (values, &masks.value)]
    {
        *tensor = tensor.masked_fill(&mask.logical_not(), garbage);
    }
}

#[test]
fn gradients_agree_however_a_mini_batch_is_cut_into_micro_batches() {
    for family in ["llama", "neox"] {
        let mut update = Update::new(family, Precision::F32);
        let e = update.experience();
        let t = targets(&e, update.config.kl.kl_coef, &update.config.shaping());
        let whole = update.gradients(&e, &t, 8);
        for rows in [1, 3, 4] {
            let cut = update.gradients(&e, &t, rows);
            for ((param, found), expected) in update.params().zip(&cut).zip(&whole) {
                let (gap, largest) = ((found - expected).abs().max(), expected.abs().max());
                let (gap, largest) = (gap.double_value(&[]), largest.double_value(&[]));
                // A key's bias has the gradient 0, of which rounding leaves no entry to measure by.
                let bound = if param.name.ends_with("query_key_value.bias") { 1e-6 } else { 0.0 };
                assert!(
                    gap <= (1e-5 * largest).max(bound),
                    "{family}, {rows} at a time: {}: {gap:e} of {largest:e}",
                    param.name
                );
            }
        }
        let moved = whole.iter().filter(|gradient| gradient.abs().max().double_value(&[]) > 1e-4).count();
        assert!(moved * 2 > whole.len(), "{family}: {moved} gradients of {} are not 0", whole.len());
    }
}

#[test]
fn garbage_outside_the_masks_changes_no_target_no_gradient_and_no_metric() {
    let mut update = Update::new("neox", Precision::F32);
    update.config.whiten_rewards = true;
    let clean = update.experience();
    let expected = targets(&clean, update.config.kl.kl_coef, &update.config.shaping());
    let gradients = update.gradients(&clean, &expected, 3);
    for garbage in GARBAGE {
        let mut dirty = update.experience();
        poisoned(&mut dirty, garbage);
        let mut found = targets(&dirty, update.config.kl.kl_coef, &update.config.shaping());
        for (name, found, expected) in [
            ("kl", &found.kl, &expected.kl),
            ("rewards", &found.rewards, &expected.rewards),
            ("advantages", &found.advantages, &expected.advantages),
            ("returns", &found.returns, &expected.returns),
        ] {
            assert!(found.equal(expected), "{name} with {garbage} outside the masks: {found} is not {expected}");
        }
        for (tensor, mask) in [(&mut found.advantages, &dirty.masks.response), (&mut found.returns, &dirty.masks.value)]
        {
            *tensor = tensor.masked_fill(&mask.logical_not(), garbage);
        }
        for (found, expected) in update.gradients(&dirty, &found, 3).iter().zip(&gradients) {
            assert!(found.equal(expected), "gradients with {garbage} outside the masks");
        }
        let told = |e: &Experience, t: &Targets| {
            let mut told = rlhf::metrics::Metrics::default();
            update.learner.metrics(&mut told, e, t, &[], &update.config.plan(8).unwrap().epoch);
            serde_json::to_string(&told).unwrap()
        };
        assert_eq!(told(&dirty, &found), told(&clean, &expected), "metrics with {garbage} outside the masks");
    }
}

#[test]
fn batch_size_and_order_of_the_rows_change_no_sampled_token() {
    let update = Update::new("llama", Precision::F32);
    let policy = &update.learner.policy;
    let config = GenerationConfig { seed: 3, step: 7, ..GenerationConfig::new(Sampling::at_temperature(1.0), 12) };
    let whole = generate(policy, &update.prompts, &config).unwrap();
    for batch_size in [1, 3, 8] {
        let config = GenerationConfig { batch_size, ..config.clone() };
        let found = generate(policy, &update.prompts, &config).unwrap();
        assert!(found.iter().zip(&whole).all(|(a, b)| a.tokens == b.tokens), "in batches of {batch_size}");
        // The last rows first, in parts of other sizes than the batches: a row's key is its place in the update.
        for rows in [7..8, 2..7, 0..2] {
            let config = GenerationConfig { first_row: rows.start as u64, ..config.clone() };
            let found = generate(policy, &update.prompts[rows.clone()], &config).unwrap();
            assert!(found.iter().zip(&whole[rows]).all(|(a, b)| a.tokens == b.tokens), "in batches of {batch_size}");
        }
    }
    for config in [GenerationConfig { seed: 4, ..config.clone() }, GenerationConfig { step: 8, ..config }] {
        let other = generate(policy, &update.prompts, &config).unwrap();
        assert!(other.iter().zip(&whole).any(|(a, b)| a.tokens != b.tokens), "seed and step decide");
    }
}

#[test]
fn a_number_that_is_not_finite_moves_neither_the_policy_nor_the_model_at_fault() {
    type Part = fn(&mut Targets) -> &mut Tensor;
    let run = |bad: Option<(Part, f64, &str)>| {
        let mut update = Update::new("llama", Precision::F32);
        let e = update.experience();
        let plan = update.config.plan(8).unwrap();
        let orders = [(0..8).collect::<Vec<usize>>()];
        if let Some((tensor, number, what)) = bad {
            let before = update.weights();
            let mut t = targets(&e, update.config.kl.kl_coef, &update.config.shaping());
            let _ = tensor(&mut t).get(2).get(0).fill_(number);
            let steps = update.learner.optimize(&e, &t, &orders, RATES, &plan.epoch).unwrap();
            let reason = steps[0].not_finite().unwrap();
            assert!(reason.starts_with(what), "{reason}");
            let (now, policy_len) = (update.weights(), update.learner.policy.params().len());
            assert_same(&before[..policy_len], &now[..policy_len], &format!("{reason}: the policy moved"));
            let value_moved = before[policy_len..].iter().zip(&now[policy_len..]).any(|(a, b)| !a.equal(b));
            assert_eq!(
                value_moved,
                what.contains("policy"),
                "{reason}: the value model moves by its own numbers alone"
            );
            let mut told = rlhf::metrics::Metrics::default();
            update.learner.metrics(&mut told, &e, &t, &steps, &plan.epoch);
            assert_eq!(told.get("val/skipped_steps"), Some(1.0));
            for name in [
                "policy/clipfrac_avg",
                "loss/policy_avg",
                "loss/value_avg",
                "val/ratio",
                "val/ratio_var",
                "policy/grad_norm",
            ] {
                assert!(told.get(name).unwrap().is_nan(), "{name} averages what was skipped");
            }
            assert!(told.get("objective/kl").unwrap().is_finite());
        }
        let t = targets(&e, update.config.kl.kl_coef, &update.config.shaping());
        let steps = update.learner.optimize(&e, &t, &orders, RATES, &plan.epoch).unwrap();
        assert_eq!(steps[0].not_finite(), None);
        update.weights()
    };
    let expected = run(None);
    let start = Update::new("llama", Precision::F32).weights();
    assert!(start.iter().zip(&expected).any(|(a, b)| !a.equal(b)), "a sound step moves the weights");
    // Only one of the two models is at fault in each.
    let cases: [(Part, f64, &str); 5] = [
        (|t| &mut t.advantages, f64::NAN, "the policy's loss is NaN"),
        (|t| &mut t.advantages, f64::INFINITY, "the policy's loss is"),
        (|t| &mut t.returns, f64::NAN, "the value model's loss is NaN"),
        (|t| &mut t.returns, 1e30, "the value model's loss is inf"),
        // The loss is finite, and the square of the gradient is not.
        (|t| &mut t.advantages, 1e25, "the norm of the policy's gradient is inf"),
    ];
    let policy_len = Update::new("llama", Precision::F32).learner.policy.params().len();
    for bad in cases {
        let found = run(Some(bad));
        let same = if bad.2.contains("value") { found.len() } else { policy_len };
        assert_same(&found[..same], &expected[..same], &format!("{}: the next step is another", bad.2));
    }
}

/// Checks that tensors are equal to the bit.
#[track_caller]
fn assert_same(found: &[Tensor], expected: &[Tensor], what: &str) {
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|(a, b)| a.equal(b)), "{what}");
}

#[test]
fn models_trained_one_after_the_other_in_one_memory_of_gradients_take_the_same_steps_to_the_bit() {
    for precision in [Precision::F32, Precision::Bf16] {
        let run = |together: bool| {
            let mut update = Update::new("llama", precision);
            // No ratio is that large, but one that could be keeps the steps of both models together.
            update.config.loss.ratio_threshold = together.then_some(1e9);
            update.learner.set_update(update.config.update_settings());
            let (e, rows) = (update.experience(), (0..8).collect::<Vec<usize>>());
            let t = targets(&e, update.config.kl.kl_coef, &update.config.shaping());
            // Two steps in each epoch, of two parts each, of two micro-batches each.
            let plan = EpochPlan { mini_batch_size: 4, part_size: 2, micro_batch_size: 1 };
            let orders = [rows.clone(), rows.into_iter().rev().collect()];
            let steps = update.learner.optimize(&e, &t, &orders, RATES, &plan).unwrap();
            (update, steps)
        };
        let ((apart, steps), (together, expected)) = (run(false), run(true));
        assert_eq!(steps, expected);
        assert_same(&apart.weights(), &together.weights(), "weights");
        let memory = |params: &[Param]| -> BTreeSet<usize> {
            let grads = params.iter().map(|param| param.tensor.grad()).filter(Tensor::defined);
            grads.map(|grad| tch_ext::storage_id(&grad)).collect()
        };
        let memories =
            |update: &Update| [memory(update.learner.policy.params()), memory(update.learner.value.params())];
        assert_eq!(memories(&apart).map(|ids| ids.len()), [1, 0], "one memory, and the policy has it at the end");
        assert!(memories(&together).iter().all(|ids| ids.len() > 1));

        // Gradients of both models at once are in memory of their own, and a step by them is the same.
        let step = |(mut update, _): (Update, Vec<StepStats>)| {
            let e = update.experience();
            let t = targets(&e, update.config.kl.kl_coef, &update.config.shaping());
            let gradients = update.gradients(&e, &t, 3);
            let orders = [(0..8).collect::<Vec<usize>>()];
            let plan = EpochPlan { mini_batch_size: 8, part_size: 8, micro_batch_size: 8 };
            update.learner.optimize(&e, &t, &orders, RATES, &plan).unwrap();
            (gradients, update.weights())
        };
        let (found, expected) = (step((apart, steps)), step((together, expected)));
        assert_same(&found.0, &expected.0, "gradients");
        assert_same(&found.1, &expected.1, "weights of the next step");
    }
}

#[test]
fn the_first_ratio_is_1_the_first_kl_0_and_decoding_exact() {
    for family in ["llama", "neox"] {
        let mut update = Update::new(family, Precision::F32);
        let before = update.weights();
        let checks = update.checks();
        assert!(
            checks.ratio <= 1e-5 && checks.cached.unwrap() <= 1e-5 && checks.kl.distance() == Some(0.0),
            "{family}: {checks}"
        );
        assert_eq!(checks.failure(Checks::tolerance(false)), None);
        assert!(before.iter().zip(update.weights()).all(|(a, b)| a.equal(&b)));
        let grads = || update.params().map(|param| param.tensor.grad()).filter(Tensor::defined);
        assert!(
            grads().all(|grad| grad.count_nonzero(None::<i64>).int64_value(&[]) == 0),
            "{family}: gradients are left"
        );

        let mut update = Update::new(family, Precision::Bf16);
        let checks = update.checks();
        assert!(checks.cached.unwrap() > 1e-4, "{family}: bf16 rounds: {checks}");
        assert_eq!(checks.failure(Checks::tolerance(true)), None, "{family}: {checks}");
    }
}

#[test]
fn a_wrong_log_prob_fails_the_checks_and_another_reference_does_not() {
    let mut update = Update::new("llama", Precision::F32);
    for shift in [0.05, f32::NAN] {
        let sound = update.responses.clone();
        update.responses[3].logprobs[0] += shift;
        let checks = update.checks();
        let failure = checks.failure(Checks::tolerance(false)).unwrap();
        assert!(failure.starts_with("checks: the first ratio is 1: expected log-probs within 1e-4"), "{failure}");
        update.responses = sound;
    }
    // Nothing is wrong with a KL to another model that is not 0.
    let other = golden().join("trl_new/init/llama_ref");
    update.reference = CausalLm::from_pretrained(&other, ModelOptions::default()).unwrap();
    let mut norm = update.reference.params().last().unwrap().tensor.shallow_clone();
    let _ = tch::no_grad(|| norm.g_mul_scalar_(1.5));
    let checks = update.checks();
    assert_eq!((checks.kl, checks.failure(Checks::tolerance(false))), (ReferenceKl::OtherModel, None));
}

#[test]
fn checks_change_no_result_bit_for_bit() {
    let scratch = Scratch::new();
    // Micro-batches smaller than an update: the checks are one of these.
    let line = format!("{PPO} --gradient_accumulation_steps 2 --total_episodes 24 --learning_rate 1e-3");
    scratch.succeeds(&line);
    scratch.succeeds(&format!("{line} --no_checks --output_dir without"));
    assert_eq!(timeless(scratch.metrics("out")), timeless(scratch.metrics("without")));
    for file in ["samples/update-000003.jsonl", "model.safetensors", "value_model/model.safetensors"] {
        let read = |run: &str| std::fs::read(scratch.path(run).join(file)).unwrap();
        assert!(read("out") == read("without"), "{file} differs");
    }
    let card = scratch.read("out/README.md");
    assert!(card.contains("| checks | first ratio 1 within "), "{card}");
    assert!(!scratch.read("without/README.md").contains("| checks |"));
    // Where nothing is compared but rounding: adapters, and bf16.
    for (flags, run) in [("--use_peft", "lora"), ("--bf16", "bf16")] {
        scratch.succeeds(&format!("{PPO} {flags} --output_dir {run}"));
        let card = scratch.read(&format!("{run}/README.md"));
        assert!(card.contains("KL to the reference 0 within 0.0e0"), "{run}: {card}");
    }
}

#[test]
fn updates_that_are_not_finite_are_skipped_counted_and_end_the_run_with_its_weights_intact() {
    let scratch = Scratch::new();
    // The square of such a score is infinite, and the value model's loss with it.
    scratch.edit_tensors("reward", |tensors| {
        let head = tensors.get_mut("score.weight").unwrap();
        *head = &*head * 1e30;
    });
    let line =
        format!("{PPO} --total_episodes 40 --value_model_path policy --new_reward_head --num_sample_generations 0");
    let ran = scratch.run(&format!("{line} --max_skipped_updates 2"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let told: Vec<&str> = ran.stderr.lines().collect();
    assert_eq!(told[0], "warning: update 1: 4 of 4 optimizer steps skipped: the value model's loss is inf");
    assert!(
        told[1].starts_with("error: 2 updates in a row were skipped, update 2 the last (max_skipped_updates = 2)"),
        "{told:?}"
    );
    assert!(told.len() == 2 && told[1].contains("; the model as far as it came is in out"), "{told:?}");
    let metrics = scratch.metrics("out");
    assert_eq!(metrics.len(), 2);
    for line in &metrics {
        assert_eq!(line["val/skipped_steps"], 4);
        assert!(line["loss/value_avg"].is_null() && line["objective/kl"].is_f64(), "{line:?}");
    }
    let weights = |dir: &str| {
        let checkpoint = rlhf::weights::Checkpoint::open(&scratch.path(dir)).unwrap();
        let names: BTreeSet<String> = checkpoint.names().map(String::from).collect();
        names.iter().map(|name| checkpoint.read(name, tch::Device::Cpu, Kind::Float).unwrap()).collect::<Vec<_>>()
    };
    assert!(weights("out").iter().zip(weights("policy")).all(|(a, b)| a.equal(&b)));
    let ran = scratch.run(&format!("{line} --max_skipped_updates 1 --overwrite_output_dir"));
    assert!(
        ran.code == 1 && ran.stderr.starts_with("error: update 1 was skipped (max_skipped_updates = 1)"),
        "{}",
        ran.stderr
    );
}

/// A row of a table of metrics: its names, where words in capitals stand for anything, and whether only runs with some
/// setting
/// have them.
struct Documented {
    names: Vec<String>,
    conditional: bool,
}

impl Documented {
    fn has(&self, metric: &str) -> bool {
        let any = |part: &str| part.chars().all(|c| c.is_ascii_uppercase());
        let fits = |name: &String| {
            let (parts, found): (Vec<_>, Vec<_>) = (name.split('/').collect(), metric.split('/').collect());
            parts.len() == found.len() && parts.iter().zip(found).all(|(part, found)| any(part) || *part == found)
        };
        self.names.iter().any(fits)
    }
}

/// The rows of the tables below the heading `heading` of the pages about metrics, in docs/reference.
fn documented(heading: &str) -> Vec<Documented> {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference");
    let read = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
    let text = format!("{}\n{}", read("metrics.md"), read("metrics-of-sft-reward-step.md"));
    let section = text.split_once(heading).unwrap().1;
    let section = section.split("\n#").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| {
        let mut cells = row.split(" | ");
        let names = cells.next().unwrap().split(", ").map(|name| name.trim_matches('`').to_string()).collect();
        Documented { names, conditional: cells.next().unwrap().starts_with("with ") }
    })
    .collect()
}

#[test]
fn an_update_of_which_no_response_counts_has_no_metric_of_a_loss() {
    let scratch = Scratch::new();
    let none_stops = "--response_length 4 --stop_token eos --min_new_tokens 4 --mask_truncated_completions";
    scratch.succeeds(&format!("{PPO} {none_stops} --output_dir masked"));
    for line in scratch.metrics("masked") {
        let null: Vec<&String> = line.iter().filter_map(|(name, value)| value.is_null().then_some(name)).collect();
        assert!(null.is_empty() && !line.contains_key("loss/policy_avg"), "{null:?}");
    }
}

#[test]
fn every_metric_of_a_run_is_documented_and_every_documented_metric_is_in_one() {
    let scratch = Scratch::new();
    for split in ["train", "test"] {
        for (folder, file) in [("demos", "demos.jsonl"), ("pairs", "pairs.jsonl"), ("prompts", "prompts.jsonl")] {
            std::fs::create_dir_all(scratch.path(folder)).unwrap();
            scratch.write(&format!("{folder}/{split}.jsonl"), &scratch.read(file));
        }
    }
    // The metrics that such a run shares with others have rows in the first table.
    let groups =
        PPO.replace("ppo ", "ppo --preset grpo --num_generations 2 ").replace("--reward_model_path reward", "");
    let groups = format!("{groups} --reward length:target=3 --stop_token none");
    let reward = SFT.replace("sft ", "reward ").replace("policy", "reward").replace("demos.jsonl", "pairs");
    for (heading, line) in [
        ("## `rlhf ppo`", format!("{} --eval_steps 1", PPO.replace("prompts.jsonl", "prompts"))),
        ("## `rlhf sft`", SFT.replace("demos.jsonl", "demos")),
        ("## `rlhf reward`", reward),
        ("## `rlhf grpo`, `rlhf rloo`", format!("{groups} --beta 0.1")),
    ] {
        let run = &format!("run-of-{}", heading.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
        scratch.succeeds(&format!("{line} --output_dir {run}"));
        let metrics = scratch.metrics(run);
        let found: BTreeSet<&str> = metrics.iter().flat_map(|line| line.keys().map(String::as_str)).collect();
        let rows = documented(heading);
        let shared = if heading.contains("grpo") { documented("## `rlhf ppo`") } else { Vec::new() };
        assert!(rows.len() > 5, "{heading}: {} rows", rows.len());
        for name in &found {
            assert!(rows.iter().chain(&shared).any(|row| row.has(name)), "{heading} of docs/reference lacks {name}");
        }
        // What other programs than this one name is in no run of its own accord.
        let expected = rows.iter().filter(|row| !row.conditional && !row.names[0].ends_with("/KEY"));
        for name in expected.flat_map(|row| &row.names) {
            let row = Documented { names: vec![name.clone()], conditional: false };
            assert!(found.iter().any(|found| row.has(found)), "{heading} of docs/reference has {name}, and no run has");
        }
    }
}

#[test]
fn the_dropout_of_a_configuration_is_off_in_every_model() {
    let scratch = Scratch::new();
    let run = |out: &str| {
        scratch.succeeds(&format!("{PPO} --eval_split_size 2 --eval_steps 1 --output_dir {out}"));
        assert!(scratch.read(&format!("{out}/README.md")).contains("first ratio 1 within"));
        (timeless(scratch.metrics(out)), std::fs::read(scratch.path(out).join("model.safetensors")).unwrap())
    };
    let without = run("without");
    for model in ["policy", "reward"] {
        for name in ["attention_dropout", "hidden_dropout", "classifier_dropout"] {
            scratch.edit_config(model, name, 0.5);
        }
    }
    assert!(run("with") == without);
}

#[test]
fn bf16_has_an_effect_in_every_training() {
    let scratch = Scratch::new();
    for (name, line) in [("ppo", PPO), ("sft", SFT), ("reward", REWARD)] {
        let run = |flag: &str, out: &str| {
            scratch.succeeds(&format!("{line} {flag} --output_dir {name}_{out}"));
            std::fs::read(scratch.path(&format!("{name}_{out}/model.safetensors"))).unwrap()
        };
        assert!(run("", "f32") != run("--bf16", "bf16"), "{name}");
    }
}
