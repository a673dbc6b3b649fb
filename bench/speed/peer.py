"""llama-cpp-python as a yardstick: the same float32 weights, prompts and step counts, in the same process.

It is no dependency: where it is not installed, the comparison is left out and says so.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import model_loaders

NAME = "llama-cpp-python"
_BATCH = 512


class NoPeer(Exception):
    """The peer is not available; the message is the reason, in a few words for a table."""


class Peer:
    """A model loaded by llama-cpp-python, with its default float16 KV cache."""

    def __init__(self, source: model_loaders.Model, context: int):
        """Load the weights of `source`, in float32, for sequences of up to `context` tokens. Raises NoPeer."""
        self._library = _library()
        self.version: str = self._library.__version__
        if not source.path.is_file():
            raise NoPeer("needs a .gguf file")
        from bench.speed.full_precision import float32_copy  # needs a package that is only there for GGUF files

        path = source.path if source.dtype == "F32" else float32_copy(source.path)
        try:
            self._llama = self._library.Llama(str(path), n_ctx=context, n_batch=_BATCH, logits_all=False, verbose=False)
        except ValueError:
            raise NoPeer("cannot load the model") from None

    def prompt_rate(self, ids: Sequence[int], threads: int) -> float:
        """Tokens a second of a prompt, up to the logits of its last token."""
        self._restart(threads)
        return len(ids) / self._seconds(ids)

    def generation_rate(self, ids: Sequence[int], following: Sequence[int], threads: int) -> float:
        """Steps a second through `following`, token by token, after the prompt `ids`."""
        self._restart(threads)
        self._seconds(ids)
        return len(following) / sum(self._seconds([token]) for token in following)

    def _restart(self, threads: int) -> None:
        self._llama.reset()
        self._library.llama_set_n_threads(self._llama.ctx, threads, threads)

    def _seconds(self, ids: Sequence[int]) -> float:
        started = time.perf_counter()
        self._llama.eval(ids)
        self._library.llama_synchronize(self._llama.ctx)
        return time.perf_counter() - started

    def close(self) -> None:
        self._llama.close()


def _library() -> Any:
    try:
        return importlib.import_module("llama_cpp")
    except ImportError:
        raise NoPeer("not installed") from None
    except (OSError, RuntimeError):  # its shared library is missing or does not work on this machine
        raise NoPeer("does not start") from None
