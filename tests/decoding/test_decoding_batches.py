"""Batches: every prompt gets its own tokens, whatever its length and its batch mates."""

from __future__ import annotations

import pytest
import torch
from reference_loop import reference_generate

from epoch_moe.decoding import generate

BLOCK, MASK = 8, 125
LENGTHS = [3, 8, 16, 21, 9, 40, 17]
ARGUMENTS = {"gen_length": 19, "block_length": BLOCK, "steps": 8, "threshold": 0.0118}


@pytest.fixture
def prompts(prompt):
    return [prompt(length, seed=number) for number, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("use_cache", [True, False])
def test_different_lengths_equal_single_runs(model, prompts, use_cache):
    out = generate(model, prompts, use_cache=use_cache, **ARGUMENTS)
    single = [reference_generate(model, ids, **ARGUMENTS) for ids in prompts]
    for answer, expected in zip(out.answers, single, strict=True):
        assert answer.tolist() == expected.answer
    # Blocks are aligned, so a batch needs as many forwards per block as its slowest sequence.
    assert max(s.forwards for s in single) <= out.forwards < sum(s.forwards for s in single)


@pytest.mark.parametrize("use_cache", [True, False])
def test_sequences_that_end_early_leave_the_others_alone(model, prompts, traced, use_cache):
    free = [reference_generate(model, ids, **ARGUMENTS).answer for ids in prompts]
    eos = free[1][2]  # ends at least one sequence in its first block
    arguments = {**ARGUMENTS, "gen_length": 33, "eos_token_id": eos}
    with traced(model) as calls:
        out = generate(model, prompts, use_cache=use_cache, **arguments)
    single = [reference_generate(model, ids, **arguments).answer for ids in prompts]
    assert [answer.tolist() for answer in out.answers] == single
    assert len(set(out.finish_reasons)) == 2
    assert out.sequences.shape == (len(prompts), max(map(len, single)))
    for row, answer in zip(out.sequences.tolist(), single, strict=True):
        assert row[len(answer) :] == [model.config.pad_token_id] * (len(row) - len(answer))
    batches = [call["input_ids"].shape[0] for call in calls]
    assert batches == sorted(batches, reverse=True)
    assert batches[0] == len(prompts) > batches[-1]


@pytest.mark.parametrize("use_cache", [True, False])
def test_early_stop_in_a_batch(model, prompts, use_cache):
    free = [reference_generate(model, ids, **ARGUMENTS).answer for ids in prompts]
    arguments = {**ARGUMENTS, "eos_token_id": free[4][5], "eos_early_stop": True}
    out = generate(model, prompts, use_cache=use_cache, **arguments)
    for answer, ids in zip(out.answers, prompts, strict=True):
        assert answer.tolist() == reference_generate(model, ids, **arguments).answer


def test_padding_on_either_side_and_lists_mean_the_same(model, prompts):
    longest = max(LENGTHS)
    expected = generate(model, prompts, **ARGUMENTS).sequences
    for left in (True, False):
        ids = torch.full((len(prompts), longest), 7)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            where = slice(longest - len(prompt), None) if left else slice(len(prompt))
            ids[row, where], mask[row, where] = prompt, 1
        assert torch.equal(generate(model, ids, attention_mask=mask, **ARGUMENTS).sequences, expected)
    assert torch.equal(generate(model, [p.tolist() for p in prompts], **ARGUMENTS).sequences, expected)


def test_a_prompt_alone_may_be_one_dimensional(model, prompts):
    expected = generate(model, prompts[3][None], **ARGUMENTS).sequences
    assert torch.equal(generate(model, prompts[3], **ARGUMENTS).sequences, expected)
    assert torch.equal(generate(model, prompts[3].tolist(), **ARGUMENTS).sequences, expected)


def test_padding_content_does_not_matter(model, prompts, monkeypatch):
    expected = generate(model, prompts, **ARGUMENTS).sequences
    monkeypatch.setattr(model.config, "pad_token_id", 3)
    out = generate(model, prompts, **ARGUMENTS)
    for row, (answer, length) in enumerate(zip(out.answers, out.lengths, strict=True)):
        assert torch.equal(answer, expected[row, :length])


def test_stale_cache_memory_is_never_read(model, prompts, poisoned_empty):
    out = generate(model, prompts, **ARGUMENTS)
    assert [answer.tolist() for answer in out.answers] == [
        reference_generate(model, ids, **ARGUMENTS).answer for ids in prompts
    ]


@pytest.mark.parametrize("chunk", [1, 8, 17, 24, 40, 41])
def test_prefill_chunks_change_nothing_but_the_forwards(model, prompt, traced, chunk):
    prompts = [prompt(45, 1), prompt(20, 2)]
    expected = generate(model, prompts, **ARGUMENTS)
    assert expected.prefill_forwards == 0
    with traced(model) as calls:
        out = generate(model, prompts, prefill_chunk=chunk, **ARGUMENTS)
    assert torch.equal(out.sequences, expected.sequences)
    assert out.forwards == expected.forwards
    rows = max(chunk // BLOCK, 1) * BLOCK
    assert out.prefill_forwards == len(calls) - out.forwards == -(-40 // rows) - 1
    for call in calls[: out.prefill_forwards]:
        assert call["input_ids"].shape[1] == rows
    assert calls[out.prefill_forwards]["input_ids"].shape[1] <= rows + BLOCK


def test_a_cached_run_commits_finished_blocks_without_extra_forwards(model, prompt, traced):
    with traced(model) as calls:
        cached = generate(model, prompt(11), **ARGUMENTS)
        full = generate(model, prompt(11), use_cache=False, **ARGUMENTS)
    assert cached.forwards == full.forwards
    rows = [call["input_ids"].shape[1] for call in calls]
    assert sorted(set(rows[: cached.forwards])) == [BLOCK, 2 * BLOCK]
    # One prompt block and every finished block but the last ride in front of a block's first forward.
    assert rows[: cached.forwards].count(2 * BLOCK) == (11 + 19 + 7) // BLOCK - 1
    assert rows[cached.forwards :] == sorted(rows[cached.forwards :])


def test_head_runs_on_live_rows_only(model, prompt, traced):
    seen: list[int] = []
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
    with traced(model) as calls:
        generate(model, [prompt(11), prompt(4)], **ARGUMENTS)
    handle.remove()
    masks = [(call["input_ids"][:, -BLOCK:] == MASK).sum(dim=1) for call in calls]
    assert seen == [int(count.sum()) for count in masks]
