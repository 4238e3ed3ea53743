"""How many misses does retention avoid, what would have been possible, and what does a budget cost in time?

Part ``traces`` replays recorded decodes under every policy with 10, 20, 40, 60 and 100 % of each layer's experts in
fast memory. Each trace says what it is:

  recorded   decodes of held-out problems by the tiny checkpoints in the package, with block plans of two presets
  made up    LLaDA2.0-mini's shapes, with random logits that route as was measured on released models: `statistics`
             stands beside what was `asked`; confidences are made up too (`traces/made_up.py`)

Policies: retention, lru, lfu, interval (TIDE's rule), static (the favourites of another trace of the same kind),
belady (knows the trace), belady_bound (the most hits that any placement can have), plain_lru (an LRU cache that takes
one expert after the other and knows no passes). All but the last two run through the placement that the model itself
uses: what a pass needs stays until it was used, what does not fit is bypassed. ``retention_blind`` is retention
without the decoder's confidences.

Cache utilisation is the share of the slots in which a forward finds an expert that it needs, hits / (slots x visits).
At equal slots its ratio between two policies is that of their hits.

Part ``decodes`` decodes with `epoch_moe.patch(model, plan, residency=...)`: tokens with every policy and budget must be
those without residency, and so must they be when next to every access misses; seconds per token against all experts in
memory, and against residency with room for all. Experts of the tiny checkpoints are smaller than the cost of asking for
them, so these ratios are of the bookkeeping, not of moving weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from residency_sim import options_of, record_problems
from routing_trace import SHAPES
from tqdm.auto import tqdm
from traces.made_up import KNOBS, made_up_trace, statistics
from traces.policies import POLICIES
from traces.simulate import BOUND, PLAIN_LRU, Replay, simulate, slots_of
from traces.trace import Trace

import epoch_moe
from epoch_moe import EpochConfig
from epoch_moe.decoding import loop_of
from epoch_moe.outputs import output_file, write_output
from epoch_moe.problems import generate_problems

BUDGETS = (0.1, 0.2, 0.4, 0.6, 1.0)
NAMES = (*POLICIES, PLAIN_LRU, BOUND)
HEADLINE = "llada2-mini-shapes/default/batch-1"
REPORTED, PROFILE = 0, 1  # seeds; the policy's numbers were chosen on 7000 and 7001
LAYERS = 4  # of made-up traces; their layers are independent draws of one distribution
ONLINE = ("retention", "lru")  # those that models run with


@dataclass(frozen=True)
class Recorded:
    """A trace to record."""

    model: str
    preset: str
    batch: int
    problems: int

    @property
    def name(self) -> str:
        """Of the trace."""
        return f"{self.model}/{self.preset}/batch-{self.batch}"


@dataclass(frozen=True)
class MadeUp:
    """A trace to make up."""

    preset: str
    batch: int
    blocks: int

    @property
    def name(self) -> str:
        """Of the trace."""
        return f"llada2-mini-shapes/{self.preset}/batch-{self.batch}"


FULL = (
    Recorded("tiny-llada2", "default", 1, 500),
    Recorded("tiny-llada2", "default", 8, 500),
    Recorded("tiny-llada2", "exact", 1, 100),
    Recorded("tiny-llada-moe", "default", 8, 500),
    Recorded("tiny-llada-moe", "default", 1, 50),
    MadeUp("default", 1, 60),
    MadeUp("default", 8, 15),
    MadeUp("exact", 1, 60),
    MadeUp("exact", 8, 15),
)
QUICK = (
    Recorded("tiny-llada2", "default", 1, 4),
    Recorded("tiny-llada-moe", "default", 8, 8),
    MadeUp("default", 1, 6),
    MadeUp("default", 8, 2),
)


class Models:
    """The tiny checkpoints, each loaded once."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Any, Any]] = {}

    def get(self, name: str) -> tuple[Any, Any]:
        """Model and tokenizer."""
        if name not in self._loaded:
            self._loaded[name] = epoch_moe.load_model(name)
        return self._loaded[name]

    def fresh(self, name: str) -> tuple[Any, Any]:
        """A model of one's own, not patched."""
        self._loaded.pop(name, None)
        return epoch_moe.load_model(name)


def record(models: Models, cell: Recorded, problems: int, seed: int, folder: Path) -> Trace:
    model, tokenizer = models.get(cell.model)
    epoch_moe.patch(model, EpochConfig.preset(cell.preset))
    wanted = generate_problems(problems, seed, split="held_out")
    with tqdm(total=problems, unit="problem", desc=f"record {cell.name}", leave=False) as bar:
        trace = record_problems(
            model,
            tokenizer,
            wanted,
            folder / "one.trace",
            batch_size=cell.batch,
            progress=bar.update,
        )
    epoch_moe.unpatch(model)
    return trace


def make_up(cell: MadeUp, blocks: int, seed: int) -> Trace:
    config = EpochConfig.preset(cell.preset)
    return made_up_trace(
        SHAPES["llada2-mini"], KNOBS, config, batch=cell.batch, blocks=blocks, layers=LAYERS, seed=seed
    )


def traces_of(cell: Recorded | MadeUp, models: Models, folder: Path) -> tuple[Trace, Trace, dict[str, Any]]:
    """The trace that is reported, one whose favourites ``static`` holds, and what it is."""
    about: dict[str, Any]
    if isinstance(cell, Recorded):
        trace = record(models, cell, cell.problems, REPORTED, folder)
        profile = record(models, cell, max(cell.problems // 10, cell.batch), PROFILE, folder)
        about = {"kind": "recorded", **asdict(cell), "seed": REPORTED}
    else:
        trace = make_up(cell, cell.blocks, REPORTED)
        # The same layers: what is common to all their rows comes from the seed, rows and blocks behind it are others.
        profile = Trace(trace.num_layers, trace.num_experts, trace.bytes_per_expert)
        third = len(trace.forwards) // 3
        profile.forwards = trace.forwards[:third]
        trace = Trace(trace.num_layers, trace.num_experts, trace.bytes_per_expert, trace.about, trace.forwards[third:])
        about = {"kind": "made up", **asdict(cell), "seed": REPORTED, "layers": LAYERS, "knobs": asdict(KNOBS)}
        asked = SHAPES["llada2-mini"].asked
        about["asked"] = {
            "adjacent": asked.adjacent,
            "fifth": asked.distant,
            "unique_block": asked.distinct,
            "live": asked.live,
            "new": asked.new,
            "stable": asked.stable,
        }
    about["forwards"] = len(trace.forwards)
    about["statistics"] = statistics(trace)
    return trace, profile, about


def replay(cell: Recorded | MadeUp, models: Models, folder: Path) -> dict[str, Any]:
    """One trace under everything."""
    trace, profile, about = traces_of(cell, models, folder)
    slots = [slots_of(budget, trace.num_experts) for budget in BUDGETS]
    with tqdm(total=2 * len(trace.forwards), unit="forward", desc=f"replay {cell.name}", leave=False) as bar:
        replays = simulate(trace, NAMES, slots, profile_LE=profile.uses_LE(), progress=bar.update)
        blind = simulate(trace, ["retention"], slots, confidences=False, progress=bar.update)
    budgets: dict[str, dict[str, Any]] = {}
    for budget, number in zip(BUDGETS, slots, strict=True):
        mine = {r.policy: r for r in replays if r.slots == number}
        mine["retention_blind"] = next(r for r in blind if r.slots == number)
        budgets[f"{budget:g}"] = {
            "slots": number,
            "policies": {name: numbers_of(r) for name, r in mine.items()},
            **ratios(mine),
        }
    return {"about": about, "budgets": budgets}


def numbers_of(one: Replay) -> dict[str, Any]:
    numbers = one.as_dict()
    return {name: value for name, value in numbers.items() if name not in ("policy", "slots", "hit_rate_per_layer")}


def ratios(mine: dict[str, Replay]) -> dict[str, float]:
    """Retention against the others; ``possible_over_lru`` is what the bound itself would reach."""
    hits = {name: one.counts.hits for name, one in mine.items()}

    def over(first: str, second: str) -> float:
        return hits[first] / max(hits[second], 1)

    return {
        "retention_hit_rate": mine["retention"].hit_rate,
        "lru_hit_rate": mine["lru"].hit_rate,
        "plain_lru_hit_rate": mine[PLAIN_LRU].hit_rate,
        "belady_hit_rate": mine[BOUND].hit_rate,
        "retention_utilisation": mine["retention"].utilisation,
        "lru_utilisation": mine["lru"].utilisation,
        "utilisation_over_lru": over("retention", "lru"),
        "utilisation_over_plain_lru": over("retention", PLAIN_LRU),
        "possible_over_lru": over(BOUND, "lru"),
        "share_of_belady": over("retention", BOUND),
    }


# -------------------------------------------------------------------------------------------------------------- decodes


def decode(model: Any, prompts: list[list[int]], batch: int, plan: EpochConfig) -> tuple[list[list[int]], float]:
    """Answers, and seconds."""
    answers: list[list[int]] = []
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        out = loop_of(model)(model, prompts[first : first + batch], plan=plan, **options_of(model.config))
        answers += [answer.tolist() for answer in out.answers]
    return answers, time.perf_counter() - start


def decodes(models: Models, quick: bool) -> dict[str, Any]:
    """Tokens and seconds of real decodes with residency, by model, preset, budget and policy."""
    result: dict[str, Any] = {}
    problems, batch, repeats = (2, 2, 1) if quick else (8, 8, 2)
    for name in ("tiny-llada2", "tiny-llada-moe"):
        model, tokenizer = models.fresh(name)
        wanted = generate_problems(problems, REPORTED, split="held_out")
        prompts = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in wanted]
        for preset in ("exact", "default"):
            plan = EpochConfig.preset(preset)
            cell: dict[str, Any] = {"problems": problems, "batch": batch, "budgets": {}}
            epoch_moe.patch(model, plan)
            right, _ = decode(model, prompts, batch, plan)
            tokens = sum(map(len, right))
            bytes_per_expert = model._epoch_moe.bytes_per_expert()[0]
            plain = min(decode(model, prompts, batch, plan)[1] for _ in range(repeats))
            epoch_moe.unpatch(model)
            full = None
            # Two experts' buffers and no slot: every access misses.
            for budget in (1.0, 0.6, 0.4, 0.2, 0.1, 2 * bytes_per_expert):
                row: dict[str, Any] = {}
                one_policy = (quick and budget != 0.4) or budget in (1.0, 2 * bytes_per_expert)
                for policy in ("retention",) if one_policy else ONLINE:
                    epoch_moe.patch(model, plan, residency=epoch_moe.ResidencyConfig(budget=budget, policy=policy))
                    answers, seconds = decode(model, prompts, batch, plan)
                    hit_rate = epoch_moe.residency_report(model).hit_rate
                    if policy == "retention":
                        seconds = min(seconds, *(decode(model, prompts, batch, plan)[1] for _ in range(repeats)))
                    epoch_moe.unpatch(model)
                    if policy == "retention" and budget == 1.0:
                        full = seconds
                    row[policy] = {
                        "tokens_equal": answers == right,
                        "hit_rate": hit_rate,
                        "seconds_per_token": seconds / tokens,
                        "over_plain": seconds / plain,
                        "over_full_residency": None if full is None else seconds / full,
                    }
                key = f"{budget:g}" if isinstance(budget, float) else "none"
                cell["budgets"][key] = row
                show = row["retention"]
                print(
                    f"{name} {preset} budget {key}: tokens equal "
                    f"{all(one['tokens_equal'] for one in row.values())}, hits {show['hit_rate']:.3f}, time "
                    f"{show['over_plain']:.2f} x no residency, {show['over_full_residency']:.2f} x room for all",
                    flush=True,
                )
            result[f"{name}/{preset}"] = cell
    return result


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """By budget: the headline trace's rates, and what all decodes say together."""
    found: dict[str, Any] = {}
    for budget in map("{:g}".format, BUDGETS):
        entry: dict[str, Any] = {}
        if result.get("decodes"):
            rows = [cell["budgets"][budget] for cell in result["decodes"].values()]
            entry["tokens_equal"] = all(one["tokens_equal"] for row in rows for one in row.values())
            entry["seconds_per_token_over_full_residency"] = {
                name: cell["budgets"][budget]["retention"]["over_full_residency"]
                for name, cell in result["decodes"].items()
            }
        if HEADLINE in result.get("traces", {}):
            numbers = result["traces"][HEADLINE]["budgets"][budget]
            entry |= {"trace": HEADLINE, **{k: v for k, v in numbers.items() if k not in ("slots", "policies")}}
            entry["share_of_belady_by_trace"] = {
                name: trace["budgets"][budget]["share_of_belady"] for name, trace in result["traces"].items()
            }
        found[budget] = entry
    return found


def write(path: Path | None, result: dict[str, Any]) -> None:
    """What there is so far."""
    result["summary"] = summary(result)
    if path is not None:
        write_output(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few problems and blocks")
    parser.add_argument("--trace", nargs="+", metavar="NAME", help="only these traces (default: all)")
    parser.add_argument("--part", choices=("traces", "decodes", "both"), default="both", help="what to run")
    parser.add_argument(
        "--json",
        type=output_file,
        default=None,
        metavar="FILE",
        help="write the result, trace by trace; what is not run keeps what FILE had",
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    cells = QUICK if arguments.quick else FULL
    names = [cell.name for cell in cells]
    for name in arguments.trace or ():
        if name not in names:
            parser.error(f"--trace {name}: expected one of {', '.join(names)}")
    result: dict[str, Any] = {}
    partial = arguments.part != "both" or arguments.trace is not None
    if partial and arguments.json is not None and arguments.json.exists():
        result = json.loads(arguments.json.read_text())
    result |= {
        "torch": torch.__version__,
        "epoch_moe": epoch_moe.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "quick": arguments.quick,
    }
    models = Models()
    if arguments.part != "decodes":
        result.setdefault("traces", {})
        with tempfile.TemporaryDirectory() as folder:
            for cell in cells:
                if arguments.trace is not None and cell.name not in arguments.trace:
                    continue
                one = result["traces"][cell.name] = replay(cell, models, Path(folder))
                print(f"{cell.name} ({one['about']['kind']}, {one['about']['forwards']} forwards)")
                print("  " + ", ".join(f"{k} {v:.3f}" for k, v in one["about"]["statistics"].items()))
                for budget, numbers in one["budgets"].items():
                    print(
                        f"  budget {budget}: retention {numbers['retention_hit_rate']:.3f}, lru "
                        f"{numbers['lru_hit_rate']:.3f}, plain lru {numbers['plain_lru_hit_rate']:.3f}, belady "
                        f"{numbers['belady_hit_rate']:.3f}; {numbers['share_of_belady']:.3f} of belady, "
                        f"{numbers['utilisation_over_lru']:.2f} x lru ({numbers['possible_over_lru']:.2f} possible)",
                        flush=True,
                    )
                write(arguments.json, result)
    if arguments.part != "traces":
        result["decodes"] = decodes(models, arguments.quick)
    write(arguments.json, result)
    if arguments.json is not None:
        print(f"written to {arguments.json}")
    wrong = [b for b, entry in result["summary"].items() if entry.get("tokens_equal") is False]
    if wrong:
        print(f"tokens differ at budgets {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
