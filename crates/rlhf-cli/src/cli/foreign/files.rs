//! Files of other systems that describe a run with several ranks: a DeepSpeed configuration (JSON) and one of accelerate (YAML).
//!
//! Keys with a counterpart become settings; the others are named in a note. A value `auto` leaves a setting as it is.

use std::path::Path;

use rlhf::schema::{MOST_PORT, MOST_RANKS};
use rlhf::{Error, Result};
use serde_json::{Map, Value};

use super::table::{System, To};

/// A setting that a file has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// Its key in the file.
    pub(super) key: String,
    /// Our setting.
    pub(super) setting: &'static str,
    pub(super) value: String,
    /// Whether it counts only where `fp16` is set.
    pub(super) of_fp16: bool,
}

/// The content of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) found: Vec<Found>,
    /// Keys without a counterpart.
    pub(super) unknown: Vec<String>,
    /// Values that are refused, a line each, without the file's name.
    pub(super) refused: Vec<String>,
    /// Number of ranks that the file asks for.
    pub(super) ranks: Option<usize>,
}

/// Reads a DeepSpeed configuration.
///
/// # Errors
/// If the file cannot be read, or is no JSON object.
pub(super) fn deepspeed(path: &Path) -> Result<Content> {
    let text = rlhf::files::read_settings(path)?;
    let parsed: Value = serde_json::from_str(&text)
        .map_err(|e| Error::invalid(path, format!("expected a DeepSpeed configuration in JSON: {e}")))?;
    let Value::Object(map) = parsed else {
        return Err(Error::invalid(path, "expected a DeepSpeed configuration, a JSON object"));
    };
    Ok(content(&map, System::DeepSpeed))
}

/// Reads a configuration of accelerate, without what [`launch`] reads.
///
/// # Errors
/// If the file cannot be read, or is no YAML map.
pub(super) fn accelerate(path: &Path) -> Result<Content> {
    let map = yaml(path)?;
    let mut content = content(&map, System::Accelerate);
    content.ranks = map.get("num_processes").and_then(Value::as_u64).map(|ranks| ranks as usize);
    if let Some(precision @ ("bf16" | "fp16")) = map.get("mixed_precision").and_then(Value::as_str) {
        let setting = if precision == "bf16" { "bf16" } else { "fp16" };
        let found = Found { key: "mixed_precision".into(), setting, value: "true".into(), of_fp16: false };
        content.found.push(found);
    }
    Ok(content)
}

/// Returns the content of the configuration of accelerate that TRL brings under this name; `None` if it brings none.
pub(super) fn of_trl(name: &str) -> Option<Content> {
    let stage = match name {
        "single_gpu" | "multi_gpu" => "0",
        "zero1" => "1",
        "zero2" => "2",
        "zero3" | "fsdp1" | "fsdp2" => "3",
        _ => return None,
    };
    let found = |setting, value: &str| Found { key: name.into(), setting, value: value.into(), of_fp16: false };
    let ranks = if name == "single_gpu" { 1 } else { 8 };
    Some(Content {
        found: vec![found("zero_stage", stage), found("bf16", "true")],
        ranks: Some(ranks),
        ..Content::default()
    })
}

/// The ranks of an accelerate configuration; `None` where the file does not set a value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::cli) struct LaunchFile {
    /// Number of ranks on all machines.
    pub(in crate::cli) num_processes: Option<usize>,
    pub(in crate::cli) num_machines: Option<usize>,
    /// Number of this machine, from 0.
    pub(in crate::cli) machine_rank: Option<usize>,
    /// Host of rank 0.
    pub(in crate::cli) main_process_ip: Option<String>,
    pub(in crate::cli) main_process_port: Option<u16>,
}

/// Reads the ranks of an accelerate configuration.
///
/// # Errors
/// If the file cannot be read, is no YAML map, or has something else where a number is expected.
pub(in crate::cli) fn launch(path: &Path) -> Result<LaunchFile> {
    let map = yaml(path)?;
    let number = |key: &str, most: u64| match map.get(key).filter(|value| !value.is_null()) {
        None => Ok(None),
        Some(value) => match text(value).parse::<u64>().ok().filter(|&number| number <= most) {
            Some(number) => Ok(Some(number)),
            None => {
                let message = format!("`{key}`: expected a whole number up to {most}, found `{}`", text(value));
                Err(Error::invalid(path, message))
            }
        },
    };
    let count = |key| number(key, MOST_RANKS).map(|number| number.map(|number| number as usize));
    Ok(LaunchFile {
        num_processes: count("num_processes")?,
        num_machines: count("num_machines")?,
        machine_rank: count("machine_rank")?,
        main_process_ip: map.get("main_process_ip").filter(|value| !value.is_null()).map(text),
        main_process_port: number("main_process_port", MOST_PORT)?.map(|port| port as u16),
    })
}

/// Reads the map of a YAML file.
fn yaml(path: &Path) -> Result<Map<String, Value>> {
    let text = rlhf::files::read_settings(path)?;
    serde_saphyr::from_str(&text).map_err(|error| {
        let line = error.location().map_or(1, |location| location.line());
        let message = error.to_string();
        let message = message.lines().next().unwrap_or_default();
        Error::invalid(
            format!("{}:{line}", path.display()),
            format!("expected a configuration of accelerate in YAML: {message}"),
        )
    })
}

/// Returns the settings of `map` by the keys of `system` in the table.
fn content(map: &Map<String, Value>, system: System) -> Content {
    let mut leaves = Vec::new();
    flatten("", map, &mut leaves);
    let mut content = Content::default();
    for (key, value) in leaves {
        let word = text(value).to_ascii_lowercase();
        if value.is_null() || word == "auto" {
            continue;
        }
        let found = |setting, value: &str| Found { key: key.clone(), setting, value: value.into(), of_fp16: false };
        match system.find(&key) {
            Some(To::IsUnless(_, fine) | To::Without(fine)) if fine.contains(&word.as_str()) => {}
            Some(To::Is(setting) | To::IsUnless(setting, _)) => content.found.push(found(setting, &text(value))),
            Some(To::IsWithFp16(setting)) => {
                content.found.push(Found { of_fp16: true, ..found(setting, &text(value)) });
            }
            Some(To::Words(setting, words)) => match words.iter().find(|(name, _)| *name == word) {
                Some((_, ours)) => content.found.extend(ours.map(|ours| found(setting, ours))),
                None => {
                    let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
                    content.refused.push(format!("`{key}`: expected {}, found `{}`", names.join(" or "), text(value)));
                }
            },
            Some(To::Pair(settings)) => match value.as_array().map(Vec::as_slice) {
                Some([first, second]) => {
                    content.found.extend(settings.into_iter().zip([first, second]).map(|(s, v)| found(s, &text(v))));
                }
                _ => content.refused.push(format!("`{key}`: expected two numbers, found `{}`", text(value))),
            },
            // `rlhf launch` reads it.
            Some(To::Ignored(_)) => {}
            Some(_) => content.unknown.push(key),
            // It asks for nothing.
            None if ["false", "no", "none", "[]", ""].contains(&word.as_str()) => {}
            None => {
                let name = unknown_part(&key, system);
                if !content.unknown.contains(&name) {
                    content.unknown.push(name);
                }
            }
        }
    }
    content
}

/// Collects the values of a map, each with its key: `a.b` for a value in the map `a`.
fn flatten<'v>(prefix: &str, map: &'v Map<String, Value>, leaves: &mut Vec<(String, &'v Value)>) {
    for (key, value) in map {
        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(inner) => flatten(&key, inner, leaves),
            _ => leaves.push((key, value)),
        }
    }
}

/// Returns the largest part of the file around `key` that has no key of the table: a whole section, or the key alone.
fn unknown_part(key: &str, system: System) -> String {
    let mut end = 0;
    for part in key.split('.') {
        end += part.len();
        let section = format!("{}.", &key[..end]);
        if !system.names().any(|(name, _)| name.starts_with(&section)) {
            break;
        }
        end += 1;
    }
    key[..end.min(key.len())].into()
}

/// Returns a value as a flag would have it.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Content {
        content(serde_json::from_str::<Value>(text).unwrap().as_object().unwrap(), System::DeepSpeed)
    }

    #[test]
    fn keys_of_deepspeed_become_settings_and_others_are_named() {
        // The example of transformers' documentation for ZeRO-3, with numbers in place of some `auto`.
        let content = of(r#"{
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "none"},
                "overlap_comm": true, "reduce_bucket_size": "auto", "sub_group_size": 1e9
            },
            "aio": {"block_size": 1048576, "queue_depth": 8},
            "gradient_clipping": 1.0, "steps_per_print": 2000, "train_batch_size": 64, "wall_clock_breakdown": false
        }"#);
        let found: Vec<(&str, &str)> =
            content.found.iter().map(|found| (found.setting, found.value.as_str())).collect();
        let expected = [
            ("loss_scale_window", "1000"),
            ("initial_scale_power", "16"),
            ("hysteresis", "2"),
            ("learning_rate", "0.00003"),
            ("adam_beta1", "0.8"),
            ("adam_beta2", "0.999"),
            ("adam_epsilon", "1e-8"),
            ("zero_stage", "3"),
            ("offload_optimizer", "true"),
            ("max_grad_norm", "1.0"),
            ("train_batch_size", "64"),
        ];
        assert_eq!(found, expected);
        assert_eq!(
            content.unknown,
            [
                "scheduler",
                "zero_optimization.overlap_comm",
                "zero_optimization.sub_group_size",
                "aio",
                "steps_per_print"
            ]
        );
        assert_eq!(content.refused, [""; 0]);
        let content =
            of(r#"{"optimizer": {"type": "Lion"}, "zero_optimization": {"offload_optimizer": {"device": "nvme"}}}"#);
        let expected = [
            "`optimizer.type`: expected adamw or adam or fusedadam or cpuadam, found `Lion`",
            "`zero_optimization.offload_optimizer.device`: expected cpu or none, found `nvme`",
        ];
        assert_eq!(content.refused, expected);
    }

    #[test]
    fn a_configuration_of_accelerate_has_ranks_and_settings() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("acc.yaml");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            (accelerate(&path).unwrap(), launch(&path).unwrap())
        };
        // As `accelerate config` writes it.
        let (content, ranks) = read(
            "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\n\
             enable_cpu_affinity: false\nfsdp_config:\n  fsdp_activation_checkpointing: true\n\
             \x20 fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: false\n\
             \x20 fsdp_sharding_strategy: FULL_SHARD\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\n\
             num_machines: 1\nnum_processes: 4\nrdzv_backend: static\nsame_network: true\ntpu_env: []\n\
             tpu_use_cluster: false\nuse_cpu: false\n",
        );
        let found: Vec<(&str, &str)> =
            content.found.iter().map(|found| (found.setting, found.value.as_str())).collect();
        assert_eq!(found, [("gradient_checkpointing", "true"), ("zero_stage", "3"), ("bf16", "true")]);
        assert_eq!(
            (content.unknown, content.refused),
            (vec!["fsdp_config.fsdp_auto_wrap_policy".to_string()], Vec::new())
        );
        let expected = LaunchFile {
            num_processes: Some(4),
            num_machines: Some(1),
            machine_rank: Some(0),
            ..LaunchFile::default()
        };
        assert_eq!(ranks, expected);
        let (content, _) = read("distributed_type: TPU\nmixed_precision: fp8\n");
        assert_eq!(content.refused.len(), 2, "{:?}", content.refused);
        std::fs::write(&path, "- 1\n").unwrap();
        let error = accelerate(&path).unwrap_err().to_string();
        assert!(error.contains("acc.yaml:1: expected a configuration of accelerate in YAML"), "{error}");
    }

    #[test]
    fn what_accelerate_writes_by_itself_sets_nothing() {
        for value in ["1", "auto"] {
            let map =
                format!(r#"{{"deepspeed_config": {{"gradient_accumulation_steps": "{value}", "zero_stage": 2}}}}"#);
            let map: Value = serde_json::from_str(&map).unwrap();
            let content = content(map.as_object().unwrap(), System::Accelerate);
            assert_eq!(content.found.iter().map(|found| found.setting).collect::<Vec<_>>(), ["zero_stage"]);
            assert!(content.unknown.is_empty() && content.refused.is_empty());
        }
    }
}
