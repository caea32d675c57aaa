//! Adapters of embeddings and of LM heads, which are read as modules that are trained in full.

use crate::model::families::FAMILIES;
use crate::model::lora::{ENDS, is_in_module};
use crate::model::lora_config::{is_lm_head, is_named};
use serde_json::{Map, Value, json};

/// Ends of the names of an embedding's matrices A `[r, vocab]` and B `[width, r]`.
pub(super) const EMBEDDING_ENDS: [&str; 2] = ["lora_embedding_A", "lora_embedding_B"];

/// End of the name of the rows of single tokens.
pub(super) const TOKENS_END: &str = "token_adapter.trainable_tokens_delta";

const TOKENS: &str = "trainable_token_indices";
const TARGETS: &str = "target_modules";
const SAVED: &str = "modules_to_save";
const TIES: &str = "ensure_weight_tying";

/// An embedding or an LM head that an adapter changes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Changed {
    /// The name of its weight, without `.weight`.
    pub(super) module: String,
    pub(super) by: By,
}

/// The form of a change.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum By {
    /// A low-rank product for an embedding.
    Embedding,
    /// A low-rank product for a linear layer.
    Head,
    /// New rows of these tokens.
    Tokens(Vec<i64>),
    /// A new weight, as `save_embedding_layers` stores it.
    Whole,
}

/// The modules that the tensors with these `names`, without PEFT's prefix, change.
pub(super) fn find<'n>(names: impl Iterator<Item = &'n str>, described: &Map<String, Value>) -> Vec<Changed> {
    let saved: Vec<String> = match described.get(SAVED) {
        Some(Value::Array(names)) => names.iter().filter_map(|name| Some(name.as_str()?.to_string())).collect(),
        _ => Vec::new(),
    };
    let is_embedding = |module: &str| FAMILIES.iter().any(|family| family.names.embed == module);
    // An embedding that stays tied has a second name, which is no further change.
    let ties = described.get(TIES) == Some(&Value::Bool(true));
    let is_whole =
        |name: &str, module: &str| !ties && (is_embedding(module) || is_lm_head(module)) && !is_in_module(name, &saved);
    let change = |name: &str| {
        let below = |end: &str| name.strip_suffix(end).and_then(|module| module.strip_suffix('.'));
        let (module, by) = if let Some(module) = below(EMBEDDING_ENDS[0]) {
            (module, By::Embedding)
        } else if let Some(module) = below(ENDS[0]).filter(|module| is_lm_head(module)) {
            (module, By::Head)
        } else if let Some(module) = below(TOKENS_END) {
            (module, By::Tokens(indices(described.get(TOKENS)?, module)?))
        } else {
            (below("weight").filter(|module| is_whole(name, module))?, By::Whole)
        };
        Some(Changed { module: module.to_string(), by })
    };
    names.filter_map(change).collect()
}

/// The tokens of the embedding `module` in the setting `trainable_token_indices`.
fn indices(setting: &Value, module: &str) -> Option<Vec<i64>> {
    let list = match setting {
        Value::Object(modules) => modules.iter().find(|(name, _)| is_named(module, name))?.1,
        list => list,
    };
    list.as_array()?.iter().map(|id| id.as_i64().filter(|&id| id >= 0)).collect()
}

/// Rewrites the settings for an adapter with the modules `changed` trained in full.
pub(super) fn describe(described: &mut Map<String, Value>, changed: &[Changed]) {
    let mut saved = described.get(SAVED).and_then(Value::as_array).cloned().unwrap_or_default();
    saved.extend(changed.iter().map(|changed| json!(changed.module)));
    described.insert(SAVED.into(), saved.into());
    if let Some(Value::Array(targets)) = described.get_mut(TARGETS) {
        let is_changed = |target: &str| changed.iter().any(|changed| is_named(&changed.module, target));
        targets.retain(|target| !target.as_str().is_some_and(is_changed));
    }
    if described.remove(TOKENS).is_some_and(|setting| !setting.is_null()) {
        // A head that is tied to the embedding gets the new rows too.
        described.insert(TIES.into(), true.into());
    }
}
