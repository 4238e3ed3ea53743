"""Counters to numbers: the FLOP formula, ratios, and the printed table."""

import math

import pytest

from epoch_moe.models.llada2 import LLaDA2MoeConfig
from epoch_moe.paired import paired_result
from epoch_moe.plan.counters import LayerWork, Work
from epoch_moe.report import COUNTS, comparison_table, flops, ratios, work_summary, work_table


def layer(**changes):
    values = {
        "rows": 10,
        "pairs": 40,
        "active_experts": 12,
        "weight_bytes": 1200,
        "support_experts": 0,
        "supports": 0,
        "covered_weight": 0.0,
        "natural_weight": 0.0,
    }
    return LayerWork(**{**values, **changes})


def work(**changes):
    values = {
        "forwards": 3,
        "forward_rows": 20,
        "attention_pairs": 400,
        "dense_rows": 40,
        "lm_head_rows": 7,
        "fallbacks": {"shortfall": 1},
        "per_layer": (
            layer(),
            layer(rows=5, pairs=20, support_experts=18, supports=2, covered_weight=9.0, natural_weight=10.0),
        ),
    }
    return Work(**{**values, **changes})


CONFIG = LLaDA2MoeConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=6,
    n_group=4,
    topk_group=2,
    pad_token_id=1,
    eos_token_id=1,
    mask_token_id=2,
)


def test_flops_follow_the_documented_formula():
    # Written out by hand from the weight shapes: a matrix [m, n] costs 2 m n per row.
    attention_projections = 2 * 8 * (2 + 2 * 1) * 4 + 2 * (2 * 4) * 8
    expected = (
        20 * 3 * attention_projections
        + 400 * 3 * (2 * 2 * 4 * 2)  # scores and mix, per head of dimension 4
        + 20 * 1 * 3 * 2 * 8 * 24
        + 15 * 2 * 8 * 16
        + 60 * 3 * 2 * 8 * 6
        + 40 * 3 * 2 * 8 * 6
        + 7 * 2 * 8 * 100
    )
    assert flops(CONFIG, work()) == expected


def test_work_adds_up_and_means_are_weighted():
    double = work() + work(fallbacks={"version": 2})
    assert (double.forwards, double.rows, double.pairs, double.weight_bytes) == (6, 30, 120, 4800)
    assert double.fallbacks == {"shortfall": 1, "version": 2}
    assert double.support_size == 9.0
    assert double.coverage == pytest.approx(0.9)
    assert math.isnan(double.per_layer[0].coverage)
    assert double.as_dict()["per_layer"][0]["coverage"] is None


def test_summary_holds_every_count():
    summary = work_summary(CONFIG, work())
    assert set(COUNTS) <= set(summary)
    assert summary["experts_per_forward_and_layer"] == 24 / (3 * 2)


def test_ratios_have_no_division_by_zero():
    assert ratios({"a": 0, "b": 4}, {"a": 3, "b": 1}, ("a", "b")) == {"a": None, "b": 0.25}


def test_table_shows_what_it_was_given():
    side = {**work_summary(CONFIG, work()), "accuracy": 0.5, "seconds": 2.0, "tokens_per_forward": 2.25}
    result = {
        "dense": side,
        "plan": {**side, "pairs": 30, "accuracy": 0.25},
        "ratios": ratios(side, {**side, "pairs": 30}),
        "agreement": 0.75,
        "token_agreement": 0.875,
        "problems": 4,
        "fallbacks": {"shortfall": 3},
        "paired": paired_result("abcd", "abce", None),
        "versions": {"device": "cpu"},
    }
    text = comparison_table(result)
    assert "50.0%" in text and "25.0%" in text and "0.500" in text
    assert "75.0% of 4 problems" in text and "87.50%" in text and "shortfall 3" in text
    assert "seconds (CPU)" in text and "changed answers: 1 of 4 problems" in text


def test_work_table_puts_decodes_side_by_side():
    less = work(fallbacks={"version": 2}, per_layer=(layer(rows=5, pairs=10), layer(rows=5, pairs=20)))
    table = work_table(CONFIG, {"dense": work(), "plan": less, "other": work()})
    assert table.header == ("", "dense", "plan", "plan / dense", "other", "other / dense")
    assert table.column("dense")["pairs"] == 60 and table.column("plan")["pairs"] == 30
    assert table.column("plan / dense")["pairs"] == 0.5 and table.column("other / dense")["pairs"] == 1.0
    assert table.column("dense")["FLOPs"] == flops(CONFIG, work())
    assert table.column("dense")["support size"] == 9.0 and table.column("plan")["support size"] is None
    assert table.column("plan / dense")["support size"] is None and table.column("dense")["supports not kept"] == 0
    assert (table.column("plan")["fallbacks: version"], table.column("plan")["fallbacks: shortfall"]) == (2, 0)
    with pytest.raises(ValueError, match="at least one decode"):
        work_table(CONFIG, {})


def test_work_table_of_one_decode():
    assert work_table(CONFIG, {"plan": work()}).header == ("", "plan")


def test_flops_of_another_package_s_configuration_are_left_out():
    table = work_table(object(), {"dense": work(), "plan": work()})
    assert table.column("dense")["FLOPs"] is None and table.column("plan / dense")["FLOPs"] is None
    assert table.column("dense")["pairs"] == 60
