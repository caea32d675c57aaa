//! Sequence classifiers: reward models and value models.

use super::ModelOptions;
use super::adapter_folder::AdapterFolder;
use super::batch::{Batch, shared_lens};
use super::body::Body;
use super::config::ModelConfig;
use super::decoder::Decoder;
use super::linear::{Linear, LinearShape, Norm};
use super::lora::{DropoutRows, is_in_head};
use super::lora_config::LoraConfig;
use super::params::{Builder, DEEPSPEED_CHAT, Init, Source};
use super::pretrained::sealed::Sealed;
use super::pretrained::{ModelHead, PretrainedModel};
use super::shape::{Family, HeadActivation, HeadNames, Pooling};
use rlhf_base::schema::Choices;
use rlhf_base::weights::Checkpoint;
use rlhf_base::{Error, Result};
use serde::Serialize;
use std::ops::Range;
use std::path::Path;
use tch::{Kind, Tensor};

/// Names of known linear heads: those of transformers and DeepSpeed-Chat.
pub(super) const SCORE_HEADS: [&str; 2] = ["score.weight", "v_head.weight"];

/// Name of the head of older reward models of OpenRLHF; newer ones use transformers' name.
const OPENRLHF_HEAD: &str = "value_head.weight";

/// Names of the head of LLaMA-Factory's reward models, and of TRL's value heads.
const SUMMARY: [&str; 2] = ["v_head.summary.weight", "v_head.summary.bias"];

/// LLaMA-Factory's file of the head, beside a language model or an adapter.
const SUMMARY_FILE: &str = "value_head.safetensors";

/// Names of tensors in folders of encoders that no classifier has: heads of masked language models and of pre-training, and the layer
/// over RoBERTa's first token.
const MASKED_LM_HEADS: [&str; 10] = [
    "cls.",
    "lm_head.",
    "decoder.",
    "lm_predictions.",
    "mask_predictions.",
    "vocab_transform.",
    "vocab_layer_norm.",
    "vocab_projector.",
    "pooler.",
    "roberta.pooler.",
];

/// Tensor names of a decoder with a score head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Choices)]
#[serde(rename_all = "kebab-case")]
#[choice(rename_all = "kebab-case")]
pub enum ClassifierFormat {
    /// Names of transformers' `...ForSequenceClassification`: `score.weight`.
    #[default]
    Transformers,
    /// DeepSpeed-Chat's names: `v_head.weight`, and `rwtransformer.` before the names of the model without its head.
    DeepspeedChat,
}

/// A sequence classifier: a reward model or a value model. A decoder has a score per position, an encoder scores per sequence. An
/// encoder-decoder has both: see [`SequenceClassifier::logits`] and [`SequenceClassifier::values_at`].
///
/// ```no_run
/// use rlhf_lm::model::{ModelOptions, SequenceClassifier};
/// # fn main() -> rlhf_base::Result<()> {
/// let reward = SequenceClassifier::from_pretrained("runs/reward".as_ref(), None, ModelOptions::default())?;
/// let scores = reward.scores(&[vec![5, 6, 7], vec![8, 9]])?;
/// assert_eq!(scores.size(), [2]);
/// # Ok(())
/// # }
/// ```
pub type SequenceClassifier = PretrainedModel<ClassifierHead>;

/// The head of a sequence classifier: hidden states to a logit per label, of which the score is chosen.
#[derive(Debug)]
pub struct ClassifierHead {
    layers: Head,
    labels: Vec<String>,
    chosen: Label,
    new_head: bool,
    /// The newly initialized layers of a new head, before its last layer: those that the folder lacks.
    drawn: Vec<String>,
    format: ClassifierFormat,
    /// Whether the head is named as in [`SUMMARY`]; the model is then saved in the form of a language model.
    is_summary: bool,
}

impl Sealed for ClassifierHead {}

impl ModelHead for ClassifierHead {
    fn adapted(&mut self) -> Option<&mut Linear> {
        self.layers.inner()
    }

    fn saved_config(&self, config: &ModelConfig, eos: Option<i64>, pad: Option<i64>) -> ModelConfig {
        match self.format {
            ClassifierFormat::Transformers if self.is_summary => config.for_causal_lm(eos, pad),
            ClassifierFormat::Transformers => config.for_sequence_classifier(&self.labels, eos, pad),
            ClassifierFormat::DeepspeedChat => config.for_causal_lm(eos, pad),
        }
    }

    fn stored_name(&self, family: &Family, name: &str) -> Option<String> {
        match self.format {
            ClassifierFormat::Transformers => None,
            ClassifierFormat::DeepspeedChat => {
                name.strip_prefix(family.names.prefix).map(|rest| format!("{DEEPSPEED_CHAT}{rest}"))
            }
        }
    }
}

/// The layers of a classifier's head.
#[derive(Debug)]
pub(super) enum Head {
    /// A linear head, applied at any position.
    Score(Linear),
    /// A two-layer head, applied at the first token or to the mean over the tokens.
    Dense { inner: Linear, activation: HeadActivation, norm: Option<Norm>, out: Box<Linear> },
}

/// A linear head of another program.
enum ForeignHead<'a> {
    /// OpenRLHF's; it becomes transformers' `score`.
    OpenRlhf(&'a Checkpoint),
    /// LLaMA-Factory's or TRL's, in the model's files.
    Summary(&'a Checkpoint),
    /// LLaMA-Factory's, in a file of its own.
    SummaryFile(Checkpoint),
}

impl<'a> ForeignHead<'a> {
    /// The head in the folder `dir`, whose weights are `checkpoint`.
    fn find(dir: &Path, checkpoint: &'a Checkpoint) -> Result<Option<Self>> {
        let file = dir.join(SUMMARY_FILE);
        Ok(if checkpoint.shape(OPENRLHF_HEAD).is_some() {
            Some(Self::OpenRlhf(checkpoint))
        } else if checkpoint.shape(SUMMARY[0]).is_some() {
            Some(Self::Summary(checkpoint))
        } else if file.is_file() {
            Some(Self::SummaryFile(Checkpoint::open_file(&file)?))
        } else {
            None
        })
    }

    fn checkpoint(&self) -> &Checkpoint {
        match self {
            Self::OpenRlhf(checkpoint) | Self::Summary(checkpoint) => checkpoint,
            Self::SummaryFile(checkpoint) => checkpoint,
        }
    }

    fn is_summary(&self) -> bool {
        !matches!(self, Self::OpenRlhf(_))
    }

    /// The names of the weight and of the bias in the files.
    fn names(&self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::OpenRlhf(_) => (OPENRLHF_HEAD, None),
            Self::Summary(_) | Self::SummaryFile(_) => (SUMMARY[0], Some(SUMMARY[1])),
        }
    }

    /// Checks that the head has one label and the width of the model.
    fn check(&self, config: &ModelConfig) -> Result<()> {
        let (weight, bias) = self.names();
        let expected = [(Some(weight), vec![1, config.embedding_size]), (bias, vec![1])];
        for (name, expected) in expected.into_iter().filter_map(|(name, shape)| Some((name?, shape))) {
            let found = self.checkpoint().shape(name);
            if found.as_ref() != Some(&expected) {
                let found = found.map_or("none".into(), |found| format!("{found:?}"));
                let message = format!("tensor `{name}`: expected {expected:?}, found {found}");
                return Err(Error::invalid(self.checkpoint().dir(), message));
            }
        }
        Ok(())
    }

    fn read(&self, builder: &mut Builder<'_>) -> Result<Head> {
        let checkpoint = self.checkpoint();
        let (weight, bias) = self.names();
        let saved = if self.is_summary() { weight } else { SCORE_HEADS[0] };
        let mut tensor = |stored: &str, saved: &str| {
            builder.allow(stored);
            builder.read_with(saved.into(), |device, kind| checkpoint.read(stored, device, kind))
        };
        let weight = tensor(weight, saved)?;
        let bias = bias.map(|bias| tensor(bias, bias)).transpose()?;
        Ok(Head::Score(Linear::new(weight, bias, Kind::Float)))
    }
}

/// The labels whose logits make the score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    One(i64),
    /// The first minus the second.
    Difference(i64, i64),
}

impl SequenceClassifier {
    /// Loads a folder with a sequence classifier, also in DeepSpeed-Chat's format (`v_head.weight`), in OpenRLHF's (`value_head.weight`) and in
    /// LLaMA-Factory's (`v_head.summary` in `value_head.safetensors`). The model is frozen until [`SequenceClassifier::set_trainable`].
    ///
    /// With `new_head: Some(seed)` the folder may contain a language model, or an encoder without a head: its body is loaded, and a
    /// head with one label is initialized. For an encoder, only the layers of the head that the folder lacks are initialized. The head of
    /// an encoder-decoder has two layers and is initialized as in transformers' class.
    ///
    /// If the folder holds a PEFT adapter and no model, loads the adapter's base and adds the adapter to it, with the head
    /// that was trained beside it; with `new_head` the adapter may be a language model's.
    ///
    /// # Errors
    /// As [`super::CausalLm::from_pretrained`]; if the folder contains a language model and `new_head` is `None`.
    pub fn from_pretrained(dir: &Path, new_head: Option<u64>, options: ModelOptions) -> Result<Self> {
        if let Some(folder) = AdapterFolder::find(dir)? {
            if dir.join(SUMMARY_FILE).is_file() {
                let message = "expected a model, found a head of LLaMA-Factory beside an adapter: merge the two there \
                               (`llamafactory-cli export`), which writes both into one folder";
                return Err(Error::invalid(dir.join(SUMMARY_FILE), message));
            }
            if new_head.is_none() {
                folder.check_task(true)?;
            }
            let has_head = folder.holds_head()?;
            let mut model = Self::from_pretrained(&folder.base_dir()?, new_head.or(has_head.then_some(0)), options)?;
            if has_head {
                folder.check_holds(&std::mem::take(&mut model.head.drawn))?;
            }
            model.put_adapter(&folder)?;
            model.head.new_head &= !has_head;
            return Ok(model);
        }
        let config = ModelConfig::from_dir(dir)?.into_classifier();
        config.check_classifier_code(dir)?;
        if !config.is_sequence_classifier() && !dir.join("model.safetensors").is_file() {
            check_pickle(dir)?;
        }
        let checkpoint = Checkpoint::open(dir)?;
        config.check_rewards(dir)?;
        let source = Source::Checkpoint(&checkpoint);
        let names = &config.family.names;
        let (weight_kind, compute) = options.kinds(source);
        let mut builder = Builder::new(source, names, options.device, options.dtype.kind());
        builder.set_tied(config.tie_word_embeddings);
        builder.quantize_to(options.quantization);
        let decoder = Decoder::new(&config, &mut builder, compute)?;
        builder.quantize_to(None);
        let name = builder.first_stored(&SCORE_HEADS);
        let scores = match names.head {
            HeadNames::Score => name.to_string(),
            HeadNames::Dense { .. } => names.head.scores(),
        };
        let foreign = match names.head {
            HeadNames::Score if checkpoint.shape(&scores).is_none() => ForeignHead::find(dir, &checkpoint)?,
            HeadNames::Score | HeadNames::Dense { .. } => None,
        };
        if let Some(foreign) = &foreign {
            foreign.check(&config)?;
        }
        // A stored head is kept: `new_head` is for folders without one.
        let new_head = new_head.filter(|_| checkpoint.shape(&scores).is_none() && foreign.is_none());
        let one = || vec!["LABEL_0".to_string()];
        // A model that is no classifier of transformers has transformers' default labels, which say nothing about its head.
        let has_one = !config.is_sequence_classifier() && checkpoint.shape(&scores).is_some_and(|shape| shape[0] == 1);
        let has_one = has_one || new_head.is_some() || name == SCORE_HEADS[1] || foreign.is_some();
        let labels = if has_one { one() } else { config.labels.clone() };
        // A head is small and is trained in full beside an adapter, so it is always held in f32.
        let others = builder.hold_as(Some(Kind::Float));
        let head = match &foreign {
            Some(foreign) => foreign.read(&mut builder)?,
            None => Head::build(&mut builder, &config, name, labels.len() as i64, new_head)?,
        };
        let is_drawn = |layer: &&str| new_head.is_some() && builder.lacks(&format!("{layer}.weight"));
        let drawn = names.head.inner().into_iter().filter(is_drawn).map(str::to_string).collect();
        builder.hold_as(others);
        // Other heads in the file, an LM head or a value head, are not used.
        let lm_head = names.lm_head.trim_end_matches("weight");
        let ignored = match (new_head, name == SCORE_HEADS[1] || foreign.is_some()) {
            (Some(_), _) if !config.causal => MASKED_LM_HEADS.to_vec(),
            (Some(_), _) => vec![lm_head, "v_head."],
            (None, true) => vec![lm_head],
            (None, false) => vec![],
        };
        let format =
            if name == SCORE_HEADS[1] { ClassifierFormat::DeepspeedChat } else { ClassifierFormat::Transformers };
        let (rounded, left_out) = (builder.has_rounded(), builder.left_out());
        let params = builder.finish(&ignored)?;
        let chosen = Label::One(0);
        let new_head = new_head.is_some();
        // An adapter could not use a folder whose tensors have other names as its base.
        let origin = (!config.is_part() && foreign.is_none()).then(|| dir.to_path_buf());
        let is_summary = foreign.is_some_and(|foreign| foreign.is_summary());
        let body =
            Body { left_out, rounded, origin, ..Body::new(decoder, params, config, options.device, weight_kind) };
        let head = ClassifierHead { layers: head, labels, chosen, new_head, drawn, format, is_summary };
        Ok(Self { body, head })
    }

    /// Adds a new adapter, drawn from `seed`, and freezes the other weights. The head is still trained in full, with the newly initialized
    /// layers of a new head.
    ///
    /// # Errors
    /// As [`super::CausalLm::add_adapter`]; if the model has DeepSpeed-Chat's names, which PEFT does not know.
    pub fn add_adapter(&mut self, config: &LoraConfig, seed: u64) -> Result<()> {
        self.check_names()?;
        // No folder has these layers, so they are saved with the adapter.
        let drawn = self.head.drawn.iter().filter(|layer| !is_in_head(layer)).cloned();
        let modules_to_save = config.modules_to_save.iter().cloned().chain(drawn).collect();
        let config = LoraConfig { modules_to_save, ..config.clone() };
        self.body.add_adapter(self.head.layers.inner(), &config, seed, true)
    }

    /// Loads the adapter in the folder `dir` into this model, whatever base the folder names.
    ///
    /// # Errors
    /// As [`super::CausalLm::load_adapter`]; if the model has DeepSpeed-Chat's names, which PEFT does not know.
    pub fn load_adapter(&mut self, dir: &Path) -> Result<()> {
        let folder = AdapterFolder::open(dir)?;
        folder.check_task(true)?;
        self.put_adapter(&folder)
    }

    fn put_adapter(&mut self, folder: &AdapterFolder) -> Result<()> {
        self.check_names()?;
        self.body.load_adapter(self.head.layers.inner(), folder, true)
    }

    fn check_names(&self) -> Result<()> {
        if self.head.is_summary {
            return Err(Error::Run(format!(
                "an adapter needs a reward model with transformers' names, found LLaMA-Factory's: `{}` has a bias",
                SUMMARY[0].trim_end_matches(".weight")
            )));
        }
        match self.head.format {
            ClassifierFormat::DeepspeedChat => Err(Error::Run(
                "an adapter needs a reward model with transformers' names, found DeepSpeed-Chat's; reward_format = \
                 transformers gives it these"
                    .into(),
            )),
            ClassifierFormat::Transformers => Ok(()),
        }
    }

    /// The format that the model is saved in: the format of its folder, or the one that was
    /// [set](SequenceClassifier::set_format).
    pub fn format(&self) -> ClassifierFormat {
        self.head.format
    }

    /// Sets the format in which the model is saved; the weights do not change.
    ///
    /// # Errors
    /// For DeepSpeed-Chat's format if the model is an encoder, has several labels or an adapter; if the head has a bias, as LLaMA-Factory's.
    pub fn set_format(&mut self, format: ClassifierFormat) -> Result<()> {
        if self.head.is_summary {
            return Err(Error::Run(format!(
                "reward_format = {}: expected a head without a bias, found `{}`; the model is saved with it without this setting",
                format.name(),
                SUMMARY[1]
            )));
        }
        if format == self.head.format {
            return Ok(());
        }
        if format == ClassifierFormat::DeepspeedChat && self.body.adapter.is_some() {
            return Err(Error::Run(
                "reward_format = deepspeed-chat: this format has no adapters; merge it first".into(),
            ));
        }
        if !matches!((&self.head.layers, self.head.labels.len()), (Head::Score(_), 1)) {
            return Err(Error::Run("reward_format = deepspeed-chat: expected a decoder with one label".into()));
        }
        let [old, new] = match format {
            ClassifierFormat::Transformers => [SCORE_HEADS[1], SCORE_HEADS[0]],
            ClassifierFormat::DeepspeedChat => SCORE_HEADS,
        };
        let heads = self.body.params.iter_mut().filter(|param| param.name == old);
        heads.for_each(|param| param.name = new.into());
        self.head.format = format;
        // The folder has other names, so an adapter would not find its base there.
        self.body.origin = None;
        Ok(())
    }

    /// The names of the labels.
    pub fn labels(&self) -> &[String] {
        &self.head.labels
    }

    /// Whether the score head was newly initialized, so that its scores mean nothing before training.
    pub fn has_new_head(&self) -> bool {
        self.head.new_head
    }

    /// Checks that the model has one score per position of its decoder, as a value model must.
    ///
    /// # Errors
    /// If it is an encoder or has several labels.
    pub fn check_values(&self, dir: &Path) -> Result<()> {
        self.config().check_decoder(dir)?;
        match self.head.labels.len() {
            1 => Ok(()),
            found => Err(Error::invalid(dir, format!("expected a classifier with one label, found {found}"))),
        }
    }

    /// Chooses the label whose logit is the score: a name, a number, or two of these with a minus between them for their
    /// difference.
    ///
    /// `None` is valid only for a model with one label.
    ///
    /// # Errors
    /// If there is no such label, or if there are several labels and `label` is `None`; `dir` is the model's folder.
    pub fn choose_label(&mut self, label: Option<&str>, dir: &Path) -> Result<()> {
        let known = self.head.labels.join(", ");
        let at = |name: &str| {
            let by_name = self.head.labels.iter().position(|label| label == name);
            let by_number = || name.parse().ok().filter(|&i: &usize| i < self.head.labels.len());
            by_name.or_else(by_number).map(|i| i as i64)
        };
        self.head.chosen = match label {
            None if self.head.labels.len() == 1 => Label::One(0),
            None => {
                let message = format!(
                    "the classifier has {} labels: {known}; choose one, or a difference such as {}-{}, with --reward_label",
                    self.head.labels.len(),
                    self.head.labels[1],
                    self.head.labels[0]
                );
                return Err(Error::invalid(dir, message));
            }
            Some(text) => {
                let halves = || text.match_indices('-').find_map(|(i, _)| Some((at(&text[..i])?, at(&text[i + 1..])?)));
                match (at(text), halves()) {
                    (Some(i), _) => Label::One(i),
                    (None, Some((i, j))) => Label::Difference(i, j),
                    (None, None) => {
                        let message = format!(
                            "reward_label = {text}: expected one of {known}, its number, or two of them with a minus between"
                        );
                        return Err(Error::invalid(dir, message));
                    }
                }
            }
        };
        Ok(())
    }

    /// Values at the positions `spans` of each sequence, M in all, row after row: `[M]` f32. An encoder-decoder needs the lengths of the prompts
    /// too: use [`super::ValueModel::values_of`]. Its head, which reads the end of a text for a score, is applied to each of the decoder's
    /// states.
    ///
    /// # Errors
    /// As [`super::CausalLm::logits`]; if a span is not within its sequence; if the model fails
    /// [`SequenceClassifier::check_values`].
    pub fn values_at<S: AsRef<[i64]>>(&self, sequences: &[S], spans: &[Range<usize>]) -> Result<Tensor> {
        self.values(Batch::new(sequences, spans))
    }

    /// [`SequenceClassifier::values_at`] for a batch, which may have padding; errors as there.
    pub fn values<S: AsRef<[i64]>>(&self, batch: Batch<'_, S>) -> Result<Tensor> {
        let head = self.value_head()?;
        self.body.check_spans(batch, 0)?;
        Ok(head.forward(&self.body.hidden_at(batch, 0, head.score())?.states).squeeze_dim(1))
    }

    /// Forward and backward pass of `loss`, a scalar computed from the values `[M]` of [`SequenceClassifier::values_at`];
    /// accumulates gradients.
    ///
    /// # Errors
    /// As [`SequenceClassifier::values_at`]; if the model is frozen.
    pub fn values_backward<S: AsRef<[i64]>>(
        &self,
        batch: Batch<'_, S>,
        loss: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<()> {
        let head = self.value_head()?;
        self.body.check_spans(batch, 0)?;
        self.body.backward(batch, 0, head.score(), |hidden| {
            loss(&head.forward(hidden).squeeze_dim(1)).backward();
            hidden.grad()
        })
    }

    /// The head of a model that passes [`SequenceClassifier::check_values`].
    fn value_head(&self) -> Result<&Head> {
        match (self.config().causal, self.head.labels.len()) {
            (true, 1) => Ok(&self.head.layers),
            _ => Err(Error::Run("a value at a position: expected a decoder with one label".into())),
        }
    }

    /// The logits of each sequence, `[rows, labels]` f32: of a decoder at the last token, of an encoder at the first token or for the mean
    /// over the tokens, of an encoder-decoder, whose encoder and decoder both read the sequence, at the last token.
    ///
    /// # Errors
    /// As [`super::CausalLm::logits`].
    pub fn logits<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Tensor> {
        if self.config().is_encoder_decoder() {
            let twice = ReadTwice::new(sequences);
            return Ok(self.head.layers.forward(&self.body.hidden_at(twice.batch(), 0, None)?.states));
        }
        let spans = self.read_at(sequences);
        let tokens = sequences.iter().map(|sequence| sequence.as_ref().len()).sum();
        let shared = shared_lens(sequences.iter().map(AsRef::as_ref), tokens);
        let batch = Batch::new(sequences, &spans).sharing(shared.as_deref());
        Ok(self.head.layers.forward(&self.pooled(&self.body.hidden_at(batch, 0, None)?.states, &spans)))
    }

    /// The score of each sequence: its logit for the chosen label, `[rows]` f32.
    ///
    /// # Errors
    /// As [`super::CausalLm::logits`].
    pub fn scores<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Result<Tensor> {
        Ok(self.chosen_logits(&self.logits(sequences)?))
    }

    /// Forward and backward pass of `loss`, a scalar computed from the [scores](SequenceClassifier::scores) `[rows]`, with
    /// dropout before the adapters; accumulates gradients.
    ///
    /// # Errors
    /// As [`super::CausalLm::logits`]; if the model is frozen.
    pub fn scores_backward<S: AsRef<[i64]>>(
        &self,
        sequences: &[S],
        dropout: Option<&DropoutRows>,
        loss: impl FnOnce(&Tensor) -> Tensor,
    ) -> Result<()> {
        if self.config().is_encoder_decoder() {
            let twice = ReadTwice::new(sequences);
            return self.body.backward(twice.batch().with_dropout(dropout), 0, None, |hidden| {
                loss(&self.chosen_logits(&self.head.layers.forward(hidden))).backward();
                hidden.grad()
            });
        }
        let spans = self.read_at(sequences);
        self.body.backward(Batch::new(sequences, &spans).with_dropout(dropout), 0, None, |hidden| {
            loss(&self.chosen_logits(&self.head.layers.forward(&self.pooled(hidden, &spans)))).backward();
            hidden.grad()
        })
    }

    /// The positions of each sequence that the head reads.
    fn read_at<S: AsRef<[i64]>>(&self, sequences: &[S]) -> Vec<Range<usize>> {
        let lens = sequences.iter().map(|s| s.as_ref().len());
        match self.head.layers {
            Head::Score(_) => lens.map(|len| len.saturating_sub(1)..len).collect(),
            Head::Dense { .. } => match self.config().pooling {
                Pooling::First => lens.map(|_| 0..1).collect(),
                Pooling::Mean => lens.map(|len| 0..len).collect(),
            },
        }
    }

    /// The head's input for each sequence, from the hidden states at [`SequenceClassifier::read_at`].
    fn pooled(&self, hidden: &Tensor, spans: &[Range<usize>]) -> Tensor {
        if self.config().pooling == Pooling::First {
            return hidden.shallow_clone();
        }
        let lens: Vec<i64> = spans.iter().map(|span| span.len() as i64).collect();
        let means = hidden.split_with_sizes(&lens, 0).into_iter().map(|rows| rows.mean_dim(0, false, Kind::Float));
        Tensor::stack(&means.collect::<Vec<_>>(), 0)
    }

    fn chosen_logits(&self, logits: &Tensor) -> Tensor {
        match self.head.chosen {
            Label::One(i) => logits.select(1, i),
            Label::Difference(i, j) => logits.select(1, i) - logits.select(1, j),
        }
    }
}

/// Rejects a folder whose weights are only a pickle, as DeepSpeed-Chat saves its reward models.
fn check_pickle(dir: &Path) -> Result<()> {
    const PICKLE: &str = "pytorch_model.bin";
    if !dir.join(PICKLE).is_file() || dir.join("model.safetensors.index.json").is_file() {
        return Ok(());
    }
    let message = format!(
        "expected model.safetensors, found only {PICKLE}, a pickle, which can run code and is never opened; convert one of \
         DeepSpeed-Chat there: `python -c \"import torch, safetensors.torch as s; s.save_file(torch.load('{PICKLE}', \
         weights_only=True), 'model.safetensors')\"`, one of transformers with it: \
         `AutoModel...from_pretrained(dir).save_pretrained(new_dir)`"
    );
    Err(Error::invalid(dir, message))
}

/// Texts as an encoder-decoder's classifier reads them: the encoder reads the text, the decoder reads the start token and the text without its
/// last token, and the head is applied at the end. transformers applies the head at the last end token, which is the same place.
struct ReadTwice {
    sequences: Vec<Vec<i64>>,
    prompt_lens: Vec<usize>,
    spans: Vec<Range<usize>>,
}

impl ReadTwice {
    fn new<S: AsRef<[i64]>>(texts: &[S]) -> Self {
        let twice = |text: &S| [text.as_ref(), &text.as_ref()[..text.as_ref().len().saturating_sub(1)]].concat();
        let sequences: Vec<Vec<i64>> = texts.iter().map(twice).collect();
        let spans = sequences.iter().map(|sequence| sequence.len().saturating_sub(1)..sequence.len()).collect();
        Self { prompt_lens: texts.iter().map(|text| text.as_ref().len()).collect(), sequences, spans }
    }

    fn batch(&self) -> Batch<'_, Vec<i64>> {
        Batch::new(&self.sequences, &self.spans).with_prompts(Some(&self.prompt_lens))
    }
}

impl Head {
    /// A linear head.
    fn score(&self) -> Option<&Linear> {
        match self {
            Head::Score(score) => Some(score),
            Head::Dense { .. } => None,
        }
    }

    /// The layer that can have an adapter.
    fn inner(&mut self) -> Option<&mut Linear> {
        match self {
            Head::Score(_) => None,
            Head::Dense { inner, .. } => Some(inner),
        }
    }

    /// Logits of hidden states, f32.
    fn forward(&self, hidden: &Tensor) -> Tensor {
        match self {
            Head::Score(score) => score.forward(hidden),
            Head::Dense { inner, activation, norm, out } => {
                let inner = inner.forward(hidden);
                let active = match activation {
                    HeadActivation::Tanh => inner.tanh(),
                    HeadActivation::Relu => inner.relu(),
                    HeadActivation::Gelu => inner.gelu("none"),
                };
                out.forward(&norm.as_ref().map_or(active.shallow_clone(), |norm| norm.forward(&active, Kind::Float)))
            }
        }
    }

    /// Builds the head; `name` is the weight's name of a linear head.
    pub(super) fn build(
        builder: &mut Builder<'_>,
        config: &ModelConfig,
        name: &str,
        labels: i64,
        new_head: Option<u64>,
    ) -> Result<Self> {
        // f32: bf16 would round scores to steps of 1/128 of their size.
        let compute = Kind::Float;
        let width_in = config.hidden_size;
        let by_width = if config.scale_init_by_width { (width_in as f64).sqrt() } else { 1.0 };
        let std = config.initializer_range / by_width;
        // A head is trained in full beside an adapter, so it is never held in codes.
        builder.unpack(true);
        let head = match config.family.names.head {
            HeadNames::Score => {
                let shape = [labels, config.embedding_size];
                let weight = match new_head {
                    Some(seed) => builder.new_head(name.to_string(), &shape, seed, std)?,
                    None => builder.tensor(name.to_string(), &shape, Init::Zeros, true)?,
                };
                Head::Score(Linear::new(weight, None, compute))
            }
            HeadNames::Dense { inner, activation, norm, out } => {
                let shape = |width_out, bias| LinearShape { width_in, width_out, bias, transposed: false, std };
                // A new head keeps the layers that pre-training has trained: BERT's pooler, the head of ModernBERT.
                builder.set_absent(new_head);
                let inner = Linear::build(builder, inner, shape(width_in, config.head_bias), compute)?;
                let norm = norm.map(|name| Norm::build(builder, name, width_in, config)).transpose()?;
                let out = Linear::build(builder, out, shape(labels, true), compute)?;
                builder.set_absent(None);
                Head::Dense { inner, activation, norm, out: Box::new(out) }
            }
        };
        builder.unpack(false);
        Ok(head)
    }
}
