"""Objects: their bytes come back as they went in, and no damaged ones do."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import codecs
from polarlm.engine.backends import transfer
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.storage import objects
from polarlm.engine.storage.objects import DamagedObject, Object, unpack
from polarlm.engine.storage.payloads import Payloads, join

NAME = bytes(range(16))


def payloads(type: str = "ring4", windows=(None, 12)) -> Payloads:
    codec = codecs.get(type)
    return Payloads(CacheShape(8, tuple(LayerShape(codec, codec, 2, 64, 8, window) for window in windows)))


def packed(header: dict, payload: np.ndarray) -> bytes:
    return b"".join(Object(header, payload).pack(NAME))


def block(made: Payloads, groups: int = 3, *, broken: bool = False) -> bytes:
    """A block whose arrays hold random codes and finite floats; one number is NaN if `broken`."""
    extents, size = made.quantized_extents(transfer.FIELDS, groups)
    rows = np.random.default_rng(1).integers(0, 255, (1, size)).astype(np.uint8)
    for extent in extents:
        if extent.dtype.kind == "f":
            extent.view_rows(rows)[...] = np.nan if broken else 0.5
    return packed({"kind": "block", "stored_as": transfer.FIELDS, "groups": groups}, rows)


def full(made: Payloads, ids: list[int], value: float = 0.25) -> bytes:
    rows = join(*made.full_extents(len(ids), 3), defaultdict(lambda: np.array(value)))
    return packed({"kind": "full", "groups": 3, "ids": ids}, rows)


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


@pytest.mark.parametrize("header", ["null", "{", "[" * 100_000], ids=["no header", "no JSON", "deep"])
def test_a_header_that_is_none_is_damage(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.json, "dumps", lambda *_, **__: header)
    content = packed({}, np.zeros(8, np.uint8))
    with pytest.raises(DamagedObject, match="header"):
        unpack(NAME, content)


HEADERS = [
    {"kind": "full"},
    {"kind": None},
    {"groups": 0},
    {"groups": 4},
    {"groups": True},
    {"groups": "3"},
    {"stored_as": "records 999"},
    {"stored_as": ["fields"]},
    {"stored_as": transfer.RECORDS},
]


def test_a_header_of_another_block_is_damage() -> None:
    for change in HEADERS:
        made = payloads()
        read = unpack(NAME, block(made))
        made.check_block(read)
        with pytest.raises(DamagedObject):
            made.check_block(Object({**read.header, **change}, read.payload))


def test_ids_that_do_not_fit_the_block_are_damage() -> None:
    for ids in (None, 5, [], ["5"], [-1], [1 << 31], [True], [1.5], list(range(9)), [1, 2]):
        made = payloads()
        read = unpack(NAME, full(made, [1, 2, 3]))
        with pytest.raises(DamagedObject):
            made.check_full(Object({**read.header, "ids": ids}, read.payload))


@pytest.mark.parametrize("stored_as", [transfer.TILES, transfer.RECORDS])
def test_bytes_are_checked_as_fields_are(stored_as: str) -> None:
    codec = codecs.get("ring4+norm16")
    made = Payloads(CacheShape(64, (LayerShape(codec, codec, 2, 64, 8),)))
    _, size = made.quantized_extents(stored_as, 1)
    header = {"kind": "block", "stored_as": stored_as, "groups": 1}
    made.check_block(Object(header, np.zeros(size, np.uint8)))
    with pytest.raises(DamagedObject, match="finite"):  # all float16 numbers are NaN
        made.check_block(Object(header, np.full(size, 255, np.uint8)))


def test_a_header_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "json", None)
    with pytest.raises(DamagedObject):
        unpack(NAME, objects._FIELDS.pack(objects._MAGIC, NAME, 3 << 20, 0) + bytes(32 + (3 << 20)))


@pytest.mark.parametrize("sizes", [(10**9, 0), (0, 10**18), (0, 8), (64, 0)])
def test_a_file_that_claims_more_than_it_has_is_damaged(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """And takes no memory for it."""
    file = tmp_path / "file"
    file.write_bytes(objects._FIELDS.pack(objects._MAGIC, NAME, *sizes) + bytes(32))
    with file.open("rb") as opened, pytest.raises(DamagedObject):
        objects.read(opened, NAME)
