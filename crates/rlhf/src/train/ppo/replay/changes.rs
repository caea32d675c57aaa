//! Settings that a replay may change, and why it may not change the others.

use crate::run::checkpoint::Change;
use crate::settings::PpoConfig;
use rlhf_base::schema::{Field, ReplayClass, ResumeClass, Settings as _};
use rlhf_base::{Error, Refusal, Result};

const ELSEWHERE: &str = "it changes nothing of one update";
/// The reason for settings of models, data, precision and adapters.
const CONTINUES: &str = "a replay continues from the run's checkpoint, with the models and the data of the run";

/// Returns why a replay may not change a setting; `None` if it may.
fn reason(field: &Field) -> Option<&'static str> {
    match (field.replay, field.resume) {
        (ReplayClass::Changes, _) => None,
        (ReplayClass::Sampling, _) => Some("a replay has the responses that the run sampled"),
        (_, ResumeClass::Length) => Some("a replayed update has its place in the run's schedules"),
        (ReplayClass::Scores, _) => Some("a replay has the rewards that the run recorded"),
        (ReplayClass::Later, _) | (_, ResumeClass::Free | ResumeClass::Best) => Some(ELSEWHERE),
        _ => Some(CONTINUES),
    }
}

/// Checks that a replay of the update `update` may have these changed settings.
///
/// # Errors
/// One line for each setting that it may not change.
pub(super) fn check(changes: &[Change], update: usize) -> Result<()> {
    let fields = PpoConfig::fields();
    let refused = changes.iter().filter_map(|change| {
        // A name without a description is not a setting that may change.
        let field = fields.iter().find(|field| field.name == change.name);
        let [then, now] = change.shown();
        let reason = field.map_or(Some(CONTINUES), reason)?;
        let rest = format!(" = {now}: expected {then}, as in update {update} of the run: {reason}");
        Some(Refusal::new(&change.name, rest))
    });
    let refused: Vec<Refusal> = refused.collect();
    if refused.is_empty() { Ok(()) } else { Err(Error::Refused(refused)) }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let fields = PpoConfig::fields();
        let field = |name: &str| fields.iter().find(|field| field.name == name).unwrap();
        for name in &names {
            assert_eq!(reason(field(name)) == Some(ELSEWHERE), elsewhere.contains(&name.as_str()), "{name}");
        }
        assert!(elsewhere.iter().all(|name| names.iter().any(|known| known == name)));
        let is_kept = |name: &&String| {
            let field = field(name);
            field.replay == ReplayClass::Kept
                && field.resume != ResumeClass::Length
                && !elsewhere.contains(&name.as_str())
        };
        let others = names.iter().copied().filter(is_kept);
        let mut others: Vec<&str> = others.map(String::as_str).collect();
        others.sort_unstable();
        let expected = "apply_chat_template bf16 bnb_4bit_quant_type chat_template_kwargs data_split data_split_seed dataset_columns dataset_config dataset_name dataset_test_split \
                        dataset_train_split dataset_weights dtype enable_ema environment_factory environment_failure_reward eval_dataset_name eval_split_size fp16 hysteresis initial_scale_power \
                        load_in_4bit load_in_8bit long_prompts lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules loss_scale_window malformed_calls max_prompt_length max_tool_calling_iterations \
                        min_loss_scale model_name_or_path model_revision new_reward_head num_shared_layers optim preset \
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
        let unknown = check(&[change("no_setting", json!(1), json!(2))], 2).unwrap_err().to_string();
        assert!(
            unknown.starts_with("no_setting = 2: expected 1, as in update 2 of the run: a replay continues"),
            "{unknown}"
        );
    }
}
