"""The continuous-batching example: every request's tokens are those it gets alone."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from epoch_moe import EpochConfig, generate, load_model, patched
from epoch_moe.plan.rules import NO_TOKEN
from epoch_moe.problems import generate_problems

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "engine_loop.py"
CONFIGS = {"default": EpochConfig(), "exact": EpochConfig.exact()}
GEN_LENGTH = 64


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loaded() -> tuple[nn.Module, Any]:
    return load_model("tiny-llada2", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(loaded: tuple[nn.Module, Any]) -> list[list[int]]:
    """Twelve problems; one behind 70 tokens of others, so that it brings whole prompt blocks."""
    ids = [loaded[1](problem.prompt)["input_ids"] for problem in generate_problems(12, seed=3)]
    ids[5] = [token for number in (7, 8, 9, 10, 5) for token in ids[number]][-70:]
    assert len(ids[5]) == 70
    return ids


def make_engine(example: ModuleType, model: nn.Module, name: str, **changes: int) -> Any:
    settings = {"slots": 4, "max_batch": 3, "max_length": 160, **changes}
    return example.Engine(copy.deepcopy(model), CONFIGS[name], **settings)


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_that_share_batches_get_the_tokens_that_they_get_alone(
    name: str, example: ModuleType, loaded: tuple[nn.Module, Any], prompts: list[list[int]]
) -> None:
    engine = make_engine(example, loaded[0], name)
    requests = [example.Request(i, ids, GEN_LENGTH, arrival=2 * i) for i, ids in enumerate(prompts)]
    order = []
    for event, request in example.serve(engine, requests):
        order.append((event, request.number))
        # Whatever no entry holds may be anything.
        engine.store.cache_LMH[:, engine.store.stamps_M == NO_TOKEN] = float("nan")
    joins = [number for event, number in order if event == "joins"]
    assert joins == list(range(12)) and sorted(n for event, n in order if event == "leaves") == joins
    assert max(engine.generations) > 2 and order != sorted(order, key=lambda item: item[1])  # slots were given on

    model = copy.deepcopy(loaded[0])
    with patched(model):
        for request in requests:
            out = generate(model, request.prompt, gen_length=GEN_LENGTH, plan=CONFIGS[name])
            assert request.tokens == out.answers[0].tolist() and request.forwards == out.forwards
    work = engine.store.counters.read()
    assert work.forwards == engine.forwards < sum(request.forwards for request in requests)
    # The exact preset computes every row; the default one saves most of those between cold passes and refreshes.
    assert (work.rows == work.dense_rows) if name == "exact" else (work.rows < 0.75 * work.dense_rows)
    assert work.pairs == 4 * work.rows


def test_a_cancelled_request_leaves_nothing_behind(
    example: ModuleType, loaded: tuple[nn.Module, Any], prompts: list[list[int]]
) -> None:
    engine = make_engine(example, loaded[0], "default", slots=1, max_batch=1)
    given_up, kept = (example.Request(i, prompts[i], GEN_LENGTH) for i in (0, 1))
    assert engine.admit(given_up) and not engine.admit(kept)
    engine.step()
    engine.step()
    engine.cancel(given_up)
    engine.store.cache_LMH[:, engine.store.stamps_M == NO_TOKEN] = float("nan")
    assert engine.admit(kept) and kept.slot == 0
    while not engine.step():
        pass
    model = copy.deepcopy(loaded[0])
    with patched(model):
        out = generate(model, kept.prompt, gen_length=GEN_LENGTH, plan=CONFIGS["default"])
    assert kept.tokens == out.answers[0].tolist()
    assert engine.step() == []


def test_what_the_engine_cannot_serve_is_said_at_once(
    example: ModuleType, loaded: tuple[nn.Module, Any], prompts: list[list[int]]
) -> None:
    model = copy.deepcopy(loaded[0])
    with pytest.raises(ValueError, match="cannot serve this: support_scope='batch'"):
        example.Engine(model, EpochConfig.paper(), slots=2, max_batch=2, max_length=64)
    assert type(model.model.layers[1].mlp).__name__ == "LLaDA2MoeSparseMoeBlock"  # type: ignore[union-attr, index]
    engine = make_engine(example, loaded[0], "default", max_length=64)
    with pytest.raises(ValueError, match="request 0 needs 160 rows, a slot holds 64"):
        engine.admit(example.Request(0, prompts[5], GEN_LENGTH))
    assert len(engine.free) == 4


def test_the_command_prints_who_comes_and_goes(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine_loop.py", "--requests", "3", "--slots", "2", "--max-batch", "1"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum("joins slot" in line for line in lines) == sum("leaves slot" in line for line in lines) == 3
    assert "of 3 right" in lines[-1] and "rows through the experts" in lines[-1]
