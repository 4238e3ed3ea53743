"""Sampling, the commit rule and the schedule against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epoch_moe.decoding import choose_rows, sample_tokens, transfer_schedule
from epoch_moe.decoding.sampling import warp


@given(block=st.integers(1, 70), steps=st.integers(1, 80))
def test_schedule_shares_the_block_evenly(block, steps):
    schedule = transfer_schedule(block, steps)
    assert len(schedule) == steps
    assert sum(schedule) == block
    assert schedule == sorted(schedule, reverse=True)
    assert schedule[0] - schedule[-1] <= 1


@given(data=st.data())
@settings(max_examples=100)
def test_choose_rows_against_plain_python(data):
    batch, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    # Few distinct values: ties are common.
    values = data.draw(st.lists(st.integers(0, 4), min_size=batch * rows, max_size=batch * rows))
    confidence = torch.tensor(values, dtype=torch.float32).view(batch, rows) / 4
    flags = data.draw(st.lists(st.booleans(), min_size=batch * rows, max_size=batch * rows))
    live = torch.tensor(flags).view(batch, rows)
    need, threshold = data.draw(st.integers(0, rows + 1)), data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    chosen = choose_rows(confidence, live, need, threshold)
    for b in range(batch):
        candidates = [i for i in range(rows) if live[b, i]]
        expected = [i for i in candidates if float(confidence[b, i]) > threshold]
        if len(expected) < need:
            expected = sorted(candidates, key=lambda i: (-float(confidence[b, i]), i))[:need]
        assert chosen[b].nonzero().flatten().tolist() == sorted(expected)


def test_greedy_is_the_most_probable_token_and_its_probability():
    logits = torch.randn(7, 33)
    tokens, confidence = sample_tokens(logits, temperature=0.0, top_k=3, top_p=0.1)
    for row in range(7):
        total = sum(math.exp(v) for v in logits[row].tolist())
        best = max(range(33), key=lambda i: logits[row, i])
        assert int(tokens[row]) == best
        assert float(confidence[row]) == pytest.approx(math.exp(float(logits[row, best])) / total, rel=1e-5)


def test_no_rows_give_no_tokens():
    for temperature in (0.0, 1.0):
        tokens, confidence = sample_tokens(torch.empty(0, 11), temperature)
        assert tokens.shape == confidence.shape == (0,)
        assert tokens.dtype == torch.int64


@pytest.mark.parametrize("top_k", [None, 0, 1, 2, 5, 33, 100])
def test_top_k_keeps_the_largest_and_ties_with_the_last(top_k):
    logits = torch.randint(0, 6, (20, 33)).float()
    kept = warp(logits, 1.0, top_k=top_k)
    for row, result in zip(logits.tolist(), kept.tolist(), strict=True):
        edge = sorted(row, reverse=True)[min(top_k or 33, 33) - 1]
        assert result == [v if v >= edge else -math.inf for v in row]


@pytest.mark.parametrize("top_p", [None, 0.05, 0.3, 0.7, 0.99, 1.0])
def test_top_p_keeps_the_smallest_set_that_exceeds_it(top_p):
    logits = torch.randn(20, 33) * 2
    kept = warp(logits, 1.0, top_p=top_p).isfinite()
    for row in range(20):
        probs = logits[row].softmax(-1).tolist()
        order = sorted(range(33), key=lambda i: -probs[i])
        expected, mass = set(), 0.0
        for index in order:
            if top_p is not None and mass > top_p:
                break
            expected.add(index)
            mass += probs[index]
        assert set(kept[row].nonzero().flatten().tolist()) == expected


def test_sampling_follows_the_tempered_filtered_distribution():
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0])
    temperature, top_k, top_p, draws = 0.7, 4, 0.8, 20_000
    weights = [math.exp(v / temperature) for v in logits.tolist()[:top_k]]
    probs = [w / sum(weights) for w in weights]
    kept, mass = [], 0.0
    for p in probs:
        if mass > top_p:
            break
        kept.append(p)
        mass += p
    expected = torch.tensor([p / mass for p in kept])
    generator = torch.Generator().manual_seed(3)
    tokens, confidence = sample_tokens(logits.expand(draws, -1), temperature, top_k, top_p, generator)
    frequencies = torch.bincount(tokens, minlength=5) / draws
    assert bool((frequencies[len(kept) :] == 0).all())
    # Four standard deviations of a frequency.
    assert bool(((frequencies[: len(kept)] - expected).abs() < 4 * (expected * (1 - expected) / draws).sqrt()).all())
    assert torch.allclose(confidence, expected[tokens], rtol=1e-5)


def test_sampling_repeats_with_the_generator_seed():
    logits = torch.randn(50, 33)
    first, second, other = (
        sample_tokens(logits, 1.0, generator=torch.Generator().manual_seed(seed))[0] for seed in (5, 5, 6)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
