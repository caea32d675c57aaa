//! The loops: supervised fine-tuning, the reward model, PPO. Each reads top to bottom.

pub mod ppo;
pub mod reward;
pub mod sft;

use crate::config::{PeftConfig, RunConfig};
use crate::model::{Dtype, ModelOptions, Param, Precision};
use crate::weights::write_text;
use crate::{Error, Result};
use std::fmt::Write;
use std::path::Path;

/// How the models that a run trains are put into memory: what is frozen beside an adapter need not be f32.
fn trained_options(options: ModelOptions, peft: &PeftConfig, run: &RunConfig) -> ModelOptions {
    if peft.use_peft { ModelOptions { dtype: run.dtype, ..options } } else { options }
}

/// How many of a model's numbers are trained, and their share, as PEFT's `print_trainable_parameters` counts them.
fn trained_share(params: &[Param]) -> String {
    let count = |trained: bool| -> usize {
        let params = params.iter().filter(|param| !trained || param.tensor.requires_grad());
        params.map(|param| param.tensor.numel()).sum()
    };
    let (trained, all) = (count(true), count(false));
    format!("{trained} of {all} ({:.4} %)", 100.0 * trained as f64 / all as f64)
}

/// How the models that a run trains are put into memory; also applies the number of threads.
///
/// # Errors
/// If the run asks for what this version or this machine does not have.
fn model_options(run: &RunConfig) -> Result<ModelOptions> {
    if run.gradient_checkpointing {
        return Err(Error::Usage(
            "gradient_checkpointing = true: not in this version; to save memory lower per_device_train_batch_size and \
             raise gradient_accumulation_steps by the same factor, which changes no result"
                .into(),
        ));
    }
    if let Some(threads) = run.num_threads {
        tch::set_num_threads(threads as i32);
    }
    let precision = if run.bf16 { Precision::Bf16 } else { Precision::F32 };
    Ok(ModelOptions { device: run.device.resolve()?, dtype: Dtype::Float32, precision })
}

/// What to tell of a dataset that does not fill one update.
fn small_dataset(path: &Path, rows: usize, batch_size: usize) -> Option<String> {
    (rows < batch_size).then(|| {
        format!(
            "{}: {rows} rows do not fill an update of {batch_size}: it goes on into the next shuffled pass, so rows repeat \
             within it",
            path.display()
        )
    })
}

/// Writes the model card that transformers' users expect beside a model.
fn write_model_card(dir: &Path, command: &str, facts: &[(&str, String)]) -> Result<()> {
    let mut card = format!("---\nlibrary_name: transformers\ntags:\n- rlhf\n- {command}\n---\n\n# ");
    let title = dir.file_name().map_or("Model".into(), |name| name.to_string_lossy());
    let _ = write!(card, "{title}\n\nTrained by `rlhf {command}` {}.\n\n| | |\n|---|---|\n", env!("CARGO_PKG_VERSION"));
    for (name, value) in facts {
        let _ = writeln!(card, "| {name} | {} |", value.replace('|', "\\|"));
    }
    card.push_str("\n`run.yaml` holds every setting of the run, `metrics.jsonl` its course.\n");
    write_text(&dir.join("README.md"), &card)
}
