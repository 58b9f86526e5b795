"""Everything that takes too long for `make test`: `make hopper-test`.

The whole shared table through the simulator, and every kind of call compiled at every width.
"""

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from cases import BY_NAME, CASES, problem
from checks import compare, run
from headway.errors import BackendRefused

from .aot import CALLS
from .test_compile import report
from .test_simulated import simulated  # noqa: F401  (a fixture)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_table(name, simulated):  # noqa: F811
    try:
        made = run(problem(BY_NAME[name], torch.bfloat16), "hopper", True)
    except BackendRefused:
        pytest.skip("not what this backend does")
    assert compare(BY_NAME[name], torch.bfloat16, made, True) == []


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("widths", ["64/64", "96/96", "128/128", "192/128", "256/256"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiles(direction, widths, name):
    if direction == "backward" and widths == "96/96":
        pytest.skip("the same kernel as at 128")
    (made,) = report(direction, widths, name)
    print(made)
    assert made["idle"] == made["unwritten"] == made["in_flight"] == made["early"] == []
    assert made["twice"] == 0
    # Reads of one number per pair need an address each, and gradients of them a product.
    heavy = name in ("relative", "dense", "rows", "sink")
    tight = (direction, widths) == ("backward", "192/128")  # dk and dv: 160 of 240 registers
    assert made["serialized"] == 0 or (heavy and tight), made
    assert made["spills"] <= (4000 if heavy else 400 if tight else 300), made
