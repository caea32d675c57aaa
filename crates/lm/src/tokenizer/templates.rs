//! The chat templates of a tokenizer by name: several may be in `tokenizer_config.json`, or beside `chat_template.jinja`.

use super::chat::ChatTemplate;
use super::{CHAT_TEMPLATE, TOKENIZER_CONFIG};
use rlhf_base::{Error, Result, files};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Name of the template of conversations without tools, and of those with tools where there is no other.
const DEFAULT: &str = "default";

/// Name of the template of conversations with tools.
const TOOL_USE: &str = "tool_use";

/// The folder of further templates.
pub const FURTHER: &str = "additional_chat_templates";

/// Chat templates with their names.
#[derive(Debug, Clone, Default)]
pub(super) struct Templates(Vec<(String, ChatTemplate)>);

impl Templates {
    /// Reads the templates of the folder `dir`, whose `tokenizer_config.json` is `config`. Files count in place of those in the configuration,
    /// as in transformers.
    ///
    /// # Errors
    /// If a file cannot be read or is not UTF-8. Errors in the syntax are reported on first use.
    pub(super) fn read(dir: &Path, config: &Value) -> Result<Self> {
        let mut files = Vec::new();
        if dir.join(CHAT_TEMPLATE).is_file() {
            files.push((DEFAULT.to_string(), dir.join(CHAT_TEMPLATE)));
        }
        files.extend(further(&dir.join(FURTHER)));
        if !files.is_empty() {
            let read = |(name, path): (String, PathBuf)| Ok((name, read_template(&path)?.1));
            return Ok(Self(files.into_iter().map(read).collect::<Result<_>>()?));
        }
        let new = |source: &str| ChatTemplate::new(dir.join(TOKENIZER_CONFIG), source);
        let one = |entry: &Value| Some((entry["name"].as_str()?.to_string(), new(entry["template"].as_str()?)));
        let named = |(name, source): (&String, &Value)| Some((name.clone(), new(source.as_str()?)));
        Ok(Self(match &config["chat_template"] {
            Value::String(source) => vec![(DEFAULT.into(), new(source))],
            Value::Array(entries) => entries.iter().filter_map(one).collect(),
            Value::Object(entries) => entries.iter().filter_map(named).collect(),
            _ => Vec::new(),
        }))
    }

    /// The template of `file` alone, with the bytes of the file.
    ///
    /// # Errors
    /// As [`Templates::read`].
    pub(super) fn from_file(file: &Path) -> Result<(Vec<u8>, Self)> {
        let (bytes, template) = read_template(file)?;
        Ok((bytes, Self(vec![(DEFAULT.into(), template)])))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the template of a conversation with these variables, as transformers chooses it: `tool_use` if there are tools, else `default`.
    ///
    /// # Errors
    /// If there is neither.
    pub(super) fn choose(&self, variables: &Map<String, Value>, dir: &Path) -> Result<&ChatTemplate> {
        // Of several with one name, the last one counts.
        let named = |wanted: &str| self.0.iter().rfind(|(name, _)| name == wanted).map(|(_, template)| template);
        let has_tools = variables.get("tools").is_some_and(|tools| !tools.is_null());
        let with_tools = has_tools.then(|| named(TOOL_USE)).flatten();
        with_tools.or_else(|| named(DEFAULT)).ok_or_else(|| match self.0.first() {
            None => Error::Run(format!(
                "a list of messages needs a chat template: expected `chat_template` in tokenizer_config.json, or a {CHAT_TEMPLATE}, in {}, \
                 found neither",
                dir.display()
            )),
            Some((_, first)) => {
                let names: Vec<String> = self.0.iter().map(|(name, _)| format!("`{name}`")).collect();
                Error::Run(format!(
                    "{}: expected a chat template with the name `{DEFAULT}`, found {}: save the one to use as {CHAT_TEMPLATE} in {}",
                    first.file().display(),
                    names.join(", "),
                    dir.display()
                ))
            }
        })
    }

    /// Whether the two have the same templates.
    pub(super) fn are_same(&self, other: &Self) -> bool {
        let mut pairs = self.0.iter().zip(&other.0);
        self.0.len() == other.0.len() && pairs.all(|(a, b)| a.0 == b.0 && a.1.is_same(&b.1))
    }

    /// Describes them in a few words, for the log.
    pub(super) fn describe(&self) -> String {
        // The folder may be one of the user's, and this is in the card that is pushed.
        let file =
            |template: &ChatTemplate| template.file().file_name().unwrap_or_default().to_string_lossy().into_owned();
        match self.0.as_slice() {
            [] => "none".into(),
            [(_, template)] => file(template),
            [(_, first), ..] => {
                let names: Vec<&str> = self.0.iter().map(|(name, _)| name.as_str()).collect();
                format!("{} ({})", file(first), names.join(", "))
            }
        }
    }

    /// Writes the templates that are files of [`FURTHER`] to that folder of `dir`; the other ones are in files of the tokenizer.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn save(&self, dir: &Path) -> Result<()> {
        let folder = dir.join(FURTHER);
        let is_further =
            |template: &ChatTemplate| template.file().parent().is_some_and(|parent| parent.ends_with(FURTHER));
        for (name, template) in self.0.iter().filter(|(_, template)| is_further(template)) {
            std::fs::create_dir_all(&folder).map_err(Error::io("create the folder", &folder))?;
            let path = folder.join(format!("{name}.jinja"));
            std::fs::write(&path, template.source()).map_err(Error::io("write", &path))?;
        }
        Ok(())
    }
}

/// Returns the template in `file`, with its bytes.
fn read_template(file: &Path) -> Result<(Vec<u8>, ChatTemplate)> {
    let bytes = files::read(file)?;
    let source = std::str::from_utf8(&bytes).map_err(|_| Error::invalid(file, "expected UTF-8, found other bytes"))?;
    let template = ChatTemplate::new(file.to_path_buf(), source);
    Ok((bytes, template))
}

/// Returns whether this is the path of a further template in a model's folder.
pub fn is_further_template(path: &str) -> bool {
    let name = path.strip_prefix(FURTHER).and_then(|rest| rest.strip_prefix('/'));
    name.and_then(|name| name.strip_suffix(".jinja")).is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

/// Returns the paths of the further templates in the model's folder `dir`, from there.
pub fn further_templates(dir: &Path) -> Vec<String> {
    further(&dir.join(FURTHER)).into_iter().map(|(name, _)| format!("{FURTHER}/{name}.jinja")).collect()
}

/// Returns the names and files of the templates in `folder`, in the order of their names.
fn further(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let template = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_suffix(".jinja")?.to_string();
        path.is_file().then_some((name, path))
    };
    let mut templates: Vec<_> = entries.filter_map(|entry| template(entry.path())).collect();
    templates.sort();
    templates
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::user_message;
    use serde_json::json;

    fn shown(templates: &Templates, tools: &Value) -> Result<String> {
        let variables = Map::from_iter([("tools".to_string(), tools.clone())]);
        templates.choose(&variables, Path::new("model"))?.render(&[user_message("hi")], true, [])
    }

    #[test]
    fn a_conversation_with_tools_has_the_template_of_that_name_if_there_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let list = json!({"chat_template": [{"name": "tool_use", "template": "with"}, {"name": "default", "template": "without"}]});
        let from_config = Templates::read(dir.path(), &list).unwrap();
        let tools = json!([{"name": "f"}]);
        assert_eq!(
            (shown(&from_config, &tools).unwrap(), shown(&from_config, &json!(null)).unwrap()),
            ("with".into(), "without".into())
        );
        assert_eq!(from_config.describe(), "tokenizer_config.json (tool_use, default)");
        // Files count in place of the configuration.
        std::fs::write(dir.path().join(CHAT_TEMPLATE), "default file").unwrap();
        assert_eq!(shown(&Templates::read(dir.path(), &list).unwrap(), &tools).unwrap(), "default file");
        std::fs::create_dir(dir.path().join(FURTHER)).unwrap();
        std::fs::write(dir.path().join(FURTHER).join("tool_use.jinja"), "tool file").unwrap();
        let from_files = Templates::read(dir.path(), &list).unwrap();
        assert_eq!(
            (shown(&from_files, &tools).unwrap(), shown(&from_files, &json!(null)).unwrap()),
            ("tool file".into(), "default file".into())
        );
        assert_eq!(further_templates(dir.path()), ["additional_chat_templates/tool_use.jinja"]);
        // They are saved, and read again.
        let saved = tempfile::tempdir().unwrap();
        from_files.save(saved.path()).unwrap();
        std::fs::write(saved.path().join(CHAT_TEMPLATE), "default file").unwrap();
        assert!(Templates::read(saved.path(), &json!(null)).unwrap().are_same(&from_files));
    }

    #[test]
    fn the_last_template_of_a_name_counts_and_a_map_of_templates_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let tools = json!([{"name": "f"}]);
        let map = json!({"chat_template": {"default": "a", "tool_use": "b"}});
        let templates = Templates::read(dir.path(), &map).unwrap();
        assert_eq!(
            (shown(&templates, &json!(null)).unwrap(), shown(&templates, &tools).unwrap()),
            ("a".into(), "b".into())
        );
        let twice =
            json!({"chat_template": [{"name": "default", "template": "a"}, {"name": "default", "template": "b"}]});
        assert_eq!(shown(&Templates::read(dir.path(), &twice).unwrap(), &json!(null)).unwrap(), "b");
        std::fs::write(dir.path().join(CHAT_TEMPLATE), "a").unwrap();
        std::fs::create_dir(dir.path().join(FURTHER)).unwrap();
        std::fs::write(dir.path().join(FURTHER).join("default.jinja"), "c").unwrap();
        assert_eq!(shown(&Templates::read(dir.path(), &map).unwrap(), &json!(null)).unwrap(), "c");
    }

    #[test]
    fn a_list_without_a_default_is_an_error_that_names_what_there_is() {
        let list = json!({"chat_template": [{"name": "rag", "template": "a"}, {"name": "tool_use", "template": "b"}]});
        let templates = Templates::read(Path::new("model"), &list).unwrap();
        assert_eq!(shown(&templates, &json!([])).unwrap(), "b");
        assert_eq!(
            shown(&templates, &json!(null)).unwrap_err().to_string(),
            "model/tokenizer_config.json: expected a chat template with the name `default`, found `rag`, `tool_use`: save the one to use as \
             chat_template.jinja in model"
        );
    }
}
