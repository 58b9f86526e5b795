"""Whatever a call is made under, it computes the same; or it is refused by name."""

import ast
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import headway as hw
import headway.nn
from headway.backends import get
from headway.caches import LRUCache
from headway.errors import BackendRefused
from headway.mods.evaluation.derivative import joint

# -- what is called -------------------------------------------------------------------------------


class Given:
    """Inputs of one call, the same each time; `learned` is what gradients are wanted for."""

    def __init__(self, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(0)
        new = lambda *size: torch.randn(size, generator=g, dtype=torch.float64)
        leaf = lambda x: x.to(dtype).requires_grad_()
        self.q, self.k, self.v = (
            leaf(new(2, 4, 37, 8)),
            leaf(new(2, 2, 37, 8)),
            leaf(new(2, 2, 37, 8)),
        )
        self.sink, self.table, self.gain = leaf(new(4)), leaf(new(4, 80)), leaf(new(4).exp())
        self.dout = new(2, 4, 37, 8).to(dtype)
        self.dlse = new(2, 4, 37).to(dtype)
        self.ids = torch.arange(37) // 9 + torch.arange(2)[:, None]
        self.learned = {n: x for n, x in vars(self).items() if x.requires_grad}


def user_score(x: Given) -> Callable:
    return lambda s, b, h, i, j: 3 * torch.tanh(s * x.gain[h]) / 2 + x.table[h, i - j + 40].exp()


def user_mask(b, h, i, j):
    return (torch.sin((i - j).float() * 0.3) < 0.7) & (i * 3 // 5 >= j - h)


CALLS: dict[str, Callable[[Given], dict]] = {
    "plain": lambda x: {},
    "causal": lambda x: {"mask": hw.causal()},
    "window": lambda x: {"mask": hw.causal() & hw.sliding_window(9)},
    "document": lambda x: {"mask": hw.document(x.ids) & hw.padding(torch.tensor([30, 17]))},
    "dilated": lambda x: {"mask": hw.dilated(4, 3) | hw.strided(5)},
    "user mask": lambda x: {"mask": user_mask},
    "softcap": lambda x: {"score": hw.softcap(3.0), "mask": hw.causal()},
    "alibi": lambda x: {"score": hw.alibi(4)},
    "bias": lambda x: {"score": hw.bias(x.table[:, :1, None])},
    "t5": lambda x: {"score": hw.t5_bias(x.table[:, :10].T, max_distance=20)},
    "user score": lambda x: {"score": user_score(x), "mask": hw.causal()},
    "sink, dropout": lambda x: {"sink": x.sink, "dropout": 0.3, "seed": 7},
    "all": lambda x: {
        "score": hw.alibi(x.gain) >> user_score(x), "mask": user_mask, "sink": x.sink,
        "dropout": 0.2, "seed": 3,
    },
}  # fmt: skip


def attention(x: Given, **options) -> tuple[Tensor, ...]:
    return hw.attention(x.q, x.k, x.v, **options), x.q.new_zeros(x.dlse.shape)


def with_stats(x: Given, **options) -> tuple[Tensor, ...]:
    return tuple(hw.attention_with_stats(x.q, x.k, x.v, **options))


def merged(x: Given, **options) -> tuple[Tensor, ...]:
    del options  # of which most are about the whole
    parts = [
        hw.attention_with_stats(x.q, x.k[:, :, at], x.v[:, :, at])[:2]
        for at in (slice(0, 20), slice(20, 37))
    ]
    return hw.merge(*parts)


def in_blocks(x: Given, **options) -> tuple[Tensor, ...]:
    mask = options.pop("mask")
    return attention(x, **options, mask=hw.block_mask(mask, 2, 4, 37, 37, tile=(32, 16)))


def module(x: Given, **options) -> tuple[Tensor, ...]:
    return LAYER[x.q.dtype](x.q.transpose(1, 2).flatten(2), **options), x.q.new_zeros(x.dlse.shape)


def layer(dtype: torch.dtype) -> headway.nn.Attention:
    torch.manual_seed(0)
    return headway.nn.Attention(
        32, heads=4, kv_heads=2, rotary=headway.nn.Rotary(8), sink=True, dtype=dtype
    ).train()


WAYS = attention, with_stats, merged, in_blocks, module


# -- what surrounds them --------------------------------------------------------------------------


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def look_at(results: object) -> None:
    """As who looks for NaN does: it has to hold numbers."""
    for x in results if isinstance(results, tuple | list) else (results,):
        if isinstance(x, Tensor) and x.is_floating_point():
            assert x.device.type == "cpu"
            x.detach().isnan().any().item()


def test_pytorchs_determinism_is_a_calls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, from the call cache, and compiled, which is compiled anew when it changes."""
    reference = get("reference")
    asked = []

    def backward(spec, *inputs):
        asked.append(spec.deterministic)
        return right(spec, *inputs)

    right = reference.backward
    monkeypatch.setattr(reference, "backward", backward)
    x = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    call = lambda *x: hw.attention(*x, hw.softcap(3.0), hw.causal(), backend="reference")
    for program in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        for _ in range(2):
            program(*x).sum().backward()
            with deterministic():
                program(*x).sum().backward()
    assert asked == [False, True] * 4


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "__name__", "").startswith("__"):
            with torch._C.DisableTorchFunction():
                look_at(result)
        return result


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        look_at(result)
        return result


def saved() -> AbstractContextManager:
    def pack(x: Tensor) -> Tensor:
        look_at(x)
        return x.detach().clone()

    return saved_tensors_hooks(pack, lambda x: x.transpose(0, -1).clone().transpose(0, -1))


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager]] = {
    "a device": lambda: torch.device("meta"),
    "a default device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "hooks": saved,
    "save_on_cpu": save_on_cpu,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "functions are seen": SeesFunctions,
    "operators are seen": SeesOperators,
    "all at once": lambda: all_of(
        torch.device("meta"),
        saved(),
        SeesFunctions(),
        default_dtype(torch.float64),
        torch.autograd.set_detect_anomaly(True),
    ),
}  # fmt: skip


@contextmanager
def all_of(*surroundings: AbstractContextManager) -> Iterator[None]:
    with surroundings[0], all_of(*surroundings[1:]) if surroundings[1:] else nullcontext():
        yield


def forget() -> None:
    """All that was worked out in other surroundings."""
    for name, of in list(sys.modules.items()):
        if name.startswith("headway.") and "kernels" not in name:
            for x in list(vars(of).values()):
                if hasattr(x, "cache_clear"):
                    x.cache_clear()
                elif isinstance(x, LRUCache | OrderedDict):
                    x.clear()


LAYER = {dtype: layer(dtype) for dtype in (torch.float32, torch.float64)}


def results(
    way: Callable, name: str, dtype: torch.dtype, forward: Callable = nullcontext,
    backward: Callable = nullcontext,
) -> dict[str, Tensor]:  # fmt: skip
    """Everything that comes of a call, and every gradient."""
    forget()
    x = Given(dtype)
    options = CALLS[name](x)
    with forward():
        out, lse, *rest = way(x, **options)
    with backward():
        grads = torch.autograd.grad(
            [out, lse] if lse.requires_grad else [out],
            [*x.learned.values()],
            [x.dout.view_as(out), x.dlse] if lse.requires_grad else [x.dout.view_as(out)],
            allow_unused=True,
        )
    made = {"out": out, "lse": lse, **{f"more {n}": t for n, t in enumerate(rest)}}
    return made | {f"grad {n}": g for n, g in zip(x.learned, grads, strict=True) if g is not None}


def same(made: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert made.keys() == right.keys()
    for name, x in right.items():
        assert made[name].device.type == "cpu", name
        torch.testing.assert_close(
            made[name], x, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@lru_cache
def usual(way: Callable, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """With nothing around."""
    return results(way, name, dtype)


# What goes each way of its own, in all surroundings; and every call in those that ask for most.
PARTS = [
    (attention, "causal"),
    (attention, "all"),
    (with_stats, "document"),
    (merged, "sink, dropout"),
    (in_blocks, "user mask"),
    (module, "user score"),
]
EVERY = [(way, name, around) for way, name in PARTS for around in SURROUNDINGS]
EVERY += [
    (attention, name, around)
    for name in sorted(CALLS.keys() - {"causal", "all"})
    for around in ("all at once", "operators are seen")
]


@pytest.mark.parametrize(("way", "name", "around"), EVERY, ids=lambda x: getattr(x, "__name__", x))
def test_the_same(way, name, around):
    """What is traced in the forward, and what only the backward asks for."""
    dtype = torch.float64 if around == "autocast" else torch.float32  # which autocast leaves alone
    make = SURROUNDINGS[around]
    same(results(way, name, dtype, make, make), usual(way, name, dtype))
    same(results(way, name, dtype, backward=make), usual(way, name, dtype))


@pytest.mark.parametrize("around", ["a default device", "anomaly mode"])
def test_the_same_compiled(around):
    """Traced and run there."""
    right = usual(with_stats, "all", torch.float32)
    x = Given(torch.float32)
    options = CALLS["all"](x)
    forget()
    with SURROUNDINGS[around]():
        run = torch.compile(partial(with_stats, x, **options), backend="aot_eager", fullgraph=True)
        out, lse, _ = run()
        (dq,) = torch.autograd.grad([out, lse], x.q, [x.dout, x.dlse])
    same({"out": out, "grad q": dq}, {n: right[n] for n in ("out", "grad q")})


@pytest.mark.parametrize("around", ["a device", "bfloat16", "all at once"])
def test_explained_the_same(around):
    x = Given(torch.float32)
    options = CALLS["all"](x)
    right = str(hw.explain(x.q, x.k, x.v, **options))
    forget()
    with SURROUNDINGS[around]():
        assert str(hw.explain(x.q, x.k, x.v, **options)) == right


@pytest.mark.parametrize("name", ["causal", "document", "all"])
@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad], ids=lambda x: x.__name__)
def test_without_gradients(name, around):
    right = usual(with_stats, name, torch.float32)
    forget()
    x = Given(torch.float32)
    options = CALLS[name](x)
    with around(), torch.device("meta"):
        made = with_stats(x, **options)
    for t, of in zip(made[:2], ("out", "lse"), strict=True):
        torch.testing.assert_close(t, right[of], rtol=2e-5, atol=2e-5)
    # What was found there does for a call that trains.
    same(dict(results_now(x, name)), {n: t for n, t in right.items() if n in ("out", "grad q")})


def results_now(x: Given, name: str) -> Iterator[tuple[str, Tensor]]:
    out, lse, _ = with_stats(x, **CALLS[name](x))
    yield "out", out
    yield "grad q", torch.autograd.grad([out, lse], x.q, [x.dout, x.dlse])[0]


def test_hooks_are_given_what_is_kept_and_nothing_else():
    """Of a backward that is asked for its first score: not what the derivative is worked out on."""
    forget()
    x, packed = Given(torch.float32), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out, _ = attention(x, **CALLS["user score"](x))
        kept = len(packed)
        out.sum().backward()
    assert {t.data_ptr() for t in packed[:kept]} >= {t.data_ptr() for t in (x.q, x.k, x.v, out)}
    assert len(packed) == kept
    assert all(t.device.type == "cpu" for t in packed)


def test_the_derivative_is_the_same_in_anomaly_mode():
    graph, _ = hw.mods.lower_mod("score", user_score(Given(torch.float32)), torch.float32)
    right = joint(graph.text, ())
    joint.cache_clear()
    with torch.autograd.set_detect_anomaly(True):
        assert joint(graph.text, ()) == right


def test_anomaly_mode_still_finds_what_the_caller_does():
    q, k, v = (torch.randn(1, 1, 5, 8, requires_grad=True) for _ in range(3))
    out = hw.attention(q, k, v, hw.softcap(3.0))
    with (
        pytest.warns(UserWarning, match="Error detected"),
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RuntimeError, match="nan"),
    ):
        (out * torch.zeros(())).sqrt().sum().backward()
    assert not torch.is_anomaly_enabled()


# -- which device and which dtype the library's own tensors have -----------------------------------

MAKERS = set(
    "arange as_tensor empty empty_strided eye full linspace ones rand randint randn randperm "
    "scalar_tensor tensor zeros".split()
)
OF_DEFAULT_DTYPE = set("empty eye full linspace ones rand randn scalar_tensor zeros".split())
SOURCE = Path(hw.__file__).parent
# `tracer.py` makes samples where nothing is around it.
EXEMPT = {"recipe", "bench", "experiments", "cli", "mods/tracing/tracer.py"}


def test_every_tensor_that_the_library_makes_names_its_device():
    """And its dtype, where the default one would be taken."""
    unnamed = []
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE)
        if {name.parts[0], name.as_posix()} & EXEMPT:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=made)) if (
                    made in MAKERS and None not in (given := {word.arg for word in call.keywords})
                ):
                    needed = {"device", "dtype"} if made in OF_DEFAULT_DTYPE else {"device"}
                    if not given >= needed:
                        unnamed.append(f"{name}:{call.lineno}")
    assert unnamed == []


# -- several gradients at once ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "causal", "document", "user score", "all"])
def test_batches_of_gradients(name):
    """Of out and lse, with a batch of either or of both: each as if it came alone."""
    x = Given(torch.float64)
    out, lse, _ = with_stats(x, **CALLS[name](x))
    g = torch.Generator().manual_seed(1)
    douts, dlses = (torch.randn(3, *t.shape, generator=g, dtype=torch.float64) for t in (out, lse))
    learned = list(x.learned.values())
    take = lambda of, by, **how: torch.autograd.grad(
        of, learned, by, retain_graph=True, allow_unused=True, **how
    )
    for of, by in (([out], [douts]), ([lse], [dlses]), ([out, lse], [douts, dlses])):
        made = take(of, by, is_grads_batched=True)
        for n in range(3):
            for t, alone in zip(made, take(of, [d[n] for d in by]), strict=True):
                assert (t is None) == (alone is None)
                if t is not None:
                    torch.testing.assert_close(t[n], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["causal", "user score"])
def test_jacobians_of_all_outputs_at_once(name):
    q, k, v = torch.randn(3, 1, 4, 3, 8, dtype=torch.float64)
    x = Given(torch.float64)
    options = CALLS[name](x)
    f = lambda q, k, v: hw.attention(q, k, v, **options)
    one_by_one = torch.autograd.functional.jacobian(f, (q, k, v))
    for made in (
        torch.autograd.functional.jacobian(f, (q, k, v), vectorize=True),
        torch.func.jacrev(f, argnums=(0, 1, 2))(q, k, v),
    ):
        for t, right in zip(made, one_by_one, strict=True):
            torch.testing.assert_close(t, right, rtol=1e-10, atol=1e-12)


def test_a_batch_of_gradients_is_not_differentiated():
    x = Given(torch.float64)
    out, _ = attention(x, **CALLS["window"](x))
    by = torch.randn(2, *out.shape, dtype=torch.float64, requires_grad=True)
    (dq,) = torch.autograd.grad(out, x.q, by, is_grads_batched=True, create_graph=True)
    with pytest.raises(BackendRefused, match="second derivative"):
        dq.sum().backward()


# -- forward mode (what works: `test_forward_mode.py`) ---------------------------------------------


def test_forward_mode_through_the_backward_is_refused():
    """Its tangent would be 0."""
    x = Given(torch.float64)
    out, _ = attention(x, **CALLS["window"](x))
    back = lambda dout: torch.autograd.grad(out, x.q, dout, retain_graph=True)[0]
    with pytest.raises(BackendRefused, match="a backward in forward mode"):
        torch.func.jvp(back, (x.dout,), (x.dout,))


def test_without_a_tangent_forward_mode_changes_nothing():
    x = Given(torch.float64)
    right, _ = attention(x, **CALLS["user score"](x))
    f = lambda t: attention(x, **CALLS["user score"](x))[0] * t
    made, tangent = torch.func.jvp(f, (torch.tensor(2.0),), (torch.tensor(3.0),))
    torch.testing.assert_close(made, 2 * right)
    torch.testing.assert_close(tangent, 3 * right)
