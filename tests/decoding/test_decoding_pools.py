"""LLaDA2.2's pools of experts through `generate`: batches, padding, cache and plan leave each prompt its own tokens."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from reference_loop import reference_generate

from epoch_moe import EpochConfig, patched
from epoch_moe.decoding import generate

ARGUMENTS = {"gen_length": 19, "block_length": 8, "steps": 8, "threshold": 0.0118}


@pytest.fixture
def model(load_checkpoint):
    return load_checkpoint("llada2_2_routing")


@pytest.fixture
def prompts(prompt):
    return [prompt(length, seed=number) for number, length in enumerate([3, 8, 21, 9, 40])]


@pytest.mark.parametrize(("config", "use_cache"), [(None, True), (None, False), ("dense", True), ("exact", False)])
def test_pools_in_batches_equal_single_runs(model, prompts, use_cache, config):
    expected = [reference_generate(model, ids, **ARGUMENTS).answer for ids in prompts]
    with nullcontext() if config is None else patched(model, config):
        out = generate(model, prompts, use_cache=use_cache, **ARGUMENTS)
        chunked = generate(model, prompts, use_cache=use_cache, prefill_chunk=16, **ARGUMENTS)
    assert [answer.tolist() for answer in out.answers] == expected
    assert torch.equal(chunked.sequences, out.sequences)


@pytest.mark.parametrize("use_cache", [True, False])
def test_two_routing_blocks_in_a_decode_block(model, prompts, use_cache):
    arguments = {**ARGUMENTS, "block_length": 16}
    expected = [reference_generate(model, ids, **arguments).answer for ids in prompts]
    with patched(model, "exact"):
        out = generate(model, prompts, use_cache=use_cache, **arguments)
    assert [answer.tolist() for answer in out.answers] == expected


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_saving_plan_never_sees_a_batch_mate(model, prompts, use_cache):
    with patched(model, EpochConfig(refresh_interval=4)):
        together = generate(model, prompts, use_cache=use_cache, **ARGUMENTS)
        alone = [generate(model, ids, use_cache=use_cache, **ARGUMENTS).answers[0].tolist() for ids in prompts]
    assert [answer.tolist() for answer in together.answers] == alone
    work = together.counters.read()
    assert work.rows < work.dense_rows
    # No support beside the model's own pools: nothing is restricted, and nothing falls short.
    assert math.isnan(work.coverage)
    assert not work.fallbacks
