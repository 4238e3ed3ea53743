"""What the tracker takes forwards for, one by one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import additive, block_causal
from torch import Tensor

from epoch_moe.follow.report import REASONS
from epoch_moe.follow.transitions import Hints, Seen, Taken, Tracker

M, B = 9, 4  # mask token, block length


class FakeCache:
    pass


def tracker(block_length: int | None = None, editing: bool | None = False) -> Tracker:
    return Tracker(M, Hints(block_length=block_length, editing=editing))


def seen(rows: Sequence[Sequence[int]] | Sequence[int], mask: str | Tensor | None = "block", **kwargs: object) -> Seen:
    ids_BS = torch.tensor(rows if isinstance(rows[0], (list, tuple)) else [rows])
    width = ids_BS.shape[1]
    masks = {
        "block": additive(block_causal(width, B)),
        "2-D": torch.ones_like(ids_BS),
        "open": torch.zeros(1, 1, width, width),
    }
    chosen = masks[mask] if isinstance(mask, str) else mask
    if (cache := kwargs.get("cache")) is not None:
        kwargs["cache"] = weakref.ref(cache)
    return Seen(ids_BS, mask=chosen, **{"additive": True, **kwargs})  # type: ignore[arg-type]


def kinds(follow: Tracker, *forwards: Seen) -> list[str]:
    return [d.reason or d.kind for d in map(follow.observe, forwards)]


def place(taken: Taken) -> tuple[int, int, bool]:
    return taken.begin, taken.end, taken.constant


def live(taken: Taken) -> list[int]:
    assert taken.live_BS is not None
    return taken.live_BS[0].nonzero().flatten().tolist()


def test_a_released_run() -> None:
    follow = tracker()
    first = follow.observe(seen([1, 2, 3, 4, 5, M, M, M]))
    assert (first.kind, first.cold, place(first), live(first)) == ("request", True, (4, 8, True), [5, 6, 7])
    again = follow.observe(seen([1, 2, 3, 4, 5, 6, M, M]))
    assert (again.kind, again.cold, live(again)) == ("iteration", False, [6, 7])
    repeat = follow.observe(seen([1, 2, 3, 4, 5, 6, M, M]))
    assert (repeat.kind, repeat.cold, place(repeat), live(repeat)) == ("repeat", True, (4, 8, True), [6, 7])
    other = follow.observe(seen([1, 2, 3, 4, 5, 6, 7, M], changed=True))
    assert (other.kind, other.cold, place(other), live(other)) == ("model", True, (4, 8, True), [7])
    block = follow.observe(seen([1, 2, 3, 4, 5, 6, 7, 8, M, M, M, M]))
    assert (block.kind, block.cold, place(block), live(block)) == ("block", True, (8, 12, True), [8, 9, 10, 11])
    other = follow.observe(seen([1, 2, 3, 5, 5, M, M, M]))
    assert (other.kind, place(other)) == ("request", (4, 8, True))


def test_a_block_is_all_rows_where_a_mask_hides_nothing_and_nothing_is_known() -> None:
    follow = tracker()
    assert place(follow.observe(seen([1, 2, M, M]))) == (0, 4, True)
    assert place(follow.observe(seen([1, 2, 3, 4, M, M, M, M], "open"))) == (4, 8, False)  # grown by 4
    assert follow.learned_length == B


@pytest.mark.parametrize("mask", [None, "2-D"])
def test_the_block_length_is_learned_from_growth(mask: str | None) -> None:
    follow = tracker()
    assert kinds(follow, seen([1, 2, M, M], mask), seen([1, 2, 3, M], mask)) == ["block_length"] * 2
    assert kinds(follow, seen([1, 2, 3, 4], mask)) == ["no_mask"]
    grown = follow.observe(seen([1, 2, 3, 4, M, M, M, M], mask))
    assert (grown.kind, grown.cold, place(grown)) == ("block", True, (4, 8, False))
    request = follow.observe(seen([1, 2, 2, 2, 2, 2, 2, 2, M, M, M, M], mask))
    assert (request.kind, place(request)) == ("request", (8, 12, False))


def test_nothing_is_learned_from_another_request() -> None:
    follow = tracker()
    forwards = [seen([1, 2, M, M], None), seen([1, 3, 3, 3, 3, 3, 3, M, M, M, M], None)]
    assert kinds(follow, *forwards) == ["block_length"] * 2 and follow.learned_length is None


def test_a_given_block_length_serves_the_first_forward() -> None:
    assert place(tracker(B).observe(seen([1, 2, 3, 4, 5, M, M, M], "2-D"))) == (4, 8, False)
    assert place(tracker(B).observe(seen([1, M, M], "2-D"))) == (0, 3, False)
    # Told otherwise than the mask shows: rows 4 and 5 see the block.
    assert place(tracker(6).observe(seen([1] * 8 + [M] * 4))) == (6, 12, False)
    assert place(tracker(8).observe(seen([1] * 8 + [M] * 4))) == (4, 12, True)


def masks_that_do_not_hide() -> list[tuple[str, Tensor | None, dict[str, object]]]:
    good = additive(block_causal(8, B))
    leak = good.clone()
    leak[0, 0, 3, 6] = 0.0
    per_sequence = good.expand(2, 1, 8, 8).clone()
    per_sequence[1] = 0.0
    blind = good.clone()
    blind[0, 0, 1] = float("-inf")
    return [
        ("none", None, {}),
        ("2-D", torch.ones(1, 8), {}),
        ("0/1", block_causal(8, B).float(), {}),
        ("weak", additive(block_causal(8, B)).clamp_min(-50.0), {}),
        ("not additive", good, {"additive": False}),
        ("one row leaks", leak, {}),
        ("one sequence leaks", per_sequence, {}),
        ("a row that sees nothing sees everything", blind, {}),
        ("integers", block_causal(8, B).long(), {}),
        ("more keys than rows", torch.nn.functional.pad(good, (0, 2), value=float("-inf")), {}),
        ("one row for all", torch.zeros(1, 1, 1, 8), {}),
    ]


@pytest.mark.parametrize("case", masks_that_do_not_hide(), ids=lambda case: case[0])
def test_rows_before_the_block_are_constant_only_behind_a_mask_that_hides_it(
    case: tuple[str, Tensor | None, dict[str, object]],
) -> None:
    _, mask, more = case
    row = [1, 2, 3, 4, 5, M, M, M]
    rows = [row, row] if mask is not None and mask.shape[0] == 2 else [row]
    assert not tracker(B).observe(seen(rows, mask, **more)).constant


@pytest.mark.parametrize(
    "mask",
    [
        additive(block_causal(8, B)),
        additive(block_causal(8, B)).bfloat16(),
        block_causal(8, B),
        additive(block_causal(8, B)).clamp_min(torch.finfo(torch.float32).min),
        additive(block_causal(8, B)).expand(2, 3, 8, 8),
    ],
    ids=["-inf", "bf16", "bool", "lowest value", "batch and heads"],
)
def test_masks_that_hide(mask: Tensor) -> None:
    row = [1, 2, 3, 4, 5, M, M, M]
    assert place(tracker().observe(seen([row] * mask.shape[0], mask))) == (4, 8, True)


def test_another_mask_or_other_positions_begin_anew() -> None:
    row, mask, positions = [1, 2, 3, 4, 5, M, M, M], additive(block_causal(8, B)), torch.arange(8)[None]
    follow, before = tracker(), [1, 2, 3, 4, *[M] * 4]
    assert kinds(follow, seen(before, mask, positions=positions)) == ["request"]
    assert kinds(follow, seen(row, mask.clone(), positions=positions.clone())) == ["iteration"]
    assert kinds(follow, seen(row, mask, positions=positions + 1)) == ["inputs"]
    assert kinds(follow, seen(row, mask.bool(), positions=positions + 1)) == ["inputs"]
    assert kinds(follow, seen(row, None)) == ["block_length"]


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_is_written_to_begins_anew(inference: bool) -> None:
    with torch.inference_mode(inference):
        rows, mask = [[1, 2, 3, 4, *[5] * n, *[M] * (4 - n)] for n in range(4)], additive(block_causal(8, B))
        follow = tracker(B)
        assert kinds(follow, seen(rows[0], mask), seen(rows[1], mask)) == ["request", "iteration"]
        mask[0, 0, 0, 7] = 0.0
        taken = follow.observe(seen(rows[2], mask))
        assert (taken.kind, taken.constant) == ("inputs", False)
        assert kinds(follow, seen(rows[3], mask)) == ["iteration"]


def test_masked_again_and_the_same_request_again_begin_anew() -> None:
    follow = tracker()
    prompt = [1, 2, 3, 4]
    assert kinds(follow, seen([*prompt, M, M, M, M]), seen([*prompt, 5, 6, M, M])) == ["request", "iteration"]
    assert kinds(follow, seen([*prompt, 5, M, M, M]), seen([*prompt, M, M, M, M])) == ["remask", "remask"]
    assert kinds(follow, seen([*prompt, 5, 6, M, M]), seen([*prompt, 5, M, 7, M])) == ["iteration", "remask"]


def test_edits_make_decoded_rows_live_but_not_the_given_ones() -> None:
    for editing in (None, True):
        follow = tracker(8, editing=editing)
        head = [1, 2, 3]
        assert live(follow.observe(seen([*head, *[M] * 5], None))) == [3, 4, 5, 6, 7]
        assert live(follow.observe(seen([*head, 6, 6, 6, M, M], None))) == [3, 4, 5, 6, 7]
        edit = follow.observe(seen([*head, 6, 7, 6, 6, M], None))
        assert (edit.kind, edit.cold, live(edit)) == ("edit", False, [3, 4, 5, 6, 7])
        assert live(follow.observe(seen([*head, 6, 7, 6, 6, 8], None))) == [3, 4, 5, 6, 7]
        assert kinds(follow, seen([*head, 6, 7, 8, 6, 8], None)) == ["edit"]


def test_tokens_that_a_loop_would_not_replace_are_another_requests() -> None:
    def after(editing: bool | None, row: list[int]) -> str:
        follow = tracker(8, editing=editing)
        for before in ([1, 2, 3, *[M] * 5], [1, 2, 3, 6, 6, 6, M, M]):
            follow.observe(seen(before, None))
        taken = follow.observe(seen(row, None))
        assert taken.cold == (taken.kind == "request")
        return taken.kind

    assert after(None, [1, 2, 3, 6, 7, 6, 6, M]) == "edit"
    assert after(False, [1, 2, 3, 6, 7, 6, 6, M]) == "request"  # this loop does not edit
    assert after(None, [1, 2, 3, 6, 7, 7, 6, M]) == "request"  # most of what it had
    assert after(None, [1, 2, 3, 6, 7, 6, M, M]) == "request"  # nothing was decoded


def test_a_given_row_that_changes_is_another_request() -> None:
    follow = tracker()
    forwards = [[1, 2, M, M], [1, 2, 3, M], [1, 5, 3, M]]
    assert kinds(follow, *map(seen, forwards)) == ["request", "iteration", "request"]
    assert kinds(follow, seen([1, 5, 3, 4]), seen([5, 5, 3, 4])) == ["iteration", "no_mask"]


def test_a_loop_that_leaves_a_block_at_its_last_mask_does_not_edit() -> None:
    follow = tracker(editing=None)
    prompt = [1, 2, 3, 4]
    follow.observe(seen([*prompt, M, M, M, M]))
    assert live(follow.observe(seen([*prompt, 5, 6, 7, M]))) == [4, 5, 6, 7]
    follow.observe(seen([*prompt, 5, 6, 7, 8, M, M, M, M]))
    assert follow.editing is False
    assert live(follow.observe(seen([*prompt, 5, 6, 7, 8, 1, M, M, M]))) == [9, 10, 11]
    # A look at a block without masks puts that in doubt, an edit settles it.
    assert live(follow.observe(seen([*prompt, 5, 6, 7, 8, 1, 2, 3, 4]))) == [8, 9, 10, 11]
    follow.observe(seen([*prompt, 5, 6, 7, 8, 1, 2, 3, 5]))
    assert follow.editing is True
    assert follow.observe(seen([*prompt, 5, 6, 7, 8, 1, 2, 3, 5, M, M, M, M])).kind == "block"
    assert live(follow.observe(seen([*prompt, 5, 6, 7, 8, 1, 2, 3, 5, 6, M, M, M]))) == [12, 13, 14, 15]


def test_a_loop_that_looks_at_finished_blocks_stays_in_doubt() -> None:
    follow = tracker(editing=None)
    prompt = [1, 2, 3, 4]
    for row in ([M, M, M, M], [5, 6, 7, M], [5, 6, 7, 8], [5, 6, 7, 8, M, M, M, M]):
        taken = follow.observe(seen(prompt + row))
    assert follow.editing is None and taken.kind == "block"
    assert live(follow.observe(seen([*prompt, 5, 6, 7, 8, 9 - 8, M, M, M]))) == [8, 9, 10, 11]


def test_forwards_without_masks_are_no_decoding() -> None:
    follow = tracker()
    assert kinds(follow, seen([1, 2, 3, 4]), seen([1, 2, 3, 4])) == ["no_mask"] * 2
    assert kinds(follow, seen([1, 2, 3, 4, M, M, M, M]), seen([1, 2, 3, 4, 5, 5, 5, 5, 5])) == ["request", "no_mask"]
    assert kinds(follow, seen([1, 2, 3, 4, M, M, M, M])) == ["request"]


def test_masks_left_before_the_block_stay_live() -> None:
    follow = tracker()
    follow.observe(seen([1, 2, M, M], "2-D"))
    grown = follow.observe(seen([1, 2, 3, M, M, M, M, M], "2-D"))
    assert (grown.kind, grown.begin, live(grown)) == ("block", 4, [3, 4, 5, 6, 7])


def test_rows_before_the_block_that_change_are_another_request() -> None:
    follow = tracker()
    forwards = [[1, 2, 3, 4, M, M, M, M], [1, 2, 3, 5, 6, M, M, M], [1, 2, 3, 5, 6, 7, M, M]]
    assert kinds(follow, *map(seen, forwards)) == ["request", "request", "iteration"]
    assert kinds(follow, seen([[1, 2, 3, 5, 6, 7, M, M]] * 2)) == ["request"]
    assert kinds(follow, seen([1, 2, M, M])) == ["request"]


def canvas(*rows: list[int]) -> Seen:
    return seen(rows, None)


def test_a_fixed_canvas() -> None:
    follow = tracker(B)
    prompt = [1, 2, 3]
    first = follow.observe(canvas([*prompt, *[M] * 12]))
    assert (first.kind, place(first), live(first)) == ("request", (3, 7, False), [3, 4, 5, 6])
    assert follow.observe(canvas([*prompt, 4, M, M, 4, *[M] * 8])).kind == "iteration"
    second = follow.observe(canvas([*prompt, 4, 4, 4, 4, *[M] * 8]))
    assert (second.kind, second.cold, place(second)) == ("block", True, (7, 11, False))
    assert kinds(follow, canvas([*prompt, 4, 4, 4, 4, M, M, 5, M, M, M, M, M])) == ["iteration"]
    last = follow.observe(canvas([*prompt, *[4] * 8, M, M, M, M]))
    assert (last.kind, place(last)) == ("block", (11, 15, False))
    assert kinds(follow, canvas([*prompt, *[4] * 12])) == ["iteration"]
    assert place(follow.observe(canvas([*prompt, *[M] * 12]))) == (3, 7, False)  # the same prompt again
    assert place(follow.observe(canvas([1, *[M] * 12]))) == (1, 5, False)


def test_a_fixed_canvas_needs_its_block_length_and_sequences_in_one_block() -> None:
    assert kinds(tracker(), canvas([1, 2, 3, *[M] * 12])) == ["block_length"]
    follow = tracker(B)
    assert kinds(follow, canvas([1, 2, 3, *[M] * 12], [1, 2, *[M] * 13])) == ["ragged"]
    assert kinds(follow, canvas([1, 2, 3, *[M] * 12], [1, 2, 2, *[M] * 12])) == ["request"]
    uneven = follow.observe(canvas([1, 2, 3, 4, 4, 4, 4, *[M] * 8], [1, 2, 2, 4, 4, 4, *[M] * 9]))
    assert (uneven.kind, place(uneven)) == ("iteration", (3, 7, False))  # one is done with the block, one is not
    assert kinds(follow, canvas([1, 2, 3, 4, 4, 4, 4, M, 5, *[M] * 6], [1, 2, 2, 4, 4, 4, *[M] * 9])) == ["future"]


def test_a_canvas_under_a_block_causal_mask_shows_its_blocks() -> None:
    follow = tracker()
    first = follow.observe(seen([1, 2, 3, 4, 5, *[M] * 7]))
    assert (place(first), live(first)) == ((4, 8, True), [5, 6, 7])
    assert place(follow.observe(seen([1, 2, 3, 4, 5, 6, 7, 8, M, M, M, M]))) == (8, 12, True)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_masked_prompt_of_guidance_is_not_decoded(swapped: bool) -> None:
    def guided(*answer: int) -> Seen:
        rows = [[1, 2, 3, *answer], [M, M, M, *answer]]
        return canvas(*(rows[::-1] if swapped else rows))

    follow = tracker(B)
    first = follow.observe(guided(*[M] * 8))
    assert (first.kind, place(first)) == ("request", (3, 7, False))
    assert first.live_BS is not None and first.live_BS.sum(dim=1).tolist() == [4, 4]
    assert follow.observe(guided(5, M, M, 5, *[M] * 4)).kind == "iteration"
    second = follow.observe(guided(5, 5, 5, 5, *[M] * 4))
    assert (second.kind, place(second)) == ("block", (7, 11, False))
    # Two sequences of which one is behind are no such pair.
    behind = tracker(B).observe(canvas([1, 2, 3, 5, *[M] * 7], [1, 2, 3, *[M] * 8]))
    assert behind.live_BS is None or behind.live_BS[1, 3]


def test_cached_forwards() -> None:
    follow, cache = tracker(B), FakeCache()

    def block(past: int, *row: int, cache: object = cache) -> Seen:
        return seen(row, None, cache=cache, past=past)

    first = follow.observe(block(4, 5, M, M, M))
    assert (first.kind, place(first), live(first)) == ("request", (0, 4, False), [1, 2, 3])
    assert kinds(follow, block(4, 5, 6, M, M), block(4, 5, 6, 7, 8)) == ["iteration", "commit"]
    assert kinds(follow, block(8, M, M, M, M), block(12, M, M, M, M)) == ["request", "block"]
    assert kinds(follow, block(12, 1, M, M, M), block(4, 1, M, M, M)) == ["iteration", "request"]
    # Another request in the same place: its rows before the block are not to be seen.
    assert kinds(follow, block(4, 1, M, M, M, cache=FakeCache())) == ["request"]
    assert kinds(follow, block(4, 1, M, M, M), block(4, M, M, M, M)) == ["request", "remask"]
    assert kinds(follow, block(4, 1, 2, 3, 4, M, M, M, M)) == ["lead"]


def test_reasons_are_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    assert all(text and f"`{name}`" in page for name, text in REASONS.items())
