//! `rlhf chat`: a conversation with one model or two, in the terminal or through a pipe.

mod output;
mod speaker;
mod tools;

use std::io::{self, BufRead, Read, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use output::{hint, hint_at_cut, is_interactive, show, show_label};
use rlhf::generate::{FinishReason, GenerationConfig};
use rlhf::hub;
use rlhf::model::CausalLm;
use rlhf::safe_text::one_line;
use rlhf::settings::ChatConfig;
use rlhf::signals::{end_process, stopping_signals};
use rlhf::terminal::{Colour, Stream};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use speaker::Speaker;
use tools::Tools;

/// Longest line of a pipe, in bytes.
const LONGEST_LINE: u64 = 1 << 20;

const HELP: &str = "\
/reset            start a new conversation
/system TEXT      set the system message; without TEXT remove it
/temperature X    set the temperature; 0 is greedy decoding
/help             show this list
/quit             quit, as Ctrl-D does
//TEXT            send a message that starts with a slash
Ctrl-C stops a response.";

/// Talks to the models.
pub(crate) fn chat(config: &ChatConfig) -> Result<()> {
    config.check()?;
    // Until the first response, Ctrl-C ends the chat.
    let stop = Arc::new(AtomicBool::new(true));
    end_on_signals(Arc::clone(&stop)).map_err(Error::io("install", "a handler of signals"))?;
    // Before the models, which take time.
    let environment = tools::start(config)?;
    let mut chat = Chat::load(config, stop)?;
    let mut input = Input::open()?;
    chat.greet()?;
    chat.tools = environment.map(|environment| Tools::new(config, environment, &chat.speakers)).transpose()?;
    while let Some(line) = input.next()? {
        match chat.take(&line) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => break,
            // The reader of the output is gone.
            Err(error @ Error::Io { .. }) => return Err(error),
            Err(error) if chat.interactive => {
                let message = error.to_string();
                let _ = writeln!(io::stderr(), "{}", Stream::Err.labelled("error", Colour::Red, &one_line(&message)));
            }
            Err(error) => return Err(error),
        }
    }
    chat.tools.as_mut().map_or(Ok(()), Tools::finish)
}

/// Installs a handler: a signal ends the process and the programs of tools at once. In a terminal the first Ctrl-C during a response sets
/// `stop` instead; between responses, Ctrl-C is a key of the line editor.
fn end_on_signals(stop: Arc<AtomicBool>) -> io::Result<()> {
    let interactive = is_interactive();
    let mut signals = Signals::new(stopping_signals())?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if signal != SIGINT || !interactive || stop.swap(true, Ordering::SeqCst) {
                end_process(128 + signal);
            }
        }
    })?;
    Ok(())
}

/// Lines that the user types, or lines of a pipe.
enum Input {
    Typed(Box<DefaultEditor>),
    Piped(io::Stdin),
}

impl Input {
    fn open() -> Result<Self> {
        if !is_interactive() {
            return Ok(Self::Piped(io::stdin()));
        }
        Ok(Self::Typed(Box::new(DefaultEditor::new().map_err(terminal_error)?)))
    }

    /// Returns the next line; `None` at the end of the input, or on Ctrl-C.
    fn next(&mut self) -> Result<Option<String>> {
        match self {
            Self::Piped(input) => next_line(&mut input.lock()),
            Self::Typed(editor) => match editor.readline("> ") {
                Ok(line) => {
                    // In memory only.
                    let _ = editor.add_history_entry(&line);
                    Ok(Some(line))
                }
                Err(ReadlineError::Interrupted | ReadlineError::Eof) => Ok(None),
                Err(error) => Err(terminal_error(error)),
            },
        }
    }
}

fn terminal_error(error: ReadlineError) -> Error {
    match error {
        ReadlineError::Io(source) => Error::io("read from", "the terminal")(source),
        other => Error::Run(format!("the terminal: {other}")),
    }
}

/// Reads a line, without its end.
fn next_line(input: &mut impl BufRead) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    input.take(LONGEST_LINE + 1).read_until(b'\n', &mut bytes).map_err(Error::io("read", "standard input"))?;
    if bytes.is_empty() {
        return Ok(None);
    }
    if bytes.len() as u64 > LONGEST_LINE {
        return Err(Error::invalid("standard input", "expected lines of at most 1 MiB, one per message"));
    }
    let line =
        String::from_utf8(bytes).map_err(|_| Error::invalid("standard input", "expected UTF-8, found other bytes"))?;
    Ok(Some(line.trim_end_matches(['\n', '\r']).to_string()))
}

/// A conversation.
struct Chat {
    /// Settings of the responses; commands change them.
    config: ChatConfig,
    speakers: Vec<Speaker>,
    tools: Option<Tools>,
    /// Number of messages so far, those before a reset included: each has its own draws.
    turn: u64,
    interactive: bool,
    /// Set by Ctrl-C, and until the first response.
    stop: Arc<AtomicBool>,
}

impl Chat {
    fn load(config: &ChatConfig, stop: Arc<AtomicBool>) -> Result<Self> {
        let options = config.compute.options()?;
        let paths = [Some(&config.model), config.compare.as_ref()];
        let labels = labels(&config.model, config.compare.as_deref());
        let mut speakers = Vec::new();
        for (path, label) in paths.into_iter().flatten().zip(labels) {
            // The revision is that of the first model.
            let revision = (path == &config.model).then_some(config.model_revision.as_str());
            let dir = hub::model_dir(path, revision)?;
            let mut tokenizer = Tokenizer::from_pretrained(&dir)?;
            tokenizer.set_chat_variables(config.chat_template.variables());
            let model = CausalLm::from_pretrained(&dir, options)?;
            tokenizer.check_fits(model.config(), &dir)?;
            speakers.push(Speaker { path: path.clone(), label, dir, model, tokenizer, turns: Vec::new() });
        }
        if config.system.is_some() {
            check_system(&speakers, "system")?;
        }
        Ok(Self { config: config.clone(), speakers, tools: None, turn: 0, interactive: is_interactive(), stop })
    }

    /// Prints notes about the models, and the help of the terminal.
    fn greet(&self) -> Result<()> {
        for speaker in &self.speakers {
            if let Some(note) = speaker.note(&self.config)? {
                let _ = writeln!(io::stderr(), "note: {}", one_line(&note));
            }
        }
        for speaker in self.speakers.iter().filter(|speaker| !speaker.tokenizer.has_chat_template()) {
            let note = if speaker.tokenizer.is_of_encoder_decoder() {
                "reads the conversation as one text, without a chat template"
            } else {
                "has no chat template: it continues the text of the conversation"
            };
            let _ = writeln!(io::stderr(), "note: {} {note}", one_line(&speaker.label));
        }
        if self.interactive {
            let names: Vec<&str> = self.speakers.iter().map(|speaker| speaker.label.as_str()).collect();
            hint(&format!("{}: /help lists the commands, Ctrl-D quits", one_line(&names.join(" and "))));
        }
        Ok(())
    }

    /// Carries out a line: a command, or a message to all models. Returns whether the conversation continues.
    fn take(&mut self, line: &str) -> Result<ControlFlow<()>> {
        let line = line.trim();
        if line.is_empty() && !self.tools.as_ref().is_some_and(Tools::waits_for_begin) {
            return Ok(ControlFlow::Continue(()));
        }
        match line.strip_prefix('/') {
            None => self.send(line)?,
            Some(message) if message.starts_with('/') => self.send(message)?,
            Some(command) => return self.command(command),
        }
        Ok(ControlFlow::Continue(()))
    }

    fn command(&mut self, command: &str) -> Result<ControlFlow<()>> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "quit" | "exit" => return Ok(ControlFlow::Break(())),
            "reset" => {
                self.speakers.iter_mut().for_each(|speaker| speaker.turns.clear());
                // The reward belongs to the conversation before.
                let finished = self.tools.as_mut().map_or(Ok(()), Tools::finish);
                hint("a new conversation");
                self.tools.as_mut().map_or(Ok(()), Tools::open)?;
                finished?;
            }
            "system" => {
                check_system(&self.speakers, "/system")?;
                self.config.system = (!rest.is_empty()).then(|| rest.to_string());
                hint(if rest.is_empty() { "no system message" } else { "a new system message, from now on" });
            }
            "temperature" => {
                let temperature = rest.parse::<f64>().ok().filter(|temperature| temperature.is_finite());
                let Some(temperature) = temperature else {
                    return Err(Error::Usage(format!("/temperature {rest}: expected a number, such as 0.7")));
                };
                let mut config = self.config.clone();
                config.sampler.temperature = Some(temperature);
                config.check()?;
                self.config = config;
                hint(&format!("temperature {temperature}"));
            }
            "help" => {
                let mut out = io::stdout();
                writeln!(out, "{HELP}").map_err(Error::io("write to", "standard output"))?;
            }
            _ => {
                return Err(Error::Usage(format!("/{name}: expected a command, found another word; /help lists them")));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Sends a message to all models, and prints their responses.
    fn send(&mut self, message: &str) -> Result<()> {
        let step = self.turn;
        if let Some(tools) = &mut self.tools {
            let open = tools.open_talks()?;
            for &at in &open {
                tools.check(at, &self.speakers[at], &self.config, message)?;
            }
            self.turn += 1;
            // An error of one model has no effect on the others.
            let mut responded = Ok(());
            for at in open {
                let speaker = &self.speakers[at];
                self.stop.store(false, Ordering::SeqCst);
                if self.speakers.len() > 1 {
                    show_label(&one_line(&speaker.label))?;
                }
                responded = responded.and(tools.respond(at, speaker, &self.config, (message, step), &self.stop));
            }
            return responded;
        }
        // Before any response: a message that one of the models cannot take is in no history.
        let prepare = |speaker: &Speaker| -> Result<_> {
            let prompt = speaker.prompt(self.config.system.as_deref(), message)?;
            let generation = speaker.generation(&self.config, prompt.len(), speaker.turns.is_empty())?;
            Ok((prompt, GenerationConfig { step, ..generation }))
        };
        let prepared = self.speakers.iter().map(prepare).collect::<Result<Vec<_>>>()?;
        self.turn += 1;
        let several = self.speakers.len() > 1;
        for (speaker, (prompt, generation)) in self.speakers.iter_mut().zip(prepared) {
            self.stop.store(false, Ordering::SeqCst);
            if several {
                show_label(&one_line(&speaker.label))?;
            }
            let (text, finish) = speaker.respond(&prompt, &generation, &self.stop)?;
            show("\n")?;
            speaker.turns.push((message.to_string(), text));
            if finish == Some(FinishReason::Length) {
                hint_at_cut(generation.max_new_tokens);
            }
        }
        Ok(())
    }
}

/// Checks that a system message, which `name` sets, has an effect on one of the models.
fn check_system(speakers: &[Speaker], name: &str) -> Result<()> {
    if speakers.iter().any(|speaker| speaker.tokenizer.has_chat_template()) {
        return Ok(());
    }
    Err(Error::Usage(format!("{name} has no effect: it needs a model with a chat template")))
}

/// Returns the labels of the models: the names of their folders, or their paths if the names are equal.
fn labels(model: &Path, compare: Option<&Path>) -> [String; 2] {
    let name =
        |path: &Path| path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into());
    let paths = [model, compare.unwrap_or(Path::new(""))];
    let names = paths.map(name);
    if names[0] == names[1] { paths.map(|path| path.display().to_string()) } else { names }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_labelled_by_their_folders() {
        let model_labels = |a: &str, b: &str| labels(Path::new(a), Some(Path::new(b)));
        assert_eq!(model_labels("runs/ppo", "runs/sft"), ["ppo", "sft"]);
        assert_eq!(model_labels("a/ppo", "b/ppo"), ["a/ppo", "b/ppo"]);
        assert_eq!(labels(Path::new("runs/ppo"), None)[0], "ppo");
    }

    #[test]
    fn lines_of_a_pipe_have_a_bound() {
        let mut input = io::Cursor::new(b"one\r\n\ntwo".to_vec());
        let mut lines = Vec::new();
        while let Some(line) = next_line(&mut input).unwrap() {
            lines.push(line);
        }
        assert_eq!(lines, ["one", "", "two"]);
        let error = next_line(&mut io::BufReader::new(io::repeat(b'a'))).unwrap_err();
        assert!(error.to_string().contains("at most 1 MiB"), "{error}");
        let error = next_line(&mut io::Cursor::new(b"\xff\n".to_vec())).unwrap_err();
        assert!(error.to_string().contains("UTF-8"), "{error}");
    }
}
