"""The rate of this machine's matrix products in the shapes of a training step, as libtorch does them: one JSON line.

    gemm.py SIZE DTYPE TOKENS HEAD_ROWS THREADS       TOKENS and HEAD_ROWS are those of a micro-batch

Each linear layer has three products: the output, the gradient of the input, the gradient of the weight. The operands
are laid out as training has them, and each product writes into a tensor that is there already. In f32 libtorch has two
libraries, MKL, which it uses, and oneDNN, which knows AVX-512 on processors that are not Intel's, and which rlhf uses
there: the rate is that of the faster. A shape's rate is that of its fastest repetition, as a disturbed one would flatter who is measured against it; the mean over the shapes is
by their FLOPs.
"""

import json
import sys
import time

import torch
from models import SIZES


def seconds(product, *, least=0.25, fewest=5):
    """The shortest time of `product`, repeated for `least` seconds."""
    product()
    times = []
    while len(times) < fewest or sum(times) < least:
        began = time.perf_counter()
        product()
        times.append(time.perf_counter() - began)
    return min(times)


def main():
    size, dtype, tokens, head_rows, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    dtype = getattr(torch, dtype)
    shapes, flops, took = [], 0, 0.0
    for rows, n_in, n_out, count in SIZES[size].products(int(tokens), int(head_rows)):
        # Policy and value model have the same body; the head is the policy's.
        count *= 1 if n_out == SIZES[size].vocab else 2
        x, y = torch.randn(rows, n_in, dtype=dtype), torch.randn(rows, n_out, dtype=dtype)
        w, dw = torch.randn(n_out, n_in, dtype=dtype), torch.empty(n_out, n_in, dtype=dtype)
        out, dx = torch.empty_like(y), torch.empty_like(x)
        products = {
            "output": lambda: torch.mm(x, w.t(), out=out),
            "input's gradient": lambda: torch.mm(y, w, out=dx),
            "weight's gradient": lambda: torch.mm(y.t(), x, out=dw),
        }
        onednn = {
            "output": lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
            "input's gradient": lambda: torch.ops.mkldnn._linear_pointwise(y, w.t(), None, "none", [], ""),
            "weight's gradient": lambda: torch.ops.mkldnn._linear_pointwise(y.t(), x.t(), None, "none", [], ""),
        }
        for name, product in products.items():
            each = seconds(product)
            if dtype == torch.float32:
                each = min(each, seconds(onednn[name]))
            work = 2 * rows * n_in * n_out
            shapes.append({"product": name, "rows": rows, "in": n_in, "out": n_out, "gflops": work / each / 1e9})
            flops, took = flops + count * work, took + count * each
    print(json.dumps({"gflops": flops / took / 1e9, "shapes": shapes}))


if __name__ == "__main__":
    main()
