"""The kernel of inference in Triton's interpreter: the last line printed is {case: what is wrong}.

A process of its own: the interpreter is chosen when Triton is first imported.
"""

import json
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import triton  # noqa: F401  (on the CPU the backend is there for whom loads Triton)
from headway.backends.gpu.inference import config
from headway.types import FLOAT8
from inference import gpu_kernel as kernel
from inference.slot_writes import DTYPES, wrong_float8, wrong_write
from tools.interpreter import quicker

CASES = [
    kernel.masks_and_scores,
    kernel.block_masks,
    *[partial(kernel.groups, n) for n in (5, 8)],
    partial(kernel.groups, 20),  # of few rows, several tiles
    kernel.strides,
    kernel.packed,
    kernel.float8,
    partial(kernel.latent, 3),
    kernel.lengths_change,
    kernel.placement,
]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # NumPy's, of infinities that are meant
    wrong = {}
    for n, case in enumerate(CASES):
        start = time.perf_counter()
        torch.manual_seed(n)
        try:
            with mock.patch.dict(config._TILE_ROWS, {(32, 128): (16,)}):
                error = case(dtype=torch.float32)
            if not error < 1e-5:
                wrong[str(case)] = f"off by {error}"
        except Exception as error:  # noqa: BLE001  (the parent reports it)
            wrong[str(case)] = f"{type(error).__name__}: {error}"
        print(case, f"{time.perf_counter() - start:.1f} s", flush=True)
    numpy_dtypes = [dtype for dtype in DTYPES if dtype != torch.bfloat16]
    for seed in range(30):
        wrong[f"write {seed}"] = wrong_write(seed, numpy_dtypes)
    for dtype in FLOAT8:
        wrong[f"write {dtype}"] = wrong_float8(dtype)
    print(json.dumps({name: error for name, error in wrong.items() if error}))


if __name__ == "__main__":
    with quicker():
        main()
