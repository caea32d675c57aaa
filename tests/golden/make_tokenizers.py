"""Makes the tokenizers `split` and `t5` of `tokenizers/`, and the values of all five kinds and of added tokens with transformers.

    python make_tokenizers.py            # make both, golden.json and added.json again
    python make_tokenizers.py --check    # compare both files with what transformers gives now

Made with transformers 5.23.0 and tokenizers 0.23.3. `bert` is that of a tiny DistilBERT; `bytelevel` and `llama2` lie in
`models/`.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent / "tokenizers"
GOLDEN = HERE / "golden.json"
DIRS = {"bytelevel": "../models/gpt2", "split": "split", "llama2": "../models/llama_untied", "bert": "bert", "t5": "t5"}
TEXTS = [
    "The movie was great!",
    " leading and  double  spaces",
    "I don't think it's 2024-12-31.",
    "naïve café — 東京 🙂",
    "cafe\u0301 ﬁne",
    "a\n\nb\tc\r\n",
    "",
    "x",
    "Human: hi\n\nAssistant:",
    "<|endoftext|>The end</s> [SEP]",
    "price $1,234.56",
]
CORPUS = (
    "The movie was great and the acting was great too. It's a film that I don't want to see again, but I think it's fine. "
    "Human: what is the capital of France? Assistant: The capital of France is Paris, naïve café. 12 345 678 $9.50! "
) * 4


def split():
    """The regular expression that Llama 3 and Qwen split by, NFC, and merges that whole words pass over."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    # As Llama 3: a begin token before every text.
    tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    return tokenizer, {"eos_token": "<|endoftext|>", "pad_token": "<|padding|>"}


def t5():
    """Unigram over SentencePiece's spaces, an end token after every text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def values(name):
    tokenizer = AutoTokenizer.from_pretrained((HERE / DIRS[name]).resolve())
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        yield {
            "text": text,
            "ids": ids,
            "ids_no_special": tokenizer(text, add_special_tokens=False)["input_ids"],
            "decoded": tokenizer.decode(ids),
            "decoded_skip_special": tokenizer.decode(ids, skip_special_tokens=True),
        }


if "--check" not in sys.argv:
    for name, make in (("split", split), ("t5", t5)):
        tokenizer, config = make()
        (HERE / name).mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(HERE / name / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (HERE / name / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token(content: str, **flags) -> dict:
    """An entry of added_tokens_decoder."""
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


END = token("<|endoftext|>")
# Files beside the tokenizer.json of models/gpt2, which has 320 tokens and neither <end> nor <more> among them.
BESIDE = {
    "none": {"tokenizer_config.json": {}},
    "listed": {"tokenizer_config.json": {"added_tokens_decoder": {"0": END, "400": token("<end>"), "330": token("<more>", special=False)}}},
    "listed with flags": {
        "tokenizer_config.json": {"added_tokens_decoder": {"0": token("<|endoftext|>", lstrip=True), "400": token("<end>", rstrip=True)}}
    },
    "named": {"tokenizer_config.json": {"eos_token": "<end>", "pad_token": "<more>"}},
    "named, of the vocabulary": {"tokenizer_config.json": {"eos_token": "the", "pad_token": "he", "bos_token": "b"}},
    "named by objects": {
        "tokenizer_config.json": {"eos_token": {"__type": "AddedToken", **token("<end>")}, "pad_token": {"__type": "AddedToken", **token("<more>", special=False, rstrip=True)}}
    },
    "named by nothing": {"tokenizer_config.json": {"eos_token": "<|endoftext|>", "pad_token": ""}},
    "a list": {"tokenizer_config.json": {"additional_special_tokens": ["<end>", {"__type": "AddedToken", **token("<more>")}]}},
    "a list by names": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<end>"}}},
    "a name of its own": {"tokenizer_config.json": {"image_token": "<end>", "add_bos_token": True}},
    "the older file": {
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
        "special_tokens_map.json": {"eos_token": "<end>", "pad_token": token("<more>", special=False)},
    },
    "a list of the older file": {"tokenizer_config.json": {}, "special_tokens_map.json": {"additional_special_tokens": ["<end>"]}},
    "the older file beside a list": {
        "tokenizer_config.json": {"eos_token": "<|endoftext|>", "added_tokens_decoder": {"0": END}},
        "special_tokens_map.json": {"eos_token": "<end>", "pad_token": "<more>"},
    },
    "an end and a pad in two files": {
        "tokenizer_config.json": {"eos_token": "<end>"}, "special_tokens_map.json": {"pad_token": "<more>"}
    },
    "an end before the list of the older file": {
        "tokenizer_config.json": {"eos_token": "<end>"}, "special_tokens_map.json": {"additional_special_tokens": ["<more>"]}
    },
    "a list in each file": {
        "tokenizer_config.json": {"additional_special_tokens": ["<end>"]},
        "special_tokens_map.json": {"additional_special_tokens": ["<more>"]},
    },
    "both names of the list": {
        "tokenizer_config.json": {"additional_special_tokens": ["<end>"], "extra_special_tokens": ["<more>"]}
    },
    "a pad that the older file takes back": {
        "tokenizer_config.json": {"pad_token": "<more>"}, "special_tokens_map.json": {"pad_token": None}
    },
    "the oldest file": {
        "tokenizer_config.json": {"pad_token": "<more>"},
        "added_tokens.json": {"<more>": 330, "<end>": 321, "<|endoftext|>": 0},
    },
}


def beside(files: dict) -> dict:
    """The values of one text with the tokenizer of models/gpt2 beside these files."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE.parent / "models" / "gpt2" / "tokenizer.json", folder)
        for name, content in files.items():
            if name == "tokenizer_config.json":
                content = {"tokenizer_class": "PreTrainedTokenizerFast", **content}
            (Path(folder) / name).write_text(json.dumps(content))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "a <end> b<more> c the <|endoftext|> end"
    ids = tokenizer(text).input_ids
    return {
        "files": files, "text": text, "ids": ids, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id,
        "decoded": tokenizer.decode(ids), "decoded_skip_special": tokenizer.decode(ids, skip_special_tokens=True),
    }


ADDED = HERE / "added.json"
added = json.dumps({name: beside(files) for name, files in BESIDE.items()}, indent=None).replace('{"files"', '\n{"files"') + "\n"
if "--check" in sys.argv:
    assert ADDED.read_text(encoding="utf-8") == added, "added.json differs from what transformers gives"
else:
    ADDED.write_text(added, encoding="utf-8")
golden = {name: {"dir": folder, "cases": list(values(name))} for name, folder in DIRS.items()}
text = json.dumps(golden, ensure_ascii=False, indent=None).replace('{"text"', '\n{"text"') + "\n"
if "--check" in sys.argv:
    assert GOLDEN.read_text(encoding="utf-8") == text, "golden.json differs from what transformers gives"
else:
    GOLDEN.write_text(text, encoding="utf-8")
