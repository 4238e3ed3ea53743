"""`moe_forward`: routed experts on plain tensors, for callers with their own model and their own weights.

Shape suffixes: T rows, K top-k, H hidden, E experts of the layer, e experts that lie here (F, their inner size).
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.checks import FLOAT_DTYPES, MOST, WHOLE_DTYPES, choice, tensor, whole, wrong
from epoch_moe.experts.run import BACKENDS, Backend, pick_backend, run_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.functional.views import GateUp, PerExpert, expert_views
from epoch_moe.precision import without_autocast
from epoch_moe.routing import NO_EXPERT


def moe_forward(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up: GateUp | ExpertViews,
    down: Tensor | PerExpert | None = None,
    *,
    expert_range: tuple[int, int] | None = None,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
    workspace: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Weighted sum of the chosen experts that lie here: ``[T,H]`` in the dtype of ``x_TH``.

    Each expert is ``down(silu(gate(x)) * up(x))`` in the model's dtype. The K outputs of a row are weighted and summed
    in fp32 and rounded once. Autocast changes nothing. The sum is the unreduced part of this rank's
    experts: add the ranks' parts yourself. It holds no shared expert, and no scaling but what ``topk_weights_TK``
    carries.

    Args:
        x_TH: rows; T may be 0.
        topk_ids_TK: int32 or int64. An id below 0, outside the owned range or >= E reads no expert and adds nothing,
            whatever its weight is (NaN too): padding rows hold -1.
        topk_weights_TK: combine weights, the routed scaling factor included (`route` returns them so); read as fp32.
        gate_up: an `ExpertViews`, or what `expert_views` takes: fused ``[e,2F,H]``, a tuple (gate, up) of
            ``[e,F,H]``, or lists of per-expert views.
        down: ``[e,H,F]``, or a list of per-expert views; None with an `ExpertViews`.
        expert_range: (first, end) of the experts that lie here, where ids are those of the whole layer. Default: all.
        expert_map: int ``[E]``, where expert i lies among the e here, anything outside ``0..e-1`` for "not here"; in
            place of ``expert_range``.
        out: written in place and returned: shape, dtype and device of ``x_TH``, no memory in common with the inputs.
        workspace: bytes that intermediates may take beside the pairs' outputs (T x K x H), as far as one expert's pairs
            fit; the same result (see `epoch_moe.experts.run`), at the price of a host sync. None = no limit.
        backend: see `epoch_moe.experts.run`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; nothing has been written then.
    """
    if isinstance(gate_up, ExpertViews):
        if down is not None:
            raise ValueError("gate_up is an ExpertViews, which holds the down projections: leave down out")
        views = gate_up
    else:
        if down is None:
            raise ValueError("down is missing: pass it beside gate_up, or an ExpertViews alone")
        views = expert_views(gate_up, down)
    down_EHF = views.down_EHF
    tensor("x_TH", x_TH, down_EHF.dtype, ("rows", down_EHF.shape[1]), down_EHF.device)
    tensor("topk_ids_TK", topk_ids_TK, (torch.int32, torch.int64), (x_TH.shape[0], "top-k"), down_EHF.device)
    tensor("topk_weights_TK", topk_weights_TK, FLOAT_DTYPES, topk_ids_TK.shape, down_EHF.device)
    choice("backend", backend, BACKENDS)
    if expert_range is not None and expert_map is not None:
        raise ValueError("pass expert_range or expert_map, not both: each says which experts lie here")
    if workspace is not None:
        whole("workspace", workspace, "a number of bytes, or None for no limit")
    inputs = (x_TH, topk_weights_TK, *views.projections, down_EHF)
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        for name, used in (("out", out is not None), ("workspace", workspace is not None)):
            if used:
                raise ValueError(f"{name}= is not differentiable and an input requires gradients: use torch.no_grad()")
    if out is not None:
        tensor("out", out, x_TH.dtype, x_TH.shape, x_TH.device)
        for name, read in (("x_TH", x_TH), ("topk_ids_TK", topk_ids_TK), ("topk_weights_TK", topk_weights_TK)):
            if share_memory(out, read):
                raise ValueError(
                    f"out shares memory with {name}, which may still be read after out is written: expected a buffer "
                    "of its own"
                )
    ids_TK = local_ids(topk_ids_TK, views.num_experts, expert_range, expert_map)
    with without_autocast(x_TH):
        picked = pick_backend(backend, views, x_TH, topk_weights_TK, workspace=workspace)
        y_TH = run_experts(x_TH, ids_TK, topk_weights_TK.float(), views, picked, workspace=workspace)
    return y_TH if out is None else out.copy_(y_TH)


def local_ids(
    ids_TK: Tensor, num_local: int, expert_range: tuple[int, int] | None = None, expert_map: Tensor | None = None
) -> Tensor:
    """Ids among the ``num_local`` experts that lie here, int64; ``NO_EXPERT`` for all others.

    Raises:
        ValueError: a range that is not of ``num_local`` experts, or a map that is no vector of whole numbers.
    """
    ids_TK = ids_TK.long()
    if expert_map is not None:
        tensor("expert_map", expert_map, WHOLE_DTYPES, ("experts",), ids_TK.device)
        if not expert_map.numel():
            raise wrong("expert_map", expert_map, "where each of the layer's experts lies")
        known_TK = (ids_TK >= 0) & (ids_TK < expert_map.shape[0])
        mapped_TK = expert_map.long()[ids_TK.clamp(0, expert_map.shape[0] - 1)]
        ids_TK = mapped_TK.masked_fill(~known_TK, NO_EXPERT)
    elif expert_range is not None:
        if not isinstance(expert_range, tuple) or len(expert_range) != 2:
            raise wrong("expert_range", expert_range, "(first, end)")
        first, end = (whole("expert_range", number, least=-MOST) for number in expert_range)
        if first < 0 or end - first != num_local:
            raise ValueError(
                f"expert_range=({first}, {end}) names {end - first} experts, the weights hold {num_local}: expected "
                "(first, first + their number)"
            )
        ids_TK = ids_TK - first
    return ids_TK.masked_fill((ids_TK < 0) | (ids_TK >= num_local), NO_EXPERT)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors meet (true as well for views that interleave without touching)."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: Tensor) -> int:
    """The address behind a tensor's last element."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (int(last) + 1) * tensor.element_size()
