"""llama-cpp-python for comparison: the same file, prompts, steps and numbers of threads, in its own process.

It is not a dependency: without it, the report says that the comparison is left out. It may be installed for another
Python, so this file imports only it and the standard library. Its C functions are called directly: nothing is sampled
and no text is made, which favours the peer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from polarlm.bench.speed.child import serve
from polarlm.bench.speed.peers import NoPeer, library

NAME, LABEL = "llama-cpp-python", "llama.cpp"
CACHES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
NOTES = ()
_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # GGML's numbers
EMBEDDINGS = "embeddings"  # instead of a cache type: the model is an encoder
_MOST_TEXTS = 128  # in a batch: as many of the shortest texts that are measured as fill it
_BATCH = 2048  # tokens per call; the library splits them by 512, its default


class Model:
    """A model loaded by llama-cpp-python, with flash attention, which its quantized caches need."""

    def __init__(self, path: str, context: int, threads: int, cache: str) -> None:
        """Loads a .gguf file for a sequence of up to `context` tokens. Raises NoPeer."""
        self._library, self._model, self._quiet = load(path)
        settings = self._library.llama_context_default_params()
        settings.n_ctx, settings.n_batch = context, _BATCH
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = self._library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        settings.type_k = settings.type_v = _TYPES[cache]
        self._context = self._library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise NoPeer(f"cannot have a cache of {cache} for {context} tokens")
        self._memory = self._library.llama_get_memory(self._context)
        self._held: list[int] = []  # the tokens in the cache

    def about(self) -> dict[str, str]:
        return about(self._library)

    def prompt_rate(self, ids: Sequence[int]) -> float:
        """Tokens per second of a prompt, up to the logits of its last token. The prompt stays in the cache."""
        self._rewind(0)
        return len(ids) / self._seconds(ids)

    def generation_rate(self, ids: Sequence[int], following: Sequence[int]) -> float:
        """Steps per second through `following` after `ids`, whose prefix in the cache is not computed again."""
        same = next((i for i, pair in enumerate(zip(ids, self._held, strict=False)) if pair[0] != pair[1]), None)
        self._rewind(min(len(ids), len(self._held)) if same is None else same)
        self._seconds(ids[len(self._held) :])
        self._seconds(following[:1])
        rate = len(following[1:]) / sum(self._seconds([token]) for token in following[1:])
        self._rewind(len(ids))
        return rate

    def _rewind(self, length: int) -> None:
        self._library.llama_memory_seq_rm(self._memory, 0, length, -1)
        del self._held[length:]

    def _seconds(self, ids: Sequence[int]) -> float:
        """The seconds of computing `ids` after the tokens in the cache. Raises NoPeer."""
        seconds = 0.0
        for first in range(0, len(ids), _BATCH):
            part = ids[first : first + _BATCH]
            tokens = (self._library.llama_token * len(part))(*part)
            started = time.perf_counter()
            failed = self._library.llama_decode(self._context, self._library.llama_batch_get_one(tokens, len(part)))
            self._library.llama_synchronize(self._context)
            seconds += time.perf_counter() - started
            if failed:
                raise NoPeer(f"cannot compute {len(ids)} tokens after {len(self._held)}")
            self._held += part
        return seconds


class Embedder:
    """An encoder: texts as ids to vectors, several texts in a batch of up to `batch` tokens."""

    def __init__(self, path: str, batch: int, threads: int) -> None:
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
                self._batches.append((self._fill(waiting), len(waiting)))
                waiting = []
            waiting.append(text)
        self._batches.append((self._fill(waiting), len(waiting)))

    def vectors(self) -> dict[str, object]:
        """The seconds until all texts have their vectors, and the first text's, of length 1. Raises NoPeer."""
        library, size, vectors = self._library, self._library.llama_model_n_embd(self._model), list[list[float]]()
        began = time.perf_counter()
        for batch, count in self._batches:
            if library.llama_encode(self._context, batch):
                raise NoPeer(f"cannot compute {count} texts")
            vectors += [library.llama_get_embeddings_seq(self._context, number)[:size] for number in range(count)]
        seconds = time.perf_counter() - began
        length = math.sqrt(sum(number**2 for number in vectors[0]))
        return {"seconds": seconds, "first": [number / length for number in vectors[0]]}

    def _fill(self, texts: Sequence[Sequence[int]]) -> Any:
        batch, at = self._library.llama_batch_init(self._size, 0, 1), 0
        for number, text in enumerate(texts):
            for place, token in enumerate(text):
                batch.token[at], batch.pos[at], batch.logits[at] = token, place, 1
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                at += 1
        batch.n_tokens = at
        return batch


def load(path: str) -> tuple[Any, Any, Any]:
    """The library, the model of a .gguf file, and what must live as long as the library. Raises NoPeer."""
    package = library("llama_cpp", NAME)
    quiet = package.llama_log_callback(lambda level, text, data: None)
    package.llama_log_set(quiet, None)
    package.llama_backend_init()
    model = package.llama_model_load_from_file(path.encode(), package.llama_model_default_params())
    if not model:
        raise NoPeer("cannot load the model")
    return package, model, quiet


def about(package: Any) -> dict[str, str]:
    """The library's version, and the instruction sets that it was built with."""
    info = package.llama_print_system_info().decode().strip(" |")
    return {"version": str(package.__version__), "built_with": info}


def start(path: str, context: int, threads: int, cache: str) -> Model | Embedder:
    """A model with this cache, or with EMBEDDINGS an encoder with batches of `context` tokens. Raises NoPeer."""
    return Embedder(path, context, threads) if cache == EMBEDDINGS else Model(path, context, threads, cache)


if __name__ == "__main__":
    serve(start, [NoPeer])
