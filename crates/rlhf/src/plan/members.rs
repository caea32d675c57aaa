//! The models of a run, and the memory that the weights of each take.

use super::stages::Made;
use super::{PlannedRun, Role};
use crate::reward::Spec;
use crate::settings::{DistillConfig, DpoConfig, PpoConfig, RunConfig};
use rlhf_base::Error;
use rlhf_base::Result;
use rlhf_base::dist::ZeroStage;
use rlhf_base::weights::Checkpoint;
use rlhf_hub as hub;
use rlhf_lm::model::{AdapterFolder, Held, Holding, LoraConfig, ModelConfig, ModelSizes};
use rlhf_lm::optim::{Optim, OptimizerConfig, state_bytes};
use rlhf_lm::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};
use tch::Kind;

/// Reads the configuration of a model by its path and revision, and the dtype in which it is stored.
type ReadConfig<'r> = dyn Fn(&Path, Option<&str>) -> Result<Described> + 'r;

/// A model's configuration, and the facts that its files tell about it.
#[derive(Debug)]
pub(super) struct Described {
    pub(super) config: ModelConfig,
    /// The dtype of the weights.
    pub(super) kind: Kind,
    /// The layers whose weights are quantized; `None` if only `config.json` is local.
    pub(super) coded: Option<Vec<String>>,
}

/// Sizes of the models that a run names.
#[derive(Debug)]
pub(super) struct Models {
    /// The model that the run trains.
    pub(super) main: NamedModel,
    /// The folder or name of the tokenizer.
    pub(super) tokenizer: PathBuf,
    /// The value model, if it starts from a folder.
    value: Option<NamedModel>,
    rewards: Vec<NamedModel>,
    /// The reference model of DPO, if it is not the initial policy; the teacher of distillation.
    reference: Option<NamedModel>,
    /// The critic of a run without a value model or a reward model to start from: the policy's shape with a value head.
    fresh_value: Option<ModelSizes>,
}

#[derive(Debug)]
pub(super) struct NamedModel {
    name: String,
    pub(super) sizes: ModelSizes,
}

/// One model of a run, and how it is kept in memory.
#[derive(Debug, Clone)]
pub(super) struct Member<'m> {
    pub(super) role: Role,
    pub(super) name: &'m str,
    pub(super) sizes: &'m ModelSizes,
    /// Sizes of the weights and gradients in memory.
    pub(super) footprint: Held,
    pub(super) stage: ZeroStage,
    pub(super) is_trained: bool,
    /// Bytes of the optimizer's state.
    pub(super) states: usize,
    /// The adapter that is trained, and whether there is dropout before it.
    pub(super) adapter: Option<(LoraConfig, bool)>,
    /// The weights are those of the policy.
    pub(super) is_view: bool,
    /// It is dropped before the first update.
    pub(super) is_dropped: bool,
}

impl NamedModel {
    /// The model as a frozen member of a run.
    fn member(&self, role: Role, footprint: Held, stage: ZeroStage) -> Member<'_> {
        let Self { name, sizes } = self;
        Member {
            role,
            name,
            sizes,
            footprint,
            stage,
            is_trained: false,
            states: 0,
            adapter: None,
            is_view: false,
            is_dropped: false,
        }
    }
}

/// The dtype of products.
pub(super) fn compute(run: &RunConfig) -> Kind {
    // No run computes in the dtype in which its weights are held.
    run.precision().kind(Kind::Float)
}

impl Models {
    /// Reads the configurations of the models of the run and of its `rewards`. For names on the hub, `config.json` is downloaded. A model
    /// that is still to be `made` by an earlier stage has the configuration of the model that the stage starts from.
    ///
    /// # Errors
    /// If one is missing or invalid.
    pub(super) fn find(run: &PlannedRun, rewards: &[Spec], made: &[Made]) -> Result<Self> {
        let made_in = |path: &Path| made.iter().find(|made| made.dir == path);
        let mut models = Self::find_with(run, rewards, &|path, revision| match made_in(path) {
            // Trained weights are saved in f32.
            Some(Made { from, revision, .. }) => {
                Ok(Described { kind: Kind::Float, ..config_of(from, revision.as_deref(), true)? })
            }
            None => config_of(path, revision, true),
        })?;
        if let Some(made) = made_in(&models.tokenizer) {
            models.tokenizer.clone_from(&made.tokenizer);
        }
        Ok(models)
    }

    /// [`Models::find`], of models in local folders only.
    ///
    /// # Errors
    /// If a model is not in a local folder.
    pub(super) fn find_local(run: &PlannedRun, rewards: &[Spec]) -> Result<Self> {
        Self::find_with(run, rewards, &|path, _| {
            if path.exists() {
                config_of(path, None, false)
            } else {
                Err(Error::Run(format!("{}: not here", path.display())))
            }
        })
    }

    fn find_with(run: &PlannedRun, rewards: &[Spec], read: &ReadConfig<'_>) -> Result<Self> {
        // An adapter is merged in f32 into the weights of a trained model or a reference model.
        let merged_kind =
            |path: &Path, kind| Ok::<_, Error>(if adapter_in(path)?.is_some() { Kind::Float } else { kind });
        let lm = |path: &Path, revision| -> Result<NamedModel> {
            let Described { config, kind, coded } = read(path, revision)?;
            let sizes = ModelSizes::of_causal_lm(config, merged_kind(path, kind)?, path)?.with_coded(coded, path);
            Ok(NamedModel { name: path.display().to_string(), sizes })
        };
        let classifier = |path: &Path, revision, new_head, merges: bool| -> Result<NamedModel> {
            let Described { config, kind, coded } = read(path, revision)?;
            let kind = if merges { merged_kind(path, kind)? } else { kind };
            let new_head = new_head && !config.is_sequence_classifier();
            Ok(NamedModel {
                name: path.display().to_string(),
                sizes: ModelSizes::of_classifier(config, kind, new_head)?.with_coded(coded, path),
            })
        };
        let alone = |main, tokenizer: &Path| Self {
            main,
            tokenizer: tokenizer.into(),
            value: None,
            rewards: Vec::new(),
            reference: None,
            fresh_value: None,
        };
        match run {
            PlannedRun::Sft(config) => {
                let model = config.model_name_or_path.as_deref().or(config.config_name.as_deref());
                let model = model.ok_or_else(|| Error::Usage("set model_name_or_path".into()))?;
                let main = lm(model, Some(config.model_revision.as_str()))?;
                Ok(alone(main, config.tokenizer_name.as_deref().unwrap_or(model)))
            }
            PlannedRun::Reward(config) => {
                let model = &config.model_name_or_path;
                let main = classifier(model, Some(config.model_revision.as_str()), true, true)?;
                Ok(alone(main, model))
            }
            PlannedRun::Dpo(config) => {
                let model = &config.model_name_or_path;
                let main = lm(model, Some(config.model_revision.as_str()))?;
                let reference = config.ref_model_name_or_path.as_deref().map(|path| lm(path, None)).transpose()?;
                Ok(Self { reference, ..alone(main, model) })
            }
            PlannedRun::Distill(config) => {
                let model = &config.model_name_or_path;
                let main = lm(model, Some(config.model_revision.as_str()))?;
                let revision = Some(config.teacher_model_revision.as_str());
                let teacher = lm(&config.teacher_model_name_or_path, revision)?;
                Ok(Self { reference: Some(teacher), ..alone(main, model) })
            }
            PlannedRun::Ppo(config) => {
                let main = lm(&config.sft_model_path, Some(config.model_revision.as_str()))?;
                let rewards = rewards.iter().filter_map(Spec::model_path);
                let rewards =
                    rewards.map(|path| classifier(path, None, config.new_reward_head, false)).collect::<Result<_>>()?;
                let value =
                    config.value_model_path.as_deref().map(|path| classifier(path, None, true, true)).transpose()?;
                let stored = main.sizes.stored_kind();
                let fresh = ModelSizes::of_classifier(main.sizes.config().clone(), stored, true)?;
                let fresh = fresh.coded_as(&main.sizes);
                let tokenizer = config.model_name_or_path.as_deref().unwrap_or(&config.sft_model_path).into();
                Ok(Self { main, tokenizer, value, rewards, reference: None, fresh_value: Some(fresh) })
            }
        }
    }

    /// The tokenizer of the run.
    ///
    /// # Errors
    /// If it is missing or invalid.
    pub(super) fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::from_pretrained(&hub::tokenizer_dir(&self.tokenizer, None)?)
    }

    /// The configuration of the policy, or of the model that is trained.
    pub(super) fn policy(&self) -> &ModelConfig {
        self.main.sizes.config()
    }

    /// The configuration of a separate reference model, or of a teacher.
    pub(super) fn reference_config(&self) -> Option<&ModelConfig> {
        self.reference.as_ref().map(|model| model.sizes.config())
    }

    /// The longest sequence that all models take.
    pub(super) fn context(&self) -> usize {
        // With an encoder-decoder policy, reward models read text, of any length.
        let read_ids = !self.policy().is_encoder_decoder();
        let others = self.value.iter().chain(&self.reference).chain(self.rewards.iter().filter(|_| read_ids));
        let all = others.chain([&self.main]).map(|model| model.sizes.config().max_position_embeddings);
        all.min().unwrap_or(usize::MAX)
    }

    /// The models of the run as they are kept in memory, the trained ones first.
    ///
    /// # Errors
    /// If an adapter's targets match no layer.
    pub(super) fn members(&self, run: &PlannedRun) -> Result<Vec<Member<'_>>> {
        match run {
            PlannedRun::Sft(config) => Ok(vec![self.alone(&config.run, config.peft.lora(), &config.optimizer)?]),
            PlannedRun::Reward(config) => Ok(vec![self.alone(&config.run, config.peft.lora(), &config.optimizer)?]),
            PlannedRun::Dpo(config) => self.of_dpo(config),
            PlannedRun::Distill(config) => self.of_distillation(config),
            PlannedRun::Ppo(config) => self.of_ppo(config),
        }
    }

    /// The model of a run that trains one model.
    fn alone(&self, run: &RunConfig, lora: Option<LoraConfig>, optimizer: &OptimizerConfig) -> Result<Member<'_>> {
        let holding = trained(lora.as_ref(), 0, optimizer.optim);
        let footprint = hold(&self.main.sizes, holding, run)?;
        let drops = lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        Ok(Member {
            role: Role::Model,
            name: &self.main.name,
            sizes: &self.main.sizes,
            footprint,
            stage: run.dist.zero_stage,
            is_trained: true,
            states: states(&self.main.sizes, holding, optimizer.optim)?,
            adapter: lora.map(|lora| (lora, drops)),
            is_view: false,
            is_dropped: false,
        })
    }

    fn of_dpo(&self, config: &DpoConfig) -> Result<Vec<Member<'_>>> {
        let run = &config.run;
        let lora = config.peft.lora();
        let drops = config.adapter_dropout() > 0.0;
        let mut policy = Member { role: Role::Policy, ..self.alone(run, lora.clone(), &config.optimizer)? };
        policy.adapter = lora.clone().map(|lora| (lora, drops));
        let mut members = vec![policy];
        let is_dropped = config.precompute_ref_log_probs;
        if is_dropped && self.reference.is_none() {
            return Ok(members);
        }
        // With an adapter and no separate reference model, the reference model is the policy without the adapter.
        let is_view = lora.is_some() && self.reference.is_none();
        let holding = match config.optimizer.optim {
            Optim::AdamwBf16 if lora.is_none() => Holding::FrozenInBf16(0),
            _ => Holding::Frozen(0),
        };
        let model = self.reference.as_ref().unwrap_or(&self.main);
        let footprint =
            if config.sync.sync_ref_model { followed(&model.sizes, run)? } else { hold(&model.sizes, holding, run)? };
        members.push(Member {
            is_view,
            is_dropped,
            ..model.member(Role::ReferenceModel, footprint, run.dist.zero_stage)
        });
        Ok(members)
    }

    fn of_distillation(&self, config: &DistillConfig) -> Result<Vec<Member<'_>>> {
        let run = &config.run;
        let lora = config.peft.lora();
        let mut student = self.alone(run, lora.clone(), &config.optimizer)?;
        student.adapter = lora.map(|lora| {
            let drops = lora.dropout > 0.0 && !config.disable_dropout;
            (lora, drops)
        });
        let teacher = self.reference.as_ref().unwrap_or(&self.main);
        let dtype = config.dtype_of_teacher().kind();
        let format = config.teacher_format();
        let footprint = teacher.sizes.held_as(Holding::Frozen(0), dtype, compute(run), format)?;
        Ok(vec![student, teacher.member(Role::Teacher, footprint, run.dist.zero_stage)])
    }

    fn of_ppo(&self, config: &PpoConfig) -> Result<Vec<Member<'_>>> {
        let run = &config.run;
        let lora = config.peft.lora();
        let shared = config.legacy.num_shared_layers.filter(|_| lora.is_none()).unwrap_or(0);
        let optim = config.optimizer.optim;
        let sizes = &self.main.sizes;
        let holding = trained(lora.as_ref(), shared, optim);
        let mut policy = self.main.member(Role::Policy, hold(sizes, holding, run)?, config.policy_stage());
        policy.is_trained = true;
        policy.states = states(sizes, holding, optim)?;
        policy.adapter = lora.clone().map(|lora| (lora, false));
        if config.needs_critic() && config.legacy.value_head {
            let head = self.main.sizes.config().embedding_size as usize + 1;
            policy.footprint.add_head(head);
            policy.states += 8 * head;
        }
        let mut members = vec![policy];
        if config.needs_critic() && !config.legacy.value_head {
            members.push(self.critic(config)?);
        }
        if config.has_reference() {
            let is_view = lora.is_some();
            let footprint = if config.sync.sync_ref_model {
                followed(sizes, run)?
            } else if optim == Optim::AdamwBf16 && lora.is_none() {
                hold(sizes, Holding::FrozenInBf16(shared), run)?
            } else {
                hold(sizes, Holding::Frozen(shared), run)?
            };
            members
                .push(Member { is_view, ..self.main.member(Role::ReferenceModel, footprint, config.policy_stage()) });
        }
        for reward in &self.rewards {
            let footprint = hold(&reward.sizes, Holding::Frozen(0), run)?;
            members.push(reward.member(Role::RewardModel, footprint, config.frozen_stage()));
        }
        Ok(members)
    }

    /// A separate value model. It starts from its folder, else from the first reward model that can be a value model, else from the policy.
    fn critic(&self, config: &PpoConfig) -> Result<Member<'_>> {
        let vocab = self.main.sizes.config().vocab_size;
        let can_be = |model: &&NamedModel| {
            let shape = model.sizes.config();
            let one_stack = shape.causal && !shape.is_encoder_decoder();
            one_stack && shape.vocab_size == vocab && (shape.labels.len() == 1 || !shape.is_sequence_classifier())
        };
        let start = self.value.as_ref().or_else(|| self.rewards.iter().find(can_be));
        let fresh = || (self.main.name.as_str(), self.fresh_value.as_ref().unwrap_or(&self.main.sizes));
        let (name, sizes) = start.map_or_else(fresh, |model| (model.name.as_str(), &model.sizes));
        let lora = config.value_lora();
        let holding = trained(lora.as_ref(), 0, config.optimizer.optim);
        let footprint = hold(sizes, holding, &config.run)?;
        Ok(Member {
            role: Role::ValueModel,
            name,
            sizes,
            footprint,
            stage: config.value_stage(),
            is_trained: true,
            states: states(sizes, holding, config.optimizer.optim)?,
            adapter: lora.map(|lora| (lora, false)),
            is_view: false,
            is_dropped: false,
        })
    }
}

/// The way the weights of a trained model are kept: with an adapter, or trained by this optimizer from layer `shared` on.
fn trained(lora: Option<&LoraConfig>, shared: usize, optim: Optim) -> Holding<'_> {
    match (lora, optim) {
        (Some(lora), _) => Holding::Adapted(lora),
        (None, Optim::AdamwBf16) => Holding::TrainedInBf16(shared),
        (None, _) => Holding::Trained(shared),
    }
}

/// Bytes of the optimizer's state of a model.
fn states(sizes: &ModelSizes, holding: Holding<'_>, optim: Optim) -> Result<usize> {
    Ok(sizes.trained(holding)?.iter().map(|tensor| state_bytes(optim, tensor)).sum())
}

fn hold(sizes: &ModelSizes, holding: Holding<'_>, run: &RunConfig) -> Result<Held> {
    sizes.held_as(holding, run.dtype.kind(), compute(run), run.quantization.quantization())
}

/// A reference model that is updated from the policy: its weights are kept like those of a trained model, without gradients.
fn followed(sizes: &ModelSizes, run: &RunConfig) -> Result<Held> {
    let footprint = hold(sizes, Holding::Trained(0), run)?;
    Ok(Held { trained: 0, gradients: 0, trained_layer: 0, trained_root: 0, ..footprint })
}

/// The adapter in the folder `path`, unless the folder has a whole model.
fn adapter_in(path: &Path) -> Result<Option<AdapterFolder>> {
    if !path.is_dir() || path.join("config.json").is_file() {
        return Ok(None);
    }
    AdapterFolder::find(path)
}

/// Reads the configuration of the model `path`, and the dtype in which it is stored. `downloads`: `config.json` may come from the hub.
pub(super) fn config_of(path: &Path, revision: Option<&str>, downloads: bool) -> Result<Described> {
    let adapter = adapter_in(path)?;
    let (dir, revision) = match adapter.as_ref().map(|folder| (folder.local_base(), folder.hub_base())) {
        Some((Some(base), _)) => (base, None),
        Some((None, Some((name, revision)))) => (PathBuf::from(name), revision),
        _ => (path.to_path_buf(), revision),
    };
    if dir.is_dir() {
        let config = ModelConfig::from_dir(&dir)?;
        // Only the headers are read.
        let files = Checkpoint::is_in(&dir).then(|| Checkpoint::open(&dir)).transpose()?;
        let kind = files.as_ref().map_or_else(|| config.stored_kind(), Checkpoint::kind);
        return Ok(Described { config, kind, coded: files.as_ref().map(Checkpoint::coded_layers) });
    }
    if !downloads {
        return Err(Error::Run(format!("{}: not here", dir.display())));
    }
    let config = ModelConfig::from_file(&hub::config_file(&dir, revision)?)?;
    Ok(Described { kind: config.stored_kind(), config, coded: None })
}
