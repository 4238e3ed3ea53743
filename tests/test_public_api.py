"""The public names, and what importing them costs."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import epoch_moe

NAMES = [
    "BlockPlanContext",
    "BlockSpec",
    "EpochConfig",
    "EpochMoEBlock",
    "FreshLaneDispatcher",
    "PatchReport",
    "ResidencyConfig",
    "RouterSpec",
    "__version__",
    "following",
    "generate",
    "generate_semi_autoregressive",
    "in_step",
    "load_model",
    "open_context",
    "patch",
    "patched",
    "plan_report",
    "register_auto_classes",
    "residency_report",
    "unpatch",
]


def test_the_exported_names_are_these() -> None:
    assert sorted(epoch_moe.__all__) == NAMES
    assert set(NAMES) <= set(dir(epoch_moe))
    for name in NAMES:
        value = getattr(epoch_moe, name)
        assert name == "__version__" or value.__doc__
    with pytest.raises(AttributeError, match="no attribute 'pach'"):
        epoch_moe.pach  # noqa: B018


def test_signatures_are_these() -> None:
    def parameters(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)  # type: ignore[arg-type]

    loops = ["mask_token_id", "block_length", "editing"]
    ranks = ["ep_group", "ep_layout", "ep_capacity"]
    assert parameters(epoch_moe.patch) == ["model", "config", "strict", *loops, *ranks, "residency"]
    assert parameters(epoch_moe.patched) == ["model", "config", "strict", *loops]
    assert parameters(epoch_moe.following) == ["model", "block_length", "editing", "mask_token_id"]
    assert parameters(epoch_moe.unpatch) == ["model"]
    assert parameters(epoch_moe.BlockPlanContext.begin_block) == [
        "self", "batch", "window", "prefix", "prefix_constant", "future", "only_live",
    ]
    assert parameters(epoch_moe.BlockPlanContext.iteration) == [
        "self", "ids_BS", "mask_id", "valid_BS", "lead", "live_BN", "changed_BN", "capacity",
    ]
    assert parameters(epoch_moe.ResidencyConfig) == [
        "budget", "policy", "source", "spill_dir", "miss", "tier", "drop_cache",
    ]
    assert parameters(epoch_moe.EpochConfig) == [
        "coverage", "candidate_factor", "least_saving", "max_support", "on_miss", "restrict_new", "join",
        "support_scope", "coverage_floor", "recompile", "refresh_interval", "drift", "live_drift", "commit",
        "future_rows", "backend", "checkpoint",
    ]


def test_the_functional_package_is_this() -> None:
    functional = importlib.import_module("epoch_moe.functional")
    assert functional.__all__ == [
        "NO_EXPERT", "NO_SLOT", "NO_STATE", "ExpertViews", "FreshRows", "RouterSpec", "Routing", "RowKeys", "RowMasks",
        "RowStore", "compile_support", "expert_views", "fresh_rows", "layer_rows", "moe_forward", "restore_rows",
        "route", "route_rows", "router_logits", "router_spec", "supports",
    ]

    def parameters(name: str) -> list[str]:
        return list(inspect.signature(getattr(functional, name)).parameters)

    assert parameters("moe_forward") == [
        "x_TH", "topk_ids_TK", "topk_weights_TK", "gate_up", "down", "expert_range", "expert_map", "out", "workspace",
        "backend",
    ]
    assert parameters("fresh_rows") == ["store", "keys", "ids_T", "live_T", "mask_id", "changed_T"]
    assert parameters("layer_rows") == ["store", "layer", "fresh", "x_TH"]
    assert parameters("route_rows") == ["store", "layer", "fresh", "logits_RE", "bias_E"]
    assert parameters("restore_rows") == ["store", "layer", "fresh", "y_RH", "out"]
    assert parameters("RowKeys") == ["slot_T", "generation_T", "block_T", "position_T"]


HUGGING_FACE = ["transformers", "accelerate", "tokenizers"]
STEPS = [
    ("import epoch_moe, epoch_moe.models", ["torch", *HUGGING_FACE]),
    ("import epoch_moe.block, epoch_moe.kernels.launch", ["triton", *HUGGING_FACE]),
    ("import epoch_moe.functional", HUGGING_FACE),
    (
        "from epoch_moe import EpochConfig, EpochMoEBlock, BlockSpec, RouterSpec, BlockPlanContext, patch, unpatch,"
        " patched, PatchReport, ResidencyConfig, residency_report, FreshLaneDispatcher",
        ["transformers"],
    ),
    ("import epoch_moe.report", ["matplotlib"]),
]
"""Statements, run one after the other in one interpreter, and what is not loaded after each."""


def test_imports_load_no_more_than_they_need() -> None:
    code = "import sys\n" + "\n".join(f"{statement}\nprint(*sys.modules)" for statement, _ in STEPS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    for (statement, absent), loaded in zip(STEPS, done.stdout.splitlines(), strict=True):
        assert set(loaded.split()).isdisjoint(absent), statement
