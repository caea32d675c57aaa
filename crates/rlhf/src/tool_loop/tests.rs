//! The turns of trl 1.16's golden runs with tools (`tests/golden/trl_tools`), through the same calls: prompts, results, budgets and rewards
//! are those of TRL.

use super::*;
use crate::environment::{Called, Limits, Log, ProgramEnvironment, Session};
use rlhf_base::schema::defaults;
use rlhf_base::weights::read_json;
use rlhf_lm::generate::Sampling;
use serde_json::Map;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tch::{Kind, Tensor};

/// The id that ends a turn.
const END: i64 = 0;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/trl_tools")
}

fn ids(list: &Value) -> Vec<i64> {
    list.as_array().into_iter().flatten().map(|id| id.as_i64().unwrap()).collect()
}

fn texts(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().map(|text| text.as_str().unwrap().to_string()).collect()
}

/// One golden run.
struct Golden {
    name: String,
    info: Value,
    data: HashMap<String, Tensor>,
    tool_loop: ToolLoop,
}

impl Golden {
    fn read(name: &str) -> Self {
        let dir = folder().join(name);
        let info = read_json(&dir.join("info.json")).unwrap();
        let data = Tensor::read_safetensors(dir.join("data.safetensors")).unwrap().into_iter().collect();
        let at = folder();
        let paths =
            |kind: &str| -> Vec<String> { texts(&info[kind]).iter().map(|name| format!("tools.{name}")).collect() };
        let classes = paths("environments");
        let named = |path: String| match path["tools.".len()..].split_once('=') {
            Some((name, class)) => (Some(name.to_string()), format!("tools.{class}")),
            None => (None, path),
        };
        let classes: Vec<(Option<String>, String)> = classes.into_iter().map(named).collect();
        let mut config: EnvironmentConfig = defaults();
        config.max_tool_calling_iterations =
            info["args"]["max_tool_calling_iterations"].as_u64().map(|most| most as usize);
        let limits = Limits { folder: Some(at.clone()), ..Limits::default() };
        let environment = Arc::new(ProgramEnvironment::python(&paths("tools"), &classes, limits, Log::default()));
        environment.start().unwrap();
        let tokenizer = Tokenizer::from_pretrained(&at.join("init/policy")).unwrap();
        let tool_loop = ToolLoop::new(environment, &tokenizer, &config).unwrap();
        Self { name: name.to_string(), info, data, tool_loop }
    }

    fn rows(&self, generation: usize, name: &str) -> Vec<Vec<i64>> {
        Vec::try_from(self.data[&format!("it{generation}.{name}")].to_kind(Kind::Int64)).unwrap()
    }

    /// Replays a generation; the turns that TRL's policy wrote take the place of ours.
    fn replay(&self, generation: usize) {
        let most = self.info["args"]["max_completion_length"].as_u64().unwrap() as usize;
        let dataset = self.info["dataset"].as_array().unwrap();
        let index = ids(&Value::from(
            Vec::<i64>::try_from(&self.data[&format!("it{generation}.prompt_index")].to_kind(Kind::Int64)).unwrap(),
        ));
        let asked: Vec<Prompt> = index
            .iter()
            .map(|&row| Prompt { tokens: vec![1], text: String::new(), row: dataset[row as usize].clone() })
            .collect();
        let asked: Vec<&Prompt> = asked.iter().collect();
        let config = GenerationConfig::new(Sampling::Greedy, most);
        let mut talk = Talk::open(&self.tool_loop, &asked, 0..asked.len(), &config).unwrap();
        let rollouts = self.info["rollouts"][generation].as_array().unwrap();
        let (mut tokens, mut masks) = (vec![Vec::new(); rollouts.len()], vec![Vec::new(); rollouts.len()]);
        let mut turns: Vec<Option<usize>> = vec![Some(0); rollouts.len()];
        while turns.iter().any(Option::is_some) {
            for (row, turn) in turns.iter().enumerate().filter_map(|(row, turn)| Some((row, (*turn)?))) {
                let mut sampled = ids(&rollouts[row]["turns"][turn]["sampled"]);
                sampled.truncate(most - tokens[row].len());
                let finish = if sampled.last() == Some(&END) { FinishReason::Stop } else { FinishReason::Length };
                talk.ended(row, &sampled, finish).unwrap();
                masks[row].extend(vec![1; sampled.len()]);
                tokens[row].extend(sampled);
            }
            let waiting: Vec<usize> = (0..turns.len()).filter(|&row| turns[row].is_some()).collect();
            let mut decided = Vec::new();
            while decided.len() < waiting.len() {
                decided.extend(talk.decided(true).unwrap());
            }
            for (row, next) in decided {
                let left = most - tokens[row].len();
                turns[row] = match next {
                    Next::Continue(suffix) if suffix.len() <= left => {
                        masks[row].extend(vec![0; suffix.len()]);
                        tokens[row].extend(&suffix);
                        (suffix.len() < left).then(|| turns[row].unwrap() + 1)
                    }
                    _ => None,
                };
            }
        }
        talk.finish().unwrap();
        let (completions, mask) = (self.rows(generation, "completion_ids"), self.rows(generation, "tool_mask"));
        let prompts = self.rows(generation, "prompt_ids");
        for (row, (rollout, episode)) in rollouts.iter().zip(talk.rows.iter().map(|row| &row.episode)).enumerate() {
            let what = format!("{}: generation {generation}, row {row}: {rollout}", self.name);
            assert!(prompts[row].ends_with(&episode.prompt.tokens), "{what}: prompt {:?}", episode.prompt.text);
            assert_eq!(tokens[row][..], completions[row][..tokens[row].len()], "{what}: ids");
            assert_eq!(masks[row][..], mask[row][..masks[row].len()], "{what}: mask");
            assert_eq!(Value::from(episode.messages.clone()), rollout["completion"], "{what}: messages");
            assert_eq!(episode.prompt.row["prompt"], rollout["prompt"], "{what}: prompt");
        }
        self.compare_metrics(generation, &talk.rows.iter().map(|row| row.episode.clone()).collect::<Vec<_>>());
    }

    fn compare_metrics(&self, generation: usize, episodes: &[Episode]) {
        let mut m = Metrics::default();
        push_tool_metrics(&mut m, episodes, false);
        for name in ["tools/call_frequency", "tools/failure_frequency"] {
            // A generation is logged with each of its optimizer steps.
            let logged = self.info["metrics"][name].as_array().unwrap();
            let per_step = logged.len() / self.info["generations"].as_u64().unwrap() as usize;
            let expected = logged[generation * per_step].as_f64().unwrap();
            let found = m.get(name).unwrap();
            assert!((found - expected).abs() < 1e-6, "{}: {name} {found} {expected}", self.name);
        }
        if let Some(trl_rewards) = self.data.get(&format!("it{generation}.rewards")) {
            let last =
                Vec::<f64>::try_from(trl_rewards.select(1, trl_rewards.size()[1] - 1).to_kind(Kind::Double)).unwrap();
            for (episode, expected) in episodes.iter().zip(last).filter(|(episode, _)| episode.reward_name.is_some()) {
                let found = episode.reward.unwrap_or(f64::NAN);
                let is_last = self.info["rewards"].as_array().unwrap().last()
                    == episode.reward_name.clone().map(Value::from).as_ref();
                assert!(!is_last || (found - expected).abs() < 1e-6, "{}: {found} {expected}", self.name);
            }
        }
    }
}

#[test]
fn the_turns_of_golden_runs_have_the_prompts_results_budgets_and_rewards_of_trl() {
    for name in [
        "tools_default",
        "tools_dapo_odd_calls",
        "tools_bnpo_limit",
        "tools_dr_grpo_budget",
        "tools_truncated_masked",
        "tools_async",
        "environment_default",
        "environment_alone",
        "environment_several",
    ] {
        let golden = Golden::read(name);
        let generations = golden.info["rollouts"].as_array().unwrap().len();
        (0..generations).for_each(|generation| golden.replay(generation));
    }
}

/// An environment with one tool and one session at a time.
struct Single(Mutex<bool>);

struct Only(Opened);

impl Environment for Single {
    fn open(&self, _row: &Map<String, Value>, _seed: u64) -> Result<Option<Box<dyn Session>>> {
        let is_taken = std::mem::replace(&mut *self.0.lock().unwrap(), true);
        let tool = json!({"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}}});
        let opened = Opened { tools: vec![tool], ..Opened::default() };
        if is_taken {
            return Ok(None);
        }
        Ok(Some(Box::new(Only(opened))))
    }
}

impl Session for Only {
    fn opened(&self) -> &Opened {
        &self.0
    }

    fn call(&mut self, calls: &[ToolCall]) -> Result<Called> {
        let results = calls.iter().map(|call| ToolResult::new(&call.name, "1")).collect();
        Ok(Called { results, ..Called::default() })
    }
}

fn with_single() -> ToolLoop {
    let tokenizer = Tokenizer::from_pretrained(&folder().join("init/policy")).unwrap();
    let environment = Arc::new(Single(Mutex::new(false)));
    ToolLoop::new(environment, &tokenizer, &defaults()).unwrap()
}

#[test]
fn an_environment_with_fewer_sessions_than_rows_is_one_line_with_their_number() {
    let tool_loop = with_single();
    let prompt = Prompt { tokens: vec![1], text: "cat".into(), row: json!({"prompt": "cat"}) };
    let config = GenerationConfig::new(Sampling::Greedy, 8);
    let error = Talk::open(&tool_loop, &[&prompt, &prompt], 0..2, &config).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.starts_with("max_environments = 64: expected at most 1, the sessions that the environment has"),
        "{error}"
    );
}

#[test]
fn a_prompt_that_ends_with_the_beginning_of_a_turn_is_continued() {
    let tool_loop = with_single();
    let messages = json!([{"role": "user", "content": "cat"}, {"role": "assistant", "content": "rain and"}]);
    let prompt = Prompt { tokens: vec![1], text: String::new(), row: json!({ "prompt": messages }) };
    let config = GenerationConfig::new(Sampling::Greedy, 8);
    let mut talk = Talk::open(&tool_loop, &[&prompt], 0..1, &config).unwrap();
    assert!(talk.rows[0].episode.prompt.text.ends_with("rain and"), "{}", talk.rows[0].episode.prompt.text);
    let sampled = [tool_loop.tokenizer.encode_verbatim(" one").unwrap(), vec![END]].concat();
    talk.ended(0, &sampled, FinishReason::Stop).unwrap();
    assert_eq!(talk.decided(true).unwrap(), [(0, Next::End)]);
    assert_eq!(talk.rows[0].episode.messages, [json!({"role": "assistant", "content": "rain and one"})]);
}

#[test]
fn a_prompt_that_is_too_long_with_its_tools_is_one_line() {
    let tool_loop = with_single().limited_to(PromptLimit::of_context(10));
    let prompt = Prompt { tokens: vec![1], text: "cat".into(), row: json!({"prompt": "cat"}) };
    let config = GenerationConfig::new(Sampling::Greedy, 8);
    let error = Talk::open(&tool_loop, &[&prompt], 0..1, &config).map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("the prompt \"cat\" with its tools: expected at most 10 tokens (the models' context less the response), found "), "{error}");
}
