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
- "ulysses*heads": ranks form nodes, by a mesh of two dimensions. Inside of a node "ulysses", over
  the fast links: every rank has all tokens of the node and some heads; of these the ranks with the
  same place in their nodes exchange the keys as "heads" does. A byte of keys crosses to a node
  once, where there are as many key/value heads as ranks in it. (Fang and Zhao 2024, USP, arXiv
  2405.07719; Gu et al. 2024, LoongTrain, arXiv 2406.18485: they have a ring between nodes)

- "local": every rank has all keys; nothing travels, and dK and dV are each rank's share.

The backward fetches again: nothing that was gathered is kept. dK and dV go home in the accumulation
dtype and are added in one order. All ranks make the same exchanges in the same order, also
those that have nothing to send.
"""

from ...errors import ArgumentError
from .cost import cheapest
from .nodes import Node
from .rows import all_tokens, local
from .setting import Plan, Setting
from .steps import BETWEEN, LINK, heads_of_steps
from .stepwise import ByHeads, Ring
from .ulysses import Ulysses


def name_of(name: str, setting: Setting, node: Node | None, own_tiles: bool) -> str:
    """The name of a plan that is possible: that one, or of "auto" the cheapest.

    **Raises:** `ArgumentError` for "ring" where the tiles of the mask are the caller's own, and for
    "ulysses*heads" where no nodes are known.
    """
    if name == "auto":
        return cheapest(setting, node, own_tiles)
    if name == "ring" and own_tiles:
        raise ArgumentError(
            "the tiles of this block mask are its own (lists of blocks), and a ring cuts keys "
            'where ranks do; use layout.using("heads") or "ulysses"'
        )
    if name == "ulysses*heads" and node is None:
        raise ArgumentError(
            'plan="ulysses*heads" needs to know which ranks form a node, and the layout has a mesh '
            "of one dimension; make it with one of two, nodes and the ranks of a node: "
            'init_device_mesh("cuda", (nodes, cards), mesh_dim_names=("between", "inside"))'
        )
    return name


def plan_of(name: str, setting: Setting, node: Node | None, own_tiles: bool) -> Plan:
    """The plan of that name, or the cheapest.

    - `node`: of this rank; None for a mesh of one dimension.

    **Raises:** `ArgumentError` where that is impossible.
    """
    if name == "local":
        return local(setting)
    s, name = setting, name_of(name, setting, node, own_tiles)
    if name == "ring":
        return Ring(s)
    if name == "ulysses":  # all ranks are one node
        return Ulysses(name, Node(s.group, s.rank, s.q, s.kv, s), all_tokens)
    if node is not None and name == "ulysses*heads":
        return Ulysses(name, node, lambda part: _by_heads(part, BETWEEN))
    if name == "gather":
        return ByHeads(name, s, [s.sizes.hk], [s.sizes.hk])
    return _by_heads(s, LINK)


def _by_heads(s: Setting, links: dict[str, float]) -> ByHeads:
    link = links.get(s.device.type, 200e9)
    return ByHeads("heads", s, *[heads_of_steps(s, back, link) for back in (False, True)])
