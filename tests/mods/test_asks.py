"""Functions that read through built-in methods, ask PyTorch for what surrounds a call, or call
modules with hooks: what they mean now, or refused by name."""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

import headway as hw
from headway.errors import ModError
from headway.mods import lowering

Q, K, V = torch.randn(3, 1, 1, 12, 8, generator=torch.Generator().manual_seed(3))


def off(score: Callable | None = None, mask: Callable | None = None, like=None) -> float:
    """How far a call is from the same functions on tensors of positions."""
    i, j, none = torch.arange(12)[:, None], torch.arange(12), torch.zeros(()).long()
    right = Q @ K.mT / math.sqrt(8)
    if score is not None:
        right = score(right, none, none, i, j)
    if mask is not None:
        right = right.masked_fill(~mask(none, none, i, j), -math.inf)
    got = hw.attention(Q, K, V, score, mask)
    return (got - right.softmax(-1) @ V).abs().max().item()


def near(width: Callable[[], int]) -> Callable[..., Tensor]:
    return lambda b, h, i, j: (i - j).abs() < width()


# Each: an object, how it is read, and a change of what is read.
BOUND = {
    "dict.get": lambda: ((d := {"w": 3}), functools.partial(d.get, "w"), lambda: d.update(w=8)),
    "OrderedDict.get": lambda: (
        (d := OrderedDict(w=3)), functools.partial(d.get, "w"), lambda: d.update(w=8)
    ),
    "list.index": lambda: ((l := [1, 1, 3]), functools.partial(l.index, 3), lambda: l.insert(0, 8)),
    "list.__getitem__": lambda: (
        (l := [3]), functools.partial(l.__getitem__, 0), lambda: l.insert(0, 8)
    ),
    "list.__len__": lambda: ((l := [3]), l.__len__, lambda: l.append(8)),
    "set.__contains__": lambda: (
        (s := {1}), lambda has=s.__contains__: 3 if has(1) else 8, s.clear
    ),
    "filter": lambda: (
        (s := {1}), lambda has=s.__contains__: 2 + len(list(filter(has, [1, 2]))), lambda: s.add(2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUND)
def test_builtin_methods_of_what_changes(name):
    _, get, change = BOUND[name]()
    mask = near(lambda: get())
    before = hw.attention(Q, K, V, mask=mask)
    assert off(mask=mask) < 1e-5
    assert lowering.retraced("mask", mask, torch.float32) is None  # followed, not given up
    change()
    assert off(mask=mask) < 1e-5
    assert (hw.attention(Q, K, V, mask=mask) - before).abs().max() > 1e-2


def test_builtin_methods_under_compile():
    """A graph break, and refused by name where there may be none."""
    held, get, change = BOUND["dict.get"]()
    mask = near(lambda: get())
    call = lambda: hw.attention(Q, K, V, mask=mask)
    compiled = torch.compile(call, backend="eager")
    torch.testing.assert_close(compiled(), call())
    change()
    torch.testing.assert_close(compiled(), call())
    assert held
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"the built-in dict.get of an object"):
        torch.compile(call, backend="eager", fullgraph=True)()


def test_a_builtin_method_of_a_tensor_captures_it():
    table = torch.tensor([1.5]).requires_grad_()
    look = table.__getitem__
    out = hw.attention(Q, K, V, lambda s, b, h, i, j: s * look(h))
    (grad,) = torch.autograd.grad(out.sum(), table)
    right = ((Q @ K.mT / math.sqrt(8)) * table[0]).softmax(-1) @ V
    torch.testing.assert_close(grad, torch.autograd.grad(right.sum(), table)[0])


# -- what surrounds a call ------------------------------------------------------------------------


@contextmanager
def warning_always() -> Iterator[None]:
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


ASKS: dict[str, tuple[Callable[[], bool], Callable[[], AbstractContextManager]]] = {
    "is_grad_enabled": (torch.is_grad_enabled, torch.no_grad),
    "is_inference_mode_enabled": (torch.is_inference_mode_enabled, torch.inference_mode),
    "is_autocast_enabled": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ),
    "get_default_device": (
        lambda: torch.get_default_device().index == 0, lambda: torch.device("cpu:0")
    ),
    "is_warn_always_enabled": (lambda: torch.is_warn_always_enabled(), warning_always),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKS)
def test_what_surrounds_the_call(name):
    asks, within = ASKS[name]
    mask = near(lambda: 3 if asks() else 8)
    for surroundings in (nullcontext, within, nullcontext, within):
        with surroundings():
            assert off(mask=mask) < 2e-2  # autocast computes in bfloat16
    assert name in lowering.retraced("mask", mask, torch.float32)


def test_detach_and_no_grad_where_the_grad_mode_is_asked_for():
    x = Q.clone().requires_grad_()
    score = lambda s, *_: s + s.detach() if torch.is_grad_enabled() else s * 3
    with torch.no_grad():
        assert off(score) < 1e-5
    dense = score(x @ K.mT / math.sqrt(8)).softmax(-1) @ V
    (right,) = torch.autograd.grad(dense.sin().sum(), x)
    (grad,) = torch.autograd.grad(hw.attention(x, K, V, score).sin().sum(), x)
    torch.testing.assert_close(grad, right)


def test_what_pytorch_says_of_its_arguments_is_no_state():
    mask = near(
        lambda: 3 if torch.promote_types(torch.int8, torch.float32).is_floating_point else 8
    )
    assert off(mask=mask) < 1e-5
    assert lowering.retraced("mask", mask, torch.float32) is None


# -- hooks of modules -----------------------------------------------------------------------------

ACT = nn.Tanh()
SCORES = {"kept": lambda s, *_: ACT(s), "made inside": lambda s, *_: nn.Tanh()(s)}


@pytest.mark.parametrize("name", SCORES)
def test_forward_hooks_run(name):
    """Of the module, and of all modules, whenever they were registered."""
    score = SCORES[name]
    assert off(score) < 1e-5
    registers = [modules.register_module_forward_hook, modules.register_module_forward_pre_hook]
    registers += [ACT.register_forward_hook] * (name == "kept")
    for register in registers:
        hook = lambda m, x, *out: out[0] * 3 if out else (x[0] * 3,)
        handle = register(hook)
        try:
            assert off(score) < 1e-5
        finally:
            handle.remove()
        assert off(score) < 1e-5
    assert lowering.retraced("score", score, torch.float32) is None


@pytest.mark.parametrize("register", [
    ACT.register_full_backward_hook, ACT.register_full_backward_pre_hook,
    modules.register_module_full_backward_hook, modules.register_module_full_backward_pre_hook,
])  # fmt: skip
def test_backward_hooks_are_refused(register):
    score, reads = SCORES["kept"], lambda s, *_: s * (2 if ACT.training else 3)
    assert off(score) < 1e-5
    handle = register(lambda m, *grads: None)
    try:
        with pytest.raises(ModError, match=r"calls a module with a backward hook.*would be lost"):
            hw.attention(Q, K, V, score)
        with torch.no_grad():
            assert off(score) < 1e-5
        assert off(reads) < 1e-5  # what is not called runs no hook
    finally:
        handle.remove()
    assert off(score) < 1e-5
