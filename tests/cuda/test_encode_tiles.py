"""Blocks that are rounded in tiles, on tensor cores, and keys that are rounded with all norms at once, have the codes,
norms and means of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device import Addresses
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.cuda.kv.store import feedback_tiles
from polarlm.engine.backends.cuda.launch import LaunchConfig
from polarlm.engine.quantization.conditioning import centre
from polarlm.engine.quantization.metric import Metric, remove_feedback, residue_costs
from polarlm.engine.records import Layout
from tests.cuda.programs import Program, on_gpu
from tests.cuda.test_encode_blocks import BlockShape, Side, arrays, codes_of, edges, halves, metric_of
from tests.pairs import mostly_slow

TILES, KEYS = "encode_tiles", "encode_keys"
# Kernel → its shared memory, and how it has F (K, D, D) of the metric.
KERNELS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    TILES: ("TileArrays<SIDE, CODEC>", lambda factor: factor.swapaxes(1, 2)),
    KEYS: ("KeyArrays<KeyLayout, KeyCodec>", feedback_tiles),
}


@cache
def program(kernel: str, layout: Layout) -> tuple[Program, LaunchConfig]:
    """The program does not compile where `launch_configs` does not reckon with the size of the shared memory."""
    config = getattr(launch_configs, kernel)(layout)
    sides = (None, layout) if layout.record.geometry.values else (layout, None)
    text = source(kernel, *sides, **config.defines)
    return Program(text + f'static_assert(sizeof({KERNELS[kernel][0]}) == {config.shared}, "");\n'), config


def launched(
    run: Callable[..., Any], kernel: str, side: Side, x: np.ndarray, metric: Metric, **more: int
) -> tuple[np.ndarray, Any]:
    """x (K, B, N, D), halves as float32 → the kernel's records (K, B, bytes), and what `run`, of a program, returns."""
    heads, blocks = x.shape[:2]
    full = np.ascontiguousarray(side.layout.full.pack(codecs.get("f16").encode(x)).swapaxes(0, 1))
    out = np.zeros((blocks, heads, side.layout.nbytes), np.uint8)
    factor, residues = residue_costs(metric)
    feedback = np.ascontiguousarray(KERNELS[kernel][1](factor))
    row = arrays(side, metric, out, full)._replace(feedback=feedback, residues=residues, matrix=None)
    jobs = np.stack([np.zeros(blocks), np.arange(blocks), np.arange(blocks)], axis=1).astype(np.int32)
    args, (compiled, config) = (Addresses([row], written=1), jobs, np.int32(heads)), program(kernel, side.layout)
    launch = f"{kernel}_kernel", (blocks, heads), (config.threads,)
    result = run(compiled, *launch, *args, shared=config.shared, **more)
    return out.swapaxes(0, 1), result


def encoded(kernel: str, side: Side, x: np.ndarray, metric: Metric, seed: int = 0) -> np.ndarray:
    return launched(Program.launch, kernel, side, x, metric, seed=seed)[0]


def costs(side: Side, x: np.ndarray, fields: dict[str, np.ndarray], metric: Metric) -> np.ndarray:
    """What the errors of the decoded fields cost, for each block (K, B), those of earlier tokens added to a token's."""
    error = x - codecs.get(side.name).decode(fields).astype(np.float64)
    if metric.token_feedback is not None:
        size = side.shape.size
        error = error + metric.token_feedback[0].reshape(size, size).astype(np.float64) @ error
    return np.einsum("kbnd,kde,kbne->kb", error, metric.matrix.astype(np.float64), error)


def tilted_costs(side: Side, x: np.ndarray, fields: dict[str, np.ndarray], metric: Metric) -> np.ndarray:
    """What the errors of the decoded fields cost the queries that lean towards x, for each token (K, B, N)."""
    assert metric.tilt_mean is not None
    matrix, mean = (array.astype(np.float64)[:, None] for array in (metric.matrix, metric.tilt_mean[:, None]))
    lean = x @ (matrix - mean.swapaxes(2, 3) * mean) / np.sqrt(x.shape[-1]) + mean
    error = x - codecs.get(side.name).decode(fields).astype(np.float64)
    return (error @ matrix * error).sum(-1) + np.square((error * lean).sum(-1))


def assert_as_good(kernel: str, side: Side, x: np.ndarray, metric: Metric, seed: int = 0, most: float = 1e-4) -> None:
    """Sums are added in another order than NumPy's, and products are of two halves for each number."""
    fields, mean = side.layout.unpack(encoded(kernel, side, x, metric, seed))
    wanted, wanted_mean = side.expected(x, metric)
    for name, field in wanted_mean.items():
        np.testing.assert_array_equal(mean[name], field)
    if side.mean_bits:
        x, _ = centre(x, side.mean_bits)
    assert (codes_of(side, fields) == codes_of(side, wanted)).mean() >= 0.999
    cost = tilted_costs if kernel == KEYS else costs
    assert (cost(side, x, fields, metric) <= cost(side, x, wanted, metric) * (1 + most)).all()


SMALL = [
    (TILES, "ring3.5", True, BlockShape(32, 32)),
    (TILES, "turbo4", True, BlockShape(24, 32)),  # codes of single values; half of the last tile of channels
    (TILES, "ring4", False, BlockShape(24, 16, mean_bits=8)),
    (KEYS, "ring4", False, BlockShape(16, 16, mean_bits=8)),
    (KEYS, "ring3.5", False, BlockShape(72, 48, mean_bits=16)),  # targets in registers in two parts; three passes
    (KEYS, "turbo4", False, BlockShape(24, 32)),  # codes of single values, no means
]
OF_MODELS = [  # the third of TILES has not all tokens at once
    (kernel, name, values, BlockShape(dim, size, mean_bits=8))
    for kernel, sizes in (
        (TILES, (("ring3.5", 64, 128), ("ring5", 128, 128), ("ring3", 128, 256), ("turbo4", 64, 80))),
        (KEYS, (("ring4", 64, 128), ("ring5", 128, 128), ("ring3.5", 64, 256), ("turbo4", 64, 128))),
    )
    for name, size, dim in sizes
    for values in ((False, True) if kernel == TILES else (False,))
]


@mostly_slow("kernel, name, values, shape", SMALL + OF_MODELS, SMALL)
def test_codes_equal_those_of_numpy(
    rng: np.random.Generator, kernel: str, name: str, values: bool, shape: BlockShape
) -> None:
    side = Side(values, name, shape)
    x = halves(rng, 2, 1 + (shape.size < 64), shape.size, shape.dim, bias=0.5)
    assert_as_good(kernel, side, x, metric_of(side, 2, tilt=kernel == KEYS), seed=2)


def test_codes_without_either_feedback_equal_those_of_numpy(rng: np.random.Generator) -> None:
    side, keys = Side(True, "ring3.5", BlockShape(32, 32)), Side(False, "ring4", BlockShape(16, 16, mean_bits=8))
    x = halves(rng, 2, 1, 32, 32, bias=0.5)
    assert_as_good(TILES, side, x, metric_of(side, 2, tokens=False))
    assert_as_good(TILES, side, x, remove_feedback(metric_of(side, 2)))
    assert_as_good(KEYS, keys, halves(rng, 2, 2, 16, 16, bias=0.5), remove_feedback(metric_of(keys, 2, tilt=True)))


@pytest.mark.parametrize(
    ("kernel", "side", "most"),
    [
        (TILES, Side(True, "ring3.5", BlockShape(32, 32)), 1e-3),
        (TILES, Side(True, "turbo4", BlockShape(32, 32)), 1e-3),
        (KEYS, Side(False, "ring4", BlockShape(16, 16, mean_bits=8)), 1e-4),
    ],
)
def test_exceptional_blocks_have_the_codes_of_numpy(kernel: str, side: Side, most: float) -> None:
    """A token beside one that is 10^12 times as long, zeros, equal ones, and values in the middle between two levels,
    which may become either."""
    assert_as_good(kernel, side, edges(side.shape), metric_of(side, 1, tilt=kernel == KEYS), most=most)


def test_lanes_search_for_a_point_in_their_turn_alone(rng: np.random.Generator) -> None:
    """What lanes have outside of their turn may be far from all points, as beside tokens that are much longer; then a
    warp would compare with each point. With all lanes searching it is 11,148 wavefronts of shared memory."""
    if on_gpu():
        pytest.skip("the emulator counts accesses")
    side = Side(True, "ring3.5", BlockShape(32, 32))
    x = halves(rng, 2, 1, 32, 32, bias=0.5)
    x[:, :, 5] *= 1e-3
    _, rows = launched(Program.traffic, TILES, side, x, metric_of(side, 2))
    assert sum(row.used for row in rows if row.is_shared) < 7500
