"""Angles of RoPE follow the formula at any position, whatever other positions come with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.model.rope import RopeTables, pair_frequencies
from polarlm.model_loaders.config import Attention, GatedMLP, Layer, ModelConfig, RopeConfig

ATTENTION = Attention(4, 2, 64, RopeConfig(theta=500_000.0))
CONFIG = ModelConfig("llama", (Layer(ATTENTION, GatedMLP(64)),), 64, 128, max_context=1 << 20, norm_eps=1e-5)


@given(st.lists(st.integers(0, (1 << 20) - 1), max_size=40))
def test_tables_are_those_of_the_formula(positions: list[int]) -> None:
    """Up to the rounding of angles to float64, which at a million radians is 1e-10, and of results to float32."""
    ((cos, sin),) = RopeTables(CONFIG).tables(np.array(positions, np.int64))
    frequencies, factors = pair_frequencies(ATTENTION)
    angles = np.multiply.outer(np.array(positions, np.float64), frequencies)
    assert cos.shape == sin.shape == (len(positions), 32)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, np.cos(angles) * factors, rtol=2**-24, atol=1e-9)
    np.testing.assert_allclose(sin, np.sin(angles) * factors, rtol=2**-24, atol=1e-9)


@pytest.mark.parametrize("position", [0, 255, 256, 70_000])
def test_a_position_has_the_same_angles_in_any_company(position: int) -> None:
    alone, among = RopeTables(CONFIG), RopeTables(CONFIG)
    among.tables(np.array([3, 900_000]))
    both = among.tables(np.array([5, position, 800_000]))
    for one, of_three in zip(alone.tables(np.array([position]))[0], both[0], strict=True):
        np.testing.assert_array_equal(one[0], of_three[1])


def test_channels_without_rotation_keep_their_values() -> None:
    layer = replace(CONFIG.layers[0], mixer=replace(ATTENTION, rope=None))
    ((cos, sin),) = RopeTables(replace(CONFIG, layers=(layer,))).tables(np.arange(600))
    np.testing.assert_array_equal(cos, 1)
    np.testing.assert_array_equal(sin, 0)


def test_queries_grow_with_the_logarithm_of_their_position() -> None:
    layer = replace(CONFIG.layers[0], mixer=replace(ATTENTION, query_growth=(0.5, 16)))
    ((_, _, factors),) = RopeTables(replace(CONFIG, layers=(layer,))).tables(np.array([0, 15, 16, 47, 700_000]))
    wanted = 1 + 0.5 * np.log([1, 1, 2, 3, 43_751])
    np.testing.assert_allclose(factors, wanted[:, None], rtol=2**-23)
