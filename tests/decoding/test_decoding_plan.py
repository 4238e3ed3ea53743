"""`generate` drives a patched model's block plan through both clocks."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import epoch_moe
from epoch_moe.decoding import generate
from epoch_moe.plan.context import UntrackedContext

BLOCK, MASK = 8, 125
ARGUMENTS = {"gen_length": 19, "block_length": BLOCK, "steps": 8, "threshold": 0.0118}


@pytest.fixture
def prompts(prompt):
    return [prompt(13, 1), prompt(4, 2), prompt(30, 3)]


class Recorder(UntrackedContext):
    """Checks the order of calls and keeps their arguments."""

    def __init__(self, lm_head_rows: str = "live"):
        self.lm_head_rows = lm_head_rows
        self.blocks: list[dict] = []
        self.head_rows = 0
        self.open = self.running = False

    @contextmanager
    def block(self, **kwargs):
        assert not self.open
        self.open = True
        self.blocks.append({**kwargs, "iterations": []})
        yield
        self.open = False

    @contextmanager
    def iteration(self, ids_BS, **kwargs):
        assert self.open and not self.running
        self.running = True
        # The snapshot is compared with a copy later: nobody may write to it.
        self.blocks[-1]["iterations"].append({"ids": ids_BS, "copy": ids_BS.clone(), **kwargs})
        yield
        self.running = False

    def end_iteration(self, confidence_BS=None):
        assert self.open and not self.running
        self.blocks[-1]["iterations"][-1]["confidence"] = confidence_BS

    def count_lm_head(self, rows):
        self.head_rows += rows


@pytest.mark.parametrize("use_cache", [True, False])
def test_calls_of_both_clocks(model, prompts, traced, monkeypatch, use_cache):
    recorder = Recorder()
    monkeypatch.setattr("epoch_moe.decoding.request.open_context", lambda model, plan, **kwargs: recorder)
    with traced(model) as calls:
        out = generate(model, prompts, use_cache=use_cache, **ARGUMENTS)
    iterations = [(block, it) for block in recorder.blocks for it in block["iterations"]]
    ends = [24 + BLOCK * (n + 1) for n, block in enumerate(recorder.blocks) for _ in block["iterations"]]
    assert len(iterations) == len(calls) == out.forwards
    starts = torch.tensor([24 - 8, 24, 0])
    for number, ((block, it), call) in enumerate(zip(iterations, calls, strict=True)):
        assert torch.equal(it["ids"], call["input_ids"])
        assert torch.equal(it["ids"], it["copy"])
        assert it["mask_id"] == MASK
        assert block["prefix_constant"] is True
        assert it["ids"].shape == (block["batch"], it["lead"] + block["window"])
        assert block["window"] - block["prefix"] == BLOCK
        cold = it is block["iterations"][0]
        if use_cache:
            assert block["prefix"] == 0
            assert it["lead"] == ((24 if number == 0 else BLOCK) if cold else 0)
        else:
            assert it["lead"] == 0
        live = it["ids"][:, -BLOCK:] == MASK
        confidence = it["confidence"]
        assert confidence.shape == it["ids"].shape
        assert bool(((confidence[:, -BLOCK:] < 1) == live).all())
        valid = torch.ones_like(it["ids"], dtype=torch.bool) if it["valid_BS"] is None else it["valid_BS"]
        assert torch.equal(valid[:, -BLOCK:], live.any(dim=1, keepdim=True).expand(-1, BLOCK))
        if block["batch"] == 3:
            slots = torch.arange(ends[number] - it["ids"].shape[1], ends[number] - BLOCK)
            assert torch.equal(valid[:, :-BLOCK], slots >= starts[:, None])


@pytest.mark.parametrize("lm_head_rows", ["live", "block"])
def test_head_rows_do_not_change_tokens(model, prompts, monkeypatch, lm_head_rows):
    expected = generate(model, prompts, **ARGUMENTS)
    recorder = Recorder(lm_head_rows)
    monkeypatch.setattr("epoch_moe.decoding.request.open_context", lambda model, plan, **kwargs: recorder)
    assert torch.equal(generate(model, prompts, **ARGUMENTS).sequences, expected.sequences)
    iterations = [it["ids"] for block in recorder.blocks for it in block["iterations"]]
    per_forward = [
        # Whole blocks, of the sequences that have a mask left in them.
        BLOCK * int((ids[:, -BLOCK:] == MASK).any(dim=1).sum()) if lm_head_rows == "block" else int((ids == MASK).sum())
        for ids in iterations
    ]
    assert recorder.head_rows == sum(per_forward)


@pytest.mark.parametrize("use_cache", [True, False])
def test_exact_plan_gives_the_dense_tokens_and_less_head_work(model, prompts, use_cache):
    expected = generate(model, prompts, use_cache=use_cache, **ARGUMENTS)
    with epoch_moe.patched(model, epoch_moe.EpochConfig.exact()):
        exact = generate(model, prompts, use_cache=use_cache, **ARGUMENTS)
        dense = generate(model, prompts, use_cache=use_cache, plan=None, **ARGUMENTS)
    for out in (exact, dense):
        assert torch.equal(out.sequences, expected.sequences)
        assert out.forwards == expected.forwards == out.counters.forwards
    assert expected.counters is None
    assert exact.counters.lm_head_rows < dense.counters.lm_head_rows
    assert exact.counters.attention_pairs == dense.counters.attention_pairs > 0


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_saving_plan_still_answers_and_never_sees_a_batch_mate(model, prompts, use_cache):
    config = epoch_moe.EpochConfig(coverage=0.9, refresh_interval=4)
    with epoch_moe.patched(model, config):
        together = generate(model, prompts, use_cache=use_cache, **ARGUMENTS)
        alone = [generate(model, ids, use_cache=use_cache, **ARGUMENTS).answers[0].tolist() for ids in prompts]
    assert [answer.tolist() for answer in together.answers] == alone


def test_an_error_in_a_forward_leaves_the_model_without_a_plan(model, prompts):
    expected = generate(model, prompts, **ARGUMENTS).sequences
    with epoch_moe.patched(model, epoch_moe.EpochConfig.exact()):
        count = 0

        def explode(module, args, kwargs):
            nonlocal count
            count += 1
            if count == 3:
                raise RuntimeError("stop here")

        handle = model.model.layers[1].register_forward_pre_hook(explode, with_kwargs=True)
        with pytest.raises(RuntimeError, match="stop here"):
            generate(model, prompts, **ARGUMENTS)
        handle.remove()
        assert torch.equal(generate(model, prompts, **ARGUMENTS).sequences, expected)


def test_prefill_forwards_are_counted(model, prompt):
    prompts = [prompt(45, 1), prompt(20, 2)]
    with epoch_moe.patched(model, "exact"):
        whole = generate(model, prompts, **ARGUMENTS)
        chunked = generate(model, prompts, prefill_chunk=16, **ARGUMENTS)
    a, b = whole.counters.read(), chunked.counters.read()
    assert chunked.prefill_forwards == 2
    assert b.forwards == chunked.forwards + chunked.prefill_forwards == a.forwards + 2
    # The same rows, in more forwards.
    assert b.forward_rows == a.forward_rows and b.dense_rows == a.dense_rows
