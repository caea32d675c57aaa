//! A model's parameters: named as in its checkpoint, read strictly or drawn fresh.

use super::families::Names;
use crate::rng::{Purpose, Stream};
use crate::weights::{Checkpoint, brief};
use crate::{Error, Result};
use std::collections::HashSet;
use tch::{Device, Kind, Tensor};

/// One trainable tensor of a model.
#[derive(Debug)]
pub struct Param {
    /// Its name in the checkpoint, which is Hugging Face's.
    pub name: String,
    /// The tensor, in the dtype that it is held in; it shares memory with the model's.
    pub tensor: Tensor,
    /// Whether weight decay applies: not to biases and norms, as in TRL.
    pub decay: bool,
}

/// How a tensor begins when no checkpoint holds it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Init {
    Zeros,
    Ones,
    Normal(f64),
}

/// Where a model's tensors come from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Checkpoint(&'a Checkpoint),
    /// Drawn from the seed.
    Fresh(u64),
    /// The memory of another model of the same shape.
    Shared(&'a [Param]),
}

/// What DeepSpeed-Chat's reward models have before the base model's names.
pub(crate) const DEEPSPEED_CHAT: &str = "rwtransformer.";

/// How many numbers are drawn before they are copied into their tensor.
const DRAWN_AT_ONCE: usize = 1 << 20;

/// Hands out a model's tensors by name while it is put together, and keeps account of what was asked for.
pub(crate) struct Builder<'a> {
    source: Source<'a>,
    names: &'static Names,
    device: Device,
    /// The dtype that the tensors get; `None`: each that of the checkpoint, or f32.
    hold: Option<Kind>,
    /// Whether a tensor of the checkpoint was rounded to that.
    rounded: bool,
    /// What the checkpoint's names begin with where ours begin with `names.prefix`.
    stored_prefix: &'static str,
    /// Whether the LM head is the embedding, so that a checkpoint may hold it under either name.
    tied: bool,
    params: Vec<Param>,
    asked: HashSet<String>,
    missing: Vec<String>,
    mismatched: Vec<String>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(source: Source<'a>, names: &'static Names, device: Device, hold: Option<Kind>) -> Self {
        let stored_prefix = match source {
            Source::Fresh(_) | Source::Shared(_) => names.prefix,
            Source::Checkpoint(checkpoint) => {
                let used = |prefix: &&str| checkpoint.names().any(|name| name.starts_with(prefix));
                // Some checkpoints (OpenAI's GPT-2) leave the prefix out.
                [names.prefix, DEEPSPEED_CHAT].into_iter().find(used).unwrap_or("")
            }
        };
        let (params, asked) = (Vec::new(), HashSet::new());
        let (missing, mismatched) = (Vec::new(), Vec::new());
        let (rounded, tied) = (false, false);
        Self { source, names, device, hold, rounded, stored_prefix, tied, params, asked, missing, mismatched }
    }

    /// Checks that the checkpoint may hold as many layers as the configuration says: each has a tensor at least. Else a damaged
    /// number would have us list hundreds of thousands of tensors that are missing.
    pub(crate) fn check_layers(&self, layers: i64) -> Result<()> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(()) };
        let tensors = checkpoint.names().count();
        if layers <= tensors as i64 {
            return Ok(());
        }
        let message = format!("{layers} layers in config.json: expected no more than tensors, found {tensors} tensors");
        Err(Error::invalid(checkpoint.dir(), message))
    }

    /// Says whether the LM head is the embedding.
    pub(crate) fn set_tied(&mut self, tied: bool) {
        self.tied = tied;
    }

    /// Whether the checkpoint holds the tensor `name` with other values than `tensor`'s.
    pub(crate) fn holds_other(&self, name: &str, tensor: &Tensor) -> Result<bool> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(false) };
        match checkpoint.shape(name) {
            None => Ok(false),
            Some(shape) if shape != tensor.size() => Ok(true),
            // Where each has its own dtype, the exact numbers are compared.
            Some(_) => Ok(checkpoint.read(name, self.device, self.kind())? != tensor.to_kind(self.kind())),
        }
    }

    /// The first of `names` that the checkpoint holds; the first of all where there is no checkpoint or none of them.
    pub(crate) fn first_stored<'n>(&self, names: &[&'n str]) -> &'n str {
        let stored = |name: &&&str| match self.source {
            Source::Fresh(_) | Source::Shared(_) => false,
            Source::Checkpoint(checkpoint) => checkpoint.shape(name).is_some(),
        };
        names.iter().find(stored).unwrap_or(&names[0])
    }

    /// The dtype that the next tensors get; gives what was said of those before.
    pub(crate) fn hold_as(&mut self, kind: Option<Kind>) -> Option<Kind> {
        std::mem::replace(&mut self.hold, kind)
    }

    /// Whether a tensor that was read has fewer bits, or others, than in the checkpoint.
    pub(crate) fn has_rounded(&self) -> bool {
        self.rounded
    }

    /// The dtype of a tensor that no checkpoint holds.
    fn kind(&self) -> Kind {
        self.hold.unwrap_or(Kind::Float)
    }

    /// The tensor `stored` of the checkpoint, in the dtype that it gets.
    fn read(&mut self, checkpoint: &Checkpoint, stored: &str) -> Result<Tensor> {
        let (in_file, halves) = (checkpoint.kind_of(stored), [Kind::BFloat16, Kind::Half]);
        // What is not known as a dtype of weights, `Checkpoint::read` refuses.
        let kind = self.hold.unwrap_or(in_file.filter(|kind| halves.contains(kind)).unwrap_or(Kind::Float));
        self.rounded |= halves.contains(&kind) && in_file != Some(kind);
        checkpoint.read(stored, self.device, kind)
    }

    /// The tensor `name` of `shape`: from the checkpoint, or as `init` says. Problems come together in `finish`.
    pub(crate) fn tensor(&mut self, name: String, shape: &[i64], init: Init, decay: bool) -> Result<Tensor> {
        let tensor = match self.source {
            Source::Fresh(seed) => self.fresh(seed, shape, init)?,
            Source::Shared(params) => {
                let shared = params.iter().find(|param| param.name == name);
                shared.expect("both have the same shape").tensor.shallow_clone()
            }
            Source::Checkpoint(checkpoint) => {
                let stored = self.stored_name(checkpoint, &name);
                let read = match checkpoint.shape(&stored) {
                    None => {
                        self.missing.push(name.clone());
                        None
                    }
                    Some(found) if found != shape => {
                        self.mismatched.push(format!("tensor `{stored}`: expected {shape:?}, found {found:?}"));
                        None
                    }
                    Some(_) => Some(self.read(checkpoint, &stored)?),
                };
                self.asked.insert(stored);
                // The model is thrown away when anything is amiss; a placeholder lets us list all that is.
                read.unwrap_or_else(|| Tensor::zeros([0], (self.kind(), self.device)))
            }
        };
        Ok(self.keep(name, tensor, decay))
    }

    /// A tensor drawn fresh even where the rest comes from a checkpoint: a new head.
    pub(crate) fn new_head(&mut self, name: String, shape: &[i64], seed: u64, std: f64) -> Result<Tensor> {
        // Nothing is drawn for a model that will be refused: its sizes may be any.
        let lost = !(self.missing.is_empty() && self.mismatched.is_empty());
        let tensor = match lost {
            true => Tensor::zeros([0], (self.kind(), self.device)),
            false => self.fresh(seed, shape, Init::Normal(std))?,
        };
        Ok(self.keep(name, tensor, true))
    }

    /// A bias of zeros, wherever the rest comes from.
    pub(crate) fn zeros(&mut self, name: String, shape: &[i64]) -> Result<Tensor> {
        let tensor = Tensor::f_zeros(shape, (self.kind(), self.device))?;
        Ok(self.keep(name, tensor, false))
    }

    /// A weight that comes from elsewhere, read for the builder's device and dtype.
    pub(crate) fn given(&mut self, name: String, read: impl FnOnce(Device, Kind) -> Result<Tensor>) -> Result<Tensor> {
        let tensor = read(self.device, self.kind())?;
        Ok(self.keep(name, tensor, true))
    }

    /// The name under which the checkpoint holds `name`.
    fn stored_name(&self, checkpoint: &Checkpoint, name: &str) -> String {
        let stored = match name.strip_prefix(self.names.prefix) {
            Some(rest) => format!("{}{rest}", self.stored_prefix),
            None => name.to_string(),
        };
        // TensorFlow's names of a norm's two tensors live on in old BERTs.
        let old = stored.strip_suffix("LayerNorm.weight").map(|base| format!("{base}LayerNorm.gamma"));
        let old = old.or_else(|| stored.strip_suffix("LayerNorm.bias").map(|base| format!("{base}LayerNorm.beta")));
        // Of two names for one tensor some writers keep only the head's.
        let is_embedding = name.strip_suffix(".weight") == Some(self.names.embed);
        let old = old.or_else(|| (self.tied && is_embedding).then(|| self.names.lm_head.to_string()));
        old.filter(|old| checkpoint.shape(&stored).is_none() && checkpoint.shape(old).is_some()).unwrap_or(stored)
    }

    fn keep(&mut self, name: String, tensor: Tensor, decay: bool) -> Tensor {
        self.params.push(Param { name, tensor: tensor.shallow_clone(), decay });
        tensor
    }

    fn fresh(&self, seed: u64, shape: &[i64], init: Init) -> Result<Tensor> {
        let options = (self.kind(), self.device);
        Ok(match init {
            Init::Zeros => Tensor::f_zeros(shape, options)?,
            Init::Ones => Tensor::f_ones(shape, options)?,
            Init::Normal(std) => {
                let mut stream = Stream::new(seed, Purpose::Init, self.params.len() as u64, 0);
                // libtorch first: it refuses a size that memory cannot hold, where a vector would end the program.
                let tensor = Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?;
                let flat = tensor.f_view([-1])?;
                for from in (0..flat.size()[0]).step_by(DRAWN_AT_ONCE) {
                    let len = (DRAWN_AT_ONCE as i64).min(flat.size()[0] - from);
                    flat.narrow(0, from, len).f_copy_(&Tensor::f_from_slice(&stream.normals(len as usize, std))?)?;
                }
                tensor.to_device(self.device).to_kind(self.kind())
            }
        })
    }

    /// The parameters in the order of the model.
    ///
    /// # Errors
    /// One error that lists every tensor that is missing, of another shape, or not expected; tensors that begin with one
    /// of `ignored` (the head of another task) may be there.
    pub(crate) fn finish(self, ignored: &[&str]) -> Result<Vec<Param>> {
        let Source::Checkpoint(checkpoint) = self.source else { return Ok(self.params) };
        let harmless = |name: &str| {
            self.names.harmless.iter().any(|suffix| name.ends_with(suffix))
                || ignored.iter().any(|prefix| name.starts_with(prefix))
        };
        let unexpected: Vec<&str> =
            checkpoint.names().filter(|name| !self.asked.contains(*name) && !harmless(name)).collect();
        if self.missing.is_empty() && self.mismatched.is_empty() && unexpected.is_empty() {
            return Ok(self.params);
        }
        let list = |what: &str, names: &[&str]| match names {
            [] => None,
            [first] => Some(format!("{what} `{}`", brief(first))),
            [first, second] => Some(format!("{what} `{}`, `{}`", brief(first), brief(second))),
            [first, second, rest @ ..] => {
                Some(format!("{what} `{}`, `{}` and {} more", brief(first), brief(second), rest.len()))
            }
        };
        let missing: Vec<&str> = self.missing.iter().map(String::as_str).collect();
        let mut problems: Vec<String> = self.mismatched.iter().take(3).cloned().collect();
        problems.extend((self.mismatched.len() > 3).then(|| format!("{} more shapes", self.mismatched.len() - 3)));
        problems.extend(list("missing", &missing));
        problems.extend(list("unexpected", &unexpected));
        let is_head = |name: &str| name == self.names.lm_head;
        let hint = if missing == ["score.weight"] {
            ": this is a language model, not a reward or value model; `rlhf reward --new_reward_head` makes one of it"
        } else if unexpected == ["score.weight"] && missing.iter().all(|n| is_head(n)) {
            ": this is a reward or value model, not a language model"
        } else {
            ""
        };
        Err(Error::invalid(checkpoint.dir(), format!("{}{hint}", problems.join("; "))))
    }
}
