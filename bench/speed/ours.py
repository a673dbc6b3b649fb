"""The engine as a contestant, by its public interface, in its own process; and steps of several sequences together."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from polarlm.bench.speed.child import serve
from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.loading.assembly import Parts, assemble, with_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.layers.experts import ExpertsWeights
from polarlm.engine.sampling.sample import SamplerInput, resolve
from polarlm.engine.state.plan import plan_for_sequences
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import SequenceKV
from polarlm.engine.weight_formats import Matrix
from polarlm.model_loaders.config import Experts, GenerationDefaults

_UNTIL_RECORDED = 2  # calls of `run_graph` before a device launches the recorded graph
_GREEDY = SamplingParams(temperature=0, repeat_penalty=1, dry_multiplier=0, ignore_eos=True)


class Ours:
    """An engine that keeps its newest sequence."""

    def __init__(self, path: str, context: int, threads: int, settings: dict[str, Any]) -> None:
        """settings: further fields of EngineConfig. Raises EngineError."""
        settings = {"ctx_size": context, "threads": threads, "kept_sequences": 1, "parallel": 1, **settings}
        self._said: list[str] = []
        self._use(assemble(settle(path, None, settings), self._said.append))

    def _use(self, parts: Parts) -> None:
        self._parts = parts
        self._backend = type(parts.model.ops).__module__.split(".")[-2]
        self._model, self._shape = parts.model, parts.plan.shape
        self._engine = Engine(parts)
        self._streams: Streams | None = None

    def with_settings(self, settings: dict[str, Any]) -> Ours:
        """An engine with the same weights and its own cache. Closing one of the two is enough. Raises EngineError."""
        other = copy(self)
        other._use(with_cache(self._parts, settle(None, self._parts.config, settings), self._said.append))
        return other

    def close(self) -> None:
        """Close the model's files."""
        self._engine.close()

    def about(self) -> dict[str, Any]:
        """The backend's folder, the line about what was loaded, and the notes of loading."""
        return {"backend": self._backend, "loaded": self._engine.fit_line(), "said": self._said}

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

    def resident(self) -> dict[str, int]:
        """Bytes of all "weights" as the backend holds them, and of the whole "store"."""
        return {"weights": self._model.weights.bytes, "store": self._parts.plan.bytes}

    def compiled(self) -> tuple[int, float]:
        """How many kernels this process has compiled, and the seconds of CPU time that it took."""
        if self._backend != "native":
            return 0, 0.0
        from polarlm.engine.jit.compile.library import compiled  # needs llvmlite

        return compiled()

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

    def streams_rate(self, prompts: Sequence[Sequence[int]], batch: int, steps: int) -> float:
        """Tokens per second of the first `batch` of `prompts` together. The first call makes their KV store."""
        if self._streams is None:
            # Each sequence takes the room of two: its prompt, which is kept, and its continuation.
            tokens, count = max(map(len, prompts)) + steps, 2 * len(prompts)
            planned = partial(plan_for_sequences, tokens=tokens, sequences=count)
            parts = with_cache(self._parts, self._parts.config, self._said.append, planned)
            self._streams = Streams(parts.model, prompts)
        return self._streams.rate(batch, steps)


class Streams:
    """Sequences that take steps together, as requests do. Prompts are whole blocks, which every run shares."""

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
        self._model, self._store = model, model.store
        self._sampler_input = SamplerInput(resolve(_GREEDY, GenerationDefaults()), [], 0.5, model.config.vocab_size)
        self._prefixes = PrefixCache(model.store)
        self._prompts = prompts
        self._held = [self._prefill(ids) for ids in prompts]

    def _prefill(self, ids: Sequence[int]) -> SequenceKV:
        assert len(ids) % self._store.shape.block_size == 0
        sequence = self._store.new_sequence()
        span = self._store.open(sequence, len(ids))
        self._model.forward([span], ids)
        self._store.commit(span)
        self._prefixes.insert(sequence, ids)
        return sequence

    def rate(self, batch: int, steps: int) -> float:
        """Tokens per second of the first `batch` sequences together, over `steps` steps after their prompts."""
        sequences = [self._prefixes.match_prefix(ids) for ids in self._prompts[:batch]]
        try:
            for _ in range(_UNTIL_RECORDED):
                self._step(sequences)
            started = time.perf_counter()
            for _ in range(steps - _UNTIL_RECORDED):
                self._step(sequences)
            return batch * (steps - _UNTIL_RECORDED) / (time.perf_counter() - started)
        finally:
            for sequence in sequences:
                self._store.release(sequence)

    def _step(self, sequences: Sequence[SequenceKV]) -> None:
        """One step with the same token for all, since the time does not depend on it."""
        spans = [self._store.open_step(sequence) for sequence in sequences]
        self._model.step(spans, [0] * len(spans), [self._sampler_input] * len(spans))
        self._store.commit_steps(spans)


if __name__ == "__main__":
    serve(Ours, [EngineError])
