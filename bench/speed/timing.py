"""Rates of an engine through its public interface, and the rate at which its weights can be read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine import Engine, SamplingParams
from engine.kv.prefix import PrefixCache
from engine.kv.store import SequenceKV
from engine.model.forward import Transformer
from engine.sampling.sample import Draw, resolve
from model_loaders.config import GenerationDefaults

_UNTIL_RECORDED = 2  # calls of `run_graph` before a device launches the recorded graph
_GREEDY = SamplingParams(temperature=0, repeat_penalty=1, dry_multiplier=0, ignore_eos=True)


def prompt_rate(engine: Engine, ids: Sequence[int]) -> float:
    """Tokens a second of a prompt that is not cached, up to the logits of its last token."""
    return _usage(engine, ids, 1).prompt_rate


def generation_rate(engine: Engine, ids: Sequence[int], steps: int) -> float:
    """Steps a second after the prompt `ids`."""
    return _usage(engine, ids, steps + 1).generation_rate  # the prefill returns the first token


def _usage(engine: Engine, ids: Sequence[int], tokens: int) -> Any:
    usage = engine.generate(ids, replace(_GREEDY, max_tokens=tokens)).usage
    if usage.cached_tokens or usage.completion_tokens != tokens:
        raise RuntimeError(f"not the run that was to be measured: {usage}")
    return usage


def weights_rate(model: Transformer, passes: int) -> float:
    """Steps a second if a step had only its products with weight matrices, one after another."""
    ops, layers = model.ops, model.weights.layers
    matrices = [m for layer in layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    matrices.append(model.weights.head)
    widths = sorted({matrix.shape[1] for matrix in matrices})

    def products(*vectors: Any) -> Any:
        of_width = dict(zip(widths, vectors, strict=True))
        for matrix in matrices:
            y = ops.linear(of_width[matrix.shape[1]], matrix)
        return y

    def one_pass() -> None:
        # A step copies its logits to the host, too; only then has a device finished for certain.
        ops.to_host(ops.run_graph("weights", products, [np.ones((1, width), np.float32) for width in widths]))

    for _ in range(_UNTIL_RECORDED):
        one_pass()
    started = time.perf_counter()
    for _ in range(passes):
        one_pass()
    return passes / (time.perf_counter() - started)


class Streams:
    """Sequences with prompts of their own that take steps together, as an engine's requests do.

    Prompts are whole blocks, so that every run continues from the same ones.
    """

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
        self._model, self._store = model, model.store
        self._draw = Draw(resolve(_GREEDY, GenerationDefaults()), [], 0.5, model.config.vocab_size)
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
        """Tokens a second of the first `batch` sequences together, over `steps` steps from their prompts."""
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
        """One step with the same token for all; the time does not depend on it."""
        spans = [self._store.open_step(sequence) for sequence in sequences]
        self._model.step(spans, [0] * len(spans), [self._draw] * len(spans))
        self._store.commit_steps(spans)


@dataclass
class Rates:
    """Repeated measurements of one rate, per thread count, in tokens a second."""

    runs: dict[int, list[float]] = field(default_factory=dict)

    def add(self, threads: int, rate: float) -> None:
        self.runs.setdefault(threads, []).append(rate)

    @property
    def threads(self) -> int:
        """The thread count with the best median."""
        return max(self.runs, key=lambda threads: statistics.median(self.runs[threads]))

    @property
    def median(self) -> float:
        """The median with the best thread count."""
        return statistics.median(self.runs[self.threads])

    @property
    def fastest(self) -> float:
        return max(rate for rates in self.runs.values() for rate in rates)

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {"median": self.median, "threads": self.threads, "fastest": self.fastest, "runs": self.runs}
