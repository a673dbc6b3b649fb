"""Logits of a model's steps after a prompt: one token at a time, or the rows of a block at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine import SamplingParams
from polarlm.engine.model.forward import Transformer
from polarlm.engine.sampling.sample import SamplerInput, resolve
from polarlm.engine.state.store import SequenceKV
from polarlm.model_loaders.config import GenerationDefaults


def step_logits(model: Transformer, ids: Sequence[int], prompt: int) -> np.ndarray:
    """Logits (T − prompt, V) of steps, one for each of `ids` (T,) after the first `prompt`, which are prefilled."""
    kept: list[np.ndarray] = []
    greedy = resolve(SamplingParams(temperature=0), GenerationDefaults())
    sampler_input = SamplerInput(greedy, (), 0.0, model.config.vocab_size)

    def keep(chosen: Any, logits: Any, sampler_inputs: Any) -> list[Any]:
        kept.append(model.ops.to_host(logits).copy())
        return []

    fetch, model.ops.fetch_tokens = model.ops.fetch_tokens, keep  # type: ignore[method-assign]
    sequence = _prefilled(model, ids[:prompt])
    try:
        for id in ids[prompt:]:
            span = model.store.open_step(sequence)
            model.step([span], [id], [sampler_input])
            model.store.commit(span)
    finally:
        model.store.release(sequence)
        model.ops.fetch_tokens = fetch  # type: ignore[method-assign]
    return np.concatenate(kept)


def chunk_logits(model: Transformer, ids: Sequence[int], prompt: int) -> np.ndarray:
    """As `step_logits`, but with the rows of a block at once; they read the same keys and values."""
    size, kept = model.store.shape.block_size, []
    sequence = _prefilled(model, ids[:prompt])
    start = prompt
    while start < len(ids):
        chunk = ids[start : (start // size + 1) * size]
        span = model.store.open(sequence, len(chunk), as_steps=True)
        kept.append(model.logits(model.forward([span], chunk)))
        model.store.commit(span)
        start += len(chunk)
    model.store.release(sequence)
    return np.concatenate(kept)


def _prefilled(model: Transformer, ids: Sequence[int]) -> SequenceKV:
    """A sequence whose prompt `ids` is prefilled."""
    sequence = model.store.new_sequence()
    span = model.store.open(sequence, len(ids))
    model.forward([span], ids)
    model.store.commit(span)
    return sequence
