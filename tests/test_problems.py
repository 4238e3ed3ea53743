"""The problem generator: deterministic, split cleanly, right, and of the promised length; and its tokenizer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import epoch_moe.problems as problems_module
from epoch_moe.problems import (
    EOS_TOKEN,
    KINDS,
    Problem,
    check,
    generate_problems,
    is_held_out,
)

CHECKPOINT = Path(problems_module.__file__).parent / "checkpoints" / "tiny-llada2"
TOKENIZER = json.loads((CHECKPOINT / "tokenizer.json").read_text())
TOKENS = re.compile(TOKENIZER["pre_tokenizer"]["pattern"]["Regex"])
SAMPLE = generate_problems(3000, seed=7, split="train") + generate_problems(2000, seed=7)


def solve(problem: Problem) -> str:
    """The answer, worked out from the prompt's text alone and by other means than the generator's."""
    numbers = [int(x) for x in re.findall(r"\d+", problem.prompt)]
    if problem.kind == "sort":
        return " ".join(str(d) for d in range(10) for _ in range(numbers.count(d)))
    if problem.kind == "reverse":
        return " ".join(reversed(problem.prompt[len("reverse ") : -1].split()))
    if problem.kind == "totals":
        return " ".join(str(sum(numbers[:i])) for i in range(1, len(numbers) + 1))
    if problem.kind == "chain":
        terms = re.findall(r"[+-]?\d", problem.prompt)
        return " ".join(str(eval("".join(terms[:i]))) for i in range(1, len(terms) + 1))
    if problem.kind == "sum":
        return f"{_worked([str(numbers[0])] + [f'+{n}' for n in numbers[1:]])} so {sum(numbers)}"
    verbs = re.findall(r" s?he (\w+) (\d)", problem.prompt)
    terms = [str(numbers[0])] + [("+" if v in ("buys", "finds", "gets", "makes") else "-") + n for v, n in verbs]
    return f"{_worked(terms)} so {problem.prompt.split()[0]} has {eval(''.join(terms))}."


def _worked(terms: list[str]) -> str:
    """Every left-to-right partial result, by evaluating the text up to it."""
    return terms[0] + "".join(f"{term}={eval(''.join(terms[: i + 2]))}" for i, term in enumerate(terms[1:]))


def test_answers_are_exact() -> None:
    """An independent evaluator agrees with every answer, of every kind."""
    assert {p.kind for p in SAMPLE} == set(KINDS)
    for problem in SAMPLE:
        assert solve(problem) == problem.answer, problem


def test_numbers_stay_small() -> None:
    """One-digit operands in the prompt, results of at most two digits and never negative or padded."""
    for problem in SAMPLE:
        assert not re.search(r"\d\d", problem.prompt), problem
        assert not re.search(r"\d\d\d|\b0\d|=-", problem.answer), problem


def test_deterministic_across_processes() -> None:
    """The same arguments give the same problems, also under another hash seed."""
    code = "from epoch_moe.problems import generate_problems as g; print(g(50, 3), g(50, 3, split='train'))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(problems_module.__file__).parents[1])},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{generate_problems(50, 3)} {generate_problems(50, 3, split='train')}\n"}
    assert generate_problems(50, 3) != generate_problems(50, 4)


def test_splits_are_disjoint() -> None:
    """The split is a function of the prompt, and both sides hold what they should."""
    train = {p.prompt for p in generate_problems(5000, 0, split="train")}
    held_out = {p.prompt for p in generate_problems(2000, 0)}
    assert not train & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))


def test_lengths() -> None:
    """Everything fits in three blocks; prompts end inside a block, and most answers go on into the next one."""
    known = set(TOKENIZER["model"]["vocab"])
    answer_lengths, prompt_lengths, crossing = [], set(), 0
    for problem in SAMPLE:
        prompt, answer = TOKENS.findall(problem.prompt), TOKENS.findall(problem.answer)
        assert TOKENS.findall(problem.prompt + problem.answer) == prompt + answer, problem
        assert set(prompt + answer) <= known, set(prompt + answer) - known
        assert len(prompt) + len(answer) + 1 <= 3 * 32, problem
        answer_lengths.append(len(answer))
        prompt_lengths.add(len(prompt))
        crossing += (len(prompt) + len(answer)) // 32 > len(prompt) // 32
    assert crossing > 0.8 * len(SAMPLE)
    assert min(answer_lengths) >= 10 and sum(answer_lengths) / len(answer_lengths) > 16
    assert len(prompt_lengths) > 10 and len(known) <= 191


def test_kinds_and_bad_arguments() -> None:
    """`kinds` restricts, and mistakes are named."""
    assert {p.kind for p in generate_problems(40, 0, kinds=("sum", "sort"))} == {"sum", "sort"}
    with pytest.raises(ValueError, match="'mul'"):
        generate_problems(1, 0, kinds=("mul",))
    with pytest.raises(ValueError, match="'test'"):
        generate_problems(1, 0, split="test")


def test_check_cuts_at_eos_only() -> None:
    """What follows the first EOS is ignored; anything else must match to the letter."""
    problem = Problem("sum", "sum 1 2:", "1+2=3 so 3")
    assert check(problem, "1+2=3 so 3")
    assert check(problem, f"1+2=3 so 3{EOS_TOKEN}{EOS_TOKEN} so")
    for wrong in ("1+2=3 so 3 ", "1+2=3 so 4", f"1+2=3{EOS_TOKEN} so 3", ""):
        assert not check(problem, wrong)


def test_tokenizer_round_trip() -> None:
    """transformers loads the shipped tokenizer, it splits as its pattern says, and decoding gives the text back."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for problem in SAMPLE[:500]:
        for text in (problem.prompt, problem.answer):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.convert_ids_to_tokens(ids) == TOKENS.findall(text)
            assert tokenizer.decode(ids) == text
    assert tokenizer.pad_token == tokenizer.eos_token == EOS_TOKEN
    assert tokenizer.mask_token_id == tokenizer.eos_token_id + 1 == len(tokenizer) - 1
    answer = SAMPLE[0].answer
    tail = tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id] * 3
    assert check(SAMPLE[0], tokenizer.decode(tail))
    assert tokenizer.decode(tail, skip_special_tokens=True) == answer
