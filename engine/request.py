"""One request on its way through the engine: its tokens, its text, its place in the store, its output."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config import SamplingParams
from engine.detokenizer import Detokenizer, StopFilter
from engine.kv.store import SequenceKV, Span
from engine.outputs import Chunk, Usage
from engine.sampling import Sampling, sample
from engine.scheduler import Sequence
from model_loaders.tokenizers import Tokenizer


@dataclass
class Walk:
    """A prefill under way."""

    span: Span
    units: Generator[int, None, Any]
    rows: int = 0  # rows done, summed over layers


@dataclass
class Clock:
    """Seconds of computing, by phase."""

    prefill: float = 0.0
    generation: float = 0.0

    def add(self, prefilling: bool, seconds: float) -> None:
        if prefilling:
            self.prefill += seconds
        else:
            self.generation += seconds


@dataclass(eq=False)
class Request:
    """A sequence and what turns its logits into chunks; `sampling` is `params` with defaults filled in."""

    sequence: Sequence
    params: SamplingParams
    sampling: Sampling
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    wants_progress: bool = False
    kv: SequenceKV | None = None
    walk: Walk | None = None
    cached: int = 0  # prompt tokens found in the store
    clock: Clock = field(default_factory=Clock)
    outbox: deque[Chunk | BaseException] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(None if self.params.seed < 0 else self.params.seed)
        self._stop = StopFilter(self.params.stop)

    def accept(self, logits: np.ndarray) -> None:
        """Choose the next token from logits (V,), and put out what it adds to the text."""
        sequence, started = self.sequence, time.perf_counter()
        if sequence.max_tokens == 0:
            self.finish("length")
            return
        # An embedding may have more rows than the vocabulary has tokens.
        token = sample(logits[: self.tokenizer.vocab_size], self.sampling, sequence.ids, self._rng)
        self.clock.generation += time.perf_counter() - started
        if token in self.tokenizer.eos_ids and not self.params.ignore_eos:
            self.finish("stop")
            return
        sequence.ids.append(token)
        text = self._stop.push(self.detokenizer.push([token]))
        if self._stop.stopped:
            self.finish("stop", text, (token,))
        elif sequence.generated == sequence.max_tokens:
            self.finish("length", text, (token,))
        else:
            self.outbox.append(Chunk(text, (token,)))

    def finish(self, reason: str, text: str = "", ids: tuple[int, ...] = ()) -> None:
        """End the answer: the last chunk carries what was held back, the reason and the usage."""
        if not self._stop.stopped:
            text += self._stop.push(self.detokenizer.finish()) + self._stop.finish()
        self.sequence.finish_reason = reason
        self.outbox.append(Chunk(text, ids, reason, self.usage()))

    def fail(self, error: BaseException) -> None:
        """End the request with an error for whoever reads its stream."""
        self.sequence.finish_reason = "error"
        self.outbox.append(error)

    def report_progress(self, layers: int) -> None:
        """Put out how far the prefill is."""
        assert self.walk is not None
        if self.wants_progress:
            done = self.cached + self.walk.rows // layers
            self.outbox.append(Chunk("", (), prefilled=done, prompt_tokens=len(self.sequence.prompt)))

    def usage(self) -> Usage:
        sequence = self.sequence
        return Usage(
            prompt_tokens=len(sequence.prompt),
            cached_tokens=self.cached,
            completion_tokens=sequence.generated,
            prefill_seconds=self.clock.prefill,
            generation_seconds=self.clock.generation,
        )
