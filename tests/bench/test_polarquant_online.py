"""PolarQuant with learned codebooks: not worse than the constants, and better where angles are not Gaussian."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from polarlm.bench.quality import peers
from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.codecs import Codec
from tests.codecs.data import gaussian


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with peers.while_measured():
        yield


def outliers(tokens: int, head_dim: int) -> np.ndarray:
    """Keys before a rotation: channels of very different magnitude, some far from zero. Blocks of 64."""
    x = gaussian(tokens, head_dim)
    x *= np.geomspace(0.1, 3, head_dim, dtype=np.float32)
    x[:, 3::16] *= 10
    x[:, 5::16] += 6
    return x.reshape(-1, 64, head_dim)


def error(codec: Codec, x: np.ndarray) -> float:
    return float(np.square(codec.decode(codec.encode(x)) - x).mean())


@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128])
def test_at_least_as_good_as_offline_where_angles_are_not_gaussian(head_dim: int) -> None:
    x = outliers(2048, head_dim)
    assert error(codecs.get("polarquant-online+none"), x) <= error(codecs.get("polarquant+none"), x)


def test_as_many_directions_as_codes_are_coded_without_error() -> None:
    """Sixteen angles that are not equally spaced: only the radius is rounded."""
    random = np.random.default_rng(0)
    directions = np.sort(np.concatenate([random.uniform(0.1, 0.5, 8), random.uniform(3, 4, 8)]))
    angle = directions[random.integers(0, 16, (64, 8))]
    x = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(64, 16).astype(np.float32)
    codec = codecs.get("polarquant-online+none")
    assert error(codec, x) < 1e-6 < error(codecs.get("polarquant+none"), x)
    assert np.allclose(codec.codebook[1], directions, atol=1e-6)


def test_the_first_nonzero_blocks_fix_the_codebook() -> None:
    codec, x = codecs.get("polarquant-online"), outliers(256, 64)
    codec.encode(np.zeros((64, 64), np.float32))
    assert not codec.codebook
    codec.encode(x)
    learned = {level: centres.copy() for level, centres in codec.codebook.items()}
    codec.encode(gaussian(4, 64, 64))
    assert all(np.array_equal(codec.codebook[level], centres) for level, centres in learned.items())


def test_every_layer_has_a_codebook_of_its_own(rng: np.random.Generator) -> None:
    ops, types = NumpyOps(), ("polarquant-online", "ring4")
    caches = [ops.cache(CacheFormat(*map(codecs.get, types), None, None, 0, 8, 2, 16), 1, 1) for _ in range(3)]
    for cache in caches:
        ops.write_full(cache, 0, *rng.standard_normal((2, 2, 8, 16)).astype(np.float32))
    ops.encode_blocks([FilledBlocks(caches, [0], [KVLocation(None, 0)])])
    learned = [cache.format.codec_k.codebook for cache in caches]
    assert all(learned)
    assert not np.array_equal(learned[0][1], learned[1][1])
