"""Drift: which rows a layer computes again, against a row-by-row oracle, and what the cache serves."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from lsp_oracle import MASK, Forward, random_decode
from test_rules import CHECKED
from torch import Tensor

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.freshlane.lane import keep_inputs
from epoch_moe.freshlane.restore import pack, restore
from epoch_moe.functional import RouterSpec, RowStore, supports
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows

HIDDEN, LAYERS = 4, 2


class DriftOracle:
    """One layer: per (sequence, row) the token, input and forward of the last computation, in plain Python."""

    def __init__(self, plan: BlockPlan):
        self.plan = plan
        self.held: dict[tuple[int, int], tuple[int, list[float], int]] = {}

    def forward(self, number: int, forward: Forward, x_BSH: Tensor) -> dict[tuple[int, int], int | None]:
        """For each row of the forward the number of the forward whose output it takes; None = it does not exist."""
        plan, config, out = self.plan, self.plan.config, {}
        for b in range(plan.batch):
            for s in range(forward.lead + plan.window):
                n, x = s - forward.lead, x_BSH[b, s].tolist()
                if not forward.valid[b][s]:
                    out[b, s] = None
                    self.held.pop((b, n), None)
                    continue
                if n < 0:
                    out[b, s] = number
                    continue
                token = forward.ids[b][s]
                in_block = plan.prefix <= n < plan.window - plan.future
                undecided = (token == MASK and in_block) or n >= plan.window - plan.future
                before = self.held.get((b, n))
                bound = config.live_drift if undecided else config.drift
                constant = plan.prefix_constant and n < plan.prefix
                due = number == 0 or (
                    config.refresh_interval is not None and number % config.refresh_interval == 0 and not constant
                )
                usable = before is not None and before[0] == token and not due and (bound is not None or not undecided)
                reused = usable and (constant or bound is None or cosine(x, before[1]) > bound)  # type: ignore[index]
                if reused:
                    out[b, s] = before[2]  # type: ignore[index]
                    continue
                out[b, s] = number
                if undecided and config.live_drift is None:
                    self.held.pop((b, n), None)
                else:
                    self.held[b, n] = (token, x, number)
        return out


def cosine(a: list[float], b: list[float]) -> float:
    a64, b64 = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return min(float(a64 @ b64 / (a64.norm() * b64.norm())), 1.0)


def inputs_of(rng: random.Random, batch: int, rows: int, before: Tensor | None) -> Tensor:
    """Inputs that stay, move a little, or turn around; none of them near a bound."""
    x_BSH = torch.randn(batch, rows, HIDDEN)
    if before is None:
        return x_BSH
    for b in range(batch):
        for s in range(1, rows + 1):  # windows end together, leads do not
            how = rng.random()
            if how < 0.4:
                x_BSH[b, -s] = before[b, -s]
            elif how < 0.7:
                x_BSH[b, -s] = before[b, -s] * 3.0
    return x_BSH


@CHECKED
@given(st.integers(0, 2**31))
def test_each_layer_computes_what_the_oracle_says(seed: int) -> None:
    """The caches begin as NaN; every row's output says in which forward it was computed."""
    rng = random.Random(seed)
    batch, block = rng.randrange(1, 3), rng.randrange(1, 7)
    prefix, future = rng.choice([0, 0, 3]), rng.choice([0, 0, 3])
    config = EpochConfig(
        coverage=None,
        drift=rng.choice([None, 0.9, 1.0]),
        live_drift=rng.choice([None, 0.95, 1.0]),
        refresh_interval=rng.choice([None, None, 3]),
    )
    plan = BlockPlan(
        config, LAYERS, batch=batch, window=prefix + block + future, prefix=prefix, future=future,
        prefix_constant=False, counters=Counters(LAYERS, [1] * LAYERS),
    )  # fmt: skip
    oracles, before = [DriftOracle(plan) for _ in range(LAYERS)], [None] * LAYERS
    for number, forward in enumerate(random_decode(rng, batch, prefix, block, 6, edits=True, future=future)):
        step = plan.next_forward(
            torch.tensor(forward.ids), mask_id=MASK, valid_BS=torch.tensor(forward.valid), lead=forward.lead,
            live_BN=None, changed_BN=None,
        )  # fmt: skip
        rows = forward.lead + plan.window
        for layer in range(LAYERS):
            x_BSH = before[layer] = inputs_of(rng, batch, rows, _window(before[layer], plan.window, rows))
            entered = step.enter(layer, x_BSH, torch.float32, 0)
            assert entered is not None and isinstance(entered.rows, ListedRows)
            assert entered.state.cache_MH is not None
            if number == 0:
                entered.state.cache_MH.fill_(float("nan"))
                if entered.state.inputs_M1H is not None:
                    entered.state.inputs_M1H.fill_(float("nan"))
            x_TH = x_BSH.reshape(-1, HIDDEN)
            x_RH = pack(x_TH, entered.rows)
            keep_inputs(entered, x_RH)
            y_RH = torch.full_like(x_RH, float(number))
            out_TH = restore(y_RH, entered.rows, entered.state.cache_MH)
            want = oracles[layer].forward(number, forward, x_BSH)
            got = {(b, s): float(out_TH[b * rows + s, 0]) for b, s in want}
            assert got == {cell: 0.0 if when is None else float(when) for cell, when in want.items()}, number
        plan.complete(step)


def _window(x_BSH: Tensor | None, window: int, rows: int) -> Tensor | None:
    """The same window behind another lead."""
    if x_BSH is None:
        return None
    return torch.cat([torch.randn(x_BSH.shape[0], rows - window, HIDDEN), x_BSH[:, -window:]], dim=1)


@pytest.fixture(scope="module")
def model() -> LLaDA2MoeModelLM:
    model = LLaDA2MoeModelLM.from_pretrained(GOLDEN / "llada2", dtype=torch.float32).eval()
    epoch_moe.patch(model)
    return model


def decoded(model: LLaDA2MoeModelLM, config: EpochConfig | None) -> tuple[list[list[int]], int]:
    prompts = [torch.arange(3, 12), torch.arange(20, 34)]
    out = epoch_moe.generate(model, prompts, gen_length=32, block_length=16, steps=16, plan=config, eos_token_id=[])
    return [answer.tolist() for answer in out.answers], out.counters.read().pairs


def test_a_bound_of_one_is_exact(model: LLaDA2MoeModelLM) -> None:
    dense = decoded(model, None)
    assert decoded(model, EpochConfig(coverage=None, refresh_interval=None, drift=1.0, live_drift=1.0)) == dense
    assert decoded(model, EpochConfig(coverage=None, refresh_interval=None, drift=0.5, live_drift=0.5))[1] < dense[1]


def test_inputs_that_are_no_numbers_are_computed() -> None:
    plan = BlockPlan(
        EpochConfig(coverage=None, refresh_interval=None, drift=0.1), 1, batch=1, window=2, prefix=0,
        prefix_constant=False, counters=Counters(1, [1]),
    )  # fmt: skip
    x_BSH = torch.ones(1, 2, HIDDEN)
    for number, value in enumerate((1.0, 1.0, float("nan"))):
        step = plan.next_forward(
            torch.tensor([[7, 8]]), mask_id=MASK, valid_BS=None, lead=0, live_BN=None, changed_BN=None
        )
        x_BSH[0, 1] = value
        entered = step.enter(0, x_BSH, torch.float32, 0)
        assert entered is not None and isinstance(entered.rows, ListedRows)
        keep_inputs(entered, pack(x_BSH[0], entered.rows))
        assert entered.rows.fresh_R.tolist() == [[0, 1], [], [1]][number]
        plan.complete(step)


def test_a_row_store_refuses_drift() -> None:
    spec = RouterSpec(kind="softmax", num_experts=8, top_k=2)
    assert not supports(EpochConfig(drift=0.9))[0]
    with pytest.raises(ValueError, match=r"drift=0\.9"):
        RowStore(EpochConfig(drift=0.9), spec, num_layers=1, max_slots=1, window=4, hidden_size=2)


@pytest.mark.parametrize("name", ["drift", "live_drift"])
@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan"), True, "x"])
def test_bounds_are_cosines(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=f"EpochConfig.{name}"):
        EpochConfig(**{name: value})  # type: ignore[arg-type]
