//! Prompts: token ids, text, and the limit on their length.

use super::chat::render;
use super::dataset::Dataset;
use super::dialects::before_question;
use super::row::{expected, field, prompt_field, token_ids};
use super::settings::{LongPrompts, PromptLengthConfig};
use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A prompt to generate responses to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Token ids, at least one.
    pub tokens: Vec<i64>,
    /// Text.
    pub text: String,
    /// The whole row of the dataset.
    pub row: Value,
}

/// The maximum prompt length in tokens, and the treatment of longer prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLimit {
    max_length: usize,
    long: LongPrompts,
    /// Origin of `max_length`, for messages.
    reason: &'static str,
    /// Hint for the error about a longer prompt.
    hint: &'static str,
}

impl PromptLimit {
    /// Limits prompts to `max_length`, the models' context minus the response; a longer prompt is an error.
    pub fn of_context(max_length: usize) -> Self {
        Self { max_length, long: LongPrompts::Error, reason: "the models' context less the response", hint: "" }
    }

    /// Limits prompts to `max_length`, the maximum number of tokens of an encoder, which the response does not share; a longer prompt is an
    /// error.
    pub fn of_encoder(max_length: usize) -> Self {
        Self { reason: "the encoder's limit", ..Self::of_context(max_length) }
    }

    /// The most tokens of a prompt.
    pub fn max_length(&self) -> usize {
        self.max_length
    }

    /// Origin of the limit, for messages.
    pub(crate) fn reason(&self) -> &'static str {
        self.reason
    }

    /// Creates the limit that the settings define, within `model_limit`, the limit of the models.
    ///
    /// # Errors
    /// If `max_prompt_length` is above `model_limit`.
    pub fn new(config: &PromptLengthConfig, model_limit: Self) -> Result<Self> {
        let long = config.long_prompts;
        let hint = "; --long_prompts can drop or truncate such prompts";
        match config.max_prompt_length {
            Some(max_length) if max_length > model_limit.max_length => Err(Error::refused(
                "max_prompt_length",
                format!(" = {max_length}: expected at most {}, {}", model_limit.max_length, model_limit.reason),
            )),
            Some(max_length) => Ok(Self { max_length, long, reason: "max_prompt_length", hint }),
            None => Ok(Self { long, hint, ..model_limit }),
        }
    }

    /// Applies the limit to a prompt that is longer; returns `None` if it is to be dropped. Truncation keeps `prefix` and `suffix`, the
    /// tokens that the tokenizer puts around every prompt. `is_part`: the tokens are those of only a part of the prompt.
    fn shorten(
        &self,
        mut prompt: Prompt,
        (prefix, suffix): (&[i64], &[i64]),
        tokenizer: &Tokenizer,
        is_part: bool,
    ) -> Result<Option<Prompt>> {
        let max_length = self.max_length;
        let length = prompt.tokens.len();
        match self.long {
            LongPrompts::Error => {
                let more = if is_part { "more than " } else { "" };
                return Err(Error::Run(format!(
                    "the prompt is too long: expected at most {max_length} tokens ({}), found {more}{length}{}",
                    self.reason, self.hint
                )));
            }
            LongPrompts::Drop => return Ok(None),
            LongPrompts::TruncateLeft => {
                let keeps_prefix = prompt.tokens.starts_with(prefix) && prefix.len() < max_length;
                let kept = if keeps_prefix { prefix.len() } else { 0 };
                prompt.tokens.drain(kept..kept + length - max_length);
            }
            LongPrompts::TruncateRight => {
                let keeps_suffix = prompt.tokens.ends_with(suffix) && suffix.len() < max_length;
                let kept = if keeps_suffix { suffix.len() } else { 0 };
                prompt.tokens.drain(max_length - kept..length - kept);
            }
        }
        let is_chat = prompt_field(&prompt.row).is_some_and(|(_, prompt)| prompt.is_array());
        prompt.text =
            if is_chat { tokenizer.decode_verbatim(&prompt.tokens)? } else { tokenizer.decode(&prompt.tokens)? };
        Ok(Some(prompt))
    }
}

impl Dataset {
    /// Returns the prompts of all rows. A prompt is the token ids `prompt_ids`, else `prompt`, a string or a list of messages,
    /// else the token ids `input_ids`, else `query`, which has the form of `prompt`.
    ///
    /// # Errors
    /// If a row has none of these fields, its prompt is empty or has more than `max_length` tokens, or an id is not below
    /// `vocab`.
    pub fn prompts(&self, tokenizer: &Tokenizer, vocab: i64, max_length: usize) -> Result<Vec<Prompt>> {
        let limit = if tokenizer.is_of_encoder_decoder() {
            PromptLimit::of_encoder(max_length)
        } else {
            PromptLimit::of_context(max_length)
        };
        Ok(self.prompts_within(tokenizer, vocab, limit)?.0)
    }

    /// [`Dataset::prompts`] with a treatment of long prompts. Also returns a message with the number of prompts that were
    /// dropped or truncated, or that are texts in rows with a separate `system` text, if there are any.
    ///
    /// # Errors
    /// The errors of [`Dataset::prompts`]; if all prompts are dropped.
    pub fn prompts_within(
        &self,
        tokenizer: &Tokenizer,
        vocab: i64,
        limit: PromptLimit,
    ) -> Result<(Vec<Prompt>, Option<String>)> {
        let PromptLimit { max_length, long, reason, .. } = limit;
        let truncates = matches!(long, LongPrompts::TruncateLeft | LongPrompts::TruncateRight);
        let (prefix, suffix) =
            if truncates && tokenizer.knows_text() { tokenizer.around_prompts()? } else { Default::default() };
        let keeps_end = long == LongPrompts::TruncateLeft;
        let prompts = self.map(|row| {
            let (prompt, is_part) = read_prompt_part(row, tokenizer, vocab, Some((max_length, keeps_end)))?;
            if prompt.tokens.is_empty() {
                return Err(Error::Run("the prompt is empty: expected at least one token".into()));
            }
            if prompt.tokens.len() <= max_length {
                return Ok((Some(prompt), false));
            }
            Ok((limit.shorten(prompt, (&prefix, &suffix), tokenizer, is_part)?, true))
        })?;
        let all = prompts.len();
        let too_long = prompts.iter().filter(|(_, long)| *long).count();
        let prompts: Vec<Prompt> = prompts.into_iter().filter_map(|(prompt, _)| prompt).collect();
        if prompts.is_empty() {
            let message = format!("each of {all} prompts has more than {max_length} tokens ({reason})");
            return Err(Error::invalid(&self.name, message));
        }
        let done = if long == LongPrompts::Drop { "dropped" } else { "truncated" };
        let name = self.name.display();
        let note = (too_long > 0).then(|| {
            format!("{name}: {too_long} of {all} prompts were {done}: more than {max_length} tokens ({reason})")
        });
        let notes: Vec<String> = note.into_iter().chain(self.note_on_texts()).chain(self.note_on_media()).collect();
        Ok((prompts, (!notes.is_empty()).then(|| notes.join("; "))))
    }

    /// Returns a message with the number of prompts that are texts and lack the `system` text or the `history` of their rows.
    fn note_on_texts(&self) -> Option<String> {
        let lacks = |row: &&Value| {
            prompt_field(row).is_some_and(|(_, prompt)| prompt.is_string()) && !before_question(row).is_empty()
        };
        let count = self.rows().filter(lacks).count();
        let name = self.name.display();
        (count > 0).then(|| {
            format!(
                "{name}: {count} of the prompts are texts without the `system` text or the `history` of their rows: --apply_chat_template \
                 puts these before them, as messages"
            )
        })
    }
}

/// Returns the prompt of a row, of any length.
pub(super) fn read_prompt(row: &Value, tokenizer: &Tokenizer, vocab: i64) -> Result<Prompt> {
    Ok(read_prompt_part(row, tokenizer, vocab, None)?.0)
}

/// Returns the prompt of a row, and whether it is only a part of the prompt's text: of a text that is far longer than `most` tokens, a part
/// that has more tokens than that, from its beginning or with `true` from its end. Encoding a whole text of 100 MB would take 14 GB.
fn read_prompt_part(
    row: &Value,
    tokenizer: &Tokenizer,
    vocab: i64,
    most: Option<(usize, bool)>,
) -> Result<(Prompt, bool)> {
    let part = |text: &str| -> Result<(String, bool)> {
        let part = most.map_or(Ok(text), |(most, keeps_end)| tokenizer.part_above(text, most, keeps_end))?;
        Ok((part.to_string(), part.len() < text.len()))
    };
    let ids = match (token_ids(row, "prompt_ids", vocab)?, field(row, "prompt")) {
        // With a `prompt`, `input_ids` may be the ids of any text; with a `query` they are the ids of the query.
        (None, None) => token_ids(row, "input_ids", vocab)?,
        (ids, _) => ids,
    };
    let mut is_part = false;
    let (tokens, text) = match (ids, prompt_field(row)) {
        (Some(tokens), Some((_, Value::String(text)))) => (tokens, text.clone()),
        (Some(tokens), _) => {
            let text = tokenizer.decode(&tokens)?;
            (tokens, text)
        }
        (None, Some((name, Value::Array(_)))) => {
            let text;
            (text, is_part) = part(&render(row, tokenizer, &[name], true)?)?;
            (tokenizer.encode_rendered(&text)?, text)
        }
        (None, Some((_, Value::String(whole)))) => {
            let text;
            (text, is_part) = part(whole)?;
            (tokenizer.encode_prompt(&text)?, text)
        }
        (None, Some((name, _))) => return Err(Error::Run(expected(name, "a string or a list of messages", row))),
        (None, None) => {
            let forms = "a string or a list of messages (or token ids: `prompt_ids` or `input_ids`)";
            return Err(Error::Run(expected("prompt", forms, row)));
        }
    };
    Ok((Prompt { tokens, text, row: row.clone() }, is_part))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn of_a_row_that_is_far_too_long_a_limited_tokenizer_encodes_a_part_with_the_same_beginning() {
        let dir = tempfile::tempdir().unwrap();
        let letter = |i: u32| char::from(b'a' + (i % 26) as u8);
        let text: String = (0..60_000).flat_map(|i| [letter(i), letter(i / 26), ' ']).collect();
        let dataset = |name: &str, rows: &[Value]| {
            let path = dir.path().join(name);
            std::fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
            Dataset::read(&path, "train").unwrap()
        };
        let row = |prompt: &str, rest: &str| serde_json::json!({"prompt": prompt, "completion": rest});
        let rows = dataset("rows.jsonl", &[row("ab", "c d"), row(&text, "c d"), row("ab", &text)]);
        let pair = serde_json::json!({"prompt": "ab", "chosen": text, "rejected": "c"});
        let pairs = dataset("pairs.jsonl", &[pair]);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizers/t5");
        let mut tokenizer = Tokenizer::from_pretrained(&folder).unwrap();
        for apart in [false, true] {
            tokenizer.set_encoder_decoder(apart);
            let limited = tokenizer.limited_to(8);
            let (whole, part) =
                (rows.demonstrations(&tokenizer, true).unwrap(), rows.demonstrations(&limited, true).unwrap());
            assert_eq!(whole[0], part[0]);
            for (whole, part) in whole.iter().zip(&part).skip(1) {
                assert_eq!((&whole.tokens[..8], whole.prompt_len.min(8)), (&part.tokens[..8], part.prompt_len.min(8)));
                assert!((9..whole.tokens.len() / 2).contains(&part.tokens.len()), "{apart}: {}", part.tokens.len());
            }
            let completions = dataset("long.jsonl", &[row("ab", &text)]).completions(&limited, 1 << 20, 8);
            assert!(completions.unwrap_err().to_string().contains("too long: expected at most 8 tokens"));
        }
        tokenizer.set_encoder_decoder(false);
        let encode = |tokenizer: &Tokenizer| pairs.pairs(tokenizer, true).unwrap().remove(0);
        let (whole, part) = (encode(&tokenizer), encode(&tokenizer.limited_to(8)));
        assert_eq!((&whole.chosen[..8], &whole.rejected), (&part.chosen[..8], &part.rejected));
        assert!(part.chosen.len() > 8 && part.chosen.len() < whole.chosen.len() / 2);
    }

    #[test]
    fn of_a_prompt_that_is_far_too_long_only_a_part_is_encoded_and_its_ends_are_those_of_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        // Words of two different letters, so that the place of a token shows.
        let letter = |i: u32| char::from(b'a' + (i % 26) as u8);
        let text: String = (0..60_000).flat_map(|i| [letter(i), letter(i / 26), ' ']).collect();
        let text = text.trim_end();
        let rows = format!("{}\n{}\n", serde_json::json!({"prompt": "ab"}), serde_json::json!({ "prompt": text }));
        let path = dir.path().join("long.jsonl");
        std::fs::write(&path, rows).unwrap();
        let dataset = Dataset::read(&path, "train").unwrap();
        for name in ["split", "t5"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizers").join(name);
            let tokenizer = Tokenizer::from_pretrained(&folder).unwrap();
            let whole = tokenizer.encode_prompt(text).unwrap();
            let (prefix, _) = tokenizer.around_prompts().unwrap();
            let prompts = |long| {
                let config = PromptLengthConfig { max_prompt_length: Some(8), long_prompts: long };
                let limit = PromptLimit::new(&config, PromptLimit::of_context(100)).unwrap();
                dataset.prompts_within(&tokenizer, 1 << 20, limit)
            };
            assert_eq!(prompts(LongPrompts::Drop).unwrap().0.len(), 1, "{name}");
            let end = &whole[whole.len() - 8 + prefix.len()..];
            let left = &prompts(LongPrompts::TruncateLeft).unwrap().0[1].tokens;
            assert_eq!(left, &[&prefix, end].concat(), "{name}");
            assert_eq!(prompts(LongPrompts::TruncateRight).unwrap().0[1].tokens, whole[..8], "{name}");
            let error = prompts(LongPrompts::Error).unwrap_err().to_string();
            let words = "expected at most 8 tokens (max_prompt_length), found more than ";
            let found = error.split_once(words).unwrap_or_else(|| panic!("{error}")).1;
            let found: usize = found.split(';').next().unwrap().parse().unwrap();
            assert!(found < whole.len() / 2, "{name}: {found} of {} tokens were encoded", whole.len());
        }
    }

    #[test]
    fn a_prompt_that_is_a_text_beside_a_system_text_is_read_with_a_word() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizers/split");
        let tokenizer = Tokenizer::from_pretrained(&folder).unwrap();
        let note = |rows: &str| {
            let path = dir.path().join("rows.jsonl");
            std::fs::write(&path, rows).unwrap();
            let limit = PromptLimit::of_context(100);
            Dataset::read(&path, "train").unwrap().prompts_within(&tokenizer, 1 << 20, limit).unwrap().1
        };
        let found = note("{\"prompt\": \"a\", \"system\": \"b\"}\n{\"prompt\": \"a\", \"system\": \"\"}\n").unwrap();
        assert!(found.contains("1 of the prompts are texts without the `system` text"), "{found}");
        assert_eq!(note("{\"prompt\": \"a\"}\n"), None);
    }
}
