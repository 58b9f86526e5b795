"""What surrounds a call, and what of it does not reach what the library runs for itself.

A score or mask is traced on tensors that hold no numbers, and its derivative is taken there. None
of that is part of the caller's program, whatever the caller has switched on. A CUDA graph that is
being captured is another matter: what runs then is run again, on other numbers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

_autograd, _functorch = torch._C._autograd, torch._C._functorch
# Whether a transform has wrapped a tensor, and whether any is active. Asked at every call.
is_wrapped = _functorch.is_functorch_wrapped_tensor
transforms = torch._C._are_functorch_transforms_active


def elsewhere(device: torch.device) -> bool:
    """Whether the current device is another. (`torch.cuda.current_device` also checks whether CUDA
    is initialised, and takes five times as long; where there are tensors it is.)"""
    return device.type == "cuda" and device.index != torch._C._cuda_getDevice()


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured in the device's current stream."""
    if device.type != "cuda":
        return False
    if elsewhere(device):
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    return torch.cuda.is_current_stream_capturing()


@contextmanager
def alone(as_called: bool = False) -> Iterator[None]:
    """Without what the caller has switched on and what would see, change or keep what runs here:

    - modes that see functions (a default device is one) or operators (fake tensors, counters);
    - transforms (`torch.func.grad`, `vmap`), and whoever traces (`torch.export`);
    - hooks of what autograd saves (`saved_tensors_hooks`, `save_on_cpu`);
    - inference mode and autocast.

    The default dtype stays: it is part of what a user's function means. So does anomaly mode, which
    is one switch for all threads of a process: to turn it off here would do so for all of them.
    With `as_called`, what a function can ask torch for stays as well: modes that see functions,
    inference mode and autocast.
    """
    count = 0 if as_called else torch._C._len_torch_function_stack()
    functions = [_pop_mode() for _ in range(count)]
    hooks = []
    while (pair := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    others = torch._C._len_torch_dispatch_stack() + _len_torch_dispatch_stack_pre_dispatch()
    transformed = transforms()
    try:
        with (
            _disable_current_modes() if others else nullcontext(),
            temporarily_clear_interpreter_stack() if transformed else nullcontext(),
            nullcontext() if as_called else torch._C._DisableAutocast(),
            nullcontext() if as_called else torch.inference_mode(False),
        ):
            yield
    finally:
        for pair in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(*pair)
        for mode in reversed(functions):
            _push_mode(mode)


def learns(x: Tensor) -> bool:
    """Return whether autograd or any transform records gradients of `x`. `x.requires_grad` answers
    for the innermost transform alone: a tensor inside `vmap` says False."""
    if torch.compiler.is_compiling():
        return x.requires_grad
    while not x.requires_grad:
        if not is_wrapped(x):
            return False
        x = _functorch.get_unwrapped(x)
    return True


def has_tangent(x: Tensor) -> bool:
    """Return whether forward-mode AD is on and `x` has a tangent in any transform. A level can only
    be asked while no level above it is active, and `vmap` has no rule for the question."""
    if forward_ad._current_level < 0:
        return False
    with ExitStack() as above:
        while True:
            level = max(_functorch.maybe_get_level(x), 0)
            while (top := _functorch.peek_interpreter_stack()) is not None and top.level() > level:
                above.enter_context(temporarily_pop_interpreter_stack())
            if not _functorch.is_batchedtensor(x) and forward_ad.unpack_dual(x).tangent is not None:
                return True
            if not is_wrapped(x):
                return False
            x = _functorch.get_unwrapped(x)


def readable(tensor: Tensor) -> bool:
    """Whether the host may look at what is in a tensor: no compiler or transform stands before it,
    and no CUDA graph is being captured."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.is_meta:
        return False
    return not is_wrapped(tensor) and not (
        tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    )
