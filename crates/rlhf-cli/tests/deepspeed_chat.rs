//! What a user of DeepSpeed-Chat does, as they do it here.

mod engine;

use crate::cli::{Scratch, json_lines};
use rlhf::weights::Checkpoint;

/// The names of a folder's tensors.
fn names(scratch: &Scratch, dir: &str) -> Vec<String> {
    Checkpoint::open(&scratch.path(dir)).unwrap().names().map(String::from).collect()
}

fn scores(scratch: &Scratch, model: &str) -> Vec<f64> {
    let lines = scratch.succeeds(&format!("score --model {model} --dataset_name demos.jsonl"));
    json_lines(&lines).iter().map(|row| row["score"].as_f64().unwrap()).collect()
}

const REWARD: &str = "reward --dataset_name pairs.jsonl --pair_loss tokens --num_padding_at_beginning 1 \
                      --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 3 --logging_steps 1 \
                      --learning_rate 1e-3";

#[test]
fn a_reward_model_of_deepspeed_chat_is_trained_scores_rewards_and_initializes_a_critic() {
    let scratch = Scratch::with_policy("gpt2");
    let line = format!("{REWARD} --model_name_or_path policy --new_reward_head --reward_format deepspeed-chat");
    scratch.succeeds(&format!("{line} --dataset_test_split train --eval_dataset_name pairs.jsonl --output_dir reward"));
    let metrics = scratch.metrics("reward");
    let loss = |at: usize| metrics[at]["loss"].as_f64().unwrap();
    // The texts of a pair part at their completions: at the beginning a token costs ln 2, about.
    assert!((loss(0) - 0.693).abs() < 0.1 && loss(2) < loss(0), "{} then {}", loss(0), loss(2));
    assert!(metrics[2]["eval_loss"].as_f64().unwrap() < loss(0));
    let found = names(&scratch, "reward");
    assert!(found.iter().all(|name| name == "v_head.weight" || name.starts_with("rwtransformer.")), "{found:?}");

    // Training continues from its own names, and from transformers' where these are selected: at a learning rate of 0
    // the same model.
    let again = REWARD.replace("--learning_rate 1e-3", "--learning_rate 0");
    scratch.succeeds(&format!("{again} --model_name_or_path reward --output_dir same"));
    assert_eq!(names(&scratch, "same"), found);
    scratch.succeeds(&format!("{again} --model_name_or_path reward --reward_format transformers --output_dir other"));
    assert!(names(&scratch, "other").iter().any(|name| name == "score.weight"));
    let expected = scores(&scratch, "reward");
    assert_eq!((scores(&scratch, "same"), scores(&scratch, "other")), (expected.clone(), expected));

    let ppo = "ppo --sft_model_path policy --dataset_name prompts.jsonl --response_length 4 --total_episodes 4 \
               --per_device_train_batch_size 4 --num_sample_generations 0";
    scratch.succeeds(&format!("{ppo} --reward_model_path reward --output_dir ppo"));
    assert_eq!(names(&scratch, "ppo/value_model"), found, "the critic began as the reward model, and is saved as one");
    let score = |run: &str| scratch.metrics(run)[0]["objective/scores"].as_f64().unwrap();
    scratch.succeeds(&format!("{ppo} --reward_model_path other --output_dir ppo_other"));
    assert_eq!(score("ppo"), score("ppo_other"));
    // An adapter's base needs names that PEFT knows.
    scratch.succeeds(&format!("{ppo} --reward_model_path reward --use_peft --output_dir ppo_lora"));
    assert!(names(&scratch, "ppo_lora/value_model/base_model").iter().any(|name| name == "score.weight"));
    assert_eq!(scores(&scratch, "ppo_lora/value_model").len(), 8);
}

#[test]
fn a_pickled_reward_model_is_refused_with_the_way_to_convert_it() {
    let scratch = Scratch::with_policy("gpt2");
    std::fs::rename(scratch.path("policy/model.safetensors"), scratch.path("policy/pytorch_model.bin")).unwrap();
    for line in [
        "score --model policy --dataset_name demos.jsonl".to_string(),
        format!("{REWARD} --model_name_or_path policy --output_dir out"),
    ] {
        let words = ["pytorch_model.bin, a pickle, which can run code and is never opened", "weights_only=True"];
        scratch.refuses(&line, 1, &words);
    }
}

#[test]
fn models_without_scores_of_tokens_and_unknown_formats_are_refused() {
    let scratch = Scratch::with_policy("gpt2");
    scratch.copy("encoder", "bert_cls1");
    for (flags, words) in [
        ("--model_name_or_path encoder", "expected a decoder, found `bert`"),
        (
            "--model_name_or_path encoder --pair_loss sequence --reward_format deepspeed-chat",
            "expected a decoder with one",
        ),
        (
            "--model_name_or_path policy --new_reward_head --reward_format deepspeed-chat --use_peft",
            "reward_format = transformers",
        ),
    ] {
        scratch.refuses(&format!("{REWARD} {flags} --output_dir out"), 1, &[words]);
    }
    let refused = scratch.run(&format!("{REWARD} --model_name_or_path policy --reward_format trl --output_dir out"));
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("transformers or deepspeed-chat"), "{}", refused.stderr);
}
