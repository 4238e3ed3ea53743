"""Plain routed experts: the definition that every fast path is compared with.

Shape suffixes: R rows, K top-k, H hidden, F expert inner size, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.experts.views import ExpertViews
from epoch_moe.routing import NO_EXPERT
from epoch_moe.worklist import tree_sum


def experts_reference(
    x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, experts: ExpertViews, groups: tuple[Tensor, int]
) -> Tensor:
    """Weighted sum of the chosen experts, row by row: ``[R,H]``, fp32.

    Each expert is ``down(silu(gate(x)) * up(x))`` in the model's dtype; the K outputs are weighted and summed in
    fp32, as LLaDA2's ``moe_infer`` does, in the order of `epoch_moe.worklist.combine`.
    """
    inner = experts.down_EHF.shape[-1]
    group_RK, count = groups
    sums_GRH = torch.zeros((count, *x_RH.shape), dtype=torch.float32, device=x_RH.device)
    for row, (ids, weights) in enumerate(zip(ids_RK.tolist(), weights_RK, strict=True)):
        for slot, expert in enumerate(ids):
            if expert == NO_EXPERT:
                continue
            gate_up = torch.cat([F.linear(x_RH[row], weight[expert]) for weight in experts.projections])
            hidden = F.silu(gate_up[:inner]) * gate_up[inner:]
            pair_H = F.linear(hidden, experts.down_EHF[expert]).float()
            sums_GRH[group_RK[row, slot], row] += pair_H * weights[slot].float()
    return tree_sum(sums_GRH)
