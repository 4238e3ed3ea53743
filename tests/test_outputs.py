"""Files that are written: what a path may be, and what stays of an old file."""

from __future__ import annotations

import argparse
import errno
import os
import resource
import stat
from pathlib import Path

import pytest

from epoch_moe.cli import main
from epoch_moe.outputs import check_output, output_file, write_json, write_output


def test_an_old_file_keeps_its_mode_and_names(tmp_path: Path) -> None:
    real, link, other = tmp_path / "real", tmp_path / "link", tmp_path / "other"
    real.write_text("much more than what is written now")
    real.chmod(0o664)
    link.symlink_to(real)
    os.link(real, other)
    write_output(link, "new")
    assert link.is_symlink() and real.read_text() == other.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o664
    write_output(tmp_path / "fresh", b"bytes")
    assert (tmp_path / "fresh").read_bytes() == b"bytes"
    link.unlink()
    link.symlink_to(tmp_path / "later")
    write_output(link, "through")
    assert link.is_symlink() and (tmp_path / "later").read_text() == "through"


def test_what_is_no_file_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, link, loop = tmp_path / "pipe", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    loop.symlink_to(loop)
    for path, words in (
        (pipe, "a pipe or a socket"),
        (link, "a pipe or a socket"),
        (Path("/dev/null"), "a device"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x", "folder does not exist"),
        (loop, "no path of a file"),
        (tmp_path / ("x" * 300), "no path of a file"),
    ):
        with pytest.raises(ValueError, match=words):
            check_output(path)
        # The model's name is wrong too, and is not looked at: the path comes first.
        for command in ("inspect no-such-model", "compare --model no-such-model"):
            assert main([*command.split(), "--json", str(path)]) == 2
            err = capsys.readouterr().err
            assert words in err and "--json" in err and "Traceback" not in err
    assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink()
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=output_file)
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(pipe)])
    assert f"argument --json: {pipe} is a device, a pipe or a socket" in capsys.readouterr().err


def test_a_path_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is forbidden to root, so the system's answer is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        check_output(tmp_path / "x")


def test_a_file_that_cannot_be_written_whole(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=str(tmp_path / "x")) as caught:
            write_output(tmp_path / "x", "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and not (tmp_path / "x").exists()


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x", {"a": float("nan")})
    assert (tmp_path / "x").read_text() == "old"
    write_json(None, {})
