"""BlockKVCache: the same attention as transformers' DynamicCache, without concatenation or cropping."""

from __future__ import annotations

import pytest
import torch
from helpers import additive, block_causal
from transformers.cache_utils import DynamicCache

from epoch_moe.decoding import BlockKVCache

BLOCK = 8


def rows(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, count, 4), torch.randn(batch, 2, count, 4)


def test_uncommitted_rows_are_overwritten_and_committed_rows_stay(poisoned_empty):
    cache = BlockKVCache(num_layers=2, max_length=20)
    dynamic = DynamicCache()
    lead, block = rows(3, 5), rows(3, 4)
    for layer in range(2):
        first = [torch.cat(pair, dim=2) for pair in zip(lead, block, strict=True)]
        keys, values = cache.update(*first, layer)
        assert torch.equal(keys, first[0])
        assert torch.equal(values, first[1])
        dynamic.update(*lead, layer)
    assert cache.get_seq_length() == 0
    cache.commit(5)
    assert cache.get_seq_length() == cache.length == 5
    for _ in range(3):
        block = rows(3, 4)
        for layer in range(2):
            keys, values = cache.update(*block, layer)
            assert torch.equal(keys, torch.cat([lead[0], block[0]], dim=2))
            assert torch.equal(values, torch.cat([lead[1], block[1]], dim=2))
    cache.commit(4)
    for layer in range(2):
        dynamic.update(*block, layer)
        expected = dynamic.update(*(last := rows(3, 2)), layer)
        for ours, theirs in zip(cache.update(*last, layer), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert cache.get_seq_length() == 9


def test_update_returns_views_of_one_allocation():
    cache = BlockKVCache(1, 16)
    first, _ = cache.update(*rows(2, 6), 0)
    second, _ = cache.update(*rows(2, 6), 0)
    assert first.data_ptr() == second.data_ptr() == cache.layers[0].keys.data_ptr()


def test_select_keeps_sequences_in_order():
    cache = BlockKVCache(2, 12)
    written = [rows(4, 6) for _ in range(2)]
    for layer in range(2):
        cache.update(*written[layer], layer)
    cache.commit(6)
    cache.select([3, 1])
    for layer in range(2):
        block = rows(2, 2)
        for ours, old, new in zip(cache.update(*block, layer), written[layer], block, strict=True):
            assert torch.equal(ours, torch.cat([old[[3, 1]], new], dim=2))


def test_reset_forgets_rows():
    cache = BlockKVCache(1, 8)
    cache.update(*rows(1, 6), 0)
    cache.commit(6)
    cache.reset()
    assert cache.get_seq_length() == 0
    block = rows(1, 3)
    assert torch.equal(cache.update(*block, 0)[0], block[0])


def test_rows_that_do_not_fit_are_refused():
    cache = BlockKVCache(1, 8)
    with pytest.raises(ValueError, match=r"9 rows of 1 sequences do not fit.*at most 8"):
        cache.update(*rows(1, 9), 0)
    cache.update(*rows(1, 6), 0)
    with pytest.raises(ValueError, match="for 1 sequences"):
        cache.update(*rows(2, 6), 0)
    with pytest.raises(ValueError, match=r"cannot commit 9 rows.*between 0 and 8"):
        cache.commit(9)
    with pytest.raises(ValueError, match="num_layers=0"):
        BlockKVCache(0, 8)


@torch.no_grad()
def test_hidden_states_equal_dynamic_cache_and_no_cache(model, prompt):
    ids = torch.stack([prompt(32, 1), prompt(32, 2)])
    base = model.model
    whole = base(ids, attention_mask=additive(block_causal(32, BLOCK))).last_hidden_state
    cache, dynamic = BlockKVCache(model.config.num_hidden_layers, 32), DynamicCache()
    for end in range(BLOCK, 33, BLOCK):
        lead = min(end - BLOCK, BLOCK)
        first = end - BLOCK - lead
        bias = additive(block_causal(32, BLOCK))[:, :, first:end, :end]
        noise = torch.randint(0, 120, (2, BLOCK))
        for block_ids in (noise, ids[:, end - BLOCK : end]):
            begin = cache.length
            out = base(
                torch.cat([ids[:, begin : end - BLOCK], block_ids], dim=1),
                attention_mask=bias[:, :, begin - first :],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            if begin < end - BLOCK:
                cache.commit(end - BLOCK - begin)
        assert torch.allclose(out[:, -BLOCK:], whole[:, end - BLOCK : end], atol=1e-5)
        appended = base(ids[:, end - BLOCK : end], past_key_values=dynamic, use_cache=True).last_hidden_state
        assert torch.allclose(out[:, -BLOCK:], appended, atol=1e-5)
