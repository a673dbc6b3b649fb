"""Codes of a recurrent state's matrices: their arrays, and their errors."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.config import EngineConfig
from polarlm.engine.quantization.snapshot_codes import ALL, EIGHT_BITS, EXACT, SnapshotCodes
from tests.pairs import each

SIZES = [(8, 32), (128, 128), (64, 64)]


def matrices_of(rng: np.random.Generator, keys: int, values: int) -> np.ndarray:
    return rng.standard_normal((2, 3, keys, values)).astype(np.float32)


@pytest.mark.parametrize(("codes", "sizes"), each(ALL.values(), SIZES), ids=str)
def test_arrays_are_as_announced(rng: np.random.Generator, codes: SnapshotCodes, sizes: tuple[int, int]) -> None:
    """A snapshot is kept in arrays that are allocated before there is one."""
    announced = codes.fields(*sizes)
    kept = codes.encode(matrices_of(rng, *sizes))
    assert {name: (array.shape[2:], array.dtype) for name, array in kept.items()} == announced
    assert codes.decode(kept).shape == (2, 3, *sizes)
    assert codes.decode(kept).dtype == np.float32


@pytest.mark.parametrize("codes", ALL.values(), ids=lambda codes: codes.name)
def test_a_state_that_knows_nothing_stays_empty(codes: SnapshotCodes) -> None:
    assert not codes.decode(codes.encode(np.zeros((2, 8, 32), np.float32))).any()


@pytest.mark.parametrize("codes", ALL.values(), ids=lambda codes: codes.name)
def test_damaged_weights_do_not_stop_it(codes: SnapshotCodes) -> None:
    """The check of logits finds them, and says what they are."""
    matrices = np.ones((2, 8, 32), np.float32)
    matrices[0, 0, :3] = np.nan, np.inf, -np.inf
    codes.decode(codes.encode(matrices))


def test_exact_means_exact(rng: np.random.Generator) -> None:
    matrices = matrices_of(rng, 8, 5)
    np.testing.assert_array_equal(EXACT.decode(EXACT.encode(matrices)), matrices)


def test_a_channel_of_large_values_costs_the_others_no_precision(rng: np.random.Generator) -> None:
    matrices = matrices_of(rng, 8, 5)
    matrices[..., 3] *= 1000
    error = np.abs(EIGHT_BITS.decode(EIGHT_BITS.encode(matrices)) - matrices).max(axis=-2)
    assert (error <= 0.51 * np.abs(matrices).max(axis=-2) / 127).all()


def test_settings_and_codes_have_the_same_names() -> None:
    field = EngineConfig.__dataclass_fields__["state_type"]
    assert set(field.metadata["choices"]) == set(ALL)
