"""Streams and their fields, and the sections of tiles and records: they round trip, in any order, with padding."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.codecs.schema.planes import Planes
from polarlm.engine.codecs.schema.sections import Section, Sections, arrange, numbered
from polarlm.engine.codecs.schema.streams import Stream, codes, numbers

BITS = (2, 3, 4, 6, 7, 8, 10)


def values(stream: Stream, lead: tuple[int, ...], seed: int) -> np.ndarray:
    below = 2 ** (stream.bits or 8)
    return np.random.default_rng(seed).integers(0, below, (*lead, *stream.shape)).astype(stream.dtype)


@given(st.sampled_from(BITS), st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(0, 99))
def test_codes_round_trip_and_fill_every_byte(bits: int, tokens: int, eighths: int, blocks: int, seed: int) -> None:
    stream = codes(bits, tokens, 8 * eighths)
    x = values(stream, (2, blocks), seed)
    field = stream.pack(x)
    assert field.shape == (2, blocks, *stream.field.shape)
    assert 8 * stream.field.nbytes == bits * math.prod(stream.shape)
    back = stream.unpack(field)
    assert back.dtype == x.dtype
    assert np.array_equal(back, x)
    if blocks:
        assert np.array_equal(stream.pack(x[0, 0]), field[0, 0])


def test_an_order_cuts_axes_and_fills_them_up() -> None:
    assert arrange(np.arange(6).reshape(2, 3), ((2,), (2, 2)), (1, 0, 2)).tolist() == [
        [[0, 1], [3, 4]],
        [[2, 0], [5, 0]],
    ]


@given(st.sampled_from(BITS), st.integers(1, 3), st.integers(1, 8), st.permutations(range(4)), st.integers(0, 99))
def test_sections_round_trip_in_any_order(bits: int, halves: int, width: int, order: list[int], seed: int) -> None:
    stream, scale = codes(bits, 4 * halves, width), numbers(np.float16, 4 * halves)
    cuts = (halves, 4), (-(-width // 4), 4)
    places = arrange(numbered(*stream.shape), cuts, order).reshape(2, -1, halves)
    both = Sections(
        (
            Section("codes", stream, places, Planes(bits) if stream.bits else None),
            Section.numbers("scale", scale, ((halves, 4),), (1, 0)),
            Section.numbers("one", numbers(np.uint8)),
        ),
        alignment=4,
        line=32,
    )
    stored = {
        "codes": values(stream, (3, 2), seed),
        "scale": values(scale, (3, 2), seed + 1),
        "one": np.full((3, 2), 7, np.uint8),
    }
    raw = both.pack(stored)
    assert raw.shape == (3, 2, both.nbytes)
    assert both.nbytes % 32 == 0
    assert all(offset % 4 == 0 for offset in both.offsets)
    back = both.unpack(raw)
    assert back.keys() == stored.keys()
    for name, x in stored.items():
        assert back[name].dtype == x.dtype
        assert np.array_equal(back[name], x)
