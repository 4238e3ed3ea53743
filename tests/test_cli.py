"""The command line, as a user types it."""

import json
import re

import pytest

from epoch_moe.cli import build_parser, main
from epoch_moe.config import EpochConfig


def run(capsys, *arguments):
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_compare_prints_a_table_and_writes_json(capsys, tmp_path):
    path = tmp_path / "result.json"
    status, out, _ = run(
        capsys, "compare", "--problems", "3", "--seed", "5", "--on-miss", "drop", "--coverage", "0.9",
        "--refresh-interval", "none", "--json", str(path), "--no-progress",
    )  # fmt: skip
    assert status == 0
    assert "plan / dense" in out and "same text as dense" in out
    result = json.loads(path.read_text())
    assert result["problems"] == 3 and result["seed"] == 5
    config = {name: result["config"][name] for name in ("coverage", "on_miss", "refresh_interval")}
    assert config == {"coverage": 0.9, "on_miss": "drop", "refresh_interval": None}


def test_generate_solves_a_sum(capsys):
    status, out, err = run(capsys, "generate", "sum 3 6 5 4 2:", "--report")
    assert status == 0
    assert out.strip() == "3+6=9+5=14+4=18+2=20 so 20"
    assert "tokens per forward" in err and "pairs" in err and "patched" in err


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_unknown_characters_and_an_answer_without_text_are_told(capsys, stream):
    status, out, err = run(capsys, "generate", "hello world", *stream)
    assert status == 0 and not out.strip()
    assert "does not know 'hello', 'world'" in err and "the answer holds no text (1 tokens" in err
    _, out, err = run(capsys, "generate", "sum 3 6 5 4 2:", *stream)
    assert out.strip() and "epoch-moe generate:" not in err


def test_generate_with_editing(capsys):
    # No probability is above 1, so nothing is edited, but every block gets a forward more.
    status, out, err = run(capsys, "generate", "sum 3 6 5 4 2:", "--editing-threshold", "1.0", "--report")
    assert status == 0 and out.strip() == "3+6=9+5=14+4=18+2=20 so 20"
    _, _, plain = run(capsys, "generate", "sum 3 6 5 4 2:", "--report")
    assert forwards(err) > forwards(plain)
    editing = ("--editing-threshold", "1.0", "--max-post-steps", "0", "--report")
    _, _, none = run(capsys, "generate", "sum 3 6 5 4 2:", *editing)
    assert forwards(none) < forwards(err)


def forwards(report):
    return int(re.search(r"tokens in (\d+) forwards", report)[1])


@pytest.mark.parametrize("preset", ["dense", "exact", "paper"])
def test_generate_presets_and_stream(capsys, preset):
    status, streamed, _ = run(capsys, "generate", "sum 3 6 5 4 2:", "--preset", preset, "--stream")
    assert status == 0
    _, whole, _ = run(capsys, "generate", "sum 3 6 5 4 2:", "--preset", preset)
    assert streamed.strip() == whole.strip() != ""


def test_inspect(capsys, tmp_path):
    path = tmp_path / "inspect.json"
    status, out, _ = run(capsys, "inspect", "tiny-llada2", "--json", str(path))
    assert status == 0
    result = json.loads(path.read_text())
    assert result["family"] == "llada2" and result["router"]["top_k"] == 4
    assert len(result["patch"]) == result["moe_layers"] == 3
    assert "EpochMoEBlock" in out and "sigmoid_group" in out


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        (["generate", "x", "--model", "no-such-model"], "no-such-model"),
        (["inspect", "no-such-model"], "no-such-model"),
        (["compare", "--problems", "0"], "--problems 0"),
        (["compare", "--coverage", "1.5", "--problems", "1"], "coverage=1.5"),
        (["generate", "sum 1 2:", "--gen-length", "0"], "gen_length=0"),
        (["generate", "sum 1 2:", "--block-length", "0"], "block_length=0"),
        (["generate", "sum 1 2:", "--editing-threshold", "2"], "editing_threshold=2"),
        (["compare", "--problems", "1", "--max-post-steps", "-1"], "max_post_steps=-1"),
        (["generate", ""], "empty"),
        (["generate", "sum 1 2:", "--chat"], "has no chat template"),
        (["generate", "sum 1 2:", "--preset", "dense", "--coverage", "0.9"], "dense"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, quoted):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert quoted in err and "Traceback" not in err


def test_plan_options_change_the_preset_only_where_given():
    from epoch_moe.cli import _plan

    parsed = build_parser().parse_args(["compare", "--preset", "paper", "--coverage", "none"])
    assert _plan(parsed) == EpochConfig.paper(coverage=None)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in ("generate", "inspect", "compare", "calibrate"))
