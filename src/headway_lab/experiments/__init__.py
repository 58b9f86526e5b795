"""Claims about training that check themselves, from scratch, on a CPU in minutes.

`headway experiment scaling` and `headway experiment qk-clip` run them.
"""

from .report import Check as Check
from .report import Experiment as Experiment
