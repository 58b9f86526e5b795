"""Rows travel by collectives of `torch.distributed`: one uneven all-to-all, whose sizes all ranks
know. (A chain of sends and receives would wait forever where a rank has left.)"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .routes import (
    Arriving,
    Parts,
    Returning,
    Routes,
    Segment,
    Transport,
    copy,
    in_message,
    message,
    rows_of,
    unstacked,
)


class Collective(Transport):
    """Any backend, any machines."""

    def fetch(self, routes: Routes, parts: Parts) -> Arriving:
        """See `Transport`."""
        out = unstacked(routes.empty(parts), parts)
        sent, came = message(routes.outgoing, parts), message(routes.incoming, parts)
        for s, rows in in_message(sent, routes.outgoing, parts):
            copy(rows_of(parts, s.at, s.size), rows)
        done = _exchange(routes, came, routes.incoming, sent, routes.outgoing)
        routes.copy_own(parts, out)
        return Arriving(out, done, in_message(came, routes.incoming, parts))

    def home(self, routes: Routes, parts: Parts) -> Returning:
        """See `Transport`."""
        sent, came = message(routes.incoming, parts), message(routes.outgoing, parts)
        for s, rows in in_message(sent, routes.incoming, parts):
            copy(rows_of(parts, s.to, s.size), rows)
        done = _exchange(routes, came, routes.outgoing, sent, routes.incoming)
        return Returning(routes, parts, done, came)


def _exchange(
    routes: Routes, came: Tensor, incoming: list[Segment], sent: Tensor, outgoing: list[Segment]
) -> Callable[[], Any]:
    """Send and receive messages; what waits for it, and keeps `sent` until then."""
    to_get, to_give = _counts(routes, came, incoming), _counts(routes, sent, outgoing)
    work = all_to_all(came, sent, to_get, to_give, routes.group)
    return lambda sent=sent: work.wait()


def _counts(routes: Routes, message: Tensor, segments: list[Segment]) -> list[int]:
    """Numbers of a message by the other rank."""
    tokens = [0] * routes.ranks
    for s in segments:
        tokens[s.rank] += s.size
    each = message.numel() // max(1, sum(tokens))
    return [n * each for n in tokens]


# PyTorch 2.13 gave it a new name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_to_all(out: Tensor, given: Tensor, to_get: list, to_give: list, group: Any) -> Any:
    """Begin an exchange of which every rank knows the sizes; what to wait for."""
    return dist.all_to_all_single(out, given, to_get, to_give, group=group, async_op=True)
