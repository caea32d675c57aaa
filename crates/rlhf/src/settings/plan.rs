//! Sizes of a run that follow from its settings: batches, updates, optimizer steps.

use super::ppo::{GenerationBatchesConfig, PpoConfig};
use super::presets::Preset;
use crate::rl::groups::check_whole;
use crate::rl::learner::EpochPlan;
use crate::run::sizes::rows_of_all_ranks;
use rlhf_base::Result;
use rlhf_base::dist::num_ranks;
use rlhf_base::name_of;
use rlhf_base::schema::{self, above_zero, at_least_one, exclude, expect, no_effect, refuse, usage};

/// Maximum number of responses, rows or updates of a run.
pub(super) const MOST_EPISODES: usize = schema::MOST_EPISODES as usize;

/// Maximum number of rows of an update: far above use, and small enough that a typing error does not end in a crash.
pub(super) const MOST_ROWS: usize = schema::MOST_ROWS as usize;

/// Default number of responses of an update of TRL's trainer with `step()`.
pub(crate) const LEGACY_BATCH: usize = 128;

/// Sizes of a PPO run, each checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PpoPlan {
    /// Number of responses per update, over all ranks: `train_batch_size`, or
    /// `per_device_train_batch_size * gradient_accumulation_steps` times the ranks, with the preset `trl-ppov2` times
    /// `num_mini_batches`; or `per_device_generation_batch_size * generation_batches` times the ranks.
    pub batch_size: usize,
    /// Number of prompts per update, each with `num_generations` responses.
    pub prompts: usize,
    /// Division of an epoch into optimizer steps.
    pub epoch: EpochPlan,
    /// Number of responses to train on, as set; the run trains on `num_total_batches * batch_size`, which may be a few more.
    pub total_episodes: usize,
    /// Number of updates: `total_episodes / batch_size`, rounded up.
    pub num_total_batches: usize,
    /// Number of updates between two sample tables; `None` for no tables.
    pub sample_every: Option<usize>,
}

impl PpoPlan {
    /// Number of optimizer steps of an epoch over the responses of an update.
    pub fn steps_per_epoch(&self) -> usize {
        self.epoch.steps(self.batch_size)
    }
}

/// Sizes of an SFT or reward model run, each checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainPlan {
    /// Number of rows per optimizer step, over all ranks: `train_batch_size`, or `per_device_train_batch_size *
    /// gradient_accumulation_steps` times the ranks.
    pub batch_size: usize,
    /// Number of optimizer steps: `max_steps`, else `num_train_epochs * rows / batch_size`, rounded up.
    pub num_updates: usize,
}

/// Default of `per_device_train_batch_size` without `train_batch_size`.
const PER_DEVICE: usize = 8;

/// Settings that size a batch: an optimizer step, or an update of PPO.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSettings {
    /// `train_batch_size`.
    pub(crate) all: Option<usize>,
    /// `per_device_train_batch_size`.
    pub(crate) per_device: Option<usize>,
    /// `gradient_accumulation_steps`.
    pub(crate) accumulated: usize,
    /// Number of ranks.
    pub(crate) ranks: usize,
}

impl BatchSettings {
    /// Returns the number of rows of a batch, over all ranks.
    pub(super) fn rows(&self) -> Result<usize> {
        let per_device = self.per_device.unwrap_or(PER_DEVICE);
        let accumulated = self.accumulated;
        at_least_one("per_device_train_batch_size", per_device)?;
        at_least_one("gradient_accumulation_steps", accumulated)?;
        if let Some(all) = self.all {
            at_least_one("train_batch_size", all)?;
            if accumulated != 1 {
                let why = format!("with train_batch_size = {all}, the rows of the whole batch: leave one of them out");
                no_effect("gradient_accumulation_steps", accumulated, &why)?;
            }
            return Ok(all);
        }
        let rows = per_device.saturating_mul(accumulated).saturating_mul(self.ranks);
        expect(rows <= MOST_ROWS, &self.product(&[]), rows, &format!("at most {MOST_ROWS}"))?;
        Ok(rows)
    }

    /// Returns the maximum number of rows of a rank in one forward and backward pass.
    pub(crate) fn rows_per_pass(&self) -> usize {
        self.limit().unwrap_or(usize::MAX)
    }

    /// Returns [`BatchSettings::rows_per_pass`]; `None` if there is no limit.
    fn limit(&self) -> Option<usize> {
        self.per_device.or(if self.all.is_some() { None } else { Some(PER_DEVICE) })
    }

    /// Returns the text of the product that [`BatchSettings::rows`] computes, with further factors, for error messages.
    fn product(&self, more: &[&str]) -> String {
        match self.all {
            Some(_) => [&["train_batch_size"], more].concat().join(" * "),
            None => {
                product(&[&["per_device_train_batch_size", "gradient_accumulation_steps"], more].concat(), self.ranks)
            }
        }
    }
}

/// Returns the text of a product for error messages, with the factor `ranks` if there are several ranks.
fn product(names: &[&str], ranks: usize) -> String {
    let ranks: &[&str] = if ranks > 1 { &["ranks"] } else { &[] };
    [names, ranks].concat().join(" * ")
}

/// Batch sizes of a PPO run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Responses per update.
    pub(super) batch_size: usize,
    /// Division of an epoch into optimizer steps.
    pub(super) epoch: EpochPlan,
}

impl Sizes {
    /// Number of optimizer steps per update of `epochs` epochs.
    pub(super) fn steps_per_update(&self, epochs: usize) -> usize {
        self.epoch.steps(self.batch_size).saturating_mul(epochs)
    }
}

impl PpoConfig {
    /// Checks the settings and returns the sizes of the run over `num_prompts` prompts.
    ///
    /// Errors: [`Error::Usage`](rlhf_base::Error::Usage), naming the values that do not go together and the nearest that do.
    pub fn plan(&self, num_prompts: usize) -> Result<PpoPlan> {
        self.check()?;
        self.plan_for(num_prompts)
    }

    /// Returns [`PpoConfig::plan`] of settings that are checked already.
    pub(crate) fn plan_for(&self, num_prompts: usize) -> Result<PpoPlan> {
        let Sizes { batch_size, epoch } = self.sizes()?;
        let prompts = batch_size / self.advantage.num_generations;
        let group = self.advantage.num_generations;
        let episodes_for_steps =
            |steps: usize| steps.div_ceil(epoch.steps(batch_size) * self.num_ppo_epochs).saturating_mul(batch_size);
        if let Some(steps) = self.generation.max_steps {
            at_least_one(name_of!(self.generation.max_steps), steps)?;
            let expected = format!("at most {MOST_EPISODES} responses in all, {batch_size} in each update");
            expect(episodes_for_steps(steps) <= MOST_EPISODES, name_of!(self.generation.max_steps), steps, &expected)?;
        }
        let length = match (self.generation.max_steps, self.total_episodes) {
            (Some(steps), Some(episodes)) => {
                return exclude(
                    name_of!(self.generation.max_steps),
                    name_of!(self.total_episodes),
                    format!(
                        " = {steps} and total_episodes = {episodes} exclude each other: both are the length of the run"
                    ),
                );
            }
            (steps, episodes) => steps.map(episodes_for_steps).or(episodes),
        };
        // As in TRL, the fraction of an episode is dropped. The cast saturates.
        let episodes_for_epochs = || ((self.num_train_epochs * num_prompts as f64) as usize).saturating_mul(group);
        let total_episodes = length.unwrap_or_else(episodes_for_epochs);
        if total_episodes == 0 {
            return refuse(
                name_of!(self.total_episodes),
                format!(
                    " = num_train_epochs * prompts = {} * {num_prompts} is less than 1: nothing to train on",
                    self.num_train_epochs
                ),
            );
        }
        let product = "num_train_epochs * prompts";
        expect(total_episodes <= MOST_EPISODES, product, total_episodes, &format!("at most {MOST_EPISODES}"))?;
        let num_total_batches = total_episodes.div_ceil(batch_size);
        let frozen = self.value.value_warmup_updates;
        let expected =
            format!("less than the run's {num_total_batches} updates: otherwise the policy is never trained");
        expect(frozen < num_total_batches, name_of!(self.value.value_warmup_updates), frozen, &expected)?;
        Ok(PpoPlan {
            batch_size,
            prompts,
            epoch,
            total_episodes,
            num_total_batches,
            sample_every: num_total_batches.checked_div(self.num_sample_generations).map(|every| every.max(1)),
        })
    }

    /// Returns the batch sizes.
    ///
    /// # Errors
    /// [`Error::Usage`](rlhf_base::Error::Usage), naming the values that do not go together and the nearest that do.
    pub(super) fn sizes(&self) -> Result<Sizes> {
        self.sizes_for(num_ranks())
    }

    /// Returns [`PpoConfig::sizes`] of a run of `ranks` ranks.
    fn sizes_for(&self, ranks: usize) -> Result<Sizes> {
        let (batch_size, mini_batch_size) = self.batch_sizes(ranks)?;
        let (part_size, micro_batch_size) = match self.preset {
            Preset::TrlLegacy => {
                let part = mini_batch_size / self.gradient_accumulation_steps;
                (part, part)
            }
            _ => (mini_batch_size, self.batches(ranks).rows_per_pass().min(mini_batch_size)),
        };
        let name = match (self.generation.generation_batch_size, self.train_batch_size) {
            (Some(_), _) => name_of!(self.generation.generation_batch_size),
            (None, Some(_)) => name_of!(self.train_batch_size),
            (None, None) => "responses per update",
        };
        check_whole(name, batch_size, self.advantage.num_generations.max(1))?;
        Ok(Sizes { batch_size, epoch: EpochPlan { mini_batch_size, part_size, micro_batch_size } })
    }

    /// Returns the maximum number of sequences of a rank in one forward and backward pass: `per_device_train_batch_size`, or its
    /// default.
    pub fn rows_per_pass(&self) -> usize {
        self.batches(num_ranks()).rows_per_pass()
    }

    fn batches(&self, ranks: usize) -> BatchSettings {
        BatchSettings {
            all: self.train_batch_size,
            per_device: self.per_device_train_batch_size,
            accumulated: self.gradient_accumulation_steps,
            ranks,
        }
    }

    /// Returns the number of responses of an update, and of an optimizer step, over all ranks.
    fn batch_sizes(&self, ranks: usize) -> Result<(usize, usize)> {
        if self.preset == Preset::TrlLegacy {
            return self.legacy_batch_sizes();
        }
        let batches = self.batches(ranks);
        let batch_size = batches.rows()?;
        let parts = self.num_mini_batches;
        at_least_one(name_of!(self.num_mini_batches), parts)?;
        if self.preset.is_of_groups() {
            return Ok((self.generated_rows(batch_size, ranks)?, batch_size));
        }
        self.generation.refuse_sizes_of_groups()?;
        if let Some(responses) = self.generation.responses(self.train_batch_size, ranks)? {
            let message = "per_device_train_batch_size and gradient_accumulation_steps are the size of an optimizer step \
                           where per_device_generation_batch_size is set";
            expect(parts == 1, name_of!(self.num_mini_batches), parts, &format!("1: {message}"))?;
            let needed = self.generation.generation_batches.saturating_mul(batch_size.div_ceil(responses.max(1)));
            let hint = format!("generation_batches = {needed} makes as many");
            expect(
                batch_size <= responses,
                &batches.product(&[]),
                batch_size,
                &format!("at most the {responses} responses of an update; {hint}"),
            )?;
            return Ok((responses, batch_size));
        }
        if self.preset == Preset::TrlPpov2 && self.train_batch_size.is_none() {
            let all = batch_size.saturating_mul(parts);
            expect(
                all <= MOST_ROWS,
                &batches.product(&[name_of!(self.num_mini_batches)]),
                all,
                &format!("at most {MOST_ROWS}"),
            )?;
            return Ok((all, batch_size));
        }
        if !batch_size.is_multiple_of(parts) {
            let nearest = nearest_divisors(batch_size, parts);
            let rest = format!(" = {batch_size} is not a multiple of num_mini_batches = {parts}; {nearest}");
            if self.train_batch_size.is_some() {
                return refuse(name_of!(self.train_batch_size), rest);
            }
            let rows = batches.per_device.unwrap_or(PER_DEVICE);
            let accumulated = batches.accumulated;
            let ranks = if ranks > 1 { format!(" * {ranks}") } else { String::new() };
            return usage(format!("batch size = {} = {rows} * {accumulated}{ranks}{rest}", batches.product(&[])));
        }
        Ok((batch_size, batch_size / parts))
    }

    /// Returns the number of responses of an update with the presets `grpo` and `rloo`, whose optimizer step has `step` rows.
    fn generated_rows(&self, step: usize, ranks: usize) -> Result<usize> {
        let GenerationBatchesConfig { generation_batch_size, steps_per_generation, .. } = self.generation;
        let why =
            "with the presets grpo and rloo: generation_batch_size or steps_per_generation is the size of an update";
        for (name, value) in [
            (name_of!(self.num_mini_batches), self.num_mini_batches),
            (name_of!(self.generation.generation_batches), self.generation.generation_batches),
        ] {
            if value != 1 {
                no_effect(name, value, why)?;
            }
        }
        if let Some(size) = self.generation.per_device_generation_batch_size {
            no_effect(name_of!(self.generation.per_device_generation_batch_size), size, why)?;
        }
        let (name, rows) = match (generation_batch_size, steps_per_generation) {
            (None, None) => return Ok(step),
            (Some(rows), Some(steps)) => {
                return exclude(
                    "generation_batch_size",
                    "steps_per_generation",
                    format!(
                        " = {rows} and steps_per_generation = {steps} exclude each other: both are the responses of an \
                     update, the second as micro-batches"
                    ),
                );
            }
            (Some(rows), None) => ("generation_batch_size".into(), rows),
            (None, Some(steps)) => {
                let per_rank = self.batches(ranks).limit();
                let pass = rows_of_all_ranks(per_rank.map(|rows| rows as u64), ranks as u64, step as u64) as usize;
                let product_name = match per_rank {
                    Some(_) => product(&["steps_per_generation", "per_device_train_batch_size"], ranks),
                    None => product(&["steps_per_generation", "train_batch_size"], 1),
                };
                (product_name, steps.saturating_mul(pass))
            }
        };
        let name = name.as_str();
        at_least_one(name, rows)?;
        expect(rows <= MOST_ROWS, name, rows, &format!("at most {MOST_ROWS}"))?;
        if !rows.is_multiple_of(step) {
            let (below, above) = (rows / step * step, rows.next_multiple_of(step));
            let nearest = if below == 0 { format!("{above}") } else { format!("{below} and {above}") };
            return refuse(
                name,
                format!(
                    " = {rows} responses are not a multiple of the {step} responses of an optimizer step; the nearest multiples: {nearest}"
                ),
            );
        }
        Ok(rows)
    }

    /// Returns the number of responses of an update with the preset `trl-legacy`, and of an optimizer step.
    fn legacy_batch_sizes(&self) -> Result<(usize, usize)> {
        let legacy = &self.legacy;
        let accumulated = self.gradient_accumulation_steps;
        at_least_one(name_of!(self.gradient_accumulation_steps), accumulated)?;
        let all = legacy.batch_size.unwrap_or(LEGACY_BATCH);
        expect((1..=MOST_ROWS).contains(&all), "batch_size", all, &format!("1 to {MOST_ROWS}"))?;
        let part = legacy.mini_batch_size.unwrap_or((all / accumulated).max(1));
        at_least_one("mini_batch_size", part)?;
        self.refuse_unused_sizes()?;
        let step = part.saturating_mul(accumulated);
        if !all.is_multiple_of(step) {
            let below = (1..=all / accumulated).rev().find(|n| *n < part && all.is_multiple_of(n * accumulated));
            let nearest = below.map_or(String::new(), |below| format!("; the next smaller mini_batch_size is {below}"));
            return refuse(
                "batch_size",
                format!(
                    " = {all} is not a multiple of mini_batch_size * gradient_accumulation_steps = {part} * {accumulated} = \
                 {step}{nearest}"
                ),
            );
        }
        Ok((all, step))
    }

    /// Refuses the sizes that the preset `trl-legacy` does not use.
    fn refuse_unused_sizes(&self) -> Result<()> {
        for (name, value, usual, other) in [
            (name_of!(self.train_batch_size), self.train_batch_size.unwrap_or(0), 0, "batch_size is the setting there"),
            (
                name_of!(self.per_device_train_batch_size),
                // TRL's default may be set explicitly.
                self.per_device_train_batch_size.unwrap_or(PER_DEVICE),
                PER_DEVICE,
                "mini_batch_size is the setting there",
            ),
            (
                name_of!(self.num_mini_batches),
                self.num_mini_batches,
                1,
                "it follows from batch_size and mini_batch_size there",
            ),
            (
                name_of!(self.generation.per_device_generation_batch_size),
                self.generation.per_device_generation_batch_size.unwrap_or(0),
                0,
                "an update has batch_size prompts there",
            ),
            (
                name_of!(self.generation.generation_batches),
                self.generation.generation_batches,
                1,
                "an update has batch_size prompts there",
            ),
        ] {
            if value != usual {
                no_effect(name, value, &format!("with preset = trl-legacy: {other}"))?;
            }
        }
        Ok(())
    }
}

/// Names the divisors of `batch_size` next to `parts`, for an error message.
fn nearest_divisors(batch_size: usize, parts: usize) -> String {
    let below = (1..parts.min(batch_size)).rev().find(|&n| batch_size.is_multiple_of(n));
    let above = (parts + 1..=batch_size).find(|&n| batch_size.is_multiple_of(n));
    match (below, above) {
        (Some(below), Some(above)) => format!("the nearest that divide it are {below} and {above}"),
        _ => format!("the nearest that divides it is {batch_size}"),
    }
}

impl GenerationBatchesConfig {
    /// Refuses the sizes that only the presets `grpo` and `rloo` have.
    fn refuse_sizes_of_groups(&self) -> Result<()> {
        for (name, value, instead) in [
            (
                name_of!(self.generation_batch_size),
                self.generation_batch_size,
                "train_batch_size is the size of an update",
            ),
            (name_of!(self.steps_per_generation), self.steps_per_generation, "num_mini_batches divides an update"),
            (name_of!(self.max_steps), self.max_steps, "total_episodes is the length of the run"),
        ] {
            value
                .map_or(Ok(()), |value| no_effect(name, value, &format!("without preset = grpo or rloo: {instead}")))?;
        }
        Ok(())
    }

    /// Returns the number of responses of an update of `ranks` ranks, if it has its own size.
    fn responses(&self, train_batch_size: Option<usize>, ranks: usize) -> Result<Option<usize>> {
        at_least_one(name_of!(self.generation_batches), self.generation_batches)?;
        let Some(size) = self.per_device_generation_batch_size else {
            return match self.generation_batches {
                1 => Ok(None),
                batches => {
                    no_effect(name_of!(self.generation_batches), batches, "without per_device_generation_batch_size")
                        .map(|()| None)
                }
            };
        };
        at_least_one(name_of!(self.per_device_generation_batch_size), size)?;
        if let Some(all) = train_batch_size {
            let why = format!("with train_batch_size = {all}, the responses of an update: leave one of them out");
            no_effect(name_of!(self.per_device_generation_batch_size), size, &why)?;
        }
        let responses = size.saturating_mul(self.generation_batches).saturating_mul(ranks);
        let product =
            product(&[name_of!(self.per_device_generation_batch_size), name_of!(self.generation_batches)], ranks);
        expect(responses <= MOST_ROWS, &product, responses, &format!("at most {MOST_ROWS}"))?;
        Ok(Some(responses))
    }
}

/// Returns the sizes of an SFT or reward model run over `num_rows` rows.
pub(super) fn train_plan(
    batch_size: usize,
    num_train_epochs: f64,
    max_steps: Option<usize>,
    num_rows: usize,
) -> Result<TrainPlan> {
    above_zero("num_train_epochs", num_train_epochs)?;
    if let Some(steps) = max_steps {
        at_least_one("max_steps", steps)?;
    }
    expect(num_rows > 0, "rows of the dataset", num_rows, "at least 1")?;
    // A batch that the rest of an epoch cannot fill continues into the next epoch, so only the run's last update may see a row once more.
    let num_updates =
        max_steps.unwrap_or_else(|| (num_train_epochs * num_rows as f64 / batch_size as f64).ceil() as usize);
    let expected = format!("at most {MOST_EPISODES}");
    expect(num_updates <= MOST_EPISODES, "num_train_epochs * rows / batch size", num_updates, &expected)?;
    Ok(TrainPlan { batch_size, num_updates })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::sizes::GlobalSizes;
    use crate::settings::RewardConfig;
    use crate::settings::tests::{ppo, usage_of};
    use rlhf_base::schema::defaults;

    #[test]
    fn a_ppo_plan_rounds_up_to_whole_updates() {
        let mut config = ppo();
        config.gradient_accumulation_steps = 4;
        config.num_mini_batches = 2;
        config.total_episodes = Some(1000);
        let plan = config.plan(50).unwrap();
        // 8 * 4 = 32 responses per update; 1000 / 32 = 31.25; 32 updates / 10 tables = 3.2.
        assert_eq!(
            plan,
            PpoPlan {
                batch_size: 32,
                prompts: 32,
                epoch: EpochPlan { mini_batch_size: 16, part_size: 16, micro_batch_size: 8 },
                total_episodes: 1000,
                num_total_batches: 32,
                sample_every: Some(3),
            }
        );
    }

    #[test]
    fn epochs_times_prompts_are_the_episodes_when_none_are_given() {
        let mut config = ppo();
        config.num_train_epochs = 2.5;
        let plan = config.plan(101).unwrap();
        assert_eq!((plan.total_episodes, plan.num_total_batches), (252, 32)); // 252.5 is cut; 252 / 8 = 31.5.
        assert_eq!(
            usage_of(config.plan(0)),
            "total_episodes = num_train_epochs * prompts = 2.5 * 0 is less than 1: nothing to train on"
        );
    }

    #[test]
    fn a_micro_batch_is_never_larger_than_a_mini_batch() {
        let mut config = ppo();
        config.num_mini_batches = 4;
        let plan = config.plan(8).unwrap();
        assert_eq!((plan.epoch.mini_batch_size, plan.epoch.micro_batch_size), (2, 2));
    }

    #[test]
    fn tables_come_each_update_at_most_or_never() {
        let mut config = ppo();
        config.total_episodes = Some(24);
        assert_eq!(config.plan(1).unwrap().sample_every, Some(1));
        config.num_sample_generations = 0;
        assert_eq!(config.plan(1).unwrap().sample_every, None);
    }

    #[test]
    fn mini_batches_that_do_not_divide_the_batch_name_the_nearest_that_do() {
        let refused = |rows, accumulated, parts| {
            let mut config = ppo();
            config.per_device_train_batch_size = Some(rows);
            config.gradient_accumulation_steps = accumulated;
            config.num_mini_batches = parts;
            usage_of(config.plan(100))
        };
        assert_eq!(
            refused(8, 3, 5),
            "batch size = per_device_train_batch_size * gradient_accumulation_steps = 8 * 3 = 24 is not a multiple of \
             num_mini_batches = 5; the nearest that divide it are 4 and 6"
        );
        assert_eq!(
            refused(2, 2, 5),
            "batch size = per_device_train_batch_size * gradient_accumulation_steps = 2 * 2 = 4 is not a multiple of \
             num_mini_batches = 5; the nearest that divides it is 4"
        );
    }

    #[test]
    fn with_the_preset_of_ppo_v2_the_batch_includes_the_mini_batches() {
        let mut config = ppo();
        config.preset = Preset::TrlPpov2;
        config.per_device_train_batch_size = Some(2);
        config.gradient_accumulation_steps = 4;
        config.num_mini_batches = 3;
        config.total_episodes = Some(100);
        let plan = config.plan(50).unwrap();
        // 2 * 4 * 3 = 24 responses per update, in steps of 2 * 4; 100 / 24 = 4.2.
        assert_eq!((plan.batch_size, plan.epoch.mini_batch_size, plan.epoch.micro_batch_size), (24, 8, 2));
        assert_eq!(plan.num_total_batches, 5);
        config.num_mini_batches = 1 << 19;
        assert!(usage_of(config.plan(50)).contains("num_mini_batches = 4194304: expected at most 1048576"));
    }

    #[test]
    fn an_update_with_a_size_of_its_own_is_trained_on_in_steps_of_another() {
        let plan = |generated, batches, trained, accumulated| {
            let mut config = ppo();
            config.generation = GenerationBatchesConfig {
                per_device_generation_batch_size: generated,
                generation_batches: batches,
                ..defaults()
            };
            (config.per_device_train_batch_size, config.gradient_accumulation_steps) = (Some(trained), accumulated);
            config.total_episodes = Some(100);
            config.plan(50)
        };
        let sizes = |plan: Result<PpoPlan>| {
            plan.map(|p| (p.batch_size, p.epoch.mini_batch_size, p.epoch.micro_batch_size)).unwrap()
        };
        assert_eq!(sizes(plan(Some(6), 4, 4, 2)), (24, 8, 4));
        assert_eq!(sizes(plan(Some(6), 4, 5, 2)), (24, 10, 5), "the last step of an epoch has 4");
        assert_eq!(plan(Some(6), 4, 4, 2).unwrap().num_total_batches, 5);
        assert_eq!(
            usage_of(plan(Some(4), 1, 8, 1)),
            "per_device_train_batch_size * gradient_accumulation_steps = 8: expected at most the 4 responses of an update; \
             generation_batches = 2 makes as many"
        );
        assert_eq!(
            usage_of(plan(None, 2, 8, 1)),
            "generation_batches = 2 has no effect without per_device_generation_batch_size"
        );
        assert_eq!(usage_of(plan(Some(0), 2, 8, 1)), "per_device_generation_batch_size = 0: expected at least 1");
        let mut config = PpoConfig::with_preset(Preset::DeepspeedChat, "actor", "critic", "d", "o");
        config.num_mini_batches = 2;
        assert!(usage_of(config.check()).starts_with("num_mini_batches = 2: expected 1: per_device_train_batch_size"));
    }

    #[test]
    fn the_preset_of_legacy_refuses_sizes_of_generation_that_it_would_not_use() {
        let refused = |size, batches| {
            let mut config = PpoConfig::with_preset(Preset::TrlLegacy, "policy", "judge", "d", "o");
            config.generation = GenerationBatchesConfig {
                per_device_generation_batch_size: size,
                generation_batches: batches,
                ..defaults()
            };
            usage_of(config.check())
        };
        let there = "has no effect with preset = trl-legacy: an update has batch_size prompts there";
        assert_eq!(refused(Some(4), 1), format!("per_device_generation_batch_size = 4 {there}"));
        assert_eq!(refused(None, 2), format!("generation_batches = 2 {there}"));
    }

    #[test]
    fn an_epoch_over_fewer_responses_has_as_many_parts_as_they_fill() {
        let mut config = PpoConfig::with_preset(Preset::TrlLegacy, "policy", "judge", "d", "o");
        (config.legacy.batch_size, config.legacy.mini_batch_size) = (Some(16), Some(2));
        config.gradient_accumulation_steps = 4;
        // Parts of 2 rows, 4 of them a step: 9 rows are 4 parts and one of a single row, in two steps.
        assert_eq!([16, 9, 8, 1].map(|rows| config.plan(16).unwrap().epoch.parts(rows)), [8, 5, 4, 1]);
    }

    /// A configuration of each preset with sizes that are not the defaults.
    fn preset_configs() -> [PpoConfig; 6] {
        let presets =
            [Preset::Trl, Preset::TrlPpov2, Preset::TrlLegacy, Preset::DeepspeedChat, Preset::Grpo, Preset::Rloo];
        presets.map(|preset| {
            let mut config = PpoConfig::with_preset(preset, "policy", "judge", "d", "o");
            match preset {
                Preset::Trl | Preset::TrlPpov2 => {
                    (config.per_device_train_batch_size, config.gradient_accumulation_steps) = (Some(6), 4);
                    config.num_mini_batches = 3;
                }
                Preset::TrlLegacy => {
                    (config.legacy.batch_size, config.legacy.mini_batch_size) = (Some(48), Some(4));
                    config.gradient_accumulation_steps = 3;
                }
                Preset::DeepspeedChat => {
                    config.generation.generation_batches = 3;
                    config.per_device_train_batch_size = Some(4);
                }
                Preset::Grpo => {
                    (config.per_device_train_batch_size, config.gradient_accumulation_steps) = (Some(4), 2);
                    config.generation.steps_per_generation = Some(6);
                }
                Preset::Rloo => {
                    (config.per_device_train_batch_size, config.gradient_accumulation_steps) = (Some(4), 2);
                    config.generation.generation_batch_size = Some(64);
                }
            }
            config
        })
    }

    #[test]
    fn sizes_per_device_are_multiplied_by_the_ranks_and_those_of_legacy_are_of_all() {
        let sizes = |config: &PpoConfig, ranks| {
            let Sizes { batch_size, epoch } = config.sizes_for(ranks).unwrap();
            (batch_size, epoch.mini_batch_size, epoch.part_size, epoch.micro_batch_size)
        };
        let [trl, ppov2, legacy, chat, grpo, rloo] = preset_configs();
        // 6 * 4 rows per rank; an optimizer step of a third of them.
        assert_eq!([1, 2, 4].map(|ranks| sizes(&trl, ranks)), [(24, 8, 8, 6), (48, 16, 16, 6), (96, 32, 32, 6)]);
        assert_eq!([1, 4].map(|ranks| sizes(&ppov2, ranks)), [(72, 24, 24, 6), (288, 96, 96, 6)]);
        assert_eq!([1, 4].map(|ranks| sizes(&legacy, ranks)), [(48, 12, 4, 4); 2]);
        assert_eq!([1, 4].map(|ranks| sizes(&chat, ranks)), [(48, 4, 4, 4), (192, 16, 16, 4)]);
        assert_eq!([1, 4].map(|ranks| sizes(&grpo, ranks)), [(24, 8, 8, 4), (96, 32, 32, 4)]);
        assert_eq!([1, 4].map(|ranks| sizes(&rloo, ranks)), [(64, 8, 8, 4), (64, 32, 32, 4)]);
        let train = |ranks| BatchSettings { all: None, per_device: None, accumulated: 2, ranks }.rows().unwrap();
        assert_eq!([1, 2, 3].map(train), [16, 32, 48]);
    }

    #[test]
    fn the_sizes_of_a_checkpoint_are_those_of_its_plan() {
        let mut configs = preset_configs().to_vec();
        configs.extend([Preset::Trl, Preset::TrlPpov2].map(|preset| {
            let mut config = PpoConfig { preset, ..ppo() };
            (config.train_batch_size, config.num_mini_batches) = (Some(12), 4);
            config
        }));
        configs.extend([Preset::Grpo, Preset::Rloo].into_iter().flat_map(|preset| {
            // A step counts the rows of all ranks; a pass is one rank's, and may have more rows than the step has for that rank.
            [None, Some(4), Some(64)].map(|per_device| {
                let mut config = PpoConfig::with_preset(preset, "policy", "judge", "d", "o");
                (config.train_batch_size, config.per_device_train_batch_size) = (Some(64), per_device);
                config.generation.steps_per_generation = Some(if per_device == Some(4) { 16 } else { 2 });
                config
            })
        }));
        configs.push(PpoConfig::with_preset(Preset::TrlLegacy, "policy", "judge", "d", "o"));
        configs.push(ppo());
        for config in configs {
            let settings = serde_json::to_value(&config).unwrap();
            for ranks in [1, 2, 8] {
                let Sizes { batch_size, epoch } = config.sizes_for(ranks).unwrap();
                let value = GlobalSizes::of(settings.as_object().unwrap(), ranks).unwrap();
                let expected = [batch_size, epoch.mini_batch_size, epoch.part_size].map(|rows| rows as u64);
                assert_eq!([value.update, value.step, value.part], expected, "{:?}, {ranks} ranks", config.preset);
            }
        }
    }

    #[test]
    fn steps_per_generation_counts_the_passes_of_all_ranks() {
        let update = |per_device, steps, ranks| {
            let mut config = PpoConfig::with_preset(Preset::Grpo, "policy", "judge", "d", "o");
            (config.train_batch_size, config.per_device_train_batch_size) = (Some(64), per_device);
            config.generation.steps_per_generation = Some(steps);
            config.sizes_for(ranks).map(|sizes| sizes.batch_size)
        };
        // Without a limit for a rank, a pass is the whole optimizer step, of one rank and of two.
        for ranks in [1, 2, 4] {
            assert_eq!(update(None, 1, ranks).unwrap(), 64, "{ranks} ranks");
            assert_eq!(update(Some(64), 2, ranks).unwrap(), 128, "{ranks} ranks");
        }
        assert_eq!(update(Some(8), 16, 1).unwrap(), 128);
        assert_eq!(update(Some(8), 16, 2).unwrap(), 256);
        assert!(usage_of(update(Some(8), 1, 2)).starts_with(
            "steps_per_generation * per_device_train_batch_size * ranks = 16 responses are not a multiple of the 64 responses of an \
             optimizer step"
        ));
        let mut config = PpoConfig::with_preset(Preset::Grpo, "policy", "judge", "d", "o");
        config.generation.generation_batches = 3;
        assert!(
            usage_of(config.check()).starts_with("generation_batches = 3 has no effect with the presets grpo and rloo")
        );
    }

    #[test]
    fn max_steps_is_named_where_it_is_no_number_of_steps() {
        let refused = |steps, episodes| {
            let mut config = PpoConfig::with_preset(Preset::Grpo, "policy", "judge", "d", "o");
            (config.generation.max_steps, config.total_episodes) = (Some(steps), episodes);
            config.train_batch_size = Some(8192);
            usage_of(config.plan(100))
        };
        assert_eq!(refused(0, None), "max_steps = 0: expected at least 1");
        let most = i32::MAX as usize;
        assert_eq!(
            refused(most, None),
            format!("max_steps = {most}: expected at most {MOST_EPISODES} responses in all, 8192 in each update")
        );
        assert_eq!(
            refused(3, Some(100)),
            "max_steps = 3 and total_episodes = 100 exclude each other: both are the length of the run"
        );
    }

    #[test]
    fn train_batch_size_is_that_of_all_ranks_however_many_there_are() {
        let mut config = ppo();
        (config.train_batch_size, config.num_mini_batches) = (Some(64), 2);
        for ranks in [1, 2, 3, 4] {
            let Sizes { batch_size, epoch } = config.sizes_for(ranks).unwrap();
            assert_eq!(
                (batch_size, epoch),
                (64, EpochPlan { mini_batch_size: 32, part_size: 32, micro_batch_size: 32 })
            );
        }
        config.preset = Preset::TrlPpov2;
        assert_eq!(config.sizes_for(2).unwrap().batch_size, 64);
        config.per_device_train_batch_size = Some(4);
        let Sizes { batch_size, epoch } = config.sizes_for(2).unwrap();
        assert_eq!((batch_size, epoch.mini_batch_size, epoch.micro_batch_size), (64, 32, 4));
        let step_rows = |all, accumulated| {
            BatchSettings { all, per_device: None, accumulated, ranks: 4 }.rows().map_err(|e| e.to_string())
        };
        assert_eq!(step_rows(Some(20), 1), Ok(20));
        assert_eq!(step_rows(Some(0), 1).unwrap_err(), "train_batch_size = 0: expected at least 1");
        assert_eq!(
            step_rows(Some(20), 2).unwrap_err(),
            "gradient_accumulation_steps = 2 has no effect with train_batch_size = 20, the rows of the whole batch: leave one of \
             them out"
        );
        assert_eq!(
            step_rows(None, MOST_ROWS).unwrap_err(),
            "per_device_train_batch_size * gradient_accumulation_steps * ranks = 33554432: expected at most 1048576"
        );
    }

    #[test]
    fn train_batch_size_is_refused_where_another_setting_has_its_place() {
        let mut config = ppo();
        (config.train_batch_size, config.num_mini_batches) = (Some(6), 4);
        assert_eq!(
            usage_of(config.check()),
            "train_batch_size = 6 is not a multiple of num_mini_batches = 4; the nearest that divide it are 3 and 6"
        );
        config.train_batch_size = None;
        config.per_device_train_batch_size = Some(3);
        assert_eq!(
            usage_of(config.sizes_for(2)),
            "batch size = per_device_train_batch_size * gradient_accumulation_steps * ranks = 3 * 1 * 2 = 6 is not a multiple of \
             num_mini_batches = 4; the nearest that divide it are 3 and 6"
        );
        let mut legacy = PpoConfig::with_preset(Preset::TrlLegacy, "policy", "judge", "d", "o");
        legacy.train_batch_size = Some(64);
        assert_eq!(
            usage_of(legacy.check()),
            "train_batch_size = 64 has no effect with preset = trl-legacy: batch_size is the setting there"
        );
        let mut chat = PpoConfig::with_preset(Preset::DeepspeedChat, "actor", "critic", "d", "o");
        chat.train_batch_size = Some(64);
        assert_eq!(
            usage_of(chat.check()),
            "per_device_generation_batch_size = 16 has no effect with train_batch_size = 64, the responses of an update: leave \
             one of them out"
        );
        chat.generation.per_device_generation_batch_size = None;
        assert_eq!(chat.plan(1).unwrap().epoch.micro_batch_size, 16);
    }

    #[test]
    fn a_train_plan_rounds_the_passes_up_to_whole_updates() {
        let mut config = RewardConfig::new("m", "d", "o");
        config.gradient_accumulation_steps = 2;
        // 20 pairs, 3 passes, 16 per update: 3.75 updates.
        assert_eq!(config.plan(20).unwrap(), TrainPlan { batch_size: 16, num_updates: 4 });
        config.num_train_epochs = 0.6;
        assert_eq!(config.plan(20).unwrap().num_updates, 1); // 0.75 rounded up.
        config.max_steps = Some(100);
        assert_eq!(config.plan(20).unwrap().num_updates, 100);
        assert_eq!(usage_of(config.plan(0)), "rows of the dataset = 0: expected at least 1");
    }
}
