//! ZeRO: models divided over ranks compute and save what whole ones do.

use crate::support::{PROGRAM, assert_close, free_port, golden, init, join_ranks, run_as_ranks, start};
use rlhf::dist::{World, ZeroStage};
use rlhf::model::{
    Batch, CausalLm, CausalLmWithValueHead, LoraConfig, ModelOptions, Precision, SequenceClassifier, ValueHeadInit,
};
use rlhf::offload::Offload;
use rlhf::optim::{Optimizer, OptimizerConfig};
use rlhf::settings::SftConfig;
use rlhf::weights::Checkpoint;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use tch::{Device, Kind, Tensor};

const STAGES: [ZeroStage; 4] = [ZeroStage::Stage0, ZeroStage::Stage1, ZeroStage::Stage2, ZeroStage::Stage3];

/// AdamW with weight decay, which spares some parameters, clipping, and an epsilon that leaves round-off as small as it is.
fn optimizer() -> OptimizerConfig {
    let usual = SftConfig::new("m", "d", "o").optimizer;
    OptimizerConfig { weight_decay: 0.1, max_grad_norm: Some(0.5), adam_epsilon: 1e-4, ..usual }
}

const SEQUENCES: [&[i64]; 3] = [&[5, 9, 2, 7, 1, 3, 11], &[4, 8], &[6, 7, 8, 9, 10]];

fn spans() -> Vec<std::ops::Range<usize>> {
    SEQUENCES.iter().map(|sequence| 1..sequence.len()).collect()
}

fn tensors(checkpoint: &Checkpoint) -> BTreeMap<String, Tensor> {
    let read = |name: &str| (name.to_string(), checkpoint.read(name, Device::Cpu, Kind::Float).unwrap());
    checkpoint.names().map(read).collect()
}

fn assert_all_close(what: &str, found: &BTreeMap<String, Tensor>, expected: &BTreeMap<String, Tensor>, allowed: f64) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (name, expected) in expected {
        assert_close(&format!("{what}: {name}"), &found[name], expected, allowed);
    }
}

/// What a model computes, and what it and its optimizer save, after three steps of two micro-batches each.
struct Learned {
    logprobs: Tensor,
    norms: Vec<f64>,
    weights: BTreeMap<String, Tensor>,
    state: BTreeMap<String, Tensor>,
}

fn learn(model: &mut CausalLm, stage: ZeroStage, offload: bool, dir: &Path) -> Learned {
    model.set_trainable(true);
    model.shard(&World::single(), stage);
    let place = offload.then(|| Offload::to(dir));
    let mut optimizer = Optimizer::of_model(model, &optimizer(), place.as_ref()).unwrap();
    let norms = (0..3).map(|_| {
        for rows in [0..2, 2..3] {
            let (sequences, spans) = (&SEQUENCES[rows.clone()], &spans()[rows]);
            let loss = |_, now: &rlhf::model::TokenLogprobs| -now.logprobs.sum(Kind::Float) / 11.0;
            model.logprobs_backward(Batch::new(sequences, spans), 1.0, loss).unwrap();
        }
        optimizer.step(1e-2).unwrap()
    });
    let norms = norms.collect();
    let logprobs = tch::no_grad(|| model.token_logprobs(&SEQUENCES, &spans(), 1.0, false).unwrap().logprobs);
    model.save_pretrained(dir, &[0], None, usize::MAX).unwrap();
    optimizer.save(&dir.join("optimizer.safetensors")).unwrap();
    let state = tensors(&Checkpoint::open_file(&dir.join("optimizer.safetensors")).unwrap());
    let adapter = dir.join("adapter_model.safetensors");
    let weights = if adapter.is_file() { Checkpoint::open_file(&adapter) } else { Checkpoint::open(dir) };
    Learned { logprobs, norms, weights: tensors(&weights.unwrap()), state }
}

impl Learned {
    fn is(&self, what: &str, expected: &Self, allowed: f64) {
        assert_close(what, &self.logprobs, &expected.logprobs, 10.0 * allowed);
        for (found, expected) in self.norms.iter().zip(&expected.norms) {
            assert!((found - expected).abs() <= 10.0 * allowed * expected, "{what}: norm {found}, not {expected}");
        }
        assert_all_close(what, &self.weights, &expected.weights, allowed);
        assert_all_close(what, &self.state, &expected.state, allowed);
    }
}

fn load(name: &str, precision: Precision) -> CausalLm {
    let options = ModelOptions { precision, ..ModelOptions::default() };
    CausalLm::from_pretrained(&golden().join("models").join(name), options).unwrap()
}

#[test]
fn every_stage_trains_every_kind_of_model_alike() {
    let cases =
        ["llama_tied", "gpt2", "gpt_neox", "opt_proj_postln", "gemma2", "lfm2", "qwen3_5", "gpt_oss", "gemma4_moe"];
    for (name, checkpointing) in cases.into_iter().flat_map(|name| [(name, false), (name, true)]) {
        let run = |stage, offload| {
            let dir = tempfile::tempdir().unwrap();
            let mut model = load(name, Precision::F32);
            model.set_gradient_checkpointing(checkpointing);
            learn(&mut model, stage, offload, dir.path())
        };
        let whole = run(ZeroStage::Stage0, false);
        for stage in &STAGES[1..] {
            run(*stage, false).is(&format!("{name}, stage {stage}"), &whole, 2e-6);
        }
        run(ZeroStage::Stage3, true).is(&format!("{name}, offloaded"), &whole, 2e-6);
    }
}

#[test]
fn adapters_are_divided_beside_their_base() {
    let saved_modules = ["embed_tokens", "norm"].map(str::to_string).to_vec();
    let dora = LoraConfig { use_dora: true, modules_to_save: saved_modules, ..LoraConfig::default() };
    assert_divided_adapter("llama_untied", &LoraConfig::default());
    assert_divided_adapter("llama_tied", &dora);
}

fn assert_divided_adapter(name: &str, lora: &LoraConfig) {
    let run = |stage| {
        let dir = tempfile::tempdir().unwrap();
        let mut model = load(name, Precision::F32);
        model.add_adapter(lora, 7).unwrap();
        let base = model.base().unwrap();
        let before = tch::no_grad(|| base.token_logprobs(&SEQUENCES, &spans(), 1.0, false).unwrap().logprobs);
        let learned = learn(&mut model, stage, false, dir.path());
        // The reference is a view of the policy: it sees the divided memory, and no adapter.
        let after = tch::no_grad(|| base.token_logprobs(&SEQUENCES, &spans(), 1.0, false).unwrap().logprobs);
        assert_close("the base", &after, &before, 0.0);
        learned
    };
    let whole = run(ZeroStage::Stage0);
    for stage in &STAGES[1..] {
        run(*stage).is(&format!("stage {stage}"), &whole, 2e-6);
    }
}

#[test]
fn low_precision_computes_with_copies_that_do_not_outlive_a_layer() {
    let run = |stage| {
        let dir = tempfile::tempdir().unwrap();
        learn(&mut load("llama_tied", Precision::Bf16), stage, false, dir.path())
    };
    let whole = run(ZeroStage::Stage0);
    for stage in &STAGES[1..] {
        // Products are the same bits; sums of micro-batches in bf16 kernels round in another order.
        run(*stage).is(&format!("stage {stage}"), &whole, 1e-3);
    }
}

#[test]
fn a_divided_model_saves_loads_and_generates_as_a_whole_one() {
    use rlhf::generate::{GenerationConfig, Sampling, generate};
    let config = GenerationConfig {
        seed: 3,
        num_return_sequences: 2,
        ..GenerationConfig::new(Sampling::at_temperature(0.7), 8)
    };
    let dir = tempfile::tempdir().unwrap();
    let mut whole = load("gpt_neox", Precision::F32);
    learn(&mut whole, ZeroStage::Stage0, false, dir.path());
    let mut divided = load("gpt_neox", Precision::F32);
    divided.set_trainable(true);
    divided.shard(&World::single(), ZeroStage::Stage3);
    let options = ModelOptions::default();
    let frozen = CausalLm::from_pretrained(dir.path(), options).unwrap();
    frozen.shard(&World::single(), ZeroStage::Stage3);
    let expected = generate(&whole, &SEQUENCES, &config).unwrap();
    assert_eq!(generate(&frozen, &SEQUENCES, &config).unwrap(), expected, "layer by layer");
    let gathered = frozen.gathered().unwrap();
    assert_eq!(generate(&frozen, &SEQUENCES, &config).unwrap(), expected, "gathered");
    drop(gathered);
    let again = tempfile::tempdir().unwrap();
    frozen.save_pretrained(again.path(), &[0], None, 40_000).unwrap();
    let (found, expected) = (Checkpoint::open(again.path()).unwrap(), Checkpoint::open(dir.path()).unwrap());
    assert_all_close("saved in several files", &tensors(&found), &tensors(&expected), 0.0);
    let copy = frozen.frozen_copy().unwrap();
    assert_close("a copy", &copy.logits(&SEQUENCES).unwrap()[0], &whole.logits(&SEQUENCES).unwrap()[0], 0.0);
}

#[test]
fn groups_of_responses_of_several_ranks_are_those_of_one_at_stages_0_and_3() {
    for world in [2, 4] {
        run_as_ranks("sharding::groups_of_responses_on_one_of_several_ranks", world, &[]);
    }
}

#[test]
#[ignore = "one rank of the test above, which starts it"]
fn groups_of_responses_on_one_of_several_ranks() {
    join_ranks();
    let world = World::of_process();
    // In an encoder-decoder a decoding step has fewer layers than the pass over a prompt that another rank runs meanwhile.
    ["llama_tied", "t5"].iter().for_each(|name| assert_same_groups(&world, name));
}

fn assert_same_groups(world: &World, name: &str) {
    use rlhf::generate::{GenerationConfig, Sampling, generate, generate_on};
    let whole = load(name, Precision::F32);
    let divided = load(name, Precision::F32);
    divided.shard(world, ZeroStage::Stage3);
    // Responses stop at different lengths, so the ranks run different numbers of passes; with 4 ranks one has no prompt.
    let stops: Vec<i64> = (0..40).collect();
    for batch_size in [2, 3, 8] {
        let config = GenerationConfig {
            stop_token_ids: stops.clone(),
            num_return_sequences: 3,
            batch_size,
            first_row: 5,
            ..GenerationConfig::new(Sampling::at_temperature(0.9), 9)
        };
        let expected = generate(&whole, &SEQUENCES, &config).unwrap();
        assert!(expected.iter().any(|response| response.tokens.len() < 9), "a response stops early");
        for (model, name) in [(&whole, "whole"), (&divided, "divided")] {
            let found = generate_on(world, model, &SEQUENCES, &config).unwrap();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!((&found.tokens, found.finish), (&expected.tokens, expected.finish), "{name} model");
                let pairs = found.logprobs.iter().zip(&expected.logprobs);
                assert!(pairs.map(|(a, b)| (a - b).abs()).all(|error| error < 1e-5), "{name} model: {found:?}");
            }
        }
    }
}

#[test]
fn two_ranks_end_with_the_same_bits_where_gradients_are_reduced_after_the_backward_pass_and_within_it() {
    run_as_ranks("sharding::bits_on_one_of_two_ranks", 2, &[]);
}

#[test]
#[ignore = "one rank of the test above, which starts it"]
fn bits_on_one_of_two_ranks() {
    join_ranks();
    let world = World::of_process();
    let rows = [0..2, 2..3][world.rank()].clone();
    for name in ["llama_tied", "gpt_neox", "lfm2", "gpt_oss"] {
        let run = |stage| {
            let mut model = load(name, Precision::F32);
            // At stage 1 it gives each layer a backward pass of its own too.
            model.set_gradient_checkpointing(true);
            model.set_trainable(true);
            model.shard(&world, stage);
            let mut optimizer = Optimizer::of_model(&model, &optimizer(), None).unwrap();
            let norms = [(); 3].map(|()| {
                let (sequences, spans) = (&SEQUENCES[rows.clone()], &spans()[rows.clone()]);
                let loss = |_, now: &rlhf::model::TokenLogprobs| -now.logprobs.sum(Kind::Float) / 11.0;
                model.logprobs_backward(Batch::new(sequences, spans), 1.0, loss).unwrap();
                optimizer.reduce_gradients(&world).unwrap();
                optimizer.step(1e-2).unwrap()
            });
            let _gathered = model.gathered().unwrap();
            let weights = model.params().iter().map(|param| (param.name.clone(), param.tensor.detach().copy()));
            (norms, weights.collect::<BTreeMap<String, Tensor>>())
        };
        let (norms, weights) = run(ZeroStage::Stage1);
        for stage in [ZeroStage::Stage2, ZeroStage::Stage3] {
            let found = run(stage);
            assert_eq!(found.0, norms, "{name}, stage {stage}: norms");
            assert_all_close(&format!("{name}, stage {stage}"), &found.1, &weights, 0.0);
        }
    }
}

#[test]
fn classifiers_and_value_heads_are_divided_too() {
    let values = |stage| {
        let dir = golden().join("models/llama_untied_cls");
        let mut model = SequenceClassifier::from_pretrained(&dir, None, ModelOptions::default()).unwrap();
        model.choose_label(Some("0"), &dir).unwrap();
        model.set_trainable(false);
        model.shard(&World::single(), stage);
        model.scores(&SEQUENCES).unwrap()
    };
    let on_trunk = |stage| {
        let lm = load("llama_tied", Precision::F32);
        let (mut policy, head) = CausalLmWithValueHead::from_lm(lm, ValueHeadInit::Fresh(5)).unwrap().into_parts();
        policy.set_trainable(true);
        policy.shard(&World::single(), stage);
        let mut optimizer = Optimizer::of_model(&policy, &optimizer(), None).unwrap();
        let spans = spans();
        for _ in 0..2 {
            let batch = rlhf::model::JointBatch {
                sequences: &SEQUENCES,
                token_spans: &spans,
                value_spans: &spans,
                prompt_lens: None,
            };
            let token_loss = |_, now: &rlhf::model::TokenLogprobs| -now.logprobs.sum(Kind::Float);
            let value_loss = |values: &Tensor| (values - 1.0).square().sum(Kind::Float);
            head.backward(&policy, batch, 1.0, token_loss, value_loss).unwrap();
            optimizer.step(1e-2).unwrap();
        }
        tch::no_grad(|| head.values_at(&policy, &SEQUENCES, &spans).unwrap())
    };
    for stage in &STAGES[1..] {
        assert_close("scores", &values(*stage), &values(ZeroStage::Stage0), 0.0);
        assert_close("values", &on_trunk(*stage), &on_trunk(ZeroStage::Stage0), 2e-5);
    }
}

/// Runs `rlhf` with `args` as `world` processes of one thread each, which must all succeed.
#[track_caller]
fn run_ranks(world: usize, args: &[String]) {
    let port = free_port().to_string();
    let ranks = (0..world).map(|rank| {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("OMP_NUM_THREADS", "1").env("OMP_WAIT_POLICY", "passive");
        if world > 1 {
            let (rank, world) = (rank.to_string(), world.to_string());
            let numbers =
                [("RANK", &rank), ("LOCAL_RANK", &rank), ("WORLD_SIZE", &world), ("LOCAL_WORLD_SIZE", &world)];
            command.envs(numbers).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        }
        start(&mut command)
    });
    let ranks: Vec<_> = ranks.collect();
    for (rank, process) in ranks.into_iter().enumerate() {
        let output = process.wait();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank} of {world}: {}\n{args:?}\n{text}", output.status);
    }
}

/// Flags of a PPO run of three updates of 8 responses, on `world` ranks; some responses stop early and others do not stop.
fn ppo_args(world: usize, dir: &Path, out: &str) -> Vec<String> {
    let prompts = dir.join("prompts.jsonl");
    let rows = ["The movie", "A film", "the capital of France", "do", "human", "a sing", "2024", "is it"];
    let rows = rows.map(|prompt| format!("{}\n", serde_json::json!({"prompt": prompt})));
    std::fs::write(&prompts, rows.concat()).unwrap();
    let paths = [
        ("sft_model_path", init("llama_policy")),
        ("reward_model_path", init("llama_reward")),
        ("model_name_or_path", golden().join("models/gpt_neox")),
        ("dataset_name", prompts),
        ("output_dir", dir.join(out)),
    ];
    let numbers = "--response_length 12 --temperature 0.4 --stop_token_id 192 --total_episodes 24 --learning_rate 1e-3 \
                   --adam_epsilon 1e-5 --num_sample_generations 0 --save_steps 1 --gradient_accumulation_steps 1";
    let mut args = vec!["ppo".to_string()];
    args.extend(paths.iter().flat_map(|(name, path)| [format!("--{name}"), path.display().to_string()]));
    args.extend(numbers.split_whitespace().map(String::from));
    args.extend(["--per_device_train_batch_size".into(), (8 / world).to_string()]);
    args
}

/// Runs PPO with these flags beside those of [`ppo_args`]; returns the output folder.
#[track_caller]
fn ppo(world: usize, dir: &Path, out: &str, flags: &str) -> PathBuf {
    let mut args = ppo_args(world, dir, out);
    args.extend(flags.split_whitespace().map(String::from));
    run_ranks(world, &args);
    dir.join(out)
}

/// The tensors of both models, the average if there is one, and both optimizers' states after the last update.
fn results(out: &Path) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::new();
    let last = out.join("checkpoint-3");
    for folder in [".", "value_model", "ema"] {
        for file in ["model.safetensors", "adapter_model.safetensors", "optimizer.safetensors"] {
            let path = last.join(folder).join(file);
            if path.is_file() {
                let found = tensors(&Checkpoint::open_file(&path).unwrap());
                all.extend(found.into_iter().map(|(name, tensor)| (format!("{folder}/{file}/{name}"), tensor)));
            }
        }
    }
    assert!(!all.is_empty(), "{}: no checkpoint", last.display());
    all
}

#[test]
fn ppo_ends_with_the_same_weights_at_every_stage_and_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let alone = results(&ppo(1, dir.path(), "alone", "--enable_ema"));
    for world in [1, 2, 4] {
        let mut first: Option<BTreeMap<String, Tensor>> = None;
        for stage in 0..4 {
            let (what, flags) = (format!("{world}-{stage}"), format!("--enable_ema --zero_stage {stage}"));
            let found = results(&ppo(world, dir.path(), &what, &flags));
            // A fiftieth of a step; the models move by about 3e-3.
            assert_all_close(&format!("{world} ranks, stage {stage}"), &found, &alone, 2e-5);
            match &first {
                Some(first) => assert_all_close(&format!("{world} ranks, stage {stage} and 0"), &found, first, 1e-6),
                None => first = Some(found),
            }
        }
    }
}

#[test]
fn ranks_that_train_one_model_after_the_other_take_the_steps_of_both_at_once_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let stages = (0..4).map(|stage| format!("--zero_stage {stage}"));
    for (index, flags) in stages.chain(["--optim adamw_bf16 --bf16".into()]).enumerate() {
        let run = |what: &str, more: &str| {
            results(&ppo(2, dir.path(), &format!("{what}-{index}"), &format!("{flags} {more}")))
        };
        // No ratio is that large, but one that could be keeps the steps of both models together.
        let (apart, together) = (run("apart", ""), run("together", "--ratio_threshold 1e9"));
        assert_all_close(&flags, &apart, &together, 0.0);
    }
}

#[test]
fn a_checkpoint_resumes_at_any_stage_and_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let whole = results(&ppo(1, dir.path(), "whole", ""));
    let runs = [(4, 3, 1, 0), (2, 1, 4, 3), (1, 0, 2, 2), (2, 3, 2, 3)];
    for (world, stage, other_world, other_stage) in runs {
        let what = format!("{world}-{stage}-{other_world}-{other_stage}");
        let started = ppo(world, dir.path(), &what, &format!("--zero_stage {stage}"));
        let flags =
            format!("--zero_stage {other_stage} --resume_from_checkpoint {}", started.join("checkpoint-1").display());
        let resumed = ppo(other_world, dir.path(), &format!("{what}-resumed"), &flags);
        assert_all_close(&what, &results(&resumed), &whole, 2e-5);
    }
}

#[test]
fn adapters_a_value_head_bf16_and_lockstep_decoding_run_at_stage_3() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("lora", "--use_peft --lora_r 4"),
        ("dora", "--use_peft --lora_r 4 --use_dora --lora_modules_to_save embed_tokens,lm_head"),
        ("head", "--value_head true"),
        ("lockstep", "--ds3_gather_for_generation false"),
        ("offload", "--offload_optimizer true"),
        ("checkpointing", "--gradient_checkpointing true"),
        ("recomputed", "--kl_estimator full --kl_in_loss true"),
    ];
    for (name, flags) in cases {
        let alone = results(&ppo(1, dir.path(), &format!("{name}-1"), &flags.replace("--offload_optimizer true", "")));
        let flags = format!("{flags} --zero_stage 3");
        let found = results(&ppo(2, dir.path(), &format!("{name}-2"), &flags));
        assert_all_close(name, &found, &alone, 5e-5);
    }
    // In bf16 nothing is promised but that it runs.
    results(&ppo(2, dir.path(), "bf16", "--bf16 true --zero_stage 3"));
}
