"""`EpochConfig`: presets, defaults, refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from epoch_moe import generate, load_model, patch
from epoch_moe.config import EpochConfig, fingerprint
from epoch_moe.plan.context import BlockPlanContext
from epoch_moe.plan.counters import Work


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


def test_a_value_for_each_layer() -> None:
    config = EpochConfig(coverage=(0.9, None, 0.8), drift=(0.95, 0.9, 1.0), live_drift=0.99)
    assert config.of_layer(1) == EpochConfig(coverage=None, drift=0.9, live_drift=0.99)
    assert EpochConfig(drift=(0.9,)).of_layer(0).drift == 0.9
    assert EpochConfig().of_layer(7) == EpochConfig() and hash(config) != hash(config.of_layer(0))
    assert config.of_layer(0).floor == pytest.approx(0.675) and config.of_layer(1).floor == 0.0
    config.check_model(3)
    with pytest.raises(ValueError, match=r"coverage=\(0.9, None, 0.8\): expected one value, or one for each of 2"):
        config.check_model(2)
    for name, value in (("coverage", (0.9, 1.5)), ("drift", (0.9, None)), ("live_drift", (0.0, 0.9))):
        with pytest.raises(ValueError, match=rf"EpochConfig\.{name}(\[\d\])?={value[1] if value[0] else value[0]}"):
            EpochConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_support=8 with coverage=None"):
        EpochConfig(max_support=8, coverage=(0.9, None))
    with pytest.raises(ValueError, match=r"coverage_floor=0\.85"):
        EpochConfig(coverage=(0.9, 0.8), coverage_floor=0.85)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    config = EpochConfig(coverage=(0.9, None), drift=0.95, refresh_interval=None, checkpoint="hidden_size=8")
    config.save(path, chosen="by hand")
    assert EpochConfig.load(path) == config and json.loads(path.read_text())["chosen"] == "by hand"
    for text, said in (
        ("{", "is no JSON"),
        ("[]", "is no plan"),
        ('{"coverage": 0.9}', "is no plan"),
        ('{"format": 2, "plan": {}}', "format 2: this version reads 1"),
        ('{"format": 1, "plan": {"covrage": 1}}', "'covrage': an EpochConfig has no such fields"),
        ('{"format": 1, "plan": {"coverage": 2}}', "coverage=2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            EpochConfig.load(path)


def test_another_model_is_refused_everywhere() -> None:
    model, _ = load_model("tiny-llada2")
    own = EpochConfig(checkpoint=fingerprint(model.config))
    other = own.replace(checkpoint=own.checkpoint.replace("num_experts=64", "num_experts=256"))
    with pytest.raises(ValueError, match=r"made for another model .*num_experts=256.* this one is .*num_experts=64 "):
        patch(model, other)
    assert not hasattr(model, "_epoch_moe")
    patch(model, own)
    for wrong in (other, EpochConfig(drift=(0.9, 0.9))):
        with pytest.raises(ValueError, match=r"another model|one for each of 3 MoE layers"):
            patch(model, wrong)
        with pytest.raises(ValueError, match=r"another model|one for each of 3 MoE layers"):
            BlockPlanContext(model, wrong)


def test_each_layer_computes_by_its_own_values() -> None:
    """One value given layer by layer changes nothing; a layer with another one computes something else."""
    model, tokenizer = load_model("tiny-llada2")
    patch(model)
    ids = tokenizer("work out 3+8+2-3+4-9-1+7:", return_tensors="pt")["input_ids"]

    def work(**changes: object) -> tuple[torch.Tensor, Work]:
        plan = EpochConfig(**{"coverage": 0.9, "least_saving": 0.0, "drift": 0.9, **changes})  # type: ignore[arg-type]
        out = generate(model, ids, gen_length=32, threshold=0.999, plan=plan)
        return out.sequences, out.counters.read()

    (tokens, one), (again, three) = work(), work(coverage=(0.9,) * 3, drift=(0.9,) * 3, live_drift=None)
    assert torch.equal(tokens, again) and one == three
    _, own = work(coverage=(0.9, None, 0.5), drift=(1.0, 0.9, 0.9))
    restricted = [layer.supports > 0 for layer in own.per_layer]
    assert restricted == [True, False, True] and own.per_layer[0].rows > own.per_layer[1].rows
    assert own.per_layer[2].support_size < one.per_layer[2].support_size


def test_a_bound_of_one_layer_is_named() -> None:
    with pytest.raises(ValueError, match=r"EpochConfig\.drift\[1\]=None: expected a cosine in \(0, 1\]; 1\.0"):
        EpochConfig(drift=(0.9, None, 0.9))
