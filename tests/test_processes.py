"""What the tests on ranks stand on: nothing stays in a process, errors and hangs come back."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
from distributed import collect, run_ranks, start_ranks


def leave_and_look(rank: int) -> Any:
    seen = (
        torch.get_default_dtype(), hasattr(torch.Tensor, "left"), os.environ.get("EPOCH_MOE_LEFT"),
        torch.rand(1).item(), random.random(), torch.get_num_threads(), os.environ["EPOCH_MOE_GIVEN"],
    )  # fmt: skip
    torch.set_default_dtype(torch.float64)
    torch.Tensor.left = True  # type: ignore[attr-defined]
    os.environ["EPOCH_MOE_LEFT"] = "1"
    return seen


def test_every_call_begins_from_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for given in "ab":  # the environment is this process's own, as it is at the call
        monkeypatch.setenv("EPOCH_MOE_GIVEN", given)
        calls += run_ranks(2, leave_and_look)
    assert [seen[:3] for seen in calls] == [(torch.float32, False, None)] * 4
    assert len({seen[3:6] for seen in calls}) == 1 and [seen[6] for seen in calls] == ["a", "a", "b", "b"]


def fail(rank: int) -> None:
    if rank == 1:
        raise KeyError("of rank 1")


def test_an_error_comes_back_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*in fail\n.*KeyError: 'of rank 1'"):
        run_ranks(2, fail)


def hang(rank: int) -> None:
    if rank == 0:
        time.sleep(3600)


def test_a_hang_is_an_error_and_leaves_no_process() -> None:
    processes, folder = start_ranks(2, hang)
    processes[1].join()
    with pytest.raises(AssertionError, match=r"ranks \[0\] still ran after 0 s"):
        collect(processes, folder, deadline=0.1)
    assert not any(process.is_alive() for process in processes) and not folder.exists()
