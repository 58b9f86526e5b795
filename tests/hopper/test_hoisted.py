"""Masks with hoisted operands: the same pairs are kept."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
from headway.backends.gpu.codegen import emit
from headway.backends.gpu.codegen.hoist import hoist_mask
from headway.backends.gpu.codegen.int_ranges import IntRanges
from headway.backends.gpu.runtime import call_plan
from headway.backends.hopper.launch_plan import HOISTED
from headway.mods.graph import parse
from headway.resolve import prepare
from tools import simulator

from .test_simulated import simulated  # noqa: F401  (a fixture)

BATCH, LENGTH = 2, 1 << 10
IDS = torch.randint(-3, 3, (BATCH, LENGTH)).sort(1)[0] * ((1 << 32) + 1)
IDS += torch.randint(0, 2, IDS.shape) << 40  # alike in their lower halves
WIDTHS = torch.tensor([70, 1 << 40])
FEW = torch.tensor([2, 3])
SEEN = torch.rand(LENGTH) < 0.7
HEAT = torch.randn(LENGTH, dtype=torch.float64)
causal, window = hw.causal(), hw.sliding_window(50)

# name: the mask; values of neither side, of queries, of keys; comparisons per pair.
MASKS = {
    "causal": (causal, (0, 0, 0, 1)),
    "window": (causal & window, (0, 0, 0, 2)),
    "documents": (causal & hw.document(IDS), (0, 1, 1, 1)),
    "padding": (causal & hw.padding(WIDTHS), (1, 0, 0, 2)),
    "prefix": (causal & window | hw.prefix(WIDTHS), (1, 0, 0, 3)),
    "tokens": (window | hw.global_tokens(40), (0, 0, 0, 4)),
    "used_twice": (lambda b, h, i, j: (v := (j <= i) & (j < i - 30)) & (j < i - 60) | v,
                   (0, 0, 0, 2)),
    "not": (lambda b, h, i, j: ~((j <= i) & (i - j < 90)) & (j > 3), (0, 0, 0, 3)),
    "slopes": (lambda b, h, i, j: (2 * j - 5 <= 3 * i) & (i + j > 700) & (-j < 2 * i), (0, 0, 0, 3)),
    "wide": (lambda b, h, i, j: i * FEW[b] + 10 > j, (1, 0, 0, 0)),
    "blocks": (lambda b, h, i, j: (i // 64 >= j // 64) & SEEN[j], (0, 1, 2, 0)),
    "tables": (lambda b, h, i, j: (HEAT[i] + HEAT[j] > 0) | (HEAT[b] > HEAT[j]), (1, 1, 2, 0)),
    "rows": (lambda b, h, i, j: SEEN[i], (0, 1, 0, 0)),
    "of_distance": (lambda b, h, i, j: SEEN[(i - j).abs()], None),
}  # fmt: skip


def taken_apart(mask, apart=True):
    """What a mask is taken apart into, the generated functions, and what they are given."""
    q = torch.zeros(BATCH, 1, LENGTH, 16, dtype=torch.bfloat16)
    spec, call = prepare(q, q, q, None, mask, backend="hopper")
    text = emit.CodegenSpec(
        None, spec.mask, (), apart, apart, (False,) * 9, affine=apart, hoist=True
    )
    tensors = call_plan._with_sizes(call.captured.tensors)
    captured = simulator._argument(tensors), (*call.captured.ints, *call.captured.floats)
    graph = parse(spec.mask)
    found = hoist_mask(graph, IntRanges(graph, True) if apart else None)
    return found, simulator._functions(text), captured


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("apart", [True, False])
def test_the_same_pairs_are_kept(name, apart, simulated):  # noqa: F811
    """In tiles near the diagonal and far from it, of both kernels, and with positions that do not
    follow one another (not `apart`), where there are no comparisons."""
    mask, counts = MASKS[name]
    found, module, captured = taken_apart(mask, apart)
    if apart:
        assert (None if found is None else tuple(map(len, found))) == counts
    fields = {field: getattr(module, name, None) for field, name in HOISTED.items()}
    how = SimpleNamespace(scarce_smem=False, **fields)
    kernel = simulator.LOADED.hoisted
    for first_q, first_kv in ((0, 0), (512, 448), (LENGTH - 128, 128), (64, LENGTH - 128)):
        q, kv = (
            (first + torch.arange(128)).to(torch.int32 if apart else torch.int64)
            for first in (first_q, first_kv)
        )
        for b in range(BATCH):
            want = mask(b, 0, q.long()[:, None], kv.long()[None, :]).broadcast_to(128, 128)
            for queries in (True, False):
                how.scarce_smem = not queries
                row, column = (q[:64], kv) if queries else (kv[:64], q)
                rows = kernel.hoist_rows(b, 0, row, (), captured, queries, how)
                columns = kernel.hoist_columns(b, 0, column, rows, (), captured, queries, True, how)
                at = (row, column) if queries else (column, row)
                made = kernel.evaluate_mask(
                    torch.zeros(64, 128), b, 0, *at, int(column[0]), rows, columns, captured,
                    queries, module.mask, how,
                )  # fmt: skip
                made = made.broadcast_to(64, 128)
                true = want[:64] if queries else want.T[:64]
                assert torch.equal(made, true), (first_q, first_kv, b, queries)
