//! The passes of DPO: gradients of an update, evaluations, and the reference model's log-probabilities.

use super::super::model_options;
use super::super::supervised::{Supervised, TaskState, UpdateRows};
use super::loss::{PairTerms, losses, sum};
use super::pairs::{PairRow, PassInputs};
use super::totals::{LOSS, MicroBatch, NUMBERS, Totals, sorts};
use super::{PreferenceTask, place_reference, reference_settings};
use crate::rl::unsupervised::{TextLimits, Unsupervised, learn_texts};
use crate::run::output_dir::REFERENCE;
use crate::run::session::stop_requested_on_any;
use crate::run::sinks::phase_bar::PhaseBar;
use crate::settings::DpoConfig;
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use rlhf_base::signals::exit_code;
use rlhf_base::{Error, Result};
use rlhf_lm::model::{CausalLm, DropoutRows, LmHead, LogprobOptions, TokenLogprobs};
use rlhf_lm::optim::micro_batch::micro_batches;
use std::path::Path;
use tch::{Device, Kind, Tensor};
use tch_ext::{on_device, to_host};

/// A pair of an update, with its micro-batch.
#[derive(Clone, Copy)]
struct Item<'r> {
    row: &'r PairRow,
    micro_batch: MicroBatch,
    /// Number of the micro-batch.
    at: usize,
}

/// Divides the pairs of an update into the micro-batches of the settings, whose means are those of TRL.
fn items<'r>(rows: &[&'r PairRow], most_rows: usize) -> Vec<Item<'r>> {
    let chunk_items = |(at, chunk): (usize, &[&'r PairRow])| {
        let tokens = [0, 1].map(|side| chunk.iter().map(|row| row.span(side).len()).sum());
        let micro_batch = MicroBatch { pairs: chunk.len(), tokens };
        chunk.iter().map(|&row| Item { row, micro_batch, at }).collect::<Vec<_>>()
    };
    rows.chunks(most_rows).enumerate().flat_map(chunk_items).collect()
}

/// Lengths of the completions, at least 1, `[n, 2]`.
fn lens(rows: &[&PairRow], device: Device) -> Tensor {
    let lens: Vec<f32> =
        rows.iter().flat_map(|row| [0, 1].map(|side| row.completion_len(side).max(1) as f32)).collect();
    on_device(&lens, device).view([-1, 2])
}

/// Log-probabilities of the pairs of a pass, and the other numbers that their loss needs.
struct PairLogprobs {
    policy: Tensor,
    sft: Tensor,
    weights: Option<Tensor>,
}

impl PairLogprobs {
    /// Computes them for the pairs `items`; `now` are the log-probabilities of their tokens.
    fn of(inputs: &PassInputs<'_>, items: &[Item<'_>], now: &TokenLogprobs) -> Self {
        let policy = inputs.logps(&now.logprobs);
        let factors: Vec<f32> =
            items.iter().map(|item| item.micro_batch.factor(item.micro_batch.tokens[0]) as f32).collect();
        let sft = -inputs.sums(&now.logprobs).select(1, 0) * on_device(&factors, policy.device());
        let squares = now.logits.as_ref().and_then(|numbers| numbers.log_sum_squares.as_ref());
        let weights = squares.map(|squares| inputs.pair_weights(&now.logprobs, squares));
        Self { policy, sft, weights }
    }

    fn losses(&self, config: &DpoConfig, reference: &Tensor, lens: &Tensor) -> Tensor {
        let Self { policy, sft, weights } = self;
        losses(&config.loss, &PairTerms { policy, reference, lens, sft: Some(sft), weights: weights.as_ref() })
    }
}

/// Returns the [`NUMBERS`] of the pairs of a pass, `[n, NUMBERS]`.
fn numbers(inputs: &PassInputs<'_>, now: &TokenLogprobs, reference: &Tensor, losses: &Tensor) -> Tensor {
    tch::no_grad(|| {
        let logprobs = now.logprobs.detach();
        let plain = inputs.sums(&logprobs).select(1, 0);
        let none = || Tensor::zeros_like(&logprobs);
        let (mean, top) = match &now.logits {
            Some(numbers) => (numbers.mean.shallow_clone(), numbers.is_top.shallow_clone()),
            None => (none(), none()),
        };
        let squares = now.logits.as_ref().and_then(|numbers| numbers.log_sum_squares.as_ref());
        let weights = squares.map_or_else(|| plain.ones_like(), |squares| inputs.pair_weights(&logprobs, squares));
        let policy = inputs.logps(&logprobs);
        let mean = inputs.sums(&mean);
        let entropy = inputs.sums(&now.entropy.as_ref().map_or_else(none, Tensor::detach));
        let entropy = entropy.sum_dim_intlist(1i64, false, Kind::Float);
        let column = |x: &Tensor, side: i64| x.select(1, side);
        Tensor::stack(
            &[
                column(&policy, 0),
                column(&policy, 1),
                column(reference, 0),
                column(reference, 1),
                plain,
                weights,
                column(&mean, 0),
                column(&mean, 1),
                entropy,
                column(&inputs.sums(&top), 0),
                losses.detach(),
            ],
            1,
        )
    })
}

/// Returns the options of a pass: the numbers that it computes besides the log-probabilities of the tokens.
fn options(config: &DpoConfig) -> LogprobOptions<'static> {
    let squares = config.loss.use_weighting;
    LogprobOptions { entropy: true, entropy_is_metric: true, logits: true, squares, as_backward: true, ..1.0.into() }
}

/// Log-probabilities of the completions of these pairs under `model`, `[n, 2]`, without a gradient.
pub(super) fn logps_under(model: &CausalLm, inputs: &PassInputs<'_>) -> Result<Tensor> {
    // Computed to the same bits as in the policy's training passes, so that the first margins are 0.
    let options = LogprobOptions { as_backward: true, ..1.0.into() };
    let now = tch::no_grad(|| model.logprobs_with(inputs.batch(), options))?;
    Ok(inputs.logps(&now.logprobs))
}

impl PreferenceTask<'_> {
    /// Log-probabilities under the reference model, `[n, 2]`.
    fn reference_logps(&self, rows: &[&PairRow], inputs: &PassInputs<'_>, device: Device) -> Result<Tensor> {
        if let Some(reference) = &self.reference {
            let _loaded = reference.loaded()?;
            return logps_under(reference, inputs);
        }
        let known: Vec<f32> =
            rows.iter().flat_map(|row| row.reference.expect("computed before training")).map(|x| x as f32).collect();
        Ok(on_device(&known, device).view([-1, 2]))
    }

    /// Whether a prompt that both sides have is computed once; not with dropout, which draws for each side.
    pub(super) fn shares_prompts(&self, model: &CausalLm, drops: bool) -> bool {
        model.config().causal && !model.config().has_length_dependent_rope() && !drops
    }

    /// The share of inputs that the adapter drops.
    fn dropout(&self) -> f64 {
        self.config.adapter_dropout()
    }

    /// Forward and backward passes over this rank's part of the pairs. With `slopes`, for losses that sort the pairs, the loss has their
    /// values and their derivatives by the log-probabilities.
    fn learn(
        &self,
        model: &CausalLm,
        batch: &UpdateRows<'_>,
        items: &[Item<'_>],
        slopes: Option<&Slopes>,
        sums: &mut Totals,
    ) -> Result<()> {
        let config = self.config;
        let device = model.device();
        let drops = self.dropout() > 0.0;
        let shares = self.shares_prompts(model, drops);
        let local = batch.world.own_part(items, |item| item.row.tokens());
        let mut first = local.start;
        let per_pair = items.len() as f64 / batch.loss_scale;
        let computed = |item: &Item<'_>| (item.row.computed(shares), 0);
        for part in micro_batches(&items[local], config.batches().rows_per_pass(), batch.max_tokens, computed) {
            let places = first..first + part.len();
            first = places.end;
            let rows: Vec<&PairRow> = part.iter().map(|item| item.row).collect();
            let inputs = PassInputs::new(&rows, config.loss.ld_alpha, device);
            let reference = self.reference_logps(&rows, &inputs, device)?;
            let lens = lens(&rows, device);
            let side_rows = places.clone().flat_map(|place| [2 * place as u64, 2 * place as u64 + 1]).collect();
            let dropout =
                DropoutRows { share: self.dropout(), seed: config.run.seed, update: batch.update, rows: side_rows };
            let mut pair_losses = None;
            let passed = inputs.batch().with_dropout(drops.then_some(&dropout));
            let now = model.joint_logprobs_backward(passed, options(config), |now| {
                let pairs = PairLogprobs::of(&inputs, part, now);
                let losses = match slopes {
                    Some(slopes) => slopes.losses(config, &pairs, places.clone()),
                    None => pairs.losses(config, &reference, &lens),
                };
                let loss = sum(&losses) / per_pair;
                pair_losses = Some(losses.detach());
                loss
            })?;
            // Without a token to predict there is no backward pass.
            let losses = pair_losses.unwrap_or_else(|| {
                let pairs = PairLogprobs::of(&inputs, part, &now);
                pairs.losses(config, &reference, &lens)
            });
            let micro_batches = part.iter().map(|item| item.micro_batch).collect();
            sums.push_pass(numbers(&inputs, &now, &reference, &losses), micro_batches, config.loss.beta);
        }
        Ok(())
    }

    /// Whether each micro-batch is a single pass, in which its pairs can be sorted.
    fn fits(&self, model: &CausalLm, batch: &UpdateRows<'_>, items: &[Item<'_>]) -> bool {
        let shares = self.shares_prompts(model, self.dropout() > 0.0);
        let tokens = |chunk: &[Item<'_>]| chunk.iter().map(|item| item.row.computed(shares)).sum::<usize>();
        batch.world.size() == 1 && items.chunk_by(|a, b| a.at == b.at).all(|chunk| tokens(chunk) <= batch.max_tokens)
    }

    /// The slopes of losses that sort the pairs of a micro-batch, computed from passes over all pairs without gradients.
    fn slopes(&self, model: &CausalLm, batch: &UpdateRows<'_>, items: &[Item<'_>]) -> Result<Slopes> {
        let device = model.device();
        let shares = self.shares_prompts(model, false);
        let local = batch.world.own_part(items, |item| item.row.tokens());
        let computed = |item: &Item<'_>| (item.row.computed(shares), 0);
        let parts = micro_batches(&items[local], self.config.batches().rows_per_pass(), batch.max_tokens, computed);
        let logps = parts.into_iter().map(|part| {
            let rows: Vec<&PairRow> = part.iter().map(|item| item.row).collect();
            let inputs = PassInputs::new(&rows, self.config.loss.ld_alpha, device);
            let policy = logps_under(model, &inputs)?;
            let reference = self.reference_logps(&rows, &inputs, device)?;
            Ok(to_host(&Tensor::cat(&[policy, reference], 1).view([-1])))
        });
        let local: Vec<f64> = batch.world.agree(logps.collect::<Result<Vec<_>>>())?.concat();
        let all: Vec<f32> = batch.world.gather_numbers(&local)?.concat().into_iter().map(|x| x as f32).collect();
        let all = on_device(&all, device).view([-1, 4]);
        let (policy, reference) = (all.narrow(1, 0, 2), all.narrow(1, 2, 2));
        let mut slopes = Vec::new();
        let mut values = Vec::new();
        let mut start = 0;
        for chunk in items.chunk_by(|a, b| a.at == b.at) {
            let part = |x: &Tensor| x.narrow(0, start, chunk.len() as i64);
            let rows: Vec<&PairRow> = chunk.iter().map(|item| item.row).collect();
            let leaf = part(&policy).copy().set_requires_grad(true);
            let (reference, lens) = (part(&reference), lens(&rows, device));
            let terms = PairTerms { policy: &leaf, reference: &reference, lens: &lens, sft: None, weights: None };
            let losses = losses(&self.config.loss, &terms);
            sum(&losses).backward();
            slopes.push(leaf.grad());
            values.push(losses.detach());
            start += chunk.len() as i64;
        }
        Ok(Slopes { slopes: Tensor::cat(&slopes, 0), values: Tensor::cat(&values, 0) })
    }

    /// The numbers of pairs, one after another, by passes over this rank's part of them.
    fn measured(&self, model: &CausalLm, rows: &[PairRow], world: &World) -> Result<Vec<f64>> {
        let device = model.device();
        let local = world.share_by(rows, PairRow::tokens);
        let pair_numbers = local.chunks(self.config.per_device_eval_batch_size).map(|batch| {
            let rows: Vec<&PairRow> = batch.iter().collect();
            let inputs = PassInputs::new(&rows, self.config.loss.ld_alpha, device);
            let now = tch::no_grad(|| model.logprobs_with(inputs.batch(), options(self.config)))?;
            let reference = self.reference_logps(&rows, &inputs, device)?;
            let none = Tensor::zeros([rows.len() as i64], (Kind::Float, device));
            Ok(to_host(&numbers(&inputs, &now, &reference, &none).view([-1])))
        });
        Ok(world.agree(pair_numbers.collect::<Result<Vec<_>>>())?.concat())
    }

    /// Computes the log-probabilities of all pairs under the reference model or, where there is none, under `policy` as it starts.
    ///
    /// # Errors
    /// If the model refuses a row, or the user stops the run, on any rank.
    pub(super) fn precompute(&mut self, policy: &CausalLm, world: &World, bar: &PhaseBar) -> Result<()> {
        let config = self.config;
        let reference = self.reference.take();
        let model = reference.as_ref().unwrap_or(policy);
        let train_batch = config.per_device_train_batch_size.unwrap_or(8);
        let eval_batch = config.per_device_eval_batch_size;
        let _loaded = model.loaded()?;
        for (rows, usual) in [(&mut self.train.rows, train_batch), (&mut self.eval, eval_batch)] {
            if rows.is_empty() {
                continue;
            }
            let local = world.share_by(rows, PairRow::tokens);
            let batches: Vec<&[PairRow]> = local.chunks(config.precompute_ref_batch_size.unwrap_or(usual)).collect();
            // All ranks ask together whether to stop, including a rank whose part has fewer batches.
            let most_batches = world.max_number(batches.len() as f64)? as usize;
            let mut logps_by_batch = Vec::with_capacity(local.len());
            bar.start("reference log-probabilities", local.len());
            for at in 0..most_batches {
                if stop_requested_on_any(world)? {
                    let message = "stopped before the first update: there is nothing to save".into();
                    return Err(Error::Stopped { message, code: exit_code() });
                }
                let logps = batches.get(at).map_or(Ok(Vec::new()), |batch| {
                    let rows: Vec<&PairRow> = batch.iter().collect();
                    let inputs = PassInputs::new(&rows, config.loss.ld_alpha, model.device());
                    Ok(to_host(&logps_under(model, &inputs)?.view([-1])))
                });
                logps_by_batch.push(world.agree(logps)?);
                bar.advance(batches.get(at).map_or(0, |batch| batch.len()));
            }
            let all = world.gather_numbers(&logps_by_batch.concat())?.concat();
            for (row, pair) in rows.iter_mut().zip(all.chunks(2)) {
                row.reference = Some([pair[0], pair[1]]);
            }
        }
        bar.finish();
        Ok(())
    }
}

/// Derivatives of a loss by the log-probabilities of both sides, `[n, 2]`, and its values, `[n]`.
struct Slopes {
    slopes: Tensor,
    values: Tensor,
}

impl Slopes {
    /// Losses of the pairs at `places`, with these values and derivatives, plus the losses that need no other pair.
    fn losses(&self, config: &DpoConfig, pairs: &PairLogprobs, places: std::ops::Range<usize>) -> Tensor {
        let part = |x: &Tensor| x.narrow(0, places.start as i64, places.len() as i64);
        let moved = (&pairs.policy - pairs.policy.detach()) * part(&self.slopes);
        let sorted = part(&self.values) + moved.sum_dim_intlist(1i64, false, Kind::Float);
        let sft_losses = config.loss.weighted().filter(|(loss, _)| *loss == crate::settings::DpoLoss::Sft);
        sft_losses.fold(sorted, |all, (_, weight)| all + &pairs.sft * weight)
    }
}

impl Supervised for PreferenceTask<'_> {
    type Head = LmHead;
    type Sums = Totals;

    fn backward(&mut self, model: &CausalLm, batch: &UpdateRows<'_>, sums: &mut Totals) -> Result<()> {
        let config = self.config;
        let rows: Vec<&PairRow> = batch.rows.iter().map(|&row| &self.train.rows[row]).collect();
        let most_rows = config.batches().rows_per_pass();
        let mut items = items(&rows, most_rows);
        let slopes = if !sorts(config) {
            // Rows of similar length share a pass: less padding in attention, the same sums.
            items.sort_by_key(|item| item.row.tokens());
            None
        } else if self.fits(model, batch, &items) {
            None
        } else {
            Some(self.slopes(model, batch, &items)?)
        };
        let learned = self.learn(model, batch, &items, slopes.as_ref(), sums);
        drop(items);
        batch.world.agree(learned)?;
        let Some(texts) = &mut self.texts else { return Ok(()) };
        let limits = TextLimits { most_rows, most_tokens: batch.max_tokens, world: batch.world };
        let coef = texts.coef() * batch.loss_scale;
        let loss = learn_texts(model, &texts.take(batch.rows.len()), coef, &limits)?;
        sums.add_texts(loss, batch.world.is_main());
        Ok(())
    }

    fn num_tokens(&self, rows: &[usize]) -> Option<usize> {
        Some(rows.iter().map(|&row| self.train.rows[row].tokens()).sum())
    }

    fn evaluate(&self, model: &CausalLm, world: &World, metrics: &mut Metrics) -> Result<()> {
        if self.eval.is_empty() {
            return Ok(());
        }
        let local = self.measured(model, &self.eval, world)?;
        let all = world.gather_numbers(&local)?.concat();
        let mut totals = Totals::default();
        let config = self.config;
        let rows: Vec<&PairRow> = self.eval.iter().collect();
        let items = items(&rows, config.per_device_eval_batch_size);
        let batches = items.chunk_by(|a, b| a.at == b.at).zip(all.chunks(NUMBERS * config.per_device_eval_batch_size));
        for (batch, numbers) in batches {
            let table: Vec<f32> = numbers.iter().map(|x| *x as f32).collect();
            let table = Tensor::from_slice(&table).view([-1, NUMBERS as i64]);
            let factors: Vec<f32> =
                batch.iter().map(|item| item.micro_batch.factor(item.micro_batch.tokens[0]) as f32).collect();
            let rows: Vec<&PairRow> = batch.iter().map(|item| item.row).collect();
            let pairs = PairLogprobs {
                policy: table.narrow(1, 0, 2),
                sft: -table.select(1, 4) * Tensor::from_slice(&factors),
                weights: config.loss.use_weighting.then(|| table.select(1, 5)),
            };
            let losses = to_host(&pairs.losses(config, &table.narrow(1, 2, 2), &lens(&rows, Device::Cpu)));
            for ((item, numbers), loss) in batch.iter().zip(numbers.chunks(NUMBERS)).zip(losses) {
                let mut numbers = numbers.to_vec();
                numbers[LOSS] = loss;
                totals.add(&numbers, item.micro_batch, config.loss.beta);
            }
        }
        totals.push_as(metrics, "eval_");
        Ok(())
    }

    fn has_eval_rows(&self) -> bool {
        !self.eval.is_empty()
    }

    fn after_step(&mut self, model: &CausalLm, steps: usize) -> Result<()> {
        match &self.reference {
            Some(reference) if self.config.sync.is_due(steps) => self.config.sync.mix(model, reference),
            _ => Ok(()),
        }
    }

    fn state(&self) -> TaskState {
        TaskState { unsupervised: self.texts.as_ref().map(Unsupervised::state), ..TaskState::default() }
    }

    fn saved_beside(&self) -> Option<(&'static str, &CausalLm)> {
        self.reference.as_ref().filter(|_| self.config.sync.sync_ref_model).map(|reference| (REFERENCE, reference))
    }

    fn load(&mut self, dir: &Path, state: &TaskState, world: &World, has_changed: bool) -> Result<()> {
        if let Some(texts) = &mut self.texts {
            let missing = || Error::invalid(dir, "expected the state of `unsupervised`, found none");
            let state = state.unsupervised.as_ref().ok_or_else(missing)?;
            texts.load_state(state, has_changed).map_err(|e| Error::invalid(dir, e.to_string()))?;
        }
        if self.config.sync.sync_ref_model && self.reference.is_some() {
            // The old reference model is dropped first: there is memory for one.
            self.reference = None;
            let frozen = model_options(&self.config.run)?;
            let mut reference = reference_settings(self.config).load_saved(&dir.join(REFERENCE), frozen)?;
            place_reference(&mut reference, self.config, world)?;
            self.reference = Some(reference);
        }
        Ok(())
    }
}
