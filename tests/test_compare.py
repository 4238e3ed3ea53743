"""`compare` on the tiny checkpoint: the numbers it reports are those of the decodes it ran."""

import json

import pytest

from epoch_moe import EpochConfig, generate, load_model, patched
from epoch_moe.compare import compare
from epoch_moe.problems import generate_problems

PROBLEMS = generate_problems(4, 7, split="held_out")


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny-llada2")


@pytest.fixture(scope="module")
def result(tiny):
    return compare(*tiny, PROBLEMS, EpochConfig(), gen_length=96, samples=2)


def test_result_is_json_and_complete(result):
    restored = json.loads(json.dumps(result, allow_nan=False))
    assert {"dense", "plan", "agreement", "ratios", "fallbacks", "config", "versions"} <= set(restored)
    for side in ("dense", "plan"):
        assert {
            "accuracy",
            "seconds",
            "forwards",
            "rows",
            "pairs",
            "active_experts",
            "weight_bytes",
            "lm_head_rows",
            "flops",
        } <= set(restored[side])
    assert restored["config"]["coverage"] == 0.95
    assert len(restored["samples"]) == 2


def test_counts_are_those_of_separate_decodes(tiny, result):
    model, tokenizer = tiny
    with patched(model, EpochConfig()):
        for side, plan in (("dense", None), ("plan", "patched")):
            pairs = forwards = tokens = 0
            for problem in PROBLEMS:
                ids = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
                out = generate(model, [ids], gen_length=96, plan=plan)
                pairs += out.counters.read().pairs
                forwards += out.forwards
                tokens += out.lengths[0]
            assert (result[side]["pairs"], result[side]["forwards"]) == (pairs, forwards)
            assert result[side]["tokens_per_forward"] == tokens / forwards


def test_dense_side_computes_every_row(tiny, result):
    model, _ = tiny
    dense, plan = result["dense"], result["plan"]
    assert dense["pairs"] == dense["rows"] * model.config.num_experts_per_tok
    assert dense["lm_head_rows"] == dense["forwards"] * 32
    assert plan["pairs"] < dense["pairs"] and plan["lm_head_rows"] < dense["lm_head_rows"]
    assert plan["weight_bytes"] < dense["weight_bytes"]
    assert result["ratios"]["pairs"] == plan["pairs"] / dense["pairs"]


def test_exact_agrees_with_dense_on_every_problem(tiny):
    result = compare(*tiny, PROBLEMS, EpochConfig.exact(), gen_length=96, batch_size=4)
    assert result["agreement"] == 1.0 and result["token_agreement"] == 1.0
    # Sequences that wait for a slower batch mate are computed by neither side, rows that nobody reads of the last of
    # three layers by one.
    plan, dense = result["plan"], result["dense"]
    assert plan["lm_head_rows"] < dense["lm_head_rows"]
    assert plan["rows"] == dense["rows"] // 3 * 2 + plan["lm_head_rows"]
    assert result["fallbacks"] == {}


def test_the_model_is_left_as_it_was(tiny):
    model, _ = tiny
    before = model.model.layers[1].mlp
    compare(*tiny, PROBLEMS[:1], EpochConfig(), gen_length=32)
    assert model.model.layers[1].mlp is before


def test_bad_input(tiny):
    with pytest.raises(ValueError, match="at least one problem"):
        compare(*tiny, [], EpochConfig())
    with pytest.raises(ValueError, match="batch_size=0"):
        compare(*tiny, PROBLEMS, EpochConfig(), batch_size=0)
