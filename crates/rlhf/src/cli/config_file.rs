//! The configuration file: its keys are the names of flags, and each value is accepted by its flag.

use std::path::Path;

use clap::{Arg, Command};
use rlhf::Result;
use rlhf::flag::Refusals;

use super::errors::{nearest, refusal};
use super::layers::Setting;
use super::yaml::{Found, read_yaml};

/// Flags that are no keys of a configuration file.
pub(super) const NOT_SETTINGS: [&str; 2] = ["config", "help"];

/// The keys that a configuration file may have: the names of flags.
pub(super) struct Keys<'c> {
    /// The commands whose flags may stand at the top.
    pub(super) top: Vec<&'c Command>,
    /// Those that may have a section of their own.
    pub(super) sections: Vec<&'c Command>,
}

impl<'c> Keys<'c> {
    pub(super) fn section(&self, name: &str) -> Option<&'c Command> {
        self.sections.iter().copied().find(|command| command.get_name() == name)
    }

    /// The commands that a key is looked for in, and its name there: behind the section's and a point.
    fn place<'k>(&self, key: &'k str) -> (Vec<&'c Command>, &'k str) {
        match key.split_once('.') {
            Some((section, name)) => (self.section(section).into_iter().collect(), name),
            None => (self.top.clone(), key),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Option<&'c Arg> {
        let (commands, name) = self.place(key);
        let mut flags = commands.into_iter().flat_map(Command::get_arguments);
        let other = |arg: &Arg| arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name));
        flags.find(|arg| (arg.get_id() == name || other(arg)) && !NOT_SETTINGS.contains(&name))
    }

    /// Our own name of a key, which may be another system's.
    fn own(&self, key: &str) -> String {
        match (self.flag(key), key.split_once('.')) {
            (None, _) => key.to_string(),
            (Some(arg), None) => arg.get_id().to_string(),
            (Some(arg), Some((section, _))) => format!("{section}.{}", arg.get_id()),
        }
    }

    /// The key most like `key`, if any is like it.
    fn nearest(&self, key: &str) -> Option<&'c str> {
        let (commands, name) = self.place(key);
        let flags = commands.into_iter().flat_map(|command| command.get_arguments()).filter(|arg| !arg.is_hide_set());
        let flags = flags.map(|arg| arg.get_id().as_str()).filter(|name| !NOT_SETTINGS.contains(name));
        let sections = self.sections.iter().map(|command| command.get_name()).filter(|_| !key.contains('.'));
        nearest(name, flags.chain(sections))
    }

    /// What is wrong with a key that is no flag's.
    fn unknown(&self, key: &str) -> String {
        let hint = match (self.nearest(key), &self.place(key).0[..]) {
            (Some(name), _) => format!("did you mean `{name}`?"),
            (None, [command]) => {
                format!("`rlhf {} --help` lists the flags, whose names are the keys", command.get_name())
            }
            (None, _) => "`--help` of each step's command lists its flags, whose names are the keys".into(),
        };
        format!("unknown key `{key}`; {hint}")
    }
}

/// Reads the settings in the YAML file `path`, each one accepted by its flag; what is not is put with the refusals.
///
/// # Errors
/// If the file cannot be read, or is not a map of settings.
pub(super) fn read_config(path: &Path, keys: &Keys<'_>, refusals: &mut Refusals) -> Result<Vec<Setting>> {
    let text = rlhf::files::read_settings(path)?;
    let place = |line: u64, message: String| format!("{}:{line}: {message}", path.display());
    let mut settings: Vec<Setting> = Vec::new();
    let found = match read_yaml(&text, keys) {
        Ok(found) => found,
        Err((line, message)) => {
            refusals.refuse(place(line, message), [""; 0]);
            return std::mem::take(refusals).end().map(|()| settings);
        }
    };
    for Found { mut setting, fault } in found {
        if let Some(fault) = fault {
            let about = keys.own(&setting.key);
            refusals.refuse(place(setting.line, format!("`{}`: {fault}", setting.key)), about.rsplit('.').take(1));
            continue;
        }
        let Setting { key, line, values } = &setting;
        let own = keys.own(key);
        if settings.iter().any(|earlier| earlier.key == own) {
            refusals.refuse(place(*line, format!("`{key}` is set twice")), [own]);
            continue;
        }
        if keys.section(key).is_none() {
            let Some(arg) = keys.flag(key) else {
                let near = keys.nearest(key).map(str::to_string);
                refusals.refuse(place(*line, keys.unknown(key)), near);
                continue;
            };
            let mut refused = values.iter().filter_map(|value| Some((value, refusal(arg, value)?)));
            if let Some((value, expected)) = refused.next() {
                let line = place(*line, format!("`{key}`: {expected}, found `{value}`"));
                refusals.refuse(line, own.rsplit('.').take(1));
                continue;
            }
        }
        // Another system's name for it.
        setting.key = own;
        settings.push(setting);
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use crate::cli::testing::{file_error, parse_words};

    #[test]
    fn an_unknown_key_names_the_file_the_line_and_the_nearest_key() {
        assert_eq!(
            file_error("seed: 1\nlearning_rat: 1\n"),
            "run.yaml:2: unknown key `learning_rat`; did you mean `learning_rate`?"
        );
        assert_eq!(
            file_error("zzz: {a: [1]}\n"),
            "run.yaml:1: unknown key `zzz`; `rlhf ppo --help` lists the flags, whose names are the keys"
        );
        assert!(file_error("config: other.yaml\n").starts_with("run.yaml:1: unknown key `config`"));
    }

    #[test]
    fn each_fault_of_the_file_is_one_line_with_its_place() {
        for (text, message) in [
            ("seed: 1\nseed: 2\n", "run.yaml:2: `seed` is set twice"),
            ("kl-coef: 1\nkl_coef: 2\n", "run.yaml:2: `kl_coef` is set twice"),
            ("\nseed: abc\n", "run.yaml:2: `seed`: expected a whole number, 0 or more, found `abc`"),
            ("kl_coef: .inf\n", "run.yaml:1: `kl_coef`: expected a number, found `.inf`"),
            ("bf16: maybe\n", "run.yaml:1: `bf16`: expected true or false, found `maybe`"),
            ("kl_estimator: k2\n", "run.yaml:1: `kl_estimator`: expected one of k1, k3, abs, mse, full, found `k2`"),
            (
                "value_lr_scheduler_type: step\n",
                "run.yaml:1: `value_lr_scheduler_type`: expected linear, cosine, cosine_with_restarts, polynomial, \
                 inverse_sqrt, constant or constant_with_warmup, found `step`",
            ),
            ("output_dir: ''\n", "run.yaml:1: `output_dir`: expected a path, found ``"),
            ("seed:\n  value: 1\n", "run.yaml:1: `seed`: expected one value, found a list or a map"),
            ("seed: [1]\n", "run.yaml:1: `seed`: expected one value, found a list or a map"),
            ("- seed\n", "run.yaml:1: expected lines of the form `key: value`"),
            ("seed\n", "run.yaml:1: expected lines of the form `key: value`"),
            ("seed: 1\n---\nseed: 2\n", "run.yaml:3: expected one YAML document, found two"),
            ("seed: 1\n bf16: 1\n", "run.yaml:2: not valid YAML: mapping values are not allowed in this context"),
        ] {
            assert_eq!(file_error(text), message);
        }
        let missing = parse_words(&["ppo", "--config", "no/such/run.yaml"]).unwrap_err();
        assert!(missing.starts_with("no/such/run.yaml: cannot read: "), "{missing}");
    }
}
