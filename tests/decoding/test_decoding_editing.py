"""LLaDA2.1's editing: runs of the released loop, the plain reference loop, and what a plan makes of it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from reference_edit import reference_rewrite

import epoch_moe
from epoch_moe import EpochConfig, patched
from epoch_moe.decoding import generate, rules
from epoch_moe.decoding.canvas import Canvas
from epoch_moe.decoding.parts import model_parts
from epoch_moe.decoding.rules import RewriteRule
from epoch_moe.decoding.settings import block_diffusion_settings
from epoch_moe.plan.context import UntrackedContext

BLOCK, MASK = 8, 125
RUNS = [0, 1, 2]
ARGUMENTS = {"gen_length": 19, "block_length": BLOCK, "threshold": 0.0118, "editing_threshold": 0.0119}


@pytest.fixture
def model(load_checkpoint):
    return load_checkpoint("llada2_1")


@pytest.fixture
def prompts(prompt):
    return [prompt(length, seed=number) for number, length in enumerate([3, 8, 16, 21, 9, 40, 17])]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("config", "use_cache"), [(None, True), (None, False), ("dense", True), ("exact", False)])
def test_tokens_equal_the_released_loop(model, golden_run, run, use_cache, config):
    arguments, data = golden_run("llada2_1", run)
    with nullcontext() if config is None else patched(model, config):
        out = generate(model, data["prompt"], use_cache=use_cache, **arguments)
    assert torch.equal(out.sequences, data["output"])
    assert out.forwards == data["trace_input_ids"].shape[0]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("config", "use_cache"), [(None, True), (None, False), ("exact", True)])
def test_forwards_receive_the_released_ids(model, golden_run, traced, run, use_cache, config):
    arguments, data = golden_run("llada2_1", run)
    with nullcontext() if config is None else patched(model, config), traced(model) as calls:
        generate(model, data["prompt"], use_cache=use_cache, **arguments)
    trace = [row[row >= 0].tolist() for row in data["trace_input_ids"]]
    committed = width = 0
    for call, row in zip(calls, trace, strict=True):
        expected = row
        if use_cache:
            expected = row[-BLOCK:]
            if len(row) > width:  # the first forward of a block carries everything that is not in the cache yet
                expected, width = row[committed:], len(row)
                committed = width - BLOCK
        assert call["input_ids"][0].tolist() == expected


CASES = [
    {},
    {"threshold": 0.95},
    {"threshold": 0.0, "editing_threshold": 0.0},
    {"editing_threshold": 0.0, "max_post_steps": 0},
    {"editing_threshold": 0.0, "max_post_steps": 1},
    {"editing_threshold": 0.0, "max_post_steps": 5, "num_to_transfer": 3},
    {"editing_threshold": 1.0},
    {"threshold": 0.5, "num_to_transfer": 3, "gen_length": 13},
    {"block_length": 5},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}{v}" for k, v in case.items()) or "plain")
def test_tokens_and_forwards_equal_the_reference_loop(model, prompts, case):
    arguments = {**ARGUMENTS, **case}
    events: dict[str, int] = {}
    for ids in (prompts[0], prompts[3]):
        expected = reference_rewrite(model, ids, **arguments)
        for name, count in expected.events.items():
            events[name] = events.get(name, 0) + count
        for use_cache in (True, False):
            out = generate(model, ids, use_cache=use_cache, **arguments)
            assert out.answers[0].tolist() == expected.answer
            assert out.forwards == expected.forwards
        arguments["eos_token_id"] = expected.answer[3]
        ended = reference_rewrite(model, ids, **arguments)
        out = generate(model, ids, eos_early_stop=True, **arguments)
        assert out.answers[0].tolist() == ended.answer and out.forwards == ended.forwards
        del arguments["eos_token_id"]
    # Rewriting happened wherever the threshold lets it.
    assert (events["rewritten"] > 0) == (arguments["editing_threshold"] < 1.0)
    if arguments["editing_threshold"] == 0.0:
        assert events["post steps spent"] > 0


@pytest.mark.parametrize(("config", "use_cache"), [(None, True), (None, False), ("dense", True), ("exact", False)])
def test_batches_equal_single_runs(model, prompts, use_cache, config):
    prompts = prompts[:4]
    single = [reference_rewrite(model, ids, **ARGUMENTS) for ids in prompts]
    with nullcontext() if config is None else patched(model, config):
        out = generate(model, prompts, use_cache=use_cache, **ARGUMENTS)
        eos = single[1].answer[2]
        ended = generate(model, prompts, use_cache=use_cache, eos_token_id=eos, **ARGUMENTS)
    assert [answer.tolist() for answer in out.answers] == [s.answer for s in single]
    assert max(s.forwards for s in single) <= out.forwards < sum(s.forwards for s in single)
    assert sum(s.events["rewritten"] for s in single) > 0
    single = [reference_rewrite(model, ids, eos_token_id=eos, **ARGUMENTS) for ids in prompts]
    assert [answer.tolist() for answer in ended.answers] == [s.answer for s in single]
    assert set(ended.finish_reasons) == {"eos", "length"}


def test_a_saving_plan_never_sees_a_batch_mate(model, prompts):
    with patched(model, EpochConfig(refresh_interval=4)):
        together = generate(model, prompts, **ARGUMENTS)
        alone = [generate(model, ids, **ARGUMENTS).answers[0].tolist() for ids in prompts]
    assert [answer.tolist() for answer in together.answers] == alone


@pytest.mark.parametrize("use_cache", [True, False])
def test_every_row_behind_the_prompt_is_live(model, prompts, traced, monkeypatch, use_cache):
    seen: list[dict] = []

    class Recorder(UntrackedContext):
        def iteration(self, ids_BS, **kwargs):
            seen.append(kwargs)
            return super().iteration(ids_BS, **kwargs)

    recorder, heads = Recorder(), []
    monkeypatch.setattr("epoch_moe.decoding.request.open_context", lambda model, plan, **kwargs: recorder)
    handle = model.lm_head.register_forward_pre_hook(lambda module, args: heads.append(args[0].shape[0]))
    with traced(model) as calls:
        generate(model, prompts[:3], use_cache=use_cache, **ARGUMENTS)
    handle.remove()
    # Canvas: prompts of 3, 8 and 16 tokens end at slots 19, 16 and 16; the first block ends at 24.
    first = torch.arange(16, 24) >= torch.tensor([[19], [16], [16]])
    assert torch.equal(seen[0]["live_BN"][:, -BLOCK:], first)
    for call, kwargs, rows in zip(calls, seen, heads, strict=True):
        live_BN = kwargs["live_BN"]
        assert live_BN.shape[1] + kwargs["lead"] == call["input_ids"].shape[1]
        assert not live_BN[:, :-BLOCK].any()
        assert rows == int(live_BN.sum())
        # Decoded rows are live as well: that is what editing costs.
        masks = (call["input_ids"][:, -BLOCK:] == MASK) & live_BN[:, -BLOCK:]
        assert int(masks.sum()) <= rows
    assert sum(heads) > sum(int((call["input_ids"][:, -BLOCK:] == MASK).sum()) for call in calls)


def test_editing_costs_what_the_documentation_says(model, prompt):
    """Without editing decoded rows are reused; with it only the prompt's rows of the first block can be."""
    config = EpochConfig(coverage=None, refresh_interval=None)

    def fresh_share(ids, **arguments):
        out = generate(model, ids, block_length=BLOCK, **arguments)
        work = out.counters.read()
        layers = work.per_layer[:-1]  # of the last one only live rows are computed
        return sum(layer.rows for layer in layers) / (work.forward_rows * len(layers))

    with patched(model, config):
        whole = {"gen_length": 16, "threshold": 0.95}
        assert fresh_share(prompt(16), **whole) < 0.75
        assert fresh_share(prompt(16), **whole, editing_threshold=1.0) == 1.0
        # Seven of the first block's eight rows are the prompt's: stable from its second forward on.
        assert fresh_share(prompt(7), gen_length=1, threshold=0.95, editing_threshold=0.0) < 0.8


def test_rows_that_hold_tokens_route_freely(model, prompt):
    """All of a block is live, but a support is for masks: the rows that were filled choose among all experts."""
    config = EpochConfig(coverage=0.3, coverage_floor=0.0, refresh_interval=None, least_saving=0.0)
    natural, restricted = [], []
    for editing_threshold in (None, 1.0):
        with patched(model, config):
            out = generate(model, prompt(16), gen_length=8, threshold=0.95, steps=8, block_length=BLOCK,
                           editing_threshold=editing_threshold)  # fmt: skip
        natural.append(out.counters.read().total.natural_weight)
        restricted.append(out.counters.read())
    # The same masks are restricted either way, one fewer in each forward; one more forward restricts nothing.
    assert restricted[1].forwards == restricted[0].forwards + 1
    assert natural[0] > 0 and natural[1] == pytest.approx(natural[0], rel=0.05)


def test_streamer_gets_finished_blocks(model, prompt):
    from test_decoding_interface import Puts

    streamer = Puts()
    out = generate(model, prompt(11)[None], streamer=streamer, **ARGUMENTS)
    assert [len(put) for put in streamer.puts[1:]] == [5, 8, 6]
    assert torch.equal(torch.cat(streamer.puts[1:]), out.answers[0])


def test_sampling_repeats_with_the_generator(model, prompt):
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt(11), temperature=1.0, generator=generator, **ARGUMENTS).answers[0].tolist()

    assert run(1) == run(1) != run(2)


def test_a_model_that_writes_masks_ends(model, prompt):
    """The released loop would run for ever: nothing in the block ever changes."""
    mask = torch.tensor([MASK])
    handle = model.lm_head.register_forward_hook(lambda module, args, out: out.index_fill(-1, mask, 99.0))
    try:
        out = generate(model, prompt(11), **ARGUMENTS)
    finally:
        handle.remove()
    assert out.forwards == 3  # one for each block
    assert out.answers[0].tolist() == [MASK] * 19


def test_edits_that_undo_each_other_end(model, prompt, monkeypatch):
    """Two rows take turns in being masked again."""
    monkeypatch.setattr(rules, "MAX_ITERATIONS", 30)
    settings = block_diffusion_settings(
        model_parts(model),
        **{"gen_length": 2, "block_length": 2, "steps": 2, "threshold": 0.5, "editing_threshold": 0.5},
        **{"max_post_steps": 4, "num_to_transfer": 1, "temperature": 0.0, "top_k": None, "top_p": None},
        **{"eos_early_stop": False, "minimal_topk": 1, "use_cache": True, "eos_token_id": None, "mask_token_id": None},
        prefill_chunk=64,
    )
    rule = RewriteRule(settings, Canvas([prompt(2)], settings, torch.device("cpu"), own_grid=True), 2, 4)
    ids, iterations = torch.tensor([[5, MASK]]), 0
    while int(rule.left_B1):
        logits = torch.zeros(2, 128)
        for row in range(2):
            logits[row, 5 if ids[0, row] == MASK else MASK] = 20.0
        before = ids
        ids, _ = rule.commit(ids, rule.live(ids), logits, torch.arange(2))
        assert not torch.equal(ids, before)
        iterations += 1
    assert iterations == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"editing_threshold": 1.5}, r"editing_threshold=1.5: expected a probability: None"),
        ({"editing_threshold": float("nan")}, r"editing_threshold=nan"),
        ({"max_post_steps": -1}, r"max_post_steps=-1: expected at least 0"),
        ({"num_to_transfer": 0}, r"num_to_transfer=0: expected at least 1"),
    ],
)
def test_bad_arguments(model, prompt, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt(3), **{**ARGUMENTS, **arguments})


def test_without_an_editing_threshold_tokens_stay(model, prompt):
    plain = generate(model, prompt(11), gen_length=19, block_length=BLOCK, steps=8)
    same = generate(model, prompt(11), gen_length=19, block_length=BLOCK, steps=8, max_post_steps=0, num_to_transfer=5)
    assert torch.equal(plain.sequences, same.sequences) and plain.forwards == same.forwards
    assert epoch_moe.generate is generate
