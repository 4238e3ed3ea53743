"""`epoch-moe compare`: the same problems solved dense and with a block plan, side by side, in one process.

Dense here means: the same decoding loop (with K/V cache, where the model can have one) on the same patched layers
without a plan: every row of the block through its top-k experts, LM head on all rows of the block. The two sides
alternate batch by batch, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import epoch_moe
from epoch_moe.config import EpochConfig
from epoch_moe.decoding import BlockDiffusionOutput, loop_of
from epoch_moe.paired import paired_result
from epoch_moe.patching.apply import patched
from epoch_moe.plan.counters import Work
from epoch_moe.problems import Judge, Problem, check
from epoch_moe.report import ratios, work_summary


@dataclass
class Side:
    """One side of a comparison: running results over batches of problems.

    Attributes:
        plan: its plan; None: dense.
        judge: says whether a text is right; None: nobody does, and ``right`` stays empty.
        options: of the decoding loop.
        right, texts, answers: of each problem.
        work: counted so far.
    """

    plan: EpochConfig | None
    judge: Judge | None = check
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0
    forwards: int = 0
    right: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    work: Work | None = None

    def solve(self, model: Any, tokenizer: Any, problems: Sequence[Problem]) -> None:
        """Decode a batch of problems and judge the answers."""
        prompts = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in problems]
        start = time.perf_counter()
        out: BlockDiffusionOutput = loop_of(model)(model, prompts, plan=self.plan, **self.options)
        self.seconds += time.perf_counter() - start
        self.forwards += out.forwards
        assert out.counters is not None
        work = out.counters.read()
        self.work = work if self.work is None else self.work + work
        for problem, answer in zip(problems, out.answers, strict=True):
            self.tokens += len(answer)
            text = tokenizer.decode(answer, skip_special_tokens=True)
            self.texts.append(text)
            self.answers.append([int(token) for token in answer])
            if self.judge is not None:
                self.right.append(self.judge(problem, text))

    def summary(self, config: Any) -> dict[str, Any]:
        """The side's part of the result; its accuracy is None where nobody judges."""
        assert self.work is not None
        return {
            "accuracy": sum(self.right) / len(self.right) if self.right else None,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_forward": self.tokens / self.forwards,
            **work_summary(config, self.work),
        }


def solve_all(
    sides: Sequence[Side],
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    batch_size: int,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Decode all problems with every side, batch by batch, the sides in turns; ``progress``: problems of each batch."""
    for number, start in enumerate(range(0, len(problems), batch_size)):
        batch = problems[start : start + batch_size]
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.solve(model, tokenizer, batch)
        if progress is not None:
            progress(len(batch))


def against(dense: Side, plan: Side) -> dict[str, Any]:
    """`paired_result` of two sides that solved the same problems."""
    return paired_result(dense.texts, plan.texts, (dense.right, plan.right) if dense.judge is not None else None)


def compare(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    config: EpochConfig,
    *,
    batch_size: int = 1,
    samples: int = 0,
    judge: Judge | None = check,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Solve ``problems`` dense and with a plan.

    Args:
        model, tokenizer: as `epoch_moe.load_model` returns them; patched for the time of the call.
        problems: prompts, with exact answers where ``judge`` asks for them.
        config: the plan.
        batch_size: problems decoded together.
        samples: how many problems to return with both answers.
        judge: says whether a text is right; None: nobody can, and only texts are compared.
        progress: called with the number of problems after each batch.
        options: for `epoch_moe.generate` (``gen_length``, ``block_length``, ``threshold``, ...), or for
            `epoch_moe.generate_semi_autoregressive` where the model decodes on a canvas.

    Returns:
        A dictionary for JSON: ``dense`` and ``plan`` (accuracy, seconds, tokens, and the counts of
        `epoch_moe.report.COUNTS`), ``agreement`` (share of problems with identical text), ``token_agreement`` (share
        of places, counted by the longer answer of each pair, that hold the same token), ``paired`` (see
        `epoch_moe.paired.paired_result`), ``ratios`` (plan / dense), ``fallbacks``, ``by_kind``, ``samples``,
        ``config``, ``options`` and ``versions``.
    """
    if not problems:
        raise ValueError("compare needs at least one problem, got none")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected an integer >= 1")
    dense, plan = (Side(kind, judge, options) for kind in (None, config))
    with patched(model, config):
        for side in (dense, plan):  # first calls pay for allocations and lazy initialisation
            Side(side.plan, None, options).solve(model, tokenizer, problems[:1])
        solve_all((dense, plan), model, tokenizer, problems, batch_size, progress)
    left, right = dense.summary(model.config), plan.summary(model.config)
    pairs = list(zip(dense.answers, plan.answers, strict=True))
    same = sum(sum(a == b for a, b in zip(x, y, strict=False)) for x, y in pairs)
    paired = against(dense, plan)
    assert plan.work is not None
    return {
        "problems": len(problems),
        "dense": left,
        "plan": right,
        "agreement": 1.0 - paired["changed_share"],
        "token_agreement": same / max(sum(max(len(x), len(y)) for x, y in pairs), 1),
        "paired": paired,
        "ratios": ratios(left, right),
        "fallbacks": plan.work.fallbacks,
        "by_kind": {} if judge is None else _by_kind(problems, dense, plan),
        "samples": [_sample(problems, dense, plan, number) for number in range(min(samples, len(problems)))],
        "config": asdict(config),
        "options": {**options, "batch_size": batch_size},
        "versions": versions(model),
    }


def _sample(problems: Sequence[Problem], dense: Side, plan: Side, number: int) -> dict[str, Any]:
    """One problem with both answers, and whether they are right where somebody judged."""
    problem, sides = problems[number], {"dense": dense, "plan": plan}
    asked = {"kind": problem.kind, "prompt": problem.prompt, "answer": problem.answer}
    right = {f"{name}_right": side.right[number] for name, side in sides.items() if side.right}
    return {**asked, **{name: side.texts[number] for name, side in sides.items()}, **right}


def _by_kind(problems: Sequence[Problem], dense: Side, plan: Side) -> dict[str, dict[str, float]]:
    totals = Counter(problem.kind for problem in problems)
    right = {
        name: Counter(p.kind for p, ok in zip(problems, side.right, strict=True) if ok)
        for name, side in (("dense", dense), ("plan", plan))
    }
    return {
        kind: {"problems": count, "dense": right["dense"][kind] / count, "plan": right["plan"][kind] / count}
        for kind, count in sorted(totals.items())
    }


def versions(model: Any) -> dict[str, Any]:
    """What a result depends on beside its options."""
    import transformers

    parameter = next(model.parameters())
    return {
        "epoch_moe": epoch_moe.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": parameter.device.type,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
