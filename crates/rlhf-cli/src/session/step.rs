//! The requests of a loop with TRL's `step()`.

mod open;

use super::arrays::Array;
use super::failure::Failure;
use super::params::Params;
use super::texts::text;
use super::wire::Reply;
use rlhf::compat::step::{Generate, LengthSampler, LossInputs, Stat, Stats, StepTrainer, Texts};
use rlhf::generate::Sampling;
use rlhf::rl::experience::Experience;
use serde_json::{Map, Value, json};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use tch::{Kind, Tensor};

/// The order of the rows in each epoch of the next step. Without one, an epoch draws its order from the seed.
type Orders = Rc<RefCell<VecDeque<Vec<usize>>>>;

/// A trainer, and the learning rate of its next step.
pub(super) struct StepLoop {
    trainer: StepTrainer,
    rate: Rc<Cell<f64>>,
    orders: Orders,
    /// Whether each client passes the rows of its rank alone, not the rows of all ranks.
    rows_are_per_rank: bool,
    /// The statistics of the last step.
    last: Stats,
}

/// Queries and responses, with their scores and masks.
struct Rows {
    queries: Vec<Vec<i64>>,
    responses: Vec<Vec<i64>>,
    scores: Vec<f64>,
    masks: Option<Vec<Vec<bool>>>,
    /// Range of the rows that this client has passed.
    client_rows: Range<usize>,
}

impl StepLoop {
    /// The requests of an open loop.
    pub(super) const METHODS: &'static [&'static str] = &[
        "generate",
        "step",
        "batched_forward_pass",
        "compute_rewards",
        "compute_advantages",
        "loss",
        "train_minibatch",
        "train_texts",
        "log_stats",
        "encode",
        "decode",
        "save_pretrained",
        "save_state",
        "load_state",
        "state",
    ];

    pub(super) fn is_half_loaded(&self) -> bool {
        self.trainer.is_half_loaded()
    }

    /// Answers a request.
    pub(super) fn answer(&mut self, method: &str, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        match method {
            "generate" => self.generate(params, reply),
            "step" => self.step(params, reply),
            "batched_forward_pass" => self.batched_forward_pass(params, reply),
            "compute_rewards" => self.compute_rewards(params, reply),
            "compute_advantages" => self.compute_advantages(params, reply),
            "loss" => self.loss(params, reply),
            "train_minibatch" => self.train_minibatch(params, reply),
            "train_texts" => self.train_texts(params, reply),
            "log_stats" => self.log_stats(params, reply),
            "encode" | "decode" => text(&self.trainer.tokenizer, method, params, reply),
            "save_pretrained" | "save_state" | "load_state" => {
                let dir = params.needed("dir", Params::path)?;
                params.finish(method)?;
                match method {
                    "save_pretrained" => self.trainer.save_pretrained(&dir)?,
                    "save_state" => self.trainer.save_state(&dir)?,
                    _ => self.trainer.load_state(&dir)?,
                }
                self.describe(reply);
                Ok(())
            }
            "state" => {
                params.finish(method)?;
                self.describe(reply);
                let stats = stats_value(&self.last, reply);
                reply.set("stats", stats);
                Ok(())
            }
            _ => Err(Failure::unknown(method, Self::METHODS)),
        }
    }

    /// Adds the number of steps, the KL coefficient, the score moments and the learning rate to a reply.
    fn describe(&self, reply: &mut Reply) {
        reply.set("steps", self.trainer.steps_done());
        reply.set("kl_coef", self.trainer.kl_coef());
        let (mean, std) = self.trainer.score_moments();
        reply.set("score_moments", json!({"mean": mean, "std": std}));
        reply.set("learning_rate", self.rate.get());
    }

    /// Sets the learning rate of a request, if it has one; later requests keep it.
    fn take_rate(&self, params: &Params<'_>) -> Result<(), Failure> {
        if let Some(rate) = params.number("learning_rate")? {
            if !(rate.is_finite() && rate >= 0.0) {
                let message = format!("learning_rate: expected a number from 0 on, found {rate}");
                return Err(Failure::usage("learning_rate", message));
            }
            self.rate.set(rate);
        }
        Ok(())
    }

    fn generate(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let queries = params.needed("queries", Params::rows)?;
        let lengths = params.ids("length_sampler")?;
        let length_sampler = match lengths.as_deref() {
            Some(&[min, max]) => {
                let bound = |n: i64| usize::try_from(n).unwrap_or(0);
                Some(
                    LengthSampler::new(bound(min), bound(max))
                        .map_err(|e| Failure::from(e).for_setting("length_sampler"))?,
                )
            }
            Some(_) => {
                return Err(Failure::usage(
                    "length_sampler",
                    "length_sampler: expected two lengths, the least and the one above the most",
                ));
            }
            None => None,
        };
        let max_new_tokens = params.count("max_new_tokens")?;
        if max_new_tokens.is_none() && length_sampler.is_none() {
            return Err(Failure::usage(
                "max_new_tokens",
                "max_new_tokens: expected a value, or a length_sampler, found none",
            ));
        }
        let sampling = match params.flag("do_sample")? {
            Some(false) => Sampling::Greedy,
            _ => Sampling::Random {
                temperature: params.number("temperature")?.unwrap_or(1.0),
                top_k: params.count("top_k")?.unwrap_or(0),
                top_p: params.number("top_p")?.unwrap_or(1.0),
                min_p: params.number("min_p")?.unwrap_or(0.0),
            },
        };
        let options = Generate {
            sampling,
            min_new_tokens: params.count("min_new_tokens")?.unwrap_or(0),
            stop_token_ids: params.ids("stop_token_ids")?,
            repetition_penalty: params.number("repetition_penalty")?.unwrap_or(1.0),
            length_sampler,
            batch_size: params.count("batch_size")?.unwrap_or(32),
            return_prompt: params.flag("return_prompt")?.unwrap_or(false),
            generate_ref_response: params.flag("generate_ref_response")?.unwrap_or(false),
            ..Generate::new(max_new_tokens.unwrap_or(0))
        };
        params.finish("generate")?;
        let (queries, client_rows) = self.gathered(queries)?;
        let generated = self.trainer.generate(&queries, &options)?;
        reply.id_rows("responses", &generated.responses[client_rows.clone()]);
        if let Some(responses) = generated.ref_responses {
            reply.id_rows("ref_responses", &responses[client_rows]);
        }
        Ok(())
    }

    /// Returns the values of all ranks, and the range of this client's `values` among them.
    fn gathered<T: Clone + serde::Serialize + serde::de::DeserializeOwned>(
        &self,
        values: Vec<T>,
    ) -> Result<(Vec<T>, Range<usize>), Failure> {
        let world = self.trainer.learner.world();
        if !self.rows_are_per_rank || world.size() == 1 {
            let range = 0..values.len();
            return Ok((values, range));
        }
        let all: Vec<Vec<T>> = world.gather(values)?;
        let before = all[..world.rank()].iter().map(Vec::len).sum::<usize>();
        let range = before..before + all[world.rank()].len();
        Ok((all.concat(), range))
    }

    /// Returns the rows of a request; if each client passes the rows of its rank, those of all ranks.
    fn rows(&self, params: &Params<'_>) -> Result<Rows, Failure> {
        let queries = params.needed("queries", Params::rows)?;
        let responses = params.needed("responses", Params::rows)?;
        let scores = params.numbers("scores")?.unwrap_or_else(|| vec![0.0; queries.len()]);
        let masks = params.masks("response_masks")?;
        for (name, found) in [("responses", responses.len()), ("scores", scores.len())]
            .into_iter()
            .chain(masks.as_ref().map(|masks| ("response_masks", masks.len())))
        {
            if found != queries.len() {
                let message = format!("{name}: expected {} of them, one for each query, found {found}", queries.len());
                return Err(Failure::usage(name, message));
            }
        }
        if let Some(row) = scores.iter().position(|score| !score.is_finite()) {
            let message = format!("scores: row {row}: expected a finite number, found {}", scores[row]);
            return Err(Failure::usage("scores", message));
        }
        let (queries, client_rows) = self.gathered(queries)?;
        let (responses, _) = self.gathered(responses)?;
        let (scores, _) = self.gathered(scores)?;
        let masks = masks.map(|masks| Ok::<_, Failure>(self.gathered(masks)?.0)).transpose()?;
        Ok(Rows { queries, responses, scores, masks, client_rows })
    }

    fn step(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        params.needed("scores", Params::numbers)?;
        let orders = params.rows("orders")?.unwrap_or_default();
        let Rows { queries, responses, scores, masks, .. } = self.rows(params)?;
        self.take_rate(params)?;
        params.finish("step")?;
        let order = |rows: Vec<i64>| rows.into_iter().map(|row| usize::try_from(row).unwrap_or(usize::MAX)).collect();
        self.orders.replace(orders.into_iter().map(order).collect());
        self.last = self.trainer.step(&queries, &responses, &scores, masks.as_deref())?;
        self.describe(reply);
        let stats = stats_value(&self.last, reply);
        reply.set("stats", stats);
        Ok(())
    }

    fn batched_forward_pass(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let Rows { queries, responses, scores, masks, client_rows } = self.rows(params)?;
        params.finish("batched_forward_pass")?;
        let e = self.trainer.batched_forward_pass(&queries, &responses, &scores, masks.as_deref())?;
        let client_array =
            |x: &Tensor| Array::from_tensor(&x.narrow(0, client_rows.start as i64, client_rows.len() as i64));
        reply.array("logprobs", client_array(&e.logprobs)?);
        if let Some(ref_logprobs) = &e.ref_logprobs {
            reply.array("ref_logprobs", client_array(ref_logprobs)?);
        }
        reply.array("values", client_array(&e.values)?);
        reply.array("masks", client_array(&e.masks.response)?);
        Ok(())
    }

    fn compute_rewards(&self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let scores = params.needed("scores", |params, name| params.tensor(name, 1, Kind::Float))?;
        let [logprobs, ref_logprobs] = params.tensors(["logprobs", "ref_logprobs"], Kind::Float)?;
        let [masks] = params.tensors(["masks"], Kind::Bool)?;
        params.finish("compute_rewards")?;
        let result = self.trainer.rewards_of(&scores, &logprobs, &ref_logprobs, &masks)?;
        reply.array("rewards", Array::from_tensor(&result.rewards)?);
        reply.array("non_score_rewards", Array::from_tensor(&result.non_score_rewards)?);
        reply.array("kls", Array::from_tensor(&result.kl)?);
        Ok(())
    }

    fn compute_advantages(&self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let [values, rewards] = params.tensors(["values", "rewards"], Kind::Float)?;
        let [mask] = params.tensors(["mask"], Kind::Bool)?;
        params.finish("compute_advantages")?;
        let (values, advantages, returns) = self.trainer.advantages_of(&values, &rewards, &mask)?;
        reply.array("values", Array::from_tensor(&values)?);
        reply.array("advantages", Array::from_tensor(&advantages)?);
        reply.array("returns", Array::from_tensor(&returns)?);
        Ok(())
    }

    fn loss(&self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let names = ["old_logprobs", "values", "vpreds", "logprobs", "advantages", "returns"];
        let tensors = params.tensors(names, Kind::Float)?;
        let entropy = params.tensor("entropy", 2, Kind::Float)?;
        let [mask] = params.tensors(["mask"], Kind::Bool)?;
        params.finish("loss")?;
        let others = names.iter().zip(&tensors).chain(entropy.as_ref().map(|entropy| (&"entropy", entropy)));
        for (name, x) in others {
            if x.size() != mask.size() {
                let message =
                    format!("{name}: expected shape {:?}, that of the mask, found {:?}", mask.size(), x.size());
                return Err(Failure::usage(name, message));
            }
        }
        if mask.any().int64_value(&[]) == 0 {
            return Err(Failure::usage("mask", "mask: expected a token that counts, found none"));
        }
        let [old_logprobs, values, vpreds, logprobs, advantages, returns] = &tensors;
        let entropy = &entropy.unwrap_or_else(|| logprobs.zeros_like());
        let inputs = LossInputs { old_logprobs, values, entropy, vpreds, logprobs, mask: &mask, advantages, returns };
        let (policy, value, stats) = self.trainer.loss(&inputs);
        reply.set("policy_loss", policy.double_value(&[]));
        reply.set("value_loss", value.double_value(&[]));
        let stats = stats_value(&stats, reply);
        reply.set("stats", stats);
        Ok(())
    }

    /// Refuses a method that divides all rows over the ranks, if each client passes the rows of its rank alone.
    fn needs_all_rows(&self, method: &str) -> Result<(), Failure> {
        if self.rows_are_per_rank && self.trainer.learner.world().size() > 1 {
            let message = format!("{method}: with several ranks, open the loop with rows = all, and pass all rows");
            return Err(Failure::order(message));
        }
        Ok(())
    }

    fn train_minibatch(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        self.needs_all_rows("train_minibatch")?;
        let Rows { queries, responses, masks, .. } = self.rows(params)?;
        let [logprobs, values, advantages, returns] =
            params.tensors(["old_logprobs", "values", "advantages", "returns"], Kind::Float)?;
        self.take_rate(params)?;
        params.finish("train_minibatch")?;
        let e: Experience = self.trainer.experience_of((&queries, &responses), &logprobs, &values, masks.as_deref())?;
        let stats = self.trainer.train_on(&e, &advantages, &returns)?;
        let stats = stats_value(&stats, reply);
        reply.set("stats", stats);
        Ok(())
    }

    fn train_texts(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        self.needs_all_rows("train_texts")?;
        let texts = params.needed("texts", Params::rows)?;
        let coef = params.number("coef")?.unwrap_or(1.0);
        self.take_rate(params)?;
        params.finish("train_texts")?;
        let loss = self.trainer.train_on_texts(&texts, coef)?;
        reply.set("loss", loss);
        Ok(())
    }

    fn log_stats(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let numbers = params.needed("stats", Params::map)?;
        let rewards = params.needed("rewards", Params::numbers)?;
        let texts = |name| Ok::<_, Failure>(params.texts(name)?.unwrap_or_else(|| vec![String::new(); rewards.len()]));
        let (query, response) = (texts("query")?, texts("response")?);
        params.finish("log_stats")?;
        let number = |(name, value): (&String, &Value)| Some((name.clone(), Stat::Number(value.as_f64()?)));
        let stats: Stats = numbers.iter().filter_map(number).collect();
        let all = self.trainer.log_stats(&stats, Texts { query: &query, response: &response }, &rewards)?;
        let all = stats_value(&all, reply);
        reply.set("stats", all);
        Ok(())
    }
}

/// Statistics as a value: numbers, and arrays for lists.
fn stats_value(stats: &Stats, reply: &mut Reply) -> Value {
    let mut all = Map::new();
    for (name, stat) in stats.iter() {
        let value = match stat {
            Stat::Number(number) => json!(number),
            Stat::List(list) => reply.array_value(Array::from_floats(list)),
            Stat::Rows(rows) => {
                let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
                reply.rows_value(&lengths, Array::from_floats(&rows.concat()))
            }
        };
        all.insert(name.into(), value);
    }
    all.into()
}
