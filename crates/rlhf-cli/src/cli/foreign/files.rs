//! Files of other systems that describe a run with several ranks: a DeepSpeed configuration (JSON) and one of accelerate (YAML).
//!
//! Keys with a counterpart become settings; the others are named in a note. A value `auto` leaves a setting as it is.

use std::path::Path;

use rlhf::schema::{MOST_PORT, MOST_RANKS, Refusals};
use rlhf::{Error, Origin, Result};
use serde_json::{Map, Value};

use super::table::{System, To};

/// Our setting, as a key of another system's file or a word of its flag sets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ForeignSetting {
    /// The key in the file, or the flag with its word.
    pub(super) key: String,
    /// The line of the key, counted from 1.
    pub(super) line: u64,
    /// Our setting.
    pub(super) setting: &'static str,
    pub(super) value: String,
    /// Whether the key itself has this value, and not another one that stands for it.
    pub(super) is_same: bool,
    /// Whether it counts only where `fp16` is set.
    pub(super) needs_fp16: bool,
}

impl ForeignSetting {
    /// Returns a setting whose value is not that of the key itself.
    pub(super) fn new(key: impl Into<String>, line: u64, setting: &'static str, value: impl Into<String>) -> Self {
        Self { key: key.into(), line, setting, value: value.into(), is_same: false, needs_fp16: false }
    }
}

/// The content of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) settings: Vec<ForeignSetting>,
    /// Keys without a counterpart.
    pub(super) unknown: Vec<String>,
    /// Values that are refused: the line in the file, and the message.
    pub(super) refused: Vec<(u64, String)>,
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
    Ok(content(&map, KeyLines::of_json(&text), System::DeepSpeed))
}

/// Reads a configuration of accelerate, without what [`launch`] reads.
///
/// # Errors
/// If the file cannot be read, or is no YAML map.
pub(super) fn accelerate(path: &Path) -> Result<Content> {
    let (text, map) = yaml(path)?;
    let mut content = content(&map, KeyLines::of_yaml(&text), System::Accelerate);
    content.ranks = map.get("num_processes").and_then(Value::as_u64).map(|ranks| ranks as usize);
    if let Some(precision @ ("bf16" | "fp16")) = map.get("mixed_precision").and_then(Value::as_str) {
        let setting = if precision == "bf16" { "bf16" } else { "fp16" };
        let line = find_top_line(&text, "mixed_precision");
        content.settings.push(ForeignSetting::new("mixed_precision", line, setting, "true"));
    }
    Ok(content)
}

/// Returns the content of the configuration of accelerate that TRL brings under this name; `None` if it brings none.
pub(super) fn trl_configuration(name: &str) -> Option<Content> {
    let stage = match name {
        "single_gpu" | "multi_gpu" => "0",
        "zero1" => "1",
        "zero2" => "2",
        "zero3" | "fsdp1" | "fsdp2" => "3",
        _ => return None,
    };
    let setting = |setting, value: &str| ForeignSetting::new(format!("accelerate_config = {name}"), 1, setting, value);
    let ranks = if name == "single_gpu" { 1 } else { 8 };
    Some(Content {
        settings: vec![setting("zero_stage", stage), setting("bf16", "true")],
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
    /// The places of the keys that are set, each with the flag of `rlhf launch` that it sets.
    places: Vec<LaunchPlace>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct LaunchPlace {
    key: &'static str,
    flag: &'static str,
    origin: Origin,
}

/// The keys of a file that [`launch`] reads, with the flags of `rlhf launch` that they set.
const LAUNCH_KEYS: [(&str, &str); 5] = [
    ("num_processes", "num_processes"),
    ("num_machines", "nnodes"),
    ("machine_rank", "node_rank"),
    ("main_process_ip", "master_addr"),
    ("main_process_port", "master_port"),
];

impl LaunchFile {
    /// Makes refusals of flags that the file sets name its keys and lines, except for flags that are `on_line`, which win.
    pub(in crate::cli) fn place(&self, refusals: &mut Refusals, on_line: impl Fn(&str) -> bool) {
        for LaunchPlace { key, flag, origin } in self.places.iter().filter(|place| !on_line(place.flag)) {
            refusals.call(flag, key, origin.clone());
        }
    }
}

/// Reads the ranks of an accelerate configuration.
///
/// # Errors
/// If the file cannot be read, is no YAML map, or has something else where a number is expected.
pub(in crate::cli) fn launch(path: &Path) -> Result<LaunchFile> {
    let (file_text, map) = yaml(path)?;
    let value = |key: &str| map.get(key).filter(|value| !value.is_null());
    let line = |key: &str| find_top_line(&file_text, key);
    let number = |key: &str, most: u64| match value(key) {
        None => Ok(None),
        Some(value) => match text(value).parse::<u64>().ok().filter(|&number| number <= most) {
            Some(number) => Ok(Some(number)),
            None => {
                let place = format!("{}:{}", path.display(), line(key));
                let message = format!("`{key}`: expected a whole number up to {most}, found `{}`", text(value));
                Err(Error::invalid(place, message))
            }
        },
    };
    let count = |key| number(key, MOST_RANKS).map(|number| number.map(|number| number as usize));
    let set = LAUNCH_KEYS.into_iter().filter(|(key, _)| value(key).is_some());
    let place = |(key, flag)| LaunchPlace { key, flag, origin: Origin::Line { path: path.into(), line: line(key) } };
    Ok(LaunchFile {
        num_processes: count("num_processes")?,
        num_machines: count("num_machines")?,
        machine_rank: count("machine_rank")?,
        main_process_ip: value("main_process_ip").map(text),
        main_process_port: number("main_process_port", MOST_PORT)?.map(|port| port as u16),
        places: set.map(place).collect(),
    })
}

/// Reads the map of a YAML file, and returns it with the text.
fn yaml(path: &Path) -> Result<(String, Map<String, Value>)> {
    let text = rlhf::files::read_settings(path)?;
    let map = serde_saphyr::from_str(&text).map_err(|error| {
        let line = error.location().map_or(1, |location| location.line());
        let message = error.to_string();
        let message = message.lines().next().unwrap_or_default();
        Error::invalid(
            format!("{}:{line}", path.display()),
            format!("expected a configuration of accelerate in YAML: {message}"),
        )
    })?;
    Ok((text, map))
}

/// Finds the lines of keys in the text of a file, in the order in which they are in it.
struct KeyLines<'t> {
    text: &'t str,
    /// Whether keys are in quotes, as in JSON.
    are_quoted: bool,
    /// End of the last key.
    position: usize,
}

impl<'t> KeyLines<'t> {
    fn of_json(text: &'t str) -> Self {
        Self { text, are_quoted: true, position: 0 }
    }

    fn of_yaml(text: &'t str) -> Self {
        Self { text, are_quoted: false, position: 0 }
    }

    /// Returns the line of the next key `key`, counted from 1. It is the line of the last key if the text has this one in another notation.
    fn find_line(&mut self, key: &str) -> u64 {
        let key = if self.are_quoted { format!("\"{key}\"") } else { key.to_string() };
        let start = self.position;
        let mut places = self.text[start..].match_indices(&key).map(|(at, key)| (start + at, start + at + key.len()));
        if let Some((_, end)) = places.find(|&(start, end)| self.is_key(start, end)) {
            self.position = end;
        }
        self.text[..self.position].matches('\n').count() as u64 + 1
    }

    /// Returns whether the bytes from `start` to `end` are a key: a whole word before a colon, outside of comments, which JSON does not
    /// have.
    fn is_key(&self, start: usize, end: usize) -> bool {
        let before = self.text[..start].rsplit('\n').next().unwrap_or_default();
        let is_comment = !self.are_quoted && (before.trim_start().starts_with('#') || before.contains(" #"));
        let is_part = before.ends_with(|c: char| c.is_alphanumeric() || "_-.".contains(c));
        let after = self.text[end..].trim_start_matches(['"', '\'']).trim_start();
        after.starts_with(':') && !is_part && !is_comment
    }
}

/// Returns the line of the key `key` of the outermost map of a YAML text, counted from 1.
fn find_top_line(text: &str, key: &str) -> u64 {
    let is_key = |line: &str| {
        let rest = line.trim_start_matches(['"', '\'']).strip_prefix(key);
        rest.is_some_and(|rest| rest.trim_start_matches(['"', '\'']).trim_start().starts_with(':'))
    };
    text.lines().position(is_key).map_or(1, |index| index as u64 + 1)
}

/// Returns the settings of `map` by the keys of `system` in the table; `lines` are those of its text.
fn content(map: &Map<String, Value>, mut lines: KeyLines<'_>, system: System) -> Content {
    let mut leaves = Vec::new();
    flatten("", map, &mut lines, &mut leaves);
    let mut content = Content::default();
    for Leaf { key, line, value } in leaves {
        let word = text(value).to_ascii_lowercase();
        if value.is_null() || word == "auto" {
            continue;
        }
        let setting = |setting, value: &str| ForeignSetting::new(key.clone(), line, setting, value);
        let same = |name| ForeignSetting { is_same: true, ..setting(name, &text(value)) };
        let refused = |expected: &str| (line, format!("`{key}`: expected {expected}, found `{}`", text(value)));
        match system.find(&key) {
            Some(To::IsUnless(_, fine) | To::Without(fine)) if fine.contains(&word.as_str()) => {}
            Some(To::Is(name) | To::IsUnless(name, _)) => content.settings.push(same(name)),
            Some(To::IsWithFp16(name)) => {
                content.settings.push(ForeignSetting { needs_fp16: true, ..same(name) });
            }
            Some(To::Words(name, words)) => match words.iter().find(|(name, _)| *name == word) {
                Some((_, ours)) => content.settings.extend(ours.map(|ours| setting(name, ours))),
                None => {
                    let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
                    content.refused.push(refused(&names.join(" or ")));
                }
            },
            Some(To::Pair(names)) => match value.as_array().map(Vec::as_slice) {
                Some([first, second]) => {
                    let pair = names.into_iter().zip([first, second]);
                    content.settings.extend(pair.map(|(name, number)| setting(name, &text(number))));
                }
                _ => content.refused.push(refused("two numbers")),
            },
            // `rlhf launch` reads it.
            Some(To::Ignored(_)) => {}
            Some(_) => content.unknown.push(key),
            // A key without a counterpart that is off changes nothing.
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

/// A value of a file that is no map.
struct Leaf<'v> {
    /// The key, as `a.b` in the map `a`.
    key: String,
    line: u64,
    value: &'v Value,
}

/// Collects the values of a map and of the maps in it.
fn flatten<'v>(prefix: &str, map: &'v Map<String, Value>, lines: &mut KeyLines<'_>, leaves: &mut Vec<Leaf<'v>>) {
    for (key, value) in map {
        let line = lines.find_line(key);
        let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(inner) => flatten(&key, inner, lines, leaves),
            _ => leaves.push(Leaf { key, line, value }),
        }
    }
}

/// Returns the largest section around `key` without a key of the table, or the key itself if its section has one.
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

    fn deepspeed_content(text: &str) -> Content {
        let map: Value = serde_json::from_str(text).unwrap();
        content(map.as_object().unwrap(), KeyLines::of_json(text), System::DeepSpeed)
    }

    /// Our settings and their values.
    fn names_and_values(content: &Content) -> Vec<(&str, &str)> {
        content.settings.iter().map(|setting| (setting.setting, setting.value.as_str())).collect()
    }

    #[test]
    fn keys_of_deepspeed_become_settings_and_others_are_named() {
        // The example of transformers' documentation for ZeRO-3, with numbers in place of some `auto`.
        let content = deepspeed_content(
            r#"{
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "none"},
                "overlap_comm": true, "reduce_bucket_size": "auto", "sub_group_size": 1e9
            },
            "aio": {"block_size": 1048576, "queue_depth": 8},
            "gradient_clipping": 1.0, "steps_per_print": 2000, "train_batch_size": 64, "wall_clock_breakdown": false
        }"#,
        );
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
        assert_eq!(names_and_values(&content), expected);
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
        assert!(content.refused.is_empty());
        let content = deepspeed_content(
            "{\"optimizer\": {\"type\": \"Lion\"},\n \"zero_optimization\": {\n  \"offload_optimizer\": {\"device\": \"nvme\"}}}",
        );
        let expected = [
            (1, "`optimizer.type`: expected adamw or adam or fusedadam or cpuadam, found `Lion`".to_string()),
            (3, "`zero_optimization.offload_optimizer.device`: expected cpu or none, found `nvme`".to_string()),
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
        let expected = [("gradient_checkpointing", "true"), ("zero_stage", "3"), ("bf16", "true")];
        assert_eq!(names_and_values(&content), expected);
        let lines: Vec<u64> = content.settings.iter().map(|setting| setting.line).collect();
        assert_eq!(lines, [7, 10, 13]);
        assert_eq!(
            (content.unknown, content.refused),
            (vec!["fsdp_config.fsdp_auto_wrap_policy".to_string()], Vec::new())
        );
        let expected = LaunchFile {
            num_processes: Some(4),
            num_machines: Some(1),
            machine_rank: Some(0),
            places: ranks.places.clone(),
            ..LaunchFile::default()
        };
        assert_eq!(ranks, expected);
        assert_eq!(
            ranks.places.iter().map(|place| place.flag).collect::<Vec<_>>(),
            ["num_processes", "nnodes", "node_rank"]
        );
        let (content, _) = read("distributed_type: TPU\nmixed_precision: fp8\n");
        assert_eq!(content.refused.len(), 2, "{:?}", content.refused);
        std::fs::write(&path, "- 1\n").unwrap();
        let error = accelerate(&path).unwrap_err().to_string();
        assert!(error.contains("acc.yaml:1: expected a configuration of accelerate in YAML"), "{error}");
    }

    #[test]
    fn the_line_of_a_key_is_found_where_it_is_a_key() {
        let json = "{\"a\": {\"text\": \"stage: 1, \\\"stage\\\": 2\",\n \"stage\": 3},\n \"b\": {\n  \"stage\" : 4}}";
        let mut lines = KeyLines::of_json(json);
        let found = ["a", "text", "stage", "b", "stage", "none"].map(|key| lines.find_line(key));
        assert_eq!(found, [1, 1, 2, 3, 4, 4]);
        let yaml = "# num: 1\nthe_num: 2 # num: 3\nsection:\n  'num': 4\n  other: {num: 5}\n";
        let mut lines = KeyLines::of_yaml(yaml);
        let found = ["the_num", "section", "num", "other", "num"].map(|key| lines.find_line(key));
        assert_eq!(found, [2, 3, 4, 5, 5]);
        assert_eq!(KeyLines::of_yaml(yaml).find_line("num"), 4);
    }

    #[test]
    fn what_accelerate_writes_by_itself_sets_nothing() {
        for value in ["1", "auto"] {
            let text =
                format!(r#"{{"deepspeed_config": {{"gradient_accumulation_steps": "{value}", "zero_stage": 2}}}}"#);
            let map: Value = serde_json::from_str(&text).unwrap();
            let content = content(map.as_object().unwrap(), KeyLines::of_json(&text), System::Accelerate);
            assert_eq!(names_and_values(&content), [("zero_stage", "2")]);
            assert!(content.unknown.is_empty() && content.refused.is_empty());
        }
    }
}
