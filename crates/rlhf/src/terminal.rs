//! Text for a terminal: width, colours, line breaks between words, and commands to copy.

use console::{Term, measure_text_width};
use serde_json::{Map, Value};
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// One of the two output streams of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

impl Stream {
    /// Returns the columns of the terminal; `None` for a file or a pipe.
    pub fn width(self) -> Option<usize> {
        let (term, is_terminal) = match self {
            Stream::Out => (Term::stdout(), std::io::stdout().is_terminal()),
            Stream::Err => (Term::stderr(), std::io::stderr().is_terminal()),
        };
        // 80 columns if the terminal does not report its size.
        is_terminal.then(|| term.size_checked().map_or(80, |(_, columns)| usize::from(columns)))
    }

    /// Returns true for a terminal that supports cursor movement, which `TERM=dumb` does not.
    pub fn moves_cursor(self) -> bool {
        self.width().is_some() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
    }

    /// Returns true for such a terminal, unless `NO_COLOR` is set (<https://no-color.org>).
    pub fn has_colours(self) -> bool {
        self.moves_cursor() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }

    /// Returns `text` in `colour`, if this stream has colours.
    pub fn paint(self, colour: Colour, text: &str) -> String {
        paint(self.has_colours(), colour, text)
    }

    /// Returns a message with its `label` ("warning", "error") in `colour`, if this stream has colours. Lines longer than the
    /// terminal's width break between words.
    pub fn labelled(self, label: &str, colour: Colour, text: &str) -> String {
        let whole = wrap(&format!("{label}: {text}"), self.width(), 2);
        format!("{}{}", self.paint(colour, label), &whole[label.len()..])
    }
}

/// A colour or style.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// Errors.
    Red,
    /// Warnings.
    Yellow,
    /// Success.
    Green,
    /// The progress bar.
    Cyan,
    /// Headings.
    Bold,
    /// Secondary text.
    Dim,
}

pub(crate) fn paint(on: bool, colour: Colour, text: &str) -> String {
    let code = match colour {
        Colour::Red => "1;31",
        Colour::Yellow => "33",
        Colour::Green => "32",
        Colour::Cyan => "36",
        Colour::Bold => "1",
        Colour::Dim => "2",
    };
    if on && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
}

/// Breaks `text` between words into lines of at most `width` columns; all lines but the first are indented by `indent` spaces.
/// A word longer than a line gets its own line. Without a width, returns `text` as it is.
pub fn wrap(text: &str, width: Option<usize>, indent: usize) -> String {
    let Some(width) = width.filter(|&width| width > indent) else { return text.to_string() };
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        if measure_text_width(paragraph) <= width {
            lines.push(paragraph.to_string());
            continue;
        }
        let mut line = String::new();
        let (mut used, mut words) = (0, 0);
        for word in paragraph.split(' ') {
            let columns = measure_text_width(word);
            if words > 0 && used + 1 + columns > width {
                lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
                (used, words) = (indent, 0);
            }
            if words > 0 {
                line.push(' ');
                used += 1;
            }
            line.push_str(word);
            used += columns;
            words += 1;
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// Truncates `text` to at most `columns` columns, with an ellipsis at the end.
pub fn cut(text: &str, columns: usize) -> String {
    console::truncate_str(text, columns, "\u{2026}").into_owned()
}

/// Formats rows of name and value, with the names in one column. Values too long for the terminal break between words.
pub fn facts<N: AsRef<str>, V: AsRef<str>>(rows: &[(N, V)], stream: Stream) -> String {
    facts_in(rows, stream.width(), stream.has_colours())
}

fn facts_in<N: AsRef<str>, V: AsRef<str>>(rows: &[(N, V)], width: Option<usize>, colours: bool) -> String {
    let names = rows.iter().map(|(name, _)| measure_text_width(name.as_ref())).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in rows {
        let name = name.as_ref();
        let room = width.map(|width| width.saturating_sub(names + 4).max(16));
        let value = wrap(value.as_ref(), room, 0).replace('\n', &format!("\n{}", " ".repeat(names + 4)));
        let blanks = " ".repeat(names - measure_text_width(name) + 2);
        let _ = writeln!(text, "  {}{blanks}{value}", paint(colours, Colour::Dim, name));
    }
    text
}

/// Formats a duration as a clock: `0:07`, `12:34`, `1:02:03`.
pub fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

/// Formats a duration with two digits: `8.3 s`, `35 s`, `12 min`, `3.5 h`, `2.1 days`.
pub fn about(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let units = [(60.0, 1.0, "s"), (3600.0, 60.0, "min"), (86_400.0, 3600.0, "h"), (f64::INFINITY, 86_400.0, "days")];
    let unit = units.into_iter().find(|(below, ..)| seconds < *below);
    let (number, unit) = unit.map_or((seconds, "s"), |(_, length, unit)| (seconds / length, unit));
    if number < 9.95 { format!("{number:.1} {unit}") } else { format!("{number:.0} {unit}") }
}

/// Formats a time, in seconds since 1970 in UTC: `2026-11-27 09:15 UTC`.
pub(crate) fn date(seconds: u64) -> String {
    let mut days = seconds / 86_400;
    let minutes = seconds / 60 % 1440;
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // Whole cycles of the calendar are skipped at once, so any number of seconds takes a few hundred steps.
    let mut year = 1970 + 400 * (days / 146_097);
    days %= 146_097;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let months = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= months[month] {
        days -= months[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02} {:02}:{:02} UTC", month + 1, days + 1, minutes / 60, minutes % 60)
}

/// Rounds a number to seven significant digits, the precision of f32.
pub fn seven_digits(number: f64) -> f64 {
    if number.is_finite() { format!("{number:.6e}").parse().unwrap_or(number) } else { number }
}

/// Quotes a word for a POSIX shell, if needed.
pub fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Formats a shell command line: one command, or several connected by pipes. A line too long for the terminal is continued
/// with backslashes.
pub fn shell_command(commands: &[Vec<String>], width: Option<usize>) -> String {
    let mut words = Vec::new();
    for (at, command) in commands.iter().enumerate() {
        words.extend((at > 0).then(|| String::from("|")));
        words.extend(command.iter().map(|word| shell_word(word)));
    }
    let whole = format!("  {}", words.join(" "));
    let Some(width) = width.filter(|&width| measure_text_width(&whole) > width) else { return whole };
    let mut text = String::from(" ");
    let mut used = 1;
    for (at, word) in words.iter().enumerate() {
        let columns = measure_text_width(word);
        // Two columns for the backslash; a flag stays on one line with its value.
        let value = at + 1 < words.len() && word.starts_with("--") && !words[at + 1].starts_with("--");
        let with = if value { 1 + measure_text_width(&words[at + 1]) } else { 0 };
        let joined = at > 0 && words[at - 1].starts_with("--") && !word.starts_with("--");
        if at > 0 && !joined && used + 1 + columns + with + 2 > width {
            text.push_str(" \\\n     ");
            used = 5;
        }
        text.push(' ');
        text.push_str(word);
        used += 1 + columns;
    }
    text
}

/// The words of [`set_words`].
static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

/// Sets the words of the command line, program name first, that a run records as its start. By default these are the words of the process.
/// Only the first call has an effect.
pub fn set_words(words: Vec<OsString>) {
    let _ = WORDS.set(words);
}

/// Returns the words of the command line, program name first.
pub fn words() -> Vec<OsString> {
    WORDS.get().cloned().unwrap_or_else(|| std::env::args_os().collect())
}

/// Returns the path by which this program was called, if it is `rlhf` and was called by a path, else `rlhf`.
pub fn program() -> String {
    let words = words();
    let called = words.first().map(Path::new).filter(|path| is_rlhf(path) && path.components().count() > 1);
    called.map_or("rlhf".into(), |path| path.display().to_string())
}

fn is_rlhf(path: &Path) -> bool {
    path.file_stem() == Some(OsStr::new("rlhf"))
}

/// Returns the command line of this process, quoted for a shell and without secrets; `None` if the program is not `rlhf`.
pub(crate) fn command_line() -> Option<String> {
    let mut words = words().into_iter().map(|word| word.to_string_lossy().into_owned());
    words.next().filter(|program| is_rlhf(Path::new(program)))?;
    let words = without_secrets(words.collect());
    Some(words.iter().fold(String::from("rlhf"), |line, word| line + " " + &shell_word(word)))
}

/// Replaces text that may be secret.
const LEFT_OUT: &str = "...";

/// Removes secrets from the words of a command line: passwords and queries in URLs, values of flags named like a key or a token,
/// and all words of a reward program but the first.
fn without_secrets(words: Vec<String>) -> Vec<String> {
    let mut shown: Vec<String> = Vec::with_capacity(words.len());
    // The flag that the next values belong to; `--reward` takes several.
    let mut flag = String::new();
    for word in words {
        let (name, value) = match word.strip_prefix("--") {
            Some(text) => match text.split_once('=') {
                Some((name, value)) => (name.replace('-', "_"), Some(value.to_string())),
                None => (text.replace('-', "_"), None),
            },
            None => (std::mem::take(&mut flag), Some(word.clone())),
        };
        let is_flag = word.starts_with("--");
        match value {
            None => shown.push(word.clone()),
            Some(value) => {
                let value = without_secret(&name, &value);
                shown.push(if is_flag { format!("--{name}={value}") } else { value });
            }
        }
        flag = name;
    }
    shown
}

/// Settings with command lines or addresses, which may hold secrets.
const PROGRAMS: [&str; 6] =
    ["reward", "reward_funcs", "reward_command", "reward_url", "report_to", "environment_factory"];

/// Returns the settings of a run as others may see them: without the arguments of programs, and without the passwords and queries of
/// addresses.
pub(crate) fn without_programs(settings: &Map<String, Value>) -> Map<String, Value> {
    let mut shown = settings.clone();
    for name in PROGRAMS {
        match shown.get_mut(name) {
            Some(Value::String(text)) => *text = without_secret(name, text),
            Some(Value::Array(values)) => {
                for value in values {
                    if let Value::String(text) = value {
                        *text = without_secret(name, text);
                    }
                }
            }
            _ => {}
        }
    }
    shown
}

/// Returns the values of a run's settings, each with the setting's name, that [`without_programs`] shortens.
pub(crate) fn programs(settings: &Map<String, Value>) -> Vec<(&'static str, String)> {
    let texts = |name: &'static str| match settings.get(name) {
        Some(Value::String(text)) => vec![(name, text.clone())],
        Some(Value::Array(values)) => {
            values.iter().filter_map(Value::as_str).map(|text| (name, text.to_string())).collect()
        }
        _ => Vec::new(),
    };
    PROGRAMS.into_iter().flat_map(texts).filter(|(name, text)| without_secret(name, text) != *text).collect()
}

fn without_secret(flag: &str, value: &str) -> String {
    let named_secret = |name: &str| {
        let name = name.to_ascii_lowercase();
        ["token", "secret", "password", "passwd", "api_key", "apikey", "authorization"]
            .iter()
            .any(|word| name.contains(word))
            // Tokens of text are not secret.
            && !["stop_token", "tokens", "tokenizer"].iter().any(|word| name.contains(word))
    };
    if named_secret(flag) {
        return LEFT_OUT.into();
    }
    // Maps of settings: `--push_to_hub_if_best_kwargs '{"token": "123"}'`.
    if flag.ends_with("_kwargs") {
        let Ok(entries) = serde_json::from_str::<Map<String, Value>>(value) else { return LEFT_OUT.into() };
        let shown = entries.into_iter().map(|(name, value)| {
            let value = if named_secret(&name) { LEFT_OUT.into() } else { value };
            (name, value)
        });
        return Value::Object(shown.collect()).to_string();
    }
    // The arguments of a program may be secret: `--reward_command 'judge --api_key 123'`, `--reward 'mine=command:judge 123'`, and so may
    // be variables before it.
    let (head, program) = match value.split_once("command:") {
        Some((head, program))
            if ["reward", "reward_funcs", "report_to", "log_with", "environment_factory"].contains(&flag) =>
        {
            (format!("{head}command:"), Some(program))
        }
        _ => (String::new(), (flag == "reward_command").then_some(value)),
    };
    if let Some(program) = program {
        return match program.split_once(char::is_whitespace) {
            Some((first, _)) if !first.contains('=') => format!("{head}{first} {LEFT_OUT}"),
            Some(_) => format!("{head}{LEFT_OUT}"),
            None => value.to_string(),
        };
    }
    let Some(scheme) = value.find("://") else { return value.to_string() };
    let (front, rest) = value.split_at(scheme + 3);
    let host = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let user = rest[..host].rfind('@').map_or(0, |at| at + 1);
    let end = rest.find(['?', '#']).unwrap_or(rest.len());
    let hidden = |there: bool, text: &str| if there { text.to_string() } else { String::new() };
    let user_shown = hidden(user > 0, "...@");
    let query = hidden(end < rest.len(), "?...");
    format!("{front}{user_shown}{}{query}", &rest[user..end.max(user)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &[&str]) -> Vec<String> {
        line.iter().map(|word| word.to_string()).collect()
    }

    #[test]
    fn a_date_is_that_of_the_calendar() {
        for (seconds, shown) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_704_067_199, "2023-12-31 23:59 UTC"),
            (1_795_770_900, "2026-11-27 09:15 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(seconds), shown);
        }
        assert!(date(u64::MAX).ends_with(" UTC"));
    }

    #[test]
    fn lines_break_between_words_only() {
        let text = "warning: prompts.jsonl: 3 of 10 rows were left out: a_word_that_is_longer_than_any_line";
        assert_eq!(
            wrap(text, Some(30), 2),
            "warning: prompts.jsonl: 3 of\n  10 rows were left out:\n  a_word_that_is_longer_than_any_line"
        );
        assert_eq!(wrap(text, None, 2), text);
        assert_eq!(wrap("short", Some(30), 2), "short");
        // A wide character takes two columns.
        assert_eq!(wrap("\u{6c34}\u{6c34} \u{6c34}\u{6c34}", Some(8), 0), "\u{6c34}\u{6c34}\n\u{6c34}\u{6c34}");
        for width in [20, 40, 60, 80] {
            let text = "the quick brown fox jumps over the lazy dog and comes again tomorrow with its friends";
            let wrapped = wrap(text, Some(width), 4);
            assert!(wrapped.lines().all(|line| line.len() <= width), "{wrapped}");
            assert_eq!(wrapped.split_whitespace().collect::<Vec<_>>().join(" "), text);
        }
    }

    #[test]
    fn facts_are_aligned_in_columns_within_the_width() {
        let rows = [("device", "cpu, 2 threads"), ("an update", "64 responses of at most 53 tokens each")];
        assert_eq!(
            facts_in(&rows, Some(36), false),
            "  device     cpu, 2 threads\n  an update  64 responses of at most\n             53 tokens each\n"
        );
        assert!(facts_in(&rows, None, true).contains("\x1b[2mdevice\x1b[0m"));
    }

    #[test]
    fn durations_have_two_digits_and_numbers_have_seven() {
        let seconds = Duration::from_secs_f64;
        assert_eq!([7.9, 754.0, 3723.0].map(|time| clock(seconds(time))), ["0:07", "12:34", "1:02:03"]);
        let said = [0.04, 8.34, 35.4, 59.9, 750.0, 12_600.0, 180_000.0].map(|time| about(seconds(time)));
        assert_eq!(said, ["0.0 s", "8.3 s", "35 s", "60 s", "12 min", "3.5 h", "2.1 days"]);
        assert_eq!(seven_digits(0.123_456_789_012_345_67).to_string(), "0.1234568");
        assert_eq!(seven_digits(-98_765_432.1).to_string(), "-98765430");
        assert_eq!(seven_digits(3e-6).to_string(), "0.000003");
        assert!(seven_digits(f64::NAN).is_nan());
    }

    #[test]
    fn a_shell_parses_a_formatted_command_into_the_same_words() {
        let asked =
            words(&["rlhf", "generate", "--model_name_or_path", "my runs/ppo", "--", "It's $HOME `x` \"q\" \\ ?", ""]);
        for width in [None, Some(60), Some(20)] {
            let line = shell_command(std::slice::from_ref(&asked), width).replacen("rlhf", "printf '%s\\n'", 1);
            let ran = std::process::Command::new("sh").args(["-c", &line]).output().unwrap();
            assert_eq!(String::from_utf8(ran.stdout).unwrap(), asked[1..].join("\n") + "\n", "{line}");
        }
        let plain = [words(&["rlhf", "generate", "--model_name_or_path", "runs/ppo", "The movie"])];
        let piped = [words(&["echo", "a|b"]), words(&["rlhf", "score"])];
        assert_eq!(shell_command(&piped, None), "  echo 'a|b' | rlhf score");
        assert_eq!(shell_command(&plain, Some(80)), "  rlhf generate --model_name_or_path runs/ppo 'The movie'");
        assert_eq!(
            shell_command(&plain, Some(50)),
            "  rlhf generate --model_name_or_path runs/ppo \\\n      'The movie'"
        );
    }

    #[test]
    fn secrets_are_removed_from_command_lines() {
        let shown = |line: &[&str]| without_secrets(words(line)).join(" ");
        let line = [
            "ppo",
            "--reward_url",
            "https://me:pw123@judge.org/score?key=pw123#pw123",
            "--reward",
            "a=url:http://h/x?key=pw123",
            "b=command:judge --api_key pw123",
            "--reward-command=python3 judge.py pw123",
            "--report_to",
            "command:API_KEY=pw123 send",
            "--log_with=command:send pw123",
            "--reward_funcs",
            "command:judge pw123",
            "--push_to_hub_if_best_kwargs",
            "{\"repo_id\": \"me/x\", \"token\": \"pw123\"}",
            "--tracker_kwargs={pw123",
            "--hub_token",
            "pw123",
            "--api-key=pw123",
            "--stop_token",
            "eos",
            "--seed",
            "7",
        ];
        assert_eq!(
            shown(&line),
            "ppo --reward_url https://...@judge.org/score?... --reward a=url:http://h/x?... b=command:judge ... \
             --reward_command=python3 ... --report_to command:... --log_with=command:send ... --reward_funcs command:judge ... --push_to_hub_if_best_kwargs \
             {\"repo_id\":\"me/x\",\"token\":\"...\"} --tracker_kwargs=... --hub_token ... --api_key=... --stop_token eos --seed 7"
        );
        // A word after the value of a flag that takes one value is not its value.
        assert_eq!(shown(&["generate", "--seed", "7", "a @ b://c"]), "generate --seed 7 a @ b://c");
    }
}
