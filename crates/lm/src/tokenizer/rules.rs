//! Resource limits of the rules in a `tokenizer.json`. Normalizers, decoders and post-processors can be chained so that each
//! multiplies its text, and the library that applies them panics on some invalid ones.

use rlhf_base::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Maximum bytes to which the rules may expand a text.
const MAX_BYTES: f64 = 64.0 * 1024.0 * 1024.0;

/// Maximum nesting depth of rules.
const MAX_DEPTH: usize = 16;

/// Bound that rules of real tokenizers stay within; below it, decoded texts are not measured beforehand.
const ORDINARY: f64 = 64.0;

/// Bounds on how much the rules of one tokenizer can expand a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Growth {
    encode: Bound,
    decode: Bound,
}

/// A bound on the bytes of a text: `times` its bytes, plus `more`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Bound {
    times: f64,
    more: f64,
}

impl Bound {
    const NONE: Self = Self { times: 1.0, more: 0.0 };

    fn apply(self, bytes: usize) -> f64 {
        self.times * bytes as f64 + self.more
    }
}

/// The parts of a tokenizer.json that have rules.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
}

impl Growth {
    /// Reads the bounds of the rules in the `tokenizer.json` at `path`, whose bytes are `json`.
    ///
    /// # Errors
    /// If the rules are invalid or nested too deep.
    pub(super) fn read(path: &Path, json: &[u8]) -> Result<Self> {
        let parts: Parts = serde_json::from_slice(json)
            .map_err(|e| Error::invalid(path, format!("not a tokenizer that can be read: {e}")))?;
        let bound = |bound: &mut Bound, name: &str, rules: &Value| {
            grow(bound, rules, 0).map_err(|message| Error::invalid(path, format!("`{name}`: {message}")))
        };
        let (mut encode, mut decode) = (Bound::NONE, Bound::NONE);
        bound(&mut encode, "normalizer", &parts.normalizer)?;
        bound(&mut encode, "pre_tokenizer", &parts.pre_tokenizer)?;
        bound(&mut encode, "post_processor", &parts.post_processor)?;
        bound(&mut decode, "decoder", &parts.decoder)?;
        Ok(Self { encode, decode })
    }

    /// Fails if a text of `bytes` could become too long when encoded.
    pub(super) fn check_encode(self, bytes: usize) -> Result<(), String> {
        check(self.encode, bytes)
    }

    /// Fails if tokens could become too long when decoded. `bytes` returns the bytes of all of them; it is called only if the
    /// rules exceed [`ORDINARY`].
    pub(super) fn check_decode(self, bytes: impl FnOnce() -> usize) -> Result<(), String> {
        let ordinary = self.decode.times <= ORDINARY && self.decode.more <= ORDINARY;
        if ordinary { Ok(()) } else { check(self.decode, bytes()) }
    }
}

fn check(bound: Bound, bytes: usize) -> Result<(), String> {
    let bound_bytes = bound.apply(bytes);
    // A long input is the user's choice.
    if bound_bytes <= MAX_BYTES.max(4.0 * bytes as f64) {
        return Ok(());
    }
    Err(format!(
        "its rules may make {bound_bytes:.3e} bytes of a text of {bytes}: expected at most {} MiB",
        MAX_BYTES / 1024.0 / 1024.0
    ))
}

/// Applies the growth of `rules` to `bound`.
fn grow(bound: &mut Bound, rules: &Value, depth: usize) -> Result<(), String> {
    let Some(rule) = rules.as_object() else { return Ok(()) };
    if depth > MAX_DEPTH {
        return Err(format!("expected rules at most {MAX_DEPTH} deep in each other, found deeper ones"));
    }
    let text = |name: &str| rule.get(name).and_then(Value::as_str);
    let mut times = 1.0;
    if let (Some(pattern), content) = (rule.get("pattern"), text("content")) {
        let [literal, regex] = ["String", "Regex"].map(|kind| pattern[kind].as_str());
        if literal.or(regex).or(pattern.as_str()) == Some("") {
            return Err("expected a pattern of at least one character, found an empty one".into());
        }
        let content = content.map_or(0, str::len) as f64;
        times = content / literal.map_or(1, str::len) as f64;
    }
    if let Some(charsmap) = text("precompiled_charsmap") {
        times = longest_entry(charsmap).ok_or("`precompiled_charsmap`: expected a table of characters, found none")?;
    }
    match text("type") {
        // Each byte becomes a character of up to two bytes.
        Some("ByteLevel") => times = 2.0,
        Some("Prepend") => bound.more += text("prepend").map_or(0, str::len) as f64,
        // Number of times that a template repeats its text.
        Some("TemplateProcessing") => {
            let single = rule.get("single").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            times = single.iter().filter(|piece| piece.get("Sequence").is_some()).count() as f64;
        }
        _ => {}
    }
    bound.times *= times.max(1.0);
    bound.more *= times.max(1.0);
    for name in ["normalizers", "pretokenizers", "processors", "decoders"] {
        for rule in rule.get(name).and_then(Value::as_array).into_iter().flatten() {
            grow(bound, rule, depth + 1)?;
        }
    }
    Ok(())
}

/// Bytes of the longest replacement in a SentencePiece table: the size of a trie, the trie, and replacements that each
/// end in a zero; `None` if it is not such a table.
fn longest_entry(base64: &str) -> Option<f64> {
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(base64.len() / 4 * 3), 0u32, 0);
    for c in base64.trim_end_matches('=').bytes() {
        let digit = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (bits, count) = (bits << 6 | u32::from(digit), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    let size = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let replacements = bytes.get(4usize.checked_add(size)?..).filter(|_| size >= 4)?;
    replacements.split(|byte| *byte == 0).map(<[u8]>::len).max().map(|longest| longest as f64)
}

/// Calls the tokenizer library; a panic becomes an error.
pub(super) fn guarded<T, E: std::fmt::Display>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    let message = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(done) => return done.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            text.or(panic.downcast_ref::<String>().cloned()).unwrap_or_default()
        }
    };
    let line: String = message.lines().next().unwrap_or_default().chars().take(200).collect();
    Err(format!("a rule of it fails: {line}"))
}
