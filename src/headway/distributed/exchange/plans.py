"""The plans of an exchange: how keys and values reach the queries that read them.

- "heads": all-gather of keys and values by chunks of heads, of the tiles alone that a rank's mask
  needs; the next chunk is prefetched (`headwise.py`). "gather": the same with one chunk.
- "ulysses": all-to-all, so that every rank has all tokens of some heads. Key/value heads are sent
  to several ranks where there are fewer heads than ranks. (Jacobs et al. 2023, DeepSpeed Ulysses,
  arXiv 2309.14509)
- "ulysses*heads": "ulysses" between the ranks of a node, "heads" between nodes, on a mesh of two
  dimensions. A key crosses to a node once, where a node has as many ranks as there are key/value
  heads. (Fang and Zhao 2024, USP, arXiv 2405.07719; Gu et al. 2024, LoongTrain, arXiv 2406.18485:
  both run a ring between nodes)
- "replicated_kv": every rank has all keys; nothing is exchanged, and dK and dV are each rank's
  share.

The backward gathers again: no gathered keys are kept. dK and dV are reduced to the ranks of the
keys in the accumulation dtype and in one order. All ranks make the same exchanges in the same
order, also a rank that has nothing to send.

A plan "ring" (Liu et al. 2023, arXiv 2310.01889) was slower than "heads" in every committed run:
causal over four H100s with 64/8 heads 15.9 ms forward, and 6.85 ms by "heads" (docs/lab/ranks.md).
"""

from ...errors import ArgumentError
from ...types import REPLICATED_KV
from .cost import INTER_NODE_BANDWIDTH, LINK_BANDWIDTH, cheapest, chunk_heads
from .headwise import HeadwiseAllGather
from .nodes import LocalNode
from .plan_inputs import Plan, PlanInputs
from .query_shards import all_tokens_plan, replicated_kv_plan
from .ulysses import Ulysses


def plan_name(name: str, inputs: PlanInputs, node: LocalNode | None) -> str:
    """Return the name of a plan that is possible: `name`, or for "auto" the cheapest.

    **Raises:** `ArgumentError` for "ulysses*heads" on a mesh of one dimension.
    """
    if name == "auto":
        return cheapest(inputs, node)
    if name == "ulysses*heads" and node is None:
        raise ArgumentError(
            'plan="ulysses*heads" needs to know which ranks form a node, and the layout has a mesh '
            "of one dimension; make it with one of two, nodes and the ranks of a node: "
            'init_device_mesh("cuda", (nodes, cards), mesh_dim_names=("between", "inside"))'
        )
    return name


def make_plan(name: str, inputs: PlanInputs, node: LocalNode | None) -> Plan:
    """Return the plan of that name, or for "auto" the cheapest.

    - `node`: of this rank; None on a mesh of one dimension.

    **Raises:** `ArgumentError` where the plan is not possible.
    """
    if name == REPLICATED_KV:
        return replicated_kv_plan(inputs)
    name = plan_name(name, inputs, node)
    if name == "ulysses":  # all ranks count as one node
        everyone = LocalNode(inputs.group, inputs.rank, inputs.q, inputs.kv, inputs)
        return Ulysses(name, everyone, all_tokens_plan)
    if node is not None and name == "ulysses*heads":
        return Ulysses(name, node, lambda part: _headwise(part, INTER_NODE_BANDWIDTH))
    if name == "gather":
        return HeadwiseAllGather(name, inputs, [inputs.sizes.hk], [inputs.sizes.hk])
    return _headwise(inputs, LINK_BANDWIDTH)


def _headwise(inputs: PlanInputs, bandwidths: dict[str, float]) -> HeadwiseAllGather:
    bandwidth = bandwidths.get(inputs.device.type, 200e9)
    chunks, backward_chunks = (chunk_heads(inputs, back, bandwidth) for back in (False, True))
    return HeadwiseAllGather("heads", inputs, chunks, backward_chunks)
