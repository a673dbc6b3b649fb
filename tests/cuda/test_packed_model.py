"""Models with packed weights on the CUDA backend: a small one on the emulated device, and whether a large one fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polarlm.bench.random_weights import RandomWeights
from polarlm.bench.shapes import LLAMA_8B
from polarlm.engine import EngineConfig
from polarlm.engine.backends.cuda.device.tracing import TracingDevice
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading import assembly
from polarlm.engine.loading.placement.place import place
from polarlm.engine.loading.placement.request import PlacementRequest, Sizes
from polarlm.engine.loading.sizes import warn_of_context
from polarlm.engine.model.weights import weight_bytes
from polarlm.engine.weight_formats import Linear, Matrix, StoredMatrix, get
from polarlm.model_loaders import ModelConfig, load_weights
from polarlm.model_loaders.config import Attention, GatedMLP, Layer
from tests.conftest import FIXTURES
from tests.cuda.emulated import EmulatedDevice, open_device
from tests.cuda.test_memory import Counting
from tests.cuda.test_model_emulated import Rounded, close, model_from, talk
from tests.weights import StoredBytes, read_all

GB = 10**9


class Exact(NumpyOps):
    """NumPy with the file's weights."""

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        return super().load([read_all(stored) for stored in matrices])


class Halves(Rounded):
    """NumPy with the file's weights, and with what the kernels round: every other factor of a product, too."""

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        return NumpyOps.load(self, [read_all(stored) for stored in matrices])


def mixed_model(tied: bool = False) -> tuple[ModelConfig, RandomWeights]:
    """A model of random blocks in the types of Q4_K_M: q, k and v are parts in two formats. tied: head and embedding
    are one matrix."""
    config = load_weights(FIXTURES / "llama_mha")[0]
    layer = Layer(Attention(4, 2, 64, config.attention.rope), GatedMLP(512))
    config = replace(config, layers=(layer,) * 2, hidden_size=256, vocab_size=96, tied_head=tied)
    return config, RandomWeights.for_kind(config, "q4_k")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied head"])
def test_a_model_of_mixed_types_is_that_of_numpy(tied: bool) -> None:
    """Prompts, steps of one row and of several, against float32 with the dequantized file."""
    device = open_device(checked=False)
    ops, types = CudaOps(device), ("f16", "f16")
    close(*(talk(model_from(backend, *mixed_model(tied), types)) for backend in (ops, Exact(), Halves(ops))))
    if isinstance(device, EmulatedDevice):
        assert "gemv_kernel" not in device.launches
        assert {"gemv_packed_kernel", "gemm_wide_kernel"} <= set(device.launches)


def test_loading_and_prompts_need_a_bounded_part_of_a_matrix_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One upload of the file's bytes, with where each bit of a block comes from; and of halves, one slab for a product
    of many rows."""
    monkeypatch.setattr("polarlm.engine.backends.cuda.linear._UPLOAD_BYTES", 1 << 16)
    monkeypatch.setattr("polarlm.engine.backends.cuda.linear.DEQUANTIZED_BYTES", 1 << 17)
    device = Counting()
    ops, file = CudaOps(device), StoredBytes(np.zeros((4096, 4 * 144), np.uint8), "q4_k")
    before = device.begin()
    (held,) = ops.load([file])
    assert device.live - before == ops.matrix_bytes(get("q4_k"), 4096 * 1024)
    assert device.peak <= device.live + (1 << 16) + 17 * (4 + 2 * 8 + 256)
    x = device.empty((200, 1024), np.float32)
    before = device.begin()
    y = ops.linear(x, Linear((held,)))
    assert device.peak - before <= y.nbytes + x.nbytes // 2 + (1 << 17)


def test_an_8b_model_in_4_bits_and_32k_tokens_fit_on_8_gb() -> None:
    """With the default settings, on a GPU of 8 GB, which are 8188 MiB; driver and desktop take 600 MB."""
    memory = (8188 << 20) - 6 * GB // 10, 8188 << 20
    ops, said = CudaOps(TracingDevice(lambda launch: None, 24, 100 << 10, memory)), list[str]()
    config = EngineConfig(ctx_size=32768)
    shapes = RandomWeights.for_kind(LLAMA_8B, "q4_k")
    weights = weight_bytes(ops, shapes)
    assert 4.9 * GB < weights < 5.1 * GB
    placement = place(PlacementRequest(config, LLAMA_8B, Sizes(weights)), ops)
    warn_of_context(config, LLAMA_8B, placement.store_plan, said.append)
    assert placement.store_plan.tokens == 32768
    assert not said
    # The line takes no arrays from the parts.
    source: Any = SimpleNamespace(name="llama-8b", weights=shapes, config=LLAMA_8B)
    model: Any = SimpleNamespace(ops=ops, weights=SimpleNamespace(bytes=weights))
    line = assembly.fit_line(assembly.Parts(config, source, placement, model))
    assert line.startswith(
        "llama-8b (llama, 32 layers): Q4_K, Q6_K weights as stored, 4.7 GiB on the traced GPU; KV store "
    )
    assert "as balanced: " in line
    assert "32,768 tokens fit" in line
