//! Tokens, operations and seconds of an update.

use super::members::Member;
use super::memory::Job;
use super::operations::{Operations, Read, factor, forward};
use super::rates::Rates;
use super::rows::{MANY_PROMPTS, Row};
use super::{PlannedRun, PlannedTime, PlannedWork, Role};
use crate::settings::{DistillConfig, PpoConfig};

/// The work of a mean update, of all ranks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Work {
    pub(super) planned: PlannedWork,
    /// Operations of prefill and of decoding.
    prefill: Operations,
    decode: Operations,
    /// Steps of decoding.
    decode_steps: f64,
    scoring: Operations,
    training: Operations,
    /// Bytes of weights, gradients and moments that the optimizer steps read and write.
    stepped: f64,
}

/// The work of a run.
pub(super) fn of(job: &Job<'_>) -> Work {
    let count = job.rows.updates.len().max(1) as f64;
    let mut work = Work::default();
    for (at, update) in job.rows.updates.iter().enumerate() {
        let tokens: usize = update.iter().map(|row| row.len).sum();
        work.planned.tokens_per_update += tokens as f64 / count;
        training(job, update, count, &mut work);
        match job.run {
            PlannedRun::Ppo(config) => rollout(job, config, update, count, &mut work),
            PlannedRun::Dpo(_) => scoring(job, update, count, &mut work),
            PlannedRun::Distill(config) => {
                sampling(job, config, at, count, &mut work);
                scoring(job, update, count, &mut work);
            }
            PlannedRun::Sft(_) | PlannedRun::Reward(_) => {}
        }
    }
    work.planned.rows_per_update = job.rows.updates.first().map_or(0, Vec::len) / job.rows.rows_per_item;
    work.planned.updates = updates(job);
    work.planned.flops_per_update =
        [work.prefill, work.decode, work.scoring, work.training].iter().map(|part| part.total()).sum();
    let run_total = |update_total: f64| work.planned.updates.map(|updates| update_total * updates as f64);
    work.planned.tokens = run_total(work.planned.tokens_per_update);
    work.planned.flops = run_total(work.planned.flops_per_update);
    work
}

/// Number of updates; `None` if it depends on the number of rows, and that is not known.
fn updates(job: &Job<'_>) -> Option<usize> {
    let planned_updates = |rows: usize| match job.run {
        PlannedRun::Sft(config) => config.plan_for(rows).map(|plan| plan.num_updates),
        PlannedRun::Reward(config) => config.plan_for(rows).map(|plan| plan.num_updates),
        PlannedRun::Dpo(config) => config.plan_for(rows).map(|plan| plan.num_updates),
        PlannedRun::Distill(config) => config.plan_for(rows).map(|plan| plan.num_updates),
        PlannedRun::Ppo(config) => config.plan_for(rows).map(|plan| plan.num_total_batches),
    };
    match job.rows.available {
        Some(rows) => planned_updates(rows.max(1)).ok(),
        None => planned_updates(MANY_PROMPTS)
            .ok()
            .filter(|many| planned_updates(2 * MANY_PROMPTS).is_ok_and(|more| more == *many)),
    }
}

/// Adds forward and backward passes over `update`, and the optimizer steps.
fn training(job: &Job<'_>, update: &[Row], count: f64, work: &mut Work) {
    let sequences = if matches!(job.run, PlannedRun::Reward(_)) { 2.0 } else { 1.0 };
    let read = Read::of(job, update, sequences);
    let (epochs, steps) = match job.ppo() {
        Some(config) => {
            let epoch = config.plan_for(MANY_PROMPTS).map_or(1, |plan| plan.epoch.steps(update.len().max(1)));
            (config.num_ppo_epochs as f64, (epoch * config.num_ppo_epochs) as f64)
        }
        None => (1.0, 1.0),
    };
    for member in job.members.iter().filter(|member| member.is_trained) {
        work.training.add(forward(member.sizes, read), epochs * factor(job, member) / count);
        work.stepped += steps * (member.footprint.trained * 4 * 7) as f64 / count;
    }
    let texts = job.rows.texts(update.len() / job.rows.rows_per_item);
    if let (false, Some(policy)) = (texts.is_empty(), job.members.first()) {
        let read = Read::of_rows(&texts, false, 1.0);
        work.training.add(forward(policy.sizes, read), epochs * factor(job, policy) / count);
    }
}

/// Adds sampling, and the passes that evaluate the responses.
fn rollout(job: &Job<'_>, config: &PpoConfig, update: &[Row], count: f64, work: &mut Work) {
    let Some(policy) = job.members.first() else { return };
    let size = config.advantage.num_generations.max(1);
    let sizes = (size, config.response_length, config.local_rollout_forward_batch_size);
    decoding(policy, update, sizes, count, work);
    scoring(job, update, count, work);
    let read = Read::of(job, update, 1.0);
    let exact = job.compute == tch::Kind::Float;
    if !exact && config.needs_critic() {
        work.scoring.add(forward(policy.sizes, read), 1.0 / count);
    }
}

/// Adds sampling of `size` responses of `new_tokens` to each prompt of `update`, `rows` of them at once.
fn decoding(
    member: &Member<'_>,
    update: &[Row],
    (size, new_tokens, rows): (usize, usize, usize),
    count: f64,
    work: &mut Work,
) {
    let prompts: Vec<usize> = update.iter().step_by(size).map(|row| row.prompt.len()).collect();
    work.prefill.add(forward(member.sizes, Read::of_prompts(member.sizes, &prompts)), 1.0 / count);
    let decoded = Read::of_responses(member.sizes, &prompts, size, new_tokens);
    work.decode.add(forward(member.sizes, decoded), 1.0 / count);
    let batches = update.len().div_ceil(rows.max(1));
    work.decode_steps += (batches * new_tokens) as f64 / count;
}

/// Adds sampling of distillation's responses of the update at `at`, if a model samples them.
fn sampling(job: &Job<'_>, config: &DistillConfig, at: usize, count: f64, work: &mut Work) {
    let Some(Some(role)) = job.rows.samplers.get(at).copied() else { return };
    let (Some(student), Some(sampler)) = (job.members.first(), job.members.iter().find(|member| member.role == role))
    else {
        return;
    };
    let before = work.decode_steps;
    let sizes = (1, config.max_completion_length, config.local_rollout_forward_batch_size);
    decoding(sampler, &job.rows.updates[at], sizes, count, work);
    // The measured rate is the student's. A step reads all weights, so its time is in proportion to them.
    let products = |member: &Member<'_>| member.sizes.products().iter().sum::<usize>().max(1) as f64;
    work.decode_steps = before + (work.decode_steps - before) * products(sampler) / products(student);
}

/// Adds a pass over `update` of each model except the policy or the student.
fn scoring(job: &Job<'_>, update: &[Row], count: f64, work: &mut Work) {
    for member in
        job.members.iter().filter(|member| !matches!(member.role, Role::Policy | Role::Model) && !member.is_dropped)
    {
        let read = Read::of(job, &job.read_by(member, update), 1.0);
        work.scoring.add(forward(member.sizes, read), 1.0 / count);
    }
}

/// Seconds of an update on a machine with these rates, which its ranks share.
pub(super) fn time(rates: &Rates, work: &Work) -> PlannedTime {
    // Ranks on a machine without a GPU share its processors, so the work of all ranks runs at the rate of the whole machine.
    let rollout = rates.forward.seconds(work.prefill) + work.decode_steps * rates.step;
    let scoring = rates.forward.seconds(work.scoring);
    let training = rates.training.seconds(work.training) + work.stepped / rates.bytes;
    let update = rollout + scoring + training;
    PlannedTime {
        flops_per_second: work.training.total() / rates.training.seconds(work.training).max(1e-9),
        seconds_per_token: rates.step,
        rollout,
        scoring,
        training,
        update,
        total: work.planned.updates.map(|updates| update * updates as f64),
    }
}
