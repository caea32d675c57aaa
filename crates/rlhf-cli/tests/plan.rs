//! `rlhf plan` against real runs and real tensors.

use crate::cli::{PPO, PROMPTS, REWARD, SFT, Scratch};
use crate::support::{golden, output};
use serde_json::{Value, json};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The plan of `line`, without a calibration.
#[track_caller]
fn planned(scratch: &Scratch, flags: &str, line: &str) -> Value {
    let text = scratch.succeeds(&format!("plan --json --calibrate=false {flags} {line}"));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// The peak of the resident memory of a run in bytes.
#[track_caller]
fn peak_memory(scratch: &Scratch, line: &str, vars: &[(&str, &str)]) -> f64 {
    let mut command = scratch.command(line);
    let mut child = command.envs(vars.iter().copied()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        peak = line.and_then(|kib| kib.trim().parse::<u64>().ok()).map_or(peak, |kib| peak.max(kib << 10));
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{line:?}");
            return peak as f64;
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// Checks the peak that `rlhf plan` expects of a run against the run's.
#[track_caller]
fn assert_near_peak(scratch: &Scratch, line: &str) {
    assert_near_peak_with(scratch, line, &[]);
}

/// [`assert_near_peak`] with variables in the environment.
#[track_caller]
fn assert_near_peak_with(scratch: &Scratch, line: &str, vars: &[(&str, &str)]) {
    // Both are processes of their own: a plan counts the memory of its own libraries.
    let mut command = scratch.command(&format!("plan --json --calibrate=false {line}"));
    let plan = command.envs(vars.iter().copied()).output().unwrap();
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    let plan = number(&plan["memory"]["peak"]);
    let peak = peak_memory(scratch, line, vars);
    crate::support::say(&format!("plan {:.0} MiB, peak {:.0} MiB: {line}", plan / 1048576.0, peak / 1048576.0));
    // Code and buffers of the libraries differ by processor: with AVX2 alone they are some 50 MiB smaller than with AVX-512.
    let bound = 0.2 * peak + f64::from(32 << 20);
    assert!((plan - peak).abs() < bound, "{line}: planned {plan} bytes, found {peak}");
}

/// A folder with a model of 11 million parameters with random weights, `big`.
fn with_model() -> Scratch {
    let scratch = Scratch::new();
    let shape =
        [("hidden_size", 384), ("intermediate_size", 1536), ("num_attention_heads", 6), ("num_hidden_layers", 6)];
    for (name, size) in shape {
        scratch.edit_config("policy", name, size);
    }
    let line = "sft --config_name policy/config.json --tokenizer_name policy --dataset_name demos.jsonl --output_dir big \
                --max_steps 1 --no_report";
    let ran = scratch.run(line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    scratch
}

#[test]
fn a_plan_is_near_the_peak_of_the_run() {
    let scratch = with_model();
    let ppo = "ppo --sft_model_path big --reward length:target=20 --dataset_name prompts.jsonl --response_length 40 \
               --per_device_train_batch_size 8 --total_episodes 16 --num_ppo_epochs 1 --num_sample_generations 0";
    let sft = "sft --model_name_or_path big --dataset_name demos.jsonl --max_steps 3";
    for line in [
        format!("{ppo} --output_dir a --no_report --device cpu"),
        format!("{ppo} --output_dir b --no_report --device cpu --use_peft --bf16"),
        format!("{sft} --output_dir c --no_report --device cpu"),
        format!("{ppo} --output_dir d --no_report --device cpu --offload all"),
        "dpo --model_name_or_path big --dataset_name pairs.jsonl --max_steps 3 --output_dir e --no_report --device cpu"
            .into(),
    ] {
        assert_near_peak(&scratch, &line);
    }
}

/// A folder with the student `big` and a teacher of twice its layers, `teacher`.
fn with_teacher() -> Scratch {
    let scratch = with_model();
    scratch.edit_config("policy", "num_hidden_layers", 12);
    let line = "sft --config_name policy/config.json --tokenizer_name policy --dataset_name demos.jsonl --output_dir teacher \
                --max_steps 1 --no_report";
    let ran = scratch.run(line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    scratch
}

const DISTILL: &str = "distill --model_name_or_path big --teacher_model_name_or_path teacher --dataset_name demos.jsonl --max_steps 3 \
                       --max_completion_length 40 --no_report --device cpu";

#[test]
fn a_plan_of_distillation_is_near_the_peak_of_the_run() {
    let scratch = with_teacher();
    for (out, flags) in [
        ("own", ""),
        ("rows", "--lmbda 0 --beta 0.5"),
        ("adapter", "--use_peft --bf16 --teacher_load_in_4bit"),
        ("offloaded", "--lmbda 0.5 --seq_kd --offload all"),
        ("gradient", "--loss_type reverse_kl_advantage --gradient_checkpointing"),
    ] {
        assert_near_peak(&scratch, &format!("{DISTILL} --output_dir {out} {flags}"));
    }
}

#[test]
fn a_plan_of_distillation_counts_the_teacher_as_it_is_held_and_the_logits_of_both() {
    let scratch = with_teacher();
    let line = format!("{DISTILL} --output_dir out");
    let plan_with = |flags: &str, ranks: usize| {
        let plan = planned(&scratch, &format!("--nproc_per_node {ranks}"), &format!("{line} {flags}"));
        assert_eq!([&plan["models"][0]["role"], &plan["models"][1]["role"]], [&json!("model"), &json!("teacher")]);
        plan
    };
    let teacher = |flags: &str, ranks: usize| number(&plan_with(flags, ranks)["models"][1]["weights"]);
    let whole = teacher("", 1);
    assert_eq!(teacher("--zero_stage 3", 2), whole / 2.0);
    // Layers alone are quantized: embedding, head and norms stay.
    let four = teacher("--teacher_load_in_4bit", 1);
    assert!(four < 0.2 * whole && four < teacher("--teacher_load_in_8bit", 1), "{four} {whole}");
    assert_eq!(four, teacher("--load_in_4bit", 1));
    let names = |flags: &str| {
        let plan = plan_with(flags, 1);
        let phases = plan["memory"]["phases"].as_array().unwrap();
        phases.iter().map(|phase| phase["name"].as_str().unwrap().to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(""), ["rollout", "scoring", "optimizer step", "saving"]);
    assert_eq!(names("--lmbda 0"), ["scoring", "optimizer step", "saving"]);
    assert!(names("--lmbda 0 --seq_kd").contains(&"rollout".into()));
    let logits = |flags: &str, name: &str| {
        let plan = plan_with(flags, 1);
        let phases = plan["memory"]["phases"].as_array().unwrap().clone();
        number(&phases.iter().find(|phase| phase["name"] == name).unwrap()["logits"])
    };
    // Log-probabilities of tokens need the logits of one model at a time.
    assert_eq!(logits("", "scoring"), 0.0);
    assert!(logits("--loss_type reverse_kl_advantage", "scoring") > 0.0);
    assert!(logits("", "optimizer step") > 2.0 * logits("--loss_type reverse_kl_advantage", "optimizer step"));
    // What would make it fit, and the line before a run that does not.
    let plan = planned(&scratch, "--memory 100MB", &line);
    let changes: Vec<&Value> = plan["remedies"].as_array().unwrap().iter().map(|remedy| &remedy["change"]).collect();
    for change in ["--teacher_load_in_4bit", "--offload all", "--use_peft"] {
        assert!(changes.contains(&&json!(change)), "{changes:?}");
    }
    let timed: Value = serde_json::from_str(&scratch.succeeds(&format!("plan --json {line}"))).unwrap();
    for part in ["rollout", "scoring", "training"] {
        assert!(number(&timed["time"][part]) > 0.0, "{part}: {}", timed["time"]);
    }
}

#[test]
fn a_plan_of_layers_with_a_state_is_near_the_peak_of_the_run() {
    let lfm2 = json!({
        "hidden_size": 384, "block_ff_dim": 1536, "num_attention_heads": 6, "num_key_value_heads": 2,
        "num_hidden_layers": 6, "block_auto_adjust_ff_dim": false,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
    });
    let qwen = json!({
        "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "num_hidden_layers": 4, "layer_types": null, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_num_key_heads": 6, "linear_num_value_heads": 12,
    });
    for (family, changes) in [("lfm2", lfm2), ("qwen3_5", qwen)] {
        let scratch = with_family(family, &changes);
        for line in [PPO_OF_BIG, SFT_OF_BIG] {
            assert_near_peak(&scratch, line);
        }
        // Libtorch's own operations store much more.
        assert_near_peak_with(&scratch, &PPO_OF_BIG.replace("_dir a", "_dir c"), &[("RLHF_KERNELS", "plain")]);
    }
}

#[test]
fn a_plan_of_attention_without_a_kernel_is_near_the_peak_of_the_run() {
    let sizes = json!({
        "hidden_size": 384, "intermediate_size": 768, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "num_hidden_layers": 4, "layer_types": null, "sliding_window": 64, "vocab_size_per_layer_input": 352,
        "num_local_experts": 4, "per_layer_config": null, "global_head_dim": 128,
    });
    let experts = json!({"num_experts": 4, "moe_intermediate_size": 256});
    for (family, more) in [("gpt_oss", json!({})), ("gemma4_moe", experts)] {
        let mut changes = sizes.clone();
        changes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_near_peak(&with_family(family, &changes), PPO_OF_BIG);
    }
}

const PPO_OF_BIG: &str = "ppo --sft_model_path big --reward length:target=20 --dataset_name prompts.jsonl --response_length 200 \
     --per_device_train_batch_size 8 --total_episodes 16 --num_ppo_epochs 1 --num_sample_generations 0 \
     --output_dir a --no_report --device cpu";
const SFT_OF_BIG: &str =
    "sft --model_name_or_path big --dataset_name demos.jsonl --max_steps 3 --output_dir b --no_report --device cpu";

/// A folder with a model of a family with other sizes, and random weights, `big`.
fn with_family(family: &str, changes: &Value) -> Scratch {
    let scratch = Scratch::new();
    let mut config = crate::support::read_json(&golden().join("models").join(family).join("config.json"));
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    for (name, value) in [("vocab_size", 352), ("max_position_embeddings", 512)] {
        config[name] = json!(value);
    }
    scratch.write("policy/config.json", &config.to_string());
    let start = "sft --config_name policy/config.json --tokenizer_name policy --dataset_name demos.jsonl --output_dir big \
                 --max_steps 1 --no_report";
    let ran = scratch.run(start);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    scratch
}

#[test]
fn a_plan_of_a_quantized_base_is_near_the_peak_of_the_run() {
    let scratch = with_model();
    for (out, bits) in [("four", "--load_in_4bit --use_bnb_nested_quant"), ("eight", "--load_in_8bit")] {
        let line = format!(
            "sft --model_name_or_path big --dataset_name demos.jsonl --max_steps 2 --no_report --device cpu --output_dir {out} \
             --use_peft --lora_dropout 0 {bits}"
        );
        assert_near_peak(&scratch, &line);
    }
}

#[test]
fn a_plan_counts_the_weights_that_the_files_hold_quantized() {
    let scratch = Scratch::new();
    let quantized = golden().join("quantized/llama_nf4");
    let layer = "model.layers.0.mlp.up_proj";
    for (name, is_plain) in [("all", false), ("most", true)] {
        let stored = tch::Tensor::read_safetensors(quantized.join("model.safetensors")).unwrap();
        let mut tensors: Vec<_> =
            stored.into_iter().filter(|(tensor, _)| !(is_plain && tensor.starts_with(layer))).collect();
        if is_plain {
            let base = tch::Tensor::read_safetensors(golden().join("models/llama_untied/model.safetensors")).unwrap();
            tensors.extend(base.into_iter().filter(|(tensor, _)| tensor.starts_with(layer)));
        }
        std::fs::create_dir(scratch.path(name)).unwrap();
        std::fs::copy(quantized.join("config.json"), scratch.path(name).join("config.json")).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(golden().join("models/llama_untied").join(file), scratch.path(name).join(file)).unwrap();
        }
        tch::Tensor::write_safetensors(&tensors, scratch.path(name).join("model.safetensors")).unwrap();
    }
    let line = |name: &str| format!("sft --model_name_or_path {name} --dataset_name demos.jsonl --output_dir out");
    let weights = |name: &str, flags: &str| {
        number(&planned(&scratch, "", &format!("{} --use_peft {flags}", line(name)))["models"][0]["weights"])
    };
    let (all, most) = (weights("all", ""), weights("most", ""));
    let config: Value = serde_json::from_str(&scratch.read("all/config.json")).unwrap();
    let numel = number(&config["hidden_size"]) * number(&config["intermediate_size"]);
    // 4 bytes for each number in place of half a byte, its share of a scale, and some hundreds for the description and the maps.
    assert!((most - all) > 2.0 * numel && (most - all) < 4.0 * numel, "{all}, {most}: {numel}");
    // The other settings are for models that are plain in their files.
    assert_eq!([weights("all", "--load_in_8bit"), weights("most", "--load_in_4bit")], [all, most]);
    let refused = format!("plan --json --calibrate=false {}", line("all"));
    scratch.refuses(&refused, 2, &["the weights are quantized", "set use_peft"]);
}

/// The folder `7b` with the configuration of Llama-2-7B, and no weights.
fn with_7b() -> Scratch {
    let scratch = Scratch::new();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "max_position_embeddings": 4096, "vocab_size": 32000, "tie_word_embeddings": false,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    });
    std::fs::create_dir(scratch.path("7b")).unwrap();
    scratch.write("7b/config.json", &config.to_string());
    scratch
}

#[test]
fn ppo_of_7b_with_a_base_in_4_bits_lora_and_a_shared_trunk_takes_less_than_24_gb_on_a_gpu_and_on_a_cpu() {
    let scratch = with_7b();
    let line = "ppo --sft_model_path 7b --dataset_name none.jsonl --max_prompt_length 512 --response_length 256 \
                --reward length:target=20 --train_batch_size 64 --total_episodes 640 --local_rollout_forward_batch_size 8 \
                --num_sample_generations 0 --output_dir out --bf16 --use_peft --lora_target_modules all-linear \
                --load_in_4bit --use_bnb_nested_quant --value_head --gradient_checkpointing";
    for device in ["cpu", "cuda"] {
        let plan = planned(&scratch, "--memory 24GB", &format!("{line} --device {device}"));
        let (peak, memory) = (number(&plan["memory"]["peak"]), &plan["memory"]);
        crate::support::say(&format!("7B on {device}: {:.1} GB in {}", peak / 1e9, memory["peak_phase"]));
        assert!(memory["fits"] == json!(true) && peak < 24e9, "{device}: {peak}");
        let [policy, reference] = [&plan["models"][0], &plan["models"][1]];
        assert_eq!((&reference["role"], &reference["weights"]), (&json!("reference model"), &json!(0)));
        // Queries, keys, values and their output; three matrices of the MLP.
        let linears = 32.0 * (4.0 * 4096.0 * 4096.0 + 3.0 * 4096.0 * 11008.0);
        // Half a byte for each weight, one for each 64, four for each 64 * 256.
        let base = linears * (0.5 + 1.0 / 64.0 + 4.0 / 64.0 / 256.0);
        // Embedding, LM head and norms in bf16.
        let rest = 2.0 * (2.0 * 32000.0 * 4096.0 + 65.0 * 4096.0);
        // Matrices of rank 16 beside each linear layer; the head for values and its bias.
        let adapters = 32.0 * 16.0 * (4.0 * (4096.0 + 4096.0) + 3.0 * (4096.0 + 11008.0));
        let trained = adapters + 4097.0;
        assert_eq!(number(&policy["trained"]), trained);
        assert_eq!([&policy["gradients"], &policy["moments"]].map(number), [4.0 * trained, 8.0 * trained]);
        // Maps and descriptions of 224 weights.
        let weights = base + rest + 4.0 * trained;
        let remainder = number(&policy["weights"]) - weights;
        assert!((0.0..224.0 * 2048.0).contains(&remainder), "{device}: {remainder}");
        let phase =
            |name: &str| memory["phases"].as_array().unwrap().iter().find(|phase| phase["name"] == name).unwrap();
        // Keys and values in bf16 of eight rows of 768 tokens.
        assert_eq!(number(&phase("rollout")["cache"]), 2.0 * 32.0 * 4096.0 * 2.0 * 8.0 * 768.0);
        // The inputs of 32 layers in f32, of at least one row.
        assert!(number(&phase("policy step")["activations"]) > 32.0 * 768.0 * 4096.0 * 4.0, "{memory}");
        assert!(number(&phase("policy step")["logits"]) > 0.0, "{memory}");
    }
}

/// A folder with a T5 of 20 million parameters with random weights, `big`.
fn with_t5() -> Scratch {
    let scratch = crate::encoder_decoder_training::scratch();
    for (name, size) in [("d_model", 384), ("d_kv", 64), ("num_heads", 6), ("d_ff", 1536), ("num_layers", 4)] {
        scratch.edit_config("t5", name, size);
    }
    scratch.edit_config("t5", "num_decoder_layers", 4);
    let row = |long: usize| {
        let prompt = "the capital of France. ".repeat(long);
        json!({"prompt": prompt, "completion": "A film about the capital and what it was. ".repeat(3)}).to_string()
            + "\n"
    };
    scratch.write("rows.jsonl", &(0..8).map(|i| row(8 + i)).collect::<String>());
    let line = "sft --config_name t5/config.json --tokenizer_name t5 --dataset_name demos.jsonl --output_dir big \
                --max_steps 1 --no_report";
    let ran = scratch.run(line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    scratch
}

#[test]
fn a_plan_of_an_encoder_decoder_is_near_the_peak_of_the_run() {
    let scratch = with_t5();
    let ppo = "ppo --sft_model_path big --reward rouge_l:completion --dataset_name rows.jsonl --response_length 40 \
               --per_device_train_batch_size 8 --total_episodes 16 --num_ppo_epochs 1 --num_sample_generations 0";
    for line in [
        format!("{ppo} --output_dir a --no_report --device cpu"),
        "sft --model_name_or_path big --dataset_name rows.jsonl --max_steps 3 --output_dir b --no_report --device cpu"
            .into(),
        "generate --model big --dataset_name rows.jsonl --max_new_tokens 40 --batch_size 8 --device cpu --output_file c.jsonl"
            .into(),
    ] {
        assert_near_peak(&scratch, &line);
    }
    let timed = scratch.succeeds(&format!("plan {ppo} --output_dir a"));
    assert!(timed.contains(" an update (rollout ") && timed.contains("FLOP/s in training"), "{timed}");
}

#[test]
fn operations_of_an_encoder_decoder_are_those_of_both_stacks_and_of_the_attention_between_them() {
    let scratch = crate::encoder_decoder_training::scratch();
    let row = json!({"prompt": "The movie was", "completion": "the capital of France"});
    scratch.write("rows.jsonl", &format!("{row}\n").repeat(4));
    let plan = |command: &str| planned(&scratch, "", &format!("{command} --dataset_name rows.jsonl --output_dir out"));
    let sft = plan("sft --model_name_or_path t5 --per_device_train_batch_size 4");
    let config: Value = serde_json::from_str(&scratch.read("t5/config.json")).unwrap();
    let size = |name: &str| number(&config[name]);
    let (hidden, heads, inner) = (size("d_model"), size("num_heads") * size("d_kv"), size("d_ff"));
    let [encoders, decoders] = ["num_layers", "num_decoder_layers"].map(size);
    let tokenizer = rlhf::tokenizer::Tokenizer::from_pretrained(&scratch.path("t5")).unwrap();
    let [read, decoded] =
        ["prompt", "completion"].map(|part| tokenizer.encode(row[part].as_str().unwrap()).unwrap().len() as f64);
    // Projections to queries, keys, values and out of them; two matrices of the MLP.
    let (attention, mlp) = (4.0 * hidden * heads, 2.0 * hidden * inner);
    let prompt_flops = encoders * (attention + mlp) + decoders * 2.0 * hidden * heads;
    let response_flops = decoders * (attention + 2.0 * hidden * heads + mlp) + size("vocab_size") * hidden;
    let pairs = encoders * read * read + decoders * (decoded * decoded / 2.0 + read * decoded);
    let expected = 4.0 * 3.0 * (2.0 * (read * prompt_flops + decoded * response_flops) + 4.0 * heads * pairs);
    let found = number(&sft["work"]["flops_per_update"]);
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
    // A value model of its own has the layers of the policy, and transformers' head: two matrices and their biases.
    let ppo =
        plan("ppo --sft_model_path t5 --reward rouge_l:completion --response_length 8 --per_device_train_batch_size 4");
    let parameters = |at: usize| number(&ppo["models"][at]["parameters"]);
    assert_eq!(ppo["models"][1]["role"], json!("value model"));
    let head = hidden * hidden + hidden + hidden + 1.0;
    let untied_head = if config["tie_word_embeddings"] == json!(false) { size("vocab_size") * hidden } else { 0.0 };
    assert_eq!(parameters(1), parameters(0) - untied_head + head);
}

#[test]
fn a_plan_needs_the_configuration_and_the_tokenizer_alone() {
    let scratch = Scratch::new();
    let with = [PPO, SFT, REWARD].map(|line| planned(&scratch, "", line));
    for folder in ["policy", "reward"] {
        std::fs::remove_file(scratch.path(folder).join("model.safetensors")).unwrap();
    }
    for (line, with) in [PPO, SFT, REWARD].into_iter().zip(with) {
        let plan = planned(&scratch, "", line);
        assert_eq!(plan["models"], with["models"], "{line}");
        for phase in plan["memory"]["phases"].as_array().unwrap() {
            let parts = ["program", "weights", "gradients", "moments", "activations", "cache", "logits"];
            let sum: f64 = parts.iter().map(|part| number(&phase[part])).sum();
            assert_eq!(sum, number(&phase["total"]), "{phase}");
            assert!(sum <= number(&plan["memory"]["peak"]));
        }
        assert!(!scratch.path("out").exists(), "a plan writes nothing");
    }
}

#[test]
fn ranks_share_what_their_stage_divides() {
    let scratch = Scratch::new();
    let sizes = |ranks: usize, stage: usize| {
        let plan = planned(&scratch, &format!("--nproc_per_node {ranks}"), &format!("{SFT} --zero_stage {stage}"));
        let model = &plan["models"][0];
        assert_eq!(plan["ranks"], json!(ranks));
        ["weights", "gradients", "moments"].map(|part| number(&model[part]))
    };
    let [weights, gradients, moments] = sizes(1, 0);
    assert_eq!([gradients, moments], [weights, 2.0 * weights]);
    assert_eq!(sizes(4, 0), [weights, gradients, moments]);
    assert_eq!(sizes(4, 2), [weights, gradients / 4.0, moments / 4.0]);
    // Until it is divided, each model is whole: here more than what is left of all parts.
    let start = |ranks: usize, line: &str| {
        let plan = planned(&scratch, &format!("--nproc_per_node {ranks}"), &format!("{line} --zero_stage 3"));
        let first = &plan["memory"]["phases"][0];
        (first["name"] == "loading").then(|| number(&first["weights"]))
    };
    assert_eq!([start(1, SFT), start(4, SFT)], [None, Some(weights)]);
    let dpo = "dpo --model_name_or_path policy --dataset_name pairs.jsonl --output_dir out";
    // The reference model is read beside the policy's part.
    assert_eq!(start(4, dpo), Some(weights / 4.0 + weights));
    assert_eq!(sizes(4, 3), [weights / 4.0, gradients / 4.0, moments / 4.0]);
}

#[test]
fn ranks_share_the_plain_weights_of_a_quantized_base_alone() {
    let scratch = with_7b();
    let line = "ppo --sft_model_path 7b --dataset_name none.jsonl --max_prompt_length 512 --response_length 256 --bf16 --use_peft \
                --reward length:target=20 --output_dir out --num_sample_generations 0 --load_in_8bit --value_head";
    let phase_memory = |stage: usize, flags: &str| {
        let plan =
            planned(&scratch, "--nproc_per_node 4 --memory 99GB", &format!("{line} --zero_stage {stage} {flags}"));
        let phases = plan["memory"]["phases"].as_array().unwrap();
        let rollout = phases.iter().find(|phase| phase["name"] == "rollout").unwrap();
        [&plan["models"][0]["weights"], &rollout["weights"]].map(number)
    };
    // A byte for each number, and eight for the scale of each row, which is held twice.
    let rows = 32.0 * (5.0 * 4096.0 + 2.0 * 11008.0);
    let quantized = 32.0 * (4.0 * 4096.0 * 4096.0 + 3.0 * 4096.0 * 11008.0) + 8.0 * rows;
    let ([whole, _], [part, in_rollout]) = (phase_memory(0, ""), phase_memory(3, "--ds3_gather_for_generation=false"));
    // Embedding, LM head, norms and the adapter are divided: nearly all that is not in eight bits.
    let rest = whole - quantized;
    assert!(rest < 0.1 * quantized && (part - quantized - rest / 4.0).abs() < 0.01 * rest, "{whole}, {part}");
    // A pass gathers what is outside the layers, and adapters and norms of one.
    assert!(in_rollout - part < rest, "{in_rollout}, {part}");
    let [_, gathered] = phase_memory(3, "");
    assert!((gathered - whole).abs() < 0.01 * rest, "{gathered}, {whole}");
}

#[test]
fn offloaded_parts_count_in_the_phases_that_use_them() {
    let scratch = with_model();
    let line = "ppo --sft_model_path big --reward_model_path big --new_reward_head --dataset_name prompts.jsonl --output_dir out";
    // The policy's own folder cannot be the reward model's.
    std::fs::create_dir(scratch.path("judge")).unwrap();
    for entry in std::fs::read_dir(scratch.path("big")).unwrap() {
        let entry = entry.unwrap();
        let _ = std::fs::copy(entry.path(), scratch.path("judge").join(entry.file_name()));
    }
    let line = line.replace("--reward_model_path big", "--reward_model_path judge");
    let plan_with = |flags: &str| planned(&scratch, "", &format!("{line} {flags}"));
    let part = |plan: &Value, phase: &str, part: &str| {
        let phases = plan["memory"]["phases"].as_array().unwrap();
        number(&phases.iter().find(|found| found["name"] == phase).unwrap_or_else(|| panic!("{phase}: {plan}"))[part])
    };
    let (whole, out) = (plan_with(""), plan_with("--offload all"));
    let weights = number(&whole["models"][0]["weights"]);
    let moments = |plan: &Value, phase: &str| part(plan, phase, "moments");
    let all = moments(&whole, "rollout");
    assert_eq!(["rollout", "scoring", "policy step"].map(|phase| moments(&out, phase)), [0.0; 3]);
    assert_eq!(moments(&out, "policy moments"), 2.0 * weights);
    assert_eq!(moments(&out, "policy moments") + moments(&out, "value model moments"), all);
    // Reference and reward model are away but for scoring, where one of them is there.
    let away = part(&whole, "policy step", "weights") - part(&out, "policy step", "weights");
    let in_scoring = part(&whole, "scoring", "weights") - part(&out, "scoring", "weights");
    assert!(
        (away / weights - 2.0).abs() < 0.05 && (in_scoring / weights - 1.0).abs() < 0.05,
        "{away} {in_scoring} {weights}"
    );
    assert!(number(&whole["memory"]["peak"]) - number(&out["memory"]["peak"]) > 3.0 * weights);
    let note = out["notes"].as_array().unwrap().last().unwrap().as_str().unwrap();
    assert!(note.starts_with("offload: each rank has ") && note.contains("on the disk of offload_dir"), "{note}");
    let narrow = planned(&scratch, "--memory 10MB", &line);
    let remedies = narrow["remedies"].as_array().unwrap();
    let remedy = remedies.iter().find(|remedy| remedy["change"] == "--offload all").unwrap();
    assert!(number(&remedy["saves"]) > 3.0 * weights, "{remedy}");
}

#[test]
fn texts_beside_ppo_stored_distributions_and_merged_adapters_count() {
    let scratch = with_model();
    scratch.edit_config("big", "max_position_embeddings", 1024);
    let row = json!({"text": "The movie was long, and then some more of it. ".repeat(20)});
    scratch.write("texts.jsonl", &format!("{row}\n").repeat(20));
    let ppo = |out: &str, policy: &str, flags: &str| {
        format!(
            "ppo --sft_model_path {policy} --model_name_or_path big --reward length:target=20 --dataset_name prompts.jsonl \
             --response_length 40 --per_device_train_batch_size 4 --total_episodes 8 --num_ppo_epochs 1 --device cpu \
             --num_sample_generations 0 --no_report --output_dir {out} {flags}"
        )
    };
    let phase = |plan: &Value, name: &str, part: &str| {
        let phases = plan["memory"]["phases"].as_array().unwrap();
        number(&phases.iter().find(|found| found["name"] == name).unwrap_or_else(|| panic!("{name}: {plan}"))[part])
    };
    // Blocks of the context's length, where prompts have some tokens and responses 40.
    let texts = ppo("texts", "big", "--unsupervised_dataset_name texts.jsonl");
    let plan = planned(&scratch, "", &texts);
    assert!(plan["notes"].to_string().contains("blocks of 1024 tokens"), "{plan}");
    let [long, short] = ["policy texts", "policy step"].map(|name| phase(&plan, name, "activations"));
    assert!(long > 3.0 * short, "{long}, {short}");
    assert_near_peak(&scratch, &texts);
    let work = |line: &str| number(&planned(&scratch, "", line)["work"]["flops_per_update"]);
    assert!(work(&texts) > 3.0 * work(&ppo("none", "big", "")));
    // One hidden state of 384 numbers for each of the tokens of four responses.
    let plan_with = |flags: &str| planned(&scratch, "", &ppo("kl", "big", &format!("--kl_estimator full {flags}")));
    let step_memory = |plan: &Value| ["activations", "logits"].map(|part| phase(plan, "policy step", part));
    let [stored, not] = [plan_with("--kl_in_loss"), plan_with("")].map(|plan| step_memory(&plan));
    // Working memory beyond the logits is a part of the activations.
    assert_eq!(stored.iter().sum::<f64>() - not.iter().sum::<f64>(), 4.0 * 40.0 * 384.0 * 4.0);
    // Kernels hold the logits once; libtorch's operations, which compute this KL and its gradient, seven times.
    assert_eq!(stored[1], 7.0 * not[1]);
    // A bonus for the entropy is the kernels', too.
    let bonus = planned(&scratch, "", &ppo("bonus", "big", "--entropy_coef 0.01"));
    assert_eq!(step_memory(&bonus)[1], not[1]);
    // A base in bf16 becomes f32 where an adapter is merged into it.
    let file = scratch.path("big/model.safetensors");
    let narrow: Vec<_> = tch::Tensor::read_safetensors(&file)
        .unwrap()
        .into_iter()
        .map(|(name, tensor)| (name, tensor.to_kind(tch::Kind::BFloat16)))
        .collect();
    tch::Tensor::write_safetensors(&narrow, &file).unwrap();
    scratch.succeeds(
        "sft --model_name_or_path big --dataset_name demos.jsonl --max_steps 1 --use_peft --output_dir adapter",
    );
    let weights =
        |policy: &str| number(&planned(&scratch, "", &ppo("merged", policy, "--use_peft"))["models"][0]["weights"]);
    let (merged, plain) = (weights("adapter"), weights("big"));
    assert!(merged > 1.9 * plain, "{merged}, {plain}");
    assert_near_peak(&scratch, &ppo("merged", "adapter", "--use_peft"));
}

/// Demonstrations of one text whose completion has many tokens.
fn with_long_rows(scratch: &Scratch) {
    let row = json!({"prompt": "The movie was", "completion": " and then some more of it".repeat(6)});
    scratch.write("long.jsonl", &format!("{row}\n").repeat(8));
}

#[test]
fn operations_are_those_of_products_and_of_attention_over_whole_sequences() {
    let scratch = Scratch::new();
    with_long_rows(&scratch);
    let line =
        "sft --model_name_or_path policy --dataset_name long.jsonl --output_dir out --per_device_train_batch_size 4";
    let plan_with = |flags: &str| planned(&scratch, "", &format!("{line} {flags}"));
    let (whole, responses) = (plan_with("--completion_only_loss=false"), plan_with("--completion_only_loss=true"));
    let config: Value = serde_json::from_str(&scratch.read("policy/config.json")).unwrap();
    let size = |name: &str| number(&config[name]);
    let (hidden, inner, layers) = (size("hidden_size"), size("intermediate_size"), size("num_hidden_layers"));
    // GPT-NeoX: queries, keys, values and their output; two matrices of the MLP.
    let products = layers * (4.0 * hidden * hidden + 2.0 * hidden * inner);
    let head = size("vocab_size") * hidden;
    let tokens = number(&whole["work"]["tokens_per_update"]);
    let len = tokens / 4.0;
    assert!(len > 30.0, "{len}");
    // A token attends to half of its sequence, by two products of the hidden size.
    let attention = 4.0 * (2.0 * 2.0 * layers * hidden * len * len / 2.0);
    // No token predicts the first one of a text.
    let expected = 3.0 * (2.0 * (tokens * products + (tokens - 4.0) * head) + attention);
    let found = number(&whole["work"]["flops_per_update"]);
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
    // Without a loss on the prompt only the head has fewer tokens.
    let fewer = (found - number(&responses["work"]["flops_per_update"])) / (3.0 * 2.0 * head * 4.0);
    assert!((fewer - fewer.round()).abs() < 1e-6 && (1.0..len).contains(&fewer), "{fewer}");
}

#[test]
fn more_machines_as_a_remedy_have_the_peak_of_such_a_run() {
    let scratch = with_model();
    with_long_rows(&scratch);
    for size in ["--per_device_train_batch_size 4", "--train_batch_size 4"] {
        let line = format!("sft --model_name_or_path big --dataset_name long.jsonl --output_dir out {size}");
        let plan = planned(&scratch, "--memory 10MB", &line);
        let change = "--zero_stage 3 on 2 machines like this one";
        let remedy = plan["remedies"].as_array().unwrap().iter().find(|remedy| remedy["change"] == change);
        let peak = number(&remedy.unwrap_or_else(|| panic!("{plan}"))["peak"]);
        let real = number(&planned(&scratch, "--nnodes 2", &format!("{line} --zero_stage 3"))["memory"]["peak"]);
        assert!((peak / real - 1.0).abs() < 0.02, "{size}: {peak} {real}");
    }
}

#[test]
fn a_row_longer_than_the_micro_batch_is_shown_as_such() {
    let scratch = Scratch::new();
    with_long_rows(&scratch);
    let line = "sft --model_name_or_path policy --dataset_name long.jsonl --output_dir out --per_device_train_batch_size 4 \
                --max_tokens_per_micro_batch 8";
    let plan = planned(&scratch, "", line);
    assert_eq!(plan["micro_batch"]["tokens"], plan["micro_batch"]["longest_row"]);
    // Rows are sorted by their length, so the last rank has the longest.
    let lens = [1, 1, 1, 1, 1, 9].map(|words| json!({"prompt": "The", "completion": " movie".repeat(words)}));
    scratch.write("sorted.jsonl", &lens.map(|row| format!("{row}\n")).concat());
    let flags =
        line.replace("long.jsonl", "sorted.jsonl").replace("per_device_train_batch_size 4", "train_batch_size 6");
    let micro_batch_tokens =
        |ranks: usize| planned(&scratch, &format!("--nproc_per_node {ranks}"), &flags)["micro_batch"]["tokens"].clone();
    assert_eq!(micro_batch_tokens(2), micro_batch_tokens(1));
    let table = scratch.succeeds(&format!("plan --calibrate=false {line} --max_steps 1"));
    for words in ["tokens (those of the longest row; at most 8 otherwise)", "KiB a token", "; 1 update: "] {
        assert!(table.contains(words), "no `{words}` in\n{table}");
    }
    assert_eq!((&plan["device"], &plan["precision"]), (&json!("cpu"), &json!("float32")));
}

#[test]
fn the_memory_of_a_gpu_is_that_of_the_visible_one_and_is_not_waited_for() {
    let scratch = Scratch::new();
    let script = "#!/bin/sh\ncase \"$*\" in *'-i 3'*) echo 90000;; *'-i GPU-a'*) exec sleep 60;; *) echo 1;; esac\n";
    std::fs::create_dir(scratch.path("bin")).unwrap();
    scratch.write("bin/nvidia-smi", script);
    std::fs::set_permissions(scratch.path("bin/nvidia-smi"), Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", scratch.path("bin").display(), std::env::var("PATH").unwrap());
    let plan = |gpus: &str| {
        let mut command = scratch.command(&format!("plan --json --calibrate=false {SFT} --device cuda"));
        let ran = output(command.env("PATH", &path).env("CUDA_VISIBLE_DEVICES", gpus));
        let plan: Value = serde_json::from_slice(&ran.stdout).unwrap();
        plan["memory"]["available"].clone()
    };
    assert_eq!(plan("3,0"), json!(90000u64 << 20));
    assert_eq!(plan("0"), json!(1u64 << 20));
    let start = Instant::now();
    assert_eq!(plan("GPU-a"), Value::Null);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

#[test]
fn a_run_that_does_not_fit_is_shown_with_remedies() {
    let scratch = with_model();
    let line = "sft --model_name_or_path big --dataset_name demos.jsonl --output_dir out";
    let whole = number(&planned(&scratch, "", line)["memory"]["peak"]);
    let memory = format!("--memory {:.0}", whole - 60e6);
    let plan = planned(&scratch, &memory, line);
    assert_eq!(plan["memory"]["fits"], json!(false));
    let remedies = plan["remedies"].as_array().unwrap();
    let lora = remedies.iter().find(|remedy| remedy["change"] == "--use_peft").unwrap();
    assert_eq!(lora["fits"], json!(true), "{lora}");
    assert!(number(&lora["saves"]) > 60e6);
    let four = remedies.iter().find(|remedy| remedy["change"] == "--use_peft --load_in_4bit").unwrap();
    assert_eq!(four["effect"], json!("trains adapters alone, frozen weights have 4 bits"));
    // The plan of that run has it too; the program itself takes a little more or less each time.
    let taken = planned(&scratch, &memory, &format!("{line} --use_peft --load_in_4bit"));
    assert!((number(&four["peak"]) - number(&taken["memory"]["peak"])).abs() < 2e6, "{four} {}", taken["memory"]);
    assert!(number(&four["peak"]) < number(&lora["peak"]), "{four} {lora}");
    let table = scratch.succeeds(&format!("plan --calibrate=false {memory} {line}"));
    for words in [
        "it DOES NOT FIT",
        "what would lower the peak",
        "--use_peft (trains adapters alone)",
        "fits",
        "optimizer step",
        "update: 8 rows",
    ] {
        assert!(table.contains(words), "no `{words}` in\n{table}");
    }
    let timed = scratch.succeeds(&format!("plan {line}"));
    assert!(
        timed.contains("it fits") && timed.contains("an update, ") && timed.contains("FLOP/s in training"),
        "{timed}"
    );
}

#[test]
fn times_are_sums_of_phases_with_any_precision_and_with_adapters() {
    let scratch = Scratch::new();
    for line in [PPO.to_string(), format!("{PPO} --use_peft --bf16"), format!("{SFT} --use_peft"), REWARD.to_string()] {
        let plan: Value = serde_json::from_str(&scratch.succeeds(&format!("plan --json {line}"))).unwrap();
        let seconds = |part: &str| number(&plan["time"][part]);
        assert!(seconds("training") > 0.0 && seconds("update") < 10.0, "{line}: {}", plan["time"]);
        let samples = line.starts_with("ppo");
        assert_eq!([seconds("rollout") > 0.0, seconds("seconds_per_token") > 0.0], [samples; 2], "{line}");
        let sum = seconds("rollout") + seconds("scoring") + seconds("training");
        assert!((seconds("update") / sum - 1.0).abs() < 1e-9, "{line}");
        assert!((seconds("total") / (number(&plan["work"]["updates"]) * sum) - 1.0).abs() < 1e-9, "{line}");
    }
}

#[test]
fn a_run_that_does_not_fit_warns_before_it_loads() {
    let scratch = Scratch::new();
    let shape = [
        ("hidden_size", 16384),
        ("intermediate_size", 65536),
        ("num_attention_heads", 128),
        ("num_hidden_layers", 200),
    ];
    for (name, size) in shape {
        scratch.edit_config("policy", name, size);
    }
    std::fs::remove_file(scratch.path("policy").join("model.safetensors")).unwrap();
    let ran = scratch.run(SFT);
    let lines: Vec<&str> = ran.stderr.lines().collect();
    assert_eq!((ran.code, lines.len()), (1, 2), "{}", ran.stderr);
    let start = "warning: memory: this run needs at least about ";
    assert!(lines[0].starts_with(start) && lines[0].contains("`rlhf plan sft ...`"), "{}", lines[0]);
    assert!(lines[1].starts_with("error: policy: expected model.safetensors"), "{}", lines[1]);
    // A teacher that does not fit beside a student that does.
    scratch.copy("student", "gpt_neox");
    let line = "distill --model_name_or_path student --teacher_model_name_or_path policy --dataset_name prompts.jsonl --output_dir out";
    let ran = scratch.run(line);
    assert!(ran.stderr.starts_with(start) && ran.stderr.contains("`rlhf plan distill ...`"), "{}", ran.stderr);
}

#[test]
fn a_pipeline_is_its_stages_whose_models_have_the_form_of_the_first() {
    let scratch = Scratch::new();
    let rows = |prompt: &&str| json!({"prompt": prompt, "chosen": " yes", "rejected": " no"}).to_string() + "\n";
    scratch.write("rows.jsonl", &PROMPTS.iter().map(rows).collect::<String>().repeat(4));
    let file = "output_dir: out\ndataset_name: rows.jsonl\nmodel_name_or_path: policy\nper_device_train_batch_size: 4\n\
                sft:\n  max_steps: 2\nreward:\n  max_steps: 2\nppo:\n  total_episodes: 8\n  response_length: 8\ndpo:\n  max_steps: 2\n\
                distill:\n  teacher_model_name_or_path: policy\n  max_steps: 2\n  max_completion_length: 8\n";
    scratch.write("run.yaml", file);
    let line = "pipeline --config run.yaml";
    let plan = planned(&scratch, "", line);
    let stages = plan["stages"].as_array().unwrap();
    let commands: Vec<&str> = stages.iter().map(|stage| stage["command"].as_str().unwrap()).collect();
    assert_eq!(commands, ["sft", "reward", "ppo", "dpo", "distill"]);
    let policy = &stages[0]["models"][0]["parameters"];
    assert_eq!(&stages[2]["models"][0]["parameters"], policy);
    let peaks = stages.iter().map(|stage| number(&stage["memory"]["peak"]));
    assert_eq!(number(&plan["peak"]), peaks.fold(0.0, f64::max));
    assert_eq!((&plan["fits"], &plan["seconds"]), (&json!(true), &Value::Null));
    let table = scratch.succeeds(&format!("plan --calibrate=false {line}"));
    assert!(table.contains("plan of rlhf reward (") && table.contains("pipeline: the largest peak is "), "{table}");
    assert!(!scratch.path("out").exists(), "a plan writes nothing");
    scratch.write("run.yaml", &file.replace("policy", "nowhere/model"));
    scratch.refuses(&format!("plan --calibrate=false {line}"), 1, &["sft: ", "nowhere/model"]);
}

#[test]
fn a_plan_of_generate_has_weights_cache_and_batches() {
    let scratch = with_model();
    let line = "generate --model big --dataset_name prompts.jsonl --max_new_tokens 40 --batch_size 4 --device cpu \
                --num_return_sequences 2 --output_file out.jsonl";
    let plan = planned(&scratch, "", line);
    let work = &plan["work"];
    assert_eq!((&work["updates"], &work["rows_per_update"]), (&json!(4), &json!(4)));
    let phase = &plan["memory"]["phases"][0];
    assert_eq!(phase["weights"], plan["models"][0]["weights"]);
    assert!(number(&phase["cache"]) > 0.0 && plan["micro_batch"] == Value::Null);
    assert_near_peak(&scratch, line);
    let timed = scratch.succeeds(&format!("plan {line}"));
    assert!(timed.contains("; 4 batches: ") && timed.contains(" a batch, "), "{timed}");
    let narrow = planned(&scratch, "--memory 1MB", &line.replace("--batch_size 4", "--batch_size 16"));
    let changes: Vec<&Value> = narrow["remedies"].as_array().unwrap().iter().map(|remedy| &remedy["change"]).collect();
    assert!(
        ["--batch_size 8", "--dtype bfloat16", "--load_in_4bit"].iter().all(|change| changes.contains(&&json!(change))),
        "{changes:?}"
    );
}

#[test]
fn a_plan_of_what_is_not_there_is_one_line() {
    let scratch = Scratch::new();
    for (line, code, words) in [
        (SFT.replace("policy", "nowhere/model"), 1, &["nowhere/model"][..]),
        (SFT.replace("demos.jsonl", "none.jsonl"), 1, &["none.jsonl"]),
        ("score --model policy".into(), 2, &["found `score`, which has no plan"]),
        ("generate --model policy".into(), 2, &["expected prompts as arguments or dataset_name"]),
        (PPO.replace("--reward_model_path reward", "--reward_model_path gone/judge"), 1, &["gone/judge"]),
    ] {
        scratch.refuses(&format!("plan --calibrate=false {line}"), code, words);
    }
    scratch.refuses(&format!("plan --memory lots {SFT}"), 2, &["--memory", "lots", "a size above 0"]);
    // Without its data a plan of PPO has the prompts that max_prompt_length allows.
    let line = PPO.replace("prompts.jsonl", "none.jsonl");
    scratch.refuses(&format!("plan --calibrate=false {line}"), 1, &["none.jsonl"]);
    let plan = planned(&scratch, "", &format!("{line} --max_prompt_length 20"));
    assert!(plan["notes"][0].as_str().unwrap().contains("max_prompt_length = 20"), "{}", plan["notes"]);
    assert_eq!(number(&plan["work"]["tokens_per_update"]), 4.0 * 28.0);
    assert_eq!(number(&plan["work"]["updates"]), 2.0);
    let line = line.replace("--total_episodes 8", "--num_train_epochs 3 --max_prompt_length 20");
    assert_eq!(planned(&scratch, "", &line)["work"]["updates"], Value::Null);
    assert!(
        scratch
            .succeeds(&format!("plan --calibrate=false {line}"))
            .contains("the number of updates depends on the data")
    );
    // Errors of settings, and of data that are there, are those of the run.
    for (flags, code, words) in [
        ("--max_prompt_length 4 --response_length 5000", 2, "response_length = 5000 leaves no token for a prompt"),
        ("--max_prompt_length 4000", 2, "max_prompt_length = 4000: expected at most"),
        ("--max_prompt_length 1", 1, "the prompt is too long: expected at most 1 tokens"),
    ] {
        scratch.refuses(&format!("plan --calibrate=false {PPO} {flags}"), code, &[words]);
    }
    // An adapter is planned as its base, which the run would look for on the hub.
    let adapter = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "nobody/no-model"});
    std::fs::create_dir(scratch.path("adapter")).unwrap();
    scratch.write("adapter/adapter_config.json", &adapter.to_string());
    let line = SFT.replace("policy", "adapter");
    scratch.refuses(&format!("plan --calibrate=false {line}"), 1, &["nobody/no-model"]);
}
