"""A pytest plugin for CI: a skipped test fails the run, unless it is marked ``gpu``.

Locally somebody may lack an optional package; in CI everything is installed, so a skip hides a test that never runs.
Loaded by name through ``PYTEST_PLUGINS=forbid_skips`` with this folder on ``PYTHONPATH``.
"""

from typing import Any

import pytest

_forbidden: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a skipped test that has no ``gpu`` mark; an expected failure is no skip.

    With several workers (pytest-xdist) this hook runs where the results come together, and reports carry their marks.
    """
    if report.skipped and not hasattr(report, "wasxfail") and "gpu" not in report.keywords:
        _forbidden.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a module that skips itself as a whole (``importorskip`` at its head)."""
    if report.skipped:
        _forbidden.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn success into failure."""
    if _forbidden and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the culprits; their reasons are in the summary of ``-ra``."""
    if _forbidden:
        terminalreporter.section("skipped without a gpu mark (fails CI)")
        for nodeid in _forbidden:
            terminalreporter.line(nodeid)
