//! What scores responses: models, rules, programs, services, closures; several at once, with weights.

mod command;
mod http;
mod model;
mod rules;
pub(crate) mod settings;
mod spec;

pub use command::CommandReward;
pub use http::{HttpReward, HttpSettings};
pub use model::RewardModel;
pub use rules::Rule;
pub use settings::{RewardSourcesConfig, ScoreScalingConfig};
pub(crate) use spec::{RewardSources, Spec, resolve, specs};

use crate::data::Prompt;
use crate::generate::{FinishReason, Response};
use crate::metrics::Metrics;
use crate::run::report::{pause, stopped};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::fmt::{self, Write};
use std::time::{Duration, Instant};
use tch::{Device, Tensor};

/// Scores of responses.
#[derive(Debug)]
pub struct Scores {
    /// One number per response, `[B]` f32.
    pub responses: Tensor,
    /// One number per token, a row per response, if a reward returns such.
    pub tokens: Option<Vec<Vec<f32>>>,
}

impl From<Tensor> for Scores {
    fn from(responses: Tensor) -> Self {
        Self { responses, tokens: None }
    }
}

/// One response, with all that a reward may want to know of it.
#[derive(Debug, Clone, Copy)]
pub struct RewardInput<'a> {
    /// The text of the prompt.
    pub prompt: &'a str,
    /// The text of the response, without special tokens.
    pub response: &'a str,
    /// Token ids of the prompt.
    pub prompt_ids: &'a [i64],
    /// Token ids of the response, the stop token included.
    pub response_ids: &'a [i64],
    /// Why the response ended.
    pub finish: FinishReason,
    /// The prompt's row of the dataset.
    pub row: &'a Value,
}

impl RewardInput<'_> {
    /// Why the response ended, as `rlhf generate` writes it: `stop` or `length`.
    pub fn finish_reason(&self) -> &'static str {
        match self.finish {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// What a reward says of one response.
#[derive(Debug, Clone, PartialEq)]
pub enum Score {
    /// One number for the whole response; it lands where `score_position` says.
    Response(f64),
    /// One number for each of its tokens, each of which lands on its token.
    Tokens(Vec<f64>),
}

impl Score {
    /// The numbers: one, or one per token.
    pub fn numbers(&self) -> &[f64] {
        match self {
            Score::Response(score) => std::slice::from_ref(score),
            Score::Tokens(scores) => scores,
        }
    }

    /// The sum of the numbers.
    pub fn total(&self) -> f64 {
        self.numbers().iter().sum()
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

/// Something that scores responses.
pub trait Reward: Send {
    /// One score per response, in order.
    ///
    /// # Errors
    /// If there is no sound score for one of them. [`Rewards`] checks the count and that the numbers are finite.
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>>;

    /// Checks that a row of the dataset has what this reward needs; asked of every row before training begins.
    ///
    /// # Errors
    /// If it has not.
    fn check_row(&self, _row: &Value) -> Result<()> {
        Ok(())
    }

    /// Further numbers about the last batch, which are logged as `reward/NAME/KEY`.
    fn extra(&self) -> Vec<(String, f64)> {
        Vec::new()
    }

    /// The model, if this is one: training asks what it reads, and may begin its value model there.
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
    /// A reward that calls `f` with each batch; a score is an `f64`, or a `Vec<f64>` with a number per token.
    pub fn new<S: Into<Score>>(mut f: impl FnMut(&[RewardInput<'_>]) -> Result<Vec<S>> + Send + 'static) -> Self {
        Self(Box::new(move |batch| Ok(f(batch)?.into_iter().map(Into::into).collect())))
    }
}

impl Reward for FnReward {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        (self.0)(batch)
    }
}

/// What is made of a reward's numbers before they are summed: normalised, scaled, clipped, weighted, in this order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shaping {
    /// By running moments, or not.
    pub normalize: Normalize,
    /// Multiplies.
    pub scale: f64,
    /// Clips to plus or minus this.
    pub clip: Option<f64>,
    /// Multiplies, last.
    pub weight: f64,
}

impl Default for Shaping {
    /// Numbers stay as they are.
    fn default() -> Self {
        Self { normalize: Normalize::None, scale: 1.0, clip: None, weight: 1.0 }
    }
}

/// How numbers are normalised by the moments of all that the run has seen, the current batch included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalize {
    /// Not at all.
    None,
    /// Divided by the standard deviation.
    Std,
    /// Less the mean, and then divided by the standard deviation.
    MeanStd,
}

/// Running moments of the numbers that a reward gave: count, mean and sum of squared distances from it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Moments {
    count: f64,
    mean: f64,
    m2: f64,
}

impl Moments {
    /// Adds numbers. Source: Chan, Golub and LeVeque 1979, the pairwise update.
    fn update(&mut self, numbers: &[f64]) {
        let count = numbers.len() as f64;
        if numbers.is_empty() {
            return;
        }
        let mean = numbers.iter().sum::<f64>() / count;
        let m2: f64 = numbers.iter().map(|x| (x - mean).powi(2)).sum();
        let (total, gap) = (self.count + count, mean - self.mean);
        self.m2 += m2 + gap * gap * self.count * count / total;
        self.mean += gap * count / total;
        self.count = total;
    }

    fn state(&self) -> Value {
        json!({"count": self.count, "mean": self.mean, "m2": self.m2})
    }

    fn from_state(state: &Value) -> Option<Self> {
        let number = |name: &str| state[name].as_f64();
        Some(Self { count: number("count")?, mean: number("mean")?, m2: number("m2")? })
    }

    /// The unbiased standard deviation; 1 as long as there is none to divide by.
    fn std(&self) -> f64 {
        let variance = if self.count > 1.0 { self.m2 / (self.count - 1.0) } else { 0.0 };
        if variance > 0.0 { variance.sqrt() } else { 1.0 }
    }
}

/// What is made of the whole scores of an update, whatever rewards they are the sum of: divided by their running deviation,
/// less their running mean before that, clipped; as TRL 0.11. Scores that nothing learns from stay raw: the moments move from
/// update to update, and would move them though the responses stay.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreScaling {
    scales: bool,
    centres: bool,
    clip: Option<f64>,
    moments: Moments,
}

impl ScoreScaling {
    /// As `use_score_scaling`, `use_score_norm` and `score_clip` say, before any score.
    pub fn new(config: &ScoreScalingConfig) -> Self {
        let (scales, centres, clip) = (config.use_score_scaling, config.use_score_norm, config.score_clip);
        Self { scales, centres, clip, moments: Moments::default() }
    }

    /// The scores as they count; with `learn` they first enter the running moments.
    pub fn shape(&mut self, scores: &[f64], learn: bool) -> Vec<f64> {
        if self.scales && learn {
            self.moments.update(scores);
        }
        let mean = if self.centres { self.moments.mean } else { 0.0 };
        let std = self.moments.std() + f64::from(f32::EPSILON);
        let scaled = |score: f64| if self.scales { (score - mean) / std } else { score };
        scores.iter().map(|&score| self.clip.map_or(scaled(score), |most| scaled(score).clamp(-most, most))).collect()
    }

    /// [`ScoreScaling::shape`] of the whole scores of an update's responses, which enter the running moments; scores of their
    /// tokens stay, and the rest makes up the difference.
    pub(crate) fn apply(&mut self, scored: &mut Scored) {
        if !self.scales && self.clip.is_none() {
            return;
        }
        let totals = scored.totals();
        let shaped = self.shape(&totals, true);
        let changes = shaped.iter().zip(&totals).map(|(shaped, total)| shaped - total);
        scored.responses.iter_mut().zip(changes).for_each(|(score, change)| *score += change);
    }

    /// Running mean and unbiased deviation.
    pub fn moments(&self) -> (f64, f64) {
        (self.moments.mean, self.moments.std())
    }

    /// What a checkpoint keeps of it.
    pub fn state(&self) -> Value {
        self.moments.state()
    }

    /// Goes on from what [`ScoreScaling::state`] gave.
    ///
    /// # Errors
    /// If `state` is something else.
    pub fn load_state(&mut self, state: &Value) -> Result<()> {
        let error = || Error::Run(format!("scores: expected their running moments (count, mean, m2), found {state}"));
        self.moments = Moments::from_state(state).ok_or_else(error)?;
        Ok(())
    }
}

/// One of several rewards.
struct Component {
    name: String,
    reward: Box<dyn Reward>,
    shaping: Shaping,
    moments: Moments,
    /// What the model card says of it.
    about: String,
}

impl Component {
    /// What a number counts. The moments move on from update to update, so what nothing learns from has none: else its
    /// scores would move although the answers stay.
    fn shape(&self, number: f64, learn: bool) -> f64 {
        let Shaping { normalize, scale, clip, weight } = self.shaping;
        let number = match normalize {
            Normalize::Std if learn => number / self.moments.std(),
            Normalize::MeanStd if learn => (number - self.moments.mean) / self.moments.std(),
            _ => number,
        };
        let number = number * scale;
        weight * clip.map_or(number, |most| number.clamp(-most, most))
    }
}

/// The rewards of a run: a response's score is the sum of what they say, each with its weight.
///
/// ```no_run
/// use rlhf::reward::{FnReward, RewardInput, Rewards, Shaping};
///
/// let brevity = |batch: &[RewardInput<'_>]| Ok(batch.iter().map(|input| -(input.response.len() as f64)).collect());
/// let polite = |batch: &[RewardInput<'_>]| {
///     Ok(batch.iter().map(|input| f64::from(u8::from(input.response.contains("please")))).collect())
/// };
/// let rewards = Rewards::new()
///     .with_shaping("brevity", FnReward::new::<f64>(brevity), Shaping { weight: 0.1, ..Shaping::default() })
///     .with("polite", FnReward::new::<f64>(polite));
/// assert_eq!(rewards.names().collect::<Vec<_>>(), ["brevity", "polite"]);
/// ```
#[derive(Default)]
pub struct Rewards {
    components: Vec<Component>,
}

impl fmt::Debug for Rewards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.components.iter().map(|c| (&c.name, &c.shaping))).finish()
    }
}

impl Rewards {
    /// No reward yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a reward with the weight 1; `name` stands for it in metrics and errors.
    #[must_use]
    pub fn with(self, name: &str, reward: impl Reward + 'static) -> Self {
        self.with_shaping(name, reward, Shaping::default())
    }

    /// Adds a reward whose numbers are shaped; `name` stands for it in metrics and errors.
    #[must_use]
    pub fn with_shaping(mut self, name: &str, reward: impl Reward + 'static, shaping: Shaping) -> Self {
        self.push(name, Box::new(reward), shaping, "a function".into());
        self
    }

    /// A name that is taken gets a number behind it.
    fn push(&mut self, name: &str, reward: Box<dyn Reward>, shaping: Shaping, about: String) {
        let taken = |name: &str| self.components.iter().any(|component| component.name == name);
        let mut unique = name.to_string();
        for number in 2.. {
            if !taken(&unique) {
                break;
            }
            unique = format!("{name}_{number}");
        }
        self.components.push(Component { name: unique, reward, shaping, moments: Moments::default(), about });
    }

    /// Adds those of `more` behind these.
    pub(crate) fn extend(&mut self, more: Rewards) {
        for Component { name, reward, shaping, about, .. } in more.components {
            self.push(&name, reward, shaping, about);
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.components.is_empty()
    }

    /// Their names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.components.iter().map(|component| component.name.as_str())
    }

    /// Those that are models.
    pub fn models(&self) -> impl Iterator<Item = &RewardModel> {
        self.components.iter().filter_map(|component| component.reward.model())
    }

    /// One line for people: each reward with what it is and its weight, where that is not 1.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for Component { name, about, shaping, .. } in &self.components {
            let weight = if shaping.weight == 1.0 { String::new() } else { format!(", weight {}", shaping.weight) };
            let separator = if text.is_empty() { "" } else { "; " };
            let _ = write!(text, "{separator}{name}: {about}{weight}");
        }
        text
    }

    /// Checks that a row has what the rewards need, before a run is spent on finding out.
    ///
    /// # Errors
    /// If it has not; the error names the reward.
    pub fn check_row(&self, row: &Value) -> Result<()> {
        self.components.iter().try_for_each(|Component { name, reward, .. }| {
            reward.check_row(row).map_err(|e| Error::Run(format!("reward `{name}`: {e}")))
        })
    }

    /// Scores of responses to prompts, row by row: [`Rewards::score`] of what `tokenizer` makes text of.
    ///
    /// # Errors
    /// As [`Rewards::score`]; if there is not one response per prompt.
    pub fn score_responses(
        &mut self,
        tokenizer: &Tokenizer,
        prompts: &[&Prompt],
        responses: &[Response],
        learn: bool,
    ) -> Result<Scored> {
        if prompts.len() != responses.len() {
            let (expected, found) = (prompts.len(), responses.len());
            return Err(Error::Run(format!("expected {expected} responses, one per prompt, found {found}")));
        }
        let pairs = || prompts.iter().zip(responses);
        let texts = pairs().map(|(prompt, response)| tokenizer.decode_after(&prompt.tokens, &response.tokens));
        let texts: Vec<String> = texts.collect::<Result<_>>()?;
        let inputs = pairs().zip(&texts).map(|((prompt, answer), response)| RewardInput {
            prompt: &prompt.text,
            response,
            prompt_ids: &prompt.tokens,
            response_ids: &answer.tokens,
            finish: answer.finish,
            row: &prompt.row,
        });
        self.score(&inputs.collect::<Vec<_>>(), learn)
    }

    /// Scores of a batch. With `learn` its numbers enter the running moments, and are normalised by them; the scores of
    /// samples and evaluations are not, so that they are comparable over a run.
    ///
    /// # Errors
    /// If a reward fails, gives another count than that of the responses or of a response's tokens, or a number is not
    /// finite; the error names the reward and, where it is known, the row.
    pub fn score(&mut self, batch: &[RewardInput<'_>], learn: bool) -> Result<Scored> {
        let zeros = vec![0.0; batch.len()];
        let mut scored = Scored { responses: zeros.clone(), tokens: None, raw: zeros, components: Vec::new() };
        for component in &mut self.components {
            let began = Instant::now();
            let name = component.name.clone();
            let named = |what: &dyn fmt::Display| Error::Run(format!("reward `{name}`: {what}"));
            let found = component.reward.score(batch).map_err(|e| match e {
                Error::Stopped { message, code } => {
                    Error::Stopped { message: format!("reward `{name}`: {message}"), code }
                }
                e => named(&e),
            })?;
            let seconds = began.elapsed().as_secs_f64();
            check(&found, batch).map_err(|problem| named(&problem.describe(batch)))?;
            if learn && component.shaping.normalize != Normalize::None {
                let numbers: Vec<f64> = found.iter().flat_map(|score| score.numbers().iter().copied()).collect();
                component.moments.update(&numbers);
            }
            for (row, score) in found.iter().enumerate() {
                scored.raw[row] += score.numbers().iter().map(|number| component.shape(*number, false)).sum::<f64>();
                match score {
                    Score::Response(number) => scored.responses[row] += component.shape(*number, learn),
                    Score::Tokens(numbers) => {
                        let zeros = || batch.iter().map(|input| vec![0.0; input.response_ids.len()]).collect();
                        let slots = &mut scored.tokens.get_or_insert_with(zeros)[row];
                        let shaped = numbers.iter().map(|number| component.shape(*number, learn));
                        slots.iter_mut().zip(shaped).for_each(|(slot, shaped)| *slot += shaped);
                    }
                }
            }
            let scores = found.iter().map(Score::total).collect();
            let extra = component.reward.extra();
            scored.components.push(ComponentScores { name, scores, seconds, extra });
        }
        // Finite numbers may still be too large when they are summed, or held in f32 as tensors are.
        let totals = scored.totals();
        let fits = |number: f64| (number as f32).is_finite();
        for (row, total) in totals.iter().enumerate() {
            let tokens = scored.tokens.as_ref().map_or(&[][..], |rows| &rows[row]);
            let token = tokens.iter().position(|&number| !fits(number));
            let what = match token {
                _ if !fits(scored.responses[row]) => format!("found {:?}", scored.responses[row]),
                Some(at) => format!("found {:?} for its token {}", tokens[at], at + 1),
                None if !fits(*total) => format!("found {total:?}"),
                None => continue,
            };
            let problem = Problem::at(row, format!("expected a finite score, {what}"));
            return Err(Error::Run(format!("the sum of the rewards: {}", problem.describe(batch))));
        }
        Ok(scored)
    }

    /// What a checkpoint keeps of them: the running moments by name.
    pub fn state(&self) -> Value {
        let normalised = self.components.iter().filter(|c| c.shaping.normalize != Normalize::None);
        Value::Object(normalised.map(|c| (c.name.clone(), c.moments.state())).collect::<Map<_, _>>())
    }

    /// Goes on from the running moments of [`Rewards::state`].
    ///
    /// # Errors
    /// If those of a reward that is normalised are not in it.
    pub fn load_state(&mut self, state: &Value) -> Result<()> {
        for component in self.components.iter_mut().filter(|c| c.shaping.normalize != Normalize::None) {
            let found = &state[&component.name];
            component.moments = Moments::from_state(found).ok_or_else(|| {
                Error::Run(format!(
                    "reward `{}`: expected its running moments (count, mean, m2), found {found}",
                    component.name
                ))
            })?;
        }
        Ok(())
    }
}

/// What the rewards of a run say of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// The sum of the scores per response, `[B]`.
    pub responses: Vec<f64>,
    /// The sum of the scores per token, a row per response, where a reward gave any.
    pub tokens: Option<Vec<Vec<f64>>>,
    /// The whole score of each response before running moments normalise it, `[B]`: as sample tables and evaluations show it.
    pub raw: Vec<f64>,
    /// Each reward's own.
    pub components: Vec<ComponentScores>,
}

/// What one reward says of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct ComponentScores {
    /// The reward's name.
    pub name: String,
    /// Its numbers as it gave them, those of a response's tokens summed, `[B]`.
    pub scores: Vec<f64>,
    /// Seconds that it took.
    pub seconds: f64,
    /// Further numbers, by name.
    pub extra: Vec<(String, f64)>,
}

impl Scored {
    /// The whole score of each response, `[B]`.
    pub fn totals(&self) -> Vec<f64> {
        let tokens = |row: usize| self.tokens.as_ref().map_or(0.0, |tokens| tokens[row].iter().sum());
        self.responses.iter().enumerate().map(|(row, score)| score + tokens(row)).collect()
    }

    /// The scores as the rollout takes them.
    pub fn to_scores(&self, device: Device) -> Scores {
        let f32s = |numbers: &Vec<f64>| numbers.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        Scores {
            responses: Tensor::from_slice(&f32s(&self.responses)).to_device(device),
            tokens: self.tokens.as_ref().map(|rows| rows.iter().map(f32s).collect()),
        }
    }

    /// Adds mean, spread and time of each reward to the metrics. `docs/algorithm.md` defines them.
    pub fn push_metrics(&self, m: &mut Metrics) {
        for ComponentScores { name, scores, seconds, extra } in &self.components {
            let mut moments = Moments::default();
            moments.update(scores);
            let spread = (moments.m2 / (moments.count - 1.0).max(1.0)).sqrt();
            m.push(format!("objective/scores/{name}"), moments.mean);
            m.push(format!("objective/scores_std/{name}"), spread);
            m.push(format!("time/reward/{name}"), *seconds);
            for (key, value) in extra {
                m.push(format!("reward/{name}/{key}"), *value);
            }
        }
    }
}

/// How long a reward outside this program is waited for, and how often it is asked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Patience {
    /// The wait for the next score of a program, or for a service's answer.
    pub timeout: Duration,
    /// How often a batch is asked for before its failure counts; at least 1.
    pub attempts: u32,
    /// The wait before the first repetition; it doubles from one to the next.
    pub pause: Duration,
}

impl Default for Patience {
    /// Two minutes, four times, half a second.
    fn default() -> Self {
        Self { timeout: Duration::from_secs(120), attempts: 4, pause: Duration::from_millis(500) }
    }
}

/// No wait before a repetition is longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

impl Patience {
    /// Asks until there is an answer, the last attempt has failed, or the run is asked to end.
    fn repeat<T>(&self, mut ask: impl FnMut() -> Result<T, Problem>) -> Result<T, Problem> {
        let mut failed = 0;
        loop {
            match ask() {
                Ok(answer) => return Ok(answer),
                Err(problem) => {
                    failed += 1;
                    if !problem.again || failed >= self.attempts {
                        return Err(Problem { tried: failed, ..problem });
                    }
                    let wait = self.pause.saturating_mul(1 << (failed - 1).min(16));
                    if pause(wait.max(problem.wait.unwrap_or_default()).min(LONGEST_PAUSE)) {
                        return Err(Problem { tried: failed, stopped: true, ..problem });
                    }
                }
            }
        }
    }
}

/// Why a batch has no sound scores.
#[derive(Debug)]
struct Problem {
    /// The row of the batch that is to blame.
    row: Option<usize>,
    what: String,
    /// Whether it may go well another time.
    again: bool,
    /// How long the other side asks to wait before that.
    wait: Option<Duration>,
    /// How often it was tried.
    tried: u32,
    /// Whether it was not tried again because the run is asked to end.
    stopped: bool,
}

impl Problem {
    fn new(what: impl Into<String>) -> Self {
        Self { row: None, what: what.into(), again: true, wait: None, tried: 1, stopped: false }
    }

    fn at(row: usize, what: impl Into<String>) -> Self {
        Self { row: Some(row), ..Self::new(what) }
    }

    /// One that would come again.
    fn lasting(what: impl Into<String>) -> Self {
        Self { again: false, ..Self::new(what) }
    }

    /// The error of a batch that has this problem.
    fn error(self, batch: &[RewardInput<'_>]) -> Error {
        let message = self.describe(batch);
        match self.stopped {
            true => {
                let message = format!("{message}; not tried again, as the run is asked to end");
                stopped(message.clone()).unwrap_or(Error::Run(message))
            }
            false => Error::Run(message),
        }
    }

    /// One line, with the beginning of the row's prompt.
    fn describe(&self, batch: &[RewardInput<'_>]) -> String {
        let mut text = String::new();
        if let Some(row) = self.row {
            let _ = write!(text, "row {} of {}", row + 1, batch.len());
            if let Some(input) = batch.get(row) {
                let _ = write!(text, " (prompt {})", excerpt(input.prompt, 40));
            }
            text += ": ";
        }
        text += &self.what;
        if self.tried > 1 {
            let _ = write!(text, " (tried {} times)", self.tried);
        }
        text
    }
}

/// The beginning of a text, quoted, on one line.
fn excerpt(text: &str, most: usize) -> String {
    let start: String = text.chars().take(most).collect();
    let more = if start.len() < text.len() { "..." } else { "" };
    format!("{start:?}{more}")
}

/// Checks that there is one score per response, one number per token where there are several, and that all are finite.
fn check(scores: &[Score], batch: &[RewardInput<'_>]) -> Result<(), Problem> {
    if scores.len() != batch.len() {
        let (expected, found) = (batch.len(), scores.len());
        return Err(Problem::new(format!("expected {expected} scores, one per response, found {found}")));
    }
    for (row, (score, input)) in scores.iter().zip(batch).enumerate() {
        let tokens = input.response_ids.len();
        if let Score::Tokens(numbers) = score
            && numbers.len() != tokens
        {
            let found = numbers.len();
            return Err(Problem::at(row, format!("expected {tokens} scores, one per token, found {found}")));
        }
        if let Some(number) = score.numbers().iter().find(|number| !number.is_finite()) {
            return Err(Problem::at(row, format!("expected a finite score, found {number}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch of responses of these lengths, to prompts "prompt 0", "prompt 1", ...
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
            })
            .collect();
        f(&batch)
    }

    fn constant(scores: &'static [f64]) -> FnReward {
        FnReward::new(move |_| Ok(scores.to_vec()))
    }

    fn shaping(change: impl FnOnce(&mut Shaping)) -> Shaping {
        let mut shaping = Shaping::default();
        change(&mut shaping);
        shaping
    }

    #[test]
    fn scores_that_f32_does_not_hold_are_refused_also_where_they_cancel_out() {
        let cancels = || FnReward::new(|batch| Ok(batch.iter().map(|_| vec![1e39, -1e39]).collect()));
        let mut rewards = Rewards::new().with("tokens", cancels());
        let error = with_batch(&[2, 2], |batch| rewards.score(batch, true)).unwrap_err().to_string();
        assert!(error.contains("row 1 of 2") && error.contains("found 1e39 for its token 1"), "{error}");
        let last = FnReward::new(|_| Ok(vec![vec![1.0, -1e39]]));
        let mut rewards = Rewards::new().with("whole", constant(&[1e39])).with("tokens", last);
        let error = with_batch(&[2], |batch| rewards.score(batch, true)).unwrap_err().to_string();
        assert!(error.contains("expected a finite score, found 1e39"), "{error}");
    }

    #[test]
    fn scores_are_summed_with_their_weights_and_each_reward_is_told_apart() {
        let tokens = FnReward::new(|batch| Ok(batch.iter().map(|i| vec![1.0; i.response_ids.len()]).collect()));
        let mut rewards = Rewards::new()
            .with("a", constant(&[1.0, 3.0]))
            .with_shaping("b", constant(&[10.0, -10.0]), shaping(|s| s.weight = 0.5))
            .with_shaping("tokens", tokens, shaping(|s| s.weight = -1.0));
        let scored = with_batch(&[2, 3], |batch| rewards.score(batch, true)).unwrap();
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
    fn a_name_that_is_taken_gets_a_number() {
        let rewards = Rewards::new().with("a", constant(&[])).with("a", constant(&[])).with("a", constant(&[]));
        assert_eq!(rewards.names().collect::<Vec<_>>(), ["a", "a_2", "a_3"]);
    }

    #[test]
    fn numbers_are_normalised_then_scaled_then_clipped_then_weighted() {
        let shaping = Shaping { normalize: Normalize::MeanStd, scale: 2.0, clip: Some(1.5), weight: 10.0 };
        let mut rewards = Rewards::new().with_shaping("a", constant(&[0.0, 2.0, 4.0]), shaping);
        // Mean 2, deviation 2: -1, 0, 1; times 2: -2, 0, 2; within 1.5: -1.5, 0, 1.5; times 10.
        let scored = with_batch(&[1; 3], |batch| rewards.score(batch, true)).unwrap();
        assert_eq!(scored.responses, [-15.0, 0.0, 15.0]);
        assert_eq!(scored.components[0].scores, [0.0, 2.0, 4.0], "logged as they were given");
    }

    #[test]
    fn running_moments_equal_the_direct_computation_and_survive_a_checkpoint() {
        let batches: [&'static [f64]; 4] = [&[1.0, 2.5, -3.0], &[7.0], &[0.1, 0.2, 0.3, 1e3], &[5.0, 5.0]];
        let normalised = || shaping(|s| s.normalize = Normalize::Std);
        let mut moments = Moments::default();
        for upto in 1..=batches.len() {
            moments.update(batches[upto - 1]);
            let all: Vec<f64> = batches[..upto].concat();
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (all.len() as f64 - 1.0);
            assert!((moments.mean - mean).abs() < 1e-12 * mean.abs().max(1.0));
            assert!((moments.std() - variance.sqrt()).abs() < 1e-12 * variance.sqrt());
        }
        let run = |rewards: &mut Rewards, from: usize| {
            let mut found = Vec::new();
            for numbers in &batches[from..] {
                rewards.components[0].reward = Box::new(constant(numbers));
                let scored = with_batch(&vec![1; numbers.len()], |batch| rewards.score(batch, true)).unwrap();
                found.extend(scored.responses);
            }
            found
        };
        let whole = run(&mut Rewards::new().with_shaping("a", constant(&[]), normalised()), 0);
        let mut first = Rewards::new().with_shaping("a", constant(&[]), normalised());
        for numbers in &batches[..2] {
            first.components[0].moments.update(numbers);
        }
        let state = serde_json::from_str(&first.state().to_string()).unwrap();
        let mut resumed = Rewards::new().with_shaping("a", constant(&[]), normalised());
        resumed.load_state(&state).unwrap();
        assert_eq!(run(&mut resumed, 2), whole[4..], "bit for bit");
        let error = resumed.load_state(&json!({"b": {}})).unwrap_err().to_string();
        assert!(error.contains("reward `a`") && error.contains("running moments"), "{error}");
    }

    #[test]
    fn samples_leave_the_running_moments_alone_and_are_not_measured_by_them_and_one_number_has_no_deviation() {
        let mut rewards =
            Rewards::new().with_shaping("a", constant(&[4.0]), shaping(|s| s.normalize = Normalize::MeanStd));
        with_batch(&[1], |batch| {
            assert_eq!(rewards.score(batch, false).unwrap().responses, [4.0]);
            assert_eq!(rewards.state()["a"]["count"], 0.0);
            assert_eq!(rewards.score(batch, true).unwrap().responses, [0.0]);
            assert_eq!(rewards.state()["a"]["count"], 1.0);
            assert_eq!(rewards.score(batch, false).unwrap().responses, [4.0]);
        });
    }

    #[test]
    fn what_is_no_score_is_one_error_with_the_reward_and_the_row() {
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
            let error = with_batch(&[1, 2], |batch| rewards.score(batch, true)).unwrap_err().to_string();
            assert_eq!(error, message);
        }
    }
}
