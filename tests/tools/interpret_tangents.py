"""Run a part of the small cases with tangents in Triton's interpreter: `interpret_tangents.py PART PARTS`.

The last line printed is {case: what is wrong}. Each mutant of the kernel must be found by its case.
"""

import importlib.util
import json
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import triton  # noqa: F401  (on the CPU the backend is there for whom loads Triton)
from attention import test_expect, test_tangent
from cases import BY_NAME, Case, problem
from headway.backends.gpu.runtime.call_plan import clear
from headway.backends.triton import kernel_tangent, launch, main_loop
from headway.resolve import prepare
from headway.types import Dual, Tangents
from tangents import compare, dense, directions, moved_alike, rounded, run, too_far
from tools.guard_bands import guarded
from tools.interpreter import quicker

# Small ones that give every part of the kernel work, as in `interpret_cases.py`.
CASES = (
    "length_1", "length_65_causal", "width_40_40_score", "layout_strided", "dropout_0.1_all",
    "mask_no_row_sink", "mask_document_cross", "score_twice", "score_bias_rows",
    "score_bias_number", "score_outside", "score_walls", "score_ends", "score_added",
    "score_cancelled", "width_3_5", "long_checker", "heads_6_2_score",
)  # fmt: skip
HALF = "score_relative"  # the interpreter, which is NumPy, has no bfloat16
SHARED = (
    test_tangent.test_a_pair_that_is_not_kept_counts_nothing,
    test_tangent.test_rows_keep_their_own_nan,
    test_tangent.test_rows_that_see_nothing_do_not_move,
    test_tangent.test_empty_shapes,
    test_expect.test_forward_mode,
)
MOVING = "q", "k", "v", "sink", "q k", "q v", "k v", "slopes", ""
# What is replaced in the kernel, by what, and the case that finds it.
MUTANTS = {
    "S' is not scaled": ("s_tangent * mods.scale", "s_tangent", "length_65_causal"),
    "out does not move where the mean does": (
        "        acc_tangent = minus_times(acc_tangent, acc, step[:, None])\n", "", "lengths_65_255"
    ),
    "the mean is not rescaled by l": (
        "tl.sum(p_tangent, 1) * reciprocal(softmax.l)", "tl.sum(p_tangent, 1)", "length_65_causal"
    ),
    "out' is not rescaled": (
        "acc_tangent = tile.times(sums.acc, rescale[:, None])", "acc_tangent = sums.acc",
        "lengths_65_255",
    ),
    "out' moves by the out of before": (
        "minus_times(acc_tangent, acc, step", "minus_times(acc_tangent, softmax.acc, step",
        "std_5_long",
    ),
    "the sink does not move": (
        "t_tangent = tl.load(sink_tangent + h).to(tl.float32)", "t_tangent = 0.0",
        "mask_padding_sink",
    ),
    "the sink takes nothing of the mean": (
        "step = p_tangent * reciprocal(softmax.l)", "step = p * t_tangent",
        "mask_tree_sink",
    ),
    "dropped pairs move out": (
        "p_tangent = tl.where(keep, p_tangent, 0.0)", "p_tangent = p_tangent", "dropout_0.1_all"
    ),
    "the heads of k' are those of q'": (
        "tile.head(k_tangent, k_tangent_strides, b64, h64 // group)",
        "tile.head(k_tangent, k_tangent_strides, b64, h64 // group * 0)", "heads_6_2",
    ),
    "v' is dropped out of nothing": (
        "acc_tangent = tile.add_product(acc_tangent, p, v_tangent",
        "acc_tangent = tile.add_product(acc_tangent, p, v_tile", "length_65_causal",
    ),
    "the score's T' is S'": ("t, t_tangent = CONFIG.score(", "t, _ = CONFIG.score(", "score_twice"),
}  # fmt: skip


def main(number: int, parts: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # NumPy's, of infinities that are meant
    checks = {
        name: lambda name=name, n=n: right(replace(few_heads(name), entropy=n % 2), torch.float32)
        for n, name in enumerate(CASES)
    }
    checks[HALF] = lambda: right(few_heads(HALF), torch.float16)
    checks |= {f"moving: {names}": lambda names=names: moving(names) for names in MOVING}
    checks |= {f"mutant: {what}": lambda what=what: found(*MUTANTS[what]) for what in MUTANTS}
    checks |= {of.__name__: of for of in (keys_alike, one_loop)}
    checks |= {of.__name__: partial(of, backend="triton") for of in SHARED}
    merges = test_tangent.test_parts_over_disjoint_keys_merge
    checks["parts"] = partial(merges, "mask_padding_sink", "triton")
    wrong = {}
    for name, of in list(checks.items())[number::parts]:
        start = time.perf_counter()
        try:
            of()
        except Exception as error:  # noqa: BLE001  (the parent reports it)
            wrong[name] = f"{type(error).__name__}: {error}"
        print(name, f"{time.perf_counter() - start:.1f} s", flush=True)
    print(json.dumps(wrong))


def few_heads(name: str) -> Case:
    """The case with two query heads over one of keys: the interpreter's time goes by programs."""
    case = BY_NAME[name]
    return case if name.startswith("heads") else replace(case, b=1, hq=2, hk=1)


def right(case: Case, dtype: torch.dtype, names: tuple[str, ...] | None = None) -> None:
    given = problem(case, dtype)
    along = directions(given, names)
    dual = run(given, along, "triton", max_logit=True, row_max=True)
    exact = dense(given.copy(torch.float64), {name: t.double() for name, t in along.items()})
    compare(dual, exact, 3e-5 if dtype == torch.float32 else 2e-2)
    wrong = too_far(dual, given, along)
    assert not wrong, wrong


def moving(names: str) -> None:
    """What does not move has no product."""
    case = Case(
        "moving", score="alibi_learned", mask="causal", sink=True, b=1, hq=2, hk=1, entropy=True
    )
    given = problem(case, torch.float32)
    right(case, torch.float32, tuple(given.learned() if names == "slopes" else names.split()))
    if names in MOVING[:3]:
        right(replace(case, score=None), torch.float32, (names,))


def found(old: str, new: str, name: str) -> None:
    """A kernel with a fault does not pass."""
    with broken((old, new)):
        try:
            right(few_heads(name), torch.float32)
        except AssertionError:
            return
    raise AssertionError("it passes")


@contextmanager
def broken(*edits: tuple[str, str]):
    """Inside, the kernel is one in whose text something is replaced."""
    text = Path(kernel_tangent.__file__).read_text()
    for old, new in edits:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "broken_tangent.py")
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("headway.backends.triton.broken", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        clear()
        with mock.patch.object(launch, "tangent_kernel", module.tangent):
            yield
        clear()


def keys_alike() -> None:
    """The mean of T' is not rounded with P T'. Subtracted at the end, its roundings are all that is
    left."""
    inputs, along = moved_alike(100.0, torch.float16)
    exact, near = (rounded(inputs, along, factors) for factors in (None, torch.float16))
    error = lambda x: ((x.double() - exact).abs().max() / exact.abs().max()).item()

    def computed() -> Dual:
        spec, call = prepare(*inputs.values(), backend="triton", partial=True)  # in float32
        return launch.tangent(spec, call, Tangents(*along.values(), None, ()))

    assert error(computed().out_tangent) <= 1.5 * error(near)
    moves = "        acc_tangent = minus_times(acc_tangent, acc, step[:, None])\n"
    with broken(
        ("p_tangent = p_tangent - p * step[:, None]", "p_tangent = p * t_tangent"), (moves, "")
    ):
        wrong = computed()
    at_the_end = wrong.out_tangent.double() - wrong.lse_tangent[..., None] * wrong.out.double()
    assert error(at_the_end) > 20 * error(near), (error(at_the_end), error(near))


def one_loop() -> None:
    """Runs of full tiles in one loop, whatever the mask says; between guard bands."""
    clear()
    with mock.patch.object(main_loop, "scattered", return_value=True), guarded():
        right(few_heads("long_checker"), torch.float32)
        right(few_heads("width_40_40_score"), torch.float32)
    clear()


if __name__ == "__main__":
    with quicker():
        main(int(sys.argv[1]), int(sys.argv[2]))
