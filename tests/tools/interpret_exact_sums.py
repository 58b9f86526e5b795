"""Deterministic gradients of captured tensors in Triton's interpreter: `interpret_exact_sums.py`.

Programs run in an order of their own each time, and the bits have to be the same. The last line printed
is {score: what is wrong}.
"""

import json
import random
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from triton.runtime import interpreter

import headway as hw
import triton  # noqa: F401  (on the CPU the backend is there for whom loads Triton)
from headway.backends.gpu.runtime import call_plan
from tools.interpreter import quicker

H, Q, KV = 2, 60, 64
SCORES = {  # of each dependence (`gradient_dependence`); tests/hopper/test_exact_sums.py has more of a kind
    "by distance": (hw.relative_bias, torch.randn(H, 2 * KV + 1)),
    "slopes": (hw.alibi, torch.rand(H)),
    "scalar": (lambda t: lambda s, b, h, i, j: s * t.exp(), torch.randn(())),
    "by query": (lambda t: lambda s, b, h, i, j: s + t[i % 7], torch.randn(7)),
    "by key": (lambda t: lambda s, b, h, i, j: s + t[h, j], torch.randn(H, KV)),
    "by pair": (lambda t: lambda s, b, h, i, j: s + t[(i * j) % 9], torch.randn(9)),
}  # fmt: skip


@contextmanager
def shuffled(seed: int):
    """Inside, the programs of a launch run in an order of the seed's."""
    builder, draw, order = interpreter.interpreter_builder, random.Random(seed), []
    begin, choose = builder.set_grid_dim, builder.set_grid_idx

    def launch(count: int, *others: int) -> None:
        begin(count, *others)
        order[:] = draw.sample(range(count), count)

    with (
        mock.patch.object(builder, "set_grid_dim", launch),
        mock.patch.object(builder, "set_grid_idx", lambda x, *others: choose(order[x], *others)),
    ):
        yield


def gradients(name: str, backend: str, dtype: torch.dtype, deterministic: bool) -> list:
    score, table = SCORES[name]
    draw = torch.Generator().manual_seed(0)
    shapes = (H, Q), (1, KV), (1, KV), (H, Q)
    q, k, v, dout = (torch.randn(1, *s, 16, generator=draw).to(dtype) for s in shapes)
    leaves = [q, k, v, torch.zeros(H, dtype=dtype), table.to(dtype)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = hw.attention(
        *leaves[:3], score(leaves[4]), hw.causal(KV - Q), sink=leaves[3], backend=backend,
        deterministic=deterministic,
    )  # fmt: skip
    return list(torch.autograd.grad(out, leaves, dout))


def of_orders(name: str) -> tuple[list, bool]:
    """Gradients, and whether they have the same bits in every order."""
    made = []
    for seed in range(2):
        with shuffled(seed):
            made.append(gradients(name, "triton", torch.float32, True))
    same = (torch.equal(x, y) for other in made[1:] for x, y in zip(made[0], other, strict=True))
    return made[0], all(same)


def main() -> dict[str, str]:
    wrong = {}
    for name in SCORES:
        made, same = of_orders(name)
        exact = gradients(name, "reference", torch.float64, False)
        usual = gradients(name, "triton", torch.float32, False)
        far = [
            (x - y).norm() > 1.1 * (z - y).norm() + 1e-6 * y.norm()
            for x, y, z in zip(made, exact, usual, strict=True)
        ]
        if not same or any(far):
            wrong[name] = f"the same bits: {same}; farther off than float32 sums: {far}"
    call_plan.clear()
    none = call_plan.ExactSums(0, {}, torch.device("cpu"))
    with mock.patch.object(call_plan.BasePlan, "_new_exact_sums", return_value=none):
        for name in ("by distance", "by query"):  # a kernel that adds float32 numbers
            if of_orders(name)[1]:
                wrong[f"{name}, float32"] = "the order does not show"
    return wrong


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with quicker():
        print(json.dumps(main()))
