//! Answers questions about conversations with tools in JSON lines, for tests/interop/tools.py.
//!
//! `{"model": "folder"}` loads a tokenizer and its chat template: `{"apart": false}`. Then `{"prompt": [messages], "tools": [..]}`,
//! `{"suffix": [messages]}` and `{"continued": [messages], "tools": [..]}` are answered by `{"ids": [..]}`, and
//! `{"turn": [ids], "after": [ids], "tools": [..]}`, whose `after` may be missing, by `{"message": {..}, "malformed": null}`. An error is
//! `{"error": "one line"}`.

use rlhf_base::{Error, Result};
use rlhf_lm::tokenizer::{Tokenizer, ToolTemplate};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::path::Path;

fn main() -> std::io::Result<()> {
    let mut template = None;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = serde_json::from_str(&line?)
            .map_err(|e| Error::Run(e.to_string()))
            .and_then(|question: Value| answer(&question, &mut template));
        writeln!(out, "{}", answer.unwrap_or_else(|e| json!({"error": e.to_string()})))?;
        out.flush()?;
    }
    Ok(())
}

fn answer(question: &Value, template: &mut Option<ToolTemplate>) -> Result<Value> {
    if let Some(folder) = question["model"].as_str() {
        *template = None;
        let loaded = ToolTemplate::new(&Tokenizer::from_pretrained(Path::new(folder))?)?;
        let apart = loaded.writes_turns_apart();
        *template = Some(loaded);
        return Ok(json!({"apart": apart}));
    }
    let template = template.as_ref().ok_or_else(|| Error::Run("expected a model first, found none".into()))?;
    let list = |name: &str| question[name].as_array().cloned().unwrap_or_default();
    let ids = |name: &str| list(name).iter().filter_map(Value::as_i64).collect::<Vec<i64>>();
    let tools = list("tools");
    Ok(if question["prompt"].is_array() {
        json!({"ids": template.prompt(&list("prompt"), &tools)?})
    } else if question["continued"].is_array() {
        json!({"ids": template.continued_prompt(&list("continued"), &tools)?})
    } else if question["suffix"].is_array() {
        json!({"ids": template.suffix(&list("suffix"))?})
    } else {
        let turn = if question["after"].is_array() {
            template.read_continued(&ids("after"), &ids("turn"), &tools)?
        } else {
            template.read_turn(&ids("turn"), &tools)?
        };
        json!({"message": turn.message, "malformed": turn.malformed})
    })
}
