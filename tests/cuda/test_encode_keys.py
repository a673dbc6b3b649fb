"""Keys that are rounded with all norms at once, on tensor cores, have the codes, norms and means of NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device import Addresses
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.quantization.conditioning import centre
from polarlm.engine.quantization.encode import encode_with_metric
from polarlm.engine.quantization.metric import Metric, residue_costs
from tests.cuda.programs import Program
from tests.cuda.test_encode_blocks import BlockShape, Side, arrays, codes_of, edges, halves, metric_of


@cache
def program(side: Side, tokens: int) -> tuple[Program, int, int]:
    """It does not compile where `launch_configs.key_bytes` is not the size of KeyArrays → program, threads, shared bytes."""
    layout = side.layout
    warps = -(-6 * tokens // 32)
    shared = launch_configs.key_bytes(layout, tokens, warps)
    text = source("encode_keys", layout, None, WARPS=warps, TOKENS=tokens, **launch_configs.ROUNDING)
    return (
        Program(text + f'static_assert(sizeof(KeyArrays<KeyLayout, KeyCodec>) == {shared}, "");\n'),
        32 * warps,
        shared,
    )


def encoded(side: Side, x: np.ndarray, metric: Metric, tokens: int, seed: int = 0) -> np.ndarray:
    """x (K, B, N, D), halves as float32 → the kernel's records (K, B, bytes)."""
    heads, blocks = x.shape[:2]
    full = np.ascontiguousarray(side.layout.full.pack(codecs.get("f16").encode(x)).swapaxes(0, 1))
    out = np.zeros((blocks, heads, side.layout.nbytes), np.uint8)
    row = arrays(side, metric, out, full)._replace(residues=residue_costs(metric), matrix=None)
    jobs = np.stack([np.zeros(blocks), np.arange(blocks), np.arange(blocks)], axis=1).astype(np.int32)
    kernel, threads, shared = program(side, tokens)
    args = Addresses([row], written=1), jobs, np.int32(heads)
    kernel.launch("encode_keys_kernel", (blocks, heads), (threads,), *args, shared=shared, seed=seed)
    return out.swapaxes(0, 1)


def tilted_costs(side: Side, x: np.ndarray, fields: dict[str, np.ndarray], metric: Metric) -> np.ndarray:
    """What the errors of the decoded fields cost the queries that lean towards x, for each token (K, B, N)."""
    assert metric.tilt_mean is not None
    matrix, mean = (array.astype(np.float64)[:, None] for array in (metric.matrix, metric.tilt_mean[:, None]))
    lean = x @ (matrix - mean.swapaxes(2, 3) * mean) / np.sqrt(x.shape[-1]) + mean
    error = x - codecs.get(side.name).decode(fields).astype(np.float64)
    return (error @ matrix * error).sum(-1) + np.square((error * lean).sum(-1))


def assert_as_good(side: Side, x: np.ndarray, tokens: int, seed: int = 0) -> None:
    """Sums are added in another order than NumPy's, and products are of two halves for each number."""
    metric = metric_of(side, len(x))
    fields, mean = side.layout.unpack(encoded(side, x, metric, tokens, seed))
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
        ("ring4", BlockShape(16, 16, 16, 8)),  # one group of targets in registers, and half a tile of warps
        ("ring3.5", BlockShape(72, 32, 16, 16)),  # two, the second one smaller; a block in two parts
        ("ring5", BlockShape(24, 32, 32, 0)),  # codes of two bytes, twelve candidates
    ],
)
def test_codes_equal_those_of_numpy(rng: np.random.Generator, name: str, shape: BlockShape) -> None:
    side = Side(False, name, shape)
    assert_as_good(side, halves(rng, 2, 2, shape.size, shape.dim, bias=0.5), shape.tokens)


def test_exceptional_blocks_have_the_codes_of_numpy() -> None:
    shape = BlockShape(16, 16, 16, 8)
    assert_as_good(Side(False, "ring4", shape), edges(shape), 16)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("ring4", 64), ("ring5", 128)])
def test_the_engine_s_launch_gives_the_codes_of_numpy(rng: np.random.Generator, name: str, size: int) -> None:
    """The shapes of models, whose emulation takes a while."""
    side = Side(False, name, BlockShape(128, size, 64, 8))
    config = launch_configs.encode_keys(side.layout)
    assert config is not None
    assert_as_good(side, halves(rng, 2, 1, size, 128, bias=0.5), int(config.defines["TOKENS"]))
