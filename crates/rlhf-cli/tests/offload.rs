//! Runs whose optimizer state and frozen models are offloaded are the same runs.

use crate::checkpoint::{assert_same, ppo_config, run_on_full_disk, stopped, with_states_of_8_bits};
use crate::cli::{PPO, REWARD, SFT, Scratch};
use rlhf::model::Dtype;
use rlhf::run::Console;
use rlhf::settings::{OffloadPart, Optim, PpoConfig, Resume};
use rlhf::train::ppo::ppo;
use std::path::Path;

/// A run of five updates in `dir/name` with a checkpoint after each.
fn config(dir: &Path, name: &str, parts: &[OffloadPart]) -> PpoConfig {
    let mut config = ppo_config(dir);
    config.run.output_dir = dir.join(name);
    config.run.checkpoints.save_steps = Some(1.into());
    config.run.offload.offload = parts.to_vec();
    config
}

fn run(config: &PpoConfig) {
    ppo(config, Console::Silent).unwrap();
}

/// Checks that a run with each of `all` parts offloaded is the run without, with the settings that `change` makes.
fn is_the_same(all: &[OffloadPart], change: impl Fn(&mut PpoConfig)) {
    let dir = tempfile::tempdir().unwrap();
    let with = |name: &str, parts: &[OffloadPart]| {
        let mut config = config(dir.path(), name, parts);
        change(&mut config);
        run(&config);
        config.run.output_dir
    };
    let whole = with("whole", &[]);
    for part in all {
        let found = with(&part.to_string(), &[*part]);
        assert_same(&found, &whole, 5);
        let files = std::fs::read_dir(&found).unwrap().map(|file| file.unwrap().file_name());
        let left: Vec<_> = files.filter(|name| name.to_string_lossy().contains("offload")).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn a_run_is_the_same_to_the_bit_whichever_part_of_it_is_offloaded() {
    is_the_same(&[OffloadPart::Optimizer, OffloadPart::Models, OffloadPart::All], |_| ());
}

#[test]
fn a_run_of_each_small_optimizer_state_is_the_same_to_the_bit_where_it_is_offloaded() {
    for optim in [Optim::Adamw8bit, Optim::Adafactor, Optim::AdamwBf16] {
        is_the_same(&[OffloadPart::All], |config| {
            config.sft_model_path = with_states_of_8_bits();
            config.optimizer.optim = optim;
            config.run.bf16 = optim == Optim::AdamwBf16;
        });
    }
}

#[test]
fn parts_may_be_offloaded_where_models_are_moved_store_distributions_share_layers_or_are_averaged() {
    use rlhf::rl::math::KlEstimator;
    type Change = fn(&mut PpoConfig);
    let changes: [Change; 7] = [
        |c| {
            c.sync.sync_ref_model = true;
            c.sync.ref_model_sync_steps = 3;
        },
        |c| {
            c.kl.kl_estimator = KlEstimator::Full;
            c.kl.kl_in_loss = true;
        },
        // The reference moves in the middle of an update, whose losses have its distributions from before.
        |c| {
            (c.kl.kl_estimator, c.kl.kl_in_loss) = (KlEstimator::Full, true);
            (c.sync.sync_ref_model, c.sync.ref_model_sync_steps) = (true, 1);
        },
        |c| c.legacy.num_shared_layers = Some(1),
        |c| (c.legacy.num_shared_layers, c.run.bf16) = (Some(1), true),
        |c| c.ema.enable_ema = true,
        |c| c.peft.use_peft = true,
    ];
    for change in changes {
        is_the_same(&[OffloadPart::All], change);
    }
}

#[test]
fn a_run_resumes_to_the_same_bits_with_other_parts_in_memory_than_before() {
    // A reference model that follows the policy moves in f32, whatever dtype weights are rounded to at loading.
    let follows = |config: &mut PpoConfig| {
        config.run.bf16 = true;
        (config.sync.sync_ref_model, config.sync.ref_model_sync_steps) = (true, 1);
    };
    let changes: [&dyn Fn(&mut PpoConfig); 4] = [
        &|_| (),
        &|config| {
            config.optimizer.optim = Optim::Adamw8bit;
            config.sft_model_path = with_states_of_8_bits();
        },
        &|config| {
            config.optimizer.optim = Optim::AdamwBf16;
            follows(config);
        },
        &|config| {
            config.run.dtype = Dtype::BFloat16;
            follows(config);
        },
    ];
    for change in changes {
        let dir = tempfile::tempdir().unwrap();
        let with = |name: &str, parts: &[OffloadPart]| {
            let mut config = config(dir.path(), name, parts);
            change(&mut config);
            config
        };
        let whole = with("whole", &[]);
        run(&whole);
        let offloaded = with("offloaded", &[OffloadPart::All]);
        run(&offloaded);
        for (from, parts) in [(&whole, vec![OffloadPart::All]), (&offloaded, vec![])] {
            let stopped = stopped(&from.run.output_dir, 2);
            let mut resumed = with("", &parts);
            resumed.run.output_dir.clone_from(&stopped);
            resumed.run.checkpoints.save_steps = Some(5.into());
            resumed.run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
            run(&resumed);
            assert_same(&stopped, &whole.run.output_dir, 5);
            std::fs::remove_dir_all(stopped).unwrap();
        }
    }
}

#[test]
fn supervised_runs_are_the_same_to_the_bit_where_their_optimizer_state_is_offloaded() {
    let scratch = Scratch::new();
    for (name, line) in [("sft", SFT), ("reward", REWARD)] {
        let weights = |out: &str, flags: &str| {
            scratch.succeeds(&format!("{line} {flags}").replace("--output_dir out", &format!("--output_dir {out}")));
            std::fs::read(scratch.path(out).join("model.safetensors")).unwrap()
        };
        let expected = weights(&format!("{name}-whole"), "");
        assert!(weights(&format!("{name}-out"), "--offload --offload_dir files") == expected, "{name}");
        assert!(!scratch.path("files").exists(), "the file has no name, and needs no folder of its own");
    }
}

#[test]
fn nothing_is_made_before_the_checks_of_what_is_read_have_passed() {
    let scratch = Scratch::new();
    // Found after models and optimizer are offloaded.
    let line = format!("{PPO} --offload all --max_prompt_length 1 --long_prompts error");
    scratch.refuses(&line, 1, &["prompts.jsonl"]);
}

#[test]
fn a_folder_that_cannot_be_written_and_a_full_disk_are_one_line_at_the_start() {
    let scratch = Scratch::new();
    for (flags, what) in [("--offload all", "reference model"), ("--offload", "optimizer state")] {
        // From a GPU parts go to the host's memory, and there is no file.
        let flags = &format!("{flags} --device cpu");
        let ran = scratch.run(&format!("{PPO} {flags} --offload_dir /proc/rlhf"));
        let expected = format!(
            "offload_dir = /proc/rlhf: cannot make a file of 1 MiB for the {what}: in /proc, the nearest folder that exists: "
        );
        ran.is_one_error(flags, 1, &[&expected]);
        let ran = run_on_full_disk(&scratch, &format!("{PPO} {flags} --offload_dir files"), 2048);
        let expected = format!("offload_dir = files: cannot make a file of 1 MiB for the {what}: in ");
        ran.is_one_error(flags, 1, &[&expected, "the nearest folder that exists: reserving its blocks: "]);
    }
}

#[test]
fn parts_that_a_run_does_not_have_or_shards_are_refused() {
    let scratch = Scratch::new();
    for (line, words) in [
        (format!("{SFT} --offload models"), "offload = models has no effect in sft, which has no frozen model"),
        (format!("{REWARD} --offload models"), "offload = models has no effect in reward training"),
        (
            format!("{PPO} --offload models --zero_stage 3"),
            "offload = models with zero_stage = 3: frozen models are sharded",
        ),
        (format!("{PPO} --offload_dir x"), "offload_dir = x has no effect without offload"),
        (format!("{PPO} --offload disk"), "expected optimizer, models, all or none"),
    ] {
        scratch.refuses(&line, 2, &[words]);
    }
    let rules = PPO.replace("--reward_model_path reward", "--reward length:target=4") + " --use_peft --offload models";
    scratch.refuses(&rules, 2, &["offload = models has no effect without a reference model of its own weights"]);
}
