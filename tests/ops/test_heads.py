"""QK-norm, RoPE, scale and rotation of heads, and where keys and values go, on every backend, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine.backends.kv import CacheFormat, HeadRule, HeadTransform, KVLocation, Move, SpanView
from polarlm.engine.backends.numpy.rows import apply_rope, rms_norm, rotate
from polarlm.engine.codecs import get
from polarlm.engine.codecs.parts.rotation import dense, signed_hadamard, twice_signed_hadamard
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.formats import EPS32
from tests.ops.backends import BEST, CUDA, NUMPY, SOME, backend_cases, backends


def permutation(dim: int) -> np.ndarray:
    return np.eye(dim, dtype=np.float32)[np.arange(dim).reshape(2, -1).T.reshape(-1)].T


ROTATIONS: dict[str, Any] = {
    "none": lambda dim: None,
    "hadamard": signed_hadamard,
    "two-sided": twice_signed_hadamard,
    "dense": dense,
    "permutation": permutation,
}
F16 = get("f16")
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

    def on(self, ops: Any) -> tuple[Any, ...]:
        """qkv, rope and what happens to the heads, on the device of ops."""
        (transform,) = ops.prepare([self.transform])
        norms = None if self.norms is None else (*map(ops.to_device, self.norms[:2]), self.norms[2])
        return ops.to_device(self.qkv.copy()), tuple(map(ops.to_device, self.rope)), HeadRule(transform, norms)

    @property
    def format(self) -> CacheFormat:
        _, kv_heads, dim = self.k.shape
        return CacheFormat(F16, F16, None, None, 0, 16, kv_heads, dim)


def case(dim: int, group: int, kv_heads: int, rotations: tuple[str, str], scaled: bool, normed: bool) -> Case:
    """kv_heads: 0 for a layer that shares K/V, and has `group` queries alone."""
    rng = np.random.default_rng(dim + group + kv_heads)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    queries = group * max(1, kv_heads)
    heads = queries + 2 * kv_heads
    angles = rng.uniform(0, 100, (ROWS, dim // 2))
    rope = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    keys, values = (ROTATIONS[name](dim) for name in rotations)
    value_eps = 1e-5 if scaled == normed else None
    transform = HeadTransform(kv_heads, draw(heads, dim) if scaled else None, keys, values, value_eps=value_eps)
    qkv, norms = draw(ROWS, heads, dim), (draw(dim), draw(dim), 1e-5) if normed else None

    q, k, v = np.split(qkv.astype(np.float64), [queries, queries + kv_heads], axis=1)
    if norms is not None:
        q, k = (rms_norm(x, norm, norms[2]) for x, norm in zip((q, k), norms[:2], strict=True))
    if value_eps is not None:
        v = rms_norm(v, np.ones(dim), value_eps)
    for x in (q, k):
        apply_rope(x, *(table.astype(np.float64) for table in rope))
    whole = np.concatenate([q, k, v], axis=1) * (1 if transform.scale is None else transform.scale)
    q, k, v = np.split(whole, [queries, queries + kv_heads], axis=1)
    return Case(qkv, rope, transform, norms, rotate(q, keys), rotate(k, keys), rotate(v, values))


def check(ops: Any, actual: Any, wanted: np.ndarray) -> None:
    """Each vector is within 1e-6 of its norm; on a GPU each number within four roundings of a sum of D numbers."""
    actual = ops.to_host(actual)
    assert actual.shape == wanted.shape
    assert actual.dtype == np.float32
    if not wanted.size:
        return
    if ops.backend == "cuda":
        assert np.abs(actual - wanted).max() <= 4 * EPS32 * np.sqrt(wanted.shape[-1]) * np.abs(wanted).max()
    else:
        assert (np.abs(actual - wanted) <= 1e-6 * np.linalg.norm(wanted, axis=-1, keepdims=True)).all()


def check_halves(actual: np.ndarray, wanted: np.ndarray) -> None:
    """Each number is the nearest half of one that is within 2e-6 of the vector's norm."""
    assert actual.dtype == np.float16
    size = np.linalg.norm(wanted, axis=-1, keepdims=True)
    assert (np.abs(actual - wanted) <= 2e-6 * size + np.spacing(np.abs(wanted).astype(np.float16)) / 2).all()


# Head dim, query heads of a KV head, KV heads, rotations of keys and of values, scale, norms.
OF_CPU = [
    (64, 3, 2, ("none", "none"), False, False),
    (64, 3, 2, ("hadamard", "two-sided"), False, False),
    (48, 3, 2, ("hadamard", "two-sided"), True, True),
    (48, 3, 2, ("dense", "hadamard"), True, True),
    (256, 3, 2, ("dense", "hadamard"), True, False),
    (256, 3, 2, ("none", "none"), True, False),
    (64, 5, 0, ("hadamard", "none"), True, True),
    (48, 5, 0, ("dense", "hadamard"), True, True),
    (24, 5, 0, ("none", "none"), True, True),
]
OF_GPU = [
    (8, 2, 2, ("none", "hadamard"), False, True),
    (24, 2, 2, ("hadamard", "two-sided"), True, False),
    (24, 8, 0, ("hadamard", "hadamard"), True, True),
    (64, 2, 2, ("two-sided", "dense"), True, True),
    (96, 2, 2, ("dense", "permutation"), False, False),
    (64, 2, 2, ("permutation", "none"), True, False),
]


@backend_cases(
    "ops shape",
    [*((backend, shape) for backend in (NUMPY, *SOME[-1:]) for shape in OF_CPU), *((CUDA, shape) for shape in OF_GPU)],
    slow=[(backend, shape) for backend in SOME for shape in OF_CPU],
)
def test_heads_are_transformed(ops: Any, shape: tuple[Any, ...]) -> None:
    x = case(*shape)
    for actual, wanted in zip(ops.transform_heads(*x.on(ops)), (x.q, x.k, x.v), strict=True):
        check(ops, actual, wanted)


@backends(CUDA)
def test_signed_hadamard_matrices_take_no_dense_product(ops: Any) -> None:
    if not isinstance(ops._device, EmulatedDevice):
        pytest.skip("a real GPU does not list its launches")
    x = case(64, 2, 2, ("none", "none"), False, False)
    for keys, values, launches in (
        (twice_signed_hadamard(64).T, signed_hadamard(64), []),
        (dense(64), None, ["rotate_dense_kernel"]),
        (signed_hadamard(64), dense(64), ["rotate_dense_kernel"]),
    ):
        rotated = x._replace(transform=HeadTransform(2, None, keys, values))
        arguments = rotated.on(ops)
        ops._device.launches.clear()
        ops.transform_heads(*arguments)
        assert ops._device.launches == ["transform_heads_kernel", *launches]


@backends(*BEST)
def test_layers_share_the_memory_of_a_rotation(ops: Any) -> None:
    """A Hadamard matrix is stored as signs."""
    first, second = ops.prepare([HeadTransform(1, None, dense(64), signed_hadamard(64))] * 2)
    assert first.keys is second.keys
    assert first.keys.memory.shape == (64, 64)
    assert first.values.memory.shape == first.inverse.memory.shape == (64,)


# -- keys and values go to a step's slots, or to a prompt's buffer -------------------------------------------------


def check_slots(ops: Any, x: Case, start: int, counts: Sequence[int]) -> None:
    """Rows of two sequences, of which the first has a complete block in full precision; rows may reach into the next
    slot, and the other tokens of slots stay as they were."""
    cache, n, (one, four) = ops.cache(x.format, 0, 6), 16, counts
    blank = np.zeros((x.format.kv_heads, n, x.format.head_dim), np.float16)
    for slot in range(6):
        ops.write_full(cache, slot, blank, blank)
    spans = [
        SpanView(slice(0, one), 2 * n + start % n, KVLocation(None, 5), n, 2, (), n, (3, 0)),
        SpanView(slice(one, one + four), 2 * n + start % n, KVLocation(None, 1), 2 * n, None, (), n, (4,)),
    ]
    qkv, rope, rule = x.on(ops)
    check(ops, ops.place_kv(qkv, rope, rule, cache, ops.spans(spans, n)), x.q)
    stored = [[np.array(side) for side in ops.read_full(cache, slot, n)] for slot in range(6)]
    places = [divmod(start % n + i, n) for i in range(one)], [divmod(start % n + i, n) for i in range(four)]
    rows = [((3, 0)[block], at) for block, at in places[0]] + [((1, 4)[block], at) for block, at in places[1]]
    for row, (slot, at) in enumerate(rows):
        for side, wanted in zip(stored[slot], (x.k, x.v), strict=True):
            check_halves(side[:, at], wanted[row])
            side[:, at] = 0
    assert not np.any(stored)


def check_buffer(ops: Any, x: Case, start: int) -> None:
    """Of a prompt, from its block 1 on."""
    cache, buffer, n = ops.cache(x.format, 0, 4), ops.buffer(x.format, 64), 16
    spans = [SpanView(slice(0, ROWS), 3 * n + start, KVLocation(buffer, 1), 3 * n, 0, (), n)]
    qkv, rope, rule = x.on(ops)
    check(ops, ops.place_kv(qkv, rope, rule, cache, ops.spans(spans, n)), x.q)
    if ops.backend != "cuda":
        for side, wanted in zip(buffer, (x.k, x.v), strict=True):
            check(ops, side[:, n + start : n + start + ROWS], wanted.swapaxes(0, 1))
    moves = [Move(KVLocation(None, block), KVLocation(buffer, block), n) for block in range(4)]
    ops.copy_full([cache], moves)
    for side, wanted in enumerate((x.k, x.v)):
        stored = np.concatenate([ops.read_full(cache, block, n)[side] for block in range(4)], axis=1)
        check_halves(stored[:, n + start : n + start + ROWS], wanted.swapaxes(0, 1))


shapes = st.builds(
    case,
    dim=st.sampled_from([6, 8, 20, 24, 80, 96, 104, 128]),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    rotations=st.tuples(*(st.sampled_from(["none", "hadamard", "two-sided", "dense"]) for _ in "kv")),
    scaled=st.booleans(),
    normed=st.booleans(),
)


@pytest.mark.skipif(not BEST, reason="no kernel is compiled here")
@given(shapes, st.integers(0, 20), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_compiled_kernels_place_keys_and_values_of_any_shape(x: Case, start: int, threads: int) -> None:
    check_slots(BEST[0].open(threads), x, start, (1, 4))
    check_buffer(BEST[0].open(threads), x, start)


@backend_cases(
    "ops rotations counts",
    [
        (NUMPY, ("hadamard", "two-sided"), (1, 4)),
        (CUDA, ("hadamard", "two-sided"), (1, 4)),
        (CUDA, ("none", "hadamard"), (4, 1)),
        (CUDA, ("dense", "none"), (1, 4)),
        (CUDA, ("hadamard", "dense"), (2, 3)),
    ],
)
def test_keys_and_values_go_to_slots_and_buffers(ops: Any, rotations: tuple[str, str], counts: tuple[int, int]) -> None:
    x = case(16, 2, 2, rotations, True, rotations[0] == "hadamard")
    for start in (0, 14):
        check_slots(ops, x, start, counts)
    check_buffer(ops, x, 14)


# -- slots are halves: what rounds, what saturates, and what stays not a number ------------------------------------

NEW = np.array([1 / 3, -1e-9, 65504, 65519, 65520, -1e30, 1 + 2**-11, 3e-8, np.inf, -np.inf, np.nan, 7] * 2, np.float32)
_HALVES = [0.33325195, 0, 65504, 65504, 65504, -65504, 1, 5.9604645e-08, np.nan, np.nan, np.nan, 7]
STORED = np.array(_HALVES * 2, np.float16)


@backends(NUMPY, *SOME, CUDA)
@pytest.mark.parametrize("way", ["step", "two slots", "prompt", "session", "heads"])
def test_what_a_slot_stores(ops: Any, way: str) -> None:
    """The nearest halves; beyond ±65504 these; NaN stays, as of a damaged model, and of infinities a CPU makes NaN, and
    so does a session's slot. A part of a slot is copied without what lies behind it."""
    format, n, kv_heads = CacheFormat(F16, F16, None, None, 0, 16, 3, 24), 16, 3
    cache, rows = ops.cache(format, 0, 4), np.tile(NEW, (2 * n, kv_heads, 1))
    if way == "session":
        ops.write_full(cache, 1, *[rows[:n].swapaxes(0, 1)] * 2)
    elif way == "prompt":
        buffer, k = ops.buffer(format, 3 * n), ops.to_device(rows[:n])
        span = SpanView(slice(0, n), 2 * n, KVLocation(buffer, 1), n, None, (), n)
        ops.append_kv(cache, ops.spans([span], n), k, k)
        ops.copy_full([cache], [Move(KVLocation(None, 2), KVLocation(buffer, 2), n)])
        ops.copy_full([cache], [Move(KVLocation(None, 1), KVLocation(None, 2), n)])  # from slot to slot, and back
        again = ops.buffer(format, n)
        ops.copy_full([cache], [Move(KVLocation(again, 0), KVLocation(None, 1), n)])
        ops.copy_full([cache], [Move(KVLocation(None, 1), KVLocation(again, 0), n)])
    else:
        count = 2 * n if way == "two slots" else n
        spans = ops.spans([SpanView(slice(0, count), n, KVLocation(None, 1), n, 0, (), n, (2,))], n)
        k = ops.to_device(rows[:count])
        if way != "heads":
            ops.append_kv(cache, spans, k, k)
        else:
            qkv = ops.to_device(np.concatenate([rows[:n], np.zeros_like(rows[:n]), rows[:n]], axis=1))
            rope = ops.to_device(np.ones((n, 12))), ops.to_device(np.zeros((n, 12)))
            ops.place_kv(qkv, rope, HeadRule(*ops.prepare([HeadTransform(kv_heads)])), cache, spans)
    wanted = np.tile(STORED, (kv_heads, n, 1))
    if ops.backend == "cuda" and way != "session":
        wanted[..., np.inf == NEW], wanted[..., -np.inf == NEW] = 65504, -65504
    k, v = ops.read_full(cache, 1, n)
    np.testing.assert_array_equal(v, wanted)
    if way != "heads":  # RoPE of zeros
        np.testing.assert_array_equal(k, wanted)
    ops.write_full(cache, 3, np.ones_like(wanted), np.ones_like(wanted))
    ops.copy_full([cache], [Move(KVLocation(None, 3), KVLocation(None, 1), 7)])
    for part, whole in zip(ops.read_full(cache, 3, n), (k, v), strict=True):
        np.testing.assert_array_equal(part[:, :7], whole[:, :7])
        assert (part[:, 7:] == (0 if ops.backend == "cuda" else 1)).all()


@backends(NUMPY, *BEST)
def test_a_prompt_keeps_its_own_keys_and_values_in_32_bits(ops: Any) -> None:
    format, n = CacheFormat(F16, F16, None, None, 0, 16, 3, 24), 16
    cache, buffer, rows = ops.cache(format, 0, 2), ops.buffer(format, 2 * n), np.tile(NEW, (n, 3, 1))
    span = SpanView(slice(0, n), 0, KVLocation(buffer, 0), 0, None, (), n)
    ops.append_kv(cache, ops.spans([span], n), rows, rows)
    halves = np.tile(STORED, (3, n, 1))
    ops.write_full(cache, 1, halves, halves)
    ops.copy_full([cache], [Move(KVLocation(buffer, 1), KVLocation(None, 1), n)])
    for side in buffer:
        assert side.dtype == np.float32
        np.testing.assert_array_equal(side[:, :n], rows.swapaxes(0, 1))
        np.testing.assert_array_equal(side[:, n:], halves.astype(np.float32))


@backends(*SOME)
def test_keys_that_are_values_are_transformed_without_queries_as_beside_them(
    ops: Any, rng: np.random.Generator
) -> None:
    heads, dim, rows = 3, 16, 5
    scale = rng.uniform(0.5, 2, (heads + 2, dim)).astype(np.float32)
    (transform,) = ops.prepare([HeadTransform(1, scale, values_are_keys=True)])
    qk = rng.standard_normal((rows, heads + 1, dim), np.float32)
    rope = tuple(ops.to_device(rng.standard_normal((rows, dim // 2), np.float32)) for _ in range(2))
    q, k, v = ops.transform_heads(ops.to_device(qk.copy()), rope, HeadRule(transform))
    none, alone, _ = ops.transform_heads(ops.to_device(qk[:, heads:].copy()), rope, HeadRule(transform))
    cos, sin = (ops.to_host(turns).astype(np.float64)[:, None] for turns in rope)
    low, high = np.split(qk.astype(np.float64), 2, axis=2)
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2) * scale[: heads + 1]
    np.testing.assert_allclose(ops.to_host(q), turned[:, :heads], rtol=1e-5, atol=1e-6)
    assert none.shape[1] == 0
    for keys in (k, v, alone):
        np.testing.assert_allclose(ops.to_host(keys), turned[:, heads:], rtol=1e-5, atol=1e-6)


@backends(NUMPY, *SOME, CUDA)
@pytest.mark.parametrize("sizes", [(1, 1, 2, 2), (3, 4, 24, 8), (2, 5, 64, 32)])
def test_latent_vectors_and_rotated_channels_become_heads_and_back(
    ops: Any, rng: np.random.Generator, sizes: tuple[int, ...]
) -> None:
    """Each half of a head, whose channels RoPE pairs with the other's, has half of both."""
    tokens, heads, latent, rotated = sizes
    absorbed, wide = (rng.standard_normal((tokens * heads, n), np.float32) for n in (latent, rotated + 6))
    kv = rng.standard_normal((tokens, latent + rotated), np.float32)
    joined = ops.join_latents(ops.to_device(absorbed), ops.to_device(wide)[:, 6:], ops.to_device(kv))
    halves = ops.to_host(joined).reshape(tokens, heads + 1, 2, -1)
    turned, rest = halves[..., : rotated // 2], halves[..., rotated // 2 :]
    np.testing.assert_array_equal(turned[:, :-1].reshape(tokens * heads, rotated), wide[:, 6:])
    np.testing.assert_array_equal(turned[:, -1].reshape(tokens, rotated), kv[:, latent:])
    np.testing.assert_array_equal(rest[:, -1].reshape(tokens, latent), kv[:, :latent])
    for part, taken in ((rest[:, :-1], absorbed), (rest, rest.reshape(-1, latent))):
        x = ops.to_device(np.ascontiguousarray(ops.to_host(joined)[:, : part.shape[1]]))
        np.testing.assert_array_equal(ops.to_host(ops.take_latents(x, latent)), taken)
