"""Synthetic router logits of a block that is being decoded, with the statistics measured on released models.

Random weights route like nothing in nature, and no released checkpoint is at hand; but what a router does in a block
has been measured. This script draws logits that do the same and prints what it reached beside what was asked for.
`freshlane_traffic.py` counts on these traces.

A trace is a block of 32 rows per sequence, unmasked in a random order, 4 rows per forward, 8 forwards. The first one
carries the previous block's 32 rows too, whose K/V it writes for good (as the decoding loop of this library does). A
row's logits are Gaussian, `spread` times the sum of two unit parts::

    sqrt(shared) * common + sqrt(1 - shared) * own

    common   of all rows of a layer (share `across` of its variance), and of the rows of one block; with turnover > 1
             a share `turnover - 1` of the block's part is another one for MASK rows and for decoded rows
    own      of one row; from one forward to the next it keeps a correlation: `live` for a MASK row, `stable` for a row
             that stays decoded, max(1 - turnover, 0) for one that has just been decoded

Routing is the library's own (`epoch_moe.routing`). Sigmoid routers get an expert bias against half of what the part
common to all rows adds to an expert's score, as balancing in training does. The knobs are searched one after the other,
each for one measured number; nothing looks at traffic. `spread` decides how flat the weights are; no number was found
for it, so it stays where it is put.

Shape suffixes: B sequences, N rows of a block, S rows of a forward, T = B x S, E experts, K top-k.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import epoch_moe
from epoch_moe.outputs import output_file, write_json
from epoch_moe.routing import RouterSpec, Scores, router_scores, select

BLOCK, PER_FORWARD = 32, 4
FORWARDS = BLOCK // PER_FORWARD
MASK = 0
MOST_ACROSS = 0.98
"""A block keeps some common part of its own; without one, ``turnover`` above 1 would mean nothing."""


@dataclass(frozen=True)
class Asked:
    """What was measured on released models.

    Attributes:
        distinct: experts that the rows of one block use in a forward (dMoE, DES: 70 to 84 of 256 on LLaDA2.0-mini;
            DES: 59 of 64 on LLaDA-MoE).
        distinct_32: the same for 32 sequences together (LLaDA2.0-flash, early forwards: 160 to 200 of 256); None where
            no number is known.
        live, new, stable: share of its top-k that a row keeps from one forward to the next, by what the row is in the
            second (measured on LLaDA-MoE; on LLaDA2.0-flash live rows keep 58 to 72 %).
        adjacent, distant: cosine of the experts' loads in forwards 1 and 4 apart (TIDE on LLaDA2.0-mini: .985, about
            .95 five apart; LLaDA-MoE: .961, .931). Not searched for: a check.
    """

    distinct: float
    distinct_32: float | None
    live: float = 0.619
    new: float = 0.279
    stable: float = 0.664
    adjacent: float = 0.0
    distant: float = 0.0


@dataclass(frozen=True)
class Shape:
    """A released model's MoE layer."""

    hidden: int
    inner: int
    router: RouterSpec
    asked: Asked


SHAPES = {
    "llada2-mini": Shape(
        2048,
        512,
        RouterSpec(
            kind="sigmoid_group", num_experts=256, top_k=8, n_group=8, topk_group=4, routed_scaling_factor=2.5
        ),
        Asked(distinct=77.0, distinct_32=180.0, adjacent=0.985, distant=0.95),
    ),
    "llada-moe": Shape(
        2048,
        1024,
        RouterSpec(kind="softmax", num_experts=64, top_k=8),
        Asked(distinct=59.0, distinct_32=None, adjacent=0.961, distant=0.931),
    ),
}


@dataclass(frozen=True)
class Knobs:
    """See the top of the file."""

    shared: float = 0.5
    across: float = 0.9
    live: float = 0.9
    stable: float = 0.9
    turnover: float = 1.0
    spread: float = 1.0


@dataclass(frozen=True)
class Forward:
    """One forward of a trace.

    Attributes:
        lead: rows of each sequence before the block: 32 in the first forward, else 0.
        ids_BS: token ids; `MASK` for undecoded rows.
        scores: router scores of all T rows.
    """

    lead: int
    ids_BS: Tensor
    scores: Scores


def trace(
    shape: Shape, knobs: Knobs, batch: int, seed: int, layer_E: Tensor | None = None, unmask_seed: int | None = None
) -> Iterator[Forward]:
    """The forwards of one block of ``batch`` sequences, one layer.

    Args:
        layer_E: the part that is common to all rows of the layer, for several blocks of one layer; None: a new one.
        unmask_seed: of tokens and the order of their unmasking, for several layers of one block; None: ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    experts, spread = shape.router.num_experts, knobs.spread

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, experts, generator=generator)

    split = max(knobs.turnover - 1.0, 0.0)
    layer_E = normal() if layer_E is None else layer_E

    def common() -> tuple[Tensor, Tensor]:
        """Common parts ``[B,1,E]`` of one block's MASK rows and of its decoded rows."""
        block, masked, decoded = normal(batch, 1), normal(batch, 1), normal(batch, 1)
        both = (block * (1.0 - split) ** 0.5 + part * split**0.5 for part in (masked, decoded))
        first, second = (layer_E * knobs.across**0.5 + part * (1.0 - knobs.across) ** 0.5 for part in both)
        return first, second

    bias_E = None
    if shape.router.kind == "sigmoid_group":
        popular_E = torch.sigmoid(spread * (knobs.shared * knobs.across) ** 0.5 * layer_E)
        bias_E = 0.5 * (popular_E.mean() - popular_E)

    def logits(common_BSE: Tensor, own_BSE: Tensor) -> Tensor:
        return spread * (common_BSE * knobs.shared**0.5 + own_BSE * (1.0 - knobs.shared) ** 0.5)

    _, before_B1E = common()
    lead_BNE = logits(before_B1E, normal(batch, BLOCK))
    mask_B1E, decoded_B1E = common()
    order = generator if unmask_seed is None else torch.Generator().manual_seed(unmask_seed)
    tokens_BN = torch.randint(MASK + 1, 1000, (batch, BLOCK), generator=order)
    step_BN = torch.stack([torch.randperm(BLOCK, generator=order) for _ in range(batch)]) // PER_FORWARD
    own_BNE = normal(batch, BLOCK)
    for number in range(FORWARDS):
        live_BN1 = (step_BN >= number).unsqueeze(-1)
        if number:
            new_BN1 = (step_BN == number - 1).unsqueeze(-1)
            keep_BN1 = torch.where(live_BN1, knobs.live, knobs.stable)
            keep_BN1 = torch.where(new_BN1, max(1.0 - knobs.turnover, 0.0), keep_BN1)
            own_BNE = keep_BN1 * own_BNE + (1.0 - keep_BN1**2).sqrt() * normal(batch, BLOCK)
        logits_BSE = logits(torch.where(live_BN1, mask_B1E, decoded_B1E), own_BNE)
        ids_BS = torch.where(live_BN1.squeeze(-1), MASK, tokens_BN)
        lead = 0 if number else BLOCK
        if lead:
            logits_BSE = torch.cat((lead_BNE, logits_BSE), dim=1)
            ids_BS = torch.cat((torch.full((batch, BLOCK), 1000), ids_BS), dim=1)
        yield Forward(lead, ids_BS, router_scores(logits_BSE.reshape(-1, experts), bias_E, shape.router))


def regime(shape: Shape, knobs: Knobs, batch: int, seed: int, layers: int) -> dict[str, float]:
    """What traces are like, mean over layers; keys as in `Asked`, and how many of 4 and of 8 ranks a row needs.

    ``distinct_32`` needs 32 sequences and is of the block's rows in the first forward.
    """
    found = [_regime(shape, knobs, batch, seed + layer) for layer in range(layers)]
    return {key: sum(one[key] for one in found) / layers for key in found[0]}


def _regime(shape: Shape, knobs: Knobs, batch: int, seed: int) -> dict[str, float]:
    experts = shape.router.num_experts
    chosen = []  # per forward, of the block's rows: bool [B,N,E]
    live = []
    fanout: dict[int, list[float]] = {4: [], 8: []}
    for forward in trace(shape, knobs, batch, seed):
        ids_TK = select(forward.scores.selection_TE, shape.router)
        mask_TE = torch.zeros(ids_TK.shape[0], experts, dtype=torch.bool).scatter_(1, ids_TK, True)
        chosen.append(mask_TE.view(batch, -1, experts)[:, forward.lead :])
        live.append(forward.ids_BS[:, forward.lead :] == MASK)
        for ranks, means in fanout.items():
            needed_TR = mask_TE.view(-1, ranks, experts // ranks).any(-1)
            means.append(float(needed_TR.sum(-1).float().mean()))
    kept: dict[str, list[float]] = {"live": [], "new": [], "stable": []}
    for number in range(FORWARDS - 1):
        share_BN = (chosen[number] & chosen[number + 1]).sum(-1) / shape.router.top_k
        was_BN, is_BN = live[number], live[number + 1]
        for name, mask_BN in (("live", is_BN), ("new", was_BN & ~is_BN), ("stable", ~was_BN)):
            if bool(mask_BN.any()):
                kept[name].append(float(share_BN[mask_BN].mean()))
    loads = [mask.sum(1).float() for mask in chosen]  # [B,E]
    result = {name: sum(values) / len(values) for name, values in kept.items()}
    result["distinct"] = sum(float((load > 0).sum(1).float().mean()) for load in loads) / FORWARDS
    result["distinct_32"] = float((loads[0][:32].sum(0) > 0).sum())
    for name, apart in (("adjacent", 1), ("distant", 4)):
        pairs = [torch.cosine_similarity(a.sum(0), b.sum(0), dim=0) for a, b in zip(loads, loads[apart:], strict=False)]
        result[name] = float(torch.stack(pairs).mean())
    for ranks, means in fanout.items():
        result[f"ranks_per_row_of_{ranks}"] = sum(means) / len(means)
    return result


def calibrate(shape: Shape, spread: float, seed: int, rounds: int = 3, batch: int = 32, layers: int = 2) -> Knobs:
    """Search each knob for its measured number, in turns."""
    asked, knobs = shape.asked, Knobs(spread=spread)

    def search(knob: str, what: str, wanted: float, low: float, high: float, grows: bool) -> Knobs:
        best, distance = knobs, float("inf")
        for _ in range(9):
            middle = (low + high) / 2
            tried = replace(knobs, **{knob: middle})
            reached = regime(shape, tried, batch, seed, layers)[what]
            if abs(reached - wanted) < distance:
                best, distance = tried, abs(reached - wanted)
            if (reached < wanted) == grows:
                low = middle
            else:
                high = middle
        return best

    for _ in range(rounds):
        knobs = search("shared", "distinct", asked.distinct, 0.0, 1.0, False)
        if asked.distinct_32 is not None:
            knobs = search("across", "distinct_32", asked.distinct_32, 0.0, MOST_ACROSS, False)
        knobs = search("live", "live", asked.live, 0.0, 1.0, True)
        knobs = search("stable", "stable", asked.stable, 0.0, 1.0, True)
        knobs = search("turnover", "new", asked.new, 0.0, 2.0, False)
    return knobs


def describe(shape: Shape, knobs: Knobs, seed: int, batch: int = 32, layers: int = 4) -> dict[str, Any]:
    """Knobs, and what was asked for beside what other layers' traces reach."""
    reached = regime(shape, knobs, batch, seed + 1000, layers)
    return {"knobs": asdict(knobs), "asked": asdict(shape.asked), "reached": reached}


def show(name: str, description: dict[str, Any], write: Callable[[str], Any] = print) -> None:
    """Print a `describe`."""
    asked, reached = description["asked"], description["reached"]
    write(f"{name}: " + ", ".join(f"{k} {v:.3f}" for k, v in description["knobs"].items()))
    for key, value in reached.items():
        wanted = asked.get(key)
        write(f"  {key:20} {value:8.3f}" + ("" if wanted is None else f"   asked for {wanted:.3f}"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the logits (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "epoch_moe": epoch_moe.__version__,
        "python": platform.python_version(),
        "seed": arguments.seed,
        "shapes": {},
    }
    for name in arguments.shape:
        shape = SHAPES[name]
        print(f"{name}: searching", flush=True)
        result["shapes"][name] = describe(
            shape, calibrate(shape, arguments.spread, arguments.seed), arguments.seed
        )
        show(name, result["shapes"][name])
    write_json(arguments.json, result)


if __name__ == "__main__":
    sys.exit(main())
