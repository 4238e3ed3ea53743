"""Run a function on several processes with gloo, with a time-out, and bring back what each returned or raised."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from processes import start

DEADLINE = 800.0
"""Seconds for one call of `run_ranks`, starting the processes included: a guard against a hang, below pytest's own.

On a busy machine the first call alone takes minutes. No test may count on a rank being quick.
"""


def _worker(
    rank: int, world: int, folder: str, collective_timeout: float, function: Any, args: tuple[Any, ...]
) -> None:
    result: tuple[str, Any]
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=collective_timeout),
        )
        result = ("value", function(rank, *args))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        result = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    path = Path(folder) / f"result{rank}"
    path.with_suffix(".part").write_bytes(pickle.dumps(result))
    path.with_suffix(".part").rename(path)


def start_ranks(
    world: int, function: Callable[..., Any], *args: Any, collective_timeout: float = 600.0
) -> tuple[list[Any], Path]:
    """Processes of `function(rank, *args)`, and the folder that their results go to."""
    folder = Path(tempfile.mkdtemp())
    ranks = range(world)
    return [start(_worker, rank, world, str(folder), collective_timeout, function, args) for rank in ranks], folder


def collect(processes: list[Any], folder: Path, deadline: float = DEADLINE) -> list[tuple[str, Any]]:
    """Each rank's ("value", it), ("error", (type, message, traceback)), or ("lost", exit code)."""
    end = time.monotonic() + deadline
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    results: list[tuple[str, Any]] = []
    for rank, process in enumerate(processes):
        path = folder / f"result{rank}"
        results.append(pickle.loads(path.read_bytes()) if path.exists() else ("lost", process.exitcode))
    shutil.rmtree(folder)
    if hanging:
        errors = [value[2] for kind, value in results if kind == "error"]
        raise AssertionError("\n".join([f"ranks {hanging} still ran after {deadline:.0f} s", *errors]))
    return results


def run_ranks(world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What `function(rank, *args)` returned on each rank; fails with what went wrong first."""
    results = collect(*start_ranks(world, function, *args, **options))
    failed = [(rank, kind, value) for rank, (kind, value) in enumerate(results) if kind != "value"]
    # A rank that fails takes the others' collectives along: theirs are not the cause.
    failed.sort(key=lambda entry: entry[1] == "error" and entry[2][0] == "ExpertParallelError")
    for rank, kind, value in failed:
        raise AssertionError(f"rank {rank}: {value[2] if kind == 'error' else value}")
    return [value for _, value in results]
