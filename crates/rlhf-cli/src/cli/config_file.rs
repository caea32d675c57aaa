//! The configuration file: its keys are the names of flags, and each value must be accepted by its flag.

use std::collections::BTreeMap;
use std::path::Path;

use rlhf::run::has_driver;
use rlhf::schema::Refusals;
use rlhf::{Origin, Result};

use super::foreign::is_warmup_ratio;
use super::keys::Keys;
use super::setting::Setting;
use super::yaml::{Entry, read_yaml};

/// Reads the settings in the YAML file `path`, by the names of their flags. Entries that are refused go to `refusals`, with their lines.
///
/// # Errors
/// If the file cannot be read, or is not a map of settings.
pub(super) fn read_config(path: &Path, keys: &Keys<'_>, refusals: &mut Refusals) -> Result<Vec<Setting>> {
    let text = rlhf::files::read_settings(path)?;
    let mut settings: Vec<Setting> = Vec::new();
    let entries = match read_yaml(&text, keys) {
        Ok(mut entries) => {
            rename_warmup(&mut entries);
            entries
        }
        Err((line, message)) => {
            refusals.refuse_at(origin(path, line), message, [""; 0]);
            return std::mem::take(refusals).end().map(|()| settings);
        }
    };
    let mut spelled = BTreeMap::new();
    for Entry { mut setting, error } in entries {
        let name = keys.canonical(&setting.key);
        // A file may have two names of a flag, as a whole configuration of TRL does, if one is null or both have the same value.
        let earlier = settings.iter().position(|earlier| earlier.key == name);
        let is_null = setting.values.is_empty() && error.is_none();
        let is_same = earlier.is_some_and(|place| error.is_none() && settings[place].values == setting.values)
            && spelled.get(&name).is_some_and(|earlier| *earlier != setting.key);
        if earlier.is_some() && is_null || is_same {
            continue;
        }
        let nulled = earlier.filter(|&place| settings[place].values.is_empty());
        nulled.into_iter().for_each(|place| drop(settings.remove(place)));
        let is_set = earlier.is_some() && nulled.is_none();
        match refused(keys, &setting, error, is_set) {
            Some((message, about)) => refusals.refuse_at(origin(path, setting.line), message, about),
            None => {
                refusals.call(&name, &setting.key, origin(path, setting.line));
                spelled.insert(name.clone(), std::mem::replace(&mut setting.key, name));
                settings.push(setting);
            }
        }
    }
    Ok(settings)
}

/// The place of a setting in the file `path`. If the Python package wrote the file, for its classes, the place is in Python.
pub(super) fn origin(path: &Path, line: u64) -> Origin {
    if has_driver() { Origin::Python } else { Origin::Line { path: path.into(), line } }
}

/// Renames a `warmup_steps` that is a share of the updates, which transformers 5 allows, to `warmup_ratio`, unless that is set too.
fn rename_warmup(entries: &mut Vec<Entry>) {
    const KEYS: [&str; 2] = ["warmup_steps", "warmup_ratio"];
    let is_share = |setting: &Setting| matches!(&setting.values[..], [value] if is_warmup_ratio(value));
    let steps = entries.iter().filter(|entry| entry.setting.key.ends_with(KEYS[0]) && is_share(&entry.setting));
    let names: Vec<String> = steps.map(|entry| entry.setting.key.clone()).collect();
    for name in names.iter().filter(|name| name.rsplit('.').next() == Some(KEYS[0])) {
        let ratio = name.replace(KEYS[0], KEYS[1]);
        let is_zero = |value: &String| value.parse::<f64>() == Ok(0.0);
        if !entries.iter().any(|entry| entry.setting.key == ratio && !entry.setting.values.iter().all(is_zero)) {
            entries.retain(|entry| entry.setting.key != ratio);
            entries
                .iter_mut()
                .filter(|entry| entry.setting.key == *name)
                .for_each(|entry| entry.setting.key = ratio.clone());
        }
    }
}

/// Returns why an entry is refused, and the names of the flags that the refusal is about.
fn refused(
    keys: &Keys<'_>,
    setting: &Setting,
    error: Option<&'static str>,
    is_set: bool,
) -> Option<(String, Option<String>)> {
    let Setting { key, values, .. } = setting;
    let name = keys.canonical(key);
    let flag = || name.rsplit('.').next().map(String::from);
    if let Some(error) = error {
        return Some((format!("`{key}`: {error}"), flag()));
    }
    if is_set {
        return Some((format!("`{key}` is set twice"), Some(name)));
    }
    if keys.section(key).is_some() {
        return None;
    }
    if keys.flag(key).is_none() {
        return Some((keys.unknown(key), keys.nearest(key).map(String::from)));
    }
    let (value, expected) = values.iter().find_map(|value| Some((value, keys.refusal(key, value)?)))?;
    Some((format!("`{key}`: {expected}, found `{value}`"), flag()))
}

#[cfg(test)]
mod tests {
    use crate::cli::testing::{PPO, file_error, least, parse_words, with_file};

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
    fn two_names_of_a_flag_may_have_the_same_value() {
        for text in ["gradient_checkpointing: true\nactivation_checkpointing: true\n", "kl-coef: 1\ninit_kl_coef: 1\n"]
        {
            let file = with_file(text, &PPO);
            assert!(file.is_ok(), "{text}: {file:?}");
        }
    }

    #[test]
    fn checks_of_several_settings_have_the_line_of_the_one_to_change_and_its_name() {
        for (command, text, start) in [
            (
                "ppo",
                "seed: 1\nvalue_lora_r: 4\n",
                "run.yaml:2: value_lora_r is given, and the value model gets no adapter",
            ),
            ("ppo", "value_lora_target_modules: [a]\n", "run.yaml:1: value_lora_target_modules is given, and"),
            ("ppo", "init_kl_coef: -1\n", "run.yaml:1: init_kl_coef = -1: expected a number of 0 or more"),
            (
                "grpo",
                "loss_type: sapo\nepsilon_high: 0.3\n",
                "run.yaml:2: epsilon_high = 0.3 has no effect with loss_type = sapo or vespo",
            ),
            (
                "grpo",
                "epsilon: 0.3\ndelta: 1.2\n",
                "run.yaml:2: delta = 1.2: expected a number above 1 + epsilon = 1.3: ",
            ),
            (
                "grpo",
                "stop_token: eos\nstop_token_id: 3\n",
                "run.yaml:1: stop_token = eos and stop_token_id = 3 exclude",
            ),
            (
                "sft",
                "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: -1}\n",
                "run.yaml:2: power = -1: expected a number above 0",
            ),
        ] {
            let error = with_file(text, &least(command)).unwrap_err();
            assert!(error.lines().any(|line| line.starts_with(start)), "{error}\nhas no {start}");
        }
    }

    #[test]
    fn each_error_of_the_file_is_one_line_with_its_place() {
        for (text, message) in [
            ("seed: 1\nseed: 2\n", "run.yaml:2: `seed` is set twice"),
            ("seed: 1\nseed: 1\n", "run.yaml:2: `seed` is set twice"),
            ("kl-coef: 1\nkl_coef: 2\n", "run.yaml:2: `kl_coef` is set twice"),
            ("\nseed: abc\n", "run.yaml:2: `seed`: expected a whole number, 0 or more, found `abc`"),
            ("kl_coef: .inf\n", "run.yaml:1: `kl_coef`: expected a number, found `.inf`"),
            ("bf16: maybe\n", "run.yaml:1: `bf16`: expected true or false, found `maybe`"),
            ("kl_estimator: k2\n", "run.yaml:1: `kl_estimator`: expected one of k1, k3, abs, mse, full, found `k2`"),
            (
                "value_lr_scheduler_type: step\n",
                "run.yaml:1: `value_lr_scheduler_type`: expected linear, cosine, cosine_with_min_lr, \
                 cosine_with_restarts, polynomial, inverse_sqrt, warmup_stable_decay, constant or constant_with_warmup, found \
                 `step`",
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
