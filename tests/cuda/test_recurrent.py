"""Gated delta rules and Mamba 2 on the emulated device, against the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from inspect import unwrap
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.bench.gpu.shapes import llama
from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.recurrent import ops as recurrent
from polarlm.engine.backends.cuda.recurrent import sizes
from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, Mamba2Weights
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading import assembly
from polarlm.engine.loading.sizes import check_layers
from polarlm.engine.outputs import fold
from polarlm.engine.quantization.snapshot_codes import EIGHT_BITS, EXACT
from polarlm.model_loaders.config import GatedDelta, Mamba2, Recurrent
from tests.backends import test_recurrent as bodies
from tests.cuda.emulated import EmulatedDevice, open_device
from tests.pairs import mostly_slow
from tests.recurrence import conv_inputs, make_rows, make_slots, make_weights, recurrence
from tests.tiny import VOCABULARY, make_model, preempt

SHAPES = [  # and the tokens of a block
    (GatedDelta(2, 4, 8, 12, 4), 16),
    (GatedDelta(2, 6, 16, 32, 3, tiled=True), 8),
    (GatedDelta(1, 1, 32, 16, 2), 24),
    (GatedDelta(1, 2, 72, 76, 4), 64),  # several warps, slices of a matrix, more rows of it than a thread holds
    (Mamba2(1, 11, 16, 12, 4), 16),  # more heads than a block of threads has
    (Mamba2(2, 6, 8, 16, 3, conv_bias=False), 8),
    (Mamba2(3, 3, 32, 16, 2), 24),
    (Mamba2(1, 2, 72, 76, 4), 64),
]


class OnDevice:
    """The ops with arrays of the host, which are copied to the device and back."""

    rows_alike = isinstance(open_device(), EmulatedDevice)

    def __init__(self) -> None:
        self._ops = CudaOps(open_device())
        self.gated_delta = partial(self._add, self._ops.gated_delta)
        self.mamba2 = partial(self._add, self._ops.mamba2)

    def _add(
        self,
        op: Callable[..., Any],
        rows: np.ndarray,
        w: bodies.Weights,
        slots: DeltaSlots,
        spans: np.ndarray,
        ends: DeltaEnds | None = None,
    ) -> np.ndarray:
        to_device = self._ops.to_device
        weights = w._replace(**{name: to_device(x) for name, x in w._asdict().items() if isinstance(x, np.ndarray)})
        held = DeltaSlots(*map(to_device, slots))
        kept = None if ends is None else DeltaEnds(ends.numbers, to_device(ends.matrices), to_device(ends.inputs))
        y = op(to_device(rows), weights, held, to_device(spans) if ends is None else spans, kept)
        self._copy_back(slots, held)
        if ends is not None and kept is not None:
            self._copy_back(ends[1:], kept[1:])
        return self._ops.to_host(y)

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        held = [DeltaSlots(*map(self._ops.to_device, layer)) for layer in layers]
        self._ops.advance_delta(held, slots, tiled=tiled)
        for layer, slots_there in zip(layers, held, strict=True):
            self._copy_back(layer, slots_there)

    def _copy_back(self, arrays: Sequence[np.ndarray], held: Sequence[np.ndarray]) -> None:
        for to, array in zip(arrays, held, strict=True):
            to[...] = self._ops.to_host(array)


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bodies.BACKENDS, "cuda", OnDevice)


# Blocks of a prompt that are computed at a time, at most; columns of a slice of a matrix; terms of a chunk's product.
PARTS = [(1, 16, 32), (2, 32, 16), (100, 64, 32)]


@mostly_slow("of, part", product(SHAPES, PARTS), [(SHAPES[0], PARTS[1]), (SHAPES[4], PARTS[1])])
def test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence(
    monkeypatch: pytest.MonkeyPatch, of: tuple[Recurrent, int], part: tuple[int, int, int]
) -> None:
    """Shapes decide the tiles of a matrix, blocks the launches that each tile is carried through."""
    (shape, block), (blocks, columns, terms) = of, part
    monkeypatch.setattr(recurrent, "PROMPT_ROWS", blocks * block)
    monkeypatch.setattr(sizes, "_SLICES", (columns,))
    monkeypatch.setattr(sizes, "_CHUNKS", (terms,))
    unwrap(bodies.test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence)("cuda", shape, block)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [GatedDelta(1, 2, 128, 128, 4), Mamba2(1, 9, 128, 64, 4), Mamba2(2, 4, 128, 64, 4), Mamba2(1, 9, 256, 64, 4)],
)
def test_heads_of_the_size_that_models_have(shape: Recurrent) -> None:
    unwrap(bodies.test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence)("cuda", shape, 64)


@pytest.mark.parametrize(
    ("shape", "block", "sizes"),
    [
        (GatedDelta(1, 2, 16, 16, 3), 16, (1e-9, 1, 1)),
        (GatedDelta(1, 2, 16, 16, 3), 16, (100, 1, 1)),
        (Mamba2(1, 2, 24, 16, 3), 64, (1, 30, 1)),  # products take 16 terms, and this one lacks some
        (Mamba2(1, 2, 16, 16, 3), 16, (1e-9, 1e-9, 1e-9)),
        (Mamba2(1, 2, 16, 16, 3), 16, (100, 1e-6, 100)),
    ],
)
def test_numbers_of_any_size_are_multiplied_as_exactly(
    rng: np.random.Generator, shape: Recurrent, block: int, sizes: tuple[float, float, float]
) -> None:
    """sizes: how large values, keys and queries are. Gated delta rules normalise keys and queries."""
    w, values, keys = make_weights(rng, shape), shape.value_heads * shape.value_dim, shape.key_dim
    rows = make_rows(rng, shape, 2 * block)
    if isinstance(w, Mamba2Weights):
        w, order = w._replace(bias=None), (slice(0, values), slice(values, values + keys), slice(values + keys, None))
    else:
        order = slice(2 * keys, None), slice(keys, 2 * keys), slice(0, keys)
    for channels, size in zip(order, sizes, strict=True):
        w.conv[:, channels] *= size
    wanted, matrices = recurrence(rows, w, shape)
    slots = make_slots(shape, 1, block)
    ends = DeltaEnds([1], np.empty_like(slots.matrices), np.empty((1, shape.width - 1, shape.channels), np.float32))
    results = bodies.op_of(OnDevice(), w)(rows, w, slots, bodies.span(0, len(rows)), ends)
    bodies.assert_close(results, wanted)
    bodies.assert_close(ends.matrices[0], matrices[-1])


def test_a_block_that_adds_nothing_leaves_a_large_matrix(rng: np.random.Generator) -> None:
    """Its updates are 0, and would have any scale."""
    shape, block = Mamba2(1, 1, 16, 16, 2), 16
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 3 * block)
    w = w._replace(conv=np.abs(w.conv), bias=None, decay=np.float32([-1e-3]))
    values = conv_inputs(rows, shape)[:, :16]
    values[:] = np.abs(values) * np.float32(1e17)
    values[block:] = 0
    wanted, matrices = recurrence(rows, w, shape)
    slots = make_slots(shape, 1, block)
    ends = DeltaEnds([2], np.empty_like(slots.matrices), np.empty((1, shape.width - 1, shape.channels), np.float32))
    bodies.assert_close(bodies.op_of(OnDevice(), w)(rows, w, slots, bodies.span(0, len(rows)), ends), wanted)
    bodies.assert_close(ends.matrices[0], matrices[-1])


@mostly_slow("shape, block", [SHAPES[0], SHAPES[3], SHAPES[5]], [SHAPES[0], SHAPES[5]])
def test_rows_that_are_not_kept_leave_no_trace(shape: Recurrent, block: int) -> None:
    unwrap(bodies.test_rows_that_are_not_kept_leave_no_trace)("cuda", shape, block)


@pytest.mark.parametrize(("shape", "block"), [SHAPES[0], SHAPES[4]])
def test_a_step_of_several_sequences_changes_their_slots_alone(shape: Recurrent, block: int) -> None:
    unwrap(bodies.test_a_step_of_several_sequences_changes_their_slots_alone)("cuda", shape, block)


@pytest.mark.parametrize(("shape", "block"), [SHAPES[0], SHAPES[4]])
def test_an_empty_row_changes_no_slot(rng: np.random.Generator, shape: Recurrent, block: int) -> None:
    """As batches are filled up with: its result is 0."""
    w, rows, slots = make_weights(rng, shape), make_rows(rng, shape, 2), make_slots(shape, 2, block)
    untouched = [array[0].copy() for array in slots]
    spans = np.array([DeltaSpan(1, 0, 1, 0), DeltaSpan(0, 0, 0, 0)], np.int32)
    results = bodies.op_of(OnDevice(), w)(rows, w, slots, spans)
    bodies.assert_close(results[:1], recurrence(rows[:1], w, shape)[0])
    assert not results[1].any()
    for before, after in zip(untouched, slots, strict=True):
        np.testing.assert_array_equal(before, after[0])


@pytest.mark.parametrize(
    ("mixer", "block", "words"),
    [
        (GatedDelta(2, 4, 128, 128, 4), 128, "blocks of 128 tokens: choose 64"),
        (GatedDelta(2, 4, 30, 128, 4), 64, "gated delta rules .* of 8 .* of 4, not 30 and 128: choose device=cpu"),
        (GatedDelta(2, 4, 256, 64, 4), 64, "heads of gated delta rules of 256 × 64 .* memory: choose device=cpu"),
        (Mamba2(2, 4, 512, 64, 4), 64, "heads of Mamba 2 of 512 × 64 .* memory: choose device=cpu"),
        (Mamba2(2, 4, 128, 66, 4), 64, "Mamba 2 .* of 8 .* of 4, not 128 and 66"),
    ],
)
def test_layers_without_kernels_are_refused(mixer: Recurrent, block: int, words: str) -> None:
    config = llama(layers=1)
    config = replace(config, layers=(*config.layers, replace(config.layers[0], mixer=mixer)))
    with pytest.raises(EngineError, match=words) as caught:
        check_layers(CudaOps(open_device()), config, block)
    assert caught.value.code == "device_unavailable"
    check_layers(NumpyOps(), config, block)


def test_states_are_kept_as_the_codes_of_numpy(rng: np.random.Generator) -> None:
    """Also of a column of zeros, and of one of tiny numbers; later changes of the states do not matter."""
    matrices, inputs = rng.standard_normal((2, 3, 8, 20)), rng.standard_normal((2, 3, 5))
    matrices[0, 1, :, 3], matrices[1, 2, :, 4] = 0, 1e-31
    ops, host = CudaOps(open_device()), NumpyOps()
    ends = DeltaEnds([0, 1], ops.to_device(matrices), ops.to_device(inputs))
    for codes in (EIGHT_BITS, EXACT):
        wanted = host.keep_states(DeltaEnds([0, 1], *map(ops.to_host, ends[1:])), codes)()
        fetch = ops.keep_states(ends, codes)
        if codes == EXACT:
            ends.matrices[:] = 0
        fields = fetch()
        assert fields.keys() == wanted.keys()
        for name, array in wanted.items():
            assert fields[name].dtype == array.dtype
            np.testing.assert_array_equal(fields[name], array)
        one = {name: array[1] for name, array in wanted.items()}
        np.testing.assert_array_equal(ops.to_host(ops.restore_states(one, codes)), host.restore_states(one, codes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixture", ["qwen3_5_tied", "qwen3_next_shared_keys", "granite_hybrid_tied", "nemotron_h_experts"]
)
def test_an_engine_continues_with_what_it_has_of_earlier_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixture: str
) -> None:
    """The next turn, and prompts that leave the first one at a block's end and within one; several at a time."""
    monkeypatch.setattr(assembly, "select", lambda device, threads: (CudaOps(open_device(checked=False)), ""))
    path, ids = make_model(tmp_path, fixture), np.random.default_rng(0).integers(5, VOCABULARY, 200).tolist()
    settings = {"block_size": 16, "ctx_size": 256, "cache_type": "f16", "state_type": "f32"}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def answer(engine: Engine, prompt: list[int]) -> tuple[tuple[int, ...], int]:
        completion = engine.generate(prompt, params)
        return completion.token_ids, completion.usage.cached_tokens

    with Engine.load(path, **settings) as engine:
        first, cached = answer(engine, ids[:101])
        assert cached == 0
        turns = [[*ids[:101], *first, *ids[105:110]], [*ids[:96], *ids[110:130]], [*ids[:70], *ids[130:160]]]
        answers = [answer(engine, turn) for turn in turns]
        assert [cached for _, cached in answers] == [108, 96, 32]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(lambda prompt: answer(engine, prompt)[0], [turns[1], ids[160:190]]))
    for turn, (tokens, _) in zip(turns, answers, strict=True):
        with Engine.load(path, **settings) as engine:
            assert answer(engine, turn)[0][:4] == tokens[:4]
    with Engine.load(path, **settings, state_cache="10M") as engine:
        stream = engine.stream(ids[:101], params)
        chunks = [next(stream) for _ in range(5)]
        assert preempt(engine).saved is not None
        assert fold([*chunks, *stream]).token_ids == first
    assert together[0][:4] == answers[1][0][:4]
