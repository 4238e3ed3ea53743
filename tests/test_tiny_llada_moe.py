"""The tiny LLaDA-MoE inside the package: loads, answers, and is compared, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import epoch_moe
from epoch_moe.cli import main
from epoch_moe.compare import compare
from epoch_moe.config import EpochConfig
from epoch_moe.models import loading
from epoch_moe.models.llada_moe import LLaDAMoEModelLM
from epoch_moe.problems import check, generate_problems

NAME = "tiny-llada-moe"
OPTIONS = {"gen_length": 32, "block_length": 16, "steps": 32}


@pytest.fixture(scope="module")
def loaded() -> tuple[LLaDAMoEModelLM, Any]:
    return epoch_moe.load_model(NAME)


def test_it_is_small_and_like_the_released_model(loaded: tuple[LLaDAMoEModelLM, Any]) -> None:
    model, tokenizer = loaded
    assert sum(path.stat().st_size for path in (loading.CHECKPOINTS / NAME).iterdir()) < 6_000_000
    sizes = model.config.sizes()
    assert (sizes.experts, sizes.top_k, sizes.shared_inner, len(sizes.moe_layers)) == (64, 8, 0, sizes.layers)
    assert model.config.model_type == "lladamoe" and model.config.architectures == ["LLaDAMoEModelLM"]
    assert tokenizer.mask_token_id == model.config.mask_token_id


def test_it_solves_held_out_problems(loaded: tuple[LLaDAMoEModelLM, Any]) -> None:
    model, tokenizer = loaded
    problems = generate_problems(40, 11)
    prompts = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in problems]
    out = epoch_moe.generate_semi_autoregressive(model, prompts, eos_early_stop=True, **OPTIONS)  # type: ignore[arg-type]
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in out.answers]
    assert sum(map(check, problems, texts)) >= 34  # 95 % of 500; 34 of 40 are far below that


def test_exact_is_dense_and_the_default_saves_pairs(loaded: tuple[LLaDAMoEModelLM, Any]) -> None:
    model, tokenizer = loaded
    problems = generate_problems(6, 12)
    exact = compare(model, tokenizer, problems, EpochConfig.exact(), **OPTIONS)
    assert exact["agreement"] == 1.0 and exact["token_agreement"] == 1.0
    # Of the last of four layers only live rows are computed.
    assert exact["plan"]["rows"] == exact["dense"]["rows"] // 4 * 3 + exact["plan"]["lm_head_rows"]
    pairs = {
        rows: compare(model, tokenizer, problems, EpochConfig(future_rows=rows), **OPTIONS)["ratios"]["pairs"]
        for rows in ("fresh", "dormant")
    }
    assert pairs["dormant"] < pairs["fresh"] < 0.9


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", "work out 3+8+2-3+4-9-1:", "--model", NAME, "--report"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == "3 11 13 10 14 5 4" and "llada_moe" in printed.err
    path = tmp_path / "compare.json"
    arguments = ["--model", NAME, "--problems", "3", "--no-progress", "--future-rows", "dormant", "--json", str(path)]
    assert main(["compare", *arguments]) == 0
    result = json.loads(path.read_text())
    assert result["options"]["steps"] == 32 and result["config"]["future_rows"] == "dormant"
    assert main(["inspect", NAME]) == 0
    assert "router softmax" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", NAME, "--threshold", "0.9"], "--threshold does nothing for model_type='lladamoe'"),
        (["--model", NAME, "--no-cache"], "--no-cache does nothing"),
        (["--cfg-scale", "1"], "--cfg-scale does nothing for model_type='llada2_moe'"),
        (["--model", NAME, "--steps", "7"], "steps=7"),
    ],
)
def test_options_of_the_other_loop_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "sum 1 2:", *arguments]) == 2
    assert message in capsys.readouterr().err
