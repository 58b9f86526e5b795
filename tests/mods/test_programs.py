"""Random programs: a function means what it does, now, whatever was called before.

Each program (`programs.py`) is run, called, changed in one thing that it reads, and called again. The
truth is the same function on index tensors that broadcast, with no tracing at all, and a dense softmax
in float64. Nothing may be refused but what the plain tracer refuses at a first call too, and a
value that is read out of a tensor.

    python -m mods.test_programs --programs 5000        (in tests/; --help says more)
"""

import argparse
import linecache
import math
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headway import call_cache
from headway.compat import flex
from headway.errors import ModError
from headway.mods import lowering
from headway.mods.tracing import capture

from .programs import KV_LEN, NUMBERS, Q_LEN, B, H, Program, program

pytestmark = pytest.mark.usefixtures("one_thread")
D = 4


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def given(seed: int) -> Given:
    g = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(B, H, n, D, generator=g, dtype=torch.float32)
        for n in (Q_LEN, KV_LEN, KV_LEN, Q_LEN)
    ]
    return Given(made[0].requires_grad_(), *made[1:])


# -- the ways in ----------------------------------------------------------------------------------
# Text too: what is compiled reads the program's globals, as a user's step does.

_BLOCKS = "hw.block_mask({mask}, *_sizes, q.shape[2], k.shape[2], tile=(4, 4))"
_FLEX = "_flex.create_block_mask({mask}, *_sizes, q.shape[2], k.shape[2], 'cpu', BLOCK_SIZE=4)"
ENTRANCES = {
    "attention": "hw.attention(q, k, v, {score}, {mask})",
    "attention_with_stats": "hw.attention_with_stats(q, k, v, {score}, {mask}).out",
    "reference": "hw.attention(q, k, v, {score}, {mask}, backend='reference')",
    "block_mask": f"hw.attention(q, k, v, {{score}}, {_BLOCKS})",
    "flex block_mask": f"_flex.flex_attention(q, k, v, {{score}}, {_FLEX})",
    "flex score": "_flex.flex_attention(q, k, v, {score})",
}
COMPILED = ("attention", "attention_with_stats")


def step_of(p: Program, space: dict[str, Any], call: str | None = None) -> Callable:
    """`step(q, k, v)` in the program's namespace."""
    call = (call or ENTRANCES[p.entrance]).format(mask=p.mask, score=p.score)
    space.update(_flex=flex, _dense=_dense, _sizes=(B, H))
    _execute(f"def _step(q, k, v):\n    return {call}\n", space, f"<step {p.seed}>")
    return space["_step"]


def entrance_fits(p: Program) -> bool:
    if p.entrance == "flex block_mask" and "host module" in p.forms:
        return False  # it counts arguments, as the original does
    return not (p.entrance == "flex score" and (p.score is None or p.mask is not None))


def truth(p: Program, space: dict[str, Any], x: Given) -> list[Tensor]:
    """out, and the gradients of q and of what learns: no tracing, and float64."""
    mask, score = (None if of is None else eval(of, space) for of in (p.mask, p.score))
    return _with_gradients(_dense(mask, score, x.q, x.k, x.v), x, space)


def _dense(mask: Any, score: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = [
        torch.arange(n).view([-1 if dim == m else 1 for dim in range(4)])
        for m, n in enumerate((B, H, Q_LEN, KV_LEN))
    ]
    s = (q.double() @ k.double().mT / math.sqrt(D)).float()
    kept = torch.ones_like(s, dtype=torch.bool)
    if mask is not None:
        kept = kept & mask(*at)
    t = s.double()
    if score is not None:
        t = score(s.clone(), *at).double().expand_as(s)
    t = t.masked_fill(~kept, -math.inf)
    nothing = (t == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(t.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return weights @ v.double()


def _with_gradients(out: Tensor, x: Given, space: dict[str, Any]) -> list[Tensor]:
    leaves = [x.q, *space["LEARNED"]]
    grads: list[Any] = [None] * len(leaves)
    if out.requires_grad:
        grads = [*torch.autograd.grad(out, leaves, x.dout.to(out.dtype), allow_unused=True)]
    made = [torch.zeros_like(n) if g is None else g for n, g in zip(leaves, grads, strict=True)]
    return [out.detach(), *(g.detach() for g in made)]


# -- running a program ----------------------------------------------------------------------------


class Result(NamedTuple):
    """`kind`: "right", "no effect", "refused", or a fault: "stale" (the answer of an earlier
    state), "wrong", "error"."""

    kind: str
    what: str = ""  # the change after which it was seen, "first call" where there was none
    detail: str = ""


FAULTS = ("stale", "wrong", "error", "not fresh")


def _execute(code: str, space: dict[str, Any], name: str) -> None:
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    exec(compile(code, name, "exec"), space)


@contextmanager
def running(p: Program) -> Iterator[tuple[dict[str, Any], Callable[[str], None]]]:
    """The program's namespace after its first lines, and how to run more of them in it."""
    module = types.ModuleType(p.name)
    space, modules = module.__dict__, dict(sys.modules)
    if p.registered:
        sys.modules[p.name] = module
    before = torch.get_default_dtype()

    def more(code: str) -> None:
        with torch.no_grad():
            _execute(code, space, f"<program {p.seed}>")

    try:
        more(p.source)
        yield space, more
    finally:
        torch.set_default_dtype(before)
        for name in [name for name in sys.modules if name not in modules]:
            if name == p.name or name.startswith("program_module_"):
                del sys.modules[name]


def _apart(got: list[Tensor], right: list[Tensor]) -> float:
    """The largest error, relative to the largest number of each; NaN counts as infinite."""
    if [a.shape for a in got] != [b.shape for b in right]:
        return math.inf
    worst = 0.0
    for a, b in zip(got, right, strict=True):
        error = (a.double() - b.double()).abs().max() / (1 + b.double().abs().max())
        worst = max(worst, math.inf if error.isnan() else error.item())
    return worst


TOLERANCE = 2e-5  # float32 scores of size 10, summed: a hundred roundings
SEEN = 2e-3  # a change below this proves nothing


def run(p: Program, compiled: str | None = None) -> Result:
    """Call, change, call again; what is wrong, or that all is right."""
    result = _run(p, compiled)
    if compiled is not None and result.kind in FAULTS and _run(p, compiled, True).kind in FAULTS:
        return Result("dynamo", result.what, result.detail)  # it is wrong without Headway, too
    return result


class Fails(Exception):
    """A change made a program fail by itself, without Headway."""


def _run(p: Program, compiled: str | None, plain: bool = False) -> Result:
    """With `plain`, the truth is what is compiled, and held against itself."""
    try:
        return _changed(p, compiled, plain)
    except Fails as error:
        return Result("fails itself", "", str(error))


def _changed(p: Program, compiled: str | None, plain: bool) -> Result:
    x = given(p.seed)
    with running(p) as (space, more):
        step = step_of(p, space, "_dense({mask}, {score}, q, k, v)" if plain else None)
        if compiled is not None:
            torch._dynamo.reset()
            step = torch.compile(step, backend=compiled.split()[0], fullgraph="full" in compiled)
        states: list[list[Tensor]] = []
        for n in range(len(p.changes) + 1):
            what = p.changes[n - 1].what if n else _first(p)
            if n:
                more(p.changes[n - 1].code)
            for again in range(2):
                try:
                    got = _with_gradients(step(x.q, x.k, x.v), x, space)
                except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                    detail = f"{type(error).__name__}: {error}"
                    if _may_refuse(p, error, compiled, n):
                        return Result("refused", what, detail)
                    _right_itself(p, space, x)
                    return Result("error", what, detail)
                right = _right_itself(p, space, x)
                off = _apart(got, right)
                if off > TOLERANCE:
                    old = [_apart(got, s) for s in states if len(s) == len(got)]
                    kind = "stale" if old and min(old) <= TOLERANCE else "wrong"
                    return Result(kind, what, f"off by {off:.3g}, call {n + 1}.{again + 1}")
            states.append(right)
        same = len(states) > 1 and all(
            len(a) == len(b) and _apart(a, b) < SEEN
            for a, b in zip(states[1:], states, strict=False)
        )
    return Result("no effect" if same else "right")


def _first(p: Program) -> str:
    """What may be wrong already at the first call."""
    inside = [
        word for word in ("detach", "no_grad", "numpy()") if word in p.source.split("put_in", 1)[1]
    ]
    where = [] if p.registered else ["in a namespace that is no module"]
    return ", ".join(["first call", *where, *inside])


def _right_itself(p: Program, space: dict[str, Any], x: Given) -> list[Tensor]:
    try:
        return truth(p, space, x)
    except Exception as error:
        raise Fails(f"{error!r}\n{p}") from error


def _may_refuse(p: Program, error: Exception, compiled: str | None, n: int) -> bool:
    """By name: where a tensor's value is read, at a first call as the plain tracer does, and with
    fullgraph=True, where there is no other way."""
    from torch._dynamo.exc import Unsupported

    if compiled is not None and "full" in compiled and isinstance(error, ModError | Unsupported):
        return True
    return isinstance(error, ModError) and (p.values or n == 0)


def of(seed: int, entrances: tuple[str, ...] = tuple(ENTRANCES)) -> Program:
    while True:
        made = program(seed, entrances)
        if entrance_fits(made):
            return made
        seed += 2_000_003


# -- the fresh process ----------------------------------------------------------------------------

_FRESH = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from mods.test_programs import last_state
torch.save({seed: last_state(seed) for seed in map(int, sys.argv[3:])}, sys.argv[2])
"""


def last_state(seed: int) -> list[Tensor] | str:
    """The answer of the program as it is in the end, called for the first time."""
    p, x = of(seed), given(seed)
    with running(p) as (space, more):
        for change in p.changes:
            more(change.code)
        try:
            return _with_gradients(step_of(p, space)(x.q, x.k, x.v), x, space)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            return f"{type(error).__name__}: {error}"


def fresh(seeds: list[int], path: Path) -> dict[int, list[Tensor] | str]:
    """`last_state` of each, in a process where nothing of them was ever called."""
    tests = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", _FRESH, str(tests), str(path), *map(str, seeds)], check=True
    )
    return torch.load(path)


# -- many of them ---------------------------------------------------------------------------------


class Report(NamedTuple):
    counts: Counter  # of kinds of results
    faults: Counter  # of (kind, change)
    refused: Counter  # of (change, reason)
    shown: list[str]  # programs with a fault, whole


def many(seeds: range, compiled: str | None = None, show: int = 3) -> Report:
    report = Report(Counter(), Counter(), Counter(), [])
    for seed in seeds:
        p = of(seed, COMPILED if compiled else tuple(ENTRANCES))
        result = run(p, compiled)
        report.counts[result.kind] += 1
        if result.kind in FAULTS:
            report.faults[result.kind, result.what] += 1
            if len(report.shown) < show:
                mode = f" under torch.compile, {compiled}" if compiled else ""
                report.shown.append(f"{result}{mode}\n{p}")
        if result.kind == "refused" and not p.values:
            report.refused[result.what, result.detail.splitlines()[0][:100]] += 1
    return report


def _told(report: Report) -> str:
    worst = "\n".join(f"{n:5} {kind}: {what}" for (kind, what), n in report.faults.most_common(40))
    return "\n\n".join([f"{dict(report.counts)}\n{worst}", *report.shown])


def check_programs(seeds: range) -> None:
    """Right after every change, or refused by name where a tensor's value is read."""
    report = many(seeds)
    assert sum(report.faults.values()) == 0, _told(report)
    shares = {kind: n / len(seeds) for kind, n in report.counts.items()}
    assert shares.get("fails itself", 0) < 0.02, report.counts
    assert shares["right"] > 0.75, report.counts  # most changes are seen, few programs refused


PROGRAMS = 100  # `long/sweeps.py` has more; what finds each mutant below is run with it


@pytest.mark.parametrize("half", range(2))
def test_changed_programs(half):
    check_programs(range(half * PROGRAMS // 2, (half + 1) * PROGRAMS // 2))


# A tenth of the programs above.
@pytest.mark.parametrize(("mode", "count"), [("eager", 9), ("eager full", 10), ("aot_eager", 5)])
def test_changed_programs_under_compile(mode, count):
    """Right, or, with fullgraph=True, refused by name: never what was right before."""
    report = many(range(10_000, 10_000 + count), mode)
    assert sum(report.faults.values()) == 0, _told(report)


def test_a_fresh_process_says_the_same(tmp_path):
    """In this process the programs are called before the changes, in that one they are not."""
    seeds = list(range(20_000, 20_030))
    here = {seed: run(of(seed)).kind for seed in seeds}
    there = fresh(seeds, tmp_path / "results")
    wrong = []
    for seed in seeds:
        p, x = of(seed), given(seed)
        with running(p) as (space, more):
            for change in p.changes:
                more(change.code)
            right = truth(p, space, x)
        got = there[seed]
        if isinstance(got, str):
            assert here[seed] in ("refused", "error"), f"{got}\n{p}"
        elif _apart(got, right) > TOLERANCE or here[seed] in FAULTS:
            wrong.append(f"{here[seed]} here; there off by {_apart(got, right):.3g}\n{p}")
    assert not wrong, "\n\n".join([f"{len(wrong)} of {len(seeds)}", *wrong[:3]])


# -- tests of tests -------------------------------------------------------------------------------


def _less(patch: pytest.MonkeyPatch, method: str, part: Callable[[list, int, tuple], None]) -> None:
    """A walk whose method leaves something out of what it adds to the key: `part(key, at, args)`."""
    owner = capture.ReadWalker if hasattr(capture.ReadWalker, method) else capture
    real = getattr(owner, method)

    def walk(self, *args):
        at = len(self.reads.key)
        result = real(self, *args)
        part(self.reads.key, at, args)
        return result

    patch.setattr(owner, method, walk)


def _without_numbers(patch: pytest.MonkeyPatch) -> None:
    def part(key: list, at: int, args: tuple) -> None:
        if type(args[0]) in capture.BY_VALUE | capture.BY_TEXT:
            del key[at:]

    _less(patch, "follow", part)


def _without_identity(patch: pytest.MonkeyPatch) -> None:
    """That an object was met before, and not which."""

    def part(key: list, at: int, args: tuple) -> None:
        if at < len(key) and type(key[at]) is int:
            key[at] = "again"

    _less(patch, "follow", part)


def _without_code(patch: pytest.MonkeyPatch) -> None:
    _less(patch, "follow_function", lambda key, at, args: key.__delitem__(at))


def _without_shapes(patch: pytest.MonkeyPatch) -> None:
    def part(key: list, at: int, args: tuple) -> None:
        kind, dtype, shape, *rest = key[at]
        key[at] = kind, dtype, len(shape), *rest

    _less(patch, "follow_tensor", part)


def _without_attributes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture.ReadWalker, "follow_attribute", lambda *_: None)
    patch.setattr(lowering, "find_source", lambda reads, tensor: None)  # which would notice


def _without_classes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "is_constant_class", lambda cls: True)
    _unwatched(patch)


def _without_default_dtype(patch: pytest.MonkeyPatch) -> None:
    class Torch:
        def __getattr__(self, name: str) -> Any:
            return (lambda: torch.float32) if name == "get_default_dtype" else getattr(torch, name)

    for module in (lowering, call_cache):
        patch.setattr(module, "torch", Torch())


def _unwatched(patch: pytest.MonkeyPatch) -> None:
    """Whatever runs, nobody looks on."""
    patch.setattr(lowering.CallRecorder, "untracked_call", lambda *_: None)


def _without_values(patch: pytest.MonkeyPatch) -> None:
    """Python may read numbers out of tensors."""
    real = lowering.trace
    patch.setattr(lowering, "trace", lambda *a, **k: real(*a, **k)._replace(value_read=None))


class Mutant(NamedTuple):
    """The proof of sameness without one of its parts, which some program that is right otherwise
    must catch."""

    mutate: Callable[[pytest.MonkeyPatch], None]
    kinds: tuple[str, ...]  # of values that may tell; all, if none is named
    begin: int  # the search for the program begins at this seed, which was one once


MUTANTS = {
    "numbers": Mutant(_without_numbers, NUMBERS, 30_000),
    "which object": Mutant(_without_identity, ("mask", "score"), 30_087),
    "code": Mutant(_without_code, ("mask", "score"), 30_031),
    "shapes": Mutant(_without_shapes, ("columns",), 30_005),
    "attributes": Mutant(_without_attributes, NUMBERS, 30_016),
    "classes": Mutant(_without_classes, NUMBERS, 30_018),
    "the default dtype": Mutant(_without_default_dtype, (), 30_015),
    "what ran": Mutant(_unwatched, NUMBERS, 30_053),
    "values of tensors": Mutant(_without_values, (), 30_156),
}
MOST = 600  # programs that a mutant may live through


def forget() -> None:
    """Nothing was ever traced."""
    lowering._lowered.clear()
    call_cache._signatures.clear()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name):
    try:
        assert _caught(MUTANTS[name]) is not None, f"{MOST} programs saw nothing"
    finally:
        forget()


def _caught(mutant: Mutant) -> int | None:
    """The first seed whose program is right, and with the mutant is not."""
    for seed in range(mutant.begin, mutant.begin + MOST):
        p = program(seed, ("attention",), mutant.kinds)
        with pytest.MonkeyPatch.context() as patch:
            forget()
            mutant.mutate(patch)
            result = run(p)
        if result.kind in FAULTS:
            forget()
            if run(p).kind not in FAULTS:
                return seed
    return None


# -- by hand --------------------------------------------------------------------------------------


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parse.add_argument("--programs", type=int, default=1000, help="how many (1000)")
    parse.add_argument("--seed", type=int, help="one program alone, shown whole")
    parse.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parse.add_argument("--compiled", choices=["eager", "aot_eager", "eager full", "aot_eager full"],
                       help="under torch.compile with this backend, with fullgraph=True if `full`")  # fmt: skip
    parse.add_argument("--show", type=int, default=3, help="programs with a fault to print (3)")
    asked = parse.parse_args()
    torch.set_num_threads(1)
    if asked.seed is not None:
        p = of(asked.seed, COMPILED if asked.compiled else tuple(ENTRANCES))
        print(p, "\n", run(p, asked.compiled))
        return
    before = time.perf_counter()
    seeds = range(asked.first, asked.first + asked.programs)
    report = many(seeds, asked.compiled, asked.show)
    print(_told(report))
    print(
        "refused elsewhere than at a tensor's value:", *report.refused.most_common(20), sep="\n  "
    )
    print(f"seeds {seeds.start} to {seeds.stop - 1}, {time.perf_counter() - before:.0f} s")
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
