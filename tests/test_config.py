"""`EpochConfig`: presets, defaults, refusals."""

from __future__ import annotations

import dataclasses

import pytest

from epoch_moe.config import EpochConfig


def test_defaults_and_presets() -> None:
    config = EpochConfig()
    assert (config.coverage, config.refresh_interval, config.on_miss) == (0.95, 5, "reselect")
    assert (config.restrict_new, config.join, config.support_scope) == (False, False, "sequence")
    assert EpochConfig.exact() == EpochConfig(coverage=None, refresh_interval=1)
    assert EpochConfig.paper() == EpochConfig(restrict_new=True, support_scope="batch", recompile="refresh")
    assert EpochConfig.exact(backend="loop").backend == "loop"
    assert EpochConfig.paper(coverage=0.8) == EpochConfig.paper().replace(coverage=0.8)
    for name, want in (("default", config), ("exact", EpochConfig.exact()), ("paper", EpochConfig.paper())):
        assert EpochConfig.preset(name) == want
    assert EpochConfig.preset("dense") is None
    assert EpochConfig.preset("paper", coverage=0.5) == EpochConfig.paper(coverage=0.5)


def test_it_is_frozen_hashable_and_replaced_with_checks() -> None:
    config = EpochConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.coverage = 0.5  # type: ignore[misc]
    assert config.replace(coverage=0.5) == EpochConfig(coverage=0.5) and config.coverage == 0.95
    assert len({config, EpochConfig(), EpochConfig.exact()}) == 2
    with pytest.raises(ValueError, match="refresh_interval=0"):
        config.replace(refresh_interval=0)


@pytest.mark.parametrize(
    ("changes", "floor"),
    [
        ({}, 0.7125),
        ({"coverage": None}, 0.0),
        ({"coverage": 0.04}, 0.03),
        ({"max_support": 8}, 0.0),
        ({"coverage": 0.9, "coverage_floor": 0.9}, 0.9),
        ({"coverage_floor": 0.0}, 0.0),
    ],
)
def test_the_floor_has_a_default(changes: dict[str, float], floor: float) -> None:
    assert EpochConfig(**changes).floor == pytest.approx(floor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("coverage", 0.0),
        ("coverage", -0.1),
        ("coverage", 1.01),
        ("coverage", float("nan")),
        ("coverage", True),
        ("coverage", "0.9"),
        ("coverage_floor", 0.96),
        ("coverage_floor", -0.1),
        ("least_saving", 1.01),
        ("least_saving", -0.1),
        ("max_support", 0),
        ("max_support", 8.0),
        ("join", 1),
        ("recompile", "never"),
        ("candidate_factor", 0),
        ("candidate_factor", 2.0),
        ("candidate_factor", True),
        ("on_miss", "ignore"),
        ("on_miss", None),
        ("support_scope", "layer"),
        ("refresh_interval", 0),
        ("refresh_interval", 2.5),
        ("refresh_interval", True),
        ("future_rows", "asleep"),
        ("backend", "cuda"),
        ("backend", None),
    ],
)
def test_bad_values_are_quoted(field: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        EpochConfig(**{field: value})  # type: ignore[arg-type]
    assert f"EpochConfig.{field}={value!r}" in str(error.value)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="preset 'fast': expected one of 'dense', 'default'"):
        EpochConfig.preset("fast")
    with pytest.raises(ValueError, match="'dense' has no plan to change"):
        EpochConfig.preset("dense", coverage=0.5)
    with pytest.raises(TypeError):
        EpochConfig(converage=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "changes", [{"join": True}, {"on_miss": "expand"}, {"coverage": None}, {"coverage_floor": 0.5}], ids=str
)
def test_a_size_that_could_not_be_kept_is_refused(changes: dict[str, object]) -> None:
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"max_support=8 with {name}={value!r}"):
        EpochConfig(max_support=8, **changes)  # type: ignore[arg-type]
