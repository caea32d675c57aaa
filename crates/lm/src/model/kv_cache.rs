//! The key-value cache of decoding.

use super::layout::{Layout, Scores, additive_mask};
use super::state::{AppendedRows, State, StateShape, States};
use rlhf_base::{Error, Result};
use tch::{Device, Kind, Tensor};
use tch_ext::{CachePlaces, CachedRows, Graph, on_device};

/// A step on a GPU attends to a multiple of this many positions, of which the empty ones are masked: one graph serves this many steps. If
/// kernels compute the attention of all layers, empty positions cost nothing: steps attend to the whole capacity, and one graph serves all.
const POSITIONS_ON_GPU: i64 = 64;

/// A graph is not recorded for fewer steps than this: recording takes about as long as computing a step or two.
const LEAST_RECORDED: i64 = 8;

/// Bytes of a GPU that must be free for a recording: it cannot take memory that libtorch holds for other uses.
const FREE_TO_RECORD: usize = 512 << 20;

/// Heads of a layer's keys and values, and the layer that they are taken from.
#[derive(Debug, Clone, Copy)]
pub(super) struct CachedHeads {
    /// Number of key heads.
    pub kv_heads: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// The earlier layer whose keys and values this one uses, if it has none.
    pub keys_from: Option<usize>,
}

/// The keys and values of the rows that are decoded, preallocated.
///
/// The keys and values of each layer that has its own are [rows * capacity, kv_heads * head_dim]; row r's position p lies at r * capacity +
/// p.
pub struct KvCache {
    /// Keys and values; of no positions in layers that have a state instead.
    layers: Vec<(Tensor, Tensor)>,
    /// The states of layers that have one in the place of keys and values.
    states: States,
    /// Index in `layers` of each layer of the model.
    layer_index: Vec<usize>,
    /// Number and width of the heads of each of `layers`.
    heads: Vec<[i64; 2]>,
    /// Number of filled positions of each row.
    lens: Vec<i64>,
    /// The same on the device, `[rows]` i64, from the first step on; each step increments it there, so that nothing is copied.
    filled: Option<Tensor>,
    capacity: i64,
    device: Device,
    /// Cache rows of the tokens of whole sequences, `[N]` i64; computed for the first layer that stores them.
    places: Option<Tensor>,
    step: Option<Step>,
    /// The tokens that are appended to some rows.
    appended: Vec<Appended>,
    /// The tokens of the rows, for models that compute a row again at some length.
    history: Option<History>,
    /// The encoder's keys and values, if there is an encoder.
    source: Option<SourceCache>,
    /// A step attends to a multiple of this many positions; 1 except on a GPU.
    multiple: i64,
    /// Whether kernels of a GPU have computed the attention of all layers so far; `None` before the first.
    attends_by_kernels: Option<bool>,
    /// The step that was computed or recorded last ([`KvCache::decode`]), until the rows change.
    last_step: Option<LastStep>,
}

/// The last step; later steps replay it if it was recorded.
struct LastStep {
    /// Number of positions that it attends to.
    width: i64,
    /// Shape and dtype of its logits.
    logits: (Vec<i64>, Kind),
    /// The step as a graph, if it was recorded.
    graph: Option<StepGraph>,
}

/// One decoding step as a CUDA graph, which reads and writes the tensors of its cache.
struct StepGraph {
    graph: Graph,
    /// The tokens of the step, `[rows]` i64; copied here before a replay.
    tokens: Tensor,
    /// Logits of the next tokens, `[rows, vocab]`, which each replay replaces.
    logits: Tensor,
}

/// The way to get the logits of the next step.
#[derive(Debug, PartialEq)]
enum NextStep {
    Compute,
    Record,
    Replay,
}

impl NextStep {
    /// Decides how to get the logits of a step that attends to `width` positions, when `left` steps of this width remain, this one
    /// included. `last` is the width of the last step and whether it was recorded. A step is recorded only after one of its width was
    /// computed, which loads CUDA's kernels.
    fn after(last: Option<(i64, bool)>, width: i64, left: i64) -> Self {
        match last {
            Some((last_width, true)) if last_width == width => Self::Replay,
            Some((last_width, false)) if last_width == width && left >= LEAST_RECORDED => Self::Record,
            _ => Self::Compute,
        }
    }
}

/// The tokens of the rows of a cache.
struct History {
    /// `[rows, capacity]` i64.
    tokens: Tensor,
    /// A row that grows beyond this length is computed again.
    switch: i64,
}

/// The keys and values of the encoder's tokens, for each row of a cache.
struct SourceCache {
    /// Keys and values of each layer, `[rows, heads, width, head_dim]`.
    layers: Vec<(Tensor, Tensor)>,
    /// The additive mask of slots without a token, `[rows, 1, 1, width]`, if there are any.
    mask: Option<Tensor>,
}

impl SourceCache {
    fn shallow_clone(&self) -> Self {
        let layers = self.layers.iter().map(|(keys, values)| (keys.shallow_clone(), values.shallow_clone()));
        Self { layers: layers.collect(), mask: self.mask.as_ref().map(Tensor::shallow_clone) }
    }

    fn keep_rows(&mut self, index: &Tensor) {
        for (keys, values) in &mut self.layers {
            (*keys, *values) = (keys.index_select(0, index), values.index_select(0, index));
        }
        self.mask = self.mask.as_ref().map(|mask| mask.index_select(0, index));
    }
}

/// Tokens that are appended to a row of a cache in one pass.
struct Appended {
    row: i64,
    /// Number of positions of the row before them.
    start: i64,
    count: i64,
}

impl Appended {
    /// The positions that each of the tokens sees, `[count, start + count]` bool.
    fn visible(&self, window: Option<i64>, device: Device) -> Tensor {
        let end = self.start + self.count;
        let keys = Tensor::arange(end, (Kind::Int64, device));
        let positions = Tensor::arange_start(self.start, end, (Kind::Int64, device)).unsqueeze(1);
        let visible = keys.le_tensor(&positions);
        match window.filter(|&window| window < end) {
            Some(window) => visible.logical_and(&keys.gt_tensor(&(positions - window))),
            None => visible,
        }
    }
}

/// One decoding step: one more token in every row of a cache, for libtorch's operations.
struct Step {
    /// Cache rows of the tokens, `[rows]` i64.
    places: Tensor,
    /// Number of filled positions of each row, [rows, 1, 1, 1] i64.
    lens: Tensor,
    /// Maximum number of filled positions.
    width: i64,
    /// The masks of the layers' windows, [rows, 1, 1, width] of the cache's kind; computed on first use.
    masks: Vec<(Option<i64>, Tensor)>,
}

impl Step {
    fn mask(&mut self, window: Option<i64>, kind: Kind) -> Tensor {
        if let Some((_, mask)) = self.masks.iter().find(|(key, _)| *key == window) {
            return mask.shallow_clone();
        }
        let keys = Tensor::arange(self.width, (Kind::Int64, self.lens.device()));
        let mut visible = keys.lt_tensor(&self.lens);
        if let Some(window) = window {
            visible = visible.logical_and(&keys.ge_tensor(&(&self.lens - window)));
        }
        let mask = additive_mask(&visible, kind);
        self.masks.push((window, mask.shallow_clone()));
        mask
    }
}

/// The multiple of positions that a step on `device` attends to.
fn multiple_on(device: Device) -> i64 {
    if device.is_cuda() { POSITIONS_ON_GPU } else { 1 }
}

/// Number of positions per row of a cache on `device` for `capacity` tokens.
pub fn positions_for(capacity: usize, device: Device) -> usize {
    capacity.next_multiple_of(multiple_on(device) as usize)
}

/// Whether enough memory of GPU `device` is free to record a step.
fn has_memory_to_record(device: usize) -> bool {
    tch_ext::gpu_memory(device).is_ok_and(|[free, _]| free >= FREE_TO_RECORD)
}

impl KvCache {
    /// Creates an empty cache for layers with these heads; `states` has the sizes of the state of each layer that has one in place of keys
    /// and values.
    pub(super) fn new(
        layer_heads: &[CachedHeads],
        states: &[Option<StateShape>],
        rows: i64,
        capacity: i64,
        options: (Kind, Device),
    ) -> Result<Self> {
        let capacity = positions_for(capacity as usize, options.1) as i64;
        // Zeros, not uninitialized memory: a masked NaN would still make the weighted sum of the values NaN.
        let empty = |width: i64| Tensor::f_zeros([rows.saturating_mul(capacity), width], options);
        let none = || Tensor::zeros([rows, 0], options);
        let (mut layers, mut heads, mut layer_index): (Vec<_>, Vec<_>, Vec<usize>) =
            (Vec::new(), Vec::new(), Vec::new());
        for (CachedHeads { kv_heads, head_dim, keys_from }, state) in layer_heads.iter().zip(states) {
            layer_index.push(keys_from.map_or(layers.len(), |source| layer_index[source]));
            if keys_from.is_none() {
                let width = kv_heads * head_dim;
                layers.push(if state.is_some() { (none(), none()) } else { (empty(width)?, empty(width)?) });
                heads.push([*kv_heads, *head_dim]);
            }
        }
        let states = States::new(states, rows, options)?;
        let (lens, device) = (vec![0; rows as usize], options.1);
        let (filled, places, step, history, source) = (None, None, None, None, None);
        let (multiple, attends_by_kernels, last_step) = (multiple_on(device), None, None);
        Ok(Self {
            layers,
            states,
            lens,
            filled,
            layer_index,
            heads,
            capacity,
            device,
            places,
            step,
            appended: Vec::new(),
            history,
            source,
            multiple,
            attends_by_kernels,
            last_step,
        })
    }

    /// Stores the tokens too, so that rows that grow beyond `switch` tokens can be computed again ([`KvCache::outgrown`]).
    pub fn keep_tokens(&mut self, switch: i64) -> Result<()> {
        if switch < self.capacity {
            let size = [self.lens.len() as i64, self.capacity];
            self.history = Some(History { tokens: Tensor::f_zeros(size, (Kind::Int64, self.device))?, switch });
        }
        Ok(())
    }

    /// Prepares the cache for the whole sequences of `layout` at the start of the rows; the decoder calls it once per forward pass.
    pub fn begin_sequences(&mut self, layout: &Layout) {
        self.lens.clone_from(&layout.lens);
        (self.filled, self.places, self.step) = (None, None, None);
        (self.source, self.last_step) = (None, None);
        if let Some(history) = &self.history {
            let rows: Vec<Tensor> =
                layout.tokens.narrow(0, 0, layout.lens.iter().sum()).split_with_sizes(&layout.lens, 0);
            for (row, tokens) in rows.iter().enumerate() {
                history.tokens.get(row as i64).narrow(0, 0, tokens.size()[0]).copy_(tokens);
            }
        }
    }

    /// The rows to compute again at this step, with their tokens: those that have just grown beyond the length at which the rotary angles
    /// change.
    pub fn outgrown(&self) -> (Vec<i64>, Vec<Vec<i64>>) {
        let Some(History { tokens, switch }) = &self.history else { return Default::default() };
        let rows = self.lens.iter().zip(0i64..).filter(|(len, _)| **len == switch + 1).map(|(_, row)| row);
        rows.map(|row| {
            let tokens = tokens.get(row).narrow(0, 0, switch + 1).to_device(Device::Cpu);
            (row, Vec::try_from(tokens).expect("ids are i64"))
        })
        .unzip()
    }

    /// Replaces the keys, values and states of the rows `rows` by those of the rows `from` of `other`, whose capacity is at most the same, in
    /// place: a graph reads these tensors. Copies one layer at a time. The numbers of filled positions stay.
    pub fn replace_rows(&mut self, rows: &[i64], other: &Self, from: &[i64]) {
        let (index, source) = (on_device(rows, self.device), on_device(from, self.device));
        let [count, other_count] = [self, other].map(|cache| cache.lens.len() as i64);
        let rest = self.capacity - other.capacity;
        for ((keys, values), (new_keys, new_values)) in self.layers.iter().zip(&other.layers) {
            for (to, new) in [(keys, new_keys), (values, new_values)] {
                if to.numel() == 0 {
                    continue;
                }
                let to = to.view([count, self.capacity, -1]);
                let new = new.view([other_count, other.capacity, -1]).index_select(0, &source);
                let _ = to.narrow(1, 0, other.capacity).index_copy_(0, &index, &new);
                if rest > 0 {
                    // A masked NaN of the row before would still make the weighted sum of the values NaN.
                    let _ = to.narrow(1, other.capacity, rest).index_fill_(0, &index, 0.0);
                }
            }
        }
        self.states.replace_rows(&index, &other.states, &source);
    }

    /// Gives the rows `rows` to other sequences: those with `tokens`, which are the rows `from` of `other`, as in [`KvCache::replace_rows`].
    /// Not with an encoder.
    pub fn refill_rows(&mut self, rows: &[i64], other: &Self, from: &[i64], tokens: &[&[i64]]) {
        self.replace_rows(rows, other, from);
        for ((&row, &source), tokens) in rows.iter().zip(from).zip(tokens) {
            self.lens[row as usize] = other.lens[source as usize];
            if let Some(history) = &self.history {
                let filled = history.tokens.get(row).narrow(0, 0, tokens.len() as i64);
                filled.shallow_clone().copy_(&on_device(tokens, self.device));
            }
        }
        self.count_again();
    }

    /// Lets the rows `rows`, whose sequences have ended, start again without a token: they take part in further steps without exceeding the
    /// cache.
    pub fn restart_rows(&mut self, rows: &[usize]) {
        rows.iter().for_each(|&row| self.lens[row] = 0);
        self.count_again();
    }

    /// Stores the keys and values of the encoder's tokens for the next layer, `[rows, heads, width, head_dim]` each, with the mask of slots
    /// without a token.
    pub fn store_source(&mut self, keys: &Tensor, values: &Tensor, mask: Option<Tensor>) {
        let source = self.source.get_or_insert_with(|| SourceCache { layers: Vec::new(), mask });
        source.layers.push((keys.shallow_clone(), values.shallow_clone()));
    }

    /// Attention of one new token per row, `queries` [rows, heads, head_dim], to the encoder's tokens; returns [rows, heads * head_dim].
    pub fn attend_to_source(&self, layer: usize, scores: &Scores, queries: &Tensor) -> Tensor {
        let source = self.source.as_ref().expect("the prompts were read by the encoder");
        let (keys, values) = &source.layers[layer];
        let out = scores.attend([&queries.unsqueeze(2), keys, values], source.mask.as_ref(), false);
        out.reshape([queries.size()[0], -1])
    }

    /// Distances of each row's cached tokens from its new one, at most 0 where there is a token, `[rows, 1, width]` i64; `[1, 1, width]` if
    /// all rows have equally many tokens.
    pub fn distances(&self) -> Tensor {
        let filled = self.filled.as_ref().expect("a step has begun");
        let width = self.longest();
        let filled =
            if self.lens.iter().all(|&len| len == width) { filled.narrow(0, 0, 1) } else { filled.shallow_clone() };
        let keys = Tensor::arange(width, (Kind::Int64, self.device)).view([1, 1, -1]);
        keys - (filled - 1).view([-1, 1, 1])
    }

    /// Stores whole sequences, [N, kv_heads, head_dim] each.
    pub fn store_sequences(&mut self, layer: usize, keys: &Tensor, values: &Tensor) {
        let places = self.places.take().unwrap_or_else(|| {
            let rows = self.lens.iter().zip(0i64..).map(|(&len, row)| (len, row * self.capacity));
            let places: Vec<i64> = rows.flat_map(|(len, first)| first..first + len).collect();
            on_device(&places, self.device)
        });
        // Padding follows the tokens.
        let count = places.size()[0];
        self.write(layer, &places, &keys.narrow(0, 0, count), &values.narrow(0, 0, count));
        self.places = Some(places);
    }

    /// Number of tokens that each row can hold.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// A layer's part of the cache, for a kernel that fills it.
    pub fn layer(&mut self, layer: usize) -> tch_ext::Cache<'_> {
        let (keys, values) = &mut self.layers[self.layer_index[layer]];
        tch_ext::Cache { keys, values, capacity: self.capacity }
    }

    /// The states of a layer's rows, and which rows the next step changes, `[rows, 1]`; `None`: all.
    pub(super) fn state(&mut self, layer: usize) -> (&mut State, Option<&Tensor>) {
        self.states.layer(layer)
    }

    /// The rows that tokens are appended to.
    pub(super) fn appended_rows(&self) -> AppendedRows {
        let rows: Vec<i64> = self.appended.iter().map(|part| part.row).collect();
        let counts = self.appended.iter().map(|part| part.count).collect();
        AppendedRows { rows: on_device(&rows, self.device), counts }
    }

    /// [`KvCache::attend_step`] by a kernel, from the outputs of the linear layers.
    pub fn attend_step_by_kernel(
        &mut self,
        layer: usize,
        attention: &tch_ext::Attention,
        projections: &[Tensor],
        rotation: Option<&(Tensor, Tensor)>,
    ) -> Tensor {
        let before: Vec<i64> = self.lens.iter().map(|len| len - 1).collect();
        tch_ext::attention_step(attention, projections, rotation, &before, self.layer(layer))
    }

    /// Prepares the cache for one more token in every row, `tokens` `[rows]` i64, and returns the position of each in its sequence,
    /// `[rows]` i64; the decoder calls it once per forward pass.
    pub fn begin_step(&mut self, tokens: &Tensor) -> Tensor {
        let mut filled = self.filled.take().unwrap_or_else(|| on_device(&self.lens, self.device));
        // In place: a graph increments the same tensor at each replay.
        let positions = filled.copy();
        filled += 1;
        if let Some(history) = &self.history {
            let _ = history.tokens.shallow_clone().scatter_(1, &positions.unsqueeze(1), &tokens.unsqueeze(1));
        }
        self.filled = Some(filled);
        for len in &mut self.lens {
            *len += 1;
        }
        self.step = None;
        positions
    }

    /// Whether tokens can be appended to some rows in one pass: not if a row may have to be computed again, or there is an encoder.
    pub fn can_append(&self) -> bool {
        self.history.is_none() && self.source.is_none()
    }

    /// Prepares the cache for further tokens in some rows: `counts[i]` of them in row `rows[i]`, each row once. Returns the positions of
    /// the tokens, row after row, `[N]` i64; the decoder calls it once per forward pass.
    pub fn begin_appended(&mut self, rows: &[usize], counts: &[usize]) -> Tensor {
        let appended = rows.iter().zip(counts).map(|(&row, &count)| {
            let start = self.lens[row];
            self.lens[row] += count as i64;
            Appended { row: row as i64, start, count: count as i64 }
        });
        self.appended = appended.collect();
        let positions: Vec<i64> = self.appended.iter().flat_map(|part| part.start..part.start + part.count).collect();
        let places = self.appended.iter().flat_map(|part| {
            let first = part.row * self.capacity + part.start;
            first..first + part.count
        });
        self.places = Some(on_device(&places.collect::<Vec<i64>>(), self.device));
        self.count_again();
        on_device(&positions, self.device)
    }

    /// Attention of the appended tokens, `queries` [N, heads, head_dim], to their rows; returns [N, heads * head_dim]. `new`: the tokens'
    /// keys and values, unless the layer uses those of another.
    pub fn attend_appended(
        &mut self,
        layer: usize,
        scores: &Scores,
        queries: &Tensor,
        new: Option<&(Tensor, Tensor)>,
    ) -> Tensor {
        let places = self.places.as_ref().expect("tokens are appended").shallow_clone();
        if let Some((keys, values)) = new {
            self.write(layer, &places, keys, values);
        }
        let layer = self.layer_index[layer];
        let [kv_heads, head_dim] = self.heads[layer];
        let group = queries.size()[1] / kv_heads;
        let counts: Vec<i64> = self.appended.iter().map(|part| part.count).collect();
        let rows = self.appended.iter().zip(queries.split_with_sizes(&counts, 0)).map(|(part, queries)| {
            let end = part.start + part.count;
            let view = |cache: &Tensor| {
                let row = cache.narrow(0, part.row * self.capacity, end);
                row.view([1, end, kv_heads, head_dim]).transpose(1, 2)
            };
            let (keys, values) = (view(&self.layers[layer].0), view(&self.layers[layer].1));
            // As in a step, query heads that share a key head become that head's query positions.
            let by_group = queries.view([part.count, kv_heads, group, head_dim]).permute([1, 2, 0, 3]);
            let grouped = by_group.reshape([1, kv_heads, group * part.count, head_dim]);
            let mask = additive_mask(&part.visible(scores.window, self.device), keys.kind()).repeat([group, 1]);
            let out = scores.attend([&grouped, &keys, &values], Some(&mask.view([1, 1, -1, end])), false);
            let by_token = out.view([kv_heads, group, part.count, head_dim]).permute([2, 0, 1, 3]);
            by_token.reshape([part.count, -1])
        });
        Tensor::cat(&rows.collect::<Vec<_>>(), 0)
    }

    /// Takes back the last token of each of `rows`, which have one. The next step writes to its position again and must have the same
    /// token, since the layers' states keep it.
    pub fn step_back(&mut self, rows: &[usize]) {
        rows.iter().for_each(|&row| self.lens[row] -= 1);
        if self.states.hold(rows, self.lens.len(), self.device) {
            self.last_step = None;
        }
        self.count_again();
    }

    /// Copies the numbers of filled positions from the host to the device.
    fn count_again(&mut self) {
        if let Some(filled) = &mut self.filled {
            // In place: a graph reads this tensor.
            filled.copy_(&on_device(&self.lens, self.device));
        }
        self.step = None;
    }

    /// Number of tokens of the longest row.
    fn longest(&self) -> i64 {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Number of positions of each row that a step attends to if the longest row has `longest` tokens after it. Positions without a token
    /// are masked.
    fn width(&self, longest: i64) -> i64 {
        ((longest as u64).next_multiple_of(self.multiple as u64) as i64).min(self.capacity)
    }

    /// The logits after one more token in every row, `tokens` `[rows]` i64. `step` computes them from the tokens and this cache.
    ///
    /// With `records`, the work of a step is recorded once as a CUDA graph, and replayed for later steps: `step` must then do the same work
    /// in each step, and neither wait for the GPU nor copy anything to it. The logits are valid until the next step.
    ///
    /// # Errors
    /// If `step` fails, or CUDA does.
    pub fn decode(
        &mut self,
        tokens: &Tensor,
        records: bool,
        step: impl Fn(&Tensor, &mut Self) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (Device::Cuda(device), true) = (self.device, records) else {
            let logits = step(tokens, self);
            self.states.release();
            self.attend_at_capacity();
            return logits;
        };
        let width = self.width(self.longest() + 1);
        let last = self.last_step.as_ref().map(|last| (last.width, last.graph.is_some()));
        match NextStep::after(last, width, width - self.longest()) {
            NextStep::Compute => self.last_step = None,
            NextStep::Record if has_memory_to_record(device) => self.record(device, tokens, &step),
            NextStep::Record | NextStep::Replay => {}
        }
        if let Some(graph) = self.last_step.as_ref().and_then(|last| last.graph.as_ref()) {
            graph.tokens.shallow_clone().copy_(tokens);
            graph.graph.replay().map_err(Error::Run)?;
            self.lens.iter_mut().for_each(|len| *len += 1);
            self.states.release();
            return Ok(graph.logits.shallow_clone());
        }
        let logits = step(tokens, self)?;
        self.states.release();
        self.attend_at_capacity();
        self.last_step =
            Some(LastStep { width: self.width(self.longest()), logits: (logits.size(), logits.kind()), graph: None });
        Ok(logits)
    }

    /// Records the next step, whose logits have the shape and dtype of the last step's. If recording fails, nothing of the step has run,
    /// and it is computed as usual.
    fn record(&mut self, device: usize, tokens: &Tensor, step: &impl Fn(&Tensor, &mut Self) -> Result<Tensor>) {
        let Some(last) = &self.last_step else { return };
        // Allocated outside the recording, whose memory other graphs use too.
        let mut logits = Tensor::empty(&last.logits.0, (last.logits.1, self.device));
        let (tokens, lens) = (tokens.copy(), self.lens.clone());
        let recorded = Graph::record(device, || step(&tokens, self).map(|result| logits.copy_(&result)));
        // The host's lengths count the steps that run.
        (self.lens, self.step) = (lens, None);
        if let (Ok((graph, Ok(()))), Some(last)) = (recorded, &mut self.last_step) {
            last.graph = Some(StepGraph { graph, tokens, logits });
        }
    }

    /// Lets the next steps attend to all positions, if kernels have computed the attention of this one.
    fn attend_at_capacity(&mut self) {
        if self.attends_by_kernels == Some(true) {
            self.multiple = self.capacity.max(1);
        }
    }

    fn new_step(&self) -> Step {
        let filled = self.filled.as_ref().expect("a step has begun");
        let rows = Tensor::arange(self.lens.len() as i64, (Kind::Int64, self.device));
        Step {
            places: rows * self.capacity + filled - 1,
            lens: filled.view([-1, 1, 1, 1]),
            width: self.width(self.longest()),
            masks: Vec::new(),
        }
    }

    /// Whether a GPU kernel computes the attention of a step with these scores, `heads` query heads and this dtype.
    pub(super) fn attends_by_kernel(&self, layer: usize, scores: &Scores, heads: i64, kind: Kind) -> bool {
        let layer = self.layer_index[layer];
        let (keys, [kv_heads, head_dim]) = (&self.layers[layer].0, self.heads[layer]);
        scores.softcap.is_none()
            && scores.sinks.is_none()
            && kind == keys.kind()
            && tch_ext::has_gpu_kernels(kind, keys.device())
            && tch_ext::takes_attention_of_step(heads, kv_heads, head_dim)
    }

    /// [`KvCache::attend_step`] where `KvCache::attends_by_kernel`, from heads that are not rotated yet: queries, keys and values
    /// `[rows, heads, head_dim]` in the dtype of the cache. One kernel rotates and stores them.
    pub fn attend_step_rotating(
        &mut self,
        layer: usize,
        scores: &Scores,
        qkv: [&Tensor; 3],
        angles: Option<&(Tensor, Tensor)>,
    ) -> Tensor {
        let step = self.step.take().unwrap_or_else(|| self.new_step());
        let (keys, values) = &mut self.layers[self.layer_index[layer]];
        let cache = CachePlaces { keys, values, places: &step.places };
        let queries = tch_ext::rotate_cached(qkv, angles, cache);
        self.step = Some(step);
        self.attend_step(layer, scores, &queries, None, None)
    }

    /// Attention of one new token per row, `queries` [rows, heads, head_dim], to its whole row; returns [rows, heads * head_dim]. `new`:
    /// the token's key and value, unless the layer uses those of another.
    ///
    /// `bias` [rows or 1, heads, 1, width], if there is one, is added to the scores; it has -inf where there is no token.
    pub fn attend_step(
        &mut self,
        layer: usize,
        scores: &Scores,
        queries: &Tensor,
        new: Option<&(Tensor, Tensor)>,
        bias: Option<&Tensor>,
    ) -> Tensor {
        let mut step = self.step.take().unwrap_or_else(|| self.new_step());
        if let Some((keys, values)) = new {
            self.write(layer, &step.places, keys, values);
        }
        let by_kernel = bias.is_none() && self.attends_by_kernel(layer, scores, queries.size()[1], queries.kind());
        self.attends_by_kernels = Some(by_kernel && self.attends_by_kernels != Some(false));
        let layer = self.layer_index[layer];
        let [kv_heads, head_dim] = self.heads[layer];
        let rows = self.lens.len() as i64;
        if by_kernel {
            let lengths = step.lens.view([-1]);
            let ((keys, values), capacity, longest) = (&self.layers[layer], self.capacity, step.width);
            let cached = CachedRows { keys, values, lengths: &lengths, capacity, longest };
            self.step = Some(step);
            return tch_ext::attention_of_step(queries, cached, scores.window, scores.scale).flatten(1, 2);
        }
        let width = bias.map_or(step.width, |bias| bias.size()[3]);
        let view =
            |cache: &Tensor| cache.view([rows, self.capacity, kv_heads, head_dim]).narrow(1, 0, width).transpose(1, 2);
        let (keys, values) = (view(&self.layers[layer].0), view(&self.layers[layer].1));
        // Query heads that share a key head become that head's query positions, so keys and values are not repeated.
        let grouped = queries.reshape([rows, kv_heads, -1, head_dim]);
        let window = scores.window.filter(|&window| window < step.width);
        let mask = match bias {
            Some(bias) => bias.to_kind(keys.kind()),
            None => step.mask(window, keys.kind()),
        };
        let out = scores.attend([&grouped, &keys, &values], Some(&mask), false);
        self.step = Some(step);
        out.reshape([rows, -1])
    }

    /// A cache of the same tensors: a write to either changes both, until [`KvCache::keep_rows`] replaces the tensors of one.
    pub fn shallow_clone(&self) -> Self {
        let layers = self.layers.iter().map(|(keys, values)| (keys.shallow_clone(), values.shallow_clone()));
        Self {
            layers: layers.collect(),
            states: self.states.shallow_clone(),
            layer_index: self.layer_index.clone(),
            heads: self.heads.clone(),
            lens: self.lens.clone(),
            // Each cache increments its own count.
            filled: self.filled.as_ref().map(Tensor::copy),
            places: None,
            step: None,
            appended: Vec::new(),
            history: self
                .history
                .as_ref()
                .map(|History { tokens, switch }| History { tokens: tokens.shallow_clone(), switch: *switch }),
            source: self.source.as_ref().map(SourceCache::shallow_clone),
            last_step: None,
            ..*self
        }
    }

    /// Selects the rows at `kept`, in that order; a row can be selected several times. Copies the rows one layer at a time.
    pub fn keep_rows(&mut self, kept: &[i64]) {
        let index = on_device(kept, self.device);
        let rows = self.lens.len() as i64;
        for (keys, values) in &mut self.layers {
            for cache in [keys, values].into_iter().filter(|cache| cache.numel() > 0) {
                let wide = cache.view([rows, -1]).index_select(0, &index);
                *cache = wide.view([kept.len() as i64 * self.capacity, -1]);
            }
        }
        self.states.keep_rows(&index);
        self.source.iter_mut().for_each(|source| source.keep_rows(&index));
        self.lens = kept.iter().map(|&row| self.lens[row as usize]).collect();
        self.filled = self.filled.as_ref().map(|filled| filled.index_select(0, &index));
        if let Some(history) = &mut self.history {
            history.tokens = history.tokens.index_select(0, &index);
        }
        (self.places, self.step, self.last_step) = (None, None, None);
    }

    fn write(&mut self, layer: usize, places: &Tensor, keys: &Tensor, values: &Tensor) {
        let (all_keys, all_values) = &mut self.layers[self.layer_index[layer]];
        let _ = all_keys.index_copy_(0, places, &keys.flatten(1, -1));
        let _ = all_values.index_copy_(0, places, &values.flatten(1, -1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CausalLm, ModelOptions, Precision, QuantType, Quantization, StopCheck};
    use std::path::Path;

    fn golden_model(name: &str, options: ModelOptions) -> CausalLm {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
        CausalLm::from_pretrained(&dir, options).unwrap()
    }

    #[test]
    fn a_step_is_recorded_after_one_of_its_width_and_replayed_until_the_width_changes() {
        use NextStep::{Compute, Record, Replay};
        let after = |last, left| NextStep::after(last, 128, left);
        assert_eq!(after(None, 64), Compute); // nothing is loaded yet
        assert_eq!(after(Some((128, false)), 63), Record);
        assert_eq!(after(Some((128, false)), 8), Record);
        assert_eq!(after(Some((128, false)), 7), Compute); // too few steps
        assert_eq!([64, 1].map(|left| after(Some((128, true)), left)), [Replay, Replay]);
        assert_eq!([false, true].map(|graph| after(Some((64, graph)), 64)), [Compute, Compute]);
    }

    #[test]
    fn positions_that_are_masked_change_no_logits() {
        // f16 has no kernels, which attend to a row's own positions: libtorch's operations are used, as on a GPU.
        let options = ModelOptions { precision: Precision::F16, ..ModelOptions::default() };
        // Windows of 4 and 8 positions, a soft cap, learned and rotary positions.
        for name in ["gemma2", "gemma3", "gemma4", "gpt2", "gpt_neox", "gpt_oss", "mistral", "lfm2", "qwen3_5"] {
            let model = golden_model(name, options);
            let prompts = [vec![5i64, 6, 7, 8, 9, 10, 11], vec![12, 13, 14]];
            let logits = |multiple: i64| {
                let (mut cache, _) = model.prefill(&prompts, 12, StopCheck::NEVER).unwrap();
                cache.multiple = multiple;
                let step = |token: i64| model.decode(&Tensor::from_slice(&[token, token + 1]), &mut cache).unwrap();
                Tensor::cat(&(20..31).map(step).collect::<Vec<_>>(), 0).to_kind(Kind::Float)
            };
            let (exact, wide) = tch::no_grad(|| (logits(1), logits(16)));
            let gap = (&exact - &wide).abs().max().double_value(&[]);
            assert!(gap < 4e-3 * exact.abs().max().double_value(&[]).max(1.0), "{name}: {gap}");
        }
    }

    #[test]
    fn tokens_that_are_appended_in_one_pass_are_those_that_are_fed_one_by_one() {
        for (name, kind) in [
            ("gemma2", Kind::Float),
            ("gpt_neox", Kind::Float),
            ("qwen2", Kind::Float),
            ("mistral", Kind::Half),
            ("lfm2", Kind::Float),
            ("lfm2", Kind::Half),
            ("qwen3_5", Kind::Float),
            ("qwen3_5", Kind::Half),
            ("qwen3_next", Kind::Float),
            ("gpt_oss", Kind::Float),
            ("ministral3", Kind::Float),
            ("gemma4", Kind::Float),
            ("gemma4_moe", Kind::Float),
            ("lfm2_moe", Kind::Float),
            ("qwen3_5_moe", Kind::Float),
        ] {
            let precision = if kind == Kind::Half { Precision::F16 } else { Precision::default() };
            let model = golden_model(name, ModelOptions { precision, ..ModelOptions::default() });
            let prompts = [vec![5i64, 6, 7, 8, 9, 10, 11], vec![12, 13, 14], vec![15, 16]];
            let next = Tensor::from_slice(&[40i64, 41, 42]);
            let logits = |appended: bool| {
                let (mut cache, _) = model.prefill(&prompts, 24, StopCheck::NEVER).unwrap();
                let _ = model.decode(&Tensor::from_slice(&[20i64, 21, 22]), &mut cache).unwrap();
                let rows: [(usize, Vec<i64>); 2] = [(2, (50..61).collect()), (0, (70..74).collect())];
                if appended {
                    let (mut rows, mut tokens): (Vec<usize>, Vec<Vec<i64>>) = rows.into_iter().unzip();
                    // Nothing is appended to a row without tokens, nor where there is no row.
                    model.append::<Vec<i64>>(&[], &[], &mut cache).unwrap();
                    model.append(&[0, 1], &[vec![], vec![]], &mut cache).unwrap();
                    rows.insert(1, 1);
                    tokens.insert(1, Vec::new());
                    model.append(&rows, &tokens, &mut cache).unwrap();
                } else {
                    let mut fed = [20, 21, 22];
                    for (row, token) in
                        rows.into_iter().flat_map(|(row, tokens)| tokens.into_iter().map(move |token| (row, token)))
                    {
                        // The others feed their last token again.
                        cache.step_back(&(0..3).filter(|other| *other != row).collect::<Vec<_>>());
                        fed[row] = token;
                        let _ = model.decode(&Tensor::from_slice(&fed), &mut cache).unwrap();
                    }
                }
                model.decode(&next, &mut cache).unwrap().to_kind(Kind::Float)
            };
            let (one_by_one, appended) = tch::no_grad(|| (logits(false), logits(true)));
            let gap = (&one_by_one - &appended).abs().max().double_value(&[]);
            let tolerance = if kind == Kind::Half { 4e-3 } else { 1e-4 };
            assert!(gap < tolerance * one_by_one.abs().max().double_value(&[]).max(1.0), "{name}: {gap}");
        }
    }

    #[test]
    fn a_refilled_row_goes_on_as_in_a_cache_of_its_own_whatever_was_in_the_row() {
        for (name, kind) in [
            ("gemma2", Kind::Float),
            ("gpt2", Kind::Half),
            ("llama_tied", Kind::Float),
            ("mistral", Kind::Half),
            ("phi3_long", Kind::Float),
            ("qwen3_5", Kind::Float),
            ("lfm2", Kind::Half),
        ] {
            let precision = if kind == Kind::Half { Precision::F16 } else { Precision::default() };
            let model = golden_model(name, ModelOptions { precision, ..ModelOptions::default() });
            let prompts = [vec![5i64, 6, 7, 8, 9, 10, 11], vec![12, 13, 14], vec![15, 16]];
            let waiting = [vec![20i64, 21], vec![22, 23, 24, 25]];
            let steps = |cache: &mut KvCache, tokens: [i64; 3]| {
                let step = |at| {
                    let tokens: Vec<i64> = tokens.iter().map(|token| token + at).collect();
                    model.decode(&Tensor::from_slice(&tokens), cache).unwrap().to_kind(Kind::Float)
                };
                Tensor::stack(&(0..12).map(step).collect::<Vec<_>>(), 1)
            };
            tch::no_grad(|| {
                let (mut cache, _) = model.prefill(&prompts, 24, StopCheck::NEVER).unwrap();
                let _ = steps(&mut cache, [30, 40, 50]);
                // As a response that is decoded beyond its end may leave it.
                for (keys, values) in &cache.layers {
                    [keys, values].into_iter().for_each(|x| drop(x.narrow(0, 0, 20.min(x.size()[0])).fill_(f64::NAN)));
                }
                cache.restart_rows(&[2]);
                let (new, _) = model.prefill(&waiting, 0, StopCheck::NEVER).unwrap();
                cache.refill_rows(&[2, 0], &new, &[1, 0], &[&waiting[1], &waiting[0]]);
                let refilled = steps(&mut cache, [60, 41, 70]).index_select(0, &Tensor::from_slice(&[2i64, 0]));
                let all = [&waiting[1], &waiting[0], &prompts[1]];
                let (mut cache, _) = model.prefill(&all, 16, StopCheck::NEVER).unwrap();
                let expected = steps(&mut cache, [70, 60, 41]).narrow(0, 0, 2);
                let gap = (&refilled - &expected).abs().max().double_value(&[]);
                let tolerance = if kind == Kind::Half { 4e-3 } else { 1e-5 };
                assert!(gap <= tolerance * expected.abs().max().double_value(&[]).max(1.0), "{name}: {gap}");
            });
        }
    }

    #[test]
    fn a_clone_of_a_cache_counts_its_own_steps() {
        let model = golden_model("gpt_neox", ModelOptions::default());
        let prompts = [vec![5i64, 6, 7], vec![8, 9]];
        let tokens = Tensor::from_slice(&[20i64, 21]);
        tch::no_grad(|| {
            let (mut cache, _) = model.prefill(&prompts, 8, StopCheck::NEVER).unwrap();
            let _ = model.decode(&tokens, &mut cache).unwrap();
            let mut other = cache.shallow_clone();
            for _ in 0..2 {
                let _ = model.decode(&tokens, &mut other).unwrap();
            }
            let filled = |cache: &KvCache| Vec::<i64>::try_from(cache.filled.as_ref().unwrap()).unwrap();
            assert_eq!((filled(&cache), &cache.lens), (vec![4, 3], &vec![4, 3]));
            assert_eq!((filled(&other), &other.lens), (vec![6, 5], &vec![6, 5]));
        });
    }

    #[test]
    fn a_cache_on_a_gpu_has_whole_multiples_of_positions() {
        let positions = |capacity| [Device::Cpu, Device::Cuda(1)].map(|device| positions_for(capacity, device));
        assert_eq!([1, 64, 65].map(positions), [[1, 64], [64, 64], [65, 128]]);
    }

    #[test]
    fn one_recording_serves_all_steps_where_kernels_compute_the_attention_of_all_layers() {
        let heads = [CachedHeads { kv_heads: 2, head_dim: 8, keys_from: None }; 2];
        let options = (Kind::Float, Device::Cpu);
        let widths = |by_kernels| {
            let mut cache = KvCache::new(&heads, &[None, None], 1, 200, options).unwrap();
            (cache.multiple, cache.attends_by_kernels) = (64, by_kernels);
            cache.attend_at_capacity();
            [1, 65, 200].map(|longest| cache.width(longest))
        };
        // Before a step, and where a layer's attention is libtorch's.
        assert_eq!([None, Some(false)].map(widths), [[64, 128, 200]; 2]);
        assert_eq!(widths(Some(true)), [200; 3]);
        // From the second step on they are replays, but for the last few, for which nothing is recorded.
        assert_eq!(NextStep::after(Some((200, false)), 200, 200 - 65), NextStep::Record);
        assert_eq!(NextStep::after(Some((200, true)), 200, 1), NextStep::Replay);
    }

    #[test]
    fn steps_that_differ_or_depend_on_the_host_are_not_recorded() {
        let recordable = |name: &str| golden_model(name, ModelOptions::default()).steps_can_be_recorded(2);
        for name in [
            "gpt2",
            "gpt_neox",
            "gemma2",
            "gemma3",
            "granite",
            "llama_dynamic",
            "ministral3",
            "mistral",
            "olmo2",
            "opt",
            "qwen3",
            "lfm2",
            "qwen3_5",
        ] {
            assert!(recordable(name), "{name}");
        }
        // Angles that change with the length, experts, encoders.
        for name in ["phi3_long", "mixtral", "qwen3_moe", "qwen3_next", "gpt_oss", "t5", "bart"] {
            assert!(!recordable(name), "{name}");
        }
        // Small quantized weights, whose values each step computes.
        let four_bits = Quantization::FourBit { quant_type: QuantType::Nf4, nested: true };
        for format in [four_bits, Quantization::EightBit] {
            let model = golden_model("qwen3", ModelOptions { quantization: Some(format), ..ModelOptions::default() });
            assert!([1, 64].iter().all(|&rows| model.steps_can_be_recorded(rows)), "{format:?}");
        }
    }
}
