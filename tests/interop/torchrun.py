"""Runs `rlhf ppo`, and a script with `rlhf.legacy`, as several ranks with torch's own launcher, and compares the results with one rank's.

    python tests/interop/torchrun.py target/release/rlhf

Prints one line per check and a total. Exit code 1 if any failed. Needs torch (for torchrun) and safetensors; no network.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from runner import binary, expect, run_checks
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
# A loop of rlhf.legacy over the rows of its rank: of all four where it is alone.
LOOP = """
import os, sys
import torch
from rlhf.legacy import PPOConfig, PPOTrainer

rank, ranks, (model, folder) = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), sys.argv[1:]
own = slice(4 // ranks * rank, 4 // ranks * (rank + 1))
config = PPOConfig(batch_size=4 // ranks, mini_batch_size=2 // ranks, ppo_epochs=1, learning_rate=1e-3)
trainer = PPOTrainer(config, model)
queries = [torch.tensor(row) for row in ([5, 6, 7], [8, 9], [5], [6, 7])][own]
responses = [torch.tensor(row) for row in ([30, 31], [32, 33, 34], [35], [36])][own]
trainer.step(queries, responses, [torch.tensor(score) for score in (1.0, -0.5, 0.0, 2.0)][own], orders=[[0, 1, 2, 3]])
trainer.save_pretrained(folder)
trainer.close()
"""
TORCHRUN = Path(sys.executable).with_name("torchrun")
SENTIMENT = ROOT / "examples/sentiment"

# Ranks add the same f32 numbers in another order; two threads differ from one by as much.
TOLERANCE = 2e-5


def run(command, environment=(), code=0, seconds=300):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | dict(environment),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    expect(done.returncode == code, f"exit code {done.returncode}, expected {code}: {done.stderr[-800:]}")
    return done.stderr


def weights(folder):
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def distance(one, other, without=()):
    first, second = weights(one), weights(other)
    expect(first.keys() == second.keys(), "other tensors")
    names = [name for name in first if not name.endswith(without)]
    return max((first[name] - second[name]).abs().max().item() for name in names)


def responses(folder):
    lines = [json.loads(line) for path in sorted((folder / "samples").glob("*.jsonl")) for line in open(path)]
    expect(lines, f"{folder}: no sample files")
    return [line["response"] for line in lines]


def checks(work):
    small = ["--max_steps", "30", "--logging_steps", "30"]
    run([BINARY, "sft", "--config", SENTIMENT / "sft.yaml", "--output_dir", work / "sft", *small])
    reward = ["--model_name_or_path", work / "sft", "--output_dir", work / "reward", "--max_steps", "4"]
    run([BINARY, "reward", "--config", SENTIMENT / "reward.yaml", *reward])
    ppo = ["ppo", "--config", SENTIMENT / "ppo.yaml", "--sft_model_path", work / "sft"]
    ppo += ["--reward_model_path", work / "reward", "--train_batch_size", "16", "--total_episodes", "48"]
    ppo += ["--response_length", "16", "--save_steps", "1", "--overwrite_output_dir"]

    def into(name):
        return [BINARY, *ppo, "--output_dir", work / name]

    run(into("one"))

    def as_one(name):
        found = distance(work / "one", work / name)
        expect(found <= TOLERANCE, f"weights {found} apart")
        expect(responses(work / "one") == responses(work / name), "other responses")

    def torchrun():
        run([TORCHRUN, "--nproc_per_node", "2", "--no-python", *into("two")])
        as_one("two")

    def zero_3():
        run([TORCHRUN, "--nproc_per_node", "2", "--no-python", *into("sharded"), "--zero_stage", "3"])
        as_one("sharded")

    def restart():
        command = [TORCHRUN, "--nproc_per_node", "2", "--max-restarts", "1", "--no-python", *into("again")]
        error = run([*command, "--resume_from_checkpoint", "true"], {"RLHF_FAULT": "1:200:KILL"})
        expect("rank 1" in error, f"no line about rank 1: {error[-800:]}")
        expect(distance(work / "two", work / "again") == 0, "other bits than those of a run without a fault")

    def machines():
        port = str(random.randint(20000, 29000))
        agents = []
        for node in range(2):
            command = [TORCHRUN, "--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", "1", "--master_addr"]
            command += ["127.0.0.2", "--master_port", port, "--no-python", *into("machines")]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            agents.append(subprocess.Popen([str(part) for part in command], cwd=ROOT, env=environment, **pipes))
        for node, agent in enumerate(agents):
            _, error = agent.communicate(timeout=300)
            expect(agent.returncode == 0, f"agent {node}: exit code {agent.returncode}: {error[-800:]}")
        as_one("machines")

    def legacy():
        script = work / "loop.py"
        script.write_text(LOOP)
        package = {"PYTHONPATH": str(ROOT / "python"), "RLHF_PROGRAM": BINARY}
        run([sys.executable, script, work / "sft", work / "loop-one"], package)
        run([TORCHRUN, "--nproc_per_node", "2", script, work / "sft", work / "loop-two"], package)
        # Adam's first step is the learning rate, 1e-3, whatever the gradient, but for those near its epsilon: rounding shows in them. The
        # gradient of a key's bias is 0, and Adam makes whole steps of what rounding leaves.
        found = distance(work / "loop-one", work / "loop-two", without="query_key_value.bias")
        expect(found <= 10 * TOLERANCE, f"weights {found} apart")

    yield "torchrun: 2 ranks give one rank's responses and weights", torchrun
    yield "torchrun: 2 ranks at zero_stage 3 give one rank's responses and weights", zero_3
    yield "torchrun --max-restarts: a run whose rank was killed ends with the same bits", restart
    yield "torchrun: two machines, at another address of the loopback range", machines
    yield "torchrun: 2 ranks of a script with rlhf.legacy's step() give one rank's weights", legacy


def main():
    with tempfile.TemporaryDirectory(prefix="rlhf-torchrun-") as folder:
        return run_checks(checks(Path(folder)))


if __name__ == "__main__":
    BINARY = binary(__doc__.split("\n")[0])
    sys.exit(main())
