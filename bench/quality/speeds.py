"""The speed of a model with each cache type: a prompt, and generation after it, through the engine.

All types share one set of weights and are measured in rounds, so that the machine's other work affects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from polarlm.bench.command import CacheType
from polarlm.bench.speed.ours import Ours
from polarlm.engine import EngineError

_PROMPTS = (1024, 512, 256, 128, 64)  # tokens; the longest with time for two rounds is taken
_STEPS = 32
_TRIED = 64  # tokens of the warm-up prompt
_ROUNDS = 5  # most rounds


@dataclass(frozen=True)
class Rates:
    """Tokens per second, medians of all rounds."""

    type: str
    prompt: float | None = None
    generation: float | None = None
    rounds: int = 0
    problem: str = ""  # a sentence about why nothing was measured


class Speeds:
    """Measures the speed of several cache types."""

    def __init__(
        self,
        weights: str,
        types: Sequence[CacheType],
        ids: Sequence[int],
        settings: dict[str, Any],
        clock: Callable[[], float],
    ) -> None:
        """ids: of a text, for prompts. settings: further fields of EngineConfig. clock: returns seconds."""
        self._weights, self._types, self._ids, self._settings, self._clock = weights, types, ids, settings, clock
        self._runs: dict[str, list[tuple[float, float]]] = {}
        self._problems: dict[str, str] = {}
        self.prompt_tokens = 0  # tokens of the prompt; 0 before the first round

    def rates(self) -> dict[str, Rates]:
        """Label → rates so far, for the types that were tried."""
        rates = {label: Rates(label, problem=problem) for label, problem in self._problems.items()}
        for label, runs in self._runs.items():
            prompt, generation = (median(column) for column in zip(*runs, strict=True))
            rates[label] = Rates(label, prompt, generation, len(runs))
        return rates

    def measure(self, end: float) -> Iterator[None]:
        """Measure rounds until the clock reaches `end`, at least one; yields after each run. Raises EngineError."""
        context = min(len(self._ids), max(_PROMPTS)) + _STEPS + 2
        first = Ours(self._weights, context, 0, {**self._settings, "cache_type": "f16", "kept_sequences": 0})
        try:
            engines = {}
            for one in self._types:
                try:
                    engines[one.label] = first.with_settings(one.settings())
                    engines[one.label].rates(self._ids[:_TRIED], 3)  # compiles kernels
                except EngineError as error:
                    self._problems[one.label] = str(error)
                    engines.pop(one.label, None)
                yield
            rate = max(first.prompt_rate(self._ids[:_TRIED]) for _ in range(2))
            self.prompt_tokens = self._longest(rate, max(0.0, end - self._clock()) / max(1, len(engines)))
            prompt = self._ids[: self.prompt_tokens]
            for _ in range(_ROUNDS):
                started = self._clock()
                for label, engine in engines.items():
                    self._runs.setdefault(label, []).append(engine.rates(prompt, _STEPS))
                    yield
                if 2 * self._clock() - started > end:
                    break
        finally:
            first.close()

    def _longest(self, rate: float, seconds: float) -> int:
        """The tokens of the longest prompt whose two runs take at most two thirds of a type's `seconds`."""
        most = int(rate * seconds / 3)
        return min(next((tokens for tokens in _PROMPTS if tokens <= most), _PROMPTS[-1]), len(self._ids))
