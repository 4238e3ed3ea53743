"""Random loops that know nothing of plans: windows that grow by blocks, and fixed canvases."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from helpers import additive, block_causal
from replay import BLOCK, MASK_ID, Call
from torch import Tensor

STEPS = ("decode", "decode", "decode", "edit", "remask", "repeat", "next", "request", "same request", "finish")
MASKS = ("additive", "bool", "weak", "padding", "none")


@dataclass
class Step:
    """One forward, and whether a plan has to begin with it whatever its settings are."""

    call: Call
    begins: bool


def attention(kind: str, batch: int, width: int) -> Tensor | None:
    hides = block_causal(width, BLOCK)
    if kind == "weak":  # as the 0/1 masks of some released code: later blocks are weighted down, not hidden
        return additive(hides).clamp_min(-1.0)
    return {"additive": additive(hides), "bool": hides, "padding": torch.ones(batch, width), "none": None}[kind]


def windows(choose: random.Random, steps: list[str], mask_kind: str, batch: int) -> list[Step]:
    """A loop like the released ones: ``ids[:, :W]``, W growing by a block."""
    made: list[Step] = []
    ids = masks = positions = prompt = None
    begins = True
    for step in ["request", *steps]:
        if ids is None or step in ("request", "same request"):
            if step == "request" or prompt is None:
                prompt = torch.randint(0, 120, (batch, choose.randrange(1, 2 * BLOCK)))
            width = (prompt.shape[1] // BLOCK + 1) * BLOCK
            ids = torch.full((batch, width), MASK_ID)
            ids[:, : prompt.shape[1]] = prompt
            # A request that repeats the last forward cannot be told from it, and need not be.
            begins = not made or not torch.equal(made[-1].call.ids_BS, ids)
        elif step == "next":
            block = ids[:, -BLOCK:]
            ids[:, -BLOCK:] = torch.where(block == MASK_ID, torch.randint(0, 120, block.shape), block)
            ids = torch.cat([ids, torch.full((batch, BLOCK), MASK_ID)], dim=1)
            begins = True
        else:
            begins = False
        first = max(prompt.shape[1], ids.shape[1] - BLOCK)
        for row in ids:
            places = [p for p in range(first, len(row)) if (row[p] == MASK_ID) == (step in ("decode", "finish"))]
            if step == "finish":
                row[places] = torch.randint(0, 120, (len(places),))
            elif places and step in ("decode", "edit", "remask"):
                row[choose.choice(places)] = MASK_ID if step == "remask" else choose.randrange(120)
                begins = begins or step == "remask"
        if masks is None or masks[0] != ids.shape or choose.random() < 0.3:
            masks = (ids.shape, attention(mask_kind, batch, ids.shape[1]))
            positions = torch.arange(ids.shape[1])[None]
        made.append(Step(Call(ids.clone(), masks[1], positions), begins))
    return made


def canvases(choose: random.Random, forwards: int, batch: int, guided: bool) -> list[Step]:
    """A loop like LLaDA-MoE's: the whole canvas on every forward, block after block; with guidance twice."""
    made: list[Step] = []
    for _ in range(2):
        prompt = choose.randrange(1, 6)
        ids = torch.full((batch, prompt + 3 * BLOCK), MASK_ID)
        ids[:, :prompt] = torch.randint(0, 120, (batch, prompt))
        begin, begins = prompt, True
        for _ in range(forwards):
            whole = ids
            if guided:
                bare = ids.clone()
                bare[:, :prompt] = MASK_ID
                whole = torch.cat([ids, bare])
            made.append(Step(Call(whole.clone()), begins))
            begins = False
            for row in ids:
                places = (row[begin : begin + BLOCK] == MASK_ID).nonzero().flatten().tolist()
                for place in choose.sample(places, min(3, len(places))):
                    row[begin + place] = choose.randrange(120)
            if not (ids[:, begin : begin + BLOCK] == MASK_ID).any():
                begin, begins = begin + BLOCK, True
            if begin >= ids.shape[1]:
                break
    return made
