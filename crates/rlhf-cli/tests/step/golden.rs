//! [`StepTrainer`] against TRL 0.11.4's own `step()` (`tests/golden/trl_legacy`): its rows are given, and the order of its
//! mini-batches; everything else is ours.

use crate::support::{
    Tensors, assert_close, chosen_golden, golden, join_ranks, model_options, near, on_host, read_json, run_as_ranks,
    say,
};
use rlhf::compat::step::{Stat, Stats, StepConfig, StepTrainer};
use rlhf::dist::World;
use rlhf::model::{CausalLm, CausalLmWithValueHead, ValueHeadInit};
use rlhf::rl::experience::Experience;
use rlhf::rl::math::{gae, keep, whiten};
use rlhf::rl::shaping::Targets;
use rlhf::tokenizer::Tokenizer;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};

const ROWS: usize = 8;

/// One run of two steps.
struct Variant {
    dir: PathBuf,
    info: Value,
    data: Tensors,
    config: StepConfig,
}

/// Queries, responses and masks of one step.
struct Rows {
    queries: Vec<Vec<i64>>,
    responses: Vec<Vec<i64>>,
    masks: Option<Vec<Vec<bool>>>,
    scores: Vec<f64>,
}

impl Variant {
    fn read(dir: &Path) -> Self {
        let info = read_json(&dir.join("info.json"));
        let config = config(&info["config"]);
        Self { dir: dir.to_path_buf(), data: Tensors::read(&dir.join("data.safetensors")), info, config }
    }

    fn name(&self) -> &str {
        self.info["variant"].as_str().unwrap()
    }

    /// Whether the models are encoder-decoders. TRL's responses then start with the decoder's start token, and its mask leaves out the
    /// token after it.
    fn is_encoder_decoder(&self) -> bool {
        self.name().starts_with("t5")
    }

    fn tolerance(&self, name: &str) -> f64 {
        let noise = self.info["noise_floor_f32_vs_f64"][name].as_f64().unwrap_or(0.0);
        (5.0 * noise).max(2e-5)
    }

    fn ids(&self, name: &str) -> Vec<i64> {
        Vec::try_from(self.data.get(name).to_kind(Kind::Int64)).unwrap()
    }

    fn rows(&self, step: usize) -> Rows {
        let each = |what: &str| (0..ROWS).map(|i| self.ids(&format!("step{step}.{what}.{i}"))).collect::<Vec<_>>();
        let (queries, mut responses) = (each("query"), each("response"));
        let mut masks: Vec<Vec<bool>> =
            each("response_mask").iter().map(|row| row.iter().map(|&kept| kept == 1).collect()).collect();
        if self.is_encoder_decoder() {
            assert!(responses.iter().all(|response| response[0] == 0));
            for (response, mask) in responses.iter_mut().zip(&mut masks) {
                response.remove(0);
                mask.remove(0);
                mask[0] = false;
            }
        }
        // Some runs have masks and are not given them: the tokens that count tell.
        let counted: i64 = self.data.get(&format!("step{step}.masks")).sum(Kind::Int64).int64_value(&[]);
        let has_masks = counted < responses.iter().map(Vec::len).sum::<usize>() as i64;
        let scores = Vec::try_from(self.data.get(&format!("step{step}.scores")).to_kind(Kind::Double)).unwrap();
        Rows { queries, responses, masks: has_masks.then_some(masks), scores }
    }

    /// Start of each row's response in TRL's tensors, which are of whole sequences.
    fn starts(&self, step: usize) -> Vec<i64> {
        if self.is_encoder_decoder() {
            // The tensors are those of the decoder.
            return vec![0; ROWS];
        }
        let attention = self.data.rows(&format!("step{step}.attention_mask"));
        let padding = |row: &Vec<i64>| row.iter().position(|&seen| seen == 1).unwrap() as i64;
        let queries = self.rows(step).queries;
        attention.iter().zip(queries).map(|(row, query)| padding(row) + query.len() as i64 - 1).collect()
    }

    fn is_left_padded(&self) -> bool {
        (0..2).any(|step| self.data.rows(&format!("step{step}.attention_mask")).iter().any(|row| row[0] == 0))
    }

    /// TRL's tensor in slots of the response, as ours are, 0 outside `mask`.
    fn slots(&self, step: usize, name: &str, mask: &Tensor) -> Tensor {
        let all: Vec<usize> = (0..ROWS).collect();
        self.row_slots(step, self.data.get(&format!("step{step}.{name}")), &all, mask)
    }

    /// The same of a tensor that has these rows of the step.
    fn row_slots(&self, step: usize, whole: &Tensor, rows: &[usize], mask: &Tensor) -> Tensor {
        let (width, starts, responses) = (mask.size()[1], self.starts(step), self.rows(step).responses);
        let parts: Vec<Tensor> = (0i64..)
            .zip(rows)
            .map(|(at, &row)| {
                let length = responses[row].len() as i64;
                whole.get(at).narrow(0, starts[row], length).constant_pad_nd([0, width - length])
            })
            .collect();
        keep(&Tensor::stack(&parts, 0).to_kind(Kind::Float), &on_host(mask).index_select(0, &index(rows)))
    }

    /// The mini-batches of each pass of each step, in order.
    fn micros(&self, step: usize) -> Vec<(usize, Vec<usize>)> {
        let micros = self.info["micro"].as_array().unwrap().iter().enumerate();
        let step_micros = micros.filter(|(_, micro)| micro["step"] == step);
        step_micros
            .map(|(at, _)| (at, self.ids(&format!("micro{at:02}.inds"))))
            .map(|(at, ids)| (at, ids.into_iter().map(|row| row as usize).collect()))
            .collect()
    }

    /// TRL's ratios of one mini-batch, those of the tokens that count, row after row.
    fn ratios(&self, step: usize, at: usize, rows: &[usize]) -> Tensor {
        let masks = self.data.get(&format!("step{step}.masks")).index_select(0, &index(rows));
        self.data.get(&format!("micro{at:02}.ratio")).masked_select(&masks.to_kind(Kind::Bool))
    }

    fn trainer(&self) -> StepTrainer {
        let init = self.dir.parent().unwrap().join("init");
        let options = model_options();
        let (policy, reference) =
            if self.is_encoder_decoder() { ("t5_vhead", "t5_ref") } else { ("policy_vhead", "ref") };
        let (policy, reference) = (init.join(policy), init.join(reference));
        let model = CausalLmWithValueHead::from_pretrained(&policy, ValueHeadInit::Checkpoint, options);
        let tokenizer = Tokenizer::from_pretrained(&reference).unwrap();
        let reference = CausalLm::from_pretrained(&reference, options).unwrap();
        let trainer = StepTrainer::new(self.config.clone(), model.unwrap(), Some(reference), tokenizer).unwrap();
        let epochs = self.config.ppo_epochs;
        let orders: Vec<Vec<usize>> = (0..2)
            .flat_map(|step| {
                let all = self.micros(step).into_iter().flat_map(|(_, rows)| rows).collect::<Vec<_>>();
                // Passes that TRL left out, if we do not, go in the order of the rows.
                (0..epochs)
                    .map(move |epoch| {
                        all.chunks(ROWS).nth(epoch).map_or_else(|| (0..ROWS).collect(), <[usize]>::to_vec)
                    })
                    .collect::<Vec<_>>()
            })
            .collect();
        trainer.with_order(move |pass, _| orders[pass as usize].clone())
    }
}

fn index(rows: &[usize]) -> Tensor {
    Tensor::from_slice(&rows.iter().map(|&row| row as i64).collect::<Vec<_>>())
}

fn config(args: &Value) -> StepConfig {
    let usual = StepConfig::default();
    let number = |name: &str, usual: f64| args[name].as_f64().unwrap_or(usual);
    let size = |name: &str, usual: usize| args[name].as_u64().map_or(usual, |size| size as usize);
    let flag = |name: &str, usual: bool| args[name].as_bool().unwrap_or(usual);
    let kl_penalty = match args["kl_penalty"].as_str().unwrap_or("kl") {
        "kl" => rlhf::rl::math::KlEstimator::K1,
        "abs" => rlhf::rl::math::KlEstimator::Abs,
        "mse" => rlhf::rl::math::KlEstimator::Mse,
        "full" => rlhf::rl::math::KlEstimator::Full,
        other => panic!("unknown penalty {other}"),
    };
    StepConfig {
        kl_penalty,
        learning_rate: number("learning_rate", usual.learning_rate),
        adap_kl_ctrl: flag("adap_kl_ctrl", usual.adap_kl_ctrl),
        init_kl_coef: number("init_kl_coef", usual.init_kl_coef),
        target: number("target", usual.target),
        horizon: number("horizon", usual.horizon),
        gamma: number("gamma", usual.gamma),
        lam: number("lam", usual.lam),
        cliprange: number("cliprange", usual.cliprange),
        cliprange_value: number("cliprange_value", usual.cliprange_value),
        vf_coef: number("vf_coef", usual.vf_coef),
        batch_size: size("batch_size", usual.batch_size),
        mini_batch_size: size("mini_batch_size", usual.mini_batch_size),
        gradient_accumulation_steps: size("gradient_accumulation_steps", usual.gradient_accumulation_steps),
        ppo_epochs: size("ppo_epochs", usual.ppo_epochs),
        max_grad_norm: args["max_grad_norm"].as_f64(),
        early_stopping: flag("early_stopping", usual.early_stopping),
        target_kl: number("target_kl", usual.target_kl),
        ratio_threshold: number("ratio_threshold", usual.ratio_threshold),
        use_score_scaling: flag("use_score_scaling", usual.use_score_scaling),
        use_score_norm: flag("use_score_norm", usual.use_score_norm),
        score_clip: args["score_clip"].as_f64(),
        whiten_rewards: flag("whiten_rewards", usual.whiten_rewards),
        ..usual
    }
}

/// What the rollout and the maths behind it give, before anything is learnt.
fn compare_rollout(variant: &Variant, step: usize, e: &Experience, t: &Targets) {
    // TRL's tensors are in the host's memory, and so is what is made of them and of ours.
    let mask = &on_host(&e.masks.response);
    let check = |name: &str, found: &Tensor| {
        let full = format!("step{step}.{name}");
        assert_close(
            &format!("{}: {full}", variant.name()),
            found,
            &variant.slots(step, name, mask),
            variant.tolerance(&full),
        );
    };
    let scores = on_host(&e.scores) - variant.data.get(&format!("step{step}.scores_processed"));
    near("scores", scores.abs().max().double_value(&[]), 0.0, 1e-5);
    assert_close("mask", &mask.to_kind(Kind::Float), &variant.slots(step, "masks", &mask.ones_like()), 0.0);
    if variant.is_left_padded() {
        // TRL gives padded rows positions that start at the pad; for rows without one its values are the same.
        let attention = variant.data.rows(&format!("step{step}.attention_mask"));
        for row in (0..ROWS).filter(|&row| attention[row][0] == 1) {
            for (name, found) in [
                ("logprobs", &e.logprobs),
                ("ref_logprobs", e.ref_logprobs.as_ref().unwrap()),
                ("values_raw", &e.values),
            ] {
                let expected = variant.slots(step, name, mask).get(row as i64);
                assert_close(name, &found.get(row as i64), &expected, 2e-5);
            }
        }
        return;
    }
    check("logprobs", &e.logprobs);
    check("ref_logprobs", e.ref_logprobs.as_ref().unwrap());
    check("values", &e.values);
    check("kls", &t.kl);
    if variant.config.whiten_rewards {
        // TRL whitens later, and what it adds to pads there runs into the advantages: ours are those without it.
        let rewards = whiten(&variant.slots(step, "rewards", mask), mask, false);
        assert_close("whitened rewards", &t.rewards, &rewards, 1e-4);
        let (advantages, returns) = gae(&rewards, &on_host(&e.values), mask, variant.config.gamma, variant.config.lam);
        assert_close("returns without the leak", &t.returns, &returns, 1e-4);
        assert_close("advantages without the leak", &t.advantages, &whiten(&advantages, mask, true), 1e-4);
        let expected = variant.slots(step, "returns", mask);
        let gap = (expected - on_host(&t.returns)).abs().max().double_value(&[]);
        assert!(gap > 1e-2, "{}: TRL's returns have the leak: {gap}", variant.name());
        return;
    }
    check("rewards", &t.rewards);
    check("advantages", &t.advantages);
    check("returns", &t.returns);
}

fn compare(variant: &Variant) {
    let mut trainer = variant.trainer();
    for step in 0..2 {
        let Rows { queries, responses, masks, scores } = variant.rows(step);
        let masks = masks.as_deref();
        let expected = &variant.info["steps"][step];
        near("kl_coef before", trainer.kl_coef(), expected["kl_coef_before"].as_f64().unwrap(), 1e-6);

        // `step` makes this again, from the same weights.
        let processed = variant.data.get(&format!("step{step}.scores_processed")).to_kind(Kind::Double);
        let processed = Vec::<f64>::try_from(processed).unwrap();
        let e = trainer.batched_forward_pass(&queries, &responses, &processed, masks).unwrap();
        let (kl, rewards) = trainer.compute_rewards(&e);
        let (advantages, returns) = trainer.compute_advantages(&e, &rewards);
        let targets = Targets { kl, kl_coef: trainer.kl_coef(), rewards, advantages, returns };
        compare_rollout(variant, step, &e, &targets);
        // A rank has the gradient of its rows until the optimizer step.
        let alone = World::of_process().size() == 1;
        if alone && step == 0 && variant.dir.join("grad0.safetensors").is_file() && !variant.is_left_padded() {
            compare_gradient(variant, &trainer, &e, &targets);
        }
        if step == 0 && !variant.is_left_padded() && !variant.config.whiten_rewards {
            compare_mini_batches(variant, &e, &targets);
        }

        let stats = trainer.step(&queries, &responses, &scores, masks).unwrap();
        let Some(whole) = compare_ratios(variant, step, &stats) else { return };
        if !whole {
            say(&format!("{}: compared up to the optimizer step that TRL takes otherwise", variant.name()));
            return;
        }
        compare_stats(variant, step, &stats);
        near("kl_coef after", trainer.kl_coef(), expected["kl_coef_after"].as_f64().unwrap(), 1e-6);
        if variant.config.use_score_scaling {
            let (mean, std) = trainer.score_moments();
            near("running mean", mean, expected["running"]["mean"].as_f64().unwrap(), 1e-5);
            near("running deviation", std, expected["running"]["std"].as_f64().unwrap(), 1e-5);
        }
    }
    compare_weights(variant, &trainer);
    say(&format!("{}: compared whole, 2 steps", variant.name()));
}

/// Compares the model's evaluation of each mini-batch of the first step before the optimizer step, as far as TRL's is as
/// documented.
fn compare_mini_batches(variant: &Variant, e: &Experience, targets: &Targets) {
    let Rows { queries, responses, masks, scores } = variant.rows(0);
    let mut trainer = variant.trainer();
    for (i, (at, rows)) in variant.micros(0).into_iter().enumerate() {
        let now = trainer.batched_forward_pass(&queries, &responses, &scores, masks.as_deref()).unwrap();
        for (name, found) in [("new_logprobs", &now.logprobs), ("vpreds", &now.values)] {
            let name = format!("micro{at:02}.{name}");
            let mask = &e.masks.response;
            let expected = variant.row_slots(0, variant.data.get(&name), &rows, mask);
            let found = on_host(&keep(found, mask)).index_select(0, &index(&rows));
            assert_close(&format!("{}: {name}", variant.name()), &found, &expected, variant.tolerance(&name));
        }
        let far = variant.ratios(0, at, &rows).mean(Kind::Float).double_value(&[]) > variant.config.ratio_threshold;
        let clipped_once = variant.config.max_grad_norm.is_some() && i == 1;
        if variant.config.gradient_accumulation_steps > 1 || far || clipped_once {
            return;
        }
        trainer.train_minibatch(e, targets, &rows).unwrap();
    }
}

/// Compares the ratios of the mini-batches as far as TRL does what its documentation states; whether that is to the end,
/// and nothing where not
/// even the first mini-batch is.
fn compare_ratios(variant: &Variant, step: usize, stats: &Stats) -> Option<bool> {
    if variant.is_left_padded() || variant.config.whiten_rewards {
        say(&format!("{}: compared up to the first tensor that TRL makes otherwise", variant.name()));
        return None;
    }
    let Some(Stat::List(found)) = stats.stat("ppo/policy/ratio") else { panic!("no ratios") };
    let mut found = found.as_slice();
    let micros = variant.micros(step);
    for (i, (at, rows)) in micros.iter().enumerate() {
        let expected = variant.ratios(step, *at, rows);
        let (mine, rest) = found.split_at(expected.numel());
        found = rest;
        let what = format!("{}: micro{at:02}.ratio", variant.name());
        // Ratios are exponentials of sums of what the noise is of.
        let most = expected.max().double_value(&[]).max(1.0);
        let tolerance = variant.tolerance(&format!("micro{at:02}.ratio")) * most;
        assert_close(&what, &Tensor::from_slice(mine), &expected, tolerance);
        let mean = expected.mean(Kind::Float).double_value(&[]);
        // TRL clips the first step only, and where it skips one Adam still moves the weights by its momentum.
        if (variant.config.max_grad_norm.is_some() && i == 1) || mean > variant.config.ratio_threshold {
            return Some(false);
        }
    }
    assert!(found.is_empty(), "{}: TRL took {} mini-batches, we more", variant.name(), micros.len());
    Some(true)
}

fn compare_stats(variant: &Variant, step: usize, stats: &Stats) {
    let expected = variant.info["steps"][step]["stats"].as_object().unwrap();
    assert!(expected.len() > 20);
    for (name, expected) in expected {
        // TRL counts the start token.
        let counted = f64::from(u8::from(variant.is_encoder_decoder() && name == "tokens/responses_len_mean"));
        let expected = expected.as_f64().unwrap() - counted;
        let found = stats.get(name).unwrap_or_else(|| panic!("{}: no statistic `{name}`", variant.name()));
        near(&format!("{}: step{step} {name}", variant.name()), found, expected, 2e-4 * expected.abs().max(1.0));
    }
    let lengths: Vec<f32> = variant.rows(step).responses.iter().map(|row| row.len() as f32).collect();
    assert_eq!(stats.stat("tokens/responses_dist"), Some(&Stat::List(lengths)));
    let lengths: Vec<f32> = variant.rows(step).queries.iter().map(|row| row.len() as f32).collect();
    assert_eq!(stats.stat("tokens/queries_dist"), Some(&Stat::List(lengths)));
    compare_lists(variant, step, stats);
}

fn compare_lists(variant: &Variant, step: usize, stats: &Stats) {
    let responses = variant.rows(step).responses;
    let longest = responses.iter().map(Vec::len).max().unwrap();
    let all = Tensor::ones([ROWS as i64, longest as i64], (Kind::Bool, tch::Device::Cpu));
    let mask = variant.slots(step, "masks", &all).to_kind(Kind::Bool);
    let what = |name: &str| format!("{}: step{step} {name}", variant.name());
    for name in ["logprobs", "ref_logprobs"] {
        // Ours are 0 where a token does not count.
        let expected = variant.slots(step, name, &mask);
        let Some(Stat::Rows(found)) = stats.stat(&format!("objective/{name}")) else { panic!("no rows of {name}") };
        for (row, found) in found.iter().enumerate() {
            assert_eq!(found.len(), responses[row].len(), "{}", what(name));
            let expected = expected.get(row as i64).narrow(0, 0, found.len() as i64);
            assert_close(&what(name), &Tensor::from_slice(found), &expected, 1e-4);
        }
    }
    let list = |name: &str| match stats.stat(name) {
        Some(Stat::List(found)) => Tensor::from_slice(found),
        other => panic!("{}: {other:?}", what(name)),
    };
    let kls = variant.slots(step, "kls", &mask).sum_dim_intlist(1i64, false, Kind::Float);
    assert_close(&what("kl_dist"), &list("objective/kl_dist"), &kls, 2e-4);
    if let Some(name) = variant.data.names().find(|name| *name == format!("step{step}.stats.objective.kl_dist")) {
        assert_close(name, &list("objective/kl_dist"), &variant.data.get(name).flatten(0, -1), 2e-4);
    }
    let advantages = variant.slots(step, "advantages", &mask);
    let row_advantages =
        |rows: &[usize]| advantages.index_select(0, &index(rows)).masked_select(&mask.index_select(0, &index(rows)));
    let expected: Vec<Tensor> = variant.micros(step).iter().map(|(_, rows)| row_advantages(rows)).collect();
    assert_close(&what("advantages"), &list("ppo/policy/advantages"), &Tensor::cat(&expected, 0), 2e-4);
}

/// GPT-2's key biases have no gradient but round-off, of which Adam makes whole steps.
fn without_key_bias(name: &str, found: &Tensor, expected: &Tensor) -> Tensor {
    let found = found.detach().copy();
    if name.ends_with("c_attn.bias") {
        let width = found.size()[0] / 3;
        found.narrow(0, width, width).copy_(&expected.narrow(0, width, width));
    }
    found
}

fn stored_name(name: &str) -> String {
    if name.starts_with("v_head.") { name.to_string() } else { format!("pretrained_model.{name}") }
}

fn compare_weights(variant: &Variant, trainer: &StepTrainer) {
    let golden = Tensors::read(&variant.dir.join("final.safetensors"));
    let mut compared = 0;
    for param in trainer.learner.policy.params() {
        let name = stored_name(&param.name);
        // Some runs store the smaller tensors only.
        if !golden.names().any(|stored| stored.split('[').next() == Some(name.as_str())) {
            continue;
        }
        compared += 1;
        let part = golden.part(&name);
        let found = without_key_bias(&name, &part.select(&param.tensor), part.tensor);
        let mut tolerance = variant.tolerance(&format!("weights_after_step1.{name}"));
        if name.ends_with("c_attn.bias") {
            // Its floor is the key bias's, which is not compared. TRL's own queries and values differ from f64 by 1.8e-4.
            tolerance = tolerance.min(5.0 * 1.8e-4);
        }
        assert_close(&format!("{}: {name}", variant.name()), &found, part.tensor, tolerance);
    }
    assert!(compared > 15 && compared == golden.names().count(), "{}: {compared} weights", variant.name());
}

fn compare_gradient(variant: &Variant, trainer: &StepTrainer, e: &Experience, targets: &Targets) {
    let golden = Tensors::read(&variant.dir.join("grad0.safetensors"));
    let (_, rows) = &variant.micros(0)[0];
    trainer.learner.gradients(e, targets, rows, rows.len(), true).unwrap();
    for param in trainer.learner.policy.params() {
        let name = stored_name(&param.name);
        let mut tensor = param.tensor.shallow_clone();
        let tolerance = variant.tolerance(&format!("grad0.{name}"));
        let part = golden.part(&name);
        assert_close(
            &format!("{}: grad0.{name}", variant.name()),
            &part.select(&tensor.grad()),
            part.tensor,
            tolerance,
        );
        tensor.zero_grad();
    }
}

#[test]
fn every_golden_run_of_trls_step_is_reproduced_to_the_weights() {
    for dir in golden_runs() {
        compare(&Variant::read(&dir));
    }
}

#[test]
fn golden_runs_of_step_are_reproduced_by_2_ranks() {
    run_as_ranks("step::golden::golden_runs_of_step_on_one_of_several_ranks", 2, &[]);
}

#[test]
#[ignore = "one rank of the test above, which starts it"]
fn golden_runs_of_step_on_one_of_several_ranks() {
    join_ranks();
    for dir in golden_runs() {
        compare(&Variant::read(&dir));
    }
}

fn golden_runs() -> Vec<PathBuf> {
    let dir = chosen_golden().join("trl_legacy");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("data.safetensors").is_file() && !path.ends_with("seq2seq_t5"))
        .collect();
    dirs.sort();
    assert!(!dirs.is_empty(), "{}: no golden run", dir.display());
    dirs
}

#[test]
fn the_golden_runs_of_step_hold_what_their_names_promise() {
    let read = |name: &str| Variant::read(&golden().join("trl_legacy").join(name));
    assert!(read("left_padding").is_left_padded() && !read("fixed_kl").is_left_padded());
    assert!(read("response_masks").rows(0).masks.is_some() && read("fixed_kl").rows(0).masks.is_none());
    let early = read("early_stopping");
    assert!(early.micros(0).len() < early.config.ppo_epochs, "one mini-batch a pass");
    let threshold = read("ratio_threshold");
    let above = |ratios: Tensor| ratios.mean(Kind::Float).double_value(&[]) > threshold.config.ratio_threshold;
    assert!(
        threshold.micros(0).into_iter().any(|(at, rows)| above(threshold.ratios(0, at, &rows))),
        "no mini-batch is above the threshold"
    );
    assert_eq!(read("ga2").config.gradient_accumulation_steps, 2);
    let masks = read("t5").rows(0).masks.unwrap();
    assert!(masks.iter().all(|mask| !mask[0] && mask[1..].iter().all(|kept| *kept)), "the first token is masked");
    let fast = read("adaptive_fast");
    let moved = fast.info["steps"][1]["kl_coef_after"].as_f64().unwrap();
    assert!((moved - fast.config.init_kl_coef).abs() > 0.01, "{moved}");
}
