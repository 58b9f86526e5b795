"""Checks of the numbers that a command is given."""

from typing import Any

from ..errors import ArgumentError


def check_positive(options: Any, *names: str) -> None:
    """Raise `ArgumentError` for an option that is less than 1; None stands for a default."""
    for name in names:
        number = getattr(options, name)
        if number is not None and number < 1:
            option = name.replace("_", "-")
            raise ArgumentError(f"--{option} {number} must be an integer, 1 or more")
