//! Encoder-decoders (T5, mT5, BART) against transformers' values (`golden/models/t5*`, `make_t5.py`), and against themselves.

use crate::lora::{adapter, assert_gradients};
use crate::support::{Tensors, assert_close, golden, read_json};
use rlhf::generate::{FinishReason, GenerationConfig, Sampling, generate};
use rlhf::model::{
    Batch, CausalLm, LoraConfig, ModelConfig, ModelOptions, Param, Precision, SequenceClassifier, ValueModel,
};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};
use tempfile::TempDir;

const TOLERANCE: f64 = 2e-5;
const MODELS: [&str; 5] = ["t5", "t5_v11", "t5_v11_untied", "mt5", "bart"];

/// The start of the names of a model's classes in transformers.
fn class(name: &str) -> &'static str {
    match name {
        "mt5" => "MT5",
        "bart" => "Bart",
        _ => "T5",
    }
}

fn folder(name: &str) -> PathBuf {
    golden().join("models").join(name)
}

fn load(name: &str) -> CausalLm {
    CausalLm::from_pretrained(&folder(name), ModelOptions::default()).unwrap()
}

/// Prompts with their responses.
struct Pairs {
    prompts: Vec<Vec<i64>>,
    sequences: Vec<Vec<i64>>,
    prompt_lens: Vec<usize>,
}

impl Pairs {
    fn of(golden: &Tensors) -> Self {
        let part = |name: &str| -> Vec<Vec<i64>> {
            let lens = Vec::<i64>::try_from(golden.get(&format!("{name}_lens"))).unwrap();
            let rows = golden.rows(&format!("{name}s")).into_iter().zip(lens);
            rows.map(|(row, len)| row[..len as usize].to_vec()).collect()
        };
        let (prompts, responses) = (part("prompt"), part("response"));
        let sequences = prompts.iter().zip(&responses).map(|(prompt, response)| [&prompt[..], response].concat());
        let prompt_lens = prompts.iter().map(Vec::len).collect();
        Self { sequences: sequences.collect(), prompts, prompt_lens }
    }

    /// The tokens of the responses.
    fn tokens(&self) -> Vec<Range<usize>> {
        self.prompt_lens.iter().zip(&self.sequences).map(|(&prompt, sequence)| prompt..sequence.len()).collect()
    }

    /// The positions that the decoder reads.
    fn positions(&self) -> Vec<Range<usize>> {
        self.tokens().into_iter().map(|tokens| tokens.start - 1..tokens.end).collect()
    }

    fn batch<'a>(&'a self, spans: &'a [Range<usize>]) -> Batch<'a, Vec<i64>> {
        Batch::new(&self.sequences, spans).with_prompts(Some(&self.prompt_lens))
    }

    /// The rows of a padded golden tensor `[rows, width, ...]` at `count(row)` first slots, one after another.
    fn packed(&self, padded: &Tensor, count: impl Fn(&Range<usize>) -> usize) -> Tensor {
        let rows = self.tokens().into_iter().enumerate();
        let rows: Vec<_> = rows.map(|(i, tokens)| padded.get(i as i64).narrow(0, 0, count(&tokens) as i64)).collect();
        Tensor::cat(&rows, 0)
    }
}

#[test]
fn logits_and_log_probabilities_equal_transformers_whatever_the_batch() {
    for name in MODELS {
        let (golden, model) = (Tensors::read(&folder(name).join("golden.safetensors")), load(name));
        let pairs = Pairs::of(&golden);
        let (positions, tokens) = (pairs.positions(), pairs.tokens());
        let logits = model.logits_at(pairs.batch(&positions)).unwrap();
        let part = golden.part("logits");
        assert_close(name, &part.select(&logits), &pairs.packed(part.tensor, |tokens| tokens.len() + 1), TOLERANCE);
        let found = model.logprobs_of(pairs.batch(&tokens), 1.0, true).unwrap();
        let expected = pairs.packed(golden.get("next_logprobs"), ExactSizeIterator::len);
        assert_close(name, &found.logprobs, &expected, TOLERANCE);
        // A row alone, and a part of its tokens.
        let (row, span) = (1, tokens[1].start + 3..tokens[1].end - 2);
        let alone = Batch::new(&pairs.sequences[row..=row], std::slice::from_ref(&span));
        let alone = model.logprobs_of(alone.with_prompts(Some(&pairs.prompt_lens[row..=row])), 1.0, false).unwrap();
        let row_logprobs = expected.narrow(0, tokens[0].len() as i64 + 3, span.len() as i64);
        assert_close(name, &alone.logprobs, &row_logprobs, TOLERANCE);
    }
}

#[test]
fn greedy_tokens_equal_transformers_generate() {
    for name in MODELS {
        let (golden, model) = (Tensors::read(&folder(name).join("golden.safetensors")), load(name));
        let pairs = Pairs::of(&golden);
        for (batch_size, num_return_sequences) in [(8, 1), (2, 1), (8, 3)] {
            let config = GenerationConfig {
                stop_token_ids: vec![1],
                min_new_tokens: 4,
                batch_size,
                num_return_sequences,
                ..GenerationConfig::new(Sampling::Greedy, 12)
            };
            let responses = generate(&model, &pairs.prompts, &config).unwrap();
            assert_eq!(responses.len(), pairs.prompts.len() * num_return_sequences);
            for (i, response) in responses.iter().enumerate() {
                let expected = &golden.rows("greedy.tokens")[i / num_return_sequences];
                let len = expected.iter().position(|&id| id == 1).map_or(expected.len(), |at| at + 1);
                assert_eq!(response.tokens, expected[..len], "{name}: {i}");
                assert_eq!(response.finish == FinishReason::Stop, expected.contains(&1), "{name}: {i}");
            }
        }
    }
}

#[test]
fn the_log_probabilities_of_sampled_tokens_are_those_of_a_pass_over_them() {
    for name in MODELS {
        let model = load(name);
        let prompts = Pairs::of(&Tensors::read(&folder(name).join("golden.safetensors"))).prompts;
        let config = GenerationConfig {
            stop_token_ids: vec![1, 7, 8],
            num_return_sequences: 2,
            ..GenerationConfig::new(Sampling::at_temperature(0.8), 20)
        };
        let responses = generate(&model, &prompts, &config).unwrap();
        let prompt = |i: usize| &prompts[i / 2];
        let rows = responses.iter().enumerate();
        let sequences: Vec<Vec<i64>> = rows.map(|(i, response)| [&prompt(i)[..], &response.tokens].concat()).collect();
        let prompt_lens: Vec<usize> = (0..responses.len()).map(|i| prompt(i).len()).collect();
        let spans: Vec<_> = prompt_lens.iter().zip(&sequences).map(|(&len, sequence)| len..sequence.len()).collect();
        let batch = Batch::new(&sequences, &spans).with_prompts(Some(&prompt_lens));
        let found = model.logprobs_of(batch, 0.8, false).unwrap().logprobs;
        let expected: Vec<f32> = responses.iter().flat_map(|response| response.logprobs.clone()).collect();
        assert_close(name, &found, &Tensor::from_slice(&expected), TOLERANCE);
    }
}

/// The gradients of minus the sum of the log-probabilities of all responses, by the names of the parameters.
fn gradients(model: &CausalLm, pairs: &Pairs) -> Vec<(String, Tensor)> {
    let tokens = pairs.tokens();
    model.logprobs_backward(pairs.batch(&tokens), 1.0, |_, now| -now.logprobs.sum(Kind::Float)).unwrap();
    let gradient = |param: &Param| (param.name.clone(), param.tensor.grad().copy());
    let found = model.trainable_params().map(gradient).collect();
    model.trainable_params().for_each(|param| drop(param.tensor.grad().zero_()));
    found
}

#[test]
fn gradients_of_every_parameter_equal_transformers_with_and_without_checkpointing() {
    for name in MODELS {
        let golden = Tensors::read(&folder(name).join("grads.safetensors"));
        let pairs = Pairs::of(&Tensors::read(&folder(name).join("golden.safetensors")));
        let info = read_json(&folder(name).join("grads.json"));
        let number = |key: &str| info[key].as_f64().unwrap();
        let tolerance = (5.0 * number("rounding")).max(2e-5 * number("max_abs"));
        for checkpointing in [false, true] {
            let mut model = load(name);
            model.set_trainable(true);
            model.set_gradient_checkpointing(checkpointing);
            let found = gradients(&model, &pairs);
            assert_eq!(found.len(), golden.names().count(), "{name}");
            for (param, gradient) in found {
                let part = golden.part(&param);
                assert_close(&format!("{name}: {param}"), &part.select(&gradient), part.tensor, tolerance);
            }
        }
    }
}

#[test]
fn gradients_of_adapters_are_the_parts_of_those_of_the_merged_weights() {
    let pairs = Pairs::of(&Tensors::read(&folder("t5").join("golden.safetensors")));
    for checkpointing in [false, true] {
        let mut model = load("t5");
        model.add_adapter(&LoraConfig { r: 2, alpha: 2.0, ..LoraConfig::default() }, 7).unwrap();
        model.set_trainable(true);
        model.set_gradient_checkpointing(checkpointing);
        for (i, param) in model.trainable_params().enumerate() {
            let mut tensor = param.tensor.shallow_clone();
            let values = Tensor::arange(tensor.numel() as i64, (Kind::Float, tensor.device())) * (0.3 * (i + 1) as f64);
            tch::no_grad(|| tensor.copy_(&(values.sin() * 0.3).view_as(&tensor)));
        }
        let matrices: HashMap<String, Tensor> =
            model.trainable_params().map(|param| (param.name.clone(), param.tensor.detach().copy())).collect();
        // q and v of the self-attention of two encoder layers, and of both attentions of two decoder layers.
        assert_eq!(matrices.len(), 2 * (2 * 2 + 2 * 4));
        let found: HashMap<_, _> = gradients(&model, &pairs).into_iter().collect();
        model.merge_adapter();
        model.set_trainable(true);
        let weight_gradients: HashMap<_, _> = gradients(&model, &pairs).into_iter().collect();
        for (name, gradient) in &found {
            let layer = name.rsplit_once(".lora_").unwrap().0;
            let weight = &weight_gradients[&format!("{layer}.weight")];
            let matrix = |end: &str| &matrices[&format!("{layer}.{end}.weight")];
            let expected = if name.ends_with("lora_A.weight") {
                matrix("lora_B").tr().matmul(weight)
            } else {
                weight.matmul(&matrix("lora_A").tr())
            };
            let largest = expected.abs().max().double_value(&[]);
            assert!(largest > 1e-3, "{name}");
            assert_close(name, gradient, &expected, 2e-5 * largest.max(1.0));
        }
    }
}

#[test]
fn logits_and_gradients_with_adapters_equal_pefts() {
    let pairs = Pairs::of(&Tensors::read(&folder("t5").join("golden.safetensors")));
    let (positions, tokens) = (pairs.positions(), pairs.tokens());
    for name in ["t5", "t5_dora_all"] {
        let golden = Tensors::read(&adapter(name).join("golden.safetensors"));
        let part = golden.part("logits");
        let expected = pairs.packed(part.tensor, |tokens| tokens.len() + 1);
        let mut model = load("t5");
        model.load_adapter(&adapter(name)).unwrap();
        assert_close(name, &part.select(&model.logits_at(pairs.batch(&positions)).unwrap()), &expected, TOLERANCE);
        model.set_trainable(true);
        model.logprobs_backward(pairs.batch(&tokens), 1.0, |_, now| -now.logprobs.sum(Kind::Float)).unwrap();
        assert_gradients(name, model.trainable_params());
        model.merge_adapter();
        assert_close(name, &part.select(&model.logits_at(pairs.batch(&positions)).unwrap()), &expected, TOLERANCE);
    }
}

#[test]
fn the_config_of_transformers_4_gives_the_same_model() {
    for name in MODELS.into_iter().chain(["t5_cls", "t5_v11_cls1", "bart_cls1"]) {
        let read = |file: &str| ModelConfig::from_file(&folder(name).join(file)).unwrap();
        let (new, old) = (read("config.json"), read("config_v4.json"));
        // Before transformers 5 the same flag meant a head of its own, which a file may lack.
        let tied = rlhf::model::Shape { tie_word_embeddings: new.tie_word_embeddings, ..(*old).clone() };
        assert_eq!(*new, tied, "{name}");
    }
}

#[test]
fn scores_of_the_classifier_and_their_gradients_equal_transformers() {
    let folder = folder("t5_cls");
    let golden = Tensors::read(&folder.join("golden.safetensors"));
    let texts = Pairs::of(&golden).prompts;
    let mut model = SequenceClassifier::from_pretrained(&folder, None, ModelOptions::default()).unwrap();
    assert_close("scores", &model.logits(&texts).unwrap(), golden.get("scores"), TOLERANCE);
    model.set_trainable(true);
    let loss = model.logits(&texts).unwrap() * Tensor::from_slice(&[1.0f32, -2.0]);
    loss.sum(Kind::Float).backward();
    let grads = Tensors::read(&folder.join("grads.safetensors"));
    for param in model.params() {
        let part = grads.part(&param.name);
        assert_close(&param.name, &part.select(&param.tensor.grad()), part.tensor, 1e-4);
    }
    let error = model.values_at(&texts, &[0..1, 0..1, 0..1, 0..1]).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn values_of_a_classifier_at_the_decoders_states_and_their_gradients_equal_transformers() {
    for (name, checkpointing) in [("t5_v11_cls1", false), ("t5_v11_cls1", true), ("bart_cls1", false)] {
        let folder = folder(name);
        let golden = Tensors::read(&folder.join("golden.safetensors"));
        let pairs = Pairs::of(&golden);
        let (positions, policy) = (pairs.positions(), load("t5_v11"));
        let expected = pairs.packed(&golden.get("values").squeeze_dim(2), |tokens| tokens.len() + 1);
        let info = read_json(&folder.join("grads.json"));
        let number = |key: &str| info[key].as_f64().unwrap();
        let tolerance = (5.0 * number("rounding")).max(2e-5 * number("max_abs"));
        let grads = Tensors::read(&folder.join("grads.safetensors"));
        let mut model = SequenceClassifier::from_pretrained(&folder, None, ModelOptions::default()).unwrap();
        model.set_trainable(true);
        model.set_gradient_checkpointing(checkpointing);
        let mut found = Tensor::new();
        let square = |values: &Tensor| {
            found = values.detach();
            values.square().sum(Kind::Float)
        };
        model.values_backward(pairs.batch(&positions), square).unwrap();
        assert_close("in a backward pass", &found, &expected, TOLERANCE);
        for param in model.params() {
            let part = grads.part(&param.name);
            assert_close(&param.name, &part.select(&param.tensor.grad()), part.tensor, tolerance);
        }
        let scores = model.scores(&pairs.prompts).unwrap();
        assert_close("scores", &scores, &golden.get("scores").squeeze_dim(1), TOLERANCE);
        // Equal prompts are read once, and the last states of a row alone are those of the row among others.
        let critic = ValueModel::from(model);
        assert_close("values", &critic.values_of(&policy, pairs.batch(&positions)).unwrap(), &expected, TOLERANCE);
        let (row, span) = (1, positions[1].end - 3..positions[1].end);
        let alone = Batch::new(&pairs.sequences[row..=row], std::slice::from_ref(&span));
        let alone = critic.values_of(&policy, alone.with_prompts(Some(&pairs.prompt_lens[row..=row]))).unwrap();
        let end = (positions[0].len() + positions[1].len()) as i64;
        assert_close("alone", &alone, &expected.narrow(0, end - 3, 3), TOLERANCE);
    }
}

#[test]
fn a_new_head_reads_the_states_of_the_language_models_decoder() {
    for name in MODELS {
        let golden = Tensors::read(&folder(name).join("golden.safetensors"));
        let pairs = Pairs::of(&golden);
        let positions = pairs.positions();
        let model = SequenceClassifier::from_pretrained(&folder(name), Some(5), ModelOptions::default()).unwrap();
        assert!(model.has_new_head());
        model.check_values(&folder(name)).unwrap();
        let tensor = |name: &str| {
            let params = model.params();
            params.iter().find(|param| param.name == format!("classification_head.{name}")).unwrap().tensor.detach()
        };
        let states = pairs.packed(golden.get("decoder_states"), |tokens| tokens.len() + 1);
        let inner = (states.matmul(&tensor("dense.weight").tr()) + tensor("dense.bias")).tanh();
        let expected = (inner.matmul(&tensor("out_proj.weight").tr()) + tensor("out_proj.bias")).squeeze_dim(1);
        // As transformers draws it: biases of 0, weights with a deviation of 1 / sqrt(d_model), here 0.18, or of BART's init_std.
        assert_eq!(tensor("dense.bias").abs().max().double_value(&[]), 0.0);
        let deviation = tensor("dense.weight").std(false).double_value(&[]);
        let expected_deviation = if name == "bart" { 0.02 } else { 32f64.powf(-0.5) };
        assert!((deviation / expected_deviation - 1.0).abs() < 0.1, "{name}: {deviation}");
        // A saved value model is transformers' classifier, and has the same values.
        let dir = tempfile::tempdir().unwrap();
        model.save_pretrained(dir.path(), &[1], Some(0), usize::MAX).unwrap();
        let again = SequenceClassifier::from_pretrained(dir.path(), None, ModelOptions::default()).unwrap();
        assert_eq!(again.config().architectures, [format!("{}ForSequenceClassification", class(name))]);
        let policy = load(name);
        for model in [model, again] {
            let found = ValueModel::from(model).values_of(&policy, pairs.batch(&positions)).unwrap();
            assert_close(name, &found, &expected, TOLERANCE);
        }
    }
}

#[test]
fn a_language_model_and_a_classifier_are_told_apart_in_one_line() {
    let options = ModelOptions::default;
    for (error, words) in [
        (SequenceClassifier::from_pretrained(&folder("t5"), None, options()).unwrap_err(), "this is a language model"),
        (CausalLm::from_pretrained(&folder("t5_cls"), options()).unwrap_err(), "this is a reward or value model"),
    ] {
        let text = error.to_string();
        assert!(text.contains(words) && text.lines().count() == 1, "{text}");
    }
}

/// Gives parameters numbers that are not 0.
fn fill<'p>(params: impl Iterator<Item = &'p Param>) {
    for param in params {
        let wave = Tensor::arange(param.tensor.numel() as i64, (Kind::Float, param.tensor.device())).sin() * 0.2;
        tch::no_grad(|| param.tensor.shallow_clone().copy_(&wave.view_as(&param.tensor)));
    }
}

#[test]
fn an_adapter_of_a_classifier_is_saved_with_its_head_and_one_of_the_language_model_fits_its_layers() {
    let pairs = Pairs::of(&Tensors::read(&folder("t5").join("golden.safetensors")));
    let positions = pairs.positions();
    let values = |model: SequenceClassifier| {
        ValueModel::from(model).values_of(&load("t5"), pairs.batch(&positions)).unwrap().detach()
    };
    let mut model = SequenceClassifier::from_pretrained(&folder("t5"), Some(5), ModelOptions::default()).unwrap();
    model.add_adapter(&LoraConfig { r: 2, ..LoraConfig::default() }, 7).unwrap();
    model.set_trainable(true);
    assert_eq!(model.trainable_params().count(), 2 * (2 * 2 + 2 * 4) + 4);
    fill(model.trainable_params());
    let dir = tempfile::tempdir().unwrap();
    model.save_pretrained(dir.path(), &[1], Some(0), usize::MAX).unwrap();
    let described = read_json(&dir.path().join("adapter_config.json"));
    assert_eq!(described["modules_to_save"], serde_json::json!(["classifier", "score", "classification_head"]));
    let again = SequenceClassifier::from_pretrained(dir.path(), None, ModelOptions::default()).unwrap();
    assert!(!again.has_new_head());
    let expected = values(model);
    assert_close("an adapter with its head", &values(again), &expected, TOLERANCE);

    let mut lm = load("t5");
    lm.add_adapter(&LoraConfig { r: 2, ..LoraConfig::default() }, 7).unwrap();
    lm.set_trainable(true);
    fill(lm.trainable_params());
    let lm_dir = tempfile::tempdir().unwrap();
    lm.save_pretrained(lm_dir.path(), &[1], Some(0), usize::MAX).unwrap();
    let mut adapted = SequenceClassifier::from_pretrained(lm_dir.path(), Some(5), ModelOptions::default()).unwrap();
    adapted.merge_adapter();
    lm.merge_adapter();
    let merged = tempfile::tempdir().unwrap();
    lm.save_pretrained(merged.path(), &[1], Some(0), usize::MAX).unwrap();
    let expected = SequenceClassifier::from_pretrained(merged.path(), Some(5), ModelOptions::default()).unwrap();
    assert_close("the adapter of the language model", &values(adapted), &values(expected), TOLERANCE);
}

#[test]
fn a_saved_model_has_the_same_numbers_and_its_own_head() {
    for name in MODELS {
        let (golden, model) = (Tensors::read(&folder(name).join("golden.safetensors")), load(name));
        let dir = tempfile::tempdir().unwrap();
        model.save_pretrained(dir.path(), &[1], Some(0), usize::MAX).unwrap();
        let again = CausalLm::from_pretrained(dir.path(), ModelOptions::default()).unwrap();
        assert_eq!(again.config().architectures, [format!("{}ForConditionalGeneration", class(name))]);
        let names = |model: &CausalLm| model.params().iter().map(|param| param.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&again), names(&model));
        assert_eq!(names(&again).contains(&"lm_head.weight".to_string()), name == "t5_v11_untied");
        let pairs = Pairs::of(&golden);
        let positions = pairs.positions();
        let logits = |model: &CausalLm| model.logits_at(pairs.batch(&positions)).unwrap();
        assert_eq!(logits(&again), logits(&model), "{name}");
    }
}

#[test]
fn a_bias_of_logits_that_is_not_zero_and_stacks_of_different_widths_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(folder("bart").join("config.json"), dir.path().join("config.json")).unwrap();
    let tensors = Tensor::read_safetensors(folder("bart").join("model.safetensors")).unwrap();
    let with_bias = |bias: &Tensor| {
        let other =
            |name: &str, tensor: &Tensor| if name == "final_logits_bias" { bias } else { tensor }.shallow_clone();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), other(name, tensor))).collect();
        Tensor::write_safetensors(&tensors, dir.path().join("model.safetensors")).unwrap();
        CausalLm::from_pretrained(dir.path(), ModelOptions::default())
    };
    with_bias(&Tensor::zeros([1, 81], (Kind::Float, tch::Device::Cpu))).unwrap();
    let error = with_bias(&Tensor::ones([1, 81], (Kind::Float, tch::Device::Cpu))).unwrap_err().to_string();
    assert!(error.contains("tensor `final_logits_bias`: expected zeros") && error.lines().count() == 1, "{error}");
    let mut config = read_json(&folder("bart").join("config.json"));
    config["encoder_ffn_dim"] = serde_json::json!(64);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let error = ModelConfig::from_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("`encoder_ffn_dim`: expected 48, that of the decoder, found 64"), "{error}");
}

/// A folder of the golden model `name` with other fields of its configuration and other tensors.
fn altered(name: &str, config: &str, fields: &Value, change: impl FnOnce(&mut Vec<(String, Tensor)>)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut config = read_json(&folder(name).join(config));
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut tensors = stored(&folder(name));
    change(&mut tensors);
    rlhf::weights::save(dir.path(), &tensors, usize::MAX).unwrap();
    dir
}

/// The tensors of a folder.
fn stored(dir: &Path) -> Vec<(String, Tensor)> {
    let checkpoint = rlhf::weights::Checkpoint::open(dir).unwrap();
    let read = |name: &str| (name.to_string(), checkpoint.read(name, tch::Device::Cpu, Kind::Float).unwrap());
    checkpoint.names().map(read).collect()
}

fn tensor<'t>(tensors: &'t [(String, Tensor)], name: &str) -> &'t Tensor {
    &tensors.iter().find(|(found, _)| found == name).unwrap_or_else(|| panic!("no {name}")).1
}

/// Names of the tables that transformers has for the stacks of a BART whose embeddings are not tied.
const COPIES: [&str; 2] = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"];

#[test]
fn embeddings_of_the_stacks_that_differ_from_the_shared_one_are_refused_in_one_line() {
    let t5 = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];
    for (name, shared, copies) in [
        ("bart", "model.shared.weight", COPIES),
        ("bart_cls1", "model.shared.weight", COPIES),
        ("t5", "shared.weight", t5),
    ] {
        let open = |factors: [f64; 2]| {
            let dir = altered(name, "config.json", &json!({}), |tensors| {
                let embedding = tensor(tensors, shared).shallow_clone();
                let copy = |(copy, factor): (&str, f64)| (copy.to_string(), &embedding * factor);
                tensors.extend(copies.into_iter().zip(factors).map(copy));
            });
            let options = ModelOptions::default();
            match name {
                "bart_cls1" => SequenceClassifier::from_pretrained(dir.path(), None, options).map(drop),
                _ => CausalLm::from_pretrained(dir.path(), options).map(drop),
            }
        };
        open([1.0, 1.0]).unwrap();
        for (factors, differing) in [([2.0, 1.0], copies[0]), ([1.0, 2.0], copies[1])] {
            let error = open(factors).unwrap_err().to_string();
            let expected = format!("tensor `{differing}`: expected the values of `{shared}`, found others");
            assert!(error.contains(&expected) && error.lines().count() == 1, "{error}");
        }
    }
}

#[test]
fn a_bart_that_is_not_tied_is_saved_with_an_embedding_for_each_stack() {
    let (embedding, head) = ("model.shared.weight", "lm_head.weight");
    let untied = json!({"tie_word_embeddings": false});
    let with_head = |tensors: &mut Vec<(String, Tensor)>| {
        let twice = tensor(tensors, embedding) * 2.0;
        tensors.push((head.into(), twice));
    };
    let names = |tensors: &[(String, Tensor)], wanted: &[&str]| {
        wanted.iter().map(|name| tensors.iter().any(|(found, _)| found == name)).collect::<Vec<_>>()
    };
    let pairs = Pairs::of(&Tensors::read(&folder("bart").join("golden.safetensors")));
    let positions = pairs.positions();
    let logits = |model: &CausalLm| tch::no_grad(|| model.logits_at(pairs.batch(&positions)).unwrap());
    let plain = logits(&load("bart"));
    // The file says so, or the values of the head do.
    for fields in [&untied, &json!({})] {
        let from = altered("bart", "config.json", fields, with_head);
        let model = CausalLm::from_pretrained(from.path(), ModelOptions::default()).unwrap();
        assert_close("twice the head", &logits(&model), &(&plain * 2.0), 1e-4);
        let out = tempfile::tempdir().unwrap();
        for shard in [usize::MAX, 20_000] {
            model.save_pretrained(out.path(), &[1], Some(80), shard).unwrap();
            let saved = stored(out.path());
            for copy in COPIES {
                assert_eq!(tensor(&saved, copy), tensor(&saved, embedding), "{copy}");
            }
            assert_eq!(read_json(&out.path().join("config.json"))["tie_word_embeddings"], false);
            let again = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
            assert_eq!(logits(&again), logits(&model));
        }
    }
    // The classes of transformers tie the stacks of a classifier by the same field.
    let from = altered("bart_cls1", "config.json", &untied, |_| ());
    let model = SequenceClassifier::from_pretrained(from.path(), None, ModelOptions::default()).unwrap();
    let out = tempfile::tempdir().unwrap();
    model.save_pretrained(out.path(), &[1], Some(80), usize::MAX).unwrap();
    assert_eq!(names(&stored(out.path()), &COPIES), [true, true]);
    // Without a stored head the head is the embedding, and the file says so.
    let from = altered("bart", "config.json", &untied, |_| ());
    let model = CausalLm::from_pretrained(from.path(), ModelOptions::default()).unwrap();
    assert_eq!(logits(&model), plain);
    model.save_pretrained(out.path(), &[1], Some(80), usize::MAX).unwrap();
    assert_eq!(names(&stored(out.path()), &[COPIES[0], COPIES[1], head]), [false; 3]);
    assert_eq!(read_json(&out.path().join("config.json"))["tie_word_embeddings"], true);
}

#[test]
fn a_t5_with_a_head_of_its_own_is_scaled_as_before_when_it_is_saved() {
    let pairs = Pairs::of(&Tensors::read(&folder("t5").join("golden.safetensors")));
    let positions = pairs.positions();
    let logits = |model: &CausalLm| tch::no_grad(|| model.logits_at(pairs.batch(&positions)).unwrap());
    let plain = logits(&load("t5"));
    for config in ["config_v4.json", "config.json"] {
        let from = altered("t5", config, &json!({}), |tensors| {
            let twice = tensor(tensors, "shared.weight") * 2.0;
            tensors.push(("lm_head.weight".into(), twice));
        });
        let field = |dir: &Path| read_json(&dir.join("config.json")).get("tie_word_embeddings").cloned();
        let model = CausalLm::from_pretrained(from.path(), ModelOptions::default()).unwrap();
        assert_close("twice the head", &logits(&model), &(&plain * 2.0), 1e-4);
        let out = tempfile::tempdir().unwrap();
        model.save_pretrained(out.path(), &[1], Some(0), usize::MAX).unwrap();
        let again = CausalLm::from_pretrained(out.path(), ModelOptions::default()).unwrap();
        assert_eq!(logits(&again), logits(&model), "{config}");
        assert_eq!(field(out.path()), field(from.path()), "{config}");
    }
}

#[test]
fn bf16_is_close_and_finite() {
    for name in ["t5", "bart"] {
        let golden = Tensors::read(&folder(name).join("golden.safetensors"));
        let pairs = Pairs::of(&golden);
        let tokens = pairs.tokens();
        let options = ModelOptions { precision: Precision::Bf16, ..ModelOptions::default() };
        let mut model = CausalLm::from_pretrained(&folder(name), options).unwrap();
        let found = model.logprobs_of(pairs.batch(&tokens), 1.0, false).unwrap().logprobs;
        let expected = pairs.packed(golden.get("next_logprobs"), ExactSizeIterator::len);
        let error = (found - expected).abs().max().double_value(&[]);
        assert!(error < 0.3, "{name}: {error}");
        // Sampled tokens have the log-probabilities of a pass over them, up to the rounding of the two.
        let config = GenerationConfig::new(Sampling::at_temperature(1.0), 6);
        let responses = generate(&model, &pairs.prompts, &config).unwrap();
        let rows = pairs.prompts.iter().zip(&responses);
        let sequences: Vec<Vec<i64>> =
            rows.map(|(prompt, response)| [&prompt[..], &response.tokens].concat()).collect();
        let spans: Vec<_> = pairs.prompt_lens.iter().zip(&sequences).map(|(&len, ids)| len..ids.len()).collect();
        let batch = Batch::new(&sequences, &spans).with_prompts(Some(&pairs.prompt_lens));
        let found = model.logprobs_of(batch, 1.0, false).unwrap().logprobs;
        let sampled: Vec<f32> = responses.iter().flat_map(|response| response.logprobs.clone()).collect();
        let error = (found - Tensor::from_slice(&sampled)).abs().max().double_value(&[]);
        assert!(error < 0.3, "{name}: sampled: {error}");
        model.set_trainable(true);
        for (param, gradient) in gradients(&model, &pairs) {
            assert!(gradient.isfinite().all().int64_value(&[]) == 1, "{name}: {param}");
        }
    }
}

#[test]
fn f16_is_close_though_results_of_the_mlps_exceed_its_range() {
    let golden = Tensors::read(&folder("t5_v11").join("golden.safetensors"));
    let pairs = Pairs::of(&golden);
    let tokens = pairs.tokens();
    let logprobs = |precision: Precision| {
        let model = CausalLm::from_pretrained(&folder("t5_v11"), ModelOptions { precision, ..ModelOptions::default() })
            .unwrap();
        for param in model.params().iter().filter(|param| param.name.ends_with("DenseReluDense.wo.weight")) {
            let _ = tch::no_grad(|| param.tensor.shallow_clone().g_mul_scalar_(1e6));
        }
        tch::no_grad(|| model.logprobs_of(pairs.batch(&tokens), 1.0, false)).unwrap().logprobs
    };
    let (expected, found) = (logprobs(Precision::F32), logprobs(Precision::F16));
    let error = (found - expected).abs().max().double_value(&[]);
    assert!(error < 0.1, "{error}");
}

#[test]
fn a_missing_start_token_is_one_line_and_may_be_in_the_generation_config() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = read_json(&folder("t5").join("config.json"));
    config.as_object_mut().unwrap().remove("decoder_start_token_id");
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let error = ModelConfig::from_dir(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("`decoder_start_token_id`: expected a token id below vocab_size = 80, found none"),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1, "{error}");
    std::fs::write(dir.path().join("generation_config.json"), r#"{"decoder_start_token_id": 0}"#).unwrap();
    assert_eq!(ModelConfig::from_dir(dir.path()).unwrap().decoder_start_token_id, Some(0));
    std::fs::write(dir.path().join("generation_config.json"), r#"{"decoder_start_token_id": 80}"#).unwrap();
    assert!(ModelConfig::from_dir(dir.path()).is_err());
}

#[test]
fn prompt_and_response_share_a_decoders_context_and_not_that_of_an_encoder_decoder() {
    let config = |name: &str| ModelConfig::from_dir(&folder(name)).unwrap();
    let (pair, one) = (config("t5"), config("gpt2"));
    assert_eq!((pair.max_prompt_len(512, 1), pair.max_prompt_len(512, 511)), (Some(512), Some(512)));
    assert_eq!((pair.max_prompt_len(512, 512), pair.max_prompt_len(512, 600)), (None, None));
    assert_eq!((one.max_prompt_len(512, 1), one.max_prompt_len(512, 511)), (Some(511), Some(1)));
    assert_eq!((one.max_prompt_len(512, 512), one.max_prompt_len(512, 600)), (None, None));
    let context = one.max_position_embeddings;
    assert_eq!([pair.max_new_tokens(1), pair.max_new_tokens(512), pair.max_new_tokens(513)], [511, 511, 0]);
    assert_eq!([one.max_new_tokens(1), one.max_new_tokens(context)], [context - 1, 0]);
}

#[test]
fn a_batch_without_prompts_and_a_prompt_beyond_the_limit_are_one_line() {
    let model = load("t5");
    let error = |result: rlhf::Result<Tensor>| {
        let text = result.unwrap_err().to_string();
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    let (sequences, span) = ([vec![5, 6, 1, 7, 8]], 3..5);
    let logits = |lens: Option<&[usize]>| {
        model.logits_at(Batch::new(&sequences, std::slice::from_ref(&span)).with_prompts(lens))
    };
    assert!(logits(Some(&[3])).is_ok());
    assert!(error(logits(None)).contains("`t5` is an encoder-decoder: expected the length of each prompt, found none"));
    assert!(error(logits(Some(&[3, 1]))).contains("expected 1 prompt lengths"));
    assert!(error(logits(Some(&[0]))).contains("expected a prompt of 1 to 5 tokens, found 0"));
    assert!(error(logits(Some(&[6]))).contains("expected a prompt of 1 to 5 tokens, found 6"));
    assert!(error(logits(Some(&[5]))).contains("expected a span within 4..5"), "the decoder does not read the prompt");
    let (long, span) = ([vec![5; 513]], 512..513);
    let error = model
        .logits_at(Batch::new(&long, std::slice::from_ref(&span)).with_prompts(Some(&[513])))
        .unwrap_err()
        .to_string();
    assert!(error.contains("expected a prompt of at most 512 tokens"), "{error}");
    let config = GenerationConfig::new(Sampling::Greedy, 4);
    let error = generate(&model, &long, &config).unwrap_err().to_string();
    assert!(error.contains("prompt 0: expected at most 512 tokens for the encoder and 511 new ones"), "{error}");
}

#[test]
fn a_classifier_in_the_place_of_a_language_model_is_named_as_such() {
    let error = CausalLm::from_pretrained(&folder("t5_cls"), ModelOptions::default()).unwrap_err().to_string();
    assert!(error.contains("unexpected `classification_head.dense.bias`"), "{error}");
    assert!(error.ends_with(": this is a reward or value model, not a language model"), "{error}");
}
