//! PPO's loop by hand, from the pieces that `PpoTrainer` is made of: generate, score, shape rewards, optimise.
//!
//!     cargo run --release --example by_hand -- SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER

use rlhf::config::PpoConfig;
use rlhf::data::{Cursor, Dataset};
use rlhf::generate::{GenerationConfig, Sampling, generate};
use rlhf::model::{CausalLm, ModelOptions, SequenceClassifier};
use rlhf::optim::LearningRates;
use rlhf::rng::{Purpose, Stream};
use rlhf::rollout::{Judges, experience, targets};
use rlhf::tokenizer::Tokenizer;
use rlhf::train::ppo::Learner;
use std::path::Path;
use tch::Tensor;

/// Short answers are good answers: a tenth off for every word.
fn reward(_prompt: &str, response: &str) -> f32 {
    -(response.split_whitespace().count() as f32) / 10.0
}

#[allow(clippy::print_stdout)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [sft, prompts, out] = arguments.as_slice() else {
        return Err("usage: by_hand SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER".into());
    };
    let mut config = PpoConfig::without_reward(sft, prompts, out);
    config.per_device_train_batch_size = 16;
    config.learning_rate = 1e-4;
    config.response_length = 32;

    let (dir, options) = (Path::new(sft), ModelOptions::default());
    let tokenizer = Tokenizer::from_pretrained(dir)?;
    let reference = CausalLm::from_pretrained(dir, options)?;
    // The value model starts from the language model, with a fresh head.
    let value = SequenceClassifier::from_pretrained(dir, Some(config.run.seed), options)?;
    let mut learner = Learner::new(CausalLm::from_pretrained(dir, options)?, value, &config);

    let prompts = Dataset::read(Path::new(prompts), "train")?.prompts(&tokenizer, reference.config().vocab_size, 64)?;
    let plan = config.plan(prompts.len())?;
    let mut cursor = Cursor::new(config.run.seed, prompts.len());
    for update in 0..plan.num_total_batches as u64 {
        let rows = cursor.take(plan.batch_size);
        let batch: Vec<Vec<i64>> = rows.iter().map(|&row| prompts[row].tokens.clone()).collect();
        let generation = GenerationConfig {
            stop_token_ids: tokenizer.eos().into_iter().collect(),
            seed: config.run.seed,
            step: update,
            ..GenerationConfig::new(Sampling::at_temperature(config.temperature), config.response_length)
        };
        let responses = generate(&learner.policy, &batch, &generation)?;
        let mut scores = Vec::new();
        for (&row, response) in rows.iter().zip(&responses) {
            scores.push(reward(&prompts[row].text, &tokenizer.decode(&response.tokens)?));
        }
        println!("update {update}: mean reward {:.3}", scores.iter().sum::<f32>() / scores.len() as f32);

        let judges = Judges { policy: &learner.policy, reference: &reference, value: &learner.value };
        let experience = experience(judges, &batch, &responses, Tensor::from_slice(&scores), false, &config)?;
        let targets = targets(&experience, config.kl_coef, &config);
        let orders: Vec<Vec<usize>> = (0..config.num_ppo_epochs as u64)
            .map(|epoch| Stream::new(config.run.seed, Purpose::MiniBatches, update, epoch).permutation(plan.batch_size))
            .collect();
        let rates = LearningRates::at(&config, update as usize, plan.num_total_batches);
        learner.optimise(&experience, &targets, &orders, rates, &plan, &config)?;
    }
    learner.policy.save_pretrained(Path::new(out), tokenizer.eos_ids(), tokenizer.pad(), usize::MAX)?;
    tokenizer.save_pretrained(Path::new(out))?;
    Ok(())
}
