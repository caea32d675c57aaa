//! Rates of this machine: a calibration of a second or two, with the shapes and the precision of the run.
//!
//! The calibration measures passes like those of the run: through one layer of its first model, with random weights, and with the adapters,
//! the dropout and the gradient checkpointing of the run. So the rates include attention, norms, conversions and all other work of a layer.

use super::memory::Job;
use super::operations::{Operations, Read, factor, forward};
use super::rows::Row;
use rlhf_base::{Error, Result};
use rlhf_lm::model::{
    Batch, CausalLm, DropoutRows, Dtype, LogprobOptions, LoraConfig, ModelConfig, ModelOptions, ModelSizes, PassTokens,
    Precision, StopCheck, Trains,
};
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};

/// Seconds of one measurement, at least.
const SECONDS: f64 = 0.15;

/// Calls of one measurement, at least.
const CALLS: usize = 2;

/// Operations of a measured pass forward and backward, at most.
const MOST_OPERATIONS: f64 = 8e9;

/// Parameters of a measured layer, at most: wider models are measured with narrower layers of the same form.
const MOST_PARAMETERS: usize = 16_000_000;

/// Vocabulary size of the measured model whose head is negligible, and largest vocabulary of the one whose head is measured.
const FEW_WORDS: i64 = 64;
const MOST_WORDS: i64 = 4096;

/// Decoding steps of one measurement.
const STEPS: usize = 4;

/// Rows and tokens of each row in the measurement of decoding, at most.
const MOST_ROWS: usize = 64;
const MOST_CONTEXT: usize = 512;

/// Elements of the tensors with which the rate of optimizer steps is measured.
const ELEMENTS: i64 = 1 << 24;

/// Share of the rate of plain matrix products that a pass reaches, assumed where no model can be measured.
const SHARE: f64 = 0.6;

/// Operations per second of a pass.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PassRates {
    pub(super) layers: f64,
    pub(super) head: f64,
}

/// Operations and bytes per second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    /// Forward and backward passes.
    pub(super) training: PassRates,
    /// Forward passes.
    pub(super) forward: PassRates,
    /// Seconds of a step of decoding.
    pub(super) step: f64,
    /// Bytes per second that an optimizer step reads and writes.
    pub(super) bytes: f64,
}

impl PassRates {
    /// Seconds of a pass.
    pub(super) fn seconds(self, operations: Operations) -> f64 {
        operations.layers / self.layers.max(1.0) + operations.head / self.head.max(1.0)
    }
}

/// The passes of a run.
#[derive(Debug)]
pub(super) struct Passes<'a> {
    /// The model of the run's first passes.
    pub(super) sizes: &'a ModelSizes,
    /// The dtype that frozen weights are loaded in.
    pub(super) stored_kind: Kind,
    /// The dtype of matrix products.
    pub(super) compute: Kind,
    /// Operations of a forward and backward pass, as a multiple of those of a forward pass; `None` if nothing is trained.
    pub(super) factor: Option<f64>,
    /// The adapter that is trained, and whether there is dropout before it.
    pub(super) adapter: Option<(LoraConfig, bool)>,
    pub(super) gradient_checkpointing: bool,
    /// Tokens of a pass, and of a sequence in it.
    pub(super) tokens: usize,
    pub(super) len: usize,
    /// Share of the tokens with an output.
    pub(super) counted: f64,
    /// Rows that are decoded at once, and their mean length; `None` if nothing is sampled.
    pub(super) decodes: Option<(usize, usize)>,
}

impl<'a> Passes<'a> {
    /// The passes of a training run.
    pub(super) fn of(job: &'a Job<'a>) -> Result<Self> {
        let Some(first) = job.members.first() else { return Err(Error::Run("plan: no model".into())) };
        let PassTokens { computed, outputs, source, .. } = job.largest_pass(job.limit);
        let computed = computed + source.computed;
        let rows: Vec<usize> = job.rows.updates.iter().flatten().map(|row| row.len).collect();
        let rank_rows = job.rows.updates.first().map_or(1, Vec::len).div_ceil(job.machine.row_ranks);
        // Rows that are decoded at once, and tokens of a response.
        let sampled = match (job.ppo(), job.distillation()) {
            (Some(config), _) => Some((config.local_rollout_forward_batch_size, config.response_length)),
            (_, Some(config)) if config.samples() => {
                Some((config.local_rollout_forward_batch_size, config.max_completion_length))
            }
            _ => None,
        };
        let run = job.run.run();
        Ok(Self {
            sizes: first.sizes,
            stored_kind: run.dtype.kind().unwrap_or(first.sizes.stored_kind()),
            compute: job.compute,
            factor: Some(factor(job, first)),
            adapter: first.adapter.clone(),
            gradient_checkpointing: run.gradient_checkpointing,
            tokens: computed,
            len: rows.iter().sum::<usize>() / rows.len().max(1),
            counted: outputs as f64 / computed.max(1) as f64,
            decodes: sampled.map(|(rows, tokens)| (rank_rows.min(rows), job.rows.longest_prompt() + tokens / 2)),
        })
    }
}

impl Rates {
    /// Measures `passes`.
    ///
    /// # Errors
    /// If libtorch cannot allocate the tensors.
    pub(super) fn measure(passes: &Passes<'_>) -> Result<Self> {
        let bytes = memory_rate()?;
        let rates = if passes.sizes.config().check_causal_lm(Path::new("")).is_ok() {
            model_rates(passes, bytes).or_else(|_| product_rates(passes, bytes))?
        } else {
            product_rates(passes, bytes)?
        };
        tch_ext::release_memory();
        Ok(rates)
    }
}

/// The rates of a language model.
fn model_rates(passes: &Passes<'_>, bytes: f64) -> Result<Rates> {
    let config = passes.sizes.config();
    let narrow = config.reduced(FEW_WORDS, MOST_PARAMETERS);
    let wide = config.reduced(config.vocab_size.min(MOST_WORDS), MOST_PARAMETERS);
    let (trunk, headed) = (Trial::new(passes, &narrow)?, Trial::new(passes, &wide)?);
    let [trunk_operations, headed_operations] = [&trunk, &headed].map(Trial::operations);
    // The rate of the layers comes from the model without a head. The rest of the time of the model with a head is its head's.
    let rates = |[trunk, headed]: [f64; 2], factor: f64| {
        let layers = factor * trunk_operations.layers / trunk;
        let rest = (headed - factor * headed_operations.layers / layers).max(headed / 100.0);
        PassRates { layers, head: factor * headed_operations.head / rest }
    };
    let forward = rates([trunk.forward()?, headed.forward()?], 1.0);
    let training = match passes.factor {
        Some(factor) => rates([trunk.training()?, headed.training()?], factor),
        None => forward,
    };
    let step = match passes.decodes {
        Some(rows) => {
            let [trunk_seconds, headed_seconds] = [trunk.step(rows)?, headed.step(rows)?];
            let [layers, head] = passes.sizes.products().map(|count| count as f64);
            // A step reads all weights, so its time is in proportion to them.
            let head_seconds = (headed_seconds - trunk_seconds).max(headed_seconds / 100.0);
            trunk_seconds * layers / trunk.products[0] + head_seconds * head / headed.products[1]
        }
        None => 0.0,
    };
    Ok(Rates { training, forward, step, bytes })
}

/// A model of the run's form with one layer, and the rows of a pass through it.
struct Trial {
    model: CausalLm,
    sequences: Vec<Vec<i64>>,
    spans: Vec<Range<usize>>,
    /// Tokens before each span, which an encoder reads.
    prompt_lens: Vec<usize>,
    dropout: Option<DropoutRows>,
    /// PPO measures the entropy of the policy in each pass.
    with_entropy: bool,
    sizes: ModelSizes,
    /// Weights that a token is multiplied by in the layers and in the head.
    products: [f64; 2],
}

impl Trial {
    fn new(passes: &Passes<'_>, config: &ModelConfig) -> Result<Self> {
        let stored_kind = passes.stored_kind;
        let adapter = passes.adapter.as_ref();
        let is_frozen = adapter.is_some() || passes.factor.is_none();
        let options = ModelOptions {
            device: Device::Cpu,
            dtype: Dtype::of(if is_frozen { stored_kind } else { Kind::Float }),
            precision: match passes.compute {
                Kind::BFloat16 => Precision::Bf16,
                Kind::Half => Precision::F16,
                _ => Precision::F32,
            },
            quantization: None,
        };
        let mut model = CausalLm::from_config(config.clone(), 1, options)?;
        model.prepare(if is_frozen { Trains::Adapter } else { Trains::All })?;
        if let Some((lora, _)) = adapter {
            model.add_adapter(lora, 1)?;
        }
        model.set_trainable(passes.factor.is_some());
        model.set_gradient_checkpointing(passes.gradient_checkpointing);
        let sizes = ModelSizes::of_causal_lm(config.clone(), stored_kind, Path::new("config"))?;
        let products = sizes.products().map(|count| count as f64);
        let (sequences, spans) = trial_rows(passes, products);
        let drops = |(lora, drops): &(LoraConfig, bool)| drops.then_some(lora.dropout);
        let dropout = adapter.and_then(drops).map(|share| DropoutRows {
            share,
            seed: 1,
            update: 0,
            rows: (0..sequences.len() as u64).collect(),
        });
        let with_entropy = passes.decodes.is_some();
        let prompt_lens = spans.iter().map(|span| span.start).collect();
        Ok(Self { model, sequences, spans, prompt_lens, dropout, with_entropy, sizes, products })
    }

    fn batch(&self) -> Batch<'_, Vec<i64>> {
        Batch::new(&self.sequences, &self.spans).with_prompts(Some(&self.prompt_lens))
    }

    /// Operations of a forward pass.
    fn operations(&self) -> Operations {
        let pairs = self.sizes.config().is_encoder_decoder();
        let row = |(ids, span): (&Vec<i64>, &Range<usize>)| Row {
            len: ids.len(),
            pair: pairs.then(|| [span.start, span.len()]),
            outputs: span.len(),
            ..Row::default()
        };
        let rows: Vec<Row> = self.sequences.iter().zip(&self.spans).map(row).collect();
        forward(&self.sizes, Read::of_rows(&rows, false, 1.0))
    }

    /// Seconds of a forward and backward pass.
    fn training(&self) -> Result<f64> {
        seconds(|| {
            let batch = self.batch().with_dropout(self.dropout.as_ref());
            let options = LogprobOptions { entropy: self.with_entropy, ..1.0.into() };
            self.model.logprobs_backward(batch, options, |_, outputs| outputs.logprobs.sum(Kind::Float)).map(drop)
        })
    }

    /// Seconds of a forward pass.
    fn forward(&self) -> Result<f64> {
        seconds(|| {
            let batch = self.batch();
            tch::no_grad(|| self.model.logprobs_of(batch, 1.0, false)).map(drop)
        })
    }

    /// Seconds of a step of decoding `rows` rows of `context` tokens.
    fn step(&self, (rows, context): (usize, usize)) -> Result<f64> {
        let rows = rows.clamp(1, MOST_ROWS);
        let context = context.clamp(1, MOST_CONTEXT);
        let prompts = vec![vec![1; context]; rows];
        let tokens = Tensor::full([rows as i64], 1, (Kind::Int64, Device::Cpu));
        let seconds_of_steps = |count: usize| {
            seconds(|| {
                tch::no_grad(|| {
                    let (mut cache, _) = self.model.prefill(&prompts, STEPS + 1, StopCheck::NEVER)?;
                    (0..count).try_for_each(|_| self.model.decode(&tokens, &mut cache).map(drop))
                })
            })
        };
        let [before, after] = [seconds_of_steps(1)?, seconds_of_steps(1 + STEPS)?];
        Ok((after - before).max(after / 100.0) / STEPS as f64)
    }
}

/// Sequences like those of the run's largest pass, and the tokens with an output in each.
fn trial_rows(passes: &Passes<'_>, products: [f64; 2]) -> (Vec<Vec<i64>>, Vec<Range<usize>>) {
    let most = (MOST_OPERATIONS / (6.0 * products.iter().sum::<f64>()).max(1.0)) as usize;
    let tokens = passes.tokens.clamp(2, most.clamp(16, 4096));
    let len = passes.len.clamp(2, tokens);
    let counted = ((len as f64 * passes.counted).round() as usize).clamp(1, len - 1);
    let count = (tokens / len).max(1);
    (vec![vec![1; len]; count], vec![len - counted..len; count])
}

/// The rates of a model that is not a language model: those of its matrix products alone.
fn product_rates(passes: &Passes<'_>, bytes: f64) -> Result<Rates> {
    let config = passes.sizes.config();
    let hidden = config.hidden_size.min(2048);
    let inner = config.intermediate_size.min(4096);
    let tokens = (passes.tokens as i64).clamp(16, 1024);
    let random = |rows: i64| -> Result<Tensor> {
        Ok(Tensor::f_randn([rows, hidden], (Kind::Float, Device::Cpu))?.f_to_kind(passes.compute)?)
    };
    let (x, weight) = (random(tokens)?, random(inner)?);
    let took = seconds(|| {
        drop(tch::no_grad(|| tch_ext::linear(&x, &weight, &weight, None, false)));
        Ok(())
    })?;
    let rate = SHARE * 2.0 * (tokens * hidden * inner) as f64 / took;
    let pass = PassRates { layers: rate, head: rate };
    Ok(Rates { training: pass, forward: pass, step: 0.0, bytes })
}

/// Bytes per second of an operation on tensors that are too large for the caches.
fn memory_rate() -> Result<f64> {
    let options = (Kind::Float, Device::Cpu);
    let (mut sum, x) = (Tensor::f_zeros([ELEMENTS], options)?, Tensor::f_ones([ELEMENTS], options)?);
    let took = seconds(|| {
        let _ = sum.f_add_(&x)?;
        Ok(())
    })?;
    Ok(3.0 * 4.0 * ELEMENTS as f64 / took)
}

/// Seconds of one call of `f`: the least of several, after one call that is not counted.
fn seconds(mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    f()?;
    let (began, mut calls, mut least) = (Instant::now(), 0, f64::INFINITY);
    while calls < CALLS || began.elapsed() < Duration::from_secs_f64(SECONDS) {
        let start = Instant::now();
        f()?;
        calls += 1;
        least = start.elapsed().as_secs_f64().min(least);
    }
    Ok(least.max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_of_every_family_is_measured_also_where_it_is_narrowed() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models");
        for name in ["gpt2", "gpt_neox", "llama_tied", "llama_untied", "gemma2", "opt", "phi3", "qwen3", "t5", "t5_v11"]
        {
            let config = ModelConfig::from_dir(&models.join(name)).unwrap();
            for (words, parameters) in [(FEW_WORDS, MOST_PARAMETERS), (80, 1000)] {
                let reduced = config.reduced(words, parameters);
                assert_eq!((reduced.num_hidden_layers, reduced.vocab_size), (1, words), "{name}");
                assert!(parameters > 1000 || reduced.hidden_size < config.hidden_size, "{name}");
                let sizes = ModelSizes::of_causal_lm(config.clone(), Kind::Float, Path::new(name)).unwrap();
                let lora = LoraConfig { r: 4, dropout: 0.1, ..LoraConfig::default() };
                let passes = Passes {
                    sizes: &sizes,
                    stored_kind: Kind::BFloat16,
                    compute: Kind::BFloat16,
                    factor: Some(2.0),
                    adapter: Some((lora, true)),
                    gradient_checkpointing: false,
                    tokens: 12,
                    len: 4,
                    counted: 0.5,
                    decodes: Some((2, 5)),
                };
                let trial = Trial::new(&passes, &reduced).unwrap_or_else(|e| panic!("{name}: {e}"));
                let batch = trial.batch().with_dropout(trial.dropout.as_ref());
                let loss = trial.model.logprobs_backward(batch, 1.0, |_, loss| loss.logprobs.sum(Kind::Float));
                assert_eq!(loss.unwrap().logprobs.size(), [6], "{name}");
                assert!(trial.operations().layers > 0.0 && trial.operations().head > 0.0, "{name}");
            }
        }
    }
}
