"""QK-norm, RoPE, scale and rotation at every level of CPU features, against NumPy in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine.backends.kv import CacheFormat, HeadTransform, KVLocation, Move, SpanView
from polarlm.engine.backends.native.attention_ops.heads import HeadOps
from polarlm.engine.backends.native.attention_ops.step_table import StepTable
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.numpy.rows import apply_rope, rms_norm, rotate
from polarlm.engine.codecs import get
from polarlm.engine.codecs.parts.rotation import dense, signed_hadamard, twice_signed_hadamard
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Level
from tests.backends.native.launching import launcher
from tests.jit.levels import some_levels

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
    value_eps = 1e-5 if scaled == normed else None
    transform = HeadTransform(kv_heads, draw(heads, dim) if scaled else None, keys, values, value_eps=value_eps)
    qkv, norms = draw(ROWS, heads, dim), (draw(dim), draw(dim), 1e-5) if normed else None

    whole = qkv.astype(np.float64)
    if norms is not None:
        whole[:, :queries] = rms_norm(whole[:, :queries], norms[0], norms[2])
        whole[:, queries : queries + kv_heads] = rms_norm(whole[:, queries : queries + kv_heads], norms[1], norms[2])
    if value_eps is not None:
        whole[:, -kv_heads:] = rms_norm(whole[:, -kv_heads:], np.ones(dim), value_eps)
    apply_rope(whole[:, :-kv_heads], *(table.astype(np.float64) for table in rope))
    whole = whole if transform.scale is None else whole * transform.scale
    qk, v = rotate(whole[:, :-kv_heads], keys), rotate(whole[:, -kv_heads:], values)
    return Case(qkv, rope, transform, norms, qk[:, :queries], qk[:, queries:], v)


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    """Each vector is within 1e-6 of its norm."""
    assert found.dtype == np.float32
    size = np.linalg.norm(wanted, axis=-1, keepdims=True)
    assert (np.abs(found - wanted) <= 1e-6 * size).all()


def check_halves(found: np.ndarray, wanted: np.ndarray) -> None:
    """Each number is the nearest half of one that is within 1e-6 of the vector's norm."""
    assert found.dtype == np.float16
    size = np.linalg.norm(wanted, axis=-1, keepdims=True)
    assert (np.abs(found - wanted) <= 1e-6 * size + np.spacing(np.abs(wanted).astype(np.float16)) / 2).all()


@some_levels
@pytest.mark.parametrize(
    ("dim", "rotations", "scaled", "normed"),
    [
        (64, ("none", "none"), False, False),
        (64, ("hadamard", "two-sided"), False, False),
        (48, ("hadamard", "two-sided"), True, True),
        (48, ("dense", "hadamard"), True, True),
        (256, ("dense", "hadamard"), True, False),
        (256, ("none", "none"), True, False),
    ],
)
def test_heads_are_transformed(dim: int, rotations: tuple[str, str], scaled: bool, normed: bool, level: Level) -> None:
    x = case(dim, 3, 2, rotations, scaled, normed)
    ops = HeadOps(launcher(level))
    (prepared,) = ops.prepare([x.transform])
    for found, wanted in zip(ops.transform_heads(x.qkv, x.rope, prepared, x.norms), (x.q, x.k, x.v), strict=True):
        check(found, wanted)


@some_levels
def test_queries_are_transformed_alone(level: Level) -> None:
    """Of a layer that shares K/V."""
    ops = HeadOps(launcher(level))
    for dim, rotations in ((64, ("hadamard", "none")), (48, ("dense", "hadamard")), (24, ("none", "none"))):
        x = case(dim, 5, 1, rotations, True, True)
        scale = x.transform.scale[:5]
        (prepared,) = ops.prepare([HeadTransform(0, scale, x.transform.key_rotation, x.transform.value_rotation)])
        q, k, v = ops.transform_heads(np.ascontiguousarray(x.qkv[:, :5]), x.rope, prepared, x.norms)
        check(q, x.q)
        assert k.shape == v.shape == (ROWS, 0, dim)


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
    spans = [
        SpanView(slice(0, 1), 16 + start % 8, KVLocation(None, 3), 16, 0, (), 8),
        SpanView(slice(1, 5), 8 + start % 8, KVLocation(None, 1), 8, None, (), 8, (4, 2)),
    ]
    check(ops.place_kv(x.qkv, x.rope, prepared, cache, StepTable(spans, 8), x.norms), x.q)
    slots = [(3, start % 8)] + [((1, 4)[(start % 8 + i) // 8], (start % 8 + i) % 8) for i in range(4)]
    for row, (slot, offset) in enumerate(slots):
        check_halves(cache.full_k[slot, :, offset], x.k[row])
        check_halves(cache.full_v[slot, :, offset], x.v[row])
        cache.full_k[slot, :, offset] = cache.full_v[slot, :, offset] = 0
    assert not cache.full_k.any()
    assert not cache.full_v.any()


# Between two halves, and next to them; beyond ±65504; NaN, as of a damaged model, which stays.
NUMBERS = np.array(
    [1 + 2**-11, 1 + 2**-10, -(2**-25), 3e-8, 65519, 65520, -1e30, np.inf, -np.inf, np.nan, 7], np.float32
)


@some_levels
def test_tokens_of_a_prompt_go_to_a_slot_as_the_halves_of_the_reference(level: Level) -> None:
    """And back, and from slot to slot, as they are."""
    format = CacheFormat(get("f16"), get("f16"), None, None, 0, 16, 3, 24)
    compiled, plain = (NumpyOps(1).cache(format, 0, 2) for _ in range(2))
    buffer = tuple(np.resize(NUMBERS[i:], (3, 40, 24)) for i in (0, 1))
    for ops, cache in (HeadOps(launcher(level)), compiled), (NumpyOps(1), plain):
        ops.copy_full([cache], [Move(KVLocation(None, 1), KVLocation(buffer, 2), 7)])
        ops.copy_full([cache], [Move(KVLocation(None, 0), KVLocation(None, 1), 5)])
    assert np.isnan(plain.full_k[1, 2, :7]).any()
    for found, wanted in (compiled.full_k, plain.full_k), (compiled.full_v, plain.full_v):
        np.testing.assert_array_equal(found, wanted)
        assert not found[1, :, 7:].any()
    block = NumpyOps(1).buffer(format, 16)
    HeadOps(launcher(level)).copy_full([compiled], [Move(KVLocation(block, 0), KVLocation(None, 1), 7)])
    np.testing.assert_array_equal(block[0][:, :7], compiled.full_k[1, :, :7])


@some_levels
def test_slots_hold_the_halves_of_the_reference(level: Level) -> None:
    qkv = np.resize(NUMBERS, (2, 3, 24))  # a query, a key and a value a row
    rope = np.ones((2, 12), np.float32), np.zeros((2, 12), np.float32)
    format = CacheFormat(get("f16"), get("f16"), None, None, 0, 16, 1, 24)
    compiled, plain = (NumpyOps(1).cache(format, 0, 1) for _ in range(2))
    spans = [SpanView(slice(0, 2), 3, KVLocation(None, 0), 0, None, (), 16)]
    ops = HeadOps(launcher(level))
    ops.place_kv(qkv.copy(), rope, ops.prepare([HeadTransform(1)])[0], compiled, StepTable(spans, 16))
    NumpyOps(1).append_kv(plain, spans, qkv[:, 1:2], qkv[:, 2:])
    np.testing.assert_array_equal(compiled.full_v, plain.full_v)
    finite = np.isfinite(qkv[:, 1, :12] * qkv[:, 1, 12:])  # 0 · infinity of RoPE is NaN
    pairs = np.concatenate([finite, finite], axis=1)
    np.testing.assert_array_equal(compiled.full_k[0, 0, 3:5][pairs], plain.full_k[0, 0, 3:5][pairs])
    assert np.isnan(compiled.full_v).any()
    assert not np.isinf(compiled.full_v).any()


@given(cases, starts, threads)
@settings(max_examples=15, deadline=None)
def test_keys_and_values_go_to_the_buffer_of_a_prompt(x: Case, start: int, threads: int) -> None:
    ops, plain = HeadOps(launcher(best(), threads)), NumpyOps(1)
    (prepared,) = ops.prepare([x.transform])
    cache, buffer = plain.cache(format_of(x), 0, 1), plain.buffer(format_of(x), 40)
    for side in buffer:
        side[...] = 0
    spans = [SpanView(slice(0, ROWS), 24 + start, KVLocation(buffer, 1), 24, 0, (), 8)]
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
    assert first.values.memory.shape == first.inverse.memory.shape == (64,)
