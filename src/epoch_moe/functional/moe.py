"""`moe_forward`: routed experts on plain tensors, for callers with their own model and their own weights.

Shape suffixes: T rows, K top-k, H hidden, E experts of the layer, e experts that lie here (F, their inner size).
"""

from __future__ import annotations

import torch
from torch import Tensor

from epoch_moe.checks import MOST, choice, whole, wrong
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
    given = {"x_TH": x_TH, "topk_ids_TK": topk_ids_TK, "topk_weights_TK": topk_weights_TK}
    given |= {} if expert_map is None else {"expert_map": expert_map}
    for name, value in (given if out is None else {**given, "out": out}).items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise wrong(name, value, "a dense tensor")
    _check_inputs(x_TH, topk_ids_TK, topk_weights_TK, views)
    choice("backend", backend, BACKENDS)
    if expert_range is not None and expert_map is not None:
        raise ValueError("pass expert_range or expert_map, not both: each says which experts lie here")
    if workspace is not None:
        whole("workspace", workspace, "a number of bytes, or None for no limit")
    inputs = (x_TH, topk_weights_TK, *views.projections, views.down_EHF)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        for name, used in (("out", out is not None), ("workspace", workspace is not None)):
            if used:
                raise ValueError(f"{name}= is not differentiable and an input requires gradients: use torch.no_grad()")
    if out is not None:
        _check_out(out, x_TH, topk_ids_TK, topk_weights_TK)
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
        if expert_map.dim() != 1 or expert_map.is_floating_point() or not expert_map.numel():
            raise ValueError(
                f"expert_map is {expert_map.dtype} of shape {tuple(expert_map.shape)}: expected whole numbers [experts]"
            )
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


def _check_inputs(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, views: ExpertViews) -> None:
    hidden = views.down_EHF.shape[1]
    if x_TH.dim() != 2 or x_TH.shape[1] != hidden:
        raise ValueError(f"x_TH has shape {tuple(x_TH.shape)}: expected [rows, {hidden}] as the experts' hidden size")
    if ids_TK.dim() != 2 or ids_TK.shape[0] != x_TH.shape[0] or ids_TK.shape[1] < 1:
        raise ValueError(f"topk_ids_TK has shape {tuple(ids_TK.shape)}: expected [{x_TH.shape[0]}, top-k]")
    if ids_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids_TK has dtype {ids_TK.dtype}: expected int32 or int64")
    if weights_TK.shape != ids_TK.shape or not weights_TK.is_floating_point():
        raise ValueError(
            f"topk_weights_TK is {weights_TK.dtype} of shape {tuple(weights_TK.shape)}: expected floating point "
            f"{tuple(ids_TK.shape)} as topk_ids_TK"
        )
    if x_TH.dtype != views.down_EHF.dtype:
        raise ValueError(f"x_TH is {x_TH.dtype}, the experts are {views.down_EHF.dtype}: expected one dtype")
    for name, tensor in (("x_TH", x_TH), ("topk_ids_TK", ids_TK), ("topk_weights_TK", weights_TK)):
        if tensor.device != views.down_EHF.device:
            raise ValueError(f"{name} is on {tensor.device}, the experts on {views.down_EHF.device}: move one of them")


def _check_out(out: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
    if out.shape != x_TH.shape or out.dtype != x_TH.dtype or out.device != x_TH.device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}: expected {x_TH.dtype} {tuple(x_TH.shape)} on "
            f"{x_TH.device} as x_TH"
        )
    for name, tensor in (("x_TH", x_TH), ("topk_ids_TK", ids_TK), ("topk_weights_TK", weights_TK)):
        if share_memory(out, tensor):
            raise ValueError(f"out shares memory with {name}, which may still be read after out is written: expected a "
                             "buffer of its own")  # fmt: skip


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors meet (true as well for views that interleave without touching)."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: Tensor) -> int:
    """The address behind a tensor's last element."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (int(last) + 1) * tensor.element_size()
