"""Runs trl's GRPOTrainer with tools and environments on a tiny model with given turns and records what it computes.

    python make_trl_tools.py [NAME ...]    # make the runs of RUNS again, or those that are named
    python make_trl_tools.py --init        # make the models, the tokenizer, schemas.json, calls.jsonl and gae_across_tools.json
    python make_trl_tools.py --check       # rerun every folder of `trl_tools/` from its stored turns and compare

Made with torch 2.11.0, transformers 5.23.0, trl 1.16.0 and accelerate 1.15.0 on a CPU, one thread, float32. README.md
describes the tensors. Only the sampling is replaced: the turns of SCENARIOS are given to the trainer with the
log-probabilities that its model has for them. The calls, the results, the masks and all that follows are trl's.
"""

import functools
import json
import logging
import random
import sys
import tempfile
import warnings
from pathlib import Path

import make_trl_grpo as grpo
import thin
import torch
import transformers
import trl
from datasets import Dataset
from make_trl_grpo import largest_difference, metric_noise
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import llama3_template, parse_response, qwen3_template
from trl.trainer import grpo_trainer

ROOT = Path(__file__).resolve().parent
HERE = ROOT / "trl_tools"
sys.path.insert(0, str(HERE))

import tools as given_tools  # noqa: E402

END, PAD, START, VOCAB = "<|im_end|>", "<|endoftext|>", "<|im_start|>", 512
TAGS = ("<tool_call>", "</tool_call>")

TEMPLATE = """\
{%- set first = messages[0] -%}
{%- if tools or first.role == 'system' -%}
{{- '<|im_start|>system\\n' + (first.content if first.role == 'system' else 'Be brief.') -}}
{%- if tools -%}
{{- '\\n\\nTools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\nCall one by its name and arguments between <tool_call> and </tool_call>.' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' -}}{{- message.content -}}{{- '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant' -}}
{%- if message.content or not message.tool_calls -%}{{- '\\n' + message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif not (message.role == 'system' and loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

PROMPTS = (
    [{"role": "user", "content": "the cat sat"}],
    [{"role": "system", "content": "Count well."}, {"role": "user", "content": "one and two"}],
    [{"role": "user", "content": "rain"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    [{"role": "user", "content": "up and down"}],
    [{"role": "user", "content": "no"}],
)


def even(completion_ids, **_):
    """The share of even ids; trl passes the ids of results too."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def used(completions, **_):
    """How many results a completion has; none for a completion without one."""
    results = [sum(message["role"] == "tool" for message in completion) for completion in completions]
    return [n / 4 if n else None for n in results]


def far(environments, **_):
    """From the environments, as reward functions get them."""
    return [len(e.look()) / 20 for e in environments]


REWARDS = {f.__name__: f for f in (even, used, far)}


def call(name, **arguments):
    return f'{TAGS[0]}\n{json.dumps({"name": name, "arguments": arguments})}\n{TAGS[1]}'


class Draw:
    """Random numbers and words of one row."""

    def __init__(self, *seed):
        self.random = random.Random(":".join(map(str, seed)))

    def n(self, low=10, high=99):
        return self.random.randint(low, high)

    def words(self, low=2, high=8):
        """Ids that no tokenizer would choose together, without special tokens."""
        return [self.random.randrange(3, VOCAB - len(TAGS)) for _ in range(self.n(low, high))]

    def add(self):
        return call("add", a=self.n(), b=self.n())


def closed(*turns):
    return [[*turn, END] for turn in turns]


# Name -> the turns of a row, each a list of texts and ids.
SCENARIOS = {
    "answer": lambda d: closed([d.words()]),
    "call": lambda d: closed([d.add()], [d.words()]),
    "text_and_call": lambda d: closed([d.words(), d.add()], [d.words()]),
    "two_calls": lambda d: closed([d.add(), "\n", call("shout", text="a b", times=2)], [d.words()]),
    "chain": lambda d: closed([d.add()], [d.words(), d.add()], [d.words()]),
    "fails": lambda d: closed([call("div", a=d.n(), b=0)], [d.words()]),
    "one_of_two_fails": lambda d: closed([call("div", a=d.n(), b=0), d.add()], [d.words()]),
    "unknown": lambda d: closed([call("nothing", x=d.n())], [d.words()]),
    "missing_argument": lambda d: closed([call("add", a=d.n())], [d.words()]),
    "no_arguments": lambda d: closed([f'{TAGS[0]}\n{{"name": "tick"}}\n{TAGS[1]}'], [d.words()]),
    "broken": lambda d: closed([d.words(), f'{TAGS[0]}\n{{"name": "add", "arguments": {{"a": {d.n()}\n{TAGS[1]}']),
    "one_of_two_broken": lambda d: closed([d.add(), f'{TAGS[0]}\n{{"name": }}\n{TAGS[1]}']),
    "no_name": lambda d: closed([f'{TAGS[0]}\n{{"arguments": {{"a": {d.n()}}}}}\n{TAGS[1]}']),
    "unclosed": lambda d: closed([d.add().removesuffix(f"\n{TAGS[1]}")], [d.words()]),
    "text_after_call": lambda d: closed([d.add(), d.words()], [d.words()]),
    "cast": lambda d: closed([call("add", a=str(d.n()), b=d.n())], [call("shout", text=d.n())], [d.words()]),
    "kinds": lambda d: closed([call("show", kind="dict"), call("show", kind="float")], [d.words()]),
    "more_kinds": lambda d: closed([call("show", kind="none"), call("show", kind="bool")], [d.words()]),
    "unicode": lambda d: closed([call("show", kind="text"), call("shout", text="naïve")], [d.words()]),
    "tick": lambda d: closed([d.words(), call("tick")], [d.words(), call("tick")], [d.words()]),
    "later": lambda d: closed([call("later", n=d.n()), call("tick"), call("later", n=0)], [d.words()]),
    "later_alone": lambda d: closed([call("later", n=d.n())], [call("tick"), call("later", n=d.n())], [d.words()]),
    "without_end": lambda d: [[d.words(90, 90)]],
    "long": lambda d: closed([d.words(), call("fill", n=90)], [d.words()]),
    "long_after_a_round": lambda d: closed([d.add()], [d.words(), call("fill", n=90)], [d.words()]),
    "fits": lambda d: closed([d.words(), {"left": 0}], [d.words()]),
    "one_more_than_fits": lambda d: closed([d.words(), {"left": -1}], [d.words()]),
    "one_left": lambda d: closed([d.words(), {"left": 1}], [d.words()]),
    "end_fits": lambda d: closed([d.words(), {"left": 4}], [d.words(3, 3)]),
    "cut": lambda d: closed([d.words(), {"left": 5}], [d.words(9, 12)]),
    "cut_call": lambda d: closed([d.words(), {"left": "call"}], [call("fill", n=9)]),
    "step": lambda d: closed([call("step", by=d.n(1, 9))], [d.words()]),
    "steps": lambda d: closed([call("step", by=d.n(1, 9)), call("step", by=1)], [call("look")], [d.words()]),
    "step_fails": lambda d: closed([call("step", by=-1)], [d.words()]),
    "hidden": lambda d: closed([d.words(), call("_hidden")], [call("get_reward")], [d.words()]),
    "again": lambda d: closed([call("again", text="so"), call("look")], [d.words()]),
    "of_another": lambda d: closed([d.words(), call("again", text="so")], [d.words()]),
}

# Settings of every run; all others are trl's defaults.
COMMON = dict(
    learning_rate=1e-3, max_completion_length=120, num_generations=4, per_device_train_batch_size=8, max_steps=2
)
# Two passes over eight responses to two prompts, in two micro-batches: two generations.
REUSED = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_iterations=2, max_steps=4, learning_rate=5e-4)
# The same with 16 responses, two optimizer steps in a pass: one generation.
DIVIDED = REUSED | dict(steps_per_generation=4)

CALLS = ("call", "answer", "two_calls", "chain", "fails", "unknown", "broken", "text_and_call")
ODD = (
    "one_of_two_fails missing_argument one_of_two_broken unclosed no_name cast text_after_call chain".split()
    + "no_arguments kinds answer more_kinds unicode two_calls unknown call".split()
)
BUDGET = "long fits cut without_end one_left end_fits call one_more_than_fits".split()
MORE_BUDGET = "long_after_a_round answer cut_call fits cut long without_end one_more_than_fits".split()

# Name -> settings that differ from COMMON, and under other names of a run: `rewards`, `tools`, `environments`, `rows`
# (of a generation, one scenario each; the next generation starts with the third), `context` (positions of the model).
RUNS = {
    "tools_default": dict(rows=CALLS, tools=("add", "div", "shout"), rewards=("even", "used"), reward_weights=[1.0, 0.5]),
    "tools_grpo_beta": REUSED | dict(loss_type="grpo", beta=0.04, rows=CALLS, tools=("add", "div", "shout")),
    "tools_dapo_odd_calls": DIVIDED
    | dict(rows=ODD, tools=("add", "div", "shout", "show", "tick"), rewards=("even", "used"), max_completion_length=150),
    "tools_bnpo_limit": REUSED | dict(loss_type="bnpo", rows=CALLS, tools=("add", "div", "shout"), max_tool_calling_iterations=1),
    "tools_dr_grpo_budget": REUSED
    | dict(loss_type="dr_grpo", scale_rewards="none", rows=BUDGET, tools=("add", "fill"), max_completion_length=90),
    "tools_sequence": DIVIDED
    | dict(importance_sampling_level="sequence", epsilon=0.06, loss_type="grpo", rows=CALLS * 2, tools=("add", "div", "shout"))
    | dict(learning_rate=2e-4),
    "tools_truncated_masked": REUSED
    | dict(mask_truncated_completions=True, loss_type="grpo", beta=0.04, rows=MORE_BUDGET, tools=("add", "fill"))
    | dict(max_completion_length=90),
    "tools_truncated_masked_dapo": REUSED
    | dict(mask_truncated_completions=True, rows=BUDGET, tools=("add", "fill"), max_completion_length=90),
    "tools_async": dict(
        rows="later tick later_alone answer tick later call later_alone".split(),
        tools=("later", "tick", "add"),
        max_completion_length=150,
    ),
    "tools_context": dict(rows=("call", "answer") * 4, tools=("add",), context=191),
    "tools_top_entropy": REUSED
    | dict(top_entropy_quantile=0.5, entropy_coef=0.01, rows=CALLS, tools=("add", "div", "shout")),
    "tools_vespo": REUSED | dict(loss_type="vespo", rows=CALLS, tools=("add", "div", "shout")),
    "tools_luspo": DIVIDED
    | dict(loss_type="luspo", importance_sampling_level="sequence", epsilon=0.06, learning_rate=2e-4)
    | dict(rows=CALLS * 2, tools=("add", "div", "shout")),
    "environment_default": dict(
        rows="step steps step_fails answer hidden call steps step".split(),
        tools=("add",),
        environments=("Counter",),
        rewards=("even", "far"),
        reward_weights=[1.0, 0.5],
        max_completion_length=150,
        max_steps=3,
    ),
    "environment_alone": REUSED
    | dict(rows="step steps step_fails answer hidden broken steps step".split(), environments=("Counter",), rewards=())
    | dict(loss_type="grpo", beta=0.04),
    "environment_several": dict(
        rows="step of_another steps call again answer again of_another".split(),
        tools=("add",),
        environments=("counter=Counter", "echo=Echo"),
        max_steps=3,
    ),
}
OWN = dict(rewards=("even",), tools=(), environments=(), rows=(), context=1024, draw=0)
DRAWS, STEADY = 12, 4e-6

# The runs that store `thin.rows` of the final weights; the others only tensors of at most `thin.WHOLE` numbers.
WEIGHTS = ("tools_grpo_beta", "tools_dr_grpo_budget", "environment_default")


def settings(name):
    """The trainer's settings of a run, and the others of it."""
    changes = {k: v for k, v in RUNS[name].items() if k not in OWN}
    return COMMON | changes, OWN | {k: v for k, v in RUNS[name].items() if k in OWN}


def load_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(HERE / "init" / "policy")
    tokenizer.response_template = qwen3_template
    return tokenizer


def dataset(own):
    """The rows of the dataset: an index, a prompt, and for environments their columns."""
    rows = [{"index": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    names = [name.split("=")[0] for name in own["environments"]]
    if names:
        rows = [row | {"start": row["index"] + 1} for row in rows]
    if len(names) > 1:
        rows = [row | {"environment": names[row["index"] % len(names)]} for row in rows]
    return rows


def environment_factory(own):
    """What trl takes: a class, or classes by name."""
    found = {spec.split("=")[0]: getattr(given_tools, spec.split("=")[-1]) for spec in own["environments"]}
    return found if len(found) > 1 else next(iter(found.values()), None)


class Recorder(grpo.Recorder):
    """One run of the trainer; the turns of each row are given or, where None, those of its scenario."""

    def __init__(self, name, args, own, turns, dtype):
        self.own, self.given, self.generation = own, turns, -1
        self.data, self.metrics = {}, []
        self.micro = {"generation": [], "optimizer_step": [], "rows": [], "loss": []}
        self.steps = {"learning_rate": [], "clipped_grad_norm": []}
        self.texts, self.module = [], grpo_trainer
        given_tools.restart()
        init = HERE / "init"
        self.tokenizer = load_tokenizer()
        policy = AutoModelForCausalLM.from_pretrained(init / "policy", dtype=dtype)
        # trl loads the reference model from the name in the policy's config.
        policy.config._name_or_path = str(init / "ref")
        policy.config.max_position_embeddings = own["context"]
        with tempfile.TemporaryDirectory() as output:
            self.args = GRPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=1,
                model_init_kwargs={"dtype": dtype},
                **args,
            )
            self.trainer = Recorded(
                model=policy,
                reward_funcs=[REWARDS[n] for n in own["rewards"]] or None,
                args=self.args,
                train_dataset=Dataset.from_list(dataset(own)),
                processing_class=self.tokenizer,
                tools=[getattr(given_tools, n) for n in own["tools"]] or None,
                environment_factory=environment_factory(own),
            )
            self.trainer.recorder = self
            self.run()

    def planned(self, row):
        """The turns of a row's scenario as ids."""
        names = self.own["rows"]
        name = names[(row + 2 * self.generation) % len(names)]
        return [self.ids(turn) for turn in SCENARIOS[name](Draw(self.own["draw"], self.generation, row))]

    def ids(self, turn):
        """The ids of a turn: texts are encoded on their own; `left` is a call whose result leaves so many tokens."""
        ids = []
        for part in turn:
            if isinstance(part, dict):
                ids += self.fitting(len(ids), part["left"])
            else:
                ids += part if isinstance(part, list) else self.encode(part)
        return ids

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def fitting(self, before, left):
        """The ids of a call whose result leaves `left` tokens; `call`: as many as a call without its closing tag has."""
        if left == "call":
            left = len(self.encode(call("fill", n=9))) - 1
        for n in range(10, 100):
            ids = self.encode(call("fill", n=n))
            result = {"role": "tool", "name": "fill", "content": given_tools.fill(n)}
            used = before + len(ids) + 1 + len(self.trainer._get_tool_suffix_ids([result]))
            if used + left == self.args.max_completion_length:
                return ids
        raise ValueError(f"no result leaves {left} tokens")

    def start(self, inputs):
        self.generation += 1
        rows = range(len(inputs))
        self.turns = self.given[self.generation] if self.given else [self.planned(row) for row in rows]
        self.texts.append([{"turns": [], "executed": []} for _ in rows])

    def follow(self, prompt_ids):
        """The rows whose turn is next: those whose context has been continued, in their order."""
        texts = self.texts[-1]
        if not any(text["turns"] for text in texts):
            self.contexts = [None] * len(texts)
            return list(range(len(texts)))
        rows, row = [], -1
        for ids in prompt_ids:
            row += 1
            while ids[: len(self.contexts[row])] != self.contexts[row]:
                row += 1
            rows.append(row)
        return rows


class Recorded(grpo.recorded(GRPOTrainer)):
    """The trainer with its sampling replaced, and with the results of its methods recorded."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        recorder, turns, logprobs = self.recorder, [], []
        for row, context in zip(recorder.follow(prompt_ids), prompt_ids, strict=True):
            text = recorder.texts[-1][row]
            at = len(text["turns"])
            if text["turns"]:
                known = len(recorder.contexts[row])
                text["turns"][-1]["suffix"] = context[known:]
            ids = recorder.turns[row][at][: self.max_completion_length]
            text["turns"].append({"sampled": ids})
            recorder.contexts[row] = context + ids
            turns.append(list(ids))
            logprobs.append(self.logprobs(context, ids))
        return turns, logprobs

    @torch.no_grad()
    def logprobs(self, context, ids):
        logits = self.model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1] / self.temperature
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()

    def _tool_call_loop(self, *args):
        for row, (plain, later) in enumerate(zip(self._sync_tool_dicts, self._async_tool_dicts, strict=True)):
            executed = self.recorder.texts[-1][row]["executed"]
            for name, tool in plain.items():
                plain[name] = noted(executed, name, tool)
            for name, tool in later.items():
                later[name] = noted(executed, name, tool)
        output = super()._tool_call_loop(*args)
        width = max(len(mask) for mask in output[0])
        # As it is before truncated rows are masked.
        tool_mask = torch.tensor([mask + [0] * (width - len(mask)) for mask in output[0]], dtype=torch.bool)
        self.recorder.put(f"it{self.recorder.generation}.tool_mask", tool_mask)
        return output

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        recorder = self.recorder
        for text, prompt, completion in zip(recorder.texts[-1], prompts, completions, strict=True):
            text |= {"prompt": prompt, "completion": completion}
        recorder.put(f"it{recorder.generation}.lengths", [len(ids) for ids in completion_ids_list])
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs):
        recorder = self.recorder
        recorder.start(inputs)
        at = f"it{recorder.generation}.tool_mask"
        output = super()._generate_and_score_completions(inputs)
        assert torch.equal(output["tool_mask"] * output["completion_mask"], output["completion_mask"] * recorder.data[at])
        recorder.put(f"it{recorder.generation}.sampling_logps", output["sampling_per_token_logps"])
        return output


def noted(executed, name, tool):
    """The tool, which notes the arguments of its calls, those whose results are removed included."""

    @functools.wraps(tool)
    def noting(**arguments):
        executed.append({"name": name, "arguments": arguments})
        return tool(**arguments)

    return noting


def given_turns(info):
    return [[[turn["sampled"] for turn in row["turns"]] for row in rows] for rows in info["rollouts"]]


def stored_weights(name, final):
    small = {k: v for k, v in final.items() if v.numel() <= thin.WHOLE}
    return thin.rows(final) if name in WEIGHTS else small


def make(name):
    """Makes a run with the first draw of turns that rounding hardly moves, or the best of DRAWS."""
    args, own = settings(name)
    tried = []
    for attempt in range(DRAWS):
        own = own | {"draw": attempt}
        run = Recorder(name, args, own, None, torch.float32)
        turns = given_turns({"rollouts": run.texts})
        precise = Recorder(name, args, own, turns, torch.float64)
        distance = max(largest_difference(v, precise.final[k]) for k, v in run.final.items())
        tried.append((run, precise, distance, own))
        if distance < STEADY:
            break
    run, precise, distance, own = min(tried, key=lambda t: t[2])
    floats = [k for k, v in run.data.items() if v.is_floating_point()]
    assert all(torch.equal(run.data[k], precise.data[k]) for k in run.data.keys() - set(floats)), name
    assert run.texts == precise.texts, name
    info = {
        "run": name,
        "trainer": "grpo",
        "init": "trl_tools/init/",
        "pad": 1,
        **own,
        "rewards": run.trainer.reward_func_names,
        "reward_functions": own["rewards"],
        "args": args,
        "prompts": len(PROMPTS),
        **run.info(),
        "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch, grpo.accelerate)},
        "noise_floor_f32_vs_f64": {
            "final": thin.noise({k: largest_difference(v, precise.final[k]) for k, v in run.final.items()}),
            "tensors": thin.noise({k: largest_difference(run.data[k], precise.data[k]) for k in floats}),
            "metrics": metric_noise(run, precise),
        },
        "dataset": dataset(own),
        "rollouts": run.texts,
    }
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in run.data.items()}, folder / "data.safetensors")
    save_file({k: v.contiguous() for k, v in stored_weights(name, run.final).items()}, folder / "final.safetensors")
    thin.write_json(folder / "info.json", info)
    print(f"{name}: {len(run.metrics)} steps, {run.generation + 1} generations, {distance:.1e} from float64", flush=True)


def check(folder):
    """Reruns a stored run and compares every tensor and text; returns how many differ by more than rounding explains."""
    info = json.loads((folder / "info.json").read_text())
    data, final = load_file(folder / "data.safetensors"), load_file(folder / "final.safetensors")
    own = {k: info[k] for k in OWN} | {"rewards": info["reward_functions"]}
    run = Recorder(info["run"], info["args"], own, given_turns(info), torch.float32)
    noise = info["noise_floor_f32_vs_f64"]
    assert run.data.keys() == data.keys(), sorted(run.data.keys() ^ data.keys())
    found = thin.stored(run.final, final)
    assert found.keys() == final.keys(), sorted(found.keys() ^ final.keys())
    pairs = [(k, run.data[k], v, noise["tensors"].get(k, 0)) for k, v in data.items()]
    pairs += [(k, found[k], v, noise["final"].get(k.split("[")[0], 0)) for k, v in final.items()]
    off, worst = [], 0.0
    for key, got, expected, floor in pairs:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            off.append(f"{key} {list(got.shape)} {list(expected.shape)}")
            continue
        difference = largest_difference(got, expected)
        worst = max(worst, difference)
        allowed = max(5 * floor, 2e-5) if got.is_floating_point() else 0
        off += [f"{key} {difference:.1e}"] if difference > allowed else []
    stored, again = info["metrics"], run.info()["metrics"]
    off += [f"metric {key}" for key in sorted(stored.keys() ^ again.keys())]
    for key in stored.keys() & again.keys():
        for a, b in zip(stored[key], again[key], strict=True):
            same = a == b or (a is not None and b is not None and abs(a - b) <= 1e-3 * max(1, abs(a)))
            off += [] if same else [f"metric {key}"]
    off += [] if run.micro["rows"] == info["micro_batches"]["rows"] else ["rows"]
    off += [] if json.loads(json.dumps(run.texts)) == info["rollouts"] else ["rollouts"]
    print(f"{folder.name}: {len(pairs)} tensors, largest difference {worst:.1e}, off: {off or 'none'}", flush=True)
    return len(off)


def make_init():
    """Makes the tokenizer, a policy and a reference model near it."""
    functions = [getattr(given_tools, n) for n in ("add", "div", "fill", "shout", "show", "tick", "later")]
    counter, echo = given_tools.Counter(), given_tools.Echo()
    methods = [counter.look, counter.step, echo.again]
    schemas = [get_json_schema(f) for f in functions + methods]
    texts = [json.dumps(schema) for schema in schemas] * 4
    texts += [TEMPLATE.replace("\\n", "\n"), "<tool_response>\n</tool_response>\n", 'system\nuser\nassistant\n'] * 8
    texts += [call(s["function"]["name"], **dict.fromkeys(s["function"]["parameters"]["properties"], 1)) for s in schemas] * 4
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(TAGS), special_tokens=[END, PAD, START], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    assert len(fast) == VOCAB and fast.eos_token_id == 0 and fast.pad_token_id == 1, len(fast)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=OWN["context"],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    generator = torch.Generator().manual_seed(49)
    model = LlamaForCausalLM(config)
    for noise, name in ((None, "policy"), (0.03, "ref")):
        for key, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            scaled = 1 + 0.15 * drawn if "norm" in key else 0.3 * drawn
            weight.data.copy_(scaled if noise is None else weight + noise * drawn)
        model.save_pretrained(HERE / "init" / name)
        fast.save_pretrained(HERE / "init" / name)
    names = [f.__name__ for f in functions] + ["Counter.look", "Counter.step", "Echo.again"]
    thin.write_json(HERE / "schemas.json", dict(zip(names, schemas, strict=True)))


def texts_of_calls():
    """Responses with whole, odd and broken calls, by the style of their template."""
    a, b = '{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "tick", "arguments": {}}'
    inside = [a, f"\n{a}\n", f" {a} ", f"{a}{a}", f"[{a}]", "", "{}", "5", '"add"', "null", f"{a},", "{'name': 'add'}"]
    inside += ['{"name": "add"}', '{"name": "add", "arguments": null}', '{"arguments": {"a": 1}}', '{"name": 5, "arguments": {}}']
    inside += ['{"name": "add", "arguments": {"a": "1", "b": "x"}}', '{"name": "add", "arguments": {"a": 1.0, "b": true}}']
    inside += ['{"name": "add", "arguments": {"a": null, "c": [1]}}', '{"name": "add", "arguments": [1, 2]}']
    inside += ['{"name": "add", "arguments": "{\\"a\\": 1}"}', '{"name": "shout", "arguments": {"text": 5, "times": "2"}}']
    inside += ['{"name": "nothing", "arguments": {"a": "1"}}', '{"name": "add", "parameters": {"a": 1}}']
    inside += ['{"name": "div", "arguments": {"a": "1.5", "b": "2"}}', '{"name": "add", "arguments": {"a": 1, "a": 2}}']
    inside += ['{"name": "shout", "arguments": {"text": "</tool_call>"}}', '{"name": "shout", "arguments": {"text": "\\u00e9\n"}}']
    one, other = f"{TAGS[0]}\n{a}\n{TAGS[1]}", f"{TAGS[0]}\n{b}\n{TAGS[1]}"
    around = [one, f"{one}{END}\n", f"{one}\n{other}{END}", f"{one}{other}{END}", f"so {one}{END}", f"{one} so{END}"]
    around += [f"{one} so {other}{END}", f"\n{one}\n{END}", f"{TAGS[0]}\n{a}{END}", f"{TAGS[0]}\n{a}", f"{TAGS[0]}\n{a[:-1]}"]
    around += [f"{one}\n{TAGS[0]}\n{b}", f"{one}\n{TAGS[0]}\n{b[:-1]}{TAGS[1]}{END}", f"{TAGS[0]}{END}", f"{TAGS[1]}{END}", f"so{END}"]
    around += ["so", END, f"{END}{one}{END}", f"<think>\nso\n</think>\n\n{one}{END}", f"<think>{one}</think> so{END}", f"<think>so{END}"]
    around += [f"so </think>{one}{END}", f"  so\n\n{END}", f"{TAGS[0]}{TAGS[0]}{a}{TAGS[1]}{TAGS[1]}{END}"]
    stop, c = "<|eot_id|>", a.replace("arguments", "parameters")
    llama = [f"{c}{stop}", c, f"{a}{stop}", f"so{stop}", f"so {c}{stop}", f"{c} so{stop}", f"{c}; {c}{stop}", f" {c}\n{stop}"]
    llama += [f"<|python_tag|>{c}{stop}", f"{c[:-1]}{stop}", f'{{"name": "tick", "parameters": {{}}}}{stop}', f"[{c}]{stop}", stop]
    llama += [f'{{"name": "add", "parameters": {{"a": "1"}}}}{stop}', f'{{"type": "function", "name": "add", "parameters": {{}}}}{stop}']
    return {"qwen": around + [f"{TAGS[0]}{text}{TAGS[1]}{END}" for text in inside], "llama": llama}


def make_calls():
    """Writes how trl reads the texts, with the tools of `schemas.json`."""
    tokenizer, lines = load_tokenizer(), []
    functions = [getattr(given_tools, n) for n in ("add", "div", "shout", "tick")]
    starts = {"qwen": f"{START}assistant\n", "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n"}
    for style, texts in texts_of_calls().items():
        tokenizer.response_template = {"qwen": qwen3_template, "llama": llama3_template}[style]
        prefix = tokenizer(starts[style], add_special_tokens=False)["input_ids"]
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text, text
            lines.append(json.dumps({"style": style, "text": text, "message": parse_response(tokenizer, ids, prefix, functions)}))
    (HERE / "calls.jsonl").write_text("\n".join(lines) + "\n")


def gae(rewards, values, mask, gamma, lam):
    """Advantages of the sampled tokens as those of a text without the others; 0 at the others."""
    kept = [t for t, sampled in enumerate(mask) if sampled]
    advantages, following, carried = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(kept):
        carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
        following, advantages[t] = values[t], carried
    return advantages, [a + v if m else 0.0 for a, v, m in zip(advantages, values, mask, strict=True)]


def carrying(rewards, values, mask, gamma, lam):
    """The same over all tokens, with the value and the accumulator carried across those that were not sampled."""
    following, carried = torch.zeros(2, dtype=torch.float64)
    advantages = torch.zeros(len(mask), dtype=torch.float64)
    for t in reversed(range(len(mask))):
        delta = rewards[t] + gamma * following - values[t]
        carried = torch.where(mask[t], delta + gamma * lam * carried, carried)
        following = torch.where(mask[t], values[t], following)
        advantages[t] = torch.where(mask[t], carried, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def make_gae():
    """Writes 20 rows with results of tools in them, half of them with a result at the end.

    The score is at the last token that was sampled, or in a slot of its own after the last token, which has a value.
    """
    draw, cases = random.Random(49), []
    for number in range(20):
        mask = [m for _ in range(draw.randint(1, 4)) for m in [1] * draw.randint(1, 4) + [0] * draw.randint(1, 5)]
        mask = mask if number % 2 else mask[: len(mask) - mask[::-1].index(1)]
        position = ("last_token", "after_stop")[number // 2 % 2]
        gamma, lam = draw.choice([(1.0, 0.95), (0.98, 0.9), (1.0, 1.0), (0.9, 0.5)])
        # A penalty at each sampled token.
        rewards = [round(draw.gauss(0, 0.1), 4) if m else 0.0 for m in mask]
        if position == "after_stop":
            mask, rewards = [*mask, 1], [*rewards, 0.0]
        values = [round(draw.gauss(0, 1), 4) for _ in mask]
        slot, score = len(mask) - 1 - mask[::-1].index(1), round(draw.gauss(0, 1), 4)
        rewards[slot] = round(rewards[slot] + score, 4)
        advantages, returns = gae(rewards, values, mask, gamma, lam)
        tensors = (torch.tensor(x, dtype=torch.float64) for x in (rewards, values))
        again = carrying(*tensors, torch.tensor(mask, dtype=torch.bool), gamma, lam)
        for a, b in zip((advantages, returns), again, strict=True):
            assert largest_difference(torch.tensor(a, dtype=torch.float64), b) < 1e-12
        cases.append(
            dict(gamma=gamma, lam=lam, score=score, score_position=position, score_slot=slot, mask=mask)
            | dict(rewards=rewards, values=values, advantages=advantages, returns=returns)
        )
    lines = ",\n".join(f" {json.dumps(case)}" for case in cases)
    (ROOT / "gae_across_tools.json").write_text(f"[\n{lines}\n]\n")


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    logging.disable(logging.WARNING)
    if sys.argv[1:] == ["--check"]:
        sys.exit(any([check(path.parent) for path in sorted(HERE.glob("*/info.json"))]))
    if sys.argv[1:] == ["--init"]:
        make_init()
        make_calls()
        make_gae()
        return
    for name in RUNS:
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name)


if __name__ == "__main__":
    main()
