"""`generate` of the model classes: the released arguments, return values and tokens."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import pytest
import torch
from helpers import load_golden
from reference_canvas import decode_canvas

import epoch_moe
from epoch_moe import EpochConfig, patched
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.plan.block_plan import BlockPlan

# As the released files have them: LLaDA2.0 with what 2.1 added, and the function on LLaDA-MoE's card.
LLADA2 = {
    "inputs": None, "temperature": 0.0, "block_length": 32, "steps": 32, "gen_length": 2048, "top_p": None,
    "top_k": None, "eos_early_stop": False, "minimal_topk": 1, "threshold": 0.95, "editing_threshold": 0.9,
    "max_post_steps": 16, "eos_id": 156892, "mask_id": 156895, "num_to_transfer": 1,
}  # fmt: skip
LLADA_MOE = {
    "prompt": inspect.Parameter.empty, "steps": 128, "gen_length": 128, "block_length": 128, "temperature": 0.0,
    "cfg_scale": 0.0, "remasking": "low_confidence", "mask_id": 156895,
}  # fmt: skip
OURS = {"editing_threshold": None, "eos_id": None, "mask_id": None}
"""The model's own ids; 2.0 does not edit, and no config tells it from 2.1."""


@pytest.mark.parametrize(("cls", "released"), [(LLaDA2MoeModelLM, LLADA2), (LLaDAMoEModelLM, LLADA_MOE)])
def test_the_signature_is_the_released_one(cls, released):
    parameters = list(inspect.signature(cls.generate).parameters.values())[1:]
    want = {name: OURS.get(name, default) for name, default in released.items()}
    assert [(p.name, p.default) for p in parameters] == list(want.items())


@pytest.mark.parametrize("config", [None, "exact"])
@pytest.mark.parametrize("folder", ["llada2", "llada2_1"])
def test_tokens_are_the_released_loops(load_checkpoint, golden_run, folder, config):
    model = load_checkpoint(folder)
    for run in range(3):
        arguments, data = golden_run(folder, run)
        arguments["eos_id"], arguments["mask_id"] = arguments.pop("eos_token_id"), arguments.pop("mask_token_id")
        with nullcontext() if config is None else patched(model, config):
            out = model.generate(inputs=data["prompt"], **arguments)
            assert out.dtype == torch.int64 and torch.equal(out, data["output"])
            # The answer alone, and up to its first end id, wherever the loop stopped.
            arguments["eos_id"] = int(data["output"][0, 13])
            end = data["output"][0].tolist().index(arguments["eos_id"]) + 1
            for early in (False, True):
                ended = model.generate(data["prompt"], **arguments, eos_early_stop=early)
                assert torch.equal(ended, data["output"][:, :end])


@pytest.fixture(scope="module")
def canvas_model() -> LLaDAMoEModelLM:
    return LLaDAMoEModelLM.from_pretrained(load_golden("llada_moe").folder).eval()


@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
def test_the_canvas_is_the_cards(canvas_model, cfg_scale):
    prompt, options = [5, 9, 2, 77, 31], {"gen_length": 16, "block_length": 8, "steps": 8, "cfg_scale": cfg_scale}
    want = decode_canvas(canvas_model, prompt, mask_id=125, **options)
    eos = canvas_model.config.eos_token_id
    try:
        canvas_model.config.eos_token_id = want[3]  # what follows an end id is returned too
        for config in (None, "exact"):
            with nullcontext() if config is None else patched(canvas_model, config):
                out = canvas_model.generate(torch.tensor([prompt]), **options)
            assert out.dtype == torch.int64 and out.tolist() == [prompt + want]
    finally:
        canvas_model.config.eos_token_id = eos


def test_a_patched_model_decodes_under_its_plan(model, canvas_model, prompt, monkeypatch):
    forwards = []
    complete = BlockPlan.complete
    monkeypatch.setattr(BlockPlan, "complete", lambda self, forward: (forwards.append(1), complete(self, forward)))
    for one in (model, canvas_model):
        one.generate(prompt(5)[None], gen_length=8, block_length=8, steps=8)
        assert not forwards
        with patched(one, EpochConfig()):
            one.generate(prompt(5)[None], gen_length=8, block_length=8, steps=8)
        assert forwards
        forwards.clear()


def test_what_would_have_no_effect_is_refused(model, canvas_model, prompt):
    ids = prompt(5)[None]
    with pytest.raises(TypeError, match=r"does not take max_new_tokens, do_sample: expected .*inputs, temperature, "):
        model.generate(ids, max_new_tokens=8, do_sample=False)
    with pytest.raises(TypeError, match=r"LLaDAMoEModelLM.generate does not take inputs: expected .*prompt, steps, "):
        canvas_model.generate(inputs=ids)
    for arguments in ({"max_post_steps": 4}, {"num_to_transfer": 2}):
        with pytest.raises(ValueError, match="belong to editing: pass editing_threshold"):
            model.generate(ids, gen_length=8, **arguments)
    for one in (model, canvas_model):
        for wrong in (prompt(5), torch.cat([ids, ids])):
            with pytest.raises(ValueError, match=r"has shape .*: expected \[1, positions\], one prompt"):
                one.generate(wrong)
        for wrong in ([[1, 2]], {"input_ids": ids}, None):
            with pytest.raises(TypeError, match=f"is a {type(wrong).__name__}: expected a tensor"):
                one.generate(wrong)
    with pytest.raises(ValueError, match=r"call model\.eval"):
        LLaDA2MoeModelLM(model.config).train().generate(ids)


def test_no_end_id_means_full_length(model, prompt):
    settings = {"gen_length": 12, "block_length": 8}
    free = epoch_moe.generate(model, prompt(5), eos_token_id=[], **settings)
    assert free.lengths == (12,) and free.finish_reasons == ("length",)
    stopped = epoch_moe.generate(model, prompt(5), eos_token_id=int(free.sequences[0, 2]), **settings)
    assert stopped.lengths[0] <= 3 and torch.equal(stopped.answers[0], free.sequences[0, : stopped.lengths[0]])
