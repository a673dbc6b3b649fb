"""Functions of the kernel language that are more than one instruction."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tests.jit.levels import declared, every_level, run

from polarlm.engine.jit.compile.compiler import Kernel  # isort: skip
from polarlm.engine.jit.isa.levels import Level
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.float_ops import float_to_half, gather, gather_pairs
from polarlm.engine.jit.lang.values import F32, I16, I32, Value, vector


@cache
def gathers() -> Kernel:
    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        table, index, out = args
        at = e.load(index, vector(I32, 16))
        e.store(gather(e, table, at, F32), out)
        e.store(gather(e, table, at, I16).sext(I32).to_float(), out, 64)
        for number, part in enumerate(gather_pairs(e, table, at)):
            e.store(part, out, 64 * (2 + number))

    return Kernel("gathers", emit, declared("table index out"))


@every_level
def test_gather(level: Level) -> None:
    rng = np.random.default_rng(0)
    table, index = rng.standard_normal(200).astype(np.float32), rng.integers(0, 100, 16).astype(np.int32)
    out = np.zeros((4, 16), np.float32)
    run(gathers(), level, 1, (table, index, out))
    np.testing.assert_array_equal(out[0], table[index])
    np.testing.assert_array_equal(out[1], table.view(np.int16)[index])
    np.testing.assert_array_equal(out[2:].T, table.reshape(-1, 2)[index])


@cache
def any_lane() -> Kernel:
    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        x, out = args
        with e.loop(begin, end) as unit:
            above = e.load(x + unit * 64, vector(F32, 16)) > 0.0
            e.store(e.select(e.any(above), e.constant(I32, 1), e.constant(I32, 0)), out + unit * 4)

    return Kernel("any_lane", emit, declared("x out"))


@every_level
def test_any(level: Level) -> None:
    x, out = np.concatenate([np.zeros((1, 16)), np.eye(16)]).astype(np.float32), np.full(17, 7, np.int32)
    run(any_lane(), level, 17, (x, out))
    assert out.tolist() == [0] + [1] * 16


@cache
def halves() -> Kernel:
    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        x, out = args
        with e.loop(begin, end) as unit:
            e.store(float_to_half(e, e.load(x + unit * 64, vector(F32, 16))), out + unit * 32)

    return Kernel("halves", emit, declared("x out"))


@every_level
def test_float_to_half(level: Level) -> None:
    """Every half, the middles between neighbours, which are ties, and what lies just beside them."""
    every = np.arange(1 << 15, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].astype(np.float32)
    middles = (every[1:] + every[:-1]) / 2
    positive = np.concatenate([every, middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(1e9))])
    x = np.concatenate([positive, -positive])
    x = np.ascontiguousarray(x[: len(x) // 16 * 16])
    out = np.zeros(len(x), np.float16)
    run(halves(), level, len(x) // 16, (x, out))
    np.testing.assert_array_equal(out.view(np.int16), x.astype(np.float16).view(np.int16))


@every_level
def test_square_matrices_are_transposed(level: Level) -> None:
    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        for number, column in enumerate(e.transposed([e.load(args.x, vector(F32, 16), 64 * i) for i in range(16)])):
            e.store(column, args.y, 64 * number)

    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    y = np.empty_like(x)
    run(Kernel("transpose", emit, declared("x y")), level, 1, (x, y))
    np.testing.assert_array_equal(y, x.T)
