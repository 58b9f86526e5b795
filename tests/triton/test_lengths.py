"""No length has a kernel of its own: of random lengths and batches, few kernels are launched.

Nothing is compiled: of every launch Triton is asked what it would compile it for.
"""

import random
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

import headway as hw

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headway import backends
from headway.backends import hopper
from headway.backends import triton as portable
from headway.backends.gpu import inference
from headway.backends.gpu.runtime import call_plan, parallel_compile
from headway.backends.hopper import launch_plan
from headway.resolve import prepare
from tools.compile_triton import launching

KINDS = {
    "no mask": lambda table: {},
    "causal": lambda table: {"mask": hw.causal()},
    "window": lambda table: {"mask": hw.sliding_window(300)},
    "score": lambda table: {"score": lambda s, b, h, i, j: s * 0.5 + (i - j) * 0.01},
    "learned": lambda table: {
        "score": lambda s, b, h, i, j: s + table[h, (i - j).clamp(-128, 128) + 128],
        "mask": hw.causal(),
    },
}


@pytest.fixture
def variants(monkeypatch):
    """What each kernel would be compiled for: `{name: {(types and attributes, constants)}}`."""
    found: dict[str, set] = {}

    def ask(self, *args, grid, warmup, **options):
        binder = self.device_caches[driver.active.get_current_device()][-1]
        _, specialised, constants = binder(*args, debug=False, **options)
        found.setdefault(self.__name__, set()).add((str(specialised), str(constants)))

    with (
        launching("sm_90"),
        mock.patch.object(backends, "_SELF_TESTED", ()),
        mock.patch.object(hopper, "unavailable", return_value=""),
        mock.patch.object(launch_plan, "processors", return_value=132),
    ):
        # Few queries have another kernel, and a rehearsal launches nothing.
        monkeypatch.setattr(inference, "suits", lambda *of: False)
        monkeypatch.setattr(parallel_compile, "compile_in_parallel", lambda *of: None)
        monkeypatch.setattr(JITFunction, "run", ask)
        call_plan.clear()
        yield found
        call_plan.clear()


def lengths(seed: int, count: int, divided_by: int, uneven: bool):
    """(b, q_len, kv_len); no length, or every one, is a multiple of `divided_by`. 1 comes first."""
    numbers = random.Random(seed)
    if uneven:
        yield 2, 1, 1
    for _ in range(count):
        q_len, kv_len = (divided_by * numbers.randrange(1, 1800 // divided_by) for _ in "qk")
        if uneven:
            odd = (numbers.choice([1, 2, 16, 48]) for _ in "qk")
            q_len, kv_len = (n + m for n, m in zip((q_len, kv_len), odd, strict=True))
        yield numbers.choice([1, 2, 3, 16]), q_len, kv_len


def launch(backend, size, table, options) -> None:
    """A forward and a backward."""
    b, q_len, kv_len = size
    q, k = (torch.empty(b, 4, n, 64, dtype=torch.bfloat16) for n in (q_len, kv_len))
    spec, call = prepare(q.requires_grad_(), k, k, backend=backend.name, **options)
    with torch.no_grad():
        out, lse, *_ = backend.forward(spec, call)
        needs = (True,) * len(call.captured.tensors)
        backend.backward(spec, call, out, lse.fill_(0), torch.empty_like(q), None, needs)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_has_one_kernel_for_whole_blocks_and_one_for_others(variants, kind, uneven):
    table = torch.zeros(4, 257, requires_grad=True)
    for size in lengths(3, 12, 128, uneven):
        launch(portable, size, table, KINDS[kind](table))
    assert {name: len(found) for name, found in variants.items()} == dict.fromkeys(variants, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_hopper_has_a_kernel_for_each_tile_shape_and_none_for_a_length(variants, kind):
    table = torch.zeros(4, 257, requires_grad=True)
    for size in lengths(4, 12, 192, uneven=True):
        launch(hopper, size, table, KINDS[kind](table))
    # The constants alone differ: with or without stream-K, and which tile shape.
    most = {"forward": 3, "fill_bias_table": 2}
    for name, found in variants.items():
        assert len(found) <= most.get(name, 1), name
        assert len({str(types) for types, _ in found}) <= most.get(name, 1), name
