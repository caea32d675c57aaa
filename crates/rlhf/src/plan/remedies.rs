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
    if !uses_peft {
        add("--use_peft", &adapt);
    }
    if !low {
        add("--bf16", &|run| run.run_mut().bf16 = true);
    }
    if !uses_peft && !low {
        add("--use_peft --bf16", &|run| {
            adapt(run);
            run.run_mut().bf16 = true;
        });
    }
    if !settings.gradient_checkpointing {
        add("--gradient_checkpointing", &|run| run.run_mut().gradient_checkpointing = true);
    }
    let half = job.limit.min(job.largest_pass(job.limit).computed) / 2;
    for tokens in [half, LEAST_TOKENS] {
        if tokens >= LEAST_TOKENS && tokens < job.limit {
            let set = |run: &mut PlannedRun| run.run_mut().max_tokens_per_micro_batch = Some(tokens);
            add(&format!("--max_tokens_per_micro_batch {tokens}"), &set);
        }
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
    if config.local_rollout_forward_batch_size > 8 {
        let change = "--local_rollout_forward_batch_size 8";
        add(change, &edit(|config| config.local_rollout_forward_batch_size = 8));
    }
    if config.ema.enable_ema {
        add("without --enable_ema", &edit(|config| config.ema.enable_ema = false));
    }
}
