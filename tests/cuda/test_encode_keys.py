"""Keys that are rounded with all norms at once, on tensor cores, have the codes, norms and means of NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.quantization.metric import Metric, without_feedback
from tests.cuda import test_encode_tiles
from tests.cuda.test_encode_blocks import BlockShape, Side, edges, halves, metric_of
from tests.pairs import mostly_slow


def tilted_costs(side: Side, x: np.ndarray, fields: dict[str, np.ndarray], metric: Metric) -> np.ndarray:
    """What the errors of the decoded fields cost the queries that lean towards x, for each token (K, B, N)."""
    assert metric.tilt_mean is not None
    matrix, mean = (array.astype(np.float64)[:, None] for array in (metric.matrix, metric.tilt_mean[:, None]))
    lean = x @ (matrix - mean.swapaxes(2, 3) * mean) / np.sqrt(x.shape[-1]) + mean
    error = x - codecs.get(side.name).decode(fields).astype(np.float64)
    return (error @ matrix * error).sum(-1) + np.square((error * lean).sum(-1))


assert_as_good = partial(test_encode_tiles.assert_as_good, kernel="encode_keys", costs=tilted_costs)

SMALL = [
    ("ring4", BlockShape(16, 16, mean_bits=8)),
    ("ring3.5", BlockShape(72, 48, mean_bits=16)),  # targets in registers in two parts; three passes
    ("turbo4", BlockShape(24, 32)),  # codes of single values, no means
]
OF_MODELS = [
    (name, BlockShape(dim, size, mean_bits=8))
    for name, size, dim in (("ring4", 64, 128), ("ring5", 128, 128), ("ring3.5", 64, 256), ("turbo4", 64, 128))
]


@mostly_slow("name, shape", SMALL + OF_MODELS, SMALL)
def test_codes_equal_those_of_numpy(rng: np.random.Generator, name: str, shape: BlockShape) -> None:
    side = Side(False, name, shape)
    x = halves(rng, 2, 1 + (shape.size < 64), shape.size, shape.dim, bias=0.5)
    assert_as_good(side, x, metric_of(side, 2, tilt=True), seed=2)


def test_errors_that_are_not_fed_back_cost_what_they_cost(rng: np.random.Generator) -> None:
    side = Side(False, "ring4", BlockShape(16, 16, mean_bits=8))
    assert_as_good(side, halves(rng, 2, 2, 16, 16, bias=0.5), without_feedback(metric_of(side, 2, tilt=True)))


def test_exceptional_blocks_have_the_codes_of_numpy() -> None:
    side = Side(False, "ring4", BlockShape(16, 16, mean_bits=8))
    assert_as_good(side, edges(side.shape), metric_of(side, 1, tilt=True))
