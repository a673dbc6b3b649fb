"""An encoder in llama-cpp-python, in its own process: texts as ids to vectors, several texts in a batch.

It may be installed for another Python, so this file imports only it and the standard library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from polarlm.bench.speed.child import serve
from polarlm.bench.speed.peers import NoPeer
from polarlm.bench.speed.peers.llama_cpp_python import about, load

_MOST_TEXTS = 128  # most texts in a batch: as many of the shortest texts of `embeddings` as fill it


class Embedder:
    """A model, and a context whose batches have up to `batch` tokens."""

    def __init__(self, path: str, threads: int, batch: int) -> None:
        """Raises NoPeer."""
        self._library, self._model, self._quiet = load(path)
        library, self._size = self._library, batch
        settings = library.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = batch
        settings.n_seq_max = min(batch, _MOST_TEXTS)
        settings.n_threads = settings.n_threads_batch = threads
        settings.embeddings, settings.flash_attn_type = True, library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise NoPeer(f"cannot have batches of {batch} tokens")
        self._batches: list[tuple[Any, int]] = []

    def about(self) -> dict[str, str]:
        return about(self._library)

    def take(self, texts: Sequence[Sequence[int]]) -> None:
        """Cut texts into batches, which `vectors` computes."""
        for batch, _ in self._batches:
            self._library.llama_batch_free(batch)
        self._batches, waiting = [], list[Sequence[int]]()
        for text in texts:
            if sum(map(len, waiting)) + len(text) > self._size:
                self._batches.append((self._filled(waiting), len(waiting)))
                waiting = []
            waiting.append(text)
        self._batches.append((self._filled(waiting), len(waiting)))

    def vectors(self) -> dict[str, object]:
        """The seconds until all texts have their vectors, and the first text's, of length 1. Raises NoPeer."""
        library, size, found = self._library, self._library.llama_model_n_embd(self._model), list[list[float]]()
        began = time.perf_counter()
        for batch, count in self._batches:
            if library.llama_encode(self._context, batch):
                raise NoPeer(f"cannot compute {count} texts")
            found += [library.llama_get_embeddings_seq(self._context, number)[:size] for number in range(count)]
        seconds = time.perf_counter() - began
        length = math.sqrt(sum(number**2 for number in found[0]))
        return {"seconds": seconds, "first": [number / length for number in found[0]]}

    def _filled(self, texts: Sequence[Sequence[int]]) -> Any:
        batch, at = self._library.llama_batch_init(self._size, 0, 1), 0
        for number, text in enumerate(texts):
            for place, token in enumerate(text):
                batch.token[at], batch.pos[at], batch.logits[at] = token, place, 1
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                at += 1
        batch.n_tokens = at
        return batch


if __name__ == "__main__":
    serve(Embedder, [NoPeer])
