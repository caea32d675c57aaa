//! Numbers in 8 bits, in bitsandbytes' format: blocks of 256, each with its largest magnitude.

use crate::model::dynamic_map;
use std::cell::RefCell;
use tch::{Device, Kind, Tensor};
use tch_ext::BlockedMoment;

/// Numbers in one block.
pub(super) const BLOCK: i64 = 256;

/// f32 numbers as codes of 8 bits. The value of a code is the code's entry of a map from -1 or 0 to 1, times the largest magnitude of its
/// block.
///
/// Source: Dettmers et al. 2022, section 2; the arithmetic of bitsandbytes' `quantize_blockwise`.
#[derive(Debug)]
pub(super) struct Blocks {
    /// U8, in the shape of the numbers.
    pub(super) codes: Tensor,
    /// Largest magnitude of each block, f32 `[ceil(numbers / 256)]`.
    pub(super) absmax: Tensor,
    /// The values of all codes, f32 `[256]`, ascending.
    map: Tensor,
    /// The middles between neighbours of the map, then infinity, f32 `[256]`.
    middles: Tensor,
    /// For each value of the upper 16 bits of an f32, the code of the least number with these bits, u8 `[65536]`.
    least_codes: Tensor,
}

impl Blocks {
    /// Zeros in the shape of `like`; with `signed` they can become negative.
    pub(super) fn zeros_like(like: &Tensor, signed: bool) -> Self {
        let device = like.device();
        let map = Tensor::from_slice(dynamic_map(signed)).to_device(device);
        let middles = (map.narrow(0, 0, 255) + map.narrow(0, 1, 255)) / 2.0;
        let least_codes = least_codes(signed, &middles);
        let middles = Tensor::cat(&[middles, Tensor::full([1], f64::INFINITY, (Kind::Float, device))], 0);
        let blocks = (like.numel() as i64 + BLOCK - 1) / BLOCK;
        // Every code of a block of magnitude 0 is 0.
        let absmax = Tensor::zeros([blocks], (Kind::Float, device));
        Self { codes: Tensor::zeros(like.size(), (Kind::Uint8, device)), absmax, map, middles, least_codes }
    }

    /// `len` numbers from number `from` on, a multiple of [`BLOCK`], as f32 `[len]`.
    pub(super) fn read(&self, from: i64, len: i64) -> Tensor {
        let codes = self.codes.view([-1]).narrow(0, from, len).to_kind(Kind::Int);
        let values = in_blocks(&self.map.index_select(0, &codes));
        let absmax = self.absmax.narrow(0, from / BLOCK, values.size()[0]).unsqueeze(1);
        (values * absmax).view([-1]).narrow(0, 0, len)
    }

    /// Returns the codes of `numbers` from -1 to 1, f32 `[len]`, as i32: how many middles are below each.
    ///
    /// Codes of numbers with the same upper 16 bits differ by at most 1, as the map is coarser than these bits. A binary search in the
    /// middles, whose branches are unpredictable, would take most of the time of an update.
    fn nearest_codes(&self, numbers: &Tensor) -> Tensor {
        let bits = numbers.view_dtype(Kind::Int).bitwise_right_shift_tensor_scalar(16).bitwise_and(0xffff);
        let least = self.least_codes.index_select(0, &bits).to_kind(Kind::Int);
        let is_above = self.middles.index_select(0, &least).lt_tensor(numbers);
        least + is_above.to_kind(Kind::Int)
    }

    /// As the kernel of an optimizer step takes them.
    pub(super) fn as_moment(&mut self) -> BlockedMoment<'_> {
        let Self { codes, absmax, map, middles, least_codes } = self;
        BlockedMoment { codes, absmax, map, middles, least_codes }
    }

    /// Stores `numbers`, f32 `[len]`, from number `from` on, a multiple of [`BLOCK`]: each as the nearest value that a code has.
    pub(super) fn write(&self, from: i64, numbers: &Tensor) {
        let len = numbers.size()[0];
        let numbers = in_blocks(numbers);
        let absmax = numbers.abs().amax([1i64].as_slice(), true);
        let absmax = absmax.masked_fill(&absmax.eq(0.0), 1.0);
        let codes = self.nearest_codes(&(numbers / &absmax).view([-1]).narrow(0, 0, len));
        self.codes.view([-1]).narrow(0, from, len).copy_(&codes);
        self.absmax.narrow(0, from / BLOCK, absmax.size()[0]).copy_(&absmax.view([-1]));
    }
}

thread_local! {
    /// The tables of [`least_codes`], which all states of an optimizer share.
    static LEAST_CODES: RefCell<Vec<(bool, Tensor)>> = const { RefCell::new(Vec::new()) };
}

/// Returns, for each upper 16 bits of an f32, the number of `middles` below the least number that has them.
fn least_codes(signed: bool, middles: &Tensor) -> Tensor {
    LEAST_CODES.with_borrow_mut(|tables| {
        let is_wanted =
            |(table_signed, table): &&(bool, Tensor)| *table_signed == signed && table.device() == middles.device();
        if let Some((_, table)) = tables.iter().find(is_wanted) {
            return table.shallow_clone();
        }
        let sorted = Vec::<f32>::try_from(middles.to_device(Device::Cpu)).expect("one dimension of f32");
        let code = |bits: u32| {
            // The lower bits are all ones in the least negative number.
            let least = f32::from_bits(if bits >= 1 << 15 { bits << 16 | 0xffff } else { bits << 16 });
            sorted.partition_point(|&middle| middle < least) as u8
        };
        let table = Tensor::from_slice(&(0..1 << 16).map(code).collect::<Vec<u8>>()).to_device(middles.device());
        tables.push((signed, table.shallow_clone()));
        table
    })
}

/// Numbers `[len]` as `[blocks, 256]`, with zeros after the last.
fn in_blocks(numbers: &Tensor) -> Tensor {
    let rest = numbers.size()[0] % BLOCK;
    let padded = if rest == 0 { numbers.shallow_clone() } else { numbers.constant_pad_nd([0, BLOCK - rest]) };
    padded.view([-1, BLOCK])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_have_zero_and_one_and_distinct_values() {
        for (signed, least) in [(true, -0.992_968_7), (false, 0.0)] {
            let map = dynamic_map(signed);
            assert!(map.is_sorted() && map.contains(&0.0) && map[255] == 1.0);
            // The largest negative value is the middle of the last of 64 parts of 0.1 to 1.
            assert!((map[0] - least).abs() < 1e-6, "{}", map[0]);
            assert_eq!(map.windows(2).filter(|pair| pair[0] == pair[1]).count(), 0);
        }
    }

    #[test]
    fn codes_are_those_of_a_search_in_the_middles_for_every_upper_half_of_the_bits_and_around_every_middle() {
        for signed in [true, false] {
            let blocks = Blocks::zeros_like(&Tensor::zeros([256], (Kind::Float, Device::Cpu)), signed);
            let middles = Vec::<f32>::try_from(blocks.middles.narrow(0, 0, 255)).unwrap();
            let halves = (0..1u32 << 16)
                .flat_map(|bits| [0, 1, 0x7fff, 0x8000, 0xffff].map(|rest| f32::from_bits(bits << 16 | rest)));
            let around = middles.iter().flat_map(|middle| [middle.next_down(), *middle, middle.next_up()]);
            let numbers: Vec<f32> = halves.chain(around).filter(|number| number.abs() <= 1.0).collect();
            let numbers = Tensor::from_slice(&numbers);
            let expected = numbers.bucketize(&blocks.middles.narrow(0, 0, 255), true, false);
            assert_eq!(blocks.nearest_codes(&numbers), expected);
        }
    }

    #[test]
    fn a_number_becomes_the_nearest_value_of_its_block_whatever_else_is_stored() {
        for (signed, bound) in [(true, 0.0071), (false, 0.0036)] {
            let numbers = Tensor::arange(1000, (Kind::Float, Device::Cpu)).sin();
            let numbers = if signed { numbers } else { numbers.abs() };
            let blocks = Blocks::zeros_like(&numbers, signed);
            assert_eq!(blocks.read(0, 1000).abs().max().double_value(&[]), 0.0);
            blocks.write(0, &numbers);
            let found = blocks.read(0, 1000);
            // Half the distance between values of the largest decade, 0.9 / 64 or 0.9 / 128, times at most 1.
            assert!((&found - &numbers).abs().max().double_value(&[]) < bound);
            // Values that a code has are stored as they are.
            blocks.write(0, &found);
            assert!((blocks.read(0, 1000) - &found).abs().max().double_value(&[]) < 1e-6);
            // A part is stored by itself.
            blocks.write(256, &Tensor::zeros([300], (Kind::Float, Device::Cpu)));
            assert_eq!(blocks.read(256, 300).abs().max().double_value(&[]), 0.0);
            assert_eq!(blocks.read(0, 256), found.narrow(0, 0, 256));
        }
    }
}
