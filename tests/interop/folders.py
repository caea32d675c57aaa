"""Checks folders whose files can be read in two ways against transformers.

    python tests/interop/folders.py target/debug/rlhf

Makes tiny models of several families and changes their files as those of real folders differ: special tokens in four files, chat templates in
three places, settings of the generation in two files, old and new names of one setting, several files of weights. The changes of a folder are
drawn from a seed. Then transformers and `rlhf generate` read each folder, and these must be equal: the ids of texts with special tokens, the
ids of conversations by the folder's template, with and without tools, and the responses, which show whether tokens are sampled and what
ends a response. A folder that transformers refuses may be refused. Prints one line per check and a total. Exit code 1 if any failed.

An end token is one that transformers' generation or the tokenizer has, as in TRL. Needs transformers and torch; no network.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")

import torch
import transformers
from runner import binary, copy_model, expect, run_checks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SEED = 44
FOLDERS = 220
LEAST_CASES = 200
NEW_TOKENS = 6
VOCAB = 352
TEXT = "Hi <|padding|>there<img><x> <y><|endoftext|> now"
SPECIAL = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}[{{ tools[0].name }}]{% endif %}"
TOOLS = [{"name": "look", "type": "function"}]
ROWS = [
    {"prompt": TEXT},
    {"prompt": [{"role": "user", "content": "a<x>"}]},
    {"prompt": [{"role": "user", "content": "b"}], "tools": TOOLS},
]
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES = {
    "llama": ("LlamaConfig", GROUPED),
    "llama-tied": ("LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
}
WINDOWED = ("qwen2", "qwen3", "mistral")
TOKENS = {"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0}


class Folder:
    """A model's folder, whose files are changed."""

    def __init__(self, path, family, greedy):
        self.path, self.family, self.greedy = path, family, greedy

    def read(self, name):
        return json.loads((self.path / name).read_text())

    def write(self, name, value):
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))

    def update(self, name, *gone, **fields):
        value = {**self.read(name), **fields}
        self.write(name, {key: value for key, value in value.items() if key not in gone})

    def tokens(self, *gone, **fields):
        self.update("tokenizer_config.json", *gone, **fields)

    def config(self, *gone, **fields):
        self.update("config.json", *gone, **fields)

    def generation(self, **fields):
        self.write("generation_config.json", fields)

    def no_generation(self, **fields):
        (self.path / "generation_config.json").unlink(missing_ok=True)
        self.config(**fields)

    def rope(self, theta):
        return {"rope_type": "default", "rope_theta": theta, **({"partial_rotary_factor": 0.25} if self.family == "gpt_neox" else {})}

    def weights(self, change):
        path = self.path / "model.safetensors"
        tensors = load_file(path)
        save_file(change(tensors) or tensors, path, {"format": "pt"})

    def shards(self, keeps_single):
        tensors = load_file(self.path / "model.safetensors")
        names = sorted(tensors)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, part in parts.items():
            scale = -1 if keeps_single else 1
            save_file({name: scale * tensors[name] for name in part}, self.path / file, {"format": "pt"})
        weight_map = {name: file for file, part in parts.items() for name in part}
        self.write("model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        if not keeps_single:
            (self.path / "model.safetensors").unlink()


def token(content, **more):
    fields = {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {**fields, **more}


def typed(content, **more):
    return {"__type": "AddedToken", **token(content, special=True), **more}


def tokenizer_json(folder, **fields):
    folder.update("tokenizer.json", **fields)


PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0, "pad_token": "<|padding|>"}
TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}

# Each change is a function of a folder; a folder has at most one change of each kind.
OF_TOKENS = {
    "the map of special tokens beside the configuration": lambda f: f.write("special_tokens_map.json", {"eos_token": token("<x>")}),
    "the map, and listed tokens": lambda f: (
        f.write("special_tokens_map.json", {"eos_token": token("<x>"), "pad_token": "<y>"}),
        f.tokens(added_tokens_decoder={"0": token("<|endoftext|>", special=True)}),
    ),
    "the map, and an empty list of tokens": lambda f: (
        f.write("special_tokens_map.json", {"pad_token": "<y>"}),
        f.tokens(added_tokens_decoder={}),
    ),
    "a text in the map": lambda f: f.write("special_tokens_map.json", {"pad_token": "<y>", "additional_special_tokens": ["<x>"]}),
    "a null in the map": lambda f: f.write("special_tokens_map.json", {"pad_token": None}),
    "a new token in the map with spaces": lambda f: f.write("special_tokens_map.json", {"pad_token": token("<x>", lstrip=True, rstrip=True)}),
    "added tokens": lambda f: f.write("added_tokens.json", {"<x>": 320, "<y>": 321}),
    "added tokens, and listed ones": lambda f: (
        f.write("added_tokens.json", {"<x>": 320}),
        f.tokens(added_tokens_decoder={"320": token("<y>", special=False)}),
    ),
    "added tokens of which one is special": lambda f: (
        f.write("added_tokens.json", {"<y>": 321, "<x>": 320}),
        f.tokens(additional_special_tokens=["<x>"]),
    ),
    "a listed token with a space": lambda f: f.tokens(added_tokens_decoder={"320": token("<y>", lstrip=True, special=True)}),
    "a listed token that tokenizer.json has otherwise": lambda f: f.tokens(added_tokens_decoder={"1": token("<|padding|>", special=False, rstrip=True)}),
    "further special tokens by their old name": lambda f: f.tokens(additional_special_tokens=["<x>", "<y>"]),
    "further special tokens by both names": lambda f: f.tokens(additional_special_tokens=["<x>"], extra_special_tokens=["<y>"]),
    "further special tokens in a map": lambda f: f.tokens(extra_special_tokens={"image_token": "<img>"}),
    "further special tokens as objects": lambda f: f.tokens(extra_special_tokens=[typed("<x>", lstrip=True)]),
    "a token of the model": lambda f: f.tokens(image_token="<img>"),
    "a token of the model as an object": lambda f: f.tokens(image_token=typed("<img>")),
    "tokens of the model in a map": lambda f: f.tokens(model_specific_special_tokens={"image_token": "<img>"}),
    "tokens of the model in a map and beside it": lambda f: f.tokens(video_token="<y>", model_specific_special_tokens={"image_token": "<img>"}),
    "an object of the model beside its map": lambda f: f.tokens(video_token=typed("<y>"), model_specific_special_tokens={"image_token": "<img>"}),
    "no pad token": lambda f: f.tokens("pad_token"),
    "a pad token that is null": lambda f: f.tokens(pad_token=None),
    "a pad token that is the unknown one": lambda f: f.tokens(pad_token="<|endoftext|>"),
    "a pad token that no file has": lambda f: f.tokens(pad_token="<x>"),
    "the padding of tokenizer.json": lambda f: (tokenizer_json(f, padding=PADDING), f.tokens("pad_token")),
    "the padding of tokenizer.json, and null": lambda f: (tokenizer_json(f, padding=PADDING), f.tokens(pad_token=None)),
    "the padding of tokenizer.json, and another": lambda f: (tokenizer_json(f, padding=PADDING), f.tokens(pad_token="<|endoftext|>")),
    "truncation": lambda f: tokenizer_json(f, truncation=TRUNCATION),
    "an end token that is null": lambda f: f.tokens(eos_token=None),
    "an end token that is null, and the map": lambda f: (f.tokens(eos_token=None), f.write("special_tokens_map.json", {"eos_token": "<x>"})),
    "no first token": lambda f: f.tokens("bos_token"),
    "adds a first token": lambda f: f.tokens(add_bos_token=True, add_eos_token=True),
    # The class of Qwen's has rules of its own in place of those of the tests' tokenizer.json.
    "adds a space": lambda f: f.tokens(add_prefix_space=True) if not f.family.startswith("qwen") else None,
    "a class of GPT-2": lambda f: f.tokens(tokenizer_class="GPT2TokenizerFast"),
    "a class of Qwen2": lambda f: f.tokens(tokenizer_class="Qwen2Tokenizer"),
    "a class of old": lambda f: f.tokens(tokenizer_class="PreTrainedTokenizerFast"),
    "no class": lambda f: f.tokens("tokenizer_class"),
    "special tokens are split": lambda f: f.tokens(split_special_tokens=True),
    "no configuration of the tokenizer": lambda f: (f.path / "tokenizer_config.json").unlink(),
    "cleaned up": lambda f: f.tokens(clean_up_tokenization_spaces=True),
}


def templates(*names):
    return [{"name": name, "template": f"{name} {SPECIAL}{TURNS}"} for name in names]


OF_TEMPLATES = {
    "in the configuration": lambda f: f.tokens(chat_template=f"config {SPECIAL}{TURNS}"),
    "in both": lambda f: (f.tokens(chat_template=f"config {TURNS}"), f.write("chat_template.jinja", f"file {SPECIAL}{TURNS}")),
    "a list": lambda f: f.tokens(chat_template=templates("default", "tool_use")),
    "a list without tools": lambda f: f.tokens(chat_template=templates("rag", "default")),
    "a list without a default": lambda f: f.tokens(chat_template=templates("rag", "tool_use")),
    "a list with one name twice": lambda f: f.tokens(chat_template=[*templates("default"), {"name": "default", "template": f"second {TURNS}"}]),
    "a map": lambda f: f.tokens(chat_template={"default": f"map {TURNS}", "tool_use": f"tools {TURNS}"}),
    "further files": lambda f: (
        f.write("chat_template.jinja", f"file {TURNS}"),
        f.write("additional_chat_templates/tool_use.jinja", f"tools {SPECIAL}{TURNS}"),
    ),
    "further files alone": lambda f: (
        f.tokens(chat_template=f"config {TURNS}"),
        f.write("additional_chat_templates/tool_use.jinja", f"tools {TURNS}"),
    ),
    "a further default": lambda f: (
        f.write("chat_template.jinja", f"file {TURNS}"),
        f.write("additional_chat_templates/default.jinja", f"further {TURNS}"),
    ),
    "a list and a file": lambda f: (f.tokens(chat_template=templates("default", "tool_use")), f.write("chat_template.jinja", f"file {TURNS}")),
    "the file of processors": lambda f: (
        f.tokens(chat_template=f"config {TURNS}"),
        f.write("chat_template.json", {"chat_template": f"processor {TURNS}"}),
    ),
}
OF_GENERATION = {
    "no word of sampling": lambda f: f.generation(temperature=90.0, **TOKENS),
    "a word of sampling": lambda f: f.generation(do_sample=True, temperature=90.0, top_k=0, **TOKENS),
    "sampling that is null": lambda f: f.generation(do_sample=None, temperature=90.0, top_p=0.9, **TOKENS),
    "sampling of the likeliest": lambda f: f.generation(do_sample=True, top_k=1, **TOKENS),
    "none": lambda f: f.no_generation(),
    "sampling in the configuration": lambda f: f.no_generation(do_sample=True, temperature=90.0, top_k=0),
    "a temperature in the configuration": lambda f: f.no_generation(temperature=90.0),
    "sampling in the configuration, and a file without": lambda f: (f.config(do_sample=True, temperature=90.0), f.generation(do_sample=False, **TOKENS)),
    "a penalty in the configuration": lambda f: f.no_generation(repetition_penalty=1.8),
    "a penalty": lambda f: f.generation(do_sample=False, repetition_penalty=1.8, **TOKENS),
    "from the configuration": lambda f: f.generation(_from_model_config=True, do_sample=False, **TOKENS),
    "several ends": lambda f: f.generation(**{**TOKENS, "do_sample": False, "eos_token_id": [0, f.greedy[2], f.greedy[4]]}),
    "ends that differ": lambda f: (
        f.config(eos_token_id=f.greedy[1]),
        f.generation(**{**TOKENS, "do_sample": False, "eos_token_id": f.greedy[3]}),
    ),
    "ends in the configuration alone": lambda f: f.no_generation(eos_token_id=[f.greedy[3], 0]),
    "an end that is null": lambda f: f.generation(**{**TOKENS, "do_sample": False, "eos_token_id": None}),
    "a least length": lambda f: f.generation(**{**TOKENS, "do_sample": False, "min_new_tokens": 5, "eos_token_id": [f.greedy[1], 0]}),
}


def lower(folder, layers, **fields):
    """Layers with windows, as `fields` say it. In families without windows, transformers' cache has one and its attention none."""
    if folder.family in WINDOWED:
        folder.config("layer_types", sliding_window=3, max_window_layers=layers, **fields)


OF_CONFIGURATION = {
    "an old base of the rotary positions": lambda f: f.config("rope_parameters", rope_theta=500.0, rotary_emb_base=500.0),
    "two bases": lambda f: f.config(rope_parameters=f.rope(90.0), rope_theta=500.0, rotary_emb_base=500.0),
    "two names of the scaling": lambda f: f.config(rope_parameters=f.rope(90.0), rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "an old name of the kind of scaling": lambda f: f.config("rope_parameters", rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=500.0),
    "a scaling that is null": lambda f: f.config(rope_scaling=None),
    "a size of the heads that is null": lambda f: f.config(head_dim=None) if f.family != "qwen3" else None,
    "no size of the heads": lambda f: f.config("head_dim") if f.family != "qwen3" else None,
    "no epsilon": lambda f: f.config("rms_norm_eps", "layer_norm_eps"),
    "no activation": lambda f: f.config("hidden_act"),
    "windows that are off": lambda f: lower(f, 0, use_sliding_window=False),
    "windows that are on": lambda f: lower(f, 1, use_sliding_window=True),
    "windows without a word": lambda f: lower(f, 1),
    "no window": lambda f: f.config("layer_types", sliding_window=None),
    "kinds of layers beside windows that are on": lambda f: (
        lower(f, 0, use_sliding_window=True),
        f.config(layer_types=["sliding_attention", "full_attention"]) if f.family in WINDOWED else None,
    ),
    "kinds of layers that are null": lambda f: (lower(f, 0, use_sliding_window=True), f.config(layer_types=None)),
    "a tie that is said": lambda f: f.config(tie_word_embeddings=True),
    "a tie that is not said": lambda f: f.config("tie_word_embeddings"),
    "biases": lambda f: f.config(attention_bias=False) if f.family != "gpt_neox" else None,
    "a dtype by its old name": lambda f: f.config("dtype", torch_dtype="float16"),
    "two dtypes": lambda f: f.config(dtype="float32", torch_dtype="bfloat16"),
    "no architecture": lambda f: f.config("architectures"),
    "other fields": lambda f: f.config(use_cache=False, pretraining_tp=2, quantization_config=None, is_decoder=True),
}
OF_WEIGHTS = {
    "in parts": lambda f: f.shards(keeps_single=False),
    "parts of another model beside the whole": lambda f: f.shards(keeps_single=True),
    "another file beside them": lambda f: f.write("pytorch_model.bin", "not read"),
    "a head that is the embedding": lambda f: f.weights(lambda t: head(t, lambda embedding, old: embedding.clone())),
    "a head of its own": lambda f: f.weights(lambda t: head(t, lambda embedding, old: embedding.flip(0).clone())),
    "a head in place of the embedding": lambda f: f.weights(in_place_of_embedding),
    "half precision": lambda f: f.weights(lambda t: {name: tensor.to(torch.bfloat16) for name, tensor in t.items()}),
    "tensors that are computed": lambda f: f.weights(
        lambda t: {**t, **({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)} if f.family != "gpt_neox" else {})}
    ),
    "without the prefix": lambda f: f.weights(
        lambda t: {name.removeprefix("model.").removeprefix("gpt_neox."): tensor for name, tensor in t.items()}
    ),
}


def head(tensors, make):
    embedding = next(name for name in tensors if "embed_" in name and name != "embed_out.weight")
    name = "embed_out.weight" if embedding.startswith("gpt_neox") else "lm_head.weight"
    tensors[name] = make(tensors[embedding], tensors.get(name))


def in_place_of_embedding(tensors):
    head(tensors, lambda embedding, old: embedding.clone())
    del tensors[next(name for name in tensors if "embed_" in name and name != "embed_out.weight")]


KINDS = {
    "tokens": OF_TOKENS,
    "template": OF_TEMPLATES,
    "generation": OF_GENERATION,
    "configuration": OF_CONFIGURATION,
    "weights": OF_WEIGHTS,
}


def base_models(scratch):
    """Family -> its folder and the likeliest tokens after the text."""
    found = {}
    for number, (name, (config, fields)) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        config = getattr(transformers, config)(**fields, **TOKENS, max_position_embeddings=512)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        folder = scratch / name
        copy_model(folder)
        model.save_pretrained(folder)
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": f"base {SPECIAL}{TURNS}"}))
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, **TOKENS}))
        ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]])
        greedy = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=VOCAB)[0, ids.shape[1] :].tolist()
        found[name] = folder, greedy
    return found


def make(scratch, bases):
    """Makes the folders. Yields each with its name: first one of each change, then changes of several kinds."""
    draw = random.Random(SEED)
    families = list(bases)
    wanted = [[(kind, change)] for kind, changes in KINDS.items() for change in changes]
    while len(wanted) < FOLDERS:
        kinds = draw.sample(list(KINDS), draw.choice([2, 2, 3]))
        wanted.append([(kind, draw.choice(list(KINDS[kind]))) for kind in kinds])
    for number, changes in enumerate(wanted):
        family = families[number % len(families)]
        base, greedy = bases[family]
        path = scratch / f"folder-{number}"
        shutil.copytree(base, path)
        folder = Folder(path, family, greedy)
        names = []
        for kind, change in sorted(changes, key=lambda kind: list(KINDS).index(kind[0]) != 1):
            names.append(f"{kind}: {change}")
            KINDS[kind][change](folder)
        yield f"{family}, {', '.join(names)}", folder


def says_sampling(folder):
    """Whether a file has a setting of sampling. If none has, rlhf samples, which is its own default."""
    names = ("do_sample", "temperature", "top_k", "top_p")
    file = "generation_config.json" if (folder.path / "generation_config.json").exists() else "config.json"
    return any(folder.read(file).get(name) is not None for name in names)


def of_transformers(folder):
    """What transformers makes of each row: the ids of its prompt, and those of the response, None if it is sampled. None for a row that it
    refuses; None in place of the rows if it refuses the folder."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.path)
        model, loading = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32, output_loading_info=True)
        # Missing tensors are made at random.
        if loading["missing_keys"]:
            return None
    except Exception:
        return None
    model.eval()
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [end for end in dict.fromkeys([*ends, tokenizer.eos_token_id]) if end is not None]
    found = []
    for row in ROWS:
        try:
            if isinstance(row["prompt"], str):
                ids = tokenizer(row["prompt"])["input_ids"]
            else:
                ids = tokenizer.apply_chat_template(row["prompt"], tools=row.get("tools"), add_generation_prompt=True, return_dict=False)
            expect(all(isinstance(id, int) for id in ids), "a token without an id")
        except Exception:
            found.append(None)
            continue
        sampled = bool(config.do_sample) and config.top_k != 1
        response = None
        if not sampled and max(ids) < VOCAB:
            inputs = torch.tensor([ids])
            more = {"eos_token_id": ends} if ends else {"eos_token_id": VOCAB}
            more.update(attention_mask=torch.ones_like(inputs), max_new_tokens=NEW_TOKENS, pad_token_id=1)
            try:
                response = model.generate(inputs, **more)[0, len(ids) :].tolist()
            except Exception:
                found.append(None)
                continue
        found.append((ids, response, sampled))
    return found


def of_rlhf(program, folder, rows):
    """What rlhf makes of these rows; its error in place of those that it refuses."""
    path = folder.path.with_suffix(".jsonl")
    words = [program, "generate", "--model", folder.path, "--dataset_name", path, "--max_new_tokens", str(NEW_TOKENS)]
    words += ["--output_format", "jsonl", "--batch_size", "1", "--dtype", "float32"]
    words += [] if says_sampling(folder) else ["--do_sample", "false"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if ran.returncode:
        return ran.stderr.strip().splitlines()[-1]
    return [(row["prompt_ids"], row["completion_ids"]) for row in map(json.loads, ran.stdout.splitlines())]


def differences(program, name, folder, wanted):
    """The number of compared rows of a folder, and a line for each that differs."""
    if wanted is None:
        return 0, []
    kept = [(row, expected) for row, expected in zip(ROWS, wanted) if expected is not None]
    if not kept:
        return 0, []
    found = of_rlhf(program, folder, [row for row, _ in kept])
    if isinstance(found, str):
        return len(kept), [f"{name}: refused, {found}"]
    wrong = []
    for number, ((ids, response, sampled), (own_ids, own)) in enumerate(zip((expected for _, expected in kept), found)):
        if own_ids != ids:
            wrong.append(f"{name}: row {number}: expected the ids {ids}, found {own_ids}")
        elif response is not None and own != response:
            wrong.append(f"{name}: row {number}: expected the response {response}, found {own}")
        elif sampled and own == folder.greedy[: len(own)]:
            wrong.append(f"{name}: row {number}: expected a sampled response, found the likeliest tokens")
    return len(kept), wrong


def folders_are_read_as_by_transformers(program, scratch):
    made = list(make(scratch, base_models(scratch)))
    wanted = [of_transformers(folder) for _, folder in made]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda case: differences(program, *case[0], case[1]), zip(made, wanted)))
    wrong = [line for _, lines in results for line in lines]
    for line in wrong[1:] if "RLHF_ALL" in os.environ else []:
        print(line)
    folders = sum(count > 0 for count, _ in results)
    expect(not wrong, f"{len(wrong)} of {sum(count for count, _ in results)} differ, first: {wrong[0] if wrong else ''}")
    expect(folders >= LEAST_CASES, f"expected at least {LEAST_CASES} folders that transformers reads, found {folders}")


def main():
    program = binary(__doc__)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        check = lambda: folders_are_read_as_by_transformers(program, Path(scratch))
        return run_checks([("folders whose files can be read in two ways are read as by transformers", check)])


if __name__ == "__main__":
    sys.exit(main())
