"""The optimizer: Muon for the matrices inside the blocks, AdamW for embedding and head."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headway.optim import MuonClip
from headway.optim.muonclip import parameter_groups
from headway.stability import Clipped, QKClip
from headway.stability.rows import local_part

from .config import Settings
from .model import Transformer
from .shards import placed


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: every singular value of a matrix's step is near one.

    The same update as `torch.optim.Muon` (Jordan 2024, kellerjordan.github.io/posts/muon), but in
    float32 on a CPU: PyTorch's always multiplies in bfloat16, which took 30 times longer than this
    on one without bfloat16 units, and longer than the rest of the step. Matrices of one shape go
    together.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.9, weight_decay: float = 0.1
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append((p, p.grad))
            for pairs in alike.values():
                self._step(pairs, group["lr"], group["momentum"], group["weight_decay"])
        return loss

    def _step(
        self, pairs: list[tuple[Tensor, Tensor]], lr: float, momentum: float, weight_decay: float
    ) -> None:
        # A DTensor's operations take the host ten times as long as those of its local part.
        params, grads, averages = [], [], []
        for p, grad in pairs:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            for tensors, x in (params, p), (grads, grad), (averages, state["momentum_buffer"]):
                tensors.append(local_part(x))
        torch._foreach_lerp_(averages, grads, 1 - momentum)
        directions = torch._foreach_lerp(grads, averages, momentum)  # Nesterov's look ahead
        updates = _orthogonalise_like(pairs[0][0], torch.stack(directions))
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        # A tall matrix has more outputs than inputs: keep their size (Jordan 2024).
        rows, columns = pairs[0][0].shape
        torch._foreach_add_(params, updates.unbind(), alpha=-lr * max(1.0, rows / columns) ** 0.5)


def _orthogonalise_like(p: Any, parts: Tensor) -> Tensor:
    """Orthogonalise matrices of which this rank has a part, cut like `p`; return their parts."""
    if not hasattr(p, "device_mesh"):
        return orthogonalise(parts)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    # In the stack, dimension 0 counts the matrices: their own dimensions follow.
    cut = [Shard(x.dim + 1) if isinstance(x, Shard) else x for x in p.placements]
    whole = DTensor.from_local(
        parts, p.device_mesh, cut, run_check=False,
        shape=torch.Size((len(parts), *p.shape)), stride=(p.shape.numel(), p.shape[1], 1),
    ).full_tensor()  # fmt: skip
    everywhere = [Replicate()] * p.device_mesh.ndim
    updates = DTensor.from_local(orthogonalise(whole), p.device_mesh, everywhere, run_check=False)
    return updates.redistribute(placements=cut).to_local()


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Replace each matrix U S Vᵀ of (n, rows, columns) by about U Vᵀ.

    Newton-Schulz: the odd polynomial 3.4445 x - 4.7750 x³ + 2.0315 x⁵, iterated, takes every
    singular value in (0, 1] into about [0.7, 1.2] (Jordan 2024: steep at 0 rather than exact at 1).
    On a GPU in bfloat16, as he has it.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    if x.is_cuda and x.dtype == torch.float32:
        x = x.bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def _of_matrices(
    name: str, matrices: list[nn.Parameter], lr: float, decay: float
) -> torch.optim.Optimizer:
    if name == "muon":
        return Muon(matrices, lr=lr, weight_decay=decay)
    if name == "adamw":
        return torch.optim.AdamW(matrices, lr=lr, betas=(0.9, 0.95), weight_decay=decay)
    # With parameter scaling (arXiv 1804.04235). PyTorch squares the first epsilon.
    return torch.optim.Adafactor(matrices, lr=lr, eps=(1e-16, 1e-3), weight_decay=decay)


class Optimizers:
    """Muon, AdamW, MuonClip or Adafactor for the blocks, AdamW for embedding and head, and QK-Clip,
    as one; `state` names every tensor for a checkpoint."""

    def __init__(self, model: Transformer, settings: Settings, group: Any = None):
        matrices, _, gains = parameter_groups(model.blocks)
        ends: list[dict[str, Any]] = [
            {"params": [model.embedding.weight], "lr": settings.embedding_lr},
            {"params": [model.head.weight], "lr": settings.head_lr},
        ]
        decay, tau = settings.weight_decay, settings.qk_clip_tau
        self.clip: QKClip | None = None
        if settings.optimizer == "muonclip":
            inside: torch.optim.Optimizer = MuonClip(
                model.blocks, settings.lr, decay, tau=tau, group=group
            )
        else:
            if gains:
                ends.append({"params": gains, "lr": settings.head_lr})
            inside = _of_matrices(settings.optimizer, matrices, settings.lr, decay)
            self.clip = None if tau is None else QKClip(model.blocks, tau, group=group)
        self.all = (inside, torch.optim.AdamW(ends, betas=(0.9, 0.95), weight_decay=0.0))
        self.rates = [[group["lr"] for group in o.param_groups] for o in self.all]
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}

    def step(self, factor: float) -> Clipped | None:
        """Update with every learning rate times `factor`; clears the gradients. Returns what
        QK-Clip did, where there is one."""
        for optimizer, rates in zip(self.all, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        if self.clip is not None:
            return self.clip.step()
        return getattr(self.all[0], "clipped", None)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next step depends on: "parameter/kind" -> tensor."""
        return {
            f"{self.names[p]}/{kind}": tensor
            for optimizer in self.all
            for p, kinds in optimizer.state.items()
            for kind, tensor in kinds.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned. Raises KeyError if a parameter is not of this model."""
        params = {name: p for p, name in self.names.items()}
        home = {p: o for o in self.all for group in o.param_groups for p in group["params"]}
        for key, tensor in state.items():
            name, kind = key.rsplit("/", 1)
            p = params[name]
            # AdamW counts its steps in a 0-d tensor on the CPU.
            tensor = tensor.to(p.device if tensor.dim() else "cpu")
            home[p].state[p][kind] = placed(tensor, p) if tensor.dim() else tensor
