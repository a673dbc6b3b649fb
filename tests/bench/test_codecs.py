"""Cache types of other projects: what README's tables have, by hand, and the bits of all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from polarlm.bench.lab.codecs import fp8, ggml_rotated, int4_token_head, kvarn, nvfp4
from polarlm.bench.lab.codecs.fp8 import E4M3
from polarlm.bench.lab.codecs.ggml_rotated import hadamard
from polarlm.bench.quality.codecs import ggml
from polarlm.engine import codecs

N, D = 64, 64
MODULES = [fp8, ggml_rotated, int4_token_head, kvarn, nvfp4]


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with codecs.more_types([*MODULES, ggml]):
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
