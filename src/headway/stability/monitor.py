"""Watch every attention of a model: the largest logit, entropy and sink mass of every head.

In a measured forward each call is measured beside itself, so that the model computes what it
computes without a monitor. A call is a layer's if the layer is being called in its thread
(`_callers`): nothing hangs on the layers, and what a backward recomputes does not count.
"""

import math
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch.compiler import is_compiling

from .. import run as calls
from ..api import attention_with_stats
from ..arguments import count_of, flag_of
from ..blocks import BlockMask
from ..errors import ArgumentError, HeadwayError
from ..mods.base import Both, MaskFn
from ..mods.library.packed import PackedMask
from ..surroundings import capturing, in_forward_mode, isolated, transforms
from ..types import KV, Coords, Request, refuse_under_compile
from .adapters import clean_name
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


class Monitor:
    """A model's monitor, which `monitor` returns. As a context manager it is removed at the end."""

    def __init__(self, model: nn.Module, every: int, training: bool | None):
        self._every, self._training = every, training
        self._model = type(model).__name__
        self._forwards = 0
        self._sums: dict[str, _Sums] = {}
        self._unmeasured: dict[str, str] = {}
        self._start([
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ])  # fmt: skip

    def _start(self, handles: list[Any]) -> None:
        self._handles, self._watches = handles, bool(handles)  # Dynamo cannot read the former
        self._lock = threading.Lock()
        # By thread, the calls of the model that are under way there; None is not measured.
        self._under_way: dict[int, list[_Forward | None]] = {}

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
        with self._lock:
            sums = dict(self._sums)
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
        return {name: stats.means() for name, stats in sums.items()}

    def reset(self) -> None:
        """Forget what was measured. The count of forwards goes on."""
        with self._lock:
            self._sums.clear()

    def remove(self) -> None:
        """Watch no longer. The report stays."""
        self._watches = False
        for handle in self._handles:
            handle.remove()
        for forwards in list(self._under_way.values()):
            self._close(forwards)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model or of its monitor watches nothing."""
        return {n: x for n, x in vars(self).items() if n not in ("_handles", "_lock", "_under_way")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start([])

    def _enter(self, module: nn.Module, _: Any) -> None:
        """Begin a forward of the model, before its other hooks."""
        if not self._watches:
            return
        if is_compiling():
            refuse_under_compile(ArgumentError, _COMPILED)
        if get_eval_frame_callback() not in (None, False):
            raise ArgumentError(_COMPILED)
        forwards = self._under_way.setdefault(threading.get_ident(), [])
        outermost = sum(caller is module for caller in _callers()) == 1
        if outermost:
            self._close(forwards)  # which an interrupt left open
        counts = outermost and self._training in (None, module.training)
        measured = counts and self._forwards % self._every == 0
        self._forwards += counts
        forwards.append(_Forward(self, module) if measured else None)

    def _leave(self, *_: Any) -> None:
        """End a forward of the model, after its other hooks, or after an error."""
        forwards = self._under_way.get(threading.get_ident())
        if forwards:
            self._close([forwards.pop()])

    def _close(self, forwards: "list[_Forward | None]") -> None:
        while forwards:
            forward = forwards.pop()
            if forward is not None:
                forward.close()

    def add(self, name: str, request: Request) -> None:
        """Measure a call of a layer, or warn once why it cannot be."""
        why, measured = _why_not(request), None
        if not why:
            try:
                measured = _measure(request)
            except HeadwayError as error:
                why = str(error)
        if measured is None:
            if name not in self._unmeasured:
                self._unmeasured[name] = why
                warnings.warn(f"monitor: calls of {name} are not measured: {why}", stacklevel=2)
            return
        heads = len(measured.max_logit)
        with self._lock:
            if name in self._sums and len(self._sums[name].max_logit) != heads:
                name = f"{name} ({heads} heads)"
            before = self._sums.get(name)
            self._sums[name] = measured if before is None else before.and_then(measured)


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
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is of type {type(model).__name__}; pass an nn.Module")
    training = None if training is None else flag_of("training", training)
    return Monitor(model, count_of("every", every, 1), training)


_COMPILED = (
    "a monitor's model is called inside of what torch.compile compiles or torch.export exports, "
    "where nothing can be measured: open the monitor on what torch.compile returned (not on the "
    "model that you passed to it), or on a module around model.compile(); remove() it to export"
)
# Dynamo compiles neither hook, and has its callback on inside, if it compiles what surrounds them.
for _hook in (Monitor._enter, Monitor._leave):
    set_code_exec_strategy(
        _hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    )


# -- a measured forward ---------------------------------------------------------------------------


class _Forward:
    """A measured forward of a model, in its thread."""

    def __init__(self, monitor: Monitor, model: nn.Module):
        self.monitor, self.model, self.thread = monitor, model, threading.get_ident()
        self.names = _names(model)
        _uncompiled.begin()
        calls.watchers.append(self.watch)

    def close(self) -> None:
        """End the forward."""
        calls.watchers.remove(self.watch)
        _uncompiled.end()

    def watch(self, request: Request) -> None:
        """Measure a call that has run, if the model made it."""
        in_backward = torch._C._current_graph_task_id() != -1
        if request.auxiliary or in_backward or threading.get_ident() != self.thread:
            return
        callers = list(_callers())
        if any(module is self.model for module in callers):
            name = next(self.names[id(x)] for x in callers if id(x) in self.names)
            self.monitor.add(name or type(self.model).__name__, request)


class _Uncompiled:
    """Runs what is compiled eagerly while forwards are measured: the compiler has one stance for
    all threads."""

    def __init__(self) -> None:
        self.lock, self.forwards = threading.Lock(), 0
        self.stance: Any = None

    def begin(self) -> None:
        with self.lock:
            if self.stance is None and "torch._dynamo" in sys.modules:
                self.stance = torch.compiler.set_stance("force_eager")
            self.forwards += 1

    def end(self) -> None:
        with self.lock:
            self.forwards -= 1
            if self.forwards == 0 and self.stance is not None:
                self.stance.__exit__(None, None, None)
                self.stance = None


_uncompiled = _Uncompiled()


def _names(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's modules by their ids, without those of wrappers."""
    modules, names = dict(model.named_modules()), {"": ""}
    for path in modules:
        parent, _, part = path.rpartition(".")
        if path:
            kind = type(modules[parent]).__name__
            wrapped = part == "module" and kind in ("DistributedDataParallel", "DataParallel")
            names[path] = clean_name(
                names[parent] + "." * bool(names[parent]) + part * (not wrapped)
            )
    return {id(module): names[path] for path, module in modules.items()}


def _callers() -> Iterator[nn.Module]:
    """Yield the modules that are being called in this thread, the innermost first; none where a
    monitor measures."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _measure.__code__:
        if frame.f_code is _MODULE_CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


_MODULE_CALL = nn.Module._call_impl.__code__


# -- what is measured -----------------------------------------------------------------------------


class _Sums(NamedTuple):
    """Statistics of the heads of some calls, `(heads,)` each."""

    max_logit: Tensor  # float32, the maximum
    entropy: Tensor  # float64, the sum
    sink_mass: Tensor  # float64, the sum
    queries: Tensor  # float64, how many attended to something
    sink_queries: Tensor  # float64, how many could attend to the sink or the first key

    def and_then(self, other: "_Sums") -> "_Sums":
        """Return the statistics of both, on the device of these."""
        largest, *others = (x.to(self.queries.device) for x in other)
        sums = (x + y for x, y in zip(self[1:], others, strict=True))
        return _Sums(torch.maximum(self.max_logit, largest), *sums)

    def means(self) -> HeadStats:
        """Return what a report says of them."""
        entropy, sink_mass = self.entropy / self.queries, self.sink_mass / self.sink_queries
        return HeadStats(self.max_logit.clone(), entropy.float(), sink_mass.float())


def _measure(request: Request) -> _Sums:
    """Compute a call once more, with its statistics, where nothing sees it."""
    q, k, v = (x.detach() for x in (request.q, request.k, request.v))
    sink = None if request.sink is None else request.sink.detach()
    with isolated(as_called=True), torch.inference_mode(False), torch.no_grad():
        options = {"scale": request.scale, "backend": request.backend}
        result = attention_with_stats(
            q, k, v, request.score, request.mask, sink=sink, entropy=True, sink_mass=True, **options
        )
        _, lse, max_logit = result
        of_first = lse
        if sink is None:
            mask = _with_first_key(request.mask)
            of_first = attention_with_stats(q, k, v[..., :1], request.score, mask, **options).lse
        none = max_logit.new_full((1, max_logit.shape[1]), -math.inf)  # of an empty batch
        largest = torch.cat([max_logit, none]).amax(0).float()
        assert result.entropy is not None
        assert result.sink_mass is not None
        sums = (
            x.sum((0, 2), dtype=torch.float64)
            for x in (result.entropy, result.sink_mass, lse != -math.inf, of_first != -math.inf)
        )
        return _Sums(largest.nan_to_num(math.inf, math.inf, -math.inf), *sums)


def _with_first_key(mask: Any) -> MaskFn:
    """Return the mask less all keys but the first of the sequence."""
    mask = mask.mask if isinstance(mask, BlockMask) else mask
    if isinstance(mask, PackedMask):
        return replace(mask, mask=_with_first_key(mask.mask))
    return _is_first_key if mask is None else Both(mask, _is_first_key)


def _is_first_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx == 0


def _why_not(request: Request) -> str:
    """Return why a call cannot be measured; empty if it can."""
    tensors, keys = (request.q, request.k, request.v), request.keys
    if type(keys) is KV:
        return "they are over a KV cache"
    if type(keys) is Coords:
        return "their queries come after a past"
    if keys is not None:
        return "their keys are split over ranks (layout=)"
    if other := [type(x) for x in tensors if type(x) not in (Tensor, nn.Parameter)]:
        return f"their tensors are of type {other[0].__name__}"
    if any(x.is_meta for x in tensors):
        return "their tensors are on the meta device"
    if transforms() or in_forward_mode():
        return "they are in a transform of torch.func, or in forward mode"
    if torch._C._is_tracing() or capturing(request.q.device):
        return "torch.jit or a CUDA graph records them"
    return ""


def _over_ranks(sums: dict[str, _Sums], process_group: Any) -> dict[str, _Sums]:
    """Return the statistics over all ranks: two all-reduces for the whole model."""
    distributed = torch.distributed
    own = [(name, len(x.queries)) for name, x in sums.items()]
    layers: list[Any] = [None] * distributed.get_world_size(process_group)
    distributed.all_gather_object(layers, own, group=process_group)
    if any(of_rank != own for of_rank in layers):
        raise ArgumentError(
            f"the ranks of group= have measured other layers (name, heads): {layers}; they have to "
            "call the same model equally often"
        )
    if not sums:
        return sums
    device = next(iter(sums.values())).queries.device
    packed = [
        torch.cat([x.to(device) for x in column]) for column in zip(*sums.values(), strict=True)
    ]
    largest, others = packed[0], torch.cat(packed[1:])
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=process_group)
    distributed.all_reduce(others, group=process_group)
    heads = [count for _, count in own]
    columns = (x.split(heads) for x in (largest, *others.chunk(4)))
    return dict(zip(sums, map(_Sums, *columns), strict=True))
