"""What the trainers have in common: the folder of their inputs, the run of the program, and what is left of it."""

import glob
import json
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from rlhf import _program, _translate
from rlhf._callbacks import Handler, TrainerControl, TrainerState
from rlhf._config import SECRETS, Config, settings_of, write_settings
from rlhf._data import Data, path_or_name
from rlhf._environments import Environments
from rlhf._errors import RunError, Unsupported
from rlhf._objects import changed_since_loaded, is_text, load_back, place_model, place_tokenizer, source_of
from rlhf._output import in_notebook
from rlhf._ranks import Ranks
from rlhf._rewards import Function

# Files of a model's folder, beside shards.
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md")
# Files of a run that are no part of its model.
RUN_FILES = ("run.json", "unfinished.json", "trackers.json", "best.json")


class TrainOutput(NamedTuple):
    """The result of `train()`, with the fields of transformers' class of the same name."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer:
    """Trains a model with the program, in a process of its own.

    Args:
        model: a path, a name on the hub, or a model of transformers or PEFT, which is saved once into the folder of the run's inputs,
            `OUTPUT_DIR.inputs`.
        args: the settings.
        train_dataset: rows to train on: a dataset of `datasets`, a list of maps, a data frame, a path or a name on the hub.
        eval_dataset: rows to evaluate on.
        processing_class: the tokenizer: an object of transformers, a path or a name; by default the model's own.
        callbacks: objects with transformers' hooks.
        peft_config: a `LoraConfig` of PEFT, to train adapters.
    """

    _config: ClassVar[type[Config]] = Config
    # Whether the command has `eval_dataset_name`.
    _separate_eval: ClassVar[bool] = True
    # The metric of the best model, where the settings name none.
    _best_metric: ClassVar[str] = "eval_loss"

    def __init__(
        self,
        model: Any,
        args: "Config | Mapping[str, Any] | None",
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        callbacks: Any,
        peft_config: Any,
        quantization_config: Any = None,
        optimizers: Any = None,
    ) -> None:
        _translate.check_overridden(type(self), Trainer)
        _translate.check_optimizers(optimizers)
        self.args: Any = self._arguments(args, model)
        if train_dataset is None:
            raise ValueError(f"{type(self).__name__}: train_dataset: expected rows to train on, found none")
        self.processing_class = self.tokenizer = processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._model, self._loaded = model, None
        self._settings = {
            **settings_of(self.args),
            **_translate.of_report_to(self.args.report_to),
            **_translate.of_model_init(self.args.model_init_kwargs),
            **_translate.of_quantization(quantization_config),
            **_translate.of_peft(peft_config if peft_config is not None else active_peft_config(model)),
        }
        # The program keeps both models, and this class takes the best one where transformers' does.
        if self._settings.pop("load_best_model_at_end", False):
            self._settings.setdefault("metric_for_best_model", self._best_metric)
        if self.args.max_steps is not None and self.args.max_steps > 0:
            self._settings["max_steps"] = self.args.max_steps
        self.output_dir: str = os.path.abspath(self.args.output_dir)
        # Paths in the settings of a run stay valid where it is resumed, so that they are beside its folder, which must be empty at first.
        self.inputs = f"{self.output_dir}.inputs"
        self.ranks = Ranks(self.args.num_processes)
        self.callback_handler = Handler(callbacks)
        self.state, self.control = TrainerState(), TrainerControl()
        self.accelerator = Accelerator(self.ranks)
        self.hub_model_id = self.args.hub_model_id
        self._functions: list[Function] = []
        self._environments: Environments | None = None
        self._runs = 0
        self._samples: list[dict[str, Any]] = []
        self.callback_handler.call("on_init_end", self.args, self.state, self.control)

    def _arguments(self, args: Any, model: Any) -> Config:
        """The settings as this trainer's class has them."""
        if args is None:
            name = str(model) if is_text(model) else source_of(model) or type(model).__name__
            args = self._config()
            args.output_dir = f"{name.rstrip('/').rsplit('/', 1)[-1]}-{self._config.__name__.removesuffix('Config')}"
        elif isinstance(args, Mapping):
            args = self._config(**args)
        elif not isinstance(args, self._config):
            found = f"{type(args).__module__}.{type(args).__name__}"
            raise TypeError(f"{type(self).__name__}: args: expected {self._config.__name__} of rlhf, found {found}")
        if args.output_dir is None:
            args.output_dir = "trainer_output"
        result: Config = args
        return result

    # The run

    def _inputs(self, resumes: bool) -> dict[str, Any]:
        """Writes the inputs, and returns the settings that name them."""
        raise NotImplementedError

    def train(self, resume_from_checkpoint: "str | bool | None" = None, trial: Any = None, **ignored: Any) -> TrainOutput:
        """Trains, and saves the model in `args.output_dir`.

        Args:
            resume_from_checkpoint: `True` continues the run in `output_dir`, and begins it if there is none; a path continues from that
                checkpoint.

        Raises:
            RunError: the program has ended by an error, which the message is.
            KeyboardInterrupt: after Ctrl-C; the update is finished and saved.
            Exception: what a reward function or a callback has raised; the run is saved and can be resumed.
        """
        if trial is not None:
            raise Unsupported("trial: hyperparameters are not searched; make one trainer for each")
        if str(resume_from_checkpoint).lower() in ("true", "false"):
            resume_from_checkpoint = str(resume_from_checkpoint).lower() == "true"
        resume_from_checkpoint = resume_from_checkpoint or None
        self._runs += 1
        if not self.ranks.drives():
            result = self.ranks.wait(self.inputs, self._runs)
            return TrainOutput(**result)
        try:
            os.makedirs(self.inputs, exist_ok=True)
            output = self._train(resume_from_checkpoint)
        except BaseException as error:
            self._report({"error": f"{type(error).__name__}: {error}"})
            raise
        self._report(output._asdict())
        return output

    def _report(self, result: dict[str, Any]) -> None:
        if os.path.isdir(self.inputs):
            self.ranks.report(self.inputs, self._runs, result)

    def _train(self, resume: "str | bool | None") -> TrainOutput:
        from rlhf._run import Run

        began = time.monotonic()
        self.state = TrainerState(train_batch_size=self.args.per_device_train_batch_size)
        settings = {"output_dir": self.output_dir, **self._settings, **self._inputs(bool(resume))}
        if resume is not None:
            settings["resume_from_checkpoint"] = resume if isinstance(resume, bool) else os.path.abspath(resume)
        path = os.path.join(self.inputs, "config.yaml")
        write_settings(settings, path)
        more = {"model": self._model, "processing_class": self.processing_class, "tokenizer": self.processing_class}
        run = Run(self.args, self.state, self.callback_handler, self._functions, self._display(), more, self._environments)
        if resume is not None:
            self.state.log_history.extend(read_log(self.output_dir))
        try:
            run.drive(self.ranks.command([self._config._command, "--config", path]), self._environment())
        finally:
            self._samples = run.samples
            self._loaded = None
            self.control = run.control
        run.call("on_train_end")
        if run.raised is not None:
            raise run.raised
        if self.state.global_step:
            load_back(self._model, self._trained("train"))
        losses = [logs["loss"] for logs in self.state.log_history if logs.get("loss") is not None]
        loss = sum(losses) / len(losses) if losses else 0.0
        metrics = {"train_runtime": round(time.monotonic() - began, 4), "train_loss": loss, "epoch": self.state.epoch or 0.0}
        return TrainOutput(self.state.global_step, loss, metrics)

    def _environment(self) -> dict[str, str]:
        """What the program gets beside this process's own environment: the folder of the bridge to reward functions, and secrets."""
        bridge = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bridge")
        path = [bridge, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        secrets = {variable: getattr(self.args, name) for name, variable in SECRETS.items() if getattr(self.args, name, None)}
        return {"PYTHONPATH": os.pathsep.join(path), **secrets}

    def _display(self) -> Any:
        if not in_notebook():
            return None
        from rlhf._notebook import Display

        return Display(self._config._command, hides_bar=bool(self.args.disable_tqdm))

    def _data(self, convert: Any = None) -> dict[str, Any]:
        return Data(self.inputs).settings(self.train_dataset, self.eval_dataset, self._separate_eval, convert)

    def _place_model(self, value: Any, what: str, resumes: bool, tokenizer: Any = None) -> str:
        """The path or name of a model; a resumed run reads what it has begun with."""
        folder = os.path.join(self.inputs, what)
        path = place_model(value, folder, what, resumes)
        if not is_text(value):
            tokenizer = tokenizer if tokenizer is not None else source_of(value)
            if is_text(tokenizer):
                copy_tokenizer(str(tokenizer), folder)
            elif tokenizer is not None:
                place_tokenizer(tokenizer, folder)
        return path

    def _place_trained(self, resumes: bool) -> str:
        """The path or name of the model that is trained, in a folder with the tokenizer that was passed."""
        path = self._place_model(self._model, "model", resumes, self.processing_class)
        if is_text(self._model) and self.processing_class is not None:
            return self._with_tokenizer(path)
        return path

    def _with_tokenizer(self, path: str) -> str:
        """A folder with the model's files and the tokenizer that was passed, where that is another one, or may have been changed since it was
        loaded."""
        source = path_or_name(str(source_of(self.processing_class) or self.processing_class))
        if source == path and (is_text(self.processing_class) or not os.path.isdir(path)):
            for name in changed_since_loaded(self.processing_class):
                hint = "save the model and the tokenizer into a folder and pass that"
                raise Unsupported(f"processing_class: its {name} is another one than that of {path}; {hint}")
            return path
        if not os.path.isdir(path):
            raise Unsupported(f"processing_class: expected the tokenizer of {path}, found that of {source}; pass the model as a folder")
        folder = os.path.join(self.inputs, "model")
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(path):
            link = os.path.join(folder, name)
            if not name.startswith(("tokenizer", "special_tokens", "vocab", "merges")) and not os.path.lexists(link):
                os.symlink(os.path.join(path, name), link)
        if is_text(self.processing_class):
            copy_tokenizer(source, folder)
        else:
            self.processing_class.save_pretrained(folder)
        return folder

    def _place_tokenizer(self) -> "str | None":
        """The tokenizer, if it is another one than that of the model's folder or name."""
        value = self.processing_class
        if value is None:
            return None if is_text(self._model) else source_of(self._model)
        return place_tokenizer(value, os.path.join(self.inputs, "tokenizer"))

    # What is left of it

    @property
    def model(self) -> Any:
        """The model: the object that was passed, or, loaded by transformers when it is asked for, what `output_dir` has."""
        if self._model is not None and not is_text(self._model):
            return self._model
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> Any:
        path = self._trained("model") if self._is_trained() else str(self._model)
        if os.path.exists(os.path.join(path, "adapter_config.json")):
            from peft import AutoPeftModelForCausalLM  # type: ignore[import-not-found,unused-ignore]

            return AutoPeftModelForCausalLM.from_pretrained(path)
        from transformers import AutoModelForCausalLM  # type: ignore[import-not-found,unused-ignore]

        return AutoModelForCausalLM.from_pretrained(path)

    def _is_trained(self) -> bool:
        return any(os.path.exists(os.path.join(self.output_dir, name)) for name in ("config.json", "adapter_config.json"))

    def _trained(self, what: str) -> str:
        """The folder of the trained model."""
        if not self._is_trained():
            raise RunError(f"{what}: expected a trained model in {self.output_dir}, found none; call train() first")
        best = os.path.join(self.output_dir, "best")
        return best if self.args.load_best_model_at_end and os.path.isdir(best) else self.output_dir

    def is_world_process_zero(self) -> bool:
        """Whether this process is the one that drives the run."""
        return self.ranks.drives()

    def is_local_process_zero(self) -> bool:
        """Whether this process is the one that drives the run."""
        return self.ranks.drives()

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, an object or its class."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback and returns it."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback."""
        self.callback_handler.pop(callback)

    def save_model(self, output_dir: "str | None" = None, _internal_call: bool = False) -> None:
        """Copies the trained model and its tokenizer to a folder; `args.output_dir` has them anyway."""
        folder = self._trained("save_model")
        target = os.path.abspath(output_dir or self.output_dir)
        if target == folder or not self.ranks.drives():
            return
        os.makedirs(target, exist_ok=True)
        paths = [path for pattern in MODEL_FILES for path in glob.glob(os.path.join(folder, pattern))]
        for path in paths:
            if os.path.basename(path) not in RUN_FILES:
                shutil.copy2(path, target)
        base = os.path.join(folder, "base_model")
        if os.path.isdir(base):
            shutil.copytree(base, os.path.join(target, "base_model"), dirs_exist_ok=True)

    def end(self) -> None:
        """Does nothing: the program has ended its trackers and ranks when `train()` returns."""

    def save_state(self) -> None:
        """Writes `state` to `trainer_state.json` beside the inputs."""
        self.state.save_to_json(os.path.join(self.inputs, "trainer_state.json"))

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Prints metrics, one a line."""
        if self.ranks.drives():
            print(f"***** {split} metrics *****")
            for name, value in sorted(metrics.items()):
                print(f"  {name:<30} = {value}")

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Writes metrics to `SPLIT_results.json` beside the inputs."""
        if self.ranks.drives():
            with open(os.path.join(self.inputs, f"{split}_results.json"), "w", encoding="utf-8") as file:
                json.dump(metrics, file, indent=4, sort_keys=True)

    def create_model_card(self, *ignored: Any, **named: Any) -> None:
        """Does nothing: `output_dir` has the card since the model is there."""

    def push_to_hub(self, commit_message: str = "End of training", blocking: bool = True, **named: Any) -> str:
        """Uploads the trained model to `args.hub_model_id`; returns what the program says."""
        named.pop("dataset_name", None)
        token = named.pop("token", None) or self.args.hub_token
        name = named.pop("repo_id", None) or self.args.hub_model_id
        if not name:
            raise ValueError("push_to_hub: expected hub_model_id in args, such as me/my-model, found none")
        if not self.ranks.drives():
            return ""
        arguments = ["push", self._trained("push_to_hub"), name, "--commit_message", commit_message]
        if self.args.hub_private_repo:
            arguments.append("--private")
        revision = named.pop("revision", None) or self.args.hub_revision
        if revision:
            arguments += ["--revision", revision]
        return _program.call(arguments, "push_to_hub", {"HF_TOKEN": token} if token else {}).strip()

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The metrics of the held-out rows: those of the evaluation after the last update."""
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            raise Unsupported(f"evaluate: {self._config._command} evaluates during a run: pass eval_dataset to the trainer")
        for logs in reversed(self.state.log_history):
            found = {name: value for name, value in logs.items() if name.startswith(("eval_", "eval/"))}
            if found and logs.get("step") == self.state.global_step:
                return {**found, "epoch": self.state.epoch or 0.0}
        hint = "set eval_strategy='steps' and call train() first" if self.eval_dataset is not None else "pass eval_dataset to the trainer"
        raise Unsupported(f"evaluate: {self._config._command} evaluates during a run, and the last update has no evaluation; {hint}")

    def report(self) -> "Report":
        """The page of the run, `report.html`; a notebook shows it."""
        path = os.path.join(self.output_dir, "report.html")
        if not os.path.exists(path):
            _program.call(["report", self.output_dir], "report")
        return Report(path)


class Accelerator:
    """What scripts ask accelerate's class of the same name for."""

    def __init__(self, ranks: Ranks) -> None:
        self.process_index = self.local_process_index = ranks.rank
        self.num_processes = ranks.count
        self.is_main_process = self.is_local_main_process = ranks.drives()

    def print(self, *words: Any, **named: Any) -> None:
        """Prints in one process."""
        if self.is_main_process:
            print(*words, **named)

    def wait_for_everyone(self) -> None:
        """Does nothing: `train()` returns in all processes together."""


class Report:
    """The page of a run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return self.path

    def _repr_html_(self) -> str:
        import html

        with open(self.path, encoding="utf-8") as file:
            page = file.read()
        return f'<iframe srcdoc="{html.escape(page, quote=True)}" style="width: 100%; height: 720px; border: 0"></iframe>'


def read_log(output_dir: str) -> list[dict[str, Any]]:
    """The lines of metrics that a resumed run has already, up to its newest checkpoint."""
    path = os.path.join(output_dir, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def active_peft_config(model: Any) -> Any:
    """The configuration of the adapter that a PEFT model has."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return None
    active = getattr(model, "active_adapter", "default")
    return configs.get(active if isinstance(active, str) else "default")


def copy_tokenizer(source: str, folder: str) -> None:
    """Puts the tokenizer of a model that an object was loaded from beside the object's weights."""
    if os.path.isdir(source):
        for pattern in ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model"):
            for path in glob.glob(os.path.join(source, pattern)):
                target = os.path.join(folder, os.path.basename(path))
                if not os.path.exists(target):
                    shutil.copy2(path, target)
        return
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]

        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    except Exception:
        # The program says that there is none.
        return
