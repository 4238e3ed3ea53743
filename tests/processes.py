"""Processes of a test's own that do not import torch and transformers again.

One server per pytest process (multiprocessing's forkserver) imports what nearly every test needs and does nothing
else: no seed is drawn, no thread started, no class patched. Every process is forked from it within milliseconds, and
ends with what it was asked to do. So a test may patch, poison, set the environment, stall and die in it: the next one
begins from the same state.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.nn.functional",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "epoch_moe.models.llada2",
    "epoch_moe.models.llada_moe",
    "epoch_moe.models.loading",
    "epoch_moe.decoding",
    "epoch_moe.patching",
]
"""A name that cannot be imported is passed over: then each process imports what it needs itself."""


def _run(environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    function(*args)


def start(function: Callable[..., Any], *args: Any, environment: dict[str, str] | None = None) -> Any:
    """A started process of `function(*args)`, both pickled, in this process's environment or the one given."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    variables = dict(os.environ if environment is None else environment)
    process = context.Process(target=_run, args=(variables, function, args), daemon=True)
    process.start()
    return process


def _script(path: str, arguments: tuple[str, ...], folder: str) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the server's own shell ignores
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


class Script:
    """A Python file as `python FILE ARGUMENTS` runs it, with its output kept; it may not start processes itself."""

    def __init__(self, path: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.folder = tempfile.mkdtemp()
        variables = dict(os.environ) | (environment or {})
        self.process = start(_script, str(path), arguments, self.folder, environment=variables)

    def printed(self, name: str) -> str:
        """Its "stdout" or "stderr" so far."""
        path = Path(self.folder) / name
        return path.read_text() if path.exists() else ""

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """How it ended; killed, and an error with what it had printed, where it takes longer."""
        self.process.join(timeout)
        late = self.process.is_alive()
        if late:
            self.process.kill()
            self.process.join()
        out, err = map(self.printed, ("stdout", "stderr"))
        shutil.rmtree(self.folder)
        assert not late, f"{self.process} still ran after {timeout:.0f} s\n{out}\n{err}"
        return subprocess.CompletedProcess([], self.process.exitcode, out, err)


def run_script(path: Path, *arguments: str, timeout: float = 600.0, **environment: str) -> Any:
    """A script's return code, stdout and stderr."""
    return Script(path, *arguments, environment=environment).wait(timeout)
