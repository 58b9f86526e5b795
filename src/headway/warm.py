"""Compile kernels ahead of the calls that need them, also for a GPU that is not there."""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .arguments import count_of
from .backends import first_use, get, order, reference
from .backends.base import Call, CapabilityKey, capability_key
from .backends.gpu.named_card import Card, card_of, compiling_for
from .errors import ArgumentError, BackendRefused
from .resolve import needs_exact_out, resolve
from .types import Request, Spec

if TYPE_CHECKING:
    from .backends.gpu.runtime.parallel_compile import RecordedLaunch

_COMPILED = ("hopper", "triton")  # backends
_OPTIONS = (
    "score", "mask", "scale", "sink", "dropout", "seed", "deterministic", "backend", "max_logit",
)  # fmt: skip
_KEYS = ("q", "k", "v", "dtype", "train", *_OPTIONS)


class Kernel(NamedTuple):
    """A kernel that `warm` has compiled or found.

    - `compiled`: True if it was compiled, False if it was there already.
    - `seconds`: the time that this took.
    """

    name: str
    compiled: bool
    seconds: float

    def __str__(self) -> str:
        return f"{'compiled' if self.compiled else 'found   '}  {self.seconds:6.1f} s  {self.name}"


def warm(
    calls: Mapping[str, Any] | Callable[[], Any] | Iterable[Any],
    *,
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
) -> list[Kernel]:
    """Compile the kernels of calls, forward and backward, into a folder; nothing is computed.

    The folder may be copied to other machines with the same Triton. Where `TRITON_CACHE_DIR` names
    it, or its contents lie in `~/.triton/cache`, calls of the same kinds compile nothing. Kernels
    that are there already are not compiled again.

    **Arguments:**

    - `calls`: what `attention` will be called with; or a function that makes one or several of
      them; or several of either. A call is a dict of

        - `q`, `k`, `v`: shapes `(b, hq, q_len, d)`, `(b, hk, kv_len, d)`, `(b, hk, kv_len, dv)`, or
          tensors, of which shape, strides and dtype count (`torch.empty(..., device="meta")` will
          do). `k` is q if not given, `v` is k.
        - `dtype`: of shapes, bfloat16 if not given.
        - `train`: whether q, k and v require grad, so that the backward is compiled, too; True if
          not given.
        - any of `score`, `mask`, `scale`, `sink`, `dropout`, `seed`, `deterministic`, `backend`;
          and `max_logit=True` for `attention_with_stats`.

    - `device`: the card to compile for, "sm_80", "sm_86", "sm_89", "sm_90", "sm_100" or "sm_120";
      no GPU is needed, and what scores and masks capture is on the CPU. "sm_90:114" is one with 114
      multiprocessors. None: PyTorch's current GPU. While a card is named, no other thread may call
      a GPU backend.
    - `out`: the folder; None: Triton's, where kernels are looked for anyway.
    - `jobs`: kernels that are compiled at once; as many as there are processors if None.

    **Returns:** the kernels, in the order in which they were ready. For the Hopper backend those of
    the check at its first use are among them.

    **Raises:** `ArgumentError` for a card or a call that is not known, and what `attention` raises
    for such a call; `BackendRefused` where no backend with kernels can run it.
    """
    card = _card(device)
    jobs = None if jobs is None else count_of("jobs", jobs, 1)
    if find_spec("triton") is None:
        raise BackendRefused("no kernels without Triton: pip install triton")
    requests = [_request_of(call, card) for call in _flatten(calls)]
    from .backends.gpu.runtime import kernel_cache
    from .backends.gpu.runtime.triton_startup import wait_for_triton

    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(kernel_cache.use_folder(Path(out)))
        if card is not None:
            stack.enter_context(compiling_for(card))
        resolved = [_resolve_for_gpu(request) for request in requests]
        wait_for_triton()
        device_of_calls = resolved[0][1].q.device if resolved else torch.device("cpu")
        steps = [_steps(spec, call) for spec, call in resolved]
        if any(spec.backend == "hopper" for spec, _ in resolved):
            steps.append(_self_test_steps(device_of_calls))
        log_start = len(kernel_cache.log)
        _compile(steps, device_of_calls, _shared_memory(card), jobs or os.cpu_count() or 1)
        records = kernel_cache.log[log_start:]
        return [Kernel(record.name, record.compiled, record.seconds) for record in records]


# -- calls ----------------------------------------------------------------------------------------


def _card(device: str | None) -> Card | None:
    if device is not None:
        return card_of(device)
    if not torch.cuda.is_available():
        raise ArgumentError(
            "device=None means PyTorch's current GPU, but PyTorch sees none; name the GPU to "
            "compile for, as in device='sm_90'"
        )
    return None


def _flatten(calls: Any) -> Iterable[Mapping[str, Any]]:
    """Yield the dict of every call."""
    if isinstance(calls, Mapping):
        yield calls
    elif callable(calls):
        yield from _flatten(calls())
    elif isinstance(calls, Iterable) and not isinstance(calls, str):
        for call in calls:
            yield from _flatten(call)
    else:
        raise ArgumentError(
            f"calls: {calls!r} is neither a dict of a call's arguments nor a function that makes "
            "one; several go in a list"
        )


def _request_of(call: Mapping[str, Any], card: Card | None) -> Request:
    """Return the request of a call, with empty tensors."""
    for name in call:
        if name not in _KEYS:
            raise ArgumentError(f"calls: a call has {name!r}; it may have {', '.join(_KEYS)}")
    if "q" not in call:
        raise ArgumentError("calls: a call has no 'q', a shape (b, hq, q_len, d) or a tensor")
    q = call["q"]
    k = call.get("k", q)
    shapes = q, k, call.get("v", k)
    dtype, train = call.get("dtype", torch.bfloat16), call.get("train", True)
    device = torch.device("cuda", torch.cuda.current_device()) if card is None else "cpu"
    q, k, v = (
        _empty(name, shape, dtype, train, device) for name, shape in zip("qkv", shapes, strict=True)
    )
    return Request(q, k, v, **{name: call[name] for name in _OPTIONS if name in call})


def _empty(name: str, shape: Any, dtype: torch.dtype, train: bool, device: Any) -> Tensor:
    if isinstance(shape, Tensor):
        like = shape
        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    else:
        try:
            empty = torch.empty(tuple(shape), dtype=dtype, device=device)
        except (TypeError, RuntimeError) as error:
            raise ArgumentError(f"calls: {name}={shape!r}, dtype={dtype!r}: {error}") from error
    return empty.requires_grad_(bool(train))


def _resolve_for_gpu(request: Request) -> tuple[Spec, Call]:
    """Return the spec and the call that the GPU would compute."""
    if request.q.is_cuda:
        spec, call = resolve(request)
    else:
        wanted = request.backend
        get("cpu" if wanted == "auto" else wanted)  # an unknown name is an error
        spec, call = resolve(request._replace(backend="cpu"))
        key = CapabilityKey(*capability_key(call, spec.score_tensors))
        reasons = ""
        for name in order(wanted, spec, key):
            refusals = ["it compiles no kernels"]
            if name in _COMPILED and not (refusals := get(name).reasons_against(spec, key)):
                exact_out = needs_exact_out(request._replace(backend=name), key)
                return replace(spec, backend=name, exact_out=exact_out), call
            reasons += "".join(f"\n  - {name}: {reason}" for reason in refusals)
        raise BackendRefused(f"backend={wanted!r} has no kernels for this call:{reasons}")
    if spec.backend not in _COMPILED:
        raise BackendRefused(
            f"this call runs on backend='{spec.backend}', which compiles no kernels"
        )
    return spec, call


# -- kernels --------------------------------------------------------------------------------------


def _steps(spec: Spec, call: Call) -> Callable[[], object]:
    from .backends.gpu.runtime.parallel_compile import steps_of

    backend = get(spec.backend)
    return steps_of(spec, call, backend.forward, backend.backward)


def _self_test_steps(device: torch.device) -> Callable[[], object]:
    """Return a function that runs the self-test of the Hopper backend's first use."""
    hopper = get("hopper")
    assert hopper is not reference
    spec, call, dout, dlse = first_use.case(hopper, device)

    def steps() -> None:
        out, lse, *_ = hopper.forward(spec, call)
        hopper.backward(spec, call, out, lse, dout, dlse, ())

    return steps


def _shared_memory(card: Card | None) -> int:
    """Return the bytes of shared memory that a CTA may have."""
    if card is not None:
        return card.shared
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.shared_memory_per_block_optin


@torch.no_grad()
def _compile(
    steps: list[Callable[[], object]], device: torch.device, shared_memory: int, jobs: int
) -> None:  # fmt: skip
    """Compile every kernel that the steps launch."""
    from .backends.gpu.runtime.device_guard import on
    from .backends.gpu.runtime.kernel_cache import in_processes
    from .backends.gpu.runtime.parallel_compile import inspect_launches, no_garbage_collected

    def compile_one(launch: "RecordedLaunch") -> None:
        with on(device), in_processes():  # the current device is a thread's own
            launch.compile()

    launches = [launch for step in steps for launch in inspect_launches(step)]
    with no_garbage_collected, ThreadPoolExecutor(jobs) as pool:
        # The last ones take longest.
        for compilation in [pool.submit(compile_one, launch) for launch in launches[::-1]]:
            compilation.result()
    for step in steps:  # if a kernel needs too much shared memory, a smaller tile is launched
        inspect_launches(step, shared_memory)
