//! `rlhf session`: says where its socket is, and reads the settings of an engine as those of `rlhf ppo`.

use std::io::{self, Write};
use std::path::Path;

use crate::session::Host;
use rlhf::dist::World;
use rlhf::safe_text::one_line;
use rlhf::settings::{PpoConfig, SessionConfig};
use rlhf::{Error, Result};
use serde_json::{Map, Value};

use super::{Stop, Task, parse};

/// Flags that `rlhf ppo` requires, and an engine has no use for: its client has the prompts, and says where to save.
const UNUSED: [&str; 3] = ["ppo", "--dataset_name=prompts.jsonl", "--output_dir=."];

/// Answers the requests of one client on the ranks `world`; `take_panic` returns the message of the last panic.
pub(crate) fn session(config: &SessionConfig, world: &World, take_panic: fn() -> String) -> Result<()> {
    let listening = |path: &Path| {
        let mut out = io::stdout();
        let line = format!("waiting for a client at {}", one_line(&path.display().to_string()));
        writeln!(out, "{line}").and_then(|()| out.flush()).map_err(Error::io("write to", "standard output"))
    };
    let host = Host { world, read_settings: &engine_settings, take_panic, listening: &listening };
    crate::session::session(config, &host)
}

/// Reads settings of `rlhf ppo` with the preset of DeepSpeed-Chat, by its names too.
fn engine_settings(settings: &Map<String, Value>) -> Result<PpoConfig> {
    let mut words: Vec<String> = ["rlhf"].iter().chain(&UNUSED).map(ToString::to_string).collect();
    if settings.get("preset").is_none_or(Value::is_null) {
        words.push("--preset=deepspeed-chat".into());
    }
    for (name, value) in settings {
        if !name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_') {
            return Err(Error::Usage(format!("{name}: expected the name of a setting of `rlhf ppo`")));
        }
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), String::from);
        match value {
            Value::Null => {}
            Value::Array(values) => words.extend(values.iter().map(|value| format!("--{name}={}", text(value)))),
            value => words.push(format!("--{name}={}", text(value))),
        }
    }
    match parse(words.into_iter().map(Into::into)) {
        Ok(parsed) => match parsed.task {
            Task::Ppo(config) => Ok(config),
            _ => Err(Error::Usage("expected settings of `rlhf ppo`".into())),
        },
        Err(Stop::Error(error)) => Err(error),
        Err(Stop::Help(help)) => Err(Error::Usage(help.to_string())),
        Err(Stop::ShortHelp(_)) => Err(Error::Usage("help: expected a setting".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(settings: &Value) -> Result<PpoConfig, String> {
        engine_settings(settings.as_object().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn an_engine_has_the_settings_of_deepspeed_chat_by_its_names() {
        let config = read(&json!({
            "actor_model_name_or_path": "a", "critic_model_name_or_path": "c", "max_answer_seq_len": 9, "enable_ema": true,
            "actor_learning_rate": 1e-3, "kl_coef": 0.3, "seed": null,
        }));
        let config = config.unwrap();
        assert_eq!((config.response_length, config.kl.kl_coef, config.ema.enable_ema), (9, 0.3, true));
        assert_eq!((config.learning_rate, config.sft_model_path.to_str()), (1e-3, Some("a")));
        for (settings, expected) in [
            (json!({"actor_model_name_or_path": "a", "nonsense": 1}), "nonsense"),
            (json!({"actor_model_name_or_path": "a", "x --help": 1}), "expected the name of a setting"),
            (json!({"actor_model_name_or_path": "a", "critic_model_name_or_path": "c", "gamma": "x"}), "gamma"),
        ] {
            let error = read(&settings).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
