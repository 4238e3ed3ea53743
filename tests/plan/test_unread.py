"""Rows of the last MoE layer whose outputs nobody reads: they are not computed, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from decode import MASK_ID, make_decode, moe_blocks, patched_model
from helpers import relative_error
from torch import Tensor

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.plan.context import BlockPlanContext

DRIFT = EpochConfig(coverage=None, refresh_interval=None, drift=0.9, live_drift=0.9, commit="drift")
CONFIGS = {
    "exact": EpochConfig.exact(),
    "default": EpochConfig(),
    "join": EpochConfig(join=True),
    "drift": DRIFT,
    "edits": EpochConfig(coverage=None, live_drift=0.5),
}


@torch.no_grad()
@pytest.mark.parametrize(("name", "backend"), [*((name, "loop") for name in CONFIGS), ("drift", "triton")])
def test_live_rows_come_out_the_same(name: str, backend: str) -> None:
    """Two blocks; the last layer's memory holds NaN wherever it was not written to."""
    model, config = patched_model(), CONFIGS[name].replace(backend=backend)
    decodes = [make_decode(seed, forwards=4 if backend == "loop" else 2, block=4) for seed in (1, 2)]
    layers, top_k = len(moe_blocks(model)), moe_blocks(model)[0].spec.router.top_k
    results, rows = [], []
    for only_live in (False, True):
        context, logits = BlockPlanContext(model, config), list[Tensor]()
        for decode in decodes:
            with context.block(batch=2, window=4, only_live=only_live):
                for number, inputs in enumerate(decode.forwards):
                    changing = torch.zeros_like(inputs.ids_BS, dtype=torch.bool)[:, inputs.lead :]
                    changing[:, number % 4] = name == "edits"
                    live_BN = (inputs.ids_BS[:, inputs.lead :] == MASK_ID) | changing
                    with context.iteration(
                        inputs.ids_BS, mask_id=MASK_ID, valid_BS=inputs.valid_BS, lead=inputs.lead, live_BN=live_BN
                    ):
                        out_BSV = inputs.run(model)
                    _poison(context, first=number == 0)
                    read_BN = live_BN & inputs.valid_BS[:, inputs.lead :]
                    logits.append(out_BSV[:, inputs.lead :][read_BN])
        results.append(logits)
        rows.append([layer.rows for layer in context.counters.read().per_layer])
    for want, got in zip(*results, strict=True):
        assert want.shape == got.shape and (not want.numel() or relative_error(got, want) < 1e-5)
    every, read = rows
    assert every[:-1] == read[:-1] and read[-1] < every[-1]
    if name == "exact":
        assert read[-1] == sum(map(len, results[1])) and len(set(every)) == 1
    assert layers > 1 and top_k > 1


def _poison(context: BlockPlanContext, first: bool) -> None:
    state = context.open_plan().layers[-1]
    if first and state.inputs_M1H is None and state.cache_MH is not None and context.config.live_drift is None:
        state.cache_MH.fill_(float("nan"))  # nothing is ever read of it


@pytest.mark.parametrize("use_cache", [True, False])
def test_our_loops_leave_them_out(use_cache: bool) -> None:
    model = patched_model()
    prompts = [torch.arange(3, 12), torch.arange(20, 34)]
    options = {"gen_length": 16, "block_length": 8, "steps": 8, "eos_token_id": [], "use_cache": use_cache}
    out, dense = (epoch_moe.generate(model, prompts, plan=plan, **options) for plan in (EpochConfig.exact(), None))
    assert [a.tolist() for a in out.answers] == [a.tolist() for a in dense.answers]
    work, whole = out.counters.read(), dense.counters.read()
    assert [layer.rows for layer in work.per_layer[:-1]] == [layer.rows for layer in whole.per_layer[:-1]]
    assert work.per_layer[-1].rows == work.lm_head_rows < whole.per_layer[-1].rows
    assert work.per_layer[-1].pairs == work.lm_head_rows * moe_blocks(model)[0].spec.router.top_k


def test_a_layer_behind_the_experts_reads_every_row() -> None:
    model = patched_model()
    parts = epoch_moe.decoding.parts.model_parts(model)
    assert parts.ends_with_experts
    blocks = moe_blocks(model)
    model.model.layers[-1].mlp = blocks[-1].original
    assert not parts.ends_with_experts
