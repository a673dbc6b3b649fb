"""What a `Transformer` computes: the rows of prompts, and those of a step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.vision_encoders import PlacedImage
from polarlm.engine.sampling.sample import Fetch, SamplerInput
from polarlm.engine.state.store import Span

_KNOWN_ROWS = 64  # most rows of a sequence, all of one block, that attend together, where their next token is known


class PromptBatch(NamedTuple):
    """The new tokens of prompts, and with them a step of sequences that run.

    spans: of the prompts, from `KVStore.open`, or `KVStore.open_batch`; also of steps, from `KVStore.open_step`. ids:
    the tokens of all rows, in order. outputs: the hidden states of so many last rows are returned; None: of all. parts:
    of `spans` and of steps, in the order of the rows, which are computed without a pause; empty: the rows are those of
    `spans`. only_last: only the last row of each span is right, since nothing reads the others, and is returned.
    by_layer: no chunk has more than one layer. images: of the one span's sequence; those that it has rows of are
    computed first.
    """

    spans: Sequence[Span]
    ids: Sequence[int]
    outputs: int | None = None
    parts: Sequence[Span] = ()
    only_last: bool = False
    by_layer: bool = False
    images: Sequence[PlacedImage] = ()


def join(
    ops: Ops,
    spans: Sequence[Span],
    ids: Sequence[Sequence[int]],
    steps: Sequence[Span] = (),
    step_ids: Sequence[int] = (),
) -> PromptBatch:
    """Return a batch of prompts, each computed as it is alone, whose last rows' hidden states are returned.

    spans: from `KVStore.open_batch`. ids: the new tokens of each. steps, step_ids: of a `StepBatch`, where
    `Ops.batches_take_steps`; all their rows are returned, too. There, the rows that are returned come after all others,
    which the last layer can then leave out. On a CPU a prompt's rows stay together: two spans of it would take more
    launches.
    """
    if not ops.batches_take_steps and len(spans) == 1:
        return PromptBatch(spans, ids[0], outputs=1)
    if not ops.batches_take_steps:
        return PromptBatch(spans, [*chain.from_iterable(ids)], only_last=True)
    last = [*(span.part(span.count - 1, 1) for span in spans), *steps]
    parts = [*(span.part(0, span.count - 1) for span in spans if span.count > 1), *last]
    rows = [*chain.from_iterable(one[:-1] for one in ids), *(one[-1] for one in ids), *step_ids]
    return PromptBatch(spans, rows, len(spans) + len(step_ids), parts)


class StepBatch(NamedTuple):
    """The rows of a step. Those of a sequence attend to each other causally.

    spans: from `KVStore.open_step`; the caller commits them. ids: the tokens of the rows of all spans, in order; or the
    fetch of the step before, which had the same sequences in the same order, and one row of each. samplers: one for
    each row; None: logits alone, for `Transformer.sample`. known: after so many first rows of each span the next token
    is known, and what is returned for them may be 0.
    """

    spans: Sequence[Span]
    ids: Sequence[int] | Fetch
    samplers: Sequence[SamplerInput] | None
    known: Sequence[int] = ()


def known_first(batch: StepBatch) -> tuple[list[Span], np.ndarray, list[int]]:
    """Return the parts of a step's spans, of rows whose next token is known, then of the others; in this order, which
    rows of the batch they are (T,); and which of these are the others."""
    both = [*zip(batch.spans, batch.known, strict=True)]
    is_wanted = np.concatenate([np.arange(span.count) >= count for span, count in both])
    parts = [
        span.part(first, min(_KNOWN_ROWS, count - first))
        for span, count in both
        for first in range(0, count, _KNOWN_ROWS)
    ]
    parts += [span.part(count, span.count - count) for span, count in both]
    return parts, np.argsort(is_wanted, kind="stable"), np.flatnonzero(is_wanted).tolist()


def run_to_end(chunks: Generator[int, None, Array]) -> Array:
    """Return what a generator of chunks returns."""
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            return end.value
