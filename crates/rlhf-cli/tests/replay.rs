//! `rlhf replay`: an update again, bit for bit, and with other settings.

use crate::checkpoint::{ppo_config, with_states_of_8_bits};
use crate::cli::{PPO, SFT, Scratch, json_lines, snapshot};
use crate::rollouts::with_groups;
use crate::support::{Tensors, near, output};
use rlhf::reward::{FnReward, Rewards};
use rlhf::run::Console;
use rlhf::settings::{AdvantageEstimator, LogprobsOf, OffloadPart, Optim, PpoConfig, WhitenAdvantages};
use rlhf::train::ppo::{PpoTrainer, RecordedUpdate, Replayed, ppo};
use serde_json::Value;
use std::path::Path;
use tch::{Kind, Tensor};

/// Changes of the settings of a run.
type Set = fn(&mut PpoConfig);

/// Five updates that leave their rollouts and a checkpoint each.
fn recorded(dir: &Path) -> PpoConfig {
    let mut config = ppo_config(dir);
    config.rollout_log.log_rollouts = true;
    config.run.checkpoints.save_steps = Some(1.into());
    config
}

/// Three updates on groups of responses.
fn recorded_groups(dir: &Path) -> PpoConfig {
    let mut config = with_groups(recorded(dir));
    config.learning_rate = 1e-3;
    (config.per_device_train_batch_size, config.generation.max_steps) = (Some(4), Some(3));
    config
}

/// Replays an update into the folder `name` beside the run.
fn replay(config: &PpoConfig, update: usize, changed: &PpoConfig, name: &str) -> rlhf::Result<Replayed> {
    let out = config.run.output_dir.with_file_name(name);
    RecordedUpdate::open(&config.run.output_dir, update)?.replay(changed, out, Console::Silent)
}

/// Trains, and checks that these updates, replayed, are those of the run.
#[track_caller]
fn replays(what: &str, config: &PpoConfig, updates: &[usize]) {
    ppo(config, Console::Silent).unwrap_or_else(|e| panic!("{what}: {e}"));
    let before = snapshot(&config.run.output_dir);
    for &update in updates {
        let replayed =
            replay(config, update, config, &format!("again-{update}")).unwrap_or_else(|e| panic!("{what}: {e}"));
        let verdict = replayed.verdict().unwrap_or_else(|e| panic!("{what}: update {update}: {e}"));
        assert!(verdict.starts_with("equal to the run: ") && !verdict.contains("no "), "{what}: {verdict}");
        assert!(replayed.changed().is_empty() && replayed.metrics().len() > 15, "{what}");
        assert!(replayed.output_dir().join("after/config.json").is_file() || config.peft.use_peft, "{what}");
    }
    assert!(snapshot(&config.run.output_dir) == before, "{what}: the run's folder has changed");
}

fn numbers(x: &Tensor) -> Vec<f64> {
    Vec::try_from(x.to_kind(Kind::Double).view([-1])).unwrap()
}

fn sum(x: &Tensor) -> f64 {
    numbers(x).iter().sum()
}

#[test]
fn updates_of_ppo_are_those_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    replays("ppo", &recorded(dir.path()), &[1, 3, 5]);
}

#[test]
fn updates_with_adapters_in_bf16_are_those_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = recorded(dir.path());
    (config.peft.use_peft, config.run.bf16, config.total_episodes) = (true, true, Some(12));
    config.missing_eos_penalty = Some(0.5);
    replays("LoRA in bf16", &config, &[1, 2, 3]);
}

#[test]
fn updates_with_states_of_8_bits_and_with_weights_in_bf16_are_those_of_the_run() {
    for optim in [Optim::Adamw8bit, Optim::AdamwBf16] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = recorded(dir.path());
        (config.sft_model_path, config.total_episodes) = (with_states_of_8_bits(), Some(12));
        (config.optimizer.optim, config.run.bf16) = (optim, optim == Optim::AdamwBf16);
        (config.sync.sync_ref_model, config.sync.ref_model_sync_steps) = (true, 1);
        replays(&format!("{optim:?}"), &config, &[1, 2, 3]);
    }
}

#[test]
fn updates_of_a_run_with_offloaded_parts_are_those_of_the_run_where_their_folder_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = recorded(dir.path());
    config.total_episodes = Some(8);
    config.run.offload.offload = vec![OffloadPart::All];
    config.run.offload.offload_dir = Some(dir.path().join("files"));
    ppo(&config, Console::Silent).unwrap();
    // Not a folder any more.
    std::fs::write(dir.path().join("files"), "").unwrap();
    let replayed = replay(&config, 2, &config, "again").unwrap();
    assert!(replayed.verdict().unwrap().starts_with("equal to the run: "));
}

#[test]
fn updates_without_a_critic_are_those_of_the_run() {
    let cases: [(&str, Set); 3] = [
        ("grpo", |_| ()),
        ("remax", |config| {
            config.advantage.advantage_estimator = AdvantageEstimator::Remax;
            config.kl.kl_coef = 0.1;
            config.loss.loss_type = rlhf::settings::LossType::Bnpo;
        }),
        ("dynamic sampling", |config| {
            config.groups.dynamic_sampling = true;
            config.kl.kl_coef = 0.1;
            config.sync.sync_ref_model = true;
            config.sync.ref_model_sync_steps = 1;
            config.mask.mask_truncated_completions = true;
        }),
    ];
    for (what, set) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut config = recorded_groups(dir.path());
        set(&mut config);
        replays(what, &config, &[1, 2]);
    }
}

#[test]
fn updates_with_running_moments_a_value_head_and_filters_are_those_of_the_run() {
    let cases: [(&str, Set); 2] = [
        ("a value head, scaled scores, the adaptive KL and entropy bonus", |config| {
            config.legacy.value_head = true;
            config.score_scaling.use_score_scaling = true;
            config.score_scaling.use_score_norm = true;
            config.kl.adap_kl_ctrl = true;
            (config.loss.use_adaptive_entropy, config.loss.entropy_target) = (true, 100.0);
            config.mask.min_response_length = 3;
        }),
        ("filtered log-probabilities, a moving average", |config| {
            config.sampling.top_k = 20;
            config.sampling.logprobs_of = LogprobsOf::Filtered;
            config.ema.enable_ema = true;
            config.value.value_warmup_updates = 1;
            config.whiten_advantages = WhitenAdvantages::MiniBatch;
        }),
    ];
    for (what, set) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut config = recorded(dir.path());
        config.total_episodes = Some(12);
        set(&mut config);
        replays(what, &config, &[1, 2, 3]);
    }
}

#[test]
fn rewards_of_the_caller_are_not_computed_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = recorded(dir.path());
    config.total_episodes = Some(8);
    let token_reward = FnReward::new(|batch| {
        let token_scores = |ids: &[i64]| ids.iter().map(|id| *id as f64 / 100.0).collect::<Vec<f64>>();
        Ok(batch.iter().map(|input| token_scores(input.response_ids)).collect::<Vec<_>>())
    });
    PpoTrainer::from_config_with(&config, Rewards::new().with("own", token_reward)).unwrap().train().unwrap();
    for update in [1, 2] {
        let replayed = replay(&config, update, &config, &format!("own-{update}")).unwrap();
        replayed.verdict().unwrap();
    }
}

#[test]
fn the_numbers_of_an_update_make_its_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = recorded(dir.path());
    config.whiten_advantages = WhitenAdvantages::Batch;
    config.loss.entropy_coef = 0.0;
    ppo(&config, Console::Silent).unwrap();
    let replayed = replay(&config, 2, &config, "numbers").unwrap();
    let tensors = Tensors::read(&replayed.output_dir().join("update.safetensors"));
    let get = |name: &str| tensors.get(name);
    let metric = |name: &str| {
        let found = replayed.metrics().iter().find(|metric| metric.name == name).unwrap_or_else(|| panic!("no {name}"));
        found.replayed.unwrap()
    };
    // 4 responses of at most 6 tokens; 2 epochs of 2 mini-batches.
    let shapes: [(&str, &[i64]); 13] = [
        ("rollout.response_ids", &[4, 6]),
        ("rollout.prompt_rows", &[4]),
        ("rollout.logprobs", &[4, 6]),
        ("rollout.ref_logprobs", &[4, 6]),
        ("rollout.values", &[4, 6]),
        ("rollout.scores", &[4]),
        ("masks.loss", &[4, 6]),
        ("targets.advantages", &[4, 6]),
        ("targets.returns", &[4, 6]),
        ("epochs.logprobs", &[2, 4, 6]),
        ("epochs.values", &[2, 4, 6]),
        ("epochs.micro_batch", &[2, 4]),
        ("steps.loss", &[4]),
    ];
    for (name, shape) in shapes {
        assert_eq!(get(name).size(), shape, "{name}");
    }
    near("entropy", -sum(get("rollout.logprobs")) / 4.0, metric("objective/entropy"), 1e-5);
    near("kl", sum(get("targets.kl")) / 4.0, metric("objective/kl"), 1e-5);
    near("scores", sum(get("rollout.scores")) / 4.0, metric("objective/scores"), 1e-5);
    let tokens = sum(get("steps.tokens"));
    assert_eq!(tokens, 2.0 * sum(&get("masks.loss").to_kind(Kind::Double)));
    for (name, column) in
        [("loss/policy_avg", "policy_loss"), ("policy/approxkl_avg", "approx_kl"), ("val/ratio", "ratio")]
    {
        near(name, sum(get(&format!("steps.{column}"))) / tokens, metric(name), 1e-9);
        near(name, sum(get(&format!("micro_batches.{column}"))), sum(get(&format!("steps.{column}"))), 1e-9);
    }
    near("value loss", sum(get("steps.value_loss")) / sum(get("steps.value_slots")), metric("loss/value_avg"), 1e-9);
    near("ratios", sum(get("epochs.ratios")), sum(get("steps.ratio")), 1e-4);
    near("entropies", sum(&(get("epochs.entropies") * get("masks.loss"))), sum(get("steps.entropy")), 1e-3);
    // The clipped objective of the tokens.
    let (ratios, advantages) = (get("epochs.ratios"), get("targets.advantages"));
    let low = 1.0 - config.cliprange;
    let objective = (-(ratios * advantages)).maximum(&-(ratios.clamp(low, 1.0 + config.cliprange) * advantages));
    near("objective", sum(&(objective * get("masks.loss"))), sum(get("steps.policy_loss")), 1e-4);
    // Every response is in one micro-batch of each epoch.
    let mut rows = numbers(get("epochs.micro_batch"));
    rows.sort_by(f64::total_cmp);
    assert_eq!(rows.len() as f64, sum(get("micro_batches.responses")));
    assert!(rows[0] == 0.0 && rows[7] + 1.0 == get("micro_batches.step").size()[0] as f64);
    for (model, name) in [("policy", "policy/grad_norm"), ("value", "val/grad_norm")] {
        let norms = tensors.names().filter(|name| name.starts_with(&format!("{model}_grad_norms.")));
        let squares: Tensor = norms.map(|name| get(name).square()).sum();
        let whole = numbers(get(&format!("steps.{model}_grad_norm")));
        for (norm, whole) in numbers(&squares.sqrt()).into_iter().zip(&whole) {
            near(model, norm, *whole, 1e-6 * whole.max(1.0));
        }
        near(name, whole.iter().sum::<f64>() / 4.0, metric(name), 1e-9);
    }
}

#[test]
fn another_learning_rate_changes_what_follows_the_first_step_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = recorded(dir.path());
    (config.num_mini_batches, config.num_ppo_epochs, config.total_episodes) = (1, 1, Some(12));
    ppo(&config, Console::Silent).unwrap();
    let slower = PpoConfig { learning_rate: 1e-6, ..config.clone() };
    let replayed = replay(&config, 2, &slower, "slower").unwrap();
    assert_eq!(replayed.changed(), [("learning_rate".to_string(), ["0.001".to_string(), "1e-6".to_string()])]);
    let differ: Vec<&str> =
        replayed.metrics().iter().filter(|metric| metric.run != metric.replayed).map(|metric| &*metric.name).collect();
    assert_eq!(differ, ["lr"]);
    let verdict = replayed.verdict().unwrap_err();
    assert!(verdict.starts_with("differs from the run: metric `lr`: "), "{verdict}");
    let comparison: Value =
        serde_json::from_str(&std::fs::read_to_string(replayed.output_dir().join("comparison.json")).unwrap()).unwrap();
    let differing = comparison["differing"].as_array().unwrap();
    assert!(differing.iter().any(|part| part.as_str().unwrap().starts_with("tensor `model.")), "{differing:?}");
    assert_eq!(comparison["changed"]["learning_rate"]["replayed"], "1e-6");
    // A clip range acts on ratios that are 1 in the first step: nothing changes. Without a critic the value model is not there.
    let narrow = PpoConfig { cliprange: 0.01, ..config.clone() };
    replay(&config, 2, &narrow, "narrow").unwrap().verdict().unwrap();
    // Rows are masked after they are sampled and scored.
    let (unmasked, mut masked) = (config.clone(), config.clone());
    masked.mask.mask_truncated_completions = true;
    let replayed = replay(&config, 2, &masked, "masked").unwrap();
    assert_eq!(replayed.changed()[0].0, "mask_truncated_completions");
    // And counted, though the run masked them.
    masked.run.output_dir = dir.path().join("of-masked");
    ppo(&masked, Console::Silent).unwrap();
    let metrics = |config: &PpoConfig, name: &str| -> Vec<(String, Option<f64>)> {
        let counting = PpoConfig { run: config.run.clone(), ..unmasked.clone() };
        let replayed = replay(config, 1, &counting, name).unwrap();
        replayed.metrics().iter().map(|metric| (metric.name.clone(), metric.replayed)).collect()
    };
    let counted = metrics(&masked, "counted");
    assert_eq!(counted, metrics(&config, "as-it-was"));
    let as_masked = replay(&masked, 1, &masked, "as-masked").unwrap();
    assert!(as_masked.metrics().iter().zip(&counted).any(|(of_masked, of_all)| of_masked.replayed != of_all.1));
    let mut reinforce = config.clone();
    reinforce.advantage.advantage_estimator = AdvantageEstimator::Reinforce;
    let replayed = replay(&config, 2, &reinforce, "reinforce").unwrap();
    let value = replayed.metrics().iter().find(|metric| metric.name == "loss/value_avg").unwrap();
    assert!(value.run.is_some() && value.replayed.is_none());
}

const RUN: &str = "--total_episodes 12 --save_steps 2 --log_rollouts";

#[test]
fn the_command_prints_that_an_update_is_equal_or_a_table_of_the_metrics() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{PPO} {RUN} --num_threads 2 --reward length:target=4"));
    let before = snapshot(&scratch.path("out"));
    for update in [1, 3] {
        let text = scratch.succeeds(&format!("replay out --update {update}"));
        assert!(text.starts_with(&format!("update {update}: equal to the run: ")), "{text}");
        assert_eq!(text.contains(&format!("no tensors, as there is no checkpoint-{update}")), update == 1, "{text}");
        assert!(text.contains(&format!("out-replay-{update}/update.safetensors")), "{text}");
    }
    let text =
        scratch.succeeds("replay out --update 3 --learning-rate 1e-4 --cliprange=0.1 --output slower --whiten_rewards");
    let first: Vec<&str> = text.lines().take(3).collect();
    let expected = [
        "whiten_rewards = true (in the run: false)",
        "cliprange = 0.1 (in the run: 0.2)",
        "learning_rate = 0.0001 (in the run: 3e-6)",
    ];
    for line in expected {
        assert!(first.contains(&line), "{text}");
    }
    let row = |name: &str| {
        text.lines().find(|line| line.trim_start().starts_with(name)).map(|line| line.split_whitespace().count())
    };
    assert_eq!((row("metric"), row("objective/scores "), row("lr ")), (Some(6), Some(4), Some(4)), "{text}");
    let metrics = json_lines(&scratch.read("slower/metrics.jsonl"));
    assert_eq!((metrics.len(), &metrics[0]["step"]), (1, &3.into()));
    assert!(scratch.read("slower/config.yaml").contains("cliprange: 0.1"));
    // Without its metrics the run has the tensors of its checkpoint.
    let metrics = scratch.path("out/metrics.jsonl");
    let lines = std::fs::read(&metrics).unwrap();
    std::fs::remove_file(&metrics).unwrap();
    let text = scratch.succeeds("replay out --update 1 --output unmeasured");
    assert!(text.contains("equal to the run: no metrics, as metrics.jsonl has no line of it"), "{text}");
    std::fs::write(&metrics, lines).unwrap();
    // From another folder, and by another path.
    std::fs::create_dir(scratch.path("elsewhere")).unwrap();
    let out = scratch.path("out");
    let mut command = scratch.command(&format!("replay {} --update 3 --output_dir here", out.display()));
    let ran = output(command.current_dir(scratch.path("elsewhere")));
    let text = String::from_utf8(ran.stdout).unwrap();
    assert!(ran.status.success() && text.starts_with("update 3: equal to the run: "), "{text}");
    assert!(scratch.path("elsewhere/here/update.safetensors").is_file());
    assert!(snapshot(&out) == before, "the run's folder has changed");
}

#[test]
fn an_update_of_two_ranks_is_equal_on_two_and_but_for_rounding_on_one() {
    let scratch = Scratch::new();
    for (name, stage) in [("plain", 0), ("sharded", 3)] {
        let flags =
            format!("--output_dir {name} --zero_stage {stage} --per_device_train_batch_size 2 --learning_rate 1e-3");
        scratch.succeeds(&format!("launch --nproc_per_node 2 {PPO} {RUN} --save_steps 1 {flags}"));
        let line = format!("replay {name} --update 2");
        let text = scratch.succeeds(&format!("launch --nproc_per_node 2 {line} --output_dir {name}-two"));
        assert!(text.contains("update 2: equal to the run: ") && text.contains("tensors of checkpoint-2"), "{text}");
        let rank_masks = [0, 1].map(|rank| {
            let numbers = Tensors::read(&scratch.path(&format!("{name}-two/update-rank-{rank}.safetensors")));
            numbers.get("epochs.micro_batch").ge(0).get(0)
        });
        assert!(rank_masks[0].logical_xor(&rank_masks[1]).all().int64_value(&[]) == 1, "each row is one rank's");
        let text = scratch.succeeds(&format!("{line} --output_dir {name}-one"));
        assert!(text.starts_with("update 2: equal to the run but for rounding (2 ranks in the run, 1 here"), "{text}");
        let comparison: Value = serde_json::from_str(&scratch.read(&format!("{name}-one/comparison.json"))).unwrap();
        assert_eq!((&comparison["ranks"]["run"], &comparison["rounding"]), (&2.into(), &0.001.into()));
        assert_eq!((&comparison["equal"], &comparison["differing"]), (&true.into(), &Value::Array(Vec::new())));
    }
    // Another update is no rounding.
    let text = scratch.succeeds("replay plain --update 2 --cliprange 0.0001 --num_ppo_epochs 1 --output_dir other");
    assert!(text.contains("note: 2 ranks in the run, 1 here"), "{text}");
    let comparison: Value = serde_json::from_str(&scratch.read("other/comparison.json")).unwrap();
    let differing = comparison["differing"].as_array().unwrap();
    assert!(differing.iter().any(|part| part.as_str().unwrap().contains("optimizer: ")), "{differing:?}");
}

#[test]
fn each_bad_input_is_one_line_and_changes_nothing() {
    let scratch = Scratch::new();
    scratch.succeeds(&format!("{PPO} {RUN} --rollouts_limit 2"));
    scratch.succeeds(&format!("{PPO} --output_dir unlogged"));
    scratch.succeeds(&format!("{SFT} --output_dir sft"));
    scratch.refuses(
        "replay nowhere --update 1",
        1,
        &["nowhere: update 1: expected the folder of a run", "no such folder"],
    );
    scratch.refuses(
        "replay policy --update 1",
        1,
        &["policy: update 1: expected the folder of a run", "none of its files"],
    );
    scratch.refuses("replay prompts.jsonl --update 1", 1, &["found a file"]);
    scratch.refuses(
        "replay sft --update 1",
        1,
        &["sft: update 1: expected the folder of a run of `rlhf ppo`", "another command"],
    );
    scratch.refuses("replay unlogged --update 1", 1, &["update 1: expected its rollout, found none", "--log_rollouts"]);
    scratch.refuses(
        "replay out --update 1",
        1,
        &["update 1: expected its rollout, found those of 2-3", "can be replayed: 3"],
    );
    scratch.refuses("replay out --update 9", 1, &["update 9: expected its rollout, found those of 2-3"]);
    scratch.refuses(
        "replay out --update 2",
        1,
        &["update 2: expected checkpoint-1 before it", "can be replayed: 3", "--save_steps 1"],
    );
    scratch.refuses("replay out --update 0", 2, &["update = 0: expected at least 1"]);
    scratch.refuses("replay out", 2, &["--update <N>"]);
    scratch.refuses("replay out --update 3 --learning_rat 1", 2, &["unexpected argument '--learning_rat'"]);
    let replay = "replay out --update 3";
    scratch.refuses(&format!("{replay} --learning_rate x"), 2, &["--learning_rate"]);
    scratch.refuses(&format!("{replay} --lam 2"), 2, &["lam = 2"]);
    for (flags, words) in [
        ("--temperature 0.5", "temperature = 0.5: expected 0.7, as in update 3 of the run: a replay has the responses"),
        ("--seed 3", "seed = 3: expected 42"),
        ("--reward length:target=4", "the rewards that the run recorded"),
        ("--use_peft", "use_peft = true: expected false"),
        ("--config other.yaml", "unexpected argument '--config' found; replay has the settings of the run"),
        ("--save_steps 1", "save_steps = 1: expected 2, as in update 3 of the run: it changes nothing of one update"),
        ("--advantage_estimator remax", "advantage_estimator = remax: expected another one"),
        ("--total_episodes 40", "its place in the run's schedules"),
    ] {
        scratch.refuses(&format!("{replay} {flags}"), 2, &[words]);
    }
    scratch.refuses(&format!("{replay} --gradient_accumulation_steps 2"), 2, &["an update of 4 responses"]);
    scratch.refuses(&format!("{replay} --output_dir out/inner"), 2, &["outside of the run"]);
    scratch.refuses(
        &format!("{replay} --output_dir policy"),
        1,
        &["policy: output_dir: expected an empty or new folder"],
    );
    scratch.refuses(&format!("{replay} --output_dir prompts.jsonl"), 1, &["found a file"]);
    scratch.refuses(
        "launch --nproc_per_node 2 replay out --update 3",
        2,
        &["update 3 was computed by 1 rank: expected as many or one process, found 2 ranks"],
    );
    let rows = scratch.read("prompts.jsonl");
    scratch.write("prompts.jsonl", &rows.replace("A film", "A movie"));
    scratch.refuses(replay, 1, &["out: inputs have changed since update 3: dataset_name = prompts.jsonl"]);
    scratch.write("prompts.jsonl", &rows);
    let config = scratch.read("policy/config.json");
    scratch.edit_config("policy", "layer_norm_eps", 0.1);
    scratch.refuses(replay, 1, &["sft_model_path = policy: config.json has changed"]);
    scratch.write("policy/config.json", &config);
    let file = scratch.path("out/rollouts/update-000003.parquet");
    let bytes = std::fs::read(&file).unwrap();
    let mut changed = bytes.clone();
    let at = 10; // in the header of the first page
    changed[at..at + 6].fill(b'#');
    std::fs::write(&file, &changed).unwrap();
    scratch.refuses(replay, 1, &["out/rollouts/update-000003.parquet: not "]);
    for cut in [0, 100, bytes.len() - 9] {
        std::fs::write(&file, &bytes[..cut]).unwrap();
        scratch.refuses(replay, 1, &["out/rollouts/update-000003.parquet: not valid Parquet"]);
    }
    std::fs::copy(scratch.path("out/rollouts/update-000002.parquet"), &file).unwrap();
    scratch.refuses(
        replay,
        1,
        &["update-000003.parquet: row 1: column `step`: expected that of a rollout of update 3"],
    );
}
