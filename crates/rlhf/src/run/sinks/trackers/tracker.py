"""Passes the events of a run of rlhf to wandb, MLflow or trackio, through the tracker's own client.

rlhf starts this program once per tracker, with the Python of the user, and writes one JSON object per line to its standard input.
docs/guides/trackers.md describes the lines. A tracker that fails must not disturb the run: nothing of this program reaches the terminal, and it
reports to rlhf, as JSON lines on its standard output.
"""

import sys

# The working directory may hold a file with the name of a module.
sys.path = [path for path in sys.path if path]

import fcntl  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import posixpath  # noqa: E402
import queue  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import termios  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import uuid  # noqa: E402

# Seconds without a line after which a tracker may write what it has.
PAUSE = 1.0
# Lines that are read ahead. rlhf has its own limit for the lines behind them.
READ_AHEAD = 64
# The process that replies. A child that a client forks must not.
PROCESS = os.getpid()


class Tracker:
    """Passes events to a tracker's client. Each method is one kind of event; one that a tracker has no place for does nothing."""

    def __init__(self, run):
        """Starts or continues the run that the first line describes."""

    def metrics(self, step, metrics):
        """Logs the metrics of an update."""

    def samples(self, step, source, columns, rows):
        """Logs a table of responses."""

    def alarm(self, step, name, message):
        """Reports an alarm, or a rollback."""

    def rollback(self, step, to):
        """Records that the updates after update `to` are done again, of `step` done before."""

    def best(self, best):
        """Records which model is the best so far: `metric`, `value` and `update`."""

    def artifact(self, name, folder, files):
        """Uploads the model in a folder."""

    def pause(self):
        """Is called when no line has come for a while."""

    def end(self, status, message):
        """Ends the run as `finished`, `stopped` or `failed`."""


class Wandb(Tracker):
    package = "wandb"

    def __init__(self, run):
        import wandb

        self.wandb = wandb
        arguments = {
            "project": run["project"] or os.environ.get("WANDB_PROJECT") or "rlhf",
            "name": run["name"],
            "job_type": run["command"],
            "config": run["config"],
            "allow_val_change": True,
            **run["kwargs"],
        }
        if "dir" not in arguments and "WANDB_DIR" not in os.environ:
            arguments["dir"] = run["output_dir"]
        settings = arguments.pop("settings", {})
        arguments["settings"] = {"silent": True, "console": "off", "init_timeout": 15, **settings}
        resume = run["resume"]
        if resume:
            arguments.update(id=resume["id"], resume="allow")
        self.run, reason = self.start(arguments)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        # Rows of wandb have increasing numbers: those of the updates, until a rollback.
        self.ahead = max(0, self.run.step - resume["updates"] - 1) if resume and resume["rollbacks"] else 0
        # Whether a row of metrics is not written yet.
        self.is_open = False
        reply("ready", id=self.run.id, url=None if self.run.offline else self.run.url)
        if self.run.offline:
            folder = os.path.dirname(self.run.dir)
            text = f"the run is recorded on this machine, and `wandb sync {folder}` uploads it"
            if reason:
                reply("warning", message=f"{reason}: {text}")
            else:
                reply("note", message=text)

    def start(self, arguments):
        """Returns the run of wandb and, where it could only be recorded on this machine, the reason."""
        try:
            return self.wandb.init(**arguments), None
        except Exception as error:
            mode = arguments.get("mode") or os.environ.get("WANDB_MODE")
            if mode in ("offline", "disabled"):
                raise
            reason = first_line(error)
            if "key" in reason.lower() or "login" in reason.lower():
                reason = "there is no login for wandb (`wandb login`, or WANDB_API_KEY)"
            return self.wandb.init(**{**arguments, "mode": "offline"}), reason

    def metrics(self, step, metrics):
        # Updates that a resumed run repeats are there already.
        if step + self.ahead >= self.run.step:
            self.run.log({"step": step, **metrics}, step=step + self.ahead)
            self.is_open = True

    def samples(self, step, source, columns, rows):
        table = self.wandb.Table(columns=columns, data=rows)
        key = "samples" if source == "sample_prompts" else f"samples/{source}"
        self.run.log({key: table}, step=max(step + self.ahead, self.run.step))

    def alarm(self, step, name, message):
        # The alarm of an update that a resumed run repeats is there already.
        if step + self.ahead >= self.run.step - 1:
            self.run.alert(title=name, text=message, level=self.wandb.AlertLevel.WARN)

    def rollback(self, step, to):
        self.pause()
        self.ahead = max(self.run.step, step + self.ahead) - to - 1

    def best(self, best):
        self.run.summary.update({f"best/{name}": value for name, value in best.items()})

    def artifact(self, name, folder, files):
        artifact = self.wandb.Artifact(name=re.sub(r"[^\w.-]", "-", name), type="model")
        for file in files:
            artifact.add_file(os.path.join(folder, file), name=file)
        self.run.log_artifact(artifact)

    def pause(self):
        # Otherwise the numbers of an update would be shown after the next one.
        if self.is_open:
            self.run.log({}, commit=True)
            self.is_open = False

    def end(self, status, message):
        self.run.summary["status"] = status
        code = {"finished": 0, "failed": 1}.get(status, 255)
        self.run.finish(exit_code=code)
        self.wandb.teardown(exit_code=code)


class Mlflow(Tracker):
    package = "mlflow"

    # Limits of the server for one request.
    most_params = 100
    most_metrics = 1000
    # Numbers that wait for a server that does not respond.
    most_waiting = 200_000

    def __init__(self, run):
        # A request that fails is repeated with the next metrics.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.Metric = Metric
        self.waiting = []
        self.names = {}
        # Updates that the run of the server has from before a resume; None before they are known.
        self.seen = None if run["resume"] else set()
        kwargs = dict(run["kwargs"])
        self.client = MlflowClient(tracking_uri=kwargs.pop("tracking_uri", None))
        tags = {str(name): str(value) for name, value in (kwargs.pop("tags", None) or {}).items()}
        description = kwargs.pop("description", None)
        if description:
            tags["mlflow.note.content"] = description
        experiment = kwargs.pop("experiment_name", None) or run["project"]
        name = kwargs.pop("run_name", None) or run["name"]
        place = kwargs.pop("artifact_location", None)
        if kwargs:
            known = "tracking_uri, experiment_name, run_name, artifact_location, tags, description"
            reply("warning", message=f"tracker_kwargs: mlflow.{', mlflow.'.join(kwargs)} has no effect; expected {known}")
        params = self.resumed(run["resume"]["id"]) if run["resume"] else None
        if params is None:
            self.seen = set()
            tags.update({"mlflow.source.name": "rlhf", "rlhf.command": run["command"], "rlhf.output_dir": run["output_dir"]})
            tags["rlhf.version"] = run["version"]
            experiment = self.experiment(experiment, place)
            created = self.client.create_run(experiment, run_name=name, tags=tags)
            self.id, params = created.info.run_id, {}
        # A parameter cannot be changed.
        new = [
            Param(self.allowed(name), text(value)[:6000])
            for name, value in run["config"].items()
            if self.allowed(name) not in params
        ]
        for start in range(0, len(new), self.most_params):
            self.client.log_batch(self.id, params=new[start : start + self.most_params])
        reply("ready", id=self.id)

    def resumed(self, run):
        """Continues the run of this id. Returns its parameters, or None if there is no such run."""
        from mlflow.exceptions import MlflowException

        self.id = run
        try:
            found = self.client.get_run(run)
            if found.info.lifecycle_stage == "active":
                self.client.update_run(run, status="RUNNING")
                return found.data.params
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        where = "it was deleted, or MLFLOW_TRACKING_URI or the working directory is another one"
        reply("warning", message=f"its run {run} is not there: {where}; a new run is started")
        return None

    def experiment(self, name, place):
        """Returns the id of an experiment, which is created if there is none. Without a name it is that of the environment."""
        if not name and os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return self.client.get_experiment(os.environ["MLFLOW_EXPERIMENT_ID"]).experiment_id
        name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "rlhf"
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return self.client.create_experiment(name, artifact_location=place)
            except Exception:
                # Another run may have created it meanwhile.
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        return found.experiment_id

    def allowed(self, name):
        """Returns a name that MLflow accepts, other than that of any other metric or setting."""
        if name not in self.names:
            mapped = posixpath.normpath(re.sub(r"[^\w\-./: ]", "_", name)).strip("/").replace("..", "_") or "_"
            taken = set(self.names.values())
            same, number = mapped, 2
            while same in taken:
                same, number = f"{mapped}_{number}", number + 1
            self.names[name] = same
        return self.names[name]

    def is_seen(self, step, metrics):
        """Whether the server has the update from before a resume."""
        if self.seen is None and metrics:
            self.seen = set()
            # The first metric is in all lines.
            points = self.client.get_metric_history(self.id, self.allowed(next(iter(metrics))))
            points.sort(key=lambda point: (point.timestamp, point.step))
            # After a rollback there are points of later updates, which are done again.
            self.seen = {point.step for point in points if point.step <= points[-1].step}
        return bool(self.seen) and step in self.seen

    def metrics(self, step, metrics):
        try:
            if self.is_seen(step, metrics):
                return
        except Exception:
            # A point that is there twice is better than none.
            pass
        now = int(time.time() * 1000)
        self.waiting += [self.Metric(self.allowed(name), value, now, step) for name, value in metrics.items()]
        del self.waiting[: -self.most_waiting]
        self.write()

    def write(self):
        """Writes the metrics that wait; they stay if the server does not respond."""
        while self.waiting:
            self.client.log_batch(self.id, metrics=self.waiting[: self.most_metrics])
            del self.waiting[: self.most_metrics]

    def samples(self, step, source, columns, rows):
        self.client.log_dict(self.id, {"columns": columns, "data": rows}, f"samples/{source}-{step:06}.json")

    def alarm(self, step, name, message):
        self.client.set_tag(self.id, f"alarm.{name}", f"update {step}: {message}"[:5000])

    def rollback(self, step, to):
        self.seen = set()

    def best(self, best):
        for name, value in best.items():
            self.client.set_tag(self.id, f"best.{name}", text(value))

    def artifact(self, name, folder, files):
        for file in files:
            self.client.log_artifact(self.id, os.path.join(folder, file), posixpath.join("model", os.path.dirname(file)).rstrip("/"))

    def pause(self):
        self.write()

    def end(self, status, message):
        try:
            self.write()
        finally:
            if message:
                self.client.set_tag(self.id, "rlhf.message", message[:5000])
            self.client.set_terminated(self.id, {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


class Trackio(Tracker):
    package = "trackio"

    def __init__(self, run):
        import trackio

        self.trackio = trackio
        arguments = {
            "project": run["project"] or "rlhf",
            "name": run["name"],
            "config": run["config"],
            "embed": False,
            **run["kwargs"],
        }
        # Steps and names of what the run has from before a resume, and the last of the steps.
        self.seen, self.last = set(), 0
        if run["resume"]:
            arguments.update(name=run["resume"]["id"], resume="allow")
            self.look(arguments["project"], arguments["name"])
        else:
            arguments["name"] = self.new_name(arguments["project"], arguments["name"])
        self.run = trackio.init(**arguments)
        reply("ready", id=self.run.name)

    def new_name(self, project, name):
        """Returns a name that no run of the project has: a run is continued by its name."""
        try:
            taken = {run.name for run in self.trackio.Api().runs(project)}
        except Exception:
            taken = set()
        return f"{name}-{uuid.uuid4().hex[:6]}" if name in taken else name

    def look(self, project, name):
        """Reads what the run has; nothing where its database is not on this machine."""
        try:
            from trackio.sqlite_storage import SQLiteStorage

            entries = SQLiteStorage.get_logs(project, name)
        except Exception:
            return
        if entries:
            # After a rollback there are entries of later updates, which are done again.
            self.last = entries[-1]["step"]
            self.seen = {(entry["step"], name) for entry in entries if entry["step"] <= self.last for name in entry}

    def metrics(self, step, metrics):
        self.log(step, metrics)

    def log(self, step, values):
        values = {name: value for name, value in values.items() if (step, name) not in self.seen}
        if values:
            self.trackio.log(values, step=step)

    def samples(self, step, source, columns, rows):
        key = "samples" if source == "sample_prompts" else f"samples/{source}"
        rows = [dict(zip(columns, row)) for row in rows]
        self.log(step, {key: self.trackio.Table(data=rows)})

    def alarm(self, step, name, message):
        if step >= self.last:
            self.trackio.alert(title=name, text=message)

    def rollback(self, step, to):
        self.seen, self.last = set(), 0

    def best(self, best):
        text = f"{best['metric']} = {best['value']} after update {best['update']}"
        self.trackio.alert(title="best model", text=text, level=self.trackio.AlertLevel.INFO)

    def artifact(self, name, folder, files):
        artifact = self.trackio.Artifact(name=re.sub(r"[^\w.-]", "-", name), type="model")
        for file in files:
            artifact.add_file(os.path.join(folder, file), name=file)
        self.trackio.log_artifact(artifact)

    def end(self, status, message):
        if status != "finished":
            self.trackio.alert(title=f"run {status}", text=message or "the run did not finish")
        self.trackio.finish()


TRACKERS = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def text(value):
    return value if isinstance(value, str) else json.dumps(value)


def first_line(error):
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def table(samples):
    """Returns the columns and the rows of a table of responses."""
    components = sorted({name for sample in samples for name in sample.get("components") or {}})
    # Those of tools and environments, where there are some.
    own = [name for name in ("tool_calls", "tool_failures", "env_reward", "messages") if any(name in sample for sample in samples)]
    columns = ["prompt", "response", "score", *components, "finish_reason", "num_tokens", *own]
    rows = []
    for sample in samples:
        messages = json.dumps(sample["messages"], ensure_ascii=False) if "messages" in sample else None
        scores = sample.get("components") or {}
        row = [sample["prompt"], sample["response"], sample["score"], *(scores.get(name) for name in components)]
        row += [sample.get("finish_reason"), sample.get("num_tokens")]
        rows.append([*row, *(messages if name == "messages" else sample.get(name) for name in own)])
    return columns, rows


def finite(metrics):
    """Returns the metrics without the step and without those that are not finite, which are null."""
    return {name: value for name, value in metrics.items() if name != "step" and value is not None}


def pass_on(tracker, event):
    """Passes one line to the tracker. Returns True after the end of the run."""
    kind, step = event.get("type"), event.get("step")
    if kind == "metrics":
        tracker.metrics(step, finite(event["metrics"]))
    elif kind == "samples":
        tracker.samples(step, event["source"], *table(event["samples"]))
    elif kind == "alarm":
        tracker.alarm(step, event["name"], event["message"])
    elif kind == "rollback":
        tracker.alarm(step, "rollback", event["message"])
        tracker.rollback(step, event["to"])
    elif kind == "saved" and event.get("best"):
        tracker.best({name: event["best"].get(name) for name in ("metric", "value", "update")})
    elif kind == "artifact":
        tracker.artifact(event["name"], event["dir"], event["files"])
    elif kind == "end":
        tracker.end(event["status"], event.get("message"))
    return kind == "end"


def follow(tracker, lines):
    """Passes all lines to the tracker. An error of the tracker is reported once for each kind of line."""
    failed = set()
    while True:
        try:
            line = lines.get(timeout=PAUSE)
        except queue.Empty:
            event = {"type": "pause"}
        else:
            # Without a last line, rlhf was killed.
            killed = {"type": "end", "status": "failed", "message": "rlhf ended without closing the run"}
            event = json.loads(line) if line else killed
        try:
            if event["type"] == "pause":
                tracker.pause()
            elif pass_on(tracker, event):
                return 0
        except Exception as error:
            kind = "metrics" if event["type"] == "pause" else event["type"]
            if kind not in failed:
                failed.add(kind)
                reply("warning", message=f"could not log {kind}: {first_line(error)}")
            if event["type"] == "end":
                return 1


def leave_terminal():
    """Gives up the terminal, from which a client could ask for a key and wait."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)
    except OSError:
        pass


def reply(kind, **values):
    """Writes a line to rlhf."""
    if os.getpid() != PROCESS:
        return
    if kind == "ready":
        values["line"] = 1
    try:
        REPLIES.write(json.dumps({"type": kind, **values}) + "\n")
        REPLIES.flush()
    except OSError:
        # rlhf has ended; the tracker still gets the end of the run.
        pass


def read(source, lines):
    for line in source:
        lines.put(line)
    lines.put(None)


def main():
    global REPLIES
    source, REPLIES = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    leave_terminal()
    # rlhf decides when the run ends.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    start = source.readline()
    if not start:
        return 1
    run = json.loads(start)
    kind = TRACKERS[run["tracker"]]
    try:
        tracker = kind(run)
    except ModuleNotFoundError as error:
        if error.name == kind.package:
            how = f"`{sys.executable} -m pip install {kind.package}`, or RLHF_PYTHON for another Python"
            reply("missing", message=f"its Python package is not installed: {how}")
        else:
            reply("failed", message=first_line(error))
        return 1
    except Exception as error:
        reply("failed", message=first_line(error))
        return 1
    lines = queue.Queue(maxsize=READ_AHEAD)
    threading.Thread(target=read, args=(source, lines), daemon=True).start()
    return follow(tracker, lines)


code = main()
# Threads of a client must not hold the process.
REPLIES.close()
os._exit(code)
