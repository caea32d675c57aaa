//! Adapters whose first matrices PEFT subtracts from the base: PiSSA and OLoRA.

use rlhf_base::Result;
use serde_json::{Map, Value};
use tch::{Kind, Tensor};

/// A change of a setting's value.
type Change<'c> = &'c dyn Fn(&Value) -> Value;

/// A base from which PEFT subtracts the first matrices of an adapter, when it makes the adapter and whenever it opens it. On the unchanged
/// base, the difference `B A - B0 A0` is an adapter of twice the rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Remainder {
    /// Without its largest singular values (PiSSA, Meng et al. 2024).
    Pissa,
    /// Without the first columns of its QR decomposition (OLoRA, arXiv 2406.01775).
    Olora,
}

impl Remainder {
    /// Returns the kind that the setting `init_lora_weights` names.
    pub(super) fn of(described: &Map<String, Value>) -> Option<Self> {
        match described.get("init_lora_weights")?.as_str()? {
            "pissa" => Some(Self::Pissa),
            "olora" => Some(Self::Olora),
            _ => None,
        }
    }

    /// The first matrices B0 `[out, r]` and A0 `[r, in]` for a weight `[out, in]` in f32.
    pub(super) fn first(self, weight: &Tensor, r: i64, scale: f64) -> Result<[Tensor; 2]> {
        // CUDA's decompositions in f32 are less exact than the processor's.
        let wide = if weight.device().is_cuda() { weight.to_kind(Kind::Double) } else { weight.shallow_clone() };
        let [b, a] = self.decompose(&wide, r, scale)?;
        Ok([b.to_kind(weight.kind()), a.to_kind(weight.kind())])
    }

    fn decompose(self, weight: &Tensor, r: i64, scale: f64) -> Result<[Tensor; 2]> {
        match self {
            Self::Pissa => {
                let (u, s, v) = weight.f_svd(true, true)?;
                let root = (s.f_narrow(0, 0, r)? / scale).sqrt();
                Ok([u.f_narrow(1, 0, r)? * &root, (v.f_narrow(1, 0, r)? * root).tr()])
            }
            Self::Olora => {
                let (columns, rows) = Tensor::f_linalg_qr(weight, "reduced")?;
                Ok([columns.f_narrow(1, 0, r)?, rows.f_narrow(0, 0, r)?])
            }
        }
    }
}

/// The settings of an adapter of twice the rank with the same scales, on the unchanged base.
pub(super) fn doubled(mut described: Map<String, Value>) -> Map<String, Value> {
    // Scales are alpha / r, or alpha / sqrt(r).
    let rslora = described.get("use_rslora") == Some(&Value::Bool(true));
    let rank = |value: &Value| value.as_u64().map_or_else(|| value.clone(), |r| (2 * r.min(1 << 32)).into());
    let alpha = |value: &Value| match value.as_f64() {
        Some(alpha) if rslora => (alpha * 2f64.sqrt()).into(),
        Some(alpha) => (alpha * 2.0).into(),
        None => value.clone(),
    };
    let changes: [([&str; 2], Change<'_>); 2] =
        [(["r", "rank_pattern"], &rank), (["lora_alpha", "alpha_pattern"], &alpha)];
    for (names, change) in changes {
        for name in names {
            match described.get_mut(name) {
                Some(Value::Object(layers)) => layers.values_mut().for_each(|value| *value = change(value)),
                Some(value) => *value = change(value),
                None => {}
            }
        }
    }
    described.insert("init_lora_weights".into(), true.into());
    described
}
