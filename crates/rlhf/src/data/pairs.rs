//! Preference pairs.

use super::chat::{cut_after_eos, encode_chat};
use super::dataset::Dataset;
use super::row::{check_whole, expected, field, messages_field, text_field};
use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::Value;

/// A preference pair: two texts, one of them preferred.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// Token ids of the preferred text.
    pub chosen: Vec<i64>,
    /// Token ids of the other text.
    pub rejected: Vec<i64>,
    /// Margin of the pairwise loss, if the row has one.
    pub margin: Option<f64>,
}

impl Dataset {
    /// Returns the preference pairs of all rows: `chosen` and `rejected`, each after the `prompt` if there is one.
    ///
    /// All of them are strings, or all are lists of messages. With `append_eos`, EOS is appended to strings; encoders need none,
    /// as they read the score at the first token. Conversations end as the chat template ends them, without whitespace after the
    /// last EOS: PPO responses end with EOS, and scores are read at the last token.
    ///
    /// A number in `margin` is the margin of the pairwise loss.
    ///
    /// # Errors
    /// If a row lacks one of the two, its margin is not a number, the tokenizer has no EOS token, or its chat template fails.
    pub fn pairs(&self, tokenizer: &Tokenizer, append_eos: bool) -> Result<Vec<Pair>> {
        self.map(|row| read_pair(row, tokenizer, append_eos))
    }
}

/// Returns true if a row is a preference pair and has no field of another form.
pub(super) fn is_pair(row: &Value) -> bool {
    let is_set = |name: &&str| field(row, name).is_some();
    let others = ["completion", "completion_ids", "response", "text", "input_ids"];
    ["chosen", "rejected"].iter().all(is_set) && !others.iter().any(is_set) && messages_field(row).is_none()
}

/// Returns the preference pair of a row; see [`Dataset::pairs`].
pub(super) fn read_pair(row: &Value, tokenizer: &Tokenizer, append_eos: bool) -> Result<Pair> {
    let has_prompt = field(row, "prompt").is_some();
    let side = |name| -> Result<Vec<i64>> {
        if let Some(Value::Array(_)) = field(row, name) {
            let fields = if has_prompt { &["prompt", name][..] } else { &[name] };
            cut_after_eos(encode_chat(row, tokenizer, fields, false)?.1, tokenizer)
        } else {
            let prompt = if has_prompt { text_field(row, "prompt")? } else { "" };
            let text = text_field(row, name)?;
            if !has_prompt {
                check_whole(row, text)?;
            }
            let encoded =
                if append_eos { tokenizer.encode_pair(prompt, text) } else { tokenizer.encode_open_pair(prompt, text) };
            Ok(encoded?.0)
        }
    };
    let number = |margin: &Value| margin.as_f64().ok_or_else(|| Error::Run(expected("margin", "a number", row)));
    let margin = field(row, "margin").map(number).transpose()?;
    Ok(Pair { chosen: side("chosen")?, rejected: side("rejected")?, margin })
}
