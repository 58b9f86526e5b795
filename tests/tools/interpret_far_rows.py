"""What kernels do with rows whose every score is large, in Triton's interpreter: `interpret_far_rows.py`.

The last line printed is {minimum: {what: how far off}}, in parts of the largest number.
"""

import json
import math
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import headway as hw
import triton  # noqa: F401  (on the CPU the backend is there for whom loads Triton)
from tools.interpreter import quicker

LENGTH, FIRST = 40, 30  # rows of minima begin there


def off(least: float) -> dict[str, float]:
    """Of rows that see nothing but `least`, and of the others, beside the CPU's."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, LENGTH, 16).requires_grad_() for _ in range(3))
    far = (torch.arange(LENGTH) >= FIRST)[:, None]
    bias = torch.where(far, least, torch.randn(LENGTH, LENGTH)).requires_grad_()
    made = {}
    for backend in ("cpu", "triton"):
        out = hw.attention(q, k, v, hw.bias(bias), hw.causal(), backend=backend)
        for name, of in (("far", out * far), ("others", out * ~far)):
            grads = torch.autograd.grad(
                (of * of.detach()).sum(), (q, k, v, bias), retain_graph=True
            )
            made[backend, name] = [of.detach(), *grads]
    size = lambda x: x.abs().max().item() if x.isfinite().all() else math.inf
    apart = {}
    for name in ("far", "others"):
        right, got = made["cpu", name], made["triton", name]
        each = [size(a - b) / size(b) for a, b in zip(got, right, strict=True)]
        apart |= {f"out of {name}": each[0], f"gradients of {name}": max(each[1:])}
    apart["largest out"], *grads = map(size, made["triton", "far"])
    apart["largest gradient"] = max(grads)
    return apart


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # NumPy's, of infinities that are meant
    torch.set_num_threads(1)
    with quicker():
        made = {f"{x:g}": off(x) for x in (-1e4, -1e6, -1e9, torch.finfo(torch.float32).min)}
    print(json.dumps(made))
