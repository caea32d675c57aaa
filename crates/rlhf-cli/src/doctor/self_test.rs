//! The self-test: a tiny model goes through the passes of PPO, one update, and a file; then the rate of matrix products.

use super::finding::{Finding, Step};
use rlhf::generate::{Response, generate};
use rlhf::model::{CausalLm, ModelConfig, ModelOptions, Param, SequenceClassifier};
use rlhf::rl::checks::{Checks, ReferenceKl};
use rlhf::rl::learner::{EpochPlan, Learner};
use rlhf::rl::rollout::experience;
use rlhf::rl::shaping::targets;
use rlhf::settings::PpoConfig;
use rlhf::{Error, Result, device};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};

/// Configuration of the model: a Llama of 0.1 million parameters.
const CONFIG: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
  "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
  "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
  "tie_word_embeddings": true, "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2
}"#;

/// Responses of the update, and most tokens of each.
const ROWS: usize = 8;
const TOKENS: usize = 16;

/// Prefix of the name of the self-test's folder; the process id follows.
pub(super) const FOLDER: &str = "rlhf-doctor-";

/// Time that the products of one dtype take, about.
const PRODUCTS: Duration = Duration::from_millis(400);

const WRONG: &str =
    "its numbers are wrong here: run `ATEN_CPU_CAPABILITY=default rlhf doctor`, and report both with --json";

/// Runs the self-test on `device`, `cpu` or `cuda`, and reports its steps.
pub fn self_test(device: &str, report: &mut dyn FnMut(Step)) {
    bound_threads();
    let target = if device == "cuda" { Device::Cuda(0) } else { Device::Cpu };
    let on = if device == "cpu" { String::new() } else { format!(" on {device}") };
    let named = |name: &str| format!("{name}{on}");
    // The finding of a step has the name of the step; an error in the step becomes a failure.
    let step_finding = |name: &str, result: Result<Finding>| {
        let finding = result.unwrap_or_else(|error| Finding::failure(name, error.to_string(), hint(&error)));
        Step::Found(Finding { name: named(name), ..finding })
    };
    report(Step::Checking(named("first pass")));
    match load_cuda(target).and_then(|()| Trial::new(target)) {
        Ok(mut trial) => {
            report(step_finding("first pass", trial.first_pass()));
            report(Step::Checking(named("update")));
            report(step_finding("update", trial.update(&trial.scores())));
            report(Step::Checking(named("save and load")));
            report(step_finding("save and load", trial.save().and_then(|dir| trial.load(&dir))));
        }
        Err(error) => report(step_finding("first pass", Err(error))),
    }
    report(Step::Checking(named("speed")));
    report(step_finding("speed", speed(target)));
}

/// Limits libtorch to the processors of this process: with more threads the self-test would take minutes.
fn bound_threads() {
    device::use_threads(None);
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    if tch::get_num_threads() as usize > most {
        tch::set_num_threads(most as i32);
    }
}

fn load_cuda(target: Device) -> Result<()> {
    match target {
        Device::Cuda(_) => device::gpus().map(|_| ()).map_err(Error::Run),
        _ => Ok(()),
    }
}

/// Returns the remedy for an error that a step ended with.
fn hint(error: &Error) -> &'static str {
    let words = error.to_string();
    if words.contains("alloc") || words.contains("memory") {
        return "free memory, or raise its limits (ulimit -v, the container's)";
    }
    match error {
        Error::Io { .. } => "set TMPDIR to a folder that can be written, on a disk with space",
        _ => WRONG,
    }
}

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        let nanos =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
        let path = std::env::temp_dir().join(format!("{FOLDER}{}-{nanos}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(Error::io("create the folder", &path))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The models and rows of the self-test.
struct Trial {
    folder: Folder,
    options: ModelOptions,
    config: PpoConfig,
    learner: Learner,
    reference: CausalLm,
    prompts: Vec<Vec<i64>>,
    responses: Vec<Response>,
}

impl Trial {
    fn new(device: Device) -> Result<Self> {
        let folder = Folder::new()?;
        let file = folder.0.join("config.json");
        std::fs::write(&file, CONFIG).map_err(Error::io("write", &file))?;
        let options = ModelOptions { device, ..ModelOptions::default() };
        let policy = CausalLm::from_config(ModelConfig::from_file(&file)?, 1, options)?;
        let start = folder.0.join("start");
        std::fs::create_dir(&start).map_err(Error::io("create the folder", &start))?;
        policy.save_pretrained(&start, &[1], Some(2), usize::MAX)?;
        let reference = CausalLm::from_pretrained(&start, options)?;
        let value = SequenceClassifier::from_pretrained(&start, Some(2), options)?;
        let mut config = PpoConfig::without_reward(&start, "prompts.jsonl", &folder.0);
        config.response_length = TOKENS;
        config.num_ppo_epochs = 2;
        config.learning_rate = 1e-3;
        let learner = Learner::new(policy, value, config.learner());
        // Ragged prompts.
        let prompts: Vec<Vec<i64>> =
            (0..ROWS as i64).map(|row| (3..6 + row).map(|at| at * 7 + row).collect()).collect();
        let responses = generate(&learner.policy, &prompts, &config.generation(&[1], 0))?;
        Ok(Self { folder, options, config, learner, reference, prompts, responses })
    }

    /// Checks that the first ratio is 1, the KL to a copy of the policy 0, and decoding equal to one pass.
    fn first_pass(&mut self) -> Result<Finding> {
        let settings = self.config.checks(&self.learner.policy);
        let checks = Checks::of(&mut self.learner, Some(&self.reference), &self.prompts, &self.responses, &settings)?;
        let tolerance = Checks::tolerance(false);
        let name = "first pass";
        let finding = match checks.failure(tolerance) {
            Some(failure) => {
                let text = failure.trim_start_matches("checks: ").split("; --no_checks").next().unwrap_or_default();
                Finding::failure(name, text, WRONG)
            }
            None if checks.kl == ReferenceKl::OtherModel => {
                Finding::failure(name, "a model that was saved and loaded has other log-probabilities", WRONG)
            }
            None => Finding::ok(name, checks.to_string()),
        };
        Ok(finding.with("ratio", checks.ratio).with("kl", checks.kl.distance()).with("cached", checks.cached))
    }

    /// A score for each row.
    fn scores(&self) -> Vec<f32> {
        self.responses
            .iter()
            .map(|response| response.tokens.iter().filter(|&&token| token < 128).count() as f32)
            .collect()
    }

    /// Makes one update of PPO by `scores`, and checks that its losses and weights are finite, and that it has changed the policy.
    fn update(&mut self, scores: &[f32]) -> Result<Finding> {
        let name = "update";
        let scores = Tensor::from_slice(scores).to_device(self.options.device);
        let rollout = self.config.rollout(&self.learner.policy);
        let models = self.learner.rollout_models(&self.reference);
        let experience = experience(models, &self.prompts, &self.responses, scores, &rollout)?;
        let targets = targets(&experience, self.config.kl.kl_coef, &self.config.shaping());
        let orders = self.config.mini_batch_orders(0, ROWS);
        let plan = EpochPlan { mini_batch_size: ROWS / 2, part_size: ROWS / 2, micro_batch_size: ROWS / 4 };
        let rates = self.config.learning_rates(0, 1);
        let steps = self.learner.optimize(&experience, &targets, &orders, rates, &plan)?;
        if let Some(problem) = steps.iter().find_map(|step| step.not_finite()) {
            return Ok(Finding::failure(name, format!("one update of PPO: {problem}"), WRONG));
        }
        let policy = self.learner.policy.params();
        let sum = |tensor: &Tensor| tensor.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
        if let Some(param) = policy.iter().find(|param| !sum(&param.tensor).is_finite()) {
            return Ok(Finding::failure(name, format!("after one update of PPO, {} is not finite", param.name), WRONG));
        }
        if first_difference(policy, self.reference.params()).is_none() {
            return Ok(Finding::failure(name, "one update of PPO does not change the policy", WRONG));
        }
        let (tokens, slots) =
            steps.iter().fold((0.0, 0.0), |sum, step| (sum.0 + step.tokens, sum.1 + step.value_slots));
        let policy_loss = steps.iter().map(|step| step.policy_loss).sum::<f64>() / tokens;
        let value_loss = steps.iter().map(|step| step.value_loss).sum::<f64>() / slots;
        let text = format!(
            "one update of PPO in {} optimizer steps: policy loss {policy_loss:.4}, value loss {value_loss:.3}",
            steps.len()
        );
        Ok(Finding::ok(name, text).with("policy_loss", policy_loss).with("value_loss", value_loss))
    }

    /// Writes the policy to a folder.
    fn save(&self) -> Result<PathBuf> {
        let dir = self.folder.0.join("saved");
        std::fs::create_dir(&dir).map_err(Error::io("create the folder", &dir))?;
        self.learner.policy.save_pretrained(&dir, &[1], Some(2), usize::MAX)?;
        Ok(dir)
    }

    /// Loads the policy from a folder, and checks that every weight has the same bits.
    fn load(&self, dir: &Path) -> Result<Finding> {
        let name = "save and load";
        let loaded = CausalLm::from_pretrained(dir, self.options)?;
        let params = self.learner.policy.params();
        Ok(match first_difference(params, loaded.params()) {
            None => {
                Finding::ok(name, format!("{} tensors, equal bit for bit", params.len())).with("tensors", params.len())
            }
            Some(tensor) => {
                let hint = "the disk or the memory of this machine changes bits: check both";
                Finding::failure(name, format!("{tensor} is another one after it was written and read"), hint)
            }
        })
    }
}

/// Returns the name of the first tensor of `params` that `others` lacks or has with other bits.
fn first_difference<'p>(params: &'p [Param], others: &[Param]) -> Option<&'p str> {
    let equal = |param: &Param| {
        let other = others.iter().find(|other| other.name == param.name);
        other.is_some_and(|other| param.tensor.size() == other.tensor.size() && param.tensor.equal(&other.tensor))
    };
    params.iter().find(|param| !equal(param)).map(|param| param.name.as_str())
}

/// Measures the rate of matrix products in f32 and bf16.
fn speed(target: Device) -> Result<Finding> {
    load_cuda(target)?;
    let size = if target == Device::Cpu { 1024 } else { 4096 };
    let (f32, bf16) = (rate(size, Kind::Float, target)?, rate(size, Kind::BFloat16, target)?);
    let threads = tch::get_num_threads();
    let with_threads = match target {
        Device::Cpu => format!(", with {threads} thread{}", if threads == 1 { "" } else { "s" }),
        _ => String::new(),
    };
    // Where a processor converts bf16 to f32, the two rates are about equal, and the line `cpu` says so.
    let slow = if 2.0 * bf16 < f32 { "; bf16 is slower than f32 here: leave --bf16 out" } else { "" };
    let text = format!("matrix products: f32 {f32:.0} GFLOP/s, bf16 {bf16:.0} GFLOP/s{with_threads}{slow}");
    Ok(Finding::ok("speed", text).with("f32_gflops", f32).with("bf16_gflops", bf16).with("threads", threads))
}

/// Returns the rate of the fastest product of two square matrices, as models compute it, in GFLOP/s.
fn rate(size: i64, kind: Kind, target: Device) -> Result<f64> {
    let matrix = || Tensor::f_rand([size, size], (Kind::Float, target))?.f_to_kind(kind);
    let (a, b, mut out) = (matrix()?, matrix()?, matrix()?);
    let mut product = || {
        match target {
            Device::Cpu => tch_ext::product_into(&mut out, &a, &b),
            _ => out = a.f_matmul(&b)?,
        }
        // Reading a number waits for a GPU.
        Ok::<_, Error>(out.f_get(0)?.f_get(0)?.f_double_value(&[])?)
    };
    product()?;
    let start = Instant::now();
    let mut best = f64::INFINITY;
    while best.is_infinite() || start.elapsed() < PRODUCTS {
        let start = Instant::now();
        product()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (size as f64).powi(3) / best / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Status;

    fn trial() -> Trial {
        tch::set_num_threads(1);
        Trial::new(Device::Cpu).unwrap()
    }

    #[test]
    fn each_step_succeeds_and_leaves_no_file() {
        let mut trial = trial();
        let folder = trial.folder.0.clone();
        for (name, finding) in [
            ("first pass", trial.first_pass().unwrap()),
            ("update", trial.update(&trial.scores()).unwrap()),
            ("save and load", trial.load(&trial.save().unwrap()).unwrap()),
        ] {
            assert_eq!((finding.name.as_str(), finding.status), (name, Status::Ok), "{}", finding.text);
        }
        drop(trial);
        assert!(!folder.exists());
    }

    #[test]
    fn other_log_probabilities_of_sampling_fail_the_first_pass() {
        let mut trial = trial();
        trial.responses[3].logprobs[2] += 0.01;
        let finding = trial.first_pass().unwrap();
        assert_eq!(finding.status, Status::Failure);
        assert!(
            finding.text.contains("the first ratio is 1") && !finding.text.contains("no_checks"),
            "{}",
            finding.text
        );
    }

    #[test]
    fn another_reference_model_fails_the_first_pass() {
        let mut trial = trial();
        let weight = &trial.reference.params()[0].tensor;
        let _ = tch::no_grad(|| weight.shallow_clone().g_mul_scalar_(1.01));
        let finding = trial.first_pass().unwrap();
        assert!(finding.status == Status::Failure && finding.text.contains("saved and loaded"), "{}", finding.text);
    }

    #[test]
    fn a_loss_that_is_not_finite_fails_the_update() {
        let mut trial = trial();
        let finding = trial.update(&[f32::NAN; ROWS]).unwrap();
        assert!(finding.status == Status::Failure && finding.text.contains("NaN"), "{}", finding.text);
    }

    #[test]
    fn a_flipped_bit_of_a_file_fails_the_load() {
        let trial = trial();
        let dir = trial.save().unwrap();
        let file = dir.join("model.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let last = bytes.len() - 3;
        bytes[last] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let finding = trial.load(&dir).unwrap();
        assert!(
            finding.status == Status::Failure && finding.text.contains("weight is another one"),
            "{}",
            finding.text
        );
        std::fs::write(&file, "").unwrap();
        assert!(trial.load(&dir).is_err());
    }

    #[test]
    fn the_speed_is_about_that_of_libtorchs_own_products() {
        let finding = speed(Device::Cpu).unwrap();
        let found = finding.facts["f32_gflops"].as_f64().unwrap();
        let matrix = Tensor::rand([512, 512], (Kind::Float, Device::Cpu));
        let seconds = (0..10).map(|_| {
            let start = Instant::now();
            let _product = matrix.matmul(&matrix);
            start.elapsed().as_secs_f64()
        });
        let expected = 2.0 * 512f64.powi(3) / seconds.fold(f64::INFINITY, f64::min) / 1e9;
        // Far apart, as other tests use the processor at the same time.
        assert!(found > expected / 20.0 && found < expected * 20.0, "{}, not {expected:.1} GFLOP/s", finding.text);
    }
}
