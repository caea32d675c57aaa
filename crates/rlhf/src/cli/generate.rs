//! `rlhf generate`: prompts from arguments, a dataset or standard input; answers as text or JSON lines.

use std::io::{self, IsTerminal, Write};

use rlhf::data::{Prompt, RowReader};
use rlhf::generate::{FinishReason, GenerationConfig, Response, StopStrings, generate};
use rlhf::model::CausalLm;
use rlhf::settings::{Format, GenerateConfig};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use serde_json::{Value, json};

use crate::cli::output::{Output, is_typed, model_options, open_rows};

/// Answers the prompts that `config` names.
pub(crate) fn answer(config: &GenerateConfig) -> Result<()> {
    config.check()?;
    let options = model_options(&config.rows)?;
    let mut rows = open_rows(&config.rows, config.input_format == Format::Jsonl)?;
    if !config.prompts.is_empty() {
        rows = RowReader::arguments(&config.prompts);
    }
    let dir = &rlhf::hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
    let tokenizer = Tokenizer::of_text_or_ids(dir)?;
    let model = CausalLm::from_pretrained(dir, options)?;
    tokenizer.check_fits(model.config(), dir)?;
    let (context, vocab) = (model.config().max_position_embeddings, model.config().vocab_size);
    let mut generation = config.generation(model.config().generation_settings(), context, dir)?;
    set_ends(&mut generation, config, &model, &tokenizer)?;
    let most = context.checked_sub(generation.max_new_tokens).filter(|&most| most > 0).ok_or_else(|| {
        Error::Usage(format!(
            "max_new_tokens = {} leaves no room for a prompt in the model's context of {context} tokens",
            generation.max_new_tokens
        ))
    })?;

    let terminal = config.rows.output_file.is_none() && io::stdout().is_terminal();
    let format = config.output_format.unwrap_or(if terminal { Format::Text } else { Format::Jsonl });
    if !tokenizer.knows_text() && (format == Format::Text || !config.stop_strings.is_empty()) {
        let message = "expected a tokenizer.json for text and stop_strings, found none; JSONL of token ids needs none";
        return Err(Error::invalid(dir, message));
    }
    let mut out = None;
    let bare = tokenizer.has_chat_template() && !config.apply_chat_template;
    let mut ended_at_once = false;
    // In parts, so that answers appear, and are written, as they are made.
    let at_once = if is_typed(&config.rows) && config.prompts.is_empty() {
        1
    } else {
        (config.rows.batch_size / config.num_return_sequences).max(1)
    };
    while let Some(part) = rows.next(at_once)? {
        let part = if config.apply_chat_template { part.with_chat_prompts() } else { part };
        let prompts = part.prompts(&tokenizer, vocab, most)?;
        let tokens: Vec<&[i64]> = prompts.iter().map(|prompt| prompt.tokens.as_slice()).collect();
        let responses = generate(&model, &tokens, &generation)?;
        // The draws are keyed by the place of the answer in the whole output, whatever the batch size.
        generation.first_row += responses.len() as u64;
        let out = match &mut out {
            Some(out) => out,
            none => none.insert(Output::open(&config.rows)?),
        };
        for (i, response) in responses.iter().enumerate() {
            let prompt = &prompts[i / config.num_return_sequences];
            let text = tokenizer.decode_after(&prompt.tokens, &response.tokens)?;
            let asked = ["prompt", "query"].iter().any(|name| prompt.row[name].is_string());
            ended_at_once |= bare && asked && response.finish == FinishReason::Stop && response.tokens.len() < 2;
            match format {
                Format::Text => out.write(format_args!("{}{text}\n", prompt.text))?,
                Format::Jsonl => out.write(json_row(prompt, tokenizer.knows_text().then_some(&text), response))?,
            }
        }
        out.flush()?;
    }
    if ended_at_once {
        let hint = "note: a response ended before it said anything: the model has a chat template, and the prompt was given \
                    without it; try --apply_chat_template";
        let _ = writeln!(io::stderr(), "{hint}");
    }
    match out {
        Some(out) => out.finish(),
        None if config.rows.dataset_name.is_some() => {
            Err(Error::invalid(rows.path(), "expected at least one row, found an empty dataset"))
        }
        None => Err(Error::Usage("no prompt: give one as an argument, by --dataset_name, or on standard input".into())),
    }
}

/// Has answers end where `config` says.
fn set_ends(
    generation: &mut GenerationConfig,
    config: &GenerateConfig,
    model: &CausalLm,
    tokenizer: &Tokenizer,
) -> Result<()> {
    let vocab = model.config().vocab_size;
    if let Some(id) = config.stop_token_ids.iter().find(|id| !(0..vocab).contains(*id)) {
        return Err(Error::Usage(format!(
            "stop_token_ids = {id}: expected ids below the model's vocabulary of {vocab}"
        )));
    }
    generation.stop_token_ids.clone_from(&config.stop_token_ids);
    if !config.ignore_eos {
        generation.stop_token_ids.extend(tokenizer.eos_ids());
    }
    generation.stop_strings = match config.stop_strings.as_slice() {
        [] => None,
        strings => Some(StopStrings::new(tokenizer, strings.to_vec())?),
    };
    Ok(())
}

/// The answer, without `text` where there is no tokenizer, with all other fields of the prompt's row, so that it can be joined with what it belongs to.
fn json_row(prompt: &Prompt, text: Option<&String>, response: &Response) -> Value {
    let mut row = json!({
        "prompt": text.map(|_| &prompt.text),
        "prompt_ids": prompt.tokens,
        "completion": text,
        "completion_ids": response.tokens,
        "logprobs": response.logprobs,
        "finish_reason": response.finish,
        "num_tokens": response.tokens.len(),
    });
    if let (Value::Object(row), Value::Object(source)) = (&mut row, &prompt.row) {
        for (key, value) in source {
            row.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    row
}
