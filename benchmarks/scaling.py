"""Seconds of a PPO update on many GPUs, on paper: work and bytes of rlhf's algorithm over published rates.

    python benchmarks/scaling.py

Prints the table of docs/internals/ranks.md. Nothing here is measured on a GPU: the share of the peak rates that is reached is an
assumption, and the number of bytes is that of the collectives in docs/internals/ranks.md.
"""

from dataclasses import dataclass

# Published by NVIDIA for the H100 SXM: dense bf16, memory, NVLink in one direction; 400 Gb/s InfiniBand for each GPU.
FLOPS, MEMORY, NVLINK, INFINIBAND = 989e12, 3.35e12, 450e9, 50e9
GPUS_PER_NODE = 8
# Assumptions: shares of the peak that are reached.
MATRIX, READING, NETWORK = 0.4, 0.6, 0.7


@dataclass
class Run:
    params: float = 7e9
    layers: int = 32
    rows: int = 512
    prompt: int = 512
    response: int = 512
    epochs: int = 4
    steps_per_epoch: int = 1
    micro_batch_tokens: int = 16384

    @property
    def tokens(self):
        return self.rows * (self.prompt + self.response)


def rate(gpus):
    """Bytes per second that a GPU sends in a ring of all GPUs: its slowest link counts."""
    return (NVLINK if gpus <= GPUS_PER_NODE else INFINIBAND) * NETWORK


def compute(run, gpus):
    """Seconds of products, of policy and value model: generation, four forward passes, training."""
    decode = run.response * 2 * run.params / (MEMORY * READING)  # each step reads the bf16 weights once
    prefill = 2 * run.params * run.rows * run.prompt / gpus / (FLOPS * MATRIX)
    forward = 4 * 2 * run.params * run.tokens / gpus / (FLOPS * MATRIX)
    training = 2 * 6 * run.params * run.tokens * run.epochs / gpus / (FLOPS * MATRIX)
    return decode + prefill, forward, training


def traffic(run, gpus, stage):
    """Bytes that a GPU sends in an update, f32 parameters and gradients; a ring moves (n - 1) / n of a vector."""
    vector, ring = 4 * run.params, (gpus - 1) / gpus
    steps = run.epochs * run.steps_per_epoch
    tokens = run.tokens / run.steps_per_epoch / gpus
    micro_batches = max(1, round(tokens / run.micro_batch_tokens))
    per_step = {
        0: 2,  # all-reduce of the gradients
        1: 2,  # reduce-scatter of the gradients, all-gather of the parameters
        2: micro_batches + 1,  # gradients of each micro-batch, parameters once
        3: 3 * micro_batches,  # parameters for the forward and the backward pass, gradients
    }[stage]
    forward = 4 * max(1, round(run.tokens / gpus / run.micro_batch_tokens)) + 1 if stage == 3 else 0
    return vector * ring * (2 * per_step * steps + forward)


def memory(run, gpus, stage):
    """Bytes of weights, gradients and optimizer state of four models on one GPU, two of them trained; without activations."""
    p, n = run.params, gpus
    trained = {0: 16 * p, 1: (8 + 8 / n) * p, 2: (4 + 12 / n) * p, 3: 16 * p / n}[stage]
    # bf16 copies of the weights; at stage 3 those of two layers, with their gathered f32 weights.
    copies = 2 * p if stage < 3 else 2 * (4 + 2) * p / run.layers
    frozen = 2 * 2 * p / (n if stage == 3 else 1)
    return 2 * (trained + copies) + frozen


def main():
    run = Run()
    print("| GPUs | stage | GB per GPU | generation | forward | training | network | update, overlapped to not |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for gpus in (8, 64):
        for stage in range(4):
            generation, forward, training = compute(run, gpus)
            network = traffic(run, gpus, stage) / rate(gpus)
            work = generation + forward + training
            least, most = generation + max(forward + training, network), work + network
            gigabytes = memory(run, gpus, stage) / 1e9
            fits = "" if gigabytes < 72 else ", does not fit"
            cells = [gpus, stage, f"{gigabytes:.0f}{fits}", *(f"{x:.0f}" for x in (generation, forward, training, network))]
            print("| " + " | ".join(map(str, cells)) + f" | {least:.0f} to {most:.0f} s |")


if __name__ == "__main__":
    main()
