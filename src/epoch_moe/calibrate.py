"""`epoch-moe calibrate`: choose a plan by prompts of one's own, and certify it on prompts that nothing was chosen by.

1. A hash of each prompt puts it in one of two parts: two fifths propose, three fifths decide.
2. Dense and traced decodes of the first part say what each layer's bounds and coverage would save and change
   (`epoch_moe.sensitivity`). From that come settings from tight to loose, with a value per layer and with one for all.
3. Each is decoded on the first part. What costs no less than a tighter one, or loses too much already, is left out.
4. The others are decoded on the second part from tight to loose, until one's 95 % bound on the accuracy lost (without
   answers: on the share of changed ones) is above the tolerance. The last one below it is the plan. In that order no
   correction for several tests is needed: a setting is only tried where all before it have passed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from epoch_moe.checks import choice, real, whole
from epoch_moe.compare import Side, against, solve_all, versions
from epoch_moe.config import LAYERED, EpochConfig, fingerprint
from epoch_moe.paired import LEVEL, fewest_draws
from epoch_moe.patching.apply import patched
from epoch_moe.patching.state import state_of
from epoch_moe.problems import Judge, Problem, check
from epoch_moe.report import work_summary
from epoch_moe.sensitivity import CHOICES, TRACED, LayerTrace, allocate, tracing
from epoch_moe.tables import Table

Objective = Literal["bytes", "rows", "time"]
COSTS = {"bytes": "weight_bytes", "rows": "rows", "time": "seconds"}
FEWEST = 30
"""Prompts that the deciding part has at least."""
POINTS = 5
"""Settings at most of each kind, a value per layer or one for all."""


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
        config: the plan; `EpochConfig.exact` where no setting passed.
        about: how it was found, for JSON: objective, tolerance, numbers of prompts, all settings with their results on
            both parts, which was chosen (None: none passed), options of the decoding loop, versions.
    """

    config: EpochConfig
    about: dict[str, Any]


def calibrate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    tolerance: float = 0.01,
    objective: Objective = "bytes",
    base: EpochConfig | None = None,
    judge: Judge | None = check,
    batch_size: int = 8,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Calibration:
    """Choose a plan; see the module's docstring for how.

    Args:
        model, tokenizer: as `epoch_moe.load_model` returns them; patched for the time of the call.
        problems: prompts like those that the plan is for. Repeated ones count once.
        tolerance: accuracy that may be lost at most, or share of changed answers where ``judge`` is None.
        objective: what is to be saved: ``"bytes"`` of expert weights read, ``"rows"`` through experts, or ``"time"``,
            which is measured and therefore may choose otherwise on another run.
        base: everything but coverage and drift bounds; None: the default, refreshed by drift alone.
        judge: says whether a text is right; None: nobody can.
        batch_size: prompts decoded together, here and later: bytes depend on it.
        progress: called with what is being done, how many prompts of it, and how many there are; first with 0.
        options: for the model's decoding loop.

    Raises:
        ValueError: too few prompts to show a loss below ``tolerance``, even if nothing were lost.
    """
    real("tolerance", tolerance, "a share in (0, 1)", most=1.0, above=True)
    choice("objective", objective, tuple(COSTS))
    whole("batch_size", batch_size, least=1)
    base = EpochConfig(refresh_interval=None) if base is None else base
    for own in CHOICES:
        base.replace(**own._asdict())  # refused now, if at all
    fit, decide = split(problems)
    needed = max(fewest_draws(min(tolerance, 0.999)), FEWEST)
    if len(decide) < needed or not fit:
        raise ValueError(
            f"tolerance={tolerance} takes at least {needed} prompts to decide by, about {5 * needed // 3 + 10} in all: "
            f"got {len(problems)}, of which {len(fit)} propose and {len(decide)} decide"
        )

    def solve(part: Sequence[Problem], plan: EpochConfig | None, what: str) -> Side:
        side = Side(plan, judge, options)
        if progress is not None:
            progress(what, 0, len(part))
        advance = None if progress is None else (lambda number: progress(what, number, len(part)))
        solve_all([side], model, tokenizer, part, batch_size, advance)
        return side

    with patched(model, None):
        state = state_of(model)
        assert state is not None
        Side(None, None, options).solve(model, tokenizer, fit[:1])  # pays for allocations
        dense = solve(fit, None, "dense")
        with tracing(list(state.blocks.values())) as traces:
            solve(fit, TRACED, "trace")
        settings = propose(traces, objective, base.replace(checkpoint=fingerprint(model.config)))
        for number, setting in enumerate(settings, 1):
            side = solve(fit, setting["config"], f"setting {number} of {len(settings)}")
            setting["fit"] = _result(model, dense, side, objective)
        order = _frontier(settings, tolerance)
        exact, chosen = (solve(decide, None, "dense, deciding") if order else None), None
        for number in order:
            setting = settings[number]
            assert exact is not None
            side = solve(decide, setting["config"], f"deciding on setting {number + 1}")
            setting["check"] = _result(model, exact, side, objective)
            setting["accepted"] = setting["check"]["bound"] <= tolerance
            if not setting["accepted"]:
                break
            chosen = number
    config = EpochConfig.exact(checkpoint=fingerprint(model.config)) if chosen is None else settings[chosen]["config"]
    about = {
        "objective": objective,
        "tolerance": tolerance,
        "level": LEVEL,
        "bound_on": "changed answers" if judge is None else "accuracy lost",
        "prompts": {"fit": len(fit), "check": len(decide), "sha256": _hash("\0".join(p.prompt for p in fit + decide))},
        "settings": [{**setting, "config": asdict(setting["config"])} for setting in settings],
        "chosen": chosen,
        "options": {**options, "batch_size": batch_size},
        "versions": versions(model),
    }
    return Calibration(config, about)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split(problems: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Two fifths that propose and three fifths that decide, by each prompt's own hash; each prompt once."""
    once = list({problem.prompt: problem for problem in reversed(problems)}.values())[::-1]
    fits = [int(_hash(problem.prompt)[:8], 16) % 5 < 2 for problem in once]
    return [p for p, own in zip(once, fits, strict=True) if own], [
        p for p, own in zip(once, fits, strict=True) if not own
    ]


def propose(traces: Sequence[LayerTrace], objective: Objective, base: EpochConfig) -> list[dict[str, Any]]:
    """Settings from tight to loose by their estimated error: ``config``, ``per_layer``, ``error`` and ``cost``.

    ``error`` is the sum over layers of the relative squared error of their outputs, ``cost`` a share of dense's.
    """
    tables = [trace.tables() for trace in traces]
    scale = [t.block.weights.ensure().bytes_per_expert if objective == "bytes" else 1 for t in traces]
    cost_LS = torch.stack([table[objective == "bytes"] * size for table, size in zip(tables, scale, strict=True)])
    error_LS = torch.stack([table[2] for table in tables])
    layers, settings = len(tables), {}
    for per_layer, costs, errors in ((True, cost_LS, error_LS), (False, cost_LS.sum(0, True), error_LS.sum(0, True))):
        for places in allocate(costs, errors, POINTS):
            own = places if per_layer else places * layers
            at_L1 = torch.tensor(own).unsqueeze(1)
            error, cost = (float(table.gather(1, at_L1).sum()) for table in (error_LS, cost_LS))
            values = {name: tuple(getattr(CHOICES[place], name) for place in own) for name in LAYERED}
            config = base.replace(**_shortest(values))
            share = cost / float(cost_LS.amax(dim=1).sum())
            settings[config] = {"config": config, "per_layer": len(set(own)) > 1, "error": error, "cost": share}
    return sorted(settings.values(), key=lambda setting: (setting["error"], setting["cost"]))


def _shortest(values: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """One value where all layers have the same; no comparison of undecided rows' inputs where all are recomputed."""
    result: dict[str, Any] = {name: own[0] if len(set(own)) == 1 else own for name, own in values.items()}
    return {**result, "live_drift": None} if result["live_drift"] == 1.0 else result


def _result(model: Any, dense: Side, side: Side, objective: Objective) -> dict[str, Any]:
    """A setting's result on one part: ``cost`` (a share of dense's), ``bound``, ``seen`` (what it bounds), `paired`."""
    paired = against(dense, side)
    assert side.work is not None and dense.work is not None
    kind = "changed" if dense.judge is None else "loss"
    costs = [{**work_summary(model.config, one.work), "seconds": one.seconds} for one in (side, dense) if one.work]
    return {
        "cost": costs[0][COSTS[objective]] / costs[1][COSTS[objective]],
        "seen": paired["changed_share" if kind == "changed" else "loss"],
        "bound": paired[f"{kind}_bound"],
        "paired": paired,
    }


def _frontier(settings: Sequence[Mapping[str, Any]], tolerance: float) -> list[int]:
    """Which settings are tried on the second part, in order: each costs less than those before, and less than dense."""
    order: list[int] = []
    least = 1.0
    for number, setting in enumerate(settings):
        if setting["fit"]["cost"] < least and setting["fit"]["seen"] <= tolerance:
            order.append(number)
            least = setting["fit"]["cost"]
    return order


def calibration_table(about: Mapping[str, Any]) -> str:
    """The text that `epoch-moe calibrate` prints: all settings, and what was decided."""

    def words(config: Mapping[str, Any]) -> str:
        def one(value: Any) -> str:
            if isinstance(value, (list, tuple)):
                return " ".join(map(one, value))
            return "-" if value is None else f"{value:g}"

        return "; ".join(f"{name} {one(config[name])}" for name in LAYERED)

    rows = []
    for number, setting in enumerate(about["settings"], 1):
        fit, decided = setting["fit"], setting.get("check")
        verdict = "" if decided is None else "passed" if setting["accepted"] else "failed"
        bound = None if decided is None else f"{decided['bound']:.2%}"
        cost = f"{(decided or fit)['cost']:.3f}"
        rows.append((f"{number}: {words(setting['config'])}", cost, f"{fit['seen']:.2%}", bound, verdict))
    what = about["bound_on"]
    table = Table(("", f"{about['objective']} / dense", f"{what}, proposing", "bound, deciding", ""), tuple(rows))
    sizes, chosen = about["prompts"], about["chosen"]
    if chosen is None:
        said = "no setting passed: exact, which changes nothing"
    else:
        decided = about["settings"][chosen]["check"]
        said = (
            f"setting {chosen + 1}: {decided['cost']:.3f} of dense's {about['objective']}; {what}: "
            f"{decided['seen']:.2%}, at most {decided['bound']:.2%} ({about['level']:.0%} bound)"
        )
    parts = f"{sizes['fit']} prompts propose, {sizes['check']} decide; tolerance {about['tolerance']:.2%}"
    return f"{table}\n\n{parts}\n{said}"
