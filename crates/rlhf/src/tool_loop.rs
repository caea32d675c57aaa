//! Multi-turn responses: the policy calls tools, and an environment gives the results and the reward.

use crate::data::{Episode, Prompt, PromptLimit, prompt_messages};
use crate::environment::{
    Environment, EnvironmentConfig, Event, Log, Opened, Outcome, Results, Sessions, ToolCall, ToolResult,
    environment_rewards, failure_reward_name, session_seed,
};
use crate::reward::Rewards;
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use rlhf_base::safe_text::{beginning, one_line};
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{FinishReason, GenerationConfig, Next, Response, Turns, generate_turns};
use rlhf_lm::model::CausalLm;
use rlhf_lm::tokenizer::{Tokenizer, ToolTemplate, Turn, message_text};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which sessions are polled while there is nothing else to do. Each session has its own time limit.
const WAIT: Duration = Duration::from_secs(1);

/// Maximum number of metrics that environments give.
const MOST_LOGS: usize = 100;

/// Beginning of the names of metrics that environments give.
pub(crate) const ENVIRONMENT_METRICS: &str = "environment/";

/// The parts that multi-turn responses need besides a policy: tools and environments, and a chat template that writes calls and results.
pub struct ToolLoop {
    environment: Arc<dyn Environment>,
    template: ToolTemplate,
    tokenizer: Tokenizer,
    config: EnvironmentConfig,
    /// Name of the reward of rows whose environment dies.
    failure_reward: String,
    /// Limit on the length of prompts with their tools.
    limit: Option<PromptLimit>,
    /// File for the errors of environments that do not end the run.
    log: Log,
}

impl fmt::Debug for ToolLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolLoop").field("config", &self.config).finish_non_exhaustive()
    }
}

impl ToolLoop {
    /// Starts an environment, for a policy with this tokenizer.
    ///
    /// # Errors
    /// If it cannot be started; if the tokenizer's chat template cannot be used with tools.
    pub fn new(environment: Arc<dyn Environment>, tokenizer: &Tokenizer, config: &EnvironmentConfig) -> Result<Self> {
        environment.start()?;
        let template = ToolTemplate::new(tokenizer)?;
        let tokenizer = tokenizer.clone();
        let failure_reward = failure_reward_name(&*environment);
        Ok(Self {
            environment,
            template,
            tokenizer,
            config: config.clone(),
            failure_reward,
            limit: None,
            log: Log::default(),
        })
    }

    /// Starts the tools and environments that the settings name; `None` if they name none. Their programs print to `log`.
    ///
    /// # Errors
    /// The errors of [`EnvironmentConfig::check`] and [`ToolLoop::new`].
    pub fn start(config: &EnvironmentConfig, tokenizer: &Tokenizer, log: &Log) -> Result<Option<Self>> {
        let environment = config.environment(log)?;
        let started = environment.map(|environment| Self::new(environment, tokenizer, config)).transpose()?;
        Ok(started.map(|started| started.logging_to(log)))
    }

    /// Sets the log for errors of environments that do not end the run.
    #[must_use]
    pub fn logging_to(mut self, log: &Log) -> Self {
        self.log = log.clone();
        self
    }

    /// The rewards that the environment gives, each with the weight 1.
    pub fn rewards(&self) -> Rewards {
        environment_rewards(&*self.environment, &self.config)
    }

    /// Samples [`GenerationConfig::num_return_sequences`] responses to each prompt, in turns with the environment. Each rank runs the
    /// sessions of its own rows; all ranks get all results.
    ///
    /// # Errors
    /// The errors of [`ToolLoop::generate`].
    pub fn generate_on(
        &self,
        world: &World,
        policy: &CausalLm,
        asked: &[&Prompt],
        generation: &GenerationConfig,
    ) -> Result<(Vec<Response>, Vec<Episode>)> {
        let size = generation.num_return_sequences;
        let prompts = world.share(asked.len());
        let rows = prompts.start * size..prompts.end * size;
        let results = world.gather(world.agree(self.rows(policy, asked, rows, generation))?)?;
        Ok(results.into_iter().flatten().unzip())
    }

    /// Samples [`GenerationConfig::num_return_sequences`] responses to each prompt, in turns with the environment.
    ///
    /// # Errors
    /// The errors of [`generate_turns`]; if an environment is dead; if a prompt with the environment's text and tools does not fit the model.
    pub fn generate(
        &self,
        policy: &CausalLm,
        asked: &[&Prompt],
        generation: &GenerationConfig,
    ) -> Result<(Vec<Response>, Vec<Episode>)> {
        let rows = 0..asked.len() * generation.num_return_sequences;
        Ok(self.rows(policy, asked, rows, generation)?.into_iter().unzip())
    }

    /// Returns the responses `rows` among those to `asked`. As many are sampled at a time as there may be sessions.
    fn rows(
        &self,
        policy: &CausalLm,
        asked: &[&Prompt],
        rows: Range<usize>,
        generation: &GenerationConfig,
    ) -> Result<Vec<(Response, Episode)>> {
        // If there are only Python functions and classes, they see the rows in the order of the whole batch, as in TRL.
        let is_whole = self.environment.in_lockstep() && !self.config.has_sessions_elsewhere();
        let at_once = if is_whole { rows.len().max(1) } else { self.config.max_environments };
        let mut results = Vec::with_capacity(rows.len());
        for start in rows.clone().step_by(at_once) {
            let part = start..(start + at_once).min(rows.end);
            let config = GenerationConfig { first_row: generation.first_row + start as u64, ..generation.clone() };
            let talk = Talk::open(self, asked, part, generation)?;
            results.extend(talk.run(policy, &config)?);
        }
        Ok(results)
    }

    /// Sets the limit on the length of prompts with their tools.
    #[must_use]
    pub fn limited_to(mut self, limit: PromptLimit) -> Self {
        self.limit = Some(limit);
        self
    }

    fn prompt(&self, asked: &Prompt, opened: &Opened) -> Result<Prompt> {
        let mut messages = prompt_messages(&asked.row)?;
        if let Some(said) = &opened.prompt {
            append(&mut messages, said);
        }
        let tokens = if is_continued(&messages) {
            self.template.continued_prompt(&messages, &opened.tools)?
        } else {
            self.template.prompt(&messages, &opened.tools)?
        };
        if let Some(limit) = self.limit.filter(|limit| tokens.len() > limit.max_length()) {
            return Err(Error::Run(format!(
                "the prompt {:?} with its tools: expected at most {} tokens ({}), found {}",
                shown(asked),
                limit.max_length(),
                limit.reason(),
                tokens.len()
            )));
        }
        let mut row = asked.row.clone();
        row["prompt"] = messages.into();
        Ok(Prompt { text: self.tokenizer.decode_verbatim(&tokens)?, tokens, row })
    }
}

/// The beginning of a prompt's last message, to show in messages.
fn shown(prompt: &Prompt) -> String {
    let messages = prompt_messages(&prompt.row).unwrap_or_default();
    let last = messages.last().and_then(|message| message_text(&message["content"]));
    beginning(&one_line(&last.unwrap_or_else(|| prompt.text.clone())), 60).to_string()
}

/// Returns whether the response continues the last message.
fn is_continued(messages: &[Value]) -> bool {
    messages.last().is_some_and(|message| message["role"] == "assistant")
}

/// Appends a text unchanged to the last message.
fn append(messages: &mut Vec<Value>, said: &str) {
    match messages.last_mut().map(|message| &mut message["content"]) {
        Some(Value::Array(parts)) => parts.push(json!({"type": "text", "text": said})),
        Some(content) => *content = (message_text(content).unwrap_or_default() + said).into(),
        None => messages.push(json!({"role": "user", "content": said})),
    }
}

/// The conversations of some rows.
struct Talk<'a> {
    tool_loop: &'a ToolLoop,
    sessions: Sessions,
    rows: Vec<Row>,
    most_tokens: usize,
    /// Decisions about rows that the generation has not taken yet.
    decided: Vec<(usize, Next)>,
    /// Calls in lockstep, which are made once all rows have ended their turns.
    pending: Vec<(usize, Vec<ToolCall>)>,
    /// Rows whose calls are being made.
    busy: usize,
}

/// The conversation of a row.
struct Row {
    episode: Episode,
    tools: Vec<Value>,
    /// Number of tokens of the response so far.
    tokens: usize,
    /// Number of turns with calls that were made.
    iterations: usize,
    /// The results of the current turn that are known before its calls are made.
    known: Results,
    /// Whether there is a session to be finished.
    is_open: bool,
}

impl Row {
    /// Records that the environment is dead for this row. `name` is the reward's name if the row has none yet.
    fn fail(&mut self, name: &str) {
        self.is_open = false;
        self.episode.has_failed = true;
        self.episode.reward_name.get_or_insert_with(|| name.to_string());
    }
}

impl<'a> Talk<'a> {
    /// Opens the sessions of `rows`, which are responses to `asked`, and creates their prompts.
    fn open(
        tool_loop: &'a ToolLoop,
        asked: &[&Prompt],
        rows: Range<usize>,
        generation: &GenerationConfig,
    ) -> Result<Self> {
        let size = generation.num_return_sequences;
        let config = &tool_loop.config;
        let most = if tool_loop.environment.in_lockstep() { rows.len() } else { config.max_environments };
        let mut sessions =
            Sessions::new(tool_loop.environment.clone(), most.max(1), config.environment_failure_reward)?;
        for (at, row) in rows.clone().enumerate() {
            let group = row / size;
            let columns = asked[group].row.as_object().cloned().unwrap_or_default();
            // All rows of a group get the same seed, so that they begin alike.
            let number = generation.first_row / size as u64 + group as u64;
            let seed = session_seed(generation.seed, generation.step, number);
            let place = format!("response {} to {:?}", row % size + 1, shown(asked[group]));
            sessions.open(at, &place, columns, seed)?;
        }
        let mut opened: Vec<Option<Result<Opened, f64>>> = (0..rows.len()).map(|_| None).collect();
        while opened.iter().any(Option::is_none) {
            let events = sessions.poll(WAIT)?;
            if events.is_empty() && sessions.is_blocked() {
                let free = opened.iter().flatten().count();
                return Err(Error::refused(
                    "max_environments",
                    format!(
                        " = {}: expected at most {free}, the sessions that the environment has: the rows of a batch begin together",
                        config.max_environments
                    ),
                ));
            }
            for Event { row, outcome } in events {
                opened[row] = Some(match outcome {
                    Outcome::Opened(opened) => Ok(opened),
                    Outcome::Failed { reward, message } => {
                        tool_loop.log.write(message.as_bytes());
                        Err(reward)
                    }
                    Outcome::Called(_) | Outcome::Finished(_) => continue,
                });
            }
        }
        let rows = opened.into_iter().flatten().zip(rows).map(|(opened, row)| {
            let is_open = opened.is_ok();
            let failed = opened.as_ref().err().copied();
            let opened = opened.unwrap_or_default();
            let prompt = tool_loop.prompt(asked[row / size], &opened)?;
            let Opened { tools, reward_name, .. } = opened;
            let reward_name = if is_open { reward_name } else { Some(tool_loop.failure_reward.clone()) };
            let episode = Episode {
                prompt,
                messages: Vec::new(),
                calls: 0,
                failures: 0,
                reward: failed,
                reward_name,
                logs: Vec::new(),
                has_failed: !is_open,
                is_over: false,
            };
            Ok(Row { episode, tools, tokens: 0, iterations: 0, known: Results::default(), is_open })
        });
        let rows = rows.collect::<Result<_>>()?;
        let most_tokens = generation.max_new_tokens;
        Ok(Self { tool_loop, sessions, rows, most_tokens, decided: Vec::new(), pending: Vec::new(), busy: 0 })
    }

    /// Generates the responses, and ends the sessions.
    fn run(mut self, policy: &CausalLm, generation: &GenerationConfig) -> Result<Vec<(Response, Episode)>> {
        let prompts: Vec<Vec<i64>> = self.rows.iter().map(|row| row.episode.prompt.tokens.clone()).collect();
        let size = generation.num_return_sequences;
        // If the rows of each group have the same prompt, it is computed once per group.
        let same = prompts.len().is_multiple_of(size)
            && prompts.chunks(size).all(|group| group.iter().all(|prompt| *prompt == group[0]));
        let responses = if same {
            let group_prompts: Vec<&Vec<i64>> = prompts.iter().step_by(size).collect();
            generate_turns(policy, &group_prompts, generation, &mut self)?
        } else {
            let config = GenerationConfig { num_return_sequences: 1, ..generation.clone() };
            generate_turns(policy, &prompts, &config, &mut self)?
        };
        self.finish()?;
        Ok(responses.into_iter().zip(self.rows.into_iter().map(|row| row.episode)).collect())
    }

    /// Ends the open sessions, and takes their rewards.
    fn finish(&mut self) -> Result<()> {
        let open: Vec<usize> = (0..self.rows.len()).filter(|&row| self.rows[row].is_open).collect();
        open.iter().try_for_each(|&row| self.sessions.finish(row))?;
        let mut left = open.len();
        while left > 0 {
            for Event { row, outcome } in self.sessions.poll(WAIT)? {
                self.rows[row].episode.reward = match outcome {
                    Outcome::Finished(finished) => {
                        if finished.reward.is_some() && self.rows[row].episode.reward_name.is_none() {
                            return Err(Error::Usage(
                                "an environment gave a reward without a name: expected one in Opened::reward_name and in \
                                 Environment::reward_names"
                                    .into(),
                            ));
                        }
                        self.rows[row].episode.logs = finished.logs;
                        finished.reward
                    }
                    Outcome::Failed { reward, message } => {
                        self.tool_loop.log.write(message.as_bytes());
                        self.rows[row].fail(&self.tool_loop.failure_reward);
                        Some(reward)
                    }
                    Outcome::Opened(_) | Outcome::Called(_) => continue,
                };
                left -= 1;
            }
        }
        Ok(())
    }

    /// Makes the calls of a turn: now, or in lockstep together with those of the other rows.
    fn call(&mut self, at: usize, turn: Turn) -> Result<()> {
        let row = &mut self.rows[at];
        row.iterations += 1;
        // With `malformed_calls = error`, a turn that cannot be read counts as a failed call.
        let calls;
        (row.known, calls) = Results::of(turn);
        self.busy += 1;
        if self.in_lockstep() {
            self.pending.push((at, calls));
            return Ok(());
        }
        self.submit(at, calls)
    }

    fn submit(&mut self, at: usize, calls: Vec<ToolCall>) -> Result<()> {
        if calls.is_empty() {
            return self.answered(at, Vec::new(), false);
        }
        self.sessions.call(at, calls)
    }

    /// Takes the results of the calls of row `at`.
    fn answered(&mut self, at: usize, results: Vec<ToolResult>, done: bool) -> Result<()> {
        self.busy -= 1;
        let row = &mut self.rows[at];
        let results = std::mem::take(&mut row.known).with(results);
        row.episode.calls += results.len();
        row.episode.failures += results.iter().filter(|result| result.failed).count();
        let messages: Vec<Value> = results.iter().map(ToolResult::message).collect();
        if done {
            row.episode.is_over = true;
            row.episode.messages.extend(messages);
            self.decided.push((at, Next::End));
            return Ok(());
        }
        let suffix = self.tool_loop.template.suffix(&messages)?;
        // The generation decides in the same way: a round that does not fit is not part of the response.
        if row.tokens + suffix.len() <= self.most_tokens {
            row.tokens += suffix.len();
            row.episode.messages.extend(messages);
        }
        self.decided.push((at, Next::Continue(suffix)));
        Ok(())
    }

    fn take(&mut self, Event { row: at, outcome }: Event) -> Result<()> {
        match outcome {
            Outcome::Called(called) => self.answered(at, called.results, called.done),
            Outcome::Failed { reward, message } => {
                self.tool_loop.log.write(message.as_bytes());
                self.busy -= 1;
                let row = &mut self.rows[at];
                row.episode.reward = Some(reward);
                row.fail(&self.tool_loop.failure_reward);
                self.decided.push((at, Next::End));
                Ok(())
            }
            Outcome::Opened(_) | Outcome::Finished(_) => Ok(()),
        }
    }
}

impl Turns for Talk<'_> {
    fn ended(&mut self, at: usize, tokens: &[i64], finish: FinishReason) -> Result<()> {
        let row = &mut self.rows[at];
        row.tokens += tokens.len();
        let prompt = &row.episode.prompt;
        let begins =
            row.episode.messages.is_empty() && is_continued(prompt.row["prompt"].as_array().map_or(&[], Vec::as_slice));
        let turn = if begins {
            self.tool_loop.template.read_continued(&prompt.tokens, tokens, &row.tools)?
        } else {
            self.tool_loop.template.read_turn(tokens, &row.tools)?
        };
        row.episode.messages.push(turn.message.clone());
        let config = &self.tool_loop.config;
        let may_call = row.is_open && config.max_tool_calling_iterations.is_none_or(|most| row.iterations < most);
        // A malformed call that the length limit cut off is not an error of the policy.
        let is_read = turn.malformed.is_none() || finish == FinishReason::Stop;
        if may_call && is_read && config.has_results(&turn) {
            return self.call(at, turn);
        }
        self.decided.push((at, Next::End));
        Ok(())
    }

    fn decided(&mut self, wait: bool) -> Result<Vec<(usize, Next)>> {
        let in_lockstep = self.in_lockstep();
        // Tools with shared state see the calls in the order of the rows.
        let mut pending = std::mem::take(&mut self.pending);
        pending.sort_by_key(|(row, _)| *row);
        pending.into_iter().try_for_each(|(row, calls)| self.submit(row, calls))?;
        loop {
            let waits = self.busy > 0 && (in_lockstep || wait && self.decided.is_empty());
            let events = self.sessions.poll(if waits { WAIT } else { Duration::ZERO })?;
            events.into_iter().try_for_each(|event| self.take(event))?;
            let is_complete = if in_lockstep { self.busy == 0 } else { !wait || !self.decided.is_empty() };
            if is_complete {
                return Ok(std::mem::take(&mut self.decided));
            }
        }
    }

    fn in_lockstep(&self) -> bool {
        self.tool_loop.environment.in_lockstep()
    }
}

/// Adds how often tools were called and failed, as TRL's GRPOTrainer logs it, and the metrics of environments; nothing if there are no
/// episodes.
/// `may_fail` says whether the run continues if an environment dies.
pub(crate) fn push_tool_metrics(m: &mut Metrics, episodes: &[Episode], may_fail: bool) {
    if episodes.is_empty() {
        return;
    }
    let calls: usize = episodes.iter().map(|episode| episode.calls).sum();
    let failures: usize = episodes.iter().map(|episode| episode.failures).sum();
    let failed = episodes.iter().filter(|episode| episode.has_failed).count();
    if may_fail {
        m.push("env_failure_frequency", failed as f64 / episodes.len() as f64);
    }
    m.push("tools/call_frequency", calls as f64 / episodes.len() as f64);
    m.push("tools/failure_frequency", failures as f64 / calls.max(1) as f64);
    let rewards: Vec<f64> = episodes.iter().filter_map(|episode| episode.reward).collect();
    if !rewards.is_empty() {
        m.push("env_reward", rewards.iter().sum::<f64>() / rewards.len() as f64);
    }
    let mut logs: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, number) in episodes.iter().flat_map(|episode| &episode.logs) {
        logs.entry(name).or_default().push(*number);
    }
    for (name, numbers) in logs.into_iter().take(MOST_LOGS) {
        m.push(format!("{ENVIRONMENT_METRICS}{name}"), numbers.iter().sum::<f64>() / numbers.len() as f64);
    }
}

#[cfg(test)]
mod tests;
