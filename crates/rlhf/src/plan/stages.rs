//! The plan of a pipeline: its stages in order. A stage may start from a model that an earlier stage will write.

use super::{PipelinePlan, PlanOptions, PlannedRun};
use crate::settings::Stage;
use crate::train::pipeline::PipelineConfig;
use rlhf_base::{Error, Result};
use std::path::{Path, PathBuf};

/// The model that an earlier stage will write.
#[derive(Debug)]
pub(super) struct Made {
    /// Its folder.
    pub(super) dir: PathBuf,
    /// The model that it has the architecture of, and that model's revision.
    pub(super) from: PathBuf,
    pub(super) revision: Option<String>,
    /// The folder or name of its tokenizer.
    pub(super) tokenizer: PathBuf,
}

/// Plans each stage.
///
/// # Errors
/// The first error of a stage, with its name.
pub(super) fn plan(config: &PipelineConfig, options: &PlanOptions) -> Result<PipelinePlan> {
    let (mut made, mut stages) = (Vec::new(), Vec::new());
    for (stage, run, start) in runs(config) {
        let named = |error: Error| {
            let named = error.map_usage(|message| format!("{stage}: {message}"));
            named.unwrap_or_else(|other| Error::Run(format!("{stage}: {other}")))
        };
        let plan = super::plan_with(&run, options, &made).map_err(named)?;
        stages.push(plan);
        made.push(start.made(&run.run().output_dir, &made));
    }
    if stages.is_empty() {
        return Err(Error::Usage("plan: every stage of the pipeline is skipped: nothing is trained".into()));
    }
    let largest = stages.iter().max_by_key(|plan| plan.memory.peak);
    Ok(PipelinePlan {
        peak: largest.map_or(0, |plan| plan.memory.peak),
        peak_stage: largest.map_or(String::new(), |plan| plan.command.clone()),
        fits: stages.iter().all(|plan| plan.memory.fits),
        seconds: stages.iter().map(|plan| plan.time.and_then(|time| time.total)).sum(),
        stages,
    })
}

/// The model that a stage starts from.
struct Start {
    model: PathBuf,
    revision: Option<String>,
    tokenizer: PathBuf,
}

impl Start {
    /// The model that the stage writes to `dir`.
    fn made(self, dir: &Path, earlier: &[Made]) -> Made {
        let dir = dir.to_path_buf();
        match earlier.iter().find(|made| made.dir == self.model) {
            Some(Made { from, revision, tokenizer, .. }) => {
                Made { dir, from: from.clone(), revision: revision.clone(), tokenizer: tokenizer.clone() }
            }
            None => Made { dir, from: self.model, revision: self.revision, tokenizer: self.tokenizer },
        }
    }
}

/// The stages that run, with the models that they start from.
fn runs(config: &PipelineConfig) -> impl Iterator<Item = (Stage, PlannedRun, Start)> {
    let start = |model: &Path, revision: &str, tokenizer: &Path| Start {
        model: model.into(),
        revision: Some(revision.into()),
        tokenizer: tokenizer.into(),
    };
    let sft = config.sft.as_ref().and_then(|sft| {
        let model = sft.model_name_or_path.as_deref().or(sft.config_name.as_deref())?;
        let start = start(model, &sft.model_revision, sft.tokenizer_name.as_deref().unwrap_or(model));
        Some((Stage::Sft, PlannedRun::Sft(sft.clone()), start))
    });
    let reward = config.reward.as_ref().map(|reward| {
        let model = &reward.model_name_or_path;
        let start = start(model, &reward.model_revision, model);
        (Stage::Reward, PlannedRun::Reward(reward.clone()), start)
    });
    let dpo = config.dpo.as_ref().map(|dpo| {
        let model = &dpo.model_name_or_path;
        let start = start(model, &dpo.model_revision, model);
        (Stage::Dpo, PlannedRun::Dpo(dpo.clone()), start)
    });
    let ppo = config.ppo.as_ref().map(|ppo| {
        let model = &ppo.sft_model_path;
        (Stage::Ppo, PlannedRun::Ppo(ppo.clone()), start(model, &ppo.model_revision, model))
    });
    let distill = config.distill.as_ref().map(|distill| {
        let model = &distill.model_name_or_path;
        let start = start(model, &distill.model_revision, model);
        (Stage::Distill, PlannedRun::Distill(distill.clone()), start)
    });
    [sft, reward, ppo, dpo, distill].into_iter().flatten()
}
