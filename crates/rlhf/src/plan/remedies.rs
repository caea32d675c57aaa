//! Changes that lower the peak, each planned alone.

use super::members::Models;
use super::memory::Job;
use super::rows::Rows;
use super::{Machine, PlannedMemory, PlannedRun, Remedy};
use crate::settings::{DistillConfig, OffloadPart, PpoConfig};
use rlhf_base::dist::{ZeroStage, as_ranks};
use rlhf_lm::optim::Optim;
use rlhf_lm::optim::micro_batch::MicroBatchLimit;
use tch::Device;

/// Smallest micro-batch that is proposed, in tokens.
const LEAST_TOKENS: usize = 128;

/// Number of rows of a smaller batch of sampling and scoring.
const ROWS: usize = 8;

/// Bytes that a change saves, at least.
const LEAST_SAVED: usize = 1 << 20;

/// A change of settings.
struct Edit {
    /// Its flags.
    flags: String,
    /// Its effect on what is trained.
    effect: Option<String>,
    apply: Box<dyn Fn(&mut PlannedRun)>,
}

impl Edit {
    fn new(flags: impl Into<String>, apply: impl Fn(&mut PlannedRun) + 'static) -> Self {
        Self { flags: flags.into(), effect: None, apply: Box::new(apply) }
    }

    /// A change of the settings of PPO; none for other runs.
    fn of_ppo(flags: impl Into<String>, apply: impl Fn(&mut PpoConfig) + 'static) -> Self {
        Self::new(flags, move |run| {
            if let PlannedRun::Ppo(config) = run {
                apply(config);
            }
        })
    }

    /// A change of the settings of distillation; none for other runs.
    fn of_distillation(flags: impl Into<String>, apply: impl Fn(&mut DistillConfig) + 'static) -> Self {
        Self::new(flags, move |run| {
            if let PlannedRun::Distill(config) = run {
                apply(config);
            }
        })
    }

    /// Adds an effect on what is trained.
    fn with_effect(self, effect: &str) -> Self {
        Self { effect: Some(effect.into()), ..self }
    }

    /// All of `edits` at once.
    fn together(edits: Vec<Self>) -> Self {
        let flags: Vec<&str> = edits.iter().map(|edit| edit.flags.as_str()).collect();
        let effects: Vec<&str> = edits.iter().filter_map(|edit| edit.effect.as_deref()).collect();
        let (flags, effect) = (flags.join(" "), (!effects.is_empty()).then(|| effects.join(", ")));
        let together = Self::new(flags, move |run| edits.iter().for_each(|edit| (edit.apply)(run)));
        Self { effect, ..together }
    }
}

/// Returns the changes that lower the peak of `job`, the most effective first.
pub(super) fn find(run: &PlannedRun, models: &Models, rows: &Rows, job: &Job<'_>) -> Vec<Remedy> {
    let peak = job.memory().peak;
    let mut remedies: Vec<Remedy> = Vec::new();
    let mut add = |change: String, edit: &Edit, machine: Machine| {
        if remedies.iter().any(|known: &Remedy| known.change == change) {
            return;
        }
        let mut changed = run.clone();
        (edit.apply)(&mut changed);
        // A combination that the settings do not allow is no remedy.
        let allowed = changed.check().is_ok().then(|| Job::new(&changed, models, rows, machine).ok()).flatten();
        let saved = |memory: &PlannedMemory| peak.saturating_sub(memory.peak);
        if let Some(memory) = allowed.map(|other| other.memory()).filter(|memory| saved(memory) >= LEAST_SAVED) {
            let effect = edit.effect.clone();
            remedies.push(Remedy { change, effect, peak: memory.peak, saves: saved(&memory), fits: memory.fits });
        }
    };
    for edit in simple(run, job).iter().chain(&structural(run, job)) {
        add(edit.flags.clone(), edit, job.machine);
    }
    for all in [simple(run, job), simple(run, job).into_iter().chain(four_bits(run)).collect()] {
        if all.len() > 1 {
            let all = Edit::together(all);
            add(all.flags.clone(), &all, job.machine);
        }
    }
    let place = if job.machine.device == Device::Cpu { "machines" } else { "GPUs" };
    let divided = Edit::new("--zero_stage 3", |run| run.run_mut().dist.zero_stage = ZeroStage::Stage3);
    let ranks = 2 * job.machine.ranks;
    // More ranks mean more rows, unless the settings fix the size of the whole batch.
    let batch_size = |ranks| as_ranks(ranks, || run.batch_size().ok());
    let row_ranks = if batch_size(ranks) == batch_size(job.machine.ranks) { ranks } else { job.machine.row_ranks };
    add(
        format!("--zero_stage 3 on {ranks} {place} like this one"),
        &divided,
        Machine { ranks, row_ranks, ..job.machine },
    );
    remedies.sort_by_key(|remedy| remedy.peak);
    remedies
}

/// Adapters, unless the run has some.
fn adapters(job: &Job<'_>) -> Option<Edit> {
    let adapters = Edit::new("--use_peft", |run| match run {
        PlannedRun::Sft(config) => config.peft.use_peft = true,
        PlannedRun::Reward(config) => config.peft.use_peft = true,
        PlannedRun::Dpo(config) => config.peft.use_peft = true,
        PlannedRun::Distill(config) => config.peft.use_peft = true,
        PlannedRun::Ppo(config) => config.peft.use_peft = true,
    });
    let is_new = job.members.iter().all(|member| member.adapter.is_none());
    is_new.then(|| adapters.with_effect("trains adapters alone"))
}

/// Frozen weights in 4 bits, unless they are quantized.
fn four_bits(run: &PlannedRun) -> Option<Edit> {
    if let PlannedRun::Distill(config) = run {
        let four = Edit::of_distillation("--teacher_load_in_4bit", |config| {
            config.teacher_quantization.teacher_load_in_4bit = Some(true);
        });
        return config.teacher_format().is_none().then(|| four.with_effect("the teacher has 4 bits"));
    }
    let four = Edit::new("--load_in_4bit", |run| run.run_mut().quantization.load_in_4bit = true);
    run.run().quantization.quantization().is_none().then(|| four.with_effect("frozen weights have 4 bits"))
}

/// Changes of settings that leave the models as they are.
fn simple(run: &PlannedRun, job: &Job<'_>) -> Vec<Edit> {
    let settings = run.run();
    let mut edits = Vec::new();
    edits.extend(adapters(job));
    if !(settings.bf16 || settings.fp16) {
        edits.push(Edit::new("--bf16", |run| run.run_mut().bf16 = true));
    }
    if !settings.gradient_checkpointing {
        edits.push(Edit::new("--gradient_checkpointing", |run| run.run_mut().gradient_checkpointing = true));
    }
    let tokens = smaller(job);
    if tokens < job.limit.min(job.largest_pass(job.limit).computed) {
        let set = move |run: &mut PlannedRun| {
            run.run_mut().max_tokens_per_micro_batch = Some(MicroBatchLimit::Tokens(tokens));
        };
        edits.push(Edit::new(format!("--max_tokens_per_micro_batch {tokens}"), set));
    }
    let rows = match run {
        PlannedRun::Ppo(config) => config.local_rollout_forward_batch_size,
        PlannedRun::Distill(config) if config.samples() => config.local_rollout_forward_batch_size,
        PlannedRun::Sft(_) | PlannedRun::Reward(_) | PlannedRun::Dpo(_) | PlannedRun::Distill(_) => 0,
    };
    if rows > ROWS {
        let flags = format!("--local_rollout_forward_batch_size {ROWS}");
        edits.push(Edit::new(flags, |run| match run {
            PlannedRun::Ppo(config) => config.local_rollout_forward_batch_size = ROWS,
            PlannedRun::Distill(config) => config.local_rollout_forward_batch_size = ROWS,
            PlannedRun::Sft(_) | PlannedRun::Reward(_) | PlannedRun::Dpo(_) => {}
        }));
    }
    edits
}

/// Changes of the models, and of their division over the ranks.
fn structural(run: &PlannedRun, job: &Job<'_>) -> Vec<Edit> {
    let mut edits = Vec::new();
    if let Some(config) = job.ppo() {
        if config.needs_critic() && !config.legacy.value_head {
            let head = Edit::of_ppo("--value_head", |config| config.legacy.value_head = true);
            edits.push(head.with_effect("the critic is a head on the policy"));
        }
        if config.ema.enable_ema {
            let none = Edit::of_ppo("--enable_ema=false", |config| config.ema.enable_ema = false);
            edits.push(none.with_effect("no moving average of the policy"));
        }
    }
    if let PlannedRun::Dpo(config) = run
        && !config.precompute_ref_log_probs
    {
        edits.push(Edit::new("--precompute_ref_log_probs", |run| {
            if let PlannedRun::Dpo(config) = run {
                config.precompute_ref_log_probs = true;
            }
        }));
    }
    if let Some(four) = four_bits(run) {
        // Quantized weights are frozen, so a trained model needs an adapter; a teacher is frozen anyway.
        let others = adapters(job).filter(|_| job.distillation().is_none());
        edits.push(Edit::together(others.into_iter().chain([four]).collect()));
    }
    let offload = &run.run().offload;
    let (part, flag) = match run {
        PlannedRun::Ppo(_) | PlannedRun::Distill(_) => (OffloadPart::All, "--offload all"),
        PlannedRun::Dpo(config) if config.keeps_reference() => (OffloadPart::All, "--offload all"),
        PlannedRun::Sft(_) | PlannedRun::Reward(_) | PlannedRun::Dpo(_) => {
            (OffloadPart::Optimizer, "--offload optimizer")
        }
    };
    if !offload.offloads_optimizer() || part == OffloadPart::All && !offload.offloads_models() {
        edits.push(Edit::new(flag, move |run| run.run_mut().offload.offload = vec![part]));
    }
    if run.optimizer().optim == Optim::AdamwTorch {
        let small = Edit::new("--optim adamw_8bit", |run| run.optimizer_mut().optim = Optim::Adamw8bit);
        edits.push(small.with_effect("moments have 8 bits"));
    }
    let stage = run.run().dist.zero_stage;
    for next in [ZeroStage::Stage1, ZeroStage::Stage2, ZeroStage::Stage3] {
        if job.machine.ranks > 1 && next > stage {
            edits.push(Edit::new(format!("--zero_stage {next}"), move |run| run.run_mut().dist.zero_stage = next));
        }
    }
    edits
}

/// A smaller number of tokens of a micro-batch: the largest that fits, or half of the run's, but at least the tokens of the longest row.
fn smaller(job: &Job<'_>) -> usize {
    let planned = job.micro_batch(&job.memory());
    let fits = planned.largest.unwrap_or(0) / LEAST_TOKENS * LEAST_TOKENS;
    let tokens = if (1..planned.tokens).contains(&fits) { fits } else { (planned.tokens / 2).max(LEAST_TOKENS) };
    tokens.max(planned.longest_row)
}
