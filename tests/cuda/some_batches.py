"""Batches of a model, for tests that compare recorded ones with others."""

from __future__ import annotations

import numpy as np

from polarlm.engine.model.forward import Transformer
from polarlm.engine.state.store import SequenceKV
from tests.bare import forward_together


def batches_of(model: Transformer) -> list[np.ndarray]:
    """The logits of batches, of prompts, some of which go on, and of steps. Their rows differ, and have one bucket."""
    rng, logits, running = np.random.default_rng(7), list[np.ndarray](), list[SequenceKV]()
    for counts in [(30, 25), (25, 24), (48,), (28, 22), (30, 22)]:
        new = [model.store.new_sequence() for _ in counts]
        prompts = [*zip(new, counts, strict=True), *((one, 2) for one in running[:1])]
        ids = [rng.integers(5, 96, count).tolist() for _, count in prompts]
        spans = model.store.open_batch([*prompts])
        steps = [model.store.open_step(one) for one in running[1:]]
        hidden = forward_together(model, spans, ids, steps, rng.integers(5, 96, len(steps)).tolist())
        logits.append(model.logits(hidden))
        model.store.commit_steps([*spans, *steps])
        running = [*running, *new][-4:]
    return logits
