"""For the reference, which is written from the source: what the source does not say by itself.

`@value` (headway.mods.mod) makes a dataclass of a mask or score, at run time: its arguments are its
fields. `**unknown` catches keywords of other libraries for a better error: it is no argument.
"""

from typing import Any

import griffe


class Values(griffe.Extension):
    """Gives classes under `@value` the `__init__` that they have, and takes `**unknown` away."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        kept = [p for p in func.parameters if str(p.annotation) != "Never"]
        func.parameters = griffe.Parameters(*kept)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        named = {str(decorator.value) for decorator in cls.decorators}
        if "value" not in named or "__init__" in cls.members:
            return
        fields = [
            member for member in cls.members.values()
            if member.is_attribute and member.annotation and not member.name.startswith("_")
        ]  # fmt: skip
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        parameters += [
            griffe.Parameter(
                field.name,
                annotation=field.annotation,
                default=field.value,
                kind=griffe.ParameterKind.positional_or_keyword,
            )
            for field in fields
        ]
        init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
        cls.set_member("__init__", init)
