"""The compiled kernels, run on the CPU instruction by instruction: copies, barriers and products as
the hardware has them, with the layouts and registers that the compiler chose."""

from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import ragged
from cases import BY_NAME, problem
from checks import compare, run
from headway.backends import hopper
from headway.backends.hopper import launch_plan
from headway.backends.hopper.fwd import stream_k
from headway.backends.hopper.fwd.plan import ForwardPlan
from long import long
from positions import scattered
from tools.emulator.launch import Without, emulating

from .test_simulated import choose, straight_line_errors

# Each for a part of its own: tails, several runs of tiles, masks per head, a gradient that is added
# up, and each kernel that widths and lengths have. `long/emulated.py` runs the whole table.
CASES = {
    "at once": ("lengths_127_301_causal", "score_bias_keys_masked", "width_256_256"),
    "segments": ("width_100_100",),
}  # fmt: skip
LONG = [("at once", "long_checker"), ("pipelined", "mask_by_batch_sink")]


def wrong(name: str, **changes) -> list[str]:
    case = replace(BY_NAME[name], **changes)
    made = run(problem(case, torch.bfloat16), "hopper", True)
    return compare(case, torch.bfloat16, made, True)


@pytest.mark.parametrize(
    ("way", "name"),
    [*[(way, n) for way in CASES for n in CASES[way]], *[long(*row) for row in LONG]],
)
def test_table(way, name, monkeypatch):
    choose(monkeypatch, way)
    with emulating("sm_90", hopper) as ran:
        assert wrong(name, hq=2, hk=1) == []  # time goes by CTAs
    assert {"forward", "preprocess_kernel"} < {*ran}


ENTROPY = [
    ("at once", "mask_by_batch_sink", {}), long("pipelined", "mask_by_batch_sink", {}),
    long("segments", "width_100_100", {}), long("at once", "score_walls", {}),
    long("at once", "dropout_0.1_all", {}), long("at once", "heads_8_2", {"d": 192, "dv": 128}),
    long("at once", "heads_8_2", {"d": 256, "dv": 256}),
]  # fmt: skip


@pytest.mark.parametrize(("way", "name", "changes"), ENTROPY)
def test_entropy(way, name, changes, monkeypatch):
    choose(monkeypatch, way)
    with emulating("sm_90", hopper):
        assert wrong(name, **{"hq": 2, "hk": 1, "entropy": True} | changes) == []


@pytest.mark.long
@pytest.mark.parametrize("form", ragged.FORMS)
def test_packed(form, monkeypatch):
    choose(monkeypatch, "at once")
    case = replace(BY_NAME["score_bias_rows"], b=2, hq=2, hk=1)
    with emulating("sm_90", hopper):
        assert ragged.wrong(case, torch.bfloat16, "hopper", form) == []


@pytest.mark.long
def test_early_queries(monkeypatch):
    choose(monkeypatch, "at once")
    with emulating("sm_90", hopper):
        assert wrong("mask_by_batch_sink", d=192, dv=128) == []


def test_positions_one_by_one(monkeypatch):
    choose(monkeypatch, "at once")
    case = replace(BY_NAME["mask_by_batch_sink"], hq=2, hk=1)
    with emulating("sm_90", hopper):
        made = scattered(case, torch.bfloat16, "hopper", per_batch=True)
    assert compare(case, torch.bfloat16, made, True) == []


def test_positions_in_tiles(monkeypatch):
    choose(monkeypatch, "at once")
    case = replace(BY_NAME["long_causal_window"], q_len=140, kv_len=260)
    with emulating("sm_90", hopper):
        made = scattered(case, torch.bfloat16, "hopper", tile=128)
    assert compare(case, torch.bfloat16, made, True) == []


@pytest.mark.long
def test_the_shortest_tile_rows_come_last(monkeypatch):
    choose(monkeypatch, "at once")
    changes = {"b": 2, "hq": 2, "hk": 1, "q_len": 900, "kv_len": 900}
    with emulating("sm_90", hopper):
        assert wrong("lengths_127_301_causal", **changes) == []


@pytest.mark.parametrize("name", ["score_relative", long("score_bias_rows")])
def test_exact_sums(name, monkeypatch):
    choose(monkeypatch, "at once")
    case = replace(BY_NAME[name], b=1, hq=2, hk=1)
    with emulating("sm_90", hopper) as ran:
        made = run(problem(case, torch.bfloat16), "hopper", True, deterministic=True)
    assert compare(case, torch.bfloat16, made, True) == []
    assert "round_sums" in ran


@pytest.mark.parametrize("widths", [long((128, 128)), (192, 128), long((64, 64))])
def test_stream_k(widths, monkeypatch):
    """Three work tiles for five CTAs, one share of each: of one tile, or of two."""
    choose(monkeypatch, "at once")
    monkeypatch.setattr(stream_k, "MIN_SAVED_BLOCKS", 1)
    parts = torch.full((100_000,), torch.nan)
    monkeypatch.setattr(ForwardPlan, "new_partials", lambda plan: parts[: plan.partials])
    d, dv = widths
    changes = {"b": 1, "hq": 3, "hk": 3, "q_len": 120, "kv_len": 761, "d": d, "dv": dv}
    with emulating("sm_90", hopper), mock.patch.object(launch_plan, "processors", return_value=5):
        assert wrong("lengths_127_301", **changes) == []
    assert not parts[0].isnan()


@pytest.mark.parametrize(("d", "name"), [(128, "alibi"), (64, "steep")])
def test_a_product_adds_a_straight_line(d, name):
    with emulating("sm_90", hopper):
        assert max(straight_line_errors(d, torch.bfloat16, name)) < 8e-3


BROKEN = {
    "fences": (r"^\s*fence\.proxy\.async\.shared::cta;\n", "behind no fence"),
    "waits": (r"^\s*@!complete bra.uni waitLoop;\n", "more arrive|wrong, in"),
    "arrivals": (r"^\s*@%p\d+ mbarrier\.arrive\.shared.*\n", "nobody gets any further"),
    "expected bytes": (r"^\s*@%p\d+ mbarrier\.arrive\.expect.*\n", "nobody gets any further"),
    "waits for stores": (r"^\s*cp\.async\.bulk\.wait_group.*\n", "wrong, in"),
    "waits for products": (r"^\s*wgmma\.wait_group.*\n", "threads of a warp part|nobody waits"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_found(what):
    pattern, said = BROKEN[what]
    without = Without(pattern)
    with emulating("sm_90", hopper, without), pytest.raises(AssertionError, match=said):
        assert wrong("lengths_127_301_causal") == []
    assert without.count


def test_named_barriers_that_are_never_released_are_found():
    without = Without(r"@p bar\.arrive [^;]*;")
    with (
        emulating("sm_90", hopper, without),
        pytest.raises(AssertionError, match="nobody gets any further"),
    ):
        assert wrong("lengths_127_301", d=128, dv=128) == []
    assert without.count
