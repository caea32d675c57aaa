//! Rows from every kind of file, and what the commands make of them.

use crate::cli::{PPO, PROMPTS, Ran, Scratch, timeless, with_data};
use crate::support::golden;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use rlhf::data::Dataset;
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

fn rows(path: &Path) -> Vec<Value> {
    let dataset = Dataset::read(path, "train").unwrap_or_else(|e| panic!("{e}"));
    dataset.rows().cloned().collect()
}

/// Three rows with a text, a number that may be absent, and a list that may be absent or empty.
fn write_parquet(path: &Path, compression: Compression) -> Vec<Value> {
    let schema = "message rows {
        required binary prompt (UTF8);
        optional int64 n;
        optional group ids (LIST) { repeated group list { required int64 element; } }
    }";
    let properties = WriterProperties::builder().set_compression(compression).build();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let texts = ["The movie", "", "ä\n"].map(ByteArray::from);
    column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&[1, -3], Some(&[1, 0, 1]), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&[5, 6], Some(&[2, 2, 0, 1]), Some(&[0, 1, 0, 0])).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    vec![
        json!({"prompt": "The movie", "n": 1, "ids": [5, 6]}),
        json!({"prompt": "", "n": null, "ids": null}),
        json!({"prompt": "ä\n", "n": -3, "ids": []}),
    ]
}

#[test]
fn rows_written_as_parquet_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(ZstdLevel::default())] {
        let written = write_parquet(&path, compression);
        assert_eq!(rows(&path), written, "{compression:?}");
    }
}

#[test]
fn parquet_of_pyarrow_holds_the_rows_that_its_jsonl_holds() {
    let dir = golden().join("data");
    let expected = rows(&dir.join("rows.jsonl"));
    assert_eq!(expected.len(), 7);
    for file in ["snappy.parquet", "zstd.parquet", "large.parquet"] {
        assert_eq!(rows(&dir.join(file)), expected, "{file}");
    }
}

#[test]
fn broken_parquet_is_one_line_of_error_wherever_it_is_broken() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    write_parquet(&path, Compression::SNAPPY);
    let whole = std::fs::read(&path).unwrap();
    let check = |bytes: &[u8], must_fail: bool, what: &str| {
        std::fs::write(&path, bytes).unwrap();
        match Dataset::read(&path, "train") {
            Ok(_) => assert!(!must_fail, "{what} was not seen"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("rows.parquet: ") && error.lines().count() == 1, "{what}: {error}");
            }
        }
    };
    for len in 0..whole.len() {
        check(&whole[..len], true, &format!("the end at {len}"));
    }
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        check(&bytes, false, &format!("another byte at {at}"));
    }
    check(b"{\"prompt\": \"x\"}\n", true, "a file of another kind");
}

#[test]
fn every_format_gives_the_same_run() {
    let scratch = Scratch::new();
    let texts = PROMPTS.map(|prompt| format!("{prompt}, \"quoted\""));
    let table: String = texts.iter().map(|text| format!("\"{}\"\r\n", text.replace('"', "\"\""))).collect();
    scratch.write("rows.csv", &format!("prompt\r\n{table}"));
    scratch.write("rows.json", &json!(texts.each_ref().map(|text| json!({"query": text}))).to_string());
    std::fs::create_dir_all(scratch.path("shards/data")).unwrap();
    for (shard, texts) in texts.chunks(3).enumerate() {
        let lines: String = texts.iter().map(|text| format!("{}\n", json!({"prompt": text}))).collect();
        scratch.write(&format!("shards/data/train-{shard:05}-of-00003.jsonl"), &lines);
    }
    let run = |data: &str, out: &str| {
        scratch.succeeds(&format!("{} --output_dir {out}", with_data(PPO, data)));
        (timeless(scratch.metrics(out)), scratch.read(&format!("{out}/samples/update-000002.jsonl")))
    };
    let expected = run("rows.csv", "of_csv");
    assert!(run("rows.json", "of_json") == expected, "JSON, by the name `query`");
    assert!(run("shards", "of_shards") == expected, "JSONL in three shards");
}

#[test]
fn broken_files_are_named_with_the_place() {
    let scratch = Scratch::new();
    scratch.write("short.csv", "prompt,label\nx,1\ny\n");
    scratch.write("open.csv", "prompt\nx\n\"y\nz\n");
    scratch.write("cut.parquet", "PAR1 and then nothing");
    scratch.write("columns.csv", "question,answer\nx,y\n");
    for (file, words) in [
        ("short.csv", &["short.csv: line 3", "expected 2 fields", "found 1"][..]),
        ("open.csv", &["open.csv: line 3", "never closed"]),
        ("cut.parquet", &["cut.parquet: not valid Parquet"]),
        (
            "columns.csv",
            &["columns.csv: line 2", "`prompt`", "found `question`, `answer`", "--dataset_columns prompt=question"],
        ),
    ] {
        scratch.refuses(&with_data(PPO, file), 1, words);
    }
}

/// A run on prompts of 3, 19 and 5 tokens (a letter is one).
fn run_on_a_long_prompt(scratch: &Scratch, flags: &str, out: &str) -> Ran {
    let row = |letter: &str, count| format!("{}\n", json!({"prompt": letter.repeat(count)}));
    scratch.write("lengths.jsonl", &[row("x", 3), row("y", 19), row("z", 5)].concat());
    let line = with_data(PPO, "lengths.jsonl");
    scratch.run(&format!("{line} --per_device_train_batch_size 2 {flags} --output_dir {out}"))
}

#[test]
fn long_prompts_are_dropped_or_truncated_and_counted() {
    let scratch = Scratch::new();
    let limit = "--max_prompt_length 8 --long_prompts";
    for (long, told, queries) in [
        ("drop", "1 of 3 prompts were dropped", ["xxx", "zzzzz"].as_slice()),
        ("truncate_left", "1 of 3 prompts were truncated", &["xxx", "yyyyyyyy", "zzzzz"]),
        ("truncate_right", "1 of 3 prompts were truncated", &["xxx", "yyyyyyyy", "zzzzz"]),
    ] {
        let ran = run_on_a_long_prompt(&scratch, &format!("{limit} {long}"), long);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let expected = format!("warning: lengths.jsonl: {told}: more than 8 tokens (max_prompt_length)\n");
        assert_eq!(ran.stderr, expected, "{long}");
        let samples = crate::cli::json_lines(&scratch.read(&format!("{long}/samples/update-000000.jsonl")));
        let found: Vec<&str> = samples.iter().take(queries.len()).map(|row| row["prompt"].as_str().unwrap()).collect();
        assert_eq!(found, queries, "{long}");
    }
    for (flags, code, words) in [
        (
            "--max_prompt_length 8",
            1,
            &["lengths.jsonl: line 2", "at most 8 tokens (max_prompt_length)", "found 19"][..],
        ),
        ("--max_prompt_length 8", 1, &["--long_prompts"]),
        ("--max_prompt_length 2 --long_prompts drop", 1, &["lengths.jsonl: each of 3 prompts has more than 2 tokens"]),
        ("--max_prompt_length 57", 2, &["max_prompt_length = 57: expected at most 56"]),
    ] {
        run_on_a_long_prompt(&scratch, flags, "out").is_one_error(flags, code, words);
    }
}

#[test]
fn rows_held_out_for_evaluation_change_what_is_trained_on() {
    let scratch = Scratch::new();
    let sft =
        "sft --model_name_or_path policy --dataset_name demos.jsonl --per_device_train_batch_size 2 --max_steps 3";
    scratch.succeeds(&format!("{sft} --eval_split_size 0.25 --output_dir held"));
    let last = scratch.metrics("held").pop().unwrap();
    assert!(last.contains_key("eval_loss"), "{last:?}");
    // Three updates of two rows are one pass over the six that are left.
    assert_eq!(last["epoch"], json!(1.0));
    scratch.succeeds(&format!("{sft} --output_dir whole"));
    assert!(!scratch.metrics("whole").pop().unwrap().contains_key("eval_loss"));
    scratch.refuses(
        &format!("{sft} --eval_split_size 0.25 --eval_dataset_name demos.jsonl --output_dir out"),
        2,
        &["eval_split_size = 0.25 and eval_dataset_name = demos.jsonl exclude each other"],
    );
}

#[test]
fn datasets_are_mixed_by_weight_from_the_seed() {
    let scratch = Scratch::new();
    scratch.write("more.csv", "prompt\nonce more\nand again\n");
    let line = format!("{PPO} --dataset_name more.csv --dataset_weights 0.2 --dataset_weights 0.8");
    let run = |line: &str, out: &str| {
        scratch.succeeds(&format!("{line} --output_dir {out}"));
        timeless(scratch.metrics(out))
    };
    let first = run(&line, "first");
    assert_eq!(run(&line, "second"), first);
    assert_eq!(run("ppo --config first/config.yaml", "third"), first, "config.yaml keeps the list");
    assert_ne!(run(&line.replace("0.2 --dataset_weights 0.8", "0.8 0.2"), "fourth"), first);
    // Episodes by default are so many passes over all prompts together: 3 * (8 + 2) in updates of 4.
    let whole = line.replace("--total_episodes 8", "");
    assert_eq!(run(&whole, "whole").len(), 8);
}

#[test]
fn rows_that_are_packed_have_the_loss_of_rows_that_are_not() {
    let scratch = Scratch::new();
    // With eos 29, 29, 29 and 21 tokens: two blocks of at most 64.
    let rows = [("x", 28), ("y", 28), ("z", 28), ("x", 20)];
    scratch.write("rows.jsonl", &rows.map(|(c, n)| format!("{}\n", json!({"content": c.repeat(n)}))).concat());
    let sft =
        "sft --model_name_or_path policy --dataset_name rows.jsonl --max_length 64 --max_steps 2 --logging_steps 1";
    scratch.refuses(&format!("{sft} --output_dir out"), 1, &["line 1", "expected a field `text`", "found `content`"]);
    let sft = format!("{sft} --dataset_text_field content");
    scratch.succeeds(&format!("{sft} --per_device_train_batch_size 4 --output_dir apart"));
    scratch.succeeds(&format!("{sft} --packing --per_device_train_batch_size 2 --output_dir packed"));
    let (apart, packed) = (scratch.metrics("apart"), scratch.metrics("packed"));
    assert_eq!((apart.len(), packed.len()), (2, 2));
    for (apart, packed) in apart.iter().zip(&packed) {
        for name in ["loss", "grad_norm", "num_tokens", "epoch"] {
            let [apart, packed] = [apart, packed].map(|line| line[name].as_f64().unwrap());
            assert!((apart - packed).abs() <= 1e-5 * apart.abs(), "{name}: {apart}, {packed}");
        }
    }
}
