"""Safetensors that are quantized already: every matrix is what its format says, or a sentence names what is wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from polarlm.engine.weight_formats import find
from polarlm.model_loaders import LoadError, load_weights
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.file_bytes import FileBytes
from polarlm.model_loaders.files.safetensors_source import read_header
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.weight_quantization import check, read_quantized
from tests.model_loaders.checkpoints import MODELS, read_all
from tests.quantized import KINDS, Kind, quantized_model

FIXTURES = MODELS.parent / "quantized"
EXACT, HALF = 0.0, 2**-11  # half precision has 11 bits
# File → the type of its matrix, and how far its blocks may be from the package's values, relative to the largest. A
# scale in float32 is rounded to half precision; the numbers of NF4 are rounded, too.
MATRICES = {
    "bitsandbytes_fp4": ("FP4", None),
    "bitsandbytes_int8": ("Q8_0", HALF),
    "bitsandbytes_nf4": ("NF4", 0.0029 + HALF),
    "bitsandbytes_nf4_nested": ("NF4", 0.0029 + HALF),
    "fp8_blocks": ("FP8", None),
    "fp8_channels": ("FP8", None),
    "fp8_compressed_blocks": ("FP8", None),
    "int8_channels": ("Q8_0", EXACT),
    "int8_channels_zeros": ("INT8", None),
    "nvfp4": ("FP4", None),
    "packed_int4": ("Q4_0", EXACT),
    "packed_int4_zeros": ("Q5_0", EXACT),
    "packed_int8": ("Q8_0", EXACT),
}


def fixture(name: str) -> tuple[StoredTensor, np.ndarray]:
    """The matrix of a file, and what the package reads it as."""
    path = FIXTURES / f"{name}.safetensors"
    with safe_open(path, "numpy") as file:
        settings, values = json.loads(file.metadata()["quantization_config"]), file.get_tensor("values")
    fields = Fields({"quantization_config": settings}, path)
    check(fields, ())
    return read_quantized(fields, read_header(FileBytes(path)), set())["x.weight"], values


def test_every_file_of_the_packages_is_compared() -> None:
    assert MATRICES.keys() == {file.stem for file in FIXTURES.glob("*.safetensors")}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_have_the_values_of_the_package_that_wrote_them(name: str) -> None:
    matrix, wanted = fixture(name)
    type, tolerance = MATRICES[name]
    assert (matrix.dtype, matrix.shape) == (type, wanted.shape)
    values = matrix.values(slice(0, len(wanted)))
    np.testing.assert_allclose(values, wanted, rtol=2**-22)  # a scale that is itself a product may be rounded twice
    np.testing.assert_array_equal(matrix.values(slice(5, 17)), values[5:17])
    reordered = matrix.with_rows(np.arange(len(wanted))[::-3])
    np.testing.assert_array_equal(reordered.values(slice(1, 6)), values[::-3][1:6])
    if tolerance is None:
        assert find(type) is None
        return
    out, format = np.empty_like(values), find(type)
    assert format is not None
    format.dequantize(matrix.raw(slice(0, len(wanted))), out)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


# A plain model, one whose q, k, v are one tensor, one whose rows of q and k are reordered, one with biases, one with
# experts, one whose tensors are parts of others, and one some of whose parts are turned, and then halves.
SHAPES = ["llama_mha", "phi3_window", "ernie4_5_biases", "qwen2_bias", "glm4_moe_biases_two_shared"]
SHAPES += ["qwen3_next_shared_keys", "glm4_moe_lite"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_models_are_the_ones_that_have_the_values(kind: Kind, tmp_path: Path) -> None:
    for name in SHAPES:
        folder = quantized_model(tmp_path / name, MODELS / name, kind)
        config, weights, _ = load_weights(folder / "quantized")
        plain_config, plain_weights, _ = load_weights(folder / "plain")
        assert config == plain_config
        plain, types = read_all(plain_weights), {weights.stored_dtype(name) for name in weights.names()}
        assert kind.type in types <= {kind.type, "F32", "F16", "BF16"}
        for label, values in read_all(weights).items():
            rtol, atol = (2**-11, 2**-25) if ".k_b_proj." in label else (2**-22, 0)
            np.testing.assert_allclose(values, plain[label], rtol, atol, err_msg=label)


Change = dict[str, object] | Callable[[dict[str, np.ndarray]], object]  # of quantization_config, or of the tensors
Q = "model.layers.0.self_attn.q_proj"
TWO_SHAPES = r"scales is F16 \(\d, \d+\), but the quantization_config asks for .*\(\d, \d+\)"
# A kind of model, what changes in it, and the sentence.
WRONG: list[tuple[str, Change, str]] = [
    ("gptq", {"quant_method": "hqq"}, "quantization_config of the kind 'hqq', .* or a copy in awq, bitsandbytes"),
    ("gptq", {"bits": 3}, "bits is 3, but only 4 or 8 is supported"),
    ("gptq", {"bits": None}, "lacks the key 'bits'"),
    ("gptq", {"bits": 8}, r"scales is F16 \(2, 32\), but the quantization_config asks for .* \(1, 32\)"),
    ("gptq", {"group_size": 16}, TWO_SHAPES),
    ("gptq", {"group_size": 24}, "group_size is 24, but a matrix has rows of 64 values"),
    ("gptq", lambda tensors: tensors.pop(f"{Q}.qzeros"), f"the model lacks qzeros beside {Q}"),
    ("gptq", lambda tensors: tensors[f"{Q}.g_idx"].fill(7), r"q_proj.g_idx names group 7 of 1; download it again"),
    ("gptq", lambda tensors: tensors[f"{Q}.g_idx"].fill(-1), r"q_proj.g_idx names group 4294967295 of 1"),
    ("gptq", {"format": "gemm"}, "format is 'gemm', but only"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', but only"),
    ("awq", {"version": "gemv"}, "version is 'gemv', but only 'gemm' or 'GEMM' is supported"),
    ("awq", {"quant_method": "compressed-tensors"}, "compressed-tensors.* no such tensor"),
    ("compressed-tensors", {"format": "marlin-24"}, "format is 'marlin-24', but only"),
    ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is .*, but only"),
    ("compressed-tensors", lambda tensors: tensors.pop(f"{Q}.weight_shape"), "lacks weight_shape beside"),
    ("fp8", {"weight_block_size": [64, 8]}, r"weight_scale_inv is F32 \(2, 2\), but .* F32 or .* \(1, 8\)"),
    ("fp8", {"weight_block_size": [128]}, "weight_block_size is .*, but must be two positive numbers"),
    ("fp8", lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"), f"lacks weight_scale beside {Q}"),
    ("mlx", {"mode": "mxfp4"}, "mode is 'mxfp4', but only 'affine' is supported"),
    ("mlx", {Q: {"bits": 6, "group_size": 32}}, "bits is 6, but only 4 and 8 are supported"),
]


@pytest.mark.parametrize(("kind", "change", "sentence"), WRONG)
def test_what_is_not_read_is_refused(kind: str, change: Change, sentence: str, tmp_path: Path) -> None:
    of_tensors = change if callable(change) else len
    folder = quantized_model(tmp_path, MODELS / "llama_mha", KINDS[kind], of_tensors) / "quantized"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {} if callable(change) else change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=sentence):
        load_weights(folder)


@pytest.mark.parametrize("kind", ["gptq", "mlx", "fp8"])
def test_keys_of_configurations_that_nobody_knows_are_told(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = KINDS[kind].settings | {"new_key": 1, "rotation": None}
    folder = quantized_model(tmp_path, MODELS / "llama_mha", KINDS[kind]._replace(settings=settings)) / "quantized"
    load_weights(folder)[1].close()
    (told,) = caplog.messages
    assert told.endswith("config.json, quantization_config has keys that are unknown here and ignored: 'new_key'")


def test_zero_points_that_the_configuration_denies_are_seen_when_weights_are_read(tmp_path: Path) -> None:
    kind = KINDS["gptq_zeros"]
    folder = quantized_model(tmp_path, MODELS / "llama_mha", kind._replace(settings={**kind.settings, "sym": True}))
    _, weights, _ = load_weights(folder / "quantized")
    with pytest.raises(LoadError, match=f"{Q}.qweight has zero points, which its quantization_config"):
        weights.read_raw(f"{Q}.weight", slice(0, 8))


def test_biases_of_zeros_and_scales_of_caches_are_left_out(tmp_path: Path) -> None:
    """Old GPTQ files have the first, and files with an FP8 cache the second. Other biases would change results."""
    folder = quantized_model(tmp_path, MODELS / "llama_mha", KINDS["gptq"]) / "quantized"
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{Q}.bias": np.zeros(32, np.float16), "model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    assert f"{Q}.bias" not in load_weights(folder)[1].names()
    save_file({**tensors, f"{Q}.bias": np.ones(32, np.float16)}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=f"has the tensor '{Q}.bias'"):
        load_weights(folder)


def test_rounded_numbers_of_nf4_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fixture("bitsandbytes_nf4")
        assert len(caplog.records) == 1
        fixture("bitsandbytes_fp4")
    assert len(caplog.records) == 1
    assert "NF4 are rounded" in caplog.text


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"shape": [24], "blocksize": 64}', b'{"shape": [24, 256]}'])
def test_a_damaged_state_is_refused(text: bytes, tmp_path: Path) -> None:
    state = "x.weight.quant_state.bitsandbytes__nf4"
    path = tmp_path / "x.safetensors"
    save_file({**load_file(FIXTURES / "bitsandbytes_nf4.safetensors"), state: np.frombuffer(text, np.uint8)}, path)
    fields = Fields({"quantization_config": {"quant_method": "bitsandbytes"}}, path)
    with pytest.raises(LoadError, match=f"{state}.*(is not a JSON object|must be two positive|lacks the key)"):
        read_quantized(fields, read_header(FileBytes(path)), set())
