//! How tokens lie in memory: several sequences packed one after another, and the keys and values kept while decoding.

use crate::Result;
use tch::{Device, Kind, Tensor};

/// Sequences of different lengths, packed: N tokens in all, no padding. Only attention sees them as [rows, width].
pub(crate) struct Layout {
    /// Token ids, [N] i64.
    pub(crate) tokens: Tensor,
    /// Place of each token in its sequence, [N] i64.
    pub(crate) positions: Tensor,
    /// Length of each sequence.
    pub(crate) lens: Vec<i64>,
    /// Where each sequence begins in the packed order.
    pub(crate) starts: Vec<i64>,
    /// Length of the longest.
    pub(crate) width: i64,
    /// Packed index of each slot of [rows, width], and slot of each packed token; `None` when no row is short.
    ragged: Option<(Tensor, Tensor)>,
}

impl Layout {
    pub(crate) fn new<S: AsRef<[i64]>>(sequences: &[S], device: Device) -> Self {
        let lens: Vec<i64> = sequences.iter().map(|s| s.as_ref().len() as i64).collect();
        let width = lens.iter().copied().max().unwrap_or(0);
        let starts: Vec<i64> = lens.iter().scan(0, |end, len| Some(std::mem::replace(end, *end + len))).collect();
        let tokens: Vec<i64> = sequences.iter().flat_map(|s| s.as_ref()).copied().collect();
        let positions: Vec<i64> = lens.iter().flat_map(|&len| 0..len).collect();
        let on_device = |ids: &[i64]| Tensor::from_slice(ids).to_device(device);
        let ragged = lens.iter().any(|&len| len != width).then(|| {
            // A slot behind a short row's end repeats the row's last token. Nothing attends to it from before, and what
            // it computes is dropped, so its content is free; a finite one keeps the backward pass finite.
            let slots: Vec<i64> = starts
                .iter()
                .zip(&lens)
                .flat_map(|(&start, &len)| (0..width).map(move |t| start + t.min(len - 1).max(0)))
                .collect();
            let places: Vec<i64> =
                lens.iter().zip(0i64..).flat_map(|(&len, row)| (0..len).map(move |t| row * width + t)).collect();
            (on_device(&slots), on_device(&places))
        });
        Self { tokens: on_device(&tokens), positions: on_device(&positions), lens, starts, width, ragged }
    }

    pub(crate) fn rows(&self) -> i64 {
        self.lens.len() as i64
    }

    /// Packed [N, ...] as [rows, width, ...].
    pub(crate) fn pad(&self, packed: &Tensor) -> Tensor {
        let mut shape = packed.size();
        shape.splice(0..1, [self.rows(), self.width]);
        match &self.ragged {
            None => packed.view(shape.as_slice()),
            Some((slots, _)) => packed.index_select(0, slots).view(shape.as_slice()),
        }
    }

    /// [rows, width, ...] as packed [N, ...].
    pub(crate) fn unpad(&self, padded: &Tensor) -> Tensor {
        let mut shape = padded.size();
        shape.splice(0..2, [-1]);
        let flat = padded.reshape(shape.as_slice());
        match &self.ragged {
            None => flat,
            Some((_, places)) => flat.index_select(0, places),
        }
    }
}

/// The keys and values of the rows that are being decoded, preallocated.
///
/// Each layer's keys and values are [rows * capacity, kv_heads * head_dim]; row r's position p lies at r * capacity + p.
pub(crate) struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
    /// How many positions of each row are filled.
    lens: Vec<i64>,
    capacity: i64,
    kv_heads: i64,
    head_dim: i64,
    device: Device,
    /// Where the next tokens go, `[rows]` i64, and what they may attend to, [rows, 1, 1, width] f32 with 0 or -inf.
    step: Option<(Tensor, Tensor, i64)>,
}

impl KvCache {
    pub(crate) fn new(
        num_layers: i64,
        rows: i64,
        capacity: i64,
        kv_heads: i64,
        head_dim: i64,
        options: (Kind, Device),
    ) -> Result<Self> {
        // Zeros, not empty memory: a masked NaN would still spoil the weighted sum of the values.
        let empty = || Tensor::f_zeros([rows.saturating_mul(capacity), kv_heads * head_dim], options);
        let layers = (0..num_layers).map(|_| Ok((empty()?, empty()?))).collect::<Result<_>>()?;
        Ok(Self { layers, lens: vec![0; rows as usize], capacity, kv_heads, head_dim, device: options.1, step: None })
    }

    /// Places of each row's next token in its sequence.
    pub(crate) fn next_positions(&self) -> Tensor {
        Tensor::from_slice(&self.lens).to_device(self.device)
    }

    /// Stores whole sequences, [N, kv_heads, head_dim] each, at the beginning of the rows.
    pub(crate) fn store_sequences(&mut self, layer: usize, layout: &Layout, keys: &Tensor, values: &Tensor) {
        let places: Vec<i64> = layout
            .lens
            .iter()
            .zip(0i64..)
            .flat_map(|(&len, row)| (0..len).map(move |t| (row, t)))
            .map(|(row, t)| row * self.capacity + t)
            .collect();
        self.write(layer, &Tensor::from_slice(&places).to_device(self.device), keys, values);
        self.lens.clone_from(&layout.lens);
    }

    /// Prepares for one more token in every row; the decoder calls it once per forward pass.
    pub(crate) fn begin_step(&mut self) {
        let places: Vec<i64> = self.lens.iter().zip(0i64..).map(|(len, row)| row * self.capacity + len).collect();
        for len in &mut self.lens {
            *len += 1;
        }
        let width = self.lens.iter().copied().max().unwrap_or(0);
        let lens = Tensor::from_slice(&self.lens).to_device(self.device).unsqueeze(1);
        let beyond = Tensor::arange(width, (Kind::Int64, self.device)).unsqueeze(0).ge_tensor(&lens);
        let kind = self.layers[0].0.kind();
        let mask = Tensor::zeros([self.lens.len() as i64, width], (kind, self.device))
            .masked_fill_(&beyond, f64::NEG_INFINITY)
            .unsqueeze(1)
            .unsqueeze(1);
        self.step = Some((Tensor::from_slice(&places).to_device(self.device), mask, width));
    }

    /// Attends from one new token per row, `queries` [rows, heads, head_dim], to all of its row; [rows, heads * head_dim].
    pub(crate) fn attend_step(&mut self, layer: usize, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Tensor {
        let (places, mask, width) = self.step.take().expect("begin_step comes before attend_step");
        self.write(layer, &places, keys, values);
        let rows = self.lens.len() as i64;
        let view = |cache: &Tensor| {
            cache.view([rows, self.capacity, self.kv_heads, self.head_dim]).narrow(1, 0, width).transpose(1, 2)
        };
        let (keys, values) = (view(&self.layers[layer].0), view(&self.layers[layer].1));
        // Query heads that share a key head become that head's query positions: keys and values are never repeated.
        let grouped = queries.reshape([rows, self.kv_heads, -1, self.head_dim]);
        let out = Tensor::scaled_dot_product_attention(&grouped, &keys, &values, Some(&mask), 0.0, false, None, false);
        self.step = Some((places, mask, width));
        out.reshape([rows, -1])
    }

    /// Keeps only the rows at `kept`, in that order.
    pub(crate) fn keep_rows(&mut self, kept: &[i64]) {
        let index = Tensor::from_slice(kept).to_device(self.device);
        let rows = self.lens.len() as i64;
        for (keys, values) in &mut self.layers {
            for cache in [keys, values] {
                let wide = cache.view([rows, -1]).index_select(0, &index);
                *cache = wide.view([kept.len() as i64 * self.capacity, -1]);
            }
        }
        self.lens = kept.iter().map(|&row| self.lens[row as usize]).collect();
        self.step = None;
    }

    fn write(&mut self, layer: usize, places: &Tensor, keys: &Tensor, values: &Tensor) {
        let (all_keys, all_values) = &mut self.layers[layer];
        let _ = all_keys.index_copy_(0, places, &keys.flatten(1, -1));
        let _ = all_values.index_copy_(0, places, &values.flatten(1, -1));
    }
}
