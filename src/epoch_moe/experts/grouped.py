"""Grouped routed experts: one pass over the pairs in expert order.

Shape suffixes: R rows, K top-k, P pairs, H hidden, F expert inner size, E experts.

Two ways to multiply the segments, chosen by `pick_backend`: `torch.nn.functional.grouped_mm` where it fits, and a
loop over the experts that have pairs elsewhere. Both read the weights of active experts only.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from epoch_moe.experts.reference import experts_reference
from epoch_moe.experts.weights import Stacked
from epoch_moe.freshlane.worklist import Worklist, build_worklist, combine

Backend = Literal["auto", "grouped", "loop", "reference"]
BACKENDS: tuple[Backend, ...] = ("auto", "grouped", "loop", "reference")


def supports_grouped_mm(stacked: Stacked) -> tuple[bool, str]:
    """Whether `torch.nn.functional.grouped_mm` takes these weights, and if not, why.

    Limits as measured on torch 2.13: fp32, bf16 and fp16 (bf16 alone on CUDA); row strides must be a multiple of
    16 bytes.
    """
    if not hasattr(F, "grouped_mm"):
        return False, f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    weight = stacked.gate_up_E2FH
    if weight.device.type == "cuda" and weight.dtype != torch.bfloat16:
        return False, f"grouped_mm on CUDA takes bfloat16, the experts are {weight.dtype}"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False, f"grouped_mm takes float32, bfloat16 or float16, the experts are {weight.dtype}"
    for name, size in (("hidden size", weight.shape[2]), ("expert inner size", stacked.down_EHF.shape[2])):
        if size * weight.element_size() % 16:
            return False, f"{name} {size} in {weight.dtype}: grouped_mm needs rows of a multiple of 16 bytes"
    return True, ""


def pick_backend(requested: Backend, stacked: Stacked) -> Backend:
    """The backend that will run: ``"auto"`` resolved, an impossible request refused with the reason."""
    if requested not in BACKENDS:
        raise ValueError(f"backend={requested!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    if requested in ("loop", "reference"):
        return requested
    fits, reason = supports_grouped_mm(stacked)
    if requested == "grouped" and not fits:
        raise ValueError(f"backend='grouped' is not possible here: {reason}; use backend='auto' or 'loop'")
    return "grouped" if fits else "loop"


def _segments_grouped(x_PH: Tensor, stacked: Stacked, worklist: Worklist) -> Tensor:
    inner = stacked.down_EHF.shape[-1]
    gate_up_P2F = F.grouped_mm(x_PH, stacked.gate_up_E2FH.transpose(1, 2), offs=worklist.offsets_E)
    hidden_PF = F.silu(gate_up_P2F[:, :inner]) * gate_up_P2F[:, inner:]
    return F.grouped_mm(hidden_PF, stacked.down_EHF.transpose(1, 2), offs=worklist.offsets_E)


def _segments_loop(x_PH: Tensor, stacked: Stacked, worklist: Worklist) -> Tensor:
    inner = stacked.down_EHF.shape[-1]
    out_PH = torch.empty_like(x_PH)
    start = 0
    for expert, count in enumerate(worklist.counts_E.tolist()):
        if not count:
            continue
        gate_up = F.linear(x_PH[start : start + count], stacked.gate_up_E2FH[expert])
        hidden = F.silu(gate_up[:, :inner]) * gate_up[:, inner:]
        out_PH[start : start + count] = F.linear(hidden, stacked.down_EHF[expert])
        start += count
    return out_PH


def run_experts(
    x_RH: Tensor,
    ids_RK: Tensor,
    weights_RK: Tensor,
    stacked: Stacked,
    backend: Backend,
    worklist: Worklist | None = None,
) -> Tensor:
    """Weighted sum of each row's experts: ``[R,H]`` in the dtype of ``x_RH``.

    Args:
        x_RH: rows.
        ids_RK: int64 expert ids, ``NO_EXPERT`` for empty pairs.
        weights_RK: fp32 combine weights, scaling included.
        stacked: the layer's expert weights.
        backend: as `pick_backend` returned it.
        worklist: of ``ids_RK``, when the caller has it already.
    """
    if backend == "reference":
        return experts_reference(x_RH, ids_RK, weights_RK, stacked)
    if worklist is None:
        worklist = build_worklist(ids_RK, stacked.down_EHF.shape[0])
    x_PH = x_RH[worklist.row_P]
    if x_PH.requires_grad:
        # The backward of a grouped product leaves the rows behind the last segment uninitialised. They belong to empty
        # pairs of real rows: this fill passes zeros back for them.
        behind_P = torch.arange(x_PH.shape[0], device=x_PH.device) >= worklist.offsets_E[-1]
        x_PH = x_PH.masked_fill(behind_P.unsqueeze(-1), 0.0)
    segments = _segments_grouped if backend == "grouped" else _segments_loop
    return combine(segments(x_PH, stacked, worklist), weights_RK, worklist, x_RH.dtype)
