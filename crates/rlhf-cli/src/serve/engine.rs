//! The thread that owns the model: it responds to one request after another.

use super::api::{Chat, ChatEnd, Endpoint, Prompt, Request};
use super::choice::{Calling, Choice, Delta, prompt_tokens};
use super::error::ApiError;
use super::format::{Form, Usage, random};
use super::room::Room;
use super::tools::{ToolChoice, Tools};
use crate::http_server::{EventStream, Events};
use rlhf::generate::{Alternatives, GenerationConfig, Token, generate_until};
use rlhf::hub;
use rlhf::model::{Batch, CausalLm, StopCheck};
use rlhf::safe_text::one_line;
use rlhf::settings::{GenerateConfig, SamplerConfig, ServeConfig};
use rlhf::signals::stop_requested;
use rlhf::tokenizer::{PART_SLACK, Tokenizer, ToolTemplate};
use rlhf::{Error, Refusal, Result};
use serde_json::Value;
use std::cell::{OnceCell, RefCell};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use tokio::sync::oneshot;

/// Maximum tokens of a completion whose request does not set it: OpenAI's default.
const COMPLETION_TOKENS: usize = 16;

/// A request that waits for the model, and the channel to its client.
pub(super) struct Job {
    pub(super) request: Request,
    pub(super) reply: oneshot::Sender<Result<Reply, ApiError>>,
    /// The room that its body takes; other requests get it after the response.
    pub(super) room: Room,
}

/// The result of a request.
pub(super) enum Reply {
    /// All responses in one object.
    Whole(Value),
    /// Their parts as they are generated.
    Stream(EventStream),
}

/// The model, with the settings that requests are resolved by.
pub(super) struct Engine {
    model: CausalLm,
    tokenizer: Tokenizer,
    /// The chat template for tools, or the reason that there is none; made with the first request that needs it.
    tools: OnceCell<Result<ToolTemplate, String>>,
    dir: PathBuf,
    /// Settings that requests change.
    defaults: GenerateConfig,
    /// Maximum tokens of a chat response whose request does not set it.
    max_new_tokens: usize,
}

/// A request as token ids and settings of the generation.
struct Resolved {
    prompts: Vec<Vec<i64>>,
    /// Texts of the prompts, if choices start with them.
    echo: Option<Vec<String>>,
    turn: Option<ToolTurn>,
    generation: GenerationConfig,
}

/// The turn of a conversation with tools.
struct ToolTurn {
    template: ToolTemplate,
    schemas: Vec<Value>,
    /// The end of the prompt that belongs to the turn, and the number of its last bytes that belong to the response.
    beginning: (String, usize),
    parallel: bool,
}

impl Engine {
    /// Loads the model.
    ///
    /// # Errors
    /// If it is no language model with a tokenizer.
    pub(super) fn load(config: &ServeConfig) -> Result<Self> {
        let options = config.compute.options()?;
        let dir = hub::model_dir(&config.model, Some(&config.model_revision))?;
        let tokenizer = Tokenizer::from_pretrained(&dir)?;
        let model = CausalLm::from_pretrained(&dir, options)?;
        tokenizer.check_fits(model.config(), &dir)?;
        // Only a part of a prompt that is far too long is encoded: its client, and all others, would wait for the rest.
        let tokenizer = tokenizer.limited_to(model.config().max_position_embeddings);
        let mut defaults = GenerateConfig::new(&config.model);
        defaults.rows.batch_size = config.batch_size;
        // The minimum of a model's file would hide stop strings.
        defaults.min_new_tokens = Some(0);
        Ok(Self { model, tokenizer, tools: OnceCell::new(), dir, defaults, max_new_tokens: config.max_new_tokens })
    }

    /// Returns a note if fields of the model's `generation_config.json` would change responses in transformers and not here.
    pub(super) fn note(&self) -> Option<String> {
        // An invalid value is an error of the requests that use it.
        self.defaults.note_for_model(self.model.config(), &self.dir).ok().flatten()
    }

    /// Responds to a request for the model `name`, unless its client is gone.
    pub(super) fn respond(&self, name: &str, job: Job) {
        let Job { request, reply, room: _room } = job;
        let resolved = match self.resolve(&request, &reply) {
            Ok(resolved) => resolved,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let form = Form::new(request.endpoint, name, request.logprobs.is_some(), resolved.turn.is_some());
        let choices = resolved.prompts.len() * request.n;
        if !request.stream {
            let mut sink = Sink::Whole { reply, choices: (0..choices).map(|_| Delta::default()).collect() };
            let completed = self.complete(&request, &resolved, &mut sink);
            let Sink::Whole { reply, choices } = sink else { return };
            return drop(reply.send(completed.map(|usage| Reply::Whole(form.whole(&choices, usage)))));
        }
        let (events, stream) = Events::channel();
        if reply.send(Ok(Reply::Stream(stream))).is_err() {
            return;
        }
        for chunk in (0..choices).filter_map(|index| form.first_chunk(index)) {
            events.send(&chunk.to_string());
        }
        let mut sink = Sink::Stream { events, form: &form };
        let completed = self.complete(&request, &resolved, &mut sink);
        let Sink::Stream { events, .. } = sink else { return };
        match completed {
            Ok(usage) => {
                if request.include_usage {
                    events.send(&form.usage_chunk(usage).to_string());
                }
                events.send("[DONE]");
            }
            Err(error) => {
                events.send(&error.to_json().to_string());
            }
        }
    }

    /// Encodes the prompts and resolves the settings of a request.
    fn resolve(
        &self,
        request: &Request,
        reply: &oneshot::Sender<Result<Reply, ApiError>>,
    ) -> Result<Resolved, ApiError> {
        if request.echo && request.logprobs.is_some() && self.model.config().is_encoder_decoder() {
            let message = "`echo` with `logprobs`: an encoder reads the prompt of this model, so its tokens have no log-probabilities";
            return Err(ApiError::invalid("echo", message));
        }
        let mut turn = None;
        let encode = |prompt: &Prompt| {
            if reply.is_closed() || stop_requested() {
                Err(ApiError::unavailable("the server stops"))
            } else {
                self.encode(prompt, &mut turn)
            }
        };
        let encoded: Vec<_> = request.prompts.iter().map(encode).collect::<Result<_, _>>()?;
        let (prompts, texts): (Vec<Vec<i64>>, Vec<String>) = encoded.into_iter().unzip();
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let max_new_tokens = self.max_new_tokens(request, longest)?;
        let mut settings = self.defaults.clone();
        settings.seed = request.seed.unwrap_or_else(random);
        settings.responses.max_new_tokens = Some(max_new_tokens.max(1));
        settings.responses.do_sample = request.temperature.map(|temperature| temperature != 0.0);
        settings.responses.sampler = SamplerConfig {
            temperature: request.temperature,
            top_k: request.top_k,
            top_p: request.top_p,
            min_p: request.min_p,
            repetition_penalty: request.repetition_penalty,
        };
        settings.responses.stop_strings.clone_from(&request.stop);
        settings.responses.stop_token_ids.clone_from(&request.stop_token_ids);
        settings.ignore_eos = request.ignore_eos;
        settings.min_new_tokens = Some(request.min_tokens);
        let (resolved, _) =
            settings.for_model(&self.model, &self.tokenizer, &self.dir).map_err(|error| refused(&error))?;
        let generation = GenerationConfig {
            max_new_tokens,
            num_return_sequences: request.n,
            top_logprobs: request.logprobs,
            ..resolved
        };
        generation.check().map_err(|error| refused(&error))?;
        Ok(Resolved { prompts, echo: request.echo.then_some(texts), turn, generation })
    }

    /// Returns the token ids and the text of a prompt; sets the turn in which tools may be called.
    fn encode(&self, prompt: &Prompt, turn: &mut Option<ToolTurn>) -> Result<(Vec<i64>, String), ApiError> {
        let prompt_error = |error: Error| ApiError::invalid("prompt", error.to_string());
        let (tokens, text) = match prompt {
            Prompt::Text(text) => (self.tokenizer.encode_prompt(text).map_err(prompt_error)?, text.clone()),
            Prompt::Tokens(ids) => {
                let vocab = self.model.config().vocab_size;
                if let Some(id) = ids.iter().find(|id| !(0..vocab).contains(*id)) {
                    let expected = format!("expected ids from 0 to {}, the model's vocabulary", vocab - 1);
                    return Err(ApiError::invalid("prompt", format!("`prompt`: token id {id}: {expected}")));
                }
                (ids.clone(), self.tokenizer.decode(ids).map_err(prompt_error)?)
            }
            Prompt::Chat(chat) => return self.encode_chat(chat, turn),
        };
        if tokens.is_empty() {
            Err(ApiError::invalid("prompt", "the prompt is empty: expected at least one token"))
        } else {
            Ok((tokens, text))
        }
    }

    /// As [`Engine::encode`], for messages. With tools the text is empty, as nothing reads it.
    fn encode_chat(&self, chat: &Chat, turn: &mut Option<ToolTurn>) -> Result<(Vec<i64>, String), ApiError> {
        if !self.tokenizer.has_chat_template() {
            let message = "this model has no chat template: use /v1/completions";
            return Err(ApiError::invalid("messages", message));
        }
        let messages = chat.with_calls.as_ref().unwrap_or(&chat.messages);
        if chat.end != ChatEnd::Closed && (chat.tools.is_some() || chat.with_calls.is_some()) {
            match (self.tools.get_or_init(|| self.tool_template()), &chat.tools) {
                (Ok(template), tools) => {
                    let template = template.with_variables(&chat.variables);
                    let (tokens, response_bytes) =
                        self.encode_with_tools(&template, messages, chat.end, tools.as_ref())?;
                    if let Some(tools) = tools {
                        let beginning =
                            (template.beginning(&tokens).map_err(|e| self.template_error(e))?, response_bytes);
                        let schemas = tools.schemas.clone();
                        let parallel = tools.parallel;
                        *turn = Some(ToolTurn { template, schemas, beginning, parallel });
                    }
                    return Ok((tokens, String::new()));
                }
                (Err(reason), Some(_)) => return Err(ApiError::invalid("tools", format!("`tools`: {reason}"))),
                // A template without tools reads the messages as it can.
                (Err(_), None) => {}
            }
        }
        let Chat { messages, variables, end, .. } = chat;
        let encoded = match end {
            ChatEnd::Continued => self.tokenizer.encode_continued_chat(messages, variables),
            end => self.tokenizer.encode_chat(messages, *end == ChatEnd::GenerationPrompt, variables),
        };
        encoded.map(|(text, tokens)| (tokens, text)).map_err(|error| self.template_error(error))
    }

    /// Returns the token ids of messages with tools, and the number of bytes of a call that they end with.
    fn encode_with_tools(
        &self,
        template: &ToolTemplate,
        messages: &[Value],
        end: ChatEnd,
        tools: Option<&Tools>,
    ) -> Result<(Vec<i64>, usize), ApiError> {
        let schemas = tools.map_or(&[][..], |tools| tools.schemas.as_slice());
        let encoded = match (tools.map(|tools| &tools.choice), end) {
            (_, ChatEnd::Continued) => template.continued_prompt(messages, schemas).map(|tokens| (tokens, 0)),
            (None | Some(ToolChoice::Auto), _) => template.prompt(messages, schemas).map(|tokens| (tokens, 0)),
            (Some(ToolChoice::Required), _) => template.calling_prompt(messages, schemas, None),
            (Some(ToolChoice::Function(name)), _) => template.calling_prompt(messages, schemas, Some(name)),
        };
        encoded.map_err(|error| self.template_error(error))
    }

    /// Returns the chat template for tools.
    ///
    /// # Errors
    /// The reason that it cannot be used with them.
    fn tool_template(&self) -> Result<ToolTemplate, String> {
        ToolTemplate::new(&self.tokenizer).map_err(|error| self.without_folder(error))
    }

    /// The error of a chat template.
    fn template_error(&self, error: Error) -> ApiError {
        ApiError::invalid("messages", self.without_folder(error))
    }

    /// The message of an error in one line, without the folder of the model, which clients do not need to know.
    fn without_folder(&self, error: Error) -> String {
        match error {
            Error::Invalid { message, .. } => one_line(&message).into_owned(),
            other => {
                let folder = format!("{}/", self.dir.display().to_string().trim_end_matches('/'));
                one_line(&other.to_string()).replace(&folder, "")
            }
        }
    }

    /// Returns the maximum number of tokens of a response to a prompt of `len` tokens.
    fn max_new_tokens(&self, request: &Request, len: usize) -> Result<usize, ApiError> {
        let config = self.model.config();
        let (param, usual) = match request.endpoint {
            Endpoint::Completions => ("prompt", COMPLETION_TOKENS),
            Endpoint::Chat => ("messages", self.max_new_tokens),
        };
        let context = config.max_position_embeddings;
        let remaining = config.max_new_tokens(len);
        let more = if len > context.saturating_add(PART_SLACK) { "at least " } else { "" };
        // For an encoder-decoder the context limits the prompt and the response, each by itself.
        match request.max_tokens {
            Some(most) if len <= context && most <= remaining => Ok(most),
            Some(most) => Err(ApiError::too_long(
                if len < context { "max_tokens" } else { param },
                format!(
                    "the prompt has {more}{len} tokens, and the response up to {most}: the model's context is {context} tokens"
                ),
            )),
            None if remaining > 0 => Ok(usual.min(remaining)),
            None => Err(ApiError::too_long(
                param,
                format!(
                    "the prompt has {more}{len} tokens, with no room for a response: the model's context is {context} tokens"
                ),
            )),
        }
    }

    /// Generates the responses into `sink`. Stops early if the client is gone.
    fn complete(&self, request: &Request, resolved: &Resolved, sink: &mut Sink<'_>) -> Result<Usage, ApiError> {
        let Resolved { prompts, echo, turn, generation } = resolved;
        let begin = |index: usize| {
            let prompt = &prompts[index / request.n];
            let offset = echo.as_ref().map_or(0, |texts| texts[index / request.n].chars().count());
            let choice = Choice::new(&self.tokenizer, prompt, &request.stop, offset);
            let Some(ToolTurn { template, schemas, beginning: (text, response_bytes), parallel }) = turn else {
                return Ok(choice);
            };
            let turn = template.turn(text.clone(), *response_bytes, schemas);
            Ok(choice.calling(Calling { stream: template.text_stream(prompt)?, turn, parallel: *parallel }))
        };
        let choices = (0..prompts.len() * request.n).map(begin).collect::<Result<Vec<_>>>();
        let mut choices = choices.map_err(|error| ApiError::internal(error.to_string()))?;
        if let Some(texts) = echo {
            self.echo(request, (prompts, texts), sink)?;
        }
        let mut open = choices.len();
        let mut failed = None;
        let sink = RefCell::new(sink);
        // Also asked during the pass over the prompts, which takes minutes for long ones on a CPU.
        let is_over = || stop_requested() || sink.borrow().is_gone();
        let each = |token: &Token| {
            if is_over() {
                return ControlFlow::Break(());
            }
            let choice = &mut choices[token.response];
            let was_finished = choice.is_finished();
            match choice.push(token) {
                Ok(delta) => sink.borrow_mut().add(token.response, delta),
                Err(error) => {
                    failed = Some(error);
                    return ControlFlow::Break(());
                }
            }
            open -= usize::from(choice.is_finished() && !was_finished);
            if open == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        // A panic comes from libtorch, which gets no memory for a request of this size. The model is unchanged.
        let ends = StopCheck::when(&is_over);
        let ran = catch_unwind(AssertUnwindSafe(|| generate_until(&self.model, prompts, generation, each, ends)));
        match (ran, failed) {
            (Ok(Ok(_)), None) => {}
            (Ok(Err(_)), _) if is_over() => return Err(ApiError::unavailable("the server stops")),
            (Ok(Ok(_)), Some(error)) | (Ok(Err(error)), _) => return Err(refused(&error)),
            (Err(_), _) => return Err(ApiError::internal("the model failed: is there memory for this request?")),
        }
        if open > 0 && generation.max_new_tokens > 0 && stop_requested() {
            return Err(ApiError::unavailable("the server stops"));
        }
        for (index, choice) in choices.iter_mut().enumerate().filter(|(_, choice)| !choice.is_finished()) {
            sink.borrow_mut().add(index, choice.end());
        }
        let prompt = prompts.iter().map(Vec::len).sum();
        Ok(Usage { prompt, completion: choices.iter().map(|choice| choice.tokens).sum() })
    }

    /// Starts each choice with its prompt, and with the log-probabilities of its tokens if they are requested.
    fn echo(
        &self,
        request: &Request,
        (prompts, texts): (&[Vec<i64>], &[String]),
        sink: &mut Sink<'_>,
    ) -> Result<(), ApiError> {
        for (at, (prompt, text)) in prompts.iter().zip(texts).enumerate() {
            let is_over = || stop_requested() || sink.is_gone();
            if is_over() {
                return Err(ApiError::unavailable("the server stops"));
            }
            let tokens = match request.logprobs {
                None => Vec::new(),
                Some(k) => {
                    let alternatives = catch_unwind(AssertUnwindSafe(|| self.alternatives(prompt, k, &is_over)));
                    let alternatives = alternatives
                        .map_err(|_| ApiError::internal("the model failed: is there memory for this prompt?"))?;
                    if alternatives.is_err() && is_over() {
                        return Err(ApiError::unavailable("the server stops"));
                    }
                    let tokens =
                        alternatives.and_then(|alternatives| prompt_tokens(&self.tokenizer, prompt, &alternatives));
                    tokens.map_err(|error| ApiError::internal(error.to_string()))?
                }
            };
            for index in at * request.n..(at + 1) * request.n {
                sink.add(index, Delta { text: text.clone(), tokens: tokens.clone(), ..Delta::default() });
            }
        }
        Ok(())
    }

    /// Returns the alternatives of all tokens of a prompt but the first; an error if the pass `is_over` before its end.
    fn alternatives(&self, prompt: &[i64], k: usize, is_over: &dyn Fn() -> bool) -> Result<Vec<Alternatives>> {
        if prompt.len() < 2 {
            return Ok(Vec::new());
        }
        let span = 1..prompt.len();
        let prompt = [prompt];
        let batch = Batch::new(&prompt, std::slice::from_ref(&span)).ending_when(is_over);
        Ok(Alternatives::on_host(&self.model.top_logprobs(batch, k)?))
    }
}

/// The destination of the parts of choices.
enum Sink<'f> {
    /// One response with all of them.
    Whole { reply: oneshot::Sender<Result<Reply, ApiError>>, choices: Vec<Delta> },
    /// An event for each.
    Stream { events: Events, form: &'f Form },
}

impl Sink<'_> {
    /// Whether the client is gone.
    fn is_gone(&self) -> bool {
        match self {
            Sink::Whole { reply, .. } => reply.is_closed(),
            Sink::Stream { events, .. } => events.is_closed(),
        }
    }

    /// Adds a part of choice `index`.
    fn add(&mut self, index: usize, part: Delta) {
        match self {
            Sink::Whole { choices, .. } => {
                let choice = &mut choices[index];
                choice.text += &part.text;
                choice.tokens.extend(part.tokens);
                choice.calls.extend(part.calls);
                choice.finish = choice.finish.or(part.finish);
            }
            Sink::Stream { events, form } => {
                for chunk in form.chunks(index, &part) {
                    events.send(&chunk.to_string());
                }
            }
        }
    }
}

/// The error of settings that a request has, with the parameter that is refused first.
fn refused(error: &Error) -> ApiError {
    let message = error.to_string();
    match error.refusals().iter().find_map(Refusal::setting) {
        Some("max_new_tokens") => ApiError::invalid("max_tokens", message),
        Some(name) => ApiError::invalid(name, message),
        None => ApiError::internal(message),
    }
}
