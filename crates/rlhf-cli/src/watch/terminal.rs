//! The view of a run in the terminal, which follows it.

use super::live::LiveRun;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::Line;
use ratatui::widgets::{self, Block, Chart, Dataset, GraphType, Paragraph, Row, Table, Wrap};
use ratatui::{DefaultTerminal, Frame};
use rlhf::report::html::number;
use rlhf::report::progress::Progress;
use rlhf::report::read::Run;
use rlhf::report::samples::{Prompt, Response};
use rlhf::report::svg::{self, Axis, Point, smoothed};
use rlhf::report::verdict::{Mark, verdict};
use rlhf::run::ends::{short, window};
use rlhf::run::turns::{self, Kind, counts};
use rlhf::safe_text::{lines, one_line};
use rlhf::signals::stop_requested;
use rlhf::terminal::Stream;
use rlhf::{Error, Result};
use std::cell::Cell;
use std::cmp::Reverse;
use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

/// Polling interval of the run.
const PAUSE: Duration = Duration::from_millis(500);

/// Title and metric of each curve, the most important first: the first [`CURVES_SHOWN`] that a run has are drawn.
const CURVES: [(&str, &str); 12] = [
    ("Score", "objective/scores"),
    ("KL, nats per response", "objective/kl"),
    ("Length, tokens", "val/response_length"),
    ("Entropy, nats per token", "policy/entropy_avg"),
    ("Calls per response", "tools/call_frequency"),
    ("Entropy, nats per response", "objective/entropy"),
    ("Loss", "loss"),
    ("Loss, held-out rows", "eval_loss"),
    ("Accuracy", "accuracy"),
    ("Margin", "margin"),
    ("Gradient norm", "grad_norm"),
    ("Learning rate", "learning_rate"),
];

/// Metrics whose means say nothing.
const COUNTS: [&str; 4] = ["step", "episode", "epoch", "num_tokens"];

/// Curves on the screen, in two columns.
const CURVES_SHOWN: usize = 4;

/// Bad findings of the verdict below the title, at most.
const MOST_FINDINGS: usize = 3;

/// Rows of a chart from which on it has an axis of updates.
const HEIGHT_WITH_UPDATES: u16 = 9;

/// Columns of the last value of a metric.
const VALUE: u16 = 11;

/// Columns of the name of a metric, at least, in a terminal of 40 columns or more.
const NAME: u16 = 12;

/// Columns of the list of metrics besides names and values: two edges, and a column between.
const BETWEEN: u16 = 3;

/// Lines by which a sample is scrolled.
const PAGE: usize = 5;

/// Absolute value of numbers that are not drawn.
const LARGEST: f64 = 1e100;

/// Shows the run in the folder `dir` in the terminal until a key or [`request_stop`](rlhf::signals::request_stop) ends it.
///
/// # Errors
/// If standard input or output is no terminal; if there is no run in the folder, or `metrics.jsonl` cannot be read; if the terminal cannot
/// be read or written.
pub fn watch_in_terminal(dir: &Path) -> Result<()> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() || !Stream::Out.moves_cursor() {
        let message = "terminal: expected a terminal as standard input and output, found a pipe or a file; without --terminal the run is shown as a \
                       page in the browser";
        return Err(Error::Usage(message.into()));
    }
    let mut view = View::open(dir)?;
    let shown = ratatui::try_init().and_then(|mut terminal| show(&mut terminal, &mut view));
    shown.and(ratatui::try_restore()).map_err(Error::io("read or write", "the terminal"))
}

/// Draws the view whenever the run or the view may have changed.
fn show(terminal: &mut DefaultTerminal, view: &mut View) -> io::Result<()> {
    while !stop_requested() {
        view.refresh();
        terminal.draw(|frame| view.draw(frame))?;
        if !event::poll(PAUSE)? {
            continue;
        }
        if let Event::Key(key) = event::read()?
            && key.is_press()
            && view.press(key).is_break()
        {
            break;
        }
    }
    Ok(())
}

/// A run with the place in it that the user looks at.
struct View {
    live: LiveRun,
    /// Error of the last read, if it failed.
    failure: Option<String>,
    /// Place of the first metric in the list.
    metric: usize,
    /// Number of samples that are older than the one shown; `None` for the newest one.
    older: Option<usize>,
    /// Number of lines of the sample above the first one shown.
    scrolled: usize,
    /// Its maximum, as of the last drawing.
    most_scrolled: Cell<usize>,
}

impl View {
    fn open(dir: &Path) -> Result<Self> {
        Ok(Self {
            live: LiveRun::open(dir)?,
            failure: None,
            metric: 0,
            older: None,
            scrolled: 0,
            most_scrolled: Cell::new(0),
        })
    }

    /// Reads the run again if it has changed.
    fn refresh(&mut self) {
        match self.live.refresh() {
            Ok(false) => {}
            Ok(true) => self.failure = None,
            Err(error) => self.failure = Some(error.to_string()),
        }
    }

    /// Handles a key; breaks if it ends the view.
    fn press(&mut self, key: KeyEvent) -> ControlFlow<()> {
        let last = |len: usize| len.saturating_sub(1);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return ControlFlow::Break(()),
            // In raw mode Ctrl-C is no signal.
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return ControlFlow::Break(()),
            KeyCode::Up => self.metric = self.metric.saturating_sub(1),
            KeyCode::Down => self.metric = (self.metric + 1).min(last(self.live.run.metrics.len())),
            KeyCode::Left => self.show_sample(|place| place.saturating_sub(1)),
            KeyCode::Right => self.show_sample(|place| place + 1),
            KeyCode::PageUp => self.scrolled = self.scrolled.saturating_sub(PAGE),
            KeyCode::PageDown => self.scrolled = (self.scrolled + PAGE).min(self.most_scrolled.get()),
            _ => {}
        }
        ControlFlow::Continue(())
    }

    /// Returns the place of the sample, the newest first, among `len`. A run that replaced another may have fewer samples.
    fn sample(&self, len: usize) -> usize {
        self.older.filter(|older| *older < len).map_or(0, |older| len - 1 - older)
    }

    /// Shows the sample at the place that `step` makes of the current place. At the newest sample, the view follows when others come.
    fn show_sample(&mut self, step: impl Fn(usize) -> usize) {
        let last = samples(&self.live.run).len().saturating_sub(1);
        let place = step(self.sample(last + 1)).min(last);
        self.older = (place > 0).then(|| last - place);
        self.scrolled = 0;
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let head = self.head();
        let height = u16::try_from(head.len()).unwrap_or(u16::MAX);
        let [top, charts, body, keys] = Layout::vertical([
            Constraint::Length(height),
            Constraint::Fill(3),
            Constraint::Fill(2),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(head), top);
        self.curves(frame, charts);
        // The list of metrics gets the width of its names; the sample keeps at least a third of the screen.
        let list = (NAME + VALUE + BETWEEN).min(body.width.saturating_mul(2) / 3).max(body.width.saturating_mul(2) / 5);
        let [left, right] = Layout::horizontal([Constraint::Length(list), Constraint::Fill(1)]).areas(body);
        self.metrics(frame, left);
        self.newest_sample(frame, right);
        frame.render_widget(
            Line::from(" q quit  \u{2191}\u{2193} metrics  \u{2190} newer \u{2192} older  PgUp PgDn scroll")
                .dark_gray(),
            keys,
        );
    }

    /// Returns the lines at the top: name and progress, findings, a failure.
    fn head(&self) -> Vec<Line<'static>> {
        let run = &self.live.run;
        let name = one_line(&run.label).into_owned();
        let mut head = vec![Line::from(vec![name.bold(), format!("   {}", Progress::of(run)).into()])];
        let findings = verdict(run).into_iter().filter(|finding| finding.mark == Mark::Bad);
        head.extend(
            findings.take(MOST_FINDINGS).map(|finding| Line::from(format!("! {}", one_line(&finding.text))).yellow()),
        );
        head.extend(self.failure.as_ref().map(|failure| Line::from(format!("! {failure}")).red()));
        head
    }

    fn curves(&self, frame: &mut Frame<'_>, area: Rect) {
        let run = &self.live.run;
        let curves = CURVES.iter().filter_map(|(title, metric)| Some((*title, *metric, run.points(metric)?)));
        let curves: Vec<_> = curves.take(CURVES_SHOWN).collect();
        if curves.is_empty() {
            frame.render_widget(Paragraph::new("no updates yet").block(Block::bordered()), area);
            return;
        }
        let rows = Layout::vertical(curves.chunks(2).map(|_| Constraint::Fill(1))).split(area);
        for (row, row_curves) in rows.iter().zip(curves.chunks(2)) {
            let cells = Layout::horizontal(row_curves.iter().map(|_| Constraint::Fill(1))).split(*row);
            for (cell, (title, metric, points)) in cells.iter().zip(row_curves) {
                curve(frame, *cell, (title, metric), points);
            }
        }
    }

    /// Draws the name of each metric and its mean at the end, or for counts the last value.
    fn metrics(&self, frame: &mut Frame<'_>, area: Rect) {
        let metrics = self.live.run.metrics.iter().skip(self.metric);
        let names = area.width.saturating_sub(VALUE + BETWEEN);
        let rows = metrics.filter_map(|series| {
            let value = if COUNTS.contains(&series.name.as_str()) {
                number(series.points.last()?.1, 9)
            } else {
                short(svg::last(&series.name, &series.points))
            };
            // Names differ at their ends; their beginnings are the names of groups.
            Some(Row::new([tail(&one_line(&series.name), usize::from(names)), value]))
        });
        let updates = self.live.run.points("step").map_or(0, <[Point]>::len);
        let title = match window("step", updates) {
            0 | 1 => " Last update ".to_string(),
            window => format!(" Mean of the last {window} updates "),
        };
        let table = Table::new(rows, [Constraint::Fill(1), Constraint::Length(VALUE)]);
        frame.render_widget(table.block(Block::bordered().title(title)), area);
    }

    fn newest_sample(&self, frame: &mut Frame<'_>, area: Rect) {
        let samples = samples(&self.live.run);
        let place = self.sample(samples.len());
        let Some((prompt, response)) = samples.get(place) else {
            frame.render_widget(Paragraph::new("no samples yet").block(Block::bordered().title(" Samples ")), area);
            return;
        };
        let mut about = format!("update {}, {}", response.step, prompt.source.name());
        if response.score.is_finite() {
            about += &format!(", score {}", number(response.score, 4));
        }
        if let Some(turns) = &response.turns {
            about += &format!(", {}", counts(turns.calls, turns.failures));
        }
        about.extend(response.finish.iter().map(|finish| format!(", {}", one_line(finish))));
        let prompt_lines = text_lines(&prompt.text.text).into_iter().map(|line| Line::from(line).dark_gray());
        let all: Vec<Line<'_>> =
            std::iter::once(Line::from(about).italic()).chain(prompt_lines).chain(response_lines(response)).collect();
        let title = format!(" Sample {} of {}, newest first ", place + 1, samples.len());
        let width = usize::from(area.width.saturating_sub(2)).max(1);
        let height = usize::from(area.height.saturating_sub(2));
        // Lines break at spaces: a few more than by their columns.
        let lines: usize = all.iter().map(|line| (line.width() + line.width() / 8).div_ceil(width).max(1)).sum();
        self.most_scrolled.set(lines.saturating_sub(height));
        let scrolled = u16::try_from(self.scrolled.min(self.most_scrolled.get())).unwrap_or(u16::MAX);
        let text = Paragraph::new(all).wrap(Wrap { trim: false }).scroll((scrolled, 0));
        frame.render_widget(text.block(Block::bordered().title(title)), area);
    }
}

/// Returns the lines of a text of a run.
fn text_lines(text: &str) -> Vec<String> {
    lines(text).replace('\t', "    ").lines().map(String::from).collect()
}

/// Returns the lines of a response: of its turns, where it has some.
fn response_lines(response: &Response) -> Vec<Line<'static>> {
    let Some(turns) = &response.turns else {
        return text_lines(&response.text.text).into_iter().map(Line::from).collect();
    };
    let mut all = Vec::new();
    for turn in &turns.turns {
        all.extend((turn.skipped > 0).then(|| Line::from(format!("... {} turns are left out", turn.skipped)).italic()));
        for part in &turn.parts {
            let style = match part.kind {
                Kind::Text => Style::new(),
                Kind::Call => Style::new().cyan(),
                Kind::Reasoning | Kind::Result => Style::new().dark_gray(),
            };
            let lines = text_lines(&turns::line(part.kind, &part.text.text));
            all.extend(lines.into_iter().map(|line| Line::from(line).style(style)));
        }
        all.extend(
            (turn.left_out > 0).then(|| Line::from(format!("... {} more are left out", turn.left_out)).italic()),
        );
    }
    all
}

/// Returns the last characters of `text`, at most `columns`; an ellipsis stands for those left out.
fn tail(text: &str, columns: usize) -> String {
    let more = text.chars().count().saturating_sub(columns);
    if more == 0 {
        return text.into();
    }
    std::iter::once('\u{2026}').filter(|_| columns > 0).chain(text.chars().skip(more + 1)).collect()
}

/// Returns all samples, the newest first.
fn samples(run: &Run) -> Vec<(&Prompt, &Response)> {
    let all = run.prompts.iter().flat_map(|prompt| prompt.responses.iter().map(move |response| (prompt, response)));
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(_, response)| Reverse(response.step));
    all
}

/// Draws the values of a metric with its title, and over them, if there are many, their moving mean. Values that are not drawn leave a gap.
fn curve(frame: &mut Frame<'_>, area: Rect, (title, metric): (&str, &str), points: &[Point]) {
    let drawn: Vec<Point> = points.iter().map(|&(x, y)| (x, if y.abs() < LARGEST { y } else { f64::NAN })).collect();
    let smooth = smoothed(metric, &drawn).unwrap_or_default();
    let x = Axis::x(drawn.iter().map(|point| point.0)).domain;
    let y = Axis::y(drawn.iter().map(|point| point.1)).domain;
    let dataset = |style: Style| Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line).style(style);
    let each = if smooth.is_empty() { Style::new().cyan() } else { Style::new().dark_gray() };
    let datasets = parts(&drawn)
        .map(|part| dataset(each).data(part))
        .chain(parts(&smooth).map(|part| dataset(Style::new().cyan()).data(part)))
        .collect();
    let axis = |domain: [f64; 2], has_labels: bool| {
        let labels = domain.iter().filter(|_| has_labels).map(|value| number(*value, 4));
        widgets::Axis::default().bounds(domain).labels(labels).style(Style::new().dark_gray())
    };
    let last = format!(" {} ", short(svg::last(metric, points)));
    // Two edges, and a space on either side.
    let fits = title.len() + last.len() + 4 <= usize::from(area.width);
    let title = if fits { title } else { title.split(',').next().unwrap_or(title) };
    let block = Block::bordered().title(format!(" {title} ")).title(Line::from(last).right_aligned());
    let chart =
        Chart::new(datasets).block(block).x_axis(axis(x, area.height >= HEIGHT_WITH_UPDATES)).y_axis(axis(y, true));
    frame.render_widget(chart, area);
}

/// Returns the parts of a curve between its gaps.
fn parts(points: &[Point]) -> impl Iterator<Item = &[Point]> {
    points.split(|point| point.1.is_nan()).filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use rlhf::run::FolderLock;
    use serde_json::json;
    use std::fs;

    /// Writes a run of PPO with this many updates, and two samples.
    fn write_run(dir: &Path, updates: u32) {
        let line = |step: u32| {
            let line = json!({"step": step, "episode": 8 * step, "objective/scores": f64::from(step) / 10.0, "objective/kl": 0.5,
                              "val/response_length": 20, "policy/entropy_avg": 2.0, "time/update": 3.0, "\u{1b}[2J": 1.0});
            format!("{line}\n")
        };
        fs::write(dir.join("metrics.jsonl"), (1..=updates).map(line).collect::<String>()).unwrap();
        fs::write(dir.join("config.yaml"), "total_episodes: 160\nresponse_length: 40\n").unwrap();
        fs::create_dir_all(dir.join("samples")).unwrap();
        for (step, response) in [(1, "old"), (2, "\u{1b}[31mne\tw\nsecond 東京 line")] {
            let row = json!({"step": step, "prompt": "The movie", "response": response, "score": 0.25, "finish_reason": "stop"});
            fs::write(dir.join(format!("samples/update-{step:06}.jsonl")), format!("{row}\n")).unwrap();
        }
    }

    fn screen(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[track_caller]
    fn has(screen: &str, parts: &[&str]) {
        for part in parts {
            assert!(screen.contains(part), "no {part} in\n{screen}");
        }
    }

    #[test]
    fn curves_last_values_the_newest_sample_and_the_time_left_are_shown() {
        let dir = tempfile::tempdir().unwrap();
        write_run(dir.path(), 12);
        fs::write(dir.path().join("alarms.jsonl"), "{\"step\":9,\"alarm\":\"runaway_kl\",\"message\":\"far\"}\n")
            .unwrap();
        let lock = FolderLock::acquire(dir.path()).unwrap();
        let mut view = View::open(dir.path()).unwrap();
        let shown = screen(&view, 100, 30);
        has(&shown, &["update 12 of 20, about 24 s left", "! 1 alarm: runaway_kl at update 9."]);
        has(
            &shown,
            &[
                " Score ",
                " 1.15 ",
                "Mean of the last 2 updates",
                " KL, nats per response ",
                " Length, tokens ",
                " Entropy, nats per token ",
            ],
        );
        has(
            &shown,
            &["objective/scores", "Sample 1 of 2, newest first", "update 2, sample prompt, greedy, score 0.25, stop"],
        );
        has(&shown, &["The movie", "\\u{1b}[31mne    w", "second 東京", "q quit"]);
        // The run is killed.
        drop(lock);
        has(&screen(&View::open(dir.path()).unwrap(), 100, 30), &["update 12 of 20, interrupted"]);
        assert!(!shown.contains('\u{1b}') && shown.contains(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "{shown}");
        let press = |view: &mut View, code: KeyCode| view.press(KeyEvent::from(code));
        assert!(press(&mut view, KeyCode::Right).is_continue() && press(&mut view, KeyCode::Right).is_continue());
        has(&screen(&view, 100, 30), &["Sample 2 of 2", "old"]);
        (0..50).for_each(|_| assert!(press(&mut view, KeyCode::Down).is_continue()));
        let scrolled = screen(&view, 100, 30);
        has(&scrolled, &["\\u{1b}[2J"]);
        assert!(!scrolled.contains("objective/scores"), "{scrolled}");
        assert!(press(&mut view, KeyCode::Char('c')).is_continue() && press(&mut view, KeyCode::Char('q')).is_break());
        assert!(view.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)).is_break());
    }

    #[test]
    fn the_sample_that_is_read_stays_when_others_come_and_can_be_scrolled() {
        let dir = tempfile::tempdir().unwrap();
        write_run(dir.path(), 12);
        let sample = |step: u32, response: &str| {
            let row = json!({"step": step, "prompt": "The movie", "response": response});
            fs::write(dir.path().join(format!("samples/update-{step:06}.jsonl")), format!("{row}\n")).unwrap();
        };
        sample(3, &(0..40).map(|line| format!("line {line} of it\n")).collect::<String>());
        let mut view = View::open(dir.path()).unwrap();
        let press = |view: &mut View, code: KeyCode| assert!(view.press(KeyEvent::from(code)).is_continue());
        let first = screen(&view, 60, 30);
        has(&first, &["Sample 1 of 3", "line 0 of it", "\u{2026}", "/scores", "PgDn scroll"]);
        has(&screen(&view, 50, 30), &[" Entropy ", " KL ", "\u{2026}tive/scores"]);
        assert!(!first.contains("line 39"), "{first}");
        for _ in 0..20 {
            press(&mut view, KeyCode::PageDown);
            screen(&view, 60, 30);
        }
        has(&screen(&view, 60, 30), &["line 39"]);
        press(&mut view, KeyCode::PageUp);
        assert!(!screen(&view, 60, 30).contains("line 39"));
        press(&mut view, KeyCode::Right);
        has(&screen(&view, 60, 30), &["Sample 2 of 3", "second"]);
        sample(4, "newer");
        view.live = LiveRun::open(dir.path()).unwrap();
        has(&screen(&view, 60, 30), &["Sample 3 of 4", "second"]);
        (0..9).for_each(|_| press(&mut view, KeyCode::Left));
        sample(5, "newest");
        view.live = LiveRun::open(dir.path()).unwrap();
        has(&screen(&view, 60, 30), &["Sample 1 of 5", "newest"]);
        press(&mut view, KeyCode::Right);
        for step in [3, 4, 5] {
            fs::remove_file(dir.path().join(format!("samples/update-{step:06}.jsonl"))).unwrap();
        }
        view.live = LiveRun::open(dir.path()).unwrap();
        has(&screen(&view, 60, 30), &["Sample 1 of 2"]);
        assert_eq!([tail("ab/cd", 5), tail("ab/cd", 3), tail("ab", 0)], ["ab/cd", "\u{2026}cd", ""]);
    }

    #[test]
    fn turns_are_shown_with_calls_and_results_in_safe_text() {
        let dir = tempfile::tempdir().unwrap();
        write_run(dir.path(), 12);
        let call = json!({"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}});
        let messages = json!([{"role": "assistant", "content": "", "reasoning_content": "a product", "tool_calls": [call]},
                              {"role": "tool", "name": "multiply", "content": "6\u{1b}[2J\tx"},
                              {"role": "assistant", "content": "It is 6."}]);
        let row = json!({"step": 3, "prompt": "2*3", "response": "raw", "finish_reason": "stop", "messages": messages,
                         "inserted": [1, 2], "tool_calls": 1, "tool_failures": 0, "env_reward": 1.0});
        fs::write(dir.path().join("samples/update-000003.jsonl"), format!("{row}\n")).unwrap();
        let shown = screen(&View::open(dir.path()).unwrap(), 120, 40);
        let call = "-> multiply({\"a\": 2, \"b\": 3})";
        has(&shown, &["greedy, 1 call, stop", "reasoning: a product", call, "<- 6\\u{1b}[2J    x", "It is 6."]);
        assert!(!shown.contains("raw") && !shown.contains('\u{1b}'), "{shown}");
    }

    #[test]
    fn a_gap_of_a_metric_is_one_of_its_curve() {
        let dir = tempfile::tempdir().unwrap();
        let drawn = |gap: std::ops::Range<u32>| {
            let line =
                |step: u32| format!("{}\n", json!({"step": step, "loss": (!gap.contains(&step)).then_some(1.0)}));
            fs::write(dir.path().join("metrics.jsonl"), (1..=20).map(line).collect::<String>()).unwrap();
            let shown = screen(&View::open(dir.path()).unwrap(), 80, 24);
            let is_dot = |c: char| ('\u{2801}'..='\u{28ff}').contains(&c);
            let row = shown.lines().find(|row| row.contains(is_dot)).unwrap_or_else(|| panic!("no curve in\n{shown}"));
            row.trim_matches(|c| !is_dot(c)).to_string()
        };
        let (whole, parted) = (drawn(0..0), drawn(8..14));
        assert!(!whole.contains(' ') && parted.contains("     "), "{whole}\n{parted}");
        assert_eq!(whole.chars().count(), parted.chars().count(), "the ends are drawn");
        let [gap, one] = [f64::NAN, 1.0];
        let points = [gap, one, gap, gap, one, one].map(|y| (2.0, y));
        assert_eq!(parts(&points).map(<[Point]>::len).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn names_of_metrics_have_twelve_columns_in_a_narrow_terminal() {
        let dir = tempfile::tempdir().unwrap();
        write_run(dir.path(), 12);
        let view = View::open(dir.path()).unwrap();
        let names = ["objective/kl 0.5", "\u{2026}tive/scores 1.15", "\u{2026}onse_length 20"];
        has(&screen(&view, 40, 30), &names);
        has(&screen(&view, 60, 30), &names);
        // The sample has a third.
        has(&screen(&view, 30, 30), &["\u{2026}cores 1.15", "update"]);
    }

    #[test]
    fn any_size_of_the_terminal_and_any_run_can_be_drawn() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("metrics.jsonl"), "").unwrap();
        let view = View::open(dir.path()).unwrap();
        has(&screen(&view, 80, 24), &["update 0", "no updates yet", "no samples yet"]);
        let lines = "{\"step\":10,\"epoch\":0.5,\"loss\":1e300}\n{\"step\":20,\"epoch\":1,\"loss\":null,\"accuracy\":0.5,\"grad_norm\":-1e99}\n";
        fs::write(dir.path().join("metrics.jsonl"), lines).unwrap();
        let supervised = View::open(dir.path()).unwrap();
        has(&screen(&supervised, 80, 24), &["update 20", " Loss ", " not finite ", " Accuracy ", " 0.5 "]);
        write_run(dir.path(), 300);
        let full = View::open(dir.path()).unwrap();
        for (width, height) in [(1, 1), (2, 40), (200, 2), (20, 8), (39, 12), (80, 24), (300, 100)] {
            for view in [&view, &supervised, &full] {
                assert_eq!(screen(view, width, height).lines().count(), usize::from(height), "{width} x {height}");
            }
        }
    }

    #[test]
    fn without_a_terminal_there_is_one_error() {
        // Tests have none as standard input or output, or would need a key.
        if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            let error = watch_in_terminal(Path::new("run")).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains("expected a terminal"), "{error}");
        }
    }
}
