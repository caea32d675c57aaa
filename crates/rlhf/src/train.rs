//! Training: supervised fine-tuning, the reward model, DPO, distillation, PPO, and several as one pipeline.
//!
//! Each trainer has its own loading, batches and loss; [`crate::run`] has the rest of a run.

pub mod distill;
pub mod dpo;
pub mod pipeline;
pub mod ppo;
mod reference;
pub mod reward_model;
pub mod sft;
mod supervised;

use crate::data::{Cursor, Sources};
use crate::report;
use crate::run::checkpoint::FixedState;
use crate::run::inputs::Inputs;
use crate::run::sinks::console::ConsoleOutput;
use crate::settings::{DataConfig, EvalConfig, RunConfig};
use rlhf_base::device::use_threads;
use rlhf_base::dist::World;
use rlhf_base::{Error, Result};
use rlhf_hub::Commits;
use rlhf_lm::model::{BASE_MODEL, Dtype, ModelConfig, ModelHead, ModelOptions, Param, PretrainedModel};
use rlhf_lm::optim::Optim;
use rlhf_lm::optim::micro_batch::MicroBatchSettings;
use rlhf_lm::tokenizer::Tokenizer;
use std::path::Path;

/// Writes the report of a run that has ended into its folder, unless the settings leave it out, and the bad findings of its verdict to the
/// console. A report that cannot be written is a warning. Only rank 0 does so.
fn leave_report(run: &RunConfig, world: &World, console: &ConsoleOutput) {
    if !world.is_main() {
        return;
    }
    match report::leave(&run.output_dir, !run.no_report) {
        Ok((path, bad)) => {
            bad.iter().for_each(|finding| console.note(&format!("! {finding}")));
            // Without an update there is nothing to report.
            path.iter().for_each(|path| console.note(&format!("the report is in {}", path.display())));
        }
        Err(error) => console.warn(&format!("no report: {error}")),
    }
}

/// Returns the number of updates of a run, of which `done` are done, for its title.
fn updates_fact(updates: usize, done: usize) -> String {
    match done {
        0 => updates.to_string(),
        done => format!("{updates}, {done} of them done"),
    }
}

/// Returns device and dtype of a run whose optimizer is `optim`, for its title.
fn describe_machine(run: &RunConfig, optim: Optim, device: tch::Device) -> [(&'static str, String); 2] {
    let threads = tch::get_num_threads();
    let threads = format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
    let device = match device {
        tch::Device::Cuda(number) => format!("cuda:{number}, {threads} on the processor"),
        _ => format!("cpu, {threads}"),
    };
    let weights = match optim {
        Optim::AdamwBf16 => "bfloat16, those of vectors, heads and small matrices float32",
        Optim::AdamwTorch | Optim::Adamw8bit | Optim::Adafactor => "float32",
    };
    let products = run.precision().name();
    let dtype = if run.is_low_precision() {
        format!("{products}; the optimizer's weights are {weights}")
    } else {
        products.into()
    };
    [("device", device), ("dtype", dtype)]
}

/// Returns the options for loading a model to train: without an adapter its weights are f32, whatever the dtype of its files.
fn trained_options(options: ModelOptions, gets_adapter: bool) -> ModelOptions {
    let dtype = match options.dtype {
        Dtype::Auto if !gets_adapter => Dtype::Float32,
        other => other,
    };
    // A model whose weights are all trained is not quantized.
    let quantization = options.quantization.filter(|_| gets_adapter);
    ModelOptions { dtype, quantization, ..options }
}

/// Returns warnings about a model whose weights differ from those of the files in `dir`: other parts are left out, or weights are rounded:
/// at loading to `dtype`, to the dtype in which they are trained, in the saved base of an adapter, or where an adapter was merged into
/// quantized weights.
fn notes_on_weights<H: ModelHead>(dir: &Path, dtype: Dtype, model: &PretrainedModel<H>) -> Vec<String> {
    let dir = dir.display();
    let mut warnings = Vec::new();
    if let Some(parts) = model.parts_left_out() {
        warnings.push(format!(
            "{dir}: the run trains and saves the language model alone: {parts} stay in this folder, and are not saved"
        ));
    }
    if model.was_merged_into_codes() {
        warnings.push(format!(
            "{dir}: its adapter was merged into weights that the files of its base hold quantized, which loses most of a small change: \
             merged into the base in full precision by `rlhf merge`, with --load_in_4bit or --load_in_8bit in this run, it is kept"
        ));
    }
    if model.was_rounded_to_train() {
        warnings.push(format!(
            "{dir}: optim = adamw_bf16 rounds weights that the files hold in another dtype to bfloat16: the run starts at the rounded ones"
        ));
    }
    if model.was_rounded() {
        let name = dtype.name();
        warnings.push(format!(
            "{dir}: dtype = {name} rounds weights that the files hold in another: the run starts at the rounded ones"
        ));
    }
    if let Some(kind) = model.rounded_base() {
        let name = Dtype::of(kind).name();
        warnings.push(format!(
            "{dir}: beside an adapter its weights are computed with in {name}, and {BASE_MODEL}, which the run saves, holds \
             them so, rounded"
        ));
    }
    warnings
}

/// Returns the number of trained parameters and their share, as PEFT's `print_trainable_parameters` counts them.
fn trained_share(params: &[Param]) -> String {
    let count = |trained: bool| -> usize {
        let params = params.iter().filter(|param| !trained || param.tensor.requires_grad());
        params.map(Param::numel).sum()
    };
    let trained = count(true);
    let all = count(false);
    format!("{trained} of {all} ({:.4} %)", 100.0 * trained as f64 / all as f64)
}

/// Returns the options for loading a model that is not trained; also sets the number of threads.
///
/// # Errors
/// If this machine does not have the device.
fn model_options(run: &RunConfig) -> Result<ModelOptions> {
    use_threads(run.num_threads);
    Ok(ModelOptions {
        device: run.device.resolve()?,
        dtype: run.dtype,
        precision: run.precision(),
        quantization: run.quantization.quantization(),
    })
}

/// Returns the part of a checkpoint's state that no update changes.
fn fixed_state(
    run: &RunConfig,
    device: tch::Device,
    micro_batch_tokens: usize,
    commits: &Commits,
    inputs: &Inputs,
) -> FixedState {
    let micro_batch = MicroBatchSettings::from(run).state(device, micro_batch_tokens);
    FixedState { micro_batch, commits: commits.clone(), inputs: inputs.state(), checks: None, own: None }
}

/// Returns a warning about data with fewer rows than one update takes.
fn small_dataset(data: &DataConfig, rows: usize, batch_size: usize) -> Option<String> {
    (rows < batch_size).then(|| {
        format!(
            "{}: {rows} rows do not fill an update of {batch_size}: it continues with the next shuffled pass, so rows repeat \
             within it",
            data.describe()
        )
    })
}

/// Checks that there are held-out rows, if evaluations are set.
///
/// # Errors
/// If there are none.
pub(crate) fn check_held_out(eval: &EvalConfig, sources: &Sources<'_>, data: &DataConfig) -> Result<()> {
    let (Some(every), false) = (eval.eval_steps, sources.has_eval()) else { return Ok(()) };
    let expected = format!("eval_steps = {every} (also set by eval_strategy): expected rows that are held out, and");
    let keep = "eval_split_size keeps some of the training rows for it";
    if data.dataset_train_split == data.dataset_test_split {
        return Err(Error::Usage(format!(
            "{expected} dataset_train_split = dataset_test_split = {}; {keep}",
            data.dataset_test_split
        )));
    }
    let remedy = match sources.likely_eval_split() {
        Some(split) => format!("--dataset_test_split {split} evaluates on that split"),
        None => keep.into(),
    };
    let names = data.describe();
    let split = &data.dataset_test_split;
    Err(Error::Usage(format!("{expected} dataset_name = {names} has no split `{split}`; {remedy}")))
}

/// Refuses an encoder-decoder, whose folder or name is `dir`, for a `command` that trains models of one stack.
fn check_one_stack(command: &str, shape: &ModelConfig, dir: &Path) -> Result<()> {
    if shape.is_encoder_decoder() {
        let found = shape.family.name;
        let message = format!("{command}: expected a model of one stack, found `{found}`, an encoder-decoder");
        return Err(Error::invalid(dir, message));
    }
    Ok(())
}

/// Gives a tokenizer the variables of the chat template, and the `eos_token` of the settings.
///
/// # Errors
/// If it has no such token.
fn set_up_tokenizer(tokenizer: &mut Tokenizer, data: &DataConfig, eos_token: Option<&str>) -> Result<()> {
    tokenizer.set_chat_variables(data.chat_template.variables());
    eos_token.map_or(Ok(()), |token| tokenizer.set_eos(token))
}

/// Rows of several datasets, one after another.
struct Gathered<T> {
    rows: Vec<T>,
    /// Number of rows of each dataset.
    lens: Vec<usize>,
    /// Warnings about the rows.
    warnings: Vec<String>,
}

/// Reads the rows of several datasets.
fn gather<D, T, W: IntoIterator<Item = String>>(
    datasets: impl IntoIterator<Item = D>,
    read: impl Fn(D) -> Result<(Vec<T>, W)>,
) -> Result<Gathered<T>> {
    let mut all = Gathered { rows: Vec::new(), lens: Vec::new(), warnings: Vec::new() };
    for dataset in datasets {
        let (rows, warnings) = read(dataset)?;
        all.lens.push(rows.len());
        all.rows.extend(rows);
        all.warnings.extend(warnings);
    }
    Ok(all)
}

impl<T> Gathered<T> {
    /// Returns a cursor over these rows, at the start of a run.
    fn cursor(&self, seed: u64, data: &DataConfig) -> Cursor {
        Cursor::mixture(seed, &self.lens, &data.dataset_weights)
    }
}
