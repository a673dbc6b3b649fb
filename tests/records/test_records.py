"""The bytes of records: how many there are, and that those of a version stay what they are. What is packed is
unpacked: `tests/backends/test_transfer.py`."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

from polarlm.engine import codecs, records
from polarlm.engine.records.fragments import Geometry
from tests.pairs import in_turn

HEAD_DIMS = [8, 16, 48, 64, 80, 96, 128, 256]
BLOCK_SIZES = [16, 32, 64, 128]


def twins() -> list[str]:
    """Every codec that has a twin, with norms of either kind."""
    names = [name + option for name in codecs.available() for option in ("", "+norm16") if "ring" in name or not option]
    return [name for name in names if records.record_of(codecs.get(name), Geometry(False, 64, 64))]


def test_a_record_adds_less_than_a_line_to_the_codec_s_bits() -> None:
    """A record has the bits of the codec's own fields, where tiles and words are full, and less than a line more."""
    for name, values in itertools.product(["f16", "ring3", "ring3.5", "ring4", "ring5", "turbo3"], [False, True]):
        codec = codecs.get(name)
        stored = 64 * 128 * codecs.bits_per_value(codec, 64, 128) / 8
        assert stored <= records.layout(codec, values, 64, 128).nbytes < stored + 128


@in_turn("name", twins())
def test_sections_and_tables_are_aligned(name: str) -> None:
    for head_dim, block_size in itertools.product(HEAD_DIMS, BLOCK_SIZES):
        codec = codecs.get(name)
        if records.record_of(codec, Geometry(False, block_size, head_dim)) is None:
            continue
        layout = records.layout(codec, False, block_size, head_dim, 8)
        assert layout.nbytes % 128 == 0
        assert layout.record.tables.dtype == np.uint8
        assert layout.record.tables.nbytes % 16 == 0


# Name → checksum of the fields that random bytes of keys and of values stand for, in five shapes. Session files hold
# records: whoever changes their bytes changes `records.VERSION`.
CHECKSUMS = {
    "f16": 3502100457,
    "linear8": 3252043109,
    "polarpair-m4n4": 834675235,
    "polarpair-m4n2": 4139721341,
    "polarquant": 3548315414,
    "ring2.5": 2622695087,
    "ring2.5+norm16": 3063169778,
    "ring3": 1929782834,
    "ring3+norm16": 1778942783,
    "ring3.5": 2709558311,
    "ring3.5+norm16": 2809243122,
    "ring4": 2027652924,
    "ring4+norm16": 4267991224,
    "ring5": 3079785064,
    "ring5+norm16": 301998326,
    "turbo2": 3020734576,
    "turbo3": 1778942783,
    "turbo4": 4267991224,
}


@pytest.mark.parametrize("name", twins())
def test_the_bytes_of_a_version_stay_what_they_are(name: str) -> None:
    assert records.VERSION == 2
    codec, rng, checksum = codecs.get(name), np.random.default_rng(0), 0
    shapes = itertools.product((False, True), ((64, 16), (24, 64), (80, 32), (128, 128), (144, 64)))
    for values, (head_dim, block_size) in shapes:
        if records.record_of(codec, Geometry(values, block_size, head_dim)) is None:
            continue
        layout = records.layout(codec, values, block_size, head_dim, 0 if values else 8)
        fields, means = layout.unpack(rng.integers(0, 256, layout.nbytes, np.uint8))
        for _, field in sorted({**fields, **means}.items()):
            checksum = zlib.crc32(np.ascontiguousarray(field).tobytes(), checksum)
    assert checksum == CHECKSUMS[name]
