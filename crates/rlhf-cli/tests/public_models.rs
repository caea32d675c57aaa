//! Published models: what a `config.json` of a hub says about the names and shapes of a model's tensors (`tests/golden/public.json`).

use crate::support::{golden, read_json, say};
use rlhf::model::{ModelConfig, ModelSizes};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors by name.
type Shapes = BTreeMap<String, Vec<i64>>;

/// The names that one with ranges such as `{0-2,4}` stands for.
fn expanded(name: &str) -> Vec<String> {
    let Some((before, (ranges, after))) =
        name.split_once('{').map(|(before, rest)| (before, rest.split_once('}').unwrap()))
    else {
        return vec![name.to_string()];
    };
    let number = |text: &str| text.parse::<usize>().unwrap();
    let names_in = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        number(first)..=number(last)
    };
    let rest = expanded(after);
    ranges
        .split(',')
        .flat_map(names_in)
        .flat_map(|i| rest.iter().map(move |rest| format!("{before}{i}{rest}")))
        .collect()
}

/// The tensors of the files. Those in MXFP4 have the names and shapes of the weights that their codes stand for.
fn published(model: &Value) -> Shapes {
    let mut shapes = Shapes::new();
    for (name, shape) in model["tensors"].as_object().unwrap() {
        let mut shape: Vec<i64> = shape.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect();
        if name.ends_with("_scales") {
            continue;
        }
        if name.ends_with("_blocks") {
            shape = vec![shape[0], shape[2] * 2 * shape[3], shape[1]];
        }
        shapes.extend(expanded(name.trim_end_matches("_blocks")).into_iter().map(|name| (name, shape.clone())));
    }
    shapes
}

fn computed(config: &Value) -> Shapes {
    let path = Path::new("config.json");
    let config = ModelConfig::from_json(path, config.as_object().unwrap().clone()).unwrap();
    ModelSizes::shapes_of_causal_lm(&config, path).unwrap().into_iter().collect()
}

#[test]
fn configs_of_published_models_give_the_names_and_shapes_of_their_files() {
    let models = read_json(&golden().join("public.json"));
    for (name, model) in models.as_object().unwrap() {
        let (expected, found) = (published(model), computed(&model["config"]));
        say(&format!("{name}: {} tensors", expected.len()));
        for (tensor, shape) in &expected {
            assert_eq!(found.get(tensor), Some(shape), "{name}: {tensor}");
        }
        let unexpected = found.keys().find(|tensor| !expected.contains_key(*tensor));
        assert_eq!(unexpected, None, "{name}");
    }
}

#[test]
fn the_text_part_of_a_published_model_for_text_and_images_is_that_model() {
    let models = read_json(&golden().join("public.json"));
    for (name, whole) in [
        ("Qwen3.5-2B", "qwen3_5"),
        ("Qwen3.5-18B-A3B", "qwen3_5_moe"),
        ("gemma-4-E2B", "gemma4"),
        ("gemma-4-26B-A4B", "gemma4"),
        ("Ministral-3-8B", "mistral3"),
    ] {
        let text = &models[name]["config"];
        let tied = text["tie_word_embeddings"].clone();
        let config =
            json!({"model_type": whole, "text_config": text, "vision_config": {}, "tie_word_embeddings": tied});
        let read = |config: &Value| {
            ModelConfig::from_json(Path::new("config.json"), config.as_object().unwrap().clone()).unwrap()
        };
        let (part, alone) = (read(&config), read(text));
        assert!(part.is_part() && !alone.is_part());
        assert_eq!(part.family, alone.family, "{name}");
        assert_eq!((&part.experts, &part.layer_shapes), (&alone.experts, &alone.layer_shapes), "{name}");
        assert_eq!(part.tie_word_embeddings, alone.tie_word_embeddings, "{name}");
    }
}
