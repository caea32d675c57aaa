//! Parts of rows that no run reads.

use super::dataset::Dataset;
use super::row::{Row, field, messages_field};
use serde_json::Value;

/// Fields with data that is no text, as TRL, LLaMA-Factory and ms-swift call them.
const MEDIA: [&str; 6] = ["image", "images", "video", "videos", "audio", "audios"];

/// Types of the parts of a message that are no text.
const MEDIA_PARTS: [&str; 6] = ["image", "image_url", "video", "video_url", "audio", "input_audio"];

/// Fields with a completion's label, as TRL and LLaMA-Factory call them.
const LABELS: [&str; 2] = ["label", "kto_tag"];

impl Dataset {
    /// Returns a message with the number of rows that have images, videos or audio, if there are any.
    pub(crate) fn note_on_media(&self) -> Option<String> {
        self.note(has_media, |count| {
            format!("images, videos and audio of {count} are not read: models read text alone")
        })
    }

    /// Returns messages with the number of rows that mark parts as not to be learned, which demonstrations ignore.
    pub(crate) fn notes_on_marks(&self) -> Vec<String> {
        let marked = self.note(has_marked_message, |count| {
            format!(
                "a `train` of false or a `weight` of 0 in the messages of {count} is not read, so that these messages are learned as others \
                 are; rows of `input_ids` with `labels` of -100 leave tokens out"
            )
        });
        let rejected = self.note(is_rejected, |count| {
            format!("the completions of {count} have a label of false, and are learned as those with true are")
        });
        marked.into_iter().chain(rejected).collect()
    }

    /// Returns a message on the rows for which `has` is true, if there are any; `words` makes it from their number and the place of the
    /// first.
    fn note(&self, has: impl Fn(&Value) -> bool, words: impl Fn(&str) -> String) -> Option<String> {
        let mut matching = self.rows.iter().filter(|row| has(&row.value));
        let Row { file, place, .. } = matching.next()?;
        let count = 1 + matching.count();
        let all = self.rows.len();
        Some(format!("{}: {}", file.display(), words(&format!("{count} of {all} rows (first in {place})"))))
    }
}

fn has_media(row: &Value) -> bool {
    let is_there = |value: &Value| match value {
        Value::Array(list) => !list.is_empty(),
        Value::String(text) => !text.is_empty(),
        Value::Object(_) => true,
        _ => false,
    };
    MEDIA.iter().any(|name| field(row, name).is_some_and(is_there)) || messages(row).any(has_media_part)
}

fn has_media_part(message: &Value) -> bool {
    let is_media = |part: &Value| part["type"].as_str().is_some_and(|kind| MEDIA_PARTS.contains(&kind));
    message["content"].as_array().is_some_and(|parts| parts.iter().any(is_media))
}

/// Whether a message has axolotl's or OpenAI's mark that it is not to be learned.
fn has_marked_message(row: &Value) -> bool {
    messages(row).any(|m| m["train"].as_bool() == Some(false) || m["weight"].as_f64() == Some(0.0))
}

/// Whether a row has the label of a completion that is not to be learned.
fn is_rejected(row: &Value) -> bool {
    field(row, "completion").is_some() && LABELS.iter().any(|name| row[*name].as_bool() == Some(false))
}

/// Returns the messages of a row's conversation, prompt and completion.
fn messages(row: &Value) -> impl Iterator<Item = &Value> {
    let conversation = messages_field(row).map(|(_, value)| value);
    let parts = ["prompt", "completion"].into_iter().filter_map(|name| field(row, name));
    conversation.into_iter().chain(parts).filter_map(Value::as_array).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn dataset(rows: &[Value]) -> Dataset {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
        Dataset::read(&path, "train").unwrap()
    }

    #[test]
    fn rows_with_what_is_not_read_are_counted_with_the_first_one() {
        let plain = json!({"prompt": "a", "completion": "b", "images": [], "label": true, "video": null});
        let said = |more: Value| {
            let mut message = json!({"role": "assistant", "content": "b"});
            message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"messages": [{"role": "user", "content": "a"}, message]})
        };
        for row in [
            json!({"prompt": "a", "images": ["a.png"]}),
            json!({"prompt": "a", "image": "a.png"}),
            json!({"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]}),
        ] {
            let note = dataset(&[plain.clone(), row]).note_on_media().unwrap();
            assert!(
                note.ends_with("rows.jsonl: images, videos and audio of 1 of 2 rows (first in line 2) are not read: models read text alone"),
                "{note}"
            );
        }
        for row in [said(json!({"train": false})), said(json!({"weight": 0}))] {
            let notes = dataset(&[row.clone(), plain.clone(), row]).notes_on_marks();
            assert!(
                notes.len() == 1 && notes[0].contains("in the messages of 2 of 3 rows (first in line 1) is not read"),
                "{notes:?}"
            );
        }
        for label in ["label", "kto_tag"] {
            let notes = dataset(&[json!({"prompt": "a", "completion": "b", label: false})]).notes_on_marks();
            assert!(
                notes.len() == 1 && notes[0].contains("the completions of 1 of 1 rows (first in line 1) have"),
                "{notes:?}"
            );
        }
        let all = dataset(&[plain, said(json!({"train": true, "weight": 1}))]);
        assert_eq!((all.note_on_media(), all.notes_on_marks()), (None, Vec::new()));
    }
}
