//! `rlhf chat`: a conversation with one model or two, in the terminal or through a pipe.

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rlhf::generate::{FinishReason, GenerationConfig, Token, generate_with};
use rlhf::hub;
use rlhf::model::CausalLm;
use rlhf::safe_text::{lines, one_line};
use rlhf::settings::{ChatConfig, GenerateConfig};
use rlhf::terminal::{Colour, Stream};
use rlhf::tokenizer::Tokenizer;
use rlhf::{Error, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Map, Value, json};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

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
    let mut chat = Chat::load(config)?;
    let mut input = Input::open()?;
    chat.greet()?;
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
    Ok(())
}

/// Lines that the user types, or those of a pipe.
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

fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
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
    /// Number of messages so far, those before a reset included: each has its own draws.
    turn: u64,
    interactive: bool,
    /// Set by Ctrl-C.
    stop: Arc<AtomicBool>,
}

impl Chat {
    fn load(config: &ChatConfig) -> Result<Self> {
        let options = config.compute.options()?;
        let interactive = is_interactive();
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
        let stop = Arc::new(AtomicBool::new(false));
        if interactive {
            // A second signal during one response ends the process. Between responses, Ctrl-C is a key of the line editor.
            let registered = flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(&stop));
            let _ = registered.and_then(|_| flag::register(SIGINT, Arc::clone(&stop)));
        }
        Ok(Self { config: config.clone(), speakers, turn: 0, interactive, stop })
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
            self.hint(&format!("{}: /help lists the commands, Ctrl-D quits", one_line(&names.join(" and "))));
        }
        Ok(())
    }

    /// Prints a line about the conversation, on a terminal.
    fn hint(&self, text: &str) {
        if self.interactive {
            let _ = writeln!(io::stdout(), "{}", Stream::Out.paint(Colour::Dim, text));
        }
    }

    /// Carries out a line: a command, or a message to all models. Returns whether the conversation continues.
    fn take(&mut self, line: &str) -> Result<ControlFlow<()>> {
        let line = line.trim();
        if line.is_empty() {
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
                self.hint("a new conversation");
            }
            "system" => {
                check_system(&self.speakers, "/system")?;
                self.config.system = (!rest.is_empty()).then(|| rest.to_string());
                self.hint(if rest.is_empty() { "no system message" } else { "a new system message, from now on" });
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
                self.hint(&format!("temperature {temperature}"));
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
        let terminal = io::stdout().is_terminal();
        let several = self.speakers.len() > 1;
        let turn = self.turn;
        // Before any response: a message that one of the models cannot take is in no history.
        let prepare = |speaker: &Speaker| -> Result<_> {
            let prompt = speaker.prompt(self.config.system.as_deref(), message)?;
            let generation = speaker.generation(&self.config, prompt.len(), turn)?;
            Ok((prompt, generation))
        };
        let prepared = self.speakers.iter().map(prepare).collect::<Result<Vec<_>>>()?;
        self.turn += 1;
        for (speaker, (prompt, generation)) in self.speakers.iter_mut().zip(prepared) {
            self.stop.store(false, Ordering::SeqCst);
            let mut out = io::stdout();
            let mut show = |text: &str| {
                let written = if terminal { write!(out, "{}", lines(text)) } else { write!(out, "{text}") };
                written.and_then(|()| out.flush()).map_err(Error::io("write to", "standard output"))
            };
            if several {
                let label = format!("[{}]", one_line(&speaker.label));
                show_plain(&Stream::Out.paint(Colour::Bold, &label))?;
                show(" ")?;
            }
            let (text, finish) = speaker.respond(&prompt, &generation, &self.stop, &mut show)?;
            show("\n")?;
            speaker.turns.push((message.to_string(), text));
            if self.interactive && finish == Some(FinishReason::Length) {
                let most = generation.max_new_tokens;
                let note = format!("(cut at {most} tokens; --max_new_tokens sets the maximum)");
                show_plain(&format!("{}\n", Stream::Out.paint(Colour::Dim, &note)))?;
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

fn show_plain(text: &str) -> Result<()> {
    write!(io::stdout(), "{text}").map_err(Error::io("write to", "standard output"))
}

/// A model with its part of the conversation.
struct Speaker {
    /// The folder or hub name that the user gave.
    path: PathBuf,
    label: String,
    dir: PathBuf,
    model: CausalLm,
    tokenizer: Tokenizer,
    /// Messages, each with its response.
    turns: Vec<(String, String)>,
}

impl Speaker {
    /// Returns the tokens of the conversation up to `message`: by the chat template, else as one text.
    fn prompt(&self, system: Option<&str>, message: &str) -> Result<Vec<i64>> {
        if !self.tokenizer.has_chat_template() {
            let before: String =
                self.turns.iter().map(|(message, response)| format!("{message}{response}\n")).collect();
            return self.tokenizer.encode_prompt(&(before + message));
        }
        let mut messages: Vec<Value> = system.map(|text| said("system", text)).into_iter().collect();
        for (message, response) in &self.turns {
            messages.extend([said("user", message), said("assistant", response)]);
        }
        messages.push(said("user", message));
        Ok(self.tokenizer.encode_chat(&messages, true, &Map::new())?.1)
    }

    /// Returns a note if fields of the model's `generation_config.json` would change responses in transformers and not here.
    fn note(&self, config: &ChatConfig) -> Result<Option<String>> {
        let settings = GenerateConfig { model_name_or_path: self.path.clone(), ..config.generate() };
        settings.note_for_model(self.model.config(), &self.dir)
    }

    /// Returns the settings of the response to a prompt of `len` tokens.
    fn generation(&self, config: &ChatConfig, len: usize, turn: u64) -> Result<GenerationConfig> {
        let context = self.model.config().max_position_embeddings;
        let remaining = self.model.config().max_new_tokens(len);
        if remaining == 0 && self.turns.is_empty() {
            let label = &self.label;
            return Err(Error::Run(format!(
                "the message has {len} tokens with all that is before it, and the context of {label} is {context}, response included: \
                 send a shorter one"
            )));
        }
        if remaining == 0 {
            return Err(Error::Run(format!(
                "the conversation has {len} tokens, and the context of {} is {context}: /reset starts a new one",
                self.label
            )));
        }
        let mut settings = config.generate();
        settings.responses.max_new_tokens = Some(config.max_new_tokens.min(remaining));
        let (generation, _) = settings.for_model(&self.model, &self.tokenizer, &self.dir)?;
        Ok(GenerationConfig { step: turn, ..generation })
    }

    /// Generates the response to `prompt`, and passes its text to `show` as it is generated, until `stop` is set. Returns the text, and
    /// the reason that it ended.
    fn respond(
        &self,
        prompt: &[i64],
        generation: &GenerationConfig,
        stop: &AtomicBool,
        show: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<(String, Option<FinishReason>)> {
        let mut stream = self.tokenizer.stream(prompt);
        let (mut text, mut finish) = (String::new(), None);
        let mut shown: Result<()> = Ok(());
        let each = |token: &Token| {
            let mut part = || -> Result<String> {
                let mut part = stream.push(token.id)?;
                if token.finish.is_some() {
                    part += &stream.finish()?;
                }
                show(&part)?;
                Ok(part)
            };
            finish = token.finish;
            match part() {
                Ok(part) => text += &part,
                Err(error) => shown = Err(error),
            }
            if shown.is_err() || stop.load(Ordering::SeqCst) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        generate_with(&self.model, &[prompt], generation, each)?;
        shown?;
        Ok((text, finish))
    }
}

fn said(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

/// Returns the names of the models: those of their folders, or their paths where these are equal.
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
        let of = |a: &str, b: &str| labels(Path::new(a), Some(Path::new(b)));
        assert_eq!(of("runs/ppo", "runs/sft"), ["ppo", "sft"]);
        assert_eq!(of("a/ppo", "b/ppo"), ["a/ppo", "b/ppo"]);
        assert_eq!(labels(Path::new("runs/ppo"), None)[0], "ppo");
    }

    #[test]
    fn lines_of_a_pipe_have_a_bound() {
        let mut input = io::Cursor::new(b"one\r\n\ntwo".to_vec());
        let mut found = Vec::new();
        while let Some(line) = next_line(&mut input).unwrap() {
            found.push(line);
        }
        assert_eq!(found, ["one", "", "two"]);
        let error = next_line(&mut io::BufReader::new(io::repeat(b'a'))).unwrap_err();
        assert!(error.to_string().contains("at most 1 MiB"), "{error}");
        let error = next_line(&mut io::Cursor::new(b"\xff\n".to_vec())).unwrap_err();
        assert!(error.to_string().contains("UTF-8"), "{error}");
    }
}
