//! The order of rows in training.

use rlhf_base::rng::{Purpose, Stream};
use rlhf_base::{Error, Result};
use serde::{Deserialize, Serialize};

/// Samples row indices in shuffled passes: each row once per pass, in an order that depends only on the seed and the pass.
///
/// A batch that a pass cannot fill continues with the next pass: no row is dropped. Datasets with weights have separate
/// passes, and each draw takes the next row of one dataset.
///
/// ```
/// use rlhf::data::Cursor;
///
/// let mut cursor = Cursor::new(42, 4);
/// let mut pass = [cursor.take(2), cursor.take(2)].concat();
/// pass.sort();
/// assert_eq!(pass, [0, 1, 2, 3]);
/// ```
#[derive(Debug, Clone)]
pub struct Cursor {
    seed: u64,
    sources: Vec<Passes>,
    /// Cumulative sampling probabilities of the sources.
    ends: Vec<f64>,
    taken: usize,
}

/// The state of a [`Cursor`] in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CursorState {
    /// Rows taken so far.
    pub taken: usize,
    /// Rows of each dataset.
    rows: Vec<usize>,
}

/// Shuffled passes over one dataset.
#[derive(Debug, Clone)]
struct Passes {
    /// Index of the dataset's first row among all rows.
    first: usize,
    len: usize,
    taken: usize,
    /// The current pass and the order of its rows.
    order: Option<(usize, Vec<usize>)>,
}

impl Cursor {
    /// Creates a cursor at the start of the first pass over `len` rows.
    ///
    /// # Panics
    /// If there are no rows.
    pub fn new(seed: u64, len: usize) -> Self {
        Self::mixture(seed, &[len], &[])
    }

    /// Creates a cursor over several datasets with `lens` rows each; row indices count through all of them. Each draw selects a
    /// dataset with a probability proportional to its weight. Without `weights`, all rows are shuffled together.
    ///
    /// # Panics
    /// If a dataset has no rows, or `weights` is neither empty nor one weight above 0 per dataset.
    pub fn mixture(seed: u64, lens: &[usize], weights: &[f64]) -> Self {
        let all = [lens.iter().sum()];
        let sum = weights.iter().sum::<f64>();
        let (lens, weights) = if weights.is_empty() { (&all[..], &[1.0][..]) } else { (lens, weights) };
        assert!(lens.iter().all(|&len| len > 0), "a cursor needs rows");
        assert!(lens.len() == weights.len() && weights.iter().all(|&w| w > 0.0), "a weight above 0 for each dataset");
        let sum = if sum > 0.0 { sum } else { 1.0 };
        let (mut first, mut end) = (0, 0.0);
        let mut cursor = Self { seed, sources: Vec::new(), ends: Vec::new(), taken: 0 };
        for (&len, &weight) in lens.iter().zip(weights) {
            end += weight / sum;
            cursor.sources.push(Passes { first, len, taken: 0, order: None });
            cursor.ends.push(end);
            first += len;
        }
        cursor
    }

    /// Returns the next `count` rows.
    pub fn take(&mut self, count: usize) -> Vec<usize> {
        (0..count).map(|_| self.next()).collect()
    }

    fn next(&mut self) -> usize {
        let at = self.source_index(self.taken);
        self.taken += 1;
        let source = &mut self.sources[at];
        let pass = source.taken / source.len;
        let place = source.taken % source.len;
        source.taken += 1;
        if source.order.as_ref().is_none_or(|(known, _)| *known != pass) {
            let mut stream = Stream::new(self.seed, Purpose::DataOrder, pass as u64, at as u64);
            source.order = Some((pass, stream.permutation(source.len)));
        }
        source.first + source.order.as_ref().map_or(0, |(_, order)| order[place])
    }

    /// Returns the index of the dataset that the draw with the index `draw` takes a row from.
    fn source_index(&self, draw: usize) -> usize {
        if self.sources.len() == 1 {
            return 0;
        }
        let point = Stream::new(self.seed, Purpose::Mixture, draw as u64, 0).uniform();
        // Because of rounding the last sum may be below 1.
        self.ends.iter().position(|&end| point < end).unwrap_or(self.ends.len() - 1)
    }

    /// Number of rows taken so far. Together with the seed it determines the cursor's state.
    pub fn taken(&self) -> usize {
        self.taken
    }

    fn lens(&self) -> Vec<usize> {
        self.sources.iter().map(|source| source.len).collect()
    }

    /// Returns the state for a checkpoint.
    pub fn state(&self) -> CursorState {
        CursorState { taken: self.taken, rows: self.lens() }
    }

    /// Restores the state that [`Cursor::state`] returned; `may_differ`: the number of rows may have changed.
    ///
    /// # Errors
    /// If a number of rows differs, and may not: the data have changed.
    pub fn load_state(&mut self, state: &CursorState, may_differ: bool) -> Result<()> {
        let lens = self.lens();
        if state.rows != lens && !may_differ {
            let sum = |rows: &[usize]| rows.iter().map(usize::to_string).collect::<Vec<_>>().join(" + ");
            let expected = sum(&state.rows);
            let found = sum(&lens);
            return Err(Error::Run(format!(
                "expected the {expected} rows of data that the run started with, found {found}"
            )));
        }
        self.restore(state.taken);
        Ok(())
    }

    /// Moves to the state of a cursor with the same seed, lengths and weights after `taken` rows.
    pub fn restore(&mut self, taken: usize) {
        self.taken = taken;
        if let [only] = self.sources.as_mut_slice() {
            only.taken = taken;
            return;
        }
        self.sources.iter_mut().for_each(|source| source.taken = 0);
        for draw in 0..taken {
            let at = self.source_index(draw);
            self.sources[at].taken += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_taken_once_per_pass_and_batches_continue_with_the_next_pass() {
        let mut cursor = Cursor::new(3, 5);
        let taken: Vec<usize> = (0..5).flat_map(|_| cursor.take(3)).collect();
        for pass in taken.chunks(5) {
            let mut sorted = pass.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4]);
        }
        assert_ne!(taken[..5], taken[5..10], "passes are shuffled anew");
        assert_eq!(Cursor::new(3, 5).take(15), taken, "the order does not depend on the batch size");
        assert_ne!(Cursor::new(4, 5).take(15), taken, "the order depends on the seed");
        let first_pass = Stream::new(3, Purpose::DataOrder, 0, 0).permutation(5);
        assert_eq!(taken[..5], first_pass, "the order depends on seed and pass only");
    }

    #[test]
    fn a_mixture_samples_datasets_by_weight_with_separate_passes() {
        let mut cursor = Cursor::mixture(7, &[10, 400, 3], &[7.0, 2.0, 1.0]);
        let taken = cursor.take(20_000);
        let within = |range: std::ops::Range<usize>| taken.iter().copied().filter(move |row| range.contains(row));
        for (range, share) in [(0..10, 0.7), (10..410, 0.2), (410..413, 0.1)] {
            // Four standard deviations of the binomial distribution.
            let bound = 4.0 * (share * (1.0 - share) / 20_000f64).sqrt();
            let found = within(range.clone()).count() as f64 / 20_000.0;
            assert!((found - share).abs() < bound, "{range:?}: {found}");
            for pass in within(range.clone()).collect::<Vec<_>>().chunks_exact(range.len()) {
                let mut sorted = pass.to_vec();
                sorted.sort_unstable();
                assert_eq!(sorted, Vec::from_iter(range.clone()));
            }
        }
        assert_eq!(Cursor::mixture(7, &[10, 400, 3], &[70.0, 20.0, 10.0]).take(20_000), taken, "weights are relative");
        assert_ne!(Cursor::mixture(8, &[10, 400, 3], &[7.0, 2.0, 1.0]).take(20_000), taken);
    }

    #[test]
    fn without_weights_the_rows_of_all_datasets_are_shuffled_together() {
        assert_eq!(Cursor::mixture(1, &[2, 3], &[]).take(10), Cursor::new(1, 5).take(10));
    }

    #[test]
    fn a_restored_cursor_continues_as_if_it_had_never_stopped() {
        for (lens, weights) in [(&[7][..], &[][..]), (&[4, 9, 2], &[0.5, 0.2, 0.3]), (&[5], &[2.0])] {
            let whole = Cursor::mixture(5, lens, weights).take(60);
            for stop in 0..40 {
                let mut cursor = Cursor::mixture(5, lens, weights);
                cursor.restore(stop);
                assert_eq!(cursor.taken(), stop);
                let state = cursor.state();
                assert_eq!(cursor.take(20), whole[stop..stop + 20], "{lens:?} from {stop}");
                cursor.load_state(&state, false).unwrap();
                assert_eq!(cursor.take(3), whole[stop..stop + 3]);
                // Backwards too, and from the middle of a pass.
                cursor.restore(stop / 2);
                assert_eq!(cursor.take(9), whole[stop / 2..stop / 2 + 9]);
            }
        }
        let other = Cursor::new(5, 8).load_state(&Cursor::new(5, 7).state(), false).unwrap_err().to_string();
        assert_eq!(other, "expected the 7 rows of data that the run started with, found 8");
    }
}
