"""Statistics of the rows of P, without a square of weights."""

from .measure import asking_for as asking_for
from .measure import mean as mean
from .measure import passes as passes
from .measure import sink_mass as sink_mass
from .measure import with_statistics as with_statistics
