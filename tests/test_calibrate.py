"""Calibration on the tiny checkpoint: what the trace adds up, how settings are decided, and what is refused."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch

import epoch_moe.calibrate as calibrating
from epoch_moe import EpochConfig, generate, load_model, patched
from epoch_moe.calibrate import Calibration, calibrate, calibration_table, split
from epoch_moe.cli import main
from epoch_moe.compare import Side
from epoch_moe.config import fingerprint
from epoch_moe.patching.state import state_of
from epoch_moe.problems import Problem, generate_problems
from epoch_moe.report import frontier_figure
from epoch_moe.sensitivity import CHOICES, TRACED, Choice, allocate, tracing

PROBLEMS = generate_problems(12, 3, kinds=("chain", "sum"), split="held_out")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model("tiny-llada2")


def test_the_split_is_by_each_prompt_alone() -> None:
    problems = generate_problems(600, 4, split="held_out")
    fit, decide = split(problems)
    prompts = {problem.prompt for problem in problems}
    assert {p.prompt for p in fit} | {p.prompt for p in decide} == prompts and len(fit) + len(decide) == len(prompts)
    assert 0.34 < len(fit) / len(prompts) < 0.46
    again = split(problems[::-1] + problems[:5])
    assert {p.prompt for p in again[0]} == {p.prompt for p in fit} and len(again[1]) == len(decide)


def test_the_trace_of_a_layer_is_what_a_decode_with_its_setting_computes(tiny: Any) -> None:
    """Only the last layer reuses: its inputs stay dense's own. Nobody reads what it gives for decoded rows."""
    model, tokenizer = tiny
    options = {"gen_length": 32, "threshold": 1.0}
    ids = [tokenizer(PROBLEMS[0].prompt, add_special_tokens=False)["input_ids"]]
    with patched(model, None):
        with tracing(list(state_of(model).blocks.values())) as traces:
            generate(model, ids, plan=TRACED, **options)
        rows_S, experts_S, error_S = traces[-1].tables()
        everything = CHOICES.index(Choice(1.0, 1.0, None))
        assert error_S[everything] == 0.0 and rows_S[everything] == rows_S.max()
        # Undecided rows decide tokens, and with them the order of later ones: equal to a few rows.
        for own, slack in (
            (Choice(0.95, 1.0, None), 0.0),
            (Choice(0.8, 1.0, None), 0.0),
            (Choice(0.9, 0.99, None), 0.05),
        ):
            plan = TRACED.replace(drift=(1.0, 1.0, own.drift), live_drift=(1.0, 1.0, own.live_drift))
            work, place = generate(model, ids, plan=plan, **options).counters.read().per_layer[-1], CHOICES.index(own)
            assert float(rows_S[place]) == pytest.approx(work.rows, rel=slack)
            assert float(experts_S[place]) == pytest.approx(work.active_experts, rel=slack)
            saves = own.live_drift < 1.0  # of decoded rows the last layer computes nothing anyway
            assert (rows_S[place] < rows_S[everything]) == (error_S[place] > 0.0) == saves


def test_allocations_go_from_the_least_error_to_the_least_cost() -> None:
    cost = torch.tensor([[4.0, 2.0, 1.0], [4.0, 3.9, 3.8]])
    error = torch.tensor([[0.0, 0.1, 5.0], [0.0, 4.0, 9.0]])
    ways = allocate(cost, error, 9)
    totals = [(sum(cost[i, j] for i, j in enumerate(w)), sum(error[i, j] for i, j in enumerate(w))) for w in ways]
    assert [1, 0] in ways and ways[-1] == [2, 2] and len(ways) <= 9
    assert all(a[0] > b[0] and a[1] < b[1] for a, b in pairwise(totals))


class Scripted:
    """A side whose answers follow from its plan: looser bounds on drift lose more of the problems."""

    def __init__(self, lost: dict[float, int]):
        self.lost = lost

    def solve(self, side: Side, model: Any, tokenizer: Any, problems: list[Problem]) -> None:
        place = len(side.texts)
        bound = 1.0 if side.plan is None or side.plan == TRACED else side.plan.drift
        for number, problem in enumerate(problems, place):
            side.texts.append(problem.answer if number >= self.lost.get(bound, 0) else "?")
            side.right.append(side.texts[-1] == problem.answer)


def scripted(tiny: Any, monkeypatch: pytest.MonkeyPatch, lost: dict[float, int], **how: Any) -> Calibration:
    """`calibrate` with uniform settings of drift .98, .9, .8 whose costs fall and whose losses are given."""
    script, model = Scripted(lost), tiny[0]
    monkeypatch.setattr(Side, "solve", lambda side, m, t, problems: script.solve(side, m, t, problems))
    configs = [
        EpochConfig(drift=d, refresh_interval=None, checkpoint=fingerprint(model.config)) for d in (0.98, 0.9, 0.8)
    ]

    def proposed(*_: Any) -> list[dict[str, Any]]:
        return [{"config": c, "per_layer": False, "error": 0.0, "cost": 0.0} for c in configs]

    def result(model: Any, dense: Side, side: Side, objective: str) -> dict[str, Any]:
        paired = calibrating.against(dense, side)
        kind = "loss" if dense.judge is not None else "changed"
        seen = paired["loss"] if kind == "loss" else paired["changed_share"]
        return {"cost": side.plan.drift / 2, "seen": seen, "bound": paired[f"{kind}_bound"], "paired": paired}

    monkeypatch.setattr(calibrating, "propose", proposed)
    monkeypatch.setattr(calibrating, "_result", result)
    found = calibrate(*tiny, generate_problems(120, 3, split="held_out"), tolerance=0.05, **how)
    return found


def test_settings_are_decided_in_order_until_one_fails(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scripted(tiny, monkeypatch, {0.9: 2})  # of about 48 and 72: 4 % lost, bounded by more than 5 %
    first, second, third = found.about["settings"]
    assert first["accepted"] and not second["accepted"] and "check" not in third
    assert found.about["chosen"] == 0 and found.config.drift == 0.98
    assert found.config.checkpoint == fingerprint(tiny[0].config)
    text = calibration_table(json.loads(json.dumps(found.about, allow_nan=False)))
    assert "setting 1: 0.490 of dense's bytes; accuracy lost: 0.00%" in text and "failed" in text
    figure = frontier_figure(found.about)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_where_nothing_passes_the_plan_is_exact(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scripted(tiny, monkeypatch, {0.98: 2, 0.9: 30}, judge=None)
    assert found.about["chosen"] is None and found.config == EpochConfig.exact(checkpoint=found.config.checkpoint)
    assert found.about["bound_on"] == "changed answers" and "no setting passed" in calibration_table(found.about)


def test_too_few_prompts_are_refused_before_the_work(tiny: Any) -> None:
    with pytest.raises(ValueError, match=r"tolerance=0\.01 takes at least 299 prompts to decide by, about 508 in all"):
        calibrate(*tiny, PROBLEMS, tolerance=0.01)
    for wrong in ({"tolerance": 0.0}, {"objective": "joules"}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            calibrate(*tiny, PROBLEMS, **wrong)
    with pytest.raises(ValueError, match="max_support=8 with coverage=None"):
        calibrate(*tiny, PROBLEMS, base=EpochConfig(max_support=8))


@pytest.mark.slow
def test_the_command_writes_a_plan_that_compare_takes(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plan, figure = tmp_path / "plan.json", tmp_path / "frontier.svg"
    options = ["--no-progress", "--threshold", "0.999", "--kinds", "sum"]
    made = ["calibrate", "--problems", "60", "--tolerance", "0.1", "--objective", "rows", "--figure", str(figure)]
    assert main([*made, "--output", str(plan), *options]) == 0
    assert "tolerance 10.00%" in capsys.readouterr().out
    config = EpochConfig.load(plan)
    assert config.checkpoint and json.loads(plan.read_text())["prompts"]["check"] >= 30
    assert b"<svg" in figure.read_bytes()
    assert main(["compare", "--plan", str(plan), "--problems", "4", *options]) == 0
    assert main(["compare", "--plan", str(plan), "--problems", "4", "--model", "tiny-llada-moe"]) == 2
    assert "made for another model" in capsys.readouterr().err
