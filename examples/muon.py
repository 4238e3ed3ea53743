"""The Muon optimizer for matrices and stacks of matrices, batched by shape.

Shape suffixes: E matrices of one shape, M rows, N columns.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, for matrices ``[M,N]`` and stacks of matrices ``[E,M,N]``.

    Matrices of one shape are orthogonalised together: on a CPU the small products cost more to start than to compute.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient are left alone."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape[-2:]].append(param)
            for shape, params in by_shape.items():
                updates = []
                for param in params:
                    state = self.state[param]
                    if not state:
                        state["momentum"] = torch.zeros_like(param)
                    state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                    updates.append(param.grad.lerp(state["momentum"], group["momentum"]).reshape(-1, *shape))
                # The factor gives an update the size of an AdamW step, so that both share one learning rate.
                scale = -group["lr"] * 0.2 * max(shape) ** 0.5
                orthogonal = self._orthogonalise(torch.cat(updates)).split([len(u) for u in updates])
                for param, update in zip(params, orthogonal, strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update.reshape(param.shape), alpha=scale)

    @staticmethod
    def _orthogonalise(x_EMN: Tensor) -> Tensor:
        """Five Newton-Schulz steps towards the nearest matrix with all singular values one."""
        tall = x_EMN.shape[-2] > x_EMN.shape[-1]
        x_EMN = x_EMN.mT if tall else x_EMN
        x_EMN = (x_EMN / (x_EMN.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
        for _ in range(5):
            gram = x_EMN @ x_EMN.mT
            poly = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            x_EMN = torch.baddbmm(x_EMN, poly, x_EMN, beta=3.4445)
        return (x_EMN.mT if tall else x_EMN).float()
