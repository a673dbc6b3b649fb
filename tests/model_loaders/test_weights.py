"""Weights are read bit by bit, converted to float32 without a second copy in memory."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from polarlm.model_loaders import load_weights
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.ggml_types import BY_NAME, TYPES
from polarlm.model_loaders.files.gguf_file import GgufFile, Strings
from polarlm.model_loaders.files.safetensors_source import read_header
from polarlm.model_loaders.files.tensor_table import RowParts, head_order
from polarlm.model_loaders.files.tensors import READABLE, StoredWeights
from tests.compiled import end_of_compilation
from tests.model_loaders.checkpoints import (
    MODELS,
    finish,
    one_gguf_tensor,
    quantized_model,
    read,
    read_all,
    safetensors_file,
)

LEGACY = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TERNARY = ["TQ1_0", "TQ2_0"]
FOURS = ["MXFP4", "NVFP4"]
LATTICES = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"]
ALL_16_BITS = np.arange(2**16, dtype="<u2")


def one_tensor(path: Path, dtype: str, data: np.ndarray, shape: tuple[int, ...]) -> StoredWeights:
    """A safetensors file that holds the tensor "x"."""
    raw = data.tobytes()
    safetensors_file(path, {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(raw)]}}, raw)
    source = FileBytes(path)
    return StoredWeights(path, read_header(source), [source])


def test_every_bfloat16_is_the_upper_half_of_a_float32(tmp_path: Path) -> None:
    weights = one_tensor(tmp_path / "x", "BF16", ALL_16_BITS, (256, 256))
    expected = np.frombuffer(b"".join(b"\0\0" + struct.pack("<H", bits) for bits in range(2**16)), "<u4")
    np.testing.assert_array_equal(read(weights, "x").view(np.uint32).ravel(), expected)


@pytest.mark.parametrize("name", ["llama_mha", "mistral_window_sharded", "qwen3_qk_norm_tied"])
def test_values_agree_with_the_safetensors_package(name: str) -> None:
    _, weights, _ = load_weights(MODELS / name)
    files = sorted((MODELS / name).glob("*.safetensors"))
    assert len(files) == (4 if name.endswith("sharded") else 1)
    expected = {key: tensor for file in files for key, tensor in load_file(file).items()}
    got = read_all(weights)
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        np.testing.assert_array_equal(got[key], tensor.astype(np.float32), err_msg=key)


def test_random_blocks_against_the_gguf_package(tmp_path: Path) -> None:
    for dtype in (*LEGACY, *K_QUANTS, *TERNARY, *LATTICES, *FOURS):
        block, block_bytes = gguf.GGML_QUANT_SIZES[Type[dtype]]
        raw = np.random.default_rng(2).integers(0, 256, (300, 1024 // block, block_bytes), dtype=np.uint8)
        raw &= 0x3F  # the scales' float16 among these bytes stay finite, wherever they lie
        raw = raw.reshape(300, -1)  # more than one slab
        weights = one_gguf_tensor(tmp_path / "x.gguf", dtype, raw)
        values = read(weights, "x")
        assert (weights.stored_dtype("x"), values.shape) == (dtype, (300, 1024))
        assert np.isfinite(values).all()
        assert values.std() > 0
        np.testing.assert_array_equal(values, gguf.dequantize(raw, Type[dtype]), err_msg=dtype)


def test_types_are_those_of_the_gguf_package() -> None:
    """Newer versions may have more."""
    assert set(READABLE) == {"F32", "F16", "BF16", *LEGACY, *K_QUANTS, *TERNARY, *LATTICES, *FOURS} <= set(BY_NAME)
    known = {type.value: (type.name, *gguf.GGML_QUANT_SIZES[type]) for type in Type}
    assert {number: known[number] for number in TYPES if number in known} == {
        number: tuple(type) for number, type in TYPES.items() if number in known
    }
    assert set(known) & set(range(40)) <= set(TYPES)


def test_nvfp4_is_multiplied_by_the_scale_of_its_tensor(tmp_path: Path) -> None:
    """The scale of inputs, which are not rounded here, is not read."""
    scales = {"blk.0.attn_q.scale": 0.375, "blk.0.attn_q.input_scale": 3.0, "output.scale": 1.5}
    numbers = {label: np.array([number], np.float32) for label, number in scales.items()}
    tensors = quantized_model(tmp_path / "model.gguf", "NVFP4", numbers)
    _, weights, _ = load_weights(tmp_path / "model.gguf")
    for name, factor in (("model.layers.0.self_attn.q_proj", 0.375), ("lm_head", 1.5), ("model.embed_tokens", 1)):
        expected = tensors[f"{name}.weight"] * np.float32(factor)
        np.testing.assert_array_equal(read(weights, f"{name}.weight"), expected, err_msg=name)
    with pytest.raises(ValueError, match=r"differs from the file: 0\.375 multiplies its values"):
        weights.read_raw("model.layers.0.self_attn.q_proj.weight", slice(0, 2))


@pytest.mark.parametrize(
    ("dtype", "shape", "sentence"),
    [
        ("NVFP4", (2,), r"attn_q\.scale is F32 \(2,\), but a scale is one number"),
        ("Q8_0", (1,), r"has the tensor 'blk\.0\.attn_q\.scale', which a llama model .* does not have"),
    ],
)
def test_a_scale_that_cannot_be_applied_is_refused(
    dtype: str, shape: tuple[int, ...], sentence: str, tmp_path: Path
) -> None:
    """Without it the weights would be wrong."""
    quantized_model(tmp_path / "model.gguf", dtype, {"blk.0.attn_q.scale": np.full(shape, 2, np.float32)})
    with pytest.raises(LoadError, match=sentence):
        load_weights(tmp_path / "model.gguf")


def test_a_type_that_the_installed_gguf_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(data: np.ndarray, dtype: Type) -> np.ndarray:
        raise NotImplementedError(f"Dequantization for {dtype.name} is not yet implemented")

    quantized_model(tmp_path / "model.gguf", "MXFP4")
    monkeypatch.setattr("gguf.quants.dequantize", lacking)
    with pytest.raises(LoadError, match="MXFP4, which the installed version of the Python package gguf cannot read"):
        load_weights(tmp_path / "model.gguf")


def test_shapes_that_slabs_do_not_divide(tmp_path: Path) -> None:
    for shape in ((1,), (600_000,), (3, 5), (2, 400_000), (0, 4), (4, 0)):
        values = np.random.default_rng(3).normal(size=shape).astype(np.float16)
        np.testing.assert_array_equal(read(one_tensor(tmp_path / "x", "F16", values, shape), "x"), values)


@pytest.mark.parametrize("dtype", ["F16", "Q6_K", "IQ1_S"])
def test_conversion_needs_a_few_megabytes_besides_the_result(dtype: str, tmp_path: Path) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[Type[dtype]]
    rows, columns = 4096, 1024
    weights = one_gguf_tensor(tmp_path / "x.gguf", dtype, np.zeros((rows, columns // block * block_bytes), np.uint8))
    out = np.empty((rows, columns), np.float32)
    end_of_compilation()
    tracemalloc.start()
    weights.read_into("x", out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < out.nbytes / 2


def test_rows_come_in_the_order_of_the_tensor(tmp_path: Path) -> None:
    """Reordered within heads, as in Llama's GGUF files, in any order, and a part; converted rows are the same."""
    values = np.random.default_rng(7).normal(size=(24, 8)).astype(np.float32)
    path = tmp_path / "x"
    plain = one_tensor(path, "F32", values, values.shape).tensors["x"]
    heads = (8 * np.arange(3)[:, None] + head_order(8, 8, True)).ravel()
    for order in (heads, np.random.default_rng(8).permutation(24)):
        wanted = values[order]
        weights = StoredWeights(path, {"x": plain.with_rows(order)}, [])
        for rows in (slice(0, 24), slice(5, 19), slice(23, 24)):
            np.testing.assert_array_equal(weights.read_raw("x", rows).view("<f4"), wanted[rows])
            part = np.empty(wanted[rows].shape, np.float32)
            weights.read_into("x", part, rows)
            np.testing.assert_array_equal(part, wanted[rows])
    gates = plain.with_rows(RowParts("x", (3, 5), (1,)).rows(24)).with_rows(np.arange(15)[::-1])
    weights = StoredWeights(path, {"gates": replace(gates, negated_exp=True), "more": replace(gates, added=1.0)}, [])
    wanted = values.reshape(3, 8, 8)[:, 3:].reshape(15, 8)[::-1]
    np.testing.assert_allclose(read(weights, "gates"), -np.exp(wanted), rtol=1e-6)
    np.testing.assert_array_equal(read(weights, "more"), wanted + 1)
    with pytest.raises(ValueError, match="is added to its values"):
        weights.read_raw("more", slice(0, 2))


def test_a_closed_source_is_closed() -> None:
    _, weights, _ = load_weights(MODELS / "mistral_window_sharded")
    kept = read(weights, "model.norm.weight")
    before = kept.copy()
    weights.close()
    np.testing.assert_array_equal(kept, before)
    with pytest.raises(ValueError):
        read(weights, "model.norm.weight")


def test_gguf_metadata(tmp_path: Path) -> None:
    """Equal to what was written, and to the result of the package's reader."""
    path = tmp_path / "x.gguf"
    tokens = [f"▁wört{i}" for i in range(5000)] + ["", "\n", "<|end|>", "語" * 200_000]  # beyond the read-ahead
    writer = gguf.GGUFWriter(path, "qwen2")
    writers: dict[str, tuple[Callable[[str, object], None], object]] = {
        "u8": (writer.add_uint8, 255),
        "i8": (writer.add_int8, -128),
        "u16": (writer.add_uint16, 65535),
        "i16": (writer.add_int16, -32768),
        "u32": (writer.add_uint32, 2**32 - 1),
        "i32": (writer.add_int32, -(2**31)),
        "u64": (writer.add_uint64, 2**64 - 1),
        "i64": (writer.add_int64, -(2**63)),
        "f32": (writer.add_float32, 0.15625),
        "f64": (writer.add_float64, 0.1),
        "yes": (writer.add_bool, True),
        "no": (writer.add_bool, False),
        "text": (writer.add_string, "größer"),
        "tokens": (writer.add_array, tokens),
        "scores": (writer.add_array, [0.5, -1.25]),
        "types": (writer.add_array, list(range(1000))),
        "flags": (writer.add_array, [True, False]),
    }
    for key, (write, value) in writers.items():
        write(key, value)
    writer.add_tensor("t", np.zeros((2, 3), np.float32))
    finish(writer)
    file = GgufFile(path)
    entries = {key: list(value) if key == "tokens" else value for key, value in file.metadata.items()}
    for key, (_, value) in writers.items():
        assert entries[key] == value, key
        assert type(entries[key]) is type(value), key
    reader = gguf.GGUFReader(path)
    assert {key: field.contents() for key, field in reader.fields.items() if "." not in key} == {
        key: value for key, value in entries.items() if "." not in key
    }
    read = file.metadata["tokens"]
    assert isinstance(read, Strings)
    assert [read[i] for i in range(-len(tokens), len(tokens))] == tokens * 2
    assert "語" * 200_000 in read
    for beyond in (len(tokens), -len(tokens) - 1):
        with pytest.raises(IndexError):
            read[beyond]
    assert [tensor.data_offset for tensor in reader.tensors] == [file.tensors["t"].offset]


def test_a_vocabulary_takes_little_more_than_its_bytes(tmp_path: Path) -> None:
    """As Python's strings it would take five times as much."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_array("tokens", [f"token{i}" for i in range(50_000)])
    finish(writer)
    end_of_compilation()
    tracemalloc.start()
    try:
        file = GgufFile(path)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(file.metadata["tokens"]) == 50_000  # type: ignore[arg-type]
    assert taken < 2 * path.stat().st_size


@pytest.mark.parametrize("change", ["shorter", "longer", "written again"])
def test_a_file_that_changes_while_it_is_read_is_refused(change: str, tmp_path: Path) -> None:
    """A download that starts again, say."""
    path = tmp_path / "x.gguf"
    raw = np.zeros((64, 34 * 1024), np.uint8)
    weights = one_gguf_tensor(path, "Q8_0", raw)
    assert weights.read_raw("x", slice(0, 32)).nbytes == raw.nbytes // 2
    with path.open("r+b") as file:
        if change == "written again":
            file.write(file.read(8)[::-1])
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # clocks of file systems are coarse
        else:
            file.truncate(path.stat().st_size // 2 if change == "shorter" else path.stat().st_size + 1)
    for _ in range(2):
        with pytest.raises(LoadError, match=r"x\.gguf has changed since it was opened; when its download has finished"):
            weights.read_raw("x", slice(32, 64))


def test_a_file_whose_time_alone_changes_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    raw = np.random.default_rng(3).integers(0, 256, (64, 34 * 1024), np.uint8)
    weights = one_gguf_tensor(path, "Q8_0", raw)
    for seconds in (1, 2):
        os.utime(path, (seconds, seconds))
        np.testing.assert_array_equal(weights.read_raw("x", slice(3, 9)), raw[3:9])
