"""The reference has every public name, and docstrings say what a reader has to know."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

PAGES = Path(__file__).parents[2] / "docs" / "reference"
LISTED = set(
    re.findall(
        r"^::: (\S+)$", "\n".join(p.read_text() for p in sorted(PAGES.glob("*.md"))), re.MULTILINE
    )
)
PACKAGES = [
    "headway", "headway.nn", "headway.optim", "headway.stability", "headway.compat",
    "headway.distributed", "headway.inference",
]  # fmt: skip
# Modules, whose public names are those defined in them (or in `__all__`).
MODULES = ["headway.errors", "headway.compat.torch_sdpa", "headway.compat.flex"]
BY_NAME = {
    "headway.compat.flash": [
        "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
    ],
    "headway.integrations.transformers": ["mask_over_ranks", "register"],
}  # fmt: skip


def public(name: str) -> list[str]:
    """The public names of a module of the library."""
    module = importlib.import_module(name)
    if name in BY_NAME:
        return BY_NAME[name]
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        n for n, x in vars(module).items()
        if not n.startswith("_") and not isinstance(x, ModuleType)
        and (getattr(x, "__module__", "") or "").startswith("headway")
        and (name in PACKAGES or x.__module__ == name)
    ]  # fmt: skip


def objects() -> dict[str, object]:
    names = [(m, n) for m in [*PACKAGES, *MODULES, *BY_NAME] for n in public(m)]
    return {f"{m}.{n}": getattr(importlib.import_module(m), n) for m, n in names}


def listed() -> list[object]:
    """What the pages show, as objects."""
    found = []
    for path in LISTED:
        parts = path.split(".")
        module, at = None, len(parts)
        while module is None:
            at -= 1
            try:
                module = importlib.import_module(".".join(parts[:at]))
            except ImportError:
                continue
        thing = module
        for part in parts[at:]:
            thing = getattr(thing, part)
        found.append(thing)
    return found


def test_every_public_name_is_in_the_reference():
    there = {id(thing) for thing in listed()}
    assert [name for name, thing in objects().items() if id(thing) not in there] == []


def documented() -> list:
    """Public functions and methods, with their own docstrings or those of their classes."""
    found = {}
    for name, thing in objects().items():
        if inspect.isclass(thing):
            found[name] = thing
            methods = inspect.getmembers(thing, inspect.isroutine)
            found |= {
                f"{name}.{n}": m for n, m in methods
                if not n.startswith(("_", "check_")) and n in vars(thing) and m.__doc__
            }  # fmt: skip
        elif callable(thing):
            found[name] = thing
    return [pytest.param(thing, id=name) for name, thing in found.items()]


@pytest.mark.parametrize("thing", documented())
def test_a_docstring_tells_shapes(thing):
    """A public name that takes tensors says of what shapes, in its annotations or its words."""
    words = inspect.getdoc(thing) or ""
    assert words, "no docstring"
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return
    takes = [
        p for p in signature.parameters.values()
        if p.annotation is Tensor or ("Tensor" in str(p.annotation) and "Callable" not in str(p.annotation))
    ]  # fmt: skip
    if not takes:
        return
    in_annotations = all(
        "Float[" in str(p.annotation) or "Int[" in str(p.annotation) for p in takes
    )
    shape = re.search(r"\([\w\s+*/.,]+,[\w\s+*/.,]*\)|shape|same arguments|`attention`'s", words)
    assert in_annotations or shape, "no shape of the tensors that it takes"


EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = {
    name: EXAMPLE.findall(inspect.getdoc(thing) or "")
    for name, thing in objects().items()
    if "```" in (inspect.getdoc(thing) or "")
}


def test_what_is_hard_to_call_has_an_example():
    asked = {
        "headway.tree", "headway.top_k_blocks", "headway.inference.Cache",
        "headway.inference.PagedCache", "headway.stability.QKClip", "headway.distributed.Layout",
    }  # fmt: skip
    assert asked <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name):
    assert EXAMPLES[name], "opened by ```python, and closed"
    for code in EXAMPLES[name]:
        exec(compile(code, name, "exec"), {"__name__": name})
