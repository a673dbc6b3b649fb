"""The engine as a contestant, by its public interface, in its own process; also asked several prompts at a time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from polarlm.bench.speed.child import serve
from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.loading.assembly import Parts, assemble, replace_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.layers.experts import ExpertsWeights
from polarlm.engine.outputs import Chunk
from polarlm.engine.weight_formats import Matrix
from polarlm.model_loaders.config import Experts

_GREEDY = SamplingParams(temperature=0, repeat_penalty=1, dry_multiplier=0, ignore_eos=True)


class Ours:
    """An engine that keeps its newest sequence."""

    def __init__(self, path: str | None, context: int, threads: int, settings: dict[str, Any]) -> None:
        """settings: further fields of EngineConfig. Raises EngineError."""
        settings = {"ctx_size": context, "threads": threads, "kept_sequences": 1, "parallel": 1, **settings}
        self._said: list[str] = []
        self._use(assemble(settle(path, None, settings), self._said.append))

    def _use(self, parts: Parts) -> None:
        self._parts = parts
        self._backend = type(parts.model.ops).__module__.split(".")[-2]
        self._model, self._shape = parts.model, parts.plan.shape
        self._engine = Engine(parts)

    def with_settings(self, settings: dict[str, Any]) -> Ours:
        """An engine with the same weights and its own cache. Closing one of the two is enough. Raises EngineError."""
        other = copy(self)
        other._use(replace_cache(self._parts, settle(None, self._parts.config, settings), self._said.append))
        return other

    def close(self) -> None:
        """Close the model's files."""
        self._engine.close()

    def about(self) -> dict[str, Any]:
        """The backend's folder, the line about what was loaded, and the notes of loading."""
        return {"backend": self._backend, "loaded": self._engine.fit_line(), "said": self._said}

    @property
    def vocabulary(self) -> range:
        """The ids of the model's tokens."""
        return self._parts.source.vocabulary

    def weight_bytes(self) -> int:
        """Bytes of the matrices that a step of one token multiplies by, as the backend holds them."""
        ops, weights = self._model.ops, self._model.weights

        def held(parts: Sequence[Matrix]) -> int:
            return sum(ops.matrix_bytes(part.format, math.prod(part.shape)) for part in parts)

        total = held(weights.head.parts)
        for layer, loaded in zip(self._model.config.layers, weights.layers, strict=True):
            total += sum(held(linear.parts) for linear in loaded.matrices.values())
            if isinstance(loaded.ffn, ExpertsWeights) and isinstance(layer.ffn, Experts):
                total += held([*loaded.ffn.gate_up.parts, *loaded.ffn.down.parts]) * layer.ffn.top_k // layer.ffn.count
        return total

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of K/V that a step after `tokens` tokens reads."""
        return self._shape.sequence_bytes(tokens)

    def prompt_rate(self, ids: Sequence[int]) -> float:
        """Tokens per second of a prompt that is computed completely, up to its first token."""
        started = time.perf_counter()
        (arrived,) = self._arrivals(ids, 1, PromptOptions(cache_prompt=False))
        return len(ids) / (arrived - started)

    def rates(self, ids: Sequence[int], steps: int) -> tuple[float, float]:
        """Tokens per second of a prompt that is computed completely, and steps per second after it."""
        started = time.perf_counter()
        first, *_, last = self._arrivals(ids, steps + 1, PromptOptions(cache_prompt=False))
        return len(ids) / (first - started), steps / (last - first)

    def generation_rate(self, ids: Sequence[int], following: Sequence[int]) -> float:
        """Steps per second after `ids` and one more token; the prefix of `ids` in the store is not computed again."""
        first, *_, last = self._arrivals([*ids, following[0]], len(following), PromptOptions())
        return (len(following) - 1) / (last - first)

    def _arrivals(self, ids: Sequence[int], tokens: int, options: PromptOptions) -> list[float]:
        """The arrival time of each of `tokens` tokens. Raises EngineError if there are fewer."""
        params = replace(_GREEDY, max_tokens=tokens)
        times = [time.perf_counter() for chunk in self._engine.stream(ids, params, options) if chunk.token_ids]
        if len(times) != tokens:
            raise EngineError(f"stopped after {len(times)} of {tokens} tokens")
        return times

    def together(self, prompts: Sequence[Sequence[int]], tokens: int, cached: bool = False) -> dict[str, Any]:
        """What prompts that are asked at the same time take, with `tokens` tokens of answer each: the seconds until all
        have their first token ("first") and until all have ended ("seconds"), and each step of all ("steps").

        cached: whether tokens that the store has are not computed again. Raises EngineError.
        """
        params, options = replace(_GREEDY, max_tokens=tokens), PromptOptions(cache_prompt=cached)
        outboxes = [deque[Chunk | Exception]() for _ in prompts]
        counts, ended, steps, first = [0] * len(prompts), 0, [], 0.0
        began = now = time.perf_counter()
        for ids, outbox in zip(prompts, outboxes, strict=True):
            self._engine.submit(ids, params, options, into=outbox)
        while self._engine.work():
            before, now, all_run = now, time.perf_counter(), first and not ended
            for number, outbox in enumerate(outboxes):
                while outbox:
                    chunk = outbox.popleft()
                    if isinstance(chunk, Exception):
                        raise chunk
                    counts[number] += len(chunk.token_ids)
                    ended += chunk.finish_reason is not None
            first = first or (now if all(counts) else 0.0)
            if all_run:
                steps.append(now - before)
        if min(counts) < tokens:
            raise EngineError(f"stopped after {min(counts)} of {tokens} tokens")
        return {"first": first - began, "seconds": now - began, "steps": steps}


if __name__ == "__main__":
    serve(Ours, [EngineError])
