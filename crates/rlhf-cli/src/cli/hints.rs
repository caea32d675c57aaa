//! Names of other systems that are no names of `rlhf`: an error about one says what to write instead.
//!
//! Of OpenRLHF both forms are there: that of its releases until 0.9 (`eps_clip`) and the one with a section (`actor.eps_clip`). Names that
//! mean the same here, such as `dual_clip` and `overlong_buffer_len`, are in no table; those that are translated are in `trl.rs` and
//! `deepspeed_chat.rs`.

use clap::Command;

use super::names;

const RANKS: &str = "ranks are those of rlhf launch, and each of them generates by itself";
const COMPLETE: &str = "checkpoints are complete, and the model is in output_dir";
const TRACKERS: &str =
    "metrics are in output_dir, and where report_to names a tracker: wandb, tensorboard, mlflow, trackio";
const ONE_POLICY: &str = "an update trains on what its own policy sampled";
const PASSES: &str = "rows are packed, and max_tokens_per_micro_batch is the size of a pass";

/// Names of OpenRLHF's `train_ppo_ray`, and what to use instead.
const NAMES: &[(&[&str], &str)] = &[
    (&["pretrain", "actor.model_name_or_path"], "sft_model_path; model_name_or_path of rlhf grpo and rlhf rloo"),
    (&["reward_pretrain", "reward.model_name_or_path"], "reward_model_path"),
    (&["critic_pretrain", "critic.model_name_or_path"], "value_model_path"),
    (&["remote_rm_url", "reward.remote_url"], "reward_url, or reward_command for a program"),
    (&["save_path", "ckpt.output_dir"], "output_dir"),
    (&["ckpt_path", "ckpt.path"], "output_dir"),
    (&["prompt_data", "data.prompt_dataset"], "dataset_name"),
    (&["prompt_data_probs", "data.prompt_probs"], "dataset_weights"),
    (&["prompt_split", "data.prompt_split"], "dataset_train_split"),
    (&["eval_dataset", "eval.dataset", "eval_split", "eval.split"], "dataset_test_split, or eval_split_size"),
    (&["input_key", "data.input_key"], "dataset_columns"),
    (&["label_key", "data.label_key"], "a column of the dataset, which the reward names, or reward_label_column"),
    (&["data.apply_chat_template", "input_template", "data.input_template"], "apply_chat_template"),
    (&["max_samples", "data.max_samples"], "total_episodes"),
    (&["max_len", "data.max_len"], "max_prompt_length and response_length"),
    (&["prompt_max_len"], "max_prompt_length"),
    (&["generate_max_len", "rollout.max_new_tokens"], "response_length"),
    (&["rollout.temperature"], "temperature"),
    (&["rollout.top_p"], "top_p"),
    (&["rollout.n_samples_per_prompt"], "num_generations"),
    (
        &["rollout_batch_size", "rollout.batch_size"],
        "generation_batch_size of rlhf grpo and rlhf rloo, which counts responses: that many prompts times num_generations; \
         train_batch_size of rlhf ppo",
    ),
    (&["micro_rollout_batch_size", "rollout.micro_batch_size"], "local_rollout_forward_batch_size"),
    (&["rollout.vllm_generate_batch_size", "vllm_generate_batch_size"], "local_rollout_forward_batch_size"),
    (&["train.batch_size"], "train_batch_size"),
    (&["micro_train_batch_size", "train.micro_batch_size"], "per_device_train_batch_size"),
    (&["num_episodes", "train.num_episodes"], "num_train_epochs"),
    (&["max_epochs", "train.max_epochs"], "num_ppo_epochs"),
    (&["train.seed"], "seed"),
    (&["use_wandb", "logger.wandb.key"], "report_to = wandb; the key is in the environment"),
    (&["wandb_project", "logger.wandb.project"], "project"),
    (&["wandb_run_name", "logger.wandb.run_name"], "run_name"),
    (&["wandb_org", "wandb_group", "logger.wandb.org", "logger.wandb.group"], "tracker_kwargs"),
    (&["use_tensorboard", "logger.tensorboard_dir"], "report_to = tensorboard"),
    (&["eps_clip", "actor.eps_clip"], "cliprange"),
    (&["eps_clip_low_high", "actor.eps_clip_low_high"], "cliprange and cliprange_high"),
    (&["actor.dual_clip"], "dual_clip"),
    (&["value_clip", "critic.value_clip"], "cliprange_value"),
    (&["lambd", "algo.advantage.lambd"], "lam"),
    (&["algo.advantage.gamma"], "gamma"),
    (&["algo.advantage.estimator"], "advantage_estimator; grpo is its group_norm"),
    (&["algo.kl.init_coef"], "kl_coef"),
    (&["use_kl_loss", "algo.kl.use_loss"], "kl_in_loss"),
    (&["algo.kl.estimator"], "kl_estimator; mse is its k2"),
    (&["kl_target", "algo.kl.target"], "adap_kl_ctrl and target"),
    (&["kl_horizon", "algo.kl.horizon"], "horizon, with adap_kl_ctrl"),
    (&["entropy_loss_coef", "actor.entropy_coef"], "entropy_coef"),
    (
        &["policy_loss_type", "actor.policy_loss_type"],
        "importance_sampling_level = sequence for its gspo, and loss_type",
    ),
    (&["reward.clip_range"], "reward_clip_range"),
    (&["normalize_reward", "reward.normalize_enable"], "reward_normalize, or use_score_scaling with use_score_norm"),
    (&["reward.overlong_buffer_len"], "overlong_buffer_len"),
    (&["reward.overlong_penalty_factor"], "overlong_penalty_factor"),
    (
        &["stop_properly_penalty_coef", "reward.stop_properly_penalty_coef"],
        "missing_eos_penalty, or non_eos_penalty, which replaces the score",
    ),
    (
        &["dynamic_filtering", "algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"],
        "dynamic_filtering_reward_range = 0,1, or dynamic_sampling",
    ),
    (&["actor_learning_rate", "actor.adam.lr"], "learning_rate"),
    (&["critic_learning_rate", "critic.adam.lr"], "value_learning_rate"),
    (&["lr_scheduler", "actor.lr_scheduler", "critic.lr_scheduler"], "lr_scheduler_type"),
    (&["min_lr_ratio", "actor.min_lr_ratio", "critic.min_lr_ratio"], "min_lr_rate"),
    (&["lr_warmup_ratio", "actor.lr_warmup_ratio"], "warmup_ratio"),
    (&["critic.lr_warmup_ratio"], "value_lr_warmup_steps"),
    (&["l2", "actor.adam.weight_decay"], "weight_decay"),
    (&["critic.adam.weight_decay"], "value_weight_decay"),
    (&["adam_betas", "actor.adam.betas", "critic.adam.betas"], "adam_beta1 and adam_beta2"),
    (&["actor.adam.eps", "critic.adam.eps"], "adam_epsilon"),
    (&["max_norm", "actor.max_norm"], "max_grad_norm"),
    (&["critic.max_norm"], "value_max_grad_norm"),
    (&["actor.optim", "critic.optim"], "optim"),
    (&["freezing_actor_steps", "critic.freezing_steps"], "value_warmup_updates"),
    (&["train.enable_ema"], "enable_ema"),
    (&["train.ema_beta"], "ema_beta"),
    (&["actor.gradient_checkpointing_enable"], "gradient_checkpointing"),
    (&["ds.zero_stage"], "zero_stage"),
    (&["adam_offload", "ds.adam_offload"], "offload = optimizer"),
    (&["param_dtype", "ds.param_dtype"], "bf16 or fp16"),
    (&["lora_rank", "ds.lora.rank"], "use_peft and lora_r"),
    (&["ds.lora.alpha"], "lora_alpha"),
    (&["ds.lora.dropout"], "lora_dropout"),
    (&["target_modules", "ds.lora.target_modules"], "lora_target_modules"),
    (&["ds.load_in_4bit"], "load_in_4bit"),
    (&["load_checkpoint", "ckpt.load_enable"], "resume_from_checkpoint"),
    (&["ckpt.save_steps"], "save_steps"),
    (&["max_ckpt_num", "ckpt.max_num"], "save_total_limit"),
    (&["best_metric_key", "ckpt.best_metric_key"], "metric_for_best_model"),
    (&["eval.steps"], "eval_steps"),
    (&["agent_func_path", "train.agent_func_path"], "nothing: a response is one turn"),
];

/// Names of OpenRLHF without a counterpart, by the reason for which there is none.
const NONE: &[(&[&str], &str)] = &[
    (
        &[
            "actor_num_nodes",
            "actor_num_gpus_per_node",
            "actor.num_nodes",
            "actor.num_gpus_per_node",
            "actor_init_on_gpu",
            "critic_num_nodes",
            "critic_num_gpus_per_node",
            "critic.num_nodes",
            "critic.num_gpus_per_node",
            "ref_num_nodes",
            "ref_num_gpus_per_node",
            "ref.num_nodes",
            "ref.num_gpus_per_node",
            "reward_num_nodes",
            "reward_num_gpus_per_node",
            "reward.num_nodes",
            "reward.num_gpus_per_node",
            "colocate_all_models",
            "colocate_actor_ref",
            "colocate_critic_reward",
            "train.colocate_all",
            "train.colocate_actor_ref",
            "train.colocate_critic_reward",
            "vllm_num_engines",
            "vllm_tensor_parallel_size",
            "vllm_sync_backend",
            "vllm_sync_with_ray",
            "vllm_enable_sleep",
            "vllm_gpu_memory_utilization",
            "vllm.num_engines",
            "vllm.tensor_parallel_size",
            "vllm.sync_backend",
            "vllm.sync_with_ray",
            "vllm.enable_sleep",
            "vllm.gpu_memory_utilization",
            "vllm.enable_prefix_caching",
            "vllm.enforce_eager",
            "enforce_eager",
            "enable_prefix_caching",
            "deepspeed_enable_sleep",
            "ds.enable_sleep",
        ],
        RANKS,
    ),
    (
        &[
            "save_hf_ckpt",
            "disable_ds_ckpt",
            "max_ckpt_mem",
            "ckpt.save_hf",
            "ckpt.disable_ds",
            "ckpt.max_mem",
            "use_ds_universal_ckpt",
            "universal_ckpt",
            "ds.use_universal_ckpt",
        ],
        COMPLETE,
    ),
    (&["logger.logging_steps"], TRACKERS),
    (
        &[
            "async_train",
            "async_queue_size",
            "partial_rollout",
            "train.async_enable",
            "train.async_queue_size",
            "train.partial_rollout_enable",
            "enable_vllm_is_correction",
            "vllm_is_correction_type",
            "vllm_is_truncated_threshold",
            "use_icepop",
            "algo.advantage.is_correction_enable",
            "algo.advantage.is_correction_threshold",
            "algo.advantage.is_correction_type",
        ],
        ONE_POLICY,
    ),
    (
        &[
            "packing_samples",
            "ds.packing_samples",
            "flash_attn",
            "use_dynamic_batch",
            "train.dynamic_batch_enable",
            "rollout_max_tokens_per_gpu",
            "train_max_tokens_per_gpu",
            "rollout.max_tokens_per_gpu",
            "train.max_tokens_per_gpu",
        ],
        PASSES,
    ),
    (
        &["no_advantage_std_norm", "algo.advantage.no_std_norm"],
        "advantages are whitened, or left as they are by whiten_advantages = none",
    ),
    (
        &[
            "ring_attn_size",
            "ring_head_stride",
            "ds.ring_attn_size",
            "ds.ring_attn_head_stride",
            "ds_tensor_parallel_size",
            "ds.tensor_parallel_size",
            "zpg",
            "ds.zpg",
            "grad_accum_dtype",
            "ds.grad_accum_dtype",
            "overlap_comm",
            "ds.overlap_comm",
            "ds.attn_implementation",
            "ds.deepcompile",
            "ds.experts_implementation",
            "ds.use_liger_kernel",
            "ds.value_head_prefix",
        ],
        "zero_stage is what is shared over ranks",
    ),
];

/// Names, and what to use instead.
type Hint = (&'static [&'static str], &'static str);

/// Names of recipes of open-r1, of LLaMA-Factory and of verl, and what to use instead.
const OF_RECIPES: [(&str, &[Hint]); 3] = [
    (
        "open-r1",
        &[
            (&["accuracy"], "a reward: reward_funcs accuracy_reward"),
            (&["chat_template"], "chat_template_path of rlhf sft, a file"),
            (&["hub_model_revision"], "hub_revision"),
            (&["push_to_hub_revision"], "push_to_hub with hub_revision"),
            (&["overwrite_hub_revision"], "nothing: a push adds a commit to the branch"),
            (&["benchmarks"], "rlhf eval, after the run"),
            (&["callbacks"], "push_to_hub, report_to, on_alarm: each is a setting"),
            (
                &[
                    "cosine_min_value_wrong",
                    "cosine_max_value_wrong",
                    "cosine_min_value_correct",
                    "cosine_max_value_correct",
                    "cosine_max_len",
                ],
                "an argument of the reward: get_cosine_scaled_reward:KEY=VALUE",
            ),
            (
                &["repetition_n_grams", "repetition_max_penalty"],
                "an argument of the reward: get_repetition_penalty_reward:KEY=VALUE",
            ),
            (
                &["max_completion_len", "soft_punish_cache"],
                "an argument of the reward: get_soft_overlong_punishment:KEY=VALUE",
            ),
            (
                &[
                    "code_language",
                    "code_provider",
                    "parallel_code_exec_per_proc",
                    "e2b_router_url",
                    "morph_router_url",
                ],
                "a matter of your own reward, reward_command or python:MODULE.FUNCTION",
            ),
        ],
    ),
    (
        "LLaMA-Factory",
        &[
            (&["stage"], "the command: rlhf sft, rlhf reward or rlhf ppo"),
            (&["finetuning_type"], "use_peft; without it all weights are trained"),
            (&["lora_target"], "lora_target_modules"),
            (&["additional_target"], "lora_modules_to_save"),
            (&["adapter_name_or_path"], "model_name_or_path: the folder of an adapter is a model"),
            (&["dataset", "dataset_dir"], "dataset_name, a file, a folder or a hub name"),
            (&["template"], "nothing: the chat template is the tokenizer's, or chat_template_path of rlhf sft"),
            (
                &["cutoff_len"],
                "max_length of rlhf sft and rlhf reward; elsewhere max_prompt_length and response_length",
            ),
            (&["val_size"], "eval_split_size"),
            (&["train_on_prompt"], "completion_only_loss = false of rlhf sft"),
            (&["neat_packing"], "packing of rlhf sft, whose rows do not see each other"),
            (&["mask_history"], "assistant_only_loss of rlhf sft, for all turns of the assistant"),
            (&["overwrite_cache"], "nothing: data is read anew, by one process"),
            (&["plot_loss"], "nothing: report.html has the curves"),
            (&["quantization_bit"], "load_in_4bit or load_in_8bit"),
            (&["pure_bf16"], "bf16, and optim = adamw_bf16 for bf16 weights"),
            (&["flash_attn", "use_unsloth", "enable_liger_kernel"], "nothing: it changes memory and speed only"),
            (&["ppo_buffer_size"], "train_batch_size"),
            (&["ppo_score_norm"], "use_score_scaling"),
            (&["ppo_target"], "target, with adap_kl_ctrl"),
            (&["ppo_whiten_rewards"], "whiten_rewards"),
            (&["export_dir"], "output_dir of rlhf merge"),
            (&["pissa_init", "pissa_convert"], "nothing: adapters start as LoRA's"),
        ],
    ),
    (
        "verl",
        &[
            (&["data.train_files"], "dataset_name"),
            (&["data.val_files"], "eval_dataset_name"),
            (&["data.prompt_key"], "dataset_columns prompt=COLUMN"),
            (&["data.train_batch_size"], "generation_batch_size of rlhf grpo and rlhf rloo, which counts responses"),
            (&["data.max_prompt_length"], "max_prompt_length"),
            (&["data.max_response_length"], "response_length"),
            (&["actor_rollout_ref.model.path"], "model_name_or_path"),
            (&["critic.model.path"], "value_model_path"),
            (&["reward_model.model.path"], "reward_model_path"),
            (&["actor_rollout_ref.actor.optim.lr"], "learning_rate"),
            (&["actor_rollout_ref.actor.clip_ratio"], "cliprange"),
            (&["actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"], "kl_coef"),
            (
                &["actor_rollout_ref.actor.ppo_mini_batch_size"],
                "per_device_train_batch_size and gradient_accumulation_steps",
            ),
            (&["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"], "per_device_train_batch_size"),
            (&["actor_rollout_ref.actor.ppo_epochs"], "num_ppo_epochs"),
            (&["actor_rollout_ref.rollout.n"], "num_generations"),
            (&["actor_rollout_ref.rollout.temperature"], "temperature"),
            (&["algorithm.adv_estimator"], "the command: rlhf grpo, rlhf rloo or rlhf ppo"),
            (&["trainer.total_epochs"], "num_train_epochs"),
            (&["trainer.save_freq"], "save_steps"),
            (&["trainer.test_freq"], "eval_steps"),
            (&["trainer.default_local_dir"], "output_dir"),
            (&["trainer.logger"], "report_to"),
            (&["trainer.project_name"], "project"),
            (&["trainer.experiment_name"], "run_name"),
        ],
    ),
];

/// Names that TRL and its launcher have, or had, and their place here.
const OF_TRL: [(&[&str], &str); 5] = [
    (&["desirable_weight", "undesirable_weight"], "it is of KTO, which is not here: take TRL for it"),
    (&["rloo_k"], "its name is num_generations"),
    (
        &["wandb_entity", "wandb_run_group"],
        "arguments of a tracker are entries of tracker_kwargs: {\"wandb\": {\"entity\": ..., \"group\": ...}}",
    ),
    (&["env"], "set the variables in the environment of the command"),
    (
        &["num_processes", "num_machines", "machine_rank", "main_process_ip"],
        "rlhf launch starts ranks: rlhf launch --help",
    ),
];

/// Returns what to use instead of another system's flag `name`, for an error message about one of these `commands`: it calls settings as
/// they do.
pub(super) fn hint(name: &str, commands: &[&Command]) -> Option<String> {
    let of_groups = !commands.is_empty() && commands.iter().all(|command| names::has(command.get_name()));
    let hint = of_openrlhf(name).or_else(|| of_recipes(name)).or_else(|| of_trl(name))?;
    Some(if of_groups { names::renamed_in(&hint, name) } else { hint })
}

fn find<'t>(table: &[(&[&str], &'t str)], name: &str) -> Option<&'t str> {
    table.iter().find(|(names, _)| names.contains(&name)).map(|(_, ours)| *ours)
}

fn of_openrlhf(name: &str) -> Option<String> {
    let ours = find(NAMES, name).map(|ours| format!("`{name}` is OpenRLHF's: here it is {ours}"));
    ours.or_else(|| Some(format!("`{name}` is OpenRLHF's, and there is none here: {}", find(NONE, name)?)))
}

fn of_recipes(name: &str) -> Option<String> {
    let (system, ours) = OF_RECIPES.iter().find_map(|(system, table)| Some((system, find(table, name)?)))?;
    Some(format!("`{name}` is {system}'s: here it is {ours}"))
}

fn of_trl(name: &str) -> Option<String> {
    find(&OF_TRL, name).map(String::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::commands::rlhf_command;
    use crate::cli::keys::Keys;
    use crate::cli::testing::{file_error, least, parse_words, ppo_error};

    #[test]
    fn a_name_of_openrlhf_is_refused_with_ours() {
        for (words, expected) in [
            (
                &["--eps_clip", "0.2"][..],
                "unexpected argument '--eps_clip' found; `eps_clip` is OpenRLHF's: here it is cliprange",
            ),
            (
                &["--actor.dual_clip", "3"],
                "unexpected argument '--actor.dual_clip' found; `actor.dual_clip` is OpenRLHF's: here it is",
            ),
            (
                &["--vllm_num_engines", "2"],
                "unexpected argument '--vllm_num_engines' found; `vllm_num_engines` is OpenRLHF's, and there",
            ),
            (
                &["--actor_learning_rate", "1e-6"],
                "actor_learning_rate is a flag of --preset deepspeed-chat only; `actor_learning_rate`",
            ),
        ] {
            let error = ppo_error(words);
            assert!(error.starts_with(expected) && error.lines().count() == 1, "{error}");
        }
        assert!(file_error("lambd: 1\n").ends_with("`lambd` is OpenRLHF's: here it is lam"));
        let words =
            [&least("grpo")[..], &["--n_samples_per_prompt", "4", "--advantage_estimator", "group_norm"]].concat();
        assert!(parse_words(&words).is_ok());
    }

    #[test]
    fn a_name_that_only_begins_like_one_of_openrlhf_is_not_said_to_be_its() {
        for name in ["vllm_dtype", "wandb_entity", "wandb_log_unique_prompts", "ckpt.best", "actor.num_layers"] {
            assert_eq!(of_openrlhf(name), None);
        }
        let error = parse_words(&[&least("grpo")[..], &["--wandb_entity", "team"]].concat()).unwrap_err();
        let expected =
            "unexpected argument '--wandb_entity' found; arguments of a tracker are entries of tracker_kwargs";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn no_name_of_the_table_is_ours_and_what_it_names_is() {
        let rlhf = rlhf_command();
        let keys = Keys { top: vec![rlhf.find_subcommand("ppo").unwrap()], sections: Vec::new() };
        let of_chat = ["actor_learning_rate", "critic_learning_rate"];
        for (names, ours) in NAMES {
            for name in names.iter().filter(|name| !of_chat.contains(name)) {
                assert!(keys.flag(name).is_none(), "{name} is a flag");
            }
            let words = ours.split([' ', ',', ';']).filter(|word| word.contains('_'));
            for word in words.filter(|word| !["dr_grpo", "group_norm"].contains(word)) {
                assert!(keys.flag(word).is_some(), "{word} is no flag");
            }
        }
        let trains = ["sft", "reward", "ppo", "grpo"].map(|name| rlhf.find_subcommand(name).unwrap());
        let keys = Keys { top: trains.to_vec(), sections: Vec::new() };
        for (names, ours) in OF_RECIPES.iter().flat_map(|(_, table)| *table) {
            for name in *names {
                assert!(keys.flag(name).is_none(), "{name} is a flag");
                assert!(find(NAMES, name).is_none(), "{name} is in two tables");
            }
            let words =
                ours.split([' ', ',', ';', ':']).filter(|word| word.contains('_') && word.to_lowercase() == *word);
            for word in
                words.filter(|word| !["accuracy_reward", "adamw_bf16"].contains(word) && !word.starts_with("get_"))
            {
                assert!(keys.flag(word).is_some(), "{word} is no flag");
            }
        }
    }

    #[test]
    fn a_name_of_a_recipe_is_refused_with_the_name_of_the_command() {
        let error = |command: &str, words: &[&str]| parse_words(&[&least(command)[..], words].concat()).unwrap_err();
        for (command, words, expected) in [
            (
                "sft",
                &["--cutoff_len", "5"][..],
                "'--cutoff_len' found; `cutoff_len` is LLaMA-Factory's: here it is max_length of",
            ),
            (
                "grpo",
                &["--val_size", "0.1"],
                "'--val_size' found; `val_size` is LLaMA-Factory's: here it is eval_split_size",
            ),
            ("grpo", &["--eps_clip", "0.1"], "'--eps_clip' found; `eps_clip` is OpenRLHF's: here it is epsilon"),
            (
                "grpo",
                &["--data.max_response_length", "9"],
                "`data.max_response_length` is verl's: here it is max_completion_length",
            ),
            (
                "ppo",
                &["--data.max_response_length", "9"],
                "`data.max_response_length` is verl's: here it is response_length",
            ),
        ] {
            let error = error(command, words);
            assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
        }
        let error = parse_words(&[&least("grpo")[..], &["--reward_funcs", "accuracy", "format"]].concat()).unwrap_err();
        let lines: Vec<&str> = error.lines().collect();
        assert!(lines[0].ends_with("; `accuracy` is open-r1's: here it is accuracy_reward"), "{error}");
        assert!(lines[1].starts_with("reward_funcs = format: ") && lines.len() == 2, "{error}");
    }
}
