"""A loop as a user writes one: no plan, no mask object kept, one forward after another over the whole window."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import epoch_moe

BLOCK = 32


@torch.no_grad()
def decode(model: nn.Module, prompt: Tensor, blocks: int = 2, embeds: bool = False) -> Tensor:
    """Commit the surest token on every forward."""
    mask_id = model.config.mask_token_id
    begin = prompt.shape[1] // BLOCK * BLOCK
    ids = torch.full((1, begin + blocks * BLOCK), mask_id)
    ids[:, : prompt.shape[1]] = prompt
    for end in range(begin + BLOCK, ids.shape[1] + 1, BLOCK):
        window = ids[:, :end]
        while (window == mask_id).any():
            block = torch.arange(end) // BLOCK
            mask = (block[None, :] <= block[:, None])[None, None]
            if embeds:
                logits = model(inputs_embeds=model.get_input_embeddings()(window), attention_mask=mask).logits
            else:
                logits = model(window, attention_mask=mask).logits
            confidence, tokens = logits.softmax(-1).max(-1)
            best = confidence.masked_fill(window != mask_id, -1.0).argmax()
            window[0, best] = tokens[0, best]
    return ids


def test_a_hand_written_loop() -> None:
    model, tokenizer = epoch_moe.load_model("tiny-llada2")
    prompt = tokenizer("work out 1+3+1+1+4+7-6:", return_tensors="pt")["input_ids"]
    want = decode(model, prompt)
    epoch_moe.patch(model, "exact")
    with epoch_moe.following(model) as follower:
        assert torch.equal(decode(model, prompt), want)
    exact = follower.report()
    assert exact.work.fallbacks == {} and exact.kinds["request"] == exact.kinds["block"] == 1
    # Under the default plan it gives what `generate` gives under that plan: the loop is followed as the library's own
    # is. How near that is to the dense model is counted over several answers, as one may turn.
    texts = ("sum 3 6 5 4 2:", "work out 3+8+2-3+4-9-1+7:")
    prompts = [prompt, *(tokenizer(text, return_tensors="pt")["input_ids"] for text in texts)]
    wanted, agreed = [decode(model, each) for each in prompts], []
    epoch_moe.patch(model)
    for each, dense in zip(prompts, wanted, strict=True):
        own = epoch_moe.generate(model, each, gen_length=2 * BLOCK - each.shape[1], steps=BLOCK, threshold=1.0)
        with epoch_moe.following(model) as follower:
            got = decode(model, each)
        length = own.lengths[0]
        assert torch.equal(got[0, each.shape[1] :][:length], own.sequences[0, :length])
        assert follower.report().work.pairs < 0.5 * exact.work.pairs
        agreed.append((got == dense).flatten())
    assert float(torch.cat(agreed).float().mean()) > 0.9
    assert exact.work.pairs == 4 * exact.work.dense_rows
    # Embeddings say nothing about what is decoded.
    with epoch_moe.following(model) as follower:
        assert torch.equal(decode(model, prompt, embeds=True), want)
    assert follower.report().work.fallbacks == {"inputs_embeds": exact.work.forwards}
    # Outside of a scope it is the model, and nothing is counted.
    counted = epoch_moe.plan_report(model).work.forwards
    assert torch.equal(decode(model, prompt), want)
    assert epoch_moe.plan_report(model).work.forwards == counted >= 3 * exact.work.forwards
