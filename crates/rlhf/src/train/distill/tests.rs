//! Rows, responses and passes against TRL's numbers (`tests/golden/trl_distill`) and against each other.

use super::super::supervised::{Sums, Supervised, UpdateRows};
use super::learn::Source;
use super::rows::{DistillRow, Limits, end_before_unknown, read_rows};
use super::totals::Totals;
use super::{Distillation, Gathered};
use crate::data::{Dataset, LongPrompts, PromptLimit};
use crate::settings::{DistillConfig, DistillLoss};
use rlhf_base::dist::World;
use rlhf_base::metrics::Metrics;
use rlhf_lm::generate::{FinishReason, Response};
use rlhf_lm::model::{Batch, CausalLm, ModelOptions};
use rlhf_lm::optim::Optimizer;
use rlhf_lm::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};

const TOLERANCE: f64 = 3e-5;

fn golden() -> PathBuf {
    tch::set_num_threads(1);
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn runs() -> Value {
    let path = golden().join("trl_distill/runs.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn load(name: &str) -> CausalLm {
    CausalLm::from_pretrained(&golden().join("trl_new/init").join(name), ModelOptions::default()).unwrap()
}

fn config() -> DistillConfig {
    let mut config = DistillConfig::new("m", "t", "d", "o");
    (config.train_batch_size, config.optimizer.adam_epsilon) = (Some(8), 1e-6);
    config
}

/// A run over these rows.
fn task<'a>(config: &'a DistillConfig, rows: Vec<DistillRow>, teacher: &str) -> Distillation<'a> {
    let tokenizer = Tokenizer::from_pretrained(&golden().join("trl_new/init/llama_policy")).unwrap();
    let train = Gathered { lens: vec![rows.len()], rows, warnings: Vec::new() };
    let eval = Vec::new();
    let stop_strings = None;
    Distillation {
        config,
        teacher: load(teacher),
        tokenizer,
        stop_strings,
        train,
        eval,
        num_tokens: 0,
        shown: Vec::new(),
    }
}

fn ids(value: &Value) -> Vec<i64> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A row of tokens and labels, as TRL has them.
fn labelled(row: &Value) -> DistillRow {
    let tokens = ids(&row[0]);
    let labels = ids(&row[1]);
    let prompt_len = labels.iter().take_while(|label| **label == -100).count();
    DistillRow { tokens, prompt_len, masked: Vec::new() }
}

/// One update's gradients, of all rows.
fn learn(task: &Distillation<'_>, model: &CausalLm, rows: &[DistillRow], max_tokens: usize) -> Metrics {
    let places: Vec<usize> = (0..rows.len()).collect();
    let world = World::single();
    let batch = UpdateRows { rows: &places, update: 0, loss_scale: 1.0, max_tokens, world: &world };
    let rows: Vec<&DistillRow> = rows.iter().collect();
    let (pass_sums, _) = task.learn(model, &batch, &rows, false).unwrap();
    let mut sums = Totals::default();
    sums.add_passes(&pass_sums, true);
    sums.add_step(0.0);
    let mut metrics = Metrics::default();
    sums.push(&mut metrics);
    metrics
}

fn assert_near(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() < TOLERANCE * expected.abs().max(1.0), "{what}: {found} is not {expected}");
}

/// Compares the weights of a run with the stored ones.
fn assert_weights(name: &str, model: &CausalLm) {
    let stored = Tensor::read_safetensors(golden().join("trl_distill/final.safetensors")).unwrap();
    let prefix = format!("{name}.");
    let mut compared = 0;
    for (name, expected) in stored.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(&prefix)?, tensor))) {
        let (whole, thinned) = name.split_once('[').map_or((name, false), |(whole, _)| (whole, true));
        let param_name = whole.trim_start_matches("base_model.model.").replace(".default", "");
        let found = model.params().iter().find(|param| param.name.replace("base_model.model.", "") == param_name);
        let found = found.unwrap_or_else(|| panic!("{param_name}")).tensor.detach();
        let found = if thinned { found.slice(0, None, None, 7) } else { found };
        let gap = (found - expected).abs().max().double_value(&[]);
        assert!(gap < TOLERANCE, "{prefix}{name}: {gap:e}");
        compared += 1;
    }
    assert!(compared > 0, "{prefix}");
}

#[test]
fn rows_have_the_tokens_prompts_and_cuts_of_trls_gkd_trainer() {
    let runs = runs();
    for (name, data, model, max_length) in [
        ("ids", "ids", "trl_new/init/llama_policy", None),
        ("chat", "chat", "trl_tools/init/policy", None),
        ("chat_cut", "chat", "trl_tools/init/policy", Some(20)),
    ] {
        let mut config = config();
        (config.lmbda, config.max_length) = (0.5, max_length);
        let tokenizer = Tokenizer::from_pretrained(&golden().join(model)).unwrap();
        let dataset = Dataset::read(&golden().join(format!("trl_distill/{data}.jsonl")), "train").unwrap();
        let prompt = Some(PromptLimit::of_context(1000));
        let limits = Limits { vocab: 1 << 20, prompt, max_length: max_length.unwrap_or(1000) };
        let (rows, _) = read_rows(dataset, &config, &tokenizer, &limits).unwrap();
        let expected: Vec<DistillRow> = runs[format!("rows.{name}")].as_array().unwrap().iter().map(labelled).collect();
        assert_eq!(rows, expected, "{name}");
    }
}

#[test]
fn runs_on_the_students_responses_have_the_numbers_of_trls_distillation_trainer_to_the_weights() {
    let runs = runs();
    for name in ["on_policy", "on_policy_forward", "on_policy_jsd"] {
        let run = &runs[format!("distillation.{name}")];
        let mut config = config();
        config.loss.beta = run["settings"]["beta"].as_f64().unwrap();
        config.temperature = run["settings"]["temperature"].as_f64().unwrap();
        let task = task(&config, Vec::new(), "llama_ref");
        let mut model = load("llama_policy");
        model.set_trainable(true);
        let mut optimizer = Optimizer::of_model(&model, &config.optimizer, None).unwrap();
        let mut num_tokens = 0;
        for (step, responses) in run["steps"].as_array().unwrap().iter().enumerate() {
            let pairs: Vec<(Vec<i64>, Response)> = responses
                .as_array()
                .unwrap()
                .iter()
                .map(|pair| {
                    let tokens = ids(&pair[1]);
                    let stops = tokens.last().is_some_and(|id| task.tokenizer.eos_ids().contains(id));
                    let finish = if stops { FinishReason::Stop } else { FinishReason::Length };
                    let logprobs = vec![0.0; tokens.len()];
                    (ids(&pair[0]), Response { tokens, logprobs, finish, sets: None, inserted: Vec::new() })
                })
                .collect();
            let rows: Vec<DistillRow> = pairs.iter().map(|(p, r)| DistillRow::sampled(p, r)).collect();
            let expected = |metric: &str| run["metrics"][metric][step].as_f64().unwrap();
            let metrics = learn(&task, &model, &rows, 4096);
            for metric in ["loss", "entropy"] {
                assert_near(metrics.get(metric).unwrap(), expected(metric), &format!("{name}, step {step}: {metric}"));
            }
            num_tokens += rows.iter().map(|row| row.tokens.len()).sum::<usize>();
            assert_eq!(num_tokens as f64, expected("num_tokens"));
            let mut sums = Totals::default();
            let responses: Vec<Response> = pairs.into_iter().map(|(_, response)| response).collect();
            sums.add_responses(&responses, true, 0.0);
            sums.add_step(0.0);
            let mut response_metrics = Metrics::default();
            sums.push(&mut response_metrics);
            for (metric, found) in response_metrics.iter().filter(|(metric, _)| metric.starts_with("completions/")) {
                assert_near(found, expected(metric), metric);
            }
            let norm = optimizer.step(expected("learning_rate")).unwrap();
            assert_near(norm, expected("grad_norm"), &format!("{name}, step {step}: grad_norm"));
        }
        assert_weights(name, &model);
    }
}

#[test]
fn losses_of_sampled_responses_are_those_of_gkd_trainer_but_for_its_divisor_the_tokens_of_the_rows() {
    let runs = runs();
    for by in ["student", "teacher"] {
        let run = &runs[format!("gkd_on_policy.{by}")];
        let mut config = config();
        (config.loss.beta, config.temperature, config.loss_temperature) = (0.5, 0.9, Some(1.0));
        let task = task(&config, Vec::new(), "llama_ref");
        let mut model = load("llama_policy");
        model.set_trainable(true);
        let rows: Vec<DistillRow> = run["rows"].as_array().unwrap().iter().map(labelled).collect();
        let tokens: usize = rows.iter().map(DistillRow::loss_tokens).sum();
        let divided = run["divided_by"].as_f64().unwrap();
        assert!(tokens as f64 != divided);
        let found = learn(&task, &model, &rows, 4096).get("loss").unwrap() * tokens as f64 / divided;
        assert_near(found, run["loss"].as_f64().unwrap(), by);
    }
}

#[test]
fn an_adapter_that_has_an_effect_is_trained_as_in_trl() {
    let run = &runs()["gkd.lora"];
    let mut config = config();
    (config.loss.beta, config.disable_dropout) = (0.0, true);
    let mut model = load("llama_policy");
    model.load_adapter(&golden().join("trl_distill/adapter")).unwrap();
    model.set_trainable(true);
    let task = task(&config, Vec::new(), "llama_ref");
    let mut optimizer = Optimizer::of_model(&model, &config.optimizer, None).unwrap();
    let rows: Vec<DistillRow> = runs()["rows.ids"].as_array().unwrap().iter().map(labelled).collect();
    for step in 0..3 {
        let metrics = learn(&task, &model, &rows, 4096);
        assert_near(metrics.get("loss").unwrap(), run["metrics"]["loss"][step].as_f64().unwrap(), "loss");
        optimizer.step(run["metrics"]["learning_rate"][step].as_f64().unwrap()).unwrap();
    }
    assert_weights("lora", &model);
}

/// All gradients of a model, one after another.
fn gradients(model: &CausalLm) -> Tensor {
    let all: Vec<Tensor> = model.trainable_params().map(|param| param.tensor.grad().view([-1])).collect();
    Tensor::cat(&all, 0)
}

#[test]
fn small_passes_have_the_gradients_of_large_ones_for_each_loss() {
    let rows: Vec<DistillRow> = runs()["rows.ids"].as_array().unwrap().iter().map(labelled).collect();
    for (loss, beta, top_k) in [
        (DistillLoss::Jsd, 0.0, 0),
        (DistillLoss::Jsd, 0.3, 0),
        (DistillLoss::Jsd, 1.0, 0),
        (DistillLoss::Jsd, 0.5, 4),
        (DistillLoss::ReverseKlAdvantage, 1.0, 0),
    ] {
        let mut config = config();
        (config.loss.loss_type, config.loss.beta, config.loss.loss_top_k) = (loss, beta, top_k);
        let task = task(&config, Vec::new(), "llama_ref");
        let [large, small] = [4096, 24].map(|max_tokens| {
            let mut model = load("llama_policy");
            model.set_trainable(true);
            let metrics = learn(&task, &model, &rows, max_tokens);
            (gradients(&model), metrics)
        });
        let gap = (&large.0 - &small.0).abs().max();
        let size = large.0.abs().max();
        assert!(gap.double_value(&[]) < 1e-5 * size.double_value(&[]).max(1e-2), "{loss:?} {beta}: {gap:?} {size:?}");
        for ((name, large), (_, small)) in large.1.iter().zip(small.1.iter()) {
            assert_near(small, large, name);
        }
    }
}

#[test]
fn a_policy_gradient_is_that_of_log_probabilities_times_the_difference_to_the_teachers() {
    let rows: Vec<DistillRow> = runs()["rows.ids"].as_array().unwrap().iter().map(labelled).collect();
    let mut config = config();
    (config.loss.loss_type, config.temperature) = (DistillLoss::ReverseKlAdvantage, 0.8);
    let task = task(&config, Vec::new(), "llama_ref");
    let [mut trained, mut plain] = [load("llama_policy"), load("llama_policy")];
    trained.set_trainable(true);
    plain.set_trainable(true);
    let metrics = learn(&task, &trained, &rows, 4096);
    let sequences: Vec<&Vec<i64>> = rows.iter().map(|row| &row.tokens).collect();
    let spans: Vec<_> = rows.iter().map(|row| row.prompt_len..row.tokens.len()).collect();
    let logprobs = |model: &CausalLm| model.logprobs_of(Batch::new(&sequences, &spans), 0.8, false).unwrap().logprobs;
    let (student, teacher) = (logprobs(&plain), logprobs(&task.teacher).detach());
    let ratio = student.detach() - &teacher;
    (&ratio * &student).mean(Kind::Float).backward();
    let gap = (gradients(&trained) - gradients(&plain)).abs().max().double_value(&[]);
    assert!(gap < 1e-6, "{gap:e}");
    // The value is the estimate of the reverse KL divergence that the gradient lowers.
    let mean = ratio.mean(Kind::Double).double_value(&[]);
    assert_near(metrics.get("loss").unwrap(), mean, "loss");
    assert_near(metrics.get("reverse_kl").unwrap(), mean, "reverse_kl");
}

#[test]
fn the_numbers_of_a_row_do_not_depend_on_its_company() {
    let rows: Vec<DistillRow> = runs()["rows.ids"].as_array().unwrap().iter().map(labelled).collect();
    let mut config = config();
    let model = load("llama_policy");
    config.loss.beta = 0.5;
    let task = task(&config, Vec::new(), "llama_ref");
    let world = World::single();
    let measure = |rows: &[&DistillRow]| task.measured(&model, rows, &world).unwrap();
    let whole = measure(&rows.iter().collect::<Vec<_>>());
    let alone: Vec<_> = rows.iter().map(|row| measure(&[row])).collect();
    let sum = |number: fn(&super::totals::PassSums) -> f64| alone.iter().map(number).sum::<f64>();
    assert!((whole.loss - sum(|row| row.loss)).abs() < 1e-6 * whole.loss, "{} {}", whole.loss, sum(|row| row.loss));
    assert!((whole.entropy - sum(|row| row.entropy)).abs() < 1e-6 * whole.entropy);
    assert_eq!(whole.tokens, sum(|row| row.tokens));
}

#[test]
fn the_share_of_on_policy_updates_is_lmbda_and_depends_on_seed_and_update_alone() {
    let mut config = config();
    let sources = |config: &DistillConfig| (0..2000).map(|at| Source::of_update(config, at)).collect::<Vec<_>>();
    assert!(sources(&config).iter().all(|source| *source == Source::Student));
    config.lmbda = 0.25;
    let found = sources(&config);
    let on_policy = found.iter().filter(|source| **source == Source::Student).count();
    // 2000 draws with 0.25: 500, with a deviation of 19.
    assert!((440..560).contains(&on_policy), "{on_policy}");
    assert!(found.iter().all(|source| *source != Source::Teacher) && found == sources(&config));
    config.seq_kd = true;
    assert!(sources(&config).iter().all(|source| *source != Source::Rows));
    (config.lmbda, config.seq_kd) = (0.0, false);
    assert!(sources(&config).iter().all(|source| *source == Source::Rows));
}

#[test]
fn a_response_ends_before_an_id_that_the_other_model_does_not_have() {
    let tokens = vec![5, 7, 9, 6];
    let mut response =
        Response { tokens, logprobs: vec![0.0; 4], finish: FinishReason::Length, sets: None, inserted: Vec::new() };
    end_before_unknown(&mut response, 10);
    assert_eq!((response.tokens.len(), response.finish), (4, FinishReason::Length));
    end_before_unknown(&mut response, 9);
    assert_eq!((response.tokens.len(), response.logprobs.len(), response.finish), (2, 2, FinishReason::Stop));
    let row = DistillRow::sampled(&[1, 2], &response);
    assert_eq!((row.tokens, row.prompt_len), (vec![1, 2, 5, 7], 2));
}

/// The rows that a run with these settings reads of `lines`, or the error.
fn read(config: &DistillConfig, lines: &[Value], most: [usize; 2]) -> Result<(Vec<DistillRow>, Vec<String>), String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    std::fs::write(&path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let tokenizer = Tokenizer::from_pretrained(&golden().join("trl_tools/init/policy")).unwrap();
    let limit = PromptLimit::new(&config.prompt_length, PromptLimit::of_context(most[0])).unwrap();
    let limits = Limits { vocab: 1 << 20, prompt: config.samples().then_some(limit), max_length: most[1] };
    read_rows(Dataset::read(&path, "train").unwrap(), config, &tokenizer, &limits).map_err(|error| error.to_string())
}

#[test]
fn a_prompt_or_a_text_beside_a_conversation_changes_nothing() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                          {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]);
    for (lmbda, seq_kd) in [(0.0, false), (0.5, false), (1.0, false), (0.0, true)] {
        let mut config = config();
        (config.lmbda, config.seq_kd) = (lmbda, seq_kd);
        let found = |row: Value| read(&config, &[row], [1000; 2]).unwrap().0;
        for name in ["messages", "conversations"] {
            let alone = found(json!({name: messages}));
            assert!(alone[0].prompt_len > 4 && (lmbda == 1.0 || seq_kd) == (alone[0].loss_tokens() == 0), "{alone:?}");
            for other in [
                json!({name: messages, "prompt": "a", "prompt_id": "f0"}),
                json!({name: messages, "prompt": [{"role": "user", "content": "a"}]}),
                json!({name: messages, "text": "a b c d"}),
                json!({name: messages, "query": "a", "text": "x", "prompt": "y"}),
            ] {
                assert_eq!(found(other), alone, "{lmbda} {seq_kd}");
            }
        }
    }
}

#[test]
fn a_prompt_of_token_ids_ends_before_the_first_one_that_is_learned_in_every_mode() {
    let ids = [5, 6, 7, 8, 9];
    for marks in [json!({"labels": [-100, -100, 7, 8, -100]}), json!({"completion_mask": [0, 0, 1, 1, 0]})] {
        let mut row = json!({ "input_ids": ids });
        row.as_object_mut().unwrap().extend(marks.as_object().unwrap().clone());
        for (lmbda, seq_kd) in [(0.5, false), (1.0, false), (0.5, true)] {
            let mut config = config();
            (config.lmbda, config.seq_kd) = (lmbda, seq_kd);
            let rows = read(&config, std::slice::from_ref(&row), [1000; 2]).unwrap().0;
            assert_eq!(rows[0].prompt(), [5, 6], "{lmbda} {seq_kd}");
        }
    }
    let found = |row: Value| read(&config(), &[row], [1000; 2]);
    // Without a mark all ids are the prompt, and so they are where none is learned.
    assert_eq!(found(json!({ "input_ids": ids })).unwrap().0[0].prompt(), ids);
    assert_eq!(found(json!({"input_ids": ids, "completion_mask": vec![0; 5]})).unwrap().0[0].prompt(), ids);
    let error = found(json!({"input_ids": ids, "labels": ids})).unwrap_err();
    assert!(error.contains("line 1: field `input_ids`: expected a prompt"), "{error}");
    let error = found(json!({"input_ids": ids, "labels": [-100, 6]})).unwrap_err();
    assert!(error.contains("expected as many numbers as `input_ids` has, 5, found 2"), "{error}");
}

#[test]
fn long_prompts_of_rows_with_responses_are_counted_and_named_where_none_is_left() {
    let row = |prompt: &str| json!({"prompt": prompt, "completion": " d"});
    let rows = [row("a b c a b c a b c a b c"), row("a")];
    let mut config = config();
    (config.lmbda, config.prompt_length.max_prompt_length) = (0.5, Some(4));
    config.prompt_length.long_prompts = LongPrompts::TruncateLeft;
    let (found, warnings) = read(&config, &rows, [1000; 2]).unwrap();
    assert_eq!((found.len(), found[0].prompt_len), (2, 4));
    let words = "1 of 2 rows lost the start of their prompt, which had more than 4 tokens (max_prompt_length)";
    assert!(warnings.iter().any(|warning| warning.ends_with(words)), "{warnings:?}");
    config.prompt_length.long_prompts = LongPrompts::Drop;
    assert_eq!(read(&config, &rows, [1000; 2]).unwrap().0.len(), 1);
    let error = read(&config, &rows[..1], [1000; 2]).unwrap_err();
    assert!(error.ends_with("each of 1 rows was dropped: their prompts have more than 4 tokens (max_prompt_length)"));
    let error = read(&config, &rows[1..], [1000, 1]).unwrap_err();
    assert!(
        error.ends_with("none of 1 rows has a prompt and a token to learn within max_length = 1 tokens"),
        "{error}"
    );
}

#[test]
fn rows_whose_response_is_missing_are_refused_with_what_they_need() {
    let mut config = config();
    config.lmbda = 0.0;
    let error = read(&config, &[json!({"messages": [{"role": "user", "content": "a"}]})], [1000; 2]).unwrap_err();
    let words = "line 1: field `messages`: expected the assistant's message, which is learned, as the last one, found one of the role \"user\"";
    assert!(error.ends_with(words), "{error}");
}

#[test]
fn an_update_that_samples_nothing_shows_nothing() {
    let rows: Vec<DistillRow> = runs()["rows.ids"].as_array().unwrap().iter().map(labelled).collect();
    let mut config = config();
    (config.lmbda, config.max_completion_length, config.log_completions) = (0.5, 2, true);
    let mut task = task(&config, rows, "llama_ref");
    let mut model = load("llama_policy");
    model.set_trainable(true);
    let source = |at: &u64| Source::of_update(&config, *at);
    let on_policy_update =
        (0..99).find(|at| source(at) == Source::Student && source(&(at + 1)) == Source::Rows).unwrap();
    let rows = [0, 1];
    let world = World::single();
    let mut sums = Totals::default();
    for (update, shows) in [(on_policy_update, true), (on_policy_update + 1, false)] {
        let batch = UpdateRows { rows: &rows, update, loss_scale: 1.0, max_tokens: 4096, world: &world };
        task.backward(&model, &batch, &mut sums).unwrap();
        assert_eq!(!task.shown.is_empty(), shows);
    }
}

#[test]
fn responses_without_a_token_to_learn_leave_their_metrics_out() {
    let row = DistillRow { tokens: vec![5, 6], prompt_len: 2, masked: Vec::new() };
    let mut config = config();
    config.log_completions = true;
    let task = task(&config, vec![row.clone()], "llama_ref");
    let mut model = load("llama_policy");
    model.set_trainable(true);
    let metrics = learn(&task, &model, &[row], 4096);
    assert!(metrics.get("loss").is_none() && metrics.get("entropy").is_none() && metrics.get("on_policy").is_some());
    assert!(metrics.iter().all(|(_, value)| value.is_finite()));
    assert!(Totals::default().watched().is_empty());
}

#[test]
fn an_update_samples_by_the_student_or_the_teacher_and_repeats_to_the_bit() {
    let prompts: Vec<DistillRow> = runs()["rows.ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            let row = labelled(row);
            DistillRow { tokens: row.prompt().to_vec(), ..row }
        })
        .collect();
    let mut found = Vec::new();
    for (lmbda, seq_kd) in [(1.0, false), (1.0, false), (0.0, true)] {
        let mut config = config();
        (config.lmbda, config.seq_kd, config.max_completion_length, config.log_completions) = (lmbda, seq_kd, 6, true);
        let mut task = task(&config, prompts.clone(), "llama_ref");
        let mut model = load("llama_policy");
        model.set_trainable(true);
        let rows: Vec<usize> = (0..8).collect();
        let world = World::single();
        let batch = UpdateRows { rows: &rows, update: 3, loss_scale: 1.0, max_tokens: 4096, world: &world };
        let mut sums = Totals::default();
        task.backward(&model, &batch, &mut sums).unwrap();
        let samples = task.take_samples();
        assert_eq!(samples.len(), 5);
        assert!(samples.iter().all(|sample| sample.score < 0.0 && sample.num_tokens.is_some()));
        found.push((gradients(&model), samples.into_iter().map(|sample| sample.response).collect::<Vec<_>>()));
    }
    assert!(found[0].0.equal(&found[1].0) && found[0].1 == found[1].1);
    assert!(found[0].1 != found[2].1);
}
