"""Contexts and lifecycles: fallbacks, counters, threads, nesting, exceptions, bad inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from atlas_oracle import atlas, choose
from decode import MASK_ID, Decode, dense, make_decode, moe_blocks, patched_model, plain_model, planned
from helpers import relative_error
from lsp_oracle import MASK, Expectation, Oracle
from torch import Tensor

import epoch_moe.experts.weights
import epoch_moe.freshlane.lane
from epoch_moe.config import EpochConfig
from epoch_moe.experts.run import run_experts
from epoch_moe.experts.views import ExpertViews
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.plan.context import BlockPlanContext, UntrackedContext, open_context
from epoch_moe.plan.support import route_fresh
from epoch_moe.routing import RouterSpec, Routing, Scores

ALL_EXPERTS = EpochConfig(coverage=None, refresh_interval=None)


@pytest.fixture
def model() -> LLaDA2MoeModelLM:
    return patched_model()


def layer_calls(
    model: LLaDA2MoeModelLM, visits: list[list[Callable[[Tensor], Tensor]]], config: EpochConfig = ALL_EXPERTS
) -> tuple[list[list[Tensor]], list[list[Tensor]], dict[str, int]]:
    """Reach the first MoE layer as `visits` says in each forward; its outputs, the dense ones, and the fallbacks."""
    block = moe_blocks(model)[0]
    context = BlockPlanContext(model._epoch_moe, config)
    ids_BS = torch.tensor([[1, 2, 3, MASK_ID], [4, MASK_ID, MASK_ID, 5]])
    got, want = [], []
    with torch.no_grad(), context.block(batch=2, window=4):
        for number, transforms in enumerate(visits):
            inputs = [f(torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(number))) for f in transforms]
            with context.iteration(ids_BS, mask_id=MASK_ID):
                got.append([block(x)[0] for x in inputs])
            want.append([block(x)[0] for x in inputs])
    return got, want, context.counters.read().fallbacks


def same(x: Tensor) -> Tensor:
    return x


def test_a_layer_that_misses_a_forward_starts_anew(model: LLaDA2MoeModelLM) -> None:
    got, want, fallbacks = layer_calls(model, [[same], [], [same], [same]])
    assert fallbacks == {"version": 1}
    for number in (0, 2):
        torch.testing.assert_close(got[number][0], want[number][0])
    assert relative_error(got[3][0], want[3][0]) > 1e-2  # and then the plan works again: rows are reused


@pytest.mark.parametrize("visits", [2, 3, 4])
def test_a_layer_that_is_reached_again_in_one_forward_is_dense(model: LLaDA2MoeModelLM, visits: int) -> None:
    got, want, fallbacks = layer_calls(model, [[lambda x, k=k: x + k for k in range(visits)]] * 3)
    # The first visit of the cold pass is planned; every later forward finds the layer's cache out of date.
    assert fallbacks == {"revisit": 3 * (visits - 1), "version": 2}
    for outs, wants in zip(got, want, strict=True):
        for out, expected in zip(outs, wants, strict=True):
            torch.testing.assert_close(out, expected)


def test_rows_of_another_shape_are_dense(model: LLaDA2MoeModelLM) -> None:
    got, want, fallbacks = layer_calls(model, [[same], [lambda x: x[:, :3]], [same], [same]])
    assert fallbacks == {"shape": 1, "version": 1}
    for number in (0, 1, 2):
        torch.testing.assert_close(got[number][0], want[number][0])


def test_another_dtype_starts_anew(model: LLaDA2MoeModelLM) -> None:
    context = BlockPlanContext(model._epoch_moe, ALL_EXPERTS)
    block = moe_blocks(model)[0]
    ids_BS = torch.tensor([[1, 2, 3, MASK_ID]])
    with torch.no_grad(), context.block(batch=1, window=4):
        with context.iteration(ids_BS, mask_id=MASK_ID):
            block(torch.randn(1, 4, 64))
        model.to(torch.bfloat16)
        model._epoch_moe.ensure_stacked()
        x = torch.randn(1, 4, 64, dtype=torch.bfloat16)
        with context.iteration(ids_BS, mask_id=MASK_ID):
            out = block(x)[0]
        torch.testing.assert_close(out, block(x)[0])
    assert context.counters.read().fallbacks == {"version": 1}


@pytest.mark.parametrize("how", ["argument", "config"])
def test_router_logits_are_given_and_dense(model: LLaDA2MoeModelLM, how: str) -> None:
    decode = make_decode(2, all_valid=True)
    plain = plain_model()
    context = BlockPlanContext(model._epoch_moe, EpochConfig(coverage=0.5, refresh_interval=None))
    with torch.no_grad(), context.block(**decode.block_args):  # type: ignore[arg-type]
        for number, inputs in enumerate(decode.forwards[:4]):
            asks = number == 2
            model.config.output_router_logits = asks and how == "config"
            kwargs = {"output_router_logits": True} if asks and how == "argument" else {}
            with context.iteration(inputs.ids_BS, mask_id=MASK_ID, lead=inputs.lead):
                out = model(inputs.ids_BS, attention_mask=inputs.mask, position_ids=inputs.positions, **kwargs)
            if asks:
                want = plain(
                    inputs.ids_BS,
                    attention_mask=inputs.mask,
                    position_ids=inputs.positions,
                    output_router_logits=True,
                )
                assert relative_error(out.logits, want.logits) < 1e-5
                for logits, expected in zip(out.router_logits, want.router_logits, strict=True):
                    torch.testing.assert_close(logits, expected)
            else:
                assert out.router_logits is None
    assert context.counters.read().fallbacks == {"router_logits": 2, "version": 2}


class Recount:
    """One layer's work row by row, from router scores alone, as the oracles of LSP and ATLAS say (drop, no join)."""

    def __init__(self, spec: RouterSpec, config: EpochConfig, batch: int) -> None:
        self.config = config
        self.spec, self.supports, self.short = spec, [set(range(spec.num_experts))] * batch, [False] * batch
        self.pairs = self.active_experts = self.support_experts = self.used = self.unpaid = self.shortfalls = 0
        self.covered_weight = self.natural_weight = 0.0

    def forward(self, selection_RE: Tensor, combine_RE: Tensor, want: Expectation, cold: bool) -> None:
        selection, combine, fresh = selection_RE.tolist(), combine_RE.tolist(), sorted(want.fresh)
        chosen = [set(choose(row, self.spec)) for row in selection]
        rebuilt, self.short = self.short, [False] * len(self.short)
        for b in range(len(self.supports)):
            if cold or rebuilt[b]:
                votes = [row in want.voting and row[0] == b for row in fresh]
                how = self.config.candidate_factor, None, self.config.least_saving
                self.supports[b] = atlas(selection, combine, votes, self.spec, 0.6, *how)
                self.unpaid += any(votes) and len(self.supports[b]) == self.spec.num_experts
            if cold or rebuilt[b] or len(self.supports[b]) == self.spec.num_experts:
                continue
            rows = [r for r, row in enumerate(fresh) if row in want.restricted and row[0] == b]
            natural = sum(combine[r][e] for r in rows for e in chosen[r])
            inside = sum(combine[r][e] for r in rows for e in chosen[r] & self.supports[b])
            self.covered_weight, self.natural_weight = self.covered_weight + inside, self.natural_weight + natural
            self.used += bool(rows)
            self.support_experts += len(self.supports[b]) * bool(rows)
            self.short[b] = inside < 0.75 * 0.6 * natural
            self.shortfalls += self.short[b]
            for r in rows:
                chosen[r] = chosen[r] if self.short[b] else chosen[r] & self.supports[b]
        self.pairs += sum(map(len, chosen))
        self.active_experts += len(set().union(*chosen))


@pytest.mark.parametrize(("least_saving", "batch", "forwards"), [(0.15, 2, 7), (0.0, 3, 9)])
def test_counters_equal_a_recount(
    model: LLaDA2MoeModelLM, least_saving: float, batch: int, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EpochConfig(coverage=0.6, refresh_interval=3, on_miss="drop", least_saving=least_saving)
    decode = make_decode(6, batch=batch, forwards=forwards)
    oracle = Oracle(decode.batch, 8, 0, constant=False, interval=3, restrict_new=False)
    wants = [
        oracle.forward(f.ids_BS.masked_fill(f.ids_BS == MASK_ID, MASK).tolist(), f.lead, f.valid_BS.tolist())
        for f in decode.forwards
    ]
    recounts = [Recount(block.spec.router, config, decode.batch) for block in moe_blocks(model)]
    visits: list[Scores] = []

    def spy(scores: Scores, *args: object, **kwargs: object) -> Routing:
        visits.append(scores)
        return route_fresh(scores, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(epoch_moe.freshlane.lane, "route_fresh", spy)
    context = BlockPlanContext(model._epoch_moe, config)
    list(planned(model, decode, None, context=context))
    for number, scores in enumerate(visits):
        forward, layer = divmod(number, len(recounts))
        recounts[layer].forward(scores.selection_TE, scores.combine_TE, wants[forward], cold=forward == 0)
    work = context.counters.read()
    fresh = [len(want.fresh) for want in wants]
    for layer, recount in zip(work.per_layer, recounts, strict=True):
        assert (layer.rows, layer.pairs, layer.active_experts) == (sum(fresh), recount.pairs, recount.active_experts)
        assert layer.weight_bytes == recount.active_experts * 3 * 64 * 32 * 4
        assert (layer.supports, layer.support_experts) == (recount.used, recount.support_experts)
        assert layer.unpaid == recount.unpaid
        weights = recount.covered_weight, recount.natural_weight
        assert (layer.covered_weight, layer.natural_weight) == pytest.approx(weights, rel=1e-5)
    valid = sum(int(f.valid_BS.sum()) for f in decode.forwards)
    assert (work.forwards, work.forward_rows, work.dense_rows) == (forwards, valid, 2 * valid)
    assert work.fallbacks.get("shortfall", 0) == sum(recount.shortfalls for recount in recounts)
    assert [h["fresh"] for h in context.counters.history] == fresh
    if least_saving:
        assert work.unpaid > 0 and work.total.supports > 0
    else:
        assert work.unpaid == 0 and work.total.supports > 10 and work.fallbacks and work.pairs < 4 * work.rows


def test_counters_without_a_plan_equal_a_recount(model: LLaDA2MoeModelLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Tensor, int]] = []

    def spy(x_RH: Tensor, ids_RK: Tensor, *args: object, **kwargs: object) -> Tensor:
        calls.append((ids_RK.clone(), x_RH.shape[0]))
        return run_experts(x_RH, ids_RK, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(epoch_moe.experts.weights, "run_experts", spy)
    decode = make_decode(6, all_valid=True)
    context = BlockPlanContext(model._epoch_moe, None)
    list(planned(model, decode, None, context=context))
    work = context.counters.read()
    for index, layer in enumerate(work.per_layer):
        mine = calls[index::2]
        assert layer.rows == sum(rows for _, rows in mine) and layer.pairs == 4 * layer.rows
        assert layer.active_experts == sum(len(ids.unique()) for ids, _ in mine)
        assert layer.weight_bytes == layer.active_experts * 3 * 64 * 32 * 4
    valid = sum(int(f.valid_BS.sum()) for f in decode.forwards)
    assert work.forwards == 7 and work.forward_rows == valid and work.rows == work.dense_rows == 2 * valid
    assert work.total.supports == 0 and work.coverage != work.coverage and work.fallbacks == {}


def test_threads_on_one_model_do_not_mix(model: LLaDA2MoeModelLM) -> None:
    jobs = [
        (make_decode(1, forwards=6), EpochConfig(coverage=0.5, coverage_floor=0.0)),
        (make_decode(2, forwards=6, batch=3, prefix=4), EpochConfig(coverage=None, refresh_interval=2)),
        (make_decode(3, forwards=6, batch=1), None),
    ]
    alone = [list(planned(model, *job)) for job in jobs]
    barrier = threading.Barrier(len(jobs))
    together: list[list[Tensor]] = [[] for _ in jobs]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            steps = planned(model, *jobs[index])
            for _ in range(6):
                barrier.wait(60)
                together[index].append(next(steps))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not errors
    for mine, expected in zip(together, alone, strict=True):
        for logits, want in zip(mine, expected, strict=True):
            torch.testing.assert_close(logits, want, rtol=0, atol=1e-6)


def test_two_models_and_two_blocks_interleave(model: LLaDA2MoeModelLM) -> None:
    other = patched_model("llada2_1")
    jobs = [
        (model, make_decode(1), EpochConfig(coverage=0.5, coverage_floor=0.0)),
        (model, make_decode(2, batch=1), EpochConfig(coverage=None)),
        (other, make_decode(1), EpochConfig(coverage=0.7)),
    ]
    alone = [list(planned(*job)) for job in jobs]
    for number, logits in enumerate(zip(*(planned(*job) for job in jobs), strict=True)):
        for got, expected in zip(logits, alone, strict=True):
            assert torch.equal(got, expected[number])


def test_layers_on_several_devices_get_no_plan(model: LLaDA2MoeModelLM, monkeypatch: pytest.MonkeyPatch) -> None:
    here = model._epoch_moe.ensure_stacked()
    there = [*here[:-1], ExpertViews.fused(here[-1].gate_up_E2FH.to("meta"), here[-1].down_EHF.to("meta"))]
    monkeypatch.setattr(type(model._epoch_moe), "ensure_stacked", lambda _: there)
    context = open_context(model, EpochConfig())
    with pytest.raises(ValueError, match=r"the MoE layers lie on cpu, meta: .*plan=None"):
        context.begin_block(batch=1, window=4)
    assert model._epoch_moe.slot.active is None
    open_context(model, None).begin_block(batch=1, window=4)


def test_forwards_do_not_nest(model: LLaDA2MoeModelLM) -> None:
    first, second = (BlockPlanContext(model._epoch_moe, c) for c in (ALL_EXPERTS, None))
    ids_BS = torch.tensor([[1, MASK_ID]])
    with first.block(batch=1, window=2), second.block(batch=1, window=2), first.iteration(ids_BS, mask_id=MASK_ID):
        with pytest.raises(RuntimeError, match="do not nest"), second.iteration(ids_BS, mask_id=MASK_ID):
            pass
        assert model._epoch_moe.slot.active is not None
    assert model._epoch_moe.slot.active is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_model_dense_and_the_next_block_works(
    model: LLaDA2MoeModelLM, error: type[BaseException]
) -> None:
    decode = make_decode(7)
    want_dense, want = dense(model, decode), list(planned(patched_model(), decode, ALL_EXPERTS))
    context = BlockPlanContext(model._epoch_moe, ALL_EXPERTS)
    first = decode.forwards[0]
    arguments = {"mask_id": MASK_ID, "valid_BS": first.valid_BS, "lead": first.lead}
    context.begin_block(**decode.block_args)  # type: ignore[arg-type]
    with torch.no_grad(), pytest.raises(error), context.iteration(first.ids_BS, **arguments):  # type: ignore[arg-type]
        first.run(model)
        raise error("inside a forward")
    assert model._epoch_moe.slot.active is None
    with pytest.raises(RuntimeError, match="no block is open"), context.iteration(first.ids_BS, **arguments):  # type: ignore[arg-type]
        pass
    with torch.no_grad():
        assert torch.equal(first.run(model), want_dense[0])
    with pytest.raises(error), context.block(**decode.block_args):  # type: ignore[arg-type]
        raise error("inside a block")
    for logits, expected in zip(planned(model, decode, None, context=context), want, strict=True):
        assert torch.equal(logits, expected)


def test_a_new_block_forgets_the_old_one(model: LLaDA2MoeModelLM) -> None:
    decode = make_decode(8, all_valid=True)
    context = BlockPlanContext(model._epoch_moe, EpochConfig(coverage=0.5, coverage_floor=0.0))
    runs = [list(planned(model, decode, None, context=context)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    context.begin_block(batch=1, window=4)  # an unfinished block is discarded
    context.begin_block(**decode.block_args)  # type: ignore[arg-type]
    context.end_block()
    context.end_block()


def test_gradients_under_a_plan_are_refused(model: LLaDA2MoeModelLM) -> None:
    decode = make_decode(0, forwards=1)
    context = BlockPlanContext(model._epoch_moe, ALL_EXPERTS)
    inputs = decode.forwards[0]
    with (
        context.block(**decode.block_args),  # type: ignore[arg-type]
        pytest.raises(RuntimeError, match="gradients"),
        context.iteration(inputs.ids_BS, mask_id=MASK_ID, lead=inputs.lead),
    ):
        inputs.run(model)
    assert inputs.run(model).requires_grad


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ids_BS": torch.zeros(4, dtype=torch.long)}, ["(4,)", "[sequences, rows]"]),
        ({"ids_BS": torch.zeros(2, 5, dtype=torch.long)}, ["(2, 5)", "[2, 4]"]),
        ({"ids_BS": torch.zeros(3, 4, dtype=torch.long)}, ["(3, 4)", "2 sequences"]),
        ({"lead": 2}, ["lead=2", "[2, 6]"]),
        ({"lead": -1, "ids_BS": torch.zeros(2, 3, dtype=torch.long)}, ["lead=-1"]),
        ({"mask_id": None}, ["mask_id", "live_BN"]),
        ({"valid_BS": torch.ones(2, 3, dtype=torch.bool)}, ["valid_BS", "(2, 3)", "[2, 4]"]),
        ({"valid_BS": torch.ones(2, 4)}, ["valid_BS", "torch.float32"]),
        ({"live_BN": torch.ones(1, 4, dtype=torch.bool)}, ["live_BN", "(1, 4)"]),
        ({"changed_BN": torch.ones(2, 4, dtype=torch.long)}, ["changed_BN", "torch.int64"]),
    ],
)
def test_bad_iterations_quote_the_values(
    model: LLaDA2MoeModelLM, arguments: dict[str, object], words: list[str]
) -> None:
    context = BlockPlanContext(model._epoch_moe, ALL_EXPERTS)
    with context.block(batch=2, window=4):
        good = {"ids_BS": torch.zeros(2, 4, dtype=torch.long), "mask_id": MASK_ID}
        with pytest.raises(ValueError) as error, context.iteration(**(good | arguments)):  # type: ignore[arg-type]
            pass
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch": 0, "window": 4}, ["batch=0"]),
        ({"batch": 1, "window": 0}, ["window=0"]),
        ({"batch": 1, "window": 4, "prefix": 4}, ["prefix=4", "window=4"]),
            ({"batch": 1, "window": 4, "prefix": 1, "future": 3}, ["prefix=1", "future=3", "window=4"]),
            ({"batch": 1, "window": 4, "future": -1}, ["future=-1"]),
        ({"batch": 1, "window": 4, "prefix": -1}, ["prefix=-1"]),
    ],
)
@pytest.mark.parametrize("config", [ALL_EXPERTS, None])
def test_bad_blocks_quote_the_values(
    model: LLaDA2MoeModelLM, arguments: dict[str, int], words: list[str], config: EpochConfig | None
) -> None:
    with pytest.raises(ValueError) as error:
        BlockPlanContext(model._epoch_moe, config).begin_block(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_open_context(model: LLaDA2MoeModelLM) -> None:
    assert open_context(model).config == EpochConfig()  # type: ignore[attr-defined]
    assert open_context(model, None).config is None  # type: ignore[attr-defined]
    assert open_context(model, None).lm_head_rows == "block"
    assert open_context(model, ALL_EXPERTS).lm_head_rows == "live"
    with pytest.raises(TypeError, match="plan='exact'"):
        open_context(model, "exact")  # type: ignore[arg-type]
    plain = plain_model()
    assert isinstance(open_context(plain), UntrackedContext)
    with pytest.raises(ValueError, match="patch"):
        open_context(plain, ALL_EXPERTS)
    with open_context(plain).block(batch=1, window=1), open_context(plain).iteration(torch.zeros(1, 1)):
        pass
    assert isinstance(make_decode(0), Decode)
