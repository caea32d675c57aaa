//! Damaged and hostile tokenizers, templates, rows, adapters and checkpoints.

use super::folders::{Dice, mutate, mutate_text};
use super::{Outcomes, cases};
use crate::checkpoint::ppo_config;
use crate::support::{Child, golden};
use rlhf::convert::convert;
use rlhf::data::{Dataset, RowReader};
use rlhf::model::{CausalLm, ModelOptions};
use rlhf::run::Console;
use rlhf::settings::{ConvertConfig, Resume};
use rlhf::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

/// Runs a test of this module as a process of bounded memory, and checks that most of its damage is refused.
#[track_caller]
fn in_a_process(test: &str) {
    let test = format!("attack::files::{test}");
    let found = Child { test: &test, address_space_gib: 8, vars: &[] }.run();
    let (went_well, refused) = (found["went_well"].as_u64().unwrap(), found["refused"].as_u64().unwrap());
    assert!(refused * 10 > went_well, "the damage does too little: {found}");
}

/// Changes a file, as JSON where it is some, else its bytes.
fn damage(path: &Path, dice: &mut Dice) {
    let mut bytes = std::fs::read(path).unwrap();
    match serde_json::from_slice::<Value>(&bytes) {
        Ok(mut value) if dice.roll(4) > 0 => {
            (0..=dice.roll(2)).for_each(|_| mutate(&mut value, dice));
            bytes = value.to_string().into_bytes();
        }
        _ if !bytes.is_empty() => mutate_text(&mut bytes, dice),
        _ => bytes.push(7),
    }
    std::fs::write(path, bytes).unwrap();
}

fn copy(from: &Path, to: &Path, names: &[&str]) {
    for name in names {
        if from.join(name).is_file() {
            // The mode of a committed file does not matter.
            std::fs::write(to.join(name), std::fs::read(from.join(name)).unwrap()).unwrap();
        }
    }
}

#[test]
fn no_damage_to_a_tokenizer_makes_it_panic_or_take_memory() {
    in_a_process("child_reads_damaged_tokenizers");
}

#[test]
#[ignore = "a process of its own, started by no_damage_to_a_tokenizer_makes_it_panic_or_take_memory"]
fn child_reads_damaged_tokenizers() {
    const FILES: [&str; 4] = ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
    let sources =
        ["models/gpt2", "models/llama_tied", "tokenizers/bert", "tokenizers/t5"].map(|dir| golden().join(dir));
    let scratch = tempfile::tempdir().unwrap();
    let mut outcomes = Outcomes::default();
    for case in 0..cases(200) {
        let mut dice = Dice(case);
        let source = dice.pick(&sources.iter().filter(|dir| dir.join("tokenizer.json").is_file()).collect::<Vec<_>>());
        copy(source, scratch.path(), &FILES);
        let there: Vec<&str> = FILES.into_iter().filter(|name| scratch.path().join(name).is_file()).collect();
        // The largest and richest of them most often.
        let name = if dice.roll(3) > 0 { "tokenizer.json" } else { dice.pick(&there) };
        damage(&scratch.path().join(name), &mut dice);
        outcomes.note(&format!("case {case}: {name} of {}", source.display()), || {
            let tokenizer = Tokenizer::from_pretrained(scratch.path())?;
            let ids = tokenizer.encode("The film was good, \u{1f600} wasn't it?\n\n  2024")?;
            tokenizer.decode(&ids)?;
            tokenizer.encode_pair("The film", " was good")?;
            tokenizer.decode(&[0, 1, 2, 300, 100_000, i64::from(u32::MAX)])
        });
        FILES.iter().for_each(|name| drop(std::fs::remove_file(scratch.path().join(name))));
    }
    Child::reports(&outcomes.report());
}

#[test]
fn no_chat_template_makes_the_program_panic_or_take_time_and_memory() {
    in_a_process("child_renders_hostile_templates");
}

#[test]
fn no_damage_to_a_gguf_file_makes_it_panic_or_take_memory() {
    in_a_process("child_converts_damaged_files");
}

#[test]
#[ignore = "a process of its own, started by no_damage_to_a_gguf_file_makes_it_panic_or_take_memory"]
fn child_converts_damaged_files() {
    // The header has the metadata and the list of tensors.
    const HEADER: usize = 6000;
    const PARTS: [&str; 3] = ["k_quants-00001-of-00003", "k_quants-00002-of-00003", "k_quants-00003-of-00003"];
    let scratch = tempfile::tempdir().unwrap();
    let stored = |name: &str| golden().join("gguf").join(format!("{name}.gguf"));
    let (at, out) = (|name: &str| scratch.path().join(format!("{name}.gguf")), scratch.path().join("out"));
    let mut outcomes = Outcomes::default();
    for case in 0..cases(300) {
        let mut dice = Dice(case);
        let name = dice.pick(&[
            "llama",
            "llama3",
            "qwen2",
            "qwen3",
            "smollm3",
            "olmo2",
            PARTS[0],
            PARTS[1],
            "gpt-oss",
            "gemma4",
            "gemma4_moe",
            "qwen35moe",
            "qwen3next",
            "lfm2moe",
            "olmo3",
        ]);
        let mut bytes = std::fs::read(stored(name)).unwrap();
        for _ in 0..=dice.roll(3) {
            let at = dice.roll(HEADER.min(bytes.len() - 8));
            match dice.roll(6) {
                0 => bytes.truncate(at.max(8)),
                1 => bytes[at] = dice.roll(256) as u8,
                2 => bytes[at] ^= 1 << dice.roll(8),
                // A size, a count or an offset.
                3 => bytes[at..at + 8].copy_from_slice(&(dice.roll(usize::MAX) as u64 >> dice.roll(64)).to_le_bytes()),
                4 => bytes[at..at + 4].copy_from_slice(&(dice.roll(40) as u32).to_le_bytes()),
                _ => drop(bytes.drain(at..at + 1 + dice.roll(7))),
            }
            if bytes.len() < 16 {
                break;
            }
        }
        // A damaged part is beside whole ones.
        for part in PARTS.iter().filter(|_| PARTS.contains(&name)) {
            std::fs::copy(stored(part), at(part)).unwrap();
        }
        std::fs::write(at(name), &bytes).unwrap();
        let from = at(if PARTS.contains(&name) { PARTS[0] } else { name });
        outcomes.note(&format!("case {case}: {name}"), || {
            convert(&ConvertConfig::new(&from, &out))?;
            if out.join("tokenizer.json").is_file() {
                Tokenizer::from_pretrained(&out)?.encode("The film was good, \u{1f600}")?;
            }
            CausalLm::from_pretrained(&out, ModelOptions::default())?.logits(&[vec![1i64, 2]]).map(drop)
        });
        let _ = std::fs::remove_dir_all(&out);
    }
    Child::reports(&outcomes.report());
}

/// A template of pieces that do not belong together.
fn template(dice: &mut Dice) -> String {
    const PIECES: [&str; 28] = [
        "{% for message in messages %}",
        "{% endfor %}",
        "{% if add_generation_prompt %}",
        "{% else %}",
        "{% endif %}",
        "{{ message['content'] }}",
        "{{ messages[0].content }}",
        "{{ messages[-1]['role'] * 3 }}",
        "{{ raise_exception('\u{1b}[2J no') }}",
        "{{ bos_token + eos_token }}",
        "{% set x = 'ab' %}",
        "{% set x = x ~ x %}",
        "{% set ns = namespace(n=0) %}",
        "{% set ns.n = ns.n + 1 %}",
        "{{ ns.n }}",
        "{% for i in range(9) %}",
        "{{ range(100000) | list | length }}",
        "{{ x | upper | indent(4) }}",
        "{{ messages | tojson }}",
        "{{ messages | map(attribute='role') | join(',') }}",
        "{{ 1 / 0 }}",
        "{{ none.x }}",
        "{{ loop.index }}",
        "{%- macro m(a) %}{{ a }}{% endmacro -%}",
        "{{ m(m('x')) }}",
        "{# a comment #}",
        "\u{9b}plain text\n",
        "{{ strftime_now('%Y') }}",
    ];
    let mut text: String = (0..=dice.roll(9)).map(|_| dice.pick(&PIECES)).collect();
    // Some that hang together.
    for (open, close) in [("{% for", "{% endfor %}"), ("{% if", "{% endif %}")] {
        let (opened, closed) = (text.matches(open).count(), text.matches(close).count());
        if dice.roll(3) > 0 {
            text += &close.repeat(opened.saturating_sub(closed));
        }
    }
    text
}

#[test]
#[ignore = "a process of its own, started by no_chat_template_makes_the_program_panic_or_take_time_and_memory"]
fn child_renders_hostile_templates() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("chat_template.jinja");
    let mut outcomes = Outcomes::default();
    let rows = "{\"prompt\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n";
    for case in 0..cases(400) {
        let mut dice = Dice(case);
        std::fs::write(&file, template(&mut dice)).unwrap();
        outcomes.note(&format!("case {case}: {:?}", std::fs::read_to_string(&file).unwrap()), || {
            let mut tokenizer = Tokenizer::from_pretrained(&golden().join("models/llama_tied"))?;
            tokenizer.use_chat_template(&file)?;
            let reader = BufReader::new(rows.as_bytes());
            RowReader::lines("rows", reader, true).next(9)?.expect("a row").prompts(&tokenizer, 512, 200)
        });
    }
    Child::reports(&outcomes.report());
}

#[test]
fn no_damage_to_rows_makes_them_panic_or_take_memory() {
    in_a_process("child_reads_damaged_rows");
}

#[test]
#[ignore = "a process of its own, started by no_damage_to_rows_makes_them_panic_or_take_memory"]
fn child_reads_damaged_rows() {
    let scratch = tempfile::tempdir().unwrap();
    let row = json!({"prompt": "a \"b\"", "completion": " c", "chosen": " d", "rejected": " e", "input_ids": [3, 4],
                     "messages": [{"role": "user", "content": "f"}, {"role": "assistant", "content": "g"}]});
    let lines = format!("{row}\n{row}\n\n{row}\n");
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(lines.as_bytes()).unwrap();
    let parquet = |name: &str| std::fs::read(golden().join("data").join(name)).unwrap();
    let sources: Vec<(&str, Vec<u8>)> = vec![
        ("a.jsonl", lines.clone().into_bytes()),
        ("a.json", json!([row, row]).to_string().into_bytes()),
        ("a.csv", b"prompt,completion,input_ids\n\"a, b\",c,\"[1, 2]\"\nd,e,\n".to_vec()),
        ("a.jsonl.gz", packed.finish().unwrap()),
        ("a.parquet", parquet("snappy.parquet")),
        ("b.parquet", parquet("zstd.parquet")),
    ];
    let tokenizer = Tokenizer::from_pretrained(&golden().join("models/gpt2")).unwrap();
    let mut outcomes = Outcomes::default();
    for case in 0..cases(400) {
        let mut dice = Dice(case);
        let (name, mut bytes) = dice.pick(&sources);
        match (name, dice.roll(3)) {
            ("a.jsonl", 0..2) => {
                let mut value = row.clone();
                (0..=dice.roll(2)).for_each(|_| mutate(&mut value, &mut dice));
                bytes = format!("{row}\n{value}\n").into_bytes();
            }
            _ => (0..=dice.roll(3)).for_each(|_| {
                if !bytes.is_empty() {
                    mutate_text(&mut bytes, &mut dice);
                }
            }),
        }
        let path = scratch.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        outcomes.note(&format!("case {case}: {name}"), || {
            let rows = Dataset::read(&path, "train")?;
            let results = [
                rows.prompts(&tokenizer, 300, 60).map(drop),
                rows.completions(&tokenizer, 300, 60).map(drop),
                rows.texts(&tokenizer, 300, 60).map(drop),
                rows.responses(&tokenizer).map(drop),
            ];
            let mut read = RowReader::open(&path, "train")?;
            while read.next(2)?.is_some() {}
            results.into_iter().collect::<rlhf::Result<Vec<()>>>()
        });
    }
    Child::reports(&outcomes.report());
}

#[test]
fn no_damage_to_an_adapter_makes_it_panic_or_take_memory() {
    in_a_process("child_opens_damaged_adapters");
}

#[test]
#[ignore = "a process of its own, started by no_damage_to_an_adapter_makes_it_panic_or_take_memory"]
fn child_opens_damaged_adapters() {
    let scratch = tempfile::tempdir().unwrap();
    let source = golden().join("lora/gpt2");
    let config: Value = serde_json::from_slice(&std::fs::read(source.join("adapter_config.json")).unwrap()).unwrap();
    let weights = std::fs::read(source.join("adapter_model.safetensors")).unwrap();
    let header_len = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let base = golden().join("models/gpt2");
    let mut outcomes = Outcomes::default();
    for case in 0..cases(200) {
        let mut dice = Dice(case);
        let (mut config, mut weights) = (config.clone(), weights.clone());
        config["base_model_name_or_path"] = json!(base);
        match dice.roll(4) {
            0 | 1 => (0..=dice.roll(2)).for_each(|_| mutate(&mut config, &mut dice)),
            2 => {
                let mut header: Value = serde_json::from_slice(&weights[8..8 + header_len]).unwrap();
                (0..=dice.roll(2)).for_each(|_| mutate(&mut header, &mut dice));
                weights = super::folders::with_header(header.to_string().as_bytes(), &weights[8 + header_len..]);
            }
            _ => mutate_text(&mut weights, &mut dice),
        }
        std::fs::write(scratch.path().join("adapter_config.json"), config.to_string()).unwrap();
        std::fs::write(scratch.path().join("adapter_model.safetensors"), weights).unwrap();
        outcomes.note(&format!("case {case}: an adapter"), || {
            CausalLm::from_pretrained(scratch.path(), ModelOptions::default())?.logits(&[vec![3i64, 4, 5], vec![6]])
        });
    }
    Child::reports(&outcomes.report());
}

#[test]
fn no_damage_to_a_checkpoint_makes_a_resumed_run_panic_or_take_memory() {
    in_a_process("child_resumes_damaged_checkpoints");
}

#[test]
#[ignore = "a process of its own, started by no_damage_to_a_checkpoint_makes_a_resumed_run_panic_or_take_memory"]
fn child_resumes_damaged_checkpoints() {
    let scratch = tempfile::tempdir().unwrap();
    let mut config = ppo_config(scratch.path());
    config.total_episodes = Some(8);
    config.run.checkpoints.save_steps = Some(1.into());
    rlhf::train::ppo::ppo(&config, Console::Silent).unwrap();
    let whole: PathBuf = config.run.output_dir.join("checkpoint-1");
    let mut names: Vec<PathBuf> =
        crate::cli::snapshot(&whole).into_iter().filter_map(|(path, bytes)| bytes.map(|_| path)).collect();
    names.sort();
    let state = whole.join("trainer_state.json");
    let mut outcomes = Outcomes::default();
    for case in 0..cases(40) {
        let mut dice = Dice(case);
        // Most of what is believed stands in the state.
        let damaged = if dice.roll(3) > 0 { state.clone() } else { dice.pick(&names) };
        let sound = std::fs::read(&damaged).unwrap();
        damage(&damaged, &mut dice);
        let mut config = config.clone();
        config.run.output_dir = scratch.path().join("resumed");
        config.run.checkpoints.resume_from_checkpoint = Some(Resume::From(whole.clone()));
        outcomes
            .note(&format!("case {case}: {}", damaged.display()), || rlhf::train::ppo::ppo(&config, Console::Silent));
        std::fs::write(&damaged, sound).unwrap();
        let _ = std::fs::remove_dir_all(&config.run.output_dir);
    }
    Child::reports(&outcomes.report());
}
