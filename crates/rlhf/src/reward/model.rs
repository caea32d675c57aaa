//! A reward model, which may read text by a tokenizer and a chat template of its own.

use super::{Reward, RewardInput, Score};
use crate::data::{cut_after_eos, encode_chat, prompt_field};
use crate::generate::FinishReason;
use crate::model::{ModelOptions, SequenceClassifier, in_batches};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A reward model for the responses of a policy.
#[derive(Debug)]
pub struct RewardModel {
    model: SequenceClassifier,
    dir: PathBuf,
    batch_size: usize,
    /// Its own tokenizer, where it differs from the policy's.
    own: Option<Own>,
}

/// How a model reads what the policy's tokens say.
#[derive(Debug)]
struct Own {
    tokenizer: Tokenizer,
    policy: Tokenizer,
    /// Whether its ids are others than the policy's; else its chat template alone is.
    other_ids: bool,
}

impl RewardModel {
    /// Reads the reward model in `dir` for a policy whose tokenizer is `policy`; it takes `batch_size` sequences at a time.
    ///
    /// A folder with another tokenizer than the policy's keeps it: then the model reads the decoded text, without special
    /// tokens, the last part of it where it is longer than the model's context; an encoder always does. Where the prompt
    /// is a conversation and the model has a chat template of its own, that template renders prompt and response. `label`
    /// is that of [`SequenceClassifier::choose_label`], `new_head` that of [`SequenceClassifier::from_pretrained`].
    ///
    /// # Errors
    /// As these two; if an encoder has no tokenizer, or a tokenizer does not fit its model.
    pub fn from_pretrained(
        dir: &Path,
        label: Option<&str>,
        new_head: Option<u64>,
        policy: &Tokenizer,
        batch_size: usize,
        options: ModelOptions,
    ) -> Result<Self> {
        let mut model = SequenceClassifier::from_pretrained(dir, new_head, options)?;
        model.choose_label(label, dir)?;
        model.hold_as_computed();
        let mut own = None;
        if Tokenizer::is_in(dir)? || !model.config().causal {
            let mut tokenizer = Tokenizer::from_pretrained(dir)?;
            let other_ids = !model.config().causal || policy.difference(&tokenizer) > 0;
            if other_ids || tokenizer.has_other_chat_template(policy) {
                tokenizer.check_fits(model.config(), dir)?;
                // Room for the end token that a decoder reads last.
                let room = model.config().max_position_embeddings - usize::from(model.config().causal);
                tokenizer.keep_last(room)?;
                own = Some(Own { tokenizer, policy: policy.clone(), other_ids });
            }
        }
        Ok(Self { model, dir: dir.to_path_buf(), batch_size, own })
    }

    /// The model.
    pub fn classifier(&self) -> &SequenceClassifier {
        &self.model
    }

    /// The folder that it was read from.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether the model reads the decoded text by its own tokenizer, and not the policy's ids.
    pub fn reads_text(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.other_ids)
    }

    /// Whether a value model can begin as this one: it reads the policy's ids, and says one number.
    pub fn can_be_value_model(&self) -> bool {
        !self.reads_text() && self.model.labels().len() == 1
    }

    /// The field of `row` with a conversation that this model reads by a chat template of its own.
    pub(crate) fn conversation(&self, row: &Value) -> Option<&'static str> {
        let renders = self.own.as_ref().is_some_and(|own| own.tokenizer.has_chat_template());
        let (name, prompt) = prompt_field(row)?;
        (renders && prompt.is_array()).then_some(name)
    }

    /// The ids by which this model reads a prompt with its response.
    fn sequence(&self, input: &RewardInput<'_>) -> Result<Vec<i64>> {
        let ids = [input.prompt_ids, input.response_ids].concat();
        let Some(own) = &self.own else { return Ok(ids) };
        let read = if let Some(field) = self.conversation(input.row) {
            own.render(input, field)?
        } else if own.other_ids {
            self.translate(&ids, own)?
        } else {
            ids
        };
        if read.is_empty() {
            return Err(Error::Run("the text of a response is empty, and the tokenizer adds nothing".into()));
        }
        Ok(read)
    }

    /// The ids of the text that the policy's `ids` say.
    fn translate(&self, ids: &[i64], own: &Own) -> Result<Vec<i64>> {
        let text = own.policy.decode(ids)?;
        // An encoder reads what its tokenizer puts around every text; a decoder was trained to score at the end token, where
        // the text has one.
        if !self.model.config().causal {
            return own.tokenizer.encode(&text);
        }
        let mut translated = own.tokenizer.encode_prompt(&text)?;
        let ended = ids.last().is_some_and(|id| own.policy.eos_ids().contains(id));
        if let (true, Some(eos)) = (ended, own.tokenizer.eos())
            && translated.last() != Some(&eos)
        {
            translated.push(eos);
        }
        Ok(translated)
    }
}

impl Own {
    /// The conversation in `field` of the row, with the response as the assistant's message, as `rlhf reward` reads a side of a
    /// pair. Of a response that was cut off the text ends behind its last token: what would close the message would tell the
    /// model that it is finished.
    fn render(&self, input: &RewardInput<'_>, field: &str) -> Result<Vec<i64>> {
        let mut row: Value = input.row.clone();
        let cut = input.finish == FinishReason::Length;
        let said = if cut { format!("{}{CUT}", input.response) } else { input.response.to_string() };
        row["completion"] = json!([{"role": "assistant", "content": said}]);
        let (text, ids) = encode_chat(&row, &self.tokenizer, &[field, "completion"], false)?;
        match text.rfind(CUT).filter(|_| cut) {
            Some(end) => self.tokenizer.encode_verbatim(&text[..end]),
            None => cut_after_eos(ids, &self.tokenizer),
        }
    }
}

/// Stands behind a response that was cut off while it is rendered: a character that means nothing, twice.
const CUT: &str = "\u{fdd0}\u{fdd1}";

impl Reward for RewardModel {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let sequences: Vec<Vec<i64>> = batch.iter().map(|input| self.sequence(input)).collect::<Result<_>>()?;
        let scores =
            tch::no_grad(|| in_batches(sequences.len(), self.batch_size, |rows| self.model.scores(&sequences[rows])))?;
        Ok(Vec::<f32>::try_from(&scores)?.into_iter().map(|score| Score::Response(f64::from(score))).collect())
    }

    fn model(&self) -> Option<&RewardModel> {
        Some(self)
    }
}
