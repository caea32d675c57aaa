//! States of decoded rows, in layers that have a state in place of keys and values.
//!
//! A state sums up all tokens of its row. A step adds one token to it, in place, so that a recorded graph can do the same again. [`States::hold`]
//! makes the next step compute the last token of a row again and leave its state as it is. An appended part continues the states of some rows.

use rlhf_base::Result;
use tch::{Device, Kind, Tensor};
use tch_ext::on_device;

/// Sizes of the state of one row in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StateShape {
    /// Number of the last inputs of the convolution, and their width.
    pub(super) conv: [i64; 2],
    /// Heads of the delta rule, width of their keys and of their values.
    pub(super) memory: Option<[i64; 3]>,
}

/// The state of each row in a layer.
#[derive(Debug)]
pub(super) struct State {
    /// The last inputs of the convolution, oldest first and 0 before the start of a row, `[rows, kernel, width]` in the dtype of products.
    pub(super) conv: Tensor,
    /// The matrices of the delta rule, `[rows, heads, key width, value width]` f32.
    pub(super) memory: Option<Tensor>,
}

impl State {
    fn tensors(&mut self) -> impl Iterator<Item = &mut Tensor> {
        std::iter::once(&mut self.conv).chain(&mut self.memory)
    }

    /// The states of the rows at `rows` `[rows]` i64.
    pub(super) fn select_rows(&self, rows: &Tensor) -> Self {
        let select = |x: &Tensor| x.index_select(0, rows);
        Self { conv: select(&self.conv), memory: self.memory.as_ref().map(select) }
    }

    /// Replaces the states of the rows at `rows` `[rows]` i64 by those of all rows of `other`.
    pub(super) fn replace_rows(&mut self, rows: &Tensor, other: &Self) {
        let _ = self.conv.index_copy_(0, rows, &other.conv.to_kind(self.conv.kind()));
        if let (Some(memory), Some(new)) = (&mut self.memory, &other.memory) {
            let _ = memory.index_copy_(0, rows, new);
        }
    }

    /// Replaces the states of all rows, in place.
    pub(super) fn replace(&mut self, conv: &Tensor, memory: Option<&Tensor>) {
        self.conv.copy_(conv);
        if let (Some(old), Some(new)) = (&mut self.memory, memory) {
            old.copy_(new);
        }
    }
}

/// Tokens that are appended to rows of a cache.
#[derive(Debug)]
pub(super) struct AppendedRows {
    /// The rows, `[rows]` i64.
    pub(super) rows: Tensor,
    /// Number of tokens in each.
    pub(super) counts: Vec<i64>,
}

/// The states of all layers of a cache.
#[derive(Debug, Default)]
pub(super) struct States {
    /// `None` in layers with keys and values.
    layers: Vec<Option<State>>,
    /// 1 for rows whose state the next step changes, else 0, `[rows, 1]` f32; `None` until a row was held for the first time.
    active: Option<Tensor>,
    /// Whether the next step leaves the state of a row as it is.
    holds: bool,
}

impl States {
    /// States of rows without tokens.
    pub(super) fn new(layers: &[Option<StateShape>], rows: i64, (kind, device): (Kind, Device)) -> Result<Self> {
        let zeros = |shape: &StateShape| {
            let [kernel, width] = shape.conv;
            let conv = Tensor::f_zeros([rows, kernel, width], (kind, device))?;
            let memory = shape
                .memory
                .map(|[heads, keys, values]| Tensor::f_zeros([rows, heads, keys, values], (Kind::Float, device)));
            Ok(State { conv, memory: memory.transpose()? })
        };
        let layers = layers.iter().map(|shape| shape.as_ref().map(zeros).transpose()).collect::<Result<_>>()?;
        Ok(Self { layers, active: None, holds: false })
    }

    /// The states of the rows in `layer`, and the rows that the next step changes.
    pub(super) fn layer(&mut self, layer: usize) -> (&mut State, Option<&Tensor>) {
        (self.layers[layer].as_mut().expect("the layer has a state"), self.active.as_ref())
    }

    /// Whether a layer has a state.
    pub(super) fn has_any(&self) -> bool {
        self.layers.iter().any(Option::is_some)
    }

    /// Makes the next step leave the states of `rows`, out of `count`, as they are: it computes their last token again. Returns whether steps
    /// do different work from now on, so that a recorded step no longer fits.
    pub(super) fn hold(&mut self, rows: &[usize], count: usize, device: Device) -> bool {
        if !self.has_any() {
            return false;
        }
        let mut active = vec![1f32; count];
        rows.iter().for_each(|&row| active[row] = 0.0);
        let active = on_device(&active, device).unsqueeze(1);
        let is_new = self.active.is_none();
        // In place: a graph reads this tensor.
        self.active.get_or_insert_with(|| active.empty_like()).copy_(&active);
        self.holds = true;
        is_new
    }

    /// Ends the effect of [`States::hold`], after a step.
    pub(super) fn release(&mut self) {
        if let (true, Some(active)) = (std::mem::take(&mut self.holds), &mut self.active) {
            let _ = active.fill_(1.0);
        }
    }

    /// States that share these tensors.
    pub(super) fn shallow_clone(&self) -> Self {
        let clone = |state: &State| State {
            conv: state.conv.shallow_clone(),
            memory: state.memory.as_ref().map(Tensor::shallow_clone),
        };
        Self { layers: self.layers.iter().map(|state| state.as_ref().map(clone)).collect(), ..Self::default() }
    }

    /// Selects the rows at `index` `[rows]` i64, in that order, in new tensors. Copies one layer at a time.
    pub(super) fn keep_rows(&mut self, index: &Tensor) {
        for tensor in self.layers.iter_mut().flatten().flat_map(State::tensors) {
            *tensor = tensor.index_select(0, index);
        }
        (self.active, self.holds) = (None, false);
    }

    /// Replaces the states of the rows at `rows` `[k]` i64 by those of the rows at `from` `[k]` i64 of `other`, in place.
    pub(super) fn replace_rows(&mut self, rows: &Tensor, other: &Self, from: &Tensor) {
        for (state, other) in self.layers.iter_mut().zip(&other.layers) {
            if let (Some(state), Some(other)) = (state, other) {
                state.replace_rows(rows, &other.select_rows(from));
            }
        }
    }
}
