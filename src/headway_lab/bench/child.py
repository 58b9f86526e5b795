"""Measurements that want a process of their own: peak memory, and a CPU with less in it.

Run as `python -m headway_lab.bench.child`: a question as JSON on standard input, the answer as JSON
on standard output.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from headway.errors import HeadwayError

from .case import Case, make_inputs
from .cases import CASES
from .measure import Truth, build_memory, measure_time
from .results import WRONG, Machine, Result, environment, here
from .timing import peak

# How a CPU is kept from using what it has. Both are needed: PyTorch multiplies half precision by
# oneDNN or by MKL, depending on the layout. Neither changes what `torch.cpu` says of the CPU, so
# the child makes it say the same (`_hide_amx`).
LIMITS = {
    "AVX512_CORE_VNNI": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    }
}


class ChildFailed(HeadwayError, RuntimeError):
    """A measurement in a process of its own ended without an answer."""


def ask(case: Case, device: str, repeats: int, isa: str = "") -> tuple[Machine, list[Result]]:
    """Measure a case in a fresh process, with this process's number of threads."""
    question = {"case": case.name, "device": device, "repeats": repeats, "isa": isa}
    question["threads"] = torch.get_num_threads()
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(question), capture_output=True, text=True,
        env=environment(**LIMITS.get(isa, {})),
    )  # fmt: skip
    if process.returncode != 0:
        last_line = process.stderr.strip().splitlines()[-1:] or ["nothing on standard error"]
        raise ChildFailed(
            f"{case.name}: the process that measured it ended with {process.returncode}: "
            f"{last_line[0]}"
        )
    answer = json.loads(process.stdout)
    return Machine(**answer["machine"]), [Result(**result) for result in answer["results"]]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Measure the case of a question, in the fresh process."""
    torch.set_num_threads(question["threads"])
    if question["isa"]:
        _hide_amx()
    case = next(case for case in CASES if case.name == question["case"])
    if case.measure in MEMORY:
        results = [MEMORY[case.measure](case, question["device"])]
    else:
        results = measure_time(case, question["device"], question["repeats"])
    machine = here(question["device"], question["isa"])
    return {"machine": asdict(machine), "results": [asdict(result) for result in results]}


def _hide_amx() -> None:
    torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]


def memory(case: Case, device: str) -> Result:
    """Measure the peak memory of inputs, forward and backward, above that of the imports.

    It is checked afterwards, since the check takes memory too; a wrong result has no figure.
    """
    result = Result(case.name, "forward + backward", "headway", unit="MB", runs=1)
    before = peak(device)
    inputs = make_inputs(case, device)
    torch.autograd.grad(
        inputs.headway(), (inputs.q, inputs.k, inputs.v, *inputs.learned), inputs.dout
    )
    used_mb = (peak(device) - before) / 1e6
    errors = Truth(case, inputs).errors(inputs.headway, backward=True)
    worst = max(errors, key=lambda e: e.error / e.limit if e.passed else float("inf"))
    result = replace(result, error=worst.error, limit=worst.limit)
    if not all(e.passed for e in errors):
        return replace(result, verdict=WRONG, note=f"{worst.what} is wrong")
    result = replace(
        result, median=round(used_mb, 1), note=f"{before / 1e6:.0f} MB before, after the imports"
    )
    if case.most is None:
        return result
    return result.asked(f"<= {case.most:g} MB", used_mb <= case.most)


MEMORY: dict[str, Callable[[Case, str], Result]] = {
    "memory": memory,
    "block mask, memory": build_memory,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(json.load(sys.stdin))))
