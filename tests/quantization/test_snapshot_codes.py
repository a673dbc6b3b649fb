"""Codes of a recurrent state's matrices: their arrays, and their errors."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.config import EngineConfig
from polarlm.engine.quantization.snapshot_codes import ALL, EIGHT_BITS, EXACT, FIVE_BITS, SnapshotCodes, narrowed
from tests.pairs import each

SIZES = [(8, 32), (128, 128), (64, 64)]


def matrices_of(rng: np.random.Generator, keys: int, values: int) -> np.ndarray:
    return rng.standard_normal((2, 3, keys, values)).astype(np.float32)


@pytest.mark.parametrize(("codes", "sizes"), each(ALL.values(), SIZES), ids=str)
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
def test_five_bits_lose_what_their_levels_do(rng: np.random.Generator, sizes: tuple[int, int]) -> None:
    """1/12 of the square of a step, which is a row's largest number over 15.5. That is 2.4 to 3 times the rms of 64 or
    128 Gaussian numbers on average, and less if a channel is larger than the others."""
    matrices = matrices_of(rng, *sizes)
    assert (2.4 / 15.5) ** 2 / 12 < relative_error(matrices) < (3 / 15.5) ** 2 / 12
    matrices[..., 3] *= 20
    assert relative_error(matrices) < (2.4 / 15.5) ** 2 / 12


def relative_error(matrices: np.ndarray) -> float:
    error = FIVE_BITS.decode(FIVE_BITS.encode(matrices)) - matrices
    return float(np.square(error).mean() / np.square(matrices).mean())


def test_no_number_is_further_off_than_half_a_step(rng: np.random.Generator) -> None:
    """After the rotation, which changes no length: of a row by √D halves of a step."""
    matrices = matrices_of(rng, 128, 128)
    fields = FIVE_BITS.encode(matrices)
    error = np.linalg.norm(FIVE_BITS.decode(fields) - matrices, axis=-1)
    # A scale in half precision is up to 2⁻¹¹ off, which moves the outermost level by 1/100 of a step.
    assert (error <= 0.51 * fields["scales"].astype(np.float32) * np.sqrt(128)).all()


def test_a_size_whose_codes_do_not_fill_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="state_type=5bit does not suit a recurrent state of 5 × 12 numbers"):
        FIVE_BITS.fields(5, 12)


def test_inputs_in_half_precision_saturate() -> None:
    inputs = np.array([1e6, -1e6, 0.1, 7], np.float32)
    np.testing.assert_array_equal(narrowed(inputs, FIVE_BITS.inputs), np.array([65504, -65504, 0.1, 7], np.float16))
    assert narrowed(inputs, EIGHT_BITS.inputs) is inputs


def test_settings_and_codes_have_the_same_names() -> None:
    field = EngineConfig.__dataclass_fields__["state_type"]
    assert set(field.metadata["choices"]) == set(ALL)
