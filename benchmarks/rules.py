"""The rules of peers beside this library's, on the same problems in one run.

Peers' rules are as their papers and public code describe them, on the layers and the decoding loop of this library:

* `team`: decoded rows are always reused, newly decoded rows computed once, nothing refreshed (TEAM).
* `dinfer`: a public patch of dInfer: the layer's whole output is cached; dense while 70 % of the block's rows are
  undecoded, and every fifth forward after; in between undecoded rows are computed, and all others (newly decoded ones
  too) get what was cached, computed while they were masks.
* `des-vote .6`, `.4`: in each forward every row chooses among the experts that all rows' top-k weigh most, that share
  of all experts (DES-Vote; the paper's shares for 64 experts).
* `paper`, `default`, and the drift settings: `EpochConfig`.

One problem at a time. `pairs` and `experts` (distinct ones per forward and layer) are shares of dense's; both are
counted where the rule computes, not where this harness does to imitate it.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from epoch_moe import EpochConfig, load_model, patched
from epoch_moe.block import EpochMoEBlock
from epoch_moe.compare import Side, against, solve_all, versions
from epoch_moe.functional import moe_forward
from epoch_moe.outputs import output_file, write_json
from epoch_moe.patching.state import state_of
from epoch_moe.plan.forward import ForwardPlan
from epoch_moe.problems import generate_problems
from epoch_moe.routing import choose, route
from epoch_moe.tables import Table

Hook = Callable[[Any, tuple[Any, ...], Any], Any]
NO_SUPPORT = {"coverage": None, "refresh_interval": None}


class WholeOutput:
    """dInfer's patch, as a forward hook of one block that computes all rows."""

    def __init__(self, block: EpochMoEBlock, tally: Counter[str]):
        self.block, self.tally, self.kept, self.age = block, tally, None, 0

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """The output with the rows that are not computed replaced by what was kept of them; None: all are computed."""
        forward = self.block.slot.active
        if not isinstance(forward, ForwardPlan):
            return None
        out_BSH = output[0] if isinstance(output, tuple) else output
        live_BS, lead = forward.classes.live_T.view(forward.ids_BS.shape), forward.lead
        if forward.number == 0:
            self.kept = None
        self.age += 1
        full = lead > 0 or self.kept is None or self.age >= 5 or float(live_BS[:, lead:].float().mean()) >= 0.7
        computed_BS = forward.valid_BS if full else forward.valid_BS & live_BS
        self.tally["rows"] += int(computed_BS.sum())
        spec, gate = self.block.spec.router, self.block.spec.read_gate(self.block)
        self.tally["experts"] += len(route(args[0][computed_BS], *gate, spec)[0].ids_TK.unique())
        if full:
            self.kept, self.age = out_BSH[:, lead:].clone(), 0
            return None
        out_BSH = torch.where(live_BS.unsqueeze(-1), out_BSH, self.kept)
        return (out_BSH, *output[1:]) if isinstance(output, tuple) else out_BSH


class Coreset:
    """DES-Vote, as a forward hook of one block."""

    def __init__(self, block: EpochMoEBlock, tally: Counter[str], share: float):
        self.block, self.tally, self.share = block, tally, share

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """The output with every row routed inside the coreset."""
        if self.block.slot.active is None:
            return None
        spec, x_TH = self.block.spec.router, args[0].flatten(0, 1)
        natural, scores = route(x_TH, *self.block.spec.read_gate(self.block), spec)
        votes_E = torch.zeros(spec.num_experts)
        votes_E.scatter_add_(0, natural.ids_TK.flatten(), natural.weights_TK.flatten())
        core_E = torch.zeros(spec.num_experts, dtype=torch.bool)
        core_E[votes_E.topk(math.ceil(self.share * spec.num_experts)).indices] = True
        chosen = choose(scores, spec, x_TH.dtype, core_E)
        self.tally["rows"] += len(x_TH)
        self.tally["experts"] += len(chosen.ids_TK.unique())
        out = moe_forward(x_TH, chosen.ids_TK, chosen.weights_TK, self.block.weights.ensure()).view_as(args[0])
        if self.block.spec.shared is not None:
            out = out + getattr(self.block, self.block.spec.shared)(args[0])
        return (out, *output[1:]) if isinstance(output, tuple) else out


@contextmanager
def hooked(blocks: Iterable[EpochMoEBlock], make: Callable[[EpochMoEBlock], Hook] | None) -> Iterator[None]:
    """Forward hooks on all blocks."""
    handles = [] if make is None else [block.register_forward_hook(make(block)) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rules(tally: Counter[str]) -> dict[str, tuple[EpochConfig | None, Callable[[EpochMoEBlock], Hook] | None]]:
    """Name -> the plan it runs under, and what is hooked onto the blocks; dense comes first."""
    return {
        "dense": (None, None),
        "dinfer": (EpochConfig.exact(), lambda block: WholeOutput(block, tally)),
        "team": (EpochConfig(**NO_SUPPORT), None),
        "des-vote .6": (None, lambda block: Coreset(block, tally, 0.6)),
        "des-vote .4": (None, lambda block: Coreset(block, tally, 0.4)),
        "paper": (EpochConfig.paper(), None),
        "default": (EpochConfig(), None),
        "drift .95": (EpochConfig(**NO_SUPPORT, drift=0.95), None),
        "drift .95, live .99": (EpochConfig(**NO_SUPPORT, drift=0.95, live_drift=0.99), None),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llada2")
    parser.add_argument("--problems", type=int, default=120, help="at thresholds below 1 (default: 120)")
    parser.add_argument("--problems-at-one", type=int, default=40, help="at threshold 1 (default: 40)")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.95, 0.999, 1.0])
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(arguments.model)
    result: dict[str, Any] = {"seed": arguments.seed, "versions": versions(model), "thresholds": {}}
    with patched(model, None):
        state = state_of(model)
        assert state is not None
        for threshold in arguments.thresholds:
            count = arguments.problems if threshold < 1.0 else arguments.problems_at_one
            problems = generate_problems(count, arguments.seed, split="held_out")
            tally: Counter[str] = Counter()
            entries: dict[str, Any] = {}
            for name, (plan, make) in rules(tally).items():
                tally.clear()
                side = Side(plan, options={"gen_length": 96, "threshold": threshold})
                with hooked(state.blocks.values(), make):
                    solve_all([side], model, tokenizer, problems, 1)
                assert side.work is not None
                if name == "dense":
                    dense = side
                assert dense.work is not None
                rows, experts = side.work.rows, side.work.active_experts
                if make is not None:
                    rows, experts = tally["rows"], tally["experts"]
                entries[name] = {
                    "accuracy": sum(side.right) / count,
                    "pairs": rows / dense.work.rows,
                    "experts": experts / dense.work.active_experts,
                    "forwards": side.forwards / dense.forwards,
                    "tokens_per_forward": side.tokens / side.forwards,
                    "paired": against(dense, side),
                }
            result["thresholds"][str(threshold)] = {"problems": count, "rules": entries}
            rows_shown = tuple(
                (
                    name,
                    f"{one['accuracy']:.1%}",
                    f"{1 - one['paired']['changed_share']:.1%}",
                    one["pairs"],
                    one["experts"],
                    f"{one['paired']['only_dense']} / {one['paired']['only_plan']}",
                    f"{one['paired']['loss_bound']:.1%}",
                )
                for name, one in entries.items()
            )
            header = ("", "right", "same text", "pairs", "experts", "only dense / rule", "lost at most")
            print(f"\nthreshold {threshold:g}, {count} problems\n{Table(header, rows_shown)}", flush=True)
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
