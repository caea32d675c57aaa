//! The loop of TRL's documentation until 0.11: generate, score with any code, `step`.
//!
//!     cargo run --release --example step_by_step -- SFT_FOLDER QUERIES.jsonl OUTPUT_FOLDER

use rlhf::compat::step::{Generate, StepConfig, StepTrainer, Texts};
use rlhf::data::Dataset;
use rlhf::model::ModelOptions;
use std::path::Path;

/// Short responses score higher: a tenth off for every word.
fn reward(_query: &str, response: &str) -> f64 {
    -(response.split_whitespace().count() as f64) / 10.0
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, queries, out] = arguments.as_slice() else {
        return Err("usage: step_by_step SFT_FOLDER QUERIES.jsonl OUTPUT_FOLDER".into());
    };
    // 1. A policy with a value head, and a trainer.
    let config = StepConfig {
        model_name: model.into(),
        learning_rate: 1e-4,
        batch_size: 16,
        mini_batch_size: 8,
        output_dir: Some(out.into()),
        ..StepConfig::default()
    };
    let mut trainer = StepTrainer::from_pretrained(config, ModelOptions::default())?;
    let mut loader = trainer.prepare_dataloader(&Dataset::read(Path::new(queries), "train")?)?;

    for _epoch in 0..3 {
        for batch in loader.epoch()? {
            // 2. Responses.
            let queries: Vec<Vec<i64>> = batch.iter().map(|prompt| prompt.tokens.clone()).collect();
            let responses = trainer.generate(&queries, &Generate::new(32))?.responses;
            let query: Vec<String> = batch.into_iter().map(|prompt| prompt.text).collect();
            let response = responses.iter().map(|r| trainer.tokenizer.decode(r)).collect::<Result<Vec<_>, _>>()?;

            // 3. Scores.
            let rewards: Vec<f64> = query.iter().zip(&response).map(|(q, r)| reward(q, r)).collect();

            // 4. A step of PPO.
            let stats = trainer.step(&queries, &responses, &rewards, None)?;
            trainer.log_stats(&stats, Texts { query: &query, response: &response }, &rewards)?;
        }
    }
    trainer.save_pretrained(&Path::new(out).join("model"))?;
    Ok(())
}
