//! Generation with a key-value cache: samples responses to ragged prompts. A response that ends leaves its row to one that waits, and the
//! batch once none waits.

pub mod settings;
mod turns;
mod waiting;

pub use settings::{LogprobsOf, SamplingConfig, StopToken};
pub use turns::{Next, Turns, generate_turns};
pub use waiting::refilled_rows;

use crate::model::{CausalLm, KvCache, StopCheck, TokenSet, TopLogprobs, uses_kernels};
use crate::tokenizer::Tokenizer;
use rlhf_base::dist::World;
use rlhf_base::rng::{Purpose, Stream};
use rlhf_base::schema::expect;
use rlhf_base::{Error, Result};
use std::ops::{ControlFlow, Range};
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;
use waiting::Waiting;

/// Number of steps that a GPU decodes before the host reads the tokens: reading waits for the GPU, and tokens chosen after the
/// end of a response are wasted work.
const STEPS_ON_GPU: usize = 16;

/// Below this, f32 logits divided by the temperature overflow.
pub const MIN_TEMPERATURE: f64 = 1e-4;

/// The method by which the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    /// The most likely token.
    Greedy,
    /// A draw from softmax(logits / temperature), after the filters, which are applied in the order of the fields.
    Random {
        /// Divides the logits; above 0.
        temperature: f64,
        /// Keep only this many of the most likely tokens; 0 keeps all.
        top_k: usize,
        /// Keep only the most likely tokens that together reach this probability; 1 keeps all.
        top_p: f64,
        /// Keep only tokens at least this many times as likely as the likeliest; 0 keeps all.
        min_p: f64,
    },
}

impl Sampling {
    /// The plain distribution at `temperature`.
    pub fn at_temperature(temperature: f64) -> Self {
        Sampling::Random { temperature, top_k: 0, top_p: 1.0, min_p: 0.0 }
    }

    /// The temperature of the log-probabilities; 1 for greedy decoding.
    fn temperature(self) -> f64 {
        match self {
            Sampling::Greedy => 1.0,
            Sampling::Random { temperature, .. } => temperature,
        }
    }

    /// Whether some tokens cannot be drawn.
    fn filters(self) -> bool {
        match self {
            Sampling::Greedy => false,
            Sampling::Random { top_k, top_p, min_p, .. } => top_k > 0 || top_p < 1.0 || min_p > 0.0,
        }
    }

    fn check(self) -> Result<()> {
        let Sampling::Random { temperature, top_p, min_p, .. } = self else { return Ok(()) };
        let within = format!("a number from {MIN_TEMPERATURE}; greedy decoding is its limit");
        expect(temperature >= MIN_TEMPERATURE && temperature.is_finite(), "temperature", temperature, &within)?;
        expect(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "a number above 0, and at most 1")?;
        expect((0.0..=1.0).contains(&min_p), "min_p", min_p, "a number from 0 to 1")
    }
}

/// Settings of [`generate`].
///
/// ```no_run
/// use rlhf_lm::generate::{GenerationConfig, Sampling, generate};
/// use rlhf_lm::model::{CausalLm, ModelOptions};
/// # fn main() -> rlhf_base::Result<()> {
/// let model = CausalLm::from_pretrained("runs/sft".as_ref(), ModelOptions::default())?;
/// let config = GenerationConfig { stop_token_ids: vec![0], ..GenerationConfig::new(Sampling::Greedy, 32) };
/// for response in generate(&model, &[vec![5, 6, 7]], &config)? {
///     println!("{:?} ({:?})", response.tokens, response.finish);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct GenerationConfig {
    /// The method by which the next token is chosen.
    pub sampling: Sampling,
    /// Repetition penalty: divides the positive logits, and multiplies the negative ones, of every token of the prompt and of the
    /// response so far, before anything else; 1 has no effect.
    pub repetition_penalty: f64,
    /// Minimum number of tokens of a response: before it, a stop token cannot be drawn, and a stop string is
    /// ignored.
    pub min_new_tokens: usize,
    /// Maximum number of tokens of a response.
    pub max_new_tokens: usize,
    /// A response ends with the first of these tokens, which is part of it; may be empty.
    pub stop_token_ids: Vec<i64>,
    /// A response ends with the token that completes one of these texts; the whole token is part of it.
    pub stop_strings: Option<StopStrings>,
    /// Whether a response stores the set of tokens that each of its tokens was drawn from; greedy decoding draws none.
    pub keep_sets: bool,
    /// Number of likeliest tokens that [`generate_with`] reports beside each token; `None` reports none and computes none.
    pub top_logprobs: Option<usize>,
    /// Number of responses to each prompt: a group. Each has its own draws. A prompt's keys and values are computed once and copied
    /// to the rows of its group.
    pub num_return_sequences: usize,
    /// The run's seed.
    pub seed: u64,
    /// The purpose of the draws, part of their key with `step` and the row.
    pub purpose: Purpose,
    /// The update that the draws are for; each update has its own draws.
    pub step: u64,
    /// Index of the first row, if the rows are part of a larger batch; else 0.
    pub first_row: u64,
    /// Maximum number of rows, which are responses, decoded together. Other responses wait, and take the rows of those that end. Affects
    /// speed and memory, and a token only where rounding changes a draw.
    pub batch_size: usize,
}

impl GenerationConfig {
    /// Settings for one response of exactly `max_new_tokens` tokens per prompt; seed 0, 32 rows at a time.
    pub fn new(sampling: Sampling, max_new_tokens: usize) -> Self {
        Self {
            sampling,
            repetition_penalty: 1.0,
            min_new_tokens: 0,
            max_new_tokens,
            stop_token_ids: Vec::new(),
            stop_strings: None,
            keep_sets: false,
            top_logprobs: None,
            num_return_sequences: 1,
            seed: 0,
            purpose: Purpose::Sampling,
            step: 0,
            first_row: 0,
            batch_size: 32,
        }
    }

    /// Whether responses store the sets of tokens that they were drawn from.
    fn stores_sets(&self) -> bool {
        self.keep_sets && self.sampling != Sampling::Greedy
    }

    /// Checks the settings together.
    pub fn check(&self) -> Result<()> {
        self.sampling.check()?;
        let penalty = self.repetition_penalty;
        expect(penalty > 0.0 && penalty.is_finite(), "repetition_penalty", penalty, "a number above 0")?;
        let per_prompt = self.num_return_sequences;
        expect(per_prompt > 0, "num_return_sequences", per_prompt, "a number above 0")?;
        let most = format!("at most max_new_tokens = {}", self.max_new_tokens);
        expect(self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", self.min_new_tokens, &most)
    }
}

/// Texts that end a response, independent of token boundaries; special tokens count as their names.
#[derive(Debug, Clone)]
pub struct StopStrings {
    tokenizer: Tokenizer,
    strings: Vec<String>,
    /// Number of last tokens that contain any string completed by the last token.
    window: usize,
}

impl StopStrings {
    /// Stop strings in the text that `tokenizer` decodes from tokens.
    ///
    /// # Errors
    /// If one of them is empty.
    pub fn new(tokenizer: &Tokenizer, strings: Vec<String>) -> Result<Self> {
        if strings.iter().any(String::is_empty) {
            return Err(Error::Usage("a stop string is empty: expected some text".into()));
        }
        // A token has at least one byte; 4 more tokens, as a tokenizer may decode the beginning of a text differently.
        let window = strings.iter().map(String::len).max().unwrap_or(0) + 4;
        Ok(Self { tokenizer: tokenizer.clone(), strings, window })
    }

    /// Whether the last of `tokens` completes one of the strings.
    fn completed_by_last(&self, tokens: &[i64]) -> Result<bool> {
        let Some((_, before)) = tokens.split_last() else { return Ok(false) };
        let from = tokens.len().saturating_sub(self.window);
        let text = self.tokenizer.decode_verbatim(&tokens[from..])?;
        if !self.strings.iter().any(|stop| text.contains(stop)) {
            return Ok(false);
        }
        // A string that was already complete does not count: it was ignored.
        let before = self.tokenizer.decode_verbatim(&before[from..])?;
        Ok(self.strings.iter().any(|stop| text.matches(stop).count() > before.matches(stop).count()))
    }
}

/// The reason that a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// Its last token is a stop token, or completes a stop string.
    Stop,
    /// It has the maximum number of tokens.
    Length,
}

/// One generated response.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Response {
    /// Token ids, at least one; includes the stop token, or the whole token that completes a stop string. A response of several turns has
    /// all of them, with what is between them.
    pub tokens: Vec<i64>,
    /// Log-probability of each token under softmax(logits / temperature) of the model's logits, before the
    /// repetition penalty, the minimum length and the filters; the temperature of greedy decoding is 1. 0 for tokens that were not sampled.
    pub logprobs: Vec<f32>,
    /// The reason that it ended.
    pub finish: FinishReason,
    /// The set of tokens that each token was drawn from, after the filters and the minimum length, if
    /// [`GenerationConfig::keep_sets`] is set.
    pub sets: Option<Vec<TokenSet>>,
    /// The tokens that the model did not sample, in order: results of tools, and what a chat template writes between turns. Empty for a
    /// response of one turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inserted: Vec<Range<usize>>,
}

/// One token of a response, as [`generate_with`] reports it.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Index of the response among all.
    pub response: usize,
    /// Token id.
    pub id: i64,
    /// Log-probability, as in [`Response::logprobs`].
    pub logprob: f32,
    /// Its alternatives, if [`GenerationConfig::top_logprobs`] is set.
    pub alternatives: Option<Alternatives>,
    /// The reason that the response ends with this token; `None` if it does not.
    pub finish: Option<FinishReason>,
}

/// The log-probability of a token beside those of the likeliest tokens in its place, under softmax(logits) of the model's logits:
/// independent of the temperature, the penalty and the filters.
#[derive(Debug, Clone, PartialEq)]
pub struct Alternatives {
    /// Log-probability of the token.
    pub logprob: f32,
    /// Ids and log-probabilities of the likeliest tokens, the likeliest first.
    pub top: Vec<(i64, f32)>,
}

impl Alternatives {
    /// Copies the alternatives of each token to the host.
    pub fn on_host(top_logprobs: &TopLogprobs) -> Vec<Self> {
        let logprobs = Vec::<f32>::try_from(&top_logprobs.logprobs).expect("one number per token");
        let ids = Vec::<i64>::try_from(top_logprobs.top_ids.flatten(0, -1)).expect("k ids per token");
        let top = Vec::<f32>::try_from(top_logprobs.top_logprobs.flatten(0, -1)).expect("k numbers per token");
        let k = ids.len() / logprobs.len().max(1);
        let row = |(at, &logprob): (usize, &f32)| {
            let row = at * k..(at + 1) * k;
            let pairs = ids[row.clone()].iter().copied().zip(top[row].iter().copied());
            Self { logprob, top: pairs.collect() }
        };
        logprobs.iter().enumerate().map(row).collect()
    }
}

/// Receives each token of [`generate_with`], and returns whether generation continues.
type Each<'e> = dyn FnMut(&Token) -> ControlFlow<()> + 'e;

impl Response {
    fn empty(config: &GenerationConfig) -> Self {
        let sets = config.stores_sets().then(Vec::new);
        Self { tokens: Vec::new(), logprobs: Vec::new(), finish: FinishReason::Length, sets, inserted: Vec::new() }
    }

    /// Whether the model sampled each token.
    pub fn sampled(&self) -> Vec<bool> {
        let mut sampled = vec![true; self.tokens.len()];
        self.inserted.iter().for_each(|span| sampled[span.clone()].fill(false));
        sampled
    }

    /// Number of tokens that the model sampled.
    pub fn num_sampled(&self) -> usize {
        self.tokens.len() - self.inserted.iter().map(Range::len).sum::<usize>()
    }
}

/// Generates `num_return_sequences` responses to each prompt: first those to the first prompt, then those to the second, and so on.
///
/// The draws of response `i` of all depend only on the seed, the purpose, the step and `first_row + i`, not on the rest of the
/// batch: `n` responses to a prompt are those to the prompt repeated `n` times.
///
/// # Errors
/// If a setting is out of range; if a prompt is empty, contains an id outside the vocabulary, or does not fit the
/// context beside `max_new_tokens`; if the model's logits are not finite.
pub fn generate<P: AsRef<[i64]>>(model: &CausalLm, prompts: &[P], config: &GenerationConfig) -> Result<Vec<Response>> {
    generate_with(model, prompts, config, |_| ControlFlow::Continue(()))
}

/// [`generate`], which reports each token to `each` as it is chosen: those of a response in order, those of the responses of a batch
/// by turns. On a GPU, tokens are chosen several steps at a time.
///
/// If `each` returns [`ControlFlow::Break`], generation ends at once: responses then have the tokens that were reported, and may be
/// empty.
///
/// # Errors
/// As [`generate`].
pub fn generate_with<P: AsRef<[i64]>>(
    model: &CausalLm,
    prompts: &[P],
    config: &GenerationConfig,
    mut each: impl FnMut(&Token) -> ControlFlow<()>,
) -> Result<Vec<Response>> {
    generate_by(steps_on(model), model, prompts, config, &mut each, StopCheck::NEVER)
}

/// [`generate_with`], which is asked between the layers of a pass over prompts too whether it `ends`. It then is an error.
pub fn generate_until<P: AsRef<[i64]>>(
    model: &CausalLm,
    prompts: &[P],
    config: &GenerationConfig,
    mut each: impl FnMut(&Token) -> ControlFlow<()>,
    ends: StopCheck<'_>,
) -> Result<Vec<Response>> {
    generate_by(steps_on(model), model, prompts, config, &mut each, ends)
}

/// Number of steps after which tokens are read from the model's device.
fn steps_on(model: &CausalLm) -> usize {
    match model.device() {
        Device::Cuda(_) => STEPS_ON_GPU,
        _ => 1,
    }
}

/// [`generate`] with the prompts divided over the ranks of `world`, which all pass the same ones; each gets all responses. All
/// responses to a prompt are generated by one rank. The draws of a response are those of its row among all, so the number of ranks
/// changes no response in f32.
///
/// # Errors
/// As [`generate`], on every rank; if a rank has ended or does not respond.
pub fn generate_on<P: AsRef<[i64]>>(
    world: &World,
    model: &CausalLm,
    prompts: &[P],
    config: &GenerationConfig,
) -> Result<Vec<Response>> {
    let share = world.share(prompts.len());
    let first_row = config.first_row + (share.start * config.num_return_sequences) as u64;
    let config = GenerationConfig { first_row, ..config.clone() };
    let responses = world.agree(generate(model, &prompts[share], &config))?;
    Ok(world.gather(responses)?.into_iter().flatten().collect())
}

/// [`generate_with`], reading tokens from the device every `steps` steps, which affects only speed.
fn generate_by<P: AsRef<[i64]>>(
    steps: usize,
    model: &CausalLm,
    prompts: &[P],
    config: &GenerationConfig,
    each: &mut Each<'_>,
    ends: StopCheck<'_>,
) -> Result<Vec<Response>> {
    check_fit(model, prompts, config)?;
    let waiting = Waiting::new(model, prompts, config, ends);
    generate_waiting(steps, waiting, prompts.len() * config.num_return_sequences, each)
}

/// Generates the `count` responses of `waiting`.
fn generate_waiting(
    steps: usize,
    mut waiting: Waiting<'_>,
    count: usize,
    each: &mut Each<'_>,
) -> Result<Vec<Response>> {
    let config = waiting.config();
    let mut responses: Vec<Option<Response>> = vec![None; count];
    tch::no_grad(|| {
        while let Some(mut decoding) = waiting.start()? {
            let flow = decoding.run(steps, &mut waiting, each)?;
            for (row, response) in decoding.finished() {
                responses[row] = Some(response);
            }
            if flow.is_break() {
                break;
            }
        }
        Ok::<_, Error>(())
    })?;
    // Responses without tokens, or that were not started because `each` ended the generation, are empty.
    Ok(responses.into_iter().map(|response| response.unwrap_or_else(|| Response::empty(config))).collect())
}

/// Checks the settings, and that each prompt fits the model's context beside the new tokens.
fn check_fit<P: AsRef<[i64]>>(model: &CausalLm, prompts: &[P], config: &GenerationConfig) -> Result<()> {
    config.check()?;
    let context = model.config().max_position_embeddings;
    let longest = model.config().max_prompt_len(context, config.max_new_tokens);
    for (row, prompt) in prompts.iter().enumerate() {
        let (len, new_tokens) = (prompt.as_ref().len(), config.max_new_tokens);
        if longest.is_some_and(|longest| len <= longest) {
            continue;
        }
        return Err(Error::Run(if model.config().is_encoder_decoder() {
            format!(
                "prompt {row}: expected at most {context} tokens for the encoder and {} new ones for the decoder, found {len} and {new_tokens}",
                context - 1
            )
        } else {
            format!("prompt {row}: {len} tokens and {new_tokens} new ones exceed the model's context of {context}")
        }));
    }
    Ok(())
}

/// A batch of responses that is being decoded.
struct Decoding<'a> {
    model: &'a CausalLm,
    config: &'a GenerationConfig,
    /// The number of each response among all of [`generate`].
    rows: Vec<usize>,
    /// The random numbers of each response.
    streams: Vec<Stream>,
    /// The last token of each response's prompt.
    last_of_prompts: Vec<i64>,
    responses: Vec<Response>,
    stopped: Vec<bool>,
    /// Index of the response that each row of the cache belongs to. A stopped response stays in the cache until enough have
    /// stopped to make copying the cache worthwhile.
    alive: Vec<usize>,
    cache: KvCache,
    /// Logits of the next token, `[rows of the cache, vocab]`.
    logits: Tensor,
    /// The tokens chosen last, `[rows of the cache]` i64; `None` before the first step.
    last: Option<Tensor>,
    /// The tokens of prompt and response, if there is a repetition penalty.
    seen: Option<Seen>,
    stop_ids: Tensor,
}

impl Decoding<'_> {
    /// Decodes until all responses have ended and, where rows are refilled, none waits, or until `each` ends the generation. Reads results from
    /// the device every `steps` steps.
    fn run(&mut self, steps: usize, waiting: &mut Waiting<'_>, each: &mut Each<'_>) -> Result<ControlFlow<()>> {
        loop {
            let chosen = self.decode(steps)?;
            let rows: Vec<usize> = (0..self.alive.len()).collect();
            for choice in on_host(&chosen) {
                if self.record(&rows, choice, each)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            if waiting.refills() {
                if self.refill(waiting, each)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                self.restart_stopped();
            }
            // Rows are copied where they leave the batch, so they stay while others wait for them.
            if (waiting.is_empty() || !waiting.refills()) && !self.remove_stopped() {
                return Ok(ControlFlow::Continue(()));
            }
        }
    }

    /// The responses with their numbers among all.
    fn finished(self) -> impl Iterator<Item = (usize, Response)> {
        self.rows.into_iter().zip(self.responses)
    }

    /// Queues at most `steps` steps on the device, without waiting for the results; at most as many as the longest response can take.
    ///
    /// # Errors
    /// As [`CausalLm::decode`].
    fn decode(&mut self, steps: usize) -> Result<Vec<Choice>> {
        let active = self.alive.iter().filter(|&&i| !self.stopped[i]);
        let longest = active.map(|&i| self.responses[i].tokens.len()).max().unwrap_or(0);
        let steps = steps.min(self.config.max_new_tokens - longest);
        let draws: Vec<f64> = (0..steps).flat_map(|_| &self.alive).map(|&i| self.streams[i].uniform()).collect();
        let draws = on_device(&draws, self.model.device()).view([steps as i64, -1]);
        let mut chosen = Vec::with_capacity(steps);
        for (step, draws) in draws.unbind(0).into_iter().enumerate() {
            if let Some(tokens) = &self.last {
                self.logits = self.model.decode(tokens, &mut self.cache)?;
            }
            let short = self.are_short(&self.alive, step);
            let choice = self.choose(&self.logits, self.seen.as_ref(), &short, &draws);
            if let Some(seen) = &mut self.seen {
                seen.add(&choice.tokens);
            }
            self.last = Some(choice.tokens.shallow_clone());
            chosen.push(choice);
        }
        Ok(chosen)
    }

    /// Whether each of `responses` has fewer than the least number of tokens, `steps` steps from now.
    fn are_short(&self, responses: &[usize], steps: usize) -> Vec<bool> {
        let is_short = |&i: &usize| self.responses[i].num_sampled() + steps < self.config.min_new_tokens;
        responses.iter().map(is_short).collect()
    }

    /// Chooses a token for each row of `logits` `[rows, vocab]`, whose tokens so far are `seen`, with a number of `draws` `[rows]` f64 each.
    /// Stop tokens are excluded in rows that are `short`.
    fn choose(&self, logits: &Tensor, seen: Option<&Seen>, short: &[bool], draws: &Tensor) -> Choice {
        let config = self.config;
        // Half precision would round each change of the logits.
        let wide = || logits.to_kind(Kind::Float);
        let mut adjusted = seen.map(|seen| seen.penalize(&wide(), config.repetition_penalty));
        if short.contains(&true) && !config.stop_token_ids.is_empty() {
            let before = adjusted.unwrap_or_else(wide);
            let excluded = without(&before, &self.stop_ids);
            adjusted = Some(if short.contains(&false) {
                excluded.where_self(&on_device(short, logits.device()).unsqueeze(1), &before)
            } else {
                excluded
            });
        }
        let mut choice = choose(logits, adjusted.as_ref(), config.sampling, config.stores_sets(), draws);
        choice.top = config.top_logprobs.map(|k| TopLogprobs::of(logits, &choice.tokens, k));
        choice
    }

    /// Appends the tokens of one step to the responses of the rows `rows` of the cache that have not stopped, and reports them to `each`.
    fn record(&mut self, rows: &[usize], choice: HostChoice, each: &mut Each<'_>) -> Result<ControlFlow<()>> {
        let HostChoice { tokens, logprobs, kept, mut alternatives } = choice;
        let vocab = kept.len() / tokens.len().max(1);
        for (at, (token, logprob)) in tokens.into_iter().zip(logprobs).enumerate() {
            let i = self.alive[rows[at]];
            if self.stopped[i] {
                continue;
            }
            let ends = self.append(i, 0, (token, logprob), &kept[at * vocab..(at + 1) * vocab])?;
            let response = &self.responses[i];
            self.stopped[i] = ends || response.tokens.len() == self.config.max_new_tokens;
            let finish = self.stopped[i].then_some(response.finish);
            let alternatives = alternatives.get_mut(at).and_then(Option::take);
            if each(&Token { response: self.rows[i], id: token, logprob, alternatives, finish }).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Gives the rows of stopped responses to waiting ones, once [`Waiting::least_free`] have stopped, and samples their first tokens.
    fn refill(&mut self, waiting: &mut Waiting<'_>, each: &mut Each<'_>) -> Result<ControlFlow<()>> {
        let count = self.alive.len();
        loop {
            let free: Vec<usize> = (0..count).filter(|&row| self.stopped[self.alive[row]]).collect();
            if waiting.is_empty() || free.len() < waiting.least_free(count) {
                return Ok(ControlFlow::Continue(()));
            }
            let mut free = &free[..];
            while !free.is_empty() && !waiting.is_empty() {
                let first = self.start_waiting(free, waiting)?;
                let (started, rest) = free.split_at(first.tokens.len());
                if self.record(started, first, each)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                free = rest;
            }
        }
    }

    /// Gives the first of the rows `free` to waiting responses, and chooses the first tokens of these: as many as rows are taken.
    fn start_waiting(&mut self, free: &[usize], waiting: &mut Waiting<'_>) -> Result<HostChoice> {
        let started = waiting.read(free.len(), self.alive.len())?.start(free.len());
        let responses: Vec<usize> = (self.responses.len()..self.responses.len() + started.numbers.len()).collect();
        let rows: Vec<i64> = free.iter().take(responses.len()).map(|&row| row as i64).collect();
        started.copy_to(&mut self.cache, &rows);
        let (logits, seen) = (started.logits(), started.seen());
        self.streams.extend(started.streams());
        self.last_of_prompts.extend(started.last_of_prompts());
        self.rows.extend(&started.numbers);
        waiting.forget_started();
        self.responses.resize(self.rows.len(), Response::empty(self.config));
        self.stopped.resize(self.rows.len(), false);
        free.iter().zip(&responses).for_each(|(&row, &i)| self.alive[row] = i);
        let draws: Vec<f64> = responses.iter().map(|&i| self.streams[i].uniform()).collect();
        let draws = on_device(&draws, logits.device());
        let choice = self.choose(&logits, seen.as_ref(), &self.are_short(&responses, 0), &draws);
        let index = on_device(&rows, logits.device());
        if let (Some(seen), Some(mut new)) = (&mut self.seen, seen) {
            new.add(&choice.tokens);
            seen.replace_rows(&index, &new);
        }
        self.last = self.last.take().map(|tokens| tokens.index_copy(0, &index, &choice.tokens));
        Ok(on_host(&[choice]).remove(0))
    }

    /// Lets the rows of stopped responses start again: rows end at different times, and those that are decoded on to no purpose would exceed
    /// the cache.
    fn restart_stopped(&mut self) {
        let stopped: Vec<usize> = (0..self.alive.len()).filter(|&row| self.stopped[self.alive[row]]).collect();
        if !stopped.is_empty() {
            self.cache.restart_rows(&stopped);
        }
    }

    /// Appends a sampled token with its log-probability to response `i`; `kept` are the tokens that could be drawn, if sets are stored. Returns
    /// whether the token ends the turn, which is the response from its token `turn` on.
    fn append(&mut self, i: usize, turn: usize, (token, logprob): (i64, f32), kept: &[bool]) -> Result<bool> {
        let config = self.config;
        if !logprob.is_finite() {
            let prompt = self.rows[i] / config.num_return_sequences;
            return Err(Error::Run(format!(
                "prompt {prompt}: the model's logits are not finite: its weights are damaged, or training diverged"
            )));
        }
        let response = &mut self.responses[i];
        response.tokens.push(token);
        response.logprobs.push(logprob);
        if let Some(sets) = &mut response.sets {
            sets.push(TokenSet::new(kept));
        }
        let ends = config.stop_token_ids.contains(&token)
            || match &config.stop_strings {
                Some(strings) => {
                    response.num_sampled() >= config.min_new_tokens
                        && strings.completed_by_last(&response.tokens[turn..])?
                }
                None => false,
            };
        response.finish = if ends { FinishReason::Stop } else { FinishReason::Length };
        Ok(ends)
    }

    /// Removes stopped responses from the cache once an eighth of its rows have stopped. Returns whether any response has not.
    fn remove_stopped(&mut self) -> bool {
        let (alive, stopped) = (&self.alive, &self.stopped);
        let kept: Vec<usize> = (0..alive.len()).filter(|&at| !stopped[alive[at]]).collect();
        if kept.is_empty() {
            return false;
        }
        if kept.len() * 8 <= alive.len() * 7 {
            let index: Vec<i64> = kept.iter().map(|&at| at as i64).collect();
            self.cache.keep_rows(&index);
            if let Some(seen) = &mut self.seen {
                seen.keep_rows(&index);
            }
            let index = on_device(&index, self.model.device());
            self.last = self.last.take().map(|tokens| tokens.index_select(0, &index));
            self.alive = kept.iter().map(|&at| self.alive[at]).collect();
        }
        true
    }
}

/// The tokens chosen in one step, one row per response.
struct Choice {
    /// `[rows]` i64.
    tokens: Tensor,
    /// `[rows]` f32.
    logprobs: Tensor,
    /// The tokens that could be drawn, `[rows, vocab]` bool, if sets are stored.
    kept: Option<Tensor>,
    /// The likeliest tokens, if they are reported.
    top: Option<TopLogprobs>,
}

/// [`Choice`] in the host's memory; `kept` is empty if sets are not stored, `alternatives` if none are reported.
struct HostChoice {
    tokens: Vec<i64>,
    logprobs: Vec<f32>,
    kept: Vec<bool>,
    alternatives: Vec<Option<Alternatives>>,
}

/// Copies the choices of several steps to the host, with one copy per kind of result.
fn on_host(chosen: &[Choice]) -> Vec<HostChoice> {
    let all = |f: fn(&Choice) -> &Tensor| Tensor::cat(&chosen.iter().map(f).collect::<Vec<_>>(), 0);
    let rows = chosen[0].tokens.size()[0] as usize;
    let tokens = Vec::<i64>::try_from(all(|choice| &choice.tokens)).expect("one id per step and row");
    let logprobs = Vec::<f32>::try_from(all(|choice| &choice.logprobs)).expect("one number per step and row");
    let kept = chosen.iter().map(|choice| {
        let kept = choice.kept.as_ref().map(|kept| kept.flatten(0, -1));
        kept.map_or_else(Vec::new, |kept| Vec::<bool>::try_from(kept).expect("an entry per row and token"))
    });
    let alternatives = chosen.iter().map(|choice| {
        let alternatives = choice.top.as_ref().map(Alternatives::on_host).unwrap_or_default();
        alternatives.into_iter().map(Some).collect::<Vec<_>>()
    });
    let by_step = tokens.chunks(rows).zip(logprobs.chunks(rows)).zip(kept).zip(alternatives);
    by_step
        .map(|(((tokens, logprobs), kept), alternatives)| {
            let (tokens, logprobs) = (tokens.to_vec(), logprobs.to_vec());
            HostChoice { tokens, logprobs, kept, alternatives }
        })
        .collect()
}

/// The tokens that each row contains so far, `[rows, vocab]` bool.
struct Seen(Tensor);

impl Seen {
    fn new(rows: &[&[i64]], logits: &Tensor) -> Self {
        let seen = logits.zeros_like().to_kind(Kind::Bool);
        for (tokens, row) in rows.iter().zip(0i64..) {
            let tokens = on_device(tokens, logits.device());
            let _ = seen.get(row).index_fill_(0, &tokens, 1);
        }
        Self(seen)
    }

    /// Adds a token to every row, `[rows]` i64.
    fn add(&mut self, tokens: &Tensor) {
        let _ = self.0.scatter_value_(1, &tokens.unsqueeze(1), 1);
    }

    /// Adds tokens to one row.
    fn add_to(&mut self, row: usize, tokens: &[i64]) {
        let tokens = on_device(tokens, self.0.device());
        let _ = self.0.get(row as i64).index_fill_(0, &tokens, 1);
    }

    fn keep_rows(&mut self, kept: &[i64]) {
        self.0 = self.0.index_select(0, &on_device(kept, self.0.device()));
    }

    /// Replaces the rows at `index` `[k]` i64 by the rows of `new`.
    fn replace_rows(&mut self, index: &Tensor, new: &Self) {
        let _ = self.0.index_copy_(0, index, &new.0);
    }

    /// Makes seen tokens less likely: the formula of the CTRL paper, with negative logits multiplied, as in transformers.
    fn penalize(&self, logits: &Tensor, penalty: f64) -> Tensor {
        let penalized = (logits * penalty).where_self(&logits.lt(0.0), &(logits / penalty));
        penalized.where_self(&self.0, logits)
    }
}

/// The `ids` that are columns of `logits`, on its device.
fn ids_within(ids: &[i64], logits: &Tensor) -> Tensor {
    let vocab = logits.size()[1];
    let ids: Vec<i64> = ids.iter().copied().filter(|id| (0..vocab).contains(id)).collect();
    on_device(&ids, logits.device())
}

/// Sets the logits of the tokens `ids` to -inf.
fn without(logits: &Tensor, ids: &Tensor) -> Tensor {
    logits.index_fill(1, ids, f64::NEG_INFINITY)
}

/// Chooses one token per row of `logits` `[rows, vocab]` with one uniform draw per row, by the `adjusted` logits if there are
/// any. Returns tokens, `[rows]` i64, and their log-probabilities under the unadjusted logits, `[rows]` f32, which are not
/// finite where the logits are not. Does not wait for a GPU.
///
/// With `keep_sets`, also returns the tokens that could be drawn.
fn choose(logits: &Tensor, adjusted: Option<&Tensor>, sampling: Sampling, keep_sets: bool, draws: &Tensor) -> Choice {
    let temperature = sampling.temperature();
    if adjusted.is_none() && !sampling.filters() && !keep_sets && uses_kernels(logits.kind(), logits.device()) {
        let draws = Vec::<f64>::try_from(draws).expect("one number per row");
        let draws = (sampling != Sampling::Greedy).then_some(draws.as_slice());
        let (tokens, logprobs) = tch_ext::logits_sample(logits, temperature, draws);
        let (tokens, logprobs) = (Tensor::from_slice(&tokens), Tensor::from_slice(&logprobs));
        return Choice { tokens, logprobs, kept: None, top: None };
    }
    let on_gpu = tch_ext::has_gpu_kernels(logits.kind(), logits.device());
    if adjusted.is_none() && !sampling.filters() && !keep_sets && on_gpu {
        let draws = (sampling != Sampling::Greedy).then_some(draws);
        let (tokens, logprobs) = tch_ext::logits_sample_on_device(&logits.contiguous(), temperature, draws);
        return Choice { tokens, logprobs, kept: None, top: None };
    }
    let logits = logits.to_kind(Kind::Float) / temperature;
    let all = logits.log_softmax(-1, Kind::Float);
    let adjusted = adjusted.map(|adjusted| adjusted / temperature);
    let by = adjusted.as_ref().unwrap_or(&logits);
    let mut kept = None;
    let tokens = match sampling {
        Sampling::Greedy => by.argmax(-1, true),
        Sampling::Random { top_k, top_p, min_p, .. } => {
            let probs = if sampling.filters() || adjusted.is_some() {
                let filtered = filter(by, top_k, top_p, min_p);
                kept = keep_sets.then(|| filtered.isfinite());
                filtered.softmax(-1, Kind::Float)
            } else {
                kept = keep_sets.then(|| by.isfinite());
                all.exp()
            };
            // The inverse of the cumulative distribution at the draw. Summed in f64: an f32 sum over a large vocabulary
            // would shift the boundaries of rare tokens by more than their probability.
            let cumulative = probs.cumsum(-1, Kind::Double);
            let vocab = cumulative.size()[1];
            let total = cumulative.narrow(1, vocab - 1, 1);
            let target = draws.unsqueeze(1) * total;
            target.searchsorted(&cumulative, false, true, "right", None::<&Tensor>).clamp_max(vocab - 1)
        }
    };
    let logprobs = all.gather(1, &tokens, false).squeeze_dim(1);
    Choice { tokens: tokens.squeeze_dim(1), logprobs, kept, top: None }
}

/// Sets the logits of tokens outside top-k, then outside top-p, then below min-p to -inf; transformers' order.
fn filter(logits: &Tensor, top_k: usize, top_p: f64, min_p: f64) -> Tensor {
    let vocab = logits.size()[1];
    let mut logits = logits.shallow_clone();
    let top_k = i64::try_from(top_k).unwrap_or(i64::MAX);
    if top_k > 0 && top_k < vocab {
        let (best, _) = logits.topk(top_k, -1, true, true);
        logits = logits.masked_fill(&logits.lt_tensor(&best.narrow(1, top_k - 1, 1)), f64::NEG_INFINITY);
    }
    if top_p < 1.0 {
        let (sorted, order) = logits.sort(-1, true);
        let probs = sorted.softmax(-1, Kind::Float);
        // A token is dropped if the tokens before it reach top_p already: the token that crosses the threshold stays.
        let before = probs.cumsum(-1, Kind::Float) - &probs;
        let dropped = before.ge(top_p);
        let dropped = dropped.zeros_like().scatter(1, &order, &dropped);
        logits = logits.masked_fill(&dropped, f64::NEG_INFINITY);
    }
    if min_p > 0.0 {
        let probs = logits.softmax(-1, Kind::Float);
        let least = probs.amax([-1i64].as_slice(), true) * min_p;
        logits = logits.masked_fill(&probs.lt_tensor(&least), f64::NEG_INFINITY);
    }
    logits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Batch, ModelOptions, QuantType, Quantization};
    use rlhf_base::weights::read_json;
    use serde_json::Value;
    use std::path::Path;

    fn row(values: &[f32]) -> Tensor {
        Tensor::from_slice(values).unsqueeze(0)
    }

    #[test]
    fn draws_follow_the_tempered_probabilities() {
        // Probabilities .1 .2 .7 at temperature 1; at temperature .5 they are squared and sum to .54.
        let logits = row(&[0.1f32.ln(), 0.2f32.ln(), 0.7f32.ln()]);
        for (temperature, expected) in [(1.0, [0.1, 0.2, 0.7]), (0.5, [0.01 / 0.54, 0.04 / 0.54, 0.49 / 0.54])] {
            let mut counts = [0.0; 3];
            for i in 0..1000 {
                let draw = (f64::from(i) + 0.5) / 1000.0;
                let (token, logprob) = chosen(&logits, Sampling::at_temperature(temperature), draw);
                counts[token as usize] += 1e-3;
                assert!((f64::from(logprob).exp() - expected[token as usize]).abs() < 1e-6);
            }
            for (count, expected) in counts.iter().zip(expected) {
                assert!((count - expected).abs() < 2e-3, "{counts:?}");
            }
        }
    }

    #[test]
    fn the_edges_of_the_draw_give_the_first_and_last_possible_token() {
        let logits = row(&[f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY]);
        let at = |draw| chosen(&logits, Sampling::at_temperature(1.0), draw).0;
        assert_eq!((at(0.0), at(1.0 - f64::EPSILON)), (1, 2));
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_their_tokens() {
        let logits = row(&[0.1f32.ln(), 0.4f32.ln(), 0.3f32.ln(), 0.2f32.ln()]);
        let kept = |top_k, top_p, min_p| {
            let finite = filter(&logits, top_k, top_p, min_p).isfinite().to_kind(Kind::Int64).squeeze_dim(0);
            Vec::<i64>::try_from(finite).unwrap()
        };
        assert_eq!(kept(2, 1.0, 0.0), [0, 1, 1, 0]);
        assert_eq!(kept(0, 0.75, 0.0), [0, 1, 1, 1]); // .4 + .3 is short of .75, so the token that crosses it stays
        assert_eq!(kept(0, 0.65, 0.0), [0, 1, 1, 0]);
        assert_eq!(kept(0, 0.01, 0.0), [0, 1, 0, 0]); // at least one
        assert_eq!(kept(0, 1.0, 0.0), [1, 1, 1, 1]);
        assert_eq!(kept(0, 1.0, 0.6), [0, 1, 1, 0]); // .2 is half of .4, .3 three quarters
        assert_eq!(kept(0, 1.0, 1.0), [0, 1, 0, 0]);
    }

    #[test]
    fn processors_give_what_those_of_transformers_give() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sampling.json");
        let rows = read_json(&path).unwrap()["filtered"].as_array().unwrap().clone();
        for golden in rows {
            let numbers = |name: &str| -> Vec<f32> {
                let numbers = golden[name].as_array().unwrap().iter();
                numbers.map(|x| x.as_f64().map_or(f32::NEG_INFINITY, |x| x as f32)).collect()
            };
            let ids = |value: &Value| -> Vec<i64> {
                value.as_array().into_iter().flatten().map(|id| id.as_i64().unwrap()).collect()
            };
            let settings = &golden["settings"];
            let set = |name: &str, off: f64| settings[name].as_f64().unwrap_or(off);
            let mut logits = row(&numbers("logits"));
            // As a step of `generate` has it: the prompt at the start, a token at a time from then on.
            let tokens = ids(&golden["tokens"]);
            let mut seen = Seen::new(&[&tokens[..2]], &logits);
            tokens[2..].iter().for_each(|token| seen.add(&Tensor::from_slice(std::slice::from_ref(token))));
            if settings.get("repetition_penalty").is_some() {
                logits = seen.penalize(&logits, set("repetition_penalty", 1.0));
            }
            if settings.get("min_new_tokens").is_some() {
                let stops = [ids(&settings["eos"]), vec![12]].concat(); // 12 is outside the vocabulary
                logits = without(&logits, &ids_within(&stops, &logits));
            }
            let tempered = logits / set("temperature", 1.0);
            let found = filter(&tempered, set("top_k", 0.0) as usize, set("top_p", 1.0), set("min_p", 0.0));
            let found = Vec::<f32>::try_from(found.squeeze_dim(0)).unwrap();
            for (found, expected) in found.iter().zip(numbers("filtered")) {
                assert!((found - expected).abs() <= 1e-6 || *found == expected, "{settings}: {found} {expected}");
            }
        }
    }

    /// The token that `draw` gives of one row of logits, and its log-probability.
    fn chosen(logits: &Tensor, sampling: Sampling, draw: f64) -> (i64, f32) {
        let choice = choose(logits, None, sampling, false, &Tensor::from_slice(&[draw]));
        let HostChoice { tokens, logprobs, .. } = on_host(&[choice]).remove(0);
        (tokens[0], logprobs[0])
    }

    fn golden_model(name: &str) -> (CausalLm, Tokenizer) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
        let model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
        (model, Tokenizer::from_pretrained(&dir).unwrap())
    }

    /// Nine prompts of 1 to 9 tokens.
    pub(super) fn prompts() -> Vec<Vec<i64>> {
        (0..9i64).map(|row| (0..=row).map(|t| 5 + (row * 37 + t * 11) % 250).collect()).collect()
    }

    #[test]
    fn how_many_steps_are_decoded_between_two_looks_changes_nothing() {
        for name in ["gpt_neox", "llama_tied"] {
            let (model, tokenizer) = golden_model(name);
            let stops: Vec<i64> = (0..model.config().vocab_size).filter(|id| id % 12 == 0).collect();
            let plain = GenerationConfig { seed: 3, ..GenerationConfig::new(Sampling::at_temperature(0.7), 20) };
            let stopping = GenerationConfig { stop_token_ids: stops, ..plain.clone() };
            let filters = Sampling::Random { temperature: 1.3, top_k: 50, top_p: 0.95, min_p: 0.01 };
            // A letter that samples hold early and late.
            let strings = StopStrings::new(&tokenizer, vec!["a".into(), "he".into()]).unwrap();
            let settings = [
                plain.clone(),
                GenerationConfig { max_new_tokens: 1, ..stopping.clone() },
                GenerationConfig { max_new_tokens: 16, sampling: Sampling::Greedy, ..stopping.clone() },
                GenerationConfig { sampling: filters, min_new_tokens: 4, repetition_penalty: 1.4, ..stopping.clone() },
                GenerationConfig { num_return_sequences: 3, batch_size: 5, max_new_tokens: 17, ..stopping },
                GenerationConfig { stop_strings: Some(strings), min_new_tokens: 2, ..plain },
            ];
            for (i, config) in settings.iter().enumerate() {
                let expected =
                    generate_by(1, &model, &prompts(), config, &mut |_| ControlFlow::Continue(()), StopCheck::NEVER)
                        .unwrap();
                let early = |r: &Response| r.finish == FinishReason::Stop && r.tokens.len() < config.max_new_tokens;
                assert_eq!(expected.iter().any(early), ![0, 1].contains(&i), "{name}, settings {i}: who stops early");
                for steps in [3, 16] {
                    let found = generate_by(
                        steps,
                        &model,
                        &prompts(),
                        config,
                        &mut |_| ControlFlow::Continue(()),
                        StopCheck::NEVER,
                    )
                    .unwrap();
                    for (found, expected) in found.iter().zip(&expected) {
                        let what = format!("{name}, settings {i}: {steps} steps");
                        assert_eq!((&found.tokens, found.finish), (&expected.tokens, expected.finish), "{what}");
                        assert_eq!(found.logprobs.len(), expected.logprobs.len(), "{what}");
                        // Rows leave the batch at other times, and products round by its size.
                        let pairs = found.logprobs.iter().zip(&expected.logprobs);
                        assert!(pairs.map(|(a, b)| (a - b).abs()).all(|error| error < 1e-5), "{what}: {found:?}");
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU, `make cuda` and RLHF_TEST_CUDA=1"]
    fn a_gpu_that_records_its_steps_generates_what_the_processor_does() {
        if std::env::var_os("RLHF_TEST_CUDA").is_none() {
            return;
        }
        tch_ext::load_cuda().unwrap();
        assert!(tch_ext::has_graphs(), "`make cuda` has built the library");
        // `phi3_long`, `mixtral` and `t5` have steps that cannot be recorded.
        let recorded = ["gpt2", "gpt_neox", "llama_tied", "gemma2", "gemma3", "mistral", "olmo2", "opt", "qwen3"];
        let plain = recorded.into_iter().chain(["phi3_long", "mixtral", "t5"]).map(|name| (name, None));
        // Each step computes the values of these weights.
        let four_bits = Quantization::FourBit { quant_type: QuantType::Nf4, nested: true };
        let quantized = [four_bits, Quantization::EightBit].map(|format| ("qwen3", Some(format)));
        for (name, quantization) in plain.chain(quantized) {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
            let [model, on_gpu] = [Device::Cpu, Device::Cuda(0)].map(|device| {
                CausalLm::from_pretrained(&dir, ModelOptions { device, quantization, ..ModelOptions::default() })
                    .unwrap()
            });
            let vocab = model.config().vocab_size;
            let within = |prompt: Vec<i64>| prompt.into_iter().map(|id| 5 + id % (vocab - 5)).collect();
            let prompts: Vec<Vec<i64>> = prompts().into_iter().map(within).collect();
            let stops: Vec<i64> = (0..vocab).filter(|id| id % 40 == 0).collect();
            let longest = model.config().max_position_embeddings.min(64) - 10;
            let plain = GenerationConfig { seed: 3, ..GenerationConfig::new(Sampling::at_temperature(0.7), longest) };
            let settings = [
                plain.clone(),
                GenerationConfig { stop_token_ids: stops.clone(), ..plain.clone() },
                GenerationConfig { sampling: Sampling::Greedy, repetition_penalty: 1.4, ..plain.clone() },
                GenerationConfig { num_return_sequences: 3, batch_size: 5, stop_token_ids: stops, ..plain },
            ];
            for (i, config) in settings.iter().enumerate() {
                let expected = generate(&model, &prompts, config).unwrap();
                let found = generate(&on_gpu, &prompts, config).unwrap();
                // A draw at the border between two tokens may fall to either side.
                let mut other = 0;
                for (row, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let what = format!("{name}, settings {i}, row {row}");
                    let tokens = found.tokens.iter().zip(&expected.tokens);
                    let same = tokens.take_while(|(a, b)| a == b).count();
                    let pairs = found.logprobs.iter().zip(&expected.logprobs).take(same);
                    assert!(pairs.map(|(a, b)| (a - b).abs()).all(|error| error < 1e-4), "{what}: {found:?}");
                    other += usize::from((same, found.finish) != (expected.tokens.len(), expected.finish));
                }
                assert!(other <= 1, "{name}, settings {i}: {other} rows of {}", found.len());
            }
        }
    }

    #[test]
    fn every_token_is_reported_once_with_its_alternatives_and_a_break_ends_the_generation() {
        let (model, tokenizer) = golden_model("gpt_neox");
        let strings = StopStrings::new(&tokenizer, vec!["a".into(), "he".into()]).unwrap();
        let config = GenerationConfig {
            num_return_sequences: 3,
            batch_size: 5,
            stop_strings: Some(strings),
            ..GenerationConfig::new(Sampling::at_temperature(0.7), 12)
        };
        let expected = generate(&model, &prompts(), &config).unwrap();
        assert!(
            expected.iter().any(|r| r.finish == FinishReason::Stop) && expected.iter().any(|r| r.tokens.len() == 12)
        );
        for top_logprobs in [None, Some(0), Some(3)] {
            let config = GenerationConfig { top_logprobs, ..config.clone() };
            let mut seen: Vec<Vec<Token>> = vec![Vec::new(); expected.len()];
            let each = |token: &Token| {
                seen[token.response].push(token.clone());
                ControlFlow::Continue(())
            };
            let found = generate_with(&model, &prompts(), &config, each).unwrap();
            assert_eq!(found, expected);
            for ((tokens, expected), prompt) in seen.iter().zip(&expected).zip(0..) {
                assert_eq!(tokens.iter().map(|token| token.id).collect::<Vec<_>>(), expected.tokens);
                assert_eq!(tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(), expected.logprobs);
                let (last, others) = tokens.split_last().unwrap();
                assert!(last.finish == Some(expected.finish) && others.iter().all(|token| token.finish.is_none()));
                let Some(k) = top_logprobs else {
                    assert!(tokens.iter().all(|token| token.alternatives.is_none()));
                    continue;
                };
                // As a pass over the whole text has them, which is another order of sums.
                let text = [&prompts()[prompt / 3][..], &expected.tokens[..]].concat();
                let span = text.len() - tokens.len()..text.len();
                let whole = model.top_logprobs(Batch::new(&[&text], &[span]), k).unwrap();
                for (token, whole) in tokens.iter().zip(Alternatives::on_host(&whole)) {
                    let found = token.alternatives.as_ref().unwrap();
                    assert!((found.logprob - whole.logprob).abs() < 1e-5, "{found:?} {whole:?}");
                    assert_eq!(found.top.len(), k);
                    assert!(found.top.is_sorted_by(|a, b| a.1 >= b.1) && found.top.iter().all(|(_, x)| *x < 0.0));
                    assert!(found.top.iter().zip(&whole.top).all(|(a, b)| (a.1 - b.1).abs() < 1e-5), "{found:?}");
                    let same = found.top.iter().find(|(id, _)| *id == token.id);
                    assert!(same.is_none_or(|(_, logprob)| *logprob == found.logprob), "{found:?}");
                }
            }
        }
        let mut left = 7;
        let each = |_: &Token| {
            left -= 1;
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let found = generate_with(&model, &prompts(), &config, each).unwrap();
        assert_eq!((found.len(), left), (expected.len(), 0));
        assert_eq!(found.iter().map(|response| response.tokens.len()).sum::<usize>(), 7);
        assert!(found.iter().zip(&expected).all(|(found, whole)| whole.tokens.starts_with(&found.tokens)));
    }

    #[test]
    fn a_pass_over_prompts_ends_between_layers_once_no_one_waits_for_it() {
        use std::cell::Cell;
        let (model, _) = golden_model("gpt_neox");
        let config = GenerationConfig::new(Sampling::at_temperature(0.7), 4);
        let expected = generate(&model, &prompts(), &config).unwrap();
        let layers = model.config().num_hidden_layers as usize;
        let (asked, most) = (Cell::new(0), Cell::new(usize::MAX));
        let is_over = || {
            asked.set(asked.get() + 1);
            asked.get() > most.get()
        };
        let mut tokens = 0;
        let mut until = || {
            let each = |_: &Token| {
                tokens += 1;
                ControlFlow::Continue(())
            };
            let found = generate_until(&model, &prompts(), &config, each, StopCheck::when(&is_over));
            (found, std::mem::take(&mut tokens))
        };
        let (found, _) = until();
        assert_eq!((found.unwrap(), asked.get() % layers), (expected, 0));
        asked.set(0);
        most.set(1);
        let (found, tokens) = until();
        let error = found.unwrap_err().to_string();
        assert!(error.contains("ended before its result was complete") && tokens == 0 && asked.get() == 2, "{error}");
        let span = 1..5;
        let sequence = [[5i64, 6, 7, 8, 9]];
        let batch = Batch::new(&sequence, std::slice::from_ref(&span));
        let whole = Alternatives::on_host(&model.top_logprobs(batch, 2).unwrap());
        asked.set(0);
        most.set(usize::MAX);
        assert_eq!(Alternatives::on_host(&model.top_logprobs(batch.ending_when(&is_over), 2).unwrap()), whole);
        // The last question is before the logits.
        for most_asked in [1, asked.get() - 1] {
            asked.set(0);
            most.set(most_asked);
            assert!(model.top_logprobs(batch.ending_when(&is_over), 2).is_err());
        }
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error_that_names_the_first_prompt_however_many_steps() {
        let (model, _) = golden_model("gpt_neox");
        // The embedding of one token is damaged, which the third prompt holds, and the fifth.
        let embedding = &model.params()[0];
        assert!(embedding.name.ends_with("embed_in.weight"), "{}", embedding.name);
        let _ = embedding.tensor.get(200).fill_(f64::NAN);
        let prompts: [&[i64]; 5] = [&[5], &[6, 7, 8], &[9, 200], &[10], &[200]];
        for steps in [1, 3, 16] {
            let config = GenerationConfig::new(Sampling::at_temperature(0.7), 5);
            let error =
                generate_by(steps, &model, &prompts, &config, &mut |_| ControlFlow::Continue(()), StopCheck::NEVER);
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with("prompt 4: the model's logits are not finite"), "{error}");
        }
    }
}
