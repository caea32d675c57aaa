//! Reads a `tokenizer.json`. A vocabulary of BPE is read straight into its tables: the library's reader copies each of its texts
//! through two generic trees first, and takes a second for a vocabulary of 250,000.

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value, json};
use std::fmt::Formatter;
use tokenizers::models::bpe::{BpeBuilder, Merges, Vocab};
use tokenizers::{AddedToken, ModelWrapper, Tokenizer};

/// A tokenizer, and one more than the largest id of its tokens.
pub(super) fn read(json: &[u8]) -> Result<(Tokenizer, i64), String> {
    if let Some(tokenizer_and_ids) = with_bpe(json) {
        return Ok(tokenizer_and_ids);
    }
    let tokenizer = Tokenizer::from_bytes(json).map_err(|e| e.to_string())?;
    let ids = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| i64::from(id) + 1);
    Ok((tokenizer, ids))
}

/// A file whose model is BPE.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: Bpe,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
struct Added {
    #[serde(rename = "id")]
    _id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(Deserialize)]
struct Bpe {
    #[serde(rename = "type")]
    _kind: Kind,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
enum Kind {
    #[serde(rename = "BPE")]
    Bpe,
}

/// Two tokens that become one: a list of two texts, or one text with a space between them.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfTwo;
        impl<'de> Visitor<'de> for OfTwo {
            type Value = Merge;

            fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
                f.write_str("two tokens")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Merge, E> {
                match text.split_once(' ') {
                    // The library skips such a text.
                    Some((a, b)) if !b.contains(' ') && !text.starts_with("#version") => Ok(Merge(a.into(), b.into())),
                    _ => Err(E::custom("not a merge")),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merge, A::Error> {
                let mut next = || list.next_element()?.ok_or_else(|| A::Error::custom("not a merge"));
                Ok(Merge(next()?, next()?))
            }
        }
        deserializer.deserialize_any(OfTwo)
    }
}

/// [`read`] of a file whose model is BPE; `None` for any other, and for one with an error, which the library's reader finds again.
fn with_bpe(json: &[u8]) -> Option<(Tokenizer, i64)> {
    let File { added_tokens, model, mut rest } = serde_json::from_slice(json).ok()?;
    let merges: Merges = model.merges.into_iter().map(|Merge(a, b)| (a, b)).collect();
    let largest = model.vocab.values().copied().max();
    let mut builder = BpeBuilder::new().vocab_and_merges(model.vocab, merges);
    if let Some(dropout) = model.dropout {
        builder = builder.dropout(dropout);
    }
    if let Some(token) = model.unk_token {
        builder = builder.unk_token(token);
    }
    if let Some(prefix) = model.continuing_subword_prefix {
        builder = builder.continuing_subword_prefix(prefix);
    }
    if let Some(suffix) = model.end_of_word_suffix {
        builder = builder.end_of_word_suffix(suffix);
    }
    builder = builder
        .fuse_unk(model.fuse_unk.unwrap_or_default())
        .byte_fallback(model.byte_fallback.unwrap_or_default())
        .ignore_merges(model.ignore_merges.unwrap_or_default());
    let model = builder.build().ok()?;
    // The library reads the rules, with an empty model in place of the real one. Added tokens get their ids from the real model.
    rest.insert("model".into(), json!({ "type": "BPE", "vocab": {}, "merges": [] }));
    let mut tokenizer = Tokenizer::from_bytes(Value::Object(rest).to_string()).ok()?;
    tokenizer.with_model(ModelWrapper::BPE(model));
    tokenizer.add_tokens(added_tokens.into_iter().map(|added| added.token)).ok()?;
    let largest = largest.into_iter().chain(tokenizer.get_added_vocabulary().get_vocab().values().copied()).max();
    Some((tokenizer, largest.map_or(0, |id| i64::from(id) + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn assert_read_as_by_the_library(name: &str, json: &[u8]) -> bool {
        let (found, ids) = read(json).unwrap();
        let expected = Tokenizer::from_bytes(json).unwrap();
        assert_eq!(found.to_string(false).unwrap(), expected.to_string(false).unwrap(), "{name}");
        assert_eq!(found.get_vocab(true), expected.get_vocab(true), "{name}");
        assert_eq!(Some(ids - 1), expected.get_vocab(true).into_values().max().map(i64::from), "{name}");
        for text in ["Der Zug, 12 Minuten später…", "<|endoftext|> a</s>", "  \n\u{1F600}x", ""] {
            let ids = |tokenizer: &Tokenizer| tokenizer.encode(text, true).unwrap().get_ids().to_vec();
            assert_eq!(ids(&found), ids(&expected), "{name}: {text:?}");
        }
        with_bpe(json).is_some()
    }

    #[test]
    fn a_tokenizer_is_the_one_that_the_library_reads() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let mut bpe_count = 0;
        let folders = ["tokenizers", "models"].map(|name| std::fs::read_dir(golden.join(name)).unwrap());
        for folder in folders.into_iter().flatten() {
            let path = folder.unwrap().path().join("tokenizer.json");
            if let Ok(json) = std::fs::read(&path) {
                bpe_count += usize::from(assert_read_as_by_the_library(&path.display().to_string(), &json));
            }
        }
        assert!(bpe_count > 0, "no tokenizer of the goldens is BPE");
    }

    #[test]
    fn merges_are_pairs_or_texts_and_an_invalid_file_is_the_librarys_error() {
        let file = |merges: Value| {
            let token = |id: u32, content: &str, special: bool| {
                json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": !special, "special": special })
            };
            let file = json!({
                "version": "1.0", "truncation": null, "padding": null,
                "added_tokens": [token(4, "<end>", true), token(9, "new", false)],
                "normalizer": { "type": "Lowercase" }, "pre_tokenizer": null, "post_processor": null, "decoder": null,
                "model": { "type": "BPE", "dropout": null, "unk_token": "?", "fuse_unk": true,
                    "vocab": { "?": 0, "a": 1, "b": 2, "ab": 3, "<end>": 4, "aba": 7 }, "merges": merges },
            });
            file.to_string().into_bytes()
        };
        for merges in [json!([["a", "b"], ["ab", "a"]]), json!(["a b", "ab a"]), json!([])] {
            assert!(assert_read_as_by_the_library("pairs", &file(merges)));
        }
        assert!(!assert_read_as_by_the_library("a comment", &file(json!(["#version: 0.2", "a b"]))));
        for merges in [json!([["a", "b", "a"]]), json!(["a"]), json!([["a", "missing"]]), json!(7)] {
            let json = file(merges);
            let expected = Tokenizer::from_bytes(&json).unwrap_err().to_string();
            assert_eq!(read(&json).unwrap_err(), expected);
        }
    }
}
