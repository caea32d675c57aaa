//! The plan of `rlhf generate`: weights, and for each batch a cache, activations of the prompts and logits.

use super::members::{Described, config_of};
use super::memory::Sampled;
use super::operations::{Operations, Read, forward};
use super::rates::{Passes, Rates};
use super::{
    Machine, PROGRAM_LATER, Phase, PhaseKind, Plan, PlanOptions, PlannedMemory, PlannedModel, PlannedTime, PlannedWork,
    Remedy, Role,
};
use crate::data::{Dataset, RowReader};
use crate::settings::GenerateConfig;
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_lm::generate::{GenerationConfig, Sampling};
use rlhf_lm::model::{Dtype, Held, Holding, ModelSizes, QuantType, Quantization, uses_kernels};
use rlhf_lm::tokenizer::Tokenizer;
use std::path::Path;
use tch::{Device, Kind};

/// Number of rows of a smaller batch.
const ROWS: usize = 8;

/// A run of `rlhf generate`.
struct Generation<'c> {
    config: &'c GenerateConfig,
    sizes: ModelSizes,
    /// Lengths of the prompts, in the order of the data.
    prompts: Vec<usize>,
    generation: GenerationConfig,
    machine: Machine,
}

/// Settings that a plan may change.
#[derive(Clone, Copy)]
struct Choice {
    dtype: Option<Kind>,
    quantization: Option<Quantization>,
    batch_size: usize,
}

/// Plans a run of `rlhf generate`.
///
/// # Errors
/// If the model's configuration, its tokenizer or the prompts are missing or invalid.
pub(super) fn plan(config: &GenerateConfig, options: &PlanOptions) -> Result<Plan> {
    config.check()?;
    let device = super::device_of(config.rows.compute.device)?;
    let run = Generation::read(config, Machine::find(device, options))?;
    let compute = &config.rows.compute;
    let settings = Choice {
        dtype: compute.dtype.kind(),
        quantization: compute.quantization.quantization(),
        batch_size: config.rows.batch_size,
    };
    let memory = run.memory(settings)?;
    let (work, decoded) = run.work();
    let compute = run.compute(settings);
    let time = if options.calibrate && device == Device::Cpu {
        rlhf_base::device::use_threads(config.rows.compute.num_threads);
        Some(run.time(settings, &work, decoded)?)
    } else {
        None
    };
    let footprint = run.footprint(settings)?;
    let (weights, parameters) = (footprint.share_of(1) + footprint.copies, footprint.parameters);
    let name = config.model_name_or_path.display().to_string();
    let model = PlannedModel { role: Role::Model, name, parameters, trained: 0, weights, gradients: 0, moments: 0 };
    Ok(Plan {
        command: "generate".into(),
        ranks: run.machine.ranks,
        device: if device == Device::Cpu { "cpu" } else { "cuda" },
        precision: Dtype::of(compute).name(),
        models: vec![model],
        remedies: run.remedies(settings, &memory)?,
        memory,
        micro_batch: None,
        work,
        time,
        notes: Vec::new(),
    })
}

impl<'c> Generation<'c> {
    fn read(config: &'c GenerateConfig, machine: Machine) -> Result<Self> {
        let path = config.model_name_or_path.as_path();
        let revision = Some(config.model_revision.as_str());
        let Described { config: model, kind, coded } = config_of(path, revision, true)?;
        let generation = config.generation(model.generation_settings(), model.max_position_embeddings, path)?;
        let longest = GenerateConfig::max_prompt_len(&model, generation.max_new_tokens, path)?;
        let mut tokenizer = Tokenizer::of_text_or_ids(&hub::tokenizer_dir(path, revision)?)?;
        tokenizer.set_chat_variables(config.rows.split.chat_template.variables());
        let prompts = dataset(config)?.prompts(&tokenizer, model.vocab_size, longest)?;
        let prompts = prompts.iter().map(|prompt| prompt.tokens.len()).collect();
        let sizes = ModelSizes::of_causal_lm(model, kind, path)?.with_coded(coded, path);
        Ok(Self { config, sizes, prompts, generation, machine })
    }

    /// The dtype of matrix products.
    fn compute(&self, choice: Choice) -> Kind {
        choice.dtype.unwrap_or(self.sizes.stored_kind())
    }

    fn footprint(&self, choice: Choice) -> Result<Held> {
        self.sizes.held_as(Holding::Frozen(0), choice.dtype, self.compute(choice), choice.quantization)
    }

    /// Number of prompts whose responses are sampled together.
    fn prompts_at_once(&self, choice: Choice) -> usize {
        (choice.batch_size / self.config.responses.num_return_sequences).max(1)
    }

    fn memory(&self, choice: Choice) -> Result<PlannedMemory> {
        let size = self.config.responses.num_return_sequences;
        let most = choice.batch_size;
        let at_once = self.prompts_at_once(choice);
        let footprint = self.footprint(choice)?;
        let compute = self.compute(choice);
        let filters = match self.generation.sampling {
            Sampling::Greedy => false,
            Sampling::Random { top_k, top_p, min_p, .. } => top_k > 0 || top_p < 1.0 || min_p > 0.0,
        };
        let is_plain =
            filters || self.generation.repetition_penalty != 1.0 || !uses_kernels(compute, self.machine.device);
        // Without a backward pass the libraries have smaller buffers.
        let program = match self.machine.device {
            Device::Cpu => self.machine.program.saturating_sub(PROGRAM_LATER),
            _ => self.machine.program,
        };
        let batch_phase = |part: &[usize]| {
            let mut phase = Phase::new(PhaseKind::Generation, program);
            phase.weights = footprint.share_of(1)
                + footprint.copies
                + footprint.temporary(uses_kernels(compute, self.machine.device));
            let sampled = Sampled {
                rows: (part.len() * size).min(most).max(1),
                prompts: part.len(),
                longest: part.iter().copied().max().unwrap_or(0),
                new_tokens: self.generation.max_new_tokens,
                keeps_prompts: size > 1 && size > most,
                // The prompts of a part are read together.
                refilled: 0,
                is_plain,
                device: self.machine.device,
            };
            sampled.add_to(&mut phase, &self.sizes, compute);
            phase.sum_up();
            phase
        };
        let largest = self.prompts.chunks(at_once).map(batch_phase).max_by_key(|phase| phase.total);
        Ok(PlannedMemory::of(largest.into_iter().collect(), self.machine.available))
    }

    /// The work of all batches, each of which counts as an update, and the number of decoding steps.
    fn work(&self) -> (PlannedWork, f64) {
        let size = self.config.responses.num_return_sequences;
        let choice = Choice { dtype: None, quantization: None, batch_size: self.config.rows.batch_size };
        let batches = self.prompts.len().div_ceil(self.prompts_at_once(choice)).max(1);
        let new_tokens = self.generation.max_new_tokens;
        let rows = self.prompts.len() * size;
        let tokens = (self.prompts.iter().sum::<usize>() * size + rows * new_tokens) as f64;
        let flops = self.operations().iter().map(|part| part.total()).sum::<f64>();
        let work = PlannedWork {
            updates: Some(batches),
            rows_per_update: self.prompts_at_once(choice).min(self.prompts.len()) * size,
            tokens_per_update: tokens / batches as f64,
            flops_per_update: flops / batches as f64,
            tokens: Some(tokens),
            flops: Some(flops),
        };
        let at_once = size.div_ceil(choice.batch_size.max(1)).max(1);
        (work, (batches * at_once * new_tokens) as f64)
    }

    /// Operations of reading all prompts, and of decoding all responses.
    fn operations(&self) -> [Operations; 2] {
        let size = self.config.responses.num_return_sequences;
        let new_tokens = self.generation.max_new_tokens;
        let read = Read::of_prompts(&self.sizes, &self.prompts);
        let decoded = Read::of_responses(&self.sizes, &self.prompts, size, new_tokens);
        [forward(&self.sizes, read), forward(&self.sizes, decoded)]
    }

    fn time(&self, choice: Choice, work: &PlannedWork, steps: f64) -> Result<PlannedTime> {
        let mean = self.prompts.iter().sum::<usize>() / self.prompts.len().max(1);
        let passes = Passes {
            sizes: &self.sizes,
            stored_kind: choice.dtype.unwrap_or(self.sizes.stored_kind()),
            compute: self.compute(choice),
            factor: None,
            adapter: None,
            gradient_checkpointing: false,
            tokens: mean * self.prompts_at_once(choice).min(self.prompts.len()),
            len: mean,
            counted: 1.0 / mean.max(1) as f64,
            decodes: Some((work.rows_per_update.min(choice.batch_size), mean + self.generation.max_new_tokens / 2)),
        };
        let rates = Rates::measure(&passes)?;
        let [read, _] = self.operations();
        let total = rates.forward.seconds(read) + steps * rates.step;
        let batches = work.updates.unwrap_or(1) as f64;
        Ok(PlannedTime {
            flops_per_second: read.total() / rates.forward.seconds(read).max(1e-9),
            seconds_per_token: rates.step,
            rollout: total / batches,
            update: total / batches,
            total: Some(total),
            ..PlannedTime::default()
        })
    }

    /// Changes of the weights' format and of the batch.
    fn remedies(&self, settings: Choice, memory: &PlannedMemory) -> Result<Vec<Remedy>> {
        let mut changes = Vec::new();
        if self.compute(settings) == Kind::Float {
            let rounds = Some("rounds the weights".to_string());
            changes.push(("--dtype bfloat16".to_string(), rounds, Choice { dtype: Some(Kind::BFloat16), ..settings }));
        }
        if settings.quantization.is_none() {
            let quantization = Some(Quantization::FourBit { quant_type: QuantType::Nf4, nested: false });
            let effect = Some("frozen weights have 4 bits".to_string());
            changes.push(("--load_in_4bit".to_string(), effect, Choice { quantization, ..settings }));
        }
        if settings.batch_size > ROWS {
            changes.push((format!("--batch_size {ROWS}"), None, Choice { batch_size: ROWS, ..settings }));
        }
        let mut remedies = Vec::new();
        for (change, effect, choice) in changes {
            let other = self.memory(choice)?;
            if other.peak < memory.peak {
                remedies.push(Remedy {
                    change,
                    effect,
                    peak: other.peak,
                    saves: memory.peak - other.peak,
                    fits: other.fits,
                });
            }
        }
        remedies.sort_by_key(|remedy| remedy.peak);
        Ok(remedies)
    }
}

/// The rows with the prompts.
fn dataset(config: &GenerateConfig) -> Result<Dataset> {
    let mut reader = match &config.rows.dataset_name {
        Some(name) => RowReader::of_files(&config.rows.split.find(name)?)?,
        None if !config.prompts.is_empty() => RowReader::arguments(&config.prompts),
        None => {
            return Err(Error::Usage(
                "plan: expected prompts as arguments or dataset_name: a plan does not read standard input".into(),
            ));
        }
    };
    reader = reader.with_columns(config.rows.split.columns()?);
    let name = config.rows.dataset_name.as_deref().unwrap_or(Path::new("prompt"));
    let rows = reader.next(usize::MAX)?;
    let rows = rows.ok_or_else(|| Error::invalid(name, "expected at least one row, found an empty dataset"))?;
    Ok(if config.apply_chat_template { rows.with_chat_prompts() } else { rows })
}
