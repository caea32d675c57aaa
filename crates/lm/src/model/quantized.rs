//! Quantized weights of linear layers, in the formats of bitsandbytes: NF4 and FP4 (Dettmers et al. 2023), and LLM.int8's rows of eight
//! bits (Dettmers et al. 2022). Only weights are quantized: activations stay floating-point.

use rlhf_base::name_of;
use rlhf_base::schema::{Choices, MODELS, Settings, exclude, no_effect, refuse};
use rlhf_base::weights::brief;
use rlhf_base::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::OnceLock;
use tch::{Kind, Tensor};

/// The values of the sixteen codes of NF4, and of FP4 in the order of its bits. Source: bitsandbytes 0.50.2, `get_4bit_type`.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
const FP4_TIMES_12: [f32; 16] =
    [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0];
/// The codes of FP4 in the order of their values.
const FP4_ORDER: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];

/// Number of consecutive values that share a scale, and number of scales that share a second-level scale, in newly quantized weights.
const BLOCK: i64 = 64;
const NESTED_BLOCK: i64 = 256;
/// The block sizes that bitsandbytes supports.
const BLOCKS: [i64; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];
/// Number of values that are quantized at once, a multiple of all blocks: larger temporary tensors would leave holes in the heap between
/// the codes.
const AT_ONCE: i64 = 1 << 18;
/// Most values of a weight that a recorded decoding step computes from their codes, at 6 bytes each. Those of larger weights would take too
/// much of the memory that is kept free for recordings, and keep a GPU busy for longer than the host takes to start their operations.
const MOST_RECORDED: i64 = 1 << 24;
/// The shape of a single number.
const NO_DIMENSIONS: [i64; 0] = [];
/// Maximum length of the JSON that describes a weight.
const MOST_STATE: usize = 1 << 12;

/// The names of the tensors beside a weight, after its name.
const ABSMAX: &str = "absmax";
const QUANT_MAP: &str = "quant_map";
const NESTED_ABSMAX: &str = "nested_absmax";
const NESTED_MAP: &str = "nested_quant_map";
const STATE: &str = "quant_state.bitsandbytes__";
/// The names of the tensors beside a weight of eight bits, after its layer's name.
const SCB: &str = "SCB";
const WEIGHT_FORMAT: &str = "weight_format";

/// A data type of four bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Choices)]
#[serde(rename_all = "lowercase")]
#[choice(rename_all = "lowercase")]
pub enum QuantType {
    /// NF4: quantiles of a normal distribution.
    #[default]
    Nf4,
    /// FP4: a sign, two bits of exponent and one of mantissa.
    Fp4,
}

impl QuantType {
    /// The values of the codes.
    fn map(self) -> [f32; 16] {
        match self {
            Self::Nf4 => NF4,
            Self::Fp4 => FP4_TIMES_12.map(|value| value / 12.0),
        }
    }

    /// The codes in the order of their values, and the bounds between them.
    fn sorted(self) -> ([u8; 16], [f32; 15]) {
        let order = match self {
            Self::Nf4 => std::array::from_fn(|code| code as u8),
            Self::Fp4 => FP4_ORDER,
        };
        let map = self.map();
        let value = |at: usize| map[order[at] as usize];
        (order, std::array::from_fn(|at| (value(at) + value(at + 1)) / 2.0))
    }
}

/// The format that the weights of linear layers are quantized to when a model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantization {
    /// Four bits.
    FourBit {
        /// The data type.
        quant_type: QuantType,
        /// Whether the scales are quantized too (double quantization).
        nested: bool,
    },
    /// Eight bits, with a scale for each row.
    EightBit,
}

impl Quantization {
    /// Bytes of a weight of `[out, in]` in this format, with the tensors beside it.
    pub fn bytes(self, [width_out, width_in]: [usize; 2]) -> usize {
        let numel = width_out * width_in;
        let blocks = numel.div_ceil(BLOCK as usize);
        // The table of the codes' values, and roughly the length of the description.
        let described = 64 + 96;
        match self {
            Self::EightBit => numel + 2 * 4 * width_out + 1,
            Self::FourBit { nested: false, .. } => numel.div_ceil(2) + 4 * blocks + described,
            Self::FourBit { nested: true, .. } => {
                numel.div_ceil(2) + blocks + 4 * blocks.div_ceil(NESTED_BLOCK as usize) + 4 * 256 + described + 96
            }
        }
    }

    /// The value of `quantization_config` in `config.json`; the modules `kept` stay unquantized.
    pub(super) fn describe(self, kept: &[String]) -> Value {
        let (four, quant_type, nested) = match self {
            Self::FourBit { quant_type, nested } => (true, quant_type.name(), nested),
            Self::EightBit => (false, "fp4", false),
        };
        json!({
            "_load_in_4bit": four,
            "_load_in_8bit": !four,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": quant_type,
            "bnb_4bit_use_double_quant": nested,
            "llm_int8_enable_fp32_cpu_offload": false,
            "llm_int8_has_fp16_weight": false,
            "llm_int8_skip_modules": (!kept.is_empty()).then_some(kept),
            "llm_int8_threshold": 6.0,
            "load_in_4bit": four,
            "load_in_8bit": !four,
            "quant_method": "bitsandbytes",
        })
    }

    /// The format that `quantization_config` of a `config.json` describes.
    pub(super) fn of_config(described: &Value) -> Option<Self> {
        let is = |name: &str| described.get(name).and_then(Value::as_bool).unwrap_or(false);
        let is_nf4 = described.get("bnb_4bit_quant_type").and_then(Value::as_str) == Some("nf4");
        let quant_type = if is_nf4 { QuantType::Nf4 } else { QuantType::Fp4 };
        let four = || Self::FourBit { quant_type, nested: is("bnb_4bit_use_double_quant") };
        is("load_in_4bit").then(four).or(is("load_in_8bit").then_some(Self::EightBit))
    }

    /// Checks `quantization_config` of a `config.json`: the expected value if weights are not in a format of bitsandbytes.
    pub(super) fn check_config(described: &Value) -> std::result::Result<(), String> {
        let is = |name: &str| described.get(name).and_then(Value::as_bool).unwrap_or(false);
        let method = described.get("quant_method").and_then(Value::as_str);
        let storage = described.get("bnb_4bit_quant_storage").and_then(Value::as_str).unwrap_or("uint8");
        match method {
            Some("bitsandbytes") => {}
            None if is("load_in_4bit") || is("load_in_8bit") => {}
            _ => return Err("none, or that of bitsandbytes".into()),
        }
        if is("load_in_4bit") && storage != "uint8" {
            return Err(format!("bnb_4bit_quant_storage = uint8 in place of {}", brief(storage)));
        }
        Ok(())
    }
}

/// Whether the `quantization_config` in `described` leaves the linear layer of this name unquantized.
pub(super) fn is_skipped(described: &Value, layer: &str) -> bool {
    let modules = described.get("llm_int8_skip_modules").and_then(Value::as_array);
    let is_in = |module: &str| format!(".{layer}.").contains(&format!(".{module}."));
    modules.into_iter().flatten().filter_map(Value::as_str).any(is_in)
}

/// Settings of the quantization of frozen weights, with TRL's names.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Settings)]
pub struct QuantizationConfig {
    /// Hold the frozen weights of linear layers in 4 bits, as bitsandbytes does: the base of an adapter, the reference model, reward
    /// models and a teacher. Embeddings, norms and heads stay as they are, and so does a model that is quantized already.
    #[setting(heading = MODELS)]
    pub load_in_4bit: bool,
    /// As load_in_4bit, in 8 bits: rows of LLM.int8's format, computed with as weights only.
    #[setting(heading = MODELS)]
    pub load_in_8bit: bool,
    /// Data type of 4 bits.
    #[setting(heading = MODELS, default = "nf4")]
    pub bnb_4bit_quant_type: QuantType,
    /// Quantize the scales of 4-bit weights too (double quantization).
    #[setting(heading = MODELS)]
    pub use_bnb_nested_quant: bool,
}

impl QuantizationConfig {
    /// Returns the format of these settings; `None` if weights stay as they are.
    pub fn quantization(&self) -> Option<Quantization> {
        match (self.load_in_4bit, self.load_in_8bit) {
            (true, _) => {
                Some(Quantization::FourBit { quant_type: self.bnb_4bit_quant_type, nested: self.use_bnb_nested_quant })
            }
            (false, true) => Some(Quantization::EightBit),
            (false, false) => None,
        }
    }

    /// The name of the setting that quantizes, for messages.
    pub fn named(&self) -> Option<&'static str> {
        match (self.load_in_4bit, self.load_in_8bit) {
            (true, _) => Some(name_of!(self.load_in_4bit)),
            (false, true) => Some(name_of!(self.load_in_8bit)),
            (false, false) => None,
        }
    }

    /// Checks that a model whose weights are all trained is not quantized.
    pub fn check_trained(&self, use_peft: bool) -> Result<()> {
        let Some(name) = self.named().filter(|_| !use_peft) else { return Ok(()) };
        let rest = " = true needs use_peft: quantized weights are frozen, and adapters beside them are trained";
        refuse(name, rest)
    }

    /// Checks the settings together.
    pub fn check(&self) -> Result<()> {
        if self.load_in_4bit && self.load_in_8bit {
            return exclude(
                name_of!(self.load_in_4bit),
                name_of!(self.load_in_8bit),
                " = true and load_in_8bit = true exclude each other: set one of them",
            );
        }
        if !self.load_in_4bit && self.use_bnb_nested_quant {
            return no_effect(name_of!(self.use_bnb_nested_quant), true, "without load_in_4bit");
        }
        if !self.load_in_4bit && self.bnb_4bit_quant_type != QuantType::default() {
            return no_effect(
                name_of!(self.bnb_4bit_quant_type),
                self.bnb_4bit_quant_type.name(),
                "without load_in_4bit",
            );
        }
        Ok(())
    }
}

/// A quantized weight `[out, in]`. The tensors are those of bitsandbytes' files.
#[derive(Debug)]
pub(super) struct Quantized {
    widths: [i64; 2],
    codes: Tensor,
    scales: Scales,
}

#[derive(Debug)]
enum Scales {
    /// Four bits.
    Blocks {
        quant_type: QuantType,
        block: i64,
        absmax: Tensor,
        map: Tensor,
        nested: Option<Nested>,
        /// The dtype of the weight before it was quantized.
        dtype: Kind,
        /// The description as bytes of JSON.
        state: Tensor,
    },
    /// Eight bits: the greatest absolute value of each row, the number of the layout (0: row after row), and the scales.
    Rows { scb: Tensor, layout: Option<Tensor>, scales: Tensor },
}

#[derive(Debug)]
struct Nested {
    absmax: Tensor,
    map: Tensor,
    block: i64,
    offset: f32,
}

impl Quantized {
    /// Quantizes `weight`, `[out, in]` f32, bf16 or f16, as bitsandbytes does on a CPU. The result is on the weight's device.
    pub(super) fn new(weight: &Tensor, format: Quantization) -> Self {
        let device = weight.device();
        let on_cpu = weight.to_device(tch::Device::Cpu).contiguous();
        let quantized = tch::no_grad(|| match format {
            Quantization::EightBit => Self::eight_bits(&on_cpu),
            Quantization::FourBit { quant_type, nested } => {
                Self::four_bits(&on_cpu, on_cpu.kind(), (quant_type, BLOCK, nested))
            }
        });
        quantized.on_device(device)
    }

    /// Quantizes another weight, f32, in this one's format.
    pub(super) fn like(&self, weight: &Tensor) -> Self {
        let on_cpu = weight.to_device(tch::Device::Cpu).contiguous();
        let quantized = tch::no_grad(|| match &self.scales {
            Scales::Rows { .. } => Self::eight_bits(&on_cpu),
            Scales::Blocks { quant_type, block, nested, dtype, .. } => {
                Self::four_bits(&on_cpu, *dtype, (*quant_type, *block, nested.is_some()))
            }
        });
        quantized.on_device(weight.device())
    }

    fn on_device(self, device: tch::Device) -> Self {
        let to = |tensor: Tensor| tensor.to_device(device);
        let scales = match self.scales {
            Scales::Rows { scb, layout, scales } => Scales::Rows { scb: to(scb), layout, scales: to(scales) },
            Scales::Blocks { quant_type, block, absmax, map, nested, dtype, state } => {
                let nested = nested.map(|n| Nested { absmax: to(n.absmax), map: to(n.map), ..n });
                Scales::Blocks { quant_type, block, absmax: to(absmax), map: to(map), nested, dtype, state }
            }
        };
        Self { widths: self.widths, codes: to(self.codes), scales }
    }

    /// `dtype` is the dtype of the weight that the model computed with.
    fn four_bits(weight: &Tensor, dtype: Kind, (quant_type, block, nests): (QuantType, i64, bool)) -> Self {
        let widths = <[i64; 2]>::try_from(weight.size()).expect("a weight has two dimensions");
        let flat = weight.view([-1]);
        let numel = flat.size()[0];
        let (mut codes, mut absmax) = (Vec::new(), Vec::new());
        for from in (0..numel).step_by(AT_ONCE as usize) {
            let values = flat.narrow(0, from, AT_ONCE.min(numel - from)).to_kind(Kind::Float);
            let (piece, tops) = quantize_blocks(&values, quant_type, block);
            codes.push(piece);
            absmax.push(tops);
        }
        let (codes, absmax) = (Tensor::cat(&codes, 0).unsqueeze(1), Tensor::cat(&absmax, 0));
        let (absmax, nested) = if !nests {
            (absmax, None)
        } else {
            let offset = absmax.mean(Kind::Float).double_value(&[]) as f32;
            let (codes, tops) = quantize_scales(&(absmax - f64::from(offset)));
            let map = Tensor::from_slice(dynamic_map(true));
            (codes, Some(Nested { absmax: tops, map, block: NESTED_BLOCK, offset }))
        };
        let state = describe(quant_type, block, dtype, widths, nested.as_ref());
        let map = Tensor::from_slice(&quant_type.map());
        Self { widths, codes, scales: Scales::Blocks { quant_type, block, absmax, map, nested, dtype, state } }
    }

    fn eight_bits(weight: &Tensor) -> Self {
        let widths = <[i64; 2]>::try_from(weight.size()).expect("a weight has two dimensions");
        let [width_out, width_in] = widths;
        let at_once = (AT_ONCE / width_in.max(1)).max(1);
        let (mut codes, mut scb) = (Vec::new(), Vec::new());
        for from in (0..width_out).step_by(at_once as usize) {
            let rows = weight.narrow(0, from, at_once.min(width_out - from));
            // bitsandbytes rounds to f16 first.
            let rounded = rows.to_kind(Kind::Half).to_kind(Kind::Float);
            let tops = rounded.abs().amax([1i64].as_slice(), false);
            let factors = (tops.reciprocal() * 127.0).unsqueeze(1);
            // Rows of zeros, which have no factor, get the code 0.
            codes.push((rounded * factors).round().nan_to_num(0.0, None::<f64>, None::<f64>).to_kind(Kind::Int8));
            scb.push(tops);
        }
        let (codes, scb) = (Tensor::cat(&codes, 0), Tensor::cat(&scb, 0));
        let layout = Some(Tensor::from_slice(&[0u8]).reshape(NO_DIMENSIONS));
        Self { widths, codes, scales: Scales::Rows { scales: row_scales(&scb), scb, layout } }
    }

    /// Assembles the weight from its tensors, which `part` returns by their names: the weight's name, `name`, and names that begin with it or with
    /// the name of its layer.
    ///
    /// # Errors
    /// If a tensor is missing, or has another dtype or shape; if the description does not fit.
    pub(super) fn from_parts(
        name: &str,
        widths: [i64; 2],
        place: &Path,
        part: &mut dyn FnMut(&str) -> Result<Option<Tensor>>,
    ) -> Result<Self> {
        let mut parts = Parts { place, part };
        let layer = name.strip_suffix(".weight").unwrap_or(name);
        let [width_out, width_in] = widths;
        let codes = parts.any(name)?;
        if codes.kind() == Kind::Int8 {
            parts.check(name, &codes, Kind::Int8, &widths)?;
            let scb = parts.expect(&format!("{layer}.{SCB}"), Kind::Float, &[width_out])?;
            let layout = (parts.part)(&format!("{layer}.{WEIGHT_FORMAT}"))?;
            if let Some(layout) = &layout {
                let found = (layout.kind(), layout.numel());
                if found != (Kind::Uint8, 1) || layout.view([-1]).int64_value(&[0]) != 0 {
                    let message = "expected 0, the layout row after row".to_string();
                    return Err(parts.wrong(&format!("{layer}.{WEIGHT_FORMAT}"), &message));
                }
            }
            return Ok(Self { widths, codes, scales: Scales::Rows { scales: row_scales(&scb), scb, layout } });
        }
        let numel = width_out * width_in;
        parts.check(name, &codes, Kind::Uint8, &[(numel + 1) / 2, 1])?;
        let state = [QuantType::Nf4, QuantType::Fp4].into_iter().find_map(|quant_type| {
            let name = format!("{name}.{STATE}{}", quant_type.name());
            (parts.part)(&name).transpose().map(|state| state.map(|state| (quant_type, name, state)))
        });
        let Some((quant_type, state_name, state)) = state.transpose()? else {
            let message = "expected that of a weight in 4 bits, found none";
            return Err(parts.wrong(&format!("{name}.{STATE}nf4"), message));
        };
        let found = State::read(&state).map_err(|message| parts.wrong(&state_name, &message))?;
        let State { block, dtype, nested, .. } = found;
        if found.quant_type != quant_type.name() || found.shape != widths {
            let expected = format!(
                "expected {} of {widths:?}, found {} of {:?}",
                quant_type.name(),
                brief(&found.quant_type),
                found.shape
            );
            return Err(parts.wrong(&state_name, &expected));
        }
        let blocks = (numel + block - 1) / block;
        let at = |end: &str| format!("{name}.{end}");
        let map = parts.expect(&at(QUANT_MAP), Kind::Float, &[16])?;
        // The table equals the data type's up to rounding in other versions; bitsandbytes does not use the table in the file.
        let code_values = Tensor::from_slice(&quant_type.map()).to_device(map.device());
        if !map.allclose(&code_values, 0.0, 1e-3, false) {
            return Err(parts.wrong(&at(QUANT_MAP), &format!("expected the values of {}", quant_type.name())));
        }
        let (absmax, nested) = match nested {
            None => (parts.expect(&at(ABSMAX), Kind::Float, &[blocks])?, None),
            Some((block, offset)) => {
                let absmax = parts.expect(&at(NESTED_ABSMAX), Kind::Float, &[(blocks + block - 1) / block])?;
                let map = parts.expect(&at(NESTED_MAP), Kind::Float, &[256])?;
                (parts.expect(&at(ABSMAX), Kind::Uint8, &[blocks])?, Some(Nested { absmax, map, block, offset }))
            }
        };
        let scales = Scales::Blocks { quant_type, block, absmax, map: code_values, nested, dtype, state };
        Ok(Self { widths, codes, scales })
    }

    /// The tensors with their names, as bitsandbytes stores the weight `name`.
    pub(super) fn parts(&self, name: &str) -> Vec<(String, Tensor)> {
        let mut parts = vec![(name.to_string(), self.codes.shallow_clone())];
        let layer = name.strip_suffix(".weight").unwrap_or(name);
        let mut add = |name: String, tensor: &Tensor| parts.push((name, tensor.shallow_clone()));
        match &self.scales {
            Scales::Rows { scb, layout, .. } => {
                add(format!("{layer}.{SCB}"), scb);
                layout.iter().for_each(|layout| add(format!("{layer}.{WEIGHT_FORMAT}"), layout));
            }
            Scales::Blocks { quant_type, absmax, map, nested, state, .. } => {
                add(format!("{name}.{ABSMAX}"), absmax);
                add(format!("{name}.{QUANT_MAP}"), map);
                if let Some(nested) = nested {
                    add(format!("{name}.{NESTED_ABSMAX}"), &nested.absmax);
                    add(format!("{name}.{NESTED_MAP}"), &nested.map);
                }
                add(format!("{name}.{STATE}{}", quant_type.name()), state);
            }
        }
        parts
    }

    /// Replaces the data of the tensors, in all their handles, by those of `new`, which has the same format.
    pub(super) fn replace(&mut self, new: Self) {
        for ((_, old), (_, new)) in self.parts("").iter().zip(new.parts("")) {
            old.shallow_clone().set_data(&new);
        }
        match (&mut self.scales, new.scales) {
            (Scales::Blocks { nested: Some(old), .. }, Scales::Blocks { nested: Some(new), .. }) => {
                old.offset = new.offset;
            }
            (Scales::Rows { scales: old, .. }, Scales::Rows { scales: new, .. }) => *old = new,
            _ => {}
        }
    }

    /// Output and input width.
    pub(super) fn widths(&self) -> [i64; 2] {
        self.widths
    }

    /// The format.
    pub(super) fn format(&self) -> Quantization {
        match &self.scales {
            Scales::Rows { .. } => Quantization::EightBit,
            Scales::Blocks { quant_type, nested, .. } => {
                Quantization::FourBit { quant_type: *quant_type, nested: nested.is_some() }
            }
        }
    }

    /// The values to which an adapter is added, in f32. As in PEFT, values of four bits are rounded to the dtype that the weight had, and values of
    /// eight bits are not rounded.
    pub(super) fn merged_values(&self) -> Tensor {
        let kind = match &self.scales {
            Scales::Rows { .. } => Kind::Float,
            Scales::Blocks { dtype, .. } => *dtype,
        };
        self.values(kind).to_kind(Kind::Float)
    }

    /// The version of the codes.
    pub(super) fn version(&self) -> i64 {
        self.codes.internal_version()
    }

    /// Whether a recorded decoding step of `rows` rows in `kind` can have the product with this weight: a kernel computes it from the codes,
    /// or the values of the weight are few. In both cases each step does the same work, and does not wait for the GPU.
    pub(super) fn is_recordable(&self, rows: i64, kind: Kind) -> bool {
        let [width_out, width_in] = self.widths;
        width_out * width_in <= MOST_RECORDED || tch_ext::multiplies_quantized(&self.view(), rows, kind)
    }

    /// The tensors, for the kernels.
    pub(super) fn view(&self) -> tch_ext::Quantized<'_> {
        let (widths, codes) = (self.widths, &self.codes);
        match &self.scales {
            Scales::Rows { scales, .. } => {
                tch_ext::Quantized { widths, codes, map: None, scales, block: 0, nested: None }
            }
            Scales::Blocks { block, absmax, map, nested, .. } => {
                let nested = nested.as_ref().map(|nested| tch_ext::NestedScales {
                    map: &nested.map,
                    scales: &nested.absmax,
                    block: nested.block,
                    offset: nested.offset,
                });
                tch_ext::Quantized { widths, codes, map: Some(map), scales: absmax, block: *block, nested }
            }
        }
    }

    /// The values, `[out, in]`, computed in f32 and rounded to `kind` once.
    pub(super) fn values(&self, kind: Kind) -> Tensor {
        tch_ext::dequantize(&self.view(), kind, super::plain())
    }
}

/// The tensors of one weight in a file.
struct Parts<'p> {
    place: &'p Path,
    part: &'p mut dyn FnMut(&str) -> Result<Option<Tensor>>,
}

impl Parts<'_> {
    fn wrong(&self, name: &str, message: &str) -> Error {
        Error::invalid(self.place, format!("tensor `{}`: {message}", brief(name)))
    }

    fn any(&mut self, name: &str) -> Result<Tensor> {
        (self.part)(name)?.ok_or_else(|| self.wrong(name, "expected a part of a quantized weight, found none"))
    }

    fn expect(&mut self, name: &str, kind: Kind, shape: &[i64]) -> Result<Tensor> {
        let tensor = self.any(name)?;
        self.check(name, &tensor, kind, shape)?;
        Ok(tensor)
    }

    fn check(&self, name: &str, found: &Tensor, kind: Kind, shape: &[i64]) -> Result<()> {
        if (found.kind(), found.size().as_slice()) == (kind, shape) {
            return Ok(());
        }
        let message = format!("expected {kind:?} {shape:?}, found {:?} {:?}", found.kind(), found.size());
        Err(self.wrong(name, &message))
    }
}

/// The description of a weight in four bits.
struct State {
    quant_type: String,
    block: i64,
    dtype: Kind,
    shape: Vec<i64>,
    /// Number of scales that share a second-level scale, and the offset of the scales.
    nested: Option<(i64, f32)>,
}

impl State {
    /// Reads the bytes of JSON; the error says what is wrong.
    fn read(state: &Tensor) -> std::result::Result<Self, String> {
        if state.kind() != Kind::Uint8 || state.numel() > MOST_STATE {
            return Err(format!(
                "expected at most {MOST_STATE} bytes of JSON, found {:?} {:?}",
                state.kind(),
                state.size()
            ));
        }
        let bytes = Vec::<u8>::try_from(&state.view([-1])).map_err(|error| error.to_string())?;
        let json: Map<String, Value> =
            serde_json::from_slice(&bytes).map_err(|e| format!("expected JSON: {}", brief(&e.to_string())))?;
        let wrong = |key: &str, expected: &str| {
            let found = json.get(key).map_or("none".into(), |value| brief(&value.to_string()).to_string());
            format!("`{key}`: expected {expected}, found {found}")
        };
        let block = |key: &str| {
            let value = json.get(key).and_then(Value::as_i64).filter(|block| BLOCKS.contains(block));
            value.ok_or_else(|| wrong(key, "a power of two from 32 to 4096"))
        };
        let dtype = match json.get("dtype").and_then(Value::as_str) {
            Some("float32") => Kind::Float,
            Some("bfloat16") => Kind::BFloat16,
            Some("float16") => Kind::Half,
            _ => return Err(wrong("dtype", "float32, bfloat16 or float16")),
        };
        let shape = json.get("shape").and_then(Value::as_array).ok_or_else(|| wrong("shape", "two widths"))?;
        let shape = shape.iter().map(|width| width.as_i64().unwrap_or(-1)).collect();
        let quant_type = json.get("quant_type").and_then(Value::as_str).unwrap_or("none").to_string();
        let nested = if !json.contains_key("nested_blocksize") {
            None
        } else {
            let offset = json.get("nested_offset").and_then(Value::as_f64).map(|offset| offset as f32);
            let offset = offset.filter(|offset| offset.is_finite());
            let offset = offset.ok_or_else(|| wrong("nested_offset", "a number of f32"))?;
            Some((block("nested_blocksize")?, offset))
        };
        Ok(Self { quant_type, block: block("blocksize")?, dtype, shape, nested })
    }
}

/// The description of a weight, as bitsandbytes writes it: JSON with the keys in its order.
fn describe(quant_type: QuantType, block: i64, dtype: Kind, widths: [i64; 2], nested: Option<&Nested>) -> Tensor {
    let dtype = super::Dtype::of(dtype).name();
    let [width_out, width_in] = widths;
    let mut text = format!(
        r#"{{"quant_type": "{}", "blocksize": {block}, "dtype": "{dtype}", "shape": [{width_out}, {width_in}]"#,
        quant_type.name()
    );
    if let Some(nested) = nested {
        let (block, offset) = (nested.block, json!(f64::from(nested.offset)));
        text += &format!(r#", "nested_blocksize": {block}, "nested_dtype": "float32", "nested_offset": {offset}"#);
    }
    Tensor::from_slice((text + "}").as_bytes())
}

/// The scales of rows of eight bits.
fn row_scales(scb: &Tensor) -> Tensor {
    scb * f64::from(1.0f32 / 127.0)
}

/// Codes, two to a byte, and greatest absolute values of the blocks of `values`, f32.
fn quantize_blocks(values: &Tensor, quant_type: QuantType, block: i64) -> (Tensor, Tensor) {
    let numel = values.size()[0];
    let rest = numel % block;
    let whole = values.narrow(0, 0, numel - rest).view([numel / block, block]);
    let mut tops = whole.abs().amax([1i64].as_slice(), false);
    let mut scaled = (&whole * tops.clamp_min(1e-38).reciprocal().unsqueeze(1)).clamp(-1.0, 1.0).view([-1]);
    if rest > 0 {
        // bitsandbytes multiplies whole blocks by the reciprocal, and divides the rest.
        let part = values.narrow(0, numel - rest, rest);
        let top = part.abs().max().clamp_min(1e-38);
        scaled = Tensor::cat(&[scaled, (part / &top).clamp(-1.0, 1.0)], 0);
        tops = Tensor::cat(&[tops, top.view([1])], 0);
    }
    if numel % 2 == 1 {
        scaled = scaled.constant_pad_nd([0, 1]);
    }
    let (order, bounds) = quant_type.sorted();
    let mut codes = scaled.bucketize(&Tensor::from_slice(&bounds), true, false);
    if quant_type == QuantType::Fp4 {
        codes = Tensor::from_slice(&order).index_select(0, &codes);
    }
    let pairs = codes.to_kind(Kind::Uint8).view([-1, 2]);
    let (first, second) = (pairs.select(1, 0), pairs.select(1, 1));
    (first * 16 + second, tops)
}

/// Codes of the dynamic map and greatest absolute values of blocks of scales, f32.
fn quantize_scales(scales: &Tensor) -> (Tensor, Tensor) {
    let scales = Vec::<f32>::try_from(scales).expect("scales are f32");
    let (mut codes, mut tops) = (Vec::with_capacity(scales.len()), Vec::new());
    for block in scales.chunks(NESTED_BLOCK as usize) {
        let top = block.iter().fold(0.0f32, |top, x| top.max(x.abs()));
        tops.push(top);
        codes.extend(block.iter().map(|x| if top == 0.0 { 0 } else { dynamic_code(x / top) }));
    }
    (Tensor::from_slice(&codes), Tensor::from_slice(&tops))
}

/// bitsandbytes' dynamic map of 8 bits, ascending: seven decades, each of which has twice as many values as the next smaller one, at equal
/// distances; 0 and 1. With `signed` also the negative values, and half as many in each decade.
///
/// Source: Dettmers 2015; bitsandbytes' `create_dynamic_map`.
pub fn dynamic_map(signed: bool) -> &'static [f32; 256] {
    static MAPS: [OnceLock<[f32; 256]>; 2] = [OnceLock::new(), OnceLock::new()];
    MAPS[usize::from(signed)].get_or_init(|| {
        let mut values = vec![0.0f32, 1.0];
        for decade in 0..7 {
            let count = if signed { 1 << decade } else { 2 << decade };
            let bounds = Tensor::linspace(0.1, 1.0, count + 1, (Kind::Float, tch::Device::Cpu));
            let bounds = Vec::<f32>::try_from(bounds).expect("they are f32");
            // libtorch rounds a factor to f32 before it multiplies.
            let power = 10f64.powi(decade - 6) as f32;
            for pair in bounds.windows(2) {
                let value = power * ((pair[0] + pair[1]) / 2.0);
                values.push(value);
                values.extend(signed.then_some(-value));
            }
        }
        values.sort_by(f32::total_cmp);
        values.try_into().expect("2 + 254 values")
    })
}

/// The code of a number from -1 to 1, as bitsandbytes computes it on a CPU: the code of the value nearest to the centre of the number's cell, of
/// 65536 cells.
fn dynamic_code(x: f32) -> u8 {
    static CODES: OnceLock<Vec<u8>> = OnceLock::new();
    let codes = CODES.get_or_init(|| {
        let map = dynamic_map(true);
        let nearest = |cell: u32| {
            let center = f64::from(cell) / 32767.5 - 1.0;
            let bound = |code: usize| (f64::from(map[code]) + f64::from(map[code + 1])) / 2.0;
            let (mut low, mut high) = (0, 255);
            while low < high {
                let middle = (low + high) / 2;
                if bound(middle) < center { low = middle + 1 } else { high = middle }
            }
            low as u8
        };
        (0..1 << 16).map(nearest).collect()
    });
    let cell = ((x + 1.0) * 32767.5 + 0.5).floor().clamp(0.0, 65535.0);
    codes[cell as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::body::Trains;
    use crate::model::{CausalLm, LoraConfig, ModelConfig, ModelOptions, SequenceClassifier};
    use crate::optim::Optimizer;
    use rlhf_base::weights::Checkpoint;
    use tch::Device;

    const STEP: i64 = 7;

    fn golden() -> Checkpoint {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/quantized");
        Checkpoint::open_file(&dir.join("functions.safetensors")).unwrap()
    }

    /// The numbers of `make_quantized.py`.
    fn weight(shape: [i64; 2]) -> Tensor {
        let number = |i: i64| {
            let n = ((7919 * i + 13) % 2003 - 1001) as f32;
            if (64..128).contains(&i) { 0.0 } else { n / 1001.0 / (1 + i % 5) as f32 }
        };
        let numbers: Vec<f32> = (0..shape[0] * shape[1]).map(number).collect();
        Tensor::from_slice(&numbers).view(shape)
    }

    fn same(what: &str, found: &Tensor, expected: &Tensor) {
        assert_eq!((found.kind(), found.size()), (expected.kind(), expected.size()), "{what}");
        // NaN would not equal itself.
        assert!(found.equal(expected), "{what}: {found:?}, expected {expected:?}");
    }

    /// Writes the model in `from` to `dir` with these weights quantized.
    fn with_quantized(from: &str, dir: &Path, quantizes: &dyn Fn(&str) -> bool, format: Quantization) {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(from);
        let whole = Checkpoint::open(&from).unwrap();
        let mut tensors = Vec::new();
        for name in whole.names() {
            let tensor = whole.read_stored(name, Device::Cpu).unwrap();
            if name.strip_suffix(".weight").is_some_and(quantizes) {
                tensors.extend(Quantized::new(&tensor, format).parts(name));
            } else {
                tensors.push((name.to_string(), tensor));
            }
        }
        rlhf_base::weights::save(dir, &tensors, usize::MAX).unwrap();
        let mut config = rlhf_base::weights::read_json(&from.join("config.json")).unwrap();
        config["quantization_config"] = format.describe(&[]);
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    }

    fn described(dir: &Path) -> Value {
        rlhf_base::weights::read_json(&dir.join("config.json")).unwrap()["quantization_config"].clone()
    }

    #[test]
    fn a_quantized_head_with_two_layers_is_plain_trains_beside_an_adapter_and_is_saved() {
        let nf4 = Quantization::FourBit { quant_type: QuantType::Nf4, nested: true };
        for (model, head, format) in [
            ("roberta_cls3", "classifier.dense", nf4),
            ("bart_cls1", "classification_head.dense", Quantization::EightBit),
            ("t5_v11_cls1", "classification_head.dense", nf4),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let quantizes = |layer: &str| layer == head || layer.ends_with("attention.self.query");
            let quantizes = |layer: &str| {
                quantizes(layer) || layer.ends_with("self_attn.q_proj") || layer.ends_with("SelfAttention.q")
            };
            with_quantized(model, dir.path(), &quantizes, format);
            let open = |dir: &Path| SequenceClassifier::from_pretrained(dir, None, ModelOptions::default()).unwrap();
            let (mut model, rows) = (open(dir.path()), [[5i64, 6, 7, 2]]);
            assert_eq!(model.quantization(), Some(format), "{head}");
            let weight = |model: &SequenceClassifier| {
                let name = format!("{head}.weight");
                model.params().iter().find(|param| param.name == name).unwrap().tensor.detach().copy()
            };
            let stored = Checkpoint::open(dir.path()).unwrap();
            let widths = <[i64; 2]>::try_from(weight(&model).size()).unwrap();
            let mut part = |name: &str| stored.shape(name).map(|_| stored.read_stored(name, Device::Cpu)).transpose();
            let codes = Quantized::from_parts(&format!("{head}.weight"), widths, dir.path(), &mut part).unwrap();
            same(head, &weight(&model), &codes.values(Kind::Float));
            let before = model.logits(&rows).unwrap();
            model.add_adapter(&LoraConfig::default(), 1).unwrap();
            same(head, &model.logits(&rows).unwrap(), &before);
            model.set_trainable(true);
            model.scores_backward(&rows, None, |scores| scores.sum(Kind::Float)).unwrap();
            let mut optimizer = Optimizer::new(model.trainable_params(), &rlhf_base::schema::defaults());
            optimizer.step(1e-2).unwrap();
            assert!(!weight(&model).equal(&codes.values(Kind::Float)), "{head} is trained");
            model.merge_adapter();
            let (after, out) = (model.logits(&rows).unwrap(), tempfile::tempdir().unwrap());
            model.save_pretrained(out.path(), &[2], Some(1), usize::MAX).unwrap();
            same(head, &open(out.path()).logits(&rows).unwrap(), &after);
            let skipped = &described(out.path())["llm_int8_skip_modules"];
            assert!(skipped.as_array().unwrap().contains(&json!(head)), "{skipped}");
        }
    }

    #[test]
    fn an_adapter_is_merged_into_the_weights_of_the_files_before_they_are_quantized() {
        let nf4 = Quantization::FourBit { quant_type: QuantType::Nf4, nested: false };
        for (name, format) in [("llama_untied", nf4), ("gpt2", nf4), ("llama_untied", Quantization::EightBit)] {
            let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name);
            let dir = tempfile::tempdir().unwrap();
            let mut plain = CausalLm::from_pretrained(&base, ModelOptions::default()).unwrap();
            plain.add_adapter(&LoraConfig::default(), 1).unwrap();
            for param in plain.params().iter().filter(|param| param.name.contains("lora_B")) {
                let _ = tch::no_grad(|| param.tensor.shallow_clone().fill_(1e-3));
            }
            plain.save_pretrained(dir.path(), &[2], None, usize::MAX).unwrap();
            plain.merge_adapter();

            let options = ModelOptions { quantization: Some(format), ..ModelOptions::default() };
            let open = || CausalLm::from_pretrained(dir.path(), options).unwrap();
            let (mut merged, mut without) = (open(), open());
            merged.prepare(Trains::Adapter).unwrap();
            without.merge_adapter();
            let weight_named = |model: &CausalLm, name: &str| {
                model.params().iter().find(|param| param.name == name).unwrap().tensor.detach()
            };
            let (mut compared, mut kept) = (0, 0);
            for param in merged.params().iter().filter(|param| param.name.ends_with(".weight") && param.is_quantized())
            {
                let weight = weight_named(&plain, &param.name);
                let weight = if name == "gpt2" { weight.tr() } else { weight };
                for (name, expected) in Quantized::new(&weight, format).parts(&param.name) {
                    same(&name, &weight_named(&merged, &name), &expected);
                }
                compared += 1;
                kept += i32::from(!param.tensor.equal(&weight_named(&without, &param.name)));
            }
            assert!(
                compared > 0 && kept > 0,
                "{name}: {compared} weights, {kept} with other codes than a merge into codes"
            );
            assert!(!merged.was_merged_into_codes());
        }
    }

    #[test]
    fn the_saved_description_lists_the_layers_that_are_plain_and_no_others() {
        let format = Quantization::FourBit { quant_type: QuantType::Nf4, nested: false };
        let (dir, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let is_quantized = |layer: &str| layer.ends_with("_proj") && !layer.ends_with("up_proj");
        with_quantized("llama_untied", dir.path(), &is_quantized, format);
        let save = |options| {
            let model = CausalLm::from_pretrained(dir.path(), options).unwrap();
            model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
            described(out.path())
        };
        let plain = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"];
        assert_eq!(save(ModelOptions::default()), format.describe(&plain.map(String::from)));
        // A list that is correct is kept, with all other settings.
        let mut config = rlhf_base::weights::read_json(&dir.path().join("config.json")).unwrap();
        config["quantization_config"]["llm_int8_skip_modules"] = json!(["up_proj", "lm_head"]);
        config["quantization_config"]["bnb_4bit_compute_dtype"] = json!("bfloat16");
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        assert_eq!(save(ModelOptions::default()), config["quantization_config"]);
        // As in transformers, a model that is quantized already stays as it is.
        for other in [format, Quantization::EightBit] {
            let options = ModelOptions { quantization: Some(other), ..ModelOptions::default() };
            assert_eq!(save(options), config["quantization_config"]);
        }
        // transformers renames GPT-NeoX's head when it reads a model, and looks for the new name.
        let dir = tempfile::tempdir().unwrap();
        with_quantized("gpt_neox", dir.path(), &|layer| layer.ends_with("dense_h_to_4h"), format);
        let model = CausalLm::from_pretrained(dir.path(), ModelOptions::default()).unwrap();
        model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
        let skipped = described(out.path())["llm_int8_skip_modules"].as_array().unwrap().clone();
        assert!(skipped.contains(&json!("lm_head")) && !skipped.contains(&json!("embed_out")), "{skipped:?}");
    }

    #[test]
    fn a_recorded_step_computes_the_values_of_small_weights_only() {
        let width_in = 1 << 12;
        let of_rows = |width_out: i64| {
            let scb = Tensor::ones([width_out], (Kind::Float, Device::Cpu));
            let codes = Tensor::zeros([width_out, width_in], (Kind::Int8, Device::Cpu));
            let scales = Scales::Rows { scales: row_scales(&scb), scb, layout: None };
            Quantized { widths: [width_out, width_in], codes, scales }
        };
        // 2^24 values, and one row more; there is no kernel.
        let (most, more) = (of_rows(1 << 12), of_rows((1 << 12) + 1));
        for rows in [1, 8, 64] {
            assert!(most.is_recordable(rows, Kind::BFloat16) && !more.is_recordable(rows, Kind::BFloat16), "{rows}");
        }
    }

    #[test]
    fn a_saved_list_spares_the_head_of_a_classifier_which_transformers_would_quantize() {
        let format = Quantization::FourBit { quant_type: QuantType::Nf4, nested: false };
        let dir = tempfile::tempdir().unwrap();
        with_quantized("llama_untied", dir.path(), &|layer| layer.ends_with("_proj"), format);
        let described_anew = |old: Value, head| {
            let mut config = rlhf_base::weights::read_json(&dir.path().join("config.json")).unwrap();
            config["quantization_config"]["llm_int8_skip_modules"] = old;
            std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
            let mut config = ModelConfig::from_dir(dir.path()).unwrap();
            config.describe_quantization(format, &[], Some(head), &["model.layers.0.mlp.up_proj"]);
            config.save(dir.path(), Kind::Float).unwrap();
            described(dir.path())["llm_int8_skip_modules"].clone()
        };
        assert_eq!(described_anew(json!(["lm_head"]), "score"), Value::Null);
        assert_eq!(described_anew(json!(["score"]), "score"), json!(["score"]));
        assert_eq!(described_anew(json!(["lm_head"]), "lm_head"), json!(["lm_head"]));
        assert_eq!(described_anew(Value::Null, "score"), Value::Null);
    }

    #[test]
    fn bf16_for_training_leaves_codes_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        with_quantized("llama_untied", dir.path(), &|layer| layer.ends_with("_proj"), Quantization::EightBit);
        let mut model = CausalLm::from_pretrained(dir.path(), ModelOptions::default()).unwrap();
        model.hold_in_bf16();
        let codes = model.params().iter().filter(|param| param.tensor.kind() == Kind::Int8).count();
        assert!(codes > 0 && model.logits(&[[5i64, 6]]).is_ok());
        assert_eq!(model.quantization(), Some(Quantization::EightBit));
    }

    #[test]
    fn codes_scales_and_values_are_bitsandbytes_to_the_bit() {
        let golden = golden();
        let stored = |name: &str| golden.read_stored(name, Device::Cpu).unwrap();
        let shapes = [("rows", [24, 40]), ("rest", [6, 27]), ("odd", [5, 13]), ("nested", [96, 192])];
        let mut compared = 0;
        for (shape_name, shape) in shapes {
            for (dtype_name, dtype) in [("float32", Kind::Float), ("bfloat16", Kind::BFloat16), ("float16", Kind::Half)]
            {
                let values = weight(shape).to_kind(dtype);
                for quant_type in [QuantType::Nf4, QuantType::Fp4] {
                    let name = format!("{shape_name}.{dtype_name}.{}", quant_type.name());
                    if golden.shape(&format!("{name}.codes")).is_none() {
                        continue;
                    }
                    let nested = golden.shape(&format!("{name}.{NESTED_ABSMAX}")).is_some();
                    let made = Quantized::new(&values, Quantization::FourBit { quant_type, nested });
                    for (part, tensor) in made.parts("") {
                        let part = part.strip_prefix('.').unwrap_or("codes");
                        let name = match part {
                            QUANT_MAP => format!("{}.{QUANT_MAP}", quant_type.name()),
                            NESTED_MAP => NESTED_MAP.to_string(),
                            part => format!("{name}.{part}"),
                        };
                        same(&name, &tensor, &stored(&name));
                        compared += 1;
                    }
                    for (out_name, out) in [("float32", Kind::Float), ("bfloat16", Kind::BFloat16)] {
                        let name = format!("{name}.values.{out_name}");
                        for plain in [false, true] {
                            let values = tch_ext::dequantize(&made.view(), out, plain);
                            same(&name, &values.slice(1, 0, None::<i64>, STEP).contiguous(), &stored(&name));
                        }
                    }
                }
                let name = format!("{shape_name}.{dtype_name}.int8");
                if golden.shape(&format!("{name}.codes")).is_some() {
                    let made = Quantized::new(&values, Quantization::EightBit);
                    let Scales::Rows { scb, .. } = &made.scales else { panic!("eight bits") };
                    same(&name, &made.codes, &stored(&format!("{name}.codes")));
                    same(&name, scb, &stored(&format!("{name}.SCB")));
                    compared += 2;
                }
            }
        }
        // Five weights in two types have codes, map, description and scales; three of them have two tensors more.
        assert_eq!(compared, 2 * (5 * 4 + 3 * 2) + 4 * 2);
    }
}
