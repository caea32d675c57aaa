//! Flags of TRL's and transformers' configurations that `rlhf` does not have. A flag that cannot change the result of a run is
//! accepted with a note; any other must have the value that `rlhf` always has, and is else refused with the reason.
//!
//! Flags that have the same name and meaning here, or are aliases of our flags, are not in the table.

use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use rlhf::reward::check_written;
use rlhf::schema::Refusals;
use serde_json::{Map, Value, json};

use super::errors::{Messages, parsed, refusal};
use super::flags::is_named;
use super::setting::Setting;
use super::sharding::{Layers, Word};
use super::{flags, mixture};

/// Treatment of a flag.
#[derive(Debug, Clone, Copy)]
enum To {
    /// Accepted with a note: it has no effect, for this reason.
    Noted(&'static str),
    /// Accepted with one of these values only, for this reason.
    Only(&'static [&'static str], &'static str),
    /// Translated to our settings: see [`translate`].
    Together,
}
use To::{Noted, Only, Together};

/// The commands that have a flag.
const TRAIN: &[&str] = &["sft", "reward", "dpo", "distill", "ppo", "grpo", "rloo"];
const LEARN: &[&str] = &["sft", "reward", "dpo", "distill"];
const SFT: &[&str] = &["sft"];
const REWARD: &[&str] = &["reward"];
const DPO: &[&str] = &["dpo"];
const DISTILL: &[&str] = &["distill"];
const PPO: &[&str] = &["ppo"];
const ROLLOUT: &[&str] = &["ppo", "grpo", "rloo"];
const GROUPS: &[&str] = &["grpo", "rloo"];
const SAMPLES: &[&str] = &["distill", "grpo", "rloo"];
const GRPO: &[&str] = &["grpo"];

const OFF: &[&str] = &["none", "false"];
const UNSET: &[&str] = &["none"];
const ZERO: &[&str] = &["none", "0", "0.0"];

const BY_DIR: &str = "a run is identified by its output_dir";
const METRICS: &str = "metrics go to output_dir, by logging_steps and report_to";
const ONE_READER: &str = "a dataset is read into memory whole before the run, and nothing is padded";
const RANKS: &str = "losses, gradients and rows are those of all ranks in any case";
const SPEED: &str = "it changes memory and speed only";
const WHOLE: &str = "checkpoints are always complete, and a stopped run saves one";
const COMMAND: &str = "the command decides what is done";
const COMPUTED: &str = "it is computed from the other sizes";
const OLD: &str = "it has no meaning for this program";

const STRATEGY: &str = "expected steps, epoch or no";

/// The flags with the commands that have them, by treatment.
const FLAGS: &[(To, &[&str], &[&str])] = &[
    (Noted(BY_DIR), PPO, &["exp_name", "task_name"]),
    (
        Noted(METRICS),
        TRAIN,
        &[
            "logging_strategy",
            "logging_dir",
            "logging_first_step",
            "logging_nan_inf_filter",
            "log_on_each_node",
            "log_level",
            "log_level_replica",
            "include_num_input_tokens_seen",
            "include_tokens_per_second",
            "include_for_metrics",
            "include_inputs_for_metrics",
        ],
    ),
    (
        Noted("arguments of trackio are entries of tracker_kwargs"),
        TRAIN,
        &["trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"],
    ),
    (Noted(METRICS), PPO, &["project_kwargs"]),
    (Noted("each update is logged"), ROLLOUT, &["logging_steps"]),
    (
        Noted(ONE_READER),
        TRAIN,
        &[
            "dataset_num_proc",
            "dataset_batch_size",
            "dataset_streaming",
            "streaming",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
            "remove_unused_columns",
            "length_column_name",
        ],
    ),
    (Noted(ONE_READER), &["sft", "reward", "dpo", "ppo"], &["shuffle_dataset"]),
    (Only(&["none", "true"], "rows are drawn in a random order"), DISTILL, &["shuffle_dataset"]),
    (Only(&["none", "true"], "prompts are drawn in a random order"), GROUPS, &["shuffle_dataset"]),
    (
        Noted(RANKS),
        TRAIN,
        &[
            "average_tokens_across_devices",
            "accelerator_config",
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ignore_bias_buffers",
            "save_on_each_node",
            "eval_use_gather_object",
            "fsdp_config",
            "fsdp_min_num_params",
            "fsdp_transformer_layer_cls_to_wrap",
            "dispatch_batches",
            "split_batches",
            "ray_scope",
        ],
    ),
    (
        Noted(SPEED),
        TRAIN,
        &[
            "attn_implementation",
            "torch_compile",
            "torch_compile_backend",
            "torch_compile_mode",
            "torchdynamo",
            "use_liger_kernel",
            "use_liger",
            "use_liger_loss",
            "liger_kernel_config",
            "use_cache",
            "torch_empty_cache_steps",
            "auto_find_batch_size",
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
            "debug",
            "skip_memory_metrics",
            "eval_accumulation_steps",
            "eval_do_concat_batches",
            "batch_eval_metrics",
            "prediction_loss_only",
            "low_cpu_mem_usage",
        ],
    ),
    (Noted(SPEED), LEARN, &["activation_offloading", "pad_to_multiple_of"]),
    (Noted(SPEED), SFT, &["padding_free", "eval_packing"]),
    (Noted(SPEED), DPO, &["padding_free"]),
    (Noted(SPEED), DISTILL, &["padding_free", "eval_packing"]),
    (Noted(SPEED), PPO, &["optimize_cuda_cache", "optimize_device_cache"]),
    (
        Noted("an evaluation takes local_rollout_forward_batch_size prompts at a time"),
        ROLLOUT,
        &["per_device_eval_batch_size"],
    ),
    (Noted(WHOLE), TRAIN, &["save_only_model", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint"]),
    (Noted(COMMAND), TRAIN, &["do_train", "do_eval", "do_predict"]),
    (Only(UNSET, "the organization is part of hub_model_id: ORGANIZATION/NAME"), TRAIN, &["push_to_hub_organization"]),
    (Together, PPO, &[IF_BEST, "compare_steps"]),
    (Noted("two runs with the same seed are identical"), TRAIN, &["full_determinism"]),
    (
        Noted("there is no auxiliary loss of a router of experts"),
        &["sft", "dpo", "distill", "grpo", "rloo"],
        &["router_aux_loss_coef"],
    ),
    (
        Noted(OLD),
        TRAIN,
        &[
            "half_precision_backend",
            "fp16_backend",
            "fp16_opt_level",
            "use_legacy_prediction_loop",
            "tpu_num_cores",
            "tpu_metrics_debug",
            "mp_parameters",
            "jit_mode_eval",
            "use_ipex",
        ],
    ),
    (Together, TRAIN, &["eval_strategy", "save_strategy", "use_cpu"]),
    (Only(OFF, "code that comes with a model is never run"), TRAIN, &["trust_remote_code"]),
    (Only(OFF, "set optim = adafactor"), TRAIN, &["adafactor"]),
    (Only(UNSET, "the optimizer's settings are flags of their own"), TRAIN, &["optim_args", "optim_target_modules"]),
    (Together, TRAIN, &[SCHEDULE]),
    (Only(ZERO, "labels are not smoothed"), TRAIN, &["label_smoothing_factor"]),
    (Only(UNSET, "no noise is added to embeddings"), TRAIN, &["neftune_noise_alpha"]),
    (
        Only(OFF, "an evaluation computes in the precision of the training"),
        TRAIN,
        &["bf16_full_eval", "fp16_full_eval"],
    ),
    (Noted("float32 products keep full precision"), TRAIN, &["tf32"]),
    (Only(ZERO, "evaluations run every eval_steps from the start"), TRAIN, &["eval_delay"]),
    (Noted("with eval_steps there is an evaluation before the first update"), TRAIN, &["eval_on_start"]),
    (
        Only(OFF, "output_dir holds the last model, and the best one in its folder `best`"),
        TRAIN,
        &["load_best_model_at_end"],
    ),
    (Only(OFF, "a resumed run continues with the rows that are left"), TRAIN, &["ignore_data_skip"]),
    (Only(UNSET, "seed is the seed of everything random"), TRAIN, &["data_seed"]),
    (Only(OFF, "every row is trained on"), TRAIN, &["dataloader_drop_last"]),
    (Only(UNSET, "columns are found by their names"), TRAIN, &["label_names"]),
    (Only(&["none", "random"], "rows are drawn in a random order"), TRAIN, &["train_sampling_strategy"]),
    (Only(OFF, "rows are drawn in a random order"), TRAIN, &["group_by_length"]),
    (
        Only(&["none", "", "false"], "ranks share the work by rows, and memory by zero_stage"),
        TRAIN,
        &["parallelism_config"],
    ),
    (Together, TRAIN, &["fsdp", "deepspeed", "deepspeed_config", "accelerate_config"]),
    (Noted("ranks are those of the launcher's environment"), TRAIN, &["local_rank"]),
    (Only(&["none", "1"], "the number of ranks is the launcher's"), PPO, &["world_size"]),
    (Only(UNSET, "there is no accelerate beneath this program"), PPO, &["accelerator_kwargs"]),
    (Only(&["none", "-1"], "outputs of earlier passes are not kept"), TRAIN, &["past_index"]),
    (Only(&["none", "true"], "weights are written as safetensors"), TRAIN, &["save_safetensors"]),
    (Only(OFF, "device selects where to compute"), TRAIN, &["use_mps_device"]),
    (Together, TRAIN, &[mixture::DATASETS, mixture::OF_OPEN_R1]),
    (Together, ROLLOUT, &[PROMPT_COLUMN]),
    (Only(&["none", "uint8"], "4-bit weights are stored as bytes"), TRAIN, &["bnb_4bit_quant_storage"]),
    (Only(UNSET, "adapters are for linear layers only: lora_target_modules"), TRAIN, &["lora_target_parameters"]),
    (
        Only(&["none", "causal_lm", "seq_cls", "seq_2_seq_lm"], "the command decides the task"),
        TRAIN,
        &["lora_task_type"],
    ),
    (
        Only(UNSET, "dtype sets the dtype, and the model's folder the rest"),
        &["sft", "reward", "dpo", "distill", "grpo", "rloo"],
        &["model_init_kwargs"],
    ),
    (Noted("nothing is padded"), SFT, &["pad_token"]),
    (Noted("nothing is padded"), DPO, &["pad_token"]),
    (Noted("nothing is padded"), DISTILL, &["pad_token"]),
    (
        Only(UNSET, "teacher_model_revision, teacher_dtype and teacher_load_in_4bit set what they have"),
        DISTILL,
        &["teacher_model_init_kwargs"],
    ),
    (Only(UNSET, "the tokenizer's own template is used"), DISTILL, &["chat_template_path"]),
    (Only(&["none", "text"], "rows have a prompt, which a column of texts has not"), DISTILL, &["dataset_text_field"]),
    (Only(UNSET, "rows are read by their columns"), DISTILL, &["dataset_kwargs"]),
    (Noted("rows that are too long are truncated at their start"), DISTILL, &["truncation_mode"]),
    (Only(OFF, "a row has a prompt of its own"), DISTILL, &["packing", "assistant_only_loss"]),
    (Noted("nothing is packed"), DISTILL, &["packing_strategy"]),
    (Only(&["none", "true"], "the response is learned, not the prompt"), DISTILL, &["completion_only_loss"]),
    (Only(UNSET, "responses have one turn, without tools"), DISTILL, &["max_tool_calling_iterations"]),
    (Noted("log_completions shows a few"), DISTILL, &["log_unique_prompts"]),
    (Noted("nothing is padded; pair_loss = tokens pads with the tokenizer's token"), REWARD, &["pad_token"]),
    (Only(UNSET, "the tokenizer's own template is used"), REWARD, &["chat_template_path"]),
    (Only(&["none", "true"], "no model's own dropout is applied"), REWARD, &["disable_dropout"]),
    (Only(UNSET, "rows are read by their columns"), SFT, &["dataset_kwargs"]),
    (Only(&["none", "keep_start"], "rows are truncated at their end"), SFT, &["truncation_mode"]),
    (Only(&["none", "bfd"], "a block holds whole rows"), SFT, &["packing_strategy"]),
    // Slices of the logits make no other loss.
    (Only(&["none", "nll", "chunked_nll"], "the loss is the negative log-likelihood"), SFT, &["loss_type"]),
    (Only(UNSET, "the reference is the policy without its adapters"), PPO, &["model_adapter_name", "ref_adapter_name"]),
    (
        Only(UNSET, COMPUTED),
        PPO,
        &[
            "num_total_batches",
            "micro_batch_size",
            "local_batch_size",
            "local_mini_batch_size",
            "global_batch_size",
            "backward_batch_size",
            "global_backward_batch_size",
            "total_ppo_epochs",
        ],
    ),
    (Only(UNSET, "it is mini_batch_size under its older name"), PPO, &["forward_batch_size"]),
    (Noted("the model's folder decides"), PPO, &["is_encoder_decoder"]),
    (Only(OFF, "the model's folder and use_peft decide"), PPO, &["is_peft_model"]),
    (Together, GROUPS, &["log_completions"]),
    (
        Noted("generation is rlhf's own"),
        SAMPLES,
        &[
            "use_vllm",
            "vllm_mode",
            "vllm_model_impl",
            "vllm_enable_sleep_mode",
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
            "vllm_gpu_memory_utilization",
            "vllm_max_model_length",
            "vllm_tensor_parallel_size",
            // Names of earlier versions.
            "vllm_device",
            "vllm_dtype",
            "vllm_max_model_len",
            "vllm_enable_prefix_caching",
            "use_transformers_continuous_batching",
            "transformers_continuous_batching_config",
            "use_transformers_paged",
            "cache_implementation",
        ],
    ),
    (
        Noted("the model that generates is the one that is trained"),
        GRPO,
        &[
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_cap",
        ],
    ),
    (Only(OFF, "the KL is that of a whole response"), &["rloo"], &["token_level_kl"]),
    (
        Only(UNSET, "responses are not constrained"),
        SAMPLES,
        &["vllm_structured_outputs_regex", "vllm_guided_decoding_regex"],
    ),
    (
        Only(
            UNSET,
            "sampling has its own flags: top_k, top_p, min_p, repetition_penalty, min_new_tokens, stop_strings",
        ),
        SAMPLES,
        &["generation_kwargs"],
    ),
    (Noted("no model's own dropout is applied"), GROUPS, &["disable_dropout"]),
    (Noted(SPEED), GROUPS, &["pad_to_multiple_of"]),
    (Noted("an evaluation samples one response to each prompt"), GROUPS, &["num_generations_eval"]),
    (
        Noted("responses are text; sample tables and print_answers show some"),
        GROUPS,
        &["log_multimodal", "log_unique_prompts", "wandb_log_unique_prompts"],
    ),
    (Noted("print_answers shows a few"), GROUPS, &["num_completions_to_print"]),
    (Only(UNSET, "responses are written to output_dir only"), GRPO, &["log_completions_hub_repo"]),
    (
        Only(OFF, "logits have the precision of the run, and their log-probabilities are float32"),
        GRPO,
        &["cast_lm_head_to_fp32"],
    ),
];

/// Flags of the table that are lists in TRL: repeated on the command line, one has the values of all. Of another flag the last value
/// counts.
const LISTS: [&str; 4] = ["include_for_metrics", "label_names", "lora_target_parameters", "optim_target_modules"];

/// Aliases of our flags, or of those in the table.
const ALIASES: [(&str, &str); 6] = [
    ("torch_dtype", "dtype"),
    ("max_seq_length", "max_length"),
    ("activation_checkpointing", "gradient_checkpointing"),
    ("evaluation_strategy", "eval_strategy"),
    ("test_split_size", "eval_split_size"),
    ("no_cuda", "use_cpu"),
];

/// The flag of TRL's `step()` that has the best model pushed: a map of the arguments of `push_to_hub`.
const IF_BEST: &str = "push_to_hub_if_best_kwargs";

/// Arguments of `push_to_hub` that are settings here.
const PUSH_ARGUMENTS: [(&str, &str); 5] = [
    ("repo_id", "hub_model_id"),
    ("private", "hub_private_repo"),
    ("revision", "hub_revision"),
    ("token", "hub_token"),
    ("use_auth_token", "hub_token"),
];

/// Arguments of `push_to_hub` that change no byte of the model.
const OTHER_PUSH_ARGUMENTS: [&str; 6] =
    ["commit_message", "commit_description", "safe_serialization", "use_temp_dir", "tags", "max_shard_size"];

/// The column of open-r1's prompts.
const PROMPT_COLUMN: &str = "dataset_prompt_column";

/// The arguments of a schedule, a map.
const SCHEDULE: &str = "lr_scheduler_kwargs";

/// Arguments of transformers' schedules that are settings here.
const SCHEDULE_ARGUMENTS: [(&str, &str); 8] = [
    ("min_lr", "lr_end"),
    ("lr_end", "lr_end"),
    ("min_lr_rate", "min_lr_rate"),
    ("min_lr_ratio", "min_lr_rate"),
    ("num_cycles", "num_cycles"),
    ("num_decay_steps", "num_decay_steps"),
    ("decay_type", "decay_type"),
    ("power", "power"),
];

/// Arguments of transformers' schedules that have one value here, by the reason; `none` is always accepted.
const FIXED_SCHEDULE_ARGUMENTS: [(&str, &[&str], &str); 5] = [
    ("num_stable_steps", &[], "the rate is stable until the last num_decay_steps steps of the run"),
    ("warmup_type", &["linear"], "a warm-up is a line"),
    ("warmup_lr_rate", &[], "a warm-up starts at 0, and with warmup_stable_decay at the final rate"),
    ("timescale", &[], "that of inverse_sqrt is its warm-up, or 10000 steps without one"),
    ("last_epoch", &["-1"], "a resumed run continues its schedule"),
];

/// The heading of the flags, which marks them among a command's flags.
const HEADING: &str = "TRL and transformers";

/// Defaults of transformers, for a strategy without its number of steps.
const LOGGING_STEPS: &str = "10";
const SAVE_STEPS: &str = "500";

/// Returns the treatment of the flag `name` of `command`.
fn to(command: &str, name: &str) -> Option<To> {
    let row = FLAGS.iter().find(|(_, commands, names)| commands.contains(&command) && names.contains(&name));
    row.map(|(to, ..)| *to)
}

/// Returns whether the flag `name` is in the table for `command`.
pub(super) fn has(command: &str, name: &str) -> bool {
    to(command, name).is_some()
}

/// Adds the flags to a command, hidden from its help. Flags that the command has already are its own.
pub(super) fn with_flags(command: Command) -> Command {
    let own = command.get_name().to_string();
    let is_there = |command: &Command, name: &str| command.get_arguments().any(|arg| is_named(arg, name));
    let names = FLAGS.iter().filter(|(_, commands, _)| commands.contains(&own.as_str())).flat_map(|(.., names)| *names);
    let command = names.fold(command, |command, &name| {
        if is_there(&command, name) {
            return command;
        }
        let arg = Arg::new(name).long(name).hide(true).help("of TRL or transformers").help_heading(HEADING);
        let action = if LISTS.contains(&name) { ArgAction::Append } else { ArgAction::Set };
        command.arg(arg.num_args(0..).allow_negative_numbers(true).action(action))
    });
    ALIASES.iter().fold(command, |command, &(alias, name)| {
        if !is_there(&command, name) || is_there(&command, alias) {
            return command;
        }
        // `mut_arg` would move the flag to the end of the list.
        command.mut_args(|arg| if arg.get_id() == name { arg.alias(alias) } else { arg })
    })
}

/// Describes the names of TRL and transformers that a command accepts beside its own settings, for `rlhf schema`.
pub(super) fn described(command: &Command) -> Vec<Value> {
    let own = command.get_name();
    let added = |name: &str| command.get_arguments().any(|arg| arg.get_id() == name && is_added(arg));
    let rows = FLAGS.iter().filter(|(_, commands, _)| commands.contains(&own));
    let named = rows.flat_map(|(to, _, names)| names.iter().map(move |&name| (to, name)));
    let described = named.filter(|(_, name)| added(name)).map(|(to, name)| {
        let (values, why) = match *to {
            Noted(why) => (None, why),
            Only(values, why) => (Some(values), why),
            Together => (None, ""),
        };
        let aliases = ALIASES.iter().filter(|(_, of)| *of == name).map(|(alias, _)| *alias);
        json!({
            "name": name,
            "aliases": aliases.collect::<Vec<_>>(),
            "list": LISTS.contains(&name),
            "has_effect": !matches!(to, Noted(_)),
            "values": values,
            "help": why,
        })
    });
    described.collect()
}

/// Returns whether [`with_flags`] added the flag.
pub(super) fn is_added(arg: &Arg) -> bool {
    arg.get_help_heading() == Some(HEADING)
}

/// Returns whether the flag, which [`with_flags`] added, is a list in TRL.
#[cfg(test)]
pub(super) fn is_list(arg: &Arg) -> bool {
    LISTS.contains(&arg.get_id().as_str())
}

/// Returns whether the value of the flag is a map, or a list of maps.
pub(super) fn takes_map(arg: &Arg) -> bool {
    [IF_BEST, SCHEDULE, mixture::DATASETS, mixture::OF_OPEN_R1].iter().any(|name| arg.get_id() == name)
}

/// Returns whether `fine` contains `value`, or another word for it where it is true or false.
fn allows(fine: &[&str], value: &str) -> bool {
    let value = match value {
        "no" | "0" if fine.contains(&"false") => "false",
        "yes" | "1" if fine.contains(&"true") => "true",
        value => value,
    };
    fine.contains(&value)
}

/// The flags of a command on the command line, and the file that its settings are from.
pub(super) struct Flags<'a> {
    pub(super) command: &'a Command,
    pub(super) flags: &'a ArgMatches,
    pub(super) path: Option<&'a Path>,
    /// Flags that another table translates.
    pub(super) is_foreign: &'a dyn Fn(&str) -> bool,
}

/// A flag of the table that is set.
struct Given {
    flag: &'static str,
    values: Vec<String>,
    /// Line of the file; 0 if the flag is on the command line.
    line: u64,
}

impl Given {
    /// The value as it is set; `none` if it is empty.
    fn shown(&self) -> String {
        match &self.values[..] {
            [] => "none".to_string(),
            [one] if one.is_empty() || ["{}", "[]", "null"].contains(&one.as_str()) => "none".to_string(),
            several => several.join(" "),
        }
    }

    /// The value as one word in lower case.
    fn word(&self) -> String {
        self.shown().to_ascii_lowercase()
    }
}

/// Removes the flags of the table from the `settings` of the file, and finds those on the command line. Settings that they stand
/// for are appended to `settings`; flags without an effect are noted, and others are refused.
pub(super) fn translate(flags: &Flags<'_>, settings: &mut Vec<Setting>, messages: &mut Messages) {
    let given = flags.given(settings);
    flags.note_or_refuse(&given, messages);
    flags.translate_strategies(&given, settings, &mut messages.refusals);
    flags.translate_use_cpu(&given, settings, &mut messages.refusals);
    flags.check_rewards(settings, &mut messages.refusals);
    flags.translate_completions(&given, settings, &mut messages.refusals);
    flags.translate_best(&given, settings, &mut messages.refusals);
    flags.translate_schedule(&given, settings, &mut messages.refusals);
    flags.translate_datasets(&given, settings, messages);
    flags.translate_prompt_column(&given, settings, &mut messages.refusals);
    flags.note_paged(settings, &mut messages.notes);
    flags.translate_sharding(&given, settings, messages);
}

/// Returns true if `value` of `warmup_steps` is a share of the updates, which transformers 5 allows.
pub(super) fn is_warmup_ratio(value: &str) -> bool {
    value.parse::<f64>().is_ok_and(|share| share > 0.0 && share < 1.0)
}

/// Returns the arguments of `push_to_hub` in a map as JSON, as our settings. The message of an error has no value: one may be a token.
fn push_arguments(text: &str) -> Result<Vec<(&'static str, String)>, String> {
    let expected = "expected a map of arguments, such as {\"repo_id\": \"me/my-model\"}";
    let map: Map<String, Value> = serde_json::from_str(text).map_err(|_| expected.to_string())?;
    let mut settings = Vec::new();
    for (name, value) in &map {
        let setting = PUSH_ARGUMENTS.iter().find(|(argument, _)| argument == name);
        match (setting, value) {
            (Some((_, setting)), Value::String(text)) => settings.push((*setting, text.clone())),
            (Some((_, setting)), Value::Bool(yes)) if name == "private" => settings.push((*setting, yes.to_string())),
            (_, Value::Null) => {}
            (None, _) if OTHER_PUSH_ARGUMENTS.contains(&name.as_str()) => {}
            (Some(_), _) => return Err(format!("`{name}`: expected a text")),
            (None, _) => return Err(format!("`{name}`: expected repo_id, private, revision or token")),
        }
    }
    if settings.iter().any(|(setting, _)| *setting == "hub_model_id") { Ok(settings) } else { Err(expected.into()) }
}

/// Returns the arguments of a schedule in a map as JSON, as our settings.
fn schedule_arguments(text: &str) -> Result<Vec<(&'static str, String)>, String> {
    let map: Map<String, Value> = serde_json::from_str(text).map_err(|_| {
        "arguments of a schedule are a map; expected none or a map such as {\"min_lr_rate\": 0.1}".to_string()
    })?;
    let mut settings = Vec::new();
    for (name, value) in &map {
        let value = match value {
            Value::Null => continue,
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if let Some((_, setting)) = SCHEDULE_ARGUMENTS.iter().find(|(argument, _)| argument == name) {
            settings.push((*setting, value));
            continue;
        }
        match FIXED_SCHEDULE_ARGUMENTS.iter().find(|(argument, ..)| argument == name) {
            Some((_, fine, _)) if fine.contains(&value.as_str()) => {}
            Some((_, fine, why)) => {
                let fine = fine.first().map_or(String::new(), |fine| format!(" or {fine}"));
                return Err(format!("`{name}`: {why}; expected none{fine}"));
            }
            None => {
                let names: Vec<&str> = SCHEDULE_ARGUMENTS.iter().map(|(argument, _)| *argument).collect();
                return Err(format!("`{name}`: no schedule here has it; expected {}", names.join(", ")));
            }
        }
    }
    Ok(settings)
}

fn in_file<'s>(settings: &'s [Setting], key: &str) -> Option<&'s String> {
    settings.iter().find(|setting| setting.key == key).and_then(|setting| setting.values.first())
}

impl Flags<'_> {
    fn on_line(&self, flag: &str) -> bool {
        self.flags.try_contains_id(flag).is_ok() && self.flags.value_source(flag) == Some(ValueSource::CommandLine)
    }

    /// Returns the flags of the table that are set, in the order of the table, and removes them from `settings`.
    fn given(&self, settings: &mut Vec<Setting>) -> Vec<Given> {
        let name = self.command.get_name();
        let added = |flag: &str| self.command.get_arguments().any(|arg| arg.get_id() == flag && is_added(arg));
        let mut given = Vec::new();
        let rows = FLAGS.iter().filter(|(_, commands, _)| commands.contains(&name));
        for &flag in rows.flat_map(|(.., names)| *names).filter(|flag| added(flag) && !(self.is_foreign)(flag)) {
            let place = settings.iter().position(|setting| setting.key == flag);
            let of_file = place.map(|place| settings.remove(place));
            if self.on_line(flag) {
                let values: Vec<String> = self.flags.get_many(flag).into_iter().flatten().cloned().collect();
                let values = if values.is_empty() { vec!["true".to_string()] } else { values };
                given.push(Given { flag, values, line: 0 });
            } else if let Some(Setting { values, line, .. }) = of_file {
                given.push(Given { flag, values, line });
            }
        }
        given
    }

    /// Refuses `given`, with its line of the file.
    fn refuse(&self, given: &Given, message: &str, refusals: &mut Refusals) {
        refusals.refuse(format!("{}{message}", self.place(given)), [given.flag]);
    }

    /// Notes the flags without an effect, by reason, and refuses those whose value is not supported.
    fn note_or_refuse(&self, given: &[Given], messages: &mut Messages) {
        let mut noted: Vec<(&str, Vec<&str>)> = Vec::new();
        for given in given {
            let value = given.shown();
            match to(self.command.get_name(), given.flag) {
                Some(Noted(why)) => match noted.iter_mut().find(|(other, _)| *other == why) {
                    Some((_, names)) => names.push(given.flag),
                    None => noted.push((why, vec![given.flag])),
                },
                Some(Only(fine, why)) if !allows(fine, &value.to_ascii_lowercase()) => {
                    let fine: Vec<&str> = fine.iter().copied().filter(|word| !word.is_empty()).collect();
                    let value: String = value.chars().take(60).collect();
                    let message = format!("{} = {value}: {why}; expected {}", given.flag, fine.join(" or "));
                    self.refuse(given, &message, &mut messages.refusals);
                }
                _ => {}
            }
        }
        if !noted.is_empty() {
            let groups: Vec<String> =
                noted.iter().map(|(why, names)| format!("{} ({why})", names.join(", "))).collect();
            messages.notes.push(format!("without effect here: {}", groups.join("; ")));
        }
    }

    /// Sets `eval_steps` and `save_steps` by `eval_strategy` and `save_strategy`.
    fn translate_strategies(&self, given: &[Given], settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let noted = given.iter().find(|given| given.flag == "logging_steps").map(Given::word);
        let logging_steps = match (noted, self.on_line("logging_steps"), in_file(settings, "logging_steps")) {
            (Some(steps), ..) => steps,
            (None, false, Some(steps)) => steps.clone(),
            _ => flags::text(self.flags, "logging_steps").map_or_else(|| LOGGING_STEPS.to_string(), String::from),
        };
        for (strategy, steps, usual) in
            [("eval_strategy", "eval_steps", logging_steps.as_str()), ("save_strategy", "save_steps", SAVE_STEPS)]
        {
            let Some(given) = given.iter().find(|given| given.flag == strategy) else { continue };
            let is_set = self.on_line(steps) || in_file(settings, steps).is_some();
            let message = match given.word().as_str() {
                "steps" => {
                    if !is_set {
                        settings.retain(|setting| setting.key != steps);
                        settings.push(Setting::new(steps, vec![usual.into()]));
                    }
                    continue;
                }
                // As in transformers, which ignores the number of steps then.
                "no" | "false" | "none" if !self.on_line(steps) => {
                    settings.retain(|setting| setting.key != steps);
                    continue;
                }
                "epoch" if !self.on_line(steps) => {
                    settings.retain(|setting| setting.key != steps);
                    settings.push(Setting::new(steps, vec!["epoch".into()]));
                    continue;
                }
                word @ ("no" | "false" | "none" | "epoch") => {
                    let word = if word == "epoch" { word } else { "no" };
                    format!("{strategy} = {word} and {steps} exclude each other: leave one of them out")
                }
                "best" if strategy == "save_strategy" => {
                    let metric = "metric_for_best_model";
                    if self.on_line(metric) || in_file(settings, metric).is_some() {
                        continue;
                    }
                    format!("save_strategy = best needs {metric}")
                }
                other => format!("{strategy} = {other}: {STRATEGY}"),
            };
            self.refuse(given, &message, refusals);
        }
    }

    /// Sets what `fsdp` and the files of DeepSpeed and accelerate set.
    fn translate_sharding(&self, given: &[Given], settings: &mut Vec<Setting>, messages: &mut Messages) {
        let values: Vec<(&Given, String)> = given.iter().map(|given| (given, given.values.join(" "))).collect();
        let words = |flags: &[&str]| -> Vec<Word<'_>> {
            let trl_name = values.iter().filter(|(given, _)| flags.contains(&given.flag));
            trl_name.map(|(given, value)| Word { flag: given.flag, value, place: self.place(given) }).collect()
        };
        let mut layers = Layers { command: self.command, flags: self.flags, settings, messages };
        layers.translate_files(&words(&["deepspeed", "deepspeed_config", "accelerate_config"]));
        words(&["fsdp"]).iter().for_each(|word| layers.translate_fsdp(word));
    }

    /// Returns the start of an error about `given`: its line of the file.
    fn place(&self, given: &Given) -> String {
        self.placed(given.line)
    }

    /// Returns the start of an error about line `line` of the file.
    fn placed(&self, line: u64) -> String {
        match self.path {
            Some(path) if line > 0 => format!("{}:{line}: ", path.display()),
            _ => String::new(),
        }
    }

    /// Returns true if our flag `name` is set.
    fn is_set(&self, name: &str, settings: &[Setting]) -> bool {
        self.on_line(name) || in_file(settings, name).is_some()
    }

    /// Refuses malformed rewards of the file, with their line.
    fn check_rewards(&self, settings: &[Setting], refusals: &mut Refusals) {
        let given = settings.iter().filter(|setting| setting.key == "reward" && !self.on_line("reward"));
        for Setting { line, values, .. } in given {
            let arg = self.command.get_arguments().find(|arg| arg.get_id() == "reward");
            let written = |value: &String| arg.and_then(|arg| parsed(arg, value)).unwrap_or_else(|| value.clone());
            for error in values.iter().filter_map(|value| check_written(&written(value)).err()) {
                let place = self.placed(*line);
                let name = refusals.renamed("`reward`");
                for refusal in error.refusals() {
                    refusals.refuse(format!("{place}{}{}", name.trim_matches('`'), refusal.reason()), ["reward"]);
                }
            }
        }
    }

    /// Sets `print_answers`, every `logging_steps` updates, by `log_completions`.
    fn translate_completions(&self, given: &[Given], settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let of = |flag: &str| given.iter().find(|given| given.flag == flag);
        let Some(completions) = of("log_completions") else { return };
        match completions.word().as_str() {
            "true" | "1" | "yes" => {}
            "false" | "0" | "no" | "none" => return,
            other => {
                let message = format!("log_completions = {other}: expected true or false");
                return self.refuse(completions, &message, refusals);
            }
        }
        // A share of the run, which TRL allows, is no number of updates.
        let is_number = |steps: &String| steps.trim_end_matches(".0").parse::<usize>().is_ok_and(|steps| steps > 0);
        let every = of("logging_steps").map(Given::word).filter(is_number).unwrap_or(LOGGING_STEPS.to_string());
        for (key, value) in [("print_answers", "true"), ("print_answers_interval", every.as_str())] {
            if !self.is_set(key, settings) {
                settings.push(Setting::new(key, vec![value.into()]));
            }
        }
    }

    /// Sets the push of the best model by `push_to_hub_if_best_kwargs`, every `compare_steps` updates.
    fn translate_best(&self, given: &[Given], settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let of = |flag: &str| given.iter().find(|given| given.flag == flag);
        let Some(best) = of(IF_BEST).filter(|given| given.word() != "none") else { return };
        let arguments = match push_arguments(&best.values.join(" ")) {
            Ok(arguments) => arguments,
            Err(message) => return self.refuse(best, &format!("{IF_BEST}: {message}"), refusals),
        };
        let every = of("compare_steps").map_or("1".to_string(), Given::word);
        let compares = self.is_set("eval_steps", settings) || self.is_set("save_steps", settings);
        let fixed = [("push_to_hub", "true"), ("hub_strategy", "best"), ("metric_for_best_model", "objective/scores")];
        let saves = [("save_steps", every.as_str()), ("save_total_limit", "1")];
        let fixed = fixed.into_iter().chain(saves.into_iter().filter(|_| !compares));
        let fixed = fixed.map(|(key, value)| (key, value.to_string()));
        for (key, value) in arguments.into_iter().chain(fixed) {
            if !self.is_set(key, settings) {
                settings.push(Setting::new(key, vec![value]));
            }
        }
    }

    /// Sets the datasets by a mixture of them.
    fn translate_datasets(&self, given: &[Given], settings: &mut Vec<Setting>, messages: &mut Messages) {
        let Messages { refusals, notes } = messages;
        let is_mixture = |given: &&Given| [mixture::DATASETS, mixture::OF_OPEN_R1].contains(&given.flag);
        for given in given.iter().filter(is_mixture).filter(|given| given.word() != "none") {
            let found = match mixture::settings(&given.values.join(" "), notes) {
                Ok(found) => found,
                Err(message) => {
                    let shown: String = given.shown().chars().take(60).collect();
                    self.refuse(given, &format!("{} = {shown}: {message}", given.flag), refusals);
                    // The dataset is not missing beside it.
                    refusals.about_too("dataset_name");
                    continue;
                }
            };
            for setting in found {
                if self.is_set(&setting.key, settings) {
                    let message = format!("{} and {} both set it: give one of them", given.flag, setting.key);
                    self.refuse(given, &message, refusals);
                } else {
                    settings.push(setting);
                }
            }
        }
    }

    /// Sets the column of the prompts as open-r1 does, whose prompts are messages of the user.
    fn translate_prompt_column(&self, given: &[Given], settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let column = given.iter().find(|given| given.flag == PROMPT_COLUMN && given.word() != "none");
        let Some(given) = column else { return };
        let column = given.shown();
        if column != "prompt" && self.on_line("dataset_columns") {
            let message =
                format!("{PROMPT_COLUMN} and dataset_columns both name columns: write dataset_columns prompt={column}");
            return self.refuse(given, &message, refusals);
        }
        let of_prompt = format!("prompt={column}");
        match settings.iter_mut().find(|setting| setting.key == "dataset_columns") {
            _ if column == "prompt" => {}
            Some(columns) => columns.values.push(of_prompt),
            None => settings.push(Setting::new("dataset_columns", vec![of_prompt])),
        }
        if !self.is_set("apply_chat_template", settings) {
            settings.push(Setting::new("apply_chat_template", vec!["true".into()]));
        }
    }

    /// Sets the settings of the learning-rate schedule by `lr_scheduler_kwargs`.
    fn translate_schedule(&self, given: &[Given], settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let Some(given) = given.iter().find(|given| given.flag == SCHEDULE && given.word() != "none") else { return };
        let arguments = match schedule_arguments(&given.values.join(" ")) {
            Ok(arguments) => arguments,
            Err(message) => {
                let shown: String = given.shown().chars().take(60).collect();
                return self.refuse(given, &format!("{SCHEDULE} = {shown}: {message}"), refusals);
            }
        };
        for (key, value) in arguments {
            let arg = self.command.get_arguments().find(|arg| arg.get_id() == key);
            if let Some(expected) = arg.and_then(|arg| refusal(arg, &value)) {
                let message = format!("{SCHEDULE}: `{key}`: {expected}, found `{value}`");
                self.refuse(given, &message, refusals);
            } else if self.is_set(key, settings) {
                let message = format!("{SCHEDULE} and {key} both set the schedule's {key}: give it once");
                self.refuse(given, &message, refusals);
            } else {
                settings.push(Setting::new(key, vec![value]));
            }
        }
    }

    /// Notes that an optimizer with pages is the one without them: pages only move its state.
    fn note_paged(&self, settings: &[Setting], notes: &mut Vec<String>) {
        let on_line = self.on_line("optim").then(|| self.flags.get_raw("optim")).flatten();
        let on_line = on_line.and_then(|mut words| Some(words.next_back()?.to_string_lossy().into_owned()));
        let name = on_line.or_else(|| in_file(settings, "optim").cloned()).unwrap_or_default();
        if name.starts_with("paged_") {
            let ours = if name.ends_with("8bit") { "adamw_8bit" } else { "adamw_torch" };
            notes.push(format!(
                "optim = {name} is {ours}: its state stays on the GPU, and offload = optimizer moves it to the host"
            ));
        }
    }

    /// Sets `device` by `use_cpu`.
    fn translate_use_cpu(&self, given: &[Given], settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let Some(given) = given.iter().find(|given| given.flag == "use_cpu") else { return };
        let has_device = self.on_line("device") || in_file(settings, "device").is_some();
        match given.word().as_str() {
            "true" | "1" | "yes" if has_device => {
                let message = "use_cpu = true and device exclude each other: give one of them";
                self.refuse(given, message, refusals);
            }
            "true" | "1" | "yes" => settings.push(Setting::new("device", vec!["cpu".into()])),
            "false" | "0" | "no" | "none" => {}
            other => self.refuse(given, &format!("use_cpu = {other}: expected true or false"), refusals),
        }
    }
}

#[cfg(test)]
mod tests {
    use rlhf::settings::{PpoConfig, Preset, StopToken};

    use super::*;
    use crate::cli::Task;
    use crate::cli::commands::rlhf_command;
    use crate::cli::keys::Keys;
    use crate::cli::testing::{least, parse_words, parsed, ppo, ppo_error, with_file};

    #[test]
    fn no_flag_is_in_the_table_twice() {
        for command in TRAIN {
            let mut seen = std::collections::BTreeSet::new();
            for (_, commands, names) in FLAGS {
                for name in names.iter().filter(|_| commands.contains(command)) {
                    assert!(seen.insert(name), "{command}: {name}");
                }
            }
        }
    }

    /// The names of TRL 1.11's configurations and scripts: transformers' arguments, and those of models and datasets; then those of
    /// each trainer.
    const SHARED: &str = "\
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type \
        lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon \
        optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm \
        label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing \
        activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile \
        torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache \
        neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps \
        logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level \
        log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id \
        trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size \
        prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object \
        eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy \
        save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token \
        hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end \
        metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint \
        full_determinism seed data_seed use_cpu accelerator_config parallelism_config dataloader_drop_last \
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers \
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order \
        remove_unused_columns label_names train_sampling_strategy length_column_name \
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend \
        ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict \
        resume_from_checkpoint local_rank model_name_or_path model_revision dtype attn_implementation \
        use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters \
        lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit load_in_4bit \
        bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name dataset_config \
        dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers datasets streaming \
        test_split_size";

    const OF_PPO: &str = "\
        dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size \
        num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty \
        sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size \
        local_mini_batch_size mini_batch_size reward_model_path model_adapter_name ref_adapter_name \
        num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam \
        ds3_gather_for_generation";

    const OF_SFT: &str = "\
        model_init_kwargs router_aux_loss_coef trust_remote_code chat_template_path dataset_text_field \
        dataset_kwargs dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing \
        packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss \
        assistant_only_loss loss_type activation_offloading pad_token";

    const OF_REWARD: &str = "\
        model_init_kwargs trust_remote_code chat_template_path disable_dropout dataset_num_proc eos_token \
        max_length pad_to_multiple_of center_rewards_coefficient activation_offloading pad_token";

    /// Every field of `trl grpo` and `trl rloo`, with its default.
    const GRPO_CONFIG: &str = include_str!("../../../../tests/golden/trl_configs/grpo.yaml");
    const RLOO_CONFIG: &str = include_str!("../../../../tests/golden/trl_configs/rloo.yaml");
    const DPO_CONFIG: &str = include_str!("../../../../tests/golden/trl_configs/dpo.yaml");
    const DISTILLATION_CONFIG: &str = include_str!("../../../../tests/golden/trl_configs/distillation.yaml");

    /// Fields of `GKDConfig` that `DistillationConfig` lacks.
    const OF_GKD: &str = "\
        lmbda seq_kd max_new_tokens chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token max_length \
        truncation_mode packing packing_strategy padding_free eval_packing completion_only_loss assistant_only_loss \
        activation_offloading pad_token";

    fn keys_of(yaml: &str) -> Vec<&str> {
        yaml.lines().filter(|line| !line.starts_with('#')).filter_map(|line| Some(line.split_once(':')?.0)).collect()
    }

    #[test]
    fn every_flag_of_trl_works_or_is_noted_or_is_refused_with_its_reason() {
        let rlhf = rlhf_command();
        let of = |own: &'static str| SHARED.split_whitespace().chain(own.split_whitespace()).collect();
        let (grpo, rloo, dpo) = (keys_of(GRPO_CONFIG), keys_of(RLOO_CONFIG), keys_of(DPO_CONFIG));
        let own = [("ppo", of(OF_PPO)), ("sft", of(OF_SFT)), ("reward", of(OF_REWARD))];
        let distill = [keys_of(DISTILLATION_CONFIG), OF_GKD.split_whitespace().collect()].concat();
        let others = [("grpo", grpo), ("rloo", rloo), ("dpo", dpo), ("distill", distill)];
        let commands = own.into_iter().chain(others);
        for (name, flags) in commands {
            let command = rlhf.find_subcommand(name).unwrap();
            let keys = Keys { top: vec![command], sections: Vec::new() };
            let (mut works, mut foreign) = (0, 0);
            for flag in flags {
                if flag == "reward_funcs" {
                    // Its values are those of `reward`.
                    continue;
                }
                let arg = keys.flag(flag).unwrap_or_else(|| panic!("rlhf {name}: no {flag}"));
                if !is_added(arg) {
                    works += 1;
                    continue;
                }
                foreign += 1;
                let said = |value: &str| parsed(&[&least(name)[..], &[&format!("--{flag}"), value]].concat());
                match said("zzz") {
                    Ok(parsed) => {
                        let [note] = &parsed.notes[..] else { panic!("{flag}: {:?}", parsed.notes) };
                        assert!(note.starts_with(&format!("without effect here: {flag} (")), "{note}");
                        let plain = parse_words(&least(name)).unwrap();
                        assert_eq!(parsed.task, plain, "{flag}");
                    }
                    Err(error) => {
                        assert!(error.starts_with(&format!("{flag} = zzz: ")) && error.lines().count() == 1, "{error}");
                        let fine = error.split(" expected ").nth(1).unwrap().split([' ', ',', ';']).next().unwrap();
                        assert!(said(fine).is_ok(), "{flag} = {fine}");
                    }
                }
            }
            assert!(works > 40 && foreign > 60, "{name}: {works} {foreign}");
        }
    }

    #[test]
    fn documented_lines_of_trls_scripts_run_once_models_and_dataset_are_named() {
        let models = "--sft_model_path policy --reward_model_path judge --dataset_name prompts.jsonl";
        let read = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "\\").collect();
            let found = parsed(&[&["ppo"], &words[..]].concat()).unwrap_or_else(|error| panic!("{line}: {error}"));
            let Task::Ppo(config) = found.task else { panic!() };
            (config, found.notes)
        };
        let (config, notes) = read(&format!(
            "--learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 --output_dir models/minimal/ppo \
             --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --total_episodes 10000 \
             --model_name_or_path EleutherAI/pythia-1b-deduped --non_eos_penalty {models}"
        ));
        assert!(config.non_eos_penalty && notes.is_empty(), "{notes:?}");
        let (config, notes) = read(
            "--output_dir models/minimal/ppo_tldr --learning_rate 3e-6 --per_device_train_batch_size 16 \
             --gradient_accumulation_steps 4 --total_episodes 1000000 --model_name_or_path EleutherAI/pythia-1b-deduped \
             --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
             --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
             --local_rollout_forward_batch_size 16 --non_eos_penalty --stop_token eos --dataset_name trl-lib/tldr",
        );
        assert_eq!((config.plan(1).unwrap().batch_size, config.stop_token), (64, Some(StopToken::Eos)));
        assert!(notes.is_empty(), "{notes:?}");
        let (config, notes) = read(&format!(
            "{models} --dataset_test_split validation --learning_rate 3e-6 --output_dir out --per_device_train_batch_size 1 \
             --gradient_accumulation_steps 64 --total_episodes 30000 --missing_eos_penalty 1.0 --stop_token eos \
             --response_length 53 --eval_strategy steps --eval_steps 100 --logging_steps 10 --save_strategy no \
             --torch_dtype float32 --attn_implementation flash_attention_2 --trust_remote_code False --run_name tldr \
             --report_to none"
        ));
        assert_eq!((config.eval.eval_steps, config.run.checkpoints.save_steps), (Some(100.into()), None));
        assert_eq!(
            notes,
            ["without effect here: logging_steps (each update is logged); \
              attn_implementation (it changes memory and speed only)"]
        );
    }

    #[test]
    fn the_whole_configuration_of_trls_dpo_trainer_is_a_file_of_dpo() {
        let found = with_file(DPO_CONFIG, &least("dpo")).unwrap();
        let (Task::Dpo(mut config), Task::Dpo(plain)) = (found, parse_words(&least("dpo")).unwrap()) else { panic!() };
        // The file has what differs from the defaults here.
        assert_eq!((config.run.checkpoints.save_steps, config.run.gradient_checkpointing), (Some(500.into()), true));
        config.run = plain.run.clone();
        (config.per_device_train_batch_size, config.peft) = (None, plain.peft.clone());
        assert_eq!(config, plain);
        // A setting without an effect is a line of the run; no clipping is written and read back as such.
        let Task::Dpo(config) = parse_words(&[&least("dpo")[..], &["--max_grad_norm", "none"]].concat()).unwrap()
        else {
            panic!()
        };
        assert_eq!(config.optimizer.max_grad_norm, None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.yaml");
        rlhf::settings::write_resolved(&config, &path).unwrap();
        assert_eq!(parse_words(&["dpo", "--config", path.to_str().unwrap()]).unwrap(), Task::Dpo(config));
    }

    #[test]
    fn the_whole_configuration_of_trls_distillation_trainer_is_a_file_of_distill() {
        let found = with_file(DISTILLATION_CONFIG, &least("distill")).unwrap();
        let (Task::Distill(mut config), Task::Distill(plain)) = (found, parse_words(&least("distill")).unwrap()) else {
            panic!()
        };
        // The file has what differs from the defaults here.
        assert_eq!((config.run.checkpoints.save_steps, config.run.gradient_checkpointing), (Some(500.into()), true));
        config.run = plain.run.clone();
        (config.per_device_train_batch_size, config.peft) = (None, plain.peft.clone());
        assert_eq!(config, plain);
    }

    #[test]
    fn the_whole_configuration_of_trl_is_a_file_of_its_command() {
        for (name, text) in [("grpo", GRPO_CONFIG), ("rloo", RLOO_CONFIG)] {
            let Task::Ppo(mut config) = with_file(text, &least(name)).unwrap() else { panic!() };
            let Task::Ppo(mut plain) = parse_words(&least(name)).unwrap() else { panic!() };
            // The file has what differs from the defaults here.
            assert_eq!(
                (config.run.checkpoints.save_steps, config.run.gradient_checkpointing),
                (Some(500.into()), true)
            );
            assert_eq!(config.run.dtype, rlhf::model::Dtype::Float32);
            config.run = plain.run.clone();
            (config.per_device_train_batch_size, plain.per_device_train_batch_size) = (None, None);
            assert_eq!(config, plain, "{name}");
        }
    }

    #[test]
    fn settings_of_trls_grpo_trainer_become_ours() {
        let words = ["grpo", "--dataset_name", "d", "--output_dir", "o"];
        let text = "model_name_or_path: m\nreward_funcs: [json, 'length:9']\nreward_weights: [1.0, 0.5]\nscale_rewards: false\n\
                    steps_per_generation: 4\nmax_steps: 20\nlog_completions: true\nlogging_steps: 5\nuse_vllm: true\n\
                    vllm_mode: colocate\nloss_type: dr_grpo\ngeneration_kwargs: {}\neval_strategy: steps\n";
        let Task::Ppo(config) = with_file(text, &words).unwrap() else { panic!() };
        assert_eq!(
            (&config.rewards.reward[..], &config.rewards.reward_weights[..]),
            (&["json".to_string(), "length:9".into()][..], &["1.0".to_string(), "0.5".into()][..])
        );
        assert_eq!(config.advantage.scale_rewards, rlhf::settings::ScaleRewards::None);
        assert_eq!((config.rollout_log.print_answers, config.rollout_log.print_answers_interval), (true, 5));
        assert_eq!((config.eval.eval_steps, config.plan(100).unwrap().batch_size), (Some(5.into()), 32));
        assert_eq!(config.generation.max_steps, Some(20));
        let funcs =
            [&least("rloo")[..], &["--reward_funcs", "json", "length:9", "--reward_weights", "1", "0.5"]].concat();
        let Task::Ppo(config) = parse_words(&funcs).unwrap() else { panic!() };
        assert_eq!((config.rewards.reward.len(), config.rewards.reward_weights.len()), (2, 2));
        let funcs = [&least("grpo")[..], &["--reward_funcs", "my_lib.rewards.custom", "json"]].concat();
        let Task::Ppo(config) = parse_words(&funcs).unwrap() else { panic!() };
        assert_eq!(config.rewards.reward, ["python:my_lib.rewards.custom", "json"]);
        for (words, message) in [
            (&["--reward_funcs", "rf.py"][..], "reward_funcs = rf.py: a function of Python is written as"),
            (
                &["--reward_funcs", "owner/name"],
                "reward_funcs = owner/name: expected a kind of reward; a model is written as",
            ),
            (&["--reward_funcs", "jsn"], "reward_funcs = jsn: expected one of model"),
            (&["--reward_funcs", "json", "json"], "reward_funcs: `json` is given twice"),
            (&["--reward_funcs", "json", "--reward", "json"], "reward_funcs: `json` is given twice"),
            (&["--beta", "-1"], "beta = -1: expected a number of 0 or more"),
            (
                &["--cast_lm_head_to_fp32"],
                "cast_lm_head_to_fp32 = true: logits have the precision of the run, and their log-probabilities are float32; expected \
                 none or false",
            ),
            (&["--shuffle_dataset", "false"], "shuffle_dataset = false: prompts are drawn in a random order"),
            (&["--generation_batch_size", "10"], "generation_batch_size = 10 responses are not a multiple of the 8"),
            (&["--num_generations", "1"], "num_generations = 1: expected at least 2"),
            (&["--log_completions", "maybe"], "log_completions = maybe: expected true or false"),
        ] {
            let error = parse_words(&[&least("grpo")[..], words].concat()).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn errors_of_a_file_have_its_names() {
        let text = "reward_funcs: 'accuracy_reward,think_format_reward'\nbeta: -1\ntop_k: -1\n";
        let error = with_file(text, &least("grpo")).unwrap_err();
        let expected = [
            "run.yaml:1: reward_funcs = accuracy_reward,think_format_reward: expected one reward, found several: give a list, \
             [accuracy_reward, think_format_reward], or repeat the flag for each",
            "run.yaml:2: beta = -1: expected a number of 0 or more",
        ];
        assert_eq!(error.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn names_of_earlier_versions_of_trl_are_noted_or_refused_as_their_later_ones() {
        let words = "--vllm_device auto --vllm_dtype auto --vllm_max_model_len 512 --vllm_enable_prefix_caching true \
                     --vllm_guided_decoding_regex none --wandb_log_unique_prompts --tf32 true --top_k -1";
        for command in GROUPS {
            let words: Vec<&str> = least(command).into_iter().chain(words.split_whitespace()).collect();
            let found = parsed(&words).unwrap();
            assert_eq!(found.task, parse_words(&least(command)).unwrap(), "-1 is off");
            let [note] = &found.notes[..] else { panic!("{:?}", found.notes) };
            let noted =
                "vllm_device, vllm_dtype, vllm_max_model_len, vllm_enable_prefix_caching (generation is rlhf's own)";
            assert!(note.contains(noted) && note.contains("tf32 (float32 products keep full precision)"), "{note}");
            let error = parse_words(&[&least(command)[..], &["--vllm_guided_decoding_regex", "[a-z]"]].concat());
            let expected = "vllm_guided_decoding_regex = [a-z]: responses are not constrained; expected none";
            assert_eq!(error.unwrap_err(), expected);
        }
    }

    #[test]
    fn warmup_steps_below_1_are_the_warmup_ratio() {
        let of = |config: PpoConfig| (config.optimizer.warmup_steps, config.optimizer.warmup_ratio);
        assert_eq!(of(ppo(&["--warmup_steps", "0.05"])), (0, 0.05));
        assert_eq!(of(ppo(&["--warmup-steps=0.05"])), (0, 0.05));
        assert_eq!(of(ppo(&["--warmup_steps", "5"])), (5, 0.0));
        assert_eq!(of(ppo(&["--warmup_steps", "2.0"])), (2, 0.0));
        for command in ["ppo", "grpo", "rloo"] {
            for text in [
                "warmup_steps: 0.05\n",
                "warmup_ratio: null\nwarmup_steps: 0.05\n",
                "warmup_steps: 5e-2\nwarmup_ratio: 0.0\n",
            ] {
                let Task::Ppo(config) = with_file(text, &least(command)).unwrap() else { panic!() };
                assert_eq!(of(config), (0, 0.05), "{command}: {text}");
            }
        }
        let error = with_file("warmup_steps: 0.05\nwarmup_ratio: 0.1\n", &least("grpo")).unwrap_err();
        assert!(error.contains("`warmup_steps`: expected a whole number"), "{error}");
    }

    #[test]
    fn the_arguments_of_transformers_schedules_become_settings() {
        let text = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1, num_cycles: null}\n";
        let Task::Ppo(config) = with_file(text, &least("grpo")).unwrap() else { panic!() };
        let schedule = &config.optimizer;
        assert_eq!(schedule.lr_scheduler_type, rlhf::settings::LrSchedulerType::CosineWithMinLr);
        assert_eq!((schedule.min_lr_rate, schedule.num_cycles, schedule.lr_end), (Some(0.1), None, None));
        let kwargs = "{\"num_decay_steps\": 20, \"decay_type\": \"1-sqrt\", \"min_lr_ratio\": 0.05, \"warmup_type\": \"linear\"}";
        let words = ["--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs", kwargs];
        let Task::Sft(config) = parse_words(&[&least("sft")[..], &words].concat()).unwrap() else { panic!() };
        let schedule = &config.optimizer;
        assert_eq!((schedule.num_decay_steps, schedule.min_lr_rate), (Some(20), Some(0.05)));
        assert_eq!(schedule.decay_type, rlhf::settings::DecayType::OneMinusSqrt);
        for (text, message) in [
            (
                "lr_scheduler_type: cosine_with_min_lr\n",
                "run.yaml:1: lr_scheduler_type = cosine_with_min_lr needs lr_end or min_lr_rate",
            ),
            (
                "lr_scheduler_kwargs: {num_stable_steps: 5}\n",
                "run.yaml:1: lr_scheduler_kwargs = {\"num_stable_steps\":5}: `num_stable_steps`: the rate is stable until",
            ),
            (
                "lr_scheduler_kwargs: {factor: 0.5}\n",
                "run.yaml:1: lr_scheduler_kwargs = {\"factor\":0.5}: `factor`: no schedule here has it; expected min_lr, lr_end,",
            ),
            (
                "lr_scheduler_kwargs: {num_decay_steps: few}\n",
                "run.yaml:1: lr_scheduler_kwargs: `num_decay_steps`: expected a whole number, 0 or more, found `few`",
            ),
            (
                "lr_end: 1e-7\nlr_scheduler_kwargs: {min_lr: 1.0e-7}\n",
                "run.yaml:2: lr_scheduler_kwargs and lr_end both set the schedule's lr_end: give it once",
            ),
        ] {
            let error = with_file(text, &least("grpo")).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn a_paged_optimizer_is_the_one_without_pages() {
        for (name, optim, ours) in [
            ("paged_adamw_8bit", rlhf::settings::Optim::Adamw8bit, "adamw_8bit"),
            ("paged_adamw_32bit", rlhf::settings::Optim::AdamwTorch, "adamw_torch"),
            ("paged_adamw", rlhf::settings::Optim::AdamwTorch, "adamw_torch"),
        ] {
            let found = parsed(&[&least("sft")[..], &["--optim", name]].concat()).unwrap();
            let Task::Sft(config) = found.task else { panic!() };
            assert_eq!(config.optimizer.optim, optim);
            let [note] = &found.notes[..] else { panic!("{:?}", found.notes) };
            assert!(note.starts_with(&format!("optim = {name} is {ours}: ")), "{note}");
            let Task::Sft(config) = with_file(&format!("optim: {name}\n"), &least("sft")).unwrap() else { panic!() };
            assert_eq!(config.optimizer.optim, optim);
        }
    }

    #[test]
    fn a_share_of_logging_steps_prints_answers_all_the_same() {
        let text = "log_completions: true\nlogging_steps: 0.1\n";
        let Task::Ppo(config) = with_file(text, &least("grpo")).unwrap() else { panic!() };
        assert_eq!((config.rollout_log.print_answers, config.rollout_log.print_answers_interval), (true, 10));
    }

    #[test]
    fn the_push_of_the_best_model_becomes_settings_and_no_error_shows_its_token() {
        let text = "preset: trl-legacy\nmodel_name: m\nreward_model: r\ndataset_name: d\noutput_dir: o\n\
                    push_to_hub_if_best_kwargs: {repo_id: me/x, private: true, token: hf_secret, commit_message: best}\n\
                    compare_steps: 5\n";
        let Task::Ppo(config) = with_file(text, &["ppo"]).unwrap() else { panic!() };
        let (hub, saves) = (&config.run.hub, &config.run.checkpoints);
        assert_eq!(
            (hub.push_to_hub, hub.hub_model_id.as_deref(), hub.hub_private_repo),
            (true, Some("me/x"), Some(true))
        );
        assert_eq!(hub.hub_strategy, rlhf::settings::HubStrategy::Best);
        assert_eq!(hub.hub_token.as_ref().map(|token| token.0.as_str()), Some("hf_secret"));
        assert_eq!(config.eval.metric_for_best_model.as_deref(), Some("objective/scores"));
        assert_eq!((saves.save_steps, saves.save_total_limit), (Some(5.into()), Some(1)));
        for (kwargs, words) in [
            ("{token: hf_secret}", "expected a map of arguments"),
            ("{repo_id: me/x, token: [hf_secret]}", "`token`: expected a text"),
            ("{repo_id: me/x, create_pr: true}", "`create_pr`: expected repo_id, private"),
            ("hf_secret", "expected a map of arguments"),
        ] {
            let text = text.replace("{repo_id: me/x, private: true, token: hf_secret, commit_message: best}", kwargs);
            let error = with_file(&text, &["ppo"]).unwrap_err();
            assert!(error.contains(words) && !error.contains("hf_secret"), "{error}");
        }
    }

    #[test]
    fn strategies_set_their_steps() {
        let steps = |words: &str| {
            let config = ppo(&words.split_whitespace().collect::<Vec<_>>());
            (config.eval.eval_steps, config.run.checkpoints.save_steps)
        };
        assert_eq!(steps("--eval_strategy steps --save_strategy steps"), (Some(10.into()), Some(500.into())));
        assert_eq!(steps("--evaluation_strategy steps --save_steps 7"), (Some(10.into()), Some(7.into())));
        let epoch = Some(rlhf::settings::Interval::Epoch);
        assert_eq!(steps("--eval_strategy epoch --save_strategy epoch"), (epoch, epoch));
        assert_eq!(steps("--eval_steps epoch --save_steps 7"), (epoch, Some(7.into())));
        assert_eq!(steps("--eval_strategy no --save_strategy no"), (None, None));
        assert_eq!(ppo(&["--use_cpu"]).run.device, rlhf::device::Device::Cpu);
        let sft = ["sft", "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"];
        let Task::Sft(config) =
            with_file("eval_strategy: steps\nlogging_steps: 3\nsave_strategy: no\nsave_steps: 500\n", &sft).unwrap()
        else {
            panic!()
        };
        assert_eq!((config.eval.eval_steps, config.run.checkpoints.save_steps), (Some(3.into()), None));
        for (words, message) in [
            ("--eval_strategy epochs", "eval_strategy = epochs: expected steps, epoch or no"),
            ("--eval_strategy epoch --eval_steps 3", "eval_strategy = epoch and eval_steps exclude each other"),
            ("--eval_strategy no --eval_steps 3", "eval_strategy = no and eval_steps exclude each other"),
            ("--save_strategy best", "save_strategy = best needs metric_for_best_model"),
            ("--use_cpu --device cuda", "use_cpu = true and device exclude each other"),
        ] {
            let error = ppo_error(&words.split_whitespace().collect::<Vec<_>>());
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn the_whole_configuration_of_trls_trainer_with_step_is_a_file_for_its_preset() {
        let text = "preset: trl-legacy\noutput_dir: out\nexp_name: ppo\nseed: 0\nlog_with: null\ntask_name: null\nmodel_name: gpt2\n\
                    query_dataset: stanfordnlp/imdb\nreward_model: 'sentiment-analysis:lvwerra/distilbert-imdb'\n\
                    remove_unused_columns: true\ntracker_kwargs: {}\naccelerator_kwargs: {}\nproject_kwargs: {}\n\
                    tracker_project_name: trl\npush_to_hub_if_best_kwargs: {}\nsteps: 20000\nlearning_rate: 1.41e-05\n\
                    adap_kl_ctrl: true\ninit_kl_coef: 0.2\nkl_penalty: kl\ntarget: 6.0\nhorizon: 10000.0\ngamma: 1.0\nlam: 0.95\n\
                    cliprange: 0.2\ncliprange_value: 0.2\nvf_coef: 0.1\nbatch_size: 128\nforward_batch_size: null\n\
                    mini_batch_size: 128\ngradient_accumulation_steps: 1\nworld_size: null\nppo_epochs: 4\nmax_grad_norm: null\n\
                    optimize_cuda_cache: null\noptimize_device_cache: false\nearly_stopping: false\ntarget_kl: 1.0\n\
                    compare_steps: 1\nratio_threshold: 10.0\nuse_score_scaling: false\nuse_score_norm: false\nscore_clip: null\n\
                    whiten_rewards: false\ngradient_checkpointing: false\nis_encoder_decoder: null\nis_peft_model: null\n\
                    backward_batch_size: null\nglobal_backward_batch_size: null\nglobal_batch_size: null\ndataset_num_proc: null\n";
        let Task::Ppo(mut config) = with_file(text, &["ppo"]).unwrap() else { panic!() };
        let expected = PpoConfig::with_preset(
            Preset::TrlLegacy,
            "gpt2",
            "sentiment-analysis:lvwerra/distilbert-imdb",
            "stanfordnlp/imdb",
            "out",
        );
        (config.legacy.batch_size, config.legacy.mini_batch_size, config.loss.target_kl) = (None, None, None);
        assert_eq!(config.run.tracking.project.take().as_deref(), Some("trl"));
        assert_eq!(config, expected);
        // Values that are not supported are all reported at once, each with its line.
        let text = text
            .replace("world_size: null", "world_size: 8")
            .replace("tracker_kwargs: {}", "tracker_kwargs: {wandb: {tags: [a]}}");
        let text =
            text.replace("forward_batch_size: null", "forward_batch_size: 4").replace("gamma: 1.0", "gamma: 2.0");
        let text =
            text.replace("is_encoder_decoder: null", "is_encoder_decoder: true").replace("lam: 0.95", "lam: high");
        let error = with_file(&text, &["ppo"]).unwrap_err();
        let expected = [
            "run.yaml:24: `lam`: expected a number, found `high`",
            "run.yaml:32: world_size = 8: the number of ranks is the launcher's; expected none or 1",
            "run.yaml:29: forward_batch_size = 4: it is mini_batch_size under its older name; expected none",
            "run.yaml:23: gamma = 2: expected a number from 0 to 1",
        ];
        assert_eq!(error.lines().collect::<Vec<_>>(), expected);
    }
}
