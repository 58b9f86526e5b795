"""Benchmarks: one table of named cases, timed against what a user would pick instead.

`headway bench` runs it. Results are first checked against float64; a case that is wrong is never
timed. All contestants of a case run in one process, in turns, and are compared by medians.
"""

from .case import Case as Case
from .case import Target as Target
from .cases import CASES as CASES
from .run import Options as Options
from .run import bench as bench
