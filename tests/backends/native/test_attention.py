"""Attention of steps over tiles, against attention in float64 over what the blocks read back as.

With plain tiles of float32, so that only the arithmetic of the driver differs.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.ops import HeadTransform
from engine.codecs._rotation import dense, signed_hadamard, twice_signed_hadamard
from tests.backends.native.attending import Sequence_, Shape, attended, exact, step
from tests.backends.native.levels import every_level, launcher
from tests.backends.native.plain_tiles import PlainKeys, PlainValues

from engine.backends.native import codecs  # isort: skip
from engine.backends.native.heads import HeadOps
from engine.backends.native.target import Level, best

RAGGED = [Sequence_(0), Sequence_(3), Sequence_(16), Sequence_(47), Sequence_(700), Sequence_(2000), Sequence_(31)]
SEVERAL = [Sequence_(5, 4), Sequence_(64, 1), Sequence_(78, 16), Sequence_(15, 2), Sequence_(640, 9)]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        keys=lambda codec, n, dim: PlainKeys(n, dim), values=lambda codec, n, dim: PlainValues(n, dim)
    )
    monkeypatch.setattr(codecs, "_module", lambda name: module)


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@every_level
@pytest.mark.parametrize("window", [None, 20, 600])
@pytest.mark.parametrize("sequences", [RAGGED, SEVERAL], ids=["one row", "several rows"])
def test_attention_at_every_level(level: Level, window: int | None, sequences: list[Sequence_]) -> None:
    case = step(Shape(), sequences, window)
    check(attended(case, level, window), exact(case, window))


@pytest.mark.parametrize(
    ("dim", "group", "block_size", "mean_bits"),
    [
        (8, 1, 16, 8),
        (48, 2, 32, 16),
        (64, 8, 64, 0),
        (80, 4, 48, 8),
        (96, 7, 256, 8),
        (128, 8, 64, 8),
        (256, 3, 16, 16),
    ],
)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 16)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 800),
    one_row=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_of_any_shape(
    dim: int,
    group: int,
    block_size: int,
    mean_bits: int,
    lengths: list[tuple[int, int]],
    window: int | None,
    one_row: bool,
    seed: int,
) -> None:
    shape = Shape(2, group, dim, block_size, mean_bits=mean_bits)
    sequences = [Sequence_(length, 1 if one_row else rows) for length, rows in lengths]
    case = step(shape, sequences, window, seed)
    check(attended(case, best(), window), exact(case, window))


@every_level
@pytest.mark.parametrize("rotation", [None, signed_hadamard, twice_signed_hadamard, dense])
@pytest.mark.parametrize("dim", [64, 80])
def test_the_result_is_scaled_and_rotated_back(level: Level, rotation: object, dim: int) -> None:
    rng = np.random.default_rng(0)
    matrix = None if rotation is None else rotation(dim)  # type: ignore[operator]
    given = HeadTransform(2, None, None, matrix, rng.uniform(0.5, 2, 6).astype(np.float32))
    (transform,) = HeadOps(launcher(level)).prepare([given])
    case = step(Shape(dim=dim), [Sequence_(100, 2), Sequence_(5)], None)
    check(attended(case, level, None, transform), exact(case, None, transform))


def test_scores_that_are_far_apart() -> None:
    """Weights of 0, and tops that grow from chunk to chunk."""
    case = step(Shape(), [Sequence_(1300)], None)
    for large in (30.0, 1e3):
        check(attended(case._replace(q=case.q * large), best(), None), exact(case._replace(q=case.q * large), None))


def test_any_number_of_threads_finds_the_same() -> None:
    case = step(Shape(), [*RAGGED, Sequence_(1500)], None)
    np.testing.assert_array_equal(attended(case, best(), None, threads=1), attended(case, best(), None, threads=2))


def test_a_sequence_finds_the_same_alone() -> None:
    case = step(Shape(), RAGGED, None)
    together = attended(case, best(), None)
    for number, view in enumerate(case.views):
        first = view.rows.start
        alone = case._replace(views=[case.views[number]], q=case.q[first : first + 1])
        alone.views[0] = type(view)(**{**vars(view), "rows": slice(0, 1)})
        np.testing.assert_array_equal(attended(alone, best(), None), together[first : first + 1])
