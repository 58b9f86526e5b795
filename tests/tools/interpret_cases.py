"""Run a part of the small cases in Triton's interpreter: `interpret_cases.py PART PARTS`.

The last line printed is {case: what is wrong}.
"""

import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import ragged
import triton  # noqa: F401  (on the CPU the backend is there for whom loads Triton)
from attention import test_expect
from cases import BY_NAME, Case
from checks import check
from flash_rounding import farther_than_flash
from headway.backends.gpu.runtime.call_plan import clear
from headway.backends.triton import main_loop, plan
from learned import SMALL, errors
from tools.guard_bands import guarded
from tools.interpreter import quicker

# Small ones that give every part of the kernels work: tails, pieces of a width, groups of heads,
# runs of full and partial tiles, each way to add up a gradient, strides, dropout.
CASES = (
    "length_1", "length_65_causal", "width_40_40_score", "layout_strided", "dropout_0.1_all",
    "mask_no_row_sink", "mask_document_cross", "score_twice", "score_bias_rows",
    "score_bias_number", "score_outside", "score_walls", "score_ends", "score_added", "score_cancelled", "width_3_5",
    "long_checker",
)  # fmt: skip
HALF = "score_relative"  # the interpreter, which is NumPy, has no bfloat16
PACKED = {"score_bias_rows": "varlen", "mask_by_batch_sink": "jagged"}  # sequences of a row
ENTROPY = ("length_65_causal", "score_twice", "mask_no_row_sink", "width_3_5", "dropout_0.1_all")
PAST_THE_END = ("dropout_0.1_all", 70)  # a length: a program of the backward has no query
OTHERWISE = ("length_65_causal", "width_40_40_score", "long_checker")  # tails, groups, pieces, runs


def main(part: int, parts: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # NumPy's, of infinities that are meant
    wrong = otherwise(OTHERWISE[part::parts])
    calls = [(name, torch.float32, False) for name in CASES[part::parts]]
    calls += [(name, torch.float32, True) for name in ENTROPY[part::parts]]
    if part == parts - 1:  # it has fewer cases
        calls.append((HALF, torch.float16, True))
        wrong |= learned(torch.float16) | expectations()
        wrong |= farther_than_flash(torch.float16, "triton", seed=1)
    for name, dtype, entropy in calls:
        case = replace(few_heads(name), entropy=entropy)
        if name == PAST_THE_END[0]:
            case = replace(case, q_len=PAST_THE_END[1], kv_len=PAST_THE_END[1])
        start = time.perf_counter()
        try:
            check(case, "triton", dtype)
        except Exception as error:  # noqa: BLE001  (the parent reports it)
            wrong[case.name] = f"{type(error).__name__}: {error}"
        print(case.name, f"{time.perf_counter() - start:.1f} s", flush=True)
    for name, form in list(PACKED.items())[part::parts]:
        case = replace(few_heads(name), b=2)
        if lines := ragged.wrong(case, torch.float32, "triton", form):
            wrong[f"{case.name}, {form}"] = "\n".join(lines)
    print(json.dumps(wrong))


def learned(dtype: torch.dtype) -> dict[str, str]:
    """Gradients of numbers in half precision, next to those where out is float32."""
    found = {str(how): errors(how, dtype, "triton") for how in SMALL}
    return {name: f"{both}" for name, both in found.items() if both[0] > 2 * both[1]}


def expectations() -> dict[str, str]:
    """Means of functions of the pair, and their gradients."""
    try:
        with guarded():
            test_expect.small("triton", torch.float32, 1e-5)
            test_expect.test_a_function_that_is_infinite_at_masked_pairs("triton", torch.float32)
    except Exception as error:  # noqa: BLE001
        return {"expect": f"{type(error).__name__}: {error}"}
    return {}


def few_heads(name: str) -> Case:
    """The case with two query heads over one of keys: the interpreter's time goes by programs."""
    return replace(BY_NAME[name], b=1, hq=2, hk=1)


def otherwise(names: tuple[str, ...]) -> dict[str, str]:
    """The backward in three kernels, and runs of full tiles in one loop, whatever the
    tables and the mask say; between guard bands."""
    wrong = {}
    three = "backward_q", "backward_k", "backward_v"
    for module, how in (
        (plan, {"passes": lambda *size: three}),
        (main_loop, {"scattered": lambda *of: True}),
    ):
        clear()
        with mock.patch.multiple(module, **how):
            for name in names:
                try:
                    with guarded():
                        check(few_heads(name), "triton", torch.float32)
                except Exception as error:  # noqa: BLE001
                    wrong[f"{name}, {[*how]}"] = f"{type(error).__name__}: {error}"
    clear()
    return wrong


if __name__ == "__main__":
    with quicker():
        main(int(sys.argv[1]), int(sys.argv[2]))
