"""TRL 0.11's PPOTrainer: the loop is the caller's, and the program has the models."""

import json
import math
import os
import random
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from rlhf import _data, _program
from rlhf._arrays import Array, find_torch, ids, matrix, plain, rows_of_ids, vector
from rlhf._errors import RunError, Unsupported
from rlhf._objects import place_tokenizer
from rlhf._session import Session
from rlhf.legacy import _stats
from rlhf.legacy._config import PPOConfig, refuse_new
from rlhf.legacy._generation import Generation
from rlhf.legacy._layout import Layout, scalar, tensor, value
from rlhf.legacy._models import ReferenceModel, adapter_settings, check_reference, decoder_start_of, source_of
from rlhf.legacy._optimizers import Optimizer, Schedule
from rlhf.legacy._utils import KL_HINT, AdaptiveKLController, FixedKLController, is_list_of_rows

# Rows of the forward passes that train_minibatch can be called with.
PASSES = 64
# What this process adds to a saved state.
OWN_STATE = "python_state.json"
# Arguments of save_pretrained that change nothing at these values.
SAVED: dict[str, Any] = {"safe_serialization": True, "push_to_hub": False}


class PPOTrainer:
    """Trains a policy on the caller's scores, one call of `step` at a time.

    Args:
        config (`PPOConfig`): the settings.
        model: the policy: `AutoModelForCausalLMWithValueHead`, a path, a name, or a model of transformers or PEFT.
        ref_model (*optional*): the reference model; a copy of the policy, or the base of its adapter, by default.
        tokenizer: the tokenizer of transformers, a path or a name; that of the model by default.
        dataset (*optional*): rows for `dataloader`: of `datasets`, or a list of maps.
        optimizer (*optional*): an optimizer of torch whose class and numbers are taken over, or a map such as `{"optim": "adamw_8bit"}`;
            Adam with `config.learning_rate` by default. Its learning rate is read at each step.
        data_collator (*optional*): makes a batch of a list of rows; by default a map of the columns.
        num_shared_layers (`int`, *optional*): lower layers that the reference model shares with the policy, which are frozen.
        lr_scheduler (*optional*): a scheduler of torch or transformers on `optimizer`, which takes a step with each `step`, or a map with
            the arguments of transformers' get_scheduler.
        training_data_collator (*optional*): pads rows in TRL; rows are not padded here, and it has no effect.
    """

    def __init__(
        self,
        config: "PPOConfig | None" = None,
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Any = None,
        data_collator: "Callable[[list[Any]], Any] | None" = None,
        num_shared_layers: "int | None" = None,
        lr_scheduler: Any = None,
        training_data_collator: Any = None,
        **unknown: Any,
    ) -> None:
        refuse_new(unknown)
        if unknown:
            raise TypeError(f"PPOTrainer: `{next(iter(unknown))}`: expected an argument of TRL 0.11's PPOTrainer")
        if config is not None and not isinstance(config, PPOConfig):
            raise TypeError(f"config: expected a PPOConfig of rlhf.legacy, found {type(config).__module__}.{type(config).__name__}")
        self.config = config or PPOConfig()
        self.model = source_of(self.config.model_name if model is None else model, "model")
        self.ref_model = source_of(ref_model, "ref_model") if ref_model is not None else ReferenceModel(self.model, None)
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._optimizer = Optimizer(optimizer, self.config.learning_rate)
        self._schedule = Schedule(lr_scheduler, self._optimizer)
        self.data_collator = data_collator
        self.dataset = dataset
        self._folder = tempfile.mkdtemp(prefix="rlhf-legacy-")
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._passes: dict[int, tuple[list[list[int]], list[list[int]], list[list[int]] | None]] = {}
        self._open(num_shared_layers)
        self.dataloader = self.prepare_dataloader(dataset, data_collator) if dataset is not None else None
        self.current_step = 0

    # The program

    def _open(self, num_shared_layers: "int | None") -> None:
        """Starts the program, which loads the models."""
        config = self.config
        check_reference(self.ref_model, self.model, config.dtype)
        token = self.model.token or self.ref_model.token
        self.session = Session(config.num_processes, {"HF_TOKEN": token} if token else None)
        ranks = self.session.capabilities["ranks"]
        settings = {**config.settings(), "learning_rate": self._optimizer.learning_rate}
        self._logs = "output_dir" in settings
        source = self.model.place(os.path.join(self._folder, "model"))
        shared = getattr(self.ref_model, "num_shared_layers", None) if num_shared_layers is None else num_shared_layers
        reference = None
        if isinstance(self.ref_model, ReferenceModel):
            if shared is not None:
                settings["num_shared_layers"] = shared
            elif self.ref_model.source is not self.model.source:
                reference = self.ref_model.place(os.path.join(self._folder, "ref_model"))
        else:
            reference = self.ref_model.place(os.path.join(self._folder, "ref_model"))
        if self.model.is_gradient_checkpointing:
            settings["gradient_checkpointing"] = True
        params: dict[str, Any] = {
            "loop": "step",
            "config": settings,
            "model": source,
            "ref_model": reference,
            "peft_config": adapter_settings(self.model.peft_config),
            "optimizer": self._optimizer.settings or None,
            "schedule": self._schedule.settings,
            "device": config.device,
            "dtype": config.dtype,
            "bf16": config.bf16 or None,
            "num_threads": config.num_threads,
            "rows": "own" if ranks > 1 and config.num_processes == 1 else "all",
            **self.model.settings,
        }
        if self.tokenizer is not None:
            params["tokenizer"] = place_tokenizer(self.tokenizer, os.path.join(self._folder, "tokenizer"))
        opened = self.session.call("open", {name: value for name, value in params.items() if value is not None})
        self._source, self._eos = source, opened["eos_token_ids"]
        self.model.bind(self)
        self.ref_model.bind(self)
        self.is_encoder_decoder = bool(opened["is_encoder_decoder"])
        self.is_peft_model = bool(opened["is_peft_model"])
        if self.model.is_seq2seq and not self.is_encoder_decoder:
            raise ValueError(f"model: {source}: expected an encoder-decoder for AutoModelForSeq2SeqLMWithValueHead, found a causal one")
        self.is_distributed, rank = ranks > 1, self.session.capabilities["rank"]
        self.current_device = device_of(opened["device"])
        self.accelerator = SimpleNamespace(
            device=self._device(),
            num_processes=ranks,
            process_index=rank,
            is_main_process=rank == 0,
            is_local_main_process=rank == 0,
            unwrap_model=lambda model: model,
            wait_for_everyone=lambda: None,
            print=print,
        )
        kl = (config.init_kl_coef, config.target, config.horizon) if config.adap_kl_ctrl else None
        self._kl_ctl: FixedKLController = FixedKLController(config.init_kl_coef) if kl is None else AdaptiveKLController(*kl)
        self._kl_ctl._is_of_trainer = True
        self._start = decoder_start_of(self.model, source) if self.is_encoder_decoder else None

    @property
    def kl_ctl(self) -> FixedKLController:
        """The weight of the KL, as the program has it."""
        return self._kl_ctl

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        raise Unsupported(f"kl_ctl: {KL_HINT}")

    def _device(self) -> Any:
        """The device of the caller's tensors: rewards are computed there, not in the program."""
        torch = find_torch()
        if torch is None:
            return "cpu"
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def close(self) -> None:
        """Ends the program, and removes the files that were made for it."""
        self.session.close()
        self._remove()

    # Data

    def prepare_dataloader(self, dataset: Any, data_collator: "Callable[[list[Any]], Any] | None" = None) -> "DataLoader":
        """Batches in a new order in each pass; the last one may be smaller.

        Under a launcher ranks have rows of their own, `batch_size` in a batch; a script that starts its ranks gets the rows of all.
        """
        config, rank = self.config, (self.accelerator.process_index, self.accelerator.num_processes)
        rank = rank if config.num_processes == 1 else (0, 1)
        return DataLoader(dataset, config.batch_size * config.num_processes, data_collator, config.seed, rank)

    # The loop

    def generate(
        self,
        query_tensor: Any,
        length_sampler: "Callable[[], int] | None" = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Responses to a query, or to a list of them.

        Args:
            query_tensor: token ids of one query, or a list of such.
            length_sampler (*optional*): returns the most tokens of the responses to `batch_size` queries.
            batch_size (`int`, *optional*, defaults to 4): queries for which `length_sampler` is called once; how many the program
                decodes together changes no token.
            return_prompt (`bool`, *optional*, defaults to `True`): whether the query comes before its response.
            generate_ref_response (`bool`, *optional*, defaults to `False`): whether to return responses of the reference model too.
            generation_kwargs: those of transformers' generate.

        Returns a list of tensors for a list, a tensor `[1, length]` for one query; with `generate_ref_response` a pair of them.
        """
        if not is_list_of_rows(query_tensor):
            if len(getattr(query_tensor, "shape", (0,))) == 2:
                raise ValueError("generate: query_tensor: expected a tensor of one dimension, or a list of them, found two dimensions")
            queries = [ids(query_tensor, "query_tensor")]
            found = self._respond(queries, Generation(generation_kwargs, self._source), length_sampler, 1, generate_ref_response, False)
            whole = [[self._joined(queries[0], rows[0], return_prompt)] for rows in found]
            made = [on_device(tensor(row, "int64") if row[0] else tensor([[]], "int64"), query_tensor) for row in whole]
            return tuple(made) if generate_ref_response else made[0]
        queries = [ids(query, "query_tensor") for query in query_tensor]
        if not queries:
            return ([], []) if generate_ref_response else []
        generation = Generation(generation_kwargs, self._source)
        found = self._respond(queries, generation, length_sampler, batch_size, generate_ref_response, True)
        lists = [
            [
                on_device(tensor(self._joined(query, row, return_prompt), "int64"), like)
                for query, row, like in zip(queries, rows, query_tensor, strict=True)
            ]
            for rows in found
        ]
        return tuple(lists) if generate_ref_response else lists[0]

    def _joined(self, query: "list[int]", response: "list[int]", return_prompt: bool) -> "list[int]":
        return query + response if return_prompt and not self.is_encoder_decoder else response

    def _respond(
        self,
        queries: "list[list[int]]",
        generation: Generation,
        length_sampler: "Callable[[], int] | None",
        batch_size: int,
        with_reference: bool,
        cuts_at_eos: bool,
    ) -> "list[list[list[int]]]":
        """Responses of the policy, and of the reference model where they are asked for."""
        # TRL's lists of responses end after the tokenizer's eos in any case.
        stops = generation.stop_token_ids()
        if cuts_at_eos:
            stops = [*stops, *self._eos] if stops else None
        policy: list[list[int]] = []
        reference: list[list[int]] = []
        parts = [queries]
        if length_sampler is not None:
            parts = [queries[at : at + max(batch_size, 1)] for at in range(0, len(queries), max(batch_size, 1))]
        elif not generation.has_length and len({len(query) for query in queries}) > 1:
            # The length counts the query, and is that of each batch.
            parts = [queries[at : at + max(batch_size, 1)] for at in range(0, len(queries), max(batch_size, 1))]
        for part in parts:
            if length_sampler is not None:
                generation.values["max_new_tokens"] = int(length_sampler())
            params = generation.params(part, self.is_encoder_decoder)
            found = self.session.call(
                "generate",
                {**params, "queries": rows_of_ids(part), "stop_token_ids": stops, "generate_ref_response": with_reference},
            )
            policy += found["responses"].lists()
            reference += found["ref_responses"].lists() if with_reference else []
        return [policy, reference] if with_reference else [policy]

    def _generate_as_transformers(self, input_ids: Any, reference: bool = False, **kwargs: Any) -> Any:
        """Responses with their prompts as one tensor, padded behind, for `model.generate(input_ids=...)`."""
        rows = plain(input_ids)
        rows = rows if rows and isinstance(rows[0], list) else [rows]
        kept = plain(kwargs.get("attention_mask"))
        if kept is not None:
            rows = [[number for number, seen in zip(row, mask, strict=True) if seen] for row, mask in zip(rows, kept, strict=True)]
        generation = Generation(kwargs, self._source)
        found = self._respond(rows, generation, None, len(rows), reference, False)[-1]
        whole = [self._joined(query, response, True) for query, response in zip(rows, found, strict=True)]
        pad = kwargs.get("pad_token_id")
        width, pad = max(map(len, whole)), self._pad() if pad is None else pad
        return on_device(tensor([row + [pad] * (width - len(row)) for row in whole], "int64"), input_ids)

    def _pad(self) -> int:
        for name in ("pad_token_id", "eos_token_id"):
            number = getattr(self.tokenizer, name, None)
            if number is not None:
                return int(number)
        return 0

    def step(
        self,
        queries: "list[Any]",
        responses: "list[Any]",
        scores: "list[Any]",
        response_masks: "list[Any] | None" = None,
        orders: "list[list[int]] | None" = None,
    ) -> "dict[str, Any]":
        """Runs a step of PPO on queries, responses and scores, and returns its statistics by TRL's names.

        `response_masks` has 0 at tokens that the policy did not sample, such as those that a tool wrote. Any number of rows will do.
        `orders` has the order of the rows in each epoch; it is drawn from the seed by default.
        """
        query_ids, response_ids = self._rows(queries, responses)
        params: dict[str, Any] = {
            "queries": rows_of_ids(query_ids),
            "responses": rows_of_ids(response_ids),
            "scores": self._scores(scores, len(query_ids)),
        }
        masks = self._masks(response_masks, response_ids)
        if masks is not None:
            params["response_masks"] = rows_of_ids(masks, "bool")
        if orders is not None:
            params["orders"] = [[int(row) for row in order] for order in orders]
        if self._schedule.settings is None:
            params["learning_rate"] = self._optimizer.learning_rate
        result = self.session.call("step", params)
        self.current_step = result["steps"]
        self._kl_ctl._value = result["kl_coef"]
        self._schedule.step()
        layout = Layout(query_ids, response_ids, self.is_encoder_decoder)
        return _stats.of_step(result["stats"], layout if not self.is_distributed else None)

    def _rows(self, queries: Any, responses: Any) -> "tuple[list[list[int]], list[list[int]]]":
        for name, rows in (("queries", queries), ("responses", responses)):
            if not isinstance(rows, (list, tuple)):
                raise ValueError(f"{name}: expected a list of tensors, found {type(rows).__name__}")
        if len(queries) != len(responses):
            raise ValueError(f"responses: expected {len(queries)} of them, one for each query, found {len(responses)}")
        query_ids = [ids(row, f"queries: row {at}") for at, row in enumerate(queries)]
        response_ids = [ids(row, f"responses: row {at}") for at, row in enumerate(responses)]
        return query_ids, [self._without_start(row) for row in response_ids] if self.is_encoder_decoder else response_ids

    def _without_start(self, response: "list[int]") -> "list[int]":
        """A response without the decoder's start token, which transformers returns and the program adds."""
        return response[1:] if len(response) > 1 and response[0] == self._start else response

    @staticmethod
    def _scores(scores: Any, rows: int) -> Array:
        if not isinstance(scores, (list, tuple)) and not hasattr(scores, "tolist"):
            raise ValueError(f"scores: expected a list of tensors or numbers, found {type(scores).__name__}")
        found = vector(scores, "scores", "float64")
        if found.shape != [rows]:
            raise ValueError(f"scores: expected {rows} of them, one for each query, found {found.shape[0]}")
        return found

    @staticmethod
    def _masks(masks: Any, responses: "list[list[int]]") -> "list[list[int]] | None":
        if masks is None:
            return None
        found = [[int(bool(kept)) for kept in plain(row)] for row in masks]
        if [len(row) for row in found] != [len(row) for row in responses]:
            raise ValueError("response_masks: expected a number for each token of each response, found others")
        return found

    # The parts of a step

    def prepare_model_inputs(self, queries: Any, responses: Any) -> "dict[str, Any]":
        """Queries with their responses, padded behind, as TRL's models take them."""
        query_ids, response_ids = self._rows(queries, responses)
        whole = [query + response for query, response in zip(query_ids, response_ids, strict=True)]
        width, pad = max(map(len, whole), default=0), self._pad()
        return {
            "input_ids": tensor([row + [pad] * (width - len(row)) for row in whole], "int64"),
            "attention_mask": tensor([[1] * len(row) + [0] * (width - len(row)) for row in whole], "int64"),
        }

    def batched_forward_pass(
        self,
        model: Any,
        queries: Any,
        responses: Any,
        model_inputs: Any = None,
        return_logits: bool = False,
        response_masks: Any = None,
    ) -> "tuple[Any, Any, Any, Any]":
        """Log-probabilities, None in the place of logits, values and masks of the responses, `[rows, longest sequence - 1]`.

        They are 0 outside the responses. With the trainer's `ref_model` they are those of the reference model, without values.
        `train_minibatch` knows these rows by the log-probabilities.
        """
        query_ids, response_ids = self._rows(queries, responses)
        params: dict[str, Any] = {"queries": rows_of_ids(query_ids), "responses": rows_of_ids(response_ids)}
        masks = self._masks(response_masks, response_ids)
        if masks is not None:
            params["response_masks"] = rows_of_ids(masks, "bool")
        result = self.session.call("batched_forward_pass", params)
        layout = Layout(query_ids, response_ids, self.is_encoder_decoder)
        is_reference = model is self.ref_model and model is not self.model
        whole = {name: layout.whole(found.lists()) for name, found in result.items()}
        logprobs = tensor(whole["ref_logprobs" if is_reference else "logprobs"])
        values = tensor(whole["values"]) if not is_reference else tensor([[0.0] * layout.width for _ in query_ids])
        self._passes[id(logprobs)] = (query_ids, response_ids, masks)
        if find_torch() is not None:
            weakref.finalize(logprobs, self._passes.pop, id(logprobs), None)
        while len(self._passes) > PASSES:
            del self._passes[next(iter(self._passes))]
        return logprobs, None, values, tensor([[int(kept) for kept in row] for row in whole["masks"]], "int64")

    def compute_rewards(self, scores: Any, logprobs: Any, ref_logprobs: Any, masks: Any) -> "tuple[Any, Any, Any]":
        """Rewards of each token, their part by the KL, and the KL; `[rows, columns]`."""
        found = self.session.call(
            "compute_rewards",
            {
                "scores": vector(scores, "scores"),
                "logprobs": matrix(logprobs, "logprobs"),
                "ref_logprobs": matrix(ref_logprobs, "ref_logprobs"),
                "masks": matrix(masks, "masks", "bool"),
            },
        )
        return value(found["rewards"]), value(found["non_score_rewards"]), value(found["kls"])

    def compute_advantages(self, values: Any, rewards: Any, mask: Any) -> "tuple[Any, Any, Any]":
        """Values within the mask, whitened advantages, and returns; `[rows, columns]`."""
        found = self.session.call(
            "compute_advantages",
            {"values": matrix(values, "values"), "rewards": matrix(rewards, "rewards"), "mask": matrix(mask, "mask", "bool")},
        )
        return value(found["values"]), value(found["advantages"]), value(found["returns"])

    def loss(
        self, old_logprobs: Any, values: Any, logits: Any, vpreds: Any, logprobs: Any, mask: Any, advantages: Any, returns: Any
    ) -> "tuple[Any, Any, dict[str, Any]]":
        """Policy loss, `vf_coef` times the value loss, and statistics; numbers without gradients."""
        numbers = {
            "old_logprobs": old_logprobs,
            "values": values,
            "vpreds": vpreds,
            "logprobs": logprobs,
            "advantages": advantages,
            "returns": returns,
        }
        params = {name: matrix(number, name) for name, number in numbers.items()}
        torch = find_torch()
        if logits is not None and torch is not None and torch.is_tensor(logits):
            of_tokens = torch.distributions.Categorical(logits=logits.detach().float()).entropy()
            params["entropy"] = matrix(of_tokens, "logits")
        found = self.session.call("loss", {**params, "mask": matrix(mask, "mask", "bool")})
        return scalar(found["policy_loss"]), scalar(found["value_loss"]), _stats.plain(found["stats"])

    def train_minibatch(
        self, old_logprobs: Any, values: Any, logprobs: Any, logits: Any, vpreds: Any, mask: Any, advantages: Any, returns: Any
    ) -> "dict[str, Any]":
        """Takes an optimizer step on the rows of a `batched_forward_pass`, whose log-probabilities are `logprobs`; returns its statistics.

        The program makes the pass again, with gradients.
        """
        found = self._passes.get(id(logprobs))
        if found is None:
            raise ValueError(
                "train_minibatch: logprobs: expected those that batched_forward_pass returned, found others: the program has the gradients"
            )
        query_ids, response_ids, masks = found
        layout = Layout(query_ids, response_ids, self.is_encoder_decoder)
        numbers = {"old_logprobs": old_logprobs, "values": values, "advantages": advantages, "returns": returns}
        params: dict[str, Any] = {name: matrix(layout.slots(number, name), name) for name, number in numbers.items()}
        kept = layout.slots(mask, "mask")
        masks = [[int(bool(number)) for number in row[: len(response)]] for row, response in zip(kept, response_ids, strict=True)]
        params["response_masks"] = rows_of_ids(masks, "bool")
        params["queries"], params["responses"] = rows_of_ids(query_ids), rows_of_ids(response_ids)
        if self._schedule.settings is None:
            params["learning_rate"] = self._optimizer.learning_rate
        return _stats.plain(self.session.call("train_minibatch", params)["stats"])

    def record_step_stats(self, kl_coef: float, **data: Any) -> "dict[str, Any]":
        """Statistics of a step by TRL's names, from its parts: `scores`, `logprobs`, `ref_logprobs`, `non_score_reward`, `kls`, `masks`,
        `queries`, `responses` and `train_stats`."""
        return _stats.record(kl_coef, data)

    def gather_stats(self, stats: "dict[str, Any]") -> "dict[str, Any]":
        """The statistics: those of a step are of all ranks already."""
        return stats

    # Logs and models

    def log_stats(
        self, stats: "dict[str, Any]", batch: "dict[str, Any]", rewards: Any, columns_to_log: Iterable[str] = ("query", "response")
    ) -> None:
        """Logs statistics and rewards to `log_with` and `output_dir`, with the texts of the batch; without these nothing is written.

        Of the columns `query` and `response` are logged. A statistic that is not finite is left out.
        """
        numbers = {name: float(number) for name, number in stats.items() if _stats.is_number(number)}
        numbers = {name: number for name, number in numbers.items() if math.isfinite(number)}
        params: dict[str, Any] = {"stats": numbers, "rewards": vector(rewards, "rewards", "float64")}
        for name in columns_to_log if self._logs else ():
            if name not in batch:
                raise ValueError(f"log_stats: columns_to_log: expected columns of the batch ({', '.join(batch)}), found {name!r}")
            if name not in ("query", "response"):
                raise Unsupported(f"log_stats: columns_to_log: expected query and response, found {name!r}: log it by your tracker's own call")
            params[name] = [str(text) for text in batch[name]]
        self.session.call("log_stats", params)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Writes the policy with its value head, the tokenizer and a model card, always as safetensors; all ranks call it."""
        for name, given in kwargs.items():
            if given is not None and name != "is_main_process" and given is not SAVED.get(name):
                hint = ": write push_to_hub(repo_id)" if name == "push_to_hub" else ""
                raise Unsupported(f"save_pretrained: {name} = {given!r}: expected a folder alone{hint}")
        self.session.call("save_pretrained", {"dir": os.path.abspath(save_directory)})

    _save_pretrained = save_pretrained

    def create_model_card(self, path: str, model_name: str = "TRL Model") -> None:
        """Writes the model card beside a model: `save_pretrained` writes it too."""
        with tempfile.TemporaryDirectory(prefix="rlhf-card-") as folder:
            self.save_pretrained(folder)
            if not self.accelerator.is_main_process:
                return
            os.makedirs(path, exist_ok=True)
            shutil.copyfile(os.path.join(folder, "README.md"), os.path.join(path, "README.md"))

    def push_to_hub(self, repo_id: str, private: "bool | None" = None, token: "str | None" = None, **kwargs: Any) -> str:
        """Pushes the policy with its value head to the hub; returns the program's last line. All ranks call it; the first one pushes."""
        if kwargs:
            raise Unsupported(f"push_to_hub: `{next(iter(kwargs))}`: expected repo_id, private and token")
        with tempfile.TemporaryDirectory(prefix="rlhf-push-") as folder:
            self.save_pretrained(folder)
            if not self.accelerator.is_main_process:
                return ""
            words = ["push", folder, repo_id, *(["--private"] if private else [])]
            return _program.call(words, "push_to_hub", {"HF_TOKEN": token} if token else None).strip()

    def save_state(self, folder: Any) -> None:
        """Writes the state from which an interrupted loop continues, within a pass of `dataloader` too.

        Python's `random`, from which LengthSampler draws, is in it: that of the first rank.
        """
        folder = os.path.abspath(folder)
        self.session.call("save_state", {"dir": folder})
        if self.accelerator.is_main_process:
            loader = self.dataloader
            own = {
                "scheduler": self._schedule.state(),
                "passes": loader.passes if loader is not None else 0,
                "batches": loader.batches if loader is not None else 0,
                "random": random.getstate(),
            }
            with open(os.path.join(folder, OWN_STATE), "w", encoding="utf-8") as file:
                json.dump(own, file)

    def load_state(self, folder: Any) -> None:
        """Continues from a saved state, in a trainer that was made as the interrupted one was."""
        folder = os.path.abspath(folder)
        result = self.session.call("load_state", {"dir": folder})
        self.current_step, self._kl_ctl._value = result["steps"], result["kl_coef"]
        path = os.path.join(folder, OWN_STATE)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                own = json.load(file)
            self._schedule.load_state(own["scheduler"])
            if "random" in own:
                version, numbers, gauss = own["random"]
                random.setstate((version, tuple(numbers), gauss))
            if self.dataloader is not None:
                self.dataloader.passes = own["passes"]
                self.dataloader.start = own.get("batches", 0)


def device_of(name: str) -> Any:
    """A device by the program's name of it, such as cuda(0), as torch's where torch is there."""
    name, torch = name.replace("(", ":").rstrip(")"), find_torch()
    return name if torch is None else torch.device(name)


def on_device(made: Any, like: Any) -> Any:
    """A tensor on the device of another; what is no tensor stays as it is."""
    like = like[0] if isinstance(like, (list, tuple)) and like else like
    return made.to(like.device) if hasattr(made, "to") and hasattr(like, "device") else made


class DataLoader:
    """Batches of a dataset, in a new order in each pass, which follows from the seed."""

    def __init__(
        self, dataset: Any, batch_size: int, collate: "Callable[[list[Any]], Any] | None", seed: int, rank: "tuple[int, int]"
    ) -> None:
        has_rows = hasattr(dataset, "__getitem__") and not isinstance(dataset, dict)
        self.dataset = dataset if has_rows else list(_data.rows(dataset, "dataset"))
        if len(self.dataset) == 0:
            raise ValueError("dataset: expected rows, found none")
        self.batch_size = batch_size
        self.collate_fn = collate or columns
        self.seed = seed
        self.rank = rank
        # Passes that have begun, and batches that the present one has given.
        self.passes = 0
        self.batches = 0
        # Batches of a pass that a loaded state has had: the next pass is the rest of it.
        self.start = 0

    def __len__(self) -> int:
        return -(-self._rows() // self.batch_size)

    def _rows(self) -> int:
        """Rows of each rank: as many on all of them, which take their steps together."""
        return -(-len(self.dataset) // self.rank[1])

    def _own(self, order: "list[int]") -> "list[int]":
        """The rows of this rank; where they do not divide, the first ones come again, as with accelerate."""
        rank, ranks = self.rank
        return [order[at % len(order)] for at in range(rank, self._rows() * ranks, ranks)]

    def __iter__(self) -> "Iterator[Any]":
        start, self.start = self.start, 0
        self.passes += start == 0
        order = list(range(len(self.dataset)))
        random.Random(f"{self.seed}-{self.passes - 1}").shuffle(order)
        order = self._own(order)
        # A pass that is left early, or at its end, is not continued.
        try:
            for at in range(start * self.batch_size, len(order), self.batch_size):
                self.batches = (at // self.batch_size + 1) % len(self)
                yield self.collate_fn([self.dataset[row] for row in order[at : at + self.batch_size]])
        finally:
            self.batches = 0


def columns(rows: "list[Any]") -> "dict[str, list[Any]]":
    """Rows as a map of columns; lists of whole numbers, such as token ids, are tensors where torch is there."""
    if not rows or not isinstance(rows[0], dict):
        raise RunError(f"dataset: expected rows that are maps of columns, found {type(rows[0]).__name__}; pass a data_collator")

    def made(item: Any) -> Any:
        is_ids = isinstance(item, list) and item and all(isinstance(number, int) for number in item)
        return tensor(item, "int64") if is_ids else item

    return {name: [made(row[name]) for row in rows] for name in rows[0]}
