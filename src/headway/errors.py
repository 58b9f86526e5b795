"""What can go wrong, one class per kind of mistake.

Every message names the argument, the values seen and the way out. Each class also derives from the
built-in exception that Python users would reach for, so `except ValueError` works.
"""


class HeadwayError(Exception):
    """Base of every error that Headway raises on purpose."""


class ArgumentError(HeadwayError, ValueError):
    """An argument has the wrong shape, dtype, device or value."""


class UnknownKeyword(ArgumentError, TypeError):
    """A keyword that the function does not have: the message says what stands for it here."""


class ModError(HeadwayError, ValueError):
    """A score or mask function does something that cannot become part of a kernel.

    Not a `TypeError`: torch's operators take one for "this operand is not mine" and hide it.
    """


class CapturedIndexError(HeadwayError, IndexError):
    """A score or mask function indexed a captured tensor out of range at a pair that is kept.

    `line` is the line of source that did it, where it is known.
    """

    def __init__(self, message: str, line: str = "") -> None:
        super().__init__(message)
        self.line = line


class BackendRefused(HeadwayError, NotImplementedError):
    """A backend cannot run this call; the message lists every reason and the way out."""


class CacheFull(HeadwayError, RuntimeError):
    """A cache of keys and values has no room for what was to come; nothing was written."""


class CheckpointError(HeadwayError, OSError):
    """A checkpoint is missing, corrupt or could not be written."""
