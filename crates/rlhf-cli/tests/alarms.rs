//! Alarms of runs that are made to collapse, and what a run does then.

use crate::checkpoint::{assert_same, copy_dir, ppo_config};
use crate::cli::{PPO, Scratch, json_lines};
use crate::support::near;
use rlhf::Error;
use rlhf::run::{Console, Event, WarningKind};
use rlhf::settings::{LrSchedulerType, PpoConfig, ReportTo, Resume};
use rlhf::train::ppo::{PpoTrainer, ppo};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::ops::ControlFlow::Continue;
use std::path::Path;

/// The alarms that updates in a loop of the caller's raise, with the update of each.
fn raised(trainer: &mut PpoTrainer) -> Vec<(usize, WarningKind)> {
    let mut found = Vec::new();
    while trainer.updates_done() < trainer.plan.num_total_batches {
        trainer.update().unwrap();
        let update = trainer.updates_done();
        found.extend(trainer.warnings().iter().map(|warning| (update, warning.kind)));
    }
    found
}

fn lines(dir: &Path, name: &str) -> Vec<Map<String, Value>> {
    json_lines(&std::fs::read_to_string(dir.join(name)).unwrap())
}

/// Twelve updates with checkpoints, samples and tables off.
fn twelve_updates(dir: &Path) -> PpoConfig {
    let mut config = ppo_config(dir);
    config.total_episodes = Some(48);
    config.optimizer.max_grad_norm = None;
    config.optimizer.lr_scheduler_type = LrSchedulerType::Constant;
    config.optimizer.warmup_steps = 0;
    config.eval.eval_steps = None;
    config.eval.metric_for_best_model = None;
    config.num_sample_generations = 0;
    config.run.tracking.report_to = Vec::new();
    config
}

#[test]
fn a_learning_rate_that_is_much_too_high_is_reported_as_kl_entropy_and_clipped_tokens() {
    let dir = tempfile::tempdir().unwrap();
    for (rate, epochs, expected) in [
        (0.3, 2, vec![WarningKind::RunawayKl, WarningKind::LowEntropy]),
        (0.003, 10, vec![WarningKind::RunawayKl, WarningKind::HighClipShare]),
    ] {
        let config = PpoConfig { learning_rate: rate, num_ppo_epochs: epochs, ..twelve_updates(dir.path()) };
        let found = raised(&mut PpoTrainer::from_config(&config).unwrap());
        for kind in expected {
            assert_eq!(found.iter().filter(|(_, found)| *found == kind).count(), 1, "{rate}: {kind:?} in {found:?}");
        }
    }
}

#[test]
fn a_reward_that_is_the_same_for_all_responses_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = twelve_updates(dir.path());
    config.learning_rate = 1e-4;
    config.reward_model_path = None;
    config.rewards.reward = vec!["never=regex:ZZZZ".into()];
    config.rewards.reward_normalize = Vec::new();
    (config.per_device_train_batch_size, config.total_episodes) = (Some(32), Some(320));
    let found = raised(&mut PpoTrainer::from_config(&config).unwrap());
    // 256 responses are eight updates.
    assert!(found.contains(&(8, WarningKind::EqualScores)), "{found:?}");
}

#[test]
fn a_critic_that_predicts_nonsense_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = twelve_updates(dir.path());
    config.learning_rate = 1e-4;
    config.lam = 1.0;
    config.value.value_learning_rate = Some(0.0);
    let mut trainer = PpoTrainer::from_config(&config).unwrap();
    let head = trainer.learner.value.params().iter().find(|param| param.name == "score.weight").unwrap();
    let _ = tch::no_grad(|| head.tensor.shallow_clone().g_mul_scalar_(1e3));
    let found = raised(&mut trainer);
    assert!(found.contains(&(10, WarningKind::NegativeExplainedVariance)), "{found:?}");
}

#[test]
fn a_healthy_run_raises_no_alarm_and_leaves_no_file_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let config = PpoConfig { learning_rate: 1e-4, ..twelve_updates(dir.path()) };
    let mut seen = Vec::new();
    let mut trainer = PpoTrainer::from_config(&config).unwrap();
    let ended = trainer.train_with(|event| {
        if let Event::Warning { step, warning } = event {
            seen.push((*step, warning.kind));
        }
        Continue(())
    });
    assert_eq!((ended.unwrap(), seen), (12, Vec::new()));
    assert!(!config.run.output_dir.join("alarms.jsonl").exists());
}

/// The updates whose lines are in `metrics.jsonl`, with their learning rates.
fn rates(dir: &Path) -> Vec<(u64, f64)> {
    lines(dir, "metrics.jsonl")
        .iter()
        .map(|line| (line["step"].as_u64().unwrap(), line["lr"].as_f64().unwrap()))
        .collect()
}

#[test]
fn an_alarm_stops_a_run_with_a_checkpoint_and_an_exit_code_and_it_resumes() {
    let scratch = Scratch::new();
    let line = format!(
        "{PPO} --total_episodes 48 --learning_rate 0.3 --lr_scheduler_type constant --num_sample_generations 0"
    );
    let ran = scratch.run(&format!("{line} --on_alarm runaway_kl=stop"));
    let error = ran.stderr.lines().last().unwrap().to_string();
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    let alarms = lines(&scratch.path("out"), "alarms.jsonl");
    let alarm = alarms.iter().find(|line| line["alarm"] == "runaway_kl").unwrap();
    let step = alarm["step"].as_u64().unwrap();
    assert!(alarm["message"].as_str().unwrap().starts_with(&format!("update {step}: the KL to the reference is ")));
    let words = format!(
        "error: stopped after update {step} by the alarm runaway_kl (on_alarm = runaway_kl=stop); the model as far as"
    );
    assert!(error.starts_with(&words), "{error}");
    assert!(error.ends_with(" ppo --config out/config.yaml --resume_from_checkpoint true"), "{error}");
    assert_eq!(lines(&scratch.path("out"), "metrics.jsonl").len() as u64, step);
    // The alarm is raised once in a run.
    let resumed = scratch.run(&format!("{line} --on_alarm runaway_kl=stop --resume_from_checkpoint true"));
    assert!(resumed.code == 0 && !resumed.stderr.contains("the KL to the reference"), "{}", resumed.stderr);
    assert_eq!(lines(&scratch.path("out"), "metrics.jsonl").len(), 12);
    let again = lines(&scratch.path("out"), "alarms.jsonl");
    assert_eq!(again.iter().filter(|line| line["alarm"] == "runaway_kl").count(), 1);
}

/// The learning rate of [`rolling_back`].
const RATE: f64 = 0.02;

/// A run whose learning rate rises until its KL runs away, and which then rolls back; with a checkpoint after every second update.
pub(crate) fn rolling_back(dir: &Path) -> PpoConfig {
    let mut config = twelve_updates(dir);
    config.learning_rate = RATE;
    config.optimizer.lr_scheduler_type = LrSchedulerType::ConstantWithWarmup;
    config.optimizer.warmup_steps = 10;
    config.run.checkpoints.save_steps = Some(2.into());
    config.alarms.on_alarm = vec!["runaway_kl=rollback".into()];
    config.alarms.max_rollbacks = 9;
    config.run.tracking.report_to = vec![ReportTo::Tensorboard];
    config.rollout_log.log_rollouts = true;
    config.num_sample_generations = 6;
    config
}

#[test]
fn a_rollback_continues_from_the_last_checkpoint_with_half_the_learning_rate_and_other_samples() {
    let dir = tempfile::tempdir().unwrap();
    let config = rolling_back(dir.path());
    let (mut trainer, mut seen, mut rollbacks) = (PpoTrainer::from_config(&config).unwrap(), Vec::new(), Vec::new());
    let done = trainer.train_with(|event| {
        match event {
            Event::Update { step, metrics } => seen.push((*step, metrics.get("objective/scores").unwrap())),
            Event::RolledBack { step, to, .. } => rollbacks.push((*step, *to)),
            _ => {}
        }
        Continue(())
    });
    assert_eq!(done.unwrap(), 12);
    let out = &config.run.output_dir;
    assert!(!rollbacks.is_empty(), "{:?}", lines(out, "alarms.jsonl"));
    // The policy after `step - 1` updates is the one whose KL raised the alarm; every second update has a checkpoint.
    assert!(rollbacks.iter().all(|(step, to)| *to < step - 1 && *to > 0 && to % 2 == 0), "{rollbacks:?}");
    // Each update once, with half the rate of the schedule for each rollback before it.
    let rates = rates(out);
    assert_eq!(rates.iter().map(|(step, _)| *step).collect::<Vec<_>>(), (1..=12).collect::<Vec<_>>());
    for (step, rate) in &rates {
        let halvings = rollbacks.iter().rposition(|(_, to)| (*to as u64) < *step).map_or(0, |last| last + 1);
        let scheduled = RATE * (*step as f64 - 1.0).min(10.0) / 10.0;
        near("rate", *rate, scheduled * 0.5f64.powi(halvings as i32), 1e-12);
    }
    // An update that is done again has other responses.
    let (step, to) = rollbacks[0];
    let scores: BTreeSet<u64> =
        seen.iter().filter(|(done, _)| *done == to + 1).map(|(_, score)| score.to_bits()).collect();
    assert!(scores.len() > 1, "update {} was done again after {step}", to + 1);
    let names: Vec<String> = lines(out, "alarms.jsonl").iter().map(|line| line["alarm"].to_string()).collect();
    assert_eq!(names.iter().filter(|name| *name == "\"rollback\"").count(), rollbacks.len(), "{names:?}");
    let files = std::fs::read_dir(out.join("rollouts")).unwrap();
    let mut files: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    files.sort_unstable();
    assert_eq!(files, (1..=12).map(|step| format!("update-{step:06}.parquet")).collect::<Vec<_>>());
}

#[test]
fn a_run_that_is_killed_before_or_after_a_rollback_resumes_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let config = rolling_back(dir.path());
    ppo(&config, Console::Silent).unwrap();
    let whole = config.run.output_dir.clone();
    let alarms = std::fs::read_to_string(whole.join("alarms.jsonl")).unwrap();
    assert!(alarms.contains("\"rollback\""), "{alarms}");
    for stop in [2, 4, 6, 8, 10] {
        let killed = dir.path().join(format!("killed-{stop}"));
        copy_dir(&whole, &killed);
        for later in stop + 1..=12 {
            let _ = std::fs::remove_dir_all(killed.join(format!("checkpoint-{later}")));
        }
        std::fs::remove_file(killed.join("model.safetensors")).unwrap();
        let mut config = config.clone();
        config.run.output_dir = killed.clone();
        config.run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
        ppo(&config, Console::Silent).unwrap();
        assert_same(&killed, &whole, 12);
    }
}

#[test]
fn a_run_stops_after_its_last_rollback_and_without_a_checkpoint_to_return_to() {
    let dir = tempfile::tempdir().unwrap();
    let stopped = |change: &dyn Fn(&mut PpoConfig)| {
        let mut config = rolling_back(dir.path());
        config.run.overwrite_output_dir = true;
        change(&mut config);
        match ppo(&config, Console::Silent).unwrap_err() {
            Error::Stopped { message, code: 3 } => message,
            other => panic!("{other}"),
        }
    };
    // The rate of the first update is 0: the KL begins to move with the second one, and has run away in the third.
    let message = stopped(&|config| {
        (config.learning_rate, config.alarms.max_rollbacks) = (1.0, 1);
        config.run.checkpoints.save_steps = Some(1.into());
    });
    assert!(
        message.contains("runaway_kl (on_alarm = runaway_kl=rollback, but max_rollbacks = 1 of them are done)"),
        "{message}"
    );
    let message = stopped(&|config| config.run.checkpoints.save_steps = Some(12.into()));
    assert!(
        message.contains("runaway_kl (on_alarm = runaway_kl=rollback, but there is no checkpoint of the policy before it began to move, in update "),
        "{message}"
    );
    // The action of an alarm comes before that of all.
    let message = stopped(&|config| {
        config.learning_rate = 1.0;
        config.alarms.on_alarm = vec!["runaway_kl=stop".into(), "all=rollback".into()];
    });
    assert!(message.contains("by the alarm runaway_kl (on_alarm = runaway_kl=stop)"), "{message}");
}

#[test]
fn actions_on_alarms_are_refused_in_one_line_with_the_names() {
    let scratch = Scratch::new();
    for (flags, words) in [
        (
            "--on_alarm kl=stop",
            "error: on_alarm = kl=stop: expected NAME=warn, stop or rollback, with a NAME of runaway_kl, low_entropy, ",
        ),
        (
            "--on_alarm all=rollback",
            "error: on_alarm = all=rollback needs save_steps: a rollback continues from the last checkpoint",
        ),
        (
            "--on_alarm all=stop --max_rollbacks 2",
            "error: max_rollbacks = 2 has no effect without on_alarm = NAME=rollback",
        ),
    ] {
        let ran = scratch.run(&format!("{PPO} {flags}"));
        assert!(ran.code == 2 && ran.stderr.starts_with(words) && ran.stderr.lines().count() == 1, "{}", ran.stderr);
    }
}
