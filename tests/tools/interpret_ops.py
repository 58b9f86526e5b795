"""The ops that kernels compute by series, with their derivatives, in Triton's interpreter.

The last line printed is {op: what is wrong}: beside float64, numbers of every size and the edges.
"""

import json
import sys
import types
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import triton.language as tl

import triton
from headway.backends.gpu.codegen import emit
from headway.mods.evaluation.derivative import joint
from headway.mods.evaluation.evaluate import evaluate
from headway.mods.ops import OPS
from headway.mods.tracing.trace import trace
from tools.interpreter import quicker

SIZE = 1024
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, 7.0, 1e-40, -1e-40, 1e38, -1e38, 88.9,
         0.99999994, -0.99999994, 1.0000001, float("inf"), -float("inf"), float("nan")]  # fmt: skip
# At poles PyTorch's own float64 is finite, since pi is rounded; PyTorch has none at infinity.
POLES = {"trigamma", "digamma", "lgamma"}
TOLERANCE = {"value": 2e-5, "derivative": 1e-4}  # exp of a large number is off by 1e-5 on a GPU


@triton.jit
def kernel(x, other, value, slope, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    t, d = derivative(tl.load(x + i), 0, 0, i, i, ((other, SIZE, 1), ()))
    tl.store(value + i, t)
    tl.store(slope + i, d)


def launch(module: types.ModuleType, *tensors: torch.Tensor) -> None:
    """Run the kernel with a generated derivative."""
    kernel.fn.__globals__["derivative"] = module.derivative
    kernel[(1,)](*tensors, SIZE)


def numbers(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    spread = 10 ** (torch.rand(SIZE, generator=draw) * 4 - 2)
    x = torch.randn(SIZE, generator=draw) * spread
    x[: len(EDGES)] = torch.tensor(EDGES)
    return x


def off(name: str) -> str:
    """Return what is wrong with an op; an empty string if nothing is."""
    op, x = OPS[name], numbers(0)
    fn = getattr(torch.ops.aten, op.aten[0])
    other = numbers(1).roll(3)
    other[100 : 100 + len(EDGES)] = x[100 : 100 + len(EDGES)]
    score = lambda s, b, h, i, j: fn(s) if len(op.operands) == 1 else fn(s, other[j])
    if name == "signbit":
        score = lambda s, *_: fn(s).float()
    text = trace("score", score, torch.float32).graph.text
    module = emit.load_module(emit.CodegenSpec(text, None, wide_offsets=(False,)))
    value, slope = torch.empty(2, SIZE)
    launch(module, x, other, value, slope)
    exact = trace("score", lambda s, *p: score(s, *p), torch.float64).graph.text
    inputs = {"score": x.double(), "t0": other} | dict.fromkeys(("b", "h", "q_idx", "kv_idx"), 0)
    read = lambda n, table, indices: table
    wrong = []
    if name == "nextafter":
        exact = text  # the next float32
        inputs["score"] = x
    for what, found, right in zip(
        TOLERANCE, (value, slope), evaluate(joint(exact), inputs, read), strict=True
    ):
        right = torch.as_tensor(right).double().expand(SIZE).float()
        same = (found == right) | (found.isnan() & right.isnan())
        if name in POLES:
            same |= (x <= 0) & (x == x.round())
        apart = (found - right).abs() / right.abs().clamp_min(1.0 if name in POLES else 1e-30)
        apart = torch.where(same, 0.0, apart).nan_to_num(nan=torch.inf, posinf=torch.inf)
        if apart.max() > TOLERANCE[what]:
            n = apart.argmax()
            wrong.append(f"{what} of {x[n]}, {other[n]}: {found[n]}, not {right[n]}")
    return "; ".join(wrong)


def main() -> None:
    warnings.simplefilter("ignore")  # NumPy's, of infinities that are meant
    # i1 is the derivative of i0; its own is inf - inf where it is infinite.
    names = [n for n, op in OPS.items() if n != "i1" and op.aten and "special." in str(op.floats)]
    names += ["tan", "log10", "fmin", "fmax"]
    print(json.dumps({name: said for name in names if (said := off(name))}))


if __name__ == "__main__":
    with quicker():
        main()
