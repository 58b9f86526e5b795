"""Self-test a backend before its first use on a GPU, and refuse it if a result is wrong.

Compilers miscompile, experimental ones more often than others, and kernels that are right with one
version of Triton, its assembler and the driver may be wrong with the next. The self-test is a small
case (causal, bfloat16, an odd length, two query heads over one key head; forward and backward),
compared with the definition in float64.

It takes the time to compile its kernels, which compile beside those of the caller's call. A pass is
recorded on disk beside the kernels, with everything that it depends on (`SelfTested.proof`), so
processes to which all of that applies skip the test. A failure is not recorded: the next process
tests again.
"""

import math
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..mods import causal, lower_mod
from ..types import Captured, Coords, Spec
from .base import Backend, Call
from .records import Record

_LENGTH, _WIDTH = 645, 128  # longer than what kernels for short rows take
_TOLERANCE = 2.0**-6  # of a row; bfloat16 rounds by 2^-9
_PASS = "right"

_verdicts: dict[tuple[str, torch.device], str] = {}
_lock = threading.Lock()


class SelfTested(Backend, Protocol):
    """A backend that is self-tested before its first use."""

    def proof(self, device: torch.device) -> tuple[Path, dict[str, str]] | None:
        """Return the folder of recorded passes; and by name all that a pass on this GPU depends on:
        the GPU, the driver, the compilers, the sources. Return None if one of them is unknown.
        """
        ...

    def compile_ahead(self, spec: Spec, call: Call) -> None:
        """Begin to compile the kernels of a call, and of its backward, if there will be one."""
        ...


def failure_reason(
    tested: SelfTested, trusted: Backend, device: torch.device,
    precompile: Callable[[], object] | None = None,
) -> str:  # fmt: skip
    """Return why a backend is wrong on a GPU; empty if it is right.

    The test runs in a thread of its own, which no mode of the caller (autocast, fake tensors, a
    tracing compiler, inference mode) reaches. It cannot run while a CUDA graph is being captured:
    the backend is then refused, and tested at the next call.

    - `precompile`: begins to compile what the caller needs next. If the test has to run, it is
      called in that thread, in the caller's stream.
    """
    key = tested.name, device
    verdict = _verdicts.get(key)
    if verdict is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return (
                "its first use runs a self-test, which a CUDA graph that is being "
                "captured does not allow: make the call once before"
            )
        with _lock:  # another thread may have tested it
            verdict = _verdicts.get(key)
            if verdict is None:
                stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
                with ThreadPoolExecutor(1) as pool:
                    test_args = tested, trusted, device, stream, precompile
                    verdict = pool.submit(_verdict, *test_args).result()
                _verdicts[key] = verdict
    return verdict


def has_verdict(tested: SelfTested, device: torch.device) -> bool:
    """Return whether the verdict on a backend on this GPU is known."""
    return (tested.name, device) in _verdicts


def forget() -> None:
    """Drop all verdicts: the next use tests again, or reads the recorded pass again."""
    _verdicts.clear()


def _verdict(
    tested: SelfTested, trusted: Backend, device: torch.device, stream: Any,
    precompile: Callable[[], object] | None,
) -> str:  # fmt: skip
    """Run the test, unless a pass is recorded, and return what is wrong."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        record = _record_of_pass(tested, device)
        if record is not None and record.read() == _PASS:
            return ""
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if precompile is not None:
                with suppress(Exception):  # the caller's call raises it
                    precompile()
            failures = differences(tested, trusted, device)
        if not failures and record is not None:
            record.write(_PASS)
    except torch.OutOfMemoryError:
        raise  # the kernels may be right
    except Exception as error:  # noqa: BLE001  (any error of a compiler is a reason)
        message = str(error).strip().partition("\n")[0]
        failures = [f"{type(error).__name__}: {message}"]
    if not failures:
        return ""
    return (
        "a small case that is checked at its first use came out wrong "
        f"({', '.join(failures)}) with {_versions(device)}: please report it; backend='triton' "
        "runs the same calls"
    )


def _record_of_pass(tested: SelfTested, device: torch.device) -> Record | None:
    """Return the record of a pass on such a GPU, with all that this depends on; None for a backend
    that does not know its dependences (`SelfTested.proof`)."""
    proof = None
    with suppress(Exception):  # without a proof the test runs
        proof = tested.proof(device)
    if proof is None:
        return None
    folder, facts = proof
    source = sha256(Path(__file__).read_bytes()).hexdigest()
    return Record(
        folder, {"right": tested.name, "PyTorch": torch.__version__, "check": source, **facts}
    )


def differences(tested: Backend, trusted: Backend, device: torch.device) -> list[str]:
    """Return the results of the small case that differ by more than bfloat16's rounding. The
    definition is computed on the CPU while kernels compile."""
    with ThreadPoolExecutor(1) as pool:
        expected_results = pool.submit(_results, trusted, torch.device("cpu"))
        results, expected = _results(tested, device), expected_results.result()
    failures = []
    for name, expected_result in expected.items():
        error = _row_error(results[name].cpu(), expected_result)
        limit = 1e-3 if name == "lse" else _TOLERANCE
        if not error <= limit:  # NaN is wrong as well
            failures.append(f"{name} is off by {error:.1e} where {limit:.1e} would be rounding")
    return failures


def _row_error(result: Tensor, expected: Tensor) -> float:
    """Return the largest error of a row, relative to the norm of that row plus the mean norm."""
    result, expected = result.double(), expected.double()
    if result.shape != expected.shape:
        return math.inf
    if result.dim() == 3:  # a number per row
        result, expected = result[..., None], expected[..., None]
    row_norm = expected.norm(dim=-1)
    return ((result - expected).norm(dim=-1) / (row_norm + row_norm.mean())).max().item()


def _results(backend: Backend, device: torch.device) -> dict[str, Tensor]:
    """Return the results of the small case; not rounded, if the backend computes in float64."""
    spec, call, dout, dlse = case(backend, device)
    with torch.no_grad():
        out, lse, *_ = backend.forward(spec, call)
        dq, dk, dv, *_ = backend.backward(spec, call, out, lse, dout, dlse, ())
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def case(backend: Backend, device: torch.device) -> tuple[Spec, Call, Tensor, Tensor]:
    """Return the small case, and the gradients of out and of lse."""
    in_float64 = backend.accumulates(torch.bfloat16) == torch.float64
    mask, (_, ints, _) = _causal_mask()
    spec = Spec(1 / math.sqrt(_WIDTH), mask=mask, partial=in_float64, backend=backend.name)
    generator = torch.Generator(device="cpu").manual_seed(0)
    float32_on_cpu: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    q, k, v, dout = (
        torch.randn(1, heads, _LENGTH, _WIDTH, generator=generator, **float32_on_cpu).bfloat16()
        for heads in (2, 1, 1, 2)
    )
    # The last queries have much larger logits at the first keys, so that sums are rescaled.
    q[:, :, 512:] += 2.0
    k[:, :, :128] += 0.32
    dlse = torch.randn(1, 2, _LENGTH, generator=generator, **float32_on_cpu)
    q, k, v, dout, dlse = (tensor.to(device) for tensor in (q, k, v, dout, dlse))
    q.requires_grad_()  # so that the kernels of both directions are compiled in parallel
    return spec, Call(q, k, v, None, None, Captured([], ints, []), None, Coords()), dout, dlse


@lru_cache(maxsize=1)
def _causal_mask() -> tuple[str, Captured]:
    graph, captured = lower_mod("mask", causal(), torch.float32)
    return graph.text, captured


def _versions(device: torch.device) -> str:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    triton = getattr(sys.modules.get("triton"), "__version__", "that did not load")
    return f"Triton {triton}, PyTorch {torch.__version__}, {card}"
