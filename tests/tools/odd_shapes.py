"""Odd shapes through every kernel of the Triton backend, and nothing else on the GPU: for a tool that
watches each access to memory (`make gpu-sanitize`). Every tensor is an allocation of its own then.

`odd_shapes.py PART PARTS` runs every PARTS-th of them.
"""

import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import headway as hw
from headway import backends
from headway.backends.gpu.runtime.call_plan import clear

# b, hq, hk, q_len, kv_len, d, dv; dtype
SHAPES = [
    ((1, 4, 4, 333, 333, 72, 40), torch.bfloat16),
    ((2, 3, 1, 65, 129, 17, 17), torch.bfloat16),
    ((1, 2, 2, 1, 257, 64, 64), torch.float16),
    ((2, 4, 2, 127, 63, 100, 96), torch.bfloat16),
    ((1, 2, 2, 255, 255, 256, 256), torch.bfloat16),
    ((1, 2, 1, 131, 131, 192, 128), torch.bfloat16),
    ((1, 2, 2, 3, 3, 8, 256), torch.float16),
    ((1, 2, 2, 131, 77, 40, 40), torch.float32),
    ((1, 2, 1, 65, 65, 128, 64), torch.float32),
]


def run(shape: tuple[int, ...], dtype: torch.dtype, *how) -> None:
    """Forward and backward."""
    b, hq, hk, n, m, d, dv = shape
    sizes = (b, hq, n, d), (b, hk, m, d), (b, hk, m, dv), (b, hq, n, dv)
    *leaves, dout = (torch.randn(size).to(dtype).cuda().requires_grad_() for size in sizes)
    got = hw.attention_with_stats(*leaves, *how, backend="triton")
    dlse = torch.randn(b, hq, n).cuda()
    learned = [t for t in (how[0].table,) if t.requires_grad] if how[0] is not None else []
    torch.autograd.grad((got.out, got.lse), [*leaves, *learned], (dout.detach(), dlse))


def main(part: int = 0, parts: int = 1) -> None:
    masks = None, hw.causal() & hw.sliding_window(50)
    for shape, dtype in SHAPES[part::parts]:
        relative = torch.randn(shape[1], 2 * max(shape[3:5]) - 1).cuda().requires_grad_()
        clear()
        for mask in masks:
            run(shape, dtype, None, mask)
        run(shape, dtype, hw.relative_bias(relative), masks[1])
        torch.cuda.synchronize()
        print("ran", *shape, dtype, flush=True)


if __name__ == "__main__":
    with mock.patch.object(backends, "_SELF_TESTED", ()):  # no rehearsal of a small case
        main(*map(int, sys.argv[1:]))
