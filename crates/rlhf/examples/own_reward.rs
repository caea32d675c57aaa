//! PPO with a custom reward: any Rust closure that sees prompts, responses, tokens and rows of the dataset.
//!
//!     cargo run --release --example own_reward -- SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER

use rlhf::reward::{FnReward, Rewards};
use rlhf::run::Console;
use rlhf::settings::PpoConfig;
use rlhf::train::ppo::PpoTrainer;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [sft, prompts, out] = arguments.as_slice() else {
        return Err("usage: own_reward SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER".into());
    };
    // Short responses score higher: a tenth off for every word.
    let brevity = FnReward::new(|batch| {
        let words = batch.iter().map(|input| input.response.split_whitespace().count());
        Ok(words.map(|words| -(words as f64) / 10.0).collect())
    });
    let mut config = PpoConfig::without_reward(sft, prompts, out);
    config.per_device_train_batch_size = Some(16);
    config.learning_rate = 1e-4;
    config.response_length = 32;
    let mut trainer = PpoTrainer::from_config_with(&config, Rewards::new().with("brevity", brevity))?;
    trainer.console = Console::Person;
    trainer.train()?;
    Ok(())
}
