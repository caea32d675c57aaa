//! The responses of a run: read from `samples/`, gathered by prompt, and chosen for the page.

use super::cut::{Cut, MOST_TOKENS};
use super::turns::Turns;
use crate::run::output_dir::{SAMPLES, samples_update};
use rlhf_base::{Result, files};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Files of one source that are read at most: the first, the last, and others evenly between.
const MOST_FILES: usize = 12;

/// Bytes of one file that are read at most.
const MOST_BYTES: u64 = 16 << 20;

/// Source of the responses of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// Greedy responses to the sample prompts.
    Samples,
    /// Responses to held-out prompts, sampled as in training.
    HeldOut,
    /// Responses that an update trained on.
    Rollout,
}

impl Source {
    /// The sources with the beginnings of their files' names.
    const ALL: [(Self, &'static str); 3] =
        [(Self::Samples, "update-"), (Self::HeldOut, "eval-"), (Self::Rollout, "answers-")];

    /// Returns its label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Samples => "sample prompt, greedy",
            Self::HeldOut => "held-out prompt",
            Self::Rollout => "rollout",
        }
    }
}

/// A prompt with the responses to it over the run.
#[derive(Debug, PartialEq)]
pub struct Prompt {
    pub source: Source,
    pub text: Cut,
    /// In the order of their updates, at least one.
    pub responses: Vec<Response>,
}

/// A response with its scores.
#[derive(Debug, PartialEq)]
pub struct Response {
    /// Updates done when it was sampled.
    pub step: u64,
    pub text: Cut,
    /// Whole score, NaN where there is none.
    pub score: f64,
    /// Score of each reward by its name.
    pub rewards: Vec<(String, f64)>,
    /// Reason that it ended.
    pub finish: Option<String>,
    pub num_tokens: Option<u64>,
    /// Texts of its tokens with their probabilities, where the file has both.
    pub tokens: Vec<(String, f64)>,
    /// Its turns, with an environment.
    pub turns: Option<Turns>,
}

impl Prompt {
    /// Returns the score of the last response.
    pub fn last(&self) -> f64 {
        self.responses.last().map_or(f64::NAN, |response| response.score)
    }

    /// Returns the change of the score from the first response to the last, where there are two.
    pub fn change(&self) -> Option<f64> {
        let (first, last) = (self.responses.first()?.score, self.last());
        (self.responses.len() > 1 && (last - first).is_finite()).then_some(last - first)
    }
}

/// Text that all prompts of a run begin and end with, such as the chat template with the system prompt, or an instruction. It is shown
/// once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    pub before: String,
    pub after: String,
}

/// Characters of a frame from which on it is worth its own place.
const LEAST_FRAME: usize = 16;

impl Frame {
    /// Returns the frame of the prompts in these files. Its parts end at the end of a line or of a turn's mark.
    fn of<'a>(files: impl Iterator<Item = &'a PathBuf>) -> Self {
        let mut all: Option<Self> = None;
        let mut least = usize::MAX;
        let mut differ = false;
        for prompt in files
            .filter_map(|path| read_lines(path).ok())
            .flat_map(|(lines, _)| lines)
            .filter_map(|line| parse_prompt(&line))
        {
            least = least.min(prompt.len());
            let Some(Self { before, after }) = &mut all else {
                all = Some(Self { before: prompt.clone(), after: prompt });
                continue;
            };
            differ |= *before != prompt;
            before.truncate(common_start(before, &prompt));
            after.drain(..common_end(after, &prompt));
        }
        let Some(Self { before, after }) = all.filter(|_| differ) else { return Self::default() };
        let frame =
            Self { before: before[..end_of_turn(&before)].into(), after: after[start_of_turn(&after)..].into() };
        let len = frame.before.len() + frame.after.len();
        let chars = frame.before.chars().count() + frame.after.chars().count();
        if chars >= LEAST_FRAME && len <= least { frame } else { Self::default() }
    }

    /// Returns a prompt without the frame.
    fn strip<'a>(&self, prompt: &'a str) -> &'a str {
        let inner = prompt.strip_prefix(self.before.as_str()).and_then(|rest| rest.strip_suffix(self.after.as_str()));
        inner.unwrap_or(prompt)
    }

    pub fn is_empty(&self) -> bool {
        self.before.is_empty() && self.after.is_empty()
    }
}

/// Returns the number of bytes at the start of `a` that `b` starts with too.
fn common_start(a: &str, b: &str) -> usize {
    let mut pairs = a.char_indices().zip(b.chars());
    pairs.find(|((_, a), b)| a != b).map_or(a.len().min(b.len()), |((at, _), _)| at)
}

/// Returns the place in `a` from which on `a` and `b` have the same ending.
fn common_end(a: &str, b: &str) -> usize {
    let pairs = a.char_indices().rev().zip(b.chars().rev());
    pairs.take_while(|((_, a), b)| a == b).last().map_or(a.len(), |((at, _), _)| at)
}

/// Returns the end of the last line, mark or name of a role in the beginning of prompts.
fn end_of_turn(text: &str) -> usize {
    let mut ends = text.char_indices().rev().map(|(at, c)| (at + c.len_utf8(), c));
    // After a mark such as <|im_start|> the name of a role follows, which differs where some conversations have a system prompt.
    let begins_turn = |end: usize| text[..end].rfind('<').is_some_and(|at| text[at..end].contains("start"));
    let is_end = |end: usize, c: char| match c {
        '\n' | ']' => true,
        '>' => !begins_turn(end),
        _ => text[..end].ends_with(": "),
    };
    ends.find(|&(end, c)| is_end(end, c)).map_or(0, |(end, _)| end)
}

/// Returns the start of the first line, mark or name of a role in the ending of prompts.
fn start_of_turn(text: &str) -> usize {
    let names_role = text.trim_end().ends_with(':');
    let is_start = |c: char| matches!(c, '\n' | '<' | '[') || names_role && c.is_whitespace();
    text.char_indices().find(|&(_, c)| is_start(c)).map_or(text.len(), |(at, _)| at)
}

/// Reads the samples of the run in `dir` with the frame of their prompts, and notes what is left out.
pub fn read(dir: &Path, notes: &mut Vec<String>) -> (Vec<Prompt>, Frame) {
    let sources = Source::ALL.map(|(source, start)| {
        let files = source_files(&dir.join(SAMPLES), start);
        let read = spread(files.len(), MOST_FILES);
        if read.len() < files.len() {
            notes.push(format!(
                "{SAMPLES}/{start}*.jsonl: {} of {} files are read, from the first to the last",
                read.len(),
                files.len()
            ));
        }
        (source, read.into_iter().map(|at| files[at].clone()).collect::<Vec<PathBuf>>())
    });
    let frame = Frame::of(sources.iter().flat_map(|(_, files)| files));
    let mut prompts = Vec::new();
    for (source, files) in &sources {
        let mut places = HashMap::new();
        for path in files {
            if let Some(note) = read_file(path, *source, &frame, (&mut places, &mut prompts)) {
                notes.push(note);
            }
        }
    }
    (prompts, frame)
}

/// Returns the lines of a file of samples, and whether the file has more than is read.
///
/// # Errors
/// If it cannot be opened.
fn read_lines(path: &Path) -> Result<(impl Iterator<Item = Vec<u8>> + use<>, bool)> {
    let file = files::open_own(path)?;
    let is_cut = file.metadata().is_ok_and(|metadata| metadata.len() > MOST_BYTES);
    Ok((BufReader::new(file.take(MOST_BYTES)).split(b'\n').map_while(std::io::Result::ok), is_cut))
}

/// Returns the prompt in a line of a file of samples.
fn parse_prompt(line: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Row {
        prompt: String,
    }
    serde_json::from_slice::<Row>(line).ok().map(|row| row.prompt)
}

/// Returns the files of a source in the order of their updates.
fn source_files(dir: &Path, start: &str) -> Vec<PathBuf> {
    // A link could name any folder.
    let is_folder = dir.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
    let entries = is_folder.then(|| std::fs::read_dir(dir)).into_iter().flatten().flatten().flatten();
    let mut files: Vec<(usize, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let is_whole = name.starts_with(start) && name.ends_with(".jsonl");
            Some((samples_update(&name).filter(|_| is_whole)?, entry.path()))
        })
        .collect();
    files.sort_unstable();
    files.into_iter().map(|(_, path)| path).collect()
}

/// Returns at most `most` of the places `0..len`, evenly spread, with the first and the last.
pub fn spread(len: usize, most: usize) -> Vec<usize> {
    match (len, most) {
        (len, most) if len <= most => (0..len).collect(),
        (len, 0 | 1) => (len - 1..len).collect(),
        (len, most) => (0..most).map(|at| at * (len - 1) / (most - 1)).collect(),
    }
}

/// Places of the prompts of one source, by the text and the number of earlier prompts with the same text in the file.
type Places = HashMap<(Cut, usize), usize>;

/// Adds the responses in a file to their prompts. Returns a note on lines that are left out.
fn read_file(
    path: &Path,
    source: Source,
    frame: &Frame,
    (places, prompts): (&mut Places, &mut Vec<Prompt>),
) -> Option<String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (lines, is_cut) = match read_lines(path) {
        Ok(lines) => lines,
        Err(error) => return Some(error.to_string()),
    };
    let mut repeats = HashMap::new();
    let mut left_out = 0;
    let mut lines = lines.peekable();
    while let Some(line) = lines.next() {
        let Some((text, response)) = response(&line, frame) else {
            // The line at the limit has lost its end.
            if is_cut && lines.peek().is_none() {
                break;
            }
            left_out += usize::from(!line.is_empty());
            continue;
        };
        let repeat: &mut usize = repeats.entry(text.clone()).or_default();
        let place = *places.entry((text.clone(), *repeat)).or_insert_with(|| {
            prompts.push(Prompt { source, text, responses: Vec::new() });
            prompts.len() - 1
        });
        *repeat += 1;
        prompts[place].responses.push(response);
    }
    let cut = is_cut.then(|| format!("its first {} MiB are read", MOST_BYTES >> 20));
    let unread = (left_out > 0).then(|| format!("{left_out} lines could not be read"));
    let notes: Vec<String> = cut.into_iter().chain(unread).collect();
    (!notes.is_empty()).then(|| format!("{SAMPLES}/{name}: {}", notes.join("; ")))
}

/// Parses a line of a file of samples: the prompt without its frame, and the response.
fn response(line: &[u8], frame: &Frame) -> Option<(Cut, Response)> {
    let row: Value = serde_json::from_slice(line).ok()?;
    let (prompt, text) = (row["prompt"].as_str()?, row["response"].as_str()?);
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let rewards = row["components"].as_object().into_iter().flatten();
    let tokens = row["tokens"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let logprobs = row["logprobs"].as_array().into_iter().flatten().filter_map(Value::as_f64);
    let mut tokens: Vec<(&str, f64)> = tokens.zip(logprobs.map(f64::exp)).collect();
    // Shaded tokens are shown in place of the text, so they must be the whole text.
    let joined: String = tokens.iter().map(|(token, _)| *token).collect();
    let is_whole = joined == text || joined == text.replace("\r\n", "\n");
    let turns = Turns::of(&row, if is_whole { &tokens } else { &[] });
    let text = Cut::new(text);
    if !is_whole || turns.is_some() || text.left_out > 0 || tokens.len() > MOST_TOKENS {
        tokens.clear();
    }
    let response = Response {
        step: row["step"].as_u64()?,
        score: number(&row["score"]),
        rewards: rewards.map(|(name, score)| (name.clone(), number(score))).collect(),
        finish: row["finish_reason"].as_str().map(String::from),
        num_tokens: row["num_tokens"].as_u64(),
        tokens: tokens.into_iter().map(|(token, probability)| (token.into(), probability)).collect(),
        turns,
        text,
    };
    Some((Cut::new(frame.strip(prompt)), response))
}

/// Lists of prompts to look at first, by their places.
#[derive(Debug, Default, PartialEq)]
pub struct Highlights {
    pub worst: Vec<usize>,
    pub best: Vec<usize>,
    /// By the size of the change of the score, up or down.
    pub changed: Vec<usize>,
}

impl Highlights {
    /// Returns the first `most` of each list.
    pub fn of(prompts: &[Prompt], most: usize) -> Self {
        let ranked = |key: &dyn Fn(&Prompt) -> Option<f64>| -> Vec<usize> {
            let mut ranked: Vec<(f64, usize)> =
                prompts.iter().enumerate().filter_map(|(at, prompt)| Some((key(prompt)?, at))).collect();
            ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
            ranked.into_iter().take(most).map(|(_, at)| at).collect()
        };
        let score = |prompt: &Prompt| Some(prompt.last()).filter(|score| !score.is_nan());
        Self {
            worst: ranked(&score),
            best: ranked(&|prompt| score(prompt).map(|score| -score)),
            changed: ranked(&|prompt| prompt.change().filter(|change| *change != 0.0).map(|change| -change.abs())),
        }
    }

    /// Returns the places of all `len` prompts: first the listed ones, in the order of their ranks in the lists.
    pub fn first(&self, len: usize) -> Vec<usize> {
        let lists = [&self.changed, &self.worst, &self.best];
        let longest = lists.iter().map(|list| list.len()).max().unwrap_or(0);
        let listed = (0..longest).flat_map(|at| lists.into_iter().filter_map(move |list| list.get(at).copied()));
        let mut is_listed = vec![false; len];
        listed.chain(0..len).filter(|&at| !std::mem::replace(&mut is_listed[at], true)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn prompt(scores: &[f64]) -> Prompt {
        let cut = Cut::new("x");
        let response = |(step, &score): (u64, &f64)| Response {
            step,
            text: cut.clone(),
            score,
            rewards: Vec::new(),
            finish: None,
            num_tokens: None,
            tokens: Vec::new(),
            turns: None,
        };
        Prompt { source: Source::Samples, text: cut.clone(), responses: (0..).zip(scores).map(response).collect() }
    }

    #[test]
    fn the_same_prompt_is_followed_over_the_files_and_each_of_two_equal_ones_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let samples = dir.path().join(SAMPLES);
        fs::create_dir(&samples).unwrap();
        let row = |step: u64, prompt: &str, score: f64| {
            json!({"step": step, "prompt": prompt, "response": "a\r\nb", "score": score, "components": {"r": score},
                   "finish_reason": "stop", "num_tokens": 2, "tokens": ["a\n", "b"], "logprobs": [0.0, -1.0]})
        };
        for step in [0, 10] {
            let rows = ["x", "y", "x"].map(|prompt| format!("{}\n", row(step, prompt, step as f64))).concat();
            fs::write(samples.join(format!("update-{step:06}.jsonl")), rows).unwrap();
        }
        fs::write(samples.join("eval-000010.jsonl"), format!("{}\n{{\"step\":1", row(10, "x", f64::NAN))).unwrap();
        fs::write(samples.join("update-000003.jsonl.tmp"), "half").unwrap();
        let mut notes = Vec::new();
        let (prompts, frame) = read(dir.path(), &mut notes);
        assert!(frame.is_empty());
        let found: Vec<_> = prompts.iter().map(|p| (p.source, p.text.text.as_str(), p.responses.len())).collect();
        let samples = Source::Samples;
        assert_eq!(found, [(samples, "x", 2), (samples, "y", 2), (samples, "x", 2), (Source::HeldOut, "x", 1)]);
        assert_eq!(notes, ["samples/eval-000010.jsonl: 1 lines could not be read"]);
        let last = &prompts[0].responses[1];
        assert_eq!((last.step, last.score, last.text.text.as_str()), (10, 10.0, "a\nb"));
        assert_eq!(last.tokens, [("a\n".to_string(), 1.0), ("b".to_string(), (-1f64).exp())]);
        assert_eq!(prompts[0].change(), Some(10.0));
        assert!(prompts[3].last().is_nan() && prompts[3].change().is_none());
    }

    #[test]
    fn the_chat_template_around_all_prompts_is_kept_once_and_ends_at_a_turn() {
        let dir = tempfile::tempdir().unwrap();
        let frame_and_texts = |prompts: &[&str]| {
            let samples = dir.path().join(SAMPLES);
            fs::create_dir_all(&samples).unwrap();
            let row =
                |prompt: &&str| format!("{}\n", json!({"step": 1, "prompt": prompt, "response": "r", "score": 0}));
            fs::write(samples.join("update-000001.jsonl"), prompts.iter().map(row).collect::<String>()).unwrap();
            let (prompts, frame) = read(dir.path(), &mut Vec::new());
            let texts: Vec<String> = prompts.into_iter().map(|prompt| prompt.text.text).collect();
            (frame.before, frame.after, texts)
        };
        let long = format!("<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n", "Be kind. ".repeat(300));
        let (user, end) = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n");
        for (before, after) in [
            (user, end),
            (long.as_str(), end),
            ("<s>[INST] Be brief.\n\n", " [/INST]"),
            ("A chat of two. USER: ", " ASSISTANT:"),
            ("Translate into German, please:\n", ""),
        ] {
            let [cat, dog, one] =
                ["What is a cat?", "What is a dog?", "W"].map(|said| format!("{before}{said}{after}"));
            let (start, rest, texts) = frame_and_texts(&[&cat, &dog, &one, &cat]);
            // The frame includes the mark that begins the end of a turn, and not a blank before the mark.
            assert!(start == before && rest.trim() == after.trim() && after.ends_with(&rest), "{start:?} {rest:?}");
            assert!(texts[0].trim_end() == "What is a cat?" && texts[1].trim_end() == "What is a dog?", "{texts:?}");
        }
        // Some have a system prompt: what follows a mark that begins a turn differs.
        let system = format!("<|im_start|>system\nBe kind.<|im_end|>\n{user}Who?{end}");
        let (before, after, texts) = frame_and_texts(&[&system, &format!("{user}Where?{end}")]);
        assert_eq!((before.as_str(), after.as_str()), ("", end));
        assert!(texts[1].starts_with("<|im_start|>user"), "{texts:?}");
        // Text that prompts share by chance, or that is the whole prompt, is no frame.
        for prompts in
            [&["What is the capital of France", "What is the capital of Spain"][..], &["<|im_start|>user\nHello?"; 2]]
        {
            let (before, after, texts) = frame_and_texts(prompts);
            assert!(before.is_empty() && after.is_empty() && texts[0] == prompts[0], "{before:?} {after:?}");
        }
    }

    #[test]
    fn a_file_that_is_read_in_part_is_named_as_that() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("answers-000001.jsonl");
        let row = format!("{}\n", json!({"step": 1, "prompt": "x", "response": "a".repeat(1 << 20), "score": 1.0}));
        fs::write(&path, row.repeat(17)).unwrap();
        let mut prompts = Vec::new();
        let note = read_file(&path, Source::Rollout, &Frame::default(), (&mut HashMap::new(), &mut prompts));
        assert_eq!(note.as_deref(), Some("samples/answers-000001.jsonl: its first 16 MiB are read"));
        assert_eq!(prompts.len(), 15);
    }

    #[test]
    fn files_are_spread_over_the_run() {
        assert_eq!(spread(3, 5), [0, 1, 2]);
        assert_eq!(spread(1000, 5), [0, 249, 499, 749, 999]);
        assert_eq!((spread(0, 5), spread(7, 1)), (vec![], vec![6]));
    }

    #[test]
    fn the_worst_the_best_and_the_most_changed_come_first() {
        let prompts = [prompt(&[0.0, 1.0]), prompt(&[0.0, f64::NAN]), prompt(&[5.0, -3.0]), prompt(&[2.0])];
        let highlights = Highlights::of(&prompts, 2);
        assert_eq!(highlights, Highlights { worst: vec![2, 0], best: vec![3, 0], changed: vec![2, 0] });
        assert_eq!(highlights.first(4), [2, 3, 0, 1]);
    }
}
