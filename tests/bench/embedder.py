"""A stand-in for llama.cpp's encoder: a batch of n tokens takes n seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarlm.bench.speed.child import serve


class Embedder:
    def __init__(self, path: str, batch: int, threads: int, cache: str) -> None:
        self._batch = batch

    def about(self) -> dict[str, str]:
        return {"version": "1", "built_with": "nothing"}

    def take(self, texts: Sequence[Sequence[int]]) -> None:
        self._size = 384

    def vectors(self) -> dict[str, Any]:
        return {"seconds": float(self._batch), "first": [1.0, *[0.0] * (self._size - 1)]}


if __name__ == "__main__":
    serve(Embedder, [])
