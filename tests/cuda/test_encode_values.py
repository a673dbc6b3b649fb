"""Values that are rounded on tensor cores, with error feedback between pairs and tokens, have NumPy's codes and norms."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device import Addresses
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.cuda.launch import LaunchConfig
from polarlm.engine.quantization.encode import encode_with_metric
from polarlm.engine.quantization.metric import Metric, residue_costs, without_feedback
from polarlm.engine.records import Layout
from tests.cuda.programs import Program
from tests.cuda.test_encode_blocks import BlockShape, Side, arrays, codes_of, edges, halves, metric_of


@cache
def program(layout: Layout) -> Program:
    """It does not compile where `launch_configs.encode_values` does not reckon with the size of ValueArrays."""
    config = config_of(layout)
    text = source("encode_values", None, layout, **config.defines)
    return Program(text + f'static_assert(sizeof(ValueArrays<ValueLayout, ValueCodec>) == {config.shared}, "");\n')


def config_of(layout: Layout) -> LaunchConfig:
    config = launch_configs.encode_values(layout)
    assert config is not None
    return config


def encoded(side: Side, x: np.ndarray, metric: Metric, seed: int = 0) -> np.ndarray:
    """x (K, B, N, D), halves as float32 → the kernel's records (K, B, bytes)."""
    heads, blocks = x.shape[:2]
    full = np.ascontiguousarray(side.layout.full.pack(codecs.get("f16").encode(x)).swapaxes(0, 1))
    out = np.zeros((blocks, heads, side.layout.nbytes), np.uint8)
    factor, residues = residue_costs(metric)
    feedback = np.ascontiguousarray(factor.swapaxes(1, 2))
    row = arrays(side, metric, out, full)._replace(feedback=feedback, residues=residues, matrix=None)
    jobs = np.stack([np.zeros(blocks), np.arange(blocks), np.arange(blocks)], axis=1).astype(np.int32)
    config = config_of(side.layout)
    args = Addresses([row], written=1), jobs, np.int32(heads)
    launch = "encode_values_kernel", (blocks, heads), (config.threads,)
    program(side.layout).launch(*launch, *args, shared=config.shared, seed=seed)
    return out.swapaxes(0, 1)


def costs(side: Side, x: np.ndarray, fields: dict[str, np.ndarray], metric: Metric) -> np.ndarray:
    """What the errors of the decoded fields cost, for each block (K, B): errors of tokens together, as attention adds
    them up."""
    error = x - codecs.get(side.name).decode(fields).astype(np.float64)
    if metric.token_feedback is not None:
        error = error + np.einsum("ti,kbid->kbtd", metric.token_feedback[0].reshape(2 * x.shape[2:3]), error)
    return np.einsum("kbnd,kde,kbne->kb", error, metric.matrix.astype(np.float64), error)


def assert_as_good(side: Side, x: np.ndarray, metric: Metric, seed: int = 0) -> None:
    """Sums are added in another order than NumPy's, and products are of two halves for each number."""
    fields, _ = side.layout.unpack(encoded(side, x, metric, seed))
    wanted = encode_with_metric(codecs.get(side.name), x, metric)
    print((codes_of(side, fields) == codes_of(side, wanted)).mean(), costs(side, x, fields, metric) / costs(side, x, wanted, metric))
    assert (codes_of(side, fields) == codes_of(side, wanted)).mean() >= 0.999
    assert (costs(side, x, fields, metric) <= costs(side, x, wanted, metric) * (1 + 1e-4)).all()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ring3.5", BlockShape(32, 32)),
        ("ring4", BlockShape(24, 16)),  # half of the last tile
        ("turbo4", BlockShape(24, 32)),  # codes of single values
    ],
)
def test_codes_equal_those_of_numpy(rng: np.random.Generator, name: str, shape: BlockShape) -> None:
    side = Side(True, name, shape)
    assert_as_good(side, halves(rng, 2, 2, shape.size, shape.dim, bias=0.5), metric_of(side, 2), seed=2)
