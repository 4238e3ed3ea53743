"""Accuracy, agreement with dense, and work for a grid of plans: coverage x refresh interval x miss policy.

Solves the same held-out problems once dense and once per cell, in one process, and writes JSON and a Markdown table.
Each cell is what `epoch-moe compare --problems N --coverage C --refresh-interval M --on-miss P --batch-size B` gives.

Problems are decoded in batches: with one support per sequence neither answers nor pairs depend on that. Active experts
do (a batch shares them), so their ratio is taken at batch size 1, on fewer problems.

`expand` computes what coverage None computes, whatever the coverage (docs/plans.md): one line shows it.
"""

from __future__ import annotations

import argparse
from typing import Any

from tqdm.auto import tqdm

from epoch_moe import EpochConfig, load_model, patched
from epoch_moe.compare import Side, against, solve_all, versions
from epoch_moe.outputs import output_file, write_json, write_output
from epoch_moe.problems import Problem, generate_problems

COVERAGES = (0.98, 0.95, 0.9, 0.8)
INTERVALS = (1, 2, 5, 10, None)
POLICIES = ("reselect", "drop")


def solve(model: Any, tokenizer: Any, problems: list[Problem], plan: EpochConfig | None, batch: int) -> Side:
    """One side of a comparison, all problems."""
    side = Side(plan, options={"gen_length": 96})
    solve_all([side], model, tokenizer, problems, batch)
    return side


def cells() -> list[EpochConfig]:
    """The grid; without a support (coverage None) the miss policy means nothing."""
    grid = [(coverage, policy) for coverage in COVERAGES for policy in POLICIES]
    kinds = [(None, "reselect"), *grid, (0.95, "expand")]
    return [
        EpochConfig(coverage=coverage, refresh_interval=interval, on_miss=policy)  # type: ignore[arg-type]
        for coverage, policy in kinds
        for interval in INTERVALS
    ]


def table(rows: list[dict[str, Any]], dense: dict[str, Any], problems: int) -> str:
    """The grid as Markdown: one line per coverage and policy, one column per refresh interval."""

    def text(value: Any) -> str:
        return "None" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    lines = [
        "Each cell: right / same text as dense / pairs / active experts (plan / dense) / accuracy lost at most (95 % "
        f"bound, paired). Dense is right on {dense['accuracy']:.1%} of {problems} problems.",
        "",
        "| coverage | on_miss | " + " | ".join(f"M = {text(m)}" for m in INTERVALS) + " |",
        "|---|---|" + "---|" * len(INTERVALS),
    ]
    keys = list(dict.fromkeys((row["coverage"], row["on_miss"]) for row in rows))
    for coverage, policy in keys:
        found = {r["refresh_interval"]: r for r in rows if (r["coverage"], r["on_miss"]) == (coverage, policy)}
        shown = [
            f"{found[m]['accuracy']:.1%} / {found[m]['agreement']:.1%} / {found[m]['pairs']:.2f} / "
            f"{found[m]['active_experts']:.2f} / {found[m]['paired']['loss_bound']:.1%}"
            for m in INTERVALS
        ]
        name = "any" if coverage is None else policy
        lines.append(f"| {text(coverage)} | {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llada2")
    parser.add_argument("--problems", type=int, default=500, help="held-out problems for accuracy (default: 500)")
    parser.add_argument("--single", type=int, default=25, help="decoded one by one, for active experts (default: 25)")
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file, default=None, metavar="FILE")
    parser.add_argument("--markdown", type=output_file, default=None, metavar="FILE")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model)
    problems = generate_problems(arguments.problems, arguments.seed, split="held_out")
    few = problems[: arguments.single]
    with patched(model, None):
        base = solve(model, tokenizer, problems, None, arguments.batch_size)
        base_few = solve(model, tokenizer, few, None, 1)
        dense, dense_few = base.summary(model.config), base_few.summary(model.config)
        rows = []
        for plan in tqdm(cells(), unit="cell"):
            side = solve(model, tokenizer, problems, plan, arguments.batch_size)
            one = solve(model, tokenizer, few, plan, 1).summary(model.config)
            numbers, paired = side.summary(model.config), against(base, side)
            rows.append(
                {
                    "coverage": plan.coverage,
                    "on_miss": plan.on_miss,
                    "refresh_interval": plan.refresh_interval,
                    "accuracy": numbers["accuracy"],
                    "agreement": 1.0 - paired["changed_share"],
                    "paired": paired,
                    "pairs": numbers["pairs"] / dense["pairs"],
                    "active_experts": one["active_experts"] / dense_few["active_experts"],
                    "forwards": numbers["forwards"] / dense["forwards"],
                    "support_size": numbers["support_size"],
                    "support_coverage": numbers["coverage"],
                    "fallbacks": side.work.fallbacks if side.work is not None else {},
                }
            )
    result = {
        "dense": dense,
        "problems": len(problems),
        "single": len(few),
        "seed": arguments.seed,
        "cells": rows,
        "versions": versions(model),
    }
    text = table(rows, dense, len(problems))
    print(text)
    write_json(arguments.json, result)
    if arguments.markdown is not None:
        write_output(arguments.markdown, text + "\n")
        print(f"written to {arguments.markdown}")


if __name__ == "__main__":
    main()
