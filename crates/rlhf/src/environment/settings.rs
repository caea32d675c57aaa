//! Settings of tools and environments.

use super::{Combined, Environment, Limits, Log, OpenEnv, ProgramEnvironment};
use crate::reward::{LONGEST_TIMEOUT, function_files, program_files, without_query};
use rlhf_base::Result;
use rlhf_base::name_of;
use rlhf_base::safe_text::beginning;
use rlhf_base::schema::{ByteSize, Choices, ENVIRONMENTS, Settings, all, at_least_one, expect, no_effect, refuse};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Tools that the policy may call, and environments that it acts in. They run with the rights of the user.
#[derive(Debug, Clone, PartialEq, Serialize, Settings)]
pub struct EnvironmentConfig {
    /// Functions of Python that the policy may call, each as MODULE.FUNCTION, with type hints and a docstring in Google's style. They run
    /// with your rights.
    #[setting(heading = ENVIRONMENTS, several, short = "functions of Python that it may call")]
    pub tools: Vec<String>,
    /// Environment that the policy acts in: MODULE.CLASS of Python, command:LINE, openenv:ws://HOST:PORT; or several as NAME=..., of which
    /// the column `environment` of each row chooses one. They run with your rights.
    #[setting(heading = ENVIRONMENTS, several)]
    #[serde(serialize_with = "environments_without_queries")]
    pub environment_factory: Vec<String>,
    /// Maximum number of turns with tool calls per response [default: no limit but its length].
    #[setting(heading = ENVIRONMENTS)]
    pub max_tool_calling_iterations: Option<usize>,
    /// Treatment of a turn with a broken tool call: plain text, as in TRL, or a failed call whose error the policy sees.
    #[setting(heading = ENVIRONMENTS, default = "text")]
    pub malformed_calls: MalformedCalls,
    /// Reward of a row whose environment dies [default: the run ends with an error].
    #[setting(heading = ENVIRONMENTS)]
    pub environment_failure_reward: Option<f64>,
    /// Maximum number of sessions of environments that are open at a time; further rows wait.
    #[setting(heading = ENVIRONMENTS, default = 64, resume = Free)]
    pub max_environments: usize,
    /// Time limit of a tool call in seconds.
    #[setting(heading = ENVIRONMENTS, default = 30.0, resume = Free)]
    pub tool_timeout: f64,
    /// Time limit in seconds for the beginning and the end of a session, and for the start of its program.
    #[setting(heading = ENVIRONMENTS, default = 60.0, resume = Free)]
    pub reset_timeout: f64,
    /// Maximum size of the result of a tool call; a longer one is cut, with a mark that the policy sees.
    #[setting(heading = ENVIRONMENTS, default = ByteSize(64_000))]
    pub tool_output_limit: ByteSize,
    /// Maximum address space of each process of tools and environments.
    #[setting(heading = ENVIRONMENTS, resume = Free)]
    pub tool_memory: Option<ByteSize>,
    /// Number of processes and threads of the user above which tools and environments start no more.
    #[setting(heading = ENVIRONMENTS, resume = Free)]
    pub tool_processes: Option<usize>,
    /// Environment variables that tools and environments see although their names are those of secrets, such as HF_TOKEN.
    #[setting(heading = ENVIRONMENTS, several)]
    pub tool_env: Vec<String>,
}

/// Turns with a tool call that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Choices)]
#[serde(rename_all = "snake_case")]
#[choice(value_name = "HOW")]
pub enum MalformedCalls {
    /// The turn is plain text, and ends the response.
    Text,
    /// The turn counts as a failed call: the policy sees the error and continues.
    Error,
}

/// An environment as the settings write it.
#[derive(Debug, PartialEq)]
enum Kind<'a> {
    Python(&'a str),
    Command(&'a str),
    OpenEnv(&'a str),
    /// Objects of the process that drives the run: `driver:`, or `driver:tools` if there are plain tools. Only the Python package writes
    /// this kind.
    Driver {
        in_lockstep: bool,
    },
}

impl EnvironmentConfig {
    /// Returns whether there is a tool or an environment.
    pub fn is_used(&self) -> bool {
        !self.tools.is_empty() || !self.environment_factory.is_empty()
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// For each value that is not valid.
    pub fn check(&self) -> Result<()> {
        let time = |name, seconds: f64| {
            let holds = seconds > 0.0 && seconds <= LONGEST_TIMEOUT;
            expect(holds, name, seconds, "a number of seconds above 0, at most a week")
        };
        all([
            self.check_tools(),
            self.environments().map(|_| ()),
            self.check_used(),
            at_least_one(name_of!(self.max_environments), self.max_environments),
            self.max_tool_calling_iterations
                .map_or(Ok(()), |most| at_least_one(name_of!(self.max_tool_calling_iterations), most)),
            self.tool_processes.map_or(Ok(()), |most| at_least_one(name_of!(self.tool_processes), most)),
            at_least_one(name_of!(self.tool_output_limit), self.tool_output_limit.0),
            self.tool_memory.map_or(Ok(()), |memory| at_least_one(name_of!(self.tool_memory), memory.0)),
            time(name_of!(self.tool_timeout), self.tool_timeout),
            time(name_of!(self.reset_timeout), self.reset_timeout),
        ])
    }

    fn check_tools(&self) -> Result<()> {
        for (at, tool) in self.tools.iter().enumerate() {
            let shown = beginning(tool, 80);
            expect(
                is_path(tool),
                name_of!(self.tools),
                &shown,
                "the module and the name of a function, as in my_tools.search",
            )?;
            let name = |tool: &String| tool.rsplit('.').next().map(String::from);
            expect(
                !self.tools[..at].iter().any(|other| name(other) == name(tool)),
                name_of!(self.tools),
                &shown,
                "names that differ",
            )?;
        }
        Ok(())
    }

    /// Refuses settings that need a tool or an environment.
    fn check_used(&self) -> Result<()> {
        let without = "without `tools` or `environment_factory`";
        if self.is_used() {
            return Ok(());
        }
        if let Some(most) = self.max_tool_calling_iterations {
            return no_effect(name_of!(self.max_tool_calling_iterations), most, without);
        }
        if let Some(reward) = self.environment_failure_reward {
            return no_effect(name_of!(self.environment_failure_reward), reward, without);
        }
        Ok(())
    }

    /// Returns whether an environment is a program or a server, with a bounded number of sessions.
    pub(crate) fn has_sessions_elsewhere(&self) -> bool {
        let is_elsewhere = |(_, kind): &(Option<String>, Kind<'_>)| matches!(kind, Kind::Command(_) | Kind::OpenEnv(_));
        self.environments().is_ok_and(|environments| environments.iter().any(is_elsewhere))
    }

    /// Returns the environments with their names.
    fn environments(&self) -> Result<Vec<(Option<String>, Kind<'_>)>> {
        let mut environments: Vec<(Option<String>, Kind<'_>)> = Vec::new();
        for written in &self.environment_factory {
            let (name, spec) = split(written);
            let shown = beginning(&without_query(written), 80).into_owned();
            let kind = match spec.split_once(':') {
                Some(("command", line)) if !line.trim().is_empty() => Kind::Command(line),
                Some(("openenv", url)) if url.starts_with("ws://") || url.starts_with("wss://") => Kind::OpenEnv(url),
                Some(("driver", rest @ ("" | "tools"))) if name.is_none() => {
                    Kind::Driver { in_lockstep: !rest.is_empty() }
                }
                None if is_path(spec) => Kind::Python(spec),
                _ => {
                    return refuse(
                        name_of!(self.environment_factory),
                        format!(" = {shown}: expected MODULE.CLASS, command:LINE or openenv:ws://HOST:PORT"),
                    );
                }
            };
            if environments.iter().any(|(other, _)| *other == name) {
                let expected = match name {
                    Some(_) => "names that differ".to_string(),
                    None => format!("a name for each of several, as NAME={shown}"),
                };
                return refuse(name_of!(self.environment_factory), format!(" = {shown}: expected {expected}"));
            }
            environments.push((name, kind));
        }
        if environments.len() > 1 && environments.iter().any(|(name, _)| name.is_none()) {
            return refuse(
                name_of!(self.environment_factory),
                ": expected a name for each of several environments, as NAME=MODULE.CLASS",
            );
        }
        Ok(environments)
    }

    /// Returns the files of functions, classes and programs with their contents, as far as the settings and the files themselves name them.
    pub(crate) fn contents(&self) -> Vec<(String, Vec<u8>)> {
        let files = |(_, kind): &(Option<String>, Kind<'_>)| match kind {
            Kind::Python(path) => function_files(path),
            Kind::Command(line) => program_files(line),
            Kind::OpenEnv(_) | Kind::Driver { .. } => Vec::new(),
        };
        let environment_files = self.environments().unwrap_or_default().iter().flat_map(files).collect::<Vec<_>>();
        let all = self.tools.iter().flat_map(|tool| function_files(tool)).chain(environment_files);
        all.collect::<BTreeMap<_, _>>().into_iter().collect()
    }

    /// Returns the limits of programs and servers.
    pub fn limits(&self) -> Limits {
        Limits {
            call: Duration::from_secs_f64(self.tool_timeout),
            reset: Duration::from_secs_f64(self.reset_timeout),
            output: self.tool_output_limit.0,
            memory: self.tool_memory.map(|memory| memory.0 as u64),
            processes: self.tool_processes.map(|most| most as u64),
            kept: self.tool_env.clone(),
            folder: None,
        }
    }

    /// Returns the environment of these settings without starting it; `None` if there are neither tools nor environments. Programs print to
    /// `log`.
    ///
    /// # Errors
    /// The errors of [`EnvironmentConfig::check`].
    pub fn environment(&self, log: &Log) -> Result<Option<Arc<dyn Environment>>> {
        self.check()?;
        if !self.is_used() {
            return Ok(None);
        }
        let environments = self.environments()?;
        if let [(None, Kind::Driver { in_lockstep })] = environments[..] {
            return Ok(Some(Arc::new(ProgramEnvironment::driver(in_lockstep, self.limits(), log.clone()))));
        }
        let python = |tools: &[String], classes: &[(Option<String>, String)]| -> Arc<dyn Environment> {
            Arc::new(ProgramEnvironment::python(tools, classes, self.limits(), log.clone()))
        };
        // If all environments are Python classes, they and the tools run in one process, as in TRL.
        let classes: Option<Vec<_>> = environments
            .iter()
            .map(|(name, kind)| match kind {
                Kind::Python(path) => Some((name.clone(), (*path).to_string())),
                Kind::Command(_) | Kind::OpenEnv(_) | Kind::Driver { .. } => None,
            })
            .collect();
        if let Some(classes) = classes {
            return Ok(Some(python(&self.tools, &classes)));
        }
        let mut parts: Vec<(Option<String>, Arc<dyn Environment>)> = Vec::new();
        for (name, kind) in environments {
            let environment: Arc<dyn Environment> = match kind {
                Kind::Python(path) => python(&[], &[(None, path.to_string())]),
                Kind::Command(line) => Arc::new(ProgramEnvironment::command(line, self.limits(), log.clone())),
                Kind::OpenEnv(url) => Arc::new(OpenEnv::new(url, self.limits())?),
                // Unreachable: `environments` accepts a driver only without a name, and several environments only with names.
                Kind::Driver { .. } => continue,
            };
            parts.push((name, environment));
        }
        let tools = (!self.tools.is_empty()).then(|| python(&self.tools, &[]));
        Ok(Some(Arc::new(Combined { tools, environments: parts })))
    }
}

/// Divides `NAME=SPEC` into name and specification. Without a name, an equals sign belongs to the program's command line.
fn split(written: &str) -> (Option<String>, &str) {
    let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c));
    match written.split_once('=') {
        Some((name, spec)) if is_name(name) => (Some(name.to_string()), spec),
        _ => (None, written),
    }
}

/// Returns whether this is the path of a function or a class, `module.name`.
fn is_path(text: &str) -> bool {
    crate::reward::is_function_path(text)
}

fn environments_without_queries<S: serde::Serializer>(
    environments: &[String],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(environments.iter().map(|written| match written.split_once("openenv:") {
        Some((head, url)) if head.is_empty() || head.ends_with('=') => format!("{head}openenv:{}", without_query(url)),
        _ => written.clone(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rlhf_base::schema::defaults;
    use serde_json::json;

    fn with(change: impl FnOnce(&mut EnvironmentConfig)) -> EnvironmentConfig {
        let mut config: EnvironmentConfig = defaults();
        change(&mut config);
        config
    }

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_defaults_are_the_documented_limits_and_no_environment() {
        let config: EnvironmentConfig = defaults();
        config.check().unwrap();
        assert!(!config.is_used() && config.environment(&Log::default()).unwrap().is_none());
        assert_eq!(config.limits(), Limits::default());
        assert_eq!((config.max_environments, config.malformed_calls), (64, MalformedCalls::Text));
        let read = EnvironmentConfig::read(&|name| match name {
            "tool_output_limit" => Some(texts(&["1KB"])),
            "malformed_calls" => Some(texts(&["error"])),
            _ => None,
        });
        let read = read.unwrap();
        assert_eq!((read.limits().output, read.malformed_calls), (1000, MalformedCalls::Error));
    }

    #[test]
    fn settings_that_are_not_valid_are_refused_by_name() {
        type Change = fn(&mut EnvironmentConfig);
        let wrong: [(Change, &str); 10] = [
            (|c| c.tools = texts(&["search"]), "tools = search: expected the module and the name of a function"),
            (|c| c.tools = texts(&["a.f", "b.f"]), "tools = b.f: expected names that differ"),
            (|c| c.environment_factory = texts(&["Game"]), "environment_factory = Game: expected MODULE.CLASS"),
            (
                |c| c.environment_factory = texts(&["openenv:http://x"]),
                "expected MODULE.CLASS, command:LINE or openenv:",
            ),
            (|c| c.environment_factory = texts(&["a.B", "a.C"]), "expected a name for each of several"),
            (|c| c.environment_factory = texts(&["x=a.B", "x=a.C"]), "expected names that differ"),
            (|c| c.tool_timeout = 0.0, "tool_timeout = 0: expected a number of seconds above 0"),
            (|c| c.max_environments = 0, "max_environments = 0: expected at least 1"),
            (|c| c.tool_output_limit = ByteSize(0), "tool_output_limit = 0: expected at least 1"),
            (
                |c| c.max_tool_calling_iterations = Some(3),
                "max_tool_calling_iterations = 3 has no effect without `tools`",
            ),
        ];
        for (change, expected) in wrong {
            let error = with(change).check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn environments_are_told_apart_by_their_kind_and_name() {
        let config = with(|c| {
            let command = "run=command:A=1 ./env --x=2";
            c.environment_factory = texts(&["game=my.games.Chess", command, "far=openenv:wss://h/e?key=secret"]);
        });
        let environments = config.environments().unwrap();
        let named = |name: &str| Some(name.to_string());
        assert_eq!(environments[0], (named("game"), Kind::Python("my.games.Chess")));
        assert_eq!(environments[1], (named("run"), Kind::Command("A=1 ./env --x=2")));
        assert_eq!(environments[2], (named("far"), Kind::OpenEnv("wss://h/e?key=secret")));
        let one = with(|c| c.environment_factory = texts(&["command:A=1 ./env"]));
        assert_eq!(one.environments().unwrap(), [(None, Kind::Command("A=1 ./env"))]);
        for (written, in_lockstep) in [("driver:", false), ("driver:tools", true)] {
            let driver_config = with(|c| c.environment_factory = texts(&[written]));
            assert_eq!(driver_config.environments().unwrap(), [(None, Kind::Driver { in_lockstep })]);
            assert_eq!(driver_config.environment(&Log::default()).unwrap().unwrap().in_lockstep(), in_lockstep);
        }
        assert!(with(|c| c.environment_factory = texts(&["x=driver:"])).check().is_err());
        let written = serde_json::to_value(&config).unwrap();
        assert_eq!(written["environment_factory"][2], json!("far=openenv:wss://h/e?..."));
    }
}
