//! The table of other systems' names: each name of TRL, transformers, DeepSpeed-Chat, DeepSpeed, accelerate, OpenRLHF, verl, and of the
//! recipes of open-r1 and LLaMA-Factory that is no name here, and its meaning here.
//!
//! Its rows are in `names.txt`. A name that means the same here is in no row: it is a setting, or an alias of one. The flags of commands,
//! the keys of files, the hints of errors, `rlhf schema` and the tables of docs/migrate come from here.

use std::sync::LazyLock;

/// A system whose names are in the table. Where two systems have a name, errors give the hint of the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum System {
    /// Flags of TRL's and transformers' configurations, of all versions from 0.11 on.
    Trl,
    /// Flags of DeepSpeed-Chat's three steps, with `--preset deepspeed-chat`.
    DeepSpeedChat,
    /// Keys of a DeepSpeed configuration.
    DeepSpeed,
    /// Keys of a configuration of accelerate.
    Accelerate,
    /// Arguments of transformers' schedules, in `lr_scheduler_kwargs`.
    Schedule,
    /// Arguments of `push_to_hub`, in `push_to_hub_if_best_kwargs`.
    PushToHub,
    /// Flags of OpenRLHF's `train_ppo_ray`: of its releases until 0.9 (`eps_clip`), and with a section (`actor.eps_clip`).
    OpenRlhf,
    OpenR1,
    LlamaFactory,
    Verl,
    /// Names of TRL and its launcher that are no flags here.
    TrlElsewhere,
}

/// The meaning of a name here.
#[derive(Debug, Clone, Copy)]
pub(super) enum To {
    /// Our setting, with the same values.
    Is(&'static str),
    /// Our setting, with the same values; these values leave it as it is.
    IsUnless(&'static str, &'static [&'static str]),
    /// Our setting of the loss scale, with the same values; it counts only where `fp16` is set.
    IsWithFp16(&'static str),
    /// Our setting, by the word that the value is; `None` leaves the setting as it is. Other words are refused.
    Words(&'static str, &'static [(&'static str, Option<&'static str>)]),
    /// Two numbers of our settings.
    Pair([&'static str; 2]),
    /// These settings of ours; code of its own computes their values.
    Translated(&'static str),
    /// Accepted with a note: it has no effect, for this reason.
    NoEffect(&'static str),
    /// Accepted without a note: it has no effect, for this reason.
    Ignored(&'static str),
    /// Accepted with one of these values only, for this reason; other values are refused.
    Only(&'static [&'static str], &'static str),
    /// A key of a file without a counterpart: it is named in a note, unless it has one of these values.
    Without(&'static [&'static str]),
    /// Refused, with what to write in its place.
    Write(&'static str),
    /// Refused: there is no counterpart, for this reason.
    Nothing(&'static str),
    /// Refused, with this hint.
    Hint(&'static str),
}

/// Names of a system with the same meaning.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) system: System,
    /// The commands that have the names as flags; none if they are keys, or refused.
    pub(super) commands: &'static [&'static str],
    pub(super) names: &'static [&'static str],
    pub(super) to: To,
}

/// The rows of all systems, in the order of their file.
pub(super) static TABLE: LazyLock<Vec<Row>> = LazyLock::new(|| read(include_str!("names.txt")).unwrap_or_default());

/// The names of the meanings in the file. A name that another one begins with comes after it.
const MEANINGS: [&str; 13] = [
    "is unless",
    "is with fp16",
    "is",
    "words",
    "pair",
    "translated",
    "no effect",
    "ignored",
    "only",
    "unless",
    "write",
    "nothing",
    "hint",
];

/// Names in the file that stand for several commands.
const COMMANDS: [(&str, &[&str]); 6] = [
    ("train", &["sft", "reward", "dpo", "distill", "ppo", "grpo", "rloo"]),
    ("learn", &["sft", "reward", "dpo", "distill"]),
    ("rollout", &["ppo", "grpo", "rloo"]),
    ("groups", &["grpo", "rloo"]),
    ("samples", &["distill", "grpo", "rloo"]),
    ("steps", &["sft", "reward", "ppo"]),
];

/// Reads the rows of the table's file. The error names the first line that is no row.
fn read(text: &'static str) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    let mut section = None;
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = System::ALL.into_iter().find(|system| system.section() == name);
            continue;
        }
        let wrong = || format!("{line}: expected a row of a system");
        let system = section.ok_or_else(wrong)?;
        let mut parts = line.split(" | ");
        let commands = if system.kind() == "flag" { commands(parts.next().unwrap_or_default()) } else { &[] };
        let names = words(parts.next().unwrap_or_default());
        let to = parts.next().and_then(|meaning| To::read(meaning, parts.next().unwrap_or_default()));
        rows.push(Row { system, commands, names, to: to.ok_or_else(wrong)? });
    }
    Ok(rows)
}

fn commands(text: &'static str) -> &'static [&'static str] {
    COMMANDS.iter().find(|(name, _)| *name == text).map_or_else(|| words(text), |(_, several)| *several)
}

/// Returns the words of a text of the file; `''` is an empty one. The list is leaked: the table is read once in a process.
fn words(text: &'static str) -> &'static [&'static str] {
    text.split_whitespace().map(|word| if word == "''" { "" } else { word }).collect::<Vec<_>>().leak()
}

impl To {
    /// Reads a meaning of the file and the text after it.
    fn read(meaning: &'static str, text: &'static str) -> Option<Self> {
        let (kind, values) = MEANINGS.iter().find_map(|kind| Some((*kind, meaning.strip_prefix(*kind)?)))?;
        let values = words(values);
        Some(match kind {
            "is unless" => Self::IsUnless(text, values),
            "is with fp16" => Self::IsWithFp16(text),
            "is" => Self::Is(text),
            "words" => {
                let word = |word: &'static str| match word.split_once('=') {
                    Some((word, value)) => (word, Some(value)),
                    None => (word, None),
                };
                Self::Words(text, values.iter().copied().map(word).collect::<Vec<_>>().leak())
            }
            "pair" => Self::Pair(text.split_once(' ')?.into()),
            "translated" => Self::Translated(text),
            "no effect" => Self::NoEffect(text),
            "ignored" => Self::Ignored(text),
            "only" => Self::Only(values, text),
            "unless" => Self::Without(values),
            "write" => Self::Write(text),
            "nothing" => Self::Nothing(text),
            _ => Self::Hint(text),
        })
    }
}

/// Flags of the table that are lists: repeated on the command line, one has the values of all. Of another flag the last value counts.
pub(super) const LISTS: [&str; 6] = [
    "include_for_metrics",
    "label_names",
    "lora_target_parameters",
    "optim_target_modules",
    "data_path",
    "sft_only_data_path",
];

/// Flags of DeepSpeed-Chat that may stand alone.
pub(super) const SWITCHES: [&str; 11] = [
    "actor_gradient_checkpointing",
    "add_eot_token",
    "compute_fp32_loss",
    "critic_gradient_checkpointing",
    "enable_hybrid_engine",
    "enable_mixed_precision_lora",
    "enable_tensorboard",
    "only_optimize_lora",
    "print_loss",
    "release_inference_cache",
    "unpin_actor_parameters",
];

/// Flags whose value is a map, or a list of maps.
pub(super) const MAPS: [&str; 4] = [IF_BEST, SCHEDULE_KWARGS, DATASETS, DATASET_MIXTURE];

/// Aliases of our flags, or of those in the table.
pub(super) const ALIASES: [(&str, &str); 6] = [
    ("torch_dtype", "dtype"),
    ("max_seq_length", "max_length"),
    ("activation_checkpointing", "gradient_checkpointing"),
    ("evaluation_strategy", "eval_strategy"),
    ("test_split_size", "eval_split_size"),
    ("no_cuda", "use_cpu"),
];

/// The flag of TRL's `step()` that has the best model pushed: a map of the arguments of `push_to_hub`.
pub(super) const IF_BEST: &str = "push_to_hub_if_best_kwargs";
/// The arguments of a schedule, a map.
pub(super) const SCHEDULE_KWARGS: &str = "lr_scheduler_kwargs";
/// TRL's list of datasets.
pub(super) const DATASETS: &str = "datasets";
/// The map with such a list of open-r1.
pub(super) const DATASET_MIXTURE: &str = "dataset_mixture";
/// The column of open-r1's prompts.
pub(super) const PROMPT_COLUMN: &str = "dataset_prompt_column";
/// Stands for the DeepSpeed configuration that an accelerate configuration names.
pub(super) const DEEPSPEED_FILE: &str = "deepspeed";

impl System {
    const ALL: [Self; 11] = [
        Self::Trl,
        Self::DeepSpeedChat,
        Self::DeepSpeed,
        Self::Accelerate,
        Self::Schedule,
        Self::PushToHub,
        Self::OpenRlhf,
        Self::OpenR1,
        Self::LlamaFactory,
        Self::Verl,
        Self::TrlElsewhere,
    ];

    /// The name of its section in the file.
    fn section(self) -> &'static str {
        if self == Self::TrlElsewhere { "TRL elsewhere" } else { self.name() }
    }

    /// The name of the system, or of its map.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Trl | Self::TrlElsewhere => "TRL",
            Self::DeepSpeedChat => "DeepSpeed-Chat",
            Self::DeepSpeed => "DeepSpeed",
            Self::Accelerate => "accelerate",
            Self::Schedule => "lr_scheduler_kwargs",
            Self::PushToHub => "push_to_hub",
            Self::OpenRlhf => "OpenRLHF",
            Self::OpenR1 => "open-r1",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Verl => "verl",
        }
    }

    /// The kind of its names: flags of commands, keys of a file or a map, or names that are refused.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Trl | Self::DeepSpeedChat => "flag",
            Self::DeepSpeed | Self::Accelerate | Self::Schedule | Self::PushToHub => "key",
            Self::OpenRlhf | Self::OpenR1 | Self::LlamaFactory | Self::Verl | Self::TrlElsewhere => "refused",
        }
    }

    /// The names of the system with their meanings, in order.
    pub(super) fn names(self) -> impl Iterator<Item = (&'static str, To)> {
        let rows = TABLE.iter().filter(move |row| row.system == self);
        rows.flat_map(|row| row.names.iter().map(move |name| (*name, row.to)))
    }

    /// The meaning of the name `name` of the system.
    pub(super) fn find(self, name: &str) -> Option<To> {
        self.names().find(|(other, _)| *other == name).map(|(_, to)| to)
    }

    /// The names of the system that are flags of `command`, with their meanings, in order.
    pub(super) fn flags_of(self, command: &str) -> impl Iterator<Item = (&'static str, To)> {
        let rows = TABLE.iter().filter(move |row| row.system == self && row.commands.contains(&command));
        rows.flat_map(|row| row.names.iter().map(move |name| (*name, row.to)))
    }

    /// The meaning of the flag `name` of `command`, if it is one of the system.
    pub(super) fn flag(self, command: &str, name: &str) -> Option<To> {
        self.flags_of(command).find(|(other, _)| *other == name).map(|(_, to)| to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names whose meaning is code of its own. The number may only fall: a new name is a row.
    const MOST_TRANSLATED: usize = 28;

    #[test]
    fn few_names_have_code_of_their_own() {
        let translated = TABLE.iter().filter(|row| matches!(row.to, To::Translated(_)));
        let names: Vec<&str> = translated.flat_map(|row| row.names).copied().collect();
        assert!(names.len() <= MOST_TRANSLATED, "{}: {names:?}", names.len());
    }

    #[test]
    fn every_row_of_the_file_is_read_and_has_its_text() {
        let rows = read(include_str!("names.txt")).unwrap();
        assert!(rows.len() > 280, "{}", rows.len());
        for system in System::ALL {
            assert!(rows.iter().any(|row| row.system == system), "{system:?}");
        }
        for row in &rows {
            assert!(!row.names.is_empty() && row.commands.is_empty() == (row.system.kind() != "flag"), "{row:?}");
            let (To::Is(text)
            | To::IsUnless(text, _)
            | To::IsWithFp16(text)
            | To::Translated(text)
            | To::NoEffect(text)
            | To::Ignored(text)
            | To::Only(_, text)
            | To::Write(text)
            | To::Nothing(text)
            | To::Hint(text)) = row.to
            else {
                continue;
            };
            assert!(!text.is_empty(), "{row:?}");
        }
        for line in ["a | is | b", "[no system]\na | is | b", "[DeepSpeed]\na | means | b", "[DeepSpeed]\na"] {
            assert!(read(line).is_err(), "{line}");
        }
    }
}
