"""What can go wrong around a training run. (CheckpointError is in headway.errors.)"""

from headway.errors import HeadwayError


class CorpusError(HeadwayError):
    """The text to train on is missing, too small, or not the one that the run began with."""


class RunError(HeadwayError):
    """The folder of a run, or a setting of it, is not what the command needs."""
