"""The search for tiles: what is tried, what wins, how it is kept and used."""

import json
from importlib.util import find_spec

import pytest
import torch

import headway as hw
from headway.errors import ArgumentError

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from headway.backends.triton import saved, tuning
from headway.backends.triton.config import Tiling, saved_key, tilings
from headway.cli import tune
from headway.resolve import prepare
from tools.compile_triton import launching

SMALL, LARGE = Tiling(16, 16, 4, 1), Tiling(32, 32, 4, 1)
NO_ROOM = Tiling(128, 128, 4, 4)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    saved.load.cache_clear()
    yield tmp_path / "headway" / "tiles"
    saved.load.cache_clear()


@pytest.fixture(scope="module")
def problem():
    x = torch.randn(1, 2, 64, 16, dtype=torch.bfloat16)
    with launching("sm_90"):
        yield tuning.Problem(*prepare(x, x, x, None, hw.causal(), backend="triton"), x)


def search(problem, monkeypatch, times, tiles=(SMALL, LARGE)):
    """Trials with a timer that knows what it is to find."""
    monkeypatch.setattr(tuning, "candidates", lambda *a: list(tiles))
    clock = iter(times)

    def timer(run):
        run()
        return next(clock)

    return list(tuning.trials(problem, timer))


def test_the_fastest_wins_is_saved_and_goes_first(cache, problem, monkeypatch):
    # forward, dq, dk and dv: the sizes in use, and two others
    tried = search(problem, monkeypatch, [3.0, 2.0, 1.0, 3.0, 1.0, 2.0, 4.5, 5.0, 4.0])
    assert [t.tiling for t in tried if t.tiling in (SMALL, LARGE)] == [SMALL, LARGE] * 3
    best = tuning.winners(problem, tried)
    of = lambda kernel: saved_key(kernel, 16, 16, 16, "masked")
    assert [best[of(k)].tiling for k in problem.kernels] == [LARGE, SMALL, LARGE]
    assert [best[of(k)][1:] for k in problem.kernels] == [(1e3, 3e3), (1e3, 3e3), (4e3, 4.5e3)]
    path = saved.store("a-card", best, {"card": "A card"})
    again = saved.load("a-card")
    assert again == {key: winner.tiling for key, winner in best.items()}
    assert json.loads(path.read_text())["card"] == "A card"
    first, *rest = tilings("forward", 16, 16, 16, "masked", again)
    assert first == LARGE
    assert tuple(rest) == tilings("forward", 16, 16, 16, "plain", {})
    assert tilings("forward", 16, 16, 16, "score", again) == tilings(
        "forward", 16, 16, 16, "score", {}
    )


def test_what_gains_less_than_a_clocks_noise_does_not_win(monkeypatch):
    x = torch.randn(1, 1, 64, 16, dtype=torch.bfloat16)
    with launching("sm_90"):
        call = tuning.Problem(*prepare(x, x, x, backend="triton"), x)
        in_use = call.run_forward().tiling_in_use("forward")
        assert in_use == tilings("forward", 16, 16, 16, "plain", {})[0]
        monkeypatch.setattr(tuning, "candidates", lambda *a: [SMALL, in_use, LARGE])
        clock = iter([1.0, 0.995, 0.992])
        tried = list(tuning.trials(call, lambda run: next(clock), ("forward",)))
    assert [t.tiling for t in tried] == [in_use, SMALL, LARGE]
    assert {w.tiling for w in tuning.winners(call, tried).values()} == {in_use}
    tried[1] = tried[1]._replace(seconds=0.98)
    assert {w.tiling for w in tuning.winners(call, tried).values()} == {SMALL}


def test_tiles_that_do_not_fit_are_no_error(problem, monkeypatch):
    wide = torch.randn(1, 1, 128, 256, dtype=torch.bfloat16)
    call = tuning.Problem(*prepare(wide, wide, wide, backend="triton"), wide)
    monkeypatch.setattr(tuning, "candidates", lambda *a: [NO_ROOM, LARGE])
    tried = list(tuning.trials(call, lambda run: 1.0, ("forward",)))
    assert [t.seconds for t in tried] == [1.0, None, 1.0]


def test_two_searches_keep_what_the_other_found(cache):
    saved.store("a-card", {"a": saved.Winner(SMALL, 1.0, 2.0)}, {})
    saved.store("a-card", {"b": saved.Winner(LARGE, 1.0, 1.0)}, {})
    assert saved.load("a-card") == {"a": SMALL, "b": LARGE}
    assert saved.load("another-card") == {}


def test_a_file_of_an_earlier_version(cache):
    saved.store("a-card", {}, {})
    (cache / "a-card.json").write_text('{"a": [16, 16, 4, 1, 0], "one pass, 16 bits": true}')
    assert saved.load("a-card") == {"a": SMALL}


@pytest.mark.parametrize(
    "text",
    [
        "{", '{"a": 3}', '{"a": [1, 2]}', "[]", '{"tiles": [3]}', '{"a": [24, 16, 4, 1]}',
        '{"a": [16, 16, 3, 1]}', '{"a": [16, 16, 4, 0]}', '{"a": [16, 16, 4, 1, 8]}',
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours(cache, text):
    saved.store("a-card", {}, {})
    (cache / "a-card.json").write_text(text)
    with pytest.raises(ArgumentError, match=r"a-card\.json does not read as tiles .*delete it"):
        saved.load("a-card")
    with pytest.raises(ArgumentError, match="delete it"):  # nor is it overwritten
        saved.store("a-card", {"a": saved.Winner(SMALL, 1.0, 1.0)}, {})


@pytest.fixture
def a_card(monkeypatch):
    """A GPU whose tile sizes nobody has measured."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return torch.device("cuda", 0)


def test_where_tile_sizes_were_measured_is_said(cache, a_card, tmp_path, monkeypatch):
    said = lambda: saved.measured_on(a_card)
    assert said().startswith("not measured on this card; they are those of an H200 (sm_90)")
    assert "headway tune" in said()
    monkeypatch.setattr(saved, "SHIPPED", tmp_path)
    path = saved.store(
        "nvidia-a100-sxm4-80gb", {"a": saved.Winner(SMALL, 1.0, 2.0)}, saved.about(a_card)
    )
    assert "on this model" in said()
    path.rename(tmp_path / "sm_80.json")  # as an owner of the card has sent it
    saved.load.cache_clear()
    assert said() == "found by headway tune on NVIDIA A100-SXM4-80GB"
    assert saved.for_device(a_card) == {"a": SMALL}
    mine = {"a": saved.Winner(LARGE, 1.0, 2.0)}
    saved.store("nvidia-a100-sxm4-80gb", mine, saved.about(a_card))
    assert saved.for_device(a_card) == {"a": LARGE}  # the user's own goes first
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "on this model" in said()
    (cache / "nvidia-a100-sxm4-80gb.json").unlink()
    saved.load.cache_clear()
    assert said() == "measured on an H200"


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (None, "plain"),
        (hw.causal(), "masked"),
        (hw.causal() & hw.document(torch.zeros(1, 64, dtype=torch.int32)), "reading"),
    ],
)
def test_masks_that_read_tensors_are_a_kind_of_their_own(mask, kind):
    """They may have other tiles, and have those of other masks where there are none."""
    x = torch.randn(1, 2, 64, 128, dtype=torch.bfloat16)
    with launching("sm_90"):
        found = tuning.Problem(*prepare(x, x, x, None, mask, backend="triton"), x)
    assert found.key("backward_kv").endswith(kind)
    of = lambda kernel, kind: tilings(kernel, 16, 128, 128, kind, {})[0]
    assert of("backward_kv", "reading") != of("backward_kv", "masked")
    assert of("backward_q", "reading") == of("backward_q", "masked")


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("kernel", tuning._HALF_PRECISION)
@pytest.mark.parametrize("bits", [16, 19, 32])
def test_there_is_something_to_try_at_every_width(kernel, bits, widths):
    found = tuning.candidates(kernel, bits, *widths)
    assert 2 <= len(found) <= 30
    assert len(set(found)) == len(found)


def test_a_machine_with_no_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="sees no GPU"):
        tune.main([])


def test_options_and_folders_that_are_none(cache, a_card, monkeypatch):
    for option in ("--jobs", "--length"):
        with pytest.raises(ArgumentError, match=f"{option} 0 must be an integer, 1 or more"):
            tune.main([option, "0"])
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("a file where the folder should be")
    assert saved.load("a-card") == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ArgumentError, match=r"cannot write to .*XDG_CACHE_HOME"):
        tune.main([])  # before it searches


def test_a_width_that_is_none():
    with pytest.raises(ArgumentError, match=r"--widths '64x': a number, or two"):
        tune._problems(tune.Arguments(widths=("64x",)))
