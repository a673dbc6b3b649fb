"""Loading of weights: bytes in a weight format go to the device unchanged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device.kernel_source import can_read
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.weights import file_bytes, load_weights, weight_bytes
from polarlm.engine.weight_formats import find, get
from polarlm.model_loaders import load_weights as open_weights
from polarlm.model_loaders.files.tensors import StoredWeights
from tests.conftest import FIXTURES
from tests.cuda.emulated import open_device
from tests.model_loaders.checkpoints import quantized_model


@pytest.mark.parametrize("name", ["llama_gqa_linear", "qwen3_moe_normed", "qwen3_5_tied"])
def test_a_matrix_is_copied_to_a_gpu_in_slabs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has a part of it at a time, in the file's type."""
    config, source, _ = open_weights(FIXTURES / name)
    monkeypatch.setattr("polarlm.engine.backends.cuda.linear._UPLOAD_BYTES", 2048)
    device, layer = open_device(checked=False), max(config.attentions)
    largest = 0
    from_host = device.from_host

    def watched(x: np.ndarray) -> Any:
        nonlocal largest
        largest = max(largest, x.nbytes)
        assert x.dtype != np.float32 or x.ndim == 1  # a vector
        return from_host(x)

    monkeypatch.setattr(device, "from_host", watched)
    sliced = load_weights(CudaOps(device), config, source)
    assert largest <= 2048
    monkeypatch.undo()
    whole = load_weights(CudaOps(device), config, source)
    ops = CudaOps(device)
    np.testing.assert_array_equal(ops.rows(sliced.layers[layer].mixer.qkv), ops.rows(whole.layers[layer].mixer.qkv))
    np.testing.assert_array_equal(ops.rows(sliced.embedding), ops.rows(whole.embedding))
    source.close()


@pytest.mark.parametrize("name", ["gemma4_shared_kv", "gpt_oss_mxfp4", "llama_wide_heads_biases"])
def test_weight_bytes_are_those_of_the_loaded_weights(name: str) -> None:
    config, source, _ = open_weights(FIXTURES / name)
    for ops in (NumpyOps(), CudaOps(open_device(checked=False))):
        assert weight_bytes(ops, source) == load_weights(ops, config, source).bytes
    source.close()


@pytest.mark.parametrize("dtype", ["TQ1_0", "Q4_K", "Q8_0", "IQ2_XS", "MXFP4"])
def test_blocks_are_widened_by_numpy_and_kept_by_a_gpu(dtype: str, tmp_path: Path) -> None:
    """To float32 by NumPy. A GPU keeps the file's format, and has q8_0 of types that its kernels do not read. Rows of q
    and k lie elsewhere in the file."""
    tensors = quantized_model(tmp_path / "model.gguf", dtype)
    config, source, _ = open_weights(tmp_path / "model.gguf")
    qkv = np.concatenate([tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    host, device = NumpyOps(), CudaOps(open_device(checked=False))
    weights = load_weights(host, config, source)
    np.testing.assert_array_equal(host.rows(weights.layers[0].mixer.qkv), qkv)
    np.testing.assert_array_equal(host.rows(weights.embedding), tensors["model.embed_tokens.weight"])
    weights = load_weights(device, config, source)
    assert weights.bytes == weight_bytes(device, source)
    kept = get(dtype.lower() if can_read(dtype.lower()) else "q8_0")
    assert [part.format for part in weights.layers[0].mixer.qkv.parts] == [kept]
    if kept is not find(dtype):
        assert kept.quantize
        kept.dequantize(kept.quantize(qkv), qkv)
    # A GPU flushes the scales of random blocks of MXFP4 below the least normal number.
    np.testing.assert_allclose(device.rows(weights.layers[0].mixer.qkv), qkv, rtol=0, atol=2.0**-123)
    source.close()


def test_a_tied_head_is_the_embedding() -> None:
    config, source, _ = open_weights(FIXTURES / "qwen3_qk_norm_tied")
    for ops in (NumpyOps(), CudaOps(open_device(checked=False))):
        weights = load_weights(ops, config, source)
        assert weights.head.parts == (weights.embedding,)
    source.close()


@pytest.mark.parametrize("weight_type", [None, "q4_0"])
def test_progress_counts_the_bytes_of_the_file(tmp_path: Path, weight_type: str | None) -> None:
    """Not the bytes of the converted matrices."""
    quantized_model(tmp_path / "model.gguf", "Q4_K")
    with_biases = FIXTURES / "llama_wide_heads_biases"
    for path, size in ((tmp_path / "model.gguf", 144 / 256), (with_biases, 2)):
        config, source, _ = open_weights(path)
        read: list[int] = []
        load_weights(NumpyOps(), config, source, read.append, weight_type and get(weight_type))
        counts = {name: math.prod(source.shape(name)) for name in source.names()}
        vectors = {name for name in counts if len(source.shape(name)) == 1}
        in_vectors = sum((4 if size < 1 else 2) * counts[name] for name in vectors)
        assert sum(read) == file_bytes(source) == in_vectors + size * sum(counts[n] for n in counts.keys() - vectors)
        source.close()


def test_matrices_that_are_loaded_together_are_expected_before_the_first_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a matrix is packed, the system reads the others ahead."""
    events: list[tuple[str, str]] = []
    expect, read = StoredWeights.expect, StoredWeights.read_raw

    def watched(self: StoredWeights, name: str) -> None:
        events.append(("expect", name))
        expect(self, name)

    def read_and_watched(self: StoredWeights, name: str, rows: slice) -> np.ndarray:
        events.append(("read", name))
        return read(self, name, rows)

    monkeypatch.setattr(StoredWeights, "expect", watched)
    monkeypatch.setattr(StoredWeights, "read_raw", read_and_watched)
    config, source, _ = open_weights(FIXTURES / "qwen3_moe_normed")
    load_weights(NumpyOps(1), config, source)
    source.close()
    matrices = {name for name in source.names() if len(source.shape(name)) > 1}
    assert {name for what, name in events if what == "expect"} == matrices
    assert len([what for what, _ in events if what == "expect"]) == len(matrices)
    experts = [name for name in matrices if ".experts." in name and ".layers.0." in name and "down" not in name]
    last = max(events.index(("expect", name)) for name in experts)
    assert last < min(index for index, (what, name) in enumerate(events) if what == "read" and name in experts)
