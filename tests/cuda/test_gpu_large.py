"""Tests that need a GPU: models and matrices of the shape of an 8B model, and the batch for the sanitizer."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from polarlm.bench.lab.gpu.setup import CupyClock, Gpu, Sizes
from polarlm.bench.random_weights import RandomMatrix, RandomWeights
from polarlm.engine.backends.cuda.device import Device
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.weights import weight_bytes
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.weight_formats import Linear
from tests.bare import forward
from tests.cuda import small_batches
from tests.cuda.emulated import open_device
from tests.cuda.gpu_sizes import SIZES, needs
from tests.cuda.stored_model import random_model, stored_sequence
from tests.cuda.test_gpu import Unrecorded
from tests.pairs import pairs

pytestmark = pytest.mark.skipif(
    not os.environ.get("TESTS_GPU"), reason="needs a GPU, and TESTS_GPU=1 in the environment"
)

LAYERS = 3
_STORED = 1 << 30  # bytes of the KV store and of the work of steps, at most


@pytest.fixture(autouse=True)
def _one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One of all processes, since each test may take gigabytes, which it gives back for the tests of the others."""
    fcntl = pytest.importorskip("fcntl", reason="processes take turns by locks of Linux")
    with (tmp_path_factory.getbasetemp().parent / "large.lock").open("w") as lock:  # that folder is for all of them
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        give_back()


def give_back() -> None:
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def sizes() -> Sizes:
    usual = Sizes()
    return replace(usual, config=replace(usual.config, layers=usual.config.layers[:1] * LAYERS))


def opened(make: Callable[[Device], CudaOps]) -> Gpu:
    def fresh() -> tuple[CudaOps, Device]:
        device = open_device()
        return make(device), device

    return Gpu(fresh, CupyClock(), {})


def steps(make: Callable[[Device], CudaOps], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (steps, B) of ragged sequences whose blocks are random, over two block ends; and the last logits."""
    made, n = sizes(), sizes().block_size
    cell = tuple((blocks + 1) * n - 2 for blocks in SIZES.large_blocks)
    model = random_model(opened(make), made, kind, cell)
    store = model.store
    sequences, ids, chosen = [stored_sequence(store, context) for context in cell], [1] * len(cell), []
    sampler_inputs = [greedy(model.config.vocab_size)] * len(cell)
    for _ in range(n + 4):
        spans = [store.open_step(sequence) for sequence in sequences]
        ids = [token for token in model.step(StepBatch(spans, ids, sampler_inputs)).wait() if isinstance(token, int)]
        assert len(ids) == len(cell), "a step gave no token"
        store.commit_steps(spans)
        chosen.append(ids)
    spans = [store.open_step(sequence) for sequence in sequences]
    return np.array(chosen), model.logits(forward(model, spans, ids))


@pytest.mark.parametrize("kind", ["bf16", "q4_k"])
def test_replayed_steps_of_a_large_model_equal_launched_steps(kind: str) -> None:
    ops, _ = opened(CudaOps).open()
    source = RandomWeights.for_kind(sizes().config, kind)
    needs(weight_bytes(ops, source) + _STORED, ops.free_memory())
    recorded, logits = steps(CudaOps, kind)
    give_back()
    plain, plain_logits = steps(Unrecorded, kind)
    np.testing.assert_array_equal(recorded, plain)
    np.testing.assert_array_equal(logits, plain_logits)
    assert np.isfinite(logits).all()
    assert np.ptp(logits) > 0


@pytest.mark.parametrize(
    ("format", "name", "rows"),
    pairs(["bf16", "q4_k", "q6_k", "q8_0"], ["head", "gate_up", "down"], [1, 4, 8, 16, 64, 100]),
)
def test_products_with_large_matrices(format: str, name: str, rows: int) -> None:
    """Some outputs, the first and the last among them, against float64 with the matrix that is on the device.

    Roundings of x and of weights, each at most 2⁻¹¹ of the value, add up like random numbers.
    """
    config, rng = sizes().config, np.random.default_rng(11)  # not the numbers of the matrix
    e, f = config.hidden_size, config.ffn.size
    shape = {"head": (config.vocab_size, e), "gate_up": (2 * f, e), "down": (e, f)}[name]
    ops, _ = opened(CudaOps).open()
    needs(4 * shape[0] * shape[1], ops.free_memory())  # at most, with all rows dequantized
    (matrix,) = ops.load([RandomMatrix(format, *shape)])
    x = rng.standard_normal((rows, shape[1]), np.float32)
    product = ops.to_host(ops.linear(ops.to_device(x), Linear((matrix,))))
    assert product.shape == (rows, shape[0])
    outputs = np.unique([0, 1, shape[0] - 1, *rng.integers(shape[0], size=200)])
    weights = np.concatenate([ops.rows(matrix, slice(i, i + 1)) for i in outputs]).astype(np.float64)
    allowed = 2.0**-8 * np.linalg.norm(x, axis=1, keepdims=True) * np.abs(weights).max()
    assert (np.abs(product[:, outputs] - x @ weights.T) <= allowed).all()
    # An output that another row of the matrix gave would be much farther off.
    assert np.abs(x @ weights.T).max() > 5 * allowed.max()


def test_the_batch_for_the_sanitizer_gives_numbers() -> None:
    """It compiles the kernels as well, which CuPy keeps for the sanitizer."""
    assert all(finite for _, finite in small_batches.run(Unrecorded(open_device())))
