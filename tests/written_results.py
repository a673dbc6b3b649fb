"""A plugin of pytest that writes results as they come, for runs that may be cut off.

pytest -p tests.written_results --results FILE
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("written results")
    group.addoption("--results", type=Path, help="file to which a line of JSON is added for each test")


def pytest_configure(config: pytest.Config) -> None:
    path, is_worker = config.getoption("results"), hasattr(config, "workerinput")
    if path is not None and not is_worker:
        config.pluginmanager.register(_Writer(path))


class _Writer:
    def __init__(self, path: Path):
        self._path = path
        self._told: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            result: dict[str, Any] = {"test": report.nodeid, "result": report.outcome, "when": report.when}
            result |= {"seconds": round(report.duration, 3), **dict(report.user_properties)}
            self._told += [str(value) for _, value in report.user_properties]
            if not report.passed:
                result["why"] = reason(report)
            write(self._path, result)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in sorted(self._told):
            terminalreporter.write_line(line)


def reason(report: pytest.TestReport) -> str:
    """Why a test was skipped, or the last lines of a failure."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return "\n".join(report.longreprtext.splitlines()[-12:])


def write(path: Path, line: dict[str, Any]) -> None:
    """Add a line at once, so that a run that is killed keeps it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, if there is one, except for any that was cut off."""
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(text)
