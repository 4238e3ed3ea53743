"""Drift: which rows a layer computes again, against a row-by-row oracle, and what the cache serves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from helpers import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from lsp_oracle import MASK
from test_rules import CHECKED
from torch import Tensor

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.freshlane.lane import keep_inputs
from epoch_moe.freshlane.restore import pack, restore
from epoch_moe.functional import RouterSpec, RowKeys, RowStore, fresh_rows, layer_rows, restore_rows, supports
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.packed import ListedRows
from epoch_moe.plan.rules import NO_TOKEN

HIDDEN, LAYERS = 4, 2


@dataclass
class Text:
    """A decode of some blocks, in positions of the whole text: what the drift rules speak of.

    Attributes:
        layout: "cached" (the first forward of a block brings the finished one along), "growing" (no K/V cache) or
            "canvas" (all positions in every forward).
        ids: per sequence and position.
        names: which sequence each row of the batch is.
    """

    rng: random.Random
    layout: str
    block: int
    blocks: int
    ids: list[list[int]]
    names: list[int]

    @property
    def length(self) -> int:
        return self.block * self.blocks

    def rows(self, number: int, begin: int) -> tuple[int, int, int, int]:
        """Of forward ``number`` of the block at ``begin``: first and last position; first one with state; lead."""
        end = begin + self.block
        if self.layout == "canvas":
            return 0, self.length, 0, 0
        if self.layout == "growing":
            return 0, end, 0, 0
        first = max(begin - self.block, 0) if number == 0 else begin
        return first, end, begin, begin - first

    def commit(self, begin: int) -> None:
        """Some masks of the block become tokens, some tokens change or are masked again."""
        for ids in self.ids:
            for p in range(begin, begin + self.block):
                if ids[p] == MASK and self.rng.random() < 0.5:
                    ids[p] = self.rng.randrange(5)
                elif self.rng.random() < 0.1:
                    ids[p] = self.rng.choice([MASK, self.rng.randrange(5)])


@dataclass
class DriftOracle:
    """One layer: per sequence and position the token, input and forward of the last computation, in plain Python."""

    config: EpochConfig
    text: Text
    held: dict[tuple[int, int], tuple[int, list[float], int]] = field(default_factory=dict)

    def forward(
        self, when: int, number: int, begin: int, valid: list[list[bool]], x: list[list[list[float]]], follows: bool
    ) -> list[list[int | None]]:
        """For each row of the forward, by when the output was computed that it takes; None = it does not exist."""
        config, text, out = self.config, self.text, []
        first, last, stateful, _ = text.rows(number, begin)
        end, interval = begin + text.block, config.refresh_interval
        for b, name in enumerate(text.names):
            out.append([])
            for p in range(first, last):
                token, before = text.ids[name][p], self.held.get((name, p))
                own = begin <= p < end
                undecided = (token == MASK and own) or p >= end
                bound = config.live_drift if undecided else config.drift
                if not valid[b][p - first]:
                    out[-1].append(None)
                    if before is not None and (config.drift is None or before[0] != token):
                        del self.held[name, p]
                    continue
                usable = before is not None and before[0] == token and (bound is not None or not undecided)
                moved = bound is not None and before is not None and cosine(x[b][p - first], before[1]) <= bound
                if number == 0:
                    usable = usable and follows and not own
                elif text.layout == "growing" and p < begin and interval != 1:
                    moved = False  # nothing before the block can change
                elif interval is not None and number % interval == 0:
                    usable = False
                if usable and not moved:
                    out[-1].append(before[2])  # type: ignore[index]
                    continue
                out[-1].append(when)
                if p >= stateful and not (undecided and config.live_drift is None):
                    self.held[name, p] = (token, x[b][p - first], when)
                else:
                    self.held.pop((name, p), None)
        return out


def cosine(a: list[float], b: list[float]) -> float:
    a64, b64 = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return min(float(a64 @ b64 / (a64.norm() * b64.norm())), 1.0)


class Inputs:
    """A layer's inputs by sequence and position: they stay, grow, or turn around; none of them near a bound."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.last = rng, dict[tuple[int, int], Tensor]()

    def of(self, name: int, position: int) -> Tensor:
        how, old = self.rng.random(), self.last.get((name, position))
        if old is None or how > 0.7:
            old = torch.randn(HIDDEN)
        elif how > 0.4:
            old = old * 3.0
        self.last[name, position] = old
        return old


@settings(CHECKED, max_examples=30)
@given(st.integers(0, 2**31))
def test_each_layer_computes_what_the_oracle_says(seed: int) -> None:
    """Entries that hold nothing are NaN; every row's output says in which forward it was computed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    drift = rng.choice([None, 0.9, 0.9, 1.0])
    config = EpochConfig(
        coverage=None,
        drift=drift,
        live_drift=rng.choice([None, 0.95, 1.0]),
        refresh_interval=rng.choice([None, None, 3]),
        commit=rng.choice(["full", "drift", "drift"]) if drift is not None else "full",
    )
    batch, block, blocks = rng.randrange(1, 4), rng.randrange(1, 6), 3
    ids = [[rng.randrange(5)] * rng.randrange(block) for _ in range(batch)]
    text = Text(
        rng, rng.choice(["cached", "growing", "canvas"]), block, blocks,
        [prompt + [MASK] * (block * blocks - len(prompt)) for prompt in ids], list(range(batch)),
    )  # fmt: skip
    inputs = [Inputs(rng) for _ in range(LAYERS)]
    oracles = [DriftOracle(config, text) for _ in range(LAYERS)]
    finished: BlockPlan | None = None
    going_on, when = list(range(batch)), 0
    for begin in range(0, text.length, block):
        future = text.length - begin - block if text.layout == "canvas" else 0
        prefix = 0 if text.layout == "cached" else begin
        plan = BlockPlan(
            config, LAYERS, batch=len(text.names), window=prefix + block + future, prefix=prefix, future=future,
            prefix_constant=text.layout == "growing", counters=Counters(LAYERS, [1] * LAYERS),
        )  # fmt: skip
        follows = config.commit == "drift" and finished is not None
        if follows:
            assert finished is not None
            plan.follow(finished, going_on)
        else:
            for oracle in oracles:
                oracle.held.clear()
        done = [rng.randrange(1, 6) for _ in text.names]
        for number in range(4):
            first, last, _, lead = text.rows(number, begin)
            valid = [[not begin <= p < begin + block or number < done[b] for p in range(first, last)]
                     for b in range(len(text.names))]  # fmt: skip
            step = plan.next_forward(
                torch.tensor([text.ids[name][first:last] for name in text.names]), mask_id=MASK,
                valid_BS=torch.tensor(valid), lead=lead, live_BN=None, changed_BN=None,
            )  # fmt: skip
            poison(plan)
            for layer, oracle in enumerate(oracles):
                x_BSH = torch.stack([torch.stack([inputs[layer].of(name, p) for p in range(first, last)])
                                     for name in text.names])  # fmt: skip
                entered = step.enter(layer, x_BSH, torch.float32, 0)
                assert entered is not None and isinstance(entered.rows, ListedRows)
                assert entered.state.cache_MH is not None
                if number == 0 and not follows:
                    entered.state.cache_MH.fill_(float("nan"))
                x_RH = pack(x_BSH.reshape(-1, HIDDEN), entered.rows)
                keep_inputs(entered, x_RH)
                out_TH = restore(torch.full_like(x_RH, float(when + 1)), entered.rows, entered.state.cache_MH)
                want = oracle.forward(when + 1, number, begin, valid, x_BSH.tolist(), follows)
                got = out_TH[:, 0].view(x_BSH.shape[:2]).tolist()
                assert got == [[float(w or 0) for w in row] for row in want], (begin, number, layer)
            plan.complete(step)
            text.commit(begin)
            when += 1
        assert not plan.counters.fallbacks
        finished = plan
        going_on = sorted(rng.sample(range(len(text.names)), rng.randrange(1, len(text.names) + 1)))
        text.names = [text.names[row] for row in going_on]


def poison(plan: BlockPlan) -> None:
    """Entries without a token hold NaN."""
    assert plan.stamps_M is not None
    for layer in plan.layers:
        for state in (layer.cache_MH, layer.inputs_M1H):
            if state is not None:
                state[: plan.stamps_M.shape[0]][plan.stamps_M == NO_TOKEN] = float("nan")


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
    dense = decoded(model, EpochConfig.exact())
    assert decoded(model, None)[0] == dense[0]
    config = EpochConfig(coverage=None, refresh_interval=None, drift=1.0, live_drift=1.0, commit="drift")
    assert decoded(model, config) == dense
    reused = config.replace(drift=0.5, live_drift=0.5, commit="full")
    pairs = decoded(model, reused)[1]
    assert decoded(model, reused.replace(commit="drift"))[1] < pairs < dense[1]


@torch.no_grad()
@pytest.mark.parametrize("change", ["nothing", "experts", "norm", "other batch", "prefill", "exact", "capture"])
def test_commit_rows_are_reused_where_nothing_changed(model: LLaDA2MoeModelLM, change: str) -> None:
    """Two blocks of one row's tokens, the same inputs: all lead rows are reused, or all are computed."""
    config = EpochConfig(coverage=None, refresh_interval=1 if change == "exact" else None, drift=0.01, commit="drift")
    context = BlockPlanContext(model, config)
    if change == "capture":
        context._kept = {}  # what `capture` sets: blocks of one shape share their memory
    ids_BS = torch.arange(8).reshape(2, 4)
    rows = []
    for block in range(2):
        last = block == 1
        if last and change == "prefill":
            with context.prefill(ids_BS):
                model(ids_BS)
        context.select([1, 0] if last else [0, 1])  # sequences of a block that is over
        batch = 1 if last and change == "other batch" else 2
        lead_BS = ids_BS[[1, 0]][:batch] if last else ids_BS[:, :0]
        with context.block(batch=batch, window=4):
            with pytest.raises(RuntimeError, match="select: a block is open"):
                context.select([0])
            if last and change == "experts":
                model.model.layers[1].mlp.experts[0].down_proj.weight.mul_(1.0)
            if last and change == "norm":
                model.model.norm.weight.mul_(1.0)
            forward_BS = torch.cat([lead_BS, ids_BS[:batch]], dim=1)
            with context.iteration(forward_BS, mask_id=MASK, lead=lead_BS.shape[1]):
                model(forward_BS)
            rows.append([listed.num_fresh for listed in context.latest.layer_rows.values()])
    layers = len(rows[0])
    reused = {"nothing": 8, "experts": 16}.get(change, 16 if batch == 2 else 8)
    assert rows == [[8] * layers, [reused] * layers]
    assert context.counters.read().fallbacks == ({"version": layers} if change in ("experts", "norm") else {})


def test_commit_by_drift_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="commit='drift' with drift=None"):
        EpochConfig(commit="drift")


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


SPEC = RouterSpec(kind="softmax", num_experts=8, top_k=2)


def row_store(config: EpochConfig, layers: int, slots: int, window: int) -> RowStore:
    return RowStore(
        config, SPEC, num_layers=layers, max_slots=slots, window=window, hidden_size=HIDDEN, dtype=torch.float32
    )


@settings(CHECKED, max_examples=30)
@given(st.integers(0, 2**31))
def test_each_layer_of_a_row_store_computes_what_the_oracle_says(seed: int) -> None:
    """Requests that come, pause and leave, and forwards that break off; entries that hold nothing are NaN."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = EpochConfig(
        coverage=None, drift=rng.choice([0.9, 1.0]), live_drift=rng.choice([None, 0.95]), commit="drift",
        refresh_interval=rng.choice([None, 3]),
    )  # fmt: skip
    assert supports(config)[0]
    slots, window = 3, 4
    store = row_store(config, LAYERS, slots, window)
    store.cache_LMH.fill_(float("nan"))
    held: list[dict[tuple[int, int], tuple[int, list[float], int]]] = [{} for _ in range(LAYERS)]
    inputs = [Inputs(rng) for _ in range(LAYERS)]
    ids = [[MASK] * window for _ in range(slots)]
    blocks, counts = [0] * slots, [0] * slots
    for when in range(1, 13):
        active = [slot for slot in range(slots) if rng.random() < 0.8]
        rows = [(slot, p) for slot in active for p in range(window) if rng.random() < 0.95] + [(-1, -1), (0, -1)]
        rng.shuffle(rows)
        seen = {slot for slot, p in rows if p >= 0}
        tokens = [ids[slot][p] if p >= 0 else 1 for slot, p in rows]
        slot_T, position_T = torch.tensor(rows).T
        block_T = torch.tensor([blocks[slot] for slot, _ in rows])
        fresh = fresh_rows(
            store, RowKeys(slot_T, torch.zeros_like(slot_T), block_T, position_T), torch.tensor(tokens),
            torch.tensor(tokens) == MASK,
        )  # fmt: skip
        assert store._inputs is not None
        for memory in (store.cache_LMH, store._inputs[:, :-1]):
            memory[:, store.stamps_M == NO_TOKEN] = float("nan")
        for state in held:  # what this forward cannot use is lost
            for slot, p in list(state):
                if slot in seen and ((slot, p) not in rows or ids[slot][p] != state[slot, p][0]):
                    del state[slot, p]
        restored = LAYERS if rng.random() < 0.8 else rng.randrange(LAYERS)
        for layer in range(restored):
            x_TH = torch.stack([inputs[layer].of(*row) for row in rows])
            own = layer_rows(store, layer, fresh, x_TH)
            want, state = [], held[layer]
            for (slot, p), token, x in zip(rows, tokens, x_TH.tolist(), strict=True):
                bound, before = config.live_drift if token == MASK else config.drift, state.get((slot, p))
                due = p >= 0 and config.refresh_interval is not None and counts[slot] % config.refresh_interval == 0
                if before is not None and bound is not None and not due and cosine(x, before[1]) > bound:
                    want.append(before[2])
                    continue
                want.append(when if slot >= 0 else 0)
                if p >= 0 and bound is not None:
                    state[slot, p] = (token, x, when)
            y_RH = torch.full_like(own.pick(x_TH), float(when))
            assert restore_rows(store, layer, own, y_RH)[:, 0].tolist() == want
        if restored < LAYERS:  # given up: what was not kept before stays lost
            for state in held:
                for cell in [cell for cell, (_, _, last) in state.items() if last == when]:
                    if store.stamps_M[cell[0] * window + cell[1]] == NO_TOKEN:
                        del state[cell]
            continue
        store.complete(fresh)
        for slot in seen:
            counts[slot] += 1
            for p in range(window):
                if rng.random() < 0.4:
                    ids[slot][p] = rng.randrange(5)
            if rng.random() < 0.2:
                blocks[slot], counts[slot], ids[slot] = blocks[slot] + 1, 0, [MASK] * window
                for state in held:
                    for p in range(window):
                        state.pop((slot, p), None)


def test_by_drift_a_row_store_takes_each_layer_s_own_rows() -> None:
    config = EpochConfig(coverage=None, drift=0.9)
    store, plain = row_store(config, 2, 1, 2), row_store(config.replace(drift=None), 2, 1, 2)
    assert store.nbytes == plain.nbytes + 2 * 3 * HIDDEN * 4
    zeros_T = torch.zeros(2, dtype=torch.int64)
    keys, x_TH = RowKeys(zeros_T, zeros_T, zeros_T, torch.arange(2)), torch.ones(2, HIDDEN)
    fresh = fresh_rows(store, keys, zeros_T + 5, zeros_T == 1)
    with pytest.raises(ValueError, match="of no layer: by drift"):
        restore_rows(store, 0, fresh, x_TH)
    with pytest.raises(ValueError, match="of layer 0: by drift"):
        restore_rows(store, 1, layer_rows(store, 0, fresh, x_TH), x_TH)
    with pytest.raises(ValueError, match="x_TH"):
        layer_rows(store, 0, fresh, x_TH[:1])
    with pytest.raises(ValueError, match="layer"):
        layer_rows(store, 2, fresh, x_TH)
    fresh = fresh_rows(plain, keys, zeros_T + 5, zeros_T == 1)
    assert layer_rows(plain, 1, fresh, x_TH) is fresh


@pytest.mark.parametrize("name", ["drift", "live_drift"])
@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan"), True, "x"])
def test_bounds_are_cosines(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=f"EpochConfig.{name}"):
        EpochConfig(**{name: value})  # type: ignore[arg-type]
