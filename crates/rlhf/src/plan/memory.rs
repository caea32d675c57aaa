//! Memory by phase: the arithmetic of weights, gradients, moments, activations, cache and logits.

use super::members::{Member, Models, compute};
use super::rows::{Limits, MANY_PROMPTS, Row, Rows, passes, shares, tokens_of};
use super::table::size;
use super::{Machine, Phase, PhaseKind, PlannedMemory, PlannedMicroBatch, PlannedModel, PlannedRun, Role};
use crate::rl::learner::EpochPlan;
use crate::settings::{DistillConfig, LogprobsOf, PpoConfig, SamplingConfig};
use rlhf_base::Result;
use rlhf_base::dist::ZeroStage;
use rlhf_lm::generate::refilled_rows;
use rlhf_lm::model::{
    Activations, LogitsUse, ModelSizes, PassTokens, SourceTokens, logits_chunk, positions_for, uses_kernels,
};
use rlhf_lm::optim::micro_batch::default_tokens;
use std::borrow::Cow;
use tch::{Device, Kind};

/// Bytes that collectives on the CPU take beside their tensors: copies of pieces of 4 Mi elements.
const COLLECTIVES: usize = 3 * (4 << 22);

/// Number of f32 tensors of the smaller vocabulary's size that a divergence holds at once, beside the logits of both models.
const DIVERGENCE_LOGITS: usize = 5;

/// Bytes per logit of sampling with filters: probabilities, their sums in f64, and sorted copies.
const FILTERED_LOGITS: usize = 40;

/// A batch of responses that are sampled together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sampled {
    pub(super) rows: usize,
    /// Prompts that are read together.
    pub(super) prompts: usize,
    /// Tokens of the longest prompt.
    pub(super) longest: usize,
    pub(super) new_tokens: usize,
    /// The prompts have a cache of their own.
    pub(super) keeps_prompts: bool,
    /// Prompts that are read together when rows are refilled; 0 if no response waits.
    pub(super) refilled: usize,
    /// Logits are sampled from by libtorch's own operations.
    pub(super) is_plain: bool,
    /// Device of the cache.
    pub(super) device: Device,
}

impl Sampled {
    /// Adds cache, activations and logits to `phase`.
    pub(super) fn add_to(self, phase: &mut Phase, sizes: &ModelSizes, compute: Kind) {
        let positions = positions_for(self.longest + self.new_tokens, self.device);
        let cached = |rows| sizes.cache_bytes(rows, positions, compute);
        phase.cache = cached(self.rows) + if self.keeps_prompts { cached(self.prompts) } else { 0 };
        let pass = |prompts: usize| {
            let read = prompts * self.longest;
            let tokens = if sizes.config().is_encoder_decoder() {
                let scores = [prompts * self.longest.pow(2), prompts];
                let source = SourceTokens { computed: read, attended: read, scores };
                PassTokens { computed: prompts, attended: prompts, outputs: prompts, rows: [prompts, 1], source }
            } else {
                let rows = [prompts, self.longest];
                PassTokens { computed: read, attended: read, outputs: prompts, rows, source: SourceTokens::default() }
            };
            sizes.forward_bytes(tokens, (compute, self.device))
        };
        phase.activations = pass(self.prompts);
        if self.refilled > 0 && !sizes.config().is_encoder_decoder() {
            // The prompts that are read have a cache of their own, without room for responses.
            let read = sizes.cache_bytes(self.refilled, positions_for(self.longest, self.device), compute);
            phase.activations = phase.activations.max(pass(self.refilled) + read);
        }
        let bytes = if self.is_plain { FILTERED_LOGITS } else { 2 * compute.elt_size_in_bytes() };
        phase.logits = self.rows * sizes.config().vocab_size as usize * bytes;
    }
}

impl Phase {
    /// A phase that takes the memory of the program alone.
    pub(super) fn new(kind: PhaseKind, program: usize) -> Self {
        let [weights, gradients, moments, activations, cache, logits, total] = [0; 7];
        Self { kind, program, weights, gradients, moments, activations, cache, logits, total }
    }

    /// Sets the sum of the parts.
    pub(super) fn sum_up(&mut self) {
        let parts =
            [self.program, self.weights, self.gradients, self.moments, self.activations, self.cache, self.logits];
        self.total = parts.iter().sum();
    }
}

/// A run on one rank of a machine.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) run: &'a PlannedRun,
    pub(super) rows: &'a Rows,
    pub(super) machine: Machine,
    pub(super) members: Vec<Member<'a>>,
    pub(super) compute: Kind,
    /// Most tokens of a forward and backward pass.
    pub(super) limit: usize,
}

/// Bytes of a model's parts on this rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Resident {
    pub(super) weights: usize,
    pub(super) gradients: usize,
    pub(super) moments: usize,
}

impl<'a> Job<'a> {
    /// Resolves the models and the size of the micro-batches.
    ///
    /// # Errors
    /// If an adapter's targets match no layer.
    pub(super) fn new(run: &'a PlannedRun, models: &'a Models, rows: &'a Rows, machine: Machine) -> Result<Self> {
        let members = models.members(run)?;
        let (compute, settings) = (compute(run.run()), run.run());
        let place = (compute, machine.device);
        let of = |member: &Member<'_>| member.sizes.activation_bytes(place, settings.gradient_checkpointing);
        let bytes = members.iter().filter(|member| member.is_trained).map(of).max().unwrap_or(1);
        let parameters = members.first().map_or(0, |member| member.held.parameters);
        let default = || default_tokens(machine.device, machine.whole, parameters, bytes);
        let limit = settings.max_tokens_per_micro_batch.map_or_else(default, |limit| limit.tokens(bytes));
        Ok(Self { run, rows, machine, members, compute, limit })
    }

    pub(super) fn ppo(&self) -> Option<&PpoConfig> {
        match self.run {
            PlannedRun::Ppo(config) => Some(config),
            PlannedRun::Sft(_) | PlannedRun::Reward(_) | PlannedRun::Dpo(_) | PlannedRun::Distill(_) => None,
        }
    }

    pub(super) fn distillation(&self) -> Option<&DistillConfig> {
        if let PlannedRun::Distill(config) = self.run { Some(config) } else { None }
    }

    /// Number of ranks that share a model of this stage.
    fn sharing(&self, divided: bool) -> usize {
        if divided { self.machine.ranks } else { 1 }
    }

    /// Bytes of a model between passes.
    pub(super) fn resident(&self, member: &Member<'_>) -> Resident {
        let (held, stage) = (&member.held, member.stage);
        if member.is_view {
            // The copies of a model without its adapter are its own.
            return Resident { weights: held.copies, ..Resident::default() };
        }
        let of_params = self.sharing(stage.shards_parameters());
        let copies = if self.releases(stage) { 0 } else { held.copies };
        let weights = held.share_of(of_params) + copies + held.originals;
        if !member.is_trained && self.run.run().offload.offloads_models() {
            return Resident::default();
        }
        if !member.is_trained {
            return Resident { weights, ..Resident::default() };
        }
        let all = held.gradients;
        // In stage 1 each rank has its part of the sum beside its whole gradients.
        let part = if stage == ZeroStage::Stage1 { all / self.machine.ranks } else { 0 };
        let moments = if self.run.run().offload.offloads_optimizer() { 0 } else { self.moments(member) };
        Resident { weights, gradients: all / self.sharing(stage.shards_gradients()) + part, moments }
    }

    /// Bytes of the optimizer state of a model while it is in memory.
    fn moments(&self, member: &Member<'_>) -> usize {
        member.states / self.sharing(member.stage.shards_optimizer())
    }

    /// Bytes of a model that are in memory only while it is used: its weights if it is frozen, its optimizer state in a step.
    fn brought(&self, member: &Member<'_>) -> Resident {
        let (offload, held) = (&self.run.run().offload, &member.held);
        let divided = member.stage.shards_optimizer();
        // The steps of a sharded state are computed where it is.
        let on_host = divided && self.machine.device != Device::Cpu;
        let moments = if offload.offloads_optimizer() && !on_host { self.moments(member) } else { 0 };
        let is_out = !member.is_trained && !member.is_view && offload.offloads_models();
        let weights = if is_out { held.share_of(1) + held.copies + held.originals } else { 0 };
        Resident { weights, moments, gradients: 0 }
    }

    /// Whether policy and value model have their gradients in one memory, as they are trained one after the other.
    fn shares_gradients(&self) -> bool {
        self.ppo().is_some_and(|config| config.learner().steps_apart())
    }

    /// Whether weights are gathered for each layer and released after it.
    fn releases(&self, stage: ZeroStage) -> bool {
        stage.shards_parameters()
    }

    /// Bytes that a pass of a model gathers: weights of a layer and of what is outside the layers, and gradients of both.
    fn gathered(&self, member: &Member<'_>, backward: bool) -> [usize; 2] {
        let held = &member.held;
        let copied = held.copies as f64 / held.weights.max(1) as f64;
        let weights =
            if self.releases(member.stage) { ((held.layer + held.root) as f64 * (1.0 + copied)) as usize } else { 0 };
        let gradients =
            if backward && member.stage.shards_gradients() { 4 * (held.trained_layer + held.trained_root) } else { 0 };
        [weights, gradients]
    }

    /// Bytes of the largest temporary copy of a weight of a member.
    fn temporary(&self, member: &Member<'_>) -> usize {
        member.held.temporary(uses_kernels(self.compute, self.machine.device))
    }

    /// The parts of memory that all phases have.
    fn base(&self, kind: PhaseKind) -> Phase {
        let collectives = if self.machine.ranks > 1 { COLLECTIVES } else { 0 };
        let mut phase = Phase::new(kind, self.machine.program + collectives);
        let one_memory = self.shares_gradients();
        for member in self.members.iter().filter(|member| !member.is_dropped) {
            let own = self.resident(member);
            phase.weights += own.weights;
            phase.gradients =
                if one_memory { phase.gradients.max(own.gradients) } else { phase.gradients + own.gradients };
            phase.moments += own.moments;
        }
        if let (Some(config), Some(policy)) = (self.ppo(), self.members.first())
            && config.ema.enable_ema
        {
            phase.moments += policy.held.trained * 4 / self.sharing(policy.stage.shards_parameters());
        }
        phase
    }

    /// Memory of all phases.
    pub(super) fn memory(&self) -> PlannedMemory {
        let mut phases = Vec::from_iter(self.loading());
        if let Some(config) = self.ppo() {
            phases.push(self.rollout(config));
            phases.extend(self.scoring(config));
        }
        if let Some(config) = self.distillation() {
            phases.extend(self.sampling(config));
            phases.extend(self.teacher_pass(config));
        }
        phases.extend(self.reference_pass());
        for member in self.members.iter().filter(|member| member.is_trained) {
            phases.push(self.step(member, None));
            phases.extend(self.texts_phase(member));
            phases.extend(self.moments_phase(member));
        }
        phases.push(self.saving());
        PlannedMemory::of(phases, self.machine.available)
    }

    /// Reading of the models, where a rank holds less of them later: each is whole until it is divided.
    fn loading(&self) -> Option<Phase> {
        let divides = |member: &Member<'_>| member.stage.shards_parameters();
        if self.machine.ranks == 1 || !self.members.iter().any(divides) {
            return None;
        }
        let (mut before, mut most) = (0, 0);
        for member in self.members.iter().filter(|member| !member.is_view) {
            most = most.max(before + member.held.share_of(1) + member.held.originals);
            before += self.resident(member).weights;
        }
        Some(Phase { weights: most, ..Phase::new(PhaseKind::Loading, self.machine.program) })
    }

    /// The rows of an update that each rank has. Memory is that of the rank that needs most: where rows are sorted, that with the longest.
    fn parts<'r>(&self, rows: &'r [Row]) -> Vec<&'r [Row]> {
        shares(rows, self.machine.of_rows, self.rows.rows_of_item)
    }

    /// The passes of all ranks over their parts of `rows`.
    fn passes(&self, rows: &[Row], limits: Limits) -> Vec<PassTokens> {
        let parts = shares(rows, self.machine.of_rows, limits.rows_of_item).into_iter();
        parts.flat_map(|part| passes(part, limits)).collect()
    }

    /// Whether rows share the computation of first tokens.
    pub(super) fn shares(&self) -> bool {
        let dynamic = self.members.iter().any(|member| member.sizes.config().has_length_dependent_rope());
        match self.run {
            PlannedRun::Ppo(config) => !(dynamic || config.needs_critic() && config.legacy.value_head),
            PlannedRun::Dpo(config) => !(dynamic || config.adapter_dropout() > 0.0),
            PlannedRun::Sft(_) | PlannedRun::Reward(_) | PlannedRun::Distill(_) => false,
        }
    }

    /// The rows as a member reads them: a reward model beside an encoder-decoder, or that is one, reads prompt and response as one text.
    pub(super) fn read_by<'r>(&self, member: &Member<'_>, rows: &'r [Row]) -> Cow<'r, [Row]> {
        let pairs = |member: &Member<'_>| member.sizes.config().is_encoder_decoder();
        if member.role == Role::RewardModel && (pairs(member) || self.members.first().is_some_and(pairs)) {
            rows.iter().map(|row| row.as_text(pairs(member))).collect()
        } else {
            rows.into()
        }
    }

    /// Sampling: the cache of a batch of responses, and the logits of their next tokens.
    fn rollout(&self, config: &PpoConfig) -> Phase {
        let policy = &self.members[0];
        let size = config.advantage.num_generations;
        let most = config.local_rollout_forward_batch_size;
        // Ranks sample about as many rows.
        let largest =
            |update: &Vec<Row>| update.len().div_ceil(self.machine.of_rows.max(1)).next_multiple_of(size.max(1));
        let own = self.rows.updates.iter().map(largest).max().unwrap_or(0);
        let rows = most.min(own).max(1);
        let waits = own > most;
        let sampled = Sampled {
            rows,
            prompts: rows.div_ceil(size),
            longest: self.rows.longest_prompt(),
            new_tokens: config.response_length,
            // Where a part of a group waits.
            keeps_prompts: waits && !rows.is_multiple_of(size),
            refilled: if waits { refilled_rows(rows).div_ceil(size) } else { 0 },
            is_plain: self.is_plain(&config.sampling),
            device: self.machine.device,
        };
        self.decoding(policy, sampled, config.dist.ds3_gather_for_generation)
    }

    /// Whether libtorch's own operations sample.
    fn is_plain(&self, sampling: &SamplingConfig) -> bool {
        let filters = sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0;
        filters
            || sampling.logprobs_of == LogprobsOf::Filtered
            || sampling.repetition_penalty != 1.0
            || !uses_kernels(self.compute, self.machine.device)
    }

    /// Sampling by a member; `gathers` its whole parameters once, where they are divided.
    fn decoding(&self, member: &Member<'_>, sampled: Sampled, gathers: bool) -> Phase {
        let mut phase = self.base(PhaseKind::Rollout);
        sampled.add_to(&mut phase, member.sizes, self.compute);
        if self.releases(member.stage) {
            phase.weights += if gathers {
                member.held.share_of(1) + member.held.copies - member.held.share_of(self.machine.ranks)
            } else {
                self.gathered(member, false)[0]
            };
        }
        phase.weights += self.temporary(member) + self.brought(member).weights;
        phase
    }

    /// Sampling of the responses of distillation, by the model that takes most.
    fn sampling(&self, config: &DistillConfig) -> Option<Phase> {
        let of = |role: Role| {
            let of_role = |at: &usize| self.rows.samplers.get(*at) == Some(&Some(role));
            // Ranks sample about as many rows.
            let rows = |at: usize| self.rows.updates[at].len().div_ceil(self.machine.of_rows.max(1));
            let rows = (0..self.rows.updates.len()).filter(of_role).map(rows);
            let all = rows.max()?;
            let rows = all.min(config.local_rollout_forward_batch_size).max(1);
            let sampled = Sampled {
                rows,
                prompts: rows,
                longest: self.rows.longest_prompt(),
                new_tokens: config.max_completion_length,
                keeps_prompts: false,
                refilled: if all > rows { refilled_rows(rows) } else { 0 },
                is_plain: self.is_plain(&config.sampling),
                device: self.machine.device,
            };
            let member = self.members.iter().find(|member| member.role == role)?;
            Some(self.decoding(member, sampled, config.ds3_gather_for_generation))
        };
        let size = |phase: &Phase| phase.activations + phase.cache + phase.logits + phase.weights;
        [Role::Model, Role::Teacher].into_iter().filter_map(of).max_by_key(size)
    }

    /// A pass of the teacher over a micro-batch: hidden states, or log-probabilities where tokens alone are compared.
    fn teacher_pass(&self, config: &DistillConfig) -> Option<Phase> {
        let teacher = self.teacher()?;
        let tokens = self.largest_pass(self.limit);
        let mut phase = self.forward_pass(teacher, tokens);
        if !self.compares_slices(config) {
            phase.logits = self.logits(teacher, tokens.outputs, false);
        }
        Some(phase)
    }

    fn teacher(&self) -> Option<&Member<'a>> {
        self.members.iter().find(|member| member.role == Role::Teacher)
    }

    /// Whether slices of the logits of student and teacher are held together.
    fn compares_slices(&self, config: &DistillConfig) -> bool {
        let (Some(student), Some(teacher)) = (self.members.first(), self.teacher()) else { return false };
        config.compares_slices([student, teacher].map(|member| member.sizes.config().vocab_size))
    }

    /// Bytes of the logits of a pass of a student with this many outputs, and of what a divergence makes of them.
    fn compared_logits(&self, student: &Member<'_>, teacher: &Member<'_>, outputs: usize) -> usize {
        let [own, other] = [student, teacher].map(|member| member.sizes.config().vocab_size.max(1));
        // On a CPU slices are those of the student alone.
        let vocab = if self.machine.device == Device::Cpu { own } else { own.max(other) };
        let rows = outputs.min((self.logits_chunk(LogitsUse::DIVERGENCE) / vocab).max(1) as usize);
        let logits = (own + other) as usize * self.compute.elt_size_in_bytes();
        let mixes = self.distillation().is_some_and(|config| config.loss.beta > 0.0 && config.loss.beta < 1.0);
        rows * (logits + own.min(other) as usize * 4 * (DIVERGENCE_LOGITS + usize::from(mixes)))
    }

    /// Evaluation of the responses by each model that evaluates them; the largest.
    fn scoring(&self, config: &PpoConfig) -> Option<Phase> {
        let of = |member: &Member<'_>| {
            let tokens = |part: &[Row]| {
                let own = self.read_by(member, part);
                let batches = own.chunks(config.local_rollout_forward_batch_size.max(1));
                batches
                    .map(|rows| tokens_of(&rows.iter().collect::<Vec<_>>(), self.shares()))
                    .max_by_key(|found| found.computed)
            };
            let parts = self.rows.updates.iter().flat_map(|update| self.parts(update));
            let tokens = parts.filter_map(tokens).max_by_key(|found| found.computed).unwrap_or_default();
            self.forward_pass(member, tokens)
        };
        let members = self.members.iter().filter(|member| member.role != Role::Policy);
        let size = |phase: &Phase| phase.activations + phase.logits + phase.weights;
        members.map(of).max_by_key(size)
    }

    /// A pass of a model without gradients.
    fn forward_pass(&self, member: &Member<'_>, tokens: PassTokens) -> Phase {
        let mut phase = self.base(PhaseKind::Scoring);
        phase.activations = member.sizes.forward_bytes(tokens, (self.compute, self.machine.device));
        if matches!(member.role, Role::ReferenceModel | Role::Policy) {
            phase.logits = self.logits(member, tokens.outputs, false);
        }
        phase.weights += self.temporary(member) + self.gathered(member, false)[0] + self.brought(member).weights;
        phase
    }

    /// A pass of DPO's reference model over a micro-batch.
    fn reference_pass(&self) -> Option<Phase> {
        let PlannedRun::Dpo(config) = self.run else { return None };
        let reference = self.members.iter().find(|member| member.role == Role::ReferenceModel);
        // Before the first update, without a model of its own, it is the policy.
        let member = reference.or(self.members.first().filter(|_| config.precompute_ref_log_probs))?;
        let tokens = if config.precompute_ref_log_probs {
            let rows = config.precompute_ref_batch_size.or(config.per_device_train_batch_size).unwrap_or(8);
            let limits = Limits { rows, ..self.limits(usize::MAX, usize::MAX) };
            let all = self.rows.updates.iter().flat_map(|update| self.passes(update, limits));
            all.max_by_key(|tokens| tokens.computed).unwrap_or_default()
        } else {
            self.largest_pass(self.limit)
        };
        let mut phase = self.forward_pass(member, tokens);
        if member.is_dropped {
            phase.weights += self.resident(member).weights;
        }
        Some(phase)
    }

    /// The most logits of a slice, in elements, of which each takes `copies` numbers of f32.
    fn logits_chunk(&self, copies: usize) -> i64 {
        logits_chunk(self.machine.device, self.machine.whole, copies)
    }

    /// The use of its logits in a pass of a member.
    fn logits_use(&self, member: &Member<'_>, backward: bool) -> LogitsUse {
        let of_loss = self.ppo().filter(|_| backward && member.role == Role::Policy);
        LogitsUse {
            soft_cap: member.sizes.config().final_softcap.is_some(),
            sets: self.ppo().is_some_and(|config| config.sampling.logprobs_of == LogprobsOf::Filtered),
            entropy_gradient: of_loss.is_some_and(|config| config.learns_entropy()),
            full_kl: of_loss.is_some_and(PpoConfig::stores_distributions),
        }
    }

    /// Bytes that a pass takes for each logit of a slice.
    fn bytes_per_logit(&self, member: &Member<'_>, backward: bool) -> usize {
        let used = self.logits_use(member, backward);
        let by_kernels = !used.sets && !(backward && (used.soft_cap || used.full_kl));
        if by_kernels && uses_kernels(self.compute, self.machine.device) {
            self.compute.elt_size_in_bytes()
        } else if backward {
            4 * used.copies()
        } else {
            // The logits and their log-probabilities, and those that are capped or masked.
            4 * (2 + usize::from(used.soft_cap) + usize::from(used.sets))
        }
    }

    /// Bytes of the logits of a pass with this many outputs.
    fn logits(&self, member: &Member<'_>, outputs: usize, backward: bool) -> usize {
        let vocab = member.sizes.config().vocab_size.max(1);
        let rows = outputs.min((self.logits_chunk(LogitsUse::MOST.copies()) / vocab).max(1) as usize);
        rows * vocab as usize * self.bytes_per_logit(member, backward)
    }

    /// The largest pass of a model that is trained: of all the tokens that a micro-batch may have, if `tokens` are not given.
    pub(super) fn largest_pass(&self, limit: usize) -> PassTokens {
        let found = self.rows.updates.iter().flat_map(|update| self.training_passes(update, limit));
        found.max_by_key(|tokens| (tokens.computed, tokens.outputs)).unwrap_or_default()
    }

    /// The forward and backward passes of all ranks over an update, once.
    pub(super) fn training_passes(&self, update: &[Row], limit: usize) -> Vec<PassTokens> {
        let (rows, step) = match self.run {
            PlannedRun::Sft(config) if config.packing => (usize::MAX, usize::MAX),
            PlannedRun::Sft(config) => (config.batches().rows_per_pass(), usize::MAX),
            PlannedRun::Reward(config) => (config.batches().rows_per_pass(), usize::MAX),
            PlannedRun::Dpo(config) => (config.batches().rows_per_pass(), usize::MAX),
            PlannedRun::Distill(config) => (config.batches().rows_per_pass(), usize::MAX),
            PlannedRun::Ppo(config) => match config.plan_for(MANY_PROMPTS).map(|plan| plan.epoch) {
                Ok(EpochPlan { part_size, micro_batch_size, .. }) => (micro_batch_size, part_size),
                Err(_) => (usize::MAX, usize::MAX),
            },
        };
        let limits = self.limits(rows, limit);
        update.chunks(step.min(update.len()).max(1)).flat_map(|step| self.passes(step, limits)).collect()
    }

    fn limits(&self, rows: usize, tokens: usize) -> Limits {
        Limits { rows, tokens, shares: self.shares(), rows_of_item: self.rows.rows_of_item }
    }

    /// Forward and backward passes and optimizer step of a model; `tokens` replaces its largest pass.
    pub(super) fn step(&self, member: &Member<'_>, tokens: Option<PassTokens>) -> Phase {
        let mut phase = self.base(PhaseKind::Step(member.role));
        let tokens = tokens.unwrap_or_else(|| self.largest_pass(self.limit));
        let Activations { stored, working } = self.activations(member, tokens);
        let is_lm = !matches!(self.run, PlannedRun::Reward(_)) && member.role != Role::ValueModel;
        phase.logits = if is_lm { self.logits(member, tokens.outputs, true) } else { 0 };
        if let (Some(config), Some(teacher)) = (self.distillation(), self.teacher()) {
            if self.compares_slices(config) {
                phase.logits = self.compared_logits(member, teacher, tokens.outputs);
            }
            // The teacher is there for all micro-batches.
            phase.weights += self.brought(teacher).weights;
        }
        // Logits are gone before the first layer's backward pass begins.
        phase.activations = stored + working.saturating_sub(phase.logits) + self.distributions(tokens.outputs);
        let [weights, gradients] = self.gathered(member, true);
        let stored = if self.run.run().gradient_checkpointing { 0 } else { member.held.widened_layers };
        phase.weights += weights + self.temporary(member).max(stored);
        phase.gradients += gradients;
        phase
    }

    /// The passes over texts that the policy learns beside PPO or DPO.
    fn texts_phase(&self, member: &Member<'_>) -> Option<Phase> {
        let Role::Policy = member.role else { return None };
        let (texts, rows) = match self.run {
            PlannedRun::Ppo(config) => {
                let EpochPlan { mini_batch_size, micro_batch_size, .. } = config.plan_for(MANY_PROMPTS).ok()?.epoch;
                (mini_batch_size, micro_batch_size)
            }
            PlannedRun::Dpo(config) => {
                (config.plan_for(MANY_PROMPTS).ok()?.batch_size, config.batches().rows_per_pass())
            }
            PlannedRun::Sft(_) | PlannedRun::Reward(_) | PlannedRun::Distill(_) => return None,
        };
        let texts = self.rows.texts(texts);
        let limits = Limits { rows, tokens: self.limit, shares: false, rows_of_item: 1 };
        let tokens = self.passes(&texts, limits).into_iter().max_by_key(|tokens| tokens.computed)?;
        Some(Phase { kind: PhaseKind::Texts, ..self.step(member, Some(tokens)) })
    }

    /// Bytes of the reference model's hidden states at the responses of all ranks, from which a loss takes its distributions; and of
    /// the copy of its LM head where that is offloaded, or changes. In distillation, of the teacher's at the `outputs` of a micro-batch.
    fn distributions(&self, outputs: usize) -> usize {
        if let (Some(config), Some(teacher)) = (self.distillation(), self.teacher()) {
            let own = teacher.sizes.config();
            let copies = self.releases(teacher.stage) || config.run.offload.offloads_models();
            let width = own.embedding_size as usize * self.compute.elt_size_in_bytes();
            // The states of the sequences, and as one tensor.
            let states = 2 * outputs + if copies { own.vocab_size as usize } else { 0 };
            return if self.compares_slices(config) { width * states } else { 0 };
        }
        let Some(config) = self.ppo().filter(|config| config.stores_distributions()) else { return 0 };
        let outputs = |update: &Vec<Row>| update.iter().map(|row| row.outputs).sum::<usize>();
        let tokens = self.rows.updates.iter().map(outputs).max().unwrap_or(0);
        let Some(reference) = self.members.iter().find(|member| member.role == Role::ReferenceModel) else { return 0 };
        let own = reference.sizes.config();
        let width = own.embedding_size as usize * self.compute.elt_size_in_bytes();
        let copies =
            self.releases(reference.stage) || config.run.offload.offloads_models() || config.sync.sync_ref_model;
        width * (tokens + if copies { own.vocab_size as usize } else { 0 })
    }

    /// The optimizer step of a model whose state is in memory for it alone: activations and logits are gone.
    fn moments_phase(&self, member: &Member<'_>) -> Option<Phase> {
        let moments = self.brought(member).moments;
        let mut phase = self.base(PhaseKind::Moments(member.role));
        phase.moments += moments;
        (moments > 0).then_some(phase)
    }

    /// The bytes on the disk of the offloaded parts, in words; none if there are none.
    pub(super) fn offloaded(&self) -> Option<String> {
        let weights: usize = self.members.iter().map(|member| self.brought(member).weights).sum();
        let moments: usize = if self.run.run().offload.offloads_optimizer() {
            self.members.iter().map(|member| self.moments(member)).sum()
        } else {
            0
        };
        let place = if self.machine.device == Device::Cpu { "on the disk of offload_dir" } else { "on the host" };
        let dir = self.run.run().offload.offload_dir.as_ref();
        let dir = dir.map_or(String::new(), |dir| format!(", {}", dir.display()));
        (moments + weights > 0).then(|| {
            format!(
                "offload: each rank has {} of optimizer state and {} of frozen models {place}{dir}; the time to move them is not planned",
                size(moments),
                size(weights)
            )
        })
    }

    pub(super) fn activations(&self, member: &Member<'_>, tokens: PassTokens) -> Activations {
        let adapter = member.adapter.as_ref().map(|(lora, drops)| (lora, *drops));
        let checkpointing = self.run.run().gradient_checkpointing;
        // The targets were found when the model was held.
        let place = (self.compute, self.machine.device);
        member.sizes.activations(tokens, place, adapter, checkpointing).unwrap_or_default()
    }

    /// Writing a checkpoint: one tensor at a time is copied.
    fn saving(&self) -> Phase {
        let mut phase = self.base(PhaseKind::Saving);
        phase.weights += self.members.iter().map(|member| member.sizes.largest_tensor() * 4).max().unwrap_or(0);
        phase.moments += self.members.iter().map(|member| self.brought(member).moments).max().unwrap_or(0);
        if let (Some(config), Some(policy)) = (self.ppo(), self.members.first())
            && config.ema.enable_ema
            && !policy.stage.shards_parameters()
        {
            // The average in the dtypes of the policy's weights, where they are not f32.
            let narrow = policy.held.gradients < 4 * policy.held.trained;
            phase.weights += if narrow { policy.held.gradients } else { 0 };
        }
        phase
    }

    pub(super) fn models(&self) -> Vec<PlannedModel> {
        let of = |member: &Member<'_>| {
            let Resident { weights, gradients, moments } = self.resident(member);
            PlannedModel {
                role: member.role,
                name: member.name.to_string(),
                parameters: member.held.parameters,
                trained: if member.is_trained { member.held.trained } else { 0 },
                weights,
                gradients,
                moments,
            }
        };
        self.members.iter().map(of).collect()
    }

    /// The tokens of micro-batches, and the most that fit beside the rest.
    pub(super) fn micro_batch(&self, memory: &PlannedMemory) -> PlannedMicroBatch {
        let used = self.largest_pass(self.limit);
        let trained = || self.members.iter().filter(|member| member.is_trained);
        let bytes = |tokens: PassTokens| {
            let of = |member: &Member<'_>| {
                let phase = self.step(member, Some(tokens));
                phase.activations + phase.logits
            };
            trained().map(of).max().unwrap_or(0)
        };
        let scale = |count: usize, tokens: usize| (count as f64 * tokens as f64 / used.computed.max(1) as f64) as usize;
        let scaled = |tokens: usize| PassTokens {
            computed: tokens,
            attended: scale(used.attended, tokens),
            outputs: scale(used.outputs, tokens),
            rows: [scale(used.rows[0], tokens), used.rows[1]],
            source: SourceTokens {
                computed: scale(used.source.computed, tokens),
                attended: scale(used.source.attended, tokens),
                scores: used.source.scores.map(|scores| scale(scores, tokens)),
            },
        };
        let many = scaled(1 << 20);
        let per_token = bytes(many).saturating_sub(bytes(PassTokens::default())) >> 20;
        let largest = memory.available.map(|available| {
            let (copies, of_logits) = if self.distillation().is_some_and(|config| self.compares_slices(config)) {
                (LogitsUse::DIVERGENCE, 4 * (DIVERGENCE_LOGITS + 3))
            } else {
                let of_trained = trained().map(|member| self.bytes_per_logit(member, true)).max();
                (LogitsUse::MOST.copies(), of_trained.unwrap_or(0).max(4))
            };
            let beside = memory.peak_without_activations() + self.logits_chunk(copies) as usize * of_logits;
            available.saturating_sub(beside) / per_token.max(1)
        });
        let (limit, longest_row) = (self.limit, self.rows.longest(self.shares()));
        PlannedMicroBatch { limit, tokens: used.computed, longest_row, bytes_per_token: per_token, largest }
    }
}

impl PlannedMemory {
    /// The memory of `phases`, where `available` bytes are there.
    pub(super) fn of(mut phases: Vec<Phase>, available: Option<usize>) -> Self {
        phases.iter_mut().for_each(Phase::sum_up);
        let (peak, peak_phase) = phases.iter().map(|phase| (phase.total, phase.kind.name())).max().unwrap_or((0, ""));
        Self { available, peak, peak_phase, fits: available.is_none_or(|most| peak <= most), phases }
    }

    /// Bytes of the training phases without activations and logits.
    fn peak_without_activations(&self) -> usize {
        let steps = self.phases.iter().filter(|phase| matches!(phase.kind, PhaseKind::Step(_)));
        steps.map(|phase| phase.total - phase.activations - phase.logits).max().unwrap_or(0)
    }
}
