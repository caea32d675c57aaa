//! `rlhf schema`: the description of all settings as JSON, for programs that make interfaces of it.

use std::io::{self, Write};

use clap::{Arg, Command};
use rlhf::schema::{Field, Kind, NONE, Shape};
use rlhf::settings::{Preset, SchemaConfig};
use rlhf::{Error, Result};
use serde_json::{Map, Value, json};

use super::commands::rlhf_command;
use super::fields::fields;
use super::{foreign, help, names};

/// Version of the format. It changes when a program that reads an older version would be wrong, not when something is added.
const VERSION: u32 = 1;

/// Commands that can resume their own runs.
const CONTINUED: [&str; 8] = ["sft", "reward", "dpo", "distill", "ppo", "grpo", "rloo", "eval"];

/// Commands whose runs `rlhf replay` reads, to compute an update again.
const REPLAYED: [&str; 3] = ["ppo", "grpo", "rloo"];

/// Prints the description of the commands, or of those that `config` names.
///
/// # Errors
/// If there is no command of a name, or standard output cannot be written.
pub(crate) fn schema(config: &SchemaConfig) -> Result<()> {
    let commands = rlhf_command();
    let known: Vec<&str> = commands.get_subcommands().map(Command::get_name).collect();
    if let Some(name) = config.commands.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(Error::Usage(format!("{name}: expected one of the commands {}", known.join(", "))));
    }
    let is_asked = |command: &&Command| {
        config.commands.is_empty() || config.commands.iter().any(|name| name == command.get_name())
    };
    let described: Vec<Value> = commands.get_subcommands().filter(is_asked).map(described).collect();
    let mut schema = json!({"schema_version": VERSION, "version": env!("CARGO_PKG_VERSION"), "commands": described});
    if config.commands.is_empty() {
        schema["names_of_other_systems"] = foreign::rows().into();
    }
    let mut out = io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, &schema)
        .map_err(io::Error::from)
        .and_then(|()| writeln!(out))
        .map_err(|source| Error::Io { action: "write", path: "standard output".into(), source })
}

/// Returns the presets of the command `name` with the defaults that they set.
fn presets(name: &str) -> Vec<(Preset, Vec<(&'static str, &'static str)>)> {
    let all = [Preset::TrlPpov2, Preset::TrlLegacy, Preset::DeepspeedChat, Preset::Grpo, Preset::Rloo];
    let with_settings = |settings: fn(Preset) -> Vec<(&'static str, &'static str)>| {
        all.into_iter().map(|preset| (preset, settings(preset))).filter(|(_, settings)| !settings.is_empty()).collect()
    };
    match name {
        "sft" => with_settings(Preset::sft_settings),
        "reward" => with_settings(Preset::reward_settings),
        "ppo" => with_settings(Preset::settings),
        _ => Vec::new(),
    }
}

fn described(command: &Command) -> Value {
    let name = command.get_name();
    let presets = presets(name);
    let common = help::common_flags(name);
    let settings = fields(name).into_iter().filter_map(|field| {
        // The flag has the changes that a command makes: the defaults of `grpo` and `rloo`, their required model, their help.
        let flag = command.get_arguments().find(|arg| arg.get_id() == field.name)?;
        let default = flag.get_default_values().first().and_then(|default| default.to_str());
        let preset_defaults: Map<String, Value> = presets
            .iter()
            .filter_map(|(preset, settings)| {
                let (_, value) = settings.iter().find(|(setting, _)| *setting == field.name)?;
                Some((rlhf::schema::Choices::name(*preset).to_string(), typed(&field, Some(value))))
            })
            .collect();
        let choices: Vec<Value> = field
            .choices
            .iter()
            .map(|choice| json!({"name": choice.name, "aliases": choice.aliases, "help": choice.help}))
            .collect();
        // A setting without an effect is not a setting of the command.
        if names::has(name) && flag.is_hide_set() && flag.get_long() == Some(field.name) {
            return None;
        }
        Some(json!({
            "name": flag.get_long().unwrap_or(field.name),
            "aliases": aliases(&field, flag),
            "help": setting_help(&field, flag),
            "heading": field.heading,
            "type": field.kind,
            "list": field.shape == Shape::List,
            "optional": field.shape == Shape::Optional,
            "required": flag.is_required_set(),
            "default": typed(&field, default),
            "preset_defaults": preset_defaults,
            "choices": choices,
            "positional": field.positional,
            "hidden": flag.is_hide_set(),
            "common": common.contains(&field.name),
            "resume": CONTINUED.contains(&name).then_some(field.resume),
            "replay": REPLAYED.contains(&name).then_some(field.replay),
            "most": (field.kind == Kind::Integer).then_some(field.most),
        }))
    });
    let about = command.get_about().map(ToString::to_string);
    let settings: Vec<Value> = settings.collect();
    json!({"name": name, "about": about, "settings": settings, "of_other_systems": foreign::described(command)})
}

/// Returns the other names of a setting: the aliases of its description, and its own name if the command shows another one.
fn aliases<'a>(field: &Field, flag: &'a Arg) -> Vec<&'a str> {
    let named = flag.get_all_aliases().unwrap_or_default();
    named.into_iter().filter(|alias| field.aliases.contains(alias) || *alias == field.name).collect()
}

/// Returns the help of a setting, or the help of its flag if the command has replaced it.
fn setting_help(field: &Field, flag: &Arg) -> String {
    let help = flag.get_help().map_or(String::new(), ToString::to_string);
    let text = field.help.to_string();
    let flag_text = help.trim_end_matches(" [default: none]");
    if flag_text == text.trim_end_matches('.') { text } else { flag_text.to_string() }
}

/// Returns a value as JSON of its kind.
fn typed(field: &Field, text: Option<&str>) -> Value {
    let Some(text) = text else { return if field.shape == Shape::List { json!([]) } else { Value::Null } };
    if field.shape == Shape::Optional && text == NONE {
        return Value::Null;
    }
    let parsed = match field.kind {
        Kind::Integer | Kind::Number | Kind::Boolean => serde_json::from_str(text).ok(),
        Kind::Text | Kind::Path | Kind::Json => None,
    };
    let value = parsed.unwrap_or_else(|| json!(text));
    if field.shape == Shape::List { json!([value]) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(name: &str) -> Vec<Value> {
        let command = rlhf_command().find_subcommand(name).unwrap();
        described(command)["settings"].as_array().unwrap().clone()
    }

    fn setting(command: &str, name: &str) -> Value {
        settings(command).into_iter().find(|setting| setting["name"] == name).unwrap()
    }

    #[test]
    fn every_flag_of_every_command_is_described_or_of_another_system() {
        for command in rlhf_command().get_subcommands() {
            let described: Vec<String> =
                settings(command.get_name()).iter().map(|setting| setting["name"].as_str().unwrap().into()).collect();
            let shown = command
                .get_arguments()
                .filter(|arg| !arg.is_hide_set() && !["help", "config"].contains(&arg.get_id().as_str()));
            for flag in shown.filter(|_| command.get_name() != "replay") {
                let name = flag.get_long().unwrap_or(flag.get_id().as_str());
                assert!(described.contains(&name.to_string()), "{}: {name}", command.get_name());
            }
            let all = fields(command.get_name());
            let all = all.iter().all(|field| described.contains(&field.name.to_string()));
            assert!(all || names::has(command.get_name()), "{}", command.get_name());
        }
    }

    #[test]
    fn a_setting_has_its_type_default_and_choices() {
        let rate = setting("ppo", "learning_rate");
        assert_eq!((&rate["type"], &rate["default"]), (&json!("number"), &json!(3e-6)));
        assert_eq!(rate["preset_defaults"]["grpo"], json!(1e-6));
        assert_eq!(setting("grpo", "learning_rate")["default"], json!(1e-6));
        assert_eq!(setting("grpo", "model_name_or_path")["required"], json!(true));
        let length = setting("grpo", "max_completion_length");
        assert_eq!((&length["default"], &length["aliases"]), (&json!(512), &json!(["response_length"])));
        assert!(
            settings("grpo").iter().all(|setting| setting["name"] != "vf_coef" && setting["name"] != "sft_model_path")
        );
        let steps = setting("sft", "max_steps");
        assert_eq!(
            (&steps["type"], &steps["optional"], &steps["default"]),
            (&json!("integer"), &json!(true), &Value::Null)
        );
        let optim = setting("sft", "optim");
        assert_eq!((&optim["choices"][1]["name"], &optim["default"]), (&json!("adamw_8bit"), &json!("adamw_torch")));
        let modules = setting("sft", "lora_target_modules");
        assert_eq!((&modules["list"], &modules["default"]), (&json!(true), &json!([])));
        assert_eq!(setting("reward", "bf16")["default"], json!(false));
        let stage = setting("sft", "zero_stage");
        assert_eq!((&stage["choices"][3]["name"], &stage["default"]), (&json!("3"), &json!("0")));
        assert_eq!(setting("ppo", "stop_token")["choices"][0]["name"], json!("eos"));
    }

    #[test]
    fn fixed_limits_are_described_and_classes_where_a_run_is_continued_or_replayed() {
        for (command, name, most) in [
            ("sft", "lora_r", 65536),
            ("ppo", "value_lora_r", 65536),
            ("ppo", "reward_concurrency", 1024),
            ("eval", "judge_concurrency", 1024),
            ("launch", "nproc_per_node", 100_000),
            ("serve", "port", 65535),
            ("ppo", "stop_token_id", i64::MAX),
        ] {
            assert_eq!(setting(command, name)["most"], json!(most), "{command} {name}");
        }
        let rate = |command: &str, class: &str| setting(command, "learning_rate")[class].clone();
        assert_eq!((rate("ppo", "resume"), rate("ppo", "replay")), (json!("kept"), json!("changes")));
        assert_eq!((rate("sft", "resume"), rate("sft", "replay")), (json!("kept"), Value::Null));
        let port = setting("serve", "port");
        assert_eq!((&port["resume"], &port["replay"]), (&Value::Null, &Value::Null));
    }

    #[test]
    fn the_table_of_other_systems_names_what_each_name_is_here() {
        let table = foreign::rows();
        let row = |name: &str, system: &str| {
            let is_row =
                |row: &&Value| row["system"] == system && row["names"].as_array().unwrap().contains(&json!(name));
            table.iter().find(is_row).unwrap_or_else(|| panic!("{name}")).clone()
        };
        let clip = row("actor.eps_clip", "OpenRLHF");
        assert_eq!((&clip["meaning"], &clip["here"]), (&json!("refused"), &json!("cliprange")));
        let path = row("data_path", "DeepSpeed-Chat");
        assert_eq!((&path["here"], &path["commands"]), (&json!("dataset_name"), &json!(["sft", "reward", "ppo"])));
        let stage = row("fsdp_config.fsdp_offload_params", "accelerate");
        assert_eq!(stage["values"], json!({"true": "true", "false": null}));
        assert_eq!(row("adafactor", "TRL")["values"], json!(["none", "false"]));
        let steps = row("deepspeed_config.gradient_accumulation_steps", "accelerate");
        assert_eq!(
            (&steps["meaning"], &steps["values"], &steps["unless"]),
            (&json!("same"), &Value::Null, &json!(["1"]))
        );
        assert_eq!(row("deepspeed_config.zero_stage", "accelerate")["unless"], Value::Null);
    }
}
