"""docs/api.md says how every promise of llama-server's documentation is kept: by tests that exist, or not, and why."""

from __future__ import annotations

import re
from pathlib import Path

from polarlm.server.reading.fields import FIELDS

TESTS = Path(__file__).resolve().parents[2]
PAGE = (TESTS.parent / "docs" / "api.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("\n## What llama-server's documentation promises\n")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][1:]
NAMED_FIELDS = "a 400 names the field: "


def test_promises_are_held_by_tests_or_have_a_reason() -> None:
    files = [file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py")]
    exist = {name for file in files for name in re.findall(r"^def (test_\w+)", file, re.MULTILINE)}
    assert len(ROWS) > 80
    for endpoint, says, here in ROWS:
        promise = f"{endpoint}: {says}"
        standing, _, how = here.partition(": ")
        assert standing in ("*held*", "*different*", "*refused*"), promise
        tests = re.findall(r"`(test_\w+)`", how)
        assert set(tests) <= exist, promise
        has_reason = re.sub(r"`test_\w+`|[(), ]", "", how) != ""
        assert has_reason is (standing != "*held*"), promise
        assert tests or how.startswith(NAMED_FIELDS) or standing == "*different*", promise


def test_fields_that_are_said_to_be_refused_are_refused() -> None:
    lists = [here.partition(NAMED_FIELDS)[2] for _, _, here in ROWS]
    named = [name for names in lists for name in re.findall(r"`([^`]+)`", names)]
    assert len(named) > 10
    assert {FIELDS[name].standing for name in named} == {"refused"}
