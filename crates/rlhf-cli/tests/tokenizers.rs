//! Tokenizers of every kind and chat templates of every style, against transformers.

use crate::support::{golden, read_json, required_golden, say};
use rlhf::data::{Dataset, Demonstration, DemonstrationOptions};
use rlhf::model::ModelConfig;
use rlhf::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::Path;

fn ids(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

/// Compares a tokenizer with what transformers said of each text.
fn assert_cases(name: &str, dir: &Path, kind: &Value) {
    let tokenizer = Tokenizer::from_pretrained(dir).unwrap();
    for case in kind["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let with = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text).unwrap(), with, "{name}: {text:?}");
        assert_eq!(tokenizer.encode_verbatim(text).unwrap(), ids(&case["ids_no_special"]), "{name}: {text:?}");
        assert_eq!(tokenizer.decode_verbatim(&with).unwrap(), case["decoded"], "{name}: {text:?}");
        assert_eq!(tokenizer.decode(&with).unwrap(), case["decoded_skip_special"], "{name}: {text:?}");
        let parts = tokenizer.decode_each(&with).unwrap();
        assert_eq!(
            (parts.len(), parts.concat().into()),
            (with.len(), case["decoded_skip_special"].clone()),
            "{name}: {text:?}"
        );
    }
}

#[test]
fn ids_and_texts_of_every_kind_of_tokenizer_are_those_of_transformers() {
    let dir = golden().join("tokenizers");
    let goldens = read_json(&dir.join("golden.json"));
    let goldens = goldens.as_object().unwrap();
    assert_eq!(goldens.len(), 5);
    for (name, kind) in goldens {
        assert_cases(name, &dir.join(kind["dir"].as_str().unwrap()), kind);
    }
}

/// The parts of the text of `ids` after `prompt`, as they are shown while a model generates them.
fn streamed(tokenizer: &Tokenizer, prompt: &[i64], ids: &[i64]) -> Vec<String> {
    let mut stream = tokenizer.stream(prompt);
    let mut parts: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    parts.push(stream.finish().unwrap());
    parts
}

#[test]
fn a_response_that_is_decoded_token_by_token_reads_as_the_whole() {
    let dir = golden().join("tokenizers");
    for (name, kind) in read_json(&dir.join("golden.json")).as_object().unwrap() {
        let tokenizer = Tokenizer::from_pretrained(&dir.join(kind["dir"].as_str().unwrap())).unwrap();
        for case in kind["cases"].as_array().unwrap() {
            let with = ids(&case["ids"]);
            for border in 0..=with.len() {
                let (prompt, response) = with.split_at(border);
                let whole = tokenizer.decode_after(prompt, response).unwrap();
                let parts = streamed(&tokenizer, prompt, response);
                // Where the border is within a character, the stream has the character and the whole has its last bytes.
                if !whole.contains(char::REPLACEMENT_CHARACTER) {
                    assert_eq!(parts.concat(), whole, "{name}: {border} of {with:?}");
                }
            }
        }
    }
}

#[test]
fn a_stream_waits_for_whole_characters_and_shows_bytes_that_are_none() {
    let tokenizer = Tokenizer::from_pretrained(&golden().join("models/gpt_neox")).unwrap();
    let bytes = |text: &str| tokenizer.encode_verbatim(text).unwrap();
    let face = bytes("\u{1f3ac}");
    assert!(face.len() > 1, "the character is several tokens: {face:?}");
    let parts = streamed(&tokenizer, &bytes("a"), &face);
    assert_eq!(parts.concat(), "\u{1f3ac}");
    assert_eq!(parts.iter().filter(|part| !part.is_empty()).count(), 1, "{parts:?}");
    // Never completed: shown once the next character is whole, or at the end.
    let broken = &face[..face.len() - 1];
    let parts = streamed(&tokenizer, &bytes("a"), &[broken, &bytes("b")].concat());
    assert!(parts.concat().ends_with('b') && parts.concat().starts_with(char::REPLACEMENT_CHARACTER), "{parts:?}");
    let parts = streamed(&tokenizer, &bytes("a"), broken);
    assert!(parts[..parts.len() - 1].concat().is_empty() && !parts[parts.len() - 1].is_empty(), "{parts:?}");
    // A prompt that ends within a character: its last bytes complete it.
    let parts = streamed(&tokenizer, broken, &face[face.len() - 1..]);
    assert_eq!(parts.concat(), "\u{1f3ac}");
    // Special tokens have no text, and end nothing.
    let eos = tokenizer.eos().unwrap();
    let parts = streamed(&tokenizer, &[eos], &[&[eos, eos, eos, eos, eos][..], &face, &[eos]].concat());
    assert_eq!(parts.concat(), "\u{1f3ac}");
}

#[test]
fn the_text_of_a_token_has_its_space_and_a_special_token_its_name() {
    for model in ["gpt_neox", "llama_tied"] {
        let tokenizer = Tokenizer::from_pretrained(&golden().join("models").join(model)).unwrap();
        let text = "The movie was";
        let ids = tokenizer.encode_verbatim(text).unwrap();
        let parts = (1..ids.len()).map(|at| tokenizer.token_text(Some(ids[at - 1]), ids[at]).unwrap());
        let first = tokenizer.token_text(None, ids[0]).unwrap();
        assert_eq!(first + &parts.collect::<String>(), text, "{model}");
        let eos = tokenizer.eos().unwrap();
        let name = tokenizer.token_text(ids.last().copied(), eos).unwrap();
        assert!(name.starts_with('<') && name.ends_with('>'), "{model}: {name:?}");
        // Bytes in the middle of a character are no empty text.
        let ids = tokenizer.encode_verbatim("a\u{1f3ac}\u{65e5}").unwrap();
        for pair in ids.windows(2) {
            assert!(!tokenizer.token_text(Some(pair[0]), pair[1]).unwrap().is_empty(), "{model}: {pair:?}");
        }
    }
}

#[test]
#[ignore = "compares models/tokenizer_goldens.json of another folder of reference values; set RLHF_GOLDEN=FOLDER"]
fn tokenizers_beside_given_golden_models_are_those_of_transformers() {
    let dir = required_golden().join("models");
    let models = read_json(&dir.join("index.json"));
    let models = models["models"].as_object().unwrap();
    let mut compared = 0;
    for (name, kind) in read_json(&dir.join("tokenizer_goldens.json")).as_object().unwrap() {
        let holder = models.iter().find(|(model, entry)| {
            entry["tokenizer"] == name.as_str() && dir.join(model).join("tokenizer.json").is_file()
        });
        match holder {
            Some((model, _)) => {
                assert_cases(name, &dir.join(model), kind);
                compared += 1;
            }
            None => say(&format!("{name}: no model folder with this tokenizer")),
        }
    }
    assert!(compared > 0, "{}: no model folder with a tokenizer of tokenizer_goldens.json", dir.display());
}

#[test]
fn conversations_are_rendered_and_encoded_as_transformers_does() {
    let dir = golden().join("chat");
    let goldens = read_json(&dir.join("golden.json"));
    let mut tokenizer =
        Tokenizer::from_pretrained(&golden().join("models").join(goldens["tokenizer"].as_str().unwrap())).unwrap();
    let mut errors = 0;
    for case in goldens["cases"].as_array().unwrap() {
        let (template, name) = (case["template"].as_str().unwrap(), case["messages"].as_str().unwrap());
        tokenizer.use_chat_template(&dir.join(template)).unwrap();
        let messages = goldens["conversations"][name].as_array().unwrap();
        let prompt = case["add_generation_prompt"].as_bool().unwrap();
        let found = tokenizer.encode_chat(messages, prompt, case["kwargs"].as_object().unwrap());
        match (found, case["error"].as_str()) {
            (Ok((text, tokens)), None) => {
                assert_eq!(text, case["text"].as_str().unwrap(), "{template}: {name}, prompt {prompt}");
                assert_eq!(tokens, ids(&case["ids"]), "{template}: {name}, prompt {prompt}");
            }
            (Err(error), Some(wanted)) => {
                assert!(error.to_string().ends_with(&format!(": {wanted}")), "{template}: {name}: {error}");
                errors += 1;
            }
            (found, _) => panic!("{template}: {name}, prompt {prompt}: found {found:?}, expected {case}"),
        }
    }
    assert!(errors > 0, "refusals are compared too");
}

/// A folder with the files of a golden tokenizer, and these of its own.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden().join("models/gpt2").join(name), dir.path().join(name)).unwrap();
    }
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn open(files: &[(&str, &str)]) -> Tokenizer {
    Tokenizer::from_pretrained(folder(files).path()).unwrap()
}

#[test]
fn end_and_pad_tokens_come_from_four_files_and_every_end_token_counts() {
    const CONFIG: &str = "tokenizer_config.json";
    const END: &str = r#"{"eos_token": {"content": "<|endoftext|>"}}"#;
    let generation = ("generation_config.json", r#"{"eos_token_id": [7, 0, 9], "pad_token_id": 3}"#);
    for (files, eos, pad) in [
        (&[(CONFIG, END)][..], &[0][..], None),
        (&[(CONFIG, "{}"), ("special_tokens_map.json", END)], &[0], None),
        (&[(CONFIG, r#"{"eos_token": "<|padding|>", "pad_token": "<|padding|>"}"#)], &[1], Some(1)),
        (&[(CONFIG, "{}"), ("config.json", r#"{"eos_token_id": 5, "pad_token_id": null}"#)], &[5], None),
        // Those of config.json count where generation_config.json has none.
        (&[(CONFIG, "{}"), ("config.json", r#"{"eos_token_id": 5}"#), generation], &[7, 0, 9], Some(3)),
        (&[(CONFIG, END), ("config.json", r#"{"eos_token_id": 5}"#), ("generation_config.json", "{}")], &[0, 5], None),
        (&[(CONFIG, END), generation], &[0, 7, 9], Some(3)),
        (&[(CONFIG, r#"{"eos_token": null}"#)], &[], None),
    ] {
        let tokenizer = open(files);
        assert_eq!((tokenizer.eos_ids(), tokenizer.pad()), (eos, pad), "{files:?}");
        assert_eq!(tokenizer.eos(), eos.first().copied());
    }
}

#[test]
fn tokens_that_no_file_sets_are_those_of_the_class_and_of_the_padding_of_tokenizer_json() {
    let mut json = read_json(&golden().join("models/gpt2/tokenizer.json"));
    json["padding"] = json!({
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": null, "pad_id": 1, "pad_type_id": 0, "pad_token": "<|padding|>"
    });
    let json = json.to_string();
    for (config, pad) in [
        ("{}", Some(1)),
        (r#"{"pad_token": null}"#, None),
        (r#"{"pad_token": "<|endoftext|>"}"#, Some(0)),
        // Classes of transformers with a default, which may be none.
        (r#"{"tokenizer_class": "GPT2TokenizerFast"}"#, None),
        (r#"{"tokenizer_class": "Qwen2Tokenizer"}"#, Some(0)),
        (r#"{"tokenizer_class": "LlamaTokenizer"}"#, Some(1)),
    ] {
        let tokenizer = open(&[("tokenizer.json", json.as_str()), ("tokenizer_config.json", config)]);
        assert_eq!(tokenizer.pad(), pad, "{config}");
    }
    let by_class = open(&[("tokenizer_config.json", r#"{"tokenizer_class": "GPTNeoXTokenizer"}"#)]);
    assert_eq!((by_class.eos(), by_class.pad()), (Some(0), Some(1)));
}

#[test]
fn tokens_that_files_beside_tokenizer_json_name_are_added_as_by_transformers() {
    let goldens = read_json(&golden().join("tokenizers/added.json"));
    let goldens = goldens.as_object().unwrap();
    assert_eq!(goldens.len(), 19);
    let plain = open(&[]);
    for (name, case) in goldens {
        let files: Vec<(&str, String)> = case["files"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(file, content)| (file.as_str(), content.to_string()))
            .collect();
        let dir = folder(&files.iter().map(|(file, content)| (*file, content.as_str())).collect::<Vec<_>>());
        let tokenizer = Tokenizer::from_pretrained(dir.path()).unwrap();
        let found = tokenizer.encode(case["text"].as_str().unwrap()).unwrap();
        assert_eq!(found, ids(&case["ids"]), "{name}");
        assert_eq!(tokenizer.decode_verbatim(&found).unwrap(), case["decoded"], "{name}");
        assert_eq!(tokenizer.decode(&found).unwrap(), case["decoded_skip_special"], "{name}");
        assert_eq!(
            (json!(tokenizer.eos()), json!(tokenizer.pad())),
            (case["eos"].clone(), case["pad"].clone()),
            "{name}"
        );
        // The other way round, tokens beside the same ones do no harm: no text of the plain tokenizer has them.
        let adds = found.contains(&320);
        plain.check_same(dir.path()).unwrap();
        assert_eq!(tokenizer.check_same(&golden().join("models/gpt2")).is_err(), adds, "{name}");
    }
}

/// A change of a tokenizer.json.
type Change = dyn Fn(&mut Value);

/// The tokenizer.json of a golden tokenizer after `change`, with a `tokenizer_config.json` and, if `family` has letters, a `config.json`.
fn with_settings(json: &str, change: impl Fn(&mut Value), settings: &Value, family: &str) -> Result<Tokenizer, String> {
    let mut file = read_json(&golden().join(json).join("tokenizer.json"));
    change(&mut file);
    let (file, settings) = (file.to_string(), settings.to_string());
    let model = json!({ "model_type": family }).to_string();
    let mut files = vec![("tokenizer.json", file.as_str()), ("tokenizer_config.json", settings.as_str())];
    files.extend((!family.is_empty()).then_some(("config.json", model.as_str())));
    Tokenizer::from_pretrained(folder(&files).path()).map_err(|e| e.to_string())
}

#[test]
fn settings_of_berts_classes_replace_the_normalizer_of_the_file_as_in_transformers() {
    let cased = |file: &mut Value| file["normalizer"]["lowercase"] = false.into();
    let as_it_is = |_: &mut Value| {};
    // Computed by transformers 5.23: the words and their accents in lower case, then two Chinese characters.
    let lower = [2, 234, 100, 64, 63, 1, 1, 3];
    let cases: [(&Change, Value, &str, &[i64]); 10] = [
        (&as_it_is, json!({ "tokenizer_class": "BertTokenizer" }), "bert", &lower),
        (&as_it_is, json!({ "tokenizer_class": "BertTokenizer", "do_lower_case": false }), "bert", &[2, 1, 1, 1, 1, 3]),
        (
            &as_it_is,
            json!({ "tokenizer_class": "DistilBertTokenizerFast", "do_lower_case": false }),
            "",
            &[2, 1, 1, 1, 1, 3],
        ),
        (&as_it_is, json!({ "do_lower_case": false }), "distilbert", &[2, 1, 1, 1, 1, 3]),
        (&cased, json!({ "tokenizer_class": "BertTokenizerFast" }), "", &lower),
        (&as_it_is, json!({ "tokenizer_class": "BertTokenizer", "strip_accents": false }), "", &[2, 234, 1, 1, 1, 3]),
        (
            &as_it_is,
            json!({ "tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": false }),
            "",
            &[2, 234, 100, 64, 63, 1, 3],
        ),
        // Other classes take the file as it is.
        (&as_it_is, json!({ "tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": false }), "bert", &lower),
        (&as_it_is, json!({ "do_lower_case": false }), "", &lower),
        (&cased, json!({ "tokenizer_class": "TokenizersBackend" }), "bert", &[2, 1, 1, 1, 1, 3]),
    ];
    for (change, settings, family, ids) in cases {
        let tokenizer = with_settings("tokenizers/bert", change, &settings, family).unwrap();
        assert_eq!(tokenizer.encode("HELLO Caf\u{e9} \u{6771}\u{4eac}").unwrap(), ids, "{settings} {family}");
    }
    let other = |file: &mut Value| file["normalizer"] = json!({ "type": "Lowercase" });
    let no_normalizer = "`do_lower_case`: expected a BertNormalizer in tokenizer.json, found \"Lowercase\"";
    let wrong: [(&Change, Value, &str); 2] = [
        (&other, json!({ "do_lower_case": false }), no_normalizer),
        (&as_it_is, json!({ "do_lower_case": 1 }), "`do_lower_case`: expected true or false, found 1"),
    ];
    for (change, settings, wanted) in wrong {
        let error = with_settings("tokenizers/bert", change, &settings, "bert").unwrap_err();
        assert!(error.contains("tokenizer_config.json") && error.ends_with(wanted), "{error}");
    }
}

#[test]
fn a_space_before_a_text_is_added_as_by_the_class_of_transformers() {
    let added = |file: &mut Value| file["pre_tokenizer"]["add_prefix_space"] = true.into();
    let plain = |_: &mut Value| {};
    // Computed by transformers 5.23.
    let (with, without) = (&[222, 41, 70, 269, 80, 222, 0, 267][..], &[41, 70, 269, 80, 222, 0, 66][..]);
    for (class, family, counts) in [
        ("GPT2Tokenizer", "gpt2", true),
        ("GPT2TokenizerFast", "smollm3", true),
        ("GPTNeoXTokenizer", "gpt_neox", true),
        ("Qwen2Tokenizer", "qwen3", true),
        ("PreTrainedTokenizerFast", "qwen2", true),
        ("RobertaTokenizerFast", "", true),
        ("BartTokenizer", "", true),
        ("", "opt", true),
        ("PreTrainedTokenizerFast", "qwen3", false),
        ("GPT2Tokenizer", "olmo2", false),
        ("LlamaTokenizer", "llama", false),
        ("", "llama", false),
    ] {
        let settings = |more: Value| {
            let mut all = if class.is_empty() { json!({}) } else { json!({ "tokenizer_class": class }) };
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            all
        };
        let read = |change: &Change, more: Value| {
            let tokenizer = with_settings("models/gpt2", change, &settings(more), family).unwrap();
            tokenizer.encode_verbatim("Hello <|endoftext|>a").unwrap()
        };
        let key = json!({ "add_prefix_space": true });
        assert_eq!(read(&plain, key.clone()), if counts { with } else { without }, "{class} {family}");
        assert_eq!(read(&added, json!({})), if counts { without } else { with }, "{class} {family}");
        assert_eq!((read(&plain, json!({})), read(&added, key)), (without.into(), with.into()), "{class} {family}");
    }
    let llama = |on: bool| {
        let settings = json!({ "tokenizer_class": "LlamaTokenizer", "add_prefix_space": on });
        with_settings("models/llama_untied", plain, &settings, "llama")
    };
    llama(true).unwrap();
    let wanted = "`add_prefix_space`: expected true, as in the rules of tokenizer.json, found false";
    assert!(llama(false).unwrap_err().ends_with(wanted));
}

#[test]
fn special_tokens_are_split_and_decoded_texts_cleaned_up_as_the_settings_say() {
    let plain = |_: &mut Value| {};
    let split = json!({ "tokenizer_class": "GPT2Tokenizer", "split_special_tokens": true });
    let tokenizer = with_settings("models/gpt2", plain, &split, "gpt2").unwrap();
    // Computed by transformers 5.23, as are the texts below.
    let ids = [66, 29, 93, 70, 79, 69, 280, 85, 70, 89, 85, 93, 31, 67];
    assert_eq!(tokenizer.encode("a<|endoftext|>b").unwrap(), ids);
    let dir = folder(&[]);
    let other = Tokenizer::from_pretrained(dir.path()).unwrap();
    assert_ne!(other.encode("a<|endoftext|>b").unwrap(), ids);

    let (text, clean) = ("It is n't , he 's . a ' b ?", "It isn't, he's. a'b?");
    for (on, wanted) in [(true, clean), (false, text)] {
        let tokenizer =
            with_settings("tokenizers/t5", plain, &json!({ "clean_up_tokenization_spaces": on }), "t5").unwrap();
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), wanted);
        assert_eq!(tokenizer.decode_verbatim(&ids).unwrap(), format!("{wanted}</s>"));
        assert_eq!(tokenizer.decode_each(&ids).unwrap().concat(), text);
    }
    let forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output";
    for (force, wanted) in [(false, "a , b ."), (true, "a, b.")] {
        let settings = json!({ "clean_up_tokenization_spaces": true, forced: force });
        let tokenizer = with_settings("models/gpt2", plain, &settings, "gpt2").unwrap();
        assert_eq!(tokenizer.decode(&[66, 222, 13, 307, 222, 15]).unwrap(), wanted);
    }
}

#[test]
fn an_added_token_without_a_row_in_the_embedding_is_named() {
    let dir = folder(&[("tokenizer_config.json", r#"{"eos_token": "<|endoftext|>", "pad_token": "[PAD]"}"#)]);
    let model = ModelConfig::from_dir(&golden().join("models/gpt2")).unwrap();
    let tokenizer = Tokenizer::from_pretrained(dir.path()).unwrap();
    let error = tokenizer.check_fits(&model, "policy".as_ref()).unwrap_err().to_string();
    let expected = "\"[PAD]\" is named by a file beside tokenizer.json, which lacks it, and gets the id 320: expected ids below vocab_size 320 of policy";
    assert!(error.ends_with(expected), "{error}");
    let mut config = read_json(&golden().join("models/gpt2/config.json"));
    config["vocab_size"] = json!(321);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    tokenizer.check_fits(&ModelConfig::from_dir(dir.path()).unwrap(), "policy".as_ref()).unwrap();
    let error = Tokenizer::from_pretrained(
        folder(&[("tokenizer_config.json", r#"{"added_tokens_decoder": {"7": "<end>x", "8": 3}}"#)]).path(),
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.ends_with("`added_tokens_decoder`: expected objects with a `content`, found something else"),
        "{error}"
    );
}

#[test]
fn one_line_names_the_tokens_that_end_and_pad_a_text() {
    let generation = ("generation_config.json", r#"{"eos_token_id": [0, 900]}"#);
    for (config, wanted) in [
        (
            r#"{"eos_token": "<|endoftext|>"}"#,
            r#"eos "<|endoftext|>" (0), also 900, which is no token; pad: none, not needed (saved as eos for transformers)"#,
        ),
        (
            r#"{"eos_token": "<|padding|>", "pad_token": "<|padding|>"}"#,
            r#"eos "<|padding|>" (1), also "<|endoftext|>" (0), also 900, which is no token; pad: the same"#,
        ),
        (
            r#"{"eos_token": "<|endoftext|>", "pad_token": "<|padding|>"}"#,
            r#"eos "<|endoftext|>" (0), also 900, which is no token; pad: "<|padding|>" (1)"#,
        ),
    ] {
        let found = open(&[("tokenizer_config.json", config), generation]).describe();
        assert_eq!(found, format!("{wanted}; chat template: none"));
    }
}

#[test]
fn a_tokenizer_without_a_tokenizer_json_is_refused_with_the_way_out() {
    for name in ["vocab.json", "vocab.txt", "tokenizer.model"] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(name), "x").unwrap();
        let error = Tokenizer::from_pretrained(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("expected a tokenizer.json, found {name}")), "{error}");
        assert!(error.contains("save_pretrained") && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn a_template_has_a_file_of_its_own_or_is_the_default_one_of_the_configuration() {
    let say = |files: &[(&str, &str)]| {
        let messages = vec![json!({"role": "user", "content": "hi"})];
        open(files).encode_chat(&messages, false, &Map::new()).map(|(text, _)| text).map_err(|e| e.to_string())
    };
    let config = ("tokenizer_config.json", r#"{"chat_template": "A{{ messages[0].content }}"}"#);
    let list = r#"{"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]}"#;
    assert_eq!(say(&[config]).unwrap(), "Ahi");
    assert_eq!(say(&[config, ("chat_template.jinja", "B{{ messages[0].content }}")]).unwrap(), "Bhi");
    assert_eq!(say(&[("tokenizer_config.json", list)]).unwrap(), "D");
    let error = say(&[]).unwrap_err();
    assert!(error.contains("expected `chat_template` in tokenizer_config.json"), "{error}");
    // One that is not sound matters to those with messages only.
    let broken = say(&[("chat_template.jinja", "{% for %}")]).unwrap_err();
    assert!(broken.contains("chat_template.jinja: chat template, line 1: syntax error"), "{broken}");
}

#[test]
fn a_template_is_saved_byte_for_byte_with_the_tokenizer() {
    let template = "{# one #}\r\n{{ messages }}\n\n";
    let source = folder(&[("chat_template.jinja", template), ("theirs.jinja", "{{ eos_token }}")]);
    let mut tokenizer = Tokenizer::from_pretrained(source.path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    tokenizer.save_pretrained(out.path()).unwrap();
    assert_eq!(std::fs::read_to_string(out.path().join("chat_template.jinja")).unwrap(), template);
    tokenizer.use_chat_template(&source.path().join("theirs.jinja")).unwrap();
    tokenizer.save_pretrained(out.path()).unwrap();
    assert_eq!(std::fs::read_to_string(out.path().join("chat_template.jinja")).unwrap(), "{{ eos_token }}");
}

/// T5's tokenizer, as that of an encoder-decoder.
fn t5() -> Tokenizer {
    let mut tokenizer = Tokenizer::from_pretrained(&golden().join("tokenizers/t5")).unwrap();
    assert!(!tokenizer.is_of_encoder_decoder(), "the folder has no config.json");
    tokenizer.set_encoder_decoder(true);
    tokenizer
}

#[test]
fn prompt_and_response_of_an_encoder_decoder_are_two_texts_that_end_with_eos() {
    let tokenizer = t5();
    let goldens = read_json(&golden().join("tokenizers/golden.json"));
    let cases = goldens["t5"]["cases"].as_array().unwrap();
    let cases: Vec<_> = cases.iter().map(|case| (case["text"].as_str().unwrap(), ids(&case["ids"]))).collect();
    for (prompt, prompt_ids) in &cases {
        assert_eq!(prompt_ids.last(), tokenizer.eos().as_ref());
        assert_eq!(&tokenizer.encode_prompt(prompt).unwrap(), prompt_ids, "{prompt:?}");
        for (response, response_ids) in &cases {
            let whole = ([&prompt_ids[..], response_ids].concat(), prompt_ids.len());
            assert_eq!(tokenizer.encode_pair(prompt, response).unwrap(), whole, "{prompt:?} {response:?}");
            let alone = tokenizer.decode(response_ids).unwrap();
            assert_eq!(tokenizer.decode_after(prompt_ids, response_ids).unwrap(), alone);
            assert_eq!(streamed(&tokenizer, prompt_ids, response_ids).concat(), alone);
        }
    }
    let (open, border) = tokenizer.encode_unclosed_pair("The movie", "was great").unwrap();
    let (closed, _) = tokenizer.encode_pair("The movie", "was great").unwrap();
    assert_eq!((&closed[..closed.len() - 1], border), (&open[..], tokenizer.encode("The movie").unwrap().len()));
    let error = tokenizer.encode_chat(&[turn("user", "hi")], true, &Map::new()).unwrap_err().to_string();
    assert!(error.starts_with("a list of messages, for an encoder-decoder: expected a text"), "{error}");
}

#[test]
fn the_folder_of_an_encoder_decoder_that_generates_has_its_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden().join("tokenizers/t5").join(name), dir.path().join(name)).unwrap();
    }
    for (config, expected) in [
        (r#"{"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": true}"#, true),
        (r#"{"is_encoder_decoder": true}"#, true),
        (r#"{"architectures": ["T5ForSequenceClassification"], "is_encoder_decoder": true}"#, false),
        (r#"{"is_encoder_decoder": false}"#, false),
        ("{}", false),
    ] {
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let tokenizer = Tokenizer::from_pretrained(dir.path()).unwrap();
        assert_eq!(tokenizer.is_of_encoder_decoder(), expected, "{config}");
    }
}

#[test]
fn demonstrations_of_an_encoder_decoder_have_the_prompt_outside_of_the_loss() {
    let tokenizer = t5();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    let read = |row: Value| {
        std::fs::write(&path, format!("{row}\n")).unwrap();
        Dataset::read(&path, "train").unwrap().demonstrations(&tokenizer, false).map_err(|e| e.to_string())
    };
    let (prompt, response) = (tokenizer.encode("The film").unwrap(), tokenizer.encode("great").unwrap());
    for name in ["completion", "chosen"] {
        let found = read(json!({"prompt": "The film", name: "great"})).unwrap().remove(0);
        assert_eq!(found.tokens, [&prompt[..], &response].concat());
        assert_eq!((found.prompt_len, found.loss_start), (prompt.len(), prompt.len()));
    }
    for row in [json!({"text": "The film was great"}), json!({"chosen": "The film", "rejected": "x"})] {
        let error = read(row).unwrap_err();
        assert!(error.contains("expected a field `prompt` with a text for the encoder"), "{error}");
    }
    let error = read(json!({"messages": [turn("user", "hi"), turn("assistant", "oh")]})).unwrap_err();
    assert!(error.contains("a list of messages, for an encoder-decoder"), "{error}");
}

/// A template whose turns end with an end token and a new line, as ChatML's do.
const TURNS: (&str, &str) = (
    "chat_template.jinja",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\
     {% if add_generation_prompt %}assistant: {{ note }}{% endif %}",
);

/// The rows of a dataset, with a tokenizer that has `TURNS`.
fn rows(rows: &[Value]) -> (Tokenizer, Dataset, tempfile::TempDir) {
    let dir = folder(&[TURNS, ("tokenizer_config.json", r#"{"eos_token": "<|endoftext|>"}"#)]);
    let file = dir.path().join("rows.jsonl");
    std::fs::write(&file, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    (Tokenizer::from_pretrained(dir.path()).unwrap(), Dataset::read(&file, "train").unwrap(), dir)
}

fn turn(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

#[test]
fn a_prompt_of_messages_ends_where_the_assistant_responds() {
    let (tokenizer, dataset, _dir) = rows(&[
        json!({"prompt": [turn("user", "hi")]}),
        json!({"prompt": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]}),
        json!({"prompt": [turn("user", "hi")], "chat_template_kwargs": {"note": "(briefly)"}}),
        json!({"prompt": "hi"}),
    ]);
    let texts = |dataset: &Dataset| -> Vec<String> {
        let prompts = dataset.prompts(&tokenizer, 320, 64).unwrap();
        for prompt in &prompts {
            assert_eq!(tokenizer.decode_verbatim(&prompt.tokens).unwrap(), prompt.text);
        }
        prompts.into_iter().map(|prompt| prompt.text).collect()
    };
    let asked = "user: hi<|endoftext|>\nassistant: ";
    let noted = format!("{asked}(briefly)");
    assert_eq!(texts(&dataset), [asked, asked, &noted, "hi"]);
    assert_eq!(texts(&dataset.with_chat_prompts()), [asked, asked, &noted, asked]);
}

#[test]
fn tokens_of_a_model_are_special_and_known_to_templates_as_in_transformers() {
    let read = |config: &str| open(&[("tokenizer_config.json", config), ("chat_template.jinja", "{{ boi_token }}")]);
    let named = read(r#"{"eos_token": "<|endoftext|>", "model_specific_special_tokens": {"boi_token": "<boi>"}}"#);
    let ids = named.encode("a<boi>").unwrap();
    assert_eq!((ids.len(), named.decode(&ids).unwrap()), (2, "a".into()));
    assert_eq!(named.encode_chat(&[turn("user", "a")], true, &Map::new()).unwrap().0, "<boi>");
    // transformers 5.23 passes over the map where another token of the model has a key of its own.
    let other = read(r#"{"image_token": "<img>", "model_specific_special_tokens": {"boi_token": "<boi>"}}"#);
    assert_eq!(other.encode("<img>").unwrap().len(), 1);
    assert!(other.encode("<boi>").unwrap().len() > 1);
}

#[test]
fn a_prompt_that_ends_with_the_assistants_beginning_is_continued_and_is_one_message_with_the_completion() {
    let begun = [turn("user", "hi"), turn("assistant", "oh")];
    let (mut tokenizer, dataset, dir) = rows(&[
        json!({"prompt": begun, "completion": [turn("assistant", " well")], "chosen": [turn("assistant", "a")]}),
        json!({"prompt": [begun[0], {"role": "assistant", "content": [{"type": "text", "text": "oh"}]}]}),
    ]);
    let texts = |tokenizer: &Tokenizer| {
        let prompts = dataset.prompts(tokenizer, 320, 64).unwrap();
        prompts.into_iter().map(|prompt| prompt.text).collect::<Vec<_>>()
    };
    assert_eq!(texts(&tokenizer), ["user: hi<|endoftext|>\nassistant: oh"; 2]);
    let (_, whole, _dir) = rows(&[json!({"prompt": begun, "completion": [turn("assistant", " well")]})]);
    let found = whole.demonstrations(&tokenizer, true).unwrap().remove(0);
    let text = |ids: &[i64]| tokenizer.decode_verbatim(ids).unwrap();
    assert_eq!(text(&found.tokens), "user: hi<|endoftext|>\nassistant: oh well<|endoftext|>\n");
    assert_eq!(text(&found.tokens[found.loss_start..]), " well<|endoftext|>\n");
    // As transformers' `continue_final_message`, where the template trims contents.
    let path = dir.path().join("trims.jinja");
    std::fs::write(&path, "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}").unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    assert_eq!(texts(&tokenizer), ["<hi><oh"; 2]);
    std::fs::write(&path, "{{ messages[0].content }}").unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    let error = dataset.prompts(&tokenizer, 320, 64).unwrap_err().to_string();
    assert!(
        error.contains(
            "line 1: field `prompt`: the last message, which the response continues: the chat template does not"
        ),
        "{error}"
    );
}

#[test]
fn parts_of_what_is_learned_that_the_template_leaves_out_are_noted_and_none_at_all_is_an_error() {
    let thought = turn("assistant", "<think>why</think>oh");
    let (mut tokenizer, dataset, dir) = rows(&[
        json!({"messages": [turn("user", "hi"), turn("assistant", "oh")]}),
        json!({"messages": [turn("user", "hi"), thought]}),
    ]);
    let path = dir.path().join("partial.jinja");
    std::fs::write(&path, "{% for m in messages %}{{ m.content.split('</think>')[-1] }} {% endfor %}").unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    let options = DemonstrationOptions { assistant_only: true, ..DemonstrationOptions::default() };
    dataset.demonstrations_with(&tokenizer, &options).unwrap();
    std::fs::write(&path, "{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}").unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    let error = dataset.demonstrations_with(&tokenizer, &options).unwrap_err().to_string();
    let wanted = "rows.jsonl: line 1: the chat template writes nothing of what is to be learned, first \"oh\" of message 1 (assistant)";
    assert!(error.contains(wanted), "{error}");
}

#[test]
fn variables_of_all_conversations_give_way_to_those_of_a_row() {
    let (mut tokenizer, dataset, _dir) = rows(&[
        json!({"prompt": [turn("user", "hi")]}),
        json!({"prompt": [turn("user", "hi")], "chat_template_kwargs": {"note": "(briefly)"}}),
        json!({"prompt": [turn("user", "hi")], "chat_template_kwargs": {"other": 1}}),
    ]);
    tokenizer.set_chat_variables(json!({"note": "(at length)"}).as_object().unwrap().clone());
    let prompts = dataset.prompts(&tokenizer, 320, 64).unwrap();
    let ends: Vec<&str> = prompts.iter().map(|prompt| prompt.text.rsplit("assistant: ").next().unwrap()).collect();
    assert_eq!(ends, ["(at length)", "(briefly)", "(at length)"]);
}

#[test]
fn the_tools_of_a_row_are_given_to_the_template_as_a_list_or_as_that_list_in_json() {
    let tool = json!({"name": "f", "extra": null});
    let asked = json!([turn("user", "hi")]);
    let all = [
        json!({"prompt": asked, "tools": [tool]}),
        json!({"prompt": asked, "tools": json!([{"name": "f"}]).to_string()}),
        json!({"prompt": asked, "tools": [tool], "chat_template_kwargs": {"tools": [{"name": "g"}]}}),
        json!({"prompt": asked, "tools": [tool], "chat_template_kwargs": {"tools": null}}),
        json!({"prompt": asked, "tools": []}),
        json!({"prompt": asked, "tools": null}),
        json!({"prompt": asked, "tools": " "}),
        json!({"prompt": asked}),
    ];
    let template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}";
    let (mut tokenizer, dataset, dir) = rows(&all);
    let path = dir.path().join("tools.jinja");
    std::fs::write(&path, template).unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    let f = "[{\"name\": \"f\"}]hi<|endoftext|>";
    let wanted =
        [f, f, "[{\"name\": \"g\"}]hi<|endoftext|>"].into_iter().chain(["hi<|endoftext|>"; 5]).collect::<Vec<_>>();
    let prompts = dataset.prompts(&tokenizer, 320, 64).unwrap();
    assert_eq!(prompts.iter().map(|prompt| prompt.text.as_str()).collect::<Vec<_>>(), wanted);
    let chat = [turn("user", "hi"), turn("assistant", "oh")];
    let (_, dataset, _dir) =
        rows(&[json!({"messages": chat, "tools": [tool]}), json!({"chosen": chat, "rejected": chat, "tools": [tool]})]);
    let text = |tokens: &[i64]| tokenizer.decode_verbatim(tokens).unwrap();
    let whole = "[{\"name\": \"f\"}]hi<|endoftext|>oh<|endoftext|>";
    assert_eq!(text(&dataset.demonstrations(&tokenizer, true).unwrap()[0].tokens), whole);
    let (_, pair, _dir) = rows(&[json!({"chosen": chat, "rejected": chat, "tools": [tool]})]);
    assert_eq!(text(&pair.pairs(&tokenizer, true).unwrap()[0].rejected), whole);
}

#[test]
fn an_eos_is_appended_to_a_sample_of_a_run_only_where_its_text_lacks_a_token() {
    let (tokenizer, _, _dir) = rows(&[json!({})]);
    let (prompt, response) = ("The movie", " was fine.");
    let count = tokenizer.encode_open_pair(prompt, response).map(|(ids, border)| ids.len() - border).unwrap();
    let sample = json!({"prompt": prompt, "response": response, "finish_reason": "stop"});
    let with = |num_tokens: usize| {
        let mut sample = sample.clone();
        sample["num_tokens"] = num_tokens.into();
        sample
    };
    let mut cut = with(count);
    cut["finish_reason"] = "length".into();
    let (_, dataset, _rows) = rows(&[sample.clone(), with(count + 1), with(count), cut]);
    let eos = tokenizer.require_eos().unwrap();
    let ends: Vec<bool> =
        dataset.texts(&tokenizer, 320, 64).unwrap().iter().map(|ids| ids.last() == Some(&eos)).collect();
    assert_eq!(ends, [true, true, false, false], "a stop string ended the third");
    let found = dataset.responses(&tokenizer).unwrap();
    let ends: Vec<bool> = found.iter().map(|found| found.response_ids.last() == Some(&eos)).collect();
    assert_eq!(ends, [true, true, false, false]);
}

#[test]
fn a_prompt_with_its_completion_is_read_before_a_text_of_the_same_row() {
    let (tokenizer, dataset, _dir) = rows(&[
        json!({"prompt": "hi", "completion": " oh", "text": "else"}),
        json!({"prompt": "hi", "completion": " oh"}),
        json!({"prompt": "hi", "chosen": " oh", "rejected": " no", "text": "else"}),
        json!({"prompt": "hi", "chosen": " oh"}),
        json!({"prompt": "hi", "text": "else"}),
        json!({"text": "else"}),
    ]);
    let found = dataset.demonstrations(&tokenizer, true).unwrap();
    for same in found.chunks(2) {
        assert_eq!(same[0], same[1]);
    }
    let options = DemonstrationOptions { text_field: "completion".into(), ..DemonstrationOptions::default() };
    let (_, dataset, _dir) = rows(&[json!({"prompt": "hi", "completion": " oh"})]);
    assert_eq!(dataset.demonstrations_with(&tokenizer, &options).unwrap()[0].prompt_len, 0, "the field that is named");
}

#[test]
fn conversations_are_learned_whole_and_completions_alone() {
    let (tokenizer, dataset, _dir) = rows(&[
        json!({"messages": [turn("user", "hi"), turn("assistant", "oh")]}),
        json!({"prompt": [turn("user", "hi")], "completion": [turn("assistant", "oh")]}),
    ]);
    let learned = |row: &Demonstration| tokenizer.decode_verbatim(&row.tokens[row.loss_start..]).unwrap();
    let whole = "user: hi<|endoftext|>\nassistant: oh<|endoftext|>\n";
    let found = dataset.demonstrations(&tokenizer, true).unwrap();
    assert_eq!(found[0].tokens, tokenizer.encode_verbatim(whole).unwrap(), "the template alone says where texts end");
    assert_eq!((found[0].loss_start, learned(&found[1]).as_str()), (1, "oh<|endoftext|>\n"));
    let found = dataset.demonstrations(&tokenizer, false).unwrap();
    assert_eq!((found[0].loss_start, found[1].loss_start), (1, 1));
}

#[test]
fn conversations_of_sharegpt_are_those_of_roles_and_contents() {
    let from = |from: &str, value: &str| json!({"from": from, "value": value});
    let (tokenizer, dataset, _dir) = rows(&[
        json!({"messages": [turn("user", "hi"), turn("assistant", "oh")]}),
        json!({"conversations": [from("human", "hi"), from("gpt", "oh")]}),
        json!({"messages": [from("user", "hi"), from("assistant", "oh")]}),
        json!({"conversations": [turn("user", "hi"), turn("assistant", "oh")], "chosen": "else"}),
    ]);
    for read in [Dataset::demonstrations(&dataset, &tokenizer, true).unwrap(), {
        let options = DemonstrationOptions { assistant_only: true, ..DemonstrationOptions::default() };
        dataset.demonstrations_with(&tokenizer, &options).unwrap()
    }] {
        assert!(read[1..].iter().all(|row| *row == read[0]), "{read:?}");
    }
    let texts = dataset.texts(&tokenizer, 320, 64).unwrap();
    assert!(texts[1..].iter().all(|text| *text == texts[0]), "{texts:?}");
    let (tokenizer, dataset, _dir) = rows(&[
        json!({"prompt": [turn("user", "hi")], "chosen": [turn("assistant", "oh")], "rejected": [turn("assistant", "no")]}),
        json!({"prompt": [from("human", "hi")], "chosen": [from("gpt", "oh")], "rejected": [from("gpt", "no")]}),
    ]);
    let pairs = dataset.pairs(&tokenizer, true).unwrap();
    assert_eq!(pairs[0], pairs[1]);
    let prompts = dataset.prompts(&tokenizer, 320, 64).unwrap();
    assert_eq!((&prompts[0].tokens, &prompts[0].text), (&prompts[1].tokens, &prompts[1].text));
}

#[test]
fn token_ids_are_learned_as_they_are_by_their_labels_or_masks() {
    let (tokenizer, dataset, _dir) = rows(&[
        json!({"input_ids": [5, 6, 7, 8], "text": "else"}),
        json!({"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100], "completion_mask": [0, 0, 0, 1]}),
        json!({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}),
        json!({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 0, 1]}),
        json!({"input_ids": [5, 6, 7, 8], "assistant_masks": [false, true, false, true]}),
        json!({"input_ids": [5, 6, 7, 8], "labels": [5, -100, -100, -100]}),
    ]);
    let learned = |completion_only: bool| {
        let found = dataset.demonstrations(&tokenizer, completion_only).unwrap();
        let places = |row: &Demonstration| {
            assert_eq!((&row.tokens[..], row.prompt_len), (&[5, 6, 7, 8][..], 0));
            let counts = |at: &usize| !row.masked.iter().any(|range| range.contains(at));
            let places: Vec<usize> = (row.loss_start..4).filter(counts).collect();
            assert_eq!(places.len(), row.loss_tokens());
            places
        };
        found.iter().map(places).collect::<Vec<_>>()
    };
    // The first token of a text is predicted by nothing.
    assert_eq!(learned(true), [vec![1, 2, 3], vec![2], vec![2, 3], vec![3], vec![1, 3], vec![]]);
    assert_eq!(learned(false), [vec![1, 2, 3], vec![2], vec![1, 2, 3], vec![1, 3], vec![1, 3], vec![]]);
    let options = DemonstrationOptions { vocab: 320, assistant_only: true, ..DemonstrationOptions::default() };
    for (row, wanted) in [
        (json!({"input_ids": [5, 320]}), "field `input_ids`: expected ids below the vocabulary of 320, found 320"),
        (json!({"input_ids": "5"}), "field `input_ids`: expected a list of token ids, found \"5\""),
        (
            json!({"input_ids": [5, 6], "labels": [5]}),
            "field `labels`: expected as many numbers as `input_ids` has, 2, found 1",
        ),
        (
            json!({"input_ids": [5, 6], "labels": [5, 7]}),
            "field `labels`: expected -100 or the token id of the same place in `input_ids`, 6, found 7 at place 2",
        ),
        (
            json!({"input_ids": [5, 6], "completion_mask": [0, "1"]}),
            "field `completion_mask`: expected a list of whole numbers, found [0,\"1\"]",
        ),
        (
            json!({"input_ids": [5, 6]}),
            "expected a field `assistant_masks` with a list of 0 and 1, by which assistant_only_loss selects among `input_ids`, found \
             `input_ids`",
        ),
    ] {
        let (_, dataset, _dir) = rows(std::slice::from_ref(&row));
        let error = dataset.demonstrations_with(&tokenizer, &options).unwrap_err().to_string();
        assert!(error.ends_with(&format!("line 1: {wanted}")), "{error}");
    }
}

#[test]
fn the_better_side_of_a_pair_is_learned_as_a_completion_is() {
    let chats = [turn("user", "hi"), turn("assistant", "oh")];
    let (tokenizer, dataset, _dir) = rows(&[
        json!({"prompt": "hi", "chosen": " oh", "rejected": " no"}),
        json!({"prompt": "hi", "completion": " oh", "chosen": " else"}),
        json!({"prompt": [chats[0]], "chosen": [chats[1]], "rejected": [turn("assistant", "no")]}),
        json!({"prompt": [chats[0]], "completion": [chats[1]]}),
        json!({"chosen": "hi oh", "rejected": "hi no"}),
        json!({"text": "hi oh", "chosen": "else"}),
        json!({"chosen": chats, "rejected": [turn("user", "hi"), turn("assistant", "no")]}),
        json!({"messages": chats, "chosen": "else"}),
    ]);
    let found = dataset.demonstrations(&tokenizer, true).unwrap();
    for pair in found.chunks(2) {
        assert_eq!(pair[0], pair[1]);
    }
    assert!(found[0].loss_start > 1 && found[2].loss_start > 1, "the prompt is not learned");
    assert_eq!((found[4].loss_start, found[6].loss_start), (1, 1), "without a prompt all is");
}

#[test]
fn both_sides_of_a_pair_end_with_the_end_token_that_scores_are_read_at() {
    let (tokenizer, dataset, _dir) = rows(&[
        json!({"prompt": [turn("user", "hi")], "chosen": [turn("assistant", "oh")], "rejected": [turn("assistant", "no")]}),
        json!({"chosen": [turn("user", "hi"), turn("assistant", "oh")], "rejected": [turn("user", "hi"), turn("assistant", "no")]}),
    ]);
    let pairs = dataset.pairs(&tokenizer, true).unwrap();
    assert_eq!(pairs[0], pairs[1]);
    let text = |tokens: &[i64]| tokenizer.decode_verbatim(tokens).unwrap();
    assert_eq!(text(&pairs[0].chosen), "user: hi<|endoftext|>\nassistant: oh<|endoftext|>");
    assert_eq!(text(&pairs[0].rejected), "user: hi<|endoftext|>\nassistant: no<|endoftext|>");
}

#[test]
fn rows_that_are_no_conversations_are_refused_with_their_line() {
    let refuse = |row: Value, ask: fn(&Dataset, &Tokenizer) -> Option<rlhf::Error>, wanted: &str| {
        let (tokenizer, dataset, _dir) = rows(&[row]);
        let error = ask(&dataset, &tokenizer).unwrap().to_string();
        assert!(error.contains("rows.jsonl: line 1: ") && error.contains(wanted), "{error}");
    };
    let prompts = |d: &Dataset, t: &Tokenizer| d.prompts(t, 320, 64).err();
    let demonstrations = |d: &Dataset, t: &Tokenizer| d.demonstrations(t, true).err();
    let pairs = |d: &Dataset, t: &Tokenizer| d.pairs(t, true).err();
    refuse(json!({"prompt": []}), prompts, "field `prompt`: expected a list of at least one message, found []");
    let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]});
    let wanted =
        "field `prompt`: the last message, which the response continues: expected a text as its `content`, found none";
    refuse(json!({"prompt": [turn("user", "hi"), call]}), prompts, wanted);
    refuse(json!({"prompt": [{"role": "user", "content": 3}]}), prompts, "expected a string or a list of text parts");
    refuse(json!({"prompt": [turn("user", "a")], "chat_template_kwargs": 1}), prompts, "expected an object, found 1");
    for (tools, found) in
        [(json!({"name": "f"}), "{\"name\":\"f\"}"), (json!("f(x)"), "\"f(x)\""), (json!(["f"]), "[\"f\"]")]
    {
        let wanted = format!("field `tools`: expected a list of tools as objects, or that list in JSON, found {found}");
        refuse(json!({"prompt": [turn("user", "a")], "tools": tools}), prompts, &wanted);
    }
    refuse(json!({"messages": "hi"}), demonstrations, "field `messages`: expected a list of at least one message");
    refuse(json!({"chosen": 1}), demonstrations, "field `chosen`: expected a string or a list of messages, found 1");
    let mixed = json!({"prompt": "hi", "completion": [turn("assistant", "oh")]});
    refuse(mixed, demonstrations, "field `prompt`: expected a list of at least one message, found \"hi\"");
    let mixed = json!({"chosen": [turn("assistant", "oh")], "rejected": "no", "prompt": [turn("user", "hi")]});
    refuse(mixed, pairs, "field `prompt`: expected a string, found [");
}

/// The golden tokenizer with these parts in place of its own.
fn with_parts(parts: &Value) -> (tempfile::TempDir, Result<Tokenizer, rlhf::Error>) {
    let dir = folder(&[]);
    let path = dir.path().join("tokenizer.json");
    let mut json = read_json(&path);
    for (name, part) in parts.as_object().unwrap() {
        json[name] = part.clone();
    }
    std::fs::write(&path, json.to_string()).unwrap();
    let tokenizer = Tokenizer::from_pretrained(dir.path());
    (dir, tokenizer)
}

#[test]
fn a_tokenizer_that_appends_eos_puts_none_behind_a_prompt() {
    let closing = json!({"post_processor": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    }});
    let plain = open(&[("tokenizer_config.json", r#"{"eos_token": "<|endoftext|>"}"#)]);
    let (dir, _) = with_parts(&closing);
    std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"eos_token": "<|endoftext|>"}"#).unwrap();
    let tokenizer = Tokenizer::from_pretrained(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("hi").unwrap(), [plain.encode("hi").unwrap(), vec![0]].concat());
    let file = dir.path().join("rows.jsonl");
    let rows =
        [json!({"prompt": "hi"}), json!({"prompt": "hi<|endoftext|>"}), json!({"prompt": "hi", "completion": " oh"})];
    std::fs::write(&file, rows.map(|row| format!("{row}\n")).concat()).unwrap();
    let dataset = Dataset::read(&file, "train").unwrap();
    let prompts =
        |tokenizer| dataset.prompts(tokenizer, 320, 64).unwrap().into_iter().map(|p| p.tokens).collect::<Vec<_>>();
    assert_eq!(prompts(&tokenizer), prompts(&plain));
    assert_eq!(prompts(&tokenizer)[1].last(), Some(&0), "an eos of the row's own stays");
    let pairs = |tokenizer: &Tokenizer| {
        (tokenizer.encode_pair("hi", " oh").unwrap(), tokenizer.encode_unclosed_pair("hi", " oh").unwrap())
    };
    assert_eq!(pairs(&tokenizer), pairs(&plain));
}

#[test]
fn rules_of_a_tokenizer_that_are_not_sound_or_grow_without_end_are_one_line_that_names_the_file() {
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let chain = |rule: &Value, times: usize| vec![rule.clone(); times];
    let mut nested = json!({"type": "Fuse"});
    for _ in 0..100 {
        nested = json!({"type": "Sequence", "decoders": [nested]});
    }
    let doubling = replace(json!({"String": "a"}), "aaaaaaa");
    let normalizers = |rules: Vec<Value>| json!({"normalizer": {"type": "Sequence", "normalizers": rules}});
    for parts in [
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}),
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}),
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8A"}}),
        json!({"normalizer": replace(json!({"String": ""}), "x")}),
        json!({"normalizer": replace(json!({"Regex": ""}), "x")}),
        json!({"decoder": replace(json!({"String": ""}), "x")}),
        json!({"decoder": nested}),
        json!({"decoder": {"type": "Sequence"}}),
        json!({"decoder": 7}),
        json!({"normalizer": replace(json!({"Regex": "(a|aa)+$"}), "x")}),
        normalizers(chain(&doubling, 12)),
        json!({"decoder": {"type": "Sequence", "decoders": chain(&doubling, 12)}}),
        json!({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": false}}),
    ] {
        let (_dir, tokenizer) = with_parts(&parts);
        // Where `$` matches, the pattern is harmless.
        let text = format!("{}b", "a".repeat(40));
        let done = tokenizer.and_then(|tokenizer| tokenizer.decode(&tokenizer.encode(&text)?));
        let error = done.expect_err(&parts.to_string()).to_string();
        assert!(error.contains("tokenizer.json: ") && error.lines().count() == 1 && error.len() < 400, "{error}");
    }
    // An ordinary chain is no such thing.
    let spaces = replace(json!({"String": " "}), "\u{2581}");
    let (_dir, tokenizer) = with_parts(&normalizers(vec![json!({"type": "Prepend", "prepend": "\u{2581}"}), spaces]));
    tokenizer.unwrap().encode(&"word ".repeat(100_000)).unwrap();
}

#[test]
fn spaces_that_end_a_turn_are_in_the_loss_though_the_offsets_of_their_token_are_trimmed() {
    let (mut tokenizer, dataset, dir) = rows(&[json!({"messages": [turn("user", "hi"), turn("assistant", "oh  ")]})]);
    let path = dir.path().join("marked.jinja");
    let marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\
                  {% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}";
    std::fs::write(&path, marked).unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    let options = DemonstrationOptions { assistant_only: true, ..DemonstrationOptions::default() };
    let found = &dataset.demonstrations_with(&tokenizer, &options).unwrap()[0];
    let counts = |at: &usize| !found.masked.iter().any(|range| range.contains(at));
    let ids: Vec<i64> = (found.loss_start..found.tokens.len()).filter(counts).map(|at| found.tokens[at]).collect();
    assert_eq!(tokenizer.decode_verbatim(&ids).unwrap(), "oh  ");
}

#[test]
fn only_the_assistants_messages_of_a_conversation_are_in_the_loss() {
    let turns = [turn("user", "hi"), turn("assistant", "oh"), turn("user", "and"), turn("assistant", "no")];
    let (mut tokenizer, dataset, dir) = rows(&[
        json!({"messages": turns}),
        json!({"prompt": turns[..3], "completion": turns[3..]}),
        json!({"messages": turns[..1]}),
    ]);
    let learned = |tokenizer: &Tokenizer| {
        let options = DemonstrationOptions { assistant_only: true, ..DemonstrationOptions::default() };
        let found = dataset.demonstrations_with(tokenizer, &options).unwrap();
        let text = |row: &Demonstration| {
            let counts = |at: &usize| !row.masked.iter().any(|range| range.contains(at));
            let ids: Vec<i64> = (row.loss_start..row.tokens.len()).filter(counts).map(|at| row.tokens[at]).collect();
            assert_eq!(ids.len(), row.loss_tokens());
            tokenizer.decode_verbatim(&ids).unwrap()
        };
        found.iter().map(text).collect::<Vec<_>>()
    };
    // By the template's turns.
    assert_eq!(learned(&tokenizer), ["oh<|endoftext|>\nno<|endoftext|>\n", "no<|endoftext|>\n", ""]);
    // By its marks.
    let marked = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}\
                  {% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}\
                  {% if add_generation_prompt %}assistant: {% endif %}";
    let path = dir.path().join("marked.jinja");
    std::fs::write(&path, marked).unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    assert_eq!(learned(&tokenizer), ["oh<|endoftext|>no<|endoftext|>", "no<|endoftext|>", ""]);
    // A template that writes a turn otherwise when others follow it.
    std::fs::write(
        &path,
        "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{{ '\\n' }}{% endfor %}",
    )
    .unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    assert_eq!(learned(&tokenizer), ["ohno!\n", "no!\n", ""]);
    // One whose turns cannot be found.
    let options = DemonstrationOptions { assistant_only: true, ..DemonstrationOptions::default() };
    let short = "{% for m in messages %}{{ m.content if m.content in ['hi', 'oh', 'and', 'no'] else raise_exception('long') }}{{ loop.last }}{% endfor %}";
    std::fs::write(&path, short).unwrap();
    tokenizer.use_chat_template(&path).unwrap();
    let error = dataset.demonstrations_with(&tokenizer, &options).unwrap_err().to_string();
    assert!(
        error.contains("line 1: assistant_only_loss: the place of message 2 in the text of ")
            && error.contains("--chat_template_path"),
        "{error}"
    );
    let (tokenizer, dataset, _dir) = rows(&[json!({"text": "hi"})]);
    let error = dataset.demonstrations_with(&tokenizer, &options).unwrap_err().to_string();
    assert!(error.contains("assistant_only_loss: expected a row with a list of messages"), "{error}");
}
