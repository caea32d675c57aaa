//! Tokens, operations and seconds of an update.

use super::members::Member;
use super::memory::Job;
use super::rates::Rates;
use super::rows::{MANY_PROMPTS, Row, tokens_of};
use super::{PlannedRun, PlannedTime, PlannedWork};
use crate::settings::PpoConfig;

/// Share of the products' rate that a pass reaches, as measured: attention, norms and the losses are not products.
const EFFICIENCY: f64 = 0.75;

/// The work of a mean update, of all ranks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Work {
    pub(super) planned: PlannedWork,
    /// Operations of reading the prompts and of decoding.
    prefill: f64,
    decode: f64,
    /// Steps of decoding, each of which reads all weights.
    decode_steps: f64,
    scoring: f64,
    training: f64,
    /// Bytes of weights, gradients and moments that the optimizer steps read and write.
    stepped: f64,
}

/// Tokens of a forward pass, as its operations are counted.
#[derive(Debug, Clone, Copy, Default)]
struct Read {
    /// Tokens that go through the layers.
    computed: usize,
    /// Tokens that go through the head.
    heads: usize,
    /// Sum of the squared lengths of the sequences: twice the pairs of tokens that attend to each other in a causal model.
    squares: f64,
}

impl Read {
    /// A pass over `update`, whose rows have `sequences` sequences of about equal lengths each.
    fn of(job: &Job<'_>, update: &[Row], sequences: f64) -> Self {
        let tokens = tokens_of(&update.iter().collect::<Vec<_>>(), job.shares());
        let squares = update.iter().map(|row| square(row.len)).sum::<f64>() / sequences;
        Self { computed: tokens.computed, heads: tokens.outputs, squares }
    }
}

fn square(len: usize) -> f64 {
    (len as f64).powi(2)
}

/// Operations of a forward pass of `member`.
fn forward(member: &Member<'_>, read: Read) -> f64 {
    let [layers, head] = member.sizes.products();
    let c = member.sizes.config();
    // Queries times keys, and weights times values.
    let width = c.num_hidden_layers as f64 * c.num_attention_heads as f64 * c.head_dim as f64;
    let pairs = if c.causal { read.squares / 2.0 } else { read.squares };
    2.0 * (read.computed as f64 * layers as f64 + read.heads as f64 * head as f64) + 4.0 * width * pairs
}

/// The work of a run.
pub(super) fn of(job: &Job<'_>) -> Work {
    let count = job.rows.updates.len().max(1) as f64;
    let mut work = Work::default();
    for update in &job.rows.updates {
        let tokens: usize = update.iter().map(|row| row.len).sum();
        work.planned.tokens_per_update += tokens as f64 / count;
        training(job, update, count, &mut work);
        if let Some(config) = job.ppo() {
            rollout(job, config, update, count, &mut work);
        }
    }
    work.planned.rows_per_update = job.rows.updates.first().map_or(0, Vec::len);
    work.planned.updates = updates(job);
    work.planned.flops_per_update = work.prefill + work.decode + work.scoring + work.training;
    let of_run = |of_update: f64| work.planned.updates.map(|updates| of_update * updates as f64);
    work.planned.tokens = of_run(work.planned.tokens_per_update);
    work.planned.flops = of_run(work.planned.flops_per_update);
    work
}

/// Number of updates; `None` if it depends on the number of rows, and that is not known.
fn updates(job: &Job<'_>) -> Option<usize> {
    let of_plan = |rows: usize| match job.run {
        PlannedRun::Sft(config) => config.plan_for(rows).map(|plan| plan.num_updates),
        PlannedRun::Reward(config) => config.plan_for(rows).map(|plan| plan.num_updates),
        PlannedRun::Ppo(config) => config.plan_for(rows).map(|plan| plan.num_total_batches),
    };
    match job.rows.available {
        Some(rows) => of_plan(rows.max(1)).ok(),
        None => of_plan(MANY_PROMPTS).ok().filter(|many| of_plan(2 * MANY_PROMPTS).is_ok_and(|more| more == *many)),
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
    let recomputed = if job.run.run().gradient_checkpointing { 1.0 } else { 0.0 };
    for member in job.members.iter().filter(|member| member.is_trained) {
        // The backward pass has a product for the gradient of the input, and one for that of a weight that is trained.
        let factor = if member.adapter.is_some() { 2.0 } else { 3.0 } + recomputed;
        work.training += epochs * factor * forward(member, read) / count;
        work.stepped += steps * (member.held.trained * 4 * 7) as f64 / count;
    }
}

/// Adds sampling, and the passes that evaluate the responses.
fn rollout(job: &Job<'_>, config: &PpoConfig, update: &[Row], count: f64, work: &mut Work) {
    let Some(policy) = job.members.first() else { return };
    let size = config.advantage.num_generations.max(1);
    let prompts = || update.iter().step_by(size).map(|row| row.prompt.len());
    let of_prompts =
        Read { computed: prompts().sum(), heads: update.len() / size, squares: prompts().map(square).sum() };
    work.prefill += forward(policy, of_prompts) / count;
    let responses = update.len() * config.response_length;
    // A sampled token attends to all tokens before it.
    let squares = update.iter().map(|row| square(row.len) - square(row.prompt.len())).sum();
    work.decode += forward(policy, Read { computed: responses, heads: responses, squares }) / count;
    let batches = update.len().div_ceil(config.local_rollout_forward_batch_size.max(1));
    work.decode_steps += (batches * config.response_length) as f64 / count;
    let read = Read::of(job, update, 1.0);
    for member in job.members.iter().filter(|member| member.role != "policy") {
        work.scoring += forward(member, read) / count;
    }
    let exact = job.compute == tch::Kind::Float;
    if !exact && config.needs_critic() {
        work.scoring += forward(policy, read) / count;
    }
}

/// Seconds of an update on a machine with these rates, which its ranks share.
pub(super) fn time(job: &Job<'_>, rates: &Rates, work: &Work) -> PlannedTime {
    let rate = rates.flops * EFFICIENCY;
    // Ranks on a machine without a GPU share its processors, so all of its work goes at its rate.
    let weights = job.members.first().map_or(0.0, |policy| {
        let [layers, head] = policy.sizes.products();
        ((layers + head) * job.compute.elt_size_in_bytes()) as f64
    });
    let decoding = (work.decode_steps * weights / rates.bytes).max(work.decode / rate);
    let rollout = if job.ppo().is_some() { work.prefill / rate + decoding } else { 0.0 };
    let scoring = work.scoring / rate;
    let training = work.training / rate + work.stepped / rates.bytes;
    let update = rollout + scoring + training;
    PlannedTime {
        flops_per_second: rates.flops,
        bytes_per_second: rates.bytes,
        rollout,
        scoring,
        training,
        update,
        total: work.planned.updates.map(|updates| update * updates as f64),
    }
}
