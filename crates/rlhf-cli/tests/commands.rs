//! `generate`, `logprobs` and `score` as a user pipes rows through them.

use crate::cli::{PPO, Ran, Scratch, json_lines};
use crate::support::{Tensors, golden};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tch::Tensor;

const TOLERANCE: f64 = 2e-5;

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

/// Runs `line` with `input` on standard input.
fn pipe(scratch: &Scratch, line: &str, input: &str) -> Ran {
    let mut child =
        scratch.command(line).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    Ran::from(child.wait_with_output().unwrap())
}

/// The rows that `line` makes of `rows`.
#[track_caller]
fn piped(scratch: &Scratch, line: &str, rows: &[Value]) -> Vec<Map<String, Value>> {
    let ran = pipe(scratch, line, &lines(rows));
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{line}");
    json_lines(&ran.stdout)
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|x| x.as_i64().unwrap()).collect()
}

#[track_caller]
fn assert_near(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= TOLERANCE, "found {found}, expected {expected}");
    }
}

fn model_golden(model: &str) -> Tensors {
    Tensors::read(&golden().join("models").join(model).join("golden.safetensors"))
}

fn golden_row(golden: &Tensors, name: &str, row: usize) -> Vec<f64> {
    Vec::<f64>::try_from(golden.get(name).get(row as i64).to_kind(tch::Kind::Double)).unwrap()
}

#[test]
fn logprobs_equal_those_of_transformers_in_every_batch_and_at_every_border() {
    for model in ["gpt2", "gpt_neox", "llama_tied"] {
        let (scratch, golden) = (Scratch::with_policy(model), model_golden(model));
        let ids = golden.rows("unpadded.input_ids");
        // Prompts of 1, 2, ... tokens, the last one the whole row: an empty completion.
        let len = ids[0].len();
        let cases: Vec<(usize, usize)> = (0..ids.len()).flat_map(|row| (1..=len).map(move |at| (row, at))).collect();
        let case = |&(row, at): &(usize, usize)| json!({"id": [row, at], "prompt_ids": ids[row][..at], "completion_ids": ids[row][at..]});
        let rows: Vec<Value> = cases.iter().map(case).collect();
        for batch_size in [1, 3, 32] {
            let line = format!("logprobs --model policy --batch_size {batch_size}");
            let found = piped(&scratch, &line, &rows);
            assert_eq!(found.len(), rows.len());
            for ((found, sent), &(row, at)) in found.iter().zip(&rows).zip(&cases) {
                for (name, value) in sent.as_object().unwrap() {
                    assert_eq!(&found[name], value, "rows keep their order and their fields");
                }
                let expected = &golden_row(&golden, "unpadded.next_logprobs", row)[at - 1..];
                assert_near(&numbers(&found["logprobs"]), expected);
                assert_near(&[found["sum_logprobs"].as_f64().unwrap()], &[numbers(&found["logprobs"]).iter().sum()]);
            }
        }
    }
}

#[test]
fn scores_equal_those_of_transformers_for_every_form_of_row() {
    for model in ["gpt2_cls", "gpt_neox_cls", "llama_untied_cls"] {
        let scratch = Scratch::with_policy("gpt_neox");
        scratch.copy("judge", model);
        let golden = model_golden(model);
        let last = Vec::<i64>::try_from(golden.get("unpadded.score_index")).unwrap();
        let expected = Vec::<f64>::try_from(golden.get("unpadded.score").to_kind(tch::Kind::Double)).unwrap();
        let ids: Vec<Vec<i64>> = golden.rows("unpadded.input_ids");
        let ids: Vec<&[i64]> = ids.iter().zip(&last).map(|(ids, &last)| &ids[..=last as usize]).collect();
        let whole: Vec<Value> = ids.iter().map(|ids| json!({"input_ids": ids})).collect();
        let cut: Vec<Value> =
            ids.iter().map(|ids| json!({"prompt_ids": ids[..3], "completion_ids": ids[3..]})).collect();
        for (rows, batch_size) in [(&whole, 1), (&whole, 32), (&cut, 2)] {
            let line = format!("score --model_name_or_path judge --batch_size {batch_size}");
            let found: Vec<f64> =
                piped(&scratch, &line, rows).iter().map(|row| row["score"].as_f64().unwrap()).collect();
            assert_near(&found, &expected);
        }
    }
}

#[test]
fn logprobs_of_what_was_generated_are_those_that_generate_gave() {
    let scratch = Scratch::new();
    let flags = "--max_new_tokens 8 --temperature 0.7 --top_k 40 --repetition_penalty 1.2 --stop_token_ids 7,12";
    scratch.succeeds(&format!(
        "generate --model policy --dataset_name prompts.jsonl {flags} --num_return_sequences 3 --output_file a.jsonl"
    ));
    let responses = json_lines(&scratch.read("a.jsonl"));
    assert_eq!(responses.len(), 24);
    for (i, row) in responses.iter().enumerate() {
        assert_eq!(row["completion_index"], json!(i % 3));
        assert_eq!(row["prompt_ids"], responses[i / 3 * 3]["prompt_ids"]);
    }
    let line = "logprobs --model policy --temperature 0.7 --batch_size 5 --dataset_name a.jsonl";
    let measured = json_lines(&scratch.succeeds(line));
    for (response, measured) in responses.iter().zip(&measured) {
        assert_near(&numbers(&measured["logprobs"]), &numbers(&response["logprobs"]));
        for name in
            ["prompt", "prompt_ids", "completion", "completion_ids", "completion_index", "finish_reason", "num_tokens"]
        {
            assert_eq!(measured[name], response[name]);
        }
    }
    let hotter = json_lines(&scratch.succeeds(&line.replace("0.7", "1")));
    assert_ne!(hotter[0]["logprobs"], measured[0]["logprobs"]);
    // The ids, eos and all, are what is scored, and not the text.
    let whole = |row: &Map<String, Value>| [ids(&row["prompt_ids"]), ids(&row["completion_ids"])].concat();
    let rows: Vec<Value> = responses.iter().map(|row| json!({"input_ids": whole(row)})).collect();
    let scores =
        |rows: &[Map<String, Value>]| rows.iter().map(|row| row["score"].as_f64().unwrap()).collect::<Vec<_>>();
    let by_ids = piped(&scratch, "score --model reward", &rows);
    let by_response = json_lines(&scratch.succeeds("score --model reward --dataset_name a.jsonl"));
    assert_near(&scores(&by_response), &scores(&by_ids));
    assert!(
        by_response.iter().zip(&responses).all(|(scored, row)| scored["completion_index"] == row["completion_index"])
    );
}

#[test]
fn text_is_what_its_ids_are_joined_before_it_is_encoded_and_without_eos() {
    for family in ["gpt_neox", "llama_tied"] {
        let scratch = Scratch::with_policy(family);
        let tokenizer = rlhf::tokenizer::Tokenizer::from_pretrained(&scratch.path("policy")).unwrap();
        let (prompt, completion) = ("The movie was", " a film, and the film was long");
        let found = piped(
            &scratch,
            "logprobs --model policy",
            &[json!({"prompt": prompt, "completion": completion}), json!({"prompt": "", "completion": ""})],
        );
        let whole = tokenizer.encode(&format!("{prompt}{completion}")).unwrap();
        let completion_ids = ids(&found[0]["completion_ids"]);
        let border = whole.len() - completion_ids.len();
        assert_eq!((&whole[border..], tokenizer.encode(prompt).unwrap().len()), (&completion_ids[..], border));
        assert_eq!(found[1]["logprobs"], json!([]));
        assert_eq!(found[1]["sum_logprobs"], json!(0.0));
        let by_ids = json!({"prompt_ids": whole[..border], "completion_ids": completion_ids});
        let again = piped(&scratch, "logprobs --model policy", &[by_ids]);
        assert_near(&numbers(&again[0]["logprobs"]), &numbers(&found[0]["logprobs"]));
    }
}

#[test]
fn any_reward_scores_a_file_of_responses_as_a_run_would() {
    let scratch = Scratch::new();
    scratch.write(
        "reward.sh",
        "while read -r line; do case $line in *movie*) echo '{\"score\": 2}';; *) echo '{\"score\": -1}';; esac; done\n",
    );
    let rows = [
        json!({"prompt": "The movie", "completion": " was long and long", "label": "was long and long"}),
        json!({"prompt": "A film", "completion": " was", "label": "1"}),
        json!({"prompt": [{"role": "user", "content": "do"}], "prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "label": "x"}),
    ];
    scratch.write(
        "score.yaml",
        "tokenizer_name: policy\nreward_command: sh reward.sh\nreward_weights: [words=0.5]\n\
         reward: ['words=length:target=4,unit=words', 'exact:label']\n",
    );
    let found = piped(&scratch, "score --config score.yaml", &rows);
    for (row, (components, total)) in found.iter().zip([
        (json!({"command": 2.0, "words": 0.0, "exact": 1.0}), 3.0),
        (json!({"command": -1.0, "words": -0.75, "exact": 0.0}), -1.375),
    ]) {
        assert_eq!((&row["components"], row["score"].as_f64()), (&components, Some(total)));
        assert!(row["prompt"].is_string(), "a row keeps its own fields");
    }
    // A reward model among them gives the scores that it gives alone, of the same tokens.
    let alone = piped(&scratch, "score --model reward", &rows);
    assert_eq!(piped(&scratch, "score --reward_model_path reward", &rows), alone, "its name in ppo");
    let combined = piped(&scratch, "score --model reward --reward json --batch_size 1", &rows);
    for (alone, combined) in alone.iter().zip(&combined) {
        let [alone, model] = [&alone["score"], &combined["components"]["model"]].map(|score| score.as_f64().unwrap());
        assert!((alone - model).abs() < 1e-5, "{alone} is not {model}");
    }
    for (line, code, words) in [
        ("score", 2, "no reward: set at least one of model_name_or_path, reward, reward_command and reward_url"),
        ("score --reward json", 2, "tokenizer_name: expected the policy's folder"),
        ("score --model reward --reward rhyme", 2, "reward = rhyme: expected one of model"),
        ("score --model reward --reward exact:answer --dataset_name demos.jsonl", 1, "reward `exact`"),
        (
            "score --model reward --reward json --dataset_name prompts.jsonl",
            1,
            "prompts.jsonl: line 1: expected a field `completion`",
        ),
    ] {
        scratch.refuses(line, code, &[words]);
    }
}

#[test]
fn scores_of_text_and_of_prompt_with_completion_are_those_of_their_ids() {
    let scratch = Scratch::new();
    let tokenizer = rlhf::tokenizer::Tokenizer::from_pretrained(&scratch.path("reward")).unwrap();
    let ids = tokenizer.encode("The movie was long").unwrap();
    let rows = [
        json!({"input_ids": ids}),
        json!({"text": "The movie was long", "score": "replaced"}),
        json!({"prompt": "The movie", "completion": " was long"}),
    ];
    let found = piped(&scratch, "score --model reward", &rows);
    let scores: Vec<f64> = found.iter().map(|row| row["score"].as_f64().unwrap()).collect();
    assert_near(&scores, &[scores[0]; 3]);
}

#[test]
fn token_ids_of_another_tokenizer_are_told_from_the_models_own() {
    let scratch = Scratch::new();
    let line = "generate --model policy --dataset_name prompts.jsonl --max_new_tokens 6 --do_sample false";
    let consistent: Vec<Value> = json_lines(&scratch.succeeds(line)).into_iter().map(Value::Object).collect();
    // Each row with the ids of the next one's completion: those of a text that is not its own.
    let ids = consistent.iter().cycle().skip(1).map(|row| row["completion_ids"].clone());
    let foreign = consistent.iter().zip(ids).map(|(row, ids)| {
        let mut row = row.clone();
        row["completion_ids"] = ids;
        row["completion"] = json!("a text of another tokenizer");
        row
    });
    let foreign: Vec<Value> = foreign.collect();
    for (rows, is_foreign) in [(&consistent, false), (&foreign, true)] {
        for line in [
            "score --model reward",
            "score --reward_model_path reward --tokenizer_name policy",
            "logprobs --model policy",
        ] {
            let ran = pipe(&scratch, line, &lines(rows));
            assert_eq!((ran.code, ran.stdout.lines().count()), (0, rows.len()), "{line}: {}", ran.stderr);
            let notes = ran.stderr.lines().filter(|line| line.contains("another tokenizer made them")).count();
            assert_eq!(notes, usize::from(is_foreign), "{line}: {}", ran.stderr);
        }
    }
    // As texts they are read with the model's own tokenizer.
    let text = |row: &Value| json!({"prompt": row["prompt"], "completion": row["completion"]});
    let ran = pipe(&scratch, "score --model reward", &lines(&foreign.iter().map(text).collect::<Vec<_>>()));
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
}

#[test]
fn messages_are_measured_as_the_text_that_the_chat_template_makes_of_them() {
    let scratch = Scratch::new();
    let template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}\n{% endfor %}\
                    {% if add_generation_prompt %}a:{% endif %}";
    for model in ["policy", "reward"] {
        scratch.write(&format!("{model}/chat_template.jinja"), template);
    }
    let (user, assistant) =
        (json!({"role": "user", "content": "Good?"}), json!({"role": "assistant", "content": " It was."}));
    let (prompt, completion) = ("u:Good?<|endoftext|>\na:", " It was.<|endoftext|>");
    let chat = json!({"prompt": [user], "completion": [assistant]});
    let text = json!({"prompt": prompt, "completion": format!("{completion}\n")});
    let found = piped(&scratch, "logprobs --model policy", &[chat.clone(), text]);
    assert_eq!(found[0]["completion_ids"], found[1]["completion_ids"]);
    assert_near(&numbers(&found[0]["logprobs"]), &numbers(&found[1]["logprobs"]));
    // A score is read at the last eos, as in training; the line end of the template is behind it.
    let text = json!({"text": format!("{prompt}{completion}")});
    let found = piped(&scratch, "score --model reward", &[chat, json!({"messages": [user, assistant]}), text]);
    let scores: Vec<f64> = found.iter().map(|row| row["score"].as_f64().unwrap()).collect();
    assert_near(&scores, &[scores[2]; 3]);
}

#[test]
fn rows_that_cannot_be_used_are_refused_with_their_place() {
    let scratch = Scratch::new();
    let long = vec![5; 65];
    let logprobs = [
        (json!({"prompt": "x"}), &["expected a field `completion`", "`prompt`"][..]),
        (json!({"completion": "x"}), &["expected a field `prompt`"]),
        (json!({"prompt": "", "completion": "x"}), &["begins with the first token", "expected a prompt"]),
        (json!({"prompt_ids": [], "completion_ids": [5]}), &["begins with the first token"]),
        (json!({"prompt_ids": [5]}), &["expected a field `completion_ids`"]),
        (json!({"prompt_ids": [5], "completion": "x"}), &["expected a field `completion_ids`"]),
        (
            json!({"prompt_ids": [5], "completion_ids": "x"}),
            &["field `completion_ids`", "a list of token ids", "\"x\""],
        ),
        (json!({"prompt_ids": [5], "completion_ids": [352]}), &["`completion_ids`", "vocabulary of 352", "found 352"]),
        (json!({"prompt_ids": [5], "completion_ids": long}), &["too long", "at most 64 tokens", "found 66"]),
        (json!([5]), &["expected a JSON object"]),
    ];
    let score = [
        (json!({"prompt": "x"}), &["expected a field `text`", "`input_ids`", "found `prompt`"][..]),
        (json!({"text": ""}), &["the text is empty"]),
        (json!({"input_ids": [-1]}), &["`input_ids`", "vocabulary of 352", "found -1"]),
        (json!({"input_ids": long}), &["too long", "at most 64 tokens", "found 65"]),
    ];
    let good = json!({"prompt": "a", "completion": " b"});
    for (line, cases) in [("logprobs --model policy", &logprobs[..]), ("score --model reward", &score[..])] {
        for (row, words) in cases {
            scratch.write("rows.jsonl", &lines(&[good.clone(), row.clone()]));
            let words = [&["rows.jsonl: line 2: "], *words].concat();
            scratch.refuses(&format!("{line} --dataset_name rows.jsonl --output_file out.jsonl"), 1, &words);
        }
        scratch.refuses(&format!("{line} --dataset_name nowhere.jsonl"), 1, &["nowhere.jsonl", "no such path"]);
        scratch.refuses(line, 1, &["standard input: expected at least one row"]);
        scratch.refuses(&format!("{line} --batch_size 0"), 2, &["batch_size = 0", "at least 1"]);
        pipe(&scratch, line, "{}\n").is_one_error(line, 1, &["standard input: line 1: "]);
        pipe(&scratch, line, "\n{\"a\": \n").is_one_error(line, 1, &["standard input: line 2: not valid JSON"]);
        scratch.write("once.jsonl", "mine");
        scratch.write("rows.jsonl", &lines(std::slice::from_ref(&good)));
        let words = ["once.jsonl: the file exists", "--overwrite_output_file"];
        scratch.refuses(&format!("{line} --dataset_name rows.jsonl --output_file once.jsonl"), 1, &words);
    }
    scratch.refuses("logprobs --model policy --temperature 0", 2, &["temperature = 0", "above 0"]);
    scratch.refuses("logprobs --model reward --dataset_name rows.jsonl", 1, &["embed_out.weight"]);
    scratch.refuses("score --model policy --dataset_name rows.jsonl", 1, &["score.weight"]);
}

#[test]
fn a_model_whose_numbers_are_not_finite_is_refused_at_the_row() {
    let scratch = Scratch::new();
    for (dir, head) in [("policy", "embed_out.weight"), ("reward", "score.weight")] {
        scratch.edit_tensors(dir, |tensors| {
            let bad = Tensor::full_like(&tensors[head], f64::NAN);
            tensors.insert(head.into(), bad);
        });
    }
    for line in ["logprobs --model policy", "score --model reward"] {
        let ran = pipe(&scratch, line, &lines(&[json!({"prompt_ids": [5], "completion_ids": [6]})]));
        ran.is_one_error(line, 1, &["standard input: line 1: ", "not finite"]);
    }
}

#[test]
fn with_a_batch_size_of_one_each_row_is_generated_before_the_next_is_read() {
    let scratch = Scratch::new();
    for (line, field) in [
        ("logprobs --model policy --batch_size 1", "logprobs"),
        ("score --model reward --batch_size 1", "score"),
        ("generate --model policy --batch_size 1 --max_new_tokens 2 --input_format jsonl", "completion_ids"),
    ] {
        let mut child = scratch.command(line).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut to, mut from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()).lines());
        for id in 0..3 {
            writeln!(to, "{}", json!({"id": id, "prompt": "The film", "completion": " was"})).unwrap();
            let row: Value = serde_json::from_str(&from.next().unwrap().unwrap()).unwrap();
            assert!(row["id"] == id && !row[field].is_null(), "{line}: {row}");
        }
        drop(to);
        assert!(child.wait().unwrap().success() && from.next().is_none());
    }
}

#[test]
fn a_reader_that_has_seen_enough_ends_the_work_in_silence() {
    let scratch = Scratch::new();
    let row = json!({"prompt": "The film", "completion": " was"});
    scratch.write("rows.jsonl", &lines(&vec![row; 2000]));
    for line in ["logprobs --model policy", "score --model reward", "generate --model policy --max_new_tokens 1"] {
        let line = format!("{line} --dataset_name rows.jsonl --batch_size 4");
        let mut child = scratch.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!((ran.code, ran.stderr.as_str(), first.ends_with("}\n")), (0, "", true), "{line}");
    }
}

#[test]
fn generate_reads_rows_from_standard_input_and_takes_ids_before_text() {
    let scratch = Scratch::new();
    let line = "generate --model policy --max_new_tokens 4 --do_sample false --input_format jsonl";
    let found = piped(
        &scratch,
        line,
        &[
            json!({"prompt_ids": [275, 268], "id": 1}),
            json!({"prompt": "ignored", "prompt_ids": [275, 268], "completion": "the row's own"}),
            json!({"input_ids": [275, 268]}),
        ],
    );
    for row in &found {
        assert_eq!(row["completion_ids"], found[0]["completion_ids"]);
        assert_eq!((&row["prompt_ids"], &row["completion"]), (&json!([275, 268]), &found[0]["completion"]));
    }
    assert_eq!((&found[0]["id"], &found[1]["prompt"]), (&json!(1), &json!("ignored")));
    // Text it is by default, also where it looks like JSON, with a note.
    let text = "generate --model policy --max_new_tokens 1";
    let ran = pipe(&scratch, text, "{\"prompt\": \"x\"}\n{\"prompt\": \"y\"}\n");
    assert_eq!(json_lines(&ran.stdout)[0]["prompt"], "{\"prompt\": \"x\"}");
    let note =
        "note: a line of standard input is taken for a prompt, its JSON included; --input_format jsonl reads rows\n";
    assert_eq!(ran.stderr, note);
    assert_eq!(pipe(&scratch, text, "{\"text\": 1}\n[1]\n{\n").stderr, "");
    let ran = pipe(&scratch, line, "{\"prompt\": \"x\"}\n\n{\"text\": \"x\"}\n");
    ran.is_one_error(line, 1, &["standard input: line 3: expected a field `prompt`"]);
}

#[test]
fn a_prompt_that_is_the_name_of_a_data_file_is_generated_from_with_a_note() {
    let scratch = Scratch::new();
    let ran = scratch.run("generate --model policy --max_new_tokens 1 do prompts.jsonl");
    let note =
        "note: `prompts.jsonl` is a file, and its name is taken for a prompt; --dataset_name prompts.jsonl reads it\n";
    assert_eq!((ran.code, ran.stderr.as_str(), ran.stdout.lines().count()), (0, note, 2));
    scratch.succeeds("generate --model policy --max_new_tokens 1 none.jsonl policy");
}

#[test]
fn fields_of_a_generation_config_without_effect_are_named_in_one_note() {
    let scratch = Scratch::new();
    let notes = |fields: Value, flags: &str| {
        scratch.write("policy/generation_config.json", &fields.to_string());
        let ran = scratch.run(&format!("generate --model policy --max_new_tokens 2 {flags} x"));
        assert_eq!((ran.code, ran.stdout.lines().count()), (0, 1), "{}", ran.stderr);
        ran.stderr
    };
    // The fields that have an effect, and values by which transformers changes nothing.
    let neutral = json!({
        "do_sample": true, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "penalty_alpha": 0,
        "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "bad_words_ids": null, "suppress_tokens": [],
        "sequence_bias": {}, "min_length": 0, "guidance_scale": 1.0, "token_healing": false, "max_length": 20,
        "early_stopping": true, "length_penalty": 2.0, "use_cache": true, "transformers_version": "5.23.0"
    });
    assert_eq!(notes(neutral, ""), "");
    let set = json!({
        "bad_words_ids": [[5]], "eta_cutoff": 3e-4, "no_repeat_ngram_size": 3, "num_beams": 4, "typical_p": 0.5,
        "forced_bos_token_id": 0, "min_length": 9, "stop_strings": "end"
    });
    let note = |names: &str| format!("note: policy/generation_config.json: fields without effect here: {names}\n");
    let others = "no_repeat_ngram_size, bad_words_ids, forced_bos_token_id";
    assert_eq!(
        notes(set.clone(), ""),
        note(&format!("num_beams, typical_p, eta_cutoff, {others}, min_length, stop_strings"))
    );
    // Without draws, or with flags in their place, some would have none in transformers either.
    let flags = "--do_sample false --min_new_tokens 1 --stop_strings nothing";
    assert_eq!(notes(set, flags), note(&format!("num_beams, {others}")));
}

#[test]
fn prompt_and_completion_make_the_text_of_all_their_tokens() {
    for family in ["gpt_neox", "llama_tied"] {
        let scratch = Scratch::with_policy(family);
        let tokenizer = rlhf::tokenizer::Tokenizer::from_pretrained(&scratch.path("policy")).unwrap();
        let line = "generate --model policy --dataset_name prompts.jsonl --max_new_tokens 3 --num_return_sequences 32";
        let mut begin_with_space = 0;
        for row in json_lines(&scratch.succeeds(line)) {
            let text = |name: &str| row[name].as_str().unwrap();
            let whole = tokenizer.decode(&[ids(&row["prompt_ids"]), ids(&row["completion_ids"])].concat()).unwrap();
            assert_eq!(format!("{}{}", text("prompt"), text("completion")), whole);
            begin_with_space += usize::from(text("completion").starts_with(' '));
        }
        assert!(begin_with_space > 0, "{family}: no response tests what it should");
    }
}

#[test]
fn a_response_ends_at_the_given_stops_and_at_every_eos_unless_ignored() {
    let scratch = Scratch::new();
    let response = |flags: &str, words: &[&str]| {
        let line = format!("generate --model policy --do_sample false --max_new_tokens 12 {flags}");
        let ran = scratch.run_with(&line, &[words, &["--", "The movie was a film"]].concat());
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{line}");
        let row = json_lines(&ran.stdout).remove(0);
        (ids(&row["completion_ids"]), row["finish_reason"].as_str().unwrap().to_string())
    };
    let (plain, finish) = response("", &[]);
    assert_eq!((plain.len(), finish.as_str()), (12, "length"));
    let ends_at = |(ids, finish): (Vec<i64>, String), at: usize| {
        assert_eq!((&ids[..], finish.as_str()), (&plain[..=at], "stop"));
    };
    ends_at(response(&format!("--stop_token_ids {},{}", plain[7], plain[4]), &[]), 4);
    scratch.write("policy/generation_config.json", &json!({"eos_token_id": [350, plain[2]]}).to_string());
    ends_at(response("", &[]), 2);
    ends_at(response(&format!("--stop_token_ids {}", plain[4]), &[]), 2);
    ends_at(response(&format!("--ignore_eos --stop_token_ids {}", plain[4]), &[]), 4);
    assert_eq!(response("--ignore_eos", &[]).0, plain);
    let (patient, _) = response("--min_new_tokens 6", &[]);
    assert!(patient.len() >= 6 && patient[..2] == plain[..2] && !patient[..6].contains(&plain[2]), "{patient:?}");
    scratch.write("policy/generation_config.json", "{\"eos_token_id\": \"x\"}");
    let words = ["generation_config.json", "`eos_token_id`", "found \"x\""];
    scratch.refuses_with("generate --model policy", &["x"], 1, &words);
    scratch.write("policy/generation_config.json", "{}");

    // `stop_strings` as ids: the first text that the response's tokens make, starting within one of them.
    let tokenizer = rlhf::tokenizer::Tokenizer::from_pretrained(&scratch.path("policy")).unwrap();
    let text = |ids: &[i64]| tokenizer.decode(ids).unwrap();
    let ascii = (1..12).find(|&at| text(&plain[at..=at]).is_ascii()).unwrap();
    let stop = text(&plain[ascii..=ascii]);
    let first = (0..12).find(|&at| text(&plain[..=at]).contains(&stop)).unwrap();
    ends_at(response("--stop_strings nothing", &["--stop_strings", &stop]), first);
    scratch.refuses_with("generate --model policy", &["--stop_strings", "", "x"], 2, &["stop_strings", "some text"]);
}

#[test]
fn token_ids_need_no_tokenizer_and_every_family_generates_from_them() {
    let scratch = Scratch::new();
    for model in [
        "opt",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "phi3",
        "llama_rope3",
        "olmo2",
        "qwen3_moe",
        "lfm2",
        "qwen3_5",
        "lfm2_moe",
        "qwen3_5_moe",
        "gemma4",
        "gemma4_moe",
        "ministral3",
        "granite",
        "gpt_oss",
    ] {
        let (dir, golden) = (golden().join("models").join(model), model_golden(model));
        let dir = dir.display();
        let prompts = golden.rows("greedy.prompt_ids").into_iter().zip(golden.rows("greedy.prompt_mask"));
        let prompts: Vec<Vec<i64>> = prompts
            .map(|(ids, mask)| ids.iter().zip(mask).filter(|(_, mask)| *mask == 1).map(|(id, _)| *id).collect())
            .collect();
        let rows: Vec<Value> = prompts.iter().map(|ids| json!({"prompt_ids": ids})).collect();
        let line =
            format!("generate --model {dir} --do_sample false --ignore_eos --max_new_tokens 16 --input_format jsonl");
        let responses = piped(&scratch, &line, &rows);
        for (response, expected) in responses.iter().zip(golden.rows("greedy.tokens")) {
            assert_eq!(ids(&response["completion_ids"]), expected, "{model}");
            assert!(response["completion"].is_null());
        }
        let rows: Vec<Value> = responses.into_iter().map(Value::Object).collect();
        for row in piped(&scratch, &format!("logprobs --model {dir}"), &rows) {
            let sampled: Vec<Value> = rows.iter().filter(|r| r["prompt_ids"] == row["prompt_ids"]).cloned().collect();
            assert_near(&numbers(&row["logprobs"]), &numbers(&sampled[0]["logprobs"]));
        }
    }
    let dir = golden().join("models/qwen3");
    let ran =
        pipe(&scratch, &format!("logprobs --model {}", dir.display()), "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    ran.is_one_error("text", 1, &["line 1", "text needs a tokenizer", "qwen3", "prompt_ids"]);
}

#[test]
fn an_id_that_no_tokenizer_has_is_refused_with_its_place() {
    let scratch = Scratch::new();
    // 2^32 + 321 would be the token 321 in 32 bits.
    scratch.write("rows.jsonl", &lines(&[json!({"prompt": "do", "completion_ids": [4_294_967_617u64]})]));
    let line = "score --tokenizer_name policy --reward length:target=3 --dataset_name rows.jsonl";
    scratch.refuses(line, 1, &["rows.jsonl: line 1: field `completion_ids`", "found 4294967617"]);
}

#[test]
fn texts_of_users_and_files_reach_standard_error_escaped_and_shortened() {
    let scratch = Scratch::new();
    let long = "\u{1b}[2J\u{9b}1m".repeat(20_000);
    scratch.write("rows.jsonl", &lines(&[json!({"prompt": [long], (long.clone()): 1})]));
    std::fs::create_dir(scratch.path("\u{1b}[2J")).unwrap();
    std::fs::write(scratch.path("long.yaml"), format!("\"{}\": 1\n", "\\e[2J".repeat(20_000))).unwrap();
    let arguments: [&[&str]; 5] = [
        &["--dataset_name", "rows.jsonl"],
        &["--dataset_name", "\u{1b}[2J"],
        &["--dataset_name", "prompts.jsonl", "--dtype", &long[..90_000]],
        &["--dataset_name", "prompts.jsonl", &long[..90_000]],
        &["--config", "long.yaml"],
    ];
    for arguments in arguments {
        let ran = scratch.run_with("logprobs --model_name_or_path policy", arguments);
        let error = ran.stderr.strip_suffix('\n').unwrap();
        assert!(ran.code > 0 && error.starts_with("error: ") && error.len() < 4000, "{error}");
        assert!(!error.contains(char::is_control), "{error:?}");
    }
}

#[test]
fn a_bare_prompt_that_a_chat_model_ends_at_once_hints_at_the_template() {
    let scratch = Scratch::new();
    let line = "generate --model policy --do_sample false --max_new_tokens 4";
    let first = |ran: &str| json_lines(ran)[0]["completion_ids"][0].as_i64().unwrap();
    let stop = first(&scratch.run_with(line, &["The movie"]).stdout);
    let line = format!("{line} --stop_token_ids {stop}");
    let hints = |line: &str| {
        let ran = scratch.run_with(line, &["The movie"]);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran.stderr
    };
    assert_eq!(hints(&line), "", "without a template there is nothing to try");
    scratch.write("policy/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let hint = hints(&line);
    assert!(hint.contains("--apply_chat_template") && hint.lines().count() == 1, "{hint}");
    assert_eq!(hints(&format!("{line} --apply_chat_template")), "");
}

#[test]
fn variables_of_the_chat_template_are_a_setting_that_a_resumed_run_keeps() {
    let scratch = Scratch::new();
    scratch
        .write("policy/chat_template.jinja", "{{ greeting or '' }}{% for m in messages %}{{ m.content }}{% endfor %}");
    let messages = json!([{"role": "user", "content": "do"}]);
    let with_kwargs = json!({"prompt": messages, "chat_template_kwargs": {"greeting": "human"}});
    let rows: Vec<Value> = (0..8).map(|_| json!({"prompt": messages})).collect();
    scratch.write("prompts.jsonl", &lines(&rows));
    scratch.write("rows.jsonl", &lines(&[json!({"prompt": messages}), with_kwargs]));
    let line = "generate --model policy --dataset_name rows.jsonl --max_new_tokens 1 --do_sample false";
    let ids = |line: &str| -> Vec<Value> {
        json_lines(&scratch.succeeds(line)).iter().map(|row| row["prompt_ids"].clone()).collect()
    };
    let plain = ids(line);
    assert_ne!(plain[0], plain[1]);
    assert_eq!(ids(&format!("{line} --chat_template_kwargs {{\"greeting\":\"human\"}}")), vec![plain[1].clone(); 2]);
    assert_eq!(ids(&format!("{line} --chat_template_kwargs {{\"greeting\":\"2024\"}}"))[1], plain[1]);
    scratch.write("run.yaml", "chat_template_kwargs: {greeting: human}\nsave_steps: 1\n");
    let run = format!("{PPO} --config run.yaml");
    let ran = scratch.run(&run);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(scratch.read("out/config.yaml").contains("greeting: human"));
    assert!(!scratch.read("out/tokenizer_config.json").contains("greeting"));
    let changed = format!("{run} --resume_from_checkpoint true --chat_template_kwargs {{\"greeting\":\"do\"}}");
    scratch.refuses(&changed, 2, &["chat_template_kwargs = ", "as in out"]);
    for (value, found) in [("[1]", "found a list"), ("{\"messages\":[]}", "found `messages`"), ("x", "not JSON")] {
        let words = ["chat_template_kwargs: expected JSON of the form {\"enable_thinking\": false}", found];
        scratch.refuses_with(line, &["--chat_template_kwargs", value], 2, &words);
    }
}

#[test]
fn a_signal_names_the_rows_written_so_far_and_leaves_no_empty_file() {
    let scratch = Scratch::new();
    let prompts: Vec<Value> = (0..20_000).map(|_| json!({"prompt": "a"})).collect();
    scratch.write("many.jsonl", &lines(&prompts));
    let parts = || {
        let files = std::fs::read_dir(scratch.path("")).unwrap().map(|file| file.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|end| end == "part")).collect::<Vec<_>>()
    };
    let line = "generate --model_name_or_path policy --dataset_name many.jsonl --max_new_tokens 2 --batch_size 2 \
                --output_file out.jsonl";
    let mut child = scratch.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while !parts().iter().any(|part| std::fs::metadata(part).is_ok_and(|file| file.len() > 0)) {
        assert!(started.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap());
    let [part] = &parts()[..] else { panic!("{:?}", parts()) };
    let name = part.file_name().unwrap().to_string_lossy().into_owned();
    assert_eq!((ran.code, scratch.path("out.jsonl").exists()), (130, false), "{}", ran.stderr);
    assert!(ran.stderr.contains(&format!("note: the rows written so far are in {name}")), "{}", ran.stderr);
    assert!(!json_lines(&std::fs::read_to_string(part).unwrap()).is_empty());
}
