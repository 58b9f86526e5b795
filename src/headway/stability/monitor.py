"""Watch every attention of a model: the largest logit, entropy and sink mass of every head.

In a measured forward each call is measured beside itself, so that the model computes what it
computes without a monitor. Nothing hangs on the layers: a call is a layer's if the layer is being
called in its thread, which only the stack knows for sure. (An interrupt runs no forward hook.)
"""

import math
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.compiler import is_compiling

from .. import run as calls
from ..arguments import count_of, flag_of
from ..blocks import formula_of
from ..errors import ArgumentError, HeadwayError
from ..mods import prefix
from ..mods.base import MaskFn
from ..mods.library.packed import PackedMask
from ..row_statistics import sink_mass
from ..surroundings import are_plain, capturing, in_forward_mode, isolated, transforms
from ..types import Request, refuse_under_compile
from .adapters import check_model, clean_name
from .logit_stats import Group, check_group


class HeadStats(NamedTuple):
    """Statistics of a layer that a `Monitor` saw: `(heads,)` float32 each, on the layer's device.

    - `max_logit`: the largest scaled logit, signed, before the score function; +inf if one was NaN
      or +inf; -inf if the head attended to nothing.
    - `entropy`: the mean over the queries that attend to something of that of
      `headway.AttentionOutput`; NaN if none did.
    - `sink_mass`: the mean of that of `headway.AttentionOutput`, without a sink over the queries
      that attend to the first key; NaN if none did.
    """

    max_logit: Tensor
    entropy: Tensor
    sink_mass: Tensor


class Monitor(AbstractContextManager):
    """A model's monitor, which `monitor` returns. As a context manager it is removed at the end."""

    def __init__(self, model: nn.Module, every: int, training: bool | None):
        self._every, self._training = every, training
        self._model = type(model).__name__
        self._forwards = 0
        self._sums: dict[str, Tensor] = {}  # by layer, what `_measure` returns
        self._unmeasured: dict[str, str] = {}
        self._measuring: dict[int, Any] = {}  # by thread, the watcher of its measured forward
        self._watches = True  # Dynamo cannot read the handles
        self._handles = (
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        )

    def report(self, group: Group = None) -> dict[str, HeadStats]:
        """Return what the measured forwards since the last `reset` saw, by layer: the name in the
        model of the module that called attention, in the order of the first forward.

        All calls of a module count together (those of another number of heads by themselves), and
        a module at several places has the first of its names. The numbers stay on the device.

        **Arguments:**

        - `group`: the ranks that see other data, as for `logit_stats`.

        **Raises:** `ArgumentError` if no call was measured, if the ranks of the group have measured
        other layers, or where several processes run and `group` is missing.
        """
        process_group = check_group(group)
        sums = self._sums.copy()
        if process_group is not None:
            sums = _over_ranks(sums, process_group)
        if not sums:
            whys = "".join(f"\n  {name}: {why}" for name, why in self._unmeasured.items())
            of_mode = {None: "", True: " in train()", False: " in eval()"}[self._training]
            raise ArgumentError(
                f"no attention was measured in {self._forwards} forwards{of_mode} of {self._model} "
                f"(every={self._every}): call the model, not its forward or another method; its "
                "modules have to call Headway in the same thread"
                + (whys and f"; these calls could not be measured:{whys}")
            )
        return {
            name: HeadStats(largest.float(), *(totals / counts).float())
            for name, x in sums.items()
            for largest, totals, counts in [(x[0], x[1:3], x[3:])]
        }

    def reset(self) -> None:
        """Forget what was measured. The count of forwards goes on."""
        with _lock:
            self._sums.clear()

    def remove(self) -> None:
        """Watch no longer. The report stays."""
        self._watches = False
        for handle in self._handles:
            handle.remove()
        for thread in list(self._measuring):
            self._close(thread)

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model or of its monitor watches nothing."""
        return {**vars(self), "_watches": False, "_handles": (), "_measuring": {}}

    def _enter(self, module: nn.Module, _: Any) -> None:
        """Begin a forward of the model, before its other hooks."""
        if not self._watches:
            return
        if is_compiling():
            refuse_under_compile(ArgumentError, _COMPILED)
        if get_eval_frame_callback() not in (None, False):  # after a graph break
            raise ArgumentError(_COMPILED)
        if _callers().count(id(module)) > 1:  # a part of a forward
            return
        self._close(get_ident())  # which an interrupt left open
        if self._training not in (None, module.training):
            return
        if self._forwards % self._every == 0:
            watcher = partial(self._watch, module, _names(module), get_ident())
            with _lock:
                if not _stances and "torch._dynamo" in sys.modules:
                    _stances.append(torch.compiler.set_stance("force_eager"))
                calls.watchers.append(watcher)
            self._measuring[get_ident()] = watcher
        self._forwards += 1

    def _leave(self, module: nn.Module, *_: Any) -> None:
        """End a forward of the model, after its other hooks, or after an error."""
        if self._measuring and _callers().count(id(module)) == 1:
            self._close(get_ident())

    def _close(self, thread: int) -> None:
        if watcher := self._measuring.pop(thread, None):
            with _lock:
                calls.watchers.remove(watcher)
                if _stances and not calls.watchers:
                    _stances.pop().__exit__(None, None, None)

    def _watch(
        self, model: nn.Module, names: dict[int, str], thread: int, request: Request
    ) -> None:
        """Measure a call that has run if the model made it, or warn once why it cannot be."""
        in_backward = torch._C._current_graph_task_id() != -1
        if request.auxiliary or in_backward or get_ident() != thread:
            return
        callers = _callers()
        if id(model) not in callers:
            return
        name = next(names[x] for x in callers if x in names) or self._model
        try:
            sums = _measure(request)
        except HeadwayError as error:
            if name not in self._unmeasured:
                self._unmeasured[name] = str(error)
                warnings.warn(f"monitor: calls of {name} are not measured: {error}", stacklevel=2)
            return
        with _lock:
            heads = sums.shape[1]
            if self._sums.get(name, sums).shape[1] != heads:
                name = f"{name} ({heads} heads)"
            if name in self._sums:
                before = self._sums[name]
                sums = sums.to(before.device)
                sums = torch.cat([torch.maximum(before[:1], sums[:1]), before[1:] + sums[1:]])
            self._sums[name] = sums


def monitor(model: nn.Module, *, every: int = 1, training: bool | None = None) -> Monitor:
    """Watch a model: `report()` of the result has, by layer, the largest logit, the entropy and the
    sink mass of every head.

        watch = headway.stability.monitor(model, every=100)
        ...  # train
        for name, head in watch.report().items():
            print(name, head.max_logit, head.entropy, head.sink_mass)

    It measures all modules that call Headway: `headway.nn`, your own, the drop-ins for other
    libraries, Hugging Face with `attn_implementation="headway"`. Results and gradients stay the
    same to the bit. A measured forward computes each attention once more, and its statistics
    (`attention_with_stats` says what they cost); the others take a few microseconds longer.

    Compiled models are measured too: measured forwards run what is compiled eagerly, so they take
    an eager forward's time and memory, and differ by its rounding. Pass what `torch.compile`
    returned; the parts of a model may be compiled in any way.

    Calls that cannot be measured (over a KV cache, with a layout, of DTensors, after a past, in a
    CUDA graph or a transform of `torch.func`) raise a warning, once by layer. Each call counts as
    it is: of `sigmoid_attention` the weights over their sum, of calls that you `merge` each, and
    without a sink that comes after the call (transformers' sinks by query).

    **Arguments:**

    - `model`: any module. Under DDP and FSDP, the wrapped model or the one inside.
    - `every`: measure the first forward and then every n-th. With gradient accumulation, each
      micro-batch is a forward.
    - `training`: count forwards in `train()` only if True, in `eval()` only if False, all if None.

    **Returns:** a `Monitor`, with `report()`, `reset()` and `remove()`; a context manager too.

    **Raises:** `ArgumentError`; also in a forward of the model inside of what is compiled.
    """
    check_model(model)
    training = None if training is None else flag_of("training", training)
    return Monitor(model, count_of("every", every, 1), training)


_COMPILED = (
    "a monitor's model is called inside of what torch.compile compiles or torch.export exports, "
    "where nothing can be measured: open the monitor on what torch.compile returned (not on the "
    "model that you passed to it), or on a module around model.compile(); remove() it to export"
)
_lock = Lock()
# The compiler's stance, one for all threads, while any forward is measured: to compile nothing.
_stances: list[Any] = []


def _names(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's modules by their ids, without those of wrappers."""
    modules, names = dict(model.named_modules()), {}
    for path, module in modules.items():
        parts = path.split(".")
        for n in reversed(range(len(parts))):
            parent = type(modules[".".join(parts[:n])]).__name__
            if parts[n] == "module" and parent in ("DistributedDataParallel", "DataParallel"):
                del parts[n]
        names[id(module)] = clean_name(".".join(parts))
    return names


def _callers() -> list[int]:
    """Return the ids of the modules that are being called in this thread, the innermost first."""
    frame, module_call, callers = sys._getframe(1), nn.Module._call_impl.__code__, list[int]()
    while frame is not None:
        if frame.f_code is module_call:
            callers.append(id(frame.f_locals["self"]))
        frame = frame.f_back
    return callers


def _measure(request: Request) -> Tensor:
    """Compute a call once more, with its statistics, where nothing sees it. Return `(5, heads)`
    float64: the largest logit; the sums of entropy and sink mass; how many queries attended to
    something, and how many could attend to the sink or the first key."""
    _check_measurable(request)
    q, k, v = (x.detach() for x in (request.q, request.k, request.v))
    sink = None if request.sink is None else request.sink.detach()
    request = Request(
        q, k, v, request.score, request.mask, request.scale, sink, backend=request.backend,
        max_logit=True, entropy=True, auxiliary=True,
    )  # fmt: skip
    with isolated(as_called=True), torch.inference_mode(False), torch.no_grad():
        _, lse, max_logit, _, entropy = calls.run(request)
        of_first = lse
        if sink is None:
            mask = _with_first_key(request.mask)
            first = request._replace(v=v[..., :1], mask=mask, max_logit=False, entropy=False)
            of_first = calls.run(first).lse
        none = max_logit.new_full((1, max_logit.shape[1]), -math.inf)  # of an empty batch
        largest = torch.cat([max_logit, none]).amax(0).double()
        rows = entropy, sink_mass(request, lse), lse != -math.inf, of_first != -math.inf
        sums = [x.sum((0, 2), dtype=torch.float64) for x in rows]
        return torch.stack([largest.nan_to_num(math.inf, math.inf, -math.inf), *sums])


def _with_first_key(mask: Any) -> MaskFn:
    """Return the mask less all keys but the first of the sequence."""
    mask = formula_of(mask)
    if isinstance(mask, PackedMask):
        return replace(mask, mask=_with_first_key(mask.mask))
    return prefix(1) if mask is None else mask & prefix(1)


def _check_measurable(request: Request) -> None:
    """Refuse a call that cannot be measured."""
    tensors = request.q, request.k, request.v
    transformed = transforms() or in_forward_mode()
    recorded = torch._C._is_tracing() or capturing(request.q.device)
    for refuses, why in (
        (request.keys is not None, "they are over a KV cache, after a past, or have a layout="),
        (not are_plain(*tensors), f"their tensors are of types {[type(x) for x in tensors]}"),
        (any(x.is_meta for x in tensors), "their tensors are on the meta device"),
        (transformed, "they are in a transform of torch.func, or in forward mode"),
        (recorded, "torch.jit or a CUDA graph records them"),
    ):
        if refuses:
            raise ArgumentError(why)


def _over_ranks(sums: dict[str, Tensor], process_group: Any) -> dict[str, Tensor]:
    """Return the statistics over all ranks: two all-reduces for the whole model."""
    distributed = torch.distributed
    own = [(name, x.shape[1]) for name, x in sums.items()]
    layers: list[Any] = [None] * distributed.get_world_size(process_group)
    distributed.all_gather_object(layers, own, group=process_group)
    if any(of_rank != own for of_rank in layers):
        raise ArgumentError(
            f"the ranks of group= have measured other layers (name, heads): {layers}; they have to "
            "call the same model equally often"
        )
    if not sums:
        return sums
    device = next(iter(sums.values())).device
    total = torch.cat([x.to(device) for x in sums.values()], 1)
    distributed.all_reduce(total[:1], distributed.ReduceOp.MAX, group=process_group)
    distributed.all_reduce(total[1:], group=process_group)
    return dict(zip(sums, total.split([heads for _, heads in own], 1), strict=True))
