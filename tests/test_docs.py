"""The Python in README and docs runs as printed, and does what the text around it says."""

import ast
import doctest
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import epoch_moe
from epoch_moe import EpochConfig, generate, load_model, patched
from epoch_moe.functional import RowStore

ROOT = Path(__file__).resolve().parent.parent


def python_block(page: str, number: int = 0) -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)[number]


def test_readme_example(capsys):
    exec(compile(python_block("README.md"), "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "patched 3 MoE layers" in out and "3+6=9+5=14+4=18+2=20 so 20" in out


def test_readme_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(python_block("README.md", 1), "README.md", "exec"), {})
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("page", "number"), [("README.md", 2), ("docs/residency.md", 0)])
def test_residency_example(page, number, capsys):
    names: dict = {}
    exec(compile(python_block(page, number), page, "exec"), names)
    assert "all" in capsys.readouterr().out
    answer = names["tokenizer"].decode(names["out"].answers[0], skip_special_tokens=True)
    assert answer == "3+6=9+5=14+4=18+2=20 so 20"


@pytest.mark.slow  # a minute of Triton's interpreter on a busy machine
def test_kernels_example(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names: dict = {}
    exec(compile(python_block("README.md", 3), "README.md", "exec"), names)
    assert "backend triton" in capsys.readouterr().out
    with patched(names["model"], EpochConfig(backend="grouped")):
        again = generate(names["model"], names["prompt"], gen_length=8, block_length=16)
    assert torch.equal(again.sequences, names["out"].sequences)


def test_the_readme_names_every_page_and_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    table = set(re.findall(r"^\| \[(docs/\w+\.md)\]", readme, flags=re.MULTILINE))
    assert table == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]+))?\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.is_file(), f"{page.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in slugs, f"{page.name}: {target}#{anchor}"


WITH_EXAMPLES = [
    "BlockPlanContext", "BlockSpec", "EpochConfig", "EpochMoEBlock", "FreshLaneDispatcher", "ResidencyConfig",
    "RouterSpec", "RowStore", "following", "generate", "generate_semi_autoregressive", "load_model", "patch", "patched",
    "plan_report", "residency_report", "unpatch",
]  # fmt: skip


@cache
def shared(name):
    return load_model(name)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_print_what_they_say(name, monkeypatch):
    thing = RowStore if name == "RowStore" else getattr(epoch_moe, name)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(thing), {}, name, None, None)
    assert example.examples
    # One model for all, given back as it was.
    monkeypatch.setattr(epoch_moe, "load_model", lambda name, **how: load_model(name, **how) if how else shared(name))
    said: list[str] = []
    failed = doctest.DocTestRunner().run(example, out=said.append, clear_globs=False).failed
    model = example.globs.get("model")
    if hasattr(model, "_epoch_moe"):
        epoch_moe.unpatch(model)
    assert failed == 0, "".join(said)


def test_a_loop_of_one_s_own_gives_the_tokens_of_generate():
    names: dict = {}
    exec(compile(python_block("docs/plans.md"), "docs/plans.md", "exec"), names)
    model, _ = load_model("tiny-llada2")
    prompt, ids = names["prompt"], names["ids"]
    # One token per forward, the most confident one: the released schedule with a threshold that nothing exceeds.
    with patched(model):
        out = generate(model, prompt, gen_length=64 - prompt.shape[1], steps=32, threshold=1.0)
    length = out.lengths[0]
    assert torch.equal(out.sequences[0, :length], ids[0, prompt.shape[1] : prompt.shape[1] + length])


def test_the_loop_that_opens_no_plan_gets_one(capsys):
    exec(compile(python_block("docs/plans.md", 1), "docs/plans.md", "exec"), {})
    out = capsys.readouterr().out
    assert "14 iteration, 1 request" in out and "rows saved" in out and "rows saved 0.0%" not in out


def table_rows() -> list[list[str]]:
    text = (ROOT / "docs" / "patching.md").read_text()
    table = text.split("<!-- patch table -->\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_row_of_the_patch_table_names_a_test_that_is_collected():
    rows = table_rows()
    assert len(rows) > 40 and all(len(row) == 3 and all(row) for row in rows)
    named = {}
    for situation, _, test in rows:
        match = re.fullmatch(r"`((?:\w+/)?test_\w+\.py)::(test_\w+)`", test)
        assert match, f"{situation}: {test} is no `file.py::test`"
        named.setdefault(match[1], set()).add(match[2])
    for file, tests in named.items():
        # What pytest collects: functions of a test file's top level, under names of their own.
        tree = ast.parse((ROOT / "tests" / file).read_text())
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert {test for test in tests if defined.count(test) != 1} == set(), file


def test_the_page_of_the_architecture_names_what_there_is():
    page = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "epoch_moe"
    parts = {path.name + "/" * path.is_dir() for path in source.iterdir() if (path / "__init__.py").exists()}
    table = page.split("## Folders")[1].split("## How to add")[0]
    assert {name for name in parts if f"`{name}`" not in table} == set()
    files = {path.name for path in source.rglob("*.py")}
    for name in re.findall(r"`(?:\w+/)*(\w+\.py)`", page.replace("tests/", "")):
        assert name in files or list((ROOT / "tests").rglob(name)), name
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    for name in re.findall(r"`(?:\w+\.)?([A-Za-z_]\w+)`", page):
        assert re.search(rf"\b{name}\b", text), name
