//! The sink of the console: a progress bar, warnings and notes on standard error, tables on standard output.

use crate::run::ends::{ends_of, metric_of, words};
use crate::run::event::{Conversation, Event, Sample};
use crate::run::output_dir::METRICS;
use crate::run::settings::is_eval_metric;
use crate::run::sinks::driver::Outgoing;
use crate::run::turns;
use crate::terminal::{self, Colour, Stream};
use comfy_table::{Attribute, Cell, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle, WeakProgressBar};
use rlhf_base::safe_text::{self, beginning, one_line};
use rlhf_lm::generate::FinishReason;
use serde_json::{Map, Value};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Console output of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Console {
    /// For a terminal: a progress bar, the run's title and end, and warnings on standard error, tables on standard output.
    Person,
    /// For a program or a log: the lines of `metrics.jsonl` on standard output instead of tables, in seven significant digits. Standard
    /// error is as with [`Console::Person`], but has no bar if it is no terminal.
    Program,
    /// No console output: files only, the default of the library.
    Silent,
}

impl Console {
    /// Writes a warning to standard error, unless the console is silent.
    pub(crate) fn warn(self, message: &str) {
        if self != Console::Silent {
            let warning = Stream::Err.labelled("warning", Colour::Yellow, &one_line(message));
            let _ = writeln!(std::io::stderr(), "{warning}");
        }
    }

    /// Writes a warning above the progress bar, from any thread, unless the console is silent.
    pub(crate) fn announce_warning(self, message: &str) {
        if self != Console::Silent {
            announce(&Stream::Err.labelled("warning", Colour::Yellow, &one_line(message)));
        }
    }

    /// Writes a note above the progress bar, from any thread, unless the console is silent.
    pub(crate) fn announce_note(self, message: &str) {
        if self != Console::Silent {
            announce(&terminal::wrap(&one_line(message), Stream::Err.width(), 2));
        }
    }

    /// Writes a line that a Python function has printed above the progress bar, from any thread, unless the console is silent.
    pub(crate) fn announce_printed(self, line: &str) {
        if self != Console::Silent {
            announce(&one_line(line));
        }
    }

    /// Returns [`Console::Person`] if standard output is a terminal, else [`Console::Program`].
    pub fn detect() -> Self {
        if std::io::stdout().is_terminal() { Console::Person } else { Console::Program }
    }
}

/// Writes the console output of one run.
pub(crate) struct ConsoleOutput {
    dir: PathBuf,
    console: Console,
    bar: ProgressBar,
    status: Arc<Mutex<BarStatus>>,
    began: Instant,
    driver: Option<Arc<Outgoing>>,
}

impl ConsoleOutput {
    /// Opens the console output of the run in `dir`, with a progress bar at `done` of `total` updates.
    pub(crate) fn open(dir: &Path, console: Console, hides_bar: bool, total: usize, done: usize) -> Self {
        let began = Instant::now();
        let status = BarStatus { phase: "", watched: Vec::new(), began: (began, done), reached: None };
        let status = Arc::new(Mutex::new(status));
        // The bar is hidden if standard error is no terminal.
        let hidden = hides_bar || console == Console::Silent || !Stream::Err.moves_cursor();
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let shared = status.clone();
        let colours = Stream::Err.has_colours();
        let line = move |state: &ProgressState, to: &mut dyn std::fmt::Write| {
            let line = BarLine {
                status: unpoisoned(&shared).clone(),
                width: Stream::Err.width().unwrap_or(80),
                colours,
                done: state.pos() as usize,
                total: state.len().unwrap_or(0) as usize,
                elapsed: state.elapsed(),
                now: Instant::now(),
            };
            let _ = to.write_str(&line.text());
        };
        let style = ProgressStyle::with_template("{line}").expect("the template is sound").with_key("line", line);
        let bar = ProgressBar::with_draw_target(Some(total as u64), target).with_style(style);
        bar.set_position(done as u64);
        if !hidden {
            *unpoisoned(&BAR) = Some(bar.downgrade());
            // So that the clock moves during a long update too.
            bar.enable_steady_tick(Duration::from_millis(500));
        }
        Self { dir: dir.to_path_buf(), console, bar, status, began, driver: None }
    }

    /// Tells the phases of the run to a driver too.
    pub(crate) fn tell_phases(&mut self, driver: Arc<Outgoing>) {
        self.driver = Some(driver);
    }

    /// Writes an event: metrics for a program, tables of responses for a terminal, warnings, saved folders.
    pub(crate) fn receive(&self, event: &Event<'_>) {
        match event {
            Event::Update { metrics, .. } if self.console == Console::Program => {
                let metrics = metrics.map(terminal::seven_digits);
                self.print(&serde_json::to_string(&metrics).expect("numbers have a JSON form"));
            }
            Event::Samples { episode, samples, .. } if self.console == Console::Person => {
                let title = Stream::Out.paint(Colour::Bold, &format!("Episode {episode}"));
                let table = sample_table(samples, Stream::Out.width(), Stream::Out.has_colours());
                self.print(&format!("{title}\n{table}"));
            }
            Event::Warning { warning, .. } => self.warn(&warning.message),
            Event::RolledBack { message, .. } => self.warn(message),
            Event::Saved { dir } => self.note(&format!("saved {}", dir.display())),
            Event::Update { .. } | Event::Samples { .. } | Event::Rollout { .. } | Event::Evaluation { .. } => {}
        }
    }

    /// Writes the title of the run and its facts.
    pub(crate) fn title(&self, title: &str, facts: &[(&str, String)]) {
        if self.is_loud() {
            let title = Stream::Err.paint(Colour::Bold, &one_line(title));
            let facts: Vec<_> = facts.iter().map(|(name, fact)| (*name, one_line(fact))).collect();
            self.write(&format!("{title}\n{}", terminal::facts(&facts, Stream::Err).trim_end()));
        }
    }

    /// Shows on the progress bar what the run is doing.
    pub(crate) fn phase(&self, phase: &'static str) {
        unpoisoned(&self.status).phase = phase;
        self.driver.iter().for_each(|driver| driver.phase(phase));
        self.bar.tick();
    }

    /// Starts the clock of the updates. The time before is not part of any estimate.
    pub(crate) fn start_updates(&self) {
        unpoisoned(&self.status).began.0 = Instant::now();
    }

    /// Moves the progress bar by one update; `watched` are the numbers beside it, the most important first.
    /// After the first update estimates how long the rest will take.
    pub(crate) fn advance(&self, watched: Vec<String>) {
        let now = Instant::now();
        let total = self.bar.length().unwrap_or(0) as usize;
        let expected = {
            let mut status = unpoisoned(&self.status);
            let is_first = status.reached.is_none();
            let done = status.reached.map_or(status.began.1, |(_, done)| done) + 1;
            status.watched = watched;
            status.reached = Some((now, done));
            is_first.then(|| (done, now.duration_since(status.began.0)))
        };
        self.bar.inc(1);
        if let Some((done, took)) = expected.filter(|(done, _)| *done < total) {
            let left = total - done;
            let each = terminal::about(took);
            let all = terminal::about(took.mul_f64(left as f64));
            let updates = if left == 1 { "the one left".into() } else { format!("the {left} left") };
            self.note(&format!("update {done} took {each}; {updates} will take about {all}"));
        }
    }

    /// Moves the progress bar back to `done` updates.
    pub(crate) fn roll_back(&self, done: usize) {
        unpoisoned(&self.status).reached = Some((Instant::now(), done));
        self.bar.set_position(done as u64);
    }

    /// Writes a warning, unless the console is silent.
    pub(crate) fn warn(&self, message: &str) {
        if self.console != Console::Silent {
            self.bar.suspend(|| self.console.warn(message));
        }
    }

    /// Writes which checks of the run's numbers have passed, also if only a program reads the output.
    pub(crate) fn checked(&self, message: &str) {
        if self.console != Console::Silent {
            self.write(&Stream::Err.labelled("checks", Colour::Green, &one_line(message)));
        }
    }

    /// Writes a note, unless the console is silent.
    pub(crate) fn note(&self, message: &str) {
        if self.is_loud() {
            self.write(&terminal::wrap(&one_line(message), Stream::Err.width(), 2));
        }
    }

    /// Returns whether anything is written to standard error.
    pub(crate) fn is_loud(&self) -> bool {
        self.console != Console::Silent
    }

    /// Removes the progress bar.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Writes the end of a run of `updates` updates: its numbers at the start and at the end, by pairs of a label and a metric; where the
    /// model is; the command that tries it, or several joined by pipes.
    pub(crate) fn end(&self, updates: usize, numbers: &[(&str, &str)], commands: &[Vec<String>]) {
        if !self.is_loud() {
            return;
        }
        let time = terminal::clock(self.began.elapsed());
        let s = if updates == 1 { "" } else { "s" };
        let mut text = Stream::Err.paint(Colour::Green, &format!("done: {updates} update{s} in {time}"));
        text.push('\n');
        let lines = std::fs::read_to_string(self.dir.join(METRICS)).unwrap_or_default();
        text.push_str(&changes(&lines, numbers));
        let message = format!("the model is in {}; to try it:", self.dir.display());
        text.push_str(&terminal::wrap(&one_line(&message), Stream::Err.width(), 2));
        text.push('\n');
        text.push_str(&safe_text::lines(&terminal::shell_command(commands, Stream::Err.width())));
        self.write(&text);
    }

    fn write(&self, text: &str) {
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stderr(), "{text}");
        });
    }

    /// Writes to standard output, which is a copy of the files' contents: if its reader goes away (`| head`), the run continues.
    fn print(&self, text: &str) {
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stdout(), "{text}");
        });
    }
}

impl Drop for ConsoleOutput {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Contents of the progress bar other than the updates done.
#[derive(Debug, Clone)]
struct BarStatus {
    /// Current phase of the run.
    phase: &'static str,
    /// The few most useful metrics, the most important first.
    watched: Vec<String>,
    /// Start of the first update of this process, and the updates done by then.
    began: (Instant, usize),
    /// End of the last update, and the updates done.
    reached: Option<(Instant, usize)>,
}

impl BarStatus {
    /// Returns the time that the updates up to `total` will take, estimated from the mean of those done; `None` before the first is done.
    fn left(&self, total: usize, now: Instant) -> Option<Duration> {
        let (at, done) = self.reached?;
        let (began, first) = self.began;
        let each = at.duration_since(began).div_f64(done.checked_sub(first).filter(|&done| done > 0)? as f64);
        let left = each.mul_f64(total.saturating_sub(done) as f64);
        Some(left.saturating_sub(now.duration_since(at)))
    }
}

/// Columns of the phase on the progress bar, so that the numbers after it do not move.
const PHASE: usize = "optimising".len();

/// The line of the progress bar.
struct BarLine {
    status: BarStatus,
    /// Columns of the terminal.
    width: usize,
    colours: bool,
    /// Updates done.
    done: usize,
    /// Updates of the whole run.
    total: usize,
    elapsed: Duration,
    now: Instant,
}

impl BarLine {
    /// Returns the text of the line. If it does not fit, the least important parts are left out.
    fn text(&self) -> String {
        let (done, total) = (self.done, self.total);
        let columns = match self.width {
            ..70 => 8,
            70..100 => 14,
            _ => 24,
        };
        let full = (columns * done.min(total)).checked_div(total).unwrap_or(0);
        let left = self.status.left(total, self.now).map_or("--".into(), terminal::clock);
        let total_text = total.to_string();
        let count = format!("{done:>0$}/{total_text}", total_text.len());
        let rest = format!(" {count} [{}, {left} left] ", terminal::clock(self.elapsed));
        let room = (self.width.saturating_sub(1)).saturating_sub(columns + rest.len());
        let mut tail = format!("{:PHASE$}", self.status.phase);
        for number in &self.status.watched {
            if tail.len() + 2 + number.len() > room {
                break;
            }
            tail.push_str("  ");
            tail.push_str(number);
        }
        let bar = format!("{}{}", "\u{2588}".repeat(full), "\u{2591}".repeat(columns - full));
        let bar = terminal::paint(self.colours, Colour::Cyan, &bar);
        format!("{bar}{rest}{}", tail.trim_end())
    }
}

/// The progress bar on the terminal, if there is one. Other output has to be written above it.
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

/// Removes the progress bar of a running training from the terminal, before the process exits at once.
pub fn clear_bar() {
    current_bar().iter().for_each(ProgressBar::finish_and_clear);
}

/// Returns a table of `numbers`, pairs of a label and a metric, at the start and at the end of the run that has these `lines` of metrics.
fn changes(lines: &str, numbers: &[(&str, &str)]) -> String {
    let lines: Vec<Map<String, Value>> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let row = |&(label, name): &(&str, &str)| {
        let [first, last] = ends_of(&lines, name)?;
        Some([label.to_string(), first, last])
    };
    let mut rows: Vec<[String; 3]> = numbers.iter().filter_map(row).collect();
    let counted = numbers.iter().find(|(_, name)| !is_eval_metric(name));
    let updates = counted.map_or(0, |(_, name)| lines.iter().filter(|line| metric_of(line, name).is_some()).count());
    if rows.is_empty() {
        return String::new();
    }
    rows.insert(0, [String::new(), "start".into(), "end".into()]);
    let columns = [0, 1, 2].map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let line = |[name, first, last]: &[String; 3]| {
        let line = format!("  {name:0$}  {first:>1$}  {last:>2$}", columns[0], columns[1], columns[2]);
        format!("{}\n", line.trim_end())
    };
    let table: String = rows.iter().map(line).collect();
    format!("{table}{}\n", terminal::wrap(&format!("  {}", words(updates)), Stream::Err.width(), 2))
}

/// Most characters of a prompt or a response in the table of samples; the files have all of them.
const LONGEST_CELL: usize = 4000;

/// Returns a table of `samples`, at most `width` columns wide. A system prompt that all conversations share stands above it,
/// once.
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
        let mut row = vec![cell(&prompt), cell(&sample.shown()), format!("{:.3}", sample.score)];
        if with_ends {
            let end = sample.finish_reason.map(|finish| match finish {
                FinishReason::Stop => " stop",
                FinishReason::Length => " length",
            });
            let tokens = sample.num_tokens.map(|tokens| format!("{tokens}{}", end.unwrap_or_default()));
            let calls = sample.turns.as_ref().map(|turns| turns::counts(turns.calls as u64, turns.failures as u64));
            row.push(tokens.into_iter().chain(calls).collect::<Vec<_>>().join("\n"));
        }
        table.add_row(row);
    }
    match common {
        Some(system) => format!("{}\n{table}", terminal::wrap(&cell(&format!("system: {system}")), width, 2)),
        None => table.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::event::RolloutTurns;
    use std::collections::BTreeMap;

    fn sample(prompt: &str, response: &str, row: &Value) -> Sample {
        Sample {
            prompt: prompt.into(),
            response: response.into(),
            score: 0.5,
            components: BTreeMap::new(),
            extra: BTreeMap::new(),
            finish_reason: Some(FinishReason::Stop),
            num_tokens: Some(12),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            turns: None,
            conversation: Conversation::of(row, prompt),
        }
    }

    #[test]
    fn the_time_left_is_unknown_until_an_update_is_done() {
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs(seconds);
        let mut status = BarStatus { phase: "sampling", watched: Vec::new(), began: (began, 3), reached: None };
        assert_eq!(status.left(10, after(60)), None);
        let line = |status: &BarStatus, width, now| {
            let (status, elapsed) = (status.clone(), Duration::from_secs(61));
            BarLine { status, width, colours: false, done: 3, total: 10, elapsed, now }.text()
        };
        let first = line(&status, 80, after(60));
        assert!(first.ends_with("  3/10 [1:01, -- left] sampling"), "{first}");
        // Two updates of a run that started at the third took 10 s each; 5 are left, one of which has run for 4 s.
        status.reached = Some((after(20), 5));
        assert_eq!(status.left(10, after(24)), Some(Duration::from_secs(46)));
        assert_eq!(status.left(10, after(200)), Some(Duration::ZERO));
        status.watched = ["score 0.123", "kl 0.012", "length 53.0", "400 tokens/s"].map(String::from).to_vec();
        for (width, last) in [(60, "score 0.123"), (80, "kl 0.012"), (120, "400 tokens/s")] {
            let line = line(&status, width, after(24));
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
        // Different system prompts are shown each; a prompt that was cut is shown as it is.
        let table = sample_table(&[asked(rules, "Who?"), asked("Be rude.", "Who?")], Some(100), false);
        assert!(table.contains("helpful") && table.contains("system: Be rude."), "{table}");
        let cut = sample("a cat?<|assistant|>", "Yes.", &row(rules, "What is a cat?"));
        assert!(sample_table(&[cut], None, false).contains("a cat?<|assistant|>"));
    }

    #[test]
    fn a_table_shows_turns_with_calls_and_results_in_safe_text() {
        let call =
            serde_json::json!({"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}});
        let messages = serde_json::json!([
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "multiply", "content": format!("6\u{1b}[2J{}", "x".repeat(1000))},
            {"role": "assistant", "content": "It is 6."},
        ]);
        let messages = messages.as_array().unwrap().clone();
        let (calls, failures, reward) = (2, 1, None);
        let turns =
            RolloutTurns { prompt_ids: Vec::new(), inserted: vec![3..9, 12..14], messages, calls, failures, reward };
        let mut sample = sample("2*3", "raw", &Value::Null);
        sample.turns = Some(turns);
        let table = sample_table(&[sample.clone()], Some(400), false);
        for text in [
            "-> multiply({\"a\": 2, \"b\": 3})",
            "<- 6\\u{1b}[2Jxx",
            "x...",
            "It is 6.",
            "12 stop",
            "2 calls, 1 failed",
        ] {
            assert!(table.contains(text), "no {text} in {table}");
        }
        assert!(!table.contains("raw") && !table.contains('\u{1b}') && table.len() < 5000, "{table}");
        // In the files they are columns of their own.
        let row = serde_json::to_value(&sample).unwrap();
        assert_eq!(row["inserted"], serde_json::json!([3, 9, 12, 14]));
        assert_eq!(
            (&row["tool_calls"], &row["tool_failures"], &row["env_reward"]),
            (&2.into(), &1.into(), &Value::Null)
        );
        assert!(row["messages"][0]["tool_calls"].is_array() && row.get("prompt_ids").is_none(), "{row}");
        sample.turns = None;
        assert!(serde_json::to_value(&sample).unwrap().get("messages").is_none());
    }

    #[test]
    fn the_end_shows_the_numbers_of_the_report_with_the_errors_of_held_out_scores() {
        let lines = "{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"loss\":2.0,\"eval_loss\":3.0}\n{\"step\":3,\"loss\":1.23456}\nhal";
        let numbers = [("loss", "loss"), ("held-out loss", "eval_loss"), ("KL", "kl")];
        let words = "  start and end are the first and the last update, those of held-out rows single evaluations\n";
        let table = "                 start   end\n  loss             2.5  1.23\n  held-out loss            3\n";
        assert_eq!(changes(lines, &numbers), format!("{table}{words}"));
        assert_eq!(changes("", &numbers), "");
        // A GRPO or RLOO run has TRL's names; of 20 updates, two are in each mean.
        let line = |step: u32| {
            let (score, error) = (f64::from(step) / 10.0, 0.05);
            let held_out = if step.is_multiple_of(10) {
                format!(",\"eval/score\":{score},\"eval/score_stderr\":{error}")
            } else {
                String::new()
            };
            format!("{{\"step\":{step},\"reward\":{step}{held_out}}}\n")
        };
        let lines: String = (1..=20).map(line).collect();
        let end = changes(&lines, &[("score", "objective/scores"), ("held-out score", "eval/score")]);
        for part in
            ["score                1.5      19.5", "held-out score  1 \u{b1} 0.05  2 \u{b1} 0.05", "the last 2 updates"]
        {
            assert!(end.contains(part), "no {part} in {end}");
        }
    }
}
