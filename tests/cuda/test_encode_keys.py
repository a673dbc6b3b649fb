"""Keys that are rounded with all norms at once, on tensor cores, have the codes, norms and means of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.quantization.conditioning import centre
from polarlm.engine.quantization.encode import encode_with_metric
from polarlm.engine.quantization.metric import Metric, without_feedback
from tests.cuda.test_encode_blocks import BlockShape, Side, codes_of, edges, halves, metric_of
from tests.cuda.test_encode_tiles import encoded


def tilted_costs(side: Side, x: np.ndarray, fields: dict[str, np.ndarray], metric: Metric) -> np.ndarray:
    """What the errors of the decoded fields cost the queries that lean towards x, for each token (K, B, N)."""
    assert metric.tilt_mean is not None
    matrix, mean = (array.astype(np.float64)[:, None] for array in (metric.matrix, metric.tilt_mean[:, None]))
    lean = x @ (matrix - mean.swapaxes(2, 3) * mean) / np.sqrt(x.shape[-1]) + mean
    error = x - codecs.get(side.name).decode(fields).astype(np.float64)
    return (error @ matrix * error).sum(-1) + np.square((error * lean).sum(-1))


def assert_as_good(side: Side, x: np.ndarray, metric: Metric, seed: int = 0) -> None:
    """Sums are added in another order than NumPy's, and products are of two halves for each number."""
    fields, mean = side.layout.unpack(encoded("encode_keys", side, x, metric, seed))
    if side.mean_bits:
        x, wanted_mean = centre(x, side.mean_bits)
        for name, field in wanted_mean.items():
            np.testing.assert_array_equal(mean[name], field)
    wanted = encode_with_metric(codecs.get(side.name), x, metric)
    assert (codes_of(side, fields) == codes_of(side, wanted)).mean() >= 0.999
    costs, most = (tilted_costs(side, x, both, metric) for both in (fields, wanted))
    assert (costs <= most * (1 + 1e-4)).all()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ring4", BlockShape(16, 16, mean_bits=8)),
        ("ring3.5", BlockShape(72, 48, mean_bits=16)),  # targets in registers in two parts; three passes
        ("turbo4", BlockShape(24, 32)),  # codes of single values, no means
    ],
)
def test_codes_equal_those_of_numpy(rng: np.random.Generator, name: str, shape: BlockShape) -> None:
    side = Side(False, name, shape)
    assert_as_good(side, halves(rng, 2, 2, shape.size, shape.dim, bias=0.5), metric_of(side, 2, tilt=True), seed=2)


def test_errors_that_are_not_fed_back_cost_what_they_cost(rng: np.random.Generator) -> None:
    side = Side(False, "ring4", BlockShape(16, 16, mean_bits=8))
    assert_as_good(side, halves(rng, 2, 2, 16, 16, bias=0.5), without_feedback(metric_of(side, 2, tilt=True)))


def test_exceptional_blocks_have_the_codes_of_numpy() -> None:
    side = Side(False, "ring4", BlockShape(16, 16, mean_bits=8))
    assert_as_good(side, edges(side.shape), metric_of(side, 1, tilt=True))


@pytest.mark.slow  # the emulation takes a while
@pytest.mark.parametrize(
    ("name", "size", "dim"),
    [("ring4", 64, 128), ("ring5", 128, 128), ("ring3.5", 64, 256), ("turbo4", 64, 128)],
)
def test_codes_in_the_shapes_of_models_equal_those_of_numpy(
    rng: np.random.Generator, name: str, size: int, dim: int
) -> None:
    side = Side(False, name, BlockShape(dim, size, mean_bits=8))
    assert_as_good(side, halves(rng, 2, 1, size, dim, bias=0.5), metric_of(side, 2, tilt=True))
