"""Every kernel of every kind of call, compiled for a target: registers, spills, shared memory.

`make aot ARGS=sm_90` prints the table (minutes, no GPU); test_compile.py pins a few of its lines.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import headway as hw
from headway.backends import triton as backend
from headway.resolve import prepare
from tools import compile_triton

LENGTH, HEADS = 1024, 4
CALLS = {
    "full": lambda: (None, None),
    "causal": lambda: (None, hw.causal()),
    "softcap": lambda: (hw.softcap(30.0), hw.causal()),
    "alibi": lambda: (hw.alibi(HEADS), hw.causal()),
    "learned alibi": lambda: (hw.alibi(torch.rand(HEADS, requires_grad=True)), hw.causal()),
    "learned relative bias": lambda: (
        hw.relative_bias(torch.randn(HEADS, 2 * LENGTH - 1, requires_grad=True)), hw.causal()
    ),
}  # fmt: skip
WIDTHS = {"bf16": ((64, 64), (128, 128), (192, 128), (256, 256)), "f32": ((64, 64), (128, 128))}
# All of it for the card that the table was measured on, and the two ends of it for the others.
TABLES = {
    "sm_90": [(t, w, c) for t, widths in WIDTHS.items() for w in widths for c in CALLS],
    **{
        target: [("bf16", w, c) for w in ((64, 64), (128, 128)) for c in CALLS if "learned" not in c]
        for target in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942", "gfx950")
    },
}  # fmt: skip


def launch(name: str, dtype: torch.dtype, d: int, dv: int) -> None:
    """The launches of a call, forward and backward."""
    score, mask = CALLS[name]()
    q, k, v, dout = (torch.randn(2, HEADS, LENGTH, width).to(dtype) for width in (d, d, dv, dv))
    spec, call = prepare(q, k, v, score, mask, backend="triton")
    rows = torch.zeros(q.shape[:3])
    learned = tuple(t.requires_grad for t in call.captured.tensors[: spec.score_tensors])
    backend.forward(spec, call)
    backend.backward(spec, call, dout, rows, dout, rows, learned)


def main(target: str) -> None:
    for dtype, (d, dv), name in TABLES[target]:
        run = partial(launch, name, compile_triton.DTYPES[dtype], d, dv)
        for kernel in compile_triton.resources(target, run):
            print(
                f"{dtype} {d}/{dv} {name}: {kernel.name}: {kernel.registers} registers, "
                f"{kernel.spills} bytes spilled (loops touch them {kernel.inside} times), "
                f"{kernel.shared} bytes shared",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sm_90")
