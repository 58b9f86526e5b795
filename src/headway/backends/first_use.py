"""A backend's first use on a card: a small case is compared with the definition.

Compilers miscompile, experimental ones more often than others, and kernels that are right with one
version of Triton, its assembler and the driver may be wrong with the next. So such a backend
computes a small case before its first use on a card (causal, bfloat16, an odd length, two query
heads over one key head; forward and backward), which is compared with the definition in float64.

This takes the time to compile its kernels, which are compiled side by side with those of the call
that is to come. That it came out right is written down beside the kernels, with everything that it
depends on (`Checked.proof`); processes to which all of that applies do not compute it again. What
came out wrong is not written down: the next process checks again.
"""

import json
import math
import os
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

_LENGTH, _WIDTH = 645, 128  # longer than what kernels for short rows take
_TOLERANCE = 2.0**-6  # of a row; bfloat16 rounds by 2^-9

_verdicts: dict[tuple[str, torch.device], str] = {}
_lock = threading.Lock()


class Checked(Backend, Protocol):
    """A backend that is checked at its first use."""

    def proof(self, device: torch.device) -> tuple[Path, dict[str, str]] | None:
        """The folder where it is written down that the check on a card came out right; and by name
        all that this depends on: the card, the driver, the compilers, the sources. None where one
        of them is not known.
        """
        ...

    def compile_ahead(self, spec: Spec, call: Call) -> None:
        """Begin to compile the kernels of a call, and of its backward, if there will be one."""
        ...


def why_not(
    tested: Checked, trusted: Backend, device: torch.device,
    meanwhile: Callable[[], object] | None = None,
) -> str:  # fmt: skip
    """What is wrong with a backend on a card; empty if nothing is.

    The case runs in a thread of its own, which no mode of the caller's (autocast, fake tensors, a
    tracing compiler, inference mode) reaches. It cannot run while a CUDA graph is being captured:
    the backend is then refused this time, and checked the next time.

    - `meanwhile`: begins to compile what the caller needs next. It is called in that thread, in the
      caller's stream, if the case has to be computed.
    """
    key = tested.name, device
    found = _verdicts.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return (
                "its first use is checked on a small case, which a CUDA graph that is being "
                "captured does not allow: make the call once before"
            )
        with _lock:  # another thread may have been faster
            found = _verdicts.get(key)
            if found is None:
                stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
                with ThreadPoolExecutor(1) as pool:
                    given = tested, trusted, device, stream, meanwhile
                    found = pool.submit(_verdict, *given).result()
                _verdicts[key] = found
    return found


def is_settled(tested: Checked, device: torch.device) -> bool:
    """Whether a backend was checked on a card."""
    return (tested.name, device) in _verdicts


def forget() -> None:
    """Check every backend again at its next use, or read again that it was."""
    _verdicts.clear()


def _verdict(
    tested: Checked, trusted: Backend, device: torch.device, stream: Any,
    meanwhile: Callable[[], object] | None,
) -> str:  # fmt: skip
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        kept = _Kept(tested, device)
        if kept.says_right():
            return ""
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if meanwhile is not None:
                with suppress(Exception):  # the call raises it
                    meanwhile()
            wrong = differences(tested, trusted, device)
        if not wrong:
            kept.write()
    except torch.OutOfMemoryError:
        raise  # it says nothing about the kernels
    except Exception as error:  # noqa: BLE001  (whatever a compiler raises is a reason)
        first = str(error).strip().partition("\n")[0]
        wrong = [f"{type(error).__name__}: {first}"]
    if not wrong:
        return ""
    return (
        f"a small case that is checked at its first use came out wrong ({', '.join(wrong)}) with "
        f"{_versions(device)}: please report it; backend='triton' runs the same calls"
    )


class _Kept:
    """The file that says that a backend's case came out right on such a card, with all that this
    depends on; there is none where the backend does not know that (`Checked.proof`)."""

    def __init__(self, tested: Checked, device: torch.device) -> None:
        self.path: Path | None = None
        proof = None
        with suppress(Exception):  # nothing is known: it is computed
            proof = tested.proof(device)
        if proof is not None:
            self.folder, facts = proof
            source = sha256(Path(__file__).read_bytes()).hexdigest()
            self.text = json.dumps(
                {"right": tested.name, "PyTorch": torch.__version__, "check": source, **facts},
                indent=1, sort_keys=True,
            )  # fmt: skip
            name = sha256(self.text.encode()).hexdigest()[:32]
            self.path = self.folder / f"headway-checked-{name}.json"

    def says_right(self) -> bool:
        """Whether it says so of the very same things."""
        try:
            return self.path is not None and self.path.read_text() == self.text
        except (OSError, ValueError):
            return False

    def write(self) -> None:
        """Say so, where that is possible."""
        if self.path is None:
            return
        part = self.path.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(self.text)
            os.replace(part, self.path)


def differences(tested: Backend, trusted: Backend, device: torch.device) -> list[str]:
    """The results of the small case that differ by more than bfloat16's rounding. The definition is
    computed on the CPU, while kernels are compiled."""
    with ThreadPoolExecutor(1) as pool:
        defined = pool.submit(_results, trusted, torch.device("cpu"))
        found, right = _results(tested, device), defined.result()
    wrong = []
    for name, x in right.items():
        off, limit = _far(found[name].cpu(), x), 1e-3 if name == "lse" else _TOLERANCE
        if not off <= limit:  # NaN is wrong as well
            wrong.append(f"{name} is off by {off:.1e} where {limit:.1e} would be rounding")
    return wrong


def _far(x: Tensor, right: Tensor) -> float:
    """The largest error of a row, relative to the norm of that row plus the mean norm."""
    x, right = x.double(), right.double()
    if x.shape != right.shape:
        return math.inf
    if x.dim() == 3:  # a number per row
        x, right = x[..., None], right[..., None]
    size = right.norm(dim=-1)
    return ((x - right).norm(dim=-1) / (size + size.mean())).max().item()


def _results(backend: Backend, device: torch.device) -> dict[str, Tensor]:
    """The results of the small case; not rounded, if the backend computes in float64."""
    spec, call, dout, dlse = case(backend, device)
    with torch.no_grad():
        out, lse, *_ = backend.forward(spec, call)
        dq, dk, dv, *_ = backend.backward(spec, call, out, lse, dout, dlse, ())
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def case(backend: Backend, device: torch.device) -> tuple[Spec, Call, Tensor, Tensor]:
    """The small case, and the gradients of out and of lse."""
    exact = backend.accumulates(torch.bfloat16) == torch.float64
    mask, (_, ints, _) = _causal()
    spec = Spec(1 / math.sqrt(_WIDTH), mask=mask, partial=exact, backend=backend.name)
    generator = torch.Generator(device="cpu").manual_seed(0)
    plain: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    q, k, v, dout = (
        torch.randn(1, h, _LENGTH, _WIDTH, generator=generator, **plain).bfloat16()
        for h in (2, 1, 1, 2)
    )
    # The last queries have much larger logits at the first keys, so that sums are rescaled.
    q[:, :, 512:] += 2.0
    k[:, :, :128] += 0.32
    dlse = torch.randn(1, 2, _LENGTH, generator=generator, **plain)
    q, k, v, dout, dlse = (x.to(device) for x in (q, k, v, dout, dlse))
    q.requires_grad_()  # so that the kernels of both directions are compiled in parallel
    return spec, Call(q, k, v, None, None, Captured([], ints, []), None, Coords()), dout, dlse


@lru_cache(maxsize=1)
def _causal() -> tuple[str, Captured]:
    graph, captured = lower_mod("mask", causal(), torch.float32)
    return graph.text, captured


def _versions(device: torch.device) -> str:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    triton = getattr(sys.modules.get("triton"), "__version__", "that did not load")
    return f"Triton {triton}, PyTorch {torch.__version__}, {card}"
