//! The program `rlhf`: a command line over the library. Exit codes: 0; 2 for a usage error; 128 plus the signal's number if a
//! signal stopped a training run; 3 if an alarm did; 4 if its model is saved but could not be pushed to the hub; 1 for any other
//! error, and if `rlhf doctor` finds a failure.

mod cli;
pub mod doctor;
mod http_server;
pub mod serve;
pub(crate) mod session;
pub mod watch;

use signal_hook::consts::SIGHUP;
use signal_hook::iterator::Signals;
use std::backtrace::Backtrace;
use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{self, PanicHookInfo};
use std::sync::Mutex;
use std::time::Duration;

use rlhf::device::{Device, load_ahead, started_kernels};
use rlhf::dist::World;
use rlhf::dist::launch::Launch;
use rlhf::run::{Console, Runtime, announce, clear_bar, report_error};
use rlhf::safe_text::one_line;
use rlhf::settings::{PpoConfig, RunConfig};
use rlhf::signals::{STOPPING, below_interrupt, end_process, is_complete, request_stop_on_signals, stopping_signals};
use rlhf::terminal::{Colour, Stream, words};
use rlhf::{Error, Result};

use crate::cli::groups::with_command_names;
use crate::cli::{Parsed, Stop, Task};

/// Message of a signal after the last update.
const COMPLETE: &str =
    "the run is complete and saved; its last uploads are stopped; send the signal again after a second to stop at once";
/// Maximum seconds that a rank waits for the others in a command without the setting `dist_timeout`.
const DIST_TIMEOUT: u64 = 1800;

/// Runs the program with the words of a command line, its name first, and ends the process.
pub fn run(words: Vec<OsString>) -> ! {
    rlhf::terminal::set_words(words);
    cli::launch::end_with_launcher();
    tch_ext::bound_spinning();
    panic::set_hook(Box::new(keep_panic));
    let code = panic::catch_unwind(start).unwrap_or_else(|_| {
        let message = take_panic();
        if is_broken_pipe(&message) {
            return 0;
        }
        World::of_process().leave(&internal(&message));
        fail(&internal(&message), 1)
    });
    let _ = io::stdout().flush();
    if let Some(line) = started_kernels() {
        let _ = writeln!(io::stderr(), "{line}");
    }
    tch_ext::exit(code.into())
}

/// Runs the program. Returns its exit code.
fn start() -> u8 {
    match cli::parse(words()) {
        Ok(Parsed { task, notes, written }) => {
            for note in notes.iter().filter(|_| is_main()) {
                let _ = writeln!(io::stderr(), "note: {}", one_line(note));
            }
            match run_task(&task) {
                Ok(code) => code,
                // The reader of the output has closed it.
                Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => 0,
                Err(error) => {
                    let error = with_command_names(words(), written.told(error));
                    World::of_process().leave(&error.to_string());
                    // Before the ranks have met, an error may be of one rank alone.
                    report(&error, World::of_process().is_main())
                }
            }
        }
        Err(Stop::Help(help)) => {
            let _ = help.print();
            if help.use_stderr() { 2 } else { 0 }
        }
        Err(Stop::ShortHelp(text)) => {
            let _ = io::stdout().write_all(text.as_bytes());
            0
        }
        Err(Stop::Error(error)) => report(&error, is_main()),
    }
}

/// Runs the task. Returns the exit code of the program.
fn run_task(task: &Task) -> Result<u8> {
    // Without a handler a signal ends the process at once.
    let _ = match task {
        Task::Sft(_) | Task::Reward(_) | Task::Dpo(_) | Task::Distill(_) | Task::Ppo(_) | Task::Pipeline(_) => {
            stop_on_signals(Some(STOPPING))
        }
        Task::Serve(_) => stop_on_signals(Some("stopping; send the signal again after a second to stop at once")),
        // It stops at once, and nothing is lost.
        Task::Watch(_) => stop_on_signals(None).and_then(|()| end_at_hangup()),
        Task::Eval(_) if is_main() => end_on_signals(Some("stopped; the same command continues the evaluation")),
        Task::Generate(_) | Task::Logprobs(_) | Task::Score(_) | Task::Session(_) => end_on_signals(None),
        _ => Ok(()),
    };
    if shards_parameters(task) && Launch::from_env()?.is_some() {
        tch_ext::map_large_allocations();
    } else {
        tch_ext::keep_freed_memory();
    }
    if is_main() {
        cli::plan::warn(task);
    }
    join_ranks(task)?;
    let world = World::of_process();
    let console = if world.is_main() { Console::detect() } else { Console::Silent };
    let runtime = &Runtime { world, console };
    let world = &runtime.world;
    match task {
        Task::Sft(config) => rlhf::train::sft::sft(config, runtime),
        Task::Reward(config) if config.eval_only => cli::score::evaluate(config, runtime),
        Task::Reward(config) => rlhf::train::reward_model::reward(config, runtime),
        Task::Dpo(config) => rlhf::train::dpo::dpo(config, runtime),
        Task::Distill(config) => rlhf::train::distill::distill(config, runtime),
        Task::Ppo(config) => rlhf::train::ppo::ppo(config, runtime),
        Task::Pipeline(config) => rlhf::train::pipeline::pipeline(config, runtime),
        Task::Generate(config) => cli::generate::generate(config, world),
        Task::Logprobs(config) => cli::logprobs::logprobs(config, world),
        Task::Score(config) => cli::score::score(config, world),
        // These need one process.
        Task::Eval(_)
        | Task::Merge(_)
        | Task::Convert(_)
        | Task::Push(_)
        | Task::Report(_)
        | Task::Watch(_)
        | Task::Chat(_)
        | Task::Serve(_)
        | Task::Doctor(_)
        | Task::Schema(_)
        | Task::Completions(_)
        | Task::Plan(_)
            if !is_main() =>
        {
            Ok(())
        }
        Task::Eval(config) => cli::evaluate::evaluate(config, console),
        Task::Merge(config) => rlhf::merge::merge(config),
        Task::Convert(config) => cli::convert::convert(config),
        Task::Push(config) => cli::push::push(config),
        Task::Report(config) => cli::report::report(config),
        Task::Watch(config) => cli::watch::watch(config),
        Task::Plan(task) => cli::plan::plan(task),
        Task::Chat(config) => cli::chat::chat(config),
        Task::Serve(config) => cli::serve::serve(config),
        Task::Session(config) => cli::session::session(config, world, take_panic),
        Task::Replay(task) => cli::replay::replay(task, runtime),
        Task::Launch(config) => return cli::launch::launch(config),
        Task::Completions(config) => cli::completions::completions(config),
        Task::Schema(config) => cli::schema::schema(config),
        Task::Doctor(config) => return cli::doctor::doctor(config),
    }?;
    Ok(0)
}

/// Returns whether this process is rank 0, or was started alone: the others do not repeat what concerns all.
fn is_main() -> bool {
    !Launch::from_env().is_ok_and(|launch| launch.is_some_and(|launch| launch.rank > 0))
}

/// Meets the other ranks, if a launcher started this process as one of several.
fn join_ranks(task: &Task) -> Result<()> {
    let run_settings = |run: &RunConfig| (run.dist.dist_timeout, run.device);
    let (seconds, device) = match task {
        Task::Sft(config) => run_settings(&config.run),
        Task::Reward(config) => run_settings(&config.run),
        Task::Dpo(config) => run_settings(&config.run),
        Task::Distill(config) => run_settings(&config.run),
        Task::Ppo(config) => run_settings(&config.run),
        Task::Pipeline(config) => (config.dist_timeout().unwrap_or(DIST_TIMEOUT), Device::Auto),
        Task::Replay(task) => run_settings(&task.ppo.run),
        Task::Generate(config) => (DIST_TIMEOUT, config.rows.compute.device),
        Task::Logprobs(config) => (DIST_TIMEOUT, config.rows.compute.device),
        Task::Score(config) => (DIST_TIMEOUT, config.rows.compute.device),
        Task::Session(_) => (DIST_TIMEOUT, Device::Auto),
        _ => return Ok(()),
    };
    if let Some(launch) = Launch::from_env()? {
        load_ahead(device);
        World::join(&launch, Duration::from_secs(seconds))?;
    }
    Ok(())
}

/// Returns whether parameters of a trained model are sharded over the ranks.
fn shards_parameters(task: &Task) -> bool {
    let ppo_shards = |config: &PpoConfig| config.policy_stage().max(config.value_stage()).shards_parameters();
    let run_shards = |run: &RunConfig| run.dist.zero_stage.shards_parameters();
    match task {
        Task::Sft(config) => run_shards(&config.run),
        Task::Reward(config) => run_shards(&config.run),
        Task::Dpo(config) => run_shards(&config.run),
        Task::Distill(config) => run_shards(&config.run),
        Task::Ppo(config) => ppo_shards(config),
        Task::Replay(task) => ppo_shards(&task.ppo),
        Task::Pipeline(config) => {
            let runs = config.sft.iter().map(|sft| &sft.run).chain(config.reward.iter().map(|reward| &reward.run));
            let runs = runs.chain(config.dpo.iter().map(|dpo| &dpo.run));
            let runs = runs.chain(config.distill.iter().map(|distill| &distill.run));
            runs.map(run_shards).chain(config.ppo.iter().map(ppo_shards)).any(|shards| shards)
        }
        _ => false,
    }
}

/// Installs a handler. A signal requests a stop (a training run stops after its update and saves a checkpoint) and prints `message`, if
/// there is one. A second signal ends the process at once, unless it is the first one again.
fn stop_on_signals(message: Option<&'static str>) -> io::Result<()> {
    request_stop_on_signals(move |number| match message {
        _ if number > 1 => clear_bar(),
        // `rlhf launch` sends SIGTERM to the other ranks of a failed one.
        Some(message) if is_main() && !World::of_process().is_broken() => {
            announce(&below_interrupt(if is_complete() { COMPLETE } else { message }));
        }
        _ => {}
    })
}

/// Installs a handler that ends the process a second after its terminal is gone: it would wait for a key forever.
fn end_at_hangup() -> io::Result<()> {
    let mut signals = Signals::new(stopping_signals().filter(|&signal| signal == SIGHUP))?;
    std::thread::Builder::new().name("hangup".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            std::thread::sleep(Duration::from_secs(1));
            tch_ext::exit_at_once(128 + signal);
        }
    })?;
    Ok(())
}

/// Installs a handler: a signal prints `message`, if there is one, and ends the process and the programs that it started at once.
fn end_on_signals(message: Option<&'static str>) -> io::Result<()> {
    let mut signals = Signals::new(stopping_signals())?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            match message {
                Some(message) => announce(&below_interrupt(message)),
                None => clear_bar(),
            }
            if let Some(note) = cli::rows::leave_part() {
                announce(&note);
            }
            end_process(128 + signal);
        }
    })?;
    Ok(())
}

/// Prints the error, one line for each refused setting, and returns its exit code. Only the rank that `speaks` reports an error that
/// all ranks have alike.
fn report(error: &Error, speaks: bool) -> u8 {
    let known = error.is_usage() || matches!(error, Error::Stopped { .. } | Error::NotPushed(_));
    let common = known || World::of_process().is_alike(error);
    if common && !speaks {
        return error.exit_code();
    }
    match &error.refusals()[..] {
        // The user asked for it.
        [] if matches!(error, Error::Stopped { code, .. } if stopping_signals().any(|signal| i32::from(*code) == 128 + signal)) =>
        {
            let message = error.to_string();
            let line = one_line(first_line(&message));
            report_error(&line);
            let _ = writeln!(io::stderr(), "{line}");
            error.exit_code()
        }
        [] => fail(&error.to_string(), error.exit_code()),
        refusals => {
            for refusal in refusals {
                fail(&one_line(&refusal.to_string()), error.exit_code());
            }
            error.exit_code()
        }
    }
}

/// Prints one line of an error, and returns `code`.
fn fail(message: &str, code: u8) -> u8 {
    let message = one_line(first_line(message));
    report_error(&message);
    let _ = writeln!(io::stderr(), "{}", Stream::Err.labelled("error", Colour::Red, &message));
    code
}

/// Returns the first line: libtorch adds a C++ backtrace below it.
fn first_line(message: &str) -> &str {
    message.lines().next().unwrap_or_default()
}

/// Message and place of the first panic, which [`run`] prints.
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

/// Returns the message of the last panic, and forgets it.
fn take_panic() -> String {
    PANIC.lock().ok().and_then(|mut message| message.take()).unwrap_or_default()
}

/// Returns a panic as one line. `unwrap` prints libtorch's message and C++ backtrace by `Debug`, which escapes line ends.
fn summary(message: &str, place: &str) -> String {
    let first = first_line(message).split("\\n").next().unwrap_or_default();
    format!("{first}{place}")
}

/// Returns the line of a panic: that memory does not suffice, if libtorch could not allocate, or else an internal error.
fn internal(message: &str) -> String {
    if let Some(error) = Error::out_of_memory(message) {
        return error.to_string();
    }
    format!("internal: {message} (please report; set RUST_BACKTRACE=1 for more)")
}

/// Returns whether a panic is that of `println!` when the reader of the output is gone.
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
    fn a_lack_of_memory_is_no_fault_of_the_program() {
        let line = internal("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB at model.rs:7:5");
        assert!(line.starts_with("out of memory: cannot allocate 2.00 GiB more; shorter rows"), "{line}");
    }

    #[test]
    fn the_panic_of_println_on_a_closed_pipe_is_known() {
        assert!(is_broken_pipe("failed printing to stdout: Broken pipe (os error 32) at library/std/src/io/stdio.rs"));
        assert!(!is_broken_pipe("failed printing to stdout: No space left on device (os error 28)"));
    }
}
