"""Codes in bytes: they fill every bit, and lie where `planes` says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.codecs.schema.planes import Planes

BITS = (2, 3, 4, 5, 6, 7, 8, 10)


@st.composite
def some_planes(draw: st.DrawFn) -> Planes:
    return Planes(draw(st.sampled_from(BITS)), draw(st.integers(0, 20)), draw(st.booleans()))


@given(some_planes(), st.integers(1, 40))
def test_pieces_hold_every_bit_of_a_code_once(planes: Planes, count: int) -> None:
    pieces = planes.pieces(count)
    of_codes = [(p.code, p.low + i) for p in pieces for i in range(p.bits)]
    of_bytes = [(p.byte, p.place + i) for p in pieces for i in range(p.bits)]
    assert sorted(of_codes) == [(code, bit) for code in range(count) for bit in range(planes.bits)]
    assert len(set(of_bytes)) == len(of_bytes)
    assert {byte for byte, _ in of_bytes} == set(range(-(-count * planes.bits // 8)))
    assert all(0 <= place < 8 for _, place in of_bytes)
    assert all(first.low == 0 for first in {p.code: p for p in reversed(pieces)}.values())


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (4, [0xA, 0xB], [0xBA]),
        (2, [0b01, 0b10, 0b11, 0b00], [0b00_11_10_01]),
        (6, [0b000001, 0b000010, 0b000011, 0b100111], [0b11_000001, 0b01_000010, 0b10_000011]),
        (7, [0, 1, 2, 3, 4, 5, 6, 0b1010011], [0x80, 0x81, 2, 3, 0x84, 5, 0x86]),
        (10, [0x101, 0x202, 0x303, 0x004], [1, 2, 3, 4, 0b00_11_10_01]),
    ],
)
def test_bytes_are_those_of_the_documentation(bits: int, codes: list[int], packed: list[int]) -> None:
    assert Planes(bits).pack(np.array(codes, np.uint16)[:, None])[:, 0].tolist() == packed


def test_codes_at_the_top_of_bytes_leave_the_lowest_bits_to_others() -> None:
    codes = np.array([1, 2, 3, 0b100111], np.uint8)[:, None]
    assert Planes(6, 4, top=True).pack(codes)[:, 0].tolist() == [0b000001_11, 0b000010_01, 0b000011_10]
