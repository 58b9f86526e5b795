"""Run the Hopper kernels on the CPU: the same source, with Gluon played by PyTorch and threads.

Gluon has no interpreter. Here every partition of a CTA is a thread, shared memory a tensor, and a
barrier counts arrivals and bytes as the hardware's does. What is asynchronous on the card happens as
late as it may: a product reads shared memory when it is waited for, and a copy to global memory when
that is; it is visible there when others may be signalled, or at the end. So a stage released too early, a missing fence, a wrong count, phase or number of bytes
shows as a wrong result, an error or a deadlock, which is found at once. It does not know registers,
layouts or time: that is for the compile test and the card.

CTAs run one after the other, in the order of their numbers, so one that waits for a later one is
found; or where `Kernel.abreast` all at once, the last one first.
"""

import importlib
import inspect
import re
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from headway import backends
from headway.backends import gpu, hopper
from headway.backends.gpu import exact_sums, outputs
from headway.backends.gpu.runtime import call_plan as plans
from headway.backends.gpu.runtime import launcher
from headway.backends.hopper import bias_tables, launch, launch_plan
from headway.backends.hopper.bwd import plan as bwd_plan
from headway.backends.hopper.config import KernelConfig
from headway.backends.hopper.device import mma
from headway.backends.hopper.fwd import plan as fwd_plan

from . import inline_assembly

PATIENCE = 120.0  # seconds without any barrier completing; also on a busy machine a deadlock
LOOKS = 100_000  # in a row, at a place in global memory


class Wrong(AssertionError):
    """A rule of the hardware was broken."""


# -- barriers -------------------------------------------------------------------------------------


class Machine:
    """What the partitions of one CTA share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.barriers: dict[int, Barrier] = {}

    def named(self, number: int, partitions: int, waits: bool) -> None:
        """A partition arrives at a barrier that has a number, and may wait for the others."""
        with self.changed:
            bar = self.barriers.setdefault(number, Barrier(partitions))
            phase = bar.phase
        bar.arrive()
        if waits:
            bar.wait(phase)

    def wait(self, ready) -> None:
        with self.changed:
            while not ready():
                if self.error is not None:
                    raise Wrong("another partition failed")
                if not self.changed.wait(PATIENCE) and not ready():
                    raise Wrong("deadlock: no barrier completed")

    def spin(self) -> None:
        """A look at global memory, which something else is to change."""
        if self.error is not None:
            raise Wrong("another partition failed")
        here.looks = getattr(here, "looks", 0) + 1
        if here.looks > LOOKS:
            raise Wrong("a wait for what no CTA before it does")
        time.sleep(1e-4 if here.looks > 1 else 0)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()


here = (
    threading.local()
)  # .machine, .name, .groups (products in flight), .stores, .landing (copies)


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all bytes are in."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, count: int = 1, bytes: int = 0, done: int = 0) -> None:
        with here.machine.changed:
            self.pending -= count
            self.bytes += bytes - done
            if self.pending < 0:
                raise Wrong("more arrivals than a barrier counts")
            if self.pending == 0 and self.bytes < 0:
                raise Wrong("more bytes than a barrier expects")
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase ^ 1
                here.machine.changed.notify_all()

    def wait(self, phase: int) -> None:
        here.machine.wait(lambda: self.phase != phase)


class Barriers:
    """Some barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.all: list[Barrier | None] = [None] * count

    def index(self, n) -> "One":
        return One(self.all, int(n))


class One:
    def __init__(self, barriers: list, n: int) -> None:
        self.barriers, self.n = barriers, n

    @property
    def it(self) -> Barrier:
        return self.barriers[self.n]


class mbarrier:
    class MBarrierLayout:
        pass

    @staticmethod
    def init(bar, count):
        bar.barriers[bar.n] = Barrier(count)

    @staticmethod
    def wait(bar, phase, pred=True):
        if pred:
            bar.it.wait(int(phase))

    @staticmethod
    def arrive(bar, count=1, pred=True):
        if pred:
            bar.it.arrive(count)

    @staticmethod
    def expect(bar, bytes, pred=True):
        if pred:
            bar.it.arrive(1, bytes=bytes)


# -- shared memory, copies and products -----------------------------------------------------------


class Layout:
    """Of a buffer or a descriptor: all are read in the order of rows and columns."""

    swizzle_byte_width = element_bitwidth = 0


class Shared:
    """A view of shared memory. `written`: by partition, the addresses stored to since its fence."""

    books = threading.RLock()  # partitions look at what others have written

    def __init__(self, x: torch.Tensor, owner: "Shared | None" = None) -> None:
        self.x, self.shape, self.dtype, self.layout = x, tuple(x.shape), x.dtype, Layout
        self.written: dict[str, list[range]] = {} if owner is None else owner.written
        self.parts: dict[int, Shared] = {}

    @cached_property
    def span(self) -> range:
        last = sum((n - 1) * step for n, step in zip(self.x.shape, self.x.stride(), strict=True))
        return range(self.x.data_ptr(), self.x.data_ptr() + (last + 1) * self.dtype.itemsize)

    def index(self, n) -> "Shared":
        n = int(n)
        if n not in self.parts:
            self.parts[n] = Shared(self.x[n], self)
        return self.parts[n]

    def slice(self, start, length, dim=0) -> "Shared":
        return Shared(self.x.narrow(dim, int(start), int(length)), self)

    def permute(self, order) -> "Shared":
        return Shared(self.x.permute(order), self)

    def store(self, value) -> None:
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise Wrong(f"{value.dtype} {tuple(value.shape)} stored as {self.dtype} {self.shape}")
        self.x.copy_(value)
        span = self.span
        with self.books:
            for name, spans in self.written.items():  # what is no longer there needs no fence
                self.written[name] = [s for s in spans if s != span]
            self.written.setdefault(here.name, []).append(span)

    def load(self, layout) -> torch.Tensor:
        return self.x.clone()

    def reinterpret(self, dtype, shape, layout) -> "Shared":
        if dtype != self.dtype:  # other numbers in the same bytes
            count = torch.Size(shape).numel()
            if dtype.itemsize * count > self.x.numel() * self.dtype.itemsize:
                raise Wrong("a view larger than its memory")
            return Shared(self.x.view(-1).view(dtype)[:count].view(shape), self)
        # A swizzled matrix lies in strips of 64 columns, one after the other.
        (*many, rows, cols), width = self.shape, shape[-1]
        if width % 64 or cols % width or shape[-2] != rows or dtype.itemsize != 2:
            raise Wrong(f"{self.shape} seen as {shape}")
        strips = self.x.view(*many, rows, cols // width, width)
        return Shared.strips(strips.movedim(-2, -3), self)

    @staticmethod
    def strips(x: torch.Tensor, owner: "Shared") -> "Shared":
        view = Shared(x, owner)
        view.index = lambda n: Shared(x[int(n) // x.shape[1]][int(n) % x.shape[1]], owner)
        return view

    def read(self) -> torch.Tensor:
        """By the tensor cores or TMA."""
        mine = self.span
        with self.books:
            written = [s for spans in self.written.values() for s in spans]
        if any(s.start < mine.stop and mine.start < s.stop for s in written):
            raise Wrong("shared memory stored to and then read with no fence between")
        return self.x


def fence_async_shared() -> None:
    with Shared.books:
        for shared in here.all:
            shared.written.pop(here.name, None)


def tma_load(desc, at, bar, to, pred=True):
    if not pred:
        return
    if [int(n) for n in desc.block_shape if n != 1 or desc.block_shape.index(n)][-len(to.shape):] != list(to.shape):  # fmt: skip
        raise Wrong(f"a block of {desc.block_shape} copied to {to.shape}")
    inside, part = _part(desc, at, to.shape)
    to.x.zero_()
    if inside is not None:
        to.x[part] = inside
    bar.it.arrive(0, done=to.x.numel() * to.x.element_size())


def _part(desc, at, shape):
    """What there is of a block in global memory, and where that lies in it."""
    whole = torch.as_strided(desc.base, desc.shape, desc.strides, desc.base.storage_offset())
    at = [int(n) for n in at]
    lead = len(at) - len(shape)
    for n, size in zip(at[:lead], desc.shape[:lead], strict=True):
        if not 0 <= n < size:
            return None, None
        whole = whole[n]
    there = []
    for n, size, rows in zip(at[lead:], desc.shape[lead:], shape, strict=True):
        stop = min(n + rows, size)
        if n >= stop:
            return None, None
        there.append(slice(n, stop))
    return whole[tuple(there)], tuple(slice(0, s.stop - s.start) for s in there)


def tma_store(desc, at, source):
    here.stores.append((desc, at, source, False))


def tma_reduce_add(desc, at, source):
    here.stores.append((desc, at, source, True))


def tma_store_wait(pending):
    while len(here.stores) > pending:
        desc, at, source, add = here.stores.pop(0)
        here.landing.append((desc, at, source.read().clone(), add))


def inline_ptx(asm, n=0, condition=1):
    """A barrier that has a number."""
    kind, number, threads = re.search(r"(bar\.\w+) (\S+), (\d+)", asm).groups()
    if "$2" not in asm or int(condition):
        here.machine.named(
            int(number.replace("$1", str(int(n)))), -(-int(threads) // 128), kind == "bar.sync"
        )


def tma_store_wait_visible():
    tma_store_wait(0)
    while here.landing:
        desc, at, x, add = here.landing.pop(0)
        with Desc.lock:
            inside, part = _part(desc, at, x.shape)
            if inside is not None:
                inside.copy_(inside + x[part] if add else x[part])


class Desc:
    lock = threading.Lock()


class Token:
    """A product in flight."""

    def __init__(self, run) -> None:
        self.run, self.value = run, None

    def settle(self) -> None:
        self.value = self.run()


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    def run():
        before = acc.value if isinstance(acc, Token) else acc
        x, y = (t.read() if isinstance(t, Shared) else t for t in (a, b))
        made = x.float() @ y.float()
        if made.shape != before.shape:
            raise Wrong(f"a product of {tuple(made.shape)} added to {tuple(before.shape)}")
        return before + made if use_acc else made

    token = Token(run)
    here.groups.append(token)
    return token if is_async else warpgroup_mma_wait(0, [token])


def warpgroup_mma_wait(outstanding=0, deps=()):
    while len(here.groups) > outstanding:
        here.groups.pop(0).settle()
    values = []
    for x in deps:
        if isinstance(x, Token):
            if x.value is None:
                raise Wrong("a product read before it was waited for")
            x = x.value
        values.append(x)
    return values[0] if len(values) == 1 else tuple(values)


# -- the language ---------------------------------------------------------------------------------


class Pointer:
    def __init__(self, base: torch.Tensor, at: Any = 0, flat: torch.Tensor | None = None) -> None:
        self.base, self.at = base, at
        if flat is not None:
            self.flat = flat

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.base.dtype)

    def __add__(self, more):
        return Pointer(self.base, self.at + more, self.flat)

    __radd__ = __add__

    def to(self, dtype):
        """As a number: what assembly takes."""
        return self

    @cached_property
    def flat(self) -> torch.Tensor:
        """All of the storage, so that strides lead where they do on the card."""
        size = self.base.untyped_storage().nbytes() // self.base.element_size()
        return torch.as_strided(self.base, (size,), (1,), 0)

    def index(self) -> torch.Tensor:
        return torch.as_tensor(self.at) + self.base.storage_offset()


def _plain(x):
    """Integers of no dimension as Python's, which loops and addresses take."""
    if isinstance(x, torch.Tensor) and not x.dim() and not x.dtype.is_floating_point:
        return x.item()
    return x


def _pair(a, b):
    a, b = (torch.as_tensor(x) for x in (a, b))
    return a, b


_held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
_held_dtype: torch.dtype | None = None


def _add(flat: torch.Tensor, at: torch.Tensor, values: torch.Tensor, looks: Any = None) -> Any:
    """Add to memory, now or, of what is `shuffled`, at the end of the launch. Return what was at
    `looks`."""
    with Desc.lock:
        old = None if looks is None else flat[looks].clone()
        if _held is not None and flat.dtype == _held_dtype:
            _held.append((flat, at.reshape(-1), values.reshape(-1)))
        else:
            flat.index_add_(0, at.reshape(-1), values.reshape(-1))
    return old


@contextmanager
def shuffled(seed: int, dtype: torch.dtype = torch.int64):
    """Inside, what a launch adds to sums of a dtype in global memory is added at its end, in an order
    of the seed's. Gives what was added: memory, places, values."""
    global _held, _held_dtype
    _held_dtype = dtype
    every: list = []
    run, draw = Kernel.__getitem__, torch.Generator().manual_seed(seed)

    def launch(self, grid):
        def and_add(*args, **named):
            global _held
            _held = []
            run(self, grid)(*args, **named)
            held, _held = _held, None
            every.extend(held)
            of = {flat.data_ptr(): flat for flat, *_ in held}
            for pointer, flat in of.items():
                parts = [x[1:] for x in held if x[0].data_ptr() == pointer]
                at, values = (torch.cat(x) for x in zip(*parts, strict=True))
                order = torch.randperm(len(at), generator=draw)
                flat.index_add_(0, at[order], values[order])

        return and_add

    with mock.patch.object(Kernel, "__getitem__", launch):
        try:
            yield every
        finally:
            _held = None


class Language(types.ModuleType):
    """`gluon.language` and `triton.language`, as far as the kernels go."""

    float32, float64, float16, bfloat16 = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
    )  # fmt: skip
    int1, int8, int16, int32, int64, uint8 = (
        torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    )  # fmt: skip
    PropagateNan = types.SimpleNamespace(ALL=True)

    constexpr = staticmethod(lambda x: x)
    static_range = staticmethod(range)
    to_tensor = staticmethod(lambda x: x)
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    SliceLayout = staticmethod(lambda *a, **k: None)
    BlockedLayout = SwizzledSharedLayout = NVMMASharedLayout = SliceLayout
    NVMMADistributedLayout = DotOperandLayout = DistributedLinearLayout = SliceLayout

    arange = staticmethod(lambda a, b, layout=None: torch.arange(a, b, dtype=torch.int32))
    exp = staticmethod(lambda x: torch.as_tensor(x).exp())
    exp2 = staticmethod(lambda x: torch.as_tensor(x).exp2())
    log = staticmethod(lambda x: torch.as_tensor(x).log())
    log2 = staticmethod(lambda x: torch.as_tensor(x).log2())
    sqrt = staticmethod(lambda x: torch.as_tensor(x).sqrt())
    sin = staticmethod(lambda x: torch.as_tensor(x).sin())
    cos = staticmethod(lambda x: torch.as_tensor(x).cos())
    floor = staticmethod(lambda x: torch.as_tensor(x).floor())
    ceil = staticmethod(lambda x: torch.as_tensor(x).ceil())
    abs = staticmethod(lambda x: abs(x))
    reshape = staticmethod(lambda x, shape: x.reshape(shape))
    permute = staticmethod(lambda x, order: x.permute(order))
    split = staticmethod(lambda x: x.unbind(-1))
    join = staticmethod(lambda a, b: torch.stack([a, b], -1))
    broadcast = staticmethod(torch.broadcast_tensors)
    broadcast_to = staticmethod(lambda x, shape: torch.as_tensor(x).broadcast_to(shape))
    cdiv = staticmethod(lambda a, b: -(-a // b))
    program_id = staticmethod(lambda axis: here.program[0][axis])
    num_programs = staticmethod(lambda axis: here.program[1][axis])

    @staticmethod
    def inline_asm_elementwise(asm, constraints, args, **options):
        if asm == "":
            return args[0]
        if asm == mma._HALVES.value:
            return args[0].float()
        if product := re.search(r"mul\.wide\.u32 x, \$2, (\d+);", asm):
            x = (torch.as_tensor(args[0]).long() & 0xFFFFFFFF) * int(product[1])
            return _plain(x.int()), _plain((x >> 32).int())
        if "set.geu" in asm:  # of dropout: `_ones`, or `_mark`
            word, limit = (
                torch.as_tensor(x).int()[..., None].view(torch.float16) for x in args[:2]
            )
            kept = ~(word.abs() < limit)
            if len(args) == 2:
                return kept.half().view(torch.int32)[..., 0]
            return (-kept.short()).view(torch.int32)[..., 0] & args[2] | args[3]
        if "f16x2.f32" in asm:  # `drop_pairs` of dropout
            return args[0].to(options["dtype"]) * args[1].view(options["dtype"])
        if "global" in asm:
            return inline_assembly.elementwise(asm, constraints, args, _add)
        if asm.startswith("lg2.approx.ftz.f32 "):
            return args[0].log2()
        if not asm.startswith("tanh.approx.f32 "):
            raise Wrong(f"no meaning is known for {asm}")
        return args[0].tanh()

    @staticmethod
    def full(shape, value, dtype, layout=None):
        return torch.full([int(n) for n in shape], value, dtype=dtype)

    @staticmethod
    def zeros(shape, dtype, layout=None):
        return Language.full(shape, 0, dtype)

    @staticmethod
    def cast(x, dtype, bitcast=False):
        if bitcast:
            return x.view(dtype)
        if isinstance(x, float) and dtype.is_floating_point:
            return float(torch.tensor(x, dtype=dtype))
        if isinstance(x, int) and dtype in (torch.int32, torch.int64):
            half = 1 << torch.iinfo(dtype).bits - 1
            return (x + half) % (2 * half) - half  # it wraps
        return x.to(dtype) if isinstance(x, torch.Tensor) else x

    @staticmethod
    def where(c, a, b):
        if not isinstance(c, torch.Tensor) and not any(isinstance(x, torch.Tensor) for x in (a, b)):
            return a if c else b
        return _plain(torch.where(torch.as_tensor(c), a, b))

    @staticmethod
    def maximum(a, b, propagate_nan=False):
        a, b = _pair(a, b)
        return _plain(torch.maximum(a, b) if propagate_nan or not a.dtype.is_floating_point
                      else torch.fmax(a, b))  # fmt: skip

    @staticmethod
    def minimum(a, b, propagate_nan=False):
        a, b = _pair(a, b)
        return _plain(torch.minimum(a, b) if propagate_nan or not a.dtype.is_floating_point
                      else torch.fmin(a, b))  # fmt: skip

    @staticmethod
    def max(x, axis):
        if x.dtype.is_floating_point:  # which skips NaN
            x = x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        return _plain(x.amax(axis))

    @staticmethod
    def sum(x, axis, keep_dims=False):
        return _plain(x.sum(axis, keepdim=keep_dims))

    @staticmethod
    def load(pointer, mask=None, other=None, volatile=False):
        if volatile:
            here.machine.spin()
        at, flat = pointer.index(), pointer.flat
        if mask is not None:
            mask = torch.as_tensor(mask)
            if not mask.any():
                return _plain(torch.full(at.shape, other, dtype=flat.dtype))
            at = torch.where(mask, at, at[mask].reshape(-1)[0] if at.dim() else at)
        if at.numel() and not (int(at.min()) >= 0 and int(at.max()) < len(flat)):
            raise Wrong("a load outside of its tensor")
        x = flat[at.long()]
        return _plain(x if mask is None else torch.where(mask, x, torch.as_tensor(other, dtype=x.dtype)))  # fmt: skip

    @staticmethod
    def store(pointer, value, mask=True):
        flat = pointer.flat
        at, mask, value = torch.broadcast_tensors(
            pointer.index(), torch.as_tensor(mask), torch.as_tensor(value)
        )
        at = at[mask]
        if at.numel() and not (int(at.min()) >= 0 and int(at.max()) < len(flat)):
            raise Wrong("a store outside of its tensor")
        flat[at.long()] = value[mask].to(flat.dtype)

    @staticmethod
    def atomic_add(pointer, value, mask=None, sem=None):
        mask = True if mask is None else mask
        flat = pointer.flat
        at, mask, value = torch.broadcast_tensors(
            pointer.index(), torch.as_tensor(mask), torch.as_tensor(value)
        )
        return _plain(_add(flat, at[mask].long(), value[mask].to(flat.dtype), at.long()))

    @staticmethod
    def allocate_shared_memory(dtype, shape, layout):
        if isinstance(layout, mbarrier.MBarrierLayout):
            return Barriers(shape[0])
        fill = torch.nan if dtype.is_floating_point else -1
        made = Shared(torch.full(list(shape), fill, dtype=dtype))
        here.all.append(made)
        return made

    @staticmethod
    def warp_specialize(parts, warps, registers):
        machine, shared, program = here.machine, here.all, here.program
        threads = []
        for n, (function, args) in enumerate(parts):
            threads.append(
                threading.Thread(target=_partition, daemon=True,
                                 args=(machine, shared, program, n, function, args))
            )  # fmt: skip
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if machine.error is not None:
            raise machine.error


def _partition(machine, shared, program, n, function, args):
    here.machine, here.all, here.program = machine, shared, program
    here.name, here.groups, here.stores = f"{function.__name__} {n}", [], []
    here.landing, here.looks = [], 0
    torch.set_grad_enabled(False)
    try:
        function(*args)
        if here.groups or here.stores:
            raise Wrong(f"{here.name} ends with work in flight")
        tma_store_wait_visible()
    except BaseException as error:  # noqa: BLE001  (the launching thread raises it)
        machine.fail(error)


# -- kernels --------------------------------------------------------------------------------------


def _fakes() -> dict[str, types.ModuleType]:
    jit = lambda fn=None, **options: (lambda f: f) if fn is None else fn
    gl = Language("language")
    gluon = types.SimpleNamespace(jit=jit, constexpr_function=lambda f: f)
    api = types.ModuleType("simulated.hopper.device.gluon_compat")
    vars(api).update(
        gl=gl, gluon=gluon, mbarrier=mbarrier, fence_async_shared=fence_async_shared,
        reinterpret=Shared.reinterpret, tma_store_wait_visible=tma_store_wait_visible, inline_ptx=inline_ptx, barrier=lambda: None,
        fence_global=lambda: setattr(here, "looks", 0),
        tma_load=tma_load, tma_store=tma_store, tma_reduce_add=tma_reduce_add,
        tma_store_wait=tma_store_wait,
        warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait,
    )  # fmt: skip
    triton = types.ModuleType("triton")
    triton.jit, triton.language, triton.next_power_of_2 = jit, gl, _next_power_of_2
    return {"simulated.hopper.device.gluon_compat": api, "triton": triton, "triton.language": gl}


def _load() -> types.SimpleNamespace:
    """The kernels' own files, with the names they import played by those above."""
    fakes = _fakes() | {"simulated.gpu.runtime.launcher": launcher}
    for name, path in (
        ("simulated", backends.__file__),
        ("simulated.hopper", launch.__file__),
        ("simulated.gpu", gpu.__file__),
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(path).parent)]
        fakes[name] = package
    with mock.patch.dict(sys.modules, fakes):
        load = importlib.import_module
        kernels = {
            "forward": load("simulated.hopper.fwd.kernel"),
            "backward": load("simulated.hopper.bwd.kernel"),
            "backward_wide": load("simulated.hopper.bwd.wide"),
            "epilogue": load("simulated.hopper.fwd.epilogue"),
            "preprocess": load("simulated.gpu.preprocess"),
        }
        for name in ("common", "dq_reduce", "dq_zero", "segments", "wide_dq"):
            kernels[name] = load(f"simulated.hopper.bwd.{name}")
        for name in ("affine_score", "dropout", "hoisted", "relative_bias"):
            kernels[name] = load(f"simulated.hopper.device.{name}")
        text = {n: load(f"simulated.gpu.device.{n}") for n in ("maths", "gradients")}
        kernels["exact_sums"] = load("simulated.gpu.device.exact_sums")
    names = {"triton": fakes["triton"], "tl": fakes["triton.language"], **text}
    return types.SimpleNamespace(names=names, **kernels)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


LOADED = _load()


def _functions(text):
    """What `emit.load_module` gives, of the same source."""
    from headway.backends.gpu.codegen import emit

    code = "\n".join(
        x for x in emit.source(text).split("\n") if not x.startswith(("import", "from"))
    )
    module = types.ModuleType("generated")
    vars(module).update(LOADED.names)
    exec(compile(code, "<generated>", "exec"), vars(module))
    return module


class Kernel:
    """A launcher: `kernel[grid](...)`."""

    abreast = False  # all CTAs at once, the last one first

    def __init__(self, function) -> None:
        self.function, self.arg_names = function, list(inspect.signature(function).parameters)

    def __getitem__(self, grid):
        def run(*args, num_warps=4, maxnreg=None, ptx_options=None, enable_fp_fusion=True, **named):
            def cta(x, y):
                here.machine, here.all, here.program = Machine(), [], ((x, y), grid)
                here.name, here.groups, here.stores = "launch", [], []
                constants = {name: _argument(x) for name, x in named.items()}
                self.function(*map(_argument, args), **constants)

            every = [(x, y) for y in range(grid[1]) for x in range(grid[0])]
            if not self.abreast:
                for at in every:
                    cta(*at)
                return
            with ThreadPoolExecutor(len(every)) as pool:
                list(pool.map(lambda at: cta(*at), every[::-1]))

        return run


def _argument(x, inside=False):
    if isinstance(x, torch.Tensor):
        return Pointer(x.detach())
    if isinstance(x, KernelConfig):  # types are Triton's there, and PyTorch's here
        return replace(x, index_type=getattr(Language, x.index_type.name))
    if isinstance(x, tuple):
        made = [_argument(y, True) for y in x]
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    if hasattr(x, "block_shape"):
        if inside:
            raise Wrong("a launcher takes no descriptors in tuples")
        return Descriptor(x)
    return x


class Descriptor:
    def __init__(self, desc) -> None:
        self.base, self.shape, self.strides = desc.base.detach(), desc.shape, desc.strides
        self.block_shape, self.dtype, self.layout = desc.block_shape, desc.base.dtype, Layout


@contextmanager
def simulating():
    """Inside, the Hopper backend runs on tensors on the CPU."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # partitions take turns as often as they can
    plans.clear()
    with (
        mock.patch.object(backends, "_SELF_TESTED", ()),
        mock.patch.object(hopper, "unavailable", return_value=""),
        mock.patch.object(launch_plan, "processors", return_value=3),
        mock.patch.object(fwd_plan, "forward_kernel", Kernel(LOADED.forward.forward)),
        mock.patch.multiple(
            bwd_plan,
            backward_kernel=Kernel(LOADED.backward.backward),
            backward_wide=Kernel(LOADED.backward_wide.backward_wide),
            postprocess_dq=Kernel(LOADED.common.postprocess_dq),
            BackwardWorkspace=LOADED.preprocess.BackwardWorkspace,
        ),  # fmt: skip
        mock.patch.multiple(
            bias_tables,
            fill_bias_table=Kernel(LOADED.relative_bias.fill_bias_table),
            collect_bias_grad=Kernel(LOADED.relative_bias.collect_bias_grad),
        ),  # fmt: skip
        mock.patch.object(exact_sums, "round_sums", Kernel(LOADED.exact_sums.round_sums)),
        mock.patch.object(launch, "run_preprocess", LOADED.preprocess.run_preprocess),
        mock.patch.object(outputs, "deltas", LOADED.preprocess.deltas),
        mock.patch.object(
            LOADED.preprocess, "preprocess_kernel", Kernel(LOADED.preprocess.preprocess_kernel)
        ),
        mock.patch.object(plans, "load_module", _functions),
    ):
        yield
    plans.clear()
    sys.setswitchinterval(before)
