//! The foundation of the crates of [rlhf](https://docs.rs/rlhf).
//!
//! | for | see |
//! |---|---|
//! | the error type, whose messages name the thing, the place, what was expected and what was found | [`Error`] |
//! | the description of settings, from which flags, files, help and defaults are made | [`schema`] |
//! | ranks and their collectives; plain code with one rank | [`dist`] |
//! | CPU or GPU, threads | [`device`] |
//! | safetensors, read and written | [`weights`] |
//! | optimizer state and frozen models that are in memory only when they are used | [`offload`] |
//! | random streams by (seed, step, purpose, row) | [`rng`] |
//! | named numbers of a step | [`metrics`] |
//! | bounded reading, other programs, requests to stop, escaping | [`files`], [`process`], [`signals`], [`safe_text`] |
//!
//! ```
//! use rlhf_base::schema::{RUN, Settings, defaults};
//!
//! /// Settings of a greeting.
//! #[derive(Debug, PartialEq, Settings)]
//! struct Greeting {
//!     /// Name of who is greeted.
//!     #[setting(heading = RUN, default = "world")]
//!     name: String,
//!     /// Number of times.
//!     #[setting(heading = RUN, alias = "n")]
//!     times: Option<usize>,
//! }
//!
//! assert_eq!(defaults::<Greeting>(), Greeting { name: "world".into(), times: None });
//! let help: Vec<&str> = Greeting::fields().iter().map(|field| field.help).collect();
//! assert_eq!(help, ["Name of who is greeted", "Number of times"]);
//! ```
#![forbid(unsafe_code)]

// The derive macros generate paths that begin with `rlhf_base::schema`.
extern crate self as rlhf_base;

pub mod device;
pub mod dist;
mod error;
pub mod files;
pub mod metrics;
pub mod offload;
pub mod process;
mod refusal;
pub mod rng;
pub mod safe_text;
pub mod schema;
pub mod signals;
pub mod weights;

pub use error::{Error, Result, STOPPED_BY_ALARM};
pub use refusal::{Origin, Refusal};
