//! Generation of responses of several turns. Between two turns, tokens that the model did not sample are inserted, such as the results of tools.
//!
//! The keys and values of a row stay in the cache over all its turns. Where many tokens are inserted, all but the last are read in one pass; others
//! are fed one in each step, beside the rows that sample. A row that waits feeds its last token again, in the same place.

use super::{Choice, Decoding, FinishReason, GenerationConfig, HostChoice, Response, Waiting, check_fit, on_host};
use crate::model::{CausalLm, StopCheck, TokenSet};
use rlhf_base::{Error, Result};
use std::collections::VecDeque;
use tch_ext::on_device;

/// The least number of inserted tokens that are read in a pass of their own where all rows wait for them.
const LEAST_APPENDED: usize = 8;
/// The least number of them for each row that is decoded, where other rows go on meanwhile: a token that is fed in their steps costs little.
const LEAST_PER_ROW: usize = 4;
/// Maximum number of tokens of such a pass.
const MOST_APPENDED: usize = if cfg!(test) { 10 } else { 512 };

/// The continuation of a response after a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// The response ends with the turn.
    End,
    /// These tokens are inserted, and the model continues after them. If the response would then exceed
    /// [`GenerationConfig::max_new_tokens`], they are not inserted, and the response ends with the turn. If it has exactly that many tokens, it
    /// ends with them.
    Continue(Vec<i64>),
}

/// Decides what follows each turn.
pub trait Turns {
    /// A turn of response `response`, counted from 0 among those of this call, has ended; `tokens` are those that were sampled in it.
    ///
    /// # Errors
    /// An error ends the generation.
    fn ended(&mut self, response: usize, tokens: &[i64], finish: FinishReason) -> Result<()>;

    /// The decisions that were made since the last call, each with its response. Where `wait` is set, nothing can be generated before the next
    /// one: there is at least one.
    ///
    /// # Errors
    /// An error ends the generation.
    fn decided(&mut self, wait: bool) -> Result<Vec<(usize, Next)>>;

    /// Returns true if decisions are made only after each response has ended its turn: `decided` is then called with `wait` alone.
    fn in_lockstep(&self) -> bool;
}

/// Generates responses of several turns; `turns` decides after each turn, which ends as a response of [`super::generate`] does. All tokens after
/// the prompt count in `max_new_tokens`, those that are inserted too.
///
/// The draws of a response depend on the number of tokens that were sampled for it, and on what [`super::generate`] says: not on when a decision
/// is made.
///
/// # Errors
/// As [`super::generate`], and those of `turns`.
pub fn generate_turns<P: AsRef<[i64]>>(
    model: &CausalLm,
    prompts: &[P],
    config: &GenerationConfig,
    turns: &mut dyn Turns,
) -> Result<Vec<Response>> {
    if model.config().is_encoder_decoder() {
        return Err(Error::Usage("turns with tools: expected a model without an encoder".into()));
    }
    check_fit(model, prompts, config)?;
    let mut responses: Vec<Option<Response>> = vec![None; prompts.len() * config.num_return_sequences];
    let mut store = |conversations: Conversations<'_>| {
        for (row, response) in conversations.decoding.finished() {
            responses[row] = Some(response);
        }
    };
    let waiting = Waiting::new(model, prompts, config, StopCheck::NEVER);
    tch::no_grad(|| {
        if !turns.in_lockstep() {
            let mut waiting = waiting.reading_single_prompts();
            while let Some(decoding) = waiting.start()? {
                let mut conversations = Conversations::new(decoding, false);
                while conversations.step(turns)? {
                    conversations.take(&mut turns.decided(conversations.is_blocked())?);
                    conversations.refill(&mut waiting, turns)?;
                }
                store(conversations);
            }
            return Ok(());
        }
        // Each turn of all rows comes before the next one of any, so no row can wait for the end of another.
        let mut waiting = waiting.without_refilling();
        let mut all = Vec::new();
        while let Some(decoding) = waiting.start()? {
            all.push(Conversations::new(decoding, true));
        }
        while !all.is_empty() {
            for conversations in &mut all {
                while !conversations.is_blocked() && conversations.step(turns)? {}
            }
            let (ended, others): (Vec<_>, Vec<_>) = all.into_iter().partition(Conversations::has_ended);
            ended.into_iter().for_each(&mut store);
            all = others;
            if !all.is_empty() {
                let mut decided = turns.decided(true)?;
                all.iter_mut().for_each(|conversations| conversations.take(&mut decided));
            }
        }
        Ok::<_, Error>(())
    })?;
    Ok(responses.into_iter().map(|response| response.unwrap_or_else(|| Response::empty(config))).collect())
}

/// The state of a row at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It feeds its tokens, and samples after the last of them.
    Runs,
    /// Its turn has ended: it feeds what is left to feed, and waits.
    Waits,
    /// Its response has ended.
    Ended,
}

/// A row of [`Conversations`].
struct Row {
    phase: Phase,
    /// Tokens of the response that are not in the cache yet.
    unfed: VecDeque<i64>,
    /// The token that was fed last, or the last one of the prompt.
    fed: i64,
    /// Number of tokens of the response at the start of its turn.
    turn: usize,
}

impl Row {
    /// The row of a response to a prompt with this last token.
    fn new(last_of_prompt: i64) -> Self {
        Self { phase: Phase::Runs, unfed: VecDeque::new(), fed: last_of_prompt, turn: 0 }
    }
}

/// A batch of responses in the middle of their turns.
struct Conversations<'a> {
    decoding: Decoding<'a>,
    /// One for each response.
    rows: Vec<Row>,
    /// Remove rows that have ended from the cache: only where this happens at the same step in each run, since products round by the number of
    /// rows.
    compacts: bool,
    /// The prompts have been read, and no token has been sampled.
    at_start: bool,
}

impl<'a> Conversations<'a> {
    fn new(decoding: Decoding<'a>, compacts: bool) -> Self {
        let rows = decoding.last_of_prompts.iter().copied().map(Row::new).collect();
        Self { decoding, rows, compacts, at_start: true }
    }

    /// Whether no row can feed or sample a token before a decision.
    fn is_blocked(&self) -> bool {
        self.rows.iter().all(|row| row.phase != Phase::Runs)
    }

    fn has_ended(&self) -> bool {
        self.rows.iter().all(|row| row.phase == Phase::Ended)
    }

    /// One step, unless no row can take one. Returns false if all responses have ended.
    fn step(&mut self, turns: &mut dyn Turns) -> Result<bool> {
        if self.has_ended() {
            return Ok(false);
        }
        if self.is_blocked() {
            return Ok(true);
        }
        if !self.at_start {
            self.feed()?;
        }
        self.at_start = false;
        let samples: Vec<bool> = self.decoding.alive.iter().map(|&i| self.samples(i)).collect();
        if samples.contains(&true) {
            let choice = self.choose(&samples);
            let sampled: Vec<_> = (0..samples.len()).filter(|&row| samples[row]).map(|row| (row, row)).collect();
            self.record(&sampled, on_host(&[choice]).remove(0), turns)?;
        }
        Ok(true)
    }

    /// Gives the rows of responses that have ended to waiting ones, once [`Waiting::least_free`] have, and samples their first tokens. A pass
    /// reads one prompt alone: it depends on time which rows are free together.
    fn refill(&mut self, waiting: &mut Waiting<'_>, turns: &mut dyn Turns) -> Result<()> {
        let count = self.decoding.alive.len();
        let has_ended = |&row: &usize| self.rows[self.decoding.alive[row]].phase == Phase::Ended;
        let free: Vec<usize> = (0..count).filter(has_ended).collect();
        if free.len() < waiting.least_free(count) {
            return Ok(());
        }
        let mut free = &free[..];
        while !free.is_empty() && !waiting.is_empty() {
            let first = self.decoding.start_waiting(free, waiting)?;
            self.rows.extend(self.decoding.last_of_prompts[self.rows.len()..].iter().copied().map(Row::new));
            let (started, rest) = free.split_at(first.tokens.len());
            let sampled: Vec<_> = started.iter().copied().zip(0..).collect();
            self.record(&sampled, first, turns)?;
            free = rest;
        }
        Ok(())
    }

    /// Whether response `i` samples a token now.
    fn samples(&self, i: usize) -> bool {
        self.rows[i].phase == Phase::Runs && self.rows[i].unfed.is_empty()
    }

    /// Reads long insertions in passes of their own, all but the last token of each. In lockstep a pass has tokens of several rows. Else it depends on
    /// time which rows insert tokens together, and whether the token before them is in the cache: a pass then has tokens of one insertion alone.
    fn append_long(&mut self) -> Result<()> {
        if !self.decoding.model.can_append(&self.decoding.cache) {
            return Ok(());
        }
        let lockstep = self.compacts;
        let rows = self.decoding.alive.len();
        let least = if lockstep { LEAST_APPENDED } else { LEAST_APPENDED.max(LEAST_PER_ROW * rows) };
        let (mut pass, mut size) = (Vec::new(), 0);
        for at in 0..rows {
            let i = self.decoding.alive[at];
            let Row { phase, unfed, .. } = &self.rows[i];
            let inserted = self.decoding.responses[i].inserted.last().map_or(0, ExactSizeIterator::len);
            if *phase != Phase::Runs || unfed.len() <= least || !lockstep && unfed.len() > inserted {
                continue;
            }
            while self.rows[i].unfed.len() > 1 {
                let count = (self.rows[i].unfed.len() - 1).min(MOST_APPENDED - size);
                pass.push((at, self.rows[i].unfed.drain(..count).collect::<Vec<i64>>()));
                size += count;
                if size == MOST_APPENDED || !lockstep {
                    self.append(&std::mem::take(&mut pass))?;
                    size = 0;
                }
            }
        }
        self.append(&pass)
    }

    /// Reads tokens of some rows of the cache in one pass.
    fn append(&mut self, pass: &[(usize, Vec<i64>)]) -> Result<()> {
        if pass.is_empty() {
            return Ok(());
        }
        let decoding = &mut self.decoding;
        for (at, tokens) in pass {
            decoding.seen.iter_mut().for_each(|seen| seen.add_to(*at, tokens));
        }
        let (rows, tokens): (Vec<usize>, Vec<&[i64]>) = pass.iter().map(|(at, tokens)| (*at, &tokens[..])).unzip();
        decoding.model.append(&rows, &tokens, &mut decoding.cache)
    }

    /// Feeds one token of each row; a row without one feeds its last again.
    fn feed(&mut self) -> Result<()> {
        self.append_long()?;
        let decoding = &mut self.decoding;
        let (mut tokens, mut again) = (Vec::with_capacity(decoding.alive.len()), Vec::new());
        for (at, &i) in decoding.alive.iter().enumerate() {
            let row = &mut self.rows[i];
            match row.unfed.pop_front() {
                Some(token) => row.fed = token,
                None => again.push(at),
            }
            tokens.push(row.fed);
        }
        if !again.is_empty() {
            decoding.cache.step_back(&again);
        }
        let tokens = on_device(&tokens, decoding.model.device());
        decoding.logits = decoding.model.decode(&tokens, &mut decoding.cache)?;
        if let Some(seen) = &mut decoding.seen {
            seen.add(&tokens);
        }
        Ok(())
    }

    /// Chooses a token for each row of the cache; those of rows that do not sample have no meaning, and take no draw.
    fn choose(&mut self, samples: &[bool]) -> Choice {
        let decoding = &mut self.decoding;
        let streams = &mut decoding.streams;
        let rows = decoding.alive.iter().zip(samples);
        let draws: Vec<f64> = rows.map(|(&i, &samples)| if samples { streams[i].uniform() } else { 0.5 }).collect();
        let draws = on_device(&draws, decoding.logits.device());
        let short = decoding.are_short(&decoding.alive, 0);
        decoding.choose(&decoding.logits, decoding.seen.as_ref(), &short, &draws)
    }

    /// Appends tokens of `choice` to responses, and tells `turns` which turns have ended. `sampled`: rows of the cache that sampled, each with the
    /// place of its token in `choice`.
    fn record(&mut self, sampled: &[(usize, usize)], choice: HostChoice, turns: &mut dyn Turns) -> Result<()> {
        let HostChoice { tokens, logprobs, kept, .. } = choice;
        let config = self.decoding.config;
        let vocab = kept.len() / tokens.len().max(1);
        for &(row, at) in sampled {
            let i = self.decoding.alive[row];
            let row = &mut self.rows[i];
            let token = (tokens[at], logprobs[at]);
            let ends = self.decoding.append(i, row.turn, token, &kept[at * vocab..(at + 1) * vocab])?;
            row.unfed.push_back(tokens[at]);
            let response = &self.decoding.responses[i];
            if ends || response.tokens.len() == config.max_new_tokens {
                row.phase = Phase::Waits;
                turns.ended(self.decoding.rows[i], &response.tokens[row.turn..], response.finish)?;
            }
        }
        Ok(())
    }

    /// Takes from `decided` the decisions for these responses.
    fn take(&mut self, decided: &mut Vec<(usize, Next)>) {
        decided.retain(|(number, next)| {
            let Some(i) = self.decoding.rows.iter().position(|row| row == number) else { return true };
            self.proceed(i, next);
            false
        });
        if self.compacts {
            self.remove_ended();
        }
    }

    /// Ends response `i`, whose turn has ended, or inserts the tokens that follow.
    fn proceed(&mut self, i: usize, next: &Next) {
        let (response, row) = (&mut self.decoding.responses[i], &mut self.rows[i]);
        let left = self.decoding.config.max_new_tokens - response.tokens.len();
        row.phase = Phase::Ended;
        let Next::Continue(tokens) = next else { return };
        if tokens.len() > left {
            return;
        }
        if !tokens.is_empty() {
            let start = response.tokens.len();
            response.inserted.push(start..start + tokens.len());
            response.tokens.extend(tokens);
            response.logprobs.resize(response.tokens.len(), 0.0);
            if let Some(sets) = &mut response.sets {
                sets.extend(tokens.iter().map(|&token| TokenSet::only(token)));
            }
        }
        if tokens.len() == left {
            // Nothing of the next turn fits.
            response.finish = FinishReason::Length;
            return;
        }
        row.phase = Phase::Runs;
        row.unfed.extend(tokens);
        row.turn = response.tokens.len();
    }

    /// Removes rows that have ended from the cache once an eighth of its rows have.
    fn remove_ended(&mut self) {
        for i in 0..self.rows.len() {
            self.decoding.stopped[i] = self.rows[i].phase == Phase::Ended;
        }
        self.decoding.remove_stopped();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Sampling, generate};
    use crate::model::{Batch, ModelOptions};
    use std::collections::VecDeque;
    use std::path::Path;

    const STOPS: i64 = 12;

    fn golden_model(name: &str) -> CausalLm {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
        CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap()
    }

    fn prompts() -> Vec<Vec<i64>> {
        (0..5i64).map(|row| (0..=row).map(|t| 5 + (row * 37 + t * 11) % 90).collect()).collect()
    }

    fn config(model: &CausalLm) -> GenerationConfig {
        GenerationConfig {
            stop_token_ids: (0..model.config().vocab_size).filter(|id| id % STOPS == 0).collect(),
            num_return_sequences: 2,
            batch_size: 4,
            seed: 3,
            ..GenerationConfig::new(Sampling::at_temperature(0.7), 24)
        }
    }

    /// Inserts `response % 4 + 1` times `few` tokens after each of the first `turns` turns; decisions are handed out late, one at a time, where
    /// not in lockstep.
    struct Script {
        turns: usize,
        few: usize,
        lockstep: bool,
        seen: Vec<Vec<(Vec<i64>, FinishReason)>>,
        due: VecDeque<(usize, Next)>,
        asked: usize,
        /// A decision is handed out at each `every`th question.
        every: usize,
    }

    impl Script {
        fn new(turns: usize, lockstep: bool) -> Self {
            Self { turns, few: 1, lockstep, seen: vec![Vec::new(); 10], due: VecDeque::new(), asked: 0, every: 3 }
        }

        fn inserted(&self, response: usize) -> Vec<i64> {
            (0..self.few * (1 + response % 4)).map(|at| 31 + at as i64).collect()
        }
    }

    impl Turns for Script {
        fn ended(&mut self, response: usize, tokens: &[i64], finish: FinishReason) -> Result<()> {
            let next = if self.seen[response].len() < self.turns {
                Next::Continue(self.inserted(response))
            } else {
                Next::End
            };
            self.seen[response].push((tokens.to_vec(), finish));
            self.due.push_back((response, next));
            Ok(())
        }

        fn decided(&mut self, wait: bool) -> Result<Vec<(usize, Next)>> {
            self.asked += 1;
            if self.lockstep {
                assert!(wait);
                return Ok(self.due.drain(..).collect());
            }
            let is_late = self.asked.is_multiple_of(self.every);
            Ok(if wait || is_late { self.due.pop_back().into_iter().collect() } else { Vec::new() })
        }

        fn in_lockstep(&self) -> bool {
            self.lockstep
        }
    }

    /// The responses turn by turn, each from a cache of its own: the whole text so far is the prompt of the next turn.
    fn by_prompts(model: &CausalLm, response: &Response, prompt: &[i64]) -> Vec<f32> {
        let text = [prompt, &response.tokens].concat();
        let span = prompt.len()..text.len();
        let found = tch::no_grad(|| model.logprobs_of(Batch::new(&[&text], &[span]), 0.7, false)).unwrap();
        Vec::try_from(found.logprobs).unwrap()
    }

    #[test]
    fn a_response_goes_on_after_inserted_tokens_as_a_pass_over_the_whole_text_has_it() {
        let few = ["gpt_neox", "llama_tied", "lfm2", "qwen3_5"].map(|name| (name, 2, 1, 24));
        // Windows of 5 positions, soft caps, learned positions, experts, states, queries that grow, sinks, shared keys.
        let long =
            ["gemma2", "gemma3", "gpt2", "gpt_neox", "llama_yarn", "mistral", "mixtral", "olmo2", "opt_proj_postln"];
        let long = long.into_iter().chain(["phi3", "qwen3", "qwen3_moe", "smollm3", "lfm2", "qwen3_5", "qwen3_next"]);
        let long = long.chain(["ministral3", "gpt_oss", "gemma4"]);
        for (name, turns, few, most) in few.into_iter().chain(long.map(|name| (name, 1, 7, 56))) {
            let model = golden_model(name);
            let repetition_penalty = if few > 1 { 1.3 } else { 1.0 };
            let config = GenerationConfig { max_new_tokens: most, repetition_penalty, ..config(&model) };
            let mut expected = None;
            for lockstep in [true, false] {
                let mut script = Script { few, ..Script::new(turns, lockstep) };
                let found = generate_turns(&model, &prompts(), &config, &mut script).unwrap();
                for (row, response) in found.iter().enumerate() {
                    let what = format!("{name}, lockstep {lockstep}, row {row}: {response:?}");
                    let turns = &script.seen[row];
                    assert!(response.tokens.len() <= most && !turns.is_empty(), "{what}");
                    // The turns and what is between them are the tokens, in order.
                    let mut tokens = Vec::new();
                    for (at, (turn, _)) in turns.iter().enumerate() {
                        if at > 0 {
                            tokens.extend(script.inserted(row));
                        }
                        tokens.extend(turn);
                    }
                    assert!(response.tokens.starts_with(&tokens), "{what}");
                    let sampled = response.sampled();
                    assert_eq!(sampled.iter().filter(|sampled| **sampled).count(), response.num_sampled(), "{what}");
                    let all = by_prompts(&model, response, &prompts()[row / 2]);
                    for ((logprob, whole), sampled) in response.logprobs.iter().zip(all).zip(&sampled) {
                        assert!(if *sampled { (logprob - whole).abs() < 2e-4 } else { *logprob == 0.0 }, "{what}");
                    }
                    let is_full = response.inserted.last().is_some_and(|span| span.end == most);
                    let expected = if is_full { FinishReason::Length } else { turns[turns.len() - 1].1 };
                    assert_eq!(response.finish, expected, "{what}");
                }
                // When decisions are made changes no token.
                let tokens: Vec<_> = found.into_iter().map(|response| (response.tokens, response.inserted)).collect();
                assert_eq!(expected.get_or_insert_with(|| tokens.clone()), &tokens, "{name}");
            }
        }
    }

    #[test]
    fn numbers_do_not_depend_on_when_decisions_are_made() {
        for name in ["llama_tied", "lfm2", "qwen3_5"] {
            let model = golden_model(name);
            let config = GenerationConfig { max_new_tokens: 56, ..config(&model) };
            let run = |every: usize| {
                let mut script = Script { few: 9, every, ..Script::new(1, false) };
                generate_turns(&model, &prompts(), &config, &mut script).unwrap()
            };
            let at_once = run(1);
            assert!(at_once.iter().any(|response| response.inserted.iter().any(|span| span.len() > 16)), "{name}");
            for every in [2, 3, 7] {
                for (late, at_once) in run(every).iter().zip(&at_once) {
                    assert_eq!((&late.tokens, &late.logprobs), (&at_once.tokens, &at_once.logprobs), "{name}, {every}");
                }
            }
        }
    }

    #[test]
    fn a_response_of_one_turn_is_that_of_generate() {
        let model = golden_model("gpt_neox");
        let config = GenerationConfig { min_new_tokens: 3, repetition_penalty: 1.3, ..config(&model) };
        let expected = generate(&model, &prompts(), &config).unwrap();
        for lockstep in [true, false] {
            let found = generate_turns(&model, &prompts(), &config, &mut Script::new(0, lockstep)).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!((&found.tokens, found.finish), (&expected.tokens, expected.finish));
            }
        }
    }

    #[test]
    fn what_does_not_fit_ends_the_response_with_its_turn_and_what_fits_exactly_ends_it() {
        struct Long(usize, Vec<usize>);
        impl Turns for Long {
            fn ended(&mut self, response: usize, tokens: &[i64], _finish: FinishReason) -> Result<()> {
                self.1.resize(10, 0);
                self.1[response] = tokens.len();
                Ok(())
            }
            fn decided(&mut self, _wait: bool) -> Result<Vec<(usize, Next)>> {
                let more = self.0;
                let next =
                    |(row, len): (usize, &usize)| (*len > 0).then(|| (row, Next::Continue(vec![40; 24 - len + more])));
                Ok(self.1.iter().enumerate().filter_map(next).collect())
            }
            fn in_lockstep(&self) -> bool {
                true
            }
        }
        let model = golden_model("gpt_neox");
        let config = GenerationConfig { batch_size: 32, ..config(&model) };
        let exact = generate_turns(&model, &prompts(), &config, &mut Long(0, Vec::new())).unwrap();
        assert!(exact.iter().all(|r| r.tokens.len() == 24 && r.finish == FinishReason::Length), "{exact:?}");
        assert!(exact.iter().any(|r| r.inserted.len() == 1));
        let long = generate_turns(&model, &prompts(), &config, &mut Long(1, Vec::new())).unwrap();
        assert!(long.iter().all(|r| r.inserted.is_empty()), "{long:?}");
        assert!(long.iter().any(|r| r.finish == FinishReason::Stop && r.tokens.len() < 24));
    }
}
