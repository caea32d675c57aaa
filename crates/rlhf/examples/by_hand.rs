//! PPO's loop by hand, from the pieces that `PpoTrainer` is made of: generate, score, shape rewards, optimize.
//!
//!     cargo run --release --example by_hand -- SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER

use rlhf::data::{Cursor, Dataset, Prompt};
use rlhf::generate::generate;
use rlhf::model::{CausalLm, ModelOptions, SequenceClassifier};
use rlhf::reward::{FnReward, Rewards, ScoreUse};
use rlhf::rl::learner::Learner;
use rlhf::rl::rollout::experience;
use rlhf::rl::shaping::targets;
use rlhf::settings::PpoConfig;
use rlhf::tokenizer::Tokenizer;
use std::path::Path;

#[expect(clippy::print_stdout, reason = "an example reports to the terminal")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [sft, prompts, out] = arguments.as_slice() else {
        return Err("usage: by_hand SFT_FOLDER PROMPTS.jsonl OUTPUT_FOLDER".into());
    };
    let mut config = PpoConfig::without_reward(sft, prompts, out);
    config.per_device_train_batch_size = Some(16);
    config.learning_rate = 1e-4;
    config.response_length = 32;

    let (dir, options) = (Path::new(sft), ModelOptions::default());
    let tokenizer = Tokenizer::from_pretrained(dir)?;
    let reference = CausalLm::from_pretrained(dir, options)?;
    // The value model starts from the language model, with a fresh head.
    let value = SequenceClassifier::from_pretrained(dir, Some(config.run.seed), options)?;
    let mut learner = Learner::new(CausalLm::from_pretrained(dir, options)?, value, config.learner());
    // Short responses are good responses: a tenth off for every word.
    let mut rewards = Rewards::new().with(
        "brevity",
        FnReward::new(|batch| {
            let words = batch.iter().map(|input| input.response.split_whitespace().count());
            Ok(words.map(|words| -(words as f64) / 10.0).collect())
        }),
    );

    let prompts = Dataset::read(Path::new(prompts), "train")?.prompts(&tokenizer, reference.config().vocab_size, 64)?;
    let (plan, stop) = (config.plan(prompts.len())?, config.stop_tokens(&tokenizer)?);
    let (rollout, shaping) = (config.rollout(&learner.policy), config.shaping());
    let mut cursor = Cursor::new(config.run.seed, prompts.len());
    for update in 0..plan.num_total_batches {
        let asked: Vec<&Prompt> = cursor.take(plan.batch_size).into_iter().map(|row| &prompts[row]).collect();
        let tokens: Vec<Vec<i64>> = asked.iter().map(|prompt| prompt.tokens.clone()).collect();
        let responses = generate(&learner.policy, &tokens, &config.generation(&stop, update))?;

        let scored = rewards.score_responses(&tokenizer, &asked, &responses, ScoreUse::Training)?;
        println!("update {update}: mean reward {:.3}", scored.responses.iter().sum::<f64>() / asked.len() as f64);

        let models = learner.rollout_models(&reference);
        let scores = scored.to_scores(learner.policy.device());
        let experience = experience(models, &tokens, &responses, scores, &rollout)?;
        let targets = targets(&experience, config.kl.kl_coef, &shaping);

        let orders = config.mini_batch_orders(update, plan.batch_size);
        let rates = config.learning_rates(update, plan.num_total_batches);
        learner.optimize(&experience, &targets, &orders, rates, &plan.epoch)?;
    }
    learner.policy.save_pretrained(Path::new(out), tokenizer.eos_ids(), tokenizer.pad(), usize::MAX)?;
    tokenizer.save_pretrained(Path::new(out))?;
    Ok(())
}
