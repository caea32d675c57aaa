"""Writes the data, the tokenizer and the model's configuration of this example, the same bytes every time.

    python3 make_data.py FOLDER

FOLDER gets `demos.jsonl`, the demonstrations of SFT; `tasks/train.jsonl` and `tasks/test.jsonl`, the tasks of training and those that are held
out; `tokenizer/` and `model.json`.

The demonstrations are by a clerk who knows the form of each call and is careless: a share CARE of the steps is right, so that few of them end
with the right answer. In the tasks that are held out, with and without tools, no two goods are together in an order of training or of a
demonstration.

Python 3.9 or newer, standard library only.
"""

import functools
import inspect
import itertools
import json
import random
import sys
from pathlib import Path

from shop import GOODS, PRICES, Closed, Shop

SEED = 7
DEMOS, TRAIN, TEST = 12000, 4000, 256
# Shares of right steps of the clerk, and of the wrong lookups in place of which it answers at once.
CARE = {"lookup": 0.75, "calculate": 0.55, "answer": 0.4}
EARLY = 0.3
# Share of the demonstrations, and number of the tasks that are held out, with `Closed`: the answer is a guess.
GUESSES, TEST_CLOSED = 0.05, 256
QUANTITIES, COUNTS = range(2, 10), (2, 3)

TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}
{{- ' ' + tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def is_held_out(one, other):
    """Whether two goods are together only in tasks that are held out: about a quarter of all pairs."""
    return (GOODS.index(one) + GOODS.index(other)) % 4 == 3


def order(rng, held_out):
    """Two or three goods with their quantities."""
    count = rng.choice(COUNTS)
    while True:
        goods = rng.sample(GOODS, count)
        if any(is_held_out(*pair) for pair in itertools.combinations(goods, 2)) == held_out:
            return [[item, rng.choice(QUANTITIES)] for item in goods]


def question(goods):
    return "What do " + " and ".join(f"{quantity} {item}" for item, quantity in goods) + " cost?"


def task(goods, environment):
    return {"prompt": [{"role": "user", "content": question(goods)}], "order": goods, "environment": environment}


@functools.lru_cache(maxsize=None)
def arguments(environment):
    """The name of the argument of each tool, in the order that they have in training: by name."""
    methods = inspect.getmembers(environment, inspect.isfunction)
    tools = [(name, method) for name, method in methods if not name.startswith("_") and name not in ("reset", "get_reward")]
    return {name: list(inspect.signature(method).parameters)[1] for name, method in tools}


def schemas(environment):
    """The part of the tools' schemas that the template writes."""
    parameters = {name: {"type": "object", "properties": {argument: {"type": "string"}}} for name, argument in arguments(environment).items()}
    return [{"type": "function", "function": {"name": name, "parameters": given}} for name, given in parameters.items()]


def other_than(rng, values, value):
    return rng.choice([other for other in values if other != value])


class Conversation:
    """A conversation about an order, with the calls and results of an environment."""

    def __init__(self, environment, goods, seed):
        self.environment = environment()
        self.environment.reset(goods, seed)
        self.messages = [{"role": "user", "content": question(goods)}]

    def call(self, name, argument):
        result = getattr(self.environment, name)(argument)
        given = {arguments(type(self.environment))[name]: argument}
        call = {"type": "function", "function": {"name": name, "arguments": given}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        self.messages.append({"role": "tool", "name": name, "content": str(result)})
        return result

    def guess(self, rng):
        self.call("answer", rng.randrange(100, 1000))


def serve(rng, goods, conversation):
    """What a careless clerk does in the open shop."""

    def errs(step):
        return rng.random() >= CARE[step]

    terms = []
    for item, quantity in goods:
        if errs("lookup"):
            if rng.random() < EARLY:
                return conversation.guess(rng)
            item = other_than(rng, GOODS, item)
        terms.append([quantity, conversation.call("lookup", item)])
    if errs("calculate"):
        term = rng.choice(terms)
        term[0] = other_than(rng, QUANTITIES, term[0])
    total = conversation.call("calculate", "+".join(f"{quantity}*{price}" for quantity, price in terms))
    conversation.call("answer", rng.choice(terms)[1] if errs("answer") else total)


def demo(rng):
    """A conversation for SFT, and whether its answer is right."""
    goods, environment = order(rng, held_out=False), Closed if rng.random() < GUESSES else Shop
    conversation = Conversation(environment, goods, seed=rng.getrandbits(32))
    if environment is Closed:
        conversation.guess(rng)
    else:
        serve(rng, goods, conversation)
    messages = [*conversation.messages, {"role": "assistant", "content": "Done."}]
    return {"messages": messages, "tools": schemas(environment)}, conversation.environment.get_reward()


def byte_letters():
    """The characters that stand for bytes in byte-level tokenizers, by byte: those of GPT-2."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def tokenizer():
    """Words, digits and runs of other characters as tokens; those that are not in the vocabulary are bytes."""
    special, tags = ["<|im_end|>", "<|endoftext|>", "<|im_start|>"], ["<tool_call>", "</tool_call>"]
    words = "What do and cost Done Tools system user assistant tool name arguments noted error".split()
    words += [word for call in arguments(Shop).items() for word in call]
    runs = ['\n{"', '": "', '", "', '": {"', '"}}\n', '": ', "}}\n", ") ", ": "]
    letters = byte_letters()
    pieces = ["".join(letters[byte] for byte in text.encode()) for text in [*words, *GOODS, *runs]]
    tokens = special + list(letters.values()) + pieces + tags
    added = [(token, True) for token in special] + [(token, False) for token in tags]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": tokens.index(token), "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": is_special}
            for token, is_special in added
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "[A-Za-z]+|[0-9]|[^A-Za-z0-9]+"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a whole piece that is in the vocabulary is a token
            "vocab": {token: i for i, token in enumerate(tokens) if token not in tags},
            "merges": [],
        },
    }


def model(vocabulary):
    """A Qwen3 of 0.4 million parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 24,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "bos_token_id": None,
    }


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def files():
    """Contents by path."""
    rng = random.Random(SEED)
    demos = [demo(rng)[0] for _ in range(DEMOS)]
    train = [task(order(rng, held_out=False), "shop") for _ in range(TRAIN)]
    held_out = [order(rng, held_out=True) for _ in range(max(TEST, TEST_CLOSED))]
    test = [task(goods, "shop") for goods in held_out[:TEST]] + [task(goods, "closed") for goods in held_out[:TEST_CLOSED]]
    words = tokenizer()
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        "demos.jsonl": lines(demos),
        "tasks/train.jsonl": lines(train),
        "tasks/test.jsonl": lines(test),
        "tokenizer/tokenizer.json": json.dumps(words, indent=1) + "\n",
        "tokenizer/tokenizer_config.json": json.dumps(named, indent=1) + "\n",
        "tokenizer/chat_template.jinja": TEMPLATE,
        "model.json": json.dumps(model(len(words["model"]["vocab"]) + 2), indent=1) + "\n",
    }


def write(folder):
    for name, text in files().items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 make_data.py FOLDER")
    write(sys.argv[1])
