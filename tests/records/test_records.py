"""The bytes of records: what `cuda/fragments.cuh` says of them, written a second time, lane by lane."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import codecs, records
from polarlm.engine.codecs.schema.planes import Planes
from polarlm.engine.codecs.schema.sections import Section, numbered
from polarlm.engine.codecs.schema.streams import codes as codes_stream
from polarlm.engine.quantization.conditioning import centre
from polarlm.engine.records.fragments import Geometry, Words
from tests.pairs import in_turn

HEAD_DIMS = [8, 16, 48, 64, 80, 96, 128, 256]
BLOCK_SIZES = [16, 32, 64, 128]
PAIR_BITS = [4, 6, 7, 8, 10]


def twins() -> list[str]:
    """Every codec that has a twin, with norms of either kind."""
    names = [name + option for name in codecs.available() for option in ("", "+norm16") if "ring" in name or not option]
    return [name for name in names if records.record_of(codecs.get(name), Geometry(False, 64, 64))]


@given(data=st.data())
@in_turn("name", twins())
def test_records_unpack_to_the_fields_they_were_packed_from(name: str, data: st.DataObject) -> None:
    codec = codecs.get(name)
    head_dim, block_size = data.draw(st.sampled_from(HEAD_DIMS)), data.draw(st.sampled_from(BLOCK_SIZES))
    values = data.draw(st.booleans()) and "v" in codec.serves
    bits = 0 if values else data.draw(st.sampled_from([0, 8, 16]))
    if records.record_of(codec, Geometry(values, block_size, head_dim)) is None:
        return
    layout = records.layout(codec, values, block_size, head_dim, bits)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x, mean_fields = 3 * rng.standard_normal((2, 1, block_size, head_dim)).astype(np.float32), {}
    if bits:
        x, mean_fields = centre(x, bits)
    fields = codec.encode(x)
    packed = layout.pack(fields, mean_fields)
    assert packed.shape == (2, 1, layout.nbytes)
    for before, after in zip((fields, mean_fields), layout.unpack(packed), strict=True):
        assert before.keys() == after.keys()
        for field in before:
            assert before[field].dtype == after[field].dtype
            np.testing.assert_array_equal(before[field], after[field])
    np.testing.assert_array_equal(layout.pack(*layout.unpack(packed)), packed)


def test_a_record_adds_less_than_a_line_to_the_codec_s_bits() -> None:
    """A record has the bits of the codec's own fields, where tiles and words are full, and less than a line more."""
    for name, values in itertools.product(["f16", "ring3", "ring3.5", "ring4", "ring5", "turbo3"], [False, True]):
        codec = codecs.get(name)
        stored = 64 * 128 * codecs.bits_per_value(codec, 64, 128) / 8
        assert stored <= records.layout(codec, values, 64, 128).nbytes < stored + 128


def test_every_constant_reaches_the_struct() -> None:
    layout = records.layout(codecs.get("ring3.5"), False, 64, 80, 8)
    text = layout.text("Any")
    assert text.startswith("struct Any {\n")
    for name, value in {"N": 64, "D": 80, "DP": 80, "PT": 4, "STEPS": 5, "TILES": 20, "WORDS": 18, "BITS": 7}.items():
        assert f"    static constexpr int {name} = {value};\n" in text
    assert f"NBYTES = {layout.nbytes};" in text


@in_turn("name", twins())
def test_sections_and_tables_are_aligned(name: str) -> None:
    for head_dim, block_size in itertools.product(HEAD_DIMS, BLOCK_SIZES):
        codec = codecs.get(name)
        if records.record_of(codec, Geometry(False, block_size, head_dim)) is None:
            continue
        layout = records.layout(codec, False, block_size, head_dim, 8)
        assert layout.nbytes % 128 == 0
        assert layout.record.nbytes % 16 == 0
        assert layout.tables.dtype == np.uint8
        assert layout.tables.nbytes % 16 == 0


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (24, 64), (144, 64)])
def test_keys_are_in_fragment_order(head_dim: int, block_size: int) -> None:
    shape = Geometry(False, block_size, head_dim)
    part, steps = min(block_size, 64 if head_dim <= 128 else 32), -(-head_dim // 16)
    x = np.arange(1, block_size * head_dim + 1).reshape(block_size, head_dim)
    codes = shape.pairs(x[:, ::2])
    halves = shape.halves(x).reshape(shape.parts, shape.tiles, 32, 4, 2)
    assert codes.shape == (block_size // part, part // 16 * steps, 32, 4)
    for p, s, i, g, tg, r in itertools.product(
        range(block_size // part), range(steps), range(part // 16), range(8), range(4), range(4)
    ):
        token, channel = p * part + 16 * i + g + 8 * (r & 1), 16 * s + 8 * (r >> 1) + 2 * tg
        expected = x[token, channel : channel + 2] if channel < head_dim else np.zeros(2)
        np.testing.assert_array_equal(halves[p, s * (part // 16) + i, 4 * g + tg, [0, 2, 1, 3][r]], expected)
        assert codes[p, s * (part // 16) + i, 4 * g + tg, r] == expected[0]


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (24, 64), (144, 64)])
def test_values_are_in_fragment_order(head_dim: int, block_size: int) -> None:
    shape = Geometry(True, block_size, head_dim)
    part, steps = min(block_size, 64 if head_dim <= 128 else 32), -(-head_dim // 16)
    x = np.zeros((block_size, 16 * steps))
    x[:, :head_dim] = np.arange(1, block_size * head_dim + 1).reshape(block_size, head_dim)
    codes = shape.pairs(x[:, :head_dim:2])
    halves = shape.halves(x[:, :head_dim]).reshape(shape.parts, shape.tiles, 32, 4, 2)
    for p, u, j, g, tg, r in itertools.product(
        range(block_size // part), range(part // 16), range(steps), range(8), range(4), range(4)
    ):
        tile, first = u * steps + j, p * part + 16 * u + 8 * (r >> 1) + 2 * tg
        expected = x[first : first + 2, 16 * j + 2 * g + (r & 1)]
        np.testing.assert_array_equal(halves[p, tile, 4 * g + tg, [0, 2, 1, 3][r]], expected)
        assert codes[p, tile, 4 * g + tg, r] == x[first + (r & 1), 2 * (8 * j + g)]


@pytest.mark.parametrize("values", [False, True])
def test_norms_are_ordered_by_row_and_means_by_column(values: bool) -> None:
    shape = Geometry(values, 128, 24)
    norms = shape.tokens(np.arange(128)).reshape(2, 8, 8)
    for part, g, i, h in itertools.product(range(2), range(8), range(4), range(2)):
        assert norms[part, g, 2 * i + h] == 64 * part + 16 * i + 8 * h + g
    means = shape.channels(np.arange(24)).reshape(4, 2, 4)
    for tg, s, k in itertools.product(range(4), range(2), range(4)):
        channel = 16 * s + 2 * tg + [0, 1, 8, 9][k]
        assert means[tg, s, k] == (channel if channel < 24 else 0)


def lane_words(packed: np.ndarray, lane: int, count: int) -> list[list[int]]:
    """The words of a lane out of one part's bytes, each as four bytes."""
    found = []
    for word in range(count):
        in_chunk = min(4, count - word // 4 * 4)
        at = word // 4 * 512 + lane * 4 * in_chunk + word % 4 * 4
        found.append([int(byte) for byte in packed[at : at + 4]])
    return found


@pytest.mark.parametrize("bits", PAIR_BITS)
def test_codes_are_packed_in_words_as_documented(rng: np.random.Generator, bits: int) -> None:
    for tiles in (1, 3, 6, 8, 20, 32):
        codes = rng.integers(0, 2**bits, (2, tiles, 32, 4)).astype(np.uint16)
        order, planes = numbered(2, tiles, 128), Planes(bits, tiles, top=True)
        words = Words((Section("codes", codes_stream(bits, *codes.shape), order, planes),))
        packed, count = words.pack({"codes": codes}), words.count
        assert packed.shape == (2 * count * 128,), tiles
        np.testing.assert_array_equal(words.unpack(packed)["codes"], codes, err_msg=str(tiles))
        for part, lane, r in itertools.product(range(2), [0, 5, 31], range(4)):
            own = lane_words(packed[part * count * 128 :], lane, count)
            for tile in range(tiles):
                assert code_of(own, r, tile, bits, tiles) == codes[part, tile, lane, r], tiles


def code_of(words: list[list[int]], r: int, tile: int, bits: int, tiles: int) -> int:
    """The code of register r of a tile."""
    if bits == 10:
        return words[tile][r] | (words[tiles + tile // 4][r] >> 2 * (tile % 4) & 3) << 8
    spare, count = 8 - bits, len(words)
    if tile < count:
        return words[tile][r] >> spare
    span = bits // spare
    digits = [words[(tile - count) * span + d][r] % 2**spare for d in range(span)]
    return sum(digit << spare * d for d, digit in enumerate(digits))


def test_tables_of_both_sides_share_rows() -> None:
    byte_norms, half_norms, exact = (
        records.layout(codecs.get(name), False, 64, 64) for name in ("ring4", "turbo4", "f16")
    )
    assert records.table_bytes(exact, exact) == 0
    assert records.table_bytes(exact, half_norms) == 256 * 256
    assert records.table_bytes(byte_norms, half_norms) == 264 * 256


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "kivi4"])
def test_codecs_without_a_kernel_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no GPU kernel"):
        records.layout(codecs.get(name), False, 64, 64)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "words"), [(24, 64, "not 24"), (96, 64, "64 tokens"), (64, 264, "264")]
)
def test_shapes_that_no_kernel_serves_are_refused(block_size: int, head_dim: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        records.layout(codecs.get("ring4"), True, block_size, head_dim)
