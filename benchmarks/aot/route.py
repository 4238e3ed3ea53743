"""Ahead-of-time cases of routing: `epoch_moe.kernels.route`."""

from __future__ import annotations

from aot.compiler import AotCase

from epoch_moe.kernels.route import _route_kernel
from epoch_moe.kernels.selection import router_constexprs, row_warps


def aot_cases() -> list[AotCase]:
    """The released models' routers, 4096 rows; with everything that a planned layer passes, and with nothing."""
    rows = 4096
    plan = {"support": "*u8", "group": "*i64", "restricted": "*u8", "count": "*i32"}
    signature = {
        "logits": "*fp32",
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
            passed = ({} if softmax else {"bias": "*fp32"}) | (plan if planned else {})
            constexprs = router_constexprs(num_experts, 8, n_group, topk_group)
            constexprs |= {"K_P": 8, "SOFTMAX": softmax, "ROUND": "bf16" if softmax else "none"}
            constexprs |= {name: None for name in ("bias", *plan) if name not in passed}
            if not planned:
                constexprs["num_supports"] = 1
            # Logits in; ids, weights and totals out; in a plan a support's row (from the cache: not counted), its
            # number and a flag as well.
            per_row = 4 * num_experts + 8 * (8 + 4) + 4 + (9 if planned else 0)
            cases.append(
                AotCase(
                    kernel="route",
                    shape=f"{model}, {'planned' if planned else 'free'}, {rows} rows",
                    function=_route_kernel,
                    signature={k: v for k, v in (signature | passed).items() if k not in constexprs},
                    constexprs=constexprs,
                    num_warps=row_warps(num_experts),
                    num_stages=1,
                    bytes_moved=rows * per_row,
                    not_divisible=frozenset({"num_supports"} if planned else ()),
                    wide_loads=num_experts == 256,
                )
            )
    return cases
