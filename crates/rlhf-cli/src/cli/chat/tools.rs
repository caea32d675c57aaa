//! Tools and environments in a conversation: each model has a session of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rlhf::environment::{
    Called, Environment, EnvironmentConfig, Event, Log, Opened, Outcome, Results, Sessions, ToolCall, ToolResult,
    session_seed,
};
use rlhf::generate::{FinishReason, GenerationConfig, Token};
use rlhf::run::turns::{Kind, parts};
use rlhf::safe_text::one_line;
use rlhf::schema::JsonObject;
use rlhf::settings::ChatConfig;
use rlhf::tokenizer::{ToolTemplate, Turn};
use rlhf::{Error, Result};
use serde_json::{Map, Value};

use super::output::{hint, hint_at_cut, show, show_label, show_line, show_part};
use super::speaker::{Speaker, said};

/// Interval at which Ctrl-C is noticed during a call.
const WAIT: Duration = Duration::from_millis(100);

/// Returns the tools and environments that the settings name, started; none if they name none.
pub(super) fn start(config: &ChatConfig) -> Result<Option<Arc<dyn Environment>>> {
    let environment = config.environment.0.environment(&Log::standard_error())?;
    if let Some(environment) = &environment {
        environment.start()?;
    }
    Ok(environment)
}

/// Returns new sessions. A session that fails is an event, and the others go on; the reward of a failed session is not shown.
fn new_sessions(environment: &Arc<dyn Environment>, number: usize) -> Result<Sessions> {
    Sessions::new(environment.clone(), number, Some(0.0))
}

/// The conversations of all models with tools.
pub(super) struct Tools {
    config: EnvironmentConfig,
    environment: Arc<dyn Environment>,
    /// Columns that the environment begins with.
    row: Map<String, Value>,
    seed: u64,
    /// Number of conversations so far.
    conversations: u64,
    sessions: Sessions,
    /// One for each model.
    talks: Vec<Talk>,
}

/// The conversation of a model.
struct Talk {
    label: String,
    template: ToolTemplate,
    opened: Opened,
    messages: Vec<Value>,
    /// Whether its session is open.
    is_open: bool,
}

/// A turn that has been sampled.
struct Sampled {
    tokens: Vec<i64>,
    turn: Turn,
    /// Whether the turn was stopped, or has the maximum number of tokens: its calls are text.
    is_cut: bool,
}

impl Tools {
    /// Opens the first conversation of `speakers`.
    ///
    /// # Errors
    /// If a chat template cannot be used with tools; if the environment cannot begin.
    pub(super) fn new(config: &ChatConfig, environment: Arc<dyn Environment>, speakers: &[Speaker]) -> Result<Self> {
        let talk = |speaker: &Speaker| {
            let label = one_line(&speaker.label).into_owned();
            let template = ToolTemplate::new(&speaker.tokenizer)?;
            Ok(Talk { label, template, opened: Opened::default(), messages: Vec::new(), is_open: false })
        };
        let talks = speakers.iter().map(talk).collect::<Result<Vec<_>>>()?;
        let sessions = new_sessions(&environment, talks.len())?;
        let row = JsonObject::to_map(config.environment_row.as_ref());
        let settings = config.environment.0.clone();
        let mut tools =
            Self { config: settings, environment, row, seed: config.seed, conversations: 0, sessions, talks };
        tools.open()?;
        Ok(tools)
    }

    /// Opens the sessions of a conversation, after the end of the last one. The sessions of all models begin alike.
    ///
    /// # Errors
    /// If one of them cannot begin: then none does.
    pub(super) fn open(&mut self) -> Result<()> {
        let seed = session_seed(self.seed, self.conversations, 0);
        self.conversations += 1;
        for (at, talk) in self.talks.iter_mut().enumerate() {
            talk.messages.clear();
            self.sessions.open(at, &format!("the conversation of {}", talk.label), self.row.clone(), seed)?;
        }
        while self.talks.iter().any(|talk| !talk.is_open) {
            let events = self.events();
            if events.is_err() {
                self.close();
            }
            for Event { row, outcome } in events? {
                if let Outcome::Opened(opened) = outcome {
                    self.talks[row].opened = opened;
                    self.talks[row].is_open = true;
                }
            }
            if self.sessions.is_blocked() {
                self.close();
                return Err(Error::Run(
                    "--compare: the environment has no session for the second model: expected one for each".into(),
                ));
            }
        }
        let several = self.talks.windows(2).any(|talks| talks[0].opened.prompt != talks[1].opened.prompt);
        for talk in &self.talks[..if several { self.talks.len() } else { 1 }] {
            if let Some(prompt) = &talk.opened.prompt {
                if several {
                    show_label(&talk.label)?;
                }
                show(&format!("{prompt}\n"))?;
            }
        }
        Ok(())
    }

    /// Waits for the next steps of the sessions.
    ///
    /// # Errors
    /// If an environment is dead: the session of its model has then ended.
    fn events(&mut self) -> Result<Vec<Event>> {
        let events = self.sessions.poll(WAIT)?;
        for Event { row, outcome } in &events {
            if let Outcome::Failed { message, .. } = outcome {
                self.talks[*row].is_open = false;
                return Err(Error::Run(message.clone()));
            }
        }
        Ok(events)
    }

    /// Abandons all sessions.
    fn close(&mut self) {
        self.talks.iter_mut().for_each(|talk| talk.is_open = false);
        // Without a thread, sessions stay as they are until the process ends.
        if let Ok(sessions) = new_sessions(&self.environment, self.talks.len()) {
            self.sessions = sessions;
        }
    }

    /// Ends the conversations, and shows the rewards of those that had a message.
    pub(super) fn finish(&mut self) -> Result<()> {
        let mut ended = Ok(());
        for at in 0..self.talks.len() {
            if self.talks[at].is_open && self.talks[at].messages.is_empty() {
                self.talks[at].is_open = false;
                ended = ended.and(self.sessions.abandon(at));
            } else if self.talks[at].is_open {
                ended = ended.and(self.finish_one(at));
            }
        }
        ended
    }

    fn finish_one(&mut self, at: usize) -> Result<()> {
        self.sessions.finish(at)?;
        while self.talks[at].is_open {
            for Event { outcome, .. } in self.events()? {
                if let Outcome::Finished(finished) = outcome {
                    self.talks[at].is_open = false;
                    if let Some(reward) = finished.reward {
                        if self.talks.len() > 1 {
                            show_label(&self.talks[at].label)?;
                        }
                        show_line(&format!("reward: {reward}"))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the environment has said something to which no message was sent yet.
    pub(super) fn waits_for_begin(&self) -> bool {
        self.talks.iter().any(|talk| talk.is_open && talk.messages.is_empty() && talk.opened.prompt.is_some())
    }

    /// Returns the messages of a model's conversation with a user's next message.
    fn messages(&self, at: usize, message: &str) -> Vec<Value> {
        let talk = &self.talks[at];
        let begun = talk.opened.prompt.as_deref().filter(|_| talk.messages.is_empty()).unwrap_or_default();
        // As in training, the environment's text follows the last message unchanged.
        let user = said("user", &format!("{message}{begun}"));
        talk.messages.iter().cloned().chain([user]).collect()
    }

    /// Returns the models whose sessions are open.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn open_talks(&self) -> Result<Vec<usize>> {
        let open: Vec<usize> = (0..self.talks.len()).filter(|&at| self.talks[at].is_open).collect();
        if open.is_empty() {
            return Err(Error::Run("the episode has ended: /reset starts a new conversation".into()));
        }
        Ok(open)
    }

    /// Checks that the conversation with a message fits the model's context.
    pub(super) fn check(&self, at: usize, speaker: &Speaker, config: &ChatConfig, message: &str) -> Result<()> {
        let prompt = self.prompt(at, config, &self.messages(at, message))?;
        speaker.generation(config, prompt.len(), self.talks[at].messages.is_empty()).map(drop)
    }

    fn prompt(&self, at: usize, config: &ChatConfig, messages: &[Value]) -> Result<Vec<i64>> {
        let talk = &self.talks[at];
        let system = config.system.iter().map(|text| said("system", text));
        let messages: Vec<Value> = system.chain(messages.iter().cloned()).collect();
        talk.template.prompt(&messages, &talk.opened.tools)
    }

    /// Lets a model respond to a message, whose number is `step`: turn after turn, until one has no calls.
    pub(super) fn respond(
        &mut self,
        at: usize,
        speaker: &Speaker,
        config: &ChatConfig,
        (message, step): (&str, u64),
        stop: &AtomicBool,
    ) -> Result<()> {
        let messages = self.messages(at, message);
        let mut prompt = self.prompt(at, config, &messages)?;
        self.talks[at].messages = messages;
        let mut iterations = 0;
        loop {
            // Each turn has its own draws.
            let settings = GenerationConfig {
                step,
                first_row: iterations as u64,
                ..speaker.generation(config, prompt.len(), false)?
            };
            let sampled = self.talks[at].sample(speaker, &prompt, &settings, stop)?;
            self.talks[at].messages.push(sampled.turn.message.clone());
            if sampled.is_cut || !self.config.has_results(&sampled.turn) {
                return Ok(());
            }
            if let Some(most) = self.config.max_tool_calling_iterations.filter(|&most| iterations >= most) {
                hint(&format!("(the calls of this turn are not made: --max_tool_calling_iterations is {most})"));
                return Ok(());
            }
            iterations += 1;
            let (results, done) = self.call(at, sampled.turn, stop)?;
            self.talks[at].messages.extend(results.iter().cloned());
            if done {
                self.finish_one(at)?;
                hint("(the episode has ended: /reset starts a new conversation)");
                return Ok(());
            }
            if stop.load(Ordering::SeqCst) {
                return Ok(());
            }
            prompt.extend(sampled.tokens);
            prompt.extend(self.talks[at].template.suffix(&results)?);
        }
    }

    /// Makes the calls of a turn, and shows them with their results. Returns the messages of the results, and whether the episode is over.
    fn call(&mut self, at: usize, turn: Turn, stop: &AtomicBool) -> Result<(Vec<Value>, bool)> {
        parts(&turn.message).iter().filter(|part| part.kind == Kind::Call).try_for_each(show_part)?;
        let (results, made) = Results::of(turn);
        let called = if made.is_empty() { Called::default() } else { self.made(at, made, stop)? };
        let results: Vec<Value> = results.with(called.results).iter().map(ToolResult::message).collect();
        results.iter().flat_map(parts).try_for_each(|part| show_part(&part))?;
        Ok((results, called.done))
    }

    /// Waits for the results of calls.
    fn made(&mut self, at: usize, calls: Vec<ToolCall>, stop: &AtomicBool) -> Result<Called> {
        self.sessions.call(at, calls)?;
        let mut is_noted = false;
        loop {
            for Event { outcome, .. } in self.events()? {
                if let Outcome::Called(called) = outcome {
                    return Ok(called);
                }
            }
            if stop.load(Ordering::SeqCst) && !std::mem::replace(&mut is_noted, true) {
                hint("(waiting for the call to finish; Ctrl-C again quits)");
            }
        }
    }
}

impl Talk {
    /// Samples a turn after `prompt`, and shows its text.
    fn sample(
        &self,
        speaker: &Speaker,
        prompt: &[i64],
        settings: &GenerationConfig,
        stop: &AtomicBool,
    ) -> Result<Sampled> {
        let mut texts = self.template.text_stream(prompt)?;
        let mut turn = self.template.turn(self.template.beginning(prompt)?, 0, &self.opened.tools);
        let mut shown = String::new();
        let mut each = |token: &Token| {
            let mut text = texts.push(token.id)?;
            if token.finish.is_some() {
                text += &texts.finish()?;
            }
            let part = turn.push(&text);
            shown += &part;
            show(&part)
        };
        let (tokens, finish) = speaker.sample(prompt, settings, stop, &mut each)?;
        let is_cut = finish != Some(FinishReason::Stop);
        let (rest, turn) = if is_cut {
            let rest = turn.into_text();
            let message = said("assistant", &format!("{shown}{rest}"));
            (rest, Turn { message, calls: Vec::new(), malformed: None })
        } else {
            turn.finish(tokens.last().copied())?
        };
        shown += &rest;
        show(&rest)?;
        if !shown.is_empty() || turn.calls.is_empty() {
            show("\n")?;
        }
        if finish == Some(FinishReason::Length) {
            hint_at_cut(settings.max_new_tokens);
        }
        Ok(Sampled { tokens, turn, is_cut })
    }
}
