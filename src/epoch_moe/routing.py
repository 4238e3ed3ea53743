"""Routers of the LLaDA family: scores, selection inside a support, combine weights.

Shape suffixes: B sequences, S positions, T = B x S rows, E experts, K top-k, H hidden, G expert groups,
N routing blocks of a sequence, C experts of a pool.

One router is three steps, kept apart because a block plan needs the middle one alone:

1. ``router_logits``  ``[T,H] -> [T,E]``
2. ``router_scores``  logits -> ``selection_TE`` (what top-k ranks) and ``combine_TE`` (what weights are made of)
3. ``select`` and ``combine_weights``  -> ``ids_TK`` and ``weights_TK``

A support only restricts step 3. Everything is fp32 and deterministic: blocks full of MASK rows are full of
near-ties, and a router in lower precision picks other experts there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, choice, instance, real, tensor, whole, wrong
from epoch_moe.precision import without_autocast

RouterKind = Literal["softmax", "sigmoid_group", "block_pool"]
NO_EXPERT = -1
"""Expert id of an empty slot: a pair that reads no weight and adds nothing."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """What a layer's router computes.

    Attributes:
        kind: ``"softmax"`` (LLaDA-MoE), ``"sigmoid_group"`` (LLaDA2.0 and 2.1) or ``"block_pool"`` (LLaDA2.2).
        num_experts: E.
        top_k: K, experts per row.
        n_group, topk_group: sigmoid_group only; experts lie in ``n_group`` contiguous groups, of which the
            ``topk_group`` with the highest sum of two best selection scores survive.
        routed_scaling_factor: factor on the normalised weights (sigmoid kinds).
        expert_capacity, block_size: block_pool only; every ``block_size`` rows share a pool of ``expert_capacity``.

    Example:
        >>> from epoch_moe import RouterSpec
        >>> RouterSpec(kind="sigmoid_group", num_experts=256, top_k=8, n_group=8, topk_group=4).group_size
        32
    """

    kind: RouterKind
    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    expert_capacity: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        choice("kind", self.kind, ("softmax", "sigmoid_group", "block_pool"))
        for name in ("num_experts", "top_k", "n_group", "topk_group", "expert_capacity", "block_size"):
            if (value := getattr(self, name)) is not None or name not in ("expert_capacity", "block_size"):
                whole(name, value, least=-MOST)
        real("routed_scaling_factor", self.routed_scaling_factor, "a finite number", least=-math.inf)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k} must lie in 1..num_experts={self.num_experts}")
        if self.kind == "sigmoid_group":
            if self.n_group < 1 or self.num_experts % self.n_group:
                raise ValueError(f"num_experts={self.num_experts} must be a multiple of n_group={self.n_group}")
            if not 1 <= self.topk_group <= self.n_group:
                raise ValueError(f"topk_group={self.topk_group} must lie in 1..n_group={self.n_group}")
            if self.top_k > self.topk_group * self.group_size:
                raise ValueError(
                    f"top_k={self.top_k} experts do not fit into topk_group={self.topk_group} groups of "
                    f"{self.group_size}"
                )
        if self.kind == "block_pool":
            if not self.expert_capacity or not self.top_k <= self.expert_capacity <= self.num_experts:
                raise ValueError(
                    f"expert_capacity={self.expert_capacity} must lie in top_k={self.top_k}.."
                    f"num_experts={self.num_experts}"
                )
            if not self.block_size or self.block_size < 1:
                raise ValueError(f"block_size={self.block_size} must be at least 1")

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.n_group


@dataclass(frozen=True)
class Scores:
    """Router scores of T rows.

    Attributes:
        logits_TE: fp32 (softmax kind: fp32 copy of logits computed in the model's dtype).
        selection_TE: fp32, what selection ranks; includes the expert bias.
        combine_TE: fp32, what combine weights are made of; includes the bias for the softmax kind only.
    """

    logits_TE: Tensor
    selection_TE: Tensor
    combine_TE: Tensor


@dataclass(frozen=True)
class Routing:
    """Chosen experts of T rows.

    Attributes:
        ids_TK: int64, best first; ``NO_EXPERT`` where fewer than K candidates exist.
        weights_TK: fp32 (softmax kind: rounded to the model's dtype); 0 where the id is ``NO_EXPERT``.
    """

    ids_TK: Tensor
    weights_TK: Tensor


def router_logits(x_TH: Tensor, weight_EH: Tensor, spec: RouterSpec) -> Tensor:
    """Router logits ``[T,E]`` in fp32.

    The sigmoid kinds compute in fp32 whatever the model's dtype is; the softmax kind computes in the model's
    dtype, as LLaDA-MoE's gate (a plain linear layer) does. Autocast changes neither: in bfloat16 a tenth of the rows
    would get other experts.
    """
    with without_autocast(x_TH):
        if spec.kind == "softmax":
            return F.linear(x_TH.to(weight_EH.dtype), weight_EH).float()
        if x_TH.is_cuda and x_TH.dtype == weight_EH.dtype != torch.float32 and not torch.is_grad_enabled():
            # Products of 16-bit numbers are exact in fp32: the same sums without two casts.
            return torch.mm(x_TH, weight_EH.t(), out_dtype=torch.float32)
        return F.linear(x_TH.float(), weight_EH.float())


def router_scores(logits_TE: Tensor, bias_E: Tensor | None, spec: RouterSpec) -> Scores:
    """Scores from logits ``[T,E]`` and an optional expert bias ``[E]``."""
    if spec.kind == "softmax":
        probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
        # LLaDA-MoE adds the bias to the probabilities in place, so that it also enters the weights.
        biased_TE = probs_TE if bias_E is None else probs_TE + bias_E.float()
        return Scores(logits_TE, biased_TE, biased_TE)
    scores_TE = torch.sigmoid(logits_TE)
    selection_TE = scores_TE if bias_E is None else scores_TE + bias_E.float()
    return Scores(logits_TE, selection_TE, scores_TE)


def _best_groups(group_TG: Tensor, count: int) -> Tensor:
    """Bool ``[T,G]``: the ``count`` best groups of each row."""
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    return kept_TG.scatter_(1, group_TG.topk(count, dim=-1, sorted=False).indices, True)


def _group_scores(grouped_TGg: Tensor) -> Tensor:
    """Sum of each group's two best scores: ``[T,G]``."""
    # Not by topk, which takes three times as long on a CPU.
    best_TG1, place_TG1 = grouped_TGg.max(dim=-1, keepdim=True)
    if grouped_TGg.shape[-1] == 1:
        return best_TG1.squeeze(-1)
    return best_TG1.squeeze(-1) + grouped_TGg.scatter(2, place_TG1, float("-inf")).amax(dim=-1)


def natural_order(selection_TE: Tensor, spec: RouterSpec, count: int) -> Tensor:
    """A row's best ``count`` experts by selection score, within its own groups and best first: int64 ``[T,count]``.

    The first K are those of `select` without a support, but that ties may fall otherwise.
    """
    return group_limited(selection_TE, spec).topk(count, dim=-1).indices


def group_limited(selection_TE: Tensor, spec: RouterSpec, support: Tensor | None = None) -> Tensor:
    """Selection scores with -inf where a row may not choose: outside its groups, and outside the support.

    A row's groups are its ``topk_group`` best by the sum of their two best scores, whether a support holds those or
    not: so a row whose natural top-k lie in the support gets exactly these. Only a row that finds fewer than K usable
    experts there trades groups without any usable expert for the next best that have one.

    Args:
        selection_TE: fp32 selection scores.
        support: bool ``[E]`` or ``[T,E]``; None = all experts.
    """
    usable_TE = selection_TE if support is None else selection_TE.masked_fill(~support, float("-inf"))
    if spec.kind != "sigmoid_group" or spec.topk_group == spec.n_group:
        return usable_TE
    num_rows = selection_TE.shape[0]
    grouped_TGg = selection_TE.view(num_rows, spec.n_group, spec.group_size)
    group_TG = _group_scores(grouped_TGg)
    kept_TG = _best_groups(group_TG, spec.topk_group)
    if support is not None:
        usable_TG = support.expand(num_rows, -1).reshape(grouped_TGg.shape).sum(dim=-1)
        short_T1 = (usable_TG * kept_TG).sum(dim=-1, keepdim=True) < spec.top_k
        kept_TG = _best_groups(group_TG.masked_fill(short_T1 & (usable_TG == 0), float("-inf")), spec.topk_group)
    limited_TGg = usable_TE.view_as(grouped_TGg).masked_fill(~kept_TG.unsqueeze(-1), float("-inf"))
    return limited_TGg.view(num_rows, spec.num_experts)


def pool_support(best_BNE: Tensor, spec: RouterSpec) -> Tensor:
    """The block-pool router's own support (LLaDA2.2): bool ``[B,N,E]``, the ``expert_capacity`` best of each block.

    Args:
        best_BNE: the largest selection score that any row of a routing block gives to each expert.
    """
    assert spec.expert_capacity is not None
    best_BNC = best_BNE.topk(spec.expert_capacity, dim=-1).indices
    return torch.zeros_like(best_BNE, dtype=torch.bool).scatter_(-1, best_BNC, True)


def sequence_pools(selection_TE: Tensor, spec: RouterSpec, batch: int, valid_BS: Tensor | None = None) -> Tensor:
    """Per-row pools ``[T,E]`` for T = batch x S rows: those of a sequence that lie in one routing block share a pool.

    Routing blocks are aligned to a sequence's own positions. Its first valid row must lie on a block boundary
    (position 0 behind left padding, or the first row that is not in a K/V cache) and its rows must follow each other.
    A short last block forms a pool of its own; no block reaches into another sequence.

    Args:
        selection_TE: fp32 selection scores.
        batch: B.
        valid_BS: rows that exist; the others do not vote, and what their own pool holds means nothing. None: all.
    """
    num_rows, num_experts = selection_TE.shape
    seq_len = num_rows // max(batch, 1)
    assert spec.block_size is not None
    if num_rows == 0:
        return torch.zeros_like(selection_TE, dtype=torch.bool)
    voting_BSE = selection_TE.view(batch, seq_len, num_experts)
    block_BS = torch.arange(seq_len, device=selection_TE.device).expand(batch, seq_len)
    if valid_BS is not None:
        voting_BSE = voting_BSE.masked_fill(~valid_BS.unsqueeze(-1), float("-inf"))
        # Sequences have different padding, and the host does not know it: so routing blocks are indices, not a view.
        block_BS = (block_BS - valid_BS.int().argmax(dim=1, keepdim=True)).clamp_min(0)
    blocks = -(-seq_len // spec.block_size)
    index_BSE = (block_BS // spec.block_size).unsqueeze(-1).expand_as(voting_BSE)
    best_BNE = voting_BSE.new_full((batch, blocks, num_experts), float("-inf"))
    best_BNE = best_BNE.scatter_reduce(1, index_BSE, voting_BSE, "amax")
    pool_BNE = pool_support(best_BNE, spec)
    return pool_BNE.gather(1, index_BSE).reshape(num_rows, num_experts)


def select(selection_TE: Tensor, spec: RouterSpec, support: Tensor | None = None) -> Tensor:
    """Top-k expert ids ``[T,K]`` by selection score, inside an optional support.

    Args:
        selection_TE: fp32 selection scores.
        support: bool ``[E]`` or ``[T,E]``, True where an expert may be chosen; see `group_limited` for what it does
            to a group limit.

    Returns:
        int64 ids, best first; ``NO_EXPERT`` where fewer than K experts are usable. Ties are broken as
        ``torch.topk`` does, which the released models use.
    """
    best = group_limited(selection_TE, spec, support).topk(spec.top_k, dim=-1)
    if support is None:
        return best.indices
    return best.indices.masked_fill(best.values == float("-inf"), NO_EXPERT)


def combine_weights(combine_TE: Tensor, ids_TK: Tensor, spec: RouterSpec, dtype: torch.dtype) -> Tensor:
    """Combine weights ``[T,K]`` of the chosen experts.

    Softmax kind: the raw probabilities, rounded to the model's ``dtype`` (kept as fp32 values). Sigmoid kinds:
    unbiased score / (sum over the chosen + 1e-20) x scaling, fp32.
    """
    empty_TK = ids_TK == NO_EXPERT
    weights_TK = combine_TE.gather(1, ids_TK.clamp_min(0)).masked_fill(empty_TK, 0.0)
    if spec.kind == "softmax":
        return weights_TK.to(dtype).float()
    if spec.top_k > 1:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * spec.routed_scaling_factor


def choose(scores: Scores, spec: RouterSpec, dtype: torch.dtype, support: Tensor | None = None) -> Routing:
    """The experts of rows with these scores, in a model of this dtype; see `select` and `combine_weights`."""
    ids_TK = select(scores.selection_TE, spec, support)
    return Routing(ids_TK, combine_weights(scores.combine_TE, ids_TK, spec, dtype))


def route(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor | None,
    spec: RouterSpec,
    *,
    batch: int = 1,
    support: Tensor | None = None,
    valid_BS: Tensor | None = None,
) -> tuple[Routing, Scores]:
    """One whole routing pass: ``x_TH -> ids_TK, weights_TK`` and scores.

    Args:
        batch: sequences that the T rows belong to. The block-pool kind forms its pools within them, see
            `sequence_pools`.
        support: as in `select`; not for the block-pool kind, which brings its own.
        valid_BS: bool ``[B,S]``, rows that vote in pools; None: all. Other kinds route every row for itself.
    """
    _check(x_TH, weight_EH, bias_E, spec)
    whole("batch", batch, "sequences", least=1)
    if valid_BS is not None:
        tensor("valid_BS", valid_BS, torch.bool, (batch, "rows"), x_TH.device)
    if support is not None and (not isinstance(support, Tensor) or support.dtype != torch.bool):
        raise wrong("support", support, "bool [experts] or [rows, experts]")
    scores = router_scores(router_logits(x_TH, weight_EH, spec), bias_E, spec)
    if spec.kind == "block_pool":
        if support is not None:
            raise ValueError("kind='block_pool' forms its own supports: expected support=None")
        support = sequence_pools(scores.selection_TE, spec, batch, valid_BS)
    return choose(scores, spec, x_TH.dtype, support), scores


def _check(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, spec: RouterSpec) -> None:
    instance("spec", spec, RouterSpec, "a RouterSpec")
    tensor("x_TH", x_TH, FLOAT_DTYPES, ("rows", "hidden"))
    tensor("weight_EH", weight_EH, FLOAT_DTYPES, (spec.num_experts, x_TH.shape[1]), x_TH.device)
    if bias_E is not None:
        tensor("bias_E", bias_E, FLOAT_DTYPES, (spec.num_experts,), x_TH.device)


def check_size(max_support: int | None, spec: RouterSpec) -> None:
    """Refuse a size that leaves rows without their top-k."""
    if max_support is not None and whole("max_support", max_support, "experts", least=1) < spec.top_k:
        raise ValueError(f"max_support={max_support} must be at least top_k={spec.top_k}: a row chooses that many")


def settle(
    support_GE: Tensor,
    used_GE: Tensor,
    natural_GE: Tensor,
    coverage: float,
    max_support: int | None,
    least_saving: float,
) -> Tensor:
    """Compiled supports, cut to ``max_support``; or all experts where one would not pay. No host sync.

    Args:
        support_GE: bool, as compiled.
        used_GE: bool, experts in the voting rows' natural top-k.
        natural_GE: weight of each expert over the rows that have it in their natural top-k.
        coverage, max_support, least_saving: see `epoch_moe.plan.atlas.compile_support`.
    """
    size_G1 = support_GE.sum(dim=1, keepdim=True)
    if max_support is not None:
        heaviest_GM = natural_GE.argsort(dim=1, descending=True, stable=True)[:, :max_support]
        cut_GE = torch.zeros_like(support_GE).scatter_(1, heaviest_GM, True)
        return torch.where(size_G1 > max_support, cut_GE, support_GE)
    if coverage >= 1.0 or least_saving <= 0.0:
        return support_GE
    return support_GE | (size_G1 > (1.0 - least_saving) * used_GE.sum(dim=1, keepdim=True))
