"""Fixtures of all tests."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import Golden, load_golden
from hypothesis import settings
from torch import Tensor

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter then. Triton reads this when it is imported, so before anything does that.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # One process per core: more threads in each, and in what they start, would only wait for each other.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# The same examples in every run, however long one takes; nothing is kept between runs.
settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def golden() -> Callable[[str], Golden]:
    """Loader of a golden folder by name; treat its tensors as read-only."""
    return load_golden


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uninitialised floating-point memory holds NaN, so that reading it shows.

    Deterministic mode fills what torch itself allocates; the patches fill what Python code asks for in any mode.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)

    with torch.device("cpu"):
        torch.empty(0)  # a device's context remembers torch's functions from its first use: not the patched ones

    def poison(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: object, **kwargs: object) -> Tensor:
            out = original(*args, **kwargs)
            if out.is_floating_point():
                with torch.no_grad():
                    out.detach().fill_(float("nan"))
            return out

        return allocate

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
    yield
    torch.use_deterministic_algorithms(was_deterministic)
