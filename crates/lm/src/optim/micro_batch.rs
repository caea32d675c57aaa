//! Micro-batches: how many tokens go through a model at once.

use crate::model::Param;
use rlhf_base::device::memory;
use rlhf_base::schema::{ByteSize, Setting};
use serde::{Deserialize, Serialize};
use std::fmt::{Display, Formatter};

/// Memory that activations may always take, in bytes.
const LEAST_ACTIVATIONS: usize = 128 << 20;
/// Number of tokens in a pass beyond which more gain little: their arithmetic then hides reading the weights and adding to their gradients.
const ENOUGH_TOKENS: usize = 1024;

/// The most tokens of a micro-batch on a GPU: more gain nothing.
const MOST_GPU_TOKENS: usize = 16384;
/// Tokens of a micro-batch on a GPU whose memory is not known.
const UNKNOWN_GPU_TOKENS: usize = 2048;
/// Part of a GPU's memory that the activations of a micro-batch may take. The rest is for weights, gradients, moments and the cache.
const GPU_PART: usize = 4;

/// Most of one forward and backward pass: tokens, or memory of their activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MicroBatchLimit {
    /// Tokens, prompts included.
    Tokens(usize),
    /// Bytes that the activations of the tokens take, by the arithmetic of `rlhf plan`.
    Memory(ByteSize),
}

impl MicroBatchLimit {
    /// Returns the number of tokens, at least one, where each takes `activation_bytes`.
    pub fn tokens(self, activation_bytes: usize) -> usize {
        match self {
            Self::Tokens(tokens) => tokens,
            Self::Memory(ByteSize(bytes)) => (bytes / activation_bytes.max(1)).max(1),
        }
    }
}

impl Display for MicroBatchLimit {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tokens(tokens) => tokens.fmt(f),
            Self::Memory(size) => {
                // A number without a unit would be one of tokens.
                let text = size.to_string();
                let unit = if text.ends_with(|last: char| last.is_ascii_digit()) { "B" } else { "" };
                write!(f, "{text}{unit}")
            }
        }
    }
}

impl Serialize for MicroBatchLimit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Tokens(tokens) => tokens.serialize(serializer),
            Self::Memory(_) => serializer.collect_str(self),
        }
    }
}

impl Setting for MicroBatchLimit {
    const NAME: &'static str = "N|SIZE";
    const EXPECTED: &'static str = "a number of tokens, such as 2048, or the memory of their activations, such as 4GB";

    fn read(text: &str) -> Option<Self> {
        let is_digit = |last: char| last.is_ascii_digit();
        let bytes = text.strip_suffix(['B', 'b']).filter(|number| number.ends_with(is_digit));
        match bytes {
            None if text.ends_with(is_digit) => text.parse().ok().map(Self::Tokens),
            _ => ByteSize::read(bytes.unwrap_or(text)).map(Self::Memory),
        }
    }
}

/// The most tokens in one forward and backward pass of a model with these parameters: `limit` if it is set. Else, on a CPU, as many as keep
/// the activations, `activation_bytes` per token, small beside the rest of training: half of the weights' bytes, or twice of them for up
/// to 1024 tokens, at most an eighth of the memory. On a GPU, as many as take a quarter of its memory, at most 16384; 2048 if its memory is not known.
///
/// More tokens spread the cost of adding to every weight's gradient over more work, with diminishing returns. The number changes results by
/// rounding only, since losses are divided by the counts of the whole mini-batch.
pub fn micro_batch_tokens(
    limit: Option<MicroBatchLimit>,
    device: tch::Device,
    params: &[Param],
    activation_bytes: usize,
) -> usize {
    let parameters = params.iter().map(Param::numel).sum();
    let default = || default_tokens(device, memory(device), parameters, activation_bytes);
    limit.map_or_else(default, |limit| limit.tokens(activation_bytes))
}

/// [`micro_batch_tokens`] without a limit in the settings, for a model with this number of parameters on `device`, which has `memory` bytes
/// per rank, if that is known.
pub fn default_tokens(device: tch::Device, memory: Option<usize>, parameters: usize, activation_bytes: usize) -> usize {
    let weights = parameters * 4;
    let bytes = activation_bytes.max(1);
    match (device, memory) {
        (tch::Device::Cpu, Some(memory)) => {
            let tokens = |most: usize| LEAST_ACTIVATIONS.max(most).min(memory / 8) / bytes;
            tokens(weights / 2).max(tokens(2 * weights).min(ENOUGH_TOKENS)).clamp(256, 2048)
        }
        (_, None) => UNKNOWN_GPU_TOKENS,
        (_, Some(memory)) => (memory / GPU_PART / bytes).clamp(256, MOST_GPU_TOKENS),
    }
}

/// Settings that limit the tokens of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct MicroBatchSettings {
    /// The limit that the user set.
    pub limit: Option<MicroBatchLimit>,
    /// Whether layers are computed again in the backward pass.
    pub gradient_checkpointing: bool,
}

/// The size of a run's micro-batches in a checkpoint, with everything it depends on except the machine's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MicroBatchState {
    /// Most tokens of a micro-batch.
    pub tokens: usize,
    device: String,
    gradient_checkpointing: bool,
    /// Whether the settings have a limit.
    set: bool,
}

impl MicroBatchSettings {
    /// Returns [`micro_batch_tokens`] of these settings; `activation_bytes` returns the activation bytes per token, with gradient
    /// checkpointing and without.
    pub fn max_tokens(self, device: tch::Device, params: &[Param], activation_bytes: impl Fn(bool) -> usize) -> usize {
        micro_batch_tokens(self.limit, device, params, activation_bytes(self.gradient_checkpointing))
    }

    /// Returns the number of tokens that a run was started with, from its `saved` [state](Self::state), if only the machine's
    /// memory can have changed it to `tokens`; else `tokens`. The micro-batches decide how sums are rounded.
    pub fn resumed_tokens(self, device: tch::Device, tokens: usize, saved: &MicroBatchState) -> usize {
        let is_kept = self.limit.is_none() && self.state(device, saved.tokens) == *saved;
        if is_kept { saved.tokens } else { tokens }
    }

    /// Returns the most tokens of a micro-batch, with everything the number depends on except the machine's memory.
    pub fn state(self, device: tch::Device, tokens: usize) -> MicroBatchState {
        MicroBatchState {
            tokens,
            // The GPU's index differs between ranks.
            device: if device.is_cuda() { "Cuda".into() } else { format!("{device:?}") },
            gradient_checkpointing: self.gradient_checkpointing,
            set: self.limit.is_some(),
        }
    }

    /// Returns a description of the memory that a micro-batch of `tokens` tokens takes.
    pub fn describe(self, tokens: usize, activation_bytes: impl Fn(bool) -> usize) -> String {
        let mib = |checkpointing| (tokens * activation_bytes(checkpointing)).div_ceil(1 << 20);
        let without = if self.gradient_checkpointing {
            format!(" ({} MiB without gradient_checkpointing)", mib(false))
        } else {
            String::new()
        };
        let taken = mib(self.gradient_checkpointing);
        format!("at most {tokens} tokens, whose activations take about {taken} MiB{without}")
    }
}

/// Divides `rows` into micro-batches of at most `most_rows` rows, and these into about equal parts if they have more than `most_tokens`
/// tokens; a row with more tokens is a part by itself. `tokens` returns the number of tokens of a row, and how many of them are not
/// computed again if the row before is in the same part.
pub fn micro_batches<T>(
    rows: &[T],
    most_rows: usize,
    most_tokens: usize,
    tokens: impl Fn(&T) -> (usize, usize),
) -> Vec<&[T]> {
    let row_tokens = |row: &T, is_first: bool| {
        let (all, shared) = tokens(row);
        if is_first { all } else { all - shared }
    };
    let mut parts = Vec::new();
    for chunk in rows.chunks(most_rows) {
        let total: usize = chunk.iter().enumerate().map(|(at, row)| row_tokens(row, at == 0)).sum();
        let share = total.div_ceil(total.div_ceil(most_tokens).max(1));
        let (mut from, mut count) = (0, 0);
        for (at, row) in chunk.iter().enumerate() {
            if at > from && (count + row_tokens(row, false) > most_tokens || count >= share) {
                parts.push(&chunk[from..at]);
                (from, count) = (at, 0);
            }
            count += row_tokens(row, at == from);
        }
        parts.push(&chunk[from..]);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_of_the_default_micro_batch_fit_beside_the_rest() {
        let (cpu, gpu, gib) = (tch::Device::Cpu, tch::Device::Cuda(0), 1 << 30);
        // As a 7B model in bf16 on a GPU of 80 GB: a quarter of it.
        let tokens = default_tokens(gpu, Some(75 * gib), 7_000_000_000, 5_600_000);
        assert!((3000..4000).contains(&tokens) && tokens * 5_600_000 <= 75 * gib / 4, "{tokens}");
        assert_eq!(default_tokens(gpu, Some(75 * gib), 100_000_000, 200_000), 16384);
        assert_eq!(default_tokens(gpu, Some(gib), 7_000_000_000, 5_600_000), 256);
        assert_eq!(default_tokens(gpu, None, 7_000_000_000, 5_600_000), 2048);
        assert_eq!(default_tokens(cpu, Some(16 * gib), 135_000_000, 1_000_000), 1024);
        assert_eq!(default_tokens(cpu, Some(gib), 135_000_000, 1_000_000), 256);
    }

    #[test]
    fn a_limit_is_a_number_of_tokens_or_the_memory_that_they_take() {
        let tokens = |text| MicroBatchLimit::read(text).map(|limit| limit.tokens(1 << 20));
        for (text, expected) in [("2048", 2048), ("0", 0), ("2GiB", 2048), ("1.5 MiB", 1), ("10mb", 9), ("1B", 1)] {
            assert_eq!(tokens(text), Some(expected), "{text}");
        }
        for text in ["", "-1", "1.5", "0GB", "many", "GB", "2GiBs"] {
            assert_eq!(MicroBatchLimit::read(text), None, "{text}");
        }
        for text in ["2048", "2GB", "1234567B"] {
            assert_eq!(MicroBatchLimit::read(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_resumed_run_keeps_the_size_of_its_micro_batches_where_only_memory_can_differ() {
        let (settings, cpu) = (MicroBatchSettings { limit: None, gradient_checkpointing: false }, tch::Device::Cpu);
        let saved = settings.state(cpu, 300);
        assert_eq!(settings.resumed_tokens(cpu, 400, &saved), 300);
        assert_eq!(settings.resumed_tokens(tch::Device::Cuda(0), 400, &saved), 400);
        for other in [
            MicroBatchSettings { gradient_checkpointing: true, ..settings },
            MicroBatchSettings { limit: Some(MicroBatchLimit::Tokens(400)), ..settings },
        ] {
            assert_eq!(other.resumed_tokens(cpu, 400, &saved), 400);
        }
    }

    #[test]
    fn micro_batches_keep_all_rows_in_order_within_both_bounds() {
        let lens = [5, 5, 5, 5, 30, 1, 1, 1, 1, 1, 9];
        for (most_rows, most_tokens) in [(1, 100), (3, 100), (100, 100), (100, 10), (4, 12), (100, 1)] {
            let parts = micro_batches(&lens, most_rows, most_tokens, |&len| (len, 0));
            assert_eq!(parts.concat(), lens);
            for part in parts {
                let total: usize = part.iter().sum();
                assert!(part.len() <= most_rows && (total <= most_tokens || part.len() == 1), "{part:?}");
            }
        }
        // About equal: 40 tokens at most 30 at once are 20 and 20, not 30 and 10.
        assert_eq!(micro_batches(&[10; 4], 4, 30, |&len| (len, 0)), [&[10; 2], &[10; 2]]);
    }
}
