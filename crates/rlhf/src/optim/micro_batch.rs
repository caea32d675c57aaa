//! Micro-batches: how many tokens go through a model at once.

use crate::device::memory;
use crate::model::Param;

/// Memory that activations may always take, in bytes.
const LEAST_ACTIVATIONS: usize = 128 << 20;

/// Most tokens in one forward and backward pass of a model with these parameters: `max_tokens` if it is set, else as many as keep
/// the activations, `activation_bytes` per token, small beside the rest of training: half of the weights' bytes, at most an
/// eighth of the memory.
///
/// More tokens spread the cost of adding to every weight's gradient over more work, with diminishing returns.
pub(crate) fn micro_batch_tokens(
    max_tokens: Option<usize>,
    device: tch::Device,
    params: &[Param],
    activation_bytes: usize,
) -> usize {
    let weights: usize = params.iter().map(|param| param.tensor.numel() * 4).sum();
    max_tokens.unwrap_or_else(|| match memory(device) {
        Some(bytes) => (LEAST_ACTIVATIONS.max(weights / 2).min(bytes / 8) / activation_bytes.max(1)).clamp(256, 2048),
        None => 16384,
    })
}

/// Divides `rows` into micro-batches of at most `most_rows` rows, and these into about equal parts where they have more than
/// `most_tokens` tokens; a row with more tokens is a part by itself.
pub(crate) fn micro_batches<T>(
    rows: &[T],
    most_rows: usize,
    most_tokens: usize,
    tokens: impl Fn(&T) -> usize,
) -> Vec<&[T]> {
    let mut parts = Vec::new();
    for chunk in rows.chunks(most_rows) {
        let total: usize = chunk.iter().map(&tokens).sum();
        let share = total.div_ceil(total.div_ceil(most_tokens).max(1));
        let (mut from, mut held) = (0, 0);
        for (at, row) in chunk.iter().enumerate() {
            let more = tokens(row);
            if at > from && (held + more > most_tokens || held >= share) {
                parts.push(&chunk[from..at]);
                (from, held) = (at, 0);
            }
            held += more;
        }
        parts.push(&chunk[from..]);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_keep_all_rows_in_order_within_both_bounds() {
        let lens = [5, 5, 5, 5, 30, 1, 1, 1, 1, 1, 9];
        for (most_rows, most_tokens) in [(1, 100), (3, 100), (100, 100), (100, 10), (4, 12), (100, 1)] {
            let parts = micro_batches(&lens, most_rows, most_tokens, |&len| len);
            assert_eq!(parts.concat(), lens);
            for part in parts {
                let total: usize = part.iter().sum();
                assert!(part.len() <= most_rows && (total <= most_tokens || part.len() == 1), "{part:?}");
            }
        }
        // About equal: 40 tokens at most 30 at once are 20 and 20, not 30 and 10.
        assert_eq!(micro_batches(&[10; 4], 4, 30, |&len| len), [&[10; 2], &[10; 2]]);
    }
}
