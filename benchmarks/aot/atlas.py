"""Ahead-of-time cases of ATLAS: `epoch_moe.kernels.atlas`."""

from __future__ import annotations

import triton
from aot.compiler import AotCase

from epoch_moe.kernels.atlas import _config, _support_constexprs
from epoch_moe.kernels.atlas_steps import feasible_kernel, rows_kernel, support_kernel
from epoch_moe.kernels.selection import router_constexprs, row_warps


def aot_cases() -> list[AotCase]:
    """The released models' routers: 64 sequences of one block of 32 rows each; the second step for one batch, too.

    What must be moved is counted once: the two inputs of the rows, what one step leaves for the next, the supports.
    A round of the filling reads its rows again; that is not in it, as it depends on the data how many there are.
    """
    flags = {"selection": "*fp32", "vote": "*u8", "only": "*u8"}
    inputs = flags | {"combine": "*fp32", "marks": "*u8", "used": "*u8"}
    between = {"ids": "*i32", "weights": "*fp32", "dense": "*fp32", "target": "*fp32"}
    natural, outs = {"natural": "*i32"}, {"member": "*u8", "out": "*u8", "width": "i32"}
    rows_signature = inputs | natural | between | {"width": "i32", "coverage": "fp32"}
    by_expert = {"marks": "*u8", "only": "*u8", "key": "*i32", "held": "*fp32"}
    support_signature = by_expert | between | outs | {"coverage": "fp32"}
    supports, width, top_k = 64, 32, 8
    rows, candidates = supports * width, 4 * top_k
    cases = []
    for model, num_experts, n_group, topk_group in (
        ("llada2 E256 K8 groups 4 of 8", 256, 8, 4),
        ("llada-moe E64 K8", 64, 1, 1),
    ):
        router = router_constexprs(num_experts, top_k, n_group, topk_group)
        left = rows * (8 * candidates + 4 * num_experts + 4)  # ids, weights, dense, target
        held = supports * num_experts

        def case(
            kernel: str,
            function: object,
            signature: dict[str, str],
            constexprs: dict[str, object],
            num_warps: int,
            bytes_moved: int,
            wide_loads: bool = num_experts == 256,
            shape: str = f"{model}, {supports} x {width} rows",
        ) -> AotCase:
            return AotCase(
                kernel, shape, function, signature, constexprs, num_warps, 1, bytes_moved, wide_loads=wide_loads
            )

        cases += [
            case(
                "atlas_rows",
                rows_kernel,
                rows_signature,
                router | {"C": candidates, "C_P": triton.next_power_of_2(candidates), "SURE": 1, "UNION": False},
                row_warps(num_experts, candidates),
                rows * (8 * num_experts + 1 + 4 * top_k) + left,
            ),
            case(
                "atlas_union",
                rows_kernel,
                rows_signature,
                router | {"C": top_k, "C_P": triton.next_power_of_2(top_k), "SURE": top_k, "UNION": True},
                row_warps(num_experts, top_k),
                rows * (4 * num_experts + 1) + 2 * held,
            ),
            case(
                "atlas_support",
                support_kernel,
                support_signature,
                _support_constexprs(num_experts, top_k, candidates, width),
                _config(width)["num_warps"],
                left + 3 * held,
                True,
            ),
            case(
                "atlas_support",
                support_kernel,
                support_signature,
                _support_constexprs(num_experts, top_k, candidates, rows),
                _config(rows)["num_warps"],
                left + 3 * num_experts,
                True,
                f"{model}, 1 x {rows} rows",
            ),
            case(
                "atlas_feasible",
                feasible_kernel,
                flags | natural | outs,
                router | {"K_P": triton.next_power_of_2(top_k)},
                row_warps(num_experts, 1),
                rows * ((4 * num_experts if n_group > 1 else 0) + 1) + held,
            ),
        ]
    return cases
