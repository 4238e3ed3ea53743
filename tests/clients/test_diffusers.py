"""The LLaDA2 pipeline of diffusers on the tiny checkpoint: a loop that passes 2-D masks, edits, and knows no plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from torch import Tensor

import epoch_moe

QUESTIONS = ["work out 1+3+1+1+4+7-6:", "work out 2+2+5-1:"]
LENGTH, BLOCK = 64, 32


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return epoch_moe.load_model("tiny-llada2")


def ask(loaded: tuple[Any, Any], question: str, editing: float | None) -> tuple[Tensor, str]:
    model, tokenizer = loaded
    pipe = LLaDA2Pipeline(model=model, scheduler=BlockRefinementScheduler(), tokenizer=tokenizer)
    pipe.set_progress_bar_config(disable=True)
    out = pipe(
        question,
        use_chat_template=False,
        gen_length=LENGTH,
        block_length=BLOCK,
        num_inference_steps=BLOCK,
        sampling_method="greedy",
        threshold=0.95,
        editing_threshold=editing,
        eos_early_stop=False,
        mask_token_id=model.config.mask_token_id,
        eos_token_id=model.config.eos_token_id,
    )
    return out.sequences, out.texts[0]


@pytest.mark.parametrize("editing", [None, 0.9])
@pytest.mark.parametrize("block_length", [None, BLOCK])
def test_exact_settings_give_the_tokens_of_the_unpatched_model(
    loaded: tuple[Any, Any], editing: float | None, block_length: int | None
) -> None:
    for question in QUESTIONS:
        want = ask(loaded, question, editing)
        scope = epoch_moe.following(loaded[0], block_length=block_length)
        with epoch_moe.patched(loaded[0], "exact"), scope as follower:
            got = ask(loaded, question, editing)
        report = follower.report()
        assert torch.equal(got[0], want[0]) and got[1] == want[1]
        # Without the block length its first block is dense, as its 2-D mask shows no blocks; then the window has grown.
        assert report.kinds["block"] >= 2 and ("block_length" in report.work.fallbacks) == (block_length is None)
        assert set(report.work.fallbacks) <= {"block_length", "no_mask"}


def test_the_default_plan_saves_pairs_and_mostly_agrees(loaded: tuple[Any, Any]) -> None:
    agreed = 0.0
    for question in QUESTIONS:
        want, _ = ask(loaded, question, None)
        with epoch_moe.patched(loaded[0]):
            with epoch_moe.following(loaded[0], block_length=BLOCK, editing=False):
                tokens, _ = ask(loaded, question, None)
            work = epoch_moe.plan_report(loaded[0]).work
        agreed += float((tokens == want).float().mean()) / len(QUESTIONS)
        assert set(work.fallbacks) <= {"shortfall"}
        dense_pairs = 4 * work.dense_rows  # top-4 of every row
        assert work.pairs < 0.6 * dense_pairs
    assert agreed > 0.9


def test_a_loop_that_edits_is_followed(loaded: tuple[Any, Any]) -> None:
    with epoch_moe.patched(loaded[0]), epoch_moe.following(loaded[0], block_length=BLOCK) as follower:
        tokens, _ = ask(loaded, QUESTIONS[0], 0.5)
    report = follower.report()
    assert not (tokens == loaded[0].config.mask_token_id).any()
    assert report.kinds["edit"] > 0 and report.work.rows < report.work.dense_rows
