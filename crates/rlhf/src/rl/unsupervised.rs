//! Texts that a policy keeps learning to continue while PPO trains it (InstructGPT's PPO-ptx): packed into blocks of one
//! length, taken in shuffled passes.

use crate::data::{Cursor, CursorState, Dataset, Files};
use rlhf_base::dist::World;
use rlhf_base::name_of;
use rlhf_base::schema::{LOSS, Settings, above_zero, all, defaults, no_effect};
use rlhf_base::{Error, Result};
use rlhf_lm::model::{Batch, CausalLm};
use rlhf_lm::optim::micro_batch::micro_batches;
use rlhf_lm::tokenizer::Tokenizer;
use serde::Serialize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};
use tch_ext::to_host;

/// Added to the run's seed, so that the blocks do not have the order of the prompts where there are as many blocks as prompts.
const SEED: u64 = 1 << 32;

/// The language-modelling loss on texts that is added to the policy's (PPO-ptx).
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct UnsupervisedConfig {
    /// Dataset of texts for a language-modelling loss beside that of the command (PPO-ptx): a file, a folder or a hub name.
    #[setting(heading = LOSS)]
    pub unsupervised_dataset_name: Option<PathBuf>,
    /// Configuration (folder) of `unsupervised_dataset_name` to use, if several have the split.
    #[setting(heading = LOSS)]
    pub unsupervised_dataset_config_name: Option<String>,
    /// Coefficient of the language-modelling loss.
    #[setting(heading = LOSS, default = 27.8, replay = Changes)]
    pub unsup_coef: f64,
}

impl UnsupervisedConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let usual: Self = defaults();
        self.check_with_default(usual.unsup_coef)
    }

    /// [`UnsupervisedConfig::check`] in a command where the coefficient's default is `usual`.
    pub(crate) fn check_with_default(&self, usual: f64) -> Result<()> {
        let none = self.unsupervised_dataset_name.is_none();
        let without = "without unsupervised_dataset_name";
        all([
            above_zero(name_of!(self.unsup_coef), self.unsup_coef),
            self.unsupervised_dataset_config_name
                .as_ref()
                .filter(|_| none)
                .map_or(Ok(()), |name| no_effect(name_of!(self.unsupervised_dataset_config_name), name, without)),
            if none && self.unsup_coef != usual {
                no_effect(name_of!(self.unsup_coef), self.unsup_coef, without)
            } else {
                Ok(())
            },
        ])
    }
}

/// Blocks of text, and the position in their order.
#[derive(Debug)]
pub struct Unsupervised {
    blocks: Vec<Vec<i64>>,
    cursor: Cursor,
    coef: f64,
}

impl Unsupervised {
    /// The texts that `config` names, in blocks of `block` tokens; `None` if it names none.
    ///
    /// # Errors
    /// If there is no such dataset, a row is no text, or all texts together have fewer than two tokens.
    pub(crate) fn find(
        config: &UnsupervisedConfig,
        tokenizer: &Tokenizer,
        vocab: i64,
        block: usize,
        seed: u64,
    ) -> Result<Option<Self>> {
        let Some(name) = &config.unsupervised_dataset_name else { return Ok(None) };
        let files = Files::find(name, config.unsupervised_dataset_config_name.as_deref(), "train")?;
        let texts = Dataset::from_files(&files)?.texts(tokenizer, vocab, usize::MAX)?;
        Self::new(&texts, block, config.unsup_coef, seed, name).map(Some)
    }

    /// Concatenates `texts` and cuts them into blocks of `block` tokens; a last block that is not full is left out, unless it is the only
    /// one.
    ///
    /// # Errors
    /// If all texts together have fewer than two tokens. `name` is that of the dataset, for the error.
    pub fn new(texts: &[Vec<i64>], block: usize, coef: f64, seed: u64, name: &Path) -> Result<Self> {
        let all = texts.concat();
        let mut blocks: Vec<Vec<i64>> = all.chunks(block.max(2)).map(<[i64]>::to_vec).collect();
        if blocks.len() > 1 && blocks.last().is_some_and(|last| last.len() < block) {
            blocks.pop();
        }
        if blocks.first().is_none_or(|first| first.len() < 2) {
            return Err(Error::invalid(name, format!("expected texts of at least two tokens, found {}", all.len())));
        }
        let cursor = Cursor::new(seed.wrapping_add(SEED), blocks.len());
        Ok(Self { blocks, cursor, coef })
    }

    /// Describes the number of blocks and their length.
    pub(crate) fn describe(&self) -> String {
        format!(
            "unsupervised mix: {} blocks of {} tokens, weight {}",
            self.blocks.len(),
            self.blocks[0].len(),
            self.coef
        )
    }

    /// The next `rows` blocks.
    pub fn take(&mut self, rows: usize) -> Vec<&[i64]> {
        self.cursor.take(rows).into_iter().map(|row| self.blocks[row].as_slice()).collect()
    }

    /// All blocks, in order.
    pub(crate) fn blocks(&self) -> &[Vec<i64>] {
        &self.blocks
    }

    /// The weight of the loss on these texts.
    pub fn coef(&self) -> f64 {
        self.coef
    }

    /// Resumable position.
    pub(crate) fn state(&self) -> CursorState {
        self.cursor.state()
    }

    /// Restores the position of [`Unsupervised::state`]; `may_differ`: the blocks may be others.
    ///
    /// # Errors
    /// If the position was in another number of blocks, and the blocks may not differ.
    pub(crate) fn load_state(&mut self, state: &CursorState, may_differ: bool) -> Result<()> {
        self.cursor.load_state(state, may_differ).map_err(|e| Error::Run(format!("unsupervised_dataset_name: {e}")))
    }
}

/// Limits of one forward and backward pass over texts, which change memory and speed only, and the ranks that share the texts.
pub(crate) struct TextLimits<'a> {
    /// Most texts.
    pub(crate) most_rows: usize,
    /// Most tokens.
    pub(crate) most_tokens: usize,
    pub(crate) world: &'a World,
}

/// Adds the gradient of `coef` times the mean negative log-likelihood of the tokens of `texts`, except each text's first, to the gradients
/// of `policy`'s parameters; returns that mean.
///
/// `texts` are the texts of all ranks, each of which learns a part; the mean is over all of them.
///
/// # Errors
/// If a text does not fit the model, or none has two tokens; if the model is frozen.
pub(crate) fn learn_texts<S: AsRef<[i64]>>(
    policy: &CausalLm,
    texts: &[S],
    coef: f64,
    limits: &TextLimits<'_>,
) -> Result<f64> {
    let spans = |texts: &[S]| -> Vec<Range<usize>> { texts.iter().map(|text| 1..text.as_ref().len().max(1)).collect() };
    let tokens: usize = spans(texts).iter().map(Range::len).sum();
    if tokens == 0 {
        return Err(Error::Run("unsupervised batch: expected texts of at least two tokens, found none".into()));
    }
    let mut sums = Vec::new();
    let length = |text: &S| text.as_ref().len();
    let local_texts = limits.world.share_by(texts, length);
    let mut passes =
        micro_batches(local_texts, limits.most_rows, limits.most_tokens, |text| (length(text), 0)).into_iter();
    let learned = passes.try_for_each(|part| {
        let now = policy.logprobs_backward(Batch::new(part, &spans(part)), 1.0, |_, now| {
            -now.logprobs.sum(Kind::Float) * (coef / tokens as f64)
        })?;
        sums.push(now.logprobs.sum(Kind::Float));
        Ok(())
    });
    limits.world.agree(learned)?;
    // One read for all passes, as each read waits for the device.
    let sums = if sums.is_empty() { Vec::new() } else { to_host(&Tensor::stack(&sums, 0)) };
    let mut sums = [sums.into_iter().fold(0.0, |sum, logprobs| sum - logprobs)];
    limits.world.sum_numbers(&mut sums)?;
    Ok(sums[0] / tokens as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(texts: &[&[i64]], block: usize) -> Vec<Vec<i64>> {
        let texts: Vec<Vec<i64>> = texts.iter().map(|text| text.to_vec()).collect();
        Unsupervised::new(&texts, block, 1.0, 7, Path::new("texts")).unwrap().blocks
    }

    #[test]
    fn texts_are_joined_and_cut_into_blocks_and_the_rest_is_left_out_unless_it_is_all() {
        assert_eq!(blocks(&[&[1, 2, 3], &[4], &[5, 6, 7]], 3), [[1, 2, 3], [4, 5, 6]]);
        assert_eq!(blocks(&[&[1, 2], &[3, 4]], 2), [[1, 2], [3, 4]]);
        assert_eq!(blocks(&[&[1, 2]], 8), [[1, 2]]);
        let none = Unsupervised::new(&[vec![1]], 8, 1.0, 7, Path::new("texts")).unwrap_err().to_string();
        assert!(none.contains("expected texts of at least two tokens, found 1"), "{none}");
    }

    #[test]
    fn blocks_come_once_per_pass_and_a_restored_place_continues() {
        let new = || Unsupervised::new(&[(0..40).collect()], 4, 1.0, 7, Path::new("texts")).unwrap();
        let firsts = |mix: &mut Unsupervised, rows| mix.take(rows).iter().map(|block| block[0]).collect::<Vec<_>>();
        let mut mix = new();
        let mut pass = firsts(&mut mix, 10);
        let state = mix.state();
        let next = firsts(&mut mix, 3);
        pass.sort_unstable();
        assert_eq!(pass, (0..10).map(|i| 4 * i).collect::<Vec<_>>());
        let mut other = new();
        other.load_state(&state, false).unwrap();
        assert_eq!(firsts(&mut other, 3), next);
    }
}
