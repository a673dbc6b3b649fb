"""Decoding of a tile's codes, in token order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.native.codecs.parts.packing import Packing
from polarlm.engine.codecs.parts.viterbi import SIGNS, flip
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I8, I16, I64, Value, vector


def emit_codes(e: Emitter, packing: Packing, block: Value, vectors: int, out: Value) -> None:
    """The codes of the first `vectors` vectors of a tile → out (vectors, 64) uint8.

    Ten-bit codes have their low bytes there; the high bits follow, in another (vectors, 64).
    """
    run = packing.run

    def write(at: Value, target: Value, count: int) -> None:
        for number, code in enumerate(packing.emit(e, at, count)):
            for plane, part in enumerate(code):
                e.store(part, target, 64 * (number + plane * vectors))

    with e.loop(0, vectors // run) as number:
        write(block + number * packing.nbytes(run), out + number * (64 * run), run)
    if rest := vectors % run:
        write(block + packing.nbytes(vectors - rest), out + 64 * (vectors - rest), rest)


def emit_points(
    e: Emitter,
    block: Value,
    packing: Packing,
    places: np.ndarray,
    points: np.ndarray,
    norms: Sequence[Sequence[Value]],
    out: Value,
    scratch: Value,
    *,
    flips: bool = False,
) -> None:
    """norm · point of each code, in token order → out (N, D) float32.

    places (N, C): index of each code in the tile. points (2^bits, width): what codes stand for. norms: a token's codes
    are cut into len(norms) equal groups; the norms (N,) of each, 16 tokens per vector. scratch: 4·N·D bytes. flips: see
    `PairCodec.flips`.
    """
    (tokens, codes), width = places.shape, points.shape[1]
    planes, group_codes = tokens * codes, codes // len(norms)
    code_tile = math.gcd(group_codes, 4)
    emit_codes(e, packing, block, planes // 64, scratch)
    norms_at = scratch + 2 * planes
    for row, own in enumerate(norms):
        for number, part in enumerate(own):
            e.store(part, norms_at, 4 * tokens * row + 64 * number)
    if flips:
        points = np.concatenate([flip(points, state) for state in range(len(SIGNS))])  # by state, then by code
    table, all_places = (e.constant_bytes(x.tobytes()) for x in (points.astype(np.float32), places.astype(np.uint16)))
    with e.loop(0, tokens) as token, e.loop(0, len(norms)) as group:
        previous = e.variable(e.i64(0))
        norm = e.load(norms_at + (group * tokens + token) * 4, F32)
        before = token * codes + group * group_codes
        with e.loop(before, before + group_codes, code_tile) as first:
            for i in range(code_tile):
                at = scratch + e.load(all_places + first * 2, I16, 2 * i).zext(I64)
                code = e.load(at, I8).zext(I64)
                if packing.bits > 8:
                    code = code | (e.load(at, I8, planes).zext(I64) << 8)
                entry = (previous.get() & 3) << packing.bits | code if flips else code
                previous.set(code)
                point = e.load(table + entry * (4 * width), vector(F32, width))
                e.store(point * norm, out + first * (4 * width), 4 * width * i)
