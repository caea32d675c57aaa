//! Presets: the defaults, and the batch sizes, of the systems that rlhf replaces.

use rlhf_base::schema::{Choice, Choices};
use serde::Serialize;

/// The system whose defaults and batch sizes the settings have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "kebab-case")]
#[choice(rename_all = "kebab-case")]
pub enum Preset {
    /// TRL 1: an update generates responses to `per_device_train_batch_size * gradient_accumulation_steps` prompts.
    Trl,
    /// The PPOv2 of TRL 0.9 to 0.11: `num_mini_batches` times as many.
    TrlPpov2,
    /// The PPOTrainer of TRL until 0.11, with `step()`: an update generates responses to `batch_size` prompts.
    TrlLegacy,
    /// DeepSpeed-Chat's three steps: their hyper-parameters, and their choices of what counts.
    DeepspeedChat,
    /// TRL 1.11's GRPOTrainer: groups of responses to each prompt, compared with each other.
    Grpo,
    /// TRL 1.11's RLOOTrainer: each response of a group is compared with the others.
    Rloo,
}

/// Defaults of TRL's trainer with `step()`.
const TRL_LEGACY: [(&str, &str); 12] = [
    ("value_head", "true"),
    ("raw_logprobs", "true"),
    ("score_position", "last_token"),
    ("adap_kl_ctrl", "true"),
    ("kl_coef", "0.2"),
    ("ratio_threshold", "10"),
    ("learning_rate", "1.41e-5"),
    ("lr_scheduler_type", "constant"),
    ("total_episodes", "20000"),
    ("temperature", "1"),
    ("stop_token", "eos"),
    ("seed", "0"),
];

/// Defaults of DeepSpeed-Chat's third step.
const DEEPSPEED_CHAT: [(&str, &str); 22] = [
    ("max_prompt_length", "256"),
    ("long_prompts", "drop"),
    ("per_device_generation_batch_size", "16"),
    ("per_device_train_batch_size", "16"),
    ("num_train_epochs", "1"),
    ("response_length", "256"),
    ("stop_token", "eos"),
    ("temperature", "1"),
    ("num_ppo_epochs", "1"),
    ("kl_coef", "0.1"),
    ("clip_reward_value", "5"),
    ("min_response_length", "2"),
    ("eos_in_loss", "unless_pad"),
    ("last_value_in_loss", "false"),
    ("whiten_advantages", "none"),
    ("vf_coef", "1"),
    ("learning_rate", "9.65e-6"),
    ("value_learning_rate", "5e-6"),
    ("lr_scheduler_type", "cosine"),
    ("warmup_steps", "100"),
    ("adam_beta2", "0.95"),
    ("max_grad_norm", "1"),
];

/// Defaults that DeepSpeed-Chat's first two steps share.
const CHAT_ONE_MODEL: [(&str, &str); 8] = [
    ("max_length", "512"),
    ("per_device_train_batch_size", "16"),
    ("per_device_eval_batch_size", "16"),
    ("num_train_epochs", "1"),
    ("lr_scheduler_type", "cosine"),
    ("adam_beta2", "0.95"),
    ("max_grad_norm", "1"),
    ("seed", "1234"),
];

/// Defaults of DeepSpeed-Chat's first step alone.
const CHAT_SFT: [(&str, &str); 2] = [("completion_only_loss", "false"), ("learning_rate", "1e-3")];

/// Defaults of DeepSpeed-Chat's second step alone.
const CHAT_REWARD: [(&str, &str); 4] = [
    ("new_reward_head", "true"),
    ("pair_loss", "tokens"),
    ("num_padding_at_beginning", "1"),
    ("learning_rate", "5e-5"),
];

/// Defaults that TRL's GRPOTrainer and RLOOTrainer share.
const GROUP_TRAINERS: [(&str, &str); 7] = [
    ("temperature", "1"),
    ("response_length", "512"),
    ("stop_token", "eos"),
    ("num_ppo_epochs", "1"),
    ("learning_rate", "1e-6"),
    ("max_grad_norm", "1"),
    ("seed", "42"),
];

/// Defaults of TRL's GRPOTrainer alone.
const GRPO: [(&str, &str); 7] = [
    ("advantage_estimator", "grpo"),
    ("num_generations", "8"),
    ("loss_type", "dapo"),
    ("kl_coef", "0"),
    ("kl_in_loss", "true"),
    ("kl_estimator", "k3"),
    ("use_bias_correction_kl", "true"),
];

/// Defaults of TRL's RLOOTrainer alone.
const RLOO: [(&str, &str); 4] = [
    ("advantage_estimator", "rloo"),
    ("num_generations", "2"),
    ("loss_type", "grpo"),
    ("importance_sampling_level", "sequence_product"),
];

impl Preset {
    /// The presets of SFT and reward training too.
    pub const OF_ALL_STEPS: [Self; 2] = [Self::Trl, Self::DeepspeedChat];

    /// Returns the settings of PPO that have other defaults with this preset, as key and value of a configuration file.
    pub fn settings(self) -> Vec<(&'static str, &'static str)> {
        match self {
            Self::Trl | Self::TrlPpov2 => Vec::new(),
            Self::TrlLegacy => TRL_LEGACY.to_vec(),
            Self::DeepspeedChat => DEEPSPEED_CHAT.to_vec(),
            Self::Grpo => [&GROUP_TRAINERS[..], &GRPO].concat(),
            Self::Rloo => [&GROUP_TRAINERS[..], &RLOO].concat(),
        }
    }

    /// As [`Self::settings`], of SFT.
    pub fn sft_settings(self) -> Vec<(&'static str, &'static str)> {
        match self {
            Self::DeepspeedChat => [&CHAT_ONE_MODEL[..], &CHAT_SFT].concat(),
            _ => Vec::new(),
        }
    }

    /// As [`Self::settings`], of reward training.
    pub fn reward_settings(self) -> Vec<(&'static str, &'static str)> {
        match self {
            Self::DeepspeedChat => [&CHAT_ONE_MODEL[..], &CHAT_REWARD].concat(),
            _ => Vec::new(),
        }
    }

    /// Returns the names of the presets of all steps.
    pub(super) fn of_all_steps() -> Vec<Choice> {
        let shared = Self::ALL.iter().filter(|(preset, _)| Self::OF_ALL_STEPS.contains(preset));
        shared.map(|(_, choice)| *choice).collect()
    }

    /// Returns true for the trainers of TRL that compare the responses of a group.
    pub fn is_of_groups(self) -> bool {
        matches!(self, Self::Grpo | Self::Rloo)
    }

    /// Returns the command of `rlhf` for this preset: `grpo` and `rloo` have their own, `ppo` takes the others by `--preset`.
    pub fn command(self) -> &'static str {
        match self {
            Self::Grpo => "grpo",
            Self::Rloo => "rloo",
            Self::Trl | Self::TrlPpov2 | Self::TrlLegacy | Self::DeepspeedChat => "ppo",
        }
    }
}

/// Returns why `rlhf ppo` has no flag of this name, if one of the systems that it replaces has.
pub fn refused(flag: &str) -> Option<&'static str> {
    Some(match flag {
        "exp_name" | "task_name" => "a run is known by its output_dir",
        "project_kwargs" => "files go to output_dir; tracker_kwargs are the arguments of trackers",
        "accelerator_kwargs" => "there is no accelerate beneath this program",
        "world_size" => "the number of ranks is the launcher's",
        "global_batch_size" | "global_backward_batch_size" | "backward_batch_size" => {
            "it follows from batch_size, mini_batch_size and gradient_accumulation_steps"
        }
        "forward_batch_size" => "it is mini_batch_size under its older name",
        "total_ppo_epochs" => "it follows from steps and batch_size",
        "remove_unused_columns" => "columns that are not used do no harm, and rewards may read them",
        "dataset_num_proc" => "data is read by one process",
        "optimize_cuda_cache" | "optimize_device_cache" => "memory between the phases is given back in any case",
        "is_encoder_decoder" | "is_peft_model" => "the model's folder and use_peft tell",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::ppo;
    use crate::settings::{EosInLoss, LrSchedulerType, PairLoss, PpoConfig, RewardConfig, SftConfig, WhitenAdvantages};

    #[test]
    fn the_preset_of_deepspeed_chat_has_its_defaults() {
        let config = PpoConfig::with_preset(Preset::DeepspeedChat, "actor", "critic", "d", "o");
        config.check().unwrap();
        assert_eq!((config.kl.kl_coef, config.clip_reward_value, config.mask.min_response_length), (0.1, Some(5.0), 2));
        assert_eq!((config.learning_rate, config.value_optimizer().0), (9.65e-6, 5e-6));
        assert_eq!((config.optimizer.adam_beta1, config.optimizer.adam_beta2), (0.9, 0.95));
        assert_eq!((config.optimizer.max_grad_norm, config.optimizer.warmup_steps), (Some(1.0), 100));
        assert_eq!((config.mask.eos_in_loss, config.whiten_advantages), (EosInLoss::UnlessPad, WhitenAdvantages::None));
        assert_eq!((config.response_length, config.prompt_length.max_prompt_length), (256, Some(256)));
        let plan = config.plan(160).unwrap();
        assert_eq!((plan.batch_size, plan.epoch.mini_batch_size, plan.num_total_batches), (16, 16, 10));
        for preset in [Preset::Trl, Preset::TrlPpov2] {
            assert_eq!(
                PpoConfig {
                    preset: Preset::Trl,
                    ..PpoConfig::with_preset(preset, "policy", "judge", "prompts.jsonl", "out")
                },
                ppo()
            );
        }
    }
    #[test]
    fn the_presets_of_deepspeed_chats_first_two_steps_have_its_defaults() {
        let config = SftConfig::with_preset(Preset::DeepspeedChat, "m", "d", "o");
        config.check().unwrap();
        assert_eq!((config.learning_rate, config.max_length, config.num_train_epochs), (1e-3, Some(512), 1.0));
        assert_eq!((config.optimizer.lr_scheduler_type, config.completion_only_loss), (LrSchedulerType::Cosine, false));
        assert_eq!((config.optimizer.adam_beta2, config.optimizer.max_grad_norm), (0.95, Some(1.0)));
        assert_eq!((config.plan(160).unwrap().num_updates, config.run.seed), (10, 1234));
        let config = RewardConfig::with_preset(Preset::DeepspeedChat, "m", "d", "o");
        config.check().unwrap();
        assert_eq!((config.learning_rate, config.max_length, config.num_train_epochs), (5e-5, Some(512), 1.0));
        assert_eq!((config.pair_loss, config.num_padding_at_beginning), (PairLoss::Tokens, Some(1)));
        assert_eq!((config.new_reward_head, config.plan(160).unwrap().num_updates), (true, 10));
        let grpo = PpoConfig::grpo("m", "d", "o");
        assert_eq!(
            (grpo.preset, &grpo.reward_model_path, grpo.sft_model_path.to_str()),
            (Preset::Grpo, &None, Some("m"))
        );
        assert_eq!(SftConfig::with_preset(Preset::Trl, "m", "d", "o"), SftConfig::new("m", "d", "o"));
        assert_eq!(RewardConfig::with_preset(Preset::Trl, "m", "d", "o"), RewardConfig::new("m", "d", "o"));
    }
}
