"""Cache types that a GPU cannot read are said to be for measuring on the CPU, and no others are."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import fields
from pathlib import Path

import pytest

from polarlm.engine import codecs, records
from polarlm.engine.config import EngineConfig
from polarlm.engine.records.fragments import Geometry

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = re.compile(r"`?q8_0`?, [^;.]*?\b(?:is|are) for\s+measuring on the CPU")


def help_text() -> str:
    (field,) = (field for field in fields(EngineConfig) if field.name == "cache_type")
    return str(field.metadata["help"])


def install_page() -> str:
    return (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", [help_text(), install_page()], ids=["help", "install.md"])
def test_types_without_kernels_are_for_measuring(text: str) -> None:
    (sentence,) = SENTENCE.findall(text)
    patterns = set(re.findall(r"[a-z0-9_.-]+\*?", sentence.split(" for")[0])) - {"and", "are"}
    without = {
        name
        for name in codecs.available()
        if records.record_of(codecs.get(name), Geometry("k" not in codecs.get(name).serves, 64, 128)) is None
    }
    named = {name for name in codecs.available() for pattern in patterns if fnmatch.fnmatch(name, pattern)}
    assert named == without
    assert all(fnmatch.filter(without, pattern) for pattern in patterns)
