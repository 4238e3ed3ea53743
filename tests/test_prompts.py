"""Files of prompts, and judges of answers."""

import json
import re
from pathlib import Path

import pytest

from epoch_moe.cli import main
from epoch_moe.config import EpochConfig
from epoch_moe.prompts import Prompt, make_judge, read_prompts


class Template:
    """A tokenizer as far as its chat template goes."""

    chat_template = "some"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def written(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_lines_become_prompts(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "hi"}], "answer": "yes", "kind": "talk", "id": 7}
    path = written(tmp_path / "p.jsonl", {"prompt": "sum 1 2:"}, "", talk)
    first, second = read_prompts(path, Template())
    assert (first.prompt, first.answer, first.kind) == ("sum 1 2:", None, "prompt")
    assert (second.prompt, second.answer, second.kind) == ("<user>hi<assistant>", "yes", "talk")
    assert second.line["id"] == 7
    assert read_prompts(path, Template(), chat=True)[0].prompt == "<user>sum 1 2:<assistant>"
    with pytest.raises(ValueError, match="line 3: the tokenizer has no chat template"):
        read_prompts(path, object())


@pytest.mark.parametrize(
    "line", ["{", "[1]", {"text": "x"}, {"prompt": 3}, {"prompt": ""}, {"prompt": "a", "answer": 5},
             {"prompt": "a", "messages": []}],
)  # fmt: skip
def test_a_bad_line_is_quoted_with_its_number(tmp_path: Path, line: object) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "x"}, line)
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: "):
        read_prompts(path, Template())


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(written(tmp_path / "p.jsonl", ""), Template())


def test_judges(tmp_path: Path) -> None:
    prompt = Prompt("k", "q", "18", {"prompt": "q", "answer": "18", "most": 3})
    pattern = Prompt("k", "q", r"#### 18\b")
    assert make_judge("exact", [prompt])(prompt, " 18\n") and not make_judge(None, [prompt])(prompt, "180")
    by_pattern = make_judge("regex", [pattern])
    assert by_pattern(pattern, "so #### 18.") and not by_pattern(pattern, "#### 180")
    by_group = make_judge(r"regex:#### (\d+)", [prompt])
    assert by_group(prompt, "#### 17 no, #### 18") and not by_group(prompt, "18") and not by_group(prompt, "#### 181")
    assert make_judge(None, [Prompt("k", "q", None)]) is None
    own = tmp_path / "mine.py"
    own.write_text("def judge(line, text):\n    return len(text) <= line['most'] if text else None\n")
    asked = make_judge(str(own), [prompt])
    assert asked(prompt, "abc") and not asked(prompt, "abcd")
    with pytest.raises(ValueError, match="returned None: expected True or False"):
        asked(prompt, "")


@pytest.mark.parametrize(
    ("how", "answer", "said"),
    [
        ("exactly", "1", "judge 'exactly': expected exact, regex"),
        ("exact", None, "1 of 1 prompts have no \"answer\", which judge 'exact' needs"),
        ("regex", "(", "'(' is no regular expression"),
        ("regex:x", "1", "expected a group in the pattern"),
    ],
)
def test_judges_that_cannot_judge_are_refused(how: str, answer: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make_judge(how, [Prompt("k", "q", answer)])


def test_a_file_without_a_judge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("judge = 3")
    with pytest.raises(ValueError, match="has no function judge"):
        make_judge(str(tmp_path / "x.py"), [])


def test_compare_on_a_file_writes_both_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"prompt": "sum 1 2 3 4:", "answer": "x"}
    path = written(tmp_path / "p.jsonl", {"prompt": "sum 3 6 5 4 2:", "answer": "so 20$"}, other)
    output, result = tmp_path / "answers.jsonl", tmp_path / "result.json"
    arguments = ["compare", "--prompts", str(path), "--no-progress", "--gen-length", "32", "--batch-size", "2"]
    assert main([*arguments, "--judge", "regex", "--output", str(output), "--json", str(result)]) == 0
    assert "right only dense: 0, only with the plan: 0 of 2" in capsys.readouterr().out
    first, second = map(json.loads, output.read_text().splitlines())
    assert first["dense"] == first["plan"] == "3+6=9+5=14+4=18+2=20 so 20" and first["dense_right"] is True
    assert second["plan_right"] is False and second["prompt"] == "sum 1 2 3 4:"
    assert json.loads(result.read_text())["dense"]["accuracy"] == 0.5

    written(path, {"prompt": "sum 3 6 5 4 2:"}, {"prompt": "hello:"})
    assert main([*arguments, "--json", str(result)]) == 0
    captured = capsys.readouterr()
    assert "1 of 2 prompts have parts that the tokenizer does not know" in captured.err
    assert "changed answers: 0 of 2" in captured.out and "right" not in captured.out
    assert json.loads(result.read_text())["dense"]["accuracy"] is None


def test_options_of_the_other_source_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "sum 1 2 3 4:"})
    for arguments, said in (
        (["--judge", "exact", "--problems", "1"], "add it"),
        (["--prompts", str(path), "--kinds", "sum"], "--kinds sum"),
        (["--prompts", str(path), "--chat"], "no chat template"),
        (["--prompts", str(tmp_path / "none.jsonl")], "none.jsonl"),
    ):
        assert main(["compare", "--no-progress", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_a_plan_for_another_threshold_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    EpochConfig.exact().save(plan, options={"threshold": 0.999, "block_length": 32, "steps": 32})
    arguments = ["generate", "sum 1 2 3 4:", "--plan", str(plan), "--gen-length", "32"]
    assert main(arguments) == 0
    assert "calibrated with threshold=0.999, not None: its bound does not hold here" in capsys.readouterr().err
    assert main([*arguments, "--threshold", "0.999"]) == 0
    assert "calibrated" not in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*arguments, "--preset", "exact"])


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    odd = "a\u2028b\x85c"
    lines = [json.dumps({"prompt": odd}, ensure_ascii=False), json.dumps({"prompt": "d"})]
    file.write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    assert [one.prompt for one in read_prompts(file, None)] == [odd, "d"]
    file.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"prompts\.jsonl is no UTF-8 text"):
        read_prompts(file, None)
