"""What tests of codecs encode."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs import Codec, FieldSpec
from polarlm.engine.codecs.parts.pair_codec import PairCodec
from polarlm.engine.codecs.schema.streams import pack, unpack

TABLED = [name for name in codecs.available() if isinstance(codecs.get(name), PairCodec)]
"""The cache types whose codes each stand for a point of a table: kernels read them all alike."""


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal values, `shape`, float32."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def random_fields(
    rng: np.random.Generator, fields: Mapping[str, FieldSpec], lead: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Any bytes (*lead, *shape); halves are finite, and norms, radii and steps not negative."""
    made = {}
    for name, field in fields.items():
        raw = rng.integers(0, 256, (*lead, field.nbytes), np.uint8)
        made[name] = raw.view(field.dtype).reshape(*lead, *field.shape)
        if field.dtype == np.float16:
            halves = rng.standard_normal(made[name].shape)
            made[name][...] = halves if name in ("values", "mean") else np.abs(halves)
    return made


def stored_norms(codec: Codec, norms: np.ndarray) -> np.ndarray:
    """norms (...) float32 ≥ 0 → as they read back from a codec with one norm for each vector, float32."""
    codes = np.zeros((*norms.shape, 64 // codec.rounding.width), np.uint8)
    return codec.rounding.norms.unpack(codec.rounding.assemble(codes, norms)["norm"])


def streams(codec: Codec, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fields (..., *shape) of any block → the codec's streams (..., *shape)."""
    return unpack(codec.schema(*codec.sizes(fields)), fields)


def fields_of(codec: Codec, coded: Mapping[str, np.ndarray], block_size: int, head_dim: int) -> dict[str, np.ndarray]:
    """The inverse of `streams`."""
    return pack(codec.schema(block_size, head_dim), coded)
