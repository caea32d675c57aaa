//! Parses the rewards of a configuration, and loads them.

use super::http::TOKEN;
use super::optional::{Optional, split};
use super::rules::KINDS;
use super::settings::RewardSourcesConfig;
use super::sources::{function_files, program_files};
use super::trl::{self, TrlFunction, TrlReward};
use super::{
    CommandReward, FnReward, HttpReward, HttpSettings, Normalize, RetryPolicy, Reward, RewardModel, Rewards, Rule,
    ScoreTransform,
};
use rlhf_base::safe_text::beginning;
use rlhf_base::schema::{Refusals, all, defaults, no_effect, refuse};
use rlhf_base::{Error, Result};
use rlhf_hub as hub;
use rlhf_lm::model::ModelOptions;
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::Value;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Descriptions of programs and services in the model card: command lines and URLs may contain secrets.
const PROGRAM: &str = "a program";
const SERVICE: &str = "a service";

/// The kinds of rewards that are not rules.
const NOT_RULES: [&str; 4] = ["model", "command", "url", "python"];

/// One reward of a configuration. Its text is parsed by [`specs`] alone, where the settings are checked.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    name: String,
    kind: Kind,
    transform: ScoreTransform,
    /// Description in the model card.
    about: String,
}

#[derive(Debug, Clone)]
enum Kind {
    Model {
        path: PathBuf,
        /// Branch, tag or commit on the hub.
        revision: Option<String>,
        label: Option<String>,
    },
    Command(String),
    /// A Python function, `module.function`.
    Python(String),
    Url(String),
    Rule(Optional<Rule>),
    Trl(Optional<TrlReward>),
    /// A program or service whose scores a run has recorded.
    Recorded,
}

impl Spec {
    /// The name of the reward.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The folder or name of the model, if the reward is one.
    pub(crate) fn model_path(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Model { path, .. } => Some(path),
            _ => None,
        }
    }

    /// The name of the reward and its [`Spec::model_path`].
    pub(crate) fn named_model(&self) -> Option<(&str, &Path)> {
        Some((self.name.as_str(), self.model_path()?))
    }

    /// The contents that decide its scores in addition to the settings, as far as they are known before it is loaded, by the names of their
    /// files; see [`Reward::contents`].
    pub(crate) fn contents(&self) -> Vec<(String, Vec<u8>)> {
        match &self.kind {
            Kind::Command(line) => program_files(line),
            Kind::Python(function) => function_files(function),
            Kind::Rule(rule) => rule.contents(),
            _ => Vec::new(),
        }
    }

    /// The reward in a replay: a program is not started again, and a service gets no requests.
    pub(crate) fn recorded(self) -> Self {
        if self.is_outside() { Self { kind: Kind::Recorded, ..self } } else { self }
    }

    /// Returns true if the reward is a service.
    pub(crate) fn is_service(&self) -> bool {
        matches!(self.kind, Kind::Url(_))
    }

    /// Returns true if the reward is a service or a program, which have timeouts; a Python function is called by a program.
    pub(crate) fn is_outside(&self) -> bool {
        self.is_service() || matches!(self.kind, Kind::Command(_) | Kind::Python(_))
    }

    /// [`Rewards::check_row`] before the reward is loaded; only rules and functions of TRL read columns of a row.
    pub(crate) fn check_row(&self, row: &Value) -> Result<()> {
        let checked = match &self.kind {
            Kind::Rule(rule) => rule.check_row(row),
            Kind::Trl(function) => function.check_row(row),
            _ => Ok(()),
        };
        checked.map_err(|e| Error::Run(format!("reward `{}`: {e}", self.name)))
    }

    /// Imports the Python function of the reward, if it has one, and ends its program again.
    ///
    /// # Errors
    /// If it cannot be imported.
    pub(crate) fn check_import(&self, settings: &RewardSourcesConfig) -> Result<()> {
        let Kind::Python(function) = &self.kind else { return Ok(()) };
        imported(&self.name, function, settings).map(drop)
    }

    /// The name of the reward and the column that it reads, if rows may lack it.
    pub(crate) fn optional_column(&self) -> Option<(String, String)> {
        let column = match &self.kind {
            Kind::Rule(rule) => rule.column.clone(),
            Kind::Trl(function) => function.column.clone(),
            _ => None,
        };
        Some((self.name.clone(), column?))
    }
}

/// The settings of a command that define its rewards.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RewardSources<'a> {
    /// Folder or name of the reward model with its own flag.
    pub(crate) model: Option<&'a Path>,
    /// Branch, tag or commit of that model on the hub.
    pub(crate) revision: Option<&'a str>,
    /// Label of that model.
    pub(crate) label: Option<&'a str>,
    pub(crate) settings: &'a RewardSourcesConfig,
}

/// Returns the rewards of a configuration in order, those with their own flag first. There may be none.
///
/// # Errors
/// If one is malformed, or a weight, scale, clip or normalization names an unknown reward.
fn specs<'a>(sources: impl Into<RewardSources<'a>>) -> Result<Vec<Spec>> {
    let sources = sources.into();
    let kinds = kinds(&sources)?;
    let names: Vec<&str> = kinds.iter().map(|(name, ..)| name.as_str()).collect();
    let transforms = transforms(sources.settings, &names)?;
    let spec = |((name, kind, about), transform)| Spec { name, kind, transform, about };
    Ok(kinds.into_iter().zip(transforms).map(spec).collect())
}

/// Returns the rewards of a configuration as [`specs`] does, or no rewards with the error, for checks that continue.
pub(crate) fn specs_or_error<'a>(sources: impl Into<RewardSources<'a>>) -> (Vec<Spec>, Result<()>) {
    match specs(sources) {
        Ok(rewards) => (rewards, Ok(())),
        Err(error) => (Vec::new(), Err(error)),
    }
}

/// Returns name, kind and description of every reward.
fn kinds(sources: &RewardSources<'_>) -> Result<Vec<(String, Kind, String)>> {
    let RewardSources { model, revision, label, settings } = *sources;
    let mut kinds: Vec<(String, Kind, String)> = Vec::new();
    let mut add = |name: &str, kind, about| {
        if kinds.iter().any(|(taken, ..)| taken == name) {
            refuse(
                "reward",
                format!(
                    ": `{name}` is given twice; give one of them another name, as in other={}",
                    if name == "model" { "model:FOLDER" } else { name }
                ),
            )
        } else {
            kinds.push((name.to_string(), kind, about));
            Ok(())
        }
    };
    match (model, label) {
        (Some(path), label) => {
            let revision = revision.map(str::to_string);
            let label = label.map(str::to_string);
            let kind = Kind::Model { path: path.into(), revision, label };
            add("model", kind, format!("`{}`", path.display()))?;
        }
        (None, Some(label)) => {
            refuse("reward_label", format!(" = {label} needs reward_model_path, whose label it is"))?;
        }
        (None, None) => {}
    }
    if let Some(command) = &settings.reward_command {
        add("command", Kind::Command(command.clone()), PROGRAM.into())?;
    }
    if let Some(url) = &settings.reward_url {
        add("url", Kind::Url(url.clone()), SERVICE.into())?;
    }
    let mut refusals = Refusals::default();
    for text in &settings.reward {
        let Err(error) = parse(text).and_then(|(name, kind, about)| add(&name, kind, about)) else { continue };
        if error.refusals().is_empty() {
            return Err(error); // A file that cannot be read.
        }
        error.refusals().into_iter().for_each(|refusal| refusals.push(refusal));
    }
    refusals.end()?;
    Ok(kinds)
}

/// Returns the transform of every reward, in the order of `names`.
fn transforms(settings: &RewardSourcesConfig, names: &[&str]) -> Result<Vec<ScoreTransform>> {
    let number = |text: &str| text.parse().ok().filter(|x: &f64| x.is_finite());
    let normalize = |text: &str| match text {
        "std" => Some(Normalize::Std),
        "mean_std" => Some(Normalize::MeanStd),
        "none" => Some(Normalize::None),
        _ => None,
    };
    let above_zero = |text: &str| number(text).filter(|&x| x > 0.0);
    let weights = by_name("reward_weights", &settings.reward_weights, names, "a number", number)?;
    let scales = by_name("reward_scale", &settings.reward_scale, names, "a number", number)?;
    let clips = by_name("reward_clip", &settings.reward_clip, names, "a number above 0", above_zero)?;
    let normalized =
        by_name("reward_normalize", &settings.reward_normalize, names, "std, mean_std or none", normalize)?;
    let transforms = weights.into_iter().zip(scales).zip(clips).zip(normalized);
    let transforms = transforms.map(|(((weight, scale), clip), normalize)| ScoreTransform {
        normalize: normalize.unwrap_or(Normalize::None),
        scale: scale.unwrap_or(1.0),
        clip,
        weight: weight.unwrap_or(1.0),
    });
    Ok(transforms.collect())
}

/// Returns the part of a malformed reward that is safe to show: not a command line or a URL.
fn public(text: &str) -> String {
    let end = text.find(|c: char| c == ':' || c == '?' || c == '@' || c.is_whitespace()).unwrap_or(text.len());
    let more = if end < text.len() { "..." } else { "" };
    format!("{}{more}", beginning(&text[..end], 80))
}

/// Returns true if `text` is a Python module and the name of a function in it, `module.function`.
pub fn is_function_path(text: &str) -> bool {
    let is_name = |part: &str| {
        !part.starts_with(|c: char| c.is_ascii_digit())
            && !part.is_empty()
            && part.chars().all(|c| c == '_' || c.is_alphanumeric())
    };
    text.contains('.') && !text.ends_with(".py") && text.split('.').all(is_name)
}

/// Returns the message about a reward `kind` that is no kind but something that a user of TRL may write there: several rewards, a Python
/// file or function, a model.
fn mistaken(kind: &str, argument: &str) -> Option<String> {
    let is_name = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
    let parts: Vec<&str> = if argument.is_empty() { kind.split(',').map(str::trim).collect() } else { Vec::new() };
    if parts.len() > 1 && parts.iter().all(|part| is_name(part)) {
        let list = parts.join(", ");
        let list = beginning(&list, 200);
        return Some(format!("expected one reward, found several: give a list, [{list}], or repeat the flag for each"));
    }
    let is_folder = argument.is_empty() && Path::new(kind).is_dir();
    let file = kind.strip_suffix(".py").filter(|module| is_name(module));
    let function = match file {
        Some(module) => Some(format!("{}.FUNCTION", module.replace('/', "."))),
        None => (is_function_path(kind) && !is_folder).then(|| kind.to_string()),
    };
    if let Some(function) = function {
        let function = beginning(&function, 200);
        return Some(format!("a function of Python is written as python:{function}"));
    }
    let is_hub_name = argument.is_empty() && kind.contains('/') && is_name(kind) && !Path::new(kind).is_file();
    let is_model = is_folder || is_hub_name;
    is_model.then(|| format!("expected a kind of reward; a model is written as model:{}", public(kind)))
}

/// Rewards of open-r1 by their names, with the corresponding rewards here.
const OPEN_R1: [(&str, &str); 8] = [
    ("accuracy", "accuracy_reward"),
    ("format", "think_format_reward"),
    ("cosine", "get_cosine_scaled_reward"),
    ("repetition_penalty", "get_repetition_penalty_reward"),
    ("soft_overlong_punishment", "get_soft_overlong_punishment"),
    ("reasoning_steps", "a function of yours, python:MODULE.FUNCTION"),
    ("tag_count", "a function of yours, python:MODULE.FUNCTION"),
    ("code", "a program of yours, command:LINE"),
];

/// Returns a hint at the reward that is probably meant by the unknown kind `kind`.
fn hint(kind: &str) -> String {
    match (OPEN_R1.iter().find(|(name, _)| *name == kind), nearest(kind)) {
        (Some((name, ours)), _) => format!("; `{name}` is open-r1's: here it is {ours}"),
        (None, Some(near)) => format!("; did you mean `{near}`?"),
        (None, None) => String::new(),
    }
}

/// Returns the kind of reward that `kind` is probably a misspelling of: at most one letter in five differs.
fn nearest(kind: &str) -> Option<&'static str> {
    let known = NOT_RULES.iter().chain(&KINDS).chain(&trl::KINDS).copied();
    let distances = known.map(|name| (strsim::osa_distance(kind, name), name));
    distances.filter(|(wrong, _)| *wrong <= (kind.len() / 5).max(1)).min().map(|(_, name)| name)
}

/// Parses `KIND` or `KIND:ARGUMENT`, optionally after `NAME=`; returns name, kind and description.
fn parse(text: &str) -> Result<(String, Kind, String)> {
    let (head, argument) = text.split_once(':').unwrap_or((text, ""));
    let function = argument.rsplit('.').next().filter(|_| head == "python" && is_function_path(argument));
    let (name, kind) = head.split_once('=').unwrap_or_else(|| (function.unwrap_or(trl::name(head)), head));
    let is_kind = NOT_RULES.contains(&kind) || KINDS.contains(&kind) || trl::KINDS.contains(&kind);
    if let Some(meant) = mistaken(kind, argument).filter(|_| !is_kind) {
        return refuse("reward", format!(" = {}: {meant}", public(text)));
    }
    // The name of a Python lambda is <lambda>.
    let sound = |c: char| c.is_ascii_alphanumeric() || "_-.<>".contains(c);
    if name.is_empty() || !name.chars().all(sound) {
        let found = public(text);
        return refuse("reward", format!(" = {found}: expected a name of letters, digits, _, - and ., found another"));
    }
    let needs = |what: &str| {
        if argument.is_empty() { refuse("reward", format!(" = {text}: expected {what} after {kind}:")) } else { Ok(()) }
    };
    let about = |argument: &str| {
        if argument.is_empty() { kind.to_string() } else { format!("`{kind}:{argument}`") }
    };
    let (kind, about) = match kind {
        "model" => {
            needs("a folder or a hub name")?;
            let (path, label) = argument.rsplit_once('#').map_or((argument, None), |(path, label)| (path, Some(label)));
            (Kind::Model { path: path.into(), revision: None, label: label.map(str::to_string) }, about(argument))
        }
        "command" => {
            needs("a command line")?;
            (Kind::Command(argument.to_string()), PROGRAM.into())
        }
        "url" => {
            needs("an address")?;
            (Kind::Url(argument.to_string()), SERVICE.into())
        }
        "python" => {
            if !is_function_path(argument) {
                // A command line is not shown, as it may contain secrets.
                let is_word = argument.chars().all(|c| c.is_alphanumeric() || "_.".contains(c));
                let found = if is_word { beginning(text, 80).to_string() } else { public(text) };
                return refuse(
                    "reward",
                    format!(
                        " = {found}: expected the module and the name of a function, as in python:my_rewards.length"
                    ),
                );
            }
            (Kind::Python(argument.to_string()), about(argument))
        }
        rule if KINDS.contains(&rule) => {
            let (argument_rest, is_optional) = split(rule, argument)?;
            (Kind::Rule(Optional::new(Rule::parse(rule, &argument_rest)?, Rule::column, is_optional)), about(argument))
        }
        function if trl::KINDS.contains(&function) => {
            let (argument_rest, is_optional) = split(function, argument)?;
            let reward = TrlReward::new(TrlFunction::parse(function, &argument_rest)?);
            (Kind::Trl(Optional::new(reward, TrlReward::column, is_optional)), about(argument))
        }
        other => {
            return refuse(
                "reward",
                format!(
                    " = {}: expected one of {}, {}, {}, found {:?}{}",
                    public(text),
                    NOT_RULES.join(", "),
                    KINDS.join(", "),
                    trl::KINDS.join(", "),
                    public(other),
                    hint(other)
                ),
            );
        }
    };
    Ok((name.to_string(), kind, about))
}

/// Parses entries `NAME=VALUE`, `VALUE` for all rewards, or as many values as there are rewards, in their order; returns the values in
/// the order of `names`. The last entry for a name counts.
fn by_name<T: Copy>(
    flag: &str,
    entries: &[String],
    names: &[&str],
    expected: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Vec<Option<T>>> {
    let mut values = vec![None; names.len()];
    // TRL's form: a list of weights.
    let by_position = entries.len() > 1 && entries.iter().all(|entry| !entry.contains('='));
    if by_position && entries.len() != names.len() {
        return refuse(
            flag,
            format!(
                " = {}: expected one value for each reward, of which there are {}: {}",
                entries.join(","),
                names.len(),
                names.join(", ")
            ),
        );
    }
    for (at, entry) in entries.iter().enumerate() {
        let (name, value) =
            entry.split_once('=').map_or((None, entry.as_str()), |(name, value)| (Some(name.trim()), value));
        let Some(value) = parse(value.trim()) else {
            return refuse(flag, format!(" = {entry}: expected NAME=VALUE with {expected}"));
        };
        let is_meant = |place: &usize| match name {
            Some(name) => name == names[*place],
            None => !by_position || *place == at,
        };
        let mut places = (0..names.len()).filter(is_meant).peekable();
        if places.peek().is_none() {
            let known = if names.is_empty() { "none".to_string() } else { names.join(", ") };
            return refuse(flag, format!(" = {entry}: expected the name of a reward, of which there are: {known}"));
        }
        places.for_each(|place| values[place] = Some(value));
    }
    Ok(values)
}

/// Downloads the hub models among `specs`, and returns the rewards with folders instead of names.
///
/// # Errors
/// If a model does not exist.
pub(crate) fn resolve(specs: &[Spec]) -> Result<Vec<Spec>> {
    let mut specs = specs.to_vec();
    for spec in &mut specs {
        if let Kind::Model { path, revision, .. } = &mut spec.kind {
            *path = hub::model_dir(path, revision.as_deref())?;
        }
    }
    Ok(specs)
}

impl RewardSourcesConfig {
    /// Refuses settings of programs and services if none of `rewards` is one.
    pub(crate) fn check_outside(&self, rewards: &[Spec]) -> Result<()> {
        let usual: Self = defaults();
        let has_service = rewards.iter().any(Spec::is_service);
        let has_outside = rewards.iter().any(Spec::is_outside);
        let without_service = "without a reward that is a service";
        let unused = |name, value: &dyn Display, differs: bool| {
            if differs && !has_service { no_effect(name, value, without_service) } else { Ok(()) }
        };
        let without_outside = "without a reward that is a program or a service";
        let unwaited = |name, value: &dyn Display, differs: bool| {
            if differs && !has_outside { no_effect(name, value, without_outside) } else { Ok(()) }
        };
        let has_model = rewards.iter().any(|reward| reward.model_path().is_some());
        let label = &self.reward_label_column;
        let rows = self.reward_batch_size;
        let requests = self.reward_concurrency;
        all([
            if self.reward_pair && !has_model {
                no_effect("reward_pair", true, "without a reward that is a model")
            } else {
                Ok(())
            },
            unused("reward_label_column", label, *label != usual.reward_label_column),
            unused("reward_batch_size", &rows, rows != usual.reward_batch_size),
            unused("reward_concurrency", &requests, requests != usual.reward_concurrency),
            unwaited("reward_timeout", &self.reward_timeout, self.reward_timeout != usual.reward_timeout),
            unwaited("reward_retries", &self.reward_retries, self.reward_retries != usual.reward_retries),
        ])
    }
}

impl Rewards {
    /// Loads the rewards of `specs`: loads models and starts programs.
    ///
    /// A model without a score head gets a random one, seeded by `new_head`. Models score `batch_size` responses at a time.
    ///
    /// # Errors
    /// If one cannot be loaded.
    pub(crate) fn load(
        specs: Vec<Spec>,
        settings: &RewardSourcesConfig,
        new_head: Option<u64>,
        policy: &Tokenizer,
        batch_size: usize,
        options: ModelOptions,
    ) -> Result<Self> {
        let mut rewards = Rewards::new();
        for Spec { name, kind, transform, about } in specs {
            let reward: Box<dyn Reward> = match kind {
                Kind::Model { path, label, .. } => {
                    let label = label.as_deref();
                    let mut model = RewardModel::from_pretrained(&path, label, new_head, policy, batch_size, options)?;
                    if settings.reward_pair {
                        model.read_pairs()?;
                    }
                    Box::new(model)
                }
                Kind::Command(command) => {
                    let mut reward = CommandReward::new(command, retry(settings));
                    // The program initializes while models and prompts are loaded.
                    reward.start()?;
                    Box::new(reward)
                }
                Kind::Python(function) => Box::new(imported(&name, &function, settings)?),
                Kind::Url(url) => Box::new(HttpReward::new(&url, http_settings(settings))?),
                Kind::Rule(rule) => Box::new(rule),
                Kind::Trl(function) => Box::new(function),
                Kind::Recorded => Box::new(FnReward::recorded()),
            };
            rewards.push(&name, reward, transform, about);
        }
        Ok(rewards)
    }
}

/// Returns the reward `name` that is a Python function, imported.
///
/// # Errors
/// If it cannot be imported.
fn imported(name: &str, function: &str, settings: &RewardSourcesConfig) -> Result<CommandReward> {
    let mut reward = CommandReward::python(function, retry(settings));
    let named = |e: Error| Error::Reward { name: name.into(), source: Box::new(e) };
    reward.start().map_err(named)?;
    Ok(reward)
}

fn retry(settings: &RewardSourcesConfig) -> RetryPolicy {
    RetryPolicy {
        timeout: Duration::from_secs_f64(settings.reward_timeout),
        attempts: u32::try_from(settings.reward_retries).unwrap_or(u32::MAX).saturating_add(1),
        ..RetryPolicy::default()
    }
}

fn http_settings(settings: &RewardSourcesConfig) -> HttpSettings {
    HttpSettings {
        token: std::env::var(TOKEN).ok().map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
        label_column: settings.reward_label_column.clone(),
        batch_size: settings.reward_batch_size,
        concurrency: settings.reward_concurrency,
        retry: retry(settings),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(change: impl FnOnce(&mut RewardSourcesConfig)) -> RewardSourcesConfig {
        let mut config = rlhf_base::schema::defaults();
        change(&mut config);
        config
    }

    fn sources(settings: &RewardSourcesConfig) -> RewardSources<'_> {
        RewardSources { model: None, revision: None, label: None, settings }
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| text.to_string()).collect()
    }

    #[test]
    fn every_form_of_a_reward_is_parsed_in_order_with_its_transform() {
        let mut config = config(|c| {
            c.reward_command = Some("python3 reward.py".into());
            c.reward_url = Some("http://host/score?key=1".into());
            c.reward = texts(&["length:target=40", "tags=regex:<a=b>:", "model:other#POSITIVE", "json"]);
            c.reward.extend(texts(&["python:my.rewards.short", "mine=python:my.rewards.short"]));
            c.reward_weights = texts(&["0.5", "length=-2"]);
            c.reward_clip = texts(&["model=5"]);
            c.reward_normalize = texts(&["url=mean_std", "url=std"]);
        });
        config.reward_scale = texts(&["json=3"]);
        let specs = specs(sources(&config)).unwrap();
        let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!(names, ["command", "url", "length", "tags", "model", "json", "short", "mine"]);
        let weights: Vec<f64> = specs.iter().map(|spec| spec.transform.weight).collect();
        assert_eq!(weights, [0.5, 0.5, -2.0, 0.5, 0.5, 0.5, 0.5, 0.5]);
        assert!(specs[6..].iter().all(|spec| matches!(&spec.kind, Kind::Python(path) if path == "my.rewards.short")));
        assert!(
            matches!(&specs[3].kind, Kind::Rule(Optional { reward: Rule::Regex(regex), .. }) if regex.as_str() == "<a=b>:")
        );
        assert!(matches!(&specs[4].kind, Kind::Model { path, label: Some(label), .. }
            if path.to_str() == Some("other") && label == "POSITIVE"));
        assert_eq!((specs[4].transform.clip, specs[5].transform.scale), (Some(5.0), 3.0));
        assert_eq!(specs[1].transform.normalize, Normalize::Std, "the last one counts");
        config.reward_weights = texts(&["1", "2", "3", "-4", "5", "0.5", "6", "7"]);
        let weights = super::specs(sources(&config)).unwrap().into_iter().map(|spec| spec.transform.weight);
        assert_eq!(weights.collect::<Vec<_>>(), [1.0, 2.0, 3.0, -4.0, 5.0, 0.5, 6.0, 7.0]);
        let cards = specs[..2].iter().map(|spec| spec.about.as_str());
        assert_eq!(Vec::from_iter(cards), ["a program", "a service"], "the model card has no secrets");
    }

    #[test]
    fn a_misspelled_kind_of_reward_is_answered_with_the_nearest_one() {
        for (wrong, near) in [("acuracy_reward", "accuracy_reward"), ("lenght:target=4", "length"), ("n=jsn", "json")] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.ends_with(&format!("; did you mean `{near}`?")), "{error}");
        }
        assert!(!parse("rhyme").unwrap_err().to_string().contains("did you mean"));
        let folder = tempfile::tempdir().unwrap();
        let error = parse(folder.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("a model is written as model:/"), "{error}");
    }

    #[test]
    fn malformed_rewards_are_refused() {
        for (rewards, weights, message) in [
            (&["rhyme"][..], &[][..], "reward = rhyme: expected one of model, command, url, python, length, regex"),
            (&["python:length"], &[], "reward = python:length: expected the module and the name of a function"),
            (&["mine=python:a..b"], &[], "reward = mine=python:a..b: expected the module and the name of a function"),
            (
                &["python:my.py --token secret"],
                &[],
                "reward = python...: expected the module and the name of a function",
            ),
            (&["python:"], &[], "reward = python:: expected the module and the name of a function"),
            (&["a b=json"], &[], "reward = a...: expected a name of letters"),
            (&["uri:http://h/?key=secret"], &[], "reward = uri...: expected one of model, command, url"),
            (&["judge=http://h/?key=secret"], &[], "reward = judge=http...: expected one of model, command, url"),
            (&["h/?key=secret"], &[], "reward = h/...: expected a name of letters"),
            (&["key=./judge --key secret"], &[], "reward = key=./judge...: expected one of model, command, url"),
            (&["rf.py"], &[], "reward = rf.py: a function of Python is written as python:rf.FUNCTION"),
            (
                &["mine=rf.reward_func"],
                &[],
                "reward = mine=rf.reward_func: a function of Python is written as python:rf.reward_func",
            ),
            (&["rf.py:reward_func"], &[], "reward = rf.py...: a function of Python is written as python:rf.FUNCTION"),
            (&["a/b-v2.1"], &[], "reward = a/b-v2.1: expected a kind of reward; a model is written as model:a/b-v2.1"),
            (
                &["json, length"],
                &[],
                "reward = json,...: expected one reward, found several: give a list, [json, length]",
            ),
            (&["model:"], &[], "reward = model:: expected a folder or a hub name after model:"),
            (&["json", "json:a"], &[], "reward: `json` is given twice; give one of them another name"),
            (&["json"], &["x=1"], "reward_weights = x=1: expected the name of a reward, of which there are: json"),
            (&["json"], &["json=much"], "reward_weights = json=much: expected NAME=VALUE with a number"),
            (&[], &["1"], "reward_weights = 1: expected the name of a reward, of which there are: none"),
            (
                &["json", "length:9"],
                &["1", "2", "3"],
                "reward_weights = 1,2,3: expected one value for each reward, of which there are 2: json, length",
            ),
            (&["length:x"], &[], "reward = length:x: expected a length above 0"),
        ] {
            let config = config(|c| (c.reward, c.reward_weights) = (texts(rewards), texts(weights)));
            let error = specs(sources(&config)).unwrap_err();
            assert!(error.to_string().starts_with(message) && !error.to_string().contains("secret"), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
        let config = config(|_| ());
        assert!(specs(sources(&config)).unwrap().is_empty());
        let labelled = RewardSources { label: Some("POSITIVE"), ..sources(&config) };
        assert!(
            specs(labelled).unwrap_err().to_string().starts_with("reward_label = POSITIVE needs reward_model_path")
        );
    }
}
