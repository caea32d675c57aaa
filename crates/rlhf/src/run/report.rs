//! What a run tells: `metrics.jsonl` and TensorBoard for programs, a progress bar and tables for people.

use crate::data::prompt_field;
use crate::files;
use crate::generate::FinishReason;
use crate::metrics::Metrics;
use crate::model::{AdapterFolder, BASE_MODEL};
use crate::run::checkpoint::{self, Start};
use crate::run::resolved::{RESOLVED, write_resolved};
use crate::run::settings::{ReportTo, Resume, RunConfig, TensorboardTags};
use crate::safe_text::{self, beginning, one_line};
use crate::terminal::{self, Colour, Stream};
use crate::weights::{BESIDE, write_text};
use crate::{Error, Result};
use comfy_table::{Attribute, Cell, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle, WeakProgressBar};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Where a run's words go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Console {
    /// A person watches: a progress bar, how the run begins and ends, and warnings on standard error, tables on standard
    /// output.
    Person,
    /// A program reads: the lines of `metrics.jsonl` on standard output too, in seven significant digits; warnings and checks
    /// on standard error, and where that is a terminal, all that a person is told, but for the tables.
    Program,
    /// Nobody does: files only. What a library's caller wants.
    Silent,
}

impl Console {
    /// Writes a warning to standard error, unless nobody watches.
    pub(crate) fn warn(self, message: &str) {
        if self != Console::Silent {
            let warning = Stream::Err.labelled("warning", Colour::Yellow, &one_line(message));
            let _ = writeln!(std::io::stderr(), "{warning}");
        }
    }

    /// A person if standard output is a terminal, else a program.
    pub fn detect() -> Self {
        if std::io::stdout().is_terminal() { Console::Person } else { Console::Program }
    }
}

/// The exit code with which the user has asked the run to end, else 0. A signal concerns the whole process, so this is one
/// number for all of it.
static STOP: AtomicU8 = AtomicU8::new(0);

/// Asks the running training loop to end after its current update and to save; gives whether that was asked before.
///
/// The loop then ends in [`Error::Stopped`] with this exit code: 128 and the number of the signal that asks, or any other but
/// 0.
pub fn request_stop(code: u8) -> bool {
    STOP.swap(code, Ordering::SeqCst) != 0
}

/// Whether [`request_stop`] was called; the training loops look between updates.
pub fn stop_requested() -> bool {
    STOP.load(Ordering::SeqCst) != 0
}

/// Sleeps for this long, or until the run is asked to end; gives whether it was.
pub(crate) fn pause(time: Duration) -> bool {
    let until = Instant::now() + time;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || stop_requested() {
            return stop_requested();
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
}

/// The error with this message in which whatever was to come next ends, if [`request_stop`] was called.
pub(crate) fn stopped(message: String) -> Option<Error> {
    stop_requested().then(|| Error::Stopped { message, code: STOP.load(Ordering::SeqCst) })
}

/// The most characters of a prompt or a response in the table of samples; the files have all of them.
const LONGEST_CELL: usize = 4000;

/// One row of a sample table.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// The prompt's text.
    pub prompt: String,
    /// What the model answered.
    pub response: String,
    /// What the reward made of it, all in all.
    pub score: f64,
    /// What each reward said, by its name, before weights and penalties.
    pub components: BTreeMap<String, f64>,
    /// Why the response ended, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<FinishReason>,
    /// Tokens of the response, a stop token included, where they are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_tokens: Option<usize>,
    /// The prompt as a table shows it, where it is a conversation.
    #[serde(skip)]
    pub(crate) conversation: Option<Conversation>,
}

/// A conversation as a table shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Conversation {
    /// What it begins with, often the same for all.
    system: Option<String>,
    /// What was said.
    turns: String,
}

impl Conversation {
    /// That of a dataset's `row`, if it is one and all of it stands in `text`, the prompt as the model reads it: a prompt that
    /// was cut is shown as it is.
    pub(crate) fn of(row: &Value, text: &str) -> Option<Self> {
        let (_, prompt) = prompt_field(row)?;
        let messages: Option<Vec<(&str, &str)>> = prompt
            .as_array()?
            .iter()
            .map(|message| Some((message["role"].as_str()?, message["content"].as_str()?)))
            .collect();
        let messages = messages.filter(|messages| messages.iter().all(|(_, said)| text.contains(said.trim())))?;
        let (system, turns) = match messages.split_first()? {
            (("system" | "developer", system), turns) if !turns.is_empty() => (Some(system.to_string()), turns),
            _ => (None, &messages[..]),
        };
        let turns = match turns {
            [("user", said)] => said.to_string(),
            turns => turns.iter().map(|(role, said)| format!("{role}: {said}")).collect::<Vec<_>>().join("\n"),
        };
        Some(Self { system, turns })
    }
}

/// What the policy makes of the prompts that are held out.
#[derive(Debug, Clone)]
pub struct Evaluation {
    /// `eval/score`, `eval/kl`, `eval/response_length` and `time/eval`; `docs/algorithm.md` defines them.
    pub metrics: Metrics,
    /// The answers, in the order of the prompts.
    pub samples: Vec<Sample>,
}

/// Kinds of [`Warning`]; `docs/library.md` says when each comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WarningKind {
    /// The KL to the reference has grown by more than 1 nat per token since the first update; once in a run.
    RunawayKl,
    /// The policy's entropy is below 0.05 nats per token; once in a run.
    LowEntropy,
    /// At least 100 responses in a row did not end by a stop token though there is one; once in a run.
    NoStop,
    /// Most responses of a rollout go on behind an eos token, which stops nothing in this run; once in a run.
    IgnoredEos,
    /// All responses of an update were shorter than `min_response_length`, so earlier ones were trained on again.
    ReusedResponses,
    /// Optimizer steps of an update were skipped, since a loss or a gradient was not finite.
    SkippedSteps,
}

/// A sign in an update that the run goes wrong; nothing is stopped by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The kind.
    pub kind: WarningKind,
    /// One line for people.
    pub message: String,
}

/// Something that happened in a run, as [`crate::train::ppo::PpoTrainer::train_with`] tells it.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// An update is done, and its metrics are written.
    Update {
        /// Updates done so far.
        step: usize,
        /// What is known of this one, or since the last event; those of an evaluation after it too.
        metrics: &'a Metrics,
    },
    /// The prompts that are held out were answered.
    Evaluation {
        /// Updates done so far.
        step: usize,
        /// What came out.
        evaluation: &'a Evaluation,
    },
    /// Sample prompts were answered.
    Samples {
        /// Updates done so far.
        step: usize,
        /// The answers.
        samples: &'a [Sample],
    },
    /// Something in an update should be looked at, and stops nothing; also on standard error, unless the console is silent.
    Warning {
        /// Updates done so far, this one included.
        step: usize,
        /// The kind and the text.
        warning: &'a Warning,
    },
    /// A folder holds the model as it is now: a checkpoint, the best model so far, or what the run leaves at its end.
    Saved {
        /// The folder.
        dir: &'a Path,
    },
}

type Watcher<'w> = dyn FnMut(&Event<'_>) -> ControlFlow<()> + 'w;

/// Writes the metrics, samples and console output of one training run.
pub(crate) struct Reporter<'w> {
    dir: PathBuf,
    console: Console,
    /// Whether someone reads standard error: how the run begins and ends is for them.
    is_read: bool,
    metrics: File,
    tensorboard: Option<crate::TensorBoard>,
    tags: TensorboardTags,
    bar: ProgressBar,
    progress: Arc<Mutex<Shown>>,
    began: Instant,
    watcher: Option<Box<Watcher<'w>>>,
    stopped: bool,
}

/// What the progress bar shows beside the updates done.
#[derive(Debug, Clone)]
struct Shown {
    /// What the run is doing.
    phase: &'static str,
    /// The few numbers people look at, the most important first.
    watched: Vec<String>,
    /// When the first update of this process began, and how many were done by then.
    began: (Instant, usize),
    /// When the last update ended, and how many are done.
    reached: Option<(Instant, usize)>,
}

impl Shown {
    /// The time that the updates to `total` will take by the mean of those done; unknown before the first one is done.
    fn left(&self, total: usize, now: Instant) -> Option<Duration> {
        let ((at, done), (began, first)) = (self.reached?, self.began);
        let each = at.duration_since(began).div_f64(done.checked_sub(first).filter(|&done| done > 0)? as f64);
        let left = each.mul_f64(total.saturating_sub(done) as f64);
        Some(left.saturating_sub(now.duration_since(at)))
    }
}

/// Columns of the phase on the progress bar, so that what follows stays in its place.
const PHASE: usize = "optimising".len();

/// The line of the progress bar on a terminal of `width` columns: what does not fit is left out, the least important first.
fn bar_line(
    shown: &Shown,
    width: usize,
    colours: bool,
    done: usize,
    total: usize,
    elapsed: Duration,
    now: Instant,
) -> String {
    let columns = match width {
        ..70 => 8,
        70..100 => 14,
        _ => 24,
    };
    let full = (columns * done.min(total)).checked_div(total).unwrap_or(0);
    let left = shown.left(total, now).map_or("--".into(), terminal::clock);
    let of = total.to_string();
    let count = format!("{done:>0$}/{of}", of.len());
    let rest = format!(" {count} [{}, {left} left] ", terminal::clock(elapsed));
    let room = (width.saturating_sub(1)).saturating_sub(columns + rest.len());
    let mut tail = format!("{:PHASE$}", shown.phase);
    for number in &shown.watched {
        if tail.len() + 2 + number.len() > room {
            break;
        }
        tail.push_str("  ");
        tail.push_str(number);
    }
    let bar = format!("{}{}", "\u{2588}".repeat(full), "\u{2591}".repeat(columns - full));
    let bar = terminal::paint(colours, Colour::Cyan, &bar);
    format!("{bar}{rest}{}", tail.trim_end())
}

/// The progress bar that is on the terminal, if one is: what else is written there has to stand above it.
static BAR: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

fn current_bar() -> Option<ProgressBar> {
    unpoisoned(&BAR).as_ref().and_then(WeakProgressBar::upgrade)
}

fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a line to standard error, above the progress bar of a running training.
pub fn announce(text: &str) {
    let write = || drop(writeln!(std::io::stderr(), "{text}"));
    match current_bar() {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Takes the progress bar of a running training off the terminal, before the process ends at once.
pub fn clear_bar() {
    current_bar().iter().for_each(ProgressBar::finish_and_clear);
}

impl<'w> Reporter<'w> {
    /// Opens `metrics.jsonl`, and what `run.report_to` asks for, in the run's folder, which must exist.
    ///
    /// `total` updates fill the progress bar. Of a run that goes on from where it has `reached`, what the files say of later
    /// updates is cut off, and the rest goes on behind what is left.
    ///
    /// # Errors
    /// If a file cannot be created.
    pub(crate) fn resume(run: &RunConfig, total: usize, reached: Reached, console: Console) -> Result<Self> {
        let dir = run.output_dir.clone();
        let path = dir.join(METRICS);
        let goes_on = reached.updates > 0;
        cut_lines(&path, "step", goes_on.then_some(reached.recorded))?;
        remove_later_samples(&dir.join(SAMPLES), reached.updates)?;
        if goes_on {
            crate::TensorBoard::cut(&dir, reached.recorded as i64)?;
        }
        let metrics = append_to(&path)?;
        let tensorboard = match run.report_to {
            ReportTo::None => None,
            ReportTo::Tensorboard => Some(crate::TensorBoard::create(&dir)?),
        };
        let began = Instant::now();
        let shown = Shown { phase: "", watched: Vec::new(), began: (began, reached.updates), reached: None };
        let progress = Arc::new(Mutex::new(shown));
        // Where standard error is no terminal the bar hides itself.
        let hidden = run.disable_tqdm || console == Console::Silent || !Stream::Err.moves_cursor();
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let (of_bar, colours) = (progress.clone(), Stream::Err.has_colours());
        let line = move |state: &ProgressState, to: &mut dyn std::fmt::Write| {
            let (done, total) = (state.pos() as usize, state.len().unwrap_or(0) as usize);
            let width = Stream::Err.width().unwrap_or(80);
            let shown = unpoisoned(&of_bar).clone();
            let _ = to.write_str(&bar_line(&shown, width, colours, done, total, state.elapsed(), Instant::now()));
        };
        let style = ProgressStyle::with_template("{line}").expect("the template is sound").with_key("line", line);
        let bar = ProgressBar::with_draw_target(Some(total as u64), target).with_style(style);
        bar.set_position(reached.updates as u64);
        if !hidden {
            *unpoisoned(&BAR) = Some(bar.downgrade());
            // A long update moves the clock too.
            bar.enable_steady_tick(Duration::from_millis(500));
        }
        let is_read = match console {
            Console::Person => true,
            Console::Program => Stream::Err.width().is_some(),
            Console::Silent => false,
        };
        let tags = run.tensorboard_tags;
        Ok(Self {
            dir,
            console,
            is_read,
            metrics,
            tensorboard,
            tags,
            bar,
            progress,
            began,
            watcher: None,
            stopped: false,
        })
    }

    /// Writes the settings of the run where hyperparameters are wanted.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn settings(&mut self, settings: &impl Serialize) -> Result<()> {
        let settings = serde_json::to_value(settings).ok().and_then(|settings| settings.as_object().cloned());
        let tensorboard = self.tensorboard.as_mut().zip(settings);
        tensorboard.map_or(Ok(()), |(tensorboard, settings)| tensorboard.hyperparameters(&settings))
    }

    /// Tells how the run begins.
    pub(crate) fn begins(&self, title: &str, facts: &[(&str, String)]) {
        if self.is_read {
            let title = Stream::Err.paint(Colour::Bold, &one_line(title));
            let facts: Vec<_> = facts.iter().map(|(name, fact)| (*name, one_line(fact))).collect();
            self.tell_all(&format!("{title}\n{}", terminal::facts(&facts, Stream::Err).trim_end()));
        }
    }

    /// Says on the progress bar what the run is doing.
    pub(crate) fn phase(&self, phase: &'static str) {
        unpoisoned(&self.progress).phase = phase;
        self.bar.tick();
    }

    /// The first update begins: what comes before it is in no estimate.
    pub(crate) fn updates_begin(&self) {
        let mut shown = unpoisoned(&self.progress);
        shown.began.0 = Instant::now();
    }

    /// Brings the metrics to the disk, before a checkpoint counts on them.
    pub(crate) fn sync(&self) -> Result<()> {
        self.metrics.sync_data().map_err(Error::io("write to the disk", self.dir.join(METRICS)))
    }

    /// Calls `watcher` with everything that happens from now on; a break ends the run after the update it is in, as
    /// [`request_stop`] does, but this run alone.
    pub(crate) fn watch(&mut self, watcher: impl FnMut(&Event<'_>) -> ControlFlow<()> + 'w) {
        self.watcher = Some(Box::new(watcher));
    }

    /// Whether the run should end: its watcher or the user has said so. The training loops look between updates.
    pub(crate) fn stopped(&self) -> bool {
        self.stopped || stop_requested()
    }

    fn tell(&mut self, event: &Event<'_>) {
        if let Some(watcher) = &mut self.watcher {
            self.stopped |= watcher(event).is_break();
        }
    }

    /// Tells that `dir` holds the model as it is now.
    pub(crate) fn saved(&mut self, dir: &Path) {
        self.note(&format!("saved {}", dir.display()));
        self.left(dir);
    }

    /// [`Reporter::saved`] of what the run leaves at its end, which [`Reporter::ends`] tells people.
    pub(crate) fn left(&mut self, dir: &Path) {
        self.tell(&Event::Saved { dir });
    }

    /// Warns of what was found in update `step`.
    pub(crate) fn warning(&mut self, step: usize, warning: &Warning) {
        self.warn(&warning.message);
        self.tell(&Event::Warning { step, warning });
    }

    /// Writes one line of metrics.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn record(&mut self, step: i64, metrics: &Metrics) -> Result<()> {
        self.record_alone(step, metrics)?;
        self.tell(&Event::Update { step: step as usize, metrics });
        Ok(())
    }

    /// [`Reporter::record`], of what no update has brought.
    pub(crate) fn record_alone(&mut self, step: i64, metrics: &Metrics) -> Result<()> {
        let json = |metrics: &Metrics| serde_json::to_string(metrics).expect("numbers have a JSON form");
        let line = json(metrics);
        // In one write: a kill leaves no half of a line that is followed by another.
        let path = self.dir.join(METRICS);
        self.metrics.write_all(format!("{line}\n").as_bytes()).map_err(Error::io("write", path))?;
        if self.console == Console::Program {
            self.print(&json(&metrics.map(terminal::seven_digits)));
        }
        if let Some(tensorboard) = &mut self.tensorboard {
            let tagged = metrics.iter().filter(|(name, _)| *name != "step");
            let tagged: Vec<(String, f64)> = tagged.map(|(name, value)| (self.tags.tag(name), value)).collect();
            tensorboard.scalars(step, tagged.iter().map(|(tag, value)| (tag.as_str(), *value)))?;
        }
        Ok(())
    }

    /// Moves the progress bar one update on; `watched` are the few numbers people look at, the most important first. After the
    /// first update says how long the rest will take.
    pub(crate) fn advance(&self, watched: Vec<String>) {
        let now = Instant::now();
        let (total, expected) = (self.bar.length().unwrap_or(0) as usize, {
            let mut shown = unpoisoned(&self.progress);
            let is_first = shown.reached.is_none();
            let done = shown.reached.map_or(shown.began.1, |(_, done)| done) + 1;
            shown.watched = watched;
            shown.reached = Some((now, done));
            is_first.then(|| (done, now.duration_since(shown.began.0)))
        });
        self.bar.inc(1);
        if let Some((done, took)) = expected.filter(|(done, _)| *done < total) {
            let (left, each) = (total - done, terminal::about(took));
            let all = terminal::about(took.mul_f64(left as f64));
            let updates = if left == 1 { "the one left".into() } else { format!("the {left} left") };
            self.note(&format!("update {done} took {each}; {updates} will take about {all}"));
        }
    }

    /// Writes the answers given after `update` updates to a file of its own in `samples/`, and shows them where a person
    /// watches. By then the run has trained on `episode` answers.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn samples(&mut self, update: usize, episode: usize, samples: &[Sample]) -> Result<()> {
        self.show_samples("update", update, episode, samples)
    }

    /// [`Reporter::samples`], of answers that the update trained on, in files of their own.
    ///
    /// # Errors
    /// If they cannot be written.
    pub(crate) fn answers(&mut self, update: usize, episode: usize, samples: &[Sample]) -> Result<()> {
        self.show_samples("answers", update, episode, samples)
    }

    fn show_samples(&mut self, kind: &str, update: usize, episode: usize, samples: &[Sample]) -> Result<()> {
        self.write_samples(kind, update, episode, samples)?;
        if self.console == Console::Person {
            let title = Stream::Out.paint(Colour::Bold, &format!("Episode {episode}"));
            let table = sample_table(samples, Stream::Out.width(), Stream::Out.has_colours());
            self.print(&format!("{title}\n{table}"));
        }
        self.tell(&Event::Samples { step: update, samples });
        Ok(())
    }

    /// Writes the answers of an evaluation to a file of its own in `samples/`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn evaluation(&mut self, update: usize, episode: usize, evaluation: &Evaluation) -> Result<()> {
        self.write_samples("eval", update, episode, &evaluation.samples)?;
        self.tell(&Event::Evaluation { step: update, evaluation });
        Ok(())
    }

    fn write_samples(&mut self, kind: &str, update: usize, episode: usize, samples: &[Sample]) -> Result<()> {
        let dir = self.dir.join(SAMPLES);
        std::fs::create_dir_all(&dir).map_err(Error::io("create the folder", &dir))?;
        let mut lines = String::new();
        for sample in samples {
            let mut row = serde_json::json!({"step": update, "episode": episode});
            let sample = serde_json::to_value(sample).expect("a sample has a JSON form");
            row.as_object_mut().expect("an object").extend(sample.as_object().expect("an object").clone());
            lines.push_str(&format!("{row}\n"));
        }
        write_text(&dir.join(format!("{kind}-{update:06}.jsonl")), &lines)?;
        let tensorboard = self.tensorboard.as_mut();
        let tag = if kind == "update" { "samples".into() } else { format!("samples/{kind}") };
        tensorboard.map_or(Ok(()), |tensorboard| tensorboard.text(update as i64, &tag, &markdown(samples)))
    }

    /// Tells something that a person should know and that stops nothing.
    pub(crate) fn warn(&self, message: &str) {
        if self.console != Console::Silent {
            self.bar.suspend(|| self.console.warn(message));
        }
    }

    /// Tells which checks of the run's own numbers have held, also where only a program reads.
    pub(crate) fn checked(&self, message: &str) {
        if self.console != Console::Silent {
            self.tell_all(&Stream::Err.labelled("checks", Colour::Green, &one_line(message)));
        }
    }

    /// Tells a person how things stand.
    pub(crate) fn note(&self, message: &str) {
        if self.is_read {
            self.tell_all(&terminal::wrap(&one_line(message), Stream::Err.width(), 2));
        }
    }

    fn tell_all(&self, text: &str) {
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stderr(), "{text}");
        });
    }

    /// Takes the progress bar away.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Tells how a run of `updates` updates has ended: the numbers of the first and of the last line of metrics that have them,
    /// by the names that people know them by; where the model is; the command that tries it, or several with pipes
    /// between them.
    pub(crate) fn ends(&self, updates: usize, numbers: &[(&str, &str)], commands: &[Vec<String>]) {
        if !self.is_read {
            return;
        }
        let time = terminal::clock(self.began.elapsed());
        let s = if updates == 1 { "" } else { "s" };
        let mut text = Stream::Err.paint(Colour::Green, &format!("done: {updates} update{s} in {time}"));
        text.push('\n');
        let lines = std::fs::read_to_string(self.dir.join(METRICS)).unwrap_or_default();
        text.push_str(&changes(&lines, numbers));
        let dir = self.dir.display();
        text.push_str(&terminal::wrap(
            &one_line(&format!("the model is in {dir}; to try it:")),
            Stream::Err.width(),
            2,
        ));
        text.push('\n');
        text.push_str(&safe_text::lines(&terminal::shell_command(commands, Stream::Err.width())));
        self.tell_all(&text);
    }

    /// Standard output is a copy of what the files hold: when its reader goes away (`| head`), the run goes on.
    fn print(&self, text: &str) {
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stdout(), "{text}");
        });
    }
}

impl Drop for Reporter<'_> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn four_decimals(number: f64) -> String {
    let text = format!("{number:.4}");
    // What rounds to 0 has no sign.
    if text == "-0.0000" { "0.0000".into() } else { text }
}

/// What the `lines` of a run's metrics say of these `numbers`, each by its name for people and its own: in the first line that
/// has it, and in the last.
fn changes(lines: &str, numbers: &[(&str, &str)]) -> String {
    let lines: Vec<Map<String, Value>> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let mut rows = Vec::new();
    for &(name, metric) in numbers {
        let mut found = lines.iter().filter_map(|line| line.get(metric)?.as_f64());
        let Some(first) = found.next() else { continue };
        let [first, last] = [Some(first), found.next_back()].map(|number| number.map(four_decimals));
        rows.push([name.to_string(), first.unwrap_or_default(), last.unwrap_or_default()]);
    }
    if rows.is_empty() {
        return String::new();
    }
    rows.insert(0, [String::new(), "first".into(), "last".into()]);
    let columns = [0, 1, 2].map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
    let line = |[name, first, last]: &[String; 3]| {
        let line = format!("  {name:0$}  {first:>1$}  {last:>2$}", columns[0], columns[1], columns[2]);
        format!("{}\n", line.trim_end())
    };
    rows.iter().map(line).collect()
}

/// The table of `samples`, at most `width` columns wide. What all conversations begin with stands above it, once.
fn sample_table(samples: &[Sample], width: Option<usize>, colours: bool) -> String {
    let system = |sample: &Sample| sample.conversation.as_ref().and_then(|c| c.system.clone());
    let common =
        samples.first().and_then(system).filter(|first| samples.iter().all(|s| system(s).as_ref() == Some(first)));
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    width.map(|width| table.set_width(width.min(usize::from(u16::MAX)) as u16));
    let with_ends = samples.iter().any(|sample| sample.num_tokens.is_some());
    let head = ["prompt", "response", "score", "tokens"].into_iter().take(if with_ends { 4 } else { 3 });
    let bold = |cell: Cell| if colours { cell.add_attribute(Attribute::Bold) } else { cell };
    table.set_header(head.map(|name| bold(Cell::new(name))));
    let cell = |text: &str| safe_text::lines(&beginning(text, LONGEST_CELL)).into_owned();
    for sample in samples {
        let prompt = match &sample.conversation {
            None => sample.prompt.clone(),
            Some(Conversation { system: Some(system), turns }) if common.is_none() => {
                format!("system: {system}\n{turns}")
            }
            Some(Conversation { turns, .. }) => turns.clone(),
        };
        let mut row = vec![cell(&prompt), cell(&sample.response), format!("{:.3}", sample.score)];
        if with_ends {
            let end = sample.finish_reason.map(|finish| match finish {
                FinishReason::Stop => " stop",
                FinishReason::Length => " length",
            });
            row.push(sample.num_tokens.map_or(String::new(), |tokens| format!("{tokens}{}", end.unwrap_or_default())));
        }
        table.add_row(row);
    }
    match common {
        Some(system) => format!("{}\n{table}", terminal::wrap(&cell(&format!("system: {system}")), width, 2)),
        None => table.to_string(),
    }
}

/// The same as Markdown.
fn markdown(samples: &[Sample]) -> String {
    let cell = |text: &str| {
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('|', "&#124;").replace('`', "&#96;");
        text.replace("\r\n", "\n").replace('\n', "<br>")
    };
    let mut text = String::from("| prompt | response | score | tokens | ended by |\n|---|---|---|---|---|\n");
    for sample in samples {
        let tokens = sample.num_tokens.map_or(String::new(), |tokens| tokens.to_string());
        let end = sample.finish_reason.map_or("", |finish| match finish {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        });
        let (prompt, response) = (cell(&sample.prompt), cell(&sample.response));
        text.push_str(&format!("| {prompt} | {response} | {:.3} | {tokens} | {end} |\n", sample.score));
    }
    text
}

/// How far a run is that goes on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reached {
    /// Updates done.
    pub(crate) updates: usize,
    /// The last of them that a line of metrics was due after.
    pub(crate) recorded: usize,
}

/// Cuts off the lines of a JSONL file whose number `key` is above `most`, or all, and what a killed run left half, by a rename;
/// a file that is not there has none.
fn cut_lines(path: &Path, key: &str, most: Option<usize>) -> Result<()> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        read => read.map_err(Error::io("read", path))?,
    };
    let text = String::from_utf8_lossy(&bytes);
    let number = |line: &str| serde_json::from_str::<Value>(line).ok()?[key].as_f64();
    let stays = |line: &&str| {
        line.ends_with('\n') && number(line).zip(most).is_some_and(|(number, most)| number <= most as f64)
    };
    let kept: String = text.split_inclusive('\n').filter(stays).collect();
    if kept.len() == bytes.len() { Ok(()) } else { write_text(path, &kept) }
}

fn append_to(path: &Path) -> Result<File> {
    OpenOptions::new().create(true).append(true).open(path).map_err(Error::io("create", path))
}

/// Removes the samples in the folder `dir` that were taken after more than `updates` updates.
fn remove_later_samples(dir: &Path, updates: usize) -> Result<()> {
    if dir.is_dir() {
        remove_files(dir, |name| samples_update(name).is_some_and(|update| update > updates))
    } else {
        Ok(())
    }
}

/// After how many updates the samples in a file of this name were taken, if a run writes such a file into [`SAMPLES`].
fn samples_update(name: &str) -> Option<usize> {
    // One with this end is left by a kill between writing a file and renaming it.
    let name = name.strip_suffix(".tmp").unwrap_or(name);
    let number =
        ["update-", "eval-", "answers-"].iter().find_map(|kind| name.strip_prefix(kind))?.strip_suffix(".jsonl")?;
    (number.len() >= 6 && number.bytes().all(|byte| byte.is_ascii_digit())).then(|| number.parse().ok())?
}

/// The lines of metrics of a run.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// The folder of a run's sampled answers, with a file for each time that it sampled.
const SAMPLES: &str = "samples";

/// Names of the files that a run writes into its folder, beside the tokenizer's, the shards, the event files and what is in
/// checkpoints only.
const RUN_FILES: [&str; 10] = [
    METRICS,
    CONFIG,
    OLD_CONFIG,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
];

/// The resolved configuration of a run; a folder that has one holds a run.
pub(crate) const CONFIG: &str = "config.yaml";

/// Its name in runs of earlier builds, which can be gone on with.
const OLD_CONFIG: &str = "run.yaml";

/// Whether the folder `dir` holds a run: a `config.yaml` that a run wrote, or began to write, and not a person.
pub(crate) fn holds_run(dir: &Path) -> bool {
    match files::read(&dir.join(CONFIG)) {
        Ok(text) => is_resolved(&text),
        Err(_) => !dir.join(CONFIG).exists() && dir.join(OLD_CONFIG).is_file(),
    }
}

/// Whether a run wrote this `config.yaml`, or began to.
fn is_resolved(text: &[u8]) -> bool {
    let begins = RESOLVED.as_bytes();
    text.starts_with(begins) || begins.starts_with(text)
}

/// The folders with models in a run's folder, inner ones first.
const INNER: [&str; 5] = [BASE_MODEL, "ema/base_model", "ema", "value_model/base_model", "value_model"];

/// Whether `path` is what a run leaves that is killed before its `config.yaml` is in place, and nothing else.
fn is_leftover(path: &Path) -> bool {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy()) else { return false };
    let holds_leftovers = || {
        std::fs::read_dir(path)
            .is_ok_and(|mut entries| entries.all(|entry| entry.is_ok_and(|entry| is_leftover(&entry.path()))))
    };
    match path.is_dir() {
        true if name == BESIDE => true,
        true => (name == SAMPLES || INNER.iter().any(|inner| path.ends_with(inner))) && holds_leftovers(),
        false if name == format!("{CONFIG}.tmp") => std::fs::read(path).is_ok_and(|text| is_resolved(&text)),
        false => {
            let of_samples = name.ends_with(".tmp") && samples_update(&name).is_some();
            of_samples || name == format!("{METRICS}.tmp") || name == crate::run::tensorboard::BESIDE
        }
    }
}

/// Whether a run writes files of this name: what `overwrite_output_dir` may remove, and nothing else.
fn is_run_file(name: &str) -> bool {
    if name == crate::run::tensorboard::BESIDE {
        return true;
    }
    let name = name.strip_suffix(".tmp").unwrap_or(name);
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let shard = name
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(part, parts)| digits(part) && digits(parts));
    shard
        || RUN_FILES.contains(&name)
        || checkpoint::FILES.contains(&name)
        || crate::tokenizer::FILES.contains(&name)
        || name.starts_with(crate::run::tensorboard::PREFIX)
}

/// Checks that a run may write to `run.output_dir`, before anything slow begins. Nothing is changed yet.
///
/// # Errors
/// If one of the run's own `inputs` is the folder or lies in it; if the folder holds anything and `overwrite_output_dir`
/// is not set, or anything that is not a run and it is. A run that goes on where it began finds its own.
pub(crate) fn check_output_dir(run: &RunConfig, start: &Start, inputs: &[&Path]) -> Result<()> {
    if start.in_place {
        return check_inputs(&run.output_dir, inputs);
    }
    let (dir, overwrite) = (run.output_dir.as_path(), may_overwrite(run, start));
    if !overwrite && run.checkpoints.resume_from_checkpoint == Some(Resume::Latest) && holds_run(dir) {
        return Err(Error::invalid(
            dir,
            "output_dir: found a run in it that is finished, and no checkpoint to resume from; choose another folder, or \
             set --overwrite_output_dir to replace it",
        ));
    }
    let inputs: Vec<&Path> = inputs.iter().copied().chain(start.input()).collect();
    check_folder(dir, overwrite, &inputs)
}

/// Whether what a run left in `run.output_dir` may go.
fn may_overwrite(run: &RunConfig, start: &Start) -> bool {
    run.overwrite_output_dir || (start.replaces && holds_run(&run.output_dir))
}

/// [`check_output_dir`] for what is no training run.
pub(crate) fn check_folder(dir: &Path, overwrite: bool, inputs: &[&Path]) -> Result<()> {
    check_inputs(dir, inputs)?;
    check_contents(dir, overwrite)
}

/// Checks that nothing which is read is, or lies in, the folder `dir`.
fn check_inputs(dir: &Path, inputs: &[&Path]) -> Result<()> {
    let whole = dir.canonicalize().ok();
    let inside =
        |input: &Path| input.canonicalize().is_ok_and(|input| whole.as_ref().is_some_and(|d| input.starts_with(d)));
    let base = |input: &&Path| AdapterFolder::find(input).ok().flatten()?.local_base();
    let bases: Vec<PathBuf> = inputs.iter().filter_map(base).collect();
    let mut inputs = inputs.iter().copied().chain(bases.iter().map(PathBuf::as_path));
    if let Some(input) = inputs.find(|input| inside(input)) {
        let message = format!("output_dir = {} holds what the run reads: {}", dir.display(), input.display());
        return Err(Error::Usage(message));
    }
    Ok(())
}

/// Checks that the folder `dir` is empty or new, or a run's that may be overwritten.
fn check_contents(dir: &Path, overwrite: bool) -> Result<()> {
    if dir.is_file() {
        return Err(Error::invalid(dir, "output_dir: expected a folder or nothing, found a file"));
    }
    if !dir.is_dir() {
        return Ok(());
    }
    let mut entries = std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))?;
    let entry = entries.find(|entry| entry.as_ref().map_or(true, |entry| !is_leftover(&entry.path())));
    let Some(entry) = entry else { return Ok(()) };
    let name = entry.map_err(Error::io("read the folder", dir))?.file_name();
    let name = name.to_string_lossy();
    match (overwrite, holds_run(dir)) {
        (true, true) => Ok(()),
        (true, false) => Err(Error::invalid(
            dir,
            format!("overwrite_output_dir: expected a folder with a run (its {CONFIG}), found `{name}` and no run"),
        )),
        (false, true) => Err(Error::invalid(
            dir,
            "output_dir: expected an empty or new folder, found a run in it; choose another folder, or set \
             --resume_from_checkpoint to go on with the run, or --overwrite_output_dir to replace it",
        )),
        (false, false) => Err(Error::invalid(
            dir,
            format!("output_dir: expected an empty or new folder, found `{name}` in it; choose another folder"),
        )),
    }
}

/// A hold on a run's folder, which keeps other runs out of it for as long as it lives: the system lets go of it when the
/// process ends, however it ends.
///
/// It is taken before anything looks into the folder, so that what was found there stays as it was found.
#[derive(Debug)]
pub(crate) struct Hold {
    /// The locked folder; none where there was no folder yet.
    held: Option<File>,
}

impl Hold {
    /// Takes hold of the folder `dir`, if there is one.
    ///
    /// # Errors
    /// If another run holds it, or it cannot be opened.
    pub(crate) fn take(dir: &Path) -> Result<Self> {
        if !dir.is_dir() {
            return Ok(Self { held: None });
        }
        let folder = File::open(dir).map_err(Error::io("read the folder", dir))?;
        match folder.try_lock() {
            Err(TryLockError::WouldBlock) => {
                Err(Error::invalid(dir, "output_dir: another run is at work in this folder"))
            }
            // Some file systems have no locks: then nobody is kept out.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Self { held: Some(folder) }),
        }
    }

    /// Makes the folder `dir` where there was none when this was taken, and takes hold of it; gives whether it was made now.
    ///
    /// # Errors
    /// If it cannot be made; if another run has made it meanwhile and holds it, or has ended in it and may not be replaced.
    pub(crate) fn make(self, dir: &Path, overwrite: bool) -> Result<(Self, bool)> {
        if self.held.is_some() {
            return Ok((self, false));
        }
        std::fs::create_dir_all(dir).map_err(Error::io("create the folder", dir))?;
        let hold = Self::take(dir)?;
        if !overwrite && holds_run(dir) {
            let message = "output_dir: another run has begun in this folder since this one was started; choose another \
                           folder, or start this one again";
            return Err(Error::invalid(dir, message));
        }
        Ok((hold, true))
    }
}

/// Makes `run.output_dir` this run's own when it is ready to begin: removes an old run's files if it may, and writes the
/// resolved configuration; a run that resumes where it began finds it there. `hold` was taken before `start` was found.
///
/// # Errors
/// As [`check_output_dir`]; if another run was quicker to make the folder; if a file cannot be removed or written.
pub(crate) fn claim_output_dir(run: &RunConfig, start: &Start, hold: Hold, resolved: &impl Serialize) -> Result<Hold> {
    let dir = run.output_dir.as_path();
    if start.in_place {
        if start.extends(resolved)? && dir.join(CONFIG).is_file() {
            write_resolved(resolved, dir.join(CONFIG))?;
        }
        return Ok(hold);
    }
    check_contents(dir, may_overwrite(run, start))?;
    let (hold, made) = hold.make(dir, run.overwrite_output_dir)?;
    // Of a folder that is there only now, `start` knows nothing.
    check_contents(dir, if made { run.overwrite_output_dir } else { may_overwrite(run, start) })?;
    clean_folder(dir, resolved)?;
    Ok(hold)
}

/// [`claim_output_dir`] for what is no training run.
pub(crate) fn claim_folder(dir: &Path, overwrite: bool, resolved: &impl Serialize) -> Result<Hold> {
    check_contents(dir, overwrite)?;
    let (hold, _) = Hold::take(dir)?.make(dir, overwrite)?;
    check_contents(dir, overwrite)?;
    clean_folder(dir, resolved)?;
    Ok(hold)
}

/// Removes what a run has left in the folder `dir`, and writes the resolved configuration.
///
/// A folder is a run's by that file, which is replaced last: whatever is killed on the way can begin again.
fn clean_folder(dir: &Path, resolved: &impl Serialize) -> Result<()> {
    checkpoint::clear(dir)?;
    remove_run_files(dir)?;
    let samples = dir.join(SAMPLES);
    if samples.is_dir() {
        remove_files(&samples, |name| samples_update(name).is_some())?;
        // It stays if it holds files of someone else's.
        let _ = std::fs::remove_dir(&samples);
    }
    for folder in checkpoint::folders(dir)?.iter().map(PathBuf::as_path).chain([dir]) {
        for inner in INNER.map(|inner| folder.join(inner)) {
            remove_run_folder(&inner)?;
        }
        if folder != dir {
            remove_run_folder(folder)?;
        }
    }
    write_resolved(resolved, dir.join(CONFIG))?;
    remove_files(dir, |name| name == OLD_CONFIG)
}

/// Removes a run's files from a folder of its own, and the folder; it stays if it holds files of someone else's.
fn remove_run_folder(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        remove_run_files(dir)?;
        let _ = std::fs::remove_dir(dir);
    }
    Ok(())
}

fn remove_run_files(dir: &Path) -> Result<()> {
    // What a killed save left.
    let beside = dir.join(BESIDE);
    if beside.is_dir() {
        std::fs::remove_dir_all(&beside).map_err(Error::io("remove", &beside))?;
    }
    remove_files(dir, |name| is_run_file(name) && name != CONFIG && name != OLD_CONFIG)
}

fn remove_files(dir: &Path, goes: impl Fn(&str) -> bool) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        let entry = entry.map_err(Error::io("read the folder", dir))?;
        if goes(&entry.file_name().to_string_lossy()) && entry.path().is_file() {
            std::fs::remove_file(entry.path()).map_err(Error::io("remove", entry.path()))?;
        }
    }
    Ok(())
}

/// How a training command ends: `done` updates of `total`, or what stopped it; and whether the model could be `saved` in
/// `dir`, where there is one to save.
///
/// # Errors
/// If the run was stopped by [`request_stop`] or by an error, or the model is not saved: whatever comes next should not go on
/// as if it were whole. A watcher that stops the run knows that it did.
pub(crate) fn conclude(done: Result<usize>, saved: Option<Result<()>>, total: usize, dir: &Path) -> Result<usize> {
    let left = |saved: &Option<Result<()>>| {
        let model = match saved {
            Some(Ok(())) => format!("the model as far as it came is in {}", dir.display()),
            Some(Err(error)) => format!("the model was not saved: {error}"),
            None => {
                return "no update was done, so no model is saved; --resume_from_checkpoint true begins again".into();
            }
        };
        match checkpoint::newest(dir) {
            Some(newest) => format!("{model}; --resume_from_checkpoint {} goes on", newest.display()),
            None if saved.as_ref().is_some() => format!("{model}; --resume_from_checkpoint true begins again"),
            None => model,
        }
    };
    match done {
        Ok(done) if done == total || !stop_requested() => saved.unwrap_or(Ok(())).map(|()| done),
        Ok(done) => {
            let message = format!("stopped as asked after update {done} of {total}; {}", left(&saved));
            match saved {
                Some(Err(_)) => Err(Error::Run(message)),
                _ => Err(Error::Stopped { message, code: STOP.load(Ordering::SeqCst).max(1) }),
            }
        }
        // Not after an update, but while the run waited for something.
        Err(Error::Stopped { message, code }) => {
            Err(Error::Stopped { message: format!("{message}; {}", left(&saved)), code })
        }
        Err(error) => Err(Error::Run(format!("{error}; {}", left(&saved)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flag::defaults;

    fn run(dir: &Path, overwrite: bool) -> RunConfig {
        let mut run = RunConfig { output_dir: dir.into(), ..defaults() };
        run.overwrite_output_dir = overwrite;
        run
    }

    fn sample(prompt: &str, response: &str, row: &Value) -> Sample {
        Sample {
            prompt: prompt.into(),
            response: response.into(),
            score: 0.5,
            components: BTreeMap::new(),
            finish_reason: Some(FinishReason::Stop),
            num_tokens: Some(12),
            conversation: Conversation::of(row, prompt),
        }
    }

    #[test]
    fn the_time_that_is_left_is_unknown_until_an_update_is_done() {
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs(seconds);
        let mut shown = Shown { phase: "sampling", watched: Vec::new(), began: (began, 3), reached: None };
        assert_eq!(shown.left(10, after(60)), None);
        let line = |shown: &Shown, width, now| bar_line(shown, width, false, 3, 10, Duration::from_secs(61), now);
        let first = line(&shown, 80, after(60));
        assert!(first.ends_with("  3/10 [1:01, -- left] sampling"), "{first}");
        // Two updates of a run that began at the third took 10 s each; 5 are left, one of them is 4 s old.
        shown.reached = Some((after(20), 5));
        assert_eq!(shown.left(10, after(24)), Some(Duration::from_secs(46)));
        assert_eq!(shown.left(10, after(200)), Some(Duration::ZERO));
        shown.watched = ["score 0.123", "kl 0.012", "length 53.0", "400 tokens/s"].map(String::from).to_vec();
        for (width, last) in [(60, "score 0.123"), (80, "kl 0.012"), (120, "400 tokens/s")] {
            let line = line(&shown, width, after(24));
            assert!(line.ends_with(last) && console::measure_text_width(&line) < width, "{width}: {line}");
            assert!(line.contains("[1:01, 0:46 left] sampling"), "{line}");
        }
    }

    #[test]
    fn a_table_shows_a_system_prompt_once_and_fits_its_width() {
        let row = |system: &str, said: &str| serde_json::json!({"prompt": [{"role": "system", "content": system}, {"role": "user", "content": said}]});
        let text = |system: &str, said: &str| format!("<|system|>{system}<|user|>{said}<|assistant|>");
        let asked = |system: &str, said: &str| sample(&text(system, said), "Well, yes and no.", &row(system, said));
        let rules = "You are a helpful assistant of few words, and polite.";
        let samples = [asked(rules, "What is a cat?"), asked(rules, "And a dog?")];
        for width in [60, 80, 120] {
            let table = sample_table(&samples, Some(width), false);
            assert!(table.lines().all(|line| console::measure_text_width(line) <= width), "{table}");
            assert_eq!(table.matches("helpful").count(), 1, "{table}");
            assert!(table.contains("What is a cat?") && !table.contains("<|user|>"), "{table}");
            assert!(table.contains("12 stop"), "{table}");
        }
        // Those of different systems say theirs; what was cut is shown as it is.
        let table = sample_table(&[asked(rules, "Who?"), asked("Be rude.", "Who?")], Some(100), false);
        assert!(table.contains("helpful") && table.contains("system: Be rude."), "{table}");
        let cut = sample("a cat?<|assistant|>", "Yes.", &row(rules, "What is a cat?"));
        assert!(sample_table(&[cut], None, false).contains("a cat?<|assistant|>"));
    }

    #[test]
    fn the_end_tells_of_the_first_and_the_last_line_that_have_a_number() {
        let lines = "{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"loss\":2.0,\"eval_loss\":3.0}\n{\"step\":3,\"loss\":1.23456}\nhal";
        let numbers = [("loss", "loss"), ("held-out loss", "eval_loss"), ("KL", "kl")];
        assert_eq!(
            changes(lines, &numbers),
            "                  first    last\n  loss           2.5000  1.2346\n  held-out loss  3.0000\n"
        );
        assert_eq!(changes("", &numbers), "");
    }

    #[test]
    fn samples_are_a_markdown_table_whatever_is_in_them() {
        let text = markdown(&[sample("a|b\n<i>", "`x`", &Value::Null)]);
        assert_eq!(text.lines().last(), Some("| a&#124;b<br>&lt;i> | &#96;x&#96; | 0.500 | 12 | stop |"));
        assert_eq!(text.lines().count(), 3);
    }

    #[test]
    fn a_folder_that_holds_something_is_refused_unless_it_is_a_run_and_overwriting_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let check = |overwrite| {
            check_output_dir(&run(dir.path(), overwrite), &Start::default(), &[]).map_err(|e| e.to_string())
        };
        check(false).unwrap();
        std::fs::write(dir.path().join("thesis.tex"), "old").unwrap();
        assert!(check(false).unwrap_err().contains("thesis.tex"));
        assert!(check(true).unwrap_err().contains("no run"));
        let config = dir.path().join(CONFIG);
        std::fs::write(&config, "seed: 1\n").unwrap();
        assert!(check(true).unwrap_err().contains("no run"), "a person's config.yaml is no run's");
        std::fs::remove_file(&config).unwrap();
        for (name, text) in [(OLD_CONFIG, "old"), (CONFIG, RESOLVED)] {
            std::fs::write(dir.path().join(name), text).unwrap();
            assert!(check(false).unwrap_err().contains("--overwrite_output_dir"));
            check(true).unwrap();
            assert_eq!(std::fs::read_to_string(dir.path().join(name)).unwrap(), text, "checking changes nothing");
        }
    }

    #[test]
    fn overwriting_removes_the_old_run_and_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        for folder in ["value_model/base_model", "model-backup", "checkpoint-4/value_model", "best", "checkpoint-old"] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        let ours = [
            "value_model/base_model/model.safetensors",
            "metrics.jsonl",
            "config.yaml",
            "run.yaml",
            "model-00001-of-00002.safetensors",
            "value_model/config.json",
            "checkpoint-4/trainer_state.json",
            "checkpoint-4/value_model/optimizer.safetensors",
            "best/model.safetensors",
            "best/best.json",
        ];
        let others = [
            "thesis.tex",
            "model-notes.txt",
            "model-backup/config.json",
            "value_model/mine",
            "checkpoint-old/config.json",
        ];
        for name in ours.iter().chain(&others) {
            std::fs::write(dir.path().join(name), if *name == CONFIG { RESOLVED } else { "x" }).unwrap();
        }
        let run = run(dir.path(), true);
        claim(&run).unwrap();
        assert!(!dir.path().join("checkpoint-4").exists() && !dir.path().join("best").exists());
        for name in others {
            assert!(dir.path().join(name).is_file(), "{name}");
        }
        for name in ours.iter().filter(|name| **name != CONFIG) {
            assert!(!dir.path().join(name).exists(), "{name}");
        }
    }

    fn claim(run: &RunConfig) -> Result<Hold> {
        let hold = Hold::take(&run.output_dir)?;
        claim_output_dir(run, &Start::find(run)?, hold, &serde_json::json!({"seed": 1}))
    }

    #[test]
    fn of_two_runs_on_one_folder_the_second_is_refused_whenever_it_has_looked() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(&dir.path().join("new"), false);
        let out = run.output_dir.as_path();
        let overwriting = RunConfig { overwrite_output_dir: true, ..run.clone() };
        // Both have looked before there is a folder.
        let looked = || (Hold::take(out).unwrap(), Start::find(&run).unwrap());
        let (first, second, third) = (looked(), looked(), looked());
        let claim_of = |run: &RunConfig, (hold, start): (Hold, Start)| {
            claim_output_dir(run, &start, hold, &serde_json::json!({})).map_err(|error| error.to_string())
        };
        let held = claim_of(&run, first).unwrap();
        let at_work = "another run is at work";
        assert!(claim_of(&run, second).unwrap_err().contains("found a run in it"));
        assert!(claim_of(&overwriting, third).unwrap_err().contains(at_work), "not even with consent");
        // Nor does it begin to look.
        assert!(Hold::take(out).unwrap_err().to_string().contains(at_work));
        std::fs::write(out.join("model.safetensors"), "finished").unwrap();
        drop(held);
        // What has ended meanwhile is not replaced without consent, also where a resume may replace what came to nothing.
        let resuming = |mut run: RunConfig| {
            run.checkpoints.resume_from_checkpoint = Some(Resume::Latest);
            run
        };
        let early = || (Hold { held: None }, Start { replaces: true, ..Start::default() });
        for run in [run.clone(), resuming(run.clone())] {
            let error = claim_of(&run, early()).unwrap_err();
            assert!(error.contains("found a run in it") || error.contains("another run has begun"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(out.join("model.safetensors")).unwrap(), "finished");
        drop(claim(&overwriting).unwrap());
        assert!(!out.join("model.safetensors").exists());
    }

    #[test]
    fn what_a_kill_left_in_a_folder_without_a_configuration_does_not_forbid_it() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        for folder in ["samples", "base_model/.saving", "value_model/base_model/.saving", ".saving/value_model"] {
            std::fs::create_dir_all(out.join(folder)).unwrap();
        }
        let resolved = format!("{RESOLVED}1.\nseed:");
        for (name, text) in [
            ("samples/update-000003.jsonl.tmp", "{"),
            ("base_model/.saving/model.safetensors", "x"),
            ("config.yaml.tmp", resolved.as_str()),
            ("metrics.jsonl.tmp", "{"),
        ] {
            std::fs::write(out.join(name), text).unwrap();
        }
        let run = run(&out, false);
        drop(claim(&run).unwrap());
        let left: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [CONFIG]);
        // What may be a person's still does.
        for name in ["config.yaml.tmp", "samples/mine.tmp", "value_model/notes", "README.md.tmp"] {
            let other = dir.path().join(name.replace('/', "-"));
            std::fs::create_dir_all(other.join(name).parent().unwrap()).unwrap();
            std::fs::write(other.join(name), "mine").unwrap();
            let error = check_contents(&other, false).unwrap_err().to_string();
            assert!(error.contains("expected an empty or new folder"), "{name}: {error}");
        }
    }

    #[test]
    fn lines_behind_a_step_and_half_lines_are_cut_off_and_the_rest_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let lines = ["{\"step\": 1, \"x\": 0.10}\n", "{\"step\":2}\n", "{\"step\":3}\n", "{\"step\":4,\"x\":1"];
        for (most, left) in [(Some(9), 3), (Some(2), 2), (Some(0), 0), (None, 0)] {
            std::fs::write(&path, lines.concat()).unwrap();
            cut_lines(&path, "step", most).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), lines[..left].concat());
        }
        cut_lines(&dir.path().join("none"), "step", Some(1)).unwrap();
    }

    #[test]
    fn a_run_may_not_write_over_what_it_reads() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("prompts.jsonl"), "{}").unwrap();
        for input in [dir.path().to_path_buf(), dir.path().join("prompts.jsonl")] {
            let run = run(dir.path(), true);
            let error = check_output_dir(&run, &Start::default(), &[&input]).unwrap_err().to_string();
            assert!(error.contains("holds what the run reads"), "{error}");
        }
    }
}
