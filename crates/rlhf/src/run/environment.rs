//! Environment variables on which results depend besides the settings. A run records them, and a resumed run compares them.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Variables that change the order of sums or the instructions that compute them: of libtorch, oneDNN, MKL, OpenMP, cuBLAS, NCCL and rlhf.
/// The number of threads is compared separately.
const ROUNDING: [&str; 21] = [
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DISABLE_ADDMM_CUDA_LT",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DOMAIN_NUM_THREADS",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "RLHF_KERNELS",
    "RLHF_LOGITS_CHUNK",
    "RLHF_SUMS",
    "TORCH_BLAS_PREFER_CUBLASLT",
];

/// Variables that make f32 products use fewer bits, as a setting of the run could.
const PRECISION: [&str; 4] = [
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
];

/// Variables that change what Python functions and programs do.
const PYTHON: [&str; 3] = ["PYTHONHASHSEED", "PYTHONPATH", "RLHF_PYTHON"];

/// Beginnings of the names of variables that have no effect without a GPU.
const GPU_PREFIXES: [&str; 5] = ["CUBLAS", "DISABLE_ADDMM_CUDA", "NCCL_", "NVIDIA_", "TORCH_"];

/// Number of characters of a value that messages show.
const SHOWN: usize = 80;

/// The variables that were set, with their values.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::run) struct Environment(BTreeMap<String, String>);

impl Environment {
    /// Returns the variables of this process.
    pub(in crate::run) fn of_process() -> Self {
        let var = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
        Self::of(var, tch::Cuda::is_available())
    }

    /// Returns the variables that have an effect on this machine, with the values that `var` returns; `has_gpu` tells whether it has a GPU.
    fn of(var: impl Fn(&str) -> Option<String>, has_gpu: bool) -> Self {
        let counts = |name: &&&str| has_gpu || !GPU_PREFIXES.iter().any(|begin| name.starts_with(begin));
        let names = ROUNDING.iter().chain(&PRECISION).chain(&PYTHON).filter(counts);
        // The programs that read these variables treat an empty one as not set.
        let value = |name: &&str| Some(((*name).to_string(), var(name).filter(|value| !value.is_empty())?));
        Self(names.filter_map(value).collect())
    }

    /// Returns a line about the differing variables that change rounding, and one about those that change scores of Python functions.
    /// `then` is the earlier environment, and `place` is where it was recorded.
    pub(in crate::run) fn warnings(&self, then: &Self, place: &str) -> Vec<String> {
        let line = |names: &[&str], effect: &str| {
            let changed = self.changed(then, names);
            (!changed.is_empty()).then(|| format!("environment: {} in {place}, so that {effect}", changed.join(", ")))
        };
        let lines = [
            line(&ROUNDING, "results may differ by rounding"),
            line(&PYTHON, "functions and programs of Python may give other scores"),
        ];
        lines.into_iter().flatten().collect()
    }

    /// Returns the differing variables that change the precision of products.
    pub(in crate::run) fn changed_precision(&self, then: &Self) -> Vec<String> {
        self.changed(then, &PRECISION)
    }

    fn changed(&self, then: &Self, names: &[&str]) -> Vec<String> {
        let shown = |environment: &Self, name: &str| {
            environment.0.get(name).map_or("not set".to_string(), |value| value.chars().take(SHOWN).collect())
        };
        let differs = |name: &&&str| self.0.get(**name) != then.0.get(**name);
        let changed = names.iter().filter(differs);
        changed.map(|name| format!("{name} is {}, it was {}", shown(self, name), shown(then, name))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_variable_that_differs_is_said_with_what_it_changes() {
        let environment = |set: &[(&str, &str)]| {
            let set: BTreeMap<_, _> = set.iter().copied().collect();
            Environment::of(|name| set.get(name).map(|value| String::from(*value)), true)
        };
        let then = environment(&[("MKL_CBWR", "COMPATIBLE"), ("HOME", "/root"), ("RLHF_REWARD_TOKEN", "secret")]);
        assert_eq!(then.0.keys().collect::<Vec<_>>(), ["MKL_CBWR"], "no other variable is recorded");
        assert_eq!(then.warnings(&then, "here"), [""; 0]);
        let now = environment(&[("ATEN_CPU_CAPABILITY", "default"), ("MKL_CBWR", "")]);
        assert_eq!(
            now.warnings(&then, "here"),
            [
                "environment: ATEN_CPU_CAPABILITY is default, it was not set, MKL_CBWR is not set, it was COMPATIBLE in here, so that results \
              may differ by rounding"
            ]
        );
        assert_eq!(now.changed_precision(&then), [""; 0]);
        for name in ROUNDING.iter().chain(&PYTHON) {
            let warnings = environment(&[(*name, "1")]).warnings(&Environment::default(), "here");
            assert!(warnings.len() == 1 && warnings[0].contains(&format!("{name} is 1")), "{warnings:?}");
        }
        for name in PRECISION {
            let now = environment(&[(name, "1")]);
            assert_eq!(now.changed_precision(&Environment::default()), [format!("{name} is 1, it was not set")]);
            assert_eq!(now.warnings(&Environment::default(), "here"), [""; 0]);
        }
        let cpu = Environment::of(|_| Some("1".into()), false);
        assert!(!cpu.0.contains_key("NVIDIA_TF32_OVERRIDE") && cpu.0.contains_key("MKL_CBWR"), "{cpu:?}");
    }
}
