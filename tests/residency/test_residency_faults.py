"""Files that change under a model, reads that fail, forks, and two models on one file."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from helpers import GOLDEN
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from epoch_moe import ResidencyConfig, generate, load_model, patch, residency_report, unpatch
from epoch_moe.models.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from epoch_moe.residency.sources import ResidencyError

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
IDS = torch.arange(48).view(2, 24) % 120
SMALL = ResidencyConfig(budget=0.25)
ARGUMENTS = {"gen_length": 16, "block_length": 8, "steps": 8}
PROMPT = torch.arange(7)[None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "llada2", tmp_path / "checkpoint")


def resident(folder: Path, residency: ResidencyConfig = SMALL) -> Any:
    return load_model(folder, residency=residency)[0]


def tokens(model: Any) -> list[int]:
    return generate(model, PROMPT, **ARGUMENTS).answers[0].tolist()


@pytest.fixture
def want() -> list[int]:
    model, _ = load_model(GOLDEN / "llada2")
    patch(model)
    return tokens(model)


def test_a_file_truncated_between_two_answers(folder: Path, want: list[int]) -> None:
    model, path = resident(folder), folder / "model.safetensors"
    assert tokens(model) == want
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ResidencyError, match=r"cannot read model\.layers\.\d+\.mlp\..* from .*model\.safetensors"):
        tokens(model)
    with pytest.raises(ResidencyError):
        unpatch(model)
    assert model._epoch_moe.residency is not None, "still patched"
    assert all(p.is_meta for name, p in model.named_parameters() if ".experts." in name)


def test_a_file_that_is_written_to(folder: Path, want: list[int]) -> None:
    model, path = resident(folder), folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(0, 0))
    with pytest.raises(ResidencyError, match="it was written to"):
        tokens(model)


def test_a_read_error_ends_the_answer_and_the_next_one_is_right(
    folder: Path, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, original, calls = resident(folder), os.preadv, []

    def fails(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ResidencyError, match="Input/output error"):
        tokens(model)
    monkeypatch.setattr(os, "preadv", original)
    assert tokens(model) == want
    unpatch(model)
    patch(model)
    assert tokens(model) == want


def test_two_models_on_one_file(folder: Path, want: list[int]) -> None:
    one, other = resident(folder), resident(folder, ResidencyConfig(budget=0.5, policy="lru", drop_cache=True))
    assert tokens(one) == want and tokens(other) == want
    del one
    gc.collect()
    assert tokens(other) == want


def test_a_forked_process_decodes(folder: Path, want: list[int]) -> None:
    model = resident(folder)
    spilled, _ = load_model(folder)
    with torch.no_grad():
        spilled.lm_head.weight.mul_(1.0)
    patch(spilled, residency=ResidencyConfig(budget=0.25, source=None))
    assert tokens(model) == want
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if tokens(model) == want and tokens(spilled) == want else 2
        finally:
            os._exit(status)
    assert tokens(model) == want
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tokens(spilled) == want


def test_threads_share_a_model(folder: Path, want: list[int]) -> None:
    model = resident(folder)
    with ThreadPoolExecutor(3) as pool:
        assert all(got == want for got in pool.map(lambda _: tokens(model), range(3)))


def test_never_are_all_experts_in_memory(tmp_path: Path) -> None:
    config = LLaDA2MoeConfig.from_pretrained(GOLDEN / "llada2")
    config.moe_intermediate_size, config.hidden_size = 512, 256
    model = LLaDA2MoeModelLM(config).eval()
    experts = sum(p.numel() * 4 for name, p in model.named_parameters() if ".experts." in name)
    others = sum(p.numel() * 4 for p in model.parameters()) - experts
    config.save_pretrained(tmp_path)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    want = model(IDS).logits.detach()
    del model
    budget = experts // 4
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        small, _ = load_model(tmp_path, residency=ResidencyConfig(budget=budget))
        patch(small, None)
        with torch.no_grad():
            got = small(IDS).logits
    assert torch.allclose(got, want, atol=1e-4)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    now = peak = 0
    mapped = (tmp_path / "model.safetensors").stat().st_size  # reading the other tensors maps the file: no memory
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes() if abs(event.nbytes()) != mapped else 0
        peak = max(peak, now)
    activations = 2_000_000
    assert budget / 2 < peak < budget + others + activations < experts
    assert residency_report(small).fast_bytes <= budget


def on_rank(rank: int, want: list[int]) -> tuple[bool, int, int]:
    model, _ = load_model(GOLDEN / "llada2", ep_group=torch.distributed.group.WORLD, residency=SMALL)
    got = tokens(model) == want
    report = residency_report(model)
    return got, report.num_experts, report.placement.misses


def test_each_rank_has_a_part_of_its_own_experts(want: list[int]) -> None:
    results = run_ranks(2, on_rank, want)
    assert all(same and misses for same, _, misses in results)
    assert len({experts for _, experts, _ in results}) == 1
    model = resident(GOLDEN / "llada2")
    assert results[0][1] * 2 == residency_report(model).num_experts
