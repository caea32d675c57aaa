//! Weights in MXFP4, as gpt-oss is published: codes of four bits in blocks of 32, with an exponent of eight bits each.

use rlhf_base::weights::{Checkpoint, brief, not_finite};
use rlhf_base::{Error, Result};
use tch::{Device, Kind, Tensor};

/// Ends of the names of the codes and of the exponents.
const ENDS: [&str; 2] = ["_blocks", "_scales"];

/// The values of the codes.
const VALUES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Added to exponents when they are stored.
const BIAS: i64 = 127;

/// Bytes of a block, with two codes each.
const BLOCK: i64 = 16;

/// The names of the codes and exponents of the weight `name`.
pub(super) fn part_names(name: &str) -> [String; 2] {
    ENDS.map(|end| format!("{name}{end}"))
}

/// Whether the checkpoint has the codes of the weight `name`.
pub(super) fn is_in(checkpoint: &Checkpoint, name: &str) -> bool {
    let [blocks, scales] = part_names(name);
    checkpoint.holds_codes(&blocks) && checkpoint.holds_codes(&scales)
}

/// The shape `[experts, in, out]` of the weight `name`, of which the checkpoint has codes `[experts, out, blocks, 16]`.
pub(super) fn shape_of(checkpoint: &Checkpoint, name: &str) -> Option<Vec<i64>> {
    let [blocks, scales] = part_names(name).map(|name| checkpoint.shape(&name));
    match blocks?.as_slice() {
        &[experts, width_out, count, BLOCK] if scales? == [experts, width_out, count] => {
            Some(vec![experts, count.checked_mul(2 * BLOCK)?, width_out])
        }
        _ => None,
    }
}

/// Reads the weight `name`, `[experts, in, out]`, in `kind`: exact in bf16 and f32.
///
/// # Errors
/// If the files cannot be read; if a number is not finite.
pub(super) fn read(checkpoint: &Checkpoint, name: &str, shape: &[i64], to: (Device, Kind)) -> Result<Tensor> {
    let [codes, exponents] = part_names(name);
    let [codes, exponents] =
        [checkpoint.read_stored(&codes, Device::Cpu)?, checkpoint.read_stored(&exponents, Device::Cpu)?];
    let &[experts, width_in, width_out] = shape else { unreachable!("the shape was compared") };
    let whole = Tensor::f_empty(shape, (to.1, to.0))?;
    let table = Tensor::from_slice(&VALUES);
    // One expert at a time: the values in f32 take eight times the memory of the codes.
    for expert in 0..experts {
        let codes = codes.get(expert).to_kind(Kind::Uint8).view([-1]);
        let both = Tensor::stack(&[codes.bitwise_and(15), codes.bitwise_right_shift_tensor_scalar(4)], -1);
        let values = table.index_select(0, &both.view([-1]).to_kind(Kind::Int)).view([width_out, -1, 2 * BLOCK]);
        let exponents = exponents.get(expert).to_kind(Kind::Uint8).to_kind(Kind::Float) - BIAS as f64;
        let scaled = (values * exponents.exp2().unsqueeze(-1)).view([width_out, width_in]);
        let scaled = scaled.to_kind(to.1);
        if let Some(number) = not_finite(&scaled) {
            let message = format!("tensor `{}`: expected finite numbers, found {number}", brief(name));
            return Err(Error::invalid(checkpoint.path_of(&part_names(name)[1]), message));
        }
        whole.get(expert).copy_(&scaled.tr());
    }
    Ok(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_values_times_a_power_of_two_the_lower_half_of_a_byte_first() {
        let dir = tempfile::tempdir().unwrap();
        // Two rows of a block each: bytes 0x21, 0x21, ... are the codes 1, 2, 1, 2, ...: 0.5 and 1.
        let blocks = Tensor::from_slice(&[vec![0x21u8; 16], vec![0xf7; 16]].concat()).view([1, 2, 1, 16]);
        let scales = Tensor::from_slice(&[128u8, 126]).view([1, 2, 1]);
        let tensors = [("w_blocks".to_string(), blocks), ("w_scales".to_string(), scales)];
        rlhf_base::weights::save(dir.path(), &tensors, usize::MAX).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert!(is_in(&checkpoint, "w") && !is_in(&checkpoint, "v"));
        assert_eq!(shape_of(&checkpoint, "w"), Some(vec![1, 32, 2]));
        for kind in [Kind::Float, Kind::BFloat16] {
            let found = read(&checkpoint, "w", &[1, 32, 2], (Device::Cpu, kind)).unwrap().to_kind(Kind::Float);
            // The second row: 6 and -6, times 2^-1.
            let expected = [[1.0f32, 3.0], [2.0, -3.0]].concat().repeat(16);
            assert_eq!(found.view([-1]), Tensor::from_slice(&expected), "{kind:?}");
        }
    }
}
