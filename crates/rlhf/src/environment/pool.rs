//! The sessions of a batch. They are opened and called on a bounded number of threads; the caller polls for finished steps.

use super::{Called, Environment, Finished, Opened, Session, ToolCall};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of threads; each works on one session at a time.
const MOST_THREADS: usize = 128;
/// Interval at which an environment without a free session is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// An environment that has no free session for this long, although none of these sessions is open, is an error.
const MOST_FULL: Duration = Duration::from_secs(60);

/// A finished step of a session.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The row, by the number that it was opened with.
    pub row: usize,
    /// The result of the step.
    pub outcome: Outcome,
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The session is open.
    Opened(Opened),
    /// The calls have been made.
    Called(Called),
    /// The session has ended.
    Finished(Finished),
    /// The environment is dead for this row, which has ended. Only with a reward for failures.
    Failed {
        /// One line, with the row.
        message: String,
        /// The reward of the row.
        reward: f64,
    },
}

/// The sessions of many rows. Each row has one step at a time: it is opened, called any number of times, and finished. Steps of different
/// rows run on threads, in any order. The steps of an environment in lockstep run on one thread, in the order in which they were asked for.
///
/// Dropping it abandons the open sessions.
pub struct Sessions {
    environment: Arc<dyn Environment>,
    jobs: Arc<Jobs>,
    done: Receiver<(usize, Done)>,
    /// Maximum number of open sessions.
    max_open: usize,
    failure_reward: Option<f64>,
    rows: BTreeMap<usize, Row>,
    /// Rows that wait until another session ends.
    waiting: VecDeque<usize>,
    /// Events that came in the same poll before an error; the next poll returns them.
    delayed: Vec<Event>,
    /// Since when the environment has had no free session, and when it was last asked.
    full: Option<(Instant, Instant)>,
}

/// A row with a session.
struct Row {
    /// Place of the row in messages.
    place: String,
    columns: Map<String, Value>,
    seed: u64,
    state: State,
}

enum State {
    /// It has no session yet.
    Waiting,
    /// A thread has its session.
    Busy,
    Idle(Box<dyn Session>),
}

enum Job {
    Open(Map<String, Value>, u64),
    Call(Box<dyn Session>, Vec<ToolCall>),
    Finish(Box<dyn Session>),
    Abandon(Box<dyn Session>),
}

enum Done {
    Opened(Box<dyn Session>),
    /// There is no free session.
    Full,
    Called(Box<dyn Session>, Called),
    Finished(Finished),
    Abandoned,
    Failed(String),
}

/// The steps that wait for a thread, and whether the threads are to stop.
#[derive(Default)]
struct Jobs {
    queue: Mutex<(VecDeque<(usize, Job)>, bool)>,
    changed: Condvar,
}

impl Sessions {
    /// Creates the sessions of an environment; at most `max_open` of them are open at a time. If the environment of a row dies, that is an
    /// error, or the row ends with `failure_reward`.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn new(environment: Arc<dyn Environment>, max_open: usize, failure_reward: Option<f64>) -> Result<Self> {
        let in_lockstep = environment.in_lockstep();
        let threads = if in_lockstep { 1 } else { max_open.clamp(1, MOST_THREADS) };
        let jobs = Arc::new(Jobs::default());
        let (sender, done) = channel();
        for _ in 0..threads {
            let jobs = jobs.clone();
            let sender = sender.clone();
            let environment = environment.clone();
            let work = move || jobs.work(&*environment, &sender);
            let started = thread::Builder::new().name("environment".into()).spawn(work);
            started.map_err(Error::io("start", "a thread for environments"))?;
        }
        // Plain functions have no sessions, so no limit applies.
        let max_open = if in_lockstep { usize::MAX } else { max_open.max(1) };
        let rows = BTreeMap::new();
        let waiting = VecDeque::new();
        let delayed = Vec::new();
        Ok(Self { environment, jobs, done, max_open, failure_reward, rows, waiting, delayed, full: None })
    }

    /// Returns the environment.
    pub fn environment(&self) -> &Arc<dyn Environment> {
        &self.environment
    }

    /// Opens the session of a row, now or when another one has ended. `place` names the row in messages, such as `prompts.jsonl: line 7`.
    ///
    /// # Errors
    /// If the row has a session already.
    pub fn open(&mut self, row: usize, place: &str, columns: Map<String, Value>, seed: u64) -> Result<()> {
        if self.rows.contains_key(&row) {
            return Err(Error::Run(format!("row {row}: its session is open already")));
        }
        self.rows.insert(row, Row { place: place.to_string(), columns, seed, state: State::Waiting });
        self.waiting.push_back(row);
        self.open_waiting();
        Ok(())
    }

    /// Makes the tool calls of a row's turn.
    ///
    /// # Errors
    /// If the row has no open session, or its last step has not been polled.
    pub fn call(&mut self, row: usize, calls: Vec<ToolCall>) -> Result<()> {
        let session = self.take(row)?;
        self.jobs.push(row, Job::Call(session, calls));
        Ok(())
    }

    /// Ends the session of a row.
    ///
    /// # Errors
    /// The errors of [`Sessions::call`].
    pub fn finish(&mut self, row: usize) -> Result<()> {
        let session = self.take(row)?;
        self.jobs.push(row, Job::Finish(session));
        Ok(())
    }

    /// Drops the session of a row. There is no reward and no further event.
    ///
    /// # Errors
    /// The errors of [`Sessions::call`].
    pub fn abandon(&mut self, row: usize) -> Result<()> {
        let session = self.take(row)?;
        self.end(row);
        self.jobs.push(row, Job::Abandon(session));
        Ok(())
    }

    /// Returns the number of rows that have a session, or wait for one.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns whether no row has a session.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the number of rows with a step that has not been polled.
    pub fn unfinished(&self) -> usize {
        self.rows.values().filter(|row| !matches!(row.state, State::Idle(_))).count()
    }

    /// Returns the events of finished steps, in any order. If there is none yet but steps are at work, waits for one for at most `wait`.
    ///
    /// # Errors
    /// If an environment is dead and there is no reward for failures. The message names the row, whose session is then closed.
    pub fn poll(&mut self, wait: Duration) -> Result<Vec<Event>> {
        let until = Instant::now() + wait;
        let mut events = std::mem::take(&mut self.delayed);
        loop {
            self.open_waiting();
            let left = until.saturating_duration_since(Instant::now());
            let wait = if events.is_empty() && self.unfinished() > 0 { left } else { Duration::ZERO };
            match self.done.recv_timeout(wait.min(ASK_AGAIN)) {
                Ok((row, done)) => match self.event(row, done) {
                    Ok(event) => events.extend(event),
                    Err(error) => {
                        self.delayed = events;
                        return Err(error);
                    }
                },
                Err(RecvTimeoutError::Timeout) if !wait.is_zero() => self.check_full()?,
                Err(_) => return Ok(events),
            }
        }
    }

    /// Returns the event of a finished step, and takes the session back from the thread.
    fn event(&mut self, row: usize, done: Done) -> Result<Option<Event>> {
        let event = |outcome| Some(Event { row, outcome });
        match done {
            Done::Opened(session) => {
                self.full = None;
                let opened = session.opened().clone();
                self.put_back(row, session);
                Ok(event(Outcome::Opened(opened)))
            }
            Done::Full => {
                let now = Instant::now();
                self.full = Some((self.full.map_or(now, |(since, _)| since), now));
                self.rows.entry(row).and_modify(|entry| entry.state = State::Waiting);
                self.waiting.push_front(row);
                Ok(None)
            }
            Done::Called(session, called) => {
                self.put_back(row, session);
                Ok(event(Outcome::Called(called)))
            }
            Done::Finished(finished) => {
                self.end(row);
                Ok(event(Outcome::Finished(finished)))
            }
            Done::Abandoned => Ok(None),
            Done::Failed(message) => {
                let place = self.end(row);
                let message = format!("{place}: {message}");
                match self.failure_reward {
                    Some(reward) => Ok(event(Outcome::Failed { message, reward })),
                    None => Err(Error::Run(message)),
                }
            }
        }
    }

    fn take(&mut self, row: usize) -> Result<Box<dyn Session>> {
        let state = self.rows.get_mut(&row).map(|entry| std::mem::replace(&mut entry.state, State::Busy));
        match state {
            Some(State::Idle(session)) => Ok(session),
            Some(State::Busy) => Err(Error::Run(format!("row {row}: its session has not ended its last step"))),
            Some(State::Waiting) => {
                self.rows.entry(row).and_modify(|entry| entry.state = State::Waiting);
                Err(Error::Run(format!("row {row}: its session is not open yet")))
            }
            None => Err(Error::Run(format!("row {row}: it has no session"))),
        }
    }

    fn put_back(&mut self, row: usize, session: Box<dyn Session>) {
        self.rows.entry(row).and_modify(|entry| entry.state = State::Idle(session));
    }

    /// Removes a row whose session has ended, and returns its place.
    fn end(&mut self, row: usize) -> String {
        // The ended session may have made room: allow the environment to be asked again at once.
        self.full = self.full.map(|(since, asked)| (since, asked - ASK_AGAIN));
        self.rows.remove(&row).map_or_else(|| format!("row {row}"), |row| row.place)
    }

    /// Opens the sessions of waiting rows, as many as may be open.
    fn open_waiting(&mut self) {
        if self.full.is_some_and(|(_, asked)| asked.elapsed() < ASK_AGAIN) {
            return;
        }
        while self.rows.len() - self.waiting.len() < self.max_open {
            let Some(row) = self.waiting.pop_front() else { return };
            let Some(entry) = self.rows.get_mut(&row) else { continue };
            entry.state = State::Busy;
            self.jobs.push(row, Job::Open(entry.columns.clone(), entry.seed));
            // The environment was full when last asked, so try only one row.
            if self.full.is_some() {
                return;
            }
        }
    }

    /// Returns whether rows wait for sessions that other rows here keep open, and no step is at work.
    pub fn is_blocked(&self) -> bool {
        let is_busy = self.rows.values().any(|row| matches!(row.state, State::Busy));
        self.full.is_some() && !is_busy && !self.waiting.is_empty() && self.waiting.len() < self.rows.len()
    }

    /// Fails if the environment has had no free session for too long although none is open here.
    fn check_full(&mut self) -> Result<()> {
        let is_idle = self.rows.len() == self.waiting.len();
        let Some((since, _)) = self.full.filter(|(since, _)| is_idle && since.elapsed() > MOST_FULL) else {
            return Ok(());
        };
        let Some(row) = self.waiting.pop_front() else { return Ok(()) };
        let seconds = since.elapsed().as_secs();
        let place = self.end(row);
        Err(Error::Run(format!(
            "{place}: the environment has had no free session for {seconds} s; others use all of them"
        )))
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        let mut queue = self.jobs.lock();
        queue.1 = true;
        let dropped: Vec<_> = queue.0.drain(..).collect();
        drop(queue);
        self.jobs.changed.notify_all();
        // Closing a session may take a while, so the lock is released before.
        drop(dropped);
    }
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, (VecDeque<(usize, Job)>, bool)> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, row: usize, job: Job) {
        self.lock().0.push_back((row, job));
        self.changed.notify_one();
    }

    fn next(&self) -> Option<(usize, Job)> {
        let mut queue = self.lock();
        loop {
            if queue.1 {
                return None;
            }
            match queue.0.pop_front() {
                Some(job) => return Some(job),
                None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Runs steps on this thread until the sessions are dropped.
    fn work(&self, environment: &dyn Environment, sender: &Sender<(usize, Done)>) {
        while let Some((row, job)) = self.next() {
            // A panic in the user's environment must not end the process.
            let done = catch_unwind(AssertUnwindSafe(|| run(environment, job)));
            let done = done.unwrap_or_else(|_| Done::Failed("the environment panicked".into()));
            if sender.send((row, done)).is_err() {
                return;
            }
        }
    }
}

fn run(environment: &dyn Environment, job: Job) -> Done {
    let done = match job {
        Job::Open(columns, seed) => {
            environment.open(&columns, seed).map(|session| session.map_or(Done::Full, Done::Opened))
        }
        Job::Call(mut session, calls) => session.call(&calls).map(|called| Done::Called(session, called)),
        Job::Finish(session) => session.finish().map(Done::Finished),
        Job::Abandon(session) => {
            drop(session);
            Ok(Done::Abandoned)
        }
    };
    done.unwrap_or_else(|error| Done::Failed(error.to_string()))
}
