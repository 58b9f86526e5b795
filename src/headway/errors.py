"""Error classes, one per kind of mistake.

Every message names the argument, the value that was seen, and what to write instead. Each class
also derives from the built-in exception that Python users would reach for, so `except ValueError`
works.
"""


class HeadwayError(Exception):
    """Base of every error that Headway raises on purpose."""


class ArgumentError(HeadwayError, ValueError):
    """An argument has the wrong shape, dtype, device or value."""


class UnknownKeyword(ArgumentError, TypeError):
    """A keyword that the function does not have: the message says what stands for it here."""


class ModError(HeadwayError, ValueError):
    """A score or mask function does something that cannot become part of a kernel.

    It is no `TypeError`: Python's operators would hide one and try the other operand.
    """


class CapturedIndexError(HeadwayError, IndexError):
    """A score or mask function indexed a captured tensor out of range at a pair that is not masked
    out.

    `line` is the line of source that did it, where it is known.
    """

    def __init__(self, message: str, line: str = "") -> None:
        super().__init__(message)
        self.line = line


class BackendRefused(HeadwayError, NotImplementedError):
    """A backend cannot run this call; the message lists every reason and the way out."""


class CacheFull(HeadwayError, RuntimeError):
    """A KV cache has no room for more tokens; nothing was written."""


class CheckpointError(HeadwayError, OSError):
    """A checkpoint is missing, corrupt or could not be written."""
