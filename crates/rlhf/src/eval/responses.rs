//! Responses to the prompts: those of a model, generated, and those of a column of the dataset.

use super::results::{Given, Store};
use super::{Models, Side, Task};
use crate::data::{Episode, Prompt, PromptLimit, RowReader, prompt_field};
use crate::environment::Environment;
use crate::run::sinks::phase_bar::PhaseBar;
use crate::settings::{EvaluateConfig, GenerateConfig};
use crate::tool_loop::ToolLoop;
use rlhf_base::safe_text::beginning;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{self, FinishReason, GenerationConfig, Response, Sampling};
use rlhf_lm::model::{AdapterFolder, CausalLm, ModelConfig, ModelOptions};
use rlhf_lm::tokenizer::{Tokenizer, message_text};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The sampling of a model: the settings, completed by its `generation_config.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Sampled {
    model: PathBuf,
    settings: Map<String, Value>,
}

/// Returns the sampling of each model.
///
/// # Errors
/// If the `config.json` or `generation_config.json` of one is malformed.
pub(super) fn sampled(config: &EvaluateConfig, models: &Models) -> Result<Vec<Sampled>> {
    let a = Some((&config.model_name_or_path, &config.model_revision, &models.a));
    let b = config.compare.as_ref().zip(models.b.as_ref());
    let b = b.map(|(name, dir)| (name, &config.compare_revision, dir));
    let of_model = |(name, revision, dir): (&PathBuf, &String, &PathBuf)| {
        let model = described(dir)?;
        let context = model.max_position_embeddings;
        let generation = config.generate(name, revision).generation(model.generation_settings(), context, dir)?;
        Ok(Sampled { model: name.clone(), settings: settings_of(&generation) })
    };
    a.into_iter().chain(b).map(of_model).collect()
}

/// Returns the configuration of the model in the folder `dir`, as loading has it: an adapter's own `generation_config.json` replaces its
/// base's.
fn described(dir: &Path) -> Result<ModelConfig> {
    let Some(adapter) = AdapterFolder::find(dir)? else { return ModelConfig::from_dir(dir) };
    let mut base = ModelConfig::from_dir(&adapter.base_dir()?)?;
    base.read_generation(dir)?;
    Ok(base)
}

/// Returns the settings of a generation by the names of their flags.
fn settings_of(generation: &GenerationConfig) -> Map<String, Value> {
    let mut settings = Map::new();
    let mut set = |name: &str, value: Value| drop(settings.insert(name.into(), value));
    set("max_new_tokens", generation.max_new_tokens.into());
    set("min_new_tokens", generation.min_new_tokens.into());
    match generation.sampling {
        Sampling::Greedy => set("do_sample", false.into()),
        Sampling::Random { temperature, top_k, top_p, min_p } => {
            set("do_sample", true.into());
            set("temperature", temperature.into());
            set("top_k", top_k.into());
            set("top_p", top_p.into());
            set("min_p", min_p.into());
        }
    }
    set("repetition_penalty", generation.repetition_penalty.into());
    settings
}

/// Returns a warning where two models are sampled in different ways, which no flag can have asked for.
pub(super) fn sampling_warning(sampled: &[Sampled]) -> Option<String> {
    let [a, b] = sampled else { return None };
    let differs = a.settings.iter().filter_map(|(name, of_a)| {
        let of_b = b.settings.get(name).filter(|of_b| *of_b != of_a)?;
        Some((name, format!("--{name} {of_a} and {of_b}")))
    });
    let (names, values): (Vec<&String>, Vec<String>) = differs.unzip();
    let first = names.first()?;
    Some(format!(
        "{} and {} are sampled with different settings, those of their generation_config.json: {}; a comparison needs the same: set \
         --{first}{}",
        a.model.display(),
        b.model.display(),
        values.join(", "),
        if names.len() > 1 { " and the others" } else { "" }
    ))
}

/// A language model that responds to the prompts.
struct Responder {
    model: CausalLm,
    tokenizer: Tokenizer,
    generation: GenerationConfig,
    prompts: Vec<Prompt>,
    /// Tools and environments, if there are any.
    tool_loop: Option<ToolLoop>,
}

impl Responder {
    /// Loads the model in `dir`, and encodes the prompts for it.
    fn load(config: &GenerateConfig, dir: &Path, task: &Task, options: ModelOptions) -> Result<Self> {
        let mut tokenizer = Tokenizer::from_pretrained(dir)?;
        tokenizer.set_chat_variables(config.rows.split.chat_template.variables());
        let model = CausalLm::from_pretrained(dir, options)?;
        tokenizer.check_fits(model.config(), dir)?;
        let (generation, max_prompt_len) = config.for_model(&model, &tokenizer, dir)?;
        let prompts = task.dataset.prompts(&tokenizer, model.config().vocab_size, max_prompt_len)?;
        let start = |environment: &Arc<dyn Environment>| {
            let tool_loop = ToolLoop::new(environment.clone(), &tokenizer, &config.environment)?;
            Ok::<_, Error>(tool_loop.limited_to(PromptLimit::of_context(max_prompt_len)).logging_to(&task.log))
        };
        let tool_loop = task.environment.as_ref().map(start).transpose()?;
        Ok(Self { model, tokenizer, generation, prompts, tool_loop })
    }

    /// Returns the responses to each of the prompts `indices`: those of `rlhf generate` on the whole dataset.
    fn respond(&self, indices: &[usize]) -> Result<Vec<Vec<Given>>> {
        let per_prompt = self.generation.num_return_sequences;
        // The draws of a prompt are those of its index, so that an evaluation that was cut continues with the same responses.
        let mut found = Vec::with_capacity(indices.len());
        for run in indices.chunk_by(|a, b| a + 1 == *b) {
            let asked: Vec<&Prompt> = run.iter().map(|&index| &self.prompts[index]).collect();
            let first_row = (run[0] * per_prompt) as u64;
            let generation = GenerationConfig { first_row, ..self.generation.clone() };
            let given = self.given(&asked, &generation)?;
            found.extend(given.chunks(per_prompt).map(<[Given]>::to_vec));
        }
        Ok(found)
    }

    fn given(&self, asked: &[&Prompt], generation: &GenerationConfig) -> Result<Vec<Given>> {
        if let Some(tool_loop) = &self.tool_loop {
            let (responses, episodes) = tool_loop.generate(&self.model, asked, generation)?;
            let given = |(response, episode): (Response, Episode)| Given {
                text: episode.answer(),
                ids: response.tokens,
                finish: response.finish,
                episode: Some(episode),
            };
            return Ok(responses.into_iter().zip(episodes).map(given).collect());
        }
        let tokens: Vec<&[i64]> = asked.iter().map(|prompt| prompt.tokens.as_slice()).collect();
        let responses = generate::generate(&self.model, &tokens, generation)?;
        let given = |(at, response): (usize, Response)| {
            let text = self.tokenizer.decode_after(tokens[at / generation.num_return_sequences], &response.tokens)?;
            Ok(Given { text, ids: response.tokens, finish: response.finish, episode: None })
        };
        responses.into_iter().enumerate().map(given).collect()
    }
}

/// Generates the responses of the model in `dir` that the store lacks, and stores them.
pub(super) fn generate_missing(
    config: &EvaluateConfig,
    side: Side,
    dir: &Path,
    task: &Task,
    store: &mut Store,
    progress: &PhaseBar,
) -> Result<()> {
    let missing = store.without_response(side, task.rows.len());
    let (name, revision) = match (side, &config.compare) {
        (Side::B, Some(model)) => (model, &config.compare_revision),
        _ => (&config.model_name_or_path, &config.model_revision),
    };
    if missing.is_empty() {
        return Ok(());
    }
    let short = name.file_name().unwrap_or(name.as_os_str()).to_string_lossy();
    progress.start(&format!("responses of {}", beginning(&short, 30)), missing.len());
    let settings = config.generate(name, revision);
    let responder = Responder::load(&settings, dir, task, config.compute.options()?)?;
    let of_model = responder.model.config().generation_settings();
    settings.note_without_effect(of_model, &responder.generation).iter().for_each(|note| progress.warn(note));
    let at_once = (config.batch_size / config.sampling.num_return_sequences).max(1);
    for indices in missing.chunks(at_once) {
        let responses = responder.respond(indices)?;
        for (&index, given) in indices.iter().zip(responses) {
            store.add_responses(side, index, &task.rows[index], given)?;
        }
        progress.advance(indices.len());
    }
    Ok(())
}

/// Returns the response in `column` of a row: a string, or one message of a conversation.
///
/// # Errors
/// If the row has no such column, or it holds something else.
pub(super) fn reference<'a>(row: &'a Value, column: &str) -> Result<Cow<'a, str>> {
    let value = &row[column];
    let message = || match value.as_array().map(Vec::as_slice) {
        Some([message]) => message_text(&message["content"]).map(Cow::Owned),
        _ => None,
    };
    value.as_str().map(Cow::Borrowed).or_else(message).ok_or_else(|| {
        let found =
            if value.is_null() { "none".into() } else { rlhf_base::weights::brief(&value.to_string()).into_owned() };
        Error::Run(format!(
            "compare_column = {column}: expected a string in this column, or a list of one message, found {found}"
        ))
    })
}

/// Returns the prompt of a row as a reader sees it: its text, the content of its only message, or its messages with their roles.
pub(super) fn plain_prompt(row: &Value, encoded: &Prompt) -> String {
    let text = |message: &Value| message_text(&message["content"]).unwrap_or_default();
    match prompt_field(row) {
        Some((_, Value::Array(messages))) => match messages.as_slice() {
            [message] => text(message),
            messages => {
                let turn = |m: &Value| format!("{}: {}", m["role"].as_str().unwrap_or_default(), text(m));
                messages.iter().map(turn).collect::<Vec<_>>().join("\n\n")
            }
        },
        _ => encoded.text.clone(),
    }
}

/// Returns token ids of a response that another tokenizer made, or that is text, as a response to `prompt` of `tokenizer`: with eos,
/// unless it was cut off at its maximum length. `turns` are the messages of a response of several turns.
///
/// # Errors
/// If the tokenizer cannot encode it.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    prompt: &Prompt,
    (text, turns): (&str, Option<&[Value]>),
    finish: FinishReason,
) -> Result<Vec<i64>> {
    let completion = match prompt_field(&prompt.row) {
        Some((_, messages @ Value::Array(_))) => json!({
            "prompt": messages,
            "completion": turns.map_or_else(|| vec![json!({"role": "assistant", "content": text})], <[Value]>::to_vec),
            "chat_template_kwargs": prompt.row["chat_template_kwargs"],
        }),
        _ => json!({"prompt": prompt.text, "completion": text}),
    };
    let mut rows = RowReader::lines("responses", Cursor::new(completion.to_string()), true);
    let response = rows.next(1)?.map(|rows| rows.responses(tokenizer)).transpose()?;
    let mut ids =
        response.and_then(|mut responses| responses.pop()).map_or(Vec::new(), |response| response.response_ids);
    let ends = ids.last().is_some_and(|id| tokenizer.eos_ids().contains(id));
    match (finish, tokenizer.eos()) {
        (FinishReason::Length, _) if ends => drop(ids.pop()),
        (FinishReason::Stop, Some(eos)) if !ends => ids.push(eos),
        _ => {}
    }
    Ok(ids)
}
