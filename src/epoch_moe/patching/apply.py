"""`patch`, `unpatch`, `patched`: replace the MoE layers of a loaded model in place, and give them back.

Nothing is patched at import, no class is changed, and nothing is global: a patch lives on one model object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from epoch_moe import checks
from epoch_moe.block import EpochMoEBlock
from epoch_moe.config import EpochConfig
from epoch_moe.experts.run import pick_backend
from epoch_moe.experts.shard import keep_experts
from epoch_moe.experts.weights import ExpertWeights
from epoch_moe.follow.scope import Following, follow_generate
from epoch_moe.follow.transitions import Hints
from epoch_moe.freshlane.agreement import describe_model
from epoch_moe.freshlane.collectives import Ranks
from epoch_moe.freshlane.dispatch_kinds import GROUP_KINDS, KindName
from epoch_moe.freshlane.expert_parallel import ExpertParallel
from epoch_moe.patching import find, refuse
from epoch_moe.patching.report import PatchReport
from epoch_moe.patching.state import PatchState, state_of
from epoch_moe.plan.patched import ATTRIBUTE, Patched, inner_model
from epoch_moe.plan.slot import PlanSlot
from epoch_moe.residency.attach import attach, detach, known_origin, origin_of
from epoch_moe.residency.config import ResidencyConfig
from epoch_moe.spec import BlockSpec


def patch(
    model: nn.Module,
    config: EpochConfig | str | None = "default",
    *,
    strict: bool = True,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    editing: bool | None = None,
    ep_group: Any = None,
    ep_layout: KindName = "sharded",
    ep_capacity: int | None = None,
    residency: ResidencyConfig | None = None,
) -> PatchReport:
    """Replace the MoE blocks of ``model`` by `EpochMoEBlock`, in place.

    The blocks keep their parameters, and `state_dict` keeps its keys and values; the experts' parameters become views
    of one stacked tensor per layer. Without a plan a patched model computes what it computed before. Calling `patch`
    again changes the configuration and the last three arguments only, and is refused while anything is under way on the
    model (a decode, a block, a forward, in any thread).

    Loops that know nothing of plans are followed by what their forwards look like (docs/plans.md, "Loops of others"),
    but only within a call of the model's own ``generate`` (remote code), or where the caller says so::

        epoch_moe.patch(model)
        with epoch_moe.following(model, block_length=32):
            out = pipeline(prompt)
        print(epoch_moe.plan_report(model))

    Any other forward is the model's own function, whatever came before it.

    Args:
        model: a loaded model with MoE blocks of a known family, our own class or remote code; of a model in a peft
            wrapper, the one inside.
        config: the plan that `epoch_moe.generate` uses by default: an `EpochConfig`, a preset name (``"default"``,
            ``"exact"``, ``"paper"``, ``"dense"``), or None for no plan.
        strict: raise where no MoE block is found or one cannot be patched; False skips it and reports why.
        mask_token_id, block_length, editing: for loops of others, where `epoch_moe.following` is not told otherwise.
        ep_group: split the experts over the ranks of this ``torch.distributed`` group (or one-dimensional DeviceMesh):
            this rank keeps its share, and the others' weights are freed, so this cannot be undone. All ranks then call
            `epoch_moe.generate` (see `epoch_moe.in_step`); plain forwards must be called by all ranks together.
        ep_layout: ``"sharded"``: every rank has its own prompts; ``"replicated"``: all ranks have the same.
        ep_capacity: rows that a rank may send to another one per layer, for buffers of fixed size; None: exact counts.
        residency: keep a part of the experts in fast memory (docs/residency.md). The others lie in the checkpoint's
            files, where these hold the model's experts bit for bit, or go to a temporary file. `state_dict` is refused
            while they are there; `unpatch` brings them back.

    Raises:
        ValueError: no MoE block of a known family (``strict``), or one of the last three arguments is no such thing.
            Or the configuration asks for a backend that these experts rule out, or the budget holds no expert.
        TypeError: experts that cannot be stacked: quantised, adapter-wrapped, on the meta device (``strict``).

    Example:
        >>> import epoch_moe
        >>> model, tokenizer = epoch_moe.load_model("tiny-llada2")
        >>> report = epoch_moe.patch(model, "exact")
        >>> report.family, len(report.patched)
        ('llada2', 3)
        >>> epoch_moe.unpatch(model)
    """
    model = inner_model(model)
    if isinstance(config, str):
        config = EpochConfig.preset(config)
    checks.instance("config", config, (EpochConfig, type(None)), "an EpochConfig, a preset name or None")
    checks.instance("residency", residency, (ResidencyConfig, type(None)), "a ResidencyConfig or None")
    checks.flag("strict", strict)
    checks.choice("ep_layout", ep_layout, GROUP_KINDS)
    if ep_capacity is not None:
        checks.whole("ep_capacity", ep_capacity, "rows", least=1)
    hints = Hints.checked(model, mask_token_id, block_length, editing)
    state = state_of(model)
    if state is not None:
        if residency is not None and (state.residency is None or state.residency.config != residency):
            raise ValueError("the model is patched already: unpatch it first to change where its experts lie")
        if ep_group is not None and (state.ep is None or state.ep.ranks.group is not Ranks(ep_group).group):
            raise ValueError("the model is patched already: ep_group can only be given to the first patch of a model")
        if config is not None:
            config.check_model(len(state.blocks), getattr(model, "config", None))
        return _update(state, config, hints)

    backend, origin = "auto" if config is None else config.backend, origin_of(model)
    found, skipped = find.blocks_in(model)
    if not found and strict:
        raise find.none_found(model, skipped)
    slot = PlanSlot()
    new = PatchState(slot, config, {})
    moved = peak = 0
    prepared: list[tuple[str, nn.Module, BlockSpec]] = []
    for path, (module, spec) in found.items():
        # Everything that can be refused is refused before the first module is touched.
        reason = "" if origin is not None else refuse.refusal(path, module, spec)
        if reason and strict:
            raise TypeError(f"{path} cannot be patched: {reason}. Pass strict=False to skip it")
        if reason:
            skipped[path] = reason
        else:
            prepared.append((path, module, spec))
    for _, module, spec in prepared:
        pick_backend(backend, ExpertWeights(spec.holder(module), spec.layout).outline(), pieces=residency is not None)
    if config is not None:
        config.check_model(len(prepared), getattr(model, "config", None))
    slot.num_layers = len(prepared)
    if ep_group is not None:
        new.ep = _split(prepared, ep_group, ep_layout, ep_capacity, partial(describe_model, model, new.blocks))
    dispatcher = None if new.ep is None else new.ep.dispatcher
    for path, module, spec in prepared:
        block = EpochMoEBlock(module, spec, slot, len(new.blocks), backend, dispatcher)
        new.blocks[path] = block
    if residency is not None and new.blocks:
        share = None if new.ep is None else new.ep.dispatcher.range.numbers
        new.residency = attach(residency, new.blocks, origin or known_origin(model), share)
        slot.listener = new.residency.clock
    for block in new.blocks.values():
        if not block.weights.is_stacked():
            block.weights.ensure()
            moved += block.weights.moved_bytes
            peak = max(peak, block.weights.peak_bytes)
    for path, block in new.blocks.items():
        parent, name = find.parent_of(model, path)
        parent._modules[name] = block
        if "_hf_hook" in block.original.__dict__:
            new.device_hooks[path] = _take_over_hook(block)
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
    seen = Patched(slot, config, new.blocks, new.ep)
    new.following, new.generate = Following(seen, config, hints), follow_generate(model)
    # A plan must be there before it is asked for router logits.
    new.hooks.append(base.register_forward_pre_hook(new.following.before, with_kwargs=True))
    new.hooks.append(base.register_forward_hook(new.following.after, always_call=True))
    new.hooks.append(base.register_forward_pre_hook(new.before_forward, with_kwargs=True))
    new.hooks.append(model.register_load_state_dict_post_hook(new.after_load))
    new.hooks.append(model.register_state_dict_pre_hook(new.before_saving))
    object.__setattr__(model, ATTRIBUTE, new)
    return _report(new, skipped, moved, peak, updated=False)


def unpatch(model: nn.Module) -> None:
    """Give a patched model its original MoE blocks back.

    Raises:
        ValueError: the model is not patched.
        RuntimeError: a decode, a block or a forward is under way on the model, in any thread; or somebody replaced or
            wrapped a patched block since; or experts cannot be read back from where they lie (`epoch_moe.residency`).
            The error names it, and nothing is changed.

    Example:
        >>> import epoch_moe
        >>> model, _ = epoch_moe.load_model("tiny-llada2")
        >>> block, report = model.model.layers[1].mlp, epoch_moe.patch(model)
        >>> epoch_moe.unpatch(model)
        >>> model.model.layers[1].mlp is block
        True
    """
    model = inner_model(model)
    state = state_of(model)
    if state is None:
        raise ValueError(f"{type(model).__name__} is not patched by epoch_moe: there is nothing to undo")
    refuse.giving_back(model, state)
    state.slot.check_idle("unpatch", close="the model was unpatched since; patch it and open a new context")
    if state.residency is not None:
        try:
            detach(state.residency, list(state.blocks.values()))
        except BaseException:
            state.slot.reopen()
            raise
    for path, block in state.blocks.items():
        parent, name = find.parent_of(model, path)
        parent._modules[name] = block.original
        if path in state.device_hooks and "_hf_hook" not in block.__dict__:
            _remove_hook(block.original)  # as somebody did with the block's while it was patched
    for hook in state.hooks:
        hook.remove()
    if state.generate is not None and model.__dict__.get("generate") is state.generate:
        state.generate.take_off(model)
    object.__delattr__(model, ATTRIBUTE)


@contextmanager
def patched(
    model: nn.Module,
    config: EpochConfig | str | None = "default",
    *,
    strict: bool = True,
    mask_token_id: int | None = None,
    block_length: int | None = None,
    editing: bool | None = None,
) -> Iterator[PatchReport]:
    """`patch` for the length of a ``with`` block, with its arguments.

    On a model that is patched already, the configuration is changed and changed back at the end.

    Example:
        >>> import epoch_moe
        >>> model, tokenizer = epoch_moe.load_model("tiny-llada2")
        >>> prompt = tokenizer("sum 3 6 5 4 2:", return_tensors="pt")["input_ids"]
        >>> with epoch_moe.patched(model, "exact"):
        ...     out = epoch_moe.generate(model, prompt, gen_length=32)
        >>> tokenizer.decode(out.answers[0], skip_special_tokens=True)
        '3+6=9+5=14+4=18+2=20 so 20'
    """
    state = state_of(model)
    before = None if state is None else (state.config, None if state.following is None else state.following.hints)
    report = patch(
        model, config, strict=strict, mask_token_id=mask_token_id, block_length=block_length, editing=editing
    )
    try:
        yield report
    finally:
        if state is None or before is None:
            unpatch(model)
        else:
            _configure(state, *before, "the end of patched()")


def _split(
    prepared: list[tuple[str, nn.Module, BlockSpec]],
    group: Any,
    layout: KindName,
    capacity: int | None,
    describe: Callable[[], dict[str, str]],
) -> ExpertParallel:
    """Reduce the blocks to this rank's experts."""
    counts = {path: spec.router.num_experts for path, _, spec in prepared}
    if len(set(counts.values())) != 1:
        raise ValueError(f"expert parallelism needs layers with equally many experts, this model has {counts}")
    num_experts = next(iter(counts.values()))
    ep = ExpertParallel(num_experts, group, layout=layout, capacity=capacity, describe=describe)
    for _, module, spec in prepared:
        keep_experts(module, spec.layout, spec.experts, ep.dispatcher.range.numbers)
    return ep


def _update(state: PatchState, config: EpochConfig | None, hints: Hints) -> PatchReport:
    backend = "auto" if config is None else config.backend
    for block in state.blocks.values():
        block.weights.pick(backend)  # refuses an impossible one before anything is changed
    _configure(state, config, hints, "patch")
    return _report(state, {}, 0, 0, updated=True)


def _configure(state: PatchState, config: EpochConfig | None, hints: Hints | None, doing: str) -> None:
    if config != state.config or (state.following is not None and hints != state.following.hints):
        state.slot.check_idle(f"{doing} changes the plan")
    state.config = config
    if state.following is not None and hints is not None:
        state.following.config, state.following.hints = config, hints
    for block in state.blocks.values():
        block.backend = "auto" if config is None else config.backend


def _take_over_hook(block: EpochMoEBlock) -> Any:
    """Put the original's accelerate hook around the block too: it moves inputs to the device of the weights."""
    from accelerate.hooks import add_hook_to_module

    hook = copy.copy(block.original._hf_hook)
    add_hook_to_module(block, hook)
    return hook


def _remove_hook(module: nn.Module) -> None:
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(module)


def _report(state: PatchState, skipped: dict[str, str], moved: int, peak: int, *, updated: bool) -> PatchReport:
    blocks = list(state.blocks.values())
    stacked = [block.weights.ensure() for block in blocks]
    return PatchReport(
        family=", ".join(sorted({block.spec.family for block in blocks})),
        patched=list(state.blocks),
        skipped=skipped,
        backend=blocks[0].weights.pick(blocks[0].backend) if blocks else "none",
        dtype=str(stacked[0].gate_up_E2FH.dtype).removeprefix("torch.") if blocks else "none",
        expert_bytes=sum(s.bytes_per_expert * s.down_EHF.shape[0] for s in stacked),
        moved_bytes=moved,
        peak_extra_bytes=peak,
        updated=updated,
        config=state.config,
        experts="" if state.ep is None else state.ep.summary(),
        residency="" if state.residency is None else state.residency.summary(),
    )
