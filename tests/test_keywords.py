"""The keyword arguments that editors and type checkers know are the settings that there are."""

from __future__ import annotations

from scripts import keywords


def test_the_file_is_what_the_dataclasses_say() -> None:
    assert keywords.FILE.read_text(encoding="utf-8") == keywords.text()
