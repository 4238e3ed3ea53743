"""Budgets and what they mean in experts."""

from __future__ import annotations

import pytest

from epoch_moe.residency.config import ResidencyConfig, parse_budget, slots_per_layer


@pytest.mark.parametrize(
    ("budget", "meaning"),
    [
        (0.4, 0.4), ("0.4", 0.4), ("40%", 0.4), (1.0, 1.0), ("100 %", 1.0),
        (1, 1), (2_000, 2_000), ("2GB", 2_000_000_000), ("1.5 GiB", 1_610_612_736), ("7b", 7), (".5kb", 500),
    ],
)  # fmt: skip
def test_a_budget_is_a_share_or_bytes(budget: object, meaning: object) -> None:
    parsed = parse_budget(budget)
    assert parsed == meaning and type(parsed) is type(meaning)


@pytest.mark.parametrize("budget", [0, 0.0, -1, 1.01, "140%", "2 parrots", "", None, True, float("nan"), "0GB", "1e3"])
def test_what_is_neither_is_refused_with_its_value(budget: object) -> None:
    with pytest.raises(ValueError, match=r"budget=.*expected a share") as error:
        ResidencyConfig(budget=budget)  # type: ignore[arg-type]
    assert repr(budget) in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [{"policy": "belady"}, {"policy": "lfu"}, {"miss": "skip"}, {"tier": "ssd"}, {"drop_cache": 1}, {"source": 3}],
)
def test_other_fields_are_checked(changes: dict[str, object]) -> None:
    (name, value), = changes.items()
    with pytest.raises(ValueError, match=f"ResidencyConfig.{name}={value!r}: expected"):
        ResidencyConfig(**changes)  # type: ignore[arg-type]


def test_a_share_is_rounded_down_to_whole_experts() -> None:
    assert slots_per_layer(0.4, 256, [6, 6], 12) == [102, 102]
    assert slots_per_layer(0.07, 100, [6], 12) == [7]
    assert slots_per_layer("100%", 8, [6, 6], 12) == [8, 8]


def test_less_than_one_expert_names_the_smallest_budget() -> None:
    with pytest.raises(ValueError, match=r"keeps 0\.80 of a layer's 8 experts: the smallest share is 0\.125"):
        slots_per_layer(0.1, 8, [100, 100], 200)
    with pytest.raises(ValueError, match="the smallest budget is 200 bytes"):
        slots_per_layer(199, 8, [100, 100], 200)


def test_bytes_hold_the_scratch_buffers_too_and_are_used_up() -> None:
    assert slots_per_layer(200, 8, [100, 100], 200) == [0, 0]
    assert slots_per_layer(299, 8, [100, 100], 200) == [0, 0]
    assert slots_per_layer(300, 8, [100, 100], 200) == [1, 0]
    assert slots_per_layer(1_000, 8, [100, 100], 200) == [4, 4]
    assert slots_per_layer("1GB", 8, [100, 100], 200) == [8, 8]
    sizes = [100, 40, 70]
    for budget in range(200, 3_000, 37):
        slots = slots_per_layer(budget, 8, sizes, 200)
        used = 200 + sum(n * size for n, size in zip(slots, sizes, strict=True))
        assert used <= budget and max(slots) <= 8 and max(slots) - min(slots) <= 1
        assert slots == [8] * 3 or budget - used < sum(sizes)
