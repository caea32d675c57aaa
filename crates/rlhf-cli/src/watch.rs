//! `rlhf watch`: a run while it is in progress, as the page of [`rlhf::report`] over HTTP or in the terminal.

mod live;
mod server;
mod terminal;

pub use server::watch;
pub use terminal::watch_in_terminal;
