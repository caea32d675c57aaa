//! The settings of each command.

use clap::Command;
use rlhf::schema::{Field, NONE, Settings, Shape};
use rlhf::settings::{
    ChatConfig, CompletionsConfig, ConvertConfig, DistillConfig, DoctorConfig, DpoConfig, EvaluateConfig,
    GenerateConfig, LaunchFlags, LogprobsConfig, MergeConfig, PipelineFlags, PlanFlags, PpoConfig, PushConfig,
    ReplayConfig, ReportConfig, RewardConfig, SchemaConfig, ScoreConfig, ServeConfig, SessionConfig, SftConfig,
    WatchConfig,
};

/// Returns the settings of the command `name`.
pub(super) fn fields(name: &str) -> Vec<Field> {
    match name {
        "sft" => SftConfig::fields(),
        "reward" => RewardConfig::fields(),
        "dpo" => DpoConfig::fields(),
        "distill" => DistillConfig::fields(),
        "ppo" | "grpo" | "rloo" => PpoConfig::fields(),
        "pipeline" => PipelineFlags::fields(),
        "generate" => GenerateConfig::fields(),
        "logprobs" => LogprobsConfig::fields(),
        "score" => ScoreConfig::fields(),
        "eval" => EvaluateConfig::fields(),
        "merge" => MergeConfig::fields(),
        "convert" => ConvertConfig::fields(),
        "push" => PushConfig::fields(),
        "report" => ReportConfig::fields(),
        "watch" => WatchConfig::fields(),
        "replay" => ReplayConfig::fields(),
        "chat" => ChatConfig::fields(),
        "serve" => ServeConfig::fields(),
        "session" => SessionConfig::fields(),
        "plan" => PlanFlags::fields(),
        "completions" => CompletionsConfig::fields(),
        "doctor" => DoctorConfig::fields(),
        "launch" => LaunchFlags::fields(),
        "schema" => SchemaConfig::fields(),
        _ => unreachable!("{name} has no settings"),
    }
}

/// Returns the settings that have a default and also accept `none`, of the commands that read a file.
pub(super) fn optional_with_default(rlhf: &Command) -> Vec<&'static str> {
    let optional_names = |name: &str| {
        let command = rlhf.find_subcommand(name).expect("it is a command");
        // A command may have another default than the group of the setting.
        let has_default = |field: &Field| {
            let flag = command.get_arguments().find(|flag| flag.get_id() == field.name);
            flag.is_some_and(|flag| flag.get_default_values().iter().any(|default| default != NONE))
        };
        let optional = fields(name).into_iter().filter(|field| field.shape == Shape::Optional);
        optional.filter(has_default).map(|field| field.name).collect::<Vec<_>>()
    };
    ["sft", "reward", "dpo", "distill", "ppo", "eval", "generate"].into_iter().flat_map(optional_names).collect()
}
