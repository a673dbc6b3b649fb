"""Steps that change no block table: their rows come from the last step, as if all tables had been read again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.tracing import TracingDevice
from polarlm.engine.backends.cuda.kv.cache import SpanTable
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.limits import DRAFT_ROWS
from polarlm.engine.state.step_spans import StepSpans
from polarlm.engine.state.store import KVStore, SequenceKV
from tests.cuda.test_model_emulated import N, model_of

MODELS = [
    ("llama_gqa_linear", ("ring4", "ring3.5")),
    ("gemma3_tied", ("f16", "f16")),  # with and without a window
    ("lfm2_tied", ("f16", "f16")),  # short convolutions
    ("qwen3_5_tied", ("f16", "f16")),  # gated delta rules
]


def make_store(fixture: str, types: tuple[str, str]) -> KVStore:
    """On a GPU that does nothing."""
    ops = CudaOps(TracingDevice(lambda launch: None, 4, 228 << 10))
    store = model_of(ops, fixture, types, room=(512, 8)).store
    plan = replace(store.plan, quantized_blocks=tuple(4 * count for count in store.plan.quantized_blocks))
    return KVStore(ops, plan, store.conditioning)


def packed(spans: list[Any]) -> list[Any]:
    return [(x.table.tolist(), x.most_rows) if isinstance(x, SpanTable) else x.tolist() for x in spans]


@pytest.mark.parametrize(("fixture", "types"), MODELS)
def test_rows_of_steps_are_as_if_read_again(fixture: str, types: tuple[str, str]) -> None:
    """Of random schedules: sequences come, go, and change their order; rows are drafted, discarded and cut off."""
    stores, rng = [make_store(fixture, types) for _ in range(2)], np.random.default_rng(3)
    step_spans = [*map(StepSpans, stores)]
    both: list[list[SequenceKV]] = []  # a sequence in each store; the other one reads its tables before every step

    def grow(kvs: list[SequenceKV], count: int) -> None:
        for store, kv in zip(stores, kvs, strict=True):
            store.commit(store.open(kv, count))

    steady = 0
    for turn in range(150):
        if len(both) < 4 or rng.random() < 0.05:
            both.append([store.new_sequence() for store in stores])
            grow(both[-1], int(rng.integers(1, 3 * N)))
        if len(both) > 5 or rng.random() < 0.05:
            gone = both.pop(int(rng.integers(len(both))))
            for store, kv in zip(stores, gone, strict=True):
                store.release(kv)
            both += [gone] * (turn % 2)  # it begins anew, with a step
        order = rng.permutation(len(both)) if rng.random() < 0.1 else range(len(both))
        chosen = [both[row] for row in order][: len(both) - int(rng.random() < 0.2)]
        counts = [1] * len(chosen)
        if turn % 5 == 0:
            counts = [min(int(rng.choice((1, *DRAFT_ROWS))), N - kvs[0].length % N) for kvs in chosen]
        kept, is_kept = [int(rng.integers(1, count + 1)) for count in counts], rng.random() < 0.9
        seen = []
        for number, store in enumerate(stores):
            for kvs in chosen:
                kvs[1].table_version = None
            spans = [store.open_step(kvs[number], count) for kvs, count in zip(chosen, counts, strict=True)]
            steady += sum(not span.reservations for span in spans) if number == 0 else 0
            seen.append(packed(step_spans[number](spans)))
            assert seen[number] == packed(store.spans(spans, slice(0, sum(counts))))
            if is_kept:
                store.commit_steps(spans, kept)
            for span in spans:
                store.abort(span)
        assert seen[0] == seen[1]
        assert [(a.length, a.tables) for a, _ in both] == [(b.length, b.tables) for _, b in both]
        if turn % 11 == 0:
            for store, kv in zip(stores, both[0], strict=True):
                store.truncate(kv, max(store.first_of_block(kv), kv.length - 2))
    assert steady > 200
