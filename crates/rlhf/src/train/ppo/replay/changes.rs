//! Settings that a replay may change, and why it may not change the others.

use crate::run::checkpoint::{Change, FREE, LENGTH, OF_BEST};
use rlhf_base::{Error, Result};
use rlhf_lm::optim::settings::SCHEDULE;

/// Settings that act after responses are sampled and scored, beside those of the schedule. A replay may change them.
const ALLOWED: &[&str] = &[
    "advantage_estimator",
    "scale_rewards",
    "normalize_advantages",
    "multi_objective_aggregation",
    "lam_policy",
    "lam_policy_alpha",
    "overlong_buffer_len",
    "overlong_penalty_factor",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "loss_type",
    "importance_sampling_level",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "use_bias_correction_kl",
    "reward_clip_range",
    "train_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_mini_batches",
    "batch_size",
    "mini_batch_size",
    "local_rollout_forward_batch_size",
    "num_ppo_epochs",
    "missing_eos_penalty",
    "non_eos_penalty",
    "penalty_reward_value",
    "score_position",
    "kl_coef",
    "kl_estimator",
    "kl_in_loss",
    "adap_kl_ctrl",
    "kl_coef_end",
    "whiten_rewards",
    "whiten_advantages",
    "gamma",
    "lam",
    "cliprange",
    "cliprange_value",
    "vf_coef",
    "cliprange_high",
    "dual_clip",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "target_kl",
    "ratio_threshold",
    "clip_reward_value",
    "eos_in_loss",
    "mask_truncated_completions",
    "last_value_in_loss",
    "unsup_coef",
    "ema_beta",
    "early_stopping",
    "use_score_scaling",
    "use_score_norm",
    "score_clip",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "value_warmup_updates",
    "value_learning_rate",
    "value_lr_scheduler_type",
    "value_lr_warmup_steps",
    "value_weight_decay",
    "value_max_grad_norm",
    "align_overflow",
    "compute_fp32_loss",
    "device",
    "gradient_checkpointing",
    "max_tokens_per_micro_batch",
    "num_threads",
];

/// Settings that decide which responses an update has.
const SAMPLING: &[&str] = &[
    "seed",
    "num_generations",
    "dynamic_sampling",
    "dynamic_filtering_reward_range",
    "max_num_gen_batches",
    "response_length",
    "stop_token",
    "stop_token_id",
    "stop_strings",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "min_new_tokens",
    "logprobs_of",
    "raw_logprobs",
    "min_response_length",
    "generation_batch_size",
    "steps_per_generation",
    "per_device_generation_batch_size",
    "generation_batches",
];

/// Settings that change the next updates alone.
const LATER: &[&str] = &["target", "horizon"];

const ELSEWHERE: &str = "it changes nothing of one update";

/// Returns why a replay may not change the setting `name`; `None` if it may.
fn reason(name: &str) -> Option<&'static str> {
    // The folder of the run; where a replay writes is no setting of it.
    if ALLOWED.contains(&name) || SCHEDULE.contains(&name) || name == "output_dir" {
        return None;
    }
    Some(match name {
        name if SAMPLING.contains(&name) => "a replay has the responses that the run sampled",
        name if LENGTH.contains(&name) => "a replayed update has its place in the run's schedules",
        name if name.starts_with("reward") => "a replay has the rewards that the run recorded",
        name if [LATER, &FREE, &OF_BEST].iter().any(|list| list.contains(&name)) => ELSEWHERE,
        // Models, data, precision, adapters.
        _ => "a replay continues from the run's checkpoint, with the models and the data of the run",
    })
}

/// Checks that a replay of the update `update` may have these changed settings.
///
/// # Errors
/// One line for each setting that it may not change.
pub(super) fn check(changes: &[Change], update: usize) -> Result<()> {
    let refused = changes.iter().filter_map(|change| {
        let ([then, now], reason) = (change.shown(), reason(&change.name)?);
        Some(format!("{} = {now}: expected {then}, as in update {update} of the run: {reason}", change.name))
    });
    let mut refused: Vec<String> = refused.collect();
    match refused.len() {
        0 => Ok(()),
        1 => Err(Error::Usage(refused.remove(0))),
        _ => Err(Error::Refused(refused)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::PpoConfig;
    use serde_json::{Value, json};

    /// Settings that change nothing of one update, for a look at the whole list.
    const ELSEWHERE_NAMES: &str = "target horizon num_sample_generations max_skipped_updates no_checks on_alarm max_rollbacks log_rollouts \
         rollouts_limit max_environments tool_timeout reset_timeout tool_memory tool_processes print_answers print_answers_interval enable_test_mode test_stop_step num_eval_prompts \
         eval_steps metric_for_best_model greater_is_better zero_stage actor_zero_stage critic_zero_stage \
         ds3_gather_for_generation offload offload_dir dist_timeout save_dtype max_shard_size report_to tensorboard_tags run_name \
         project tracker_kwargs log_model disable_tqdm no_report save_steps save_total_limit push_to_hub hub_model_id \
         hub_revision hub_private_repo hub_strategy hub_always_push";

    #[test]
    fn every_name_is_that_of_a_setting_and_the_others_are_models_data_and_precision() {
        let config = serde_json::to_value(PpoConfig::new("p", "r", "d", "o")).unwrap();
        let names: Vec<&String> = config.as_object().unwrap().keys().collect();
        let elsewhere: Vec<&str> = ELSEWHERE_NAMES.split_whitespace().collect();
        for name in &names {
            assert_eq!(reason(name) == Some(ELSEWHERE), elsewhere.contains(&name.as_str()), "{name}");
        }
        let lists = [ALLOWED, &SCHEDULE, SAMPLING, &LENGTH, &elsewhere];
        for name in lists.iter().copied().flatten() {
            assert!(names.iter().any(|known| known == name), "no setting {name}");
            assert_eq!(lists.iter().filter(|list| list.contains(name)).count(), 1, "{name}");
        }
        let others = names.iter().filter(|name| !lists.iter().any(|list| list.contains(&name.as_str())));
        let mut others: Vec<&str> =
            others.map(|name| name.as_str()).filter(|name| !name.starts_with("reward")).collect();
        others.sort_unstable();
        let expected = "apply_chat_template bf16 bnb_4bit_quant_type chat_template_kwargs data_split data_split_seed dataset_columns dataset_config dataset_name dataset_test_split \
                        dataset_train_split dataset_weights dtype enable_ema environment_factory environment_failure_reward eval_dataset_name eval_split_size fp16 hysteresis initial_scale_power \
                        load_in_4bit load_in_8bit long_prompts lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules loss_scale_window malformed_calls max_prompt_length max_tool_calling_iterations \
                        min_loss_scale model_name_or_path model_revision new_reward_head num_shared_layers optim output_dir preset \
                        sft_model_path sync_ref_model system_prompt tool_env tool_output_limit tools unsupervised_dataset_config_name unsupervised_dataset_name use_bnb_nested_quant use_dora \
                        use_peft use_rslora value_head value_lora_modules_to_save value_lora_r value_lora_target_modules value_model_path value_use_peft";
        assert_eq!(others.join(" "), expected);
    }

    #[test]
    fn a_setting_of_sampling_is_refused_with_both_values() {
        let change = |name: &str, then: Value, now: Value| Change { name: name.into(), then, now };
        assert!(check(&[change("learning_rate", json!(1e-3), json!(1e-6))], 2).is_ok());
        let error = check(&[change("temperature", json!(1.0), json!(0.5))], 2).unwrap_err();
        let expected = "temperature = 0.5: expected 1.0, as in update 2 of the run: a replay has the responses that the run sampled";
        assert_eq!((error.to_string().as_str(), error.exit_code()), (expected, 2));
        let two = [change("seed", json!(1), json!(2)), change("sft_model_path", json!("a"), json!("b"))];
        assert_eq!(check(&two, 2).unwrap_err().refusals().len(), 2);
    }
}
