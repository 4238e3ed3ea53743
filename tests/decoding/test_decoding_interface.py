"""Streamer, progress bar, randomness, modes, and errors that say what to do."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from reference_loop import reference_generate
from transformers import TextIteratorStreamer, TextStreamer

from epoch_moe.decoding import generate

BLOCK = 8
ARGUMENTS = {"gen_length": 19, "block_length": BLOCK, "steps": 8, "threshold": 0.0118}


class Tokenizer:
    """Enough of a tokenizer for transformers' streamers."""

    def decode(self, ids, **kwargs):
        return "".join(f"<{i}>\n" for i in (ids if isinstance(ids, list) else [ids]))


class Puts:
    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        assert value.device.type == "cpu"
        assert not self.ended
        self.puts.append(value)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("use_cache", [True, False])
def test_streamer_gets_the_prompt_and_then_each_block(model, prompt, use_cache):
    streamer = Puts()
    out = generate(model, prompt(11)[None], streamer=streamer, use_cache=use_cache, **ARGUMENTS)
    assert streamer.ended == 1
    assert torch.equal(streamer.puts[0], prompt(11)[None])
    # The prompt fills three slots of the first block.
    assert [len(put) for put in streamer.puts[1:]] == [5, 8, 6]
    assert torch.equal(torch.cat(streamer.puts[1:]), out.answers[0])


def test_streamer_stops_at_the_end_id(model, prompt):
    eos = generate(model, prompt(11), **ARGUMENTS).answers[0].tolist()[7]
    streamer = Puts()
    out = generate(model, prompt(11), streamer=streamer, eos_token_id=eos, **ARGUMENTS)
    assert out.finish_reasons == ("eos",)
    assert torch.cat(streamer.puts[1:]).tolist() == out.answers[0].tolist()
    assert streamer.puts[-1].tolist()[-1] == eos


def test_transformers_streamers(model, prompt, capsys):
    out = generate(model, prompt(11), streamer=TextStreamer(Tokenizer(), skip_prompt=True), **ARGUMENTS)
    printed = capsys.readouterr().out
    assert [int(line.strip("<>")) for line in printed.split()][-1] == int(out.answers[0][-1])
    streamer = TextIteratorStreamer(Tokenizer(), skip_prompt=True, timeout=60)
    worker = threading.Thread(target=generate, args=(model, prompt(11)), kwargs={"streamer": streamer, **ARGUMENTS})
    worker.start()
    assert "".join(streamer)
    worker.join()


def test_streamer_ends_when_generate_fails(model, prompt):
    streamer = Puts()
    handle = model.model.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, prompt(11), streamer=streamer, **ARGUMENTS)
    handle.remove()
    assert streamer.ended == 1


def test_progress_bar_is_off_by_default(model, prompt, capsys):
    generate(model, prompt(11), **ARGUMENTS)
    assert capsys.readouterr().err == ""
    generate(model, prompt(11), progress=True, **ARGUMENTS)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tokens=19" in shown


@pytest.mark.parametrize("use_cache", [True, False])
def test_sampling_repeats_with_the_generator(model, prompt, use_cache):
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        out = generate(
            model,
            prompt(11),
            temperature=1.0,
            top_k=40,
            top_p=0.9,
            generator=generator,
            use_cache=use_cache,
            **ARGUMENTS,
        )
        return out.answers[0].tolist()

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_top_k_of_one_is_greedy(model, prompt):
    # The only token left has probability one, so every row is committed at once.
    greedy = generate(model, prompt(11), **{**ARGUMENTS, "threshold": 0.0})
    out = generate(model, prompt(11), temperature=1.0, top_k=1, **{**ARGUMENTS, "threshold": 0.999})
    assert torch.equal(out.sequences, greedy.sequences)
    assert out.forwards == greedy.forwards == 3  # three blocks


def test_no_gradients_and_the_mode_stay_as_they_were(model, prompt):
    assert torch.is_grad_enabled()
    out = generate(model, prompt(11), **ARGUMENTS)
    assert torch.is_grad_enabled()
    assert not model.training
    with torch.inference_mode():
        assert torch.equal(generate(model, prompt(11), **ARGUMENTS).sequences, out.sequences)


def test_an_end_id_in_the_prompt_does_not_end_the_answer(model, prompt):
    ids = prompt(11)
    ids[[2, 9]] = 124
    for early in (True, False):
        out = generate(model, ids, eos_early_stop=early, **ARGUMENTS)
        assert out.answers[0].tolist() == reference_generate(model, ids, **ARGUMENTS).answer
        assert out.lengths == (19,)


def test_several_end_ids(model, prompt):
    answer = generate(model, prompt(11), **ARGUMENTS).answers[0].tolist()
    out = generate(model, prompt(11), eos_token_id=[124, answer[6], answer[12]], **ARGUMENTS)
    ends = [i for i, token in enumerate(out.answers[0].tolist()) if token in (124, answer[6], answer[12])]
    assert ends == [out.lengths[0] - 1]


def test_context_may_be_filled_to_the_last_position(model, prompt):
    out = generate(model, prompt(500), gen_length=12, block_length=BLOCK, threshold=0.0)
    assert out.lengths == (12,)


BAD_ARGUMENTS = [
    ({"gen_length": 0}, ValueError, r"gen_length=0: expected at least 1"),
    ({"gen_length": 2.5}, TypeError, r"gen_length=2.5: expected a whole number"),
    ({"block_length": 0}, ValueError, r"block_length=0: expected at least 1.*use 32"),
    ({"block_length": True}, TypeError, r"block_length=True"),
    ({"steps": 0}, ValueError, r"steps=0"),
    ({"threshold": 95}, ValueError, r"threshold=95.*probability"),
    ({"threshold": float("nan")}, ValueError, r"threshold=nan"),
    ({"temperature": -1.0}, ValueError, r"temperature=-1.0: expected 0"),
    ({"temperature": float("inf")}, ValueError, r"temperature=inf"),
    ({"top_k": -1}, ValueError, r"top_k=-1"),
    ({"top_p": 0.0}, ValueError, r"top_p=0.0"),
    ({"top_p": 1.5}, ValueError, r"top_p=1.5"),
    ({"minimal_topk": 20}, ValueError, r"minimal_topk=20 with gen_length=19.*lower minimal_topk"),
    ({"prefill_chunk": 0}, ValueError, r"prefill_chunk=0"),
    ({"mask_token_id": 128}, ValueError, r"mask_token_id=128.*expected 0 to 127"),
    ({"eos_token_id": -1}, ValueError, r"eos_token_id=-1"),
    ({"eos_token_id": [124, 500]}, ValueError, r"eos_token_id=500"),
    ({"eos_token_id": 125}, ValueError, r"other than the mask id"),
    ({"gen_length": 502}, ValueError, r"11 tokens and gen_length is 502.*max_position_embeddings=512.*to 501"),
    ({"attention_mask": torch.ones(1, 10)}, ValueError, r"shape \(1, 10\): expected that of input_ids, \(1, 11\)"),
    ({"attention_mask": torch.zeros(1, 11)}, ValueError, r"prompt 0 is empty"),
    ({"attention_mask": torch.tensor([[1] * 5 + [0] + [1] * 5])}, ValueError, r"zeros between ones"),
    ({"plan": "dense"}, TypeError, r"plan='dense'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS, ids=lambda v: str(v)[:40])
def test_bad_arguments(model, prompt, arguments, error, message):
    with pytest.raises(error, match=message):
        generate(model, prompt(11)[None], **{**ARGUMENTS, **arguments})


BAD_PROMPTS = [
    (torch.empty(1, 0, dtype=torch.long), ValueError, r"prompt 0 is empty"),
    ([], ValueError, r"no prompt"),
    ([[1, 2], []], ValueError, r"prompt 1 is empty"),
    (torch.zeros(1, 2, 3, dtype=torch.long), ValueError, r"shape \(1, 2, 3\)"),
    ([torch.zeros(1, 2, dtype=torch.long)], ValueError, r"prompt 0 has shape \(1, 2\)"),
    (torch.tensor([[1, 2, 128]]), ValueError, r"holds id 128.*0 to 127"),
    (torch.tensor([[1, -2, 3]]), ValueError, r"holds id -2"),
    (torch.tensor([[1, 125, 3]]), ValueError, r"holds the mask id 125"),
    (torch.tensor([[1.0, 2.0]]), TypeError, r"torch.float32"),
    (torch.arange(600)[None] % 100, ValueError, r"600 tokens.*max_position_embeddings=512"),
    ({"input_ids": torch.tensor([[1]])}, TypeError, r"is a dict.*pass its 'input_ids'"),
    ("text", TypeError, r"is a str"),
]


@pytest.mark.parametrize(("ids", "error", "message"), BAD_PROMPTS, ids=lambda v: str(v)[:40])
def test_bad_prompts(model, ids, error, message):
    with pytest.raises(error, match=message):
        generate(model, ids, **ARGUMENTS)


def test_masks_do_not_go_with_lists(model, prompt):
    with pytest.raises(ValueError, match="a list of prompts has no padding"):
        generate(model, [prompt(3)], attention_mask=torch.ones(1, 3), **ARGUMENTS)


@pytest.mark.parametrize("name", ["eos_token_id", "mask_token_id"])
def test_missing_ids(model, prompt, monkeypatch, name):
    monkeypatch.setattr(model.config, name, None)
    with pytest.raises(ValueError, match=f"{name} is neither an argument nor in the model's config: pass {name}="):
        generate(model, prompt(3), **ARGUMENTS)


def test_unusable_models(model, prompt, monkeypatch):
    with pytest.raises(TypeError, match="LLaDA2MoeModel is not a language model with an LM head"):
        generate(model.model, prompt(3), **ARGUMENTS)
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2'.*'sdpa'"):
        generate(model, prompt(3), **ARGUMENTS)
    monkeypatch.undo()
    model.train()
    try:
        with pytest.raises(ValueError, match=r"training mode: call model.eval\(\)"):
            generate(model, prompt(3), **ARGUMENTS)
    finally:
        model.eval()


def test_block_pool_models_need_whole_pools(load_checkpoint, prompt):
    model = load_checkpoint("llada2_2_routing")
    with pytest.raises(ValueError, match=r"block_length=12.*block_size=8"):
        generate(model, prompt(3), gen_length=8, block_length=12)
    generate(model, prompt(3), gen_length=8, block_length=8, threshold=0.0)


def test_streamers_and_batches_and_devices(model, prompt):
    with pytest.raises(ValueError, match="a streamer serves one sequence, input_ids holds 2"):
        generate(model, [prompt(3), prompt(4)], streamer=Puts(), **ARGUMENTS)
    elsewhere = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"generator is on cuda, the model on cpu.*torch.Generator\(device='cpu'\)"):
        generate(model, prompt(3), generator=elsewhere, **ARGUMENTS)


def test_public_name():
    import epoch_moe

    assert epoch_moe.generate is generate
