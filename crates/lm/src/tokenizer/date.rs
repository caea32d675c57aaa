//! The date that chat templates read by `strftime_now`: the system's, or for the tokenizers of a run the one of its start.

use jiff::Zoned;
use jiff::civil::DateTime;
use rlhf_base::{Error, Result};
use std::cell::Cell;

thread_local! {
    /// The date of the tokenizers that this thread loads.
    static LOAD_DATE: Cell<Option<DateTime>> = const { Cell::new(None) };
    /// The date of the text that this thread renders.
    static RENDER_DATE: Cell<Option<DateTime>> = const { Cell::new(None) };
}

/// Gives the chat templates of the tokenizers that this thread loads, as long as it exists, one date: a run that is resumed on another day
/// makes the same prompts.
#[derive(Debug)]
pub struct FixedDate(Option<DateTime>);

impl FixedDate {
    /// Sets the date, as [`now`] and [`fixed`] write it.
    ///
    /// # Errors
    /// If it is no date.
    pub fn new(date: &str) -> Result<Self> {
        let read =
            date.parse::<DateTime>().map_err(|e| Error::Run(format!("date of chat templates: {date:?}: {e}")))?;
        Ok(Self(LOAD_DATE.replace(Some(read))))
    }
}

impl Drop for FixedDate {
    fn drop(&mut self) {
        LOAD_DATE.set(self.0);
    }
}

/// Returns the local date and time of the system.
pub fn now() -> String {
    local_now().to_string()
}

/// Returns the date of the current [`FixedDate`], if there is one.
pub fn fixed() -> Option<String> {
    load_date().map(|date| date.to_string())
}

/// Returns the date for templates that are loaded now on this thread; none for the system's.
pub(super) fn load_date() -> Option<DateTime> {
    LOAD_DATE.get()
}

/// Sets the date that a rendering on this thread reads; none for the system's.
pub(super) fn set_render_date(date: Option<DateTime>) {
    RENDER_DATE.set(date);
}

/// The function `strftime_now`: Python's `datetime.now().strftime(format)`, which knows no time zone.
///
/// # Errors
/// If the format is malformed.
pub(super) fn strftime_now(format: &str) -> std::result::Result<String, jiff::Error> {
    let date = RENDER_DATE.get().unwrap_or_else(local_now);
    jiff::fmt::strtime::format(format.replace("%Z", "").replace("%z", ""), date)
}

fn local_now() -> DateTime {
    Zoned::now().datetime()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_last_as_long_as_they_are_fixed_and_are_written_as_they_are_read() {
        assert_eq!(fixed(), None);
        let outer = FixedDate::new("2024-02-29T23:59:58.5").unwrap();
        assert_eq!(fixed().as_deref(), Some("2024-02-29T23:59:58.5"));
        {
            let now = now();
            let _inner = FixedDate::new(&now).unwrap();
            assert_eq!(fixed(), Some(now));
        }
        assert_eq!(fixed().as_deref(), Some("2024-02-29T23:59:58.5"));
        drop(outer);
        assert_eq!(fixed(), None);
        let error = FixedDate::new("soon").unwrap_err().to_string();
        assert!(error.starts_with("date of chat templates: \"soon\": "), "{error}");
    }

    #[test]
    fn a_date_has_no_zone_as_in_python() {
        set_render_date(Some("2024-02-29T23:59:58".parse().unwrap()));
        assert_eq!(strftime_now("%d %b %Y %H:%M%z%Z").unwrap(), "29 Feb 2024 23:59");
        set_render_date(None);
    }
}
