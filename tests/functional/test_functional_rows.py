"""Row plans for batches that come and go, against `EpochMoEBlock` under `BlockPlanContext`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from helpers import relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from epoch_moe.block import BlockSpec, EpochMoEBlock
from epoch_moe.config import EpochConfig
from epoch_moe.functional import (
    FreshRows,
    RouterSpec,
    RowKeys,
    RowStore,
    fresh_rows,
    moe_forward,
    restore_rows,
    route_rows,
    router_logits,
)
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.rules import NO_TOKEN
from epoch_moe.plan.slot import PlanSlot

H, F_INNER, E, K, W = 16, 8, 16, 3, 6
MASK = 9
ROUTERS = {
    "sigmoid_group": RouterSpec(
        kind="sigmoid_group", num_experts=E, top_k=K, n_group=4, topk_group=2, routed_scaling_factor=2.5
    ),
    "softmax": RouterSpec(kind="softmax", num_experts=E, top_k=K),
}
CONFIGS = {
    "default": EpochConfig(),
    "narrow": EpochConfig(coverage=0.8, coverage_floor=0.8, refresh_interval=3),
    "drop": EpochConfig(coverage=0.5, coverage_floor=0.0, on_miss="drop", refresh_interval=None),
    "expand": EpochConfig(coverage=0.5, on_miss="expand", restrict_new=True),
    "exact": EpochConfig.exact(),
    "paper": EpochConfig.paper(),
}
LAYERS = 2


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, F_INNER, bias=False), nn.Linear(H, F_INNER, bias=False)
        self.down_proj = nn.Linear(F_INNER, H, bias=False)


class Mixture(nn.Module):
    """The parts of an MoE block, with a router sharp enough for supports to matter."""

    def __init__(self, router: RouterSpec):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        nn.init.normal_(self.gate.weight, std=0.8)
        self.bias = nn.Parameter(0.05 * torch.randn(E)) if router.kind == "sigmoid_group" else None
        self.experts = nn.ModuleList(Experts() for _ in range(E))


class Model:
    """Layers of `EpochMoEBlock` under plans, and the same weights on the functional path."""

    def __init__(self, kind: str, seed: int = 0):
        torch.manual_seed(seed)
        self.router, slot = ROUTERS[kind], PlanSlot()
        spec = BlockSpec(
            family="test",
            router=self.router,
            gate_weight="gate.weight",
            gate_bias="bias" if kind == "sigmoid_group" else None,
        )
        self.blocks = [EpochMoEBlock(Mixture(self.router).eval(), spec, slot, index) for index in range(LAYERS)]
        self.patched = SimpleNamespace(
            slot=slot,
            routing_block=None,
            config=None,
            ep=None,
            compact_for=lambda config, layers: None,
            residency=None,
            bytes_per_expert=lambda: [block.weights.ensure().bytes_per_expert for block in self.blocks],
            ensure_stacked=lambda: [block.weights.ensure() for block in self.blocks],
        )

    def store(self, config: EpochConfig, slots: int) -> RowStore:
        return RowStore(
            config,
            self.router,
            num_layers=LAYERS,
            max_slots=slots,
            window=W,
            hidden_size=H,
            dtype=torch.float32,
            bytes_per_expert=self.patched.bytes_per_expert()[0],
        )

    @torch.no_grad()
    def functional(self, store: RowStore, fresh: FreshRows, x_TH: Tensor) -> Tensor:
        """Residual layers, as a model has them: later layers see what earlier ones reused."""
        for layer, block in enumerate(self.blocks):
            x_RH = fresh.pick(x_TH)
            logits_RE = router_logits(x_RH, block.gate.weight, self.router)
            routing = route_rows(store, layer, fresh, logits_RE, block.bias)
            stacked = block.weights.ensure()
            y_RH = moe_forward(x_RH, routing.ids_TK, routing.weights_TK, stacked.gate_up_E2FH, stacked.down_EHF)
            x_TH = x_TH + restore_rows(store, layer, fresh, y_RH)
        store.complete(fresh)
        return x_TH


@dataclass(eq=False)
class Step:
    """One forward of one request: lead rows (their ids do not matter), then the window."""

    ids: list[int]
    valid: list[bool]
    live: list[bool]  # MASK, and some tokens that may still be edited
    lead: int
    x_SH: Tensor
    pause: bool = False


@dataclass(eq=False)
class Request:
    steps: list[Step]
    slot: int = 0
    generation: int = 0
    block: int = 0
    done: int = 0
    wants: list[Tensor] = field(default_factory=list)  # outputs of the block
    fresh: list[Tensor] = field(default_factory=list)


def random_request(rng: random.Random, forwards: int) -> Request:
    """Mostly commits, sometimes edits and re-masks, live tokens, rows that are absent, lead rows, pauses."""
    ids = [MASK if rng.random() < 0.8 else rng.randrange(8) for _ in range(W)]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    steps = []
    base_WH = torch.randn(W, H, generator=generator)
    for number in range(forwards):
        lead = rng.choice([0, 0, 3]) if number == 0 else 0
        x_WH = base_WH + 0.8 * torch.randn(W, H, generator=generator)
        steps.append(
            Step(
                ids=list(ids),
                valid=[rng.random() > 0.06 for _ in range(W)],
                live=[token == MASK or rng.random() < 0.15 for token in ids],
                lead=lead,
                x_SH=torch.cat((torch.randn(lead, H, generator=generator), x_WH)),
                pause=rng.random() < 0.15,
            )
        )
        for place in range(W):
            if rng.random() < (0.3 if ids[place] == MASK else 0.08):
                ids[place] = rng.choice([rng.randrange(8), rng.randrange(8), MASK])
    return Request(steps)


@torch.no_grad()
def run_block(model: Model, request: Request, config: EpochConfig) -> BlockPlanContext:
    """What `EpochMoEBlock` computes for the request alone, step by step."""
    context = BlockPlanContext(model.patched, config)  # type: ignore[arg-type]
    with context.block(batch=1, window=W):
        for step in request.steps:
            ids_BS = torch.tensor([[0] * step.lead + step.ids])
            valid_BS = torch.tensor([[True] * step.lead + step.valid])
            x_BSH = step.x_SH[None]
            live_BN = torch.tensor([step.live])
            with context.iteration(ids_BS, mask_id=MASK, live_BN=live_BN, valid_BS=valid_BS, lead=step.lead):
                for block in model.blocks:
                    x_BSH = x_BSH + block(x_BSH)
                rows = model.patched.slot.active.rows
                request.fresh.append(rows.fresh_R.clone())
            request.wants.append(x_BSH[0])
    return context


@dataclass
class Batch:
    """One forward's rows of several requests, shuffled and padded."""

    keys: RowKeys
    ids_T: Tensor
    live_T: Tensor
    x_TH: Tensor
    places: list[tuple[Request, Tensor]]  # where each request's rows lie

    @staticmethod
    def of(requests: list[Request], rng: random.Random, padding: int) -> Batch:
        rows: list[tuple[int, int, int, int, int, bool]] = []
        inputs, owners = [], []
        for request in requests:
            step = request.steps[request.done]
            for row in range(step.lead + W):
                position = row - step.lead
                token = 0 if position < 0 else step.ids[position]
                live = position >= 0 and step.live[position]
                if position >= 0 and not step.valid[position]:
                    rows.append((-1, 0, 0, position, token, live))  # an engine may leave anything there
                else:
                    # Lead rows are of the request's block before this one.
                    block = request.block - (position < 0)
                    rows.append((request.slot, request.generation, block, max(position, -1), token, live))
                owners.append((request, row))
            inputs.append(step.x_SH)
        for _ in range(padding):
            rows.append((-1, -1, -1, -1, -1, False))
            inputs.append(torch.full((1, H), float("nan")))
            owners.append((None, -1))  # type: ignore[arg-type]
        order = list(range(len(rows)))
        rng.shuffle(order)
        columns = [torch.tensor([rows[i][c] for i in order]) for c in range(6)]
        places = []
        for request in requests:
            at = {owners[i][1]: place for place, i in enumerate(order) if owners[i][0] is request}
            places.append((request, torch.tensor([at[row] for row in range(len(at))])))
        x_TH = torch.cat(inputs)[order]
        return Batch(RowKeys(*columns[:4]), columns[4], columns[5], x_TH, places)


def poison(store: RowStore) -> None:
    """NaN wherever no entry is valid."""
    store.cache_LMH[:, store.stamps_M == NO_TOKEN] = float("nan")


def run_together(
    model: Model, requests: list[Request], config: EpochConfig, slots: int, rng: random.Random
) -> RowStore:
    """Requests share batches and slots; each forward's rows are compared with the block's."""
    store = model.store(config, slots)
    addresses = [t.data_ptr() for t in (store.cache_LMH, store.stamps_M, store.support_LSE)]
    waiting, running = list(requests), [None] * slots
    generations = [0] * slots
    while waiting or any(running):
        for slot in range(slots):
            if running[slot] is None and waiting and rng.random() < 0.7:
                request = waiting.pop(0)
                generations[slot] += 1
                request.slot, request.generation, request.block = slot, generations[slot], 2
                running[slot] = request
        going = [r for r in running if r is not None]
        for request in list(going):
            if request.steps[request.done].pause:
                request.steps[request.done].pause = False
                going.remove(request)
        if not going:
            continue
        poison(store)
        batch = Batch.of(going, rng, padding=rng.choice([0, 0, 3]))
        fresh = fresh_rows(store, batch.keys, batch.ids_T, batch.live_T, mask_id=MASK)
        out_TH = model.functional(store, fresh, batch.x_TH)
        for request, place_S in batch.places:
            step = request.steps[request.done]
            valid_S = torch.tensor([True] * step.lead + step.valid)
            got_SH, want_SH = out_TH[place_S], request.wants[request.done]
            assert relative_error(got_SH[valid_S], want_SH[valid_S]) < 1e-6
            want_fresh = torch.zeros(len(place_S), dtype=torch.bool)
            want_fresh[request.fresh[request.done]] = True
            assert torch.equal(fresh.masks.fresh_T[place_S], want_fresh)
            request.done += 1
            if request.done == len(request.steps):
                running[request.slot] = None
    assert addresses == [t.data_ptr() for t in (store.cache_LMH, store.stamps_M, store.support_LSE)]
    return store


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("name", CONFIGS)
@given(seed=st.integers(0, 2**31), forwards=st.integers(2, 9))
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
def test_one_request_equals_the_block(name: str, kind: str, seed: int, forwards: int) -> None:
    rng = random.Random(seed)
    model, request = Model(kind), random_request(rng, forwards)
    context = run_block(model, request, CONFIGS[name])
    store = run_together(model, [request], CONFIGS[name], 1, rng)
    want, got = context.counters.read(), store.counters.read()
    assert (got.rows, got.pairs, got.forwards, got.forward_rows) == (
        want.rows, want.pairs, want.forwards, want.forward_rows
    )  # fmt: skip
    assert got.fallbacks == want.fallbacks and got.active_experts == want.active_experts
    assert got.weight_bytes == want.weight_bytes and got.total.support_experts == want.total.support_experts


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.support_scope == "sequence"])
@given(seed=st.integers(0, 2**31), count=st.integers(2, 7), slots=st.integers(2, 4))
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
def test_requests_that_come_and_go_compute_what_each_computes_alone(
    name: str, kind: str, seed: int, count: int, slots: int
) -> None:
    rng = random.Random(seed)
    model = Model(kind)
    requests = [random_request(rng, rng.randint(1, 8)) for _ in range(count)]
    for request in requests:
        run_block(model, request, CONFIGS[name])
    run_together(model, requests, CONFIGS[name], slots, rng)


def test_these_trajectories_reuse_restrict_and_fall_short() -> None:
    """The comparisons above would hold of a store that does nothing; this one does much."""
    model, rng, config = Model("sigmoid_group"), random.Random(5), CONFIGS["narrow"]
    requests = [random_request(rng, 8) for _ in range(30)]
    for request in requests:
        run_block(model, request, config)
    work = run_together(model, requests, config, 4, rng).counters.read()
    assert work.rows < 0.85 * work.dense_rows and work.fallbacks["shortfall"] > 20
    assert K < work.support_size < 0.75 * E and work.coverage < 0.99


# ---------------------------------------------------------------------------------------------------- lifecycle of rows


def window(slot: int = 0, generation: int = 1, block: int = 0, rows: int = W) -> RowKeys:
    return RowKeys(
        torch.full((rows,), slot),
        torch.full((rows,), generation),
        torch.full((rows,), block),
        torch.arange(rows),
    )


def join(*keys: RowKeys) -> RowKeys:
    names = ("slot_T", "generation_T", "block_T", "position_T")
    return RowKeys(*(torch.cat([getattr(k, name) for k in keys]) for name in names))


@dataclass
class Runner:
    """Forwards of random inputs on one store; every row must be what all its experts give."""

    model: Model
    store: RowStore

    @staticmethod
    def make(slots: int = 2, config: EpochConfig | None = None) -> Runner:
        model = Model("softmax")
        return Runner(model, model.store(config or EpochConfig(coverage=None, refresh_interval=None), slots))

    def plan(self, keys: RowKeys, ids: list[int], changed: Tensor | None = None) -> FreshRows:
        poison(self.store)
        ids_T = torch.tensor(ids, dtype=torch.int64)
        return fresh_rows(self.store, keys, ids_T, ids_T == MASK, changed_T=changed)

    def run(self, keys: RowKeys, ids: list[int], changed: Tensor | None = None) -> list[int]:
        """One forward; the places of its fresh rows."""
        fresh = self.plan(keys, ids, changed)
        out_TH = self.model.functional(self.store, fresh, torch.randn(len(ids), H))
        assert out_TH.isfinite().all()
        return fresh.rows.fresh_R.tolist()


ALL = list(range(W))
DECODED = [1, 2, 3, MASK, 4, MASK]


def test_a_stable_row_is_reused_and_the_others_are_not() -> None:
    runner = Runner.make()
    assert runner.run(window(), DECODED) == ALL  # cold
    assert runner.run(window(), DECODED) == [3, 5]  # live
    assert runner.run(window(), [1, 2, 3, 7, 4, MASK]) == [3, 5]  # new, live
    assert runner.run(window(), [1, 2, 3, 7, 4, MASK]) == [5]
    assert runner.run(window(), [1, 2, 0, 7, 4, MASK]) == [2, 5]  # edited
    assert runner.run(window(), [1, MASK, 0, 7, 4, MASK]) == [1, 5]  # masked again
    assert runner.run(window(), [1, 2, 0, 7, 4, MASK]) == [1, 5]  # and decoded as before: still not the old output
    changed = torch.arange(W) == 4
    assert runner.run(window(), [1, 2, 0, 7, 4, MASK], changed) == [4, 5]
    part = [i for i in ALL if i != 2]
    some = RowKeys(*(column[part] for column in vars(window()).values()))
    assert runner.run(some, [[1, 2, 0, 7, 4, MASK][i] for i in part]) == [4]  # row 2 was absent, so its entry is void
    assert runner.run(window(), [1, 2, 0, 7, 4, MASK]) == [2, 5]


def test_a_decoded_row_that_may_still_be_edited_is_not_cached() -> None:
    runner, stable = Runner.make(), torch.arange(1, W + 1)
    for live, expected in (([1], ALL), ([], [1]), ([], []), ([2], [2]), ([], [2]), ([], [])):
        poison(runner.store)
        live_T = torch.zeros(W, dtype=torch.bool)
        live_T[live] = True
        fresh = fresh_rows(runner.store, window(), stable, live_T)
        assert fresh.rows.fresh_R.tolist() == expected
        assert runner.model.functional(runner.store, fresh, torch.randn(W, H)).isfinite().all()


@pytest.mark.parametrize("other", [{"generation": 2}, {"block": 1}, {"generation": 0}])
def test_another_request_or_block_starts_cold(other: dict[str, int]) -> None:
    runner = Runner.make()
    for _ in range(2):
        runner.run(window(), DECODED)
    assert runner.run(window(**other), DECODED) == ALL
    assert runner.run(window(**other), DECODED) == [3, 5]
    # The first key again is nothing that the store remembers.
    assert runner.run(window(), DECODED) == ALL


def test_slots_have_their_own_clocks() -> None:
    runner = Runner.make(config=EpochConfig(coverage=None, refresh_interval=3))
    first, second = window(0), window(1, generation=7, block=5)
    stable = [1, 2, 3, 4, 5, 6]
    for _ in range(2):
        runner.run(first, stable)  # its forwards 0, 1
    assert runner.run(join(first, second), stable * 2) == [6, 7, 8, 9, 10, 11]  # 2 of the first, 0 of the second
    assert runner.run(join(second, first), stable * 2) == [6, 7, 8, 9, 10, 11]  # 1 of the second, 3 of the first
    assert runner.run(first, stable) == []  # 4 of the first; the second pauses
    assert runner.run(second, stable) == []  # 2 of the second
    assert runner.run(second, stable) == ALL  # 3


def test_rows_without_state_are_always_fresh_and_padding_never() -> None:
    runner = Runner.make()
    lead = RowKeys(*(torch.full((2,), value) for value in (0, 1, 3, -1)))
    padding = RowKeys(*(torch.full((3,), -1) for _ in range(4)))
    keys = join(padding, lead, window(block=4))
    for expected in ([3, 4, *range(5, 11)], [3, 4, 8, 10]):
        fresh = runner.plan(keys, [0, 0, MASK, 5, 5, *DECODED])
        assert fresh.rows.fresh_R.tolist() == expected and not fresh.masks.valid_T[:3].any()
        x_TH = torch.randn(11, H)
        x_TH[:3] = float("nan")
        out_TH = runner.model.functional(runner.store, fresh, x_TH)
        assert out_TH[3:].isfinite().all()
    for keys, ids in ((padding, [0] * 3), (RowKeys(*(torch.zeros(0, dtype=torch.long) for _ in range(4))), [])):
        fresh = runner.plan(keys, ids)
        assert fresh.num_fresh == 0
        assert runner.model.functional(runner.store, fresh, torch.zeros(len(ids), H)).eq(0).all()
    assert runner.run(window(block=4), DECODED) == [3, 5]  # nobody else's forward changed anything


def test_an_abandoned_forward_leaves_nothing_behind() -> None:
    runner = Runner.make()
    for _ in range(2):
        runner.run(window(), DECODED)
    fresh = runner.plan(window(), [1, 2, 6, MASK, MASK, MASK])
    restore_rows(runner.store, 0, fresh, torch.full((fresh.num_fresh, H), float("nan")))
    # Rows 2 and 4 come back with the tokens that their entries had: layer 0 holds something else by now.
    assert runner.run(window(), DECODED) == [2, 3, 4, 5]
    assert runner.run(window(), DECODED) == [3, 5]
    cold = runner.plan(window(generation=5), DECODED)
    assert cold.num_fresh == W
    assert runner.run(window(generation=5), DECODED) == ALL  # the cold pass did not happen
    with pytest.raises(RuntimeError, match=r"forward 6, which is over or was replaced"):
        runner.store.complete(cold)
    with pytest.raises(RuntimeError, match="is over or was replaced"):
        restore_rows(runner.store, 0, cold, torch.zeros(W, H))


def test_a_forward_that_left_out_a_layer_is_not_recorded() -> None:
    runner = Runner.make()
    fresh = runner.plan(window(), DECODED)
    restore_rows(runner.store, 0, fresh, torch.randn(W, H))
    with pytest.raises(RuntimeError, match=r"MoE layers \[1\] of 2 were not restored"):
        runner.store.complete(fresh)
    assert runner.run(window(), DECODED) == ALL


@pytest.mark.parametrize("as_tensor", [False, True])
def test_invalidated_rows_and_slots(as_tensor: bool) -> None:
    runner = Runner.make()

    def numbers(*values: int) -> Tensor | list[int]:
        return torch.tensor(values) if as_tensor else list(values)

    both = join(window(0), window(1))
    runner.run(both, DECODED * 2)
    runner.store.invalidate(numbers(1, 0, -1), numbers(2, 0, 4))
    assert runner.run(both, DECODED * 2) == [0, 3, 5, 8, 9, 11]
    assert runner.run(both, DECODED * 2) == [3, 5, 9, 11]
    runner.store.invalidate(numbers(1, -1))
    assert runner.run(both, DECODED * 2) == [3, 5, *range(6, 12)]
    # While a forward is under way: its outputs of these rows are void too.
    fresh = runner.plan(both, [0, *DECODED[1:]] * 2)
    runner.store.invalidate(numbers(0), numbers(0))
    runner.store.invalidate(numbers(1))
    runner.model.functional(runner.store, fresh, torch.randn(12, H))
    assert runner.run(both, [0, *DECODED[1:]] * 2) == [0, 3, 5, *range(6, 12)]
    with pytest.raises(ValueError, match="2 slots and 1 positions"):
        runner.store.invalidate(numbers(0, 1), numbers(0))


def test_supports_of_paused_slots_stay() -> None:
    config = EpochConfig(coverage=0.5, coverage_floor=0.0, refresh_interval=None, restrict_new=True)
    runner = Runner.make(config=config)
    first, second = window(0), window(1)
    runner.run(first, [MASK] * W)
    kept = runner.store.support_LSE[:, 0].clone()
    assert (kept.sum(-1) < E).all()
    runner.run(second, [MASK] * W)
    runner.run(second, [MASK] * W)
    assert torch.equal(runner.store.support_LSE[:, 0], kept)
    # A shortfall of a slot that pauses is repaired when it is back, and not before.
    runner.store._short_LS[:, 0] = True
    runner.store.support_LSE[:, 0] = torch.arange(E) < K
    runner.run(second, [MASK] * W)
    assert runner.store._short_LS[:, 0].all() and (runner.store.support_LSE[:, 0].sum(-1) == K).all()
    fresh = runner.plan(first, [MASK] * W)
    assert all(rebuild is not None and rebuild.tolist() == [True, False] for rebuild in fresh.rebuild_L)
    runner.model.functional(runner.store, fresh, torch.randn(W, H))
    assert not runner.store._short_LS[:, 0].any() and (runner.store.support_LSE[:, 0].sum(-1) > K).all()


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (window(slot=2), r"a slot outside 0\.\.1 \(padding is -1\)"),
        (window(slot=-2), r"a slot outside 0\.\.1"),
        (window(rows=W + 1), r"a position outside 0\.\.5"),
        (join(window(), window(rows=1)), "two rows with the same slot and position"),
        (RowKeys(*vars(window(generation=-1)).values()), "a generation or block below 0"),
        (
            RowKeys(torch.zeros(W).long(), torch.ones(W).long(), torch.arange(W) // 3, torch.arange(W)),
            "rows of one slot with different generations or blocks",
        ),
    ],
)
def test_keys_that_cannot_be_leave_the_store_as_it_was(keys: RowKeys, message: str) -> None:
    runner = Runner.make()
    runner.run(window(), DECODED)
    rows = keys.slot_T.shape[0]
    with pytest.raises(ValueError, match=message):
        fresh_rows(runner.store, keys, torch.zeros(rows).long(), torch.zeros(rows).bool())
    assert runner.run(window(), DECODED) == [3, 5]


def test_tensors_that_do_not_fit_are_named() -> None:
    runner = Runner.make()
    ids_T, live_T = torch.tensor(DECODED), torch.tensor(DECODED) == MASK
    store = runner.store
    with pytest.raises(ValueError, match=r"live_T is torch.int64 \(6,\) on cpu: expected torch.bool \[6\]"):
        fresh_rows(store, window(), ids_T, live_T.long())
    with pytest.raises(ValueError, match=r"slot_T is torch.int64 \(5,\)"):
        fresh_rows(store, window(rows=5), ids_T, live_T)
    with pytest.raises(ValueError, match=r"changed_T is torch.bool \(1,\)"):
        fresh_rows(store, window(), ids_T, live_T, changed_T=live_T[:1])
    fresh = fresh_rows(store, window(), ids_T, live_T)
    with pytest.raises(ValueError, match="7 rows: this forward was planned for 6"):
        fresh.pick(torch.zeros(7, H))
    with pytest.raises(ValueError, match=r"logits_RE is torch.float32 \(5, 16\) .*expected floating point \[6, 16\]"):
        route_rows(store, 0, fresh, torch.zeros(5, E))
    with pytest.raises(ValueError, match=r"layer=2: expected 0\.\.1"):
        route_rows(store, 2, fresh, torch.zeros(6, E))
    with pytest.raises(ValueError, match=r"y_RH is torch.float64"):
        restore_rows(store, 0, fresh, torch.zeros(6, H).double())
    with pytest.raises(ValueError, match=r"out is torch.float32 \(5, 16\)"):
        restore_rows(store, 0, fresh, torch.zeros(6, H), out=torch.zeros(5, H))
    y_RH = torch.zeros(6, H)
    with pytest.raises(ValueError, match="shares memory"):
        restore_rows(store, 0, fresh, y_RH, out=y_RH)
    with pytest.raises(ValueError, match="shares memory"):
        restore_rows(store, 0, fresh, y_RH, out=store.cache_LMH[0, :6])
    with pytest.raises(RuntimeError, match="requires gradients"):
        restore_rows(store, 0, fresh, y_RH.clone().requires_grad_())
    assert restore_rows(store, 0, fresh, y_RH) is y_RH


def test_restore_writes_the_given_buffer() -> None:
    runner = Runner.make()
    padded = join(window(), RowKeys(*(torch.full((2,), -1) for _ in range(4))))
    for _ in range(2):
        fresh = runner.plan(padded, [*DECODED, 0, 0])
        out = torch.full((8, H), float("nan"))
        for layer in range(LAYERS):
            y_RH = torch.randn(fresh.num_fresh, H)
            assert restore_rows(runner.store, layer, fresh, y_RH, out=out) is out
            assert torch.equal(out[fresh.rows.fresh_R], y_RH) and out[6:].eq(0).all() and out.isfinite().all()
        runner.store.complete(fresh)
    assert fresh.num_fresh == 2


def test_stores_that_cannot_be() -> None:
    def make(config: EpochConfig, router: RouterSpec, **sizes: int) -> RowStore:
        return RowStore(config, router, **{"num_layers": 1, "max_slots": 2, "window": 4, "hidden_size": 8, **sizes})

    with pytest.raises(ValueError, match="support_scope='batch' with max_slots=2"):
        make(EpochConfig.paper(), ROUTERS["softmax"])
    pool = RouterSpec(kind="block_pool", num_experts=8, top_k=2, expert_capacity=4, block_size=4)
    with pytest.raises(ValueError, match="'block_pool' needs the scores of whole routing blocks"):
        make(EpochConfig(), pool)
    for name in ("num_layers", "max_slots", "window", "hidden_size"):
        with pytest.raises(ValueError, match=f"{name}=0: expected at least 1"):
            make(EpochConfig(), ROUTERS["softmax"], **{name: 0})
    store = make(EpochConfig(), ROUTERS["softmax"])
    assert store.cache_LMH.dtype == torch.bfloat16 and store.cache_LMH.shape == (1, 8, 8)
    assert 0 <= store.nbytes - (128 + 9 * 9 + 2 * E + 2) <= 48
