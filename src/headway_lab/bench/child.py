"""Measurements that want a process of their own: peak memory, and a CPU with less in it.

Run as `python -m headway_lab.bench.child`: a question as JSON on standard input, the answer as JSON
on standard output.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from .case import BOTH, Case, make_inputs
from .cases import CASES
from .measure import Truth, build_memory, measure_time
from .results import ChildFailed as ChildFailed
from .results import Machine, Result, ask_process, here
from .timing import peak

# How a CPU is kept from using what it has. Both are needed: PyTorch multiplies half precision by
# oneDNN or by MKL, depending on the layout. Neither changes what `torch.cpu` says of the CPU, so
# the child makes it say the same.
LIMITS = {
    "AVX512_CORE_VNNI": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    }
}


def ask(case: Case, device: str, repeats: int, isa: str = "") -> tuple[Machine, list[Result]]:
    """Measure a case in a fresh process, with this process's number of threads."""
    question = {"case": case.name, "device": device, "repeats": repeats, "isa": isa}
    question["threads"] = torch.get_num_threads()
    try:
        answer = ask_process(["-m", __name__], question, **LIMITS.get(isa, {}))
    except ChildFailed as error:
        raise ChildFailed(f"{case.name}: {error}") from None
    return Machine(**answer["machine"]), [Result(**result) for result in answer["results"]]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Measure the case of a question, in the fresh process."""
    torch.set_num_threads(question["threads"])
    if question["isa"]:
        torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]
    case = next(case for case in CASES if case.name == question["case"])
    if case.measure in MEMORY:
        results = [MEMORY[case.measure](case, question["device"])]
    else:
        results = measure_time(case, question["device"], question["repeats"])
    machine = here(question["device"], question["isa"])
    return {"machine": asdict(machine), "results": [asdict(result) for result in results]}


def memory(case: Case, device: str) -> Result:
    """Measure the peak memory of inputs, forward and backward, above that of the imports.

    It is checked afterwards, since the check takes memory too; a wrong result has no figure.
    """
    before = peak(device)
    inputs = make_inputs(case, device)
    inputs.grads(inputs.headway())
    used = peak(device) - before
    note = f"{before / 1e6:.0f} MB before, after the imports"
    result = Result(case.name, BOTH, "headway", runs=1, note=note)
    result = result.checked(Truth(case, inputs).errors(inputs.headway, backward=True))
    return result if result.verdict else result.used(used).at_most(case.most)


MEMORY: dict[str, Callable[[Case, str], Result]] = {
    "memory": memory,
    "block mask, memory": build_memory,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(json.load(sys.stdin))))
