"""Random decodes on the golden checkpoints, with a block plan and without."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache

import pytest
import torch
from helpers import GOLDEN, additive, relative_error
from lsp_oracle import MASK, Forward, random_decode
from torch import Tensor

import epoch_moe
from epoch_moe.block import EpochMoEBlock
from epoch_moe.config import EpochConfig
from epoch_moe.freshlane.lane import DenseLane, ListedLane
from epoch_moe.models.llada2 import LLaDA2MoeModelLM
from epoch_moe.plan.block_plan import BlockPlan
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.rules import NO_TOKEN

MASK_ID = 125


@cache
def _loaded(name: str) -> LLaDA2MoeModelLM:
    return LLaDA2MoeModelLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()


def plain_model(name: str = "llada2") -> LLaDA2MoeModelLM:
    return copy.deepcopy(_loaded(name))


def patched_model(name: str = "llada2") -> LLaDA2MoeModelLM:
    model = plain_model(name)
    epoch_moe.patch(model)
    return model


def moe_blocks(model: LLaDA2MoeModelLM) -> list[EpochMoEBlock]:
    return list(model._epoch_moe.blocks.values())


@dataclass
class Inputs:
    """One forward: ids and rows as tensors, and the attention mask that hides later segments and invalid rows."""

    ids_BS: Tensor
    valid_BS: Tensor
    lead: int
    mask: Tensor
    positions: Tensor

    def one(self, sequence: int) -> Inputs:
        b = slice(sequence, sequence + 1)
        return Inputs(self.ids_BS[b], self.valid_BS[b], self.lead, self.mask[b], self.positions)

    def without_lead(self) -> Inputs:
        """The window's rows alone: random leads have 3 or 4 rows, and LLaDA2.2's are whole routing blocks."""
        c = self.lead
        return Inputs(
            self.ids_BS[:, c:], self.valid_BS[:, c:], 0, self.mask[:, :, c:, c:], self.positions[:, c:]
        )

    def run(self, model: LLaDA2MoeModelLM, **kwargs: object) -> Tensor:
        out = model(self.ids_BS, attention_mask=self.mask, position_ids=self.positions, **kwargs)
        return out.logits


@dataclass
class Decode:
    batch: int
    prefix: int
    block: int
    constant: bool
    forwards: list[Inputs]

    @property
    def block_args(self) -> dict[str, int | bool]:
        return {
            "batch": self.batch,
            "window": self.prefix + self.block,
            "prefix": self.prefix,
            "prefix_constant": self.constant,
        }

    def one(self, sequence: int) -> Decode:
        return Decode(1, self.prefix, self.block, self.constant, [f.one(sequence) for f in self.forwards])

    def without_leads(self) -> Decode:
        return Decode(self.batch, self.prefix, self.block, self.constant, [f.without_lead() for f in self.forwards])


def _inputs(forward: Forward, prefix: int, constant: bool) -> Inputs:
    ids_BS = torch.tensor(forward.ids)
    ids_BS = torch.where(ids_BS == MASK, MASK_ID, ids_BS)
    valid_BS = torch.tensor(forward.valid)
    seq_len = ids_BS.shape[1]
    segment_S = (torch.arange(seq_len) >= forward.lead).long()
    if constant:
        segment_S += torch.arange(seq_len) >= forward.lead + prefix
    sees = (segment_S[None, :] <= segment_S[:, None])[None] & valid_BS[:, None, :]
    if constant:  # lead rows differ from forward to forward, so a prefix that saw them would not be constant
        sees = sees & ~((segment_S[None, :] == 0) & (segment_S[:, None] > 0))
    sees = sees | torch.eye(seq_len, dtype=torch.bool)
    return Inputs(ids_BS, valid_BS, forward.lead, additive(sees[:, None]), torch.arange(40, 40 + seq_len)[None])


def make_decode(
    seed: int,
    *,
    batch: int = 2,
    prefix: int = 0,
    block: int = 8,
    constant: bool = False,
    forwards: int = 7,
    edits: bool = True,
    all_valid: bool = False,
) -> Decode:
    steps = random_decode(random.Random(seed), batch, prefix, block, forwards, edits)
    for step in steps:
        if constant:
            for b in range(batch):
                step.ids[b][step.lead : step.lead + prefix] = steps[0].ids[b][steps[0].lead : steps[0].lead + prefix]
        if all_valid:
            step.valid = [[True] * len(row) for row in step.valid]
    return Decode(batch, prefix, block, constant, [_inputs(step, prefix, constant) for step in steps])


LAYOUTS: dict[str, dict[str, int | bool]] = {
    "window": {},
    "constant-prefix": {"prefix": 6, "constant": True},
    "drifting-prefix": {"prefix": 6},
}


@torch.no_grad()
def planned(
    model: LLaDA2MoeModelLM,
    decode: Decode,
    config: EpochConfig | None,
    between: Callable[[BlockPlan, int], None] | None = None,
    context: BlockPlanContext | None = None,
) -> Iterator[Tensor]:
    """Logits of every forward under a plan; `between` is called after each forward with its number."""
    context = BlockPlanContext(model._epoch_moe, config) if context is None else context
    with context.block(**decode.block_args):  # type: ignore[arg-type]
        for number, inputs in enumerate(decode.forwards):
            with context.iteration(
                inputs.ids_BS, mask_id=MASK_ID, valid_BS=inputs.valid_BS, lead=inputs.lead
            ), torch.no_grad():
                logits = inputs.run(model)
            if between is not None and context._plan is not None:
                between(context._plan, number)
            yield logits


@torch.no_grad()
def dense(model: LLaDA2MoeModelLM, decode: Decode) -> list[Tensor]:
    """Logits of every forward without a plan, also of a patched model."""
    with epoch_moe.patched(model, "dense") if hasattr(model, "_epoch_moe") else nullcontext():
        return [inputs.run(model) for inputs in decode.forwards]


def plant_nan(plan: BlockPlan, number: int) -> None:
    """Overwrite every cache entry that holds nothing."""
    assert plan.stamps_M is not None
    for layer in plan.layers:
        assert layer.cache_MH is not None
        layer.cache_MH[plan.stamps_M == NO_TOKEN] = float("nan")


def check_fresh_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare each layer's fresh rows under a plan with a dense layer on its input; returns how many there were."""
    route, restore, checked = ListedLane.route, ListedLane.restore, []
    inputs: dict[int, Tensor] = {}

    def routed(lane: ListedLane, x_BSH: Tensor) -> object:
        inputs[id(lane)] = x_BSH
        return route(lane, x_BSH)

    def restored(lane: ListedLane, y_RH: Tensor) -> Tensor:
        out_TH, rows = restore(lane, y_RH), lane.step.rows
        dense = DenseLane(**{**{f.name: getattr(lane, f.name) for f in fields(DenseLane)}, "forward": None})
        want_TH = dense.restore(dense.run(*dense.route(inputs.pop(id(lane)))))
        checked.append(rows.num_fresh)
        assert relative_error(out_TH[rows.fresh_R], want_TH[rows.fresh_R]) < 1e-5
        return out_TH

    monkeypatch.setattr(ListedLane, "route", routed)
    monkeypatch.setattr(ListedLane, "restore", restored)
    return checked
