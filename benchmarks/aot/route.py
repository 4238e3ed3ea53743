"""Ahead-of-time cases of routing: `epoch_moe.kernels.route`."""

from __future__ import annotations

import torch
from aot.compiler import AotCase

from epoch_moe.kernels.route import _constexprs, _num_warps, _route_kernel


def aot_cases() -> list[AotCase]:
    """The released models' routers, 4096 rows; with everything that a planned layer passes, and with nothing."""
    rows = 4096
    signature = {
        "logits": "*fp32",
        "bias": "*fp32",
        "support": "*u8",
        "group": "*i64",
        "restricted": "*u8",
        "count": "*i32",
        "ids": "*i64",
        "weights": "*fp32",
        "totals": "*fp32",
        "num_supports": "i32",
        "scaling": "fp32",
    }
    cases = []
    for model, num_experts, n_group, topk_group, softmax in (
        ("llada2 E256 K8 groups 4 of 8", 256, 8, 4, False),
        ("llada-moe E64 K8", 64, 1, 1, True),
    ):
        for planned in (False, True):
            constexprs = _constexprs(
                num_experts,
                8,
                n_group,
                topk_group,
                softmax,
                torch.bfloat16,
                has_bias=not softmax,
                has_support=planned,
                has_group=planned,
                has_restricted=planned,
                has_count=planned,
            )
            # Logits in; ids, weights and totals out; in a plan a support's row (from the cache: not counted), its
            # number and a flag as well.
            per_row = 4 * num_experts + 8 * (8 + 4) + 4 + (9 if planned else 0)
            cases.append(
                AotCase(
                    kernel="route",
                    shape=f"{model}, {'planned' if planned else 'free'}, {rows} rows",
                    function=_route_kernel,
                    signature=signature,
                    constexprs=constexprs,
                    num_warps=_num_warps(num_experts),
                    num_stages=1,
                    bytes_moved=rows * per_row,
                    not_divisible=frozenset({"num_supports"}),
                    wide_loads=num_experts == 256,
                )
            )
    return cases
