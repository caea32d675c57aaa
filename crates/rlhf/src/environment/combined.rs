//! Several environments by name, and tools that all of them share. The column `environment` of a row chooses its environment.

use super::{Called, Environment, Finished, Opened, Session, ToolCall};
use rlhf_base::safe_text::{beginning, one_line};
use rlhf_base::{Error, Result};
use serde_json::{Map, Value};
use std::sync::Arc;

/// The column that chooses the environment of a row.
const COLUMN: &str = "environment";

/// Several environments, of which each row chooses one by its column `environment`, and tools that all rows have.
pub struct Combined {
    /// Tools that every row has, before those of its environment.
    pub tools: Option<Arc<dyn Environment>>,
    /// Environments by name; or one without a name, for all rows.
    pub environments: Vec<(Option<String>, Arc<dyn Environment>)>,
}

impl Combined {
    fn parts(&self) -> impl Iterator<Item = &Arc<dyn Environment>> {
        self.tools.iter().chain(self.environments.iter().map(|(_, environment)| environment))
    }

    /// Returns the environment of a row. Removes the column that chose it, since that is not part of the task.
    fn choose(&self, columns: &mut Map<String, Value>) -> Result<Option<&dyn Environment>> {
        if self.environments.iter().all(|(name, _)| name.is_none()) {
            return Ok(self.environments.first().map(|(_, environment)| &**environment));
        }
        let chosen = columns.shift_remove(COLUMN).unwrap_or(Value::Null);
        let entry = self.environments.iter().find(|(name, _)| name.as_deref() == chosen.as_str());
        match entry.filter(|_| chosen.is_string()) {
            Some((_, environment)) => Ok(Some(&**environment)),
            None => {
                let known: Vec<_> =
                    self.environments.iter().flat_map(|(name, _)| name).map(|name| format!("`{name}`")).collect();
                let found = chosen.to_string();
                Err(Error::Run(format!(
                    "expected one of the environments {} in the column `{COLUMN}`, found {}",
                    known.join(", "),
                    beginning(&one_line(&found), 80)
                )))
            }
        }
    }
}

impl Environment for Combined {
    fn open(&self, row: &Map<String, Value>, seed: u64) -> Result<Option<Box<dyn Session>>> {
        let mut columns = row.clone();
        let main = match self.choose(&mut columns)? {
            Some(environment) => match environment.open(&columns, seed)? {
                Some(session) => Some(session),
                None => return Ok(None),
            },
            None => None,
        };
        let shared = match &self.tools {
            Some(tools) => match tools.open(row, seed)? {
                Some(session) => Some(session),
                None => return Ok(None),
            },
            None => None,
        };
        let tools =
            |session: &Option<Box<dyn Session>>| session.as_ref().map_or_else(Vec::new, |s| s.opened().tools.clone());
        let names =
            tools(&main).iter().filter_map(|tool| tool["function"]["name"].as_str().map(String::from)).collect();
        let mut opened = main.as_ref().map_or_else(Opened::default, |session| session.opened().clone());
        opened.tools = [tools(&shared), tools(&main)].concat();
        Ok(Some(Box::new(CombinedSession { shared, main, names, opened })))
    }

    fn start(&self) -> Result<()> {
        self.parts().try_for_each(|part| part.start())
    }

    fn tools(&self) -> Vec<Value> {
        distinct(self.parts().flat_map(|part| part.tools()))
    }

    fn reward_names(&self) -> Vec<String> {
        distinct(self.parts().flat_map(|part| part.reward_names()))
    }

    fn in_lockstep(&self) -> bool {
        self.parts().any(|part| part.in_lockstep())
    }
}

/// Returns the items in order, without repetitions.
fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut unique = Vec::new();
    for item in items {
        if !unique.contains(&item) {
            unique.push(item);
        }
    }
    unique
}

struct CombinedSession {
    /// The session of the tools.
    shared: Option<Box<dyn Session>>,
    /// The session of the row's environment.
    main: Option<Box<dyn Session>>,
    /// Names of the tools of the row's environment.
    names: Vec<String>,
    opened: Opened,
}

impl Session for CombinedSession {
    fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Calls both sessions; consecutive calls of one session go together. If both have a tool of this name, the environment's is called.
    fn call(&mut self, calls: &[ToolCall]) -> Result<Called> {
        let mut all = Called::default();
        let is_main = |call: &ToolCall| self.names.contains(&call.name);
        for part in calls.chunk_by(|a, b| is_main(a) == is_main(b)) {
            let main = &mut self.main;
            let shared = &mut self.shared;
            let is_main = part.first().is_some_and(is_main);
            let session = if is_main { main.as_mut().or(shared.as_mut()) } else { shared.as_mut().or(main.as_mut()) };
            let Some(session) = session else {
                return Err(Error::Run("tools were called, and there are neither tools nor environments".into()));
            };
            let called = session.call(part)?;
            all.results.extend(called.results);
            if let Some(reward) = called.reward {
                all.reward = Some(all.reward.unwrap_or(0.0) + reward);
            }
            if called.done {
                all.done = true;
                break;
            }
        }
        Ok(all)
    }

    fn finish(self: Box<Self>) -> Result<Finished> {
        if let Some(shared) = self.shared {
            shared.finish()?;
        }
        self.main.map_or_else(|| Ok(Finished::default()), |session| session.finish())
    }
}
