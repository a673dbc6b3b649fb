"""How fast a model runs with a cache type: a prompt, and generation behind it, through the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.bench.command import CacheType
from polarlm.bench.speed.ours import Ours
from polarlm.engine import EngineError

_PROMPTS = (1024, 512, 256, 128, 64)  # tokens; the longest that there is time for
_STEPS = 32
_TRIED = 64  # tokens of the prompt that warms up


@dataclass(frozen=True)
class Rates:
    """Tokens a second."""

    type: str
    prompt: float | None = None
    generation: float | None = None
    problem: str = ""  # a sentence about why nothing was measured


class Speeds:
    """Measures one type after another, all with a prompt of the same length, which the first one's speed decides."""

    def __init__(self, weights: str, ids: Sequence[int], settings: dict[str, Any], clock: Callable[[], float]) -> None:
        """ids: of a text, for prompts. settings: fields of EngineConfig."""
        self._weights, self._ids, self._settings, self._clock = weights, ids, settings, clock
        self.prompt_tokens = 0  # 0 before the first measurement

    def measure(self, cache_type: CacheType, seconds: float) -> Rates:
        """The speed with one type, within about `seconds`, loading not counted."""
        context = min(len(self._ids), max(_PROMPTS)) + _STEPS + 2
        try:
            engine = Ours(self._weights, context, 0, {**self._settings, **cache_type.settings()})
        except EngineError as error:
            return Rates(cache_type.label, problem=str(error))
        try:
            rate = engine.prompt_rate(self._ids[:_TRIED])
            if not self.prompt_tokens:
                self.prompt_tokens = self._longest(rate, seconds)
            prompt, following = self._ids[: self.prompt_tokens], self._ids[: _STEPS + 1]
            prompt_rate = engine.prompt_rate(prompt)
            engine.generation_rate(prompt, following[:4])
            return Rates(cache_type.label, prompt_rate, engine.generation_rate(prompt, following))
        except EngineError as error:
            return Rates(cache_type.label, problem=str(error))
        finally:
            engine.close()

    def _longest(self, rate: float, seconds: float) -> int:
        """The longest prompt that two runs of take half of the time; the text may be shorter."""
        most = max(1, int(rate * seconds / 4))
        longest = next((tokens for tokens in _PROMPTS if tokens <= most), _PROMPTS[-1])
        return min(longest, len(self._ids))
