"""Compares cache types: one set of weights, a KV store for each type, and the same windows of a text for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.quality.answers import Answers
from polarlm.bench.quality.divergence import perplexity
from polarlm.bench.quality.kld_file import KldFile
from polarlm.bench.quality.scores import Quality, row_of
from polarlm.bench.quality.states import (
    Scored,
    exact_logprobs,
    exact_states,
    scored,
    scored_against,
    served_states,
    stored_logprobs,
)
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.engine.loading.assembly import assemble, with_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.weights import weight_bytes
from polarlm.model_loaders.files.weights import WeightSource

_SCORING = "as served"
_ARITHMETIC_SHARE = 0.7  # share of the free memory that weights as float32 may take


def arithmetic(source: WeightSource, threads: int) -> Ops:
    """NumPy's ops, in float32; if the weights as float32 take too much memory, those of compiled kernels."""
    plain = NumpyOps(threads)
    if weight_bytes(plain, source) <= _ARITHMETIC_SHARE * plain.free_memory():
        return plain
    return select("cpu", threads)[0]


class Survey:
    """Scores windows with every type, one window at a time. Full precision is a prefill with the same weights.

    Types are compared on the same windows, so `quality` ignores the last window if not all types have been scored on
    it, unless it is the first.
    """

    def __init__(
        self, weights: str, types: Sequence[CacheType], context: int, ops: Ops, say: Callable[[str], None]
    ) -> None:
        """context: tokens of the longest window. Raises EngineError."""
        settings = {"ctx_size": context, "kept_sequences": 0, "parallel": 1}
        self._parts = assemble(settle(weights, None, {**settings, "cache_type": "f16"}), say, ops=ops)
        self.types = list(types)
        try:
            self._others = [
                with_cache(self._parts, settle(None, None, {**settings, **one.settings()}), say) for one in types
            ]
        except BaseException:
            self._parts.close()
            raise
        self._found: list[list[Scored]] = [[] for _ in types]
        self._logprobs: list[np.ndarray] = []

    @property
    def context(self) -> int:
        """The tokens of the longest window that all KV stores have room for."""
        return min(parts.plan.tokens for parts in (self._parts, *self._others))

    @property
    def reference(self) -> Transformer:
        """The model in full precision, as `states.exact_states` reads it."""
        return self._parts.model

    def tokenize(self, text: str) -> list[int]:
        return self._parts.source.tokenizer.tokenize(text)

    @property
    def bos_id(self) -> int | None:
        return self._parts.source.tokenizer.bos_id

    def score(self, ids: Sequence[int], *, keep: bool = True) -> Iterator[None]:
        """Score a window (T,); yields after full precision and after each type. keep: whether `quality` counts it."""
        reference = self._parts.model
        exact = exact_states(reference, ids)
        logprobs = exact_logprobs(reference, exact, ids)
        if keep:
            self._logprobs.append(logprobs)
        yield
        for found, other in zip(self._found, self._others, strict=True):
            one = scored(reference, exact, other.model, served_states(other.model, ids), ids)
            if keep:
                found.append(one)
            yield

    def answers(self, prompt: Sequence[int]) -> Answers:
        """Texts of all types that continue a prompt. The stores have room for `context` tokens."""
        return Answers(self.reference, [other.model for other in self._others], prompt)

    def score_against(self, base: KldFile, window: int, ids: Sequence[int]) -> Iterator[None]:
        """As `score`, of a window of a file, ids (T,), whose log-probabilities are full precision's."""
        self._logprobs.append(stored_logprobs(base, window, ids))
        yield
        for found, other in zip(self._found, self._others, strict=True):
            found.append(scored_against(base, window, other.model, served_states(other.model, ids), ids))
            yield

    @property
    def windows(self) -> int:
        """The number of windows that `quality` counts."""
        return max(1, min(map(len, self._found))) if any(self._found) else 0

    def quality(self) -> Quality:
        """All figures so far. At least one type must have been scored on a window."""
        windows = self.windows
        rows = [
            row_of(one, other.plan.shape.bits_per_value, _SCORING, found[:windows], self._logprobs, [])
            for one, other, found in zip(self.types, self._others, self._found, strict=True)
            if found
        ]
        logprobs = np.concatenate(self._logprobs[:windows])
        return Quality(len(logprobs), perplexity(logprobs), rows)

    def close(self) -> None:
        self._parts.close()
        self._others.clear()
        del self._parts
