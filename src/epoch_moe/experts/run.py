"""Routed experts on one device: one pass over the pairs in expert order.

Shape suffixes: R rows, K top-k, P pairs, H hidden, F expert inner size, E experts.

Three ways to multiply the segments, chosen by `pick_backend`: the Triton kernels on a GPU (`epoch_moe.experts.device`),
`torch.nn.functional.grouped_mm` where that fits, and a loop over the experts that have pairs elsewhere. All read the
weights of active experts only.

With a `workspace` the pairs go through in runs of consecutive experts. An expert's segment is never cut, so the matrix
products are the same ones, and so is every bit of the result where rows are multiples of 64 bytes (as in every released
model): a product's last bits may depend on the alignment of its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.experts.device import device_worklist, run_device
from epoch_moe.experts.reference import experts_reference
from epoch_moe.experts.views import ExpertViews
from epoch_moe.precision import autocast_dtype, product_dtype
from epoch_moe.worklist import GROUPS, Worklist, build_worklist, combine

Backend = Literal["auto", "triton", "grouped", "loop", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def supports_grouped_mm(stacked: ExpertViews) -> tuple[bool, str]:
    """Whether `torch.nn.functional.grouped_mm` takes these weights, and if not, why.

    Limits as measured on torch 2.13: fp32, bf16 and fp16 (bf16 alone on CUDA and under torch.compile); row strides
    must be a multiple of 16 bytes.
    """
    if not hasattr(F, "grouped_mm"):
        return False, f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    weight = stacked.down_EHF
    if product_dtype(weight) != weight.dtype:
        return False, f"autocast computes {weight.dtype} experts in {product_dtype(weight)}, casting those in use alone"
    if weight.device.type == "cuda" and weight.dtype != torch.bfloat16:
        return False, f"grouped_mm on CUDA takes bfloat16, the experts are {weight.dtype}"
    if torch.compiler.is_compiling() and weight.dtype != torch.bfloat16:
        return False, f"torch.compile traces grouped_mm in bfloat16 only, the experts are {weight.dtype}"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False, f"grouped_mm takes float32, bfloat16 or float16, the experts are {weight.dtype}"
    for name, size in (("hidden size", weight.shape[1]), ("expert inner size", weight.shape[2])):
        if size * weight.element_size() % 16:
            return False, f"{name} {size} in {weight.dtype}: grouped_mm needs rows of a multiple of 16 bytes"
    for view in (*stacked.projections, weight):
        # A compiled forward cannot ask for the offset, which is the same as in the eager forwards around it.
        offset = 0 if torch.compiler.is_compiling() else view.storage_offset()
        steps = (offset, *view.stride()[:2])
        if view.stride(2) != 1 or any(step * view.element_size() % 16 for step in steps):
            return False, f"weight strides {view.stride()}: grouped_mm needs contiguous rows at multiples of 16 bytes"
    return True, ""


def supports_kernels(stacked: ExpertViews, *inputs: Tensor, workspace: int | None = None) -> tuple[bool, str]:
    """Whether the Triton kernels compute these experts on these inputs, and if not, why."""
    from epoch_moe.kernels.launch import supports_triton

    weights = (*stacked.projections, stacked.down_EHF)
    fits, reason = supports_triton(weights[0].device)
    if not fits:
        return False, reason
    if weights[0].dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False, f"the kernels take float32, bfloat16 or float16, the experts are {weights[0].dtype}"
    if weights[0].dtype == torch.bfloat16 and weights[0].device.type == "cpu":
        return False, "Triton's interpreter is wrong in bfloat16: load the model in float32 to try kernels on the CPU"
    for view in weights:
        if view.stride(2) != 1:
            return False, f"weight strides {view.stride()}: the kernels need contiguous rows"
    # Under autocast the rows are in its dtype; the kernels compute in that of the weights.
    if autocast_dtype(weights[0]) is None and any(x.dtype != weights[0].dtype for x in inputs[:1]):
        return False, f"the rows are {inputs[0].dtype}, the experts {weights[0].dtype}: the kernels need one dtype"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*weights, *inputs)):
        return False, "gradients are required, and the kernels have no backward pass: run under torch.no_grad()"
    if workspace is not None:
        return False, "the kernels keep to no workspace limit"
    return True, ""


def pick_backend(
    requested: Backend, stacked: ExpertViews, *inputs: Tensor, workspace: int | None = None, pieces: bool = False
) -> Backend:
    """The backend that will run: ``"auto"`` resolved, an impossible request refused with the reason.

    ``"auto"`` is ``"triton"`` on a GPU that runs the kernels, where no gradient is needed; else ``"grouped"`` where
    that fits, else ``"loop"``.

    Args:
        requested: what was asked for.
        stacked: the experts.
        inputs: what they are run on: the rows, then anything else that may need gradients.
        workspace: as `run_experts` will get it.
        pieces: the experts lie in several places, so that `segments_of` computes them: ``"grouped"`` or ``"loop"``.

    Raises:
        ValueError: no such backend, or one that is not possible here.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend={requested!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    if pieces and requested in ("triton", "reference"):
        raise ValueError(
            f"backend={requested!r} reads all experts of a layer as one tensor, and here they are in several places; "
            f"use backend='auto' or one of {', '.join(map(repr, _SEGMENTS))}"
        )
    tried: tuple[Backend, ...] = (requested,)
    if requested == "auto":
        on_gpu = stacked.down_EHF.device.type == "cuda" and not pieces
        tried = ("triton", "grouped", "loop") if on_gpu else ("grouped", "loop")
    reason = ""
    for backend in tried:
        fits = True
        if backend == "triton":
            fits, reason = supports_kernels(stacked, *inputs, workspace=workspace)
        elif backend == "grouped":
            fits, reason = supports_grouped_mm(stacked)
        if fits:
            return backend
    other = "" if requested == "triton" else " or 'loop'"
    raise ValueError(f"backend={requested!r} is not possible here: {reason}; use backend='auto'{other}")


def _swiglu(projected: list[Tensor], inner: int) -> Tensor:
    """``silu(gate) * up`` of one fused product ``[P,2F]`` or two separate ones ``[P,F]``."""
    gate_PF, up_PF = projected if len(projected) == 2 else projected[0].split(inner, dim=-1)
    return F.silu(gate_PF) * up_PF


def _segments_grouped(x_PH: Tensor, stacked: ExpertViews, counts: list[int] | None, ends_E: Tensor) -> Tensor:
    inner = stacked.down_EHF.shape[-1]
    projected = [F.grouped_mm(x_PH, weight.transpose(1, 2), offs=ends_E) for weight in stacked.projections]
    return F.grouped_mm(_swiglu(projected, inner), stacked.down_EHF.transpose(1, 2), offs=ends_E)


def _segments_loop(x_PH: Tensor, stacked: ExpertViews, counts: list[int] | None, ends_E: Tensor) -> Tensor:
    inner = stacked.down_EHF.shape[-1]
    out_PH = torch.empty_like(x_PH)
    start = 0
    if counts is None:
        counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = x_PH[start : start + count]
        hidden = _swiglu([F.linear(rows, weight[expert]) for weight in stacked.projections], inner)
        out_PH[start : start + count] = F.linear(hidden, stacked.down_EHF[expert])
        start += count
    return out_PH


def worklist_for(
    backend: Backend, x_RH: Tensor, ids_RK: Tensor, stacked: ExpertViews, part: tuple[int, int] | None = None
) -> Worklist:
    """The worklist that `run_experts` takes with this backend; ``part`` as for `build_worklist`."""
    if backend == "triton":
        return device_worklist(x_RH.to(stacked.down_EHF.dtype), ids_RK, stacked)
    return build_worklist(ids_RK, stacked.down_EHF.shape[0], part)


def run_experts(
    x_RH: Tensor,
    ids_RK: Tensor,
    weights_RK: Tensor,
    stacked: ExpertViews,
    backend: Backend,
    worklist: Worklist | None = None,
    workspace: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Weighted sum of each row's experts: ``[R,H]``, in the order of `combine`.

    The kernels add the pairs of a row in slot order instead.

    Args:
        x_RH: rows.
        ids_RK: int64 expert ids, ``NO_EXPERT`` for empty pairs.
        weights_RK: fp32 combine weights, scaling included.
        stacked: the layer's expert weights.
        backend: as `pick_backend` returned it.
        worklist: of ``ids_RK`` by `worklist_for`, when the caller has it already.
        workspace: bytes that intermediates may take beside the pairs' outputs ``[P,H]``, as far as single experts and
            single rows fit; the same result. Reads the counts on the host; not differentiable. None = no limit.
        dtype: of the result: that of ``x_RH`` (None), or fp32 for a partial sum that is added to others (the
            kernels round it before).
    """
    dtype = dtype or x_RH.dtype
    if worklist is None:
        worklist = worklist_for(backend, x_RH, ids_RK, stacked)
    if worklist.tiles is not None:
        return run_device(x_RH.to(stacked.down_EHF.dtype), weights_RK, stacked, worklist).to(dtype)
    if backend == "reference":
        assert worklist.groups is not None
        return experts_reference(x_RH, ids_RK, weights_RK, stacked, worklist.groups).to(dtype)
    segments = _SEGMENTS[backend]
    if workspace is not None:
        return _in_runs(x_RH, weights_RK, stacked, segments, worklist, workspace, dtype)
    x_PH = x_RH[worklist.row_P]
    if x_PH.requires_grad:
        # The backward of a grouped product leaves the rows behind the last segment uninitialised. They belong to empty
        # pairs of real rows: this fill passes zeros back for them.
        behind_P = torch.arange(x_PH.shape[0], device=x_PH.device) >= worklist.ends_E[-1]
        x_PH = x_PH.masked_fill(behind_P.unsqueeze(-1), 0.0)
    pairs_PH = segments(x_PH, stacked, None, worklist.ends_E)
    return combine(pairs_PH, weights_RK, worklist, dtype)


_Segments = Callable[[Tensor, ExpertViews, "list[int] | None", Tensor], Tensor]
_SEGMENTS: dict[Backend, _Segments] = {"grouped": _segments_grouped, "loop": _segments_loop}


def segments_of(backend: Backend) -> _Segments:
    """``(x_PH, experts, counts or None, ends_E) -> pairs_PH`` of pairs in expert order, by `pick_backend`'s choice.

    Each expert's segment is the same product as in `run_experts`.
    """
    return _SEGMENTS[backend]


def _in_runs(
    x_RH: Tensor,
    weights_RK: Tensor,
    stacked: ExpertViews,
    segments: _Segments,
    worklist: Worklist,
    workspace: int,
    dtype: torch.dtype,
) -> Tensor:
    """`run_experts` within a budget: experts in runs, then rows in runs."""
    (num_rows, hidden), top_k, inner = x_RH.shape, weights_RK.shape[1], stacked.down_EHF.shape[-1]
    pairs_PH = x_RH.new_empty(worklist.row_P.numel(), hidden)
    # Of each pair: its input and output row, both projections, their activation and the product.
    per_pair = (2 * hidden + 4 * inner) * x_RH.element_size()
    start = 0
    for first, counts in _runs(worklist.counts_E.tolist(), workspace // per_pair):
        last, end = first + len(counts), start + sum(counts)
        ends_E = worklist.ends_E[first:last] - start
        x_PH = x_RH[worklist.row_P[start:end]]
        pairs_PH[start:end] = segments(x_PH, stacked.part(first, last), counts, ends_E)
        start = end
    # Of each pair: its gathered row, and that in fp32; of each row: its groups' sums, and two levels of them.
    per_row = hidden * (top_k * (x_RH.element_size() + 4) + 8 * GROUPS)
    step = max(workspace // per_row, 1)
    assert worklist.groups is not None
    out_RH = torch.empty_like(x_RH, dtype=dtype)
    for row in range(0, num_rows, step):
        part_R = slice(row, row + step)
        rank_RK = worklist.rank_RK[part_R]
        own_RK = torch.arange(rank_RK.numel(), device=rank_RK.device).view_as(rank_RK)
        groups = worklist.groups[0][part_R], worklist.groups[1]
        rows = replace(worklist, rank_RK=own_RK.masked_fill(rank_RK < 0, -1), groups=groups)
        out_RH[part_R] = combine(pairs_PH[rank_RK.clamp_min(0).reshape(-1)], weights_RK[part_R], rows, dtype)
    return out_RH


def _runs(counts: list[int], most: int) -> list[tuple[int, list[int]]]:
    """Consecutive experts with at most so many pairs together, or one alone: the first, and the counts of all."""
    runs: list[tuple[int, list[int]]] = []
    total = 0
    for expert, count in enumerate(counts):
        if runs and total + count <= most:
            runs[-1][1].append(count)
            total += count
        else:
            runs.append((expert, [count]))
            total = count
    return [(first, part) for first, part in runs if any(part)]
