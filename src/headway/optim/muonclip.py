"""MuonClip: Muon for the matrices, AdamW for the rest, QK-Clip after the step (Kimi K2)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..arguments import flag_of
from ..errors import ArgumentError
from ..stability.adapters import Adapter, Projection, check_model, find_layers, matrices
from ..stability.logit_stats import Group
from ..stability.qk_clip import Clipped, GQARule, Masters, QKClip
from ..stability.rows import local_part

# What models call their output head, whose matrix is not Muon's (Jordan 2024; Kimi K2).
HEADS = ("lm_head", "head", "output", "unembedding")


class MuonClip(torch.optim.Optimizer):
    """Muon for matrices, AdamW for everything else, then QK-Clip, in one `step()`.

        M ← μM + G,  O = NewtonSchulz(M) · 0.2 √max(n, m),  W ← W − η (O + λW),  then QK-Clip

    Muon trains every matrix that is the weight of an `nn.Linear`, except those that `adamw` names
    (output heads, routers). AdamW trains everything else: embeddings, norms, biases, heads. Muon is
    `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`. Its updates are as large as AdamW's,
    so both share one learning rate and one weight decay.

    **Arguments:**

    - `model`: the model as you train it, already sharded.
    - `lr`, `weight_decay`: used by both. AdamW decays matrices only.
    - `adamw`: names of modules whose matrices AdamW trains, such as "head" or "layers.3.router".
      None: `HEADS`, the usual names of an output head.
    - `momentum`: Muon's. `betas`, `eps`: AdamW's.
    - `per_head`: orthogonalise each query, key and value head separately, not the whole matrix. The
      three parts of a fused QKV are always separate.
    - `tau`, `alpha`, `gqa`, `group`, `adapters`, `masters`: as in `QKClip`. `tau=None` turns the
      clip off.

    `param_groups` has Muon's group first, then AdamW's with decay and AdamW's without. Empty groups
    are left out. Schedulers, `state_dict`, `load_state_dict` and
    `torch.distributed.checkpoint.state_dict` work as with any optimizer. `clipped` is what the last
    step clipped, None before the first step. With gradient accumulation, call `step()` once, after
    the last micro-batch: it clips by the maximum over all of them.

    **Raises:** `ArgumentError` for names that match nothing, and where a head of a DTensor is
    spread over ranks; errors of `QKClip`.

    (Kimi K2, arXiv 2507.20534, section 2.1; Moonlight, arXiv 2502.16982, equation 4)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 2e-4,
        weight_decay: float = 0.1,
        *,
        adamw: tuple[str, ...] | None = None,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        per_head: bool = False,
        tau: float | None = 100.0,
        alpha: float = 0.5,
        gqa: GQARule = "query",
        group: Group = None,
        adapters: dict[type, Adapter | None] | None = None,
        masters: Masters | None = None,
    ):
        per_head = flag_of("per_head", per_head)
        muon, decayed, rest = parameter_groups(model, adamw)
        if not muon:
            raise ArgumentError(f"{type(model).__name__} holds no nn.Linear for Muon to train")
        self.blocks = _blocks(model, per_head, adapters)
        # Two optimizers do the work; this one holds their groups and their state.
        self._muon = _BlockMuon(
            muon, self.blocks, lr=lr, weight_decay=weight_decay, momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, lr, betas, eps, weight_decay)
        # torch.distributed.checkpoint takes no more than one group without parameters.
        self._adamw.param_groups = [g for g in self._adamw.param_groups if g["params"]]
        super().__init__(self._muon.param_groups + self._adamw.param_groups, {"lr": lr})
        self._share()
        self.clip = (
            None
            if tau is None
            else QKClip(model, tau, alpha, gqa=gqa, group=group, adapters=adapters, masters=masters)
        )
        self.clipped: Clipped | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, then clip. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        only_state = self._only_makes_state()
        self._muon.step()
        self._adamw.step()
        if self.clip is not None and not only_state:
            self.clipped = self.clip.step()
        return loss

    def _only_makes_state(self) -> bool:
        """Return whether this step only creates state, as `torch.distributed.checkpoint` does:
        learning rates and gradients are 0, and no forward precedes it."""
        if self.state or any(group["lr"] != 0 for group in self.param_groups):
            return False
        parameters = [p for group in self.param_groups for p in group["params"]]
        grads = [local_part(p.grad) for p in parameters if p.grad is not None]
        return any(g.numel() for g in grads) and not any(bool(g.any()) for g in grads)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = [group for group in state_dict["param_groups"] if group["params"]]
        super().load_state_dict({**state_dict, "param_groups": groups})
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(self.param_groups) == len(self._muon.param_groups + self._adamw.param_groups):
            raise ArgumentError(
                "MuonClip finds its groups in the model; make a new one after changing the model"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        # An optimizer of PyTorch copies its groups and its state, and nothing else.
        parts = ("blocks", "_muon", "_adamw", "clip", "clipped")
        return super().__getstate__() | {part: getattr(self, part) for part in parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        self._muon.param_groups = self.param_groups[:1]
        self._adamw.param_groups = self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state


class _BlockMuon(torch.optim.Muon):
    """`torch.optim.Muon` in which a matrix may be several, one above the other."""

    def __init__(self, params: Any, blocks: dict[Any, list[int]], **options: Any):
        self.blocks = blocks
        super().__init__(params, **options)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"blocks": self.blocks}

    def _init_group(
        self, group: Any, params_with_grad: list, grads: list, muon_momentum_bufs: list
    ) -> bool:
        has_complex = super()._init_group(group, params_with_grad, grads, muon_momentum_bufs)
        rows = [self.blocks.get(p, [p.shape[0]]) for p in params_with_grad]
        for tensors in (params_with_grad, grads, muon_momentum_bufs):
            # Views: Muon changes parameters and momenta in place.
            tensors[:] = [
                part
                for tensor, sizes in zip(tensors, rows, strict=True)
                for part in (tensor.split(sizes) if len(sizes) > 1 else [tensor])
            ]
        return has_complex


def parameter_groups(
    model: nn.Module, adamw: tuple[str, ...] | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """(Muon's, AdamW's with weight decay, AdamW's without): the weights of every `nn.Linear`
    outside of the modules named in `adamw`; other parameters of two dimensions or more; the rest.

    A weight shared with an embedding (a tied head) is AdamW's. Frozen parameters are nobody's.
    """
    check_model(model)
    modules = dict(model.named_modules())
    for part in adamw or ():
        if not any(_inside(name, (part,)) for name in modules):
            raise ArgumentError(f"adamw={adamw!r}: no module of the model is called {part!r}")
    skip = HEADS if adamw is None else adamw
    linears = {
        module.weight
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and not _inside(name, skip)
    } - {module.weight for module in modules.values() if isinstance(module, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    rest = [p for p in trained if p not in linears]
    return (
        [p for p in trained if p in linears],
        [p for p in rest if p.dim() >= 2],
        [p for p in rest if p.dim() < 2],
    )


def _inside(name: str, parts: tuple[str, ...]) -> bool:
    """Return whether a module's path goes through one of these names."""
    return any(f".{part}." in f".{name}." for part in parts)


def _blocks(
    model: nn.Module, per_head: bool, adapters: dict[type, Adapter | None] | None
) -> dict[Any, list[int]]:
    """Rows of the matrices in each weight of an attention that is not one matrix."""
    blocks: dict[Any, list[int]] = {}
    for layer in find_layers(model, adapters):
        for projection in layer.layout.projections:
            weight = projection.linear.weight
            sizes = list(_heads(projection) if per_head else _parts(projection))
            if len(sizes) < 2:
                continue
            if hasattr(weight, "device_mesh"):
                raise ArgumentError(
                    f"{layer.name}: per-head or fused orthogonalisation needs whole rows, but a "
                    "weight is a DTensor; use per_head=False and fused=False"
                )
            blocks[weight] = sizes
    return blocks


def _heads(projection: Projection) -> Iterator[int]:
    return (rows for rows, _, _ in matrices(projection))


def _parts(projection: Projection) -> list[int]:
    """Return rows of q, k and v one after the other; all together where they take turns (MLA)."""
    parts: dict[str, int] = {}
    last = None
    for rows, role, _ in matrices(projection):
        if role != last and role in parts:
            return [sum(block.rows for block in projection.blocks)]
        parts[role] = parts.get(role, 0) + rows
        last = role
    return list(parts.values())
