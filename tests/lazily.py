"""Packages that take long to import, one and a half seconds for Anthropic's: by the first test that needs them.

Each of several processes makes the list of all tests, and runs some.
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazily:
    """Has the attributes of a module, which is imported by the first use of one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks whatever a module has for such names
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic, ollama, openai = Lazily("anthropic"), Lazily("ollama"), Lazily("openai")
