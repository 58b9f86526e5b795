"""How keys and values travel: plans of one kind of call, on one rank.

- "heads": some key/value heads after the other, only the tiles that the rank's mask needs, the next
  on their way while these are computed. Rows are complete, nothing is merged, and what is gathered
  is a few heads' at a time.
- "gather": all heads at once, of all tokens, by an all-gather.
- "ring": one rank's keys after the other's, the rank's own first; partial results in the
  accumulation dtype, which merge. (Liu et al. 2023, Ring Attention, arXiv 2310.01889)
- "ulysses": queries, keys and values of all tokens and some heads, by all-to-all; key/value heads
  are sent to several ranks where there are fewer than ranks. (Jacobs et al. 2023, DeepSpeed
  Ulysses, arXiv 2309.14509)

The backward fetches again: nothing that was gathered is kept. dK and dV go home in the accumulation
dtype and are added in one order. All ranks make the same exchanges in the same order, also
those that have nothing to send.
"""

from ...errors import ArgumentError
from .cost import cheapest
from .setting import Plan, Setting
from .stepwise import ByHeads, Ring, heads_of_steps
from .ulysses import Ulysses


def plan_of(name: str, setting: Setting, own_tiles: bool) -> Plan:
    """The plan of that name, or the cheapest.

    **Raises:** `ArgumentError` for "ring" where the tiles of the mask are the caller's own.
    """
    s = setting.sizes
    if name == "auto":
        held, asked = (setting.q.sizes, setting.kv.sizes), (setting.needed(), setting.work())
        name = cheapest(s, *held, *asked, setting.device.type, own_tiles)
    if name == "ring" and own_tiles:
        raise ArgumentError(
            "the tiles of this block mask are its own (lists of blocks), and a ring cuts keys "
            'where ranks do; use layout.using("heads") or "ulysses"'
        )
    if name == "ring":
        return Ring(setting)
    if name == "ulysses":
        return Ulysses(setting)
    if name == "gather":
        return ByHeads(name, setting, [s.hk], [s.hk])
    return ByHeads(name, setting, *[heads_of_steps(setting, back) for back in (False, True)])
