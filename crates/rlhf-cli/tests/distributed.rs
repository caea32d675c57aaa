//! Runs of several ranks: the number of ranks changes no token, and metrics and weights by no more than the number of threads
//! does. All ranks have the same bits.

pub(crate) mod failures;

use crate::cli::{PROMPTS, Ran, Scratch, json_lines, timeless};
use crate::support::{Process, Started, assert_close, free_port, join_ranks, run_as_ranks, start};
use rlhf::Error;
use rlhf::dist::World;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use tch::Tensor;

/// Longest run of a test.
const LIMIT: Duration = Duration::from_secs(120);

/// Several ranks of one run, each a process.
struct Ranks(Vec<Started>);

impl Ranks {
    /// Starts the ranks `which` of a world of `world` with the arguments `line`; `change` sets more for one rank.
    fn start_some(
        scratch: &Scratch,
        world: usize,
        which: &[usize],
        line: &str,
        change: impl Fn(usize, &mut Command),
    ) -> Self {
        let port = free_port();
        let spawn = |&rank: &usize| {
            let mut command = scratch.command(line);
            let numbers = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)];
            command.envs(numbers.map(|(name, number)| (name, number.to_string())));
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            command.env("OMP_WAIT_POLICY", "passive").env("RLHF_CHECK_RANKS", "1").env_remove("RUST_BACKTRACE");
            change(rank, &mut command);
            start(&mut command)
        };
        Self(which.iter().map(spawn).collect())
    }

    fn start(scratch: &Scratch, world: usize, line: &str, change: impl Fn(usize, &mut Command)) -> Self {
        Self::start_some(scratch, world, &Vec::from_iter(0..world), line, change)
    }

    /// Waits for all ranks, and returns what each left.
    #[track_caller]
    fn wait(self, what: &str) -> Vec<Ran> {
        self.wait_for_others(what, usize::MAX)
    }

    /// Waits for all ranks but `stopped`, which is killed when they have ended.
    #[track_caller]
    fn wait_for_others(self, what: &str, stopped: usize) -> Vec<Ran> {
        let began = Instant::now();
        let pids: Vec<String> = self.0.iter().map(|child| child.id().to_string()).collect();
        let waiting: Vec<_> = self.0.into_iter().map(|child| thread::spawn(|| child.wait())).collect();
        loop {
            let running = Vec::from_iter((0..waiting.len()).filter(|&rank| !waiting[rank].is_finished()));
            if running.is_empty() {
                break;
            }
            if running == [stopped] || began.elapsed() > LIMIT {
                let _ = Command::new("kill").arg("-KILL").args(running.iter().map(|&rank| &pids[rank])).status();
            }
            thread::sleep(Duration::from_millis(5));
        }
        let ran: Vec<Ran> = waiting.into_iter().map(|thread| Ran::from(thread.join().unwrap())).collect();
        let all = || ran.iter().map(|ran| format!("{}: {}", ran.code, ran.stderr)).collect::<Vec<_>>().join("\n");
        assert!(began.elapsed() < LIMIT, "{what}: the ranks hang:\n{}", all());
        ran
    }
}

/// Runs `line` on `world` ranks, which must succeed; only rank 0 may print.
#[track_caller]
fn succeeds(scratch: &Scratch, world: usize, line: &str) -> String {
    let ran = Ranks::start(scratch, world, line, |_, _| ()).wait(line);
    for (rank, ran) in ran.iter().enumerate() {
        assert!(ran.code == 0, "{line}: rank {rank} of {world}: {}", ran.stderr);
        assert!(rank == 0 || (ran.stdout.is_empty() && ran.stderr.is_empty()), "rank {rank} prints {}", ran.stderr);
    }
    ran.into_iter().next().unwrap().stdout
}

/// All files below `dir`, but those of checkpoints.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let is_checkpoint = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("checkpoint-"));
        match path.is_dir() {
            true if is_checkpoint => {}
            true => found.extend(files(&path)),
            false => found.push(path),
        }
    }
    found
}

/// Tensors of the models in a run's folder, by file and name.
fn weights(dir: &Path) -> BTreeMap<String, Tensor> {
    let mut all = BTreeMap::new();
    for path in files(dir).into_iter().filter(|path| path.extension().is_some_and(|end| end == "safetensors")) {
        let file = path.strip_prefix(dir).unwrap().display().to_string();
        let tensors = Tensor::read_safetensors(&path).unwrap();
        all.extend(tensors.into_iter().map(|(name, tensor)| (format!("{file}: {name}"), tensor)));
    }
    all
}

/// Responses in the sample files of a run, by file.
fn responses(dir: &Path) -> BTreeMap<String, Vec<Value>> {
    let samples = dir.join("samples");
    if !samples.is_dir() {
        return BTreeMap::new();
    }
    let named_rows = |path: PathBuf| {
        let rows = json_lines(&std::fs::read_to_string(&path).unwrap());
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, rows.into_iter().map(|row| json!([row["prompt"], row["response"], row["finish_reason"]])).collect())
    };
    files(&samples).into_iter().map(named_rows).collect()
}

/// Distances between two runs: of metrics, relative and absolute, and of weights.
struct Distance(f64, f64, f64);

/// That of runs in f32, as between one thread and two. The KL of the first updates is near 0.
const F32: Distance = Distance(1e-4, 2e-5, 2e-5);

/// Panics unless two runs sampled the same responses and are as near as runs in f32.
#[track_caller]
fn same(scratch: &Scratch, found: &str, expected: &str) {
    near(scratch, found, expected, &F32);
}

/// Panics unless two runs sampled the same responses and are this near.
#[track_caller]
fn near(scratch: &Scratch, found: &str, expected: &str, distance: &Distance) {
    let &Distance(relative, absolute, between_weights) = distance;
    let (found_dir, expected_dir) = (scratch.path(found), scratch.path(expected));
    assert_eq!(responses(&found_dir), responses(&expected_dir), "{found}: responses");
    let (lines, expected_lines) = (timeless(scratch.metrics(found)), timeless(scratch.metrics(expected)));
    assert_eq!(lines.len(), expected_lines.len(), "{found}: lines");
    for (line, expected_line) in lines.iter().zip(&expected_lines) {
        assert!(line.keys().eq(expected_line.keys()), "{found}: {:?}", line.keys());
        for (name, expected) in expected_line {
            let (found_number, expected) = (line[name].as_f64(), expected.as_f64());
            let near = match (found_number, expected) {
                (Some(found), Some(expected)) => (found - expected).abs() <= relative * expected.abs() + absolute,
                (found, expected) => found == expected,
            };
            assert!(near, "{found}: step {}: {name} is {found_number:?}, not {expected:?}", line["step"]);
        }
    }
    let (weights, expected_weights) = (weights(&found_dir), weights(&expected_dir));
    assert!(weights.keys().eq(expected_weights.keys()) && !weights.is_empty(), "{found}: {:?}", weights.keys());
    for (name, expected) in &expected_weights {
        assert_close(&format!("{found}: {name}"), &weights[name], expected, between_weights);
    }
}

/// Panics unless two runs left the same bits.
#[track_caller]
pub(crate) fn identical(scratch: &Scratch, found: &str, expected: &str) {
    assert_eq!(timeless(scratch.metrics(found)), timeless(scratch.metrics(expected)), "{found}: metrics");
    let (weights, expected_weights) = (weights(&scratch.path(found)), weights(&scratch.path(expected)));
    assert!(weights.keys().eq(expected_weights.keys()) && !weights.is_empty(), "{found}: {:?}", weights.keys());
    for (name, expected) in &expected_weights {
        assert!(weights[name] == *expected, "{found}: {name}: other bits than {expected}");
    }
}

/// Runs `line` on one rank and on each of `worlds`, and compares; `4/WORLD` in it is that number.
#[track_caller]
fn worlds_agree(scratch: &Scratch, name: &str, line: &str, worlds: &[usize]) {
    let command = |world: usize| {
        let line = [2, 4]
            .iter()
            .fold(line.to_string(), |line, rows| line.replace(&format!("{rows}/WORLD"), &(rows / world).to_string()));
        format!("{line} --output_dir {name}-{world}")
    };
    scratch.succeeds(&command(1));
    for &world in worlds {
        let out = format!("{name}-{world}");
        succeeds(scratch, world, &command(world));
        same(scratch, &out, &format!("{name}-1"));
    }
}

/// A folder with data of rows of different lengths.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    let rows = |row: &dyn Fn(usize, &str) -> Value| -> String {
        let rows = PROMPTS.into_iter().cycle().enumerate().take(14);
        rows.map(|(at, prompt)| format!("{}\n", row(at, prompt))).collect()
    };
    let more = |at: usize| " and then some".repeat(1 + at % 4);
    scratch.write("prompts.jsonl", &rows(&|at, prompt| json!({"prompt": format!("{prompt} {at}")})));
    scratch.write("demos.jsonl", &rows(&|at, prompt| json!({"prompt": prompt, "completion": more(at)})));
    scratch.write(
        "pairs.jsonl",
        &rows(&|at, prompt| json!({"prompt": prompt, "chosen": format!(" yes{}", more(at)), "rejected": " no, no"})),
    );
    scratch
}

/// Steps a hundred times the tolerance of the weights, and an epsilon that leaves round-off as small as it is: without it Adam
/// turns a gradient of 1e-9, which is noise, into a whole step.
const STEPS: &str = "--learning_rate 1e-3 --adam_epsilon 1e-4 --seed 3";

/// Two updates.
const PPO: &str = "ppo --sft_model_path policy --reward_model_path reward --dataset_name prompts.jsonl --response_length 8 \
                   --stop_token_id 192 --temperature 0.4 --print_answers";

#[test]
fn values_of_ranks_arrive_in_order_with_the_bits_of_their_numbers() {
    run_as_ranks("distributed::values_on_one_of_several_ranks", 3, &[]);
}

#[test]
#[ignore = "one rank of the test above, which starts it"]
fn values_on_one_of_several_ranks() {
    join_ranks();
    let world = World::of_process();
    let rank = world.rank();
    let value = |rank: usize| (0.1 / (rank + 3) as f64, 0.1 / (rank + 3) as f32, vec![format!("rank {rank}\n"); rank]);
    assert_eq!(world.gather(value(rank)).unwrap(), [value(0), value(1), value(2)]);
    assert_eq!(world.broadcast(value(rank)).unwrap(), value(0));
    assert_eq!(world.on_main(|| Ok(rank)).unwrap(), (rank == 0).then_some(0));
    let error = world.on_main(|| Err::<(), _>(Error::Run(format!("of {rank}")))).unwrap_err();
    assert!(error.to_string() == "rank 0: of 0" && world.in_step(&error), "{error}");
    // The ranks are still in step.
    assert_eq!(world.gather(rank).unwrap(), [0, 1, 2]);
}

#[test]
fn sft_and_reward_models_train_alike_on_any_number_of_ranks() {
    let scratch = scratch();
    let sft =
        format!("sft --model_name_or_path policy --dataset_name demos.jsonl --max_steps 3 --logging_steps 2 {STEPS}");
    let eval = "--eval_split_size 3 --eval_steps 1 --metric_for_best_model eval_loss --per_device_eval_batch_size 2";
    worlds_agree(&scratch, "sft", &format!("{sft} {eval} --train_batch_size 3"), &[2, 4]);
    // Dropout is drawn by the number of a row among all of its update.
    let lora = "--use_peft --lora_dropout 0.2 --packing --max_length 40 --train_batch_size 4 --zero_stage 2";
    worlds_agree(&scratch, "packed", &format!("{sft} {lora}"), &[2]);
    let reward = format!(
        "reward --model_name_or_path reward --dataset_name pairs.jsonl --max_steps 3 --logging_steps 2 {STEPS}"
    );
    let eval = eval.replace("eval_loss", "eval_accuracy");
    worlds_agree(&scratch, "reward", &format!("{reward} {eval} --train_batch_size 6 --use_peft"), &[2]);
    let tokens = "--pair_loss tokens_unpadded --center_rewards_coefficient 0.1 --train_batch_size 3 --zero_stage 3";
    worlds_agree(&scratch, "tokens", &format!("{reward} {tokens}"), &[4]);

    let measured = "reward --eval_only --model_name_or_path tokens-1 --dataset_name pairs.jsonl --output_dir none";
    let number = |text: &str, name: &str| json_lines(text)[0][name].as_f64().unwrap();
    let (one, three) = (scratch.succeeds(measured), succeeds(&scratch, 3, measured));
    for name in ["pairs", "eval_loss", "eval_accuracy", "eval_margin", "eval_mean_reward"] {
        let (one, three) = (number(&one, name), number(&three, name));
        assert!((one - three).abs() <= 1e-4 * one.abs(), "{name}: {three} and {one}");
    }
}

#[test]
fn distillation_is_alike_on_any_number_of_ranks() {
    let scratch = scratch();
    let distill = format!(
        "distill --model_name_or_path policy --teacher_model_name_or_path teacher --dataset_name demos.jsonl --max_steps 3 --logging_steps 2 \
         --max_completion_length 5 {STEPS}"
    );
    scratch.succeeds(
        "sft --model_name_or_path policy --dataset_name demos.jsonl --output_dir teacher --max_steps 1 --learning_rate 5e-2",
    );
    let eval = "--eval_split_size 5 --eval_steps 1 --metric_for_best_model eval_loss --per_device_eval_batch_size 2";
    worlds_agree(&scratch, "own", &format!("{distill} {eval} --train_batch_size 3 --log_completions"), &[2]);
    let sharded = "--lmbda 0.5 --beta 0.5 --train_batch_size 6 --per_device_train_batch_size 3 --zero_stage 3";
    worlds_agree(&scratch, "sharded", &format!("{distill} {sharded} --eval_split_size 5 --eval_steps 2"), &[2]);
    let lora = "--use_peft --lora_dropout 0.2 --loss_type reverse_kl_advantage --train_batch_size 4 --zero_stage 3";
    worlds_agree(&scratch, "lora", &format!("{distill} {lora}"), &[2]);
}

#[test]
fn dpo_trains_alike_on_any_number_of_ranks() {
    let scratch = scratch();
    let dpo =
        format!("dpo --model_name_or_path policy --dataset_name pairs.jsonl --max_steps 3 --logging_steps 2 {STEPS}");
    let eval = "--eval_split_size 5 --eval_steps 1 --metric_for_best_model eval_rewards/margins --per_device_eval_batch_size 2";
    worlds_agree(
        &scratch,
        "sigmoid",
        &format!("{dpo} {eval} --train_batch_size 3 --sync_ref_model --ref_model_sync_steps 2"),
        &[2],
    );
    let sorted = "--loss_type aot sft --train_batch_size 6 --per_device_train_batch_size 3 --zero_stage 3";
    worlds_agree(&scratch, "sorted", &format!("{dpo} {sorted} --eval_split_size 5 --eval_steps 2"), &[2]);
    let lora = "--use_peft --lora_dropout 0.2 --disable_dropout false --precompute_ref_log_probs --train_batch_size 4";
    worlds_agree(
        &scratch,
        "lora",
        &format!("{dpo} {lora} --unsupervised_dataset_name demos.jsonl --unsup_coef 0.5"),
        &[2],
    );
}

#[test]
fn optimizers_with_small_states_step_alike_on_every_rank() {
    let scratch = scratch();
    // A gradient that is off by its last bit may get the next code of 8 bits, or the other neighbour in bf16; Adafactor makes whole steps of
    // gradients that are round-off alone, those of the biases of keys. The ranks of a run have the same bits after every update, which
    // the runs check themselves.
    let (near_codes, near_steps) = (Distance(1e-3, 1e-4, 1e-4), Distance(0.02, 0.01, 0.01));
    for (optim, flags, distance) in
        [("adamw_8bit", "", &near_codes), ("adafactor", "", &near_steps), ("adamw_bf16", "--bf16", &near_steps)]
    {
        let line = format!(
            "sft --model_name_or_path policy --dataset_name demos.jsonl --max_steps 3 --train_batch_size 4 {STEPS} \
             --optim {optim} {flags}"
        );
        // Weights that are rounded to bf16 are a warning.
        succeeds(&scratch, 1, &format!("{line} --output_dir {optim}-1"));
        succeeds(&scratch, 2, &format!("{line} --output_dir {optim}-2"));
        near(&scratch, &format!("{optim}-2"), &format!("{optim}-1"), distance);
    }
}

#[test]
fn ppo_trains_alike_on_any_number_of_ranks_and_a_repeated_run_has_the_same_bits() {
    let scratch = scratch();
    // An optimizer step of 3 rows is smaller than a world of 4.
    let eval = "--eval_split_size 3 --eval_steps 1 --num_eval_prompts 3 --metric_for_best_model eval/score";
    let line = format!(
        "{PPO} {STEPS} {eval} --train_batch_size 6 --num_mini_batches 2 --total_episodes 12 \
         --num_sample_generations 2 --whiten_rewards --entropy_coef 0.01 --target_kl 0.5 --reward length:target=3 \
         --reward_normalize length=mean_std"
    );
    worlds_agree(&scratch, "ppo", &line, &[2, 4]);
    succeeds(&scratch, 2, &format!("{line} --output_dir repeated"));
    identical(&scratch, "repeated", "ppo-2");
}

#[test]
fn every_variant_of_ppo_trains_alike_on_two_ranks() {
    let scratch = scratch();
    let small = "--train_batch_size 4 --total_episodes 8 --num_sample_generations 0";
    let cases = [
        ("lora", format!("{PPO} {small} --use_peft --lora_r 4 --zero_stage 3")),
        ("full", format!("{PPO} {small} --kl_in_loss --kl_estimator full --num_mini_batches 2 --whiten_advantages mini_batch")),
        ("one", format!("{PPO} {small} --whiten_advantages none").replace("--response_length 8", "--response_length 1")),
        (
            "legacy",
            "ppo --preset trl-legacy --model_name policy --query_dataset prompts.jsonl --reward length:target=3 \
             --response_length 8 --batch_size 4 --mini_batch_size 2 --total_episodes 8 --print_answers"
                .into(),
        ),
        (
            "dschat",
            "ppo --preset deepspeed-chat --actor_model_name_or_path policy --critic_model_name_or_path reward \
             --dataset_name prompts.jsonl --response_length 8 --max_prompt_length 20 --per_device_generation_batch_size 4/WORLD \
             --per_device_training_batch_size 2/WORLD --num_warmup_steps 0 --enable_ema --unsupervised_dataset_name texts.jsonl \
             --unsup_coef 2 --actor_zero_stage 3 --critic_zero_stage 1 --print_answers"
                .into(),
        ),
    ];
    scratch.write("texts.jsonl", &format!("{}\n", json!({"text": "a film and the movie ".repeat(20)})).repeat(8));
    for (name, line) in cases {
        worlds_agree(&scratch, name, &format!("{line} {STEPS}"), &[2]);
    }
}

#[test]
fn a_rank_without_rows_takes_part_where_the_critic_is_a_head_on_the_policy() {
    let scratch = scratch();
    // The evaluation has one row, and in bf16 log-probabilities and values are those of one pass.
    let eval = "--eval_split_size 1 --eval_steps 1 --num_eval_prompts 1 --num_sample_generations 0";
    let line = format!("{PPO} {eval} --train_batch_size 4 --total_episodes 4 --value_head --bf16 --output_dir head");
    succeeds(&scratch, 2, &line);
    assert!(scratch.metrics("head").iter().all(|row| row["eval/score"].is_number()));
}

#[test]
fn adapters_on_quantized_bases_train_alike_on_two_ranks_whether_the_rest_is_divided_or_not() {
    let scratch = scratch();
    let line = format!(
        "{PPO} {STEPS} --train_batch_size 4 --total_episodes 8 --num_sample_generations 0 --use_peft --lora_r 4"
    );
    for (name, flags) in [
        ("four", "--load_in_4bit --use_bnb_nested_quant --zero_stage 0"),
        ("four-divided", "--load_in_4bit --use_bnb_nested_quant --zero_stage 3"),
        ("eight-divided", "--load_in_8bit --zero_stage 3 --ds3_gather_for_generation=false"),
    ] {
        worlds_agree(&scratch, name, &format!("{line} {flags}"), &[2]);
    }
    same(&scratch, "four-divided-2", "four-1");
}

#[test]
fn an_encoder_decoder_trains_alike_on_two_ranks_with_a_value_model_and_with_a_value_head() {
    let scratch = crate::encoder_decoder_training::scratch();
    let line = "ppo --sft_model_path t5 --dataset_name demos.jsonl --reward rouge_l:completion --response_length 8 --stop_token eos \
                --temperature 0.4 --train_batch_size 4 --total_episodes 8 --num_sample_generations 0 --print_answers";
    for (name, flags) in [("critic", "--zero_stage 3"), ("head", "--value_head --zero_stage 2")] {
        worlds_agree(&scratch, name, &format!("{line} {STEPS} {flags}"), &[2]);
    }
}

#[test]
fn groups_of_responses_train_alike_on_any_number_of_ranks() {
    let scratch = scratch();
    let cases = [
        (
            "sequence",
            2,
            "--train_batch_size 4 --max_steps 8 --importance_sampling_level sequence --loss_type grpo --dynamic_sampling --zero_stage 3",
        ),
        // The quantile of the entropies is that of all ranks, and an optimizer step of 2 rows leaves two ranks without any.
        (
            "entropy",
            4,
            "--train_batch_size 2 --max_steps 16 --top_entropy_quantile 0.6 --entropy_coef 0.01 --epsilon 0.05 \
             --use_adaptive_entropy --entropy_target 100 --entropy_coef_delta 0.001",
        ),
    ];
    for (name, ranks, flags) in cases {
        let line = format!(
            "grpo --model_name_or_path policy --reward length:target=3 --dataset_name prompts.jsonl --max_completion_length 8 \
             --num_generations 2 --generation_batch_size 8 --num_iterations 2 --beta 0.1 --num_sample_generations 0 {STEPS} {flags}"
        );
        scratch.succeeds(&format!("{line} --output_dir {name}-1"));
        succeeds(&scratch, ranks, &format!("{line} --output_dir {name}-{ranks}"));
        // Eight optimizer steps and more, where the other runs have a few.
        near(&scratch, &format!("{name}-{ranks}"), &format!("{name}-1"), &Distance(1e-3, 1e-4, 1e-4));
    }
}

#[test]
fn in_f16_the_first_update_is_alike_on_two_ranks_with_the_same_loss_scale() {
    let scratch = scratch();
    // The sums of f16 differ in the fourth digit, so later updates may sample other tokens.
    let line = format!(
        "{PPO} {STEPS} --fp16 --num_ppo_epochs 1 --train_batch_size 4 --total_episodes 4 --num_sample_generations 0"
    );
    scratch.succeeds(&format!("{line} --output_dir half-1"));
    succeeds(&scratch, 2, &format!("{line} --output_dir half-2"));
    near(&scratch, "half-2", "half-1", &Distance(0.02, 0.01, 2e-3));
    let scales =
        |run: &str| ["policy", "val"].map(|model| scratch.metrics(run)[0][&format!("{model}/loss_scale")].clone());
    assert_eq!(scales("half-2"), scales("half-1"));
}

#[test]
fn updates_in_which_no_response_is_long_enough_are_the_same_on_any_number_of_ranks() {
    let scratch = scratch();
    // About every second response ends before it has four tokens.
    scratch.write("policy/generation_config.json", &json!({"eos_token_id": Vec::from_iter(100..160)}).to_string());
    let line = format!(
        "ppo --sft_model_path policy --reward length:target=3 --dataset_name prompts.jsonl --response_length 4 \
         --stop_token eos --eos_in_loss always --min_response_length 4 {STEPS} --train_batch_size 2 --total_episodes 20 \
         --num_sample_generations 0 --num_ppo_epochs 1"
    );
    let run = |world: usize| {
        let line = format!("{line} --output_dir kept-{world}");
        let ran = Ranks::start(&scratch, world, &line, |_, _| ()).wait(&line);
        assert!(ran.iter().all(|ran| ran.code == 0), "{world}: {}", ran[0].stderr);
        assert!(ran[1..].iter().all(|ran| ran.stderr.is_empty()), "{}", ran[1].stderr);
    };
    run(1);
    run(4);
    same(&scratch, "kept-4", "kept-1");
    let numbers = |name: &str| -> Vec<f64> {
        scratch.metrics("kept-1").iter().map(|line| line[name].as_f64().unwrap()).collect()
    };
    let (dropped, reused) = (numbers("val/dropped_responses"), numbers("val/reused_responses"));
    assert!(dropped.contains(&1.0) && reused.iter().any(|&rows| rows > 0.0), "{dropped:?} {reused:?}");
}

#[test]
fn a_pipeline_trains_each_stage_on_all_ranks() {
    let scratch = scratch();
    let row = |(at, prompt): (usize, &str)| json!({"prompt": prompt, "chosen": format!(" yes {at}"), "rejected": format!(" no, no {at}")});
    let rows = PROMPTS.into_iter().cycle().enumerate().take(20);
    scratch.write("rows.jsonl", &rows.map(|at| format!("{}\n", row(at))).collect::<String>());
    let text = "model_name_or_path: policy\ndataset_name: rows.jsonl\noutput_dir: out\nseed: 7\nlearning_rate: 1e-3\n\
                adam_epsilon: 1e-5\ntrain_batch_size: 4\nlogging_steps: 1\nmax_steps: 2\nsft:\nreward:\nppo:\n  \
                response_length: 6\n  total_episodes: 8\n  num_sample_generations: 0\n";
    scratch.write("pipeline.yaml", text);
    let line = |out: &str| format!("pipeline --config pipeline.yaml --output_dir {out}");
    assert_eq!(scratch.run(&line("one")).code, 0);
    for (world, out) in [(2, "two"), (4, "four")] {
        let ran = Ranks::start(&scratch, world, &line(out), |_, _| ()).wait("pipeline");
        assert!(ran.iter().all(|ran| ran.code == 0), "{}", ran[0].stderr);
        assert!(ran[1..].iter().all(|ran| ran.stdout.is_empty() && ran.stderr.is_empty()), "{}", ran[1].stderr);
        for stage in ["1-sft", "2-reward", "3-ppo"] {
            same(&scratch, &format!("{out}/{stage}"), &format!("one/{stage}"));
        }
    }
    // Finished stages are skipped on all ranks.
    std::fs::remove_dir_all(scratch.path("two/3-ppo")).unwrap();
    let ran = Ranks::start(&scratch, 2, &(line("two") + " --resume_from_checkpoint"), |_, _| ()).wait("resumed");
    assert!(ran.iter().all(|ran| ran.code == 0), "{} {}", ran[0].stderr, ran[1].stderr);
    assert_eq!(ran[0].stderr.matches("finished before").count(), 2, "{}", ran[0].stderr);
    same(&scratch, "two/3-ppo", "one/3-ppo");
    let ran = Ranks::start(&scratch, 2, &line("two"), |_, _| ()).wait("refused");
    assert!(ran.iter().all(|ran| ran.code == 1), "{} {}", ran[0].stderr, ran[1].stderr);
    assert!(ran[0].stderr.contains("two: output_dir") && ran[0].stderr.lines().count() == 1, "{}", ran[0].stderr);
}

#[test]
fn a_checkpoint_of_two_ranks_resumes_on_one_and_on_four_and_back() {
    let scratch = scratch();
    let line = format!(
        "{PPO} {STEPS} --train_batch_size 4 --total_episodes 16 --num_sample_generations 0 --save_steps 1 \
         --num_ppo_epochs 2 --eval_split_size 2 --eval_steps 2 --metric_for_best_model eval/score"
    );
    succeeds(&scratch, 2, &format!("{line} --output_dir whole"));
    let resumes = |out: &str, from: &str, update: usize, world: usize| {
        let line = format!("{line} --output_dir {out} --resume_from_checkpoint {from}/checkpoint-{update}");
        let ran = Ranks::start(&scratch, world, &line, |_, _| ()).wait(&line);
        assert!(ran.iter().all(|ran| ran.code == 0), "{}", ran[0].stderr);
    };
    // The metrics of the updates before lie in the other folder.
    let later = |run: &str| -> Vec<_> {
        timeless(scratch.metrics(run)).into_iter().filter(|line| line["step"].as_u64() > Some(2)).collect()
    };
    resumes("again", "whole", 2, 2);
    assert_eq!(timeless(scratch.metrics("again")), later("whole"));
    for world in [1, 4] {
        let out = format!("on-{world}");
        resumes(&out, "whole", 1, world);
        let (found, expected) = (weights(&scratch.path(&out)), weights(&scratch.path("whole")));
        for (name, expected) in expected.iter().filter(|(name, _)| !name.starts_with("best/")) {
            assert_close(&format!("{out}: {name}"), &found[name], expected, 2e-5);
        }
        let back = format!("back-{world}");
        resumes(&back, &out, 3, 2);
        let found = weights(&scratch.path(&back));
        for (name, expected) in expected.iter().filter(|(name, _)| !name.starts_with("best/")) {
            assert_close(&format!("{back}: {name}"), &found[name], expected, 2e-5);
        }
        let (found, expected) = (responses(&scratch.path(&out)), responses(&scratch.path("whole")));
        for (name, rows) in &found {
            assert_eq!(Some(rows), expected.get(name), "{out}: {name}");
        }
    }
}

#[test]
fn ranks_roll_back_and_stop_together_by_an_alarm() {
    let scratch = scratch();
    // The sixth update makes the last 256 responses of the same score; the run returns to the first one, whose policy is the last one with other
    // scores, and stops at the next alarm.
    scratch.write(
        "once.py",
        "calls = 0\ndef length(completions, **_):\n    global calls\n    calls += 1\n    return [len(c) * (calls <= 2) for c in completions]\n",
    );
    let line = PPO.replace("--reward_model_path reward", "--reward python:once.length");
    let line = format!(
        "{line} --learning_rate 1e-5 --seed 3 --train_batch_size 64 --num_ppo_epochs 1 --total_episodes 640 --num_sample_generations 0 --zero_stage 3 \
         --save_steps 1 --on_alarm equal_scores=rollback --max_rollbacks 1"
    );
    let alone = scratch.run(&format!("{line} --output_dir alarm-1"));
    let together = Ranks::start(&scratch, 2, &format!("{line} --output_dir alarm-2"), |_, _| ()).wait("alarm-2");
    for (rank, ran) in [&alone].into_iter().chain(&together).enumerate() {
        assert_eq!(ran.code, 3, "{}", ran.stderr);
        assert!(rank < 2 || ran.stderr.is_empty(), "{}", ran.stderr);
    }
    // Up to the line that resumes: these ranks have no launcher whose command could be written.
    let last = |ran: &Ran| {
        let line = ran.stderr.lines().last().unwrap().replace("alarm-2", "alarm-1");
        line.split_once(" is in alarm-1; ").unwrap().0.to_string()
    };
    let words = "error: stopped after update 5 by the alarm equal_scores (on_alarm = equal_scores=rollback, but max_rollbacks = 1 of";
    assert!(last(&alone).starts_with(words), "{}", alone.stderr);
    assert_eq!(last(&together[0]), last(&alone));
    assert_eq!(scratch.read("alarm-2/alarms.jsonl"), scratch.read("alarm-1/alarms.jsonl"));
    let kinds: Vec<_> =
        json_lines(&scratch.read("alarm-2/alarms.jsonl")).into_iter().map(|alarm| alarm["alarm"].clone()).collect();
    assert_eq!(kinds, ["no_stop", "equal_scores", "rollback", "equal_scores"]);
    same(&scratch, "alarm-2", "alarm-1");
}
