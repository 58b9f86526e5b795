"""What commands share: checks of numbers, and the words of `--help` for a default."""

from typing import Any

import tyro

from ..errors import ArgumentError


def check_positive(options: Any, *names: str) -> None:
    """Raise `ArgumentError` for an option that is less than 1; None stands for a default."""
    for name in names:
        number = getattr(options, name)
        if number is not None and number < 1:
            option = name.replace("_", "-")
            raise ArgumentError(f"--{option} {number} must be an integer, 1 or more")


def default_words(words: str, metavar: str = "INT") -> Any:
    """Annotate an option whose default is None: `--help` says these words in its place."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {words})")
