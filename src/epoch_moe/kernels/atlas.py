"""ATLAS on the device: `epoch_moe.plan.atlas.compile_support` without a host loop.

Shape suffixes: G supports, W voting rows per support, E experts, K top-k, C candidates per row, NG expert groups,
GS experts of a group, R rows of a chunk.

Three launches, whatever the supports come to:

1. `rows_kernel`, one program per row: natural top-k, candidates, target. The rows' best experts are marked (for
   coverage 1.0 their whole top-k, and that is all there is to do without a largest size).
2. `support_kernel`, one program per support: experts by natural weight until enough natural weight is inside, then the
   filling of single rows. Programs do not talk to each other, so nothing has to be resident at the same time.
3. `feasible_kernel`, one program per row: a row that finds fewer than K experts brings its natural ones.

Marks are bytes that any number of programs set to 1, so their order does not matter; sums run in a fixed order. Ties go
to the lowest id everywhere. ``torch.topk`` in the reference promises no order among equal selection scores.

Scratch memory is about that of one of the inputs. docs/kernels.md says what a round of the filling reads.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from epoch_moe.checks import tensor
from epoch_moe.kernels.atlas_steps import feasible_kernel, rows_kernel, support_kernel
from epoch_moe.kernels.launch import require_triton
from epoch_moe.kernels.selection import limiting_groups, router_constexprs, row_warps
from epoch_moe.routing import RouterSpec, check_size, settle


def _config(width: int) -> dict[str, int]:
    """Rows of a chunk and warps of `support_kernel`: small chunks where supports are many and their rows few."""
    return {"ROWS": 16, "num_warps": 4} if width <= 64 else {"ROWS": 64, "num_warps": 8}


def _support_constexprs(num_experts: int, top_k: int, candidates: int, width: int) -> dict[str, object]:
    return {
        "E": num_experts,
        "K": top_k,
        "C": candidates,
        "E_P": triton.next_power_of_2(num_experts),
        "C_P": triton.next_power_of_2(candidates),
        "ROWS": _config(width)["ROWS"],
    }


@torch.library.custom_op("epoch_moe::compile_support", mutates_args=())
def _compile(
    selection_GWE: Tensor,
    combine_GWE: Tensor,
    vote_GW: Tensor,
    only_G: Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    coverage: float,
    candidates: int,
    max_support: int | None,
    least_saving: float,
) -> Tensor:
    supports, width, num_experts = selection_GWE.shape
    device = selection_GWE.device
    selection, combine = selection_GWE.contiguous(), combine_GWE.contiguous()
    vote = vote_GW.contiguous().view(torch.uint8)
    only = None if only_G is None else only_G.contiguous().view(torch.uint8)

    def zeros(dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(supports, num_experts, dtype=dtype, device=device)

    marks, used, out, held = zeros(), zeros(), zeros(), zeros(torch.float32)
    union = coverage >= 1.0 and max_support is None
    rows = 0 if union else supports * width

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    natural, ids = scratch(rows, top_k), scratch(rows, candidates)
    weights, dense = scratch(rows, candidates, dtype=torch.float32), scratch(rows, num_experts, dtype=torch.float32)
    target = scratch(rows, dtype=torch.float32)
    with torch.cuda.device_of(selection):
        if supports * width:
            router = router_constexprs(num_experts, top_k, n_group, topk_group)
            rows_kernel[(supports * width,)](
                selection,
                combine,
                vote,
                only,
                marks,
                used,
                natural,
                ids,
                weights,
                dense,
                target,
                width,
                coverage,
                C=candidates,
                C_P=triton.next_power_of_2(candidates),
                SURE=top_k if coverage >= 1.0 else 1,
                UNION=union,
                **router,
                num_warps=row_warps(num_experts, candidates),
                num_stages=1,
            )
            if not union:
                key = scratch(supports, num_experts)
                member = scratch(supports, num_experts, dtype=torch.uint8)
                support_kernel[(supports,)](
                    marks,
                    only,
                    ids,
                    weights,
                    dense,
                    target,
                    key,
                    held,
                    member,
                    out,
                    width,
                    coverage,
                    **_support_constexprs(num_experts, top_k, candidates, width),
                    num_warps=_config(width)["num_warps"],
                    num_stages=1,
                )
                feasible_kernel[(supports * width,)](
                    selection,
                    vote,
                    only,
                    natural,
                    member,
                    out,
                    width,
                    K_P=triton.next_power_of_2(top_k),
                    **router,
                    num_warps=row_warps(num_experts, 1),
                    num_stages=1,
                )
    support_GE, used_GE = (t.view(torch.bool) for t in (marks if union else out, used))
    support_GE = settle(support_GE, used_GE, held, coverage, max_support, least_saving)
    support_GE = support_GE | ~vote_GW.any(dim=1, keepdim=True)
    return support_GE if only_G is None else support_GE & only_G.unsqueeze(1)


@_compile.register_fake
def _(selection_GWE: Tensor, *_: object) -> Tensor:
    return selection_GWE.new_empty(selection_GWE.shape[0], selection_GWE.shape[2], dtype=torch.bool)


def compile_support_device(
    selection_GWE: Tensor,
    combine_GWE: Tensor,
    vote_GW: Tensor,
    spec: RouterSpec,
    coverage: float,
    candidate_factor: int,
    only_G: Tensor | None = None,
    *,
    max_support: int | None = None,
    least_saving: float = 0.0,
) -> Tensor:
    """`epoch_moe.plan.atlas.compile_support` on the device: bool ``[G,E]``.

    Args:
        selection_GWE: fp32 selection scores of the voting rows.
        combine_GWE: fp32 combine scores.
        vote_GW: bool, False for rows that do not vote; what their scores hold does not matter. A support without a
            voter holds all experts.
        spec: the router.
        coverage, candidate_factor, max_support, least_saving: as there.
        only_G: bool, supports to compile; the others come out empty and cost next to nothing. None: all.

    The set is the reference's, except where that one is open too: sums run in another order than torch's, so two
    experts whose total weights or gains agree to the last bits of fp32, or a row whose coverage equals its target to
    these, can be decided otherwise. Where sums are equal exactly the lowest id is taken, in both.

    Raises:
        ValueError: a shape or dtype that does not fit, or a device without Triton.
    """
    require_triton(selection_GWE.device)
    tensor("selection_GWE", selection_GWE, torch.float32, ("supports", "rows", spec.num_experts))
    supports, width, _ = selection_GWE.shape
    tensor("combine_GWE", combine_GWE, torch.float32, selection_GWE.shape)
    tensor("vote_GW", vote_GW, torch.bool, (supports, width))
    if only_G is not None:
        tensor("only_G", only_G, torch.bool, (supports,))
    if candidate_factor < 1:
        raise ValueError(f"candidate_factor={candidate_factor} must be at least 1")
    usable = spec.topk_group * spec.group_size if spec.kind == "sigmoid_group" else spec.num_experts
    check_size(max_support, spec)
    support_GE: Tensor = _compile(
        selection_GWE,
        combine_GWE,
        vote_GW,
        only_G,
        spec.top_k,
        *limiting_groups(spec),
        float(coverage),
        spec.top_k if coverage >= 1.0 else min(candidate_factor * spec.top_k, usable),
        max_support,
        float(least_saving),
    )
    return support_GE
