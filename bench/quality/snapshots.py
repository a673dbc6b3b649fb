"""What coded snapshots of a recurrent state cost: texts continued from them, compared with the same from exact ones.

A text is read as a prompt. Every 256 tokens it is continued by the next 256, once from the exact snapshot that the
prefix cache has of this place, and once from each coding of it. Keys and values are in half precision both times, so
that the state alone differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from polarlm.bench.quality.divergence import Divergence
from polarlm.bench.quality.figures import add_figures
from polarlm.bench.quality.states import divergence, forward, hidden_of
from polarlm.bench.result import Result
from polarlm.engine.model.forward import Transformer
from polarlm.engine.quantization.snapshot_codes import EXACT, SnapshotCodes
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.recurrent.delta import DeltaShape, DeltaState
from polarlm.engine.state.store import SequenceKV

SNAPSHOT, AFTER = "snapshot", "tokens after it:"  # subjects
DISTANCES = (1, 16, 64, 256)  # tokens after a snapshot
LENGTH = DISTANCES[-1]
SETTINGS = {"cache_type": "f16", "state_type": EXACT.name, "kept_sequences": 2, "parallel": 2}
"""Of the engine that is measured."""


def continuations(
    model: Transformer, ids: Sequence[int], codings: Sequence[SnapshotCodes]
) -> Iterator[dict[str, Divergence]]:
    """Yield, for each snapshot of a text `ids` (T,), the divergence of LENGTH tokens after it by coding.

    model: made with SETTINGS. T is at least twice LENGTH.
    """
    store, prefixes = model.store, PrefixCache(model.store)
    prompt = store.new_sequence()
    try:
        while prompt.length + 2 * LENGTH <= len(ids):
            here = prompt.length + LENGTH
            forward(model, store.open(prompt, LENGTH), ids[prompt.length : here])
            prefixes.insert(prompt, ids)
            more = ids[here : here + LENGTH]
            exact = _continued(model, prefixes.match_prefix(ids[:here]), more, EXACT)
            yield {
                one.name: divergence(model, exact, _continued(model, prefixes.match_prefix(ids[:here]), more, one))
                for one in codings
            }
    finally:
        store.release(prompt)


def _continued(model: Transformer, sequence: SequenceKV, ids: Sequence[int], codes: SnapshotCodes) -> np.ndarray:
    """Hidden states (T, E) of `ids` (T,) after a sequence whose last block is a snapshot, coded before it is read."""
    last = sequence.length // model.store.shape.block_size - 1
    kept = []
    for group, table in zip(model.store.groups, sequence.tables, strict=True):
        if isinstance(group, DeltaState):
            block = table.block(last)
            assert block is not None
            kept.append((group, [block], group.read_blocks([block])))
    try:
        for group, blocks, arrays in kept:
            matrices = {place: array for place, array in arrays.items() if place[1] == "matrices"}
            coded = {place: codes.decode(codes.encode(array)) for place, array in matrices.items()}
            group.write_blocks(blocks, {**arrays, **coded})
        return hidden_of(model, sequence, ids)
    finally:
        for group, blocks, arrays in kept:  # others continue from it, too
            group.write_blocks(blocks, arrays)
        model.store.release(sequence)


def add_rows(
    result: Result,
    model: Transformer,
    codings: Sequence[SnapshotCodes],
    divergences: Sequence[Mapping[str, Divergence]],
) -> None:
    """Add the rows of exact snapshots, then of each coding: the bytes of a snapshot, all layers, the bits per number of
    a matrix, and figures of the first tokens after the snapshots, whose errors are over these.

    divergences: what `continuations` yielded.
    """
    store = model.store.shape
    same = Divergence(np.zeros(LENGTH), np.ones(LENGTH, bool), np.ones(LENGTH))
    for codes in (EXACT, *codings):
        shapes = [replace(layer, codes=codes) for layer in store.layers if isinstance(layer, DeltaShape)]
        mixer = shapes[0].mixer
        sizes = codes.fields(mixer.key_dim, mixer.value_dim).values()
        bits = 8 * sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in sizes)
        nbytes = sum(one.quantized_bytes(store.block_size) for one in shapes)
        size = {"bytes": nbytes, "bits": bits / (mixer.key_dim * mixer.value_dim)}
        result.add_all(SNAPSHOT, codes.name, size)
        after = [same if codes == EXACT else each[codes.name] for each in divergences]
        for tokens in DISTANCES:
            add_figures(result, f"{AFTER} {tokens}", codes.name, [one[:tokens] for one in after], tokens=tokens)
