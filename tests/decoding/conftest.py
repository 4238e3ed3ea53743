"""Fixtures of the decoding tests: the golden checkpoints as models, and what generate's forwards received."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from helpers import GOLDEN
from safetensors.torch import load_file
from torch import Tensor

from epoch_moe.models.llada2 import LLaDA2MoeModelLM

BLOCK = 8


@cache
def load(name: str) -> LLaDA2MoeModelLM:
    return LLaDA2MoeModelLM.from_pretrained(GOLDEN / name, dtype="auto").eval()


@pytest.fixture
def model() -> LLaDA2MoeModelLM:
    """The fp32 golden LLaDA2.0 checkpoint; treat it as read-only."""
    return load("llada2")


@pytest.fixture(scope="session")
def load_checkpoint() -> Callable[[str], LLaDA2MoeModelLM]:
    return load


@pytest.fixture
def golden_run() -> Callable[[str, int], tuple[dict[str, Any], dict[str, Tensor]]]:
    """Arguments and tensors of a golden run of the released loop."""

    def read(folder: str, run: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        about = json.loads((GOLDEN / folder / f"generate{run}.json").read_text())
        special = ("what", "eos_id", "mask_id")
        arguments = {name: value for name, value in about.items() if name not in special}
        arguments |= {"eos_token_id": about["eos_id"], "mask_token_id": about["mask_id"]}
        return arguments, load_file(GOLDEN / folder / f"generate{run}.safetensors")

    return read


@pytest.fixture
def traced() -> Callable[[LLaDA2MoeModelLM], AbstractContextManager[list[dict[str, Any]]]]:
    """Records the keyword arguments of every forward of the base model."""

    @contextmanager
    def record(model: LLaDA2MoeModelLM) -> Iterator[list[dict[str, Any]]]:
        calls: list[dict[str, Any]] = []

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(dict(kwargs))

        handle = model.model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield calls
        finally:
            handle.remove()

    return record


@pytest.fixture
def prompt() -> Callable[..., Tensor]:
    """Random ids [P] of the golden vocabulary without its special ids."""

    def make(length: int, seed: int = 0) -> Tensor:
        return torch.randint(0, 120, (length,), generator=torch.Generator().manual_seed(1000 + seed))

    return make
