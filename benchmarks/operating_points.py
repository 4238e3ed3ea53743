"""Named settings at three operating points, each paired against dense on the same problems.

Thresholds .95, .999 and 1.0 commit about 4, 2.8 and 1 tokens per forward on the tiny checkpoint. At each of them dense
solves all problems once; then every setting does. Each is one task, spread over ``--workers`` processes; the JSON file
is written after each, and a run with the same file goes on where the last one ended. CPU time is taken on the first
``--timed`` problems, dense and plan in turns in one process.

A setting is a preset (default, paper, exact), ``file.json`` of `EpochConfig.save`, or changes to the default such as
``"coverage=none refresh_interval=none drift=.95"``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from epoch_moe import EpochConfig, load_model, patched
from epoch_moe.compare import Side, solve_all, versions
from epoch_moe.outputs import output_file, write_output
from epoch_moe.paired import paired_result
from epoch_moe.problems import HARDER, generate_problems
from epoch_moe.tables import Table

DRIFT = "coverage=none refresh_interval=none drift="
SETTINGS = (
    "default", "paper", "coverage=none", "coverage=none refresh_interval=none", f"{DRIFT}.95", f"{DRIFT}.9",
    f"{DRIFT}.95 live_drift=.99", f"{DRIFT}.9 live_drift=.98",
)  # fmt: skip
COUNTED = ("accuracy", "forwards", "rows", "pairs", "active_experts", "weight_bytes", "lm_head_rows", "support_size")


def plan_of(setting: str) -> EpochConfig:
    """The plan that a setting names."""
    if setting.endswith(".json"):
        return EpochConfig.load(setting)
    if "=" not in setting:
        plan = EpochConfig.preset(setting)
        if plan is None:
            raise ValueError("dense is what all settings are compared with")
        return plan
    changes: dict[str, Any] = {}
    for change in setting.split():
        name, _, text = change.partition("=")
        values = []
        for part in text.split(","):
            try:
                value = float(part)
                values.append(int(part) if part.isdigit() else value)
            except ValueError:
                values.append({"none": None, "true": True, "false": False}.get(part.lower(), part))
        changes[name] = values[0] if len(values) == 1 else tuple(values)
    return EpochConfig(**changes)


def run(asked: dict[str, Any], threshold: float | None, setting: str | None) -> dict[str, Any]:
    """One task, in a process of its own: a setting (None: dense) on all problems at one threshold."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(asked["model"], dtype=asked["dtype"])
    problems = generate_problems(asked["problems"], asked["seed"], asked["kinds"], split="held_out")
    options: dict[str, Any] = {"gen_length": 96, "threshold": threshold}
    if threshold is None:  # a fixed canvas
        options = {"gen_length": 32, "block_length": 16, "steps": 32}
    plan = None if setting is None else plan_of(setting)
    start = time.process_time()
    with patched(model, plan):
        side = Side(plan, options=options)
        solve_all([side], model, tokenizer, problems, asked["batch_size"])
        seconds = time.process_time() - start
        turns: list[float] = []
        if plan is not None:
            turns = [0.0, 0.0]
            for place in range(0, min(asked["timed"], len(problems)), asked["batch_size"]):
                batch = problems[place : place + asked["batch_size"]]
                order = (0, 1) if place // asked["batch_size"] % 2 == 0 else (1, 0)
                for number in order:
                    one, begin = Side((None, plan)[number], options=options), time.process_time()
                    one.solve(model, tokenizer, batch)
                    turns[number] += time.process_time() - begin
    numbers = side.summary(model.config)
    assert side.work is not None
    result: dict[str, Any] = {name: numbers[name] for name in COUNTED}
    result |= {"cpu_seconds": seconds, "fallbacks": side.work.fallbacks, "unpaid": numbers["unpaid"]}
    result |= {"tokens_per_forward": numbers["tokens_per_forward"], "texts": side.texts, "right": side.right}
    if turns:
        result["cpu_ratio"] = turns[1] / turns[0]
    return result | {"versions": versions(model)}


def judged(dense: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A setting's result with its ratios and its pairing against dense."""
    found["paired"] = paired_result(dense["texts"], found.pop("texts"), (dense["right"], found.pop("right")))
    found["ratios"] = {
        name: found[name] / dense[name] for name in ("forwards", "pairs", "active_experts", "weight_bytes")
    }
    return found


def table(point: dict[str, Any]) -> Table:
    """One operating point as text."""
    header = ("", "right", "same text", "pairs", "bytes", "CPU", "only dense / plan", "lost at most", "changed at most")
    rows: list[tuple[Any, ...]] = [("dense", f"{point['dense']['accuracy']:.1%}", *[None] * 7)]
    for name, one in point["settings"].items():
        paired, ratio = one["paired"], one["ratios"]
        lost = f"{paired['only_dense']} / {paired['only_plan']}"
        bounds = f"{paired['loss_bound']:.2%}", f"{paired['changed_bound']:.2%}"
        same = f"{1 - paired['changed_share']:.1%}"
        numbers = ratio["pairs"], ratio["weight_bytes"], one.get("cpu_ratio")
        rows.append((name, f"{one['accuracy']:.1%}", same, *numbers, lost, *bounds))
    return Table(header, tuple(rows))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=list(SETTINGS), help=f"default: {', '.join(SETTINGS)}")
    parser.add_argument("--model", default=None, help="default: tiny-llada2, and tiny-llada-moe with --canvas")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.95, 0.999, 1.0])
    parser.add_argument("--canvas", action="store_true", help="LLaDA-MoE's loop, which has no threshold")
    parser.add_argument("--harder", action="store_true", help="problems beyond those that it was trained on")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--timed", type=int, default=40, help="of them, for CPU time (default: 40)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=output_file, required=True, metavar="FILE", help="written and gone on with")
    arguments = parser.parse_args()
    for setting in arguments.settings:
        plan_of(setting)  # refused now
    arguments.model = arguments.model or ("tiny-llada-moe" if arguments.canvas else "tiny-llada2")
    names = ("model", "dtype", "problems", "timed", "batch_size", "seed")
    asked = {name: getattr(arguments, name) for name in names} | {"kinds": list(HARDER) if arguments.harder else None}
    result: dict[str, Any] = {"asked": asked, "points": {}}
    path: Path = arguments.json
    if path.exists() and path.stat().st_size:
        result = json.loads(path.read_text())
        if result.get("asked") != asked:
            parser.error(f"{path} is of another run ({result.get('asked')}): expected {asked}; name another file")
    points = result["points"]
    thresholds = [None] if arguments.canvas else arguments.thresholds
    start = time.time()
    with ProcessPoolExecutor(arguments.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for settings in ([None], arguments.settings):  # dense first, then what is compared with it
            todo = [
                (threshold, setting)
                for setting in settings
                for threshold in thresholds
                if setting not in points.get(str(threshold), {}).get("settings", {})
                and (setting is not None or str(threshold) not in points)
            ]
            if settings != [None] and todo:
                cost = sum(points[str(threshold)]["dense"]["cpu_seconds"] for threshold, _ in todo)
                print(f"{len(todo)} tasks, about {cost / arguments.workers / 60:.0f} minutes", flush=True)
            tasks = {pool.submit(run, asked, *task): task for task in todo}
            for task in as_completed(tasks):
                (threshold, setting), found = tasks[task], task.result()
                result["versions"] = found.pop("versions")
                if setting is None:
                    points[str(threshold)] = {"dense": found, "settings": {}}
                else:
                    points[str(threshold)]["settings"][setting] = judged(points[str(threshold)]["dense"], found)
                write_output(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
                print(f"{time.time() - start:6.0f} s: {setting or 'dense'} at {threshold}", flush=True)
    for threshold in thresholds:
        print(f"\nthreshold {threshold}, {asked['problems']} problems\n{table(points[str(threshold)])}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
