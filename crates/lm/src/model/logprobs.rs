//! Log-probabilities of tokens, their entropy and KL divergence, computed from hidden states in slices of the vocabulary's
//! logits: no pass holds the logits of all tokens at once.

mod divergence;

pub use divergence::{Divergence, TeacherRows, TokenDivergences};

use super::batch::StopCheck;
use super::layout::rounded;
use super::linear::Linear;
use super::sampled::{Sampled, restricted};
use super::shape::Shape;
use super::{joined, uses_kernels};
use rlhf_base::device::memory;
use rlhf_base::dist::World;
use rlhf_base::{Error, Result};
use std::ops::Range;
use std::sync::OnceLock;
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// Logits held at once on a CPU, in elements: 32 MiB of f32.
const CPU_LOGITS: i64 = 1 << 23;
/// The same on a GPU whose memory is not known, and the least on any: 0.6 GB for the use that takes the most.
const LEAST_GPU_LOGITS: i64 = 1 << 24;
/// One part in this many of a GPU's memory is what the logits of a slice may take in the use of which libtorch's own operations hold the most
/// copies.
///
/// A slice is held beside weights, moments and all activations of a pass, which by default take a quarter. The usual loss holds half as many
/// copies, and rounding down to a power of two takes up to half of the rest: 1/30 of a card of 80 GB.
const GPU_PART: usize = 11;

/// The use of logits. It decides how many tensors of their size libtorch's own operations hold at once: the logits, their
/// log-probabilities, and gradients of both. A divergence between two models holds [`LogitsUse::DIVERGENCE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogitsUse {
    /// The head has a soft cap, whose result its gradient needs.
    pub soft_cap: bool,
    /// Only a set of tokens could be sampled: a mask, and the logits with it.
    pub sets: bool,
    /// The loss depends on the entropy.
    pub entropy_gradient: bool,
    /// The loss depends on the KL divergence to a reference model over the whole vocabulary, whose log-probabilities are held too.
    pub full_kl: bool,
}

impl LogitsUse {
    /// The use that takes the most.
    pub const MOST: Self = Self { soft_cap: true, sets: true, entropy_gradient: true, full_kl: true };

    /// Copies of a [`Divergence`] between two models, with its gradient: log-probabilities of both, of their mixture, their
    /// exponentials and differences, and the logits of both, 7.2 to 9.2 on a CPU; and two for the allocator.
    pub const DIVERGENCE: usize = 11;

    /// Number of f32 tensors of the logits' size that are held at once in a forward and backward pass. Two of them are for the allocator,
    /// which keeps freed memory that the next tensors do not fit into; the rest are what torch holds on a CPU, from 3.1 to 7.2.
    pub fn copies(self) -> usize {
        // The logits or their gradient, the log-probabilities, and the gradient of the log-probabilities.
        let usual = 3;
        // The entropy holds exponentials and the gradients of both factors; the KL holds the same, and a difference. The two are held one
        // after the other, except for the exponentials.
        let loss_copies = match (self.entropy_gradient, self.full_kl) {
            (false, false) => 0,
            (true, true) => 3,
            _ => 2,
        };
        usual + loss_copies + usize::from(self.soft_cap) + usize::from(self.sets) + 2
    }
}

/// The most logits held at once on `device`, in elements. The device has `memory` bytes in all, if that is known, and an element takes
/// `copies` numbers of f32 (see [`LogitsUse`]).
///
/// On a GPU the number follows its memory, since each slice of rows reads and writes the gradient of the whole head: 2^27 at 80 GB. It is a
/// power of two, so that CUDA and `nvidia-smi`, whose totals differ by a few hundred MB, lead to the same number, and so do GPUs of one kind.
/// It depends on the whole memory, not on what is free: a resumed run has the same slices.
pub fn logits_chunk(device: Device, memory: Option<usize>, copies: usize) -> i64 {
    match (device, memory) {
        (Device::Cpu, _) => CPU_LOGITS,
        (_, None) => LEAST_GPU_LOGITS,
        (_, Some(bytes)) => {
            let most = (bytes / (GPU_PART * copies * size_of::<f32>())) as u64;
            measured_chunk().unwrap_or(most.checked_ilog2().map_or(0, |power| 1 << power).max(LEAST_GPU_LOGITS))
        }
    }
}

/// The size that `RLHF_LOGITS_CHUNK` sets on a GPU, the exponent of a power of two from 20 to 32: to measure other sizes with one build.
fn measured_chunk() -> Option<i64> {
    static CHUNK: OnceLock<Option<i64>> = OnceLock::new();
    *CHUNK.get_or_init(|| {
        let power: u32 = std::env::var("RLHF_LOGITS_CHUNK").ok()?.parse().ok()?;
        (20..=32).contains(&power).then(|| 1 << power)
    })
}

/// Log-probabilities of M tokens in all, row after row; each tensor is `[M]` f32.
#[derive(Debug)]
pub struct TokenLogprobs {
    /// Log-probability of each token given the tokens before it.
    pub logprobs: Tensor,
    /// Entropy in nats of the distribution that each token was sampled from.
    pub entropy: Option<Tensor>,
    /// KL divergence in nats from that distribution to the reference model's, if one was given.
    pub kl: Option<Tensor>,
    /// Further numbers of the logits, if they were asked for.
    pub logits: Option<LogitNumbers>,
}

/// Numbers of the logits in the place of M tokens, without a gradient; each tensor is `[M]` f32.
#[derive(Debug)]
pub struct LogitNumbers {
    /// Mean of the logits over the vocabulary.
    pub mean: Tensor,
    /// 1 where the token is the likeliest, the first of equal ones, else 0.
    pub is_top: Tensor,
    /// Logarithm of the sum of all squared probabilities, if it was asked for.
    pub log_sum_squares: Option<Tensor>,
}

impl LogitNumbers {
    /// Computes the numbers of the tokens `ids` `[M]` from `logits` `[M, vocab]`.
    fn of(logits: &Tensor, ids: &Tensor, squares: bool) -> Self {
        tch::no_grad(|| {
            let logits = logits.detach().to_kind(Kind::Float);
            let is_top = logits.argmax(-1, false).eq_tensor(ids).to_kind(Kind::Float);
            let log_sum_squares =
                squares.then(|| (&logits * 2.0).logsumexp([-1], false) - logits.logsumexp([-1], false) * 2.0);
            Self { mean: logits.mean_dim(-1, false, Kind::Float), is_top, log_sum_squares }
        })
    }
}

impl TokenLogprobs {
    fn detached(&self) -> Self {
        let detach = |x: &Option<Tensor>| x.as_ref().map(Tensor::detach);
        let logits = self.logits.as_ref().map(|LogitNumbers { mean, is_top, log_sum_squares }| LogitNumbers {
            mean: mean.shallow_clone(),
            is_top: is_top.shallow_clone(),
            log_sum_squares: log_sum_squares.as_ref().map(Tensor::shallow_clone),
        });
        Self { logprobs: self.logprobs.detach(), entropy: detach(&self.entropy), kl: detach(&self.kl), logits }
    }
}

/// Log-probabilities of M tokens and of the k likeliest tokens in the place of each, under softmax(logits).
#[derive(Debug)]
pub struct TopLogprobs {
    /// Log-probability of each token, `[M]` f32.
    pub logprobs: Tensor,
    /// Ids of the likeliest tokens, the likeliest first, `[M, k]` i64.
    pub top_ids: Tensor,
    /// Their log-probabilities, `[M, k]` f32.
    pub top_logprobs: Tensor,
}

impl TopLogprobs {
    /// Computes the log-probabilities of the tokens `ids` `[M]` from `logits` `[M, vocab]`; k is at most the size of the vocabulary.
    pub fn of(logits: &Tensor, ids: &Tensor, k: usize) -> Self {
        let all = logits.to_kind(Kind::Float).log_softmax(-1, Kind::Float);
        let k = i64::try_from(k).unwrap_or(i64::MAX).min(all.size()[1]);
        let (top_logprobs, top_ids) = all.topk(k, -1, true, true);
        Self { logprobs: all.gather(1, &ids.unsqueeze(1), false).squeeze_dim(1), top_ids, top_logprobs }
    }
}

/// Options of [`super::CausalLm::logprobs_backward`]. A temperature or [`Sampled`] converts into options that compute
/// log-probabilities only.
#[derive(Debug, Clone, Copy)]
pub struct LogprobOptions<'a> {
    /// The distribution that the tokens were sampled from.
    pub sampled: Sampled<'a>,
    /// Whether to compute entropies.
    pub entropy: bool,
    /// Whether the loss does not depend on the entropies: then libtorch's operations keep nothing for their gradient.
    pub entropy_is_metric: bool,
    /// Reference distributions to compute the KL divergence to: for each sequence of the batch, its index among the sequences
    /// of [`Distributions`].
    pub kl_to: Option<(&'a Distributions, &'a [usize])>,
    /// Whether to compute [`LogitNumbers`], at the temperature 1 and over the whole vocabulary.
    pub logits: bool,
    /// Whether to compute their sums of squared probabilities too.
    pub squares: bool,
    /// Whether to compute as a backward pass does even if there is none, so that equal weights give equal bits in both.
    pub as_backward: bool,
}

impl<'a> From<Sampled<'a>> for LogprobOptions<'a> {
    fn from(sampled: Sampled<'a>) -> Self {
        Self {
            sampled,
            entropy: false,
            entropy_is_metric: false,
            kl_to: None,
            logits: false,
            squares: false,
            as_backward: false,
        }
    }
}

impl From<f64> for LogprobOptions<'_> {
    /// Tokens sampled from the whole vocabulary at this temperature.
    fn from(temperature: f64) -> Self {
        Sampled::from(temperature).into()
    }
}

/// The head of a causal language model: hidden states to logits over the vocabulary.
#[derive(Debug)]
pub struct LmHead {
    pub(super) linear: Linear,
    /// Factor of hidden states.
    scale: f64,
    /// Logits `x` become `cap * tanh(x / cap)`.
    softcap: Option<f64>,
    /// Dtype of products.
    compute: Kind,
}

/// Distributions of a frozen model over its vocabulary, stored as one hidden state per token.
#[derive(Debug)]
pub struct Distributions {
    /// `[tokens, embedding size]` of each sequence, in the dtype of products.
    hidden: Vec<Tensor>,
    head: LmHead,
}

impl Distributions {
    /// Distributions at `hidden` `[M, embedding size]`, where sequence i has `lens[i]` of the M tokens. They share the memory of the
    /// head, or have a copy if `copies_head`.
    pub(super) fn new(head: &LmHead, hidden: &Tensor, lens: &[i64], copies_head: bool) -> Self {
        let LmHead { linear, compute, .. } = head;
        let hidden = if lens.is_empty() { Vec::new() } else { hidden.to_kind(*compute).split_with_sizes(lens, 0) };
        let weight = linear.stored_weight().detach();
        let weight = if copies_head { weight.copy() } else { weight };
        Self { hidden, head: head.with_weight(weight) }
    }

    /// Distributions of no tokens, to which others can be appended.
    pub(super) fn none(head: &LmHead) -> Self {
        let weight = head.linear.weight().0;
        Self::new(head, &Tensor::zeros([0, weight.size()[1]], (head.compute, weight.device())), &[], false)
    }

    /// Copies the head: the distributions stay what they are where the model's weights change in place.
    pub fn own_head(&mut self) {
        self.head = self.head.with_weight(self.head.linear.stored_weight().detach().copy());
    }

    /// Appends the same model's distributions of more sequences.
    pub fn extend(&mut self, more: Self) {
        self.hidden.extend(more.hidden);
    }

    /// Gathers the distributions of all ranks. Each rank has those of the rows `shares[rank]`; row i has `lens[i]` tokens.
    ///
    /// # Errors
    /// If a rank has ended or does not respond.
    pub fn gathered(self, world: &World, shares: &[Range<usize>], lens: &[i64]) -> Result<Self> {
        if world.size() == 1 {
            return Ok(self);
        }
        let counts: Vec<usize> = shares.iter().map(|rows| lens[rows.clone()].iter().sum::<i64>() as usize).collect();
        let width = self.head.linear.weight().0.size()[1];
        let none = Tensor::zeros([0, width], (self.head.compute, self.head.linear.stored_weight().device()));
        let parts: Vec<&Tensor> = std::iter::once(&none).chain(&self.hidden).collect();
        let parts = Tensor::cat(&parts, 0);
        let all = world.gather_rows(&parts, &counts)?;
        Ok(Self { hidden: all.split_with_sizes(lens, 0), head: self.head })
    }

    /// Log-probabilities of a slice of hidden states, `[rows, vocab]` f32.
    fn logprobs(&self, hidden: &Tensor, temperature: f64) -> Tensor {
        divided(self.head.forward(hidden).to_kind(Kind::Float), temperature).log_softmax(-1, Kind::Float)
    }

    /// Checks that the distributions at `rows` are over a vocabulary of `vocab` tokens, and as many as the tokens of `spans`.
    fn check(&self, rows: &[usize], spans: &[Range<usize>], vocab: i64) -> Result<()> {
        check_vocabulary(vocab, self.head.vocab_size())?;
        self.check_rows(rows, spans)
    }

    /// Checks that the distributions at `rows` are as many as the tokens of `spans`.
    fn check_rows(&self, rows: &[usize], spans: &[Range<usize>]) -> Result<()> {
        let counts: Vec<i64> =
            rows.iter().map(|&row| self.hidden.get(row).map_or(-1, |hidden| hidden.size()[0])).collect();
        if rows.is_empty() || !spans.iter().map(|span| span.len() as i64).eq(counts) {
            return Err(Error::Run(
                "KL over the vocabulary: expected one reference distribution per token of the batch".into(),
            ));
        }
        Ok(())
    }

    /// Hidden states of the sequences `rows`, one after another; checks that they are as many as the tokens of `spans`.
    pub(super) fn hidden_states(&self, rows: &[usize], spans: &[Range<usize>]) -> Result<Tensor> {
        self.check_rows(rows, spans)?;
        Ok(self.joined_hidden(rows))
    }

    /// Checks that tokens are among the ids that these distributions and a vocabulary of `vocab` have.
    pub(super) fn check_ids(&self, ids: &[i64], vocab: i64) -> Result<()> {
        let common = vocab.min(self.head.vocab_size());
        match ids.iter().find(|id| !(0..common).contains(*id)) {
            Some(id) => Err(Error::Run(format!(
                "a token with the id {id}: expected ids below {common}, those of both vocabularies"
            ))),
            None => Ok(()),
        }
    }

    /// Hidden states of the sequences `rows`, one after another: `[M, embedding size]`.
    fn joined_hidden(&self, rows: &[usize]) -> Tensor {
        Tensor::cat(&rows.iter().map(|&row| &self.hidden[row]).collect::<Vec<_>>(), 0)
    }
}

/// Checks that two models whose distributions are compared have equally large vocabularies.
pub(super) fn check_vocabulary(vocab: i64, other: i64) -> Result<()> {
    if vocab == other {
        return Ok(());
    }
    Err(Error::Run(format!("KL over the vocabulary: vocabulary sizes differ: {vocab} and {other}")))
}

/// The tokens of one pass and what is computed for each of them.
pub(super) struct Targets<'a> {
    /// Token ids, `[M]` i64.
    ids: Tensor,
    sampled: Sampled<'a>,
    entropy: bool,
    entropy_is_metric: bool,
    /// Reference distributions with the hidden states of the M tokens, `[M, embedding size]`.
    reference: Option<(&'a Distributions, Tensor)>,
    logits: bool,
    squares: bool,
    as_backward: bool,
}

impl<'a> Targets<'a> {
    /// The tokens at `spans` of the sequences.
    ///
    /// # Errors
    /// If the sets of tokens or the reference distributions of `options` do not fit the tokens or the model.
    pub(super) fn new<S: AsRef<[i64]>>(
        head: &LmHead,
        sequences: &[S],
        spans: &[Range<usize>],
        options: LogprobOptions<'a>,
    ) -> Result<Self> {
        let LogprobOptions { sampled, entropy, entropy_is_metric, kl_to, logits, squares, as_backward } = options;
        let pairs = sequences.iter().zip(spans);
        let ids: Vec<i64> = pairs.flat_map(|(s, span)| &s.as_ref()[span.clone()]).copied().collect();
        sampled.check(ids.len() as i64)?;
        if let Some((distributions, rows)) = kl_to {
            distributions.check(rows, spans, head.vocab_size())?;
        }
        let ids = on_device(&ids, head.linear.stored_weight().device());
        let reference = kl_to.map(|(distributions, rows)| (distributions, distributions.joined_hidden(rows)));
        Ok(Self { ids, sampled, entropy, entropy_is_metric, reference, logits, squares, as_backward })
    }

    /// The results of a pass over no tokens.
    pub(super) fn none(&self) -> TokenLogprobs {
        self.slices().join(self.ids.device())
    }

    fn slices(&self) -> Slices {
        Slices {
            logprobs: Vec::new(),
            entropy: self.entropy.then(Vec::new),
            kl: self.reference.is_some().then(Vec::new),
            logits: self.logits.then(Vec::new),
        }
    }
}

/// Results of consecutive slices of tokens.
struct Slices {
    logprobs: Vec<Tensor>,
    entropy: Option<Vec<Tensor>>,
    kl: Option<Vec<Tensor>>,
    logits: Option<Vec<LogitNumbers>>,
}

impl Slices {
    fn push(&mut self, mut slice: TokenLogprobs) {
        self.logprobs.push(slice.logprobs);
        for (parts, part) in [(&mut self.entropy, slice.entropy), (&mut self.kl, slice.kl)] {
            parts.iter_mut().for_each(|parts| parts.extend(part.as_ref().map(Tensor::shallow_clone)));
        }
        self.logits.iter_mut().for_each(|parts| parts.extend(slice.logits.take()));
    }

    fn join(self, device: Device) -> TokenLogprobs {
        let join = |parts: Vec<Tensor>| joined(&parts, device);
        let join_numbers = |parts: Vec<LogitNumbers>| {
            let squares = parts.iter().any(|part| part.log_sum_squares.is_some());
            let all = |part: fn(&LogitNumbers) -> &Tensor| {
                join(parts.iter().map(|numbers| part(numbers).shallow_clone()).collect())
            };
            LogitNumbers {
                mean: all(|numbers| &numbers.mean),
                is_top: all(|numbers| &numbers.is_top),
                log_sum_squares: squares.then(|| {
                    join(parts.iter().filter_map(|part| Some(part.log_sum_squares.as_ref()?.shallow_clone())).collect())
                }),
            }
        };
        let logits = self.logits.map(join_numbers);
        TokenLogprobs { logprobs: join(self.logprobs), entropy: self.entropy.map(join), kl: self.kl.map(join), logits }
    }
}

impl LmHead {
    /// The head with the weight `[vocab, embedding size]` of a model of this shape.
    pub(super) fn new(weight: Tensor, shape: &Shape, compute: Kind) -> Self {
        let (scale, softcap) = (shape.lm_head_scale, shape.final_softcap);
        Self { linear: Linear::new(weight, None, compute), scale, softcap, compute }
    }

    /// A head of the same form with another weight.
    fn with_weight(&self, weight: Tensor) -> Self {
        Self { linear: Linear::new(weight, None, self.compute), ..*self }
    }

    /// Hidden states as they are multiplied with the weight.
    fn scaled(&self, hidden: &Tensor) -> Tensor {
        if self.scale == 1.0 { hidden.shallow_clone() } else { hidden * self.scale }
    }

    fn vocab_size(&self) -> i64 {
        self.linear.widths()[1]
    }

    /// Logits of hidden states, `[M, vocab]` in the dtype of products, or f32 under a soft cap.
    pub(super) fn forward(&self, hidden: &Tensor) -> Tensor {
        let logits = self.linear.forward(&self.scaled(hidden));
        match self.softcap {
            Some(cap) => (logits.to_kind(Kind::Float) / cap).tanh() * cap,
            None => logits,
        }
    }

    /// [`TopLogprobs`] of the tokens `ids` `[M]` at the hidden states `[M, embedding size]`; M is at least 1.
    pub(super) fn top_logprobs(
        &self,
        hidden: &Tensor,
        ids: &Tensor,
        k: usize,
        ends: StopCheck<'_>,
    ) -> Result<TopLogprobs> {
        let slices = self.slices(hidden.size()[0]).map(|range| {
            ends.check()?;
            let logits = self.forward(&narrow_rows(hidden, &range));
            Ok(TopLogprobs::of(&logits, &narrow_rows(ids, &range), k))
        });
        let slices: Vec<TopLogprobs> = slices.collect::<Result<_>>()?;
        let all = |f: fn(&TopLogprobs) -> &Tensor| Tensor::cat(&slices.iter().map(f).collect::<Vec<_>>(), 0);
        Ok(TopLogprobs {
            logprobs: all(|slice| &slice.logprobs),
            top_ids: all(|slice| &slice.top_ids),
            top_logprobs: all(|slice| &slice.top_logprobs),
        })
    }

    /// Log-probabilities of `targets` `[M]` at the hidden states `[M, embedding size]`. The divergence to a reference model is
    /// computed in the backward pass only.
    pub(super) fn token_logprobs(&self, hidden: &Tensor, targets: &Targets<'_>) -> TokenLogprobs {
        let device = hidden.device();
        let by_kernels =
            !hidden.requires_grad() && targets.sampled.sets.is_none() && logits_by_kernels(self.compute, device);
        let mut results = targets.slices();
        let slices: Vec<Range<i64>> = self.slices(hidden.size()[0]).collect();
        // On a CPU, a single slice takes the product that is the fastest for its number of rows.
        let as_backward = slices.len() > 1 || targets.as_backward || device.is_cuda();
        let shares_memory = by_kernels && as_backward && self.softcap.is_none();
        let mut kernels = shares_memory.then(|| SliceKernels::new(self));
        for range in slices {
            let hidden = narrow_rows(hidden, &range);
            results.push(if !by_kernels {
                self.plain_logprobs(&hidden, &range, targets)
            } else {
                let ids = narrow_rows(&targets.ids, &range);
                let logits = match &mut kernels {
                    Some(kernels) => kernels.logits(&hidden).1,
                    None => self.forward(&with_rounded_rows(&hidden)),
                };
                let logits = logits.narrow(0, 0, ids.size()[0]);
                let stats = tch_ext::logits_stats(&logits, targets.sampled.temperature, &ids, targets.entropy);
                let numbers = targets.logits.then(|| LogitNumbers::of(&logits, &ids, targets.squares));
                TokenLogprobs { logprobs: stats.logprobs, entropy: stats.entropy, kl: None, logits: numbers }
            });
        }
        results.join(targets.ids.device())
    }

    /// Log-probabilities of `targets` `[M]` at the hidden states `[M, embedding size]`, detached, and the gradient of the loss
    /// with respect to the hidden states. The gradient of the head's weight is accumulated.
    ///
    /// `loss` receives a slice of the tokens and their range among the M, and returns their share of the loss, a scalar.
    pub(super) fn logprobs_gradient(
        &self,
        hidden: &Tensor,
        targets: &Targets<'_>,
        mut loss: impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
    ) -> (TokenLogprobs, Tensor) {
        let mut results = targets.slices();
        let gradient = hidden.zeros_like();
        // The kernels compute neither a second distribution nor one over a part of the vocabulary.
        let by_kernels = self.softcap.is_none()
            && targets.reference.is_none()
            && targets.sampled.sets.is_none()
            && logits_by_kernels(self.compute, hidden.device());
        let mut kernels = by_kernels.then(|| SliceKernels::new(self));
        for range in self.slices(hidden.size()[0]) {
            let (hidden, mut gradient) = (narrow_rows(hidden, &range).detach(), narrow_rows(&gradient, &range));
            let now = match &mut kernels {
                Some(kernels) => kernels.backward(&hidden, range, targets, &mut loss, &mut gradient),
                None => {
                    let hidden = hidden.set_requires_grad(true);
                    let now = self.plain_logprobs(&hidden, &range, targets);
                    loss(range, &now).backward();
                    gradient.copy_(&hidden.grad());
                    now
                }
            };
            results.push(now.detached());
        }
        (results.join(targets.ids.device()), gradient)
    }

    /// As [`LmHead::logprobs_gradient`], of a loss of all tokens together.
    pub(super) fn joint_gradient(
        &self,
        hidden: &Tensor,
        targets: &Targets<'_>,
        loss: impl FnOnce(&TokenLogprobs) -> Tensor,
    ) -> (TokenLogprobs, Tensor) {
        let mut loss = Some(loss);
        if self.slices(hidden.size()[0]).nth(1).is_none() {
            let mut loss = |_, now: &TokenLogprobs| loss.take().expect("there is one slice")(now);
            return self.logprobs_gradient(hidden, targets, &mut loss);
        }
        let results = tch::no_grad(|| self.token_logprobs(&hidden.detach(), targets));
        let now = TokenLogprobs { logprobs: results.logprobs.detach().set_requires_grad(true), ..results };
        loss.take().expect("it is called once")(&now).backward();
        let slopes = now.logprobs.grad();
        // The numbers of the logits are there already.
        let ids = targets.ids.shallow_clone();
        let again = Targets {
            ids,
            sampled: targets.sampled,
            entropy: false,
            entropy_is_metric: true,
            reference: None,
            logits: false,
            squares: false,
            as_backward: true,
        };
        let (_, gradient) = self.logprobs_gradient(hidden, &again, |range, now| {
            (&now.logprobs * narrow_rows(&slopes, &range)).sum(Kind::Float)
        });
        (TokenLogprobs { logprobs: now.logprobs.detach(), ..now }, gradient)
    }

    /// Differentiable log-probabilities of the targets in `range` at their hidden states, by libtorch's own operations; all
    /// logits of the range at once.
    fn plain_logprobs(&self, hidden: &Tensor, range: &Range<i64>, targets: &Targets<'_>) -> TokenLogprobs {
        let Targets { ids, sampled, entropy, entropy_is_metric, reference, .. } = targets;
        let count = range.end - range.start;
        let excluded = sampled.excluded(range.start, count, self.vocab_size(), hidden.device());
        let reference_logprobs = reference.as_ref().map(|(distributions, states)| {
            let all = tch::no_grad(|| distributions.logprobs(&narrow_rows(states, range), sampled.temperature));
            match &excluded {
                None => all,
                some => tch::no_grad(|| restricted(&all, some.as_ref()).log_softmax(-1, Kind::Float)),
            }
        });
        let ids = narrow_rows(ids, range);
        let logits = self.forward(hidden).to_kind(Kind::Float);
        let numbers = targets.logits.then(|| LogitNumbers::of(&logits, &ids, targets.squares));
        let logits = divided(logits, sampled.temperature);
        let all = restricted(&logits, excluded.as_ref()).log_softmax(-1, Kind::Float);
        let logprobs = all.gather(1, &ids.unsqueeze(1), false).squeeze_dim(1);
        let entropy = entropy
            .then(|| if *entropy_is_metric { tch::no_grad(|| row_entropy(&all.detach())) } else { row_entropy(&all) });
        let kl = reference_logprobs.map(|others| row_kl(&all, &others));
        TokenLogprobs { logprobs, entropy, kl, logits: numbers }
    }

    /// [`super::CausalLm::kl_to`] at the hidden states `[M, embedding size]` of both models: `[M]` f32.
    pub(super) fn kl_at(&self, hidden: &Tensor, other: (&Self, &Tensor), sampled: Sampled<'_>) -> Tensor {
        let (other, others_hidden) = other;
        let slice_kl = |range: Range<i64>| {
            let count = range.end - range.start;
            let excluded = sampled.excluded(range.start, count, self.vocab_size(), hidden.device());
            let logprobs = |head: &Self, hidden: &Tensor| {
                let hidden = narrow_rows(hidden, &range);
                let logits = if uses_kernels(head.compute, hidden.device()) {
                    head.forward(&with_rounded_rows(&hidden)).narrow(0, 0, count)
                } else {
                    head.forward(&hidden)
                };
                let logits = divided(logits.to_kind(Kind::Float), sampled.temperature);
                restricted(&logits, excluded.as_ref()).log_softmax(-1, Kind::Float)
            };
            row_kl(&logprobs(self, hidden), &logprobs(other, others_hidden))
        };
        let parts: Vec<Tensor> = self.slices(hidden.size()[0]).map(slice_kl).collect();
        joined(&parts, hidden.device())
    }

    /// Ranges of rows whose logits may be held at once. They do not depend on the loss, so that passes with and without a gradient have the same.
    fn slices(&self, rows: i64) -> impl Iterator<Item = Range<i64>> + use<> {
        self.slices_for(rows, self.vocab_size(), LogitsUse::MOST.copies())
    }

    /// [`LmHead::slices`] of logits over `vocab` tokens, each of which takes `copies` numbers of f32.
    fn slices_for(&self, rows: i64, vocab: i64, copies: usize) -> impl Iterator<Item = Range<i64>> + use<> {
        let device = self.linear.stored_weight().device();
        let whole = if device.is_cuda() { memory(device) } else { None };
        let most = (logits_chunk(device, whole, copies) / vocab.max(1)).max(1);
        // Slices of about equal length, since a short last one would be a product of a poor shape; and of few different lengths.
        let share = rows.max(1).unsigned_abs().div_ceil(rows.unsigned_abs().div_ceil(most.unsigned_abs()).max(1));
        let len = rounded(share as i64).min(if most < 64 { most } else { most / 32 * 32 });
        (0..rows).step_by(len as usize).map(move |from| from..(from + len).min(rows))
    }
}

/// Forward and backward passes through the LM head by fused kernels, slice by slice; the gradient of the logits replaces the logits in place.
struct SliceKernels<'m> {
    head: &'m LmHead,
    /// The head's weight as it is held, which accumulates the gradient.
    weight: &'m Tensor,
    /// The head's weight in the dtype of products, `[vocab, embedding size]`.
    used: Tensor,
    /// The logits of a slice; allocated for the first slice, which is the longest. Allocated for each slice, they would leave a hole in the
    /// heap into which the next ones do not fit, since results are stored in it.
    buffer: Option<Tensor>,
}

impl<'m> SliceKernels<'m> {
    fn new(head: &'m LmHead) -> Self {
        let (weight, used) = head.linear.weight();
        Self { head, weight, used, buffer: None }
    }

    /// Returns `hidden`, scaled and padded to a round number of rows for the product, and its logits `[rows, vocab]`, which the next call
    /// overwrites. The head has no soft cap.
    fn logits(&mut self, hidden: &Tensor) -> (Tensor, Tensor) {
        let Self { head, used, buffer, .. } = self;
        let hidden = with_rounded_rows(&head.scaled(hidden).to_kind(used.kind()));
        let rows = hidden.size()[0];
        let shape = [rows, used.size()[0]];
        let buffer = buffer.get_or_insert_with(|| Tensor::empty(shape, (used.kind(), used.device())));
        let mut logits = buffer.narrow(0, 0, rows);
        tch_ext::product_into(&mut logits, &hidden, &used.tr());
        (hidden, logits)
    }

    /// Writes the gradient of the loss with respect to `hidden` to `gradient`, both `[count, embedding size]`.
    fn backward(
        &mut self,
        hidden: &Tensor,
        range: Range<i64>,
        targets: &Targets<'_>,
        loss: &mut impl FnMut(Range<i64>, &TokenLogprobs) -> Tensor,
        gradient: &mut Tensor,
    ) -> TokenLogprobs {
        let (count, ids) = (range.end - range.start, narrow_rows(&targets.ids, &range));
        let temperature = targets.sampled.temperature;
        let (hidden, all) = self.logits(hidden);
        let mut logits = all.narrow(0, 0, count);
        let stats = tch_ext::logits_stats(&logits, temperature, &ids, targets.entropy);
        let now = TokenLogprobs {
            logprobs: stats.logprobs.set_requires_grad(true),
            entropy: stats.entropy.map(|entropy| entropy.set_requires_grad(true)),
            kl: None,
            logits: targets.logits.then(|| LogitNumbers::of(&logits, &ids, targets.squares)),
        };
        loss(range, &now).backward();
        let slope = now.logprobs.grad();
        let slope = if slope.defined() { slope } else { now.logprobs.detach().zeros_like() };
        let entropy = now.entropy.as_ref().map(|entropy| (entropy.detach(), entropy.grad()));
        let entropy = entropy.as_ref().filter(|(_, slope)| slope.defined()).map(|(value, slope)| (value, slope));
        tch_ext::logits_gradient(&mut logits, temperature, &ids, &stats.lse, &slope, entropy);
        self.finish(&hidden, &all, count, gradient);
        now
    }

    /// Writes the gradient with respect to the `count` hidden states to `gradient`, `[count, embedding size]`, and accumulates the gradient of
    /// the head's weight. `hidden` and `all` are what [`SliceKernels::logits`] returned; `all` now holds the gradient of the logits.
    fn finish(&self, hidden: &Tensor, all: &Tensor, count: i64, gradient: &mut Tensor) {
        let Self { head, weight, used, .. } = self;
        let _ = all.narrow(0, count, hidden.size()[0] - count).zero_();
        let mut hidden_gradient = hidden.empty_like();
        tch_ext::product_into(&mut hidden_gradient, all, used);
        gradient.copy_(&head.scaled(&hidden_gradient.narrow(0, 0, count)));
        if weight.requires_grad() {
            tch_ext::add_product_to_grad(weight, &all.tr(), hidden);
        }
    }
}

/// Whether kernels compute statistics and gradients of logits in this dtype on this device.
fn logits_by_kernels(compute: Kind, device: Device) -> bool {
    uses_kernels(compute, device) || tch_ext::has_gpu_kernels(compute, device)
}

/// `logits` divided by the temperature. At 1 there is no division: it would read and write all logits, and again in the backward pass.
fn divided(logits: Tensor, temperature: f64) -> Tensor {
    if temperature == 1.0 { logits } else { logits / temperature }
}

/// The rows `range` of `x`, as a view.
fn narrow_rows(x: &Tensor, range: &Range<i64>) -> Tensor {
    x.narrow(0, range.start, range.end - range.start)
}

/// `hidden` followed by rows of 0 up to a round number of rows.
fn with_rounded_rows(hidden: &Tensor) -> Tensor {
    let count = hidden.size()[0];
    hidden.constant_pad_nd([0, 0, 0, rounded(count) - count])
}

/// Entropy in nats of each row of log-probabilities, `[M, vocab]` to `[M]`.
fn row_entropy(logprobs: &Tensor) -> Tensor {
    // A product of a row and a column needs no third tensor of this size.
    -logprobs.exp().unsqueeze(1).bmm(&logprobs.unsqueeze(2)).view([-1])
}

/// KL(p || q) in nats of each row of log-probabilities, `[M, vocab]` to `[M]`.
fn row_kl(p: &Tensor, q: &Tensor) -> Tensor {
    p.exp().unsqueeze(1).bmm(&(p - q).unsqueeze(2)).view([-1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divergence_is_not_symmetric_and_that_of_trl_0_11() {
        let row = |logits: &[f32]| Tensor::from_slice(logits).log_softmax(-1, Kind::Float).unsqueeze(0);
        let (p, q) = (row(&[1.0, 1.0, 0.0]), row(&[0.0, 1.0, 2.0]));
        let kl = |p: &Tensor, q: &Tensor| row_kl(p, q).double_value(&[0]);
        assert!((kl(&p, &q) - 0.657205).abs() < 1e-6, "{}", kl(&p, &q)); // TRL 0.11.4, kl_penalty = full
        assert!((kl(&q, &p) - kl(&p, &q)).abs() > 1e-2);
        assert_eq!(kl(&p, &p), 0.0);
    }

    #[test]
    fn a_gpu_holds_as_many_logits_at_once_as_its_memory_allows_whoever_reports_it() {
        let most = LogitsUse::MOST.copies();
        let chunk_power = |bytes: u64| logits_chunk(Device::Cuda(0), Some(bytes as usize), most).ilog2();
        assert_eq!(logits_chunk(Device::Cpu, Some(1 << 40), most), 1 << 23);
        assert_eq!(logits_chunk(Device::Cuda(0), None, most), 1 << 24);
        // 80 GB / (11 * 10 * 4 B) = 1.8e8 logits: 2^27 = 1.3e8.
        assert_eq!(
            [8, 16, 24, 40, 48, 80, 141, 192].map(|gb| chunk_power(gb * 1_000_000_000)),
            [24, 25, 25, 26, 26, 27, 28, 28]
        );
        // The H100 of 80 GB: 81,559 MiB by nvidia-smi, 79.1 GiB by CUDA.
        assert_eq!([chunk_power(81_559 << 20), chunk_power(81_000 << 20)], [27, 27]);
        // No use takes more than an eleventh of any card of 8 GB or more, and the usual one less than half of that.
        for gb in [8u64, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192] {
            let bytes = gb * 1_000_000_000;
            let taken = |copies: usize| (4 * copies as u64) << chunk_power(bytes);
            assert!(taken(most) <= bytes / 11 && taken(LogitsUse::default().copies()) <= bytes / 22, "{gb} GB");
            let divergence_chunk = logits_chunk(Device::Cuda(0), Some(bytes as usize), LogitsUse::DIVERGENCE) as u64;
            assert!(divergence_chunk * 4 * LogitsUse::DIVERGENCE as u64 <= bytes / 10, "{gb} GB");
        }
    }

    #[test]
    fn each_use_of_logits_has_its_number_of_copies() {
        let usual = LogitsUse::default();
        assert_eq!(usual.copies(), 5);
        assert_eq!(LogitsUse { entropy_gradient: true, ..usual }.copies(), 7);
        assert_eq!(LogitsUse { full_kl: true, ..usual }.copies(), 7);
        assert_eq!(LogitsUse { entropy_gradient: true, full_kl: true, ..usual }.copies(), 8);
        assert_eq!(LogitsUse { soft_cap: true, ..usual }.copies(), 6);
        assert_eq!(LogitsUse::MOST.copies(), 10);
    }

    #[test]
    fn log_probabilities_of_several_slices_are_those_of_all_logits_at_once_and_of_the_pass_with_gradients() {
        let (rows, vocab, width) = (2500, 8192, 16);
        let random = |size: [i64; 2], step: i64| {
            let numbers = Tensor::arange(size[0] * size[1], (Kind::Float, Device::Cpu));
            (numbers * step as f64).sin().view(size)
        };
        let linear = Linear::new(random([vocab, width], 7), None, Kind::Float);
        let head = LmHead { linear, scale: 0.5, softcap: None, compute: Kind::Float };
        assert_eq!(head.slices(rows).count(), 3);
        let hidden = random([rows, width], 3);
        let ids = Tensor::arange(rows, (Kind::Int64, Device::Cpu)) * 3;
        let sampled = Sampled::from(0.7);
        let targets = Targets {
            ids,
            sampled,
            entropy: true,
            entropy_is_metric: false,
            reference: None,
            logits: true,
            squares: false,
            as_backward: false,
        };
        let found = head.token_logprobs(&hidden, &targets);
        let all = (head.forward(&hidden).to_kind(Kind::Double) / 0.7).log_softmax(-1, Kind::Double);
        let expected = all.gather(1, &targets.ids.unsqueeze(1), false).squeeze_dim(1);
        let largest = |x: &Tensor, y: &Tensor| (x - y).abs().max().double_value(&[]);
        assert!(largest(&found.logprobs, &expected) < 1e-5, "{}", largest(&found.logprobs, &expected));
        let (entropy, expected) = (found.entropy.as_ref().unwrap(), row_entropy(&all));
        assert!(largest(entropy, &expected) < 1e-4, "{}", largest(entropy, &expected));
        let loss = |_: Range<i64>, now: &TokenLogprobs| now.logprobs.sum(Kind::Float);
        let (with_gradients, _) = head.logprobs_gradient(&hidden, &targets, loss);
        assert!(with_gradients.logprobs.equal(&found.logprobs));
    }
}
