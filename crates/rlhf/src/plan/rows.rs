//! The rows of a run by their lengths, and their division into passes.

use super::members::Models;
use super::{PlannedRun, Role};
use crate::data;
use crate::data::{Cursor, Dataset, PromptLimit, Sources};
use crate::settings::{DataConfig, DistillConfig, DistillLoss, DpoConfig, PpoConfig, RewardConfig, SftConfig, Stage};
use crate::train::check_held_out;
use crate::train::distill::{DistillRow, Source, planned_rows};
use crate::train::dpo::{PairRow, planned_pairs};
use crate::train::ppo::prompt_limit;
use crate::train::reward_model::{self, leave_out_long};
use crate::train::sft::{self, into_blocks, learned, max_row_length, shorten};
use rlhf_base::Result;
use rlhf_base::dist::shares_by;
use rlhf_lm::model::{PassTokens, SourceTokens, shared_lens};
use rlhf_lm::optim::micro_batch::micro_batches;
use rlhf_lm::tokenizer::Tokenizer;
use std::ops::Range;

/// Number of updates whose rows are drawn, as the run will draw them.
const UPDATES: usize = 16;

/// Number of prompts that stands in when sizes are resolved that do not depend on it.
pub(super) const MANY_PROMPTS: usize = 1 << 20;

/// Rows of the first updates of a run.
#[derive(Debug)]
pub(super) struct Rows {
    /// The rows of each update, in the order of the data; one update at least.
    pub(super) updates: Vec<Vec<Row>>,
    /// Number of rows in the data (in PPO, of prompts). `None` if the data were not read.
    pub(super) available: Option<usize>,
    /// Tokens of a block of text that the policy learns in addition to PPO or DPO; 0 if there are no such texts.
    pub(super) block: usize,
    /// Number of adjacent rows that are never split over two passes: 2 for the sides of a pair in DPO, else 1.
    pub(super) rows_per_item: usize,
    /// The model that samples the responses of each update of distillation; `None` where they are the dataset's. Empty for other runs.
    pub(super) samplers: Vec<Option<Role>>,
    /// Assumptions.
    pub(super) notes: Vec<String>,
}

/// One row: a sequence, or both sides of a pair of reward training; a pair of DPO is a group of two rows.
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    /// Tokens of the prompt, which other rows may share; empty if no computation is shared between rows.
    pub(super) prompt: Vec<i64>,
    /// Number of tokens.
    pub(super) len: usize,
    /// Number of tokens that the encoder and the decoder read; `None` for models with one stack, which reads all tokens.
    pub(super) pair: Option<[usize; 2]>,
    /// Number of tokens with an output.
    pub(super) outputs: usize,
    /// Index of the group of responses to one prompt.
    pub(super) group: usize,
}

impl Row {
    /// Number of tokens that an encoder reads, and number that go through the decoder or the one stack.
    pub(super) fn read(&self) -> [usize; 2] {
        self.pair.unwrap_or([0, self.len])
    }

    /// The row as a reward model reads it: one text, which both stacks of an encoder-decoder read.
    pub(super) fn as_text(&self, twice: bool) -> Self {
        Self { prompt: Vec::new(), pair: twice.then_some([self.len, self.len]), outputs: 1, ..self.clone() }
    }
}

impl Rows {
    /// Reads the data of the run.
    ///
    /// # Errors
    /// If they, or the tokenizer, are missing or invalid.
    pub(super) fn read(run: &PlannedRun, models: &Models) -> Result<Self> {
        match run {
            PlannedRun::Sft(config) => Self::of_sft(config, models),
            PlannedRun::Reward(config) => Self::of_reward(config, models),
            PlannedRun::Dpo(config) => Self::of_dpo(config, models),
            PlannedRun::Distill(config) => Self::of_distillation(config, models),
            PlannedRun::Ppo(config) => Self::of_prompts(config, models),
        }
    }

    /// Rows without any tokens, for a plan without data. The planned memory is then a lower bound.
    pub(super) fn unread(run: &PlannedRun) -> Self {
        let (rows, rows_per_item) = match run {
            PlannedRun::Ppo(_) | PlannedRun::Distill(_) => (run.batch_size().unwrap_or(1), 1),
            PlannedRun::Sft(_) | PlannedRun::Reward(_) => (1, 1),
            PlannedRun::Dpo(_) => (2, 2),
        };
        let samplers = if let PlannedRun::Distill(config) = run { samplers(config) } else { Vec::new() };
        let updates = vec![vec![Row::default(); rows]; samplers.len().max(1)];
        Self { updates, available: None, block: 0, rows_per_item, samplers, notes: Vec::new() }
    }

    /// `rows` blocks of text. Each token but the first is an output.
    pub(super) fn texts(&self, rows: usize) -> Vec<Row> {
        let text = Row { len: self.block, outputs: self.block.saturating_sub(1), ..Row::default() };
        vec![text; if self.block > 0 { rows } else { 0 }]
    }

    fn of_sft(config: &SftConfig, models: &Models) -> Result<Self> {
        let mut tokenizer = models.tokenizer()?;
        let is_encoder_decoder = models.policy().is_encoder_decoder();
        tokenizer.set_encoder_decoder(is_encoder_decoder);
        sft::set_up_tokenizer(&mut tokenizer, config)?;
        let max_length = max_row_length(config, models.policy())?;
        let options = learned(config, models.policy().vocab_size);
        let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        check_held_out(&config.eval, &sources, &config.data)?;
        let (train, _) = sources.read(config.run.seed, Stage::Sft)?;
        let mut lens = Vec::new();
        let mut blocks = Vec::new();
        for dataset in &train {
            let rows = dataset.demonstrations_with(&tokenizer.limited_to(max_length), &options)?;
            let (rows, _) = shorten(rows, max_length, &tokenizer, dataset.path())?;
            let dataset_blocks = into_blocks(rows, config.packing.then_some(max_length));
            lens.push(dataset_blocks.len());
            blocks.extend(dataset_blocks);
        }
        let batch = config.plan_for(blocks.len())?.batch_size;
        let rows = |block: usize| {
            let planned_row = |row: &data::Demonstration| Row {
                len: row.tokens.len(),
                // The decoder reads a start token, and not the last one.
                pair: is_encoder_decoder.then(|| [row.prompt_len, row.tokens.len().saturating_sub(row.prompt_len)]),
                outputs: row.tokens.len() - row.loss_start.min(row.tokens.len()),
                ..Row::default()
            };
            blocks[block].iter().map(planned_row).collect::<Vec<_>>()
        };
        Ok(Self::drawn(&lens, (config.run.seed, &config.data), batch, |blocks| {
            let mut rows: Vec<Row> = blocks.into_iter().flat_map(&rows).collect();
            rows.sort_by_key(|row| row.len);
            rows
        }))
    }

    fn of_reward(config: &RewardConfig, models: &Models) -> Result<Self> {
        let mut tokenizer = models.tokenizer()?;
        let shape = models.main.sizes.config();
        reward_model::set_up_tokenizer(&mut tokenizer, config)?;
        let max_length = config.max_length.unwrap_or(usize::MAX).min(models.context());
        let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        check_held_out(&config.eval, &sources, &config.data)?;
        let (train, _) = sources.read(config.run.seed, Stage::Reward)?;
        let (mut lens, mut pairs) = (Vec::new(), Vec::new());
        for dataset in &train {
            let (read, _) = leave_out_long(
                dataset.pairs(&tokenizer.limited_to(max_length), shape.causal)?,
                max_length,
                dataset.path(),
            )?;
            lens.push(read.len());
            pairs.extend(read);
        }
        let row = |pair: usize| {
            let pair: &data::Pair = &pairs[pair];
            (pair.chosen.len().max(pair.rejected.len()), pair.chosen.len() + pair.rejected.len())
        };
        let batch = config.plan_for(pairs.len())?.batch_size;
        Ok(Self::drawn(&lens, (config.run.seed, &config.data), batch, |rows| {
            let mut rows: Vec<(usize, usize)> = rows.into_iter().map(row).collect();
            rows.sort_by_key(|(longest, _)| *longest);
            let pair = shape.is_encoder_decoder();
            let planned_row = |len| Row { len, pair: pair.then_some([len, len]), outputs: 2, ..Row::default() };
            rows.into_iter().map(|(_, len)| planned_row(len)).collect()
        }))
    }

    fn of_dpo(config: &DpoConfig, models: &Models) -> Result<Self> {
        let mut tokenizer = models.tokenizer()?;
        let max_length = config.max_length.unwrap_or(usize::MAX).min(models.context());
        let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        check_held_out(&config.eval, &sources, &config.data)?;
        let shapes = [Some(models.policy()), models.reference_config()];
        let (pairs, lens) = planned_pairs(config, &mut tokenizer, &sources, max_length, shapes)?;
        let batch = config.plan_for(pairs.len())?.batch_size;
        let mut rows = Self::drawn(&lens, (config.run.seed, &config.data), batch, |drawn| {
            let mut drawn: Vec<&PairRow> = drawn.into_iter().map(|pair| &pairs[pair]).collect();
            drawn.sort_by_key(|pair| pair.tokens());
            let sides = |(group, pair): (usize, &PairRow)| {
                [0, 1].map(|side| Row {
                    prompt: pair.prompt(side).to_vec(),
                    len: pair.sides[side].len(),
                    outputs: pair.span(side).len(),
                    group,
                    ..Row::default()
                })
            };
            drawn.into_iter().enumerate().flat_map(sides).collect()
        });
        rows.rows_per_item = 2;
        if config.unsupervised.unsupervised_dataset_name.is_some() {
            rows.block = max_length;
            rows.notes.push(texts_note(rows.block));
        }
        if config.precompute_ref_log_probs {
            rows.notes.push(
                "precompute_ref_log_probs: the time of the reference model's passes before the first update is not planned".into(),
            );
        }
        if config.loss.loss_type.iter().any(|loss| loss.sorts()) {
            rows.notes.push(
                "a loss that sorts pairs: the time of its passes without gradients, where a micro-batch takes several passes or ranks, is not planned".into(),
            );
        }
        Ok(rows)
    }

    fn of_distillation(config: &DistillConfig, models: &Models) -> Result<Self> {
        let mut tokenizer = models.tokenizer()?;
        let sources = Sources::find(&config.data, config.eval_dataset_name.as_deref())?;
        check_held_out(&config.eval, &sources, &config.data)?;
        let shapes = [Some(models.policy()), models.reference_config()];
        let (rows, lens) = planned_rows(config, &mut tokenizer, &sources, shapes)?;
        let batch = config.plan_for(rows.len())?.batch_size;
        let planned_row = |row: &DistillRow| Row {
            prompt: row.prompt().to_vec(),
            len: row.tokens.len(),
            outputs: row.outputs(),
            ..Row::default()
        };
        let mut planned = Self::drawn(&lens, (config.run.seed, &config.data), batch, |drawn| {
            drawn.into_iter().map(|row| planned_row(&rows[row])).collect()
        });
        planned.samplers = samplers(config);
        for (update, sampler) in planned.updates.iter_mut().zip(&planned.samplers) {
            if sampler.is_some() {
                let new = config.max_completion_length;
                update.iter_mut().for_each(|row| (row.len, row.outputs) = (row.prompt.len() + new, new));
            }
            update.sort_by_key(|row| row.len);
        }
        if config.loss.loss_type == DistillLoss::Jsd {
            planned.notes.push(
                "the time of the divergences over the vocabulary is not planned, beside the logits of both models"
                    .into(),
            );
        }
        Ok(planned)
    }

    fn of_prompts(config: &PpoConfig, models: &Models) -> Result<Self> {
        let context_limit = prompt_limit(models.policy(), models.context(), config.response_length)?;
        let limit = PromptLimit::new(&config.prompt_length, context_limit)?;
        let (prompts, lens, notes) = match Sources::find(&config.data, config.eval_dataset_name.as_deref()) {
            Ok(sources) => {
                check_held_out(&config.eval, &sources, &config.data)?;
                let (prompts, lens) = read_prompts(&sources, config, models, limit)?;
                (prompts, lens, Vec::new())
            }
            Err(error) => {
                // Missing data are replaced by made-up prompts. An error in the settings is returned.
                let longest = config.prompt_length.max_prompt_length.filter(|_| !error.is_usage());
                let Some(longest) = longest else { return Err(error) };
                // No two of these prompts have a token in common.
                let prompts = (0..MOST_MADE as i64).map(|row| vec![-row - 1; longest]).collect::<Vec<_>>();
                let note = format!("each prompt is taken to have max_prompt_length = {longest} tokens: {error}");
                (prompts, Vec::new(), vec![note])
            }
        };
        let read = !lens.is_empty();
        let lens = if read { lens } else { vec![prompts.len()] };
        let plan = config.plan_for(lens.iter().sum())?;
        let size = config.advantage.num_generations;
        let response = config.response_length;
        let is_encoder_decoder = models.policy().is_encoder_decoder();
        let rows = |drawn: Vec<usize>| -> Vec<Row> {
            let planned_row = |(group, prompt): (usize, usize)| Row {
                prompt: prompts[prompt].clone(),
                len: prompts[prompt].len() + response,
                // The decoder reads a start token before the response.
                pair: is_encoder_decoder.then(|| [prompts[prompt].len(), response + 1]),
                outputs: response,
                group,
            };
            let groups = drawn.into_iter().enumerate().map(planned_row);
            groups.flat_map(|row| std::iter::repeat_n(row, size)).collect()
        };
        let mut drawn = Self::drawn(&lens, (config.run.seed, &config.data), plan.prompts, rows);
        drawn.available = read.then_some(drawn.available).flatten();
        drawn.notes = notes;
        if config.unsupervised.unsupervised_dataset_name.is_some() {
            drawn.block = limit.max_length() + response;
            drawn.notes.push(texts_note(drawn.block));
        }
        Ok(drawn)
    }

    /// Draws the first updates of `batch` items each, in the same order as the run will. `rows` returns the rows of the items with the
    /// indices that it gets.
    fn drawn(
        lens: &[usize],
        (seed, data): (u64, &DataConfig),
        batch: usize,
        rows: impl Fn(Vec<usize>) -> Vec<Row>,
    ) -> Self {
        let mut cursor = Cursor::mixture(seed, lens, &data.dataset_weights);
        let updates = (0..UPDATES).map(|_| rows(cursor.take(batch))).collect();
        let available = Some(lens.iter().sum());
        Self { updates, available, block: 0, rows_per_item: 1, samplers: Vec::new(), notes: Vec::new() }
    }

    /// The number of tokens of the longest row or pair. With `shares`, the common first tokens of a pair count once.
    pub(super) fn longest(&self, shares: bool) -> usize {
        let items = self.updates.iter().flat_map(|update| update.chunks(self.rows_per_item));
        items.map(|item| item_tokens(&item.iter().collect::<Vec<_>>(), shares)).max().unwrap_or(0)
    }

    /// The longest prompt of the drawn rows.
    pub(super) fn longest_prompt(&self) -> usize {
        self.updates.iter().flatten().map(|row| row.prompt.len()).max().unwrap_or(0)
    }
}

/// The model that samples the responses of each of the first updates, drawn as in the run. If the run has two kinds of responses and these
/// updates have only one of them, the last update stands for the other kind.
fn samplers(config: &DistillConfig) -> Vec<Option<Role>> {
    let role = |source: Source| match source {
        Source::Rows => None,
        Source::Student => Some(Role::Model),
        Source::Teacher => Some(Role::Teacher),
    };
    let mut all: Vec<Option<Role>> =
        (0..UPDATES as u64).map(|update| role(Source::of_update(config, update))).collect();
    let kinds = Source::of_run(config).into_iter().map(role);
    let missing: Vec<Option<Role>> = kinds.filter(|kind| !all.contains(kind)).collect();
    if let (Some(kind), Some(last)) = (missing.first(), all.last_mut()) {
        *last = *kind;
    }
    all
}

fn texts_note(block: usize) -> String {
    format!("unsupervised_dataset_name: its texts are taken to fill blocks of {block} tokens")
}

/// Number of made-up prompts that replace prompts that cannot be read.
const MOST_MADE: usize = 256;

/// Reads the prompts of the run, and their number in each dataset.
fn read_prompts(
    sources: &Sources<'_>,
    config: &PpoConfig,
    models: &Models,
    limit: PromptLimit,
) -> Result<(Vec<Vec<i64>>, Vec<usize>)> {
    let mut tokenizer: Tokenizer = models.tokenizer()?;
    tokenizer.set_encoder_decoder(models.policy().is_encoder_decoder());
    tokenizer.set_chat_variables(config.data.chat_template.variables());
    let vocab = models.main.sizes.config().vocab_size;
    let (mut train, _) = sources.read(config.run.seed, Stage::Ppo)?;
    if config.apply_chat_template {
        train = train.into_iter().map(Dataset::with_chat_prompts).collect();
    }
    if let Some(system) = &config.system_prompt {
        train = train.into_iter().map(|train| train.with_system_prompt(system)).collect();
    }
    let (mut lens, mut prompts) = (Vec::new(), Vec::new());
    for dataset in &train {
        let (read, _) = dataset.prompts_within(&tokenizer, vocab, limit)?;
        lens.push(read.len());
        prompts.extend(read.into_iter().map(|prompt| prompt.tokens));
    }
    Ok((prompts, lens))
}

/// The limits of a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) rows: usize,
    pub(super) tokens: usize,
    /// First tokens that rows have in common are computed once.
    pub(super) shares: bool,
    /// Number of adjacent rows that are never split over two passes. `rows` counts such groups of rows.
    pub(super) rows_per_item: usize,
}

/// The passes over a part of `rows`, in the order of their groups.
pub(super) fn passes(rows: &[Row], limits: Limits) -> Vec<PassTokens> {
    let mut order: Vec<&Row> = rows.iter().collect();
    order.sort_by_key(|row| row.group);
    let (shared, size) = (shared_tokens(&order, limits.shares), limits.rows_per_item);
    let items: Vec<&[&Row]> = order.chunks(size).collect();
    let places: Vec<usize> = (0..items.len()).collect();
    let tokens = |&at: &usize| (item_tokens(items[at], limits.shares), if size == 1 { shared[at] } else { 0 });
    let parts = micro_batches(&places, limits.rows, limits.tokens, tokens);
    parts.into_iter().map(|part| pass_tokens(&items[part[0]..part[0] + part.len()].concat(), limits.shares)).collect()
}

/// The number of tokens of rows that are never split over two passes.
fn item_tokens(item: &[&Row], shares: bool) -> usize {
    let shared: usize = shared_tokens(item, shares && item.len() > 1).iter().sum();
    item.iter().map(|row| row.len).sum::<usize>() - shared
}

/// The tokens of a pass over `rows`.
pub(super) fn pass_tokens(rows: &[&Row], shares: bool) -> PassTokens {
    let outputs = rows.iter().map(|row| row.outputs).sum();
    let attended: usize = rows.iter().map(|row| row.read()[1]).sum();
    let in_rows = [rows.len(), rows.iter().map(|row| row.read()[1]).max().unwrap_or(0)];
    if rows.iter().all(|row| row.pair.is_none()) {
        let shared: usize = shared_tokens(rows, shares).iter().sum();
        let source = SourceTokens::default();
        return PassTokens { computed: attended - shared, attended, outputs, rows: in_rows, source };
    }
    let different: Vec<usize> = (0..rows.len()).filter(|&at| reads(rows, at)).map(|at| rows[at].read()[0]).collect();
    let padded = |count: usize, lens: &mut dyn Iterator<Item = usize>| count * lens.max().unwrap_or(0).pow(2);
    let source = SourceTokens {
        computed: different.iter().sum(),
        attended: rows.iter().map(|row| row.read()[0]).sum(),
        scores: [
            padded(different.len(), &mut different.iter().copied()),
            padded(rows.len(), &mut rows.iter().map(|row| row.read()[1])),
        ],
    };
    PassTokens { computed: attended, attended, outputs, rows: in_rows, source }
}

/// Whether an encoder reads the prompt of row `at`: equal prompts, one after another, are read once.
pub(super) fn reads(rows: &[&Row], at: usize) -> bool {
    let prompt = &rows[at].prompt;
    rows[at].pair.is_some() && (at == 0 || prompt.is_empty() || rows[at - 1].prompt != *prompt)
}

/// Number of first tokens that each row has in common with the row before it.
fn shared_tokens(rows: &[&Row], shares: bool) -> Vec<usize> {
    let tokens = rows.iter().map(|row| row.len).sum();
    let shared = if shares { shared_lens(rows.iter().map(|row| &row.prompt[..]), tokens) } else { None };
    shared.unwrap_or_else(|| vec![0; rows.len()])
}

/// The parts of `rows` of the ranks, divided as in a run: parts of about equal numbers of tokens, made of whole items of `size` rows. Ranks
/// without rows are left out.
pub(super) fn shares(rows: &[Row], ranks: usize, size: usize) -> Vec<&[Row]> {
    let items: Vec<usize> = rows.chunks(size).map(|item| item.iter().map(|row| row.len).sum()).collect();
    let part_rows = |part: Range<usize>| &rows[part.start * size..(part.end * size).min(rows.len())];
    shares_by(&items, ranks.max(1)).into_iter().filter(|part| !part.is_empty()).map(part_rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_parts_of_about_as_many_tokens_and_items_stay_whole() {
        let rows: Vec<Row> = [1, 1, 2, 2, 3, 3, 6, 6].map(|len| Row { len, ..Row::default() }).into();
        let lens = |ranks, size| -> Vec<Vec<usize>> {
            shares(&rows, ranks, size).into_iter().map(|part| part.iter().map(|row| row.len).collect()).collect()
        };
        assert_eq!(lens(1, 1), [[1, 1, 2, 2, 3, 3, 6, 6]]);
        assert_eq!(lens(2, 1), [vec![1, 1, 2, 2, 3, 3], vec![6, 6]]);
        assert_eq!(lens(4, 2).concat(), [1, 1, 2, 2, 3, 3, 6, 6]);
        assert!(lens(4, 2).iter().all(|part| part.len().is_multiple_of(2)));
        // More ranks than rows, and rows that were not read.
        assert_eq!(lens(100, 1).len(), 8);
        assert_eq!(shares(&[Row::default()], 2, 1).len(), 1);
    }
}
