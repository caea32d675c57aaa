//! Golden values and comparisons.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};

/// The folder of golden values that is committed beside this file.
pub(crate) fn golden() -> PathBuf {
    // The tests are threads already; more threads inside each would fight for the cores.
    tch::set_num_threads(1);
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The folder whose models, tokenizers and PPO variants are compared, whatever they are: `$RLHF_GOLDEN`, else `golden`.
pub(crate) fn given_golden() -> PathBuf {
    let committed = golden();
    std::env::var_os("RLHF_GOLDEN").map_or(committed, PathBuf::from)
}

/// The named tensors of one golden file.
pub(crate) struct Tensors(HashMap<String, Tensor>);

impl Tensors {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |view: safetensors::tensor::TensorView<'_>| {
            let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
            let kind = match view.dtype() {
                safetensors::Dtype::F32 => Kind::Float,
                safetensors::Dtype::I64 => Kind::Int64,
                safetensors::Dtype::U8 => Kind::Uint8,
                other => panic!("{}: unexpected dtype {other:?}", path.display()),
            };
            Tensor::from_data_size(view.data(), &shape, kind)
        };
        Self(file.iter().map(|(name, view)| (name.to_string(), tensor(view))).collect())
    }

    pub(crate) fn get(&self, name: &str) -> &Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("no golden tensor `{name}`"))
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The rows of an integer matrix.
    pub(crate) fn rows(&self, name: &str) -> Vec<Vec<i64>> {
        Vec::<Vec<i64>>::try_from(self.get(name).to_kind(Kind::Int64)).unwrap()
    }
}

/// Panics, naming `what`, unless both are finite and differ by at most `tolerance` everywhere.
pub(crate) fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size(), "{what}: shapes");
    let gap = if found.numel() == 0 { 0.0 } else { (found - expected).abs().max().double_value(&[]) };
    assert!(gap <= tolerance, "{what}: largest difference {gap:e}, allowed {tolerance:e}");
}

/// Tells on standard error what a test compared, also when it passes: the test runner keeps `println!` to itself.
pub(crate) fn say(message: &str) {
    let _ = writeln!(std::io::stderr(), "{message}");
}
