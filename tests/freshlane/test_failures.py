"""Ranks that differ, stall or die: errors that say so, in time, instead of other tokens or a hang."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from distributed import DEADLINE, collect, run_ranks, start_ranks
from ep_model import PROMPTS, answers, whole_model
from helpers import GOLDEN

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.freshlane.collectives import ExpertParallelError
from epoch_moe.plan.context import BlockPlanContext

SOURCE = str(GOLDEN / "llada2")
SLACK = 60.0
"""Seconds beyond the group's time-out within which the other ranks must have raised, on a busy machine too."""


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ExpertParallelError) as error:
        call()
    return str(error.value)


def shift(model: Any, name: str) -> None:
    """Change one number of one tensor, in its last place."""
    model.state_dict()[name].flatten()[-1] += 2.0**-10


def disagreeing(rank: int) -> dict[str, str]:
    """What each difference of rank 1 gives: nothing was exchanged before, so the group can be used again."""
    found = {}

    def case(
        name: str, change: Callable[[Any], None] = lambda model: None, config: EpochConfig | None = None, **options: Any
    ) -> None:
        model = whole_model(SOURCE)
        if rank == 1:
            change(model)
        epoch_moe.patch(model, config or EpochConfig(), ep_group=dist.group.WORLD, **options)
        found[name] = message_of(lambda: answers(model, PROMPTS[:1], model._epoch_moe.config))

    gate, bias = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.expert_bias"
    case("router", lambda model: shift(model, gate))
    case("bias", lambda model: shift(model, bias))
    case("attention", lambda model: shift(model, "model.layers.0.attention.dense.weight"))
    case("shared expert", lambda model: shift(model, "model.layers.1.mlp.shared_experts.up_proj.weight"))
    case("head, replicated", lambda model: shift(model, "lm_head.weight"), ep_layout="replicated")
    case("settings", lambda model: setattr(model.config, "rms_norm_eps", 0.5))
    case("layout", ep_layout="replicated" if rank else "sharded")
    case("capacity", ep_capacity=100 + rank)
    case("plan", config=EpochConfig(refresh_interval=5 + rank))
    return found


def test_ranks_that_differ_are_told_at_the_first_block() -> None:
    router, others = "router weights \\(checksum\\)", "weights outside of the experts \\(checksum\\)"
    want = {
        "router": router, "bias": router, "attention": others, "shared expert": others, "head, replicated": others,
        "settings": "model configuration: rms_norm_eps: rank 0: .*; rank 1: 0.5",
        "layout": "layout of rows: rank 0: sharded; rank 1: replicated",
        "capacity": "capacity: rank 0: 100; rank 1: 101",
        "plan": "plan: rank 0: .*refresh_interval=5.*rank 1: .*refresh_interval=6",
    }  # fmt: skip
    for found in run_ranks(2, disagreeing):
        assert found.keys() == want.keys()
        for name, pattern in want.items():
            assert re.search(f"disagree on {pattern}", found[name]), (name, found[name])


def plans_within_one_step(rank: int, want: dict[str, list[list[int]]]) -> str:
    """Rank 0 decodes under plans that are not the patched one, while rank 1 has nothing to do; then both differ."""
    model = whole_model(SOURCE)
    epoch_moe.patch(model, ep_group=dist.group.WORLD)
    for _ in range(2):  # known plans too
        for name, config in PLANS.items():
            with epoch_moe.in_step(model):
                got = answers(model, PROMPTS if rank == 0 else [], config)
            assert got == (want[name] if rank == 0 else []), name

    def differ() -> None:
        with epoch_moe.in_step(model):
            for config in (PLANS["one support"], PLANS["natural"])[:: 1 if rank else -1]:
                answers(model, PROMPTS[:2], config)

    return message_of(differ)


PLANS: dict[str, EpochConfig | None] = {
    "one support": EpochConfig(coverage=0.6, coverage_floor=0.55, refresh_interval=3, support_scope="batch"),
    "natural": EpochConfig(refresh_interval=2),
    "dense": None,
}


def test_idle_ranks_follow_a_plan_that_is_not_theirs_and_busy_ones_must_have_the_same() -> None:
    model = whole_model(SOURCE)
    epoch_moe.patch(model)
    want = {name: answers(model, PROMPTS, config) for name, config in PLANS.items()}
    for message in run_ranks(2, plans_within_one_step, want):
        assert re.search("disagree on plan: rank 0: .*refresh_interval=2.*rank 1: .*support_scope='batch'", message)


def other_prompts(rank: int) -> str:
    model = whole_model(SOURCE)
    epoch_moe.patch(model, ep_group=dist.group.WORLD, ep_layout="replicated")
    answers(model, PROMPTS[:1], EpochConfig())  # the same, so far
    return message_of(lambda: answers(model, PROMPTS[: 1 + rank], EpochConfig()))


def test_replicated_ranks_with_other_prompts_are_an_error() -> None:
    for message in run_ranks(2, other_prompts):
        assert "would run different forwards next" in message


def lost(rank: int, victim: int, how: str, timeout: float, folder: str) -> None:
    """Decode until rank ``victim`` is killed or stalls in the middle of a block.

    Leaves when that was, or when its error came, since when it had been waiting, and the error.
    """
    group = dist.new_group()
    model = whole_model(SOURCE)
    epoch_moe.patch(model, EpochConfig(), ep_group=group)
    owner, method = (BlockPlanContext, "end_iteration") if how == "killed" else (ExpertWeights, "compute")
    original, seen = getattr(owner, method), []
    began = 0.0

    def leave(text: str) -> None:
        part = Path(folder) / f"part{rank}"
        part.write_text(json.dumps([time.time(), began, text]))
        part.rename(Path(folder) / f"left{rank}")

    def fatal(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal began
        seen.append(1)
        if len(seen) == 3:
            # From here on a rank waits for the victim: what came before may have been slow.
            c10d._set_pg_timeout(timedelta(seconds=timeout), group)
            began = time.time()
        if len(seen) == 3 and rank == victim:
            leave("lost")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return original(self, *args, **kwargs)

    setattr(owner, method, fatal)
    try:
        for _ in range(50):
            answers(model, [PROMPTS[rank]], EpochConfig())
    except ExpertParallelError as error:
        leave(str(error))
        raise


def lose_a_rank(victim: int, how: str, timeout: float, folder: Path, world: int = 4) -> tuple[float, float]:
    """Seconds until the last of the others had its error, and for how long they had waited at least."""
    folder.mkdir()
    processes, results = start_ranks(world, lost, victim, how, timeout, str(folder))
    left = [folder / f"left{rank}" for rank in range(world)]
    if how == "killed":
        ends = collect(processes, results)
        assert ends.pop(victim) == ("lost", -signal.SIGKILL)
        assert all(kind == "error" and value[0] == "ExpertParallelError" for kind, value in ends), ends
    else:
        end = time.monotonic() + DEADLINE
        while not all(path.exists() for path in left) and time.monotonic() < end:
            time.sleep(0.1)
        for process in processes:  # gloo takes its time to take down connections to a rank that is still there
            process.kill()
            process.join()
    at, began, messages = zip(*(json.loads(path.read_text()) for path in left), strict=True)
    layer = r"MoE layer \d+: " if how == "stalls" else r"(MoE layer \d+: |agreeing on the next forward)"
    for rank, message in enumerate(messages):
        if rank != victim:
            assert re.match(layer, message) and f"failed on rank {rank}" in message, message
    last = float(max(at)) - float(at[victim])
    assert last < timeout + SLACK, at
    return last, min(at[rank] - began[rank] for rank in range(world) if rank != victim)


def test_a_rank_that_is_killed_within_a_block_ends_the_others(tmp_path: Path) -> None:
    lose_a_rank(1, "killed", 120.0, tmp_path / "left")


def test_a_rank_that_stalls_ends_the_others_within_the_time_out(tmp_path: Path) -> None:
    timeout = 4.0
    _, waited = lose_a_rank(1, "stalls", timeout, tmp_path / "left", world=2)
    assert waited > timeout / 2  # nobody gave up at once


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_and_no_hang(tmp_path: Path) -> None:
    ends = [lose_a_rank(run % 4, "killed", 120.0, tmp_path / f"left{run}")[0] for run in range(20)]
    print(f"20 kills: the last of the others ended after {min(ends):.2f} to {max(ends):.2f} s, time-out 120 s")


def other_groups(rank: int) -> str | None:
    alone = dist.new_group([1])
    group = dist.new_group()
    c10d._set_pg_timeout(timedelta(seconds=3), group)
    model = whole_model(SOURCE)
    epoch_moe.patch(model, ep_group=group if rank == 0 else alone)
    if rank == 1:
        answers(model, PROMPTS[:1], EpochConfig())  # all experts are here: it asks nobody
    message = message_of(lambda: answers(model, PROMPTS[:1], EpochConfig())) if rank == 0 else None
    dist.barrier()  # rank 1 was there all the same
    return message


@pytest.mark.slow
def test_a_rank_that_was_given_another_group_is_missed_at_the_first_block() -> None:
    message, _ = run_ranks(2, other_groups)
    assert message.startswith("comparing models and settings before the first forward failed on rank 0")
