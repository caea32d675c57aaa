"""Every kind of run on the GPU and on the processor: exit codes and metrics beside each other; runs that are repeated and resumed.

    gpu_matrix.py PROGRAM FOLDER kinds|resumes [NAME...]

Models are those of tests/golden/models, with the tokenizer of one for those that have none. Metrics of f32 kinds differ by rounding, and
have a bound; those of bf16 and of quantized kinds as their tokens do, and half of them have one. With RLHF_KERNELS=cuda-only a kind in
which no kernel was started is wrong. gpu_window.py runs it and reads its lines.
"""

import concurrent.futures
import glob
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import runs

MODELS = Path(__file__).resolve().parent.parent / "tests/golden/models"
TOKENIZED = "llama_untied"
LIMIT = 60
# Runs at once: of the processor, and of the GPU.
ON_CPU, ON_GPU = 10, 7
# Metrics that are times or sizes.
LEFT_OUT = ("eps", "time", "memory", "tokens_per", "eta", "perf", "mem", "train_runtime")
# Largest difference of a metric, over the metric and a hundredth: ten times that of f32 on an H100 at e7a95e2.
BOUND = 3e-3
# In kinds with these words most tokens may differ: the median of the differences.
NARROW, NARROW_BOUND = ("bf16", "fp16", "4bit", "8bit"), 0.5
# Of f16, for which there are no kernels.
WITHOUT_KERNELS = ("ppo fp16",)


def data(folder):
    """Writes rows for all commands; returns the folder."""
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ran", "far", "away"]
    texts = [" ".join(draw.choice(words) for _ in range(draw.randrange(3, 9))) for _ in range(72)]
    rows = {
        "prompts": [{"prompt": text} for text in texts[:24]],
        "demos": [{"prompt": text, "completion": f" {other}"} for text, other in zip(texts[:24], texts[24:])],
        "pairs": [{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in zip(texts[:24], texts[24:48], texts[48:])],
        "texts": [{"text": text} for text in texts],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def compared(name, expected, found):
    """Metrics of a run on the GPU beside those on the processor: how many numbers, the largest difference with its key, and all that is wrong."""
    gaps, wrong = [], []
    if len(expected) != len(found):
        wrong.append(f"{len(found)} lines of metrics, expected {len(expected)}")
    for number, (x, y) in enumerate(zip(expected, found), 1):
        keys = [key for key in {**x, **y} if not ("second" in key or key.startswith(LEFT_OUT))]
        for key in keys:
            a, b = x.get(key), y.get(key)
            if not is_number(a) and not is_number(b):
                # Texts, and numbers that are none on both: JSON has null for them.
                wrong += [f"{key} of line {number} is {b}, expected {a}"] if (a is None) != (b is None) or (key in x) != (key in y) else []
            elif not (is_number(a) and is_number(b) and math.isfinite(a) and math.isfinite(b)):
                wrong.append(f"{key} of line {number} is {b}, expected {a}")
            else:
                gaps.append((abs(a - b) / (1e-2 + abs(a)), key))
    gaps.sort(reverse=True)
    worst = gaps[0] if gaps else (0.0, "none")
    narrow = gaps and any(word in name for word in NARROW)
    bound, gap = (NARROW_BOUND, gaps[len(gaps) // 2]) if narrow else (BOUND, worst)
    if gap[0] > bound:
        wrong.append(f"{gap[1]} differs by {gap[0]:.2g}, allowed {bound:g}")
    if not gaps:
        wrong.append("no numbers")
    return len(gaps), worst, wrong


class Matrix:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        self.data = data(folder / "data")
        self.gates = {"cpu": threading.Semaphore(ON_CPU), "cuda": threading.Semaphore(ON_GPU)}

    def model(self, name):
        """The folder of a golden model, with a tokenizer."""
        if (MODELS / name / "tokenizer.json").exists():
            return str(MODELS / name)
        folder = self.folder / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        for source, names in ((MODELS / name, os.listdir(MODELS / name)), (MODELS / TOKENIZED, ("tokenizer.json", "tokenizer_config.json"))):
            for file in names:
                if (source / file).exists() and not (folder / file).exists():
                    (folder / file).symlink_to(source / file)
        return str(folder)

    def kinds(self):
        """The words of each kind of run by its name."""
        lm, classifier = self.model(TOKENIZED), self.model(f"{TOKENIZED}_cls")
        ppo = (f"ppo --sft_model_path {lm} --reward length:target=8 --dataset_name prompts.jsonl --response_length 6 --total_episodes 24 "
               "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_ppo_epochs 2 --learning_rate 1e-3 --num_sample_generations 0")
        supervised = "--max_steps 3 --logging_steps 1 --per_device_train_batch_size 2 --learning_rate 1e-3"
        sft = f"sft --model_name_or_path {lm} --dataset_name demos.jsonl {supervised}"
        pairs = f"--dataset_name pairs.jsonl {supervised}"
        reward = f"reward --model_name_or_path {lm} --new_reward_head {pairs}"
        grpo = (f"grpo --model_name_or_path {lm} --reward length:target=8 --dataset_name prompts.jsonl --max_completion_length 8 --num_generations 4 "
                "--per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_steps 3 --learning_rate 1e-3")
        generate = "--dataset_name prompts.jsonl --max_new_tokens 20 --temperature 0"
        peft = "--use_peft"
        kinds = {"ppo": ppo, "sft": sft, "reward": reward, "grpo": grpo, "rloo": "rloo" + grpo[4:]}
        kinds |= {f"ppo {name}": f"{ppo} {flags}" for name, flags in {
            "reward model": f"--reward_model_path {classifier}", "value_head": "--value_head", "shared": "--value_head --num_shared_layers 1",
            "lora": peft, "lora bf16": f"{peft} --bf16", "4bit": f"{peft} --load_in_4bit", "8bit": f"{peft} --load_in_8bit",
            "4bit bf16 adamw_8bit": f"{peft} --load_in_4bit --bf16 --optim adamw_8bit", "adamw_8bit": "--optim adamw_8bit",
            "adafactor": "--optim adafactor", "adamw_bf16": "--optim adamw_bf16 --bf16", "bf16": "--bf16", "fp16": "--fp16",
            "offload optimizer": "--offload optimizer", "offload models": "--offload models", "checkpointing": "--gradient_checkpointing",
            "mini-batches": "--num_mini_batches 2", "full kl": "--kl_estimator full --kl_in_loss",
            "losses": "--entropy_coef 0.01 --dual_clip 3 --cliprange_high 0.3 --ratio_threshold 1.5 --target_kl 1",
            "bert reward": f"--reward model:{self.model('bert_cls2')}#POSITIVE"}.items()}
        kinds |= {f"grpo {name}": f"{grpo} {flags}" for name, flags in {
            "lora bf16": f"{peft} --bf16", "4bit": f"{peft} --load_in_4bit", "dapo": "--loss_type dapo --epsilon_high 0.28", "beta": "--beta 0.04",
            "iterations": "--num_iterations 2", "sampler": "--top_k 9 --top_p 0.9 --min_p 0.02 --repetition_penalty 1.1",
            "entropy": "--top_entropy_quantile 0.5"}.items()}
        kinds |= {f"sft {name}": f"{sft} {flags}" for name, flags in {
            "lora": peft, "dropout": f"{peft} --lora_dropout 0.3", "packing": "--packing", "bf16": "--bf16", "checkpointing": "--gradient_checkpointing",
            "4bit": f"{peft} --load_in_4bit"}.items()}
        kinds |= {"sft t5": sft.replace(lm, self.model("t5")), "ppo t5": ppo.replace(lm, self.model("t5")),
                  "reward bert": f"reward --model_name_or_path {self.model('bert_cls1')} {pairs}", "reward lora": f"{reward} {peft}",
                  "dpo": f"dpo --model_name_or_path {lm} {pairs}",
                  "generate": f"generate --model_name_or_path {lm} {generate}", "generate t5": f"generate --model_name_or_path {self.model('t5')} {generate}",
                  "zero 2, one rank": f"launch --nproc_per_node 1 -- {ppo} --zero_stage 2",
                  "zero 3, one rank": f"launch --nproc_per_node 1 -- {ppo} --zero_stage 3",
                  "ppo legacy": f"ppo --preset trl-legacy --model_name {lm} --reward length:target=8 --query_dataset prompts.jsonl --response_length 6 "
                                "--total_episodes 24 --batch_size 8 --learning_rate 1e-3",
                  "ppo deepspeed-chat": f"ppo --preset deepspeed-chat --actor_model_name_or_path {lm} --critic_model_name_or_path {classifier} "
                                        "--data_path prompts.jsonl --max_prompt_seq_len 30 --max_answer_seq_len 6 --per_device_generation_batch_size 4 "
                                        "--per_device_training_batch_size 4 --total_episodes 24 --enable_ema --unsupervised_dataset_name texts.jsonl "
                                        "--actor_learning_rate 1e-3 --critic_learning_rate 1e-3"}
        for family in ("gpt2", "gpt_neox", "gemma2", "gemma3", "mistral", "mixtral", "olmo2", "olmo3", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe",
                       "smollm3", "llama_rope3"):
            kinds[f"ppo {family}"] = ppo.replace(lm, self.model(family))
        return {name: line.split() for name, line in kinds.items()}

    def run(self, words, device, out, *more):
        """One run; returns its exit code as text, its output, its metrics, and whether it had to start kernels and started none."""
        tail = ["--device", device, "--num_threads", "1", *more]
        if words[0] != "generate":
            tail += ["--output_dir", out] + (["--overwrite_output_dir"] if "--resume_from_checkpoint" not in more else [])
        with self.gates[device]:
            try:
                ran = subprocess.run([self.program, *words, *tail], cwd=self.data, capture_output=True, timeout=LIMIT,
                                     env=dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"))
            except subprocess.TimeoutExpired:
                return "timeout", b"", [], False
        said = ran.stderr.decode(errors="replace")
        if ran.returncode:
            print(f"    {device}: {' / '.join(said.strip().splitlines()[-2:])}", flush=True)
        idle = device == "cuda" and ran.returncode == 0 and runs.is_idle(said)
        metrics = Path(out) / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return str(ran.returncode), ran.stdout, lines, idle

    def compare(self, name, words):
        """Prints one line about the kind: exit codes, and the largest relative difference of a metric."""
        out = str(self.folder / "runs" / name.replace(" ", "_").replace(",", ""))
        cpu, text, expected, _ = self.run(words, "cpu", out + "-cpu")
        gpu, other, found, idle = self.run(words, "cuda", out + "-gpu")
        if words[0] == "generate":
            numbers, worst, wrong = 0, (0.0, "none"), [] if text and text == other else ["other text"]
        else:
            numbers, worst, wrong = compared(name, expected, found)
        if idle and name not in WITHOUT_KERNELS:
            wrong.append("no kernel was started")
        said = "; ".join(wrong[:4]).replace("\n", " ") or "ok"
        print(f"kind {name}: cpu {cpu}, gpu {gpu}, {numbers} numbers, largest difference {worst[1]} {worst[0]:.2g}, {said}", flush=True)

    def resume(self, name, words):
        """Runs a kind twice, and a third time from the first checkpoint of the second; prints whether the weights have the same bits."""
        out = str(self.folder / "runs" / f"resume-{name}".replace(" ", "_"))
        for run in "ab":
            self.run(words, "cuda", f"{out}-{run}", "--save_steps", "1")
        shutil.rmtree(out + "-c", ignore_errors=True)
        shutil.copytree(out + "-b", out + "-c", symlinks=True)
        number = lambda folder: int(folder.rsplit("-", 1)[1])
        for later in sorted(glob.glob(out + "-c/checkpoint-*"), key=number)[1:]:
            shutil.rmtree(later)
        for weights in glob.glob(out + "-c/*.safetensors"):
            os.remove(weights)
        self.run(words, "cuda", out + "-c", "--save_steps", "1", "--resume_from_checkpoint", "true")
        first, again, resumed = (self.bits(f"{out}-{run}") for run in "abc")
        same = lambda bits: "none" if first is None or bits is None else "same" if bits == first else "other"
        print(f"resume {name}: twice {same(again)}, resumed {same(resumed)}", flush=True)

    @staticmethod
    def bits(folder):
        files = sorted(glob.glob(folder + "/*.safetensors"))
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest() if files else None


def main():
    program, folder, what, *only = sys.argv[1:]
    matrix = Matrix(program, Path(folder) / "matrix")
    kinds = matrix.kinds()
    work = matrix.compare if what == "kinds" else matrix.resume
    names = only or (list(kinds) if what == "kinds" else ["ppo", "grpo", "sft", "reward", "ppo t5", "ppo lora"])
    print(f"expected {len(names)} {what}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(ON_CPU + ON_GPU) as pool:
        for done in [pool.submit(work, name, kinds[name]) for name in names]:
            try:
                done.result()
            except Exception as error:  # one kind does not keep the others from running
                print(f"kind of {error!r}"[:300], flush=True)


if __name__ == "__main__":
    main()
