//! Rewards: models, rules, programs, services and closures that score responses, and their weighted sum.

mod address;
mod client;
mod command;
mod http;
mod lines;
mod model;
mod optional;
mod printed;
mod retry;
mod rules;
mod scaling;
pub(crate) mod settings;
mod sources;
mod spec;
mod state;
mod trl;

pub(crate) use address::without_query;
pub(crate) use client::Client;
pub use command::CommandReward;
pub(crate) use command::{DRIVER, EXIT_WAIT, MAX_STDERR_LINE, RestartedProgram, STDERR_LINES, read_lines};
pub use http::{HttpReward, HttpSettings};
pub use math_verify::{Solution, Verdict};
pub use model::RewardModel;
pub(crate) use optional::check_columns;
pub use retry::RetryPolicy;
pub(crate) use retry::{Failure, Retries, excerpt};
pub use rules::Rule;
pub use scaling::{Moments, Normalize, ScoreScaling, ScoreTransform};
pub(crate) use settings::LONGEST_TIMEOUT;
pub use settings::{RewardSourcesConfig, ScoreScalingConfig};
pub(crate) use sources::{function_files, program_files};
pub use spec::is_function_path;
pub(crate) use spec::{RewardSources, Spec, resolve, specs_or_error};
pub use state::TrainerState;
pub use trl::{TrlFunction, TrlReward};

use crate::data::{Episode, Prompt};
use printed::joined_columns;
use retry::{RETRIES, check};
use rlhf_base::dist::{World, ZeroStage};
use rlhf_base::metrics::Metrics;
use rlhf_base::offload::Offload;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{FinishReason, Response};
use rlhf_lm::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::Instant;
use tch::{Device, Tensor};

/// Scores of responses, in the form that a rollout takes.
#[derive(Debug)]
pub struct Scores {
    /// One score per response, `[B]` f32.
    pub responses: Tensor,
    /// One score per token, one row per response, if a reward returns scores per token.
    pub tokens: Option<Vec<Vec<f32>>>,
}

impl Scores {
    /// Returns the total score of each response, `[B]` f32.
    pub(crate) fn totals(&self) -> Tensor {
        let Some(tokens) = &self.tokens else { return self.responses.shallow_clone() };
        let sums: Vec<f32> = tokens.iter().map(|scores| scores.iter().sum()).collect();
        &self.responses + Tensor::from_slice(&sums).to(self.responses.device())
    }
}

impl From<Tensor> for Scores {
    fn from(responses: Tensor) -> Self {
        Self { responses, tokens: None }
    }
}

/// One response and its context, the input of a reward.
#[derive(Debug, Clone, Copy)]
pub struct RewardInput<'a> {
    /// Text of the prompt.
    pub prompt: &'a str,
    /// Text of the response, without special tokens; with an environment, the content of its last turn.
    pub response: &'a str,
    /// Token ids of the prompt.
    pub prompt_ids: &'a [i64],
    /// Token ids of the response, the stop token included.
    pub response_ids: &'a [i64],
    /// Why the response ended.
    pub finish: FinishReason,
    /// The prompt's row of the dataset.
    pub row: &'a Value,
    /// The turns of the response and the messages of its environment; `None` without an environment.
    pub episode: Option<&'a Episode>,
}

impl RewardInput<'_> {
    /// Returns why the response ended, as `rlhf generate` writes it: `stop` or `length`.
    pub fn finish_reason(&self) -> &'static str {
        match self.finish {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// The score of one response.
#[derive(Debug, Clone, PartialEq)]
pub enum Score {
    /// One number for the whole response; `score_position` sets the token that receives it.
    Response(f64),
    /// One number per token of the response.
    Tokens(Vec<f64>),
    /// No score, for a response that the reward does not apply to. It adds nothing to the sum of the rewards, and is not counted
    /// in the reward's metrics and running moments.
    Absent,
}

impl Score {
    /// Returns the numbers: one, one per token, or none.
    pub fn numbers(&self) -> &[f64] {
        match self {
            Score::Response(score) => std::slice::from_ref(score),
            Score::Tokens(scores) => scores,
            Score::Absent => &[],
        }
    }

    /// Returns the sum of the numbers; NaN for an absent score.
    pub fn total(&self) -> f64 {
        match self {
            Score::Absent => f64::NAN,
            score => score.numbers().iter().sum(),
        }
    }
}

impl From<f64> for Score {
    fn from(score: f64) -> Self {
        Score::Response(score)
    }
}

impl From<Vec<f64>> for Score {
    fn from(scores: Vec<f64>) -> Self {
        Score::Tokens(scores)
    }
}

impl<S: Into<Score>> From<Option<S>> for Score {
    /// `None` is an absent score.
    fn from(score: Option<S>) -> Self {
        score.map_or(Score::Absent, Into::into)
    }
}

/// Receives a warning, from any thread.
pub type Warn = Arc<dyn Fn(&str) + Send + Sync>;

/// Scores responses.
pub trait Reward: Send {
    /// Returns one score per response, in order.
    ///
    /// # Errors
    /// If a response cannot be scored. [`Rewards`] checks the number of scores and that they are finite.
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>>;

    /// Checks that a row of the dataset has the columns that this reward reads. Called for every row before training.
    ///
    /// # Errors
    /// If a column is missing or malformed.
    fn check_row(&self, _row: &Value) -> Result<()> {
        Ok(())
    }

    /// Returns the contents that decide the scores in addition to the settings, by the names of their files: a resumed run must have the
    /// same.
    fn contents(&self) -> Vec<(String, Vec<u8>)> {
        Vec::new()
    }

    /// Returns additional metrics of the last batch; they are logged as `reward/NAME/KEY`.
    fn extra(&self) -> Vec<(String, f64)> {
        Vec::new()
    }

    /// Returns further columns of the last batch, with one value per response; they are shown beside its samples.
    fn columns(&self) -> Vec<(String, Vec<Value>)> {
        Vec::new()
    }

    /// Ends whatever the reward has started, after its last batch. It may be called again, and another batch starts the reward anew.
    ///
    /// # Errors
    /// If it turns out that scores of earlier batches belong to other responses.
    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    /// Sets the receiver of warnings about failures that are tried again; messages call the reward `name`.
    fn warn_by(&mut self, _name: &str, _warn: Warn) {}

    /// Sets the receiver of the lines that the reward prints, each after `name` and a colon.
    fn print_by(&mut self, _name: &str, _print: Warn) {}

    /// Sets the state of the run, before a batch is scored.
    fn set_trainer_state(&mut self, _state: &TrainerState) {}

    /// Returns the reward model, if this is one: training checks its input, and may initialize the value model from it.
    fn model(&self) -> Option<&RewardModel> {
        None
    }
}

/// A reward that is a closure.
///
/// ```no_run
/// use rlhf::reward::FnReward;
///
/// // One number per response; `Vec<Vec<f64>>` would be one per token.
/// let brevity = FnReward::new(|batch| Ok(batch.iter().map(|input| -(input.response.len() as f64)).collect()));
/// ```
pub struct FnReward(Box<Scorer>);

type Scorer = dyn FnMut(&[RewardInput<'_>]) -> Result<Vec<Score>> + Send;

impl FnReward {
    /// Creates a reward that calls `f` with each batch. A score is an `f64`, or a `Vec<f64>` with one number per token, or an
    /// `Option` of one of them, where `None` is an absent score.
    pub fn new<S: Into<Score>>(mut f: impl FnMut(&[RewardInput<'_>]) -> Result<Vec<S>> + Send + 'static) -> Self {
        Self(Box::new(move |batch| Ok(f(batch)?.into_iter().map(Into::into).collect())))
    }

    /// Creates the stand-in for a reward whose scores a run has recorded. It scores nothing.
    pub(crate) fn recorded() -> Self {
        Self::new::<f64>(|_| Err(Error::Run("its scores are in the record of the run: no others are computed".into())))
    }
}

impl Reward for FnReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        (self.0)(batch)
    }
}

/// Result of one call of a reward.
struct Called {
    scores: Vec<Score>,
    seconds: f64,
    extra: Vec<(String, f64)>,
    columns: Vec<(String, Vec<Value>)>,
}

impl Called {
    /// Joins the results of all ranks, in their order: the longest time, and additional metrics as averages over the rows; this rank has
    /// `rows` rows.
    fn gathered(self, world: &World, rows: usize) -> Result<Self> {
        if world.size() == 1 {
            return Ok(self);
        }
        let scores: Vec<SentScore> = self.scores.iter().map(SentScore::from).collect();
        let scores = world.gather(scores)?.into_iter().flatten().map(Score::from).collect();
        // A metric may be infinite or NaN, which JSON cannot carry.
        let sent = |(name, value): (String, f64)| (name, value.is_finite().then_some(value));
        let received = |(name, value): (String, Option<f64>)| (name, value.unwrap_or(f64::NAN));
        let extras: Vec<(usize, Vec<_>)> = world.gather((rows, self.extra.into_iter().map(sent).collect()))?;
        let rank_extra = |(rows, extra): (usize, Vec<_>)| (rows, extra.into_iter().map(received).collect());
        let extra = average_extras(extras.into_iter().map(rank_extra));
        let columns = joined_columns(world.gather((rows, self.columns))?);
        Ok(Self { scores, seconds: world.max_number(self.seconds)?, extra, columns })
    }
}

/// Averages the additional metrics of several batches over their rows; a batch that lacks a metric does not count in its mean. Retries are
/// summed.
fn average_extras(batches: impl IntoIterator<Item = (usize, Vec<(String, f64)>)>) -> Vec<(String, f64)> {
    let mut sums: Vec<(String, f64, f64)> = Vec::new();
    for (rows, extra) in batches.into_iter().filter(|(rows, _)| *rows > 0) {
        let rows = rows as f64;
        for (name, value) in extra {
            match sums.iter_mut().find(|(known, ..)| *known == name) {
                Some((name, sum, _)) if name == RETRIES => *sum += value,
                Some((_, sum, count)) => (*sum, *count) = (*sum + value * rows, *count + rows),
                None if name == RETRIES => sums.push((name, value, 1.0)),
                None => sums.push((name, value * rows, rows)),
            }
        }
    }
    sums.into_iter().map(|(name, sum, rows)| (name, sum / rows)).collect()
}

/// A [`Score`] as ranks send it: the bits of its numbers, which need not be finite.
#[derive(Serialize, Deserialize)]
enum SentScore {
    Response(u64),
    Tokens(Vec<u64>),
    Absent,
}

impl From<&Score> for SentScore {
    fn from(score: &Score) -> Self {
        match score {
            Score::Response(score) => Self::Response(score.to_bits()),
            Score::Tokens(scores) => Self::Tokens(scores.iter().map(|score| score.to_bits()).collect()),
            Score::Absent => Self::Absent,
        }
    }
}

impl From<SentScore> for Score {
    fn from(sent: SentScore) -> Self {
        match sent {
            SentScore::Response(bits) => Self::Response(f64::from_bits(bits)),
            SentScore::Tokens(scores) => Self::Tokens(scores.into_iter().map(f64::from_bits).collect()),
            SentScore::Absent => Self::Absent,
        }
    }
}

/// Numbers in f32, the precision of the models' numbers.
fn f32s(numbers: &[f64]) -> Vec<f32> {
    numbers.iter().map(|&number| number as f32).collect()
}

/// The use of scores, which decides whether running moments normalize them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreUse {
    /// Training: added to the running moments, and normalized by them.
    Training,
    /// Baselines of scores that are trained on: normalized by the current moments, which do not change.
    Baseline,
    /// Samples and evaluations: not normalized, so that they are comparable over a run.
    Report,
}

impl ScoreUse {
    fn is_normalized(self) -> bool {
        self != Self::Report
    }
}

/// One reward of [`Rewards`].
struct Component {
    name: String,
    reward: Box<dyn Reward>,
    transform: ScoreTransform,
    moments: Moments,
    /// Description in the model card.
    about: String,
}

impl Component {
    /// Calls the reward, checks its scores, and adds scores that are trained on to the running moments. Also returns the seconds
    /// that the call took.
    fn score(&mut self, batch: &[RewardInput<'_>], usage: ScoreUse, world: &World) -> Result<Called> {
        let start = Instant::now();
        let local_batch = &batch[world.share(batch.len())];
        // All ranks call a model, whose passes they may share; a program or a service gets no empty batch.
        let called = if local_batch.is_empty() && world.size() > 1 && self.reward.model().is_none() {
            Ok(Vec::new())
        } else {
            self.reward.score(local_batch)
        };
        let scores = called.and_then(|scores| match check(&scores, local_batch) {
            Ok(()) => Ok(scores),
            Err(failure) => Err(Error::Run(failure.describe(local_batch))),
        });
        let scores = scores.map_err(|e| match e {
            Error::Stopped { message, code } => {
                Error::Stopped { message: format!("reward `{}`: {message}", self.name), code }
            }
            e => Error::Reward { name: self.name.clone(), source: Box::new(e) },
        });
        let extra = self.reward.extra();
        let columns = self.reward.columns();
        let called = Called { scores: world.agree(scores)?, seconds: start.elapsed().as_secs_f64(), extra, columns };
        let called = called.gathered(world, local_batch.len())?;
        let scores = &called.scores;
        if usage == ScoreUse::Training && self.transform.normalize != Normalize::None {
            let numbers: Vec<f64> = scores.iter().flat_map(|score| score.numbers().iter().copied()).collect();
            self.moments.update(&numbers);
        }
        Ok(called)
    }

    /// Returns one number, transformed.
    fn transformed(&self, number: f64, usage: ScoreUse) -> f64 {
        self.transform.apply(number, &self.moments, usage.is_normalized())
    }
}

/// The rewards of a run. The score of a response is the weighted sum of their scores.
///
/// ```no_run
/// use rlhf::reward::{FnReward, RewardInput, Rewards, ScoreTransform};
///
/// let brevity = |batch: &[RewardInput<'_>]| Ok(batch.iter().map(|input| -(input.response.len() as f64)).collect());
/// let polite = |batch: &[RewardInput<'_>]| {
///     Ok(batch.iter().map(|input| f64::from(u8::from(input.response.contains("please")))).collect())
/// };
/// let rewards = Rewards::new()
///     .with_transform(
///         "brevity",
///         FnReward::new::<f64>(brevity),
///         ScoreTransform { weight: 0.1, ..ScoreTransform::default() },
///     )
///     .with("polite", FnReward::new::<f64>(polite));
/// assert_eq!(rewards.names().collect::<Vec<_>>(), ["brevity", "polite"]);
/// ```
#[derive(Default)]
pub struct Rewards {
    components: Vec<Component>,
    /// The ranks over which the rows of a batch are divided.
    world: World,
    /// Whether all scores are in the record of a run, so that no program is started.
    is_recorded: bool,
}

impl fmt::Debug for Rewards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.components.iter().map(|c| (&c.name, &c.transform))).finish()
    }
}

impl Rewards {
    /// Creates an empty set of rewards.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty set of rewards whose scores a run has recorded: programs that join them are not started.
    pub(crate) fn recorded() -> Self {
        Self { is_recorded: true, ..Self::default() }
    }

    /// Returns true for the rewards of a replay.
    pub(crate) fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    /// Sets the receiver of warnings about failures that are tried again.
    pub fn warn_by(&mut self, warn: &Warn) {
        self.components.iter_mut().for_each(|component| component.reward.warn_by(&component.name, warn.clone()));
    }

    /// Sets the receiver of the lines that Python functions print.
    pub fn print_by(&mut self, print: &Warn) {
        self.components.iter_mut().for_each(|component| component.reward.print_by(&component.name, print.clone()));
    }

    /// Sets the state of the run, before a batch is scored.
    pub fn set_trainer_state(&mut self, state: &TrainerState) {
        self.components.iter_mut().for_each(|component| component.reward.set_trainer_state(state));
    }

    /// Adds a reward with weight 1. Metrics and errors use `name`.
    #[must_use]
    pub fn with(self, name: &str, reward: impl Reward + 'static) -> Self {
        self.with_transform(name, reward, ScoreTransform::default())
    }

    /// Adds a reward whose scores are transformed by `transform`. Metrics and errors use `name`.
    #[must_use]
    pub fn with_transform(mut self, name: &str, reward: impl Reward + 'static, transform: ScoreTransform) -> Self {
        self.push(name, Box::new(reward), transform, "a function".into());
        self
    }

    /// Adds a reward that [`Rewards::describe`] describes by `about`.
    #[must_use]
    pub(crate) fn with_about(mut self, name: &str, reward: impl Reward + 'static, about: &str) -> Self {
        self.push(name, Box::new(reward), ScoreTransform::default(), about.into());
        self
    }

    /// Adds a reward; appends a number to a name that is taken.
    fn push(&mut self, name: &str, reward: Box<dyn Reward>, transform: ScoreTransform, about: String) {
        let taken = |name: &str| self.components.iter().any(|component| component.name == name);
        let mut unique = name.to_string();
        for number in 2.. {
            if !taken(&unique) {
                break;
            }
            unique = format!("{name}_{number}");
        }
        self.components.push(Component { name: unique, reward, transform, moments: Moments::default(), about });
    }

    /// Appends the rewards of `more`.
    pub(crate) fn extend(&mut self, more: Rewards) {
        for Component { name, reward, transform, about, .. } in more.components {
            self.push(&name, reward, transform, about);
        }
    }

    /// Divides the rows of each batch over the ranks of `world`, which all score the same batches; [`PpoTrainer`] does so.
    ///
    /// [`PpoTrainer`]: crate::train::ppo::PpoTrainer
    pub fn set_world(&mut self, world: &World) {
        self.world = world.clone();
    }

    /// Returns true if there are no rewards.
    pub fn is_empty(&self) -> bool {
        self.components.is_empty()
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.components.iter().map(|component| component.name.as_str())
    }

    /// The rewards' names with the contents that decide their scores, where there are some.
    pub(crate) fn contents(&self) -> impl Iterator<Item = (&str, Vec<(String, Vec<u8>)>)> {
        let contents = |component: &Component| component.reward.contents();
        self.components.iter().map(move |component| (component.name.as_str(), contents(component)))
    }

    /// The weights, in the order of the names.
    pub fn weights(&self) -> impl Iterator<Item = f64> {
        self.components.iter().map(|component| component.transform.weight)
    }

    /// The rewards that are models.
    pub fn models(&self) -> impl Iterator<Item = &RewardModel> {
        self.components.iter().filter_map(|component| component.reward.model())
    }

    /// Divides the reward models over the ranks of `world`; see [`SequenceClassifier::shard`](rlhf_lm::model::SequenceClassifier::shard).
    pub fn shard(&self, world: &World, stage: ZeroStage) {
        self.models().for_each(|model| model.classifier().shard(world, stage));
    }

    /// Offloads the reward models between the scorings; see [`SequenceClassifier::offload`](rlhf_lm::model::SequenceClassifier::offload).
    ///
    /// # Errors
    /// If there is no room for one.
    pub fn offload(&self, place: &Offload) -> Result<()> {
        self.models().try_for_each(|model| model.classifier().offload(place, "reward model"))
    }

    /// Describes the rewards in one line: name, kind, and the weight if it is not 1.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for Component { name, about, transform, .. } in &self.components {
            let weight = if transform.weight == 1.0 { String::new() } else { format!(", weight {}", transform.weight) };
            let separator = if text.is_empty() { "" } else { "; " };
            let _ = write!(text, "{separator}{name}: {about}{weight}");
        }
        text
    }

    /// Checks that a row has the columns that the rewards read, before a run starts.
    ///
    /// # Errors
    /// If it has not; the error names the reward.
    pub fn check_row(&self, row: &Value) -> Result<()> {
        self.components.iter().try_for_each(|Component { name, reward, .. }| {
            reward.check_row(row).map_err(|e| Error::Run(format!("reward `{name}`: {e}")))
        })
    }

    /// Decodes one response per prompt with `tokenizer` and scores them by [`Rewards::score`].
    ///
    /// # Errors
    /// The errors of [`Rewards::score`]; also if there is not one response per prompt.
    pub fn score_responses(
        &mut self,
        tokenizer: &Tokenizer,
        prompts: &[&Prompt],
        responses: &[Response],
        usage: ScoreUse,
    ) -> Result<Scored> {
        self.score_episodes(tokenizer, prompts, responses, &[], usage)
    }

    /// [`Rewards::score_responses`] with the episode of each response; `episodes` is empty without an environment.
    pub(crate) fn score_episodes(
        &mut self,
        tokenizer: &Tokenizer,
        prompts: &[&Prompt],
        responses: &[Response],
        episodes: &[Episode],
        usage: ScoreUse,
    ) -> Result<Scored> {
        if prompts.len() != responses.len() {
            let expected = prompts.len();
            let found = responses.len();
            return Err(Error::Run(format!("expected {expected} responses, one per prompt, found {found}")));
        }
        let pairs = || prompts.iter().zip(responses);
        let text = |(at, (prompt, response)): (usize, (&&Prompt, &Response))| match episodes.get(at) {
            Some(episode) => Ok(episode.answer()),
            None => tokenizer.decode_after(&prompt.tokens, &response.tokens),
        };
        let texts: Vec<String> = pairs().enumerate().map(text).collect::<Result<_>>()?;
        let inputs = pairs().zip(&texts).enumerate().map(|(at, ((prompt, response), text))| RewardInput {
            prompt: &prompt.text,
            response: text,
            prompt_ids: &prompt.tokens,
            response_ids: &response.tokens,
            finish: response.finish,
            row: &prompt.row,
            episode: episodes.get(at),
        });
        self.score(&inputs.collect::<Vec<_>>(), usage)
    }

    /// Scores a batch, for a use that decides whether running moments normalize the scores.
    ///
    /// # Errors
    /// If a reward fails, returns the wrong number of scores for the batch or for a response's tokens, or a score is not finite.
    /// The error names the reward and, if known, the row. An absent score is no error.
    pub fn score(&mut self, batch: &[RewardInput<'_>], usage: ScoreUse) -> Result<Scored> {
        let zeros = vec![0.0; batch.len()];
        let mut scored =
            Scored { responses: zeros.clone(), tokens: None, raw: zeros, components: Vec::new(), warning: None };
        for component in &mut self.components {
            let Called { scores, seconds, extra, columns } = component.score(batch, usage, &self.world)?;
            for (row, score) in scores.iter().enumerate() {
                let raw = |number: &f64| component.transformed(*number, ScoreUse::Report);
                scored.raw[row] += score.numbers().iter().map(raw).sum::<f64>();
                match score {
                    Score::Response(number) => scored.responses[row] += component.transformed(*number, usage),
                    Score::Tokens(numbers) => {
                        let zeros = || batch.iter().map(|input| vec![0.0; input.response_ids.len()]).collect();
                        let slots = &mut scored.tokens.get_or_insert_with(zeros)[row];
                        let shaped = numbers.iter().map(|number| component.transformed(*number, usage));
                        slots.iter_mut().zip(shaped).for_each(|(slot, shaped)| *slot += shaped);
                    }
                    Score::Absent => {}
                }
            }
            let name = component.name.clone();
            let scores = scores.iter().map(Score::total).collect();
            scored.components.push(ComponentScores { name, scores, seconds, extra, columns });
        }
        self.world.agree(scored.check_finite(batch))?;
        if let Some(row) = scored.unscored().iter().position(|&unscored| unscored)
            && usage == ScoreUse::Training
        {
            let failure = Failure::at(row, "no reward gave it a score; its score is 0");
            scored.warning = Some(failure.describe(batch));
        }
        Ok(scored)
    }

    /// Ends the programs of the rewards, after the last batch; another one starts them anew.
    ///
    /// # Errors
    /// If a program has written one score too many, on any rank: then scores of earlier batches may belong to other responses.
    pub fn finish(&mut self) -> Result<()> {
        let ended = self.components.iter_mut().map(|Component { name, reward, .. }| {
            reward.finish().map_err(|source| Error::Reward { name: name.clone(), source: Box::new(source) })
        });
        // All programs are ended, also after an error.
        let ended = ended.fold(Ok(()), Result::and);
        self.world.agree(ended)
    }

    /// Returns the state for a checkpoint: the running moments by reward.
    pub fn state(&self) -> BTreeMap<String, Moments> {
        let normalized = self.components.iter().filter(|c| c.transform.normalize != Normalize::None);
        normalized.map(|c| (c.name.clone(), c.moments)).collect()
    }

    /// Restores the state that [`Rewards::state`] returned.
    ///
    /// # Errors
    /// If it lacks the running moments of a reward that is normalized.
    pub fn load_state(&mut self, state: &BTreeMap<String, Moments>) -> Result<()> {
        for component in self.components.iter_mut().filter(|c| c.transform.normalize != Normalize::None) {
            component.moments = *state.get(&component.name).ok_or_else(|| {
                Error::Run(format!("reward `{}`: expected its running moments, found none", component.name))
            })?;
        }
        Ok(())
    }
}

/// The scores of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// Sum of the scores per response, `[B]`.
    pub responses: Vec<f64>,
    /// Sum of the scores per token, one row per response, if a reward returned any.
    pub tokens: Option<Vec<Vec<f64>>>,
    /// Total score of each response without normalization by running moments, `[B]`; shown in sample tables and evaluations.
    pub raw: Vec<f64>,
    /// Scores of each reward.
    pub components: Vec<ComponentScores>,
    /// A message about the first response of the batch that no reward gave a score, if the scores are trained on.
    pub warning: Option<String>,
}

/// The scores of one reward for a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct ComponentScores {
    /// Name of the reward.
    pub name: String,
    /// Its scores before the transform, summed over the tokens of a response, `[B]`; NaN where it gave none.
    pub scores: Vec<f64>,
    /// Time in seconds.
    pub seconds: f64,
    /// Additional metrics, by name.
    pub extra: Vec<(String, f64)>,
    /// Further columns, each with one value per response.
    pub columns: Vec<(String, Vec<Value>)>,
}

impl ComponentScores {
    /// Returns the mean of the scores that are present; NaN if there are none.
    pub fn mean(&self) -> f64 {
        let present = self.scores.iter().filter(|score| !score.is_nan());
        present.clone().sum::<f64>() / present.count() as f64
    }

    /// Returns mean and unbiased standard deviation of the scores that are present; NaN where there are too few.
    fn mean_and_std(&self) -> (f64, f64) {
        let present: Vec<f64> = self.scores.iter().copied().filter(|score| !score.is_nan()).collect();
        let mut moments = Moments::default();
        moments.update(&present);
        let mean = if present.is_empty() { f64::NAN } else { moments.mean() };
        (mean, if present.len() < 2 { f64::NAN } else { moments.spread() })
    }
}

impl Scored {
    /// Returns the total score of each response, `[B]`.
    pub fn totals(&self) -> Vec<f64> {
        let tokens = |row: usize| self.tokens.as_ref().map_or(0.0, |tokens| tokens[row].iter().sum());
        self.responses.iter().enumerate().map(|(row, score)| score + tokens(row)).collect()
    }

    /// Returns true for each response that no reward gave a score, `[B]`. Its total is 0, which must not be compared with other scores:
    /// TRL's `GRPOTrainer` leaves such a response out of its group's baseline and sets its advantage to 0.
    pub fn unscored(&self) -> Vec<bool> {
        let absent = |row: usize| self.components.iter().all(|component| component.scores[row].is_nan());
        (0..self.responses.len()).map(|row| !self.components.is_empty() && absent(row)).collect()
    }

    /// Returns the total score of each response without normalization, `[B]`; NaN where no reward gave one.
    pub(crate) fn raw_or_nan(&self) -> Vec<f64> {
        let score_or_nan = |(&score, unscored)| if unscored { f64::NAN } else { score };
        self.raw.iter().zip(self.unscored()).map(score_or_nan).collect()
    }

    /// Appends the scores of more responses by the same rewards; `lengths` are the token counts of these responses and then of the added
    /// ones.
    pub(crate) fn extend(&mut self, more: Self, lengths: &[usize]) {
        let rows = [self.responses.len(), more.responses.len()];
        if self.tokens.is_some() || more.tokens.is_some() {
            let zeros = |lengths: &[usize]| lengths.iter().map(|&len| vec![0.0; len]).collect::<Vec<_>>();
            let (first, second) = lengths.split_at(rows[0]);
            let added = more.tokens.unwrap_or_else(|| zeros(second));
            self.tokens.get_or_insert_with(|| zeros(first)).extend(added);
        }
        self.responses.extend(more.responses);
        self.raw.extend(more.raw);
        for (component, more) in self.components.iter_mut().zip(more.components) {
            component.scores.extend(more.scores);
            component.seconds += more.seconds;
            let extra = std::mem::take(&mut component.extra);
            component.extra = average_extras([(rows[0], extra), (rows[1], more.extra)]);
            let columns = std::mem::take(&mut component.columns);
            component.columns = joined_columns([(rows[0], columns), (rows[1], more.columns)]);
        }
        self.warning = self.warning.take().or(more.warning);
    }

    /// The scores of the responses `rows` alone.
    pub(crate) fn select(mut self, rows: &[usize]) -> Self {
        let pick = |numbers: &Vec<f64>| rows.iter().map(|&row| numbers[row]).collect();
        (self.responses, self.raw) = (pick(&self.responses), pick(&self.raw));
        self.tokens = self.tokens.map(|tokens| rows.iter().map(|&row| tokens[row].clone()).collect());
        for component in &mut self.components {
            component.scores = pick(&component.scores);
            let pick =
                |values: &[Value]| rows.iter().map(|&row| values.get(row).cloned().unwrap_or_default()).collect();
            component.columns.iter_mut().for_each(|(_, values)| *values = pick(values));
        }
        self
    }

    /// Returns the scores for a rollout, in f32.
    pub fn to_scores(&self, device: Device) -> Scores {
        let tokens = self.tokens.as_ref().map(|rows| rows.iter().map(|row| f32s(row)).collect());
        Scores { responses: Tensor::from_slice(&f32s(&self.responses)).to_device(device), tokens }
    }

    /// Returns the total scores without normalization for a rollout, in f32.
    pub(crate) fn to_raw_scores(&self, device: Device) -> Scores {
        Tensor::from_slice(&f32s(&self.raw)).to_device(device).into()
    }

    /// Adds mean, standard deviation and time of each reward to the metrics. `docs/reference/metrics.md` defines them.
    pub fn push_metrics(&self, m: &mut Metrics) {
        for component in &self.components {
            let ComponentScores { name, seconds, extra, .. } = component;
            let (mean, std) = component.mean_and_std();
            m.push(format!("objective/scores/{name}"), mean);
            // The deviation of one score, or of none, is logged as 0.
            m.push(format!("objective/scores_std/{name}"), if std.is_nan() { 0.0 } else { std });
            m.push(format!("time/reward/{name}"), *seconds);
            for (key, value) in extra {
                m.push(format!("reward/{name}/{key}"), *value);
            }
            let absent = component.scores.iter().filter(|score| score.is_nan()).count();
            if absent > 0 {
                m.push(format!("reward/{name}/absent"), absent as f64);
            }
        }
        let unscored = self.unscored().iter().filter(|&&unscored| unscored).count();
        if unscored > 0 {
            m.push("objective/unscored", unscored as f64);
        }
    }

    /// Adds `rewards/NAME/mean` and `rewards/NAME/std` of each reward to the metrics, as TRL's `GRPOTrainer` and `RLOOTrainer`
    /// log them: before the weight, over the scores that are present. The standard deviation is unbiased, and NaN for fewer
    /// than two scores.
    ///
    /// Source: [TRL v1.11.0, grpo_trainer.py](https://github.com/huggingface/trl/blob/v1.11.0/trl/trainer/grpo_trainer.py)
    pub fn push_trl_metrics(&self, m: &mut Metrics) {
        for component in &self.components {
            let (mean, std) = component.mean_and_std();
            m.push(format!("rewards/{}/mean", component.name), mean);
            m.push(format!("rewards/{}/std", component.name), std);
        }
    }

    /// Checks the sums: finite scores may overflow when they are summed, or when they are converted to the f32 of tensors.
    fn check_finite(&self, batch: &[RewardInput<'_>]) -> Result<()> {
        let fits = |number: f64| (number as f32).is_finite();
        for (row, total) in self.totals().iter().enumerate() {
            let tokens = self.tokens.as_ref().map_or(&[][..], |rows| &rows[row]);
            let token = tokens.iter().position(|&number| !fits(number));
            let found = match token {
                _ if !fits(self.responses[row]) => format!("found {:?}", self.responses[row]),
                Some(at) => format!("found {:?} for its token {}", tokens[at], at + 1),
                None if !fits(*total) => format!("found {total:?}"),
                None => continue,
            };
            let failure = Failure::at(row, format!("expected a finite score, {found}"));
            return Err(Error::Run(format!("the sum of the rewards: {}", failure.describe(batch))));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Calls `f` with a batch of responses of these lengths, to prompts "prompt 0", "prompt 1", ...
    pub(super) fn with_batch<T>(lengths: &[usize], f: impl FnOnce(&[RewardInput<'_>]) -> T) -> T {
        let (prompts, row): (Vec<String>, _) = ((0..lengths.len()).map(|i| format!("prompt {i}")).collect(), json!({}));
        let ids = vec![7; lengths.iter().copied().max().unwrap_or(0)];
        let batch: Vec<RewardInput<'_>> = prompts
            .iter()
            .zip(lengths)
            .map(|(prompt, &len)| RewardInput {
                prompt,
                response: "fine",
                prompt_ids: &[1],
                response_ids: &ids[..len],
                finish: FinishReason::Length,
                row: &row,
                episode: None,
            })
            .collect();
        f(&batch)
    }

    fn constant(scores: &'static [f64]) -> FnReward {
        FnReward::new(move |_| Ok(scores.to_vec()))
    }

    fn transform(change: impl FnOnce(&mut ScoreTransform)) -> ScoreTransform {
        let mut transform = ScoreTransform::default();
        change(&mut transform);
        transform
    }

    #[test]
    fn scores_beyond_the_range_of_f32_are_refused_even_if_they_cancel_out() {
        let cancels = || FnReward::new(|batch| Ok(batch.iter().map(|_| vec![1e39, -1e39]).collect()));
        let mut rewards = Rewards::new().with("tokens", cancels());
        let error = with_batch(&[2, 2], |batch| rewards.score(batch, ScoreUse::Training)).unwrap_err().to_string();
        assert!(error.contains("row 1 of 2") && error.contains("found 1e39 for its token 1"), "{error}");
        let last = FnReward::new(|_| Ok(vec![vec![1.0, -1e39]]));
        let mut rewards = Rewards::new().with("whole", constant(&[1e39])).with("tokens", last);
        let error = with_batch(&[2], |batch| rewards.score(batch, ScoreUse::Training)).unwrap_err().to_string();
        assert!(error.contains("expected a finite score, found 1e39"), "{error}");
    }

    #[test]
    fn batches_with_scores_of_tokens_and_without_are_joined() {
        let scored = |lengths: &[usize], by_token: bool, extra: f64| {
            let reward = FnReward::new(move |batch: &[RewardInput<'_>]| {
                let score = |input: &RewardInput<'_>| {
                    if by_token { Score::Tokens(vec![1.0; input.response_ids.len()]) } else { Score::Response(2.0) }
                };
                Ok(batch.iter().map(score).collect())
            });
            let mut scored =
                with_batch(lengths, |batch| Rewards::new().with("r", reward).score(batch, ScoreUse::Training)).unwrap();
            scored.components[0].extra = vec![("share".into(), extra)];
            scored
        };
        let mut first = scored(&[2, 1], false, 1.0);
        first.extend(scored(&[3], true, 0.25), &[2, 1, 3]);
        assert_eq!(first.tokens, Some(vec![vec![0.0; 2], vec![0.0], vec![1.0; 3]]));
        assert_eq!(
            (first.totals(), first.components[0].extra.clone()),
            (vec![2.0, 2.0, 3.0], vec![("share".into(), 0.75)])
        );
        let mut first = scored(&[2], true, 1.0);
        first.extend(scored(&[3, 1], false, 1.0), &[2, 3, 1]);
        assert_eq!(first.tokens, Some(vec![vec![1.0; 2], vec![0.0; 3], vec![0.0]]));
        let mut first = scored(&[2], false, 1.0);
        first.extend(scored(&[3], false, 1.0), &[2, 3]);
        assert_eq!(first.tokens, None);
    }

    #[test]
    fn baselines_are_normalized_by_the_moments_of_the_scores_that_are_trained_on() {
        let mut rewards = Rewards::new().with_transform(
            "r",
            constant(&[10.0, 14.0]),
            transform(|s| s.normalize = Normalize::MeanStd),
        );
        let score = |rewards: &mut Rewards, usage| with_batch(&[1, 1], |batch| rewards.score(batch, usage)).unwrap();
        // Before any training there are no moments.
        assert_eq!(score(&mut rewards, ScoreUse::Baseline).responses, [10.0, 14.0]);
        let trained = score(&mut rewards, ScoreUse::Training).responses;
        let state = rewards.state();
        assert_eq!(score(&mut rewards, ScoreUse::Baseline).responses, trained);
        assert_eq!(score(&mut rewards, ScoreUse::Report).responses, [10.0, 14.0]);
        assert_eq!(rewards.state(), state);
    }

    #[test]
    fn scores_are_summed_with_their_weights_and_logged_per_reward() {
        let tokens = FnReward::new(|batch| Ok(batch.iter().map(|i| vec![1.0; i.response_ids.len()]).collect()));
        let mut rewards = Rewards::new()
            .with("a", constant(&[1.0, 3.0]))
            .with_transform("b", constant(&[10.0, -10.0]), transform(|s| s.weight = 0.5))
            .with_transform("tokens", tokens, transform(|s| s.weight = -1.0));
        let scored = with_batch(&[2, 3], |batch| rewards.score(batch, ScoreUse::Training)).unwrap();
        assert_eq!(scored.responses, [6.0, -2.0]);
        assert_eq!(scored.tokens, Some(vec![vec![-1.0; 2], vec![-1.0; 3]]));
        assert_eq!(scored.totals(), [4.0, -5.0]);
        let mut m = Metrics::default();
        scored.push_metrics(&mut m);
        for (name, expected) in [
            ("objective/scores/a", 2.0),
            ("objective/scores_std/a", 2f64.sqrt()), // ((1 - 2)^2 + (3 - 2)^2) / (2 - 1) = 2
            ("objective/scores/b", 0.0),
            ("objective/scores/tokens", 2.5),
        ] {
            assert!((m.get(name).unwrap() - expected).abs() < 1e-12, "{name}");
        }
        assert!(m.get("time/reward/b").is_some());
    }

    #[test]
    fn absent_scores_are_neither_summed_nor_counted() {
        let some = FnReward::new(|_| Ok(vec![Some(1.0), None, None, Some(4.0)]));
        let other = FnReward::new(|_| Ok(vec![Some(10.0), Some(20.0), None, None]));
        let normalized = transform(|s| (s.normalize, s.weight) = (Normalize::MeanStd, 2.0));
        let mut rewards = Rewards::new()
            .with_transform("some", some, transform(|s| s.weight = 0.5))
            .with_transform("other", other, normalized);
        let scored = with_batch(&[1; 4], |batch| rewards.score(batch, ScoreUse::Training)).unwrap();
        // `other`: mean 15, deviation sqrt(50), so 10 and 20 become -1 / sqrt 2 and 1 / sqrt 2, times the weight 2.
        let two = 2f64.sqrt();
        let expected = [0.5 - two, two, 0.0, 2.0];
        assert!(scored.responses.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-12));
        assert_eq!(scored.raw, [20.5, 40.0, 0.0, 2.0]);
        assert_eq!(scored.unscored(), [false, false, true, false]);
        assert_eq!(rewards.state()["other"].count, 2.0);
        let warning = scored.warning.as_deref().unwrap();
        assert!(warning.starts_with("row 3 of 4 (prompt \"prompt 2\"): no reward gave it a score"), "{warning}");
        // Scaling by running moments leaves its score 0, and its score out of the moments.
        let config = ScoreScalingConfig { use_score_scaling: true, use_score_norm: true, score_clip: None };
        let mut scaling = ScoreScaling::new(&config);
        let mut scaled = scored.clone();
        scaling.apply(&mut scaled, true);
        let other_scores: Vec<f64> = [0usize, 1, 3].map(|row| scored.responses[row]).into();
        let expected = ScoreScaling::new(&config).scale(&other_scores, true);
        let found = [0usize, 1, 3].map(|row| scaled.responses[row]);
        assert!(found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 1e-12), "{found:?}");
        assert_eq!(scaled.responses[2], 0.0);
        let mut m = Metrics::default();
        scored.push_metrics(&mut m);
        scored.push_trl_metrics(&mut m);
        for (name, expected) in [
            ("objective/scores/some", 2.5),
            ("objective/scores_std/some", 4.5f64.sqrt()), // (1.5^2 + 1.5^2) / (2 - 1) = 4.5
            ("reward/some/absent", 2.0),
            ("objective/unscored", 1.0),
            ("rewards/some/mean", 2.5),
            ("rewards/some/std", 4.5f64.sqrt()),
            ("rewards/other/mean", 15.0),
            ("rewards/other/std", 50f64.sqrt()),
        ] {
            assert!((m.get(name).unwrap() - expected).abs() < 1e-12, "{name}");
        }
    }

    #[test]
    fn means_and_deviations_of_too_few_scores_are_nan() {
        let mut rewards = Rewards::new()
            .with("none", FnReward::new(|_| Ok(vec![None::<f64>; 2])))
            .with("one", FnReward::new(|_| Ok(vec![None, Some(3.0)])));
        let scored = with_batch(&[1; 2], |batch| rewards.score(batch, ScoreUse::Report)).unwrap();
        assert_eq!(scored.warning, None, "only for scores that are trained on");
        let mut m = Metrics::default();
        scored.push_trl_metrics(&mut m);
        assert!(m.get("rewards/none/mean").unwrap().is_nan() && m.get("rewards/none/std").unwrap().is_nan());
        assert_eq!(m.get("rewards/one/mean"), Some(3.0));
        assert!(m.get("rewards/one/std").unwrap().is_nan());
    }

    #[test]
    fn scores_are_the_same_after_they_were_gathered() {
        let scores = [
            Score::Response(-1.0),
            Score::Absent,
            Score::Tokens(vec![]),
            Score::Tokens(vec![-2.0, 1.0]),
            Score::Absent,
            Score::Response(-2.0),
        ];
        let sent = serde_json::to_string(&scores.iter().map(SentScore::from).collect::<Vec<_>>()).unwrap();
        let received: Vec<SentScore> = serde_json::from_str(&sent).unwrap();
        assert_eq!(received.into_iter().map(Score::from).collect::<Vec<_>>(), scores);
    }

    #[test]
    fn a_number_is_appended_to_a_name_that_is_taken() {
        let rewards = Rewards::new().with("a", constant(&[])).with("a", constant(&[])).with("a", constant(&[]));
        assert_eq!(rewards.names().collect::<Vec<_>>(), ["a", "a_2", "a_3"]);
    }

    #[test]
    fn scores_are_normalized_then_scaled_then_clipped_then_weighted() {
        let transform = ScoreTransform { normalize: Normalize::MeanStd, scale: 2.0, clip: Some(1.5), weight: 10.0 };
        let mut rewards = Rewards::new().with_transform("a", constant(&[0.0, 2.0, 4.0]), transform);
        // Mean 2, deviation 2: -1, 0, 1; times 2: -2, 0, 2; within 1.5: -1.5, 0, 1.5; times 10.
        let scored = with_batch(&[1; 3], |batch| rewards.score(batch, ScoreUse::Training)).unwrap();
        assert_eq!(scored.responses, [-15.0, 0.0, 15.0]);
        assert_eq!(scored.components[0].scores, [0.0, 2.0, 4.0], "logged before the transform");
    }

    #[test]
    fn running_moments_are_restored_from_a_checkpoint() {
        let batches: [&'static [f64]; 4] = [&[1.0, 2.5, -3.0], &[7.0], &[0.1, 0.2, 0.3, 1e3], &[5.0, 5.0]];
        let normalized = || transform(|s| s.normalize = Normalize::Std);
        let run = |rewards: &mut Rewards, from: usize| {
            let mut responses = Vec::new();
            for numbers in &batches[from..] {
                rewards.components[0].reward = Box::new(constant(numbers));
                let scored =
                    with_batch(&vec![1; numbers.len()], |batch| rewards.score(batch, ScoreUse::Training)).unwrap();
                responses.extend(scored.responses);
            }
            responses
        };
        let whole = run(&mut Rewards::new().with_transform("a", constant(&[]), normalized()), 0);
        let mut first = Rewards::new().with_transform("a", constant(&[]), normalized());
        for numbers in &batches[..2] {
            first.components[0].moments.update(numbers);
        }
        let state = serde_json::from_str(&serde_json::to_string(&first.state()).unwrap()).unwrap();
        let mut resumed = Rewards::new().with_transform("a", constant(&[]), normalized());
        resumed.load_state(&state).unwrap();
        assert_eq!(run(&mut resumed, 2), whole[4..], "bit for bit");
        let error = resumed.load_state(&BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("reward `a`") && error.contains("running moments"), "{error}");
    }

    #[test]
    fn scores_that_are_not_trained_on_neither_change_the_running_moments_nor_are_normalized() {
        let mut rewards =
            Rewards::new().with_transform("a", constant(&[4.0]), transform(|s| s.normalize = Normalize::MeanStd));
        with_batch(&[1], |batch| {
            assert_eq!(rewards.score(batch, ScoreUse::Report).unwrap().responses, [4.0]);
            assert_eq!(rewards.state()["a"].count, 0.0);
            assert_eq!(rewards.score(batch, ScoreUse::Training).unwrap().responses, [0.0]);
            assert_eq!(rewards.state()["a"].count, 1.0);
            assert_eq!(rewards.score(batch, ScoreUse::Report).unwrap().responses, [4.0]);
        });
    }

    #[test]
    fn an_invalid_score_is_an_error_with_the_reward_and_the_row() {
        let tokens = FnReward::new(|_| Ok(vec![vec![1.0], vec![1.0]]));
        let failing = FnReward::new(|_| Err::<Vec<f64>, _>(Error::Run("out of ideas".into())));
        for (reward, message) in [
            (constant(&[1.0]), "reward `a`: expected 2 scores, one per response, found 1"),
            (
                constant(&[1.0, f64::NAN]),
                "reward `a`: row 2 of 2 (prompt \"prompt 1\"): expected a finite score, found NaN",
            ),
            (
                constant(&[f64::NEG_INFINITY, 1.0]),
                "reward `a`: row 1 of 2 (prompt \"prompt 0\"): expected a finite score, found -inf",
            ),
            (tokens, "reward `a`: row 2 of 2 (prompt \"prompt 1\"): expected 2 scores, one per token, found 1"),
            (failing, "reward `a`: out of ideas"),
            (
                constant(&[1e300, 1.0]),
                "the sum of the rewards: row 1 of 2 (prompt \"prompt 0\"): expected a finite score, found 1e300",
            ),
        ] {
            let mut rewards = Rewards::new().with("a", reward);
            let error = with_batch(&[1, 2], |batch| rewards.score(batch, ScoreUse::Training)).unwrap_err().to_string();
            assert_eq!(error, message);
        }
    }
}
