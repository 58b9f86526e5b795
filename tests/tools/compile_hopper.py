"""Compile what a call would launch on an H100, with no GPU: registers, spills, matrix instructions.

`python tests/tools/compile_hopper.py forward 128/128 causal` prints a line of JSON for each kernel: the name,
`unwritten` (reads of registers that nothing wrote), `in_flight` (registers touched before the product that
has them is waited for), `early` (arrivals before what was loaded is there), `registers`, `spills` (bytes stored), `loops`
(accesses to local memory inside the loops that multiply), `loop` and `masked` (instructions of the
shortest and of the longest of these: a block without a mask, and one with it), `hgmma`, `shared`
(bytes), `serialized`, where the assembler gave up asynchrony, `twice`: how many times a number is
added to memory once more; `fences` that are for all kinds of memory, and so wait for the whole GPU.

The real launching code runs on tensors on the CPU, with a driver that only names the target; every
launch is compiled, and none runs.
"""

import json
import re
import sys
from pathlib import Path
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

import headway as hw
from headway import backends
from headway.backends import hopper
from headway.backends.gpu.runtime import call_plan, parallel_compile
from headway.backends.hopper import launch_plan
from headway.resolve import prepare
from headway.types import Coords
from tools.assembler import assembled, up_to_ptx
from tools.sass import early, in_flight, loops, products, spilled, unwritten

LENGTH = 384


def _table(*size: int) -> torch.Tensor:
    return torch.rand(size).requires_grad_()


IDS = torch.arange(2 * LENGTH).reshape(2, LENGTH) // 100
DENSE = torch.rand(4, LENGTH, LENGTH) < 0.5
BIAS, LEARNED, GAIN, ONE = _table(4, LENGTH, 1), _table(4, LENGTH), _table(), _table(1)
KEYS, QUERIES = torch.rand(4, LENGTH), torch.rand(4, LENGTH)
CALLS = {
    "plain": {},
    "f16": {"dtype": torch.float16},
    "causal": {"mask": hw.causal()},
    "window": {"mask": hw.causal() & hw.sliding_window(100)},
    "document": {"mask": hw.causal() & hw.document(IDS)},
    "dense": {"mask": lambda b, h, i, j: DENSE[h, i, j]},
    "alibi": {"score": hw.alibi(torch.rand(4)), "mask": hw.causal()},
    "slanted": {"score": lambda s, b, h, i, j: 1.1 * s + 0.01 * (j - i)},
    "softcap": {"score": hw.softcap(30.0), "mask": hw.causal()},
    "relative": {"score": hw.relative_bias(_table(4, 2 * LENGTH - 1))},
    "rows": {"score": lambda s, b, h, i, j: s + BIAS[h, i, 0]},
    "columns": {"score": lambda s, b, h, i, j: s + LEARNED[h, j]},
    "numbers": {"score": lambda s, b, h, i, j: s * GAIN.exp() + GAIN * LEARNED[h, i]},
    "cancelled": {
        "score": lambda s, b, h, i, j: s * ONE[i * 0] + ONE[(j - i) * 0] + LEARNED[h, i + j - i]
    },
    "keys": {"score": lambda s, b, h, i, j: s + KEYS[h, j] - QUERIES[h, i]},
    "ragged": {"mask": hw.causal(), "length": LENGTH - 5},
    "equal_heads": {"mask": hw.causal(), "heads": 4},
    "by_head": {"mask": lambda b, h, i, j: (i >= j) & (i - j < 90 * (h + 1))},
    "short": {"mask": hw.causal(), "length": 100},
    "long": {"mask": hw.causal(), "length": 2048},
    "long_plain": {"length": 2048},
    "shared": {"length": 2048, "batch": 1},
    "band": {"mask": hw.causal() & hw.sliding_window(256), "length": 2048},
    "longest": {"mask": hw.causal(), "length": 8192},
    "in_tiles": {"mask": hw.causal() & hw.sliding_window(256), "length": 2048, "in_tiles": True},
    "sink": {"mask": hw.causal(), "sink": True},
    "in_turn": {"mask": hw.causal(), "deterministic": True},
    "many": {"mask": hw.causal(), "heads": 4, "batch": 33},
    "entropy": {"mask": hw.causal(), "length": 2048, "entropy": True},
    "entropy_many": {
        "score": hw.softcap(30.0),
        "mask": hw.causal(),
        "sink": True,
        "entropy": True,
        "batch": 33,
        "deterministic": True,
    },
    "entropy_learned": {"score": lambda s, b, h, i, j: s + LEARNED[h, j], "entropy": True},
    "entropy_document": {"mask": hw.causal() & hw.document(IDS), "entropy": True},
    "entropy_dropout": {"mask": hw.causal(), "length": 2048, "entropy": True, "dropout": 0.1},
    "dropout": {"mask": hw.causal(), "length": 2048, "dropout": 0.1},
}


class _Driver:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 1090  # no other driver's: what Triton has compiled it keeps by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(direction: str, d: int, dv: int, name: str) -> list[tuple]:
    """(kernel's name, compiled) of the launches of a call."""
    found: list[tuple] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        if warmup:  # before it is launched
            return
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.__name__, made))
        # What a launch would compile, by versions that do: it takes apart all the kernel is given.
        source = made.src if hasattr(made, "src") else None
        make_launcher = getattr(nvidia, "make_launcher", None)
        if source is not None and make_launcher is not None:
            constants = {
                k if isinstance(k, tuple) else (k,): v for k, v in source.constants.items()
            }
            metas = getattr(made.metadata, "tensordesc_meta", None)
            make_launcher(constants, dict(enumerate(source.signature.values())), metas)

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(backends, "_SELF_TESTED", ()),
        mock.patch.object(hopper, "unavailable", return_value=""),
        mock.patch.object(launch_plan, "processors", return_value=132),
        mock.patch.object(parallel_compile, "compile_in_parallel"),  # which loads what it compiles
        mock.patch.object(driver, "_active", _Driver()),
        up_to_ptx(),
    ):
        call_plan.clear()
        _call(direction, d, dv, **CALLS[name])
        call_plan.clear()
    return found


def _call(direction, d, dv, score=None, mask=None, dtype=torch.bfloat16, length=LENGTH, heads=2,
          batch=2, sink=False, deterministic=False, in_tiles=False, dropout=0.0, entropy=False):  # fmt: skip
    shapes = (4, d), (heads, d), (heads, dv)
    q, k, v = (torch.randn(batch, h, length, w).to(dtype) for h, w in shapes)
    sink = torch.zeros(4) if sink else None
    at = torch.arange(length)
    coords = Coords(q_pos=at, kv_pos=at, straight_below=length) if in_tiles else None
    spec, call = prepare(
        q, k, v, score, mask, sink=sink, backend="hopper", max_logit=sink is not None,
        deterministic=deterministic, keys=coords, dropout=dropout, seed=7, entropy=entropy,
    )  # fmt: skip
    if direction == "forward":
        hopper.forward(spec, call)
        return
    rows, dout = torch.zeros(q.shape[:3]), torch.zeros(batch, 4, length, dv).to(dtype)
    out = dout.to(spec.out_dtype(dtype))
    needs = tuple(t.requires_grad for t in call.captured.tensors[: spec.score_tensors])
    hopper.backward(spec, call, out, rows, dout, rows, needs, rows if entropy else None)


def resources(name: str, made) -> dict:
    """What the assembler says of a kernel."""
    report, code = assembled(made)
    bodies = loops(code)
    return {
        "name": name,
        "unwritten": unwritten(code),
        "in_flight": in_flight(code),
        "early": early(code),
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spills": int(re.search(r"(\d+) bytes spill stores", report)[1]),
        "loops": spilled(code),
        "loop": min(map(len, bodies), default=0),
        "masked": max(map(len, bodies), default=0),
        "hgmma": products(code),
        "shared": made.metadata.shared,
        # All but C7519, which adds an arrive.
        "serialized": len(re.findall(r"C75(?!19)\d\d", report)),
        "twice": twice(made.asm["ptx"]),
        "idle": _idle(made.asm["ptx"]),
        "fences": len(re.findall(r"fence\.proxy\.async;", made.asm["ptx"])),
    }


def twice(ptx: str) -> int:
    """How many numbers are added to memory once more."""
    added = re.findall(r"(@\S+) atom\.global\S*\.add\.f32 \S+ \[ (\S+) \+ 0 \], (\S+);", ptx)
    return len(added) - len(set(added))


def _idle(ptx: str) -> list[int]:
    """Where barriers stand in shared memory that are made and never used."""
    place = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    made = {int(place[r]) for r in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx) if r in place}
    others = re.sub(r"mbarrier\.init.*", "", ptx)
    used = {int(place[r]) for r in re.findall(r"\[(%r\d+)\]", others) if r in place}
    # Of a ring with several stages the first one may be used alone, plus what is not known.
    return sorted(x for x in made if x not in used and x - 8 not in made)


def report(direction: str, widths: str, *names: str) -> list[dict]:
    """What the assembler says of the kernels of a direction, call by call."""
    d, dv = map(int, widths.split("/"))
    return [
        {"call": name, **resources(kernel, made)}
        for name in names
        for kernel, made in compiled(direction, d, dv, name)
        if kernel.startswith(direction)
    ]


if __name__ == "__main__":
    for found in report(*sys.argv[1:]):
        print(json.dumps(found), flush=True)
