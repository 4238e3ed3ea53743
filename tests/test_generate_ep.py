"""The expert-parallel example: answers in order, the same for any number of processes, under real torchrun too."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import Script

from epoch_moe.problems import generate_problems

SCRIPT = Path(__file__).parent.parent / "examples" / "generate_ep.py"
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--gen-length", "64")
PROMPTS = [problem.prompt for problem in generate_problems(5, 0)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


def torchrun(world: int, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), str(SCRIPT),
            *OPTIONS, *arguments,
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_by_hand(prompts: list[Path], port: int, *arguments: str) -> list[Script]:
    """Processes without torchrun, which would end the others as soon as one of them fails; prompts by rank."""
    ranks = []
    for rank, path in enumerate(prompts):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(prompts))}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        ranks.append(Script(SCRIPT, "--device", "cpu", "--prompts", str(path), *arguments, environment=place))
    return ranks


def by_hand(prompts: list[Path], port: int, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """How processes that were started by hand ended."""
    return [rank.wait(400) for rank in start_by_hand(prompts, port, *arguments)]


def test_answers_do_not_depend_on_ranks_or_layout(prompts: Path, tmp_path: Path) -> None:
    answers = {}
    for world, layout in ((1, "sharded"), (2, "sharded"), (2, "replicated")):
        output = tmp_path / f"{world}{layout}.jsonl"
        options = ("--output", str(output), "--layout", layout, "--report")
        if (world, layout) == (2, "sharded"):
            process = torchrun(world, "--prompts", str(prompts), *options)
            try:
                _, told = process.communicate(timeout=400)
            finally:
                end(process)
            assert process.returncode == 0, told
        else:
            done = by_hand([prompts] * world, free_port(), *OPTIONS, *options)
            told = "".join(one.stderr for one in done)
            assert all(one.returncode == 0 for one in done), told
        assert f"rank {world - 1}: " in told and "5 answers written" in told
        answers[world, layout] = [json.loads(line) for line in output.read_text().splitlines()]
    first = answers.pop((1, "sharded"))
    assert [answer["prompt"] for answer in first] == PROMPTS
    assert all(answer["finish_reason"] == "eos" and answer["text"] for answer in first)
    assert all(other == first for other in answers.values())


def test_bad_arguments_end_every_process(tmp_path: Path) -> None:
    for done in by_hand([tmp_path / "none.txt"] * 2, free_port()):
        assert done.returncode != 0 and "none.txt: no such file" in done.stderr
    (tmp_path / "gap.txt").write_text("a\n\nb\n")
    (done,) = by_hand([tmp_path / "gap.txt"], free_port())
    assert done.returncode != 0 and "line 2 is empty" in done.stderr


def test_a_taken_port_ends_all_processes(prompts: Path) -> None:
    with socket.socket() as other:  # somebody else's server, which never answers
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = by_hand([prompts, prompts], other.getsockname()[1], "--timeout", "5")
    assert all(one.returncode != 0 for one in done)
    assert "EADDRINUSE" in done[0].stderr, done[0].stderr
    assert "is the port taken?" in done[1].stderr, done[1].stderr


def test_other_prompts_on_another_process_end_both_before_the_work(prompts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("\n".join(PROMPTS[::-1]) + "\n")
    for one in by_hand([prompts, other], free_port(), "--timeout", "400"):
        assert one.returncode == 1 and "--prompts: ranks [1] have another one than rank 0" in one.stderr, one.stderr
        assert "patched" not in one.stderr


def test_an_output_that_cannot_be_written_is_told_before_the_work(prompts: Path) -> None:
    (done,) = by_hand([prompts], 1, "--output", "/nonexistent/a.jsonl")  # port 1: it must not come so far
    assert done.returncode == 1 and "--output /nonexistent/a.jsonl: its folder does not exist" in done.stderr


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """More prompts than any test waits for."""
    path = tmp_path / "many.txt"
    path.write_text("\n".join(PROMPTS * 200))
    return path


def test_an_interrupt_ends_all_processes(many: Path) -> None:
    ranks = start_by_hand([many, many], free_port(), "--batch-size", "1")
    end = time.monotonic() + 400
    while "batch/s" not in ranks[0].printed("stderr") and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1)
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGINT)
    for number, done in enumerate(rank.wait(400) for rank in ranks):
        assert done.returncode == 130 and f"rank {number}: interrupted" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow  # a minute of imports on a busy machine; the processes themselves are tested above
def test_torchrun_passes_an_interrupt_on(many: Path) -> None:
    process = torchrun(2, "--prompts", str(many), "--batch-size", "1")
    assert process.stderr is not None
    for line in process.stderr:
        if "patched" in line or "updated" in line:
            break
    time.sleep(2)
    os.kill(process.pid, signal.SIGINT)  # torchrun gives every process a session of its own, and passes it on
    try:
        _, rest = process.communicate(timeout=600)
    finally:
        end(process)
    assert process.returncode not in (0, None)
    assert "rank 0: interrupted" in rest and "rank 1: interrupted" in rest, rest
    assert rest.count("Traceback") <= 1, rest  # torchrun's own
    ranks = [int(pid) for pid in re.findall(r"Sending process (\d+) closing signal", rest)]
    assert len(ranks) == 2
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
