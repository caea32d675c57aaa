//! Settings of the optimizer and of the learning-rate schedule.

use serde::Serialize;

use crate::model::Trains;
use rlhf_base::Result;
use rlhf_base::dist::ZeroStage;
use rlhf_base::name_of;
use rlhf_base::schema::{
    Choices, OPTIMIZER, Settings, above_zero, all, exclude, expect, no_effect, optional, refuse, zero_or_more,
    zero_to_one,
};

/// Names of the settings of the learning rate's schedule.
pub const SCHEDULE: [&str; 9] = [
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "lr_end",
    "min_lr_rate",
    "num_cycles",
    "num_decay_steps",
    "decay_type",
    "power",
];

/// The optimizer and the learning-rate schedule. The peak learning rate is a field of each command, as its default differs.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct OptimizerConfig {
    /// Optimizer; all but `adamw_torch` hold smaller states.
    #[setting(heading = OPTIMIZER, default = "adamw_torch")]
    pub optim: Optim,
    /// Learning-rate schedule after the warm-up.
    #[setting(heading = OPTIMIZER, default = "linear", replay = Changes)]
    pub lr_scheduler_type: LrSchedulerType,
    /// Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and with `grpo` and
    /// `rloo`.
    #[setting(heading = OPTIMIZER, default = 0, replay = Changes)]
    pub warmup_steps: usize,
    /// Warm-up as a share of all updates, rounded up.
    #[setting(heading = OPTIMIZER, default = 0.0, replay = Changes)]
    pub warmup_ratio: f64,
    /// Final learning rate [default: 0, and 1e-7 with `polynomial`].
    #[setting(heading = OPTIMIZER, replay = Changes)]
    pub lr_end: Option<f64>,
    /// Final learning rate as a share of the peak, in place of `lr_end`.
    #[setting(heading = OPTIMIZER, replay = Changes)]
    pub min_lr_rate: Option<f64>,
    /// Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts` 1, its decays].
    #[setting(heading = OPTIMIZER, replay = Changes)]
    pub num_cycles: Option<f64>,
    /// Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps with `rlhf grpo`
    /// and `rlhf rloo`.
    #[setting(heading = OPTIMIZER, replay = Changes)]
    pub num_decay_steps: Option<usize>,
    /// Form of the decay of `warmup_stable_decay`.
    #[setting(heading = OPTIMIZER, default = "cosine", replay = Changes)]
    pub decay_type: DecayType,
    /// Power of the `polynomial` schedule.
    #[setting(heading = OPTIMIZER, default = 1.0, replay = Changes)]
    pub power: f64,
    /// Decoupled weight decay.
    #[setting(heading = OPTIMIZER, default = 0.0, replay = Changes)]
    pub weight_decay: f64,
    /// AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
    #[setting(heading = OPTIMIZER, default = 0.9, replay = Changes)]
    pub adam_beta1: f64,
    /// AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
    #[setting(heading = OPTIMIZER, default = 0.999, replay = Changes)]
    pub adam_beta2: f64,
    /// AdamW's epsilon; Adafactor's is of its own.
    #[setting(heading = OPTIMIZER, default = "1e-8", replay = Changes)]
    pub adam_epsilon: f64,
    /// Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
    #[setting(heading = OPTIMIZER, parse = norm_or_zero, replay = Changes)]
    pub max_grad_norm: Option<f64>,
}

impl OptimizerConfig {
    /// Settings of one step.
    pub(super) fn step(&self, lr: f64, weight_decay: f64) -> tch_ext::AdamW {
        let (beta1, beta2, eps) = (self.adam_beta1, self.adam_beta2, self.adam_epsilon);
        tch_ext::AdamW { lr, beta1, beta2, weight_decay, eps }
    }

    /// Checks what every step uses: a step with another number makes no finite weights, or wrong ones.
    ///
    /// # Errors
    /// [`Error::Usage`](rlhf_base::Error::Usage), or one for each of several.
    pub fn check_steps(&self) -> Result<()> {
        let below_one = |beta: f64| (0.0..1.0).contains(&beta);
        let (beta1, beta2) = (self.adam_beta1, self.adam_beta2);
        all([
            zero_or_more(name_of!(self.weight_decay), self.weight_decay),
            expect(below_one(beta1), name_of!(self.adam_beta1), beta1, "a number from 0 to below 1"),
            expect(below_one(beta2), name_of!(self.adam_beta2), beta2, "a number from 0 to below 1"),
            above_zero(name_of!(self.adam_epsilon), self.adam_epsilon),
            self.max_grad_norm.map_or(Ok(()), |norm| above_zero(name_of!(self.max_grad_norm), norm)),
        ])
    }

    /// Checks the optimizer of models that are sharded by `stages` and computed in bf16 where `bf16` is set; `only_adapters` if nothing
    /// but adapters is trained.
    pub fn check_held(&self, stages: &[ZeroStage], bf16: bool, only_adapters: bool) -> Result<()> {
        if self.optim == Optim::AdamwBf16 {
            if only_adapters {
                let why = "with use_peft = true: adapters are held in float32; adamw_8bit has smaller states";
                return no_effect(name_of!(self.optim), self.optim.name(), why);
            }
            if !bf16 {
                return refuse(
                    name_of!(self.optim),
                    " = adamw_bf16 needs bf16 = true: its weights are held in the dtype that they are computed in",
                );
            }
        }
        match stages.iter().find(|stage| stage.shards_optimizer()) {
            Some(stage) if self.optim != Optim::AdamwTorch => exclude(
                name_of!(self.optim),
                "zero_stage",
                format!(
                    " = {} and zero_stage = {stage} exclude each other: sharded states are those of adamw_torch",
                    self.optim.name()
                ),
            ),
            _ => Ok(()),
        }
    }
}

/// Name of an optimizer, as in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
pub enum Optim {
    /// AdamW with both moments in f32.
    #[serde(rename = "adamw_torch")]
    #[choice(name = "adamw_torch", aliases = ["adamw_torch_fused", "adamw_hf", "adamw", "paged_adamw", "paged_adamw_32bit"])]
    AdamwTorch,
    /// AdamW with both moments in 8 bits, in blocks of 256, as bitsandbytes has them; in f32 for embeddings and for tensors of fewer
    /// than 4096 elements.
    #[serde(rename = "adamw_8bit")]
    #[choice(name = "adamw_8bit", aliases = ["adamw_bnb_8bit", "paged_adamw_8bit"])]
    Adamw8bit,
    /// Adafactor without a first moment: one second moment for each row and column of a matrix. Its updates are clipped to a root mean
    /// square of 1.
    #[serde(rename = "adafactor")]
    #[choice(name = "adafactor")]
    Adafactor,
    /// AdamW on weights that are held in bf16, without a copy in f32, with both moments in bf16: a step is computed in f32, and its results
    /// are rounded stochastically. Vectors, heads and matrices of fewer than 4096 elements stay in f32. Needs `bf16`.
    #[serde(rename = "adamw_bf16")]
    #[choice(name = "adamw_bf16")]
    AdamwBf16,
}

impl Optim {
    /// The name of the setting's value.
    pub fn name(self) -> &'static str {
        Choices::name(self)
    }

    /// The part of a model that is trained with this optimizer, and how it is held.
    pub fn trains(self, gets_adapter: bool) -> Trains {
        match (gets_adapter, self) {
            (true, _) => Trains::Adapter,
            (false, Self::AdamwBf16) => Trains::AllInBf16,
            (false, _) => Trains::All,
        }
    }
}

/// Schedule of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// Linear decay to 0.
    Linear,
    /// Half a cosine to 0.
    Cosine,
    /// The same with a final rate above 0, which must be set.
    CosineWithMinLr,
    /// Several such falls, each from the peak; one by default.
    CosineWithRestarts,
    /// A power of the fraction of updates left.
    Polynomial,
    /// Inverse square root of the updates, whatever their number.
    InverseSqrt,
    /// The peak until the decay in the last `num_decay_steps` updates; the warm-up rises from the final rate.
    WarmupStableDecay,
    /// The peak throughout, without warm-up.
    Constant,
    /// The peak throughout, after the warm-up.
    ConstantWithWarmup,
}

impl LrSchedulerType {
    /// The name of the setting's value.
    pub fn name(self) -> &'static str {
        Choices::name(self)
    }

    /// Returns whether the rate falls to a final value over the updates of the run.
    pub fn falls(self) -> bool {
        !matches!(self, Self::InverseSqrt | Self::Constant | Self::ConstantWithWarmup)
    }

    /// Returns whether the schedule has a cosine, `warmup_stable_decay` in a decay of the form `decay`.
    fn has_cycles(self, decay: DecayType) -> bool {
        match self {
            Self::Cosine | Self::CosineWithMinLr | Self::CosineWithRestarts => true,
            Self::WarmupStableDecay => decay == DecayType::Cosine,
            _ => false,
        }
    }
}

/// Form of the decay of [`LrSchedulerType::WarmupStableDecay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
pub enum DecayType {
    /// Half a cosine.
    #[serde(rename = "cosine")]
    #[choice(name = "cosine")]
    Cosine,
    /// A line.
    #[serde(rename = "linear")]
    #[choice(name = "linear")]
    Linear,
    /// 1 minus the square root of the share that is over.
    #[serde(rename = "1-sqrt")]
    #[choice(name = "1-sqrt")]
    OneMinusSqrt,
}

/// Parses a norm; 0 turns clipping off.
fn norm_or_zero(text: &str) -> Result<Option<f64>, String> {
    Ok(optional(text)?.filter(|&norm| norm != 0.0))
}

/// Checks an optimizer's settings; `value_schedule` is the schedule of a value model, which shares all other settings.
pub fn check_learning(
    learning_rate: f64,
    optimizer: &OptimizerConfig,
    value_schedule: Option<LrSchedulerType>,
) -> Result<()> {
    let (steps, ratio) = (optimizer.warmup_steps, optimizer.warmup_ratio);
    let schedule_type = optimizer.lr_scheduler_type;
    let no_schedule = |does: fn(LrSchedulerType) -> bool| !does(schedule_type) && !value_schedule.is_some_and(does);
    let with_schedule = |hint: &str| format!("with lr_scheduler_type = {}{hint}", schedule_type.name());
    let power = optimizer.power;
    let expected = format!("less than learning_rate = {learning_rate}");
    let no_warmup = no_schedule(|schedule| schedule != LrSchedulerType::Constant);
    all([
        zero_or_more("learning_rate", learning_rate),
        optimizer.check_steps(),
        zero_to_one(name_of!(optimizer.warmup_ratio), ratio),
        if steps > 0 && ratio > 0.0 {
            exclude(
                name_of!(optimizer.warmup_steps),
                name_of!(optimizer.warmup_ratio),
                format!(" = {steps} and warmup_ratio = {ratio} exclude each other: set one of them"),
            )
        } else {
            Ok(())
        },
        if no_warmup && (steps > 0 || ratio > 0.0) {
            let (name, value) = if steps > 0 {
                (name_of!(optimizer.warmup_steps), steps as f64)
            } else {
                (name_of!(optimizer.warmup_ratio), ratio)
            };
            no_effect(name, value, &with_schedule("; constant_with_warmup has a warm-up"))
        } else {
            Ok(())
        },
        above_zero(name_of!(optimizer.power), power),
        if no_schedule(|schedule| schedule == LrSchedulerType::Polynomial) && power != 1.0 {
            no_effect(name_of!(optimizer.power), power, &with_schedule("; polynomial has it"))
        } else {
            Ok(())
        },
        optimizer.lr_end.map_or(Ok(()), |end| zero_or_more(name_of!(optimizer.lr_end), end)),
        match optimizer.lr_end {
            Some(end) if no_schedule(LrSchedulerType::falls) => {
                no_effect(name_of!(optimizer.lr_end), end, &with_schedule(""))
            }
            Some(end) => {
                expect(!schedule_type.falls() || end < learning_rate, name_of!(optimizer.lr_end), end, &expected)
            }
            None => Ok(()),
        },
        check_schedule(optimizer, value_schedule),
    ])
}

/// Checks the settings of single schedules.
fn check_schedule(optimizer: &OptimizerConfig, value_schedule: Option<LrSchedulerType>) -> Result<()> {
    let schedule_type = optimizer.lr_scheduler_type;
    let schedules = || std::iter::once(schedule_type).chain(value_schedule);
    let with_schedule = |hint: &str| format!("with lr_scheduler_type = {}{hint}", schedule_type.name());
    let decay = optimizer.decay_type;
    let has_cycles = schedules().any(|schedule| schedule.has_cycles(decay));
    let (has_end, decays) =
        (schedules().any(LrSchedulerType::falls), schedules().any(|s| s == LrSchedulerType::WarmupStableDecay));
    all([
        match optimizer.min_lr_rate {
            Some(rate) if !has_end => no_effect(name_of!(optimizer.min_lr_rate), rate, &with_schedule("")),
            Some(rate) if optimizer.lr_end.is_some() => exclude(
                name_of!(optimizer.min_lr_rate),
                name_of!(optimizer.lr_end),
                format!(" = {rate} and lr_end exclude each other: set one of them"),
            ),
            Some(rate) => {
                expect((0.0..1.0).contains(&rate), name_of!(optimizer.min_lr_rate), rate, "a number from 0 to below 1")
            }
            None if optimizer.lr_end.is_none() && schedules().any(|s| s == LrSchedulerType::CosineWithMinLr) => {
                refuse(name_of!(optimizer.lr_scheduler_type), " = cosine_with_min_lr needs lr_end or min_lr_rate")
            }
            None => Ok(()),
        },
        match optimizer.num_cycles {
            Some(cycles) if !has_cycles => {
                no_effect(name_of!(optimizer.num_cycles), cycles, &with_schedule(", which has no cosine"))
            }
            Some(cycles) => above_zero(name_of!(optimizer.num_cycles), cycles),
            None => Ok(()),
        },
        match optimizer.num_decay_steps {
            Some(steps) if !decays => {
                no_effect(name_of!(optimizer.num_decay_steps), steps, &with_schedule("; warmup_stable_decay has it"))
            }
            Some(steps) => expect(steps > 0, name_of!(optimizer.num_decay_steps), steps, "at least 1"),
            None if decays => {
                refuse(name_of!(optimizer.lr_scheduler_type), " = warmup_stable_decay needs num_decay_steps")
            }
            None => Ok(()),
        },
        if decay != DecayType::Cosine && !decays {
            no_effect(name_of!(optimizer.decay_type), decay.name(), &with_schedule("; warmup_stable_decay has it"))
        } else {
            Ok(())
        },
    ])
}
