"""Prompts of one's own: a file of JSON lines, and who judges the answers to them."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epoch_moe.problems import Judge, Problem


@dataclass(frozen=True)
class Prompt(Problem):
    """A problem out of a file; `line` is its line, with whatever else stands there."""

    line: Mapping[str, Any] = field(default_factory=dict, hash=False)


def read_prompts(path: str | Path, tokenizer: Any, chat: bool = False) -> list[Prompt]:
    """The prompts of a file of JSON lines.

    A line is an object with ``"prompt"`` (text) or ``"messages"`` (a conversation for the tokenizer's chat template),
    and may have an ``"answer"`` and a ``"kind"`` (by which `compare` groups results). Empty lines are left out.

    Args:
        path: of the file.
        tokenizer: whose chat template turns a conversation into text.
        chat: a ``"prompt"`` is a user's message, for the chat template too.

    Raises:
        ValueError: the file holds no prompt; or a line is no such object: the message quotes it with its number.
    """
    prompts: list[Prompt] = []
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from None
    # Not splitlines: JSON allows U+2028 and its like inside of texts.
    for number, text in enumerate(content.split("\n"), 1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: {text[:100]!r} is no JSON: {error}") from None
        if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
            raise ValueError(f'{where}: {text[:100]!r}: expected an object with either "prompt" or "messages"')
        prompt, answer, kind = line.get("prompt"), line.get("answer"), line.get("kind", "")
        for name, value in (("prompt", prompt), ("answer", answer), ("kind", kind)):
            if not isinstance(value, (str, type(None))) or (name == "prompt" and value == ""):
                raise ValueError(f"{where}: {name}={value!r}: expected text")
        if prompt is None or chat:
            prompt = chat_text(tokenizer, line.get("messages", [{"role": "user", "content": prompt}]), where)
        prompts.append(Prompt(kind or "prompt", prompt, answer, line))
    if not prompts:
        raise ValueError(f"{path} holds no prompt: expected one JSON object per line")
    return prompts


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, str]], where: str) -> str:
    """A conversation as the text that the model goes on from.

    Raises:
        ValueError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(f"{where}: the tokenizer has no chat template: give plain prompts, without --chat")
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of their own
        raise ValueError(f"{where}: the chat template refuses {messages!r}: {error}") from error
    return text


def make_judge(how: str | None, prompts: Sequence[Prompt]) -> Judge | None:
    """Who judges the answers to ``prompts``.

    Args:
        how: ``"exact"``: the text is the answer, but for white space around it. ``"regex"``: the answer is a regular
            expression that is found in the text. ``"regex:PATTERN"``: the first group of the last match of PATTERN in
            the text is the answer. A path that ends with .py: its function ``judge(line, text)`` returns True or
            False; ``line`` is the prompt's line. None: ``"exact"`` where there are answers, else nobody.

    Raises:
        ValueError: the judge needs answers that are not there, or is none of these.
    """
    missing = sum(prompt.answer is None for prompt in prompts)
    if how is not None and how.endswith(".py") and not how.startswith("regex:"):
        return _judge_of(Path(how))
    if how is None and missing == len(prompts):
        return None
    kind, _, pattern = (how or "exact").partition(":")
    if kind not in ("exact", "regex") or (kind == "exact" and pattern):
        raise ValueError(f"judge {how!r}: expected exact, regex, regex:PATTERN, or a Python file (.py)")
    if missing:
        raise ValueError(f'{missing} of {len(prompts)} prompts have no "answer", which judge {kind!r} needs')
    if kind == "exact":
        return lambda prompt, text: text.strip() == (prompt.answer or "").strip()
    if not pattern:
        compiled = {prompt.answer: _compiled(prompt.answer or "") for prompt in prompts}
        return lambda prompt, text: compiled[prompt.answer].search(text) is not None
    found = _compiled(pattern)
    if found.groups < 1:
        raise ValueError(f"judge {how!r}: expected a group in the pattern, such as 'regex:#### (-?[0-9]+)'")

    def last_match(prompt: Problem, text: str) -> bool:
        matches = list(found.finditer(text))
        return bool(matches) and (matches[-1][1] or "").strip() == (prompt.answer or "").strip()

    return last_match


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


def _judge_of(path: Path) -> Judge:
    """The function ``judge`` of a Python file."""
    names = runpy.run_path(str(path))
    judge = names.get("judge")
    if not callable(judge):
        raise ValueError(f"{path} has no function judge(line, text)")

    def ask(prompt: Problem, text: str) -> bool:
        said = judge(dict(prompt.line) if isinstance(prompt, Prompt) else {"prompt": prompt.prompt}, text)
        if not isinstance(said, bool):
            raise ValueError(f"{path}: judge(...) returned {said!r}: expected True or False")
        return said

    return ask
