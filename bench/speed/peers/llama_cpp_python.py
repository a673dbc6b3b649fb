"""llama-cpp-python for comparison: the same file, prompts, steps and numbers of threads, in its own process.

It is not a dependency: without it, the report says that the comparison is left out. It may be installed for another
Python, so this file imports only it and the standard library. Its C functions are called directly: nothing is sampled
and no text is made, which favours the peer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from polarlm.bench.speed.child import serve
from polarlm.bench.speed.peers import NoPeer, library

NAME, LABEL = "llama-cpp-python", "llama.cpp"
CACHES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
NOTES = ()
_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # GGML's numbers
_BATCH = 2048  # tokens per call; the library splits them by 512, its default


class Model:
    """A model loaded by llama-cpp-python, with flash attention, which its quantized caches need."""

    def __init__(self, path: str, context: int, threads: int, cache: str) -> None:
        """Loads a .gguf file for a sequence of up to `context` tokens. Raises NoPeer."""
        self._library, self._model, self._quiet = _load(path)
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
        """The library's version, and the instruction sets that it was built with."""
        info = self._library.llama_print_system_info().decode().strip(" |")
        return {"version": str(self._library.__version__), "built_with": info}

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


def _load(path: str) -> tuple[Any, Any, Any]:
    """The library, the model of a .gguf file, and what must live as long as the library. Raises NoPeer."""
    package = library("llama_cpp", NAME)
    quiet = package.llama_log_callback(lambda level, text, data: None)
    package.llama_log_set(quiet, None)
    package.llama_backend_init()
    model = package.llama_model_load_from_file(path.encode(), package.llama_model_default_params())
    if not model:
        raise NoPeer("cannot load the model")
    return package, model, quiet


if __name__ == "__main__":
    serve(Model, [NoPeer])
