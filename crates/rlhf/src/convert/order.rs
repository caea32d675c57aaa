//! The numbers of a tensor in llama.cpp's order and in a model folder's.

use rlhf_base::{Error, Result};
use rlhf_lm::model::{Mixing, ModelConfig, NormKind};
use tch::{Kind, Tensor};

/// The direction of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    /// To a GGUF file.
    File,
    /// To a model folder.
    Folder,
}

/// Value heads along a dimension. Folders have those of a key head next to each other; llama.cpp has the first of each key head first, so that
/// key heads repeat as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ValueHeads {
    /// The dimension.
    dim: i64,
    /// Its entries before the first value head.
    start: i64,
    /// Entries of a head.
    width: i64,
    /// Number of key heads, and of value heads for each.
    groups: [i64; 2],
}

/// Whether the tensor of a model folder is the weight of a convolution, `[width, 1, kernel]`.
pub(super) fn is_convolution(name: &str) -> bool {
    name.ends_with(".conv.conv.weight") || name.ends_with(".linear_attn.conv1d.weight")
}

/// Whether files hold 1 + weight for this norm.
fn has_one_added(name: &str, config: &ModelConfig) -> bool {
    // The norm inside the delta rule multiplies by its weight.
    config.norm == NormKind::RmsPlusOne && name.ends_with("norm.weight") && !name.ends_with(".linear_attn.norm.weight")
}

/// Whether files hold the rate of decay that this tensor has the logarithm of, with its sign.
pub(super) fn is_rate(name: &str) -> bool {
    name.ends_with(".A_log")
}

/// Whether this is a stack of gpt-oss's matrices, `[experts, in, out]` in a folder and `[experts, out, in]` in a file.
fn is_transposed(name: &str, config: &ModelConfig) -> bool {
    config.family.name == "gpt_oss" && name.ends_with(".experts.down_proj")
}

/// The shape in a file of a tensor that has the shape `shape` in a model folder.
pub(super) fn file_shape(name: &str, shape: &[i64], config: &ModelConfig) -> Vec<i64> {
    let mut shape = shape.to_vec();
    if is_convolution(name) {
        shape.remove(1);
    }
    if is_transposed(name, config) {
        shape.swap(1, 2);
    }
    shape
}

/// The shapes in a file of the two parts of a tensor that has the shape `shape` in a model folder.
pub(super) fn part_shapes(shape: &[i64], config: &ModelConfig) -> [Vec<i64>; 2] {
    match (config.mixing, shape) {
        (Some(Mixing::GatedDelta(delta)), [_, hidden]) => {
            let values = delta.value_heads * delta.value_dim;
            [vec![2 * delta.key_heads * delta.key_dim + values, *hidden], vec![values, *hidden]]
        }
        (_, [experts, hidden, both]) => [(); 2].map(|()| vec![*experts, both / 2, *hidden]),
        (_, [experts, both]) => [(); 2].map(|()| vec![*experts, both / 2]),
        _ => [(); 2].map(|()| shape.to_vec()),
    }
}

/// The rows of queries, keys, values and gates in a group of Qwen3-Next's product, and the number of groups.
fn grouped_rows(config: &ModelConfig) -> Option<([i64; 4], i64)> {
    let Some(Mixing::GatedDelta(delta)) = config.mixing else { return None };
    let values = delta.value_heads / delta.key_heads * delta.value_dim;
    Some(([delta.key_dim, delta.key_dim, values, values], delta.key_heads))
}

/// The two parts of a tensor of a model folder: Qwen3-Next's queries, keys and values, and its gates, each with the rows of all heads
/// together; or gpt-oss's gates and up projections, which take turns in a folder.
pub(super) fn divided(tensor: &Tensor, config: &ModelConfig) -> Result<[Tensor; 2]> {
    if let Some((rows, groups)) = grouped_rows(config) {
        let width = tensor.size()[1];
        let parts = tensor.f_view([groups, -1, width])?.f_split_with_sizes(rows, 1)?;
        let parts = parts.iter().map(|part| Ok(part.f_reshape([-1, width])?)).collect::<Result<Vec<_>>>()?;
        return Ok([Tensor::f_cat(&parts[..3], 0)?, parts[3].shallow_clone()]);
    }
    let part = |at: i64| -> Result<Tensor> {
        let part = tensor.f_slice(-1, at, None::<i64>, 2)?;
        let part = if part.dim() == 3 { part.f_transpose(1, 2)? } else { part };
        Ok(part.f_contiguous()?)
    };
    Ok([part(0)?, part(1)?])
}

/// The inverse of [`divided`].
pub(super) fn joined(parts: [&Tensor; 2], config: &ModelConfig) -> Result<Tensor> {
    if let Some((rows, groups)) = grouped_rows(config) {
        let width = parts[0].size()[1];
        let all = parts[0].f_split_with_sizes([rows[0] * groups, rows[1] * groups, rows[2] * groups], 0)?;
        let all = all.iter().chain([parts[1]]);
        let all = all.map(|part| Ok(part.f_view([groups, -1, width])?)).collect::<Result<Vec<_>>>()?;
        return Ok(Tensor::f_cat(&all, 1)?.f_view([-1, width])?);
    }
    let rows = |part: &Tensor| if part.dim() == 3 { part.f_transpose(1, 2) } else { Ok(part.shallow_clone()) };
    Ok(Tensor::f_stack(&[rows(parts[0])?, rows(parts[1])?], -1)?.f_flatten(-2, -1)?)
}

/// Whether the numbers of a tensor themselves change, not only their order.
pub(super) fn changes_numbers(name: &str, config: &ModelConfig) -> bool {
    has_one_added(name, config) || is_rate(name)
}

/// The value heads of a tensor, if their order differs.
fn value_heads(name: &str, config: &ModelConfig) -> Option<ValueHeads> {
    let Some(Mixing::GatedDelta(delta)) = config.mixing else { return None };
    // Qwen3-Next's keep the order of the folder.
    if config.family.name == "qwen3_next" {
        return None;
    }
    let part = name.split_once(".linear_attn.")?.1;
    let groups = [delta.key_heads, delta.value_heads / delta.key_heads];
    let heads = |dim: i64, start: i64, width: i64| Some(ValueHeads { dim, start, width, groups });
    match part {
        "in_proj_qkv.weight" | "conv1d.weight" => heads(0, 2 * delta.key_heads * delta.key_dim, delta.value_dim),
        "in_proj_z.weight" => heads(0, 0, delta.value_dim),
        "in_proj_b.weight" | "in_proj_a.weight" | "A_log" | "dt_bias" => heads(0, 0, 1),
        "out_proj.weight" => heads(1, 0, delta.value_dim),
        _ => None,
    }
}

impl ValueHeads {
    fn reordered(self, tensor: &Tensor, to: To) -> Result<Tensor> {
        let Self { dim, start, width, groups: [keys, values] } = self;
        let outer = if to == To::File { [keys, values] } else { [values, keys] };
        let len = keys * values * width;
        let part = tensor.f_narrow(dim, start, len)?;
        let mut shape = part.size();
        let whole = shape.clone();
        let at = dim as usize;
        shape.splice(at..=at, [outer[0], outer[1], width]);
        let part = part.f_reshape(shape.as_slice())?.f_transpose(dim, dim + 1)?.f_reshape(whole.as_slice())?;
        if start == 0 {
            return Ok(part);
        }
        Ok(Tensor::f_cat(&[tensor.f_narrow(dim, 0, start)?, part], dim)?)
    }
}

/// The heads whose rows are in another order in files.
fn rotated_heads(name: &str, config: &ModelConfig) -> Option<i64> {
    if name.contains(".q_proj.") {
        Some(config.num_attention_heads)
    } else if name.contains(".k_proj.") {
        Some(config.num_key_value_heads)
    } else {
        None
    }
}

/// The tensor `name` of a model folder, in the order of `to`. Its numbers are f32 if they change.
///
/// # Errors
/// If a file's rate of decay is not negative.
pub(super) fn reordered(
    name: &str,
    tensor: Tensor,
    config: &ModelConfig,
    is_interleaved: bool,
    to: To,
) -> Result<Tensor> {
    let mut tensor = tensor;
    if let Some(heads) = rotated_heads(name, config).filter(|_| is_interleaved) {
        // llama.cpp rotates dimensions 2i and 2i + 1 of a head together, transformers i and i + half.
        let mut shape = tensor.size();
        let whole = shape.clone();
        let half = whole[0] / heads / 2;
        shape.splice(0..1, if to == To::File { [heads, 2, half] } else { [heads, half, 2] });
        tensor = tensor.f_view(shape.as_slice())?.f_transpose(1, 2)?.f_reshape(whole.as_slice())?;
    }
    if let Some(heads) = value_heads(name, config).filter(|heads| heads.groups[1] > 1) {
        tensor = heads.reordered(&tensor, to)?;
    }
    if is_transposed(name, config) {
        tensor = tensor.f_transpose(-2, -1)?.f_contiguous()?;
    }
    if is_convolution(name) {
        tensor = if to == To::File { tensor.f_squeeze_dim(1)? } else { tensor.f_unsqueeze(1)? };
    }
    if has_one_added(name, config) {
        tensor = if to == To::File { tensor.f_add_scalar(1.0)? } else { tensor.f_add_scalar(-1.0)? };
    }
    if is_rate(name) {
        tensor = rates(&tensor, to)?;
    }
    Ok(tensor)
}

/// Rates of decay: their logarithms in a folder, negative numbers in a file.
fn rates(tensor: &Tensor, to: To) -> Result<Tensor> {
    // In f64, so that a number is rounded once.
    let wide = tensor.to_kind(Kind::Double);
    let changed = match to {
        To::File => -wide.exp(),
        To::Folder => {
            let least = (-&wide).min().double_value(&[]);
            if least <= 0.0 || least.is_nan() {
                return Err(Error::Run(format!("expected negative rates of decay, found {}", -least)));
            }
            (-wide).log()
        }
    };
    Ok(changed.to_kind(Kind::Float))
}
