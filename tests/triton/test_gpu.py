"""The whole table on a GPU: `make gpu-test`. Skipped where there is none."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from cases import BY_NAME, CASES, problem

if find_spec("triton") is None or not torch.cuda.is_available():
    pytest.skip("needs Triton and a GPU", allow_module_level=True)

from headway.backends.gpu.runtime.call_plan import clear
from headway.backends.triton import main_loop, plan
from headway.types import Dual
from tangents import directions, run, too_far
from tools.guard_bands import guarded
from tools.on_gpu import check_on, moved

HALF = [case for case in CASES if "half" in case.tags]
FOURTEEN = [case for case in CASES if "fourteen" in case.tags]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table(case):
    check_on(case, torch.float32, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("stats", [True, False], ids=["stats", "plain"])
@pytest.mark.parametrize("case", HALF, ids=str)
def test_half(case, stats, dtype):
    check_on(case, dtype, "cuda", stats=stats)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", HALF, ids=str)
def test_tangents(case, dtype):
    if max(case.d, case.dv) > 192:
        pytest.skip("refused")
    given = problem(case, dtype)
    along = directions(given)
    there = {name: t.cuda() for name, t in along.items()}
    dual = run(moved(given, "cuda"), there, "triton", max_logit=True, row_max=True)
    assert too_far(Dual(*[t.cpu() for t in dual]), given, along) == []


@pytest.mark.parametrize("case", FOURTEEN, ids=str)
def test_batch_of_two(case):
    """A row past the end of one head lies in the next, of one batch row in the next."""
    check_on(replace(case, b=2), torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", [c for c in CASES if {"long", "mask"} <= {*c.tags}], ids=str)
def test_runs_of_full_tiles_in_one_loop(case, monkeypatch):
    """As where there are many short ones."""
    monkeypatch.setattr(main_loop, "scattered", lambda *of: True)
    clear()
    check_on(case, torch.bfloat16, "cuda")
    clear()


GUARDED = [
    c for c in CASES if any(word in c.name for word in ("length_", "width_", "heads_", "pieces"))
]


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("case", GUARDED, ids=str)
def test_nothing_is_written_outside_of_the_outputs(case, passes, monkeypatch):
    if passes == 3:
        three = "backward_q", "backward_k", "backward_v"
        monkeypatch.setattr(plan, "passes", lambda *size: three)
    clear()
    with guarded():
        check_on(case, torch.bfloat16, "cuda")
    clear()


@pytest.mark.parametrize(
    "name",
    ["heads_8_2", "width_64_64", "long_causal_window", "long_pieces", "long_pieces_no_mask"],
)
def test_same_bits_every_time(name):
    from tools.on_gpu import results

    first, again = (results(BY_NAME[name], torch.bfloat16, "cuda") for _ in range(2))
    for key, value in first.items():
        if value.dtype.is_floating_point:
            assert torch.equal(value, again[key]), key
