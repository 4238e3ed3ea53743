"""The snippet of docs/engines.md runs as printed, and its table names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import epoch_moe.functional

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()


def test_the_snippet(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(source, "docs/engines.md", "exec"), names)  # it asserts that each request decodes as it does alone
    first = capsys.readouterr().out.splitlines()[0]
    numbers = re.fullmatch(r"3 requests, (\d+) forwards, (\d+) of (\d+) rows computed", first)
    assert numbers is not None
    forwards, rows, dense = map(int, numbers.groups())
    assert forwards < 3 * 7 and dense == 3 * 7 * 8 * 2 and 0.5 * dense < rows < 0.85 * dense
    blocks = names["together"]
    assert isinstance(blocks, dict) and len({tuple(block) for block in blocks.values()}) == 3


def test_every_call_of_the_package_is_described() -> None:
    calls = [name for name in epoch_moe.functional.__all__ if name[0].islower() and name != "router_logits"]
    assert len(calls) == 10
    for name in [*calls, "RowStore"]:
        assert re.search(rf"^\| `{name}\(", PAGE, flags=re.MULTILINE), name
