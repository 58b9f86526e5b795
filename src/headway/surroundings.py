"""Query the surroundings of a call (transforms, modes, CUDA graph capture), and isolate from them.

A score or mask is traced on tensors without data, and differentiated there. That is not part of the
caller's program, so it runs without the caller's modes, transforms and hooks (`isolated`). While a
CUDA graph is captured, the recorded work is replayed later on other data, so caches are not used.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

_autograd, _functorch = torch._C._autograd, torch._C._functorch
# Both are called at every call, so they are torch's own functions: has a transform wrapped this
# tensor, and is any transform active?
is_wrapped = _functorch.is_functorch_wrapped_tensor
is_batched = _functorch.is_batchedtensor
is_older_batched = _functorch.is_legacy_batchedtensor  # by a vmap older than `torch.func`'s
transforms = torch._C._are_functorch_transforms_active


dispatch_modes = torch._C._len_torch_dispatch_stack  # counts the active ones
_tracing = torch._C._is_tracing
_included, _PRE_DISPATCH = (
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)  # fmt: skip
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def operators_are_changed() -> bool:
    """Return whether a mode, a transform or a tracer lets operators on plain tensors do more than
    compute."""
    return (
        dispatch_modes() > 0
        or transforms()
        or _included(_PRE_DISPATCH)
        or _tracing()
        or forward_ad._current_level >= 0
    )


def are_plain(*tensors: Tensor | None) -> bool:
    """Return whether no tensor is of a subclass."""
    return _PLAIN.issuperset(map(type, tensors))


def is_other_device(device: torch.device) -> bool:
    """Return whether a CUDA device is not the current one.

    `torch.cuda.current_device` also checks that CUDA is initialised, and takes five times as long.
    """
    return device.type == "cuda" and device.index != torch._C._cuda_getDevice()


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured in the device's current stream."""
    if device.type != "cuda":
        return False
    if is_other_device(device):
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    return torch.cuda.is_current_stream_capturing()


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Run without the caller's transforms, which would wrap every tensor that is made here."""
    with temporarily_clear_interpreter_stack() if transforms() else nullcontext():
        yield


@contextmanager
def _below_autograd_at_one_level() -> Iterator[None]:
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        yield


def below_autograd() -> AbstractContextManager[Any]:
    """Run operators below autograd, in the forward of an autograd function that is applied at one
    level of transforms: they go on to the outer levels, with gradients there."""
    return _below_autograd_at_one_level() if transforms() else torch._C._AutoDispatchBelowAutograd()


def apply_at_one_level(function: Any, *inputs: Any) -> Any:
    """Return the results of an autograd function at the level of transforms that an operator's
    kernel runs at, where `Function.apply` would begin again at the innermost level."""
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*inputs)


@contextmanager
def isolated(as_called: bool = False) -> Iterator[None]:
    """Run without what the caller has switched on and what would see or change what runs here.

    Disabled are:

    - modes that see functions (a default device is one) or operators (fake tensors, counters);
    - transforms (`torch.func.grad`, `vmap`), and tracers (`torch.export`);
    - hooks on tensors that autograd saves (`saved_tensors_hooks`, `save_on_cpu`);
    - inference mode and autocast.

    The default dtype stays, since a user's function depends on it. Anomaly mode stays too, since it
    is one switch for all threads of a process. With `as_called`, what a function can query stays
    as well: modes that see functions, inference mode and autocast.
    """
    count = 0 if as_called else torch._C._len_torch_function_stack()
    function_modes = [_pop_mode() for _ in range(count)]
    hooks = []
    while (pair := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    has_modes = dispatch_modes() + _len_torch_dispatch_stack_pre_dispatch() > 0
    try:
        with (
            _disable_current_modes() if has_modes else nullcontext(),
            outside_transforms(),
            nullcontext() if as_called else torch._C._DisableAutocast(),
            nullcontext() if as_called else torch.inference_mode(False),
        ):
            yield
    finally:
        for pair in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(*pair)
        for mode in reversed(function_modes):
            _push_mode(mode)


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor that the caller's transforms wrapped; one that `vmap` maps over stays."""
    while is_wrapped(x) and not is_batched(x):
        x = _functorch.get_unwrapped(x)
    return x


def requires_grad(x: Tensor) -> bool:
    """Return whether autograd or any transform records gradients of `x`.

    `x.requires_grad` considers the innermost transform only: it is False inside `vmap`.
    """
    if torch.compiler.is_compiling():
        return x.requires_grad
    while not x.requires_grad:
        if not is_wrapped(x):
            return False
        x = _functorch.get_unwrapped(x)
    return True


def differentiated_in_compile() -> bool:
    """Return whether `torch.func` differentiates inside of the compiled function."""
    if not transforms():
        return False
    kinds = {layer.key() for layer in torch._C._functorch.get_interpreter_stack() or ()}
    return not kinds <= {torch._C._functorch.TransformType.Vmap}


def in_forward_mode() -> bool:
    """Return whether forward-mode AD is on: `torch.func.jvp` and what it makes, `dual_level`."""
    return forward_ad._current_level >= 0


def under_vmap() -> bool:
    """Return whether `torch.vmap` is the innermost transform: it hides tangents."""
    top = _functorch.peek_interpreter_stack()
    return top is not None and top.key() == _functorch.TransformType.Vmap


def under_fake_tensors() -> bool:
    """Return whether a `FakeTensorMode` is active: tensors have no data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def has_tangent(x: Tensor) -> bool:
    """Return whether forward-mode AD is on and `x` has a tangent in any transform; in a compiled
    program, in the innermost one.

    A level can only be queried while no level above it is active, and `vmap` has no rule for it.
    What a transform that has ended wrapped has none there.
    """
    if not in_forward_mode():
        return False
    if torch.compiler.is_compiling():
        return not under_vmap() and forward_ad.unpack_dual(x).tangent is not None
    with ExitStack() as popped_levels:
        while True:
            while is_wrapped(x) and _functorch.maybe_get_level(x) < 0:
                x = _functorch.get_unwrapped(x)
            level = max(_functorch.maybe_get_level(x), 0)
            while (top := _functorch.peek_interpreter_stack()) is not None and top.level() > level:
                popped_levels.enter_context(temporarily_pop_interpreter_stack())
            if not _functorch.is_batchedtensor(x) and forward_ad.unpack_dual(x).tangent is not None:
                return True
            if not is_wrapped(x):
                return False
            x = _functorch.get_unwrapped(x)


def host_can_read(tensor: Tensor) -> bool:
    """Return whether the host may read a tensor's values now.

    It may not under a compiler, inside a transform, or while a CUDA graph is being captured.
    """
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.is_meta:
        return False
    return not is_wrapped(tensor) and not (
        tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def rows_of_batch(tensors: Sequence[Tensor | None]) -> tuple[int, list[tuple[Tensor | None, ...]]]:
    """Return the nesting level of an older vmap's batch, and its rows; None stays None."""
    level = next(_batch_level(x) for x in tensors if x is not None and is_older_batched(x))
    size = max(_unbatched(x, level, 1).shape[0] for x in tensors if x is not None)
    rows = [[None] * size if x is None else _unbatched(x, level, size) for x in tensors]
    return level, list(zip(*rows, strict=True))


def _unbatched(x: Tensor, level: int, size: int) -> Tensor:
    """Return x with the batch of this nesting level as its first dimension, expanded to `size` if
    there is none."""
    return torch._remove_batch_dim(x, level, size, 0)


def _batch_level(x: Tensor) -> int:
    """Return the nesting level at which x is batched, found by trying: at any other, `_unbatched`
    expands to whatever size it is given. (A device's thread does not know the level of its caller.)
    """
    return next(n for n in range(1, 65) if len(_unbatched(x, n, 2)) == len(_unbatched(x, n, 3)))
