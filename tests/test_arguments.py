"""Every wrong argument of a public function is refused with its name, and the model is as it was.

A row of the table: a call with one argument replaced, and the argument's kind. Each kind has its wrong values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import GOLDEN

import epoch_moe
from epoch_moe import functional, report
from epoch_moe.config import EpochConfig
from epoch_moe.decoding import BlockKVCache
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.context import BlockPlanContext, open_context
from epoch_moe.residency.config import ResidencyConfig

MASK_ID = 125
NAN = float("nan")
ODD = ["x", [1], object(), torch.ones(2)]
NUMBERS = [*ODD, True, NAN, float("inf"), -1, 2**2000]
WRONG: dict[str, list[Any]] = {
    "any whole or None": ["x", [1], object(), torch.ones(2), True, NAN, float("inf"), 2**2000, 1.5],
    "end ids or None": ["x", [None], object(), torch.ones(2), True, NAN, 1.5, -1, 10**9, [3, 2**70]],
    "flag or None": [*ODD, 1, "no"],
    "path": [[1], object(), torch.ones(2), True, 1],
    "any real": [*ODD, True, NAN, 2**2000, None],
    "budget": [*ODD, True, None, -1, 0, NAN, 1.5, "2 QB", "9" * 400 + "GB"],
    "whole": [*NUMBERS, 1.5, None],
    "whole or None": [*NUMBERS, 1.5],
    "real": [*NUMBERS, None],
    "real or None": NUMBERS,
    "flag": [*ODD, 1, "no", None],
    "word": [*ODD, True, 1, "no such word"],
    "object": [*ODD, True, 1],
    "required": [*ODD, True, 1, None],
    "ids": ["text", 3, None, b"ab", [None], [[3, 2**70]], [[3, [4]]], [[3, None]], [[3, 1.5]], [[True, False]],
            torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3, device="meta").long(),
            torch.ones(1, 3).long().to_sparse(), torch.ones(1, 1, 3).long(), [[3, 10**6]], [[3, -1]]],
    "mask": [[[1] * 3], 1, torch.full((1, 3), NAN), torch.ones(1, 2), torch.full((1, 3), 2),
             torch.tensor([[0.0, -9, -9]]), torch.ones(1, 3, device="meta"), torch.ones(1, 3).to_sparse()],
    "id or None": [*ODD, True, NAN, 1.5, -1, 10**9, 2**70],
    "tensor": ["x", [[1]], 3, None, torch.ones(3), torch.ones(7, 5, 3), torch.ones(7, 5, dtype=torch.complex64),
               torch.ones(7, 5, device="meta"), torch.ones(7, 5).to_sparse()],
    "bools or None": ["x", [[True] * 3], 3, torch.ones(1, 3), torch.ones(1, 2, dtype=torch.bool),
                      torch.ones(1, 3, dtype=torch.bool, device="meta"), torch.ones(1, 3).bool().to_sparse()],
}  # fmt: skip
IDS = torch.tensor([[1, 2, 3]])
SPEC = functional.RouterSpec(kind="sigmoid_group", num_experts=8, top_k=2, n_group=2, topk_group=1)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    canvas = LLaDAMoEModelLM.from_pretrained(GOLDEN / "llada_moe", dtype=torch.float32).eval()
    blocks = LLaDA2MoeModelLM.from_pretrained(GOLDEN / "llada2", dtype=torch.float32).eval()
    epoch_moe.patch(blocks)
    return {"blocks": blocks, "canvas": canvas}


def in_block(models: dict[str, Any], **arguments: Any) -> None:
    context = BlockPlanContext(models["blocks"]._epoch_moe, EpochConfig())
    with context.block(batch=1, window=3), context.iteration(**{"ids_BS": IDS, "mask_id": MASK_ID, **arguments}):
        pass


def prefill(models: dict[str, Any], **arguments: Any) -> None:
    with BlockPlanContext(models["blocks"]._epoch_moe, None).prefill(**{"ids_BS": IDS, **arguments}):
        pass


def context_of(models: dict[str, Any]) -> BlockPlanContext:
    return BlockPlanContext(models["blocks"]._epoch_moe, None)


def store(**arguments: Any) -> functional.RowStore:
    sizes = {"num_layers": 1, "max_slots": 1, "window": 7, "hidden_size": 5, "dtype": torch.float32}
    return functional.RowStore(**{"config": EpochConfig(), "router": SPEC, **sizes, **arguments})


def fresh(own: functional.RowStore, **arguments: Any) -> functional.FreshRows:
    place = torch.arange(7)
    keys = functional.RowKeys(place * 0, place * 0, place * 0, place)
    return functional.fresh_rows(own, **{"keys": keys, "ids_T": place, "live_T": place > 3, **arguments})


def route_rows(**arguments: Any) -> None:
    own = store()
    given = {"store": own, "layer": 0, "fresh": fresh(own), "logits_RE": torch.randn(7, 8)}
    functional.route_rows(**{**given, **arguments})


def restore_rows(**arguments: Any) -> None:
    own = store()
    functional.restore_rows(**{"store": own, "layer": 0, "fresh": fresh(own), "y_RH": torch.randn(7, 5), **arguments})


def moe(**arguments: Any) -> None:
    ids = torch.zeros(7, 2, dtype=torch.long)
    weights = {"gate_up": torch.randn(8, 6, 5), "down": torch.randn(8, 5, 3)}
    rows = {"x_TH": torch.randn(7, 5), "topk_ids_TK": ids, "topk_weights_TK": torch.rand(7, 2)}
    functional.moe_forward(**{**rows, **weights, **arguments})


def route(**arguments: Any) -> None:
    inputs = {"x_TH": torch.randn(7, 5), "weight_EH": torch.randn(8, 5), "bias_E": None, "spec": SPEC}
    functional.route(**{**inputs, **arguments})


def support(**arguments: Any) -> None:
    scores = torch.rand(1, 7, 8)
    inputs = {"selection_BWE": scores, "combine_BWE": scores, "vote_BW": torch.ones(1, 7).bool(), "spec": SPEC}
    functional.compile_support(**{**inputs, "coverage": 0.9, "candidate_factor": 2, **arguments})


def blocks(models: dict[str, Any], **arguments: Any) -> None:
    epoch_moe.generate(models["blocks"], **{"input_ids": IDS, "gen_length": 8, "block_length": 8, **arguments})


def canvas(models: dict[str, Any], **arguments: Any) -> None:
    sizes = {"gen_length": 8, "block_length": 8, "steps": 8}
    epoch_moe.generate_semi_autoregressive(models["canvas"], **{"input_ids": IDS, **sizes, **arguments})


Call = Callable[..., Any]
LOOPS = {
    "input_ids": "ids", "attention_mask": "mask", "gen_length": "whole", "block_length": "whole", "steps": "whole",
    "temperature": "real", "eos_early_stop": "flag", "eos_token_id": "end ids or None", "mask_token_id": "id or None",
    "plan": "object", "streamer": "object", "progress": "flag", "generator": "object", "record": "flag",
}  # fmt: skip
TABLE: dict[str, tuple[Call, dict[str, str]]] = {
    "generate": (blocks, LOOPS | {
        "threshold": "real or None", "editing_threshold": "real or None", "max_post_steps": "whole",
        "num_to_transfer": "whole", "top_k": "whole or None", "top_p": "real or None", "minimal_topk": "whole",
        "use_cache": "flag", "prefill_chunk": "whole",
    }),
    "generate_semi_autoregressive": (canvas, LOOPS | {"cfg_scale": "real", "remasking": "word"}),
    "model of generate": (lambda models, model: epoch_moe.generate(model, IDS), {"model": "required"}),
    "patch": (lambda models, **a: epoch_moe.patch(**{"model": models["blocks"], **a}), {
        "model": "required", "config": "object", "strict": "flag", "mask_token_id": "id or None",
        "block_length": "whole or None", "editing": "flag or None", "ep_layout": "word", "ep_capacity": "whole or None",
        "residency": "object",
    }),
    "patched": (lambda models, **a: epoch_moe.patched(**{"model": models["blocks"], **a}).__enter__(), {
        "model": "required", "config": "object", "mask_token_id": "id or None", "block_length": "whole or None",
    }),
    "unpatch": (lambda models, model: epoch_moe.unpatch(model), {"model": "required"}),
    "plan_report": (lambda models, **a: epoch_moe.plan_report(**{"model": models["blocks"], **a}),
                    {"model": "required", "reset": "flag"}),
    "residency_report": (lambda models, **a: epoch_moe.residency_report(**{"model": models["blocks"], **a}),
                         {"model": "required", "reset": "flag"}),
    "load_model": (lambda models, **a: epoch_moe.load_model(**{"path_or_id": "tiny-llada2", **a}), {
        "path_or_id": "path", "dtype": "word", "device": "word", "device_map": "object", "attn_implementation": "word",
        "revision": "path",
        "local_files_only": "flag", "ep_layout": "word", "ep_capacity": "whole or None", "residency": "object",
    }),
    "open_context": (lambda models, **a: open_context(**{"model": models["blocks"], **a}),
                     {"model": "required", "plan": "object", "record": "flag"}),
    "in_step": (lambda models, model: epoch_moe.in_step(model).__enter__(), {"model": "required"}),
    "BlockPlanContext": (lambda models, **a: BlockPlanContext(
        **{"model": models["blocks"], "config": None, **a}),
        {"model": "required", "config": "object", "record": "flag"}),
    "begin_block": (lambda models, **a: context_of(models).begin_block(**{"batch": 1, "window": 3, **a}),
                    {"batch": "whole", "window": "whole", "prefix": "whole", "future": "whole",
                     "prefix_constant": "flag", "only_live": "flag"}),
    "iteration": (in_block, {
        "ids_BS": "tensor", "mask_id": "any whole or None", "valid_BS": "bools or None", "live_BN": "bools or None",
        "changed_BN": "bools or None", "lead": "whole", "capacity": "whole or None",
    }),
    "prefill": (prefill, {"ids_BS": "required", "valid_BS": "bools or None"}),
    "end_iteration": (lambda models, **a: context_of(models).end_iteration(**a), {"confidence_BS": "object"}),
    "count_lm_head": (lambda models, rows: context_of(models).count_lm_head(rows), {"rows": "whole"}),
    "count_attention": (lambda models, pairs: context_of(models).count_attention(pairs), {"pairs": "whole"}),
    "EpochConfig": (lambda models, **a: EpochConfig(**a), {
        "coverage": "real or None", "candidate_factor": "whole", "least_saving": "real",
        "max_support": "whole or None", "on_miss": "word", "restrict_new": "flag", "join": "flag",
        "support_scope": "word", "coverage_floor": "real or None", "recompile": "word",
        "refresh_interval": "whole or None", "commit": "word", "future_rows": "word", "backend": "word",
    }),
    "EpochConfig.preset": (lambda models, preset: EpochConfig.preset(preset), {"preset": "required"}),
    "ResidencyConfig": (lambda models, **a: ResidencyConfig(**a), {
        "budget": "budget", "policy": "word", "miss": "word", "tier": "word", "drop_cache": "flag",
    }),
    "RouterSpec": (lambda models, **a: functional.RouterSpec(
        **{"kind": "sigmoid_group", "num_experts": 8, "top_k": 2, **a}), {
        "kind": "word", "num_experts": "whole", "top_k": "whole", "n_group": "whole", "topk_group": "whole",
        "routed_scaling_factor": "any real",
    }),
    "RowStore": (lambda models, **a: store(**a), {
        "config": "required", "router": "required", "num_layers": "whole", "max_slots": "whole", "window": "whole",
        "hidden_size": "whole", "dtype": "required", "bytes_per_expert": "whole",
    }),
    "fresh_rows": (lambda models, **a: fresh(store(), **a),
                   {"keys": "required", "ids_T": "tensor", "live_T": "tensor", "mask_id": "any whole or None"}),
    "route_rows": (lambda models, **a: route_rows(**a),
                   {"store": "required", "layer": "whole", "fresh": "required", "logits_RE": "tensor"}),
    "restore_rows": (lambda models, **a: restore_rows(**a),
                     {"store": "required", "layer": "whole", "fresh": "required", "y_RH": "tensor"}),
    "moe_forward": (lambda models, **a: moe(**a), {
        "x_TH": "tensor", "topk_ids_TK": "tensor", "topk_weights_TK": "tensor", "gate_up": "tensor", "down": "tensor",
        "expert_map": "object", "expert_range": "object", "out": "object", "workspace": "whole or None",
        "backend": "word",
    }),
    "route": (lambda models, **a: route(**a),
              {"x_TH": "tensor", "weight_EH": "tensor", "spec": "required", "batch": "whole", "support": "object"}),
    "compile_support": (lambda models, **a: support(**a), {
        "selection_BWE": "tensor", "combine_BWE": "tensor", "vote_BW": "tensor", "spec": "required", "coverage": "real",
        "candidate_factor": "whole",
    }),
    "BlockKVCache": (lambda models, **a: BlockKVCache(**{"num_layers": 1, "max_length": 8, **a}),
                     {"num_layers": "whole", "max_length": "whole"}),
    "BlockKVCache.commit": (lambda models, rows: BlockKVCache(1, 8).commit(rows), {"rows": "whole"}),
    "flops": (lambda models, **a: report.flops(**{"config": models["blocks"].config, "work": None, **a}),
              {"work": "required"}),
    "work_summary": (lambda models, work: report.work_summary(models["blocks"].config, work), {"work": "required"}),
    "work_table": (lambda models, works: report.work_table(models["blocks"].config, works), {"works": "required"}),
    "plan_figure": (lambda models, counters: report.plan_figure(models["blocks"].config, counters),
                    {"counters": "required"}),
    "comparison_table": (lambda models, result: report.comparison_table(result), {"result": "required"}),
}  # fmt: skip
OTHER_WORDS = {"input_ids": "prompt", "config": "preset", "gate_up": "gate and up", "down": "gate and up"}
"""What a message may call an argument instead."""


@torch.no_grad()
@pytest.mark.parametrize("function", list(TABLE))
def test_wrong_arguments_are_refused_by_name(models: dict[str, Any], function: str) -> None:
    call, arguments = TABLE[function]
    state = models["blocks"]._epoch_moe
    config = state.config
    faults = []
    for name, kind in arguments.items():
        for value in WRONG[kind]:
            try:
                call(models, **{name: value})
            except (ValueError, TypeError) as error:
                if not any(word in str(error) for word in (name, OTHER_WORDS.get(name, name))):
                    faults.append(f"{name}={value!r:.60}: no name in {str(error)[:120]}")
            except Exception as error:
                faults.append(f"{name}={value!r:.60}: {type(error).__name__}: {str(error)[:120]}")
            else:
                faults.append(f"{name}={value!r:.60}: taken")
    assert not faults, "\n".join(faults)
    assert models["blocks"]._epoch_moe is state and state.config is config and state.slot.active is None
    state.slot.check_idle("a test")


def test_a_block_is_no_longer_than_the_models_context(models: dict[str, Any]) -> None:
    for length in (513, 10**9):
        with pytest.raises(ValueError, match=rf"block_length={length}: .*max_position_embeddings=512"):
            blocks(models, block_length=length)
    with pytest.raises(ValueError, match=r"block_length=513"):
        epoch_moe.patch(models["blocks"], block_length=513)
