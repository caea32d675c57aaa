//! Layers with a state in the place of attention: short convolutions (LFM2) and the gated delta rule (Qwen3.5, Qwen3-Next).

use super::delta::{DeltaInputs, delta_rule, delta_step, repeat_heads, unit};
use super::gates::gated;
use super::layout::Layout;
use super::linear::{Linear, LinearShape, Norm};
use super::lora::Dropout;
use super::mixing::{GatedDelta, Mixing, MixingInputs, MixingNames};
use super::params::{Builder, Init};
use super::shape::{Activation, NormKind, Shape};
use super::state::{AppendedRows, State};
use super::uses_kernels;
use rlhf_base::Result;
use tch::{Kind, Tensor};
use tch_ext::{DeltaSizes, PackedRows, on_device};

/// A layer's part in the place of attention, without its output projection.
#[derive(Debug)]
pub(super) struct Mixer {
    inputs: Vec<Linear>,
    conv: Convolution,
    /// The gated delta rule after the convolution, or a gate alone.
    rule: Option<Rule>,
    /// Dtype of products.
    compute: Kind,
}

/// A causal convolution of each column of its input.
#[derive(Debug)]
struct Convolution {
    /// `[width, 1, kernel]`.
    weight: Tensor,
    /// `[width]`.
    bias: Option<Tensor>,
}

/// The gated delta rule.
#[derive(Debug)]
struct Rule {
    sizes: GatedDelta,
    /// Whether the projections have the parts of each key head in turn.
    is_grouped: bool,
    /// Logarithms of the rates of decay, `[value heads]`.
    rates: Tensor,
    /// Biases of the decays, `[value heads]`.
    biases: Tensor,
    norm: Norm,
}

/// The projections of the tokens of a pass.
struct Projected {
    /// Input of the convolution, `[N, width]`.
    convolved: Tensor,
    /// Gates of the output, `[N, width]`.
    gates: Tensor,
    /// Strengths and decays of the delta rule, `[N, value heads]` each.
    rates: Option<[Tensor; 2]>,
}

/// Packed sequences that are mixed, and the states before them.
struct Packed<'a> {
    lens: &'a [i64],
    /// Start of each sequence in the packed order, and the end of the last.
    starts: &'a [i64],
    /// Position of each token in its sequence, `[N]` i64.
    positions: &'a Tensor,
    start: Option<&'a State>,
}

impl Convolution {
    fn build(b: &mut Builder<'_>, base: &str, width: i64, kernel: i64, (bias, std): (bool, f64)) -> Result<Self> {
        let weight = b.tensor(format!("{base}.weight"), &[width, 1, kernel], Init::Normal(std), true)?;
        let bias = bias.then(|| b.tensor(format!("{base}.bias"), &[width], Init::Zeros, false)).transpose()?;
        Ok(Self { weight, bias })
    }

    fn kernel(&self) -> i64 {
        self.weight.size()[2]
    }

    /// The weights of the token that is `back` tokens before, `[width]` f32.
    fn tap(&self, weight: &Tensor, back: i64) -> Tensor {
        weight.select(2, self.kernel() - 1 - back).squeeze_dim(1)
    }

    /// The convolution of packed sequences `x` `[N, width]`, in f32; `positions` `[N]` are positions in the sequences.
    fn forward(&self, x: &Tensor, positions: &Tensor) -> Tensor {
        let (x, weight, tokens) = (x.to_kind(Kind::Float), self.weight.to_kind(Kind::Float), x.size()[0]);
        let mut sum = &x * self.tap(&weight, 0);
        for back in (1..self.kernel()).take_while(|&back| back < tokens) {
            let before = x.narrow(0, 0, tokens - back).constant_pad_nd([0, 0, back, 0]);
            // Nothing comes before a sequence.
            sum += before.masked_fill(&positions.lt(back).unsqueeze(1), 0.0) * self.tap(&weight, back);
        }
        self.with_bias(sum)
    }

    /// The convolution of the last tokens of each row, `state` `[rows, kernel, width]`, in f32.
    fn apply_to_state(&self, state: &Tensor) -> Tensor {
        let weight = self.weight.to_kind(Kind::Float).squeeze_dim(1).tr().unsqueeze(0);
        self.with_bias((state.to_kind(Kind::Float) * weight).sum_dim_intlist([1i64].as_slice(), false, Kind::Float))
    }

    fn with_bias(&self, sum: Tensor) -> Tensor {
        match &self.bias {
            Some(bias) => sum + bias.to_kind(Kind::Float),
            None => sum,
        }
    }
}

/// The last `kernel` tokens of each of the packed sequences `x` `[N, width]`, oldest first, after the tokens of `start`, or else after zeros:
/// `[rows, kernel, width]`.
fn last_tokens(x: &Tensor, lens: &[i64], kernel: i64, start: Option<&State>) -> Tensor {
    let rows = lens.iter().scan(0, |end, &len| {
        *end += len;
        Some((*end, len))
    });
    let last = rows.enumerate().map(|(row, (end, len))| {
        let last = x.narrow(0, end - len.min(kernel), len.min(kernel));
        match start {
            _ if len >= kernel => last,
            None => last.constant_pad_nd([0, 0, kernel - len, 0]),
            Some(state) => {
                let before = state.conv.get(row as i64).narrow(0, len, kernel - len);
                Tensor::cat(&[before.to_kind(last.kind()), last], 0)
            }
        }
    });
    Tensor::stack(&last.collect::<Vec<_>>(), 0)
}

impl Mixer {
    /// Builds the part of the layer whose tensors are at `at`.
    pub(super) fn build(
        mixing: &Mixing,
        names: &MixingNames,
        at: &dyn Fn(&str) -> String,
        shape: &Shape,
        (b, compute): (&mut Builder<'_>, Kind),
    ) -> Result<Self> {
        let (hidden, std) = (shape.hidden_size, shape.initializer_range);
        let bias = mixing.out_bias();
        let linear = |b: &mut Builder<'_>, name: &str, width_out: i64| {
            let shape = LinearShape { width_in: hidden, width_out, bias, transposed: false, std };
            Linear::build(b, &at(name), shape, compute)
        };
        let rule = |b: &mut Builder<'_>, sizes: GatedDelta, is_grouped: bool, rest: [&str; 3]| -> Result<Rule> {
            let [rates, biases, norm] = rest;
            let rates = b.tensor(at(rates), &[sizes.value_heads], Init::LogUniform([0.01, 16.0]), true)?;
            let biases = b.tensor(at(biases), &[sizes.value_heads], Init::Ones, false)?;
            let norm = Norm::of_kind(b, &at(norm), sizes.value_dim, (NormKind::Rms, shape.norm_eps))?;
            Ok(Rule { sizes, is_grouped, rates, biases, norm })
        };
        let (inputs, rule) = match (mixing, names.inputs) {
            (Mixing::GatedDelta(sizes), MixingInputs::Separate { linears, rest }) => {
                let widths = [sizes.convolved(), sizes.values(), sizes.value_heads, sizes.value_heads];
                let inputs = linears.into_iter().zip(widths).map(|(name, width)| linear(b, name, width));
                (inputs.collect::<Result<Vec<_>>>()?, Some(rule(b, *sizes, false, rest)?))
            }
            (Mixing::GatedDelta(sizes), MixingInputs::Grouped { linears, rest }) => {
                let widths = [sizes.convolved() + sizes.values(), 2 * sizes.value_heads];
                let inputs = linears.into_iter().zip(widths).map(|(name, width)| linear(b, name, width));
                (inputs.collect::<Result<Vec<_>>>()?, Some(rule(b, *sizes, true, rest)?))
            }
            (Mixing::ShortConv { .. }, MixingInputs::Parts(name)) => (vec![linear(b, name, 3 * hidden)?], None),
            _ => unreachable!("the names are those of the layer's kind"),
        };
        let (width, kernel) = (mixing.convolved(hidden), mixing.kernel());
        let conv = Convolution::build(b, &at(names.conv), width, kernel, (bias, std))?;
        Ok(Self { inputs, conv, rule, compute })
    }

    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.inputs.iter()
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.inputs.iter_mut()
    }

    pub(super) fn norm(&self) -> Option<&Norm> {
        self.rule.as_ref().map(|rule| &rule.norm)
    }

    /// The input of the output projection, `[N, width]`, of whole sequences; `x` is `[N, hidden size]`. Stores the states after them in `state`, if
    /// there is one.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        layout: &Layout,
        state: Option<&mut State>,
        dropout: Option<&Dropout>,
    ) -> Tensor {
        // As in transformers, padding has no input.
        let text = layout.text_mask();
        let masked = text.map(|text| x * text.to_kind(x.kind()));
        let x = masked.as_ref().unwrap_or(x);
        if state.is_none() && uses_kernels(self.compute, x.device()) {
            return self.forward_by_kernels(x, layout.computed_rows(), dropout);
        }
        let in_all = |x: &Tensor| layout.shared.as_ref().map_or_else(|| x.shallow_clone(), |shared| shared.expand(x));
        let Projected { convolved, gates, rates } = self.project(x, dropout);
        let (convolved, rates) = (in_all(&convolved), rates.map(|rates| rates.map(|x| in_all(&x))));
        let positions = layout.attention_positions();
        let packed = Packed { lens: &layout.lens, starts: &layout.starts, positions, start: None };
        let (mixed, memory) = self.mix(&convolved, rates.as_ref(), &packed);
        if let Some(state) = state {
            let used = convolved.narrow(0, 0, layout.lens.iter().sum());
            state.replace(&last_tokens(&used, &layout.lens, self.conv.kernel(), None), memory.as_ref());
        }
        let mixed = layout.shared.as_ref().map_or_else(|| mixed.shallow_clone(), |shared| shared.collapse(&mixed));
        self.gate(&mixed, &gates)
    }

    /// [`Mixer::forward`] by kernels, which compute tokens that sequences have in common at their start once.
    fn forward_by_kernels(&self, x: &Tensor, packed: PackedRows<'_>, dropout: Option<&Dropout>) -> Tensor {
        let weight = &self.conv.weight;
        let Some(rule) = &self.rule else {
            let parts = self.inputs[0].forward_dropping(x, dropout);
            return tch_ext::gated_convolution(&parts, weight, self.conv.bias.as_ref(), packed);
        };
        let Projected { convolved, gates, rates } = self.project(x, dropout);
        let [strengths, decays] = rates.expect("the delta rule has strengths and decays");
        let [decays, strengths] = rule.rates(&strengths, &decays);
        let convolved = tch_ext::silu_convolution(&convolved, weight, packed);
        self.gate(&tch_ext::delta_rule(rule.kernel(), &convolved, &decays, &strengths, packed), &gates)
    }

    /// Computes [`Mixer::forward`] for one more token of each row and updates the states. A row that is not `active` keeps its state, and its
    /// output is the output of the last token in the state.
    pub(super) fn step(&self, x: &Tensor, state: &mut State, active: Option<&Tensor>) -> Tensor {
        let Projected { convolved, gates, rates } = self.project(x, None);
        let kernel = self.conv.kernel();
        let last = convolved.to_kind(state.conv.kind()).unsqueeze(1);
        let moved = Tensor::cat(&[state.conv.narrow(1, 1, kernel - 1), last], 1);
        let moved = match active {
            Some(active) => moved.where_self(&active.unsqueeze(-1).gt(0.5), &state.conv),
            None => moved,
        };
        state.conv.copy_(&moved);
        let mixed = self.conv.apply_to_state(&state.conv);
        let (Some(rule), Some([strengths, decays]), Some(memory)) = (&self.rule, &rates, &mut state.memory) else {
            return self.gate(&mixed, &gates);
        };
        let (mixed, [mut decays, mut strengths]) = (mixed.silu(), rule.rates(strengths, decays));
        let outputs = if uses_kernels(self.compute, x.device()) {
            tch_ext::delta_step(rule.kernel(), &mixed, [&decays, &strengths], active, memory)
        } else {
            if let Some(active) = active {
                strengths *= active;
                decays *= active;
            }
            delta_step(&rule.inputs(&mixed, [decays, strengths]), memory).flatten(1, 2)
        };
        self.gate(&outputs, &gates)
    }

    /// [`Mixer::forward`] of further tokens in some rows of a cache.
    pub(super) fn append(&self, x: &Tensor, state: &mut State, appended: &AppendedRows) -> Tensor {
        let Projected { convolved, gates, rates } = self.project(x, None);
        let AppendedRows { rows, counts } = appended;
        let start = state.select_rows(rows);
        let positions: Vec<i64> = counts.iter().flat_map(|&count| 0..count).collect();
        let positions = on_device(&positions, x.device());
        let mut starts = vec![0];
        starts.extend(counts.iter().scan(0, |end, &count| {
            *end += count;
            Some(*end)
        }));
        let packed = Packed { lens: counts, starts: &starts, positions: &positions, start: Some(&start) };
        let (mixed, memory) = self.mix(&convolved, rates.as_ref(), &packed);
        let conv = last_tokens(&convolved, counts, self.conv.kernel(), Some(&start));
        state.replace_rows(rows, &State { conv, memory });
        self.gate(&mixed, &gates)
    }

    /// The projections of `x` `[N, hidden size]`.
    fn project(&self, x: &Tensor, dropout: Option<&Dropout>) -> Projected {
        let mut parts = self.inputs.iter().map(|linear| linear.forward_dropping(x, dropout)).collect::<Vec<_>>();
        let Some(rule) = &self.rule else {
            let parts = parts[0].chunk(3, -1);
            return Projected { convolved: &parts[0] * &parts[2], gates: parts[1].shallow_clone(), rates: None };
        };
        if rule.is_grouped {
            parts = rule.ungrouped(&parts[0], &parts[1]);
        }
        let [convolved, gates, strengths, decays] = parts.try_into().expect("four parts");
        Projected { convolved, gates, rates: Some([strengths, decays]) }
    }

    /// The convolution, and the delta rule if there is one, over packed sequences: the outputs `[N, width]` f32, and the matrices after each
    /// sequence.
    fn mix(&self, x: &Tensor, rates: Option<&[Tensor; 2]>, packed: &Packed<'_>) -> (Tensor, Option<Tensor>) {
        let by_kernels = uses_kernels(self.compute, x.device());
        let convolve = || match packed.start {
            None => self.conv.forward(x, packed.positions),
            Some(start) => self.continued(x, packed.lens, start),
        };
        let (Some(rule), Some([strengths, decays])) = (&self.rule, rates) else { return (convolve(), None) };
        let convolved = if by_kernels && packed.start.is_none() {
            tch_ext::silu_convolution(x, &self.conv.weight, PackedRows::new(packed.starts))
        } else {
            convolve().silu()
        };
        let rates = rule.rates(strengths, decays);
        if !by_kernels {
            let (mixed, memory) = rule.over_sequences(&rule.inputs(&convolved, rates), packed);
            return (mixed, Some(memory));
        }
        let [decays, strengths] = &rates;
        let start = packed.start.and_then(|start| start.memory.as_ref());
        let (mixed, memory) =
            tch_ext::delta_rule_from(rule.kernel(), &convolved, [decays, strengths], packed.starts, start);
        (mixed, Some(memory))
    }

    /// The convolution of packed sequences that continue the ones of `start`.
    fn continued(&self, x: &Tensor, lens: &[i64], start: &State) -> Tensor {
        let kernel = self.conv.kernel();
        let rows = x.split_with_sizes(lens, 0).into_iter().enumerate().map(|(row, tokens)| {
            let before = start.conv.get(row as i64).narrow(0, 1, kernel - 1);
            let whole = Tensor::cat(&[before.to_kind(tokens.kind()), tokens], 0);
            let positions = Tensor::arange(whole.size()[0], (Kind::Int64, x.device()));
            self.conv.forward(&whole, &positions).narrow(0, kernel - 1, lens[row])
        });
        Tensor::cat(&rows.collect::<Vec<_>>(), 0)
    }

    /// The input of the output projection: `mixed` `[N, width]` f32, gated.
    fn gate(&self, mixed: &Tensor, gates: &Tensor) -> Tensor {
        let out = match &self.rule {
            None => mixed * gates,
            Some(rule) => {
                let (normed, gates) = (rule.norm.forward_heads(mixed, Kind::Float), gates.to_kind(Kind::Float));
                gated(Activation::Silu, &gates, &normed)
            }
        };
        out.to_kind(self.compute)
    }
}

impl Rule {
    /// Queries, keys and values; gates; strengths; and decays, of two products with the parts of each key head in turn.
    fn ungrouped(&self, products: &Tensor, rates: &Tensor) -> Vec<Tensor> {
        let GatedDelta { key_heads, value_heads, key_dim, value_dim, .. } = self.sizes;
        let group = value_heads / key_heads;
        let by_head = |x: &Tensor, widths: &[i64]| {
            let parts = x.view([-1, key_heads, widths.iter().sum::<i64>()]).split_with_sizes(widths, -1);
            parts.into_iter().map(|part| part.flatten(1, 2)).collect::<Vec<_>>()
        };
        let mut parts = by_head(products, &[key_dim, key_dim, group * value_dim, group * value_dim]);
        let gates = parts.pop().expect("four parts");
        let mut all = vec![Tensor::cat(&parts, -1), gates];
        all.extend(by_head(rates, &[group, group]));
        all
    }

    /// The sizes in the kernels' form.
    fn kernel(&self) -> DeltaSizes {
        let GatedDelta { key_heads, value_heads, key_dim, value_dim, .. } = self.sizes;
        DeltaSizes { key_heads, value_heads, key_dim, value_dim }
    }

    /// Logarithms of the decays, and strengths of the corrections, `[N, value heads]` f32 each, from their projections.
    fn rates(&self, strengths: &Tensor, decays: &Tensor) -> [Tensor; 2] {
        let rates = -self.rates.to_kind(Kind::Float).exp();
        let decays = rates * (decays.to_kind(Kind::Float) + self.biases.to_kind(Kind::Float)).softplus();
        [decays, strengths.to_kind(Kind::Float).sigmoid()]
    }

    /// The inputs of the delta rule of tokens whose convolved queries, keys and values are `x` `[N, width]` f32, without a dimension of rows.
    fn inputs(&self, x: &Tensor, [decays, strengths]: [Tensor; 2]) -> DeltaInputs {
        let GatedDelta { key_heads, value_heads, key_dim, value_dim, .. } = self.sizes;
        let parts = x.split_with_sizes([self.sizes.keys(), self.sizes.keys(), self.sizes.values()].as_slice(), -1);
        let heads = |x: &Tensor| repeat_heads(&unit(&x.view([-1, key_heads, key_dim])), value_heads / key_heads);
        DeltaInputs {
            queries: heads(&parts[0]) * (key_dim as f64).powf(-0.5),
            keys: heads(&parts[1]),
            values: parts[2].view([-1, value_heads, value_dim]),
            decays,
            strengths,
        }
    }

    /// The delta rule over packed sequences: the outputs `[N, width]`, and the matrices after each sequence.
    fn over_sequences(&self, inputs: &DeltaInputs, packed: &Packed<'_>) -> (Tensor, Tensor) {
        let tokens = packed.positions.size()[0];
        let slots = Slots::new(packed.lens, tokens, packed.positions.device());
        let padded = DeltaInputs {
            queries: slots.pad(&inputs.queries),
            keys: slots.pad(&inputs.keys),
            values: slots.pad(&inputs.values),
            decays: slots.pad(&inputs.decays),
            strengths: slots.pad(&inputs.strengths),
        };
        let start = packed.start.and_then(|start| start.memory.as_ref());
        let (outputs, memory) = delta_rule(&padded, start);
        (slots.unpad(&outputs.flatten(2, 3)), memory)
    }
}

/// Places of packed tokens in rows that are padded with zeros to one length.
struct Slots {
    rows: i64,
    width: i64,
    /// Token of each slot; a slot without a token has the index after the last token.
    slot_tokens: Tensor,
    /// Slot of each token.
    token_slots: Tensor,
    /// Number of tokens that belong to no row.
    unused: i64,
}

impl Slots {
    fn new(lens: &[i64], tokens: i64, device: tch::Device) -> Self {
        let (rows, width) = (lens.len() as i64, lens.iter().copied().max().unwrap_or(0));
        let (mut slot_tokens, mut token_slots, mut next) = (Vec::new(), Vec::new(), 0);
        for (row, &len) in lens.iter().enumerate() {
            slot_tokens.extend((0..width).map(|at| if at < len { next + at } else { tokens }));
            token_slots.extend((0..len).map(|at| row as i64 * width + at));
            next += len;
        }
        let (slot_tokens, token_slots) = (on_device(&slot_tokens, device), on_device(&token_slots, device));
        Self { rows, width, slot_tokens, token_slots, unused: tokens - next }
    }

    /// Converts packed `[N, ...]` to `[rows, width, ...]`.
    fn pad(&self, packed: &Tensor) -> Tensor {
        let mut shape = packed.size();
        let mut one = shape.clone();
        one[0] = 1;
        shape.splice(0..1, [self.rows, self.width]);
        let with_zero = Tensor::cat(&[packed, &Tensor::zeros(&one, (packed.kind(), packed.device()))], 0);
        with_zero.index_select(0, &self.slot_tokens).view(shape.as_slice())
    }

    /// Converts `[rows, width, columns]` to packed `[N, columns]`.
    fn unpad(&self, padded: &Tensor) -> Tensor {
        let packed = padded.flatten(0, 1).index_select(0, &self.token_slots);
        if self.unused == 0 { packed } else { packed.constant_pad_nd([0, 0, 0, self.unused]) }
    }
}
