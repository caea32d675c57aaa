//! Memory layout of tokens: sequences packed one after another.

use super::plain;
use std::cell::OnceCell;
use std::collections::HashMap;
use tch::{Device, Kind, Tensor};
use tch_ext::{PackedRows, PrefixTree, on_device};

/// `rows` rounded up by at most an eighth: every new shape of a product costs oneDNN milliseconds and memory, so there
/// should be few shapes.
pub(crate) fn rounded(rows: i64) -> i64 {
    match rows as u64 {
        0..64 => rows,
        many => many.next_multiple_of((many.next_power_of_two() / 16).max(32)) as i64,
    }
}

/// The longest row, in tokens, whose scores are computed at once without kernels. Scores take memory by the square of the length: those of longer
/// rows are computed in blocks of queries, where no gradient needs them.
const LONG_ROW: i64 = 4096;

/// The most scores of a block of queries.
const BLOCK_SCORES: i64 = 1 << 23;

#[cfg(test)]
thread_local! {
    /// Number of queries of a block for rows of any length.
    static BLOCK: std::cell::Cell<Option<i64>> = const { std::cell::Cell::new(None) };
    /// Number of passes over trees of tokens, if the processor computes attention over them too.
    static TREES: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// Number of queries of a block, for rows of `width` tokens with `scores` scores of one query in all; `None` if there is one block.
fn block_queries(width: i64, scores: i64) -> Option<i64> {
    #[cfg(test)]
    if let Some(block) = BLOCK.get() {
        return Some(block);
    }
    (width > LONG_ROW).then(|| (BLOCK_SCORES / scores.max(1)).max(16))
}

/// The bias of scores of `count` queries from `first` on, `[rows or 1, heads, count, width]`, with -inf where no key is visible.
pub(crate) type BiasBlock<'a> = &'a dyn Fn(i64, i64) -> Tensor;

/// Settings of a layer's attention scores.
#[derive(Debug)]
pub struct Scores {
    /// Factor of the products of queries and keys.
    pub scale: f64,
    /// Scores `x` become `cap * tanh(x / cap)`.
    pub softcap: Option<f64>,
    /// Number of tokens, itself included, that a token attends to, in each direction if not causal; `None`: all.
    pub window: Option<i64>,
    /// Whether a token attends only to itself and the tokens before it.
    pub causal: bool,
    /// A score of each query head that its softmax counts beside those of the keys, `[heads]`.
    pub sinks: Option<Tensor>,
}

impl Scores {
    /// The settings in the kernels' form, which knows no sinks.
    pub fn kernel(&self, heads: i64, kv_heads: i64, head_dim: i64, by_head: bool) -> tch_ext::Attention {
        let Scores { scale, softcap, window, causal, .. } = *self;
        tch_ext::Attention { heads, kv_heads, head_dim, scale, softcap, window, causal, by_head }
    }

    /// Attention of `q` [rows, heads, queries, head_dim] over `k`, `v` [rows, heads, keys, head_dim].
    ///
    /// `mask` comes from [`additive_mask`] and broadcasts to [rows, heads, queries, keys]; without it a query attends to all keys, or with
    /// `causal` to those up to its position.
    pub(super) fn attend(&self, [q, k, v]: [&Tensor; 3], mask: Option<&Tensor>, causal: bool) -> Tensor {
        if let Some(sinks) = &self.sinks {
            let scores = q.matmul(&k.transpose(-2, -1)).to_kind(Kind::Float) * self.scale;
            return weighted_with_sinks(scores, mask, sinks, v);
        }
        let Some(cap) = self.softcap else {
            return Tensor::scaled_dot_product_attention(q, k, v, mask, 0.0, causal, Some(self.scale), false);
        };
        // libtorch has no attention with a soft cap, so the scores are computed, [rows, heads, queries, keys] f32.
        let scores = (q.matmul(&k.transpose(-2, -1)).to_kind(Kind::Float) * (self.scale / cap)).tanh() * cap;
        weighted_sum(scores, mask, v)
    }
}

/// The sum of the values `v` by the softmax of `scores` [rows, heads, queries, keys] f32 and the mask.
fn weighted_sum(scores: Tensor, mask: Option<&Tensor>, v: &Tensor) -> Tensor {
    let scores = match mask {
        Some(mask) => scores + mask,
        None => scores,
    };
    scores.softmax(-1, Kind::Float).to_kind(v.kind()).matmul(v)
}

/// [`weighted_sum`] where each softmax also counts the score of its head's sink, `sinks` `[heads]`. Query heads that share a key head may be
/// laid out as queries of that key head, head after head.
fn weighted_with_sinks(scores: Tensor, mask: Option<&Tensor>, sinks: &Tensor, v: &Tensor) -> Tensor {
    let scores = match mask {
        Some(mask) => scores + mask,
        None => scores,
    };
    let (rows, heads, queries, keys) = scores.size4().expect("[rows, heads, queries, keys]");
    let group = sinks.size()[0] / heads;
    let sink_scores = sinks.to_kind(Kind::Float).view([1, heads, group, 1]);
    let sink_scores =
        sink_scores.expand([rows, heads, group, queries / group], false).reshape([rows, heads, queries, 1]);
    let weights = Tensor::cat(&[scores, sink_scores], -1).softmax(-1, Kind::Float).narrow(-1, 0, keys);
    weights.to_kind(v.kind()).matmul(v)
}

/// Scores of relative positions in one layer (DeBERTa); P rows of position embeddings.
pub struct RelativeScores {
    /// The keys of the positions, which queries attend to: [P, heads, head_dim].
    pub keys: Option<Tensor>,
    /// The queries of the positions, which attend to keys: [P, heads, head_dim].
    pub queries: Option<Tensor>,
    /// The row of each distance from a query to a key, from `-(width - 1)` on, [2 * width - 1] i64.
    pub row_of_distance: Tensor,
}

impl RelativeScores {
    /// The scores of contents and positions, not yet scaled: [rows, heads, queries, width] f32; `q` [rows, heads, queries, head_dim] has the
    /// queries from `first` on, `k` is [rows, heads, width, head_dim].
    fn with_content(&self, q: &Tensor, k: &Tensor, first: i64) -> Tensor {
        let products = |x: &Tensor, positions: &Tensor, index: &Tensor| {
            let all = x.matmul(&positions.to_kind(x.kind()).permute([1, 2, 0])).to_kind(Kind::Float);
            let (size, places) = (k.size(), index.size());
            all.gather(-1, &index.expand([size[0], size[1], places[0], places[1]], false), false)
        };
        let (queries, width) = (q.size()[2], k.size()[2]);
        let at = |first: i64, end: i64| Tensor::arange_start(first, end, (Kind::Int64, k.device()));
        let distance = at(first, first + queries).unsqueeze(1) - at(0, width).unsqueeze(0) + (width - 1);
        let index = self.row_of_distance.index_select(0, &distance.view([-1])).view([queries, width]);
        let mut scores = q.matmul(&k.transpose(-2, -1)).to_kind(Kind::Float);
        if let Some(keys) = &self.keys {
            scores += products(q, keys, &index);
        }
        if let Some(queries) = &self.queries {
            scores += products(k, queries, &index.tr()).transpose(-2, -1);
        }
        scores
    }
}

/// Whether libtorch's flash attention over packed sequences supports heads like `q`, [N, heads, head_dim], of sequences of at
/// most `width` tokens.
fn flash_takes(scores: &Scores, q: &Tensor, width: i64) -> bool {
    let head_dim = q.size()[2];
    let known = matches!(q.device(), Device::Cuda(_)) && flash_takes_shape(scores, q.kind(), head_dim, width);
    known && tch_ext::has_flash_attention(q, scores.scale)
}

fn flash_takes_shape(scores: &Scores, kind: Kind, head_dim: i64, width: i64) -> bool {
    // For single tokens it reorders the heads, which its backward pass does not account for.
    matches!(kind, Kind::Half | Kind::BFloat16)
        && scores.softcap.is_none()
        && scores.sinks.is_none()
        && (scores.causal || scores.window.is_none())
        && head_dim % 8 == 0
        && head_dim <= 256
        && width > 1
}

/// Whether attention of this dtype is computed over trees of tokens on `device`, with heads of `head_dim` and sequences of at most
/// `width` tokens.
fn takes_trees(scores: &Scores, (kind, device): (Kind, Device), head_dim: i64, width: i64) -> bool {
    #[cfg(test)]
    if let Some(passes) = TREES.get() {
        TREES.set(Some(passes + 1));
        return true;
    }
    // Not by default: it has not run on a GPU. Where kernels are asked for, it was compared with libtorch's operations before.
    let is_asked_for = !plain() && device.is_cuda() && tch_ext::has_gpu_kernels(kind, device);
    is_asked_for && flash_takes(scores, &Tensor::empty([2, 2, head_dim], (kind, device)), width)
}

/// The additive mask of `visible` (bool): 0 or -inf, of `kind`. From bools libtorch would compute it again in every layer.
pub(super) fn additive_mask(visible: &Tensor, kind: Kind) -> Tensor {
    Tensor::zeros(visible.size(), (kind, visible.device())).masked_fill_(&visible.logical_not(), f64::NEG_INFINITY)
}

/// Sequences of different lengths, packed: N tokens in all, fewer with [`SharedPrefixes`]. Only attention without kernels pads them to [rows, width]. After
/// the last sequence there may be padding that `lens` and `starts` do not include ([`Layout::padded`]).
pub struct Layout {
    /// Token ids, [N] i64.
    pub tokens: Tensor,
    /// Position of each token in its sequence, [N] i64.
    pub positions: Tensor,
    /// Length of each sequence.
    pub lens: Vec<i64>,
    /// Start of each sequence in the packed order, and the end of the last.
    pub starts: Vec<i64>,
    /// Length of the longest.
    pub width: i64,
    /// Number of tokens of each sequence before its padding, if there is any; padding attends to them and is not attended to.
    unpadded: Option<Vec<i64>>,
    /// Prefixes that sequences share, if they are computed once.
    pub shared: Option<SharedPrefixes>,
    /// The position of the first token here in each whole sequence, if it is not 0: a decoder has only a part of prompt and response.
    firsts: Option<Vec<i64>>,
    /// The encoder's tokens, if this is the layout of a decoder.
    pub source: Option<Source>,
    /// Packed index of each slot of [rows, width], and slot of each packed token; computed on first use.
    slots: OnceCell<(Tensor, Tensor)>,
    /// `starts` on the device, i32; computed on first use.
    device_starts: OnceCell<Tensor>,
}

/// The prompts that the encoder reads, each once.
pub struct Source {
    /// The prompts.
    pub layout: Box<Layout>,
    /// Index of the prompt of each of the decoder's sequences, `[rows]` i64; `None`: they are in the same order.
    prompt_index: Option<Tensor>,
    /// The mask of [`Source::mask`]; computed on first use.
    mask: OnceCell<Option<Tensor>>,
}

impl Source {
    /// Numbers of the prompts' packed tokens, `[N, heads, head_dim]`, for each of the decoder's sequences: `[rows, heads, width, head_dim]`.
    pub fn by_row(&self, packed: &Tensor) -> Tensor {
        let padded = self.layout.pad(packed).transpose(1, 2);
        self.prompt_index.as_ref().map_or_else(|| padded.shallow_clone(), |rows| padded.index_select(0, rows))
    }

    /// The additive mask of the slots of [`Source::by_row`] that have no token, `[rows, 1, 1, width]`; `None` if all have one.
    pub fn mask(&self, kind: Kind) -> Option<Tensor> {
        let mask = self.mask.get_or_init(|| {
            let mask = additive_mask(&self.layout.slots_with_tokens()?, kind);
            Some(self.prompt_index.as_ref().map_or_else(|| mask.shallow_clone(), |rows| mask.index_select(0, rows)))
        });
        mask.as_ref().map(|mask| mask.to_kind(kind))
    }
}

/// Tokens at the beginning of several sequences, which are computed once. `tokens` and `positions` of the [`Layout`] have them once; attention,
/// whose results for them are the same in all sequences, has them once per sequence, so that its tokens are the N tokens of all sequences,
/// unless it is computed over their tree ([`Layout::tree`]).
pub struct SharedPrefixes {
    /// Index, among the computed tokens, of each of the N tokens.
    indices: Vec<i64>,
    /// The same on the device, `[N]` i64.
    expand: Tensor,
    /// Index, among the N tokens, of each computed token, padding included, i64.
    collapse: Tensor,
    /// Position of each of the N tokens in its sequence, `[N]` i64.
    positions: Tensor,
    /// The computed tokens as parts of sequences, where a part may continue another: offsets of the parts and the end of the last; and for each
    /// part the one that it continues, or -1.
    parts: (Vec<i64>, Vec<i64>),
    /// The parts as a tree, padding included; computed on first use.
    tree: OnceCell<PrefixTree>,
}

/// The parts of `tokens` computed tokens. For each sequence that has tokens of its own, `branches` has the index of the first of them, and the
/// index of the token before it in the sequence, or -1.
fn shared_parts(branches: &[(i64, i64)], tokens: i64) -> (Vec<i64>, Vec<i64>) {
    // A part ends where a sequence leaves it.
    let ends = branches.iter().map(|&(_, before)| before + 1).filter(|&end| end < tokens);
    let mut starts: Vec<i64> = branches.iter().map(|&(first, _)| first).chain(ends).collect();
    starts.sort_unstable();
    starts.dedup();
    let part = |token: i64| starts.partition_point(|&start| start <= token) as i64 - 1;
    let parent = |&start: &i64| match branches.binary_search_by_key(&start, |&(first, _)| first) {
        Ok(at) if branches[at].1 < 0 => -1,
        Ok(at) => part(branches[at].1),
        Err(_) => part(start - 1),
    };
    let parents = starts.iter().map(parent).collect();
    starts.push(tokens);
    (starts, parents)
}

impl SharedPrefixes {
    /// Converts numbers of the computed tokens to numbers of all N tokens.
    pub fn expand(&self, x: &Tensor) -> Tensor {
        tch_ext::select_rows(x, &self.expand)
    }

    /// Selects the numbers of the computed tokens among those of all N tokens.
    pub fn collapse(&self, x: &Tensor) -> Tensor {
        tch_ext::select_rows(x, &self.collapse)
    }
}

impl Layout {
    /// As [`Layout::new`], where the first `shared[i]` tokens of sequence i are the same as in the sequence before it, and are computed once.
    pub fn sharing<S: AsRef<[i64]>>(sequences: &[S], shared: &[usize], device: Device) -> Self {
        let layout = Self::new(sequences, device);
        let (mut indices, mut collapse): (Vec<i64>, Vec<i64>) = (Vec::new(), Vec::new());
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        let (mut before, mut branches): (Vec<i64>, Vec<(i64, i64)>) = (Vec::new(), Vec::new());
        for (sequence, &shared) in sequences.iter().zip(shared) {
            let sequence = sequence.as_ref();
            before.truncate(shared.min(sequence.len()));
            if before.len() < sequence.len() {
                branches.push((tokens.len() as i64, before.last().copied().unwrap_or(-1)));
            }
            for (at, &token) in sequence.iter().enumerate().skip(before.len()) {
                before.push(tokens.len() as i64);
                collapse.push((indices.len() + at) as i64);
                tokens.push(token);
                positions.push(at as i64);
            }
            indices.extend_from_slice(&before);
        }
        if tokens.len() == indices.len() {
            return layout;
        }
        let shared = SharedPrefixes {
            expand: on_device(&indices, device),
            collapse: on_device(&collapse, device),
            positions: layout.positions.shallow_clone(),
            indices,
            parts: shared_parts(&branches, tokens.len() as i64),
            tree: OnceCell::new(),
        };
        let (tokens, positions) = (on_device(&tokens, device), on_device(&positions, device));
        Self { tokens, positions, shared: Some(shared), ..layout }
    }

    /// The computed tokens as packed sequences. If shared prefixes are computed once, some of them continue others.
    pub fn computed_rows(&self) -> PackedRows<'_> {
        match &self.shared {
            None => PackedRows::new(&self.starts),
            Some(SharedPrefixes { parts: (starts, parents), .. }) => PackedRows { starts, parents: Some(parents) },
        }
    }

    /// The computed tokens as a tree, if attention by these `scores`, those of all layers, is computed over it in a pass: then no token
    /// is there twice, and the tokens of attention are the computed ones. Else it is computed in whole sequences, of
    /// [`SharedPrefixes::expand`].
    pub fn tree<'s>(&self, scores: impl Iterator<Item = &'s Scores>, kind: Kind, head_dim: i64) -> Option<&PrefixTree> {
        let shared = self.shared.as_ref().filter(|_| !self.has_padding())?;
        let scores: Vec<&Scores> = scores.collect();
        // The calls over a tree know no distances, nor scores that are more than products.
        let is_whole = |scores: &&Scores| {
            let sees_all = scores.window.is_none_or(|window| window >= self.width);
            scores.causal && sees_all && scores.softcap.is_none() && scores.sinks.is_none()
        };
        let device = self.tokens.device();
        let takes = scores.iter().all(is_whole) && takes_trees(scores.first()?, (kind, device), head_dim, self.width);
        let tree = || PrefixTree::new(self.computed_rows(), self.tokens.size()[0], device);
        takes.then(|| shared.tree.get_or_init(tree))
    }

    /// Position of each token of attention in whole sequences, `[N]` i64.
    pub fn attention_positions(&self) -> &Tensor {
        self.shared.as_ref().map_or(&self.positions, |shared| &shared.positions)
    }

    /// The layout of a decoder whose sequences, `decoded`, start at the positions `firsts` of whole sequences, and whose encoder reads
    /// `prompts`, one for each; with `once`, equal prompts are computed once.
    pub fn pairs(decoded: &[Vec<i64>], firsts: Vec<i64>, prompts: &[&[i64]], once: bool, device: Device) -> Self {
        let mut places: HashMap<&[i64], i64> = HashMap::new();
        let mut different: Vec<&[i64]> = Vec::new();
        let mut prompt_index: Vec<i64> = Vec::new();
        for &prompt in prompts {
            let next = different.len() as i64;
            let place = if once { *places.entry(prompt).or_insert(next) } else { next };
            if place == next {
                different.push(prompt);
            }
            prompt_index.push(place);
        }
        let prompt_index = (different.len() < prompts.len()).then(|| on_device(&prompt_index, device));
        let layout = Box::new(Self::new(&different, device));
        let source = Source { layout, prompt_index, mask: OnceCell::new() };
        Self { firsts: Some(firsts), source: Some(source), ..Self::new(decoded, device) }
    }

    /// Distances from `count` query slots, from `first` on, to all key slots: the key's position minus the query's, `[1, count, width]` i64.
    pub fn distances(&self, first: i64, count: i64) -> Tensor {
        let slots = |first: i64, end: i64| Tensor::arange_start(first, end, (Kind::Int64, self.tokens.device()));
        (slots(0, self.width).unsqueeze(0) - slots(first, first + count).unsqueeze(1)).unsqueeze(0)
    }

    /// Which slots of [rows, width] have a token, bool `[rows, 1, 1, width]`; `None` if all have one.
    pub fn slots_with_tokens(&self) -> Option<Tensor> {
        let device = self.tokens.device();
        let lens = || on_device(&self.lens, device).view([-1, 1, 1, 1]);
        self.is_ragged().then(|| Tensor::arange(self.width, (Kind::Int64, device)).lt_tensor(&lens()))
    }

    /// Index of the computed token at position `at` of sequence `row`.
    pub fn token_index(&self, row: usize, at: i64) -> i64 {
        let packed = self.starts[row] + at - self.firsts.as_ref().map_or(0, |firsts| firsts[row]);
        self.shared.as_ref().map_or(packed, |shared| shared.indices[packed as usize])
    }

    pub fn new<S: AsRef<[i64]>>(sequences: &[S], device: Device) -> Self {
        let lens: Vec<i64> = sequences.iter().map(|s| s.as_ref().len() as i64).collect();
        let width = lens.iter().copied().max().unwrap_or(0);
        let ends = lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        let starts = std::iter::once(0).chain(ends).collect();
        let tokens: Vec<i64> = sequences.iter().flat_map(|s| s.as_ref()).copied().collect();
        let positions: Vec<i64> = lens.iter().flat_map(|&len| 0..len).collect();
        let both = on_device(&[tokens, positions].concat(), device).view([2, -1]);
        let (tokens, positions) = (both.get(0), both.get(1));
        Self {
            tokens,
            positions,
            lens,
            starts,
            width,
            unpadded: None,
            shared: None,
            firsts: None,
            source: None,
            slots: OnceCell::new(),
            device_starts: OnceCell::new(),
        }
    }

    /// Sequences whose first `unpadded` tokens are text, followed by padding. As in transformers with an attention mask, padding
    /// attends to the text, and nothing attends to padding. The position of padding is `position`, or that of any other token in its place.
    pub fn with_padding<S: AsRef<[i64]>>(
        sequences: &[S],
        unpadded: &[usize],
        position: Option<i64>,
        device: Device,
    ) -> Self {
        let layout = Self::new(sequences, device);
        let unpadded: Vec<i64> = unpadded.iter().map(|&n| n as i64).collect();
        let rows = layout.lens.iter().zip(&unpadded);
        let positions = rows
            .flat_map(|(&len, &unpadded)| (0..len).map(move |t| if t < unpadded { t } else { position.unwrap_or(t) }));
        let positions = on_device(&positions.collect::<Vec<_>>(), device);
        Self { positions, unpadded: Some(unpadded), ..layout }
    }

    /// Whether there is padding that is not attended to, which the kernels do not support.
    pub fn has_padding(&self) -> bool {
        self.unpadded.is_some()
    }

    /// Appends unused tokens up to a multiple of `multiple` tokens, if there are at least as many.
    pub fn padded(self, multiple: usize) -> Self {
        let total = self.tokens.size()[0];
        let pad = (total as usize).next_multiple_of(multiple) as i64 - total;
        if total < multiple as i64 || pad == 0 {
            return self;
        }
        let padded = |x: &Tensor| x.constant_pad_nd([0, pad]);
        let shared = self.shared.map(|shared| SharedPrefixes {
            collapse: padded(&shared.collapse),
            tree: OnceCell::new(),
            ..shared
        });
        Self { tokens: padded(&self.tokens), positions: padded(&self.positions), shared, ..self }
    }

    /// 1 for tokens of texts and 0 for padding that is not attended to, `[N, 1]` f32; `None` if there is none.
    pub fn text_mask(&self) -> Option<Tensor> {
        let unpadded = self.unpadded.as_ref()?;
        let rows = self.lens.iter().zip(unpadded);
        let mask = rows.flat_map(|(&len, &unpadded)| (0..len).map(move |at| f32::from(u8::from(at < unpadded))));
        Some(on_device(&mask.collect::<Vec<_>>(), self.tokens.device()).unsqueeze(1))
    }

    fn is_ragged(&self) -> bool {
        self.lens.iter().any(|&len| len != self.width)
    }

    fn slots(&self) -> &(Tensor, Tensor) {
        self.slots.get_or_init(|| {
            // A slot after a short row's end repeats the row's last token. No earlier token attends to it, and its result
            // is dropped, so its content does not matter; a finite one keeps the backward pass finite.
            let slots: Vec<i64> = self
                .starts
                .iter()
                .zip(&self.lens)
                .flat_map(|(&start, &len)| (0..self.width).map(move |t| start + t.min(len - 1).max(0)))
                .collect();
            let rows = self.lens.iter().zip(0i64..);
            let places: Vec<i64> = rows.flat_map(|(&len, row)| (0..len).map(move |t| row * self.width + t)).collect();
            let device = self.tokens.device();
            (on_device(&slots, device), on_device(&places, device))
        })
    }

    fn device_starts(&self) -> &Tensor {
        let starts = || self.starts.iter().map(|&start| start as i32).collect::<Vec<_>>();
        self.device_starts.get_or_init(|| on_device(&starts(), self.tokens.device()))
    }

    pub fn rows(&self) -> i64 {
        self.lens.len() as i64
    }

    /// Attention within each sequence, with the scores of relative positions if there are any; `q` [N, heads, head_dim], result
    /// [N, heads * head_dim].
    ///
    /// `bias`, if there is one, is added to the scores. Rows longer than [`LONG_ROW`] are computed in blocks of queries, unless a gradient
    /// needs their scores.
    pub fn attend(
        &self,
        scores: &Scores,
        [q, k, v]: [&Tensor; 3],
        relative: Option<&RelativeScores>,
        bias: Option<BiasBlock<'_>>,
    ) -> Tensor {
        let heads = q.size()[1];
        let plain_scores = relative.is_none() && bias.is_none();
        if !plain() && plain_scores && !self.has_padding() && flash_takes(scores, q, self.width) {
            let attention = scores.kernel(heads, k.size()[1], q.size()[2], false);
            return tch_ext::flash_attention_varlen(&attention, q, k, v, self.device_starts(), self.width)
                .flatten(1, 2);
        }
        let by_head = |x: &Tensor| {
            let padded = self.pad(x).transpose(1, 2);
            let (rows, kv_heads, width, head_dim) = padded.size4().expect("[rows, heads, width, head_dim]");
            if kv_heads == heads {
                return padded;
            }
            let shape = [rows, kv_heads, heads / kv_heads, width, head_dim];
            padded.unsqueeze(2).expand(shape, false).reshape([rows, heads, width, head_dim])
        };
        let computed = scores.softcap.is_some() || scores.sinks.is_some();
        let has_square = !plain_scores || computed || self.has_square_mask(scores);
        let [q, k, v] = [by_head(q), by_head(k), by_head(v)];
        let block = |q: &Tensor, first: i64| {
            let count = q.size()[2];
            let mask = match bias {
                Some(bias) => Some(bias(first, count).to_kind(q.kind())),
                None => self.visible(scores, first, count).map(|visible| additive_mask(&visible, q.kind())),
            };
            let causal = scores.causal && mask.is_none();
            match relative {
                Some(relative) => weighted_sum(relative.with_content(q, &k, first) * scores.scale, mask.as_ref(), &v),
                None => scores.attend([q, &k, &v], mask.as_ref(), causal),
            }
        };
        let needs_gradient = [&q, &k, &v].into_iter().chain(&scores.sinks).any(Tensor::requires_grad);
        let most = block_queries(self.width, self.rows() * heads * self.width);
        let out = match most.filter(|_| has_square && !needs_gradient) {
            None => block(&q, 0),
            Some(most) => {
                let firsts = (0..self.width).step_by(most as usize);
                let parts = firsts.map(|first| block(&q.narrow(2, first, most.min(self.width - first)), first));
                Tensor::cat(&parts.collect::<Vec<_>>(), 2)
            }
        };
        self.unpad(&out.transpose(1, 2).flatten(2, 3))
    }

    /// Whether scores that need no gradient are computed in blocks of queries.
    pub fn is_long(&self) -> bool {
        block_queries(self.width, 1).is_some()
    }

    /// Whether [`Layout::visible`] has a number for each pair of a query and a key.
    fn has_square_mask(&self, scores: &Scores) -> bool {
        scores.window.is_some_and(|window| window < self.width) || (scores.causal && self.has_padding())
    }

    /// Attention of a decoder's tokens to the encoder's; `q` [N, heads, head_dim], `k` and `v` from [`Source::by_row`], result
    /// [N, heads * head_dim].
    pub fn attend_to_source(&self, scores: &Scores, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        let mask = self.source.as_ref().and_then(|source| source.mask(q.kind()));
        let out = scores.attend([&self.pad(q).transpose(1, 2), k, v], mask.as_ref(), false);
        self.unpad(&out.transpose(1, 2).flatten(2, 3))
    }

    /// Which keys each of `count` queries from `first` on sees, bool, broadcasting to [rows, 1, count, width]; `None` if a query sees all keys, or
    /// in a causal model all up to its own position.
    fn visible(&self, scores: &Scores, first: i64, count: i64) -> Option<Tensor> {
        let device = self.tokens.device();
        let slots = || Tensor::arange(self.width, (Kind::Int64, device));
        let queries = || Tensor::arange_start(first, first + count, (Kind::Int64, device)).unsqueeze(1);
        if !scores.causal {
            // Slots after a short row's end are not visible.
            let real = self.slots_with_tokens();
            let Some(window) = scores.window.filter(|&window| window < self.width) else { return real };
            let back = queries() - slots().unsqueeze(0);
            let near = back.abs().lt(window);
            // A slot after the end of a row repeats its last token, and attends to itself, as each query must attend to a key.
            return Some(match real {
                Some(real) => near.logical_and(&real).logical_or(&back.eq(0)),
                None => near,
            });
        }
        let window = scores.window.filter(|&window| window < self.width);
        let computed = scores.softcap.is_some() || scores.sinks.is_some();
        if window.is_none() && !computed && !self.has_padding() {
            return None;
        }
        let back = queries() - slots().unsqueeze(0);
        let near = back.ge(0).logical_and(&back.lt(window.unwrap_or(self.width)));
        let Some(unpadded) = &self.unpadded else { return Some(near) };
        let unpadded = on_device(unpadded, device).view([-1, 1, 1, 1]);
        let near = near.logical_and(&slots().lt_tensor(&unpadded));
        // Padding after a whole window of padding attends to itself, as each query must attend to a key.
        let none = near.any_dim(-1, true).logical_not();
        Some(near.logical_or(&none.logical_and(&back.eq(0))))
    }

    /// The length of each token's sequence, `[N]` i64.
    pub fn len_of_each_token(&self) -> Tensor {
        let mut lens: Vec<i64> = self.lens.iter().flat_map(|&len| std::iter::repeat_n(len, len as usize)).collect();
        lens.resize(self.attention_positions().size()[0] as usize, 1);
        on_device(&lens, self.tokens.device())
    }

    /// Number of tokens of the sequences, without the unused ones of [`Layout::padded`].
    fn used(&self) -> i64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Converts packed [N, ...] to [rows, width, ...].
    fn pad(&self, packed: &Tensor) -> Tensor {
        let mut shape = packed.size();
        shape.splice(0..1, [self.rows(), self.width]);
        if !self.is_ragged() {
            packed.narrow(0, 0, self.used()).view(shape.as_slice())
        } else {
            packed.index_select(0, &self.slots().0).view(shape.as_slice())
        }
    }

    /// Converts [rows, width, ...] to packed [N, ...].
    fn unpad(&self, padded: &Tensor) -> Tensor {
        let mut shape = padded.size();
        shape.splice(0..2, [-1]);
        let flat = padded.reshape(shape.as_slice());
        let packed = if !self.is_ragged() { flat } else { flat.index_select(0, &self.slots().1) };
        match self.attention_positions().size()[0] - self.used() {
            0 => packed,
            unused => packed.constant_pad_nd([0, 0, 0, unused]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn computed_tokens_are_parts_that_end_where_a_sequence_leaves_them() {
        let sequences =
            [vec![1i64, 2, 3, 4], vec![1, 2, 3, 5, 6], vec![1, 2, 7], vec![1, 2, 7], vec![8, 9], vec![8, 1]];
        let layout = Layout::sharing(&sequences, &[0, 3, 2, 3, 0, 1], Device::Cpu);
        let PackedRows { starts, parents } = layout.computed_rows();
        // 1 2 | 3 | 4 | 5 6 | 7 | 8 | 9 | 1
        assert_eq!(starts, [0, 2, 3, 4, 6, 7, 8, 9, 10]);
        assert_eq!(parents.unwrap(), [-1, 0, 1, 1, 0, -1, 5, 5]);
        let plain = Layout::new(&sequences, Device::Cpu);
        assert_eq!((plain.computed_rows().starts, plain.computed_rows().parents), (&plain.starts[..], None));
    }

    #[test]
    fn flash_attention_is_used_only_where_it_is_supported() {
        let plain = || Scores { scale: 0.125, softcap: None, window: None, causal: true, sinks: None };
        let takes = |scores, kind, head_dim, width| flash_takes_shape(&scores, kind, head_dim, width);
        for kind in [Kind::Half, Kind::BFloat16] {
            assert!(takes(plain(), kind, 64, 9));
        }
        assert!(takes(plain(), Kind::BFloat16, 256, 9));
        assert!(takes(Scores { causal: false, ..plain() }, Kind::BFloat16, 64, 9));
        assert!(takes(Scores { window: Some(4), ..plain() }, Kind::BFloat16, 64, 9));
        assert!(!takes(Scores { window: Some(4), causal: false, ..plain() }, Kind::BFloat16, 64, 9));
        assert!(!takes(Scores { softcap: Some(50.0), ..plain() }, Kind::BFloat16, 64, 9));
        let sinks = Some(Tensor::zeros([2], (Kind::Float, Device::Cpu)));
        assert!(!takes(Scores { sinks, ..plain() }, Kind::BFloat16, 64, 9));
        assert!(!takes(plain(), Kind::Float, 64, 9));
        assert!(!takes(plain(), Kind::BFloat16, 20, 9));
        assert!(!takes(plain(), Kind::BFloat16, 264, 9));
        assert!(!takes(plain(), Kind::BFloat16, 64, 1));
        let on_cpu = Tensor::zeros([9, 2, 64], (Kind::BFloat16, Device::Cpu));
        assert!(!flash_takes(&plain(), &on_cpu, 9));
    }

    #[test]
    fn rows_in_blocks_of_queries_have_the_scores_of_whole_rows() {
        use crate::model::{CausalLm, ModelOptions, Precision, SequenceClassifier, StopCheck};
        let dir =
            |name: &str| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
        let rows: Vec<Vec<i64>> = [23i64, 9, 30].map(|len| (0..len).map(|t| 5 + (7 * t + len) % 70).collect()).to_vec();
        let with = |block: Option<i64>, run: &dyn Fn() -> Tensor| {
            BLOCK.set(block);
            let result = tch::no_grad(run).to_kind(Kind::Float);
            BLOCK.set(None);
            result
        };
        let check = |name: &str, least: f64, run: &dyn Fn() -> Tensor| {
            let whole = with(None, run);
            for block in [1, 4, 7, 100] {
                let gap = (&whole - with(Some(block), run)).abs().max().double_value(&[]);
                let size = whole.abs().max().double_value(&[]).max(1.0);
                assert!(gap <= least * size, "{name}, blocks of {block}: {gap}");
            }
        };
        // f16 has no kernels: windows, a soft cap; and a bias by distance in f32, of encoder and decoder.
        let half = ModelOptions { precision: Precision::F16, ..ModelOptions::default() };
        for (name, options, least) in [
            ("gemma2", half, 4e-3),
            ("mistral", half, 4e-3),
            ("t5", ModelOptions::default(), 1e-5),
            ("gpt_oss", ModelOptions::default(), 1e-5),
        ] {
            let model = CausalLm::from_pretrained(&dir(name), options).unwrap();
            check(name, least, &|| model.prefill(&rows, 31, StopCheck::NEVER).unwrap().1);
        }
        // Relative positions; windows in both directions.
        for name in ["deberta_cls1", "modernbert_cls1"] {
            let model = SequenceClassifier::from_pretrained(&dir(name), None, ModelOptions::default()).unwrap();
            check(name, 1e-5, &|| model.scores(&rows).unwrap());
        }
        assert_eq!([4096, 4097].map(|width| block_queries(width, 8 * width)), [None, Some(255)]);
        assert_eq!(block_queries(1 << 20, 1 << 26), Some(16));
    }

    #[test]
    fn attention_over_a_tree_of_tokens_has_the_numbers_and_gradients_of_whole_sequences() {
        use crate::model::{Batch, CausalLm, ModelOptions, Param, TokenLogprobs};
        use std::ops::Range;
        let dir =
            |name: &str| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
        let begun = |from: i64, len: i64, rest: &[i64]| (from..from + len).chain(rest.iter().copied()).collect();
        // A row without tokens of its own, one that leaves the prompt before its end, and two prompts.
        let rows: [Vec<i64>; 7] = [
            begun(5, 9, &[40, 41, 42]),
            begun(5, 9, &[40, 41, 42]),
            begun(5, 9, &[50]),
            begun(5, 9, &[40, 61, 62, 63, 64]),
            begun(5, 4, &[65, 66, 67]),
            begun(30, 2, &[70, 71]),
            begun(30, 2, &[80, 81, 82]),
        ];
        let (spans, shared) = ([9..12, 9..12, 9..10, 9..14, 5..7, 2..4, 2..5], [0, 12, 9, 9, 4, 0, 2]);
        let run = |model: &CausalLm, passes: Option<usize>| {
            model.params().iter().for_each(|param| param.tensor.shallow_clone().zero_grad());
            TREES.set(passes);
            let weights = Tensor::arange(19, (Kind::Float, Device::Cpu)) - 7.0;
            let loss = |slice: Range<i64>, now: &TokenLogprobs| {
                (&now.logprobs * weights.narrow(0, slice.start, slice.end - slice.start)).sum(Kind::Float)
            };
            let batch = Batch::new(&rows, &spans).sharing(passes.map(|_| &shared[..]));
            let now = model.logprobs_backward(batch, 0.7, loss).unwrap().logprobs.detach();
            let again = model.logprobs_of(batch, 0.7, false).unwrap().logprobs.detach();
            let grad = |param: &Param| {
                let grad = param.tensor.grad();
                if grad.defined() { grad.copy() } else { param.tensor.detach().zeros_like() }
            };
            let all = [now, again].into_iter().chain(model.params().iter().map(grad));
            (all.collect::<Vec<_>>(), TREES.replace(None))
        };
        let check = |name: &str, takes: bool| {
            let mut model = CausalLm::from_pretrained(&dir(name), ModelOptions::default()).unwrap();
            model.set_trainable(true);
            for checkpointing in [false, true] {
                model.set_gradient_checkpointing(checkpointing);
                let ((expected, _), (found, passes)) = (run(&model, None), run(&model, Some(0)));
                assert_eq!(passes.is_some_and(|passes| passes > 0), takes, "{name}");
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let gap = (found - expected).abs().max().double_value(&[]);
                    let size = expected.abs().max().double_value(&[]).max(1.0);
                    assert!(gap <= 2e-5 * size, "{name}, checkpointing {checkpointing}, tensor {i}: {gap:e} of {size}");
                }
            }
        };
        for name in ["gpt_neox", "gpt2", "opt", "llama_untied", "llama_yarn", "qwen2", "qwen3", "qwen3_5", "olmo2"] {
            check(name, true);
        }
        // Windows that are shorter than the rows; a soft cap.
        check("mistral", false);
        check("gemma2", false);
    }

    #[test]
    fn starts_on_the_device_are_the_sums_of_the_lengths_in_i32() {
        let layout = Layout::new(&[vec![1; 3], vec![1; 1], vec![1; 5]], Device::Cpu);
        let starts = layout.device_starts();
        assert_eq!((starts.kind(), Vec::<i32>::try_from(starts).unwrap()), (Kind::Int, vec![0, 3, 4, 9]));
    }
}
