"""Ops on each row of activations, and texts that encoders read, on every backend, against float64."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polarlm.engine.backends.kv import AttentionRule, HeadRule, HeadTransform
from polarlm.engine.backends.numpy.rows import apply_activation, apply_gate
from polarlm.engine.backends.ops import Texts
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.config import Activation, is_gated
from tests.cuda.formats import EPS32, STEP
from tests.ops import reference
from tests.ops.backends import BEST, CUDA, NUMPY, SOME, backend_cases, backends
from tests.weights import load

EPS = 1e-5
EVERY = (NUMPY, *SOME, CUDA)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@backends(*EVERY)
@pytest.mark.parametrize("stored", ["f16", "bf16"])
def test_rows_of_a_table_are_embedded(ops: Any, rng: np.random.Generator, stored: str) -> None:
    table = load(ops, normal(rng, 16, 24), stored)
    values, ids = ops.rows(table), np.array([10, 0, 3], np.int32)
    np.testing.assert_array_equal(ops.to_host(ops.embed(table, ops.to_device(ids))), values[ids])
    scaled = ops.to_host(ops.embed(table, ops.to_device(ids), 50.5))
    np.testing.assert_array_equal(scaled, values[ids] * np.float32(50.5))
    if ops.backend == "cuda":  # below 0: a token that could not be drawn
        np.testing.assert_array_equal(ops.to_host(ops.embed(table, ops.to_device(np.array([10, -2, 3])))), values[ids])


@backend_cases("ops rows", [(backend, rows) for backend in EVERY for rows in (1, 5, 70)])
def test_rms_norm(ops: Any, rng: np.random.Generator, rows: int) -> None:
    """In place in columns of each row, or added to a residual. Sums of 24 numbers are rounded."""
    x, residual, gain = normal(rng, rows, 56), normal(rng, rows, 24), normal(rng, 24)
    wide = x[:, 8:32].astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * gain
    on_device, target, norm = ops.to_device(x.copy()), ops.to_device(residual.copy()), (ops.to_device(gain), EPS)
    ops.rms_norm(on_device[:, 8:32], norm, residual=target)
    np.testing.assert_array_equal(ops.to_host(on_device), x)
    ops.rms_norm(on_device[:, 8:32], norm)
    x[:, 8:32] = normed
    for actual, wanted in ((target, residual + normed), (on_device, x)):
        assert np.abs(ops.to_host(actual) - wanted).max() <= 4 * EPS32 * np.sqrt(24) * np.abs(wanted).max()
    if ops.backend == "cuda":
        with pytest.raises(EngineError, match=r"rows of 12 numbers.*device=cpu"):
            ops.rms_norm(on_device[:, 8:20], norm)


@backend_cases("ops rows", [(backend, rows) for backend in EVERY for rows in (1, 5, 70)])
def test_rows_lose_their_mean(ops: Any, rng: np.random.Generator, rows: int) -> None:
    """In columns of each row: the others stay."""
    x = 5 + normal(rng, rows, 56)
    on_device = ops.to_device(x.copy())
    ops.centre(on_device[:, 8:35])
    part = x[:, 8:35].astype(np.float64)
    x[:, 8:35] = part - part.mean(1, keepdims=True)
    assert np.abs(ops.to_host(on_device) - x).max() <= 27 * EPS32 * 5


def columns(x: Any) -> Any:
    return x[:, 2:-30]


FACTOR, ROW_FACTORS = np.float32([-1.7]), np.float32([[0], [2], [0]])

# Calls with x (3, n) and y (3, 3 n), in place or with a result.
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "softcap": lambda ops, x, y: ops.softcap(columns(x), 30.0),
    "clip": lambda ops, x, y: ops.encoder_ops.clip(columns(x), -0.7, 0.4),
    "scale": lambda ops, x, y: ops.scale(columns(x), ops.to_device(FACTOR)),
    "scale by zero": lambda ops, x, y: ops.scale(columns(x), ops.to_device(ROW_FACTORS)),
    "scale rows": lambda ops, x, y: ops.scale(columns(x), y[:, 300:301]),
}
# What they make of columns of x, float64: 0 times NaN is 0.
IN_COLUMNS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "softcap": lambda x, y: 30 * np.tanh(np.where(np.isinf(x), np.nan, x) / 30),
    "clip": lambda x, y: np.clip(x, np.float32(-0.7), np.float32(0.4)),
    "scale": lambda x, y: x * FACTOR,
    "scale by zero": lambda x, y: np.where(ROW_FACTORS == 0, 0, x * ROW_FACTORS),
    "scale rows": lambda x, y: x * y[:, 300:301],
}
WHOLE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {}
for _name in get_args(Activation):
    CALLS[f"halves, {_name}"] = lambda ops, x, y, name=_name: ops.activate_halves(x, name)
    WHOLE[f"halves, {_name}"] = lambda x, y, name=_name: apply_activation(x, name)
    if is_gated(_name):
        CALLS[f"activate, {_name}"] = lambda ops, x, y, name=_name: ops.activate(x, y[:, 320:640], name)
        WHOLE[f"activate, {_name}"] = lambda x, y, name=_name: apply_gate(name, x, y[:, 320:640].astype(np.float64))


@backends(*EVERY)
@pytest.mark.parametrize("name", [*IN_COLUMNS, *WHOLE])
def test_elementwise_ops(ops: Any, rng: np.random.Generator, name: str) -> None:
    """In columns of each row, with columns of a wider array; NaN stays, and a cap makes infinity NaN. A recorded step
    may have the op."""
    n = 320 if ops.backend == "cuda" or name in WHOLE else 9000
    x, y = 4 * normal(rng, 3, n), normal(rng, 3, 3 * n)
    x[0, 3:6] = (np.nan, np.inf, -np.inf) if name in ("softcap", "scale by zero") else (0, 1e-6, -1)
    call, function = CALLS[name], {**IN_COLUMNS, **WHOLE}[name]
    with np.errstate(invalid="ignore"):
        wanted = function(columns(x).astype(np.float64) if name in IN_COLUMNS else x.astype(np.float64), y)
    expected, on_device, other = x.copy(), ops.to_device(x.copy()), ops.to_device(y)
    if ops.backend == "native" and name in IN_COLUMNS and name != "clip":
        with ops._launch.record() as recording:
            call(ops, on_device, other)
        assert [len(part.launches) for part in recording.parts] == [1]
    made = call(ops, on_device, other)
    if name in IN_COLUMNS:
        columns(expected)[:] = wanted
    else:
        expected = wanted
    actual = ops.to_host(on_device if made is None else made)
    if name in WHOLE or name == "softcap":
        # The formula of Φ is exact to 7.5e-8, which a gate and what it multiplies, up to about 16 each, make more of.
        atol = 6e-6 if name == "softcap" or name.endswith("gated_gelu") else 1e-6
        np.testing.assert_allclose(actual, expected, rtol=16 * EPS32, atol=atol)
    else:
        np.testing.assert_array_equal(actual, expected)


@backend_cases("ops columns", [(backend, columns) for backend in EVERY for columns in (300, 6, 1)])
def test_rows_are_multiplied_by_the_sigmoid_of_their_logits(ops: Any, rng: np.random.Generator, columns: int) -> None:
    """A logit for each number, or for several neighbours, in place; e^x is off by 2 + 1.173 |x| units (CUDA)."""
    x, logits = normal(rng, 3, 300), 20 * normal(rng, 3, columns)
    logits[1, 0], logits[2, 0] = np.nan, -200
    ops.gate(on_device := ops.to_device(x.copy()), ops.to_device(logits))
    with np.errstate(over="ignore"):
        wanted = x / np.repeat(1 + np.exp(-logits.astype(np.float64)), 300 // columns, axis=1)
    units = 4 + 1.173 * np.abs(logits[np.abs(logits) < 100]).max()
    np.testing.assert_allclose(ops.to_host(on_device), wanted, rtol=units * EPS32, atol=1e-30)


def test_gelu_is_that_of_the_normal_distribution() -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, 80.0, -80.0]]).astype(np.float32)
    exact = np.array([one / 2 * (1 + erf(one / 2**0.5)) for one in x.tolist()])
    # The formula's share of x is exact to 1.5e-7 / 2, and float32 to 6e-8.
    assert (np.abs(apply_activation(x[None], "gelu")[0] - exact) <= 3e-7 * np.maximum(1, np.abs(x))).all()
    assert np.isnan(apply_activation(np.array([[np.nan]], np.float32), "gelu")).all()


# -- encoders --------------------------------------------------------------------------------------------------------


def check_layer_norm(ops: Any, columns: int, rows: int, seed: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x = (3 + rng.standard_normal((rows, columns))).astype(np.float32)
    weight, bias = rng.standard_normal((2, columns)).astype(np.float32)
    centred = x - x.mean(1, keepdims=True, dtype=np.float64)
    variance = (centred**2).mean(1, keepdims=True)
    on_device = ops.to_device(x.copy())
    ops.encoder_ops.layer_norm(on_device, (ops.to_device(weight), ops.to_device(bias), eps))
    expected = centred / np.sqrt(variance + eps) * weight + bias
    # The mean is rounded to 2^-24 of itself, about 3, which is more of rows that vary little.
    error = 4e-6 * (1 + np.abs(weight) / np.sqrt(variance + eps)) * (1 + np.abs(centred) / np.sqrt(variance + eps))
    assert (np.abs(ops.to_host(on_device) - expected) <= error).all() or columns == 1


@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 99))
@example(44, 3, 0)
def test_rows_are_normed_about_their_mean(columns: int, rows: int, seed: int) -> None:
    for backend in (NUMPY, *BEST):
        check_layer_norm(backend.open(), columns, rows, seed, 1e-12)
    if (columns, rows, seed) == (44, 3, 0):
        check_layer_norm(CUDA.open(), columns, rows, seed, EPS)


# Texts are shorter and longer than the sizes that a CPU has code for (32, 64, 128) and a unit of queries (192).
LENGTHS = [1, 5, 32, 33, 64, 65, 127, 129, 400, 2]
TEXTS = [(4, 4, 12, None), (12, 12, 32, None), (6, 2, 64, None), *((2, 2, 16, window) for window in (2, 7, 60, 300))]


@backend_cases(
    "ops heads kv_heads dim window lengths",
    [
        *((backend, *shape, LENGTHS) for backend in (NUMPY, *BEST) for shape in TEXTS),
        *((CUDA, *shape, [1, 64, 5, 97]) for shape in [(2, 2, 72, None), (4, 2, 16, 12), (1, 1, 10, None)]),
    ],
)
def test_a_token_sees_its_own_text(
    ops: Any, rng: np.random.Generator, heads: int, kv_heads: int, dim: int, window: int | None, lengths: list[int]
) -> None:
    """Those at most window // 2 away. A GPU rounds queries, keys, values and weights to halves."""
    qkv = normal(rng, sum(lengths), heads + 2 * kv_heads, dim)
    angles = rng.uniform(0, 6, (len(qkv), dim // 2))
    places, text = np.arange(len(qkv)), np.repeat(np.arange(len(lengths)), lengths)
    seen = text[:, None] == text
    if window is not None:
        seen &= np.abs(places[:, None] - places) <= window // 2
    rule = HeadRule(*ops.prepare([HeadTransform(kv_heads)]))
    for turns in (None, (np.cos(angles), np.sin(angles))):
        rope = None if turns is None else tuple(map(ops.to_device, turns))
        actual = ops.to_host(
            ops.encoder_ops.self_attention(ops.to_device(qkv.copy()), rope, rule, Texts(lengths, window), 0.3)
        )
        turned = qkv.astype(np.float64)
        if turns is not None:
            low, high = np.split(turned[:, : heads + kv_heads], 2, axis=2)
            cos, sin = (table[:, None] for table in turns)
            turned[:, : heads + kv_heads] = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)
        parts = np.split(turned, [heads, heads + kv_heads], axis=1)
        wanted = np.concatenate(
            [
                reference.attention(*(x[rows] for x in parts), seen[rows][:, rows], AttentionRule(0.3))
                for rows in (slice(end - length, end) for length, end in zip(lengths, np.cumsum(lengths), strict=True))
            ]
        )
        allowed = 4 * STEP["__half"] * np.abs(wanted).max() if ops.backend == "cuda" else 2e-5
        assert np.abs(actual - wanted).max() <= allowed


@backends(*BEST)
def test_a_vector_does_not_depend_on_the_other_texts(ops: Any, rng: np.random.Generator) -> None:
    lengths, heads, dim = [31, 200, 3, 64], 2, 32
    qkv = normal(rng, sum(lengths), 3 * heads, dim)
    rope = np.ones((len(qkv), dim // 2), np.float32), np.zeros((len(qkv), dim // 2), np.float32)
    rule = HeadRule(*ops.prepare([HeadTransform(heads)]))
    together, first = ops.self_attention(qkv.copy(), rope, rule, Texts(lengths), 0.3).copy(), 0
    for length in lengths:
        text, first = slice(first, first + length), first + length
        alone = ops.self_attention(qkv[text].copy(), (rope[0][text], rope[1][text]), rule, Texts([length]), 0.3)
        np.testing.assert_array_equal(alone, together[text])
