"""Queries, keys and values between their product and attention, run by the emulator with every check on.

`transform_heads` is compared with NumPy in float64, `place_kv` with `transform_heads` followed by `append_kv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.codecs.parts.rotation import signed_hadamard, twice_signed_hadamard
from tests.cuda.formats import assert_as_exact_as_numpy, poisoned
from tests.cuda.programs import Program
from tests.cuda.test_append_kv import append, layout, packed, padded, spans_of
from tests.cuda.test_kernels_basic import hadamard_signs
from tests.pairs import each

EPS = 1e-5
SEEDS = [0, 1, 2]
QUERIES, KV_HEADS = 5, 2


@cache
def program(kernel: str, block_size: int = 0, **defines: Any) -> Program:
    layouts = [layout(values, block_size, defines["HEAD_DIM"]) for values in (False, True)] if block_size else []
    return Program(source(kernel, *layouts, **defines))


@dataclass(frozen=True)
class Case:
    """Heads qkv (T, H + 2K, D), the norms' weights, RoPE and the transform of their layer."""

    qkv: np.ndarray
    rope: tuple[np.ndarray, np.ndarray]
    transform: HeadTransform
    norms: tuple[np.ndarray, np.ndarray] | None

    @classmethod
    def random(
        cls, rng: np.random.Generator, rows: int, dim: int, normed: bool = False, *, smoothed: bool, rotated: str
    ) -> Case:
        """rotated: of "keys" and "values", those that are rotated."""
        qkv = 3 * rng.standard_normal((rows, QUERIES + 2 * KV_HEADS, dim), np.float32)
        angles = rng.uniform(0, 100, (rows, dim // 2))
        scale = rng.uniform(0.5, 2, (QUERIES + 2 * KV_HEADS, dim)).astype(np.float32) if smoothed else None
        keys = twice_signed_hadamard(dim) if "keys" in rotated else None
        values = signed_hadamard(dim) if "values" in rotated else None
        norms = (rng.standard_normal(dim, np.float32), rng.standard_normal(dim, np.float32)) if normed else None
        rope = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return cls(qkv, rope, HeadTransform(KV_HEADS, scale, keys, values), norms)

    @property
    def defines(self) -> dict[str, Any]:
        orders = [
            1 if rotation is None else hadamard_signs(rotation)[0]
            for rotation in (self.transform.key_rotation, self.transform.value_rotation)
        ]
        names = {"KEY_ORDER": orders[0], "VALUE_ORDER": orders[1], "HEAD_NORMS": int(self.norms is not None)}
        return {"HEAD_DIM": self.qkv.shape[2], **names}

    @property
    def inputs(self) -> list[Any]:
        signs: list[np.ndarray | None] = []
        for rotation in (self.transform.key_rotation, self.transform.value_rotation):
            signs += (None, None) if rotation is None else hadamard_signs(rotation)[1:]
        return [self.qkv, *self.rope, *(self.norms or (None, None)), self.transform.scale, *signs]

    def by_numpy(self, dtype: Any) -> list[np.ndarray]:
        """q, k, v of NumPy in floats of a type."""

        def cast(x: np.ndarray | None) -> Any:
            return None if x is None else x.astype(dtype)

        scale, keys, values = self.transform.scale, self.transform.key_rotation, self.transform.value_rotation
        transform = HeadTransform(KV_HEADS, cast(scale), cast(keys), cast(values))
        norms = None if self.norms is None else (*map(cast, self.norms), EPS)
        return list(NumpyOps().transform_heads(cast(self.qkv), tuple(map(cast, self.rope)), transform, norms))


def sizes(spans: np.ndarray) -> tuple[np.int32, np.int32]:
    return np.int32(spans.shape[1]), np.int32(len(spans))


def heads(count: int) -> tuple[np.int32, np.int32, np.int32, np.float32]:
    """Vectors of a launch, and what follows."""
    return np.int32(count), np.int32(QUERIES), np.int32(KV_HEADS), np.float32(EPS)


def transform_heads(case: Case, values: bool, seed: int = 0) -> list[np.ndarray]:
    rows, _, dim = case.qkv.shape
    q, k, v = (poisoned((rows, count, dim), "float") for count in (QUERIES, KV_HEADS, KV_HEADS))
    vectors = rows * (QUERIES + KV_HEADS * (2 if values else 1))
    args = q, k, v if values else None, *case.inputs, *heads(vectors)
    program("transform_heads", **case.defines).launch(
        "transform_heads_kernel", (-(-vectors // 2),), (64,), *args, seed=seed
    )
    return [q, k, v]


CASES = [
    # D, normed, smoothed, rotated
    (64, False, True, "keys and values"),
    (128, True, False, "keys and values"),
    (80, True, True, "keys"),
    (24, True, True, "values"),
    (8, False, False, ""),
    (96, False, True, "keys and values"),
]


@pytest.mark.parametrize(("dim", "normed", "smoothed", "rotated"), CASES)
def test_transform_heads_is_that_of_numpy(
    rng: np.random.Generator, dim: int, normed: bool, smoothed: bool, rotated: str
) -> None:
    case = Case.random(rng, 3, dim, normed, smoothed=smoothed, rotated=rotated)
    exact, plain = case.by_numpy(np.float64), case.by_numpy(np.float32)
    for seed in SEEDS:
        for side, result in enumerate(transform_heads(case, True, seed)):
            assert_as_exact_as_numpy(result, exact[side], plain[side], "float")


def test_without_an_output_for_values_queries_and_keys_are_the_same(rng: np.random.Generator) -> None:
    case = Case.random(rng, 3, 24, smoothed=False, rotated="keys")
    with_values, without = transform_heads(case, True), transform_heads(case, False)
    assert np.isnan(without[2]).all()
    for side in (0, 1):
        np.testing.assert_array_equal(with_values[side], without[side])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("block_size", "dim", "normed", "smoothed", "rotated"),
    [(size, *case) for size, case in each([16, 64, 128], [*CASES, (136, False, False, "values")])],
)
def test_place_kv_is_transform_heads_and_append_kv(
    rng: np.random.Generator, block_size: int, dim: int, normed: bool, smoothed: bool, rotated: str
) -> None:
    """Bit for bit, into records of NaN whose other tokens stay unchanged. The span of the last row is empty."""
    case = Case.random(rng, 4, dim, normed, smoothed=smoothed, rotated=rotated)
    # Tokens in the first and the last tile of a block, in both halves of a tile, even and odd; and one two blocks
    # after the start of its buffer.
    places = [[0, 1, 2 * block_size, 4, 2], [1, 1, block_size - 1, 1, 0], [2, 1, 5 * block_size + 10, 0, 3], [0] * 5]
    spans, records = spans_of(places), 5
    q, k, v = transform_heads(case, True)
    wanted = append(np.concatenate([k[:, :1], k, v], axis=1), spans, records, block_size, 64, 0)
    assert np.isfinite(layout(False, block_size, dim).unpack(wanted[0])[0]["values"][4, :, 0]).all()
    vectors = 4 * (QUERIES + 2 * KV_HEADS)
    for seed in SEEDS:
        empty = np.full((records, KV_HEADS, block_size, padded(dim)), np.nan, np.float16)
        queries, current_k, current_v = poisoned(q.shape, "float"), packed(empty, False), packed(empty, True)
        args = queries, current_k, current_v, *case.inputs, spans, *sizes(spans), *heads(vectors)
        run = program("place_kv", block_size, STEP_ROWS=1, **case.defines)
        run.launch("place_kv_kernel", (-(-vectors // 4),), (128,), *args, seed=seed)
        np.testing.assert_array_equal(queries, q)
        np.testing.assert_array_equal(current_k, wanted[0])
        np.testing.assert_array_equal(current_v, wanted[1])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("block_size", "dim", "normed", "smoothed", "rotated"), [(16, *CASES[0]), (64, *CASES[1])])
def test_place_kv_of_several_rows_is_transform_heads_and_append_kv(
    rng: np.random.Generator, block_size: int, dim: int, normed: bool, smoothed: bool, rotated: str
) -> None:
    """Several rows of each sequence, across block boundaries."""
    case = Case.random(rng, 12, dim, normed, smoothed=smoothed, rotated=rotated)
    places = [
        [0, 1, 2 * block_size, 4, 2],
        [1, 6, 2 * block_size - 2, 1, 1],
        [7, 2, 3, 0, 0],
        [9, 3, block_size - 3, 5, 0],
    ]
    spans, records = spans_of(places, [None, 3]), 7
    q, k, v = transform_heads(case, True)
    wanted = append(np.concatenate([k[:, :1], k, v], axis=1), spans, records, block_size, 64, 0)
    vectors = 12 * (QUERIES + 2 * KV_HEADS)
    for seed in SEEDS:
        empty = np.full((records, KV_HEADS, block_size, padded(dim)), np.nan, np.float16)
        queries, current_k, current_v = poisoned(q.shape, "float"), packed(empty, False), packed(empty, True)
        args = queries, current_k, current_v, *case.inputs, spans, *sizes(spans), *heads(vectors)
        run = program("place_kv", block_size, STEP_ROWS=16, **case.defines)
        run.launch("place_kv_kernel", (-(-vectors // 4),), (128,), *args, seed=seed)
        np.testing.assert_array_equal(queries, q)
        np.testing.assert_array_equal(current_k, wanted[0])
        np.testing.assert_array_equal(current_v, wanted[1])


def test_values_beyond_half_precision_saturate_and_nan_stays(rng: np.random.Generator) -> None:
    """Infinities and large numbers become ±65504; NaN stays NaN, so that damage shows."""
    case = Case.random(rng, 1, 8, smoothed=False, rotated="")
    case.qkv[0, QUERIES + KV_HEADS :] = [1e9, -np.inf, np.nan, 65520, -1e6, 0, 1, np.inf]
    shape = (1, KV_HEADS, 16, 16)
    current_k, current_v = (packed(np.zeros(shape, np.float16), values) for values in (False, True))
    spans = spans_of([[0, 1, 0, 0, 0]])
    q = poisoned((1, QUERIES, 8), "float")
    args = q, current_k, current_v, *case.inputs, spans, *sizes(spans), *heads(QUERIES + 2 * KV_HEADS)
    program("place_kv", 16, STEP_ROWS=1, **case.defines).launch("place_kv_kernel", (3,), (96,), *args)
    stored = layout(True, 16, 8).unpack(current_v)[0]["values"][0, :, 0]
    np.testing.assert_array_equal(stored, [[65504, -65504, np.nan, 65504, -65504, 0, 1, 65504]] * KV_HEADS)
