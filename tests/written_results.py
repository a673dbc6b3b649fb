"""A plugin of pytest for runs that may be cut off: results are written as they come; after a time no test begins.

pytest -p tests.written_results --results FILE --until TIME --but-not FILE
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OVER = "the time for this run was over"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("written results")
    group.addoption("--results", type=Path, help="file to which a line of JSON is added for each test")
    group.addoption("--until", type=float, default=float("inf"), help="Unix time after which no test begins")
    group.addoption("--but-not", type=Path, help="results of an earlier run: tests that passed in it are left out")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Limits(config))
    path, is_worker = config.getoption("results"), hasattr(config, "workerinput")
    if path is not None and not is_worker:
        config.pluginmanager.register(_Writer(path))


class _Limits:
    """Leaves tests out, in each process that runs tests."""

    def __init__(self, config: pytest.Config):
        self._until = config.getoption("until")
        earlier = config.getoption("but_not")
        self._passed = set() if earlier is None else passed(earlier)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self._passed]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self._passed]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self._until:
            pytest.skip(OVER)


class _Writer:
    """Writes the results of all processes."""

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
        """What tests have recorded."""
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


def outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Id → the last line of each test; one that failed in another phase than its call has failed.

    Of several runs in one file, the last run of a test counts.
    """
    return {line["test"]: line for line in read(path) if "test" in line}


def passed(path: Path) -> set[str]:
    """Ids of the tests that passed."""
    return {test for test, line in outcomes(path).items() if line["result"] == "passed"}
