//! Variables of the environment on which results depend beside the settings: a run records them, and a resumed run compares them.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Variables by which sums are computed in another order or by other instructions: libtorch's, oneDNN's, MKL's, OpenMP's, cuBLAS's, NCCL's
/// and ours. The number of threads is compared by itself.
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

/// Variables by which products in f32 are computed with fewer bits, as by a setting of the run.
const PRECISION: [&str; 4] = [
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
];

/// Variables that decide what functions and programs of Python do.
const PYTHON: [&str; 3] = ["PYTHONHASHSEED", "PYTHONPATH", "RLHF_PYTHON"];

/// Beginnings of the names of variables without effect where there is no GPU.
const OF_GPU: [&str; 5] = ["CUBLAS", "DISABLE_ADDMM_CUDA", "NCCL_", "NVIDIA_", "TORCH_"];

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

    /// Returns the variables of which `var` returns the values, on a machine that has a GPU or not.
    fn of(var: impl Fn(&str) -> Option<String>, has_gpu: bool) -> Self {
        let counts = |name: &&&str| has_gpu || !OF_GPU.iter().any(|begin| name.starts_with(begin));
        let names = ROUNDING.iter().chain(&PRECISION).chain(&PYTHON).filter(counts);
        // An empty variable is none to the programs that read it.
        let value = |name: &&str| Some(((*name).to_string(), var(name).filter(|value| !value.is_empty())?));
        Self(names.filter_map(value).collect())
    }

    /// Returns a line each about the variables that differ between an earlier environment and this one and change results by rounding, or
    /// scores of Python; `place` is where the earlier one was recorded.
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

    /// Returns the variables that differ and by which products have another precision.
    pub(in crate::run) fn changed_precision(&self, then: &Self) -> Vec<String> {
        self.changed(then, &PRECISION)
    }

    fn changed(&self, then: &Self, names: &[&str]) -> Vec<String> {
        let shown = |of: &Self, name: &str| {
            of.0.get(name).map_or("not set".to_string(), |value| value.chars().take(SHOWN).collect())
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
        let of = |set: &[(&str, &str)]| {
            let set: BTreeMap<_, _> = set.iter().copied().collect();
            Environment::of(|name| set.get(name).map(|value| String::from(*value)), true)
        };
        let then = of(&[("MKL_CBWR", "COMPATIBLE"), ("HOME", "/root"), ("RLHF_REWARD_TOKEN", "secret")]);
        assert_eq!(then.0.keys().collect::<Vec<_>>(), ["MKL_CBWR"], "no other variable is recorded");
        assert_eq!(then.warnings(&then, "here"), [""; 0]);
        let now = of(&[("ATEN_CPU_CAPABILITY", "default"), ("MKL_CBWR", "")]);
        assert_eq!(
            now.warnings(&then, "here"),
            [
                "environment: ATEN_CPU_CAPABILITY is default, it was not set, MKL_CBWR is not set, it was COMPATIBLE in here, so that results \
              may differ by rounding"
            ]
        );
        assert_eq!(now.changed_precision(&then), [""; 0]);
        for name in ROUNDING.iter().chain(&PYTHON) {
            let warnings = of(&[(*name, "1")]).warnings(&Environment::default(), "here");
            assert!(warnings.len() == 1 && warnings[0].contains(&format!("{name} is 1")), "{warnings:?}");
        }
        for name in PRECISION {
            let now = of(&[(name, "1")]);
            assert_eq!(now.changed_precision(&Environment::default()), [format!("{name} is 1, it was not set")]);
            assert_eq!(now.warnings(&Environment::default(), "here"), [""; 0]);
        }
        let of_cpu = Environment::of(|_| Some("1".into()), false);
        assert!(!of_cpu.0.contains_key("NVIDIA_TF32_OVERRIDE") && of_cpu.0.contains_key("MKL_CBWR"), "{of_cpu:?}");
    }
}
