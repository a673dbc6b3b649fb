"""The device's codecs read what Python has laid out, and lay out what Python would have: through the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import codecs, records
from polarlm.engine.backends.cuda.device.kernel_source import with_readers
from polarlm.engine.codecs.parts.norms import ByteNorm
from polarlm.engine.quantization.conditioning import centre, read_mean
from polarlm.engine.records import Layout
from tests.codecs.data import TABLED, stored_norms
from tests.cuda.programs import Program
from tests.cuda.readers import ENCODE, PACK, read, text

SEEDS = [0, 1, 2]
HALF_EPS, HALF_TINY = 2.0**-10, 2.0**-24  # distance of halves: relative to them, and of the smallest

NAMES = [*TABLED, "ring3.5+norm16"]
# (head dim, block size): every number of tokens and channels that differs in kind appears with every codec.
SHAPES = [(64, 64), (8, 16), (48, 32), (144, 64), (16, 128), (80, 32), (256, 16), (24, 64)]


def random_codes(layout: Layout, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes of any value, (N, D / width), and norms (N,) float32 that are stored as anything a norm can be."""
    shape, points = layout.record.geometry, layout.record.constants["POINTS"]
    width = layout.record.constants["WIDTH"]
    dtype = np.uint8 if points <= 256 else np.uint16
    codes = rng.integers(0, points, (shape.block_size, shape.head_dim // width), dtype)
    norms = np.exp2(rng.uniform(-26, 17, shape.block_size)).astype(np.float32)
    norms[:3] = 0, 1, np.inf
    norms[3:11] = ByteNorm().thresholds[rng.integers(0, 255, 8)]  # a norm on a threshold takes the code above
    return codes, norms


# Two shapes for each codec: every number of tokens and channels that differs in kind appears with every codec.
CASES = [
    (name, bool((i + step) % 2), *SHAPES[(i + step) % len(SHAPES)]) for i, name in enumerate(NAMES) for step in (0, 3)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values", "head_dim", "block_size"), CASES)
def test_every_codec_is_read_and_packed(
    rng: np.random.Generator, name: str, values: bool, head_dim: int, block_size: int
) -> None:
    """On the device, as in NumPy; each codec has code of its own."""
    test_readers_give_the_points_of_codes_and_the_stored_norms(rng, name, values, head_dim, block_size)
    test_packing_on_the_device_gives_the_bytes_of_numpy(rng, name, values, head_dim, block_size)


some_codecs = pytest.mark.parametrize(("name", "values", "head_dim", "block_size"), CASES[::6])


@some_codecs
def test_readers_give_the_points_of_codes_and_the_stored_norms(
    rng: np.random.Generator, name: str, values: bool, head_dim: int, block_size: int
) -> None:
    codec = codecs.get(name)
    layout = records.layout(codec, values, block_size, head_dim)
    codes, norms = random_codes(layout, rng)
    fields = codec.rounding.assemble(codes, norms)
    decoded = codec.decode(fields)
    stored = stored_norms(codec, norms)
    for seed in SEEDS:
        got, factors, _ = read(layout, layout.pack(fields), seed)
        np.testing.assert_array_equal(factors, stored)
        # Points are rounded to half; product and decode to float32.
        allowed = np.maximum(HALF_EPS / 2 * np.abs(decoded), HALF_TINY / 2 * stored[:, None]) * (1 + 1e-3)
        assert (np.abs(got.astype(np.float64) * stored[:, None] - decoded) <= allowed).all()


@pytest.mark.parametrize(("values", "head_dim", "block_size"), [(False, 8, 16), (True, 136, 32)])
def test_readers_of_halves_give_the_values(
    rng: np.random.Generator, values: bool, head_dim: int, block_size: int
) -> None:
    layout = records.layout(codecs.get("f16"), values, block_size, head_dim)
    x = rng.standard_normal((block_size, head_dim)).astype(np.float16)
    got, factors, _ = read(layout, layout.pack({"values": x}))
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(factors, np.ones(block_size))


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"), [("ring3", 48, 16), ("f16", 8, 8), ("turbo4", 136, 8), ("turbo4", 136, 16)]
)
def test_readers_give_the_stored_means(rng: np.random.Generator, name: str, head_dim: int, bits: int) -> None:
    codec = codecs.get(name)
    layout = records.layout(codec, False, 16, head_dim, bits)
    keys = rng.standard_normal((16, head_dim)).astype(np.float32) + 100 * rng.standard_normal(head_dim)
    residual, mean_fields = centre(keys.astype(np.float32), bits)
    _, _, mean = read(layout, layout.pack(codec.encode(residual), mean_fields))
    np.testing.assert_array_equal(mean, read_mean(mean_fields))


@some_codecs
def test_packing_on_the_device_gives_the_bytes_of_numpy(
    rng: np.random.Generator, name: str, values: bool, head_dim: int, block_size: int
) -> None:
    codec = codecs.get(name)
    layout = records.layout(codec, values, block_size, head_dim)
    codes, norms = random_codes(layout, rng)
    expected = layout.pack(codec.rounding.assemble(codes, norms))
    shared = 4 * norms.size + 2 * codes.size
    for seed in SEEDS:
        record = np.zeros(layout.nbytes, np.uint8)
        args = (record, codes.astype(np.uint16), norms, layout.tables)
        Program(text(PACK, layout)).launch("pack_kernel", (1,), (96,), *args, shared=shared, seed=seed)
        np.testing.assert_array_equal(record, expected)


@pytest.mark.parametrize(("values", "head_dim", "block_size"), [(False, 8, 16), (True, 136, 32)])
def test_rounding_to_halves_on_the_device_gives_the_bytes_of_numpy(
    rng: np.random.Generator, values: bool, head_dim: int, block_size: int
) -> None:
    codec = codecs.get("f16")
    layout = records.layout(codec, values, block_size, head_dim)
    x = (10 ** rng.uniform(-9, 6, (block_size, head_dim)) * rng.choice([-1, 1], head_dim)).astype(np.float32)
    record = np.full(layout.nbytes, 0xFF, np.uint8)
    run = Program(text(ENCODE, layout))
    run.launch("encode_kernel", (1,), (64,), record, x, layout.tables, shared=x.nbytes)
    np.testing.assert_array_equal(record, layout.pack(codec.encode(x)))


# The first registers of both sides' last tiles, (32,) words each, with both sides' tables in place.
BOTH = """#line 2 "cuda/both.cu"
extern "C" __global__ void __launch_bounds__(256) both_kernel(
    unsigned *key_out, unsigned *value_out, const unsigned char *key, const unsigned char *value,
    const unsigned char *key_tables, const unsigned char *value_tables) {
    using Tables = SharedTables<KeyCodec, ValueCodec>;
    DYNAMIC_SHARED(unsigned char, shared);
    Tables::fill<64>(shared, key_tables, value_tables);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    KeyCodec::Codes key_codes;
    key_codes.load(key, 0, lane);
    ValueCodec::Codes value_codes;
    value_codes.load(value, 0, lane);
    KeyCodec::Decoder keys(key_codes, Tables::keys(shared), lane);
    ValueCodec::Decoder values(value_codes, Tables::values(shared), lane);
    unsigned a[4], b[4];
#pragma unroll
    for (int t = 0; t < KeyLayout::TILES; ++t) keys.next(t, a), values.next(t, b);
    if (threadIdx.x < 32) key_out[lane] = a[0], value_out[lane] = b[0];
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("key_name", "value_name"), [("ring4", "turbo3"), ("ring5", "ring3"), ("f16", "ring3.5")])
def test_tables_of_both_sides_share_rows_without_overlap(
    rng: np.random.Generator, key_name: str, value_name: str
) -> None:
    outs, packed, tables, layouts, expected = [], [], [], [], []
    for name, values in ((key_name, False), (value_name, True)):
        layout = records.layout(codecs.get(name), values, 32, 32)
        record = layout.pack(codecs.get(name).encode(rng.standard_normal((32, 32)).astype(np.float32)))
        alone = layout.record.geometry.halves(read(layout, record)[0]).reshape(-1, 32, 8)[-1]
        expected.append(np.ascontiguousarray(alone[:, :2]).view(np.uint32).ravel())
        outs.append(np.zeros(32, np.uint32))
        packed.append(record), tables.append(layout.tables), layouts.append(layout)
    shared = records.table_bytes(*layouts)
    for seed in SEEDS:
        run = Program(with_readers(BOTH, *layouts))
        run.launch("both_kernel", (1,), (64,), *outs, *packed, *tables, shared=shared, seed=seed)
        np.testing.assert_array_equal(outs, expected)
