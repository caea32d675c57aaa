//! Runs that compute in f16: their loss scale, the steps that it leaves out, and what they leave behind.

use crate::cli::{PPO, SFT, Scratch};
use rlhf::weights::Checkpoint;
use serde_json::Value;
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

const REWARD: &str = "reward --model_name_or_path reward --dataset_name pairs.jsonl --per_device_train_batch_size 4 \
                      --max_steps 2 --logging_steps 1";

fn weights(scratch: &Scratch, dir: &str) -> BTreeMap<String, Tensor> {
    let file = Checkpoint::open(&scratch.path(dir)).unwrap();
    file.names().map(|name| (name.to_string(), file.read(name, Device::Cpu, Kind::Float).unwrap())).collect()
}

fn column(scratch: &Scratch, run: &str, name: &str) -> Vec<f64> {
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{run}: {name} = {value}"));
    scratch.metrics(run).iter().map(|line| number(&line[name])).collect()
}

/// How many of the tensors of `dir` hold nothing but what f16 holds too.
fn rounded(scratch: &Scratch, dir: &str) -> usize {
    let narrow = |tensor: &Tensor| tensor.to_kind(Kind::Half).to_kind(Kind::Float);
    weights(scratch, dir).values().filter(|tensor| narrow(tensor).equal(tensor)).count()
}

#[test]
fn every_command_trains_in_f16_from_a_scale_of_65536_and_keeps_f32_weights() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{SFT} --learning_rate 1e-3 --fp16 --output_dir sft"));
    scratch.succeeds(&format!("{SFT} --learning_rate 1e-3 --output_dir sft_f32"));
    scratch.succeeds(&format!("{REWARD} --fp16 --output_dir trained"));
    for run in ["sft", "trained"] {
        assert_eq!(column(&scratch, run, "loss_scale"), [65536.0; 2], "{run}");
        assert_eq!(column(&scratch, run, "overflows"), [0.0; 2], "{run}");
        assert_eq!(rounded(&scratch, run), 0, "{run}");
    }
    // 11 bits of each product: near f32's, and not f32's. Without a scale most of the gradient of this loss were 0.
    for name in ["loss", "grad_norm"] {
        for (found, expected) in column(&scratch, "sft", name).iter().zip(column(&scratch, "sft_f32", name)) {
            assert!(*found != expected && (found / expected - 1.0).abs() < 0.02, "{name}: {found} and {expected}");
        }
    }
    let ppo = format!("{PPO} --num_ppo_epochs 1 --learning_rate 1e-3");
    scratch.succeeds(&format!("{ppo} --fp16 --align_overflow --compute_fp32_loss --output_dir ppo"));
    for model in ["policy", "val"] {
        assert_eq!(column(&scratch, "ppo", &format!("{model}/loss_scale")), [65536.0; 2]);
        assert_eq!(column(&scratch, "ppo", &format!("{model}/overflows")), [0.0; 2]);
    }
    assert!(column(&scratch, "ppo", "val/ratio").iter().all(|ratio| (ratio - 1.0).abs() < 1e-3));
    assert_eq!((rounded(&scratch, "ppo"), rounded(&scratch, "ppo/value_model")), (0, 0));
    scratch.succeeds(&format!("{ppo} --output_dir ppo_f32"));
    let [half, exact] = ["ppo", "ppo_f32"].map(|run| column(&scratch, run, "policy/entropy_avg")[0]);
    assert!(half != exact && (half / exact - 1.0).abs() < 0.02, "{half} and {exact}");
    assert!(!scratch.metrics("ppo_f32")[0].contains_key("val/loss_scale"));
}

#[test]
fn steps_whose_gradients_overflow_f16_are_left_out_and_counted_until_the_scale_has_come_down() {
    let scratch = Scratch::new();
    // Two updates of four steps, from a scale that f16 cannot hold.
    let high = "--fp16 --initial_scale_power 60 --hysteresis 1";
    scratch.succeeds(&format!("{PPO} {high} --output_dir ppo"));
    for (model, dir, from) in [("policy", "ppo", "policy"), ("val", "ppo/value_model", "reward")] {
        assert_eq!(column(&scratch, "ppo", &format!("{model}/overflows")), [4.0; 2]);
        let halved = [4, 8].map(|times| 2f64.powi(60 - times));
        assert_eq!(column(&scratch, "ppo", &format!("{model}/loss_scale")), halved);
        assert!(weights(&scratch, dir) == weights(&scratch, from), "{dir} is not {from}: a step was taken");
    }
    assert_eq!(column(&scratch, "ppo", "val/skipped_steps"), [0.0; 2]);
    // The first is borne with, since hysteresis is 2.
    scratch.succeeds(&format!("{SFT} --fp16 --initial_scale_power 60 --max_steps 3 --output_dir sft"));
    assert_eq!(column(&scratch, "sft", "loss_scale"), [60, 59, 58].map(|power| 2f64.powi(power)));
    assert_eq!(column(&scratch, "sft", "overflows"), [1.0, 2.0, 3.0]);
    assert!(weights(&scratch, "sft") == weights(&scratch, "policy"));
    // Once the scale can fall no further it is not its doing.
    let least = format!("{high} --min_loss_scale 5e17");
    let ran = scratch.run(&format!("{SFT} {least} --max_steps 9 --output_dir diverged"));
    assert!(ran.code == 1 && ran.stderr.contains("the gradient's norm is"), "{}", ran.stderr);
    assert_eq!(column(&scratch, "diverged", "loss_scale").last(), Some(&5e17));
    let ran = scratch.run(&format!("{PPO} {least} --max_skipped_updates 1 --output_dir stopped"));
    assert!(ran.code == 1 && ran.stderr.contains("(max_skipped_updates = 1)"), "{}", ran.stderr);
}

#[test]
fn a_command_line_of_deepspeed_chat_in_its_own_dtype_computes_in_f16() {
    let scratch = Scratch::new();
    let ran = scratch.run(
        "ppo --preset deepspeed-chat --actor_model_name_or_path policy --critic_model_name_or_path reward \
         --data_path prompts.jsonl --output_dir out --max_answer_seq_len 8 --max_prompt_seq_len 20 \
         --per_device_generation_batch_size 4 --per_device_training_batch_size 4 --dtype fp16 --align_overflow \
         --compute_fp32_loss --num_padding_at_beginning 1",
    );
    // DeepSpeed too starts at the weights in f16.
    let rounded = ["policy", "reward"].map(|dir| format!("warning: {dir}: dtype = float16 rounds weights"));
    assert!(ran.code == 0 && rounded.iter().all(|line| ran.stderr.contains(line)), "{}", ran.stderr);
    assert_eq!(column(&scratch, "out", "val/loss_scale"), [65536.0; 2]);
    assert_eq!(column(&scratch, "out", "policy/overflows"), [0.0; 2]);
    let settings = scratch.read("out/config.yaml");
    assert!(["fp16: true", "align_overflow: true"].iter().all(|line| settings.contains(line)), "{settings}");
}

#[test]
fn settings_of_f16_without_it_or_against_it_are_refused() {
    let scratch = Scratch::new();
    for (flags, words) in [
        ("--fp16 --bf16", "bf16 = true and fp16 = true exclude each other"),
        ("--align_overflow", "align_overflow = true has no effect without fp16 = true"),
        ("--hysteresis 1", "hysteresis = 1 has no effect without fp16 = true"),
        ("--min_loss_scale 2", "min_loss_scale = 2 has no effect without fp16 = true"),
        ("--fp16 --compute_fp32_loss=false", "compute_fp32_loss = false: expected true"),
        ("--fp16 --initial_scale_power 101", "initial_scale_power = 101: expected at most 100"),
        ("--fp16 --loss_scale_window 0", "loss_scale_window = 0: expected at least 1"),
        ("--fp16 --initial_scale_power 3 --min_loss_scale 9", "min_loss_scale = 9: expected at most 8"),
    ] {
        scratch.refuses(&format!("{PPO} {flags}"), 2, &[words]);
    }
}
