"""Codes of a recurrent state's matrices: their arrays, and their errors."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.config import EngineConfig
from polarlm.engine.quantization.snapshot_codes import ALL, EIGHT_BITS, EXACT, FOUR_BITS, SnapshotCodes, narrowed

SIZES = [(8, 32), (128, 128), (64, 64)]


def matrices_of(rng: np.random.Generator, keys: int, values: int) -> np.ndarray:
    return rng.standard_normal((2, 3, keys, values)).astype(np.float32)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("codes", ALL.values(), ids=lambda codes: codes.name)
def test_arrays_are_as_announced(rng: np.random.Generator, codes: SnapshotCodes, sizes: tuple[int, int]) -> None:
    """A snapshot is kept in arrays that are allocated before there is one."""
    announced = codes.fields(*sizes)
    found = codes.encode(matrices_of(rng, *sizes))
    assert {name: (array.shape[2:], array.dtype) for name, array in found.items()} == announced
    assert codes.decode(found).shape == (2, 3, *sizes)
    assert codes.decode(found).dtype == np.float32


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


@pytest.mark.parametrize("sizes", [(128, 128), (64, 64)], ids=str)
def test_four_bits_lose_what_their_levels_do(rng: np.random.Generator, sizes: tuple[int, int]) -> None:
    """Max, 1960: the levels of a Gaussian in 4 bits have .0095 of its variance as error, whatever the channels are."""
    matrices = matrices_of(rng, *sizes)
    for channel in (1.0, 20.0):
        matrices[..., 3] *= channel
        error = FOUR_BITS.decode(FOUR_BITS.encode(matrices)) - matrices
        assert 0.006 < np.square(error).mean() / np.square(matrices).mean() < 0.0125
    assert FOUR_BITS.fields(128, 128)["codes"][0] == (128, 64)


def test_a_size_that_a_rotation_does_not_support_is_refused() -> None:
    with pytest.raises(ValueError, match="state_type=4bit does not suit a recurrent state of 16 × 12 numbers"):
        FOUR_BITS.fields(16, 12)


def test_inputs_in_half_precision_saturate() -> None:
    inputs = np.array([1e6, -1e6, 0.1, 7], np.float32)
    np.testing.assert_array_equal(narrowed(inputs, FOUR_BITS.inputs), np.array([65504, -65504, 0.1, 7], np.float16))
    assert narrowed(inputs, EIGHT_BITS.inputs) is inputs


def test_settings_and_codes_have_the_same_names() -> None:
    field = EngineConfig.__dataclass_fields__["state_type"]
    assert set(field.metadata["choices"]) == set(ALL)
