"""Compares cache types: one set of weights, a KV store for each type, and the same windows of a text for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.quality.divergence import perplexity
from polarlm.bench.quality.scores import CODED, SERVED, add_kinds, add_scores, contestant, windows
from polarlm.bench.quality.states import Score, exact_logprobs, exact_states, score_of, served_states
from polarlm.bench.result import Result
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.engine.config import AS_STORED
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.assembly import Parts, assemble, replace_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.weights import weight_bytes
from polarlm.engine.weight_formats import WeightFormat
from polarlm.model_loaders.files.weights import WeightSource
from polarlm.model_loaders.tokenizers import Tokenizer

_ARITHMETIC_SHARE = 0.7  # share of the free memory that weights as float32 may take
_PROBE = 128  # tokens of the window from which the time is estimated
_LONG = 10  # seconds that it takes on a machine where a second run would take too much of the time


def arithmetic(source: WeightSource, threads: int, weight_type: WeightFormat | None = None) -> Ops:
    """NumPy's ops, in float32; compiled kernels if the weights as float32 take too much memory."""
    plain = NumpyOps(threads)
    if weight_bytes(plain, source, weight_type) <= _ARITHMETIC_SHARE * plain.free_memory():
        return plain
    return select("cpu", threads)[0]


class Survey:
    """Scores windows with every type, one window at a time. Full precision is a prefill with the same weights.

    Types are compared on the same windows, so `add_to` ignores the last window if not all types have been scored on
    it, unless it is the first.
    """

    def __init__(
        self,
        weights: str,
        types: Sequence[CacheType],
        context: int,
        ops: Ops,
        say: Callable[[str], None],
        *,
        weight_type: str = AS_STORED,
        every_token_coded: bool = False,
    ) -> None:
        """context: tokens of the longest window. every_token_coded: whether types are scored in this way, too. Raises
        EngineError."""
        self._settings = {
            "ctx_size": context,
            "kept_sequences": 0,
            "parallel": 1,
            "weight_type": weight_type,
            "input_bits": "16",  # compiled kernels with AMX would round more than some types do
        }
        self._say, self._scorings = say, [SERVED, CODED] if every_token_coded else [SERVED]
        self._logprobs: list[np.ndarray] = []  # full precision, for each window
        self._kinds: list[str] = []  # the name of each window's text
        self._longest = 0  # tokens of the longest window so far
        self._parts = assemble(settle(weights, None, {**self._settings, "cache_type": "f16"}), say, ops=ops)
        self.types: list[CacheType] = []
        self._others: list[Parts] = []
        self._rows: list[tuple[CacheType, Parts, str, list[Score]]] = []
        try:
            for cache_type in types:
                self.add_type(cache_type)
        except BaseException:
            self._parts.close()
            raise

    def add_type(self, cache_type: CacheType) -> None:
        """Load a type; the window that is being scored is scored with it, too. Raises EngineError."""
        settings = settle(None, None, {**self._settings, **cache_type.settings()})
        other = replace_cache(self._parts, settings, self._say, encoding=cache_type.encoding)
        if other.plan.tokens < self._longest:
            raise EngineError(
                f"Memory has room for {other.plan.tokens:,} tokens, and a window has more", "out_of_memory"
            )
        self.types.append(cache_type)
        self._others.append(other)
        self._rows += [(cache_type, other, scoring, []) for scoring in self._scorings]

    @property
    def context(self) -> int:
        """The tokens of the longest window that all KV stores have room for."""
        return min(parts.plan.tokens for parts in (self._parts, *self._others))

    @property
    def tokenizer(self) -> Tokenizer:
        return self._parts.source.tokenizer

    def score(self, ids: Sequence[int], *, keep: bool = True, kind: str = "") -> Iterator[None]:
        """Score a window (T,); yields after full precision and after each row. keep: whether `add_to` counts it. kind:
        the name of its text, whose windows have figures of their own."""
        reference = self._parts.model
        self._kinds += [kind] if keep else []
        exact = exact_states(reference, ids)
        if keep:
            self._longest = max(self._longest, len(ids))
            self._logprobs.append(exact_logprobs(reference, exact, ids))
        yield
        for _, other, scoring, scores in self._rows:  # also those that are added meanwhile
            hidden = served_states(other.model, ids, every_token_coded=scoring == CODED)
            score = score_of(reference, exact, other.model, hidden, ids)
            if keep:
                scores.append(score)
            yield

    def token_seconds(self, ids: Sequence[int], clock: Callable[[], float]) -> float:
        """Seconds for each token of a short window, scored with every type."""
        probe, seconds = windows(ids[:_PROBE], min(_PROBE, self.context), self.tokenizer.bos_id)[0], 0.0
        for _ in range(2):  # the first run takes longer
            started = clock()
            list(self.score(probe, keep=False))
            if (seconds := clock() - started) > _LONG:
                break
        return seconds / len(probe)

    @property
    def passes(self) -> int:
        """The number of times that scoring a window yields, with the types that are loaded."""
        return 1 + len(self._rows)

    @property
    def windows(self) -> int:
        """The number of windows that `add_to` counts."""
        counts = [len(scores) for _, _, _, scores in self._rows]
        return max(1, min(counts)) if any(counts) else 0

    def add_to(self, result: Result) -> None:
        """Add all figures so far: the rows of each type and scoring that has a window, and what they are of."""
        count = self.windows
        logprobs = np.concatenate(self._logprobs[:count])
        result.about |= {"scored_tokens": len(logprobs), "exact_perplexity": perplexity(logprobs), "windows": count}
        types = result.about.setdefault("types", {})
        for cache_type, other, scoring, scores in self._rows:
            if scores:
                who = contestant(cache_type.label, scoring)
                types[who] = {"type": cache_type.label, "pair": cache_type.pair, "scored_as": scoring}
                bits = other.plan.shape.bits_of_text(self._longest)
                add_scores(result, who, bits, scores[:count], self._logprobs)
                add_kinds(result, who, scores[:count], self._kinds)

    def close(self) -> None:
        self._parts.close()
        self._others.clear()
        self._rows.clear()
        del self._parts
