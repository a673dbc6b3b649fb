"""`weight_type`: matrices are converted to another format while they are loaded."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.weights import (
    FileMatrix,
    describe_formats,
    format_for,
    format_groups,
    load_weights,
    weight_bytes,
)
from polarlm.engine.weight_formats import find, get
from polarlm.model_loaders import load_weights as open_weights
from polarlm.model_loaders.files.weights import WeightSource
from tests.compiled import end_of_compilation
from tests.conftest import FIXTURES
from tests.cuda.emulated import open_device
from tests.model_loaders.checkpoints import one_gguf_tensor, quantized_model, read

FIXTURE = FIXTURES / "llama_gqa_linear"  # rows of 48 values in most matrices, of 64 in `down`
DOWN, EMBEDDING, HEAD = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"


def converted(source: WeightSource, name: str, to: str) -> np.ndarray:
    """The tensor's values, rounded to a format."""
    values = read(source, name)
    out, format = np.empty_like(values), get(to)
    format.dequantize(format.quantize(values), out)
    return out


@pytest.mark.parametrize("name", ["f32", "bf16", "q8_0", "q4_0"])
def test_all_matrices_are_converted(name: str) -> None:
    """The embedding and the head, too. Rows that are not whole blocks keep their 16 bits; vectors do not change."""
    config, source, stored = open_weights(FIXTURE)
    assert find(stored) is get("f16")
    device = CudaOps(open_device(checked=False))
    for ops in (NumpyOps(), device):
        seen: list[int] = []
        weights = load_weights(ops, config, source, seen.append, get(name))
        assert sum(seen) == 2 * sum(int(np.prod(source.shape(one))) for one in source.names())
        assert weights.bytes == weight_bytes(ops, source, get(name))
        np.testing.assert_array_equal(ops.to_host(weights.norm), read(source, "model.norm.weight"))
        for one, matrix in ((DOWN, weights.layers[1].ffn.down), (EMBEDDING, weights.embedding), (HEAD, weights.head)):
            wanted = converted(source, one, name if source.shape(one)[1] % get(name).values == 0 else "f16")
            if ops is device and name == "f32":
                wanted = wanted.astype(np.float16)
            np.testing.assert_array_equal(ops.rows(matrix), wanted)
    source.close()


@pytest.mark.parametrize(
    ("stored", "columns", "wanted", "format"),
    [
        ("F32", 64, None, "f32"),
        ("Q4_K", 256, None, "q4_k"),
        ("IQ2_XS", 256, None, "iq2_xs"),
        ("TQ1_0", 256, None, "tq1_0"),
        ("NVFP4", 256, None, "f32"),
        ("BF16", 48, "q8_0", "bf16"),
        ("F32", 48, "q8_0", "f16"),
        ("Q4_K", 256, "q8_0", "q8_0"),
        ("IQ2_XS", 256, "q4_0", "q4_0"),
    ],
)
def test_the_format_that_a_matrix_gets(stored: str, columns: int, wanted: str | None, format: str) -> None:
    assert format_for(NumpyOps(), stored, columns, wanted and get(wanted)) is get(format)


@pytest.mark.parametrize(
    ("dtype", "weight_type"),
    [("NVFP4", None), ("TQ1_0", None), ("Q4_K", None), ("IQ2_XS", "q4_0")],
)
def test_the_compiled_backend_gets_the_same_values(dtype: str, weight_type: str | None, tmp_path: Path) -> None:
    """In the format that a matrix is to have, with the rows of q and k in order."""
    pytest.importorskip("llvmlite")
    from polarlm.engine.backends.native.ops import NativeOps

    quantized_model(tmp_path / "model.gguf", dtype)
    config, source, _ = open_weights(tmp_path / "model.gguf")
    native = NativeOps(1)
    weights = load_weights(native, config, source, None, weight_type and get(weight_type))
    wanted = weight_type or {"NVFP4": "q8_0"}.get(dtype, dtype.lower())
    qkv = weights.layers[0].mixer.qkv
    assert {part.format.name for part in (*qkv.parts, weights.embedding, *weights.head.parts)} == {wanted}
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    values = np.concatenate(
        [read(source, n) if wanted == dtype.lower() else converted(source, n, wanted) for n in names]
    )
    np.testing.assert_allclose(native.rows(qkv), values, rtol=1e-6, atol=1e-5 * np.abs(values).max())
    source.close()


def test_messages_say_how_the_matrices_of_a_file_are_kept(tmp_path: Path) -> None:
    """The bytes that are told are the bytes of the loaded matrices."""
    pytest.importorskip("llvmlite")
    from polarlm.engine.backends.native.ops import NativeOps

    quantized_model(tmp_path / "lattice.gguf", "IQ2_XS")
    _, source, _ = open_weights(tmp_path / "lattice.gguf")
    native = NativeOps(1)
    assert describe_formats(format_groups(native, source)) == "IQ2_XS weights as stored"
    assert (
        describe_formats(format_groups(NumpyOps(), source, get("q4_0")))
        == "IQ2_XS weights converted to q4_0 and kept as f32"
    )
    source.close()
    quantized_model(tmp_path / "model.gguf", "NVFP4")
    config, source, _ = open_weights(tmp_path / "model.gguf")
    assert describe_formats(format_groups(native, source)) == "NVFP4 weights kept as q8_0"
    (q8_0,) = format_groups(native, source)
    vectors = sum(4 * source.shape(name)[0] for name in source.names() if len(source.shape(name)) == 1)
    assert q8_0.bytes == load_weights(native, config, source).bytes - vectors
    source.close()


def test_conversion_needs_one_slab_beside_the_result(tmp_path: Path) -> None:
    """A slab has the size that is asked for. The whole matrix is never there as float32."""
    name = "q4_0"
    rows, columns = 3000, 1024
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float16)
    source = one_gguf_tensor(tmp_path / "x", "F16", values.view(np.uint8))
    matrix = FileMatrix(source, "x", get(name))
    got = np.empty((rows, get(name).size(columns)), np.uint8)
    end_of_compilation()
    tracemalloc.start()
    for part, raw in matrix.slabs(100 * get(name).size(columns)):
        got[part] = raw
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * rows * columns
    quantize = get(name).quantize
    np.testing.assert_array_equal(got, quantize(values.astype(np.float32)))
    source.close()


def test_converted_weights_are_another_model() -> None:
    config, source, _ = open_weights(FIXTURE)
    ops = NumpyOps()
    digests = {
        fingerprint(ops, config, load_weights(ops, config, source, None, name and get(name)))
        for name in (None, "q8_0", "q4_0", "bf16")
    }
    assert len(digests) == 4
    source.close()


# -- the setting ---------------------------------------------------------------------------------------------------


def test_an_engine_with_converted_weights_says_so(tiny_path: Path) -> None:
    said: list[str] = []
    parts = assemble(settle(tiny_path, None, {"device": "cpu", "weight_type": "q8_0"}), said.append)
    with Engine(parts) as engine, Engine.load(tiny_path, device="cpu") as plain:
        assert "F16 converted to q8_0 (" in engine.fit_line()
        assert "converted" not in plain.fit_line()
        changed = engine.score([5, 6, 7, 8]).logprobs - plain.score([5, 6, 7, 8]).logprobs
        assert 0 < np.abs(changed).max() < 0.1
    assert len([sentence for sentence in said if "not as q8_0" in sentence]) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("q4_k", "gguf reads this type but cannot make it"),
        ("IQ2_XS", "gguf reads this type but cannot make it"),
        ("int7", "there is no such type"),
    ],
)
def test_a_type_that_cannot_be_made_is_refused(name: str, reason: str) -> None:
    with pytest.raises(EngineError, match=f"weight_type={name}: .*{reason}.*; choose from as-stored, .*q8_0"):
        Engine.load("nowhere", weight_type=name)
