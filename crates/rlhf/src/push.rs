//! `rlhf push`: uploads the model in a folder to the hub.

use crate::run::push::settings::hub_with;
use crate::run::push::{check_secrets, is_of_model, is_weights, local_base_warning, without_programs};
use crate::settings::PushConfig;
use rlhf_base::{Error, Result};
use rlhf_hub::push::{Destination, Pushed, find_folder};
use std::path::Path;

/// Outcome of `rlhf push`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushReport {
    /// The commit, and the files in it.
    pub pushed: Pushed,
    /// Address of the commit.
    pub url: String,
    /// Files and folders of the folder that were left out.
    pub left_out: Vec<String>,
    /// A warning about an adapter that nobody else can load, as its base is in a folder of this machine.
    pub warning: Option<String>,
}

/// Uploads the model in `config.folder` to the repository `config.name`, in one commit: weights, configuration, tokenizer and card,
/// settings and metrics of a run, and the files that `config.include` matches. With `shows`, standard error has notes of long waits and, on
/// a terminal, a progress bar for each large file.
///
/// # Errors
/// If the folder has no model, or a link to a file outside of it; if a file that `config.include` matches repeats a command line or an
/// address of the run's settings that may be secret; if the hub refuses the upload, or cannot be reached. The same call continues an
/// upload that was cut.
pub fn push(config: &PushConfig, shows: bool) -> Result<PushReport> {
    config.check()?;
    let dir = config.folder.as_path();
    check_model(dir)?;
    let is_asked = |path: &str| config.include.iter().any(|glob| matches(glob, path));
    let files = without_programs(find_folder(dir, &|path| is_selected(config, path))?, is_asked)?;
    check_secrets(dir, &files)?;
    let is_pushed = |name: &str| files.iter().any(|file| file.name().split('/').next() == Some(name));
    let left_out = names(dir)?.into_iter().filter(|name| !name.starts_with('.') && !is_pushed(name)).collect();
    let to = Destination {
        name: config.name.clone(),
        revision: config.revision.clone(),
        private: config.private.then_some(true),
    };
    let repository = hub_with(config.hub_token.as_ref()).repository(&to)?;
    let pushed = repository.push(&files, config.commit_message.trim(), shows)?;
    let url = repository.commit_url(&pushed.commit);
    Ok(PushReport { pushed, url, left_out, warning: local_base_warning(dir, &files) })
}

/// Checks that the folder has a model.
fn check_model(dir: &Path) -> Result<()> {
    let found = match (dir.is_dir(), dir.exists()) {
        (true, _) if !["config.json", "adapter_config.json"].iter().any(|name| dir.join(name).is_file()) => {
            "a folder without one"
        }
        (true, _) if !names(dir)?.iter().any(|name| is_weights(name)) => {
            let message =
                "expected the weights of a model (model.safetensors or adapter_model.safetensors), found none";
            return Err(Error::invalid(dir, message));
        }
        (true, _) => return Ok(()),
        (false, true) => "a file",
        (false, false) => "no such folder",
    };
    let message = format!("expected the folder of a model (config.json or adapter_config.json), found {found}");
    Err(Error::invalid(dir, message))
}

/// Returns whether the file or, with a slash at its end, the folder at this path is pushed.
fn is_selected(config: &PushConfig, path: &str) -> bool {
    let matches = |globs: &[String]| globs.iter().any(|glob| matches(glob, path));
    let is_hidden = path.starts_with('.') || path.contains("/.");
    if path.ends_with('/') {
        return is_of_model(path) || (!config.include.is_empty() && !is_hidden);
    }
    let is_included = matches(&config.include) && !is_hidden && !path.ends_with(".tmp");
    (is_of_model(path) || is_included) && !matches(&config.exclude)
}

/// Returns whether a pattern of the shell matches the whole path: `*` is any text, also with slashes, and `?` one character. A pattern
/// that ends with a slash matches all files of a folder.
fn matches(glob: &str, path: &str) -> bool {
    let glob: Vec<char> = glob.chars().chain(glob.ends_with('/').then_some('*')).collect();
    let path: Vec<char> = path.chars().collect();
    let (mut at, mut from) = (0, 0);
    // The last `*`, and the end of the text that it matches.
    let mut star = None;
    while from < path.len() {
        match glob.get(at) {
            Some('*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(&c) if c == '?' || c == path[from] => {
                at += 1;
                from += 1;
            }
            _ => match &mut star {
                Some((place, end)) => {
                    *end += 1;
                    (at, from) = (*place + 1, *end);
                }
                None => return false,
            },
        }
    }
    glob[at..].iter().all(|&c| c == '*')
}

/// Lists the names in the folder `dir`.
fn names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("read the folder", dir))? {
        names.push(entry.map_err(Error::io("read the folder", dir))?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_paths_as_in_a_shell() {
        for (glob, path, expected) in [
            ("*.txt", "a.txt", true),
            ("*.txt", "a/b.txt", true),
            ("*.txt", "a.txt2", false),
            ("a*b*c", "a1b2b3c", true),
            ("a*b*c", "a1b2b3", false),
            ("?.md", "a.md", true),
            ("?.md", "ab.md", false),
            ("onnx/", "onnx/model.onnx", true),
            ("onnx/", "onnx2", false),
            ("*", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(glob, path), expected, "{glob} {path}");
        }
    }

    #[test]
    fn files_beside_the_model_are_pushed_by_name_and_hidden_ones_never() {
        let mut config = PushConfig::new("runs/ppo", "me/x");
        assert!(is_selected(&config, "model.safetensors") && !is_selected(&config, "notes.txt"));
        assert!(!is_selected(&config, "onnx/"), "no folder is read but that of templates");
        assert!(
            ["", "rag.jinja"].iter().all(|name| is_selected(&config, &format!("additional_chat_templates/{name}")))
        );
        config.include = vec!["*".into()];
        config.exclude = vec!["*.log".into(), "metrics.jsonl".into()];
        let all = ["notes.txt", "onnx/", "onnx/model.onnx", "model.safetensors", ".gitignore"];
        assert!(all.iter().all(|path| is_selected(&config, path)));
        let none =
            ["a.log", "onnx/a.log", "metrics.jsonl", ".env", ".git/", "a/.env", "a/.git/", "model.safetensors.tmp"];
        assert!(none.iter().all(|path| !is_selected(&config, path)));
    }
}
