"""Every tensor that a kernel is given lies on the plan's device, without a card.

Calls of the table lie on a device of their own, PyTorch's "meta", and their launches are written down
instead of done. Everything up to there runs as on a card; tiles alone are built and put in order by
values, which a copy has. A tensor of the CPU would be read at an address of the host.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from cases import BY_NAME, CASES, Case, problem
from headway import backends
from headway.backends import get
from headway.backends.gpu import inference
from headway.backends.gpu.named_card import card_of, compiling_for
from headway.backends.gpu.runtime import call_plan, parallel_compile
from headway.backends.gpu.runtime.launcher import NO_ARGUMENTS, KernelLauncher
from headway.backends.hopper.bwd import document_order, dq_semaphore, segment_table
from headway.resolve import prepare
from headway.types import Coords, Tangents

DEVICE, HOST = torch.device("meta"), torch.device("cpu")
DTYPES = {"triton": torch.float32, "hopper": torch.bfloat16}


READ_TILES = (
    (segment_table, "_runs"), (dq_semaphore, "ordered_schedule"), (document_order, "by_documents"),
)  # fmt: skip


def of_each_kind() -> list[Case]:
    """One case of each score, and one of each mask, and with dropout."""
    kinds = {(c.score or c.mask, c.dropout > 0): c for c in CASES if "long" not in c.tags}
    return list(kinds.values())


KERNELS = {
    "triton": {"infer", "forward", "backward_q", "backward_kv", "tangent"},
    "hopper": {
        "infer", "forward", "backward", "preprocess_kernel", "postprocess_dq", "fill_bias_table",
        "collect_bias_grad",
    },
}  # fmt: skip


def tensors_of(x: Any) -> Iterator[Tensor]:
    """The tensors among a kernel's arguments; a TMA descriptor has one."""
    x = getattr(x, "base", x) if not isinstance(x, Tensor) else x
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from tensors_of(part)


class Apart:
    """Calls on the device: their launches by kernel, and tensors that lie elsewhere."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.elsewhere: list[str] = []
        self.values: dict[int, Tensor] = {}  # of what was moved
        self.alive: list[Tensor] = []

    def move(self, x: Any) -> Any:
        return tree_map_only(Tensor, self._moved, x)

    def _moved(self, x: Tensor) -> Tensor:
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
        self.values[id(moved)] = x
        self.alive.append(moved)
        return moved

    def launch(self, launcher: KernelLauncher, tensors: Any, arguments: Any = NO_ARGUMENTS) -> None:
        self.launches.append(launcher.fn.__name__)
        arranged = launcher.arrange(tensors, arguments.tensors, arguments.floats)
        every = tensors_of((arranged, tuple(tensors), arguments.tensors, launcher.constants))
        self.elsewhere += [
            f"{launcher.fn.__name__}: {x.dtype} {tuple(x.shape)} on {x.device}"
            for x in every
            if x.device != DEVICE
        ]

    def built(self, build: Any) -> Any:
        """Tiles from the values of what a mask reads, on the device that was asked for."""

        def tiles(mask, captured, shape, tile, device, coords, *more):
            captured, coords = self.valued((captured, coords))
            made = build(mask, captured, shape, tile, HOST, coords, *more)
            return self.move(made) if device == DEVICE else made

        return tiles

    def by_value(self, of: Any) -> Any:
        """A function that reads tensors of the device."""
        return lambda *args: self.move(of(*self.valued(args)))

    def valued(self, x: Any) -> Any:
        """The same, of the CPU with its values."""
        return tree_map_only(Tensor, lambda x: self.values.get(id(x), x), x)


@contextmanager
def apart() -> Iterator[Apart]:
    """Inside, kernels of calls that were moved are not compiled and not launched."""
    made = Apart()
    with compiling_for(card_of("sm_90")), ExitStack() as stack:
        patch = lambda *of: stack.enter_context(mock.patch.object(*of))
        patch(backends, "_SELF_TESTED", ())  # it would compute
        patch(KernelLauncher, "__call__", lambda *of: made.launch(*of))
        for build in ("cached_build", "superset_tiles"):
            patch(call_plan, build, made.built(getattr(call_plan, build)))
        for module, function in READ_TILES:
            patch(module, function, made.by_value(getattr(module, function)))
        for compile in ("compile_training", "compile_backward"):
            patch(parallel_compile, compile, lambda *of: None)
        call_plan.empty_result.cache_clear()
        yield made
        call_plan.empty_result.cache_clear()


def run(
    case: Case, name: str, made: Apart, deterministic: bool = False, positions: bool = False
) -> None:
    """Forward, by the kernel of inference too, backward with every gradient, and tangent."""
    given, backend = problem(case, DTYPES[name]), get(name)
    at = torch.arange(case.q_len), torch.arange(case.kv_len)
    coords = Coords(q_pos=at[0], kv_pos=at[1]) if positions else Coords()
    spec, call = prepare(
        given.q, given.k, given.v, given.score(), given.mask(), scale=case.scale, sink=given.sink,
        dropout=case.dropout, seed=given.seed if case.dropout else None, backend=name,
        deterministic=deterministic, max_logit=True, row_max=True, keys=coords,
    )  # fmt: skip
    learns = tuple(x.requires_grad for x in call.captured.tensors)
    call = made.move(call.replace())
    dout, dlse = made.move((given.dout, given.dlse))
    with torch.no_grad():
        backend.forward(replace(spec, exact_out=False), call)
        with mock.patch.object(inference, "suits", return_value=False):
            out, lse, *_ = backend.forward(spec, call)
        backend.backward(spec, call, out, lse, dout, dlse, learns)
        if name == "triton":
            captured = zip(call.captured.tensors[: spec.score_tensors], learns, strict=False)
            tables = tuple(torch.empty_like(x) if learned else None for x, learned in captured)
            along = [None if x is None else torch.empty_like(x) for x in call[:4]]
            backend.tangent(spec, call, Tangents(*along, tables))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_all_lie_on_the_device(name, deterministic):
    with apart() as made:
        for case in of_each_kind():
            run(case, name, made, deterministic)
            assert not made.elsewhere, case
        for case in ("mask_document", "score_bias_rows_masked"):
            run(BY_NAME[case], name, made, deterministic, positions=True)
            assert not made.elsewhere, case
    assert set(made.launches) == KERNELS[name] | ({"round_sums"} if deterministic else set())


def elsewhere(of: Any) -> Any:
    """A function whose result lies on the CPU."""
    return lambda *args: torch.zeros_like(of(*args), device=HOST)


WRONG = {  # a backend, a function, what is wrong with it, and a case that shows it
    "hopper: sums that all calls share": (
        "ExactSums", lambda of: lambda width, sizes, device: of(width, sizes, HOST), "score_relative"
    ),
    "hopper: a captured tensor": ("readable", elsewhere, "score_bias_rows"),
    "triton: a captured tensor": ("readable", elsewhere, "score_bias_rows"),
    "hopper: positions": ("_contiguous_int64", elsewhere, "mask_document"),
    "triton: positions": ("_contiguous_int64", elsewhere, "mask_document"),
    "triton: tiles": ("_aligned", elsewhere, "mask_document"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_tensor_of_the_cpu_is_found(what, monkeypatch):
    function, wrong, case = WRONG[what]
    monkeypatch.setattr(call_plan, function, wrong(getattr(call_plan, function)))
    with apart() as made:
        run(BY_NAME[case], what.split(":")[0], made, positions="positions" in what)
    assert made.elsewhere
