"""Every op of PyTorch in a score: what the op itself makes of each number, or refused by name."""

import random
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headway as hw
from headway.errors import ModError
from headway.mods.evaluation.derivative import joint
from headway.mods.evaluation.evaluate import evaluate
from headway.mods.tracing.trace import trace

aten = torch.ops.aten
NUMBERS = [0.8, -1.3, 2.6, 0.31]
DRAWS = 2
WORDS = {"approximate": ["none", "tanh"], "rounding_mode": ["floor", "trunc"]}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.bool]
FORMATS = [torch.preserve_format, torch.contiguous_format]
CRASHES = {"linalg_vander"}  # in PyTorch, on a 0-d tensor


def overloads() -> list[Any]:
    """Those of PyTorch's own that take a tensor and return one."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space != "aten" or packet[0] == "_" or packet.endswith("_backward"):
            continue
        if packet in CRASHES or "empty" in packet:  # what memory happens to hold is no value
            continue
        try:
            op = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        schema = op._schema
        if [str(r.type) for r in schema.returns] != ["Tensor"]:
            continue
        if any(a.is_out and a.kwarg_only for a in schema.arguments):
            continue
        if any(str(a.type) == "Tensor" for a in schema.arguments):
            found.append(op)
    return found


class Constant(float):
    """A 0-d tensor that the function makes."""


def drawn(argument: Any, score: Any, rng: random.Random) -> Any:
    """A value for an argument that is often not its default."""
    kind = str(argument.type).removeprefix("Optional[").rstrip("]")
    if str(argument.type).startswith("Optional") and rng.random() < 0.3:
        return None
    if kind == "Tensor":
        return score if rng.random() < 0.6 else Constant(rng.choice(NUMBERS))
    if kind == "List[Tensor":
        return [score, score]
    if kind in ("number", "float"):
        return rng.choice([0.5, 1.7, -0.4, 2.0, 3])
    if kind == "int":
        enums = {"dtype": DTYPES, "layout": [torch.strided], "memory_format": FORMATS}
        if argument.name in enums:
            return rng.choice(enums[argument.name])
        return rng.choice([0, 1, 2, -1])
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "str":
        return rng.choice(WORDS.get(argument.name, ["mean"]))
    if kind.startswith("List[int"):
        return rng.choice([[], [0], [1], [3], [-1]])
    if kind.startswith("List[float"):
        return [rng.random()]
    if kind == "Device":
        return torch.device("cpu")
    return None


def calls(op: Any) -> Iterator[tuple[Any, list[Any], dict[str, Any]]]:
    """Arguments of one call: the first tensor is the score, as are most others."""
    rng = random.Random(zlib.crc32(op.name().encode()))
    score = object()
    for _ in range(DRAWS):
        args, kwargs, seen = [], {}, False
        for argument in op._schema.arguments:
            first = str(argument.type) == "Tensor" and not seen
            seen |= first
            value = score if first else drawn(argument, score, rng)
            if argument.has_default_value() and rng.random() < 0.3:
                value = argument.default_value
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        yield score, args, kwargs


def applied(op: Any, marker: Any, args: list, kwargs: dict, score: Tensor) -> Any:
    def put(x: Any) -> Any:
        if x is marker:
            return score
        if isinstance(x, list):
            return [put(y) for y in x]
        return torch.tensor(float(x), dtype=torch.float64) if isinstance(x, Constant) else x

    return op(*map(put, args), **{name: put(x) for name, x in kwargs.items()})


def accepted(op: Any, marker: Any, args: list, kwargs: dict) -> str | None:
    """What the tracer makes of it; None if it is refused."""
    fn = lambda score, b, h, i, j: applied(op, marker, args, kwargs, score * 1.0)
    try:
        return trace("score", fn, torch.float64).graph.text
    except ModError:
        return None


def one_number(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex() and x.dtype != torch.bool


def judged(op: Any, marker: Any, args: list, kwargs: dict) -> str:
    """right, wrong, refused, or not an op for one number."""
    text = accepted(op, marker, args, kwargs)
    if text is None:
        return "refused"
    leaf = torch.tensor(NUMBERS[0], dtype=torch.float64, requires_grad=True)
    try:
        right = applied(op, marker, args, kwargs, leaf * 1.0)
    except Exception as error:  # noqa: BLE001 - whatever PyTorch says of these arguments
        return f"laxer: {error}"
    if not one_number(right):
        return f"wrong: {tuple(right.shape)} {right.dtype} as one number"
    graph = joint(text)
    for number in NUMBERS:
        leaf = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        try:
            right = applied(op, marker, args, kwargs, leaf * 1.0).reshape(()).double()
        except Exception as error:  # noqa: BLE001 - not of this number
            return f"laxer: {error}"
        values = {"score": leaf.detach(), **dict.fromkeys(("b", "h", "q_idx", "kv_idx"), 0)}
        values = {name: torch.as_tensor(x) for name, x in values.items()}
        value, slope = (torch.as_tensor(x).double() for x in evaluate(graph, values, None))
        if not close(value, right):
            return f"wrong: {value.item()} for {right.item()} at {number}"
        if (
            right.isnan() or op._schema.is_mutable
        ):  # autograd of PyTorch goes by what was overwritten
            continue
        right_slope = torch.zeros(())
        if right.requires_grad:
            try:
                (found,) = torch.autograd.grad(right, leaf, allow_unused=True)
            except RuntimeError:  # "derivative for ... is not implemented"
                continue
            right_slope = right_slope if found is None else found
        if not close(slope, right_slope):
            return f"wrong: derivative {slope.item()} for {right_slope.item()} at {number}"
    return "right"


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other.detach().double(), 1e-5, 1e-6, equal_nan=True)


def test_every_op_is_right_or_refused():
    """Value and derivative, of each number by itself, with random values of every argument."""
    results: dict[str, list[str]] = {}
    wrong = []
    for op in overloads():
        for marker, args, kwargs in calls(op):
            result = judged(op, marker, args, kwargs)
            results.setdefault(result.partition(":")[0], []).append(op.name())
            if result.startswith("wrong"):
                shown = ["score" if x is marker else x for x in args]
                wrong.append(f"{op.name()}{shown}{kwargs}: {result}")
    assert not wrong, "\n".join(wrong[:20])
    assert len(set(results["right"])) > 200, results["right"]
    assert len(results.get("laxer", [])) < 20, results["laxer"]


def score_of(text: str) -> Any:
    return eval(
        "lambda s, b, h, i, j: " + text, {"torch": torch, "F": F, "T": torch.tensor, "aten": aten}
    )


ACCEPTED = {  # with arguments that an op of one operand might lose
    "round": "torch.round(s, decimals=1)",
    "round to tens": "(30 * s).round(decimals=-1) + s",
    "round, no decimals": "s.round(decimals=0) + s",
    "round in place": "(s * 1).round_(decimals=2)",
    "gelu": "F.gelu(s, approximate='tanh')",
    "softplus": "F.softplus(s, beta=2.0, threshold=1.5)",
    "leaky_relu": "F.leaky_relu(s, 0.3)",
    "elu": "torch.ops.aten.elu(s, 0.7, 1.2, 0.4)",
    "clamp": "s.clamp(T(-0.5), T(0.8))",
    "clamp at the bound": "s.clamp(min=0.8) + s.clamp(max=0.31) + torch.clamp_min(s, T(2.6))",
    "relu at 0": "F.relu(s - 0.8) + (s - 2.6).relu()",
    "maximum at the tie": "torch.maximum(s, T(0.8).double())",
    "div": "torch.div(s, 0.3, rounding_mode='floor') + torch.div(s, 0.3, rounding_mode='trunc')",
    "alpha": "torch.add(s, s, alpha=3) - torch.sub(s, 2, alpha=0.5)",
    "alpha of rsub": "torch.rsub(s, s * s, alpha=3) + torch.rsub(s, 1, alpha=2)",
    "alpha, by position": "torch.ops.aten.add.Scalar(s, 2, 3)",
    "to": "s.to(torch.float16).to(torch.float64) + s.to(torch.int32)",
    "nan_to_num": "(s / 0).nan_to_num(nan=1.0, posinf=2.0, neginf=-3.0) + s",
    "memory_format": "s.clone(memory_format=torch.contiguous_format)",
    "addcmul": "torch.addcmul(s, s, s, value=-0.7)",
}

REFUSED = {
    "bits": ("s.view(torch.int64) * 1.0", "view.dtype with dtype=torch.int64"),
    "rows": ("s.softmax(-1)", "calls softmax on one number; a score or mask sees one pair"),
    "rows, by function": ("F.log_softmax(s, -1)", "calls log_softmax on one number"),
    "along keys": ("s.cumsum(0)", "calls cumsum on one number"),
    "a vector": ("s.expand(2)", "shape \\(2,\\) as one number; index it down to one number"),
    "a long vector": ("s.expand(129).sum()", "reduces 129 numbers per pair with sum; at most 128"),
    "out": ("torch.round(s, out=T(0.0))", "calls round.out with out="),
    "out, decimals": ("torch.round(s, decimals=1, out=T(0.0))", "with out="),
    "drawn": ("torch.bernoulli(s.sigmoid())", "drawn once, not at every call"),
    "drawn like": ("s + torch.rand_like(s)", "drawn once, not at every call"),
    "noise": ("F.rrelu(s, training=True)", "drawn once, not at every call"),
    "a pair": ("torch.max(s, 0)[0]", "max.dim"),
    "in place": ("s.detach_()", "changes an attribute"),
    "in place, by its full name": ("aten.detach_(s)", "changes an attribute"),
    "in place, by its overload": ("aten.detach_.default(s)", "changes an attribute"),
    "a view": ("s.view(1).add_(1).sum()", "shares its memory with a view"),
    "an element": ("setattr(s, 'grad', s)", "changes an attribute"),
    "data": ("setattr(s, 'data', s + 1) or s", "changes an attribute"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_arguments(name):
    fn, words = (
        score_of(ACCEPTED[name]),
        dict.fromkeys(("b", "h", "q_idx", "kv_idx"), torch.zeros(())),
    )
    graph = joint(trace("score", fn, torch.float64).graph.text)
    for number in NUMBERS:
        leaf = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        right = fn(leaf * 1.0, 0, 0, 0, 0)
        (slope,) = torch.autograd.grad(right, leaf)
        ours = evaluate(graph, {"score": leaf.detach(), **words}, None)
        for one, other in zip(ours, (right, slope), strict=True):
            assert close(torch.as_tensor(one).double(), other), (number, one, other)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments(name):
    text, words = REFUSED[name]
    with pytest.raises(ModError, match=words):
        trace("score", score_of(text), torch.float64)


def test_an_op_of_another_library_is_not_pytorchs():
    """Ops are known by their full names."""

    @torch.library.custom_op("headway_test::sigmoid", mutates_args=())
    def sigmoid(x: Tensor) -> Tensor:
        return (x / 6 + 0.5).clamp(0, 1)

    sigmoid.register_fake(torch.empty_like)
    with pytest.raises(ModError, match="calls headway_test::sigmoid"):
        trace("score", lambda s, b, h, i, j: sigmoid(s), torch.float64)
    library = torch.library.Library("headway_test", "FRAGMENT")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x**3, "CompositeImplicitAutograd")
    made = trace("score", lambda s, *_: torch.ops.headway_test.square(s), torch.float64)
    (cube,) = evaluate(made.graph, {"score": torch.tensor(2.0).double()}, None)
    assert cube == 8


def test_alpha_multiplies_in_the_dtype_of_the_result():
    q, k, v = torch.randn(3, 1, 1, 9, 4, dtype=torch.float64)
    score = lambda s, b, h, i, j: torch.sub(s, j * 0.1, alpha=-3.0)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (1, 1, 9, 9)), indexing="ij")
    right = score(q @ k.mT / 2, b, h, i, j).softmax(-1) @ v
    torch.testing.assert_close(hw.attention(q, k, v, score), right, rtol=1e-13, atol=1e-13)
