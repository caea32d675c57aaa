//! `rlhf completions`: a script by which a shell completes commands and flags.

use std::io::{self, Write};

use clap::{Arg, Command};
use clap_complete::{Shell, generate};
use rlhf::settings::{self, CompletionsConfig};
use rlhf::{Error, Result};

use super::commands::rlhf_command;

/// Prints the script.
///
/// # Errors
/// If standard output cannot be written.
pub(crate) fn completions(config: &CompletionsConfig) -> Result<()> {
    let written = io::stdout().lock().write_all(&script(config.shell));
    written.map_err(|source| Error::Io { action: "write", path: "standard output".into(), source })
}

fn script(shell: settings::Shell) -> Vec<u8> {
    let shell = match shell {
        settings::Shell::Bash => Shell::Bash,
        settings::Shell::Zsh => Shell::Zsh,
        settings::Shell::Fish => Shell::Fish,
    };
    // Names of other systems are accepted, but not offered.
    let shown = |command: &Command| {
        let is_shown = |arg: &&Arg| arg.get_id() != "help" && (!arg.is_hide_set() || arg.is_positional());
        let args = command.get_arguments().filter(is_shown).cloned();
        let about = command.get_about().cloned().unwrap_or_default();
        Command::new(command.get_name().to_string()).about(about).disable_help_flag(true).args(args)
    };
    let all = rlhf_command();
    let mut rlhf = Command::new("rlhf").disable_help_subcommand(true).subcommands(all.get_subcommands().map(shown));
    let mut script = Vec::new();
    generate(shell, &mut rlhf, "rlhf", &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Task;
    use crate::cli::testing::parse_words;

    #[test]
    fn a_script_has_the_commands_and_the_flags_that_help_shows() {
        for (name, shell) in
            [("bash", settings::Shell::Bash), ("zsh", settings::Shell::Zsh), ("fish", settings::Shell::Fish)]
        {
            let Task::Completions(config) = parse_words(&["completions", name]).unwrap() else { panic!() };
            assert_eq!(config.shell, shell);
            let script = String::from_utf8(script(shell)).unwrap();
            for word in ["grpo", "max_completion_length", "reward_funcs", "load_in_4bit"] {
                assert!(script.contains(word), "{name}: {word}");
            }
            assert!(!script.contains("vllm_mode"), "{name}");
        }
        let missing = parse_words(&["completions"]).unwrap_err();
        assert_eq!(missing, "the following required arguments were not provided: <SHELL>");
        let error = parse_words(&["completions", "tcsh"]).unwrap_err();
        assert!(error.contains("tcsh") && error.contains("bash"), "{error}");
    }
}
