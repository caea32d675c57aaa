//! Evaluation, samples and the scores of responses.

use super::{Answers, Batch, PpoTrainer, SAMPLE_ROWS, asked};
use crate::data::{Episode, Prompt};
use crate::reward::{ComponentScores, ScoreUse, Scored, Scores, TrainerState};
use crate::rl::checks::{self, Checks};
use crate::rl::rollout::{RolloutSettings, experience};
use crate::run::event::{Conversation, Evaluation, RolloutTurns, Sample};
use crate::settings::EVAL_SCORES;
use rlhf_base::metrics::Metrics;
use rlhf_base::rng::Purpose;
use rlhf_base::{Error, Result};
use rlhf_lm::generate::{GenerationConfig, Response, Sampling, generate_on};
use serde_json::Value;
use std::time::Instant;
use tch::{Kind, Tensor};

/// The scores of an update's responses.
pub(super) struct BatchScores {
    /// The scores that are trained on.
    pub(super) trained: Scores,
    pub(super) reported: ReportedScores,
    /// The responses to show, if this update shows any.
    pub(super) shown: Vec<Sample>,
}

/// The part of the scores that is reported.
pub(super) struct ReportedScores {
    /// Total score of each response without running moments, `[B]`.
    pub(super) raw: Tensor,
    /// Weighted sum of the rewards for each whole response, before scaling and penalties, `[B]`.
    pub(super) summed: Vec<f64>,
    pub(super) scored: Scored,
    /// Number of tokens of each response that should end it.
    pub(super) ends: Vec<usize>,
}

impl PpoTrainer {
    /// Evaluates the policy on the held-out prompts, sampled as in training; changes nothing.
    ///
    /// # Errors
    /// If there are no held-out prompts; if a reward fails.
    pub fn evaluate(&mut self) -> Result<Evaluation> {
        if self.data.eval_prompts.is_empty() {
            let message = "evaluate: expected prompts that are held out, found none; a dataset's split, eval_split_size or \
                           PpoParts::eval_prompts gives some";
            return Err(Error::Usage(message.into()));
        }
        let began = Instant::now();
        let asked = self.data.eval_prompts.clone();
        let asked: Vec<&Prompt> = asked.iter().collect();
        let sampling = self.run.generation.sampling;
        // The same draws each time, so that a difference between two evaluations is one of the policy.
        let answers = self.generate(&asked, sampling, Purpose::Evaluation, 0)?;
        let asked = answers.asked(&asked);
        let prompts: Vec<Vec<i64>> = asked.iter().map(|prompt| prompt.tokens.clone()).collect();
        let responses = &answers.responses;
        let (scores, components) = self.whole_scores(&asked, &answers)?;
        let samples = self.sample_rows(&asked, (responses, &answers.episodes), &scores, &components)?;
        // Policy and reference use the same kind of pass: decoding rounds differently in low precision and on a GPU.
        let recompute = self.reference.is_some() && !self.learner.policy.is_exact();
        let settings = RolloutSettings { group_size: 1, ..self.rollout_settings(recompute) };
        let models = self.rollout_models();
        let e = experience(models, &prompts, responses, scores, &settings)?;
        let rows = prompts.len() as f64;
        let per_row = |x: &Tensor| x.sum(Kind::Double).double_value(&[]) / rows;
        let mut m = Metrics::default();
        m.push("eval/score", per_row(&e.scores));
        if prompts.len() > 1 {
            let spread = e.scores.to_kind(Kind::Double).std(true).double_value(&[]);
            m.push("eval/score_stderr", spread / rows.sqrt());
        }
        for component in &components {
            m.push(format!("{EVAL_SCORES}{}", component.name), component.mean());
        }
        if let Some(reference) = &e.ref_logprobs {
            m.push("eval/kl", per_row(&(&e.logprobs - reference)));
        }
        m.push("eval/response_length", e.sampled.iter().sum::<i64>() as f64 / rows);
        m.push("time/eval", began.elapsed().as_secs_f64());
        Ok(Evaluation { metrics: m, samples })
    }

    /// Generates responses to a few prompts and compares the passes of a run on them; changes nothing.
    ///
    /// # Errors
    /// The errors of [`PpoTrainer::train`].
    pub fn check(&mut self) -> Result<Checks> {
        let sampling = Sampling::at_temperature(self.run.rollout.settings.temperature);
        let response_length = self.run.generation.max_new_tokens.min(checks::TOKENS);
        let generation = GenerationConfig {
            max_new_tokens: response_length,
            min_new_tokens: 0,
            repetition_penalty: 1.0,
            keep_sets: false,
            ..self.generation(sampling, Purpose::Samples, 0)
        };
        let rows = self.data.prompts.len().min(self.plan.epoch.micro_batch_size).min(checks::ROWS);
        let prompts: Vec<Vec<i64>> = self.data.prompts[..rows].iter().map(|prompt| prompt.tokens.clone()).collect();
        let gathered = self.learner.gathered_policy(self.run.config.dist.ds3_gather_for_generation)?;
        let responses = generate_on(&self.learner.world, &self.learner.policy, &prompts, &generation)?;
        drop(gathered);
        self.learner.set_update(self.run.learner.update.clone());
        let mut settings = self.run.checks(&self.learner.policy);
        settings.rollout.response_length = response_length;
        Checks::of(&mut self.learner, self.reference.as_ref(), &prompts, &responses, &settings)
    }

    /// Scores the responses of an update by every reward, and scales the scores and subtracts penalties by the settings.
    ///
    /// Groups that teach nothing are replaced in `batch`, if the settings say so.
    pub(super) fn score_batch(&mut self, batch: &mut Batch) -> Result<BatchScores> {
        let mut scored = match &batch.recorded {
            Some(recorded) => recorded.scored.clone(),
            None => self.score_rows(&batch.rows, &batch.responses, &batch.episodes)?,
        };
        if self.run.config.groups.filters() && batch.recorded.is_none() {
            scored = self.replace_groups(batch, scored)?;
        }
        let summed = scored.responses.clone();
        let device = self.learner.policy.device();
        let raw = self.course.scores.raw(&scored, &batch.responses, device);
        let trained = self.course.scores.trained(&mut scored, &batch.responses, true, device);
        let ends = self.course.scores.num_ends(&batch.responses);
        let log = &self.run.config.rollout_log;
        let shown = if log.print_answers && batch.update.is_multiple_of(log.print_answers_interval) {
            let shown: Vec<&Prompt> = batch.asked(&self.data.prompts).into_iter().take(SAMPLE_ROWS).collect();
            let answers = (&batch.responses[..], &batch.episodes[..]);
            let samples = self.sample_rows(&shown, answers, &raw, &scored.components)?;
            self.with_tokens(samples, &batch.responses)?
        } else {
            Vec::new()
        };
        Ok(BatchScores { trained, reported: ReportedScores { raw, summed, scored, ends }, shown })
    }

    /// Scores responses to the prompts `rows`, to train on them.
    pub(super) fn score_rows(
        &mut self,
        rows: &[usize],
        responses: &[Response],
        episodes: &[Episode],
    ) -> Result<Scored> {
        self.rewards.set_trainer_state(&trainer_state(self));
        let prompts = asked(rows.iter().map(|&row| &self.data.prompts[row]), episodes);
        self.rewards.score_episodes(&self.tokenizer, &prompts, responses, episodes, ScoreUse::Training)
    }

    /// Greedy responses to the sample prompts, with their scores.
    pub(super) fn samples(&mut self, update: usize) -> Result<Vec<Sample>> {
        let asked = self.data.sample_prompts.clone();
        let asked: Vec<&Prompt> = asked.iter().collect();
        let answers = self.generate(&asked, Sampling::Greedy, Purpose::Samples, update)?;
        let asked = answers.asked(&asked);
        let (scores, components) = self.whole_scores(&asked, &answers)?;
        let samples = self.sample_rows(&asked, (&answers.responses, &answers.episodes), &scores, &components)?;
        self.with_tokens(samples, &answers.responses)
    }

    /// Adds tokens and log-probabilities to `samples`, which are the first of the `responses`.
    fn with_tokens(&self, mut samples: Vec<Sample>, responses: &[Response]) -> Result<Vec<Sample>> {
        for (sample, response) in samples.iter_mut().zip(responses) {
            sample.tokens = self.tokenizer.decode_each(&response.tokens)?;
            sample.logprobs.clone_from(&response.logprobs);
        }
        Ok(samples)
    }

    /// Rows of a table of responses to `prompts`, with the episodes of those that have one.
    pub(super) fn sample_rows(
        &self,
        prompts: &[&Prompt],
        (responses, episodes): (&[Response], &[Episode]),
        scores: &Tensor,
        components: &[ComponentScores],
    ) -> Result<Vec<Sample>> {
        let scores = Vec::<f64>::try_from(scores.to_kind(Kind::Double))?;
        prompts
            .iter()
            .zip(responses)
            .zip(scores)
            .enumerate()
            .map(|(row, ((prompt, response), score))| {
                let row_value = |(name, values): &(String, Vec<Value>)| Some((name.clone(), values.get(row)?.clone()));
                let extra = components.iter().flat_map(|c| c.columns.iter().filter_map(row_value)).collect();
                let components = components.iter().map(|c| (c.name.clone(), c.scores[row])).collect();
                Ok(Sample {
                    prompt: prompt.text.clone(),
                    response: self.tokenizer.decode(&response.tokens)?,
                    score,
                    components,
                    extra,
                    finish_reason: Some(response.finish),
                    num_tokens: Some(response.num_sampled()),
                    tokens: Vec::new(),
                    logprobs: Vec::new(),
                    turns: episodes.get(row).map(|episode| RolloutTurns::of(episode, response)),
                    conversation: Conversation::of(&prompt.row, &prompt.text),
                })
            })
            .collect()
    }

    /// The whole score of each response, comparable over a run, and the scores of each reward; running moments are not updated.
    pub(super) fn whole_scores(
        &mut self,
        prompts: &[&Prompt],
        Answers { responses, episodes, .. }: &Answers,
    ) -> Result<(Tensor, Vec<ComponentScores>)> {
        self.rewards.set_trainer_state(&trainer_state(self));
        let scored = self.rewards.score_episodes(&self.tokenizer, prompts, responses, episodes, ScoreUse::Report)?;
        let raw = self.course.scores.raw(&scored, responses, self.learner.policy.device());
        Ok((raw, scored.components))
    }
}

/// The state of the run that Python functions get.
fn trainer_state(trainer: &PpoTrainer) -> TrainerState {
    let plan = &trainer.plan;
    let done = trainer.course.progress.done;
    let epochs = |updates: usize| (updates * plan.prompts) as f64 / trainer.data.prompts.len().max(1) as f64;
    TrainerState {
        global_step: done,
        max_steps: plan.num_total_batches,
        epoch: epochs(done),
        num_train_epochs: epochs(plan.num_total_batches),
        num_input_tokens_seen: trainer.monitor.num_tokens,
        train_batch_size: plan.batch_size,
        is_world_process_zero: trainer.learner.world.is_main(),
    }
}
