"""`generate` against runs of the released loop, and against the plain reference loop on everything else."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from reference_loop import block_logits, reference_generate
from torch import Tensor, nn

from epoch_moe import patched
from epoch_moe.decoding import choose_rows, generate, transfer_schedule

BLOCK, MASK = 8, 125
RUNS = [0, 1, 2]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("config", "use_cache"), [(None, True), (None, False), ("dense", True), ("exact", False)])
def test_fp32_tokens_equal_the_released_loop(load_checkpoint, golden_run, run, use_cache, config):
    arguments, data = golden_run("llada2", run)
    model = load_checkpoint("llada2")
    with nullcontext() if config is None else patched(model, config):
        out = generate(model, data["prompt"], use_cache=use_cache, **arguments)
    assert torch.equal(out.sequences, data["output"])
    assert out.forwards == data["trace_input_ids"].shape[0]
    assert out.prefill_forwards == 0
    assert out.tokens_per_forward == out.lengths[0] / out.forwards


@pytest.mark.parametrize("run", RUNS)
def test_fp32_forwards_receive_the_released_ids(load_checkpoint, golden_run, traced, run):
    arguments, data = golden_run("llada2", run)
    model = load_checkpoint("llada2")
    with traced(model) as calls:
        generate(model, data["prompt"], use_cache=False, **arguments)
    assert [call["input_ids"][0].tolist() for call in calls] == golden_trace(data)


@pytest.mark.parametrize("run", RUNS)
def test_fp32_cached_forwards_receive_the_end_of_the_released_ids(load_checkpoint, golden_run, traced, run):
    arguments, data = golden_run("llada2", run)
    model = load_checkpoint("llada2")
    with traced(model) as calls:
        generate(model, data["prompt"], **arguments)
    committed = width = 0
    for call, row in zip(calls, golden_trace(data), strict=True):
        expected = row[-BLOCK:]
        if len(row) > width:  # the first forward of a block carries everything that is not in the cache yet
            expected, width = row[committed:], len(row)
            committed = width - BLOCK
        assert call["input_ids"][0].tolist() == expected
        assert call["position_ids"][0].tolist() == list(range(width - len(expected), width))


@pytest.mark.parametrize(("folder", "tolerance"), [("llada2", 1e-4), ("llada2_bf16", 2e-2)])
@pytest.mark.parametrize("run", RUNS)
def test_released_decisions_are_ours_up_to_rounding(load_checkpoint, golden_run, folder, tolerance, run):
    arguments, data = golden_run(folder, run)
    canvas = data["prompt"][0].tolist() + data["output"][0].tolist()
    check_decisions(load_checkpoint(folder), golden_trace(data), canvas, arguments, tolerance)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_bf16_decisions_are_the_released_rules_up_to_rounding(load_checkpoint, golden_run, traced, run, use_cache):
    """Golden bf16 runs hold exact ties, which the released loop itself breaks differently on another CPU.

    So every decision of our run is checked against the logits of a full window on the same ids.
    """
    arguments, data = golden_run("llada2_bf16", run)
    model = load_checkpoint("llada2_bf16")
    with traced(model) as calls:
        out = generate(model, data["prompt"], use_cache=use_cache, **arguments)
    canvas, trace = [], []
    for call in calls:
        ids, first = call["input_ids"][0].tolist(), int(call["position_ids"][0, 0])
        canvas[first : first + len(ids)] = ids
        trace.append(list(canvas))
    assert len(trace) == out.forwards == data["trace_input_ids"].shape[0]
    assert trace[0] == golden_trace(data)[0]
    final = data["prompt"][0].tolist() + out.sequences[0].tolist()
    check_decisions(model, trace, final, arguments, tolerance=2e-2)


def golden_trace(data: dict[str, Tensor]) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in data["trace_input_ids"]]


def check_decisions(
    model: nn.Module, trace: list[list[int]], final: list[int], arguments: dict, tolerance: float
) -> None:
    """Every forward's commits are those of our rules, if probabilities may move by `tolerance`."""
    schedule = transfer_schedule(BLOCK, arguments["steps"])
    step = 0
    for number, ids in enumerate(trace):
        step = 0 if number == 0 or len(ids) > len(trace[number - 1]) else step + 1
        following = trace[number + 1] if number + 1 < len(trace) else final
        # The run's last block may reach behind the answer; those rows are unknown after the last forward.
        after = torch.tensor([*following, *[-1] * BLOCK][: len(ids)])[-BLOCK:]
        live = torch.tensor(ids[-BLOCK:]) == MASK
        assert torch.equal(after[~live & (after >= 0)], torch.tensor(ids)[-BLOCK:][~live & (after >= 0)])
        probs = block_logits(model, ids, BLOCK).softmax(-1)
        best = probs.amax(-1)
        taken = live & (after != MASK) & (after >= 0)
        chosen = probs.gather(-1, after.clamp(min=0)[:, None])[:, 0]
        assert bool((chosen >= best * (1 - tolerance))[taken].all()), f"forward {number}: token"
        if bool((after >= 0).all()):
            # Rows near a decision's edge may fall either way: let rounding speak for what was done.
            favoured = torch.where(taken, best * (1 + tolerance), best * (1 - tolerance))
            rows = choose_rows(favoured[None], live[None], schedule[step], arguments["threshold"])[0]
            assert torch.equal(rows, taken), f"forward {number}: rows"


CASES = [
    {"gen_length": 24, "threshold": 0.0116, "steps": 8},
    {"gen_length": 24, "threshold": 0.95, "steps": 3},  # 3 + 3 + 2 rows
    {"gen_length": 17, "threshold": 0.012, "steps": 1},
    {"gen_length": 9, "threshold": 0.0, "steps": 32},
    {"gen_length": 1, "threshold": 0.95, "steps": 8},
    {"gen_length": 20, "threshold": 0.5, "steps": 8, "minimal_topk": 5},  # steps capped at 4
    {"gen_length": 30, "threshold": 0.0118, "steps": 8, "eos_early_stop": True},
    {"gen_length": 12, "threshold": 0.0118, "steps": 8, "block_length": 5},
]


LENGTHS = (1, 8, 11, 27)
PAIRS = [(case, LENGTHS[(number + shift) % 4]) for number, case in enumerate(CASES) for shift in (0, 2)]


@pytest.mark.parametrize(("case", "length"), PAIRS, ids=str)
def test_tokens_and_forwards_equal_the_reference_loop(model, prompt, case, length):
    ids = prompt(length, seed=length)
    arguments = {"block_length": BLOCK, **case}
    # An end id that this model does write, at varying places.
    answer = reference_generate(model, ids, **{**arguments, "eos_early_stop": False}).answer
    eos = answer[len(answer) // 2]
    for eos_token_id in (124, eos):
        expected = reference_generate(model, ids, eos_token_id=eos_token_id, **arguments)
        for use_cache in (True, False):
            out = generate(model, ids[None], eos_token_id=eos_token_id, use_cache=use_cache, **arguments)
            assert out.answers[0].tolist() == expected.answer
            assert out.forwards == expected.forwards
            assert out.finish_reasons[0] == ("eos" if expected.answer[-1] == eos_token_id else "length")
