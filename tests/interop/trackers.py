"""Reports runs of `rlhf` to wandb, MLflow and trackio, and reads back what they have.

    python tests/interop/trackers.py target/release/rlhf

wandb records offline, and its file is read; MLflow is a server on 127.0.0.1, read through its client; trackio's SQLite database is read.
Their numbers must equal those of metrics.jsonl, also after a run that is resumed. Prints one line per check and a total. Exit code 1
if any failed. Needs wandb, mlflow and trackio; no network.
"""

import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from mlflow.tracking import MlflowClient
from runner import Failure, binary, copy_model, expect, run_checks
from wandb.proto import wandb_internal_pb2

PPO = (
    "ppo --sft_model_path policy --reward_model_path reward --dataset_name prompts.jsonl --response_length 8 --eval_split_size 2 "
    "--per_device_train_batch_size 4 --total_episodes 8 --eval_steps 2 --num_eval_prompts 2 --save_steps 2 "
    "--metric_for_best_model eval/score --log_model"
).split()
RESUMED = ["--total_episodes", "16", "--resume_from_checkpoint", "true"]
# Long enough for a client to start before the end. An update takes 0.2 seconds, so that no line waits for a tracker's server when the run is killed.
LONG = [*PPO[: PPO.index("--log_model")], "--total_episodes", "256", "--eval_steps", "8", "--save_steps", "8"]
LONG += ["--reward_command", "sh slow.sh"]


def make_inputs(work):
    for name, golden in (("policy", "gpt_neox"), ("reward", "gpt_neox_cls")):
        copy_model(work / name, golden)
    prompts = ["The movie", "A film", "the capital of France", "do", "human", "a sing", "2024", "is it"]
    lines = {
        "prompts.jsonl": [{"prompt": prompt} for prompt in prompts],
        "demos.jsonl": [{"prompt": prompt, "completion": " and then some"} for prompt in prompts],
        "pairs.jsonl": [{"prompt": prompt, "chosen": " yes", "rejected": " no, no"} for prompt in prompts],
    }
    (work / "slow.sh").write_text("set -f; while read -r line; do sleep 0.05; set -- $line; echo $#; done\n")
    for name, rows in lines.items():
        (work / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


class Runs:
    """Runs of rlhf in a scratch folder, each made once."""

    def __init__(self, work, variables):
        self.work = work
        self.variables = variables

    def run(self, *words, **variables):
        """Runs rlhf, which must succeed; the warnings and the lines of trackers on its standard error."""
        done = subprocess.run(
            [str(BINARY), *words],
            cwd=self.work,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RLHF_PYTHON": sys.executable} | self.variables | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        expect(done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-800:]}")
        starts = ("warning", "error", "wandb: ", "mlflow: ", "trackio: ")
        return "".join(line for line in done.stderr.splitlines(keepends=True) if line.startswith(starts))

    def kill(self, out, *words, **variables):
        """Starts a run, and kills it after updates that no checkpoint has."""
        process = subprocess.Popen(
            [str(BINARY), *LONG, *words, "--output_dir", out],
            cwd=self.work,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RLHF_PYTHON": sys.executable} | self.variables | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        folder = self.work / out

        def is_due():
            # The tracker has its id, and the last checkpoint is some updates old.
            lines = (folder / "metrics.jsonl").read_text().count("\n") if (folder / "trackers.json").exists() else 0
            return lines > 9 and lines % 8 >= 5

        for _ in range(6000):
            if process.poll() is not None or is_due():
                break
            time.sleep(0.01)
        # The tracker gets the lines that are sent already.
        process.kill()
        process.wait()
        time.sleep(4)
        expect(not (self.work / out / "model.safetensors").exists(), "the run has ended too early")
        done = max(int(folder.name.split("-")[1]) for folder in (self.work / out).glob("checkpoint-*"))
        expect(self.lines(out)[-1]["step"] > done, f"no update after checkpoint {done}")

    def lines(self, out):
        return [json.loads(line) for line in (self.work / out / "metrics.jsonl").read_text().splitlines()]

    def tracker_id(self, out, tracker):
        return json.loads((self.work / out / "trackers.json").read_text())[tracker]


def is_clock(name):
    """Whether the metric is another one when an update is done again."""
    return name == "eps" or name.startswith(("time/", "tokens_per_second/"))


def same_numbers(lines, found, repeated=False):
    """The numbers `found`, by step and name, are those of metrics.jsonl. Updates that were `repeated` have other times there."""
    for line in lines:
        for name, value in line.items():
            if name == "step" or value is None or repeated and is_clock(name):
                continue
            expect(found.get((line["step"], name)) == value, f"{name} {line['step']}: {found.get((line['step'], name))}, not {value}")
    expected = sum(name != "step" and value is not None for line in lines for name, value in line.items())
    expect(expected > 20, f"{expected} numbers")


def records(path):
    """The records of a file of wandb: protocol buffers in LevelDB's log format, blocks of 32 KiB after a header of 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    expect(data[:4] == b":W&B", f"{path}: no file of wandb")
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def of_wandb(runs, out):
    """The rows, configuration, summary and exit code of the newest wandb run of a folder, with its id and the name of its folder."""
    folder = max((runs.work / out / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)
    rows, config, summary, code, names = [], {}, {}, None, []
    for record in records(next(folder.glob("run-*.wandb"))):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            names.append((record.run.run_id, record.run.display_name, record.run.project))
        elif kind == "history":
            row = {}
            for item in record.history.item:
                row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            rows.append(row)
        elif kind == "summary":
            summary |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update}
        elif kind == "exit":
            code = record.exit.exit_code
    return {"rows": rows, "config": config, "summary": summary, "code": code, "names": names, "folder": folder}


def numbers(rows):
    """The numbers of wandb's rows, by step and name."""
    found = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)):
                found[row.get("step"), name] = value
    return found


def checks_of_wandb(runs):
    out, wandb = "wandb-out", ["--report_to", "wandb", "--run_name", "neox", "--project", "films"]
    state = {}

    def first():
        state["stderr"] = runs.run(*PPO, *wandb, "--output_dir", out, WANDB_MODE="offline")
        state["first"] = found = of_wandb(runs, out)
        same_numbers(runs.lines(out), numbers(found["rows"]))
        expect(found["names"][0] == (runs.tracker_id(out, "wandb"), "neox", "films"), found["names"])
        expect(found["config"]["seed"] == 42 and found["config"]["total_episodes"] == 8, found["config"])
        expect(found["code"] == 0, f"exit code {found['code']}")
        steps = [row["_step"] for row in found["rows"] if "objective/kl" in row]
        expect(steps == [1, 2], f"rows {steps}")
        notes = [line for line in state["stderr"].splitlines() if "wandb" in line]
        expect(len(notes) == 1 and notes[0].startswith("wandb: the run is recorded on this machine"), state["stderr"])

    def tables():
        keys = {key.removesuffix("/_type") for row in state["first"]["rows"] for key in row if key.endswith("/_type")}
        expect(keys == {"samples", "samples/evaluation"}, keys)
        files = list((state["first"]["folder"] / "files/media/table").rglob("*.table.json"))
        table = next(json.loads(file.read_text()) for file in files if "evaluation" in str(file))
        expect(table["columns"][:3] == ["prompt", "response", "score"], table["columns"])
        rows = (runs.work / out / "samples").glob("eval-*.jsonl")
        expected = [(row["prompt"], row["response"], row["score"]) for file in rows for row in map(json.loads, file.open())]
        for row in table["data"]:
            expect(tuple(row[:3]) in expected, row)

    def resumed():
        runs.run(*PPO, *wandb, "--output_dir", out, *RESUMED, WANDB_MODE="offline")
        found = of_wandb(runs, out)
        expect(found["names"][0][0] == state["first"]["names"][0][0], "another run")
        expect(found["folder"] != state["first"]["folder"], "the same file")
        rows = state["first"]["rows"] + found["rows"]
        same_numbers(runs.lines(out), numbers(rows))
        steps = [row["_step"] for row in rows if "objective/kl" in row]
        expect(steps == [1, 2, 3, 4], f"rows {steps}")
        expect(found["summary"].get("status") == "finished", found["summary"].get("status"))

    def no_login():
        home = runs.work / "home"
        home.mkdir()
        variables = {"HOME": str(home), "WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": str(home / "none")}
        stderr = runs.run(*PPO, *wandb, "--output_dir", "no-login", **variables)
        warnings = [line for line in stderr.splitlines() if "wandb" in line]
        expect(len(warnings) == 1, stderr)
        expected = "warning: wandb: there is no login for wandb (`wandb login`, or WANDB_API_KEY): the run is recorded on this machine"
        expect(warnings[0].startswith(expected), warnings[0])
        same_numbers(runs.lines("no-login"), numbers(of_wandb(runs, "no-login")["rows"]))

    yield "wandb, offline: its file has the numbers, the settings and the end of a run", first
    yield "wandb: tables have the responses", tables
    yield "wandb: a resumed run continues the same run", resumed
    yield "wandb without a login: one warning, and the run is recorded offline", no_login


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """An MLflow server on 127.0.0.1."""

    def __init__(self, work):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        folder = work / "mlflow"
        folder.mkdir()
        words = f"-m mlflow server --host 127.0.0.1 --port {port} --workers 1 --backend-store-uri sqlite:///{folder}/mlflow.db"
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *words.split(), "--artifacts-destination", str(folder / "artifacts")],
            stdout=self.log,
            stderr=self.log,
            cwd=folder,
            start_new_session=True,
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).read()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.stop()
        raise Failure(f"mlflow server: {(folder / 'log').read_text()[-800:]}")

    def stop(self):
        # The workers of the server are in its group.
        try:
            os.killpg(self.process.pid, 15)
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        except ProcessLookupError:
            pass


def checks_of_mlflow(runs, url):
    out, mlflow = "mlflow-out", ["--report_to", "mlflow", "--run_name", "neox", "--project", "films"]
    client = MlflowClient(tracking_uri=url)

    def of_server(out=out):
        run = client.get_run(runs.tracker_id(out, "mlflow"))
        found = {}
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                expect((metric.step, name) not in found, f"{name} {metric.step} twice")
                found[metric.step, name] = metric.value
        return run, found

    def first():
        stderr = runs.run(*PPO, *mlflow, "--output_dir", out, MLFLOW_TRACKING_URI=url)
        run, found = of_server()
        same_numbers(runs.lines(out), found)
        expect((run.info.run_name, run.info.status) == ("neox", "FINISHED"), run.info)
        expect(client.get_experiment(run.info.experiment_id).name == "films", run.info)
        expect(run.data.params["seed"] == "42" and run.data.params["total_episodes"] == "8", run.data.params)
        expect(run.data.tags["best.metric"] == "eval/score", run.data.tags)
        expect("mlflow" not in stderr, stderr)

    def artifacts():
        run = runs.tracker_id(out, "mlflow")
        model = {Path(file.path).name: file.file_size for file in client.list_artifacts(run, "model")}
        critic = [Path(file.path).name for file in client.list_artifacts(run, "model/value_model")]
        expect("model.safetensors" in critic, critic)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
            expect(model[name] == (runs.work / out / name).stat().st_size, f"{name}: {model}")
        with tempfile.TemporaryDirectory() as folder:
            table = json.loads(Path(client.download_artifacts(run, "samples/evaluation-000002.json", folder)).read_text())
        rows = (runs.work / out / "samples/eval-000002.jsonl").open()
        expected = [[row["prompt"], row["response"], row["score"]] for row in map(json.loads, rows)]
        expect([row[:3] for row in table["data"]] == expected, table)

    def resumed():
        before = runs.tracker_id(out, "mlflow")
        runs.run(*PPO, *mlflow, "--output_dir", out, *RESUMED, MLFLOW_TRACKING_URI=url)
        expect(runs.tracker_id(out, "mlflow") == before, "another run")
        run, found = of_server()
        same_numbers(runs.lines(out), found)
        expect(run.info.status == "FINISHED" and {step for step, _ in found} >= {1, 2, 3, 4}, run.info)

    def killed():
        runs.kill("mlflow-killed", *mlflow, MLFLOW_TRACKING_URI=url)
        before = runs.tracker_id("mlflow-killed", "mlflow")
        runs.run(*LONG, *mlflow, "--output_dir", "mlflow-killed", "--resume_from_checkpoint", "true", MLFLOW_TRACKING_URI=url)
        expect(runs.tracker_id("mlflow-killed", "mlflow") == before, "another run")
        run, found = of_server("mlflow-killed")
        same_numbers(runs.lines("mlflow-killed"), found, repeated=True)
        expect(run.info.status == "FINISHED" and run.info.run_id == before, run.info)

    def gone():
        before = runs.tracker_id(out, "mlflow")
        client.delete_run(before)
        more = ["--total_episodes", "24", "--resume_from_checkpoint", "true"]
        stderr = runs.run(*PPO, *mlflow, "--output_dir", out, *more, MLFLOW_TRACKING_URI=url)
        warnings = [line for line in stderr.splitlines() if line.startswith("warning: mlflow: ")]
        expect(len(warnings) == 1 and f"its run {before} is not there" in warnings[0], stderr)
        run, found = of_server()
        expect(run.info.run_id != before and {step for step, _ in found} == {5, 6}, found.keys())

    def experiment():
        number = client.create_experiment("by number")
        variables = {"MLFLOW_TRACKING_URI": url, "MLFLOW_EXPERIMENT_ID": number}
        runs.run(*PPO, "--report_to", "mlflow", "--output_dir", "by-number", **variables)
        run, _ = of_server("by-number")
        expect(run.info.experiment_id == number, run.info)

    def unreachable():
        address = f"http://me:secret@127.0.0.1:{free_port()}"
        stderr = runs.run(*PPO, *mlflow, "--output_dir", "unreachable", MLFLOW_TRACKING_URI=address)
        warnings = [line for line in stderr.splitlines() if "mlflow" in line]
        expect(len(warnings) == 1 and warnings[0].startswith("warning: mlflow: "), stderr)
        expect("secret" not in stderr and warnings[0].endswith("its metrics are in metrics.jsonl"), stderr)

    yield "MLflow: its server has the numbers, the settings and the end of a run", first
    yield "MLflow: artifacts are the model and the responses", artifacts
    yield "MLflow: a resumed run continues the same run", resumed
    yield "MLflow: a run that was killed and resumed has each number once", killed
    yield "MLflow: a run that was deleted there continues as another one, with a warning", gone
    yield "MLflow: the experiment of MLFLOW_EXPERIMENT_ID", experiment
    yield "MLflow without a server: one warning without the password, and the run goes through", unreachable


def checks_of_trackio(runs):
    out, trackio = "trackio-out", ["--report_to", "trackio", "--run_name", "neox", "--project", "films"]
    folder = runs.work / "trackio"
    store = {"TRACKIO_DIR": str(folder)}

    def rows(query, *values, project="films"):
        database = sqlite3.connect(f"file:{folder / project}.db?mode=ro", uri=True)
        try:
            return database.execute(query, values).fetchall()
        finally:
            database.close()

    def of_database(name):
        found, tables = {}, {}
        for step, text in rows("SELECT step, metrics FROM metrics WHERE run_name = ?", name):
            for key, value in json.loads(text).items():
                expect((step, key) not in found, f"{key} {step} twice")
                (found if isinstance(value, (int, float)) else tables)[step, key] = value
        return found, tables

    def first():
        stderr = runs.run(*PPO, *trackio, "--output_dir", out, **store)
        found, tables = of_database("neox")
        same_numbers(runs.lines(out), found)
        expect(tables[2, "samples/evaluation"]["_value"][0]["prompt"], tables)
        config = json.loads(rows("SELECT config FROM configs WHERE run_name = ?", "neox")[0][0])
        expect(config["seed"] == 42 and config["total_episodes"] == 8, config)
        expect("trackio" not in stderr, stderr)

    def resumed():
        runs.run(*PPO, *trackio, "--output_dir", out, *RESUMED, **store)
        found, _ = of_database("neox")
        same_numbers(runs.lines(out), found)
        expect({step for step, _ in found} >= {1, 2, 3, 4}, {step for step, _ in found})

    def killed():
        runs.kill("trackio-killed", "--report_to", "trackio", "--run_name", "killed", "--project", "films", **store)
        resume = ["--resume_from_checkpoint", "true"]
        runs.run(*LONG, "--report_to", "trackio", "--run_name", "killed", "--project", "films", "--output_dir", "trackio-killed", *resume, **store)
        found, _ = of_database("killed")
        same_numbers(runs.lines("trackio-killed"), found, repeated=True)

    def pipeline():
        text = (
            "output_dir: whole\nreport_to: trackio\nproject: whole\nper_device_train_batch_size: 4\n"
            "sft: {model_name_or_path: policy, dataset_name: demos.jsonl, max_steps: 2, logging_steps: 1}\n"
            "reward: {model_name_or_path: policy, new_reward_head: true, dataset_name: pairs.jsonl, max_steps: 2, logging_steps: 1}\n"
            "ppo: {dataset_name: prompts.jsonl, response_length: 8, total_episodes: 8}\n"
        )
        (runs.work / "pipeline.yaml").write_text(text)
        runs.run("pipeline", "--config", "pipeline.yaml", **store)
        found = rows("SELECT DISTINCT run_name FROM metrics ORDER BY run_name", project="whole")
        expect(found == [("whole-ppo",), ("whole-reward",), ("whole-sft",)], found)

    yield "trackio: its database has the numbers, the responses and the settings of a run", first
    yield "trackio: a resumed run continues the same run", resumed
    yield "trackio: a run that was killed and resumed has each number once", killed
    yield "trackio: a pipeline is a run for each stage", pipeline


def checks_of_all(runs, url):
    def all_at_once():
        variables = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": url, "TRACKIO_DIR": str(runs.work / "trackio")}
        stderr = runs.run(*PPO, "--report_to", "all", "--project", "together", "--output_dir", "all-out", **variables)
        ids = json.loads((runs.work / "all-out/trackers.json").read_text())
        expect(sorted(ids) == ["mlflow", "trackio", "wandb"], ids)
        expect("warning" not in stderr, stderr)
        same_numbers(runs.lines("all-out"), numbers(of_wandb(runs, "all-out")["rows"]))

    yield "all of them at once", all_at_once


def main():
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        make_inputs(work)
        runs = Runs(work, {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"})
        server = Server(work)
        try:
            groups = checks_of_wandb(runs), checks_of_mlflow(runs, server.url), checks_of_trackio(runs)
            every = [check for group in groups for check in group]
            return run_checks([*every, *checks_of_all(runs, server.url)])
        finally:
            server.stop()


if __name__ == "__main__":
    BINARY = binary(__doc__.splitlines()[0])
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    sys.exit(main())
