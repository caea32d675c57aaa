//! Trackers: the lines that a program gets, programs that fail, runs that are resumed, stopped and rolled back.

use crate::alarms::rolling_back;
use crate::cli::{PPO, REWARD, Ran, SFT, Scratch, json_lines};
use crate::support::output;
use rlhf::run::{Console, ReportTo};
use rlhf::train::ppo::ppo;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Map, Value, json};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A program that replies with the id of a run, and appends all lines to the file `events`.
const RECORDER: &str = r#"command:echo '{"type": "ready", "id": "run-7"}'; cat >> events"#;

fn events(scratch: &Scratch) -> Vec<Map<String, Value>> {
    json_lines(&scratch.read("events"))
}

fn with_type(events: &[Map<String, Value>], kind: &str) -> Vec<Map<String, Value>> {
    events.iter().filter(|event| event["type"] == kind).cloned().collect()
}

/// The metrics of the events.
fn metrics(events: &[Map<String, Value>]) -> Vec<Value> {
    with_type(events, "metrics").into_iter().map(|event| event["metrics"].clone()).collect()
}

/// The lines of `metrics.jsonl`.
fn lines(scratch: &Scratch) -> Vec<Value> {
    scratch.metrics("out").into_iter().map(Value::Object).collect()
}

/// A run with trackers, and variables of its environment.
fn run(scratch: &Scratch, line: &str, report_to: &[&str], vars: &[(&str, &str)]) -> Ran {
    let mut command = scratch.command(line);
    command.arg("--report_to").args(report_to).envs(vars.iter().copied());
    Ran::from(output(&mut command))
}

#[test]
fn a_program_gets_all_events_of_a_run_and_a_resumed_run_continues_there() {
    let scratch = Scratch::new();
    let more = "--eval_steps 1 --save_steps 2 --metric_for_best_model eval/score --num_eval_prompts 2 --eval_split_size 2 \
                --run_name first --project mine";
    let kwargs = r#"{"command": {"a": [1, "b"]}, "wandb": {"x": {"y": 1.5}}}"#;
    let ran = run(&scratch, &format!("{PPO} {more}"), &[RECORDER, "--tracker_kwargs", kwargs], &[]);
    assert!(ran.code == 0 && !ran.stderr.contains("command"), "{}", ran.stderr);
    let found = events(&scratch);
    let start = &found[0];
    let expected = json!({
        "type": "start", "protocol": 1, "tracker": "command", "command": "ppo", "name": "first", "project": "mine",
        "output_dir": scratch.path("out"), "kwargs": {"a": [1, "b"]}, "resume": null,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&start[name], value, "{name}");
    }
    assert_eq!((&start["config"]["seed"], &start["config"]["learning_rate"]), (&json!(42), &json!(3e-6)));
    assert_eq!(metrics(&found), lines(&scratch));
    let samples = with_type(&found, "samples");
    let sources: Vec<&str> = samples.iter().map(|table| table["source"].as_str().unwrap()).collect();
    assert!(sources.contains(&"evaluation") && sources.contains(&"sample_prompts"), "{sources:?}");
    let row = samples[0]["samples"][0].as_object().unwrap();
    assert!(row.contains_key("prompt") && row.contains_key("response") && !row.contains_key("logprobs"), "{row:?}");
    let saved: Vec<Value> = with_type(&found, "saved").into_iter().map(|event| event["kind"].clone()).collect();
    assert!(["best", "checkpoint", "final"].iter().all(|kind| saved.contains(&json!(kind))), "{saved:?}");
    let best = with_type(&found, "saved").into_iter().find(|event| event["kind"] == "best").unwrap();
    assert_eq!(best["best"]["metric"], "eval/score");
    let end = found.last().unwrap();
    assert_eq!((&end["type"], &end["status"]), (&json!("end"), &json!("finished")));
    let ids: Value = serde_json::from_str(&scratch.read("out/trackers.json")).unwrap();
    assert_eq!(ids, json!({"command": "run-7"}));
    let yaml = scratch.read("out/config.yaml");
    assert!(yaml.contains("run_name: first") && yaml.contains("tracker_kwargs:\n"), "{yaml}");

    // Resumed with the settings that the run has left, and more updates.
    scratch.write("events", "");
    let more = "--total_episodes 16 --resume_from_checkpoint true --log_model";
    let ran = Ran::from(output(&mut scratch.command(&format!("ppo --config out/config.yaml {more}"))));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let resumed = events(&scratch);
    assert_eq!(resumed[0]["resume"], json!({"id": "run-7", "updates": 2, "rollbacks": 0}));
    assert_eq!(resumed[0]["kwargs"], json!({"a": [1, "b"]}));
    assert_eq!([metrics(&found), metrics(&resumed)].concat(), lines(&scratch));
    let artifact = &with_type(&resumed, "artifact")[0];
    let files = artifact["files"].as_array().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "README.md"] {
        assert!(files.contains(&json!(name)), "{name}: {files:?}");
    }
    assert!(files.iter().all(|file| scratch.path("out").join(file.as_str().unwrap()).is_file()), "{files:?}");
    assert!(!files.contains(&json!("metrics.jsonl")) && artifact["name"] == "first");
    assert!(files.contains(&json!("value_model/model.safetensors")), "{files:?}");

    // A run that replaces this one is another one there too.
    scratch.write("events", "");
    run(&scratch, &format!("{PPO} --overwrite_output_dir"), &[RECORDER], &[]);
    assert_eq!((&events(&scratch)[0]["resume"], &events(&scratch)[0]["name"]), (&Value::Null, &json!("out")));
}

#[test]
fn arguments_of_programs_do_not_leave_the_machine_with_the_settings() {
    let scratch = Scratch::new();
    let line = PPO.replace("--reward_model_path reward ", "");
    let mut command = scratch.command(&format!("{line} --log_model --num_sample_generations 0"));
    let reward = "env KEY=pw123 sh -c 'while read -r line; do echo 1; done'";
    command.args(["--reward_command", reward, "--report_to", "tensorboard", "command:env KEY=pw123 cat > events"]);
    let ran = Ran::from(output(&mut command));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(scratch.read("out/config.yaml").contains("pw123"), "a resumed run needs them");
    let found = events(&scratch);
    assert_eq!(found[0]["config"]["reward_command"], "env ...");
    assert_eq!(found[0]["config"]["report_to"], json!(["tensorboard", "command:env ..."]));
    let artifact = &with_type(&found, "artifact")[0];
    assert!(!artifact["files"].as_array().unwrap().contains(&json!("config.yaml")), "{artifact:?}");
    assert!(!scratch.read("events").contains("pw123"));
    for entry in std::fs::read_dir(scratch.path("out")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("events.out.") || name == "README.md" {
            let bytes = std::fs::read(&path).unwrap();
            assert!(!bytes.windows(5).any(|word| word == b"pw123"), "{name}");
        }
    }
}

#[test]
fn sft_and_reward_models_have_trackers_too() {
    for (line, command) in [(SFT, "sft"), (REWARD, "reward")] {
        let scratch = Scratch::new();
        let ran = run(&scratch, line, &[RECORDER, "command:cat > second", "tensorboard"], &[]);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
        let found = events(&scratch);
        assert_eq!((&found[0]["command"], &found[0]["tracker"]), (&json!(command), &json!("command")));
        assert_eq!(metrics(&found), lines(&scratch));
        assert_eq!(found.last().unwrap()["status"], "finished");
        let second = json_lines(&scratch.read("second"));
        assert_eq!((&second[0]["tracker"], metrics(&second)), (&json!("command-2"), metrics(&found)));
    }
}

#[test]
fn programs_that_fail_give_one_warning_each_and_the_run_goes_through() {
    let scratch = Scratch::new();
    let programs = [
        "command:echo the server is full >&2; exit 3",
        // Never reads, and never ends.
        "command:echo $$ > pid; exec sleep 1000",
        // Prints without end; its input is closed.
        "command:exec yes garbage <&-",
        "command:/no/such/program",
        // Closes its standard output, and reads all.
        "command:exec cat > kept",
        "command:echo '{\"type\": 3}'; echo '[]'; printf '\\377'; cat > /dev/null",
    ];
    let began = Instant::now();
    let ran = run(&scratch, PPO, &programs, &[("RLHF_TRACKER_TIMEOUT", "0.5")]);
    assert!(began.elapsed() < Duration::from_secs(100), "{:?}", began.elapsed());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let mut warnings: Vec<&str> = ran.stderr.lines().collect();
    warnings.sort_unstable();
    let expected = [
        "warning: command-2: it did not end within 0.5 s and was stopped",
        "warning: command-3: it did not end within 0.5 s and was stopped",
        "warning: command-4: its program ended before the end of the run (exit status: 127)",
        "warning: command: its program ended before the end of the run (exit status: 3): the server is full; the run continues without it, \
         and its metrics are in metrics.jsonl",
    ];
    for (warning, expected) in warnings.iter().zip(expected) {
        assert!(warning.starts_with(expected), "{warning}\nis not\n{expected}");
    }
    assert_eq!(warnings.len(), 4, "{warnings:?}");
    assert_eq!(metrics(&json_lines(&scratch.read("kept"))), lines(&scratch));
    // The program that hung is gone.
    let pid = scratch.read("pid");
    let until = Instant::now() + Duration::from_secs(20);
    while std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(Instant::now() < until, "{pid} runs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A Python without packages, as a program.
fn bare_python(scratch: &Scratch) -> String {
    scratch.write("bare-python", "#!/bin/sh\nexec python3 -S \"$@\"\n");
    let path = scratch.path("bare-python");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn a_missing_package_is_one_warning_with_what_to_install_and_none_for_all() {
    let scratch = Scratch::new();
    let python = bare_python(&scratch);
    let vars = [("RLHF_PYTHON", python.as_str()), ("PYTHONPATH", "")];
    let ran = run(&scratch, SFT, &["wandb"], &vars);
    assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{}", ran.stderr);
    assert!(ran.stderr.starts_with("warning: wandb: its Python package is not installed: `"), "{}", ran.stderr);
    assert!(
        ran.stderr.contains(" -m pip install wandb`, or RLHF_PYTHON for another Python; the run "),
        "{}",
        ran.stderr
    );
    assert!(!scratch.path("out/trackers.json").exists());
    let ran = run(&scratch, &format!("{SFT} --overwrite_output_dir"), &["all"], &vars);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    let mut files = std::fs::read_dir(scratch.path("out")).unwrap();
    assert!(files.any(|file| file.unwrap().file_name().to_string_lossy().starts_with("events.out.tfevents.")));
    let none = [("RLHF_PYTHON", "/no/such/python")];
    let ran = run(&scratch, &format!("{SFT} --overwrite_output_dir"), &["mlflow"], &none);
    assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{}", ran.stderr);
    let expected =
        "warning: mlflow: /no/such/python cannot be started: No such file or directory (os error 2) (install Python";
    assert!(ran.stderr.starts_with(expected), "{}", ran.stderr);
}

/// A module in the place of trackio's client, which appends its calls to the file `calls`.
const CLIENT: &str = r#"
import enum, json, os, sys
class AlertLevel(enum.Enum):
    INFO = "info"
def note(*call):
    with open("calls", "a") as file:
        file.write(json.dumps(call, default=str) + "\n")
class Run:
    name = "taken"
class Api:
    def runs(self, project):
        return [Run]
class Table:
    def __init__(self, data):
        self.data = data
    def __str__(self):
        return "table of %d" % len(self.data)
class Artifact:
    def __init__(self, name, type):
        self.name, self.files = name, []
    def add_file(self, path, name):
        self.files.append(name)
def init(**arguments):
    print("to standard output")
    print("to standard error", file=sys.stderr)
    try:
        open("/dev/tty")
        note("terminal")
    except OSError:
        pass
    note("init", {name: value for name, value in arguments.items() if name != "config"}, sys.stdin.read())
    run = Run()
    run.name = arguments["name"]
    return run
def log(metrics, step):
    if os.environ.get("FAILS") and step > 0:
        raise RuntimeError("refused with %s\nsecond line" % os.environ["MY_API_KEY"])
    note("log", step, metrics)
def alert(**arguments):
    note("alert", arguments)
def log_artifact(artifact):
    note("artifact", artifact.name, all(name in artifact.files for name in ["model.safetensors", "config.yaml"]))
def finish():
    note("finish")
"#;

fn calls(scratch: &Scratch) -> Vec<Value> {
    scratch.read("calls").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_client_gets_the_numbers_of_the_run_and_its_output_and_its_errors_stay_out_of_the_run() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("modules")).unwrap();
    scratch.write("modules/trackio.py", CLIENT);
    // A file of the working directory with the name of a module is not imported.
    scratch.write("json.py", "raise SystemExit(9)");
    let modules = scratch.path("modules");
    let vars = [("PYTHONPATH", modules.to_str().unwrap())];
    let line = format!("{PPO} --run_name taken --log_model --eval_steps 2 --num_eval_prompts 2 --eval_split_size 2");
    let ran = run(&scratch, &line, &["trackio"], &vars);
    assert!(ran.code == 0 && !ran.stderr.contains("track"), "{}", ran.stderr);
    let found = calls(&scratch);
    let init = &found[0][1];
    assert!(found[0][0] == "init" && init["project"] == "rlhf" && init.get("resume").is_none(), "{init}");
    assert!(init["name"].as_str().unwrap().starts_with("taken-"), "a name of its own: {init}");
    assert_eq!(found[0][2], "", "standard input has nothing");
    let logged = |step: u64| {
        let step_calls = found.iter().filter(|call| call[0] == "log" && call[1] == step);
        step_calls.map(|call| call[2].clone()).collect::<Vec<_>>()
    };
    for line in lines(&scratch) {
        let mut expected = line.as_object().unwrap().clone();
        let step = expected.remove("step").unwrap().as_u64().unwrap();
        expected.retain(|_, value| !value.is_null());
        assert!(logged(step).contains(&Value::Object(expected)), "step {step}: {:?}", logged(step));
    }
    assert!(logged(2).contains(&json!({"samples/evaluation": "table of 2"})), "{:?}", logged(2));
    assert_eq!(found[found.len() - 2..], [json!(["artifact", "taken", true]), json!(["finish"])]);
    let ids: Value = serde_json::from_str(&scratch.read("out/trackers.json")).unwrap();
    assert_eq!(ids["trackio"], init["name"]);

    std::fs::remove_file(scratch.path("calls")).unwrap();
    let vars = [vars[0], ("FAILS", "1"), ("MY_API_KEY", "abcdef123456")];
    let ran = run(&scratch, &format!("{PPO} --overwrite_output_dir"), &["trackio"], &vars);
    let mut warnings: Vec<&str> = ran.stderr.lines().collect();
    warnings.sort_unstable();
    let expected =
        ["metrics", "samples"].map(|kind| format!("warning: trackio: could not log {kind}: refused with ..."));
    assert_eq!((ran.code, warnings), (0, expected.iter().map(String::as_str).collect()));
    assert_eq!(calls(&scratch).last().unwrap(), &json!(["finish"]));
}

/// The local database of the client [`CLIENT`].
const DATABASE: &str = r#"
import json
class SQLiteStorage:
    def get_logs(project, run):
        calls = [json.loads(line) for line in open("calls")]
        return [{"step": call[1], "timestamp": n, **call[2]} for n, call in enumerate(calls) if call[0] == "log"]
"#;

#[test]
fn updates_that_a_resumed_run_repeats_are_not_logged_twice() {
    let scratch = Scratch::new();
    std::fs::create_dir_all(scratch.path("modules/trackio")).unwrap();
    scratch.write("modules/trackio/__init__.py", CLIENT);
    scratch.write("modules/trackio/sqlite_storage.py", DATABASE);
    let modules = scratch.path("modules");
    let vars = [("PYTHONPATH", modules.to_str().unwrap())];
    let line = format!("{PPO} --save_steps 1 --eval_steps 1 --num_eval_prompts 2 --eval_split_size 2");
    let ran = run(&scratch, &line, &["trackio"], &vars);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    // As if it had been killed before its last checkpoint.
    std::fs::remove_dir_all(scratch.path("out/checkpoint-2")).unwrap();
    let ran = run(&scratch, &format!("{line} --resume_from_checkpoint true"), &["trackio"], &vars);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let logged = calls(&scratch).into_iter().filter(|call| call[0] == "log");
    let names = |call: &Value| call[2].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let mut seen: Vec<_> =
        logged.flat_map(|call| names(&call).into_iter().map(move |name| (call[1].clone(), name))).collect();
    let all = seen.len();
    seen.sort_by_key(|(step, name)| (step.as_u64(), name.clone()));
    seen.dedup();
    assert_eq!(seen.len(), all, "nothing is there twice");
    for line in lines(&scratch) {
        let metrics = line.as_object().unwrap().iter().filter(|(name, value)| *name != "step" && !value.is_null());
        for (name, _) in metrics {
            assert!(seen.contains(&(line["step"].clone(), name.clone())), "{} {name}", line["step"]);
        }
    }
}

#[test]
fn a_limit_of_the_wait_that_is_no_number_is_a_warning() {
    let scratch = Scratch::new();
    let ran = run(&scratch, SFT, &[RECORDER], &[("RLHF_TRACKER_TIMEOUT", "abc")]);
    let expected = "warning: RLHF_TRACKER_TIMEOUT: expected a number of seconds, found `abc`; the limit is 30 s\n";
    assert_eq!((ran.code, ran.stderr.as_str()), (0, expected));
}

#[test]
fn ctrl_c_stops_the_run_and_not_the_tracker_which_gets_the_end() {
    let scratch = Scratch::new();
    let line = PPO.replace("--total_episodes 8", "--total_episodes 400000");
    let mut command = scratch.command(&line);
    command.args(["--report_to", RECORDER]).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    let child = command.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(120);
    while !scratch.path("events").is_file() || !scratch.read("events").contains("\"metrics\"") {
        assert!(Instant::now() < until, "no metrics");
        std::thread::sleep(Duration::from_millis(50));
    }
    // As a terminal does: to the whole group.
    kill_process_group(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let found = events(&scratch);
    let end = found.last().unwrap();
    assert_eq!((&end["type"], &end["status"]), (&json!("end"), &json!("stopped")));
    assert!(end["message"].as_str().unwrap().starts_with("stopped as requested after update "), "{end:?}");
    assert_eq!(metrics(&found), lines(&scratch));
}

#[test]
fn a_run_that_fails_ends_as_failed() {
    let scratch = Scratch::new();
    // The reward gives up in the second update.
    let reward = r#"for i in 1 2 3 4; do read -r line; echo '{"score": 1}'; done; exit 1"#;
    let line = PPO.replace("--reward_model_path reward ", "");
    let mut command = scratch.command(&format!("{line} --reward_retries 0 --num_sample_generations 0"));
    command.args(["--reward_command", reward, "--report_to", RECORDER]);
    let ran = Ran::from(output(&mut command));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let found = events(&scratch);
    let end = found.last().unwrap();
    assert_eq!((&end["type"], &end["status"]), (&json!("end"), &json!("failed")));
    assert!(end["message"].as_str().unwrap().contains("reward"), "{end:?}");
}

#[test]
fn alarms_and_rollbacks_are_passed_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = rolling_back(dir.path());
    let file = dir.path().join("events");
    config.run.tracking.report_to = vec![ReportTo::Command(format!("cat > '{}'", file.display()))];
    ppo(&config, Console::Silent).unwrap();
    let found = json_lines(&std::fs::read_to_string(&file).unwrap());
    let read = |name: &str| json_lines(&std::fs::read_to_string(Path::new(&config.run.output_dir).join(name)).unwrap());
    let alarms = read("alarms.jsonl");
    let passed: Vec<(Value, Value)> = found
        .iter()
        .filter(|event| event["type"] == "alarm" || event["type"] == "rollback")
        .map(|event| (event["step"].clone(), event["message"].clone()))
        .collect();
    let expected: Vec<(Value, Value)> =
        alarms.iter().map(|line| (line["step"].clone(), line["message"].clone())).collect();
    assert_eq!(passed, expected);
    let rollbacks = with_type(&found, "rollback");
    assert!(!rollbacks.is_empty());
    // The updates after a rollback are there twice, with the later ones as in the file.
    let mut last: Map<String, Value> = Map::new();
    for line in metrics(&found) {
        last.insert(line["step"].to_string(), line);
    }
    let lines: Vec<Value> = read("metrics.jsonl").into_iter().map(Value::Object).collect();
    assert_eq!(lines.iter().map(|line| last[&line["step"].to_string()].clone()).collect::<Vec<_>>(), lines);
}

#[test]
fn settings_that_are_not_valid_are_one_line_without_their_secrets() {
    let scratch = Scratch::new();
    let known = "none, all, tensorboard, wandb, mlflow, trackio or command:PROGRAM";
    scratch.refuses_with(PPO, &["--report_to", "comet_ml"], 2, &["comet_ml", known]);
    scratch.refuses_with(PPO, &["--report_to", "none", "wandb"], 2, &["report_to = none wandb: expected none alone"]);
    let kwargs = r#"{"wandb": {"api_key": "zzzzzz"}}"#;
    scratch.refuses_with(PPO, &["--tracker_kwargs", kwargs], 2, &["tracker_kwargs: wandb.api_key: expected no secret"]);
    scratch.refuses_with(PPO, &["--tracker_kwargs", "wandb"], 2, &["tracker_kwargs: expected JSON of the form"]);
    scratch.refuses_with(PPO, &["--log_model"], 2, &["log_model = true has no effect without a tracker"]);
    scratch.write("run.yaml", "tracker_kwargs:\n  wandb:\n    settings: {api_key: zzzzzz}\n");
    let line = format!("{PPO} --config run.yaml");
    scratch.refuses(&line, 2, &["tracker_kwargs: wandb.settings.api_key: expected no secret"]);
    assert!(!scratch.run(&line).stderr.contains("zzzzzz"));
}
