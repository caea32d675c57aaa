//! The program as a user runs it: tiny models in a temporary folder, exit codes, files, both output streams.

use crate::support::{PROGRAM, golden, output};
use rlhf::weights::{Checkpoint, save};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tch::{Device, Tensor};

/// A folder to work in: `policy` and `reward` (GPT-NeoX, context 64, vocabulary 352), and data for each command.
pub(crate) struct Scratch(tempfile::TempDir);

/// What a run left behind.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    /// Without the lines that every run writes, and the line of the checks that held.
    pub(crate) stderr: String,
    /// The line of the checks.
    pub(crate) checks: Option<String>,
    /// The lines that every run writes: its title, how long it will take, where its files are.
    pub(crate) log: String,
}

pub(crate) const PPO: &str = "ppo --sft_model_path policy --reward_model_path reward --dataset_name prompts.jsonl --output_dir out \
                   --response_length 8 --per_device_train_batch_size 4 --total_episodes 8";
pub(crate) const SFT: &str = "sft --model_name_or_path policy --dataset_name demos.jsonl --output_dir out \
                   --per_device_train_batch_size 4 --max_steps 2 --logging_steps 1";
pub(crate) const REWARD: &str = "reward --model_name_or_path reward --dataset_name pairs.jsonl --output_dir out \
                      --per_device_train_batch_size 4 --max_steps 2 --logging_steps 1";
const GENERATE: &str = "generate --model_name_or_path policy --dataset_name prompts.jsonl --max_new_tokens 8";

pub(crate) const PROMPTS: [&str; 8] =
    ["The movie", "A film", "the capital of France", "do", "human", "a sing", "2024", "is it"];

/// A command line with the dataset `data` in place of its own.
pub(crate) fn with_data(line: &str, data: &str) -> String {
    let (before, after) = line.split_once("--dataset_name ").unwrap();
    let rest = after.split_once(' ').map_or("", |(_, rest)| rest);
    format!("{before}--dataset_name {data} {rest}")
}

impl Scratch {
    pub(crate) fn new() -> Self {
        let scratch = Self::with_policy("gpt_neox");
        scratch.copy("reward", "gpt_neox_cls");
        scratch
    }

    /// With a policy of another family, and no reward model.
    pub(crate) fn with_policy(golden_model: &str) -> Self {
        let scratch = Self(tempfile::tempdir().unwrap());
        scratch.copy("policy", golden_model);
        let lines = |row: fn(&str) -> Value| PROMPTS.map(|prompt| format!("{}\n", row(prompt))).concat();
        scratch.write("prompts.jsonl", &lines(|prompt| serde_json::json!({"prompt": prompt})));
        scratch.write("demos.jsonl", &lines(|p| serde_json::json!({"prompt": p, "completion": " and then some"})));
        scratch.write(
            "pairs.jsonl",
            &lines(|p| serde_json::json!({"prompt": p, "chosen": " yes", "rejected": " no, no"})),
        );
        scratch
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Copies a golden model, without its golden values.
    pub(crate) fn copy(&self, name: &str, golden_model: &str) {
        std::fs::create_dir(self.path(name)).unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            let from = golden().join("models").join(golden_model).join(file);
            std::fs::copy(from, self.path(name).join(file)).unwrap();
        }
    }

    /// Changes the tensors of a model folder.
    pub(crate) fn edit_tensors(&self, name: &str, edit: impl FnOnce(&mut BTreeMap<String, Tensor>)) {
        let dir = self.path(name);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let mut tensors: BTreeMap<String, Tensor> = checkpoint
            .names()
            .map(|n| (n.to_string(), checkpoint.read(n, Device::Cpu, tch::Kind::Float).unwrap()))
            .collect();
        edit(&mut tensors);
        save(&dir, &Vec::from_iter(tensors), usize::MAX).unwrap();
    }

    /// Changes the `config.json` of a model folder.
    pub(crate) fn edit_config(&self, name: &str, key: &str, value: impl Into<Value>) {
        let file = format!("{name}/config.json");
        let mut config: Map<String, Value> = serde_json::from_str(&self.read(&file)).unwrap();
        config.insert(key.into(), value.into());
        self.write(&file, &Value::Object(config).to_string());
    }

    /// The program with the words of `line` as arguments, in this folder.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(line.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        // One thread: sums in one order. With backtraces, so that a panic cannot pass for an error.
        command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "1");
        // A name that is no folder is not requested from the network.
        command.env("HF_HUB_OFFLINE", "1").env("HF_HOME", self.path("hf"));
        command
    }

    pub(crate) fn run(&self, line: &str) -> Ran {
        self.run_with(line, &[])
    }

    /// With further arguments, which may hold spaces.
    pub(crate) fn run_with(&self, line: &str, words: &[&str]) -> Ran {
        Ran::from(output(self.command(line).args(words)))
    }

    /// Runs what must succeed without a warning; gives its standard output. A run has its header, notes and end on standard error.
    #[track_caller]
    pub(crate) fn succeeds(&self, line: &str) -> String {
        let ran = self.run(line);
        let is_bad = |line: &str| ["warning", "error"].iter().any(|word| line.starts_with(word));
        assert!(ran.code == 0 && !ran.stderr.lines().any(is_bad), "{line}: {}: {}", ran.code, ran.stderr);
        ran.stdout
    }

    /// Runs what must end in one line of error with all of `words`, and change nothing.
    #[track_caller]
    pub(crate) fn refuses(&self, line: &str, code: i32, words: &[&str]) {
        self.refuses_with(line, &[], code, words);
    }

    #[track_caller]
    pub(crate) fn refuses_with(&self, line: &str, arguments: &[&str], code: i32, words: &[&str]) {
        let before = snapshot(self.0.path());
        let ran = self.run_with(line, arguments);
        ran.is_one_error(line, code, words);
        assert!(snapshot(self.0.path()) == before, "{line}: changed files before it failed: {}", ran.stderr);
    }

    /// The lines of a run's `metrics.jsonl`.
    pub(crate) fn metrics(&self, run: &str) -> Vec<Map<String, Value>> {
        json_lines(&self.read(&format!("{run}/metrics.jsonl")))
    }
}

impl From<std::process::Output> for Ran {
    fn from(output: std::process::Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        let (checks, others): (Vec<&str>, Vec<&str>) =
            stderr.split_inclusive('\n').partition(|line| line.starts_with("checks: "));
        let checks = checks.first().map(|line| line.trim_end().to_string());
        let (log, others): (Vec<&str>, Vec<&str>) = others.into_iter().partition(|line| is_log(line));
        let (log, stderr) = (log.concat(), others.concat());
        Self { code: output.status.code().unwrap_or(-1), stdout, stderr, checks, log }
    }
}

/// Whether every run writes such a line.
fn is_log(line: &str) -> bool {
    let begins = [
        // Findings of the report.
        "! ",
        "  ",
        "rlhf ",
        concat!(env!("CARGO_BIN_EXE_rlhf"), " "),
        "saved ",
        "done: ",
        "the model is in ",
        "the report is in ",
        "resumes from ",
        "unsupervised mix: ",
        "pushing the model to the hub",
        "uploading the model to ",
        // Where the processor has no instructions for bf16.
        "warning: bf16 = true: this processor",
    ];
    let has = [
        " took ",
        ": starts with the first update",
        ": starts with a fresh head",
        ": reads the decoded text, by its own tokenizer",
    ];
    begins.iter().any(|begin| line.starts_with(begin)) || has.iter().any(|words| line.contains(words))
}

impl Ran {
    #[track_caller]
    pub(crate) fn is_one_error(&self, line: &str, code: i32, words: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (code, ""), "{line}: {}", self.stderr);
        let error = self.stderr.strip_suffix('\n').unwrap_or_default();
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{line}: {}", self.stderr);
        for alien in ["internal", "panicked", "libtorch", "Exception"] {
            assert!(!error.contains(alien), "{line}: {error}");
        }
        for word in words {
            assert!(error.contains(word), "{line}: no `{word}` in {error}");
        }
    }
}

/// Every file below a folder with its bytes; folders with none.
pub(crate) fn snapshot(dir: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.append(&mut snapshot(&path));
            files.insert(path, None);
        } else {
            let bytes = std::fs::read(&path).unwrap();
            files.insert(path, Some(bytes));
        }
    }
    files
}

pub(crate) fn json_lines(text: &str) -> Vec<Map<String, Value>> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// Metrics without what the clock alone decides.
pub(crate) fn timeless(lines: Vec<Map<String, Value>>) -> Vec<Map<String, Value>> {
    let clock = |name: &str| {
        ["eps", "step_time"].contains(&name) || name.starts_with("time/") || name.starts_with("tokens_per_second/")
    };
    lines.into_iter().map(|line| line.into_iter().filter(|(name, _)| !clock(name)).collect()).collect()
}

// All four commands.

/// TRL's 17 names, then ours.
const PPO_METRICS: [&str; 28] = [
    "eps",
    "objective/kl",
    "objective/entropy",
    "objective/non_score_reward",
    "objective/rlhf_reward",
    "objective/scores",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "loss/policy_avg",
    "loss/value_avg",
    "val/clipfrac_avg",
    "policy/entropy_avg",
    "val/ratio",
    "val/ratio_var",
    "val/num_eos_tokens",
    "lr",
    "episode",
    "policy/grad_norm",
    "val/grad_norm",
    "val/explained_variance",
    "val/response_length",
    "val/skipped_steps",
    "time/rollout",
    "time/optimise",
    "time/update",
    "tokens_per_second/generate",
    "tokens_per_second/update",
    "step",
];

/// Checks that a standard output has these metrics, in seven significant digits.
#[track_caller]
pub(crate) fn shows_in_seven_digits(stdout: &str, metrics: &[Map<String, Value>]) {
    let shown = json_lines(stdout);
    assert_eq!(shown.len(), metrics.len());
    // Leading and trailing zeros and exponents are no digits of it.
    let digits = |number: &Value| {
        let text = number.to_string();
        let mantissa = text.split(['e', 'E']).next().unwrap_or_default();
        mantissa.chars().filter(char::is_ascii_digit).collect::<String>().trim_matches('0').len()
    };
    for (shown, whole) in shown.iter().zip(metrics) {
        assert!(shown.keys().eq(whole.keys()));
        for (name, whole) in whole {
            assert!(digits(&shown[name]) <= 7, "{name}: {}", shown[name]);
            let (shown, whole) = (shown[name].as_f64().unwrap(), whole.as_f64().unwrap());
            assert!((shown - whole).abs() <= 5.1e-7 * whole.abs(), "{name}: {shown} is not {whole}");
        }
    }
}

/// Trains with `line` into `out`: checks the files, the metrics and that standard output is a copy of them.
#[track_caller]
fn trains(scratch: &Scratch, line: &str, out: &str, updates: usize, names: &[&str]) {
    let stdout = scratch.succeeds(&format!("{line} --output_dir {out}"));
    let files =
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.yaml", "README.md"];
    for file in files {
        assert!(scratch.path(out).join(file).metadata().is_ok_and(|file| file.len() > 0), "{line}: no {out}/{file}");
    }
    let metrics = scratch.metrics(out);
    assert_eq!(metrics.len(), updates, "{line}");
    let length: Value = serde_json::from_str(&scratch.read(&format!("{out}/run.json"))).unwrap();
    assert_eq!(length["num_updates"], updates, "{line}");
    shows_in_seven_digits(&stdout, &metrics);
    for (name, value) in metrics.iter().flatten() {
        assert!(value.as_f64().is_some_and(f64::is_finite), "{line}: {name} = {value}");
    }
    for name in names {
        assert!(metrics.iter().all(|metrics| metrics.contains_key(*name)), "{line}: no {name}");
    }
}

/// From text to a tuned model that generates.
fn whole_course(golden_model: &str, sft_start: &str) {
    whole_course_in(&Scratch::with_policy(golden_model), sft_start);
}

fn whole_course_in(scratch: &Scratch, sft_start: &str) {
    let batches = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2";
    let steps = "--max_steps 2 --logging_steps 1";
    let usual = ["loss", "grad_norm", "learning_rate", "epoch", "step", "time/update"];
    let sft = format!("sft {sft_start} --dataset_name demos.jsonl {batches} {steps}");
    trains(scratch, &sft, "sft", 2, &usual);
    let reward =
        format!("reward --model_name_or_path sft --new_reward_head --dataset_name pairs.jsonl {batches} {steps}");
    trains(scratch, &reward, "reward", 2, &[&usual[..], &["accuracy", "margin", "mean_reward"]].concat());
    let ppo = format!(
        "ppo --sft_model_path sft --reward_model_path reward --dataset_name prompts.jsonl {batches} \
         --response_length 8 --total_episodes 12 --stop_token eos --missing_eos_penalty 1"
    );
    trains(scratch, &ppo, "ppo", 3, &PPO_METRICS);
    for file in ["generation_config.json", "value_model/config.json", "value_model/model.safetensors"] {
        assert!(scratch.path("ppo").join(file).is_file(), "no ppo/{file}");
    }
    for update in 0..=3 {
        let samples = json_lines(&scratch.read(&format!("ppo/samples/update-00000{update}.jsonl")));
        for sample in &samples {
            let names: Vec<&str> = sample.keys().map(String::as_str).collect();
            assert_eq!(
                names,
                [
                    "step",
                    "episode",
                    "prompt",
                    "response",
                    "score",
                    "components",
                    "finish_reason",
                    "num_tokens",
                    "tokens",
                    "logprobs"
                ]
            );
            let (tokens, finish) = (sample["num_tokens"].as_u64().unwrap(), sample["finish_reason"].as_str().unwrap());
            assert!((1..=8).contains(&tokens) && (finish == "stop" || (finish, tokens) == ("length", 8)), "{sample:?}");
            let texts = sample["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap());
            let (joined, response) = (texts.collect::<String>(), sample["response"].as_str().unwrap());
            assert!(joined == response || response.contains(char::REPLACEMENT_CHARACTER), "{joined:?}, {response:?}");
            assert_eq!(sample["tokens"].as_array().map(Vec::len), sample["logprobs"].as_array().map(Vec::len));
            assert_eq!((sample["step"].as_u64(), sample["episode"].as_u64()), (Some(update), Some(4 * update)));
            assert!(sample["score"].is_f64() && sample["components"].is_object(), "{sample:?}");
        }
        assert_eq!(samples.len(), 5);
    }
    let weights = |run: &str| std::fs::read(scratch.path(run).join("model.safetensors")).unwrap();
    assert!(weights("sft") != weights("ppo"), "PPO changed no weight");

    let responses =
        scratch.succeeds("generate --model_name_or_path ppo --dataset_name prompts.jsonl --max_new_tokens 8");
    assert_eq!(json_lines(&responses).len(), PROMPTS.len());
    // The value model is a reward model too: what is saved can be read back as what it is.
    let again = "--sft_model_path ppo --reward_model_path ppo/value_model --total_episodes 4";
    scratch.succeeds(&format!("{ppo} {again} --output_dir again"));
}

#[test]
fn gpt_neox_goes_from_random_weights_through_all_four_commands() {
    whole_course("gpt_neox", "--config_name policy/config.json --tokenizer_name policy");
}

#[test]
fn gpt2_goes_through_all_four_commands() {
    whole_course("gpt2", "--model_name_or_path policy");
}

#[test]
fn llama_goes_through_all_four_commands() {
    whole_course("llama_tied", "--model_name_or_path policy");
}

#[test]
fn lfm2_and_qwen3_5_go_through_all_commands_with_adapters_groups_and_four_bits() {
    ["lfm2", "qwen3_5"].into_iter().for_each(course_with_adapters);
}

#[test]
fn gpt_oss_and_gemma_4_with_experts_go_through_all_commands_with_adapters_groups_and_four_bits() {
    ["gpt_oss", "gemma4_moe"].into_iter().for_each(course_with_adapters);
}

#[test]
fn ministral_3_and_granite_go_through_all_commands_with_adapters_groups_and_four_bits() {
    ["ministral3", "granite"].into_iter().for_each(course_with_adapters);
}

fn course_with_adapters(family: &str) {
    // New weights in the shape of the golden model, with the vocabulary of a model that has a tokenizer.
    let scratch = Scratch::with_policy("llama_untied");
    let mut config = crate::support::read_json(&golden().join("models").join(family).join("config.json"));
    config["vocab_size"] = serde_json::json!(400);
    scratch.write("policy/config.json", &config.to_string());
    whole_course_in(&scratch, "--config_name policy/config.json --tokenizer_name policy");
    let common = "--model_name_or_path sft --max_steps 1 --logging_steps 1 --use_peft --lora_target_modules all-linear";
    let grpo = format!(
        "grpo {common} --reward length:target=4 --dataset_name prompts.jsonl --num_generations 4 \
         --max_completion_length 6 --per_device_train_batch_size 8 --gradient_checkpointing --output_dir grpo"
    );
    scratch.succeeds(&grpo);
    assert!(scratch.metrics("grpo")[0].contains_key("reward"), "{family}");
    for (out, bits) in [("plain", ""), ("four", "--load_in_4bit")] {
        let sft = format!("sft {common} --dataset_name demos.jsonl --output_dir {out} {bits}");
        scratch.succeeds(&sft);
        assert!(scratch.metrics(out)[0]["loss"].is_f64(), "{family} {out}");
    }
    scratch.succeeds("merge plain --output_dir merged");
    let read =
        |model: &str| scratch.succeeds(&format!("generate --model {model} --do_sample false --max_new_tokens 4 the"));
    assert_eq!(read("merged"), read("plain"), "{family}");
}

#[test]
fn a_run_is_repeated_bit_for_bit_from_its_own_settings_and_not_with_another_seed() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{PPO} --seed 7"));
    scratch.succeeds("ppo --config out/config.yaml --output_dir again");
    scratch.succeeds("ppo --config out/config.yaml --output_dir other --seed 8");
    assert_eq!(timeless(scratch.metrics("again")), timeless(scratch.metrics("out")));
    assert_ne!(timeless(scratch.metrics("other")), timeless(scratch.metrics("out")));
    for file in ["samples/update-000002.jsonl", "model.safetensors", "value_model/model.safetensors"] {
        let read = |run: &str| std::fs::read(scratch.path(run).join(file)).unwrap();
        assert!(read("again") == read("out"), "{file} differs");
    }
    let settings = |run: &str| scratch.read(&format!("{run}/config.yaml")).replace(&format!("output_dir: {run}\n"), "");
    assert_eq!(settings("again"), settings("out"));
}

#[test]
fn grpo_and_rloo_train_on_groups_without_a_value_model_and_resume_as_they_were() {
    let scratch = Scratch::new();
    for name in ["grpo", "rloo"] {
        let line = format!(
            "{name} --model_name_or_path policy --reward length:target=4 --dataset_name prompts.jsonl --num_generations 4 \
             --max_completion_length 6 --per_device_train_batch_size 8 --learning_rate 1e-3 --max_steps 4 --save_steps 2"
        );
        scratch.succeeds(&format!("{line} --output_dir {name}"));
        let card = scratch.read(&format!("{name}/README.md"));
        assert!(card.contains(&format!("- rlhf\n- {name}\n")) && card.contains(&format!("Trained by `rlhf {name}`")));
        assert!(!scratch.path(name).join("value_model").exists());
        let whole = scratch.metrics(name);
        assert_eq!(whole.len(), 4);
        for metric in ["reward", "reward_std", "frac_reward_zero_std", "rewards/length/mean", "completions/mean_length"]
        {
            assert!(whole.iter().all(|line| line.contains_key(metric)), "{name}: no {metric}");
        }
        // Each number is logged once, by TRL's name.
        for metric in [
            "objective/scores",
            "objective/scores_std",
            "objective/scores/length",
            "objective/scores_std/length",
            "policy/entropy_avg",
            "policy/grad_norm",
            "val/response_length",
            "time/update",
        ] {
            assert!(whole.iter().all(|line| !line.contains_key(metric)), "{name}: {metric}");
        }
        // The share of clipped tokens; RLOO's `clip_ratio/region_mean` is one of responses.
        assert_eq!(whole[0].contains_key("policy/clipfrac_avg"), name == "rloo");
        assert_eq!(whole[0].contains_key("kl"), name == "rloo", "only RLOO's beta is above 0");
        // The run that its settings describe, stopped after two updates and resumed.
        let again = format!("{name} --config {name}/config.yaml --output_dir again-{name} --overwrite_output_dir");
        scratch.succeeds(&format!("{again} --enable_test_mode --test_stop_step 1"));
        assert_eq!(scratch.metrics(&format!("again-{name}")).len(), 2);
        scratch.succeeds(&format!(
            "{name} --config {name}/config.yaml --output_dir again-{name} --resume_from_checkpoint"
        ));
        assert_eq!(timeless(scratch.metrics(&format!("again-{name}"))), timeless(whole));
    }
}

#[test]
fn a_reader_that_goes_away_does_not_stop_a_run() {
    let scratch = Scratch::new();
    for line in [SFT, GENERATE] {
        let mut child = scratch.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take()); // long before libtorch is even loaded
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{line}");
    }
    assert_eq!(scratch.metrics("out").len(), 2);
    assert!(scratch.path("out/model.safetensors").is_file());
}

// Bad input: models.

#[test]
fn a_folder_that_is_no_model_is_refused_by_every_command() {
    let scratch = Scratch::new();
    std::fs::remove_file(scratch.path("policy/config.json")).unwrap();
    for line in [SFT, &format!("{REWARD} --model_name_or_path policy"), PPO, GENERATE] {
        scratch.refuses(line, 1, &["policy: ", "expected", "config.json", "found none in this folder"]);
    }
    for line in [PPO, GENERATE] {
        let line = line.replace(" policy ", " nowhere ");
        scratch.refuses(&line, 1, &["nowhere: ", "no such folder", "HF_HUB_OFFLINE"]);
        let line = line.replace(" nowhere ", " ./nowhere ");
        scratch.refuses(&line, 1, &["./nowhere: ", "expected", "found no such folder", "on the hub"]);
    }
}

#[test]
fn an_unknown_model_type_is_refused_with_the_known_ones() {
    let scratch = Scratch::new();
    scratch.edit_config("policy", "model_type", "mamba");
    scratch.refuses(PPO, 1, &["policy/config.json: ", "`model_type`", "gpt2, gpt_neox, opt, llama", "found \"mamba\""]);
    let fresh = SFT.replace("--model_name_or_path policy", "--config_name policy/config.json --tokenizer_name policy");
    scratch.refuses(&fresh, 1, &["policy/config.json: ", "`model_type`", "found \"mamba\""]);
}

#[test]
fn every_tensor_that_does_not_fit_is_named_in_one_error() {
    let scratch = Scratch::new();
    let (norm, bias) = ("gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias");
    scratch.copy("missing", "gpt_neox");
    scratch.edit_tensors("missing", |tensors| drop(tensors.remove(norm)));
    scratch.copy("extra", "gpt_neox");
    scratch.edit_tensors("extra", |tensors| drop(tensors.insert("adapter.weight".into(), Tensor::from(1f32))));
    scratch.copy("both", "gpt_neox");
    scratch.edit_tensors("both", |tensors| {
        let moved = tensors.remove(norm).unwrap();
        tensors.insert("gpt_neox.ln_f.weight".into(), moved);
    });
    scratch.copy("shape", "gpt_neox");
    scratch.edit_tensors("shape", |tensors| drop(tensors.insert(bias.into(), Tensor::from_slice(&[0f32; 31]))));
    for (model, words) in [
        ("missing", &["missing: ", "missing `gpt_neox.final_layer_norm.weight`"][..]),
        ("extra", &["extra: ", "unexpected `adapter.weight`"]),
        ("both", &["both: ", "missing `gpt_neox.final_layer_norm.weight`", "unexpected `gpt_neox.ln_f.weight`"]),
        ("shape", &["shape: ", "`gpt_neox.final_layer_norm.bias`", "expected [32]", "found [31]"]),
    ] {
        scratch.refuses(&format!("{PPO} --sft_model_path {model}"), 1, words);
    }
}

#[test]
fn a_truncated_weight_file_is_refused_with_both_sizes() {
    let scratch = Scratch::new();
    let path = scratch.path("policy/model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let words = [&format!("expected {} bytes", whole.len())[..], &format!("found {}", whole.len() - 1)];
    scratch.refuses(PPO, 1, &[&["policy/model.safetensors: truncated"][..], &words].concat());
    scratch.refuses(SFT, 1, &words);
}

#[test]
fn a_folder_with_only_a_pickle_is_refused_with_the_way_out() {
    let scratch = Scratch::new();
    std::fs::remove_file(scratch.path("policy/model.safetensors")).unwrap();
    scratch.refuses(PPO, 1, &["policy: expected model.safetensors", "found neither"]);
    scratch.write("policy/pytorch_model.bin", "x");
    scratch.refuses(PPO, 1, &["policy: expected model.safetensors", "found only pytorch_model.bin", "convert it"]);
}

#[test]
fn in_a_pipe_checks_and_warnings_are_on_standard_error_and_the_card_has_the_command_line() {
    let scratch = Scratch::new();
    let ran = scratch.run(&format!("{PPO} --use_peft --reward_command"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    let ran = scratch.run(&format!("{PPO} --use_peft"));
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    assert!(ran.checks.unwrap().starts_with("checks: first ratio 1 within "));
    assert!(json_lines(&ran.stdout).len() == 2 && !ran.stdout.contains("checks"));
    let card = scratch.read("out/README.md");
    assert!(card.starts_with("---\nlibrary_name: peft\n"), "{card}");
    assert!(card.contains("\n    rlhf ppo --sft_model_path policy --reward_model_path reward "), "{card}");
}

#[test]
fn a_policy_is_no_reward_model_without_the_flag_for_a_new_head() {
    let scratch = Scratch::new();
    scratch.copy("other", "gpt_neox");
    let line = format!("{PPO} --reward_model_path other");
    scratch.refuses(&line, 1, &["other: missing `score.weight`", "unexpected `embed_out.weight`", "--new_reward_head"]);
    // Possible, for trying things out; and never in silence.
    let ran = scratch.run(&format!("{line} --new_reward_head"));
    assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{}", ran.stderr);
    assert!(ran.stderr.starts_with("warning: other: the reward model has a fresh random head"), "{}", ran.stderr);
    // As in TRL's example, whose policy and reward model are one folder; but not in silence either.
    for (same, out) in
        [("--reward_model_path policy", "same"), ("--reward_model_path none --reward again=model:./policy", "again")]
    {
        let line = format!("{PPO} --output_dir {out} {same}");
        let words = [
            "sft_model_path = policy: the reward model is this same folder",
            "--new_reward_head gives it a score head",
        ];
        scratch.refuses(&line, 2, &words);
        let ran = scratch.run(&format!("{line} --new_reward_head"));
        assert!(ran.code == 0 && ran.stderr.contains("the reward model has a fresh random head"), "{}", ran.stderr);
    }
    // A reward model is trained from a language model, as in TRL.
    let line = format!("{REWARD} --model_name_or_path policy");
    let ran = scratch.run(&format!("{line} --output_dir noted"));
    assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{}", ran.stderr);
    assert!(ran.stderr.contains("policy: a model without a score head: it gets a new one"), "{}", ran.stderr);
    scratch.succeeds(&format!("{line} --new_reward_head --output_dir meant"));
    let weights = |out: &str| std::fs::read(scratch.path(out).join("model.safetensors")).unwrap();
    assert_eq!(weights("noted"), weights("meant"));
}

#[test]
fn a_reward_model_is_no_policy() {
    let scratch = Scratch::new();
    let words = ["reward: ", "missing `embed_out.weight`", "unexpected `score.weight`", "not a language model"];
    scratch.copy("judge", "gpt_neox_cls");
    scratch.refuses(&format!("{PPO} --reward_model_path judge --sft_model_path reward"), 1, &words);
    scratch.refuses(&format!("{GENERATE} --model_name_or_path reward"), 1, &words);
    scratch.refuses(&format!("{SFT} --model_name_or_path reward"), 1, &words);
}

#[test]
fn a_tokenizer_larger_than_the_models_vocabulary_is_refused() {
    let scratch = Scratch::new();
    scratch.copy("llama", "llama_tied");
    let words = ["policy: expected a vocabulary of at least 400", "in llama", "found vocab_size 352"];
    scratch.refuses(&format!("{PPO} --model_name_or_path llama"), 1, &words);
    scratch.refuses(&format!("{SFT} --tokenizer_name llama"), 1, &words);
}

#[test]
fn a_model_that_is_fine_tuned_with_another_tokenizer_than_its_own_is_a_warning() {
    let scratch = Scratch::new();
    ["same", "other"].iter().for_each(|name| scratch.copy(name, "gpt_neox"));
    let mut tokenizer: Value = serde_json::from_str(&scratch.read("other/tokenizer.json")).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    // Two tokens change places.
    for id in vocab.values_mut() {
        *id = match id.as_u64() {
            Some(100) => 101.into(),
            Some(101) => 100.into(),
            _ => continue,
        };
    }
    scratch.write("other/tokenizer.json", &tokenizer.to_string());
    let ran = scratch.run(&format!("{SFT} --tokenizer_name other"));
    let words =
        "warning: tokenizer_name = other: expected the tokenizer of policy, found one that differs in 2 tokens: ";
    assert!(ran.code == 0 && ran.stderr.contains(words), "{}", ran.stderr);
    scratch.succeeds(&format!("{SFT} --tokenizer_name same --output_dir again"));
}

#[test]
fn a_value_model_with_another_tokenizer_or_a_smaller_vocabulary_is_refused() {
    let scratch = Scratch::new();
    scratch.copy("small_reward", "gpt2_cls");
    scratch.copy("large", "llama_untied");
    let line = format!("{PPO} --sft_model_path large --reward_model_path small_reward --output_dir two_tokenizers");
    let value = format!("{line} --value_model_path small_reward");
    scratch.refuses(&value, 1, &["small_reward: expected the tokenizer of large", "differs in"]);
    // A reward model may have one of its own: then it reads text, and the value model starts as the policy.
    assert_eq!(scratch.run(&line).code, 0);
    assert!(scratch.read("two_tokenizers/value_model/config.json").contains("LlamaForSequenceClassification"));
    // The same tokenizer, and fewer rows in the embedding than the policy may sample from.
    let line = format!("{PPO} --reward_model_path small_reward");
    scratch.refuses(&line, 1, &["small_reward: vocab_size: expected at least the policy's 352", "found 320"]);
}

#[test]
fn damaged_weights_end_in_one_error() {
    let scratch = Scratch::new();
    for model in ["policy", "reward"] {
        scratch.copy(&format!("damaged_{model}"), if model == "policy" { "gpt_neox" } else { "gpt_neox_cls" });
        scratch.edit_tensors(&format!("damaged_{model}"), |tensors| {
            let _ = tensors.get_mut("gpt_neox.final_layer_norm.weight").unwrap().fill_(f64::NAN);
        });
    }
    for (line, words) in [
        (format!("{GENERATE} --model_name_or_path damaged_policy"), &["logits", "not finite", "weights"][..]),
        (format!("{PPO} --sft_model_path damaged_policy --output_dir ppo"), &["logits", "not finite", "weights"]),
        (
            format!("{PPO} --reward_model_path damaged_reward --output_dir ppo2"),
            &["reward `model`", "row 1 of 5", "score", "NaN"],
        ),
        (format!("{SFT} --model_name_or_path damaged_policy --output_dir sft"), &["step 1", "NaN"]),
        (format!("{REWARD} --model_name_or_path damaged_reward --output_dir reward_out"), &["step 1", "NaN"]),
    ] {
        scratch.run(&line).is_one_error(&line, 1, words);
    }
}

// Bad input: data.

#[test]
fn data_that_cannot_be_used_is_refused_with_its_line() {
    let scratch = Scratch::new();
    scratch.write("empty.jsonl", "\n");
    scratch.write("field.jsonl", "{\"prompt\": \"x\"}\n\n{\"question\": \"y\"}\n");
    scratch.write("number.jsonl", "{\"prompt\": 7}\n");
    scratch.write("nothing.jsonl", "{\"prompt\": \"x\"}\n{\"prompt\": \"\"}\n");
    scratch.write("broken.jsonl", "{\"prompt\": \"x\"}\n{\"prompt\": \"y\n");
    scratch.write("list.jsonl", "[1]\n");
    scratch.write("ids.jsonl", "{\"input_ids\": [5, 6]}\n{\"input_ids\": [5, 352]}\n");
    scratch.write("negative.jsonl", "{\"input_ids\": [-1]}\n");
    scratch.write("long.jsonl", &format!("{{\"prompt\": \"x\"}}\n{{\"prompt\": \"{}\"}}\n", "x".repeat(57)));
    std::fs::create_dir(scratch.path("folder")).unwrap();
    for (file, words) in [
        ("empty.jsonl", &["empty.jsonl: expected at least one row", "empty dataset"][..]),
        ("field.jsonl", &["field.jsonl: line 3", "expected a field `prompt`", "found `question`"]),
        ("number.jsonl", &["number.jsonl: line 1", "field `prompt`", "expected a string", "found 7"]),
        ("nothing.jsonl", &["nothing.jsonl: line 2", "prompt is empty", "at least one token"]),
        ("broken.jsonl", &["broken.jsonl: line 2", "not valid JSON"]),
        ("list.jsonl", &["list.jsonl: line 1", "expected a JSON object"]),
        ("ids.jsonl", &["ids.jsonl: line 2", "`input_ids`", "vocabulary of 352", "found 352"]),
        ("negative.jsonl", &["negative.jsonl: line 1", "`input_ids`", "-1"]),
        ("long.jsonl", &["long.jsonl: line 2", "too long", "at most 56 tokens", "found 57"]),
        ("folder", &["folder: expected a split `train`", "found no file of rows"]),
        ("nowhere.jsonl", &["nowhere.jsonl: ", "found no such path"]),
    ] {
        scratch.refuses(&with_data(PPO, file), 1, words);
    }
    scratch.refuses(&format!("{GENERATE} --dataset_name field.jsonl"), 1, &["field.jsonl: line 3", "`prompt`"]);
    scratch.refuses(&with_data(SFT, "field.jsonl"), 1, &["field.jsonl: line 1", "`text`", "found `prompt`"]);
    scratch.refuses(&with_data(REWARD, "field.jsonl"), 1, &["field.jsonl: line 1", "`chosen`", "found `prompt`"]);
}

#[test]
fn a_row_of_a_json_array_is_named_by_its_number() {
    let scratch = Scratch::new();
    scratch.write("rows.json", "[\n  {\n    \"prompt\": \"x\"\n  },\n  {\n    \"question\": \"y\"\n  }\n]\n");
    scratch.refuses(&with_data(PPO, "rows.json"), 1, &["rows.json: row 2: ", "`prompt`", "found `question`"]);
}

#[test]
fn a_dataset_smaller_than_a_batch_warns_and_continues_with_its_next_pass() {
    let scratch = Scratch::new();
    for (line, file, rows, updates) in [
        (format!("{PPO} --per_device_train_batch_size 16 --total_episodes 32"), "prompts.jsonl", "8 rows", 2),
        (format!("{SFT} --per_device_train_batch_size 16"), "demos.jsonl", "8 rows", 2),
        (format!("{REWARD} --per_device_train_batch_size 16"), "pairs.jsonl", "8 rows", 2),
    ] {
        let ran = scratch.run(&format!("{line} --output_dir {file}.out"));
        assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{line}: {}", ran.stderr);
        assert!(ran.stderr.starts_with("warning: ") && ran.stderr.contains(rows), "{}", ran.stderr);
        assert!(ran.stderr.contains("16") && ran.stderr.contains("next shuffled pass"), "{}", ran.stderr);
        assert_eq!(scratch.metrics(&format!("{file}.out")).len(), updates);
    }
}

#[test]
fn rows_that_are_cut_or_left_out_are_counted() {
    let scratch = Scratch::new();
    // At most 12 tokens: the first row fits, the second is cut within its completion, the third within its prompt.
    let row = |prompt: usize, completion: usize| {
        format!("{{\"prompt\": \"{}\", \"completion\": \"{}\"}}\n", "x".repeat(prompt), "y".repeat(completion))
    };
    let rows = [row(4, 4), row(4, 40), row(40, 4)].concat();
    std::fs::create_dir(scratch.path("demos")).unwrap();
    scratch.write("demos/train.jsonl", &rows);
    scratch.write("demos/test.jsonl", &[rows.clone(), rows].concat());
    let small = "--per_device_train_batch_size 2 --max_length 12";
    let ran = scratch.run(&format!("{} {small}", with_data(SFT, "demos")));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for words in [
        "train.jsonl: 2 of 3 rows were cut",
        "train.jsonl: 1 of 3 rows were left out",
        "test.jsonl: 4 of 6 rows were cut",
        "test.jsonl: 2 of 6 rows were left out",
    ] {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }
    assert!(scratch.metrics("out").last().unwrap().contains_key("eval_loss"));

    let pair = |n: usize| format!("{{\"chosen\": \"{}\", \"rejected\": \"y\"}}\n", "x".repeat(n));
    std::fs::create_dir(scratch.path("pairs")).unwrap();
    scratch.write("pairs/train.jsonl", &[pair(4), pair(5), pair(40)].concat());
    scratch.write("pairs/test.jsonl", &[pair(4), pair(40), pair(50)].concat());
    let ran = scratch.run(&format!("{} {small} --output_dir out_reward", with_data(REWARD, "pairs")));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for words in ["train.jsonl: 1 of 3 pairs were left out", "test.jsonl: 2 of 3 pairs were left out"] {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }

    scratch.write("long.jsonl", &pair(40));
    scratch.refuses(
        &format!("{} {small} --output_dir o", with_data(REWARD, "long.jsonl")),
        1,
        &["long.jsonl: ", "max_length = 12"],
    );
    scratch.write("long.jsonl", &row(40, 4));
    scratch.refuses(
        &format!("{} {small} --output_dir o", with_data(SFT, "long.jsonl")),
        1,
        &["long.jsonl: ", "max_length = 12"],
    );
}

#[test]
fn rows_with_an_empty_text_are_left_out_and_counted_and_an_empty_completion_is_learned() {
    let scratch = Scratch::new();
    let sft = "sft --model_name_or_path policy --max_length 64 --max_steps 1 --report_to none";
    scratch.write("texts.jsonl", "{\"text\": \"\"}\n{\"text\": \"once\"}\n{\"text\": \"\"}\n{\"text\": \"and\"}\n");
    for packing in ["", " --packing"] {
        let line = format!("{sft} --dataset_name texts.jsonl --per_device_train_batch_size 1{packing}");
        let ran = scratch.run(&format!("{line} --output_dir out{}", packing.len()));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let warning = "texts.jsonl: 2 of 4 rows were left out: their text is empty";
        assert!(ran.stderr.contains(warning) && !ran.stderr.contains("no token to learn"), "{}", ran.stderr);
    }
    scratch.write("empty.jsonl", "{\"text\": \"\"}\n{\"text\": \"\"}\n");
    for command in [sft.to_string(), format!("plan --calibrate=false {sft}")] {
        let line = format!("{command} --dataset_name empty.jsonl --output_dir none");
        let words = "empty.jsonl: expected some text, found none: the texts of all 2 rows are empty";
        scratch.refuses(&line, 1, &[words]);
    }
    scratch.write("stop.jsonl", "{\"prompt\": \"once\", \"completion\": \"\"}\n");
    let ran =
        scratch.run(&format!("{sft} --dataset_name stop.jsonl --per_device_train_batch_size 1 --output_dir stop"));
    assert_eq!((ran.code, ran.stderr.contains("left out")), (0, false), "{}", ran.stderr);
}

// Bad input: settings.

#[test]
fn an_eos_token_that_is_set_ends_texts_of_the_saved_model_and_its_tokenizer() {
    let scratch = Scratch::new();
    for (line, out) in [(SFT, "sft"), (REWARD, "judge")] {
        let words = ["eos_token = <|im_end|>: expected a token of the tokenizer in ", "which has no such token"];
        scratch.refuses(&format!("{line} --eos_token <|im_end|>"), 2, &words);
        let ran = scratch.run(&format!("{line} --eos_token <|padding|> --pad_token <|padding|> --output_dir {out}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert!(ran.stderr.contains("without effect here: pad_token (nothing is padded"), "{}", ran.stderr);
        assert!(scratch.read(&format!("{out}/config.yaml")).contains("\neos_token: <|padding|>\n"));
        let json = |name: &str| serde_json::from_str::<Value>(&scratch.read(&format!("{out}/{name}"))).unwrap();
        assert_eq!(json("tokenizer_config.json")["eos_token"], "<|padding|>");
        assert_eq!(json("config.json")["eos_token_id"], 1);
    }
    let generation: Value = serde_json::from_str(&scratch.read("sft/generation_config.json")).unwrap();
    assert_eq!(generation["eos_token_id"], serde_json::json!([1, 0]), "what ended a text before still does");
    // The saved model is one of its own.
    let again = format!("{SFT} --model_name_or_path sft --eos_token <|padding|> --output_dir again");
    scratch.succeeds(&again);
}

#[test]
fn settings_that_cannot_be_are_usage_errors() {
    let scratch = Scratch::new();
    scratch.write("unknown.yaml", "seed: 1\nlearning_rat: 1\n");
    scratch.write("value.yaml", "seed: one\n");
    for (line, words) in [
        ("--num_mini_batches 3", &["batch size", "4 * 1 = 4", "num_mini_batches = 3", "2 and 4"][..]),
        ("--stop_token eos --stop_token_id 5", &["stop_token = eos", "stop_token_id = 5", "exclude each other"]),
        ("--stop_token_id 352", &["stop_token_id = 352", "policy's vocabulary of 352"]),
        ("--stop_token_id -1", &["stop_token_id = -1", "0 or more"]),
        ("--response_length 64", &["response_length = 64", "leaves no token for a prompt", "context of 64 tokens"]),
        ("--temperature 0", &["temperature = 0", "above 0"]),
        ("--learning_rat 1", &["--learning_rat", "similar", "--learning_rate"]),
        ("--config unknown.yaml", &["unknown.yaml:2: unknown key `learning_rat`", "`learning_rate`"]),
        ("--config value.yaml", &["value.yaml:1: `seed`", "expected a whole number", "found `one`"]),
        ("--max_tokens_per_micro_batch 0", &["max_tokens_per_micro_batch = 0"]),
        ("--max_tokens_per_micro_batch 4XB", &["max_tokens_per_micro_batch", "such as 4GB", "4XB"]),
        ("--max_skipped_updates 0", &["max_skipped_updates = 0", "at least 1"]),
    ] {
        scratch.refuses(&format!("{PPO} {line}"), 2, words);
    }
    scratch.refuses("ppo --sft_model_path policy", 2, &["required", "--dataset_name"]);
    scratch.refuses("sft --dataset_name demos.jsonl --output_dir out", 2, &["model_name_or_path", "config_name"]);
    scratch.refuses(
        "tune",
        2,
        &["'tune'", "sft, reward, dpo, distill, ppo, grpo, rloo, pipeline, generate, logprobs, score, eval, merge, convert, push, report, chat, session, serve, replay, watch, doctor, schema, completions, plan and launch"],
    );
    scratch.refuses(&format!("{PPO} --config nowhere.yaml"), 1, &["nowhere.yaml: cannot read"]);
    scratch.refuses(&format!("{GENERATE} --stop_token_ids 5,352"), 2, &["stop_token_ids = 352", "vocabulary of 352"]);
    let words = ["max_new_tokens = 1000", "leaves no token for a prompt", "context of 64 tokens"];
    scratch.refuses(&format!("{GENERATE} --max_new_tokens 1000"), 2, &words);
}

#[test]
fn help_and_version_are_no_errors() {
    let scratch = Scratch::new();
    assert!(scratch.succeeds("--version").starts_with("rlhf "));
    for command in ["sft", "reward", "ppo", "grpo", "rloo", "generate", "logprobs", "score"] {
        assert!(scratch.succeeds(&format!("{command} --help")).contains("Example"));
    }
    let ran = scratch.run("");
    assert!(ran.code == 2 && ran.stdout.is_empty() && ran.stderr.contains("Usage: rlhf <COMMAND>"), "{}", ran.stderr);
}

#[test]
fn a_folder_that_holds_a_run_is_left_alone_without_the_flag_to_overwrite() {
    let scratch = Scratch::new();
    scratch.succeeds(PPO);
    scratch.write("out/notes.txt", "mine");
    for line in [PPO, &format!("{SFT} --output_dir out"), &format!("{REWARD} --output_dir out")] {
        scratch.refuses(line, 1, &["out: output_dir", "expected an empty or new folder", "--overwrite_output_dir"]);
    }
    // A run that cannot begin replaces nothing.
    scratch.copy("other", "gpt_neox");
    let line = format!("{PPO} --overwrite_output_dir --reward_model_path other");
    scratch.refuses(&line, 1, &["score.weight"]);
    let line = format!("{} --overwrite_output_dir", with_data(SFT, "prompts.jsonl"));
    scratch.refuses(&line, 1, &["prompts.jsonl: line 1"]);

    scratch.succeeds(&format!("{SFT} --overwrite_output_dir"));
    assert!(scratch.metrics("out")[0].contains_key("loss"));
    assert!(!scratch.path("out/samples").exists() && !scratch.path("out/value_model").exists());
    assert_eq!(scratch.read("out/notes.txt"), "mine");
}

#[test]
fn a_run_never_replaces_what_it_reads() {
    let scratch = Scratch::new();
    scratch.copy("lender", "gpt_neox");
    scratch.succeeds(PPO);
    let words = ["output_dir = ", "holds what the run reads"];
    for line in [
        format!("{PPO} --output_dir policy --overwrite_output_dir"),
        format!("{PPO} --output_dir ./reward/../policy --overwrite_output_dir"),
        format!("{PPO} --output_dir reward --overwrite_output_dir"),
        format!("{PPO} --value_model_path out/value_model --overwrite_output_dir"),
        format!("{} --overwrite_output_dir", with_data(PPO, "out/samples/update-000000.jsonl")),
        format!("{PPO} --model_name_or_path lender --output_dir lender --overwrite_output_dir"),
        format!("{SFT} --output_dir policy --overwrite_output_dir"),
        format!("{REWARD} --output_dir reward --overwrite_output_dir"),
    ] {
        scratch.refuses(&line, 2, &words);
    }
    scratch.refuses(&format!("{PPO} --output_dir demos.jsonl"), 1, &["demos.jsonl: output_dir", "found a file"]);
}

// generate.

#[test]
fn the_pad_token_changes_no_run_even_where_prompts_hold_end_tokens() {
    let scratch = Scratch::new();
    let lines = |row: fn(&str) -> Value| PROMPTS.map(|prompt| format!("{}\n", row(prompt))).concat();
    let texts: fn(&str) -> Value = |p| {
        serde_json::json!({"prompt": format!("{p}<|endoftext|> and<|endoftext|>"),
        "completion": " so<|endoftext|> on", "chosen": " so<|endoftext|>on", "rejected": "<|endoftext|> no"})
    };
    for file in ["prompts.jsonl", "demos.jsonl", "pairs.jsonl"] {
        scratch.write(file, &lines(texts));
    }
    let mut runs = Vec::new();
    for (pad, saved) in [("null", 0), (r#""<|endoftext|>""#, 0), (r#""<|padding|>""#, 1)] {
        let mut run = Vec::new();
        for model in ["policy", "reward"] {
            let config = format!(r#"{{"eos_token": "<|endoftext|>", "pad_token": {pad}}}"#);
            scratch.write(&format!("{model}/tokenizer_config.json"), &config);
            scratch.edit_config(model, "pad_token_id", Value::Null);
        }
        for (name, line) in [("ppo", PPO), ("sft", SFT), ("reward", REWARD)] {
            let stop = if name == "ppo" { "--stop_token eos --missing_eos_penalty 1" } else { "" };
            scratch.succeeds(&format!("{line} --output_dir {name}-{saved}-{} {stop}", runs.len()));
            let out = format!("{name}-{saved}-{}", runs.len());
            run.push(std::fs::read(scratch.path(&out).join("model.safetensors")).unwrap());
            let config: Value = serde_json::from_str(&scratch.read(&format!("{out}/config.json"))).unwrap();
            // A language model needs none; transformers scores no batch without one.
            let pad = if name == "reward" || pad != "null" { Value::from(saved) } else { Value::Null };
            assert_eq!(config["pad_token_id"], pad, "{out}");
        }
        run.push(scratch.succeeds(GENERATE).into_bytes());
        runs.push(run);
    }
    assert!(runs[0] == runs[1] && runs[0] == runs[2]);
    assert!(scratch.read("reward-0-0/README.md").contains("pad: none, not needed (saved as eos for transformers)"));
}

#[test]
fn every_end_token_of_the_generation_config_ends_a_response_and_is_kept() {
    let scratch = Scratch::new();
    let row = &json_lines(&scratch.succeeds(&format!("{GENERATE} --do_sample false")))[0];
    let third = row["completion_ids"][2].as_i64().unwrap();
    scratch.write("policy/generation_config.json", &format!("{{\"eos_token_id\": [0, {third}]}}"));
    let row = &json_lines(&scratch.succeeds(&format!("{GENERATE} --do_sample false")))[0];
    let ids = row["completion_ids"].as_array().unwrap();
    assert!(ids.len() <= 3 && ids.last().unwrap() == third && row["finish_reason"] == "stop", "{row:?}");
    scratch.succeeds(SFT);
    let saved: Value = serde_json::from_str(&scratch.read("out/generation_config.json")).unwrap();
    assert_eq!(saved["eos_token_id"], serde_json::json!([0, third]));
}

#[test]
fn conversations_go_through_all_four_commands_and_the_template_travels_along() {
    let scratch = Scratch::new();
    let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}\n{% endfor %}\
                    {% if add_generation_prompt %}a:{% endif %}";
    let turn = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let lines = |row: &dyn Fn(&str) -> Value| PROMPTS.map(|prompt| format!("{}\n", row(prompt))).concat();
    scratch
        .write("demos.jsonl", &lines(&|p| serde_json::json!({"messages": [turn("user", p), turn("assistant", "so")]})));
    scratch.refuses(SFT, 1, &["demos.jsonl: line 1: ", "chat template", "policy, found neither"]);
    scratch.write("ours.jinja", template);
    trains(&scratch, &format!("{SFT} --chat_template_path ours.jinja"), "sft", 2, &["loss"]);
    assert_eq!(scratch.read("sft/chat_template.jinja"), template);
    scratch.write("reward/chat_template.jinja", template);
    scratch.write(
        "pairs.jsonl",
        &lines(&|p| {
            serde_json::json!({"prompt": [turn("user", p)], "chosen": [turn("assistant", "so")],
            "rejected": [turn("assistant", "no")]})
        }),
    );
    trains(&scratch, REWARD, "judge", 2, &["accuracy"]);
    let strings = scratch.read("prompts.jsonl");
    scratch.write("prompts.jsonl", &lines(&|p| serde_json::json!({"prompt": [turn("user", p)]})));
    let ppo = format!("{PPO} --sft_model_path sft --reward_model_path judge");
    trains(&scratch, &ppo, "ppo", 2, &PPO_METRICS);
    let query = json_lines(&scratch.read("ppo/samples/update-000000.jsonl"))[0]["prompt"].clone();
    assert_eq!(query, format!("u:{}<|endoftext|>\na:", PROMPTS[0]));

    // The flag makes of a string what a list of one message is.
    let line = "generate --model_name_or_path ppo --max_new_tokens 4";
    let from_lists = responses(&scratch.succeeds(&format!("{line} --dataset_name prompts.jsonl")));
    assert_eq!(from_lists[0].0, query);
    scratch.write("prompts.jsonl", &strings);
    let from_strings = scratch.succeeds(&format!("{line} --dataset_name prompts.jsonl --apply_chat_template"));
    assert_eq!(responses(&from_strings), from_lists);
    let ran = scratch.run_with(&format!("{line} --apply_chat_template"), &PROMPTS);
    assert_eq!((ran.code, responses(&ran.stdout)), (0, from_lists), "{}", ran.stderr);
    trains(&scratch, &format!("{ppo} --apply_chat_template"), "again", 2, &PPO_METRICS);
    for file in ["model.safetensors", "value_model/model.safetensors"] {
        let weights = |run: &str| std::fs::read(scratch.path(run).join(file)).unwrap();
        assert!(weights("ppo") == weights("again"), "{file}");
    }
}

#[test]
fn a_log_has_the_sentences_of_a_terminal_without_its_bar() {
    let scratch = Scratch::new();
    let ran = scratch.run(&format!("{SFT} --save_steps 1"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for words in [
        "rlhf sft: policy into out",
        "update 1 took ",
        "saved out/checkpoint-1",
        "done: 2 updates in ",
        "the model is in out; to try it:",
        "rows",
    ] {
        assert!(ran.log.contains(words), "no `{words}` in {}", ran.log);
    }
    assert!(!ran.log.contains(['\r', '\u{2588}', '\u{2591}']) && ran.stderr.is_empty(), "{}{}", ran.log, ran.stderr);
    assert_eq!(json_lines(&ran.stdout).len(), 2);
}

#[test]
fn a_template_that_closes_no_response_is_warned_of() {
    let scratch = Scratch::new();
    scratch.write("policy/chat_template.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}");
    scratch.write("demos.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"The movie\"}]}\n");
    let ran = scratch.run(SFT);
    assert!(ran.code == 0 && ran.stderr.contains("no row has an eos token in the loss"), "{}", ran.stderr);
}

/// The fields of responses that do not depend on the source of the prompts.
fn responses(stdout: &str) -> Vec<(Value, Value, Value)> {
    json_lines(stdout)
        .iter()
        .map(|row| (row["prompt"].clone(), row["completion"].clone(), row["completion_ids"].clone()))
        .collect()
}

#[test]
fn prompts_as_arguments_by_standard_input_and_by_dataset_get_the_same_responses() {
    let scratch = Scratch::new();
    let line = "generate --model_name_or_path policy --max_new_tokens 8";
    let from_dataset = responses(&scratch.succeeds(GENERATE));
    assert_eq!(from_dataset.len(), PROMPTS.len());
    let ran = scratch.run_with(line, &PROMPTS);
    assert_eq!((ran.code, responses(&ran.stdout)), (0, from_dataset.clone()), "{}", ran.stderr);

    let mut child =
        scratch.command(line).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(PROMPTS.join("\n").as_bytes()).unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!((ran.code, responses(&ran.stdout)), (0, from_dataset), "{}", ran.stderr);

    scratch.refuses(line, 2, &["no prompt", "--dataset_name", "standard input"]);
    scratch.refuses_with(GENERATE, &["The movie"], 2, &["dataset_name = prompts.jsonl", "exclude each other"]);
    scratch.refuses_with(
        line,
        &["do", &"x".repeat(57)],
        1,
        &["prompt: argument 2: ", "expected at most 56 tokens", "found 57"],
    );
}

#[test]
fn responses_come_as_text_or_as_json_with_the_rows_other_fields() {
    let scratch = Scratch::new();
    let line = "generate --model_name_or_path policy --max_new_tokens 4";
    scratch.write("prompts.jsonl", "{\"prompt\": \"do\", \"id\": 7}\n");
    let rows = json_lines(&scratch.succeeds(&format!("{line} --dataset_name prompts.jsonl")));
    assert_eq!((rows[0]["id"].as_u64(), rows[0]["num_tokens"].as_u64()), (Some(7), Some(4)));
    assert_eq!((rows[0]["finish_reason"].as_str(), rows[0]["logprobs"].as_array().unwrap().len()), (Some("length"), 4));
    let text = scratch.run_with(&format!("{line} --output_format text"), &["do"]).stdout;
    assert_eq!(text, format!("do{}\n\n", rows[0]["completion"].as_str().unwrap()));
}

#[test]
fn responses_depend_on_the_seed_and_not_on_the_batch_size() {
    let scratch = Scratch::new();
    let with = |flags: &str| responses(&scratch.succeeds(&format!("{GENERATE} {flags}")));
    let eight = with("--seed 3 --batch_size 8 --num_return_sequences 3");
    assert_eq!(eight.len(), 3 * PROMPTS.len());
    assert!(eight[0].0 == eight[2].0 && eight[0].2 != eight[1].2 && eight[1].2 != eight[2].2, "{:?}", &eight[..3]);
    assert_eq!(with("--seed 3 --batch_size 1 --num_return_sequences 3"), eight);
    assert_ne!(with("--seed 4 --batch_size 8 --num_return_sequences 3"), eight);

    let greedy = with("--do_sample false --seed 1");
    assert_eq!(with("--temperature 0 --seed 2 --batch_size 1"), greedy);
    assert_ne!(with("--seed 1"), greedy);
    scratch.refuses(
        &format!("{GENERATE} --do_sample false --num_return_sequences 2"),
        2,
        &["num_return_sequences = 2", "equal"],
    );
}

#[test]
fn an_output_file_is_written_though_a_process_of_the_same_id_left_its_rows() {
    let scratch = Scratch::new();
    let run = scratch.command(&format!("{GENERATE} --output_file responses.jsonl"));
    // As a container that is restarted: the shell becomes the program, with its process id.
    let script = "echo old > responses.jsonl.$$.part; echo $$ > id; exec \"$0\" \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(run.get_program()).args(run.get_args()).current_dir(scratch.path("."));
    shell.stdin(Stdio::null()).envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let ran = Ran::from(shell.output().unwrap());
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    assert_eq!(scratch.read(&format!("responses.jsonl.{}.part", scratch.read("id").trim())), "old\n");
    assert_eq!(responses(&scratch.read("responses.jsonl")).len(), PROMPTS.len());
}

#[test]
fn a_tilde_at_the_start_of_a_path_is_the_home_folder() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("home")).unwrap();
    std::fs::rename(scratch.path("policy"), scratch.path("home/policy")).unwrap();
    scratch.write("sft.yaml", "model_name_or_path: ~/policy\noutput_dir: ~/runs/sft\n");
    let sft = SFT.replace("--model_name_or_path policy", "").replace("--output_dir out", "--config sft.yaml");
    let generate = GENERATE.replace("policy", "~/runs/sft") + " --output_file=~/responses.jsonl";
    for line in [&sft, &generate] {
        let ran = Ran::from(output(scratch.command(line).env("HOME", scratch.path("home"))));
        assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
    }
    assert!(scratch.path("home/runs/sft/model.safetensors").is_file());
    assert!(scratch.path("home/responses.jsonl").is_file() && !scratch.path("~").exists());
}

#[test]
fn an_output_file_is_written_once_and_replaced_only_with_the_flag() {
    let scratch = Scratch::new();
    let line = format!("{GENERATE} --output_file responses.jsonl");
    assert_eq!(scratch.succeeds(&line), "");
    assert_eq!(responses(&scratch.read("responses.jsonl")), responses(&scratch.succeeds(GENERATE)));
    scratch.refuses(&line, 1, &["responses.jsonl: the file exists", "--overwrite_output_file"]);
    let once = scratch.read("responses.jsonl");
    scratch.succeeds(&format!("{line} --overwrite_output_file --seed 9"));
    assert_ne!(scratch.read("responses.jsonl"), once);
    let line = format!("{GENERATE} --output_file prompts.jsonl --overwrite_output_file");
    scratch.refuses(&line, 2, &["output_file = prompts.jsonl", "also the dataset"]);
    // A file of a dataset that is a folder; and a folder that is not there, before the model is read.
    std::fs::create_dir(scratch.path("folder")).unwrap();
    std::fs::rename(scratch.path("prompts.jsonl"), scratch.path("folder/test.jsonl")).unwrap();
    let folder_line = GENERATE.replace("prompts.jsonl", "folder");
    let line = format!("{folder_line} --output_file folder/test.jsonl --overwrite_output_file");
    scratch.refuses(&line, 2, &["output_file = folder/test.jsonl", "also the dataset, or a file of it"]);
    let line = format!("{folder_line} --output_file none/responses.jsonl");
    scratch.refuses(&line, 1, &["none/responses.jsonl: expected a name in a folder, found none at none"]);
    // Two folders with the split: one is chosen.
    for name in ["folder/one", "folder/two"] {
        std::fs::create_dir(scratch.path(name)).unwrap();
    }
    std::fs::rename(scratch.path("folder/test.jsonl"), scratch.path("folder/one/test.jsonl")).unwrap();
    scratch.write("folder/two/test.jsonl", "{\"prompt\": \"The other one\"}\n");
    scratch.refuses(&folder_line, 1, &["a split `test`, found", "choose by --dataset_config"]);
    assert_eq!(json_lines(&scratch.succeeds(&format!("{folder_line} --dataset_config two"))).len(), 1);
}

#[test]
fn a_sentiment_encoder_with_its_own_tokenizer_and_two_labels_is_a_reward_model() {
    let scratch = Scratch::new();
    scratch.copy("sentiment", "distilbert_cls2");
    let ppo = PPO.replace("--reward_model_path reward", "--reward_model_path sentiment");
    scratch.refuses(&ppo, 1, &["sentiment", "2 labels", "NEGATIVE, POSITIVE", "--reward_label"]);
    let joy = format!("{ppo} --reward_label joy");
    scratch.refuses(&joy, 1, &["reward_label = joy", "NEGATIVE, POSITIVE"]);
    let value = format!("{ppo} --reward_label POSITIVE --value_model_path sentiment");
    scratch.refuses(&value, 1, &["sentiment", "expected a decoder", "distilbert"]);

    let ran = scratch.run(&format!("{ppo} --reward_label POSITIVE-NEGATIVE --num_sample_generations 1"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(scratch.metrics("out").iter().all(|m| m["objective/scores"].as_f64().unwrap().is_finite()));
    // The value model cannot begin as an encoder: it is the policy's body with a head.
    assert!(scratch.read("out/value_model/config.json").contains("GPTNeoXForSequenceClassification"));

    // The sample table shows the score of `rlhf score` for a text.
    let tables = ["update-000000", "update-000002"].map(|name| scratch.read(&format!("out/samples/{name}.jsonl")));
    let rows: Vec<Value> = tables
        .concat()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|row| serde_json::json!({"text": format!("{}{}", row["prompt"].as_str().unwrap(), row["response"].as_str().unwrap()), "expected": row["score"]}))
        .collect();
    scratch.write("texts.jsonl", &rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    let scored = json_lines(
        &scratch.succeeds("score --model sentiment --dataset_name texts.jsonl --reward_label POSITIVE-NEGATIVE"),
    );
    assert!(scored.len() >= 5);
    for row in &scored {
        let (found, expected) = (row["score"].as_f64().unwrap(), row["expected"].as_f64().unwrap());
        assert!((found - expected).abs() < 1e-4, "{row:?}");
    }
}

#[test]
fn encoder_decoders_quantized_weights_and_unknown_parts_are_refused_by_name() {
    let scratch = Scratch::new();
    for (key, value, words) in [
        ("model_type", serde_json::json!("mbart"), vec!["\"mbart\"", "encoder-decoder", "not supported"]),
        ("model_type", serde_json::json!("llava"), vec!["\"llava\"", "gpt_neox", "qwen3", "roberta"]),
        ("quantization_config", serde_json::json!({"quant_method": "gptq"}), vec!["quantization_config", "gptq"]),
        ("hidden_act", serde_json::json!("mish"), vec!["hidden_act", "mish", "gelu_new"]),
        (
            "rope_parameters",
            serde_json::json!({"rope_type": "ntk", "factor": 4.0, "rope_theta": 1e4}),
            vec!["rope_parameters", "ntk", "llama3"],
        ),
    ] {
        let before = scratch.read("policy/config.json");
        scratch.edit_config("policy", key, value);
        scratch.refuses(GENERATE, 1, &[&["policy/config.json"], words.as_slice()].concat());
        scratch.write("policy/config.json", &before);
    }
    let classifier = GENERATE.replace("policy", "sentiment");
    scratch.copy("sentiment", "distilbert_cls2");
    scratch.refuses(&classifier, 1, &["sentiment", "expected a language model", "distilbert"]);
}

#[test]
fn an_encoder_with_one_label_trains_as_a_reward_model() {
    let scratch = Scratch::new();
    scratch.copy("judge", "bert_cls1");
    scratch.succeeds(&format!("{REWARD} --model_name_or_path judge --output_dir bert --learning_rate 1e-2"));
    let losses: Vec<f64> = scratch.metrics("bert").iter().map(|m| m["loss"].as_f64().unwrap()).collect();
    assert!(losses.iter().all(|loss| loss.is_finite()) && losses[0] != losses[1], "{losses:?}");
    assert!(scratch.read("bert/config.json").contains("BertForSequenceClassification"));
    scratch.copy("two", "bert_cls2");
    let error = ["two", "expected a classifier with one label", "found"];
    scratch.refuses(&format!("{REWARD} --model_name_or_path two --output_dir out2"), 1, &error);
}
