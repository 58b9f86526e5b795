"""The whole shared table through the simulator, and every kind of call compiled at every width: half
an hour of `make test-long`."""

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from cases import BY_NAME, CASES, problem
from checks import compare, run
from headway.errors import BackendRefused
from positions import scattered
from tools.compile_hopper import CALLS, report
from tools.simulator import simulating


@pytest.fixture
def simulated():
    with simulating():
        yield


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_table(name, simulated):
    try:
        made = run(problem(BY_NAME[name], torch.bfloat16), "hopper", True)
    except BackendRefused:
        pytest.skip("not what this backend does")
    assert compare(BY_NAME[name], torch.bfloat16, made, True) == []


@pytest.mark.parametrize("tile", [1, 128], ids=["one_by_one", "in_tiles"])
@pytest.mark.parametrize("per_batch", [False, True], ids=["one_order", "order_per_batch"])
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_positions(name, per_batch, tile, simulated):
    try:
        made = scattered(BY_NAME[name], torch.bfloat16, "hopper", per_batch, tile)
    except BackendRefused:
        pytest.skip("not what this backend does")
    assert compare(BY_NAME[name], torch.bfloat16, made, True) == []


# Of a CTA, in bytes.
SHARED = 232448
REFUSED = [("192/128", name) for name in ("rows", "numbers", "dropout")]  # `hopper.reasons_against`
# Bytes spilled where registers run out, and products wait for each other: what reads a number for
# each pair needs as many addresses, and a gradient more registers.
SCARCE = {
    ("backward", "192/128", "relative"): 2300,
    ("backward", "192/128", "columns"): 1300,
    ("backward", "256/256", "rows"): 400,
    ("backward", "256/256", "numbers"): 800,
    ("backward", "128/128", "numbers"): 800,
}
SPILLED = SCARCE | {
    ("forward", "256/256", "dense"): 460,
    ("forward", "256/256", "dropout"): 330,
}  # and where they do not wait


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("widths", ["64/64", "96/96", "128/128", "192/128", "256/256"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiles(direction, widths, name):
    if direction == "backward" and widths == "96/96":
        pytest.skip("the same kernel as at 128")
    kind = direction, widths, name
    if kind[1:] in REFUSED:
        pytest.skip("refused")
    (made,) = report(*kind)
    print(made)
    assert made["idle"] == made["unwritten"] == made["in_flight"] == made["early"] == []
    assert made["fences"] == 0
    assert made["twice"] == 0
    assert made["shared"] <= SHARED
    assert made["serialized"] == 0 or kind in SCARCE, made
    # At 192, dk and dv take 160 of 240 registers.
    tight = kind[:2] == ("backward", "192/128")
    assert made["spills"] <= SPILLED.get(kind, 700 if tight else 300), made
