//! A reward that is a model, optionally with another tokenizer and chat template than the policy.

use super::{Reward, RewardInput, Score};
use crate::data::{cut_after_eos, encode_chat, prompt_field};
use rlhf_base::{Error, Result};
use rlhf_lm::generate::FinishReason;
use rlhf_lm::model::{ModelOptions, SequenceClassifier, in_batches};
use rlhf_lm::tokenizer::{Tokenizer, message_text};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A reward model that scores the responses of a policy.
#[derive(Debug)]
pub struct RewardModel {
    model: SequenceClassifier,
    dir: PathBuf,
    batch_size: usize,
    /// The model's tokenizer, if it differs from the policy's.
    other: Option<OtherTokenizer>,
    /// Whether prompt and response are two segments.
    reads_pairs: bool,
}

/// The tokenizer of a reward model that differs from the policy's.
#[derive(Debug)]
struct OtherTokenizer {
    tokenizer: Tokenizer,
    policy: Tokenizer,
    /// Whether its token ids differ; otherwise only its chat template does.
    other_ids: bool,
}

impl RewardModel {
    /// Loads the reward model in `dir` for a policy with the tokenizer `policy`. The model scores `batch_size` sequences at a
    /// time.
    ///
    /// A decoder with the policy's tokenizer, or without one, reads the policy's token ids. With another tokenizer, and for
    /// every encoder, the model reads the decoded text without special tokens; a text longer than its context is truncated on
    /// the left. If the prompt is a conversation and the model has its own chat template, that template renders prompt and
    /// response. If the policy is an encoder-decoder every reward model reads text: the prompt's text followed by the response's. `label`
    /// is passed to [`SequenceClassifier::choose_label`], `new_head` to [`SequenceClassifier::from_pretrained`].
    ///
    /// # Errors
    /// The errors of these two; if an encoder has no tokenizer, or a tokenizer does not fit its model.
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
        let mut other = None;
        let whole = reads_whole(&model);
        if Tokenizer::is_in(dir)? || whole || policy.is_of_encoder_decoder() {
            let mut tokenizer = policy.beside(dir)?;
            tokenizer.set_encoder_decoder(false);
            let apart = policy.is_of_encoder_decoder();
            let other_ids = apart || whole || policy.difference(&tokenizer) > 0;
            if other_ids || tokenizer.has_other_chat_template(policy) {
                tokenizer.check_fits(model.config(), dir)?;
                // One token is left free for decoders, which get an EOS.
                let max_length = model.config().max_position_embeddings - usize::from(!whole);
                tokenizer.keep_last(max_length)?;
                other = Some(OtherTokenizer { tokenizer, policy: policy.clone(), other_ids });
            }
        }
        Ok(Self { model, dir: dir.to_path_buf(), batch_size, other, reads_pairs: false })
    }

    /// Makes the model read prompt and response as the two segments of its tokenizer's pairs, `[CLS] prompt [SEP] response [SEP]`,
    /// and not as one text. A prompt that is a conversation is the contents of its messages, one after another.
    ///
    /// # Errors
    /// If the model is a decoder, or distinguishes the segments by token types (BERT).
    pub fn read_pairs(&mut self) -> Result<()> {
        let config = self.model.config();
        let wrong = |found: &str| {
            let message = format!("reward_pair = true: expected an encoder with at most one token type, found {found}");
            Err(Error::invalid(&self.dir, message))
        };
        match (config.causal, config.token_types) {
            (true, _) => return wrong(&format!("`{}`, a decoder", config.family.name)),
            (false, 2..) => return wrong(&format!("`{}` with {}", config.family.name, config.token_types)),
            (false, _) => {}
        }
        self.reads_pairs = true;
        Ok(())
    }

    /// The sequence classifier.
    pub fn classifier(&self) -> &SequenceClassifier {
        &self.model
    }

    /// The folder that the model was loaded from.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns true if the model reads decoded text with its own tokenizer, rather than the policy's token ids.
    pub fn reads_text(&self) -> bool {
        self.other.as_ref().is_some_and(|other| other.other_ids)
    }

    /// Returns true if a value model can be initialized from it: it reads the policy's token ids and has a single output.
    pub fn can_be_value_model(&self) -> bool {
        !self.reads_text() && self.model.labels().len() == 1
    }

    /// Returns the field of `row` with a conversation that this model's own chat template renders.
    pub(crate) fn conversation(&self, row: &Value) -> Option<&'static str> {
        let renders = self.other.as_ref().is_some_and(|other| other.tokenizer.has_chat_template());
        let (name, prompt) = prompt_field(row)?;
        (renders && prompt.is_array()).then_some(name)
    }

    /// Returns the token ids of a prompt and its response for this model.
    fn sequence(&self, input: &RewardInput<'_>) -> Result<Vec<i64>> {
        let ids = [input.prompt_ids, input.response_ids].concat();
        let Some(other) = &self.other else { return Ok(ids) };
        let sequence = if self.reads_pairs {
            other.pair(input)?
        } else if let Some(field) = self.conversation(input.row) {
            other.render(input, field)?
        } else if other.other_ids {
            self.translate(input, &ids, other)?
        } else {
            ids
        };
        if sequence.is_empty() {
            return Err(Error::Run("the text of a response is empty, and the tokenizer adds nothing".into()));
        }
        Ok(sequence)
    }

    /// Decodes the policy's `ids` and encodes the text with this model's tokenizer.
    fn translate(&self, input: &RewardInput<'_>, ids: &[i64], other: &OtherTokenizer) -> Result<Vec<i64>> {
        // Prompt and response of an encoder-decoder each end with an eos; they are joined like the texts of a preference pair.
        let text = if other.policy.is_of_encoder_decoder() {
            format!("{}{}", input.prompt, input.response)
        } else {
            other.policy.decode(ids)?
        };
        // An encoder needs the special tokens of its tokenizer. A decoder was trained to score at EOS if the text has one.
        if reads_whole(&self.model) {
            return other.tokenizer.encode(&text);
        }
        let mut translated = other.tokenizer.encode_prompt(&text)?;
        let ended = ids.last().is_some_and(|id| other.policy.eos_ids().contains(id));
        if let (true, Some(eos)) = (ended, other.tokenizer.eos())
            && translated.last() != Some(&eos)
        {
            translated.push(eos);
        }
        Ok(translated)
    }
}

/// Returns true if the model needs the special tokens of its own tokenizer: it has an encoder.
fn reads_whole(model: &SequenceClassifier) -> bool {
    !model.config().causal || model.config().is_encoder_decoder()
}

impl OtherTokenizer {
    /// Encodes prompt and response as two segments.
    fn pair(&self, input: &RewardInput<'_>) -> Result<Vec<i64>> {
        let messages = prompt_field(input.row).and_then(|(_, prompt)| prompt.as_array());
        let prompt = match messages {
            Some(messages) => {
                let contents = messages.iter().filter_map(|message| message_text(&message["content"]));
                contents.collect::<Vec<_>>().join("\n")
            }
            None => self.policy.decode(input.prompt_ids)?,
        };
        self.tokenizer.encode_segments(&prompt, input.response)
    }

    /// Renders the conversation in `field` of the row with the response as the assistant's message, as `rlhf reward` renders
    /// preference pairs. For a response that was cut off, the text ends after its last token: the end of the message would
    /// mark it as finished.
    fn render(&self, input: &RewardInput<'_>, field: &str) -> Result<Vec<i64>> {
        let mut row: Value = input.row.clone();
        let cut = input.finish == FinishReason::Length;
        let content = if cut { format!("{}{CUT}", input.response) } else { input.response.to_string() };
        row["completion"] = json!([{"role": "assistant", "content": content}]);
        if let Some(episode) = input.episode {
            row["completion"] = episode.messages.clone().into();
        }
        let (text, ids) = encode_chat(&row, &self.tokenizer, &[field, "completion"], false)?;
        match text.rfind(CUT).filter(|_| cut) {
            Some(end) => self.tokenizer.encode_verbatim(&text[..end]),
            None => cut_after_eos(ids, &self.tokenizer),
        }
    }
}

/// Marks the end of a response that was cut off, while it is rendered: two Unicode noncharacters.
const CUT: &str = "\u{fdd0}\u{fdd1}";

impl Reward for RewardModel {
    fn score(&mut self, batch: &[RewardInput<'_>]) -> Result<Vec<Score>> {
        let sequences: Vec<Vec<i64>> = batch.iter().map(|input| self.sequence(input)).collect::<Result<_>>()?;
        let _loaded = self.model.loaded()?;
        let scores = tch::no_grad(|| {
            in_batches(sequences.len(), self.batch_size, self.model.device(), |rows| {
                self.model.scores(&sequences[rows])
            })
        })?;
        Ok(Vec::<f32>::try_from(&scores)?.into_iter().map(|score| Score::Response(f64::from(score))).collect())
    }

    fn model(&self) -> Option<&RewardModel> {
        Some(self)
    }
}
