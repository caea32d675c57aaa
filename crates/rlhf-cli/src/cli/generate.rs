//! `rlhf generate`: prompts from arguments, a dataset or standard input; responses as text or JSON lines.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use rlhf::data::{Dataset, Episode, Prompt, PromptLimit, RowReader, is_data_file};
use rlhf::dist::World;
use rlhf::environment::Log;
use rlhf::generate::{self, FinishReason, GenerationConfig, Response};
use rlhf::model::{CausalLm, ModelOptions};
use rlhf::run::{RolloutTurns, turns};
use rlhf::safe_text::one_line;
use rlhf::settings::{Format, GenerateConfig};
use rlhf::tokenizer::Tokenizer;
use rlhf::tool_loop::ToolLoop;
use rlhf::{Error, Result};
use serde_json::{Value, json};

use super::rows::{Rows, is_typed, open_rows};

/// Writes the responses to the prompts that `config` names.
pub(crate) fn generate(config: &GenerateConfig, world: &World) -> Result<()> {
    config.check()?;
    let options = config.rows.compute.options()?;
    let mut rows = open_rows(&config.rows, config.input_format == Format::Jsonl, world)?;
    if !config.prompts.is_empty() {
        rows = RowReader::arguments(&config.prompts);
    }
    let terminal = world.any(world.is_main() && config.rows.output_file.is_none() && io::stdout().is_terminal())?;
    let mut generator = world.agree(Generator::load(config, options, terminal))?;
    if let Some(note) = generator.note().filter(|_| world.is_main()) {
        let _ = writeln!(io::stderr(), "note: {}", one_line(&note));
    }
    let mut out = Rows::new(&config.rows, world);
    // In parts, so that responses appear, and are written, as they are generated; each rank generates one part at a time. Parts do
    // not depend on the ranks, so that each response is the same with any number of ranks.
    let (at_once, parts) = if config.prompts.is_empty() && is_typed(&config.rows, world)? {
        (1, 1)
    } else {
        ((config.rows.batch_size / config.responses.num_return_sequences).max(1), world.size())
    };
    let mut is_first = true;
    loop {
        let mut read = Vec::new();
        while let Some(part) = if read.len() < parts { rows.next(at_once)? } else { None } {
            read.push(part);
        }
        if read.is_empty() {
            break;
        }
        if std::mem::take(&mut is_first)
            && let Some(note) = note_on(config, &read[0]).filter(|_| world.is_main())
        {
            let _ = writeln!(io::stderr(), "note: {}", one_line(&note));
        }
        let lines = world.agree(generator.rows(read, world.rank()))?;
        out.write(world.gather(lines)?.iter().flatten())?;
    }
    if world.any(generator.ended_at_once)? && world.is_main() {
        let _ = writeln!(io::stderr(), "{MISSING_TEMPLATE}");
    }
    if out.finish()? {
        Ok(())
    } else if config.rows.dataset_name.is_some() {
        Err(Error::invalid(rows.path(), "expected at least one row, found an empty dataset"))
    } else {
        Err(Error::Usage("no prompt: give one as an argument, by --dataset_name, or on standard input".into()))
    }
}

/// Returns a note if a prompt is probably meant as something else: an argument that names a data file, or a line of standard input, the
/// first row of `part`, that is a row of a dataset.
fn note_on(config: &GenerateConfig, part: &Dataset) -> Option<String> {
    if !config.prompts.is_empty() {
        let file = config.prompts.iter().find(|name| is_data_file(Path::new(name)))?;
        return Some(format!("`{file}` is a file, and its name is taken for a prompt; --dataset_name {file} reads it"));
    }
    if config.rows.dataset_name.is_some() || config.input_format != Format::Text {
        return None;
    }
    let line: Value = serde_json::from_str(part.rows().next()?["prompt"].as_str()?).ok()?;
    let is_row = ["prompt", "prompt_ids"].iter().any(|field| line.get(field).is_some());
    is_row.then(|| {
        "a line of standard input is taken for a prompt, its JSON included; --input_format jsonl reads rows".into()
    })
}

const MISSING_TEMPLATE: &str = "note: a response is empty: the model has a chat template, and the prompt was given without it; try \
                                --apply_chat_template";

/// A language model that responds to prompts.
struct Generator<'c> {
    config: &'c GenerateConfig,
    model: CausalLm,
    tokenizer: Tokenizer,
    generation: GenerationConfig,
    /// Maximum length of a prompt, in tokens.
    max_prompt_len: usize,
    format: Format,
    /// Tools and environments, if there are any.
    tool_loop: Option<ToolLoop>,
    /// Whether the stop token came first in a response to a prompt without the model's chat template.
    ended_at_once: bool,
}

impl<'c> Generator<'c> {
    /// Loads the model; `terminal` is whether the responses are printed on a terminal.
    fn load(config: &'c GenerateConfig, options: ModelOptions, terminal: bool) -> Result<Self> {
        let dir = &rlhf::hub::model_dir(&config.model_name_or_path, Some(&config.model_revision))?;
        let mut tokenizer = Tokenizer::of_text_or_ids(dir)?;
        tokenizer.set_chat_variables(config.rows.split.chat_template.variables());
        // Before the model, which takes time.
        let tool_loop = ToolLoop::start(&config.environment, &tokenizer, &Log::standard_error())?;
        let model = CausalLm::from_pretrained(dir, options)?;
        tokenizer.check_fits(model.config(), dir)?;
        let (generation, max_prompt_len) = config.for_model(&model, &tokenizer, dir)?;
        let format = config.output_format.unwrap_or(if terminal { Format::Text } else { Format::Jsonl });
        if !tokenizer.knows_text() && (format == Format::Text || !config.responses.stop_strings.is_empty()) {
            let message =
                "expected a tokenizer.json for text and stop_strings, found none; JSONL of token ids needs none";
            return Err(Error::invalid(dir, message));
        }
        let tool_loop = tool_loop.map(|tool_loop| tool_loop.limited_to(PromptLimit::of_context(max_prompt_len)));
        Ok(Self { config, model, tokenizer, generation, max_prompt_len, format, tool_loop, ended_at_once: false })
    }

    /// Returns a note if fields of the model's `generation_config.json` would change responses in transformers and not here.
    fn note(&self) -> Option<String> {
        self.config.note_without_effect(self.model.config().generation_settings(), &self.generation)
    }

    /// Returns the prompts of the rows of `part`.
    fn prompts(&self, part: Dataset) -> Result<Vec<Prompt>> {
        let is_chat = self.config.apply_chat_template || self.tool_loop.is_some();
        let part = if is_chat { part.with_chat_prompts() } else { part };
        let part = match &self.config.system_prompt {
            Some(system) => part.with_system_prompt(system),
            None => part,
        };
        part.prompts(&self.tokenizer, self.model.config().vocab_size, self.max_prompt_len)
    }

    /// Generates the responses to part `index` of `parts`, `num_return_sequences` to each prompt. Returns their rows of the output.
    fn rows(&mut self, parts: Vec<Dataset>, index: usize) -> Result<Vec<String>> {
        let per_prompt = self.config.responses.num_return_sequences;
        let counts: Vec<usize> = parts.iter().map(|part| part.rows().count() * per_prompt).collect();
        // Draws are keyed by the response's place in the whole output, so that they do not depend on the batch size.
        let first_row = self.generation.first_row + counts[..index.min(counts.len())].iter().sum::<usize>() as u64;
        let generation = GenerationConfig { first_row, ..self.generation.clone() };
        self.generation.first_row += counts.iter().sum::<usize>() as u64;
        let Some(part) = parts.into_iter().nth(index) else { return Ok(Vec::new()) };
        let prompts = self.prompts(part)?;
        if let Some(tool_loop) = &self.tool_loop {
            let asked: Vec<&Prompt> = prompts.iter().collect();
            let (responses, episodes) = tool_loop.generate(&self.model, &asked, &generation)?;
            let rows = responses.iter().zip(&episodes).enumerate();
            return rows.map(|(i, (response, episode))| self.episode_row(episode, i % per_prompt, response)).collect();
        }
        let tokens: Vec<&[i64]> = prompts.iter().map(|prompt| prompt.tokens.as_slice()).collect();
        let responses = generate::generate(&self.model, &tokens, &generation)?;
        let row = |(i, response)| self.row(&prompts[i / per_prompt], i % per_prompt, response);
        responses.iter().enumerate().map(row).collect()
    }

    /// Returns the row of response `index` to a prompt; the response has several turns.
    fn episode_row(&self, episode: &Episode, index: usize, response: &Response) -> Result<String> {
        if self.format == Format::Text {
            let reward = episode.reward.map(|reward| format!("\n(reward {reward})")).unwrap_or_default();
            let text = turns::lines(&episode.messages);
            // If the prompt has begun a message, the turns have the whole message.
            let begun = episode.prompt.row["prompt"].as_array().and_then(|messages| messages.last());
            let begun = begun.filter(|last| last["role"] == "assistant").and_then(|last| last["content"].as_str());
            let text = begun.and_then(|begun| text.strip_prefix(begun)).unwrap_or(&text);
            return Ok(format!("{}{text}{reward}\n", episode.prompt.text));
        }
        let index = (self.config.responses.num_return_sequences > 1).then_some(index);
        let text = self.tokenizer.decode(&response.tokens)?;
        let mut row = json_row(&episode.prompt, Some(&text), index, response);
        row["num_tokens"] = response.num_sampled().into();
        if let (Value::Object(row), Value::Object(turns)) = (&mut row, json!(RolloutTurns::of(episode, response))) {
            row.extend(turns);
        }
        Ok(row.to_string())
    }

    /// Returns the row of response `index` to `prompt`.
    fn row(&mut self, prompt: &Prompt, index: usize, response: &Response) -> Result<String> {
        let text = self.tokenizer.decode_after(&prompt.tokens, &response.tokens)?;
        let is_text = ["prompt", "query"].iter().any(|name| prompt.row[name].is_string());
        let bare = self.tokenizer.has_chat_template() && !self.config.apply_chat_template;
        self.ended_at_once |= bare && is_text && response.finish == FinishReason::Stop && response.tokens.len() < 2;
        Ok(match self.format {
            Format::Text => format!("{}{text}\n", prompt.text),
            Format::Jsonl => {
                let index = (self.config.responses.num_return_sequences > 1).then_some(index);
                json_row(prompt, self.tokenizer.knows_text().then_some(&text), index, response).to_string()
            }
        })
    }
}

/// Returns the row of a response, with all other fields of the prompt's row. Without a tokenizer there is no `text`; with one
/// response to each prompt there is no `index`.
fn json_row(prompt: &Prompt, text: Option<&String>, index: Option<usize>, response: &Response) -> Value {
    let mut row = json!({
        "prompt": text.map(|_| &prompt.text),
        "prompt_ids": prompt.tokens,
        "completion": text,
        "completion_ids": response.tokens,
        "logprobs": response.logprobs,
        "finish_reason": response.finish,
        "num_tokens": response.tokens.len(),
    });
    if let Some(index) = index {
        row["completion_index"] = index.into();
    }
    if let (Value::Object(row), Value::Object(source)) = (&mut row, &prompt.row) {
        for (key, value) in source {
            row.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    row
}
