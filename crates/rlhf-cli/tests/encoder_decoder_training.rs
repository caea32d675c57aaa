//! Training of encoder-decoders: SFT and PPO of a tiny T5, and the settings that they refuse.

use crate::cli::{PROMPTS, Scratch, json_lines, with_data};
use crate::support::{golden, near};
use rlhf::data::Dataset;
use rlhf::model::{Batch, CausalLm, ModelOptions, SequenceClassifier};
use rlhf::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::Path;
use tch::Kind;

const SFT: &str = "sft --model_name_or_path t5 --dataset_name demos.jsonl --output_dir out --per_device_train_batch_size 8 \
                   --max_steps 2 --logging_steps 1 --learning_rate 1e-2";
const PPO: &str = "ppo --sft_model_path t5 --dataset_name demos.jsonl --output_dir out --response_length 8 \
                   --per_device_train_batch_size 4 --total_episodes 8 --learning_rate 1e-3 --stop_token eos";

/// A folder with a decoder-only `policy` and its `reward`, and with `t5`.
pub(crate) fn scratch() -> Scratch {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("t5")).unwrap();
    for (name, from) in [
        ("config.json", "trl_legacy/init/t5_ref/config.json"),
        ("model.safetensors", "trl_legacy/init/t5_ref/model.safetensors"),
        ("tokenizer.json", "tokenizers/t5/tokenizer.json"),
        ("tokenizer_config.json", "tokenizers/t5/tokenizer_config.json"),
    ] {
        std::fs::copy(golden().join(from), scratch.path("t5").join(name)).unwrap();
    }
    scratch
}

/// Mean negative log-likelihood of the completions of `demos.jsonl`, by the model in `dir`.
fn loss(scratch: &Scratch, dir: &Path) -> f64 {
    let tokenizer = Tokenizer::from_pretrained(dir).unwrap();
    assert!(tokenizer.is_of_encoder_decoder());
    let model = CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap();
    let rows = json_lines(&scratch.read("demos.jsonl"));
    let pairs = rows.iter().map(|row| {
        let text = |name: &str| tokenizer.encode(row[name].as_str().unwrap()).unwrap();
        (text("prompt"), text("completion"))
    });
    let (mut sum, mut tokens) = (0.0, 0);
    for (prompt, response) in pairs {
        let (sequences, prompt_lens) = ([[&prompt[..], &response].concat()], [prompt.len()]);
        let span = prompt.len()..prompt.len() + response.len();
        let batch = Batch::new(&sequences, std::slice::from_ref(&span)).with_prompts(Some(&prompt_lens));
        let found = tch::no_grad(|| model.logprobs_of(batch, 1.0, false)).unwrap();
        sum -= found.logprobs.sum(Kind::Double).double_value(&[]);
        tokens += response.len();
    }
    sum / tokens as f64
}

#[test]
fn sft_lowers_the_loss_of_the_completions_given_the_encoded_prompts() {
    let scratch = scratch();
    let before = loss(&scratch, &scratch.path("t5"));
    for (out, flags) in [("full", ""), ("stored", "--gradient_checkpointing"), ("lora", "--use_peft")] {
        scratch.succeeds(&format!("{SFT} --output_dir {out} {flags}"));
        let losses: Vec<f64> = scratch.metrics(out).iter().map(|row| row["loss"].as_f64().unwrap()).collect();
        near(out, losses[0], before, 1e-5);
        assert!(losses[1] < losses[0], "{out}: {losses:?}");
    }
    let (full, stored) = (scratch.metrics("full"), scratch.metrics("stored"));
    near("gradient checkpointing", stored[1]["loss"].as_f64().unwrap(), full[1]["loss"].as_f64().unwrap(), 1e-5);
    let after = loss(&scratch, &scratch.path("full"));
    assert!(after < before - 0.01, "{before} to {after}");
    assert!(loss(&scratch, &scratch.path("lora")) < before);
    scratch.succeeds("merge --model_name_or_path lora --output_dir merged");
    assert!(loss(&scratch, &scratch.path("merged")) < before);
}

#[test]
fn rows_are_cut_at_the_ends_of_prompt_and_completion() {
    let scratch = scratch();
    let ran = scratch.run(&format!("{SFT} --max_length 3"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("8 of 8 rows were cut at max_length = 3 tokens"), "{}", ran.stderr);
}

#[test]
fn ppo_of_an_encoder_decoder_learns_with_every_kind_of_reward_and_adapter() {
    let scratch = scratch();
    for (out, flags) in [
        ("rule", "--reward rouge_l:completion --value_head --eval_steps 1 --num_eval_prompts 2 --eval_split_size 2"),
        ("lora", "--reward rouge_l:completion --use_peft --value_head"),
        ("reward_model", "--reward_model_path reward --value_head --score_position last_token"),
        ("groups", "--reward rouge_l:completion --preset grpo --num_generations 2 --learning_rate 1e-3"),
        ("full_kl", "--reward rouge_l:completion --value_head --kl_estimator full --gradient_checkpointing"),
        ("critic", "--reward rouge_l:completion"),
        ("critic_lora", "--reward rouge_l:completion --use_peft"),
        ("own_critic", "--reward rouge_l:completion --value_model_path critic/value_model"),
    ] {
        let ran = scratch.run(&format!("{PPO} {flags} --output_dir {out}"));
        assert_eq!(ran.code, 0, "{out}: {}", ran.stderr);
        let mut metrics = scratch.metrics(out);
        metrics.retain(|row| row.contains_key("objective/scores") || row.contains_key("reward"));
        assert_eq!(metrics.len(), 2, "{out}");
        // The policy that sampled is the one that learns: the first KL is 0.
        if let Some(kl) = metrics[0].get("objective/kl") {
            near(out, kl.as_f64().unwrap(), 0.0, 1e-4);
        }
    }
    let tokenizer = Tokenizer::from_pretrained(&scratch.path("rule")).unwrap();
    let samples = json_lines(&scratch.read("rule/samples/update-000000.jsonl"));
    let prompts = Dataset::read(&scratch.path("demos.jsonl"), "train").unwrap().prompts(&tokenizer, 72, 64).unwrap();
    assert!(samples.iter().all(|row| prompts.iter().any(|prompt| row["prompt"] == prompt.text.as_str())));
    scratch.succeeds("generate --model_name_or_path lora --dataset_name demos.jsonl --max_new_tokens 4");
    // Without `--value_head` the critic is transformers' classifier with the policy's layers.
    for out in ["critic", "critic_lora", "own_critic"] {
        let dir = scratch.path(out).join("value_model");
        let critic = SequenceClassifier::from_pretrained(&dir, None, ModelOptions::default()).unwrap();
        critic.check_values(&dir).unwrap();
    }
    let saved: serde_json::Value = serde_json::from_str(&scratch.read("critic/value_model/config.json")).unwrap();
    assert_eq!(saved["architectures"], serde_json::json!(["T5ForSequenceClassification"]));
}

#[test]
fn a_reward_model_learns_pairs_as_whole_texts_and_scores_the_responses_of_a_policy() {
    let scratch = scratch();
    let pairs = "reward --model_name_or_path t5 --new_reward_head --dataset_name pairs.jsonl --output_dir judge \
                 --per_device_train_batch_size 8 --max_steps 12 --logging_steps 1 --learning_rate 1e-2";
    scratch.succeeds(pairs);
    let metrics = scratch.metrics("judge");
    let number = |at: usize, name: &str| metrics[at][name].as_f64().unwrap();
    assert!(number(11, "loss") < number(0, "loss") - 0.1, "{metrics:?}");
    scratch.succeeds(&format!("{} --use_peft", pairs.replace("judge", "adapted")));
    for judge in ["judge", "adapted"] {
        scratch.succeeds(&format!("{PPO} --reward_model_path {judge} --value_head --output_dir with_{judge}"));
    }
    // As a value model it starts from the layers that learned the pairs.
    scratch.succeeds(&format!("{PPO} --reward_model_path judge --value_model_path judge --output_dir from_judge"));
    let tokens = format!("{} --pair_loss tokens", pairs.replace("judge", "none"));
    scratch.refuses(&tokens, 2, &["pair_loss: expected sequence for an encoder-decoder"]);
}

#[test]
fn a_pipeline_trains_an_encoder_decoder_in_all_of_its_stages() {
    let scratch = scratch();
    let row =
        |prompt: &&str| format!("{}\n", serde_json::json!({"prompt": prompt, "chosen": " yes", "rejected": " no"}));
    scratch.write("rows.jsonl", &PROMPTS.iter().map(row).collect::<String>());
    let file = "output_dir: out\ndataset_name: rows.jsonl\nmodel_name_or_path: t5\nper_device_train_batch_size: 4\n\
                sft:\n  max_steps: 2\nreward:\n  max_steps: 2\nppo:\n  total_episodes: 8\n  response_length: 8\n";
    scratch.write("run.yaml", file);
    let ran = scratch.run("pipeline --config run.yaml");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for dir in ["out/2-reward", "out/3-ppo/value_model"] {
        let model = SequenceClassifier::from_pretrained(&scratch.path(dir), None, ModelOptions::default()).unwrap();
        assert_eq!(model.config().architectures, ["T5ForSequenceClassification"], "{dir}");
    }
}

#[test]
fn generate_takes_prompts_up_to_the_encoders_limit_whatever_the_length_of_the_response() {
    let scratch = scratch();
    let prompt = |len: usize| format!("{}\n", serde_json::json!({"prompt_ids": vec![5; len]}));
    scratch.write("long.jsonl", &(prompt(500) + &prompt(512)));
    let line = "generate --model_name_or_path t5 --dataset_name long.jsonl --output_format jsonl";
    let rows = json_lines(&scratch.succeeds(&format!("{line} --max_new_tokens 40 --ignore_eos")));
    let lens: Vec<usize> = rows.iter().map(|row| row["completion_ids"].as_array().unwrap().len()).collect();
    assert_eq!(lens, [40, 40]);
    let words = ["max_new_tokens = 512: expected at most 511, the decoder's limit of 512 tokens of "];
    scratch.refuses(&format!("{line} --max_new_tokens 512"), 2, &words);
    scratch.write("long.jsonl", &prompt(513));
    let words = ["the prompt is too long: expected at most 512 tokens (the encoder's limit), found 513"];
    scratch.refuses(&format!("{line} --max_new_tokens 4"), 1, &words);
}

#[test]
fn models_of_the_other_kind_beside_an_encoder_decoder_are_one_line() {
    let scratch = scratch();
    let rule = format!("{PPO} --reward rouge_l:completion");
    for (line, words) in [
        (format!("{rule} --value_model_path reward"), "reward: expected the tokenizer of "),
        (format!("{rule} --value_model_path policy --value_head=false"), "policy: "),
    ] {
        scratch.refuses(&line, 1, &[words]);
    }
    // With the policy's tokenizer, the layers tell.
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(scratch.path("t5").join(file), scratch.path("reward").join(file)).unwrap();
    }
    let words = ["value model: expected an encoder-decoder, as the policy is, found a single stack of layers"];
    scratch.refuses(&format!("{rule} --value_model_path reward"), 1, &words);
}

#[test]
fn the_dropout_rate_of_the_file_has_no_effect_on_a_policy_with_a_value_head() {
    let scratch = scratch();
    let run = |out: &str| {
        scratch.succeeds(&format!("{PPO} --reward rouge_l:completion --value_head --output_dir {out}"));
        let names = ["objective/kl", "objective/scores", "loss/policy_avg", "loss/value_avg", "policy/approxkl_avg"];
        let row_values = |row: &serde_json::Map<String, serde_json::Value>| names.map(|name| row.get(name).cloned());
        let rows = scratch.metrics(out);
        rows.iter().filter(|row| row.contains_key("objective/scores")).map(row_values).collect::<Vec<_>>()
    };
    let expected = run("without");
    assert!(expected.len() == 2 && expected[0].iter().all(Option::is_some), "{expected:?}");
    for (name, rate) in [("dropout_rate", 0.5), ("classifier_dropout", 0.5)] {
        let mut config: serde_json::Value = serde_json::from_str(&scratch.read("t5/config.json")).unwrap();
        config[name] = serde_json::json!(rate);
        scratch.write("t5/config.json", &config.to_string());
    }
    assert_eq!(run("with"), expected);
}

#[test]
fn settings_of_decoders_alone_are_one_line_for_an_encoder_decoder() {
    let scratch = scratch();
    scratch.write("texts.jsonl", "{\"text\": \"The movie was great\"}\n");
    let rule = "--reward rouge_l:completion --value_head";
    for (line, code, words) in [
        (format!("{SFT} --packing"), 2, "packing = true: expected false for an encoder-decoder"),
        (format!("{SFT} --completion_only_loss false"), 2, "completion_only_loss = false: expected true"),
        (format!("{SFT} --assistant_only_loss"), 2, "assistant_only_loss = true: expected false"),
        (with_data(SFT, "texts.jsonl"), 1, "expected a field `prompt` with a text for the encoder"),
        (format!("{PPO} {rule} --apply_chat_template"), 2, "apply_chat_template = true: expected false"),
        (format!("{PPO} {rule} --value_head --num_shared_layers 1"), 2, "num_shared_layers = 1: expected "),
        (format!("{PPO} {rule} --unsupervised_dataset_name texts.jsonl"), 2, "its texts have no prompts"),
        (format!("{PPO} {rule} --response_length 512"), 2, "response_length = 512: expected at most 511"),
        (format!("{PPO} {rule} --max_prompt_length 513"), 2, "expected at most 512, the encoder's limit"),
    ] {
        scratch.refuses(&line, code, &[words]);
    }
    let long = format!("{{\"prompt\": \"{}\", \"completion\": \"x\"}}\n", "the capital of France. ".repeat(80));
    scratch.write("long.jsonl", &long);
    let words = ["long.jsonl: line 1", "the prompt is too long: expected at most 512 tokens (the encoder's limit)"];
    scratch.refuses(&format!("{} {rule}", with_data(PPO, "long.jsonl")), 1, &words);
    scratch.succeeds(&format!("{PPO} {rule} --response_length 511 --total_episodes 4 --output_dir most"));
}

#[test]
fn logprobs_of_generated_responses_are_those_of_sampling_if_no_file_states_the_kind_of_model() {
    let scratch = scratch();
    scratch.edit_config("t5", "is_encoder_decoder", Value::Null);
    scratch.succeeds(
        "generate --model_name_or_path t5 --dataset_name demos.jsonl --max_new_tokens 6 --output_file sampled.jsonl",
    );
    let logprobs = "logprobs --model_name_or_path t5 --dataset_name";
    let values = |rows: &[Map<String, Value>]| -> Vec<f64> {
        rows.iter().flat_map(|row| row["logprobs"].as_array().unwrap()).map(|x| x.as_f64().unwrap()).collect()
    };
    let sampled = json_lines(&scratch.read("sampled.jsonl"));
    let eos = |row: &Map<String, Value>| row["prompt_ids"].as_array().unwrap().last() == Some(&json!(1));
    assert!(sampled.iter().all(eos), "a prompt keeps the eos of its tokenizer");
    let measured = json_lines(&scratch.succeeds(&format!("{logprobs} sampled.jsonl --batch_size 3")));
    let (sampled, measured) = (values(&sampled), values(&measured));
    assert_eq!(sampled.len(), measured.len());
    assert!(sampled.iter().zip(&measured).all(|(a, b)| (a - b).abs() < 1e-5), "{sampled:?} {measured:?}");

    // Text, as two texts: with the eos of the completion written out, the loss of SFT.
    let rows = json_lines(&scratch.read("demos.jsonl"));
    let ended = rows.iter().map(
        |row| json!({"prompt": row["prompt"], "completion": format!("{}</s>", row["completion"].as_str().unwrap())}),
    );
    scratch.write("ended.jsonl", &ended.map(|row| format!("{row}\n")).collect::<String>());
    let measured = values(&json_lines(&scratch.succeeds(&format!("{logprobs} ended.jsonl"))));
    let mean = -measured.iter().sum::<f64>() / measured.len() as f64;
    near("the loss", mean, loss(&scratch, &scratch.path("t5")), 1e-5);

    // Prompt and completion do not share the limit of 512 tokens.
    let row = |prompt: usize, response: usize| {
        format!("{}\n", json!({"prompt_ids": vec![5; prompt], "completion_ids": vec![6; response]}))
    };
    scratch.write("most.jsonl", &row(512, 511));
    scratch.succeeds(&format!("{logprobs} most.jsonl"));
    for (prompt, response) in [(513, 1), (1, 512)] {
        scratch.write("long.jsonl", &row(prompt, response));
        let found = format!("found {prompt} and {response}");
        let words = ["long.jsonl: line 1", "at most 512 tokens of prompt for the encoder and 511 of response", &found];
        scratch.refuses(&format!("{logprobs} long.jsonl"), 1, &words);
    }
}
