//! Training with tools and environments: the policy `tests/golden/tools_policy` calls `add` before it answers.

use crate::cli::{Ran, Scratch, json_lines};
use crate::support::{golden, output};
use rlhf::environment::{Called, Environment, Finished, Opened, Session, ToolCall, ToolResult};
use rlhf::generate::StopToken;
use rlhf::reward::{FnReward, Rewards};
use rlhf::settings::PpoConfig;
use rlhf::train::ppo::PpoTrainer;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// Tools and environments of Python.
const MODULE: &str = r#"
import os, time

def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    return a + b


def dies(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    os._exit(3)

dies.__name__ = "add"


class Sum:
    def reset(self, answer, **row):
        self.answer, self.found = answer, None

    def add(self, a: int, b: int) -> int:
        """Adds.

        Args:
            a: One.
            b: Two.
        """
        self.found = a + b
        print("added", a, b)
        return self.found

    def get_reward(self) -> float:
        return float(str(self.found) == self.answer)
"#;

/// A folder with the policy, the tools and 24 sums to be found.
pub(crate) fn scratch() -> Scratch {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("caller")).unwrap();
    for file in std::fs::read_dir(golden().join("tools_policy")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), scratch.path("caller").join(file.file_name())).unwrap();
    }
    scratch.write("helpers.py", MODULE);
    let mut rows = String::new();
    for row in 0..24 {
        let (a, b) = (1 + row % 9, 1 + row * 7 % 9);
        let prompt = json!([{"role": "user", "content": format!("{a}+{b}")}]);
        let _ = writeln!(rows, "{}", json!({"prompt": prompt, "answer": (a + b).to_string()}));
    }
    scratch.write("sums.jsonl", &rows);
    scratch
}

const GRPO: &str = "grpo --model_name_or_path caller --dataset_name sums.jsonl --max_completion_length 100 --num_generations 4 \
                    --train_batch_size 16 --max_steps 3 --learning_rate 1e-4 --temperature 1.0";
const TOOL: &str = "--tools helpers.add --reward exact:answer";

/// Runs what must succeed; the policy is nearly certain of its calls, of which a run may warn.
#[track_caller]
fn trains(scratch: &Scratch, line: &str) {
    let ran = scratch.run(line);
    assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
}

fn weights(scratch: &Scratch, run: &str) -> Vec<u8> {
    std::fs::read(scratch.path(run).join("model.safetensors")).unwrap()
}

#[test]
fn grpo_with_tools_trains_on_sampled_tokens_alone_resumes_and_is_replayed_to_the_bit() {
    let scratch = scratch();
    let line = format!("{GRPO} {TOOL} --log_rollouts true --save_steps 1");
    trains(&scratch, &format!("{line} --output_dir whole"));
    let metrics = scratch.metrics("whole");
    let number = |step: usize, name: &str| metrics[step][name].as_f64().unwrap_or_else(|| panic!("{name}"));
    assert!(number(0, "tools/call_frequency") > 0.5, "{:?}", metrics[0]);
    assert!(number(0, "tools/failure_frequency") < 0.5);
    // Results and the template's text between turns are no sampled tokens.
    let pages = Value::from(metrics.iter().map(|m| m["num_tokens"].clone()).collect::<Vec<_>>());
    assert!(number(0, "completions/mean_length") < 60.0, "{pages}");
    trains(&scratch, &format!("{line} --output_dir part --max_steps 3 --resume_from_checkpoint whole/checkpoint-1"));
    assert!(weights(&scratch, "part") == weights(&scratch, "whole"));
    let verdict = scratch.run("replay whole --update 2 --output_dir again");
    assert!(verdict.code == 0 && verdict.stdout.contains("equal to the run"), "{}{}", verdict.stdout, verdict.stderr);
}

#[test]
fn ranks_have_their_own_sessions_and_give_the_same_numbers() {
    let scratch = scratch();
    let line = format!("{GRPO} --environment_factory helpers.Sum --bf16 false");
    trains(&scratch, &format!("{line} --output_dir one"));
    let ran = scratch.run(&format!("launch --nproc_per_node 2 {line} --output_dir two"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for (one, two) in scratch.metrics("one").iter().zip(&scratch.metrics("two")) {
        for name in ["tools/call_frequency", "rewards/Sum/mean", "env_reward", "completions/mean_length", "num_tokens"]
        {
            let [one, two] = [one, two].map(|m| m[name].as_f64().unwrap_or_else(|| panic!("{name} in {m:?}")));
            assert!((one - two).abs() < 1e-9, "{name}: {one} {two}");
        }
    }
}

#[test]
fn generate_on_several_ranks_writes_the_same_rows_in_the_same_order() {
    let scratch = scratch();
    let line = "generate --model_name_or_path caller --dataset_name sums.jsonl --max_new_tokens 100 --environment_factory helpers.Sum \
                --batch_size 4";
    let rows = |start: &str| {
        let ran = scratch.run(&format!("{start}{line}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran.stdout
    };
    let one = rows("");
    assert_eq!(one.lines().count(), 24);
    assert_eq!(rows("launch --nproc_per_node 2 "), one);
}

#[test]
fn groups_that_teach_nothing_are_sampled_again_with_the_environment_and_the_run_resumes_to_the_bit() {
    let scratch = scratch();
    let line = format!(
        "{GRPO} --environment_factory helpers.Sum --dynamic_sampling true --max_num_gen_batches 3 --log_rollouts true --save_steps 1"
    );
    trains(&scratch, &format!("{line} --output_dir whole"));
    let replaced = |m: &Map<String, Value>| m["sampling/replaced_groups"].as_f64().unwrap();
    assert!(scratch.metrics("whole").iter().map(replaced).sum::<f64>() > 0.0);
    trains(&scratch, &format!("{line} --output_dir part --resume_from_checkpoint whole/checkpoint-1"));
    assert!(weights(&scratch, "part") == weights(&scratch, "whole"));
    let verdict = scratch.run("replay whole --update 2 --output_dir again");
    assert!(verdict.code == 0 && verdict.stdout.contains("equal to the run"), "{}{}", verdict.stdout, verdict.stderr);
    // A tool that has changed is another run.
    scratch.write("helpers.py", &MODULE.replace("self.found = a + b", "self.found = a - b"));
    let ran = scratch.run(&format!("{line} --output_dir other --resume_from_checkpoint whole/checkpoint-1"));
    assert!(ran.code != 0 && ran.stderr.contains("helpers.py"), "{}", ran.stderr);
}

#[test]
fn ppo_with_a_critic_learns_from_the_reward_of_an_environment() {
    let scratch = scratch();
    let line = "ppo --sft_model_path caller --dataset_name sums.jsonl --response_length 100 --train_batch_size 16 \
                --total_episodes 32 --learning_rate 1e-3 --stop_token eos --missing_eos_penalty 1 --environment_factory helpers.Sum \
                --eval_dataset_name sums.jsonl --eval_steps 1 --num_eval_prompts 8 --output_dir run";
    let ran = Ran::from(output(scratch.command(line).args(["--report_to", "command:cat > events"])));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let metrics = scratch.metrics("run");
    let update = metrics.iter().find(|m| m.get("loss/value_avg").is_some()).unwrap();
    assert!(update["tools/call_frequency"].as_f64().unwrap() > 0.5, "{update:?}");
    assert!(update["env_reward"].as_f64().unwrap() > 0.2, "{update:?}");
    let evaluated = metrics.iter().find(|m| m.get("eval/score").is_some()).unwrap();
    assert!(evaluated["eval/scores/Sum"].as_f64().unwrap() > 0.2, "{evaluated:?}");
    assert!(scratch.read("run/tools.log").contains("added "), "{}", scratch.read("run/tools.log"));
    views_show_turns(&scratch, "run");
}

/// Checks that the samples of a run, its tracker and its report have turns, calls and results, and which tokens the policy did not sample.
#[track_caller]
fn views_show_turns(scratch: &Scratch, run: &str) {
    for (file, has_tokens) in [("update-000000", true), ("eval-000001", false)] {
        let rows = json_lines(&scratch.read(&format!("{run}/samples/{file}.jsonl")));
        let row =
            rows.iter().find(|row| row["tool_calls"] == 1).unwrap_or_else(|| panic!("no call in {file}: {rows:?}"));
        let messages = row["messages"].as_array().unwrap();
        assert_eq!(messages[0]["tool_calls"][0]["function"]["name"], "add", "{row:?}");
        assert!(messages[1]["role"] == "tool" && messages[1]["content"].is_string(), "{row:?}");
        let bounds: Vec<usize> = serde_json::from_value(row["inserted"].clone()).unwrap();
        assert!(bounds.len() == 2 && row["tool_failures"].is_number() && row["env_reward"].is_number(), "{row:?}");
        if has_tokens {
            let tokens: Vec<String> = serde_json::from_value(row["tokens"].clone()).unwrap();
            let logprobs: Vec<f64> = serde_json::from_value(row["logprobs"].clone()).unwrap();
            assert!(tokens[bounds[0]..bounds[1]].concat().contains("<tool_response>"), "{tokens:?}");
            assert!(logprobs[bounds[0]..bounds[1]].iter().all(|logprob| *logprob == 0.0), "{logprobs:?}");
            assert_eq!(row["num_tokens"], tokens.len() - (bounds[1] - bounds[0]));
        }
    }
    let events = json_lines(&scratch.read("events"));
    let row = events.iter().find(|event| event["type"] == "samples").map(|event| &event["samples"][0]).unwrap();
    assert!(row["messages"].is_array() && row["tool_calls"].is_number() && row.get("inserted").is_none(), "{row}");
    let page = scratch.read(&format!("{run}/report.html"));
    for part in [
        "Tools: ",
        "add({&quot;a&quot;: ",
        "class=\"result\"",
        "class=\"inserted\"",
        "1 call \u{b7} environment ",
        "env_reward",
    ] {
        assert!(page.contains(part), "no {part} in {page}");
    }
}

#[test]
fn generate_plays_with_the_environment_in_parts_of_any_size() {
    let scratch = scratch();
    let line = "generate --model_name_or_path caller --dataset_name sums.jsonl --max_new_tokens 100 --environment_factory helpers.Sum \
                --num_return_sequences 2";
    let rows = |batch_size: usize| -> Vec<Value> {
        let ran = scratch.run(&format!("{line} --batch_size {batch_size}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert!(ran.stderr.contains("added "), "{}", ran.stderr);
        ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let whole = rows(64);
    assert_eq!(whole.len(), 48);
    let played = whole.iter().filter(|row| row["tool_calls"].as_u64().unwrap() > 0).collect::<Vec<_>>();
    assert!(played.len() > 24, "{whole:?}");
    for row in played {
        assert_eq!(row["messages"][0]["tool_calls"][0]["function"]["name"], "add", "{row}");
        assert_eq!(row["messages"][1]["role"], "tool", "{row}");
        let inserted: Vec<usize> =
            row["inserted"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap() as usize).collect();
        let len: usize = inserted.chunks(2).map(|span| span[1] - span[0]).sum();
        let ids = row["completion_ids"].as_array().unwrap().len();
        assert_eq!(row["num_tokens"].as_u64().unwrap() as usize, ids - len, "{row}");
        assert!(row["prompt"].as_str().unwrap().contains("\"name\": \"add\""), "{row}");
    }
    let right = whole.iter().filter(|row| row["env_reward"] == 1.0).count();
    assert!(right > 12, "{right}");
    let ran = scratch.run(&format!("{line} --ignore_eos"));
    assert!(ran.code == 2 && ran.stderr.contains("no turn would end"), "{}", ran.stderr);
    let asked =
        "generate --model_name_or_path caller --tools helpers.add --max_new_tokens 100 --system_prompt Please. 3+4";
    let row: Value = serde_json::from_str(&scratch.run(asked).stdout).unwrap();
    assert!(row["prompt"].as_str().unwrap().contains("Please."), "{row}");
    let episodes = |rows: &[Value]| {
        rows.iter().map(|row| (row["messages"].clone(), row["env_reward"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(episodes(&rows(4)), episodes(&whole));
    let ran = scratch.run(&format!("{line} --output_format text"));
    let text = ran.stdout;
    assert!(text.contains("-> add({\"a\": ") && text.contains("\n<- ") && text.contains("(reward 1)"), "{text}");
}

#[test]
fn eval_scores_by_the_reward_of_the_environment_and_continues_after_a_cut() {
    let scratch = scratch();
    let line = "eval --model_name_or_path caller --dataset_name sums.jsonl --max_new_tokens 100 --environment_factory helpers.Sum";
    let evaluated = |line: &str| -> Value {
        let ran = scratch.run(line);
        assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
        serde_json::from_str(&scratch.read("scored/summary.json")).unwrap()
    };
    evaluated(&format!("{line} --output_dir scored --num_prompts 10"));
    let whole = evaluated(&format!("{line} --output_dir scored"));
    let share = whole["a"]["share_right"].as_f64().unwrap();
    assert!(share > 0.2 && whole["prompts"] == 24, "{whole}");
    let responses = scratch.read("scored/responses.jsonl");
    let rows: Vec<Value> = responses.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let rewards = rows.iter().map(|row| row["responses"][0]["episode"]["reward"].as_f64().unwrap());
    assert!((rewards.sum::<f64>() / 24.0 - share).abs() < 1e-9, "{whole}");
    // The answer is the last turn; rules see it too.
    let ran = scratch.run(&format!("{line} --output_dir ruled --reward exact:answer --pass_score 2"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ruled: Value = serde_json::from_str(&scratch.read("ruled/summary.json")).unwrap();
    assert!(ruled["a"]["mean_score"].as_f64().unwrap() > whole["a"]["mean_score"].as_f64().unwrap(), "{ruled}");
    // A column has no episode: it is compared by the other rewards alone.
    let flags = "--reward exact:answer --compare_column answer --num_prompts 8 --output_dir beside";
    let ran = scratch.run(&format!("{line} {flags}"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let summary: Value = serde_json::from_str(&scratch.read("beside/summary.json")).unwrap();
    let [generated, column] = ["a", "b"].map(|side| summary[side]["mean_score"].as_f64().unwrap());
    assert!(generated <= 1.0 && column == 1.0, "{summary}");
    scratch.write("silent.py", &MODULE.replace("get_reward", "_get_reward"));
    for (words, expected) in [
        ("--tools helpers.add --output_dir new", "no judge: set"),
        ("--environment_factory silent.Sum --output_dir none", "as the environment gives none"),
        (
            "--environment_factory helpers.Sum --compare_column answer --output_dir new",
            "an environment scores no column",
        ),
    ] {
        let line = "eval --model_name_or_path caller --dataset_name sums.jsonl";
        let ran = scratch.run(&format!("{line} {words}"));
        assert!(ran.code != 0 && ran.stderr.contains(expected), "{words}: {}", ran.stderr);
    }
}

#[test]
fn what_cannot_be_used_with_tools_is_one_line_before_anything_is_written() {
    let scratch = scratch();
    scratch.copy("plain", "gpt_neox");
    let with = |words: &str| format!("{GRPO} --output_dir new {words}");
    for (words, code, expected) in [
        ("--tools nowhere.add --reward exact:answer", 1, &["no module `nowhere`"][..]),
        ("--tools helpers.subtract --reward exact:answer", 1, &["helpers", "has no function `subtract`"]),
        ("--tools helpers.add", 2, &["no reward"]),
        ("--tools add --reward exact:answer", 2, &["tools = add: expected the module and the name of a function"]),
        (
            "--max_tool_calling_iterations 3 --reward exact:answer",
            2,
            &["max_tool_calling_iterations = 3 has no effect"],
        ),
        (
            "--tools helpers.add --reward exact:answer --max_prompt_length 20 --long_prompts truncate_left",
            2,
            &["long_prompts = truncate_left with tools"],
        ),
        ("--tools helpers.add --reward exact:answer --model_name_or_path plain", 1, &["chat template"]),
    ] {
        scratch.refuses(&with(words), code, expected);
    }
}

#[test]
fn an_environment_that_dies_names_the_row_or_scores_it_where_the_user_says_so() {
    let scratch = scratch();
    let line = format!("{GRPO} --tools helpers.dies --reward exact:answer --output_dir new");
    let ran: Ran = scratch.run(&line);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let error = ran.stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default().to_string();
    assert!(
        error.contains("response ") && error.contains(" to \"") && error.contains("exit status: 3"),
        "{}",
        ran.stderr
    );
    let scored = format!(
        "{GRPO} --tools helpers.dies --reward exact:answer --environment_failure_reward -1 --output_dir scored"
    );
    trains(&scratch, &scored);
    let first = &scratch.metrics("scored")[0];
    assert!(first["env_failure_frequency"].as_f64().unwrap() > 0.5, "{first:?}");
    assert_eq!(first["env_reward"], -1.0, "{first:?}");
    assert_eq!(first["rewards/environment/mean"], -1.0, "{first:?}");
    trains(
        &scratch,
        &format!("{GRPO} --environment_factory helpers.Sum --environment_failure_reward -1 --output_dir lives"),
    );
    assert_eq!(scratch.metrics("lives")[0]["env_failure_frequency"], 0.0);
}

#[test]
fn prompts_and_settings_that_would_be_ignored_with_tools_are_refused() {
    let scratch = scratch();
    let row = json!({"prompt": [{"role": "user", "content": "1+1"}], "answer": "2", "chat_template_kwargs": {"a": 1}});
    scratch.write("own.jsonl", &format!("{row}\n").repeat(4));
    let ran = scratch.run(&format!("{GRPO} {TOOL} --output_dir own --dataset_name own.jsonl"));
    assert!(ran.code == 1 && ran.stderr.contains("`chat_template_kwargs`"), "{}", ran.stderr);
    let ppo = "ppo --sft_model_path caller --dataset_name sums.jsonl --output_dir new --reward exact:answer --tools helpers.add";
    scratch.refuses(ppo, 2, &["without stop_token, stop_token_id or stop_strings", "expected stop_token = eos"]);
    let short = format!("{ppo} --stop_token eos --min_response_length 2");
    scratch.refuses(&short, 2, &["min_response_length = 2 with tools"]);
}

/// Sums in Rust, with the tool that the policy knows.
struct Sums(Value);

struct Adding {
    opened: Opened,
    expected: String,
    found: String,
}

impl Environment for Sums {
    fn open(&self, row: &Map<String, Value>, _seed: u64) -> rlhf::Result<Option<Box<dyn Session>>> {
        let opened = Opened { prompt: None, tools: vec![self.0.clone()], reward_name: Some("sum".into()) };
        let expected = row["answer"].as_str().unwrap_or_default().to_string();
        Ok(Some(Box::new(Adding { opened, expected, found: String::new() })))
    }

    fn reward_names(&self) -> Vec<String> {
        vec!["sum".into()]
    }
}

impl Session for Adding {
    fn opened(&self) -> &Opened {
        &self.opened
    }

    fn call(&mut self, calls: &[ToolCall]) -> rlhf::Result<Called> {
        let sum =
            |call: &ToolCall| ["a", "b"].iter().filter_map(|name| call.arguments.get(*name)?.as_i64()).sum::<i64>();
        self.found = calls.last().map(sum).unwrap_or_default().to_string();
        let result = |call: &ToolCall| ToolResult::new(&call.name, sum(call).to_string());
        Ok(Called { results: calls.iter().map(result).collect(), ..Called::default() })
    }

    fn finish(self: Box<Self>) -> rlhf::Result<Finished> {
        let reward = f64::from(u8::from(self.found == self.expected));
        Ok(Finished { reward: Some(reward), logs: vec![("right".into(), reward)] })
    }
}

#[test]
fn an_environment_in_rust_is_played_by_the_trainer_of_the_library() {
    let scratch = scratch();
    let path = |name: &str| scratch.path(name);
    let mut config = PpoConfig::without_reward(path("caller"), path("sums.jsonl"), path("out"));
    config.response_length = 100;
    config.stop_token = Some(StopToken::Eos);
    config.train_batch_size = Some(8);
    let tools: Value =
        serde_json::from_str(&std::fs::read_to_string(golden().join("trl_tools/schemas.json")).unwrap()).unwrap();
    let brief =
        FnReward::new(|batch| Ok(batch.iter().map(|input| -(input.response.len() as f64)).collect::<Vec<f64>>()));
    let trainer = PpoTrainer::from_config_with(&config, Rewards::new().with("brief", brief)).unwrap();
    let metrics = trainer.with_environment(Arc::new(Sums(tools["add"].clone()))).unwrap().update().unwrap();
    let number = |name: &str| metrics.get(name).unwrap_or_else(|| panic!("{name}"));
    assert!(number("tools/call_frequency") > 0.5 && number("env_reward") > 0.2, "{metrics:?}");
    assert_eq!(number("environment/right"), number("env_reward"));
    // The answer is the last turn: a number.
    assert!(number("objective/scores") < 0.0);
}
