//! The program `rlhf`: a command line over the library. Exit codes: 0, 2 for usage, 1 for every other error.

mod answer;
mod cli;
mod measure;
mod output;

use std::backtrace::Backtrace;
use std::io::{self, Write};
use std::panic::{self, PanicHookInfo};
use std::process::ExitCode;
use std::sync::Mutex;

use rlhf::report::{Console, request_stop};
use rlhf::{Error, Result};

use crate::cli::{Stop, Task};

fn main() -> ExitCode {
    panic::set_hook(Box::new(keep_panic));
    match panic::catch_unwind(start) {
        Ok(code) => code,
        Err(_) => {
            let message = PANIC.lock().ok().and_then(|mut message| message.take()).unwrap_or_default();
            if is_broken_pipe(&message) { ExitCode::SUCCESS } else { fail(&internal(&message), 1) }
        }
    }
}

fn start() -> ExitCode {
    match cli::parse(std::env::args_os()) {
        Ok(task) => match run(&task) {
            Ok(()) => ExitCode::SUCCESS,
            // The reader of our output has seen enough.
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Err(error) => fail(&error.to_string(), error.exit_code()),
        },
        Err(Stop::Help(help)) => {
            let _ = help.print();
            ExitCode::from(if help.use_stderr() { 2 } else { 0 })
        }
        Err(Stop::Error(error)) => fail(&error.to_string(), error.exit_code()),
    }
}

fn run(task: &Task) -> Result<()> {
    if matches!(task, Task::Sft(_) | Task::Reward(_) | Task::Ppo(_)) {
        // An interrupted training run saves what it has; a second signal ends it at once. Without a handler (another one
        // is in place) signals end it at once as ever.
        let _ = ctrlc::set_handler(|| {
            if request_stop() {
                // The exit code that shells give an interrupted program.
                tch_ext::exit_at_once(130);
            }
            let _ = writeln!(io::stderr(), "\nending after this update; once more to end at once and lose the model");
        });
    }
    match task {
        Task::Sft(config) => rlhf::train::sft::sft(config, Console::detect()),
        Task::Reward(config) => rlhf::train::reward::reward(config, Console::detect()),
        Task::Ppo(config) => rlhf::train::ppo::ppo(config, Console::detect()),
        Task::Generate(config) => answer::answer(config),
        Task::Logprobs(config) => measure::logprobs(config),
        Task::Score(config) => measure::score(config),
        Task::Merge(config) => rlhf::merge::merge(config),
    }
}

/// Prints the one line that ends a failed run.
fn fail(message: &str, code: u8) -> ExitCode {
    let _ = writeln!(io::stderr(), "error: {}", first_line(message));
    ExitCode::from(code)
}

/// The line that says what is wrong; libtorch adds a C++ backtrace below it.
fn first_line(message: &str) -> &str {
    message.lines().next().unwrap_or_default()
}

/// The first panic's message and place, for [`main`] to print.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

fn keep_panic(panic: &PanicHookInfo<'_>) {
    let payload = panic.payload();
    let message = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    let message = message.unwrap_or("no message");
    let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
    if let Ok(mut kept) = PANIC.lock() {
        kept.get_or_insert_with(|| summary(message, &place));
    }
    if std::env::var_os("RUST_BACKTRACE").is_some_and(|wanted| wanted != "0") {
        let _ = writeln!(io::stderr(), "{message}{place}\n{}", Backtrace::force_capture());
    }
}

/// One line of a panic. `unwrap` prints libtorch's message and C++ backtrace through `Debug`, which escapes the line ends.
fn summary(message: &str, place: &str) -> String {
    let first = first_line(message).split("\\n").next().unwrap_or_default();
    format!("{first}{place}")
}

fn internal(message: &str) -> String {
    format!("internal: {message} (please report; set RUST_BACKTRACE=1 for more)")
}

/// `println!` panics when the program that reads our output is gone.
fn is_broken_pipe(message: &str) -> bool {
    message.starts_with("failed printing to stdout: Broken pipe")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_libtorch_becomes_one_line_with_its_place() {
        let message =
            r#"called `Result::unwrap()` on an `Err` value: Torch("size mismatch\nException raised from meta")"#;
        assert_eq!(
            internal(&summary(message, " at model.rs:7:5")),
            "internal: called `Result::unwrap()` on an `Err` value: Torch(\"size mismatch at model.rs:7:5 \
             (please report; set RUST_BACKTRACE=1 for more)"
        );
        assert_eq!(summary("left\nright", ""), "left");
    }

    #[test]
    fn the_panic_of_println_on_a_closed_pipe_is_known() {
        assert!(is_broken_pipe("failed printing to stdout: Broken pipe (os error 32) at library/std/src/io/stdio.rs"));
        assert!(!is_broken_pipe("failed printing to stdout: No space left on device (os error 28)"));
    }
}
