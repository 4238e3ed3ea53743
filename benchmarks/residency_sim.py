"""What a policy and a budget of expert residency would have done with a recorded decode: hits, and bytes moved.

    python benchmarks/residency_sim.py decode.trace --record --problems 20
    python benchmarks/residency_sim.py decode.trace --policy retention lru belady_bound --budget 20% 40%

``--record`` first decodes held-out problems and writes the trace. From Python, with this folder on the path,
``traces.recorder.record_trace`` around any decode of a patched model writes one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from traces.policies import POLICIES
from traces.recorder import record_trace
from traces.simulate import BOUND, PLAIN_LRU, Replay, simulate, slots_of
from traces.trace import Trace, load_trace

from epoch_moe import EpochConfig, load_model, patched
from epoch_moe.decoding import is_canvas_model, loop_of
from epoch_moe.outputs import check_output, output_file, write_json
from epoch_moe.problems import Problem, generate_problems
from epoch_moe.residency.config import parse_budget
from epoch_moe.tables import Table

BUDGETS = (0.1, 0.2, 0.4, 0.6, 1.0)
NAMES = (*POLICIES, PLAIN_LRU, BOUND)


def options_of(config: Any) -> dict[str, Any]:
    """How the tiny checkpoints are decoded everywhere in this repository."""
    if is_canvas_model(config):
        return {"gen_length": 32, "block_length": 16, "steps": 32}
    return {"gen_length": 96, "block_length": 32, "steps": 32, "eos_early_stop": True}


def record_problems(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    path: Path,
    *,
    batch_size: int = 1,
    about: dict[str, Any] | None = None,
    progress: Callable[[int], Any] | None = None,
) -> Trace:
    """Decode problems on a patched model and record the experts that they use.

    Args:
        model, tokenizer: as `epoch_moe.load_model` returns them.
        problems: what to decode.
        path: of the trace's file.
        batch_size: problems decoded together.
        about: what the trace says about itself.
        progress: called with the number of problems after each batch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected an integer >= 1")
    with record_trace(model, path, about) as recorder:
        for start in range(0, len(problems), batch_size):
            batch = problems[start : start + batch_size]
            prompts = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in batch]
            loop_of(model)(model, prompts, **options_of(model.config))
            if progress is not None:
                progress(len(batch))
    return recorder.trace


def share(text: str) -> float:
    """A budget as it is typed; bytes are refused, as a trace knows no other weights."""
    found: float | int = 0
    with suppress(ValueError):
        found = parse_budget(text)
    if not isinstance(found, float):
        raise ValueError(
            f"--budget {text}: expected shares of a layer's experts, above 0 and at most 1, such as 0.4 or 40%"
        )
    return found


def record(arguments: argparse.Namespace) -> None:
    """Decode held-out problems and write the trace."""
    check_output(arguments.trace)
    if arguments.problems < 1:
        raise ValueError(f"--problems {arguments.problems}: expected at least 1")
    model, tokenizer = load_model(arguments.model)
    problems = generate_problems(arguments.problems, arguments.seed, split="held_out")
    names = ("model", "preset", "problems", "seed", "batch_size")
    about = {name: getattr(arguments, name) for name in names}
    with (
        patched(model, EpochConfig.preset(arguments.preset)) if not hasattr(model, "_epoch_moe") else nullcontext(),
        tqdm(total=len(problems), unit="problem", desc="record", disable=arguments.no_progress) as bar,
    ):
        record_problems(
            model, tokenizer, problems, arguments.trace, batch_size=arguments.batch_size, about=about,
            progress=bar.update,
        )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Record if asked to, replay, print, write."""
    budgets = [share(budget) for budget in arguments.budget]
    if arguments.figure is not None:
        from traces.figure import check_format  # before the work, where matplotlib is missing too

        check_format(arguments.figure)
    if arguments.record:
        record(arguments)
    trace = load_trace(arguments.trace)
    profile_LE = None
    if arguments.profile is not None:
        profile_LE = load_trace(arguments.profile).uses_LE()
    options = {} if arguments.interval is None else {"interval": {"interval": arguments.interval}}
    slots = list(dict.fromkeys(slots_of(budget, trace.num_experts) for budget in budgets))
    with tqdm(total=len(trace.forwards), unit="forward", desc="replay", disable=arguments.no_progress) as bar:
        replays = simulate(
            trace, arguments.policy, slots, profile_LE=profile_LE, options=options,
            confidences=not arguments.no_confidences, progress=bar.update,
        )  # fmt: skip
    about = ", ".join(f"{key} {value}" for key, value in trace.about.items() if value is not None)
    print(f"{trace.num_layers} MoE layers of {trace.num_experts} experts, {len(trace.forwards)} forwards; {about}")
    print(replay_table(replays))
    result = {"about": trace.about, "forwards": len(trace.forwards), "replays": [r.as_dict() for r in replays]}
    write_json(arguments.json, result)
    if arguments.figure is not None:
        from traces.figure import draw_replays, write_figure

        write_figure(arguments.figure, draw_replays(replays, trace.num_experts))
        print(f"drawn to {arguments.figure}")


def replay_table(replays: Sequence[Replay]) -> Table:
    """Hit rates and bytes, one line for each policy and budget."""
    header = ("policy", "slots", "hit rate", "of pairs", "utilisation", "MB loaded / forward", "MB missed / forward")
    rows = []
    for replay in replays:
        numbers = replay.as_dict()
        pairs = replay.pair_hit_rate if replay.policy not in (BOUND, PLAIN_LRU) else None
        rows.append(
            (
                replay.policy,
                replay.slots,
                replay.hit_rate,
                None if pairs is None else round(pairs, 4),
                round(replay.utilisation, 4),
                round(numbers["loaded_bytes_per_forward"] / 1e6, 4),
                round(numbers["missed_bytes_per_forward"] / 1e6, 4),
            )
        )
    return Table(header, tuple(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status (2: the input cannot be used, said in one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file of a trace (written with --record)")
    parser.add_argument(
        "--policy", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--budget", nargs="+", default=list(map(str, BUDGETS)), metavar="SHARE",
        help="of each layer's experts that fast memory holds: 0.4 or 40%%",
    )  # fmt: skip
    parser.add_argument("--profile", type=Path, metavar="TRACE", help="another trace, whose favourites 'static' holds")
    parser.add_argument("--interval", type=int, metavar="N", help="forwards between moves of 'interval' (default: 4)")
    parser.add_argument("--no-confidences", action="store_true", help="hide the decoder's confidences from policies")
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE", help="write all numbers as JSON")
    parser.add_argument("--figure", type=output_file, default=None, metavar="FILE", help="draw them (matplotlib)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--record", action="store_true", help="first decode held-out problems and write TRACE")
    parser.add_argument("--model", default="tiny-llada2", help="to record with (default: tiny-llada2)")
    parser.add_argument("--preset", choices=("dense", "default", "exact", "paper"), default="default", help="its plan")
    parser.add_argument("--problems", type=int, default=20, metavar="N", help="how many problems (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--batch-size", type=int, default=1, help="problems decoded together")
    arguments = parser.parse_args(argv)
    try:
        run(arguments)
    except (ValueError, TypeError, OSError) as error:
        print(f"residency_sim: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
