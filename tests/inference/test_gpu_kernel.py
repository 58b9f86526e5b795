"""The kernel of inference, run on the CPU: by Triton's interpreter, and as it is compiled for each
GPU. `long/emulated.py` runs all cases for all GPUs."""

import random
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime.jit import JITFunction

import headway as hw
from graphs import recording
from headway import backends, inference
from headway.backends import slots as write
from headway.backends import triton as backend
from headway.backends.base import Call, CapabilityKey, capability_key
from headway.backends.gpu.inference import plan
from headway.backends.gpu.inference.block_lists import key_block_lists
from headway.backends.gpu.runtime.launcher import KernelLauncher
from headway.blocks import Tiles
from headway.inference import slots
from headway.resolve import resolve
from headway.types import KV, Captured, Coords, Request, Spec
from interpreted import interpreted
from tools.compile_triton import _resources, compiling
from tools.emulator.launch import emulating

from . import gpu_kernel as kernel
from .engines import ENGINES, WINDOWS
from .gather import by_rows, caches
from .slot_writes import wrong_write


def test_interpreted():
    assert interpreted("interpret_inference.py") == {}


# Each for a part of its own: pages by key, window and merging; lists of chosen pages, of tiles for
# each head, and packed (of one list for all heads); float8 that the GPU cannot convert;
# packed queries; a width in two pieces, of which v is one.
CASES = [
    pytest.param("sm_100", partial(kernel.masks_and_scores, some=slice(1)), id="pages"),
    pytest.param("sm_90", partial(kernel.block_masks, some=slice(0, 4, 3)), id="block masks"),
    pytest.param("sm_80", kernel.float8, id="float8"),
    pytest.param("sm_90", partial(kernel.float8, stored=kernel.E5M2), id="float8 e5m2"),
    pytest.param("sm_90", kernel.packed, id="packed"),
    pytest.param("sm_90", partial(kernel.latent, 40), id="latent"),
]


@pytest.mark.parametrize(("target", "case"), CASES)
def test_compiled(target, case):
    with emulating(target, backend) as ran:
        assert case(dtype=torch.bfloat16) < 0.01
    assert {*ran} == {"infer"}


@pytest.mark.parametrize("aligned", [False, True])
def test_packed_calls_with_few_queries(aligned):
    """One query or a few of every sequence over packed keys: no cache, and its kernel all the same.
    Nothing is there of tokens of no sequence."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1, 4], [0, 70, 80, 200]))
    q, k, v = (torch.randn(n, h, 16).bfloat16() for n, h in ((5, 4), (203, 2), (203, 2)))
    more = cu_k.diff() - cu_q.diff()
    mask = (lambda b, h, i, j: j <= i + more[b]) if aligned else None
    call = lambda backend, *x: hw.varlen_attention_with_stats(
        *x, mask=mask, cu_q=cu_q, cu_k=cu_k, max_q=3, max_k=120, backend=backend
    )
    right = call("reference", *(x.double() for x in (q, k, v)))
    with emulating("sm_90", backend) as ran:
        made = call("triton", q, k, v)
    assert {*ran} == {"infer"}
    assert kernel.off(made, right) < 0.01


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])  # one encodes float8, one has instructions
def test_writes_to_slots(target):
    with emulating(target, backend) as ran:
        assert [wrong_write(seed, most=20) for seed in range(6)] == [""] * 6
    assert {*ran} == {"write_kernel"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_caches_append(kind, packed):
    """The kernel writes what PyTorch's operators write, where rows have different numbers of new
    tokens, and tokens of no row follow."""
    scale, made = torch.rand(2, 2) + 0.1, []
    k, v = torch.randn(2, 2, 2, 3, 8), torch.randn(2, 2, 2, 3, 6)
    for target in (None, "sm_90"):
        options: dict[str, Any] = {
            "layers": 2, "hk": 2, "d": 8, "dv": 6, "k_scale": scale, "dtype": kernel.E4M3
        }  # fmt: skip
        if kind == "pages":
            cache = inference.PagedCache(pages=5, page=4, rows=2, **options)
        else:
            cache = inference.Cache(b=2, capacity=7, **options)
        with nullcontext([]) if target is None else emulating(target, backend) as ran:
            for new_k, new_v in zip(k, v, strict=True):
                cache.reserve([0, 1], [3, 1])
                for n in range(2):
                    if packed:
                        of = [x.transpose(0, 1).flatten(1, 2)[None] for x in (new_k, new_v)]
                        cache[n].append(*of, cu_q=torch.tensor([0, 3, 4], dtype=torch.int32))
                    else:
                        cache[n].append(new_k, new_v)
        assert ran == ([] if target is None else ["write_kernel"] * 4)
        made.append([x.view(torch.uint8) for x in cache.stored])
    assert all(map(torch.equal, *made))
    assert made[0][0].any()


def test_writes_to_slots_in_wide_pieces():
    """Every thread copies 16 bytes at a time, two of keys and two of values; all numbers of
    tokens have one kernel."""
    k, v = torch.zeros(600, 3, 8, 128, dtype=torch.bfloat16)[:, 1:].unbind(1)
    cache = torch.zeros(50, 2, 16, 8, 128, dtype=torch.bfloat16)
    k_cache, v_cache = cache.transpose(2, 3).unbind(1)
    kernels: list[Any] = []
    with compiling("sm_90", kernels):
        for tokens in (1, 2, 7, 16, 130, 600):
            slots = torch.arange(tokens)
            write.write_slots(k[:tokens], v[:tokens], k_cache, v_cache, slots, None, None)
    assert len({compiled.hash for _, compiled in kernels}) == 1
    name, compiled = kernels[0]
    resources = _resources("sm_90", name, compiled)
    assert (resources.spills, resources.shared, resources.faults) == (0, 0, ())
    ptx = compiled.asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == ptx.count("st.global.v4.b32") == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_of_an_engine_is_replayed(engine):
    """The whole step is captured, and every replay is right for what the buffers hold by then."""
    mask, width = WINDOWS["window"]
    serving = ENGINES[engine]("cpu", torch.float32, width)
    serving.draw(0)
    with (
        emulating("sm_90", backend) as ran,
        mock.patch.object(slots, "host_can_read", return_value=False),  # as in a capture
        # A capture is no mode, as its stand-in here is: kernels run.
        mock.patch.object(write, "operators_are_changed", return_value=False),
    ):
        with recording() as graph:
            serving.step(mask, backend="triton")
        assert ran == ["write_kernel", "infer"]
        for seed in (0, 1, 2):
            serving.draw(seed)
            graph.replay()
            made = serving.output.double()
            torch.testing.assert_close(made, serving.expected(), atol=2e-3, rtol=2e-3)


def test_drafts_change_under_a_graph():
    """The mask of a tree is made in the graph, from the parents that it finds."""
    c = caches([20, 9], 4, 2, q_len=6, page=8)
    draw = lambda: torch.tensor([[random.randrange(-1, n) for n in range(6)] for _ in range(2)])
    parents = draw()
    run = lambda: kernel.run(c, None, hw.tree(parents, c.lengths - 6))
    with (
        emulating("sm_90", backend),
        mock.patch("headway.mods.library.checks.host_can_read", return_value=False),
    ):
        with recording() as graph:
            made = run()
        for _ in range(2):
            parents.copy_(draw())
            graph.replay()
            assert kernel.off(made, by_rows(c, None, hw.tree(parents, c.lengths - 6))) < 2e-3


def test_nothing_is_made_for_a_length():
    """One plan, and one kernel, for all lengths, capacities, strides, batch sizes and offsets; the
    direct launch has every number that the call has."""
    made: list[Any] = []
    compiled: list[Any] = []
    compile_ = JITFunction._do_compile

    def counted(self, *args: Any) -> Any:
        compiled.append(self.__name__)
        return compile_(self, *args)

    def planned(*of: Any) -> Any:
        made.append(PLAN(*of))
        return made[-1]

    stopped = mock.patch.object(KernelLauncher, "__call__", return_value=None)
    with (
        emulating("sm_90", backend),
        mock.patch.object(plan, "Plan", side_effect=planned),
        mock.patch.object(JITFunction, "_do_compile", counted),
    ):
        for n in [1, 16, 17, 128, *range(300, 600)]:
            b, q_len = 1 + n % 3, 1 + n % 2
            k = torch.zeros(b, 2, n, 16, dtype=torch.bfloat16)
            if n == 300:  # from here on nothing runs, which takes time
                stopped.start()
            inference.attention(
                torch.zeros(b, 4, q_len, 16, dtype=torch.bfloat16), k, k.clone(),
                mask=hw.sliding_window(n + 7), backend="triton",
                lengths=torch.full((b,), n, dtype=torch.int32),
            )  # fmt: skip
        stopped.stop()
    assert len(made) == 1
    assert compiled == ["infer"]


PLAN = plan.Plan


@pytest.mark.parametrize("mask", ["plain", "block mask"])
@pytest.mark.parametrize("numbers", ["lengths below 0", "pages out of range", "cu_q out of order"])
def test_nothing_outside_of_the_tensors_is_touched(numbers, mask):
    """The host cannot see them on a GPU: they are clamped, or keys on such pages are none. The
    emulator finds every access outside of a tensor."""
    c = caches([40, 20], 4, 2, page=16, dtype=torch.bfloat16)
    cu_q = torch.tensor([0, 2, 5], dtype=torch.int32)
    q = torch.randn(1, 4, 5, 16).bfloat16()
    kv = KV(c.lengths, c.page_table, cu_q, 3)
    room = c.page_table.shape[1] * 16
    blocks = hw.top_k_blocks(torch.tensor([[[[0, 2]]], [[[1, -1]]]]), 16, 1, room)
    blocks = blocks if mask == "block mask" else None
    with emulating("sm_90", backend):
        spec, call = resolve(Request(q, c.k, c.v, None, blocks, backend="triton", keys=kv))
        if numbers == "lengths below 0":
            c.lengths.copy_(torch.tensor([-5, 10_000]))
        elif numbers == "pages out of range":
            c.page_table[:, :2] = torch.tensor([[1000, 0], [-1, 900]])
        else:
            cu_q.copy_(torch.tensor([7, -2, 900]))
        backend.infer(spec, call)


def test_lists_wait_for_nothing():
    """Their sizes follow from shapes: a tensor without numbers is enough."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = torch.randn(2, 8, 3, 16), torch.randn(2, 2, 300, 16)
        new = lambda *shape: torch.zeros(shape, dtype=torch.int32)
        runs = [new(2 * 5 + 1), new(7), new(7)] * 4
        tiles = Tiles.unflatten([*runs, new(10), new(10)])
        spec = Spec(1.0, tiles=(2, 1, 64, 128))
        kv = KV(new(2), None, None, 3)
        call = Call(q, k, k, None, None, Captured([], [], []), tiles, Coords(), None, kv)
        found = key_block_lists(spec, call, 16, 64)
    assert [tuple(x.shape) for x in found] == [(2, 2, 1, 5), (2, 2, 1), (2,)]


@pytest.mark.parametrize("page", [0, 16])
def test_loads_run_ahead(page):
    """Two blocks of keys and values are on their way while one is computed on, and no register is
    spilled in the loop."""
    q = torch.zeros(2, 32, 1, 128, dtype=torch.bfloat16)
    k, n = q.new_zeros(2, 8, 1024, 128), torch.zeros(2, dtype=torch.int32)
    kernels: list[Any] = []
    options: dict[str, Any] = {"lengths": n, "backend": "triton"}
    if page:
        k = k.view(-1, 8, page, 128)
        options["page_table"] = torch.zeros(2, 1024 // page, dtype=torch.int32)
    with compiling("sm_90", kernels):
        inference.attention(q, k, k.clone(), **options)
    ((name, compiled),) = kernels
    found = _resources("sm_90", name, compiled)
    assert found.faults == ()
    assert found.inside == 0
    # K and V of a block are a group each; with pages, their numbers are one more.
    assert f"cp.async.wait_group \t{4 if page else 2}" in compiled.asm["ptx"]


def test_a_cache_is_not_what_first_use_checks():
    """The Hopper backend runs the kernel of both backends there: no small case of its own is
    compiled before."""
    c = caches([40], 4, 2, page=16, dtype=torch.bfloat16)
    kv = KV(c.lengths, c.page_table)
    spec, call = resolve(Request(c.q, c.k, c.v, backend="reference", keys=kv))
    kind = CapabilityKey(*capability_key(call, 0))
    with (
        mock.patch.object(backends.hopper, "unavailable", return_value=""),
        mock.patch.object(backends, "_self_test_failure", side_effect=AssertionError),
        mock.patch.object(backends, "_self_test", side_effect=AssertionError),
    ):
        assert backends.reasons_against("hopper", spec, kind) == []
