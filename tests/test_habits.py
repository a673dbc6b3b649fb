"""What CONTRIBUTING.md asks of every change, where a program can tell."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from scripts import docs


@pytest.mark.parametrize("half", ["product", "tests"])
def test_the_house_stays_below_its_ceiling(half):
    lines = sum(docs.lines_of_rooms()[half].values())
    ceiling = json.loads(docs.CEILINGS.read_text(encoding="utf-8"))[half]
    assert lines <= ceiling, "a change names what leaves for it; `python -m scripts.docs` prints the lines of each room"
    assert ceiling - lines < 500, f"the ceiling goes down with the house: write {lines} in {docs.CEILINGS.name}"


def test_subjects_of_new_commits_have_an_area_and_at_most_72_characters():
    log = subprocess.run(
        ["git", "log", "--no-merges", "--format=%s", "-50"], cwd=docs.ROOT, capture_output=True, text=True
    )
    if log.returncode:
        pytest.skip("this is no checkout of git")
    shape = re.compile(r"(?=.{1,72}$)[\w./-]+(, [\w./-]+)*: \w.*")
    for subject in log.stdout.splitlines():
        assert shape.match(subject), f"write `area: imperative` in at most 72 characters, not {subject!r}"
