//! Responses that wait for a row of the batch, and the passes over their prompts.

use super::{Decoding, GenerationConfig, Response, Seen, ids_within};
use crate::model::{CausalLm, KvCache, StopCheck};
use rlhf_base::Result;
use rlhf_base::rng::Stream;
use std::collections::VecDeque;
use tch::Tensor;
use tch_ext::on_device;

/// Rows are refilled once one in so many is free: a pass over prompts stalls the responses that are decoded, and on a GPU one over a few
/// prompts takes about as long as one over one. By counting steps, with lengths spread as after random stops, an eighth saves 2 to 7 % of the steps
/// over a quarter, and needs twice the passes.
const LEAST_REFILLED: usize = 4;

/// At most one in so many rows of the batch is refilled in one pass, whose prompts have a cache of their own meanwhile.
const MOST_REFILLED: usize = 2;

/// Maximum number of rows, of `rows` in a batch, whose prompts are read in one pass when they are refilled.
pub fn refilled_rows(rows: usize) -> usize {
    rows.div_ceil(MOST_REFILLED)
}

/// The responses that have not been started, in the order in which they are: by the length of their prompts, and one group after another.
pub(super) struct Waiting<'a> {
    model: &'a CausalLm,
    config: &'a GenerationConfig,
    ends: StopCheck<'a>,
    prompts: Vec<&'a [i64]>,
    /// Indices of the prompts that have not been read.
    unread: VecDeque<usize>,
    /// Prompts that have been read, with responses that have not been started.
    read: Option<Prefill<'a>>,
    /// Rows of ended responses are given to waiting ones. Otherwise these wait for the end of the batch.
    refills: bool,
    /// Refilled rows are read one prompt at a time, so that their numbers do not depend on which rows are free at a time.
    is_single: bool,
}

impl<'a> Waiting<'a> {
    /// All responses to `prompts`. Prompts of similar length are in one batch: less of the cache is empty, and less attention is wasted on it.
    pub(super) fn new<P: AsRef<[i64]>>(
        model: &'a CausalLm,
        prompts: &'a [P],
        config: &'a GenerationConfig,
        ends: StopCheck<'a>,
    ) -> Self {
        let prompts: Vec<&[i64]> = prompts.iter().map(AsRef::as_ref).collect();
        let count = if config.max_new_tokens == 0 { 0 } else { prompts.len() };
        let mut unread: Vec<usize> = (0..count).collect();
        unread.sort_by_key(|&prompt| prompts[prompt].len());
        // The keys and values of an encoder's tokens have the width of the batch that was read.
        let refills = !model.config().is_encoder_decoder();
        Self { model, config, ends, prompts, unread: unread.into(), read: None, refills, is_single: false }
    }

    /// The same without refilling: the responses are divided into batches of whole groups, or parts of one group.
    pub(super) fn without_refilling(mut self) -> Self {
        self.refills = false;
        self
    }

    /// The same with refilled rows whose prompts are read one at a time.
    pub(super) fn reading_single_prompts(mut self) -> Self {
        self.is_single = true;
        self
    }

    pub(super) fn config(&self) -> &'a GenerationConfig {
        self.config
    }

    /// Number of waiting responses.
    fn len(&self) -> usize {
        self.unread.len() * self.config.num_return_sequences + self.read.as_ref().map_or(0, Prefill::left)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether rows of the batch have been or will be refilled.
    pub(super) fn refills(&self) -> bool {
        self.refills
    }

    /// Number of the `rows` rows of a batch that must be free for a refill: fewer if fewer responses wait.
    pub(super) fn least_free(&self, rows: usize) -> usize {
        rows.div_ceil(LEAST_REFILLED).min(self.len())
    }

    /// Starts a batch; `None` if no response waits.
    pub(super) fn start(&mut self) -> Result<Option<Decoding<'a>>> {
        if self.is_empty() {
            return Ok(None);
        }
        let most = self.config.batch_size.max(1);
        if !self.refills {
            if self.read.is_none() {
                self.read_next(whole_groups(self.config), self.config.max_new_tokens)?;
            }
            let decoding = self.read.as_mut().map(Prefill::next_part);
            self.read.take_if(|prefill| prefill.left() == 0);
            return Ok(decoding);
        }
        let prompts = self.prompts_for(most);
        // Each row has room for the longest prompt.
        let [longest, longest_read] = [&self.unread.len(), &prompts].map(|&end| {
            let lens = self.unread.iter().take(end).map(|&prompt| self.prompts[prompt].len());
            lens.max().unwrap_or(0)
        });
        self.read_next(prompts, longest - longest_read + self.config.max_new_tokens)?;
        let decoding = self.read.as_mut().map(|prefill| prefill.decoding(most));
        self.forget_started();
        // The rows of a batch that has all responses have the same length, and need no care.
        self.refills = !self.is_empty();
        Ok(decoding)
    }

    /// Number of prompts, at least one, that have `responses` responses.
    fn prompts_for(&self, responses: usize) -> usize {
        responses.div_ceil(self.config.num_return_sequences).min(self.unread.len())
    }

    /// Reads the next `count` prompts into a cache to which `new_tokens` tokens can be appended.
    fn read_next(&mut self, count: usize, new_tokens: usize) -> Result<()> {
        let batch: Vec<usize> = self.unread.drain(..count.min(self.unread.len())).collect();
        let prompts = batch.iter().map(|&prompt| self.prompts[prompt]).collect();
        self.read = Some(Prefill::new(self.model, (batch, prompts), self.config, new_tokens, self.ends)?);
        Ok(())
    }

    /// Prompts that have been read, with waiting responses: those that were left, or else the next ones, for at most `free` responses in a
    /// batch of `rows` rows.
    pub(super) fn read(&mut self, free: usize, rows: usize) -> Result<&mut Prefill<'a>> {
        if self.read.is_none() {
            let most = if self.is_single { 1 } else { free.min(refilled_rows(rows)) };
            self.read_next(self.prompts_for(most), 0)?;
        }
        Ok(self.read.as_mut().expect("prompts have been read"))
    }

    /// Frees the memory of prompts whose responses have all been started.
    pub(super) fn forget_started(&mut self) {
        self.read.take_if(|prefill| prefill.left() == 0);
        if let Some(prefill) = &mut self.read {
            prefill.forget_started();
        }
    }
}

/// Number of prompts of a batch that is not refilled: whole groups, or one.
fn whole_groups(config: &GenerationConfig) -> usize {
    (config.batch_size / config.num_return_sequences).max(1)
}

/// Prompts in a cache, from which their responses are decoded.
pub(super) struct Prefill<'a> {
    model: &'a CausalLm,
    config: &'a GenerationConfig,
    /// Index of each prompt among all of [`super::generate`].
    batch: Vec<usize>,
    /// Tokens of each prompt.
    prompts: Vec<&'a [i64]>,
    /// One row per prompt; `None` once the last responses have it.
    cache: Option<KvCache>,
    /// Logits of the first token of the responses, `[prompts, vocab]`.
    logits: Tensor,
    /// Number of responses that have been started, prompt after prompt.
    started: usize,
}

impl<'a> Prefill<'a> {
    fn new(
        model: &'a CausalLm,
        (batch, prompts): (Vec<usize>, Vec<&'a [i64]>),
        config: &'a GenerationConfig,
        new_tokens: usize,
        ends: StopCheck<'_>,
    ) -> Result<Self> {
        let (cache, logits) = model.prefill(&prompts, new_tokens, ends)?;
        Ok(Self { model, config, batch, prompts, cache: Some(cache), logits, started: 0 })
    }

    /// Number of responses that have not been started.
    fn left(&self) -> usize {
        self.batch.len() * self.config.num_return_sequences - self.started
    }

    /// Starts the next responses, at most `most`.
    pub(super) fn start(&mut self, most: usize) -> Started<'_, 'a> {
        let per_prompt = self.config.num_return_sequences;
        let started = self.started..self.started + most.min(self.left());
        self.started = started.end;
        let number = |at: usize| self.batch[at / per_prompt] * per_prompt + at % per_prompt;
        let sources = started.clone().map(|at| (at / per_prompt) as i64).collect();
        Started { numbers: started.map(number).collect(), sources, prefill: self }
    }

    /// Decodes the next responses: all of them, or a part of them if they are more than `batch_size`. Parts are of similar size.
    fn next_part(&mut self) -> Decoding<'a> {
        let count = self.batch.len() * self.config.num_return_sequences;
        let parts = count.div_ceil(self.config.batch_size.max(1));
        self.decoding(count.div_ceil(parts))
    }

    /// Decodes the next responses, at most `most`, as a batch. The last response takes the cache, so that the prefill of each layer is freed once
    /// it is copied.
    fn decoding(&mut self, most: usize) -> Decoding<'a> {
        let started = self.start(most);
        let (streams, seen, last_of_prompts) = (started.streams(), started.seen(), started.last_of_prompts());
        let Started { numbers, sources, .. } = started;
        let mut logits = self.logits.shallow_clone();
        let cache = if self.left() == 0 { self.cache.take() } else { self.cache.as_ref().map(KvCache::shallow_clone) };
        let mut cache = cache.expect("the last response takes the cache");
        if self.config.num_return_sequences > 1 {
            cache.keep_rows(&sources);
            logits = logits.index_select(0, &on_device(&sources, logits.device()));
        }
        Decoding {
            model: self.model,
            config: self.config,
            streams,
            last_of_prompts,
            responses: vec![Response::empty(self.config); numbers.len()],
            stopped: vec![false; numbers.len()],
            alive: (0..numbers.len()).collect(),
            rows: numbers,
            stop_ids: ids_within(&self.config.stop_token_ids, &logits),
            cache,
            logits,
            last: None,
            seen,
        }
    }

    /// Frees the memory of the prompts whose responses have all been started.
    fn forget_started(&mut self) {
        let count = self.started / self.config.num_return_sequences;
        if count == 0 {
            return;
        }
        let kept: Vec<i64> = (count as i64..self.batch.len() as i64).collect();
        self.cache.iter_mut().for_each(|cache| cache.keep_rows(&kept));
        self.logits = self.logits.index_select(0, &on_device(&kept, self.logits.device()));
        self.batch.drain(..count);
        self.prompts.drain(..count);
        self.started -= count * self.config.num_return_sequences;
    }
}

/// Responses that are being started.
pub(super) struct Started<'p, 'a> {
    prefill: &'p Prefill<'a>,
    /// The number of each response among all of [`super::generate`].
    pub(super) numbers: Vec<usize>,
    /// The row of each response's prompt in the prefill.
    sources: Vec<i64>,
}

impl<'a> Started<'_, 'a> {
    /// The random numbers of each response.
    pub(super) fn streams(&self) -> Vec<Stream> {
        let config = self.prefill.config;
        let stream = |&number| Stream::new(config.seed, config.purpose, config.step, config.first_row + number as u64);
        self.numbers.iter().map(stream).collect()
    }

    /// Tokens of the prompt of each response.
    fn prompts(&self) -> Vec<&'a [i64]> {
        self.sources.iter().map(|&row| self.prefill.prompts[row as usize]).collect()
    }

    /// The last token of each response's prompt.
    pub(super) fn last_of_prompts(&self) -> Vec<i64> {
        self.prompts().into_iter().map(|prompt| *prompt.last().unwrap_or(&0)).collect()
    }

    /// Logits of the first token of each response, `[rows, vocab]`.
    pub(super) fn logits(&self) -> Tensor {
        let logits = &self.prefill.logits;
        logits.index_select(0, &on_device(&self.sources, logits.device()))
    }

    /// The tokens that each row contains, if there is a repetition penalty.
    pub(super) fn seen(&self) -> Option<Seen> {
        let Prefill { model, config, .. } = self.prefill;
        (config.repetition_penalty != 1.0).then(|| {
            // As in transformers, an encoder's tokens do not count.
            let start = model.config().decoder_start_token_id.filter(|_| model.config().is_encoder_decoder());
            let prompts = self.prompts();
            let tokens = prompts.iter().map(|prompt| start.as_ref().map_or(*prompt, std::slice::from_ref));
            Seen::new(&tokens.collect::<Vec<_>>(), &self.logits())
        })
    }

    /// Copies the prompts' keys, values and states to the rows `rows` of `cache`, one per response.
    pub(super) fn copy_to(&self, cache: &mut KvCache, rows: &[i64]) {
        let prefill = self.prefill.cache.as_ref().expect("a cache that rows are copied from stays");
        cache.refill_rows(rows, prefill, &self.sources, &self.prompts());
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::prompts;
    use super::super::{FinishReason, Sampling, Token, generate_waiting};
    use super::*;
    use crate::model::ModelOptions;
    use std::ops::ControlFlow;
    use std::path::Path;

    fn golden_model(name: &str) -> CausalLm {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
        CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap()
    }

    fn all(_: &Token) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn run(steps: usize, waiting: Waiting<'_>, count: usize) -> Vec<Response> {
        generate_waiting(steps, waiting, count, &mut all).unwrap()
    }

    #[test]
    fn a_batch_that_is_not_refilled_has_whole_groups_or_one_group() {
        let groups = |num_return_sequences, batch_size| {
            let config = GenerationConfig::new(Sampling::at_temperature(1.0), 4);
            whole_groups(&GenerationConfig { num_return_sequences, batch_size, ..config })
        };
        assert_eq!((groups(1, 32), groups(4, 11)), (32, 2));
        assert_eq!([0, 1, 4, 7].map(|batch_size| groups(4, batch_size)), [1; 4]);
    }

    #[test]
    fn a_group_in_parts_reads_its_prompt_once_and_has_the_responses_of_a_whole_one() {
        let model = golden_model("llama_tied");
        let config = GenerationConfig {
            num_return_sequences: 7,
            repetition_penalty: 1.3,
            stop_token_ids: (0..30).collect(),
            ..GenerationConfig::new(Sampling::at_temperature(0.9), 12)
        };
        let prompts = [prompts()[4].clone(), prompts()[8].clone()];
        let waiting = || Waiting::new(&model, &prompts, &config, StopCheck::NEVER).without_refilling();
        let expected = run(1, waiting(), 14);
        let mut parts = waiting();
        let mut responses = Vec::new();
        tch::no_grad(|| {
            parts.read_next(2, config.max_new_tokens).unwrap();
            let prefill = parts.read.as_mut().unwrap();
            for count in [3, 1, 5, 9] {
                let mut decoding = prefill.decoding(count);
                let _ = decoding.run(1, &mut waiting(), &mut all).unwrap();
                responses.extend(decoding.finished());
            }
            assert!(prefill.cache.is_none(), "the last part takes the cache");
        });
        assert_eq!(responses.len(), 14);
        for ((number, response), (expected_number, expected)) in responses.iter().zip(expected.iter().enumerate()) {
            assert_eq!(*number, expected_number);
            assert_alike(response, expected, "llama_tied");
        }
    }

    fn assert_alike(response: &Response, expected: &Response, case: &str) {
        assert_eq!((&response.tokens, response.finish), (&expected.tokens, expected.finish), "{case}");
        assert_eq!(response.sets, expected.sets, "{case}");
        let pairs = response.logprobs.iter().zip(&expected.logprobs);
        // Products of some models round by the number of rows.
        assert!(pairs.map(|(a, b)| (a - b).abs()).all(|error| error < 4e-5), "{case}: {response:?} {expected:?}");
    }

    /// Settings with responses that end at different times.
    fn config(model: &CausalLm, batch_size: usize) -> GenerationConfig {
        let stop_token_ids = (0..model.config().vocab_size).filter(|id| id % 12 == 0).collect();
        let config = GenerationConfig::new(Sampling::at_temperature(0.7), 20);
        GenerationConfig { stop_token_ids, seed: 3, batch_size, ..config }
    }

    #[test]
    fn responses_of_refilled_rows_are_those_of_rows_that_are_not_refilled() {
        // Learned and rotary positions, windows of 4 and 8 positions, soft caps, states, angles that change with the length, experts, sinks.
        for name in [
            "gpt2",
            "gpt_neox",
            "llama_tied",
            "llama_dynamic",
            "gemma2",
            "gemma3",
            "mistral",
            "lfm2",
            "qwen3_5",
            "phi3_long",
            "mixtral",
            "gpt_oss",
            "gemma4",
        ] {
            let model = golden_model(name);
            let vocab = model.config().vocab_size;
            let within = |prompt: Vec<i64>| prompt.into_iter().map(|id| 5 + id % (vocab - 5)).collect();
            let prompts: Vec<Vec<i64>> = prompts().into_iter().map(within).collect();
            for (per_prompt, batch_size) in [(1, 4), (3, 2), (3, 7)] {
                let config = GenerationConfig { num_return_sequences: per_prompt, ..config(&model, batch_size) };
                let waiting = || Waiting::new(&model, &prompts, &config, StopCheck::NEVER);
                let count = per_prompt * prompts.len();
                let expected = run(1, waiting().without_refilling(), count);
                for steps in [1, 16] {
                    let case = format!("{name}, {per_prompt} per prompt, {batch_size} rows, {steps} steps");
                    for (response, expected) in run(steps, waiting(), count).iter().zip(&expected) {
                        assert_alike(response, expected, &case);
                    }
                }
            }
        }
    }

    #[test]
    fn settings_that_depend_on_the_length_hold_for_each_refilled_row() {
        let model = golden_model("llama_tied");
        let prompts = prompts();
        let filters = Sampling::Random { temperature: 1.3, top_k: 50, top_p: 0.95, min_p: 0.01 };
        let usual = config(&model, 4);
        for config in [
            GenerationConfig { min_new_tokens: 4, ..usual.clone() },
            GenerationConfig { repetition_penalty: 1.4, min_new_tokens: 7, sampling: filters, ..usual.clone() },
            GenerationConfig { keep_sets: true, min_new_tokens: 2, num_return_sequences: 5, ..usual.clone() },
            GenerationConfig { max_new_tokens: 1, ..usual.clone() },
            GenerationConfig { sampling: Sampling::Greedy, stop_token_ids: Vec::new(), ..usual },
        ] {
            let waiting = || Waiting::new(&model, &prompts, &config, StopCheck::NEVER);
            let count = config.num_return_sequences * prompts.len();
            let expected = run(1, waiting().without_refilling(), count);
            for (steps, least) in [1, 3, 16].map(|steps| (steps, config.min_new_tokens)) {
                for (response, expected) in run(steps, waiting(), count).iter().zip(&expected) {
                    assert_alike(response, expected, &format!("{config:?}, {steps} steps"));
                    assert!(response.tokens.len() > least || response.finish == FinishReason::Length);
                }
            }
        }
    }

    #[test]
    fn a_refilled_batch_has_at_most_its_rows_and_each_step_has_more_responses() {
        let model = golden_model("llama_tied");
        let prompts: Vec<Vec<i64>> = (0..120).map(|row| prompts()[row % 9].clone()).collect();
        let config = config(&model, 8);
        // Number of passes, and of the rows in them.
        let steps = |mut waiting: Waiting<'_>| {
            let (mut passes, mut tokens) = (0usize, 0usize);
            tch::no_grad(|| {
                while let Some(mut decoding) = waiting.start().unwrap() {
                    loop {
                        let chosen = super::super::on_host(&decoding.decode(1).unwrap());
                        passes += 1;
                        let rows: Vec<usize> = (0..decoding.alive.len()).collect();
                        assert!(rows.len() <= 8);
                        tokens += rows.iter().filter(|&&row| !decoding.stopped[decoding.alive[row]]).count();
                        for choice in chosen {
                            let _ = decoding.record(&rows, choice, &mut all).unwrap();
                        }
                        if waiting.refills() {
                            let _ = decoding.refill(&mut waiting, &mut all).unwrap();
                            decoding.restart_stopped();
                        }
                        if (waiting.is_empty() || !waiting.refills()) && !decoding.remove_stopped() {
                            break;
                        }
                    }
                }
            });
            (passes, tokens as f64 / passes as f64)
        };
        let waiting = || Waiting::new(&model, &prompts, &config, StopCheck::NEVER);
        let (refilled, full) = steps(waiting());
        let (batches, partly) = steps(waiting().without_refilling());
        assert!(refilled * 5 < batches * 4 && full > 1.25 * partly, "{refilled} {batches} {full} {partly}");
    }

    #[test]
    fn an_end_of_the_generation_keeps_what_was_reported_and_leaves_what_waits_empty() {
        let model = golden_model("llama_tied");
        let prompts = prompts();
        let config = config(&model, 2);
        let expected = run(1, Waiting::new(&model, &prompts, &config, StopCheck::NEVER), 9);
        let total: usize = expected.iter().map(|response| response.tokens.len()).sum();
        for most in 1..total {
            let mut left = most;
            let mut each = |_: &Token| {
                left -= 1;
                if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            let waiting = Waiting::new(&model, &prompts, &config, StopCheck::NEVER);
            let responses = generate_waiting(1, waiting, 9, &mut each).unwrap();
            assert_eq!(responses.iter().map(|response| response.tokens.len()).sum::<usize>(), most);
            assert!(responses.iter().zip(&expected).all(|(part, whole)| whole.tokens.starts_with(&part.tokens)));
        }
    }
}
