"""`EpochMoEBlock` around a block of the released remote code's contract, under other names."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from foreign_blocks import FOREIGN
from helpers import assert_as_accurate, assert_gradients, gradients_of, relative_error
from released_block import GROUPS, KEPT, H, K, Mlp, OddlyNamedMixture, Stack
from torch import nn

import epoch_moe
from epoch_moe.block import EpochMoEBlock
from epoch_moe.config import EpochConfig
from epoch_moe.families import describe_block
from epoch_moe.plan.context import BlockPlanContext


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_released_shape_under_another_name_is_the_same_function(training: bool, shared: bool) -> None:
    plain = Stack(shared=shared).train(training)
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    report = epoch_moe.patch(model)
    assert report.patched == ["layers.0.mlp", "layers.1.mlp"] and report.moved_bytes == report.expert_bytes > 0
    for shape in [(2, 7, H), (1, 1, H), (3, 5, H)]:
        x = torch.randn(shape)
        assert_as_accurate(model(x), plain(x), exact(x.double()))
        (out, (logits, ids)), (want, (want_logits, want_ids)) = (
            m.layers[0]["mlp"](x) for m in (model, plain)  # type: ignore[index]
        )
        assert_as_accurate(out, want, exact.layers[0]["mlp"](x.double())[0])  # type: ignore[index]
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(logits, want_logits)
    # Without rows and without contiguous memory, where the released code fails.
    assert model(torch.randn(1, 0, H)).shape == (1, 0, H)
    x = torch.randn(7, 2, H).transpose(0, 1)
    torch.testing.assert_close(model(x), model(x.contiguous()))


def test_training_gradients_are_the_originals() -> None:
    plain = Stack().train()
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    epoch_moe.patch(model)
    x = torch.randn(2, 9, H)
    for m, rows in ((plain, x), (model, x), (exact, x.double())):
        m(rows).square().sum().backward()
    assert_gradients(gradients_of(model), gradients_of(plain), gradients_of(exact))


def test_an_optimizer_step_reaches_the_stacked_weights() -> None:
    plain = Stack().train()
    model = copy.deepcopy(plain)
    epoch_moe.patch(model)
    x = torch.randn(2, 9, H)
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    assert relative_error(model(x), plain(x)) < 1e-5


def test_attributes_and_modes_pass_through() -> None:
    model = Stack(1)
    original = model.layers[0]["mlp"]  # type: ignore[index]
    original.note = "kept"
    epoch_moe.patch(model)
    block = model.layers[0]["mlp"]  # type: ignore[index]
    assert isinstance(block, EpochMoEBlock) and block.note == "kept" and block.config is original.config
    assert block.gate is original.gate and block.experts is original.experts
    model.train(False)
    assert not block.training and not original.training and not block.gate.training
    model.train()
    assert block.training and original.training
    with pytest.raises(AttributeError):
        block.absent  # noqa: B018
    assert "index=0" in repr(block) and "llada2" in repr(block)


def test_hooks_keep_running_and_stay_after_unpatching() -> None:
    model = Stack(1).eval()
    original = model.layers[0]["mlp"]  # type: ignore[index]
    seen: list[str] = []
    before = original.register_forward_hook(lambda *_: seen.append("before"))
    epoch_moe.patch(model)
    block = model.layers[0]["mlp"]  # type: ignore[index]
    block.register_forward_hook(lambda *_: seen.append("after"))
    model(torch.randn(1, 3, H))
    assert seen == ["before", "after"]
    before.remove()
    epoch_moe.unpatch(model)
    model(torch.randn(1, 3, H))
    assert seen == ["before", "after", "after"]


def test_a_child_replaced_while_patched_stays_replaced() -> None:
    model = Stack(1).eval()
    original = model.layers[0]["mlp"]  # type: ignore[index]
    epoch_moe.patch(model)
    model.layers[0]["mlp"].shared_experts = Mlp(5)  # type: ignore[index]
    x = torch.randn(1, 3, H)
    patched_out = model(x)
    epoch_moe.unpatch(model)
    assert original.shared_experts.up_proj.out_features == 5
    assert relative_error(model(x), patched_out) < 1e-6


def test_a_plan_works_on_hidden_states_alone() -> None:
    """The layer, the plan and the lane without a transformers model."""
    model = Stack().eval()
    dense_model = copy.deepcopy(model)
    epoch_moe.patch(model, "exact")
    context = BlockPlanContext(model._epoch_moe, EpochConfig.exact())  # type: ignore[arg-type]
    ids_BS = torch.tensor([[1, 9, 9, 2]])
    with torch.no_grad(), context.block(batch=1, window=4):
        for _ in range(3):
            x = torch.randn(1, 4, H)
            with context.iteration(ids_BS, mask_id=9):
                out = model(x)
                assert model.layers[0]["mlp"](x)[1] is not None  # type: ignore[index]  # a second visit: dense
            assert relative_error(out, dense_model(x)) < 1e-6
    assert context.counters.read().fallbacks == {"revisit": 3, "version": 2}


def wrapped_by_hand(model: Stack) -> list[EpochMoEBlock]:
    blocks = []
    for layer in model.layers:
        layer["mlp"] = EpochMoEBlock(layer["mlp"], describe_block(layer["mlp"]))  # type: ignore[index,arg-type]
        blocks.append(layer["mlp"])  # type: ignore[index]
    return blocks


@torch.no_grad()
def test_blocks_that_somebody_wrapped_are_planned_as_patched_ones() -> None:
    model, config, mask_id = Stack().eval(), EpochConfig(refresh_interval=None, coverage=0.5), 9
    patched, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    epoch_moe.patch(patched, config)
    blocks = wrapped_by_hand(by_hand)
    x = torch.randn(3, 1, 6, H)
    ids_NBS = torch.where(torch.arange(6) < 2 * torch.arange(1, 4)[:, None, None], 1, mask_id)
    outs, works = [], []
    for each, target in ((patched, patched), (by_hand, blocks), (by_hand, blocks)):  # twice: they are joined already
        with epoch_moe.BlockPlanContext(target, config) as context:
            context.begin_block(batch=1, window=6)
            for ids_BS, x_BSH in zip(ids_NBS, x, strict=True):
                with context.iteration(ids_BS, mask_id=mask_id):
                    outs.append(each(x_BSH))
        works.append(context.counters.read())
        with pytest.raises(RuntimeError, match="no block is open"):  # the end of `with` has closed it
            context.iteration(ids_NBS[0], mask_id=mask_id).__enter__()
    assert works[0] == works[1] == works[2] and 0 < works[0].rows < works[0].dense_rows
    assert all(map(torch.equal, outs[:3] * 2, outs[3:]))
    alone = wrapped_by_hand(Stack(1).eval())[0]
    with epoch_moe.BlockPlanContext(alone, config) as context:
        context.begin_block(batch=1, window=6)
        with context.iteration(ids_NBS[0], mask_id=mask_id):
            alone(x[0])
    assert context.counters.read().forwards == 1 and len(context.counters.read().per_layer) == 1


def test_blocks_that_are_no_whole_plan_are_refused() -> None:
    model = Stack()
    blocks = wrapped_by_hand(Stack())
    for target in (model, [], "model", [model], [*blocks, 3]):
        with pytest.raises((TypeError, ValueError), match=r"patched model, or an EpochMoEBlock"):
            epoch_moe.BlockPlanContext(target, None)
    with pytest.raises(ValueError, match="has one of them twice"):
        epoch_moe.BlockPlanContext([blocks[0], blocks[0]], None)
    epoch_moe.patch(model)
    known = [layer["mlp"] for layer in model.layers]  # type: ignore[index]
    for some in ([known[1]], [known[1], known[0]], [blocks[0], known[1]]):
        with pytest.raises(ValueError, match=r"blocks with index \[.*expected all blocks of that plan in their order"):
            epoch_moe.BlockPlanContext(some, None)
    assert [block.index for block in known] == [0, 1] and blocks[0].slot is not blocks[1].slot
    epoch_moe.BlockPlanContext(known, None)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_context_surrounds_a_decode(error: type[BaseException] | None) -> None:
    model = Stack().eval()
    epoch_moe.patch(model)
    context = epoch_moe.BlockPlanContext(model, EpochConfig())
    with pytest.raises(error) if error else nullcontext(), context as entered:
        assert entered is context
        with pytest.raises(RuntimeError, match="is entered already"):
            context.__enter__()
        with pytest.raises(RuntimeError, match="a decode"):
            epoch_moe.unpatch(model)
        context.begin_block(batch=1, window=4)
        if error:
            raise error
    epoch_moe.unpatch(model)


def test_only_blocks_of_a_known_shape_are_described() -> None:
    block = OddlyNamedMixture()
    spec = describe_block(block)
    assert spec is not None and spec.router.kind == "sigmoid_group" and spec.shared == "shared_experts"
    assert (spec.router.n_group, spec.router.topk_group, spec.router.top_k) == (GROUPS, KEPT, K)
    assert describe_block(OddlyNamedMixture(shared=False)).shared is None  # type: ignore[union-attr]
    block.config.expert_capacity, block.config.block_size = 6, 4
    assert describe_block(block).router.kind == "block_pool"  # type: ignore[union-attr]
    assert describe_block(nn.Linear(2, 2)) is None and describe_block(Mlp(3)) is None
    for name in ("gate", "experts"):
        other = OddlyNamedMixture()
        delattr(other, name)
        assert describe_block(other) is None
    broken = OddlyNamedMixture()
    broken.experts = broken.experts[:5]
    with pytest.raises(ValueError, match=r"5 experts but a gate weight \(12, 24\)"):
        describe_block(broken)


@pytest.mark.parametrize("layout", ["stacked", "fused"])
@pytest.mark.parametrize("family", ["llada2", "llada_moe"])
def test_one_block_of_a_stranger_s_model(family: str, layout: str) -> None:
    """With public names only, and no patch."""
    model, _ = epoch_moe.load_model("tiny-" + family.replace("_", "-"), dtype="float32")
    ours = model.model.layers[1].mlp
    block = FOREIGN[family](ours, layout).eval()
    gate = ours.gate
    num_experts, hidden = gate.weight.shape
    if family == "llada2":
        router = epoch_moe.RouterSpec(
            kind="sigmoid_group", num_experts=num_experts, top_k=gate.top_k, n_group=gate.n_group,
            topk_group=gate.topk_group, routed_scaling_factor=gate.routed_scaling_factor,
        )  # fmt: skip
        names = {"gate_bias": "gate.expert_bias", "shared": "shared_experts", "returns_router": True}
    else:
        router = epoch_moe.RouterSpec(kind="softmax", num_experts=num_experts, top_k=ours.top_k)
        names = {"gate_bias": None if block.expert_bias is None else "expert_bias"}
    names |= {"family": "theirs", "router": router, "gate_weight": "gate.weight", "layout": layout}
    # Their own tensors: an EpochMoEBlock shares those of what it wraps.
    exact, plain = copy.deepcopy(block).double(), copy.deepcopy(block)
    wrapped = epoch_moe.EpochMoEBlock(block, epoch_moe.BlockSpec(**names))
    outs = []
    x = torch.randn(2, 5, hidden)
    for module, rows in ((wrapped, x), (plain, x), (exact, x.double())):
        out = module(rows)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        outs.append(out)
    if family == "llada2":
        assert torch.equal(outs[0][1][1], outs[1][1][1])  # the chosen experts
        outs = [out[0] for out in outs]
    assert_as_accurate(*outs)
    assert_gradients(*map(gradients_of, (wrapped, plain, exact)))
    assert wrapped.state_dict().keys() == plain.state_dict().keys()

    for change, message in (
        ({"gate_weight": "gate.w"}, "BlockSpec.gate_weight='gate.w': Foreign.*Block has no such attribute"),
        ({"shared": "mlp"}, "BlockSpec.shared='mlp'"),
        ({"layout": "per_expert", "experts": "gate"}, "layout='per_expert': .* does not hold its experts so"),
        ({"router": epoch_moe.RouterSpec(kind="softmax", num_experts=4, top_k=2)}, r"gate.weight .*\[4, \d+\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            epoch_moe.EpochMoEBlock(plain, epoch_moe.BlockSpec(**(names | change)))
    if family == "llada2":
        with pytest.raises(TypeError, match=r"shared_experts\.gate_proj\.weight, of which BlockSpec"):
            epoch_moe.EpochMoEBlock(plain, epoch_moe.BlockSpec(**(names | {"shared": None})))
