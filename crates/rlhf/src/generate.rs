//! Sampling with a key-value cache: ragged prompts in, responses out; a row that stops leaves the batch.

use crate::model::CausalLm;
use crate::rng::{Purpose, Stream};
use crate::{Error, Result};
use tch::{Kind, Tensor};

/// Below this, f32 logits divided by the temperature overflow.
const MIN_TEMPERATURE: f64 = 1e-4;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    /// The most likely token.
    Greedy,
    /// A draw from softmax(logits / temperature), after the filters.
    Random {
        /// Divides the logits; above 0.
        temperature: f64,
        /// Keep only this many of the most likely tokens; 0 keeps all.
        top_k: i64,
        /// Keep only the most likely tokens that together reach this probability; 1 keeps all.
        top_p: f64,
    },
}

impl Sampling {
    /// The plain distribution at `temperature`: what PPO needs, since its losses know no filters.
    pub fn at_temperature(temperature: f64) -> Self {
        Sampling::Random { temperature, top_k: 0, top_p: 1.0 }
    }

    /// What divides the logits before log-probabilities are taken; 1 for greedy.
    fn temperature(self) -> f64 {
        match self {
            Sampling::Greedy => 1.0,
            Sampling::Random { temperature, .. } => temperature,
        }
    }
}

/// What is generated, and from which random numbers.
#[derive(Debug, Clone)]
pub struct GenerationConfig {
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// The most tokens of a response.
    pub max_new_tokens: usize,
    /// A response ends with the first of these, which it keeps; empty: every response has `max_new_tokens`.
    pub stop_token_ids: Vec<i64>,
    /// The run's seed.
    pub seed: u64,
    /// What the draws are for, with `step` and the row a part of their key.
    pub purpose: Purpose,
    /// Separates the draws of one update from those of the next.
    pub step: u64,
    /// The number of the first row, where the rows are a part of something larger; 0 else.
    pub first_row: u64,
    /// The most rows decoded together; changes speed and memory, and tokens only where rounding tips a draw.
    pub batch_size: usize,
}

impl GenerationConfig {
    /// Responses of at most `max_new_tokens`, without a stop token, seed 0, 32 rows at a time.
    pub fn new(sampling: Sampling, max_new_tokens: usize) -> Self {
        Self {
            sampling,
            max_new_tokens,
            stop_token_ids: Vec::new(),
            seed: 0,
            purpose: Purpose::Sampling,
            step: 0,
            first_row: 0,
            batch_size: 32,
        }
    }
}

/// Why a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// Its last token is a stop token.
    Stop,
    /// It has the most tokens allowed.
    Length,
}

/// One generated response.
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    /// Token ids, at least one; a stop token is included.
    pub tokens: Vec<i64>,
    /// Log-probability of each token under softmax(logits / temperature), before top-k and top-p; 1 is greedy's
    /// temperature.
    pub logprobs: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// Generates one response per prompt, in the prompts' order.
///
/// Row `i`'s draws depend on the seed, the purpose, the step and `first_row + i` alone, so the rest of the batch does not
/// change them.
///
/// # Errors
/// If a prompt is empty, holds an id outside the vocabulary, or leaves no room in the model's context for
/// `max_new_tokens`; if the temperature is not a number above 0; if the model's logits are not finite.
pub fn generate<P: AsRef<[i64]>>(model: &CausalLm, prompts: &[P], config: &GenerationConfig) -> Result<Vec<Response>> {
    if let Sampling::Random { temperature, .. } = config.sampling
        && !(temperature >= MIN_TEMPERATURE && temperature.is_finite())
    {
        return Err(Error::Usage(format!(
            "temperature = {temperature}: expected a number from {MIN_TEMPERATURE}; greedy decoding is its limit"
        )));
    }
    let context = model.config().max_position_embeddings;
    for (row, prompt) in prompts.iter().enumerate() {
        let len = prompt.as_ref().len();
        if len.saturating_add(config.max_new_tokens) > context {
            return Err(Error::Run(format!(
                "prompt {row}: {len} tokens and {} new ones exceed the model's context of {context}",
                config.max_new_tokens
            )));
        }
    }
    // Rows of like length decode together: less of the cache is empty, and less attention is spent on it.
    let mut order: Vec<usize> = (0..prompts.len()).collect();
    order.sort_by_key(|&row| prompts[row].as_ref().len());
    let mut responses: Vec<Option<Response>> = vec![None; prompts.len()];
    for rows in order.chunks(config.batch_size.max(1)) {
        let done = tch::no_grad(|| generate_batch(model, prompts, rows, config))?;
        for (&row, response) in rows.iter().zip(done) {
            responses[row] = Some(response);
        }
    }
    Ok(responses.into_iter().map(|response| response.expect("every row was in one batch")).collect())
}

fn generate_batch<P: AsRef<[i64]>>(
    model: &CausalLm,
    prompts: &[P],
    rows: &[usize],
    config: &GenerationConfig,
) -> Result<Vec<Response>> {
    let batch: Vec<&[i64]> = rows.iter().map(|&row| prompts[row].as_ref()).collect();
    let longest = batch.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
    let mut streams: Vec<Stream> = rows
        .iter()
        .map(|&row| Stream::new(config.seed, config.purpose, config.step, config.first_row + row as u64))
        .collect();
    let empty = Response { tokens: Vec::new(), logprobs: Vec::new(), finish: FinishReason::Length };
    let mut responses = vec![empty; rows.len()];
    if config.max_new_tokens == 0 || rows.is_empty() {
        return Ok(responses);
    }
    let (mut cache, mut logits) = model.prefill(&batch, longest + config.max_new_tokens)?;
    // `alive[i]` is the place in the batch of the cache's row i; a row that has stopped is decoded until enough have to
    // make closing the gaps worth a copy of the cache.
    let mut alive: Vec<usize> = (0..rows.len()).collect();
    let mut stopped = vec![false; rows.len()];
    loop {
        let draws: Vec<f64> = alive.iter().map(|&i| streams[i].uniform()).collect();
        let (tokens, logprobs) = choose(&logits, config.sampling, &draws).map_err(|at| {
            Error::Run(format!(
                "prompt {}: the model's logits are not finite: its weights are damaged, or training diverged",
                rows[alive[at]]
            ))
        })?;
        for ((&i, &token), &logprob) in alive.iter().zip(&tokens).zip(&logprobs) {
            if stopped[i] {
                continue;
            }
            responses[i].tokens.push(token);
            responses[i].logprobs.push(logprob);
            if config.stop_token_ids.contains(&token) {
                responses[i].finish = FinishReason::Stop;
                stopped[i] = true;
            } else {
                stopped[i] = responses[i].tokens.len() == config.max_new_tokens;
            }
        }
        let going = alive.iter().filter(|&&i| !stopped[i]).count();
        if going == 0 {
            return Ok(responses);
        }
        let mut next = tokens;
        if going * 8 <= alive.len() * 7 {
            let kept: Vec<usize> = (0..alive.len()).filter(|&at| !stopped[alive[at]]).collect();
            cache.keep_rows(&kept.iter().map(|&at| at as i64).collect::<Vec<_>>());
            next = kept.iter().map(|&at| next[at]).collect();
            alive = kept.iter().map(|&at| alive[at]).collect();
        }
        logits = model.decode(&next, &mut cache);
    }
}

/// Chooses one token per row of `logits` `[rows, vocab]`, with one uniform draw per row; gives tokens and
/// log-probabilities, or the first row whose logits are not finite.
fn choose(logits: &Tensor, sampling: Sampling, draws: &[f64]) -> Result<(Vec<i64>, Vec<f32>), usize> {
    let logits = logits / sampling.temperature();
    let all = logits.log_softmax(-1, Kind::Float);
    let tokens = match sampling {
        Sampling::Greedy => logits.argmax(-1, true),
        Sampling::Random { top_k, top_p, .. } => {
            let kept = top_k > 0 || top_p < 1.0;
            let probs = if kept { filter(&logits, top_k, top_p).softmax(-1, Kind::Float) } else { all.exp() };
            // The inverse of the cumulative distribution at the draw. Summed in f64: an f32 sum over a large vocabulary
            // would shift the borders of rare tokens by more than their probability.
            let cumulative = probs.cumsum(-1, Kind::Double);
            let vocab = cumulative.size()[1];
            let total = cumulative.narrow(1, vocab - 1, 1);
            let target = Tensor::from_slice(draws).to_device(logits.device()).unsqueeze(1) * total;
            target.searchsorted(&cumulative, false, true, "right", None::<&Tensor>).clamp_max(vocab - 1)
        }
    };
    let list = |x: Tensor| Vec::<f32>::try_from(x.squeeze_dim(1)).expect("one number per row");
    let logprobs = list(all.gather(1, &tokens, false));
    match logprobs.iter().position(|logprob| !logprob.is_finite()) {
        Some(row) => Err(row),
        None => Ok((Vec::<i64>::try_from(tokens.squeeze_dim(1)).expect("one id per row"), logprobs)),
    }
}

/// Sets the logits of tokens outside top-k, then outside top-p, to -inf; transformers' order.
fn filter(logits: &Tensor, top_k: i64, top_p: f64) -> Tensor {
    let vocab = logits.size()[1];
    let mut logits = logits.shallow_clone();
    if top_k > 0 && top_k < vocab {
        let (best, _) = logits.topk(top_k, -1, true, true);
        logits = logits.masked_fill(&logits.lt_tensor(&best.narrow(1, top_k - 1, 1)), f64::NEG_INFINITY);
    }
    if top_p < 1.0 {
        let (sorted, order) = logits.sort(-1, true);
        let probs = sorted.softmax(-1, Kind::Float);
        // A token goes if those before it reach top_p already: the one that crosses the border stays.
        let before = probs.cumsum(-1, Kind::Float) - &probs;
        let dropped = before.ge(top_p);
        let dropped = dropped.zeros_like().scatter(1, &order, &dropped);
        logits = logits.masked_fill(&dropped, f64::NEG_INFINITY);
    }
    logits
}

#[cfg(test)]
mod tests {
    use super::*;

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
                let (tokens, logprobs) = choose(&logits, Sampling::at_temperature(temperature), &[draw]).unwrap();
                counts[tokens[0] as usize] += 1e-3;
                assert!((f64::from(logprobs[0]).exp() - expected[tokens[0] as usize]).abs() < 1e-6);
            }
            for (count, expected) in counts.iter().zip(expected) {
                assert!((count - expected).abs() < 2e-3, "{counts:?}");
            }
        }
    }

    #[test]
    fn the_edges_of_the_draw_give_the_first_and_last_possible_token() {
        let logits = row(&[f32::NEG_INFINITY, 0.0, 0.0, f32::NEG_INFINITY]);
        let at = |draw| choose(&logits, Sampling::at_temperature(1.0), &[draw]).unwrap().0[0];
        assert_eq!((at(0.0), at(1.0 - f64::EPSILON)), (1, 2));
    }

    #[test]
    fn top_k_and_top_p_keep_what_they_say() {
        let logits = row(&[0.1f32.ln(), 0.4f32.ln(), 0.3f32.ln(), 0.2f32.ln()]);
        let kept = |top_k, top_p| {
            let finite = filter(&logits, top_k, top_p).isfinite().to_kind(Kind::Int64).squeeze_dim(0);
            Vec::<i64>::try_from(finite).unwrap()
        };
        assert_eq!(kept(2, 1.0), [0, 1, 1, 0]);
        assert_eq!(kept(0, 0.75), [0, 1, 1, 1]); // .4 + .3 is short of .75, so the token that crosses it stays
        assert_eq!(kept(0, 0.65), [0, 1, 1, 0]);
        assert_eq!(kept(0, 0.01), [0, 1, 0, 0]); // at least one
        assert_eq!(kept(0, 1.0), [1, 1, 1, 1]);
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error_that_names_the_row() {
        let logits = Tensor::from_slice(&[0.0, 0.0, f32::NAN, 0.0]).view([2, 2]);
        assert_eq!(choose(&logits, Sampling::at_temperature(1.0), &[0.5, 0.5]), Err(1));
    }
}
