"""DeepSpeed-Chat's PPO trainer: experience from prompts, and steps of actor and critic."""

import os
import sys
from typing import Any

from rlhf._arrays import Array, find_torch, ids, matrix, rows_of_ids, vector
from rlhf._arrays import plain as lists_of
from rlhf.dschat._engine import DeepSpeedRLHFEngine, Module, arguments

Experience = dict[str, Any]
# The arrays of an experience, with their types.
ARRAYS = {
    "prompts": "int64",
    "logprobs": "float32",
    "ref_logprobs": "float32",
    "value": "float32",
    "rewards": "float32",
    "input_ids": "int64",
    "attention_mask": "int64",
}
# Hyper-parameters that DeepSpeed-Chat has as attributes of its trainer.
HYPER = ("kl_ctl", "clip_reward_value", "cliprange", "cliprange_value", "gamma", "lam")


class Number(float):
    """A number with a tensor's `item`, for loops that call it where torch is not there."""

    def item(self) -> float:
        """The number."""
        return float(self)


def scalar(number: "float | None") -> Any:
    """A number as a tensor, where torch is there."""
    found = float("nan") if number is None else number
    torch = find_torch()
    return Number(found) if torch is None else torch.tensor(found)


class DeepSpeedPPOTrainer:
    """Generates experience with the models of an engine, and trains on it.

    `kl_ctl`, `clip_reward_value`, `cliprange`, `cliprange_value`, `gamma` and `lam` are attributes, as in DeepSpeed-Chat, and may be set.

    Args:
        rlhf_engine (`DeepSpeedRLHFEngine`): the models.
        args (*optional*): the arguments of main.py; those of the engine by default.
    """

    def __init__(self, rlhf_engine: DeepSpeedRLHFEngine, args: Any = None) -> None:
        self.rlhf_engine = rlhf_engine
        self.session = rlhf_engine.session
        self.actor_model: Module = rlhf_engine.actor
        self.critic_model: Module = rlhf_engine.critic
        self.ref_model: Module = rlhf_engine.ref
        self.reward_model: Module = rlhf_engine.reward
        self.tokenizer = rlhf_engine.tokenizer
        self.args = rlhf_engine.args if args is None else args
        self.generate_time = 0.0
        found = self.session.call("configure")
        self._hyper = {name: found[name] for name in HYPER}
        for name in HYPER:
            setattr(self, name, found[name])

    def _configure(self) -> None:
        """Hands the program the hyper-parameters that were set."""
        now = {name: getattr(self, name) for name in HYPER}
        changed = {name: value for name, value in now.items() if value != self._hyper[name]}
        if changed:
            self.session.call("configure", changed)
            self._hyper = now

    def generate_experience(self, prompts: Any, mask: Any, step: int = 0) -> Experience:
        """Samples responses to prompts `[rows, length]`, padded on the left, whose `mask` is 1 at tokens; evaluates them with all models.

        Returns a map of `prompts`, `logprobs`, `ref_logprobs`, `value`, `rewards`, `input_ids` and `attention_mask`.
        """
        self._configure()
        found = self.session.call(
            "generate_experience", {"prompts": matrix(prompts, "prompts", "int64"), "mask": matrix(mask, "mask", "int64")}
        )
        experience = {name: found[name].value() for name in ARRAYS}
        self._print_answers(experience, step)
        return experience

    def _print_answers(self, experience: Experience, step: int) -> None:
        """Prints prompts and responses, where the arguments ask for it."""
        args = arguments(self.args)
        if not args.get("print_answers") or step % (args.get("print_answers_interval") or 1):
            return
        found = self.session.call("answers", self._arrays(experience))
        for prompt, response in zip(found["prompts"], found["responses"], strict=True):
            print(f"--- prompt --> step={step}, {[prompt]}\n--- ans    --> step={step}, {[response]}", file=sys.stdout)

    @staticmethod
    def _arrays(inputs: Experience) -> "dict[str, Array]":
        missing = [name for name in ARRAYS if name not in inputs]
        if missing:
            raise ValueError(f"inputs: expected the map that generate_experience returns, found one without `{missing[0]}`")
        return {
            name: vector(inputs[name], name) if name == "rewards" else matrix(inputs[name], name, kind) for name, kind in ARRAYS.items()
        }

    def train_rlhf(self, inputs: Experience) -> "tuple[Any, Any]":
        """Takes a step of actor and critic on an experience; returns their losses."""
        self._configure()
        found = self.session.call("train_rlhf", self._arrays(inputs))
        return scalar(found["actor_loss"]), scalar(found["critic_loss"])

    def get_overflow(self) -> "tuple[bool, bool]":
        """Whether f16 gradients of actor and critic overflowed in the last step, which was skipped then."""
        found = self.session.call("get_overflow")
        return found["actor"], found["critic"]

    # The parts, on arrays of the caller's own.

    def compute_rewards(self, prompts: Any, log_probs: Any, ref_log_probs: Any, reward_score: Any, action_mask: Any) -> Any:
        """Rewards of each column `[rows, length - 1]`: minus `kl_ctl` times the KL, and the score at the end of the response."""
        self._configure()
        found = self.session.call(
            "compute_rewards",
            {
                "prompts": matrix(prompts, "prompts", "int64"),
                "log_probs": matrix(log_probs, "log_probs"),
                "ref_log_probs": matrix(ref_log_probs, "ref_log_probs"),
                "reward_score": vector(reward_score, "reward_score"),
                "action_mask": matrix(action_mask, "action_mask", "int64"),
            },
        )
        return found["rewards"].value()

    def get_advantages_and_returns(self, values: Any, rewards: Any, start: int) -> "tuple[Any, Any]":
        """Advantages and returns from column `start` on, by GAE."""
        self._configure()
        params = {"values": matrix(values, "values"), "rewards": matrix(rewards, "rewards"), "start": int(start)}
        found = self.session.call("get_advantages_and_returns", params)
        return found["advantages"].value(), found["returns"].value()

    def actor_loss_fn(self, logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any) -> Any:
        """The clipped loss of the actor; a number without gradients."""
        return self._loss("actor_loss_fn", {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}, mask)

    def critic_loss_fn(self, values: Any, old_values: Any, returns: Any, mask: Any) -> Any:
        """The clipped loss of the critic; a number without gradients."""
        return self._loss("critic_loss_fn", {"values": values, "old_values": old_values, "returns": returns}, mask)

    def _loss(self, method: str, numbers: "dict[str, Any]", mask: Any) -> Any:
        self._configure()
        params = {name: matrix(value, name) for name, value in numbers.items()}
        return scalar(self.session.call(method, {**params, "mask": matrix(mask, "mask", "bool")})["loss"])

    # The rest of main.py's calls.

    def train(self) -> None:
        """Does nothing: the program applies no dropout."""

    def eval(self) -> None:
        """Does nothing: the program applies no dropout."""

    def dump_model_norms(self, tag: str) -> None:
        """Prints the sum of the norms of each model's parameters."""
        norms = self.session.call("norms")
        for name in ("actor", "ref", "critic", "reward"):
            print(f"{tag} global_{name}_model_norm {norms[name]}")

    def save_state(self, folder: Any) -> None:
        """Writes the state from which an interrupted loop continues: actor, critic, average and optimizers."""
        self.session.call("save_state", {"dir": os.path.abspath(folder)})

    def load_state(self, folder: Any) -> None:
        """Continues from a saved state, in an engine that was made as the interrupted one was."""
        self.session.call("load_state", {"dir": os.path.abspath(folder)})


class DeepSpeedPPOTrainerUnsupervised(DeepSpeedPPOTrainer):
    """A trainer whose each `train_rlhf` is followed by a `train_unsupervised`, which takes the step for both."""

    def __init__(self, rlhf_engine: DeepSpeedRLHFEngine, args: Any = None) -> None:
        super().__init__(rlhf_engine, args)
        self.session.call("configure", {"mixes_texts": True})

    def train_unsupervised(self, inputs: Any, unsup_coef: float) -> Any:
        """Adds `unsup_coef` times the loss of texts to the last `train_rlhf`, and takes the step for both; returns the loss of the texts.

        `inputs` is a map of `input_ids` and, where there is padding, `attention_mask`; or rows of token ids.
        """
        rows, mask = inputs, None
        if isinstance(inputs, dict):
            rows, mask = inputs["input_ids"], lists_of(inputs.get("attention_mask"))
        texts = [ids(row, "input_ids") for row in rows]
        if mask is not None:
            texts = [[number for number, seen in zip(row, kept, strict=True) if seen] for row, kept in zip(texts, mask, strict=True)]
        found = self.session.call("train_unsupervised", {"input_ids": rows_of_ids(texts), "unsup_coef": float(unsup_coef)})
        return scalar(found["loss"])
