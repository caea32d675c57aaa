//! The description of settings: names, defaults, help, values.
//!
//! Each group of settings is a struct with `#[derive(Settings)]` in the module that it sets. A field is the one description of its
//! setting: its name is the flag's, the configuration file's key and, where TRL has the setting, TRL's name; its doc comment is the help
//! text; its `setting` attribute has the rest:
//!
//! | attribute | meaning |
//! |---|---|
//! | `heading = RUN` | heading of the help |
//! | `default = 1.0` | default; without it an `Option` is none, a `Vec` is empty, a `bool` is false, and any other value is required |
//! | `alias = "n"`, `aliases = ["n", "m"]` | further names |
//! | `parse = f` | parser in place of [`required`] or [`optional`]: `fn(&str) -> Result<T, String>` |
//! | `choices = f()` | the names that are allowed, in place of all names of the type |
//! | `unlisted` | the help and the errors of the flag do not list the choices |
//! | `value_name = "HOST"` | placeholder of the value in the help |
//! | `delimiter = ','` | separates the values of a list |
//! | `several` | a flag is followed by all values of a list: `--names a b` |
//! | `alone = "true"` | value of a flag that stands alone |
//! | `equals` | a flag's value follows `=` only |
//! | `positional` | a word of the command line without a flag |
//! | `required` | the list must not be empty |
//! | `hide` | the help leaves it out |
//! | `short = "..."` | the description in the short help, `-h` |
//! | `most = MOST_ROWS` | the largest whole number; [`MOST`] without it |
//! | `resume = Free` | whether a resumed run may change it: [`ResumeClass`] |
//! | `replay = Changes` | whether a replay may change it: [`ReplayClass`] |
//! | `flatten` | the field is a group of settings |
//!
//! The program makes its flags and its help from these descriptions, and reads flags and files through [`Settings::read`].

mod refusals;
mod values;

pub use refusals::{
    Refusals, above_zero, all, at_least_one, exclude, expect, no_effect, refuse, renamed, usage, zero_or_more,
    zero_to_one,
};
pub use rlhf_derive::{Choices, Settings};
pub use values::{
    ByteSize, Choice, Choices, JsonObject, Kind, Setting, any_text, is_bool, optional, optional_top_k, required,
    steps_or_minus_one, top_k_or_minus_one,
};

use crate::Result;
use serde::Serialize;

// Headings of `--help`.
/// Models and their tokenizers.
pub const MODELS: &str = "Models";
/// Datasets.
pub const DATA: &str = "Data";
/// Rewards, and what changes a response's score.
pub const REWARDS: &str = "Rewards";
/// Tools that a policy calls, and environments that it acts in.
pub const ENVIRONMENTS: &str = "Tools and environments";
/// Sampling, and the end of a response.
pub const SAMPLING: &str = "Generation";
/// Batch sizes, and the length of the run.
pub const BATCHES: &str = "Batches and length of the run";
/// The estimator of the advantages, and groups of responses.
pub const ADVANTAGES: &str = "Advantages and groups";
/// The penalty for leaving the reference model, and that model.
pub const KL: &str = "KL and reference model";
/// The loss.
pub const LOSS: &str = "Loss";
/// The value model of PPO.
pub const CRITIC: &str = "Value model";
/// Optimizer and learning rate.
pub const OPTIMIZER: &str = "Optimizer";
/// Low-rank adapters.
pub const LORA: &str = "LoRA";
/// Evaluation during a run.
pub const EVALUATION: &str = "Evaluation";
/// The output folder, checkpoints, and resuming.
pub const CHECKPOINTS: &str = "Output and checkpoints";
/// Metrics, trackers, samples.
pub const LOGGING: &str = "Logging";
/// Checks before a run, and alarms during it.
pub const ALARMS: &str = "Checks and alarms";
/// Precision, memory and speed.
pub const SPEED: &str = "Precision, memory and speed";
/// Uploads to the hub.
pub const HUB: &str = "Hugging Face hub";
/// Several ranks.
pub const DIST: &str = "Several ranks";
/// Settings of programs that train nothing.
pub const RUN: &str = "Run";

/// All headings, in the order of `--help`.
pub const HEADINGS: [&str; 20] = [
    MODELS,
    DATA,
    REWARDS,
    ENVIRONMENTS,
    SAMPLING,
    BATCHES,
    ADVANTAGES,
    KL,
    LOSS,
    CRITIC,
    OPTIMIZER,
    LORA,
    EVALUATION,
    CHECKPOINTS,
    LOGGING,
    ALARMS,
    SPEED,
    HUB,
    DIST,
    RUN,
];

/// Default value of an optional flag that is unset.
pub const NONE: &str = "none";

/// The largest count or size, unless a setting has another: larger than any in use, and small enough that sums and products of a few fit in
/// 64 bits.
pub const MOST: u64 = i32::MAX as u64;
/// The largest number of rows of a batch.
pub const MOST_ROWS: u64 = 1 << 20;
/// The largest number of responses of a run.
pub const MOST_EPISODES: u64 = 1 << 40;
/// The largest number of tokens of a response or a prompt: above any model's context.
pub const MOST_TOKENS: u64 = 1 << 20;
/// The largest number of ranks, machines or restarts: above any cluster, and far below an overflow.
pub const MOST_RANKS: u64 = 100_000;
/// The largest number of concurrent requests to a service; each has a thread.
pub const MOST_REQUESTS: u64 = 1024;
/// The largest TCP port.
pub const MOST_PORT: u64 = u16::MAX as u64;
/// The largest token id: any id is allowed.
pub const ANY_ID: u64 = i64::MAX as u64;
/// The largest whole number that is no count, such as a seed: any number is allowed.
pub const ANY: u64 = u64::MAX;

/// Whether a run that resumes from a checkpoint may change a setting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ResumeClass {
    /// It may not: results depend on it.
    #[default]
    Kept,
    /// It may: no result depends on it.
    Free,
    /// It may, with a warning: results depend on it by rounding at most.
    Rounding,
    /// It may, to extend a finished run.
    Length,
    /// It may; the best model so far is forgotten.
    Best,
    /// It may where the batch sizes over all ranks stay the same.
    Sizes,
}

/// Whether a replay of an update may change a setting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplayClass {
    /// It may not: a replay continues from the run's checkpoint.
    #[default]
    Kept,
    /// It may: the setting acts after responses are sampled and scored.
    Changes,
    /// It may not: the setting decides which responses an update has.
    Sampling,
    /// It may not: a replay has the recorded scores.
    Scores,
    /// It may not: the setting changes nothing of one update.
    Later,
}

/// A group of settings.
pub trait Settings: Sized {
    /// Appends the descriptions of the settings to `fields`, in the order of the struct.
    fn describe(fields: &mut Vec<Field>);

    /// Reads the settings from `values`; those that have no value get their default.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) for a value that is not one of its setting, and for a required setting without a value.
    fn read(values: &Values<'_>) -> Result<Self>;

    /// Returns the descriptions of the settings.
    fn fields() -> Vec<Field> {
        let mut fields = Vec::new();
        Self::describe(&mut fields);
        fields
    }
}

/// Returns the values of the setting with a name, as text; `None` if it is not set.
pub type Values<'v> = dyn Fn(&str) -> Option<Vec<String>> + 'v;

/// The number of values of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One.
    One,
    /// One, `true` or `false`: a flag that may stand alone.
    Switch,
    /// One, or [`NONE`].
    Optional,
    /// Any number.
    List,
}

/// The description of a setting. The table of this module says where each part comes from.
#[derive(Debug, Clone)]
pub struct Field {
    /// Name.
    pub name: &'static str,
    /// Further names.
    pub aliases: &'static [&'static str],
    /// Help text, without a full stop at its end.
    pub help: &'static str,
    /// Heading in the help.
    pub heading: &'static str,
    /// Placeholder of a value in the help.
    pub value_name: &'static str,
    /// Type of a value.
    pub kind: Kind,
    /// Number of values.
    pub shape: Shape,
    /// Default, as it is written; none if the setting is required, or a list.
    pub default: Option<String>,
    /// Whether the setting must be set.
    pub required: bool,
    /// Whether it is a word of the command line without a flag.
    pub positional: bool,
    /// Whether the help leaves it out.
    pub hidden: bool,
    /// Whether all values of a list follow its flag.
    pub several: bool,
    /// Whether a value follows `=` only.
    pub equals: bool,
    /// Value of a flag that stands alone.
    pub alone: Option<&'static str>,
    /// Letter between the values of a list.
    pub delimiter: Option<char>,
    /// The values to choose from; empty if they have no names.
    pub choices: Vec<Choice>,
    /// Whether the help and the errors of a flag list the choices.
    pub listed: bool,
    /// Checks a value; the error says what is expected.
    pub check: fn(&str) -> Result<(), String>,
    /// Description in the short help, `-h`; empty for settings that it leaves out.
    pub short: &'static str,
    /// The largest whole number.
    pub most: u64,
    /// Whether a resumed run may change it.
    pub resume: ResumeClass,
    /// Whether a replay may change it.
    pub replay: ReplayClass,
}

/// Returns the name of a setting: the last field of a path, which the compiler knows.
///
/// ```
/// # struct Kl { kl_coef: f64 }
/// # struct Config { kl: Kl }
/// # let config = Config { kl: Kl { kl_coef: 0.05 } };
/// assert_eq!(rlhf_base::name_of!(config.kl.kl_coef), "kl_coef");
/// ```
#[macro_export]
macro_rules! name_of {
    (@last $last:ident) => { stringify!($last) };
    (@last $first:ident . $($rest:tt)+) => { $crate::name_of!(@last $($rest)+) };
    ($($path:tt)+) => {{
        let _ = || &$($path)+;
        $crate::name_of!(@last $($path)+)
    }};
}

/// Returns `C` with the defaults of its settings, and "." wherever a value is required.
pub fn defaults<C: Settings>() -> C {
    defaults_with(&[])
}

/// Returns [`defaults`], with other defaults for the `settings` of these names.
///
/// # Panics
/// If a default is not a value of its setting.
pub fn defaults_with<C: Settings>(settings: &[(&'static str, &'static str)]) -> C {
    let required: Vec<&str> = C::fields().iter().filter(|field| field.required).map(|field| field.name).collect();
    let value = |name: &str| {
        let other = settings.iter().rev().find(|(setting, _)| *setting == name).map(|(_, value)| *value);
        other.or_else(|| required.contains(&name).then_some(".")).map(|value| vec![value.to_string()])
    };
    C::read(&value).expect("every setting has a default that it accepts")
}

/// Refuses a number of the setting `name` of `C` that is above the largest of its description.
pub fn at_most<C: Settings>(name: &str, value: usize) -> Result<()> {
    let most = C::fields().iter().find(|field| field.name == name).map_or(MOST, |field| field.most);
    expect(value as u64 <= most, name, value, &format!("at most {most}"))
}

/// Reads the setting `name`, whose last value counts.
///
/// # Errors
/// [`Error::Refused`](crate::Error::Refused) if `parse` refuses the value, or if there is none and no default.
pub fn one<T>(
    values: &Values<'_>,
    name: &str,
    default: Option<String>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T> {
    let Some(text) = values(name).and_then(|mut words| words.pop()).or(default) else {
        return refuse(name, ": expected a value");
    };
    parse(&text).or_else(|expected| refuse(name, format!(" = {text}: {expected}")))
}

/// Reads the setting `name`, a list.
///
/// # Errors
/// [`Error::Refused`](crate::Error::Refused) if `parse` refuses a value.
pub fn many<T>(
    values: &Values<'_>,
    name: &str,
    default: Option<String>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>> {
    let words = values(name).unwrap_or_else(|| default.into_iter().collect());
    let parsed =
        words.iter().map(|text| parse(text).or_else(|expected| refuse(name, format!(" = {text}: {expected}"))));
    parsed.collect()
}
