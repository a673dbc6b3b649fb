"""Arrays of strings in the metadata of GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class Strings(Sequence[str]):
    """An array of strings that are decoded when they are read. As Python objects, the strings of a vocabulary take
    several times their bytes and fragment the memory."""

    def __init__(self, content: bytes, ends: np.ndarray) -> None:
        """content: the strings as the file has them, each after 8 bytes with its length; ends: where each ends."""
        self._content, self._ends = content, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        start = int(self._ends[number - 1]) if number else 0
        return self._content[start + 8 : int(self._ends[number])].decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends.tolist():
            yield self._content[start + 8 : end].decode("utf-8", "replace")
            start = end
