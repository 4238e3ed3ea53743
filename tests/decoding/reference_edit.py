"""The editing loops of LLaDA2.1 and LLaDA2.2 as plainly as possible: one sequence, no cache, Python lists."""

from __future__ import annotations

from dataclasses import dataclass, field

from reference_loop import block_logits, once
from torch import Tensor, nn


@dataclass
class Edited:
    """`events` counts what happened, so that a test can ask that it did."""

    answer: list[int] = field(default_factory=list)
    trace: list[list[int]] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)

    @property
    def forwards(self) -> int:
        return len(self.trace)

    def count(self, event: str, times: int = 1) -> None:
        self.events[event] = self.events.get(event, 0) + times

    def finish(self, tokens: list[int], eos_token_id: int) -> Edited:
        self.answer = tokens[: tokens.index(eos_token_id) + 1] if eos_token_id in tokens else tokens
        return self


def greedy(logits_V: Tensor, forbidden: list[int]) -> tuple[int, float]:
    logits_V = logits_V.clone()
    logits_V[forbidden] = float("-inf")
    probs_V = logits_V.softmax(-1)
    return int(probs_V.argmax()), float(probs_V.max())


def confident_or_best(rows: list[int], confidence: dict[int, float], need: int, threshold: float) -> list[int]:
    taken = [row for row in rows if confidence[row] > threshold]
    return taken if len(taken) >= need else sorted(rows, key=lambda row: -confidence[row])[:need]


@once
def reference_rewrite(
    model: nn.Module,
    prompt: Tensor,
    *,
    gen_length: int,
    block_length: int = 8,
    threshold: float,
    editing_threshold: float,
    max_post_steps: int = 16,
    num_to_transfer: int = 1,
    eos_token_id: int = 124,
    mask_token_id: int = 125,
) -> Edited:
    """LLaDA2.1."""
    start = len(prompt)
    blocks = -(-(start + gen_length) // block_length)
    canvas = prompt.tolist() + [mask_token_id] * (blocks * block_length - start)
    out = Edited()
    for number in range(start // block_length, blocks):
        begin, end = number * block_length, (number + 1) * block_length
        post = 0
        while True:
            masks = [slot for slot in range(begin, end) if canvas[slot] == mask_token_id]
            post += not masks
            if post > max_post_steps:
                out.count("post steps spent")
                break
            out.trace.append(canvas[:end])
            logits = block_logits(model, canvas[:end], block_length)
            drawn = {slot: greedy(logits[slot - begin], []) for slot in range(begin, end)}
            token = {slot: drawn[slot][0] for slot in drawn}
            confidence = {slot: drawn[slot][1] for slot in drawn}
            filled = confident_or_best(masks, confidence, num_to_transfer, threshold)
            rewritten = [
                slot
                for slot in range(max(begin, start), end)
                if slot not in masks and confidence[slot] > editing_threshold and token[slot] != canvas[slot]
            ]
            out.count("rewritten", len(rewritten))
            for slot in filled + rewritten:
                canvas[slot] = token[slot]
            if not masks and not rewritten:
                break
        if eos_token_id in canvas[max(begin, start) : end]:
            break
    return out.finish(canvas[start : start + gen_length], eos_token_id)


def reference_edits(
    written: list[int], before: list[int], original: list[bool], prompt: int, special: dict[str, int]
) -> tuple[list[int], list[bool]]:
    """DELETE and SPLIT of a block whose first `prompt` rows are not touched."""
    tokens, kept = written[:prompt], original[:prompt]
    for row in range(prompt, len(written)):
        if written[row] == special["delete"]:
            continue
        if written[row] == special["split"]:
            tokens += [special["mask"], before[row]]
            kept += [False, original[row]]
        else:
            tokens.append(written[row])
            kept.append(original[row])
    missing = max(0, len(written) - len(tokens))
    return (tokens + [special["mask"]] * missing)[: len(written)], (kept + [False] * missing)[: len(written)]


@once
def reference_joint(
    model: nn.Module,
    prompt: Tensor,
    *,
    gen_length: int,
    block_length: int = 8,
    steps: int = 8,
    threshold: float = 0.5,
    editing_threshold: float = 0.0,
    max_post_steps: int = 16,
    eos_token_id: int = 124,
    mask_token_id: int = 125,
    delete_token_id: int = 126,
    split_token_id: int = 127,
    max_iterations: int = 1000,
) -> Edited:
    """LLaDA2.2."""
    special = {"mask": mask_token_id, "delete": delete_token_id, "split": split_token_id}
    edit_ids = [delete_token_id, split_token_id]
    steps = min(steps, gen_length)
    start = len(prompt)
    blocks = -(-(start + gen_length) // block_length)
    canvas = prompt.tolist() + [mask_token_id] * (blocks * block_length - start)
    out = Edited()
    for number in range(start // block_length, blocks):
        begin, end = number * block_length, (number + 1) * block_length
        inside = max(0, start - begin)  # prompt rows of the block
        rows = range(inside, block_length)
        original = [row in rows for row in range(block_length)]
        initial = len(rows)
        post, seen = 0, []
        for step in range(max_iterations):
            before = canvas[begin:end]
            masks = [row for row in rows if before[row] == mask_token_id]
            originals = [row for row in masks if original[row]]
            post = 0 if originals else post + 1
            if not masks and post > max_post_steps:
                out.count("post steps spent")
                break
            out.trace.append(canvas[:end])
            logits = block_logits(model, canvas[:end], block_length)
            drawn = {row: greedy(logits[row], [mask_token_id]) for row in rows}
            token, confidence = {r: d[0] for r, d in drawn.items()}, {r: d[1] for r, d in drawn.items()}
            filled = masks
            if step < steps:
                need = initial // steps + (step < initial % steps) + len(masks) - len(originals)
                filled = confident_or_best(masks, confidence, need, threshold)
            rewritten = [
                row
                for row in rows
                if row not in masks and confidence[row] > editing_threshold and token[row] != before[row]
            ]
            final = step == max_iterations - 1
            if max_post_steps:
                final = final or post >= max_post_steps
            else:
                final = final or (bool(originals) and set(originals) <= set(filled))
            if final:
                filled = masks
                for row in rows:
                    if token[row] in edit_ids:
                        out.count("edit forbidden", row in filled + rewritten)
                        token[row] = greedy(logits[row], [mask_token_id, *edit_ids])[0]
            written = [token[r] if r in filled + rewritten else before[r] for r in range(block_length)]
            changed = sorted((r for r in rows if written[r] != before[r]), key=lambda r: confidence[r])
            if not final:
                for row in changed[:5]:
                    if written in seen:
                        out.count("escape")
                        written[row] = greedy(logits[row], [mask_token_id, token[row]])[0]
            seen.append(list(written))
            out.count("delete", sum(written[r] == delete_token_id for r in rows))
            out.count("split", sum(written[r] == split_token_id for r in rows))
            out.count("rewritten", len(rewritten))
            canvas[begin:end], original = reference_edits(written, before, original, inside, special)
            if canvas[begin:end] == before and not masks:
                break
            if final:
                out.count("final round")
        if eos_token_id in canvas[begin + inside : end]:
            break
    return out.finish(canvas[start : start + gen_length], eos_token_id)
