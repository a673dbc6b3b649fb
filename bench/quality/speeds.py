"""The speed of a model with each cache type: a prompt, and generation after it, through the engine.

All types share one set of weights and are measured in rounds, so that the machine's other work affects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polarlm.bench.command import CacheType
from polarlm.bench.quality.types import is_in_engine
from polarlm.bench.result import Result
from polarlm.bench.speed.ours import Ours
from polarlm.engine import EngineError

SPEED = "speed"  # a subject
_PROMPTS = (1024, 512, 256, 128, 64)  # tokens; the longest with time for two rounds is taken
_STEPS = 32
_TRIED = 64  # tokens of the warm-up prompt
_ROUNDS = 5  # most rounds


class Speeds:
    """Measures the speed of several cache types."""

    def __init__(
        self,
        weights: str,
        types: Sequence[CacheType],
        ids: Sequence[int],
        settings: dict[str, Any],
        left: Callable[[], float],
    ) -> None:
        """ids: of a text, for prompts. settings: further fields of EngineConfig. left: the seconds that there are."""
        self._weights, self._types, self._ids, self._settings, self._left = weights, types, ids, settings, left
        self._runs: dict[str, list[tuple[float, float]]] = {}
        self._problems: dict[str, str] = {}
        self.prompt_tokens = 0  # tokens of the prompt; 0 before the first round

    def add_to(self, result: Result) -> None:
        """Add the rates so far of the types that were tried, or why they have none."""
        result.about["speed_context"] = self.prompt_tokens
        for label, problem in self._problems.items():
            result.add(SPEED, label, "generation", failure=problem)
        for label, runs in self._runs.items():
            for name, rates in zip(("prompt", "generation"), zip(*runs, strict=True), strict=True):
                result.add(SPEED, label, name, rates)

    def measure(self) -> Iterator[None]:
        """Measure rounds while there is time, at least one; yields after each run. Raises EngineError."""
        context = min(len(self._ids), max(_PROMPTS)) + _STEPS + 2
        first = Ours(self._weights, context, 0, {**self._settings, "cache_type": "f16", "kept_sequences": 0})
        try:
            engines = {}
            for one in self._types:
                if not is_in_engine(one):
                    self._problems[one.label] = "the engine cannot load this type, so its speed is not measured"
                    continue
                try:
                    engines[one.label] = first.with_settings(one.settings())
                    engines[one.label].rates(self._ids[:_TRIED], 3)  # compiles kernels
                except EngineError as error:
                    self._problems[one.label] = str(error)
                    engines.pop(one.label, None)
                yield
            rate = max(first.prompt_rate(self._ids[:_TRIED]) for _ in range(2))
            self.prompt_tokens = self._longest(rate, self._left() / max(1, len(engines)))
            prompt = self._ids[: self.prompt_tokens]
            for _ in range(_ROUNDS):
                before = self._left()
                for label, engine in engines.items():
                    self._runs.setdefault(label, []).append(engine.rates(prompt, _STEPS))
                    yield
                if before - self._left() > self._left():
                    break
        finally:
            first.close()

    def _longest(self, rate: float, seconds: float) -> int:
        """The tokens of the longest prompt whose two runs take at most two thirds of a type's `seconds`."""
        most = int(rate * seconds / 3)
        return min(next((tokens for tokens in _PROMPTS if tokens <= most), _PROMPTS[-1]), len(self._ids))
