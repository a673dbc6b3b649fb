"""Writes engine/keywords.py: the settings of calls in Python, for type checkers and editors, from the dataclasses.

python -m scripts.keywords
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from polarlm.engine.config import EngineConfig
from polarlm.engine.params import SamplingParams

FILE = Path(__file__).resolve().parents[1] / "engine" / "keywords.py"
_HEAD = '''"""Keyword arguments of the engine's methods, for type checkers and editors, made by `scripts.keywords`."""

from __future__ import annotations

from typing import Any, TypedDict
'''
_TAIL = '''

class GenerateKeywords(SamplingKeywords, total=False):
    """Fields of SamplingParams, and what `stream` takes beside them."""

    progress: bool
    constraint: Any
'''
_CLASSES = {"EngineKeywords": EngineConfig, "SamplingKeywords": SamplingParams}


def text() -> str:
    """The text of the file."""
    parts = [_HEAD]
    for name, settings in _CLASSES.items():
        lines = [f"    {field.name}: {field.type}" for field in fields(settings)]
        parts += ["\n\n", f"class {name}(TypedDict, total=False):\n", f'    """Fields of {settings.__name__}."""\n\n']
        parts += ["\n".join(lines), "\n"]
    return "".join([*parts, _TAIL])


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
