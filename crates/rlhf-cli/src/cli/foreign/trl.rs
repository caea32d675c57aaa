//! Flags of TRL and transformers of which several decide together, or whose value is a map.

use rlhf::schema::{Refusals, Setting as _};
use serde_json::{Map, Value};

use super::super::errors::{Messages, refusal};
use super::super::flags;
use super::super::setting::Setting;
use super::line::{ForeignFlag, Line, value};
use super::mixture;
use super::sharding::{Layers, Word};
use super::table::{DATASET_MIXTURE, DATASETS, IF_BEST, PROMPT_COLUMN, SCHEDULE_KWARGS, System, To};

/// Defaults of transformers for the number of steps of a strategy.
const LOGGING_STEPS: &str = "10";
const SAVE_STEPS: &str = "500";

const STRATEGY: &str = "expected steps, epoch or no";

/// Appends the settings that the flags of `line` stand for to `settings`.
pub(super) fn translate(line: &Line<'_>, settings: &mut Vec<Setting>, messages: &mut Messages) {
    line.translate_strategies(settings, &mut messages.refusals);
    line.translate_use_cpu(settings, &mut messages.refusals);
    line.translate_completions(settings, &mut messages.refusals);
    line.translate_best(settings, &mut messages.refusals);
    line.translate_schedule(settings, &mut messages.refusals);
    line.translate_datasets(settings, messages);
    line.translate_prompt_column(settings, &mut messages.refusals);
    line.note_paged(settings, &mut messages.notes);
    line.translate_sharding(settings, messages);
}

/// Returns the arguments in a map as our settings, by the table of `system`. `word` returns a value as the text of a flag, or none if it
/// has a wrong type. Errors do not show values: one may be a token.
fn arguments(
    system: System,
    map: &Map<String, Value>,
    word: impl Fn(&str, &Value) -> Option<String>,
    unknown: impl Fn() -> String,
) -> Result<Vec<(&'static str, String)>, String> {
    let mut settings = Vec::new();
    for (name, value) in map.iter().filter(|(_, value)| !value.is_null()) {
        match (system.find(name), word(name, value)) {
            (Some(To::Is(ours)), Some(value)) => settings.push((ours, value)),
            (Some(To::Ignored(_)), _) => {}
            (Some(To::Only(fine, _)), Some(value)) if fine.contains(&value.as_str()) => {}
            (Some(To::Only(fine, why)), _) => {
                let fine = fine.first().map_or(String::new(), |fine| format!(" or {fine}"));
                return Err(format!("`{name}`: {why}; expected none{fine}"));
            }
            (Some(_), _) => return Err(format!("`{name}`: expected a text")),
            (None, _) => return Err(format!("`{name}`: {}", unknown())),
        }
    }
    Ok(settings)
}

/// Returns the arguments of `push_to_hub` in a map as JSON, as our settings.
fn push_arguments(text: &str) -> Result<Vec<(&'static str, String)>, String> {
    let expected = "expected a map of arguments, such as {\"repo_id\": \"me/my-model\"}";
    let map: Map<String, Value> = serde_json::from_str(text).map_err(|_| expected.to_string())?;
    let word = |name: &str, value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(yes) if name == "private" => Some(yes.to_string()),
        _ => None,
    };
    let settings = arguments(System::PushToHub, &map, word, || "expected repo_id, private, revision or token".into())?;
    if settings.iter().any(|(setting, _)| *setting == "hub_model_id") { Ok(settings) } else { Err(expected.into()) }
}

/// Returns the arguments of a schedule in a map as JSON, as our settings.
fn schedule_arguments(text: &str) -> Result<Vec<(&'static str, String)>, String> {
    let map: Map<String, Value> = serde_json::from_str(text).map_err(|_| {
        "arguments of a schedule are a map; expected none or a map such as {\"min_lr_rate\": 0.1}".to_string()
    })?;
    let word = |_: &str, value: &Value| Some(value.as_str().map_or_else(|| value.to_string(), String::from));
    arguments(System::Schedule, &map, word, || {
        let ours = System::Schedule.names().filter(|(_, to)| matches!(to, To::Is(_)));
        let names: Vec<&str> = ours.map(|(name, _)| name).collect();
        format!("no schedule here has it; expected {}", names.join(", "))
    })
}

impl Line<'_> {
    /// Sets `eval_steps` and `save_steps` by `eval_strategy` and `save_strategy`.
    fn translate_strategies(&self, settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let foreign_value = self.find("logging_steps").map(ForeignFlag::word).filter(|word| word != "none");
        let logging_steps = foreign_value
            .or_else(|| value(self.flags, settings, "logging_steps"))
            .or_else(|| flags::text(self.flags, "logging_steps").map(String::from))
            .unwrap_or_else(|| LOGGING_STEPS.to_string());
        for (strategy, steps, usual) in
            [("eval_strategy", "eval_steps", logging_steps.as_str()), ("save_strategy", "save_steps", SAVE_STEPS)]
        {
            let Some(flag) = self.find(strategy) else { continue };
            let is_set = self.is_set(steps, settings);
            let message = match flag.word().as_str() {
                "steps" if is_set => continue,
                "steps" => {
                    settings.retain(|setting| setting.key != steps);
                    // Our own `logging_steps` is checked by its flag; that of TRL has no effect, and may be a share of the run.
                    if let Some((_, expected)) = self.unaccepted(steps, &[usual.to_string()]) {
                        let message =
                            format!("logging_steps = {usual}, which {strategy} = steps takes as {steps}: {expected}");
                        refusals.say("logging_steps", message);
                    } else {
                        self.set(strategy, Setting::new(steps, vec![usual.into()]), settings, refusals);
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
                    self.set(strategy, Setting::new(steps, vec!["epoch".into()]), settings, refusals);
                    continue;
                }
                word @ ("no" | "false" | "none" | "epoch") => {
                    let word = if word == "epoch" { word } else { "no" };
                    format!("{strategy} = {word} and {steps} exclude each other: leave one of them out")
                }
                "best" if strategy == "save_strategy" => {
                    let metric = "metric_for_best_model";
                    if self.is_set(metric, settings) {
                        continue;
                    }
                    format!("save_strategy = best needs {metric}")
                }
                other => format!("{strategy} = {other}: {STRATEGY}"),
            };
            refusals.say(strategy, message);
        }
    }

    /// Sets what `fsdp` and the files of DeepSpeed and accelerate set.
    fn translate_sharding(&self, settings: &mut Vec<Setting>, messages: &mut Messages) {
        let values: Vec<(&'static str, String)> =
            self.foreign_flags.iter().map(|flag| (flag.name, flag.text())).collect();
        let words = |flags: &[&str]| -> Vec<Word<'_>> {
            let named = values.iter().filter(|(name, _)| flags.contains(name));
            named.map(|(flag, value)| Word { flag, value }).collect()
        };
        let mut layers = Layers { command: self.command, flags: self.flags, settings, messages };
        layers.translate_files(&words(&["deepspeed", "deepspeed_config", "accelerate_config"]));
        words(&["fsdp"]).iter().for_each(|word| layers.translate_fsdp(word));
    }

    /// Sets `print_answers`, every `logging_steps` updates, by `log_completions`.
    fn translate_completions(&self, settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let Some(completions) = self.find("log_completions") else { return };
        match completions.switch() {
            Some(true) => {}
            Some(false) => return,
            None => {
                let message = format!("log_completions = {}: expected true or false", completions.word());
                return refusals.say(completions.name, message);
            }
        }
        // A share of the run, which TRL allows, is no number of updates.
        let is_number = |steps: &String| usize::read(steps).is_some_and(|steps| steps > 0);
        let every =
            self.find("logging_steps").map(ForeignFlag::word).filter(is_number).unwrap_or(LOGGING_STEPS.to_string());
        for (key, value) in [("print_answers", "true"), ("print_answers_interval", every.as_str())] {
            if !self.is_set(key, settings) {
                self.set(completions.name, Setting::new(key, vec![value.into()]), settings, refusals);
            }
        }
    }

    /// Sets the push of the best model by `push_to_hub_if_best_kwargs`, every `compare_steps` updates.
    fn translate_best(&self, settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let Some(best) = self.find(IF_BEST).filter(|flag| flag.word() != "none") else { return };
        let arguments = match push_arguments(&best.text()) {
            Ok(arguments) => arguments,
            Err(message) => return refusals.say(IF_BEST, format!("{IF_BEST}: {message}")),
        };
        for (key, value) in arguments {
            if self.is_set(key, settings) {
                continue;
            }
            let values = vec![value];
            if let Some((_, expected)) = self.unaccepted(key, &values) {
                // Without the value, which may be a token.
                refusals.say(IF_BEST, format!("{IF_BEST}: `{key}`: {expected}"));
                refusals.about_too(key);
            } else {
                self.set(IF_BEST, Setting::new(key, values), settings, refusals);
            }
        }
        let compares = self.is_set("eval_steps", settings) || self.is_set("save_steps", settings);
        let compared = self.find("compare_steps").filter(|flag| flag.word() != "none");
        let (name, every) = compared.map_or((IF_BEST, "1".to_string()), |flag| ("compare_steps", flag.word()));
        let fixed = [("push_to_hub", "true"), ("hub_strategy", "best"), ("metric_for_best_model", "objective/scores")];
        let fixed = fixed.map(|(key, value)| (IF_BEST, key, value));
        let saves = [(name, "save_steps", every.as_str()), (IF_BEST, "save_total_limit", "1")];
        for (name, key, value) in fixed.into_iter().chain(saves.into_iter().filter(|_| !compares)) {
            if !self.is_set(key, settings) {
                self.set(name, Setting::new(key, vec![value.into()]), settings, refusals);
            }
        }
    }

    /// Sets the datasets by a mixture of them.
    fn translate_datasets(&self, settings: &mut Vec<Setting>, messages: &mut Messages) {
        let Messages { refusals, notes } = messages;
        let mixtures = self.foreign_flags.iter().filter(|flag| [DATASETS, DATASET_MIXTURE].contains(&flag.name));
        for flag in mixtures.filter(|flag| flag.word() != "none") {
            let name = flag.name;
            let mixture = match mixture::settings(&flag.text(), notes) {
                Ok(mixture) => mixture,
                Err(message) => {
                    refusals.say(name, format!("{name} = {}: {message}", flag.start()));
                    // The dataset is not reported as missing too.
                    refusals.about_too("dataset_name");
                    continue;
                }
            };
            for setting in mixture {
                if self.is_set(&setting.key, settings) {
                    refusals.say(name, format!("{name} and {} both set it: give one of them", setting.key));
                } else {
                    self.set(name, setting, settings, refusals);
                }
            }
        }
    }

    /// Sets the column of the prompts. As in open-r1, prompts are then messages of the user.
    fn translate_prompt_column(&self, settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let Some(flag) = self.find(PROMPT_COLUMN).filter(|flag| flag.word() != "none") else { return };
        let column = flag.shown();
        if column != "prompt" && self.on_line("dataset_columns") {
            let message =
                format!("{PROMPT_COLUMN} and dataset_columns both name columns: write dataset_columns prompt={column}");
            return refusals.say(PROMPT_COLUMN, message);
        }
        let prompt_column = format!("prompt={column}");
        match settings.iter_mut().find(|setting| setting.key == "dataset_columns") {
            _ if column == "prompt" => {}
            Some(columns) => columns.values.push(prompt_column),
            None => self.set(PROMPT_COLUMN, Setting::new("dataset_columns", vec![prompt_column]), settings, refusals),
        }
        if !self.is_set("apply_chat_template", settings) {
            self.set(PROMPT_COLUMN, Setting::new("apply_chat_template", vec!["true".into()]), settings, refusals);
        }
    }

    /// Sets the settings of the learning-rate schedule by `lr_scheduler_kwargs`.
    fn translate_schedule(&self, settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let Some(flag) = self.find(SCHEDULE_KWARGS).filter(|flag| flag.word() != "none") else { return };
        let name = flag.name;
        let arguments = match schedule_arguments(&flag.text()) {
            Ok(arguments) => arguments,
            Err(message) => return refusals.say(name, format!("{name} = {}: {message}", flag.start())),
        };
        for (key, value) in arguments {
            let arg = self.command.get_arguments().find(|arg| arg.get_id() == key);
            if let Some(expected) = arg.and_then(|arg| refusal(arg, &value)) {
                refusals.say(name, format!("{name}: `{key}`: {expected}, found `{value}`"));
            } else if self.is_set(key, settings) {
                refusals.say(name, format!("{name} and {key} both set the schedule's {key}: give it once"));
            } else {
                self.set(name, Setting::new(key, vec![value]), settings, refusals);
            }
        }
    }

    /// Notes that a paged optimizer is the optimizer without pages: pages only move its state.
    fn note_paged(&self, settings: &[Setting], notes: &mut Vec<String>) {
        let name = value(self.flags, settings, "optim").unwrap_or_default();
        if name.starts_with("paged_") {
            let ours = if name.ends_with("8bit") { "adamw_8bit" } else { "adamw_torch" };
            notes.push(format!(
                "optim = {name} is {ours}: its state stays on the GPU, and offload = optimizer moves it to the host"
            ));
        }
    }

    /// Sets `device` by `use_cpu`.
    fn translate_use_cpu(&self, settings: &mut Vec<Setting>, refusals: &mut Refusals) {
        let Some(flag) = self.find("use_cpu") else { return };
        let has_device = self.is_set("device", settings);
        match flag.switch() {
            Some(true) if has_device => {
                refusals.say(flag.name, "use_cpu = true and device exclude each other: give one of them");
            }
            Some(true) => self.set(flag.name, Setting::new("device", vec!["cpu".into()]), settings, refusals),
            Some(false) => {}
            None => refusals.say(flag.name, format!("use_cpu = {}: expected true or false", flag.word())),
        }
    }
}

#[cfg(test)]
mod tests {
    use rlhf::settings::{PpoConfig, Preset, StopToken};

    use crate::cli::Task;
    use crate::cli::commands::rlhf_command;
    use crate::cli::foreign::is_added;
    use crate::cli::keys::Keys;
    use crate::cli::testing::{least, parse_words, parsed, ppo, ppo_error, with_file};

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
    const GRPO_CONFIG: &str = include_str!("../../../../../tests/golden/trl_configs/grpo.yaml");
    const RLOO_CONFIG: &str = include_str!("../../../../../tests/golden/trl_configs/rloo.yaml");
    const DPO_CONFIG: &str = include_str!("../../../../../tests/golden/trl_configs/dpo.yaml");
    const DISTILLATION_CONFIG: &str = include_str!("../../../../../tests/golden/trl_configs/distillation.yaml");

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
        let with_shared = |more: &'static str| SHARED.split_whitespace().chain(more.split_whitespace()).collect();
        let (grpo, rloo, dpo) = (keys_of(GRPO_CONFIG), keys_of(RLOO_CONFIG), keys_of(DPO_CONFIG));
        let listed = [("ppo", with_shared(OF_PPO)), ("sft", with_shared(OF_SFT)), ("reward", with_shared(OF_REWARD))];
        let distill = [keys_of(DISTILLATION_CONFIG), OF_GKD.split_whitespace().collect()].concat();
        let others = [("grpo", grpo), ("rloo", rloo), ("dpo", dpo), ("distill", distill)];
        let commands = listed.into_iter().chain(others);
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
            "run.yaml:2: beta = -1: expected a number of 0 or more",
            "run.yaml:1: reward_funcs = accuracy_reward,think_format_reward: expected one reward, found several: give a list, \
             [accuracy_reward, think_format_reward], or repeat the flag for each",
        ];
        assert_eq!(error.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn names_of_earlier_versions_of_trl_are_noted_or_refused_as_their_later_ones() {
        let words = "--vllm_device auto --vllm_dtype auto --vllm_max_model_len 512 --vllm_enable_prefix_caching true \
                     --vllm_guided_decoding_regex none --wandb_log_unique_prompts --tf32 true --top_k -1";
        for command in ["grpo", "rloo"] {
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
        let warmup = |config: PpoConfig| (config.optimizer.warmup_steps, config.optimizer.warmup_ratio);
        assert_eq!(warmup(ppo(&["--warmup_steps", "0.05"])), (0, 0.05));
        assert_eq!(warmup(ppo(&["--warmup-steps=0.05"])), (0, 0.05));
        assert_eq!(warmup(ppo(&["--warmup_steps", "5"])), (5, 0.0));
        assert_eq!(warmup(ppo(&["--warmup_steps", "2.0"])), (2, 0.0));
        for command in ["ppo", "grpo", "rloo"] {
            for text in [
                "warmup_steps: 0.05\n",
                "warmup_ratio: null\nwarmup_steps: 0.05\n",
                "warmup_steps: 5e-2\nwarmup_ratio: 0.0\n",
            ] {
                let Task::Ppo(config) = with_file(text, &least(command)).unwrap() else { panic!() };
                assert_eq!(warmup(config), (0, 0.05), "{command}: {text}");
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
    fn a_malformed_value_of_a_name_of_trl_has_its_name_and_its_line() {
        let error = with_file("eval_strategy: steps\nlogging_steps: 0.1\n", &least("grpo")).unwrap_err();
        let expected = "run.yaml:2: logging_steps = 0.1, which eval_strategy = steps takes as eval_steps: expected a whole number of \
                        updates, or epoch";
        assert_eq!(error, expected);
        let error = ppo_error(&["--eval_strategy", "steps", "--logging_steps", "0.1"]);
        assert!(error.starts_with("logging_steps = 0.1, which eval_strategy = steps takes as eval_steps: "), "{error}");
        let text = "preset: trl-legacy\nmodel_name: m\nreward_model: r\ndataset_name: d\noutput_dir: o\n\
                    push_to_hub_if_best_kwargs: {repo_id: me/x}\ncompare_steps: often\n";
        let error = with_file(text, &["ppo"]).unwrap_err();
        let expected = "run.yaml:7: compare_steps = often: expected a whole number of updates, or epoch";
        assert!(error.lines().any(|line| line == expected), "{error}");
        assert!(!error.contains("invalid value"), "{error}");
    }

    #[test]
    fn without_a_value_logging_steps_is_ten_for_the_evaluations() {
        let Task::Ppo(config) = with_file("eval_strategy: steps\nlogging_steps: null\n", &least("grpo")).unwrap()
        else {
            panic!()
        };
        assert_eq!(config.eval.eval_steps, Some(10.into()));
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
            ("{repo_id: me/x, token: ' '}", "`hub_token`: expected an access token of the hub"),
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
