//! Settings of a model in a few words, for messages about those that llama.cpp's files cannot state.

use rlhf_base::safe_text::entries;
use rlhf_lm::model::{Activation, Rope, RopeScaling};

/// The windows of a few layers, one after another.
pub(super) fn windows(of_layers: &[Option<i64>]) -> String {
    entries(of_layers.iter().map(|window| window.map_or_else(|| "none".into(), |width| width.to_string())))
}

/// The layers without a window, and all widths of windows: a model's layers are too many for a list of each.
pub(super) fn without_window(of_layers: &[Option<i64>]) -> String {
    let mut widths: Vec<i64> = of_layers.iter().copied().flatten().collect();
    widths.sort_unstable();
    widths.dedup();
    format!("none in layers {}, and widths {}", places(of_layers.iter().map(Option::is_none)), entries(widths))
}

/// The layers with full attention of a model with linear attention in the layers that `mixes` says.
pub(super) fn full_attention(mixes: &[bool]) -> String {
    format!("it in layers {}", places(mixes.iter().map(|mixes| !mixes)))
}

/// Where `all` is true.
fn places(all: impl Iterator<Item = bool>) -> String {
    entries(all.enumerate().filter(|(_, is_there)| *is_there).map(|(layer, _)| layer))
}

/// Rotary positions of all layers, or of layers without a window and then of those with one.
pub(super) fn ropes(all: &[Rope]) -> String {
    all.iter().map(rope).collect::<Vec<_>>().join(", and in layers with windows ")
}

/// A rope type with the settings that llama.cpp may lack.
fn rope(rope: &Rope) -> String {
    // The form of numbers that has exponents, so that none is long.
    let (kind, settings) = match &rope.scaling {
        RopeScaling::Default => ("default", String::new()),
        RopeScaling::Linear { factor } => ("linear", format!("factor = {factor:?}, ")),
        RopeScaling::Dynamic { factor, .. } => ("dynamic", format!("factor = {factor:?}, ")),
        RopeScaling::Llama3 { factor, .. } => ("llama3", format!("factor = {factor:?}, ")),
        RopeScaling::Yarn { truncate, attention_factor, .. } => {
            ("yarn", format!("truncate = {truncate}, attention_factor = {attention_factor:?}, "))
        }
        RopeScaling::Proportional { factor, .. } => ("proportional", format!("factor = {factor:?}, ")),
        RopeScaling::LongRope { attention_factor, .. } => {
            ("longrope", format!("attention_factor = {attention_factor:?}, "))
        }
    };
    format!("{kind} ({settings}rope_theta = {:?})", rope.theta)
}

/// The name of a non-linearity in transformers.
pub(super) fn activation(kind: Activation) -> &'static str {
    match kind {
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
        Activation::Silu => "silu",
        Activation::Relu => "relu",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_rotary_positions_are_shown_in_a_few_words() {
        assert_eq!(windows(&[None, Some(5)]), "[none, 5]");
        assert_eq!(
            without_window(&[None, Some(5), Some(4), Some(5), None]),
            "none in layers [0, 4], and widths [4, 5]"
        );
        assert_eq!(full_attention(&[true, false, true, false]), "it in layers [1, 3]");
        let rope = |theta: f64, scaling: RopeScaling| Rope { theta, dim: 4, scaling };
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.25,
            original: 64.0,
        };
        assert_eq!(
            ropes(&[rope(5e5, yarn), rope(1e4, RopeScaling::Default)]),
            "yarn (truncate = true, attention_factor = 1.25, rope_theta = 500000.0), and in layers with windows \
             default (rope_theta = 10000.0)"
        );
        let llama3 = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192.0 };
        let long =
            RopeScaling::LongRope { short: vec![1.0; 2], long: vec![2.0; 2], attention_factor: 1.5, original: 8.0 };
        for (scaling, shown) in [
            (RopeScaling::Linear { factor: 2.0 }, "linear (factor = 2.0, rope_theta = 1e300)"),
            (RopeScaling::Dynamic { factor: 2.0, original: 8.0 }, "dynamic (factor = 2.0, rope_theta = 1e300)"),
            (llama3, "llama3 (factor = 8.0, rope_theta = 1e300)"),
            (long, "longrope (attention_factor = 1.5, rope_theta = 1e300)"),
            (RopeScaling::Proportional { angles: 1, factor: 1.0 }, "proportional (factor = 1.0, rope_theta = 1e300)"),
        ] {
            assert_eq!(ropes(&[rope(1e300, scaling)]), shown);
        }
    }
}
