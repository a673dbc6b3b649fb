"""Cache types of other projects: their formats by hand, their errors and their bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from polarlm.bench.lab.codecs import fp8, ggml_rotated, int4_token_head, kvarn, nvfp4
from polarlm.bench.lab.codecs.fp8 import E4M3
from polarlm.bench.lab.codecs.ggml_rotated import hadamard
from polarlm.bench.lab.codecs.kvarn import variance_scales
from polarlm.engine import codecs

N, D = 64, 64
MODULES = [fp8, ggml_rotated, int4_token_head, kvarn, nvfp4]


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with codecs.more_types(MODULES):
        yield


@pytest.fixture
def blocks(rng: np.random.Generator) -> np.ndarray:
    """Vectors of very different lengths, and one of zeros."""
    x = rng.normal(0, 1, (5, N, D)) * np.exp(rng.normal(0, 1, (5, N, 1)))
    x[0, 3] = 0
    return x.astype(np.float32)


def decoded(name: str, x: np.ndarray) -> np.ndarray:
    codec = codecs.get(name)
    return codec.decode(codec.encode(x))


def test_e4m3_by_hand() -> None:
    """1 is 0 0111 000, the least number 2⁻⁹, the largest 448; beyond it saturates, halves go to even mantissas."""
    assert (E4M3[0b0111_000], E4M3[1], E4M3[-1]) == (1, 2**-9, 448)
    assert (np.diff(E4M3) > 0).all()
    values = np.array([[1.0, -1.0, 1.0625, 1.1875, 500, 2**-10, 3 * 2**-10, 0, 1.07]], np.float32)
    actual = decoded("fp8", values[None])[0, 0]
    assert actual.tolist() == [1, -1, 1, 1.25, 448, 0, 2 * 2**-9, 0, 1.125]
    scaled = decoded("fp8-token-head", np.array([[[7, -3.5, 0.21, 0]]], np.float32))[0, 0]
    assert scaled == pytest.approx([7, -3.5, 13 / 64, 0])  # 448, −224 and, to the nearest 13.44, 13 of 64ths


def test_nvfp4_errs_by_a_sixth_of_the_largest_at_most(blocks: np.ndarray) -> None:
    """Half the distance from 4 to 6, of steps that E4M3 has rounded by a sixteenth: the largest may saturate by it."""
    groups = blocks.reshape(5, N, -1, 16)
    error = np.abs(decoded("nvfp4", blocks).reshape(groups.shape) - groups)
    assert (error <= np.abs(groups).max(-1, keepdims=True) * (1 / 6 * 17 / 16 + 1e-6)).all()


def test_int4_errs_by_a_step_at_most(blocks: np.ndarray) -> None:
    """Half for the code, and half for the zero point, which moves all values of a vector."""
    step = np.ptp(blocks, axis=-1, keepdims=True) / 15
    assert (np.abs(decoded("int4-token-head", blocks) - blocks) <= step * (1 + 1e-5) + 1e-6).all()


@pytest.mark.parametrize(("name", "inner"), [("q4_0-rotated", "q4_0"), ("q8_0-rotated", "q8_0")])
def test_rotated_types_are_ggmls_after_a_hadamard_matrix(name: str, inner: str, blocks: np.ndarray) -> None:
    codec, matrix = codecs.get(name), hadamard(D)
    assert codec.rotation(D) == pytest.approx(matrix)
    np.testing.assert_allclose(matrix @ matrix, np.eye(D), atol=1e-6)  # symmetric, so its own inverse
    np.testing.assert_allclose(np.abs(matrix), 1 / 8)
    assert (matrix[0] > 0).all()
    np.testing.assert_array_equal(decoded(name, blocks), decoded(inner, blocks))
    keys, values = codecs.get(name).rotation(3 * 128), codecs.get(f"{name}-v").rotation(3 * 128)
    np.testing.assert_array_equal(keys, np.kron(np.eye(3), hadamard(128)))
    np.testing.assert_array_equal(values, np.kron(np.eye(6), matrix))


@pytest.mark.parametrize(("name", "axis"), [("kvarn-k4", 1), ("kvarn-v4", 2), ("kvarn-v2", 2)])
def test_kvarn_errs_by_half_a_step_of_what_is_even(name: str, axis: int, blocks: np.ndarray) -> None:
    """And by the rounding of three scales to halves, 2⁻¹¹ each, of what may be as large as the range."""
    order = (0, 1) if axis == 1 else (1, 0)
    tokens, channels = variance_scales(blocks.astype(np.float64), order)
    even = blocks / tokens / channels
    reach = np.ptp(even, axis=axis, keepdims=True)
    most = (1 << int(name[-1])) - 1
    bound = (reach / most / 2 + 4 * 2.0**-11 * (reach + np.abs(even).max(axis, keepdims=True))) * tokens * channels
    assert (np.abs(decoded(name, blocks) - blocks) <= bound + 1e-6).all()


def test_bits_of_every_type() -> None:
    expected = {
        "fp8": 8,
        "fp8-token-head": 8.5,
        "nvfp4": 4.5 + 32 / (N * D),
        "int4-token-head": 4.5,
        **{"q4_0-rotated": 4.5, "q4_0-rotated-v": 4.5, "q8_0-rotated": 8.5, "q8_0-rotated-v": 8.5},
        **{"kvarn-k4": 4.75, "kvarn-v4": 4.75, "kvarn-v2": 2.75},
    }
    assert {
        name: codecs.bits_per_value(codecs.get(name), N, D) for module in MODULES for name in module.NAMES
    } == expected
