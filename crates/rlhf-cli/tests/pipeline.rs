//! The three trainings as one command: what links them, what a stop leaves, what is found before anything runs.

use crate::checkpoint::{signal, wait_until};
use crate::cli::{PROMPTS, Ran, Scratch, shows_in_seven_digits, timeless};
use serde_json::json;
use std::process::Stdio;

const ALL: &str = "pipeline --config pipeline.yaml";

/// One dataset for all three, and their settings.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    let row = |(at, prompt): (usize, &str)| json!({"prompt": prompt, "chosen": format!(" yes {at}"), "rejected": format!(" no, no {at}")});
    let rows = PROMPTS.into_iter().cycle().enumerate().take(30);
    scratch.write("rows.jsonl", &rows.map(|at| format!("{}\n", row(at))).collect::<String>());
    let text = "model_name_or_path: policy\ndataset_name: rows.jsonl\noutput_dir: out\nseed: 7\n\
                per_device_train_batch_size: 4\nlogging_steps: 1\nmax_steps: 3\nsft:\n  learning_rate: 1e-3\nreward:\n\
                ppo:\n  response_length: 6\n  total_episodes: 12\n  num_sample_generations: 0\n";
    scratch.write("pipeline.yaml", text);
    scratch
}

#[track_caller]
fn runs(scratch: &Scratch, line: &str) -> Ran {
    let ran = scratch.run(line);
    assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
    ran
}

#[track_caller]
fn same_models(scratch: &Scratch, found: [&str; 3], expected: [&str; 3]) {
    for (found, expected) in found.into_iter().zip(expected) {
        let read = |dir: &str| std::fs::read(scratch.path(dir).join("model.safetensors")).unwrap();
        assert!(read(found) == read(expected), "{found} differs from {expected}");
        assert_eq!(timeless(scratch.metrics(found)), timeless(scratch.metrics(expected)));
    }
}

#[test]
fn one_dataset_trains_all_three_as_the_single_commands_do_and_the_settings_left_repeat_it() {
    let scratch = scratch();
    let ran = runs(&scratch, ALL);
    let steps =
        ["stage 1 of 3, sft: into out/1-sft", "stage 2 of 3, reward: into out/2-reward", "stage 3 of 3, ppo: into"];
    for words in steps.into_iter().chain(["objective/scores", "accuracy", "out/3-ppo"]) {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }
    let dirs = ["out/1-sft", "out/2-reward", "out/3-ppo"];
    let metrics = dirs.map(|dir| scratch.metrics(dir)).concat();
    assert_eq!(metrics.len(), 9);
    shows_in_seven_digits(&ran.stdout, &metrics);

    let usual = "--dataset_name rows.jsonl --data_split 2,4,4 --seed 7 --per_device_train_batch_size 4";
    let steps = "--logging_steps 1 --max_steps 3";
    scratch.succeeds(&format!("sft --model_name_or_path policy {usual} {steps} --learning_rate 1e-3 --output_dir sft"));
    scratch.succeeds(&format!("reward --model_name_or_path sft --new_reward_head {usual} {steps} --output_dir rm"));
    scratch.succeeds(&format!(
        "ppo --sft_model_path sft --reward_model_path rm {usual} --response_length 6 --total_episodes 12 \
         --num_sample_generations 0 --output_dir ppo"
    ));
    same_models(&scratch, dirs, ["sft", "rm", "ppo"]);

    runs(&scratch, "pipeline --config out/config.yaml --output_dir again");
    same_models(&scratch, ["again/1-sft", "again/2-reward", "again/3-ppo"], dirs);
    let settings = |run: &str| scratch.read(&format!("{run}/config.yaml")).replace(&format!("output_dir: {run}\n"), "");
    assert_eq!(settings("again"), settings("out"));
}

#[test]
fn a_section_distill_is_a_stage_after_sft_as_the_single_command() {
    let scratch = scratch();
    let distill =
        "teacher_model_name_or_path: policy\n  learning_rate: 1e-3\n  max_completion_length: 5\n  beta: 0.5\n";
    scratch.write("distill.yaml", &format!("{}distill:\n  {distill}", scratch.read("pipeline.yaml")));
    let line = "pipeline --config distill.yaml --skip reward,ppo";
    let ran = runs(&scratch, line);
    for words in ["stage 3 of 4, ppo: skipped", "stage 4 of 4, distill: into out/5-distill", "entropy"] {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }
    assert!(scratch.path("out/5-distill/model.safetensors").is_file() && !scratch.path("out/4-dpo").exists());
    let config = scratch.read("out/5-distill/config.yaml");
    assert!(config.contains("model_name_or_path: out/1-sft") && config.contains("beta: 0.5"), "{config}");
    runs(&scratch, "distill --config out/5-distill/config.yaml --output_dir again");
    let weights = |name: &str| std::fs::read(scratch.path(name).join("model.safetensors")).unwrap();
    assert!(weights("out/5-distill") == weights("again"));
    let without = scratch.read("distill.yaml").replace("teacher_model_name_or_path: policy\n  ", "");
    scratch.write("distill.yaml", &without);
    scratch.refuses(&format!("{line} --output_dir other"), 2, &["distill", "teacher_model_name_or_path"]);
}

#[test]
fn a_section_dpo_is_a_stage_after_sft_as_the_single_command_and_is_skipped_once_it_is_finished() {
    let scratch = scratch();
    let text = scratch.read("pipeline.yaml") + "dpo:\n  beta: 0.5\n  learning_rate: 1e-3\n";
    scratch.write("dpo.yaml", &text);
    let line = "pipeline --config dpo.yaml --skip reward,ppo";
    let ran = runs(&scratch, line);
    for words in ["stage 3 of 4, ppo: skipped", "stage 4 of 4, dpo: into out/4-dpo", "rewards/accuracies"] {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }
    let usual = "--dataset_name rows.jsonl --data_split 2,4,4 --seed 7 --per_device_train_batch_size 4";
    let flags = "--logging_steps 1 --max_steps 3 --beta 0.5 --learning_rate 1e-3";
    scratch.succeeds(&format!("dpo --model_name_or_path out/1-sft {usual} {flags} --output_dir dpo"));
    let weights = |dir: &str| std::fs::read(scratch.path(dir).join("model.safetensors")).unwrap();
    assert!(weights("out/4-dpo") == weights("dpo"));
    assert_eq!(timeless(scratch.metrics("out/4-dpo")), timeless(scratch.metrics("dpo")));
    let again = runs(&scratch, &format!("{line} --resume_from_checkpoint"));
    assert!(again.stderr.contains("stage 4 of 4, dpo: finished before, in out/4-dpo"), "{}", again.stderr);
    runs(&scratch, "pipeline --config out/config.yaml --output_dir again");
    assert!(weights("again/4-dpo") == weights("dpo"));
    // A row that is no pair is found before SFT.
    scratch.write("dpo.yaml", &text.replace("  beta: 0.5", "  beta: 0.5\n  dataset_columns: rejected=none"));
    scratch.refuses(&format!("{line} --output_dir other"), 1, &["dpo: ", "`rejected`"]);
}

#[test]
fn steps_that_are_left_out_are_not_run_and_what_their_folders_hold_is_used() {
    let scratch = scratch();
    scratch.refuses(&format!("{ALL} --skip sft,reward"), 2, &["error: ppo: no reward: set at least one of"]);
    scratch.write("rule.yaml", &(scratch.read("pipeline.yaml") + "  reward: length:target=3\n"));
    let ran = runs(&scratch, "pipeline --config rule.yaml --skip sft,reward --output_dir rule");
    assert!(
        ran.stderr.contains("stage 1 of 3, sft: skipped\nstage 2 of 3, reward: skipped\nstage 3"),
        "{}",
        ran.stderr
    );
    assert!(
        scratch
            .read("rule/3-ppo/config.yaml")
            .contains("sft_model_path: policy\nmodel_revision: main\nreward_model_path: null\n")
    );
    assert!(!scratch.path("rule/1-sft").exists() && !scratch.path("rule/2-reward").exists());

    runs(&scratch, &format!("{ALL} --skip ppo"));
    assert!(!scratch.path("out/3-ppo").exists());
    runs(&scratch, &format!("{ALL} --skip sft,reward --overwrite_output_dir"));
    let settings = scratch.read("out/3-ppo/config.yaml");
    assert!(settings.contains("sft_model_path: out/1-sft\n") && settings.contains("reward_model_path: out/2-reward\n"));
}

#[test]
fn a_run_that_is_stopped_in_any_stage_resumes_there_to_the_same_bits() {
    let scratch = scratch();
    let text = scratch.read("pipeline.yaml");
    let text = text.replace("total_episodes: 12", "total_episodes: 160");
    scratch.write("pipeline.yaml", &text.replace("reward:\n", "reward:\n  max_steps: 100\n"));
    runs(&scratch, &format!("{ALL} --output_dir whole"));
    let line = format!("{ALL} --resume_from_checkpoint true");
    for (step, dir, name, code) in [("reward", "out/2-reward", "INT", 130), ("ppo", "out/3-ppo", "TERM", 143)] {
        let mut child = scratch.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines =
            || std::fs::read_to_string(scratch.path(dir).join("metrics.jsonl")).map_or(0, |t| t.lines().count());
        wait_until(&mut child, || lines() >= 2);
        signal(&child, name);
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!(ran.code, code, "{}", ran.stderr);
        let error = ran.stderr.lines().last().unwrap();
        assert!(error.starts_with(&format!("{step}: stopped as requested after update {} of ", lines())), "{error}");
        assert!(error.ends_with("; the same command with --resume_from_checkpoint resumes"), "{error}");
    }
    let ran = runs(&scratch, &line);
    for words in [
        "sft: finished before, in out/1-sft\n",
        "reward: finished before, in out/2-reward\n",
        "stage 3 of 3, ppo: into",
    ] {
        assert!(ran.stderr.contains(words), "no `{words}` in {}", ran.stderr);
    }
    same_models(&scratch, ["out/1-sft", "out/2-reward", "out/3-ppo"], ["whole/1-sft", "whole/2-reward", "whole/3-ppo"]);
}

#[test]
fn a_stage_that_was_run_in_test_mode_is_not_finished() {
    let scratch = scratch();
    runs(&scratch, &format!("{ALL} --output_dir whole"));
    let text = scratch.read("pipeline.yaml");
    scratch.write("test.yaml", &text.replace("ppo:\n", "ppo:\n  enable_test_mode: true\n  test_stop_step: 0\n"));
    runs(&scratch, "pipeline --config test.yaml");
    assert_eq!(scratch.metrics("out/3-ppo").len(), 1);
    let ran = runs(&scratch, &format!("{ALL} --resume_from_checkpoint true"));
    assert!(ran.stderr.contains("stage 3 of 3, ppo: into out/3-ppo"), "{}", ran.stderr);
    same_models(&scratch, ["out/1-sft", "out/2-reward", "out/3-ppo"], ["whole/1-sft", "whole/2-reward", "whole/3-ppo"]);
}

#[test]
fn a_pipeline_that_is_refused_changes_nothing_of_the_one_at_work() {
    let scratch = scratch();
    let text = scratch.read("pipeline.yaml").replace("max_steps: 3", "max_steps: 100000");
    scratch.write("pipeline.yaml", &text);
    let mut child = scratch.command(ALL).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until(&mut child, || scratch.path("out/1-sft/metrics.jsonl").exists());
    let settings = scratch.read("out/config.yaml");
    for flag in ["--overwrite_output_dir", "--resume_from_checkpoint true", ""] {
        let ran = scratch.run(&format!("{ALL} --skip reward,ppo {flag}"));
        assert!(ran.code == 1 && ran.stderr.contains("out: output_dir: another run is at work"), "{}", ran.stderr);
        assert_eq!(scratch.read("out/config.yaml"), settings, "{flag}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Nor where one of its steps is another's.
    let sft = "sft --model_name_or_path policy --dataset_name rows.jsonl --max_steps 100000 --overwrite_output_dir";
    let line = format!("{sft} --logging_steps 1 --output_dir out/1-sft");
    std::fs::remove_file(scratch.path("out/1-sft/metrics.jsonl")).unwrap();
    let mut child = scratch.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until(&mut child, || scratch.path("out/1-sft/metrics.jsonl").exists());
    let ran = scratch.run(&format!("{ALL} --skip reward,ppo --overwrite_output_dir"));
    assert!(ran.code == 1 && ran.stderr.contains("out/1-sft: output_dir: another run is at work"), "{}", ran.stderr);
    assert_eq!(scratch.read("out/config.yaml"), settings);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn finished_stages_are_skipped_and_resume_with_the_same_settings_or_are_refused() {
    let scratch = scratch();
    runs(&scratch, ALL);
    let resumed = format!("{ALL} --resume_from_checkpoint");
    let ran = runs(&scratch, &resumed);
    assert_eq!(
        (ran.stdout.as_str(), ran.stderr.matches("finished before, in out/").count()),
        ("", 3),
        "{}",
        ran.stderr
    );
    scratch.refuses(ALL, 1, &["out: output_dir", "found a run in it", "--resume_from_checkpoint"]);
    std::fs::create_dir(scratch.path("mine")).unwrap();
    scratch.write("mine/config.yaml", "sft:\n");
    scratch.refuses(
        &format!("{ALL} --output_dir mine"),
        1,
        &["mine: output_dir: expected no config.yaml of your own in it"],
    );
    scratch.write("other.yaml", &scratch.read("pipeline.yaml").replace("1e-3", "1e-4"));
    let other = "pipeline --config other.yaml --resume_from_checkpoint";
    scratch.refuses(other, 2, &["sft: learning_rate = 0.0001: expected 0.001, as in out/1-sft"]);
    // Other rows are not passed over without a word, nor is another model.
    let rows = scratch.read("rows.jsonl");
    scratch.write("rows.jsonl", &rows.replace(" yes ", " yes, "));
    scratch.refuses(&resumed, 1, &["out/1-sft: inputs have changed since: dataset_name = rows.jsonl: "]);
    let ran = runs(&scratch, &format!("{resumed} --resume_with_changed_inputs"));
    assert!(ran.stderr.contains("warning: sft: out/1-sft: inputs have changed since: "), "{}", ran.stderr);
    scratch.write("rows.jsonl", &rows);
    scratch.edit_config("policy", "note", 1);
    scratch.refuses(
        &resumed,
        1,
        &["sft: out/1-sft: inputs have changed since: model_name_or_path = policy: config.json"],
    );
    scratch.copy("again", "gpt_neox");
    std::fs::rename(scratch.path("again/config.json"), scratch.path("policy/config.json")).unwrap();
    // A model that a later stage started from is not made anew below it.
    std::fs::rename(scratch.path("out/1-sft"), scratch.path("kept")).unwrap();
    let renewed = [
        "reward: out/2-reward began with out/1-sft, and sft is not finished: remove out/2-reward, or leave reward out",
    ];
    scratch.refuses(&resumed, 2, &renewed);
    std::fs::rename(scratch.path("kept"), scratch.path("out/1-sft")).unwrap();
    let weights = std::fs::read(scratch.path("out/1-sft/model.safetensors")).unwrap();
    std::fs::write(scratch.path("out/1-sft/model.safetensors"), &weights[..99]).unwrap();
    scratch.refuses(
        &resumed,
        1,
        &["sft: out/1-sft/model.safetensors: expected", "found 99: the checkpoint is damaged"],
    );
    runs(&scratch, &format!("{ALL} --overwrite_output_dir"));
    assert!(std::fs::read(scratch.path("out/1-sft/model.safetensors")).unwrap() == weights);
}

#[test]
fn a_stage_that_was_killed_before_it_was_recorded_as_finished_restarts_with_the_same_settings() {
    let scratch = scratch();
    runs(&scratch, ALL);
    let resumed = format!("{ALL} --resume_from_checkpoint");
    let model = || std::fs::read(scratch.path("out/3-ppo/model.safetensors")).unwrap();
    let weights = model();
    std::fs::remove_file(scratch.path("out/3-ppo/trainer_state.json")).unwrap();
    scratch.write("other.yaml", &(scratch.read("pipeline.yaml") + "  kl_coef: 0.3\n"));
    scratch.refuses(
        "pipeline --config other.yaml --resume_from_checkpoint",
        1,
        &["ppo: out/3-ppo", "found a run in it"],
    );
    // With any part of the model written.
    std::fs::write(scratch.path("out/3-ppo/model.safetensors"), &weights[..99]).unwrap();
    let ran = runs(&scratch, &resumed);
    let words = "ppo: out/3-ppo is not recorded as finished: it starts again\n";
    assert!(ran.stderr.contains(words) && ran.stderr.contains("reward: finished before"), "{}", ran.stderr);
    assert!(model() == weights);
    assert_eq!(runs(&scratch, &resumed).stderr.matches("finished before").count(), 3);
}

#[test]
fn deepspeed_chats_three_steps_run_as_the_migration_page_has_them() {
    let scratch = scratch();
    let page = include_str!("../../../docs/migrate/deepspeed-chat.md");
    let mut text = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap().to_string();
    // The models and the sizes are the test's, all else is the page's.
    for (original, replacement) in [
        ("EleutherAI/pythia-1.4b", "policy"),
        ("EleutherAI/pythia-410m", "policy"),
        ("Dahoas/rm-static", "rows.jsonl"),
        ("runs/chat", "out\nper_device_train_batch_size: 4\nlogging_steps: 1\nmax_steps: 3"),
        ("num_padding_at_beginning: 0", "num_padding_at_beginning: 0, reward_format: deepspeed-chat"),
        (
            "enable_ema: true",
            "enable_ema: true, per_device_generation_batch_size: 4, response_length: 6, max_prompt_length: 20, \
             warmup_steps: 1",
        ),
    ] {
        assert!(text.contains(original), "no `{original}` in {text}");
        text = text.replace(original, replacement);
    }
    scratch.write("chat.yaml", &text);
    runs(&scratch, "pipeline --config chat.yaml");
    let tensors = |dir: &str| -> Vec<String> {
        rlhf::weights::Checkpoint::open(&scratch.path(dir)).unwrap().names().map(String::from).collect()
    };
    assert!(tensors("out/2-reward").contains(&"v_head.weight".into()), "{:?}", tensors("out/2-reward"));
    assert_eq!(tensors("out/3-ppo/ema"), tensors("out/1-sft"));
    // Each step has its own defaults of the preset.
    for (config, line) in [
        ("out/1-sft/config.yaml", "completion_only_loss: false"),
        ("out/2-reward/config.yaml", "pair_loss: tokens"),
        ("out/3-ppo/config.yaml", "kl_coef: 0.1"),
    ] {
        assert!(scratch.read(config).contains(line), "no `{line}` in {config}");
        assert!(scratch.read(config).contains("adam_beta2: 0.95"), "{config}");
    }
    let lines = scratch.metrics("out/3-ppo");
    assert_eq!(lines.len(), 3);
    assert!(lines.iter().all(|line| line["objective/scores"].as_f64().is_some_and(f64::is_finite)), "{lines:?}");
    let began = std::fs::read(scratch.path("out/1-sft/model.safetensors")).unwrap();
    assert!(std::fs::read(scratch.path("out/3-ppo/model.safetensors")).unwrap() != began);
}

#[test]
fn prompts_are_limited_by_the_reward_model_that_an_earlier_stage_will_write() {
    let scratch = scratch();
    let text = scratch.read("pipeline.yaml").replace("reward:\n", "reward:\n  model_name_or_path: reward\n");
    let run = |setting: &str, code: i32, words: &str| {
        scratch.write("other.yaml", &format!("{text}  {setting}\n"));
        scratch.refuses("pipeline --config other.yaml", code, &[words]);
    };
    scratch.edit_config("reward", "max_position_embeddings", 32);
    run("max_prompt_length: 60", 2, "error: ppo: max_prompt_length = 60: expected at most 26");
    // One that knows other tokens reads the text, the last of it where it is long.
    let mut tokenizer: serde_json::Value = serde_json::from_str(&scratch.read("reward/tokenizer.json")).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    vocab.extend([("a".into(), b), ("b".into(), a)]);
    let reward_tokenizer = scratch.read("reward/tokenizer.json");
    scratch.write("reward/tokenizer.json", &tokenizer.to_string());
    run("max_prompt_length: 60", 2, "error: ppo: max_prompt_length = 60: expected at most 58");
    run(
        "value_model_path: out/2-reward",
        1,
        "error: ppo: out/2-reward: value_model_path: expected the policy's tokenizer, found one that differs in 2 tokens",
    );
    scratch.write("reward/tokenizer.json", &reward_tokenizer);
    scratch.edit_config("policy", "vocab_size", 400);
    run("kl_coef: 0.1", 1, "error: ppo: out/2-reward: vocab_size: expected at least the policy's 400, found 352");
}

#[test]
fn everything_is_checked_before_the_first_stage_starts() {
    let scratch = scratch();
    let text = scratch.read("pipeline.yaml");
    let with =
        |section: &str, setting: &str| text.replace(&format!("{section}:\n"), &format!("{section}:\n  {setting}\n"));
    scratch.write("bad.jsonl", "{\"prompt\": \"do\", \"answer\": \"so\"}\n");
    // The pad ends these texts where they are still the same.
    let ended = json!({"prompt": "do<|endoftext|>", "chosen": " yes", "rejected": " no"});
    scratch.write("ended.jsonl", &format!("{ended}\n").repeat(8));
    scratch.copy("encoder", "bert_cls1");
    std::fs::create_dir(scratch.path("dir")).unwrap();
    for (section, setting, code, words) in [
        ("ppo", "kl_coef: -1", 2, &["broken.yaml:12: ppo: kl_coef = -1: expected a number of 0 or more"][..]),
        ("ppo", "dataset_name: absent.jsonl", 1, &["error: ppo: ", "absent.jsonl"]),
        ("ppo", "max_prompt_length: 60", 2, &["error: ppo: max_prompt_length = 60: expected at most 58"]),
        ("ppo", "max_prompt_length: 1", 1, &["error: ppo: rows.jsonl: line ", "the prompt is too long"]),
        ("ppo", "stop_token_id: 5000", 2, &["error: ppo: stop_token_id = 5000: expected an id below"]),
        ("ppo", "value_model_path: dir", 1, &["error: ppo: dir"]),
        ("ppo", "value_model_path: encoder", 1, &["error: ppo: encoder: expected a decoder, found `bert`"]),
        ("ppo", "reward_model_path: out/1-sft", 2, &["error: ppo: sft_model_path = out/1-sft: the reward model is"]),
        ("ppo", "unsupervised_dataset_name: absent.jsonl", 1, &["error: ppo: ", "absent.jsonl"]),
        ("ppo", "num_eval_prompts: 3", 2, &["error: ppo: num_eval_prompts = 3 has no effect without eval_steps"]),
        (
            "ppo",
            "eval_steps: 1\n  eval_split_size: 2\n  metric_for_best_model: eval/scores/mood",
            2,
            &["error: ppo: metric_for_best_model = eval/scores/mood: expected the name of a reward, one of model"],
        ),
        (
            "ppo",
            "eval_steps: 1",
            2,
            &["error: ppo: eval_steps = 1 (also set by eval_strategy): expected rows that are held out"],
        ),
        ("ppo", "reward: ['exact:truth']", 1, &["error: ppo: rows.jsonl: line ", "reward `exact`", "truth"]),
        ("ppo", "num_mini_batches: 3", 2, &["broken.yaml:11: ppo: batch size = per_device_train_batch_size"]),
        ("reward", "dataset_name: bad.jsonl", 1, &["error: reward: bad.jsonl: line 1: expected a field `chosen`"]),
        ("reward", "max_length: 1", 1, &["error: reward: rows.jsonl: each of 12 pairs has a side of more than"]),
        (
            "reward",
            "pair_loss: tokens\n  dataset_name: ended.jsonl",
            1,
            &["error: reward: ended.jsonl: pair 1 of those that are kept: with pair_loss = tokens the pad, token"],
        ),
        (
            "reward",
            "pair_loss: tokens\n  model_name_or_path: encoder",
            1,
            &["error: reward: encoder: expected a decoder, found `bert`"],
        ),
        ("sft", "dataset_name: bad.jsonl", 1, &["error: sft: bad.jsonl: line 1: expected a field `text`"]),
        (
            "sft",
            "data_split: 0,1,1",
            2,
            &["error: sft: data_split = 0,1,1 leaves none of 30 rows of rows.jsonl for sft"],
        ),
        ("sft", "eval_dataset_name: absent.jsonl", 1, &["error: sft: ", "absent.jsonl"]),
    ] {
        scratch.write("broken.yaml", &with(section, setting));
        scratch.refuses("pipeline --config broken.yaml", code, words);
    }
}

#[test]
fn a_tokenizer_of_its_own_stands_in_for_one_that_the_model_lacks_as_in_sft() {
    let scratch = scratch();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::rename(scratch.path("policy").join(file), scratch.path("reward").join(file)).unwrap();
    }
    scratch.refuses(&format!("{ALL} --skip reward,ppo"), 1, &["error: sft: policy", "tokenizer"]);
    let text = scratch.read("pipeline.yaml").replace("sft:\n", "sft:\n  tokenizer_name: reward\n");
    scratch.write("pipeline.yaml", &text);
    runs(&scratch, &format!("{ALL} --skip reward,ppo"));
}
