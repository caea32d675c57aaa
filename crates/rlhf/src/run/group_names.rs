//! Names in the files of runs that compare groups of responses, with the presets `grpo` and `rloo`.
//!
//! Such a run has the names of TRL's GRPOTrainer and RLOOTrainer in its `config.yaml` and its report, and no settings of a value model.
//! The program and its checkpoints have one name for a setting of all presets.

use serde_json::{Map, Value};

/// Settings with another name in TRL's GRPOTrainer and RLOOTrainer: pairs of the name of `rlhf ppo` and TRL's name.
pub const GROUP_NAMES: [(&str, &str); 8] = [
    ("response_length", "max_completion_length"),
    ("kl_coef", "beta"),
    ("cliprange", "epsilon"),
    ("cliprange_high", "epsilon_high"),
    ("dual_clip", "delta"),
    ("num_ppo_epochs", "num_iterations"),
    ("reward_model_path", "reward_model_name_or_path"),
    ("reward", "reward_funcs"),
];

/// Settings that have no effect in a run that compares groups, each with the value, in JSON, that it must have there.
pub const NOT_OF_GROUPS: [(&str, &str); 31] = [
    ("value_model_path", "null"),
    ("value_head", "false"),
    ("vf_coef", "0.1"),
    ("cliprange_value", "0.2"),
    ("gamma", "1.0"),
    ("lam", "0.95"),
    ("lam_policy", "null"),
    ("lam_policy_alpha", "null"),
    ("whiten_rewards", "false"),
    ("whiten_advantages", "\"batch\""),
    ("score_position", "\"after_stop\""),
    ("last_value_in_loss", "true"),
    ("min_response_length", "0"),
    ("value_use_peft", "null"),
    ("value_lora_r", "null"),
    ("value_lora_target_modules", "[]"),
    ("value_lora_modules_to_save", "[]"),
    ("value_warmup_updates", "0"),
    ("value_learning_rate", "null"),
    ("value_lr_scheduler_type", "null"),
    ("value_lr_warmup_steps", "null"),
    ("value_weight_decay", "null"),
    ("value_max_grad_norm", "null"),
    ("actor_zero_stage", "null"),
    ("critic_zero_stage", "null"),
    ("align_overflow", "false"),
    ("num_mini_batches", "1"),
    ("per_device_generation_batch_size", "null"),
    ("generation_batches", "1"),
    ("batch_size", "null"),
    ("mini_batch_size", "null"),
];

/// The model to train, by the name of `rlhf grpo` and `rlhf rloo`; the tokenizer's model for `rlhf ppo`.
pub const MODEL: &str = "model_name_or_path";

/// The model to train, by the name of `rlhf ppo`.
pub const POLICY: &str = "sft_model_path";

fn is_of_groups(settings: &Map<String, Value>) -> bool {
    settings.get("preset").and_then(Value::as_str).is_some_and(|preset| ["grpo", "rloo"].contains(&preset))
}

/// Returns the name of the setting `name` in the files of a run that compares groups.
pub(crate) fn written_name(name: &str) -> &str {
    GROUP_NAMES.iter().find(|(ppo_name, _)| *ppo_name == name).map_or(name, |(_, trl_name)| trl_name)
}

/// Returns the settings of a run as its files name them.
pub(crate) fn written(settings: Map<String, Value>) -> Map<String, Value> {
    if !is_of_groups(&settings) {
        return settings;
    }
    // With another model's tokenizer both names are needed.
    let one_model = settings.get(MODEL).is_some_and(Value::is_null);
    let policy = settings.get(POLICY).filter(|_| one_model).cloned();
    let is_left_out = |name: &str, value: &Value| {
        let fixed = NOT_OF_GROUPS.iter().find(|(other, _)| *other == name);
        fixed.is_some_and(|(_, only)| serde_json::from_str::<Value>(only).is_ok_and(|only| only == *value))
            || (name == POLICY && policy.is_some())
    };
    let kept = settings.into_iter().filter(|(name, value)| !is_left_out(name, value));
    kept.map(|(name, value)| match &policy {
        Some(policy) if name == MODEL => (name, policy.clone()),
        _ => (written_name(&name).to_string(), value),
    })
    .collect()
}

/// Returns the settings that [`written`] has renamed by the names of the program; those of older files have these already.
pub(crate) fn read_back(settings: Map<String, Value>) -> Map<String, Value> {
    if !is_of_groups(&settings) {
        return settings;
    }
    let one_model = !settings.contains_key(POLICY);
    let ppo_name = |name: String| match GROUP_NAMES.iter().find(|(_, trl_name)| *trl_name == name) {
        Some((ppo_name, _)) => (*ppo_name).to_string(),
        None if one_model && name == MODEL => POLICY.to_string(),
        None => name,
    };
    let mut settings: Map<String, Value> = settings.into_iter().map(|(name, value)| (ppo_name(name), value)).collect();
    if one_model {
        settings.insert(MODEL.into(), Value::Null);
    }
    for (name, only) in NOT_OF_GROUPS {
        if let (false, Ok(only)) = (settings.contains_key(name), serde_json::from_str(only)) {
            settings.insert(name.into(), only);
        }
    }
    settings
}
