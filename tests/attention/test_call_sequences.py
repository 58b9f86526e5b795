"""A call means the same whatever was called before it: random sequences of calls, and each of them
again with nothing cached."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import headway as hw
from headway import call_cache
from headway.backends.cpu import decode_pairs
from headway.errors import ArgumentError, BackendRefused

LONGEST = 96  # keys of a cache


def near(width: int) -> Callable:
    return lambda b, h, i, j: (i - j).abs() < width


def sloped(width: int, slopes: Tensor) -> Callable:
    return lambda s, b, h, i, j: s * slopes[h] - (i - j) / width


class Draw(random.Random):
    """Random lengths n and m of queries and keys, and masks and scores; some do not fit."""

    b, hq, hk, d = 2, 4, 2, 16

    def lengths(self) -> tuple[int, int]:
        self.n = self.choice([1, 1, 40])
        self.m = self.choice([0, 40, 40, 40, *[self.randint(1, LONGEST)] * 4])
        return self.n, self.m

    def ids(self, length: int) -> Tensor:
        return torch.tensor(sorted(self.choices(range(4), k=length)), dtype=torch.int64)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape) < 0.7

    def mask(self) -> Any:
        b, n, m, number = self.b, self.n, self.m, self.randint(1, 9)
        match self.randrange(13):
            case 0:
                return hw.causal(self.choice([0, -1, m - n, m - 1, number]))
            case 1:
                return hw.causal(m - n) & hw.sliding_window(number)
            case 2:
                return hw.causal() | hw.prefix(number)
            case 3:
                rows = self.choice([b, b, b, 3])
                return hw.padding(torch.tensor(self.choices(range(m + 1), k=rows)))
            case 4:
                return hw.padding(self.bools(b, self.choice([m, m, m, 7])))
            case 5:
                return hw.document(self.ids(n), self.ids(self.choice([m, m, m, m + 1])))
            case 6:
                return hw.dense(self.bools(self.choice([1, n]), self.choice([1, m, m, 7])))
            case 7:
                return hw.neighborhood((number + 3, 9), (3, 3))
            case 8:
                start = torch.tensor(self.choice([0, n - 1, n]))
                return hw.tree(torch.tensor([-1, 0, 0, 1]), self.choice([start, int(start)]))
            case 9:
                return near(number)
            case 10:
                return near(number) & hw.causal(number)
            case 11:
                tiled = hw.causal(number) | hw.prefix(3)
                return hw.block_mask(tiled, 1, 1, n, self.choice([m, m, 50]), tile=(16, 16))
        return None

    def score(self) -> Any:
        number = self.randint(1, 9)
        match self.randrange(9):
            case 0:
                return hw.softcap(number / 3)
            case 1:
                return hw.alibi(self.choice([self.hq] * 4 + [3]))
            case 2:
                return sloped(number, torch.rand(self.hq))
        return None


def random_calls(seed: int, dtype: torch.dtype, count: int = 150) -> list[dict]:
    """The arguments of calls over a cache that grows and shrinks."""
    draw, calls = Draw(seed), []
    torch.manual_seed(seed)
    cache = torch.randn(2, draw.b, draw.hk, LONGEST, draw.d).to(dtype)
    for _ in range(count):
        (n, m), learns = draw.lengths(), draw.random() < 0.3
        k, v = cache[0, :, :, :m], cache[1, :, :, : draw.choice([m] * 15 + [LONGEST])]
        layout = draw.randrange(8)
        if layout == 0:
            k, v = k.clone(), v.clone()
        elif layout == 1:
            k = k.mT.contiguous().mT
        q = torch.randn(draw.b, draw.hq, n, draw.d).to(dtype)
        q, k, v = (x.detach().requires_grad_(learns) for x in (q, k, v))
        call = {"q": q, "k": k, "v": v, "mask": draw.mask(), "score": draw.score()}
        match draw.randrange(20):
            case 0:
                call["sink"] = torch.randn(draw.choice([draw.hq] * 3 + [3]))
            case 1:
                call |= {"dropout": 0.3, "seed": 5}
            case 2:
                call["scale"] = draw.choice([0.5, 2])
        calls.append(call)
    return calls


def run(call: dict, stats: bool) -> list[Tensor] | str:
    """The results of a call and its gradients, or the words of its refusal."""
    try:
        results = hw.attention_with_stats(**call) if stats else [hw.attention(**call)]
    except (ArgumentError, BackendRefused) as error:
        return str(error)
    if not results[0].requires_grad:
        return [*results]
    loss = results[0].float().square().sum() + sum(x.exp().sum() for x in results[1:2])
    return [*results, *torch.autograd.grad(loss, [call[x] for x in "qkv"])]


def same(a: list[Tensor] | str, b: list[Tensor] | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    pairs = [*zip(a, b, strict=True)]
    return all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_results_are_those_of_a_call_alone(backend):
    calls = random_calls(1, torch.float32)
    call_cache._signatures.clear()
    results = [run(call | {"backend": backend}, n % 2 == 0) for n, call in enumerate(calls)]
    assert sum(isinstance(r, str) for r in results) in range(15, 75)
    assert len(call_cache._signatures) < 0.8 * len(calls)
    for n, (call, result) in enumerate(zip(calls, results, strict=True)):
        call_cache._signatures.clear()
        decode_pairs._evaluations.clear()
        assert same(result, run(call | {"backend": backend}, n % 2 == 0)), call


def test_steps_over_a_cache_are_those_of_a_step_alone():
    """Rows of unequal lengths, on the CPU; what score and mask capture is written to in place."""
    draw = Draw(3)
    q, k, v = (torch.randn(2, h, n, draw.d) for h, n in ((4, 3), (2, LONGEST), (2, LONGEST)))
    slopes, table, ids = torch.rand(4), torch.rand(4, 9), draw.ids(LONGEST)
    scores = (
        None, hw.alibi(4), hw.alibi(slopes), hw.alibi(slopes) >> hw.softcap(9.0),
        lambda s, b, h, i, j: table[h, j % 9] + s - b, sloped(3, slopes),
        lambda s, b, h, i, j: s + 1 / slopes[h],
    )  # fmt: skip
    masks = None, hw.causal(), hw.document(ids, ids), hw.document(ids, ids) & hw.causal(), near(9)
    for _ in range(300):
        length = draw.randint(3, LONGEST)
        lengths = torch.tensor([length, draw.choice([length, draw.randint(3, LONGEST)])])
        step = q[:, :, : draw.choice([1, 3])], k, v, draw.choice(scores), draw.choice(masks)
        match draw.randrange(4):
            case 0:
                slopes.numpy()[draw.randrange(4)] = draw.choice([0.0, -0.0, 0.5, 2.0])
            case 1:
                ids[draw.randrange(LONGEST)] += 1
            case 2:
                table[draw.randrange(4), draw.randrange(9)] = draw.random()
        run_step = partial(hw.inference.attention, *step, lengths=lengths.int(), backend="cpu")
        out = run_step()
        with mock.patch.object(decode_pairs._evaluations, "get", return_value=None):
            assert torch.equal(out.nan_to_num(7), run_step().nan_to_num(7)), step[3:]


# -- launches of GPU kernels ----------------------------------------------------------------------


@contextmanager
def recording() -> Iterator[list]:
    """Inside, kernels of calls on the CPU are planned for an H100, and their launches written down
    as (kernel, programs, constants, arguments)."""
    from headway import backends
    from headway.backends.gpu.named_card import card_of, compiling_for
    from headway.backends.gpu.runtime import parallel_compile
    from headway.backends.gpu.runtime.launcher import NO_ARGUMENTS, KernelLauncher

    launches: list = []

    def written(x: Any) -> Any:
        x = getattr(x, "base", x) if not isinstance(x, Tensor) else x
        if isinstance(x, Tensor):
            return tuple(x.shape), x.stride(), x.dtype
        return tuple(map(written, x)) if isinstance(x, (tuple, list)) else x

    def launch(self: Any, tensors: Any, arguments: Any = NO_ARGUMENTS) -> None:
        args = self.arrange(tensors, arguments.tensors, arguments.floats)
        launches.append((self.fn, self.grid, self.options, written(args)))

    with compiling_for(card_of("sm_90")), ExitStack() as stack:
        patch = lambda *of: stack.enter_context(mock.patch.object(*of))
        patch(backends, "_SELF_TESTED", ())
        patch(KernelLauncher, "__call__", launch)
        for compile in ("compile_training", "compile_backward"):
            patch(parallel_compile, compile, lambda *of: None)
        yield launches


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_kernels_get_what_those_of_a_call_alone_get(backend):
    from headway.backends.gpu.runtime import call_plan

    def launched(call: dict) -> tuple:
        launches.clear()
        refusal = run(call | {"backend": backend}, stats=True)
        return refusal if isinstance(refusal, str) else "", launches.copy()

    calls = random_calls(2, torch.bfloat16)
    with recording() as launches:
        clear = lambda: (call_cache._signatures.clear(), call_plan.clear())
        clear()
        sequence = [launched(call) for call in calls]
        assert {fn.__name__ for _, made in sequence for fn, *_ in made} >= {"infer", "forward"}
        for call, made in zip(calls, sequence, strict=True):
            clear()
            assert launched(call) == made, call
        clear()
