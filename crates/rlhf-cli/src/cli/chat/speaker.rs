//! A model in a conversation.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use rlhf::generate::{FinishReason, GenerationConfig, Token, generate_with};
use rlhf::model::CausalLm;
use rlhf::settings::{ChatConfig, GenerateConfig};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use serde_json::{Map, Value, json};

use super::output::show;

/// A model with its part of the conversation.
pub(super) struct Speaker {
    /// The folder or hub name that the user gave.
    pub(super) path: PathBuf,
    pub(super) label: String,
    pub(super) dir: PathBuf,
    pub(super) model: CausalLm,
    pub(super) tokenizer: Tokenizer,
    /// Messages, each with its response.
    pub(super) turns: Vec<(String, String)>,
}

impl Speaker {
    /// Returns the tokens of the conversation up to `message`: by the chat template, else as one text.
    pub(super) fn prompt(&self, system: Option<&str>, message: &str) -> Result<Vec<i64>> {
        if !self.tokenizer.has_chat_template() {
            let before: String =
                self.turns.iter().map(|(message, response)| format!("{message}{response}\n")).collect();
            return self.tokenizer.encode_prompt(&(before + message));
        }
        let mut messages: Vec<Value> = system.map(|text| said("system", text)).into_iter().collect();
        for (message, response) in &self.turns {
            messages.extend([said("user", message), said("assistant", response)]);
        }
        messages.push(said("user", message));
        Ok(self.tokenizer.encode_chat(&messages, true, &Map::new())?.1)
    }

    /// Returns a note if fields of the model's `generation_config.json` would change responses in transformers and not here.
    pub(super) fn note(&self, config: &ChatConfig) -> Result<Option<String>> {
        let settings = GenerateConfig { model_name_or_path: self.path.clone(), ..config.generate() };
        settings.note_for_model(self.model.config(), &self.dir)
    }

    /// Returns the settings of the response to a prompt of `len` tokens, which is `alone` if no response is before it.
    pub(super) fn generation(&self, config: &ChatConfig, len: usize, alone: bool) -> Result<GenerationConfig> {
        let context = self.model.config().max_position_embeddings;
        let remaining = self.model.config().max_new_tokens(len);
        if remaining == 0 && alone {
            let label = &self.label;
            return Err(Error::Run(format!(
                "the message has {len} tokens with all that is before it, and the context of {label} is {context}, response included: \
                 send a shorter one"
            )));
        }
        if remaining == 0 {
            return Err(Error::Run(format!(
                "the conversation has {len} tokens, and the context of {} is {context}: /reset starts a new one",
                self.label
            )));
        }
        let mut settings = config.generate();
        settings.responses.max_new_tokens = Some(config.max_new_tokens.min(remaining));
        Ok(settings.for_model(&self.model, &self.tokenizer, &self.dir)?.0)
    }

    /// Generates the response to `prompt`, and shows its text as it is generated, until `stop` is set. Returns the text, and the reason
    /// that it ended.
    pub(super) fn respond(
        &self,
        prompt: &[i64],
        generation: &GenerationConfig,
        stop: &AtomicBool,
    ) -> Result<(String, Option<FinishReason>)> {
        let mut stream = self.tokenizer.stream(prompt);
        let mut text = String::new();
        let mut each = |token: &Token| {
            let mut part = stream.push(token.id)?;
            if token.finish.is_some() {
                part += &stream.finish()?;
            }
            text += &part;
            show(&part)
        };
        let (_, finish) = self.sample(prompt, generation, stop, &mut each)?;
        Ok((text, finish))
    }

    /// Samples the response to `prompt`, and passes each token to `each`, until `stop` is set. Returns the tokens, and the reason that they
    /// ended.
    pub(super) fn sample(
        &self,
        prompt: &[i64],
        generation: &GenerationConfig,
        stop: &AtomicBool,
        each: &mut dyn FnMut(&Token) -> Result<()>,
    ) -> Result<(Vec<i64>, Option<FinishReason>)> {
        let mut tokens = Vec::new();
        let mut finish = None;
        let mut shown: Result<()> = Ok(());
        let each = |token: &Token| {
            tokens.push(token.id);
            finish = token.finish;
            shown = each(token);
            if shown.is_err() || stop.load(Ordering::SeqCst) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        generate_with(&self.model, &[prompt], generation, each)?;
        shown?;
        Ok((tokens, finish))
    }
}

/// A message.
pub(super) fn said(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}
