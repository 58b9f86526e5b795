"""What Triton has made of the kernels for each GPU, run on the CPU instruction by instruction."""

import random
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import ragged
from attention import test_expect
from cases import BY_NAME, Case, problem
from checks import check, compare, run
from headway.backends import triton as backend
from headway.backends.triton import main_loop, plan
from long import long, long_unless
from positions import scattered
from tangents import directions, too_far
from tangents import run as along_it
from tools.emulator.launch import Without, emulating
from tools.emulator.values import Fault
from tools.guard_bands import guarded

# Each for a part of its own: lengths of one, tails, runs of full and partial tiles, pieces of a width,
# each way to add up a gradient, what is read byte by byte. For sm_100 Triton 3.6 compiled neither the
# first nor the last. `long/emulated.py` runs the whole table.
CASES = {
    "sm_80": ("length_1", "long_checker_even", "width_100_100"),
    "sm_90": ("long_causal_window", "width_192_128", "score_relative", "score_twice", "mask_dense"),
    "sm_100": ("length_1", "long_checker_even", "captured_twice"),
}  # fmt: skip
KEPT = [
    ("sm_80", "length_1"), ("sm_80", "width_100_100"), ("sm_90", "width_192_128"),
    ("sm_90", "score_twice"), *[("sm_100", name) for name in CASES["sm_100"]],
]  # fmt: skip
THREE = "backward_q", "backward_k", "backward_v"


def few_heads(name: str) -> Case:
    """The case with two query heads over one of keys: time goes by programs."""
    return replace(BY_NAME[name], b=1, hq=2, hk=1)


@pytest.mark.parametrize(
    ("target", "name"), long_unless(KEPT, [(t, name) for t in CASES for name in CASES[t]])
)
def test_table(target, name):
    with emulating(target, backend) as ran:
        check(few_heads(name), "triton", torch.bfloat16)
    assert {"forward", "backward_q", "backward_kv"} <= {*ran}


@pytest.mark.parametrize("name", ["mask_document_cross", long("score_twice")])
def test_entropy(name):
    with emulating("sm_90", backend), guarded():
        check(replace(few_heads(name), entropy=True), "triton", torch.bfloat16)


def test_expectations():
    with emulating("sm_90", backend) as ran, guarded():
        test_expect.small("triton", torch.bfloat16, 2e-2, test_expect.SMALL[1::2])
    assert {"forward", "backward_q", "backward_kv"} == {*ran}


@pytest.mark.parametrize(
    ("target", "name"),
    [("sm_90", "score_relative"), ("sm_80", "length_1"), ("sm_90", "long_causal_window"),
     *[long(target, name) for target, name in (
         ("sm_90", "width_192_128"), ("sm_80", "width_100_100"), ("sm_100", "long_checker_even")
     )]],
)  # fmt: skip
def test_tangents(target, name):
    given = problem(few_heads(name), torch.bfloat16)
    along = directions(given)
    with emulating(target, backend) as ran, guarded():
        dual = along_it(given, along, "triton", max_logit=True, row_max=True)
    assert ran == ["tangent"]
    assert too_far(dual, given, along) == []


@pytest.mark.long
@pytest.mark.parametrize("form", ragged.FORMS)
def test_packed(form):
    case = replace(few_heads("score_bias_rows"), b=2)
    with emulating("sm_90", backend):
        assert ragged.wrong(case, torch.bfloat16, "triton", form) == []


@pytest.mark.parametrize(
    ("target", "dtype"), [("sm_80", torch.float32), ("sm_90", torch.float16)], ids=str
)
def test_other_numbers(target, dtype):
    with emulating(target, backend):
        check(few_heads("heads_6_2_score"), "triton", dtype)


@pytest.mark.parametrize(
    ("name", "module", "how"),
    [("width_100_100", plan, {"passes": lambda *size: THREE}),
     ("long_checker_even", main_loop, {"scattered": lambda *of: True})],
    ids=["three kernels", "one loop"],
)  # fmt: skip
def test_otherwise(name, module, how, monkeypatch):
    """Between guard bands, and each tensor is all that may be touched."""
    for what, by in how.items():
        monkeypatch.setattr(module, what, by)
    with emulating("sm_90", backend), guarded():
        check(few_heads(name), "triton", torch.bfloat16)


@pytest.mark.parametrize("how", ["as it is", "three kernels", long("whole tiles")])
def test_positions_one_by_one(how, monkeypatch):
    """Another order in every row of the batch; and each tensor is all that may be touched."""
    if how == "three kernels":
        monkeypatch.setattr(plan, "passes", lambda *size: THREE)
    case = replace(BY_NAME["mask_by_batch_sink"], hq=2, hk=1)
    if how == "whole tiles":  # no row is past the end
        case = replace(case, name="whole", b=1, q_len=128, kv_len=128)
    with emulating("sm_90" if how == "as it is" else "sm_80", backend), guarded():
        made = scattered(case, torch.bfloat16, "triton", per_batch=True)
    assert compare(case, torch.bfloat16, made, True) == []


def test_positions_in_tiles():
    """Positions are small, as is known of those in tiles."""
    case = replace(BY_NAME["long_causal_window"], hq=1, hk=1, q_len=30, kv_len=140)
    with emulating("sm_80", backend), guarded():
        made = scattered(case, torch.bfloat16, "triton", tile=128)
    assert compare(case, torch.bfloat16, made, True) == []


def test_lengths_one_after_the_other():
    """Whole blocks of wide rows, of which more is known, and then lengths of any kind: no plan, tile
    or kernel of an earlier one is taken. The sink's gradient reads the rows of the workspace."""
    numbers = random.Random(5)
    case = replace(BY_NAME["mask_by_batch_sink"], b=1, hq=2, hk=1, d=72, dv=72)
    odd = [(numbers.randrange(2, 90), numbers.randrange(2, 90)) for _ in range(2)]
    with emulating("sm_80", backend), guarded():
        for q_len, kv_len in [(64, 64), *odd, (1, 1), (64, 64)]:
            name = f"lengths {q_len} {kv_len}"
            check(replace(case, name=name, q_len=q_len, kv_len=kv_len), "triton", torch.bfloat16)


@pytest.mark.parametrize(
    ("target", "name"),
    [("sm_90", "score_relative"), long("sm_80", "score_twice"), long("sm_90", "score_bias_rows")],
)
def test_exact_sums(target, name):
    case = few_heads(name)
    with emulating(target, backend) as ran:
        made = run(problem(case, torch.bfloat16), "triton", True, deterministic=True)
        assert compare(case, torch.bfloat16, made, True) == []
    assert "round_sums" in ran


BROKEN = {
    "barriers": (r"^\s*bar\.sync.*\n", "the last barrier"),
    "waits for copies": (r"^\s*cp\.async\.wait_group.*\n", "the last barrier|forward"),
    "guards of stores": (r"@%p\d+ (?=st\.global)", "past the end of a tensor"),
    "fences": (r"^\s*fence\.proxy\.async\.shared::cta;\n", "behind no fence"),
    "waits for products": (r"^\s*wgmma\.wait_group.*\n", "threads of a warp part|nobody waits"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_broken_kernel_is_found(target, what):
    pattern, said = BROKEN[what]
    if target == "sm_80" and what in ("fences", "waits for products"):
        pytest.skip("there are none")
    case, without = BY_NAME["lengths_127_301_causal"], Without(pattern)

    def right() -> bool:
        made = run(problem(case, torch.bfloat16), "triton", True)
        return not compare(case, torch.bfloat16, made, True)

    with emulating(target, backend, without), pytest.raises(AssertionError, match=said):
        assert right()
    assert without.count


def test_a_fault_says_where():
    case = BY_NAME["length_65_causal"]
    without = Without(BROKEN["guards of stores"][0])
    with (
        emulating("sm_80", backend, without),
        pytest.raises(Fault, match=r"_forward\.py:\d+.*forward$"),
    ):
        run(problem(case, torch.bfloat16), "triton", True)
