//! What scores responses: a reward model, which may read text by a tokenizer of its own.

use crate::generate::Response;
use crate::model::{ModelOptions, SequenceClassifier};
use crate::rollout::score;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use std::path::Path;
use tch::Tensor;

/// A reward model for the responses of a policy.
#[derive(Debug)]
pub struct RewardModel {
    model: SequenceClassifier,
    /// Its own tokenizer, where it reads other ids than the policy.
    tokenizer: Option<Tokenizer>,
}

impl RewardModel {
    /// Reads the reward model in `dir` for a policy whose tokenizer is `policy`.
    ///
    /// A folder with another tokenizer than the policy's keeps it: then the model reads the decoded text, without special
    /// tokens, the last part of it where it is longer than the model's context; an encoder always does. `label` is that of
    /// [`SequenceClassifier::choose_label`], `new_head` that of [`SequenceClassifier::from_pretrained`].
    ///
    /// # Errors
    /// As these two; if an encoder has no tokenizer, or a tokenizer does not fit its model.
    pub fn from_pretrained(
        dir: &Path,
        label: Option<&str>,
        new_head: Option<u64>,
        policy: &Tokenizer,
        options: ModelOptions,
    ) -> Result<Self> {
        let mut model = SequenceClassifier::from_pretrained(dir, new_head, options)?;
        model.choose_label(label, dir)?;
        let mut tokenizer = None;
        if dir.join("tokenizer.json").is_file() || !model.config().causal {
            let own = Tokenizer::from_pretrained(dir)?;
            tokenizer = (!model.config().causal || policy.difference(&own) > 0).then_some(own);
        }
        if let Some(tokenizer) = &mut tokenizer {
            tokenizer.check_fits(model.config(), dir)?;
            // Room for the end token that a decoder reads last.
            let room = model.config().max_position_embeddings - usize::from(model.config().causal);
            tokenizer.keep_last(room)?;
        }
        Ok(Self { model, tokenizer })
    }

    /// A model that reads the policy's ids.
    pub fn new(model: SequenceClassifier) -> Self {
        Self { model, tokenizer: None }
    }

    /// The model.
    pub fn model(&self) -> &SequenceClassifier {
        &self.model
    }

    /// Whether the model reads the decoded text by its own tokenizer, and not the policy's ids.
    pub fn reads_text(&self) -> bool {
        self.tokenizer.is_some()
    }

    /// Scores of prompts with their responses: `[B]` f32. `policy` is the tokenizer that the ids are of.
    ///
    /// # Errors
    /// If a sequence does not fit the model, or a score is not finite.
    pub fn score(
        &self,
        prompts: &[Vec<i64>],
        responses: &[Response],
        policy: &Tokenizer,
        batch_size: usize,
    ) -> Result<Tensor> {
        let pairs = prompts.iter().zip(responses);
        let joined = pairs.map(|(prompt, response)| [prompt.as_slice(), &response.tokens].concat());
        let sequences: Vec<Vec<i64>> = match &self.tokenizer {
            None => joined.collect(),
            Some(own) => joined.map(|ids| self.translate(&ids, policy, own)).collect::<Result<_>>()?,
        };
        score(&self.model, &sequences, batch_size)
    }

    /// The ids by which this model reads the policy's `ids`.
    fn translate(&self, ids: &[i64], policy: &Tokenizer, own: &Tokenizer) -> Result<Vec<i64>> {
        let mut translated = own.encode(&policy.decode(ids)?)?;
        // A decoder was trained to score at the end token, where the text has one.
        let ended = ids.last().is_some_and(|id| policy.eos_ids().contains(id));
        if let (true, true, Some(eos)) = (self.model.config().causal, ended, own.eos())
            && translated.last() != Some(&eos)
        {
            translated.push(eos);
        }
        if translated.is_empty() {
            return Err(Error::Run(
                "reward model: the text of a response is empty, and its tokenizer adds nothing".into(),
            ));
        }
        Ok(translated)
    }
}
