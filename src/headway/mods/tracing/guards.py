"""Guards of a compiled call: whether a function still reads what it read in the trace.

Each object that a function can read has a path from the function. Here a path is followed in code
that Dynamo traces, so Dynamo guards every object on the way.
"""

import builtins
from typing import Any

from torch.nn.modules import module as _modules

# ("cell", n), ("default", n), ("kwdefault", name), ("global", name), ("attr", name), ("item", key);
# ("nth", n): the n-th key of a dict or item of a set; ("value", n): the value of its n-th key;
# ("class", (n, name)): an attribute of the n-th class in the MRO of a class; ("type", (n, name)):
# the same for an object, in the MRO of its class.
Step = tuple[str, Any]
Path = tuple[Step, ...]
# Path to an object, how it is tested, the expected value. "exists", "touch_code" and
# "touch_attribute" always hold: reading what they name is what makes Dynamo guard it.
Guard = tuple[Path, str, Any]


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_GLOBAL_HOOKS = (
    _modules._global_forward_hooks, _modules._global_forward_pre_hooks,
    _modules._global_backward_hooks, _modules._global_backward_pre_hooks,
)  # fmt: skip


def resolve_path(fn: Any, path: Path) -> Any:
    """Return the object that a path from a function leads to."""
    value = fn
    for step, key in path:
        if step == "cell":
            value = value.__closure__[key].cell_contents
        elif step == "default":
            value = value.__defaults__[key]
        elif step == "kwdefault":
            value = value.__kwdefaults__[key]
        elif step == "global":
            value = value.__globals__[key]
        elif step == "item":
            value = value[key]
        elif step == "nth":
            value = list(value)[key]
        elif step == "value":
            value = list(value.values())[key]
        elif step == "type":
            value = type(value).__mro__[key[0]].__dict__[key[1]]
        elif step == "class":
            value = value.__mro__[key[0]].__dict__[key[1]]
        else:
            value = getattr(value, key)
    return value


def global_hooks() -> int:
    """Return how many hooks of all modules are registered."""
    return sum([len(registered) for registered in _GLOBAL_HOOKS])


def guard_holds(fn: Any, guard: Guard) -> bool:
    """Return whether a function still reads what it read in the trace.

    Dynamo guards every object that it meets on the path. `lowering.lower_guarded` adds the
    tests "shape", for tensors whose shape the function read.
    """
    path, test, expected = guard
    current = resolve_path(fn, path)
    if test == "value":
        return current is expected or current == expected or current != current  # the last: NaN
    if test == "size":
        return len(current) == expected
    if test == "keys":
        return list(current) == expected
    if test == "items":
        return len(current) == len(expected) and current == expected
    if test == "modules":
        return list(current._modules) == expected
    if test == "touch_attribute":
        getattr(current, expected, None)
        return True
    if test == "touch_code":
        return current.__code__ is not None
    if test == "builtin":
        return expected not in current.__globals__ and (
            expected not in vars(builtins) or vars(builtins)[expected] is not None
        )
    if test == "hooks":  # not by name, where Dynamo does not guard them
        hooks = sum([len(current.__dict__[name]) for name in _HOOKS])
        return not hooks and not global_hooks()
    if test == "shape":
        return tuple(current.shape) == expected
    return current is not None
