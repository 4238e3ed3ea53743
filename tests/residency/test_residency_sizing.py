"""What a budget means: `epoch-moe inspect --residency`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epoch_moe.cli import main
from epoch_moe.residency.sizing import residency_sizes, sizes_text

# LLaDA2.0-mini: 19 MoE layers of 256 experts of 3 x 2048 x 512 in bf16.
EACH = 3 * 2048 * 512 * 2
MINI: dict[str, Any] = {
    "checkpoint": "mini", "moe_layers": 19, "bytes_per_expert": EACH, "router": {"num_experts": 256},
    "expert_bytes": 19 * 256 * EACH, "bytes": 19 * 256 * EACH + 1_900_000_000,
}  # fmt: skip


def test_shares_and_bytes() -> None:
    sizes = residency_sizes(MINI, ["2GB"])
    assert [row["budget"] for row in sizes["budgets"]] == [0.1, 0.2, 0.4, 0.6, 1.0, "2GB"]
    forty, gigabytes = sizes["budgets"][2], sizes["budgets"][-1]
    assert forty["experts_per_layer"] == 102 and forty["expert_bytes"] == 19 * 102 * EACH
    assert forty["total_bytes"] == 1_900_000_000 + (19 * 102 + 2) * EACH
    assert gigabytes["expert_bytes"] + 2 * EACH <= 2e9 < gigabytes["expert_bytes"] + 3 * EACH
    assert "102.0 of 256" in sizes_text(sizes)


@pytest.mark.parametrize(
    ("card", "fits", "says"),
    [("24GB", 164, "holds 164 of 256 experts per layer"), ("80GB", 256, "holds all"), ("2GB", None, "does not hold")],
)
def test_what_fits_a_card(card: str, fits: int | None, says: str) -> None:
    sizes = residency_sizes(MINI, card=card)
    assert sizes["card"]["experts_per_layer"] == fits
    assert says in sizes_text(sizes)
    if fits is not None:
        used = sizes["other_bytes"] + (19 * fits + 2) * EACH
        assert used <= 0.9 * int(card[:-2]) * 1e9 and (fits == 256 or used + 19 * EACH > 0.9 * int(card[:-2]) * 1e9)
        # The budget that is printed gives these experts.
        (row,) = residency_sizes(MINI, [sizes["card"]["budget"]])["budgets"][-1:]
        assert row["experts_per_layer"] == fits


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    arguments = ["inspect", "tiny-llada2", "--residency", "--budget", "1MB", "--card", "1MB", "--json", str(path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "residency: 3 layers of 64 experts" in out and "1MB" in out
    assert json.loads(path.read_text())["residency"]["budgets"][-1]["budget"] == "1MB"
    for bad, says in (
        (["--card", "1MB"], "add it"),
        (["--residency", "--card", "0.5"], "expected bytes"),
        (["--residency", "--card", "big"], "--card big: expected bytes"),
        (["--residency", "--budget", "1B"], "the smallest budget is"),
        (["--residency", "--budget", "lots"], "budget='lots'"),
    ):
        assert main(["inspect", "tiny-llada2", *bad]) == 2
        captured = capsys.readouterr()
        assert says in captured.err and captured.out == ""


def test_a_model_without_experts() -> None:
    with pytest.raises(ValueError, match="has no MoE layer"):
        residency_sizes({**MINI, "moe_layers": 0})
