//! A progress bar for work that is counted in rows, during or before the updates of a run.

use crate::run::Console;
use crate::terminal::{Stream, about};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use rlhf_base::safe_text::one_line;
use std::time::Duration;

/// A progress bar with the time left, on standard error if it is a terminal.
pub(crate) struct PhaseBar {
    bar: ProgressBar,
    console: Console,
}

impl PhaseBar {
    pub(crate) fn new(console: Console) -> Self {
        let hidden = console == Console::Silent || !Stream::Err.moves_cursor();
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let left = |state: &ProgressState, to: &mut dyn std::fmt::Write| {
            let known = state.pos() > 0 && state.eta() > Duration::ZERO;
            let _ = if known { write!(to, ", {} left", about(state.eta())) } else { Ok(()) };
        };
        let style = ProgressStyle::with_template("{msg} {bar:30.cyan} {pos}/{len}{left}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).with_key("left", left);
        let bar = ProgressBar::with_draw_target(Some(0), target).with_style(style);
        Self { bar, console }
    }

    /// Starts a phase of `count` rows.
    pub(crate) fn start(&self, what: &str, count: usize) {
        self.bar.reset();
        self.bar.set_length(count as u64);
        self.bar.set_message(one_line(what).into_owned());
    }

    pub(crate) fn advance(&self, count: usize) {
        self.bar.inc(count as u64);
    }

    pub(crate) fn warn(&self, message: &str) {
        self.bar.suspend(|| self.console.warn(message));
    }

    /// The bar and the console below it, for lines that are printed from elsewhere.
    pub(crate) fn parts(&self) -> (ProgressBar, Console) {
        (self.bar.clone(), self.console)
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for PhaseBar {
    fn drop(&mut self) {
        self.finish();
    }
}
