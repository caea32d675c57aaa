//! The requests of a loop with DeepSpeed-Chat's engine.

use super::arrays::Array;
use super::failure::Failure;
use super::params::Params;
use super::texts::text;
use super::wire::Reply;
use rlhf::compat::engine::{
    RlhfEngine, RlhfExperience, actor_loss_fn, compute_rewards, critic_loss_fn, ends, get_advantages_and_returns,
};
use rlhf::reward::Rewards;
use rlhf::settings::PpoConfig;
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

/// Reads the settings of an engine by their names, as the command line does.
pub(crate) type ReadSettings = dyn Fn(&Map<String, Value>) -> rlhf::Result<PpoConfig>;

/// An engine.
pub(super) struct EngineLoop {
    engine: RlhfEngine,
    /// Losses of the last `train_rlhf`.
    last: (f64, f64),
}

impl EngineLoop {
    /// The requests of an open loop.
    pub(super) const METHODS: &'static [&'static str] = &[
        "configure",
        "generate_experience",
        "train_rlhf",
        "train_unsupervised",
        "compute_rewards",
        "get_advantages_and_returns",
        "actor_loss_fn",
        "critic_loss_fn",
        "answers",
        "get_overflow",
        "norms",
        "encode",
        "decode",
        "save_model",
        "save_state",
        "load_state",
        "state",
    ];

    pub(super) fn is_half_loaded(&self) -> bool {
        self.engine.is_half_loaded()
    }

    /// Reads the settings and loads the models.
    pub(super) fn open(params: &Params<'_>, read: &ReadSettings, reply: &mut Reply) -> Result<Self, Failure> {
        let settings = params.needed("settings", Params::map)?;
        let num_total_iters = params.count("num_total_iters")?;
        let mixes_texts = params.flag("mixes_texts")?;
        params.finish("open")?;
        let config = read(settings).map_err(|e| Failure::from(e).for_setting("settings"))?;
        let mut engine = RlhfEngine::from_models(&config, Rewards::new())?;
        engine.num_total_iters = num_total_iters;
        engine.mixes_texts = mixes_texts.unwrap_or(engine.mixes_texts);
        reply.set("vocab_size", engine.actor().config().vocab_size);
        reply.set("has_ema", engine.learner.ema.is_some());
        reply.set("eos_token_ids", json!(engine.tokenizer.eos_ids()));
        reply.set("device", format!("{:?}", engine.actor().device()).to_lowercase());
        Ok(Self { engine, last: (f64::NAN, f64::NAN) })
    }

    /// Answers a request.
    pub(super) fn answer(&mut self, method: &str, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        match method {
            "configure" => self.configure(params, reply),
            "generate_experience" => self.generate_experience(params, reply),
            "train_rlhf" => self.train_rlhf(params, reply),
            "train_unsupervised" => self.train_unsupervised(params, reply),
            "compute_rewards" => self.compute_rewards(params, reply),
            "get_advantages_and_returns" => self.get_advantages_and_returns(params, reply),
            "actor_loss_fn" | "critic_loss_fn" => self.loss(method, params, reply),
            "answers" => self.answers(params, reply),
            "encode" | "decode" => text(&self.engine.tokenizer, method, params, reply),
            "save_model" | "save_state" | "load_state" => {
                let dir = params.needed("dir", Params::path)?;
                params.finish(method)?;
                match method {
                    "save_model" => self.engine.save_model(&dir)?,
                    "save_state" => self.engine.save_state(&dir)?,
                    _ => self.engine.load_state(&dir)?,
                }
                reply.set("steps", self.engine.steps_done());
                Ok(())
            }
            "get_overflow" | "norms" | "state" => {
                params.finish(method)?;
                self.describe(method, reply);
                Ok(())
            }
            _ => Err(Failure::unknown(method, Self::METHODS)),
        }
    }

    /// Changes hyper-parameters, by DeepSpeed-Chat's names; returns all.
    fn configure(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let mut config = self.engine.config().clone();
        let clip = config.clip_reward_value.unwrap_or(f64::INFINITY);
        let kl_coef = params.number("kl_ctl")?.unwrap_or(config.kl.kl_coef);
        let clip = params.number("clip_reward_value")?.unwrap_or(clip);
        config.kl.kl_coef = kl_coef;
        config.clip_reward_value = Some(clip).filter(|clip| clip.is_finite());
        config.cliprange = params.number("cliprange")?.unwrap_or(config.cliprange);
        config.cliprange_value = params.number("cliprange_value")?.unwrap_or(config.cliprange_value);
        config.gamma = params.number("gamma")?.unwrap_or(config.gamma);
        config.lam = params.number("lam")?.unwrap_or(config.lam);
        let mixes_texts = params.flag("mixes_texts")?;
        params.finish("configure")?;
        self.engine.set_config(&config)?;
        self.engine.mixes_texts = mixes_texts.unwrap_or(self.engine.mixes_texts);
        reply.set("kl_ctl", config.kl.kl_coef);
        reply.set("clip_reward_value", json!(config.clip_reward_value));
        reply.set("cliprange", config.cliprange);
        reply.set("cliprange_value", config.cliprange_value);
        reply.set("gamma", config.gamma);
        reply.set("lam", config.lam);
        Ok(())
    }

    /// Adds the numbers of `norms`, `get_overflow` or `state` to a reply.
    fn describe(&self, method: &str, reply: &mut Reply) {
        match method {
            "norms" => self.engine.model_norms().into_iter().for_each(|(name, norm)| reply.set(name, norm)),
            "get_overflow" => {
                let (actor, critic) = self.engine.overflow();
                reply.set("actor", actor);
                reply.set("critic", critic);
            }
            _ => {
                reply.set("steps", self.engine.steps_done());
                reply.set("num_total_iters", json!(self.engine.num_total_iters));
                reply.set("actor_loss", self.last.0);
                reply.set("critic_loss", self.last.1);
            }
        }
    }

    fn generate_experience(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let [prompts, mask] = params.tensors(["prompts", "mask"], Kind::Int64)?;
        params.finish("generate_experience")?;
        if prompts.size()[0] == 0 {
            return Err(Failure::usage("prompts", "prompts: expected at least one row, found none"));
        }
        let e = self.engine.generate_experience(&prompts, &mask)?;
        for (name, x) in [
            ("prompts", &e.prompts),
            ("logprobs", &e.logprobs),
            ("ref_logprobs", &e.ref_logprobs),
            ("value", &e.value),
            ("rewards", &e.rewards),
            ("input_ids", &e.input_ids),
            ("attention_mask", &e.attention_mask),
        ] {
            reply.array(name, Array::from_tensor(x)?);
        }
        Ok(())
    }

    fn train_rlhf(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let e = self.experience(params)?;
        params.finish("train_rlhf")?;
        self.last = self.engine.train_rlhf(&e)?;
        reply.set("actor_loss", self.last.0);
        reply.set("critic_loss", self.last.1);
        Ok(())
    }

    /// An experience, on the device of the actor.
    fn experience(&self, params: &Params<'_>) -> Result<RlhfExperience, Failure> {
        let device = self.engine.actor().device();
        let [prompts, input_ids, attention_mask] =
            params.tensors(["prompts", "input_ids", "attention_mask"], Kind::Int64)?;
        let [logprobs, ref_logprobs, value] = params.tensors(["logprobs", "ref_logprobs", "value"], Kind::Float)?;
        let rewards = params.needed("rewards", |params, name| params.tensor(name, 1, Kind::Float))?;
        for (name, x) in
            [("logprobs", &logprobs), ("ref_logprobs", &ref_logprobs), ("value", &value), ("rewards", &rewards)]
        {
            if x.isfinite().all().int64_value(&[]) == 0 {
                return Err(Failure::usage(name, format!("{name}: expected finite numbers, found others")));
            }
        }
        let (rows, width) = (prompts.size()[0], prompts.size()[1]);
        if rows == 0 || width == 0 {
            return Err(Failure::usage(
                "prompts",
                "prompts: expected at least one row of at least one token, found none",
            ));
        }
        let on_device = |x: Tensor| x.to_device(device);
        Ok(RlhfExperience {
            prompts,
            input_ids,
            attention_mask,
            logprobs: on_device(logprobs),
            ref_logprobs: on_device(ref_logprobs),
            value: on_device(value),
            rewards: on_device(rewards),
        })
    }

    fn train_unsupervised(&mut self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let texts = params.needed("input_ids", Params::rows)?;
        let coef = params.needed("unsup_coef", Params::number)?;
        params.finish("train_unsupervised")?;
        reply.set("loss", self.engine.train_unsupervised(&texts, coef)?);
        Ok(())
    }

    fn compute_rewards(&self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let [prompts, action_mask] = params.tensors(["prompts", "action_mask"], Kind::Int64)?;
        let [log_probs, ref_log_probs] = params.tensors(["log_probs", "ref_log_probs"], Kind::Float)?;
        let scores = params.needed("reward_score", |params, name| params.tensor(name, 1, Kind::Float))?;
        params.finish("compute_rewards")?;
        let shape = log_probs.size();
        same_shape(&shape, &[("ref_log_probs", &ref_log_probs), ("action_mask", &action_mask)])?;
        same_shape(&shape[..1], &[("reward_score", &scores)])?;
        let (rows, width) = (prompts.size()[0], prompts.size()[1]);
        if rows != shape[0] || width == 0 || width > shape[1] {
            let message =
                format!("prompts: expected {} rows of 1 to {} tokens, found {:?}", shape[0], shape[1], prompts.size());
            return Err(Failure::usage("prompts", message));
        }
        let rewards =
            compute_rewards(&prompts, &log_probs, &ref_log_probs, &scores, &action_mask, self.engine.config());
        reply.array("rewards", Array::from_tensor(&rewards)?);
        reply.array("ends", Array::from_tensor(&ends(&prompts, &action_mask))?);
        Ok(())
    }

    fn get_advantages_and_returns(&self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let [values, rewards] = params.tensors(["values", "rewards"], Kind::Float)?;
        let start = params.needed("start", Params::count)? as i64;
        params.finish("get_advantages_and_returns")?;
        let shape = values.size();
        same_shape(&shape, &[("rewards", &rewards)])?;
        if start >= shape[1] {
            return Err(Failure::usage("start", format!("start: expected a column below {}, found {start}", shape[1])));
        }
        let (advantages, returns) = get_advantages_and_returns(&values, &rewards, start, self.engine.config());
        reply.array("advantages", Array::from_tensor(&advantages)?);
        reply.array("returns", Array::from_tensor(&returns)?);
        Ok(())
    }

    /// The loss of the actor or of the critic on given numbers.
    fn loss(&self, method: &str, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let names = match method {
            "actor_loss_fn" => ["logprobs", "old_logprobs", "advantages"],
            _ => ["values", "old_values", "returns"],
        };
        let [new, old, targets] = params.tensors(names, Kind::Float)?;
        let [mask] = params.tensors(["mask"], Kind::Bool)?;
        params.finish(method)?;
        same_shape(&new.size(), &[(names[1], &old), (names[2], &targets), ("mask", &mask)])?;
        let config = self.engine.config();
        let loss = match method {
            "actor_loss_fn" => actor_loss_fn(&new, &old, &targets, &mask, config),
            _ => critic_loss_fn(&new, &old, &targets, &mask, config),
        };
        reply.set("loss", loss.double_value(&[]));
        Ok(())
    }

    /// Prompts and responses of an experience as texts.
    fn answers(&self, params: &Params<'_>, reply: &mut Reply) -> Result<(), Failure> {
        let e = self.experience(params)?;
        params.finish("answers")?;
        let (prompts, responses): (Vec<String>, Vec<String>) = self.engine.responses(&e)?.into_iter().unzip();
        reply.set("prompts", prompts);
        reply.set("responses", responses);
        Ok(())
    }
}

fn same_shape(shape: &[i64], others: &[(&str, &Tensor)]) -> Result<(), Failure> {
    match others.iter().find(|(_, other)| other.size() != shape) {
        Some((name, other)) => {
            Err(Failure::usage(name, format!("{name}: expected shape {shape:?}, found {:?}", other.size())))
        }
        None => Ok(()),
    }
}
