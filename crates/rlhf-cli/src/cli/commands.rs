//! The commands of `rlhf`: their flags, descriptions and examples.

use std::sync::LazyLock;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, Command};
use rlhf::settings::{
    ChatConfig, CompletionsConfig, ConvertConfig, DistillConfig, DoctorConfig, DpoConfig, EvaluateConfig,
    GenerateConfig, LaunchFlags, LogprobsConfig, MergeConfig, PipelineFlags, PlanFlags, PpoConfig, Preset, PushConfig,
    ReportConfig, RewardConfig, SchemaConfig, ScoreConfig, ServeConfig, SessionConfig, SftConfig, WatchConfig,
};

use super::launch::LAUNCH;
use super::plan::PLAN;
use super::replay::{self, REPLAY};
use super::{flags, foreign, groups, help, implied};

/// The command that runs the others as stages: it needs a configuration file.
pub(super) const PIPELINE: &str = "pipeline";

/// The argument of `merge` that is its model.
pub(super) const FOLDER: &str = "folder";

const EXAMPLES: &str = "\
Models are Hugging Face folders; data is JSONL, JSON, CSV or Parquet:
  rlhf sft --model_name_or_path pythia-160m --dataset_name demos.jsonl --output_dir runs/sft
  rlhf reward --model_name_or_path runs/sft --dataset_name pairs.jsonl --output_dir runs/reward
  rlhf ppo --sft_model_path runs/sft --reward_model_path runs/reward \\
      --dataset_name prompts.jsonl --output_dir runs/ppo --stop_token eos
Runs write their settings to config.yaml for --config; `rlhf COMMAND --help` explains the flags.";

const SFT_HELP: &str = "\
Example:
  rlhf sft --model_name_or_path pythia-160m --dataset_name demos.jsonl --output_dir runs/sft";

const REWARD_HELP: &str = "\
Example:
  rlhf reward --model_name_or_path runs/sft --dataset_name pairs.jsonl --output_dir runs/reward";

const DISTILL_HELP: &str = "\
Names and defaults are those of TRL's DistillationTrainer; `lmbda` and `seq_kd` are those of its
GKDTrainer. A file of either configuration is a --config. Rows have a prompt, as for rlhf grpo; with
--lmbda below 1 also the response, as for rlhf sft.

Example:
  rlhf distill --model_name_or_path student --teacher_model_name_or_path teacher \\
    --dataset_name prompts.jsonl --output_dir runs/distill";

const DPO_HELP: &str = "\
Names and defaults are those of TRL's DPOTrainer, and a file of its DPOConfig is a --config. Rows
have `prompt`, `chosen` and `rejected`, texts or messages; without `prompt` the two begin with it.

Example:
  rlhf dpo --model_name_or_path runs/sft --dataset_name pairs.jsonl --output_dir runs/dpo";

const PPO_HELP: &str = "\
Example:
  rlhf ppo --sft_model_path runs/sft --reward_model_path runs/reward \\
      --dataset_name prompts.jsonl --output_dir runs/ppo --stop_token eos";

const GRPO_HELP: &str = "\
Names and defaults are those of TRL's GRPOTrainer, and a file of its GRPOConfig is a --config. The
names of `rlhf ppo` are accepted too.

Example:
  rlhf grpo --model_name_or_path runs/sft --reward_funcs accuracy_reward \\
      --dataset_name problems.jsonl --output_dir runs/grpo --max_completion_length 256";

const RLOO_HELP: &str = "\
Names and defaults are those of TRL's RLOOTrainer, and a file of its RLOOConfig is a --config. The
names of `rlhf ppo` are accepted too.

Example:
  rlhf rloo --model_name_or_path runs/sft --reward_model_name_or_path runs/reward \\
      --dataset_name prompts.jsonl --output_dir runs/rloo --max_completion_length 64";

const PIPELINE_HELP: &str = "\
The file has a section for each stage, with the settings of its command by the names of their flags;
settings of all stages are above the sections. The reward model starts from the SFT model, PPO from
both. One dataset for all stages, with `prompt`, `chosen` and `rejected`, is split 2,4,4.
Everything is checked before the first stage starts.

  model_name_or_path: pythia-160m
  dataset_name: comparisons.jsonl
  output_dir: runs/all
  sft: {num_train_epochs: 1}
  reward: {num_train_epochs: 1}
  ppo: {total_episodes: 4096, stop_token: eos, missing_eos_penalty: 1.0}

Example:
  rlhf pipeline --config pipeline.yaml --resume_from_checkpoint";

const GENERATE_HELP: &str = "\
Rows have `prompt` or `prompt_ids`; JSON lines get `completion`, `completion_ids` and `logprobs`.

Examples:
  rlhf generate --model_name_or_path runs/ppo \"The film was\"
  rlhf generate --model_name_or_path runs/ppo --dataset_name prompts.jsonl --do_sample false";

const LOGPROBS_HELP: &str = "\
Rows have `prompt` and `completion`, or `prompt_ids` and `completion_ids`; each is written with
`completion_ids`, `logprobs` (one per token of the response) and `sum_logprobs`. No eos is added.

Example:
  rlhf logprobs --model_name_or_path runs/ppo --dataset_name responses.jsonl";

const SCORE_HELP: &str = "\
Rows have `text`, or `prompt` and `completion`, or token ids: `input_ids`, or `prompt_ids` and
`completion_ids`; each is written with its `score`. No eos is added. Preference pairs, `chosen` and
`rejected`, get `score_chosen`, `score_rejected` and `score_margin`, and the accuracy and mean
margin are printed at the end; sample files of a run can be read too. Rewards other than one model
score a response to its prompt, and `components` has the score of each reward.

Examples:
  rlhf generate --model runs/ppo --dataset_name prompts.jsonl | rlhf score --model runs/reward
  rlhf score --tokenizer_name runs/sft --reward length:target=40 --reward_command ./reward.py \\
      --dataset_name responses.jsonl";

const EVAL_HELP: &str = "\
Responses to held-out prompts are scored by rewards, as in ppo, or compared with those of another
model, or with a column, by a program or a model behind an HTTP endpoint, in both orders. The folder
gets responses.jsonl, results.jsonl (a row for each response or pair) and summary.json; the same
command continues an evaluation that was cut. Without sampling flags each model is sampled as its
own generation_config.json says.

Examples:
  rlhf eval --model runs/ppo --compare runs/sft --reward_model_path runs/reward \\
      --dataset_name prompts.jsonl --output_dir runs/eval --max_new_tokens 64 --temperature 0.7
  rlhf eval --model runs/ppo --compare_column completion --judge_url http://localhost:8000/v1 \\
      --judge_model judge --dataset_name prompts.jsonl --output_dir runs/eval
  rlhf eval --model runs/ppo --reward accuracy_reward --num_return_sequences 8 \\
      --dataset_name problems.jsonl --output_dir runs/eval";

const MERGE_HELP: &str = "\
Example:
  rlhf merge runs/ppo --output_dir merged";

const CONVERT_HELP: &str = "\
config.json is made from the file's metadata, weights are dequantized, and the tokenizer is made
from the vocabulary where its rules are known; else a note names the files to copy. Of a split
model, give the first part. With --output_file the other way: a GGUF file is made of a model's
folder, with its tokenizer and chat template.

Examples:
  rlhf convert SmolLM2-135M-Instruct-Q8_0.gguf models/smollm2 --dtype bfloat16
  rlhf convert runs/grpo --output_file policy.gguf --outtype q8_0";

const PUSH_HELP: &str = "\
The model, its tokenizer, card and configuration, in one commit; of a run also config.yaml and
metrics.jsonl. Any other file is left out and listed; --include adds it. HF_TOKEN has an access
token with write access. Large files that the hub has already are not sent again, so the same
command continues an upload that was cut.

Example:
  rlhf push runs/ppo me/my-model --private
  rlhf push runs/ppo me/my-model --include eval.json \"onnx/*\"";

const REPORT_HELP: &str = "\
One page of HTML that needs no network: a verdict in words, curves, samples, settings, warnings. Of
several runs the curves are drawn over one another, with the settings that differ. Each run writes
its own report at its end; while it is in progress, this command does.

Examples:
  rlhf report runs/ppo
  rlhf report runs/a runs/b runs/c --output compared.html";

const WATCH_HELP: &str = "\
The page of `rlhf report`, live: its address is printed, and new updates, samples and alarms appear
on the open page. Only this machine can open it. It reads the run's folder and changes nothing, so
the run may be in progress, or have ended. In the terminal: arrows move, q quits.

Examples:
  rlhf watch runs/ppo
  rlhf watch --terminal runs/ppo";

const REPLAY_HELP: &str = "\
From the file of --log_rollouts and the checkpoint before the update. Without further flags the
result is compared with the run, bit by bit. Flags of `rlhf ppo` that act after sampling and scoring
(--learning_rate, --cliprange, --kl_coef, --advantage_estimator, ...) change the update, and a table
shows its metrics beside the run's. update.safetensors has every number: log-probabilities, values,
rewards, advantages, losses of each micro-batch, gradient norms of each parameter. No reward is
computed, and the run's folder is only read.

Examples:
  rlhf replay runs/ppo --update 3
  rlhf replay runs/ppo --update 3 --learning_rate 1e-6 --output_dir runs/slower
  rlhf launch --nproc_per_node 2 replay runs/ppo --update 3   # of a run of two ranks";

const CHAT_HELP: &str = "\
Responses appear as they are generated, with the model's chat template; without one the model
continues the text. /help lists the commands. Ctrl-C stops a response; between responses it quits.
Lines of a pipe are messages too. Tools and environments run with your rights: the model decides
with which arguments they are called.

Examples:
  rlhf chat runs/ppo
  rlhf chat runs/ppo --compare runs/sft --temperature 0.7
  rlhf chat runs/grpo --tools my_tools.multiply
  echo \"Name three colours.\" | rlhf chat runs/ppo";

const SERVE_HELP: &str = "\
The pages /v1/completions and /v1/chat/completions of OpenAI's interface, also as streams and with
tools, for evaluation harnesses, agents and other clients; /v1/models and /health. Ctrl-C stops it.

Example:
  rlhf serve runs/ppo --port 8000
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{\"model\": \"ppo\", \"prompt\": \"The film was\", \"max_tokens\": 20}'";

const SESSION_HELP: &str = "\
For loops of your own, TRL's step() and DeepSpeed-Chat's engine, from any language. Requests are
lines of JSON, and large arrays frames of bytes: docs/internals/session.md. The Python modules
rlhf.legacy and rlhf.dschat start it. It ends with its client.

Examples:
  rlhf session --socket /tmp/rlhf.sock
  echo '{\"id\": 1, \"method\": \"hello\", \"params\": {\"protocol\": 1}}' | rlhf session";

const LAUNCH_HELP: &str = "\
The flags of launch come before the command, one that trains or reads rows. Rank 0 has the
terminal; lines of the other ranks start with their number. A rank that fails ends the
others, and is named. torchrun --no-python and srun start ranks too: docs/guides/ranks.md.

Examples:
  rlhf launch --nproc_per_node 4 --max_restarts 2 ppo --config ppo.yaml
  rlhf launch --nnodes 2 --node_rank 0 --master_addr node0 --nproc_per_node 8 sft --config sft.yaml";

const DOCTOR_HELP: &str = "\
A line for each check: ok, warning or failure, what is wrong and what to do. Checked are libtorch,
instructions, threads, memory, disks, GPU, the hub and its token (never printed), and Python.
Then a tiny model is trained for a few seconds. Exit code 1 if a check fails.

Examples:
  rlhf doctor
  rlhf doctor --json --offline > doctor.json";

const SCHEMA_HELP: &str = "\
Each command with its settings: name, type, default, help, choices, and the defaults of presets. For
programs that make an interface of it.

Examples:
  rlhf schema > schema.json
  rlhf schema grpo sft";

const COMPLETIONS_HELP: &str = "\
The shell then completes commands and flags after `rlhf`.

Examples:
  source <(rlhf completions bash)                                       # in ~/.bashrc
  rlhf completions zsh > \"${fpath[1]}/_rlhf\"
  rlhf completions fish > ~/.config/fish/completions/rlhf.fish";

const PLAN_HELP: &str = "\
The flags of plan come before the command, a training command or `generate`, whose own flags and
file follow. Nothing is loaded: sizes come from config.json, lengths from the data, and rates from
measuring this machine for two seconds.

Examples:
  rlhf plan ppo --config ppo.yaml
  rlhf plan --memory 24GB --nproc_per_node 2 sft --config sft.yaml --zero_stage 3";

/// Returns the whole command line of `rlhf`.
pub(super) fn rlhf_command() -> &'static Command {
    static RLHF: LazyLock<Command> = LazyLock::new(build_command);
    &RLHF
}

fn build_command() -> Command {
    let file = Arg::new("config")
        .long("config")
        .value_name("FILE")
        .value_parser(ValueParser::path_buf())
        .help("YAML file of settings, by the names of their flags; a flag wins over the file");
    // clap's long help would take a paragraph per flag; the module `help` makes both forms from the short one.
    let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort);
    let help = help.help("Print help: -h the most used flags, --help all flags");
    Command::new("rlhf")
        .version(env!("CARGO_PKG_VERSION"))
        .about("RLHF with PPO for language models: supervised fine-tuning, a reward model, then PPO.")
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .subcommands(training_commands())
        .subcommands(other_commands())
        .mut_subcommands(|command| command.disable_help_flag(true).arg(help.clone()))
        .mut_subcommands(|command| match command.get_name() {
            LAUNCH | PLAN | REPLAY => command,
            _ => command.arg(file.clone()),
        })
        .mut_subcommand(PIPELINE, |command| command.mut_arg("config", |file| file.required(true)))
        .mut_subcommands(|command| {
            if implied::TRAIN.contains(&command.get_name()) {
                command.mut_args(|arg| match arg.get_id().as_str() {
                    "output_dir" => arg.required(false).default_value(implied::OUTPUT_DIR),
                    _ => arg,
                })
            } else {
                command
            }
        })
        .mut_subcommands(help::arranged)
}

/// Returns the commands that train.
fn training_commands() -> [Command; 7] {
    [
        foreign::with_flags(flags::command::<SftConfig>("sft"))
            .about("Fine-tune a language model on texts or demonstrations")
            .after_help(SFT_HELP),
        foreign::with_flags(flags::command::<RewardConfig>("reward"))
            .about("Train a reward model on preference pairs")
            .after_help(REWARD_HELP),
        foreign::with_flags(dpo_command())
            .about("Train a language model by DPO, on preference pairs")
            .after_help(DPO_HELP),
        foreign::with_flags(distill_command())
            .about("Train a language model by distillation from a teacher")
            .after_help(DISTILL_HELP),
        foreign::with_flags(flags::command::<PpoConfig>("ppo"))
            .about("Train a language model with PPO against a reward")
            .after_help(PPO_HELP),
        foreign::with_flags(groups::command(Preset::Grpo))
            .about("Train a language model with GRPO, on groups of responses")
            .after_help(GRPO_HELP),
        foreign::with_flags(groups::command(Preset::Rloo))
            .about("Train a language model with RLOO, on groups of responses")
            .after_help(RLOO_HELP),
    ]
}

/// Returns `dpo`, with its own defaults for settings that other commands have too.
fn dpo_command() -> Command {
    let help =
        "Dataset of texts for a language-modelling loss beside that of the pairs: a file, a folder or a hub name";
    let texts = |arg: Arg| if arg.get_id() == "unsupervised_dataset_name" { arg.help(help) } else { arg };
    with_command_defaults(flags::command::<DpoConfig>("dpo"), DpoConfig::own_defaults()).mut_args(texts)
}

/// Returns `distill`, as [`dpo_command`] returns `dpo`.
fn distill_command() -> Command {
    with_command_defaults(flags::command::<DistillConfig>("distill"), DistillConfig::own_defaults())
}

fn with_command_defaults(command: Command, defaults: &'static [(&'static str, &'static str)]) -> Command {
    command.mut_args(|arg| match defaults.iter().find(|(name, _)| arg.get_id() == name) {
        Some((_, value)) => arg.default_value(*value),
        None => arg,
    })
}

/// Returns the other commands.
fn other_commands() -> Vec<Command> {
    vec![
        flags::command::<PipelineFlags>(PIPELINE)
            .about("Run SFT, the reward model and PPO, one after another")
            .after_help(PIPELINE_HELP),
        foreign::with_flags(flags::command::<GenerateConfig>("generate"))
            .about("Generate responses with a language model")
            .after_help(GENERATE_HELP),
        foreign::with_flags(flags::command::<LogprobsConfig>("logprobs"))
            .about("Log-probabilities of given responses, row by row")
            .after_help(LOGPROBS_HELP),
        foreign::with_flags(flags::command::<ScoreConfig>("score"))
            // Commands that train against the reward model call this flag so.
            .mut_arg("model_name_or_path", |model| model.alias("reward_model_path"))
            .about("Scores of a reward model, or of other rewards, row by row")
            .after_help(SCORE_HELP),
        foreign::with_flags(flags::command::<EvaluateConfig>("eval"))
            .about("Win rate of a model against another one, or its scores")
            .after_help(EVAL_HELP),
        flags::command::<MergeConfig>("merge")
            .mut_arg("model_name_or_path", |model| model.required(false).required_unless_present(FOLDER))
            .arg(Arg::new(FOLDER).value_name("FOLDER").hide(true).help("The adapter, as model_name_or_path"))
            .override_usage("rlhf merge [OPTIONS] <FOLDER> --output_dir <PATH>")
            .about("Merge a LoRA adapter into its model")
            .after_help(MERGE_HELP),
        flags::command::<ConvertConfig>("convert")
            .about("Convert a GGUF file to a model folder or back")
            .after_help(CONVERT_HELP),
        flags::command::<PushConfig>("push").about("Upload a model to the Hugging Face hub").after_help(PUSH_HELP),
        flags::command::<ReportConfig>("report")
            .about("Write a page that shows what runs have done")
            .after_help(REPORT_HELP),
        flags::command::<WatchConfig>("watch")
            .about("Show a run live, as a page or in the terminal")
            .after_help(WATCH_HELP),
        replay::command().about("Compute an update of a run again").after_help(REPLAY_HELP),
        flags::command::<ChatConfig>("chat").about("Talk to a language model").after_help(CHAT_HELP),
        flags::command::<ServeConfig>("serve")
            .about("Serve a language model by OpenAI's HTTP interface")
            .after_help(SERVE_HELP),
        flags::command::<SessionConfig>("session")
            .about("Answer the requests of a training loop of your own")
            .after_help(SESSION_HELP),
        flags::command::<PlanFlags>(PLAN)
            .about("Plan memory and time of a run")
            .override_usage("rlhf plan [OPTIONS] COMMAND [ARGUMENTS]...")
            .after_help(PLAN_HELP),
        flags::command::<SchemaConfig>("schema").about("Describe all settings as JSON").after_help(SCHEMA_HELP),
        flags::command::<CompletionsConfig>("completions")
            .about("Print a script of completions for a shell")
            .after_help(COMPLETIONS_HELP),
        flags::command::<DoctorConfig>("doctor").about("Examine this machine and this build").after_help(DOCTOR_HELP),
        flags::command::<LaunchFlags>(LAUNCH)
            .about("Start a command as several ranks")
            .override_usage("rlhf launch [OPTIONS] COMMAND [ARGUMENTS]...")
            .after_help(LAUNCH_HELP),
    ]
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rlhf::run::group_names::NOT_OF_GROUPS;

    use super::*;
    use crate::cli::Task;
    use crate::cli::errors::refusal;
    use crate::cli::testing::{least, parse_words, ppo, with_file};

    #[test]
    fn clap_finds_no_fault_with_the_commands() {
        rlhf_command().clone().debug_assert();
    }

    #[test]
    fn the_command_line_is_frozen() {
        // Without the order, which is that of `--help`.
        let sorted = |names: &str| {
            let mut names: Vec<&str> = names.split_whitespace().collect();
            names.sort_unstable();
            names.join(" ")
        };
        let flags = |name: &str| {
            let command = rlhf_command();
            let command = command.find_subcommand(name).unwrap();
            let seen = command.get_arguments().filter(|arg| !arg.is_hide_set());
            sorted(&seen.map(|arg| arg.get_id().as_str()).collect::<Vec<_>>().join(" "))
        };
        let bits = "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant";
        let lora =
            "use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_rslora use_dora";
        let optimizer = "learning_rate optim lr_scheduler_type warmup_steps warmup_ratio lr_end min_lr_rate num_cycles num_decay_steps decay_type power weight_decay adam_beta1 adam_beta2 \
                         adam_epsilon max_grad_norm";
        let run = format!(
            "{bits} output_dir overwrite_output_dir seed bf16 fp16 initial_scale_power loss_scale_window \
                   hysteresis min_loss_scale dtype device save_dtype max_shard_size gradient_checkpointing \
                   max_tokens_per_micro_batch report_to tensorboard_tags run_name project tracker_kwargs log_model num_threads disable_tqdm no_report save_steps save_total_limit \
                   resume_from_checkpoint resume_with_changed_inputs zero_stage offload offload_dir dist_timeout push_to_hub hub_model_id \
                   hub_revision hub_private_repo hub_strategy hub_always_push hub_token config help"
        );
        let data = "dataset_name dataset_weights dataset_config dataset_columns dataset_train_split dataset_test_split eval_split_size data_split \
                    data_split_seed chat_template_kwargs";
        let rows = format!(
            "dataset_name dataset_config dataset_split dataset_columns chat_template_kwargs output_file overwrite_output_file batch_size dtype {bits} device num_threads config help"
        );
        let rewards = "reward reward_command reward_url reward_weights reward_normalize reward_scale reward_clip \
                       reward_pair reward_label_column reward_batch_size reward_concurrency reward_timeout reward_retries";
        let environments = "tools environment_factory max_tool_calling_iterations malformed_calls environment_failure_reward max_environments \
                            tool_timeout reset_timeout tool_output_limit tool_memory tool_processes tool_env";
        let eval = "eval_steps metric_for_best_model greater_is_better";
        let steps = "train_batch_size per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps \
                     num_train_epochs max_steps logging_steps";
        let group_flags = "advantage_estimator num_generations scale_rewards normalize_advantages multi_objective_aggregation \
                         lam_policy lam_policy_alpha dynamic_sampling dynamic_filtering_reward_range max_num_gen_batches \
                         overlong_buffer_len overlong_penalty_factor sync_ref_model ref_model_mixup_alpha ref_model_sync_steps \
                         loss_type importance_sampling_level top_entropy_quantile off_policy_mask_threshold sapo_temperature_pos \
                         sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg \
                         mask_truncated_completions use_bias_correction_kl generation_batch_size steps_per_generation max_steps \
                         reward_clip_range";
        assert_eq!(
            flags("ppo"),
            sorted(&format!(
                "{group_flags} model_name_or_path sft_model_path model_revision reward_model_path reward_label value_model_path \
                 new_reward_head {rewards} {environments} {data} eval_dataset_name \
                 max_prompt_length long_prompts \
                 apply_chat_template system_prompt preset per_device_generation_batch_size generation_batches \
                 train_batch_size per_device_train_batch_size gradient_accumulation_steps num_mini_batches \
                 local_rollout_forward_batch_size total_episodes num_train_epochs num_sample_generations \
                 response_length stop_token stop_token_id temperature top_k top_p min_p repetition_penalty min_new_tokens \
                 stop_strings logprobs_of num_ppo_epochs missing_eos_penalty \
                 non_eos_penalty penalty_reward_value \
                 score_position kl_coef kl_estimator kl_in_loss adap_kl_ctrl target horizon kl_coef_end whiten_rewards \
                 whiten_advantages gamma lam cliprange cliprange_value vf_coef cliprange_high dual_clip entropy_coef \
                 use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target \
                 target_kl ratio_threshold clip_reward_value min_response_length eos_in_loss last_value_in_loss \
                 unsupervised_dataset_name unsupervised_dataset_config_name unsup_coef enable_ema ema_beta value_head raw_logprobs num_shared_layers batch_size \
                 mini_batch_size early_stopping use_score_scaling use_score_norm score_clip \
                 {lora} value_use_peft value_lora_r \
                 value_lora_target_modules value_lora_modules_to_save {optimizer} value_warmup_updates value_learning_rate \
                 value_lr_scheduler_type value_lr_warmup_steps value_weight_decay value_max_grad_norm \
                 max_skipped_updates no_checks on_alarm max_rollbacks log_rollouts rollouts_limit align_overflow compute_fp32_loss print_answers print_answers_interval \
                 enable_test_mode test_stop_step num_eval_prompts actor_zero_stage critic_zero_stage \
                 ds3_gather_for_generation {eval} {run}"
            ))
        );
        // `model_name_or_path` is the policy there, the preset is the command's, and there is no value model.
        let ppo_flags = flags("ppo");
        let is_there = |name: &&str| {
            !["sft_model_path", "preset"].contains(name) && !NOT_OF_GROUPS.iter().any(|(other, _)| other == name)
        };
        let ppo_flags: Vec<&str> = ppo_flags.split(' ').filter(is_there).collect();
        for name in ["grpo", "rloo"] {
            assert_eq!(flags(name), ppo_flags.join(" "));
        }
        assert_eq!(
            flags("sft"),
            sorted(&format!(
                "preset model_name_or_path model_revision config_name tokenizer_name chat_template_path eos_token {data} eval_dataset_name \
                 dataset_text_field max_length packing {steps} \
                 completion_only_loss assistant_only_loss {lora} {optimizer} {eval} {run}"
            ))
        );
        assert_eq!(
            flags("reward"),
            sorted(&format!(
                "preset model_name_or_path model_revision new_reward_head reward_format eos_token {data} eval_dataset_name \
                 num_padding_at_beginning max_length {steps} pair_loss center_rewards_coefficient {lora} {optimizer} \
                 eval_only {eval} {run}"
            ))
        );
        assert_eq!(
            flags("generate"),
            sorted(&format!(
                "model_name_or_path model_revision prompts input_format output_format apply_chat_template system_prompt max_new_tokens \
                 min_new_tokens do_sample \
                 temperature top_k top_p min_p repetition_penalty num_return_sequences stop_token_ids stop_strings \
                 ignore_eos seed {environments} {rows}"
            ))
        );
        assert_eq!(flags("logprobs"), sorted(&format!("model_name_or_path model_revision temperature {rows}")));
        assert_eq!(
            flags("score"),
            sorted(&format!("model_name_or_path model_revision reward_label tokenizer_name {rewards} {rows}"))
        );
        assert_eq!(
            flags("pipeline"),
            sorted(
                "output_dir overwrite_output_dir skip resume_from_checkpoint resume_with_changed_inputs help config"
            )
        );
        assert_eq!(
            flags("merge"),
            sorted(
                "model_name_or_path model_revision output_dir overwrite_output_dir save_dtype max_shard_size config help"
            )
        );
        assert_eq!(
            flags("eval"),
            sorted(&format!(
                "model_name_or_path model_revision compare compare_revision compare_column dataset_name dataset_config dataset_split \
                 dataset_columns chat_template_kwargs num_prompts apply_chat_template reward_model_path reward_label {rewards} \
                 {environments} judge_command judge_url judge_model judge_template judge_temperature judge_max_tokens judge_concurrency \
                 judge_timeout judge_retries pass_score max_judgements max_new_tokens do_sample temperature top_k top_p min_p \
                 repetition_penalty num_return_sequences stop_token_ids stop_strings seed output_dir overwrite_output_dir \
                 batch_size dtype {bits} device num_threads config help"
            ))
        );
        assert_eq!(flags("convert"), sorted("file output_dir output_file outtype dtype max_shard_size config help"));
        assert_eq!(
            flags("push"),
            sorted("folder name include exclude private revision commit_message hub_token config help")
        );
        assert_eq!(flags("report"), sorted("runs output overwrite_output_file config help"));
        let compute = format!("dtype {bits} device num_threads config help");
        assert_eq!(
            flags("chat"),
            sorted(&format!(
                "model model_revision compare system chat_template_kwargs tools environment_factory environment_row \
                 max_tool_calling_iterations malformed_calls tool_timeout reset_timeout tool_output_limit tool_memory tool_processes tool_env \
                 max_new_tokens temperature top_k top_p min_p repetition_penalty seed {compute}"
            ))
        );
        assert_eq!(
            flags("serve"),
            sorted(&format!("model model_revision host port max_new_tokens batch_size {compute}"))
        );
        assert_eq!(flags("session"), sorted("socket config help"));
        assert_eq!(flags("watch"), sorted("run terminal port host config help"));
        assert_eq!(flags("completions"), sorted("shell config help"));
        assert_eq!(flags("doctor"), sorted("json offline no_self_test config help"));
        assert_eq!(flags("plan"), sorted("json memory nproc_per_node nnodes calibrate help"));
        assert_eq!(flags("replay"), sorted("run update output_dir help"));
        assert_eq!(
            flags("launch"),
            sorted("nproc_per_node max_restarts nnodes node_rank master_addr master_port config_file help")
        );
    }

    #[test]
    fn no_line_of_the_text_below_the_flags_is_longer_than_100_columns() {
        let rlhf = rlhf_command();
        for command in std::iter::once(rlhf).chain(rlhf.get_subcommands()) {
            let text =
                command.get_after_help().unwrap_or_else(|| panic!("{} has none", command.get_name())).to_string();
            for line in text.lines() {
                assert!(line.chars().count() <= 100, "{}: {line}", command.get_name());
            }
        }
    }

    #[test]
    fn every_flag_is_explained_under_a_heading() {
        for command in rlhf_command().get_subcommands() {
            for arg in command.get_arguments() {
                let id = arg.get_id().as_str();
                assert!(arg.get_help().is_some(), "{id}");
                assert_eq!(arg.get_help_heading().is_none(), arg.is_positional(), "{id}");
            }
        }
    }

    #[test]
    fn the_command_line_has_the_defaults_of_the_constructors() {
        assert_eq!(ppo(&[]), PpoConfig::new("policy", "judge", "prompts.jsonl", "out"));
        let data = ["--dataset_name", "d", "--output_dir", "o"];
        let sft = parse_words(&[&["sft", "--model_name_or_path", "m"], &data[..]].concat()).unwrap();
        assert_eq!(sft, Task::Sft(SftConfig::new("m", "d", "o")));
        let scratch = parse_words(&[&["sft", "--config_name", "c", "--tokenizer_name", "t"], &data[..]].concat());
        assert_eq!(scratch.unwrap(), Task::Sft(SftConfig::from_scratch("c", "t", "d", "o")));
        let reward = parse_words(&[&["reward", "--model_name_or_path", "m"], &data[..]].concat()).unwrap();
        assert_eq!(reward, Task::Reward(RewardConfig::new("m", "d", "o")));
        let generate = parse_words(&["generate", "--model_name_or_path", "m"]).unwrap();
        assert_eq!(generate, Task::Generate(GenerateConfig::new("m")));
        let logprobs = parse_words(&["logprobs", "--model", "m"]).unwrap();
        assert_eq!(logprobs, Task::Logprobs(LogprobsConfig::new("m")));
        let convert = parse_words(&["convert", "a.gguf", "b"]).unwrap();
        assert_eq!(convert, Task::Convert(ConvertConfig::new("a.gguf", "b")));
        assert_eq!(parse_words(&["push", "a", "me/x"]).unwrap(), Task::Push(PushConfig::new("a", "me/x")));
        let report = parse_words(&["report", "a", "b"]).unwrap();
        assert_eq!(report, Task::Report(ReportConfig::new(["a", "b"])));
        let eval = ["eval", "--model", "m", "--dataset_name", "d", "--output_dir", "o", "--reward", "json"];
        let Task::Eval(eval) = parse_words(&eval).unwrap() else { panic!() };
        assert_eq!(EvaluateConfig { rewards: eval.rewards.clone(), ..EvaluateConfig::new("m", "d", "o") }, eval);
        let chat = parse_words(&["chat", "m"]).unwrap();
        assert_eq!(chat, Task::Chat(ChatConfig::new("m")));
        let serve = parse_words(&["serve", "m"]).unwrap();
        assert_eq!(serve, Task::Serve(ServeConfig::new("m")));
        assert_eq!(parse_words(&["session"]).unwrap(), Task::Session(SessionConfig::default()));
        assert_eq!(parse_words(&["watch", "a"]).unwrap(), Task::Watch(WatchConfig::new("a")));
        assert_eq!(parse_words(&["doctor"]).unwrap(), Task::Doctor(DoctorConfig::default()));
        let score = parse_words(&["score", "--model=m"]).unwrap();
        assert_eq!(score, Task::Score(ScoreConfig::new("m")));
    }

    /// The flags that a cell of a table, or a line of text, names: `--flag` in backticks, with a value or without.
    fn flags_in(text: &str) -> impl Iterator<Item = &str> {
        let code = text.split('`').skip(1).step_by(2);
        let words = code.flat_map(str::split_whitespace).filter_map(|word| word.strip_prefix("--"));
        words.map(|word| word.split(['=', ',']).next().unwrap_or_default())
    }

    #[test]
    fn every_flag_that_the_migration_page_names_is_there() {
        let page = [
            include_str!("../../../../docs/migrate/index.md"),
            include_str!("../../../../docs/migrate/trl-ppo.md"),
            include_str!("../../../../docs/migrate/trl-arguments.md"),
            include_str!("../../../../docs/migrate/trl-sft-and-reward.md"),
            include_str!("../../../../docs/migrate/trl-grpo.md"),
            include_str!("../../../../docs/migrate/trl-step.md"),
            include_str!("../../../../docs/migrate/deepspeed-chat.md"),
            include_str!("../../../../docs/migrate/deepspeed-chat-settings.md"),
            include_str!("../../../../docs/migrate/openrlhf.md"),
        ]
        .join("\n");
        let rlhf = rlhf_command();
        let knows = |command: &str, flag: &str| {
            let command = rlhf.find_subcommand(command).unwrap_or_else(|| panic!("no command {command}"));
            let names = |arg: &Arg| {
                arg.get_long() == Some(flag) || arg.get_all_aliases().is_some_and(|all| all.contains(&flag))
            };
            command.get_arguments().any(names)
        };
        let mut checked = 0;
        let mut command = None;
        for line in page.lines() {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let Some(ours) = cells.get(2).filter(|_| line.starts_with('|')) else {
                command = None;
                for flag in flags_in(line) {
                    let known = rlhf.get_subcommands().any(|command| knows(command.get_name(), flag));
                    assert!(known, "no --{flag} in any command: {line}");
                }
                continue;
            };
            match (command, ours.strip_prefix("`rlhf ").and_then(|rest| rest.split([' ', '`']).next())) {
                (None, Some(name)) => command = Some(name),
                (None, None) => {}
                (Some(name), _) => {
                    // In a row with `the same`, the flag of the first column is also ours.
                    let trl_flags = cells[1].split('`').skip(1).step_by(2).filter(|_| *ours == "the same");
                    for flag in trl_flags {
                        assert!(knows(name, flag), "no --{flag} in `rlhf {name}`: {line}");
                        checked += 1;
                    }
                    for flag in flags_in(ours).chain(flags_in(cells.get(3).unwrap_or(&""))) {
                        assert!(knows(name, flag), "no --{flag} in `rlhf {name}`: {line}");
                        checked += 1;
                    }
                }
            }
        }
        assert!(checked > 150, "only {checked} flags were found in the tables");
        let preset =
            rlhf.find_subcommand("ppo").and_then(|ppo| ppo.get_arguments().find(|arg| arg.get_id() == "preset"));
        for after in page.split("--preset ").skip(1) {
            let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '-').collect();
            assert_eq!(refusal(preset.unwrap(), &name), None, "{name}");
        }
        // The file of its three steps is one.
        let file = page.split("```yaml").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let Task::Pipeline(chat) = with_file(file, &["pipeline"]).unwrap() else { panic!() };
        let ppo = chat.ppo.unwrap();
        assert_eq!(
            (ppo.preset, ppo.data.data_split, ppo.kl.kl_coef),
            (Preset::DeepspeedChat, "2,4,4".parse().ok(), 0.1)
        );
        assert_eq!(ppo.sft_model_path, PathBuf::from("runs/chat/1-sft"));
    }

    #[test]
    fn no_size_is_large_enough_for_more_than_a_usage_error() {
        let mut counted = 0;
        for command in
            rlhf_command().get_subcommands().filter(|command| ![PIPELINE, PLAN].contains(&command.get_name()))
        {
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let is_number = arg.get_value_names().is_some_and(|names| names.iter().any(|name| name == "N"));
                let (Some(flag), true) = (arg.get_long(), is_number) else { continue };
                let word = format!("--{flag}");
                for value in ["18446744073709551615", "9223372036854775807"] {
                    let words = [&least(command.get_name())[..], &[&word, value]].concat();
                    if let Err(error) = parse_words(&words) {
                        assert!(error.contains(flag), "{words:?}: {error}");
                    } else {
                        assert!(
                            ["seed", "data_split_seed", "stop_token_id", "stop_token_ids", "total_episodes"]
                                .contains(&flag),
                            "{words:?}"
                        );
                    }
                }
                counted += 1;
            }
        }
        assert!(counted > 60, "{counted}");
    }
}
