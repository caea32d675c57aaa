//! PPO from Rust: the events of a run, what the caller may bring, and the pieces of a step.

use crate::checkpoint::{assert_same, ppo_config};
use crate::cli::{json_lines, timeless};
use crate::support::{Child, golden, init};
use rlhf::Error;
use rlhf::data::{Cursor, Dataset, Prompt};
use rlhf::generate::generate;
use rlhf::model::{CausalLm, ModelOptions, SequenceClassifier};
use rlhf::optim::{LearningRates, OptimizerConfig};
use rlhf::reward::{FnReward, Rewards, ScoreUse};
use rlhf::rl::learner::Learner;
use rlhf::rl::rollout::{RolloutSettings, experience};
use rlhf::rl::shaping::{Targets, advantages, shape_rewards};
use rlhf::rl::stats::StepStats;
use rlhf::run::{Event, WarningKind, clear_stop, request_stop};
use rlhf::settings::{PpoConfig, Resume, StopToken};
use rlhf::tokenizer::Tokenizer;
use rlhf::train::ppo::{PpoParts, PpoTrainer};
use serde_json::{Map, Value, json};
use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;
use std::sync::{Arc, Mutex};
use tch::Kind;

const VOCAB: i64 = 320;

/// Five updates of 4 responses in the folder `out`, scored by nothing yet.
fn config(dir: &Path, out: &str) -> PpoConfig {
    let mut config = ppo_config(dir);
    config.run.output_dir = dir.join(out);
    config.run.checkpoints.save_steps = Some(5.into());
    config.reward_model_path = None;
    config.rewards = PpoConfig::without_reward("", "", "").rewards;
    config
}

/// Short responses score higher.
fn brevity() -> Rewards {
    let brevity = |batch: &[rlhf::reward::RewardInput<'_>]| {
        Ok(batch.iter().map(|input| -(input.response.len() as f64) / 10.0).collect())
    };
    Rewards::new().with("brevity", FnReward::new::<f64>(brevity))
}

/// What `from_config` makes of [`config`], made by hand.
fn parts(config: &PpoConfig) -> PpoParts {
    let (dir, options) = (init("llama_policy"), ModelOptions::default());
    let policy = || CausalLm::from_pretrained(&dir, options).unwrap();
    let value = SequenceClassifier::from_pretrained(&dir, Some(config.run.seed), options).unwrap();
    let tokenizer = Tokenizer::from_pretrained(&golden().join("models/gpt_neox")).unwrap();
    let prompts =
        |split| Dataset::read(&config.data.dataset_name[0], split).unwrap().prompts(&tokenizer, VOCAB, 100).unwrap();
    PpoParts {
        learner: Learner::new(policy(), value, config.learner()),
        reference: Some(policy()),
        rewards: brevity(),
        prompts: prompts("train"),
        eval_prompts: prompts("test"),
        tokenizer,
    }
}

/// The metrics of the updates.
fn lines(dir: &Path) -> Vec<Map<String, Value>> {
    let mut lines = timeless(json_lines(&std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap()));
    // The first is the evaluation before them.
    assert_eq!(lines[0]["step"], 0);
    lines.remove(0);
    lines
}

fn as_lines(metrics: &[rlhf::metrics::Metrics]) -> Vec<Map<String, Value>> {
    let lines: Vec<String> = metrics.iter().map(|line| serde_json::to_string(line).unwrap()).collect();
    timeless(json_lines(&lines.join("\n")))
}

fn sums(trainer: &PpoTrainer) -> Vec<f64> {
    trainer.learner.policy.params().iter().map(|param| param.tensor.sum(Kind::Double).double_value(&[])).collect()
}

/// The kind of an event, and the updates done by then; of a folder that is saved its name and 0.
fn told(event: &Event<'_>) -> (String, usize) {
    match event {
        Event::Update { step, metrics } => {
            assert_eq!(metrics.get("step"), Some(*step as f64));
            ("update".into(), *step)
        }
        Event::Samples { step, samples, .. } => {
            assert!(samples.len() == 5 && !samples[0].response.is_empty());
            ("samples".into(), *step)
        }
        Event::Evaluation { step, evaluation, .. } => {
            assert!(evaluation.metrics.get("eval/score").is_some() && evaluation.samples.len() == 6);
            ("evaluation".into(), *step)
        }
        Event::Saved { dir } => {
            assert!(dir.join("model.safetensors").is_file() && dir.join("value_model/model.safetensors").is_file());
            (dir.file_name().unwrap().to_str().unwrap().to_string(), 0)
        }
        other => panic!("unexpected {other:?}"),
    }
}

#[test]
fn the_trainers_settings_count_where_they_change_between_updates_and_where_the_learner_was_made_with_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = ppo_config(dir.path());
    (config.num_ppo_epochs, config.learning_rate) = (2, 1e-3);
    let narrow = PpoConfig { cliprange: 1e-9, ..config.clone() };
    let clipped = |trainer: &mut PpoTrainer| trainer.update().unwrap().get("policy/clipfrac_avg").unwrap();
    let mut plain = PpoTrainer::new(&config, parts(&config)).unwrap();
    let usual = clipped(&mut plain);
    let mut other = PpoTrainer::new(&config, parts(&narrow)).unwrap();
    assert_eq!(clipped(&mut other), usual);
    // Nearly every token of the second epoch is beyond so narrow a range, about half of them on the side that is clipped.
    plain.set_config(&narrow).unwrap();
    let found = clipped(&mut plain);
    assert!(usual < 0.1 && found > 0.15, "{usual}, then {found}");
}

#[test]
fn a_watcher_receives_every_event_and_a_run_that_it_ends_anywhere_resumes_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let whole = ppo_config(dir.path());
    let run = |out: &str, save_steps: usize, resume: bool| {
        let mut config = whole.clone();
        config.run.output_dir = dir.path().join(out);
        config.run.checkpoints.save_steps = Some(save_steps.into());
        config.run.checkpoints.resume_from_checkpoint = resume.then_some(Resume::Latest);
        PpoTrainer::from_config(&config).unwrap()
    };
    let mut all = Vec::new();
    let done = run("whole", 2, false).train_with(|event| {
        all.push(told(event));
        Continue(())
    });
    assert_eq!(done.unwrap(), 5);
    assert!(all.contains(&("best".into(), 0)));
    all.retain(|(name, _)| name != "best");
    let expected = [
        ("evaluation", 0),
        ("samples", 0),
        ("update", 1),
        ("update", 2),
        ("evaluation", 2),
        ("samples", 2),
        ("checkpoint-2", 0),
        ("update", 3),
        ("update", 4),
        ("evaluation", 4),
        ("samples", 4),
        ("checkpoint-4", 0),
        ("update", 5),
        ("evaluation", 5),
        ("samples", 5),
        ("checkpoint-5", 0),
        ("whole", 0),
    ];
    assert_eq!(all, expected.map(|(name, step)| (name.to_string(), step)));

    let stops = [("samples", 2, 2), ("update", 3, 3), ("evaluation", 2, 2), ("best", 0, 2), ("checkpoint-2", 0, 2)];
    for (at, (name, step, updates)) in stops.into_iter().enumerate() {
        let out = format!("stopped-{at}");
        let mut last = Vec::new();
        // With a checkpoint of its own only where that is what ends the run.
        let save_steps = if name == "checkpoint-2" { 2 } else { 5 };
        let mut trainer = run(&out, save_steps, false);
        let done = trainer.train_with(|event| {
            last.push(told(event));
            if told(event) == (name.into(), step) { Break(()) } else { Continue(()) }
        });
        assert_eq!((done.unwrap(), trainer.updates_done()), (updates, updates), "stopped by {name}");
        let left = [(format!("checkpoint-{updates}"), 0), (out.clone(), 0)];
        assert!(last.ends_with(&left), "stopped by {name}: {last:?}");
        let out = dir.path().join(out);
        assert_eq!(lines(&out).len(), updates);
        // On the same trainer, and on another in another process' place.
        let goes_on = if at == 0 {
            trainer.train()
        } else {
            drop(trainer);
            run(out.file_name().unwrap().to_str().unwrap(), 5, true).train()
        };
        assert_eq!(goes_on.unwrap(), 5);
        assert_same(&out, &dir.path().join("whole"), 5);
    }
}

#[test]
fn a_run_that_is_ended_before_its_first_update_leaves_no_model_and_restarts_on_the_next_call() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = ppo_config(dir.path());
    config.eval.metric_for_best_model = None;
    let done = PpoTrainer::from_config(&config).unwrap().train_with(|_| Break(()));
    assert_eq!(done.unwrap(), 0);
    for name in ["model.safetensors", "checkpoint-0"] {
        assert!(!config.run.output_dir.join(name).exists(), "{name}");
    }
    // What is there is a run: another trainer does not write over it unasked.
    let error = PpoTrainer::from_config(&config).unwrap().train().unwrap_err().to_string();
    assert!(error.contains("found a run in it"), "{error}");
    config.run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
    assert_eq!(PpoTrainer::from_config(&config).unwrap().train().unwrap(), 5);
}

#[test]
fn a_process_trains_again_once_its_request_to_stop_is_taken_back() {
    Child { test: "library::child_stops_and_trains_again", address_space_gib: 16, vars: &[] }.run();
}

#[test]
#[ignore = "a process of its own, started by a_process_trains_again_once_its_request_to_stop_is_taken_back"]
fn child_stops_and_trains_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "out");
    let mut trainer = PpoTrainer::from_config_with(&config, brevity()).unwrap();
    let stopped = trainer.train_with(|event| {
        if matches!(event, Event::Update { step: 2, .. }) {
            assert!(!request_stop(143));
        }
        Continue(())
    });
    assert!(matches!(stopped, Err(Error::Stopped { code: 143, .. })), "{stopped:?}");
    assert!(matches!(trainer.train(), Err(Error::Stopped { code: 143, .. })));
    assert_eq!(trainer.updates_done(), 2);
    clear_stop();
    assert_eq!(trainer.train().unwrap(), 5);
    Child::reports(&json!({}));
}

#[test]
fn a_reward_that_fails_is_told_from_other_errors_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "out");
    let out_of_ideas = || FnReward::new(|_| Err::<Vec<f64>, _>(Error::Run("out of ideas".into())));
    let mut parts = parts(&config);
    parts.rewards = Rewards::new().with("mine", out_of_ideas());
    let error = PpoTrainer::new(&config, parts).unwrap().update().unwrap_err();
    assert_eq!(error.to_string(), "reward `mine`: out of ideas");
    assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "out of ideas");
    let Error::Reward { name, source } = &error else { panic!("{error}") };
    assert!(name == "mine" && matches!(**source, Error::Run(_)), "{name}: {source}");

    let rewards = Rewards::new().with("mine", out_of_ideas());
    let error = PpoTrainer::from_config_with(&config, rewards).unwrap().train().unwrap_err();
    assert!(error.to_string().starts_with("reward `mine`: out of ideas; no update is done"), "{error}");
    assert!(error.exit_code() == 1 && matches!(error, Error::Reward { .. }), "{error}");
}

#[test]
fn parts_in_hand_train_to_the_bits_of_the_settings_that_name_them_also_update_by_update() {
    let dir = tempfile::tempdir().unwrap();
    let named = config(dir.path(), "named");
    let mut trainer = PpoTrainer::from_config_with(&named, brevity()).unwrap();
    assert_eq!(trainer.train().unwrap(), 5);
    let in_hand = config(dir.path(), "in_hand");
    PpoTrainer::new(&in_hand, parts(&in_hand)).unwrap().train().unwrap();
    assert_same(&in_hand.run.output_dir, &named.run.output_dir, 5);

    let mut by_hand = PpoTrainer::new(&in_hand, parts(&in_hand)).unwrap();
    let mut told = Vec::new();
    while by_hand.updates_done() < by_hand.plan.num_total_batches {
        let mut metrics = by_hand.update().unwrap();
        if by_hand.updates_done() != 1 && by_hand.updates_done() != 3 {
            metrics.extend(&by_hand.evaluate().unwrap().metrics);
        }
        told.push(metrics);
    }
    assert_eq!(as_lines(&told), lines(&named.run.output_dir));
    assert_eq!(sums(&by_hand), sums(&trainer));
    let error = by_hand.update().unwrap_err().to_string();
    assert_eq!(error, "update: the run is finished, all 5 updates are done");
    by_hand.save_model(&dir.path().join("saved")).unwrap();
    let weights = |dir: &Path| std::fs::read(dir.join("model.safetensors")).unwrap();
    assert!(weights(&dir.path().join("saved")) == weights(&named.run.output_dir));
}

#[test]
fn an_update_that_fails_before_its_first_step_is_repeated_by_the_next_call() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), "out");
    // Scores are counted before the learning rates are asked for.
    config.score_scaling.use_score_scaling = true;
    config.score_scaling.use_score_norm = true;
    config.eval.metric_for_best_model = None;
    let new = |fails: bool| {
        let mut due = fails;
        let schedule = move |update| {
            if update == 1 && std::mem::take(&mut due) {
                LearningRates { policy: Some(f64::NAN), value: 1e-3 }
            } else {
                rates(update)
            }
        };
        PpoTrainer::new(&config, parts(&config)).unwrap().with_schedule(schedule)
    };
    let (mut failing, mut whole) = (new(true), new(false));
    let mut failures = 0;
    while whole.updates_done() < 4 {
        let expected = whole.update().unwrap();
        let found = failing.update().or_else(|error| {
            assert!(error.to_string().starts_with("schedule: update 1: "), "{error}");
            failures += 1;
            failing.update()
        });
        assert_eq!(as_lines(&[found.unwrap()]), as_lines(&[expected]));
    }
    assert_eq!((failures, sums(&failing)), (1, sums(&whole)));
}

#[test]
fn an_evaluation_needs_no_report_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = ppo_config(dir.path());
    config.eval.eval_steps = None;
    config.eval.metric_for_best_model = None;
    let new = || PpoTrainer::from_config(&config).unwrap();
    let (mut asked, mut plain) = (new(), new());
    for _ in 0..2 {
        let evaluations = [asked.evaluate().unwrap(), asked.evaluate().unwrap()];
        let [first, second] = &evaluations;
        assert_eq!(first.metrics.get("eval/score"), second.metrics.get("eval/score"));
        assert_eq!(first.samples.len(), 6);
        for (a, b) in first.samples.iter().zip(&second.samples) {
            assert_eq!((&a.prompt, &a.response, a.score), (&b.prompt, &b.response, b.score));
        }
        assert_eq!(as_lines(&[asked.update().unwrap()]), as_lines(&[plain.update().unwrap()]));
    }
    std::fs::remove_file(dir.path().join("prompts/test.jsonl")).unwrap();
    let error = new().evaluate().unwrap_err().to_string();
    assert!(error.starts_with("evaluate: expected prompts that are held out, found none"), "{error}");
}

/// The rates of update `update`; the policy starts with the second.
fn rates(update: usize) -> LearningRates {
    let value = 1e-3 / (1 + update) as f64;
    LearningRates { policy: (update > 0).then_some(value / 2.0), value }
}

#[test]
fn the_caller_may_bring_order_schedule_optimizers_and_reference_and_resume_with_them() {
    let dir = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let new = |out: &str, has_callbacks: bool| {
        let mut config = config(dir.path(), out);
        config.run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
        let mut parts = parts(&config);
        let mut optimizer = config.optimizer.clone();
        (optimizer.weight_decay, optimizer.adam_beta2, optimizer.max_grad_norm) = (0.5, 0.9, None);
        parts.learner = parts.learner.with_optimizers(&optimizer, &config.optimizer);
        assert_eq!(parts.learner.settings().policy_optimizer, optimizer);
        let reference = CausalLm::from_pretrained(&init("llama_ref"), ModelOptions::default()).unwrap();
        let _ = tch::no_grad(|| reference.params()[0].tensor.shallow_clone().g_mul_scalar_(1.5));
        parts.reference = Some(reference);
        let log = seen.clone();
        let look = move |batch: &[rlhf::reward::RewardInput<'_>]| {
            log.lock().unwrap().push(batch.iter().map(|input| input.prompt.to_string()).collect::<Vec<_>>());
            Ok(vec![0.0; batch.len()])
        };
        parts.rewards = brevity().with("look", FnReward::new::<f64>(look));
        let trainer = PpoTrainer::new(&config, parts).unwrap();
        if has_callbacks {
            trainer.with_order(|update| vec![update, 5, 0, update]).with_schedule(rates)
        } else {
            trainer
        }
    };
    let stop_after = |updates: usize| {
        move |event: &Event<'_>| match event {
            Event::Update { step, .. } if *step == updates => Break(()),
            _ => ControlFlow::<()>::Continue(()),
        }
    };
    new("whole", true).train().unwrap();
    let whole = dir.path().join("whole");
    let batches = seen.lock().unwrap().clone();
    let update_batches: Vec<&Vec<String>> = batches.iter().filter(|batch| batch.len() == 4).collect();
    assert_eq!(update_batches.len(), 5);
    assert_eq!(update_batches[2], &["the capital of France", "a sing", "The movie", "the capital of France"]);
    let told = lines(&whole);
    for (update, line) in told.iter().enumerate() {
        let rates = rates(update);
        assert_eq!(line["lr"].as_f64(), Some(rates.policy.unwrap_or(0.0)));
        assert_eq!(line["val/lr"].as_f64(), Some(rates.value));
    }
    assert!(told[0]["objective/kl"].as_f64().unwrap().abs() > 1e-3, "another reference");

    for updates in [1, 3] {
        let out = format!("stopped-{updates}");
        assert_eq!(new(&out, true).train_with(stop_after(updates)).unwrap(), updates);
        let error = new(&out, false).train().unwrap_err().to_string();
        let expected = "callbacks: the run was started with an order and a schedule of the caller's, and this trainer has none; \
                        call `with_order` and `with_schedule` before resuming";
        assert!(error.ends_with(expected), "{error}");
        assert_eq!(new(&out, true).train().unwrap(), 5);
        assert_same(&dir.path().join(out), &whole, 5);
    }
    // The optimizer's settings are the caller's too: without them the same run ends elsewhere.
    let config = config(dir.path(), "plain");
    let mut parts = parts(&config);
    let reference = CausalLm::from_pretrained(&init("llama_ref"), ModelOptions::default()).unwrap();
    let _ = tch::no_grad(|| reference.params()[0].tensor.shallow_clone().g_mul_scalar_(1.5));
    parts.reference = Some(reference);
    let plain = PpoTrainer::new(&config, parts).unwrap();
    plain.with_order(|update| vec![update, 5, 0, update]).with_schedule(rates).train().unwrap();
    let weights = |dir: &Path| std::fs::read(dir.join("model.safetensors")).unwrap();
    assert!(weights(&config.run.output_dir) != weights(&whole));
}

#[test]
fn updates_in_a_loop_of_the_callers_warn_of_skipped_steps_and_end_at_too_many_as_a_run_does() {
    let dir = tempfile::tempdir().unwrap();
    let by_hand = config(dir.path(), "by_hand");
    let broken = |config: &PpoConfig| {
        let trainer = PpoTrainer::new(config, parts(config)).unwrap();
        // Finite, so that it can be saved, and too large for any loss to be.
        let head = trainer.learner.value.params().iter().find(|param| param.name == "score.weight").unwrap();
        let _ = tch::no_grad(|| head.tensor.shallow_clone().fill_(3e38));
        trainer
    };
    let mut trainer = broken(&by_hand);
    let weights = sums(&trainer);
    for update in 1..=2 {
        assert_eq!(trainer.update().unwrap().get("val/skipped_steps"), Some(4.0));
        let [warning] = trainer.warnings() else { panic!("{:?}", trainer.warnings()) };
        assert_eq!(warning.kind, WarningKind::SkippedSteps);
        assert!(warning.message.starts_with(&format!("update {update}: 4 of 4 optimizer steps skipped: ")));
    }
    let error = trainer.update().unwrap_err().to_string();
    assert!(
        error.starts_with("3 updates in a row were skipped, update 3 the last (max_skipped_updates = 3)"),
        "{error}"
    );
    assert_eq!((trainer.updates_done(), sums(&trainer)), (3, weights));
    // A run sends its watcher the same, and ends in the same error.
    let mut named = by_hand;
    named.run.output_dir = dir.path().join("named");
    named.alarms.no_checks = true;
    let mut told = Vec::new();
    let ended = broken(&named).train_with(|event| {
        if let Event::Warning { step, warning } = event {
            told.push((*step, warning.kind));
        }
        Continue(())
    });
    let ended = ended.unwrap_err().to_string();
    assert!(ended.starts_with(&error), "{ended}");
    assert_eq!(told, [(1, WarningKind::SkippedSteps), (2, WarningKind::SkippedSteps)]);
}

#[test]
fn a_hidden_eos_is_reported_once_where_most_responses_continue_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), "out");
    // Half of the vocabulary is an eos, and nothing stops.
    config.stop_token_id = None;
    let folder = dir.path().join("tokenizer");
    std::fs::create_dir(&folder).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden().join("models/gpt_neox").join(file), folder.join(file)).unwrap();
    }
    let eos = serde_json::json!({"eos_token_id": (100..260).collect::<Vec<i64>>()});
    std::fs::write(folder.join("generation_config.json"), eos.to_string()).unwrap();
    let warnings = |stop: Option<StopToken>| {
        let mut config = config.clone();
        config.stop_token = stop;
        let mut parts = parts(&config);
        parts.tokenizer = Tokenizer::from_pretrained(&folder).unwrap();
        let mut trainer = PpoTrainer::new(&config, parts).unwrap();
        let update = |_| {
            trainer.update().unwrap();
            trainer.warnings().to_vec()
        };
        (0..3).flat_map(update).collect::<Vec<_>>()
    };
    let told = warnings(None);
    let [warning] = &told[..] else { panic!("{told:?}") };
    assert_eq!(warning.kind, WarningKind::IgnoredEos);
    assert!(warning.message.ends_with("; --stop_token eos ends responses there"), "{}", warning.message);
    assert_eq!(warnings(Some(StopToken::Eos)), []);
}

#[test]
fn parts_that_do_not_go_together_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "out");
    let refused = |change: &dyn Fn(&mut PpoParts)| {
        let mut parts = parts(&config);
        change(&mut parts);
        PpoTrainer::new(&config, parts).unwrap_err().to_string()
    };
    let prompt = |tokens: Vec<i64>| Prompt { tokens, text: String::new(), row: Value::Null };
    assert_eq!(refused(&|p| p.rewards = Rewards::new()), "PpoParts::rewards: expected at least one, found none");
    assert_eq!(refused(&|p| p.prompts.clear()), "PpoParts::prompts: expected at least one, found none");
    let error = refused(&|p| p.prompts[1] = prompt(Vec::new()));
    assert!(error.starts_with("PpoParts::prompts: row 1: expected 1 to ") && error.ends_with("found 0"), "{error}");
    let error = refused(&|p| p.eval_prompts.push(prompt(vec![1; 100_000])));
    assert!(error.starts_with("PpoParts::eval_prompts: row 6: ") && error.ends_with("found 100000"), "{error}");
    assert_eq!(
        refused(&|p| p.prompts[2].tokens[0] = VOCAB),
        "PpoParts::prompts: row 2: expected ids below the policy's vocabulary of 320, found 320"
    );

    let new = || PpoTrainer::new(&config, parts(&config)).unwrap();
    let orders: [(Vec<usize>, &str); 2] = [(vec![0; 3], "3 rows"), (vec![0, 1, 6, 2], "row 6")];
    for (rows, found) in orders {
        let error = new().with_order(move |_| rows.clone()).update().unwrap_err().to_string();
        assert_eq!(error, format!("order: update 0: expected 4 rows, each below 6, found {found}"));
    }
    for rate in [f64::NAN, -1e-3] {
        let schedule = move |_| LearningRates { policy: Some(rate), value: 1e-3 };
        let error = new().with_schedule(schedule).update().unwrap_err().to_string();
        assert_eq!(error, format!("schedule: update 0: expected learning rates from 0, found {rate}"));
    }
}

#[test]
fn optimizers_whose_steps_make_no_finite_weights_are_refused_by_the_trainer_and_by_a_step() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "out");
    type Change = fn(&mut OptimizerConfig);
    let changes: [(Change, &str); 6] = [
        (|o| o.adam_beta1 = 1.0, "adam_beta1 = 1: expected a number from 0 to below 1"),
        (|o| o.adam_beta2 = 1.0, "adam_beta2 = 1: expected a number from 0 to below 1"),
        (|o| o.adam_epsilon = 0.0, "adam_epsilon = 0: expected a number above 0"),
        (|o| o.weight_decay = f64::NAN, "weight_decay = NaN: expected a number of 0 or more"),
        (|o| o.max_grad_norm = Some(-1.0), "max_grad_norm = -1: expected a number above 0"),
        (|o| o.max_grad_norm = Some(0.0), "max_grad_norm = 0: expected a number above 0"),
    ];
    for (change, message) in changes {
        let (usual, mut wrong) = (&config.optimizer, config.optimizer.clone());
        change(&mut wrong);
        for (policy, value, name) in [(&wrong, usual, "policy_optimizer"), (usual, &wrong, "value_optimizer")] {
            let parts = parts(&config);
            let mut learner = parts.learner.with_optimizers(policy, value);
            let step = learner.step(rates(1), &mut StepStats::default()).unwrap_err();
            assert_eq!(step.to_string(), format!("{name}: {message}"));
            let error = PpoTrainer::new(&config, PpoParts { learner, ..parts }).unwrap_err();
            assert_eq!((error.exit_code(), error.to_string()), (2, format!("PpoParts::learner: {name}: {message}")));
        }
    }
}

#[test]
fn the_pieces_of_a_step_make_the_trainers_updates_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), "out");
    config.whiten_rewards = true;
    let mut trainer = PpoTrainer::new(&config, parts(&config)).unwrap();
    let PpoParts { mut learner, reference, mut rewards, tokenizer, prompts, .. } = parts(&config);
    let (plan, stop) = (config.plan(prompts.len()).unwrap(), config.stop_tokens(&tokenizer).unwrap());
    let mut cursor = Cursor::new(config.run.seed, prompts.len());
    for update in 0..2 {
        let asked: Vec<&Prompt> = cursor.take(plan.batch_size).into_iter().map(|row| &prompts[row]).collect();
        let tokens: Vec<Vec<i64>> = asked.iter().map(|prompt| prompt.tokens.clone()).collect();
        let responses = generate(&learner.policy, &tokens, &config.generation(&stop, update)).unwrap();
        let scored = rewards.score_responses(&tokenizer, &asked, &responses, ScoreUse::Training).unwrap();
        let judges = learner.rollout_models(&reference);
        let scores = scored.to_scores(learner.policy.device());
        let experience = experience(
            judges,
            &tokens,
            &responses,
            scores,
            &RolloutSettings { recompute_logprobs: false, ..config.rollout(judges.policy) },
        )
        .unwrap();
        let (kl, rewards) = shape_rewards(&experience, config.kl.kl_coef, &config.shaping());
        let (advantages, returns) = advantages(&experience, &rewards, &config.shaping());
        let targets = Targets { kl, kl_coef: config.kl.kl_coef, rewards, advantages, returns };
        let orders = config.mini_batch_orders(update, plan.batch_size);
        let rates = config.learning_rates(update, plan.num_total_batches);
        let steps = learner.optimize(&experience, &targets, &orders, rates, &plan.epoch).unwrap();
        let mut found = rlhf::metrics::Metrics::default();
        learner.metrics(&mut found, &experience, &targets, &steps, &plan.epoch);
        let expected = trainer.update().unwrap();
        for (name, value) in found.iter() {
            assert_eq!(Some(value.to_bits()), expected.get(name).map(f64::to_bits), "update {update}: {name}");
        }
    }
    for (found, expected) in learner.policy.params().iter().zip(trainer.learner.policy.params()) {
        assert!(found.tensor.equal(&expected.tensor), "{}", found.name);
    }
}
