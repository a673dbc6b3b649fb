"""Golden answers are added without a change of those that are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import make_golden


def test_a_run_that_is_missing_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = json.loads(make_golden.FILE.read_text(encoding="utf-8"))
    expected = known["llama_gqa_linear"]["types"].pop("f16")
    file = tmp_path / "golden.json"
    file.write_text(json.dumps(known), encoding="utf-8")
    monkeypatch.setattr(make_golden, "FILE", file)
    assert make_golden.main() == 0
    written = json.loads(file.read_text(encoding="utf-8"))
    assert list(written["llama_gqa_linear"]["types"]) == list(make_golden.TYPES["llama_gqa_linear"])
    found = written["llama_gqa_linear"]["types"].pop("f16")
    assert written == known
    assert found["answer"] == expected["answer"]
