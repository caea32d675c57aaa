//! DeepSpeed-Chat's training loop: experience from prompts, then steps of actor and critic, with texts mixed in.
//!
//!     cargo run --release --example engine -- SFT_FOLDER REWARD_FOLDER PROMPTS.jsonl OUTPUT_FOLDER [TEXTS.jsonl]

use rlhf::compat::engine::{Batch, MiniDataset, RlhfEngine};
use rlhf::settings::{PpoConfig, Preset};
use std::path::Path;

#[expect(clippy::print_stdout, reason = "an example reports to the terminal")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [actor, critic, prompts, out, texts @ ..] = arguments.as_slice() else {
        return Err("usage: engine SFT_FOLDER REWARD_FOLDER PROMPTS.jsonl OUTPUT_FOLDER [TEXTS.jsonl]".into());
    };
    let mut config = PpoConfig::with_preset(Preset::DeepspeedChat, actor, critic, prompts, out);
    config.response_length = 32;
    // Of the 20 batches below: the learning rates fall over their steps.
    config.total_episodes = Some(20 * 16);
    config.generation.generation_batches = 2;
    config.ema.enable_ema = true;
    config.unsupervised.unsupervised_dataset_name = texts.first().map(Into::into);

    let mut engine = RlhfEngine::from_config(&config)?;
    let (batches, rows) = (config.generation.generation_batches, config.rows_per_pass());
    let (mut experience, mut unsupervised) = (MiniDataset::new(batches, rows), MiniDataset::new(batches, rows));
    for step in 0..20 {
        let Some((prompts, mask)) = engine.next_prompts() else { break };
        let rollout = engine.generate_experience(&prompts, &mask)?;
        println!("step {step}: reward {:.3}", rollout.rewards.mean(tch::Kind::Double).double_value(&[]));
        let texts = engine.next_texts(rollout.rows()).and_then(|texts| unsupervised.add(texts));
        let Some(batches) = experience.add(rollout) else { continue };
        for _ in 0..config.num_ppo_epochs {
            for (at, batch) in batches.iter().enumerate() {
                let (actor_loss, critic_loss) = engine.train_rlhf(batch)?;
                println!("  actor loss {actor_loss:.4}, critic loss {critic_loss:.4}");
                if let Some(texts) = &texts {
                    engine.train_unsupervised(&texts[at], config.unsupervised.unsup_coef)?;
                }
            }
        }
    }
    engine.save_model(Path::new(out))?;
    Ok(())
}
