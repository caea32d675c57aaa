//! Memory by phase: the arithmetic of weights, gradients, moments, activations, cache and logits.

use super::members::{Member, Models, compute};
use super::rows::{Limits, MANY_PROMPTS, Row, Rows, pass_tokens, passes, shares};
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

/// Most bytes that a collective on the CPU takes besides its tensors: copies of pieces of 4 Mi elements.
const COLLECTIVES: usize = 3 * (4 << 22);

/// Number of f32 tensors of the smaller vocabulary's size that a divergence keeps in memory at once, besides the logits of both models.
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
    /// The prompts have a separate KV cache.
    pub(super) keeps_prompts: bool,
    /// Prompts that are read together when rows are refilled; 0 if no response waits.
    pub(super) refilled: usize,
    /// Tokens are sampled by libtorch's operations instead of the project's kernels.
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
    /// A phase that takes only the memory of the program.
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
        let settings = run.run();
        let compute = compute(settings);
        let place = (compute, machine.device);
        let activation_bytes =
            |member: &Member<'_>| member.sizes.activation_bytes(place, settings.gradient_checkpointing);
        let bytes = members.iter().filter(|member| member.is_trained).map(activation_bytes).max().unwrap_or(1);
        let parameters = members.first().map_or(0, |member| member.footprint.parameters);
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

    /// Number of ranks that a part of a model is divided over, if it is `divided`.
    fn sharing(&self, divided: bool) -> usize {
        if divided { self.machine.ranks } else { 1 }
    }

    /// Bytes of a model between passes.
    pub(super) fn resident(&self, member: &Member<'_>) -> Resident {
        let footprint = &member.footprint;
        let stage = member.stage;
        if member.is_view {
            // The weights are those of the policy, but the copies in the dtype of products are separate.
            return Resident { weights: footprint.copies, ..Resident::default() };
        }
        let ranks = self.sharing(stage.shards_parameters());
        let copies = if self.releases(stage) { 0 } else { footprint.copies };
        let weights = footprint.share_of(ranks) + copies + footprint.originals;
        if !member.is_trained && self.run.run().offload.offloads_models() {
            return Resident::default();
        }
        if !member.is_trained {
            return Resident { weights, ..Resident::default() };
        }
        let all = footprint.gradients;
        // In stage 1 each rank has its part of the summed gradients besides its own whole gradients.
        let part = if stage == ZeroStage::Stage1 { all / self.machine.ranks } else { 0 };
        let moments = if self.run.run().offload.offloads_optimizer() { 0 } else { self.moments(member) };
        Resident { weights, gradients: all / self.sharing(stage.shards_gradients()) + part, moments }
    }

    /// Bytes of the optimizer state of a model while it is in memory.
    fn moments(&self, member: &Member<'_>) -> usize {
        member.states / self.sharing(member.stage.shards_optimizer())
    }

    /// Bytes of a model's offloaded parts, which are in memory only while they are used: the weights of a frozen model, and the optimizer
    /// state in a step.
    fn on_demand(&self, member: &Member<'_>) -> Resident {
        let offload = &self.run.run().offload;
        let footprint = &member.footprint;
        let divided = member.stage.shards_optimizer();
        // On a GPU a sharded and offloaded state stays on the host: its steps are computed there.
        let on_host = divided && self.machine.device != Device::Cpu;
        let moments = if offload.offloads_optimizer() && !on_host { self.moments(member) } else { 0 };
        let is_out = !member.is_trained && !member.is_view && offload.offloads_models();
        let weights = if is_out { footprint.share_of(1) + footprint.copies + footprint.originals } else { 0 };
        Resident { weights, moments, gradients: 0 }
    }

    /// Whether policy and value model use the same memory for their gradients, because they are trained one after the other.
    fn shares_gradients(&self) -> bool {
        self.ppo().is_some_and(|config| config.learner().steps_apart())
    }

    /// Whether weights are gathered for each layer and released after it.
    fn releases(&self, stage: ZeroStage) -> bool {
        stage.shards_parameters()
    }

    /// Bytes that a pass of a model gathers: the weights and gradients of one layer, and of the parameters outside the layers. With several
    /// ranks, those of a second layer are added: while one layer is computed, the weights of the next are gathered, or the gradients of the
    /// last are reduced. The embeddings and the head overlap with one layer only, so they never take more.
    fn gathered(&self, member: &Member<'_>, backward: bool) -> [usize; 2] {
        let ranks = self.machine.ranks;
        let footprint = &member.footprint;
        let copied = footprint.copies as f64 / footprint.weights.max(1) as f64;
        let (mut weights, mut gradients) = (0, 0);
        if self.releases(member.stage) {
            weights = ((footprint.layer + footprint.root) as f64 * (1.0 + copied)) as usize;
            // Its copies in the dtype of products are made when it is computed.
            weights += if ranks > 1 { footprint.layer } else { 0 };
        }
        if backward && member.stage.shards_gradients() {
            gradients = 4 * (footprint.trained_layer + footprint.trained_root);
            // With this rank's part of their sum.
            gradients += if ranks > 1 { 4 * (footprint.trained_layer + footprint.trained_layer / ranks) } else { 0 };
            // Where weights are gathered at the same time, the copies of a second collective.
            let has_two = ranks > 1 && self.releases(member.stage);
            gradients += if has_two { COLLECTIVES.min(2 * 4 * footprint.trained_layer) } else { 0 };
        }
        [weights, gradients]
    }

    /// Bytes of the largest temporary copy of a weight of a member.
    fn temporary(&self, member: &Member<'_>) -> usize {
        member.footprint.temporary(uses_kernels(self.compute, self.machine.device))
    }

    /// The parts of memory that all phases have.
    fn base(&self, kind: PhaseKind) -> Phase {
        // Copies of a vector with the parameters or gradients of a layer, or of what is outside the layers.
        let longest = self.members.iter().map(|member| {
            let footprint = &member.footprint;
            footprint.layer.max(footprint.root).max(4 * footprint.trained_layer).max(4 * footprint.trained_root)
        });
        let copies = COLLECTIVES.min(3 * longest.max().unwrap_or(0));
        let collectives = if self.machine.ranks > 1 { copies } else { 0 };
        let mut phase = Phase::new(kind, self.machine.program + collectives);
        let one_memory = self.shares_gradients();
        for member in self.members.iter().filter(|member| !member.is_dropped) {
            let resident = self.resident(member);
            phase.weights += resident.weights;
            phase.gradients =
                if one_memory { phase.gradients.max(resident.gradients) } else { phase.gradients + resident.gradients };
            phase.moments += resident.moments;
        }
        if let (Some(config), Some(policy)) = (self.ppo(), self.members.first())
            && config.ema.enable_ema
        {
            phase.moments += policy.footprint.trained * 4 / self.sharing(policy.stage.shards_parameters());
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

    /// The phase that loads the models, where ranks shard parameters: each model is whole until it is sharded.
    fn loading(&self) -> Option<Phase> {
        let divides = |member: &Member<'_>| member.stage.shards_parameters();
        if self.machine.ranks == 1 || !self.members.iter().any(divides) {
            return None;
        }
        let (mut before, mut most) = (0, 0);
        for member in self.members.iter().filter(|member| !member.is_view) {
            most = most.max(before + member.footprint.share_of(1) + member.footprint.originals);
            before += self.resident(member).weights;
        }
        Some(Phase { weights: most, ..Phase::new(PhaseKind::Loading, self.machine.program) })
    }

    /// The rows of an update, divided over the ranks. The planned memory is that of the rank that needs most: where rows are sorted, the
    /// one with the longest rows.
    fn parts<'r>(&self, rows: &'r [Row]) -> Vec<&'r [Row]> {
        shares(rows, self.machine.row_ranks, self.rows.rows_per_item)
    }

    /// The passes of all ranks over their parts of `rows`.
    fn passes(&self, rows: &[Row], limits: Limits) -> Vec<PassTokens> {
        let parts = shares(rows, self.machine.row_ranks, limits.rows_per_item).into_iter();
        parts.flat_map(|part| passes(part, limits)).collect()
    }

    /// Whether first tokens that rows have in common are computed once.
    pub(super) fn shares(&self) -> bool {
        let dynamic = self.members.iter().any(|member| member.sizes.config().has_length_dependent_rope());
        match self.run {
            PlannedRun::Ppo(config) => !(dynamic || config.needs_critic() && config.legacy.value_head),
            PlannedRun::Dpo(config) => !(dynamic || config.adapter_dropout() > 0.0),
            PlannedRun::Sft(_) | PlannedRun::Reward(_) | PlannedRun::Distill(_) => false,
        }
    }

    /// The rows as `member` reads them: a reward model reads prompt and response as one text if it or the policy is an encoder-decoder.
    pub(super) fn read_by<'r>(&self, member: &Member<'_>, rows: &'r [Row]) -> Cow<'r, [Row]> {
        let has_encoder = |member: &Member<'_>| member.sizes.config().is_encoder_decoder();
        if member.role == Role::RewardModel && (has_encoder(member) || self.members.first().is_some_and(has_encoder)) {
            rows.iter().map(|row| row.as_text(has_encoder(member))).collect()
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
            |update: &Vec<Row>| update.len().div_ceil(self.machine.row_ranks.max(1)).next_multiple_of(size.max(1));
        let rank_rows = self.rows.updates.iter().map(largest).max().unwrap_or(0);
        let rows = most.min(rank_rows).max(1);
        let waits = rank_rows > most;
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

    /// Whether tokens are sampled by libtorch's operations instead of the project's kernels.
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
                member.footprint.share_of(1) + member.footprint.copies - member.footprint.share_of(self.machine.ranks)
            } else {
                self.gathered(member, false)[0]
            };
        }
        phase.weights += self.temporary(member) + self.on_demand(member).weights;
        phase
    }

    /// Sampling of the responses of distillation, by the model that takes most.
    fn sampling(&self, config: &DistillConfig) -> Option<Phase> {
        let sampling_phase = |role: Role| {
            let is_sampler = |at: &usize| self.rows.samplers.get(*at) == Some(&Some(role));
            // Ranks sample about as many rows.
            let rows = |at: usize| self.rows.updates[at].len().div_ceil(self.machine.row_ranks.max(1));
            let rows = (0..self.rows.updates.len()).filter(is_sampler).map(rows);
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
        [Role::Model, Role::Teacher].into_iter().filter_map(sampling_phase).max_by_key(size)
    }

    /// A pass of the teacher over a micro-batch: hidden states, or log-probabilities if the loss compares only the tokens.
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

    /// Whether slices of the logits of student and teacher are in memory at the same time.
    fn compares_slices(&self, config: &DistillConfig) -> bool {
        let (Some(student), Some(teacher)) = (self.members.first(), self.teacher()) else { return false };
        config.compares_slices([student, teacher].map(|member| member.sizes.config().vocab_size))
    }

    /// Bytes of the logits of a pass of a student with this many outputs, and of the tensors that the divergence computes from them.
    fn compared_logits(&self, student: &Member<'_>, teacher: &Member<'_>, outputs: usize) -> usize {
        let [student_vocab, teacher_vocab] = [student, teacher].map(|member| member.sizes.config().vocab_size.max(1));
        // On a CPU the size of a slice depends on the student's vocabulary alone.
        let vocab = if self.machine.device == Device::Cpu { student_vocab } else { student_vocab.max(teacher_vocab) };
        let rows = outputs.min((self.logits_chunk(LogitsUse::DIVERGENCE) / vocab).max(1) as usize);
        let logits = (student_vocab + teacher_vocab) as usize * self.compute.elt_size_in_bytes();
        let mixes = self.distillation().is_some_and(|config| config.loss.beta > 0.0 && config.loss.beta < 1.0);
        rows * (logits + student_vocab.min(teacher_vocab) as usize * 4 * (DIVERGENCE_LOGITS + usize::from(mixes)))
    }

    /// Evaluation of the responses by each model that evaluates them; the largest.
    fn scoring(&self, config: &PpoConfig) -> Option<Phase> {
        let scoring_phase = |member: &Member<'_>| {
            let tokens = |part: &[Row]| {
                let member_rows = self.read_by(member, part);
                let batches = member_rows.chunks(config.local_rollout_forward_batch_size.max(1));
                batches
                    .map(|rows| pass_tokens(&rows.iter().collect::<Vec<_>>(), self.shares()))
                    .max_by_key(|tokens| tokens.computed)
            };
            let parts = self.rows.updates.iter().flat_map(|update| self.parts(update));
            let tokens = parts.filter_map(tokens).max_by_key(|tokens| tokens.computed).unwrap_or_default();
            self.forward_pass(member, tokens)
        };
        let members = self.members.iter().filter(|member| member.role != Role::Policy);
        let size = |phase: &Phase| phase.activations + phase.logits + phase.weights;
        members.map(scoring_phase).max_by_key(size)
    }

    /// A pass of a model without gradients.
    fn forward_pass(&self, member: &Member<'_>, tokens: PassTokens) -> Phase {
        let mut phase = self.base(PhaseKind::Scoring);
        phase.activations = member.sizes.forward_bytes(tokens, (self.compute, self.machine.device));
        if matches!(member.role, Role::ReferenceModel | Role::Policy) {
            phase.logits = self.logits(member, tokens.outputs, false);
        }
        phase.weights += self.temporary(member) + self.gathered(member, false)[0] + self.on_demand(member).weights;
        phase
    }

    /// A pass of DPO's reference model over a micro-batch.
    fn reference_pass(&self) -> Option<Phase> {
        let PlannedRun::Dpo(config) = self.run else { return None };
        let reference = self.members.iter().find(|member| member.role == Role::ReferenceModel);
        // Without a reference model, the policy computes these log-probabilities before the first update.
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

    /// The most logits of a slice, each of which takes `copies` f32 numbers.
    fn logits_chunk(&self, copies: usize) -> i64 {
        logits_chunk(self.machine.device, self.machine.whole, copies)
    }

    /// Returns the use that a pass of `member` makes of its logits.
    fn logits_use(&self, member: &Member<'_>, backward: bool) -> LogitsUse {
        let loss_config = self.ppo().filter(|_| backward && member.role == Role::Policy);
        LogitsUse {
            soft_cap: member.sizes.config().final_softcap.is_some(),
            sets: self.ppo().is_some_and(|config| config.sampling.logprobs_of == LogprobsOf::Filtered),
            entropy_gradient: loss_config.is_some_and(|config| config.learns_entropy()),
            full_kl: loss_config.is_some_and(PpoConfig::stores_distributions),
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

    /// The largest forward and backward pass of the drawn updates, in micro-batches of at most `limit` tokens.
    pub(super) fn largest_pass(&self, limit: usize) -> PassTokens {
        let passes = self.rows.updates.iter().flat_map(|update| self.training_passes(update, limit));
        passes.max_by_key(|tokens| (tokens.computed, tokens.outputs)).unwrap_or_default()
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
        Limits { rows, tokens, shares: self.shares(), rows_per_item: self.rows.rows_per_item }
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
            phase.weights += self.on_demand(teacher).weights;
        }
        // Logits are freed before the first layer's backward pass begins.
        phase.activations = stored + working.saturating_sub(phase.logits) + self.distributions(tokens.outputs);
        let [weights, gradients] = self.gathered(member, true);
        let stored = if self.run.run().gradient_checkpointing { 0 } else { member.footprint.widened_layers };
        phase.weights += weights + self.temporary(member).max(stored);
        phase.gradients += gradients;
        phase
    }

    /// The passes over texts that the policy learns in addition to PPO or DPO.
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
        let limits = Limits { rows, tokens: self.limit, shares: false, rows_per_item: 1 };
        let tokens = self.passes(&texts, limits).into_iter().max_by_key(|tokens| tokens.computed)?;
        Some(Phase { kind: PhaseKind::Texts, ..self.step(member, Some(tokens)) })
    }

    /// Bytes of the stored hidden states from which a loss computes another model's distributions, and of the copy of that model's LM head
    /// where the head is sharded, offloaded or updated. In PPO the states are the reference model's at the responses of all ranks, in
    /// distillation the teacher's at the `outputs` of a micro-batch.
    fn distributions(&self, outputs: usize) -> usize {
        if let (Some(config), Some(teacher)) = (self.distillation(), self.teacher()) {
            let model = teacher.sizes.config();
            let copies = self.releases(teacher.stage) || config.run.offload.offloads_models();
            let width = model.embedding_size as usize * self.compute.elt_size_in_bytes();
            // The states of each sequence, and their concatenation.
            let states = 2 * outputs + if copies { model.vocab_size as usize } else { 0 };
            return if self.compares_slices(config) { width * states } else { 0 };
        }
        let Some(config) = self.ppo().filter(|config| config.stores_distributions()) else { return 0 };
        let outputs = |update: &Vec<Row>| update.iter().map(|row| row.outputs).sum::<usize>();
        let tokens = self.rows.updates.iter().map(outputs).max().unwrap_or(0);
        let Some(reference) = self.members.iter().find(|member| member.role == Role::ReferenceModel) else { return 0 };
        let model = reference.sizes.config();
        let width = model.embedding_size as usize * self.compute.elt_size_in_bytes();
        let copies =
            self.releases(reference.stage) || config.run.offload.offloads_models() || config.sync.sync_ref_model;
        width * (tokens + if copies { model.vocab_size as usize } else { 0 })
    }

    /// The optimizer step of a model whose offloaded state is in memory only for the step. Activations and logits are already freed.
    fn moments_phase(&self, member: &Member<'_>) -> Option<Phase> {
        let moments = self.on_demand(member).moments;
        let mut phase = self.base(PhaseKind::Moments(member.role));
        phase.moments += moments;
        (moments > 0).then_some(phase)
    }

    /// The sizes of the offloaded parts, in words; `None` if nothing is offloaded.
    pub(super) fn offloaded(&self) -> Option<String> {
        let weights: usize = self.members.iter().map(|member| self.on_demand(member).weights).sum();
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
        // An adapter whose targets match no layer was refused when the members were made.
        let place = (self.compute, self.machine.device);
        member.sizes.activations(tokens, place, adapter, checkpointing).unwrap_or_default()
    }

    /// Saving of a checkpoint: one tensor at a time is copied.
    fn saving(&self) -> Phase {
        let mut phase = self.base(PhaseKind::Saving);
        phase.weights += self.members.iter().map(|member| member.sizes.largest_tensor() * 4).max().unwrap_or(0);
        phase.moments += self.members.iter().map(|member| self.on_demand(member).moments).max().unwrap_or(0);
        if let (Some(config), Some(policy)) = (self.ppo(), self.members.first())
            && config.ema.enable_ema
            && !policy.stage.shards_parameters()
        {
            // The average in the dtypes of the policy's weights, where they are not f32.
            let narrow = policy.footprint.gradients < 4 * policy.footprint.trained;
            phase.weights += if narrow { policy.footprint.gradients } else { 0 };
        }
        phase
    }

    pub(super) fn models(&self) -> Vec<PlannedModel> {
        let planned = |member: &Member<'_>| {
            let Resident { weights, gradients, moments } = self.resident(member);
            PlannedModel {
                role: member.role,
                name: member.name.to_string(),
                parameters: member.footprint.parameters,
                trained: if member.is_trained { member.footprint.trained } else { 0 },
                weights,
                gradients,
                moments,
            }
        };
        self.members.iter().map(planned).collect()
    }

    /// The tokens of micro-batches, and the most tokens that fit besides everything else.
    pub(super) fn micro_batch(&self, memory: &PlannedMemory) -> PlannedMicroBatch {
        let used = self.largest_pass(self.limit);
        let trained = || self.members.iter().filter(|member| member.is_trained);
        let bytes = |tokens: PassTokens| {
            let step_bytes = |member: &Member<'_>| {
                let phase = self.step(member, Some(tokens));
                phase.activations + phase.logits
            };
            trained().map(step_bytes).max().unwrap_or(0)
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
            let (copies, logit_bytes) = if self.distillation().is_some_and(|config| self.compares_slices(config)) {
                (LogitsUse::DIVERGENCE, 4 * (DIVERGENCE_LOGITS + 3))
            } else {
                let trained_bytes = trained().map(|member| self.bytes_per_logit(member, true)).max();
                (LogitsUse::MOST.copies(), trained_bytes.unwrap_or(0).max(4))
            };
            let other_bytes = memory.peak_without_activations() + self.logits_chunk(copies) as usize * logit_bytes;
            available.saturating_sub(other_bytes) / per_token.max(1)
        });
        let longest_row = self.rows.longest(self.shares());
        PlannedMicroBatch { limit: self.limit, tokens: used.computed, longest_row, bytes_per_token: per_token, largest }
    }
}

impl PlannedMemory {
    /// The memory of `phases` on a rank with `available` bytes.
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
