//! The model card, and the command that tries a model.

use crate::data::{messages_field, prompt_field};
use crate::terminal;
use rlhf_base::Result;
use rlhf_base::weights::write_text;
use rlhf_hub::is_hub_name;
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;

/// The content of a model card.
pub(crate) struct Card<'a> {
    /// The command that trained the model.
    pub(crate) command: &'static str,
    /// The model that training started from, or that the adapter belongs to: a folder or a name of the hub.
    pub(crate) base_model: Option<&'a Path>,
    /// Whether it is an adapter, which PEFT opens.
    pub(crate) is_adapter: bool,
    /// Other rows of its table.
    pub(crate) facts: &'a [(&'a str, String)],
}

impl Card<'_> {
    /// Writes the card of the model in `dir` beside it, with the command line that trained it.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let title = dir.file_name().map_or("Model".into(), |name| name.to_string_lossy());
        write_text(&dir.join("README.md"), &self.text(&title, terminal::command_line().as_deref()))
    }

    fn text(&self, title: &str, command_line: Option<&str>) -> String {
        let mut card = String::from("---\n");
        // The hub refuses a card whose base is no name on the hub, such as a folder.
        let is_name = |base: &&Path| base.to_str().is_some_and(is_hub_name) && !base.exists();
        if let Some(base) = self.base_model.filter(is_name) {
            // A JSON string is also a YAML string.
            let _ = writeln!(card, "base_model: {}", Value::from(base.display().to_string()));
        }
        let library = if self.is_adapter { "peft" } else { "transformers" };
        let command = self.command;
        let _ = write!(card, "library_name: {library}\ntags:\n- rlhf\n- {command}\n---\n\n# {title}\n\n");
        let _ = write!(card, "Trained by `rlhf {command}` {}", env!("CARGO_PKG_VERSION"));
        match command_line {
            // Indented, because backticks in the line would end a fenced block.
            Some(line) => drop(write!(card, ":\n\n    {}\n\n", line.replace('\n', "\n    "))),
            None => card.push_str(".\n\n"),
        }
        card.push_str("| | |\n|---|---|\n");
        for (name, value) in self.facts {
            let _ = writeln!(card, "| {name} | {} |", value.replace('|', "\\|"));
        }
        card.push_str("\n`config.yaml` holds every setting of the run, `metrics.jsonl` its course.\n");
        card
    }
}

/// Most characters of a prompt that is shown in a command line.
const MOST_SHOWN: usize = 200;

/// Returns the command line that tries the language model in `dir`, with the prompt of `row`, a row of its data. A prompt that is long or
/// not a text is left out: `rlhf generate` then asks for one.
pub(crate) fn command_to_try(dir: &Path, row: Option<&Value>, max_new_tokens: Option<usize>) -> Vec<String> {
    let mut words = ["generate", "--model_name_or_path"].map(String::from).to_vec();
    words.insert(0, terminal::program());
    words.push(dir.display().to_string());
    let last_question = |messages: &Value| {
        let messages = messages.as_array()?;
        let last = messages.iter().rev().find(|message| message["role"] == "user")?;
        Some(last["content"].as_str().map(String::from))
    };
    let first_words = |row: &Value| {
        let text = row.get("text")?.as_str()?;
        Some(text.split_whitespace().take(4).collect::<Vec<_>>().join(" "))
    };
    let (prompt, is_chat) = match row {
        None => (None, false),
        Some(row) => match prompt_field(row)
            .map(|(_, prompt)| prompt)
            .or_else(|| messages_field(row).map(|(_, messages)| messages))
        {
            Some(Value::String(prompt)) => (Some(prompt.clone()), false),
            Some(messages) => last_question(messages).map_or((None, false), |prompt| (prompt, true)),
            None => (first_words(row), false),
        },
    };
    if is_chat {
        words.push("--apply_chat_template".into());
    }
    if let Some(most) = max_new_tokens {
        words.extend(["--max_new_tokens".into(), most.to_string()]);
    }
    let fits = |prompt: &String| {
        !prompt.is_empty() && prompt.chars().count() <= MOST_SHOWN && !prompt.chars().any(char::is_control)
    };
    if let Some(prompt) = prompt.filter(fits) {
        words.extend(prompt.starts_with('-').then(|| "--".into()));
        words.push(prompt);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_command_that_tries_a_model_has_a_prompt_of_its_data() {
        let command = |row: Value, most| command_to_try(Path::new("my runs/ppo"), Some(&row), most)[1..].join(" ");
        let words = "generate --model_name_or_path my runs/ppo";
        assert_eq!(command(json!({"prompt": "The movie"}), None), format!("{words} The movie"));
        assert_eq!(command(json!({"query": "-5 is"}), Some(8)), format!("{words} --max_new_tokens 8 -- -5 is"));
        let system = json!({"role": "system", "content": "Be brief."});
        let chat = json!([system, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]);
        for name in ["prompt", "messages", "conversations"] {
            assert_eq!(command(json!({name: chat.clone()}), None), format!("{words} --apply_chat_template Who?"));
        }
        assert_eq!(command(json!({"text": "One two  three four five"}), None), format!("{words} One two three four"));
        // A prompt that cannot be shown in a line is left out.
        for row in [json!({"prompt": "a\nb"}), json!({"prompt": "x".repeat(300)}), json!({"prompt_ids": [1]})] {
            assert_eq!(command(row, None), words);
        }
    }

    #[test]
    fn a_model_card_names_its_base_its_library_and_the_command_line() {
        let facts = [("updates", "3".to_string())];
        let base = Path::new("org/base-7b");
        let card = Card { command: "sft", base_model: Some(base), is_adapter: true, facts: &facts };
        let text = card.text("mine", Some("rlhf sft --output_dir 'a b'"));
        let (front, body) = text.strip_prefix("---\n").unwrap().split_once("---\n").unwrap();
        let front: Value = serde_saphyr::from_str(front).unwrap();
        assert_eq!(front, json!({"base_model": base, "library_name": "peft", "tags": ["rlhf", "sft"]}));
        assert!(body.contains("`rlhf sft` ") && body.contains(":\n\n    rlhf sft --output_dir 'a b'\n\n"), "{body}");
        for base in [None, Some(Path::new("src")), Some(Path::new("./runs/sft")), Some(Path::new("/runs/sft"))] {
            let text = Card { base_model: base, is_adapter: true, ..card }.text("mine", None);
            assert!(text.starts_with("---\nlibrary_name: peft\n"), "a folder is no base on the hub: {text}");
        }
        let text = Card { base_model: None, is_adapter: false, ..card }.text("mine", None);
        assert!(text.starts_with("---\nlibrary_name: transformers\n") && text.contains("| updates | 3 |"), "{text}");
    }
}
