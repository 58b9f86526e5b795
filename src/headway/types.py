"""Types that all layers share: `Request`, `Spec`, coordinates, caches and results.

Axes: `b` batch, `h` query head (`hq` of them), `hk` key/value heads, `i` query position (`q_len`),
`j` key position (`kv_len`), `d` head width of q and k, `dv` width of v. Query head h reads key head
`h // (hq // hk)`. Letters are the same in signatures, kernels, docs and tests.
"""

import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache, wraps
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import (  # C: loads no compiler
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from .errors import HeadwayError

# The name that this package goes by, and that of its operators (`headway::forward`). A copy under
# another name (a kernel of the Hugging Face Hub, say) registers its own: two may be loaded at once.
PACKAGE = __name__.rpartition(".")[0]
NAMESPACE = re.sub(r"\W", "_", PACKAGE)


REPLICATED_KV = "replicated_kv"  # the plan of a call whose keys every rank has


class ExchangeSpec(NamedTuple):
    """The exchange of keys and values between ranks: a part of a `Spec`, of plain constants.

    - `plan`, `transport`: as `Layout.using` names them; "replicated_kv" where every rank has all
      keys and values, and nothing is exchanged.
    - `own_tiles`: the tiles of the block mask are the caller's lists of blocks.
    - `trains`: whether a gradient is asked for.
    - `draws_seed`: every rank drew a seed of dropout; the first rank's is used.
    - `constants`, `constant_sink`: for each captured tensor and the sink, whether it is not
      trained. Ranks compare the contents of these.
    - `rank`, `ranks`: of the layout.
    - `group`: name of the process group of all ranks.
    - `node_size`: ranks of a node on a mesh of two dimensions; 0 on a mesh of one.
    - `intra_node`, `inter_node`: names of the groups of this node's ranks, and of the ranks with
      this rank's place in every node.
    """

    plan: str
    transport: str
    own_tiles: bool
    trains: bool
    draws_seed: bool
    constants: tuple[bool, ...]
    constant_sink: bool
    rank: int
    ranks: int
    group: str
    node_size: int
    intra_node: str
    inter_node: str


@dataclass(frozen=True)
class Spec:
    """A description of what to compute, without the data: frozen, hashable, with a text form.

    The text crosses the operator boundary. The caches of compiled kernels are keyed by it, less the
    values that are passed at run time. `score` and `mask` are the texts of their graphs
    (`mods.graph`).
    """

    scale: float
    score: str | None = None
    mask: str | None = None
    dropout: float = 0.0
    sink: bool = False
    max_logit: bool = False  # compute the largest logit of every head
    row_max: bool = False  # compute the largest score of every row
    # Compute the entropy of every row of P, or of a score that observes a number, its mean.
    entropy: bool = False
    partial: bool = False  # results in the accumulation dtype: float32, or float64 for float64
    deterministic: bool = False
    tiles: tuple[int, int, int, int] | None = None  # of a given block mask: b, h, tile_q, tile_kv
    backend: str = "reference"
    # Of the captured tensors, ints and floats, how many are the score's: they come first, then the
    # mask's.
    score_tensors: int = 0
    score_ints: int = 0
    score_floats: int = 0
    exact_out: bool = False  # the forward's out in the accumulation dtype, for the backward's delta
    exact_kv: bool = False  # dk and dv in the accumulation dtype, for sums over ranks
    exchange: ExchangeSpec | None = None  # of a call over ranks; backends get None

    def __hash__(self) -> int:
        """Return the hash, computed once: every call looks its plans up by its spec."""
        value = self.__dict__.get("hash")
        if value is None:
            value = self.__dict__["hash"] = hash(tuple(self.values))
        return value

    def __reduce__(self) -> tuple:
        """Pickle the fields without the hash, which differs between processes."""
        return Spec, tuple(self.values)

    def out_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the forward's out for inputs of `dtype`."""
        return acc_dtype(dtype) if self.partial or self.exact_out else dtype

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a call's out, and of its tangent, for inputs of `dtype`."""
        return acc_dtype(dtype) if self.partial else dtype

    def grad_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of dq, and of dk and dv, for inputs of `dtype`."""
        acc = acc_dtype(dtype)
        return acc if self.partial else dtype, acc if self.partial or self.exact_kv else dtype

    @property
    def text(self) -> str:
        """Return the spec as text; `Spec.parse(spec.text) == spec`."""
        *values, exchange = self.values
        # Dynamo makes a constant of a plain tuple, but not of a NamedTuple.
        return _spec_text(*values, None if exchange is None else tuple(exchange))

    @property
    def values(self) -> list[Any]:
        """Return the fields' values in their order; `Spec(*spec.values) == spec`."""
        return [getattr(self, name) for name in _FIELDS]

    def over_ranks(self, exchange: ExchangeSpec) -> "Spec":
        """Return the spec of the same call over ranks. (Dynamo does not trace `replace`.)"""
        values = self.values
        values[-1] = exchange  # the last field
        return Spec(*values)

    @staticmethod
    def parse(text: str) -> "Spec":
        """Read the text form back."""
        return _spec_parse(text)

    @lru_cache(maxsize=4096)  # noqa: B019 of a value: no spec is kept that has no equal in use
    def replace(self, **fields: Any) -> "Spec":
        """Return the spec with other fields, cached together with its hash."""
        return replace(self, **fields)


_FIELDS = tuple(field.name for field in fields(Spec))


_Fn = TypeVar("_Fn", bound=Callable)


def constant_under_compile(fn: Callable) -> None:
    """Let `torch.compile` call `fn` while it traces, and keep the result as a constant.

    It sets the mark that `torch.compiler.assume_constant_result` sets, without importing the
    compiler.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]


_IN_GRAPH: list[Callable] = []


def called_in_graph(fn: _Fn) -> _Fn:
    """Decorate a function that Dynamo does not trace after `allow_in_graph`: calls of it are in its
    graph."""
    _IN_GRAPH.append(fn)
    return fn


def allow_in_graph() -> None:
    """Tell Dynamo which functions are `called_in_graph`, while it traces: earlier would load it."""
    for fn in _IN_GRAPH:
        torch.compiler.allow_in_graph(fn)


constant_under_compile(allow_in_graph)


def refuse_under_compile(error: type[HeadwayError], message: str) -> NoReturn:
    """Raise an error where `torch.compile` takes it for one of its own: a graph break, or with
    fullgraph=True the error that the user sees. To be called by constants of a compiled program."""
    raise _compiled_error(error)(message)


constant_under_compile(refuse_under_compile)


def raise_under_compile(error: HeadwayError) -> None:
    """Raise an error that was caught, as `refuse_under_compile` does, if `torch.compile` traces."""
    if torch.compiler.is_compiling():
        refuse_under_compile(type(error), error.args[0])


def named_under_compile(fn: _Fn) -> _Fn:
    """Decorate a function whose errors `torch.compile` takes for its own, as they are."""

    @wraps(fn)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return fn(*arguments, **options)
        except HeadwayError as error:
            raise_under_compile(error)
            raise

    return call  # type: ignore[bad-return]


@lru_cache
def _compiled_error(error: type[HeadwayError]) -> type[HeadwayError]:
    from torch._dynamo.exc import Unsupported

    if issubclass(error, Unsupported):
        return error
    return type(error.__name__, (Unsupported, error), {"__module__": error.__module__})


def inlined_or_eager(fn: _Fn) -> _Fn:
    """Decorate a function that `torch.compile` inlines into its caller, but never compiles by
    itself: after a graph break it runs eagerly, and so does everything that it calls."""
    skip = _FrameAction.SKIP
    set_code_exec_strategy(
        fn.__code__,  # type: ignore[attr-defined]
        _FrameExecStrategy(skip, skip),
    )
    return fn


def fixed(number: Any) -> float:
    """Return the number as a constant of a compiled program: `dynamic=True` would make it a
    symbol."""
    if torch.compiler.is_compiling():
        numerator, denominator = float(number).as_integer_ratio()
        return numerator / denominator
    return float(number)


def surely(condition: Any) -> bool:
    """Return whether a condition on sizes holds, False where a compiler cannot know it."""
    if not torch.compiler.is_compiling() and type(condition) is bool:
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _spec_text(*values: object) -> str:
    return _spec_json(values)


constant_under_compile(_spec_text)


@lru_cache(maxsize=4096)
def _spec_json(values: tuple) -> str:
    named = dict(zip(_FIELDS, values, strict=True))
    exchange = named.pop("exchange")
    if exchange is not None:
        named["exchange"] = ExchangeSpec(*exchange)._asdict()
    return json.dumps(named)


@lru_cache(maxsize=4096)
def _spec_parse(text: str) -> Spec:
    values = json.loads(text)
    if values["tiles"] is not None:
        values["tiles"] = tuple(values["tiles"])
    if "exchange" in values:
        exchange = ExchangeSpec(**values["exchange"])
        values["exchange"] = exchange._replace(constants=tuple(exchange.constants))
    return Spec(**values)


class Request(NamedTuple):
    """A call as the caller wrote it: the arguments of `headway.attention`, not yet checked.

    - `max_logit`, `row_max`, `entropy`: whether to compute the largest logit of every head, the
      largest score of every row, and the entropy of every row of P.
    - `partial`: results in the accumulation dtype.
    - `trains`: a backward follows, whether or not a tensor requires grad.
    - `learned`: the tensors that the score captures and that get a gradient; None: those that
      require grad.
    - `keys`: where the keys are. None: all of them are in k and v. `Coords`: k and v hold a part,
      at these positions. `KV`: in a KV cache (`headway.inference`). `Layouts` of
      `headway.distributed`: over ranks.
    - `offsets`: the global indices of the first batch row and query head of a shard; None for calls
      that are not sharded.
    - `moves`: whether the call has tangents besides, which are passed beside the request.
    - `auxiliary`: whether it is a pass that measures another call.
    """

    q: Any
    k: Any
    v: Any
    score: Any = None
    mask: Any = None  # a function, a value of the library or a block mask
    scale: Any = None
    sink: Any = None
    dropout: Any = 0.0
    seed: Any = None
    deterministic: bool = False
    backend: str = "auto"
    max_logit: bool = False
    row_max: bool = False
    entropy: bool = False
    partial: bool = False
    keys: "Coords | KV | Any | None" = None
    offsets: tuple[int, int] | None = None
    trains: bool = False
    learned: "tuple[Tensor, ...] | None" = None
    moves: bool = False
    auxiliary: bool = False


class Captured(NamedTuple):
    """Values that scores and masks capture, at run time, in the order of their graphs' inputs."""

    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]

    def and_then(self, other: "Captured") -> "Captured":
        """Return the values of both, these first."""
        return Captured(
            self.tensors + other.tensors, self.ints + other.ints, self.floats + other.floats
        )


class Coords(NamedTuple):
    """Global coordinates of local tensors: what score, mask and dropout see as b, h, i and j.

    A shard, a decode step and a packed layout differ in coordinates alone, not in kernels.
    """

    b: int = 0  # global batch index of the first row of the batch
    h: int = 0  # global index of the first query head
    q: int = 0  # position of the first query; not used where q_pos is given
    kv: int = 0  # position of the first key; not used where kv_pos is given
    # Integers: the position of every query and key, on q's device (`arguments.check_coords`).
    q_pos: Tensor | None = None  # (q_len,) or (b, q_len)
    kv_pos: Tensor | None = None  # (kv_len,) or (b, kv_len)
    # The caller promises that positions are consecutive within every 128 rows, of which the first
    # is at a multiple of 16, and in 0 to this number, which is not included. Kernels then count
    # instead of reading q_pos and kv_pos. 0: no promise.
    straight_below: int = 0

    def positions(self, q_len: int, kv_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return int64 positions of queries and keys, `(1 or b, length)` each."""
        pairs = ((self.q_pos, self.q, q_len), (self.kv_pos, self.kv, kv_len))
        q, kv = (
            torch.arange(start, start + length, device=device)[None]
            if pos is None
            else (pos if pos.dim() == 2 else pos[None]).to(torch.int64)
            for pos, start, length in pairs
        )
        return q, kv


WHOLE = Coords()


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # of caches


class KV(NamedTuple):
    """A KV cache: how many keys every row of the batch has, and where they are.

    kv_idx is the logical position of a key in its row, also where pages are scattered in memory.
    Nothing from the row's length on is read. The queries are the last positions of their row:
    q_idx = lengths[b] - (queries of the row) + i. Kernels and plans depend on the capacity, never
    on a length.
    """

    lengths: Tensor  # (b,) int32 on q's device: keys of every row; the host never reads it
    # (b, max_pages) int32: k and v are then pages, (pages, hk, page, d), and key j of a row lies on
    # page page_table[b, j // page]. Entries of pages that no query sees may hold anything.
    page_table: Tensor | None = None
    # (b + 1,) int32: q is packed, (1, hq, tokens, d), and row r has cu_q[r]:cu_q[r + 1].
    cu_q: Tensor | None = None
    max_q: int = 1  # no row has more queries
    k_scale: Tensor | None = None  # (b, hk) float32, any strides: multiplies k
    v_scale: Tensor | None = None  # (b, hk) float32, any strides: multiplies v

    def capacity(self, k: Tensor) -> int:
        """Return how many keys a row has room for."""
        return k.shape[2] * (1 if self.page_table is None else self.page_table.shape[1])


class Forward(NamedTuple):
    """Results of a forward; those that were not requested are empty tensors."""

    out: Tensor  # (b, hq, q_len, dv)
    lse: Tensor  # (b, hq, q_len) natural log, float32 (float64 for float64 inputs)
    max_logit: Tensor  # (b, hq) or (0,)
    row_max: Tensor  # (b, hq, q_len) or (0,)
    # (b, hq, q_len), of lse's dtype, or (0,): where the score observes a number, its mean.
    entropy: Tensor


class Tangents(NamedTuple):
    """The tangents of a call's inputs, each of its input's shape and dtype. None: the input does
    not move, and its products are left out.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    sink: Tensor | None
    captured: tuple[Tensor | None, ...]  # one for each tensor that the score captures

    @property
    def moving(self) -> tuple[int, ...]:
        """Return the numbers of the captured tensors that have a tangent."""
        return tuple(n for n, t in enumerate(self.captured) if t is not None)


class Dual(NamedTuple):
    """Results of a forward, and the tangents of out, lse and entropy."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    row_max: Tensor
    entropy: Tensor
    out_tangent: Tensor  # of out's shape; the inputs' dtype, or the accumulation dtype if partial
    lse_tangent: Tensor  # of lse's shape and dtype; 0 where a query sees nothing
    entropy_tangent: Tensor  # of entropy's shape and dtype


class Grads(NamedTuple):
    """Results of a backward; `captured` has one entry per tensor of the score."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    captured: list[Tensor | None]


class _OutLseMaximum(NamedTuple):
    out: Tensor
    lse: Tensor
    max_logit: Tensor


class AttentionOutput(_OutLseMaximum):
    """Results of `attention_with_stats`.

    - `out`: `(b, hq, q_len, dv)`, the dtype of q.
    - `lse`: `(b, hq, q_len)`, natural-log sum of exponentials over the kept keys and the sink;
      float32 (float64 for float64 inputs); -inf where a query sees nothing. Differentiable.
    - `max_logit`: `(b, hq)`, the largest scaled logit over kept pairs, signed, before the score
      function; -inf where a head keeps nothing. Carries no gradient.

    It unpacks into these three. Fields besides, None unless you ask for them, each of lse's shape
    and dtype and differentiable (a transform such as `torch.vmap` drops them: return them from your
    function by themselves):

    - `entropy`: −Σ P log P over the kept keys and the sink; 0 where a query sees nothing.
    - `sink_mass`: P of the sink. Without a sink: P of the first key of the sequence, to which
      models send what they have no use for (Xiao et al. 2023, arXiv 2309.17453).
    """

    entropy: Tensor | None = None
    sink_mass: Tensor | None = None


class AttentionGradients(NamedTuple):
    """Results of `attention_backward`, in float32 (float64 for float64 inputs), so that those of
    disjoint keys add up.

    - `dq`, `dk`, `dv`: in the shapes of q, k and v.
    - `dsink`: `(hq,)`; None without a sink.
    - `captured`: for each tensor that `score` captures and that requires grad, its gradient, in the
      order in which the score uses them first.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None
    captured: tuple[Tensor, ...]


class AttentionJVP(NamedTuple):
    """Results of `attention_jvp_with_stats`: those of `attention_with_stats`, and the tangents of
    out and lse, of their shapes and dtypes. `lse_tangent` is 0 where a query sees nothing.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    out_tangent: Tensor
    lse_tangent: Tensor


def as_int(number: Any) -> Any:
    """Return an integer (NumPy's too) as Python's int, and a compiler's symbol unchanged. None for
    anything else: booleans and tensors are not integers."""
    if type(number) is int:
        return number
    if isinstance(number, bool | Tensor):
        return None
    if isinstance(number, torch.SymInt):
        return number
    try:
        return operator.index(number)
    except TypeError:
        return None


def as_real(number: Any) -> Any:
    """Return a real number as Python's int or float, and a compiler's symbol unchanged. None for
    anything else, as in `as_int`."""
    if type(number) is float or type(number) is int:
        return number
    if isinstance(number, torch.SymInt | torch.SymFloat):
        return number
    return None if isinstance(number, bool) or not isinstance(number, Real) else float(number)


def as_bool(x: Any) -> bool | None:
    """Return a boolean of Python or NumPy, 1 or 0 as Python's bool. None for anything else: strings
    and tensors are not flags."""
    if type(x) is bool:
        return x
    if type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_"):
        return bool(x)
    number = as_int(x)
    return bool(number) if type(number) is int and number in (0, 1) else None


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`, without the microsecond that it takes where x has that dtype."""
    return x if x.dtype == dtype else x.to(dtype)
