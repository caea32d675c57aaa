//! Changes that lower the peak, each planned by itself.

use super::members::Models;
use super::memory::Job;
use super::rows::Rows;
use super::{PlannedRun, Remedy};
use crate::Result;
use crate::dist::ZeroStage;
use tch::Device;

/// Smallest micro-batch that is proposed, in tokens.
const LEAST_TOKENS: usize = 128;

/// Number of rows of a smaller batch of sampling and scoring.
const ROWS: usize = 8;

/// Returns the changes that lower the peak of `job`, the most effective first.
///
/// # Errors
/// None for a run that was planned.
pub(super) fn find(run: &PlannedRun, models: &Models, rows: &Rows, job: &Job<'_>) -> Result<Vec<Remedy>> {
    let peak = job.memory().peak;
    let mut found = Vec::new();
    for (change, changed) in changes(run, job) {
        let mut machine = job.machine;
        if let Change::Machines(count) = changed.1 {
            machine.ranks *= count;
        }
        // A combination that the settings do not allow is no remedy.
        if changed.0.check().is_err() {
            continue;
        }
        let Ok(other) = Job::new(&changed.0, models, rows, machine) else { continue };
        let memory = other.memory();
        if memory.peak < peak {
            found.push(Remedy { change, peak: memory.peak, saves: peak - memory.peak, fits: memory.fits });
        }
    }
    found.sort_by_key(|remedy| remedy.peak);
    Ok(found)
}

/// The part of a change that is not one of settings.
enum Change {
    None,
    /// The same run on this many times as many ranks, each of the others with a memory of its own.
    Machines(usize),
}

/// The changes that could help, with the run as it would be.
fn changes(run: &PlannedRun, job: &Job<'_>) -> Vec<(String, (PlannedRun, Change))> {
    let mut found: Vec<(String, (PlannedRun, Change))> = Vec::new();
    let mut add = |change: &str, edit: &dyn Fn(&mut PlannedRun)| {
        let mut changed = run.clone();
        edit(&mut changed);
        found.push((change.to_string(), (changed, Change::None)));
    };
    let settings = run.run();
    let uses_peft = match run {
        PlannedRun::Sft(config) => config.peft.use_peft,
        PlannedRun::Reward(config) => config.peft.use_peft,
        PlannedRun::Ppo(config) => config.peft.use_peft,
    };
    let adapt = |run: &mut PlannedRun| match run {
        PlannedRun::Sft(config) => config.peft.use_peft = true,
        PlannedRun::Reward(config) => config.peft.use_peft = true,
        PlannedRun::Ppo(config) => config.peft.use_peft = true,
    };
    let low = settings.bf16 || settings.fp16;
    let mut simple: Vec<(String, Box<dyn Fn(&mut PlannedRun)>)> = Vec::new();
    if !uses_peft {
        simple.push(("--use_peft".into(), Box::new(adapt)));
    }
    if !low {
        simple.push(("--bf16".into(), Box::new(|run| run.run_mut().bf16 = true)));
    }
    if !settings.gradient_checkpointing {
        simple.push(("--gradient_checkpointing".into(), Box::new(|run| run.run_mut().gradient_checkpointing = true)));
    }
    let tokens = smaller(job);
    if tokens < job.limit {
        let set = move |run: &mut PlannedRun| run.run_mut().max_tokens_per_micro_batch = Some(tokens);
        simple.push((format!("--max_tokens_per_micro_batch {tokens}"), Box::new(set)));
    }
    if let PlannedRun::Ppo(config) = run
        && config.local_rollout_forward_batch_size > ROWS
    {
        let set = |run: &mut PlannedRun| {
            if let PlannedRun::Ppo(config) = run {
                config.local_rollout_forward_batch_size = ROWS;
            }
        };
        simple.push((format!("--local_rollout_forward_batch_size {ROWS}"), Box::new(set)));
    }
    simple.iter().for_each(|(change, edit)| add(change, edit));
    if simple.len() > 1 {
        let words: Vec<&str> = simple.iter().map(|(change, _)| change.as_str()).collect();
        add(&words.join(" "), &|run| simple.iter().for_each(|(_, edit)| edit(run)));
    }
    of_ppo(run, &mut add);
    let (stage, ranks) = (settings.dist.zero_stage, job.machine.ranks);
    for next in [ZeroStage::Stage1, ZeroStage::Stage2, ZeroStage::Stage3] {
        if ranks > 1 && next > stage {
            add(&format!("--zero_stage {next}"), &|run| run.run_mut().dist.zero_stage = next);
        }
    }
    let place = if job.machine.device == Device::Cpu { "machines" } else { "GPUs" };
    let mut changed = run.clone();
    changed.run_mut().dist.zero_stage = ZeroStage::Stage3;
    found.push((format!("--zero_stage 3 on {} {place} like this one", 2 * ranks), (changed, Change::Machines(2))));
    found
}

/// A smaller number of tokens of a micro-batch: the largest that fits, or half of what the run has.
fn smaller(job: &Job<'_>) -> usize {
    let own = job.micro_batch(&job.memory());
    let fits = own.largest.unwrap_or(0) / LEAST_TOKENS * LEAST_TOKENS;
    if (1..own.tokens).contains(&fits) { fits } else { (own.tokens / 2).max(LEAST_TOKENS) }
}

/// Adds the changes of a PPO run.
fn of_ppo(run: &PlannedRun, add: &mut dyn FnMut(&str, &dyn Fn(&mut PlannedRun))) {
    let PlannedRun::Ppo(config) = run else { return };
    let edit = |f: fn(&mut crate::settings::PpoConfig)| {
        move |run: &mut PlannedRun| {
            if let PlannedRun::Ppo(config) = run {
                f(config);
            }
        }
    };
    if config.needs_critic() && !config.legacy.value_head {
        add(
            "--value_head (the policy's trunk is the value model's too)",
            &edit(|config| config.legacy.value_head = true),
        );
    }
    if config.ema.enable_ema {
        add("without --enable_ema", &edit(|config| config.ema.enable_ema = false));
    }
}
