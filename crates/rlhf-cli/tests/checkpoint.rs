//! Files that a stopped, killed or failed run leaves, and that it resumes from there to the same bits.

use crate::cli::{PPO, REWARD, Ran, SFT, Scratch, json_lines, timeless};
use crate::support::{PROGRAM, Process, golden, init, output, say};
use rlhf::data::Dataset;
use rlhf::rng::{Purpose, Stream};
use rlhf::run::Console;
use rlhf::settings::{
    DistillConfig, DpoConfig, DpoLoss, LrSchedulerType, Optim, PpoConfig, Preset, ReportTo, Resume, RewardConfig,
    RunConfig, SftConfig,
};
use serde_json::{Map, Value, json};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PROMPTS: [&str; 6] = ["The movie", "A film", "the capital of France", "do", "human", "a sing"];

fn write_rows(path: &Path, row: fn(&str) -> Value) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, PROMPTS.map(|prompt| format!("{}\n", row(prompt))).concat()).unwrap();
}

/// Five updates of 4 responses to 6 prompts, with everything on that a step depends on.
pub(crate) fn ppo_config(dir: &Path) -> PpoConfig {
    for split in ["train", "test"] {
        write_rows(&dir.join(format!("prompts/{split}.jsonl")), |prompt| json!({"prompt": prompt}));
    }
    let mut config = PpoConfig::new(init("llama_policy"), init("llama_reward"), dir.join("prompts"), dir.join("whole"));
    config.model_name_or_path = Some(golden().join("models/gpt_neox"));
    config.response_length = 6;
    config.stop_token_id = Some(192);
    config.per_device_train_batch_size = Some(4);
    config.num_mini_batches = 2;
    config.num_ppo_epochs = 2;
    config.total_episodes = Some(20);
    config.num_sample_generations = 2;
    config.learning_rate = 1e-3;
    config.optimizer.lr_scheduler_type = LrSchedulerType::Cosine;
    config.optimizer.warmup_steps = 2;
    config.optimizer.weight_decay = 0.1;
    config.optimizer.max_grad_norm = Some(1.0);
    config.rewards.reward = vec!["short=length:target=3".into()];
    config.rewards.reward_normalize = vec!["short=mean_std".into()];
    config.eval.eval_steps = Some(2.into());
    config.eval.metric_for_best_model = Some("eval/score".into());
    config.run.tracking.report_to = vec![ReportTo::Tensorboard];
    config
}

/// A policy with a weight large enough for states of 8 bits.
pub(crate) fn with_states_of_8_bits() -> PathBuf {
    golden().join("models/gpt2")
}

pub(crate) fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_dir(&entry.path(), &to);
        } else {
            std::fs::write(&to, std::fs::read(entry.path()).unwrap()).unwrap();
        }
    }
}

/// The folder of a run that was killed some time after its checkpoint `stop`: later checkpoints and the model are missing,
/// and metrics of later updates are there, the last of them in half.
pub(crate) fn stopped(whole: &Path, stop: usize) -> PathBuf {
    let dir = whole.with_file_name(format!("stopped-{stop}"));
    copy_dir(whole, &dir);
    for later in stop + 1..10 {
        let _ = std::fs::remove_dir_all(dir.join(format!("checkpoint-{later}")));
    }
    for name in ["model.safetensors", "config.json", "adapter_model.safetensors", "adapter_config.json"] {
        let _ = std::fs::remove_file(dir.join(name));
    }
    let best = std::fs::read(dir.join("best/best.json")).map(|text| serde_json::from_slice::<Value>(&text).unwrap());
    if best.is_ok_and(|best| best["update"].as_u64().unwrap() > stop as u64) {
        std::fs::remove_dir_all(dir.join("best")).unwrap();
    }
    let metrics = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    std::fs::write(dir.join("metrics.jsonl"), &metrics[..metrics.len() - 9]).unwrap();
    dir
}

/// Every file below `dir` but those that name the folder itself, by its path.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let named = ["trainer_state.json", "adapter_config.json", "README.md", "report.html"];
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = PathBuf::from(path.file_name().unwrap());
        if path.is_dir() {
            found.extend(files(&path).into_iter().map(|(inner, bytes)| (name.join(inner), bytes)));
        } else if !named.iter().any(|other| name == Path::new(other)) {
            found.push((name, std::fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
}

fn state(checkpoint: &Path) -> Value {
    let mut state: Value =
        serde_json::from_slice(&std::fs::read(checkpoint.join("trainer_state.json")).unwrap()).unwrap();
    for name in ["output_dir", "save_steps", "offload", "offload_dir"] {
        state["config"][name] = Value::Null;
    }
    state["state"]["inputs"] = Value::Null; // by their names, or what the caller has in hand
    state["files"] = Value::Null; // one is a path longer or shorter: adapter_config.json
    state
}

/// Checks that two runs left the same: metrics, samples, models, and the checkpoint of the last update with its optimizers.
#[track_caller]
pub(crate) fn assert_same(found: &Path, expected: &Path, last: usize) {
    let metrics = |dir: &Path| timeless(json_lines(&std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap()));
    assert_eq!(metrics(found), metrics(expected));
    let last = format!("checkpoint-{last}");
    assert_eq!(state(&found.join(&last)), state(&expected.join(&last)));
    let files = |dir: &Path| -> Vec<(PathBuf, Vec<u8>)> {
        let ours = |path: &Path| {
            let name = path.to_string_lossy();
            // `run.json` has the time at which the run began.
            let others = ["metrics.jsonl", "config.yaml", "run.json", "events.out", "checkpoint-"];
            name.starts_with(&last) || !others.iter().any(|other| name.starts_with(other))
        };
        files(dir).into_iter().filter(|(path, _)| ours(path)).collect()
    };
    let (found_dir, expected_dir) = (found, expected);
    let (found_files, expected_files) = (files(found), files(expected));
    let names = |files: &[(PathBuf, Vec<u8>)]| files.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found_files), names(&expected_files));
    let rows = |path: &Path| {
        let dataset = Dataset::read(path, "train").unwrap();
        dataset.rows().cloned().collect::<Vec<_>>()
    };
    for ((name, found), (_, expected)) in found_files.iter().zip(&expected_files) {
        let is_same = if name.extension().is_some_and(|extension| extension == "parquet") {
            rows(&found_dir.join(name)) == rows(&expected_dir.join(name))
        } else {
            found == expected
        };
        assert!(is_same, "{} differs", name.display());
    }
}

/// Runs the whole of it with a checkpoint after each update, and from each of them to the end.
fn resumes_from_everywhere(updates: usize, run: impl Fn(&dyn Fn(&mut RunConfig))) {
    let mut whole = PathBuf::new();
    let out = std::cell::RefCell::new(&mut whole);
    run(&|run| {
        run.checkpoints.save_steps = Some(1.into());
        **out.borrow_mut() = run.output_dir.clone();
    });
    for stop in 1..updates {
        let dir = stopped(&whole, stop);
        run(&|run| {
            run.output_dir.clone_from(&dir);
            run.checkpoints.save_steps = Some(updates.into());
            run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
        });
        assert_same(&dir, &whole, updates);
    }
}

fn ppo_resumes(change: impl Fn(&mut PpoConfig)) {
    let dir = tempfile::tempdir().unwrap();
    resumes_from_everywhere(5, |with| {
        let mut config = ppo_config(dir.path());
        change(&mut config);
        with(&mut config.run);
        rlhf::train::ppo::ppo(&config, Console::Silent).unwrap();
    });
}

#[test]
fn a_run_stopped_after_any_update_resumes_to_the_same_bits() {
    ppo_resumes(|_| ());
}

#[test]
fn a_run_of_an_optimizer_with_small_states_stopped_after_any_update_resumes_to_the_same_bits() {
    for optim in [Optim::Adamw8bit, Optim::Adafactor, Optim::AdamwBf16] {
        ppo_resumes(|config| {
            config.sft_model_path = with_states_of_8_bits();
            config.optimizer.optim = optim;
            config.run.bf16 = optim == Optim::AdamwBf16;
        });
    }
}

#[test]
fn a_run_of_an_encoder_decoder_stopped_after_any_update_resumes_to_the_same_bits() {
    let t5 = golden().join("trl_legacy/init/t5_ref");
    ppo_resumes(|config| {
        (config.sft_model_path, config.model_name_or_path) = (t5.clone(), None);
        (config.reward_model_path, config.stop_token_id) = (None, Some(1));
        config.legacy.value_head = true;
    });
    let dir = tempfile::tempdir().unwrap();
    let demos = dir.path().join("demos.jsonl");
    write_rows(&demos, |p| json!({"prompt": p, "completion": "and then some"}));
    resumes_from_everywhere(3, |with| {
        let mut config = SftConfig::new(&t5, &demos, dir.path().join("sft/whole"));
        (config.max_steps, config.logging_steps, config.per_device_train_batch_size) = (Some(3), 2, Some(4));
        config.peft.use_peft = true; // with dropout
        with(&mut config.run);
        rlhf::train::sft::sft(&config, Console::Silent).unwrap();
    });
}

#[test]
fn a_run_with_adapters_stopped_after_any_update_resumes_to_the_same_bits() {
    ppo_resumes(|config| config.peft.use_peft = true);
}

#[test]
fn a_run_with_dora_and_modules_that_are_trained_in_full_resumes_to_the_same_bits() {
    ppo_resumes(|config| {
        (config.peft.use_peft, config.peft.use_dora) = (true, true);
        config.peft.lora_modules_to_save = vec!["embed_tokens".into(), "lm_head".into()];
    });
}

#[test]
fn a_run_whose_kl_weight_follows_a_target_and_whose_policy_starts_late_resumes_to_the_same_bits() {
    ppo_resumes(|config| {
        config.kl.adap_kl_ctrl = true;
        config.kl.target = 0.01;
        config.kl.horizon = 40.0;
        config.value.value_warmup_updates = 2;
        config.value.value_learning_rate = Some(2e-3);
    });
}

#[test]
fn a_run_whose_entropy_bonus_follows_a_target_resumes_to_the_same_bits() {
    ppo_resumes(|config| {
        config.loss.use_adaptive_entropy = true;
        config.loss.entropy_coef = 0.01;
        // Every entropy is below it: the coefficient rises in each step and is applied from the second one.
        config.loss.entropy_target = 100.0;
    });
}

#[test]
fn a_run_over_a_mixture_with_rows_held_out_and_a_kl_weight_that_moves_resumes_to_the_same_bits() {
    ppo_resumes(|config| {
        let folder = config.data.dataset_name[0].clone();
        config.data.dataset_name = vec![folder.join("train.jsonl"), folder.join("test.jsonl")];
        config.data.dataset_weights = vec![0.3, 0.7];
        config.data.eval_split_size = Some(2.0);
        config.kl.kl_coef_end = Some(0.2);
    });
}

#[test]
fn a_run_in_f16_resumes_to_the_same_bits_with_its_loss_scales() {
    ppo_resumes(|config| {
        config.run.fp16 = true;
        config.half.align_overflow = true;
        // Too high at first, and grown again on the way.
        config.run.loss_scale.initial_scale_power = 34;
        config.run.loss_scale.loss_scale_window = 3;
    });
}

#[test]
fn a_run_with_a_moving_average_and_texts_in_its_steps_resumes_to_the_same_bits() {
    ppo_resumes(|config| {
        config.ema.enable_ema = true;
        config.mask.min_response_length = 2;
        config.unsupervised.unsup_coef = 0.5;
        config.prompt_length.max_prompt_length = Some(10);
        let texts = config.run.output_dir.with_file_name("texts.jsonl");
        write_rows(&texts, |prompt| json!({"text": format!("{prompt} {prompt} and then some")}));
        config.unsupervised.unsupervised_dataset_name = Some(texts);
    });
}

#[test]
fn a_run_whose_weights_are_in_bf16_resumes_to_the_same_bits_of_its_moving_average() {
    ppo_resumes(|config| {
        (config.optimizer.optim, config.run.bf16) = (Optim::AdamwBf16, true);
        config.ema.enable_ema = true;
    });
}

#[test]
fn a_run_of_groups_that_are_sampled_anew_with_a_reference_that_follows_resumes_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    resumes_from_everywhere(5, |with| {
        let mut config = ppo_config(dir.path());
        let (run, eval, data) = (config.run, config.eval, config.data);
        config =
            PpoConfig { run, eval, data, ..PpoConfig::with_preset(Preset::Grpo, init("llama_policy"), "", "", "") };
        config.reward_model_path = None;
        config.model_name_or_path = Some(golden().join("models/gpt_neox"));
        (config.response_length, config.stop_token, config.stop_token_id) = (6, None, Some(192));
        config.rewards.reward = vec!["short=length:target=3".into()];
        config.rewards.reward_normalize = vec!["short=mean_std".into()];
        (config.advantage.num_generations, config.num_ppo_epochs) = (2, 2);
        (config.per_device_train_batch_size, config.generation.steps_per_generation) = (Some(4), Some(2));
        (config.generation.max_steps, config.num_sample_generations) = (Some(20), 2);
        (config.kl.kl_coef, config.learning_rate) = (0.1, 1e-3);
        config.groups.dynamic_sampling = true;
        config.groups.max_num_gen_batches = 3;
        (config.sync.sync_ref_model, config.sync.ref_model_sync_steps) = (true, 3);
        with(&mut config.run);
        rlhf::train::ppo::ppo(&config, Console::Silent).unwrap();
    });
}

#[test]
fn distillation_resumes_to_the_same_bits_whoever_responds() {
    let dir = tempfile::tempdir().unwrap();
    let rows = dir.path().join("rows.jsonl");
    write_rows(&rows, |p| json!({"prompt": p, "completion": " yes and then some"}));
    let changes: [fn(&mut DistillConfig); 3] = [
        |config| (config.lmbda, config.log_completions) = (0.5, true),
        |config| {
            (config.peft.use_peft, config.peft.lora_dropout) = (true, 0.2);
            (config.run.fp16, config.run.loss_scale.initial_scale_power) = (true, 30);
        },
        |config| (config.lmbda, config.seq_kd, config.loss.beta) = (0.0, true, 0.5),
    ];
    for (at, change) in changes.into_iter().enumerate() {
        resumes_from_everywhere(4, |with| {
            let out = dir.path().join(format!("distill-{at}/whole"));
            let model = golden().join("models/gpt_neox");
            let mut config = DistillConfig::new(&model, &model, &rows, out);
            (config.max_steps, config.logging_steps, config.per_device_train_batch_size) = (Some(4), 3, Some(2));
            (config.gradient_accumulation_steps, config.learning_rate) = (2, 1e-3);
            (config.max_completion_length, config.temperature) = (5, 1.3);
            config.eval_dataset_name = Some(rows.clone());
            (config.eval.eval_steps, config.eval.metric_for_best_model) = (Some(3.into()), Some("eval_loss".into()));
            change(&mut config);
            with(&mut config.run);
            rlhf::train::distill::distill(&config, Console::Silent).unwrap();
        });
    }
}

#[test]
fn dpo_resumes_to_the_same_bits_with_each_reference_model() {
    let dir = tempfile::tempdir().unwrap();
    let pairs = dir.path().join("pairs.jsonl");
    write_rows(&pairs, |p| json!({"prompt": p, "chosen": " yes and then some", "rejected": " no, no"}));
    let changes: [fn(&mut DpoConfig); 3] = [
        |config| {
            (config.sync.sync_ref_model, config.sync.ref_model_sync_steps) = (true, 2);
            config.unsupervised.unsupervised_dataset_name =
                Some(config.data.dataset_name[0].with_file_name("texts.jsonl"));
        },
        |config| {
            (config.peft.use_peft, config.disable_dropout) = (true, false);
            (config.run.fp16, config.run.loss_scale.initial_scale_power) = (true, 30);
        },
        |config| (config.precompute_ref_log_probs, config.loss.loss_type) = (true, vec![DpoLoss::Aot, DpoLoss::Sft]),
    ];
    write_rows(&dir.path().join("texts.jsonl"), |p| json!({"text": format!("{p} and some more text")}));
    for (at, change) in changes.into_iter().enumerate() {
        resumes_from_everywhere(4, |with| {
            let out = dir.path().join(format!("dpo-{at}/whole"));
            let mut config = DpoConfig::new(golden().join("models/gpt_neox"), &pairs, out);
            (config.max_steps, config.logging_steps, config.per_device_train_batch_size) = (Some(4), 3, Some(2));
            (config.gradient_accumulation_steps, config.learning_rate) = (2, 1e-3);
            config.eval_dataset_name = Some(pairs.clone());
            (config.eval.eval_steps, config.eval.metric_for_best_model) = (Some(3.into()), Some("eval_loss".into()));
            change(&mut config);
            with(&mut config.run);
            rlhf::train::dpo::dpo(&config, Console::Silent).unwrap();
            // A reference model that follows is what a run resumes from, and no part of the best model.
            let best = config.run.output_dir.join("best");
            assert!(best.join("best.json").exists());
            assert!(!best.join("reference").exists());
        });
    }
}

#[test]
fn sft_and_a_reward_model_resume_to_the_same_bits_between_two_lines_of_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let (demos, pairs) = (dir.path().join("demos.jsonl"), dir.path().join("pairs.jsonl"));
    write_rows(&demos, |p| json!({"prompt": p, "completion": " and then some"}));
    write_rows(&pairs, |p| json!({"prompt": p, "chosen": " yes", "rejected": " no, no"}));
    let models = golden().join("models");
    resumes_from_everywhere(5, |with| {
        let mut config = SftConfig::new(models.join("gpt_neox"), &demos, dir.path().join("sft/whole"));
        (config.max_steps, config.logging_steps, config.per_device_train_batch_size) = (Some(5), 2, Some(4));
        config.peft.use_peft = true; // with dropout
        config.eval_dataset_name = Some(demos.clone());
        (config.eval.eval_steps, config.eval.metric_for_best_model) = (Some(3.into()), Some("eval_loss".into()));
        config.run.fp16 = true;
        config.run.loss_scale.initial_scale_power = 30;
        with(&mut config.run);
        rlhf::train::sft::sft(&config, Console::Silent).unwrap();
    });
    resumes_from_everywhere(5, |with| {
        let mut config = RewardConfig::new(models.join("gpt_neox_cls"), &pairs, dir.path().join("reward/whole"));
        (config.max_steps, config.logging_steps, config.per_device_train_batch_size) = (Some(5), 2, Some(4));
        config.eval_dataset_name = Some(pairs.clone());
        (config.eval.eval_steps, config.eval.metric_for_best_model) = (Some(3.into()), Some("eval_margin".into()));
        with(&mut config.run);
        rlhf::train::reward_model::reward(&config, Console::Silent).unwrap();
    });
}

/// Eight updates with a checkpoint after each.
fn steps(out: &str) -> String {
    let line = PPO.replace("--output_dir out", &format!("--output_dir {out}"));
    format!(
        "{line} --total_episodes 32 --num_sample_generations 2 --num_ppo_epochs 2 --save_steps 1 --save_total_limit 2"
    )
}

#[test]
fn an_adapter_on_a_folded_one_has_its_base_once_and_every_checkpoint_opens() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --use_peft --output_dir adapter"));
    let line = steps("out").replace("--sft_model_path policy", "--sft_model_path adapter") + " --use_peft";
    scratch.succeeds(&format!("{line} --total_episodes 12 --save_total_limit none --metric_for_best_model step"));
    for dir in ["out/checkpoint-1", "out/checkpoint-2", "out/best", "out"] {
        assert!(dir == "out" || !scratch.path(dir).join("base_model").exists(), "{dir}");
        let responses =
            scratch.succeeds(&format!("generate --model {dir} --dataset_name prompts.jsonl --max_new_tokens 4"));
        assert_eq!(json_lines(&responses).len(), crate::cli::PROMPTS.len());
    }
    let whole = scratch.path("out");
    let at_one = stopped(&whole, 1);
    let resumed = |dir: &Path| {
        format!(
            "{line} --total_episodes 12 --save_total_limit none --metric_for_best_model step --output_dir {} \
             --resume_from_checkpoint true",
            dir.display()
        )
    };
    scratch.succeeds(&resumed(&at_one));
    assert_same(&at_one, &whole, 3);
    // The base is of the adapter as it was, and so are the saved adapters.
    std::fs::remove_dir_all(&at_one).unwrap();
    let at_two = stopped(&whole, 2);
    let name = "adapter/adapter_model.safetensors";
    let mut tensors = tch::Tensor::read_safetensors(scratch.path(name)).unwrap();
    tensors.iter_mut().for_each(|(_, tensor)| drop(tensor.g_add_scalar_(0.25)));
    tch::Tensor::write_safetensors(&tensors, scratch.path(name)).unwrap();
    let line = format!("{} --resume_with_changed_inputs", resumed(&at_two));
    scratch.refuses(
        &line,
        1,
        &["base_model: the saved base of this run's adapters was made from sft_model_path, which has changed since"],
    );
}

// Kills.

/// Whether something in `dir` is being written.
fn writing(dir: &Path) -> Option<String> {
    let names = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.into_iter().find(|name| name.starts_with(".saving"))
}

/// How a run that is killed now and then comes to its end: each time it is started again with the same words.
fn killed_at_random(kills: usize) {
    let scratch = Scratch::new();
    let began = Instant::now();
    scratch.succeeds(&steps("whole"));
    let whole = began.elapsed();
    let mut draw = Stream::new(7, Purpose::Samples, 0, 0);
    let (mut killed, mut while_writing) = (0, 0);
    for round in 0.. {
        let out = format!("out-{round}");
        let dir = scratch.path(&out);
        loop {
            let mut child = scratch.command(&steps(&out));
            child.args(["--resume_from_checkpoint", "true"]).stdout(Stdio::null()).stderr(Stdio::piped());
            let mut child = child.spawn().unwrap();
            // At any moment, or some moments after the second, third or fourth folder appears that is being written.
            let moment = whole.mul_f64(draw.uniform());
            let mut folders = (draw.uniform() < 0.6).then_some(2 + (3.0 * draw.uniform()) as usize);
            let (began, mut last) = (Instant::now(), None);
            let ended = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break Some(status);
                }
                match &mut folders {
                    None if began.elapsed() > moment => break None,
                    None => std::thread::sleep(Duration::from_millis(1)),
                    Some(left) => {
                        let now = writing(&dir);
                        if now.is_some() && now != last {
                            *left -= 1;
                            last = now;
                            if *left == 0 {
                                std::thread::sleep(Duration::from_micros((20_000.0 * draw.uniform()) as u64));
                                break None;
                            }
                        }
                    }
                }
            };
            if let Some(status) = ended {
                let mut stderr = String::new();
                child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
                assert!(status.success(), "{out}: {stderr}");
                break;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            killed += 1;
            while_writing += usize::from(writing(&dir).is_some());
        }
        assert_same(&dir, &scratch.path("whole"), 8);
        assert_eq!(writing(&dir), None);
        if killed >= kills {
            say(&format!("{killed} kills, {while_writing} of them while something was written, {} runs", round + 1));
            assert!(while_writing > 0, "none of {killed} kills came while something was written");
            break;
        }
    }
}

#[test]
fn a_run_killed_at_random_moments_ends_in_the_same_bits() {
    killed_at_random(10);
}

#[test]
#[ignore = "a minute: `make test-part PART=kills`"]
fn a_run_killed_fifty_times_ends_in_the_same_bits() {
    killed_at_random(50);
}

// Signals.

pub(crate) fn signal(process: &impl Process, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &process.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Waits until a run has come so far; one that ends before fails the test.
pub(crate) fn wait_until(process: &mut impl Process, so_far: impl Fn() -> bool) {
    while !so_far() {
        assert!(!process.has_ended() || so_far(), "the run ended too early");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_signal_ends_a_run_after_its_update_with_its_own_code_and_the_run_resumes() {
    let scratch = Scratch::new();
    let line = steps("whole").replace("--total_episodes 32", "--total_episodes 160");
    // An alarm may be raised of the tiny critic.
    let line = line.replace("--save_steps 1 ", "") + " --save_steps 40";
    let succeeds = |line: &str| assert_eq!(scratch.run(line).code, 0, "{line}");
    succeeds(&line);
    for (name, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let line = line.replace("whole", name);
        // Under `nohup` SIGHUP is ignored, rightly so by the program; here it has to arrive.
        let run = scratch.command(&line);
        let mut child = Command::new("env");
        child.arg("--default-signal=HUP").arg(run.get_program()).args(run.get_args());
        child.current_dir(run.get_current_dir().unwrap());
        child.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines =
            || std::fs::read_to_string(scratch.path(name).join("metrics.jsonl")).map_or(0, |text| text.lines().count());
        wait_until(&mut child, || lines() >= 2);
        signal(&child, name);
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!(ran.code, code, "{}", ran.stderr);
        let done = lines();
        let error = ran.stderr.lines().last().unwrap();
        assert!(error.starts_with(&format!("stopped as requested after update {done} of 40; ")), "{}", ran.stderr);
        assert!(error.ends_with(&format!(" --config {name}/config.yaml --resume_from_checkpoint true")), "{error}");
        assert!(scratch.path(name).join("model.safetensors").is_file());
        succeeds(&format!("{line} --resume_from_checkpoint {name}/checkpoint-{done}"));
        assert_same(&scratch.path(name), &scratch.path("whole"), 40);
    }
}

#[test]
fn a_request_to_stop_that_arrives_twice_saves_the_run() {
    let scratch = Scratch::new();
    let line = format!("{PPO} --total_episodes 40000 --num_sample_generations 0");
    let mut child = scratch.command(&line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let metrics = scratch.path("out/metrics.jsonl");
    wait_until(&mut child, || std::fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 1));
    // As `timeout` sends it: to the program, and to its process group.
    let id = child.id();
    let twice = format!("kill -TERM {id}; sleep 0.005; kill -TERM {id}; sleep 0.005; kill -TERM {id} || true");
    assert!(Command::new("sh").args(["-c", &twice]).status().unwrap().success());
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!(ran.code, 143, "{}", ran.stderr);
    assert!(ran.stderr.lines().last().unwrap().starts_with("stopped as requested after update"), "{}", ran.stderr);
    assert_eq!(ran.stderr.matches("stopping after this update").count(), 1, "{}", ran.stderr);
    assert!(scratch.path("out/model.safetensors").exists());
}

#[test]
fn a_second_signal_ends_a_run_at_once() {
    let scratch = Scratch::new();
    // The first update does not end by itself.
    let mut run = scratch.command(&format!("{PPO} --num_sample_generations 0"));
    run.args(["--reward_command", "read row; touch called; exec sleep 60"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = run.spawn().unwrap();
    wait_until(&mut child, || scratch.path("called").exists());
    signal(&child, "INT");
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("send the signal again after a second to stop at once")));
    // Within a second it would be the same request.
    std::thread::sleep(Duration::from_millis(1100));
    signal(&child, "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(!scratch.path("out/model.safetensors").exists());
}

// What goes wrong.

#[test]
fn a_checkpoint_that_cannot_be_written_is_one_error_and_the_one_before_it_is_whole() {
    let scratch = Scratch::new();
    let line = steps("whole").replace("--save_total_limit 2", "--save_total_limit 9");
    scratch.succeeds(&line);
    let stopped = stopped(&scratch.path("whole"), 3);
    let line = line.replace("whole", "stopped-3") + " --resume_from_checkpoint true";
    let optimizer = stopped.join("checkpoint-3/optimizer.safetensors").metadata().unwrap().len();
    let ran = run_on_full_disk(&scratch, &line, optimizer * 3 / 4);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    for words in [
        "error: stopped-3/.saving-checkpoint-4/",
        "cannot write",
        "--config stopped-3/config.yaml --resume_from_checkpoint true",
    ] {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }
    scratch.succeeds(&line);
    assert_same(&stopped, &scratch.path("whole"), 8);
}

/// Runs where a file of more than `most` bytes is refused, as on a full disk.
pub(crate) fn run_on_full_disk(scratch: &Scratch, line: &str, most: u64) -> Ran {
    // Shells count in 512 or in 1024 bytes; the system reports which.
    let unit = "ulimit -S -f 1; unit=$(awk '/Max file size/ {print $4}' /proc/self/limits)";
    let script = format!("trap '' XFSZ; {unit}; ulimit -S -f $(({most} / unit)); exec \"$0\" \"$@\"");
    let run = scratch.command(line);
    let mut limited = Command::new("sh");
    limited.args(["-c", &script]).arg(run.get_program()).args(run.get_args()).current_dir(scratch.path("."));
    for (name, value) in run.get_envs() {
        limited.env(name, value.unwrap());
    }
    Ran::from(limited.stdin(Stdio::null()).output().unwrap())
}

#[test]
fn a_run_whose_first_checkpoint_could_not_be_written_restarts_with_the_same_command() {
    let scratch = Scratch::new();
    scratch.succeeds(&steps("whole"));
    let line = steps("full") + " --resume_from_checkpoint true";
    let optimizer = scratch.path("whole/checkpoint-8/optimizer.safetensors").metadata().unwrap().len();
    let ran = run_on_full_disk(&scratch, &line, optimizer * 3 / 4);
    assert_eq!((ran.code, ran.stderr.lines().count()), (1, 1), "{}", ran.stderr);
    let command = format!("{PROGRAM} ppo --config full/config.yaml --resume_from_checkpoint true");
    let words = format!("; the model as far as it came is in full; to begin again: {command}\n");
    assert!(ran.stderr.ends_with(&words), "{}", ran.stderr);
    assert!(scratch.path("full/model.safetensors").is_file() && !scratch.path("full/checkpoint-1").exists());
    scratch.refuses(&format!("{line} --seed 7"), 2, &["seed = 7: expected 42, as in full"]);
    let ran = scratch.run(&line);
    let words = "warning: full: the run ended after update 1 of 8 without a checkpoint: it starts again\n";
    assert_eq!((ran.code, ran.stderr.as_str()), (0, words));
    assert_same(&scratch.path("full"), &scratch.path("whole"), 8);
    // Now it is finished.
    for dir in ["checkpoint-7", "checkpoint-8"] {
        std::fs::remove_dir_all(scratch.path("full").join(dir)).unwrap();
    }
    scratch.refuses(&line, 1, &["full: output_dir: found a run in it that is finished, and no checkpoint"]);
}

#[test]
fn a_best_model_that_could_not_be_written_is_written_when_the_run_resumes() {
    let scratch = Scratch::new();
    let best = "--save_steps 1 --metric_for_best_model step --greater_is_better true";
    for (name, line) in [("ppo", PPO), ("sft", SFT), ("reward", REWARD)] {
        let whole = format!("{name}-whole");
        let line_to =
            |out: &str| format!("{} {best}", line.replace("--output_dir out", &format!("--output_dir {out}")));
        scratch.succeeds(&line_to(&whole));
        let dir = stopped(&scratch.path(&whole), 1);
        let name = &format!("{name}-out");
        let out = scratch.path(name);
        std::fs::rename(dir, &out).unwrap();
        let line = line_to(name) + " --resume_from_checkpoint true";
        // A file where the folder would be made.
        std::fs::write(out.join(".saving-best"), "").unwrap();
        let ran = scratch.run(&line);
        assert!(ran.code == 1 && ran.stderr.contains(".saving-best"), "{name}: {}", ran.stderr);
        assert!(out.join("checkpoint-2").is_dir());
        std::fs::remove_file(out.join(".saving-best")).unwrap();
        let ran = scratch.run(&line);
        assert_eq!(ran.code, 0, "{name}: {}", ran.stderr);
        let told: Value = serde_json::from_str(&scratch.read(&format!("{name}/best/best.json"))).unwrap();
        assert_eq!(told["update"], 2, "{name}");
        let model = |dir: &str| std::fs::read(out.join(dir).join("model.safetensors")).unwrap();
        assert!(model("best") == model("checkpoint-2"), "{name}");
    }
}

#[test]
fn other_inputs_under_the_same_names_are_refused_without_the_flag() {
    let scratch = Scratch::new();
    scratch.copy("value", "gpt_neox_cls");
    let ppo = steps("ppo") + " --value_model_path value";
    let with_saves = |line: &str, out: &str| {
        format!("{} --save_steps 1", line.replace("--output_dir out", &format!("--output_dir {out}")))
    };
    let lines = [("ppo", ppo, 8), ("sft", with_saves(SFT, "sft"), 2), ("reward", with_saves(REWARD, "reward-out"), 2)];
    for (_, line, _) in &lines {
        scratch.succeeds(line);
    }
    let kept: Vec<_> = ["prompts.jsonl", "demos.jsonl", "pairs.jsonl"].map(|name| (name, scratch.read(name))).into();
    let edit = |dir: &str| {
        scratch.edit_tensors(dir, |tensors| {
            let _ = tensors.values_mut().next().unwrap().view([-1]).get(0).fill_(0.25);
        });
    };
    let words = |rows: &str| format!("dataset_name = {rows}: 8 rows as before, with different content");
    for (rows, text) in &kept {
        scratch.write(rows, &text.replace("human", "humus"));
    }
    let refused = |changed: [&[&str]; 3]| {
        for ((name, line, last), changed) in lines.iter().zip(changed) {
            let line = format!("{line} --resume_from_checkpoint true");
            if changed.is_empty() {
                assert_eq!(scratch.run(&line).code, 0, "{name}");
                continue;
            }
            let out = if *name == "reward" { "reward-out" } else { name };
            let place = format!("error: {out}/checkpoint-{last}: inputs have changed since: ");
            let hint = "--resume_with_changed_inputs resumes with what is there now";
            scratch.refuses(&line, 1, &[&[place.as_str(), hint], changed].concat());
        }
    };
    refused([&[&words("prompts.jsonl")], &[&words("demos.jsonl")], &[&words("pairs.jsonl")]]);
    for (rows, text) in &kept {
        scratch.write(rows, text);
    }
    edit("value");
    refused([&["value_model_path = value: model.safetensors has changed"], &[], &[]]);
    edit("policy");
    edit("reward");
    scratch.edit_config("reward", "note", 1);
    let ppo = ["sft_model_path = policy: model.safetensors", "reward model = reward: config.json has changed, model."];
    let model = ["model_name_or_path = policy: model.safetensors has changed"];
    refused([&ppo, &model, &["model_name_or_path = reward: config.json has changed, model.safetensors has"]]);
    // With the flag, also with more rows; a warning names the inputs of the numbers.
    let (_, line, _) = &lines[1];
    scratch.write("demos.jsonl", &(kept[1].1.clone() + "{\"prompt\": \"so\", \"completion\": \" on\"}\n"));
    let ran = scratch.run(&format!("{line} --resume_from_checkpoint true --resume_with_changed_inputs --max_steps 3"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for words in ["dataset_name = demos.jsonl: expected 8 rows, found 9; model_name_or_path = ", "is extended to 3"] {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }
    assert_eq!(scratch.metrics("sft").len(), 3);
    scratch.refuses(&format!("{line} --resume_with_changed_inputs"), 2, &["without resume_from_checkpoint"]);
}

/// An input of a run: a file of it with a text and another one in its place, what an error then begins with, and the path by which the
/// command line names it, if it does, after the text before that.
type InputOfRun = (&'static str, [&'static str; 2], &'static str, Option<(&'static str, &'static str)>);

/// Changes each of the inputs of a finished run, which then does not resume, and moves each that the command line `words` names, after
/// which it does; `companions` are files that move with others.
fn changes_and_moves(scratch: &Scratch, words: &[&str], inputs: &[InputOfRun], companions: &[[&str; 2]]) {
    let run = |words: &[String]| scratch.run_with("", &words.iter().map(String::as_str).collect::<Vec<_>>());
    let words: Vec<String> = words.iter().map(|word| String::from(*word)).collect();
    let ran = run(&words);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let resumed = [words, ["--resume_from_checkpoint", "true"].map(String::from).to_vec()].concat();
    for (file, [then, now], said, _) in inputs {
        let text = scratch.read(file);
        assert!(text.contains(then), "{file}");
        scratch.write(file, &text.replace(then, now));
        let ran = run(&resumed);
        let found = ran.stderr.contains("inputs have changed since: ") && ran.stderr.contains(said);
        assert!(ran.code == 1 && found, "{file}: {}: {}", ran.code, ran.stderr);
        scratch.write(file, &text);
    }
    for (file, .., place) in inputs {
        let Some((before, path)) = place else { continue };
        let moved: Vec<&str> = std::iter::once(*path)
            .chain(companions.iter().filter(|[owner, _]| owner == path).map(|[_, file]| *file))
            .collect();
        let rename = |from: &str, to: &str| {
            moved.iter().for_each(|name| {
                std::fs::rename(scratch.path(&format!("{from}{name}")), scratch.path(&format!("{to}{name}"))).unwrap();
            });
        };
        rename("", "moved/");
        let (old, new) = (format!("{before}{path}"), format!("{before}moved/{path}"));
        let there: Vec<String> =
            resumed.iter().map(|word| if *word == old { new.clone() } else { word.clone() }).collect();
        assert_ne!(there, resumed, "{file}");
        let ran = run(&there);
        assert_eq!(ran.code, 0, "{file}: {}", ran.stderr);
        rename("moved/", "");
    }
    let ran = run(&resumed);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    std::fs::rename(scratch.path("out"), scratch.path("moved/out")).unwrap();
    let there: Vec<String> =
        resumed.iter().map(|word| if word == "out" { "moved/out".into() } else { word.clone() }).collect();
    let ran = run(&there);
    assert!(ran.code == 0 && ran.stderr.contains("all 2 updates are done"), "{}", ran.stderr);
}

#[test]
fn each_input_of_a_ppo_run_that_changes_is_refused_and_one_that_moves_resumes() {
    let scratch = Scratch::new();
    let note = ["{", "{ "];
    for (name, model) in [("value", "gpt_neox_cls"), ("second", "gpt_neox_cls"), ("tok", "gpt_neox")] {
        scratch.copy(name, model);
    }
    std::fs::create_dir(scratch.path("moved")).unwrap();
    for (name, text) in [
        ("texts.jsonl", format!("{}\n", json!({"text": "the movie was long and more"})).repeat(40)),
        ("good.txt", "good 1\nbad -1\n".into()),
        ("tools.py", "def number():\n    return 0.5\n".into()),
        (
            "judge.py",
            "import sys\nfor line in sys.stdin:\n    import tools\n    print(tools.number(), flush=True)\n".into(),
        ),
        ("kit.py", "ONE = 1.0\n".into()),
        (
            "mine.py",
            "def score(completions, **columns):\n    from kit import ONE\n    return [ONE for _ in completions]\n"
                .into(),
        ),
    ] {
        scratch.write(name, &text);
    }
    let words = "ppo --sft_model_path policy --reward_model_path reward --value_model_path value --model_name_or_path tok --dataset_name \
                 prompts.jsonl --unsupervised_dataset_name texts.jsonl --reward words:good.txt --reward mood=model:second --reward \
                 python:mine.score --output_dir out --response_length 8 --per_device_train_batch_size 4 --total_episodes 8 \
                 --num_sample_generations 0 --save_steps 1 --no_report --reward";
    let words = [words.split_whitespace().collect(), vec!["prog=command:python3 judge.py"]].concat();
    let inputs = [
        ("prompts.jsonl", ["human", "humus"], "dataset_name = ", Some(("", "prompts.jsonl"))),
        ("texts.jsonl", ["movie", "films"], "unsupervised_dataset_name = ", Some(("", "texts.jsonl"))),
        ("policy/config.json", note, "sft_model_path = ", Some(("", "policy"))),
        ("reward/config.json", note, "reward model = ", Some(("", "reward"))),
        ("value/config.json", note, "value_model_path = ", Some(("", "value"))),
        ("tok/config.json", note, "model_name_or_path = ", Some(("", "tok"))),
        ("good.txt", ["good 1", "good 2"], "reward words = ", Some(("words:", "good.txt"))),
        ("second/config.json", note, "reward mood = ", Some(("mood=model:", "second"))),
        (
            "judge.py",
            ["import sys", "import sys  # now"],
            "reward prog = ",
            Some(("prog=command:python3 ", "judge.py")),
        ),
        ("tools.py", ["0.5", "0.25"], "tools.py has changed", None),
        ("mine.py", ["completions]", "completions]  # now"], "reward score = ", None),
        ("kit.py", ["1.0", "2.0"], "kit.py has changed", None),
    ];
    changes_and_moves(&scratch, &words, &inputs, &[["judge.py", "tools.py"]]);
}

#[test]
fn each_input_of_sft_and_of_a_reward_model_that_changes_is_refused_and_one_that_moves_resumes() {
    let scratch = Scratch::new();
    let note = ["{", "{ "];
    scratch.copy("tok", "gpt_neox");
    std::fs::create_dir(scratch.path("moved")).unwrap();
    scratch.write("template.jinja", "{% for m in messages %}{{ m.content }} {% endfor %}");
    std::fs::create_dir(scratch.path("tok/additional_chat_templates")).unwrap();
    scratch.write("tok/additional_chat_templates/rag.jinja", "unused");
    let row = |prompt: &str| {
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        format!("{}\n", json!({"messages": [message("user", prompt), message("assistant", "and then some")]}))
    };
    scratch.write("demos.jsonl", &PROMPTS.map(row).concat());
    scratch.write("held.jsonl", &[row("held out"), row("the movie")].concat());
    let sft = "sft --model_name_or_path policy --tokenizer_name tok --chat_template_path template.jinja --dataset_name demos.jsonl \
               --eval_dataset_name held.jsonl --eval_steps 1 --output_dir out --per_device_train_batch_size 4 --max_steps 2 --save_steps 1 \
               --no_report";
    let inputs = [
        ("demos.jsonl", ["human", "humus"], "dataset_name = ", Some(("", "demos.jsonl"))),
        ("held.jsonl", ["movie", "films"], "rows held out = ", Some(("", "held.jsonl"))),
        ("policy/config.json", note, "model_name_or_path = ", Some(("", "policy"))),
        ("tok/config.json", note, "tokenizer_name = ", Some(("", "tok"))),
        ("tok/additional_chat_templates/rag.jinja", ["unused", "other"], "rag.jinja has changed", None),
        ("template.jinja", ["m.content", "m['content']"], "chat_template_path = ", Some(("", "template.jinja"))),
    ];
    changes_and_moves(&scratch, &sft.split_whitespace().collect::<Vec<_>>(), &inputs, &[]);
    std::fs::remove_dir_all(scratch.path("moved/out")).unwrap();
    let reward = format!("{REWARD} --save_steps 1 --no_report");
    // The name of the folder is that of the command too.
    std::fs::rename(scratch.path("reward"), scratch.path("start")).unwrap();
    let reward = reward.replace("path reward", "path start");
    let inputs = [
        ("pairs.jsonl", ["human", "humus"], "dataset_name = ", Some(("", "pairs.jsonl"))),
        ("start/config.json", note, "model_name_or_path = ", Some(("", "start"))),
    ];
    changes_and_moves(&scratch, &reward.split_whitespace().collect::<Vec<_>>(), &inputs, &[]);
}

#[test]
fn a_run_that_is_resumed_at_another_time_has_the_date_of_its_start_in_its_prompts() {
    let scratch = Scratch::new();
    scratch.write(
        "policy/chat_template.jinja",
        "{{ strftime_now('%M:%S.%f') }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    );
    let message = |role: &str, text: &str| json!({"role": role, "content": text});
    let prompts = PROMPTS.map(|prompt| format!("{}\n", json!({"prompt": [message("user", prompt)]})));
    scratch.write("prompts.jsonl", &prompts.concat());
    let demos =
        PROMPTS.map(|p| format!("{}\n", json!({"messages": [message("user", p), message("assistant", "yes")]})));
    scratch.write("demos.jsonl", &demos.concat());
    let ppo = format!("{PPO} --save_steps 1 --log_rollouts --num_sample_generations 0");
    for (line, out) in [(ppo, "out"), (SFT.replace("--output_dir out", "--output_dir sft --save_steps 1"), "sft")] {
        scratch.succeeds(&line);
        let date = || {
            let file = scratch.read(&format!("{out}/checkpoint-2/trainer_state.json"));
            let state: Value = serde_json::from_str(&file).unwrap();
            state["state"]["inputs"]["date of chat templates"].clone()
        };
        let begun = date();
        assert!(begun["date"].is_string(), "{begun}");
        std::fs::remove_dir_all(scratch.path(&format!("{out}/checkpoint-2"))).unwrap();
        std::fs::remove_file(scratch.path(&format!("{out}/model.safetensors"))).unwrap();
        scratch.succeeds(&format!("{line} --resume_from_checkpoint true"));
        assert_eq!(date(), begun);
    }
}

#[test]
fn a_resume_in_an_environment_with_other_results_says_so_and_one_with_another_precision_is_refused() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --save_steps 1"));
    let line = format!("{SFT} --save_steps 1 --resume_from_checkpoint true");
    let run = |line: &str, name: &str, value: &str| Ran::from(output(scratch.command(line).env(name, value)));
    let ran = run(&line, "MKL_CBWR", "COMPATIBLE");
    let warning = "warning: environment: MKL_CBWR is COMPATIBLE, it was not set in out/checkpoint-2, so that results may differ by rounding\n";
    assert!(ran.code == 0 && ran.stderr.contains(warning), "{}", ran.stderr);
    let ran = run(&line, "ONEDNN_DEFAULT_FPMATH_MODE", "BF16");
    let words = "inputs have changed since: environment: ONEDNN_DEFAULT_FPMATH_MODE is BF16, it was not set; ";
    assert!(ran.code == 1 && ran.stderr.contains(words), "{}", ran.stderr);
    let ran = run(&format!("{line} --resume_with_changed_inputs"), "ONEDNN_DEFAULT_FPMATH_MODE", "BF16");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn with_changed_inputs_a_run_resumes_whose_last_responses_and_texts_are_of_other_rows() {
    let scratch = Scratch::new();
    let texts = |count: usize| format!("{}\n", json!({"text": "the movie was long and more"})).repeat(count);
    scratch.write("texts.jsonl", &texts(40));
    let line = format!(
        "{PPO} --min_response_length 2 --unsupervised_dataset_name texts.jsonl --num_sample_generations 0 --save_steps 1"
    );
    scratch.succeeds(&line);
    let prompts = scratch.read("prompts.jsonl");
    scratch.write("prompts.jsonl", &prompts.lines().take(4).map(|line| format!("{line}\n")).collect::<String>());
    scratch.write("texts.jsonl", &texts(30));
    let line = format!("{line} --total_episodes 12 --resume_from_checkpoint true");
    scratch.refuses(&line.replace("--total_episodes 8", ""), 1, &["dataset_name = prompts.jsonl: expected 8 rows"]);
    let ran = scratch.run(&format!("{} --resume_with_changed_inputs", line.replace("--total_episodes 8", "")));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(scratch.metrics("out").iter().filter(|row| row["step"].as_f64() > Some(0.0)).count(), 3);
}

#[test]
fn a_run_resumes_from_another_working_folder_with_the_same_files_and_not_with_others() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --save_steps 1"));
    let elsewhere = scratch.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    for dir in ["policy", "out"] {
        copy_dir(&scratch.path(dir), &elsewhere.join(dir));
    }
    let run = |line: &str| Ran::from(output(scratch.command(line).current_dir(&elsewhere)));
    let line = format!("{SFT} --save_steps 1 --resume_from_checkpoint true");
    let there = line.replace("demos.jsonl", &scratch.path("demos.jsonl").display().to_string());
    let ran = run(&there.replace("--output_dir out", "--output_dir ../out").replace("path policy", "path ../policy"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    std::fs::write(elsewhere.join("demos.jsonl"), scratch.read("demos.jsonl").replace("human", "humus")).unwrap();
    let ran = run(&line);
    assert!(ran.code == 1 && ran.stderr.contains("8 rows as before, with different content"), "{}", ran.stderr);
}

#[test]
fn a_finished_run_that_is_extended_logs_it_and_equals_the_longer_run() {
    let scratch = Scratch::new();
    let ppo = |out: &str, episodes: usize| {
        format!("{} --total_episodes {episodes} --lr_scheduler_type constant --num_sample_generations 0", steps(out))
    };
    let line = SFT.replace("--max_steps 2", "--save_steps 1 --lr_scheduler_type constant");
    let sft = |out: &str, epochs: usize| {
        format!("{} --num_train_epochs {epochs}", line.replace("--output_dir out", &format!("--output_dir {out}")))
    };
    type Line<'a> = &'a dyn Fn(&str, usize) -> String;
    let cases: [(&str, Line<'_>, [usize; 3]); 2] = [("ppo", &ppo, [12, 20, 5]), ("sft", &sft, [1, 2, 4])];
    for (name, line, [short, long, updates]) in cases {
        let (out, whole) = (format!("{name}-out"), format!("{name}-whole"));
        scratch.succeeds(&line(&whole, long));
        scratch.succeeds(&line(&out, short));
        let ran = scratch.run(&format!("{} --resume_from_checkpoint true", line(&out, long)));
        let words = format!("and is extended to {updates}; learning rates");
        assert!(ran.code == 0 && ran.stderr.contains(&words), "{name}: {}", ran.stderr);
        assert_same(&scratch.path(&out), &scratch.path(&whole), updates);
        let settings = |out: &str| scratch.read(&format!("{out}/config.yaml")).replace(out, "");
        assert_eq!(settings(&out), settings(&whole));
        // It is not made shorter.
        let words = format!("expected a run of at least the {updates} updates that are done");
        scratch.refuses(&format!("{} --resume_from_checkpoint true", line(&out, short)), 1, &[&words]);
    }
    let branch =
        ppo("branch", 24).replace("--num_sample", "--resume_from_checkpoint ppo-whole/checkpoint-4 --num_sample");
    scratch.refuses(&branch, 2, &["total_episodes = 24: expected 20", "only a finished run can be extended"]);
}

#[test]
fn of_two_runs_that_are_started_at_once_on_one_folder_one_is_refused() {
    let scratch = Scratch::new();
    for round in 0..6 {
        let line = |seed: usize| SFT.replace("--output_dir out", &format!("--output_dir out-{round} --seed {seed}"));
        let spawn = |seed| scratch.command(&line(seed)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let children = [spawn(1), spawn(2)];
        let ran = children.map(|child| Ran::from(child.wait_with_output().unwrap()));
        let codes = ran.each_ref().map(|ran| ran.code);
        assert!(codes == [0, 1] || codes == [1, 0], "{} {}", ran[0].stderr, ran[1].stderr);
        let refused = &ran[usize::from(codes[1] == 1)].stderr;
        let reasons = ["another run is at work", "another run has begun", "found a run in it"];
        assert!(reasons.iter().any(|reason| refused.contains(reason)), "{refused}");
        let seed = format!("seed: {}\n", if codes[0] == 0 { 1 } else { 2 });
        assert!(scratch.read(&format!("out-{round}/config.yaml")).contains(&seed));
        assert_eq!(scratch.metrics(&format!("out-{round}")).len(), 2);
    }
}

#[test]
fn a_folder_that_cannot_be_written_to_is_one_error() {
    let scratch = Scratch::new();
    // No user may make a folder there, not even root.
    scratch.refuses(&steps("/proc/rlhf"), 1, &["/proc/rlhf: cannot create the folder"]);
}

#[test]
fn a_run_that_fails_in_the_midst_of_an_update_leaves_a_checkpoint_of_the_last_whole_one() {
    let scratch = Scratch::new();
    scratch.copy("value", "gpt_neox_cls");
    let weights = scratch.path("reward/model.safetensors");
    let sound = std::fs::read(&weights).unwrap();
    // A reward model that knows no score for one of the prompts.
    let ids = rlhf::tokenizer::Tokenizer::from_pretrained(&scratch.path("policy")).unwrap().encode(PROMPTS[2]).unwrap();
    scratch.edit_tensors("reward", |tensors| {
        let embedding = tensors.get_mut("gpt_neox.embed_in.weight").unwrap();
        let _ = embedding.get(*ids.last().unwrap()).fill_(f64::NAN);
    });
    let line = |out: &str, seed: u32| {
        // The sample tables would ask for its score, too.
        let line =
            steps(out).replace("--save_steps 1 --save_total_limit 2", "--save_steps 8 --num_sample_generations 0");
        format!("{line} --value_model_path value --seed {seed}")
    };
    // With one of these seeds that prompt comes in the second half of the first pass.
    let failed = |seed: &u32| {
        let ran = scratch.run(&line(&format!("failed-{seed}"), *seed));
        assert!(ran.code == 1 && ran.stderr.contains("expected a finite score, found NaN"), "{}", ran.stderr);
        scratch.path(&format!("failed-{seed}/checkpoint-1")).is_dir().then_some(ran)
    };
    let (seed, ran) = (1..20).find_map(|seed| Some((seed, failed(&seed)?))).unwrap();
    let (failed, whole) = (format!("failed-{seed}"), format!("whole-{seed}"));
    let line_to_resume = format!(" ppo --config {failed}/config.yaml --resume_from_checkpoint true\n");
    assert!(ran.stderr.ends_with(&line_to_resume), "{}", ran.stderr);
    std::fs::write(&weights, sound).unwrap();
    scratch.succeeds(&line(&whole, seed));
    let line = format!("{} --resume_from_checkpoint {failed}/checkpoint-1", line(&failed, seed));
    // The reward model is mended, and so another.
    scratch.refuses(&line, 1, &["reward model = reward: model.safetensors has changed"]);
    let ran = scratch.run(&format!("{line} --resume_with_changed_inputs"));
    assert!(ran.code == 0 && ran.stderr.contains("warning: failed"), "{}", ran.stderr);
    assert_same(&scratch.path(&failed), &scratch.path(&whole), 8);
}

#[test]
fn a_reward_that_fails_in_an_evaluation_or_a_sample_table_costs_no_update() {
    let scratch = Scratch::new();
    let line = |out: &str| {
        PPO.replace("--reward_model_path reward", "--eval_split_size 1 --reward_retries 0")
            .replace("--total_episodes 8", "--total_episodes 24")
            .replace("--output_dir out", &format!("--output_dir {out}"))
    };
    let run = |line: &str, row: usize| {
        let script =
            format!("set -f; while read -r l; do n=$((n + 1)); [ $n -ne {row} ] || exit 3; set -- $l; echo $#; done");
        scratch.write("score.sh", &script);
        scratch.run_with(line, &["--reward_command", "sh score.sh"])
    };
    assert_eq!(run(&line("whole"), 0).code, 0);
    for (out, flags, update, row, words) in [
        // An evaluation of one row before the first update and after two of four; a table of one row before the first update
        // and after the third.
        (
            "eval",
            "--num_sample_generations 0 --eval_steps 2",
            2,
            10,
            "the evaluation after update 2, which is missing now",
        ),
        ("table", "--num_sample_generations 2", 3, 14, "reward `command`"),
    ] {
        let line = format!("{} {flags}", line(out));
        let ran = run(&line, row);
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        assert!(scratch.path(&format!("{out}/checkpoint-{update}")).is_dir());
        for words in [words, &format!("--config {out}/config.yaml --resume_from_checkpoint true")] {
            assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
        }
        let before = usize::from(out == "eval");
        assert_eq!(scratch.metrics(out).len(), before + update, "the line of the last update is there");
        // The program is mended, and so another.
        let ran = run(&format!("{line} --resume_from_checkpoint true --resume_with_changed_inputs"), 0);
        assert!(ran.code == 0 && ran.stderr.contains("score.sh has changed"), "{}", ran.stderr);
        assert_eq!(scratch.metrics(out).len(), before + 6);
        let model = |out: &str| std::fs::read(scratch.path(out).join("model.safetensors")).unwrap();
        assert!(model(out) == model("whole"), "{out}: another model");
    }
}

#[test]
fn a_run_that_ends_before_its_first_update_saves_nothing_and_restarts_also_with_other_settings() {
    let scratch = Scratch::new();
    scratch.write("score.sh", "while read -r l; do [ -e up ] || exit 3; echo 1; done");
    let line =
        steps("out").replace("--reward_model_path reward ", "") + " --reward_retries 0 --resume_from_checkpoint true";
    let program = ["--reward_command", "sh score.sh"];
    for _ in 0..2 {
        let ran = scratch.run_with(&line, &program);
        assert_eq!(ran.code, 1);
        assert!(ran.stderr.contains("no update is done, so there is no model; to begin again: "), "{}", ran.stderr);
        assert!(!scratch.path("out/model.safetensors").exists());
    }
    scratch.write("up", "");
    let ran = scratch.run_with(&format!("{line} --seed 7"), &program);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, "warning: out: the run has no checkpoint: it starts again\n"));
    assert_eq!(scratch.metrics("out").len(), 8);
    assert!(scratch.read("out/config.yaml").contains("seed: 7\n"));
}

#[test]
fn a_run_in_a_folder_whose_name_is_not_utf_8_leaves_checkpoints_and_resumes() {
    let scratch = Scratch::new();
    let dir = scratch.path(".").join(OsStr::from_bytes(b"caf\xe9"));
    std::fs::create_dir(&dir).unwrap();
    for name in ["policy", "reward", "prompts.jsonl"] {
        std::os::unix::fs::symlink(scratch.path(name), dir.join(name)).unwrap();
    }
    let line = steps("out");
    for line in [line.clone(), format!("{line} --resume_from_checkpoint true")] {
        let ran = Ran::from(output(scratch.command(&line).current_dir(&dir)));
        assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
        assert!(dir.join("out/checkpoint-8").is_dir(), "{line}");
        std::fs::remove_dir_all(dir.join("out/checkpoint-8")).unwrap();
    }
}

#[test]
fn a_resume_that_would_change_the_result_is_refused_and_changes_nothing() {
    let scratch = Scratch::new();
    let line = steps("out");
    scratch.succeeds(&line);
    let resumed = format!("{line} --resume_from_checkpoint out/checkpoint-8");
    for (flags, code, words) in [
        ("--learning_rate 1e-5", 2, &["learning_rate = 0.00001: expected 3e-6, as in out/checkpoint-8"][..]),
        (
            "--total_episodes 28",
            1,
            &["out/checkpoint-8: expected a run of at least the 8 updates that are done, found 7"],
        ),
        ("--seed 7 --kl_coef 0.1", 2, &["kl_coef = 0.1: expected 0.05", "so does seed"]),
        (
            "--resume_from_checkpoint out/checkpoint-3",
            1,
            &["out/checkpoint-3: expected a checkpoint", "no such folder"],
        ),
        ("--resume_from_checkpoint policy", 1, &["policy: expected a checkpoint", "no trainer_state.json"]),
        ("--resume_from_checkpoint out/checkpoint-7", 2, &["out/checkpoint-8 is newer"]),
        ("--metric_for_best_model eval/score", 2, &["metric_for_best_model = eval/score needs eval_steps"]),
        ("--eval_steps 2", 2, &["eval_steps = 2", "held out", "no split `test`", "prompts.jsonl"]),
    ] {
        scratch.refuses(&format!("{resumed} {flags}"), code, words);
    }
    let sft = format!("{SFT} --resume_from_checkpoint out/checkpoint-8");
    scratch.refuses(&sft, 1, &["expected a checkpoint of `rlhf sft`, found one of `rlhf ppo`"]);
    // The same data in another place is the same run; other data is not.
    scratch.write("prompts.jsonl", "{\"prompt\": \"do\"}\n");
    scratch.refuses(&resumed, 1, &["out/checkpoint-8", "prompts.jsonl: expected 8 rows, found 1"]);
}

#[test]
fn a_finished_run_logs_it_and_one_without_a_checkpoint_starts() {
    let scratch = Scratch::new();
    let line = format!("{} --no_checks --max_skipped_updates 7 --resume_from_checkpoint", steps("out"));
    // New, or killed before its first checkpoint.
    std::fs::create_dir(scratch.path("out")).unwrap();
    scratch.write("out/config.yaml", "");
    scratch.write("out/metrics.jsonl", "{\"step\": 1}\n{\"st");
    scratch.succeeds(&line);
    let (metrics, model) = (scratch.read("out/metrics.jsonl"), files(&scratch.path("out")));
    assert_eq!(json_lines(&metrics).len(), 8);
    // What watches a run may change.
    let line = format!("{} --resume_from_checkpoint", steps("out"));
    let ran = scratch.run(&line);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, ""), "{}", ran.stderr);
    assert_eq!(ran.stderr, "warning: out/checkpoint-8: the run is finished, all 8 updates are done\n");
    assert!(files(&scratch.path("out")) == model, "it changes nothing");
    // A run that left its model, and no checkpoint, is not begun again by itself.
    let line = PPO.replace("--output_dir out", "--output_dir plain");
    scratch.succeeds(&line);
    scratch.refuses(&format!("{line} --resume_from_checkpoint true"), 1, &["plain: output_dir", "found a run in it"]);
}

#[test]
fn a_checkpoint_starts_a_branch_in_another_folder() {
    let scratch = Scratch::new();
    let line = format!("{} --metric_for_best_model step --greater_is_better false", steps("out"));
    scratch.succeeds(&format!("{line} --save_total_limit none"));
    let branch = line.replace("--output_dir out", "--output_dir branch");
    scratch.succeeds(&format!("{branch} --resume_from_checkpoint out/checkpoint-3"));
    let tail = &timeless(scratch.metrics("out"))[3..];
    assert_eq!(timeless(scratch.metrics("branch")), tail);
    for file in ["model.safetensors", "value_model/model.safetensors", "checkpoint-8/optimizer.safetensors"] {
        let read = |run: &str| std::fs::read(scratch.path(run).join(file)).unwrap();
        assert!(read("branch") == read("out"), "{file} differs");
    }
    assert!(scratch.path("out/checkpoint-8").is_dir());
    // The best model of the other folder is not here, and is not counted on.
    let best = |run: &str| -> Value { serde_json::from_str(&scratch.read(&format!("{run}/best/best.json"))).unwrap() };
    assert_eq!((&best("out")["update"], &best("branch")["update"]), (&json!(1), &json!(4)));
}

// Evaluation and the best model.

#[test]
fn an_evaluation_changes_no_training_and_its_samples_match_its_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, change: &dyn Fn(&mut PpoConfig)| -> Vec<Map<String, Value>> {
        let mut config = ppo_config(dir.path());
        config.run.output_dir = dir.path().join(name);
        change(&mut config);
        rlhf::train::ppo::ppo(&config, Console::Silent).unwrap();
        timeless(json_lines(&std::fs::read_to_string(config.run.output_dir.join("metrics.jsonl")).unwrap()))
    };
    let with = run("with", &|config| config.num_eval_prompts = 3);
    let without = run("without", &|config| (config.eval.eval_steps, config.eval.metric_for_best_model) = (None, None));
    let training = |lines: &[Map<String, Value>]| -> Vec<Map<String, Value>> {
        let ours = |line: &Map<String, Value>| {
            line.clone().into_iter().filter(|(name, _)| !name.starts_with("eval/")).collect()
        };
        lines.iter().map(ours).collect()
    };
    assert_eq!(training(&with[1..]), without);
    let steps: Vec<u64> =
        with.iter().filter(|m| m.contains_key("eval/score")).map(|m| m["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 2, 4, 5]);
    let samples = |step: &u64| {
        let path = dir.path().join(format!("with/samples/eval-{step:06}.jsonl"));
        json_lines(&std::fs::read_to_string(path).unwrap())
    };
    let samples: Vec<_> = steps.iter().flat_map(samples).collect();
    assert_eq!(samples.len(), 12);
    for (metrics, samples) in [0, 2, 4, 5].into_iter().zip(samples.chunks(3)) {
        let mean = samples.iter().map(|sample| sample["score"].as_f64().unwrap()).sum::<f64>() / 3.0;
        assert!((mean - with[metrics]["eval/score"].as_f64().unwrap()).abs() < 1e-5);
    }
    // A policy that does not move is its reference, and gives the same responses each time; moments that move on with
    // training would give them other scores.
    let still = run("still", &|config| config.learning_rate = 0.0);
    let values = |name: &str| [0, 2, 4, 5].map(|line| still[line][name].as_f64().unwrap());
    assert!(values("eval/kl").iter().all(|kl| kl.abs() < 1e-5), "{:?}", values("eval/kl"));
    for name in ["eval/score", "eval/scores/short", "eval/scores/model"] {
        assert!(values(name).iter().all(|&score| score == values(name)[0]), "{name}: {:?}", values(name));
    }
}

#[test]
fn sft_and_a_reward_model_evaluate_on_the_way_and_keep_the_best_model() {
    let scratch = Scratch::new();
    let reward = SFT.replace("sft ", "reward ").replace("demos", "pairs").replace("policy", "reward");
    for (line, metric, greater) in [(SFT, "eval_loss", false), (&reward, "eval_margin", true)] {
        let out = metric;
        let data = line.split_whitespace().skip_while(|word| *word != "--dataset_name").nth(1).unwrap();
        let run = |flags: &str, out: &str| {
            format!(
                "{line} --max_steps 5 --logging_steps 4 --learning_rate 1e-3 --save_steps 1 {flags} --output_dir {out}"
            )
        };
        let flags = format!("--eval_dataset_name {data} --eval_steps 2 --metric_for_best_model {metric}");
        scratch.succeeds(&run(&flags, out));
        let lines = scratch.metrics(out);
        let found: Vec<(u64, f64)> =
            lines.iter().map(|line| (line["step"].as_u64().unwrap(), line[metric].as_f64().unwrap())).collect();
        assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 2, 4, 5]);
        // The model that the run started from is not one of its own.
        let better = |a: &&(u64, f64), b: &&(u64, f64)| if greater { a.1.total_cmp(&b.1) } else { b.1.total_cmp(&a.1) };
        let (update, value) = *found[1..].iter().max_by(better).unwrap();
        let told: Value = serde_json::from_str(&scratch.read(&format!("{out}/best/best.json"))).unwrap();
        assert_eq!(told, json!({"metric": metric, "greater_is_better": greater, "value": value, "update": update}));
        let model = |dir: &str| std::fs::read(scratch.path(out).join(dir).join("model.safetensors")).unwrap();
        assert!(model("best") == model(&format!("checkpoint-{update}")));
        // Training is the same without.
        scratch.succeeds(&run("", &format!("plain-{out}")));
        assert!(model("") == std::fs::read(scratch.path(&format!("plain-{out}/model.safetensors"))).unwrap());
        for (flags, words) in [
            ("--eval_steps 2", "eval_steps = 2 (also set by eval_strategy): expected rows that are held out"),
            ("--metric_for_best_model eval_loss", "metric_for_best_model = eval_loss needs eval_steps"),
            ("--eval_steps 2 --metric_for_best_model eval_los", "metric_for_best_model = eval_los: expected "),
        ] {
            scratch.refuses(&run(flags, "none"), 2, &[words]);
        }
        let ran = scratch.run(&run("--metric_for_best_model los", &format!("wrong-{out}")));
        assert!(
            ran.code != 0 && ran.stderr.contains("metric_for_best_model = los: expected a metric of the run, one of")
        );
    }
}

#[test]
fn evaluations_and_checkpoints_are_due_with_the_updates_that_end_an_epoch() {
    let scratch = Scratch::new();
    let every = "--eval_strategy epoch --save_strategy epoch";
    // The epochs of 6 rows end within the updates 2 and 3 of 4 rows each; the fourth is the last.
    for (line, out, metric) in [
        (format!("{SFT} --max_steps 4"), "sft", "eval_loss"),
        (format!("{REWARD} --max_steps 4"), "reward-model", "eval_loss"),
        (format!("{PPO} --total_episodes 16"), "ppo", "eval/score"),
    ] {
        let ran = scratch.run(&format!("{line} --eval_split_size 2 {every} --output_dir {out}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let lines = scratch.metrics(out);
        let evaluated =
            lines.iter().filter(|line| line.contains_key(metric)).map(|line| line["step"].as_u64().unwrap());
        assert_eq!(evaluated.collect::<Vec<_>>(), [0, 2, 3, 4], "{out}");
        let saved: Vec<usize> =
            (1..=4).filter(|update| scratch.path(&format!("{out}/checkpoint-{update}")).is_dir()).collect();
        assert_eq!(saved, [2, 3, 4], "{out}");
        let config = scratch.read(&format!("{out}/config.yaml"));
        assert!(config.contains("eval_steps: epoch\n") && config.contains("save_steps: epoch\n"), "{config}");
    }
    scratch.refuses(&format!("{SFT} --save_steps often"), 2, &["a whole number of updates, or epoch"]);
}

#[test]
fn the_best_model_is_kept_by_its_metric_beside_the_limit() {
    let scratch = Scratch::new();
    for (out, greater, best) in [("rising", true, 8), ("falling", false, 1)] {
        let line = steps(out).replace("--save_total_limit 2", "--save_total_limit 8");
        scratch.succeeds(&format!("{line} --metric_for_best_model step --greater_is_better {greater}"));
        let told: Value = serde_json::from_str(&scratch.read(&format!("{out}/best/best.json"))).unwrap();
        assert_eq!(
            told,
            json!({"metric": "step", "greater_is_better": greater, "value": f64::from(best), "update": best})
        );
        for file in ["model.safetensors", "value_model/model.safetensors", "tokenizer.json"] {
            let read = |dir: &str| std::fs::read(scratch.path(out).join(dir).join(file)).unwrap();
            assert!(read("best") == read(&format!("checkpoint-{best}")), "{file}");
        }
    }
    let ran = scratch.run(&format!("{} --metric_for_best_model objective/score", steps("none")));
    assert_eq!((ran.code, ran.stderr.lines().count()), (1, 1), "{}", ran.stderr);
    for words in [
        "metric_for_best_model = objective/score: expected a metric of the run, one of",
        "--config none/config.yaml --resume_from_checkpoint true",
    ] {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }
    // The update is not lost, and the run resumes with a metric that exists; this one from the third update on.
    let line = format!("{} --value_warmup_updates 2 --metric_for_best_model policy/entropy_avg", steps("late"));
    scratch.succeeds(&line);
    let told: Value = serde_json::from_str(&scratch.read("late/best/best.json")).unwrap();
    assert!(told["update"].as_u64().unwrap() > 2, "{told}");
    // Found before any weight is read.
    scratch.write("policy/model.safetensors", "no weights");
    let line = format!("{PPO} --metric_for_best_model eval/scores/mood --eval_steps 2 --eval_split_size 2");
    scratch.refuses(
        &line,
        2,
        &["metric_for_best_model = eval/scores/mood: expected the name of a reward, one of model"],
    );
}
