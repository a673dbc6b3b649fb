"""Prefetches: of all that a step attends to in full precision, once, by the products right before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polarlm.engine.weight_formats import Linear
from tests import weights
from tests.backends.native.attending import SCALE, Sequence_, Shape, step
from tests.backends.native.launching import launcher
from tests.backends.native.test_product import quantized, stored
from tests.jit.levels import run
from tests.pairs import each, in_turn

from polarlm.engine.backends.native.attention_ops.steps import AttentionOps  # isort: skip
from polarlm.engine.backends.native.attention_ops.step_table import NO_WINDOW, StepTable
from polarlm.engine.backends.native.kernels.linear.product import (
    Product,
    ProductArguments,
    prefetched_pieces,
    product,
    units,
)
from polarlm.engine.backends.native.kernels.linear.tiling import tiling
from polarlm.engine.backends.native.kernels.prefetch import (
    NO_HINT,
    PIECE,
    PieceArguments,
    Prefetch,
    list_pieces,
)
from polarlm.engine.backends.native.prefetching import add_prefetches
from polarlm.engine.backends.native.product_ops.linear import LinearOps
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang.values import I8, Value

SEQUENCES = [Sequence_(5), Sequence_(64, 3), Sequence_(150), Sequence_(190, 4), Sequence_(63, 2), Sequence_(640)]


@in_turn("window", [None, 1, 40, 100, 200])
@pytest.mark.parametrize("shape", [Shape(block_size=64), Shape(kv_heads=3, dim=8), Shape(dim=96, block_size=32)])
def test_the_pieces_are_what_a_step_attends_to(shape: Shape, window: int | None) -> None:
    case = step(shape, SEQUENCES, window)
    table, keys = StepTable(case.views, shape.block_size), case.cache.full_k
    block_bytes = keys[0, 0].nbytes
    pieces = np.zeros(2 + keys.nbytes // min(block_bytes, PIECE), np.int64)
    arguments = PieceArguments(
        headers=table.arrays.headers,
        full=table.arrays.full,
        pieces=pieces,
        sequences=len(table),
        most_full=table.arrays.full.shape[1],
        kv_heads=shape.kv_heads,
        block_bytes=block_bytes,
        token_bytes=block_bytes // shape.block_size,
        window=window or NO_WINDOW,
    )
    run(list_pieces(), best(), 1, arguments)
    count, offsets = pieces[0], pieces[1 : 1 + pieces[0]]
    assert len(set(offsets.tolist())) == count

    token_bytes, listed = 2 * shape.dim, np.zeros(keys.nbytes + PIECE, bool)
    for offset in offsets:
        assert offset % block_bytes % PIECE == 0
        assert not np.isnan(keys.reshape(-1)[offset // 2])  # a piece begins with a token
        listed[offset : offset + PIECE] = True
    seen = np.zeros(keys.shape[:3], bool)
    for view in case.views:
        end = view.position + view.rows.stop - view.rows.start
        oldest = 0 if window is None else max(0, view.position - window + 1)
        slots = [(view.sink, 0), *((s, view.current_start + i * shape.block_size) for i, s in enumerate(current(view)))]
        for slot, start in slots:
            if slot is not None:
                seen[slot, :, max(0, oldest - start) : max(0, end - start)] = True
    assert listed[: keys.nbytes].reshape(*keys.shape[:3], token_bytes).all(-1)[seen].all()


def current(view: object) -> list[int]:
    """The slots of the current block of a sequence and of those after it."""
    return [view.current.block, *view.following]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "activation", "rows"), each(["q4_1", "q4_k", "q8_0"], [None, "silu"], [2, 3, 8, 13, 17])
)
def test_a_product_prefetches_each_of_its_pieces_once(
    name: str, rows: int, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prefetches are replaced with counters in the memory that they go to."""
    rng, level, columns = np.random.default_rng(0), best(), 768
    format, packed, _ = stored(rng, name, 160, columns)
    sizes = tiling(rows, level)
    spec = Product(format, sizes, activation=activation)
    tiles, blocks = len(packed) // (2 if activation else 1), columns // format.values
    count_of_units = units(spec, tiles)
    can = prefetched_pieces(spec, level, count_of_units, blocks, rows)
    first, count = 3, can // 2 * 2 + 8  # of keys and of values
    pieces = np.concatenate([[count // 2], rng.permutation(count // 2) * PIECE])
    keys, values = np.zeros((2, count // 2, PIECE), np.uint8)
    hint = np.array([keys.ctypes.data, values.ctypes.data, pieces.ctypes.data, first], np.int64)

    def mark(self: Prefetch, step: Value) -> None:
        def count_bytes(pointer: Value, nbytes: int) -> None:
            for offset in range(nbytes):
                e.store(e.load(pointer, I8, offset) + e.constant(I8, 1), pointer, offset)

        e = self._e
        with monkeypatch.context() as patch:
            patch.setattr(e, "prefetch", count_bytes)
            plain_step(self, step)

    plain_step = Prefetch.step
    monkeypatch.setattr(Prefetch, "step", mark)
    marking = replace(product(spec), name=f"marking_{spec.name}")
    x, *_ = quantized(rng.standard_normal((rows, columns)).astype(np.float32), sizes.rows, level)
    y = np.empty((rows, tiles * 16), np.float32)
    arguments = ProductArguments(
        weights=packed,
        x=x,
        y=y,
        bias=None,
        hint=hint,
        blocks=blocks,
        tile_bytes=packed.shape[1],
        x_stride=x.strides[0],
        y_stride=y.strides[0],
        rows=rows,
        outputs=tiles * 16,
        tiles=tiles,
    )
    run(marking, level, count_of_units, arguments)
    marks = np.stack([keys, values], axis=1)[pieces[1:] // PIECE].reshape(count, PIECE)  # in order of their numbers
    wanted = np.zeros(count, np.uint8)
    wanted[first : first + can] = 1
    assert (marks[: first + can] == wanted[: first + can, None]).all()
    assert not marks[first + can + 1 :].any()  # a part of the next piece may be prefetched, too


@pytest.mark.slow
def test_a_recorded_step_prefetches_before_the_attention_of_each_layer_but_the_first() -> None:
    shape = Shape(block_size=64, types=("f16", "f16"))
    cases = [step(shape, SEQUENCES, None, seed) for seed in range(3)]  # the same places in three layers
    launch, rng = launcher(best()), np.random.default_rng(0)
    linear, attention = LinearOps(launch), AttentionOps(launch)
    dim = cases[0].q[0].size
    stored_matrix = weights.StoredBytes(weights.random_blocks(rng, "q4_1", dim, dim), "q4_1")
    matrix, table = Linear(linear.load([stored_matrix])), StepTable(cases[0].views, shape.block_size)

    def work() -> list[np.ndarray]:
        results = []
        for case in cases:
            y = linear.linear(case.q.reshape(-1, dim), matrix, recorded=True)
            q = linear.linear(y, matrix, recorded=True).reshape(case.q.shape)
            results.append(attention.attention(q, case.cache, table, SCALE, None))
        return results

    wanted = [x.copy() for x in work()]
    with launch.record() as recording:
        results = work()
    add_prefetches(recording)
    launch.replay(recording)
    for result, x in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(result, x)

    (listing,) = [r for r in recording.launches if r.kernel == list_pieces()]
    pieces = listing.arrays["pieces"]
    assert pieces[0] > 0
    products = [r for r in recording.launches if r.kernel.name.startswith("product")]
    given = [r.arrays["hint"] for r in products]
    for hint in given[:2]:
        assert (hint == NO_HINT).all()
    for case, before, last in zip(cases[1:], given[2::2], given[3::2], strict=True):
        keys, values = case.cache.full_k, case.cache.full_v
        at = keys.ctypes.data, values.ctypes.data, pieces.ctypes.data
        # The last product takes the first pieces.
        assert tuple(last) == (*at, 0)
        assert tuple(before) == (*at, products[-1].spare)
    assert all(r.number("hint") == hint.ctypes.data for r, hint in zip(products, given, strict=True))
    assert (NO_HINT[[0, 1, 3]] == 0).all()
