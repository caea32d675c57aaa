//! Models against transformers' values (`tests/golden/models`), and against themselves: batching changes nothing.

use crate::cli::Scratch;
use crate::support::{Tensors, assert_close, chosen_golden, golden, model_options, read_json, say};
use rlhf::generate::{FinishReason, GenerationConfig, Response, Sampling, StopStrings, generate};
use rlhf::model::{
    Batch, CausalLm, CausalLmWithValueHead, ClassifierFormat, Dtype, JointBatch, LogprobOptions, LoraConfig,
    ModelConfig, ModelOptions, Param, Precision, Rope, RopeScaling, SequenceClassifier, TokenLogprobs, ValueHeadInit,
};
use rlhf::optim::Optimizer;
use rlhf::settings::SftConfig;
use rlhf::tokenizer::Tokenizer;
use serde_json::json;
use std::path::{Path, PathBuf};
use tch::Tensor;

const TOLERANCE: f64 = 2e-5;
/// What a golden folder holds.
#[derive(Clone, Copy, PartialEq)]
enum Hold {
    Lm,
    Classifier,
    Encoder,
    /// Compared in encoder_decoders.rs.
    EncoderDecoder,
}

/// The golden model folders of a kind; prints which, so that a log shows what was run.
fn folders(hold: Hold) -> Vec<PathBuf> {
    let dir = chosen_golden().join("models");
    let kind = |path: &Path| {
        let config = ModelConfig::from_dir(path).unwrap();
        match (config.is_sequence_classifier(), config.causal) {
            _ if config.is_encoder_decoder() => Hold::EncoderDecoder,
            (false, _) => Hold::Lm,
            (true, true) => Hold::Classifier,
            (true, false) => Hold::Encoder,
        }
    };
    let mut found: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("config.json").is_file())
        .filter(|path| kind(path) == hold)
        .collect();
    found.sort();
    assert!(!found.is_empty(), "{}: no golden model", dir.display());
    let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_string_lossy()).collect();
    say(&format!("{}: comparing {}", dir.display(), names.join(", ")));
    found
}

/// Whether transformers rotates by the longest row of a batch, which nothing here depends on.
fn is_dynamic(model: &ModelConfig) -> bool {
    let depends = |rope: &Rope| matches!(rope.scaling, RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. });
    model.ropes.iter().any(depends)
}

/// Golden values lie beside the model, or, for a sharded save, beside its namesake.
fn values(dir: &Path) -> Tensors {
    let file = dir.join("golden.safetensors");
    let namesake = dir.to_str().unwrap().replace("_sharded", "");
    Tensors::read(&if file.is_file() { file } else { Path::new(&namesake).join("golden.safetensors") })
}

/// The real tokens of each row, and where they lie in the padded row.
fn real_tokens(golden: &Tensors, set: &str) -> Vec<(Vec<i64>, Vec<i64>)> {
    let ids = golden.rows(&format!("{set}.input_ids"));
    let masks = golden.rows(&format!("{set}.attention_mask"));
    ids.iter()
        .zip(masks)
        .map(|(ids, mask)| {
            let places: Vec<i64> = (0..ids.len() as i64).filter(|&t| mask[t as usize] == 1).collect();
            (places.iter().map(|&t| ids[t as usize]).collect(), places)
        })
        .collect()
}

#[test]
fn logits_and_hidden_states_equal_transformers_in_every_padding() {
    for dir in folders(Hold::Lm) {
        let golden = values(&dir);
        let model = CausalLm::from_pretrained(&dir, model_options()).unwrap();
        let last = model.config().num_hidden_layers;
        for set in ["unpadded", "padded"] {
            let rows = real_tokens(&golden, set);
            let sequences: Vec<&Vec<i64>> = rows.iter().map(|(tokens, _)| tokens).collect();
            let logits = model.logits(&sequences).unwrap();
            if set == "padded" && is_dynamic(model.config()) {
                for (i, (_, places)) in rows.iter().enumerate() {
                    let part = golden.part("alone.logits");
                    let alone = part.tensor.get(i as i64).index_select(0, &Tensor::from_slice(places));
                    assert_close(&format!("{}: row {i}", dir.display()), &part.select(&logits[i]), &alone, TOLERANCE);
                }
                continue;
            }
            let hidden = model.hidden_states(&sequences).unwrap();
            for (i, (_, places)) in rows.iter().enumerate() {
                let places = Tensor::from_slice(places);
                for (name, found) in [("logits".into(), &logits[i]), (format!("hidden_states.{last}"), &hidden[i])] {
                    let part = golden.part(&format!("{set}.{name}"));
                    let expected = part.tensor.get(i as i64).index_select(0, &places);
                    let what = format!("{}: {set} row {i}: {name}", dir.display());
                    assert_close(&what, &part.select(found), &expected, TOLERANCE);
                }
            }
            if set == "unpadded" {
                // Each is of the whole vocabulary, of which the logits above may be a part.
                let spans: Vec<_> = sequences.iter().map(|row| 1..row.len()).collect();
                let found = model.token_logprobs(&sequences, &spans, 1.0, false).unwrap().logprobs;
                let expected = golden.get("unpadded.next_logprobs").view([-1]);
                assert_close(&format!("{}: log-probabilities", dir.display()), &found, &expected, TOLERANCE);
            }
        }
    }
}

#[test]
fn the_config_of_transformers_4_gives_the_same_model() {
    for dir in [Hold::Lm, Hold::Classifier, Hold::Encoder].into_iter().flat_map(folders) {
        let old = dir.join("config_v4.json");
        if !old.is_file() {
            continue;
        }
        let (new, old) = (ModelConfig::from_dir(&dir).unwrap(), ModelConfig::from_file(&old).unwrap());
        assert_eq!(*new, *old, "{}", dir.display());
    }
}

#[test]
fn rewards_at_every_position_and_scores_equal_transformers() {
    for dir in folders(Hold::Classifier) {
        let golden = values(&dir);
        let model = SequenceClassifier::from_pretrained(&dir, None, model_options()).unwrap();
        for set in ["unpadded", "padded"] {
            let rows = real_tokens(&golden, set);
            let sequences: Vec<&Vec<i64>> = rows.iter().map(|(tokens, _)| tokens).collect();
            let spans: Vec<_> = sequences.iter().map(|s| 0..s.len()).collect();
            let values = model.values_at(&sequences, &spans).unwrap();
            let expected: Vec<Tensor> = rows
                .iter()
                .enumerate()
                .map(|(i, (_, places))| {
                    let all = golden.get(&format!("{set}.reward_logits")).get(i as i64).squeeze_dim(-1);
                    all.index_select(0, &Tensor::from_slice(places))
                })
                .collect();
            assert_close(&format!("{}: {set}", dir.display()), &values, &Tensor::cat(&expected, 0), TOLERANCE);
        }
        // Scores are read at the last token of what TRL cuts at the first pad behind the prompt.
        let rows = real_tokens(&golden, "padded");
        let index = Vec::<i64>::try_from(golden.get("padded.score_index")).unwrap();
        let cut: Vec<Vec<i64>> = rows
            .iter()
            .zip(&index)
            .map(|((tokens, places), &last)| {
                tokens.iter().zip(places).filter(|(_, place)| **place <= last).map(|(token, _)| *token).collect()
            })
            .collect();
        let scores = model.scores(&cut).unwrap();
        assert_close(&format!("{}: scores", dir.display()), &scores, golden.get("padded.score"), TOLERANCE);
    }
}

fn config(sampling: Sampling, max_new_tokens: usize, stop: &[i64], batch_size: usize) -> GenerationConfig {
    GenerationConfig { stop_token_ids: stop.to_vec(), batch_size, ..GenerationConfig::new(sampling, max_new_tokens) }
}

#[test]
fn greedy_tokens_equal_transformers_generate_with_and_without_eos() {
    let index = read_json(&chosen_golden().join("models/index.json"));
    for dir in folders(Hold::Lm) {
        let golden = values(&dir);
        let model = CausalLm::from_pretrained(&dir, model_options()).unwrap();
        let masks = golden.rows("greedy.prompt_mask");
        let prompts: Vec<Vec<i64>> = golden
            .rows("greedy.prompt_ids")
            .iter()
            .zip(&masks)
            .map(|(ids, mask)| ids.iter().zip(mask).filter(|(_, m)| **m == 1).map(|(id, _)| *id).collect())
            .collect();
        if is_dynamic(model.config()) {
            // transformers' tokens depend on the batch, and its cached keys on when they were cached. With two sets of angles a row is
            // read again when it changes from one to the other, so its tokens are those without a cache.
            if model.config().ropes.iter().any(|rope| matches!(rope.scaling, RopeScaling::LongRope { .. })) {
                for batch_size in [4, 1] {
                    let config = config(Sampling::Greedy, 16, &[], batch_size);
                    let found: Vec<_> =
                        generate(&model, &prompts, &config).unwrap().into_iter().map(|r| r.tokens).collect();
                    assert_eq!(found, golden.rows("alone.greedy_tokens"), "{}", dir.display());
                }
            }
            continue;
        }
        let responses = generate(&model, &prompts, &config(Sampling::Greedy, 16, &[], 4)).unwrap();
        let name = dir.file_name().unwrap().to_str().unwrap().replace("_sharded", "");
        let model_eos = index["models"][name.as_str()]["eos_token_id"].as_i64().unwrap();
        for (response, expected) in responses.iter().zip(golden.rows("greedy.tokens")) {
            // `generate` was called for 16 tokens, and still stops at the model's own eos.
            let len = expected.iter().position(|&id| id == model_eos).map_or(expected.len(), |at| at + 1);
            assert_eq!(response.tokens[..len], expected[..len], "{}", dir.display());
        }

        let eos = index["models"][name.as_str()]["greedy_eos_id"].as_i64().unwrap();
        let responses = generate(&model, &prompts, &config(Sampling::Greedy, 16, &[eos], 4)).unwrap();
        for (response, expected) in responses.iter().zip(golden.rows("greedy_eos.tokens")) {
            let len = expected.iter().position(|&id| id == eos).map_or(expected.len(), |at| at + 1);
            assert_eq!(response.tokens, expected[..len], "{}", dir.display());
            assert_eq!(response.finish == FinishReason::Stop, expected.contains(&eos));
        }
    }
}

#[test]
fn greedy_tokens_under_a_penalty_a_minimum_and_a_stop_string_equal_transformers_generate() {
    let text = std::fs::read_to_string(golden().join("sampling.json")).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<i64> {
        value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
    };
    for golden_model in file["greedy"].as_array().unwrap() {
        let dir = golden().join("models").join(golden_model["model"].as_str().unwrap());
        let model = CausalLm::from_pretrained(&dir, model_options()).unwrap();
        let prompt = ids(&golden_model["prompt_ids"]);
        for run in golden_model["runs"].as_array().unwrap() {
            let settings = &run["settings"];
            let config = GenerationConfig {
                repetition_penalty: settings["repetition_penalty"].as_f64().unwrap_or(1.0),
                min_new_tokens: settings["min_new_tokens"].as_u64().unwrap_or(0) as usize,
                stop_token_ids: settings["eos"].as_i64().into_iter().collect(),
                ..GenerationConfig::new(Sampling::Greedy, 12)
            };
            // Beside a shorter prompt, which leaves the batch at another time.
            let responses = generate(&model, &[prompt.clone(), vec![prompt[0], 9]], &config).unwrap();
            assert_eq!(responses[0].tokens, ids(&run["tokens"]), "{}: {settings}", dir.display());
        }

        let (stop, tokenizer) = (&golden_model["stop"], Tokenizer::from_pretrained(&dir).unwrap());
        let prompt = ids(&stop["prompt_ids"]);
        let strings = ["no such text", stop["stop_string"].as_str().unwrap()].map(String::from);
        let mut config = GenerationConfig {
            stop_strings: Some(StopStrings::new(&tokenizer, strings.into()).unwrap()),
            ..GenerationConfig::new(Sampling::Greedy, 12)
        };
        let response = generate(&model, std::slice::from_ref(&prompt), &config).unwrap().remove(0);
        assert_eq!((response.tokens.clone(), response.finish), (ids(&stop["tokens"]), FinishReason::Stop));
        // Text that was complete before the minimum is passed over for good; a repetition counts.
        config.min_new_tokens = response.tokens.len() + 1;
        let response = generate(&model, &[prompt], &config).unwrap().remove(0);
        let comes_again = dir.ends_with("gpt_neox");
        let (len, finish) = if comes_again { (8, FinishReason::Stop) } else { (12, FinishReason::Length) };
        assert_eq!((&response.tokens[..], response.finish), (&ids(&stop["plain"])[..len], finish));
    }
}

#[test]
fn a_group_of_responses_is_that_of_the_prompt_given_several_times() {
    // Products of weights stored as [in, out] (GPT-2), and all of libtorch's own (RLHF_KERNELS=plain), round by the number of rows:
    // log-probabilities differ by up to 3e-6, and with plain kernels by up to 1.3e-5 (on an AMD EPYC).
    let plain = std::env::var("RLHF_KERNELS").is_ok_and(|kernels| kernels == "plain");
    let tolerance = if plain { TOLERANCE as f32 } else { 1e-5 };
    for dir in folders(Hold::Lm) {
        let model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
        let prompts = &prompts(&model)[..4];
        let sampling = Sampling::Random { temperature: 0.9, top_k: 50, top_p: 0.95, min_p: 0.01 };
        let once = GenerationConfig { repetition_penalty: 1.2, keep_sets: true, ..config(sampling, 12, &[7], 32) };
        let repeated: Vec<_> = prompts.iter().flat_map(|prompt| [prompt; 3]).collect();
        let expected = generate(&model, &repeated.iter().map(|p| p.as_slice()).collect::<Vec<_>>(), &once).unwrap();
        assert_ne!(expected[9].tokens, expected[10].tokens, "responses of a group differ");
        for batch_size in [1, 2, 5, 32] {
            let config = GenerationConfig { num_return_sequences: 3, batch_size, ..once.clone() };
            let found = generate(&model, prompts, &config).unwrap();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                let case = format!("{}: in batches of {batch_size}", dir.display());
                assert_eq!((&found.tokens, found.finish), (&expected.tokens, expected.finish), "{case}");
                assert_eq!(found.sets, expected.sets, "{case}");
                let pairs = found.logprobs.iter().zip(&expected.logprobs);
                assert!(pairs.map(|(a, b)| (a - b).abs()).all(|error| error < tolerance), "{case}: {found:?}");
            }
        }
    }
}

#[test]
fn logprobs_of_what_was_sampled_are_those_before_penalty_minimum_and_filters() {
    let dir = &folders(Hold::Lm)[0];
    let model = CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap();
    let prompts = prompts(&model);
    let sampling = Sampling::Random { temperature: 0.7, top_k: 20, top_p: 0.9, min_p: 0.02 };
    let filtered = GenerationConfig {
        repetition_penalty: 1.4,
        min_new_tokens: 10,
        ..config(sampling, 20, &(0..30).collect::<Vec<_>>(), 9)
    };
    let sampled = generate(&model, &prompts, &filtered).unwrap();
    assert!(sampled.iter().all(|response| response.tokens.len() >= 10));
    let sequences: Vec<Vec<i64>> = prompts.iter().zip(&sampled).map(|(p, r)| [&p[..], &r.tokens].concat()).collect();
    let spans: Vec<_> = prompts.iter().zip(&sequences).map(|(p, s)| p.len()..s.len()).collect();
    let expected = model.token_logprobs(&sequences, &spans, 0.7, false).unwrap().logprobs;
    let found: Vec<f32> = sampled.iter().flat_map(|r| r.logprobs.clone()).collect();
    assert_close("logprobs", &Tensor::from_slice(&found), &expected, TOLERANCE);
}

#[test]
fn settings_of_sampling_out_of_their_range_are_refused_by_name() {
    let dir = &folders(Hold::Lm)[0];
    let model = CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap();
    let plain = GenerationConfig::new(Sampling::at_temperature(1.0), 4);
    let random = |temperature, top_p, min_p| GenerationConfig {
        sampling: Sampling::Random { temperature, top_k: 0, top_p, min_p },
        ..plain.clone()
    };
    for (config, message) in [
        (random(0.0, 1.0, 0.0), "temperature = 0: expected a number from 0.0001; greedy decoding is its limit"),
        (random(1.0, 0.0, 0.0), "top_p = 0: expected a number above 0, and at most 1"),
        (random(1.0, 1.0, f64::NAN), "min_p = NaN: expected a number from 0 to 1"),
        (
            GenerationConfig { repetition_penalty: 0.0, ..plain.clone() },
            "repetition_penalty = 0: expected a number above 0",
        ),
        (
            GenerationConfig { min_new_tokens: 5, ..plain.clone() },
            "min_new_tokens = 5: expected at most max_new_tokens = 4",
        ),
        (
            GenerationConfig { num_return_sequences: 0, ..plain.clone() },
            "num_return_sequences = 0: expected a number above 0",
        ),
    ] {
        assert_eq!(generate(&model, &[[5i64]], &config).unwrap_err().to_string(), message);
    }
}

/// How many tokens the longest of `prompts` leaves room for, at most 20.
fn room(model: &CausalLm, prompts: &[Vec<i64>]) -> usize {
    let longest = prompts.iter().map(Vec::len).max().unwrap();
    20.min(model.config().max_position_embeddings - longest)
}

fn prompts(model: &CausalLm) -> Vec<Vec<i64>> {
    let vocab = model.config().vocab_size.min(300);
    (0..9i64).map(|row| (0..=row).map(|t| 5 + (row * 37 + t * 11) % (vocab - 5)).collect()).collect()
}

#[test]
fn sampled_tokens_do_not_depend_on_the_batch_they_are_in() {
    for dir in folders(Hold::Lm) {
        let model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
        let prompts = prompts(&model);
        let run = |batch_size, stop: &[i64]| {
            generate(&model, &prompts, &config(Sampling::at_temperature(0.7), room(&model, &prompts), stop, batch_size))
                .unwrap()
        };
        let whole = run(9, &[]);
        // A twelfth of the vocabulary stops a response, so that rows leave the batch at different times.
        let stops = |at: i64| -> Vec<i64> { (0..model.config().vocab_size).filter(|id| id % 12 == at).collect() };
        let stops_late = |run: &[Response]| run.iter().any(|r| r.finish == FinishReason::Stop && r.tokens.len() > 1);
        let (stops, stopping) = (0..12)
            .map(|at| (stops(at), run(9, &stops(at))))
            .find(|(_, stopping)| stops_late(stopping))
            .unwrap_or_else(|| panic!("{}: no response stops after its first token", dir.display()));
        for batch_size in [1, 2, 4] {
            for (found, expected) in run(batch_size, &[]).iter().zip(&whole) {
                assert_eq!(found.tokens, expected.tokens, "{} in batches of {batch_size}", dir.display());
            }
            for (found, expected) in run(batch_size, &stops).iter().zip(&stopping) {
                assert_eq!(found.tokens, expected.tokens, "{} in batches of {batch_size}", dir.display());
            }
        }
        for (short, long) in stopping.iter().zip(&whole) {
            assert_eq!(
                short.tokens[..],
                long.tokens[..short.tokens.len()],
                "a row that stops changed another's tokens"
            );
        }
    }
}

#[test]
fn logprobs_with_cache_and_without_alone_and_in_a_batch_agree() {
    for dir in folders(Hold::Lm) {
        let model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
        let prompts = prompts(&model);
        let sampled =
            generate(&model, &prompts, &config(Sampling::at_temperature(0.7), room(&model, &prompts), &[7], 9))
                .unwrap();
        let sequences: Vec<Vec<i64>> =
            prompts.iter().zip(&sampled).map(|(p, r)| [p.as_slice(), &r.tokens].concat()).collect();
        let spans: Vec<_> = prompts.iter().zip(&sequences).map(|(p, s)| p.len()..s.len()).collect();
        let batch = model.token_logprobs(&sequences, &spans, 0.7, false).unwrap().logprobs;
        let cached: Vec<f32> = sampled.iter().flat_map(|r| r.logprobs.clone()).collect();
        if !is_dynamic(model.config()) {
            // Dynamic angles are those of the length at the time, as in transformers.
            let what = format!("{}: with cache", dir.display());
            assert_close(&what, &Tensor::from_slice(&cached), &batch, TOLERANCE);
        }
        let alone: Vec<Tensor> = sequences
            .iter()
            .zip(&spans)
            .map(|(s, span)| model.token_logprobs(&[s], std::slice::from_ref(span), 0.7, false).unwrap().logprobs)
            .collect();
        assert_close("alone", &Tensor::cat(&alone, 0), &batch, TOLERANCE);
    }
}

#[test]
fn entropy_is_that_of_the_tempered_distribution() {
    let dir = &folders(Hold::Lm)[0];
    let model = CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap();
    let sequence = vec![5i64, 6, 7];
    let found = model
        .token_logprobs(std::slice::from_ref(&sequence), std::slice::from_ref(&(1..3)), 0.5, true)
        .unwrap()
        .entropy
        .unwrap();
    let logits = model.logits(&[sequence]).unwrap()[0].narrow(0, 0, 2) * 2.0;
    let p = logits.softmax(-1, tch::Kind::Double);
    let expected = -(&p * p.log()).sum_dim_intlist([-1i64].as_slice(), false, tch::Kind::Float);
    assert_close("entropy", &found, &expected, 1e-5);
}

#[test]
fn a_saved_model_loads_back_with_equal_logits_and_names_its_class() {
    for dir in folders(Hold::Lm) {
        let model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[0], Some(1), usize::MAX).unwrap();
        let again = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
        let ids = [vec![5i64, 6, 7, 8]];
        assert_close("logits", &again.logits(&ids).unwrap()[0], &model.logits(&ids).unwrap()[0], 0.0);
        assert!(!again.config().is_sequence_classifier());
        let value = SequenceClassifier::from_pretrained(out.path(), Some(3), ModelOptions::default()).unwrap();
        value.save_pretrained(out.path(), &[0], Some(1), usize::MAX).unwrap();
        let again = SequenceClassifier::from_pretrained(out.path(), None, ModelOptions::default()).unwrap();
        assert_close("scores", &again.scores(&ids).unwrap(), &value.scores(&ids).unwrap(), 0.0);
        assert!(again.config().is_sequence_classifier() && again.labels() == ["LABEL_0"]);
    }
}

#[test]
fn a_step_of_the_optimizer_changes_what_is_computed_in_bf16_at_once() {
    let options = ModelOptions { precision: Precision::Bf16, ..ModelOptions::default() };
    for name in ["gpt_neox", "llama_tied", "gpt2"] {
        let mut model = CausalLm::from_pretrained(&golden().join("models").join(name), options).unwrap();
        model.set_trainable(true);
        let (ids, span) = ([vec![5i64, 9, 2, 7, 1, 3]], std::slice::from_ref(&(1..6)));
        let logprobs = |m: &CausalLm| tch::no_grad(|| m.token_logprobs(&ids, span, 1.0, false).unwrap().logprobs);
        let before = logprobs(&model);
        model.logprobs_backward(Batch::new(&ids, span), 1.0, |_, now| -now.logprobs.sum(tch::Kind::Float)).unwrap();
        let mut optimizer = Optimizer::new(model.trainable_params(), &SftConfig::new("m", "d", "o").optimizer);
        optimizer.step(1e-2).unwrap();
        let after = logprobs(&model);
        assert!((&after - before).abs().min().double_value(&[]) > 1e-3, "{name}: it learned");
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
        let saved = CausalLm::from_pretrained(out.path(), options).unwrap();
        assert_close(name, &after, &logprobs(&saved), 0.0);
    }
}

#[test]
fn a_frozen_model_refuses_to_learn_and_an_empty_sequence_is_an_error_of_its_own() {
    let mut model = CausalLm::from_pretrained(&golden().join("models/gpt2"), ModelOptions::default()).unwrap();
    for checkpointing in [false, true] {
        model.set_gradient_checkpointing(checkpointing);
        let batch = Batch::new(&[[1i64, 2]], std::slice::from_ref(&(1..2)));
        let learned = model.logprobs_backward(batch, 1.0, |_, now| -now.logprobs.sum(tch::Kind::Float));
        assert!(learned.unwrap_err().to_string().contains("the model is frozen"), "checkpointing {checkpointing}");
    }
    let reward = SequenceClassifier::from_pretrained(&golden().join("models/gpt2"), Some(1), ModelOptions::default());
    let error = reward.unwrap().scores(&[vec![1i64], vec![]]).unwrap_err().to_string();
    assert!(error.contains("sequence 1: expected 1 to"), "{error}");
}

#[test]
fn bf16_and_f16_compute_stay_near_f32_and_keep_f32_weights_and_gradients() {
    // bf16 holds 8 bits: 0.4 % of logits up to about 8; f16 three more.
    let precisions = [(Precision::Bf16, 0.3), (Precision::F16, 0.04)];
    let folders = folders(Hold::Lm);
    for (dir, (precision, allowed)) in folders.iter().flat_map(|dir| precisions.map(|precision| (dir, precision))) {
        let options = ModelOptions { precision, ..ModelOptions::default() };
        let mut model = CausalLm::from_pretrained(dir, options).unwrap();
        model.set_trainable(true);
        let exact = CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap();
        let ids = [vec![5i64, 6, 7, 8, 9, 10]];
        let logprobs =
            |m: &CausalLm| m.token_logprobs(&ids, std::slice::from_ref(&(1..6)), 1.0, false).unwrap().logprobs;
        let found = logprobs(&model);
        let gap = (&found - logprobs(&exact)).abs().max().double_value(&[]);
        assert!(gap > 0.0 && gap < allowed, "{} {precision:?}: {gap}", dir.display());
        found.sum(tch::Kind::Float).backward();
        // An expert that no token prefers has none.
        let mut gradients = model.params().iter().map(|p| p.tensor.grad()).filter(Tensor::defined);
        assert!(gradients.all(|gradient| gradient.kind() == tch::Kind::Float));
    }
}

#[test]
fn encoders_give_transformers_logits_alone_and_in_a_batch() {
    for dir in folders(Hold::Encoder) {
        let golden = values(&dir);
        let model = SequenceClassifier::from_pretrained(&dir, None, model_options()).unwrap();
        let rows = real_tokens(&golden, "text");
        let sequences: Vec<&Vec<i64>> = rows.iter().map(|(tokens, _)| tokens).collect();
        let what = dir.display().to_string();
        assert_close(&what, &model.logits(&sequences).unwrap(), golden.get("text.logits"), TOLERANCE);
        for (i, sequence) in sequences.iter().enumerate() {
            let expected = golden.get("text.logits").narrow(0, i as i64, 1);
            assert_close(&what, &model.logits(&[sequence]).unwrap(), &expected, TOLERANCE);
        }
    }
}

#[test]
fn relative_positions_windows_and_means_do_not_depend_on_the_batch_at_any_length() {
    // Longer than every window and bucket, beside rows of one token, which have a window of their own.
    let rows: Vec<Vec<i64>> =
        [40, 1, 17, 2, 40].iter().map(|&n| (0..n).map(|t| (7 * n + 3 * t) % 90 + 4).collect()).collect();
    for name in ["deberta_cls1", "deberta_cls2", "modernbert_cls1", "modernbert_cls2"] {
        let dir = golden().join("models").join(name);
        for precision in [Precision::F32, Precision::Bf16] {
            let options = ModelOptions { precision, ..ModelOptions::default() };
            let mut model = SequenceClassifier::from_pretrained(&dir, None, options).unwrap();
            let tolerance = if precision == Precision::F32 { TOLERANCE } else { 0.1 };
            let alone: Vec<Tensor> = rows.iter().map(|row| model.logits(&[row]).unwrap()).collect();
            assert_close(name, &model.logits(&rows).unwrap(), &Tensor::cat(&alone, 0), tolerance);
            assert_ne!(model.logits(&rows[..1]).unwrap(), model.logits(&[&rows[0][1..]]).unwrap(), "{name}");
            model.set_trainable(true);
            let gradients = |model: &SequenceClassifier| {
                model.logits(&rows).unwrap().sum(tch::Kind::Float).backward();
                model.params().iter().map(|param| param.tensor.grad().copy()).collect::<Vec<_>>()
            };
            assert!(gradients(&model).iter().all(|grad| grad.isfinite().all().int64_value(&[]) == 1), "{name}");
        }
    }
}

#[test]
fn reward_models_of_decoders_load_in_bf16_and_heads_that_compute_something_else_are_refused() {
    // The form of Skywork's and FsfairX's reward models: one label, `score.weight` without a bias, bf16, transformers 4.
    for name in ["llama_untied_cls", "qwen3_cls", "gemma2_cls", "mistral_cls"] {
        let dir = golden().join("models").join(name);
        let checkpoint = rlhf::weights::Checkpoint::open(&dir).unwrap();
        let out = tempfile::tempdir().unwrap();
        let write = |config: &serde_json::Value, more: &[(&str, i64)]| {
            std::fs::write(out.path().join("config.json"), config.to_string()).unwrap();
            let read = |name: &str| checkpoint.read(name, tch::Device::Cpu, tch::Kind::BFloat16).unwrap();
            let mut tensors: Named = checkpoint.names().map(|name| (name.to_string(), read(name))).collect();
            let zeros = |n: i64| Tensor::zeros([n], (tch::Kind::BFloat16, tch::Device::Cpu));
            tensors.extend(more.iter().map(|(name, n)| (name.to_string(), zeros(*n))));
            rlhf::weights::save(out.path(), &tensors, usize::MAX).unwrap();
        };
        let mut config = read_json(&dir.join("config_v4.json"));
        config["torch_dtype"] = json!("bfloat16");
        write(&config, &[]);
        let load = |dir: &Path, dtype| {
            SequenceClassifier::from_pretrained(dir, None, ModelOptions { dtype, ..ModelOptions::default() })
        };
        let rows = [vec![5i64, 6, 7, 8], vec![9, 10]];
        let exact = load(&dir, Dtype::Float32).unwrap().scores(&rows).unwrap();
        for dtype in [Dtype::Auto, Dtype::Float32] {
            let scale = exact.abs().max().double_value(&[]).max(1.0);
            let found = load(out.path(), dtype).unwrap();
            assert_eq!((found.labels().len(), found.has_new_head()), (1, false));
            assert_close(name, &found.scores(&rows).unwrap(), &exact, 0.05 * scale);
        }
        write(&config, &[("score.bias", 1)]);
        let error = load(out.path(), Dtype::Auto).unwrap_err().to_string();
        assert!(error.contains("unexpected `score.bias`"), "{error}");
        // ArmoRM's: gates over several objectives, in code of its own.
        config["architectures"] = json!(["LlamaForRewardModelWithGating"]);
        config["auto_map"] =
            json!({"AutoModelForSequenceClassification": "modeling_custom.LlamaForRewardModelWithGating"});
        write(&config, &[("gating.layers.0.bias", 3)]);
        let error = load(out.path(), Dtype::Auto).unwrap_err().to_string();
        let message = "found \"LlamaForRewardModelWithGating\", a class of the model's own code (modeling_custom.py)";
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn configs_of_encoders_that_compute_something_else_are_refused() {
    for (name, key, value, message) in [
        ("deberta_cls1", "conv_kernel_size", json!(3), "`conv_kernel_size`: expected 0"),
        ("deberta_cls1", "share_att_key", json!(false), "`share_att_key`: expected true, found false"),
        ("deberta_cls1", "relative_attention", json!(null), "`relative_attention`: expected true, found null"),
        (
            "deberta_cls1",
            "pos_att_type",
            json!("c2p|p2p"),
            "`pos_att_type`: expected c2p and p2c; p2p is not supported",
        ),
        (
            "deberta_cls1",
            "position_buckets",
            json!(1),
            "`position_buckets`: expected a number from 2 to 124, or -1, found 1",
        ),
        ("deberta_cls1", "embedding_size", json!(16), "`embedding_size`: expected 32, or none, found 16"),
        ("deberta_cls1", "pooler_hidden_act", json!("tanh"), "`pooler_hidden_act`: expected gelu"),
        (
            "modernbert_cls1",
            "classifier_pooling",
            json!("max"),
            "`classifier_pooling`: expected cls or mean, found \"max\"",
        ),
        (
            "modernbert_cls1",
            "rope_parameters",
            json!({"full_attention": 3}),
            "`full_attention`: expected an object, found 3",
        ),
        (
            "modernbert_cls1",
            "rope_parameters",
            json!({"sliding_attention": {"rope_type": "ntk"}}),
            "expected a rope_type of default, linear",
        ),
        ("modernbert_cls1", "rope_scaling", json!({"type": "linear", "factor": 2.0}), "`rope_scaling`: expected none"),
        ("modernbert_cls1", "classifier_activation", json!("relu"), "`classifier_activation`: expected gelu"),
    ] {
        let mut config = read_json(&golden().join("models").join(name).join("config.json"));
        config[key] = value;
        let out = tempfile::tempdir().unwrap();
        std::fs::write(out.path().join("config.json"), config.to_string()).unwrap();
        let error = ModelConfig::from_dir(out.path()).unwrap_err().to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn the_reward_is_the_given_label() {
    let dir = golden().join("models/roberta_cls3");
    let mut model = SequenceClassifier::from_pretrained(&dir, None, ModelOptions::default()).unwrap();
    let rows = [vec![0i64, 10, 11, 2], vec![0, 12, 2]];
    let logits = model.logits(&rows).unwrap();
    let names = model.labels().to_vec();
    for (label, expected) in [
        (names[2].clone(), logits.select(1, 2)),
        ("1".into(), logits.select(1, 1)),
        (format!("{}-{}", names[2], names[0]), logits.select(1, 2) - logits.select(1, 0)),
        ("2-1".into(), logits.select(1, 2) - logits.select(1, 1)),
    ] {
        model.choose_label(Some(&label), &dir).unwrap();
        assert_close(&label, &model.scores(&rows).unwrap(), &expected, 0.0);
    }
    for wrong in [None, Some("3"), Some("joy"), Some("1-"), Some("")] {
        let error = model.choose_label(wrong, &dir).unwrap_err().to_string();
        assert!(error.contains(&names[1]) && !error.contains('\n'), "{error}");
    }
    let error = model.values_at(&rows, &[0..1, 0..1]).unwrap_err().to_string();
    assert!(error.contains("decoder"), "{error}");
}

#[test]
fn a_saved_roberta_counts_positions_from_its_own_pad_id_whatever_that_of_the_tokenizer_is() {
    let golden = model_folder("roberta_cls3");
    let config = read_json(&golden.join("config.json"));
    let rows = [vec![0i64, 10, 11, 12, 2], vec![0, 12, 2]];
    let logits = |dir: &Path| {
        let model = SequenceClassifier::from_pretrained(dir, None, ModelOptions::default()).unwrap();
        (tch::no_grad(|| model.logits(&rows).unwrap()), model)
    };
    let (expected, _) = logits(&golden);
    // transformers' default is the id 1, which is also that of the golden model.
    for stored_pad in [Some(json!(1)), Some(json!(null)), None] {
        let from = tempfile::tempdir().unwrap();
        std::fs::copy(golden.join("model.safetensors"), from.path().join("model.safetensors")).unwrap();
        let mut config = config.clone();
        config.as_object_mut().unwrap().remove("pad_token_id");
        if let Some(stored_pad) = &stored_pad {
            config["pad_token_id"] = stored_pad.clone();
        }
        std::fs::write(from.path().join("config.json"), config.to_string()).unwrap();
        let (found, model) = logits(from.path());
        assert_close(&format!("{stored_pad:?}"), &found, &expected, 0.0);
        assert_eq!((model.config().position_offset, model.config().max_position_embeddings), (2, 64), "{stored_pad:?}");
        for pad in [Some(7), Some(300), None] {
            let out = tempfile::tempdir().unwrap();
            model.save_pretrained(out.path(), &[2], pad, usize::MAX).unwrap();
            let (again, saved) = logits(out.path());
            assert_close(&format!("{stored_pad:?}, saved with {pad:?}"), &again, &expected, 0.0);
            assert_eq!(saved.config().position_offset, 2);
            assert_eq!(read_json(&out.path().join("config.json"))["pad_token_id"], 1);
        }
    }
    // Other families have the tokenizer's.
    let bert = model_folder("bert_cls2");
    let bert = SequenceClassifier::from_pretrained(&bert, None, ModelOptions::default()).unwrap();
    let out = tempfile::tempdir().unwrap();
    bert.save_pretrained(out.path(), &[2], Some(7), usize::MAX).unwrap();
    assert_eq!(read_json(&out.path().join("config.json"))["pad_token_id"], 7);
}

#[test]
fn positions_that_a_deberta_does_not_use_are_ignored_and_those_that_it_uses_are_required() {
    let copy = |name: &str, change: &dyn Fn(&mut Named)| {
        let (from, out) = (model_folder(name), tempfile::tempdir().unwrap());
        let mut tensors = file(&from);
        change(&mut tensors);
        rlhf::weights::save(out.path(), &tensors, usize::MAX).unwrap();
        std::fs::copy(from.join("config.json"), out.path().join("config.json")).unwrap();
        out
    };
    let open = |dir: &Path| SequenceClassifier::from_pretrained(dir, None, ModelOptions::default());
    let logits = |dir: &Path| tch::no_grad(|| open(dir).unwrap().logits(&[vec![1i64, 7, 8, 2]]).unwrap());
    let positions = "deberta.embeddings.position_embeddings.weight";
    let table = Tensor::ones([64, 32], (tch::Kind::Float, tch::Device::Cpu));
    let left = copy("deberta_cls1", &|tensors| tensors.push((positions.into(), table.shallow_clone())));
    assert_close("left", &logits(left.path()), &logits(&model_folder("deberta_cls1")), 0.0);
    let without = copy("deberta_cls2", &|tensors| tensors.retain(|(name, _)| name != positions));
    let error = open(without.path()).unwrap_err().to_string();
    assert!(error.contains(&format!("missing `{positions}`")) && !error.contains('\n'), "{error}");
}

/// The names and gradients of the parameters that have one.
fn assert_gradients(dir: &Path, params: &[Param], info: &serde_json::Value) {
    let expected = Tensors::read(&dir.join("grads.safetensors"));
    let (rounding, most) = (info["rounding"].as_f64().unwrap(), info["max_abs"].as_f64().unwrap());
    let mut names: Vec<&str> = expected.names().collect();
    for param in params.iter().filter(|param| !param.fixed) {
        let what = format!("{}: gradient of {}", dir.display(), param.name);
        let part = expected.part(&param.name);
        assert_close(&what, &part.select(&param.tensor.grad()), part.tensor, (5.0 * rounding).max(2e-5 * most));
        names.retain(|name| name.split('[').next() != Some(param.name.as_str()));
    }
    assert!(names.is_empty(), "{}: no parameter {names:?}", dir.display());
}

#[test]
fn gradients_of_every_parameter_equal_autograd_of_transformers() {
    let index = read_json(&chosen_golden().join("models/index.json"));
    let info = |dir: &Path| index["models"][dir.file_name().unwrap().to_str().unwrap()]["grads"].clone();
    let mut compared = 0;
    for dir in folders(Hold::Lm).into_iter().filter(|dir| dir.join("grads.safetensors").is_file()) {
        let mut model = CausalLm::from_pretrained(&dir, model_options()).unwrap();
        model.set_trainable(true);
        let rows = values(&dir).rows("unpadded.input_ids");
        let spans: Vec<_> = rows.iter().map(|row| 1..row.len()).collect();
        let loss = -model.token_logprobs(&rows, &spans, 1.0, false).unwrap().logprobs.sum(tch::Kind::Float);
        loss.backward();
        assert_gradients(&dir, model.params(), &info(&dir));
        compared += 1;
    }
    for dir in folders(Hold::Encoder).into_iter().filter(|dir| dir.join("grads.safetensors").is_file()) {
        let mut model = SequenceClassifier::from_pretrained(&dir, None, model_options()).unwrap();
        model.set_trainable(true);
        let rows: Vec<Vec<i64>> = real_tokens(&values(&dir), "text").into_iter().map(|(row, _)| row).collect();
        let logits = model.logits(&rows).unwrap();
        let weights = Tensor::from_slice(&[1f32, -2.0, 3.0]).narrow(0, 0, logits.size()[1]);
        (&logits * weights.to_device(logits.device())).sum(tch::Kind::Float).backward();
        assert_gradients(&dir, model.params(), &info(&dir));
        compared += 1;
    }
    say(&format!("gradients of {compared} models compared"));
    // Another folder may have none.
    assert!(compared > 0 || std::env::var_os("RLHF_GOLDEN").is_some());
}

#[test]
fn rows_together_give_the_numbers_and_gradients_of_each_alone_with_any_outputs_beside_them() {
    let dir = golden().join("models/gpt_neox");
    // Requested tokens on both sides of where their number is rounded up for the products.
    let rows: Vec<Vec<i64>> = (0..15).map(|row| (0..10).map(|t| (7 * row + 3 * t) % 50 + 1).collect()).collect();
    let spans: Vec<_> = (0..15).map(|row| 2..10 - row % 4).collect();
    for checkpointing in [false, true] {
        let models = || {
            let mut lm = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
            let mut value = SequenceClassifier::from_pretrained(&dir, Some(1), ModelOptions::default()).unwrap();
            lm.set_trainable(true);
            value.set_trainable(true);
            lm.set_gradient_checkpointing(checkpointing);
            value.set_gradient_checkpointing(checkpointing);
            (lm, value)
        };
        let learn = |(lm, value): &(CausalLm, SequenceClassifier), rows: &[Vec<i64>], spans: &[_]| {
            let asked = lm.token_logprobs(rows, spans, 0.7, true).unwrap();
            let options = LogprobOptions { entropy: true, ..0.7.into() };
            let found = lm
                .logprobs_backward(Batch::new(rows, spans), options, |_, now| {
                    now.logprobs.square().sum(tch::Kind::Float)
                })
                .unwrap();
            value.values_backward(Batch::new(rows, spans), |values| values.square().sum(tch::Kind::Float)).unwrap();
            let values = value.values_at(rows, spans).unwrap();
            assert_close("what is read", &asked.logprobs, &found.logprobs, 1e-5);
            Tensor::cat(&[&found.logprobs, &found.entropy.unwrap(), &values], 0).detach().view([3, -1])
        };
        let (together, alone) = (models(), models());
        let numbers = learn(&together, &rows, &spans);
        assert!(numbers.size()[1] > 64, "as many as are rounded");
        let each: Vec<_> = (0..15).map(|i| learn(&alone, &rows[i..=i], &spans[i..=i])).collect();
        assert_close("numbers", &numbers, &Tensor::cat(&each, 1), 1e-5);
        for (a, b) in [(together.0.params(), alone.0.params()), (together.1.params(), alone.1.params())] {
            for (a, b) in a.iter().zip(b) {
                let scale = b.tensor.grad().abs().max().double_value(&[]).max(1.0);
                assert_close(&a.name, &a.tensor.grad(), &b.tensor.grad(), 2e-5 * scale);
            }
        }
    }
}

#[test]
fn value_heads_of_trl_and_deepspeed_chat_give_their_values_and_keep_their_names() {
    let dir = golden().join("value_heads/gpt2_vhead");
    let golden = Tensors::read(&dir.join("golden.safetensors"));
    let options = ModelOptions::default();
    let model = CausalLmWithValueHead::from_pretrained(&dir, ValueHeadInit::Checkpoint, options).unwrap();
    let rows = real_tokens(&golden, "right");
    let (sequences, expected) = (token_rows(&rows), values_of(&golden, &rows));
    let spans: Vec<_> = sequences.iter().map(|row| 0..row.len()).collect();
    assert_close("v_head.summary", &model.values_at(&sequences, &spans).unwrap(), &expected, TOLERANCE);
    let (from_2, from_1): (Vec<_>, Vec<_>) = sequences.iter().map(|row| (2..row.len(), 1..row.len())).unzip();
    let batch = JointBatch { sequences: &sequences, token_spans: &from_2, value_spans: &from_1, prompt_lens: None };
    let (logprobs, values) = model.logprobs_and_values(batch, 1.0, false).unwrap();
    let alone = model.lm().token_logprobs(&sequences, &from_2, 1.0, false).unwrap().logprobs;
    assert_close("logprobs", &logprobs.logprobs, &alone, TOLERANCE);
    assert_close("values", &values, &model.values_at(&sequences, &from_1).unwrap(), TOLERANCE);
    let out = tempfile::tempdir().unwrap();
    model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    assert_eq!(file(out.path()), file(&dir), "the tensors of the folder that TRL wrote");
    CausalLm::from_pretrained(out.path(), options).unwrap();

    for name in ["opt_dschat", "opt_proj_postln_dschat"] {
        let dir = golden_dir(name);
        let golden = Tensors::read(&dir.join("golden.safetensors"));
        let model = SequenceClassifier::from_pretrained(&dir, None, options).unwrap();
        let rows = real_tokens(&golden, "right");
        let sequences = token_rows(&rows);
        let spans: Vec<_> = sequences.iter().map(|row| 0..row.len()).collect();
        assert_close(name, &model.values_at(&sequences, &spans).unwrap(), &values_of(&golden, &rows), TOLERANCE);
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[2], None, usize::MAX).unwrap();
        assert_eq!(file(out.path()), file(&dir), "{name}");
    }
}

#[test]
fn a_reward_model_changes_its_names_and_not_its_numbers_and_encoders_have_one_set() {
    let options = ModelOptions::default();
    let read = |dir: &Path, new| SequenceClassifier::from_pretrained(dir, new, options).unwrap();
    let ids = [vec![5i64, 6, 7, 8], vec![9, 10]];
    let out = tempfile::tempdir().unwrap();
    let opt = ["model.decoder.embed_tokens.weight", "rwtransformer.decoder.embed_tokens.weight"];
    let gpt2 = ["transformer.wte.weight", "rwtransformer.wte.weight"];
    for (from, new, embeddings) in
        [(golden_dir("opt_dschat"), None, opt), (golden().join("models/gpt2"), Some(3), gpt2)]
    {
        let mut model = read(&from, new);
        let scores = model.scores(&ids).unwrap();
        for (format, heads) in [
            (ClassifierFormat::Transformers, ["score.weight", embeddings[0]]),
            (ClassifierFormat::DeepspeedChat, ["v_head.weight", embeddings[1]]),
        ] {
            model.set_format(format).unwrap();
            let dir = out.path().join(format!("{format:?}-{new:?}"));
            model.save_pretrained(&dir, &[0], None, usize::MAX).unwrap();
            let names: Vec<String> = file(&dir).into_iter().map(|(name, _)| name).collect();
            assert!(heads.iter().all(|head| names.iter().any(|name| name == head)), "{format:?}: {names:?}");
            let again = read(&dir, None);
            assert_eq!(again.format(), format);
            assert_close("scores", &again.scores(&ids).unwrap(), &scores, 0.0);
        }
    }
    let mut encoder = read(&golden().join("models/bert_cls1"), None);
    let error = encoder.set_format(ClassifierFormat::DeepspeedChat).unwrap_err().to_string();
    assert_eq!(error, "reward_format = deepspeed-chat: expected a decoder with one label");
    let mut adapted = read(&out.path().join("Transformers-None"), None);
    adapted.add_adapter(&LoraConfig::default(), 1).unwrap();
    let error = adapted.set_format(ClassifierFormat::DeepspeedChat).unwrap_err().to_string();
    assert!(error.contains("adapter"), "{error}");
}

#[test]
fn a_value_head_starts_fresh_or_as_a_reward_models() {
    let (policy, reward) = (golden().join("models/gpt2"), golden().join("models/gpt2_cls"));
    let options = ModelOptions::default();
    let ids = [vec![5i64, 6, 7, 8]];
    let spans = std::slice::from_ref(&(0..4));
    let with = |init| CausalLmWithValueHead::from_pretrained(&policy, init, options);
    let values = |init| with(init).unwrap().values_at(&ids, spans).unwrap();
    assert_close("same seed", &values(ValueHeadInit::Fresh(1)), &values(ValueHeadInit::Fresh(1)), 0.0);
    assert_ne!(values(ValueHeadInit::Fresh(1)), values(ValueHeadInit::Fresh(2)));
    let hidden = &with(ValueHeadInit::Fresh(1)).unwrap().lm().hidden_states(&ids).unwrap()[0];
    let score = rlhf::weights::Checkpoint::open(&reward).unwrap();
    let score = score.read("score.weight", tch::Device::Cpu, tch::Kind::Float).unwrap();
    let expected = hidden.matmul(&score.tr()).squeeze_dim(1);
    assert_close("reward", &values(ValueHeadInit::Reward(&reward)), &expected, TOLERANCE);
    for (init, message) in [
        (ValueHeadInit::Checkpoint, "v_head.summary.weight"),
        (ValueHeadInit::Reward(&policy), "expected a reward model with `score.weight`"),
        (ValueHeadInit::Reward(&golden().join("models/opt_proj_postln_cls")), "expected [1, 32], found [1, 16]"),
    ] {
        let error = with(init).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

fn model_folder(name: &str) -> PathBuf {
    golden().join("models").join(name)
}

fn golden_dir(name: &str) -> PathBuf {
    golden().join("value_heads").join(name)
}

fn token_rows(rows: &[(Vec<i64>, Vec<i64>)]) -> Vec<Vec<i64>> {
    rows.iter().map(|(tokens, _)| tokens.clone()).collect()
}

/// The golden values at the real tokens, row after row.
fn values_of(golden: &Tensors, rows: &[(Vec<i64>, Vec<i64>)]) -> Tensor {
    let rows = rows.iter().enumerate();
    let parts = rows
        .map(|(i, (_, places))| golden.get("right.values").get(i as i64).index_select(0, &Tensor::from_slice(places)));
    Tensor::cat(&parts.collect::<Vec<_>>(), 0)
}

/// The names and tensors of a folder's `model.safetensors`.
fn file(dir: &Path) -> Vec<(String, Tensor)> {
    let tensors = Tensors::read(&dir.join("model.safetensors"));
    let mut all: Vec<_> = tensors.names().map(|name| (name.to_string(), tensors.get(name).shallow_clone())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Tensors by name.
type Named = Vec<(String, Tensor)>;

#[test]
fn weight_decay_spares_norms_and_all_tensors_named_a_bias_as_in_transformers() {
    // The others are those of `Trainer.get_decay_parameter_names` of transformers 5.23, which selects no vector of these families.
    for name in ["t5", "mt5", "bart", "gpt_neox", "gpt2", "llama_untied"] {
        let model = CausalLm::from_pretrained(&golden().join("models").join(name), ModelOptions::default()).unwrap();
        for param in model.params() {
            let is_spared = param.tensor.dim() == 1 || param.name.contains("bias");
            assert_eq!(param.decay, !is_spared, "{name}: {}", param.name);
        }
        let is_table = |name: &str| name.ends_with("relative_attention_bias.weight");
        let tables = model.params().iter().filter(|param| is_table(&param.name)).count();
        assert_eq!(tables, if name.ends_with("t5") { 2 } else { 0 }, "{name}");
    }
}

#[test]
fn a_stored_head_that_differs_from_a_tied_embedding_is_kept_and_either_name_will_do() {
    let dir = golden().join("models/gpt2");
    let checkpoint = rlhf::weights::Checkpoint::open(&dir).unwrap();
    let read = |name: &str| checkpoint.read(name, tch::Device::Cpu, tch::Kind::Float).unwrap();
    let (embed, head) = ("transformer.wte.weight", "lm_head.weight");
    let all = |change: &dyn Fn(&mut Named)| {
        let out = tempfile::tempdir().unwrap();
        std::fs::copy(dir.join("config.json"), out.path().join("config.json")).unwrap();
        let mut tensors: Named = checkpoint.names().map(|name| (name.to_string(), read(name))).collect();
        change(&mut tensors);
        rlhf::weights::save(out.path(), &tensors, usize::MAX).unwrap();
        out
    };
    let ids = [vec![5i64, 6, 7]];
    let logits = |dir: &Path| CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap().logits(&ids).unwrap();
    let plain = logits(&dir).remove(0);

    let equal = all(&|tensors| tensors.push((head.into(), read(embed))));
    assert_close("equal", &logits(equal.path())[0], &plain, 0.0);
    let only_head = all(&|tensors| tensors.iter_mut().filter(|t| t.0 == embed).for_each(|t| t.0 = head.into()));
    assert_close("only the head", &logits(only_head.path())[0], &plain, 0.0);

    let differing = all(&|tensors| tensors.push((head.into(), read(embed) * 2.0)));
    let model = CausalLm::from_pretrained(differing.path(), ModelOptions::default()).unwrap();
    assert_close("twice the head", &model.logits(&ids).unwrap()[0], &(plain * 2.0), 1e-4);
    let out = tempfile::tempdir().unwrap();
    model.save_pretrained(out.path(), &[0], None, usize::MAX).unwrap();
    assert_close("saved", &logits(out.path())[0], &model.logits(&ids).unwrap()[0], 0.0);
    assert!(!ModelConfig::from_dir(out.path()).unwrap().tie_word_embeddings);
}

#[test]
fn other_keys_of_a_generation_config_travel_along() {
    let dir = golden().join("models/gpt2");
    let from = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(dir.join(name), from.path().join(name)).unwrap();
    }
    let text = r#"{"bos_token_id": 0, "eos_token_id": 0, "temperature": 0.6, "top_p": 0.9}"#;
    std::fs::write(from.path().join("generation_config.json"), text).unwrap();
    let out = tempfile::tempdir().unwrap();
    let model = CausalLm::from_pretrained(from.path(), ModelOptions::default()).unwrap();
    model.save_pretrained(out.path(), &[0, 7], Some(1), usize::MAX).unwrap();
    let saved = std::fs::read_to_string(out.path().join("generation_config.json")).unwrap();
    let saved: serde_json::Value = serde_json::from_str(&saved).unwrap();
    let expected = serde_json::json!({
        "bos_token_id": 0, "eos_token_id": [0, 7], "temperature": 0.6, "top_p": 0.9, "pad_token_id": 1
    });
    assert_eq!(saved, expected);
}

#[test]
fn of_two_readings_of_a_configuration_that_of_transformers_is_taken_and_what_is_not_computed_is_refused() {
    let both = serde_json::json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0});
    let found = changed("llama_untied", &both).unwrap();
    assert_eq!((found.ropes[0].theta, &found.ropes[0].scaling), (500.0, &RopeScaling::Linear { factor: 2.0 }));
    let causal = changed("llama_untied", &serde_json::json!({"is_causal": false})).unwrap_err();
    assert!(causal.contains("`is_causal`: expected true, found false"), "{causal}");
    // Without a generation_config.json, the settings of the generation are those of the configuration.
    let settings = serde_json::json!({"do_sample": false, "top_k": 5, "temperature": null, "max_length": 9});
    let found = changed("llama_untied", &settings).unwrap();
    let expected = serde_json::json!({"do_sample": false, "top_k": 5});
    assert_eq!(found.generation_settings(), expected.as_object().unwrap());
}

#[test]
fn rotary_settings_that_do_not_fit_are_refused_in_one_line_with_the_field() {
    let with = |model: &str, changes: serde_json::Value| {
        let config = read_json(&golden().join("models").join(model).join("config.json"));
        let mut rope = config["rope_parameters"].clone();
        rope.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        changed(model, &serde_json::json!({"rope_parameters": rope}))
    };
    for (model, changes, message) in [
        ("llama_yarn", r#"{"rope_type": "ntk"}"#, "a rope_type of default, linear, dynamic, llama3, yarn or longrope"),
        ("llama_yarn", r#"{"factor": 0}"#, "`factor`: expected a number above 0"),
        ("llama_yarn", r#"{"partial_rotary_factor": 0.5}"#, "`partial_rotary_factor`: expected 1, or none, found 0.5"),
        ("llama_yarn", r#"{"beta_slow": 40}"#, "`beta_slow`: expected a number below beta_fast = 32, found 40"),
        ("llama_yarn", r#"{"attention_factor": -1}"#, "`attention_factor`: expected a number above 0"),
        ("llama_yarn", r#"{"full_attention": {}}"#, "`rope_parameters`: expected the same settings for all layers"),
        (
            "phi3_long",
            r#"{"short_factor": [1, 2]}"#,
            "`short_factor`: expected 6 numbers from 1e-6 to 1e6, found [1,2]",
        ),
        ("phi3_long", r#"{"long_factor": [1, 2, 3, 4, 5, 0]}"#, "`long_factor`: expected 6 numbers"),
        ("phi3_long", r#"{"long_factor": null}"#, "`long_factor`: expected 6 numbers from 1e-6 to 1e6, found null"),
    ] {
        let error = with(model, serde_json::from_str(changes).unwrap()).unwrap_err();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
    // The factor is the ratio of the lengths if it is null; YaRN's old name in files of Phi-3 is longrope's.
    let yarn = with("llama_yarn", serde_json::json!({"factor": null})).unwrap();
    assert_eq!(*yarn, *ModelConfig::from_dir(&golden().join("models/llama_yarn")).unwrap());
    let long = with("phi3_long", serde_json::json!({"rope_type": "yarn"})).unwrap();
    assert_eq!(*long, *ModelConfig::from_dir(&golden().join("models/phi3_long")).unwrap());
    let config = with("llama_yarn", serde_json::json!({"attention_factor": 0.25})).unwrap();
    assert!(matches!(config.ropes[0].scaling, RopeScaling::Yarn { attention_factor: 0.25, .. }));
    let longest = with("llama_yarn", serde_json::json!({"factor": 8.0})).unwrap().max_position_embeddings;
    assert_eq!(longest, 512, "the factor times the length of pretraining");
}

/// The error of a golden model's `config.json` with other fields, or its configuration.
fn changed(model: &str, changes: &serde_json::Value) -> Result<ModelConfig, String> {
    let mut config = read_json(&golden().join("models").join(model).join("config.json"));
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let out = tempfile::tempdir().unwrap();
    std::fs::write(out.path().join("config.json"), config.to_string()).unwrap();
    ModelConfig::from_dir(out.path()).map_err(|error| error.to_string())
}

#[test]
fn fields_of_later_families_have_transformers_defaults_and_wrong_ones_are_refused() {
    let same = |model: &str, changes: &str| {
        let found = changed(model, &serde_json::from_str(changes).unwrap()).unwrap();
        assert_eq!(*found, *ModelConfig::from_dir(&golden().join("models").join(model)).unwrap(), "{model}: {changes}");
    };
    same("smollm3", r#"{"no_rope_layers": null, "layer_types": null}"#);
    same("gemma3", r#"{"layer_types": null}"#);
    same(
        "gpt_oss",
        r#"{"layer_types": null, "swiglu_alpha": null, "attention_bias": null, "num_local_experts": null, "num_experts": 4}"#,
    );
    same("granite", r#"{"num_key_value_heads": 2, "attention_bias": null}"#);
    // GPT-NeoX has names of its own for these: transformers ignores the common ones beside the other fields.
    same("gpt_neox", r#"{"rope_parameters": null, "rope_theta": 3.0, "partial_rotary_factor": 1.0}"#);
    same("gpt_neox", r#"{"rope_parameters": null, "rotary_emb_base": 10000, "rotary_pct": 0.25, "rope_theta": 3.0}"#);
    let changes = serde_json::json!({
        "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": false, "sliding_window": 3
    });
    assert_eq!(changed("smollm3", &changes).unwrap().windows, [Some(3), None], "as transformers builds its masks");
    let changes = serde_json::json!({"layer_types": null, "use_sliding_window": false, "sliding_window": 3});
    assert_eq!(changed("smollm3", &changes).unwrap().windows, [None, None]);
    let mixed = changed("olmo3", &serde_json::json!({"layer_types": null})).unwrap();
    assert_eq!((&mixed.windows, &mixed.layer_ropes), (&vec![Some(5); 2], &vec![Some(1); 2]), "three of four have one");
    for (model, changes, message) in [
        ("smollm3", r#"{"no_rope_layers": [1]}"#, "`no_rope_layers`: expected 2 numbers, 1 for a layer with rotary"),
        ("smollm3", r#"{"no_rope_layers": [1, 2]}"#, "else 0, found [1,2]"),
        ("gemma3", r#"{"rope_parameters": {"rope_type": "default"}}"#, "an object with full_attention and sliding_att"),
        ("gemma3", r#"{"attn_logit_softcapping": 50.0}"#, "`attn_logit_softcapping`: expected null, found 50.0"),
        ("gemma3", r#"{"use_bidirectional_attention": true}"#, "`use_bidirectional_attention`: expected false"),
        ("gemma3", r#"{"model_type": "gemma3"}"#, "`text_config`: expected an object, found null"),
        ("qwen3_moe", r#"{"num_experts_per_tok": 5}"#, "`num_experts_per_tok`: expected at most 4 experts, found 5"),
        (
            "gemma4",
            r#"{"enable_moe_block": true}"#,
            "`num_experts`: expected an integer from 1, as enable_moe_block is true",
        ),
        ("gemma4_moe", r#"{"top_k_experts": 5}"#, "`top_k_experts`: expected at most num_experts = 4, found 5"),
        ("qwen3_5_moe", r#"{"norm_topk_prob": false}"#, "`norm_topk_prob`: expected true, found false"),
        ("lfm2_moe", r#"{"routed_scaling_factor": "a"}"#, "`routed_scaling_factor`: expected a number"),
        (
            "gemma4",
            r#"{"use_bidirectional_attention": "all"}"#,
            "`use_bidirectional_attention`: expected null or vision",
        ),
        ("gemma4", r#"{"num_kv_shared_layers": 5}"#, "`num_kv_shared_layers`: expected a number below the 5 layers"),
        ("gemma4", r#"{"num_kv_shared_layers": 4}"#, "`num_kv_shared_layers`: expected a layer of each kind"),
        ("gemma4", r#"{"per_layer_config": {"7": {}}}"#, "`per_layer_config`: expected an object of head_dim and"),
        ("gemma4", r#"{"per_layer_config": {"1": {"skip": ["mlp"]}}}"#, "`per_layer_config`: expected an object of"),
        ("gemma4", r#"{"per_layer_config": {"1": {"head_dim": 8}}}"#, "`per_layer_config`: expected the same"),
        ("gemma4", r#"{"vocab_size_per_layer_input": 95}"#, "`vocab_size_per_layer_input`: expected at least"),
        ("gemma4", r#"{"rope_parameters": {"full_attention": {}}}"#, "an object with full_attention and sliding_att"),
        ("granite", r#"{"logits_scaling": 0}"#, "`logits_scaling`: expected a number above 0"),
        ("granite", r#"{"residual_multiplier": "a"}"#, "`residual_multiplier`: expected a number"),
        ("ministral3", r#"{"rope_parameters": {"rope_type": "default"}}"#, "`llama_4_scaling_beta`: expected a number"),
        ("gpt_oss", r#"{"swiglu_limit": -1}"#, "`swiglu_limit`: expected a number above 0"),
        ("gpt_oss", r#"{"quantization_config": {"quant_method": "fp8"}}"#, "`quantization_config`: expected none"),
        (
            "gpt_oss",
            r#"{"num_local_experts": 9999, "intermediate_size": 99999999}"#,
            "weights in the experts of a layer",
        ),
        ("mixtral", r#"{"quantization_config": {"quant_method": "mxfp4"}}"#, "`quantization_config`: expected none"),
        ("mixtral", r#"{"num_local_experts": 100000}"#, "at most 100000 experts in all layers, found 100000 in each"),
    ] {
        let error = changed(model, &serde_json::from_str(changes).unwrap()).unwrap_err();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn the_text_part_of_a_gemma_3_folder_is_read_and_is_saved_as_a_text_model() {
    let dir = golden().join("models/gemma3");
    let checkpoint = rlhf::weights::Checkpoint::open(&dir).unwrap();
    let read = |name: &str| checkpoint.read(name, tch::Device::Cpu, tch::Kind::Float).unwrap();
    let mut tensors: Named =
        checkpoint.names().map(|name| (name.replacen("model.", "language_model.model.", 1), read(name))).collect();
    let image = Tensor::ones([2, 2], (tch::Kind::Float, tch::Device::Cpu));
    tensors.push(("vision_tower.encoder.weight".into(), image.shallow_clone()));
    tensors.push(("multi_modal_projector.mm_input_projection_weight".into(), image));
    let whole = tempfile::tempdir().unwrap();
    rlhf::weights::save(whole.path(), &tensors, usize::MAX).unwrap();
    let mut text = read_json(&dir.join("config.json"));
    text.as_object_mut().unwrap().remove("eos_token_id");
    let config = serde_json::json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [2, 7], "text_config": text, "vision_config": {},
    });
    std::fs::write(whole.path().join("config.json"), config.to_string()).unwrap();

    let ids = [vec![5i64, 6, 7, 8, 9, 10, 11]];
    let expected = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap().logits(&ids).unwrap().remove(0);
    let mut model = CausalLm::from_pretrained(whole.path(), ModelOptions::default()).unwrap();
    assert_close("read", &model.logits(&ids).unwrap()[0], &expected, 0.0);
    assert_eq!(model.config().eos_token_ids, [2, 7]);
    let out = tempfile::tempdir().unwrap();
    model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
    let saved = read_json(&out.path().join("config.json"));
    assert_eq!(saved["model_type"], "gemma3_text");
    assert_eq!(saved["architectures"], serde_json::json!(["Gemma3ForCausalLM"]));
    let again = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
    assert_close("saved", &again.logits(&ids).unwrap()[0], &expected, 0.0);
    // An adapter fits the text model, which is therefore saved beside it.
    model.add_adapter(&LoraConfig::default(), 1).unwrap();
    let adapted = tempfile::tempdir().unwrap();
    model.save_pretrained(adapted.path(), &[], None, usize::MAX).unwrap();
    assert_eq!(read_json(&adapted.path().join("base_model/config.json"))["model_type"], "gemma3_text");
}

/// Writes the language model in `from` to `dir` as a part of a model of type `whole` with the tensors `others`. Returns whether its head is tied.
fn write_with_other_parts([from, dir]: [&Path; 2], (whole, others): (&str, [&str; 2])) -> bool {
    let checkpoint = rlhf::weights::Checkpoint::open(from).unwrap();
    let read = |name: &str| checkpoint.read(name, tch::Device::Cpu, tch::Kind::Float).unwrap();
    let mut tensors: Named =
        checkpoint.names().map(|name| (name.replacen("model.", "model.language_model.", 1), read(name))).collect();
    let image = Tensor::ones([2, 2], (tch::Kind::Float, tch::Device::Cpu));
    tensors.extend(others.map(|name| (name.to_string(), image.shallow_clone())));
    rlhf::weights::save(dir, &tensors, usize::MAX).unwrap();
    let mut text = read_json(&from.join("config.json"));
    let tied = text.as_object_mut().unwrap().remove("tie_word_embeddings").is_none_or(|tied| tied == json!(true));
    let config = json!({
        "architectures": ["ForConditionalGeneration"], "model_type": whole, "tie_word_embeddings": tied,
        "text_config": text, "vision_config": {},
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    tied
}

#[test]
fn merging_into_a_model_for_text_and_images_says_which_parts_the_merged_model_lacks() {
    let scratch = Scratch::with_policy("llama_untied");
    let mut config = read_json(&model_folder("qwen3_5").join("config.json"));
    config["vocab_size"] = json!(400);
    scratch.write("policy/config.json", &config.to_string());
    let sft = "sft --dataset_name demos.jsonl --max_steps 1 --no_report";
    scratch.succeeds(&format!("{sft} --config_name policy/config.json --tokenizer_name policy --output_dir base"));
    scratch.succeeds(&format!(
        "{sft} --model_name_or_path base --output_dir out --use_peft --lora_target_modules all-linear"
    ));
    let (base, others) = (scratch.path("base"), ["model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"]);
    write_with_other_parts([&base, &base], ("qwen3_5", others));
    let ran = scratch.run("merge --model_name_or_path out --output_dir merged");
    let words = "note: it is the language model alone: model.visual.* (1 tensor), mtp.* (1 tensor) stay in the folder of the base";
    assert!(ran.code == 0 && ran.stderr.contains(words), "{}", ran.stderr);
    assert_eq!(read_json(&scratch.path("merged/config.json"))["model_type"], "qwen3_5_text");
}

#[test]
fn the_text_part_of_newer_models_for_text_and_images_is_read_and_is_saved_as_a_text_model() {
    // Prefixes of the tensors that are left out: images, and the prediction of several tokens.
    for (name, whole_name, class, left_out) in [
        ("qwen3_5", "qwen3_5", "Qwen3_5ForCausalLM", ["model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"]),
        ("qwen3_5_moe", "qwen3_5_moe", "Qwen3_5MoeForCausalLM", ["model.visual.pos_embed.weight", "mtp.norm.weight"]),
        ("lfm2", "lfm2_vl", "Lfm2ForCausalLM", ["model.vision_tower.x.weight", "model.multi_modal_projector.y.weight"]),
        ("lfm2_moe", "lfm2_vl", "Lfm2MoeForCausalLM", ["model.vision_tower.x.y", "model.multi_modal_projector.z"]),
        ("gemma4_moe", "gemma4", "Gemma4ForCausalLM", ["model.vision_tower.x.weight", "model.embed_vision.y.weight"]),
    ] {
        let (dir, whole) = (model_folder(name), tempfile::tempdir().unwrap());
        let tied = write_with_other_parts([&dir, whole.path()], (whole_name, left_out));
        let ids = [vec![5i64, 6, 7, 8, 9, 10, 11]];
        let logits = |dir: &Path| {
            let model = CausalLm::from_pretrained(dir, ModelOptions::default()).unwrap();
            (model.logits(&ids).unwrap().remove(0), model)
        };
        let (expected, _) = logits(&dir);
        let (found, model) = logits(whole.path());
        assert_close(name, &found, &expected, 0.0);
        assert_eq!(model.config().tie_word_embeddings, tied, "{name}");
        let part = |name: &str| {
            name.split('.').take(if name.starts_with("model") { 2 } else { 1 }).collect::<Vec<_>>().join(".")
        };
        let mut parts = left_out.map(|name| format!("{}.* (1 tensor)", part(name)));
        parts.sort();
        assert_eq!(model.parts_left_out(), Some(parts.join(", ").as_str()), "{name}");
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
        let saved = read_json(&out.path().join("config.json"));
        let golden_config = read_json(&dir.join("config.json"));
        assert_eq!((&saved["model_type"], &saved["architectures"]), (&golden_config["model_type"], &json!([class])));
        assert_close(name, &logits(out.path()).0, &expected, 0.0);
    }
}

#[test]
fn decay_of_weights_is_that_of_transformers_in_layers_with_a_state() {
    // Of `Trainer.get_decay_parameter_names` of transformers 5.23: norms and tensors named a bias are spared, and rates of decay are not.
    for name in ["lfm2", "qwen3_5", "lfm2_moe", "gemma4_moe"] {
        let model = CausalLm::from_pretrained(&model_folder(name), ModelOptions::default()).unwrap();
        for param in model.params() {
            let decays = ["A_log", "router.scale", "per_expert_scale"].iter().any(|end| param.name.ends_with(end));
            let is_spared = param.tensor.dim() == 1 && !decays;
            assert_eq!(param.decay, !is_spared, "{name}: {}", param.name);
        }
    }
}

#[test]
fn configs_of_layers_with_a_state_have_transformers_defaults_and_what_is_not_computed_is_refused() {
    let same = |model: &str, changes: serde_json::Value| {
        let found = changed(model, &changes).unwrap();
        assert_eq!(*found, *ModelConfig::from_dir(&model_folder(model)).unwrap(), "{model}: {changes}");
    };
    same("lfm2", json!({"layer_types": null, "full_attn_idxs": [1]}));
    same(
        "lfm2",
        json!({"intermediate_size": 8, "block_ff_dim": 66, "tie_embedding": true, "tie_word_embeddings": false}),
    );
    same("qwen3_5", json!({"layer_types": null, "full_attention_interval": 2}));
    same("qwen3_5", json!({"attn_output_gate": true, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}));
    let all = changed("lfm2", &json!({"layer_types": null})).unwrap();
    assert_eq!((all.mixing, all.attention_layers()), (None, 3), "without a list every layer has attention");
    let plain = changed("lfm2", &json!({"block_auto_adjust_ff_dim": false})).unwrap();
    let adjusted = changed("lfm2", &json!({})).unwrap();
    assert_eq!((plain.intermediate_size, adjusted.intermediate_size), (66, 56));
    for (model, changes, message) in [
        ("lfm2", json!({"conv_dim": 16}), "`conv_dim`: expected 32, the hidden size, or none, found 16"),
        ("lfm2", json!({"use_pos_enc": false}), "`use_pos_enc`: expected true, found false"),
        ("lfm2", json!({"block_use_swiglu": false}), "`block_use_swiglu`: expected true, found false"),
        ("lfm2", json!({"layer_types": ["conv"]}), "`layer_types`: expected 3 names, each full_attention or conv"),
        ("lfm2", json!({"block_ffn_dim_multiplier": 1e12}), "`block_ffn_dim_multiplier`: expected a factor"),
        ("qwen3_5", json!({"attn_output_gate": false}), "`attn_output_gate`: expected true, found false"),
        ("qwen3_5", json!({"output_gate_type": "sigmoid"}), "`output_gate_type`: expected swish, found \"sigmoid\""),
        ("qwen3_5", json!({"mamba_ssm_dtype": "bfloat16"}), "`mamba_ssm_dtype`: expected float32"),
        ("qwen3_5", json!({"hidden_act": "gelu"}), "`hidden_act`: expected silu"),
        ("qwen3_5", json!({"linear_num_value_heads": 3}), "a multiple of linear_num_key_heads = 2, found 3"),
        ("qwen3_5", json!({"layer_types": ["full_attention", "conv"]}), "each full_attention or linear_attention"),
    ] {
        let error = changed(model, &changes).unwrap_err();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn names_and_shapes_of_public_models_with_a_state_are_those_of_their_files() {
    // `config.json` of LiquidAI/LFM2-1.2B, whose model card states 1,170,340,608 parameters.
    let lfm2 = json!({
        "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0, "block_use_swiglu": true, "block_use_xavier_init": true, "bos_token_id": 1,
        "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": true,
        "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pad_token_id": 0, "rope_theta": 1e6, "torch_dtype": "bfloat16", "use_pos_enc": true, "vocab_size": 65536,
    });
    // That of Qwen/Qwen3.5-0.8B, without its vision part.
    let rope = json!({
        "mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    });
    let text = json!({
        "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
        "eos_token_id": 248_044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3584, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_value_head_dim": 128, "max_position_embeddings": 262_144,
        "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": false, "num_attention_heads": 8, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "vocab_size": 248_320,
        "mamba_ssm_dtype": "float32", "rope_parameters": rope,
    });
    let qwen = json!({"model_type": "qwen3_5", "tie_word_embeddings": true, "text_config": text, "vision_config": {}});
    let shapes = |config: serde_json::Value| {
        let path = Path::new("config.json");
        let config = ModelConfig::from_json(path, config.as_object().unwrap().clone()).unwrap();
        rlhf::model::ModelSizes::shapes_of_causal_lm(&config, path).unwrap()
    };
    let check = |all: &[(String, Vec<i64>)], prefix: &str, expected: &[(&str, &[i64])]| {
        let shapes: Vec<(&str, &[i64])> =
            all.iter().filter_map(|(name, shape)| Some((name.strip_prefix(prefix)?, shape.as_slice()))).collect();
        assert_eq!(shapes, expected, "{prefix}");
    };
    let mlp = |gate: &'static str, up: &'static str, down: &'static str, width: &'static [[i64; 2]; 2]| {
        vec![(gate, &width[0][..]), (up, &width[0][..]), (down, &width[1][..])]
    };
    let all = shapes(lfm2);
    assert_eq!(all.iter().map(|(_, shape)| shape.iter().product::<i64>()).sum::<i64>(), 1_170_340_608);
    let mlp_shapes = || {
        let names = ("feed_forward.w1.weight", "feed_forward.w3.weight", "feed_forward.w2.weight");
        [vec![("ffn_norm.weight", &[2048i64][..])], mlp(names.0, names.1, names.2, &[[8192, 2048], [2048, 8192]])]
            .concat()
    };
    let conv: Vec<(&str, &[i64])> = vec![
        ("operator_norm.weight", &[2048]),
        ("conv.in_proj.weight", &[6144, 2048]),
        ("conv.conv.weight", &[2048, 1, 3]),
        ("conv.out_proj.weight", &[2048, 2048]),
    ];
    check(&all, "model.layers.0.", &[conv, mlp_shapes()].concat());
    let attention: Vec<(&str, &[i64])> = vec![
        ("operator_norm.weight", &[2048]),
        ("self_attn.q_proj.weight", &[2048, 2048]),
        ("self_attn.k_proj.weight", &[512, 2048]),
        ("self_attn.v_proj.weight", &[512, 2048]),
        ("self_attn.q_layernorm.weight", &[64]),
        ("self_attn.k_layernorm.weight", &[64]),
        ("self_attn.out_proj.weight", &[2048, 2048]),
    ];
    check(&all, "model.layers.2.", &[attention, mlp_shapes()].concat());
    check(&all, "model.e", &[("mbed_tokens.weight", &[65536, 2048]), ("mbedding_norm.weight", &[2048])]);

    let all = shapes(qwen);
    let mlp_shapes = || {
        let names = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight");
        let norm = vec![("post_attention_layernorm.weight", &[1024i64][..])];
        [norm, mlp(names.0, names.1, names.2, &[[3584, 1024], [1024, 3584]])].concat()
    };
    let delta: Vec<(&str, &[i64])> = vec![
        ("input_layernorm.weight", &[1024]),
        ("linear_attn.in_proj_qkv.weight", &[6144, 1024]),
        ("linear_attn.in_proj_z.weight", &[2048, 1024]),
        ("linear_attn.in_proj_b.weight", &[16, 1024]),
        ("linear_attn.in_proj_a.weight", &[16, 1024]),
        ("linear_attn.A_log", &[16]),
        ("linear_attn.dt_bias", &[16]),
        ("linear_attn.norm.weight", &[128]),
        ("linear_attn.conv1d.weight", &[6144, 1, 4]),
        ("linear_attn.out_proj.weight", &[1024, 2048]),
    ];
    check(&all, "model.layers.0.", &[delta, mlp_shapes()].concat());
    let attention: Vec<(&str, &[i64])> = vec![
        ("input_layernorm.weight", &[1024]),
        ("self_attn.q_proj.weight", &[4096, 1024]),
        ("self_attn.k_proj.weight", &[512, 1024]),
        ("self_attn.v_proj.weight", &[512, 1024]),
        ("self_attn.q_norm.weight", &[256]),
        ("self_attn.k_norm.weight", &[256]),
        ("self_attn.o_proj.weight", &[1024, 2048]),
    ];
    check(&all, "model.layers.3.", &[attention, mlp_shapes()].concat());
    assert_eq!(all.len(), 2 + 18 * 14 + 6 * 11);
}

#[test]
fn the_text_part_of_a_ministral_3_folder_is_read_under_the_names_of_both_versions_with_its_head() {
    let dir = golden().join("models/ministral3");
    let checkpoint = rlhf::weights::Checkpoint::open(&dir).unwrap();
    let read = |name: &str| checkpoint.read(name, tch::Device::Cpu, tch::Kind::Float).unwrap();
    let image = Tensor::ones([2, 2], (tch::Kind::Float, tch::Device::Cpu));
    let ids = [vec![5i64, 6, 7, 8, 9, 10, 11, 12, 13, 14]];
    let expected = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap().logits(&ids).unwrap().remove(0);
    let text = read_json(&dir.join("config.json"));
    for (prefix, head, other) in [
        ("language_model.model.", "language_model.lm_head.weight", "vision_tower.patch_conv.weight"),
        ("model.language_model.", "lm_head.weight", "model.multi_modal_projector.linear_1.weight"),
    ] {
        let named = |name: &str| match name.strip_prefix("model.") {
            Some(rest) => format!("{prefix}{rest}"),
            None => head.to_string(),
        };
        let mut tensors: Named = checkpoint.names().map(|name| (named(name), read(name))).collect();
        tensors.push((other.into(), image.shallow_clone()));
        let whole = tempfile::tempdir().unwrap();
        rlhf::weights::save(whole.path(), &tensors, usize::MAX).unwrap();
        let config = serde_json::json!({
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
            "tie_word_embeddings": false, "text_config": text, "vision_config": {},
        });
        std::fs::write(whole.path().join("config.json"), config.to_string()).unwrap();
        let model = CausalLm::from_pretrained(whole.path(), ModelOptions::default()).unwrap();
        assert_close(prefix, &model.logits(&ids).unwrap()[0], &expected, 0.0);
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
        let saved = read_json(&out.path().join("config.json"));
        assert_eq!((&saved["model_type"], &saved["tie_word_embeddings"]), (&json!("ministral3"), &json!(false)));
        let again = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
        assert_close("saved", &again.logits(&ids).unwrap()[0], &expected, 0.0);
    }
    let other = json!({"model_type": "mistral3", "text_config": {"model_type": "llama"}});
    let error = changed("ministral3", &other).unwrap_err();
    assert!(
        error.contains("`text_config`: expected a `model_type` of mistral or ministral3, found \"llama\""),
        "{error}"
    );
}

#[test]
fn reward_models_of_openrlhf_and_llama_factory_are_opened_with_their_heads_and_others_refused_as_such() {
    let dir = golden().join("models/llama_untied_cls");
    let checkpoint = rlhf::weights::Checkpoint::open(&dir).unwrap();
    let read = |name: &str| checkpoint.read(name, tch::Device::Cpu, tch::Kind::Float).unwrap();
    let rows = [vec![5i64, 6, 7, 8], vec![9, 10]];
    let open = |dir: &Path| SequenceClassifier::from_pretrained(dir, None, ModelOptions::default());
    let scores = |dir: &Path| tch::no_grad(|| open(dir).unwrap().scores(&rows).unwrap());
    let expected = scores(&dir);
    let mut config = read_json(&dir.join("config.json"));
    config["architectures"] = json!(["LlamaForCausalLM"]);
    for key in ["id2label", "label2id"] {
        config.as_object_mut().unwrap().remove(key);
    }
    let folder = |config: &serde_json::Value, head: &str, more: &[(&str, Tensor)]| {
        let out = tempfile::tempdir().unwrap();
        let named = |name: &str| if name == "score.weight" { head.to_string() } else { name.to_string() };
        let mut tensors: Named = checkpoint.names().map(|name| (named(name), read(name))).collect();
        tensors.retain(|(name, _)| !name.is_empty());
        tensors.extend(more.iter().map(|(name, tensor)| (name.to_string(), tensor.shallow_clone())));
        rlhf::weights::save(out.path(), &tensors, usize::MAX).unwrap();
        std::fs::write(out.path().join("config.json"), config.to_string()).unwrap();
        out
    };
    let lm_head = || ("lm_head.weight", read("model.embed_tokens.weight"));
    let saved = |dir: &Path| {
        let out = tempfile::tempdir().unwrap();
        open(dir).unwrap().save_pretrained(out.path(), &[2], None, usize::MAX).unwrap();
        (scores(out.path()), read_json(&out.path().join("config.json"))["architectures"][0].clone())
    };
    // OpenRLHF's names, of today and before.
    for head in ["score.weight", "value_head.weight"] {
        let made = folder(&config, head, &[]);
        assert_close(head, &scores(made.path()), &expected, 0.0);
        let (again, class) = saved(made.path());
        assert_close(head, &again, &expected, 0.0);
        assert_eq!(class, "LlamaForSequenceClassification");
    }
    let mut normalized = config.clone();
    normalized["normalize_reward"] = json!(true);
    let error = open(folder(&normalized, "value_head.weight", &[]).path()).unwrap_err().to_string();
    assert!(error.contains("`normalize_reward`: expected false, found true"), "{error}");
    // LLaMA-Factory's head is in a file beside the language model, TRL's among its weights.
    let bias = Tensor::from_slice(&[0.25f32]);
    let [weight_name, bias_name] = ["v_head.summary.weight", "v_head.summary.bias"];
    let head: Named = vec![(weight_name.into(), read("score.weight")), (bias_name.into(), bias.shallow_clone())];
    let separate = folder(&config, "", &[lm_head()]);
    rlhf::weights::save_file(&separate.path().join("value_head.safetensors"), &head).unwrap();
    let within = folder(&config, weight_name, &[lm_head(), (bias_name, bias)]);
    for made in [&separate, &within] {
        assert_close("value head", &scores(made.path()), &(&expected + 0.25), 1e-6);
        let (again, class) = saved(made.path());
        assert_close("saved", &again, &(&expected + 0.25), 1e-6);
        assert_eq!(class, "LlamaForCausalLM");
        let mut model = open(made.path()).unwrap();
        let error = model.set_format(ClassifierFormat::DeepspeedChat).unwrap_err().to_string();
        assert!(error.contains("expected a head without a bias, found `v_head.summary.bias`"), "{error}");
        assert!(model.add_adapter(&LoraConfig::default(), 1).unwrap_err().to_string().contains("LLaMA-Factory's"));
    }
    // Another head is not one to throw away.
    let error = open(folder(&config, "reward_head.weight", &[lm_head()]).path()).unwrap_err().to_string();
    assert!(error.contains("a head of another form, which is not supported"), "{error}");
    let plain = open(folder(&config, "", &[lm_head()]).path()).unwrap_err().to_string();
    assert!(plain.contains("this is a language model") && plain.contains("--new_reward_head"), "{plain}");
}

#[test]
fn experts_in_mxfp4_are_read_in_bf16_or_f32_and_saved_plain() {
    let dir = golden().join("models/gpt_oss_mxfp4");
    let checkpoint = rlhf::weights::Checkpoint::open(&dir).unwrap();
    assert!(checkpoint.holds_codes("model.layers.0.mlp.experts.down_proj_blocks"));
    let ids = [vec![5i64, 6, 7, 8, 9, 10, 11]];
    let logits = |dir: &Path, dtype| {
        let options = ModelOptions { dtype, ..ModelOptions::default() };
        CausalLm::from_pretrained(dir, options).unwrap().logits(&ids).unwrap().remove(0)
    };
    let expected = logits(&dir, Dtype::Float32);
    // The values of the codes are exact in bf16, and the other tensors of this file are in f32.
    assert_close("auto", &logits(&dir, Dtype::Auto), &expected, 0.0);
    let out = tempfile::tempdir().unwrap();
    let options = ModelOptions { dtype: Dtype::Auto, ..ModelOptions::default() };
    let model = CausalLm::from_pretrained(&dir, options).unwrap();
    let experts = model.params().iter().find(|param| param.name.ends_with("experts.gate_up_proj")).unwrap();
    assert_eq!((experts.tensor.kind(), experts.tensor.size()), (tch::Kind::BFloat16, vec![3, 32, 64]));
    model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
    assert_eq!(read_json(&out.path().join("config.json")).get("quantization_config"), None);
    assert_close("saved", &logits(out.path(), Dtype::Float32), &expected, 0.0);
    // Codes of another shape, and exponents whose values no number holds.
    let all: Named = checkpoint
        .names()
        .map(|name| (name.to_string(), checkpoint.read_stored(name, tch::Device::Cpu).unwrap()))
        .collect();
    type Change = fn(&Tensor) -> Tensor;
    let damages: [(&str, Change, &str); 2] = [
        ("down_proj_blocks", |x| x.narrow(1, 0, 8), "missing `model.layers.0.mlp"),
        ("down_proj_scales", |x| x.full_like(255), "expected finite numbers, found"),
    ];
    for (end, change, message) in damages {
        let tensors: Named = all
            .iter()
            .map(|(name, x)| (name.clone(), if name.ends_with(end) { change(x) } else { x.shallow_clone() }))
            .collect();
        let damaged = tempfile::tempdir().unwrap();
        std::fs::copy(dir.join("config.json"), damaged.path().join("config.json")).unwrap();
        rlhf::weights::save(damaged.path(), &tensors, usize::MAX).unwrap();
        let error = CausalLm::from_pretrained(damaged.path(), ModelOptions::default()).unwrap_err().to_string();
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn experts_get_no_adapter_and_are_merged_and_held_like_other_weights() {
    for name in ["qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_moe", "lfm2_moe", "gpt_oss"] {
        let dir = golden().join("models").join(name);
        let mut model = CausalLm::from_pretrained(&dir, ModelOptions::default()).unwrap();
        let targets = |names: &[&str]| LoraConfig {
            target_modules: Some(names.iter().map(ToString::to_string).collect()),
            ..LoraConfig::default()
        };
        let error = model.add_adapter(&targets(&["w1", "gate"]), 1).unwrap_err().to_string();
        assert!(
            error.contains("lora_target_modules: expected linear layers of") && error.contains("q_proj"),
            "{error}"
        );
        let ids = [vec![5i64, 6, 7, 8, 9, 10, 11]];
        let before = model.logits(&ids).unwrap().remove(0);
        model.add_adapter(&targets(&["all-linear"]), 1).unwrap();
        assert!(model.params().iter().all(|param| !param.name.contains("experts.0") || !param.name.contains("lora")));
        model.merge_adapter();
        assert_close(name, &model.logits(&ids).unwrap()[0], &before, 0.0);
    }
}

#[test]
fn experts_in_one_tensor_for_all_of_a_layer_are_read_and_are_saved_one_by_one() {
    for (name, [gate, up, down]) in [
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen3_5_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("lfm2_moe", ["w1", "w3", "w2"]),
    ] {
        let dir = model_folder(name);
        let stored = file(&dir);
        let find = |name: &str| &stored.iter().find(|(known, _)| known == name).unwrap().1;
        // As transformers holds them.
        let (experts, mut fused): (Vec<_>, Vec<_>) = stored.iter().partition(|(name, _)| name.contains(".experts."));
        let mut prefixes: Vec<&str> = experts
            .iter()
            .filter_map(|(name, _)| name.split_once(".0.w1.").or(name.split_once(".experts.0.gate")))
            .map(|parts| parts.0.trim_end_matches(".experts"))
            .collect();
        prefixes.dedup();
        let stack = |prefix: &str, parts: &[&str]| {
            let expert_tensor = |expert: usize| {
                let parts = parts.iter().map(|part| find(&format!("{prefix}.experts.{expert}.{part}.weight")));
                Tensor::cat(&parts.collect::<Vec<_>>(), 0)
            };
            Tensor::stack(&(0..4).map(expert_tensor).collect::<Vec<_>>(), 0)
        };
        let mut tensors: Named = fused.drain(..).map(|(name, x)| (name.clone(), x.shallow_clone())).collect();
        assert!(!prefixes.is_empty());
        for prefix in &prefixes {
            tensors.push((format!("{prefix}.experts.gate_up_proj"), stack(prefix, &[gate, up])));
            tensors.push((format!("{prefix}.experts.down_proj"), stack(prefix, &[down])));
        }
        let whole = tempfile::tempdir().unwrap();
        let save = |tensors: &Named| {
            std::fs::copy(dir.join("config.json"), whole.path().join("config.json")).unwrap();
            rlhf::weights::save(whole.path(), tensors, usize::MAX).unwrap();
        };
        save(&tensors);
        let ids = [vec![5i64, 6, 7, 8, 9, 10, 11]];
        let load = |dir: &Path| CausalLm::from_pretrained(dir, ModelOptions::default());
        let expected = load(&dir).unwrap().logits(&ids).unwrap().remove(0);
        let model = load(whole.path()).unwrap();
        assert_close(name, &model.logits(&ids).unwrap()[0], &expected, 0.0);
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[], None, usize::MAX).unwrap();
        let names = |tensors: Vec<(String, Tensor)>| tensors.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(file(out.path())), names(file(&dir)), "{name}");
        // Of another number of experts.
        let last = tensors.last_mut().unwrap();
        last.1 = last.1.narrow(0, 0, 3);
        save(&tensors);
        let error = load(whole.path()).unwrap_err().to_string();
        assert!(error.contains("experts.down_proj`: expected [4, 32, 12], found [3, 32, 12]"), "{error}");
    }
}

#[test]
fn an_encoder_without_a_head_gets_a_new_one_and_keeps_the_layers_that_it_has() {
    // The tensors that the folder lacks, and tensors of masked language models, which no classifier has.
    for (name, lacks, others) in [
        ("bert_cls1", vec!["classifier."], vec!["cls.predictions.bias", "cls.seq_relationship.weight"]),
        ("roberta_cls3", vec!["classifier."], vec!["lm_head.dense.weight", "roberta.pooler.dense.bias"]),
        (
            "distilbert_cls2",
            vec!["pre_classifier.", "classifier."],
            vec!["vocab_transform.weight", "vocab_projector.bias"],
        ),
        (
            "deberta_cls2",
            vec!["pooler.", "classifier."],
            vec!["lm_predictions.lm_head.bias", "mask_predictions.dense.weight"],
        ),
        ("modernbert_cls2", vec!["classifier."], vec!["decoder.bias"]),
    ] {
        let dir = golden().join("models").join(name);
        let checkpoint = rlhf::weights::Checkpoint::open(&dir).unwrap();
        let read = |name: &str| checkpoint.read(name, tch::Device::Cpu, tch::Kind::Float).unwrap();
        let is_stored = |tensor: &&str| !lacks.iter().any(|lacking| tensor.starts_with(lacking));
        let mut tensors: Named =
            checkpoint.names().filter(is_stored).map(|name| (name.to_string(), read(name))).collect();
        let other = Tensor::ones([2], (tch::Kind::Float, tch::Device::Cpu));
        tensors.extend(others.iter().map(|name| (name.to_string(), other.shallow_clone())));
        let base = tempfile::tempdir().unwrap();
        rlhf::weights::save(base.path(), &tensors, usize::MAX).unwrap();
        let mut config = read_json(&dir.join("config.json"));
        let fields = config.as_object_mut().unwrap();
        for field in ["architectures", "id2label", "label2id"] {
            fields.remove(field);
        }
        std::fs::write(base.path().join("config.json"), config.to_string()).unwrap();

        let open = |dir: &Path, seed| SequenceClassifier::from_pretrained(dir, seed, ModelOptions::default());
        let error = open(base.path(), None).unwrap_err().to_string();
        assert!(error.contains("`rlhf reward --new_reward_head` makes one") && !error.contains('\n'), "{error}");
        let model = open(base.path(), Some(1)).unwrap();
        assert!(model.has_new_head(), "{name}");
        for param in model.params().iter().filter(|param| is_stored(&param.name.as_str())) {
            assert_eq!(param.tensor, read(&param.name), "{name}: {}", param.name);
        }
        let texts = [vec![2i64, 7, 8, 9, 3], vec![2, 11, 3]];
        let scores = |model: &SequenceClassifier| tch::no_grad(|| model.scores(&texts).unwrap());
        let found = scores(&model);
        assert!(found.size() == [2] && found != Tensor::zeros([2], (tch::Kind::Float, tch::Device::Cpu)), "{name}");
        assert_eq!(scores(&open(base.path(), Some(1)).unwrap()), found, "{name}");
        assert_ne!(scores(&open(base.path(), Some(2)).unwrap()), found, "{name}");
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[3], None, usize::MAX).unwrap();
        let saved = open(out.path(), Some(3)).unwrap();
        assert!(!saved.has_new_head() && scores(&saved) == found, "{name}: a stored head is kept");
    }
}

#[test]
fn few_bits_that_are_to_learn_are_refused_and_an_adapter_beside_them_learns() {
    let options = ModelOptions { dtype: Dtype::BFloat16, ..ModelOptions::default() };
    let mut model = CausalLm::from_pretrained(&golden().join("models/llama_tied"), options).unwrap();
    let learn = |model: &CausalLm| {
        let sum = |_, now: &TokenLogprobs| now.logprobs.sum(tch::Kind::Float);
        model.logprobs_backward(Batch::new(&[[5i64, 9, 2]], std::slice::from_ref(&(1..3))), 1.0, sum)
    };
    model.set_trainable(true);
    let error = learn(&model).unwrap_err().to_string();
    assert!(error.contains("is held in BFloat16 and trainable: expected f32"), "{error}");
    assert!(model.logits(&[[5i64]]).unwrap_err().to_string().contains("BFloat16"));
    model.set_trainable(false);
    model.add_adapter(&LoraConfig::default(), 1).unwrap();
    model.set_trainable(true);
    learn(&model).unwrap();
    assert!(model.trainable_params().all(|param| param.tensor.grad().defined()));
}
