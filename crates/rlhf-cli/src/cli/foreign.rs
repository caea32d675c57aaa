//! Names of other systems: one table of them ([`table`]), and its readers.
//!
//! A name is a flag that a command accepts and translates, a key of another system's file, or unknown here with a hint. What its row of the
//! table cannot say, since several values decide together, is code beside it: `trl` and `chat` for flags, `mixture` for lists of datasets,
//! `sharding` for the files of DeepSpeed and accelerate, which `files` reads.

mod chat;
mod files;
mod interpret;
mod line;
mod lookup;
mod mixture;
mod sharding;
mod table;
mod trl;

pub(super) use self::files::{LaunchFile, launch};
pub(super) use self::interpret::translate;
pub(super) use self::line::{of_file, of_line};
#[cfg(test)]
pub(super) use self::lookup::is_list;
pub(super) use self::lookup::{described, hint, is_added, is_of_chat, is_warmup_ratio, rows, takes_map, with_flags};
