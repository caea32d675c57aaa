"""Makes the tiny models of `models/` and their reference values with transformers.

    python make_models.py            # make gpt2_cls, llama_untied_cls, llama_tied and gpt_neox_seqres again
    python make_models.py --check    # recompute the values of every model in `models/` from its stored inputs

Made with torch 2.11.0, transformers 5.23.0, trl 1.11.0 and safetensors 0.8.0 on a CPU, one thread, float32. README.md
says what each tensor is.
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
)
from trl.experimental.ppo.ppo_trainer import forward
from trl.experimental.utils import get_reward

MODELS = Path(__file__).resolve().parent / "models"
CONTEXT, GREEDY_TOKENS = 7, 16

bytelevel = dict(bos_token_id=0, eos_token_id=0, pad_token_id=1)
llama = dict(
    vocab_size=400,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=3,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)

# Name -> (config, name of the tokenizer, its size, the model whose tokenizer files are copied, first seed to try).
SPECS = {
    "gpt2_cls": (
        GPT2Config(
            vocab_size=320,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            num_labels=1,
            **bytelevel,
        ),
        "bytelevel",
        320,
        "gpt2",
        201,
    ),
    "llama_untied_cls": (
        LlamaConfig(tie_word_embeddings=False, num_labels=1, **llama),
        "llama2",
        400,
        "llama_untied",
        202,
    ),
    "llama_tied": (LlamaConfig(tie_word_embeddings=True, **llama), "llama2", 400, "llama_untied", 203),
    "gpt_neox_seqres": (
        GPTNeoXConfig(
            vocab_size=352,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tie_word_embeddings=False,
            use_parallel_residual=False,
            **bytelevel,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        ),
        "bytelevel",
        320,
        "gpt_neox",
        204,
    ),
}


def is_classifier(config):
    return config.architectures[0].endswith("ForSequenceClassification")


def random_model(config, seed, classifier):
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = weight.dim() == 1 and name.endswith("weight")
            weight.normal_(0.0, 0.15 if is_norm else 0.3 if weight.dim() > 1 else 0.1).add_(1.0 if is_norm else 0.0)
    return model.eval()


def random_inputs(seed, tokens, config):
    """Left-padded queries of 7 with responses of 6, padded after their end; rows of 12; rows of 12 to cut."""
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape):
        return torch.randint(4, tokens, shape, generator=generator)  # 4: past the special tokens

    pad, eos = config.pad_token_id, config.eos_token_id
    padded = ids(4, CONTEXT + 6)
    for row, (left, end) in enumerate([(0, None), (3, 10), (5, 12), (1, 7)]):
        padded[row, :left] = pad
        if end is not None:
            padded[row, end] = eos
            padded[row, end + 1 :] = pad
    return padded, ids(3, 12), ids(4, 12)


def position_ids(mask):
    return mask.cumsum(1) - mask.long()


@torch.no_grad()
def lm_values(model, padded, unpadded, greedy_eos_id=None):
    config, values = model.config, {}
    pad = config.pad_token_id
    for name, ids in (("padded", padded), ("unpadded", unpadded)):
        mask = (ids != pad).long()
        output = forward(model, ids, pad)
        values |= {
            f"{name}.input_ids": ids,
            f"{name}.model_input_ids": ids.masked_fill(mask == 0, 0),
            f"{name}.attention_mask": mask,
            f"{name}.position_ids": position_ids(mask),
            f"{name}.logits": output.logits,
            f"{name}.next_logprobs": output.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0],
        }
        values |= {f"{name}.hidden_states.{i}": hidden for i, hidden in enumerate(output.hidden_states)}
    prompts = padded[:, :CONTEXT]
    mask = (prompts != pad).long()

    def greedy(eos):
        return model.generate(
            prompts.masked_fill(mask == 0, 0),
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=GREEDY_TOKENS,
            eos_token_id=eos,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_scores=True,
        )

    free = greedy(config.eos_token_id)
    tokens, scores = free.sequences[:, CONTEXT:], torch.stack(free.scores, 1)
    top = scores.topk(2, -1).values
    if greedy_eos_id is None:
        greedy_eos_id = tokens[0, 5].item()  # the first row stops early, others later or never
    values |= {
        "greedy.prompt_ids": prompts,
        "greedy.prompt_mask": mask,
        "greedy.tokens": tokens,
        "greedy.scores": scores,
        "greedy.gap": top[..., 0] - top[..., 1],
        "greedy_eos.tokens": greedy(greedy_eos_id).sequences[:, CONTEXT:],
    }
    return values, greedy_eos_id


@torch.no_grad()
def classifier_values(model, padded, unpadded, plain):
    values, pad = {}, model.config.pad_token_id
    for name, ids in (("padded", padded), ("unpadded", unpadded)):
        mask = (ids != pad).long()
        reward_logits, score, index = get_reward(model, ids, pad, CONTEXT)
        last_hidden = getattr(model, model.base_model_prefix)(
            input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask, position_ids=position_ids(mask)
        ).last_hidden_state
        values |= {
            f"{name}.input_ids": ids,
            f"{name}.attention_mask": mask,
            f"{name}.position_ids": position_ids(mask),
            f"{name}.reward_logits": reward_logits,
            f"{name}.score": score,
            f"{name}.score_index": index,
            f"{name}.last_hidden": last_hidden,
        }
    for side in ("right", "left"):
        ids = torch.full_like(plain, pad)
        for row, length in enumerate([12, 7, 3, 9]):
            place = slice(0, length) if side == "right" else slice(12 - length, 12)
            ids[row, place] = plain[row, :length]
        mask = (ids != pad).long()
        values |= {
            f"hf_{side}.input_ids": ids,
            f"hf_{side}.attention_mask": mask,
            f"hf_{side}.logits": model(input_ids=ids, attention_mask=mask).logits,
        }
    return values


def config_of_transformers_4(config):
    """The same model in the keys that transformers wrote before 5."""
    config = dict(config, transformers_version="4.45.2", torch_dtype=config["dtype"])
    for key in ("dtype", "add_cross_attention", "is_decoder"):
        config.pop(key, None)
    if config["model_type"] == "gpt2":
        del config["tie_word_embeddings"]
    rope = config.pop("rope_parameters", None)
    if rope:
        config.update(rope_scaling=None, rope_theta=rope["rope_theta"])
    if config["model_type"] == "gpt_neox":
        share = rope["partial_rotary_factor"]
        config.update(rotary_emb_base=int(rope["rope_theta"]), rotary_pct=share, partial_rotary_factor=share)
    return dict(sorted(config.items()))


def make(name):
    config, tokenizer, tokens, tokenizer_source, seed = SPECS[name]
    classifier = name.endswith("_cls")
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    entry = {"dir": f"models/{name}"}
    while True:
        model = random_model(config, seed, classifier)
        padded, unpadded, plain = random_inputs(seed, tokens, config)
        entry |= {"cls": type(model).__name__, "weight_seed": seed, "tokenizer": tokenizer}
        entry |= {"pad_token_id": config.pad_token_id, "eos_token_id": config.eos_token_id, "context_length": CONTEXT}
        if classifier:
            values = classifier_values(model, padded, unpadded, plain)
            entry["base_model_prefix"] = model.base_model_prefix
            break
        values, greedy_eos_id = lm_values(model, padded, unpadded)
        gap = values["greedy.gap"].min().item()
        ends = (values["greedy.tokens"] == config.eos_token_id).any()
        if gap > 0.01 and not ends:  # no rounding can change a greedy token, and every row is full
            entry |= {"greedy_eos_id": greedy_eos_id, "min_greedy_gap": gap}
            entry["logit_std"] = values["unpadded.logits"].std().item()
            break
        seed += 100
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / tokenizer_source / file, folder)
    old = config_of_transformers_4(json.loads((folder / "config.json").read_text()))
    (folder / "config_v4.json").write_text(json.dumps(old, indent=1) + "\n")
    save_file({k: v.contiguous() for k, v in sorted(values.items())}, folder / "golden.safetensors")
    entry["params"] = {k: list(v.shape) for k, v in load_file(folder / "model.safetensors").items()}
    entry["files"] = sorted(p.name for p in folder.iterdir() if p.name != "config_v4.json")
    entry["bytes"] = sum((folder / f).stat().st_size for f in entry["files"])
    index = json.loads((MODELS / "index.json").read_text())
    index["models"][name] = entry
    (MODELS / "index.json").write_text(json.dumps(index, indent=1))
    print(f"{name}: seed {seed}, {entry['bytes']} bytes")


def check(name, entry):
    """Recomputes golden.safetensors, under both configs, and gives back the largest difference on real positions."""
    stored = load_file(MODELS / name / "golden.safetensors")
    worst = 0.0
    for config_file in ("config.json", "config_v4.json"):
        config = transformers.AutoConfig.from_pretrained(MODELS / name / config_file)
        auto = AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM
        model = auto.from_pretrained(MODELS / name, config=config, dtype=torch.float32).eval()
        padded, unpadded = stored["padded.input_ids"], stored["unpadded.input_ids"]
        if auto is AutoModelForSequenceClassification:
            values = classifier_values(model, padded, unpadded, stored["hf_right.input_ids"])
        else:
            values, _ = lm_values(model, padded, unpadded, entry["greedy_eos_id"])
        assert values.keys() == stored.keys(), f"{name}: tensors {sorted(values.keys() ^ stored.keys())}"
        for key, expected in stored.items():
            got = values[key]
            assert got.shape == expected.shape and got.dtype == expected.dtype, f"{name}: {key}"
            if not got.is_floating_point():
                assert torch.equal(got, expected), f"{name}: {key}"
                continue
            if key.startswith("padded.") and got.dim() == 3:  # what a padding query on the left sees is not defined
                real = stored["padded.attention_mask"].cumsum(1)[..., None] > 0
                got, expected = got * real, expected * real
            elif key == "padded.next_logprobs":
                real = stored["padded.attention_mask"].cumsum(1)[:, :-1] > 0
                got, expected = got * real, expected * real
            worst = max(worst, (got - expected).abs().max().item())
    print(f"{name}: largest difference {worst:.1e}")
    return worst


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if sys.argv[1:] == ["--check"]:
        index = json.loads((MODELS / "index.json").read_text())["models"]
        worst = [check(n, e) for n, e in index.items() if (MODELS / n / "golden.safetensors").exists()]
        sys.exit(max(worst) > 2e-5)
    for name in SPECS:
        make(name)


if __name__ == "__main__":
    main()
