"""`epoch-moe residency-sim`: what a policy and a budget would have done with a recorded decode."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from epoch_moe.outputs import write_json
from epoch_moe.problems import Problem
from epoch_moe.residency.config import parse_budget
from epoch_moe.residency.policies import POLICIES
from epoch_moe.residency.simulate import BOUND, PLAIN_LRU, Replay, simulate, slots_of
from epoch_moe.residency.trace import Trace, load_trace, record_trace
from epoch_moe.tables import Table

BUDGETS = (0.1, 0.2, 0.4, 0.6, 1.0)
NAMES = (*POLICIES, PLAIN_LRU, BOUND)


def add_residency_sim(
    commands: Any, formatter: Any, add_options: Callable[[argparse.ArgumentParser], None]
) -> argparse.ArgumentParser:
    """Add the command's grammar; its ``run`` is for the caller to set.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
        formatter: of the help.
        add_options: adds those of models, plans and decoding, for ``--record``.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "residency-sim",
        help="replay a recorded decode under any policy and budget of expert residency",
        description="Replay which experts a decode used, with only a share of them in fast memory: hits, and bytes "
        "moved per forward, by policy and budget. Record a trace with --record, or from Python with "
        "epoch_moe.record_trace.",
        formatter_class=formatter,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file of a trace (written with --record)")
    parser.add_argument(
        "--policy", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--budget",
        nargs="+",
        default=list(BUDGETS),
        metavar="SHARE",
        help="of each layer's experts that fast memory holds: 0.4 or 40%%",
    )
    parser.add_argument("--profile", type=Path, metavar="TRACE", help="another trace, whose favourites 'static' holds")
    parser.add_argument("--interval", type=int, metavar="N", help="forwards between moves of 'interval' (default: 4)")
    parser.add_argument("--no-confidences", action="store_true", help="hide the decoder's confidences from policies")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all numbers as JSON")
    parser.add_argument("--figure", type=Path, default=None, metavar="FILE", help="draw them (needs matplotlib)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    group = parser.add_argument_group("recording")
    group.add_argument("--record", action="store_true", help="first decode held-out problems and write TRACE")
    group.add_argument("--problems", type=int, default=20, metavar="N", help="how many problems")
    group.add_argument("--seed", type=int, default=0, help="of the problems")
    group.add_argument("--batch-size", type=int, default=1, help="problems decoded together")
    add_options(parser)
    return parser


def record_problems(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    path: Path,
    *,
    batch_size: int = 1,
    about: dict[str, Any] | None = None,
    progress: Callable[[int], Any] | None = None,
    **options: Any,
) -> Trace:
    """Decode problems on a patched model and record the experts that they use.

    Args:
        model, tokenizer: as `epoch_moe.load_model` returns them.
        problems: what to decode.
        path: of the trace's file.
        batch_size: problems decoded together.
        about: what the trace says about itself.
        progress: called with the number of problems after each batch.
        options: of the loop that decodes such a model.
    """
    from epoch_moe.decoding import loop_of

    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected an integer >= 1")
    with record_trace(model, path, about) as recorder:
        for start in range(0, len(problems), batch_size):
            batch = problems[start : start + batch_size]
            prompts = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in batch]
            loop_of(model)(model, prompts, **options)
            if progress is not None:
                progress(len(batch))
    return recorder.trace


def run_residency_sim(
    arguments: argparse.Namespace, load: Callable[[], tuple[Any, Any]], plan: Any, decoding: Callable[[Any], Any]
) -> int:
    """Record if asked to, replay, print, write.

    Args:
        arguments: of the command line.
        load: gives model and tokenizer.
        plan: configuration to decode with, for ``--record``.
        decoding: options of the loop for a model's config.
    """
    from tqdm.auto import tqdm

    budgets = [_share(budget) for budget in arguments.budget]
    if arguments.figure is not None:
        from epoch_moe.figure import check_format  # before the work, where matplotlib is missing too

        check_format(arguments.figure)
    if arguments.record:
        if not arguments.trace.resolve().parent.is_dir():
            raise ValueError(f"{arguments.trace}: its folder does not exist")
        _record(arguments, load, plan, decoding)
    trace = load_trace(arguments.trace)
    profile_LE = None
    if arguments.profile is not None:
        profile_LE = load_trace(arguments.profile).uses_LE()
    options = {} if arguments.interval is None else {"interval": {"interval": arguments.interval}}
    slots = list(dict.fromkeys(slots_of(budget, trace.num_experts) for budget in budgets))
    with tqdm(total=len(trace.forwards), unit="forward", desc="replay", disable=arguments.no_progress) as bar:
        replays = simulate(
            trace,
            arguments.policy,
            slots,
            profile_LE=profile_LE,
            options=options,
            confidences=not arguments.no_confidences,
            progress=bar.update,
        )
    about = ", ".join(f"{key} {value}" for key, value in trace.about.items() if value is not None)
    print(f"{trace.num_layers} MoE layers of {trace.num_experts} experts, {len(trace.forwards)} forwards; {about}")
    print(replay_table(replays))
    result = {"about": trace.about, "forwards": len(trace.forwards), "replays": [r.as_dict() for r in replays]}
    write_json(arguments.json, result)
    if arguments.figure is not None:
        from epoch_moe.figure import draw_replays, write_figure

        write_figure(arguments.figure, draw_replays(replays, trace.num_experts))
        print(f"drawn to {arguments.figure}")
    return 0


def _share(budget: float | str) -> float:
    """A share of experts as the command line gives it; bytes are refused, as a trace knows no other weights."""
    share: float | int = 0
    with suppress(ValueError):
        share = parse_budget(budget)
    if not isinstance(share, float):
        raise ValueError(
            f"--budget {budget}: expected shares of a layer's experts, above 0 and at most 1, such as 0.4 or 40%"
        )
    return share


def _record(
    arguments: argparse.Namespace, load: Callable[[], tuple[Any, Any]], plan: Any, decoding: Callable[[Any], Any]
) -> None:
    from tqdm.auto import tqdm

    from epoch_moe.patching import patched
    from epoch_moe.problems import generate_problems

    if arguments.problems < 1:
        raise ValueError(f"--problems {arguments.problems}: expected at least 1")
    model, tokenizer = load()
    problems = generate_problems(arguments.problems, arguments.seed, split="held_out")
    about = {
        "model": arguments.model,
        "preset": arguments.preset,
        "problems": len(problems),
        "seed": arguments.seed,
        "batch_size": arguments.batch_size,
    }
    with (
        patched(model, plan) if not hasattr(model, "_epoch_moe") else nullcontext(),
        tqdm(total=len(problems), unit="problem", desc="record", disable=arguments.no_progress) as bar,
    ):
        record_problems(
            model,
            tokenizer,
            problems,
            arguments.trace,
            batch_size=arguments.batch_size,
            about=about,
            progress=bar.update,
            **decoding(model.config),
        )


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
                round(replay.hit_rate, 4),
                None if pairs is None else round(pairs, 4),
                round(replay.utilisation, 4),
                round(numbers["loaded_bytes_per_forward"] / 1e6, 4),
                round(numbers["missed_bytes_per_forward"] / 1e6, 4),
            )
        )
    return Table(header, tuple(rows))
