//! Limits of what tools and environments may use: time, output, memory, processes and environment variables.

use rlhf_base::dist::launch::VARIABLES;
use rlhf_base::{Error, Result};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

/// Words in the names of variables that hold secrets.
const SECRETS: [&str; 10] =
    ["TOKEN", "TOKENS", "PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "SECRETS", "CREDENTIALS", "APIKEY", "NETRC"];

/// Further variables that give access to something.
const ACCESS: [&str; 3] = ["SSH_AUTH_SOCK", "AWS_PROFILE", "KUBECONFIG"];

/// Limits of a program or a server.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Time of a call.
    pub call: Duration,
    /// Time in which a session opens and ends, and in which a process starts.
    pub reset: Duration,
    /// Size of a result in bytes; a longer one is cut.
    pub output: usize,
    /// Address space of each process in bytes.
    pub memory: Option<u64>,
    /// Number of processes and threads of the user, including those of other programs, above which no further one is started.
    pub processes: Option<u64>,
    /// Environment variables that are kept although they look like secrets.
    pub kept: Vec<String>,
    /// Working directory of programs; `None` for that of this process.
    pub folder: Option<PathBuf>,
}

impl Default for Limits {
    /// 30 s for a call, 60 s for the beginning and the end, 64 kB of output.
    fn default() -> Self {
        Self {
            call: Duration::from_secs(30),
            reset: Duration::from_secs(60),
            output: 64_000,
            memory: None,
            processes: None,
            kept: Vec::new(),
            folder: None,
        }
    }
}

impl Limits {
    /// Removes the variables of ranks and all secrets from a program's environment, and sets its working directory.
    pub(super) fn prepare(&self, command: &mut Command) {
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        for name in VARIABLES {
            command.env_remove(name);
        }
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if is_secret(&text) && !self.kept.iter().any(|kept| *kept == text) {
                command.env_remove(&name);
            }
        }
    }

    /// Sets the memory and process limits of a program that has just been started.
    ///
    /// # Errors
    /// If the system refuses them.
    pub(super) fn apply(&self, child: &Child) -> Result<()> {
        for (resource, name, limit) in
            [(Resource::As, "tool_memory", self.memory), (Resource::Nproc, "tool_processes", self.processes)]
        {
            if let Some(limit) = limit {
                let limits = Rlimit { current: Some(limit), maximum: Some(limit) };
                let set = prlimit(Some(Pid::from_child(child)), resource, limits);
                set.map_err(|e| Error::Run(format!("{name} = {limit}: the system refuses this limit: {e}")))?;
            }
        }
        Ok(())
    }

    /// Returns what the policy sees of a result of `bytes` bytes, with a note about what was cut. `text` is the beginning of the result.
    pub(super) fn cut(&self, mut text: String, bytes: usize) -> String {
        if text.len() <= self.output && bytes <= text.len() {
            return text;
        }
        let mut end = self.output.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        let left = bytes.saturating_sub(end);
        text + &format!("\n[... {left} more bytes were cut]")
    }
}

/// Returns whether a variable of this name holds a secret, by its words.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let mut words = name.split('_');
    ACCESS.contains(&name.as_str())
        || words.any(|word| SECRETS.contains(&word))
        || name.ends_with("_KEY")
        || name.ends_with("_KEY_ID")
        || name.contains("API_KEY")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_the_hub_the_trackers_and_clouds_are_secrets() {
        for name in [
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "WANDB_API_KEY",
            "MLFLOW_TRACKING_TOKEN",
            "MLFLOW_TRACKING_PASSWORD",
            "OPENAI_API_KEY",
            "RLHF_REWARD_TOKEN",
            "RLHF_OPENENV_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "SSH_AUTH_SOCK",
            "hf_token",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in ["PATH", "HOME", "TOKENIZERS_PARALLELISM", "HF_HOME", "RLHF_PYTHON", "KEYBOARD", "MONKEY"] {
            assert!(!is_secret(name), "{name}");
        }
    }

    #[test]
    fn a_long_result_is_cut_between_characters_with_a_mark() {
        let limits = Limits { output: 4, ..Limits::default() };
        assert_eq!(limits.cut("abcd".into(), 4), "abcd");
        // Two bytes of `é` do not fit into the fourth.
        assert_eq!(limits.cut("abcé".into(), 5), "abc\n[... 2 more bytes were cut]");
        // The worker has cut it before: 100 - 4 bytes are missing.
        assert_eq!(limits.cut("abcde".into(), 100), "abcd\n[... 96 more bytes were cut]");
    }
}
