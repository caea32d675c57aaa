//! Datasets: reading rows from files, tokenizing prompts, demonstrations and preference pairs, and the order of rows in
//! training.

mod chat;
mod columns;
mod cursor;
mod dataset;
mod demonstrations;
mod dialects;
mod episode;
mod files;
mod formats;
mod left_out;
mod pairs;
mod preferences;
mod prompts;
mod reader;
mod responses;
mod row;
pub(crate) mod settings;
mod sources;
mod texts;
mod unread;

pub use columns::Columns;
pub use cursor::{Cursor, CursorState};
pub use dataset::Dataset;
pub(crate) use demonstrations::TEMPLATE_FLAG;
pub use demonstrations::{Demonstration, DemonstrationOptions};
pub use episode::Episode;
pub(crate) use episode::ends_with_calls;
pub use files::{Files, is_data_file};
pub use pairs::Pair;
pub use preferences::Preference;
pub use prompts::{Prompt, PromptLimit};
pub use reader::RowReader;
pub use responses::{PromptCompletion, PromptResponse};
pub use settings::{ChatTemplateConfig, DataConfig, DataSplit, LongPrompts, PromptLengthConfig, SplitConfig, Stage};
pub use sources::Sources;

pub(crate) use chat::{cut_after_eos, encode_chat, prompt_messages};
pub(crate) use row::{messages_field, prompt_field};
