"""Runs trl's legacy PPOTrainer.step() on the models of `trl_legacy/init` and records what it computes.

    python make_trl_legacy.py            # make the variants of VARIANTS again, or those that are named
    python make_trl_legacy.py --init     # make the models of SEQ2SEQ again, `init/t5_vhead` and `init/t5_ref`
    python make_trl_legacy.py --check    # rerun every folder of `trl_legacy/` from its stored rows and compare

Made with torch 2.11.0, transformers 4.45.2, trl 0.11.4 and accelerate 1.0.1 on a CPU, one thread, float32. README.md
says what each tensor is. Nothing of the trainer is changed but this: with `use_score_scaling` it stops at a float that
it takes for a tensor, so that its running moments get a float with a method `to`.
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import accelerate
import numpy as np
import torch
import transformers
import trl
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from trl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer

import thin

HERE = Path(__file__).resolve().parent / "trl_legacy"
NUMPY_SEED = 4321
EOS, PAD, VOCAB = 0, 1, 320
STEPS, ROWS = 2, 8
# Variants with the encoder-decoder, a T5 with its own special tokens. A response starts with its decoder's start token.
SEQ2SEQ = ("t5", "t5_kl_full")
T5_START, T5_EOS, T5_VOCAB = 0, 1, 72
# Weights with more numbers than this are left out of final.safetensors; of the others it has `thin.rows`.
MOST = 2048
# Names of weights that are others' too.
TIED = ("lm_head", "embed_tokens")
# Runs that the tests compare up to the first step that trl does not take as it says: their last weights are not stored.
WITHOUT_FINAL = ("whiten_rewards", "left_padding", "ratio_threshold", "max_grad_norm")

COMMON = dict(
    batch_size=ROWS,
    mini_batch_size=4,
    gradient_accumulation_steps=1,
    ppo_epochs=3,
    learning_rate=1e-3,
    init_kl_coef=0.2,
    target=6.0,
    horizon=10000.0,
    seed=7,
)
VARIANTS = {
    "fixed_kl": dict(adap_kl_ctrl=False),
    "kl_abs": dict(kl_penalty="abs", init_kl_coef=0.1),
    "kl_mse": dict(kl_penalty="mse", init_kl_coef=0.3),
    "kl_full_adaptive": dict(kl_penalty="full", target=0.5, horizon=100.0),
    "adaptive_fast": dict(target=0.1, horizon=40.0),
    "score_scaling_norm_clip": dict(use_score_scaling=True, use_score_norm=True, score_clip=0.8),
    "score_clip": dict(score_clip=0.5),
    "early_stopping": dict(early_stopping=True, target_kl=0.002, mini_batch_size=8, ppo_epochs=4),
    "response_masks": dict(),
    "left_padding": dict(),
    "ga2": dict(mini_batch_size=2, gradient_accumulation_steps=2),
    "gae_clip_vf": dict(gamma=0.97, lam=0.9, cliprange=0.05, cliprange_value=0.03, vf_coef=0.5, mini_batch_size=8),
    "ratio_threshold": dict(ratio_threshold=1.02),
    "max_grad_norm": dict(max_grad_norm=0.1),
    "t5": dict(target=0.5, horizon=100.0),
    "t5_kl_full": dict(kl_penalty="full", mini_batch_size=2, gradient_accumulation_steps=2, ppo_epochs=2, gamma=0.97, lam=0.9),
}


class Float(float):
    """A float that can be sent to where tensors go."""

    def to(self, **_):
        return torch.tensor(float(self))


def make_t5():
    """Random weights of a tiny T5 with a value head, and of a reference model near it."""
    torch.manual_seed(11)
    # The width of all heads is not that of the model, and there are fewer buckets than positions.
    config = T5Config(
        vocab_size=T5_VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=3, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=T5_START,
        eos_token_id=T5_EOS, pad_token_id=T5_START,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        width = 0.15 if ".q." in name or ".k." in name else 0.5 if "relative" in name else 0.3
        mean, width = (1.0, 0.15) if "norm" in name else (0.0, 1.5 if name.startswith("shared") else width)
        torch.nn.init.normal_(weight, mean, width)
    wrapped = AutoModelForSeq2SeqLMWithValueHead(model)
    torch.nn.init.normal_(wrapped.v_head.summary.weight, 0.0, 0.1)
    torch.nn.init.normal_(wrapped.v_head.summary.bias, 0.0, 0.1)
    model.save_pretrained(HERE / "init/t5_vhead")
    # trl writes the head among the weights.
    path = HERE / "init/t5_vhead/model.safetensors"
    head = {f"v_head.{name}": tensor for name, tensor in wrapped.v_head.state_dict().items()}
    save_file(load_file(path) | head, path, {"format": "pt"})
    for weight in model.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    model.save_pretrained(HERE / "init/t5_ref")


def models(dtype, seq2seq):
    wrapper = AutoModelForSeq2SeqLMWithValueHead if seq2seq else AutoModelForCausalLMWithValueHead
    names = ["t5_vhead", "t5_ref"] if seq2seq else ["policy_vhead", "ref"]
    policy, ref = [wrapper.from_pretrained(str(HERE / "init" / name)) for name in names]
    # The head casts what it reads to its own dtype, which has to be that of the rest.
    return policy.to(dtype), ref.to(dtype)


def rows_of(name):
    """Queries, responses, scores and masks of each step, from a seed that is the variant's own."""
    rng = np.random.default_rng(sum(map(ord, name)))
    steps = []
    seq2seq = name in SEQ2SEQ
    vocab, eos = (T5_VOCAB, T5_EOS) if seq2seq else (VOCAB, EOS)
    for _ in range(STEPS):
        ids = lambda low, high: torch.tensor(rng.integers(2, vocab, rng.integers(low, high)))
        queries = [ids(2, 9) for _ in range(ROWS)]
        responses = [ids(2, 11) for _ in range(ROWS)]
        for response in responses[::3]:
            response[-1] = eos
        if seq2seq:
            responses = [torch.cat([torch.tensor([T5_START]), response]) for response in responses]
        masks = [torch.ones_like(response) for response in responses]
        if name == "response_masks":
            # Inside, at the beginning and at the end of responses.
            for row, mask in enumerate(masks):
                at = [slice(0, 0), slice(1, 3), slice(0, 1), slice(-1, None)][row % 4]
                mask[at] = 0
                mask[len(mask) // 2] = 1
        scores = torch.tensor(rng.normal(0.5, 2.0, ROWS), dtype=torch.float32)
        steps.append((queries, responses, scores, masks))
    return steps


def tokenizer_of(seq2seq):
    folder, eos, pad = ("t5_ref", "</s>", "<pad>") if seq2seq else ("ref", "<|endoftext|>", "<|padding|>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "init" / folder / "tokenizer.json"), eos_token=eos, pad_token=pad
    )
    expected = (T5_EOS, T5_START) if seq2seq else (EOS, PAD)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == expected, tokenizer
    return tokenizer


def run(settings, steps, side, dtype, seq2seq):
    """Two steps of the trainer; tensors and a description of them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        torch.set_default_dtype(torch.float32)
        policy, ref = models(dtype, seq2seq)
        # Masks are made in it.
        torch.set_default_dtype(dtype)
        tokenizer = tokenizer_of(seq2seq)
        tokenizer.padding_side = side
        trainer = PPOTrainer(PPOConfig(**settings), policy, ref, tokenizer)
    np.random.seed(NUMPY_SEED)
    tensors, info = {}, {"config": settings, "padding_side": side, "steps": [], "micro": []}
    place = {"step": 0, "forward": 0, "steps": 0}

    def wrap(name, record):
        plain = getattr(trainer, name)

        def wrapped(*args, **kwargs):
            out = plain(*args, **kwargs)
            record(args, kwargs, out)
            return out

        setattr(trainer, name, wrapped)

    def put(name, tensor, prefix=None):
        tensors[f"{prefix or 'step%d' % place['step']}.{name}"] = tensor.detach().clone().contiguous()

    def forward(args, kwargs, out):
        # The first two of a step are the rollout's.
        if place["forward"] == 0:
            put("attention_mask", args[3]["attention_mask"])
            put("logprobs", out[0])
            put("values_raw", out[2])
            put("masks", out[3])
        elif place["forward"] == 1:
            put("ref_logprobs", out[0])
        else:
            queries = args[1]
            place["inds"] = [next(i for i, q in enumerate(place["queries"]) if q is query) for query in queries]
        place["forward"] += 1

    def rewarded(args, kwargs, out):
        put("scores_processed", args[0])
        put("rewards", out[0])
        put("kls", out[2])

    def advantages(args, kwargs, out):
        for name, value in zip(["values", "advantages", "returns"], out):
            put(name, value)

    def minibatch(args, kwargs, out):
        prefix = f"micro{len(info['micro']):02d}"
        put("inds", torch.tensor(place["inds"]), prefix)
        put("new_logprobs", args[2], prefix)
        put("vpreds", args[4], prefix)
        put("ratio", out["policy/ratio"], prefix)
        info["micro"].append({"step": place["step"], "inds": place["inds"]})

    def stepped(optimizer, args, kwargs):
        place["steps"] += 1

    wrap("batched_forward_pass", forward)
    wrap("compute_rewards", rewarded)
    wrap("compute_advantages", advantages)
    wrap("train_minibatch", minibatch)
    trainer.optimizer.optimizer.register_step_pre_hook(stepped)
    if settings.get("use_score_scaling"):
        update = trainer.running.update

        def shimmed(scores):
            out = update(scores)
            trainer.running.std, trainer.running.mean = Float(trainer.running.std), Float(trainer.running.mean)
            return out

        trainer.running.update = shimmed
    for step, (queries, responses, scores, masks) in enumerate(steps):
        place.update(step=step, forward=0, queries=queries)
        for i in range(ROWS):
            put(f"query.{i}", queries[i])
            put(f"response.{i}", responses[i])
            put(f"response_mask.{i}", masks[i])
        put("scores", scores)
        given = None if all(mask.all() for mask in masks) else masks
        before = trainer.kl_ctl.value
        micro, updates = len(info["micro"]), place["steps"]
        stats = trainer.step(queries, responses, [s.to(dtype) for s in scores], given)
        numbers = {k: float(v) for k, v in stats.items() if np.ndim(v) == 0 and not k.startswith("time/")}
        running = {k: float(getattr(trainer.running, k)) for k in ["mean", "std", "var", "count"]}
        info["steps"].append(
            dict(
                kl_coef_before=float(before),
                kl_coef_after=float(trainer.kl_ctl.value),
                stats=numbers,
                running=running,
                n_micro=len(info["micro"]) - micro,
                n_optimizer_steps=place["steps"] - updates,
            )
        )
    final = {k: v.detach().clone().contiguous() for k, v in policy.state_dict().items() if not any(tied in k for tied in TIED)}
    named = lambda k: k if k.startswith("v_head") else f"pretrained_model.{k.removeprefix('pretrained_model.')}"
    return tensors, {named(k): v for k, v in final.items()}, info


def recorded(name, steps):
    settings = {**COMMON, **VARIANTS[name]}
    side = "left" if name == "left_padding" else "right"
    tensors, final, info = run(settings, steps, side, torch.float32, name in SEQ2SEQ)
    exact, exact_final, _ = run(settings, steps, side, torch.float64, name in SEQ2SEQ)
    floor = lambda a, b: (a.double() - b.double()).abs().max().item() if a.shape == b.shape and a.numel() else 0.0
    noise = {k: floor(v, exact[k]) for k, v in tensors.items() if v.is_floating_point()}
    noise |= {f"weights_after_step{STEPS - 1}.{k}": floor(v, exact_final[k]) for k, v in final.items()}
    info |= {
        "variant": name,
        "versions": {m.__name__: m.__version__ for m in [trl, transformers, accelerate, torch]},
        "noise_floor_f32_vs_f64": thin.noise(noise),
    }
    return tensors, final, info


def thinned(final):
    return {k: v.contiguous() for k, v in thin.rows({k: v for k, v in final.items() if v.numel() <= MOST}).items()}


def stored_rows(folder):
    data = load_file(folder / "data.safetensors")
    each = lambda step, what: [data[f"step{step}.{what}.{i}"] for i in range(ROWS)]
    return [
        (each(s, "query"), each(s, "response"), data[f"step{s}.scores"], each(s, "response_mask")) for s in range(STEPS)
    ]


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if "--init" in sys.argv:
        return make_t5()
    if "--check" in sys.argv:
        for folder in sorted(path.parent for path in HERE.glob("*/data.safetensors")):
            info = json.loads((folder / "info.json").read_text())
            if info["variant"] not in VARIANTS:
                continue
            tensors, final, _ = recorded(info["variant"], stored_rows(folder))
            for found, file in [(tensors, "data"), (final, "final")]:
                path = folder / f"{file}.safetensors"
                if file == "final" and info["variant"] in WITHOUT_FINAL:
                    assert not path.exists(), path
                    continue
                stored = load_file(path)
                found = thin.stored(found, stored)
                assert stored.keys() == found.keys(), folder
                gap = max((stored[k].double() - found[k].double()).abs().max().item() for k in stored)
                print(f"{folder.name}/{file}: largest difference {gap:.1e}")
                assert gap < 2e-5, (folder, file)
        return
    for name in sys.argv[1:] or VARIANTS:
        tensors, final, info = recorded(name, rows_of(name))
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "data.safetensors")
        if name not in WITHOUT_FINAL:
            save_file(thinned(final), folder / "final.safetensors")
        thin.write_json(folder / "info.json", info)
        kinds = [s["n_optimizer_steps"] for s in info["steps"]], info["steps"][-1]["kl_coef_after"]
        print(name, *kinds)


main()
