//! `rlhf distill`: runs of TRL 1.16's GKDTrainer (`tests/golden/trl_distill`) to the final weights, and the whole course of the command.

use crate::cli::{Scratch, timeless};
use crate::support::{Tensors, golden, note_difference, read_json};
use rlhf::run::Console;
use rlhf::schema::Settings as _;
use rlhf::settings::DistillConfig;
use rlhf::train::distill::distill;
use serde_json::{Map, Value};
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// Tolerance of numbers and weights; of numbers above 1 relative to them.
const TOLERANCE: f64 = 3e-5;

/// The settings of a run of GKDTrainer, which writes to `out`.
fn distill_config(run: &Value, out: &Path) -> DistillConfig {
    let dir = golden();
    let data = run["data"].as_str().unwrap();
    let (student, teacher) = match data {
        "chat" => ("trl_tools/init/policy", "trl_tools/init/ref"),
        _ => ("trl_new/init/llama_policy", "trl_new/init/llama_ref"),
    };
    let path = |name: &str| Some(vec![dir.join(name).display().to_string()]);
    DistillConfig::read(&|name| match name {
        "model_name_or_path" => path(student),
        "teacher_model_name_or_path" => path(teacher),
        "dataset_name" => path(&format!("trl_distill/{data}.jsonl")),
        "output_dir" => Some(vec![out.display().to_string()]),
        "per_device_train_batch_size" => Some(vec![run["batch"].to_string()]),
        "lmbda" => Some(vec!["0".into()]),
        // GKDTrainer samples at its temperature only.
        "loss_temperature" | "logging_steps" | "max_grad_norm" | "num_threads" => Some(vec!["1".into()]),
        "no_report" => Some(vec!["true".into()]),
        _ => run["settings"].get(name).map(|value| vec![value.to_string()]),
    })
    .unwrap()
}

/// Runs what TRL has run, and compares metrics and final weights.
fn check(names: &[&str]) {
    let dir = golden().join("trl_distill");
    let (runs, tensors) = (read_json(&dir.join("runs.json")), Tensors::read(&dir.join("final.safetensors")));
    let mut wrong = Vec::new();
    for name in names {
        let (run, scratch) = (&runs[format!("gkd.{name}")], Scratch::new());
        let out = scratch.path("run");
        distill(&distill_config(run, &out), Console::Silent).unwrap_or_else(|e| panic!("{name}: {e}"));
        let lines = scratch.metrics("run");
        for metric in ["loss", "grad_norm", "learning_rate"] {
            for (at, expected) in run["metrics"][metric].as_array().unwrap().iter().enumerate() {
                let (found, expected) = (lines[at][metric].as_f64().unwrap(), expected.as_f64().unwrap());
                let gap = (found - expected).abs() / expected.abs().max(1.0);
                note_difference(gap, TOLERANCE);
                if gap > TOLERANCE {
                    wrong.push(format!("{name}: {metric} of step {}: {found} is not {expected}", at + 1));
                }
            }
        }
        let found = Tensors::read(&out.join("model.safetensors"));
        let prefix = format!("{name}.");
        let stored: Vec<&str> = tensors.names().filter(|stored| stored.starts_with(&prefix)).collect();
        assert!(!stored.is_empty(), "{name}");
        for whole in stored {
            let whole = whole.split('[').next().unwrap();
            let part = tensors.part(whole);
            let gap = (part.select(found.get(&whole[prefix.len()..])) - part.tensor).abs().max().double_value(&[]);
            note_difference(gap, TOLERANCE);
            if gap > TOLERANCE {
                wrong.push(format!("{whole}: {gap:e}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn divergences_of_each_beta_have_the_numbers_of_trls_gkd_trainer_to_the_weights() {
    check(&["beta_0", "beta_03", "beta_05", "beta_1"]);
}

#[test]
fn a_temperature_micro_batches_conversations_and_cuts_have_trls_numbers_to_the_weights() {
    check(&["temperature", "accumulated", "chat", "chat_cut"]);
}

const DISTILL: &str = "distill --model_name_or_path policy --teacher_model_name_or_path teacher --dataset_name prompts.jsonl \
                       --output_dir out --per_device_train_batch_size 4 --max_steps 3 --logging_steps 1 --max_completion_length 6 \
                       --learning_rate 1e-3";

/// A scratch folder with a teacher, which has other weights than the policy.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    scratch.succeeds(
        "sft --model_name_or_path policy --dataset_name demos.jsonl --output_dir teacher --max_steps 2 --learning_rate 5e-2 \
         --per_device_train_batch_size 4",
    );
    scratch
}

#[test]
fn a_run_writes_a_model_with_metrics_samples_and_a_report_and_is_repeated_from_its_own_settings() {
    let scratch = scratch();
    let eval = "--eval_split_size 3 --eval_steps 1 --metric_for_best_model eval_loss --log_completions";
    scratch.succeeds(&format!("{DISTILL} {eval}"));
    let lines = scratch.metrics("out");
    assert_eq!(lines.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let names =
        ["loss", "entropy", "on_policy", "reverse_kl", "num_tokens", "completions/mean_length", "time/sampling"];
    assert!(names.iter().all(|name| lines[1][*name].is_number()), "{:?}", lines[1]);
    assert_eq!((&lines[1]["on_policy"], &lines[1]["completions/max_length"]), (&1.0.into(), &6.0.into()));
    assert!(lines[3]["eval_loss"].as_f64().unwrap() < lines[0]["eval_loss"].as_f64().unwrap(), "{lines:?}");
    assert!(scratch.path("out/best").is_dir());
    let answers = scratch.read("out/samples/answers-000001.jsonl");
    assert_eq!(answers.lines().count(), 4);
    assert!(scratch.read("out/report.html").contains("rlhf distill"));
    scratch.succeeds("distill --config out/config.yaml --output_dir again");
    assert_eq!(timeless(scratch.metrics("again")), timeless(lines));
    // An adapter is saved as one; a teacher in 4 bits, and offloaded.
    scratch.succeeds(&format!("{DISTILL} --use_peft --load_in_4bit --overwrite_output_dir"));
    assert!(scratch.path("out/adapter_model.safetensors").is_file());
    scratch.succeeds("generate --model_name_or_path out --dataset_name prompts.jsonl --max_new_tokens 4");
    scratch.succeeds(&format!("{DISTILL} --load_in_4bit --offload all --overwrite_output_dir"));
}

#[test]
fn responses_of_rows_of_the_student_and_of_the_teacher_are_learned_and_a_policy_gradient() {
    let scratch = scratch();
    let rows = DISTILL.replace("prompts.jsonl", "demos.jsonl");
    scratch.succeeds(&format!("{rows} --lmbda 0.5 --seed 3 --max_steps 8 --overwrite_output_dir"));
    let found: Vec<f64> = scratch.metrics("out").iter().map(|line| line["on_policy"].as_f64().unwrap()).collect();
    assert!(found.contains(&0.0) && found.contains(&1.0), "{found:?}");
    scratch.succeeds(&format!("{DISTILL} --lmbda 0 --seq_kd --loss_top_k 4 --overwrite_output_dir"));
    let line = &scratch.metrics("out")[0];
    assert!(line["on_policy"] == 0.0 && line["completions/mean_length"].is_number(), "{line:?}");
    scratch.succeeds(&format!("{DISTILL} --loss_type reverse_kl_advantage --max_steps 12 --overwrite_output_dir"));
    let lines = scratch.metrics("out");
    assert_eq!(lines[0]["loss"], lines[0]["reverse_kl"]);
    // Other sampling biases it, and a teacher without a tokenizer may have any: a line each.
    std::fs::remove_file(scratch.path("teacher/tokenizer.json")).unwrap();
    let ran = scratch
        .run(&format!("{DISTILL} --loss_type reverse_kl_advantage --top_k 9 --max_steps 1 --overwrite_output_dir"));
    for words in [
        "reverse_kl_advantage with top_k: responses are not sampled",
        "teacher has no tokenizer.json: its ids are taken",
    ] {
        assert!(ran.code == 0 && ran.stderr.contains(words), "{}", ran.stderr);
    }
}

/// Adds rows of large numbers, which no token has, to the embedding and the head of a model.
fn pad(scratch: &Scratch, name: &str) {
    scratch.edit_tensors(name, |tensors| {
        for name in ["gpt_neox.embed_in.weight", "embed_out.weight"] {
            let all = tensors.get_mut(name).unwrap();
            *all = Tensor::cat(&[all.shallow_clone(), Tensor::full([8, 32], 3.0, (Kind::Float, Device::Cpu))], 0);
        }
    });
    scratch.edit_config(name, "vocab_size", 360);
}

#[test]
fn ids_that_only_one_model_has_take_no_part() {
    let scratch = scratch();
    let line = DISTILL.replace("prompts.jsonl", "demos.jsonl") + " --lmbda 0 --beta 0.4";
    let policy_gradient = format!("{DISTILL} --loss_type reverse_kl_advantage");
    scratch.succeeds(&policy_gradient);
    let plain_gradient = timeless(scratch.metrics("out"));
    scratch.succeeds(&format!("{line} --overwrite_output_dir"));
    let plain = timeless(scratch.metrics("out"));
    let weights = |name: &str| Tensors::read(&scratch.path("out/model.safetensors")).get(name).shallow_clone();
    let head = weights("embed_out.weight");
    pad(&scratch, "teacher");
    scratch.succeeds(&format!("{line} --overwrite_output_dir"));
    let near = |found: Vec<Map<String, Value>>, plain: &[Map<String, Value>]| {
        for (found, expected) in found.iter().zip(plain) {
            for name in ["loss", "entropy", "grad_norm"] {
                let (found, expected) = (found[name].as_f64().unwrap(), expected[name].as_f64().unwrap());
                assert!((found - expected).abs() < 1e-5 * expected.abs().max(1.0), "{name}: {found} {expected}");
            }
        }
    };
    near(timeless(scratch.metrics("out")), &plain);
    // A policy gradient compares the ids that both have too.
    scratch.succeeds(&format!("{policy_gradient} --overwrite_output_dir"));
    near(timeless(scratch.metrics("out")), &plain_gradient);
    // A student that is padded keeps what it has in these places.
    pad(&scratch, "policy");
    std::fs::remove_dir_all(scratch.path("teacher")).unwrap();
    scratch.copy("teacher", "gpt_neox");
    scratch.edit_tensors("teacher", |tensors| {
        tensors.values_mut().for_each(|tensor| *tensor = &*tensor * 1.1);
    });
    scratch.succeeds(&format!("{line} --overwrite_output_dir"));
    let found = weights("embed_out.weight");
    assert_eq!((found.size()[0], head.size()[0]), (360, 352));
    assert!((found.narrow(0, 352, 8) - 3.0).abs().max().double_value(&[]) == 0.0);
    scratch.succeeds(&format!("{policy_gradient} --temperature 20 --overwrite_output_dir"));
    // The student may sample one of these ids: its response ends there, and the run on its own responses continues.
    scratch.succeeds(&format!("{DISTILL} --temperature 20 --overwrite_output_dir"));
}

#[test]
fn a_teacher_whose_tokenizer_has_more_added_tokens_is_learned_from_with_a_line() {
    let scratch = scratch();
    let edit = |change: &dyn Fn(&mut Value)| {
        let path = scratch.path("teacher/tokenizer.json");
        let mut tokenizer: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        change(&mut tokenizer);
        std::fs::write(&path, tokenizer.to_string()).unwrap();
    };
    let added = |id: u64| {
        serde_json::json!({
            "id": id, "content": "<|tool|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        })
    };
    edit(&|tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
        let known = tokenizer["added_tokens"].as_array().unwrap().iter().map(|token| token["id"].as_u64().unwrap());
        let next = 1 + vocab.values().map(|id| id.as_u64().unwrap()).chain(known).max().unwrap();
        tokenizer["added_tokens"].as_array_mut().unwrap().push(added(next));
    });
    let ran = scratch.run(&format!("{DISTILL} --max_steps 1"));
    let words = "the tokenizer of teacher has 1 added tokens that the student's has not; texts are read without them";
    assert!(ran.code == 0 && ran.stderr.contains(words), "{}", ran.stderr);
    // The student's own tokens are the teacher's too.
    std::fs::rename(scratch.path("teacher/tokenizer.json"), scratch.path("policy/tokenizer.json")).unwrap();
    std::fs::copy(golden().join("models/gpt_neox/tokenizer.json"), scratch.path("teacher/tokenizer.json")).unwrap();
    let words = "teacher_model_name_or_path: expected the tokenizer of policy, found one that differs in 1 tokens";
    scratch.refuses(&format!("{DISTILL} --overwrite_output_dir"), 1, &[words]);
}

#[test]
fn a_teacher_has_bits_of_its_own_or_those_of_the_students_base() {
    let scratch = scratch();
    let loss = |flags: &str| {
        scratch.succeeds(&format!("{DISTILL} --max_steps 1 --overwrite_output_dir {flags}"));
        scratch.metrics("out")[0]["loss"].as_f64().unwrap()
    };
    let plain = loss("");
    let [four, eight] = ["--load_in_4bit", "--load_in_8bit"].map(loss);
    assert!(plain != four && plain != eight && four != eight);
    assert_eq!(["--teacher_load_in_4bit", "--teacher_load_in_8bit true"].map(loss), [four, eight]);
    let of_fp4 = loss("--teacher_load_in_4bit --teacher_bnb_4bit_quant_type fp4");
    assert_eq!(loss("--load_in_4bit --bnb_4bit_quant_type fp4"), of_fp4);
    assert_eq!(loss("--teacher_load_in_4bit --bnb_4bit_quant_type fp4"), of_fp4);
    // The first loss of an adapter is that of its base.
    let student_loss = loss("--use_peft --load_in_4bit --teacher_load_in_4bit false");
    let joint_loss = loss("--use_peft --load_in_4bit");
    assert!(student_loss != joint_loss && student_loss != plain && joint_loss != four);
    for (flags, words) in [
        ("--teacher_load_in_4bit --teacher_load_in_8bit", "teacher_load_in_8bit = true exclude each other"),
        (
            "--teacher_use_bnb_nested_quant",
            "teacher_use_bnb_nested_quant = true has no effect without teacher_load_in_4bit",
        ),
        (
            "--teacher_load_in_8bit --teacher_bnb_4bit_quant_type fp4",
            "teacher_bnb_4bit_quant_type = fp4 has no effect without teacher_load_in_4bit",
        ),
        (
            "--teacher_load_in_4bit --teacher_bnb_4bit_quant_type nf4 --bnb_4bit_quant_type fp4",
            "bnb_4bit_quant_type = fp4 has no effect without load_in_4bit",
        ),
        (
            "--teacher_load_in_4bit --load_in_8bit",
            "load_in_8bit = true has no effect without use_peft, as the teacher has",
        ),
    ] {
        scratch.refuses(&format!("{DISTILL} --overwrite_output_dir {flags}"), 2, &[words]);
    }
}

#[test]
fn settings_that_cannot_be_are_refused_in_one_line_each() {
    let scratch = scratch();
    for (flags, words) in [
        ("--beta 1.5", "beta = 1.5: expected a number from 0 to 1"),
        ("--lmbda -0.1", "lmbda = -0.1: expected a number from 0 to 1"),
        ("--seq_kd", "seq_kd = true has no effect with lmbda = 1"),
        ("--temperature 0", "temperature = 0: expected a number above 0"),
        ("--loss_temperature 0", "loss_temperature = 0: expected a number above 0"),
        (
            "--loss_type reverse_kl_advantage --lmbda 0.5",
            "lmbda = 0.5 with loss_type = reverse_kl_advantage: expected 1",
        ),
        ("--loss_type reverse_kl_advantage --beta 0.5", "beta = 0.5 has no effect with loss_type"),
        ("--loss_add_tail false", "loss_add_tail = false has no effect without loss_top_k"),
        ("--num_completions_to_print 2", "num_completions_to_print = 2 has no effect without log_completions"),
        ("--lmbda 0 --log_completions", "log_completions = true has no effect with lmbda = 0"),
        ("--lmbda 0 --top_k 5", "top_k = 5 has no effect with lmbda = 0"),
        ("--lmbda 0 --top_p 0.5", "top_p = 0.5 has no effect with lmbda = 0"),
        ("--lmbda 0 --min_new_tokens 2", "min_new_tokens = 2 has no effect with lmbda = 0"),
        ("--lmbda 0 --stop_strings x", "stop_strings = \"x\" has no effect with lmbda = 0"),
        ("--lmbda 0 --long_prompts drop", "long_prompts = drop has no effect with lmbda = 0"),
        (
            "--lmbda 0.5 --long_prompts truncate_right",
            "long_prompts = truncate_right with lmbda between 0 and 1: expected error",
        ),
        (
            "--loss_type reverse_kl_advantage --loss_temperature 0.5",
            "loss_temperature = 0.5 with loss_type = reverse_kl_advantage: expected temperature, 1, or none",
        ),
        ("--logprobs_of filtered --top_k 5", "logprobs_of = filtered: expected policy"),
        ("--metric_for_best_model eval_score", "metric_for_best_model"),
        (
            "--teacher_model_init_kwargs {\"dtype\":\"bfloat16\"}",
            "teacher_model_revision, teacher_dtype and teacher_load_in_4bit",
        ),
        ("--teacher_model_revision v1", "teacher_model_revision = v1: "),
    ] {
        scratch.refuses(&format!("{DISTILL} {flags}"), 2, &[words]);
    }
    // Rows without a response, and texts without a prompt.
    scratch.refuses(&format!("{DISTILL} --lmbda 0.5"), 1, &["prompts.jsonl"]);
    scratch.write("texts.jsonl", "{\"text\": \"a text\"}\n");
    let texts = DISTILL.replace("prompts.jsonl", "texts.jsonl");
    scratch.refuses(&format!("{texts} --lmbda 0.5"), 1, &["texts.jsonl: line 1: expected a prompt"]);
    assert_eq!(scratch.run(&format!("{texts} --lmbda 0")).code, 0);
    // Another tokenizer.
    let teacher = scratch.path("teacher/tokenizer.json");
    let text = std::fs::read_to_string(&teacher).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let [a, b] = ["a", "b"].map(|token| vocab[token].clone());
    vocab.insert("a".into(), b);
    vocab.insert("b".into(), a);
    std::fs::write(&teacher, tokenizer.to_string()).unwrap();
    let words = "teacher_model_name_or_path: expected the tokenizer of policy, found one that differs in 2 tokens";
    scratch.refuses(&format!("{DISTILL} --overwrite_output_dir"), 1, &[words]);
}
