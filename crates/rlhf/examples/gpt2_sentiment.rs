//! GPT-2 learns to continue positively from the first tokens of a review; a DistilBERT is the reward. The first example of
//! TRL's documentation, as a program of the library; `examples/gpt2-sentiment` has the data, and the same from the command
//! line.
//!
//!     cargo run --release --example gpt2_sentiment -- SFT_FOLDER CLASSIFIER_FOLDER PROMPTS.jsonl OUTPUT_FOLDER

use rlhf::generate::{GenerationConfig, Sampling, generate};
use rlhf::model::ModelOptions;
use rlhf::reward::{RewardModel, Rewards};
use rlhf::settings::{PpoConfig, StopToken};
use rlhf::tokenizer::Tokenizer;
use rlhf::train::ppo::PpoTrainer;
use std::path::Path;

/// Prints continuations by the policy.
#[expect(clippy::print_stdout, reason = "an example reports to the terminal")]
fn show(trainer: &PpoTrainer) -> rlhf::Result<()> {
    let starts = ["This comedy", "Leo Sato's", "The story of a"];
    let prompts: Vec<Vec<i64>> =
        starts.iter().map(|text| trainer.tokenizer.encode(text)).collect::<rlhf::Result<_>>()?;
    let config = trainer.config();
    let sampling = Sampling::at_temperature(config.temperature);
    let responses =
        generate(&trainer.learner.policy, &prompts, &GenerationConfig::new(sampling, config.response_length))?;
    for (start, response) in starts.iter().zip(&responses) {
        println!("    {start}{}", trainer.tokenizer.decode(&response.tokens)?);
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "an example reports to the terminal")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [sft, classifier, prompts, out] = arguments.as_slice() else {
        return Err("usage: gpt2_sentiment SFT_FOLDER CLASSIFIER_FOLDER PROMPTS.jsonl OUTPUT_FOLDER".into());
    };
    let mut config = PpoConfig::without_reward(sft, prompts, out);
    config.per_device_train_batch_size = Some(64);
    config.total_episodes = Some(2048);
    config.response_length = 24;
    config.stop_token = Some(StopToken::Eos);
    config.learning_rate = 1e-4;
    config.kl.kl_coef = 0.3;
    config.optimizer.max_grad_norm = Some(1.0);

    // The classifier has a tokenizer of its own: it reads the text of prompt and response. Its logit for POSITIVE is the
    // score.
    let tokenizer = Tokenizer::from_pretrained(sft.as_ref())?;
    let dir = Path::new(classifier);
    let sentiment = RewardModel::from_pretrained(dir, Some("POSITIVE"), None, &tokenizer, 64, ModelOptions::default())?;
    let mut trainer = PpoTrainer::from_config_with(&config, Rewards::new().with("sentiment", sentiment))?;
    show(&trainer)?;
    for update in 0..trainer.plan.num_total_batches {
        // Takes prompts, generates responses, scores them, and learns from the scores.
        let stats = trainer.update()?;
        let [score, kl] = ["objective/scores", "objective/kl"].map(|name| stats.get(name).unwrap_or(f64::NAN));
        println!("update {update}: mean score {score:.3}, KL {kl:.3}");
    }
    show(&trainer)?;
    trainer.save_model(out.as_ref())?;
    Ok(())
}
