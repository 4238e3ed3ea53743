"""Decoding with experts on several gloo ranks: the tokens of one process, and errors instead of hangs."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from ep_model import PROMPTS, answers, whole_model
from helpers import GOLDEN

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.experts.shard import LocalExperts
from epoch_moe.freshlane.collectives import ExpertParallelError, Pending
from epoch_moe.freshlane.lane import ListedLane
from epoch_moe.models import load_model
from epoch_moe.models.llada_moe import LLaDAMoEConfig, LLaDAMoEModelLM

pytestmark = pytest.mark.filterwarnings("ignore:.*has no tokenizer files")
SOURCE = str(GOLDEN / "llada2")
CONFIGS: dict[str, EpochConfig | None] = {
    "dense": None,
    "exact": EpochConfig.exact(),
    "default": EpochConfig(coverage=0.6, coverage_floor=0.55, refresh_interval=3),
    "paper": EpochConfig.paper(coverage=0.6, coverage_floor=0.55, refresh_interval=3),
    "batch": EpochConfig(coverage=0.6, coverage_floor=0.55, refresh_interval=3, support_scope="batch"),
}


Jobs = dict[str, tuple[str, ...]]
"""Folders of models, and by which of `CONFIGS` each is decoded."""


def decode_on_ranks(rank: int, jobs: Jobs, want: dict[str, list[list[int]]]) -> dict[str, int]:
    """Every job in both layouts; compares with one process's tokens and counts the pairs of this rank."""
    pairs: dict[str, int] = {}
    world = dist.get_world_size()
    for source, names in jobs.items():
        for layout in ("sharded", "replicated"):
            model = whole_model(source)
            report = epoch_moe.patch(model, ep_group=dist.group.WORLD, ep_layout=layout)
            assert f"on rank {rank} of {world}" in str(report)
            mine = range(5 * rank // world, 5 * (rank + 1) // world) if layout == "sharded" else range(5)
            for name in names:
                config = CONFIGS[name]
                epoch_moe.patch(model, config)
                with epoch_moe.in_step(model):
                    # In two calls on this rank, or one, or none, while the others make other numbers of them.
                    cut = len(mine) if layout == "replicated" else rank % 2
                    got = answers(model, [PROMPTS[i] for i in mine[:cut]], config)
                    got += answers(model, [PROMPTS[i] for i in mine[cut:]], config)
                key = f"{source} {name}"
                if layout == "replicated" or config is None or config.support_scope == "sequence":
                    assert got == [want[key][i] for i in mine], (key, layout, got)
            pairs[f"{source} {layout}"] = model._epoch_moe.ep.dispatcher.traffic.combine_rows
    return pairs


def batch_scope_on_ranks(rank: int, source: str, want: dict[str, list[list[int]]]) -> None:
    """One support for the sequences of all ranks: every rank decodes its share of one batch."""
    world = dist.get_world_size()
    model = whole_model(source)
    epoch_moe.patch(model, ep_group=dist.group.WORLD)
    for name in ("paper", "batch"):
        epoch_moe.patch(model, CONFIGS[name])
        mine = range(5 * rank // world, 5 * (rank + 1) // world)
        with epoch_moe.in_step(model):
            got = answers(model, [PROMPTS[i] for i in mine], CONFIGS[name])
        assert got == [want[f"{source} {name}"][i] for i in mine], (name, got)


def kernels_on_ranks(rank: int, source: str, want: list[list[int]]) -> None:
    """Local experts by the Triton kernels, in the interpreter."""
    config = EpochConfig(coverage=0.6, coverage_floor=0.55, refresh_interval=3, backend="triton")
    for layout, mine in (("sharded", [rank]), ("replicated", [0, 1])):
        model = whole_model(source)
        report = epoch_moe.patch(model, config, ep_group=dist.group.WORLD, ep_layout=layout)
        assert report.backend == "triton"
        with epoch_moe.in_step(model):
            got = answers(model, [PROMPTS[i] for i in mine], config)
        assert got == [want[i] for i in mine], (layout, got)


def one_process(jobs: Jobs) -> dict[str, list[list[int]]]:
    want = {}
    for source, names in jobs.items():
        model = whole_model(source)
        epoch_moe.patch(model)
        for name in names:
            want[f"{source} {name}"] = answers(model, PROMPTS, CONFIGS[name])
    return want


@pytest.fixture
def few_experts(tmp_path: Path) -> str:
    """As many experts as ranks, and all of them chosen (E = 4 = K)."""
    torch.manual_seed(3)
    config = LLaDAMoEConfig(
        vocab_size=128, hidden_size=32, expert_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_experts=4, num_experts_per_tok=4, initializer_range=0.3, mask_token_id=125, eos_token_id=124,
        pad_token_id=124, max_position_embeddings=64,
    )  # fmt: skip
    LLaDAMoEModelLM(config).save_pretrained(tmp_path / "few")
    return str(tmp_path / "few")


@pytest.mark.parametrize("world", [2, 4])
def test_tokens_are_those_of_one_process(world: int, few_experts: str) -> None:
    # Which settings there are does not depend on the number of ranks: four of them see the two that differ most.
    names = tuple(CONFIGS) if world == 2 else ("default", "batch")
    jobs = {SOURCE: names, str(GOLDEN / "llada_moe_shared_bias"): ("dense", "default"), few_experts: ("default",)}
    traffic = run_ranks(world, decode_on_ranks, jobs, one_process(jobs))
    assert all(rows > 0 for rank in traffic for rows in rank.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_compute_their_experts_with_the_kernels(few_experts: str) -> None:
    model = whole_model(few_experts)
    config = EpochConfig(coverage=0.6, coverage_floor=0.55, refresh_interval=3, backend="loop")
    epoch_moe.patch(model, config)
    run_ranks(2, kernels_on_ranks, few_experts, answers(model, PROMPTS[:2], config))


def test_all_pairs_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCH_MOE_TEST_ROUTING", "one_rank")
    jobs: Jobs = {SOURCE: ("dense", "default")}
    traffic = run_ranks(2, decode_on_ranks, jobs, one_process(jobs))
    sharded = [rank[f"{SOURCE} sharded"] for rank in traffic]
    assert sharded[0] > 0 and sharded[1] == 0  # only rank 0 sends sums back


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_support_for_all_ranks(world: int) -> None:
    run_ranks(world, batch_scope_on_ranks, SOURCE, one_process({SOURCE: ("paper", "batch")}))


def order_of_events(rank: int, source: str, layout: Any) -> set[tuple[str, ...]]:
    """What one planned layer does between starting and ending its exchanges, each order that occurs once."""
    model = whole_model(source)
    epoch_moe.patch(model, EpochConfig(), ep_group=dist.group.WORLD, ep_layout=layout)
    dispatcher, events, orders = model._epoch_moe.ep.dispatcher, [], set()

    def noted(start: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            pending = start(*args, **kwargs)
            events.append(f"{name} starts")

            def finish() -> Any:
                events.append(f"{name} ends")
                return pending.wait()

            return Pending(None, name, finish)

        return call

    def note(function: Any, name: str) -> Any:
        def call(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return call

    def opened(self: ListedLane, **fields: Any) -> Any:
        events.clear()
        original(self, **fields)

    def restored(self: ListedLane, *args: Any) -> Any:
        out = restore(self, *args)
        orders.add(tuple(events))
        return out

    original, restore = ListedLane.__init__, ListedLane.restore
    ListedLane.__init__, ListedLane.restore = opened, restored  # type: ignore[method-assign]
    dispatcher.kind.dispatch = noted(dispatcher.kind.dispatch, "dispatch")
    dispatcher.kind.combine = noted(dispatcher.kind.combine, "return")
    ListedLane.copy_cached = note(ListedLane.copy_cached, "cached rows")  # type: ignore[method-assign]
    for block in model._epoch_moe.blocks.values():
        block.shared_experts.forward = note(block.shared_experts.forward, "shared expert")
    answers(model, PROMPTS[:1], EpochConfig())
    return orders


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_shared_expert_and_cached_rows_fill_the_time_of_the_exchanges(layout: str) -> None:
    there, back = ["dispatch starts", "dispatch ends"], ["return starts", "cached rows", "return ends"]
    (there if layout == "sharded" else back).insert(1, "shared expert")
    for orders in run_ranks(2, order_of_events, SOURCE, layout):
        assert orders == {(*there, *back)}, orders


def load_own_share(rank: int, source: str, want: list[list[int]]) -> dict[str, Any]:
    model, _ = load_model(source, ep_group=dist.group.WORLD, ep_layout="replicated")
    assert answers(model, PROMPTS, EpochConfig.exact()) == want
    held: dict[str, Any] = {"keys": sorted(name for name, _ in [*model.named_parameters(), *model.named_buffers()])}
    alone, _ = load_model(source, ep_group=dist.new_subgroups(1)[0])
    assert len(alone.state_dict()) > len(held["keys"])  # all experts are here
    for what, save in (
        ("state_dict", model.state_dict),
        ("state_dict", lambda: model.save_pretrained(tempfile.mkdtemp())),
        ("copying or pickling", lambda: copy.deepcopy(model)),
        ("copying or pickling", lambda: pickle.dumps(model)),
        ("copying or pickling", lambda: torch.save(model, io.BytesIO())),
    ):
        with pytest.raises(RuntimeError, match=rf"{what}.* is refused: rank {rank} of 2 holds experts \d+ to \d+ of"):
            save()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    held["bytes"] = sum(storages.values())
    block = next(iter(model._epoch_moe.blocks.values()))
    assert isinstance(block.experts, LocalExperts) and block.weights.moved_bytes == 0
    with pytest.raises(RuntimeError, match="split over 2 ranks"):
        epoch_moe.unpatch(model)
    with pytest.raises(ValueError, match="split over 2 ranks, where loops of others"), epoch_moe.following(model):
        raise AssertionError
    before = model._epoch_moe.config
    with epoch_moe.patched(model, "exact"):
        assert model._epoch_moe.config == EpochConfig.exact()
    assert model._epoch_moe.config == before and before != EpochConfig.exact()
    with pytest.raises(ValueError, match="first patch"):
        epoch_moe.patch(whole_then_patched(source), ep_group=dist.group.WORLD)
    return held


def whole_then_patched(source: str) -> Any:
    model, _ = load_model(source)
    epoch_moe.patch(model)
    return model


@pytest.mark.parametrize("name", ["llada2", pytest.param("llada_moe", marks=pytest.mark.slow)])
def test_load_model_reads_this_ranks_experts_only(name: str) -> None:
    source = str(GOLDEN / name)
    whole, _ = load_model(source)
    epoch_moe.patch(whole)
    want = answers(whole, PROMPTS, EpochConfig.exact())
    held = run_ranks(2, load_own_share, source, want)
    keys = {key for key in whole.state_dict() if ".experts." in key}
    own = [{key for key in rank["keys"] if ".experts." in key} for rank in held]
    assert own[0] | own[1] == keys and not own[0] & own[1] and len(own[0]) == len(own[1])
    everything = sum(p.numel() * p.element_size() for p in whole.parameters())
    expert_bytes = sum(p.numel() * p.element_size() for n, p in whole.named_parameters() if ".experts." in n)
    assert [rank["bytes"] for rank in held] == [everything - expert_bytes // 2] * 2


def decode_with_capacity(rank: int, source: str, want: list[list[int]]) -> str:
    mine = range(5 * rank // 2, 5 * (rank + 1) // 2)
    prompts = [PROMPTS[i] for i in mine]
    model = whole_model(source)
    epoch_moe.patch(model, ep_group=dist.group.WORLD, ep_capacity=200)
    assert answers(model, prompts, EpochConfig.exact()) == [want[i] for i in mine]
    small = whole_model(source)
    epoch_moe.patch(small, ep_group=dist.group.WORLD, ep_capacity=3)
    with pytest.raises(ExpertParallelError) as error:
        answers(small, prompts, EpochConfig.exact())
    return str(error.value)


def test_a_fixed_capacity_gives_the_same_tokens_or_an_error() -> None:
    want = one_process({SOURCE: ("exact",)})[f"{SOURCE} exact"]
    for message in run_ranks(2, decode_with_capacity, SOURCE, want):
        assert "capacity=3" in message
