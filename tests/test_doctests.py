"""Examples in the documentation of modules, classes and functions give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_examples_give_what_they_say() -> None:
    """In one test: pytest's own plugin would import all modules and search them, which takes each process seconds."""
    tried = 0
    for folder in ("engine", "model_loaders", "server", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                results = doctest.testmod(import_module(f"polarlm.{name}"))
                assert results.failed == 0, name
                tried += results.attempted
    assert tried > 40
