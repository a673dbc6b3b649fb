"""Tiles as float32, at every level of CPU features, against the codecs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from tests.backends.native.codecs import attend
from tests.codecs.data import TABLED
from tests.jit.levels import run, some_levels

from polarlm.engine.backends.native import codecs as tiles  # isort: skip
from polarlm.engine.backends.native.kernels.attention.decoding import Decoding, decode  # isort: skip
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.isa.levels import Level

NAMES = (*TABLED, "ring4+norm16", "f16", "q8_0", "q4_0", "polarquant", "polarquant+none")


def check(name: str, level: Level, n: int, d: int, seed: int) -> None:
    """Blocks 3, 0, 0 of two heads, with means of 8 or 16 bits or none."""
    rng, codec, (heads, blocks) = np.random.default_rng(seed), codecs.get(name), (2, 4)
    bits = (0, 8, 16)[seed % 3]
    fields = [attend.random_fields(rng, codec, (heads, blocks), n, d) for _ in range(2)]
    keys, values = tiles.keys(codec, n, d), tiles.values(codec, n, d)
    assert keys is not None
    assert values is not None
    memory = [side.pack(own) for side, own in zip((keys, values), fields, strict=True)]
    ids = np.array([3, 0, 0], np.int64)
    wanted = [codec.decode(own).astype(np.float64)[:, ids] for own in fields]
    scale = rng.uniform(0.01, 0.1, (heads, blocks)).astype(np.float16)
    mean = rng.integers(-127, 128, (heads, blocks, d)).astype(np.int8 if bits == 8 else np.float16)
    if bits:
        own = mean * scale[..., None].astype(np.float64) if bits == 8 else mean.astype(np.float64)
        wanted[0] = wanted[0] + own[:, ids, None]
    found = np.full((2, heads, len(ids), n, d), np.nan, np.float32)
    kernel = decode(Decoding(keys, values, bits, n, d))
    run(kernel, level, heads * len(ids), attend.decoded(memory, ids, found, mean, scale))
    for side, exact in zip(found, wanted, strict=True):
        assert (np.abs(side - exact) <= 1e-5 * np.abs(exact).max(axis=-1, keepdims=True)).all()


@some_levels
@pytest.mark.parametrize("name", ["f16", "ring3.5", "trellis4", "turbo3", "q4_0", "polarquant"])
def test_tiles_are_decoded(name: str, level: Level) -> None:
    check(name, level, 64, 96 if name == "q4_0" else 80, 1)


@pytest.mark.slow
@given(
    st.sampled_from(NAMES),
    st.sampled_from([16, 24, 48, 64, 128, 256]),
    st.sampled_from([16, 48, 64]),
    st.integers(0, 9),
)
@settings(max_examples=15)
def test_tiles_of_all_codecs_and_sizes_are_decoded(name: str, d: int, n: int, seed: int) -> None:
    check(name, best(), n, -(-d // 32) * 32 if name.startswith("q") else d, seed)
