"""The figure of a decode: three panels that hold its numbers, and errors that say what to do."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import GOLDEN
from test_report import CONFIG

from epoch_moe import generate, load_model, patch
from epoch_moe.decoding import generate_semi_autoregressive
from epoch_moe.figure import PlanFigure
from epoch_moe.plan.counters import Counters
from epoch_moe.plan.recorder import ExpertRecorder
from epoch_moe.report import plan_figure


def counters(record: bool = True, restricted: bool = True) -> Counters:
    """Two blocks of two forwards, two layers of 16 experts; layer l of forward f uses experts l and f, f + 1 times."""
    result = Counters(2, [8, 8], recorder=ExpertRecorder(2) if record else None)
    for place, (number, fresh) in enumerate(((0, 8), (1, 2), (0, 12), (1, 3))):
        for layer in range(2):
            counts_E = torch.zeros(16, dtype=torch.int64)
            counts_E[[layer, 4 + place]] = place + 1
            result.add_layer(layer, fresh, counts_E)
            if restricted and number:
                support_GE = torch.zeros(1, 16, dtype=torch.bool)
                support_GE[0, : 6 + 2 * layer] = True
                result.add_support(layer, support_GE, torch.tensor([True]), torch.ones(1), torch.ones(1), None)
        result.add_forward(12)
        result.add_history({"forward": number, "rows": 12, "fresh": fresh, "live": 1})
    return result


def panels(figure: PlanFigure) -> dict[str, object]:
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def test_the_panels_hold_the_numbers() -> None:
    figure = plan_figure(CONFIG, counters(), layer=-1, block=1)
    shown = panels(figure)
    assert list(shown) == ["Support per layer", "Rows per forward", "Experts of MoE layer 1, block 1"]
    supports, shares, experts = shown.values()
    assert [bar.get_height() for bar in supports.patches] == [6, 8]
    assert supports.lines[0].get_ydata()[0] == 16
    lines = {line.get_label(): list(line.get_ydata()) for line in shares.lines}
    assert lines["fresh"] == pytest.approx([100 * n / 12 for n in (8, 2, 12, 3)])
    assert lines["live"] == pytest.approx([100 / 12] * 4)
    assert [line.get_xdata()[0] for line in shares.lines[2:]] == [0, 2]  # where blocks begin
    # Experts 1 (3 + 4 rows), 7 (4), 6 (3), then those of the support that nobody used: 0, 2, 3, 4, 5.
    support, used = (image.get_array() for image in experts.images)
    assert used.filled(0).tolist() == [[3, 4], [0, 4], [3, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert (~support.mask).tolist() == [[False, True], [False, True], [False, True]] + [[False, True]] * 5


def test_every_axis_is_labelled() -> None:
    figure = plan_figure(CONFIG, counters())
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels(figure).values())
    assert figure.axes[3].get_ylabel() == "rows computed by the expert"


@pytest.mark.parametrize(
    ("name", "decode", "options"),
    [
        ("llada2", generate, {"threshold": 1.0}),
        ("llada_moe", generate_semi_autoregressive, {"steps": 16}),
    ],
)
def test_every_loop_can_be_drawn(name: str, decode: Callable[..., Any], options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no tokenizer files")
        model, _ = load_model(GOLDEN / name)
    patch(model)
    out = decode(model, [[5, 9, 2, 77, 31]], gen_length=16, block_length=8, eos_token_id=1, record=True, **options)
    figure = plan_figure(model.config, out.counters, block=1)
    history = list(out.counters.history)
    begin = [place for place, entry in enumerate(history) if entry["forward"] == 0][1]
    end = next((p for p in range(begin + 1, len(history)) if history[p]["forward"] == 0), len(history))
    used = figure.axes[2].images[1].get_array().filled(0)
    top_k = model.config.num_experts_per_tok
    assert used.sum(axis=0).tolist() == [top_k * entry["fresh"] for entry in history[begin:end]]


def test_what_was_not_recorded_or_restricted_is_said() -> None:
    figure = plan_figure(CONFIG, counters(record=False, restricted=False))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["no row was restricted\nto a support", "not recorded:\ngenerate(..., record=True)"]


def test_it_draws_without_pyplot_and_saves() -> None:
    figure = plan_figure(CONFIG, counters())
    assert figure._repr_png_().startswith(b"\x89PNG")
    data = io.BytesIO()
    figure.savefig(data, format="svg")
    assert b"<svg" in data.getvalue()


def test_bad_layers_blocks_and_decodes_are_refused() -> None:
    with pytest.raises(IndexError, match="layer=2: the model has 2 MoE layers, 0 to 1"):
        plan_figure(CONFIG, counters(), layer=2)
    with pytest.raises(IndexError, match="block=-3: the history holds 2 blocks, 0 to 1"):
        plan_figure(CONFIG, counters(), block=-3)
    with pytest.raises(ValueError, match="no forward under a plan"):
        plan_figure(CONFIG, Counters(2, [8, 8]))


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from epoch_moe.report import plan_figure\n"
        "try:\n    plan_figure(None, None)\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert "pip install matplotlib" in done.stdout and "[plot]" in done.stdout
