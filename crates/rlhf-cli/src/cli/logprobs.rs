//! `rlhf logprobs`: rows in, the same rows with the log-probabilities of their responses out.

use rlhf::Result;
use rlhf::dist::World;
use rlhf::hub;
use rlhf::model::{Batch, CausalLm};
use rlhf::settings::LogprobsConfig;
use rlhf::tokenizer::Tokenizer;
use serde_json::json;

use super::rows::{annotate, batches, check_finite, numbers, numbers_of_rows, open_rows};

/// Writes the rows with the log-probabilities of their responses.
pub(crate) fn logprobs(config: &LogprobsConfig, world: &World) -> Result<()> {
    config.check()?;
    let options = config.rows.compute.options()?;
    let rows = open_rows(&config.rows, true, world)?;
    let load = || {
        let dir = &hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
        let mut tokenizer = Tokenizer::of_text_or_ids(dir)?;
        tokenizer.set_chat_variables(config.rows.split.chat_template.variables());
        let model = CausalLm::from_pretrained(dir, options)?;
        tokenizer.check_fits(model.config(), dir)?;
        Ok((tokenizer.limited_to(model.config().max_position_embeddings), model))
    };
    let (tokenizer, model) = world.agree(load())?;
    let context = model.config().max_position_embeddings;
    let vocab = model.config().vocab_size;
    annotate(&config.rows, rows, &tokenizer, world, |part| {
        let Some(part) = part else { return Ok(Vec::new()) };
        let texts = part.completions(&tokenizer, vocab, context)?;
        let span = |i: usize| texts[i].prompt_len..texts[i].tokens.len();
        let nonempty: Vec<usize> = (0..texts.len()).filter(|&i| !span(i).is_empty()).collect();
        let batches = batches(nonempty, config.rows.batch_size, |i| texts[i].tokens.len());
        let logprobs = numbers_of_rows(
            texts.len(),
            &batches,
            |i| span(i).len(),
            world,
            |batch| {
                let sequences: Vec<&[i64]> = batch.iter().map(|&i| texts[i].tokens.as_slice()).collect();
                let spans: Vec<_> = batch.iter().map(|&i| span(i)).collect();
                let prompt_lens: Vec<_> = batch.iter().map(|&i| texts[i].prompt_len).collect();
                let rows = Batch::new(&sequences, &spans).with_prompts(Some(&prompt_lens));
                let output = tch::no_grad(|| model.logprobs_of(rows, config.temperature, false))?;
                numbers(&output.logprobs)
            },
        )?;
        batches.iter().flatten().try_for_each(|&i| check_finite(part, i, &logprobs[i]))?;
        let fields = texts.iter().zip(logprobs).map(|(text, logprobs)| {
            let sum = logprobs.iter().fold(0.0, |sum, &logprob| sum + f64::from(logprob)); // `sum()` of an empty list is -0
            vec![
                ("completion_ids", json!(text.tokens[text.prompt_len..])),
                ("logprobs", json!(logprobs)),
                ("sum_logprobs", json!(sum)),
            ]
        });
        Ok(fields.collect())
    })
}
