"""LLaDA2.2's joint decoding: edits against plain lists, the loop against a plain loop, plans under moving rows."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_edit import Edited, reference_edits, reference_joint

from epoch_moe import EpochConfig, patched
from epoch_moe.decoding import generate, joint
from epoch_moe.decoding.joint import apply_edits
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.context import BlockPlanContext, UntrackedContext

BLOCK, MASK, DELETE, SPLIT = 8, 125, 126, 127
SPECIAL = {"mask": MASK, "delete": DELETE, "split": SPLIT}
ARGUMENTS = {"gen_length": 19, "block_length": BLOCK, "steps": 8, "threshold": 0.5, "editing_threshold": 0.0}


@pytest.fixture(scope="module", params=[1, 20], ids=["unsure", "sure"])
def model(request, load_checkpoint):
    """A model that deletes and splits: these ids have larger weights in the head, and it may be sure of its tokens."""
    model = copy.deepcopy(load_checkpoint("llada2_2_routing"))
    with torch.no_grad():
        model.lm_head.weight *= request.param
        model.lm_head.weight[DELETE:] *= 1.7
    return model


@pytest.fixture
def prompts(prompt):
    return [prompt(length, seed=number) for number, length in enumerate([3, 8, 21, 9, 12])]


@st.composite
def blocks(draw):
    rows = draw(st.integers(1, 9))
    ids = st.sampled_from([1, 2, 3, MASK, DELETE, SPLIT])
    batch = draw(st.integers(1, 3))
    return [
        (
            draw(st.lists(ids, min_size=rows, max_size=rows)),
            draw(st.lists(ids, min_size=rows, max_size=rows)),
            draw(st.lists(st.booleans(), min_size=rows, max_size=rows)),
            draw(st.integers(0, rows)),
        )
        for _ in range(batch)
    ]


@settings(max_examples=200)
@given(blocks())
def test_token_edits_equal_plain_lists(batch):
    written, before, original = (torch.tensor([sequence[i] for sequence in batch]) for i in range(3))
    prompt_B1 = torch.tensor([[sequence[3]] for sequence in batch])
    movable = torch.arange(written.shape[1]) >= prompt_B1
    arguments = (written.clone(), before.clone(), original.clone(), movable)
    tokens, kept = apply_edits(*arguments, mask_id=MASK, delete_id=DELETE, split_id=SPLIT)
    for row, sequence in enumerate(batch):
        want_tokens, want_kept = reference_edits(*sequence, SPECIAL)
        assert tokens[row].tolist() == want_tokens
        assert kept[row].tolist() == want_kept
    assert torch.equal(arguments[0], written) and torch.equal(arguments[1], before)


@pytest.mark.parametrize(
    ("written", "before", "after"),
    [
        ([7, DELETE, 8, 9], [7, 6, 8, 9], [7, 8, 9, MASK]),
        ([7, SPLIT, 8, 9], [7, 6, 8, 9], [7, MASK, 6, 8]),
        ([7, 5, 8, SPLIT], [7, 6, 8, 9], [7, 5, 8, MASK]),  # the split token itself is pushed out
        ([DELETE] * 4, [7, 6, 8, 9], [MASK] * 4),
        ([SPLIT] * 4, [7, 6, MASK, 9], [MASK, 7, MASK, 6]),
        ([SPLIT, DELETE, 8, 9], [MASK, 6, 8, 9], [MASK, MASK, 8, 9]),
    ],
)
def test_what_the_edits_mean(written, before, after):
    rows = torch.tensor([written])
    every = torch.ones_like(rows, dtype=torch.bool)
    tokens, kept = apply_edits(
        rows, torch.tensor([before]), every, every, mask_id=MASK, delete_id=DELETE, split_id=SPLIT
    )
    assert tokens[0].tolist() == after
    want = reference_edits(written, before, [True] * 4, 0, SPECIAL)
    assert (tokens[0].tolist(), kept[0].tolist()) == want


def total(runs: list[Edited]) -> dict[str, int]:
    names = {name for run in runs for name in run.events}
    return {name: sum(run.events.get(name, 0) for run in runs) for name in names}


@pytest.mark.parametrize("max_post_steps", [0, 1, 5, 16])
def test_tokens_and_forwards_equal_the_reference_loop(model, prompts, traced, max_post_steps):
    arguments = {**ARGUMENTS, "max_post_steps": max_post_steps}
    runs = []
    for ids in prompts[:: 1 if max_post_steps < 2 else 2]:
        expected = reference_joint(model, ids, **arguments)
        runs.append(expected)
        with traced(model) as calls:
            out = generate(model, ids, use_cache=False, **arguments)
        assert out.answers[0].tolist() == expected.answer
        assert [call["input_ids"][0].tolist() for call in calls] == expected.trace
        cached = generate(model, ids, **arguments)
        assert torch.equal(cached.sequences, out.sequences) and cached.forwards == out.forwards
        # Whatever was edited: no special id is left, and prompts are as they were.
        assert not {MASK, DELETE, SPLIT} & set(expected.answer)
        assert all(row[: len(ids)] == ids.tolist() for row in expected.trace)
    events = total(runs)
    assert events["delete"] > 0 and events["split"] > 0 and events["rewritten"] > 0
    assert events["edit forbidden"] > 0 and events["final round"] > 0
    if max_post_steps > 5:
        assert events["escape"] > 0


@pytest.mark.parametrize("case", [{"steps": 3}, {"threshold": 0.0}, {"steps": 1, "editing_threshold": 0.3}], ids=str)
def test_schedules_and_thresholds(model, prompts, case):
    arguments = {**ARGUMENTS, "max_post_steps": 4, **case}
    for ids in prompts[:3]:
        expected = reference_joint(model, ids, **arguments)
        free_eos = expected.answer[len(expected.answer) // 2]
        out = generate(model, ids, **arguments)
        assert out.answers[0].tolist() == expected.answer and out.forwards == expected.forwards
        ended = generate(model, ids, eos_token_id=free_eos, **arguments)
        assert ended.answers[0].tolist() == reference_joint(model, ids, eos_token_id=free_eos, **arguments).answer


@pytest.mark.parametrize(("config", "use_cache"), [(None, True), (None, False), ("dense", True), ("exact", False)])
def test_batches_and_exact_plans_equal_single_runs(model, prompts, use_cache, config):
    arguments = {**ARGUMENTS, "max_post_steps": 3}
    runs = [reference_joint(model, ids, **arguments) for ids in prompts]
    assert total(runs)["delete"] > 0 and total(runs)["split"] > 0
    with nullcontext() if config is None else patched(model, config):
        out = generate(model, prompts, use_cache=use_cache, **arguments)
    assert [answer.tolist() for answer in out.answers] == [run.answer for run in runs]
    assert max(run.forwards for run in runs) <= out.forwards < sum(run.forwards for run in runs)


@pytest.mark.parametrize("use_cache", [True, False])
def test_moved_rows_lose_their_state(model, prompts, monkeypatch, use_cache):
    """After an edit the plan holds nothing of the sequence's block, and a poisoned cache changes nothing."""
    config = EpochConfig(refresh_interval=None)
    moves: list[torch.Tensor] = []

    def run(poison: bool) -> list[list[int]]:
        original = BlockPlan.next_forward

        def next_forward(self, ids_BS, **kwargs):
            changed_BN = kwargs["changed_BN"]
            if changed_BN is not None:
                moves.append(changed_BN)
                block = slice(self.prefix, None)
                assert not changed_BN[:, : self.prefix].any()
                # All rows of a sequence's block, or none.
                assert torch.equal(changed_BN[:, block].any(dim=1), changed_BN[:, block].all(dim=1))
            forward = original(self, ids_BS, **kwargs)
            if poison:
                usable = forward.masks.kept_T.view_as(forward.ids_BS)[:, forward.lead :]
                for layer in self.layers:
                    if layer.cache_MH is not None:
                        layer.cache_MH[~usable.reshape(-1)] = float("nan")
            return forward

        with monkeypatch.context() as patch, patched(model, config):
            patch.setattr(BlockPlan, "next_forward", next_forward)
            out = generate(model, prompts, use_cache=use_cache, max_post_steps=5, **ARGUMENTS)
        return [answer.tolist() for answer in out.answers]

    assert run(poison=True) == run(poison=False)
    assert any(bool(changed.any()) for changed in moves)
    assert any(bool((changed.any(dim=1) != changed.any()).any()) for changed in moves)  # sequence by sequence


def test_a_plan_told_of_moved_rows_recomputes_them(load_checkpoint):
    """`changed_BN` drops entries whose token stamp still fits: a moved row may hold an equal token."""
    model = load_checkpoint("llada2_2_routing")
    ids = torch.full((2, BLOCK), 7)
    ids[:, -1] = MASK
    with patched(model, EpochConfig(refresh_interval=None)):
        context = BlockPlanContext(model._epoch_moe, EpochConfig(refresh_interval=None))
        fresh = []
        with context.block(batch=2, window=BLOCK), torch.no_grad():
            for moved in (None, None, torch.tensor([[True], [False]]), None):
                changed = None if moved is None else moved.expand(2, BLOCK)
                with context.iteration(ids, mask_id=MASK, changed_BN=changed):
                    model.model(ids, attention_mask=None)
                fresh.append(context.counters.history[-1]["fresh"])
    assert fresh == [2 * BLOCK, 2, BLOCK + 1, 2]


def test_the_loop_says_what_moved(model, prompts, monkeypatch):
    seen = []

    class Recorder(UntrackedContext):
        @contextmanager
        def iteration(self, ids_BS, **kwargs):
            seen.append((ids_BS[:, -BLOCK:], kwargs["changed_BN"]))
            yield

    recorder = Recorder()
    monkeypatch.setattr("epoch_moe.decoding.request.open_context", lambda model, plan, **kwargs: recorder)
    generate(model, prompts[:1], max_post_steps=3, **ARGUMENTS)
    moved = 0
    for (before, _), (after, changed) in pairwise(seen):
        if changed is None:  # another block began
            continue
        masks_came_back = bool(((after == MASK) & (before != MASK)).any())
        # Edits alone bring masks back.
        assert not masks_came_back or bool(changed.all())
        moved += masks_came_back
    assert moved > 0


def test_iterations_are_bounded(model, prompt, monkeypatch):
    monkeypatch.setattr(joint, "MAX_ITERATIONS", 6)
    arguments = {**ARGUMENTS, "max_post_steps": 16}
    expected = reference_joint(model, prompt(11), max_iterations=6, **arguments)
    out = generate(model, prompt(11), **arguments)
    assert out.answers[0].tolist() == expected.answer
    assert out.forwards == expected.forwards
    assert not {MASK, DELETE, SPLIT} & set(expected.answer)


def test_a_prompt_may_hold_edit_ids(model, prompt):
    ids = prompt(11)
    ids[[2, 9]] = torch.tensor([DELETE, SPLIT])
    expected = reference_joint(model, ids, max_post_steps=3, **ARGUMENTS)
    assert generate(model, ids, max_post_steps=3, **ARGUMENTS).answers[0].tolist() == expected.answer


def test_defaults_of_the_released_loop(model, prompt):
    arguments = {"gen_length": 10, "block_length": BLOCK, "max_post_steps": 2}
    expected = reference_joint(model, prompt(5), steps=32, threshold=0.5, gen_length=10, max_post_steps=2)
    out = generate(model, prompt(5), editing_threshold=0.0, **arguments)
    assert out.answers[0].tolist() == expected.answer
    # Without an editing threshold the same model is decoded as LLaDA2.0.
    plain = generate(model, prompt(5), **arguments)
    assert torch.equal(plain.sequences, generate(model, prompt(5), threshold=0.95, **arguments).sequences)


def test_sampling_repeats_with_the_generator(model, prompt):
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        out = generate(model, prompt(11), temperature=0.7, top_k=20, generator=generator, **ARGUMENTS)
        assert not {MASK, DELETE, SPLIT} & set(out.answers[0].tolist())
        return out.answers[0].tolist()

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split_token_id": None}, r"delete_token_id=126 and split_token_id=None.*both"),
        ({"delete_token_id": 500}, r"config.delete_token_id=500.*0 to 127"),
        ({"delete_token_id": 127}, r"delete_token_id=127.*different ids"),
        ({"delete_token_id": 125}, r"delete_token_id=125.*different ids"),
    ],
)
def test_bad_configs(model, prompt, monkeypatch, changes, message):
    for name, value in changes.items():
        monkeypatch.setattr(model.config, name, value)
    with pytest.raises(ValueError, match=message):
        generate(model, prompt(3), **ARGUMENTS)
    generate(model, prompt(3), gen_length=4, block_length=BLOCK)
