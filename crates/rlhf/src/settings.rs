//! Settings of the commands, and the plans that follow from them.
//!
//! Each command has a plain type, which flattens the groups of settings of the modules below; all of them are re-exported here.
//! A field's name is the flag's name, the configuration file's key and, where TRL has the setting, TRL's name. Its doc comment is
//! its `--help` text. Every default is written once, in the field's `setting` attribute: the constructors read it from there.

mod by_rows;
mod chat;
mod check;
mod completions;
mod compute;
mod convert;
mod distill;
mod doctor;
mod dpo;
mod evaluate;
mod generate;
mod launch;
mod logprobs;
mod merge;
mod pipeline;
mod plan;
mod planning;
mod ppo;
mod ppo_run;
mod presets;
mod push;
mod replay;
mod report;
mod resolve;
mod responses;
mod reward;
mod rows;
mod schema;
mod score;
mod serve;
mod session;
mod sft;
mod watch;

pub use chat::{ChatConfig, ChatEnvironmentConfig};
pub use completions::{CompletionsConfig, Shell};
pub use compute::ComputeConfig;
pub use convert::{ConvertConfig, GgufType};
pub use distill::{DistillConfig, DistillLoss, DistillLossConfig};
pub use doctor::DoctorConfig;
pub(crate) use dpo::EVAL_METRICS as DPO_EVAL_METRICS;
pub use dpo::{DpoConfig, DpoLoss, DpoLossConfig, FDivergence, TruncationMode};
pub use evaluate::{EvaluateConfig, JudgeConfig};
pub use generate::{Format, GenerateConfig};
pub use launch::LaunchFlags;
pub use logprobs::LogprobsConfig;
pub use merge::MergeConfig;
pub use pipeline::PipelineFlags;
pub use plan::{PpoPlan, TrainPlan};
pub use planning::PlanFlags;
pub use ppo::{
    GenerationBatchesConfig, LegacyConfig, PpoConfig, RolloutLogConfig, TestModeConfig, ValueConfig, ValuePeftConfig,
};
pub use ppo_run::PpoRun;
pub use presets::{Preset, refused};
pub use push::PushConfig;
pub use replay::ReplayConfig;
pub use report::ReportConfig;
pub use responses::{ResponsesConfig, SamplerConfig};
pub use reward::{PairLoss, RewardConfig};
pub use rows::RowsConfig;
pub use schema::SchemaConfig;
pub use score::ScoreConfig;
pub use serve::ServeConfig;
pub use session::SessionConfig;
pub use sft::SftConfig;
pub use watch::WatchConfig;

pub(crate) use check::max_prompt_len;
pub(crate) use plan::LEGACY_BATCH;
pub(crate) use ppo::NUM_EVAL_PROMPTS;
pub(crate) use resolve::TARGET_KL;

pub use crate::data::settings::{
    ChatTemplateConfig, DataConfig, DataSplit, LongPrompts, PromptLengthConfig, SplitConfig, Stage,
};
pub use crate::reward::{RewardSourcesConfig, ScoreScalingConfig};
pub use crate::rl::advantage::{AdvantageConfig, AdvantageEstimator, Aggregation, ScaleRewards};
pub use crate::rl::alarms::settings::AlarmConfig;
pub use crate::rl::ema::EmaConfig;
pub use crate::rl::groups::GroupFilterConfig;
pub use crate::rl::kl::KlConfig;
pub use crate::rl::math::ImportanceLevel;
pub use crate::rl::reference::SyncConfig;
pub use crate::rl::settings::{EosInLoss, LossConfig, LossType, MaskConfig, WhitenAdvantages};
pub use crate::rl::unsupervised::UnsupervisedConfig;
pub use crate::run::push::settings::{HubConfig, HubStrategy, HubToken};
pub use crate::run::resolved::write_resolved;
pub(crate) use crate::run::settings::EVAL_SCORES;
pub use crate::run::settings::{CheckpointConfig, EvalConfig, Interval, Resume, RunConfig};
pub use crate::run::tracking::{ReportTo, TensorboardTags, TrackingConfig};
pub use rlhf_base::dist::{DistConfig, PpoDistConfig, ZeroStage};
pub use rlhf_base::offload::settings::{OffloadConfig, OffloadPart};
pub use rlhf_base::schema::ByteSize;
pub use rlhf_lm::generate::settings::{LogprobsOf, SamplingConfig, StopToken};
pub use rlhf_lm::model::PeftConfig;
pub use rlhf_lm::optim::loss_scale::{Fp16Config, LossScaleConfig};
pub use rlhf_lm::optim::settings::{DecayType, LrSchedulerType, Optim, OptimizerConfig};

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde_json::json;

    use super::*;
    use rlhf_base::Result;
    use rlhf_lm::model::Dtype;

    /// A configuration of PPO with every default.
    pub(super) fn ppo() -> PpoConfig {
        PpoConfig::new("policy", "judge", "prompts.jsonl", "out")
    }

    /// The message of a refusal, which is an error of usage.
    #[track_caller]
    pub(super) fn usage_of<T: std::fmt::Debug>(result: Result<T>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        error.to_string()
    }

    /// Settings that both trainers inherit from transformers' TrainingArguments; TRL turns bf16 and gradient checkpointing on.
    fn inherited() -> serde_json::Value {
        let scale =
            json!({"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1.0});
        let data = json!({
            "dataset_train_split": "train", "dataset_test_split": "test", "dataset_weights": [], "dataset_config": null,
            "eval_split_size": null, "data_split": null, "data_split_seed": 42, "dataset_columns": [], "chat_template_kwargs": null,
        });
        let others = json!({
            "train_batch_size": null, "per_device_train_batch_size": null, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
            "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0,
            "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": null,
            "warmup_ratio": 0.0, "lr_end": null, "power": 1.0,
            "min_lr_rate": null, "num_cycles": null, "num_decay_steps": null, "decay_type": "cosine",
            "optim": "adamw_torch",
        });
        let run = json!({
            "seed": 42, "bf16": false, "fp16": false, "dtype": "auto", "device": "auto", "save_dtype": "auto", "max_shard_size": "50GB",
            "gradient_checkpointing": false, "max_tokens_per_micro_batch": null, "num_threads": null, "disable_tqdm": false, "no_report": false,
            "use_peft": false, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": [],
            "lora_modules_to_save": [], "use_rslora": false, "use_dora": false, "zero_stage": 0, "offload": [], "offload_dir": null, "dist_timeout": 1800, "save_steps": null, "save_total_limit": null, "eval_steps": null,
            "metric_for_best_model": null, "greater_is_better": null,
        });
        let hub = json!({
            "push_to_hub": false, "hub_model_id": null, "hub_revision": null, "hub_private_repo": null,
            "hub_strategy": "every_save", "hub_always_push": false,
        });
        let tracking = json!({
            "report_to": [], "tensorboard_tags": "plain", "run_name": null, "project": null, "tracker_kwargs": null,
            "log_model": false,
        });
        joined([data, others, run, quantization(), scale, hub, tracking])
    }

    /// Settings of the commands that load a base.
    fn quantization() -> serde_json::Value {
        json!({"load_in_4bit": false, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": false})
    }

    /// Joins the entries of all: `json!` itself is limited in their number.
    fn joined<const N: usize>(parts: [serde_json::Value; N]) -> serde_json::Value {
        let entries = parts.into_iter().flat_map(|part| match part {
            serde_json::Value::Object(entries) => entries,
            other => panic!("no object: {other}"),
        });
        entries.collect()
    }

    #[track_caller]
    fn assert_settings(config: &impl Serialize, mut expected: serde_json::Value) {
        let inherited = inherited();
        let found = serde_json::to_value(config).unwrap();
        let expected = expected.as_object_mut().unwrap();
        if expected.contains_key("output_dir") {
            expected.extend(inherited.as_object().unwrap().clone());
        }
        let sorted = |map: &serde_json::Map<String, serde_json::Value>| {
            map.iter().map(|(key, value)| format!("{key}: {value}")).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(sorted(found.as_object().unwrap()), sorted(expected));
    }

    #[test]
    fn defaults_are_those_of_trl_1_11() {
        let rewards = json!({
            "reward": [], "reward_command": null, "reward_url": null, "reward_weights": [], "reward_normalize": [],
            "reward_scale": [], "reward_clip": [], "reward_pair": false, "reward_label_column": "label", "reward_batch_size": 32,
            "reward_concurrency": 4, "reward_timeout": 120.0, "reward_retries": 3,
        });
        let environment = json!({
            "tools": [], "environment_factory": [], "max_tool_calling_iterations": null, "malformed_calls": "text",
            "environment_failure_reward": null, "max_environments": 64, "tool_timeout": 30.0, "reset_timeout": 60.0,
            "tool_output_limit": "64KB", "tool_memory": null, "tool_processes": null, "tool_env": [],
        });
        assert_settings(
            &ppo(),
            joined([
                environment.clone(),
                json!({
                    "model_name_or_path": null, "sft_model_path": "policy", "model_revision": "main",
                    "reward_model_path": "judge", "reward_label": null,
                    "value_model_path": null, "new_reward_head": false, "dataset_name": "prompts.jsonl",
                    "output_dir": "out", "learning_rate": 3e-6, "num_mini_batches": 1, "total_episodes": null,
                    "local_rollout_forward_batch_size": 64, "num_sample_generations": 10, "response_length": 53,
                    "stop_token": null, "stop_token_id": null, "temperature": 0.7, "missing_eos_penalty": null,
                    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "stop_strings": [],
                    "logprobs_of": "policy",
                    "num_ppo_epochs": 4, "whiten_rewards": false, "kl_coef": 0.05, "kl_estimator": "k1",
                    "cliprange": 0.2, "vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95,
                    "score_position": "after_stop", "apply_chat_template": false, "system_prompt": null, "num_eval_prompts": 128,
                    "max_prompt_length": null, "long_prompts": "error",
                }),
                json!({"eval_dataset_name": null}),
                json!({
                    "align_overflow": false, "compute_fp32_loss": true,
                    "value_head": false, "raw_logprobs": false, "num_shared_layers": null, "batch_size": null, "mini_batch_size": null, "early_stopping": false,
                    "use_score_scaling": false, "use_score_norm": false, "score_clip": null,
                    "max_skipped_updates": 3, "no_checks": false, "on_alarm": [], "max_rollbacks": 3, "preset": "trl", "non_eos_penalty": false, "penalty_reward_value": -1.0, "whiten_advantages": "batch",
                    "kl_in_loss": false, "adap_kl_ctrl": false, "target": 6.0, "horizon": 10000.0, "kl_coef_end": null,
                    "cliprange_high": null, "dual_clip": null, "entropy_coef": 0.0, "target_kl": null,
                    "use_adaptive_entropy": false, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
                    "entropy_target": 0.2,
                    "ratio_threshold": null, "value_warmup_updates": 0, "value_learning_rate": null,
                    "value_lr_scheduler_type": null, "value_lr_warmup_steps": null, "value_weight_decay": null,
                    "value_max_grad_norm": null,
                }),
                json!({
                    "advantage_estimator": "gae", "num_generations": 1, "scale_rewards": "group", "normalize_advantages": false,
                    "multi_objective_aggregation": "sum_then_normalize", "lam_policy": null, "lam_policy_alpha": null,
                    "dynamic_sampling": false, "dynamic_filtering_reward_range": [], "max_num_gen_batches": 10,
                    "overlong_buffer_len": null, "overlong_penalty_factor": 1.0,
                    "sync_ref_model": false, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
                    "loss_type": "bnpo", "importance_sampling_level": "token", "top_entropy_quantile": 1.0,
                    "off_policy_mask_threshold": null, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
                    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
                    "mask_truncated_completions": false, "use_bias_correction_kl": false, "generation_batch_size": null,
                    "steps_per_generation": null, "max_steps": null, "reward_clip_range": [],
                }),
                json!({
                    "per_device_generation_batch_size": null, "generation_batches": 1, "clip_reward_value": null,
                    "min_response_length": 0, "eos_in_loss": "always", "last_value_in_loss": true,
                    "unsupervised_dataset_name": null, "unsupervised_dataset_config_name": null, "unsup_coef": 27.8,
                    "enable_ema": false, "ema_beta": 0.992, "value_use_peft": null, "value_lora_r": null,
                    "value_lora_target_modules": [], "value_lora_modules_to_save": [], "print_answers": false, "print_answers_interval": 1,
                    "enable_test_mode": false, "test_stop_step": 0, "log_rollouts": false, "rollouts_limit": null,
                    "actor_zero_stage": null, "critic_zero_stage": null, "ds3_gather_for_generation": true,
                }),
                rewards.clone(),
            ]),
        );
        assert_settings(
            &SftConfig::new("m", "d", "o"),
            json!({
                "preset": "trl", "model_name_or_path": "m", "model_revision": "main", "config_name": null, "tokenizer_name": null,
                "dataset_name": "d",
                "eval_dataset_name": null, "output_dir": "o", "per_device_eval_batch_size": 8, "max_steps": null,
                "max_length": 1024, "logging_steps": 10, "completion_only_loss": true, "learning_rate": 2e-5,
                "chat_template_path": null, "eos_token": null,
                "packing": false, "assistant_only_loss": false, "dataset_text_field": "text",
            }),
        );
        assert_settings(
            &RewardConfig::new("m", "d", "o"),
            json!({
                "preset": "trl", "model_name_or_path": "m", "model_revision": "main", "new_reward_head": false, "dataset_name": "d",
                "eval_dataset_name": null,
                "output_dir": "o", "per_device_eval_batch_size": 8, "max_steps": null, "max_length": 1024,
                "logging_steps": 10, "center_rewards_coefficient": null, "learning_rate": 1e-4,
                "pair_loss": "sequence", "reward_format": null, "num_padding_at_beginning": null, "eval_only": false,
                "eos_token": null,
            }),
        );
        assert_settings(
            &GenerateConfig::new("m"),
            joined([
                environment,
                quantization(),
                json!({
                    "model_name_or_path": "m", "model_revision": "main", "prompts": [], "input_format": "text", "output_format": null,
                    "apply_chat_template": false, "system_prompt": null,
                    "max_new_tokens": null, "min_new_tokens": null, "do_sample": null, "temperature": null, "top_k": null,
                    "top_p": null, "min_p": null, "repetition_penalty": null, "num_return_sequences": 1,
                    "stop_token_ids": [], "stop_strings": [], "ignore_eos": false, "seed": 42, "dataset_name": null, "dataset_config": null, "dataset_split": "test", "dataset_columns": [], "chat_template_kwargs": null,
                    "output_file": null, "batch_size": 32, "dtype": "auto", "device": "auto", "num_threads": null,
                }),
            ]),
        );
        assert_settings(
            &LogprobsConfig::new("m"),
            joined([
                quantization(),
                json!({
                    "model_name_or_path": "m", "model_revision": "main", "temperature": 1.0, "dataset_name": null, "dataset_config": null, "dataset_split": "test", "dataset_columns": [], "chat_template_kwargs": null, "output_file": null,
                    "batch_size": 32, "dtype": "auto", "device": "auto", "num_threads": null,
                }),
            ]),
        );
        assert_settings(
            &ScoreConfig::new("m"),
            joined([
                quantization(),
                json!({
                    "model_name_or_path": "m", "model_revision": "main", "reward_label": null, "tokenizer_name": null,
                    "dataset_name": null, "dataset_config": null, "dataset_split": "test", "dataset_columns": [], "chat_template_kwargs": null, "output_file": null, "batch_size": 32, "dtype": "auto",
                    "device": "auto", "num_threads": null,
                }),
                rewards,
            ]),
        );
    }

    #[test]
    fn any_dtype_is_accepted_with_and_without_an_adapter() {
        let (mut sft, mut reward) = (SftConfig::new("m", "d", "o"), RewardConfig::new("m", "d", "o"));
        for dtype in [Dtype::Auto, Dtype::Float32, Dtype::BFloat16, Dtype::Float16] {
            for use_peft in [false, true] {
                (sft.run.dtype, sft.peft.use_peft) = (dtype, use_peft);
                (reward.run.dtype, reward.peft.use_peft) = (dtype, use_peft);
                sft.check().unwrap();
                reward.check().unwrap();
            }
        }
    }
}
