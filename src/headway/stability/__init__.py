"""Training that stays stable: the largest logit of every head, and QK-Clip."""

from .adapters import Block as Block
from .adapters import Layout as Layout
from .adapters import Projection as Projection
from .logit_stats import logit_stats as logit_stats
from .logit_stats import reset_logit_stats as reset_logit_stats
from .monitor import HeadStats as HeadStats
from .monitor import Monitor as Monitor
from .monitor import monitor as monitor
from .qk_clip import Clipped as Clipped
from .qk_clip import LogitError as LogitError
from .qk_clip import QKClip as QKClip
from .record import MaxLogit as MaxLogit
