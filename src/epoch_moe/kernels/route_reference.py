"""`epoch_moe.kernels.route` in plain torch.

Shape suffixes: R rows, E experts, K top-k, G supports, N expert groups, g experts of a group.

It is `epoch_moe.routing` with the lowest id winning among equal scores, and among equal groups. ``torch.topk``, which
`routing.select` and the released models use, leaves open which of two equal scores it takes, and in which order it
gives them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.routing import NO_EXPERT, RouterSpec, combine_weights, router_scores

NEG_INF = float("-inf")


def _best(value_RN: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` best of each row, best first; the lowest id among equals."""
    return value_RN.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _best_groups(group_RN: Tensor, count: int) -> Tensor:
    return torch.zeros_like(group_RN, dtype=torch.bool).scatter_(1, _best(group_RN, count), True)


def select_lowest(selection_RE: Tensor, spec: RouterSpec, support_RE: Tensor | None) -> Tensor:
    """`routing.select` with the lowest id among equals. An expert whose score is -inf is never chosen."""
    usable_RE = torch.ones_like(selection_RE, dtype=torch.bool) if support_RE is None else support_RE
    if spec.kind == "sigmoid_group" and spec.topk_group < spec.n_group:
        grouped_RNg = selection_RE.view(-1, spec.n_group, spec.group_size)
        group_RN = grouped_RNg.topk(min(2, spec.group_size), dim=-1).values.sum(-1)
        usable_RN = usable_RE.view_as(grouped_RNg).sum(-1)
        kept_RN = _best_groups(group_RN, spec.topk_group)
        short_R1 = (usable_RN * kept_RN).sum(-1, keepdim=True) < spec.top_k
        with_any_RN = group_RN.masked_fill(usable_RN == 0, NEG_INF)
        kept_RN = torch.where(short_R1, _best_groups(with_any_RN, spec.topk_group), kept_RN)
        usable_RE = (usable_RE.view_as(grouped_RNg) & kept_RN.unsqueeze(-1)).view_as(selection_RE)
    limited_RE = selection_RE.masked_fill(~usable_RE, NEG_INF)
    ids_RK = _best(limited_RE, spec.top_k)
    return ids_RK.masked_fill(limited_RE.gather(1, ids_RK) == NEG_INF, NO_EXPERT)


def route_reference(
    logits_RE: Tensor,
    bias_E: Tensor | None,
    spec: RouterSpec,
    *,
    dtype: torch.dtype,
    support_GE: Tensor | None = None,
    group_R: Tensor | None = None,
    restricted_R: Tensor | None = None,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `epoch_moe.kernels.route.route` computes; same arguments and results."""
    num_rows = logits_RE.shape[0]
    real_R = torch.ones(num_rows, dtype=torch.bool, device=logits_RE.device)
    if count is not None:
        real_R = torch.arange(num_rows, device=logits_RE.device) < count
    logits_RE = logits_RE.float().masked_fill(~real_R.unsqueeze(1), 0.0)
    scores = router_scores(logits_RE, bias_E, spec)
    support_RE = None
    if support_GE is not None:
        if group_R is None:
            support_RE = support_GE.expand(num_rows, -1)
        else:
            support_RE = support_GE[group_R.masked_fill(~real_R, 0)]
        if restricted_R is not None:
            support_RE = support_RE | ~restricted_R.unsqueeze(1)
    ids_RK = select_lowest(scores.selection_TE, spec, support_RE).masked_fill(~real_R.unsqueeze(1), NO_EXPERT)
    weights_RK = combine_weights(scores.combine_TE, ids_RK, spec, dtype)
    raw_RK = scores.combine_TE.gather(1, ids_RK.clamp_min(0)).masked_fill(ids_RK == NO_EXPERT, 0.0)
    return ids_RK, weights_RK, raw_RK.sum(-1)
