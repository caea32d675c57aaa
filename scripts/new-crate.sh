#!/usr/bin/env bash
# new-crate.sh FOLDER: makes a crate that uses this checkout's `rlhf` and libtorch, ready for `cargo run`.
#
# docs/library/rust.md ("In a crate of your own") explains the files, for adding rlhf to an existing crate.
set -euo pipefail
checkout=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

[ $# = 1 ] && [ -n "$1" ] || fail "expected a folder for the new crate: make crate DIR=../my-trainer"
folder=$1
[ ! -e "$folder" ] || fail "$folder: exists already; expected the name of a new folder"
name=$(basename "$folder")
[[ $name =~ ^[A-Za-z][A-Za-z0-9_-]*$ ]] ||
    fail "$folder: expected a folder name that cargo takes as a crate's: letters, digits, - and _, a letter first"
libtorch=${LIBTORCH:-$checkout/.libtorch/torch}
[ -e "$libtorch/lib/libtorch_cpu.so" ] || fail "$libtorch: expected libtorch, found none; run \`make setup\` first"

mkdir -p "$folder/src" "$folder/.cargo"
printf '/target\n' >"$folder/.gitignore"

cat >"$folder/Cargo.toml" <<TOML
[package]
name = "$name"
version = "0.1.0"
edition = "2024"

[dependencies]
rlhf = { path = "$checkout/crates/rlhf" }

# Level 0 compiles faster, and libtorch's kernels take most of the time of a run; the release profile is for long ones.
[profile.dev]
debug = "line-tables-only"

[profile.dev.package]
"*" = { opt-level = 1, debug = false }
rlhf = { opt-level = 0 }
rlhf-base = { opt-level = 0 }
rlhf-hub = { opt-level = 0 }
rlhf-lm = { opt-level = 0 }
TOML
# The versions of dependencies that rlhf is tested with.
cp "$checkout/Cargo.lock" "$folder/Cargo.lock"

cat >"$folder/build.rs" <<'RUST'
fn main() {
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", std::env::var("DEP_RLHF_LIBTORCH_LIB").unwrap());
}
RUST

cat >"$folder/.cargo/config.toml" <<TOML
[env]
# The libtorch 2.11.0 to build with; LIBTORCH in the environment takes precedence.
LIBTORCH = "$libtorch"
LIBTORCH_BYPASS_VERSION_CHECK = "1"
# Limits how long libgomp's threads spin at barriers, in programs that cargo starts.
GOMP_SPINCOUNT = "10000"
TOML

cat >"$folder/src/main.rs" <<'RUST'
//! PPO with a closure as the reward: short responses are good ones.

use rlhf::settings::PpoConfig;
use rlhf::run::Console;
use rlhf::reward::{FnReward, Rewards};
use rlhf::train::ppo::PpoTrainer;

fn main() -> rlhf::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [sft, prompts, out] = arguments.as_slice() else {
        return Err(rlhf::Error::Usage("expected SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER".into()));
    };
    // Ctrl-C ends the run after its current update, and what it has learned is saved.
    rlhf::run::stop_on_signals()?;
    let brevity = FnReward::new(|batch| Ok(batch.iter().map(|input| -(input.response.len() as f64)).collect()));
    let mut config = PpoConfig::without_reward(sft, prompts, out);
    config.response_length = 32;
    let mut trainer = PpoTrainer::from_config_with(&config, Rewards::new().with("brevity", brevity))?;
    trainer.console = Console::detect();
    trainer.train()?;
    Ok(())
}
RUST

echo "made $folder: \`cd $folder && cargo run --release -- SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER\` trains a policy there"
