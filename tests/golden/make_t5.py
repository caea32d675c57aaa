"""Makes the tiny T5, mT5 and BART models of `models/t5*`, `models/mt5` and `models/bart*` and their reference values with transformers.

    python make_t5.py            # make every model of SPECS again
    python make_t5.py NAME...    # make these again
    python make_t5.py --check    # recompute the values of every model from its stored inputs, from config.json and config_v4.json

Made with torch 2.11.0, transformers 5.23.0 and safetensors 0.8.0 on a CPU, one thread, float32. `--check` runs with transformers
4.45.2 too, which reads config_v4.json only. README.md says what each tensor is.
"""

import copy
import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.update(HF_HUB_OFFLINE="1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartForSequenceClassification,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)

import thin

MODELS = Path(__file__).resolve().parent / "models"
NEW_TOKENS = 12
VERSION = int(transformers.__version__.split(".")[0])

# Two heads of 8 beside a hidden size of 32, few buckets, and texts that are longer than the largest distance.
sizes = dict(
    vocab_size=80,
    d_model=32,
    d_kv=8,
    num_heads=2,
    d_ff=32,
    num_layers=2,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    pad_token_id=0,
    eos_token_id=1,
)
# torch gives the embedding of the pad token no gradient, so no text has it.
bart = dict(
    vocab_size=81,
    d_model=32,
    max_position_embeddings=24,
    encoder_layers=2,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    dropout=0.0,
    scale_embedding=True,
    decoder_start_token_id=0,
    bos_token_id=None,
    pad_token_id=80,
    eos_token_id=1,
    forced_eos_token_id=None,
)
gated = dict(sizes, feed_forward_proj="gated-gelu", d_ff=16, num_layers=3, tie_word_embeddings=False)


class Spec(NamedTuple):
    config: T5Config
    seed: int  # the first to try
    untied: bool = False  # whether the head has weights of its own


SPECS = {
    "t5": Spec(T5Config(**sizes), 301),
    # transformers 5 ties the head of every T5; `tie_word_embeddings=False` means that hidden states are not scaled.
    "t5_v11": Spec(T5Config(**gated), 302),
    "t5_v11_untied": Spec(T5Config(**gated), 303, untied=True),
    "t5_cls": Spec(T5Config(num_labels=2, **dict(sizes, num_layers=1, num_decoder_layers=1)), 304),
    "t5_v11_cls1": Spec(T5Config(num_labels=1, **dict(gated, num_layers=1, num_decoder_layers=2)), 305),
    "mt5": Spec(MT5Config(**dict(gated, num_layers=1, num_decoder_layers=1)), 451),
    "bart": Spec(BartConfig(**bart), 307),
    "bart_cls1": Spec(BartConfig(num_labels=1, **dict(bart, encoder_layers=1)), 308),
}


def is_classifier(name):
    return "_cls" in name


def model_class(name):
    if name.startswith("bart"):
        return BartForSequenceClassification if is_classifier(name) else BartForConditionalGeneration
    if is_classifier(name):
        return T5ForSequenceClassification
    return MT5ForConditionalGeneration if name == "mt5" else T5ForConditionalGeneration


def random_model(name, seed):
    config, untied = SPECS[name].config, SPECS[name].untied
    torch.manual_seed(seed)
    model = model_class(name)(copy.deepcopy(config))
    if untied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(config.vocab_size, config.d_model))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            is_norm = weight.dim() == 1 and key.endswith(("layer_norm.weight", "layernorm_embedding.weight"))
            weight.normal_(0.0, 0.15 if is_norm else 0.25 if weight.dim() > 1 else 0.1)
            weight.add_(1.0 if is_norm else 0.0)
            if "shared" in key and not is_classifier(name) and getattr(config, "scale_decoder_outputs", False):
                weight.mul_(4.0)  # so that scaled logits differ
    return model.eval()


def random_inputs(seed):
    """Right-padded prompts that end with eos, and responses, of which the first and last end with it; equal first and last prompts."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = torch.zeros(4, 15, dtype=torch.long), torch.zeros(4, 13, dtype=torch.long)
    lens = [(9, 6), (15, 13), (4, 3), (9, 1)]
    for row, (prompt, response) in enumerate(lens):
        prompts[row, :prompt] = torch.randint(2, 80, (prompt,), generator=generator)
        prompts[row, prompt - 1] = 1
        responses[row, :response] = torch.randint(2, 80, (response,), generator=generator)
    prompts[3] = prompts[0]
    responses[0, 5] = responses[3, 0] = 1
    prompt_lens, response_lens = torch.tensor(lens).unbind(1)
    return {"prompts": prompts, "prompt_lens": prompt_lens, "responses": responses, "response_lens": response_lens}


def masks(inputs):
    arange = torch.arange(15)
    return [
        (arange[: inputs[f"{part}s"].shape[1]] < inputs[f"{part}_lens"][:, None]).long() for part in ("prompt", "response")
    ]


def forward(model, inputs):
    """The outputs of the model that reads the start token and the responses: one position more than responses have tokens."""
    mask, _ = masks(inputs)
    responses = inputs["responses"]
    start = torch.zeros(len(responses), 1, dtype=torch.long)
    return model(
        input_ids=inputs["prompts"],
        attention_mask=mask,
        decoder_input_ids=torch.cat([start, responses], 1),
        output_hidden_states=True,
    )


def logprobs(model, inputs):
    logits = forward(model, inputs).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, inputs["responses"][..., None])[..., 0]


@torch.no_grad()
def lm_values(model, inputs):
    output = forward(model, inputs)
    mask, _ = masks(inputs)
    values = {
        "logits": output.logits,
        "encoder_states": output.encoder_last_hidden_state,
        "decoder_states": output.decoder_hidden_states[-1],
        "next_logprobs": logprobs(model, inputs),
    }
    free = model.generate(
        inputs["prompts"],
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=4,
        eos_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    top = torch.stack(free.scores, 1).topk(2, -1).values
    values |= {"greedy.tokens": free.sequences[:, 1:], "greedy.gap": top[..., 0] - top[..., 1]}
    return thin.columns(values, "logits")


@torch.no_grad()
def classifier_values(model, inputs):
    """The logits of the prompts, which end with eos; and of the longest, at each position of the decoder's response, from its head."""
    values = {"scores": torch.cat([model(input_ids=row[None, :length]).logits for row, length in texts(inputs)])}
    return values | {"values": state_values(model, inputs)}


def state_values(model, inputs):
    """The head at each position of the decoder that reads the start token and the responses."""
    mask, _ = masks(inputs)
    start = torch.zeros(4, 1, dtype=torch.long)
    trunk = model.model if hasattr(model, "model") else model.transformer
    output = trunk(
        input_ids=inputs["prompts"], attention_mask=mask, decoder_input_ids=torch.cat([start, inputs["responses"]], 1)
    )
    return model.classification_head(output.last_hidden_state)


def texts(inputs):
    return zip(inputs["prompts"], inputs["prompt_lens"].tolist(), strict=True)


def loss(model, inputs):
    """Minus the sum of the log-probabilities of all responses; of a classifier, its logits times 1 and -2, summed, or if it has one
    label, the sum of the squares of the values at the positions that the decoder reads."""
    if hasattr(model, "classification_head") and model.config.num_labels == 1:
        _, mask = masks(inputs)
        read = torch.cat([torch.ones(4, 1), mask], 1)
        return (state_values(model, inputs)[..., 0].square() * read).sum()
    if hasattr(model, "classification_head"):
        logits = torch.cat([model(input_ids=row[None, :length]).logits for row, length in texts(inputs)])
        return (logits * torch.tensor([1.0, -2.0])).sum()
    _, mask = masks(inputs)
    return -(logprobs(model, inputs) * mask).sum()


def gradients(model, inputs):
    value = loss(model, inputs)
    value.backward()
    return value.item(), {key: weight.grad for key, weight in model.named_parameters()}


def values_of(name, model, inputs):
    return (classifier_values if is_classifier(name) else lm_values)(model, inputs)


def of_transformers_4(config, untied):
    """The same model in the keys that transformers wrote before 5."""
    config = dict(config, transformers_version="4.45.2", torch_dtype=config["dtype"])
    if config["model_type"] == "bart":
        for key in ("dtype", "is_decoder", "tie_word_embeddings"):
            config.pop(key)
        return dict(sorted(config.items()))
    scaled = config.pop("scale_decoder_outputs", False)  # mT5 never scales
    for key in ("dtype", "is_decoder", "tie_word_embeddings"):
        config.pop(key)
    assert scaled or untied or config["is_gated_act"]
    if not scaled:
        config["tie_word_embeddings"] = False  # means both, in transformers 4: a head of its own, and no scaling
    return dict(sorted(config.items()))


def make(name):
    spec = SPECS[name]
    folder, seed = MODELS / name, spec.seed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    while True:
        model, inputs = random_model(name, seed), random_inputs(seed)
        values = values_of(name, model, inputs)
        exact = values_of(name, copy.deepcopy(model).double(), inputs)
        rounding = max((values[k] - exact[k]).abs().max().item() for k in values if values[k].is_floating_point())
        alive = [row.tolist().index(1) if 1 in row else NEW_TOKENS for row in values.get("greedy.tokens", [])]
        gaps = [gap for row, length in enumerate(alive) for gap in values["greedy.gap"][row, : length + 1].tolist()]
        if rounding < 8e-6 and min(gaps, default=1.0) > 0.01:
            break
        seed += 100
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config_v4.json").write_text(json.dumps(of_transformers_4(config, spec.untied), indent=1) + "\n")
    value, found = gradients(model, inputs)
    _, precise = gradients(copy.deepcopy(model).double(), inputs)
    entry = {
        "seed": seed,
        "loss": value,
        "max_abs": max(grad.abs().max().item() for grad in found.values()),
        "rounding": max((found[key] - precise[key]).abs().max().item() for key in found),
    }
    (folder / "grads.json").write_text(json.dumps(entry, indent=1) + "\n")
    save_file({key: grad.contiguous() for key, grad in thin.rows(found).items()}, folder / "grads.safetensors")
    tensors = {key: tensor.clone().contiguous() for key, tensor in sorted((values | inputs).items())}
    save_file(tensors, folder / "golden.safetensors")
    print(f"{name}: seed {seed}, rounding {rounding:.1e}, {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def load(name, file="config.json"):
    config = type(SPECS[name].config).from_pretrained(MODELS / name / file)
    return model_class(name).from_pretrained(MODELS / name, config=config, torch_dtype=torch.float32).eval()


def check(name):
    folder = MODELS / name
    stored, worst = load_file(folder / "golden.safetensors"), 0.0
    inputs = {key: stored[key] for key in ("prompts", "prompt_lens", "responses", "response_lens")}
    for file in ("config.json", "config_v4.json")[VERSION < 5 :]:
        model = load(name, file)
        values = values_of(name, model, inputs)
        for key, value in values.items():
            if not value.is_floating_point():
                assert torch.equal(value, stored[key]), f"{name}: {key}"
            elif key != "greedy.gap":
                worst = max(worst, (value - stored[key]).abs().max().item())
        found = thin.stored(gradients(model, inputs)[1], load_file(folder / "grads.safetensors"))
        grads = load_file(folder / "grads.safetensors")
        gap = max((found[key] - grads[key]).abs().max().item() for key in grads)
        print(f"{name}: {file}: values differ by {worst:.1e}, gradients by {gap:.1e}")
        worst = max(worst, gap / max(1.0, json.loads((folder / "grads.json").read_text())["max_abs"]))
    return worst


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    if sys.argv[1:] == ["--check"]:
        # transformers 4 cannot hold the head of t5_v11 and mt5 tied without scaling.
        names = [name for name in SPECS if VERSION >= 5 or name not in ("t5_v11", "mt5")]
        sys.exit(max([check(name) for name in names]) > 2e-5)
    for name in sys.argv[1:] or SPECS:
        make(name)


if __name__ == "__main__":
    main()
