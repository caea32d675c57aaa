//! RLHF with PPO for language models, on libtorch: supervised fine-tuning, reward models, PPO.
//!
//! ```no_run
//! use rlhf::settings::PpoConfig;
//! use rlhf::reward::{FnReward, Rewards};
//! use rlhf::train::ppo::PpoTrainer;
//!
//! fn main() -> rlhf::Result<()> {
//!     let mut config = PpoConfig::without_reward("runs/sft", "prompts.jsonl", "runs/ppo");
//!     config.response_length = 48;
//!     let brevity = FnReward::new(|batch| Ok(batch.iter().map(|input| -(input.response.len() as f64)).collect()));
//!     let mut trainer = PpoTrainer::from_config_with(&config, Rewards::new().with("brevity", brevity))?;
//!     let updates = trainer.train()?;
//!     println!("{updates} updates; the policy is in runs/ppo");
//!     Ok(())
//! }
//! ```
//!
//! | for | see |
//! |---|---|
//! | a whole PPO run, or its updates one by one | [`train::ppo::PpoTrainer`], [`settings::PpoConfig`] |
//! | TRL's `step(queries, responses, scores)` | [`compat::step::StepTrainer`] |
//! | DeepSpeed-Chat's `generate_experience` and `train_rlhf` | [`compat::engine::RlhfEngine`] |
//! | supervised fine-tuning, reward models | [`train::sft`], [`train::reward_model`] |
//! | models of Hugging Face's format | [`model::CausalLm`], [`model::SequenceClassifier`], [`model::PretrainedModel`] for both, [`tokenizer::Tokenizer`] |
//! | sampling | [`generate::generate`] |
//! | rewards: models, rules, programs, services, closures | [`reward::Rewards`], [`reward::Reward`] |
//! | tools and environments that a policy acts in: Rust, programs, Python, OpenEnv | [`environment::Environment`], [`environment::Sessions`] |
//! | responses of several turns with tools | [`tool_loop::ToolLoop`] |
//! | data: JSONL, JSON, CSV, Parquet, the hub | [`data::Dataset`], [`data::Cursor`] |
//! | win rates of one model against another, scores, pass@k | [`eval::evaluate`], [`settings::EvaluateConfig`] |
//! | the memory and time of a run before it starts | [`plan::plan`] |
//! | the report of a run, a page of HTML | [`report::report`] |
//! | a model folder from a GGUF file, or a GGUF file from a model folder | [`convert::convert`] |
//! | upload of a model to the Hugging Face hub | [`push::push`], [`hub::push`] |
//! | the equations of PPO, on tensors alone | [`rl::math`] |
//!
//! A crate that depends on this one needs libtorch 2.11.0 to build and a run path to it: the page `docs/library/rust.md` of the
//! repository has the three-line build script, and `make crate DIR=../my-trainer` in a checkout makes such a crate.
#![forbid(unsafe_code)]

pub mod compat;
pub mod convert;
pub mod data;
pub mod environment;
pub mod eval;
pub mod merge;
pub mod plan;
pub mod push;
pub mod report;
pub mod reward;
pub mod rl;
pub mod run;
pub mod settings;
pub mod terminal;
pub mod tool_loop;
pub mod train;

pub use rlhf_base::{
    Error, Origin, Refusal, Result, device, dist, files, metrics, offload, process, rng, safe_text, schema, signals,
    weights,
};
pub use rlhf_hub as hub;
pub use rlhf_lm::{generate, gguf, model, optim, tokenizer};
pub use run::tensorboard::TensorBoard;
pub use tch;

/// The README's Rust code must compile.
#[cfg(all(doctest, repository))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The Rust code of the pages about the library must compile too.
#[cfg(all(doctest, repository))]
#[doc = include_str!("../../../docs/library/rust.md")]
struct LibraryPage;

#[cfg(all(doctest, repository))]
#[doc = include_str!("../../../docs/library/parts.md")]
struct LibraryPartsPage;
