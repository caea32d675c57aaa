"""Writes the data, the tokenizer and the model's configuration of this example, the same bytes every time.

    python3 make_data.py            # writes data/, tokenizer/ and model.json
    python3 make_data.py --check    # compares them with what it would write

A document is two sentences, one of which tells an event; its summary has who did what to which thing, and where:

    summarize : it was windy and the young tailor slept . on monday ana the baker sold a golden piano in oslo .
    ana sold a piano in oslo

Python 3.9 or newer, standard library only.
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEED = 7
ROWS = {"sft": 2000, "prompts": 1024, "prompts_test": 128}

NAMES = "ana boris clara dmitri elena felix greta hugo ines jonas karin leo marta nils olga pavel rosa simon tessa viktor".split()
ROLES = "baker sheriff pilot teacher painter judge sailor nurse miner singer gardener farmer tailor dancer boxer surgeon".split()
DEEDS = "found stole sold painted repaired bought lost hid broke borrowed".split()
QUALITIES = "old broken secret rusty golden tiny heavy silver".split()
THINGS = "map violin letter ferry diary watch piano lantern camera bicycle coat clock suitcase ring key boat".split()
CITIES = "lisbon oslo prague naples havana kyoto cairo dublin vienna quito tunis riga porto lima seville bergen".split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
WEATHER = "rainy foggy sunny snowy windy misty stormy dusty".split()
MOODS = "young tired proud shy nervous lonely famous jealous".split()
DOINGS = "slept waited laughed sang danced left".split()
OTHERS = "summarize : on the it was and a in .".split()
LISTS = [NAMES, ROLES, DEEDS, QUALITIES, THINGS, CITIES, DAYS, WEATHER, MOODS, DOINGS, OTHERS]


def row(rng):
    """A document with its summary."""
    name, deed, thing, city = (rng.choice(words) for words in (NAMES, DEEDS, THINGS, CITIES))
    event = (
        f"on {rng.choice(DAYS)} {name} the {rng.choice(ROLES)} {deed} a {rng.choice(QUALITIES)} {thing} in {city} ."
    )
    scene = f"it was {rng.choice(WEATHER)} and the {rng.choice(MOODS)} {rng.choice(ROLES)} {rng.choice(DOINGS)} ."
    sentences = [event, scene]
    rng.shuffle(sentences)
    return {"prompt": "summarize : " + " ".join(sentences), "completion": f"{name} {deed} a {thing} in {city}"}


def tokenizer():
    """Words as tokens, and </s> after every text, as T5's tokenizer puts it."""
    specials = ["<pad>", "</s>", "<unk>"]
    tokens = specials + sorted({word for words in LISTS for word in words})
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, token in enumerate(specials)
    ]
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [text, end],
            "pair": [text, end, other, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<unk>"},
    }


def model(vocab):
    """A T5 of two layers on each side, with random weights to start from."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": vocab,
        "d_model": 64,
        "d_kv": 16,
        "num_heads": 4,
        "d_ff": 128,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "feed_forward_proj": "relu",
        "relative_attention_num_buckets": 16,
        "relative_attention_max_distance": 32,
        "n_positions": 64,
        "dropout_rate": 0.0,
        "layer_norm_epsilon": 1e-6,
        "initializer_factor": 1.0,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def files():
    """Contents by path."""
    rng = random.Random(SEED)
    found, seen = {}, set()
    for name, count in ROWS.items():
        rows = []
        while len(rows) < count:
            made = row(rng)
            if made["completion"] not in seen:
                seen.add(made["completion"])
                rows.append(made)
        found[f"data/{name}.jsonl"] = "".join(json.dumps(made) + "\n" for made in rows)
    words = tokenizer()
    found["tokenizer/tokenizer.json"] = json.dumps(words, indent=1) + "\n"
    named = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
    found["tokenizer/tokenizer_config.json"] = json.dumps(named, indent=1) + "\n"
    found["model.json"] = json.dumps(model(len(words["model"]["vocab"])), indent=1) + "\n"
    return found


def main():
    for name, text in files().items():
        path = HERE / name
        if "--check" in sys.argv:
            if path.read_text() != text:
                sys.exit(f"{path}: not what make_data.py writes")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main()
