"""Experts over the pairs of a worklist, in plain torch.

Shape suffixes: T rows, R packed rows, K top-k, P pairs, E experts, H hidden, F expert inner size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.worklist import Worklist


def grouped_mlp_reference(
    x_TH: Tensor,
    rows_R: Tensor | None,
    worklist: Worklist,
    gate_EFH: Tensor,
    up_EFH: Tensor,
    down_EHF: Tensor,
    top_k: int,
) -> Tensor:
    """What `epoch_moe.kernels.grouped_mlp.grouped_mlp` computes, zeros behind the last segment; syncs with the host.

    Products are summed in fp32; ``silu(gate) * up`` is taken in fp32 and rounded once to the dtype of ``x_TH``.
    """
    pairs_PH = x_TH.new_zeros(worklist.pair_P.numel(), x_TH.shape[1])
    offsets = worklist.begins_E1.tolist()
    for expert in range(len(offsets) - 1):
        segment = slice(offsets[expert], offsets[expert + 1])
        row_P = worklist.pair_P[segment].long() // top_k
        x_PH = x_TH[row_P if rows_R is None else rows_R[row_P]].float()
        gate_PF, up_PF = (x_PH @ weight[expert].float().T for weight in (gate_EFH, up_EFH))
        act_PF = (torch.nn.functional.silu(gate_PF) * up_PF).to(x_TH.dtype)
        pairs_PH[segment] = (act_PF.float() @ down_EHF[expert].float().T).to(x_TH.dtype)
    return pairs_PH
