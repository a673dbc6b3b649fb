"""The tiles of a codec are found by the name of its file."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles


def test_the_module_of_the_codec_makes_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("f16")
    module.keys = lambda codec, block_size, head_dim: (codec.name, block_size, head_dim)  # type: ignore[attr-defined]
    monkeypatch.setattr(tiles, "_module", {"f16": module}.__getitem__)
    assert tiles.keys(codecs.get("f16"), 64, 80) == ("f16", 64, 80)
    assert tiles.values(codecs.get("f16"), 64, 80) is None


def test_the_documentation_names_the_types_without_tiles() -> None:
    text = (Path(__file__).parents[4] / "docs" / "cache-types.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"There (.*)\s+has no\s+compiled kernels", text)
    named = {name.rstrip("345.") for name in re.findall("`([^`]+)`", sentence)}
    types = re.findall(r"^\| `([^`]+)` \| keys", text, re.MULTILINE)
    without = {name for name in types if tiles.keys(codecs.get(name), 64, 64) is None}
    assert {name.rstrip("345.") for name in without} == named
    assert without == {name for name in types if name.rstrip("345.") in named}
