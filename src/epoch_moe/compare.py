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
from epoch_moe.patching.apply import patched
from epoch_moe.plan.counters import Work
from epoch_moe.problems import Problem, check
from epoch_moe.report import ratios, work_summary


@dataclass
class Side:
    """One side of a comparison: running results over batches of problems."""

    plan: EpochConfig | None
    seconds: float = 0.0
    tokens: int = 0
    forwards: int = 0
    right: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    work: Work | None = None

    def solve(self, model: Any, tokenizer: Any, problems: Sequence[Problem], options: dict[str, Any]) -> None:
        """Decode a batch of problems and judge the answers."""
        prompts = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in problems]
        start = time.perf_counter()
        out: BlockDiffusionOutput = loop_of(model)(model, prompts, plan=self.plan, **options)
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
            self.right.append(check(problem, text))

    def summary(self, config: Any) -> dict[str, Any]:
        """The side's part of the result."""
        assert self.work is not None
        return {
            "accuracy": sum(self.right) / len(self.right),
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_forward": self.tokens / self.forwards,
            **work_summary(config, self.work),
        }


def compare(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    config: EpochConfig,
    *,
    batch_size: int = 1,
    samples: int = 0,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Solve ``problems`` dense and with a plan.

    Args:
        model, tokenizer: as `epoch_moe.load_model` returns them; patched for the time of the call.
        problems: with exact answers.
        config: the plan.
        batch_size: problems decoded together.
        samples: how many problems to return with both answers.
        progress: called with the number of problems after each batch.
        options: for `epoch_moe.generate` (``gen_length``, ``block_length``, ``threshold``, ...), or for
            `epoch_moe.generate_semi_autoregressive` where the model decodes on a canvas.

    Returns:
        A dictionary for JSON: ``dense`` and ``plan`` (accuracy, seconds, tokens, and the counts of
        `epoch_moe.report.COUNTS`), ``agreement`` (share of problems with identical text), ``token_agreement`` (share
        of places, counted by the longer answer of each pair, that hold the same token), ``ratios`` (plan / dense),
        ``fallbacks``, ``by_kind``, ``samples``, ``config``, ``options`` and ``versions``.
    """
    if not problems:
        raise ValueError("compare needs at least one problem, got none")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected an integer >= 1")
    dense, plan = Side(None), Side(config)
    with patched(model, config):
        for side in (dense, plan):  # first calls pay for allocations and lazy initialisation
            Side(side.plan).solve(model, tokenizer, problems[:1], options)
        for number, start in enumerate(range(0, len(problems), batch_size)):
            batch = problems[start : start + batch_size]
            for side in (dense, plan) if number % 2 == 0 else (plan, dense):
                side.solve(model, tokenizer, batch, options)
            if progress is not None:
                progress(len(batch))
    left, right = dense.summary(model.config), plan.summary(model.config)
    pairs = list(zip(dense.answers, plan.answers, strict=True))
    same = sum(sum(a == b for a, b in zip(x, y, strict=False)) for x, y in pairs)
    assert plan.work is not None
    return {
        "problems": len(problems),
        "dense": left,
        "plan": right,
        "agreement": sum(a == b for a, b in zip(dense.texts, plan.texts, strict=True)) / len(problems),
        "token_agreement": same / max(sum(max(len(x), len(y)) for x, y in pairs), 1),
        "ratios": ratios(left, right),
        "fallbacks": plan.work.fallbacks,
        "by_kind": _by_kind(problems, dense, plan),
        "samples": [
            {**asdict(problem), "dense": x, "plan": y}
            for problem, x, y in zip(problems[:samples], dense.texts, plan.texts, strict=False)
        ],
        "config": asdict(config),
        "options": {**options, "batch_size": batch_size},
        "versions": versions(model),
    }


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
