//! Requests to stop: a signal or another thread asks the running training loop to end. Also the programs that end with the process.

use crate::{Error, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, IsTerminal, Write};
use std::process::Child;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The exit code of the requested stop, 0 while there is no request. A signal reaches the whole process, so there is one
/// value for all of it.
static STOP: AtomicU8 = AtomicU8::new(0);

/// Whether the run of this process is complete. The message at a signal then differs.
static COMPLETE: AtomicBool = AtomicBool::new(false);

/// The message at the first signal to a training run.
pub const STOPPING: &str =
    "stopping after this update; send the signal again after a second to stop at once without saving";

/// Time in which further signals belong to the first request to stop.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Counts the requests to stop that come as signals.
///
/// One request may arrive several times: `timeout` signals the program and then its process group, systemd and SLURM signal every
/// process of a job, and `rlhf launch` passes a signal on.
#[derive(Debug, Default)]
pub struct Requests {
    first: Option<Instant>,
    number: usize,
}

impl Requests {
    /// Counts a signal that arrived at `now`. Returns the number of its request, from 1; `None` if it repeats the first request.
    pub fn count(&mut self, now: Instant) -> Option<usize> {
        let first = *self.first.get_or_insert(now);
        if self.number == 1 && now.saturating_duration_since(first) < SAME_REQUEST {
            return None;
        }
        self.number += 1;
        Some(self.number)
    }
}

/// Requests that the running training loop ends after its current update and saves. Returns whether that had been requested
/// before.
///
/// The loop then ends in [`Error::Stopped`] with this exit code: 128 plus the number of the signal, or any other but 0. Later
/// loops end at once too, until [`clear_stop`] is called.
pub fn request_stop(code: u8) -> bool {
    STOP.swap(code, Ordering::SeqCst) != 0
}

/// Makes Ctrl-C, SIGTERM and SIGHUP end the runs of this process as in the program `rlhf`: the first signal requests a stop, and the run
/// saves a checkpoint and its model after the current update; another signal after a second ends the process at once. Programs that use the
/// library call it before their first run.
///
/// # Errors
/// If the handler cannot be installed.
pub fn stop_on_signals() -> Result<()> {
    let notify = |number| {
        if number == 1 {
            let _ = writeln!(std::io::stderr(), "{}", below_interrupt(STOPPING));
        }
    };
    request_stop_on_signals(notify).map_err(Error::io("install", "a handler of signals"))
}

/// Installs a handler of the [`stopping_signals`]: the first signal requests a stop; another one, a second later or more, ends the process
/// and the programs that it started at once. Before the process ends, `notify` is called with the number of the request, from 1.
///
/// # Errors
/// If the handler cannot be installed.
pub fn request_stop_on_signals(mut notify: impl FnMut(usize) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new(stopping_signals())?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut requests = Requests::default();
        for signal in signals.forever() {
            let Some(number) = requests.count(Instant::now()) else { continue };
            // The exit code that shells report for a program that the signal ended.
            let code = 128 + signal;
            request_stop(code as u8);
            notify(number);
            if number > 1 {
                end_process(code);
            }
        }
    })?;
    Ok(())
}

/// Functions that are called before a signal ends the process.
static CLEAN_UPS: Mutex<Vec<Box<dyn Fn() + Send>>> = Mutex::new(Vec::new());

/// Registers `clean`, which [`end_process`] calls first.
pub fn clean_up_on_signals(clean: impl Fn() + Send + 'static) {
    CLEAN_UPS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(clean));
}

/// The signals that ask a program to stop. Under `nohup` SIGHUP stays ignored.
pub fn stopping_signals() -> impl Iterator<Item = i32> {
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| signal != SIGHUP || !is_ignored(SIGHUP))
}

/// Returns the text of a message after a signal: on a terminal it begins below the `^C` that is shown there.
pub fn below_interrupt(message: &str) -> String {
    let start = if std::io::stderr().is_terminal() { "\n" } else { "" };
    format!("{start}{message}")
}

/// Takes back [`request_stop`], so that the loops of this process train again. Without this call every later loop ends at once.
///
/// The request is for the whole process, so call this when no loop is left that the request should end; with several ranks, in each rank.
pub fn clear_stop() {
    STOP.store(0, Ordering::SeqCst);
}

/// Returns whether [`request_stop`] was called; the training loops check it between updates.
pub fn stop_requested() -> bool {
    STOP.load(Ordering::SeqCst) != 0
}

/// Sets whether the run is complete and saved, so that a stop ends only its last uploads.
pub fn set_complete(complete: bool) {
    COMPLETE.store(complete, Ordering::SeqCst);
}

/// Returns whether the run is complete and saved, so that a stop ends only its last uploads.
pub fn is_complete() -> bool {
    COMPLETE.load(Ordering::SeqCst)
}

/// Returns the exit code of the requested stop, 1 if there is no request.
pub fn exit_code() -> u8 {
    STOP.load(Ordering::SeqCst).max(1)
}

/// Returns whether this process was started with this signal ignored.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// The process groups of programs that score or judge.
static PROGRAMS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

fn programs() -> MutexGuard<'static, Vec<Pid>> {
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records a program that was started with its own process group.
pub fn add_program(child: &Child) {
    programs().push(Pid::from_child(child));
}

/// Kills a program and every process of its group, once. Its exit status must not have been collected before: then the id may be that
/// of another group.
pub fn kill_program(child: &Child) {
    let group = Pid::from_child(child);
    let mut programs = programs();
    if let Some(at) = programs.iter().position(|running| *running == group) {
        let _ = kill_process_group(group, Signal::KILL);
        programs.swap_remove(at);
    }
}

/// Ends the process at once, without destructors, after the functions of [`clean_up_on_signals`]. Kills all programs that score or judge,
/// with every process that they started.
pub fn end_process(code: i32) -> ! {
    CLEAN_UPS.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|clean| clean());
    for group in programs().iter() {
        let _ = kill_process_group(*group, Signal::KILL);
    }
    tch_ext::exit_at_once(code)
}

/// Sleeps for `time`, or until a stop is requested. Returns whether one is.
pub fn pause(time: Duration) -> bool {
    let until = Instant::now() + time;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || stop_requested() {
            return stop_requested();
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
}

/// Returns the error with this message that ends the run, if a stop is requested.
pub fn stopped(message: String) -> Option<Error> {
    stop_requested().then(|| Error::Stopped { message, code: STOP.load(Ordering::SeqCst) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_within_a_second_of_the_first_is_no_second_request() {
        let start = Instant::now();
        let mut requests = Requests::default();
        let counted = [0, 0, 5, 999, 1000, 1001].map(|millis| requests.count(start + Duration::from_millis(millis)));
        assert_eq!(counted, [Some(1), None, None, None, Some(2), Some(3)]);
    }
}
