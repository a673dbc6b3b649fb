"""Objects of tiers: their bytes come back as they went in, and no damaged ones do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import codecs
from polarlm.engine.backends import transfer
from polarlm.engine.state.shapes import CacheShape, LayerShape
from polarlm.engine.storage.tiers import objects
from polarlm.engine.storage.tiers.objects import (
    BLOCK,
    FULL,
    HEADER_BYTES,
    DamagedObject,
    Payloads,
    pack,
    pack_ids,
    unpack,
)

NAME = bytes(range(16))


def payloads(type: str = "ring4", windows=(None, 12)) -> Payloads:
    codec = codecs.get(type)
    return Payloads(CacheShape(8, tuple(LayerShape(codec, codec, 2, 64, 8, window) for window in windows)))


def block(made: Payloads, stored_as: str = transfer.FIELDS, groups: int = 3, *, broken: bool = False) -> bytes:
    """A BLOCK whose arrays hold random codes and finite floats; one number is NaN if `broken`."""
    parts, size = made.of_blocks(stored_as, groups)
    rows = np.random.default_rng(1).integers(0, 255, (1, size)).astype(np.uint8)
    for part in parts:
        if part.dtype.kind == "f":
            part.of_rows(rows)[...] = np.nan if broken else 0.5
    representation, version = objects.representation_of(stored_as)
    header, payload = pack(NAME, BLOCK, rows, representation=representation, version=version, groups=groups)
    return header + payload


def full(made: Payloads, ids: list[int], value: float = 0.25, type: str = "<f4") -> bytes:
    parts, size = made.of_full(np.dtype(type), len(ids), 3)
    rows = np.zeros((1, size), np.uint8)
    rows[0, : 4 * len(ids)] = np.asarray(ids, "<i4").view(np.uint8)
    for part in parts:
        part.of_rows(rows)[...] = value
    header, payload = pack(NAME, FULL, rows, representation=np.dtype(type).itemsize, tokens=len(ids), groups=3)
    return header + payload


@pytest.mark.parametrize("ids", [[], [7], [5, 0, 2**31 - 1]])
def test_ids_come_back(ids: list[int]) -> None:
    header, payload = pack_ids(NAME, ids)
    assert objects.ids_of(unpack(NAME, header + payload)) == tuple(ids)


@pytest.mark.parametrize("type", ["<f2", "<f4"])
def test_full_blocks_come_back_with_their_ids(type: str) -> None:
    made = payloads()
    found = unpack(NAME, full(made, [4, 9, 1], type=type))
    assert made.check_full(found) == (4, 9, 1)
    parts, _ = made.of_full(np.dtype(type), 3, 3)
    assert all((part.of_rows(found.payload[None]) == 0.25).all() for part in parts)
    assert [(part.layer, part.name, part.shape) for part in parts] == [
        (layer, side, (2, 3, 64)) for layer in (0, 1) for side in "kv"
    ]


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_an_object_with_one_bit_flipped_is_damaged(at: int, bit: int) -> None:
    content = bytearray(block(payloads()))
    content[at % len(content)] ^= 1 << bit
    with pytest.raises(DamagedObject):
        unpack(NAME, content)


@given(st.integers(0, 10**6))
def test_an_object_cut_short_is_damaged(length: int) -> None:
    content = block(payloads())
    with pytest.raises(DamagedObject):
        unpack(NAME, content[: length % len(content)])


def test_an_object_of_another_name_or_with_more_bytes_is_damaged() -> None:
    content = block(payloads())
    with pytest.raises(DamagedObject):
        unpack(bytes(16), content)
    with pytest.raises(DamagedObject):
        unpack(NAME, content + b"\0")


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_block_is_checked_for_its_shape(groups: int) -> None:
    made = payloads()
    made.check_block(unpack(NAME, block(made, groups=groups)))
    for other in (payloads("ring5"), payloads(windows=(None, 12, 12))):
        with pytest.raises(DamagedObject):
            other.check_block(unpack(NAME, block(made, groups=3)))


def test_numbers_that_are_not_finite_are_damage() -> None:
    made = payloads()
    with pytest.raises(DamagedObject, match="finite"):
        made.check_block(unpack(NAME, block(made, broken=True)))
    with pytest.raises(DamagedObject, match="finite"):
        made.check_full(unpack(NAME, full(made, [1, 2], np.inf)))


def test_records_of_another_version_are_no_block() -> None:
    made = payloads()
    header, payload = pack(NAME, BLOCK, np.zeros(8, np.uint8), representation=1, version=999, groups=1)
    with pytest.raises(DamagedObject, match="version"):
        made.check_block(unpack(NAME, header + payload))


def test_records_are_checked_as_fields_are(tmp_path) -> None:
    codec = codecs.get("ring4")
    made = Payloads(CacheShape(64, (LayerShape(codec, codec, 2, 64, 8),)))
    parts, size = made.of_blocks(transfer.RECORDS, 1)
    assert [part.name for part in parts] == ["keys", "values"]
    representation, version = objects.representation_of(transfer.RECORDS)
    for value, is_right in ((0, True), (255, False)):  # of which all float16 numbers are 0, or NaN
        header, payload = pack(
            NAME, BLOCK, np.full(size, value, np.uint8), representation=representation, version=version, groups=1
        )
        found = unpack(NAME, header + payload)
        if is_right:
            made.check_block(found)
        else:
            with pytest.raises(DamagedObject, match="finite"):
                made.check_block(found)


def test_the_largest_object_is_known_beforehand() -> None:
    made = payloads()
    assert made.most_bytes() >= max(len(block(made)), len(full(made, list(range(8)))))
    assert len(block(made)) > HEADER_BYTES
