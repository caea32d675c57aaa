//! Every number of an update, by name: the events of an observed [`Learner`](super::learner::Learner), and the tensors made of them.

use crate::rl::experience::{Experience, row_index, to_slots};
use crate::rl::math;
use crate::rl::shaping::Targets;
use crate::rl::stats::StepStats;
use rlhf_lm::model::TokenLogprobs;
use rlhf_lm::optim::LearningRates;
use tch::{Device, Kind, Tensor};

/// Tensors by name.
pub(crate) type NamedTensors = Vec<(String, Tensor)>;

/// An event of an update.
#[derive(Debug)]
pub(crate) enum Learned {
    /// The update starts with this batch.
    Batch(Box<Observed>),
    /// A micro-batch has added to the gradients.
    MicroBatch {
        /// Its rows in the batch.
        rows: Vec<usize>,
        /// The log-probabilities of its tokens under the policy, unless only the critic is trained; `[M]` each.
        now: Option<TokenLogprobs>,
        /// Its values under the critic, if there is one.
        values: Option<Tensor>,
        /// Sums of the part of the mini-batch so far.
        so_far: Box<StepStats>,
    },
    /// The micro-batches of a part of a mini-batch are done.
    Part,
    /// The gradients of a mini-batch are complete.
    Gradients(Gradients),
    /// An optimizer step is taken or skipped.
    Step { epoch: usize, rates: LearningRates, parts: Vec<StepStats> },
}

/// Norms of the gradients before clipping, by parameter.
#[derive(Debug, Default)]
pub(crate) struct Gradients {
    pub(crate) policy: Vec<(String, f64)>,
    pub(crate) value: Vec<(String, f64)>,
}

/// A batch that is trained on.
#[derive(Debug)]
pub(crate) struct Observed {
    tensors: NamedTensors,
    lengths: Vec<i64>,
    value_counts: Vec<i64>,
    width: i64,
    logprobs: Tensor,
    loss_mask: Tensor,
}

impl Observed {
    /// Returns the batch `e` with its `targets`. The tensors share memory with those of `e` and `targets`, which no
    /// update changes.
    pub(crate) fn of(e: &Experience, targets: &Targets) -> Self {
        let counts = |numbers: &[usize]| whole(&numbers.iter().map(|&n| n as i64).collect::<Vec<_>>());
        let lens = |rows: &[Vec<i64>]| whole(&rows.iter().map(|row| row.len() as i64).collect::<Vec<_>>());
        let longest = e.prompts.iter().map(Vec::len).max().unwrap_or(0);
        let mut tensors = NamedTensors::new();
        let mut add = |name: &str, x: &Tensor| tensors.push((name.into(), x.shallow_clone()));
        add("rollout.prompt_ids", &padded(&e.prompts, longest));
        add("rollout.prompt_lengths", &lens(&e.prompts));
        add("rollout.response_ids", &padded(&e.responses, e.width() as usize));
        add("rollout.response_lengths", &lens(&e.responses));
        add("rollout.groups", &counts(&e.groups));
        add("rollout.logprobs", &e.logprobs);
        add("rollout.values", &e.values);
        add("rollout.scores", &e.scores);
        let optional = [
            ("rollout.ref_logprobs", &e.ref_logprobs),
            ("rollout.full_kl", &e.full_kl),
            ("rollout.token_scores", &e.token_scores),
            ("rollout.baselines", &e.baselines),
        ];
        optional.into_iter().for_each(|(name, x)| x.iter().for_each(|x| add(name, x)));
        add("masks.response", &e.masks.response);
        add("masks.loss", &e.masks.loss);
        add("masks.value", &e.masks.value);
        add("masks.value_loss", &e.masks.value_loss);
        add("targets.kl", &targets.kl);
        add("targets.rewards", &targets.rewards);
        add("targets.advantages", &targets.advantages);
        add("targets.returns", &targets.returns);
        Self {
            tensors,
            lengths: e.lengths(),
            value_counts: e.value_counts.clone(),
            width: e.width(),
            logprobs: e.logprobs.shallow_clone(),
            loss_mask: e.masks.loss.shallow_clone(),
        }
    }

    /// Scatters `numbers` of `rows` into `[rows, R]`; `counts` are the counts of numbers of all rows in the batch.
    fn slots(&self, numbers: &Tensor, rows: &[usize], counts: &[i64]) -> Tensor {
        let counts: Vec<i64> = rows.iter().map(|&row| counts[row]).collect();
        to_slots(&numbers.detach().to_kind(Kind::Float), &counts, self.width)
    }
}

/// A micro-batch of an optimizer step, with its own sums.
struct Micro {
    rows: Vec<usize>,
    now: Option<TokenLogprobs>,
    values: Option<Tensor>,
    sums: [f64; SUMS.len()],
}

/// An optimizer step.
struct Step {
    epoch: usize,
    rates: LearningRates,
    parts: Vec<StepStats>,
    sums: [f64; SUMS.len()],
    micro: Vec<Micro>,
    gradients: Gradients,
}

/// Names of the sums of a micro-batch and of an optimizer step.
const SUMS: [&str; 10] = [
    "loss",
    "policy_loss",
    "policy_clipped",
    "approx_kl",
    "policy_kl",
    "ref_kl",
    "entropy",
    "ratio",
    "value_loss",
    "value_clipped",
];

/// Returns all numbers of an observed update by name, on the CPU; none without a batch. `docs/guides/replay.md` has names and
/// shapes.
pub(crate) fn collect_tensors(events: impl IntoIterator<Item = Learned>) -> NamedTensors {
    let mut batch = None;
    let mut steps = Vec::new();
    let mut micro = Vec::new();
    let mut before = [0.0; SUMS.len()];
    let mut gradients = Gradients::default();
    for event in events {
        match event {
            Learned::Batch(observed) => batch = Some(observed),
            Learned::MicroBatch { rows, now, values, mut so_far } => {
                let so_far = SUMS.map(|name| *so_far.sum_mut(name));
                let sums = std::array::from_fn(|at| so_far[at] - before[at]);
                before = so_far;
                micro.push(Micro { rows, now, values, sums });
            }
            Learned::Part => before = [0.0; SUMS.len()],
            Learned::Gradients(norms) => gradients = norms,
            Learned::Step { epoch, rates, mut parts } => {
                let micro = std::mem::take(&mut micro);
                let gradients = std::mem::take(&mut gradients);
                let sums = SUMS.map(|name| parts.iter_mut().map(|part| *part.sum_mut(name)).sum());
                steps.push(Step { epoch, rates, parts, sums, micro, gradients });
            }
        }
    }
    let Some(batch) = batch else { return NamedTensors::new() };
    let mut tensors = epoch_tensors(&batch, &steps);
    tensors.extend(micro_batch_tensors(&steps));
    tensors.extend(step_tensors(&steps));
    let batch_tensors = batch.tensors.into_iter();
    batch_tensors.chain(tensors).map(|(name, x)| (name, x.detach().to_device(Device::Cpu).contiguous())).collect()
}

/// Numbers of each token in each epoch, `[E, B, R]`, and the micro-batch of each response, `[E, B]`.
fn epoch_tensors(batch: &Observed, steps: &[Step]) -> NamedTensors {
    let epochs = steps.iter().map(|step| step.epoch + 1).max().unwrap_or(0) as i64;
    let rows = batch.lengths.len() as i64;
    let device = batch.logprobs.device();
    let zeros = || Tensor::zeros([epochs, rows, batch.width], (Kind::Float, device));
    let [mut logprobs, mut entropies, mut kl, mut values] = [(); 4].map(|()| None::<Tensor>);
    let places = Tensor::full([epochs, rows], -1, (Kind::Int64, Device::Cpu));
    let micro = steps.iter().flat_map(|step| step.micro.iter().map(move |micro| (step.epoch as i64, micro)));
    for (number, (epoch, Micro { rows, now, values: value, .. })) in (0i64..).zip(micro) {
        let put = |all: &mut Option<Tensor>, numbers: Option<&Tensor>, counts: &[i64]| {
            let Some(numbers) = numbers else { return };
            let slots = batch.slots(numbers, rows, counts);
            let _ = all.get_or_insert_with(zeros).get(epoch).index_copy_(0, &row_index(rows, &slots), &slots);
        };
        let tokens = now.as_ref();
        put(&mut logprobs, tokens.map(|now| &now.logprobs), &batch.lengths);
        put(&mut entropies, tokens.and_then(|now| now.entropy.as_ref()), &batch.lengths);
        put(&mut kl, tokens.and_then(|now| now.kl.as_ref()), &batch.lengths);
        put(&mut values, value.as_ref(), &batch.value_counts);
        let _ = places.get(epoch).index_fill_(0, &row_index(rows, &places), number);
    }
    // Rows of other ranks, and all rows after an early stop, have no ratios.
    let visited = places.to_device(device).ge(0).unsqueeze(-1).logical_and(&batch.loss_mask);
    let ratios = logprobs.as_ref().map(|now| math::keep(&(now - &batch.logprobs).exp(), &visited));
    let all = [("logprobs", logprobs), ("entropies", entropies), ("kl", kl), ("values", values), ("ratios", ratios)];
    let epochs = all.into_iter().filter_map(|(name, x)| Some((format!("epochs.{name}"), x?)));
    epochs.chain([("epochs.micro_batch".to_string(), places)]).collect()
}

/// The sums of each micro-batch, `[K]`.
fn micro_batch_tensors(steps: &[Step]) -> NamedTensors {
    let all = || steps.iter().enumerate().flat_map(|(at, step)| step.micro.iter().map(move |micro| (at, micro)));
    let step: Vec<i64> = all().map(|(at, _)| at as i64).collect();
    let responses: Vec<i64> = all().map(|(_, micro)| micro.rows.len() as i64).collect();
    let sums = SUMS.iter().enumerate().map(|(sum, name)| {
        let numbers: Vec<f64> = all().map(|(_, micro)| micro.sums[sum]).collect();
        (format!("micro_batches.{name}"), Tensor::from_slice(&numbers))
    });
    let counts = [("micro_batches.step", step), ("micro_batches.responses", responses)];
    counts.into_iter().map(|(name, numbers)| (name.to_string(), whole(&numbers))).chain(sums).collect()
}

/// The sums, learning rates and gradient norms of each optimizer step, `[S]`.
fn step_tensors(steps: &[Step]) -> NamedTensors {
    let numbers = |number: &dyn Fn(&Step) -> f64| Tensor::from_slice(&steps.iter().map(number).collect::<Vec<f64>>());
    let sum = |number: fn(&StepStats) -> f64| numbers(&|step| step.parts.iter().map(number).sum());
    let last = |number: fn(&StepStats) -> f64| numbers(&|step| step.parts.last().map_or(f64::NAN, number));
    let mut tensors = NamedTensors::new();
    let mut add = |name: String, x: Tensor| tensors.push((name, x));
    add("steps.epoch".into(), whole(&steps.iter().map(|step| step.epoch as i64).collect::<Vec<_>>()));
    add("steps.learning_rate".into(), numbers(&|step| step.rates.policy.unwrap_or(0.0)));
    add("steps.value_learning_rate".into(), numbers(&|step| step.rates.value));
    add("steps.tokens".into(), sum(|s| s.tokens));
    add("steps.value_slots".into(), sum(|s| s.value_slots));
    for (at, name) in SUMS.iter().enumerate() {
        add(format!("steps.{name}"), numbers(&|step| step.sums[at]));
    }
    add("steps.policy_grad_norm".into(), last(|s| s.policy_grad_norm));
    add("steps.value_grad_norm".into(), last(|s| s.value_grad_norm));
    add("steps.skipped".into(), last(|s| f64::from(u8::from(s.skipped || s.not_finite().is_some()))));
    type Norms = fn(&Gradients) -> &[(String, f64)];
    let models: [(&str, Norms); 2] = [("policy", |g| &g.policy), ("value", |g| &g.value)];
    for (model, norms_of_model) in models {
        let Some(first) = steps.iter().map(|step| norms_of_model(&step.gradients)).find(|norms| !norms.is_empty())
        else {
            continue;
        };
        for (at, (name, _)) in first.iter().enumerate() {
            let norm = |step: &Step| norms_of_model(&step.gradients).get(at).map_or(f64::NAN, |(_, norm)| *norm);
            add(format!("{model}_grad_norms.{name}"), numbers(&norm));
        }
    }
    tensors
}

fn whole(numbers: &[i64]) -> Tensor {
    Tensor::from_slice(numbers)
}

/// Rows of ids as `[B, width]`, filled with -1 after the last id of each row.
fn padded(rows: &[Vec<i64>], width: usize) -> Tensor {
    let row = |ids: &Vec<i64>| ids.iter().copied().chain(std::iter::repeat(-1)).take(width).collect::<Vec<i64>>();
    let flat: Vec<i64> = rows.iter().flat_map(row).collect();
    whole(&flat).view([rows.len() as i64, width as i64])
}
