"""Chooses the level of CPU features: the highest whose kernels give right results on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.product_ops.products import LinearOps
from polarlm.engine.errors import KernelError
from polarlm.engine.jit.compile.target import permitted_levels
from polarlm.engine.jit.lang import I8, I32, Emitter, Kernel, Level, Pointer, Value, vector
from polarlm.engine.weight_formats import Linear, WeightFormat, get


class Choice(NamedTuple):
    """A level, and a sentence why it is not a higher one; empty for the highest."""

    level: Level
    note: str


def choose() -> Choice:
    """The level of this process. Raises KernelError if none works, EngineError if POLARLM_CPU_LEVEL names none."""
    return _first_that_works(tuple(reversed(permitted_levels())))


@cache
def _first_that_works(levels: tuple[Level, ...]) -> Choice:
    failure: KernelError | None = None
    for level in levels:
        try:
            check(level)
        except KernelError as error:
            failure = failure or error
        else:
            return Choice(level, f"{failure}; kernels of the level {level.name} are used." if failure else "")
    assert failure is not None
    raise failure


def check(level: Level) -> None:
    """Run a few kernels of this level. Raises KernelError if they fail or give wrong results."""
    launch, bytes_ = Launcher(1, level), _test_bytes(3, 64)
    unsigned = bytes_[0].view(np.uint8) & 127, bytes_[1].view(np.uint8)
    dots = np.zeros((2, 16), np.int32)
    looked_up = np.zeros(64, np.uint8)
    table = (91 * np.arange(256) + 17).astype(np.uint8)  # a permutation
    launch(_BYTES, 1, _Arguments(*unsigned, b=bytes_[2], table=table, dots=dots, looked_up=looked_up))
    expected = [(a.astype(np.int32) * bytes_[2]).reshape(16, 4).sum(axis=1) for a in unsigned]
    is_right = np.array_equal(dots, expected) and np.array_equal(looked_up, table[bytes_[2].view(np.uint8)])

    ops, weights = LinearOps(launch), np.empty((20, 96), np.float32)
    blocks = np.empty((20, 3), _BLOCK)
    blocks["scale"], blocks["codes"] = (1 + np.arange(60).reshape(20, 3) / 60) / 100, _test_bytes(20, 3, 32)
    matrix = _Q8Matrix(blocks)
    matrix.dequantize(weights)
    loaded = Linear(ops.load([matrix]))
    for rows in (1, 20) if level.matrices else (1,):
        launch.input_bits = "16" if rows == 1 else "bf16"
        x = _test_bytes(rows, 96) / np.float32(64)
        error = np.abs(ops.linear(x, loaded) - x @ weights.T).max()  # the kernel rounds x to int16, or all to bfloat16
        is_right = is_right and bool(error < (0.01 if rows == 1 else 0.1))
    if not is_right:
        raise KernelError(f"Kernels of the level {level.name} give wrong results on this CPU")


def _test_bytes(*shape: int) -> np.ndarray:
    """int8 (*shape), −127 to 127: hashes of 1, 2, 3 and so on, since numpy.random takes 9 ms to import."""
    numbers = np.arange(1, 1 + math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B1)
    numbers = (numbers ^ (numbers >> 15)) * np.uint32(0x85EBCA6B)
    return ((numbers >> 16).astype(np.int32) % 255 - 127).astype(np.int8).reshape(shape)


_BLOCK = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])  # a block of Q8_0


@dataclass(frozen=True)
class _Q8Matrix:
    """A `StoredMatrix` of Q8_0. blocks: (rows, blocks). Importing a quantizer would cost megabytes of memory."""

    blocks: np.ndarray
    format: WeightFormat = field(default_factory=lambda: get("q8_0"))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), self.blocks.shape[1] * self.format.values

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        rows = len(self.blocks)
        yield slice(0, rows), self.blocks.view(np.uint8).reshape(rows, -1)

    def dequantize(self, out: np.ndarray) -> None:
        scaled = self.blocks["scale"][..., None].astype(np.float32) * self.blocks["codes"]
        out[...] = scaled.reshape(out.shape)


class _Arguments(NamedTuple):
    small: Pointer
    any: Pointer
    b: Pointer
    table: Pointer
    dots: Pointer
    looked_up: Pointer


def _emit_bytes(e: Emitter, args: _Arguments, begin: Value, end: Value, scratch: Value) -> None:
    lanes, bytes_ = vector(I32, 16), vector(I8, 64)
    zero, right = e.zero(lanes), e.load(args.b, lanes)
    e.store(e.level.dot4(e, zero, e.load(args.small, lanes), right, fits=True), args.dots)
    e.store(e.level.dot4(e, zero, e.load(args.any, lanes), right), args.dots, 64)
    e.store(e.level.table(e, args.table, 256)(e.load(args.b, bytes_)), args.looked_up)


_BYTES = Kernel("self_test", _emit_bytes, _Arguments)
