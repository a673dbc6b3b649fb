"""Blocks in every representation: what one backend has stored, every other one reads."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

from polarlm.engine import codecs
from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.transfer import FIELDS, RECORDS, TILES
from tests.codecs.data import random_fields
from tests.codecs.test_contract import NAMES, SHAPES
from tests.pairs import in_turn

B, K = 3, 2


def format_of(name: str, dim: int, size: int, mean_bits: int = 8) -> CacheFormat:
    """Of keys and values of this type, or of one side of it and half precision."""
    codec, plain = codecs.get(name), codecs.get(codecs.FULL)
    k, v = (codec if side in codec.serves else plain for side in "kv")
    return CacheFormat(k, v, None, None, mean_bits, size, K, dim)


def representations(format: CacheFormat) -> list[str]:
    """Those that layers of this format have."""
    try:
        transfer.layouts(format)
    except ValueError:
        return [FIELDS, TILES]
    return [FIELDS, TILES, RECORDS]


# Also records of several parts, and tiles that are not cut into whole runs.
MORE_SHAPES = [(144, 64), (64, 128), (48, 32), (80, 48)]


def serving() -> list[tuple[str, int, int]]:
    """Every codec with each shape that it serves."""
    actual = []
    for name in (*NAMES, "polarpair-m4n2+g32"):
        for dim, size in (*SHAPES, *MORE_SHAPES):
            with suppress(ValueError):
                codecs.get(name).check(dim, size)
                actual.append((name, dim, size))
    return actual


def random_blocks(format: CacheFormat, seed: int) -> dict[str, np.ndarray]:
    """As fields."""
    rng, sides = np.random.default_rng(seed), transfer.fields(format)
    return {
        f"{side}.{name}": x for side, fields in sides.items() for name, x in random_fields(rng, fields, (B, K)).items()
    }


@settings(max_examples=300)
@given(shape=st.sampled_from(serving()), mean_bits=st.sampled_from([0, 8, 16]), data=st.data())
def test_blocks_come_back_from_any_way_through_the_representations(
    shape: tuple[str, int, int], mean_bits: int, data: st.DataObject
) -> None:
    format = format_of(*shape, mean_bits)
    wanted = arrays = random_blocks(format, data.draw(st.integers(0, 1000)))
    for stored_as in data.draw(st.lists(st.sampled_from(representations(format)), min_size=1, max_size=5)):
        arrays = transfer.convert_blocks(format, B, arrays, stored_as)
        stored, plain = transfer.nbytes(format, stored_as), transfer.nbytes(format, FIELDS)
        assert sum(x.nbytes for x in arrays.values()) == B * stored
        if stored_as == TILES:  # of whole units they have few more bytes
            assert format.head_dim % 32 or plain <= stored < plain + plain // 16 + K * 128
    actual = transfer.convert_blocks(format, B, arrays, FIELDS)
    assert actual.keys() == wanted.keys()
    for name, array in wanted.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@in_turn("name dim size", serving()[::5])
def test_every_number_has_a_place_in_every_representation(name: str, dim: int, size: int) -> None:
    """And a number that is not finite is found there."""
    format = format_of(name, dim, size)
    fields = {name: x[:1] for name, x in random_blocks(format, 0).items()}
    floats = [name for name, x in fields.items() if x.dtype.kind == "f"]
    for stored_as in representations(format):
        masks = {name: mask.view(np.uint16) for name, mask in transfer.exponents(format, stored_as).items()}
        assert sum(np.count_nonzero(mask) for mask in masks.values()) == sum(fields[name].size for name in floats)
        for wrong in floats:
            broken = {**fields, wrong: fields[wrong].copy()}
            broken[wrong].flat[-1] = np.nan
            for given_, wanted in ((fields, 0), (broken, 1)):
                arrays = transfer.convert_blocks(format, 1, given_, stored_as)
                words = {name: np.ascontiguousarray(x).reshape(-1).view(np.uint16) for name, x in arrays.items()}
                actual = sum(
                    np.count_nonzero((words[name] & mask == mask) & (mask > 0)) for name, mask in masks.items()
                )
                assert actual == wanted


@pytest.mark.parametrize("stored_as", [FIELDS, TILES, RECORDS])
def test_arrays_of_other_blocks_are_refused(stored_as: str) -> None:
    format = format_of("ring4", 64, 64)
    arrays = transfer.convert_blocks(format, B, random_blocks(format, 1), stored_as)
    last = list(arrays)[-1]
    for wrong in ({**arrays, last: arrays[last][1:]}, {**arrays, last: arrays[last].view(np.int8)}, {}):
        with pytest.raises(ValueError, match="and not"):
            transfer.convert_blocks(format, B, wrong, FIELDS)
