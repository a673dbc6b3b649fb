"""QK-norm, RoPE, scale and rotation at every level of CPU features, against NumPy in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine.backends.kv import CacheFormat, HeadTransform, Place, SpanView
from polarlm.engine.backends.numpy.ops import NumpyOps, apply_rope, rms_norm, rotate
from polarlm.engine.codecs import get
from polarlm.engine.codecs._rotation import dense, signed_hadamard, twice_signed_hadamard
from tests.backends.native.levels import every_level, launcher

from polarlm.engine.backends.native.heads import HeadOps  # isort: skip
from polarlm.engine.backends.native.target import Level, best

ROTATIONS = {"none": None, "hadamard": signed_hadamard, "two-sided": twice_signed_hadamard, "dense": dense}
ROWS = 5


class Case(NamedTuple):
    """Random inputs of `transform_heads`, and its results in float64."""

    qkv: np.ndarray
    rope: tuple[np.ndarray, np.ndarray]
    transform: HeadTransform
    norms: tuple[np.ndarray, np.ndarray, float] | None
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def case(dim: int, group: int, kv_heads: int, rotations: tuple[str, str], scaled: bool, normed: bool) -> Case:
    rng = np.random.default_rng(dim + group + kv_heads)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    heads, queries = (group + 2) * kv_heads, group * kv_heads
    angles = rng.uniform(0, 6, (ROWS, dim // 2))
    rope = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    keys, values = (None if ROTATIONS[name] is None else ROTATIONS[name](dim) for name in rotations)
    transform = HeadTransform(kv_heads, draw(heads, dim) if scaled else None, keys, values)
    qkv, norms = draw(ROWS, heads, dim), (draw(dim), draw(dim), 1e-5) if normed else None

    whole = qkv.astype(np.float64)
    if norms is not None:
        whole[:, :queries] = rms_norm(whole[:, :queries], norms[0], norms[2])
        whole[:, queries : queries + kv_heads] = rms_norm(whole[:, queries : queries + kv_heads], norms[1], norms[2])
    apply_rope(whole[:, :-kv_heads], *(table.astype(np.float64) for table in rope))
    whole = whole if transform.scale is None else whole * transform.scale
    qk, v = rotate(whole[:, :-kv_heads], keys), rotate(whole[:, -kv_heads:], values)
    return Case(qkv, rope, transform, norms, qk[:, :queries], qk[:, queries:], v)


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    """Each vector is within 1e-6 of its norm."""
    assert found.dtype == np.float32
    size = np.linalg.norm(wanted, axis=-1, keepdims=True)
    assert (np.abs(found - wanted) <= 1e-6 * size).all()


@every_level
@pytest.mark.parametrize("rotations", [("none", "none"), ("hadamard", "two-sided"), ("dense", "hadamard")])
@pytest.mark.parametrize(("dim", "scaled", "normed"), [(64, False, False), (48, True, True), (256, True, False)])
def test_heads_are_transformed(dim: int, rotations: tuple[str, str], scaled: bool, normed: bool, level: Level) -> None:
    x = case(dim, 3, 2, rotations, scaled, normed)
    ops = HeadOps(launcher(level))
    (prepared,) = ops.prepare([x.transform])
    for found, wanted in zip(ops.transform_heads(x.qkv, x.rope, prepared, x.norms), (x.q, x.k, x.v), strict=True):
        check(found, wanted)


cases = st.builds(
    case,
    dim=st.sampled_from([6, 8, 20, 24, 80, 96, 104, 128]),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    rotations=st.tuples(st.sampled_from(sorted(ROTATIONS)), st.sampled_from(sorted(ROTATIONS))),
    scaled=st.booleans(),
    normed=st.booleans(),
)
starts, threads = st.integers(0, 20), st.integers(1, 3)


def format_of(x: Case) -> CacheFormat:
    _, kv_heads, dim = x.k.shape
    return CacheFormat(get("f16"), get("f16"), None, None, 0, 8, kv_heads, dim)


@given(cases, starts, threads)
@settings(max_examples=15, deadline=None)
def test_keys_and_values_go_to_the_slots_of_a_step(x: Case, start: int, threads: int) -> None:
    """Two sequences: one row, and four that reach into the next slot."""
    ops, plain = HeadOps(launcher(best(), threads)), NumpyOps(1)
    (prepared,) = ops.prepare([x.transform])
    cache = plain.cache(format_of(x), 0, 5)
    spans = plain.spans(
        [
            SpanView(slice(0, 1), 16 + start % 8, Place(None, 3), 16, 0, (), 8),
            SpanView(slice(1, 5), 8 + start % 8, Place(None, 1), 8, None, (), 8, (4, 2)),
        ],
        8,
    )
    check(ops.place_kv(x.qkv, x.rope, prepared, cache, spans, x.norms), x.q)
    slots = [(3, start % 8)] + [((1, 4)[(start % 8 + i) // 8], (start % 8 + i) % 8) for i in range(4)]
    for row, (slot, offset) in enumerate(slots):
        check(cache.full_k[slot, :, offset], x.k[row])
        check(cache.full_v[slot, :, offset], x.v[row])
        cache.full_k[slot, :, offset] = cache.full_v[slot, :, offset] = 0
    assert not cache.full_k.any()
    assert not cache.full_v.any()


@given(cases, starts, threads)
@settings(max_examples=15, deadline=None)
def test_keys_and_values_go_to_the_buffer_of_a_prompt(x: Case, start: int, threads: int) -> None:
    ops, plain = HeadOps(launcher(best(), threads)), NumpyOps(1)
    (prepared,) = ops.prepare([x.transform])
    cache, buffer = plain.cache(format_of(x), 0, 1), plain.buffer(format_of(x), 40)
    for side in buffer:
        side[...] = 0
    spans = [SpanView(slice(0, ROWS), 24 + start, Place(buffer, 1), 24, 0, (), 8)]
    check(ops.place_kv(x.qkv, x.rope, prepared, cache, spans, x.norms), x.q)
    for side, wanted in zip(buffer, (x.k, x.v), strict=True):
        check(side[:, 8 + start : 8 + start + ROWS], wanted.swapaxes(0, 1))
        side[:, 8 + start : 8 + start + ROWS] = 0
        assert not side.any()


def test_layers_share_the_memory_of_a_rotation() -> None:
    """A Hadamard matrix is stored as signs."""
    ops = HeadOps(launcher(best()))
    first, second = ops.prepare([HeadTransform(1, None, dense(64), signed_hadamard(64))] * 2)
    assert first.keys is second.keys
    assert first.keys.memory.shape == (64, 64)
    assert first.values.memory.shape == first.back.memory.shape == (64,)
